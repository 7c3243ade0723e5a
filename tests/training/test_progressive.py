"""Progressive resizing: sizes by step, inputs of the model, resuming, longer runs, and errors."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as vision

from plain_vit.errors import TrainingError
from plain_vit.training.data.progressive import ProgressiveResizing
from plain_vit.training.tasks.classification import Classification
from tests.training.runs import finetune, save_plain_vit, save_stock_vit, weights_of

# 30 images in steps of 10: 2 epochs are 6 steps. The model has 32 x 24 pixels in patches of 8.
SHORT: dict[str, Any] = {
    "dataset": "digits", "shots_per_class": 3, "steps": 8, "batch_size": 10, "evaluations": 1, "log_every": 1,
    "checkpoint_every": 1, "report": False, "learning_rate": 0.01, "initial_image_size": 8, "growth_epochs": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain_vit(tmp_path_factory.mktemp("model"))


def run(model: Path, folder: Path, **changes: object) -> None:
    finetune(**{**SHORT, "model": model, "output_dir": folder, **changes})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that records the sizes of training images, in order."""
    sizes: list[tuple[int, ...]] = []
    loss = Classification.loss

    def watched(task: Any, model: Any, batch: Any) -> Any:
        hook = model.register_forward_pre_hook(
            lambda module, args, given: sizes.append(tuple(given["pixel_values"].shape[-2:])), with_kwargs=True
        )
        result = loss(task, model, batch)
        hook.remove()
        return result

    monkeypatch.setattr(Classification, "loss", watched)
    return sizes


@pytest.mark.parametrize(
    ("image_size", "patch_size", "initial", "steps"),
    [
        ((224, 224), (16, 16), 128, 100),
        ((60, 35), (12, 7), 20, 13.4),
        ((24, 96), (8, 8), 1, 7),
        ((32, 32), (8, 8), 32, 5),
    ],
)
def test_sizes_are_whole_patches_and_grow_from_the_first_to_the_models(
    image_size: tuple[int, int], patch_size: tuple[int, int], initial: int, steps: float
) -> None:
    resizing = ProgressiveResizing(image_size, patch_size, initial, steps)
    sizes = [resizing.size(step) for step in range(200)]
    for side, patch, grown in zip(image_size, patch_size, zip(*sizes, strict=True), strict=True):
        assert abs(grown[0] - max(patch, side * initial / min(image_size))) <= patch / 2
        assert grown[-1] == side
        assert all(length % patch == 0 and length > 0 for length in grown)
        assert all(before <= after for before, after in itertools.pairwise(grown))
    assert sizes[int(steps) + 1] == image_size
    assert len(set(sizes)) > 1 or initial == min(image_size)


def test_images_are_scaled_like_torchvisions() -> None:
    resizing = ProgressiveResizing((32, 24), (8, 8), 12, 10)
    pixels = torch.rand(3, 2, 32, 24)
    expected = vision.resize(pixels, [16, 16], antialias=True)
    torch.testing.assert_close(resizing(pixels, 0), expected)
    assert resizing(pixels, 10) is pixels


@pytest.mark.slow
def test_the_model_is_given_small_images_first_and_is_evaluated_on_whole_ones(
    model_folder: Path, tmp_path: Path, seen: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[tuple[int, ...]] = []
    evaluate = Classification.evaluate

    def watched(task: Any, model: Any, batches: DataLoader, *rest: Any, **options: Any) -> Any:
        kept = list(batches)
        evaluated.extend(tuple(batch["pixel_values"].shape[-2:]) for batch in kept)
        return evaluate(task, model, kept, *rest, **options)

    monkeypatch.setattr(Classification, "evaluate", watched)
    run(model_folder, tmp_path / "run", cutmix=1.0, gradient_accumulation_steps=2)
    assert len(seen) == 16
    assert seen[0] == (8, 8)
    assert seen == sorted(seen)
    assert seen[12:] == [(32, 24)] * 4  # from the sixth step on
    assert len(set(seen)) >= 3
    assert set(evaluated) == {(32, 24)}


@pytest.mark.slow
def test_a_run_resumed_with_more_steps_has_the_bits_of_one_run(model_folder: Path, tmp_path: Path) -> None:
    options = {"schedule": "constant", "warmup_steps": 1}
    run(model_folder, tmp_path / "whole", **options)
    run(model_folder, tmp_path / "parts", **options, steps=3)
    run(model_folder, tmp_path / "parts", **options, resume=True)
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth_epochs": None}, "growth_epochs is missing"),
        ({"initial_image_size": 28}, "above the model's 32 x 24"),
        ({"initial_image_size": None}, "Without initial_image_size, growth_epochs has no effect"),
        ({"initial_image_size": 0}, "initial_image_size is 0: expected 1 or more"),
    ],
)
def test_what_cannot_work_is_refused(
    model_folder: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        run(model_folder, tmp_path / "run", **options)


def test_a_model_of_one_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="ViTConfig takes images of one size: omit --initial_image_size"):
        run(save_stock_vit(tmp_path / "vit"), tmp_path / "run")
