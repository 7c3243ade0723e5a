"""Scores of a classifier, confusion matrices, and the images that a model sees.

Legend: `B` batch, `C` channels, `H W` pixels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BaseImageProcessor

from ..errors import AnalysisError
from ..scores import scores
from .inspection import as_array, classify, pixels_of, prepared, token_layout, whole_numbers


def predict(model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any]) -> np.ndarray:
    """Return the scores of transformers' image-classification pipeline.

    Args:
        model: A plain ViT with a classifier.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.

    Returns:
        Of shape (B, classes): class probabilities (softmax), label probabilities of a multi-label model (sigmoid), or
        the outputs of a regression.

    Raises:
        AnalysisError: The model has no classifier, or the pixels do not fit it.
    """
    model, pixel_values, _ = prepared(model, pixel_values)
    with torch.no_grad():
        return as_array(scores(classify(model, pixel_values), model.config.problem_type))


def confusion_matrix(
    labels: Sequence[int] | np.ndarray, predictions: Sequence[int] | np.ndarray, classes: int
) -> np.ndarray:
    """Count the predictions for each true class.

    Args:
        labels: True classes, of shape (B,).
        predictions: Predicted classes, of shape (B,).
        classes: Number of classes.

    Returns:
        Counts of shape (classes, classes): rows are true classes, columns predicted classes.

    Raises:
        AnalysisError: The lengths differ, or a class is out of range.
    """
    labels, predictions = whole_numbers("labels", labels), whole_numbers("predictions", predictions)
    if labels.shape != predictions.shape:
        raise AnalysisError(f"got {labels.size} labels and {predictions.size} predictions: expected equally many")
    for what, numbers in (("label", labels), ("prediction", predictions)):
        outside = numbers[(numbers < 0) | (numbers >= classes)]
        if outside.size:
            raise AnalysisError(f"{what} {outside[0]} is out of range: the classes are 0 to {classes - 1}")
    matrix = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(matrix, (labels, predictions), 1)
    return matrix


def displayable(
    pixel_values: torch.Tensor | Mapping[str, Any],
    image_processor: BaseImageProcessor | None = None,
    model: nn.Module | None = None,
) -> np.ndarray:
    """Return the input images of a model, for display.

    Args:
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        image_processor: The processor whose normalisation is undone. Without one, each image is rescaled from its
            minimum to its maximum.
        model: The plain ViT. With `drop_partial_patches` it ignores pixels that do not fill a patch; they are cropped,
            so that patch maps fit.

    Returns:
        Values in [0, 1] of shape (B, H, W, 3) for three channels, otherwise (B, H, W): the mean of the channels.

    Raises:
        AnalysisError: The pixels do not fit the model, or are patches of images of several sizes.
    """
    if isinstance(pixel_values, Mapping):
        pixel_values = pixels_of(pixel_values, getattr(image_processor, "patch_size", None))
    pixels = torch.as_tensor(pixel_values).detach().float().cpu()
    if model is not None:
        layout = token_layout(model, pixels)
        h, w = (count * side for count, side in zip(layout.grid_size, layout.patch_size, strict=True))
        pixels = pixels[..., :h, :w]
    settings: Any = image_processor
    if settings is None:
        low, high = pixels.amin(dim=(1, 2, 3), keepdim=True), pixels.amax(dim=(1, 2, 3), keepdim=True)
        pixels = (pixels - low) / (high - low).clamp(min=torch.finfo(pixels.dtype).tiny)
    else:
        if settings.do_normalize:
            std, mean = (torch.tensor(values).reshape(-1, 1, 1) for values in (settings.image_std, settings.image_mean))
            pixels = pixels * std + mean
        pixels = pixels / (255 * (settings.rescale_factor if settings.do_rescale else 1))
    pixels = pixels.clamp(0, 1)
    return (pixels.permute(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels.mean(dim=1)).numpy()
