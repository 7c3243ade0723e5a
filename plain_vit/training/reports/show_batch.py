"""Picture of the first training batch, exactly as the model sees it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...analysis import displayable
from ...errors import TrainingError
from ...files.staging import staged_file
from ...system.extras import needs
from ..data.inputs import images_in

with needs("plain-vit[train]"):
    from ...analysis.drawing import png
    from ...analysis.plots import plot_training_batch

IMAGES = 32  # maximum number of images


def check_picture(path: str, option: str) -> None:
    """Refuse a path to which no picture can be written.

    Raises:
        TrainingError: The path is not that of a PNG file in an existing folder.
    """
    if Path(path).suffix.lower() != ".png" or not Path(path).absolute().parent.is_dir():
        raise TrainingError(f"{option} is {path}: expected a .png file in an existing folder.")


def displayable_images(inputs: Mapping[str, torch.Tensor], image_processor: Any) -> list[np.ndarray]:
    """Return the images in a model's inputs for display, each in its own size."""
    return [displayable(image[None], image_processor)[0] for image in images_in(inputs, image_processor)]


def show_batch(
    path: str,
    inputs: Mapping[str, torch.Tensor],
    targets: torch.Tensor,
    image_processor: Any,
    class_names: list[str],
) -> None:
    """Draw the images of a batch with their labels.

    Args:
        path: PNG file; it is replaced if it exists.
        inputs: inputs of the model; values beyond black and white are clipped.
        targets: labels (B), or class probabilities (B, classes).
        image_processor: image processor, to undo its normalisation.
        class_names: the classes, in the order of their numbers.
    """
    count = len(class_names)
    shares = F.one_hot(targets, count) if targets.ndim == 1 else targets
    images = displayable_images(inputs, image_processor)[:IMAGES]
    figure = plot_training_batch(images, shares[:IMAGES].float().cpu().numpy(), class_names)
    with staged_file(Path(path), force=True) as new:
        new.write_bytes(png(figure))
