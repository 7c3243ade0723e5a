"""DINOv2's own checkpoints, with timm's names except for the registers, the gated MLP and chunks of blocks.

Source: facebookresearch/dinov2, `dinov2/models/vision_transformer.py`; timm 1.0.31 converts the same names as it loads.
"""

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from .....configuration_plain_vit import PlainViTConfig
from .....errors import CheckpointError
from ....tables.engine import ADD_FIRST_AXIS, Row, Tensors, Transform
from ....tables.format import Inference

LAYOUT = "dinov2"
# If the blocks were split for sharded training: blocks.{chunk}.{block}.
CHUNKED = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")
RENAMED = {"register_tokens": "reg_token", "w12": "fc1", "w3": "fc2"}


def _with_rows_of_registers(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    """Insert rows of zeros for the registers, which have no positions in DINOv2."""
    table = tensors[0][0]
    return [torch.cat((table[:1], table.new_zeros(config.num_register_tokens, table.shape[1]), table[1:]))]


def _without_rows_of_registers(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    table, end = tensors[0], 1 + config.num_register_tokens
    if not table.is_meta and table[1:end].any():
        raise CheckpointError("DINOv2's registers have no positions, and those of this model were trained")
    return [torch.cat((table[:1], table[end:]))[None]]


POSITIONS = Transform("POSITIONS", _with_rows_of_registers, _without_rows_of_registers)


def layout_of(names: Collection[str]) -> str | None:
    """Return the layout of DINOv2's own names, with the number of blocks per chunk, if any; None for other names.

    Raises:
        CheckpointError: The chunks have different numbers of blocks.
    """
    chunks: dict[int, set[int]] = {}
    for name in names:
        if match := CHUNKED.fullmatch(name):
            chunks.setdefault(int(match[1]), set()).add(int(match[2]))
    if chunks:
        size = len(chunks.get(0, ()))
        if any(number // max(size, 1) != chunk for chunk, numbers in chunks.items() for number in numbers):
            raise CheckpointError(f"the blocks are in chunks of unequal numbers: {chunks}")
        return f"{LAYOUT} {size}"
    own = "register_tokens" in names or any(name.endswith(".mlp.w12.weight") for name in names)
    masked = "mask_token" in names and "decoder_embed.weight" not in names
    return LAYOUT if own or masked else None


def is_own(layout: str | None) -> bool:
    """Return whether a layout has DINOv2's own names."""
    return layout is not None and layout.startswith(LAYOUT)


def as_timm(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with timm's names and shapes, without the mask token; values are not needed."""
    found = {_timm_name(name): tensor for name, tensor in tensors.items() if name != "mask_token"}
    if "reg_token" in found:
        found["pos_embed"] = found["pos_embed"][:, 1:]  # timm adds the class token's row to the token
    return found


def _timm_name(name: str) -> str:
    match = CHUNKED.fullmatch(name)
    short = f"blocks.{match[2]}.{match[3]}" if match else name
    return ".".join(RENAMED.get(part, part) for part in short.split("."))


def for_module(tensors: Mapping[str, torch.Tensor], config: PlainViTConfig) -> dict[str, torch.Tensor]:
    """Return the tensors for timm's model of this config, whose position table has rows of zeros for the registers."""
    found = {_timm_name(name): tensor for name, tensor in tensors.items() if name != "mask_token"}
    (table,) = POSITIONS.to_ours([found["pos_embed"]], config)
    return {**found, "pos_embed": table[None]}


def without_mask_token(config: PlainViTConfig) -> PlainViTConfig:
    """Return the config of timm's model, which has no mask token."""
    inside = copy.deepcopy(config)
    inside.use_mask_token = False
    return inside


def adapt(config: PlainViTConfig, tensors: Collection[str]) -> Inference:
    """Add what timm's model lacks to the config: the mask token, and a position for the class token.

    Args:
        config: Our config of timm's model, changed in place.
        tensors: Names of the tensors in DINOv2's checkpoint.

    Returns:
        The origin of how positions are resampled.
    """
    with_registers = config.num_register_tokens > 0
    config.use_mask_token = "mask_token" in tensors
    config.position_embedding_on_prefix = True
    config.position_resampling = "bicubic_antialias" if with_registers else "bicubic"
    source = "DINOv2's code, with registers" if with_registers else "DINOv2's code, but for its offset of 0.1"
    return Inference("position_resampling", config.position_resampling, source)


def rows(timm_rows: list[Row], config: PlainViTConfig, layout: str) -> list[Row]:
    """Return the table of DINOv2's own names.

    Args:
        timm_rows: The table of timm's names.
        config: Our configuration.
        layout: A layout from `layout_of`.
    """
    gated = config.mlp_type == "swiglu_packed"
    theirs = {ours: name for name, ours in RENAMED.items() if gated or name == "register_tokens"}
    renamed = []
    for row in timm_rows:
        source = ".".join(theirs.get(part, part) for part in str(row.source).split("."))
        transform = POSITIONS if source == "pos_embed" else row.transform
        renamed.append(replace(row, source=source, transform=transform))
    renamed.append(Row("mask_token", "vit.embeddings.mask_token", ADD_FIRST_AXIS))
    chunk = layout.removeprefix(LAYOUT).strip()
    return renamed if not chunk else _chunked(renamed, config, int(chunk))


def _chunked(rows: list[Row], config: PlainViTConfig, size: int) -> list[Row]:
    """Return the table with a row for each block, which contains the number of its chunk."""
    whole = [row for row in rows if not str(row.source).startswith("blocks.")]
    split = [
        replace(
            row,
            source=str(row.source).replace("blocks.{}", f"blocks.{number // size}.{number}"),
            ours=tuple(name.replace("vit.layers.{}", f"vit.layers.{number}") for name in row.targets),
        )
        for row in rows
        if row not in whole
        for number in range(config.num_hidden_layers)
    ]
    return [*whole, *split]
