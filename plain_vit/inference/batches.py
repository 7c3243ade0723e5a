"""Batches of images, read, decoded and processed in threads."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import torch

from ..files.images import UNREADABLE, decoding, reason
from ..training.data.decoding import decode_image, open_stored

LISTS = ("rows", "paths", "names", "broken")  # of a batch
THREADS, PIECES = "read-images", 4  # names of threads, and pieces of a batch per thread: some images take longer


def read_batch(image_processor: Any, stored: Mapping[int, Any], of_part: str = "") -> dict[str, Any]:
    """Decode and process images in threads; leave out unreadable images and name them.

    Args:
        image_processor: The model's image processor.
        stored: The images by row, in any form that `opened` takes.
        of_part: Follows the number of a row in the name of an image that is no file.

    Returns:
        The lists of `LISTS`, and the `inputs` of the model, or None if no image can be read.
    """
    read = partial(_read, image_processor=image_processor, of_part=of_part)
    items = [*stored.items()]
    pieces = in_threads(read, items)
    inputs = [piece["inputs"] for piece in pieces if piece["inputs"] is not None]
    if len({each["pixel_values"].shape[1:] for each in inputs}) > 1:
        return read(items)  # the image processor pads to the largest of a batch, or refuses unequal images
    joined = {name: [each for piece in pieces for each in piece[name]] for name in LISTS}
    together = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]} if inputs else None
    return joined | {"inputs": together}


def _read(piece: Sequence[tuple[int, Any]], image_processor: Any, of_part: str) -> dict[str, Any]:
    stored = dict(piece)
    images: dict[int, PIL.Image.Image] = {}
    broken: dict[int, Exception] = {}
    for number, file in stored.items():
        try:
            images[number] = decode_image(opened(file))
        except UNREADABLE as error:
            broken[number] = error
    try:
        inputs = _inputs(image_processor, images)
    except UNREADABLE:
        refused = _refused(image_processor, images)
        if not refused:  # each alone is fine, but they do not fit together
            raise
        broken |= refused
        images = {number: image for number, image in images.items() if number not in refused}
        inputs = _inputs(image_processor, images)
    names = {number: path_of(file) or f"row {number}{of_part}" for number, file in stored.items()}
    return {
        "rows": [*images],
        "paths": [path_of(stored[number]) for number in images],
        "names": [names[number] for number in images],
        "inputs": inputs,
        "broken": [f"{names[number]} ({reason(broken[number])})" for number in sorted(broken)],
    }


def opened(stored: Any) -> PIL.Image.Image:
    """Open a stored image in any form: an image, an array, the bytes or the path of a file, or a dict of the last two.

    Raises:
        OSError: The image cannot be read; also the other errors in `UNREADABLE`.
    """
    if isinstance(stored, PIL.Image.Image):
        return stored
    if isinstance(stored, np.ndarray):
        if stored.dtype != np.uint8 or not (stored.ndim == 2 or (stored.ndim == 3 and stored.shape[2] in (3, 4))):
            raise ValueError(f"its shape is {stored.shape}, of {stored.dtype}: expected (H, W) or (H, W, 3), of uint8")
        return PIL.Image.fromarray(stored)
    if isinstance(stored, bytes | bytearray | memoryview):
        return open_stored({"bytes": bytes(stored), "path": None})
    if isinstance(stored, str | os.PathLike):
        return open_stored({"bytes": None, "path": os.fspath(stored)})
    if stored is not None and not (isinstance(stored, Mapping) and stored.keys() & {"bytes", "path"}):
        raise ValueError(f"it is a {type(stored).__name__}: expected an image, an array, bytes or a path")
    return open_stored(None if stored is None else {"bytes": stored.get("bytes"), "path": stored.get("path")})


def path_of(stored: Any) -> str | None:
    """Return the path of a stored image, if it has one."""
    if isinstance(stored, Mapping):
        return stored.get("path")
    if isinstance(stored, str | os.PathLike):
        return os.fspath(stored)
    return getattr(stored, "filename", None) or None


def _inputs(image_processor: Any, images: Mapping[int, PIL.Image.Image]) -> dict[str, torch.Tensor] | None:
    with decoding():  # image processors, too, raise any error for an odd image
        return dict(image_processor([*images.values()], return_tensors="pt")) if images else None


def _refused(image_processor: Any, images: Mapping[int, PIL.Image.Image]) -> dict[int, Exception]:
    """Return the errors of the images that the image processor refuses even alone."""
    refused: dict[int, Exception] = {}
    for number, image in images.items():
        try:
            _inputs(image_processor, {number: image})
        except UNREADABLE as error:
            refused[number] = error
    return refused


def in_threads(function: Callable[[Sequence[Any]], Any], items: Sequence[Any]) -> list[Any]:
    """Apply a function to all pieces of a batch, in as many threads as torch uses, and return the results.

    Within each thread, torch uses that thread only. All threads have ended when this returns or raises.
    """
    count = torch.get_num_threads()
    if count == 1 or len(items) < 2:
        return [function(items)]
    PIL.Image.preinit()
    PIL.Image.init()  # a thread could miss a format that another thread is registering
    size = -(-len(items) // (count * PIECES))
    pool = ThreadPoolExecutor(count, THREADS, torch.set_num_threads, (1,))
    try:
        return list(pool.map(function, [items[begin : begin + size] for begin in range(0, len(items), size)]))
    finally:
        pool.shutdown(cancel_futures=True)
        for thread in threading.enumerate():  # the pool does not know a thread whose start was interrupted
            if thread.name.startswith(THREADS):
                thread.join()
        torch.set_num_threads(count)  # new threads inherit the number that was set last, in any thread
