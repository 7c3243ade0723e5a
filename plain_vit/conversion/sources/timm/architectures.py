"""What timm's names of plain Vision Transformers mean, so that their files open without timm.

Written by `make architectures` from timm 1.0.31: all entrypoints of its `vision_transformer.py` and
`deit.py`, and the paper's hybrids of `vision_transformer_hybrid.py`, as arguments of its `VisionTransformer`.
`tests/sources/test_timm_architectures.py` compares the table with the installed timm.
"""

from typing import Any

from .groups import architectures_in

TIMM_VERSION = "1.0.31"

# What the entrypoints of a group share, then each one's name, image size and patch size (pixels), width, depth, heads
# and width of the MLP over the width. Three arguments are not timm's: `distilled` names the class with a distillation
# token, `norm_eps` the epsilon that timm binds to `norm_layer`, `stem_depths` the stages of a hybrid's ResNet.
_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({}, """
        test_vit                                    160  16    64   6   2  3
        deit_tiny_patch16_224                       224  16   192  12   3  4
        vit_tiny_patch16_224                        224  16   192  12   3  4
        vit_tiny_patch16_384                        384  16   192  12   3  4
        deit_small_patch16_224                      224  16   384  12   6  4
        vit_small_patch16_224                       224  16   384  12   6  4
        vit_small_patch16_384                       384  16   384  12   6  4
        vit_small_patch32_224                       224  32   384  12   6  4
        vit_small_patch32_384                       384  32   384  12   6  4
        vit_small_patch8_224                        224   8   384  12   6  4
        deit_base_patch16_224                       224  16   768  12  12  4
        deit_base_patch16_384                       384  16   768  12  12  4
        vit_base_patch16_224                        224  16   768  12  12  4
        vit_base_patch16_384                        384  16   768  12  12  4
        vit_base_patch32_224                        224  32   768  12  12  4
        vit_base_patch32_384                        384  32   768  12  12  4
        vit_base_patch8_224                         224   8   768  12  12  4
        vit_large_patch14_224                       224  14  1024  24  16  4
        vit_large_patch16_224                       224  16  1024  24  16  4
        vit_large_patch16_384                       384  16  1024  24  16  4
        vit_large_patch32_224                       224  32  1024  24  16  4
        vit_large_patch32_384                       384  32  1024  24  16  4
        vit_huge_patch14_224                        224  14  1280  32  16  4
        vit_giant_patch14_224                       224  14  1408  40  16  4.363636363636363
        vit_gigantic_patch14_224                    224  14  1664  48  16  4.923076923076923
    """),
    ({"norm_eps": 1e-05, "pre_norm": True}, """
        vit_xsmall_patch16_clip_224                 224  16   256  10   4  4
        vit_medium_patch16_clip_224                 224  16   512  12   8  4
        vit_medium_patch32_clip_224                 224  32   512  12   8  4
        vit_betwixt_patch32_clip_224                224  32   640  12  10  4
        vit_base_patch16_clip_224                   224  16   768  12  12  4
        vit_base_patch16_clip_384                   384  16   768  12  12  4
        vit_base_patch32_clip_224                   224  32   768  12  12  4
        vit_base_patch32_clip_256                   256  32   768  12  12  4
        vit_base_patch32_clip_384                   384  32   768  12  12  4
        vit_base_patch32_clip_448                   448  32   768  12  12  4
        vit_base_patch16_plus_clip_240              240  16   896  12  14  4
        vit_large_patch14_clip_224                  224  14  1024  24  16  4
        vit_large_patch14_clip_336                  336  14  1024  24  16  4
        vit_huge_patch14_clip_224                   224  14  1280  32  16  4
        vit_huge_patch14_clip_336                   336  14  1280  32  16  4
        vit_huge_patch14_clip_378                   378  14  1280  32  16  4
        vit_giant_patch14_clip_224                  224  14  1408  40  16  4.363636363636363
        vit_gigantic_patch14_clip_224               224  14  1664  48  16  4.923076923076923
        vit_gigantic_patch14_clip_378               378  14  1664  48  16  4.923076923076923
    """),
    ({"class_token": False, "fc_norm": False, "global_pool": "avg"}, """
        vit_base_patch16_gap_224                    224  16   768  12  16  4
        vit_base_patch16_siglip_gap_224             224  16   768  12  12  4
        vit_base_patch16_siglip_gap_256             256  16   768  12  12  4
        vit_base_patch16_siglip_gap_384             384  16   768  12  12  4
        vit_base_patch16_siglip_gap_512             512  16   768  12  12  4
        vit_large_patch16_siglip_gap_256            256  16  1024  24  16  4
        vit_large_patch16_siglip_gap_384            384  16  1024  24  16  4
        vit_so400m_patch14_siglip_gap_224           224  14  1152  27  16  3.7362
        vit_so400m_patch14_siglip_gap_378           378  14  1152  27  16  3.7362
        vit_so400m_patch14_siglip_gap_384           384  14  1152  27  16  3.7362
        vit_so400m_patch14_siglip_gap_448           448  14  1152  27  16  3.7362
        vit_so400m_patch14_siglip_gap_896           896  14  1152  27  16  3.7362
        vit_huge_patch14_gap_224                    224  14  1280  32  16  4
        vit_huge_patch16_gap_448                    448  16  1280  32  16  4
        vit_giant_patch16_gap_224                   224  16  1408  40  16  4.363636363636363
    """),
    ({
        "act_layer": "silu",
        "class_token": False,
        "embed_norm_layer": "rmsnorm",
        "fc_norm": False,
        "global_pool": "avg",
        "mlp_layer": "SwiGLU",
        "norm_eps": 1e-05,
        "norm_layer": "rmsnorm",
        "proj_bias": False,
        "qkv_bias": False,
    }, """
        aimv2_large_patch14_224                     224  14  1024  24   8  2.75
        aimv2_large_patch14_336                     336  14  1024  24   8  2.75
        aimv2_large_patch14_448                     448  14  1024  24   8  2.75
        aimv2_huge_patch14_224                      224  14  1536  24  12  2.6667
        aimv2_huge_patch14_336                      336  14  1536  24  12  2.6667
        aimv2_huge_patch14_448                      448  14  1536  24  12  2.6667
        aimv2_1b_patch14_224                        224  14  2048  24  16  2.75
        aimv2_1b_patch14_336                        336  14  2048  24  16  2.75
        aimv2_1b_patch14_448                        448  14  2048  24  16  2.75
        aimv2_3b_patch14_224                        224  14  3072  24  24  2.6667
        aimv2_3b_patch14_336                        336  14  3072  24  24  2.6667
        aimv2_3b_patch14_448                        448  14  3072  24  24  2.6667
    """),
    ({"class_token": False, "global_pool": "map"}, """
        vit_base_patch16_siglip_224                 224  16   768  12  12  4
        vit_base_patch16_siglip_256                 256  16   768  12  12  4
        vit_base_patch16_siglip_384                 384  16   768  12  12  4
        vit_base_patch16_siglip_512                 512  16   768  12  12  4
        vit_large_patch16_siglip_256                256  16  1024  24  16  4
        vit_large_patch16_siglip_384                384  16  1024  24  16  4
        vit_so400m_patch14_siglip_224               224  14  1152  27  16  3.7362
        vit_so400m_patch14_siglip_378               378  14  1152  27  16  3.7362
        vit_so400m_patch14_siglip_384               384  14  1152  27  16  3.7362
    """),
    ({"init_values": 1e-06, "no_embed_class": True}, """
        deit3_small_patch16_224                     224  16   384  12   6  4
        deit3_small_patch16_384                     384  16   384  12   6  4
        deit3_medium_patch16_224                    224  16   512  12   8  4
        deit3_base_patch16_224                      224  16   768  12  12  4
        deit3_base_patch16_384                      384  16   768  12  12  4
        deit3_large_patch16_224                     224  16  1024  24  16  4
        deit3_large_patch16_384                     384  16  1024  24  16  4
        deit3_huge_patch14_224                      224  14  1280  32  16  4
    """),
    ({"act_layer": "gelu_tanh", "class_token": False, "fc_norm": False, "global_pool": "avg"}, """
        vit_base_patch32_siglip_gap_256             256  32   768  12  12  4
        vit_large_patch16_siglip_gap_512            512  16  1024  24  16  4
        vit_so400m_patch16_siglip_gap_256           256  16  1152  27  16  3.7362
        vit_so400m_patch16_siglip_gap_384           384  16  1152  27  16  3.7362
        vit_so400m_patch16_siglip_gap_512           512  16  1152  27  16  3.7362
        vit_giantopt_patch16_siglip_gap_256         256  16  1536  40  16  4
        vit_giantopt_patch16_siglip_gap_384         384  16  1536  40  16  4
    """),
    ({"act_layer": "gelu_tanh", "class_token": False, "global_pool": "map"}, """
        vit_base_patch32_siglip_256                 256  32   768  12  12  4
        vit_large_patch16_siglip_512                512  16  1024  24  16  4
        vit_so400m_patch16_siglip_256               256  16  1152  27  16  3.7362
        vit_so400m_patch16_siglip_384               384  16  1152  27  16  3.7362
        vit_so400m_patch16_siglip_512               512  16  1152  27  16  3.7362
        vit_giantopt_patch16_siglip_256             256  16  1536  40  16  4
        vit_giantopt_patch16_siglip_384             384  16  1536  40  16  4
    """),
    ({"act_layer": "quick_gelu", "norm_eps": 1e-05, "pre_norm": True}, """
        vit_base_patch16_clip_quickgelu_224         224  16   768  12  12  4
        vit_base_patch32_clip_quickgelu_224         224  32   768  12  12  4
        vit_large_patch14_clip_quickgelu_224        224  14  1024  24  16  4
        vit_large_patch14_clip_quickgelu_336        336  14  1024  24  16  4
        vit_huge_patch14_clip_quickgelu_224         224  14  1280  32  16  4
        vit_huge_patch14_clip_quickgelu_378         378  14  1280  32  16  4
        vit_gigantic_patch14_clip_quickgelu_224     224  14  1664  48  16  4.923076923076923
    """),
    ({"class_token": False, "global_pool": "avg", "init_values": 1e-05, "no_embed_class": True, "reg_tokens": 4}, """
        vit_little_patch16_reg4_gap_256             256  16   320  14   5  5.6
        vit_medium_patch16_reg4_gap_256             256  16   512  12   8  4
        vit_mediumd_patch16_reg4_gap_256            256  16   512  20   8  4
        vit_mediumd_patch16_reg4_gap_384            384  16   512  20   8  4
        vit_betwixt_patch16_reg4_gap_256            256  16   640  12  10  4
        vit_betwixt_patch16_reg4_gap_384            384  16   640  12  10  4
    """),
    ({"init_values": 1e-05}, """
        vit_small_patch14_dinov2                    518  14   384  12   6  4
        vit_small_patch16_36x1_224                  224  16   384  36   6  4
        vit_base_patch14_dinov2                     518  14   768  12  12  4
        vit_base_patch16_plus_240                   240  16   896  12  14  4
        vit_base_patch32_plus_256                   256  32   896  12  14  4
        vit_large_patch14_dinov2                    518  14  1024  24  16  4
    """),
    ({"class_token": False, "fc_norm": False, "global_pool": "avg", "init_values": 1e-06, "qkv_bias": False}, """
        vit_medium_patch16_gap_240                  240  16   512  12   8  4
        vit_medium_patch16_gap_256                  256  16   512  12   8  4
        vit_medium_patch16_gap_384                  384  16   512  12   8  4
        vit_betwixt_patch16_gap_256                 256  16   640  12  10  4
    """),
    ({"class_token": False, "global_pool": "avg", "init_values": 1e-05, "no_embed_class": True, "reg_tokens": 1}, """
        vit_wee_patch16_reg1_gap_256                256  16   256  14   4  5
        vit_little_patch16_reg1_gap_256             256  16   320  14   5  5.6
        vit_medium_patch16_reg1_gap_256             256  16   512  12   8  4
        vit_betwixt_patch16_reg1_gap_256            256  16   640  12  10  4
    """),
    ({"distilled": True}, """
        deit_tiny_distilled_patch16_224             224  16   192  12   3  4
        deit_small_distilled_patch16_224            224  16   384  12   6  4
        deit_base_distilled_patch16_224             224  16   768  12  12  4
        deit_base_distilled_patch16_384             384  16   768  12  12  4
    """),
    ({"global_pool": "avg", "norm_eps": 1e-05, "scale_attn_norm": True, "scale_mlp_norm": True}, """
        beit3_base_patch16_224                      224  16   768  12  12  4
        beit3_large_patch16_224                     224  16  1024  24  16  4
        beit3_giant_patch14_224                     224  14  1408  40  16  4.3637
        beit3_giant_patch14_336                     336  14  1408  40  16  4.3637
    """),
    ({
        "block_fn": "ParallelScalingBlock",
        "no_embed_class": True,
        "norm_layer": "rmsnorm",
        "pre_norm": True,
        "qk_norm": True,
        "qkv_bias": False,
    }, """
        vit_base_patch16_xp_224                     224  16   768  12  12  4
        vit_large_patch14_xp_224                    224  14  1024  24  16  4
        vit_huge_patch14_xp_224                     224  14  1280  32  16  4
    """),
    ({"class_token": False, "global_pool": "avg", "init_values": 1e-05, "qkv_bias": False, "reg_tokens": 1}, """
        vit_so150m2_patch16_reg1_gap_256            256  16   832  21  13  2.6153846153846154
        vit_so150m2_patch16_reg1_gap_384            384  16   832  21  13  2.6153846153846154
        vit_so150m2_patch16_reg1_gap_448            448  16   832  21  13  2.6153846153846154
    """),
    ({"init_values": 1.0, "no_embed_class": True, "reg_tokens": 1}, """
        vit_base_patch14_reg1_tipsv2                448  14   768  12  12  4
        vit_large_patch14_reg1_tipsv2               448  14  1024  24  16  4
        vit_so400m_patch14_reg1_tipsv2              448  14  1152  27  16  3.736111111111111
    """),
    ({"init_values": 1e-05, "no_embed_class": True, "reg_tokens": 4}, """
        vit_small_patch14_reg4_dinov2               518  14   384  12   6  4
        vit_base_patch14_reg4_dinov2                518  14   768  12  12  4
        vit_large_patch14_reg4_dinov2               518  14  1024  24  16  4
    """),
    ({"no_embed_class": True}, """
        flexivit_small                              240  16   384  12   6  4
        flexivit_base                               240  16   768  12  12  4
        flexivit_large                              240  16  1024  24  16  4
    """),
    ({"stem_depths": (2, 2, 2, 2)}, """
        vit_small_r26_s32_224                       224  32   384  12   6  4
        vit_small_r26_s32_384                       384  32   384  12   6  4
        vit_base_r26_s32_224                        224  32   768  12  12  4
    """),
    ({
        "attn_layer": "diff",
        "class_token": False,
        "global_pool": "avg",
        "init_values": 1e-05,
        "no_embed_class": True,
        "reg_tokens": 1,
    }, """
        vit_dwee_patch16_reg1_gap_256               256  16   256  14   4  5
        vit_dlittle_patch16_reg1_gap_256            256  16   320  14   5  5.6
    """),
    ({"block_fn": "ParallelThingsBlock", "init_values": 1e-05}, """
        vit_small_patch16_18x2_224                  224  16   384  18   6  4
        vit_base_patch16_18x2_224                   224  16   768  18  12  4
    """),
    ({"class_token": False, "fc_norm": False, "global_pool": "avg", "reg_tokens": 4}, """
        vit_so150m_patch16_reg4_gap_256             256  16   896  18  14  2.572
        vit_so150m_patch16_reg4_gap_384             384  16   896  18  14  2.572
    """),
    ({"final_norm": False, "init_values": 1e-05, "no_embed_class": True, "reg_tokens": 7}, """
        vit_base_patch16_radio_v3                   512  16   768  12  12  4
        vit_large_patch16_radio_v3                  512  16  1024  24  16  4
    """),
    ({"final_norm": False, "no_embed_class": True, "reg_tokens": 7}, """
        vit_huge_patch16_radio_v3                   512  16  1280  32  16  4
        vit_giant_patch16_radio_v3                  512  16  1536  40  24  4
    """),
    ({"final_norm": False, "no_embed_class": True, "reg_tokens": 9}, """
        vit_so400m_patch16_radio_v4                 512  16  1152  27  16  3.736111111111111
        vit_huge_patch16_radio_v4                   512  16  1280  32  16  4
    """),
    ({"global_pool": "avg"}, """
        eva_large_patch14_196                       196  14  1024  24  16  4
        eva_large_patch14_336                       336  14  1024  24  16  4
    """),
    ({"stem_depths": ()}, """
        vit_tiny_r_s16_p8_224                       224  32   192  12   3  4
        vit_tiny_r_s16_p8_384                       384  32   192  12   3  4
    """),
    ({"stem_depths": (3, 4, 6, 3)}, """
        vit_large_r50_s32_224                       224  32  1024  24  16  4
        vit_large_r50_s32_384                       384  32  1024  24  16  4
    """),
    ({"stem_depths": (3, 4, 9)}, """
        vit_base_r50_s16_224                        224  16   768  12  12  4
        vit_base_r50_s16_384                        384  16   768  12  12  4
    """),
    ({
        "act_layer": "silu",
        "init_values": 1.0,
        "mlp_layer": "SwiGLUPacked",
        "no_embed_class": True,
        "reg_tokens": 1,
    }, """
        vit_giant_patch14_reg1_tipsv2               448  14  1536  40  24  5.33334
    """),
    ({
        "act_layer": "silu",
        "init_values": 1e-05,
        "mlp_layer": "SwiGLUPacked",
        "no_embed_class": True,
        "reg_tokens": 4,
    }, """
        vit_giant_patch14_reg4_dinov2               518  14  1536  40  24  5.33334
    """),
    ({"act_layer": "silu", "init_values": 1e-05, "mlp_layer": "SwiGLUPacked"}, """
        vit_giant_patch14_dinov2                    518  14  1536  40  24  5.33334
    """),
    ({
        "block_fn": "DiffParallelScalingBlock",
        "class_token": False,
        "global_pool": "avg",
        "init_values": 1e-05,
        "no_embed_class": True,
        "reg_tokens": 1,
    }, """
        vit_dpwee_patch16_reg1_gap_256              256  16   256  16   4  5
    """),
    ({
        "block_fn": "ParallelScalingBlock",
        "class_token": False,
        "global_pool": "avg",
        "init_values": 1e-05,
        "no_embed_class": True,
        "reg_tokens": 1,
    }, """
        vit_pwee_patch16_reg1_gap_256               256  16   256  16   4  5
    """),
    ({
        "block_fn": "ResPostBlock",
        "class_token": False,
        "global_pool": "avg",
        "init_values": 1e-05,
        "qkv_bias": False,
    }, """
        vit_base_patch16_rpn_224                    224  16   768  12  12  4
    """),
    ({"class_token": False, "global_pool": "avg", "init_values": 1e-05, "norm_layer": "rmsnorm", "reg_tokens": 1}, """
        test_vit4                                   160  16    96   9   3  3
    """),
    ({"class_token": False, "global_pool": "avg", "init_values": 1e-05, "reg_tokens": 1}, """
        test_vit2                                   160  16    64   8   2  3
    """),
    ({"class_token": False, "global_pool": "avg", "no_embed_class": True, "reg_tokens": 4}, """
        vit_base_patch16_reg4_gap_256               256  16   768  12  12  4
    """),
    ({
        "class_token": False,
        "global_pool": "map",
        "init_values": 1e-05,
        "pool_include_prefix": True,
        "reg_tokens": 1,
    }, """
        test_vit3                                   160  16    96   9   3  2
    """),
    ({"class_token": False, "global_pool": "map", "reg_tokens": 4}, """
        vit_so150m_patch16_reg4_map_256             256  16   896  18  14  2.572
    """),
    ({"final_norm": False, "init_values": 0.1}, """
        vit_intern300m_patch14_448                  448  14  1024  24  16  4
    """),
    ({"qkv_bias": False}, """
        vit_base_patch16_224_miil                   224  16   768  12  12  4
    """),
]  # fmt: skip

ARCHITECTURES = architectures_in(_GROUPS)

# Those whose models take images of other sizes than their own.
ANY_SIZE = ("test_vit", "test_vit2", "test_vit4", "vit_intern300m_patch14_448")

# Names of earlier releases that today's timm still maps, and that older folders carry.
OLD_NAMES: dict[str, str] = {
    "vit_tiny_patch16_224_in21k": "vit_tiny_patch16_224",
    "vit_small_patch32_224_in21k": "vit_small_patch32_224",
    "vit_small_patch16_224_in21k": "vit_small_patch16_224",
    "vit_base_patch32_224_in21k": "vit_base_patch32_224",
    "vit_base_patch16_224_in21k": "vit_base_patch16_224",
    "vit_base_patch8_224_in21k": "vit_base_patch8_224",
    "vit_large_patch32_224_in21k": "vit_large_patch32_224",
    "vit_large_patch16_224_in21k": "vit_large_patch16_224",
    "vit_huge_patch14_224_in21k": "vit_huge_patch14_224",
    "vit_base_patch32_224_sam": "vit_base_patch32_224",
    "vit_base_patch16_224_sam": "vit_base_patch16_224",
    "vit_small_patch16_224_dino": "vit_small_patch16_224",
    "vit_small_patch8_224_dino": "vit_small_patch8_224",
    "vit_base_patch16_224_dino": "vit_base_patch16_224",
    "vit_base_patch8_224_dino": "vit_base_patch8_224",
    "vit_base_patch16_224_miil_in21k": "vit_base_patch16_224_miil",
    "vit_base_patch32_224_clip_laion2b": "vit_base_patch32_clip_224",
    "vit_large_patch14_224_clip_laion2b": "vit_large_patch14_clip_224",
    "vit_huge_patch14_224_clip_laion2b": "vit_huge_patch14_clip_224",
    "vit_giant_patch14_224_clip_laion2b": "vit_giant_patch14_clip_224",
    "deit3_small_patch16_224_in21ft1k": "deit3_small_patch16_224",
    "deit3_small_patch16_384_in21ft1k": "deit3_small_patch16_384",
    "deit3_medium_patch16_224_in21ft1k": "deit3_medium_patch16_224",
    "deit3_base_patch16_224_in21ft1k": "deit3_base_patch16_224",
    "deit3_base_patch16_384_in21ft1k": "deit3_base_patch16_384",
    "deit3_large_patch16_224_in21ft1k": "deit3_large_patch16_224",
    "deit3_large_patch16_384_in21ft1k": "deit3_large_patch16_384",
    "deit3_huge_patch14_224_in21ft1k": "deit3_huge_patch14_224",
    "vit_tiny_r_s16_p8_224_in21k": "vit_tiny_r_s16_p8_224",
    "vit_small_r26_s32_224_in21k": "vit_small_r26_s32_224",
    "vit_base_r50_s16_224_in21k": "vit_base_r50_s16_224",
    "vit_base_resnet50_224_in21k": "vit_base_r50_s16_224",
    "vit_large_r50_s32_224_in21k": "vit_large_r50_s32_224",
    "vit_base_resnet50_384": "vit_base_r50_s16_384",
}

# Published files whose names end in the first digits of their SHA-256, and the model and tag that each holds.
PUBLISHED_FILES: dict[str, str] = {
    "deit_base_distilled_patch16_224-df68dfff": "deit_base_distilled_patch16_224.fb_in1k",
    "deit_base_distilled_patch16_384-d0272ac0": "deit_base_distilled_patch16_384.fb_in1k",
    "deit_base_patch16_224-b5f2ef4d": "deit_base_patch16_224.fb_in1k",
    "deit_base_patch16_384-8de9b5d1": "deit_base_patch16_384.fb_in1k",
    "deit_small_distilled_patch16_224-649709d9": "deit_small_distilled_patch16_224.fb_in1k",
    "deit_small_patch16_224-cd65a155": "deit_small_patch16_224.fb_in1k",
    "deit_tiny_distilled_patch16_224-b40b3cf7": "deit_tiny_distilled_patch16_224.fb_in1k",
    "deit_tiny_patch16_224-a1311bcf": "deit_tiny_patch16_224.fb_in1k",
    "jx_vit_base_p16_224-80ecf9dd": "vit_base_patch16_224.orig_in21k_ft_in1k",
    "jx_vit_base_p16_384-83fb41ba": "vit_base_patch16_384.orig_in21k_ft_in1k",
    "jx_vit_base_resnet50_384-9fd3c705": "vit_base_r50_s16_384.orig_in21k_ft_in1k",
    "jx_vit_large_p32_384-9b920ba8": "vit_large_patch32_384.orig_in21k_ft_in1k",
    "vit_base_patch16_224_1k_miil_84_4-2deb18e3": "vit_base_patch16_224_miil.in21k_ft_in1k",
    "vit_base_patch16_224_in21k_miil-887286df": "vit_base_patch16_224_miil.in21k",
    "vit_base_patch16_rpn_224-sw-3b07e89d": "vit_base_patch16_rpn_224.sw_in1k",
}
