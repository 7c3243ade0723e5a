"""What timm's names of `naflexvit.py` mean, so that their files open without timm.

Written by `make architectures` from timm 1.0.31: the entrypoints that plain-vit opens, as arguments of its
`NaFlexVit`. `tests/sources/test_timm_sweep.py` compares the table with the installed timm.
"""

from typing import Any

from ..groups import architectures_in

# What the entrypoints of a group share, then each one's name, image size and patch size (pixels), width, depth, heads
# and width of the MLP over the width. Not timm's is `norm_eps`, the epsilon that it binds to `norm_layer`.
_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"act_layer": "gelu_tanh", "pos_embed_interp_mode": "bilinear"}, """
        naflexvit_base_patch16_siglip               256  16   768  12  12  4
        naflexvit_so400m_patch16_siglip             256  16  1152  27  16  3.7362
    """),
    ({
        "class_token": True,
        "final_norm": False,
        "global_pool": "token",
        "pos_embed_antialias": False,
        "pos_embed_ar_preserving": True,
        "pos_embed_interp_mode": "bilinear",
        "reg_tokens": 9,
    }, """
        naflexvit_so400m_patch16_radio_v4          2048  16  1152  27  16  3.736111111111111
        naflexvit_huge_patch16_radio_v4            2048  16  1280  32  16  4
    """),
    ({
        "class_token": True,
        "final_norm": False,
        "global_pool": "token",
        "init_values": 1e-05,
        "pos_embed_align_corners": True,
        "pos_embed_antialias": False,
        "pos_embed_ar_preserving": True,
        "pos_embed_interp_mode": "bilinear",
        "reg_tokens": 7,
    }, """
        naflexvit_base_patch16_radio_v3            2048  16   768  12  12  4
    """),
    ({
        "class_token": True,
        "final_norm": False,
        "global_pool": "token",
        "init_values": 1e-05,
        "pos_embed_antialias": False,
        "pos_embed_ar_preserving": True,
        "pos_embed_interp_mode": "bilinear",
        "reg_tokens": 7,
    }, """
        naflexvit_large_patch16_radio_v3           2048  16  1024  24  16  4
    """),
    ({
        "class_token": True,
        "final_norm": False,
        "global_pool": "token",
        "pos_embed_align_corners": True,
        "pos_embed_antialias": False,
        "pos_embed_ar_preserving": True,
        "pos_embed_interp_mode": "bilinear",
        "reg_tokens": 7,
    }, """
        naflexvit_huge_patch16_radio_v3            2048  16  1280  32  16  4
    """),
    ({
        "class_token": True,
        "final_norm": False,
        "global_pool": "token",
        "pos_embed_antialias": False,
        "pos_embed_ar_preserving": True,
        "pos_embed_interp_mode": "bilinear",
        "reg_tokens": 7,
    }, """
        naflexvit_giant_patch16_radio_v3           2048  16  1536  40  24  4
    """),
    ({
        "fc_norm": True,
        "global_pool": "avg",
        "init_values": 1e-05,
        "pos_embed": "factorized",
        "pos_embed_ar_preserving": True,
        "reg_tokens": 4,
    }, """
        naflexvit_base_patch16_parfac_gap           256  16   768  12  12  4
    """),
    ({
        "fc_norm": True,
        "global_pool": "avg",
        "init_values": 1e-05,
        "pos_embed_ar_preserving": True,
        "reg_tokens": 4,
    }, """
        naflexvit_base_patch16_par_gap              256  16   768  12  12  4
    """),
    ({"fc_norm": True, "global_pool": "avg", "init_values": 1e-05, "qkv_bias": False, "reg_tokens": 1}, """
        naflexvit_so150m2_patch16_reg1_gap          256  16   832  21  13  2.6153846153846154
    """),
    ({"fc_norm": True, "global_pool": "avg", "init_values": 1e-05, "reg_tokens": 4}, """
        naflexvit_base_patch16_gap                  256  16   768  12  12  4
    """),
    ({"init_values": 1e-05, "qkv_bias": False, "reg_tokens": 1}, """
        naflexvit_so150m2_patch16_reg1_map          256  16   832  21  13  2.6153846153846154
    """),
    ({"init_values": 1e-05, "reg_tokens": 1}, """
        naflexvit_base_patch16_map                  256  16   768  12  12  4
    """),
]  # fmt: skip

ARCHITECTURES = architectures_in(_GROUPS)
