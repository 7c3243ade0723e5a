"""The decoder in checkpoints of masked autoencoders (MAE: He et al. 2022), beside the encoder.

It becomes a plain ViT whose image is one row of the encoder's tokens, and which classifies every token: as the pixels
of its patch.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...configuration_plain_vit import PlainViTConfig
from ...files.reading import Checkpoint
from ...modeling_plain_vit import PlainViTForImageClassification
from ..tables.engine import DROP_FIRST_AXIS, Row, convert
from .timm.tables import sequential_rows
from .transformers.families import VIT_ON_DISK

HEADS = 16  # of all published decoders
ENDS = [
    Row("decoder_embed", "vit.embeddings.patch_embeddings.projection"),
    Row("mask_token", "vit.embeddings.mask_token"),
    Row("decoder_pos_embed", "vit.embeddings.position_embeddings.weight", DROP_FIRST_AXIS),
    Row("decoder_norm", "vit.layernorm"),
    Row("decoder_pred", "classifier"),
]
# Beginnings of the blocks' names, in the files of the authors and of transformers.
BLOCKS = {"decoder_blocks.": "blocks.", "decoder_layers.": "encoder.layer."}


def decoder_config(encoder: PlainViTConfig, tokens: int, pixels: int, **fields: Any) -> PlainViTConfig:
    """Return the config of a decoder.

    Args:
        encoder: config of the encoder.
        tokens: tokens of an image in the encoder, if it saw all patches.
        pixels: values of a patch.
        **fields: `hidden_size`, `num_hidden_layers`, `num_attention_heads` and `intermediate_size`.
    """
    fields |= {"num_labels": pixels}  # no field of its own
    return PlainViTConfig(
        image_size=(1, tokens), patch_size=1, num_channels=encoder.hidden_size, patch_projection="linear",
        use_class_token=False, use_mask_token=True, pooling="none",
        layer_norm_eps=encoder.layer_norm_eps, initialization=encoder.initialization, **fields,
    )  # fmt: skip


def decoder_in(
    checkpoint: Checkpoint, encoder: PlainViTConfig, num_attention_heads: int | None
) -> PlainViTForImageClassification | None:
    """Return the decoder in a checkpoint of the authors or of transformers' `ViTMAEForPreTraining`, if it has one.

    Args:
        checkpoint: The opened checkpoint.
        encoder: Config of its encoder.
        num_attention_heads: Heads of the decoder, which the authors' files do not contain (default: 16, as published).

    Raises:
        MappingError: Tensors of the decoder are missing, left over or of a wrong shape.
    """
    opened = checkpoint.tensors.mapped()
    # transformers 5 writes `decoder_encoder.layer` for `decoder_layers`.
    names = {name: name.removeprefix("decoder.").replace("encoder.layer.", "layers.") for name in opened}
    tensors = {short: opened[name] for name, short in names.items() if short.startswith(("decoder_", "mask_token"))}
    if "decoder_embed.weight" not in tensors:
        return None
    begin = next((begin for begin in BLOCKS if any(name.startswith(begin) for name in tensors)), "decoder_blocks.")
    blocks = {name.split(".")[1] for name in tensors if name.startswith(begin)}
    hidden = [
        tensor.shape[0] for name, tensor in tensors.items() if name.endswith((".fc1.bias", "intermediate.dense.bias"))
    ]
    heads = (checkpoint.config or {}).get("decoder_num_attention_heads", num_attention_heads or HEADS)
    config = decoder_config(
        encoder, tensors["decoder_pos_embed"].shape[1], tensors["decoder_pred.bias"].shape[0],
        hidden_size=tensors["mask_token"].shape[-1], num_hidden_layers=len(blocks), num_attention_heads=heads,
        intermediate_size=hidden[0],
    )  # fmt: skip
    model = PlainViTForImageClassification(config)
    rows = [*ENDS, *_renamed(sequential_rows(config) if BLOCKS[begin] == "blocks." else VIT_ON_DISK, begin)]
    model.load_state_dict(convert(rows, tensors, model.state_dict(), config))
    return model.float()


def _renamed(rows: Iterable[Row], begin: str) -> list[Row]:
    return [replace(row, source=f"{begin}{row.sources[0].removeprefix(BLOCKS[begin])}") for row in rows]
