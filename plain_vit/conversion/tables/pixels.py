"""What the sources share to build image processors."""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL.Image import Resampling

from ...image_processing_plain_vit import PlainViTImageProcessor
from .infer import pair

INTERPOLATIONS = {  # name in timm and torchvision -> Pillow's number, which transformers stores
    "nearest": Resampling.NEAREST.value,
    "bilinear": Resampling.BILINEAR.value,
    "bicubic": Resampling.BICUBIC.value,
    "lanczos": Resampling.LANCZOS.value,
    "box": Resampling.BOX.value,
    "hamming": Resampling.HAMMING.value,
}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def default_processor(
    image_size: int | Sequence[int],
    num_channels: int = 3,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[PlainViTImageProcessor, tuple[str, ...]]:
    """Return an image processor for a source that does not record its preprocessing, and the assumptions made.

    Args:
        image_size: Input size of the model in pixels, an int or (height, width).
        num_channels: Number of input channels of the model.
        mean: Mean of each channel, with values in 0..1 (assumed if not given: 0.5).
        std: Standard deviation of each channel, with values in 0..1 (assumed if not given: 0.5).

    Returns:
        The processor, which resizes images to exactly `image_size` (bilinear), and one sentence per assumption for the
        report of the conversion.
    """
    height, width = pair(image_size)
    assumed = [f"the images were stretched to {height}x{width} pixels, bilinear: the checkpoint does not say"]
    if mean is None or std is None:
        assumed.append(
            "pixels were scaled to [-1, 1] (image_mean 0.5, image_std 0.5): the checkpoint does not say; "
            "give image_mean and image_std if they were not"
        )
    processor = PlainViTImageProcessor(
        size={"height": height, "width": width},
        resample=INTERPOLATIONS["bilinear"],
        image_mean=tuple(mean or (0.5,) * num_channels),
        image_std=tuple(std or (0.5,) * num_channels),
    )
    return processor, tuple(assumed)


def unknown_value(name: str, got: object, known: Sequence[str] | Mapping[str, Any]) -> str:
    return f"{name} is {got!r}: expected one of {', '.join(known)}"
