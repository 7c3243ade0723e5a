"""timm's Eva: EVA, EVA-02, DINOv3, Perception Encoder and timm's other ViTs with rotary embeddings."""
