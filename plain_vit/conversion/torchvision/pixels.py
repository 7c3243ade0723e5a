"""The transforms that torchvision publishes with its weights as image processors."""

from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...image_processing_plain_vit import (
    SourcePreprocessing,
)
from ..pixels import IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, make_processor
from .architectures import FILES as TORCHVISION_FILES


def processor_from_torchvision(source: Any, *, backend: str = "torchvision") -> SourcePreprocessing:
    """Prepare the same pixels as the transform that torchvision publishes with its weights.

    Args:
        source: The transform (`ViT_B_16_Weights.IMAGENET1K_V1.transforms()`), or the name of a published file, such as
            "vit_b_16-c867db91.pth".
        backend: "torchvision" (tensors) or "pil" (arrays): the same pixels.

    Raises:
        CheckpointError: if the file is none of torchvision's own: what prepared its images is then not known.
    """
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if isinstance(source, (str, Path)):
        stem = Path(source).stem
        if stem not in TORCHVISION_FILES:
            raise CheckpointError(
                f"{stem} is not one of torchvision's published files ({', '.join(TORCHVISION_FILES)}), and its own "
                "preprocessing is not in it: give the image processor yourself"
            )
        resize, crop, interpolation = TORCHVISION_FILES[stem]
    else:
        (resize,), (crop,), interpolation = source.resize_size, source.crop_size, source.interpolation.value
        mean, std = source.mean, source.std
    return make_processor(
        backend,
        size={"shortest_edge": resize},
        crop_size={"height": crop, "width": crop},
        do_center_crop=True,
        resample=INTERPOLATIONS[interpolation],
        image_mean=mean,
        image_std=std,
    )
