"""Weights of transformers without a `config.json`: the caller names the class, tensors and hints determine the rest.

The result is the settings that a `config.json` would contain, from the defaults of the class, the tensors and the
hints. An error asks for all other settings that affect the outputs.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ....configuration_plain_vit import PlainViTConfig
from ....errors import AmbiguousCheckpointError, CheckpointError, MappingError, few
from ...tables.engine import INDEX, Row, ignored_names, without_prefix
from ...tables.format import DROP_HEAD, Hints, Inference, StateDict
from ...tables.infer import grids, head_counts, image_sizes, pair, ratio_of, size_fault
from .families import (
    ARCHITECTURES,
    CONTAINERS,
    KERNEL,
    LAYER,
    TABLE,
    Architecture,
    container_of,
    gated_width,
)
from .installed import class_named, config_class

# Candidates in addition to the default of the class.
EPSILONS = (1e-6, 1e-5, 1e-12)
ACTIVATIONS = ("gelu", "quick_gelu", "gelu_pytorch_tanh", "silu", "relu")
CHANNELS = (3, 1, 4)

QUERY, QUERY_NORM = f"{LAYER}.attention.q_proj.weight", f"{LAYER}.attention.q_norm.weight"
FC1, REGISTERS = f"{LAYER}.mlp.fc1.weight", "vit.embeddings.register_tokens"
DISTANCES = f"{LAYER}.attention.relative_position_bias"  # tables of SAM
SCORES = (f"{LAYER}.attention.relative_position_bias.table", "vit.relative_position_bias.table")
TOKENS = ("vit.embeddings.cls_token", "vit.embeddings.distillation_token")
# Settings that affect outputs but no tensor, with our fields. The defaults of the class are assumed.
ASSUMED = {"rope_theta": "rope_theta", "rope_parameters": "rope_theta", "pooler_act": "representation_act"}
EITHER_MLP = [PlainViTConfig(mlp_type=kind) for kind in ("mlp", "swiglu")]


@dataclass(frozen=True)
class Parts:
    """The tensors of a class, by our names.

    Args:
        architecture: The class.
        tensors: Its tensors, without the prefix of the encoder.
        hints: The caller's hints.
    """

    architecture: Architecture
    tensors: StateDict
    hints: Hints

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of all layouts of the class."""
        family = self.architecture.family
        rows = [row for config in EITHER_MLP for on_disk in (True, False) for row in family.rows_of(config, on_disk)]
        return [*rows, *self.architecture.head.rows]

    def get(self, ours: str, layer: int = 0) -> torch.Tensor | None:
        """Return the source tensor that one of our tensors is made from; None if there is none."""
        for row in self.rows:
            names, sources = row.targets, row.sources
            for place, name in enumerate(names):
                leaf = ours.removeprefix(name)
                if not ours.startswith(name) or leaf not in ("", ".weight", ".bias"):
                    continue
                apart = len(sources) == len(names)
                source = sources[place if apart else 0].replace("{}", str(layer))
                if (found := self.tensors.get(source + leaf)) is not None:
                    return found if apart else found.chunk(len(names))[place]
        return None

    def has(self, ours: str) -> bool:
        """Return whether the checkpoint has the source of one of our tensors."""
        return self.get(ours) is not None

    def there(self, ours: str) -> torch.Tensor:
        """Return the source tensor that one of our tensors is made from.

        Raises:
            MappingError: There is none.
        """
        if (found := self.get(ours)) is None:
            raise MappingError("the tensors are not those of the class:", [f"nothing makes {ours.format(0)!r}"])
        return found

    @property
    def width(self) -> int:
        """Hidden size."""
        return self.there(KERNEL).shape[0]

    @property
    def depth(self) -> int:
        """Number of layers."""
        sources = {str(row.source) for row in self.rows if row.ours == f"{LAYER}.layernorm_before"}
        patterns = [re.compile(re.escape(source).replace(r"\{\}", INDEX) + r"\.weight") for source in sources]
        matches = (pattern.fullmatch(name) for pattern in patterns for name in self.tensors)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.has(f"{LAYER}.mlp.gate.weight")

    @property
    def heads(self) -> int | None:
        """Number of heads; None if neither a tensor nor a hint gives it."""
        distances = self.get(f"{DISTANCES}.rows")
        if distances is not None:
            return self.there(QUERY).shape[0] // distances.shape[-1]
        tables, norm = [table for name in SCORES if (table := self.get(name)) is not None], self.get(QUERY_NORM)
        width = self.there(QUERY).shape[0]
        if tables:
            return tables[0].shape[1]
        if norm is not None and norm.shape[0] < width:  # a norm per head, not over all heads
            return width // norm.shape[0]
        if self.hints.num_attention_heads is None and self.hints.head_dim is not None:
            return max(1, width // self.hints.head_dim)
        return self.hints.num_attention_heads

    @property
    def key_value_heads(self) -> list[int] | None:
        """Number of key and value heads of each layer; None if the number of heads is unknown."""
        if (heads := self.heads) is None:
            return None
        head_dim = self.there(QUERY).shape[0] // heads
        keys = [self.get(f"{LAYER}.attention.k_proj.weight", layer) for layer in range(self.depth)]
        return [heads if key is None else key.shape[0] // head_dim for key in keys]

    @property
    def patch_size(self) -> tuple[int, int] | None:
        """Patch size in pixels, (height, width); None if a dense layer projects the patches and no hint gives it."""
        kernel = self.there(KERNEL)
        if kernel.ndim == 4:
            return kernel.shape[2], kernel.shape[3]
        return None if self.hints.patch_size is None else pair(self.hints.patch_size)

    @property
    def channels(self) -> int | None:
        """Number of image channels; None if the patch size is unknown."""
        kernel, patch = self.there(KERNEL), self.patch_size
        return kernel.shape[1] if kernel.ndim == 4 else None if patch is None else kernel.shape[1] // math.prod(patch)

    @property
    def patches(self) -> int | None:
        """Number of patches of an image; None if no position table shows it."""
        if (table := self.get(TABLE)) is not None:
            return math.prod(table.shape[:-1]) - sum(map(self.has, TOKENS))
        distances = next((table.shape[0] - 3 for name in SCORES if (table := self.get(name)) is not None), None)
        return None if distances is None else ((math.isqrt(max(distances, 0)) + 1) // 2) ** 2

    @cached_property
    def windows(self) -> tuple[int, list[int]]:
        """Side of the windows in patches, 0 for none, and the layers without windows.

        Raises:
            MappingError: No table shows them.
        """
        table, tables = self.get(TABLE), [self.get(f"{DISTANCES}.rows", layer) for layer in range(self.depth)]
        if table is None or table.ndim != 4 or not all(one is not None for one in tables):
            raise MappingError("no table of positions shows the windows:", ["give the folder with config.json"])
        sides = [(one.shape[0] + 1) // 2 for one in tables if one is not None]
        in_windows = {side for side in sides if side != table.shape[1]}
        if len(in_windows) > 1:
            raise MappingError("the tensors are not those of the class:", [f"windows of {sorted(in_windows)} patches"])
        size = next(iter(in_windows), 0)
        return size, [layer for layer, side in enumerate(sides) if size and side != size]

    @property
    def representation(self) -> int | None:
        """Output width of the layer after the pooling; None without such a layer."""
        layer = self.get("vit.representation.0.weight")
        return None if layer is None else layer.shape[0]

    @property
    def mlp_ratio(self) -> float | None:
        """Ratio of the MLP's inner width to the hidden size, as DINOv2 defines it; None if there is no such ratio."""
        inner = self.there(FC1).shape[0]
        if not self.is_gated:
            ratio = ratio_of(inner, self.width)
            return int(ratio) if ratio % 1 == 0 else ratio
        return next((one for one in range(1, 17) if gated_width(self.width, one) == inner), None)


# Settings read from the tensors; None keeps the default. Each applies to the classes that declare it.
SHOWN: dict[str, Callable[[Parts], Any]] = {
    "hidden_size": lambda parts: parts.width,
    "num_hidden_layers": lambda parts: parts.depth,
    "intermediate_size": lambda parts: parts.there(FC1).shape[0],
    "mlp_ratio": lambda parts: parts.mlp_ratio,
    "num_channels": lambda parts: parts.channels,
    "num_patches": lambda parts: parts.patches,
    "num_key_value_heads_per_layer": lambda parts: parts.key_value_heads,
    "use_swiglu_ffn": lambda parts: parts.is_gated,
    "use_gated_mlp": lambda parts: parts.is_gated,
    **dict.fromkeys(
        ("qkv_bias", "attention_bias", "query_bias"), lambda parts: parts.has(f"{LAYER}.attention.q_proj.bias")
    ),
    "key_bias": lambda parts: parts.has(f"{LAYER}.attention.k_proj.bias"),
    "value_bias": lambda parts: parts.has(f"{LAYER}.attention.v_proj.bias"),
    "proj_bias": lambda parts: parts.has(f"{LAYER}.attention.o_proj.bias"),
    "mlp_bias": lambda parts: parts.has(f"{LAYER}.mlp.fc2.bias"),
    "use_qk_norm": lambda parts: parts.has(QUERY_NORM),
    "norm_type": lambda parts: "layer_norm" if parts.has(f"{LAYER}.layernorm_before.bias") else "rms_norm",
    "layer_scale_init_value": lambda parts: None if parts.has(f"{LAYER}.layer_scale1.weight") else 0.0,
    "use_absolute_position_embeddings": lambda parts: parts.has(TABLE),
    "use_relative_position_bias": lambda parts: parts.has(SCORES[0]),
    "use_shared_relative_position_bias": lambda parts: parts.has(SCORES[1]),
    "use_mean_pooling": lambda parts: not parts.has("vit.layernorm.weight"),
    **dict.fromkeys(("use_mask_token", "mask_token"), lambda parts: parts.has("vit.embeddings.mask_token")),
    "num_register_tokens": lambda parts: parts.there(REGISTERS).shape[-2] if parts.has(REGISTERS) else 0,
    "num_labels": lambda parts: parts.there("classifier.weight").shape[0] if parts.has("classifier.weight") else 0,
    "pooler_output_size": lambda parts: parts.representation,
    "projection_dim": lambda parts: parts.representation,
    "mlp_dim": lambda parts: parts.there(FC1).shape[0],
    "use_abs_pos": lambda parts: parts.has(TABLE),
    "use_rel_pos": lambda parts: parts.has(f"{DISTANCES}.rows"),
    "window_size": lambda parts: parts.windows[0],
    "global_attn_indexes": lambda parts: parts.windows[1],
    "drop_path_rate": lambda parts: 0.0,  # affects only training
}


class Bare(NamedTuple):
    """The settings that a `config.json` would contain.

    Args:
        settings: The settings that differ from the defaults, as transformers writes them.
        inferences: Inferred or assumed values, with their origins.
        open: Settings that neither tensors nor hints determine, with their candidates. `settings` has the first ones.
    """

    settings: dict[str, Any]
    inferences: list[Inference]
    open: dict[str, Sequence[object]]


def read(name: str, tensors: StateDict, prefix: str, hints: Hints) -> Bare:
    """Return the settings of a class that these tensors and hints determine.

    Args:
        name: The class.
        tensors: The tensors; shapes are enough.
        prefix: Prefix of the encoder.
        hints: The caller's hints.

    Raises:
        MappingError: The tensors are not those of the class.
    """
    container = container_of(name)
    architecture = ARCHITECTURES[container.holds]
    if not architecture.family.is_bare:
        raise MappingError("no tensor shows the settings of this class:", [f"{name}: give the folder with config.json"])
    outside = ignored_names([one for one in tensors if not one.startswith(prefix)], container.ignored)
    own = without_prefix({one: tensors[one] for one in tensors if one not in outside}, prefix)
    parts, model_type = Parts(architecture, own, hints), architecture.family.model_type
    defaults = {**config_class(name, model_type)().to_dict(), "num_labels": 0}
    shown = {key: value for key, show in SHOWN.items() if key in defaults and (value := show(parts)) is not None}
    unshown, inferences, open_ = _unshown(parts, defaults)
    settings = {key: _side(value) for key, value in {**shown, **unshown}.items() if key in defaults}
    width = parts.there(QUERY).shape[0]
    if width != parts.width:  # the classes read this setting without declaring it
        settings["head_dim"] = width // settings["num_attention_heads"]
    for setting, field in ASSUMED.items():
        if setting in defaults and (field != "representation_act" or parts.has("vit.representation.0.weight")):
            inferences.append(Inference(field, defaults[setting], f"the default of a {name}, which no tensor shows"))
    differing = {key: value for key, value in settings.items() if value != defaults.get(key)}
    return Bare({"model_type": model_type, "architectures": [name], **differing}, inferences, open_)


def has_parts(name: str, tensors: Collection[str], prefix: str, *, is_headless: bool) -> bool:
    """Return whether the tensors include the parts that a class has beside its encoder, such as its head.

    Args:
        name: The class.
        tensors: The names of the tensors.
        prefix: Prefix of the encoder.
        is_headless: Whether the head was left out.
    """
    container = container_of(name)
    head = ARCHITECTURES[container.holds].head
    has_head = is_headless or head.is_optional or not head.rows
    has_head = has_head or any(one.startswith(str(row.source)) for one in tensors for row in head.rows)
    around = [row for row in container.ignored if "visual_projection" not in row[0]]
    outside = [one for one in tensors if not prefix or not one.startswith(prefix)]
    return has_head and (not around or bool(ignored_names(outside, around)))


def _unshown(
    parts: Parts, defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Inference], dict[str, Sequence[object]]]:
    """Return the settings that tensors do not fully show, inferences, and candidates for the settings still open."""
    family, hints = parts.architecture.family, parts.hints
    inferences: list[Inference] = []
    open_: dict[str, Sequence[object]] = {}
    settings: dict[str, Any] = {"num_attention_heads": parts.heads, "patch_size": parts.patch_size}
    if parts.heads is None:
        open_["num_attention_heads"] = head_counts(parts.there(QUERY).shape[0])
    elif hints.num_attention_heads is None:
        source = "the tensors of the attention" if hints.head_dim is None else f"head_dim {hints.head_dim}"
        inferences.append(Inference("num_attention_heads", parts.heads, source))
    for field, candidates in (("layer_norm_eps", EPSILONS), ("hidden_act", ACTIVATIONS)):
        if (setting := family.settings.get(field)) is None:
            inferences.append(Inference(field, family.fixed[field], "transformers' code, the only value there"))
            continue
        settings[setting] = getattr(hints, field)
        if field == "hidden_act" and parts.is_gated and "use_swiglu_ffn" in defaults:
            inferences.append(Inference(field, "silu", "the gate of the MLP, the only value there"))
        elif settings[setting] is None:
            open_[field] = list(dict.fromkeys([defaults[setting], *candidates]))
    if parts.patch_size is None:
        open_["patch_size"] = _patch_sizes(parts.there(KERNEL).shape[1])
    if "window_size" in defaults and parts.windows[0] == 0:
        source = "tables as large as the image, in which windows of that size would not show"
        inferences.append(Inference("window_attention", None, source))
    settings["image_size"] = _image_size(parts, inferences, open_)
    for ours, values in open_.items():
        if values:
            settings[family.settings.get(ours, ours)] = values[0]
    if parts.architecture.head.is_decoder:
        settings["encoder_stride"] = settings["patch_size"]
    return {key: value for key, value in settings.items() if value is not None}, inferences, open_


def _side(size: Any) -> Any:
    """Return a square size as one number; other values are unchanged."""
    return size[0] if isinstance(size, tuple) and len(set(size)) == 1 else size


def _patch_sizes(numbers: int) -> list[tuple[int, int]]:
    """Return the square patch sizes with this number of values, for images with a usual number of channels."""
    sides = [(math.isqrt(numbers // channels), channels) for channels in CHANNELS]
    return [(side, side) for side, channels in sides if side * side * channels == numbers]


def _image_size(
    parts: Parts, inferences: list[Inference], open_: dict[str, Sequence[object]]
) -> tuple[int, int] | None:
    """Return the native image size, or add it to `open_`."""
    patches, patch_size, family = parts.patches, parts.patch_size, parts.architecture.family
    if parts.hints.image_size is not None:
        size = pair(parts.hints.image_size)
        if patches and patch_size and (fault := size_fault(size, patch_size, [patches])):
            raise MappingError(fault)
        return size
    if patch_size is None or family.many_sizes:
        return None
    if patches is None:
        open_["image_size"] = []
        return None
    if patches < 1:
        raise MappingError("the position table has no row for a patch:", [f"{patches} rows"])
    sizes = image_sizes(patches, patch_size)
    if not family.square:
        open_["image_size"] = sizes
        rows, columns = grids(patches)[0]  # a placeholder until the size is given
        return rows * patch_size[0], columns * patch_size[1]
    if not sizes:
        raise MappingError("the class itself takes its grid for a square:", [f"positions of {patches} patches"])
    source = f"the positions of {patches} patches, whose grid the class itself takes for a square"
    inferences.append(Inference("image_size", sizes[0], source))
    return sizes[0]


def named(hints: Hints) -> str | None:
    """Return the class that the caller's hints name, if any.

    Raises:
        CheckpointError: There is no such class, or the hints name two.
    """
    names = dict.fromkeys(word.split()[0] for word in (hints.architecture, hints.layout) if word)
    known = [*ARCHITECTURES, *CONTAINERS]
    if len(names) > 1 or not set(names) <= set(known):
        alike = [one for name in names for one in get_close_matches(name, known, n=8, cutoff=0.5)]
        raise CheckpointError(
            f"architecture is {' and '.join(names)}: expected the class of transformers with these tensors, such as "
            f"{few(alike or known, most=8)}"
        )
    return next(iter(names), None)


def ask(found: Mapping[str, Bare], *, is_named: bool, has_head: bool) -> AmbiguousCheckpointError:
    """Return the error that asks for the open settings.

    Args:
        found: The settings, by the classes that have such tensors.
        is_named: Whether the caller named the class.
        has_head: Whether there is a classifier, which may belong to a class of the caller's own with other features.
    """
    candidates: dict[str, list[object]] = {} if is_named else {"architecture": list(found)}
    for one in found.values():
        for field, values in one.open.items():
            candidates[field] = list(dict.fromkeys([*candidates.get(field, []), *values]))
    described = json.dumps(config_json(*next(iter(found.items()))))
    own = f" If a class of your own has the classifier: {DROP_HEAD}." if has_head else ""
    return AmbiguousCheckpointError(
        "the tensors are those of a model of transformers, and no config.json says its class and all that no tensor "
        f"shows.{own} Put one into a folder with the weights and give that folder, such as, with the values of the "
        f"model, {described}; or give",
        candidates,
    )


def config_json(name: str, found: Bare) -> dict[str, Any]:
    """Return the contents of a `config.json` that opens the weights of a class."""
    settings = found.settings
    outer = class_named(name).config_class.model_type
    if outer == settings["model_type"]:
        return settings
    own = ("architectures", "num_labels")
    tower = {key: value for key, value in settings.items() if key not in own}
    beside = {key: settings[key] for key in own if key in settings}
    return {"model_type": outer, "vision_config": tower, **beside}
