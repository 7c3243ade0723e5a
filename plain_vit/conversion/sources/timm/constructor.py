"""Interface of timm's classes, each of which has a constructor of its own.

To add a class, write a package with a table of its arguments and add one line to `CONSTRUCTORS` in `constructors.py`.
"""

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
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
from ...tables.compare_modules import (
    class_path,
    differences,
    empty_model,
    epsilon_of,
    lost_fields,
    meta_device,
    uneven_heads,
)
from ...tables.data_files import data_file
from ...tables.engine import Row, ignored_names, revert
from ...tables.format import UNSEEN, Description, Hints, Inference, Size, StateDict, unused_hints
from ...tables.infer import grids, image_sizes, pair, patches_in, ratio_of, size_fault
from .arguments import NORMS, Argument
from .modules import CLASSES, SILENT_ATTRIBUTES, Parts, named_class

CONFIG = "config.json"
Labels = Callable[[int], Mapping[str, Any]]  # returns the label fields of our config for a number of classes


# Arguments of all classes except the VisionTransformer, whose tensors also show them. `norm_eps` is not timm's: it
# stands for the epsilon that timm binds to `norm_layer`.
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


# The attention pooling of Eva and NaFlexVit may have heads and a width of its own.
ATTENTION_POOLING = (
    Argument("attn_pool_num_heads", None, module=lambda m: getattr(m.model.attn_pool, "num_heads", None)),
    Argument("attn_pool_mlp_ratio", None,
             module=lambda m: None if m.model.attn_pool is None else
             ratio_of(m.model.attn_pool.mlp.fc1.out_features, m.model.embed_dim)),
)  # fmt: skip


def pooling_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an attention pooling; none for other poolings."""
    if given["global_pool"] != "map":
        return {}
    heads, ratio = given["attn_pool_num_heads"], given["attn_pool_mlp_ratio"] or given["mlp_ratio"]
    width, usual = (int(given["embed_dim"] * one) for one in (ratio, given["mlp_ratio"]))
    return {
        "pooling_num_attention_heads": None if heads in (None, given["num_heads"]) else heads,
        "pooling_intermediate_size": None if width == usual else width,
    }


def pooling_arguments(config: PlainViTConfig) -> dict[str, Any]:
    """Return the arguments of an attention pooling."""
    width = config.pooling_intermediate_size
    return {
        "attn_pool_num_heads": config.pooling_num_attention_heads,
        "attn_pool_mlp_ratio": None if width is None else ratio_of(width, config.hidden_size),
    }


class Constructor(ABC):
    """A class of timm, described by one table of arguments.

    Attributes:
        name: The class name in timm.
        class_paths: Its full path, and those of subclasses that its arguments tell apart.
        layouts: The layouts of its tensors.
        old_layouts: The layouts with which the installed timm builds no model.
        data_file: The file with its entrypoints.
        arguments: The arguments of its constructor that affect the outputs.
        parts: The parts of a live model that the table reads.
        blocks: The classes of its blocks.
        block_module: The Python module of the blocks, if it is not the model's.
        projection: timm's name of the patch projection.
        free: Arguments that do not affect the outputs and that our config does not determine.
        silent_arguments: Arguments that do not affect a trained model.
        code_only: Arguments that no `config.json` can store, because they are classes.
        unseen: What its tensors do not show, for the error message.
        any_size: Whether the position grid of its models does not determine the image size.
        most_elongated: Ratio of sides beyond which a grid is implausible.
    """

    name: str
    class_paths: tuple[str, ...]
    layouts: tuple[str | None, ...]
    old_layouts: tuple[str, ...] = ()
    data_file: str
    arguments: tuple[Argument, ...]
    parts: type[Parts] = Parts
    blocks: Collection[str]
    block_module: str | None = None
    projection: str = "patch_embed.proj"
    free: tuple[str, ...] = ()
    silent_arguments: Collection[str]
    code_only: tuple[str, ...] = ("norm_layer", "norm_eps")
    unseen: str
    any_size: bool = False
    most_elongated: float = math.inf

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """timm's defaults for the arguments."""
        return {argument.name: argument.default for argument in self.arguments}

    @property
    def architectures(self) -> dict[str, dict[str, Any]]:
        """The arguments of each entrypoint that differ from timm's defaults."""
        return data_file(self.data_file)["architectures"]

    @property
    def old_names(self) -> Mapping[str, str]:
        """Names of earlier releases, which older folders contain, and the weights that timm maps them to."""
        return data_file(self.data_file).get("old_names", {})

    def entrypoint(self, architecture: str) -> str:
        """Return the current name, without the tag of published weights, of an architecture."""
        base = architecture.split(".")[0]
        return self.old_names.get(base, base).split(".")[0]

    def takes_any_size(self, architecture: str, model_args: Mapping[str, Any]) -> bool:
        """Return whether timm's model of an architecture with these arguments takes images of any size."""
        name = self.entrypoint(architecture)
        is_listed = self.any_size or name in data_file(self.data_file).get("any_size", ())
        default = self.architectures[name].get("dynamic_img_size", is_listed)
        return bool(model_args.get("dynamic_img_size", default))

    # Arguments and our config

    @abstractmethod
    def without_counterpart(self, given: Mapping[str, Any]) -> list[str]:
        """Return the combinations of arguments without a counterpart in our model, or that timm refuses."""

    @abstractmethod
    def joint_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of our config that depend on several arguments, or on part of one."""

    @abstractmethod
    def joint_arguments(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments that depend on several fields of our config, or on the layout."""

    def config_of(self, arguments: Mapping[str, Any], **fields: Any) -> PlainViTConfig:
        """Return our config for timm's arguments.

        Args:
            arguments: Arguments of the table; the others have timm's defaults.
            **fields: Further fields of the config, such as `id2label`.

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
            raise ExportError(f"plain-vit has no counterpart of parts of this timm model ({self.name}):", unknown)
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

    def arguments_for(self, config: PlainViTConfig, layout: str | None = None) -> dict[str, Any]:
        """Return the arguments for our config that differ from timm's defaults.

        Raises:
            ExportError: lists the parts of the model that this class cannot represent.
        """
        if faults := uneven_heads(config):
            raise ExportError("timm's heads must add up to the width of the model:", faults)
        given = {one.name: one.theirs(getattr(config, one.field)) for one in self.arguments if one.field is not None}
        given |= {"mlp_ratio": ratio_of(config.intermediate_size, config.hidden_size)}
        if given.get("pos_drop_rate", 0) is None:
            given["pos_drop_rate"] = config.hidden_dropout_prob
        given |= self.joint_arguments(config, layout)
        if lost := self.lost(config, given):
            raise ExportError(f"timm's {self.name} cannot represent this model:", lost)
        return {name: given[name] for name, default in self.defaults.items() if given.get(name, default) != default}

    def lost(self, config: PlainViTConfig, arguments: Mapping[str, Any]) -> list[str]:
        """Return the fields of our config that a model with these arguments would lose, like `lost_fields`.

        A value without a name in timm is written as another value. If that value makes the config invalid when it is
        read back, the original value is reported.
        """
        try:
            again = self.config_of(arguments)
        except ValueError as error:
            fields = [(one.field, getattr(config, one.field), one.words)
                      for one in self.arguments if one.field and one.words]  # fmt: skip
            nameless = [f"{field}={value!r}" for field, value, words in fields if value not in words.values()]
            return nameless or [str(error)]
        return lost_fields(config, lambda: again)

    def represents(self, config: PlainViTConfig) -> bool:
        """Return whether this class can represent a model."""
        try:
            self.arguments_for(config)
        except ExportError:
            return False
        return True

    def claims(self, config: PlainViTConfig) -> bool:
        """Return whether a model has parts of this class that the VisionTransformer lacks.

        If no class represents the model, the error then compares it with this class.
        """
        return False

    def norms_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that keep the final norms in place if the pooling is changed after construction."""
        return {"fc_norm": self.config_of(arguments).final_norm == "after_pooling"}

    def architecture_for(self, config: PlainViTConfig, layout: str | None = None) -> tuple[str, dict[str, Any]]:
        """Return the name and the `model_args` with which timm builds this model from a `config.json`.

        JSON cannot store classes, so the name is the closest architecture with the same classes.

        Raises:
            ExportError: for a model that timm can build in Python but has no architecture for.
        """
        wanted = {**self.defaults, **self.arguments_for(config, layout)}
        best: tuple[str, dict[str, Any]] | None = None
        for name in sorted(self.architectures, key=lambda name: not name.startswith("vit_")):
            have = {**self.defaults, **self.architectures[name]}
            if any(have[key] != wanted[key] for key in self.code_only):
                continue
            args = {key: value for key, value in wanted.items() if have[key] != value}
            if int(have["mlp_ratio"] * wanted["embed_dim"]) == int(wanted["mlp_ratio"] * wanted["embed_dim"]):
                args.pop("mlp_ratio", None)
            stored = self.as_json(args, wanted)
            if stored is not None and (best is None or len(stored) < len(best[1])):
                best = name, stored
        if best is None:
            raise ExportError(
                f"timm's {self.name} can build this model, but has no architecture for a config.json that combines:",
                [f"{key}={wanted[key]!r}" for key in dict.fromkeys((*self.code_only, "norm_layer", "norm_eps"))
                 if wanted[key] != self.defaults[key]],
            )  # fmt: skip
        return best

    def as_json(self, args: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments that differ from an architecture's in the words of a `config.json`; None without words.

        Args:
            args: The arguments that differ.
            wanted: All arguments of the model.
        """
        return args

    # Modules

    def layout_of(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the layout of the tensors for timm's arguments: the first, unless they select another."""
        return self.layouts[0]

    def builds(self, layout: str | None) -> bool:
        """Return whether the installed timm builds a model with the names of this layout; None is the default."""
        return layout not in self.old_layouts

    @abstractmethod
    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""

    def build(self, config: PlainViTConfig, layout: str | None, **given: Any) -> nn.Module:
        """Build timm's own model of this config, with random weights; `given` sets arguments in `free`.

        Raises:
            ExportError: lists every part that timm cannot represent.
        """
        from timm import layers

        if not self.builds(layout):
            raise ExportError(
                f"timm builds no model with the names of layout {layout!r}: omit it for the current names"
            )
        arguments = {**self.defaults, **self.arguments_for(config, layout), **given}
        norms = {"layernorm": layers.LayerNorm, "rmsnorm": layers.RmsNorm}
        norm = functools.partial(norms[arguments.pop("norm_layer")], eps=arguments.pop("norm_eps"))
        return self.construct({**arguments, "norm_layer": norm})

    def describe_module(self, module: Any, labels: Labels) -> Description:
        """Read the configuration of a live module.

        To overlook no part, the model is rebuilt from the arguments and compared with the original part by part.

        Raises:
            ExportError: lists every part that plain-vit does not support.
        """
        if len(module.blocks) == 0:
            raise ExportError("the model has no blocks (depth=0): its heads and norms cannot be read")
        block = module.blocks[0]
        home = self.block_module or type(module).__module__
        if type(block).__module__ != home or type(block).__name__ not in self.blocks:
            raise ExportError(
                f"{named_class(module)} does not open yet: its blocks.0 is a {class_path(block)}, and plain-vit opens "
                f"{', '.join(self.blocks)}"
            )
        parts = self.parts.of(module)
        arguments = {argument.name: argument.module(parts) for argument in self.arguments}
        config, layout = self.config_of(arguments, **labels(arguments["num_classes"])), self.layout_of(arguments)
        with meta_device():
            rebuilt = self.rebuild(module, config, layout, arguments)
        faults = differences(module, rebuilt, CLASSES, SILENT_ATTRIBUTES)
        if faults := [*faults, *self.changed_buffers(module)]:
            raise ExportError("plain-vit does not know parts of this timm model (found, not expected):", faults)
        return Description(config, layout)

    def rebuild(
        self, module: Any, config: PlainViTConfig, layout: str | None, arguments: Mapping[str, Any]
    ) -> nn.Module:
        """Build a live module again, from our config and the arguments that it does not determine."""
        return self.build(config, layout, **{name: arguments[name] for name in self.free})

    def changed_buffers(self, module: Any) -> list[str]:
        """Return the non-persistent buffers whose values differ from the values that timm computes."""
        faults = []
        for path, part in module.named_modules():
            buffers = {name: one for name, one in part._buffers.items() if one is not None and not one.is_meta}
            if not buffers or not hasattr(part, "init_non_persistent_buffers"):
                continue
            fresh = copy.copy(part)
            fresh._buffers = part._buffers | {name: torch.empty_like(one) for name, one in buffers.items()}
            fresh.init_non_persistent_buffers()
            faults += [
                f"{path}.{name} has not the values of its settings, such as after a cast to another dtype and back: "
                f"module.get_submodule({path!r}).init_non_persistent_buffers() computes them again"
                for name, one in buffers.items()
                if not _same(one, fresh._buffers[name])
            ]
        return faults

    # Tensors

    @abstractmethod
    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors (default: for the layout of `build`)."""

    def has_layout(self, layout: str | None) -> bool:
        """Return whether its tensors have this layout."""
        return layout in self.layouts

    def is_certain(self, names: Collection[str]) -> bool:
        """Return whether these names certainly belong to this class, not to a VisionTransformer."""
        return False

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

    def head_and_channels(self, arguments: Mapping[str, Any], tensors: StateDict) -> dict[str, Any]:
        """Return the arguments that users commonly change and that the tensors show."""
        kernel = tensors.get(f"{self.projection}.weight")
        if kernel is None or kernel.ndim != 4:
            missing = f"missing: '{self.projection}.weight'"
            raise MappingError(f"a model of timm's {self.name} has a kernel over an image:", [missing])
        return {"num_classes": classes_of(tensors), "in_chans": kernel.shape[1]}

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

    def given_by(self, architecture: str, model_args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that a `config.json` adds to its architecture."""
        return {name: value for name, value in model_args.items() if name not in self.silent_arguments}

    def norms_shown(self, tensors: StateDict) -> dict[str, Any]:
        """Return the arguments of the final norms that the tensors show, if the pooling is not the architecture's."""
        return {}

    def set_in_code(
        self, arguments: dict[str, Any], given: Mapping[str, Any], tensors: StateDict, hints: Hints
    ) -> tuple[dict[str, Any], list[Inference]]:
        """Add the classes that the tensors show, and that no `config.json` can store, to the arguments.

        Args:
            arguments: The arguments of the architecture, updated by `config.json`.
            given: The arguments in `config.json`.
            tensors: The result of `shown`.
            hints: The caller's hints.
        """
        return arguments, []

    def describe_checkpoint(
        self,
        name: str,
        model_args: Mapping[str, Any],
        stated: Size | None,
        tensors: StateDict,
        hints: Hints,
        source: str,
        labels: Labels,
    ) -> Description:
        """Return the description of a named architecture, after checking that the tensors match it.

        Args:
            name: The architecture.
            model_args: Arguments in `config.json` that differ from the architecture's.
            stated: Image size in `config.json`.
            tensors: The state dict.
            hints: The caller's hints.
            source: Origin of the name.
            labels: Returns the label fields of our config for a number of classes.

        Raises:
            ExportError: lists the arguments without a counterpart in our model.
            MappingError: lists how the tensors differ from the architecture's.
            AmbiguousCheckpointError: for an unknown image size, or for arguments set in code.
            CheckpointError: for hints that contradict the architecture.
        """
        shown, given = self.shown(tensors), self.given_by(name, model_args)
        in_code: list[Inference] = []
        arguments = {**self.defaults, **self.architectures[self.entrypoint(name)], **given}
        arguments |= self.head_and_channels(arguments, shown)
        self.config_of(arguments)  # raises an error for arguments without a counterpart
        if source == CONFIG:
            arguments, in_code = self.set_in_code(arguments, given, shown, hints)
        native = (arguments["img_size"], f"the grid of {name}")
        size = self._image_size(arguments, shown, hints, [(stated, CONFIG), native])
        arguments["img_size"] = size[0] if size else self._squarest(arguments, shown)
        if faults := self.faults(arguments, tensors):
            raise MappingError(f"the tensors are not of {name}, which {source} names:", faults)
        if isinstance(size, list):
            raise AmbiguousCheckpointError(
                f"{name} has another grid of patches, and {self.position_rows(shown)}: the size of its images is open",
                {"image_size": size},
            )
        described = self.described(arguments, tensors, labels(arguments["num_classes"]))
        config, inferences = described.config, [Inference("architecture", name, source)]
        for key in UNSEEN:
            value = "head_dim**-0.5" if key == "attention_scale" else getattr(config, key)
            inferences.append(Inference(key, value, f"the architecture that {source} names"))
        if hints.image_size is None:
            inferences.append(Inference("image_size", *size))
        inferences += [*in_code, *described.inferences]
        description = replace(described, inferences=inferences, stated_by=source)
        if said := unused_hints(replace(hints, architecture=None), description):
            raise CheckpointError(
                f"the hints contradict {name}, which {source} names: {'; '.join(said)}. Omit them"
                f"{self.advice(config, hints)}"
            )
        return description

    def advice(self, config: PlainViTConfig, hints: Hints) -> str:
        """Return how a model opens that differs from its architecture, for the end of an error message."""
        return ": a modified model opens from timm's folder with its config.json, or as a live module"

    def position_rows(self, tensors: StateDict) -> str:
        """Describe, for errors, the tensor that shows the number of patches."""
        return f"pos_embed has {tensors['pos_embed'].shape[1]} rows"

    def _image_size(
        self, arguments: Mapping[str, Any], tensors: StateDict, hints: Hints, stated: Sequence[tuple[Any, str]]
    ) -> tuple[Any, str] | list[tuple[int, int]]:
        """Return the image size and its origin, or the possible sizes.

        Args:
            arguments: All of timm's arguments.
            tensors: The result of `shown`.
            hints: The caller's hints.
            stated: Candidate sizes with their origins; the first that fits is used.

        Raises:
            CheckpointError: The caller's size does not match the number of rows.
            MappingError: There are no rows for patches.
        """
        config = self.config_of(arguments)
        if hints.image_size is not None:
            stated = [(pair(hints.image_size), "the caller")]
        if "pos_embed" not in tensors or config.position_embedding_type != "learned":
            return next((pair(size), origin) for size, origin in stated if size is not None)
        rows, patches = tensors["pos_embed"].shape[1], _patches_in_table(config, tensors)
        if patches < 1:
            raise MappingError("the position table has no row for a patch:", [f"pos_embed: {rows} rows"])
        for size, origin in stated:
            if size is not None and patches_in(size, config.patch_shape) == patches:
                return pair(size), f"{origin}, and the {rows} rows of pos_embed"
        if hints.image_size is not None and (fault := size_fault(stated[0][0], config.patch_shape, [patches])):
            raise CheckpointError(fault)
        return image_sizes(patches, config.patch_shape)

    def _squarest(self, arguments: Mapping[str, Any], tensors: StateDict) -> tuple[int, int]:
        """Return the image size of the squarest grid with as many patches as the position table."""
        config = self.config_of(arguments)
        down, across = grids(_patches_in_table(config, tensors))[0]
        return down * config.patch_shape[0], across * config.patch_shape[1]

    def could_be(self, arguments: Mapping[str, Any], tensors: StateDict) -> bool:
        """Return whether the hidden size and the patch size match the tensors from `shown`."""
        kernel = tensors.get(f"{self.projection}.weight")
        if kernel is None:
            return False
        width, *_, patch = kernel.shape
        return bool((arguments["embed_dim"], arguments["patch_size"]) == (width, patch))

    def fitting(self, tensors: StateDict, hints: Hints) -> dict[str, Sequence[tuple[int, int]] | None]:
        """Return the architectures whose tensors have these names and shapes and that match the caller's hints.

        A match does not prove that the model is one of them. Architectures with this grid of patches come first, then
        those for which the position table has a square grid. The values are the possible image sizes, or None for the
        architecture's own.
        """
        shown = self.shown(tensors)
        found: dict[str, Sequence[tuple[int, int]] | None] = {}
        for name, own in self.architectures.items():
            arguments = {**self.defaults, **own}
            if not self.could_be(arguments, shown):
                continue
            arguments |= self.head_and_channels(arguments, shown)
            try:
                size = self._image_size(arguments, shown, hints, [(arguments["img_size"], name)])
            except (CheckpointError, MappingError):
                continue
            height, width = arguments["img_size"] = size[0] if size else self._squarest(arguments, shown)
            described = Description(self.config_of(arguments))
            unused = unused_hints(replace(hints, image_size=None, architecture=None), described)
            if unused or width > self.most_elongated * height or self.faults(arguments, tensors):
                continue
            found[name] = size if isinstance(size, list) else None
        return dict(sorted(found.items(), key=lambda item: 0 if item[1] is None else 1 if item[1] else 2))

    def ask(self, tensors: StateDict, hints: Hints) -> PlainViTError:
        """Return the error for a state dict of this class without a given architecture."""
        names = list(self.fitting(tensors, hints))
        whose = f"of timm's {self.name} ({self.class_paths[0].split('.')[-2]}.py)"
        if names:
            unseen = f"do not show {self.unseen}, nor all else that changes the logits; give"
            return AmbiguousCheckpointError(f"the tensors are those {whose}, and {unseen}", {"architecture": names})
        return UnknownFormatError(
            f"none of the {len(self.architectures)} architectures {whose} that plain-vit opens has these names, shapes "
            "and hints; open the live module, or the folder with its config.json"
        )

    # Folders

    def first_convolution(self, config: PlainViTConfig) -> str:
        """Return timm's name of the layer that reads the image."""
        return self.projection

    def native_size(self, config: PlainViTConfig) -> dict[str, Any]:
        """Return the argument for the native image size of a model."""
        return {"img_size": config.image_shape}

    def resampling(self, config: PlainViTConfig, size: Sequence[int]) -> dict[str, Any]:
        """Return the arguments with which timm's model takes images of another size as our model does, if any."""
        return {}

    def changed_by_loading(self, config: PlainViTConfig) -> list[str]:
        """Return what timm's own loader would change in this model when it reads a file."""
        return []


def classes_of(tensors: StateDict) -> int:
    """Return the number of classes of the head in a state dict."""
    return tensors["head.weight"].shape[0] if "head.weight" in tensors else 0


def _same(buffer: torch.Tensor, computed: torch.Tensor) -> bool:
    """Return whether two buffers are equal, except for sines and logarithms, which GPUs and CPUs round differently."""
    if buffer.device.type == "cpu" or not buffer.is_floating_point():
        return torch.equal(buffer, computed)
    step = torch.finfo(buffer.dtype).eps
    return torch.allclose(buffer, computed, rtol=step, atol=max(1e-5, step))


def _patches_in_table(config: PlainViTConfig, tensors: StateDict) -> int:
    """Return the number of patches that have rows in the position table."""
    prefix = config.num_prefix_tokens if config.position_embedding_on_prefix else 0
    return int(tensors["pos_embed"].shape[1]) - prefix
