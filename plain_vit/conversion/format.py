"""Interface of a source format: hints, descriptions, and the abstract class `Format`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from ..configuration_plain_vit import ACTIVATIONS, PlainViTConfig
from ..errors import CheckpointError
from ..files.safetensors import save_state_dict
from ..files.torch_pickle import save_torch
from .engine import Row
from .infer import pair
from .pixels import default_processor

Size = int | tuple[int, int]
StateDict = Mapping[str, torch.Tensor]


# Factors on the attention scores that models have had, in words that need no digits.
SCALES = ("head_dim**-0.5", "hidden_size**-0.5")


@dataclass(frozen=True)
class Hints:
    """What the caller knows and a checkpoint may not say; None where the caller said nothing.

    Every hint that is given ends up in the model or in an error: see `unheeded`.

    Args:
        num_attention_heads: Heads of each attention.
        head_dim: Width of one head.
        attention_scale: Factor on the attention scores, a number or one of `SCALES`.
        layer_norm_eps: Epsilon of every norm.
        hidden_act: Activation of the MLP.
        pooling: One of the config's, such as "cls" or "mean"; "map" has as many heads as the blocks.
        pool_prefix_tokens: Whether the pooling reads class and register tokens too, not the patches alone.
        block_type: One of the config's, such as "sequential" or "post_norm".
        norm_type: One of the config's, "layer_norm" or "rms_norm".
        mlp_type: One of the config's, such as "mlp" or "swiglu_packed" (the first half of its first layer is the gate).
        position_embedding_type: One of the config's: "learned" is a table added to the tokens and nothing else, so no
            rotation of queries and keys.
        position_embedding_on_prefix: Whether the tokens before the patches have rows in that table.
        image_size: Native input size in pixels, an int or (height, width).
        patch_size: Size of a patch in pixels, likewise.
        num_channels: Channels of the input.
        architecture: The source's name of the model, such as timm's "vit_base_patch16_224" or torchvision's "vit_b_16".
        layout: Which of the format's layouts, such as the release of vit-pytorch that the checkpoint was trained with.
        key: Which of several models in one file or module.
        image_mean: Mean of each channel of the pixels the model was trained on, as values in 0..1.
        image_std: Deviation of each channel, likewise.

    Raises:
        CheckpointError: for a value that no model can have.
    """

    num_attention_heads: int | None = None
    head_dim: int | None = None
    attention_scale: float | str | None = None
    layer_norm_eps: float | None = None
    hidden_act: str | None = None
    pooling: str | None = None
    pool_prefix_tokens: bool | None = None
    block_type: str | None = None
    norm_type: str | None = None
    mlp_type: str | None = None
    position_embedding_type: str | None = None
    position_embedding_on_prefix: bool | None = None
    image_size: Size | None = None
    patch_size: Size | None = None
    num_channels: int | None = None
    architecture: str | None = None
    layout: str | None = None
    key: str | None = None
    image_mean: Sequence[float] | None = None
    image_std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            expected = EXPECTED[name]
            if not expected.admits(value):
                raise CheckpointError(f"{name} is {value!r}: expected {expected.text}")

    def given(self) -> dict[str, Any]:
        """Return what the caller said, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def scale(self, hidden_size: int, head_dim: int) -> float | None:
        """Return the factor on the attention scores as a number."""
        if not isinstance(self.attention_scale, str):
            return self.attention_scale
        return {"head_dim**-0.5": head_dim, "hidden_size**-0.5": hidden_size}[self.attention_scale] ** -0.5


class Expectation(NamedTuple):
    """What a hint may be: in words, and as a test."""

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
    """Return what the config takes for a field."""
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
EXPECTED = {
    "num_attention_heads": COUNT,
    "head_dim": COUNT,
    "attention_scale": Expectation(
        f"a positive number, or {' or '.join(SCALES)}",
        lambda value: value in SCALES if isinstance(value, str) else POSITIVE.admits(value),
    ),
    "layer_norm_eps": POSITIVE,
    "hidden_act": _one_of(ACTIVATIONS),
    "pooling": _choices("pooling"),
    "pool_prefix_tokens": FLAG,
    "block_type": _choices("block_type"),
    "norm_type": _choices("norm_type"),
    "mlp_type": _choices("mlp_type"),
    "position_embedding_type": _choices("position_embedding_type"),
    "position_embedding_on_prefix": FLAG,
    "image_size": SIZE,
    "patch_size": SIZE,
    "num_channels": COUNT,
    "architecture": TEXT,
    "layout": TEXT,
    "key": Expectation("a name", lambda value: isinstance(value, str)),
    "image_mean": NUMBERS,
    "image_std": NUMBERS,
}

# What changes logits and shows in no tensor's name or shape: a description names where each of these is from.
UNSEEN = ("num_attention_heads", "attention_scale", "layer_norm_eps", "hidden_act")
# What no comparison proves whose model was built from the same readings; of those beyond `UNSEEN`, what was inferred.
UNPROVEN = (
    *UNSEEN, "pooling", "pool_prefix_tokens", "block_type", "position_embedding_type", "position_embedding_on_prefix",
    "image_size", "patch_size", "num_channels", "architecture", "layout",
)  # fmt: skip


@dataclass(frozen=True)
class Inference:
    """A value that was read off the source, and off what."""

    field: str
    value: object
    source: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}, from {self.source}"


@dataclass(frozen=True)
class Description:
    """What a format read off a source: enough to build our model and to choose the rows.

    Args:
        config: Our configuration; `num_labels` is 0 where the source has no classifier.
        layout: Which of the format's layouts the tensors are in; None where it has one.
        inferences: What was read off what, for the report. For a checkpoint they name every field of `UNSEEN` that the
            caller did not.
        ignored: Patterns of source names that our model has no use for, each with the reason.
        prefix: What precedes every name of the model among the source's names; names without it are ignored with
            `ignored`.
    """

    config: PlainViTConfig
    layout: str | None = None
    inferences: Sequence[Inference] = ()
    ignored: Sequence[tuple[str, str]] = ()
    prefix: str = ""


def unheeded(hints: Hints, description: Description) -> list[str]:
    """Return the hints that a description did not take over, each with what it says instead.

    What the config holds is compared with it; an architecture and a layout have to be among the inferences.
    """
    config, inferred = description.config, {inference.field for inference in description.inferences}
    _, head_dim = config.attention_shape
    default_scale = (head_dim // 2 if config.attention_type == "differential" else head_dim) ** -0.5
    said: dict[str, Any] = {
        **hints.given(),
        "attention_scale": hints.scale(config.hidden_size, head_dim),
        **{name: pair(size) for name in ("image_size", "patch_size") if (size := getattr(hints, name)) is not None},
    }
    found: dict[str, Any] = {
        **{name: getattr(config, name) for name in EXPECTED if hasattr(config, name)},
        "attention_scale": default_scale if config.attention_scale is None else config.attention_scale,
        "image_size": config.image_shape,
        "patch_size": config.patch_shape,
    }
    faults = []
    for name in hints.given():
        if name in ("architecture", "layout"):
            if name not in inferred:
                faults.append(f"{name}={said[name]!r} (nothing is read from it here)")
        elif name in found and said[name] != found[name]:
            faults.append(f"{name}={said[name]!r} (the source has {found[name]!r})")
    return faults


def check_hints(hints: Hints, description: Description, source: str) -> None:
    """Refuse hints that the source contradicts or that nothing was read from."""
    if faults := unheeded(hints, description):
        raise CheckpointError(f"the hints contradict {source}: {'; '.join(faults)}. Correct these, or leave them out")


def label_fields(labels: Sequence[str]) -> dict[str, Any]:
    """Return the fields of our config that name its classes."""
    return {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}


class Format(ABC):
    """A source of checkpoints: its names, its configuration, its module."""

    name: str
    suffixes: tuple[str, ...]  # of the single file that a checkpoint of the format is; empty where it is a folder
    # Names of published files, without suffix, which end in the first digits of the file's SHA-256; what each holds.
    published_files: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def matches_names(self, names: Collection[str]) -> bool:
        """Tell whether a state dict with these names is of this format."""

    def strangers(self, names: Collection[str]) -> list[str]:
        """Return the names outside the model, where it has a prefix, that no wrapper of it has."""
        return []

    @abstractmethod
    def matches_module(self, module: nn.Module) -> bool:
        """Tell whether this very module, not one inside it, is of this format; its package is not imported."""

    def names_of_others(self, names: Collection[str]) -> str | None:
        """Return what these names are of, where the source has such models and none of ours opens them."""
        return None

    def surrounds(self, module: nn.Module) -> bool:
        """Tell whether a live module is known to hold a model, beside parts that are no part of it."""
        return False

    @abstractmethod
    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Read the configuration off a live module.

        Raises:
            ExportError: for a part that our model cannot express.
            AmbiguousCheckpointError: for what even the module does not say.
        """

    @abstractmethod
    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration off a checkpoint.

        Args:
            tensors: The tensors by name; shapes and dtypes are free to ask for, values may cost a read.
            settings: The configuration that lay beside them (`config.json`), empty where there was none.
            hints: What the caller said.

        Raises:
            AmbiguousCheckpointError: for what the checkpoint does not say, with all candidates at once.
        """

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return the image processor that prepares pixels as the source did, and what had to be assumed for it.

        This is for a source that says nothing of its pixels.

        Args:
            config: Our configuration.
            settings: As for `describe_checkpoint`.
            preprocessor: The source's `preprocessor_config.json`, empty where there was none.
            hints: What the caller said.
        """
        mean, std = hints.image_mean, hints.image_std
        return default_processor(config.image_size, config.num_channels, mean=mean, std=std)

    @abstractmethod
    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the conversion table; without a layout that of `build_module`."""

    def independent_module(self, description: Description, settings: Mapping[str, Any]) -> nn.Module | None:
        """Build the source's own model by the source's own reading of a name or a `config.json`, not by ours.

        What a comparison with `build_module`'s model shares with ours, it cannot prove.

        Args:
            description: What the checkpoint was found to be.
            settings: As for `describe_checkpoint`.

        Returns:
            The module, in the layout of the checkpoint; None where the source has no reading of its own.
        """
        return None

    @abstractmethod
    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build the format's own module with fresh weights.

        Raises:
            ExportError: lists every part that the format cannot express.
        """

    def for_module(self, tensors: StateDict, config: PlainViTConfig, layout: str | None) -> StateDict:
        """Return a checkpoint's tensors under the names of `build_module`'s module: here the names are the same.

        Args:
            tensors: As in a checkpoint of this layout, without the description's prefix.
            config: Our configuration.
            layout: Which of the format's layouts.
        """
        return tensors

    @abstractmethod
    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> None:
        """Write a checkpoint as the format's own package writes it.

        Args:
            config: Our configuration.
            tensors: Our tensors, named as in `rows`.
            path: An empty folder, or for the formats that have `suffixes` a file that does not exist.
            image_processor: The processor to write beside the model, where the format has a place for one.
            layout: Which of the format's layouts; None for today's.
        """


def write_state_dict(state: StateDict, path: Path) -> None:
    """Write a state dict into a single file, as safetensors or with `torch.save`, whichever its name says."""
    if path.suffix == ".safetensors":
        save_state_dict(state, path, progress=False)
    else:
        save_torch(state, path)
