"""The transforms that torchvision publishes with its weights as image processors."""

from ....image_processing_plain_vit import PlainViTImageProcessor
from ...tables.pixels import IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS
from .architectures import FILES


def processor_from_torchvision(file: str) -> PlainViTImageProcessor:
    """Prepare the same pixels as the transform that torchvision publishes with a file, such as "vit_b_16-c867db91"."""
    resize, crop, interpolation = FILES[file]
    return PlainViTImageProcessor(
        size={"shortest_edge": resize},
        crop_size={"height": crop, "width": crop},
        do_center_crop=True,
        resample=INTERPOLATIONS[interpolation],
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_STD,
    )
