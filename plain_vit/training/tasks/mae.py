"""Masked autoencoders as a task for the training loop (MAE: He et al. 2022).

The encoder sees only the patches that are not masked; a small decoder, which fine-tuning leaves out, sees them and mask
tokens, and predicts the pixels of the masked patches.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size.
"""

import math
import os
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import CONFIG_NAME, cached_file

from ...conversion.registry import located
from ...conversion.sources.mae import HEADS, decoder_config, decoder_in
from ...errors import TrainingError
from ...files.reading import read_checkpoint
from ...layers_plain_vit import cut_patches
from ...modeling_plain_vit import PlainViTForImageClassification, PlainViTModel, PlainViTPositionEmbedding
from ...packed_plain_vit import tokens_of
from ..arguments import PretrainArguments
from ..data.augmentation import input_size
from ..models import checkpoint_hints
from .masked_patches import Corruption, corruption_of, draw_corruption
from .unlabelled import Start, Unlabelled

FOLDER = "decoder"  # in the folder of the model
# Of the decoder, by the names of facebookresearch/mae: the field of its config, and the published number.
SIZES = {
    "decoder_embed_dim": ("hidden_size", 512),
    "decoder_depth": ("num_hidden_layers", 8),
    "decoder_num_heads": ("num_attention_heads", HEADS),
}


def masked_patches(
    grid_size: tuple[int, int], corruption: Corruption, pixels: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return the patches to predict of an image; see `UnlabelledImages`."""
    return {"predicted": draw_corruption(grid_size, corruption, generator)[0]}


class MaskedAutoencoder(nn.Module):
    """An encoder and a decoder, with the loss of the masked patches' pixels.

    Args:
        vit: the encoder.
        decoder: the decoder: a plain ViT whose image is one row of L pixels with D channels, the encoder's tokens, and
            which classifies each of them, as the pixels of its patch.
        masked: number of masked patches of each image.
        norm_pix_loss: predict pixels normalised by mean and standard deviation of their patch.
    """

    def __init__(
        self, vit: PlainViTModel, decoder: PlainViTForImageClassification, masked: int, *, norm_pix_loss: bool
    ) -> None:
        super().__init__()
        self.vit, self.decoder, self.masked, self.norm_pix_loss = vit, decoder, masked, norm_pix_loss
        for table in map(table_of, (vit, decoder.vit)):
            if table is not None:
                table.requires_grad_(False)
        for unused in (vit.pooled_layernorm, vit.representation):
            unused.requires_grad_(False)  # processes would wait for its gradients

    def forward(
        self, pixel_values: torch.Tensor, predicted: torch.Tensor, each: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss, and 0 for the number of correct predictions.

        Args:
            pixel_values: images of shape (B, C, H, W).
            predicted: mask of the masked patches, as many in each image, of shape (B, h, w).
            each: return both per image, of shape (B,).
        """
        masked, config = predicted.flatten(1), self.vit.config
        last = config.num_register_tokens if config.register_tokens_last else 0
        hidden = F.pad(masked.byte(), (config.num_prefix_tokens, last))  # B L
        kept = hidden.argsort(dim=1, stable=True)[:, : -self.masked]
        seen, _ = self.vit.encode(pixel_values, tokens_of(config, pixel_values), kept=kept)
        seen = self.vit.layernorm(seen)
        tokens = seen.new_zeros(*hidden.shape, seen.shape[-1])
        tokens = tokens.scatter(1, kept.unsqueeze(-1).expand_as(seen), seen)
        row = tokens.transpose(1, 2).unsqueeze(2)  # B D 1 L
        output: Any = self.decoder(row, bool_masked_pos=hidden.bool(), return_dict=True)
        pixels = output.logits[:, config.num_prefix_tokens : hidden.shape[1] - last]  # B N values
        target = cut_patches(pixel_values, *config.patch_shape)
        if self.norm_pix_loss:
            variance, mean = torch.var_mean(target, dim=-1, keepdim=True)
            target = (target - mean) / (variance + 1e-6) ** 0.5
        losses = ((pixels - target) ** 2).mean(dim=-1)  # B N
        losses = (losses * masked).sum(dim=1) / self.masked
        losses = losses if each else losses.mean()
        return losses, torch.zeros_like(losses)


def mae(options: PretrainArguments, start: Start) -> Unlabelled:
    """Return a masked autoencoder as a task.

    Raises:
        TrainingError: The encoder cannot leave out patches, or its decoder is another than the options say.
    """
    start.require_maskable()
    config = start.config
    if config.relative_position_bias is not None or config.window_attention is not None:
        raise TrainingError("The attention of the model needs all patches: give another model, or another --method.")
    grid_size = config.grid_of(*input_size(start.image_processor))
    vit, corruption = start.fill(PlainViTModel(config)), corruption_of(options)
    table = table_of(vit)
    if start.weights is None and table is not None:
        place_tokens(table, config.grid_size, config.num_prefix_tokens if config.position_embedding_on_prefix else 0)
    decoder, masked = make_decoder(options, start, grid_size), corruption.count(grid_size)
    if masked == math.prod(grid_size):
        raise TrainingError(f"mask_ratio {corruption.ratio} leaves none of {masked} patches to see: give a lower one.")
    return Unlabelled(
        MaskedAutoencoder(vit, decoder, masked, norm_pix_loss=options.norm_pix_loss),
        start.image_processor,
        saved={"vit": ".", "decoder": FOLDER},
        summary="as the encoder of a masked autoencoder",
        settings={
            "mask_ratio": corruption.ratio,
            "mask_block": corruption.block,
            **{name: getattr(decoder.config, field) for name, (field, _) in SIZES.items()},
        },
        targets=partial(masked_patches, grid_size, corruption),
    )


def make_decoder(
    options: PretrainArguments, start: Start, grid_size: tuple[int, int]
) -> PlainViTForImageClassification:
    """Return the decoder in the checkpoint of the encoder, or a new one if it has none.

    Raises:
        TrainingError: The decoder in the checkpoint is another than the options say, or for another image size.
    """
    config, (h, w) = start.config, grid_size
    length = config.num_prefix_tokens + h * w + (config.num_register_tokens if config.register_tokens_last else 0)
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    decoder = None if start.weights is None else stored_decoder(options, start)
    if decoder is not None:
        found = {name: getattr(decoder.config, SIZES[name][0]) for name in given}
        if found != given or decoder.config.image_shape != (1, length):
            raise TrainingError(
                f"The decoder in {start.source} has {decoder.config.image_shape[1]} tokens and {found}, not {length} "
                f"tokens and {given}: omit these options and give images of its size, or give the encoder alone, which "
                "gets a new decoder."
            )
        return decoder
    fields = {field: given.get(name, published) for name, (field, published) in SIZES.items()}
    values = math.prod(config.patch_shape) * config.num_channels
    decoder = PlainViTForImageClassification(
        decoder_config(config, length, values, intermediate_size=4 * fields["hidden_size"], **fields)
    )
    if (table := table_of(decoder.vit)) is not None:
        place_tokens(table, grid_size, config.num_prefix_tokens)
    return decoder


def stored_decoder(options: PretrainArguments, start: Start) -> PlainViTForImageClassification | None:
    """Return the decoder beside the encoder in a checkpoint, or None if there is none."""
    place, _ = located(start.source)
    silent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if not os.path.isfile(place) and cached_file(place, f"{FOLDER}/{CONFIG_NAME}", **silent) is not None:
        return PlainViTForImageClassification.from_pretrained(place, subfolder=FOLDER, dtype=torch.float32)
    checkpoint = read_checkpoint(place, key=checkpoint_hints(options.model_hints).get("key"))
    return decoder_in(checkpoint, start.config, options.decoder_num_heads)


def table_of(vit: PlainViTModel) -> nn.Parameter | None:
    """Return the table of positions, of which the masked autoencoder trains none; None for other kinds."""
    positions = vit.embeddings.position_embeddings
    return positions.weight if isinstance(positions, PlainViTPositionEmbedding) else None


@torch.no_grad()
def place_tokens(table: torch.Tensor, grid_size: tuple[int, int], first: int) -> None:
    """Fill a table (L, D) with sines and cosines of column and row from token `first` on, and with zeros elsewhere.

    Source: `util/pos_embed.py` of facebookresearch/mae.

    Raises:
        TrainingError: The width is not a multiple of 4.
    """
    if table.shape[1] % 4:
        raise TrainingError(f"Positions of width {table.shape[1]}: sines and cosines need a multiple of 4.")
    quarter = table.shape[1] // 4
    frequencies = 1 / 10000 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    places = torch.cartesian_prod(*(torch.arange(count, dtype=torch.float64) for count in grid_size))  # N 2
    rows, columns = (places[:, axis, None] * frequencies for axis in (0, 1))
    table.zero_()
    table[first : first + len(places)] = torch.cat((columns.sin(), columns.cos(), rows.sin(), rows.cos()), dim=1).to(
        table
    )
