"""What timm's names of `vision_transformer_relpos.py` mean, so that their files open without timm.

Written by `make architectures` from timm 1.0.31: the entrypoints that plain-vit opens, as arguments of its
`VisionTransformerRelPos`. `tests/sources/test_timm_sweep.py` compares the table with the installed timm.
"""

from typing import Any

from ..groups import architectures_in

# What the entrypoints of a group share, then each one's name, image size and patch size (pixels), width, depth, heads
# and width of the MLP over the width. Not timm's is `norm_eps`, the epsilon that it binds to `norm_layer`.
_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"fc_norm": True, "qkv_bias": False}, """
        test_vit_relpos                             160  16    96   9   3  2
        vit_relpos_small_patch16_224                224  16   384  12   6  4
        vit_relpos_medium_patch16_224               224  16   512  12   8  4
        vit_relpos_base_patch16_224                 224  16   768  12  12  4
    """),
    ({"block_fn": "ResPostRelPosBlock", "qkv_bias": False}, """
        vit_relpos_small_patch16_rpn_224            224  16   384  12   6  4
        vit_relpos_medium_patch16_rpn_224           224  16   512  12   8  4
        vit_relpos_base_patch16_rpn_224             224  16   768  12  12  4
    """),
    ({"block_fn": "ResPostRelPosBlock"}, """
        vit_relpos_base_patch32_plus_rpn_256        256  32   896  12  14  4
    """),
    ({"class_token": True, "fc_norm": True, "qkv_bias": False}, """
        vit_relpos_base_patch16_clsgap_224          224  16   768  12  12  4
    """),
    ({"class_token": True, "global_pool": "token", "qkv_bias": False, "rel_pos_dim": 256}, """
        vit_relpos_medium_patch16_cls_224           224  16   512  12   8  4
    """),
    ({"class_token": True, "global_pool": "token", "qkv_bias": False}, """
        vit_relpos_base_patch16_cls_224             224  16   768  12  12  4
    """),
    ({"qkv_bias": False, "rel_pos_dim": 384, "shared_rel_pos": True}, """
        vit_srelpos_small_patch16_224               224  16   384  12   6  4
    """),
    ({"qkv_bias": False, "rel_pos_dim": 512, "shared_rel_pos": True}, """
        vit_srelpos_medium_patch16_224              224  16   512  12   8  4
    """),
    ({}, """
        vit_relpos_base_patch16_plus_240            240  16   896  12  14  4
    """),
]  # fmt: skip

ARCHITECTURES = architectures_in(_GROUPS)
