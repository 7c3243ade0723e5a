"""Interface of timm's classes other than VisionTransformer, each of which has a constructor of its own.

To add a class, write a package with a table of its arguments and add one line to `CONSTRUCTORS` in `constructors.py`.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    PlainViTError,
    UnknownFormatError,
)
from ...tables.compare_modules import class_name, class_path, differences, empty_model, epsilon_of
from ...tables.data_files import data_file
from ...tables.engine import Row, ignored_names, revert
from ...tables.format import UNSEEN, Description, Hints, Inference, StateDict, unused_hints
from ...tables.infer import grids, pair
from .arguments import NORMS, Argument, check_heads, lost_with, ratio_of
from .modules import CLASSES, SILENT_ATTRIBUTES
from .shapes import image_size_of

KERNEL = "patch_embed.proj.weight"


@dataclass(frozen=True)
class Parts:
    """The parts of a live model from which the arguments are read."""

    model: Any
    block: Any
    attention: Any
    mlp: Any

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a module's class in timm's arguments, or the path of the class if it has none."""
        return class_name(module, CLASSES)


# Arguments of all these classes. `norm_eps` is not timm's: it stands for the epsilon that timm binds to `norm_layer`.
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


class Constructor(ABC):
    """A class of timm, described by one table of arguments.

    Attributes:
        name: The class name in timm.
        class_path: Its full path.
        layouts: The layouts of its tensors.
        old_layouts: The layouts with which the installed timm builds no model.
        data_file: The file with its entrypoints.
        arguments: The arguments of its constructor that affect the outputs.
        parts: The parts of a live model that the table reads.
        classes: Names of its modules' classes; classes with the same name compute the same.
        blocks: The classes of its blocks.
        block_module: The Python module of the blocks, if it is not the model's.
        free: Arguments that do not affect the outputs and that our config does not determine.
        silent_arguments: Arguments that do not affect a trained model.
        code_only: Arguments that no `config.json` can store, because they are classes.
        unseen: What its tensors do not show, for the error message.
        any_size: Whether all its models take images of any size.
    """

    name: str
    class_path: str
    layouts: tuple[str, ...]
    old_layouts: tuple[str, ...] = ()
    data_file: str
    arguments: tuple[Argument, ...]
    parts: type[Parts] = Parts
    classes: Mapping[str, str] = CLASSES
    blocks: Collection[str]
    block_module: str | None = None
    free: tuple[str, ...] = ()
    silent_arguments: Collection[str]
    code_only: tuple[str, ...] = ("norm_layer", "norm_eps")
    unseen: str
    any_size: bool = False

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """timm's defaults for the arguments."""
        return {argument.name: argument.default for argument in self.arguments}

    @property
    def architectures(self) -> dict[str, dict[str, Any]]:
        """The arguments of each entrypoint that differ from timm's defaults."""
        return data_file(self.data_file)["architectures"]

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
    def norms_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that keep the final norms in place if the pooling is changed after construction."""

    @abstractmethod
    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors (default: for the layout of `build`)."""

    @abstractmethod
    def claims(self, config: PlainViTConfig) -> bool:
        """Return whether a model has parts of this class that the VisionTransformer lacks.

        If neither class represents the model, the error then compares it with this class.
        """

    @abstractmethod
    def is_certain(self, names: Collection[str]) -> bool:
        """Return whether these names certainly belong to this class, not to a VisionTransformer."""

    def layout_of(self, arguments: Mapping[str, Any]) -> str:
        """Return the layout of the tensors for timm's arguments: the first, unless they select another."""
        return self.layouts[0]

    @abstractmethod
    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""

    def changed_buffers(self, module: Any) -> list[str]:
        """Return the non-persistent buffers whose values differ from the values that timm computes."""
        return []

    def config_of(self, arguments: Mapping[str, Any], **fields: Any) -> PlainViTConfig:
        """Return our config for timm's arguments.

        Raises:
            ExportError: lists the arguments without a counterpart in our model.
        """
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
        """Return the arguments for our config that differ from timm's defaults.

        Raises:
            ExportError: lists the parts of the model that this class cannot represent.
        """
        check_heads(config)
        given = {one.name: one.theirs(getattr(config, one.field)) for one in self.arguments if one.field is not None}
        given |= {"mlp_ratio": ratio_of(config.intermediate_size, config.hidden_size)}
        given |= self.joint_arguments(config, layout)
        if lost := self.lost(config, given):
            raise ExportError(f"timm's {self.name} cannot represent this model:", lost)
        return {name: given[name] for name, default in self.defaults.items() if given.get(name, default) != default}

    def lost(self, config: PlainViTConfig, arguments: Mapping[str, Any]) -> list[str]:
        """Return the fields of our config that a model with these arguments would lose."""
        return lost_with(self.arguments, config, lambda: self.config_of(arguments))

    def describe_module(self, module: Any, labels: Any) -> Description:
        """Read the configuration of a live module.

        To overlook no part, the model is rebuilt from the arguments and compared with the original part by part.

        Args:
            module: The module.
            labels: Returns the label fields of our config for a number of classes.

        Raises:
            ExportError: lists every part that plain-vit does not support.
        """
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
        """Build timm's own model of this config, with random weights; `given` sets arguments in `free`.

        Raises:
            ExportError: lists every part that timm cannot represent.
        """
        from timm import layers

        if layout in self.old_layouts:
            raise ExportError(
                f"timm builds no model with the names of layout {layout!r}: omit it for the current names"
            )
        arguments = {**self.defaults, **self.arguments_for(config, layout), **given}
        norms = {"layernorm": layers.LayerNorm, "rmsnorm": layers.RmsNorm}
        norm = functools.partial(norms[arguments.pop("norm_layer")], eps=arguments.pop("norm_eps"))
        return self.construct({**arguments, "norm_layer": norm})

    def represents(self, config: PlainViTConfig) -> bool:
        """Return whether this class can represent a model."""
        try:
            self.arguments_for(config, None)
        except ExportError:
            return False
        return True

    def describe_checkpoint(
        self,
        name: str,
        changes: Mapping[str, Any],
        stated: Sequence[tuple[Any, str]],
        tensors: StateDict,
        hints: Hints,
        source: str,
        labels: Any,
    ) -> Description:
        """Return the description of a named architecture, after checking that the tensors match it.

        Args:
            name: The architecture, a key of `architectures`.
            changes: Arguments that differ from the architecture's.
            stated: Image sizes with their origins, in order of preference.
            tensors: The state dict.
            hints: The caller's hints.
            source: Origin of the name.
            labels: Returns the label fields of our config for a number of classes.

        Raises:
            ExportError: lists the arguments without a counterpart in our model.
            MappingError: lists how the tensors differ from the architecture's.
            AmbiguousCheckpointError: for an unknown image size.
            CheckpointError: for hints that contradict the architecture.
        """
        given, shown = {key: changes[key] for key in changes if key not in self.silent_arguments}, self.shown(tensors)
        arguments = {**self.defaults, **self.architectures[name], **given}
        arguments |= self.head_and_channels(arguments, shown)
        self.config_of(arguments)  # raises an error for arguments without a counterpart
        native = (arguments["img_size"], f"the grid of {name}")
        size = self._image_size(arguments, shown, hints, [*stated, native])
        if isinstance(size, list):
            raise AmbiguousCheckpointError(
                f"{name} has another grid of patches, and {self.position_rows(shown)}: the size of its images is open",
                {"image_size": size},
            )
        pixels, whence = size
        arguments["img_size"] = pixels
        if faults := self.faults(arguments, tensors):
            raise MappingError(f"the tensors are not of {name}, which {source} names:", faults)
        described = self.described(arguments, tensors, labels(arguments["num_classes"]))
        config, inferences = described.config, [Inference("architecture", name, source)]
        for key in UNSEEN:
            value = "head_dim**-0.5" if key == "attention_scale" else getattr(config, key)
            inferences.append(Inference(key, value, f"the architecture that {source} names"))
        if hints.image_size is None:
            inferences.append(Inference("image_size", pixels, whence))
        description = replace(described, inferences=inferences, stated_by=source)
        if said := unused_hints(replace(hints, architecture=None), description):
            raise CheckpointError(
                f"the hints contradict {name}, which {source} names: {'; '.join(said)}. Omit them: a modified model "
                "opens from timm's folder with its config.json, or as a live module"
            )
        return description

    def shown(self, tensors: StateDict) -> StateDict:
        """Return the tensors by timm's names; only those that show channels, patches, grid and classes are needed."""
        return tensors

    def described(self, arguments: Mapping[str, Any], tensors: StateDict, fields: Mapping[str, Any]) -> Description:
        """Return the config, the layout and the ignored tensors of a state dict.

        Args:
            arguments: All of timm's arguments.
            tensors: The state dict.
            fields: Further fields of our config.
        """
        return Description(self.config_of(arguments, **fields), self.layout_of(arguments))

    def native_size(self, config: PlainViTConfig) -> dict[str, Any]:
        """Return the argument for the native image size of a model."""
        return {"img_size": config.image_shape}

    def could_be(self, arguments: Mapping[str, Any], tensors: StateDict) -> bool:
        """Return whether the hidden size and the patch size match the tensors from `shown`."""
        if KERNEL not in tensors:
            return False
        width, *_, patch = tensors[KERNEL].shape
        return bool((arguments["embed_dim"], arguments["patch_size"]) == (width, patch))

    def head_and_channels(self, arguments: Mapping[str, Any], tensors: StateDict) -> dict[str, Any]:
        """Return the arguments that users commonly change and that the tensors show."""
        head, kernel = tensors.get("head.weight"), tensors.get(KERNEL)
        if kernel is None or kernel.ndim != 4:
            raise MappingError(f"a model of timm's {self.name} has a kernel over an image:", [f"missing: {KERNEL!r}"])
        return {"num_classes": 0 if head is None else head.shape[0], "in_chans": kernel.shape[1]}

    def changed_by_loading(self, config: PlainViTConfig) -> list[str]:
        """Return what timm's own loader would change in this model when it reads a file."""
        return []

    def position_rows(self, tensors: StateDict) -> str:
        """Describe, for errors, the tensor that shows the number of patches."""
        return f"pos_embed has {tensors['pos_embed'].shape[1]} rows"

    def _image_size(
        self, arguments: Mapping[str, Any], tensors: StateDict, hints: Hints, stated: Sequence[tuple[Any, str]]
    ) -> tuple[Any, str] | list[tuple[int, int]]:
        """Return the image size and its origin, or the possible sizes."""
        config = self.config_of(arguments)
        rows = tensors["pos_embed"].shape[1] if "pos_embed" in tensors else None
        if config.position_embedding_type != "learned":
            rows = None
        return image_size_of(rows, _prefix_in_table(config), config.patch_shape, hints, stated)

    def _squarest(self, arguments: Mapping[str, Any], tensors: StateDict) -> tuple[int, int]:
        """Return the image size of the squarest grid with as many patches as the position table."""
        config = self.config_of(arguments)
        down, across = grids(tensors["pos_embed"].shape[1] - _prefix_in_table(config))[0]
        return down * config.patch_shape[0], across * config.patch_shape[1]

    def faults(self, arguments: Mapping[str, Any], tensors: StateDict) -> list[str]:
        """Return how a state dict differs from the tensors of a model with these arguments."""
        described = self.described(arguments, tensors, {})
        config, unused = described.config, ignored_names(list(tensors), described.ignored)
        whole = empty_model(config).state_dict()
        expected = revert(self.rows(config, described.layout), whole, config)
        faults = [f"missing: {name!r}" for name in expected if name not in tensors]
        faults += [f"left over: {name!r}" for name in tensors if name not in expected and name not in unused]
        faults += [
            f"{name!r} has shape {tuple(tensors[name].shape)}, not {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in tensors and tensors[name].shape != tensor.shape
        ]
        return faults

    def fitting(self, tensors: StateDict, hints: Hints) -> list[str]:
        """Return the architectures whose tensors have these names and shapes and that match the caller's hints.

        A match does not prove that the model is one of them. Architectures with this grid of patches come first.
        """
        shown = self.shown(tensors)
        ranked = {}
        for name, own in self.architectures.items():
            arguments = {**self.defaults, **own}
            if not self.could_be(arguments, shown):
                continue
            arguments |= self.head_and_channels(arguments, shown)
            try:
                size = self._image_size(arguments, shown, hints, [(arguments["img_size"], name)])
            except (CheckpointError, MappingError):
                continue
            pixels = size[0] if size else self._squarest(arguments, shown)
            described = Description(self.config_of({**arguments, "img_size": pixels}))
            if unused_hints(replace(hints, image_size=None, architecture=None), described):
                continue
            if not self.faults({**arguments, "img_size": pixels}, tensors):
                ranked[name] = isinstance(size, list)
        return sorted(ranked, key=lambda name: ranked[name])

    def ask(self, tensors: StateDict, hints: Hints) -> PlainViTError:
        """Return the error for a state dict of this class without a given architecture."""
        names = self.fitting(tensors, hints)
        whose = f"of timm's {self.name} ({self.class_path.split('.')[-2]}.py)"
        if names:
            unseen = f"do not show {self.unseen}, nor all else that changes the logits; give"
            return AmbiguousCheckpointError(f"the tensors are those {whose}, and {unseen}", {"architecture": names})
        return UnknownFormatError(
            f"none of the {len(self.architectures)} architectures {whose} that plain-vit opens has these names, shapes "
            "and hints; open the live module, or the folder with its config.json"
        )

    def architecture_for(self, config: PlainViTConfig, layout: str | None) -> tuple[str, dict[str, Any]]:
        """Return the name and the `model_args` with which timm builds this model from a `config.json`.

        JSON cannot store classes, so the name is the closest architecture with the same norms.

        Raises:
            ExportError: for a model that timm can build in Python but has no architecture for.
        """
        wanted = {**self.defaults, **self.arguments_for(config, layout)}
        best: tuple[str, dict[str, Any]] | None = None
        for name, own in self.architectures.items():
            have = {**self.defaults, **own}
            if any(have[key] != wanted[key] for key in self.code_only):
                continue
            args = {key: value for key, value in wanted.items() if have[key] != value}
            if int(have["mlp_ratio"] * wanted["embed_dim"]) == int(wanted["mlp_ratio"] * wanted["embed_dim"]):
                args.pop("mlp_ratio", None)
            if best is None or len(args) < len(best[1]):
                best = name, args
        if best is None:
            parts = [f"{key}={wanted[key]!r}" for key in self.code_only]
            raise ExportError(
                f"timm's {self.name} can build this model, but has no architecture for a config.json with:", parts
            )
        return best


def _prefix_in_table(config: PlainViTConfig) -> int:
    """Return the number of tokens before the patches that have rows in the position table."""
    return config.num_prefix_tokens if config.position_embedding_on_prefix else 0
