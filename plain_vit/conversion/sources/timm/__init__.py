"""timm's plain Vision Transformers: arguments and architectures, live modules, checkpoints, and export."""
