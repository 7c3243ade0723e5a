"""vit-pytorch's ViT and SimpleViT of every release: layouts, live modules, checkpoints, and export."""
