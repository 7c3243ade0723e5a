"""Removal of image metadata: texts, locations, cameras, thumbnails, trailing data.

The parts of a file that store pixels are copied byte for byte, and the orientation is kept. Both versions are decoded
and compared.
"""

import struct
import warnings
import zlib
from io import BytesIO

from PIL import Image

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
# Chunks that affect the pixels or their appearance; they contain only numbers.
PNG_CHUNKS = {
    b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"sBIT", b"bKGD", b"pHYs", b"cICP",
    b"acTL", b"fcTL", b"fdAT",
}  # fmt: skip
APP0, APP1, APP14, COMMENT, START_OF_SCAN, END_OF_IMAGE = 0xE0, 0xE1, 0xEE, 0xFE, 0xDA, 0xD9
ALONE = {0x01, *range(0xD0, 0xD8)}  # markers without a length
ORIENTATION = 0x0112


class NotAPicture(ValueError):
    """The bytes are not a complete PNG or JPEG file."""


def without_metadata(data: bytes) -> bytes:
    """Return a PNG or JPEG file without its metadata.

    Args:
        data: Contents of the file.

    Raises:
        NotAPicture: It cannot be decoded, or its pixels would change.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            pixels, turned = _decoded(data)
            clean = _png(data, turned) if data.startswith(PNG) else _jpeg(data, turned)
            if _decoded(clean) != (pixels, turned):
                raise NotAPicture("its pixels would change without its metadata")
    except NotAPicture:
        raise
    except Exception as error:  # Pillow raises many types of errors for damaged files
        raise NotAPicture(f"it cannot be decoded ({type(error).__name__}: {error})") from error
    return clean


def _decoded(data: bytes) -> tuple[list[tuple[object, ...]], int]:
    """Return mode, size, pixels and palette of each frame, and the orientation."""
    frames: list[tuple[object, ...]] = []
    with Image.open(BytesIO(data), formats=("PNG", "JPEG")) as image:
        turned = image.getexif().get(ORIENTATION, 1)
        for number in range(getattr(image, "n_frames", 1) if image.format == "PNG" else 1):
            image.seek(number)
            frames.append((image.mode, image.size, image.tobytes(), image.getpalette()))
    return frames, turned if turned in range(2, 9) else 1


def _exif(turned: int) -> bytes:
    """Return an Exif block with only the orientation."""
    return b"MM\0*\0\0\0\x08" + struct.pack(">HHHIHHI", 1, ORIENTATION, 3, 1, turned, 0, 0)


def _png(data: bytes, turned: int) -> bytes:
    parts, place = [PNG], len(PNG)
    while True:
        length, name = struct.unpack(">I4s", data[place : place + 8])
        content = data[place + 8 : place + 8 + length]
        if len(content) != length:
            raise NotAPicture("it is truncated")
        if name in PNG_CHUNKS:
            parts.append(_chunk(name, content))
        if name == b"IHDR" and turned != 1:
            parts.append(_chunk(b"eXIf", _exif(turned)))
        if name == b"IEND":
            return b"".join(parts)
        place += length + 12


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _jpeg(data: bytes, turned: int) -> bytes:
    parts, place = [JPEG], len(JPEG)
    if turned != 1:
        block = b"Exif\0\0" + _exif(turned)
        parts.append(b"\xff" + bytes([APP1]) + struct.pack(">H", len(block) + 2) + block)
    while True:
        while data[place : place + 2] == b"\xff\xff":  # fill bytes
            place += 1
        if data[place : place + 1] != b"\xff" or place + 2 > len(data):
            raise NotAPicture("it is truncated or damaged")
        marker = data[place + 1]
        if marker == END_OF_IMAGE:
            return b"".join([*parts, data[place : place + 2]])
        if marker in ALONE:
            parts.append(data[place : place + 2])
            place += 2
            continue
        length = struct.unpack(">H", data[place + 2 : place + 4])[0]
        end = place + 2 + length
        if marker == START_OF_SCAN:
            end = _end_of_scan(data, end)
        if marker == APP0 and data[place + 4 : place + 9] == b"JFIF\0":  # without its thumbnail
            parts.append(b"\xff\xe0" + struct.pack(">H", 16) + data[place + 4 : place + 16] + b"\0\0")
        elif marker == APP14 and data[place + 4 : place + 9] == b"Adobe":  # the colour transform
            parts.append(b"\xff\xee" + struct.pack(">H", 14) + data[place + 4 : place + 16])
        elif not (APP0 <= marker <= 0xEF or marker == COMMENT):
            parts.append(data[place:end])
        place = end


def _end_of_scan(data: bytes, place: int) -> int:
    """Return the offset of the first marker after the scan; 0xff 0x00 is an escaped byte, restarts are part of it."""
    while True:
        place = data.find(b"\xff", place)
        if place < 0 or place + 1 >= len(data):
            raise NotAPicture("it is truncated")
        if data[place + 1] != 0 and data[place + 1] not in ALONE and data[place + 1] != 0xFF:
            return place
        place += 1 if data[place + 1] == 0xFF else 2
