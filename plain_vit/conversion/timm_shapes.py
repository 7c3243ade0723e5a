"""What a state dict in timm's names says by its names and shapes, and which architectures of timm it can be."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..configuration_plain_vit import stem_stride
from ..errors import AmbiguousCheckpointError
from .format import UNSEEN, Hints, Inference, Size
from .timm_architectures import ARCHITECTURES
from .timm_arguments import ACTIVATIONS, DEFAULTS, POOLINGS, pair, ratio_of, word_of

# What a state dict never shows, but for the heads where a norm or a lambda has their width.
OPEN = ("num_heads", "norm_eps", "act_layer", "global_pool", "block_fn", "no_embed_class", "pool_include_prefix")


def facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the arguments that a state dict shows by its names and shapes, and under `rows` the positions it holds."""
    kernel = tensors["patch_embed.proj.weight"].shape
    first = "blocks.0."
    parallel, branches = f"{first}in_proj.weight" in tensors, f"{first}attns.0.norm.weight" in tensors
    differential = any(name.startswith(first) and name.endswith("lambda_q1") for name in tensors)
    attention = first if parallel else f"{first}attns.0.attn." if branches else f"{first}attn."
    mlp = f"{first}ffns.0.mlp." if branches else f"{first}mlp."
    output = "out_proj" if f"{first}out_proj.weight" in tensors else "attn_out_proj" if parallel else "proj"
    gated = f"{mlp}fc1_g.weight" in tensors
    if parallel:
        width = tensors[f"{first}in_proj.weight"].shape[0] - 3 * kernel[0]
    else:
        width = tensors[f"{mlp}fc1_x.weight" if gated else f"{mlp}fc1.weight"].shape[0]
    packed = not (parallel or gated) and width == 2 * tensors[f"{mlp}fc2.weight"].shape[1]
    block = "ParallelThingsBlock" if branches else "ParallelScalingBlock" if parallel else "Block"
    norm = "in_norm" if parallel else "attns.0.norm" if branches else "norm1"
    depths = stem_depths(tensors)
    stride = 1 if depths is None else stem_stride(depths)
    known = {
        "distilled": "dist_token" in tensors,
        "patch_size": (kernel[2] * stride, kernel[3] * stride),
        "stem_depths": depths,
        "embed_dim": kernel[0],
        "depth": 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")),
        "width": width,
        "qkv_bias": f"{attention}{'in_proj' if parallel else 'qkv'}.bias" in tensors,
        "qk_norm": f"{attention}q_norm.weight" in tensors,
        "scale_attn_norm": f"{attention}norm.weight" in tensors and not parallel,
        "scale_mlp_norm": f"{mlp}norm.weight" in tensors,
        "proj_bias": f"{attention}{output}.bias" in tensors,
        "layer_scale": any(name.startswith(first) and name.endswith((".gamma", ".gamma_1")) for name in tensors),
        "class_token": "cls_token" in tensors,
        "pos_embed": "learn" if "pos_embed" in tensors else "none",
        "reg_tokens": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        "pre_norm": "norm_pre.weight" in tensors,
        "norm": "norm.weight" in tensors,
        "fc_norm": "fc_norm.weight" in tensors,
        "map": "attn_pool.latent" in tensors,
        "embed_norm": "patch_embed.norm.weight" in tensors,
        "norm_layer": "layernorm" if f"{first}{norm}.bias" in tensors else "rmsnorm",
        "block_fn": "DiffParallelScalingBlock" if parallel and differential else block,
        "mlp_layer": "SwiGLU" if gated else "SwiGLUPacked" if packed else "Mlp",
        "attn_layer": "diff" if differential and not parallel else "attn",
        "num_parallel": len({name.split(".")[3] for name in tensors if name.startswith(f"{first}attns.")}) or 2,
        "fuse_out_proj": parallel and not differential and output == "out_proj",
        "num_heads": None,
    }
    if differential:
        known["num_heads"] = kernel[0] // (2 * tensors[f"{attention}lambda_q1"].shape[0])
    elif known["qk_norm"]:
        known["num_heads"] = kernel[0] // tensors[f"{attention}q_norm.weight"].shape[0]
    return known


def stem_depths(tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...] | None:
    """Return the number of units of each stage of a hybrid's ResNet, none for its root alone; None without one."""
    units = [name.split(".")[3:6:2] for name in tensors if name.startswith("patch_embed.backbone.stages.")]
    if not units and "patch_embed.backbone.conv.weight" not in tensors:
        return None
    stages = sorted({int(stage) for stage, _ in units})
    return tuple(len({unit for stage, unit in units if int(stage) == number}) for number in stages)


def visible(arguments: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state dict of these arguments would show, in the words of `facts`."""
    given = {**DEFAULTS, **arguments}
    after = given["fc_norm"]
    if after is None:
        after = given["global_pool"] in ("avg", "avgmax", "max")
    shown = {name: given[name] for name in known if name in given}
    patch = given["patch_size"]
    return shown | {
        "patch_size": (patch, patch) if isinstance(patch, int) else tuple(patch),
        "width": int(given["embed_dim"] * given["mlp_ratio"]),
        "layer_scale": bool(given["init_values"]) and given["block_fn"] != "ResPostBlock",
        "norm": given["final_norm"] and not after,
        "fc_norm": given["final_norm"] and after,
        "map": given["global_pool"] == "map",
        "embed_norm": given["embed_norm_layer"] is not None,
        # By its tensors a block that ends in norms looks like one that begins with them.
        "block_fn": "Block" if given["block_fn"] == "ResPostBlock" else given["block_fn"],
        "num_heads": None if known["num_heads"] is None else given["num_heads"],
    }


def image_size_of(
    rows: int, no_embed_class: bool, known: Mapping[str, Any], told: Size | None, usual: Size | None = None
) -> tuple[int, int] | None:
    """Return the image size (height, width) in pixels for a position table of so many rows; None if it is open.

    Args:
        rows: Of the table.
        no_embed_class: Whether the tokens before the patches have none of them.
        known: What `facts` returned.
        told: What the caller says; nothing else is then taken.
        usual: What the name of the architecture stands for; taken if the table fits it.
    """
    patches = rows - (
        0 if no_embed_class else int(known["class_token"]) + int(known["distilled"]) + known["reg_tokens"]
    )
    height, width = known["patch_size"]
    for size in (told, usual):
        if size is not None:
            rectangle = pair(size)
            if (rectangle[0] // height) * (rectangle[1] // width) == patches:
                return rectangle
    side = math.isqrt(max(patches, 0))
    return (side * height, side * width) if told is None and side * side == patches and patches > 0 else None


def arguments_from(
    tensors: Mapping[str, torch.Tensor], known: Mapping[str, Any], hints: Hints
) -> tuple[dict[str, Any], list[Inference]]:
    """Return the arguments of a state dict that comes without a name: what all architectures like it have in common."""
    heads = hints.num_attention_heads or (known["embed_dim"] // hints.head_dim if hints.head_dim else None)
    said = {
        "num_heads": heads,
        "norm_eps": hints.layer_norm_eps,
        "act_layer": None if hints.hidden_act is None else word_of(ACTIVATIONS, hints.hidden_act),
        "global_pool": None if hints.pooling is None else word_of(POOLINGS, hints.pooling),
    }
    said = {name: value for name, value in said.items() if value is not None}
    rows = tensors["pos_embed"].shape[1] if known["pos_embed"] == "learn" else None
    like: dict[tuple[Any, ...], list[str]] = {}
    for name, entry in ARCHITECTURES.items():
        arguments = {**DEFAULTS, **entry}
        fits = visible(entry, known) == known and all(arguments[key] == value for key, value in said.items())
        if fits and (rows is None or image_size_of(rows, arguments["no_embed_class"], known, hints.image_size)):
            like.setdefault(tuple(arguments[key] for key in OPEN), []).append(name)
    if len(like) > 1:
        raise AmbiguousCheckpointError(
            f"these tensors fit {len(like)} architectures of timm that differ in what no tensor shows "
            "(heads, epsilon, activation, pooling):",
            {"architecture": [names[0] for names in like.values()]},
        )
    if like:
        ((values, names),) = like.items()
        source = f"all architectures of timm with such tensors ({', '.join(names)})"
        return dict(ARCHITECTURES[names[0]]), [
            Inference(name, value, source)
            for name, value in zip(OPEN[:4], values[:4], strict=True)
            if name not in said and name != known.get(name)
        ] + [Inference(field, "that of these", source) for field in UNSEEN]
    return _from_facts(known, said, rows, hints)


def _from_facts(
    known: Mapping[str, Any], said: dict[str, Any], rows: int | None, hints: Hints
) -> tuple[dict[str, Any], list[Inference]]:
    """Return the arguments of a state dict that no architecture of timm has: its own geometry."""
    inferences = []
    open_: dict[str, list[object]] = {}
    if known["num_heads"] is not None:
        said["num_heads"] = known["num_heads"]
    elif "num_heads" not in said and known["embed_dim"] % 64 == 0:
        said["num_heads"] = known["embed_dim"] // 64
        inferences.append(Inference("num_attention_heads", said["num_heads"], "64 channels per head, as is usual"))
    elif "num_heads" not in said:
        open_["num_attention_heads"] = [n for n in range(1, known["embed_dim"] + 1) if known["embed_dim"] % n == 0]
    if "norm_eps" not in said:
        open_["layer_norm_eps"] = [1e-6, 1e-5]
    if "act_layer" not in said:
        open_["hidden_act"] = list(dict.fromkeys(ACTIVATIONS.values()))
    if known["map"] and "global_pool" not in said:
        said["global_pool"] = "map"
    elif "global_pool" not in said:
        open_["pooling"] = ["cls", "mean"] if known["class_token"] else ["mean"]
    no_embed_class = False
    if rows is not None and image_size_of(rows, False, known, hints.image_size) is None:
        # Without positions for the tokens before the patches only where the caller's size says so: squares deceive.
        no_embed_class = bool(hints.image_size and image_size_of(rows, True, known, hints.image_size))
        if not no_embed_class:
            open_["image_size"] = ["(height, width)"]
    if open_:
        raise AmbiguousCheckpointError(
            "no architecture of timm has tensors of these shapes, and they do not show everything: "
            "give architecture=, the name of the one they were derived from, or",
            open_,
        )
    shown = {name: value for name, value in known.items() if name in DEFAULTS}
    return {
        **shown,
        **said,
        "no_embed_class": no_embed_class,
        "mlp_ratio": ratio_of(known["width"], known["embed_dim"]),
        "init_values": 1e-5 if known["layer_scale"] else None,
        "final_norm": known["norm"] or known["fc_norm"],
        "embed_norm_layer": known["norm_layer"] if known["embed_norm"] else None,
    }, inferences + [Inference(field, "that of timm", "timm") for field in UNSEEN]
