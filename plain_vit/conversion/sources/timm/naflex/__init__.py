"""timm's NaFlexVit: Vision Transformers for images of many sizes, among them SigLIP 2 and C-RADIO."""
