"""timm's classes whose arguments are one table: conversion to and from our config, and reading of live modules.

No part of a live model is overlooked: it is rebuilt from the arguments read, and the two are compared part by part.
"""

import functools
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError
from ...tables.compare_modules import class_name, class_path, differences, epsilon_of
from ...tables.format import Description
from ...tables.infer import pair
from .arguments import NORMS, Argument, lost_with, ratio_of
from .constructor import Constructor
from .modules import CLASSES, SILENT_ATTRIBUTES


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


# Arguments of all these classes. Not timm's own is `norm_eps`, which it binds to `norm_layer`.
ARGUMENTS = (
    Argument("img_size", 224, "image_size", module=lambda m: tuple(m.model.patch_embed.img_size)),
    Argument("patch_size", 16, "patch_size", module=lambda m: tuple(m.model.patch_embed.patch_size)),
    Argument("in_chans", 3, "num_channels", module=lambda m: m.model.in_chans),
    Argument("num_classes", 1000, "num_labels", module=lambda m: m.model.num_classes),
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


class TableConstructor(Constructor):
    """A class of timm whose arguments are one table.

    Attributes:
        arguments: The arguments of its constructor that affect the outputs.
        parts: The parts of a live model that the table reads.
        classes: Names of the classes of its modules, those of one name compute the same.
        blocks: The classes of its blocks.
        block_module: Their module, if it is not that of the model.
        free: Arguments that our config does not determine, since they change no number of the model.
    """

    arguments: tuple[Argument, ...]
    parts: type[Parts] = Parts
    classes: Mapping[str, str] = CLASSES
    blocks: Collection[str]
    block_module: str | None = None
    free: tuple[str, ...] = ()

    @abstractmethod
    def without_counterpart(self, given: Mapping[str, Any]) -> list[str]:
        """Return the combinations of arguments without a counterpart in our model, or that timm refuses."""

    @abstractmethod
    def joint_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of our config that depend on several arguments, or on part of one."""

    @abstractmethod
    def joint_arguments(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments that depend on several fields of our config, or on the layout."""

    @abstractmethod
    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""

    @abstractmethod
    def changed_buffers(self, module: Any) -> list[str]:
        """Return the buffers that are not saved, and whose values are not those that timm computes."""

    def config_of(self, arguments: Mapping[str, Any], **fields: Any) -> PlainViTConfig:
        """Return our config for arguments of timm's."""
        given = {**self.defaults, **arguments}
        unknown = [name for name in given if name not in self.defaults]
        for one in self.arguments:
            if one.words is not None and not isinstance(one.default, bool) and given[one.name] not in one.words:
                expected = ", ".join(repr(word) for word in one.words)
                unknown.append(f"{one.name}={given[one.name]!r}: expected one of {expected}")
        if unknown := [*unknown, *self.without_counterpart(given)]:
            raise ExportError(f"plain-vit has no counterpart of parts of this {self.name} of timm's:", unknown)
        described = {one.field: one.ours(given[one.name]) for one in self.arguments if one.field is not None}
        sides = zip(pair(given["img_size"]), pair(given["patch_size"]), strict=True)
        joint = {
            "intermediate_size": int(given["embed_dim"] * given["mlp_ratio"]),
            "drop_partial_patches": any(pixels % patch for pixels, patch in sides),
            "position_resampling": "bicubic_antialias",
            "initialization": "timm",
            **self.joint_fields(given),
        }
        return PlainViTConfig(**described | joint, **fields)

    def arguments_for(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments for our config, without those that have their default."""
        if (config.head_dim or 0) * config.num_attention_heads != config.hidden_size:
            raise ExportError(
                "timm's heads must add up to the width of the model:",
                [f"{config.num_attention_heads} heads of {config.head_dim} in a width of {config.hidden_size}"],
            )
        given = {one.name: one.theirs(getattr(config, one.field)) for one in self.arguments if one.field is not None}
        given |= {"mlp_ratio": ratio_of(config.intermediate_size, config.hidden_size)}
        given |= self.joint_arguments(config, layout)
        if lost := self.lost(config, given):
            raise ExportError(f"timm's {self.name} cannot represent this model:", lost)
        return {name: given[name] for name, default in self.defaults.items() if given.get(name, default) != default}

    def lost(self, config: PlainViTConfig, arguments: Mapping[str, Any]) -> list[str]:
        """Return the fields of our config that a model with these arguments would not have."""
        return lost_with(self.arguments, config, lambda: self.config_of(arguments))

    def describe_module(self, module: Any, labels: Any) -> Description:
        """Read the configuration of a live module."""
        if len(module.blocks) == 0:
            raise ExportError("the model has no blocks (depth=0): its heads and norms cannot be read")
        block = module.blocks[0]
        home = self.block_module or type(module).__module__
        if type(block).__module__ != home or type(block).__name__ not in self.blocks:
            raise ExportError(f"{class_path(module)} does not open: its blocks.0 is a {class_path(block)}")
        parts = self.parts(module, block, block.attn, block.mlp)
        arguments = {argument.name: argument.module(parts) for argument in self.arguments}
        config, layout = self.config_of(arguments, **labels(arguments["num_classes"])), self.layout_of(arguments)
        with torch.device("meta"):
            rebuilt = self.build(config, layout, **{name: arguments[name] for name in self.free})
        faults = differences(module, rebuilt, self.classes, SILENT_ATTRIBUTES | {"head_init_scale"})
        if faults := [*faults, *self.changed_buffers(module)]:
            raise ExportError(
                "plain-vit does not know parts of this timm model (what it is, not what it would become):", faults
            )
        return Description(config, layout)

    def build(self, config: PlainViTConfig, layout: str | None, **given: Any) -> nn.Module:
        """Return timm's own model for this config, with random weights; `given` are arguments in `free`."""
        from timm import layers

        if layout in self.old_layouts:
            raise ExportError(
                f"timm builds no model with the names of layout {layout!r}: omit it for the current names"
            )
        arguments = {**self.defaults, **self.arguments_for(config, layout), **given}
        norms = {"layernorm": layers.LayerNorm, "rmsnorm": layers.RmsNorm}
        norm = functools.partial(norms[arguments.pop("norm_layer")], eps=arguments.pop("norm_eps"))
        return self.construct({**arguments, "norm_layer": norm})
