"""Parts of live VisionTransformers of timm, from which their arguments are read."""

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from .....errors import ExportError
from ....tables.compare_modules import class_path
from ..modules import Parts, named_class

CLASS_PATHS = ("timm.models.vision_transformer.VisionTransformer", "timm.models.deit.VisionTransformerDistilled")


@dataclass(frozen=True)
class VisionTransformerParts(Parts):
    """The parts of a live model that `ARGUMENTS` reads; each of the three types of block has its own names."""

    stem_depths: tuple[int, ...] | None
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
        return class_path(self.model) == CLASS_PATHS[1]

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

    @classmethod
    def of(cls, model: Any) -> Self:
        """Find the parts of a model.

        Raises:
            ExportError: for a class that plain-vit does not know.
        """
        stem_depths, block, last = _stem_depths(model), model.blocks[0], model.blocks[-1]
        if type(block).__name__.endswith("ParallelScalingBlock"):
            return cls(
                model, block, attention=block, mlp=block, stem_depths=stem_depths, norm=block.in_norm,
                layer_scale=block.ls, last_drop_path=last.drop_path, qkv=block.in_proj,
                output=block.attn_out_proj if block.out_proj is None else block.out_proj,
                activation=block.mlp_act, dropout=block.mlp_drop, width=block.in_split[0],
            )  # fmt: skip
        if type(block).__name__ == "ParallelThingsBlock":
            first, mlp, last_drop_path = block.attns[0], block.ffns[0].mlp, last.attns[0].drop_path
            attention, norm, layer_scale = first.attn, first.norm, first.ls
        else:
            attention, norm, layer_scale = block.attn, block.norm1, getattr(block, "ls1", None)
            mlp, last_drop_path = block.mlp, last.drop_path1
        packed = class_path(mlp) == "timm.layers.mlp.GluMlp"
        return cls(
            model, block, attention, mlp, stem_depths, norm, layer_scale, last_drop_path, qkv=attention.qkv,
            output=attention.proj, activation=mlp.act, dropout=mlp.drop1,
            width=mlp.fc2.in_features * (2 if packed else 1),
        )  # fmt: skip


def _stem_depths(module: Any) -> tuple[int, ...] | None:
    """Return the number of units of each stage of a hybrid's ResNet; None if the patches are projected directly."""
    patches = module.patch_embed
    if class_path(patches) == "timm.layers.patch_embed.PatchEmbed":
        return None
    if class_path(patches) != "timm.layers.hybrid_embed.HybridEmbed":
        raise ExportError(
            f"{named_class(module)} does not open yet: its patch_embed is a {class_path(patches)}, and plain-vit "
            "opens timm's PatchEmbed and HybridEmbed"
        )
    backbone = patches.backbone
    if class_path(backbone) == "timm.models.resnetv2.ResNetV2":
        return tuple(len(stage.blocks) for stage in backbone.stages)
    if [name for name, _ in backbone.named_children()] == ["conv", "norm", "pool"]:
        return ()
    raise ExportError(
        f"{named_class(module)} does not open yet: its patch_embed.backbone is a {class_path(backbone)}, and "
        "plain-vit opens a ResNetV2, or its root"
    )
