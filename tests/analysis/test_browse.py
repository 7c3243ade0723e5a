"""`plain-vit browse`: inputs, the map and its neighbours, thumbnails, written files, and errors."""

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from plain_vit.browse import DatasetOptions, arrays, write_page
from plain_vit.browse.thumbnails import COLUMNS, TILE, thumbnail
from plain_vit.errors import DataError, OutputError, OutputExistsError
from plain_vit.training.data import load_splits
from plain_vit_command import main
from tests.inference.test_bulk_inference import extract, images, model, predict  # noqa: F401

COUNT, WIDTH = 7, 5


def features_of(count: int = COUNT, width: int = WIDTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def lists(features: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(features.flatten()), features.shape[1])


def write_table(file: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), file)
    return file


def page_of(features: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Write a page and return the data in it."""
    written = write_page(features, out, progress=False, **options)
    return data_in(written.path)


def data_in(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    return json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[0])


def numbers(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=kind)


def neighbours_in(data: dict[str, Any]) -> dict[int, list[int]]:
    """Return the rows of the neighbours of each row."""
    found = numbers(data["neighbours"], "<u4").reshape(data["count"], -1)
    return {row: [data["rows"][i] for i in near] for row, near in zip(data["rows"], found, strict=True)}


# The map and its neighbours


@pytest.mark.parametrize("memory", [arrays.SIMILARITIES, 100], ids=["at once", "in chunks"])
def test_neighbours_are_those_of_scikit_learn(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "SIMILARITIES", memory)
    features = features_of(43, 6)
    neighbours, similarities = arrays.nearest_neighbours(arrays.unit_length(features), list)
    distances, expected = NearestNeighbors(n_neighbors=13, metric="cosine").fit(features).kneighbors(features)
    assert np.array_equal(neighbours, expected[:, 1:])
    assert np.allclose(similarities, 1 - distances[:, 1:], atol=1e-6)


def test_images_with_equal_features_are_each_others_neighbours_in_their_order() -> None:
    features = arrays.unit_length(np.repeat(features_of(3), 3, axis=0))
    neighbours, similarities = arrays.nearest_neighbours(features, list)
    for image, near in enumerate(neighbours):
        first = image // 3 * 3
        assert list(near[:2]) == [other for other in range(first, first + 3) if other != image]
    assert np.allclose(similarities[:, :2], 1)


@pytest.mark.parametrize(("count", "width"), [(2, 5), (9, 1), (40, 7), (12, 900)])
def test_the_map_is_that_of_principal_components(count: int, width: int) -> None:
    features = arrays.unit_length(features_of(count, width))
    places, held = arrays.principal_map(features)
    assert places.shape == (count, 2)
    components = min(2, count, width)
    expected = PCA(components, svd_solver="full").fit(features)
    assert held == pytest.approx(expected.explained_variance_ratio_.sum(), rel=1e-4)
    if components == 2:  # distances on the map equal those of the components up to scale
        projected = expected.transform(features)
        scale = 65535 / np.ptp(projected, axis=0).max()
        distances = np.linalg.norm(projected[:, None] - projected, axis=-1) * scale
        assert np.allclose(np.linalg.norm(places[:, None].astype(float) - places, axis=-1), distances, atol=60)


def test_features_without_variance_or_length_have_a_map() -> None:
    for features in (
        np.zeros((4, 3), np.float32),
        np.full((4, 3), 3e38, np.float32),
        np.full((4, 3), 1e-40, np.float32),
    ):
        unit = arrays.unit_length(features)
        assert np.isfinite(unit).all()
        assert len(np.unique(arrays.principal_map(unit)[0], axis=0)) == 1
        assert np.isfinite(arrays.nearest_neighbours(unit, list)[1]).all()


def test_neighbours_on_the_map_are_near_each_other_in_the_order() -> None:
    places = np.random.default_rng(0).integers(0, 2**16, (2000, 2)).astype(np.uint16)
    order = arrays.similar_together(places)
    assert sorted(order) == list(range(2000))
    steps = np.linalg.norm(np.diff(places[order].astype(float), axis=0), axis=1)
    assert np.median(steps) < 0.1 * np.median(np.linalg.norm(np.diff(places.astype(float), axis=0), axis=1))


@pytest.mark.slow  # numba compiles for most of a minute
def test_umap_is_used_where_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("umap", reason="umap-learn is not installed: the extra `umap` has it")
    clusters = np.repeat(np.eye(4, 9, dtype=np.float32), 20, axis=0) + 0.05 * features_of(80, 9)
    file = write_table(tmp_path / "features.parquet", row=np.arange(80), feature=lists(clusters))
    threads = torch.get_num_threads()
    data = page_of(file, tmp_path / "page", map_kind="umap")
    assert torch.get_num_threads() == threads, "numba has changed the threads of torch"
    places = numbers(data["places"], "<u2").reshape(80, 2).astype(float)
    group = np.asarray(data["rows"]) // 20
    centres = np.stack([places[group == each].mean(axis=0) for each in range(4)])
    assert (np.linalg.norm(places[:, None] - centres, axis=-1).argmin(axis=1) == group).all()
    assert "by UMAP" in (tmp_path / "page" / "index.html").read_text()
    file = write_table(tmp_path / "three.parquet", feature=lists(features_of(3)))
    with pytest.raises(DataError, match="at least 4 images"):
        write_page(file, tmp_path / "none", map_kind="umap")


# Inputs


@pytest.mark.parametrize("kind", ["fixed", "list", "large_list", "float16", "float64", "column_8", "int8"])
def test_lists_of_any_kind_of_number_are_features(kind: str, tmp_path: Path) -> None:
    features = np.rint(8 * features_of())  # exact in each kind
    values: Any = lists(features)
    if kind in ("list", "large_list"):
        values = values.cast((pa.list_ if kind == "list" else pa.large_list)(pa.float32()))
    elif kind in ("float16", "float64", "int8"):
        values = lists(features.astype(kind))
    name = "feature_8" if kind == "column_8" else "feature"
    file = write_table(tmp_path / "features.parquet", **{"row": np.arange(COUNT), name: values})
    data = page_of(file, tmp_path / "page")
    similarity = arrays.unit_length(features) @ arrays.unit_length(features).T
    np.fill_diagonal(similarity, -2)
    assert all(
        near[0] in np.flatnonzero(np.isclose(similarity[row], similarity[row].max()))
        for row, near in neighbours_in(data).items()
    )


def test_the_output_of_the_scripts_is_read_with_its_labels(model: Path, images: Path, tmp_path: Path) -> None:  # noqa: F811
    options = {"model": str(model), "dataset": str(images)}
    extract(**options, output_dir=str(tmp_path / "features"), feature="mean", layers=[1, 3], dtype="float16")
    predict(**options, output_dir=str(tmp_path / "predictions"))
    with pytest.raises(DataError, match=r"'feature_1', 'feature_3': give one with --column"):
        write_page(tmp_path / "features", tmp_path / "page")
    data = page_of(
        tmp_path / "features", tmp_path / "page", column="feature_3", predictions=tmp_path / "predictions",
    )  # fmt: skip
    assert sorted(data["rows"]) == list(range(23))
    stored = parquet.read_table(tmp_path / "predictions" / "data").to_pydict()
    predicted = [data["classes"][number] for number in numbers(data["predicted"], "<i4")]
    assert predicted == [stored["label"][row] for row in data["rows"]]
    assert numbers(data["probability"], "<f4").tolist() == [stored["probability"][row] for row in data["rows"]]
    paths = [f"{images}/{data['prefix']}{path}" for path in data["paths"]]
    assert paths == [stored["path"][row] for row in data["rows"]]
    page = (tmp_path / "page" / "index.html").read_text()
    assert not [place for place in (images, model.parent, tmp_path) if str(place) in page]
    assert data["true"] is None
    assert data["broken"] == []
    alone = page_of(tmp_path / "predictions", tmp_path / "alone")
    assert alone["places"] is None
    assert alone["rows"] == list(range(23))


def write_run(folder: Path, settings: dict[str, Any], **columns: Any) -> None:
    """Write the output folder of a run, in one shard."""
    (folder / "data").mkdir(parents=True)
    file = write_table(folder / "data" / "part-0.parquet", **columns)
    manifest = {"complete": True, "settings": settings, "shards": {file.name: parquet.read_metadata(file).num_rows}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_hub_data_get_thumbnails_and_labels_from_the_dataset(tmp_path: Path, images: Path) -> None:  # noqa: F811
    run = {"dataset": "digits", "split": "test", "images": 360}
    rows_without_the_broken = np.delete(np.arange(360), [5, 17])
    columns = {"path": pa.nulls(358, pa.string()), "feature": lists(features_of(358))}
    write_run(tmp_path / "features", run, row=rows_without_the_broken, **columns)
    for moved, why in (
        ({"contents": "abc"}, "have other contents than those of"),
        ({"dataset": "/no/data"}, "/no/data"),
    ):
        write_run(tmp_path / "moved" / next(iter(moved)), run | moved, row=rows_without_the_broken, **columns)
        written = write_page(tmp_path / "moved" / next(iter(moved)), tmp_path / "without" / next(iter(moved)))
        assert data_in(written.path)["thumbnails"] is None
        assert data_in(written.path)["true"] is None
        assert [file.name for file in written.path.parent.iterdir()] == ["index.html"]
        assert "There are no thumbnails" in (page := written.path.read_text())
        assert "This page is without" in page
        assert re.search(f"without .*, the dataset of the run .*{why}.*: give --dataset", str(written))
    data = page_of(tmp_path / "features", tmp_path / "page", dataset=DatasetOptions("digits"))  # the run's split
    assert page_of(tmp_path / "features", tmp_path / "by_manifest") == data
    rows = load_splits("digits")["test"]
    assert numbers(data["true"], "<i4").tolist() == [rows["label"][row] for row in data["rows"]]
    sheet = Image.open(tmp_path / "page" / data["thumbnails"]["files"][0]).convert("RGB")
    for place in (0, 57):
        left, top = place % COLUMNS * TILE, place // COLUMNS * TILE
        tile = np.asarray(sheet.crop((left, top, left + TILE, top + TILE)), dtype=float)
        shown = np.asarray(rows[data["rows"][place]]["image"].convert("RGB").resize((TILE, TILE), 0), dtype=float)
        assert np.abs(tile - shown).mean() < 8
    for of_run, wrong, named in (
        (
            "train",
            DatasetOptions("digits", split="test"),
            "was written with --split train: give it or omit it, .*'test'",
        ),
        ("train", DatasetOptions(str(images), split=None), "was written for 360 images, and the images of .* are 23"),
        (None, DatasetOptions("digits", split="test"), "was written without --split: omit it, instead of 'test'"),
    ):
        (tmp_path / "features" / "manifest.json").write_text(
            json.dumps({"complete": True, "settings": run | {"split": of_run}, "shards": {"part-0.parquet": 358}})
        )
        with pytest.raises(DataError, match=named):
            write_page(tmp_path / "features", tmp_path / "none", dataset=wrong)


def test_which_column_has_the_true_labels(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"feature": lists(features_of()), "label": [*"aabbccc"]}
    plain = page_of(write_table(tmp_path / "1.parquet", **columns), tmp_path / "1")
    assert plain["predicted"] is None
    assert plain["classes"] == [*"abc"]
    columns |= {"probability": np.full(COUNT, 0.5, np.float32)}
    predictions = page_of(write_table(tmp_path / "2.parquet", **columns), tmp_path / "2")
    assert predictions["true"] is None
    assert predictions["predicted"] is not None
    columns |= {"truth": [*"abcabc", None]}
    both = page_of(write_table(tmp_path / "3.parquet", **columns), tmp_path / "3", label_column="truth")
    assert sorted(numbers(both["true"], "<i4")) == [-1, 0, 0, 1, 1, 2, 2]


# Thumbnails


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "CMYK", "LA"])
def test_thumbnails_are_upright_whole_and_of_bounded_size(mode: str, tmp_path: Path) -> None:
    picture = Image.new("RGB", (300, 100), "black")
    picture.paste("white", (0, 0, 150, 100))
    suffix, exif = ("jpg", Image.Exif()) if mode in ("RGB", "L", "CMYK") else ("png", Image.Exif())
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    picture.convert(mode).save(tmp_path / f"image.{suffix}", exif=exif)
    tile = thumbnail({"path": str(tmp_path / f"image.{suffix}"), "bytes": None})
    assert tile.mode == "RGB"
    assert tile.size == (32, 96)
    assert min(tile.getpixel((16, 10))) > 240
    assert max(tile.getpixel((16, 85))) < 15


def test_small_images_are_enlarged_by_whole_pixels() -> None:
    from io import BytesIO

    file, pixels = BytesIO(), np.random.default_rng(0).integers(0, 256, (7, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "png")
    tile = thumbnail({"path": None, "bytes": file.getvalue()})
    assert np.array_equal(np.asarray(tile), pixels.repeat(9, axis=0).repeat(9, axis=1))


def test_images_that_cannot_be_read_are_named_and_the_others_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "<img src=x>.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    Image.new("RGB", (9, 5)).save(tmp_path / "good.png")
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "unknown.dds").write_bytes(b"DDS " + (124).to_bytes(4, "little") + bytes(120))  # not an OSError
    names = [
        "unknown.dds",
        "pipe.png",
        "text.png",
        "<img src=x>.png",
        "good.png",
        "bomb.png",
        "deep.png",
        "a\0b",
        "/dev/zero",
        "http://h/x",
    ]
    paths = [str(tmp_path / name) if "/" not in name else name for name in names]
    file = write_table(tmp_path / "features.parquet", path=paths, feature=lists(features_of(len(paths))))
    assert main(["browse", str(file), "--out", str(tmp_path / "page")]) == 0
    printed = capsys.readouterr()
    assert "10 images" in printed.out
    assert "9 of them cannot be read" in printed.out
    named = [line for line in printed.err.splitlines() if line.startswith("plain-vit: cannot be read: ")]
    assert len(named) == 9
    data = data_in(tmp_path / "page" / "index.html")
    readable = [data["prefix"] + path for i, path in enumerate(data["paths"]) if i not in data["broken"]]
    assert readable == [f"{tmp_path.name}/good.png"]
    page = (tmp_path / "page" / "index.html").read_text()
    assert "9 images cannot be read" in page
    assert str(tmp_path) not in page
    assert "<img src=x>" not in page


# Written files


def test_equal_inputs_make_equal_bytes(tmp_path: Path, images: Path) -> None:  # noqa: F811
    paths = sorted(map(str, images.glob("*.png")))
    file = write_table(tmp_path / "features.parquet", path=paths, feature=lists(features_of(len(paths), 9)))
    for name in ("one", "two"):
        write_page(file, tmp_path / name, progress=False)
    one, two = ({each.name: each.read_bytes() for each in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert set(one) == {"index.html", "thumbnails-0000.webp"}


HOSTILE = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ["</script><script>alert(1)</script>", "<!--<script>", "]]>", "{0}", "\u2028", "\u202egpj.exe", "\x1b[31m",
     "x" * 5000]
)  # fmt: skip


@settings(max_examples=6, deadline=None)
@given(texts=st.lists(HOSTILE, min_size=3, max_size=3), labels=st.lists(HOSTILE, min_size=3, max_size=3))
def test_any_text_comes_back_as_text_and_adds_no_element(
    texts: list[str], labels: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    file = write_table(
        folder / "features.parquet", path=texts, feature=lists(features_of(3)), label=labels, true_label=labels[::-1],
        probability=np.full(3, 0.5, np.float32),
    )  # fmt: skip
    data = page_of(file, folder / "page")
    for i in range(3):
        path = data["prefix"] + data["paths"][i]
        assert path.isprintable()
        assert len(path) <= 1001
    assert sorted(data["prefix"] + path for path in data["paths"] if len(path) < 1000) == sorted(
        text for text in (shown(text) for text in texts) if len(text) < 1000
    )
    page = (folder / "page" / "index.html").read_text(encoding="utf-8")
    assert page.lower().count("<script") == 2
    assert page.count("<!--") == 0
    assert len(page.split('id="data">')) == 2


def shown(text: str) -> str:
    from plain_vit.errors import printable

    return printable(text.replace("\n", "\\n"))[:2000]


# Errors


def refused(tmp_path: Path, features: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as raised:
        write_page(features, tmp_path / "page", progress=False, **options)
    assert not (tmp_path / "page").exists()
    assert not list(tmp_path.glob(".plain-vit-*"))
    return str(raised.value)


def nan_at(row: int, value: float = np.nan) -> np.ndarray:
    features = features_of()
    features[row, 2] = value
    return features


TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "no rows": ({"feature": lists(features_of())[:0]}, "has no images"),
    "one image": ({"feature": lists(features_of(1))}, "There is one image, which has no neighbours"),
    "NaN": ({"feature": lists(nan_at(4))}, "NaN or infinite values, first in row 4 of the table"),
    "infinite": ({"feature": lists(nan_at(3, -np.inf).astype(np.float16))}, "first in row 3"),
    "too large for float32": ({"feature": lists(nan_at(1, 1).astype(np.float64) * 1e300)}, "first in row 0"),
    "a missing feature": ({"feature": pa.array([[1.0], None])}, "differ in length or are empty"),
    "a missing value": ({"feature": pa.array([[1.0, 2.0], [None, 1.0]])}, "NaN or infinite values, first in row 1"),
    "lengths": ({"feature": pa.array([[1.0], [1.0, 2.0]])}, "differ in length or are empty"),
    "no values": ({"feature": pa.array([[], []], pa.list_(pa.float32()))}, "differ in length or are empty"),
    "a grid": ({"feature": pa.FixedSizeListArray.from_arrays(lists(features_of(6)), 2)}, "a grid of patches"),
    "text": ({"feature": ["a", "b"]}, "has neither features nor predictions"),
    "lists of text": ({"feature": [["a"], ["b"]]}, "has neither features nor predictions"),
    "numbers that were predicted": (
        {"labels": [["a"], ["a"]], "values": pa.array([[1.0], [2.0]])},
        "has neither features nor predictions",
    ),
    "rows of text": ({"row": ["a", "b"], "feature": lists(features_of(2))}, "'row' .* is string: expected numbers"),
    "empty rows": ({"row": [1, None], "feature": lists(features_of(2))}, "'row' .* has empty cells"),
    "paths of lists": ({"path": [["a"], ["b"]], "feature": lists(features_of(2))}, "'path' .* expected texts"),
}


@pytest.mark.parametrize("title", TABLES)
def test_tables_that_cannot_be_shown_are_refused(title: str, tmp_path: Path) -> None:
    columns, named = TABLES[title]
    assert re.search(named, refused(tmp_path, write_table(tmp_path / "features.parquet", **columns)))


def test_a_number_of_rows_that_no_browser_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plain_vit.browse.images.MOST_IMAGES", COUNT - 1)
    file = write_table(tmp_path / "features.parquet", feature=lists(features_of()))
    assert "has 7 images, and a page shows at most 6" in refused(tmp_path, file)


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    file = write_table(tmp_path / "features.parquet", path=["a"] * COUNT, feature=lists(features_of()))
    assert "no column 'x', only 'path', 'feature': correct --column" in refused(tmp_path, file, column="x")
    assert "no column 'x', only 'path', 'feature'" in refused(tmp_path, file, label_column="x")
    assert "is string: expected a list of numbers" in refused(tmp_path, file, column="path")


def test_files_and_folders_that_are_no_output_are_refused(tmp_path: Path) -> None:
    assert "There is no file or folder" in refused(tmp_path, tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("no parquet")
    assert "cannot be read as a parquet file" in refused(tmp_path, tmp_path / "text.parquet")
    whole = write_table(tmp_path / "whole.parquet", feature=lists(features_of(3000, 40))).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:100] + bytes(200_000) + whole[200_100:])
    assert "cannot be read" in refused(tmp_path, tmp_path / "cut.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "has no parquet files" in refused(tmp_path, folder)
    write_table(folder / "a.parquet", feature=lists(features_of()))
    write_table(folder / "b.parquet", other=lists(features_of()))
    assert "b.parquet has other columns than" in refused(tmp_path, folder)


def test_a_run_that_is_incomplete_by_its_manifest_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "data").mkdir(parents=True)
    write_table(folder / "data" / "part-0.parquet", feature=lists(features_of()))
    shards = {"part-0.parquet": COUNT, "part-1.parquet": 2}
    for manifest, named in (
        ({"complete": False, "settings": {}}, r"did not end: run its script again with --resume"),
        (
            {"complete": True, "settings": {}, "shards": shards},
            r"lacks shards that its manifest lists: 'part-1.parquet'",
        ),
        ({"complete": True, "settings": {}, "shards": {}}, "its manifest lists no shards"),
        ({"complete": True, "settings": 3, "shards": shards}, "is not that of a run"),
        ({"complete": True, "shards": {"part-0.parquet": 3}, "settings": {}}, "has 7 rows, and its manifest lists 3"),
    ):
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert re.search(named, refused(tmp_path, folder))
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        write_page(folder, tmp_path / "page")
    (folder / "manifest.json").write_text(
        json.dumps({"complete": True, "settings": {}, "shards": {"part-0.parquet": 7}})
    )
    assert page_of(folder, tmp_path / "page")["count"] == COUNT


def test_predictions_and_datasets_of_other_images_are_refused(tmp_path: Path, images: Path) -> None:  # noqa: F811
    paths = sorted(map(str, images.glob("*.png")))[:COUNT]
    chance, features = np.full(COUNT, 0.5, np.float32), lists(features_of())
    first = write_table(tmp_path / "1.parquet", row=np.arange(COUNT), path=paths, feature=features)
    labels = {"label": ["a"] * COUNT, "probability": chance}
    for name, columns, named in (
        ("other rows", {"row": np.arange(3, 3 + COUNT), **labels}, "3 images are not among the predictions"),
        ("other paths", {"row": np.arange(COUNT), "path": paths[::-1], **labels}, "are of other images"),
        ("a stream", {"row": [0, 1, 2, 3, 0, 1, 2], **labels}, "occurs twice"),
        ("no rows", labels, "both need a column `row`"),
        ("no predictions", {"row": np.arange(COUNT), "feature": features}, "has no predictions"),
    ):
        second = write_table(tmp_path / f"{name}.parquet", **columns)
        assert named in refused(tmp_path, first, predictions=second)
    other = tmp_path / "other"
    other.mkdir()
    for number in range(COUNT):
        Image.new("RGB", (5, 4)).save(other / f"{number}.jpg")
    assert "has the row of" in refused(tmp_path, first, dataset=DatasetOptions(str(other)))


OF_RUN = {"dataset": "digits", "dataset_subset": None, "split": "test", "images": COUNT, "contents": "abc"}
STREAMED = {"split": None, "images": None, "contents": None}
# Changes of the predictions' manifest, number of rows, and the expected error.
OTHER_RUNS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "split": (
        {"split": "train", "contents": "def"},
        COUNT,
        "split 'train', expected 'test'. Give those of the same data",
    ),
    "dataset": ({"dataset": "glyphs", "contents": None}, COUNT, "dataset 'glyphs', expected 'digits'"),
    "number": ({"images": 9, "contents": "def"}, COUNT, "images 9, expected 7"),
    "contents": ({"contents": "def"}, COUNT, "files of other contents"),
    "a copy": ({"dataset": "copy/of/it"}, COUNT, None),
    "a stream": (STREAMED | {"split": "test"}, COUNT, None),
    "a stream by default": (STREAMED, COUNT, None),
    "split by default": ({"split": None}, COUNT, None),
    "a longer stream": (STREAMED, 9, "split None, expected 'test'"),
    "a stream of another split": (STREAMED | {"split": "train"}, COUNT, "split 'train', expected 'test'"),
    "contents, by default": ({"split": None, "contents": "def"}, COUNT, "files of other contents"),
    "number, by default": ({"split": None, "contents": None, "images": 9}, 9, "images 9, expected 7"),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_predictions_of_another_split_or_dataset_are_refused_by_the_manifests(name: str, tmp_path: Path) -> None:
    changed, rows, named = OTHER_RUNS[name]
    predictions: dict[str, Any] = {"label": ["a"] * rows, "probability": np.full(rows, 0.5, np.float32)}
    write_run(tmp_path / "features", OF_RUN, row=np.arange(COUNT), feature=lists(features_of()))
    write_run(tmp_path / "others", OF_RUN | changed, row=np.arange(rows), **predictions)
    if named is None:
        assert page_of(tmp_path / "features", tmp_path / "page", predictions=tmp_path / "others")["count"] == COUNT
    else:
        assert named in refused(tmp_path, tmp_path / "features", predictions=tmp_path / "others")


def test_the_default_split_of_a_stream_may_be_called_train(tmp_path: Path) -> None:
    predictions: dict[str, Any] = {"label": ["a"] * 9, "probability": np.full(9, 0.5, np.float32)}
    run = OF_RUN | {"split": "train"}
    write_run(tmp_path / "features", run, row=np.arange(COUNT), feature=lists(features_of()))  # two cannot be read
    write_run(tmp_path / "others", run | STREAMED, row=np.arange(9), **predictions)
    assert page_of(tmp_path / "features", tmp_path / "page", predictions=tmp_path / "others")["count"] == COUNT


def test_a_dataset_of_other_contents_is_refused(model: Path, images: Path, tmp_path: Path) -> None:  # noqa: F811
    extract(model=str(model), dataset=str(images), output_dir=str(tmp_path / "features"))
    for name in ("copied", "other"):
        (tmp_path / name).mkdir()
        for file in images.glob("*.png"):
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    Image.new("RGB", (7, 5)).save(tmp_path / "other" / "17.png")
    page_of(tmp_path / "features", tmp_path / "of copies", dataset=DatasetOptions(str(tmp_path / "copied")))
    assert "other contents" in refused(tmp_path, tmp_path / "features", dataset=DatasetOptions(str(tmp_path / "other")))


# True labels and the classes of the model


def labelled(images: Path, folder: Path, labels: list[Any], kind: Any) -> DatasetOptions:  # noqa: F811
    """Save the images with labels."""
    files = [{"bytes": file.read_bytes(), "path": None} for file in sorted(images.glob("*.png"))[: len(labels)]]
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    stored = datasets.Dataset.from_dict({"image": files, "label": labels}, features=features)
    stored.save_to_disk(folder)
    return DatasetOptions(str(folder))


def true_in(data: dict[str, Any]) -> dict[int, str]:
    return {row: data["classes"][i] for row, i in zip(data["rows"], numbers(data["true"], "<i4"), strict=True)}


def test_true_labels_are_matched_as_by_an_evaluation(model: Path, images: Path, tmp_path: Path) -> None:  # noqa: F811
    given, out = [3, 1, 1, 3, 0], tmp_path / "predictions"
    data = labelled(images, tmp_path / "numbers", given, datasets.Value("int64"))
    predict(model=str(model), dataset=data.dataset, output_dir=str(out))
    expected = {row: f"class {number}" for row, number in enumerate(given)}
    assert "knows none of the 3 classes of the data: 0, 1, 3." in refused(tmp_path, out, dataset=data)
    command = ["browse", str(out), "--dataset", data.dataset, "--out", str(tmp_path / "page"), "--labels_by"]
    assert main([*command, "number"]) == 0
    assert true_in(data_in(tmp_path / "page" / "index.html")) == expected

    others = labelled(images, tmp_path / "others", given, datasets.ClassLabel(names=[*"abcd"]))
    assert "knows none of the 4 classes of the data: a, b" in refused(tmp_path / "none", out, dataset=others)
    assert true_in(page_of(out, tmp_path / "2", dataset=others, labels_by="number")) == expected
    few = labelled(images, tmp_path / "few", [2, 1, 1, 2, 0], datasets.ClassLabel(names=[*"abc"]))
    assert "has 3 classes, the model 4" in refused(tmp_path / "none", out, dataset=few, labels_by="number")
    names = [f"class {number}" for number in reversed(range(4))]
    same = labelled(images, tmp_path / "same", [3 - number for number in given], datasets.ClassLabel(names=names))
    assert true_in(page_of(out, tmp_path / "3", dataset=same)) == expected
    predict(model=str(model), dataset=same.dataset, output_dir=str(tmp_path / "of_same"))
    assert true_in(page_of(tmp_path / "of_same", tmp_path / "by_manifest")) == expected
    assert page_of(tmp_path / "of_same", tmp_path / "left_out", labels_by="none")["true"] is None
    outside = labelled(images, tmp_path / "outside", [3, 1, 1, 4, -1], datasets.Value("int64"))
    assert "labels are -1, 4, and the model has the classes 0 to 3" in refused(
        tmp_path / "none", out, dataset=outside, labels_by="number"
    )
    table = write_table(tmp_path / "own.parquet", row=np.arange(5), label=given, feature=lists(features_of(5)))
    assert "knows none of the 3" in refused(tmp_path / "none", table, predictions=out)
    assert true_in(page_of(table, tmp_path / "4", predictions=out, labels_by="number")) == expected


def test_labels_that_are_no_classes_of_the_model_can_be_left_out(tmp_path: Path) -> None:
    run = {"dataset": "digits", "split": "test", "images": 360, "classes": ["cat", "ant"]}
    chance = np.full(360, 0.5, np.float32)
    write_run(tmp_path / "out", run, row=np.arange(360), label=["cat"] * 360, probability=chance)
    digits = DatasetOptions("digits")
    text = refused(tmp_path, tmp_path / "out", dataset=digits)
    assert "knows none of the 10 classes of the data: 0, 1" in text
    assert text.endswith("Or leave the true labels out, with --labels_by none.")
    command = ["browse", str(tmp_path / "out"), "--dataset", "digits", "--labels-by", "none", "--out"]
    assert main([*command, str(tmp_path / "page")]) == 0
    data = data_in(tmp_path / "page" / "index.html")
    assert data["true"] is None
    assert (data["classes"], data["thumbnails"]["files"][0]) == (["cat"], "thumbnails-0000.webp")
    file = write_table(tmp_path / "names.parquet", label=["a"], probability=chance[:1], true_label=[3])
    assert refused(tmp_path / "none", file).endswith("or leave them out, with --labels_by none.")
    assert page_of(file, tmp_path / "2", labels_by="none")["true"] is None


def test_labels_that_are_true_or_false_are_shown(images: Path, tmp_path: Path) -> None:  # noqa: F811
    data = labelled(images, tmp_path / "data", [True, None, False], datasets.Value("bool"))
    table = write_table(tmp_path / "features.parquet", row=np.arange(3), feature=lists(features_of(3)))
    shown = page_of(table, tmp_path / "page", dataset=data, label_column="label")
    assert (shown["classes"], sorted(numbers(shown["true"], "<i4"))) == (["False", "True"], [-1, 0, 1])


def test_one_image_is_counted_as_one(tmp_path: Path) -> None:
    table = {"label": ["a"], "probability": np.float32([0.5]), "path": ["none.png"]}
    written = write_page(write_table(tmp_path / "one.parquet", **table), tmp_path / "page", progress=False)
    assert ", 1 image, " in str(written)
    page = written.path.read_text(encoding="utf-8")
    assert "1 image of one.parquet" in page
    assert "<summary>1 image cannot be read" in page


def test_labels_that_are_numbers_need_the_classes_of_the_model_unless_they_are_predicted(tmp_path: Path) -> None:
    columns = {
        "label": [*"0101012"],
        "probability": np.full(COUNT, 0.5, np.float32),
        "true_label": [0, 1, 2, 2, 1, 0, 2],
    }
    file = write_table(tmp_path / "numbers.parquet", **columns)
    assert true_in(page_of(file, tmp_path / "page") | {"rows": range(COUNT)})[2] == "2"
    assert "does not say the model's classes" in refused(tmp_path / "none", file, labels_by="number")
    file = write_table(tmp_path / "names.parquet", **columns | {"label": [*"abababc"]})
    assert "does not say the model's classes" in refused(tmp_path / "none", file)
    file = write_table(tmp_path / "features.parquet", feature=lists(features_of()))
    assert "give both, or omit it" in refused(tmp_path / "none", file, labels_by="number")


def test_probabilities_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    columns = {"label": [*"aab"], "probability": np.float32([0.5, np.nan, 1])}
    file = write_table(tmp_path / "predictions.parquet", **columns)
    assert re.search("'probability' of .* NaN or infinite values, first in row 1", refused(tmp_path, file))


def test_an_output_that_exists_or_is_the_input_is_refused(tmp_path: Path) -> None:
    file = write_table(tmp_path / "features.parquet", feature=lists(features_of()))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError):
        write_page(file, tmp_path / "full")
    with pytest.raises(OutputError):
        write_page(file, file)
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_the_command_refuses_a_split_without_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_table(tmp_path / "features.parquet", feature=lists(features_of()))
    with pytest.raises(SystemExit):
        main(["browse", str(file), "--out", str(tmp_path / "page"), "--split", "test"])
    assert "--split is of a dataset: give --dataset too" in capsys.readouterr().err
