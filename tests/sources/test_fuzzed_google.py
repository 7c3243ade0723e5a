"""Google's `.npz` files with random geometry, opened with true answers and compared with the equations in numpy.

Sizes are drawn from few numbers, so that many coincide: this reveals sizes that are read from the wrong dimension.
"""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plain_vit.conversion import to_checkpoint
from tests.sizes import draws
from tests.sources import google_models
from tests.sources.google_models import BIG_VISION, PAPER, as_bfloat16, random_arrays, save, stacked
from tests.sources.test_google import TOLERANCE, differences
from tests.sources.truthful import Tally, open_truthfully

PREFIXES = ("", "opt/target/", "params/", "params/img/")
TABLES = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding", "pos_embedding")


def drawn_sizes(draw: random.Random) -> dict[str, Any]:
    """Return values for the constants of `google_models`."""
    heads = draw.choice([1, 2, 3, 4])
    return {
        "WIDTH": heads * draw.choice([4, 8]) * draw.choice([1, 2]) if heads > 1 else draw.choice([8, 12, 16]),
        "SHARING_HEADS": heads,
        "HEADS": draw.choice([1, 2, 3, 4, 8]),
        "HEAD_DIM": draw.choice([1, 2, 4, 8]),
        "MLP": draw.choice([4, 8, 16, 24]),
        "DEPTH": draw.choice([1, 2, 3, 11]),
        "REPRESENTATION": draw.choice([4, 8, 16, 24]),
        "PATCH": draw.choice([(1, 1), (2, 2), (4, 4), (2, 4), (4, 2), (3, 8)]),
        "PATCH_OF_STEM": draw.choice([(1, 1), (1, 2), (2, 1)]),
    }


def drawn_model(draw: random.Random) -> tuple[dict[str, Any], str]:
    """Return arguments of `random_arrays` for a model that one of the two code bases can build, and its pooling."""
    names = draw.choice([PAPER, BIG_VISION])
    pooling = draw.choice(["cls", "cls", "mean", "map"])
    tables: list[Any] = [*TABLES, None] if names == BIG_VISION else [TABLES[0], TABLES[1]]
    stem = draw.choice([None, None, None, (), (1,), (1, 1)]) if names == PAPER and pooling == "cls" else None
    return {
        "names": names,
        "positions": draw.choice(tables),
        # For a feature map of one position, a group norm takes the variance of two values, which rounding can dominate.
        "grid": draw.choice([(1, 1) if stem is None else (2, 2), (2, 2), (3, 3), (1, 4), (2, 3), (4, 1), (1, 9)]),
        "class_token": pooling == "cls",
        "map_head": pooling == "map",
        "shared_width": draw.random() < 0.5,
        "representation": draw.random() < 0.4,
        "classes": draw.choice([0, 1, 4, 8]),
        "stem": stem,
        "gains_4d": stem is not None and draw.random() < 0.5,
        "seed": draw.randrange(1000),
    }, pooling


def check(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    """Write a file, open it with true answers, compare its outputs, and write it again."""
    draw = random.Random(seed)
    for name, value in drawn_sizes(draw).items():
        monkeypatch.setattr(google_models, name, value)
    fields, pooling = drawn_model(draw)
    arrays = random_arrays(**fields)
    stride = 1 if fields["stem"] is None else 4 * 2 ** max(0, len(fields["stem"]) - 1)
    patch = google_models.PATCH if fields["stem"] is None else google_models.PATCH_OF_STEM
    size = tuple(stride * side * count for side, count in zip(patch, fields["grid"], strict=True))
    truth = {"image_size": size, "pooling": pooling}
    halves = draw.random() < 0.2
    written = as_bfloat16(arrays) if halves else arrays
    written = stacked(written) if draw.random() < 0.5 else written
    h, w = fields["grid"]
    # Google's code takes a square number of positions for a square grid, and so does ours: give other grids.
    said = {"image_size": size} if h != w and math.isqrt(h * w) ** 2 == h * w else {}
    outcome = open_truthfully(save(path, written, draw.choice(PREFIXES)), lambda name, _: truth.get(name), **said)
    if outcome.converted is None:
        tally.add(outcome)
        return
    model = outcome.converted.model
    found = (model.config.image_shape, model.config.pooling, model.dtype)
    assert found == (size, pooling, torch.bfloat16 if halves else torch.float32), (seed, fields, outcome.answers)
    if halves:
        arrays = {
            name: (half.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            for name, half in as_bfloat16(arrays).items()
        }
    back = path.with_name("back.npz")
    to_checkpoint(model, back, format="google", layout=outcome.converted.report.layout, force=True)
    with np.load(back, allow_pickle=False) as again:
        assert set(again) == set(written), seed
        for name, array in written.items():
            assert (again[name].shape, again[name].tobytes()) == (array.shape, array.tobytes()), (seed, name)
    off = max(differences(model.float(), arrays).values())
    assert off <= TOLERANCE, (seed, fields, off)
    tally.add(outcome, off)


@pytest.mark.slow
def test_a_file_opens_with_the_numbers_of_the_equations_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tally()
    for seed in range(draws(40, nightly=1000)):
        check(seed, tmp_path / "model.npz", monkeypatch, tally)
    assert tally.opened >= 0.9 * tally.total, str(tally)
