"""Live models of timm: read their constructor arguments, and build them.

To overlook no part, the model is rebuilt from the arguments and compared with the original part by part.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError
from ...tables.compare_modules import class_name, class_path, differences
from .arguments import ARGUMENTS, BLOCKS, DEFAULTS, OPENED, arguments_for

# Classes and their names in timm's arguments; classes with the same name compute the same.
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

# Attributes of timm's modules that do not affect the forward pass, except for the check of the image size.
SILENT_ATTRIBUTES = {
    "strict_img_size",  # our model takes any size
    "fused_attn",  # changes only the order of operations
    "use_key_only_attn_mask",  # affects only padding tokens of a NaFlexVit
    "grad_checkpointing", "distilled_training", "weight_init_mode", "fix_init", "init_values", "inplace",
    "feat_size", "feature_info", "ordered",
    "pretrained_cfg", "default_cfg", "pretrained_model_args", "_traits", "_model_args",
}  # fmt: skip

CLASS_PATHS = {
    "timm.models.vision_transformer.VisionTransformer": False,
    "timm.models.deit.VisionTransformerDistilled": True,
}


@dataclass(frozen=True)
class Parts:
    """The parts of a live model that `ARGUMENTS` reads; each of the three types of block has its own names."""

    model: Any
    stem_depths: tuple[int, ...] | None
    block: Any
    attention: Any
    mlp: Any
    norm: Any
    layer_scale: Any
    last_drop_path: Any
    qkv: Any
    output: Any
    activation: Any
    dropout: Any
    width: int

    @property
    def distilled(self) -> bool:
        """Whether the model is of the class with a distillation token."""
        return CLASS_PATHS[class_path(self.model)]

    @property
    def kind(self) -> str:
        """The class name of the blocks."""
        return type(self.block).__name__

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP are one module."""
        return self.attention is self.block

    @property
    def patch_size(self) -> tuple[int, int]:
        """Patch size in image pixels, (height, width)."""
        height, width = (1, 1) if self.stem_depths is None else self.model.patch_embed.feature_ratio
        return self.model.patch_embed.patch_size[0] * height, self.model.patch_embed.patch_size[1] * width

    @property
    def patch_norm(self) -> Any:
        """The norm of the patches."""
        return getattr(self.model.patch_embed, "norm", nn.Identity())

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a module's class in timm's arguments, or the path of the class if it has none."""
        return class_name(module, CLASSES)

    @classmethod
    def of(cls, model: Any) -> "Parts":
        """Find the parts of a model.

        Raises:
            ExportError: for a class that plain-vit does not know.
        """
        stem_depths, block = _stem_depths(model), _first_block(model)
        if type(block).__name__.endswith("ParallelScalingBlock"):
            return cls(
                model, stem_depths, block, attention=block, mlp=block, norm=block.in_norm, layer_scale=block.ls,
                last_drop_path=model.blocks[-1].drop_path, qkv=block.in_proj,
                output=block.attn_out_proj if block.out_proj is None else block.out_proj,
                activation=block.mlp_act, dropout=block.mlp_drop, width=block.in_split[0],
            )  # fmt: skip
        if type(block).__name__ == "ParallelThingsBlock":
            first, mlp, last_drop_path = block.attns[0], block.ffns[0].mlp, model.blocks[-1].attns[0].drop_path
            attention, norm, layer_scale = first.attn, first.norm, first.ls
        else:
            attention, norm, layer_scale = block.attn, block.norm1, getattr(block, "ls1", None)
            mlp, last_drop_path = block.mlp, model.blocks[-1].drop_path1
        packed = class_path(mlp) == "timm.layers.mlp.GluMlp"
        return cls(
            model, stem_depths, block, attention, mlp, norm, layer_scale, last_drop_path, qkv=attention.qkv,
            output=attention.proj, activation=mlp.act, dropout=mlp.drop1,
            width=mlp.fc2.in_features * (2 if packed else 1),
        )  # fmt: skip


def arguments_of(module: Any) -> dict[str, Any]:
    """Return the arguments from which a live timm model was built, read from its parts.

    Raises:
        ExportError: for a class that plain-vit does not know.
    """
    if class_path(module) not in CLASS_PATHS:
        raise ExportError(
            f"{class_path(module)} is not a plain Vision Transformer and does not open yet: plain-vit opens timm's "
            f"{OPENED} themselves, not subclasses of them"
        )
    parts = Parts.of(module)
    return {argument.name: argument.module(parts) for argument in ARGUMENTS}


def _first_block(module: Any) -> Any:
    """Return the first block, from which the arguments are read. `unknown_parts` compares the other blocks."""
    if len(module.blocks) == 0:
        raise ExportError("the model has no blocks (depth=0): its heads and norms cannot be read")
    block = module.blocks[0]
    if type(block).__module__ != "timm.models.vision_transformer" or type(block).__name__ not in BLOCKS:
        raise ExportError(
            f"{_architecture(module)} does not open yet: its blocks.0 is a {class_path(block)}, and plain-vit opens "
            f"{', '.join(BLOCKS)}"
        )
    return block


def _architecture(module: Any) -> str:
    """Return the class of a model with its name in timm, for errors."""
    named = (getattr(module, "pretrained_cfg", None) or {}).get("architecture")
    return f"{class_path(module)}{f' ({named})' if named else ''}"


def _stem_depths(module: Any) -> tuple[int, ...] | None:
    """Return the number of units of each stage of a hybrid's ResNet; None if the patches are projected directly."""
    patches = module.patch_embed
    if class_path(patches) == "timm.layers.patch_embed.PatchEmbed":
        return None
    if class_path(patches) != "timm.layers.hybrid_embed.HybridEmbed":
        raise ExportError(
            f"{_architecture(module)} does not open yet: its patch_embed is a {class_path(patches)}, and plain-vit "
            "opens timm's PatchEmbed and HybridEmbed"
        )
    backbone = patches.backbone
    if class_path(backbone) == "timm.models.resnetv2.ResNetV2":
        return tuple(len(stage.blocks) for stage in backbone.stages)
    if [name for name, _ in backbone.named_children()] == ["conv", "norm", "pool"]:
        return ()
    raise ExportError(
        f"{_architecture(module)} does not open yet: its patch_embed.backbone is a {class_path(backbone)}, and "
        "plain-vit opens a ResNetV2, or its root"
    )


def unknown_parts(module: Any, config: PlainViTConfig) -> list[str]:
    """Return the differences of a live model to the model that timm builds from our config of it."""
    rebuilt: Any = build(config, device="meta", dynamic=module.dynamic_img_size)
    if module.pos_embed is None:
        rebuilt.pos_drop = module.pos_drop  # timm returns before this dropout
    return differences(module, rebuilt, CLASSES, SILENT_ATTRIBUTES)


def build(config: PlainViTConfig, device: torch.device | str | None = None, dynamic: bool | None = None) -> nn.Module:
    """Build timm's own model of this config, with random weights.

    Args:
        config: Our config.
        device: Device of its tensors.
        dynamic: Whether it accepts images of other sizes (default: if it then resamples positions as our model does).

    Raises:
        ExportError: lists every part that timm cannot represent.
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
        arguments["act_layer"] = None  # timm's default, torch's own class
    if branches != 2:
        block = functools.partial(block, num_parallel=branches)
    if fused:
        block = functools.partial(block, fuse_out_proj=True)
    kind = deit.VisionTransformerDistilled if arguments.pop("distilled") else vision_transformer.VisionTransformer
    # timm resamples positions in one way, without partial patches. Otherwise its model keeps the native size.
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
