"""A map of image features, nearest neighbours, and an order that puts similar images together.

Legend: `N` images, `D` values of a feature, `k` neighbours.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from ..errors import DataError
from ..system.extras import needs

with needs("plain-vit[train]"):
    from sklearn.decomposition import PCA

NEIGHBOURS = 12
SIMILARITIES = 2**24  # computed at a time: 64 MB
LEVELS = 2**16  # values of a coordinate

Shown = Callable[[Sequence[int]], Iterable[int]]


def unit_length(features: np.ndarray) -> np.ndarray:
    """Return features [N, D] divided by their norms, so that products are cosine similarities; zeros stay zeros."""
    scale = np.abs(features).max(axis=1, keepdims=True)  # keeps squares within float32
    features = features / np.where(scale > 0, scale, 1)
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(norms > 0, norms, 1)


def principal_map(features: np.ndarray) -> tuple[np.ndarray, float]:
    """Project features on their first two principal components, and return the fraction of variance explained.

    Args:
        features: Features of unit length, [N, D].

    Returns:
        Integer coordinates [N, 2] from 0 to 65535, and the fraction.
    """
    components = min(2, *features.shape)
    if not np.ptp(features, axis=0).any():  # all images are the same: there is no variance to divide by
        return np.full((len(features), 2), LEVELS // 2, dtype=np.uint16), 1.0
    pca = PCA(components, random_state=0)
    found = pca.fit_transform(features)
    places = np.zeros((len(features), 2))
    places[:, :components] = found
    return on_a_square(places), float(pca.explained_variance_ratio_.sum())


def umap_map(features: np.ndarray) -> np.ndarray:
    """Return the UMAP coordinates of features of unit length: integers [N, 2] from 0 to 65535.

    Raises:
        MissingPackageError: umap-learn is not installed.
        DataError: There are too few images.
    """
    if len(features) < 4:
        raise DataError(f"UMAP needs at least 4 images, and there are {len(features)}: omit --map umap.")
    threads = torch.get_num_threads()
    try:
        with needs("plain-vit[umap]"):
            from umap import UMAP
        reducer = UMAP(metric="cosine", n_neighbors=min(15, len(features) - 1), random_state=0, n_jobs=1)
        return on_a_square(np.asarray(reducer.fit_transform(features)))
    finally:
        torch.set_num_threads(threads)  # UMAP uses numba, which changes OpenMP's number of threads and so torch's


def on_a_square(places: np.ndarray) -> np.ndarray:
    """Centre coordinates [N, 2] and scale both axes by one factor, to integers from 0 to 65535."""
    low, high = places.min(axis=0), places.max(axis=0)
    extent = float((high - low).max()) or 1.0
    scaled = (places - (low + high) / 2) / extent + 0.5
    return np.rint(scaled * (LEVELS - 1)).clip(0, LEVELS - 1).astype(np.uint16)


def similar_together(places: np.ndarray) -> np.ndarray:
    """Return a Z-order of the images, which keeps neighbours on the map close together (Morton 1966).

    Args:
        places: Integer coordinates [N, 2] from 0 to 65535.
    """
    spread: np.ndarray = places.astype(np.uint32)
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        spread = (spread | (spread << shift)) & np.uint32(mask)
    return np.argsort(spread[:, 0] | (spread[:, 1] << np.uint32(1)), kind="stable")


def nearest_neighbours(features: np.ndarray, shown: Shown) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest neighbours of each image by cosine similarity, the most similar first.

    Args:
        features: Features of unit length, [N, D].
        shown: Wraps the start indices of the chunks to show progress.

    Returns:
        Indices of images [N, k] and similarities [N, k]; k is 12, or the number of other images if that is smaller.
    """
    vectors = torch.from_numpy(features)
    count = min(NEIGHBOURS, len(features) - 1)
    neighbours = np.empty((len(features), count), dtype=np.uint32)
    similarities = np.empty((len(features), count), dtype=np.float32)
    step = max(1, SIMILARITIES // len(features))
    for first in shown(range(0, len(features), step)):
        products = vectors[first : first + step] @ vectors.T
        own = torch.arange(len(products))
        products[own, own + first] = -torch.inf
        values, found = (each.numpy() for each in products.topk(count))
        order = np.lexsort((found, -values))  # ties are sorted by index
        neighbours[first : first + step] = np.take_along_axis(found, order, axis=1)
        similarities[first : first + step] = np.take_along_axis(values, order, axis=1)
    return neighbours, similarities.clip(-1, 1)
