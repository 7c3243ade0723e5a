"""Image folders: the split and class of each image, and the files that hold the rows."""

import json
import os
import pickle
import random
import re
import shlex
import shutil
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import load_dataset
from torchvision.datasets import ImageFolder

from plain_vit.errors import DataError
from plain_vit.training.data import folders, load_classification_data
from plain_vit.training.data.datasets import load_images, load_images_and_labels, load_labelled_split, load_splits
from plain_vit.training.data.folders import open_folder
from tests.processes import processes
from tests.sizes import draws

SPLITS = ["train", "test", "Validation", "val", "TRAIN", "dev 2", "train-ticket", "seg_test"]
CLASSES = ["a", "b", "B-c", "c.d", "train", "test_tube", "__c", ".e"]
FILES = ["1.jpg", "2.JPEG", "10.png", "a b.PnG", "train_1.jpg", "test-2.webp", "notes.txt", "README.md", "x", ".h.jpg"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def make(root: Path, *files: str) -> Path:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return root


def rows_of(splits: Any) -> dict[str, list[tuple[Any, ...]]]:
    """Return the paths of each split, with labels if there are any."""
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
    "no classes": ["1.jpg", "2.jpg"],
    "hidden": ["a/1.jpg", "b/1.jpg", ".git/c/1.jpg", "__MACOSX/c/1.jpg", "a/.2.jpg", "b/__2.jpg"],
    "other files": ["a/1.jpg", "b/1.jpg", "b/notes.txt", "README.md", "b/x"],
}


@pytest.mark.parametrize("name", TREES)
def test_rows_are_those_of_datasets(name, tmp_path):
    root = make(tmp_path / "images", *TREES[name])
    splits = open_folder(root).rows
    assert_rows_of_datasets(root, splits)
    assert rows_of(open_folder(root).rows) == rows_of(splits), "also from the cache"


def test_name_of_the_folder_is_no_pattern(tmp_path):
    plain, odd = (make(tmp_path / name, *TREES["splits"]) for name in ("images", "images[1] *"))
    rows = {name: [(path.replace(str(odd), str(plain)), label) for path, label in rows]
            for name, rows in rows_of(open_folder(odd).rows).items()}  # fmt: skip
    assert rows == rows_of(open_folder(plain).rows)


def test_links_to_files_are_rows_and_links_to_folders_are_named(tmp_path):
    root = make(tmp_path / "images", "a/1.jpg", "b/1.jpg", "b/2.jpg")
    other = make(tmp_path / "others", "c/1.jpg")
    (root / "a" / "2.jpg").symlink_to(other / "c" / "1.jpg")
    (root / "a" / "3.jpg").symlink_to(other / "missing.jpg")
    (root / "c").symlink_to(other / "c")
    with pytest.warns(UserWarning, match="Links to folders are not followed, .*images/c"):
        splits = open_folder(root).rows
    assert_rows_of_datasets(root, splits)


@pytest.mark.parametrize("extra", ["train/metadata.csv", "train/metadata.jsonl", "train/more.zip", "train/a/1.jpg.gz"])
def test_metadata_and_archives_are_left_to_datasets(extra, tmp_path):
    root = make(tmp_path / "images", "train/a/1.jpg", "train/b/1.jpg", extra)
    assert open_folder(root).rows is None


def test_metadata_gives_the_labels(tmp_path):
    root = make(tmp_path / "images", "train/1.jpg", "train/2.jpg")
    (root / "train" / "metadata.csv").write_text("file_name,label\n1.jpg,x\n2.jpg,y\n")
    assert load_splits(str(root))["train"]["label"][:] == ["x", "y"]


def grow(root: Path, rng: random.Random) -> Path:
    """Make a random tree of one to three levels, named like splits, classes, or anything."""
    kind, splits = rng.choice(["splits", "classes", "any"]), rng.sample(SPLITS[:4], 2)
    for _ in range(rng.randrange(2, 12)):
        classes = [rng.choice(CLASSES) for _ in range(rng.randrange(1, 3))]
        first = (
            [rng.choice(splits)] if kind == "splits" else [rng.choice(SPLITS)] * (kind == "any" and rng.random() < 0.7)
        )
        make(root, "/".join([*first, *classes[: None if kind == "any" else 1], rng.choice(FILES)]))
    return make(root, f"{splits[0]}/a/1.jpg" if kind == "splits" else "a/1.jpg")


def images_below(root: Path) -> list[str]:
    below = [path for path in root.rglob("*") if path.suffix.lower() in folders.ENDINGS]
    inner = [path.relative_to(root).parts for path in below]
    return sorted(
        str(root / Path(*parts))
        for parts in inner
        if not any(part.startswith(".") for part in parts) and not any(part.startswith("__") for part in parts[:-1])
    )


def paths_of(splits: Any) -> dict[str, list[str]]:
    return {name: [path for path, _ in rows] for name, rows in rows_of(splits).items()}


def advised(error: DataError) -> list[str]:
    """Return the splits named by the options in an error."""
    return [name for value in advised_options(error).values() for name in value.split("+")]


def advised_options(error: DataError) -> dict[str, str]:
    [said] = re.findall(r"[Gg]ive (.*): what is in none is left out", str(error))
    words = shlex.split(said)
    assert all(re.fullmatch(r"--(train|validation|test)_split", option) for option in words[::2])
    return {option[2:]: value for option, value in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.slow
def test_every_image_of_a_random_tree_is_in_one_split_or_named(tmp_path):
    count, outcomes = draws(60, nightly=1000), Counter[str]()
    for seed in range(count):
        root = grow(tmp_path / str(seed) / "images", random.Random(seed))
        everything = images_below(root)
        assert sorted(*paths_of(open_folder(root, ["all"]).rows).values()) == everything
        try:
            splits = paths_of(open_folder(root).rows)
        except DataError as error:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                splits = paths_of(open_folder(root, advised(error)).rows)
            taken = sorted(path for paths in splits.values() for path in paths)
            assert len({*taken}) == len(taken)
            left = len(everything) - len(taken)
            assert [str(each.message).startswith(f"{left} of ") for each in said] == [True] * (left > 0)
            outcomes["asked"] += 1
        else:
            assert sorted(path for paths in splits.values() for path in paths) == everything
            of_names = all(word_of(path, root) == name for name, paths in splits.items() for path in paths)
            assert of_names or [*splits] == ["train"]
            outcomes["of names" if of_names else "one split"] += 1
    assert min(outcomes[name] for name in ("asked", "of names", "one split")) > count / 50, outcomes


def word_of(path: str, root: Path) -> str:
    """Return the split named by the first folder of a path."""
    word = Path(path).relative_to(root).parts[0].lower()
    return "validation" if word in ("val", "validation") else word


# Names that are splits, and names that are not


CLASSES_WITH_WORDS = {
    "words in names of classes": ["airport", "harbor", "train_interior", "train_station"],
    "a class that is called train": ["bus", "car", "train"],
    "classes called train and test-drive": ["Test", "car", "test-drive", "train"],
    "words in a whole set": ["train_interior", "train_station"],
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", CLASSES_WITH_WORDS)
def test_words_in_the_names_of_classes_and_images_are_no_splits(name, streaming, tmp_path):
    files = [f"{label}/{number}_test.jpg" for label in CLASSES_WITH_WORDS[name] for number in range(3)]
    root = make(tmp_path / "images", *files)
    data = load_classification_data(str(root), streaming=streaming)
    reference = ImageFolder(root)
    assert data.label_names == reference.classes
    assert data.train_images == len(reference) == len(files)
    assert [*data.splits] == ["train"]
    train = data.train if streaming else data.train.with_format("arrow")[:].to_pylist()
    assert [(row["image"]["path"], row["label"]) for row in train] == reference.samples
    shutil.copytree(root, root.parent / "sets" / "train")
    make(root.parent / "sets" / "test", *(f"{label}/1.jpg" for label in CLASSES_WITH_WORDS[name][:2]))
    data = load_classification_data(str(root.parent / "sets"), streaming=streaming)
    assert data.label_names == reference.classes, "also as classes of splits"
    assert (data.train_images, len(data.test)) == (len(files), 2)


@pytest.mark.parametrize("folder", ["{}", "images/{}", "a set/of images/{}"])
@pytest.mark.parametrize(
    "names", [("Training", "Testing"), ("TRAIN", "Test"), ("train", "evaluation"), ("train", "VAL")]
)
def test_split_folders_of_any_case_are_splits(names, folder, tmp_path):
    files = [f"{folder.format(name)}/{label}/{label}{at}.jpg" for at, name in enumerate(names) for label in "ab"]
    root = make(tmp_path / "images", *files, "notes/words.txt")
    data = load_classification_data(str(root))
    second = "validation" if names[1] == "VAL" else "test"
    assert [*data.splits] == ["train", second]
    for role, name in zip(data.splits, names, strict=True):
        rows = data.splits[role].with_format("arrow")[:].to_pylist()
        assert [(row["image"]["path"], row["label"]) for row in rows] == ImageFolder(root / folder.format(name)).samples
    assert load_labelled_split(str(root))[0].num_rows == 2
    same = load_classification_data(str(root), train_split=folder.format(names[0]), test_split=folder.format(names[1]))
    assert [len(split) for split in same.splits.values()] == [2, 2]
    assert same.test is not None


@pytest.mark.parametrize("streaming", [False, True])
def test_bulk_inference_opens_every_image_of_a_folder(streaming, tmp_path):
    photos = make(
        tmp_path / "images" / "photos", "1.jpg", "beach.avif", "train station.jpg", "val/test.png", "test/a/2.jpg"
    )
    for root in (photos, make(tmp_path / "images" / "set", *TREES["splits"])):
        rows = load_images(str(root), streaming=streaming, all_of_folder=True)
        assert [row["path"] for row in undecoded(rows)] == images_below(root)
        if not streaming:
            stored, labels = load_images_and_labels(str(root))
            assert [row["path"] for row in undecoded(stored)] == images_below(root), "the rows of the page"
            assert (labels is None) == (root == photos)
    some = load_images(str(root), "test", streaming=streaming, all_of_folder=True)
    assert len([*undecoded(some)]) == 2
    assert len([*undecoded(load_images(str(root), streaming=streaming))]) == 2, "to learn from, those of train"


def undecoded(rows: Any) -> list[Any]:
    return [row["image"] for row in rows.cast_column("image", datasets.Image(decode=False))]


# files, and numbers of images per split after following the advice
ASKED: dict[str, tuple[list[str], dict[str, int]]] = {
    "beside loose images": (["train/a/1.jpg", "train/b/1.jpg", "test/a/2.jpg", "sample.jpg"], {"train": 2, "test": 1}),
    "beside a class": (["train/a/1.jpg", "train/b/1.jpg", "c/1.jpg", "test/b/2.jpg"], {"train": 2, "test": 1}),
    "words before": (["seg_train/a/1.jpg", "seg_train/b/1.jpg", "seg_test/b/2.jpg"], {"train": 2, "test": 1}),
    "numbers behind": (["train2017/a/1.jpg", "train2017/b/1.jpg", "val2017/b/2.jpg"], {"train": 2, "validation": 1}),
    "deeper than others": (
        ["x/Train/a/1.jpg", "x/Train/b/1.jpg", "x/Test/a/2.jpg", "y/z/3.jpg"],
        {"train": 2, "test": 1},
    ),
    "two of one split": (["train/a/1.jpg", "training/b/1.jpg", "test/a/2.jpg"], {"train": 2, "test": 1}),
    "a word with a space": (["my train/a/1.jpg", "my train/b/1.jpg", "my test/b/2.jpg"], {"train": 2, "test": 1}),
}


@pytest.mark.parametrize("name", ASKED)
def test_unclear_splits_are_asked_for_and_the_advice_gets_further(name, tmp_path):
    files, counts = ASKED[name]
    root = make(tmp_path / "images", *files)
    with pytest.raises(
        DataError, match="It is unclear what the splits of .*images are: .*--train_split all"
    ) as failure:
        load_classification_data(str(root))
    options = advised_options(failure.value)
    left = len(files) - sum(counts.values())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):  # the second time from the cache
            data = load_classification_data(str(root), **options)
            assert {role: len(split) for role, split in data.splits.items()} == counts
    assert data.label_names == ["a", "b"]
    assert [str(each.message).split(" in ")[0] for each in said] == [f"{left} of {len(files)} files"] * 2 * (left > 0)
    whole = load_splits(str(root), chosen=["all"])
    assert {split: len(rows) for split, rows in whole.items()} == {"all": len(files)}
    with pytest.raises(DataError, match="unclear .* give --split "):
        load_labelled_split(str(root))
    with pytest.raises(DataError, match="is of the splits all and "):
        load_classification_data(
            str(root), **{**options, "train_split": "all", "test_split": options["train_split"].split("+")[0]}
        )


def test_splits_in_the_folders_of_classes_are_asked_for(tmp_path):
    root = make(tmp_path / "images", *(f"{label}/{split}/1.jpg" for label in "ab" for split in ("train", "test")))
    with pytest.raises(DataError, match=r"'a/test', 'a/train', 'b/test', 'b/train' may be .* train/CLASS/image\.jpg"):
        load_classification_data(str(root))


def test_a_split_of_one_class_has_its_labels(tmp_path):
    root = make(tmp_path / "images", "validation/b/1.jpg", "train/a/1.jpg", "test/c/1.jpg", "test/b/2.jpg")
    labels = {name: split["label"][:] for name, split in load_splits(str(root)).items()}
    assert labels == {"train": [0], "validation": [1], "test": [1, 2]}


def test_images_of_a_split_without_classes_have_no_labels(tmp_path):
    root = make(tmp_path / "images", "train/a/1.jpg", "train/b/1.jpg", "test/2.jpg", "test/3.jpg")
    splits = load_splits(str(root))
    assert splits["train"]["label"][:] == [0, 1]
    assert splits["test"]["label"][:] == [None, None]


TABLES: dict[str, tuple[list[str], dict[str, list[int]]]] = {
    "one": (["harbors", "trains"], {"train": [0, 1]}),
    "words": (["photos-train-1", "photos-train-2", "photos-TEST"], {"train": [0, 1], "test": [2]}),
    "folders": (["Training/1", "Training/2", "Testing/1"], {"train": [0, 1], "test": [2]}),
    "numbered": (["data/extra-00000-of-00001", "data/train-00000-of-00001"], {"train": [1], "extra": [0]}),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_in_one_split(name, streaming, tmp_path):
    files, expected = TABLES[name]
    root = write_tables(tmp_path / "images[1]", files)
    splits = load_splits(str(root), streaming=streaming)
    assert {split: [row["number"] for row in rows] for split, rows in splits.items()} == expected
    everything = load_splits(str(root), streaming=streaming, chosen=["all"])["all"]
    assert sorted(row["number"] for row in everything) == [*range(len(files))]


def write_tables(root: Path, files: list[str]) -> Path:
    for number, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict({"number": [number]}).to_parquet(root / f"{file}.parquet")
    return root


@pytest.mark.parametrize("files", [["train", "harbors"], ["train_1", "train_vs_test"], ["train/test", "train/1"]])
def test_tables_of_no_split_or_of_two_are_asked_for(files, tmp_path):
    root = write_tables(tmp_path / "images", files)
    with pytest.raises(
        DataError, match="It is unclear what the splits .* of no split, or of two.*--train_split all"
    ) as failure:
        load_splits(str(root))
    with pytest.warns(
        UserWarning, match="1 of 2 .parquet files in .* left out, as they are in none of the splits 'train'"
    ):
        assert [*load_splits(str(root), chosen=advised(failure.value))] == ["train"]
    assert len(load_splits(str(root), chosen=["all"])["all"]) == 2
    with pytest.warns(UserWarning, match="1 of 2 .parquet files"):
        assert load_splits(str(root), chosen=[f"{files[1]}.parquet"])[f"{files[1]}.parquet"]["number"] == [1]


def test_images_beside_tables_and_those_that_pillow_cannot_open_are_named(tmp_path):
    root = make(write_tables(tmp_path / "images", ["one"]), "sample.jpg")
    with pytest.warns(
        UserWarning, match=r"1 of 1 image in .* left out, as its \.parquet files are the dataset: 'sample"
    ):
        load_splits(str(root))
    root = make(tmp_path / "photos", "1.jpg", "2.HEIC")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"1 of 1 image in .* as Pillow cannot open them: .* '2\.HEIC'"):
            assert len(load_images(str(root))) == 1


# Metadata, archives and clones


@pytest.mark.parametrize("streaming", [False, True])
def test_images_that_no_metadata_names_are_counted_and_named(streaming, tmp_path):
    root = make(tmp_path / "images", "Training/1.jpg", "Training/train ticket.jpg", "Testing/1.jpg", "Testing/3.jpg")
    (root / "Training/metadata.csv").write_text("file_name,label\n1.jpg,x\ntrain ticket.jpg,y\n")
    (root / "Testing/metadata.csv").write_text("file_name,label\n1.jpg,x\n")
    with pytest.warns(UserWarning, match=r"1 of 4 images left out, as no metadata file .*Testing/3\.jpg"):
        splits = load_splits(str(root), streaming=streaming)
    assert {name: [row["label"] for row in undecoded_rows(split)] for name, split in splits.items()} == {
        "train": ["x", "y"], "test": ["x"],
    }  # fmt: skip


def undecoded_rows(rows: Any) -> list[Any]:
    return [*rows.cast_column("image", datasets.Image(decode=False))]


def test_metadata_beside_split_folders_is_asked_for(tmp_path):
    root = make(tmp_path / "images", "train/1.jpg", "test/2.jpg")
    (root / "metadata.csv").write_text("file_name,label\ntrain/1.jpg,x\ntest/2.jpg,y\n")
    with pytest.raises(DataError, match="'test', 'train' may be splits"):
        load_splits(str(root))
    assert load_splits(str(root), chosen=["all"])["all"]["label"][:] == ["x", "y"]
    (root / "metadata.csv").unlink()
    datasets.Dataset.from_dict({"file_name": ["1.jpg"], "label": ["z"]}).to_parquet(root / "train/metadata.parquet")
    with pytest.warns(UserWarning, match="1 of 2 images left out"):
        assert load_splits(str(root))["train"]["label"][:] == ["z"], "metadata is no table of images"


@pytest.mark.parametrize("streaming", [False, True])
def test_words_in_the_names_of_classes_and_archives_are_no_splits(streaming, tmp_path):
    root = make(tmp_path / "images", "train_station/1.jpg", "harbor/2.jpg")
    with zipfile.ZipFile(root / "harbor" / "more.zip", "w") as archive:
        archive.writestr("harbor/3.jpg", b"")
    splits = load_splits(str(root), streaming=streaming)
    assert [*splits] == ["train"]
    assert len(undecoded_rows(splits["train"])) == 3
    (root / "harbor" / "more.zip").rename(root / "test.zip")
    with pytest.raises(DataError, match=r"'test\.zip' may be splits"):
        load_splits(str(root), streaming=streaming)


@pytest.mark.parametrize(
    "card", ["configs:\n- config_name: default\n", "configs:\n- {config_name: few, data_dir: photos}\n"]
)
def test_a_card_that_names_no_files_does_not_bring_words_back(card, tmp_path):
    inner = "photos/" if "photos" in card else ""
    root = make(tmp_path / "images", f"{inner}car/1.jpg", f"{inner}train/2.jpg", f"{inner}car/test.jpg")
    (root / "README.md").write_text(f"---\n{card}---\n")
    for streaming in (False, True):
        splits = load_splits(str(root), streaming=streaming)
        assert [*splits] == ["train"]
        assert [row["label"] for row in undecoded_rows(splits["train"])] == [0, 0, 1]


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


def cached_files() -> list[Path]:
    return sorted(Path(datasets.config.HF_DATASETS_CACHE, folders.CACHE).glob("*.arrow"))


def test_rows_of_an_unchanged_folder_are_written_once(tmp_path):
    root = make(tmp_path / "images", *TREES["splits"])
    first = rows_of(open_folder(root).rows)
    written = [(file, file.stat().st_ino) for file in cached_files()]
    assert len(written) == 3
    assert rows_of(open_folder(root).rows) == first
    assert [(file, file.stat().st_ino) for file in cached_files()] == written
    assert rows_of(open_folder(root, ["all"]).rows) != first, "other splits are other rows"


def change_and_back(root: Path) -> None:
    """Add and remove a file, so that only the times of its folder change."""
    make(root, "train/a/9.jpg")
    (root / "train/a/9.jpg").unlink()


def set_back(root: Path) -> None:
    """Add a file, and restore the modification time of its folder."""
    make(root, "train/a/0.jpg")
    os.utime(root / "train/a", ns=(0, 0))


CHANGES = {
    "added": lambda root: make(root, "train/a/0.jpg"),
    "removed": lambda root: (root / "train/b/1.jpg").unlink(),
    "renamed": lambda root: (root / "val/a/1.jpg").rename(root / "val/a/2.jpg"),
    "moved": lambda root: (root / "val/a/1.jpg").rename(root / "train/a/1_.jpg"),
    "class added": lambda root: make(root, "train/d/1.jpg"),
    "class renamed": lambda root: (root / "train/b").rename(root / "train/bb"),
    "class removed": lambda root: shutil.rmtree(root / "train/b"),
    "empty folder added": lambda root: (root / "train/empty").mkdir(),
    "touched": lambda root: os.utime(root / "train/a"),
    "times set back": set_back,
    "added and removed": change_and_back,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name, tmp_path):
    root = make(tmp_path / "images", *TREES["splits"], "train/a/2.jpg", "train/b/2.jpg", "train/c/2.jpg")
    os.utime(root / "train/a", ns=(0, 0))
    before = open_folder(root).rows
    kept = rows_of(before)
    CHANGES[name](root)
    after = open_folder(root).rows
    assert_rows_of_datasets(root, after)
    assert rows_of(before) == kept
    assert rows_of(pickle.loads(pickle.dumps(before))) == kept, "what a worker of an older run opens"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_damaged_cache_is_written_anew(tmp_path):
    root = make(tmp_path / "images", *TREES["splits"])
    expected = rows_of(open_folder(root).rows)
    assert len(cached_files()) == 3
    for path in cached_files():
        whole = path.read_bytes()
        for damage in (0, len(whole) // 2, len(whole) - 1):
            flip(path, damage)
            assert rows_of(open_folder(root).rows) == expected, (path, damage)
            assert path.read_bytes() == whole
        path.write_bytes(b"")
        assert rows_of(open_folder(root).rows) == expected
        path.unlink()
        assert rows_of(open_folder(root).rows) == expected
        assert path.read_bytes() == whole


@pytest.mark.parametrize("owner, name, error", [
    (Path, "mkdir", PermissionError(13, "Permission denied")),
    (Path, "mkdir", OSError(30, "Read-only file system")),
    (Path, "write_bytes", OSError(28, "No space left on device")),
])  # fmt: skip
def test_cache_that_cannot_be_written_is_no_error(owner, name, error, tmp_path, monkeypatch):
    root = make(tmp_path / "images", *TREES["splits"])

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(owner, name, refuse)
    with pytest.warns(UserWarning, match=f"is not cached: .*{error.strerror}"):
        splits = open_folder(root).rows
    assert not cached_files()
    monkeypatch.undo()
    assert_rows_of_datasets(root, splits)
    assert rows_of(pickle.loads(pickle.dumps(splits))) == rows_of(splits)


def open_and_write(root: Path, found: Path, start: Any) -> None:
    start.wait()
    (found / f"rows of {os.getpid()}").write_text(json.dumps(rows_of(open_folder(root).rows)))


def test_several_processes_open_the_same_files(tmp_path):
    root = make(tmp_path / "images", *TREES["splits"])
    (found := tmp_path / "found").mkdir()
    start = processes.Barrier(4)
    children = [processes.Process(target=open_and_write, args=(root, found, start)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert len({path.read_text() for path in found.glob("rows of *")}) == 1
    assert len(cached_files()) == 3


def test_rows_are_not_copied_into_workers(tmp_path):
    root = make(tmp_path / "images", *(f"{label}/{number}.jpg" for label in "ab" for number in range(2000)))
    split = load_images(str(root))
    assert len(split) == 4000
    assert len(pickle.dumps(split)) < 20_000
