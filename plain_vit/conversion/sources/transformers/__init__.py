"""transformers' plain Vision Transformers: families, live modules, folders, and export."""
