"""torchvision's VisionTransformer: architectures, live modules, checkpoints, and export."""
