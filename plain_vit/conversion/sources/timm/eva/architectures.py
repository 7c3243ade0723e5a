"""What timm's names of `eva.py` mean, so that their files open without timm.

Written by `make architectures` from timm 1.0.31: the entrypoints that plain-vit opens, as arguments of its
`Eva`. `tests/sources/test_timm_sweep.py` compares the table with the installed timm.
"""

from typing import Any

from ..groups import architectures_in

# What the entrypoints of a group share, then each one's name, image size and patch size (pixels), width, depth, heads
# and width of the MLP over the width. Not timm's is `norm_eps`, the epsilon that it binds to `norm_layer`.
_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({
        "attn_type": "rope",
        "norm_eps": 1e-05,
        "ref_feat_shape": (32, 32),
        "rope_grid_indexing": "xy",
        "rope_grid_offset": 1.0,
        "use_fc_norm": False,
        "use_post_transformer_norm": False,
        "use_pre_transformer_norm": True,
        "use_rot_pos_emb": True,
    }, """
        vit_pe_spatial_tiny_patch16_512             512  16   192  12   3  4
        vit_pe_spatial_small_patch16_512            512  16   384  12   6  4
        vit_pe_spatial_base_patch16_512             512  16   768  12  12  4
        vit_pe_spatial_large_patch14_448            448  14  1024  24  16  4
    """),
    ({
        "dynamic_img_size": True,
        "init_values": 1e-05,
        "norm_eps": 1e-05,
        "num_reg_tokens": 4,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_tiny_patch16_dinov3_qkvb                256  16   192  12   3  4
        vit_small_patch16_dinov3_qkvb               256  16   384  12   6  4
        vit_base_patch16_dinov3_qkvb                256  16   768  12  12  4
        vit_large_patch16_dinov3_qkvb               256  16  1024  24  16  4
    """),
    ({
        "qkv_fused": False,
        "ref_feat_shape": (16, 16),
        "scale_mlp": True,
        "swiglu_mlp": True,
        "use_rot_pos_emb": True,
    }, """
        eva02_base_patch14_224                      224  14   768  12  12  2.6666666666666665
        eva02_base_patch14_448                      448  14   768  12  12  2.6666666666666665
        eva02_large_patch14_224                     224  14  1024  24  16  2.6666666666666665
        eva02_large_patch14_448                     448  14  1024  24  16  2.6666666666666665
    """),
    ({"ref_feat_shape": (16, 16), "swiglu_mlp": True, "use_rot_pos_emb": True}, """
        eva02_tiny_patch14_224                      224  14   192  12   3  2.6666666666666665
        eva02_tiny_patch14_336                      336  14   192  12   3  2.6666666666666665
        eva02_small_patch14_224                     224  14   384  12   6  2.6666666666666665
        eva02_small_patch14_336                     336  14   384  12   6  2.6666666666666665
    """),
    ({
        "attn_pool_mlp_ratio": 4.0,
        "attn_pool_num_heads": 8,
        "attn_type": "rope",
        "global_pool": "map",
        "norm_eps": 1e-05,
        "ref_feat_shape": (24, 24),
        "rope_grid_indexing": "xy",
        "rope_grid_offset": 1.0,
        "use_pre_transformer_norm": True,
        "use_rot_pos_emb": True,
    }, """
        vit_pe_core_tiny_patch16_384                384  16   192  12   3  4
        vit_pe_core_small_patch16_384               384  16   384  12   6  4
        vit_pe_core_large_patch14_336               336  14  1024  24  16  4
    """),
    ({
        "attn_type": "rope",
        "global_pool": "token",
        "init_values": 1e-05,
        "no_embed_class": True,
        "rope_grid_indexing": "xy",
        "rope_temperature": 10.0,
        "rope_type": "mixed",
        "use_rot_pos_emb": True,
    }, """
        vit_small_patch16_rope_mixed_ape_224        224  16   384  12   6  4
        vit_base_patch16_rope_mixed_ape_224         224  16   768  12  12  4
        vit_large_patch16_rope_mixed_ape_224        224  16  1024  24  16  4
    """),
    ({
        "attn_type": "rope",
        "global_pool": "token",
        "init_values": 1e-05,
        "no_embed_class": True,
        "rope_grid_indexing": "xy",
        "rope_temperature": 100.0,
        "use_rot_pos_emb": True,
    }, """
        vit_small_patch16_rope_ape_224              224  16   384  12   6  4
        vit_base_patch16_rope_ape_224               224  16   768  12  12  4
        vit_large_patch16_rope_ape_224              224  16  1024  24  16  4
    """),
    ({
        "attn_type": "rope",
        "global_pool": "token",
        "init_values": 1e-05,
        "rope_grid_indexing": "xy",
        "rope_temperature": 10.0,
        "rope_type": "mixed",
        "use_abs_pos_emb": False,
        "use_rot_pos_emb": True,
    }, """
        vit_small_patch16_rope_mixed_224            224  16   384  12   6  4
        vit_base_patch16_rope_mixed_224             224  16   768  12  12  4
        vit_large_patch16_rope_mixed_224            224  16  1024  24  16  4
    """),
    ({
        "dynamic_img_size": True,
        "global_pool": "token",
        "init_values": 1e-05,
        "norm_eps": 1e-05,
        "num_reg_tokens": 4,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_small_patch16_lingbot                   512  16   384  12   6  4
        vit_base_patch16_lingbot                    512  16   768  12  12  4
        vit_large_patch16_lingbot                   512  16  1024  24  16  4
    """),
    ({
        "dynamic_img_size": True,
        "init_values": 1e-05,
        "norm_eps": 1e-05,
        "num_reg_tokens": 4,
        "qkv_bias": False,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_small_patch16_dinov3                    256  16   384  12   6  4
        vit_base_patch16_dinov3                     256  16   768  12  12  4
        vit_large_patch16_dinov3                    256  16  1024  24  16  4
    """),
    ({
        "global_pool": "token",
        "qkv_fused": False,
        "ref_feat_shape": (16, 16),
        "scale_attn_inner": True,
        "scale_mlp": True,
        "swiglu_mlp": True,
        "use_rot_pos_emb": True,
    }, """
        eva02_base_patch16_clip_224                 224  16   768  12  12  2.6666666666666665
        eva02_large_patch14_clip_224                224  14  1024  24  16  2.6666666666666665
        eva02_large_patch14_clip_336                336  14  1024  24  16  2.6666666666666665
    """),
    ({}, """
        eva_giant_patch14_224                       224  14  1408  40  16  4.363636363636363
        eva_giant_patch14_336                       336  14  1408  40  16  4.363636363636363
        eva_giant_patch14_560                       560  14  1408  40  16  4.363636363636363
    """),
    ({
        "attn_type": "rope",
        "class_token": False,
        "init_values": 0.1,
        "norm_eps": 1e-05,
        "ref_feat_shape": (32, 32),
        "rope_grid_indexing": "xy",
        "use_fc_norm": False,
        "use_post_transformer_norm": False,
        "use_pre_transformer_norm": True,
        "use_rot_pos_emb": True,
    }, """
        vit_pe_lang_gigantic_patch14_448            448  14  1536  47  16  5.833333333333333
        vit_pe_spatial_gigantic_patch14_448         448  14  1536  50  16  5.833333333333333
    """),
    ({
        "attn_type": "rope",
        "global_pool": "token",
        "init_values": 1e-05,
        "rope_grid_indexing": "xy",
        "rope_temperature": 100.0,
        "use_abs_pos_emb": False,
        "use_rot_pos_emb": True,
    }, """
        vit_small_patch16_rope_224                  224  16   384  12   6  4
        vit_large_patch16_rope_224                  224  16  1024  24  16  4
    """),
    ({
        "class_token": False,
        "init_values": 1e-05,
        "num_reg_tokens": 1,
        "ref_feat_shape": (16, 16),
        "use_abs_pos_emb": False,
        "use_rot_pos_emb": True,
    }, """
        vit_medium_patch16_rope_reg1_gap_256        256  16   512  12   8  4
        vit_base_patch16_rope_reg1_gap_256          256  16   768  12  12  4
    """),
    ({
        "dynamic_img_size": True,
        "init_values": 1e-05,
        "norm_eps": 1e-05,
        "num_reg_tokens": 4,
        "qkv_bias": False,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_align_to": 8,
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_small_plus_patch16_dinov3               256  16   384  12   6  4
        vit_huge_plus_patch16_dinov3                256  16  1280  32  20  4
    """),
    ({
        "dynamic_img_size": True,
        "init_values": 1e-05,
        "norm_eps": 1e-05,
        "num_reg_tokens": 4,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_align_to": 8,
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_small_plus_patch16_dinov3_qkvb          256  16   384  12   6  4
        vit_huge_plus_patch16_dinov3_qkvb           256  16  1280  32  20  4
    """),
    ({
        "attn_only_layer_scale": True,
        "attn_type": "rope",
        "dynamic_img_size": True,
        "global_pool": "token",
        "init_values": 1.0,
        "norm_layer": "rmsnorm",
        "num_kv_heads": (12,) * 12,
        "num_reg_tokens": 8,
        "qk_norm": True,
        "qkv_fused": False,
        "rope_rescale_coords": 2.0,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_base_patch16_sapiens2                  1024x768  16   768  12  12  4
    """),
    ({
        "attn_only_layer_scale": True,
        "attn_type": "rope",
        "dynamic_img_size": True,
        "global_pool": "token",
        "init_values": 1.0,
        "norm_layer": "rmsnorm",
        "num_kv_heads": (16,) * 8 + (8,) * 8 + (16,) * 8,
        "num_reg_tokens": 8,
        "qk_norm": True,
        "qkv_fused": False,
        "rope_rescale_coords": 2.0,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_large_patch16_sapiens2                 1024x768  16  1024  24  16  4
    """),
    ({
        "attn_only_layer_scale": True,
        "attn_type": "rope",
        "dynamic_img_size": True,
        "global_pool": "token",
        "init_values": 1.0,
        "norm_layer": "rmsnorm",
        "num_kv_heads": (16,) * 8 + (8,) * 16 + (16,) * 8,
        "num_reg_tokens": 8,
        "qk_norm": True,
        "qkv_fused": False,
        "rope_rescale_coords": 2.0,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_huge_patch16_sapiens2                  1024x768  16  1280  32  16  4
    """),
    ({
        "attn_only_layer_scale": True,
        "attn_type": "rope",
        "dynamic_img_size": True,
        "global_pool": "token",
        "init_values": 1.0,
        "norm_layer": "rmsnorm",
        "num_kv_heads": (24,) * 8 + (12,) * 24 + (24,) * 8,
        "num_reg_tokens": 8,
        "qk_norm": True,
        "qkv_fused": False,
        "rope_rescale_coords": 2.0,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_giant_patch16_sapiens2                 1024x768  16  1536  40  24  4
    """),
    ({
        "attn_only_layer_scale": True,
        "attn_type": "rope",
        "dynamic_img_size": True,
        "global_pool": "token",
        "init_values": 1.0,
        "norm_layer": "rmsnorm",
        "num_kv_heads": (32,) * 8 + (16,) * 40 + (32,) * 8,
        "num_reg_tokens": 8,
        "qk_norm": True,
        "qkv_fused": False,
        "rope_rescale_coords": 2.0,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_5b_patch16_sapiens2                    1024x768  16  2432  56  32  4
    """),
    ({
        "attn_pool_mlp_ratio": 4.0,
        "attn_pool_num_heads": 8,
        "attn_type": "rope",
        "class_token": False,
        "global_pool": "map",
        "norm_eps": 1e-05,
        "ref_feat_shape": (32, 32),
        "rope_grid_indexing": "xy",
        "use_pre_transformer_norm": True,
        "use_rot_pos_emb": True,
    }, """
        vit_pe_core_gigantic_patch14_448            448  14  1536  50  16  5.833333333333333
    """),
    ({
        "attn_pool_mlp_ratio": 4.0,
        "attn_pool_num_heads": 8,
        "attn_type": "rope",
        "global_pool": "map",
        "norm_eps": 1e-05,
        "ref_feat_shape": (14, 14),
        "rope_grid_indexing": "xy",
        "rope_grid_offset": 1.0,
        "use_pre_transformer_norm": True,
        "use_rot_pos_emb": True,
    }, """
        vit_pe_core_base_patch16_224                224  16   768  12  12  4
    """),
    ({
        "attn_type": "rope",
        "global_pool": "token",
        "init_values": 1e-05,
        "rope_grid_indexing": "xy",
        "rope_temperature": 100.0,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_base_patch16_rope_224                   224  16   768  12  12  4
    """),
    ({
        "attn_type": "rope",
        "init_values": 0.1,
        "norm_eps": 1e-05,
        "ref_feat_shape": (32, 32),
        "rope_grid_indexing": "xy",
        "rope_grid_offset": 1.0,
        "use_fc_norm": False,
        "use_post_transformer_norm": False,
        "use_pre_transformer_norm": True,
        "use_rot_pos_emb": True,
    }, """
        vit_pe_lang_large_patch14_448               448  14  1024  23  16  4
    """),
    ({
        "class_token": False,
        "init_values": 1e-05,
        "num_reg_tokens": 1,
        "qkv_bias": False,
        "ref_feat_shape": (16, 16),
        "use_abs_pos_emb": False,
        "use_rot_pos_emb": True,
    }, """
        vit_mediumd_patch16_rope_reg1_gap_256       256  16   512  20   8  4
    """),
    ({
        "class_token": False,
        "init_values": 1e-05,
        "num_reg_tokens": 4,
        "ref_feat_shape": (16, 16),
        "use_abs_pos_emb": False,
        "use_rot_pos_emb": True,
    }, """
        vit_betwixt_patch16_rope_reg4_gap_256       256  16   640  12  10  4
    """),
    ({
        "dynamic_img_size": True,
        "global_pool": "token",
        "init_values": 1e-05,
        "norm_eps": 1e-05,
        "num_reg_tokens": 4,
        "qkv_bias": False,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_align_to": 8,
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_giant_patch16_lingbot                   512  16  1536  40  24  2.6666666666666665
    """),
    ({
        "dynamic_img_size": True,
        "init_values": 1e-05,
        "norm_eps": 1e-05,
        "num_reg_tokens": 4,
        "qkv_bias": False,
        "rope_rotate_half": True,
        "rope_temperature": 100,
        "rope_type": "dinov3",
        "swiglu_align_to": 64,
        "swiglu_mlp": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "use_rot_pos_emb": True,
    }, """
        vit_7b_patch16_dinov3                       256  16  4096  40  32  2
    """),
    ({"global_pool": "token", "use_post_norm": True}, """
        eva02_enormous_patch14_clip_224             224  14  1792  64  16  8.571428571428571
    """),
    ({"global_pool": "token"}, """
        eva_giant_patch14_clip_224                  224  14  1408  40  16  4.363636363636363
    """),
]  # fmt: skip

ARCHITECTURES = architectures_in(_GROUPS)
