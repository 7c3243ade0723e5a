"""The page of `plain-vit browse`, in a folder that works offline: a map of images, neighbours, mistakes."""

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..analysis.page import html_page, html_table, plain_text
from ..errors import DataError, counted, in_bytes, printable
from ..files.place_names import public_name, public_paths
from ..files.staging import staged_folder
from ..system.extras import needs
from .arrays import nearest_neighbours, principal_map, similar_together, umap_map, unit_length
from .images import Images, Shards, places_of, read_images, with_model_classes, with_predictions
from .thumbnails import COLUMNS, PER_FILE, TILE, Stored, write_thumbnails

with needs("plain-vit[train]"):
    from tqdm import tqdm

    from ..training.data.datasets import load_images_and_labels
    from ..training.data.identity import contents_hash, image_paths

NAMED = 200  # unreadable images listed on the page
LONGEST_TEXT = 1000  # characters of a path or label


@dataclass(frozen=True)
class DatasetOptions:
    """The dataset that features were extracted from, for thumbnails and true labels.

    Args:
        dataset: Name of the dataset, as for `load_splits`.
        dataset_subset: The configuration, for a dataset with several.
        split: The split (default: the run's split, or `train`, or the only split).
        image_column: The image column, for a dataset with several.
    """

    dataset: str
    dataset_subset: str | None = None
    split: str | None = None
    image_column: str | None = None


@dataclass(frozen=True)
class WrittenPage:
    """Facts about a page that was written.

    Args:
        path: Path of its `index.html`.
        images: Number of images.
        size: Size of all files, in bytes.
        broken: Unreadable images, with the reason.
        has_thumbnails: Whether any image could be read.
        unread: Why the dataset in the manifest could not be read; empty if it was read or not needed.
    """

    path: Path
    images: int
    size: int
    broken: Sequence[str]
    has_thumbnails: bool
    unread: str = ""

    def __str__(self) -> str:
        parts = [counted(self.images, "image"), in_bytes(self.size)]
        if not self.has_thumbnails:
            parts.append("without thumbnails, because no image can be read: give --dataset")
        elif self.broken:
            parts.append(f"{len(self.broken)} of them cannot be read, and are named on the page")
        if self.unread:
            parts.append(self.unread)
        return f"written: {self.path}, {', '.join(parts)}"


def write_page(
    features: str | Path,
    out: str | Path,
    *,
    column: str | None = None,
    label_column: str | None = None,
    predictions: str | Path | None = None,
    labels_by: Literal["name", "number", "none"] = "name",
    dataset: DatasetOptions | None = None,
    map_kind: Literal["pca", "umap"] = "pca",
    progress: bool = True,
) -> WrittenPage:
    """Write a page for browsing images: a map, neighbours, mistakes, search.

    Args:
        features: A parquet file of features or predictions, or the output folder of `extract_features.py` or
            `predict.py`.
        out: A new or empty folder for `index.html` and the thumbnails.
        column: The column of features (default: `feature`, or the only one).
        label_column: The column of true labels, in the dataset if one is given. It is detected by default; in a table
            it is `true_label`, or `label` if there is no `probability`.
        predictions: Predictions for the same images.
        labels_by: How to match true labels with the model's classes: by "name" (integers without names are matched as
            strings), by "number" (labels are the model's class numbers), or "none" to omit the labels.
        dataset: Source of thumbnails and true labels that are not in the table or in the files that it lists
            (default: the dataset in the run's manifest, if there is one).
        map_kind: "pca" for the first two principal components, "umap" for UMAP (McInnes et al. 2018, with umap-learn).
        progress: Show progress bars in a terminal.

    Raises:
        DataError: The tables have no images, are incomplete, describe different images, or cannot be joined; a column
            is missing; features or probabilities are not finite; or true labels are not classes of the model.
        OutputExistsError: The folder is not empty.
    """
    sources = [features, predictions or features, dataset.dataset if dataset else features]
    shards = Shards(features)
    predicting = shards if predictions is None else Shards(predictions)
    with staged_folder(out, sources=sources) as folder:
        images = read_images(shards, column=column, label_column=None if dataset else label_column)
        if predictions is not None:
            images = with_predictions(images, predicting, shards.settings)
        if dataset is None:
            images, stored_of, unread = _with_dataset_of_run(images, shards, with_labels=labels_by != "none")
        else:
            images, stored_of, unread = *_with_dataset(images, shards, dataset, label_column), ""
        images = with_model_classes(images, predicting, labels_by)
        images, drawn, said = _with_map(images, map_kind, progress)
        thumbnails = None
        broken: dict[int, str] = {}
        if stored_of is not None:
            bar = _bar("thumbnails", progress)
            names, broken = write_thumbnails(images.count, lambda i: stored_of(images, i), folder, bar)
            if len(broken) < images.count:
                thumbnails = {"tile": TILE, "columns": COLUMNS, "perFile": PER_FILE, "files": names}
            else:
                for name in names:
                    (folder / name).unlink()
        data = _data(images) | drawn | {"thumbnails": thumbnails, "broken": list(broken)}
        notes = _notes(images, shards, said, unread, broken, thumbnails is not None)
        title = f"{counted(images.count, 'image')} of {Path(features).resolve().name}"
        resources = files(__package__)
        script, style, frame = ((resources / f"page.{kind}").read_text("utf-8") for kind in ("js", "css", "html"))
        body = f'{frame}{notes}\n<script type="application/json" id="data">{_as_script_data(data)}</script>'
        page = html_page(title, body, style=style, script=script, pictures="'self' file:")
        (folder / "index.html").write_text(page, encoding="utf-8")
        size = sum(file.stat().st_size for file in folder.iterdir())
    path, has_thumbnails = Path(out) / "index.html", thumbnails is not None
    return WrittenPage(path, images.count, size, list(broken.values()), has_thumbnails, unread)


StoredOf = Callable[[Images, int], Stored | None]


def _file_of(images: Images, number: int) -> Stored | None:
    return {"path": images.paths[number], "bytes": None}


def _with_dataset_of_run(images: Images, shards: Shards, *, with_labels: bool) -> tuple[Images, StoredOf | None, str]:
    """Call `_with_dataset` for the dataset in the manifest, if needed; also return why the dataset cannot be read."""
    in_table = _file_of if any(path is not None for path in images.paths) else None
    name, settings = shards.settings.get("dataset"), shards.settings
    is_known = settings.get("images") is not None or settings.get("contents") is not None  # unlike a stream
    has_all = in_table is not None and (images.true is not None or not with_labels)
    if has_all or not is_known or not isinstance(name, str) or images.rows is None:
        return images, in_table, ""
    try:
        complete, stored_of = _with_dataset(images, shards, DatasetOptions(name), None)
    except (DataError, OSError) as error:  # the dataset was moved or has changed
        why = printable(str(error))[:LONGEST_TEXT]
        return images, in_table, f"without {printable(name)}, the dataset of the run ({why}): give --dataset"
    return replace(complete, true=images.true or complete.true), in_table or stored_of, ""


def _with_dataset(
    images: Images, shards: Shards, dataset: DatasetOptions, label_column: str | None
) -> tuple[Images, StoredOf]:
    """Return images with the true labels of a dataset, and a function that returns the file of each image."""
    chosen = _as_in_run(dataset, shards)
    rows, labels = load_images_and_labels(
        chosen.dataset,
        chosen.split,
        dataset_subset=chosen.dataset_subset,
        image_column=chosen.image_column,
        label_column=label_column,
    )
    what = f"the images of {dataset.dataset}"
    count = shards.settings.get("images")
    if count is not None and count != len(rows):
        raise DataError(
            f"{shards.place} was written for {count} images, and {what} are {len(rows)}: correct --dataset."
        )
    places_of(images, np.arange(len(rows)), what)
    numbers = [int(row) for row in images.rows] if images.rows is not None else []
    paths = image_paths(rows)
    for path, other in zip(images.paths, (paths[number] for number in numbers), strict=True):
        if path is not None and other is not None and os.path.basename(path) != os.path.basename(other):
            raise DataError(f"{what} are others than those of {shards.place}: {other!r} has the row of {path!r}.")
    contents = shards.settings.get("contents")
    if contents is not None and contents_hash(rows) != contents:
        raise DataError(
            f"{what} have other contents than those of {shards.place}: correct --dataset, or extract again."
        )
    if labels is not None:
        images = replace(images, true=labels.in_order(numbers))
    return images, lambda images, number: rows[int(images.rows[number])]["image"]


def _as_in_run(dataset: DatasetOptions, shards: Shards) -> DatasetOptions:
    """Fill options that are not given from the run that wrote the shards.

    Raises:
        DataError: A given option differs from the run's.
    """
    settings, names = shards.settings, ("dataset_subset", "split", "image_column")
    for name in names:
        given, before = getattr(dataset, name), settings.get(name)
        if name in settings and given is not None and given != before:
            how = f"without --{name}: omit it" if before is None else f"with --{name} {before}: give it or omit it"
            raise DataError(f"{shards.place} was written {how}, instead of {given!r}.")
    in_run: dict[str, Any] = {name: getattr(dataset, name) or settings.get(name) for name in names}
    return replace(dataset, **in_run)


def _with_map(images: Images, kind: str, progress: bool) -> tuple[Images, dict[str, Any], str]:
    """Return images in the order of the page, the data of the map, and its caption."""
    if images.features is None:
        return images, {"places": None, "neighbours": None, "similarities": None}, ""
    if images.count < 2:
        raise DataError("There is one image, which has no neighbours: give the features of at least two.")
    features = unit_length(images.features)
    width = features.shape[1]
    if kind == "umap":
        places, how = umap_map(features), "by UMAP"
    else:
        places, held = principal_map(features)
        how = f"by the first two principal components, which hold {held:.0%} of the variance"
    order = similar_together(places)
    neighbours, similarities = nearest_neighbours(features[order], _bar("neighbours", progress))
    caption = (
        f"The map places images {how} of their features ({width} values, divided by their norm). Neighbours are the "
        "most similar images by cosine similarity."
    )
    drawn = {
        "places": _packed(places[order], "<u2"),
        "neighbours": _packed(neighbours, "<u4"),
        "similarities": _packed(np.rint(similarities * 10_000), "<i2"),
        "perImage": neighbours.shape[1],
    }
    return replace(images.in_order(order), features=None), drawn, caption


def _bar(what: str, progress: bool) -> Callable[[Sequence[int]], Iterable[int]]:
    """Return a function that wraps the start indices of parts in a progress bar."""
    return lambda firsts: tqdm(firsts, desc=what, disable=None if progress else True)


def _data(images: Images) -> dict[str, Any]:
    """Return names, classes and probabilities for the page."""
    paths = [None if path is None else _text(path) for path in _public_paths(images)]
    known = [path for path in paths if path is not None]
    prefix = os.path.commonprefix(known)  # noqa: RUF071 (the page joins the texts again)
    labels = {
        name: [None if text is None else _text(text) for text in texts]
        for name, texts in (("true", images.true.names() if images.true else None), ("predicted", images.predicted))
        if texts is not None
    }
    classes = sorted({text for texts in labels.values() for text in texts if text is not None})
    numbers: Mapping[str | None, int] = {None: -1, **{name: number for number, name in enumerate(classes)}}
    return {
        "count": images.count,
        "prefix": prefix,
        "paths": [None if path is None else path[len(prefix) :] for path in paths],
        "rows": None if images.rows is None else images.rows.tolist(),
        "classes": classes,
        **{
            name: _packed(np.asarray([numbers[text] for text in labels[name]]), "<i4") if name in labels else None
            for name in ("true", "predicted")
        },
        "probability": None if images.probability is None else _packed(images.probability, "<f4"),
    }


def _public_paths(images: Images) -> list[str | None]:
    """Return the paths in the form that the page shows."""
    public = iter(public_paths([path for path in images.paths if path is not None]))
    return [None if path is None else next(public) for path in images.paths]


def _text(text: str) -> str:
    shown = printable(text.replace("\n", "\\n"))
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]}…"


def _packed(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values).astype(kind).tobytes()).decode("ascii")


def _as_script_data(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element: it neither ends the element nor starts a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _notes(
    images: Images, shards: Shards, caption: str, unread: str, broken: Mapping[int, str], has_thumbnails: bool
) -> str:
    """Return notes about the page as HTML."""
    parts = []
    settings = shards.settings
    facts = [
        (name, public_name(settings[name]) if name in ("model", "dataset") else settings[name])
        for name in ("model", "dataset", "split", "feature", "layers")
        if settings.get(name)
    ]
    if facts:
        parts.append(html_table((), facts, "the run"))
    parts += [f"<p>{plain_text(caption)}</p>"] if caption else []
    parts += [f"<p>This page is {plain_text(unread)}.</p>"] if unread else []
    if not has_thumbnails:
        reason = "no image can be read" if broken else "the table names no files"
        parts.append(f"<p>There are no thumbnails: {reason}. The option --dataset gives the images.</p>")
    if broken:
        names = [(path or "", public or "") for path, public in zip(images.paths, _public_paths(images), strict=True)]
        lines = [_text(why.replace(*names[number])) for number, why in list(broken.items())[:NAMED]]
        named = "".join(f"<li>{plain_text(line)}</li>" for line in lines)
        more = f"<p>The first {NAMED} of them are named.</p>" if len(broken) > NAMED else ""
        what = f"{counted(len(broken), 'image')} cannot be read"
        parts.append(f"<details><summary>{what}</summary>{more}<ul>{named}</ul></details>")
    return f'<section id="about" aria-label="About this page">{"".join(parts)}</section>'
