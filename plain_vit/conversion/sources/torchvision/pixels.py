"""Image processors for the transforms that torchvision publishes with its weights."""

from ....image_processing_plain_vit import PlainViTImageProcessor
from ...tables.data_files import data_file
from ...tables.pixels import IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS


def published_files() -> dict[str, tuple[int, int, str]]:
    """Return the resize of the shorter side, centre crop and interpolation of each published file."""
    return data_file("torchvision/architectures.json")["files"]


def processor_from_torchvision(file: str) -> PlainViTImageProcessor:
    """Return a processor with the same pixels as the transform of a published file, such as "vit_b_16-c867db91"."""
    resize, crop, interpolation = published_files()[file]
    return PlainViTImageProcessor(
        size={"shortest_edge": resize},
        crop_size={"height": crop, "width": crop},
        do_center_crop=True,
        resample=INTERPOLATIONS[interpolation],
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_STD,
    )
