"""Packing of images of many sizes into batches of about the same number of tokens, without padding.

processor = PlainViTImageProcessor(patch_size=16, max_num_patches=256)
batches = greedy_packs([len(image) for image in patches], most=4096)
DataLoader(patches, batch_sampler=batches, collate_fn=pack)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def greedy_packs(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Pack images into batches by first fit, the longest image first.

    Args:
        lengths: Number of tokens of each image.
        most: Maximum number of tokens in a batch.

    Returns:
        The indices of the images in each batch, in ascending order. Batches are ordered by their first image.

    Raises:
        ValueError: An image has no tokens, or more than a batch may have.
    """
    wrong = [index for index, length in enumerate(lengths) if not 0 < length <= most]
    if wrong:
        raise ValueError(f"image {wrong[0]} has {lengths[wrong[0]]} tokens: expected at least 1, and at most {most}")
    packs: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = next((pack for pack, left in enumerate(free) if left >= lengths[index]), len(packs))
        if fitting == len(packs):
            packs.append([])
            free.append(most)
        packs[fitting].append(index)
        free[fitting] -= lengths[index]
    return sorted(sorted(pack) for pack in packs)


def unpad(inputs: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return the patches of each image, without padding, from the output of an image processor.

    Args:
        inputs: `pixel_values` (B, N, P) and `spatial_shapes` (B, 2), as tensors.
    """
    shapes = inputs["spatial_shapes"]
    return [
        {"pixel_values": row[: int(grid.prod())], "spatial_shapes": grid}
        for row, grid in zip(inputs["pixel_values"], shapes, strict=True)
    ]


def whole_images(inputs: Mapping[str, Any], patch_size: int) -> list[torch.Tensor]:
    """Reassemble patches into the images (C, H, W) that they were cut from, each of its own size.

    Args:
        inputs: `pixel_values` (B, N, P) with padding or (N, P) packed, and `spatial_shapes` (B, 2), as tensors.
        patch_size: Side of a patch, in pixels.
    """
    patches, shapes = inputs["pixel_values"], inputs["spatial_shapes"].tolist()
    counts = [h * w for h, w in shapes]
    if patches.ndim == 3:
        patches = torch.cat([row[:count] for row, count in zip(patches, counts, strict=True)])
    return [
        row.reshape(h, w, patch_size, patch_size, -1).permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)
        for row, (h, w) in zip(patches.split(counts), shapes, strict=True)
    ]


def pack(images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate images into a packed batch: the patches of all images one after the other.

    Args:
        images: `pixel_values` (N, P) and `spatial_shapes` (2,) of each image, as `unpad` returns them. Other entries,
            such as `labels`, are stacked; texts become a list.

    Raises:
        ValueError: There is no image, or the images do not have the same entries.
    """
    if not images or len({frozenset(image) for image in images}) > 1:
        raise ValueError(f"got {len(images)} images: expected at least one, all with the same entries")
    others = {name: _stacked([image[name] for image in images]) for name in images[0] if name != "pixel_values"}
    return {"pixel_values": torch.cat([image["pixel_values"] for image in images]), **others}


def _stacked(values: list[Any]) -> Any:
    return values if isinstance(values[0], str) else torch.stack([torch.as_tensor(value) for value in values])
