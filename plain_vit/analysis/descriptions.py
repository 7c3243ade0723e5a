"""Alternative texts of figures, generated from the same arrays.

Legend: `B` images, `h w` patch grid.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plain_vit.analysis.dense_features import Correspondences, PatchComponents
from plain_vit.analysis.embeddings import PatchFilters, PositionSimilarity
from plain_vit.analysis.inspection import TokenLayout
from plain_vit.analysis.plots import leading, percent, score_text, short_number
from plain_vit.scores import REGRESSION

MOST = 8  # items described individually


def of_top_classes(
    probabilities: np.ndarray, names: Sequence[str], titles: Sequence[str], problem_type: str | None = None
) -> str:
    """Describe the most likely classes of images, or the numbers of a regression; of shape (B, classes)."""
    texts = []
    for title, shares in zip(titles, probabilities, strict=True):
        first = leading(shares, problem_type)[:3]
        texts.append(f"{title}: " + ", ".join(f"{names[i]} {score_text(shares[i], problem_type)}" for i in first))
    what = "numbers" if problem_type == REGRESSION else "most likely classes"
    return _listed(f"Bars of the {what} of each image", texts)


def of_maps(maps: np.ndarray, titles: Sequence[str]) -> str:
    """Describe one map for each image, of shape (B, h, w)."""
    return _listed(
        "Maps, with row and column of their highest patch",
        [
            f"{title}: {_place(a_map)}, {short_number(a_map.min())} to {short_number(a_map.max())}, "
            f"mean {short_number(a_map.mean())}"
            for title, a_map in zip(titles, maps, strict=True)
        ],
    )


def of_a_table_of_maps(maps: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> str:
    """Describe attention maps of shape (rows, columns, h, w)."""
    texts = []
    for row, of_row in zip(rows, maps, strict=True):
        highest = of_row.max(axis=(1, 2))
        sharp, flat = int(highest.argmax()), int(highest.argmin())
        texts.append(
            f"{row}: highest in {columns[sharp]} ({short_number(highest[sharp])}, {_place(of_row[sharp])}), lowest in "
            f"{columns[flat]} (up to {short_number(highest[flat])})"
        )
    return _listed(f"Attention to {maps.shape[2]} x {maps.shape[3]} patches, {len(columns)} maps for each row", texts)


def of_components(components: PatchComponents, titles: Sequence[str]) -> str:
    """Describe the share of foreground in each image, and the variance of the components."""
    shares = ", ".join(f"{share:.1%}" for share in components.explained_variance)
    texts = [
        f"{title}: {percent(grid.mean())} foreground" for title, grid in zip(titles, components.foreground, strict=True)
    ]
    return _listed(f"Patches in colours of components that hold {shares} of the variance of the foreground", texts)


def of_correspondences(matches: Correspondences) -> str:
    """Describe the best pairs."""
    pairs = zip(matches.first, matches.second, matches.similarity, strict=True)
    texts = [
        f"row {row}, column {column} and row {other_row}, column {other_column}: {cosine:.2f}"
        for (row, column), (other_row, other_column), cosine in pairs
    ]
    return _listed(f"Lines between the two images. There are {len(texts)} pairs of patches, with cosines", texts)


def of_filters(filters: PatchFilters) -> str:
    """Describe the principal components of patch-embedding filters."""
    shares = filters.explained_variance
    return (
        f"{len(shares)} components as tiles: component 0 holds {shares[0]:.1%} of the filters' variance, all of them "
        f"{shares.sum():.1%}"
    )


def of_positions(similarity: PositionSimilarity) -> str:
    """Describe the similarity of the position embeddings."""
    h, w = similarity.patches.shape[:2]
    rows, columns = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    apart = np.hypot(rows[..., None, None] - rows, columns[..., None, None] - columns)
    near, far = similarity.patches[apart == 1], similarity.patches[apart > max(h, w) / 2]
    texts = [
        f"{what} have a cosine of {values.mean():.2f} on average"
        for what, values in (("neighbouring patches", near), ("patches more than half the grid apart", far))
        if values.size
    ]
    return _listed(f"A tile for each of {h} x {w} patches", texts)


def of_biases(biases: np.ndarray) -> str:
    """Describe the biases of relative positions, of shape (layers, heads, rows, columns)."""
    rows, columns = biases.shape[2:]
    middle = biases[:, :, rows // 2, columns // 2].mean()
    return (
        f"A map of {rows} x {columns} distances for each of {biases.shape[1]} heads: the biases go from "
        f"{short_number(biases.min())} to {short_number(biases.max())}, with a mean of {short_number(middle)} from a "
        f"patch to itself and of {short_number(biases.mean())} over all distances"
    )


def of_distances(distances: np.ndarray, even: float) -> str:
    """Describe mean attention distances of shape (layers, heads), in pixels."""
    means = distances.mean(axis=1)
    near, far = (np.unravel_index(place, distances.shape) for place in (distances.argmin(), distances.argmax()))
    return (
        f"A point for each head. The mean of the heads goes from {means[0]:.1f} pixels in layer 0 to {means[-1]:.1f} "
        f"in layer {len(means) - 1}; head {near[1]} of layer {near[0]} has the shortest ({distances[near]:.1f}), head "
        f"{far[1]} of layer {far[0]} the longest ({distances[far]:.1f}); uniform attention would be at {even:.1f}"
    )


def of_logits(logits: np.ndarray, names: Sequence[str], titles: Sequence[str], problem_type: str | None = None) -> str:
    """Describe the layer from which the final class leads; logits of shape (B, layers + 1, classes).

    Of a regression: where the lines of its numbers begin and end.
    """
    if problem_type == REGRESSION:
        ends = [
            ", ".join(
                f"{name} {score_text(first, problem_type)} to {score_text(last, problem_type)}"
                for name, first, last in zip(names[:3], of_image[0], of_image[-1], strict=False)
            )
            for of_image in logits
        ]
        numbers = [f"{title}: {text}" for title, text in zip(titles, ends, strict=True)]
        return _listed("Lines of numbers from the embeddings to the last layer", numbers)
    texts = []
    for title, of_image in zip(titles, logits, strict=True):
        leaders = of_image.argmax(axis=-1)
        final = int(leaders[-1])
        others = np.flatnonzero(leaders != final)
        since = int(others[-1]) if len(others) else -1  # index 0 is after the embeddings, 1 after layer 0
        when = "the embeddings" if since < 0 else f"layer {since}"
        texts.append(f"{title}: {names[final]} is the most likely class from {when} on")
    return _listed("Lines of probability over the layers", texts)


def of_norms(norms: np.ndarray, layout: TokenLayout) -> str:
    """Describe the norms of the tokens of one image, of shape (layers + 1, L)."""
    patches = norms[:, layout.patches]
    return (
        f"The median patch has a norm of {short_number(np.median(patches[0]))} after the embeddings and of "
        f"{short_number(np.median(patches[-1]))} after layer {len(norms) - 2}, where the largest is "
        f"{short_number(patches[-1].max())}, {_place(patches[-1].reshape(layout.grid_size))}"
    )


def of_a_confusion_matrix(matrix: np.ndarray, names: Sequence[str]) -> str:
    """Describe a confusion matrix; counts of shape (classes, classes)."""
    wrong = matrix - np.diag(np.diag(matrix))
    true, predicted = np.unravel_index(wrong.argmax(), wrong.shape)
    worst = f"; most often {names[true]} is predicted as {names[predicted]}, {wrong.max()} times" if wrong.any() else ""
    return f"A matrix of {len(matrix)} classes: {np.trace(matrix)} of {matrix.sum()} images are on its diagonal{worst}"


def of_mistakes(probabilities: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> str:
    """Describe misclassified images; probabilities of shape (B, classes)."""
    texts = [
        f"{names[label]} predicted as {names[shares.argmax()]} ({percent(shares.max())})"
        for label, shares in zip(labels, probabilities, strict=True)
    ]
    return _listed(f"{len(texts)} images", texts)


def of_reliability(counts: np.ndarray, confidences: np.ndarray, accuracies: np.ndarray, *, of: str = "images") -> str:
    """Describe the accuracy of predictions by their confidence; one number per bin."""
    texts = [
        f"{count} {of} with a mean confidence of {percent(confidence)}: {percent(accuracy)} correct"
        for count, confidence, accuracy in zip(counts, confidences, accuracies, strict=True)
        if count
    ]
    return _listed("Bars of the fraction correct by confidence", texts)


def of_training_curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the first and the last value of each logged curve."""
    texts = []
    for name in dict.fromkeys(name for row in rows for name in row):
        if any(word in name for word in ("loss", "accuracy", "learning_rate")):
            values = [row[name] for row in rows if row.get(name) is not None]
            if values:
                what = name.replace("_", " ")
                texts.append(f"{what} goes from {values[0]:.3g} to {values[-1]:.3g}")
    return _listed("Curves over the steps of the run", texts)


def _place(a_map: np.ndarray) -> str:
    row, column = np.unravel_index(a_map.argmax(), a_map.shape)
    return f"row {row}, column {column}"


def _listed(title: str, texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - MOST} more"] if len(texts) > MOST else []
    return f"{title}. " + "; ".join([*texts[:MOST], *more])
