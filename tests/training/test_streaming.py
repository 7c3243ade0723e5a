"""Streams, webdataset shards, benchmarks by short name, and unreadable images."""

import io
import itertools
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from plain_vit import PlainViTImageProcessor
from plain_vit.errors import DataError
from plain_vit.training.data import load_classification_data, without_unreadable
from plain_vit.training.data import streaming as streaming_module
from plain_vit.training.data.augmentation import AugmentedImages, TrainingTransform
from plain_vit.training.data.benchmarks import BENCHMARKS
from plain_vit.training.data.decoding import ProcessedImages, ReadableImages, UnreadableImages, decode_image
from plain_vit.training.data.sampling import ShuffledStream
from plain_vit.training.data.streaming import StreamedBatches, StreamedImages
from plain_vit.training.hardware.processes import loading_options
from tests.hub.endpoint import HubEndpoint

AS_THEY_ARE = TrainingTransform(decode_image, v2.PILToTensor(), v2.Identity())


def png(number: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (7, 5), (number, 3, 200)).save(file, "png")
    return file.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return webdataset shards: 5, 6, 7 and 8 training images of 3 classes in different colours, and 5 test images."""
    folder, number = tmp_path / "shards", 0
    folder.mkdir()
    for name, count in (("train-0", 5), ("train-1", 6), ("train-2", 7), ("train-3", 8), ("test-0", 5)):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for _ in range(count):
                add(tar, f"{number:05}.png", png(number))
                add(tar, f"{number:05}.cls", str(number % 3).encode())
                number += 1
    (tmp_path / "names.txt").write_text("ant\nbee\n\ncat\n")
    return folder


def colours(batches: Iterable[dict[str, Any]]) -> list[int]:
    return [int(pixel) for batch in batches for pixel in batch["pixel_values"][:, 0, 0, 0]]


def stream_of(folder: Path, **options: object) -> datasets.IterableDataset:
    return load_classification_data(
        str(folder), streaming=True, stream_images=26, label_names=str(folder.parent / "names.txt"), **options
    ).train


def images_of(stream: datasets.IterableDataset, **changes: object) -> StreamedImages:
    options = {"classes": 3, "batch_size": 3, "batches_before": 0, "buffer": 4, "process": (0, 1), "seed": 5, **changes}
    return StreamedImages(stream, AS_THEY_ARE, **options)


# Webdataset shards and streams


def test_shards_open_stored_and_streamed_with_their_names(shards):
    names = str(shards.parent / "names.txt")
    stored = load_classification_data(str(shards), label_names=names)
    assert stored.label_names == ["ant", "bee", "cat"]
    assert sorted(image.getpixel((0, 0))[0] for image in stored.train["image"]) == list(range(26))
    streamed = load_classification_data(str(shards), label_names=names, streaming=True)
    assert streamed.train_images == stored.train_images == 26, "which is known since it was stored"
    assert streamed.test["label"][:] == stored.test["label"][:] == [number % 3 for number in range(26, 31)]
    assert [image.getpixel((0, 0))[0] for image in streamed.test["image"]] == list(range(26, 31))
    assert load_classification_data(str(shards)).label_names == ["0", "1", "2"]


def test_stream_that_cannot_say_its_classes_or_be_divided_is_refused(shards):
    with pytest.raises(DataError, match="--label_names, a text file"):
        load_classification_data(str(shards), streaming=True)
    with pytest.raises(DataError, match="cannot be split"):
        stream_of(shards, validation_fraction=0.1)
    (shards.parent / "names.txt").write_text("ant\nbee")
    with pytest.raises(DataError, match="8 labels of the train split are outside 0 to 1"):
        load_classification_data(str(shards), label_names=str(shards.parent / "names.txt"))
    with pytest.raises(DataError, match="no file nowhere"):
        load_classification_data(str(shards), label_names="nowhere")
    with pytest.raises(DataError, match="already have names"):
        load_classification_data("digits", label_names=str(shards.parent / "names.txt"))


def test_size_of_a_stream_is_the_given_one_if_it_does_not_say(shards):
    names = str(shards.parent / "names.txt")
    with pytest.raises(DataError, match="set --stream_images"):
        load_classification_data(str(shards), label_names=names, streaming=True)
    told = load_classification_data(str(shards), label_names=names, streaming=True, stream_images=9)
    assert told.train_images == 9


def test_every_image_of_a_stream_comes_once_an_epoch_in_another_order(shards):
    accelerator, stream = Accelerator(cpu=True), stream_of(shards)
    seen = colours(StreamedBatches(images_of(stream, batch_size=13), accelerator, count=6))
    epochs = [seen[start : start + 26] for start in (0, 26, 52)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(26))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert colours(StreamedBatches(images_of(stream, seed=6), accelerator, count=9)) != seen[:27]


@pytest.mark.slow(quick=["0"])
@pytest.mark.parametrize("workers", [0, 2])
def test_stream_resumes_where_it_stopped(shards, workers):
    accelerator, stream = Accelerator(cpu=True), stream_of(shards)
    whole = colours(StreamedBatches(images_of(stream), accelerator, count=17, **loading_options(workers)))
    for before in (1, 6, 13):
        images = images_of(stream, batches_before=before)
        rest = colours(StreamedBatches(images, accelerator, count=17 - before, **loading_options(workers)))
        assert rest == whole[before * 3 :], before


@pytest.mark.slow(quick=["0"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_stream_reads_a_block_and_skips_within_one_shard(shards, workers, monkeypatch):
    accelerator, stream = Accelerator(cpu=True), stream_of(shards)
    batches = StreamedBatches(images_of(stream), accelerator, count=40, **loading_options(workers))
    positions, whole = [], []
    for batch in batches:
        whole += colours([batch])
        positions.append(dict(batches.positions))
    read: list[tuple[int, int]] = []

    def counted(parts, done, skipped):
        for number, offset, row in rows_of(parts, done, skipped):
            read.append((number, offset))
            yield number, offset, row

    rows_of = streaming_module._rows
    monkeypatch.setattr(streaming_module, "_rows", counted)
    for before in (8, 39) if workers else (1, 8, 17, 30, 39):
        images = images_of(stream, batches_before=before, positions=positions[before - 1])
        read.clear()
        rest = iter(StreamedBatches(images, accelerator, count=40 - before, **loading_options(workers)))
        first = next(rest)
        if not workers:
            assert len(read) <= 3 * 4, "the blocks of the position and of the next batch"
        assert colours([first]) + colours(rest) == whole[before * 3 :], before


def test_processes_and_workers_share_the_images_of_a_stream(shards):
    stream = stream_of(shards)
    parts = [
        set(colours(itertools.islice(DataLoader(images, batch_size=1, **loading_options(2)), 40)))
        for images in (images_of(stream, process=(number, 2), batch_size=1) for number in range(2))
    ]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(range(26))
    with pytest.raises(DataError, match="4 shards, which cannot be divided among 5 workers"):
        StreamedBatches(images_of(stream), Accelerator(cpu=True), count=1, num_workers=5)


def test_unreadable_image_of_a_stream_gives_its_place_to_the_next_with_its_label(shards):
    with tarfile.open(shards / "train-0.tar", "w") as tar:
        for number in range(5):
            add(tar, f"{number:05}.png", b"nothing" if number in (1, 2) else png(number))
            add(tar, f"{number:05}.cls", str(number % 3).encode())
    stream = stream_of(shards)
    batch = next(iter(DataLoader(images_of(stream, batch_size=26), batch_size=26)))
    seen = batch["pixel_values"][:, 0, 0, 0].tolist()
    assert [number % 3 for number in seen] == batch["labels"].tolist()
    broken = [name.split(" ")[0] for name in batch["broken"] if name]
    assert sorted(broken) == ["00001.png", "00002.png"]
    counts = Counter(seen)
    assert sum(counts.values()) == 26
    assert counts.keys() == set(range(26)) - {1, 2}
    again = images_of(stream, batch_size=13, batches_before=1)
    assert next(iter(DataLoader(again, batch_size=13)))["pixel_values"][:, 0, 0, 0].tolist() == seen[13:]


# Unreadable images of a stored set


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Return an image folder whose training and test split each contain a truncated and an empty file."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 6)):
        for number in range(count):
            folder = tmp_path / "set" / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    for split, number in (("train", 4), ("train", 5), ("test", 3)):
        file = tmp_path / "set" / split / "ab"[number % 2] / f"{number}.png"
        file.write_bytes(file.read_bytes()[:300] if number != 5 else b"")
    return tmp_path / "set"


def test_unreadable_training_image_is_replaced_by_the_next_and_named(damaged):
    data = load_classification_data(str(damaged))
    seen = AugmentedImages(data.train, AS_THEY_ARE, seed=1)
    rows = [seen[0, row] for row in range(10)]
    broken = [row for row in range(10) if rows[row]["broken"]]
    assert len(broken) == 2
    assert {Path(rows[row]["broken"].split(" (")[0]).name for row in broken} == {"4.png", "5.png"}
    for row in broken:
        other = next(place for place in range(row, row + 10) if place % 10 not in broken) % 10
        assert torch.equal(rows[row]["pixel_values"], rows[other]["pixel_values"])
        assert rows[row]["labels"] == rows[other]["labels"]


def test_unreadable_images_are_left_out_of_the_evaluation(damaged):
    processor = PlainViTImageProcessor(size={"height": 24, "width": 24})
    kept = without_unreadable(load_classification_data(str(damaged)), processor)
    assert (len(kept.test), len(kept.train)) == (5, 10)
    assert len(kept.unreadable) == 1
    assert "3.png" in kept.unreadable[0]
    assert len(load_classification_data(str(damaged)).test) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_run_ends_at_the_first_unreadable_image_and_names_its_file(damaged, workers):
    data = load_classification_data(str(damaged))
    collate = ProcessedImages(PlainViTImageProcessor(size={"height": 24, "width": 24}))
    loader = DataLoader(ReadableImages(data.test), batch_size=2, collate_fn=collate, **loading_options(workers))
    with pytest.raises(DataError, match=r"cannot be read: .*test/b/3\.png \(.*Repair it\."):
        list(UnreadableImages(stop=True, say=print, advice="Repair it.").watch(loader))
    train = AugmentedImages(data.train, AS_THEY_ARE, seed=1)
    sampler = ShuffledStream(10, length=10, seed=0)
    rows = DataLoader(train, sampler=sampler, **loading_options(workers))
    with pytest.raises(DataError, match=r"train/./[45]\.png"):
        list(UnreadableImages(stop=True, say=print, advice="Repair it.").watch(rows))


def test_skipped_images_are_counted_and_each_is_named_once(damaged):
    said: list[str] = []
    train = AugmentedImages(load_classification_data(str(damaged)).train, AS_THEY_ARE, seed=1)
    watched = UnreadableImages(stop=False, say=said.append, advice="", count=7)
    batches = list(watched.watch(DataLoader(train, batch_size=5, sampler=ShuffledStream(10, length=30, seed=0))))
    assert len(batches) == 6
    assert "broken" not in batches[0]
    assert watched.count_everywhere(Accelerator(cpu=True)) == 7 + 2 * 3
    assert len(said) == 2


# Benchmarks and the Hub


def parquet(tmp_path: Path, image: str, label: str, labels: list[int], names: list[str]) -> bytes:
    features = Features({image: Image(), label: ClassLabel(names=names)})
    rows = {image: [PIL.Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(len(labels))], label: labels}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "file.parquet")
    return (tmp_path / "file.parquet").read_bytes()


def test_benchmark_is_opened_by_its_short_name_with_its_columns_and_splits(hub: HubEndpoint, tmp_path: Path) -> None:
    known = BENCHMARKS["flowers"]
    names = ["rose", "iris", "lily"]
    splits = {"train": [0, 1, 2], "validation": [2, 2, 0, 1], "test": [0, 1]}
    files = {
        f"data/{split}-00000-of-00001.parquet": parquet(tmp_path, known.image, known.label, labels, names)
        for split, labels in splits.items()
    }
    hub.add_repository(known.repository, "dataset", files)
    data = load_classification_data("flowers")
    assert data.label_names == names
    assert data.train["label"][:] == [0, 1, 2, 2, 2, 0, 1], "train and validation together, as the paper has it"
    assert data.validation is None
    assert data.test["label"][:] == [0, 1]
    assert load_classification_data("flowers", train_split="train").validation["label"][:] == [2, 2, 0, 1]
    streamed = load_classification_data("flowers", train_split="train", streaming=True, stream_images=3)
    assert sorted(row["label"] for row in streamed.train) == [0, 1, 2]
    assert [image.size for image in streamed.test["image"]] == [(8, 8)] * 2


def test_imagenet_is_held_out_by_its_validation_split(hub: HubEndpoint, tmp_path: Path) -> None:
    known = BENCHMARKS["imagenet-1k"]
    splits = {"train": [0, 1, 2, 1], "validation": [2, 0], "test": [-1, -1]}
    files = {
        f"data/{split}-00000-of-00001.parquet": parquet(tmp_path, "image", "label", labels, ["a", "b", "c"])
        for split, labels in splits.items()
    }
    hub.add_repository(known.repository, "dataset", files)
    data = load_classification_data("imagenet-1k", validation_fraction=0.0)
    assert data.validation is None
    assert data.test["label"][:] == [2, 0]
