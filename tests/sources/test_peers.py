"""Test helpers: old releases beside the installed one, and modules with randomised parameters."""

import sys
from types import ModuleType

import pytest
import torch
import vit_pytorch
from torch import nn

from tests.conftest import randomize_
from tests.peers import RELEASES, vit_pytorch_release


def imported_vit_pytorch() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vit_pytorch"}


@pytest.mark.parametrize("release", RELEASES)
def test_old_release_is_imported_next_to_the_installed_one(release: str) -> None:
    before = imported_vit_pytorch()
    old = vit_pytorch_release(release)
    assert imported_vit_pytorch() == before
    assert f"vit_pytorch-{release}" in str(old.__file__)
    assert old.ViT is not vit_pytorch.ViT
    assert old.ViT.__module__.startswith("vit_pytorch.")
    assert vit_pytorch_release(release, old.ViT.__module__.partition(".")[2]).ViT is old.ViT


def test_unlisted_release_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"add it to tests/peers\.txt"):
        vit_pytorch_release("0.0.1")


def test_randomized_values_all_differ() -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, (2, 7)), nn.BatchNorm2d(5), nn.LayerNorm(11), nn.Linear(11, 13), nn.PReLU())
    randomize_(module)
    buffers = [buffer.flatten() for name, buffer in module.named_buffers() if "running" in name]
    values = torch.cat([parameter.flatten() for parameter in module.parameters()] + buffers)
    assert values.unique().numel() == values.numel()
    assert not torch.isin(values, torch.tensor([0.0, 0.25, 1.0])).any()  # initial values of norms and PReLU
