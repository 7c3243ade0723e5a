"""Apply array functions to whole datasets, with one batch in memory at a time.

Legend: `B` batch, `C` channels, `H W` pixels.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import BaseImageProcessor

from ..errors import AnalysisError
from .inspection import as_batch, pixels_of


def average_over_images(
    function: Callable[..., np.ndarray],
    model: nn.Module,
    batches: Iterable[torch.Tensor | Mapping[str, Any]],
    *,
    limit: int | None = None,
    progress: bool = True,
    **options: Any,
) -> np.ndarray:
    """Average the result of an array function over the images of a dataset.

    Args:
        function: Any function of this package that takes a model and pixels and returns an array whose first axis is
            the image, such as `attention_distance`.
        model: A plain ViT.
        batches: Normalised pixels of shape (B, C, H, W), or dictionaries with such `pixel_values`: a loader, a streamed
            dataset, or `pixel_batches`.
        limit: Number of images to use (default: all; the paper's attention distance averages over 128).
        progress: Show a progress bar.
        **options: Further arguments of the function.

    Returns:
        The mean, in the shape of the function's result for one image. NaNs are ignored.

    Raises:
        AnalysisError: There are no images, or the results of two images have different shapes.
    """
    if limit is not None and limit < 1:
        raise AnalysisError(f"limit is {limit}: expected 1 or more images")
    total: np.ndarray | None = None
    counted: np.ndarray | None = None
    images = 0
    with tqdm(total=limit, unit=" images", disable=not progress) as bar:
        for batch in batches:
            pixels = as_batch(model, batch)
            pixels = pixels if limit is None else pixels[: limit - images]
            values = function(model, pixels, **options)
            if total is None or counted is None:
                total, counted = np.zeros(values.shape[1:]), np.zeros(values.shape[1:])
            if total.shape != values.shape[1:]:
                raise AnalysisError(
                    f"{function.__name__} returned arrays of shape {total.shape} for the first images and "
                    f"{values.shape[1:]} later: resize all images to one size"
                )
            total += np.nansum(values, axis=0, dtype=np.float64)
            counted += (~np.isnan(values)).sum(axis=0)
            images += len(pixels)
            bar.update(len(pixels))
            if images == limit:
                break
    if total is None or counted is None:
        raise AnalysisError("there are no images to average over: the batches are empty")
    with np.errstate(invalid="ignore"):
        return (total / counted).astype(np.float32)


def pixel_batches(
    images: Iterable[Any], image_processor: BaseImageProcessor, batch_size: int = 32
) -> Iterator[torch.Tensor]:
    """Preprocess images in batches of one size, such as `(row["image"] for row in streamed_dataset)`.

    Args:
        images: Opened images, arrays, or paths.
        image_processor: The model's image processor.
        batch_size: Preprocessed images in memory at a time; unprocessed images are read one by one.

    Yields:
        Normalised pixels of shape (at most batch_size, C, H, W); a new batch begins whenever the image size changes.
    """
    side = getattr(image_processor, "patch_size", None)
    pixels = (pixels_of(image_processor(image, return_tensors="pt"), side) for image in images)
    for _, same in itertools.groupby(pixels, lambda each: each.shape):
        while batch := list(itertools.islice(same, batch_size)):
            yield torch.cat(batch)
