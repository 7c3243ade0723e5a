"""What the machine has: optional packages, the environment that is recorded, and calls of the operating system."""
