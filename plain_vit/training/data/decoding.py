"""Decoding of stored images, handling of unreadable ones, and collation with an image processor.

Legend: `B` batch, `C` channels, `H W` pixels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import torch

from ...errors import DataError
from ...files.images import UNREADABLE, decoding, open_image, reason, upright
from ...image_processing_plain_vit import DEEP_MODES, PlainViTImageProcessor, PlainViTImageProcessorPil
from ...system.extras import needs
from .inputs import model_inputs

with needs("plain-vit[train]"):
    import fsspec
    from accelerate import Accelerator
    from datasets import Dataset, Image


def as_files(split: Dataset) -> Dataset:
    """Return a split with undecoded image files, for `open_stored`.

    The format is reset: a cast of labels stores all column names in it, and flattening the split would keep them.
    """
    return split.with_format(None).cast_column("image", Image(decode=False))


def open_stored(stored: dict[str, Any] | None) -> PIL.Image.Image:
    """Open a stored image without decoding its pixels.

    Args:
        stored: the `bytes` of the image, or the `path` of its file.

    Raises:
        OSError: The image cannot be read; also raised for this: the other errors in `UNREADABLE`.
    """
    return open_image(BytesIO(stored_bytes(stored)))


def stored_bytes(stored: dict[str, Any] | None) -> bytes:
    """Return the content of a stored image's file.

    Raises:
        OSError: The file cannot be read.
        ValueError: There is no image.
    """
    if stored is None:
        raise ValueError("there is none")
    content: bytes | None = stored["bytes"]
    if content is not None:
        return content
    if "://" not in stored["path"]:
        return Path(stored["path"]).read_bytes()
    with fsspec.open(stored["path"]) as file:
        return bytes(file.read())


def decode_image(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an opened image in upright orientation and RGB, as `datasets` decodes it.

    Raises:
        OSError: The image cannot be read without loss; also raised for this: the other errors in `UNREADABLE`.
    """
    return in_rgb(upright(image))


def in_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Convert an image to RGB if necessary.

    Raises:
        ValueError: The single channel has more than 8 bits; the image processor refuses such images too.
    """
    if image.mode in DEEP_MODES:
        raise ValueError(
            f"its mode is {image.mode}, more than 8 bits per channel: converting it to RGB would clip every value "
            "above 255 to white; scale it to 8 bits first"
        )
    with decoding():
        return image if image.mode == "RGB" else image.convert("RGB")


def try_image(
    stored: dict[str, Any] | None, place: str, decode: Callable[[PIL.Image.Image], Any] = decode_image
) -> tuple[Any, str]:
    """Return the result of `decode` and "", or None and a text that says which image cannot be read and why.

    Args:
        stored: see `open_stored`.
        place: description of an image that is not a file.
        decode: function of the opened image.
    """
    try:
        return decode(open_stored(stored)), ""
    except UNREADABLE as error:
        return None, name_broken(stored, place, error)


def read_rows(files: Dataset, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows with decoded images, their `row` and `place`, and `broken`: why an image cannot be read, or "".

    Args:
        files: from `as_files`.
        rows: numbers of the rows.
    """
    examples = stored_rows(files, rows)
    for row, example in zip(rows, examples, strict=True):
        example["row"], example["place"] = row, (example["image"] or {}).get("path") or f"row {row}"
        image, example["broken"] = try_image(example["image"], f"row {row}")
        example["image"] = BLANK if image is None else image
    return examples


def stored_rows(files: Dataset, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Read several stored rows at once."""
    columns = files[list(rows)]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def name_broken(stored: dict[str, Any] | None, place: str, error: Exception) -> str:
    """Describe an unreadable image and the reason; name it by its file if there is one, otherwise by its place.

    Raises:
        OSError: The error is not the image's fault, see `reason`.
    """
    return f"{(stored or {}).get('path') or place} ({reason(error)})"


BLANK = PIL.Image.new("RGB", (1, 1))


class ReadableImages(torch.utils.data.Dataset):
    """The rows of a split, with `broken` set for unreadable images.

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
    """Check batches for unreadable images.

    Args:
        stop: stop at the first one; otherwise count them, and report each once.
        say: prints a line.
        advice: what to do about the image, for the error.
        count: number so far, in a resumed run.
    """

    def __init__(self, *, stop: bool, say: Callable[[str], object], advice: str, count: int = 0) -> None:
        self.stop, self.say, self.advice, self.count = stop, say, advice, count
        self.named: set[str] = set()

    def watch(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield batches.

        Raises:
            DataError: An image cannot be read, and `stop` is set.
        """
        for batch in batches:
            for broken in filter(None, batch.pop("broken", ())):
                if self.stop:
                    raise DataError(f"An image cannot be read: {broken}. {self.advice}")
                self.count += 1
                if broken not in self.named:
                    self.named.add(broken)
                    self.say(f"skipped an image that cannot be read: {broken}")
            yield batch

    def count_everywhere(self, accelerator: Accelerator) -> int:
        """Return the number of unreadable images over all processes."""
        return int(accelerator.reduce(torch.tensor(self.count, device=accelerator.device)))


class ProcessedImages:
    """Collate function with the model's own image processor, as users of the saved model apply it.

    An image that the processor refuses on its own, such as a very elongated one, is `broken` like an unreadable one.

    Args:
        image_processor: the model's image processor.
    """

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the model's inputs and `labels` [B], and `broken` if the examples have it."""
        try:
            processed = self._processed(examples)
        except UNREADABLE:
            examples = [self.checked(example) for example in examples]
            # Use another image of the batch, as a one-pixel image may be processed to a different size.
            stand_in = next((example["image"] for example in examples if not example.get("broken")), BLANK)
            examples = [{**example, "image": stand_in} if example.get("broken") else example for example in examples]
            processed = self._processed(examples)  # raises again if the images only do not fit together
        labels = torch.tensor([example["label"] for example in examples])
        batch: dict[str, Any] = {**model_inputs(processed), "labels": labels}
        if "broken" in examples[0]:
            batch["broken"] = [example["broken"] for example in examples]
        return batch

    def _processed(self, examples: Sequence[dict[str, Any]]) -> Any:
        with decoding():  # image processors may raise any error for an odd image
            return self.image_processor([example["image"] for example in examples], return_tensors="pt")

    def checked(self, example: dict[str, Any]) -> dict[str, Any]:
        """Return an example, marked `broken` if the image processor refuses its image."""
        if example.get("broken"):
            return example
        try:
            self._processed([example])
        except UNREADABLE as error:
            if "place" not in example:
                raise
            return {**example, "image": BLANK, "broken": f"{example['place']} ({reason(error)})"}
        return example


class RefusedImages:
    """Find the images of a split that cannot be read or that the image processor refuses on their own.

    This package's processors refuse RGB images only for their size, so they get one image per size; others get all.

    Args:
        image_processor: the model's image processor.
    """

    def __init__(self, image_processor: Any) -> None:
        self.collate, self.accepted = ProcessedImages(image_processor), set[tuple[int, int]]()
        self.by_size = type(image_processor) in (PlainViTImageProcessor, PlainViTImageProcessorPil)

    def problems(self, split: Dataset) -> dict[int, str]:
        """Return the problem of each such image, by row."""
        files = as_files(split)
        return {row: problem for row in range(len(files)) if (problem := self._problem(*read_rows(files, [row])))}

    def _problem(self, example: dict[str, Any]) -> str:
        size = example["image"].size
        broken = str((example if size in self.accepted else self.collate.checked(example))["broken"])
        if self.by_size and not broken:
            self.accepted.add(size)
        return broken
