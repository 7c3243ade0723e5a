"""Decoding of image files with Pillow, as training, analysis and calibration do it: their orientation and damage."""

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import PIL.ExifTags
import PIL.Image
import PIL.ImageOps

from .errors import DataError

# What says that an image cannot be read, if its file was opened and decoded within `decoding`.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, PIL.Image.DecompressionBombError)
LACKING = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # of the computer, not of a file


@contextmanager
def decoding() -> Iterator[None]:
    """Raise one of `UNREADABLE` for whatever a decoder of Pillow raises: some raise any error for a damaged file.

    Raises:
        MemoryError: The memory does not suffice, which says nothing about the file.
    """
    try:
        yield
    except (*UNREADABLE, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{type(error).__name__}: {error}") from error


def reason(error: Exception) -> str:
    """Return why an image cannot be read.

    Args:
        error: One of `UNREADABLE`.

    Raises:
        OSError: The error is not the file's, such as of a full disk.
    """
    if isinstance(error, OSError) and error.errno in LACKING:
        raise error
    return "not an image of a known format" if isinstance(error, PIL.UnidentifiedImageError) else str(error)


def orientation(image: PIL.Image.Image) -> int:
    """Return the EXIF orientation of an opened image: 1 to 8, from 5 on with exchanged sides; 1 if it is none."""
    with decoding():
        turned = image.getexif().get(PIL.ExifTags.Base.Orientation, 1)
    return int(turned) if turned in range(1, 9) else 1


def upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """Decode an opened image and apply its orientation."""
    with decoding():
        image.load()
        return image if orientation(image) == 1 else PIL.ImageOps.exif_transpose(image)
