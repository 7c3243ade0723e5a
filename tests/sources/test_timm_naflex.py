"""Special features of timm's NaFlexVit: images of many sizes in one batch of patches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models.naflexvit import NaFlexVit
from torch import nn

from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.sources.timm.naflex.source import NAFLEX
from tests.model.test_packed import images_of, padded
from tests.sources.test_timm_files import save_folder
from tests.sources.timm_models import (
    NAFLEX_VARIANTS,
    TOLERANCE,
    as_timm,
    pixels_for,
    same_tensors,
    small_arguments,
    tiny_timm,
    variants,
)
from tests.tiny import difference

GRIDS = [(3, 5), (5, 2), (1, 7), (3, 5), (4, 4)]  # (3, 5) is the native grid


def patches(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the padded patches of images of many sizes."""
    inputs = padded(images_of(GRIDS, (16, 16)), (16, 16))
    return {**inputs, "pixel_values": inputs["pixel_values"].clamp(-5, 5).to(dtype)}


def test_the_table_is_that_of_the_installed_timm() -> None:
    from tools.generate_architectures import constructor_architectures

    assert constructor_architectures(NAFLEX) == NAFLEX.architectures
    assert set(NAFLEX.architectures) == set(timm.list_models(module="naflexvit"))
    assert len(NAFLEX.architectures) == 14


# timm's convolution does not accept patches.
@variants([case for case in NAFLEX_VARIANTS if "embed_proj_type" not in case[1]])
def test_the_logits_of_patches_of_many_sizes_are_timms(name: str, arguments: dict[str, Any]) -> None:
    for dtype, allowed in ((torch.float32, TOLERANCE), (torch.bfloat16, 3e-2)):
        module = tiny_timm(name, **arguments).to(dtype)
        inputs = patches(dtype)
        ours, theirs = from_module(module)(**inputs).logits, module(as_timm(inputs))
        assert difference(ours.float(), theirs.float()) <= allowed


@pytest.mark.parametrize("name", ["naflexvit_base_patch16_parfac_gap", "naflexvit_base_patch16_siglip",
                                  "naflexvit_base_patch16_radio_v3"])  # fmt: skip
def test_the_gradients_are_timms(name: str) -> None:
    module = tiny_timm(name)
    model = from_module(module)
    inputs = patches()
    labels = torch.tensor([3, 8, 0, 1, 10])
    nn.functional.cross_entropy(module(as_timm(inputs)), labels).backward()
    model(**inputs, labels=labels).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    ours = to_module(model, "timm", layout="naflexvit").state_dict()  # maps the gradients to timm's names and shapes
    for key, parameter in module.named_parameters():
        if parameter.grad.abs().max() > 1e-6:  # key biases have only rounding errors
            assert difference(ours[key], parameter.grad) <= 1e-4, key


@pytest.mark.parametrize("name", NAFLEX.architectures)
def test_a_folder_of_timm_opens_and_one_is_written_that_timm_opens(name: str, tmp_path: Path) -> None:
    module, inputs = tiny_timm(name), patches()
    opened = from_checkpoint(save_folder(module, tmp_path / "theirs", model_args=small_arguments(name)))
    theirs = module(as_timm(inputs))
    assert difference(opened.model(**inputs).logits, theirs) <= TOLERANCE
    assert tuple(opened.model.config.image_shape) == (48, 80)
    to_checkpoint(
        opened.model, tmp_path / "ours", format="timm", image_processor=opened.image_processor, layout="naflexvit"
    )
    for folder in ("theirs", "ours"):
        again = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        assert type(again) is NaFlexVit
        assert same_tensors(again, module)
        assert torch.equal(again(as_timm(inputs)), theirs)


def test_the_pixels_of_a_folder_are_those_of_timms_own_transform(tmp_path: Path) -> None:
    module = tiny_timm("naflexvit_base_patch16_gap")
    opened = from_checkpoint(save_folder(module, tmp_path, model_args=small_arguments("naflexvit_base_patch16_gap")))
    levels = np.random.default_rng(0).integers(0, 256, (70, 95, 3), dtype=np.uint8)
    theirs = create_transform(**resolve_model_data_config(module))(Image.fromarray(levels))
    assert opened.image_processor is not None
    assert torch.equal(opened.image_processor(Image.fromarray(levels), return_tensors="pt").pixel_values[0], theirs)
    assert tuple(theirs.shape) == (3, 384, 384)


def test_arguments_of_a_config_json_are_read(tmp_path: Path) -> None:
    arguments = small_arguments("naflexvit_base_patch16_gap", pos_embed_interp_mode="bilinear", norm_layer="rmsnorm")
    module = tiny_timm("naflexvit_base_patch16_gap", **arguments)
    model = from_checkpoint(save_folder(module, tmp_path, model_args=arguments)).model
    assert (model.config.position_resampling, model.config.norm_type) == ("bilinear_antialias", "rms_norm")
    pixel_values = pixels_for(module, size=(32, 96))
    assert difference(model(pixel_values).logits, module(pixel_values)) <= TOLERANCE
