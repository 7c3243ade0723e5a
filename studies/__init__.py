"""The experiments of the Vision Transformer papers, run by the training scripts; see README.md in this folder."""
