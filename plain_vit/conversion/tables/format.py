"""Interface of a source format: hints, descriptions, and the abstract class `Format`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args

import torch
from torch import nn

from ...checks_plain_vit import ACTIVATIONS, check_labels
from ...configuration_plain_vit import PlainViTConfig
from ...errors import CheckpointError, ExportError
from ...files.safetensors import save_state_dict
from ...files.torch_pickle import save_torch
from .data_files import models_of
from .engine import Row
from .infer import pair
from .pixels import default_processor

Size = int | tuple[int, int]
StateDict = Mapping[str, torch.Tensor]


HEAD = "head"  # the part that `drop` may name
DROP_HEAD = (
    f"to open the encoder alone, leave the head out: drop=({HEAD!r},) in Python, --drop {HEAD} on the command line"
)

MASK_TOKENS = ("mask_token", "masked_embed")  # "masked_embed" is iBOT's name
MASK_TOKEN = "stands for hidden patches in pre-training, and no output reads it"

# Common factors on the attention scores.
SCALES = ("head_dim**-0.5", "hidden_size**-0.5")


class Expectation(NamedTuple):
    """The valid values of a hint: as text, and as a predicate."""

    text: str
    admits: Callable[[Any], bool]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: object) -> bool:
    return _is_count(value) or (isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_count, value)))


def _one_of(choices: Collection[str]) -> Expectation:
    return Expectation(f"one of {', '.join(choices)}", lambda value: value in choices)


def _choices(field: str) -> Expectation:
    """Return the valid values of a config field."""
    return _one_of(get_args(PlainViTConfig.__annotations__[field]))


COUNT = Expectation("a positive int", _is_count)
SIZE = Expectation("a positive int or (height, width) in pixels", _is_size)
POSITIVE = Expectation("a positive number", lambda value: _is_number(value) and value > 0)
TEXT = Expectation("a name", lambda value: isinstance(value, str) and bool(value))
FLAG = Expectation("True or False", lambda value: isinstance(value, bool))
NUMBERS = Expectation(
    "one finite number per channel",
    lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_number, value)),
)
SCALE = Expectation(
    f"a positive number, or {' or '.join(SCALES)}",
    lambda value: value in SCALES if isinstance(value, str) else POSITIVE.admits(value),
)
KEY = Expectation("a name", lambda value: isinstance(value, str))
PARTS = Expectation(
    f"a list of parts, such as ({HEAD!r},)",
    lambda value: isinstance(value, Sequence) and not isinstance(value, str) and set(value) <= {HEAD},
)
LABELS = Expectation(
    "a list of names, or names by number",
    lambda value: isinstance(value, Mapping | Sequence) and not isinstance(value, str),
)


@dataclass(frozen=True)
class Hints:
    """Settings given by the caller that a checkpoint may not contain; None if not given.

    Every given hint is either used in the model or reported in an error: see `unused_hints`. The annotations give the
    valid values.

    Args:
        num_attention_heads: Number of heads of each attention.
        head_dim: Width of one head.
        attention_scale: Factor on the attention scores, a number or one of `SCALES`.
        layer_norm_eps: Epsilon of every norm.
        hidden_act: Activation of the MLP.
        pooling: As in the config, such as "cls" or "mean"; the pooling "map" gets as many heads as the blocks.
        pool_prefix_tokens: Whether the pooling includes class and register tokens, not only the patches.
        final_norm: As in the config, such as "before_pooling" or "after_pooling".
        block_type: As in the config, such as "sequential" or "post_norm".
        norm_type: As in the config, "layer_norm" or "rms_norm".
        mlp_type: As in the config, such as "mlp" or "swiglu_packed" (the first half of its first layer is the gate).
        position_embedding_type: As in the config, such as "learned", a table added to the tokens.
        rope_type: "none" if queries and keys are not rotated, which no tensor shows. For a model with
            rotary embeddings, give its `architecture`.
        position_embedding_on_prefix: Whether the position table has rows for the tokens before the patches.
        image_size: Native input size in pixels, an int or (height, width).
        patch_size: Size of a patch in pixels, an int or (height, width).
        num_channels: Number of input channels.
        architecture: The source's name of the model, such as timm's "vit_base_patch16_224" or torchvision's "vit_b_16".
            For transformers without a config.json, the class, such as "ViTForImageClassification".
        layout: The layout of the format, such as the release of vit-pytorch that the checkpoint was trained with.
        key: The model to use if a file or module contains several.
        image_mean: Mean of each channel of the training images, with values in 0..1.
        image_std: Standard deviation of each channel, with values in 0..1.
        drop: Parts to leave out. `("head",)` drops the classifier and opens only the encoder.
        id2label: Names of the labels, which replace the source's.

    Raises:
        CheckpointError: for an invalid value.
    """

    num_attention_heads: Annotated[int | None, COUNT] = None
    head_dim: Annotated[int | None, COUNT] = None
    attention_scale: Annotated[float | str | None, SCALE] = None
    layer_norm_eps: Annotated[float | None, POSITIVE] = None
    hidden_act: Annotated[str | None, _one_of(ACTIVATIONS)] = None
    pooling: Annotated[str | None, _choices("pooling")] = None
    pool_prefix_tokens: Annotated[bool | None, FLAG] = None
    final_norm: Annotated[str | None, _choices("final_norm")] = None
    block_type: Annotated[str | None, _choices("block_type")] = None
    norm_type: Annotated[str | None, _choices("norm_type")] = None
    mlp_type: Annotated[str | None, _choices("mlp_type")] = None
    position_embedding_type: Annotated[str | None, _choices("position_embedding_type")] = None
    rope_type: Annotated[str | None, _one_of(("none", "axial", "mixed"))] = None
    position_embedding_on_prefix: Annotated[bool | None, FLAG] = None
    image_size: Annotated[Size | None, SIZE] = None
    patch_size: Annotated[Size | None, SIZE] = None
    num_channels: Annotated[int | None, COUNT] = None
    architecture: Annotated[str | None, TEXT] = None
    layout: Annotated[str | None, TEXT] = None
    key: Annotated[str | None, KEY] = None
    image_mean: Annotated[Sequence[float] | None, NUMBERS] = None
    image_std: Annotated[Sequence[float] | None, NUMBERS] = None
    drop: Annotated[Sequence[str] | None, PARTS] = None
    id2label: Annotated[Mapping[int, str] | Sequence[str] | None, LABELS] = None

    def __post_init__(self) -> None:
        for hint in fields(self):
            value, expected = getattr(self, hint.name), get_args(hint.type)[1]
            if value is not None and not expected.admits(value):
                raise CheckpointError(f"{hint.name} is {value!r}: expected {expected.text}")

    def given(self) -> dict[str, Any]:
        """Return the given hints by name."""
        return {name: value for name in HINTS if (value := getattr(self, name)) is not None}

    def scale(self, hidden_size: int, head_dim: int) -> float | None:
        """Return the factor on the attention scores as a number."""
        if not isinstance(self.attention_scale, str):
            return self.attention_scale
        return {"head_dim**-0.5": head_dim, "hidden_size**-0.5": hidden_size}[self.attention_scale] ** -0.5

    def heads_in(self, width: int, shown: int | None = None) -> tuple[int | None, list["Inference"]]:
        """Return the number of heads, and where it is from if the caller gives only their width.

        Args:
            width: Width of all heads.
            shown: The number of heads that the tensors show, if they do.

        Raises:
            CheckpointError: The heads do not divide the width.
        """
        heads, inferences = self.num_attention_heads if shown is None else shown, []
        if heads is None and self.head_dim is not None:
            heads = max(1, width // self.head_dim)
            source = f"head_dim {self.head_dim} in a width of {width}"
            inferences.append(Inference("num_attention_heads", heads, source))
        if heads is not None and (heads < 1 or width % heads):
            raise CheckpointError(f"{heads} heads do not divide the width {width}: expected a divisor of it")
        return heads, inferences


HINTS = tuple(hint.name for hint in fields(Hints))

# Three groups of settings that affect the outputs but that tensors do not prove. `Report.unproven` lists them.
#
# `UNSEEN`: config fields for which every description must give an origin.
UNSEEN = ("num_attention_heads", "attention_scale", "layer_norm_eps", "hidden_act")
# `UNPROVEN`: these fields, the other hints except for those in `NEUTRAL`, and settings without a hint.
NEUTRAL = ("key", "image_mean", "image_std", "drop", "id2label")
UNPROVEN = (
    *UNSEEN,
    *(name for name in HINTS if name not in (*UNSEEN, *NEUTRAL)),
    *("head", "rope_theta", "representation_act"),
)
# `NO_TENSOR`: computations without parameters. They are assumed to be absent, except for rotary embeddings that an
# architecture is known to have.
NO_TENSOR = {
    "rope_type": "a rotation of queries and keys",
    "computed_positions": "positions that are computed and added",
    "overlapping_patches": "patches that overlap",
    "attention_mask": "windows or masks of the attention",
    "attention_bias": "a bias of the attention by distance",
    "attention_cap": "a limit or another function of the attention scores",
    "scaling": "factors on pixels, tokens, residuals or logits",
    "token_mixing": "tokens shifted, mixed, merged or dropped between layers",
    "norms_without_weights": "norms without weights",
}


@dataclass(frozen=True)
class Inference:
    """A value inferred from the source, and where it comes from."""

    field: str
    value: object
    source: str

    def __str__(self) -> str:
        value = SCALES[0] if self.field == "attention_scale" and self.value is None else self.value
        return f"{self.field} = {value!r}, from {self.source}"


@dataclass(frozen=True)
class Description:
    """What a format knows about a source: all that is needed to build our model and to choose the rows.

    Args:
        config: Our configuration; `num_labels` is 0 if the source has no classifier.
        layout: The layout of the tensors; None if the format has only one.
        inferences: The inferred values, for the report. For a checkpoint they include every field of `UNSEEN` that the
            caller did not give.
        ignored: Patterns of source names that our model does not use, each with the reason.
        prefix: Prefix of all names of the model in the source. Names without it must match `ignored`.
        stated_by: What names the class of the model: a file in its folder or the caller; None if nothing does.
    """

    config: PlainViTConfig
    layout: str | None = None
    inferences: Sequence[Inference] = ()
    ignored: Sequence[tuple[str, str]] = ()
    prefix: str = ""
    stated_by: str | None = None


def unused_hints(hints: Hints, description: Description) -> list[str]:
    """Return the hints that a description does not follow, each with the value found.

    Hints that are config fields are compared with the config; an architecture or a layout must be among the inferences.
    """
    config, inferred = description.config, {inference.field for inference in description.inferences}
    _, head_dim = config.attention_shape
    default_scale = (head_dim // 2 if config.attention_type == "differential" else head_dim) ** -0.5
    given: dict[str, Any] = {
        **hints.given(),
        "attention_scale": hints.scale(config.hidden_size, head_dim),
        **{name: pair(size) for name in ("image_size", "patch_size") if (size := getattr(hints, name)) is not None},
    }
    found: dict[str, Any] = {
        **{name: getattr(config, name) for name in HINTS if hasattr(config, name) and name not in NEUTRAL},
        "attention_scale": default_scale if config.attention_scale is None else config.attention_scale,
        "image_size": config.image_shape,
        "patch_size": config.patch_shape,
    }
    faults = []
    for name in hints.given():
        if name in ("architecture", "layout"):
            if name not in inferred:
                faults.append(f"{name}={given[name]!r} (it has no effect here)")
        elif name in found and given[name] != found[name]:
            faults.append(f"{name}={given[name]!r} (the source has {found[name]!r})")
    return faults


def check_hints(hints: Hints, description: Description, source: str) -> None:
    """Raise an error if the source contradicts a hint, or if a hint has no effect."""
    if faults := unused_hints(hints, description):
        raise CheckpointError(f"the hints contradict {source}: {'; '.join(faults)}. Correct or omit them")


def label_fields(labels: Sequence[str]) -> dict[str, Any]:
    """Return the config fields that name the labels."""
    return {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}


def name_labels(config: PlainViTConfig, labels: Mapping[int, str] | Sequence[str]) -> None:
    """Set the label names of a config.

    Raises:
        CheckpointError: The number of names differs from the number of labels, or a name is invalid.
    """
    named = dict(labels.items() if isinstance(labels, Mapping) else enumerate(labels))
    if sorted(named) != list(range(config.num_labels or 0)):
        raise CheckpointError(f"id2label names {len(named)} labels: expected {config.num_labels}, numbered from 0")
    config.id2label = named
    try:
        check_labels(config)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    config.label2id = {name: index for index, name in named.items()}


@dataclass(frozen=True)
class Probes:
    """Where to observe the stages of a model, as patterns of module names.

    Args:
        patches: Module whose output is the projected patches.
        blocks: Modules whose input is the tokens before each block; `{}` is the number of the block.
        end: Module after the last block; None if the output of the last block is used instead.
        end_is_norm: Whether `end` is the final norm: its input is the tokens after the last block, and its output a
            stage of its own. If not, its output is the tokens after the last block.
        attention: Our attention implementation with the source's order of operations.
    """

    patches: str
    blocks: str
    end: str | None
    end_is_norm: bool = True
    attention: str = "sdpa"


@dataclass(frozen=True)
class Contract:
    """How a model takes images and returns tokens; the default is pixels (B, C, H, W) and tokens (B, L, D).

    Args:
        inputs: Returns the arguments of the model for its pixels; the first is passed by its position.
        rows: Returns tokens of the model as (B, L, D), with the patches in raster order, given its pixels.
        in_one_row: Whether the tokens of all images of a batch are in one row.
        others: Stages and outputs that ours do not have, such as what other layers make of the tokens.
    """

    inputs: Callable[[Any, torch.Tensor], dict[str, torch.Tensor]] = lambda model, pixels: {"pixel_values": pixels}
    rows: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = lambda model, tokens, pixels: tokens
    in_one_row: bool = False
    others: tuple[str, ...] = ()


class Format(ABC):
    """A source of checkpoints: its tensor names, configuration and module.

    Names and shapes do not prove that two models compute the same. `describe_module` finds replaced parts with
    `compare_modules.differences`; `build_module` and `write` find what the source cannot represent with `lost_fields`.
    """

    name: str
    suffixes: tuple[str, ...]  # of single-file checkpoints; empty if a checkpoint is a folder
    # Classes that open, by the prefix of their package's modules, for error messages.
    opens: Mapping[str, Sequence[str]] = MappingProxyType({})
    # Where to observe the stages of a model. The first entry whose modules are in the model applies.
    probes: tuple[Probes, ...] = ()
    heads: tuple[str, ...] = ()  # names of the classifier's modules

    @property
    def architectures(self) -> Collection[str]:
        """The valid names for the hint `architecture`."""
        return ()

    @property
    def published_files(self) -> Mapping[str, str]:
        """Architectures by published file: its name without suffix, which ends in a prefix of the SHA-256."""
        return {}

    def config_of_settings(self, settings: Mapping[str, Any]) -> PlainViTConfig | None:
        """Return our config of the model that a `config.json` describes; None if it is of another source.

        Raises:
            UnknownFormatError: plain-vit does not open the model.
            ExportError: Our config cannot represent it.
        """
        return None

    @abstractmethod
    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether a state dict with these names is in this format."""

    def unexpected_names(self, names: Collection[str]) -> list[str]:
        """Return the names outside the model that belong to no known wrapper."""
        return []

    def heads_in(self, tensors: StateDict) -> list[str]:
        """Return the modules of the classifier that have tensors."""
        return [place for place in self.heads if any(name.startswith((f"{place}.", f"{place}/")) for name in tensors)]

    def classifiers(self, tensors: StateDict) -> list[str]:
        """Return the modules of the classifier; it opens only if each is one dense layer with a bias."""
        return self.heads_in(tensors)

    def unread(self, tensors: StateDict) -> dict[str, str]:
        """Return the tensors that affect no output and that no layout has, each with the reason."""
        return {name: MASK_TOKEN for name in tensors if name.rpartition(".")[2] in MASK_TOKENS}

    @abstractmethod
    def matches_module(self, module: nn.Module) -> bool:
        """Return whether this module itself, not a submodule, is of this format; does not import the package."""

    def names_of_others(self, names: Collection[str]) -> str | None:
        """Return a description of the unsupported model of this source that has these names, if any."""
        return None

    def has_architecture(self, name: str) -> bool:
        """Return whether a name is valid for the hint `architecture`."""
        return name in self.architectures

    def settings_of_others(self, settings: Mapping[str, Any]) -> str | None:
        """Return a description of the unsupported model that a `config.json` of this source describes, if any."""
        return None

    def owns(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a `config.json` is of a model of this source, whatever its tensors are called."""
        return False

    def models_inside(self, settings: Mapping[str, Any], tensors: StateDict) -> Mapping[str, Mapping[str, Any]]:
        """Return the models inside a larger one that a `config.json` describes, if any.

        Returns:
            For the prefix of the tensors of each model, the contents of a `config.json` of its own.
        """
        return {}

    def contains_model(self, module: nn.Module) -> bool:
        """Return whether a live module is of a class known to contain a model together with unrelated parts."""
        return False

    def contract_of(self, module: nn.Module) -> Contract | None:
        """Return how a model of this source takes images, if not as pixels."""
        return None

    @abstractmethod
    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Read the configuration of a live module.

        Raises:
            ExportError: for a part that our model cannot represent.
            AmbiguousCheckpointError: for settings that the module does not determine.
        """

    @abstractmethod
    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration of a checkpoint.

        Args:
            tensors: The tensors by name. Shapes and dtypes cost nothing; values may have to be read from disk.
            settings: Contents of its `config.json`, empty if there is none.
            hints: The caller's hints.

        Raises:
            AmbiguousCheckpointError: for settings that the checkpoint does not determine, with all candidates at once.
        """

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return an image processor with the preprocessing of the source, and the assumptions made.

        The default implementation is for sources that do not record their preprocessing.

        Args:
            config: Our configuration.
            settings: As for `describe_checkpoint`.
            preprocessor: Settings of the image processor in the source's folder, empty if there are none.
            hints: The caller's hints.
        """
        mean, std = hints.image_mean, hints.image_std
        return default_processor(config.image_size, config.num_channels, mean=mean, std=std)

    @abstractmethod
    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the conversion table of a layout (default: the layout of `build_module`)."""

    def independent_module(self, description: Description, settings: Mapping[str, Any]) -> nn.Module | None:
        """Build the source's own model from a name or a `config.json`, as the source interprets it.

        A model of `build_module` shares our interpretation, so a comparison with it cannot detect errors in that.

        Args:
            description: The description of the checkpoint.
            settings: As for `describe_checkpoint`.

        Returns:
            The module, in the layout of the checkpoint; None if the source cannot build one.
        """
        return None

    @abstractmethod
    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build the format's own module with random weights.

        Raises:
            ExportError: lists every part that the format cannot represent.
        """

    def for_module(self, tensors: StateDict, config: PlainViTConfig, layout: str | None) -> StateDict:
        """Rename a checkpoint's tensors for the module of `build_module`; by default the names are the same.

        Args:
            tensors: The tensors of a checkpoint of this layout, without the description's prefix.
            config: Our configuration.
            layout: The layout of the format.
        """
        return tensors

    @abstractmethod
    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> str | None:
        """Write a checkpoint as the format's own package writes it.

        Args:
            config: Our configuration.
            tensors: Our tensors, named as in `rows`.
            path: For formats with `suffixes` a file that does not exist, otherwise an empty folder.
            image_processor: The processor to write with the model, if the format supports it.
            layout: The layout of the format; None for the latest.

        Returns:
            The layout written, if the tensors alone may not show it.

        Raises:
            ExportError: lists every part that the format cannot represent.
        """


class FileFormat(Format):
    """A source of files alone, whose models are no torch modules that open.

    Attributes:
        not_opened: What the error for a live module says; `{name}` is the name of the format.
        not_built: What the error of `to_module` says.
    """

    not_opened = "live modules of {name} do not open: save the state dict, and open the file"
    not_built = "plain-vit builds no live modules of {name}: write its state dict with to_checkpoint"

    def matches_module(self, module: nn.Module) -> bool:
        """Return False: there are no live modules."""
        return False

    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Refuse a live module.

        Raises:
            ExportError: always.
        """
        raise ExportError(self.not_opened.format(name=self.name))

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Refuse to build a module.

        Raises:
            ExportError: always.
        """
        raise ExportError(self.not_built.format(name=self.name))


class NamedFormat(Format):
    """A source whose package builds models by name, and publishes weights for them."""

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """The models that open by name, and what is known about the weights of each."""
        return models_of(self.name)

    @abstractmethod
    def settings_of(self, name: str) -> Mapping[str, Any]:
        """Return what the `config.json` of one of `models` says."""

    def weights_of(self, name: str) -> str | None:
        """Return the Hub id, or the downloaded file, of the weights of one of `models`; None if there are none."""
        return self.models[name].get("hub")


def write_state_dict(state: StateDict, path: Path) -> None:
    """Write a state dict to a single file, as safetensors or with `torch.save`, depending on its suffix."""
    if path.suffix == ".safetensors":
        save_state_dict(state, path, progress=False)
    else:
        save_torch(state, path)
