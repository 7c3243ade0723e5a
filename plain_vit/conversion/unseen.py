"""How two checkpoints with equal outputs may still differ: settings, class names, preprocessing."""

from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from transformers import PreTrainedConfig

from ..configuration_plain_vit import PlainViTConfig
from .tables.compare_modules import differing, meaning_of


class Described(NamedTuple):
    """A checkpoint without its weights.

    Args:
        config: Our config of the model.
        image_processor: The model's image processor; None if unknown.
    """

    config: PlainViTConfig
    image_processor: Any | None


def unseen_differences(one: Described, other: Described) -> list[str]:
    """Return the differences of two checkpoints that outputs for images of the native size do not show.

    Compared are the settings (for other image sizes, for training), the class names, and the output of the image
    processors for three images. Class names or an image processor that only one checkpoint has are not compared.
    """
    ours, theirs = (meaning_of(config) | _resampling(config) for config, _ in (one, other))
    lines = [f"{name} is {value!r} and {other_value!r}" for name, value, other_value in differing(ours, theirs)]
    problems = [config.problem_type or "single_label_classification" for config, _ in (one, other)]  # as in pipelines
    if problems[0] != problems[1]:
        lines.append(f"problem_type is {problems[0]!r} and {problems[1]!r}")
    names = [class_names(config) for config, _ in (one, other)]
    if all(names):
        renamed = [(number, *pair) for number, pair in enumerate(zip(*names, strict=True)) if pair[0] != pair[1]]
        if renamed:
            number, first, second = renamed[0]
            lines.append(f"the names of {len(renamed)} classes: the first, {number}, is {first!r} and {second!r}")
    if one.image_processor is not None and other.image_processor is not None:
        found = _difference_of_pixels(one.image_processor, other.image_processor, one.config.num_channels)
        lines += [f"the image processors: {found}"] if found else []
    return lines


def class_names(config: PreTrainedConfig) -> list[str]:
    """Return the names of the classes, or an empty list if they only have numbers."""
    names = [str(name) for _, name in sorted((config.id2label or {}).items())]
    return [] if all(name.startswith("LABEL_") for name in names) else names


def _resampling(config: PlainViTConfig) -> dict[str, Any]:
    """Return how position tables are resampled for other image sizes; None without such tables."""
    tables = config.position_embedding_type in ("learned", "learned_2d", "factorized")
    bias = config.relative_position_bias
    return {
        "position_resampling": config.position_resampling if tables else None,
        "relative_position_bias.resampling": (
            bias["resampling"] if bias is not None and bias["type"] in ("table", "query") else None
        ),
    }


def _difference_of_pixels(one: Any, other: Any, channels: int) -> str | None:
    """Describe how the outputs of two image processors differ on noise of several shapes; None if they are equal."""
    levels = np.random.default_rng(0)
    worst = 0.0
    for height, width in ((300, 200), (97, 131), (240, 640)):
        shape = (height, width) if channels == 1 else (height, width, channels)
        image = levels.integers(0, 256, shape, dtype=np.uint8)
        picture = Image.fromarray(image) if channels in (1, 3, 4) else image
        try:
            ours, theirs = (each(picture, return_tensors="np")["pixel_values"] for each in (one, other))
        except (ValueError, TypeError, RuntimeError) as error:  # such as a filter that its backend lacks
            return f"one of them refuses an image of {height} x {width} pixels ({error})"
        if ours.shape != theirs.shape:
            return f"one makes {ours.shape[1:]} of an image of {height} x {width} pixels, the other {theirs.shape[1:]}"
        worst = max(worst, float(np.abs(ours.astype(np.float64) - theirs).max()))
    return f"their pixels differ by up to {worst:.2g}, after normalisation" if worst > 0 else None
