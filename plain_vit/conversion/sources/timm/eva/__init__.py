"""timm's Eva: EVA and EVA-02, DINOv3, Perception Encoder and its other Vision Transformers with a rotation."""
