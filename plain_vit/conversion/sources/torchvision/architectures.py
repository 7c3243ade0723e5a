"""torchvision's published Vision Transformers, so that their files open with nothing asked.

Written by `make architectures` from torchvision 0.29, `torchvision/models/vision_transformer.py`.
"""

TORCHVISION_VERSION = "0.29"

# The published builders: patch size in pixels, width, depth, heads, width of the MLP.
ARCHITECTURES: dict[str, tuple[int, int, int, int, int]] = {
    "vit_b_16": (16, 768, 12, 12, 3072),
    "vit_b_32": (32, 768, 12, 12, 3072),
    "vit_l_16": (16, 1024, 24, 16, 4096),
    "vit_l_32": (32, 1024, 24, 16, 4096),
    "vit_h_14": (14, 1280, 32, 16, 5120),
}

# The published files: resize of the shorter side, centre crop, interpolation, from the `transforms` of each; mean and
# deviation are ImageNet's in all of them.
FILES: dict[str, tuple[int, int, str]] = {
    "vit_b_16-c867db91": (256, 224, "bilinear"),
    "vit_b_16_swag-9ac1b537": (384, 384, "bicubic"),
    "vit_b_16_lc_swag-4e70ced5": (224, 224, "bicubic"),
    "vit_b_32-d86f8d99": (256, 224, "bilinear"),
    "vit_l_16-852ce7e3": (242, 224, "bilinear"),
    "vit_l_16_swag-4f3808c9": (512, 512, "bicubic"),
    "vit_l_16_lc_swag-4d563306": (224, 224, "bicubic"),
    "vit_l_32-c7638314": (256, 224, "bilinear"),
    "vit_h_14_swag-80465313": (518, 518, "bicubic"),
    "vit_h_14_lc_swag-c1eb923e": (224, 224, "bicubic"),
}
