"""Datasets: sources, columns, splits, and errors."""

import hashlib
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Sequence, Value
from pyarrow import parquet
from sklearn.datasets import load_digits as load_scikit_learn_digits

from plain_vit.errors import DataError
from plain_vit.training.data import datasets as data_module
from plain_vit.training.data import (
    find_columns,
    load_classification_data,
    load_images,
    load_labelled_split,
    load_splits,
)
from plain_vit.training.data.datasets import load_images_and_labels
from plain_vit.training.data.glyphs import CHARACTERS, render_glyphs
from tests.hub.endpoint import HubEndpoint


def make_images(count: int, mode: str = "RGB") -> list[PIL.Image.Image]:
    """Return images of 5 by 7 pixels, each in a different uniform colour."""
    return [PIL.Image.new("RGB", (7, 5), (10 * number, 3, 200)).convert(mode) for number in range(count)]


def save_set(folder: Path, labels: list, names: list[str] | None, **splits: list) -> str:
    """Save a data set with the given labels per split, as classes if there are `names`."""
    made = {}
    for split, values in {"train": labels, **splits}.items():
        kind = ClassLabel(names=names) if names else Value("string" if isinstance(values[0], str) else "int64")
        features = Features({"photo": Image(), "kind": kind})
        made[split] = Dataset.from_dict({"photo": make_images(len(values)), "kind": values}, features=features)
    DatasetDict(made).save_to_disk(str(folder))
    return str(folder)


# Embedded data


def test_digits_are_scikit_learns_split_by_class():
    splits = load_splits("digits")
    original = load_scikit_learn_digits()
    assert (len(splits["train"]), len(splits["test"])) == (1437, 360)
    by_class = np.bincount(original.target)
    held_out = np.bincount(splits["test"]["label"])
    assert np.abs(held_out - by_class / 5).max() < 1
    expected = (original.images * 255 / 16).round().astype(np.uint8)
    images = [np.asarray(image) for split in splits.values() for image in split["image"]]
    labels = [label for split in splits.values() for label in split["label"]]
    assert labelled_bytes(images, labels) == labelled_bytes(expected, original.target)


def labelled_bytes(images: Iterable, labels: Iterable) -> list[tuple[int, bytes]]:
    return sorted((int(label), image.tobytes()) for image, label in zip(images, labels, strict=True))


def test_the_held_out_digits_are_always_the_same():
    # Results are compared across versions, so the split must stay the same.
    content = b"".join(image.tobytes() for image in load_splits("digits")["test"]["image"])
    assert hashlib.sha256(content).hexdigest().startswith("ac6ada28192bd51a")


def test_glyphs_depend_on_the_seed_alone():
    images, labels = render_glyphs(70, seed=3)
    again, labels_again = render_glyphs(70, seed=3)
    other, _ = render_glyphs(70, seed=4)
    assert images.shape == (70, 24, 24)
    assert np.array_equal(images, again)
    assert np.array_equal(labels, labels_again)
    assert not np.array_equal(images, other)


def test_glyphs_show_every_character_equally_often_and_never_twice_the_same():
    images, labels = render_glyphs(3 * len(CHARACTERS), seed=0)
    assert np.bincount(labels).tolist() == [3] * len(CHARACTERS)
    assert len({image.tobytes() for image in images}) == len(images)
    assert images.reshape(len(images), -1).std(axis=1).min() > 15, "an empty image"


def test_glyphs_data_set_has_separate_train_and_test_images(monkeypatch):
    monkeypatch.setattr(data_module, "GLYPHS_PER_CLASS", {"train": 2, "test": 2})
    splits = load_splits("glyphs")
    assert splits["train"].features["label"].names == list(CHARACTERS)
    train, test = ({image.tobytes() for image in splits[name]["image"]} for name in ("train", "test"))
    assert len(train) == len(test) == 2 * len(CHARACTERS)
    assert not train & test


# Local data


def test_local_datasets_open_from_every_layout(tmp_path):
    labels = [0, 1, 1, 0, 1, 0]
    saved = save_set(tmp_path / "saved", labels, ["cat", "dog"])
    opened = load_splits(saved)["train"]
    opened.save_to_disk(str(tmp_path / "single"))
    opened.to_parquet(tmp_path / "file.parquet")
    (tmp_path / "parquet").mkdir()
    opened.to_parquet(tmp_path / "parquet" / "train.parquet")
    for row, (image, label) in enumerate(zip(opened["photo"], labels, strict=True)):
        folder = tmp_path / "images" / ["cat", "dog"][label]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{row}.png")
    sources = [saved, *(str(tmp_path / name) for name in ("single", "file.parquet", "parquet", "images"))]
    for source in sources:
        found = load_classification_data(source, validation_fraction=0.34)
        assert found.label_names == ["cat", "dog"]
        assert found.validation is not None
        images = [*found.train["image"], *found.validation["image"]]
        assert sorted(image.getpixel((0, 0)) for image in images) == [(10 * row, 3, 200) for row in range(6)], source
        assert sorted([*found.train["label"], *found.validation["label"]]) == sorted(labels)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_images_of_any_mode_come_as_rgb(mode, tmp_path):
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
    split = Dataset.from_dict({"image": make_images(4, mode), "label": [0, 1, 0, 1]}, features=features)
    DatasetDict(train=split).save_to_disk(str(tmp_path))
    assert {image.mode for image in load_classification_data(str(tmp_path)).train["image"]} == {"RGB"}


def test_words_and_numbers_become_classes(tmp_path):
    words = save_set(tmp_path / "words", ["owl", "bee", "owl", "ant"], None, test=["ant", "owl"])
    found = load_classification_data(words, label_column="kind")
    assert found.label_names == ["ant", "bee", "owl"]
    assert found.train["label"][:] == [2, 1, 2, 0]
    assert found.test is not None
    assert found.test["label"][:] == [0, 2]
    numbers = save_set(tmp_path / "numbers", [30, 4, 4, 30], None)
    assert load_classification_data(numbers, label_column="kind").label_names == ["4", "30"]


def save_labels(folder: Path, name: str, column: pa.Array) -> str:
    """Write a table of images with a column of labels, like pandas."""
    file = BytesIO()
    PIL.Image.new("RGB", (7, 5)).save(file, format="png")
    table = pa.table({"image": pa.array([file.getvalue()] * len(column)), name: column})
    folder.mkdir()
    parquet.write_table(table, folder / "train.parquet")
    return str(folder)


WHOLE: dict[str, tuple[pa.Array, list[str], list[int]]] = {
    "booleans": (pa.array([True, False, True, True]), ["False", "True"], [1, 0, 1, 1]),
    "whole floats": (pa.array([30.0, 4.0, 4.0, 30.0]), ["4", "30"], [1, 0, 0, 1]),
    "whole floats of 32 bits": (pa.array([0, -1, 7, 7], pa.float32()), ["-1", "0", "7"], [1, 0, 2, 2]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_booleans_and_whole_floats_are_classes(name, tmp_path):
    column, names, numbers = WHOLE[name]
    source = save_labels(tmp_path / "set", "label", column)
    data = load_classification_data(source)
    assert (data.label_names, data.train["label"][:]) == (names, numbers)
    split, evaluated = load_labelled_split(source)
    assert (evaluated, split["label"][:]) == (names, numbers)
    _, labels = load_images_and_labels(source)
    assert labels is not None
    assert ([*labels.classes], [*labels.numbers]) == (names, numbers)
    (tmp_path / "names.txt").write_text("".join(f"{name}\n" for name in ("a", "b", "c")))
    if min(numbers := [int(value) for value in column.to_pylist()]) >= 0 and max(numbers) < 3 and "float" in name:
        assert load_classification_data(source, label_names=str(tmp_path / "names.txt")).train["label"][:] == numbers


def test_a_gap_that_pandas_made_nan_is_a_missing_label(tmp_path):
    source = save_labels(tmp_path / "set", "target", pa.array([1.0, 0.0, float("nan"), 1.0]))
    for load in (load_classification_data, load_labelled_split):
        with pytest.raises(DataError, match="1 of the 4 images of the .* split have no label, the first .* row 2"):
            load(source)
    _, labels = load_images_and_labels(source)
    assert labels is not None
    assert [*labels.numbers] == [1, 0, None, 1]


TYPES: dict[str, tuple[pa.Array, str]] = {
    "parts": (pa.array([0.5, 1.0]), "'label' holds float64: .*--problem_type regression"),
    "lists": (pa.array([["a"], ["a", "b"]]), "'label' holds List.*--problem_type multi_label_classification"),
    "dates": (pa.array([1, 2], pa.timestamp("s")), r"'label' holds timestamp\[m?s\]: .*convert the column to integers"),
    "decimals": (pa.array([1, 2], pa.decimal128(5)), r"'label' holds decimal128\(5, 0\): .*convert the column"),
    "structures": (pa.array([{"a": 1}, {"a": 2}]), "'label' holds {'a': Value.*convert the column"),
}


@pytest.mark.parametrize("asked", [None, "label"])
@pytest.mark.parametrize("name", TYPES)
def test_labels_of_another_type_are_named_with_what_to_do(name, asked, tmp_path):
    column, said = TYPES[name]
    source = save_labels(tmp_path / "set", "label", column)
    for load in (load_classification_data, load_labelled_split):
        with pytest.raises(DataError, match=f"{said}.*--label_column"):
            load(source, label_column=asked)


def test_a_stream_of_floats_is_refused_with_its_type(tmp_path):
    source = save_labels(tmp_path / "set", "label", pa.array([0.0, 1.0]))
    with pytest.raises(DataError, match="'label' holds float64"):
        load_classification_data(source, streaming=True)


# Columns


def test_columns_are_found_by_their_types():
    features = Features({"id": Value("int64"), "img": Image(), "note": Value("string"), "labels": ClassLabel(3)})
    assert find_columns(features) == ("img", "labels")


def test_of_several_columns_one_must_be_named():
    features = Features({"img": Image(), "fine_label": ClassLabel(100), "coarse_label": ClassLabel(20)})
    with pytest.raises(DataError, match="2 columns, fine_label and coarse_label, of type ClassLabel.*--label_column"):
        find_columns(features)
    assert find_columns(features, label="coarse_label") == ("img", "coarse_label")
    with pytest.raises(DataError, match="no column 'label', only img .*--label_column"):
        find_columns(features, label="label")


def write_parquet(folder: Path, kind: str, label: str) -> list[tuple[bytes, str]]:
    """Write images like pandas and Spark, and return their files and labels."""
    rng = np.random.default_rng(3)
    names = ["ant", "bee", "cow"]
    rows = []
    for number in range(12):
        file = BytesIO()
        PIL.Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(file, format="png")
        rows.append((file.getvalue(), names[number % 3]))
    path = pa.array([None, *("x.png" for _ in rows[1:])], pa.string())
    binary = pa.large_binary() if kind == "large_binary" else pa.binary()
    files = pa.array([content for content, _ in rows], binary)
    images = pa.StructArray.from_arrays([files, path], ["bytes", "path"]) if kind == "struct" else files
    labels = pa.array([name for _, name in rows])
    if label == "target":
        labels = pa.array([names.index(name) for _, name in rows], pa.uint8())
    folder.mkdir()
    for split in ("train", "test"):
        parquet.write_table(pa.table({"content": images, "id": range(12), label: labels}), folder / f"{split}.parquet")
    return rows


@pytest.mark.parametrize(("kind", "label"), [("struct", "Category"), ("binary", "target"), ("large_binary", "class")])
def test_parquet_without_features_opens_with_images_and_labels_found_by_name(kind, label, tmp_path):
    rows = write_parquet(tmp_path / "set", kind, label)
    data = load_classification_data(str(tmp_path / "set"))
    numbers = ["ant", "bee", "cow"]
    assert data.label_names == (["0", "1", "2"] if label == "target" else numbers)
    for example, (content, name) in zip(data.train, rows, strict=True):
        assert np.array_equal(example["image"], PIL.Image.open(BytesIO(content)))
        assert example["label"] == numbers.index(name)
    assert len(load_images(str(tmp_path / "set"))) == 12
    if label == "target":
        (tmp_path / "names.txt").write_text("\n".join(numbers))
        streamed = load_classification_data(
            str(tmp_path / "set"), streaming=True, label_names=str(tmp_path / "names.txt")
        )
        assert [row["image"]["bytes"] for row in streamed.train] == [content for content, _ in rows]


def test_several_columns_that_may_be_the_labels_are_named():
    features = Features(
        {"image": Image(), "class": Value("string"), "target": Value("int32"), "score": Value("string")}
    )
    with pytest.raises(DataError, match="2 columns, class and target, that may be meant, among"):
        find_columns(features)
    assert find_columns(features, label="score") == ("image", "score")
    assert find_columns(Features({"image": Image(), "class": Value("int8"), "target": Value("float32")}))[1] == "class"
    with pytest.raises(
        DataError, match=r"No column of image \(Image\), kind \(string\) is of type ClassLabel.*--label_column"
    ):
        find_columns(Features({"image": Image(), "kind": Value("string")}))


def test_image_column_must_hold_images():
    features = Features({"img": Sequence(Value("float32")), "label": ClassLabel(2)})
    with pytest.raises(DataError, match="no column of type Image"):
        find_columns(features)
    with pytest.raises(DataError, match="'img' holds no images"):
        find_columns(features, image="img")


# Splits


def test_carved_validation_split_is_stratified_disjoint_and_seeded():
    first = load_classification_data("digits", validation_fraction=0.25, seed=1)
    again = load_classification_data("digits", validation_fraction=0.25, seed=1)
    other = load_classification_data("digits", validation_fraction=0.25, seed=2)
    assert first.validation is not None
    assert again.validation is not None
    assert other.validation is not None
    assert len(first.train) + len(first.validation) == 1437
    share = np.bincount(first.validation["label"]) / np.bincount([*first.train["label"], *first.validation["label"]])
    assert np.abs(share - 0.25).max() < 0.01
    pixels = [{image.tobytes() for image in split["image"]} for split in (first.train, first.validation)]
    assert not pixels[0] & pixels[1]
    assert first.validation["label"][:] == again.validation["label"][:] != other.validation["label"][:]


def test_shots_are_as_many_of_each_class_and_seeded():
    first, again, other = (load_classification_data("digits", shots_per_class=3, seed=seed) for seed in (1, 1, 2))
    assert np.bincount(first.train["label"]).tolist() == [3] * 10
    images = [[image.tobytes() for image in found.train["image"]] for found in (first, again, other)]
    assert images[0] == images[1] != images[2]
    assert first.test is not None
    assert len(first.test) == 360


def test_a_trial_takes_some_images_of_each_split_by_its_seed():
    whole = load_classification_data("digits", validation_fraction=0.1)
    some = load_classification_data("digits", validation_fraction=0.1, max_images=150)
    assert {role: len(split) for role, split in some.splits.items()} == {"train": 150, "validation": 144, "test": 150}
    assert some.train_images == 150
    assert some.label_names == whole.label_names
    for role in ("train", "test"):
        images = [image.tobytes() for image in some.splits[role]["image"]]
        everything = [image.tobytes() for image in whole.splits[role]["image"]]
        assert set(images) <= set(everything)
        assert len(set(some.splits[role]["label"][:])) == 10
    again, other = (load_classification_data("digits", max_images=150, seed=seed) for seed in (0, 1))
    assert again.train["label"][:] != other.train["label"][:]
    assert again.train["label"][:] == load_classification_data("digits", max_images=150).train["label"][:]
    with pytest.raises(DataError, match="max_images is 0: expected at least 1"):
        load_classification_data("digits", max_images=0)


def test_validation_split_of_the_set_is_found_by_its_name(tmp_path):
    source = save_set(tmp_path, [0, 1, 0], ["a", "b"], valid=[1], test=[0, 1])
    found = load_classification_data(source)
    assert found.validation is not None
    assert found.validation["label"][:] == [1]


def test_test_split_with_secret_labels_is_left_out_unless_named(tmp_path):
    source = save_set(tmp_path, [0, 1, 0], ["a", "b"], validation=[1, 0], test=[-1, -1])
    with pytest.warns(UserWarning, match="The 2 images of the test split left out, as none has a label"):
        assert load_classification_data(source).test is None
    with pytest.raises(DataError, match="2 labels of the test split are outside 0 to 1"):
        load_classification_data(source, test_split="test")


# Refusals


@pytest.mark.parametrize(
    "name, message",
    [
        ("./nothing/here", "no file or folder"),
        ("/nothing/here", "no file or folder"),
        ("images.parquet", "no file or folder"),
        ("nobody/nothing", "Available offline: digits, glyphs"),
        ("digitz", "folders of save_to_disk; did you mean 'digits'\\?$"),
        ("cifar10", "folders of save_to_disk\\.$"),
    ],
)
def test_unknown_set_is_refused(name, message):
    with pytest.raises(DataError, match=message):
        load_splits(name)


@pytest.mark.parametrize("name", [
    "data/images/cats", "/data/cats", "~/cats", "../cats", "my photos", "photos/", "C:\\photos", "cats/1.jpg",
    "set/train.tar",
])  # fmt: skip
def test_a_path_of_nothing_is_one_line_at_once(name: str, hub: HubEndpoint) -> None:
    with pytest.raises(DataError, match=r"^There is no file or folder [^\n]*: correct the path\.$"):
        load_splits(name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["photos/cats", "catz", "alice/photos-v1.0"])
def test_the_hub_is_asked_once_for_a_dataset_that_it_has_not(name: str, hub: HubEndpoint) -> None:
    with pytest.raises(
        DataError, match=f"no file or folder {name}, and the Hub has no dataset of this name"
    ) as failure:
        load_splits(name)
    assert hub.requests == [("GET", f"/api/datasets/{name}", 404)]
    assert "\n" not in str(failure.value)


def test_a_hub_that_does_not_answer_is_asked_once(hub: HubEndpoint) -> None:
    for method in ("GET", "HEAD"):
        hub.lose_answer(method, "/", times=20)
    with pytest.raises(DataError, match="'photos/cats' is not cached and the Hub cannot be reached"):
        load_splits("photos/cats")
    assert len(hub.requests) == 1


def test_nothing_is_asked_offline(hub: HubEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="'photos/cats' is not cached and the Hub cannot be reached"):
        load_splits("photos/cats")
    assert hub.requests == []


def test_a_dataset_of_the_hub_is_opened_also_where_the_hub_is_gone(hub: HubEndpoint, tmp_path: Path) -> None:
    save_set(tmp_path / "saved", [0, 1, 0], ["a", "b"])
    load_splits(str(tmp_path / "saved"))["train"].to_parquet(tmp_path / "train.parquet")
    hub.add_repository("alice/TinyPhotos", "dataset", {"train.parquet": (tmp_path / "train.parquet").read_bytes()})
    assert load_splits("alice/TinyPhotos")["train"]["kind"][:] == [0, 1, 0]
    for method in ("GET", "HEAD", "POST"):
        hub.lose_answer(method, "/", times=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # otherwise it retries for half a minute
        assert load_splits("alice/TinyPhotos")["train"]["kind"][:] == [0, 1, 0]


def test_folder_and_file_without_data_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no images")
    with pytest.raises(DataError, match="holds no dataset"):
        load_splits(str(tmp_path))
    with pytest.raises(DataError, match="is not a dataset"):
        load_splits(str(tmp_path / "notes.txt"))


def test_a_clone_of_a_dataset_has_the_subsets_and_splits_that_its_card_names(tmp_path):
    card = ["---", "configs:"]
    for subset, count in {"few": 6, "many": 9}.items():
        kind = Features({"image": Image(), "label": ClassLabel(names=[f"{subset} {letter}" for letter in "abc"])})
        rows = {"image": [PIL.Image.new("RGB", (5, 5))] * count, "label": [number % 3 for number in range(count)]}
        (tmp_path / "set" / subset).mkdir(parents=True)
        Dataset.from_dict(rows, features=kind).to_parquet(tmp_path / "set" / subset / "train.parquet")
        files = f"[{{split: learn, path: {subset}/train.parquet}}]"
        card += [f"- {{config_name: {subset}, data_files: {files}}}"]
    place = str(tmp_path / "set")
    with pytest.raises(DataError, match="has no subset 'few', as its README.md names none"):
        load_splits(place, subset="few")
    (tmp_path / "set" / "README.md").write_text("\n".join([*card, "---", "Words."]))
    for streaming in (False, True):
        splits = load_splits(place, subset="many", streaming=streaming)
        assert list(splits) == ["learn"]
        assert splits["learn"].features["label"].names == ["many a", "many b", "many c"]
    assert len(load_splits(place, subset="few")["learn"]) == 6
    for unknown in (None, "none"):
        with pytest.raises(DataError, match="few.*--dataset_subset"):
            load_splits(place, subset=unknown)
    (tmp_path / "set" / "few" / "train.parquet").unlink()  # like a clone of which only some files were fetched
    with pytest.raises(DataError, match="set cannot be opened: .*few/train.parquet"):
        load_splits(place, subset="few")
    (tmp_path / "set" / "README.md").write_text("---\n[\n---\n")
    assert len(load_splits(place)["train"]) == 9
    with pytest.raises(DataError, match="digits has no subset 'few'"):
        load_splits("digits", subset="few")


def test_splits_of_other_classes_are_not_joined(tmp_path):
    kinds = (ClassLabel(names=["a", "b"]), ClassLabel(names=["b", "c"]), Value("int64"))
    splits = {
        f"part{number}": Dataset.from_dict(
            {"image": [PIL.Image.new("RGB", (5, 5))] * 2, "label": [0, 1]},
            features=Features({"image": Image(), "label": kind}),
        )
        for number, kind in enumerate(kinds)
    }
    DatasetDict(splits).save_to_disk(tmp_path / "set")
    for joined in ("part0+part1", "part0+part2"):
        for streaming in (False, True):
            with pytest.raises(DataError, match=r"The splits part0 and part[12] cannot be joined: .*label"):
                load_classification_data(str(tmp_path / "set"), train_split=joined, streaming=streaming)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "names.txt has no names: expected one class per line"),
        (b"\xff\xfea\nb\n", "names.txt is not UTF-8 text"),
        (b"\xef\xbb\xbfcat\r\ndog\r\n", None),
    ],
    ids=["empty", "UTF-16", "with a byte order mark"],
)
def test_a_file_of_names_of_another_kind(content, said, tmp_path):
    rows = {"image": [PIL.Image.new("RGB", (5, 5))] * 2, "label": [1, 0]}
    features = Features({"image": Image(), "label": Value("int64")})
    DatasetDict(train=Dataset.from_dict(rows, features=features)).save_to_disk(tmp_path / "set")
    (tmp_path / "names.txt").write_bytes(content)
    options = {"label_names": str(tmp_path / "names.txt")}
    if said is None:
        assert load_classification_data(str(tmp_path / "set"), **options).label_names == ["cat", "dog"]
        return
    with pytest.raises(DataError, match=said):
        load_classification_data(str(tmp_path / "set"), **options)


# labels of the training split, class names, labels of other splits, options, and the expected message
REFUSED: dict[str, tuple[list[Any], list[str] | None, dict[str, list[Any]], dict[str, Any], str]] = {
    "unknown split": ([0, 1], ["a", "b"], {"test": [0]}, {"validation_split": "dev"},
                      "no split 'dev', only train, test: correct --validation_split"),
    "doubled split": ([0, 1], ["a", "b"], {"test": [0]}, {"validation_split": "test"}, "cannot have two roles"),
    "no label": ([-1, -1], ["a", "b"], {}, {}, "2 labels of the train split are outside 0 to 1.* -1 at row 0"),
    "one without": ([0, 1, -1, 0], ["a", "b"], {}, {}, "1 labels of the train split are outside 0 to 1.* -1 at row 2"),
    "one class": ([1, 1], ["a", "b"], {}, {}, "All training images are 'b'"),
    "class of the test alone": (["a", "b"], None, {"test": ["a", "c"]}, {"label_column": "kind"},
                                r"the training split lacks: \['c'\]"),
    "second validation": ([0, 1, 0], ["a", "b"], {"valid": [1], "test": [0, 1]}, {"validation_fraction": 0.5},
                          "already has a validation split"),
}  # fmt: skip


@pytest.mark.parametrize("labels, names, splits, options, said", REFUSED.values(), ids=REFUSED)
def test_splits_and_labels_that_cannot_be_learnt_from_are_refused(labels, names, splits, options, said, tmp_path):
    source = save_set(tmp_path, labels, names, **splits)
    with pytest.raises(DataError, match=said):
        load_classification_data(source, **options)


def test_classes_that_differ_between_splits_are_refused(tmp_path):
    features = [Features({"image": Image(), "label": ClassLabel(names=names)}) for names in (["a", "b"], ["b", "a"])]
    splits = [Dataset.from_dict({"image": make_images(2), "label": [0, 1]}, features=each) for each in features]
    DatasetDict(train=splits[0], test=splits[1]).save_to_disk(str(tmp_path))
    with pytest.raises(DataError, match="classes of the test split differ from those of the training split"):
        load_classification_data(str(tmp_path))


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_impossible_fraction_is_refused(fraction):
    with pytest.raises(DataError, match="at least 0 and less than 1"):
        load_classification_data("digits", validation_fraction=fraction)
    with pytest.raises(DataError, match="No stratified fraction"):
        load_classification_data("digits", validation_fraction=0.001)
