"""The whole sheet: every picture of a model, or of two side by side, on one page that needs nothing else."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import BaseImageProcessor

from plain_vit.analysis import plots
from plain_vit.analysis.attention import (
    attention_distance,
    attention_maps,
    attention_rollout,
    gradient_rollout,
    patch_distances,
)
from plain_vit.analysis.embeddings import patch_filters, position_similarity
from plain_vit.analysis.gradients import grad_cam
from plain_vit.analysis.hidden_states import logit_lens, token_norms
from plain_vit.analysis.inspection import TokenLayout, plain, token_layout
from plain_vit.analysis.page import html_page, inline_picture
from plain_vit.analysis.results import displayable, predict
from plain_vit.analysis.streams import average_over_images, pixel_batches
from plain_vit.errors import AnalysisError, DataError
from plain_vit.extras import needs
from plain_vit.files.writing import staged_folder
from plain_vit.image_processing_plain_vit import open_image

with needs("plain-vit[analysis]"):
    from matplotlib.figure import Figure

SHOWN = 6  # images in the pictures; attention distance averages over all
COLUMNS = 12  # heads or layers across; of more an even choice is drawn
DPI = 110


@dataclass(frozen=True)
class Subject:
    """One model and what it sees.

    Args:
        model: A plain ViT.
        image_processor: The model's.
        images: All images, opened.
        pixel_values: The first `SHOWN` of them, normalised, of shape (B, C, H, W).
        titles: Of those.
        progress: Show a progress bar where all images are read.
    """

    model: nn.Module
    image_processor: BaseImageProcessor
    images: Sequence[Image.Image]
    pixel_values: torch.Tensor
    titles: Sequence[str]
    progress: bool

    @property
    def layout(self) -> TokenLayout:
        """Return where the tokens stand."""
        return token_layout(self.model, self.pixel_values)

    @property
    def pictures(self) -> np.ndarray:
        """Return the images as the model gets them, without the pixels at the borders that fill no patch."""
        (h, w), (height, width) = self.layout.grid_size, self.layout.patch_size
        return displayable(self.pixel_values[..., : h * height, : w * width], self.image_processor)

    @property
    def class_names(self) -> list[str]:
        """Return the classes in their order."""
        id2label: Any = plain(self.model).config.id2label
        return [str(id2label[number]) for number in sorted(id2label)]


@dataclass(frozen=True)
class Section:
    """One picture of the page.

    Args:
        name: Of its file and of its arrays.
        title: What it is.
        caption: What one sees, and how it was computed.
        draw: Computes the arrays, by name, and draws them.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Subject], tuple[Mapping[str, np.ndarray], Figure]]


def draw_sheet(
    images: Sequence[str | Path | Image.Image],
    model: nn.Module,
    image_processor: BaseImageProcessor | None,
    out: str | Path,
    *,
    compare: tuple[nn.Module, BaseImageProcessor | None] | None = None,
    names: tuple[str, str] = ("model", "compared with"),
    progress: bool = True,
) -> Path:
    """Draw everything there is to see of a model into a folder.

    Args:
        images: Paths or opened images. The first six are drawn; attention distance averages over all.
        model: A plain ViT. Without a classifier, pictures that need one are left out, and the page says so.
        image_processor: The model's.
        out: A new or empty folder: it gets `index.html`, which holds all pictures itself, the pictures as PNG files,
            and their arrays as `arrays.npz`.
        compare: Another model and its image processor, drawn beside the first; its arrays are `arrays-compared.npz`.
        names: What to call the model, and the other one.
        progress: Show a progress bar where all images are read.

    Returns:
        The path of `index.html`.

    Raises:
        AnalysisError: There is no image or no image processor, or a model is not a plain ViT.
        DataError: An image cannot be read.
        OutputExistsError: The folder is not empty.
    """
    if not images:
        raise AnalysisError("there is no image to show: name one or more")
    opened = [_open(image) for image in images]
    titles = [_title(image, i) for i, image in enumerate(images)]
    models = [(model, image_processor), *([compare] if compare else [])]
    with staged_folder(out) as folder:
        subjects = [
            _subject(a_model, processor, name, opened, titles, progress)
            for (a_model, processor), name in zip(models, names, strict=False)
        ]
        arrays: list[dict[str, np.ndarray]] = [{} for _ in subjects]
        parts = [_facts(subjects, names, opened, titles)]
        for section in SECTIONS:
            cells = []
            for i, subject in enumerate(subjects):
                try:
                    values, figure = section.draw(subject)
                except AnalysisError as error:  # the model has no such thing: the page says which
                    cells.append(f"<p>Nothing to draw: {html.escape(str(error))}.</p>")
                    continue
                arrays[i].update(values)
                file = f"{section.name}{'-compared' if i else ''}.png"
                picture = BytesIO()
                figure.savefig(picture, dpi=DPI)
                (folder / file).write_bytes(picture.getvalue())
                cells.append(_picture(file, picture.getvalue(), section.title))
            parts.append(_section(section, cells, names))
        for values, file in zip(arrays, ("arrays.npz", "arrays-compared.npz"), strict=False):
            np.savez_compressed(folder / file, allow_pickle=False, **values)
        title = " and ".join(names[: len(subjects)])
        page = html_page(f"{title}: what it sees", "\n".join(parts))
        (folder / "index.html").write_text(page, encoding="utf-8")
    return Path(out) / "index.html"


def _open(image: str | Path | Image.Image) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    try:
        return open_image(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises
        raise DataError(f"{image} cannot be read as an image: {error}") from error


def _title(image: str | Path | Image.Image, number: int) -> str:
    return f"image {number + 1}" if isinstance(image, Image.Image) else plots.shortened(Path(image).stem, 18)


def _subject(
    model: nn.Module,
    image_processor: BaseImageProcessor | None,
    name: str,
    images: Sequence[Image.Image],
    titles: Sequence[str],
    progress: bool,
) -> Subject:
    if image_processor is None:
        raise AnalysisError(f"{name} has no image processor, which says how its images are prepared: give one")
    try:
        pixel_values = next(pixel_batches(images[:SHOWN], image_processor, SHOWN))
    except (ValueError, RuntimeError) as error:
        raise DataError(f"the image processor of {name} cannot prepare these images: {error}") from error
    token_layout(model, pixel_values)  # refuses other models, and pixels that do not fit
    return Subject(model, image_processor, images, pixel_values, titles[:SHOWN], progress)


# The sections


def _draw_top_classes(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    probabilities = predict(subject.model, subject.pixel_values)
    figure = plots.plot_top_classes(subject.pictures, probabilities, subject.class_names, titles=subject.titles)
    return {"probabilities": probabilities}, figure


def _draw_last_layer(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    maps = attention_maps(subject.model, subject.pixel_values, layers=-1)[:, 0]
    heads = plots.spread(maps.shape[1], COLUMNS)
    figure = plots.plot_attention_heads(
        subject.pictures, maps[:, heads], row_names=subject.titles, column_names=[f"head {head}" for head in heads]
    )
    return {"attention_last_layer": maps}, figure


def _draw_layers(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    maps = attention_maps(subject.model, subject.pixel_values).mean(axis=2)
    layers = plots.spread(maps.shape[1], COLUMNS)
    figure = plots.plot_attention_heads(
        subject.pictures, maps[:, layers], row_names=subject.titles, column_names=[f"layer {layer}" for layer in layers]
    )
    return {"attention_mean_of_heads": maps}, figure


def _draw_rollout(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    maps = attention_rollout(subject.model, subject.pixel_values)
    return {"rollout": maps}, plots.plot_maps_over_images(
        subject.pictures, maps, titles=subject.titles, meaning="rollout"
    )


def _draw_grad_cam(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    maps = grad_cam(subject.model, subject.pixel_values)
    return {"grad_cam": maps}, plots.plot_maps_over_images(
        subject.pictures, maps, titles=_predictions(subject), meaning="Grad-CAM"
    )


def _draw_gradient_rollout(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    maps = gradient_rollout(subject.model, subject.pixel_values)
    return {"gradient_rollout": maps}, plots.plot_maps_over_images(
        subject.pictures, maps, titles=_predictions(subject), meaning="relevance"
    )


def _draw_filters(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    filters = patch_filters(subject.model)
    arrays = {"patch_filters": filters.components, "patch_filters_explained_variance": filters.explained_variance}
    return arrays, plots.plot_patch_filters(filters)


def _draw_positions(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    similarity = position_similarity(subject.model, subject.layout.grid_size)
    arrays = {"position_similarity": similarity.patches, "position_similarity_prefix": similarity.prefix}
    return arrays, plots.plot_position_similarity(similarity)


def _draw_prefix(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    similarity = position_similarity(subject.model, subject.layout.grid_size)
    if not len(similarity.prefix):
        raise AnalysisError("no token before the patches has a position embedding")
    return {}, plots.plot_prefix_similarity(similarity, subject.layout.before)


def _draw_distance(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    batches = pixel_batches(subject.images, subject.image_processor)
    distances = average_over_images(attention_distance, subject.model, batches, progress=subject.progress)
    even = float(patch_distances(subject.layout.grid_size, subject.layout.patch_size).mean())
    return {"attention_distance": distances}, plots.plot_attention_distance(distances, even=even)


def _draw_logit_lens(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    logits = logit_lens(subject.model, subject.pixel_values)
    figure = plots.plot_logit_lens(subject.pictures, logits, subject.class_names, titles=subject.titles)
    return {"logit_lens": logits}, figure


def _draw_norms(subject: Subject) -> tuple[Mapping[str, np.ndarray], Figure]:
    norms = token_norms(subject.model, subject.pixel_values)
    return {"token_norms": norms}, plots.plot_token_norms(norms[0], subject.layout, subject.pictures[0])


def _predictions(subject: Subject) -> list[str]:
    """Return the likeliest class of each image, which the gradients are those of."""
    likeliest = predict(subject.model, subject.pixel_values).argmax(axis=1)
    return [plots.shortened(subject.class_names[number]) for number in likeliest]


TINT = "Orange marks where a map is high; the image itself is grey. "
SECTIONS = (
    Section(
        "top-classes",
        "What the model takes the images for",
        "The five likeliest classes of each image. Probabilities are the softmax of the logits; they need not be "
        "calibrated.",
        _draw_top_classes,
    ),
    Section(
        "attention-last-layer",
        "Attention of the last layer, by head",
        TINT + "Each map shows how much one head of the last layer attends to each patch, from the class token or, in "
        "models without one, on average over all patches. Each is tinted from 0 to its own highest weight, so "
        "colours of two maps are not compared.",
        _draw_last_layer,
    ),
    Section(
        "attention-layers",
        "Attention of every layer, mean of the heads",
        TINT + "As above, averaged over the heads of each layer.",
        _draw_layers,
    ),
    Section(
        "rollout",
        "Attention rollout",
        TINT + "How much of each patch reaches the pooled feature when attention is followed through all layers: the "
        "mean of the heads of each layer, plus the identity for the residual connection, with rows scaled to sum "
        "to 1, multiplied over the layers (Abnar and Zuidema 2020).",
        _draw_rollout,
    ),
    Section(
        "grad-cam",
        "Grad-CAM",
        TINT + "Patches that speak for the likeliest class, which stands above each image. The features that enter the "
        "attention of the last block are weighted by the mean gradient of the class score, and negative sums are "
        "dropped (Selvaraju et al. 2017).",
        _draw_grad_cam,
    ),
    Section(
        "gradient-rollout",
        "Rollout weighted by gradients",
        TINT + "Patches that speak for the likeliest class, followed through all layers: attention times its gradient, "
        "negative products dropped, heads averaged, all paths added up (Chefer et al. 2021).",
        _draw_gradient_rollout,
    ),
    Section(
        "logit-lens",
        "Logit lens",
        "When the decision falls: the probabilities that the model would give if it stopped after a layer. The "
        "tokens of each layer go through the model's own final norm, pooling and classifier. The five classes are "
        "those that are likeliest at the end.",
        _draw_logit_lens,
    ),
    Section(
        "patch-filters",
        "Patch-embedding filters",
        "What the first layer tells patches apart by: the first 28 principal components of its filters, as in "
        "Figure 7, left, of Dosovitskiy et al. 2021. Each tile is a patch; mid-grey is 0. A patch of few pixels "
        "has fewer components. In hybrids with a ResNet stem they are filters over the features of the stem.",
        _draw_filters,
    ),
    Section(
        "position-similarity",
        "Position-embedding similarity",
        "Each tile belongs to the patch of its row and column, and shows the cosine between the position "
        "embedding of that patch and those of all patches (Figure 7, centre). Neighbours that are alike show as a "
        "bright spot around the patch itself. Of grids above 14 x 14 an even choice of patches is drawn.",
        _draw_positions,
    ),
    Section(
        "prefix-similarity",
        "Positions of the other tokens",
        "The cosine between the position embeddings of the tokens before the patches and those of the patches.",
        _draw_prefix,
    ),
    Section(
        "attention-distance",
        "Mean attention distance",
        "How far each head looks: the distance between the centres of query patch and key patch, weighted by "
        "attention, averaged over all patches and over all images, in pixels of the model's input (Figure 7, "
        "right). The dotted line is where attention that is spread evenly over all patches would lie.",
        _draw_distance,
    ),
    Section(
        "token-norms",
        "Norms of the tokens",
        "How long the tokens of the first image are after each layer. Patches that are much longer than the "
        "others usually hold no local content (Darcet et al. 2024).",
        _draw_norms,
    ),
)


# The page


def _facts(
    subjects: Sequence[Subject], names: Sequence[str], images: Sequence[Image.Image], titles: Sequence[str]
) -> str:
    """Return the images, and what is known of each model, as HTML."""
    thumbnails = []
    for image, title in zip(images[:SHOWN], titles, strict=False):
        small = image.convert("RGB")
        small.thumbnail((256, 256))
        if max(small.size) < 96:  # digits: whole pixels
            factor = 96 // max(small.size)
            small = small.resize((small.width * factor, small.height * factor), Image.Resampling.NEAREST)
        file = BytesIO()
        small.save(file, "PNG")
        caption = f"{html.escape(title)}<br>{image.height} × {image.width} pixels"
        thumbnails.append(
            f"<figure>{inline_picture(file.getvalue(), title)}<figcaption>{caption}</figcaption></figure>"
        )
    rows = [_fact_row(subject, name) for subject, name in zip(subjects, names, strict=False)]
    header = "".join(f"<th>{name}</th>" for name in ("", "layers", "heads", "width", "patches", "tokens", "input"))
    more = f" Of {len(images)} images the first {SHOWN} are drawn." if len(images) > SHOWN else ""
    return (
        f'<div class="row thumbnails">{"".join(thumbnails)}</div>'
        f"<p>The images as they were given, height × width.{more} In the pictures below they are as the image "
        f"processor prepares them.</p><table><tr>{header}</tr>{''.join(rows)}</table>"
        f'<p class="caption">Every picture is a link to its file; the numbers are in arrays.npz.</p>'
    )


def _fact_row(subject: Subject, name: str) -> str:
    config, layout = plain(subject.model).config, subject.layout
    height, width = subject.pixel_values.shape[-2:]
    cells = (
        name,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.hidden_size,
        "{} × {} of {} × {} pixels".format(*layout.grid_size, *layout.patch_size),
        ", ".join([*layout.before, "patches", *layout.behind]),
        f"prepared by the image processor as {height} × {width} pixels",
    )
    return f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in cells)}</tr>"


def _section(section: Section, cells: Sequence[str], names: Sequence[str]) -> str:
    figures = [
        f"<figure>{f'<figcaption>{html.escape(name)}</figcaption>' if len(cells) > 1 else ''}{cell}</figure>"
        for name, cell in zip(names, cells, strict=False)
    ]
    return (
        f'<h2 id="{section.name}">{section.title}</h2><p class="caption">{section.caption}</p>'
        f'<div class="row{" pair" if len(figures) == 2 else ""}">{"".join(figures)}</div>'
    )


def _picture(file: str, data: bytes, title: str) -> str:
    return f'<a href="{file}">{inline_picture(data, title)}</a>'


__all__ = ["draw_sheet"]
