"""Images with more than 8 bits per channel: training and evaluation read or refuse them like the image processor."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from datasets import Dataset, DatasetDict, Image
from datasets import load_dataset as load

from plain_vit import PlainViTImageProcessor
from plain_vit.errors import DataError
from plain_vit.training.data import load_classification_data, load_images, without_unreadable
from plain_vit.training.data.augmentation import AugmentedImages, training_transform
from plain_vit.training.data.decoding import ReadableImages, decode_image, open_stored
from plain_vit.training.tasks.unlabelled import UnlabelledImages

PROCESSOR = PlainViTImageProcessor(size={"height": 24, "width": 16})
CLASSES = ("ant", "bee")
GREY = ("png 16", "tiff 16", "tiff -16", "tiff 32", "tiff float")  # single-channel images of more than 8 bits
COLOUR = ("png 16", "tiff 16")  # Pillow reads the high byte of each channel


def levels(channels: int) -> np.ndarray:
    """Return 13 x 11 values from 4,000 to 40,000, which Pillow would convert to white."""
    return np.random.default_rng(0).integers(4_000, 40_000, (13, 11, channels)).astype(np.uint16)


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG file of 16 bits per channel."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2}[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    parts = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
             for kind, data in chunks]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(pixels: np.ndarray) -> bytes:
    """Return an uncompressed little-endian TIFF file of any number type."""
    height, width, channels = pixels.shape
    data, start = pixels.tobytes(), 8
    number = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    lists = struct.pack(f"<{2 * channels}H", *[pixels.dtype.itemsize * 8] * channels, *[number] * channels)
    tags = {
        256: width, 257: height, 258: start, 259: 1, 262: 2 if channels == 3 else 1, 273: start + len(lists),
        277: channels, 278: height, 279: len(data), 339: start + 2 * channels,
    }  # fmt: skip
    if channels == 1:
        tags |= {258: pixels.dtype.itemsize * 8, 339: number}  # a single value is not a list
    entries = [
        struct.pack("<HHII", tag, 3 if tag in (258, 339) else 4, channels if tag in (258, 339) else 1, value)
        for tag, value in tags.items()
    ]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", start + len(lists) + len(data)) + lists + data + directory


def deep_file(kind: str, channels: int) -> tuple[bytes, str]:
    """Return an image file, and its suffix."""
    pixels = levels(channels)
    if kind == "png 16":
        return png(pixels), ".png"
    types = {"tiff 16": np.uint16, "tiff -16": np.int16, "tiff 32": np.int32, "tiff float": np.float32}
    return tiff((pixels / 65535 if kind == "tiff float" else pixels).astype(types[kind])), ".tiff"


def write_folder(root: Path, file: tuple[bytes, str]) -> Path:
    """Write one deep image and three ordinary ones for training, and the same for the test."""
    rng = np.random.default_rng(1)
    for split in ("train", "test"):
        for number, name in enumerate(CLASSES * 2):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            ordinary = PIL.Image.fromarray(rng.integers(0, 256, (13, 11, 3), dtype=np.uint8))
            ordinary.save(root / split / name / f"{number}.png")
        (root / split / CLASSES[0] / f"deep{file[1]}").write_bytes(file[0])
    return root


def write_as(container: str, root: Path, file: tuple[bytes, str]) -> str:
    """Write the images as a folder, as parquet files, or as a dataset with an image column, encoded by `datasets`."""
    folder = write_folder(root / "images", file)
    if container == "folder":
        return str(folder)
    splits = load("imagefolder", data_dir=str(folder), cache_dir=str(root / "cache"))
    target = root / container
    if container == "parquet":
        target.mkdir()
        for name, split in splits.items():
            split.to_parquet(str(target / f"{name}.parquet"))
        return str(target)
    encoded = {}
    for name, split in splits.items():
        pictures = [
            PIL.Image.open(io.BytesIO(open_bytes(row)))
            for row in split.cast_column("image", Image(decode=False))["image"]
        ]
        rows = {"image": [np.array(picture) if container == "arrays" else picture for picture in pictures]}
        features = split.features.copy()
        encoded[name] = Dataset.from_dict({**rows, "label": split["label"][:]}, features=features)
    DatasetDict(encoded).save_to_disk(str(target))
    return str(target)


def open_bytes(stored: dict[str, Any]) -> bytes:
    return stored["bytes"] if stored["bytes"] is not None else Path(stored["path"]).read_bytes()


def seen_by_training(split: Dataset, **options: Any) -> list[dict[str, Any]]:
    images = AugmentedImages(split, training_transform(PROCESSOR, **options), seed=0)
    return [images[0, row] for row in range(len(split))]


@pytest.mark.parametrize(
    "kind, container",
    [*((kind, "folder") for kind in GREY), ("png 16", "parquet"), ("tiff float", "images"), ("tiff 16", "arrays")],
)
def test_deep_images_of_one_channel_are_named_in_training_and_evaluation_and_never_clipped(kind, container, tmp_path):
    data_source = write_as(container, tmp_path, deep_file(kind, 1))
    data = load_classification_data(data_source)
    for options in ({}, {"crop_scale": 0.3}, {"resize_to": 32}):
        named = [example["broken"] for example in seen_by_training(data.train, **options)]
        assert len([reason for reason in named if reason]) == 1
        assert "more than 8 bits per channel" in "".join(named)
    images = ReadableImages(data.test)
    named = [images[row]["broken"] for row in range(len(images))]
    assert len([reason for reason in named if reason]) == 1
    assert "more than 8 bits per channel" in "".join(named)
    kept = without_unreadable(data, PROCESSOR)
    assert (len(kept.test), len(kept.unreadable)) == (4, 1)


@pytest.mark.parametrize("kind", GREY)
def test_what_training_refuses_the_image_processor_refuses_too(kind):
    file, _ = deep_file(kind, 1)
    with pytest.raises(ValueError, match="more than 8 bits per channel"):
        decode_image(open_stored({"bytes": file, "path": None}))
    with pytest.raises(ValueError, match="more than 8 bits per channel"):
        PROCESSOR(PIL.Image.open(io.BytesIO(file)))


@pytest.mark.parametrize("kind", COLOUR)
def test_deep_colour_images_have_the_high_byte_of_each_channel_everywhere(kind):
    file, _ = deep_file(kind, 3)
    expected = (levels(3) >> 8).astype(np.uint8)
    assert np.array_equal(np.array(decode_image(open_stored({"bytes": file, "path": None}))), expected)
    processor = PlainViTImageProcessor(size={"height": 13, "width": 11})
    pixels = processor(PIL.Image.open(io.BytesIO(file)), return_tensors="pt").pixel_values[0]
    seen = training_transform(processor)(PIL.Image.open(io.BytesIO(file)))
    torch.testing.assert_close(seen, pixels, rtol=0, atol=1e-6)  # the processor first scales to [0, 1]


@pytest.mark.parametrize("kind", GREY)
def test_pre_training_refuses_deep_images(kind, tmp_path):
    images = load_images(str(write_folder(tmp_path, deep_file(kind, 1))))
    unlabelled = UnlabelledImages(images, {"pixel_values": training_transform(PROCESSOR)}, None, 0)
    with pytest.raises(DataError, match=r"deep\.(png|tiff) \(.*more than 8 bits per channel"):
        list(map(unlabelled.__getitem__, [(0, row) for row in range(len(images))]))
