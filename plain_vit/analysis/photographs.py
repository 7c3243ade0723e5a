"""Read image files one at a time, with bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..errors import DataError
from ..files.images import UNREADABLE, open_image, orientation, reason, upright

MOST_BYTES = 190_000_000  # of a decoded image and its conversion to RGB
BYTES_PER_PIXEL = {"RGB": 4, "1": 5, "L": 5, "P": 5}  # as Pillow stores them, plus 4 for the RGB copy
MOST_BYTES_PER_PIXEL = 8  # for every other mode, and while an image is rotated
REDUCTIONS = (2, 4, 8)  # factors by which libjpeg can decode at a lower resolution


@dataclass(frozen=True)
class ImageFiles:
    """Images that are read on access and not kept in memory.

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
    """Open and decode an image, upright; a JPEG file of more than `MOST_BYTES` is decoded at a lower resolution.

    Args:
        image: A path, or an opened image, which is returned unchanged.

    Raises:
        DataError: The file cannot be read as an image, or is too large to decode.
    """
    if isinstance(image, Image.Image):
        return image
    with _opened(image) as opened:
        try:
            return upright(opened)
        except UNREADABLE as error:
            raise DataError(f"{image} cannot be read as an image: {reason(error)}") from error


def _opened(path: str | Path) -> Image.Image:
    """Read the header of an image file, and set the resolution for decoding."""
    if Path(path).exists() and not Path(path).is_file():
        raise DataError(f"{path} is a folder, a pipe or a device: give an image file")
    try:
        opened = open_image(path, most_pixels=None)  # this function checks the number of pixels
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read as an image: {reason(error)}") from error
    width, height = opened.size
    is_progressive = bool(opened.info.get("progressive"))  # libjpeg keeps all its coefficients in memory
    is_turned = "exif" in opened.info and orientation(opened) > 1  # copied; Pillow decodes a PNG to find more EXIF
    per_pixel = BYTES_PER_PIXEL.get(opened.mode, MOST_BYTES_PER_PIXEL)
    per_pixel = MOST_BYTES_PER_PIXEL if is_progressive or is_turned else per_pixel
    most_pixels = MOST_BYTES // per_pixel
    if width * height > most_pixels and not is_progressive:
        fitting = (by for by in REDUCTIONS if -(-width // by) * -(-height // by) <= most_pixels)
        by = next(fitting, REDUCTIONS[-1])
        opened.draft(None, (width // by, height // by))
    if opened.width * opened.height > most_pixels:
        opened.close()
        raise DataError(
            f"{path} has {width} x {height} pixels, but at most {most_pixels:,} of mode {opened.mode} are decoded "
            "(most JPEG files can be decoded at a lower resolution): make a smaller copy"
        )
    return opened
