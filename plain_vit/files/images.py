"""Opening and decoding image files with Pillow: limits on size, EXIF orientation, and damaged files."""

import errno
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import PIL.ExifTags
import PIL.Image
import PIL.ImageOps

from ..errors import DataError

# The errors of an unreadable image, if it was opened and decoded within `decoding`.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, PIL.Image.DecompressionBombError)
MOST_PIXELS = 50_000_000  # as many as current cameras have; decoded to RGB, 0.2 to 0.7 GB, depending on the format
MOST_SIDE = 65_535  # pixels, the limit of JPEG
MOST_BYTES = 190_000_000  # of a decoded image and its conversion to RGB
BYTES_PER_PIXEL = {"RGB": 4, "1": 5, "L": 5, "P": 5}  # as Pillow stores them, plus 4 for the RGB copy
MOST_BYTES_PER_PIXEL = 8  # for every other mode, and while an image is rotated
REDUCTIONS = (2, 4, 8)  # factors by which libjpeg can decode at a lower resolution
LACKING = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # the computer's fault, not a file's


@contextmanager
def decoding() -> Iterator[None]:
    """Convert any error of Pillow's decoders to one of `UNREADABLE`: a damaged file can raise any type of error.

    Pillow's warnings are hidden: a damaged TIFF file can cause one for each of up to 65,535 tags.

    Raises:
        MemoryError: There is not enough memory; the file may be intact.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")
            yield
    except (*UNREADABLE, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{type(error).__name__}: {error}") from error


def open_image(
    source: str | Path | BinaryIO, *, formats: tuple[str, ...] | None = None, most_pixels: int | None = MOST_PIXELS
) -> PIL.Image.Image:
    """Open an image of bounded size, without decoding its pixels.

    Args:
        source: A path, or a file.
        formats: Allowed formats, by Pillow's names (default: any).
        most_pixels: Maximum of height times width; None if the caller decodes larger images at a lower resolution.

    Raises:
        OSError: The image cannot be read; also the other errors in `UNREADABLE`, and a ValueError if it is too large.
    """
    with decoding():
        opened = PIL.Image.open(source, formats=formats)
    most = opened.width * opened.height if most_pixels is None else most_pixels
    if max(opened.size) > MOST_SIDE or opened.width * opened.height > most:
        opened.close()
        raise ValueError(
            f"it has {opened.width} x {opened.height} pixels; expected at most {most:,}, and {MOST_SIDE:,} a side: "
            "make a smaller copy"
        )
    return opened


def reason(error: Exception) -> str:
    """Return why an image cannot be read.

    Args:
        error: One of `UNREADABLE`.

    Raises:
        OSError: The file is not the cause, for example if the disk is full.
    """
    if isinstance(error, OSError) and error.errno in LACKING:
        raise error
    return "not an image of a known format" if isinstance(error, PIL.UnidentifiedImageError) else str(error)


def orientation(image: PIL.Image.Image) -> int:
    """Return the EXIF orientation of an opened image: 1 to 8, with height and width swapped from 5 on; 1 by default."""
    with decoding():
        turned = image.getexif().get(PIL.ExifTags.Base.Orientation, 1)
    return int(turned) if turned in range(1, 9) else 1


def upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """Decode an opened image and apply its orientation."""
    with decoding():
        image.load()
        return image if orientation(image) == 1 else PIL.ImageOps.exif_transpose(image)


def read_image(image: str | Path | PIL.Image.Image) -> PIL.Image.Image:
    """Open and decode an image, upright; a JPEG file of more than `MOST_BYTES` is decoded at a lower resolution.

    Args:
        image: A path, or an opened image, which is returned unchanged.

    Raises:
        DataError: The file cannot be read as an image, or is too large to decode.
    """
    if isinstance(image, PIL.Image.Image):
        return image
    with open_bounded(image) as opened:
        try:
            return upright(opened)
        except UNREADABLE as error:
            raise DataError(f"{image} cannot be read as an image: {reason(error)}") from error


def open_bounded(path: str | Path) -> PIL.Image.Image:
    """Read the header of an image file, and set the resolution for decoding.

    Raises:
        DataError: As for `read_image`.
    """
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
