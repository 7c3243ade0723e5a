"""Write thumbnails of many images, a hundred per file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image

from ..files.images import UNREADABLE, decoding, open_image
from ..training.data.decoding import decode_image, name_broken

TILE, COLUMNS = 96, 10  # side in pixels; thumbnails per row and rows per file
PER_FILE = COLUMNS * COLUMNS
QUALITY = 75
MOST_PIXELS = 2**26  # of an image that must be decoded at full resolution

Stored = Mapping[str, Any]
Shown = Callable[[Sequence[int]], Iterable[int]]


def thumbnail(stored: Stored | None) -> PIL.Image.Image:
    """Return an upright RGB image of at most `TILE` pixels a side; small images are enlarged by an integer factor.

    Args:
        stored: The image's `bytes`, or the `path` of its file.

    Raises:
        OSError: The image cannot be read; also the other errors in `UNREADABLE`.
    """
    if stored is None or (stored["bytes"] is None and stored["path"] is None):
        raise ValueError("there is none")
    if stored["bytes"] is None and not Path(stored["path"]).is_file():  # opening a pipe would wait for its writer
        raise ValueError("there is no such file")
    content = stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])
    with decoding(), open_image(content, most_pixels=None) as opened:
        opened.draft("RGB", (2 * TILE, 2 * TILE))  # JPEG files are decoded at a fraction of their size
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError(f"{opened.width} x {opened.height} pixels are more than {MOST_PIXELS}")
        small = decode_image(opened)
    small.thumbnail((TILE, TILE), reducing_gap=2.0)
    if (factor := TILE // max(small.size)) > 1:
        size = (small.width * factor, small.height * factor)
        small = small.resize(size, PIL.Image.Resampling.NEAREST)
    return small


def _try_thumbnail(stored: Stored | None, place: str) -> tuple[PIL.Image.Image | None, str]:
    try:
        return thumbnail(stored), ""
    except UNREADABLE as error:
        return None, name_broken(dict(stored or {}), place, error)


def write_thumbnails(
    count: int, stored_of: Callable[[int], Stored | None], folder: Path, shown: Shown
) -> tuple[list[str], dict[int, str]]:
    """Write the thumbnails of images in order, `PER_FILE` per WebP file.

    Args:
        count: Number of images.
        stored_of: Returns the image with this number, as for `thumbnail`.
        folder: Folder for the files.
        shown: Wraps the start indices of the files to show progress.

    Returns:
        Names of the files, and the reason why an image cannot be read, by its number.
    """
    names: list[str] = []
    broken: dict[int, str] = {}
    with ThreadPoolExecutor() as pool:
        for first in shown(range(0, count, PER_FILE)):
            numbers = range(first, min(first + PER_FILE, count))
            stored = [stored_of(number) for number in numbers]
            places = [f"image {number}" for number in numbers]
            tiles = list(pool.map(_try_thumbnail, stored, places))
            broken |= {number: why for number, (_, why) in zip(numbers, tiles, strict=True) if why}
            rows = -(-len(tiles) // COLUMNS)
            sheet = PIL.Image.new("RGBA", (COLUMNS * TILE, rows * TILE))
            for place, (tile, _) in enumerate(tiles):
                if tile is not None:
                    left = place % COLUMNS * TILE + (TILE - tile.width) // 2
                    sheet.paste(tile, (left, place // COLUMNS * TILE + (TILE - tile.height) // 2))
            names.append(f"thumbnails-{first // PER_FILE:04d}.webp")
            sheet.save(folder / names[-1], quality=QUALITY)
    return names, broken
