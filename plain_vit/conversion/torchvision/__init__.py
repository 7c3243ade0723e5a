"""torchvision's VisionTransformer: architectures, live modules, checkpoints, and the way back."""
