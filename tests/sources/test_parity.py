"""Comparison of two models: it uses the source's order of operations and names what differs."""

from collections.abc import Callable

import pytest
import timm
import torch
import vit_pytorch
from torch import nn

from plain_vit.conversion import from_module
from plain_vit.conversion.parity import compare_models, probe_images
from plain_vit.errors import VerificationError
from tests.conftest import randomize_


def of_vit_pytorch() -> nn.Module:
    return vit_pytorch.ViT(
        image_size=(15, 21), patch_size=(5, 7), num_classes=11, dim=20, depth=3, heads=3, dim_head=10, mlp_dim=29
    )


def of_timm() -> nn.Module:
    return timm.create_model(
        "vit_base_patch16_224", img_size=(48, 80), embed_dim=56, num_heads=7, depth=3, num_classes=11
    )


@pytest.mark.parametrize("before", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [of_vit_pytorch, of_timm])
def test_ours_attends_as_the_source_does_meanwhile_and_as_before_afterwards(
    make: Callable[[], nn.Module], before: str
) -> None:
    source = randomize_(make()).eval()
    ours = from_module(source)
    ours.set_attn_implementation(before)
    differences = compare_models(source, ours, probe_images(ours.config))
    assert [one.stage for one in differences] == [
        "patches", "embeddings", "layer 0", "layer 1", "layer 2", "final norm", "logits"
    ]  # fmt: skip
    assert max(one.relative for one in differences) == 0.0
    assert ours.config._attn_implementation == before


def test_after_an_error_ours_attends_as_before() -> None:
    source = randomize_(of_vit_pytorch()).eval()
    ours = from_module(source)
    ours.set_attn_implementation("sdpa")
    ours.classifier = nn.Linear(3, 11)
    with pytest.raises(RuntimeError):
        compare_models(source, ours, probe_images(ours.config))
    assert ours.config._attn_implementation == "sdpa"
    ours.classifier = nn.Linear(20, 12)
    with pytest.raises(VerificationError, match=r"logits have shape \(3, 11\) in the one model, .* shape \(3, 12\)"):
        compare_models(source, ours, probe_images(ours.config))


@pytest.mark.parametrize("make", [of_vit_pytorch, of_timm])
def test_the_model_has_memory_of_its_own(make: Callable[[], nn.Module]) -> None:
    source = randomize_(make()).eval()
    theirs = {tensor.untyped_storage().data_ptr() for tensor in source.state_dict().values()}
    for name, tensor in from_module(source).state_dict().items():
        storage = tensor.untyped_storage()
        assert storage.data_ptr() not in theirs, name
        assert storage.nbytes() == tensor.nbytes, name


def test_the_first_stage_that_differs_is_the_one_that_was_changed() -> None:
    source = randomize_(of_timm()).eval()
    ours = from_module(source)
    with torch.no_grad():
        ours.vit.layers[1].mlp.fc1.bias[0] += 0.5
    shares = {one.stage: one.relative for one in compare_models(source, ours, probe_images(ours.config))}
    assert shares["patches"] == shares["embeddings"] == shares["layer 0"] == 0
    assert min(shares["layer 1"], shares["layer 2"], shares["final norm"], shares["logits"]) > 1e-4
