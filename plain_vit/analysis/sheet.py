"""The page of `plain-vit show`: all figures of one model, or of two side by side."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import BaseImageProcessor

from ..errors import AnalysisError, DataError
from ..files.images import open_bounded, read_image
from ..files.place_names import public_name, public_paths
from ..files.staging import staged_folder
from ..system.extras import needs
from . import plots
from .attention import attention_distance, attention_maps, attention_rollout, gradient_rollout, patch_distances
from .dense_features import correspondences, patch_components, patch_features, patch_similarity
from .drawing import png
from .embeddings import patch_filters, position_similarity, relative_position_biases
from .gradients import grad_cam
from .hidden_states import logit_lens, token_norms
from .inspection import TokenLayout, encoder, observed, plain, token_layout, vectors
from .page import framed, html_figure, html_page, html_section, html_table, inline_picture, plain_text
from .results import displayable, predict
from .streams import average_over_images, pixel_batches
from .words import class_labels, distinct_labels, lacking_letters

with needs("plain-vit[analysis]"):
    from matplotlib.figure import Figure

Images = Sequence[str | Path | Image.Image]
SHOWN = 6  # images in the figures; attention distance is averaged over all images
CENTER = (0.5, 0.5)
COLUMNS = 12  # heads or layers per row; if there are more, an even selection is drawn


@dataclass(frozen=True)
class Subject:
    """One model and its input images.

    Args:
        model: A plain ViT.
        image_processor: The model's image processor.
        images: All images, read one at a time.
        pixel_values: The first `SHOWN` images, normalised, of shape (B, C, H, W).
        titles: Titles of these images.
        point: The point in the first image that all patches are compared with, as fractions of its sides.
        progress: Show a progress bar while all images are read.
    """

    model: nn.Module
    image_processor: BaseImageProcessor
    images: Images
    pixel_values: torch.Tensor
    titles: Sequence[str]
    point: tuple[float, float]
    progress: bool

    @property
    def layout(self) -> TokenLayout:
        """Return the token layout."""
        return token_layout(self.model, self.pixel_values)

    def each(self, function: Callable[..., np.ndarray], **options: Any) -> np.ndarray:
        """Apply an array function to the first images, one at a time: the attention of a batch may take gigabytes."""
        return np.concatenate([function(self.model, image[None], **options) for image in self.pixel_values])

    def evidence(self, gradient_method: Callable[..., np.ndarray]) -> tuple[np.ndarray, list[str]]:
        """Return the maps of the first images, and what each explains.

        That is the likeliest class; without labels, the similarity to the first image (of that one: to the second).

        Raises:
            AnalysisError: There are no labels, and no second image or no pooled features.
        """
        model = plain(self.model)
        if hasattr(model, "classifier") and model.config.num_labels:
            names = class_labels(self.class_names)
            return self.each(gradient_method), [names[number] for number in self.probabilities.argmax(axis=1)]
        with torch.no_grad():
            pair = vectors(observed(model), self.pixel_values[:2].to(model.device))
        if len(pair) == 1:
            raise AnalysisError(
                "the model has no labels, and there is no second image to compare with: give two images"
            )
        maps = [
            gradient_method(model, image[None], partial(torch.cosine_similarity, pair[0 if number else 1], dim=0))
            for number, image in enumerate(self.pixel_values)
        ]
        return np.concatenate(maps), [f"like {self.titles[0 if number else 1]}" for number in range(len(maps))]

    @property
    def pictures(self) -> np.ndarray:
        """Return the model's input images, without the pixels at the borders that do not fill a patch."""
        return displayable(self.pixel_values, self.image_processor, self.model)

    @property
    def class_names(self) -> list[str]:
        """Return the class names in order."""
        id2label: Any = plain(self.model).config.id2label
        return [str(id2label[number]) for number in sorted(id2label)]

    @property
    def problem_type(self) -> str | None:
        """Return the model's problem type."""
        problem: str | None = plain(self.model).config.problem_type
        return problem

    @cached_property
    def features(self) -> np.ndarray:
        """Return the patch features of the last layer for the first images."""
        return self.each(patch_features)

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Return the class probabilities, or the outputs of a regression, for the first images."""
        return self.each(predict)


Drawn = tuple[dict[str, np.ndarray], Figure]  # the computed arrays, by name, and their figure


@dataclass(frozen=True)
class Section:
    """One figure of the page.

    Args:
        name: Name of its file.
        title: Title of the section.
        caption: What the figure shows, and how it was computed.
        draw: Function that computes the arrays and draws them.
        concerns: Tells whether the figure applies to a model; without such a model, the section is omitted.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Subject], Drawn]
    concerns: Callable[[Subject], bool]


SECTIONS: list[Section] = []  # in the order of the page


def page_section(
    name: str, title: str, caption: str, *, concerns: Callable[[Subject], bool] = lambda subject: True
) -> Callable[[Callable[[Subject], Drawn]], Callable[[Subject], Drawn]]:
    """Register a function that draws a figure as the page's next section, with the fields of a `Section`."""

    def add(draw: Callable[[Subject], Drawn]) -> Callable[[Subject], Drawn]:
        SECTIONS.append(Section(name, title, caption, draw, concerns))
        return draw

    return add


def draw_sheet(
    images: Images,
    model: nn.Module,
    image_processor: BaseImageProcessor | None,
    out: str | Path,
    *,
    compare: tuple[nn.Module, BaseImageProcessor | None] | None = None,
    point: tuple[float, float] = CENTER,
    names: tuple[str, str] = ("model", "compared with"),
    progress: bool = True,
) -> Path:
    """Draw all figures of a model into a folder.

    Args:
        images: Paths or opened images. The first six are drawn; attention distance averages over all. Files are decoded
            one at a time, up to 190 MB (47 million RGB pixels); a larger JPEG file is decoded at a lower resolution.
        model: A plain ViT. Without a classifier, gradients are of the similarity between images, and figures that need
            one are omitted, as the page says.
        image_processor: The model's image processor.
        out: A new or empty folder for `index.html`, which contains all figures, the figures as PNG files, and their
            arrays as `arrays.npz`.
        compare: A second model and its image processor, shown side by side; its arrays are `arrays-compared.npz`.
        point: The point (down, across) in the first preprocessed image that all patches are compared with, from (0, 0),
            top left, to (1, 1), bottom right.
        names: Names of the two models.
        progress: Show a progress bar while all images are read.

    Returns:
        The path of `index.html`.

    Raises:
        AnalysisError: There is no image or image processor, a model is not a plain ViT, or the point is out of range.
        DataError: An image cannot be read, or is too large.
        OutputExistsError: The folder is not empty.
    """
    if not images:
        raise AnalysisError("there is no image to show: give one or more")
    if not all(0 <= place <= 1 for place in point):
        raise AnalysisError(f"point is {point}: expected two numbers from 0 to 1, down and across the first image")
    for image in images:
        if not isinstance(image, Image.Image):
            open_bounded(image).close()
    paths = _names(images[:SHOWN])
    first, second = map(public_name, names)
    names = (first, second if second != first else f"{second} (2)")
    titles = distinct_labels([Path(path).stem for path in paths], paths, 18)
    models = [(model, image_processor), *([compare] if compare else [])]
    with staged_folder(out) as folder:
        subjects = [
            _subject(a_model, processor, name, images, titles, point, progress)
            for (a_model, processor), name in zip(models, names, strict=False)
        ]
        arrays: list[dict[str, np.ndarray]] = [{} for _ in subjects]
        parts = [_facts(subjects, names, images, [Path(path).name for path in paths])]
        for section in SECTIONS:
            if not any(section.concerns(subject) for subject in subjects):
                continue
            cells = []
            for i, (subject, caption) in enumerate(zip(subjects, names if compare else [""], strict=True)):
                file = f"{section.name}{'-compared' if i else ''}.png"
                try:
                    values, figure = section.draw(subject)
                except AnalysisError as error:  # not applicable to this model; the page says why
                    content = f"<p>Nothing to draw: {plain_text(error)}.</p>"
                else:
                    arrays[i].update(values)
                    (folder / file).write_bytes(picture := png(figure))
                    image = inline_picture(picture, str(figure.get_label()))
                    content = framed(f'<a href="{file}">{image}</a>', section.title)
                cells.append(html_figure(content, caption))
            is_pair = len(cells) == 2
            parts.append(html_section(section.title, section.caption, cells, name=section.name, is_pair=is_pair))
        for values, file in zip(arrays, ("arrays.npz", "arrays-compared.npz"), strict=False):
            np.savez_compressed(folder / file, allow_pickle=False, **values)
        title = " and ".join(names[: len(subjects)])
        page = html_page(f"A look inside {title}", "\n".join(parts))
        (folder / "index.html").write_text(page, encoding="utf-8")
    return Path(out) / "index.html"


def _names(images: Images) -> list[str]:
    """Return the public paths of files, or the numbers of opened images."""
    names = [f"image {i}" if isinstance(image, Image.Image) else str(image) for i, image in enumerate(images)]
    return public_paths(names)


def _subject(
    model: nn.Module,
    image_processor: BaseImageProcessor | None,
    name: str,
    images: Images,
    titles: Sequence[str],
    point: tuple[float, float],
    progress: bool,
) -> Subject:
    if image_processor is None:
        raise AnalysisError(f"{name} has no image processor to prepare its images: give one")
    pixel_values, *others = _prepared(images[:SHOWN], image_processor, SHOWN)
    if others:
        sizes = [" x ".join(map(str, batch.shape[2:])) for batch in (pixel_values, *others)]
        raise AnalysisError(
            f"the image processor of {name} makes images of {sizes[0]} and of {sizes[1]} pixels, and figures need one "
            "size: give images of one shape"
        )
    token_layout(model, pixel_values)  # refuses other models, and pixels that do not fit
    return Subject(model, image_processor, images, pixel_values, titles, point, progress)


def _prepared(images: Images, image_processor: BaseImageProcessor, batch_size: int) -> Iterator[torch.Tensor]:
    """Preprocess images in batches; an error says which processor cannot."""
    try:
        yield from pixel_batches(map(read_image, images), image_processor, batch_size)
    except DataError:
        raise
    except (ValueError, RuntimeError) as error:
        raise DataError(f"the image processor cannot prepare these images: {error}") from error


# The sections

TINT = "Orange marks high values of a map; the image itself is grey. "
ONE_SCALE = (
    "All maps of a model share one scale, from 0 to the highest value of all, and the range of each map is below it: "
    "uniform and weak maps are recognisable."
)


@page_section(
    "top-classes",
    "Predictions",
    "The five most likely classes of each image. Probabilities are the softmax of the logits, or, where an image "
    "may have several labels, the sigmoid of each; they need not be calibrated. Of a regression, the first five "
    "numbers.",
)
def _draw_top_classes(subject: Subject) -> Drawn:
    probabilities = subject.probabilities
    figure = plots.plot_top_classes(
        subject.pictures, probabilities, subject.class_names, titles=subject.titles,
        problem_type=subject.problem_type, columns=1,
    )  # fmt: skip
    return {"probabilities": probabilities}, figure


@page_section(
    "attention-last-layer",
    "Attention of the last layer, by head",
    TINT + "Each map shows the attention of one head of the last layer to each patch, from the class token or, in "
    "models without one, averaged over all patches. Each has its own scale, from 0 to its highest weight, which is "
    "printed below it: the maxima of heads differ by a factor of a hundred. Do not compare colours between maps.",
)
def _draw_last_layer(subject: Subject) -> Drawn:
    maps = subject.each(attention_maps, layers=-1)[:, 0]
    return {"attention_last_layer": maps}, _table_of_maps(subject, maps, "head")


@page_section(
    "attention-layers",
    "Attention of every layer, mean of the heads",
    TINT + "As above, averaged over the heads of each layer.",
)
def _draw_layers(subject: Subject) -> Drawn:
    maps = subject.each(attention_maps).mean(axis=2)
    return {"attention_mean_of_heads": maps}, _table_of_maps(subject, maps, "layer")


@page_section(
    "rollout",
    "Attention rollout",
    TINT + "The contribution of each patch to the pooled features, following attention through all layers: the "
    "mean of the heads of each layer, plus the identity for the residual connection, with rows rescaled to sum "
    "to 1, multiplied over the layers (Abnar and Zuidema 2020). The contributions of all patches and other tokens "
    "sum to 1. " + ONE_SCALE,
)
def _draw_rollout(subject: Subject) -> Drawn:
    maps = subject.each(attention_rollout)
    return {"rollout": maps}, _maps(subject, maps, "rollout (fraction)")


@page_section(
    "grad-cam",
    "Grad-CAM",
    TINT + "Patches relevant for the most likely class, which is named above each image; of a model without classes, "
    "for the cosine between pooled features of the image and of the one named above. The features before the "
    "attention of the last block are weighted by the mean gradient of the score, and negative sums are "
    "dropped (Selvaraju et al. 2017). " + ONE_SCALE,
)
def _draw_grad_cam(subject: Subject) -> Drawn:
    maps, explained = subject.evidence(grad_cam)
    return {"grad_cam": maps}, _maps(subject, maps, "Grad-CAM", explained)


@page_section(
    "gradient-rollout",
    "Gradient-weighted rollout",
    TINT + "Patches relevant for the same score, following all layers: attention times its gradient, "
    "negative products dropped, heads averaged, and all paths through at least one attention summed (Chefer et al. "
    "2021). " + ONE_SCALE,
)
def _draw_gradient_rollout(subject: Subject) -> Drawn:
    maps, explained = subject.evidence(gradient_rollout)
    return {"gradient_rollout": maps}, _maps(subject, maps, "relevance", explained)


@page_section(
    "logit-lens",
    "Logit lens",
    "The probabilities if the model stopped after the embeddings (emb.) or after a layer: the model's own final "
    "norm, pooling and classifier are applied to the tokens of each layer. The five classes are the most likely "
    "ones after the last layer. Of a regression, the first five numbers.",
)
def _draw_logit_lens(subject: Subject) -> Drawn:
    logits = subject.each(logit_lens)
    figure = plots.plot_logit_lens(
        subject.pictures, logits, subject.class_names, titles=subject.titles, problem_type=subject.problem_type
    )
    return {"logit_lens": logits}, figure


@page_section(
    "patch-components",
    "Patch features as colours",
    "The features of the patches after the last layer: their first three principal components as red, green and "
    "blue, fitted to all images together, so that similar patches have similar colours. White patches are "
    "background, the side of the first component that is more common at the borders; the colours are fitted to the "
    "others (Oquab et al. 2023, section 7.5). Colours cannot be compared between models.",
)
def _draw_components(subject: Subject) -> Drawn:
    components = patch_components(subject.features)
    figure = plots.plot_patch_components(subject.pictures, components, titles=subject.titles)
    arrays = {"patch_components": components.values, "patch_components_foreground": components.foreground,
              "patch_components_explained_variance": components.explained_variance}  # fmt: skip
    return arrays, figure


@page_section(
    "patch-similarity",
    "Patches similar to one",
    TINT + "The cosine similarity between the features of the patch with the cross, in the first image, and those "
    "of all patches. Negative values are drawn as 0; the range of each map is below it. The option --point chooses "
    "the patch.",
)
def _draw_similarity(subject: Subject) -> Drawn:
    (h, w), (down, across) = subject.layout.grid_size, subject.point
    patch = min(int(down * h), h - 1), min(int(across * w), w - 1)
    similarity = patch_similarity(subject.features, patch)
    figure = plots.plot_patch_similarity(subject.pictures, similarity, patch, titles=subject.titles)
    return {"patch_similarity": similarity}, figure


@page_section(
    "correspondences",
    "Correspondences of two images",
    "Patches of the first two images that are each other's most similar patch, by the cosine of their features. "
    "The 30 most similar pairs are drawn; colours only tell lines apart.",
    concerns=lambda subject: len(subject.pixel_values) > 1,
)
def _draw_correspondences(subject: Subject) -> Drawn:
    matches = correspondences(subject.features[0], subject.features[1])
    titles = subject.titles[0], subject.titles[1]
    figure = plots.plot_correspondences(subject.pictures[0], subject.pictures[1], matches, titles=titles)
    arrays = {"correspondences_first": matches.first, "correspondences_second": matches.second,
              "correspondences_similarity": matches.similarity}  # fmt: skip
    return arrays, figure


@page_section(
    "patch-filters",
    "Patch-embedding filters",
    "The first 28 principal components of the patch-embedding filters, as in Figure 7, left, of Dosovitskiy et al. "
    "2021. Each tile is a patch; mid-grey is 0. A patch of few pixels has fewer components.",
)
def _draw_filters(subject: Subject) -> Drawn:
    filters = patch_filters(subject.model)
    arrays = {"patch_filters": filters.components, "patch_filters_explained_variance": filters.explained_variance}
    return arrays, plots.plot_patch_filters(filters)


@page_section(
    "position-similarity",
    "Position-embedding similarity",
    "Each tile belongs to the patch of its row and column, and shows the cosine similarity between the position "
    "embedding of that patch and those of all patches (Figure 7, centre). Similar neighbours show as a bright spot "
    "around the patch itself. For grids larger than 14 x 14 an even selection of patches is drawn.",
)
def _draw_positions(subject: Subject) -> Drawn:
    similarity = position_similarity(subject.model, subject.layout.grid_size)
    arrays = {"position_similarity": similarity.patches, "position_similarity_prefix": similarity.prefix}
    return arrays, plots.plot_position_similarity(similarity)


@page_section(
    "relative-biases",
    "Biases of relative positions",
    "What is added to the attention scores for each distance: the querying patch is in the middle of each map, and "
    "below it are the keys below it in the image. White is 0, red raises the score, blue lowers it. Of more than "
    "eight layers or heads an even selection is drawn.",
    concerns=lambda subject: encoder(subject.model).config.relative_position_bias is not None,
)
def _draw_biases(subject: Subject) -> Drawn:
    biases = relative_position_biases(subject.model, subject.layout.grid_size)
    return {"relative_position_biases": biases}, plots.plot_relative_position_biases(biases)


@page_section(
    "prefix-similarity",
    "Positions of the other tokens",
    "The cosine similarity between the positions of the tokens before the patches and those of the patches.",
)
def _draw_prefix(subject: Subject) -> Drawn:
    similarity = position_similarity(subject.model, subject.layout.grid_size)
    if not len(similarity.prefix):
        raise AnalysisError("no token before the patches has a position embedding")
    return {}, plots.plot_prefix_similarity(similarity, subject.layout.before)


@page_section(
    "attention-distance",
    "Mean attention distance",
    "The distance between the centres of query patch and key patch, weighted by attention, averaged over all "
    "patches and over all images, in pixels of the model's input (Figure 7, right). The dotted line marks uniform "
    "attention.",
)
def _draw_distance(subject: Subject) -> Drawn:
    batches = _prepared(subject.images, subject.image_processor, batch_size=1)
    distances = average_over_images(attention_distance, subject.model, batches, progress=subject.progress)
    if np.isnan(distances).any():
        raise AnalysisError("a head gives the patches no attention in any image: there is no distance to average")
    even = float(patch_distances(subject.layout.grid_size, subject.layout.patch_size).mean())
    return {"attention_distance": distances}, plots.plot_attention_distance(distances, even=even)


@page_section(
    "token-norms",
    "Norms of the tokens",
    "The token norms of the first image after each layer. Patches with a much larger norm than the others usually "
    "hold no local content (Darcet et al. 2024).",
)
def _draw_norms(subject: Subject) -> Drawn:
    norms = subject.each(token_norms)
    return {"token_norms": norms}, plots.plot_token_norms(norms[0], subject.layout, subject.pictures[0])


def _table_of_maps(subject: Subject, maps: np.ndarray, what: str) -> Figure:
    """Draw maps of shape (B, heads or layers, h, w), one image per row."""
    columns = [f"{what} {number}" for number in range(maps.shape[1])]
    return plots.plot_attention_heads(
        subject.pictures, maps, row_names=subject.titles, column_names=columns, most=COLUMNS
    )


def _maps(subject: Subject, maps: np.ndarray, meaning: str, classes: Sequence[str] | None = None) -> Figure:
    """Draw one map per image, below its title or the class that the map explains."""
    return plots.plot_maps_over_images(subject.pictures, maps, titles=subject.titles, classes=classes, meaning=meaning)


# The page


def _facts(subjects: Sequence[Subject], names: Sequence[str], images: Images, files: Sequence[str]) -> str:
    """Return the images with their names, and the facts about each model, as HTML."""
    thumbnails = [_thumbnail(read_image(image), name) for image, name in zip(images[:SHOWN], files, strict=True)]
    more = f" The figures show the first {SHOWN} of {len(images)} images." if len(images) > SHOWN else ""
    classes = [name for subject in subjects for name in subject.class_names]
    lacking = lacking_letters([*files, *classes])
    letters = (
        f"<p>No installed font has the characters {plain_text(lacking)}: the figures show their code points.</p>"
        if lacking
        else ""
    )
    facts = [_facts_of(subject) for subject in subjects]
    rows = [(what, *(fact[what] for fact in facts)) for what in facts[0]]
    return (
        f'<div class="row thumbnails">{"".join(thumbnails)}</div>'
        f"<p>The original images, height × width.{more} The figures below show them as the image processor "
        f"prepares them.</p>{letters}{html_table(('', *names[: len(facts)]), rows, 'the models')}"
        '<p class="caption">Layers, heads, tokens, patches and components are numbered from 0, as in the arrays. Every '
        "figure links to its file; the arrays are in arrays.npz.</p>"
    )


def _thumbnail(image: Image.Image, name: str) -> str:
    by = max(1, max(image.size) // 1024)  # reduce before the conversion to RGB, which copies all pixels
    small = image.resize((-(-image.width // by), -(-image.height // by)), Image.Resampling.NEAREST).convert("RGB")
    small.thumbnail((256, 256))
    if max(small.size) < 96:  # small images: whole pixels
        factor = 96 // max(small.size)
        small = small.resize((small.width * factor, small.height * factor), Image.Resampling.NEAREST)
    file = BytesIO()
    small.save(file, "PNG")
    size = f"{image.height} × {image.width} pixels"
    picture = inline_picture(file.getvalue(), f"The image {name}, {size}")
    return f"<figure>{picture}<figcaption>{plain_text(name)}<br>{size}</figcaption></figure>"


def _facts_of(subject: Subject) -> dict[str, object]:
    """Return the facts about a model, by name."""
    config, layout = plain(subject.model).config, subject.layout
    height, width = subject.pixel_values.shape[-2:]
    return {
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "width": config.hidden_size,
        "patches": "{} × {} of {} × {} pixels".format(*layout.grid_size, *layout.patch_size),
        "tokens": ", ".join([*layout.before, "patches", *layout.after]),
        "input": f"prepared by the image processor as {height} × {width} pixels",
    }


__all__ = ["draw_sheet"]
