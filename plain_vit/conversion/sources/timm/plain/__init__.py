"""timm's VisionTransformer and VisionTransformerDistilled."""
