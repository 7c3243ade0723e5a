"""Stored images: opening, decoding and naming those that cannot be read; batches as an image processor makes them.

Legend: `B` batch, `C` channels, `H W` pixels.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.ExifTags
import PIL.Image
import PIL.ImageOps
import torch

from ...errors import DataError
from ...extras import needs

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from datasets import Dataset, Image


# What Pillow and datasets raise for a file that is no image, or only a part of one.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, PIL.Image.DecompressionBombError)


def as_files(split: Dataset) -> Dataset:
    """Return a split whose images are the files they are, to be opened by `open_stored`."""
    return split.cast_column("image", Image(decode=False))


def open_stored(stored: dict[str, Any] | None) -> PIL.Image.Image:
    """Return an image of which no more was read than what it is: its pixels are not decoded yet.

    Args:
        stored: its `bytes`, or the `path` of its file.

    Raises:
        OSError: It cannot be read. The others of `UNREADABLE` say the same.
    """
    if stored is None:
        raise ValueError("there is none")
    content = stored["bytes"] if stored["bytes"] is not None else Path(stored["path"]).read_bytes()
    return PIL.Image.open(BytesIO(content))


def decode_image(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an opened image upright and in RGB, as `datasets` decodes it.

    Raises:
        OSError: It cannot be read. The others of `UNREADABLE` say the same.
    """
    return in_rgb(upright(image))


def orientation(image: PIL.Image.Image) -> int:
    """Return how an opened image is to be turned: 1 to 8 as in EXIF, from 5 on with its sides exchanged."""
    return image.getexif().get(PIL.ExifTags.Base.Orientation, 1)


def upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """Decode an opened image and turn it as it says."""
    image.load()
    return image if orientation(image) == 1 else PIL.ImageOps.exif_transpose(image)


def in_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an image in RGB, itself where it is."""
    return image if image.mode == "RGB" else image.convert("RGB")


def try_image(
    stored: dict[str, Any] | None, place: str, decode: Callable[[PIL.Image.Image], Any] = decode_image
) -> tuple[Any, str]:
    """Return what `decode` makes of an image, and "" or which image cannot be read and why.

    Args:
        stored: see `open_stored`.
        place: of an image that is no file.
        decode: given the opened image.
    """
    try:
        return decode(open_stored(stored)), ""
    except UNREADABLE as error:
        return None, name_broken(stored, place, error)


def read_rows(files: Dataset, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows with their images, and `broken`: empty, or which image cannot be read and why.

    Args:
        files: from `as_files`.
        rows: their numbers.
    """
    examples = stored_rows(files, rows)
    for row, example in zip(rows, examples, strict=True):
        image, example["broken"] = try_image(example["image"], f"row {row}")
        example["image"] = BLANK if image is None else image
    return examples


def stored_rows(files: Dataset, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows as they are stored, read at once."""
    columns = files[list(rows)]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def name_broken(stored: dict[str, Any] | None, place: str, error: Exception) -> str:
    """Say which image cannot be read: its file where there is one, else its place."""
    reason = "no image of a known format" if isinstance(error, PIL.UnidentifiedImageError) else str(error)
    return f"{(stored or {}).get('path') or place} ({reason})"


BLANK = PIL.Image.new("RGB", (1, 1))


class ReadableImages(torch.utils.data.Dataset):
    """The rows of a split, with `broken` where an image cannot be read.

    Args:
        split: rows with an `image` and a `label`.
    """

    def __init__(self, split: Dataset) -> None:
        self.files = as_files(split)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return read_rows(self.files, rows)


class UnreadableImages:
    """Watches over batches for images that could not be read.

    Args:
        stop: end at the first one; else they are counted, and named once.
        say: prints a line.
        count: how many there were when the run was stopped.
    """

    def __init__(self, *, stop: bool, say: Callable[[str], object], count: int = 0) -> None:
        self.stop, self.say, self.count = stop, say, count
        self.named: set[str] = set()

    def watch(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Pass batches on.

        Raises:
            DataError: An image cannot be read, and `stop` was asked for.
        """
        for batch in batches:
            for broken in filter(None, batch.pop("broken", ())):
                if self.stop:
                    raise DataError(f"An image cannot be read: {broken}. Mend it, or train with --corrupted skip.")
                self.count += 1
                if broken not in self.named:
                    self.named.add(broken)
                    self.say(f"skipped an image that cannot be read: {broken}")
            yield batch

    def count_everywhere(self, accelerator: Accelerator) -> int:
        """Return how many there were in all processes, in the training and in what is evaluated."""
        return int(accelerator.reduce(torch.tensor(self.count, device=accelerator.device)))


class ProcessedImages:
    """Make a batch of a model's own image processor, exactly as users of the saved model will.

    Args:
        image_processor: the model's, of transformers.
    """

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return `pixel_values` [B, C, H, W] and `labels` [B]; and which are `broken`, where that is known."""
        pixels = self.image_processor([example["image"] for example in examples], return_tensors="pt")["pixel_values"]
        batch = {"pixel_values": pixels, "labels": torch.tensor([example["label"] for example in examples])}
        if "broken" in examples[0]:
            batch["broken"] = [example["broken"] for example in examples]
        return batch
