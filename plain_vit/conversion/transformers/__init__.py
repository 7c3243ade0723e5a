"""transformers' plain Vision Transformers: families, live modules, folders, and the way back."""
