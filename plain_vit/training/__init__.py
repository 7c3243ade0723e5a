"""Parts that the training scripts in `examples/` share: the loop and its tasks, data, optimisation, folders of runs."""
