"""timm's NaFlexVit: live modules, folders and bare files with the same numbers and bits, of images and of patches."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config
from timm.layers import RmsNorm
from timm.models import save_for_hf
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from torch import nn

from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.timm.naflex.source import NAFLEX
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError
from tests.conftest import randomize_
from tests.model.test_packed import images_of, padded
from tests.sizes import draws
from tests.sources.sweep import record
from tests.sources.timm_models import TOLERANCE, same_tensors, stage_differences
from tests.tiny import difference

ARCHITECTURES = NAFLEX.architectures
# Entrypoints with arguments that none has.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ARCHITECTURES),
    ("naflexvit_base_patch16_map", {"attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 2.5, "pool_include_prefix": True}),
    ("naflexvit_base_patch16_gap", {"embed_proj_type": "conv", "pre_norm": True, "qk_norm": True}),
    ("naflexvit_base_patch16_gap", {"global_pool": "avgmax", "fc_norm": None, "scale_mlp_norm": True}),
    ("naflexvit_base_patch16_gap", {"pos_embed": "none", "norm_layer": "rmsnorm", "embed_norm_layer": "rmsnorm"}),
    ("naflexvit_base_patch16_parfac_gap", {"pos_embed_ar_preserving": False, "proj_bias": False}),
]
IDS = [f"{name}{arguments or ''}" for name, arguments in VARIANTS]
GRIDS = [(3, 5), (5, 2), (1, 7), (3, 5), (4, 4)]  # (3, 5) is the native one
SMALL = {"pos_embed_grid_size": (3, 5), "embed_dim": 56, "num_heads": 7, "depth": 3, "num_classes": 11}


def tiny(name: str, **arguments: Any) -> Any:
    """Return timm's entrypoint at a small geometry, in evaluation mode, every parameter random."""
    return randomize_(timm.create_model(name, **{**SMALL, **arguments})).eval()


def images(module: Any, size: tuple[int, int] = (3, 5)) -> torch.Tensor:
    """Return images of so many patches."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(module.parameters()).dtype
    return torch.randn(2, 3, 16 * size[0], 16 * size[1], generator=generator).to(dtype)


def as_timm(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return padded patches as the dict that timm's collator makes."""
    coordinates = torch.zeros(*inputs["pixel_values"].shape[:2], 2, dtype=torch.long)
    for row, (h, w) in zip(coordinates, inputs["spatial_shapes"].tolist(), strict=True):
        row[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    return {
        "patches": inputs["pixel_values"],
        "patch_coord": coordinates,
        "patch_valid": inputs["pixel_attention_mask"].bool(),
    }


def rounding(module: Any) -> float:
    """Return how far numbers may be off: means and orders of products are those of other kernels for some kinds."""
    return TOLERANCE if next(module.parameters()).dtype == torch.float32 else 2e-2


# Live modules


def test_the_table_is_that_of_the_installed_timm() -> None:
    from tools.generate_architectures import constructor_architectures

    assert constructor_architectures(NAFLEX) == ARCHITECTURES
    assert set(ARCHITECTURES) == set(timm.list_models(module="naflexvit"))
    assert len(ARCHITECTURES) == 14


@pytest.mark.parametrize(("name", "arguments"), VARIANTS, ids=IDS)
def test_every_block_and_the_logits_of_images_are_timms(name: str, arguments: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = tiny(name, **arguments).to(dtype)
        model = from_module(module)
        for size in ((3, 5), (4, 2), (7, 9)):
            found = stage_differences(module, model, images(module, size))
            assert max(found.values()) <= rounding(module), (size, found)
        assert same_tensors(module, to_module(model, "timm", layout="naflexvit"))


@pytest.mark.parametrize(("name", "arguments"), VARIANTS, ids=IDS)
def test_the_logits_of_patches_of_many_sizes_are_timms(name: str, arguments: dict[str, Any]) -> None:
    if arguments.get("embed_proj_type") == "conv":
        pytest.skip("timm's convolution takes no patches")
    for dtype in (torch.float32, torch.bfloat16):
        module = tiny(name, **arguments).to(dtype)
        model = from_module(module)
        inputs = padded(images_of(GRIDS, (16, 16)), (16, 16))
        inputs["pixel_values"] = inputs["pixel_values"].clamp(-5, 5).to(dtype)
        allowed = TOLERANCE if dtype == torch.float32 else 3e-2
        assert difference(model(**inputs).logits.float(), module(as_timm(inputs)).float()) <= allowed


@pytest.mark.parametrize("name", ["naflexvit_base_patch16_parfac_gap", "naflexvit_base_patch16_siglip",
                                  "naflexvit_base_patch16_radio_v3"])  # fmt: skip
def test_the_gradients_are_timms(name: str) -> None:
    module = tiny(name)
    model = from_module(module)
    inputs = padded(images_of(GRIDS, (16, 16)), (16, 16))
    labels = torch.tensor([3, 8, 0, 1, 10])
    nn.functional.cross_entropy(module(as_timm(inputs)), labels).backward()
    model(**inputs, labels=labels).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    ours = to_module(model, "timm", layout="naflexvit").state_dict()  # gives the gradients their names and shapes
    for key, parameter in module.named_parameters():
        if parameter.grad.abs().max() > 1e-6:  # not that of a bias of all keys
            assert difference(ours[key], parameter.grad) <= 1e-4, key


def test_training_settings_are_read_off_the_module_and_given_back() -> None:
    rates = {"drop_rate": 0.11, "pos_drop_rate": 0.12, "patch_drop_rate": 0.13, "proj_drop_rate": 0.14,
             "attn_drop_rate": 0.15, "drop_path_rate": 0.16}  # fmt: skip
    module = tiny("naflexvit_base_patch16_gap", **rates).train()
    assert repr(to_module(from_module(module), "timm", layout="naflexvit")) == repr(module)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rope_type": "axial"}, "rope_type='axial'|blocks.0 is a"),
        ({"swiglu_mlp": True}, "blocks.0 is a"),
        ({"dynamic_img_pad": True}, "dynamic_img_pad=True"),
        ({"patchify_channels_last": False}, "patchify_channels_last=False"),
        ({"enable_patch_interpolator": True}, "enable_patch_interpolator=True"),
        ({"pos_embed_use_grid_sample": True}, "pos_embed_use_grid_sample=True"),
        ({"pos_embed_interp_mode": "bilinear", "pos_embed_align_corners": True}, "with pos_embed_antialias=True"),
        ({"norm_layer": nn.BatchNorm1d}, "norm_layer"),
        ({"attn_layer": "diff"}, "attn"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_reason(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        from_module(tiny("naflexvit_base_patch16_gap", **arguments))


class Derived(NaFlexVit):
    """A forward pass of its own, as people write it."""


def test_a_derived_class_is_refused() -> None:
    with pytest.raises(ExportError, match="Derived"):
        from_module(Derived(NaFlexVitCfg(embed_dim=56, num_heads=7, depth=1)))


# Drawn at random


def drawn(seed: int) -> Any:
    """Draw a model; not all of the arguments fit together."""
    draw = random.Random(seed)
    heads = draw.choice([2, 3])
    antialias = draw.random() < 0.5
    cfg = NaFlexVitCfg(
        patch_size=draw.choice([4, (4, 8)]), embed_dim=heads * 8, num_heads=heads, depth=draw.choice([1, 3]),
        mlp_ratio=draw.choice([1, 2.7, 4]), qkv_bias=draw.random() < 0.6, qk_norm=draw.random() < 0.3,
        proj_bias=draw.random() < 0.7, scale_mlp_norm=draw.random() < 0.3, scale_attn_inner_norm=draw.random() < 0.3,
        init_values=draw.choice([None, 0.0, 0.1]), class_token=draw.random() < 0.5, reg_tokens=draw.choice([0, 2]),
        pos_embed=draw.choice(["learned", "factorized", "none", "learned"]),
        pos_embed_grid_size=draw.choice([(3, 5), (4, 4)]), pos_embed_interp_mode=draw.choice(["bicubic", "bilinear"]),
        pos_embed_ar_preserving=draw.random() < 0.5, pos_embed_antialias=antialias,
        pos_embed_align_corners=not antialias and draw.random() < 0.5, pre_norm=draw.random() < 0.3,
        final_norm=draw.random() < 0.8, fc_norm=draw.choice([None, True, False]),
        global_pool=draw.choice(["", "avg", "avgmax", "max", "token", "map"]),
        pool_include_prefix=draw.random() < 0.3, embed_proj_type=draw.choice(["linear", "linear", "conv"]),
        norm_layer=draw.choice([None, "layernorm", "rmsnorm", functools.partial(RmsNorm, eps=1e-5)]),
        act_layer=draw.choice([None, "gelu_tanh", "silu", "relu"]),
    )  # fmt: skip
    return NaFlexVit(cfg, num_classes=draw.choice([0, 5]))


@pytest.mark.slow
def test_random_models_open_with_equal_numbers_and_go_back() -> None:
    opened, count = 0, draws(20, nightly=300)
    for seed in range(count):
        try:
            module: Any = randomize_(drawn(seed), seed).eval()
        except AssertionError:  # timm's own refusal
            continue
        patch = module.embeds.patch_size
        model = from_module(module)
        opened += 1
        for grid in ((3, 5), (4, 4), (2, 7)):
            (image,) = images_of([grid], patch, seed)
            found = stage_differences(module, model, image)
            assert max(found.values()) <= TOLERANCE, (seed, found)
        if module.embeds.is_linear and module.global_pool:
            inputs = padded(images_of(GRIDS, patch, seed), patch)
            theirs, ours = module(as_timm(inputs)), model(**inputs)
            assert difference(ours.logits if "logits" in ours else ours.pooler_output, theirs) <= TOLERANCE, seed
        back = to_module(model, "timm", layout="naflexvit")
        assert same_tensors(module, back), seed
        assert from_module(back).config.to_dict() == model.config.to_dict(), seed
    assert opened > count / 2


# Files


def saved(module: Any, folder: Path, **model_args: Any) -> Path:
    """Write a folder as timm does, with the arguments that make it small."""
    save_for_hf(module, folder, model_args={**SMALL, **model_args}, safe_serialization=True)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_of_timm_opens_and_one_is_written_that_timm_opens(name: str, tmp_path: Path) -> None:
    module = tiny(name)
    opened = from_checkpoint(saved(module, tmp_path / "theirs"))
    inputs = padded(images_of(GRIDS, (16, 16)), (16, 16))
    theirs = module(as_timm(inputs))
    assert difference(opened.model(**inputs).logits, theirs) <= TOLERANCE
    assert tuple(opened.model.config.image_shape) == (48, 80)
    to_checkpoint(
        opened.model, tmp_path / "ours", format="timm", image_processor=opened.image_processor, layout="naflexvit"
    )
    again = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    assert type(again) is NaFlexVit
    assert torch.equal(again(as_timm(inputs)), theirs)
    for path in (tmp_path / "theirs", tmp_path / "ours"):
        assert same_tensors_of(path, module)


def same_tensors_of(folder: Path, module: Any) -> bool:
    """Return whether a folder has the bits of a module."""
    tensors, state = load_file(folder / "model.safetensors"), module.state_dict()
    return tensors.keys() == state.keys() and all(torch.equal(tensors[name], state[name]) for name in state)


def test_the_pixels_of_a_folder_are_those_of_timms_own_transform(tmp_path: Path) -> None:
    module = tiny("naflexvit_base_patch16_gap")
    opened = from_checkpoint(saved(module, tmp_path))
    levels = np.random.default_rng(0).integers(0, 256, (70, 95, 3), dtype=np.uint8)
    theirs = create_transform(**resolve_model_data_config(module))(Image.fromarray(levels))
    assert opened.image_processor is not None
    assert torch.equal(opened.image_processor(Image.fromarray(levels), return_tensors="pt").pixel_values[0], theirs)
    assert tuple(theirs.shape) == (3, 384, 384)


@pytest.mark.slow
def test_a_bare_file_opens_by_the_name_of_its_architecture_and_asks_for_it_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with torch.device("meta"):
        module = timm.create_model("naflexvit_base_patch16_parfac_gap", num_classes=7, pos_embed_grid_size=(3, 5))
    module = randomize_(module.to_empty(device="cpu")).eval()
    save_file(module.state_dict(), file)
    with pytest.raises(AmbiguousCheckpointError, match="how positions are resampled") as caught:
        from_checkpoint(file)
    assert caught.value.candidates == {"architecture": ("naflexvit_base_patch16_parfac_gap",)}
    opened = from_checkpoint(file, architecture="naflexvit_base_patch16_parfac_gap")
    assert opened.model.config.image_shape == (48, 80)
    pixel_values = images(module, (4, 3))
    assert difference(opened.model(pixel_values).logits, module(pixel_values)) <= TOLERANCE
    with pytest.raises(MappingError, match="the tensors are not of naflexvit_base_patch16_map"):
        from_checkpoint(file, architecture="naflexvit_base_patch16_map")
    with pytest.raises(CheckpointError, match="hints contradict"):
        from_checkpoint(file, architecture="naflexvit_base_patch16_parfac_gap", hidden_act="relu")


def test_arguments_of_a_config_json_are_read_and_other_ones_refused(tmp_path: Path) -> None:
    module = tiny("naflexvit_base_patch16_gap", pos_embed_interp_mode="bilinear", norm_layer="rmsnorm")
    saved(module, tmp_path, pos_embed_interp_mode="bilinear", norm_layer="rmsnorm")
    model = from_checkpoint(tmp_path).model
    assert (model.config.position_resampling, model.config.norm_type) == ("bilinear_antialias", "rms_norm")
    assert difference(model(images(module, (2, 6))).logits, module(images(module, (2, 6)))) <= TOLERANCE
    described = json.loads((tmp_path / "config.json").read_text())
    described["model_args"]["rope_type"] = "axial"
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ExportError, match="rope_type='axial'"):
        from_checkpoint(tmp_path)


def test_a_model_that_keeps_the_aspect_ratio_of_positions_goes_to_no_other_class_of_timm() -> None:
    model = from_module(tiny("naflexvit_base_patch16_par_gap"))
    assert type(to_module(model, "timm")) is NaFlexVit
    model.config.position_resampling = "bilinear_align_corners"
    model.config.qk_norm = "rms_per_head"
    with pytest.raises(ExportError, match="timm's NaFlexVit cannot represent this model"):
        to_module(model, "timm")


# The table of what opens


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_entrypoint_has_timms_numbers_at_its_own_width(name: str) -> None:
    with torch.device("meta"):
        module = timm.create_model(name, depth=2)
        parameters = sum(parameter.numel() for parameter in timm.create_model(name).parameters())
    module = randomize_(module.to_empty(device="cpu")).eval()
    model = from_module(module)
    found = stage_differences(module, model, images(module, (6, 6)))
    inputs = padded(images_of([(6, 6), (3, 9), (8, 2)], (16, 16)), (16, 16))
    inputs["pixel_values"] = inputs["pixel_values"].clamp(-5, 5)
    many = model(**inputs)
    of_many = difference(many.logits if "logits" in many else many.pooler_output, module(as_timm(inputs)))
    half, again = module.to(torch.bfloat16), model.to(torch.bfloat16)
    rounded = stage_differences(half, again, images(half, (6, 6)))
    way_back = same_tensors(half, to_module(again, "timm", layout="naflexvit"))
    assert max(*found.values(), of_many) <= TOLERANCE
    assert way_back
    record({
        "source": f"timm {name}", "opens": True, "logits": found.get("logits", max(found.values())),
        "blocks": max(value for stage, value in found.items() if stage.startswith("block")),
        "another_resolution": of_many, "bfloat16": max(rounded.values()), "way_back_bit_exact": way_back,
        "parameters": parameters, "timm": timm.__version__, "torch": torch.__version__,
    })  # fmt: skip
