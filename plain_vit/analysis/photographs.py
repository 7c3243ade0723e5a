"""Image files, opened one at a time and of bounded size."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from plain_vit.errors import DataError

MOST_PIXELS = 50_000_000  # largest decoded image: 200 MB
REDUCTIONS = (2, 4, 8)  # at which libjpeg can decode


@dataclass(frozen=True)
class ImageFiles:
    """Images that are read on access; none is kept in memory.

    Args:
        images: Paths or opened images.
    """

    images: Sequence[str | Path | Image.Image]

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Image.Image]:
        return map(read_image, self.images)

    def first(self, count: int) -> "ImageFiles":
        """Return the first images."""
        return ImageFiles(self.images[:count])

    def check(self) -> None:
        """Read the headers of all files.

        Raises:
            DataError: A file cannot be read as an image, or is too large to decode.
        """
        for image in self.images:
            if not isinstance(image, Image.Image):
                with _opened(image):
                    pass


def read_image(image: str | Path | Image.Image) -> Image.Image:
    """Open and decode an image; a JPEG file of more than `MOST_PIXELS` is decoded at a lower resolution.

    Args:
        image: A path, or an opened image, which is returned unchanged.

    Raises:
        DataError: The file cannot be read as an image, or is too large to decode.
    """
    if isinstance(image, Image.Image):
        return image
    with _opened(image) as opened:
        try:
            opened.load()
        except (OSError, ValueError, SyntaxError, MemoryError) as error:  # what Pillow raises
            raise DataError(f"{image} cannot be read as an image: {error}") from error
    return opened


def _opened(path: str | Path) -> Image.Image:
    """Read the header of an image file, and set the resolution for decoding."""
    if Path(path).exists() and not Path(path).is_file():
        raise DataError(f"{path} is a folder, a pipe or a device: give an image file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked here
            opened = Image.open(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    width, height = opened.size
    if width * height > MOST_PIXELS and not opened.info.get(
        "progressive"
    ):  # libjpeg holds progressive files whole anyway
        fitting = (by for by in REDUCTIONS if -(-width // by) * -(-height // by) <= MOST_PIXELS)
        by = next(fitting, REDUCTIONS[-1])
        opened.draft(None, (width // by, height // by))
    if opened.width * opened.height > MOST_PIXELS:
        opened.close()
        raise DataError(
            f"{path} has {width} x {height} pixels, but at most {MOST_PIXELS:,} pixels are decoded (most JPEG files "
            "can be decoded at a lower resolution): make a smaller copy"
        )
    return opened
