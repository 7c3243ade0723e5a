"""Live models of timm: read back into the arguments that they were built from, and built anew.

Nothing of a live model goes unseen: what is read is built again, and the two are compared part by part.
"""

import functools
from typing import Any

import torch
from torch import nn

from ...configuration_plain_vit import PlainViTConfig
from ...errors import ExportError
from ..compare_modules import class_name, class_path, differences, epsilon_of
from .arguments import BLOCKS, DEFAULTS, arguments_for, ratio_of

# Classes that compute the same, by the name that the tables above have for them.
CLASSES = {
    "torch.nn.modules.normalization.LayerNorm": "layernorm",
    "timm.layers.norm.LayerNorm": "layernorm",
    "torch.nn.modules.normalization.RMSNorm": "rmsnorm",
    "timm.layers.norm.RmsNorm": "rmsnorm",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.GELU(tanh)": "gelu_tanh",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "timm.layers.mlp.Mlp": "Mlp",
    "timm.layers.mlp.SwiGLU": "SwiGLU",
    "timm.layers.mlp.GluMlp": "SwiGLUPacked",
    "timm.layers.attention.Attention": "attn",
    "timm.layers.diff_attention.DiffAttention": "diff",
}

# Attributes of timm's modules that change no number of a forward pass, or only how the size of an image is checked.
SILENT_ATTRIBUTES = {
    "strict_img_size",  # ours takes any size
    "fused_attn",  # the order of operations, not the function
    "grad_checkpointing", "distilled_training", "weight_init_mode", "fix_init", "init_values", "inplace",
    "feat_size", "feature_info", "ordered",
    "pretrained_cfg", "default_cfg", "pretrained_model_args", "_traits", "_model_args",
}  # fmt: skip

CLASS_PATHS = {
    "timm.models.vision_transformer.VisionTransformer": False,
    "timm.models.deit.VisionTransformerDistilled": True,
}


def arguments_of(module: Any) -> dict[str, Any]:
    """Return the arguments from which a live timm model was built, read from its parts.

    Raises:
        ExportError: for a class that plain-vit does not know.
    """
    if class_path(module) not in CLASS_PATHS:
        raise ExportError(
            f"{class_path(module)} is not a plain Vision Transformer and does not open yet: plain-vit opens timm's "
            "VisionTransformer and VisionTransformerDistilled themselves, not classes derived from these"
        )
    if len(module.blocks) == 0:
        raise ExportError("the model has no blocks (depth=0): its heads and norms cannot be read")
    patches, stem_depths = module.patch_embed, None
    patch_size, patch_norm = tuple(patches.patch_size), getattr(patches, "norm", nn.Identity())
    if class_path(patches) == "timm.layers.hybrid_embed.HybridEmbed":
        stem_depths = _stem_depths(patches.backbone, _architecture(module))
        patch_size = tuple(size * ratio for size, ratio in zip(patch_size, patches.feature_ratio, strict=True))
    elif class_path(patches) != "timm.layers.patch_embed.PatchEmbed":
        raise ExportError(
            f"{_architecture(module)} does not open yet: its patch_embed is a {class_path(patches)}, and plain-vit "
            "opens timm's PatchEmbed and HybridEmbed"
        )
    block = module.blocks[0]
    kind = type(block).__name__
    if type(block).__module__ != "timm.models.vision_transformer" or kind not in BLOCKS:
        raise ExportError(
            f"{_architecture(module)} does not open yet: its blocks.0 is a {class_path(block)}, and plain-vit opens "
            f"{', '.join(BLOCKS)}"
        )
    branches, parallel = kind == "ParallelThingsBlock", kind.endswith("ParallelScalingBlock")
    attention = block if parallel else block.attns[0].attn if branches else block.attn
    mlp = block if parallel else block.ffns[0].mlp if branches else block.mlp
    norm = block.in_norm if parallel else block.attns[0].norm if branches else block.norm1
    scale = block.ls if parallel else block.attns[0].ls if branches else getattr(block, "ls1", None)
    path = [block.drop_path if parallel else block.attns[0].drop_path if branches else block.drop_path1
            for block in module.blocks]  # fmt: skip
    if parallel:
        width, qkv_bias = block.in_split[0], block.in_proj.bias is not None
        output = block.out_proj if block.out_proj is not None else block.attn_out_proj
        activation, dropout = block.mlp_act, block.mlp_drop
    else:
        packed = class_path(mlp) == "timm.layers.mlp.GluMlp"
        width, qkv_bias = mlp.fc2.in_features * (2 if packed else 1), attention.qkv.bias is not None
        output, activation, dropout = attention.proj, mlp.act, mlp.drop1
    return {
        "distilled": CLASS_PATHS[class_path(module)],
        "img_size": tuple(module.patch_embed.img_size),
        "patch_size": patch_size,
        "stem_depths": stem_depths,
        "in_chans": module.in_chans,
        "num_classes": module.num_classes,
        "global_pool": module.global_pool,
        "embed_dim": module.embed_dim,
        "depth": len(module.blocks),
        "num_heads": attention.num_heads,
        "mlp_ratio": ratio_of(width, module.embed_dim),
        "qkv_bias": qkv_bias,
        "qk_norm": not isinstance(attention.q_norm, nn.Identity),
        "scale_attn_norm": not parallel and not isinstance(attention.norm, nn.Identity),
        "scale_mlp_norm": not parallel and not isinstance(mlp.norm, nn.Identity),
        "proj_bias": output.bias is not None,
        "init_values": getattr(scale, "init_values", None),
        "class_token": module.has_class_token,
        "pos_embed": "none" if module.pos_embed is None else "learn",
        "no_embed_class": module.no_embed_class,
        "reg_tokens": module.num_reg_tokens,
        "pre_norm": not isinstance(module.norm_pre, nn.Identity),
        "final_norm": not (isinstance(module.norm, nn.Identity) and isinstance(module.fc_norm, nn.Identity)),
        "fc_norm": not isinstance(module.fc_norm, nn.Identity),
        "pool_include_prefix": module.pool_include_prefix,
        "drop_rate": module.head_drop.p,
        "pos_drop_rate": module.pos_drop.p,
        "patch_drop_rate": getattr(module.patch_drop, "prob", 0.0),
        "proj_drop_rate": dropout.p,
        "attn_drop_rate": attention.attn_drop.p,
        "drop_path_rate": getattr(path[-1], "drop_prob", 0.0),
        "embed_norm_layer": None if isinstance(patch_norm, nn.Identity) else _class_name(patch_norm),
        "norm_layer": _class_name(norm),
        "norm_eps": epsilon_of(norm),
        "act_layer": _class_name(activation),
        "block_fn": kind,
        "mlp_layer": "Mlp" if parallel else _class_name(mlp),
        "attn_layer": "attn" if parallel else _class_name(attention),
        "num_parallel": getattr(block, "num_parallel", 2),
        "fuse_out_proj": kind == "ParallelScalingBlock" and block.out_proj is not None,
    }


def _architecture(module: Any) -> str:
    """Return what timm calls a model, with its class."""
    named = (getattr(module, "pretrained_cfg", None) or {}).get("architecture")
    return f"{class_path(module)}{f' ({named})' if named else ''}"


def _stem_depths(backbone: Any, architecture: str) -> tuple[int, ...]:
    """Return the number of units of each stage of a hybrid's ResNet."""
    if class_path(backbone) == "timm.models.resnetv2.ResNetV2":
        return tuple(len(stage.blocks) for stage in backbone.stages)
    if [name for name, _ in backbone.named_children()] == ["conv", "norm", "pool"]:
        return ()
    raise ExportError(
        f"{architecture} does not open yet: its patch_embed.backbone is a {class_path(backbone)}, and plain-vit opens "
        "a ResNetV2, or its root"
    )


def _class_name(module: nn.Module) -> str:
    """Return the name that the tables have for a module's class; its own where they have none."""
    return class_name(module, CLASSES)


def unknown_parts(module: Any, config: PlainViTConfig) -> list[str]:
    """Return what sets a live model apart from the one that timm would build from our config of it."""
    rebuilt = build(config, device="meta", dynamic=module.dynamic_img_size)
    return differences(module, rebuilt, CLASSES, SILENT_ATTRIBUTES)


def build(config: PlainViTConfig, device: torch.device | str | None = None, dynamic: bool | None = None) -> nn.Module:
    """Return timm's own model for this config, with fresh weights.

    Args:
        config: Ours.
        device: Where its tensors are.
        dynamic: Whether it takes images of other sizes; if not given, where it resamples positions as ours does.

    Raises:
        ExportError: names every part that timm cannot express.
    """
    from timm import layers
    from timm.models import deit, vision_transformer, vision_transformer_hybrid

    arguments = {**DEFAULTS, **arguments_for(config)}
    norms = {"layernorm": layers.LayerNorm, "rmsnorm": layers.RmsNorm}
    norm = functools.partial(norms[arguments.pop("norm_layer")], eps=arguments.pop("norm_eps"))
    block = getattr(vision_transformer, arguments.pop("block_fn"))
    mlp = getattr(layers, arguments.pop("mlp_layer"))
    branches, fused = arguments.pop("num_parallel"), arguments.pop("fuse_out_proj")
    if arguments["act_layer"] == "gelu":
        arguments["act_layer"] = None  # torch's own class, as timm builds it by default
    if branches != 2:
        block = functools.partial(block, num_parallel=branches)
    if fused:
        block = functools.partial(block, fuse_out_proj=True)
    kind = deit.VisionTransformerDistilled if arguments.pop("distilled") else vision_transformer.VisionTransformer
    # timm resamples positions in one way only, and no partial patches; otherwise its model stays at the native size.
    if dynamic is None:
        dynamic = config.position_resampling == "bicubic_antialias" and not config.drop_partial_patches
    stem_depths = arguments.pop("stem_depths")
    if stem_depths is not None:
        backbone = vision_transformer_hybrid._resnetv2(stem_depths, in_chans=config.num_channels, device=device)
        arguments["embed_layer"] = functools.partial(layers.HybridEmbed, backbone=backbone)
        arguments["patch_size"] = tuple(size // config.stem_stride for size in config.patch_shape)
    return kind(
        **{**arguments, "embed_norm_layer": norm if config.patch_post_norm else None},
        norm_layer=norm,
        mlp_layer=mlp,
        block_fn=block,
        dynamic_img_size=dynamic,
        weight_init="skip",
        device=device,
    )
