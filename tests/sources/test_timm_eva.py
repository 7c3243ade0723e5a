"""Special features of timm's Eva: rotary embeddings, which no tensor shows."""

from pathlib import Path
from unittest import mock

import pytest
import timm
import torch

from plain_vit.conversion import from_checkpoint, from_module, to_module
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import CheckpointError
from tests.conftest import randomize_
from tests.sources.timm_models import (
    TOLERANCE,
    asked_of,
    meta_state,
    pixels_for,
    same_tensors,
    save_bare,
    tiny_timm,
)
from tests.tiny import difference


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "name", ["vit_base_patch16_rope_224", "vit_base_patch16_rope_mixed_224", "vit_small_patch16_dinov3"]
)
def test_coordinates_are_augmented_by_timms_draws_in_training(name: str, dynamic: bool) -> None:
    module = tiny_timm(
        name, rope_shift_coords=0.4, rope_jitter_coords=1.7, rope_rescale_coords=2.0, dynamic_img_size=dynamic
    ).train()
    model = from_module(module)
    assert model.training
    assert same_tensors(module, to_module(model, "timm"))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        theirs = module(pixels_for(module))
        torch.manual_seed(seed)
        ours = model(pixels_for(module)).logits
        assert difference(ours, theirs) <= TOLERANCE  # training uses another attention kernel
        found.append(ours)
    assert difference(*found) > 1e-3


def test_patches_that_are_dropped_lose_their_rotation_too() -> None:
    for name in ("vit_base_patch16_rope_224", "vit_base_patch16_rope_mixed_224"):
        module = tiny_timm(name, patch_drop_rate=0.5).train()
        model, pixels = from_module(module), pixels_for(module)
        torch.manual_seed(3)
        with mock.patch.object(torch, "randn", torch.rand):  # uniform as in plain-vit: same choice
            theirs = module(pixels)
        torch.manual_seed(3)
        assert difference(model(pixels).logits, theirs) <= TOLERANCE


def test_a_cast_model_of_one_size_opens_with_rounded_sines_and_one_of_any_size_without() -> None:
    for dynamic, kept in ((False, "weights"), (True, "float32")):
        module = tiny_timm("eva02_tiny_patch14_224", dynamic_img_size=dynamic)
        assert from_module(module.to(torch.bfloat16)).config.rope_parameters["dtype"] == kept


def test_a_reference_finds_the_architecture_among_those_that_fit(tmp_path: Path) -> None:
    module = randomize_(timm.create_model("vit_tiny_patch16_dinov3_qkvb", num_classes=4, img_size=48)).eval()
    path = save_bare(module, tmp_path / "model.safetensors")
    with torch.no_grad():
        reference = pixels_for(module), module(pixels_for(module))
    model = from_checkpoint(path, reference=reference).model
    assert model.config.rope_parameters["coordinates"] == "centered"


def test_tensors_that_a_plain_model_has_too_are_asked_for_with_both() -> None:
    asked = asked_of(meta_state("vit_base_patch16_rope_ape_224"))
    names = asked.candidates["architecture"]
    assert {"deit3_base_patch16_224", "vit_base_patch16_rope_ape_224"} <= set(names)
    assert "rotation" in str(asked)
    asked = asked_of(meta_state("vit_small_patch16_dinov3"))
    assert asked.candidates["architecture"] == ("vit_small_patch16_dinov3",)
    # Nothing is inferred from a matching name: a caller who rejects it answers all other questions.
    assert asked.otherwise["position_embedding_type"] == ("none",)


def test_another_size_than_that_of_the_tensors_is_asked_for_or_refused() -> None:
    name = "eva02_tiny_patch14_224"
    state = meta_state(name, img_size=(56, 28))
    asked = asked_of(state, architecture=name)
    assert "another grid" in str(asked)
    assert asked.candidates["image_size"] == ()  # 2 patches do not form a square grid
    said = Hints(architecture=name, image_size=(56, 28))
    assert TIMM.describe_checkpoint(state, {}, said).config.image_size == (56, 28)
    with pytest.raises(CheckpointError, match="correct image_size"):
        TIMM.describe_checkpoint(state, {}, Hints(architecture=name, image_size=28))
