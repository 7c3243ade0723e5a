"""Tasks for the training loop, with their losses and evaluations."""
