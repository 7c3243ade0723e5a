"""The machine: optional packages, a description of the environment, and calls of the operating system."""
