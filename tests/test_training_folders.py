"""Image folders: the rows of `datasets`, from one scan and a cache that notices every change."""

import json
import os
import pickle
import random
import shutil
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import load_dataset

from plain_vit.errors import DataError
from plain_vit.training.data import folders
from plain_vit.training.data.datasets import load_images, load_splits
from plain_vit.training.data.folders import FolderCache, list_folder, open_folder

processes = get_context("fork")
SPLITS = ["train", "test", "validation", "val", "dev 2", "train-ticket", "a_train"]
CLASSES = ["a", "b", "B-c", "c.d", "__c", ".e"]
FILES = ["1.jpg", "2.JPEG", "10.png", "a b.PnG", "train_1.jpg", "test-2.webp", "notes.txt", "README.md", "x", ".h.jpg"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(folders, "SETTLED", 0)  # the folders of tests are never older than two seconds


@pytest.fixture
def scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the image folders that were scanned so far."""
    scanned: list[str] = []
    scandir = os.scandir

    def note(path: Any) -> Any:
        scanned.extend([str(path)] * str(path).startswith(str(tmp_path / "images")))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", note)
    return scanned


def make(root: Path, *files: str) -> Path:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return root


def rows_of(splits: Any) -> dict[str, list[tuple[Any, ...]]]:
    """Return the paths, and the labels if there are any, of each split."""
    found = {}
    for name, split in splits.items():
        columns = split.with_format("arrow")[:].to_pydict()
        assert all(image["bytes"] is None for image in columns["image"])
        paths = [image["path"] for image in columns["image"]]
        found[name] = list(zip(paths, columns.get("label", paths), strict=True))
    return found


def rows_of_datasets(root: Path) -> Any:
    return load_dataset("imagefolder", data_dir=str(root), cache_dir=str(root.parent / "reference"))


def assert_rows_of_datasets(root: Path, splits: Any) -> None:
    expected = rows_of_datasets(root)
    assert [*splits] == [*expected]
    assert {name: split.features for name, split in splits.items()} == {
        name: split.features for name, split in expected.items()
    }
    assert rows_of(splits) == {name: [*dict.fromkeys(rows)] for name, rows in rows_of(expected).items()}


TREES = {
    "classes": ["a/1.jpg", "a/2.JPEG", "b/1.png", "b/10.png", "b/2.png"],
    "splits": ["train/a/1.jpg", "train/b/1.jpg", "test/a/1.jpg", "test/b/2.jpg", "val/b/1.jpg", "val/a/1.jpg"],
    "order of whole paths": ["a/1.jpg", "a-b/1.jpg", "a.b/1.jpg", "A/1.jpg"],
    "nested": ["data/train/a/1.jpg", "data/train/b/2.jpg", "data/evaluation/b/1.jpg", "data/evaluation/a/1.jpg"],
    "different depths": ["train/a/1.jpg", "train/b/c/1.jpg"],
    "directly under train": ["train/a/1.jpg", "train/b/1.jpg", "train/1.jpg"],
    "no labels in one split": ["train/a/1.jpg", "test/b/1.jpg"],
    "no classes": ["1.jpg", "2.jpg"],
    "named files": ["train_1.jpg", "test-1.jpg", "x/train 2.jpg", "rest.jpg"],
    "hidden": ["a/1.jpg", "b/1.jpg", ".git/c/1.jpg", "__MACOSX/c/1.jpg", "a/.2.jpg", "b/__2.jpg"],
    "other files": ["a/1.jpg", "b/1.jpg", "b/notes.txt", "README.md", "b/x"],
    "several splits of one name": ["train-1/a/1.jpg", "train-2/b/1.jpg", "training/a/1.jpg", "train/training/2.jpg"],
    "sequence of splits": ["validation/a/1.jpg", "train/a/1.jpg", "test/b/1.jpg"],
}


@pytest.mark.parametrize("name", TREES)
def test_rows_are_those_of_datasets(name, tmp_path):
    root = make(tmp_path / "images", *TREES[name])
    splits = open_folder(root)[1]
    assert_rows_of_datasets(root, splits)
    assert rows_of(open_folder(root)[1]) == rows_of(splits), "also from the cache"


def test_name_of_the_folder_is_no_pattern(tmp_path):
    plain, odd = (make(tmp_path / name, *TREES["splits"]) for name in ("images", "images[1] *"))
    rows = {name: [(path.replace(str(odd), str(plain)), label) for path, label in rows]
            for name, rows in rows_of(open_folder(odd)[1]).items()}  # fmt: skip
    assert rows == rows_of(open_folder(plain)[1])


def test_links_to_files_are_rows_and_links_to_folders_are_named(tmp_path):
    root = make(tmp_path / "images", "a/1.jpg", "b/1.jpg", "b/2.jpg")
    other = make(tmp_path / "others", "c/1.jpg")
    (root / "a" / "2.jpg").symlink_to(other / "c" / "1.jpg")
    (root / "a" / "3.jpg").symlink_to(other / "missing.jpg")
    (root / "c").symlink_to(other / "c")
    with pytest.warns(UserWarning, match="Links to folders are not followed, .*images/c"):
        splits = open_folder(root)[1]
    assert_rows_of_datasets(root, splits)


@pytest.mark.parametrize("extra", ["train/metadata.csv", "train/metadata.jsonl", "train/more.zip", "train/a/1.jpg.gz"])
def test_metadata_and_archives_are_left_to_datasets(extra, tmp_path):
    root = make(tmp_path / "images", "train/a/1.jpg", "train/b/1.jpg", extra)
    assert open_folder(root)[1] is None


def test_metadata_gives_the_labels(tmp_path):
    root = make(tmp_path / "images", "train/1.jpg", "train/2.jpg")
    (root / "train" / "metadata.csv").write_text("file_name,label\n1.jpg,x\n2.jpg,y\n")
    assert load_splits(str(root))["train"]["label"][:] == ["x", "y"]


def grow(root: Path, rng: random.Random) -> Path:
    """Make a random tree of one to three levels."""
    for _ in range(rng.randrange(2, 12)):
        split, *classes = [rng.choice(names) for names in (SPLITS, CLASSES, CLASSES)]
        folder = [split, *classes[: rng.randrange(3)]] if rng.random() < 0.7 else classes[: rng.randrange(3)]
        make(root, "/".join([*folder, rng.choice(SPLITS)] if rng.random() < 0.04 else folder) + "/" + rng.choice(FILES))
    return make(root, "a/1.jpg") if rng.random() < 0.5 else root


def agrees_on_random_trees(folder: Path, count: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(count):
        root = grow(folder / str(seed) / "images", random.Random(seed))
        splits = list_folder(root).splits()
        of_each = [images for files in splits.values() if (images := set(filter(is_image, files)))]
        if len(set().union(*of_each)) < sum(map(len, of_each)):
            outcome = "refused"
            with pytest.raises(DataError, match="is of the splits"):
                open_folder(root)
        elif not of_each or len(of_each) < len(splits):  # an error of `datasets`
            outcome = "a split has no images"
        else:
            outcome = "same"
            assert_rows_of_datasets(root, open_folder(root)[1])
        outcomes[outcome] += 1
    assert outcomes["same"] > count / 2, outcomes


def is_image(file: str) -> bool:
    return Path(file).suffix.lower() in folders.ENDINGS


def test_rows_of_random_trees_are_those_of_datasets(tmp_path):
    agrees_on_random_trees(tmp_path, 10)


@pytest.mark.slow
def test_rows_of_many_random_trees_are_those_of_datasets(tmp_path):
    agrees_on_random_trees(tmp_path, 200)


def test_split_without_images_is_none(tmp_path):
    root = make(tmp_path / "images", "train/a/1.jpg", "train/b/1.jpg", "test/labels.txt")
    splits = open_folder(root)[1]
    assert {name: len(split) for name, split in splits.items()} == {"train": 2}
    shutil.rmtree(root / "train" / "a")
    shutil.rmtree(root / "train" / "b")
    make(root, "a/1.jpg", "train/labels.txt")
    with pytest.raises(DataError, match="no images in its splits, which are .train., .test."):
        open_folder(root)


def test_file_of_two_splits_is_refused(tmp_path):
    root = make(tmp_path / "cifar100", "train/apple/1.png", "train/train/1.png", "test/apple/2.png", "test/train/2.png")
    with pytest.raises(DataError, match=r"cifar100/test/train/2\.png is of the splits train and test"):
        open_folder(root)


def test_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    root = make(tmp_path / "images", "a/1.jpg", "b/1.jpg")
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"images/b cannot be read: Permission denied"):
        open_folder(root)


def test_name_that_is_not_utf8_is_named(tmp_path):
    root = make(tmp_path / "images", "a/1.jpg", "b/1.jpg")
    Path(os.fsdecode(os.fsencode(root / "b") + b"/\xff.jpg")).write_bytes(b"")
    with pytest.raises(DataError, match=r"is not UTF-8"):
        open_folder(root)


# The cache


def test_unchanged_folder_is_scanned_once(tmp_path, scans):
    root = make(tmp_path / "images", *TREES["splits"])
    first = rows_of(open_folder(root)[1])
    done = len(scans)
    assert done == 10
    suffixes, again = open_folder(root)
    assert (len(scans), suffixes, rows_of(again)) == (done, {".jpg"}, first)


def change_and_back(root: Path) -> None:
    """Add and remove a file, such that only the times of its folder change."""
    make(root, "train/a/9.jpg")
    (root / "train/a/9.jpg").unlink()


def set_back(root: Path) -> None:
    """Add a file, and give its folder the time of before."""
    make(root, "train/a/0.jpg")
    os.utime(root / "train/a", ns=(0, 0))


CHANGES = {
    "added": lambda root: make(root, "train/a/0.jpg"),
    "removed": lambda root: (root / "train/b/1.jpg").unlink(),
    "renamed": lambda root: (root / "val/a/1.jpg").rename(root / "val/a/2.jpg"),
    "moved": lambda root: (root / "val/a/1.jpg").rename(root / "train/a/1_.jpg"),
    "class added": lambda root: make(root, "train/c/1.jpg"),
    "class renamed": lambda root: (root / "train/b").rename(root / "train/bb"),
    "class removed": lambda root: shutil.rmtree(root / "train/b"),
    "empty folder added": lambda root: (root / "train/empty").mkdir(),
    "touched": lambda root: os.utime(root / "train/a"),
    "times set back": set_back,
    "added and removed": change_and_back,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name, tmp_path, scans):
    root = make(tmp_path / "images", *TREES["splits"], "train/a/2.jpg", "train/b/2.jpg")
    os.utime(root / "train/a", ns=(0, 0))
    before = open_folder(root)[1]
    kept = rows_of(before)
    scans.clear()
    CHANGES[name](root)
    after = open_folder(root)[1]
    assert scans
    assert_rows_of_datasets(root, after)
    assert rows_of(before) == kept
    assert rows_of(pickle.loads(pickle.dumps(before))) == kept, "what a worker of an older run opens"


def test_folder_that_has_just_changed_is_scanned_again(tmp_path, scans, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = make(tmp_path / "images", "a/1.jpg", "b/1.jpg")
    open_folder(root)
    assert FolderCache(root).read() is None
    stamps = list_folder(root).stamps
    assert stamps == {"": None, "a": None, "b": None}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_damaged_cache_is_written_anew(tmp_path):
    root = make(tmp_path / "images", *TREES["splits"])
    expected = rows_of(open_folder(root)[1])
    cache = FolderCache(root)
    files = sorted(path for path in cache.path.rglob("*") if path.is_file() and path.name != "lock")
    assert len(files) == 6  # the index, three splits, rows.json and the manifest
    for path in files:
        whole = path.read_bytes()
        for damage in (0, len(whole) // 2, len(whole) - 1):
            flip(path, damage)
            assert rows_of(open_folder(root)[1]) == expected, (path, damage)
            assert cache.read() is not None
        for content in (b"", b"[]", b"null"):
            path.write_bytes(content)
            assert rows_of(open_folder(root)[1]) == expected
        path.unlink()
        assert rows_of(open_folder(root)[1]) == expected
        assert cache.read() is not None


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_cache_that_cannot_be_written_is_no_error(error, tmp_path, monkeypatch):
    root = make(tmp_path / "images", *TREES["splits"])

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.warns(UserWarning, match=f"is not cached: .*{error.strerror}"):
        splits = open_folder(root)[1]
    monkeypatch.undo()
    assert_rows_of_datasets(root, splits)
    assert rows_of(pickle.loads(pickle.dumps(splits))) == rows_of(splits)


def test_full_disk_is_no_error(tmp_path, monkeypatch):
    root = make(tmp_path / "images", *TREES["splits"])

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "_write_rows", full)
    with pytest.warns(UserWarning, match="is not cached: .*No space left on device"):
        splits = open_folder(root)[1]
    assert_rows_of_datasets(root, splits)
    assert FolderCache(root).read() is None


def scan_and_count(root: Path, counted: Path, start: Any) -> None:
    scan = folders.list_folder

    def count(path: Path) -> Any:
        (counted / str(os.getpid())).write_text("")
        return scan(path)

    folders.list_folder = count
    start.wait()
    (counted / f"rows of {os.getpid()}").write_text(json.dumps(rows_of(open_folder(root)[1])))


def test_one_of_several_processes_scans(tmp_path):
    root = make(tmp_path / "images", *TREES["splits"])
    (counted := tmp_path / "counted").mkdir()
    start = processes.Barrier(4)
    children = [processes.Process(target=scan_and_count, args=(root, counted, start)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    results = {path.read_text() for path in counted.glob("rows of *")}
    assert len(results) == 1
    assert len([*counted.iterdir()]) == 4 + 1


def test_rows_are_not_copied_into_workers(tmp_path):
    root = make(tmp_path / "images", *(f"{label}/{number}.jpg" for label in "ab" for number in range(2000)))
    split = load_images(str(root))
    assert len(split) == 4000
    assert len(pickle.dumps(split)) < 20_000
