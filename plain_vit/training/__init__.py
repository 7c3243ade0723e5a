"""What the training scripts in `examples/` share: data, batches, optimisation, evaluation, the folder of a run."""
