"""Images for calibration: one set determines the ranges of int8, the other measures its effect."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from ..configuration_plain_vit import PlainViTConfig
from ..errors import DataError, listed
from ..files.images import read_image

MOST = 512  # images: more take minutes and do not change the ranges
BATCH = 8


@dataclass(frozen=True)
class ImageBatches:
    """Batches of processed images, decoded when they are read.

    Args:
        paths: The image files.
        image_processor: The processor.
    """

    paths: Sequence[Path]
    image_processor: Any

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), BATCH):
            images = [read_image(path) for path in self.paths[start : start + BATCH]]
            yield self.image_processor(images, return_tensors="np")["pixel_values"].astype(np.float32)


@dataclass(frozen=True)
class ImageSets:
    """Two sets of images: one to set ranges, one to measure.

    Args:
        setting: Images that set the ranges.
        compared: Images on which the graph is compared with the model.
        labels: Classes of the compared images; None without labels.
    """

    setting: ImageBatches
    compared: ImageBatches
    labels: Sequence[int] | None


def image_sets(folder: str | PathLike[str], image_processor: Any, config: PlainViTConfig) -> ImageSets:
    """Divide the images of a folder and its subfolders: every second one sets the ranges.

    Args:
        folder: The folder. At most 512 images are used, evenly spread over the sorted paths.
        image_processor: The processor of the model.
        config: Config of the model. If one subfolder is named after a label, all must be.

    Raises:
        DataError: There are fewer than two images, or only some of the subfolders are labels.
    """
    Image.preinit()  # the common formats are tried first
    suffixes = set(Image.registered_extensions())
    root = Path(folder)
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if len(paths) < 2:
        raise DataError(f"{folder} has {len(paths)} image files, and a calibration needs two: give a folder of images")
    if len(paths) > MOST:
        paths = [paths[round(place)] for place in np.linspace(0, len(paths) - 1, MOST)]
    setting, compared = paths[0::2], paths[1::2]
    labels = labels_of(root, paths, cast(dict[str, int], config.label2id))
    batches = ImageBatches(setting, image_processor), ImageBatches(compared, image_processor)
    return ImageSets(*batches, None if labels is None else labels[1::2])


def labels_of(root: Path, paths: Sequence[Path], label2id: Mapping[str, int]) -> list[int] | None:
    """Return the class of each image by the name of its folder; None if no folder is named after a label.

    Raises:
        DataError: Only some folders are named after labels.
    """
    names = [path.relative_to(root).parts[0] if path.parent != root else "" for path in paths]
    unknown = sorted({name for name in names if name not in label2id})
    if not unknown:
        return [label2id[name] for name in names]
    if len(unknown) < len(set(names)):
        raise DataError(
            f"{root} has folders that are not labels of the model, {listed(unknown)}, beside folders that are: rename "
            "or remove them, or put all images into one folder"
        )
    return None
