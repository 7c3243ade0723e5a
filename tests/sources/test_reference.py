"""`reference=`: missing settings are inferred from known logits, or the error says why not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vit_pytorch import ViT

from plain_vit.conversion import from_checkpoint, from_module, plan
from plain_vit.conversion import reference as references
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, MappingError, VerificationError
from tests import ROOT
from tests.conftest import randomize_
from tests.peers import vit_pytorch_release

SHIPPED = ROOT / "examples" / "checkpoints" / "glyphs_vit.pt"


def shipped() -> nn.Module:
    model = ViT(**json.loads(SHIPPED.with_suffix(".json").read_text())["constructor"])
    model.load_state_dict(torch.load(SHIPPED, weights_only=True))
    return model.eval()


@torch.no_grad()
def answer(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    return model(pixel_values)


def small(**arguments: Any) -> nn.Module:
    sizes = {"image_size": (15, 28), "patch_size": (5, 7), "num_classes": 11, "dim": 20, "depth": 2, "heads": 3}
    return randomize_(ViT(**{**sizes, "mlp_dim": 29, "dim_head": 10, **arguments})).eval()


def saved(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "vit.pt")
    return folder / "vit.pt"


IMAGES = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "numpy", "lists", "training"])
def test_the_shipped_checkpoint_is_found_by_its_logits_alone(kind: str) -> None:
    theirs, images = shipped(), IMAGES
    if kind in ("bfloat16", "float16"):
        images = images.to(getattr(torch, kind))
        reference: Any = (images, answer(theirs.to(images.dtype), images))
    else:
        reference = (images, answer(theirs, images))
    if kind == "numpy":
        reference = tuple(one.numpy() for one in reference)
    if kind == "lists":
        reference = [one.tolist() for one in reference]
    if kind == "training":
        reference = (images, theirs(images))  # with its autograd graph
    converted = from_checkpoint(SHIPPED, reference=reference)
    config = converted.report.config
    assert (config.num_attention_heads, config.image_size, config.patch_size, config.num_channels) == (4, 24, 4, 3)
    live = from_module(shipped()).state_dict()
    assert all(torch.equal(tensor, live[name]) for name, tensor in converted.model.state_dict().items())
    report = str(converted.report)
    for field in ("num_attention_heads", "image_size", "patch_size", "num_channels"):
        assert report.count(f"inferred: {field} = ") == 1


README = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 64, "depth": 4, "heads": 4, "dim_head": 16}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{**README, "mlp_dim": 128}, {"num_classes": 0}], ids=["README", "no head"])
def test_other_models_are_found_by_their_logits_or_tokens(arguments: dict[str, Any], tmp_path: Path) -> None:
    theirs = small(**arguments)
    size = arguments.get("image_size", 0)
    images = torch.randn(2, 3, size or 15, size or 28)
    config = from_checkpoint(saved(theirs, tmp_path), reference=(images, answer(theirs, images))).report.config
    expected = (4, (32, 32), (8, 8)) if size else (3, (15, 28), (5, 7))
    assert (config.num_attention_heads, config.image_shape, config.patch_shape) == expected


@pytest.mark.slow
def test_a_checkpoint_in_half_precision_is_found_by_logits_in_full(tmp_path: Path) -> None:
    theirs, images = small().bfloat16(), torch.randn(2, 3, 15, 28)
    path = saved(theirs, tmp_path)
    converted = from_checkpoint(path, reference=(images, answer(theirs.float(), images)))
    assert converted.model.dtype == torch.bfloat16
    assert converted.report.config.num_attention_heads == 3


@pytest.mark.slow(quick=["<lambda>-CheckpointError-expected \\\\(B, C, H, W\\\\) and \\\\(B, num_labels\\\\)"])
@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda pixels, logits: (pixels[:0], logits[:0]), CheckpointError, "which is empty: give at least one image"),
        (lambda pixels, logits: (pixels, logits * float("nan")), CheckpointError, "the logits .* hold NaN or infinite"),
        (lambda pixels, logits: (pixels / 0, logits), CheckpointError, "the pixel_values .* hold NaN or infinite"),
        (lambda pixels, logits: (pixels, logits * 0), CheckpointError, "all zero, as of every model with a new head"),
        (lambda pixels, logits: (pixels, logits * 0 + 1), VerificationError, "none of the .* ways .* gives the logits"),
        (
            lambda pixels, logits: (pixels, logits[:1]),
            CheckpointError,
            r"expected \(B, C, H, W\) and \(B, num_labels\)",
        ),
        (lambda pixels, logits: (pixels[0], logits[0]), CheckpointError, r"expected \(B, C, H, W\) and"),
        (lambda pixels, logits: (pixels,), CheckpointError, r"not a pair of arrays \(pixel_values, logits\)"),
        (lambda pixels, logits: pixels, CheckpointError, r"not a pair of arrays|expected \(B, C"),
        (lambda pixels, logits: 3, CheckpointError, r"not a pair of arrays \(pixel_values, logits\)"),
        (lambda pixels, logits: (pixels, "logits"), CheckpointError, r"not a pair of arrays \(pixel_values, logits\)"),
        (
            lambda pixels, logits: (pixels, logits[:, :5]),
            VerificationError,
            r"has logits of shape \(2, 5\), the model gi",
        ),
        (
            lambda pixels, logits: (pixels, torch.randn(2, 11)),
            VerificationError,
            r"the nearest is off by .* \(1e-03 is",
        ),
        (lambda pixels, logits: (torch.randn(2, 3, 30, 56), logits), VerificationError, "cannot grow a table"),
        (lambda pixels, logits: (torch.randn(2, 2, 15, 28), logits), VerificationError, "expected .batch, 3, height"),
    ],
)
def test_a_reference_that_cannot_be_is_refused(change: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    theirs, images = small(), torch.randn(2, 3, 15, 28)
    reference = change(images, answer(theirs, images))
    with pytest.raises(error, match=words):
        from_checkpoint(saved(theirs, tmp_path), patch_size=(5, 7), reference=reference)


@pytest.mark.slow
def test_smaller_images_than_the_models_leave_its_size_open(tmp_path: Path) -> None:
    theirs, images = small(image_size=(20, 28)), torch.randn(2, 3, 15, 21)
    path, reference = saved(theirs, tmp_path), (images, answer(theirs, images))
    with pytest.raises(AmbiguousCheckpointError, match="give:") as caught:
        from_checkpoint(path, patch_size=(5, 7), reference=reference)
    assert set(caught.value.candidates) == {"image_size"}  # the number of heads was found
    assert (20, 28) in caught.value.candidates["image_size"]
    found = from_checkpoint(path, patch_size=(5, 7), image_size=(20, 28), reference=reference)
    assert found.report.config.num_attention_heads == 3


@pytest.mark.slow
def test_a_candidate_that_does_not_load_is_dropped(tmp_path: Path) -> None:
    theirs = vit_pytorch_release("0.7.6").ViT(
        image_size=25, patch_size=5, num_classes=7, dim=24, depth=2, heads=3, dim_head=8, mlp_dim=20
    )
    images = torch.randn(2, 3, 25, 25)
    path = saved(randomize_(theirs).eval(), tmp_path)  # a single head as wide as the model has no output projection
    config = from_checkpoint(path, reference=(images, answer(theirs, images))).report.config
    assert config.num_attention_heads == 3


@pytest.mark.slow
def test_damaged_weights_are_the_error_and_not_the_reference(tmp_path: Path) -> None:
    theirs, images = small(), torch.randn(2, 3, 15, 28)
    logits = answer(theirs, images)
    state = theirs.state_dict()
    state["mlp_head.bias"] = state["mlp_head.bias"] * float("inf")
    torch.save(state, tmp_path / "vit.pt")
    with pytest.raises(MappingError, match="with NaN or infinite values"):
        from_checkpoint(tmp_path / "vit.pt", reference=(images, logits))


def test_more_ways_than_can_be_tried_are_asked_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs, images = small(), torch.randn(2, 3, 15, 28)
    path, logits = saved(theirs, tmp_path), answer(theirs, images)
    monkeypatch.setattr(references, "MAX_WAYS", 15)
    with pytest.raises(AmbiguousCheckpointError, match="there are 32 ways .* up to 15: give some of these") as caught:
        from_checkpoint(path, reference=(images, logits))
    assert set(caught.value.candidates) == {"num_attention_heads", "patch_size"}
    found = from_checkpoint(path, patch_size=(5, 7), reference=(images, logits))
    assert found.report.config.num_attention_heads == 3


@pytest.mark.slow
def test_all_ways_share_one_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = vit_pytorch_release("0.6.6").ViT(
        image_size=25, patch_size=5, num_classes=7, dim=24, depth=2, heads=3, dim_head=8, mlp_dim=20
    )
    images = torch.randn(2, 3, 25, 25)
    path = saved(randomize_(theirs).eval(), tmp_path)
    converted: list[object] = []
    whole = plan.ConversionPlan._convert

    def counted(recipe: Any, *arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        converted.append(recipe)
        return whole(recipe, *arguments, **options)

    monkeypatch.setattr(plan.ConversionPlan, "_convert", counted)
    report = from_checkpoint(path, reference=(images, answer(theirs, images))).report
    assert (report.config.num_attention_heads, report.config.attention_scale) == (3, 24**-0.5)
    tried = int(str(report).split(" ways were tried")[0].rsplit(" ", 1)[1])
    assert tried > 20
    assert len(converted) == 2  # once for all candidates, and once for the returned model


@pytest.mark.slow
def test_integers_of_numpy_are_pixels_too(tmp_path: Path) -> None:
    theirs = small()
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 15, 28), dtype=np.uint8)
    logits = answer(theirs, torch.from_numpy(images).float())
    found = from_checkpoint(saved(theirs, tmp_path), reference=(images, logits.numpy()))
    assert found.report.config.num_attention_heads == 3
