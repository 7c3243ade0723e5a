"""What the names and shapes of a state dict with timm's names show of the arguments of a VisionTransformer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .....configuration_plain_vit import stem_stride
from .....errors import MappingError
from ....tables.infer import pair
from .arguments import ARGUMENTS, PARALLEL, norm_follows_pooling

# Arguments that the tensors show but that can only be set in code, because no config.json can store a class.
CODE_ONLY = (
    *("mlp_layer", "norm_layer", "block_fn", "attn_layer", "embed_norm", "num_parallel", "fuse_out_proj"),
    *("stem_depths",),
)


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor that every model of timm has.

    Raises:
        MappingError: It is missing.
    """
    if name not in tensors:
        raise MappingError("a Vision Transformer of timm has tensors that are not here:", [f"missing: {name!r}"])
    return tensors[name].shape


@dataclass(frozen=True)
class Shapes:
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
    def of(cls, names: Mapping[str, torch.Tensor]) -> "Shapes":
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
    parts = Shapes.of(tensors)
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


def expected_observations(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `observed` would return for a model with these arguments; channels are copied from `known`.

    Args:
        given: All arguments.
        known: The result of `observed`.
    """
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
