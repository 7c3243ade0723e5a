"""Tasks of the training loop: what is learnt from a batch, and how it is judged."""
