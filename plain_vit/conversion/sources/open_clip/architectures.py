"""Image towers of open_clip's models by name, so that their files open without open_clip.

Written by `make architectures` from open_clip 3.3.0: the `embed_dim`, `quick_gelu` and
`vision_cfg` of its model configurations.
"""

from typing import Any

OPEN_CLIP_VERSION = "3.3.0"

# What the models of a group share: the columns of its rows after `embed_dim`, `quick_gelu`, the rest of the settings.
_GROUPS: list[tuple[tuple[str, ...], bool, dict[str, Any], str]] = [
    (("image_size", "timm_model_name"), False, {"timm_pool": "map", "timm_proj": "none"}, """
        ViT-B-16-SigLIP                      768 224 vit_base_patch16_siglip_224
        ViT-B-16-SigLIP-256                  768 256 vit_base_patch16_siglip_256
        ViT-B-16-SigLIP-384                  768 384 vit_base_patch16_siglip_384
        ViT-B-16-SigLIP-512                  768 512 vit_base_patch16_siglip_512
        ViT-B-16-SigLIP-i18n-256             768 256 vit_base_patch16_siglip_256
        ViT-B-16-SigLIP2                     768 224 vit_base_patch16_siglip_224
        ViT-B-16-SigLIP2-256                 768 256 vit_base_patch16_siglip_256
        ViT-B-16-SigLIP2-384                 768 384 vit_base_patch16_siglip_384
        ViT-B-16-SigLIP2-512                 768 512 vit_base_patch16_siglip_512
        ViT-B-32-SigLIP2-256                 768 256 vit_base_patch32_siglip_256
        ViT-L-16-SigLIP-256                  1024 256 vit_large_patch16_siglip_256
        ViT-L-16-SigLIP-384                  1024 384 vit_large_patch16_siglip_384
        ViT-L-16-SigLIP2-256                 1024 256 vit_large_patch16_siglip_256
        ViT-L-16-SigLIP2-384                 1024 384 vit_large_patch16_siglip_384
        ViT-L-16-SigLIP2-512                 1024 512 vit_large_patch16_siglip_512
        ViT-SO400M-14-SigLIP                 1152 224 vit_so400m_patch14_siglip_224
        ViT-SO400M-14-SigLIP-378             1152 378 vit_so400m_patch14_siglip_378
        ViT-SO400M-14-SigLIP-384             1152 384 vit_so400m_patch14_siglip_384
        ViT-SO400M-14-SigLIP2                1152 224 vit_so400m_patch14_siglip_224
        ViT-SO400M-14-SigLIP2-378            1152 378 vit_so400m_patch14_siglip_378
        ViT-SO400M-16-SigLIP-i18n-256        1152 256 vit_so400m_patch16_siglip_256
        ViT-SO400M-16-SigLIP2-256            1152 256 vit_so400m_patch16_siglip_256
        ViT-SO400M-16-SigLIP2-384            1152 384 vit_so400m_patch16_siglip_384
        ViT-SO400M-16-SigLIP2-512            1152 512 vit_so400m_patch16_siglip_512
        ViT-gopt-16-SigLIP2-256              1536 256 vit_giantopt_patch16_siglip_256
        ViT-gopt-16-SigLIP2-384              1536 384 vit_giantopt_patch16_siglip_384
        nllb-clip-base-siglip                768 384 vit_base_patch16_siglip_384
        nllb-clip-large-siglip               1152 384 vit_so400m_patch14_siglip_384
    """),
    (("image_size", "timm_model_name"), False, {
        "timm_drop": 0.0,
        "timm_drop_path": 0.1,
        "timm_pool": "",
        "timm_proj": "linear",
    }, """
        ViTamin-B                            512 224 vitamin_base_224
        ViTamin-B-LTT                        768 224 vitamin_base_224
        ViTamin-L                            768 224 vitamin_large_224
        ViTamin-L-256                        768 256 vitamin_large_256
        ViTamin-L-336                        768 336 vitamin_large_336
        ViTamin-L-384                        768 384 vitamin_large_384
        ViTamin-L2                           1024 224 vitamin_large2_224
        ViTamin-L2-256                       1024 256 vitamin_large2_256
        ViTamin-L2-336                       1024 336 vitamin_large2_336
        ViTamin-L2-384                       1024 384 vitamin_large2_384
        ViTamin-S                            384 224 vitamin_small_224
        ViTamin-S-LTT                        768 224 vitamin_small_224
        ViTamin-XL-256                       1152 256 vitamin_xlarge_256
        ViTamin-XL-336                       1152 336 vitamin_xlarge_336
        ViTamin-XL-384                       1152 256 vitamin_xlarge_384
        convnext_base                        512 224 convnext_base
        convnext_base_w                      640 256 convnext_base
        convnext_base_w_320                  640 320 convnext_base
        convnext_large                       768 224 convnext_large
        convnext_small                       512 224 convnext_small
        convnext_tiny                        1024 224 convnext_tiny
        convnext_xlarge                      1024 256 convnext_xlarge
        convnext_xxlarge                     1024 256 convnext_xxlarge
        convnext_xxlarge_320                 1024 320 convnext_xxlarge
    """),
    (("image_size", "patch_size", "width", "layers"), False, {}, """
        ViT-B-16                             512 224 16 768 12
        ViT-B-16-plus                        640 224 16 896 12
        ViT-B-16-plus-240                    640 240 16 896 12
        ViT-B-32                             512 224 32 768 12
        ViT-B-32-256                         512 256 32 768 12
        ViT-B-32-plus-256                    640 256 32 896 12
        ViT-L-14                             768 224 14 1024 24
        ViT-L-14-280                         768 280 14 1024 24
        ViT-L-14-336                         768 336 14 1024 24
        ViT-L-14-worldwide                   768 224 14 1024 24
        ViT-L-16                             768 224 16 1024 24
        ViT-L-16-320                         768 320 16 1024 24
        ViT-M-16                             512 224 16 512 12
        ViT-M-32                             512 224 32 512 12
        ViT-M-32-alt                         384 224 32 512 12
        ViT-S-16                             384 224 16 384 12
        ViT-S-16-alt                         256 224 16 384 12
        ViT-S-32                             384 224 32 384 12
        ViT-S-32-alt                         256 224 32 384 12
        mt5-base-ViT-B-32                    512 224 32 768 12
        nllb-clip-base                       512 224 32 768 12
        xlm-roberta-base-ViT-B-32            512 224 32 768 12
    """),
    (("image_size", "patch_size", "width", "layers"), False, {"head_width": 80}, """
        ViT-H-14                             1024 224 14 1280 32
        ViT-H-14-378                         1024 378 14 1280 32
        ViT-H-14-worldwide                   1024 224 14 1280 32
        ViT-H-14-worldwide-378               1024 378 14 1280 32
        ViT-H-16                             1024 224 16 1280 32
        mt5-xl-ViT-H-14                      1024 224 14 1280 32
        nllb-clip-large                      1024 224 14 1280 32
        xlm-roberta-large-ViT-H-14           1024 224 14 1280 32
    """),
    (("image_size", "timm_model_name"), False, {"timm_pool": "token", "timm_proj": None}, """
        EVA01-g-14                           1024 224 eva_giant_patch14_224
        EVA01-g-14-plus                      1024 224 eva_giant_patch14_224
        EVA02-B-16                           512 224 eva02_base_patch16_clip_224
        EVA02-E-14                           1024 224 eva02_enormous_patch14_clip_224
        EVA02-E-14-plus                      1024 224 eva02_enormous_patch14_clip_224
        EVA02-L-14                           768 224 eva02_large_patch14_clip_224
        EVA02-L-14-336                       768 336 eva02_large_patch14_clip_336
    """),
    (("image_size", "patch_size", "width", "layers"), True, {}, """
        ViT-B-16-quickgelu                   512 224 16 768 12
        ViT-B-32-quickgelu                   512 224 32 768 12
        ViT-L-14-336-quickgelu               768 336 14 1024 24
        ViT-L-14-quickgelu                   768 224 14 1024 24
        ViT-L-14-worldwide-quickgelu         768 224 14 1024 24
        roberta-ViT-B-32                     512 224 32 768 12
    """),
    (("image_size", "timm_model_name"), False, {
        "timm_drop": 0.0,
        "timm_drop_path": 0.0,
        "timm_pool": "avg",
        "timm_proj": None,
    }, """
        MobileCLIP-S1                        512 256 fastvit_mci1
        MobileCLIP-S2                        512 256 fastvit_mci2
        MobileCLIP2-S0                       512 256 fastvit_mci0
        MobileCLIP2-S2                       512 256 fastvit_mci2
        MobileCLIP2-S3                       768 256 fastvit_mci3
        MobileCLIP2-S4                       768 256 fastvit_mci4
    """),
    (("image_size", "timm_model_name"), False, {"timm_pool": "map", "timm_proj": None}, """
        PE-Core-B-16                         1024 224 vit_pe_core_base_patch16_224
        PE-Core-L-14-336                     1024 336 vit_pe_core_large_patch14_336
        PE-Core-S-16-384                     512 384 vit_pe_core_small_patch16_384
        PE-Core-T-16-384                     512 384 vit_pe_core_tiny_patch16_384
        PE-Core-bigG-14-448                  1280 448 vit_pe_core_gigantic_patch14_448
    """),
    (("image_size", "patch_size", "width", "layers"), False, {"head_width": 104, "mlp_ratio": 4.9231}, """
        ViT-bigG-14                          1280 224 14 1664 48
        ViT-bigG-14-worldwide                1280 224 14 1664 48
        ViT-bigG-14-worldwide-378            1280 378 14 1664 48
    """),
    (("image_size", "patch_size", "width", "layers"), True, {"head_width": 80}, """
        ViT-H-14-378-quickgelu               1024 378 14 1280 32
        ViT-H-14-quickgelu                   1024 224 14 1280 32
        ViT-H-14-worldwide-quickgelu         1024 224 14 1280 32
    """),
    (("image_size", "timm_model_name"), False, {"timm_pool": "", "timm_proj": "linear"}, """
        swin_base_patch4_window7_224         640 224 swin_base_patch4_window7_224
        vit_medium_patch16_gap_256           512 256 vit_medium_patch16_gap_256
        vit_relpos_medium_patch16_cls_224    512 224 vit_relpos_medium_patch16_cls_224
    """),
    (("image_size", "patch_size", "width", "layers"), False, {
        "attentional_pool": True,
        "attn_pooler_heads": 8,
        "output_tokens": True,
    }, """
        coca_ViT-B-32                        512 224 32 768 12
        coca_ViT-L-14                        768 224 14 1024 24
    """),
    (("image_size", "patch_size", "width", "layers"), False, {
        "final_ln_after_pool": True,
        "head_width": 104,
        "mlp_ratio": 4.9231,
        "no_ln_pre": True,
        "pool_type": "avg",
    }, """
        ViT-bigG-14-CLIPA                    1280 224 14 1664 48
        ViT-bigG-14-CLIPA-336                1280 336 14 1664 48
    """),
    (("image_size", "patch_size", "width", "layers"), False, {
        "final_ln_after_pool": True,
        "head_width": 80,
        "no_ln_pre": True,
        "pool_type": "avg",
    }, """
        ViT-H-14-CLIPA                       1024 224 14 1280 32
        ViT-H-14-CLIPA-336                   1024 336 14 1280 32
    """),
    (("image_size", "patch_size", "width", "layers"), False, {
        "final_ln_after_pool": True,
        "no_ln_pre": True,
        "pool_type": "avg",
    }, """
        ViT-L-14-CLIPA                       768 224 14 1024 24
        ViT-L-14-CLIPA-336                   768 336 14 1024 24
    """),
    (("image_size", "patch_size", "width", "layers"), False, {"output_tokens": True}, """
        coca_base                            512 288 18 768 12
        coca_roberta-ViT-B-32                512 224 32 768 12
    """),
    (("image_size", "timm_model_name"), False, {
        "timm_drop": 0.0,
        "timm_drop_path": 0.0,
        "timm_pool": "token",
        "timm_proj": None,
    }, """
        MobileCLIP-B                         512 224 vit_base_mci_224
        MobileCLIP2-B                        512 224 vit_base_mci_224
    """),
    (("image_size", "timm_model_name"), False, {
        "timm_drop": 0.0,
        "timm_drop_path": 0.1,
        "timm_pool": "",
        "timm_proj": "mlp",
    }, """
        convnext_large_d                     768 256 convnext_large
        convnext_large_d_320                 768 320 convnext_large
    """),
    (("image_size", "patch_size", "width", "layers"), False, {"head_width": 112, "mlp_ratio": 8.5715}, """
        ViT-e-14                             1280 224 14 1792 56
    """),
    (("image_size", "patch_size", "width", "layers"), False, {"head_width": 88, "mlp_ratio": 4.3637}, """
        ViT-g-14                             1024 224 14 1408 40
    """),
    (("image_size", "patch_size", "width", "layers"), False, {"ls_init_value": 0.0001}, """
        ViT-M-16-alt                         384 224 16 512 12
    """),
    (("image_size", "patch_size", "width", "layers"), True, {"head_width": 104, "mlp_ratio": 4.9231}, """
        ViT-bigG-14-quickgelu                1280 224 14 1664 48
    """),
    (("image_size", "timm_model_name"), False, {
        "timm_drop": 0.0,
        "timm_drop_path": 0.1,
        "timm_pool": "token",
        "timm_proj": None,
    }, """
        MobileCLIP2-L-14                     768 224 vit_large_patch14_clip_224
    """),
]  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {}
for _columns, _quick_gelu, _shared, _rows in _GROUPS:
    for _row in _rows.strip().splitlines():
        _name, _embed_dim, *_cells = _row.split()
        _values = [int(_cell) if _cell.isdigit() else _cell for _cell in _cells]
        ARCHITECTURES[_name] = {
            "embed_dim": int(_embed_dim),
            **({"quick_gelu": True} if _quick_gelu else {}),
            "vision_cfg": {**_shared, **dict(zip(_columns, _values, strict=True))},
        }
