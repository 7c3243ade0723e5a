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
