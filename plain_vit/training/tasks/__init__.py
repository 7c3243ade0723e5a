"""Tasks of the training loop, with their losses and evaluations."""
