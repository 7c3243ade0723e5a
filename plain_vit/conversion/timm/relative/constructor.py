"""What timm's two classes with relative positions share: arguments, reading of live modules, and computed tensors.

Source: timm 1.0.31, `timm/models/beit.py`, `timm/models/vision_transformer_relpos.py`, `timm/layers/pos_embed_rel.py`.
"""

import copy
import functools
import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import CheckpointError, ExportError, MappingError
from ...compare_modules import class_name, class_path, differences, epsilon_of, lost_fields
from ...format import Description, Hints, StateDict
from ...infer import pair
from ..arguments import NORMS, Argument, ratio_of
from ..constructor import Constructor
from ..modules import CLASSES, SILENT_ATTRIBUTES
from ..shapes import part_of

POOLINGS = {"avg": "mean", "token": "cls", "": "none"}

TABLE = "relative_position_bias_table"
OUR_BIAS, OUR_SHARED_BIAS = "vit.layers.{}.attention.relative_position_bias", "vit.relative_position_bias"


@dataclass(frozen=True)
class Parts:
    """The parts of a live model that the arguments are read from."""

    model: Any
    block: Any
    attention: Any
    mlp: Any

    def name_of(self, module: nn.Module) -> str:
        """Return the name that timm's arguments have for a module's class; its own where they have none."""
        return class_name(module, CLASSES)


# Arguments of both classes. Not timm's own is `norm_eps`, which it binds to `norm_layer`.
ARGUMENTS = (
    Argument("img_size", 224, "image_size", module=lambda m: tuple(m.model.patch_embed.img_size)),
    Argument("patch_size", 16, "patch_size", module=lambda m: tuple(m.model.patch_embed.patch_size)),
    Argument("in_chans", 3, "num_channels", module=lambda m: m.model.in_chans),
    Argument("num_classes", 1000, "num_labels", module=lambda m: m.model.num_classes),
    Argument("global_pool", "avg", "pooling", POOLINGS, module=lambda m: m.model.global_pool),
    Argument("embed_dim", 768, "hidden_size", module=lambda m: m.model.embed_dim),
    Argument("depth", 12, "num_hidden_layers", module=lambda m: len(m.model.blocks)),
    Argument("num_heads", 12, "num_attention_heads", module=lambda m: m.attention.num_heads),
    Argument("mlp_ratio", 4.0, module=lambda m: ratio_of(m.mlp.fc2.in_features, m.model.embed_dim)),
    Argument("drop_rate", 0.0, "classifier_dropout_prob", module=lambda m: m.model.head_drop.p),
    Argument("proj_drop_rate", 0.0, "hidden_dropout_prob", module=lambda m: m.attention.proj_drop.p),
    Argument("attn_drop_rate", 0.0, "attention_probs_dropout_prob", module=lambda m: m.attention.attn_drop.p),
    Argument("drop_path_rate", 0.0, "drop_path_rate",
             module=lambda m: getattr(m.model.blocks[-1].drop_path1, "drop_prob", 0.0)),
    Argument("norm_layer", "layernorm", "norm_type", NORMS, module=lambda m: m.name_of(m.block.norm1)),
    Argument("norm_eps", 1e-6, "layer_norm_eps", module=lambda m: epsilon_of(m.block.norm1)),
)  # fmt: skip


class RelativeConstructor(Constructor):
    """A class of timm with relative positions.

    Attributes:
        arguments: The arguments of its constructor that affect the outputs.
        blocks: The classes of its blocks.
        kinds: The kinds of relative positions that only this class has.
    """

    arguments: tuple[Argument, ...]
    blocks: tuple[str, ...]
    kinds: tuple[str, ...]
    unseen = "the epsilon of the norms"

    @abstractmethod
    def without_counterpart(self, given: Mapping[str, Any]) -> list[str]:
        """Return the combinations of arguments without a counterpart in our model, or that timm refuses."""

    @abstractmethod
    def joint_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of our config that depend on several arguments, or on part of one."""

    @abstractmethod
    def joint_arguments(self, config: PlainViTConfig) -> dict[str, Any]:
        """Return the arguments that depend on several fields of our config."""

    @abstractmethod
    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""

    def config_of(self, arguments: Mapping[str, Any], **fields: Any) -> PlainViTConfig:
        """Return our config for arguments of timm's."""
        given = {**self.defaults, **arguments}
        unknown = [name for name in given if name not in self.defaults]
        for one in self.arguments:
            if one.words is not None and not isinstance(one.default, bool) and given[one.name] not in one.words:
                expected = ", ".join(repr(word) for word in one.words)
                unknown.append(f"{one.name}={given[one.name]!r}: expected one of {expected}")
        if unknown := [*unknown, *self.without_counterpart(given)]:
            raise ExportError("plain-vit has no counterpart of parts of this timm model:", unknown)
        described = {one.field: one.ours(given[one.name]) for one in self.arguments if one.field is not None}
        sides = zip(pair(given["img_size"]), pair(given["patch_size"]), strict=True)
        joint = {
            "intermediate_size": int(given["embed_dim"] * given["mlp_ratio"]),
            "drop_partial_patches": any(pixels % patch for pixels, patch in sides),
            "position_resampling": "bicubic_antialias",
            "relative_position_resampling": "geometric",
            "initialization": "timm",
            **self.joint_fields(given),
        }
        return PlainViTConfig(**described | joint, **fields)

    def layout_of(self, arguments: Mapping[str, Any]) -> str:
        """Return the layout of the tensors: there is one."""
        return self.layouts[0]

    def arguments_for(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments for our config, without those that have their default."""
        if (config.head_dim or 0) * config.num_attention_heads != config.hidden_size:
            raise ExportError(
                "timm's heads must add up to the width of the model:",
                [f"{config.num_attention_heads} heads of {config.head_dim} in a width of {config.hidden_size}"],
            )
        given = {one.name: one.theirs(getattr(config, one.field)) for one in self.arguments if one.field is not None}
        given |= {"mlp_ratio": ratio_of(config.intermediate_size, config.hidden_size), **self.joint_arguments(config)}
        if lost := lost_fields(config, self.config_of(given)):
            raise ExportError(f"timm's {self.name} cannot represent this model:", lost)
        return {name: given[name] for name, default in self.defaults.items() if given.get(name, default) != default}

    def describe_module(self, module: Any, labels: Any) -> Description:
        """Read the configuration of a live module."""
        if len(module.blocks) == 0:
            raise ExportError("the model has no blocks (depth=0): its heads and norms cannot be read")
        block = module.blocks[0]
        if type(block).__module__ != type(module).__module__ or type(block).__name__ not in self.blocks:
            raise ExportError(f"{class_path(module)} does not open: its blocks.0 is a {class_path(block)}")
        parts = Parts(module, block, block.attn, block.mlp)
        arguments = {argument.name: argument.module(parts) for argument in self.arguments}
        config = self.config_of(arguments, **labels(arguments["num_classes"]))
        with torch.device("meta"):
            rebuilt = self.build(config, None)
        faults = [*differences(module, rebuilt, CLASSES, SILENT_ATTRIBUTES | {"head_init_scale"})]
        if faults := [*faults, *_changed_buffers(module)]:
            raise ExportError(
                "plain-vit does not know parts of this timm model (what it is, not what it would become):", faults
            )
        return Description(config, self.layouts[0])

    def build(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Return timm's own model for this config, with random weights."""
        from timm import layers

        arguments = {**self.defaults, **self.arguments_for(config, layout)}
        norms = {"layernorm": layers.LayerNorm, "rmsnorm": layers.RmsNorm}
        norm = functools.partial(norms[arguments.pop("norm_layer")], eps=arguments.pop("norm_eps"))
        return self.construct({**arguments, "norm_layer": norm})

    def is_certain(self, names: Collection[str]) -> bool:
        """Return whether a state dict with these names cannot be that of a VisionTransformer, but of this class."""
        parts = {part_of(name) for name in names}
        rows = [row for kind in ("mlp", "swiglu") for row in self.rows(PlainViTConfig(mlp_type=kind), None)]
        own = {part_of(str(row.source).replace("{}", "0")) for row in rows}
        return parts <= own and any("rel_pos" in part or part.endswith(TABLE) for part in parts)

    def position_rows(self, tensors: StateDict) -> str:
        """Return what shows the number of patches."""
        table = _table(tensors)
        return super().position_rows(tensors) if table is None else f"{TABLE} has {table.shape[0]} rows"

    def claims(self, config: PlainViTConfig) -> bool:
        """Return whether a model has parts that this class has and the VisionTransformer has not."""
        return config.relative_position_bias in self.kinds

    def _image_size(
        self, arguments: Mapping[str, Any], tensors: StateDict, hints: Hints, stated: Sequence[tuple[Any, str]]
    ) -> tuple[Any, str] | list[tuple[int, int]]:
        """Return the image size and its origin, or the possible sizes: the table has a row for each distance."""
        table = _table(tensors)
        if table is None:
            return super()._image_size(arguments, tensors, hints, stated)
        config = self.config_of(arguments)
        height, width = config.patch_shape
        prefix = config.num_prefix_tokens
        grids = _grids(table.shape[0] - 3 * prefix)
        if "pos_embed" in tensors:
            grids = [grid for grid in grids if math.prod(grid) + prefix == tensors["pos_embed"].shape[1]]
        if hints.image_size is not None:
            stated = [(hints.image_size, "the caller")]
        for size, origin in stated:
            if size is not None and (pair(size)[0] // height, pair(size)[1] // width) in grids:
                return pair(size), f"{origin}, and the {table.shape[0]} rows of {TABLE}"
        if not grids:
            raise MappingError("the table has not a row for each distance of a grid:", [self.position_rows(tensors)])
        if hints.image_size is not None:
            raise CheckpointError(
                f"image_size={hints.image_size!r} is not of a grid for which {self.position_rows(tensors)}: correct "
                "image_size"
            )
        return [(rows * height, columns * width) for rows, columns in grids]


def _table(tensors: StateDict) -> torch.Tensor | None:
    """Return the first table of relative positions."""
    return next((tensors[name] for name in tensors if name.endswith(f".{TABLE}")), None)


def _grids(distances: int) -> list[tuple[int, int]]:
    """Return the grids (down, across) with this number of distances, the squarest first."""
    sides = [side for side in range(1, distances + 1, 2) if distances % side == 0] if distances % 2 else []
    grids = [((side + 1) // 2, (distances // side + 1) // 2) for side in sides]
    return sorted(grids, key=lambda grid: (abs(grid[0] - grid[1]), grid))


def _changed_buffers(module: nn.Module) -> list[str]:
    """Return the buffers that are not saved, and whose values are not those that timm computes."""
    faults = []
    for path, part in module.named_modules():
        buffers = {name: buffer for name, buffer in part._buffers.items() if buffer is not None and not buffer.is_meta}
        if not buffers:
            continue
        fresh = copy.copy(part)
        fresh._buffers = {name: torch.empty_like(buffer) for name, buffer in buffers.items()}
        fresh.init_non_persistent_buffers()
        faults += [
            f"{path}.{name} has not the values of its settings, such as after a cast to another dtype and back: "
            f"module.get_submodule({path!r}).init_non_persistent_buffers() computes them again"
            for name, buffer in buffers.items()
            if not torch.allclose(buffer, fresh._buffers[name], rtol=0, atol=_rounding(buffer))
        ]
    return faults


def _rounding(buffer: torch.Tensor) -> float:
    """Return how far the logarithms of a GPU are from those of a CPU; nothing for integers, and on the same device."""
    exact = buffer.device.type == "cpu" or not buffer.is_floating_point()
    return 0.0 if exact else max(1e-5, 8 * torch.finfo(buffer.dtype).eps)
