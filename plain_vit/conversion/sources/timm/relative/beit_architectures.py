"""What timm's names of `beit.py` mean, so that their files open without timm.

Written by `make architectures` from timm 1.0.31: the entrypoints that plain-vit opens, as arguments of its
`Beit`. `tests/sources/test_timm_sweep.py` compares the table with the installed timm.
"""

from typing import Any

from ..groups import architectures_in

# What the entrypoints of a group share, then each one's name, image size and patch size (pixels), width, depth, heads
# and width of the MLP over the width. Not timm's is `norm_eps`, the epsilon that it binds to `norm_layer`.
_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"init_values": 1e-05, "use_abs_pos_emb": False, "use_rel_pos_bias": True}, """
        beitv2_base_patch16_224                     224  16   768  12  12  4
        beit_large_patch16_224                      224  16  1024  24  16  4
        beit_large_patch16_384                      384  16  1024  24  16  4
        beit_large_patch16_512                      512  16  1024  24  16  4
        beitv2_large_patch16_224                    224  16  1024  24  16  4
    """),
    ({"init_values": 0.1, "use_abs_pos_emb": False, "use_rel_pos_bias": True}, """
        beit_base_patch16_224                       224  16   768  12  12  4
        beit_base_patch16_384                       384  16   768  12  12  4
    """),
]  # fmt: skip

ARCHITECTURES = architectures_in(_GROUPS)
