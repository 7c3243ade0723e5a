"""What the conversion asks of a source format, and what a format answers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..configuration_plain_vit import PlainViTConfig
from .engine import Row
from .preprocessing import default_processor
from .writing import save_state_dict

Size = int | tuple[int, int]
StateDict = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Hints:
    """What the caller knows and a checkpoint may not say; None where the caller said nothing.

    Args:
        num_attention_heads: Heads of each attention.
        head_dim: Width of one head.
        pooling: "cls" or "mean".
        image_size: Native input size in pixels, an int or (height, width).
        patch_size: Size of a patch in pixels, likewise.
        num_channels: Channels of the input.
        attention_scale: Factor on the attention scores.
        layer_norm_eps: Epsilon of every norm.
        hidden_act: Activation of the MLP.
        architecture: timm's name of the model, such as "vit_base_patch16_224".
        layout: Which of the format's layouts, such as the release of vit-pytorch that the checkpoint was trained with.
        key: Which of several models in one file or module.
        image_mean: Mean of each channel of the pixels the model was trained on, as values in 0..1.
        image_std: Deviation of each channel, likewise.
    """

    num_attention_heads: int | None = None
    head_dim: int | None = None
    pooling: str | None = None
    image_size: Size | None = None
    patch_size: Size | None = None
    num_channels: int | None = None
    attention_scale: float | None = None
    layer_norm_eps: float | None = None
    hidden_act: str | None = None
    architecture: str | None = None
    layout: str | None = None
    key: str | None = None
    image_mean: Sequence[float] | None = None
    image_std: Sequence[float] | None = None


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
        inferences: What was read off what, for the report.
        ignored: Patterns of source names that our model has no use for, each with the reason.
        prefix: What stands before every name of the model among the source's names; names without it are ignored with
            `ignored`.
    """

    config: PlainViTConfig
    layout: str | None = None
    inferences: Sequence[Inference] = ()
    ignored: Sequence[tuple[str, str]] = ()
    prefix: str = ""


class Format(Protocol):
    """A source of checkpoints: its names, its configuration, its module."""

    name: str
    suffixes: tuple[str, ...]  # of the single file that a checkpoint of the format is; empty where it is a folder

    def matches_names(self, names: Collection[str]) -> bool:
        """Tell whether a state dict with these names is of this format."""

    def matches_module(self, module: nn.Module) -> bool:
        """Tell whether this very module, not one inside it, is of this format; its package is not imported."""

    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Read the configuration off a live module.

        Raises:
            ExportError: for a part that our model cannot express.
            AmbiguousCheckpointError: for what even the module does not say.
        """

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

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the conversion table; without a layout that of `build_module`."""

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build the format's own module with fresh weights.

        Raises:
            ExportError: lists every part that the format cannot express.
        """

    def for_module(self, tensors: StateDict, config: PlainViTConfig, layout: str | None) -> StateDict:
        """Return a checkpoint's tensors under the names of `build_module`'s module: here the names are the same.

        Args:
            tensors: As they stand in a checkpoint of this layout, without the description's prefix.
            config: Our configuration.
            layout: Which of the format's layouts.
        """
        return tensors

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
        torch.save(state, path)
