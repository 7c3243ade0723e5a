"""Settings that a state dict with timm's names shows by names and shapes, and those that must be given.

Heads, scale, epsilon, activation and more change logits and show in no tensor. A name of timm's, or the caller, settles
them; shapes that a named architecture has too are not that architecture.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...configuration_plain_vit import PlainViTConfig, stem_stride
from ...errors import AmbiguousCheckpointError, CheckpointError, MappingError, UnknownFormatError
from ..format import SCALES, Description, Hints, Inference, Size, unheeded
from ..infer import head_counts, image_sizes
from .architectures import ARCHITECTURES
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
from .families import FAMILIES, LOOKALIKES

# What code alone can say, since no config.json holds a class, and what tensors show.
CODE_ONLY = (
    *("mlp_layer", "norm_layer", "block_fn", "attn_layer", "embed_norm", "num_parallel", "fuse_out_proj"),
    *("stem_depths",),
)
POOLED_TOKENS = ("mean", "max", "mean_max", "map")  # poolings that may or may not read the tokens before the patches
ELONGATED = 4  # ratio of sides beyond which a grid says that the rows are of something else


@dataclass
class Settled:
    """What a state dict is: the arguments of timm's constructor, and what settled them.

    Args:
        arguments: As in `DEFAULTS`, without classes and channels.
        inferences: What was read off what.
        fields: Of our config, which no argument of timm's decides.
    """

    arguments: dict[str, Any]
    inferences: list[Inference]
    fields: dict[str, Any] = field(default_factory=dict)

    def config(self, known: Mapping[str, Any]) -> PlainViTConfig:
        """Return our config of it, without its classes."""
        return config_of({**self.arguments, "num_classes": 0, "in_chans": known["in_chans"]}, **self.fields)


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor that every model of timm has.

    Raises:
        MappingError: It is not there.
    """
    if name not in tensors:
        raise MappingError("the tensors have timm's names, but not all of them:", [f"missing: {name!r}"])
    return tensors[name].shape


@dataclass(frozen=True)
class Parts:
    """The names and shapes of a state dict, and where it has what `ARGUMENTS` asks for.

    Args:
        names: The tensors by name.
        kernel: Shape of the projection of the patches.
        kind: timm's class of its blocks; those that end in their norms look like those that begin with them.
        differential: Whether scores are the difference of two.
        attention: What precedes the names of the first attention.
        mlp: What precedes those of the first MLP.
        norm: Name of the first norm.
        qkv: Name of the first projection of queries, keys and values.
        output: Name of the first projection of what attention gives.
        width: Of the first layer of the MLP.
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
        """Find them.

        Raises:
            MappingError: Tensors are missing that every model has.
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
        """Channels of a token."""
        return self.kernel[0]

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return 1 + max(int(name.split(".")[1]) for name in self.names if name.startswith("blocks."))

    @property
    def stem_depths(self) -> tuple[int, ...] | None:
        """The number of units of each stage of a hybrid's ResNet, none for its root alone; None without one."""
        units = [name.split(".")[3:6:2] for name in self.names if name.startswith("patch_embed.backbone.stages.")]
        if not units and "patch_embed.backbone.conv.weight" not in self.names:
            return None
        stages = sorted({int(stage) for stage, _ in units})
        return tuple(len({unit for stage, unit in units if int(stage) == number}) for number in stages)

    @property
    def patch_size(self) -> tuple[int, int]:
        """In pixels of the image, (height, width)."""
        stride = 1 if self.stem_depths is None else stem_stride(self.stem_depths)
        return self.kernel[2] * stride, self.kernel[3] * stride

    @property
    def channels(self) -> int:
        """Of the image."""
        return shape_of(self.names, f"{first_convolution(self.stem_depths)}.weight")[1]

    @property
    def num_heads(self) -> int | None:
        """Heads, where a tensor has the width of one."""
        if self.differential:
            return self.embed_dim // (2 * self.names[f"{self.attention}lambda_q1"].shape[0])
        norm = self.names.get(f"{self.attention}q_norm.weight")
        return None if norm is None else self.embed_dim // norm.shape[0]

    @property
    def mlp_layer(self) -> str:
        """timm's class of the MLP."""
        if f"{self.mlp}fc1_g.weight" in self.names:
            return "SwiGLU"
        packed = not self.parallel and self.width == 2 * shape_of(self.names, f"{self.mlp}fc2.weight")[1]
        return "SwiGLUPacked" if packed else "Mlp"

    @property
    def num_branches(self) -> int:
        """Attentions of the first block, where it has several."""
        return len({name.split(".")[3] for name in self.names if name.startswith("blocks.0.attns.")})


def observed(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what a state dict shows by its names and shapes: arguments, and what several of them make together.

    Raises:
        MappingError: Tensors are missing that every model has.
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
    """Return what a state dict of these arguments shows, in the words of `observed`; channels are as they are there."""
    given = {**DEFAULTS, **arguments}
    # Tensors look alike in blocks that begin with their norms and that end in them, and with prr pooling and with none.
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
    """Return the module of a tensor, without numbers: "blocks.{}.attn.qkv" of "blocks.3.attn.qkv.bias"."""
    parts = ["{}" if part.isdigit() else part for part in name.split(".")]
    return ".".join(parts[:-1] if parts[-1] in ("weight", "bias", "running_mean", "running_var") else parts)


def families_of(names: Collection[str], known: Collection[str] = ()) -> list[str]:
    """Return the files of timm, with what they call themselves, whose models alone have tensors of such names.

    Args:
        names: Of the tensors.
        known: The parts that timm's VisionTransformer has.
    """
    parts = {part_of(name) for name in names if not name.endswith("num_batches_tracked")}
    foreign = parts - set(known)
    if not foreign:
        return []
    found = {file: len(foreign & family.parts) for file, family in FAMILIES.items()}
    most = max(found.values())
    # Heads are exchanged and parts added: not every name has to be the family's.
    if 2 * most < len(foreign) or 2 * len(parts & (set(known) | _all_parts(found, most))) < len(parts):
        return []
    return [f"{file}.py ({FAMILIES[file].title})" for file, count in found.items() if count == most]


def _all_parts(found: Mapping[str, int], most: int) -> set[str]:
    return set().union(*(FAMILIES[file].parts for file, count in found.items() if count == most))


def lookalikes(known: Mapping[str, Any]) -> list[str]:
    """Return the models of other files of timm that have the names and shapes of this state dict."""
    return [name for name, shown in LOOKALIKES.items() if shown == {key: known[key] for key in shown}]


def _as_family(names: Sequence[str]) -> str:
    files = dict.fromkeys(file for file, family in FAMILIES.items() if set(names) & set(family.entrypoints))
    return f"{', '.join(names)} of timm's {', '.join(f'{file}.py' for file in files)}"


# The grid


def _grid(size: Size, known: Mapping[str, Any]) -> tuple[int, int]:
    """Return the grid of an image's patches, (rows, columns); what is left over at its edges is dropped."""
    (height, width), (patch_height, patch_width) = pair(size), known["patch_size"]
    return height // patch_height, width // patch_width


def _is_square(size: Size, known: Mapping[str, Any]) -> bool:
    return len(set(_grid(size, known))) == 1


def patches_in(size: Size, known: Mapping[str, Any]) -> int:
    """Return the number of patches of an image."""
    return math.prod(_grid(size, known))


def prefix_of(known: Mapping[str, Any]) -> int:
    """Return the number of tokens before the patches."""
    return int(known["class_token"]) + int(known["distilled"]) + int(known["reg_tokens"])


def _fits(size: Size | None, patches: int, known: Mapping[str, Any]) -> bool:
    return size is not None and patches_in(size, known) == patches


def _image_size(
    rows: int | None, no_embed_class: bool, known: Mapping[str, Any], hints: Hints, stated: Sequence[tuple[Any, str]]
) -> tuple[Any, str] | list[tuple[int, int]]:
    """Return the image size of a named architecture and what says so, or the sizes that it can be.

    Args:
        rows: Of the position table; None without one.
        no_embed_class: Whether the tokens before the patches have none of them.
        known: What `observed` returned.
        hints: What the caller said.
        stated: Sizes with what states them, the first that fits is taken.

    Raises:
        CheckpointError: The size that the caller says does not fit the rows.
    """
    if hints.image_size is not None:
        stated = [(pair(hints.image_size), "the caller")]
    if rows is None:
        return next((pair(size), source) for size, source in stated if size is not None)
    patches = rows - (0 if no_embed_class else prefix_of(known))
    for size, source in stated:
        if _fits(size, patches, known):
            return pair(size), f"{source}, and the {rows} rows of pos_embed"
    if hints.image_size is not None:
        raise CheckpointError(
            f"image_size={hints.image_size!r} is {patches_in(hints.image_size, known)} patches of "
            f"{known['patch_size']}, and pos_embed has {rows} rows, {patches} of them for patches: correct image_size"
        )
    return image_sizes(patches, known["patch_size"]) if patches > 0 else []


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
    """Return what a named architecture is, once the tensors agree with it.

    Args:
        name: The architecture.
        arguments: Its own, changed by the settings beside the tensors.
        known: What `observed` returned.
        rows: Of the position table.
        hints: What the caller said.
        stated: Image sizes in those settings, with what states them.
        source: Who named it.

    Raises:
        MappingError: lists what the tensors show otherwise.
        AmbiguousCheckpointError: for an image size that nothing says.
        CheckpointError: for hints that contradict it.
    """
    shown = expected_observations(arguments, known)
    if faults := [f"{key} is {shown[key]!r} there and {known[key]!r} in the tensors"
                  for key in known if shown[key] != known[key]]:  # fmt: skip
        raise MappingError(f"the tensors are not of {name}, which {source} names:", faults)
    native = (arguments.get("img_size", DEFAULTS["img_size"]), f"the grid of {name}")
    no_embed_class = arguments.get("no_embed_class", False)
    size = _image_size(rows, no_embed_class, known, hints, [*stated, native])
    if isinstance(size, list):
        if not size:
            raise _no_row_for_a_patch(rows)
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
    if faults := unheeded(replace(hints, architecture=None), Description(config)):
        full = ", ".join(f"{key}={value!r}" for key, value in _full_hints(config, hints, known).items())
        raise CheckpointError(
            f"the hints contradict {name}, which {source} names: {'; '.join(faults)}. Leave them out; for a model that "
            f"was modified name no architecture, and say all of it: {full}"
        )
    return settled


def _no_row_for_a_patch(rows: int | None) -> MappingError:
    return MappingError("the position table has no row for a patch:", [f"pos_embed: {rows} rows"])


def _full_hints(config: PlainViTConfig, hints: Hints, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return hints that say all of a model: those of a config, changed by what the caller said."""
    full = {
        "num_attention_heads": config.num_attention_heads,
        "attention_scale": SCALES[0],
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_act": config.hidden_act,
        "pooling": config.pooling,
        "block_type": config.block_type,
        "position_embedding_type": config.position_embedding_type,
        "image_size": config.image_shape,
    }
    if prefix_of(known):
        full["pool_prefix_tokens"] = config.pool_prefix_tokens
    said = {name: value for name, value in hints.given().items() if name not in ("architecture", "layout", "key")}
    return full | said


# No name


def settled_by_hints(known: Mapping[str, Any], rows: int | None, hints: Hints) -> Settled:
    """Return what the caller said of a state dict that comes without a name.

    Raises:
        AmbiguousCheckpointError: for all that neither the tensors nor the caller say, with the architectures that fit.
        UnknownFormatError: The tensors are those of models that plain-vit does not open.
        CheckpointError: for hints that cannot be.
    """
    detail = _Detail(known, rows, hints)
    detail.settle()
    if not detail.open:
        return detail.settled
    names, sizes = fitting(known, rows, hints)
    alike = lookalikes(known)
    asked = {name: detail.open[name] for name in ASKED if name in detail.open}
    if alike and not names:
        raise UnknownFormatError(
            f"these tensors are those of {_as_family(alike)}, which plain-vit does not open: what turns their queries "
            "and keys is in no tensor. For a model of your own that has such tensors, and a table of positions or none "
            f"and no rotation, say all of: {', '.join(f'{name}=' for name in asked)}"
        )
    warning = f" (they are also those of {_as_family(alike)}, which plain-vit does not open)" if alike else ""
    message = f"the tensors{warning} do not show everything that changes the logits; give"
    if names:
        raise AmbiguousCheckpointError(message, {"architecture": names, **sizes}, asked)
    raise AmbiguousCheckpointError(message, asked)


ASKED = (
    *("num_attention_heads", "attention_scale", "layer_norm_eps", "hidden_act", "pooling", "pool_prefix_tokens"),
    *("block_type", "norm_type", "mlp_type", "position_embedding_type", "image_size"),
)


class _Detail:
    """Each argument of timm's constructor: seen in the tensors, said by the caller, or open."""

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
        """Settle what can be, and collect what is open."""
        self._attention()
        self._layers()
        self._pooling()
        self._positions()

    def ask(self, name: str, candidates: Sequence[object]) -> Any:
        """Return what the caller said, or note that it is open."""
        said = getattr(self.hints, name)
        if said is None:
            self.open[name] = candidates
        return said

    def infer(self, field: str, value: object, source: str) -> None:
        """Note what was read off the tensors."""
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
            raise CheckpointError(f"{heads} heads do not share out the width {width}: expected a divisor of it")
        self.settled.arguments["num_heads"] = heads
        if differential:
            self.infer("attention_scale", "half of head_dim, **-0.5", "timm's DiffAttention, which has no other")
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
        if known["norm_layer"] == "rmsnorm":  # by its tensors also a LayerNorm without bias, and timm's SimpleNorm
            self.ask("norm_type", ["rms_norm"])
        if known["mlp_layer"] == "SwiGLUPacked":  # by its tensors also a GLU whose gate is the second half
            self.ask("mlp_type", ["swiglu_packed"])
        if known["block_fn"] != "Block":
            self.infer("block_type", BLOCKS[known["block_fn"]], "the names of the tensors")
        elif known["layer_scale"]:
            self.infer("block_type", "sequential", "LayerScale, which timm's post-norm blocks do not have")
        else:
            block = self.ask("block_type", ["sequential", "post_norm"])
            arguments["block_fn"] = "ResPostBlock" if block == "post_norm" else "Block"
        if known["stem_depths"] is not None:
            self.infer("stem_style", "timm", "timm's hybrids of a ResNet-V2, which have no other")

    def _pooling(self) -> None:
        known, hints, arguments = self.known, self.hints, self.settled.arguments
        pooling = hints.pooling
        if known["distilled"]:
            self.infer("pooling", "cls", "dist_token, which timm reads beside the class token")
            pooling = "cls"
        elif known["map"]:
            pooling = self.ask("pooling", ["map"])  # by its tensors also one with other heads than the blocks
            if pooling not in (None, "map"):
                raise CheckpointError(f"pooling={pooling!r} has no weights of its own, and attn_pool is there")
        else:
            averaging = ["mean", "max", "mean_max"]
            others = ["cls"] if known["class_token"] else []
            usual = [*averaging, *others] if known["fc_norm"] or not others else [*others, *averaging]
            pooling = self.ask("pooling", [*usual, "none", "prr"])
            if pooling == "map":
                raise CheckpointError("pooling='map' reads with weights of its own, attn_pool, which are not there")
        if prefix_of(known) and pooling in (None, *POOLED_TOKENS):
            self.ask("pool_prefix_tokens", [False, True])
        arguments["pool_include_prefix"] = bool(hints.pool_prefix_tokens)
        if pooling is not None:
            arguments["global_pool"] = timm_name_for(POOLINGS, pooling)

    def _positions(self) -> None:
        known, hints, rows, arguments = self.known, self.hints, self.rows, self.settled.arguments
        self.ask("position_embedding_type", ["none" if rows is None else "learned"])
        arguments["no_embed_class"] = hints.position_embedding_on_prefix is False
        if rows is None:
            arguments["img_size"] = self.ask("image_size", [(224, 224)])
            return
        choices = [True, False] if prefix_of(known) and not known["distilled"] else [True]
        choices = [one for one in choices if hints.position_embedding_on_prefix in (None, one)]
        patches = {on_prefix: rows - (prefix_of(known) if on_prefix else 0) for on_prefix in choices}
        if hints.image_size is None:
            sizes = [image_sizes(count, known["patch_size"]) for count in patches.values() if count > 0]
            # A square before what is none, with positions of the class token before without.
            sizes.sort(key=lambda one: not _is_square(one[0], known))
            merged = dict.fromkeys(size for group in itertools.zip_longest(*sizes) for size in group if size)
            if not merged:
                raise _no_row_for_a_patch(rows)
            self.open["image_size"] = list(merged)
            return
        size = pair(hints.image_size)
        fit = [on_prefix for on_prefix, count in patches.items() if _fits(size, count, known)]
        if not fit:
            expected = " or ".join(str(count) for count in patches.values())
            raise CheckpointError(
                f"image_size={size} is {patches_in(size, known)} patches of {known['patch_size']}, and pos_embed has "
                f"{rows} rows, {expected} of them for patches: correct image_size"
            )
        arguments |= {"img_size": size, "no_embed_class": not fit[0]}
        if prefix_of(known) and hints.position_embedding_on_prefix is None:
            whence = f"the {rows} rows of pos_embed, for {patches_in(size, known)} patches"
            self.infer("position_embedding_on_prefix", fit[0], whence)


def fitting(
    known: Mapping[str, Any], rows: int | None, hints: Hints
) -> tuple[list[str], dict[str, Sequence[tuple[int, int]]]]:
    """Return the architectures that have these shapes and all that the caller said, the likeliest first.

    An architecture of just this grid comes first, then one whose rows make a square; where none has this grid the
    second value asks for the size as well.
    """
    ranked: dict[str, int] = {}
    sizes: Sequence[tuple[int, int]] = ()
    for name, entry in ARCHITECTURES.items():
        if expected_observations(entry, known) != known:
            continue
        config = Settled(dict(entry), []).config(known)
        if unheeded(replace(hints, image_size=None), Description(config)):
            continue
        try:
            size = _image_size(rows, entry.get("no_embed_class", False), known, hints, [(entry["img_size"], name)])
        except CheckpointError:
            continue
        if isinstance(size, tuple):
            ranked[name] = 0
        elif size and max(_grid(size[0], known)) <= ELONGATED * min(_grid(size[0], known)):
            ranked[name] = 1 if _is_square(size[0], known) else 2
            sizes = sizes or size
    names = sorted(ranked, key=lambda name: ranked[name])
    if not names or ranked[names[0]] == 0:
        return names, {}
    first = _image_size(rows, ARCHITECTURES[names[0]].get("no_embed_class", False), known, hints, [])
    return names, {"image_size": first} if isinstance(first, list) else {}
