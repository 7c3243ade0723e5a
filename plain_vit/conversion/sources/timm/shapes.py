"""Settings of a state dict with timm's names: inferred from names and shapes, or given by the caller.

Heads, scale, epsilon, activation and more affect the logits but no shape. They come from a timm architecture name or
from the caller: a model with the shapes of an architecture may still be another one.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ....configuration_plain_vit import PlainViTConfig, stem_stride
from ....errors import AmbiguousCheckpointError, CheckpointError, MappingError
from ...tables.format import SCALES, Description, Hints, Inference, Size, unused_hints
from ...tables.infer import grids, head_counts, image_sizes, size_fault
from .arguments import (
    ACTIVATIONS,
    ARGUMENTS,
    BLOCKS,
    DEFAULTS,
    PARALLEL,
    POOLINGS,
    config_of,
    norm_follows_pooling,
    pair,
    ratio_of,
    timm_name_for,
)
from .names import families, plain_names

# Arguments that the tensors show but that can only be set in code, because no config.json can store a class.
CODE_ONLY = (
    *("mlp_layer", "norm_layer", "block_fn", "attn_layer", "embed_norm", "num_parallel", "fuse_out_proj"),
    *("stem_depths",),
)
POOLED_TOKENS = ("mean", "max", "mean_max", "map")  # poolings that may include the tokens before the patches
ELONGATED = 4  # ratio of sides beyond which a grid is implausible


@dataclass
class Settled:
    """The settings of a state dict: arguments of timm's constructor, and their origins.

    Args:
        arguments: Arguments as in `DEFAULTS`, without the numbers of classes and channels.
        inferences: The inferred values and their origins.
        fields: Fields of our config without a timm argument.
    """

    arguments: dict[str, Any]
    inferences: list[Inference]
    fields: dict[str, Any] = field(default_factory=dict)

    def config(self, known: Mapping[str, Any]) -> PlainViTConfig:
        """Return our config for these settings, without a classifier."""
        return config_of({**self.arguments, "num_classes": 0, "in_chans": known["in_chans"]}, **self.fields)


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor that every model of timm has.

    Raises:
        MappingError: It is missing.
    """
    if name not in tensors:
        raise MappingError("a Vision Transformer of timm has tensors that are not here:", [f"missing: {name!r}"])
    return tensors[name].shape


@dataclass(frozen=True)
class Parts:
    """The names and shapes of a state dict, with the parts that `ARGUMENTS` reads.

    Args:
        names: The tensors by name.
        kernel: Shape of the patch projection's weight.
        kind: timm's class of its blocks; pre-norm and post-norm blocks look the same.
        differential: Whether the attention is differential.
        attention: Prefix of the first attention.
        mlp: Prefix of the first MLP.
        norm: Name of the first norm.
        qkv: Name of the first projection of queries, keys and values.
        output: Name of the first output projection.
        width: Width of the first layer of the MLP.
    """

    names: Mapping[str, torch.Tensor]
    kernel: torch.Size
    kind: str
    differential: bool
    attention: str
    mlp: str
    norm: str
    qkv: str
    output: str
    width: int

    @classmethod
    def of(cls, names: Mapping[str, torch.Tensor]) -> "Parts":
        """Find the parts of a state dict.

        Raises:
            MappingError: Tensors that every model has are missing.
        """
        kernel, first = shape_of(names, "patch_embed.proj.weight"), "blocks.0."
        differential = any(name.startswith(first) and name.endswith("lambda_q1") for name in names)
        if f"{first}in_proj.weight" in names:
            kind = "DiffParallelScalingBlock" if differential else "ParallelScalingBlock"
            output = f"{first}out_proj" if f"{first}out_proj.weight" in names else f"{first}attn_out_proj"
            width = shape_of(names, f"{first}in_proj.weight")[0] - 3 * kernel[0]
            attention, mlp, norm, qkv = first, f"{first}mlp.", f"{first}in_norm", f"{first}in_proj"
        else:
            branches = f"{first}attns.0.norm.weight" in names
            kind = "ParallelThingsBlock" if branches else "Block"
            attention = f"{first}attns.0.attn." if branches else f"{first}attn."
            mlp = f"{first}ffns.0.mlp." if branches else f"{first}mlp."
            norm = f"{first}attns.0.norm" if branches else f"{first}norm1"
            qkv, output = f"{attention}qkv", f"{attention}proj"
            gated = f"{mlp}fc1_g.weight" in names
            width = shape_of(names, f"{mlp}fc1_x.weight" if gated else f"{mlp}fc1.weight")[0]
        return cls(names, kernel, kind, differential, attention, mlp, norm, qkv, output, width)

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP share their first layer."""
        return self.kind in PARALLEL

    @property
    def embed_dim(self) -> int:
        """Hidden size."""
        return self.kernel[0]

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return 1 + max(int(name.split(".")[1]) for name in self.names if name.startswith("blocks."))

    @property
    def stem_depths(self) -> tuple[int, ...] | None:
        """Number of units in each stage of a hybrid's ResNet, empty for a root alone; None without a ResNet."""
        units = [name.split(".")[3:6:2] for name in self.names if name.startswith("patch_embed.backbone.stages.")]
        if not units and "patch_embed.backbone.conv.weight" not in self.names:
            return None
        stages = sorted({int(stage) for stage, _ in units})
        return tuple(len({unit for stage, unit in units if int(stage) == number}) for number in stages)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Patch size in image pixels, (height, width)."""
        stride = 1 if self.stem_depths is None else stem_stride(self.stem_depths)
        return self.kernel[2] * stride, self.kernel[3] * stride

    @property
    def channels(self) -> int:
        """Number of image channels."""
        return shape_of(self.names, f"{first_convolution(self.stem_depths)}.weight")[1]

    @property
    def num_heads(self) -> int | None:
        """Number of heads, if a tensor shows the width of one head; otherwise None."""
        if self.differential:
            return self.embed_dim // (2 * self.names[f"{self.attention}lambda_q1"].shape[0])
        norm = self.names.get(f"{self.attention}q_norm.weight")
        return None if norm is None else self.embed_dim // norm.shape[0]

    @property
    def mlp_layer(self) -> str:
        """timm's name for the class of the MLP."""
        if f"{self.mlp}fc1_g.weight" in self.names:
            return "SwiGLU"
        packed = not self.parallel and self.width == 2 * shape_of(self.names, f"{self.mlp}fc2.weight")[1]
        return "SwiGLUPacked" if packed else "Mlp"

    @property
    def num_branches(self) -> int:
        """Number of parallel attentions in the first block; 0 if it is not such a block."""
        return len({name.split(".")[3] for name in self.names if name.startswith("blocks.0.attns.")})


def observed(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what the names and shapes of a state dict show: arguments, and values that depend on several arguments.

    Raises:
        MappingError: Tensors that every model has are missing.
    """
    parts = Parts.of(tensors)
    scales = (".gamma", ".gamma_1")
    return {argument.name: argument.tensors(parts) for argument in ARGUMENTS if argument.tensors is not None} | {
        "width": parts.width,
        "layer_scale": any(name.startswith("blocks.0.") and name.endswith(scales) for name in tensors),
        "norm": "norm.weight" in tensors,
        "map": "attn_pool.latent" in tensors,
        "embed_norm": "patch_embed.norm.weight" in tensors,
    }


def first_convolution(stem_depths: tuple[int, ...] | None) -> str:
    """Return timm's name of the layer that reads the image."""
    if stem_depths is None:
        return "patch_embed.proj"
    return "patch_embed.backbone.stem.conv" if stem_depths else "patch_embed.backbone.conv"


def expected_observations(arguments: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `observed` would return for a model with these arguments; channels are copied from `known`."""
    given = {**DEFAULTS, **arguments}
    # Pre-norm and post-norm blocks have the same tensors, and so have prr and no pooling.
    block = "Block" if given["block_fn"] == "ResPostBlock" else given["block_fn"]
    after = norm_follows_pooling(given)
    return {name: given[name] for name in known if name in given} | {
        "patch_size": pair(given["patch_size"]),
        "width": int(given["embed_dim"] * given["mlp_ratio"]),
        "layer_scale": bool(given["init_values"]) and given["block_fn"] != "ResPostBlock",
        "pos_embed": given["pos_embed"] or "none",
        "norm": given["final_norm"] and not after,
        "fc_norm": given["final_norm"] and after,
        "map": given["global_pool"] == "map",
        "embed_norm": given["embed_norm_layer"] is not None,
        "block_fn": block,
        "attn_layer": given["attn_layer"] or "attn",
        "num_parallel": given["num_parallel"] if block == "ParallelThingsBlock" else 2,
        "num_heads": None if known["num_heads"] is None else given["num_heads"],
        "in_chans": known["in_chans"],
    }


# Other models of timm


def part_of(name: str) -> str:
    """Return the module of a tensor without numbers: "blocks.{}.attn.qkv" for "blocks.3.attn.qkv.bias"."""
    parts = ["{}" if part.isdigit() else part for part in name.split(".")]
    return ".".join(parts[:-1] if parts[-1] in ("weight", "bias", "running_mean", "running_var") else parts)


def families_of(names: Collection[str], known: Collection[str] = ()) -> list[str]:
    """Return the files of timm, with their titles, that are the only ones to which tensors with these names can belong.

    A file is recognised by parts that no other timm model has. All other parts in the same modules must be its own too:
    users replace heads and add parts, but not inside the layers.

    Args:
        names: Names of the tensors.
        known: The parts of timm's VisionTransformer.
    """
    parts = {part_of(name) for name in names if not name.endswith("num_batches_tracked")}
    found = parts & set().union(*(family.marks for family in families().values()))
    modules = {part.partition(".")[0] for part in found}
    inside = {part for part in parts if part.partition(".")[0] in modules}
    return [
        f"{file}.py ({family.title})"
        for file, family in families().items()
        if found and found <= family.marks and inside <= family.marks | family.others | set(known)
    ]


# The grid


def _grid(size: Size, known: Mapping[str, Any]) -> tuple[int, int]:
    """Return the patch grid of an image, (rows, columns), without partial patches."""
    (height, width), (patch_height, patch_width) = pair(size), known["patch_size"]
    return height // patch_height, width // patch_width


def patches_in(size: Size, known: Mapping[str, Any]) -> int:
    """Return the number of patches of an image."""
    return math.prod(_grid(size, known))


def prefix_of(known: Mapping[str, Any]) -> int:
    """Return the number of tokens before the patches."""
    return int(known["class_token"]) + int(known["distilled"]) + int(known["reg_tokens"])


def _fits(size: Size | None, patches: int, known: Mapping[str, Any]) -> bool:
    return size is not None and patches_in(size, known) == patches


def image_size_of(
    rows: int | None, prefix: int, patch_size: tuple[int, int], hints: Hints, stated: Sequence[tuple[Any, str]]
) -> tuple[Any, str] | list[tuple[int, int]]:
    """Return the image size of a named architecture and its origin, or the possible sizes.

    Args:
        rows: Number of rows of the position table; None without a table.
        prefix: Number of these rows for the tokens before the patches.
        patch_size: Patch size in pixels, (height, width).
        hints: The caller's hints.
        stated: Candidate sizes with their origins; the first that fits is used.

    Raises:
        CheckpointError: The caller's size does not match the number of rows.
        MappingError: There are no rows for patches.
    """
    known = {"patch_size": patch_size}
    if hints.image_size is not None:
        stated = [(pair(hints.image_size), "the caller")]
    if rows is None:
        return next((pair(size), source) for size, source in stated if size is not None)
    patches = rows - prefix
    if patches < 1:
        raise MappingError("the position table has no row for a patch:", [f"pos_embed: {rows} rows"])
    for size, source in stated:
        if _fits(size, patches, known):
            return pair(size), f"{source}, and the {rows} rows of pos_embed"
    if hints.image_size is not None and (fault := size_fault(pair(hints.image_size), patch_size, [patches])):
        raise CheckpointError(fault)
    return image_sizes(patches, patch_size)


def squarest_grid(rows: int | None, prefix: int) -> tuple[int, int]:
    """Return the squarest grid (rows, columns) for a position table with this number of rows, wide before tall."""
    return (1, 1) if rows is None else grids(rows - prefix)[0]


def _image_size(
    rows: int | None, no_embed_class: bool, known: Mapping[str, Any], hints: Hints, stated: Sequence[tuple[Any, str]]
) -> tuple[Any, str] | list[tuple[int, int]]:
    """Return the result of `image_size_of` for what a state dict shows."""
    prefix = 0 if no_embed_class else prefix_of(known)
    return image_size_of(rows, prefix, known["patch_size"], hints, stated)


# A name


def settled_by_name(
    name: str,
    arguments: dict[str, Any],
    known: Mapping[str, Any],
    rows: int | None,
    hints: Hints,
    stated: Sequence[tuple[Any, str]],
    source: str,
) -> Settled:
    """Return the settings of a named architecture, after checking that the tensors match it.

    Args:
        name: The architecture.
        arguments: Its arguments, updated by the `config.json`.
        known: The result of `observed`.
        rows: Rows of the position table.
        hints: The caller's hints.
        stated: Image sizes in the `config.json`, with their origins.
        source: Origin of the name.

    Raises:
        MappingError: lists how the tensors differ from the architecture's.
        AmbiguousCheckpointError: for an unknown image size.
        CheckpointError: for hints that contradict the architecture.
    """
    shown = expected_observations(arguments, known)
    if faults := [f"{key} is {shown[key]!r} there and {known[key]!r} in the tensors"
                  for key in known if shown[key] != known[key]]:  # fmt: skip
        raise MappingError(f"the tensors are not of {name}, which {source} names:", faults)
    native = (arguments.get("img_size", DEFAULTS["img_size"]), f"the grid of {name}")
    no_embed_class = arguments.get("no_embed_class", False)
    size = _image_size(rows, no_embed_class, known, hints, [*stated, native])
    if isinstance(size, list):
        message = f"{name} has another grid of patches, and pos_embed has {rows} rows: the size of its images is open"
        raise AmbiguousCheckpointError(message, {"image_size": size})
    pixels, whence = size
    settled = Settled({**arguments, "img_size": pixels}, [Inference("architecture", name, source)])
    config = settled.config(known)
    for key in ("num_attention_heads", "attention_scale", "layer_norm_eps", "hidden_act"):
        value = "head_dim**-0.5" if key == "attention_scale" else getattr(config, key)
        settled.inferences.append(Inference(key, value, f"the architecture that {source} names"))
    if hints.image_size is None:
        settled.inferences.append(Inference("image_size", pixels, whence))
    if faults := unused_hints(replace(hints, architecture=None), Description(config)):
        full = ", ".join(f"{key}={value!r}" for key, value in _full_hints(config, hints, known).items())
        raise CheckpointError(
            f"the hints contradict {name}, which {source} names: {'; '.join(faults)}. Omit them; for a modified "
            f"model omit the architecture, and give all of: {full}"
        )
    return settled


def _full_hints(config: PlainViTConfig, hints: Hints, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return hints that fully describe a model: the values in a config, updated by the caller's hints."""
    full = {
        "num_attention_heads": config.num_attention_heads,
        "attention_scale": SCALES[0],
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_act": config.hidden_act,
        "pooling": config.pooling,
        "block_type": config.block_type,
        "image_size": config.image_shape,
    }
    if known["pos_embed"] == "none":
        full |= {"position_embedding_type": "none", "rope_type": "none"}
    if prefix_of(known):
        full["pool_prefix_tokens"] = config.pool_prefix_tokens
    said = {name: value for name, value in hints.given().items() if name not in ("architecture", "layout", "key")}
    return full | said


# No name


def settled_by_hints(known: Mapping[str, Any], rows: int | None, hints: Hints, alike: Sequence[str]) -> Settled:
    """Return the settings of a state dict without an architecture name, from the caller's hints.

    Args:
        known: The result of `observed`.
        rows: Rows of the position table.
        hints: The caller's hints.
        alike: Architectures of timm's other classes with the same tensors.

    Raises:
        AmbiguousCheckpointError: lists all missing settings, with the architectures that fit.
        CheckpointError: for impossible hints.
    """
    detail = _Detail(known, rows, hints)
    detail.settle()
    if not detail.open:
        return detail.settled
    names, sizes = fitting(known, rows, hints)
    asked = {name: detail.open[name] for name in ASKED if name in detail.open}
    message = "the tensors do not show everything that changes the logits; give"
    if rows is None and asked.keys() & {"position_embedding_type", "rope_type"}:
        message = (
            "the tensors do not show everything that changes the logits, such as positions: there is no table of "
            "them, and code may compute them (sines and cosines, a rotation of queries and keys). Give the "
            "architecture, or for a model without any positions the settings"
        )
    elif alike:
        message = (
            "the tensors do not show everything that changes the logits, such as a rotation of queries and keys; give "
            "the architecture, or for a model without rotation the settings"
        )
    if names or alike:
        raise AmbiguousCheckpointError(message, {"architecture": [*names, *alike], **sizes}, asked)
    raise AmbiguousCheckpointError(message, asked)


ASKED = (
    *("num_attention_heads", "attention_scale", "layer_norm_eps", "hidden_act", "pooling", "pool_prefix_tokens"),
    *("block_type", "norm_type", "mlp_type", "position_embedding_type", "rope_type", "image_size"),
)


class _Detail:
    """Collector of timm's constructor arguments, each from the tensors, from the caller, or missing."""

    def __init__(self, known: Mapping[str, Any], rows: int | None, hints: Hints):
        self.known = known
        self.rows = rows
        self.hints = hints
        self.open: dict[str, Sequence[object]] = {}
        shown = {name: value for name, value in known.items() if name in DEFAULTS and name != "num_heads"}
        arguments = {
            **shown,
            "mlp_ratio": ratio_of(known["width"], known["embed_dim"]),
            "init_values": 1e-5 if known["layer_scale"] else None,
            "final_norm": known["norm"] or known["fc_norm"],
            "embed_norm_layer": known["norm_layer"] if known["embed_norm"] else None,
        }
        self.settled = Settled(arguments, [])

    def settle(self) -> None:
        """Determine all arguments, and collect the missing ones."""
        self._attention()
        self._layers()
        self._pooling()
        self._rotation()
        self._positions()

    def ask(self, name: str, candidates: Sequence[object]) -> Any:
        """Return the caller's hint, or record it as missing."""
        said = getattr(self.hints, name)
        if said is None:
            self.open[name] = candidates
        return said

    def infer(self, field: str, value: object, source: str) -> None:
        """Record a value inferred from the tensors."""
        self.settled.inferences.append(Inference(field, value, source))

    def _attention(self) -> None:
        known, hints, width = self.known, self.hints, self.known["embed_dim"]
        differential = known["attn_layer"] == "diff" or known["block_fn"] == "DiffParallelScalingBlock"
        heads = known["num_heads"]
        if heads is not None:
            self.infer("num_attention_heads", heads, "the width of lambda_q1" if differential else "that of q_norm")
        elif hints.num_attention_heads is None and hints.head_dim is not None:
            heads = width // hints.head_dim
            self.infer("num_attention_heads", heads, f"head_dim {hints.head_dim} in a width of {width}")
        else:
            heads = self.ask("num_attention_heads", head_counts(width))
        if heads is not None and (heads < 1 or width % heads):
            raise CheckpointError(f"{heads} heads do not divide the width {width}: expected a divisor of it")
        self.settled.arguments["num_heads"] = heads
        if differential:
            self.infer("attention_scale", "half of head_dim, **-0.5", "timm's DiffAttention, the only value there")
        elif self.ask("attention_scale", SCALES) is not None and heads is not None:
            scale = hints.scale(width, width // heads)
            if scale != (width // heads) ** -0.5:
                self.settled.fields["attention_scale"] = scale

    def _layers(self) -> None:
        known, arguments = self.known, self.settled.arguments
        arguments["norm_eps"] = self.ask("layer_norm_eps", [1e-6, 1e-5])
        acts = list(dict.fromkeys(ACTIVATIONS.values()))
        gated = known["mlp_layer"] != "Mlp"
        acts.sort(key=lambda act: gated and act != "silu")
        act = self.ask("hidden_act", acts)
        arguments["act_layer"] = DEFAULTS["act_layer"] if act is None else timm_name_for(ACTIVATIONS, act)
        if known["norm_layer"] == "rmsnorm":  # a LayerNorm without bias and timm's SimpleNorm have the same tensors
            self.ask("norm_type", ["rms_norm"])
        if known["mlp_layer"] == "SwiGLUPacked":  # a GLU whose gate is the second half has the same tensors
            self.ask("mlp_type", ["swiglu_packed"])
        if known["block_fn"] != "Block":
            self.infer("block_type", BLOCKS[known["block_fn"]], "the names of the tensors")
        elif known["layer_scale"]:
            self.infer("block_type", "sequential", "LayerScale, which timm's post-norm blocks do not have")
        else:
            block = self.ask("block_type", ["sequential", "post_norm"])
            arguments["block_fn"] = "ResPostBlock" if block == "post_norm" else "Block"
        if known["stem_depths"] is not None:
            self.infer("resnet_stem.style", "timm", "timm's hybrids of a ResNet-V2, the only one there")

    def _pooling(self) -> None:
        known, hints, arguments = self.known, self.hints, self.settled.arguments
        pooling = hints.pooling
        if known["distilled"]:
            self.infer("pooling", "cls", "dist_token, which timm uses together with the class token")
            pooling = "cls"
        elif known["map"]:
            if known["mlp_layer"] != "Mlp":
                raise CheckpointError(
                    "the tensors contain attn_pool and gated MLPs: timm's VisionTransformer pools with the activation "
                    "of these, its Eva with GELU, and nothing tells them apart: give the architecture, or convert the "
                    "live module"
                )
            pooling = self.ask("pooling", ["map"])  # poolings with other numbers of heads have the same tensors
            if pooling not in (None, "map"):
                raise CheckpointError(
                    f"pooling={pooling!r} has no weights, but the tensors contain attn_pool: expected 'map'"
                )
        else:
            averaging = ["mean", "max", "mean_max"]
            others = ["cls"] if known["class_token"] else []
            usual = [*averaging, *others] if known["fc_norm"] or not others else [*others, *averaging]
            pooling = self.ask("pooling", [*usual, "none", "prr"])
            if pooling == "map":
                raise CheckpointError(
                    "pooling='map' needs the weights attn_pool, which are missing: give another pooling"
                )
        averages = pooling in (None, *POOLED_TOKENS)
        if prefix_of(known) and averages:
            self.ask("pool_prefix_tokens", [False, True])
        arguments["pool_include_prefix"] = bool(hints.pool_prefix_tokens) and averages
        if pooling is not None:
            arguments["global_pool"] = timm_name_for(POOLINGS, pooling)

    def _rotation(self) -> None:
        # Some published models with rotary embeddings have the same names and shapes as models without.
        said = self.ask("rope_type", ["none"])
        if said not in (None, "none"):
            raise CheckpointError(
                f"rope_type={said!r}: a rotation has more settings than its type. Give the architecture of "
                "timm that has it, or convert the live module with from_module"
            )

    def _positions(self) -> None:
        known, hints, rows, arguments = self.known, self.hints, self.rows, self.settled.arguments
        arguments["no_embed_class"] = hints.position_embedding_on_prefix is False
        if rows is None:
            if self.ask("position_embedding_type", ["none"]) not in (None, "none"):
                raise CheckpointError(
                    f"position_embedding_type={hints.position_embedding_type!r}, and the file has no pos_embed: "
                    "compute the table and save it with the other tensors, as pos_embed of shape (1, tokens, width)"
                )
            arguments["img_size"] = self.ask("image_size", [(224, 224)])
            return
        choices = [True, False] if prefix_of(known) and not known["distilled"] else [True]
        choices = [one for one in choices if hints.position_embedding_on_prefix in (None, one)]
        patches = {on_prefix: rows - (prefix_of(known) if on_prefix else 0) for on_prefix in choices}
        if hints.image_size is None:
            if max(patches.values()) < 1:
                raise MappingError("the position table has no row for a patch:", [f"pos_embed: {rows} rows"])
            sizes = [size for count in patches.values() for size in image_sizes(count, known["patch_size"])]
            self.open["image_size"] = list(dict.fromkeys(sizes))
            return
        size = pair(hints.image_size)
        if fault := size_fault(size, known["patch_size"], list(patches.values())):
            raise CheckpointError(fault)
        fit = [on_prefix for on_prefix, count in patches.items() if _fits(size, count, known)]
        arguments |= {"img_size": size, "no_embed_class": not fit[0]}
        if prefix_of(known) and hints.position_embedding_on_prefix is None:
            whence = f"the {rows} rows of pos_embed, for {patches_in(size, known)} patches"
            self.infer("position_embedding_on_prefix", fit[0], whence)


def fitting(
    known: Mapping[str, Any], rows: int | None, hints: Hints
) -> tuple[list[str], dict[str, Sequence[tuple[int, int]]]]:
    """Return the architectures with these shapes and the caller's hints, the most likely first.

    Architectures with this grid come first, then those for which the table has a square grid. If none has this grid,
    the second value asks for the image size.
    """
    plain = plain_names().architectures
    ranked: dict[str, int] = {}
    for name, entry in plain.items():
        if expected_observations(entry, known) != known:
            continue
        config = Settled(dict(entry), []).config(known)
        if unused_hints(replace(hints, image_size=None), Description(config)):
            continue
        try:
            size = _image_size(rows, entry.get("no_embed_class", False), known, hints, [(entry["img_size"], name)])
        except (CheckpointError, MappingError):
            continue
        rows_of_grid, columns = squarest_grid(rows, 0 if entry.get("no_embed_class", False) else prefix_of(known))
        if isinstance(size, tuple):
            ranked[name] = 0
        elif columns <= ELONGATED * rows_of_grid:
            ranked[name] = 1 if size else 2
    names = sorted(ranked, key=lambda name: ranked[name])
    if not names or ranked[names[0]] == 0:
        return names, {}
    first = _image_size(rows, plain[names[0]].get("no_embed_class", False), known, hints, [])
    return names, {"image_size": first} if isinstance(first, list) else {}
