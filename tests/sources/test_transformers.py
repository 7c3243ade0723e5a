"""transformers' own Vision Transformers: live, in files with both generations of names, and exported."""

import contextlib
import copy
import inspect
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from plain_vit import (
    PlainViTConfig,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTImageProcessor,
    PlainViTImageProcessorPil,
    PlainViTModel,
)
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.create import resampled_tables
from plain_vit.conversion.sources.transformers.families import ARCHITECTURES, AROUND, BOOKKEEPING
from plain_vit.conversion.sources.transformers.installed import class_named
from plain_vit.conversion.sources.transformers.source import TRANSFORMERS
from plain_vit.conversion.tables.engine import Row, without_prefix
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    OutputError,
    UnknownFormatError,
    VerificationError,
)
from plain_vit.positions_plain_vit import resample_positions
from plain_vit_command import main
from tests.conftest import randomize_
from tests.peers import vit_pytorch_release
from tests.releases import not_with_transformers
from tests.sizes import draws, few
from tests.sources.transformers_models import (
    CASES,
    COMPOSITES,
    LANGUAGE,
    REPRESENTATIVES,
    SQUARE,
    TOLERANCE,
    pixels_for,
    stage_differences,
    tiny_transformers,
    tolerance,
    tower_of,
    unread_by,
)
from tests.tiny import VARIATIONS, difference, pixels, tiny_config


def eager(model: Any) -> Any:
    """Set our model's attention to the order of operations of the small models here."""
    model.set_attn_implementation("eager")
    return model


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder."""
    return load_file(path / "model.safetensors")


# Live modules


@pytest.mark.slow(quick=REPRESENTATIVES[::3])
@pytest.mark.parametrize("case", REPRESENTATIVES)
def test_a_loaded_model_opens_as_a_fresh_one_does(case: str, tmp_path: Path) -> None:
    module = tiny_transformers(case)
    module.save_pretrained(tmp_path)
    for options in ({}, {"device_map": "cpu"}):
        loaded = type(module).from_pretrained(tmp_path, attn_implementation="eager", **options)
        found = stage_differences(loaded, eager(from_module(loaded)), pixels_for(module))
        assert max(found.values()) <= tolerance(case), found


def test_what_training_leaves_on_a_model_changes_nothing(tmp_path: Path) -> None:
    tiny_transformers("ViTForImageClassification").save_pretrained(tmp_path)
    module = transformers.ViTForImageClassification.from_pretrained(tmp_path, attn_implementation="eager")
    module.gradient_checkpointing_enable()
    images = [{"pixel_values": image, "labels": 1} for image in pixels_for(module)]
    arguments = transformers.TrainingArguments(str(tmp_path / "run"), max_steps=1, report_to=[], use_cpu=True)
    transformers.Trainer(module, arguments, train_dataset=images).train()
    found = stage_differences(module, eager(from_module(module.eval())), pixels_for(module))
    assert max(found.values()) == 0.0, found


def test_kernels_of_the_hub_in_place_of_a_model_s_own_are_refused() -> None:
    module = tiny_transformers("ViTModel")
    module._use_kernels = True
    with pytest.raises(ExportError, match="kernels of the Hub replace its own functions"):
        from_module(module)


def test_a_norm_that_is_one_in_the_source_and_two_here_goes_back_only_while_both_are_equal() -> None:
    model = from_module(tiny_transformers("BlipVisionModel"))
    with torch.no_grad():
        model.pooled_layernorm.bias[3] += 1
    with pytest.raises(ExportError, match="the norms before and after pooling are one there"):
        to_module(model, "transformers", layout="BlipVisionModel")


@pytest.mark.parametrize("case", ["ViTForImageClassification", "DINOv3ViTModel", "BeitForImageClassification"])
def test_gradients_are_the_sources(case: str) -> None:
    module = tiny_transformers(case, attention="sdpa")
    model: Any = from_module(module)
    gradients = []
    for one in (module, model):
        images = pixels_for(module).requires_grad_()
        outputs = one(images)
        (outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state).square().sum().backward()
        gradients.append(images.grad)
    assert torch.equal(gradients[0], gradients[1])
    with torch.no_grad():  # export gives our gradients their names
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    ours = to_module(model, "transformers", layout=case).state_dict()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(ours[name], parameter.grad), name


@pytest.mark.parametrize("side", [1, 7, 19, 25, 32])  # two of them repeat positions at their own size
def test_positions_of_idefics_are_the_sources_for_every_grid(side: int) -> None:
    module = class_named("Idefics3VisionTransformer")(
        transformers.Idefics3VisionConfig(hidden_size=4, num_attention_heads=1, num_hidden_layers=1, image_size=side,
                                          patch_size=1, intermediate_size=4)
    )  # fmt: skip
    table = randomize_(module).embeddings.position_embedding.weight
    for grid in [(side, side), *((rows, 3 * rows % 41 + 1) for rows in range(1, 41))]:
        seen = torch.ones(1, *grid, dtype=torch.bool)
        bias = module.embeddings.patch_embedding.bias
        theirs = module.embeddings(torch.zeros(1, 3, *grid), seen)[0]
        ours = resample_positions(table, (side, side), grid, "bucketed") + bias
        assert torch.equal(ours, theirs), grid


def test_a_published_config_of_idefics_says_more_of_its_tower_than_it_reads(folder: Callable[[str], Path]) -> None:
    source = folder("Idefics3ForConditionalGeneration")
    tower = json.loads((source / "config.json").read_text())["vision_config"]
    unread = {"model_type": "idefics3", "max_image_size": {"longest_edge": 364}, "size": {"longest_edge": 1456}}
    _edit(source, vision_config=tower | unread)
    assert from_checkpoint(source, verify=True).report.is_independent


@pytest.mark.parametrize("repeats", [False, True])
def test_positions_that_repeat_at_the_native_size_go_only_where_they_repeat(repeats: bool) -> None:
    model = from_module(tiny_transformers("Idefics3VisionTransformer" + (", positions that repeat" if repeats else "")))
    to_module(model, "transformers", layout="SmolVLMVisionTransformer")
    if not repeats:
        to_module(model, "transformers", layout="SiglipVisionModel")
        return
    with pytest.raises(ExportError, match="position_resampling='bucketed'"):
        to_module(model, "transformers", layout="SiglipVisionModel")
    with pytest.raises(ValueError, match="rounds a grid of 19 x 19 patches.*give another image_size"):
        resampled_tables(from_module(tiny_transformers("Idefics3VisionTransformer")), model.config)


def test_training_settings_are_read_and_given_back() -> None:
    config = transformers.ViTConfig(
        **SQUARE, num_labels=7, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2, problem_type="regression"
    )
    model = from_module(transformers.ViTForImageClassification(config).train())
    assert model.training
    assert (model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob) == (0.1, 0.2)
    again: Any = to_module(model, "transformers")
    assert (again.config.hidden_dropout_prob, again.config.attention_probs_dropout_prob) == (0.1, 0.2)
    assert again.config.problem_type == "regression"


def test_a_masked_image_model_predicts_as_the_source_where_patches_are_hidden() -> None:
    module = tiny_transformers("ViTForMaskedImageModeling")
    model = eager(from_module(module))
    assert isinstance(model, PlainViTForMaskedImageModeling)
    hidden = torch.arange(16).remainder(3).eq(0).expand(2, -1)
    with torch.no_grad():
        theirs = module(pixels_for(module), bool_masked_pos=hidden)
        ours = model(pixels_for(module), bool_masked_pos=hidden)
    assert difference(ours.reconstruction, theirs.reconstruction) == 0.0
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-4)  # theirs adds 1e-5 to a count


# Unknown parts and settings


def _other_norm(module: Any) -> None:
    module.vit.layers[1].layernorm_after.eps = 1e-3


def _other_activation(module: Any) -> None:
    module.vit.layers[2].mlp.activation_fn = nn.ReLU()


def _adapter(module: Any) -> None:
    module.vit.layers[0].adapter = nn.Linear(40, 40)


def _setting(module: Any) -> None:
    module.config.rope_theta = 100.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_other_norm, "vit.layers.1.layernorm_after.eps is 0.001, not 1e-12"),
        (_other_activation, "vit.layers.2.mlp.activation_fn.class is torch.nn.modules.activation.ReLU"),
        (_adapter, "vit.layers.0.adapter.weight is a tensor of shape (40, 40), not there"),
        (_setting, "rope_theta=100.0"),
    ],
)
def test_unknown_settings_of_a_live_module_are_named(change: Callable[[Any], None], named: str) -> None:
    module = tiny_transformers("ViTForImageClassification")
    change(module)
    with pytest.raises(ExportError) as caught:
        from_module(module)
    assert named in str(caught.value)


@pytest.mark.parametrize("name", ["ViT", "DeiT"])
def test_a_module_that_our_configuration_excludes_is_refused_with_the_reason(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**{**SQUARE, "image_size": 57}, encoder_stride=14)
    with pytest.raises(ExportError, match="a masked-image model predicts every pixel"):
        from_module(getattr(transformers, f"{name}ForMaskedImageModeling")(config))


def test_frequencies_rounded_by_a_cast_are_refused_with_the_remedy() -> None:
    with pytest.raises(ExportError, match=r"rope_embeddings.inv_freq has not the values.*dtype="):
        from_module(tiny_transformers("DINOv3ViTModel").to(torch.bfloat16))


def test_a_derived_class_is_refused() -> None:
    class Mine(transformers.ViTModel):
        pass

    with pytest.raises(ExportError, match="derived from a class of transformers"):
        from_module(Mine(transformers.ViTConfig(**SQUARE)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tables_know_every_setting_that_the_class_declares(name: str) -> None:
    family = ARCHITECTURES[name].family
    declared = set(AutoConfig.for_model(family.model_type).to_dict())
    known = {*family.settings.values(), *family.unread, *BOOKKEEPING}
    assert declared - known <= {"is_native"}  # AIMv2's sine-cosine positions, refused if they are set


def code_of(name: str) -> str:
    """Return transformers' own code for all parts of a class.

    Function by function, because `inspect.getsource` of a class parses its whole file, on which Python before 3.11.8
    may fail ("AST constructor recursion depth mismatch").
    """
    kind = class_named(name)
    settings = {"encoder_stride": 16} if "Masked" in name else {}
    with torch.device("meta"):
        module = kind(kind.config_class(**settings))
    parts = {base for part in module.modules() for base in type(part).__mro__}
    own = [part for part in parts if part.__module__.startswith("transformers.models.")]
    functions = [function for part in own for function in vars(part).values() if inspect.isfunction(function)]
    return "".join(inspect.getsource(function) for function in functions)


@pytest.mark.slow(
    quick=["DeiTModel", "ViTMSNModel", "IJepaModel", "BeitForImageClassification", "CLIPForImageClassification",
           "OwlViTVisionModel"]
)  # fmt: skip
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_part_of_a_tower_reads_the_settings_of_the_model_around_it(name: str) -> None:
    read = set(re.findall(r"config\.(\w+)|[\"'](\w+)[\"']", code_of(name)))
    read = {word for words in read for word in words}
    assert read & {"hidden_size", "num_channels", "vision_config"}  # the search finds settings that are read
    own = {"projection_dim"} if name.endswith("WithProjection") else set()  # a tensor shows it
    assert read & AROUND == own


AROUND_A_TOWER = ("llava", "paligemma", "gemma3", "lfm2_vl", "chmv2", "zoedepth")  # one for each kind of tower


def tower_configs(model_type: str) -> list[Any]:
    """Return the configurations of supported towers in the default configuration of a model of transformers."""
    types = {architecture.family.model_type for architecture in ARCHITECTURES.values()}
    whole = CONFIG_MAPPING[model_type]()
    inside = [getattr(whole, name, None) for name in ("vision_config", "backbone_config")]
    return [config for config in inside if getattr(config, "model_type", None) in types]


def tower_on_meta(config: Any) -> Any:
    """Return the tower of a configuration as a separate model on the meta device."""
    name = next(name for name, one in ARCHITECTURES.items() if one.family.model_type == config.model_type)
    with torch.device("meta"):
        return class_named(name)(config)


def check_width(tower: Any) -> None:
    """Check that a tower opens with the width of its configuration."""
    setting = ARCHITECTURES[type(tower).__name__].family.settings["hidden_size"]
    found = TRANSFORMERS.describe_module(tower, Hints()).config
    assert found.hidden_size == getattr(tower.config, setting)


@pytest.mark.parametrize("model_type", AROUND_A_TOWER)
def test_the_tower_inside_another_model_opens_with_its_configuration(model_type: str) -> None:
    (config,) = tower_configs(model_type)
    check_width(tower_on_meta(config))


@pytest.mark.slow
def test_the_towers_inside_all_models_of_transformers_open_with_their_configurations() -> None:
    towers = []
    for model_type in few(sorted(CONFIG_MAPPING), 200):
        with contextlib.suppress(Exception):  # transformers itself cannot build this default
            towers += [tower_on_meta(config) for config in tower_configs(model_type)]
    assert len(towers) > draws(6, nightly=30)
    for tower in towers:
        check_width(tower)


def test_the_tower_of_llava_opens_live_and_from_its_folder(tmp_path: Path) -> None:
    text = {"model_type": "llama", **LANGUAGE}
    settings = {
        "vision_config": {"model_type": "clip_vision_model", **SQUARE, "vocab_size": 32000},
        "text_config": text,
    }
    whole: Any = randomize_(transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**settings))).eval()
    tower = whole.model.vision_tower
    tower.set_attn_implementation("eager")
    tower.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 32000
    opened = from_checkpoint(tmp_path, verify=True)
    assert opened.report.is_independent
    whole.save_pretrained(tmp_path / "whole")
    around = from_checkpoint(tmp_path / "whole", verify=True)
    assert around.report.is_independent
    assert set(around.report.ignored.values()) == {"of the rest of the llava"}
    assert len(str(around.report).splitlines()) < 30  # however many tensors a language model has
    by_key = from_checkpoint(tmp_path / "whole", key="vision_tower").model
    for model in (opened.model, around.model, by_key, from_module(whole), from_module(whole, key="model.vision_tower")):
        assert max(stage_differences(tower, eager(model), pixels_for(tower)).values()) == 0.0


def test_the_encoder_that_a_dpt_has_in_place_of_its_own_opens(tmp_path: Path) -> None:
    backbone = {"model_type": "dinov2", "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5,
                "patch_size": 14, "image_size": 56, "reshape_hidden_states": False,
                "out_indices": [0, 1, 2, 3]}  # fmt: skip
    config = transformers.DPTConfig(
        backbone_config=backbone, hidden_size=40, neck_hidden_sizes=[6, 8, 10, 12], fusion_hidden_size=4
    )
    module: Any = randomize_(transformers.DPTForDepthEstimation(config)).eval()
    module.set_attn_implementation("eager")
    module.save_pretrained(tmp_path)
    for model in (from_module(module), from_checkpoint(tmp_path, verify=True).model):
        assert max(stage_differences(module.backbone, eager(model), pixels_for(module.backbone)).values()) == 0.0


@pytest.mark.parametrize("kind", ["JanusVisionModel", "MgpstrModel", "RadioModel"])
def test_a_ratio_of_an_mlp_is_written_from_which_its_width_comes_again(kind: str) -> None:
    config = class_named(kind).config_class(
        hidden_size=100, mlp_ratio=1.135, num_hidden_layers=1, num_attention_heads=5
    )
    assert 100 * (113 / 100) < 113  # which transformers rounds down
    with torch.device("meta"):
        module = class_named(kind)(config)
    back = to_module(from_module(module), "transformers", layout=kind)
    assert {name: tensor.shape for name, tensor in back.state_dict().items()} == {
        name: tensor.shape for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("DPTModel", {"is_hybrid": True}, "is_hybrid=True"),
        ("JanusVisionModel", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("JanusVisionModel", {"projection_dropout": 0.1}, "projection_dropout=0.1 beside hidden_dropout_rate=0.0"),
    ],
)
def test_variants_of_a_tower_without_a_counterpart_are_refused(kind: str, settings: dict, named: str) -> None:
    with torch.device("meta"):
        module = class_named(kind)(class_named(kind).config_class(**settings))
    with pytest.raises(ExportError, match=named):
        from_module(module)


def test_of_several_towers_the_error_asks_which(tmp_path: Path) -> None:
    backbone = {"model_type": "dinov2", "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 5,
                "patch_size": 14, "image_size": 56}  # fmt: skip
    config = transformers.DepthProConfig(
        image_model_config=backbone, patch_model_config=backbone, fov_model_config=backbone, patch_size=56,
        fusion_hidden_size=8, use_fov_model=False, intermediate_hook_ids=[1, 0], intermediate_feature_dims=(8, 8),
    )  # fmt: skip
    module: Any = randomize_(transformers.DepthProModel(config)).eval()
    module.save_pretrained(whole := tmp_path / "whole")
    places = ("encoder.image_encoder.model", "encoder.patch_encoder.model")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(whole)
    assert set(caught.value.candidates["key"]) == set(places)
    for place in places:
        opened = from_checkpoint(whole, key=place)
        ours = from_module(module.get_submodule(place)).state_dict()
        assert all(torch.equal(tensor, ours[name]) for name, tensor in opened.model.state_dict().items())
    model = randomize_(opened.model)
    with pytest.raises(ExportError, match=r"several models.*into_key=.encoder.image_encoder.model"):
        to_checkpoint(model, tmp_path / "new", format="transformers", into=whole)
    to_checkpoint(model, new := tmp_path / "new", format="transformers", into=whole, into_key=places[0])
    for place, folder in zip(places, (None, whole), strict=True):
        expected = (model if folder is None else from_checkpoint(folder, key=place).model).state_dict()
        ours = from_checkpoint(new, key=place).model.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items())


# InternViT's own code, which no package has and which is never run: what it computes is written again here.


def intern_vit_block(tensors: dict[str, torch.Tensor], hidden: torch.Tensor, layer: int, is_6b: bool) -> torch.Tensor:
    """Return the tokens after a block of InternViT."""
    own = {name.removeprefix(f"encoder.layers.{layer}."): one for name, one in tensors.items() if f".{layer}." in name}

    def norm(name: str, tokens: torch.Tensor) -> torch.Tensor:
        if is_6b:
            return own[f"{name}.weight"] * tokens * torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + 1e-6)
        return nn.functional.layer_norm(tokens, tokens.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"], 1e-6)

    def dense(name: str, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(tokens, own[f"{name}.weight"], own.get(f"{name}.bias"))

    query, key, value = dense("attn.qkv", norm("norm1", hidden)).chunk(3, dim=-1)
    if is_6b:
        query, key = norm("attn.q_norm", query), norm("attn.k_norm", key)
    query, key, value = (one.unflatten(-1, (5, -1)).transpose(1, 2) for one in (query, key, value))
    weights = (query * 8**-0.5 @ key.transpose(-2, -1)).softmax(dim=-1)
    hidden = hidden + own["ls1"] * dense("attn.proj", (weights @ value).transpose(1, 2).flatten(2))
    inside = nn.functional.gelu(dense("mlp.fc1", norm("norm2", hidden)))
    return hidden + own["ls2"] * dense("mlp.fc2", inside)


def intern_vit(tensors: dict[str, torch.Tensor], pixel_values: torch.Tensor, is_6b: bool) -> list[torch.Tensor]:
    """Return the tokens after the embeddings and after each block of InternViT."""
    kernel, bias = (tensors[f"embeddings.patch_embedding.{leaf}"] for leaf in ("weight", "bias"))
    patches = nn.functional.conv2d(pixel_values, kernel, bias, stride=14)
    table = tensors["embeddings.position_embedding"]
    grid = table[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, size=patches.shape[-2:], mode="bicubic", align_corners=False)
    tokens = torch.cat((tensors["embeddings.class_embedding"].expand(len(patches), -1, -1),
                        patches.flatten(2).transpose(1, 2)), dim=1)  # fmt: skip
    stages = [tokens + torch.cat((table[:, :1], grid.flatten(2).transpose(1, 2)), dim=1)]
    for layer in range(3):
        stages.append(intern_vit_block(tensors, stages[-1], layer, is_6b))
    return stages


@not_with_transformers(5, 5, "Qianfan-OCR, as which InternViT is read, is missing")
@pytest.mark.parametrize("is_6b", [True, False])
@pytest.mark.parametrize("is_inside", [True, False])
def test_folders_of_internvit_s_own_code_open_without_running_it(is_6b: bool, is_inside: bool, tmp_path: Path) -> None:
    shapes = {"norm1.weight": (40,), "norm2.weight": (40,), "ls1": (40,), "ls2": (40,), "attn.qkv.weight": (120, 40),
              "attn.proj.weight": (40, 40), "attn.proj.bias": (40,), "mlp.fc1.weight": (52, 40), "mlp.fc1.bias": (52,),
              "mlp.fc2.weight": (40, 52), "mlp.fc2.bias": (40,)}  # fmt: skip
    shapes |= dict.fromkeys(
        ["attn.q_norm.weight", "attn.k_norm.weight"] if is_6b else ["norm1.bias", "norm2.bias"], (40,)
    )
    shapes |= {} if is_6b else {"attn.qkv.bias": (120,)}
    tensors = {
        f"encoder.layers.{layer}.{name}": torch.randn(shape) for layer in range(3) for name, shape in shapes.items()
    }
    tensors |= {"embeddings.class_embedding": torch.randn(1, 1, 40),
                "embeddings.position_embedding": torch.randn(1, 17, 40),
                "embeddings.patch_embedding.weight": torch.randn(40, 3, 14, 14) / 20,
                "embeddings.patch_embedding.bias": torch.randn(40)}  # fmt: skip
    tower = {"model_type": "intern_vit_6b", "auto_map": {"AutoModel": "modeling_intern_vit.InternVisionModel"},
             "architectures": ["InternVisionModel"], "use_flash_attn": True, "hidden_size": 40, "num_hidden_layers": 3,
             "num_attention_heads": 5, "intermediate_size": 52, "image_size": 56, "initializer_factor": 1.0,
             **({} if is_6b else {"norm_type": "layer_norm", "qkv_bias": True, "qk_normalization": False})}  # fmt: skip
    stored, settings = tensors, tower
    if is_inside:
        stored = {f"vision_model.{name}": one for name, one in tensors.items()} | {"mlp1.0.weight": torch.randn(160)}
        settings = {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "vision_config": tower,
                    "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"}}  # fmt: skip
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    opened = from_checkpoint(tmp_path, verify=True)
    assert not opened.report.is_independent
    model = eager(opened.model)
    for size in ((56, 56), (42, 70)):
        pixel_values = torch.randn(2, 3, *size)
        expected, outputs = intern_vit(tensors, pixel_values, is_6b), model(pixel_values, output_hidden_states=True)
        for ours, theirs in zip(outputs.hidden_states, expected, strict=True):
            assert difference(ours, theirs) <= TOLERANCE
        assert difference(outputs.last_hidden_state, expected[-1]) <= TOLERANCE
        assert difference(outputs.pooler_output, expected[-1][:, 0]) <= TOLERANCE
    with pytest.raises(ExportError, match="layout='InternVLVisionModel' writes a class"):
        to_checkpoint(model, tmp_path / "back", format="transformers", layout="InternVisionModel")
    stock: Any = to_module(model, "transformers", layout="InternVLVisionModel")
    again = from_module(stock).state_dict()
    assert all(torch.equal(again[name], one) for name, one in model.state_dict().items())
    assert difference(stock(pixel_values).last_hidden_state, outputs.last_hidden_state) <= TOLERANCE
    _edit(tmp_path, **({"vision_config": {**tower, "window": 3}} if is_inside else {"window": 3}))
    with pytest.raises(CheckpointError, match="window=3"):
        from_checkpoint(tmp_path)


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that saves the model of a case with transformers."""

    def save(case: str) -> Path:
        tiny_transformers(case).save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return save


OTHERS = few((case for case in CASES if case not in REPRESENTATIVES), 15)


@pytest.mark.slow(
    quick=["ViTForMaskedImageModeling", "Dinov2ForImageClassification", "CLIPModel",
           "Blip2VisionModel without qkv biases", "Sapiens2Model", "Siglip2ForImageClassification"]
)  # fmt: skip
@pytest.mark.parametrize("case", [*REPRESENTATIVES, *OTHERS])
def test_a_folder_opens_and_exports_back(case: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = folder(case)
    opened = from_checkpoint(source, verify=True)
    assert opened.report.differences is not None
    assert max(stage.relative for stage in opened.report.differences) <= tolerance(case), str(opened.report)
    assert len(opened.report.differences) > 4  # all stages were compared, not only the output
    layout = str(opened.report.layout).split()[0]
    to_checkpoint(opened.model, tmp_path / "back", format="transformers", layout=layout)
    theirs, back = tensors_of(source), tensors_of(tmp_path / "back")
    if layout == type(tiny_transformers(case)).__name__:
        left_out, fresh = tuple(opened.report.ignored), unread_by(layout)
        assert all(name.endswith(left_out) for name in {*theirs} - {*back})
        kept = [name for name in back if not name.endswith(left_out) and not name.startswith(fresh)]
        assert all(torch.equal(back[name], theirs[name]) for name in kept)
        stated = json.loads((source / "config.json").read_text())
        written = json.loads((tmp_path / "back" / "config.json").read_text())
        free = {*_FREE, *ARCHITECTURES[layout].family.left_out}
        assert {key for key in stated if stated[key] != written.get(key)} <= free, (stated, written)
    ours, again = opened.model.state_dict(), from_checkpoint(tmp_path / "back", verify=True).model.state_dict()
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)


# Settings that need not survive: they belong to dropped parts, or are counted again.
_FREE = {"text_config", "vision_config", "mask_ratio", "norm_pix_loss", "encoder_stride", "pooler_output_size",
         "initializer_factor", "projection_dim", "global_attn_indexes", "fullatt_block_indexes",
         "num_cls_tokens", "num_registers",  # of RADIO, where only their sum matters
         *(f"decoder_{name}" for name in (
             "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"))}  # fmt: skip


@pytest.mark.parametrize("case", ["ViTModel", "DeiTForImageClassificationWithTeacher", "ViTMSNForImageClassification",
                                  "Dinov2ForImageClassification, SwiGLU", "CLIPVisionModel"])  # fmt: skip
def test_todays_names_open_as_the_ones_in_files(case: str, folder: Callable[[str], Path]) -> None:
    source = folder(case)
    module = tiny_transformers(case)
    filed = from_checkpoint(source)
    (source / "model.safetensors").unlink()
    torch.save(module.state_dict(), source / "pytorch_model.bin")
    opened = from_checkpoint(source, verify=True)
    assert str(opened.report.layout).endswith("bare")
    ours, twin = opened.model.state_dict(), filed.model.state_dict()
    assert ours.keys() == twin.keys()
    assert all(torch.equal(ours[name], twin[name]) for name in ours)


@pytest.mark.parametrize(
    "name", ["BeitModel", "BeitModel, no pooler", "BeitBackbone", "BeitForMaskedImageModeling", "Data2VecVisionModel"]
)
def test_a_beit_of_the_class_token_opens_with_its_own_norm(name: str, tmp_path: Path) -> None:
    name, _, without_pooler = name.partition(", ")
    kind = transformers.Data2VecVisionConfig if name.startswith("Data2Vec") else transformers.BeitConfig
    options = {"add_pooling_layer": False} if without_pooler else {}
    module = randomize_(getattr(transformers, name)(kind(**SQUARE, use_mean_pooling=False), **options)).eval()
    module.set_attn_implementation("eager")
    module.save_pretrained(tmp_path)
    for model in (from_module(module), from_checkpoint(tmp_path).model):
        found = stage_differences(module, eager(model), pixels_for(module))
        assert max(found.values()) <= TOLERANCE, found


def test_two_tensors_that_would_get_one_name_are_refused_unless_one_is_known_to_be_outside_the_model() -> None:
    tensors = {"vit.norm": 1, "norm": 2, "head": 3}
    with pytest.raises(MappingError, match=r"(?s)in 'vit\.' are also there without that prefix:.*norm"):
        without_prefix(tensors, "vit.")
    kept = without_prefix(tensors, "vit.", [("norm", "of the other part")])
    assert kept == {"norm": 1, "norm outside vit.": 2, "head": 3}


def test_shards_open(folder: Callable[[str], Path], tmp_path: Path) -> None:
    whole = from_checkpoint(folder("ViTForImageClassification")).model.state_dict()
    tiny_transformers("ViTForImageClassification").save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    sharded = from_checkpoint(tmp_path / "shards").model.state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_names_of_4_x_that_5_writes_no_longer_open(folder: Callable[[str], Path]) -> None:
    """CLIP's vision tower had a prefix and position counters; MSN's blocks had the prefix of their model."""
    clip = folder("CLIPVisionModel")
    state = {f"vision_model.{name}": tensor for name, tensor in tensors_of(clip).items()}
    save_file({**state, "vision_model.embeddings.position_ids": torch.arange(17)[None]}, clip / "model.safetensors")
    opened = from_checkpoint(clip, verify=True)
    assert list(opened.report.ignored.values()) == ["counts the positions"]
    msn = folder("ViTMSNForImageClassification")
    state = {f"vit.{name}" if name.startswith("encoder") else name: tensor for name, tensor in tensors_of(msn).items()}
    save_file(state, msn / "model.safetensors")
    assert max(stage.relative for stage in from_checkpoint(msn, verify=True).report.differences or ()) == 0.0


@pytest.mark.parametrize("case, unread", [("ViTForImageClassification", ""), ("ViTModel", ""), ("own head", "pooler")])
def test_a_config_without_a_class_asks_for_it(case: str, unread: str, folder: Callable[[str], Path]) -> None:
    source = folder("ViTModel" if case == "own head" else case)
    _edit(source, architectures=None)
    if case == "own head":  # a tutorial's wrapper of ViTModel, whose head may read the pooled or any other token
        state = {f"vit.{name}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
        head = {"classifier.weight": torch.randn(5, 40), "classifier.bias": torch.randn(5)}
        save_file(state | head, source / "model.safetensors")
        _edit(source, id2label={str(number): f"LABEL_{number}" for number in range(5)})
    kind = "ViTForImageClassification" if case == "own head" else case
    with pytest.raises(
        AmbiguousCheckpointError, match="config.json names no class.*which tokens a head reads"
    ) as caught:
        from_checkpoint(source)
    assert caught.value.candidates["layout"][0] == kind
    assert (f"{kind} does not read {unread}" in str(caught.value)) == bool(unread)
    opened = from_checkpoint(source, layout=kind, verify=True)
    assert "the caller names the model" in str(opened.report)


def test_the_caller_may_leave_the_projection_of_clip_out(folder: Callable[[str], Path]) -> None:
    source = folder("CLIPModel")
    with pytest.raises(MappingError, match="left over: 'visual_projection.weight'"):
        from_checkpoint(source, layout="CLIPVisionModel")
    with_projection = from_checkpoint(source)
    assert with_projection.model.config.representation_size == 11
    assert with_projection.report.ignored["logit_scale"] == "compares images with texts"


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


@pytest.mark.parametrize(
    ("case", "changes", "kind", "named"),
    [
        ("ViTModel", {"use_rope": True, "window": [7, 7], "nothing": 0.0}, CheckpointError, "use_rope=True"),
        ("ViTModel", {"pruned_heads": {"0": [1]}}, CheckpointError, "pruned_heads"),
        ("ViTModel", {"auto_map": {"AutoModel": "mine.Model"}}, CheckpointError, "auto_map"),
        ("ViTModel", {"model_type": "yolos"}, UnknownFormatError, "model_type 'yolos'"),
        ("ViTModel", {"architectures": ["ViTForPoses"]}, UnknownFormatError, "layout= one of ViTModel"),
        ("ViTModel", {"hidden_size": "40"}, CheckpointError, "transformers itself refuses"),
        ("ViTModel", {"num_attention_heads": 3, "head_dim": 13}, MappingError, "q_proj"),
        ("ViTModel", {"hidden_act": "swoosh"}, CheckpointError, "swoosh"),
        ("ViTForImageClassification", {"id2label": {"0": "a"}, "label2id": {"a": 0}}, CheckpointError, "1 labels"),
        ("ViTForMaskedImageModeling", {"encoder_stride": 28}, CheckpointError, "encoder_stride=28 beside patch"),
        ("Dinov2Model", {"image_size": [28, 112]}, CheckpointError, "takes the grid for a square"),
        ("Aimv2VisionModel", {"is_native": True}, CheckpointError, "is_native=True"),
        ("ViTModel", {"model_type": None}, AmbiguousCheckpointError, "no config.json says its class"),
    ],
)  # fmt: skip
def test_a_config_that_plain_vit_cannot_follow_is_refused(
    case: str, changes: dict[str, Any], kind: type[Exception], named: str, folder: Callable[[str], Path]
) -> None:
    source = folder(case)
    _edit(source, **changes)
    with pytest.raises(kind) as caught:
        from_checkpoint(source)
    assert named in str(caught.value)
    assert ("window=[7, 7]" in str(caught.value)) == ("window" in changes)  # all of them, in one error
    assert "nothing" not in str(caught.value)


def test_hints_that_config_json_answers_are_refused(folder: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match="omit num_attention_heads"):
        from_checkpoint(folder("ViTModel"), num_attention_heads=5)


def test_a_missing_and_a_strange_tensor_are_both_named(folder: Callable[[str], Path]) -> None:
    source = folder("ViTForImageClassification")
    state = tensors_of(source)
    del state["vit.layernorm.weight"]
    save_file(state | {"vit.encoder.layer.1.gamma": torch.ones(40)}, source / "model.safetensors")
    with pytest.raises(MappingError) as caught:
        from_checkpoint(source)
    assert "'layernorm.weight'" in str(caught.value)
    assert "'encoder.layer.1.gamma'" in str(caught.value)


def test_swapped_rows_of_the_table_are_noticed_by_the_comparison(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder("ViTForImageClassification")
    rows = TRANSFORMERS.rows

    def swapped(config: Any, layout: str | None) -> list[Row]:
        names = {"encoder.layer.{}.attention.attention.query": "encoder.layer.{}.attention.attention.key",
                 "encoder.layer.{}.attention.attention.key": "encoder.layer.{}.attention.attention.query"}  # fmt: skip
        return [Row(names.get(row.sources[0], row.source), row.ours, row.transform) for row in rows(config, layout)]

    monkeypatch.setattr(TRANSFORMERS, "rows", swapped)
    with pytest.raises(VerificationError):
        from_checkpoint(source, verify=True)


# Pixels


@pytest.mark.parametrize("name", ["ViTImageProcessor", "CLIPImageProcessor", "BitImageProcessor"])
def test_the_processor_next_to_a_model_prepares_its_own_pixels(
    name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = folder("ViTForImageClassification")
    settings: dict[str, Any] = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    getattr(transformers, name)(**settings).save_pretrained(source)
    stock = transformers.AutoImageProcessor.from_pretrained(source)
    assert type(stock) is getattr(transformers, name)  # the torchvision backend is the default
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (301, 277, 3), dtype=np.uint8))
    expected = stock(image, return_tensors="pt")["pixel_values"]
    prepare: Any = from_checkpoint(source).image_processor
    assert torch.equal(prepare(image, return_tensors="pt")["pixel_values"], expected)
    # The processor is kept in our folder and in the export.
    assert main(["convert", str(source), str(tmp_path / "ours")]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "transformers"]) == 0
    for place in ("ours", "back"):
        again = transformers.AutoImageProcessor.from_pretrained(tmp_path / place)
        assert type(again) is type(stock)
        assert torch.equal(again(image, return_tensors="pt")["pixel_values"], expected)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("CLIPImageProcessor", {}, ""),
        ("GotOcr2ImageProcessor", {"crop_to_patches": True}, "prepared whole: GotOcr2ImageProcessor cuts large ones"),
        ("LlavaNextImageProcessor", {}, "no image processor: LlavaNextImageProcessor prepares an image as {'pixel_val"),
    ],
)
def test_the_processor_of_a_whole_model_prepares_one_input_per_image_or_is_left_out(
    name: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    source, ours = tmp_path / "source", tmp_path / "ours"
    tiny_transformers("LlavaForConditionalGeneration").save_pretrained(source)
    size = {"size": {"height": 56, "width": 56}, "crop_size": {"height": 56, "width": 56}}
    getattr(transformers, name)(**size, **settings).save_pretrained(source)
    converted = from_checkpoint(source)
    assert any(expected in note for note in converted.report.notes) if expected else not converted.report.notes
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in ((70, 90), (900, 1800))]
    prepare: Any = converted.image_processor
    if name == "LlavaNextImageProcessor":
        assert prepare is None
        prepare = from_checkpoint(source, image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6)).image_processor
        assert tuple(prepare.image_mean) == (0.1, 0.2, 0.3)
    else:
        settings = dict.fromkeys(settings, False)
        stock = transformers.AutoImageProcessor.from_pretrained(source, **settings)
        wanted = stock(images, return_tensors="pt")["pixel_values"]
        assert torch.equal(prepare(images, return_tensors="pt")["pixel_values"], wanted)
    inputs = prepare(images, return_tensors="pt")
    assert len(converted.model(**inputs).last_hidden_state) == len(images)
    assert main(["convert", str(source), str(ours)]) == 0
    assert (ours / "preprocessor_config.json").is_file() == (converted.image_processor is not None)


def test_no_image_is_prepared_at_the_size_that_a_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides, prepare = [], transformers.CLIPImageProcessor.__call__

    def record(self: Any, *images: Any, **options: Any) -> Any:
        sides.append(self.size["shortest_edge"])
        return prepare(self, *images, **options)

    tiny_transformers("LlavaForConditionalGeneration").save_pretrained(tmp_path)
    transformers.CLIPImageProcessor(size={"shortest_edge": 10**8}).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.CLIPImageProcessor, "__call__", record)
    assert from_checkpoint(tmp_path).image_processor.size["shortest_edge"] == 10**8
    assert sides == [224]


@pytest.mark.slow(quick=["LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
@pytest.mark.parametrize("case", COMPOSITES)
def test_a_tuned_tower_goes_into_a_copy_of_the_whole_model(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, tuned = tmp_path / "whole", tmp_path / "tuned"
    module = tiny_transformers(case)
    module.save_pretrained(whole, max_shard_size="50KB")
    (whole / "notes.txt").write_text("kept")
    model = from_checkpoint(whole).model
    before, opened = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    to_checkpoint(opened, tmp_path / "same", format="transformers", into="whole")
    assert all(path.read_bytes() == Path(tmp_path, "same", path.name).read_bytes() for path in whole.iterdir())
    for tensor in model.state_dict().values():
        tensor.mul_(-1.5)
    to_checkpoint(model, tuned, format="transformers", into=whole)
    assert (tuned / "notes.txt").read_text() == "kept"
    old, new = (type(module).from_pretrained(folder).state_dict() for folder in (whole, tuned))
    changed = {name for name in new if not torch.equal(new[name], old[name])}
    assert 0 < len(changed) < len(new)
    again = from_checkpoint(tuned).model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(torch.equal(again[name], before[name]) for name in before)
    if case == "LlavaForConditionalGeneration":  # as the fine-tuning script saves it
        names = {number: str(number) for number in range(7)}
        config = PlainViTConfig.from_dict({**model.config.to_dict(), "id2label": names, "drop_path_rate": 0.1})
        classifier = PlainViTForImageClassification(config)
        classifier.vit.load_state_dict(model.state_dict())
        classifier.save_pretrained(tmp_path / "classifier")
        words = ["classifier", "from_classifier", "--to", "transformers", "--into", "whole"]
        assert main(["export", *words]) == 0
        assert "the larger model has no such part" in capsys.readouterr().out
        for path in tuned.iterdir():
            assert path.read_bytes() == Path("from_classifier", path.name).read_bytes()


def test_a_tuned_tower_goes_into_a_copy_of_one_file_of_any_source(tmp_path: Path) -> None:
    module = randomize_(timm.create_model("test_vit", num_classes=5)).eval()
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(
        {f"tower.{name}": one for name, one in tensors.items()} | {"rest": torch.ones(2)}, tmp_path / "a.safetensors"
    )
    model = from_module(module)
    for tensor in model.state_dict().values():
        tensor.mul_(2)
    key = {"into": tmp_path / "a.safetensors", "into_key": "tower"}
    to_checkpoint(model, tmp_path / "b.safetensors", format="timm", **key)
    found = load_file(tmp_path / "b.safetensors")
    assert torch.equal(found.pop("rest"), torch.ones(2))
    assert all(torch.equal(found[f"tower.{name}"], 2 * one) for name, one in tensors.items())


def test_no_tower_goes_into_a_file_of_torch_or_beside_another_model(tmp_path: Path) -> None:
    module = tiny_transformers("ViTModel")
    module.config.architectures = ["ViTModel"]
    module.config.save_pretrained(tmp_path / "whole")
    torch.save(module.state_dict(), tmp_path / "whole" / "pytorch_model.bin")
    model, out = from_checkpoint(tmp_path / "whole").model, tmp_path / "out"
    for refused, into, key in (
        (r"(?s)expected safetensors.* in a file of torch", tmp_path / "whole", None),
        ("does not exist: give the folder", tmp_path / "nothing", None),
        ("is a place in another checkpoint", None, "vit"),
    ):
        with pytest.raises(ExportError, match=refused):
            to_checkpoint(model, out, format="transformers", into=into, into_key=key)
    assert not out.exists()


@pytest.mark.slow(quick=["PixtralVisionModel"])
@pytest.mark.parametrize("case", ["PixtralVisionModel", "Mistral3ForConditionalGeneration"])
def test_pixtral_takes_the_images_of_many_sizes_of_its_own_processor(case: str, tmp_path: Path) -> None:
    module = tiny_transformers(case)
    module.save_pretrained(tmp_path)
    stock = transformers.PixtralImageProcessor(size={"longest_edge": 90}, patch_size={"height": 14, "width": 14})
    stock.save_pretrained(tmp_path)
    converted = from_checkpoint(tmp_path)
    prepare: Any = converted.image_processor
    model = eager(converted.model)
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in ((70, 90), (200, 31))]
    for given in (images, images[:1]):
        expected, inputs = (processor(given, return_tensors="pt") for processor in (stock, prepare))
        assert all(torch.equal(inputs[name], expected[name]) for name in ("pixel_values", "image_sizes"))
        with torch.no_grad():
            theirs, ours = tower_of(module)(**inputs).last_hidden_state, model(**inputs).last_hidden_state
        assert difference(ours, theirs) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, kind",
    [
        ("Qwen3VLVisionModel", "Qwen2VLImageProcessor"),
        ("Qwen3VLForConditionalGeneration", "Qwen2VLImageProcessor"),
        ("Qwen2_5_VLForConditionalGeneration", "Qwen2VLImageProcessor"),
        ("Gemma4VisionModel", "Gemma4ImageProcessor"),
    ],
)
def test_a_processor_of_patches_with_their_places_is_left_out(case: str, kind: str, tmp_path: Path) -> None:
    tiny_transformers(case).save_pretrained(tmp_path)
    getattr(transformers, kind)(patch_size=14).save_pretrained(tmp_path)
    opened = from_checkpoint(tmp_path, verify=True)
    assert opened.report.is_independent
    assert opened.image_processor is None
    assert any(f"no image processor: {kind} prepares" in note for note in opened.report.notes)
    given = from_checkpoint(tmp_path, image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6))
    prepare: Any = given.image_processor
    inputs = prepare(Image.new("RGB", (70, 90)), return_tensors="pt")
    patches = math.prod(given.model.config.grid_size)
    assert given.model(**inputs).last_hidden_state.shape == (1, patches, 40)


@pytest.mark.slow
def test_the_image_processor_normalises_in_place_of_radio_whose_files_lack_layer_scale(tmp_path: Path) -> None:
    module = tiny_transformers("RadioModel")
    for name, parameter in module.named_parameters():
        if "layer_scale" in name:
            torch.nn.init.ones_(parameter)
    module.save_pretrained(tmp_path / "radio")
    size = {"height": 56, "width": 84}
    theirs = transformers.CLIPImageProcessor(do_normalize=False, size=size, do_center_crop=False)
    theirs.save_pretrained(tmp_path / "radio")
    stored = tensors_of(tmp_path / "radio")
    published = {name: tensor for name, tensor in stored.items() if "layer_scale" not in name}
    save_file(published, tmp_path / "radio" / "model.safetensors", metadata={"format": "pt"})
    opened = from_checkpoint(tmp_path / "radio", verify=True)
    assert opened.model.config.layer_scale_init_value is None
    image, prepare = Image.new("RGB", (70, 90), (10, 90, 200)), cast(Any, opened.image_processor)
    with torch.no_grad():
        expected = module(**theirs(image, return_tensors="pt"))
        found = opened.model(**prepare(image, return_tensors="pt"))
    assert difference(found.pooler_output, expected.summary) <= TOLERANCE
    to_checkpoint(opened.model, tmp_path / "back", format="transformers", layout="RadioModel")
    back = tensors_of(tmp_path / "back")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) for name in stored)


@pytest.mark.parametrize("saved_by", [PlainViTImageProcessor, PlainViTImageProcessorPil])
def test_our_own_folders_open_with_the_class_that_every_source_has(saved_by: type, tmp_path: Path) -> None:
    PlainViTForImageClassification(tiny_config()).save_pretrained(tmp_path)
    saved_by(size={"height": 24, "width": 56}).save_pretrained(tmp_path)
    assert type(from_checkpoint(tmp_path).image_processor) is PlainViTImageProcessor


# Export to transformers


# The class that can represent a model, with and without a classifier; None if there is none.
HELD: dict[str, tuple[str | None, str | None]] = {
    "plain": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassificationWithTeacher", None),
    "mask_token": (None, "ViTModel"),
    "no_projection": (None, None),
    "wide_heads": ("ViTForImageClassification", "ViTModel"),
    "truncate": ("ViTForImageClassification", "ViTModel"),
    "representation": (None, "ViTModel"),
    "linear_patches": (None, None),
    "clip": (None, None),  # not square
    "map": (None, None),
    "mean": (None, None),
    "registers": (None, None),
    "rms": (None, None),
    "resnet": (None, None),
    "differential": (None, None),
    "no_positions": (None, None),
}


@pytest.mark.parametrize("name", HELD)
def test_a_model_of_ours_becomes_the_class_that_holds_it(name: str) -> None:
    config = tiny_config(**VARIATIONS[name])
    models = [
        eager(randomize_(PlainViTForImageClassification(config)).eval()),
        eager(randomize_(PlainViTModel(config)).eval()),
    ]
    for model, expected in zip(models, HELD[name], strict=True):
        if expected is None:
            with pytest.raises(ExportError, match="is the closest, except for") as caught:
                to_module(model, "transformers")
            assert caught.value.parts
            continue
        module: Any = to_module(model, "transformers")
        assert type(module).__name__ == expected
        module.set_attn_implementation("eager")
        found = stage_differences(module, model, pixels())
        assert max(found.values()) <= (TOLERANCE if name in ("linear_patches",) else 0.0), found


SQUARE_HELD: dict[str, tuple[dict[str, Any], str]] = {
    "clip": ({"embedding_norm": True, "patch_bias": False, "final_norm": "after_pooling"}, "CLIPVisionModel"),
    "clip, projected": (
        {"embedding_norm": True, "patch_bias": False, "final_norm": "after_pooling", "representation_size": 11,
         "representation_act": "linear", "representation_bias": False},
        "CLIPVisionModelWithProjection",
    ),
    "siglip": ({"use_class_token": False, "pooling": "map"}, "SiglipVisionModel"),
    "aimv2": (
        {"use_class_token": False, "pooling": "query", "norm_type": "rms_norm", "mlp_type": "swiglu",
         "patch_post_norm": True, "qkv_bias": False, "attention_output_bias": False, "mlp_bias": False},
        "Aimv2VisionModel",
    ),
    "dinov2": ({"layer_scale_init_value": 0.3, "intermediate_size": 80}, "Dinov2Model"),
    "dinov2, registers": (
        {"layer_scale_init_value": 0.3, "intermediate_size": 80, "num_register_tokens": 2}, "Dinov2WithRegistersModel",
    ),
    "dinov2, registers without positions": (
        {"layer_scale_init_value": 0.3, "intermediate_size": 80, "num_register_tokens": 2,
         "position_embedding_on_prefix": False},
        "Dinov2WithRegistersModel",
    ),
    "class token without a position": ({"position_embedding_on_prefix": False}, "ViTModel"),
    "mean of all": ({"use_class_token": False, "pooling": "mean"}, "IJepaModel"),
}  # fmt: skip


@pytest.mark.parametrize("name", SQUARE_HELD)
def test_a_square_model_of_ours_becomes_the_class_that_holds_it(name: str) -> None:
    fields, expected = SQUARE_HELD[name]
    model = eager(randomize_(PlainViTModel(tiny_config(**{"image_size": 56, "patch_size": 14, **fields}))).eval())
    module: Any = to_module(model, "transformers")
    assert type(module).__name__ == expected
    module.set_attn_implementation("eager")
    found = stage_differences(module, model, pixels_for(module))
    # Positions of registers are added to the registers on export: the same sum as in our model.
    assert max(found.values()) <= tolerance(expected), found


def test_a_masked_image_model_of_ours_becomes_the_sources() -> None:
    config = tiny_config(image_size=56, patch_size=14, use_mask_token=True)
    model = eager(randomize_(PlainViTForMaskedImageModeling(config)).eval())
    module: Any = to_module(model, "transformers")
    module.set_attn_implementation("eager")
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0
    config = tiny_config(image_size=56, patch_size=14, use_mask_token=True, reconstruction_target="mean_color")
    with pytest.raises(ExportError, match="mean_color"):
        to_module(PlainViTForMaskedImageModeling(config), "transformers")
    with pytest.raises(ExportError, match="use_mask_token"):
        to_module(model, "timm")


def test_what_is_refused_is_listed_with_the_remedy() -> None:
    model = PlainViTForImageClassification(tiny_config(drop_path_rate=0.1, layer_scale_init_value=0.1))
    with pytest.raises(ExportError) as caught:
        to_module(model, "transformers", layout="ViTForImageClassification")
    assert len(caught.value.parts) == 2
    assert "can be set to 0 in the model's config" in str(caught.value)
    model.config.drop_path_rate = 0.0
    with pytest.raises(ExportError) as caught:
        to_module(model, "transformers", layout="ViTForImageClassification")
    assert caught.value.parts == ("layer_scale_init_value=0.1 (there it would be None)",)
    with pytest.raises(UnknownFormatError, match="expected one of ViTModel"):
        to_module(model, "transformers", layout="ViTForSegmentation")


# Names of label files, and output over source


@pytest.mark.parametrize("target", ["timm", "vit_pytorch"])
def test_a_mask_token_may_be_dropped_by_name_and_the_error_says_so(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = from_module(randomize_(tiny_transformers("Dinov2Model")))
    assert model.config.use_mask_token
    out = tmp_path / ("out" if target == "timm" else "out.pt")
    with pytest.raises(ExportError, match=r"drop=\('mask_token',\), or --drop mask_token") as caught:
        to_checkpoint(model, out, format=target)
    assert any(part.startswith("use_mask_token") for part in caught.value.parts)
    assert not out.exists()
    if target == "vit_pytorch":  # lacks other parts too, which are still refused
        with pytest.raises(ExportError) as caught:
            to_module(model, target, drop=["mask_token"])
        assert not any("mask_token" in part for part in caught.value.parts)
        return
    module = to_module(model, target, drop=["mask_token"]).eval()
    images = torch.randn(2, 3, *model.config.image_shape)
    with torch.no_grad():
        assert torch.equal(module(images), model.eval()(images).pooler_output)
    exported = to_checkpoint(model, out, format=target, drop=["mask_token"])
    assert exported.dropped.keys() == {"mask_token"}
    assert "dropped mask_token: it replaces hidden patches" in str(exported)
    model.save_pretrained(tmp_path / "ours")
    words = ["export", str(tmp_path / "ours"), str(tmp_path / "again"), "--to", target]
    assert main(words) == ExportError.exit_code
    assert "--drop mask_token" in capsys.readouterr().err
    assert main([*words, "--drop", "mask_token"]) == 0
    assert "dropped mask_token: it replaces hidden patches" in capsys.readouterr().out
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    back = from_checkpoint(out).model.state_dict()
    kept = {name: tensor for name, tensor in model.state_dict().items() if "mask_token" not in name}
    assert back.keys() == kept.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in kept.items())


def test_what_outputs_read_or_what_is_not_there_cannot_be_dropped() -> None:
    masked = PlainViTForMaskedImageModeling(tiny_config(use_mask_token=True))
    for model, words in (
        (masked, "its outputs depend on it"),
        (PlainViTForImageClassification(tiny_config()), "the model has none"),
    ):
        with pytest.raises(ExportError, match=words):
            to_module(model, "timm", drop=["mask_token"])
    with pytest.raises(ExportError, match=r"drop has 'cls_token': expected one of \['mask_token'\]"):
        to_module(PlainViTForImageClassification(tiny_config()), "timm", drop=["cls_token"])


def test_labels_are_named_from_a_file(folder: Callable[[str], Path], tmp_path: Path) -> None:
    source, names = folder("ViTForImageClassification"), list("ABCDEFG")
    files = {"labels.txt": "\n".join(names) + "\n", "list.json": json.dumps(names),
             "object.json": json.dumps(dict(enumerate(names)))}  # fmt: skip
    for file, text in files.items():
        (tmp_path / file).write_text(text)
        out = tmp_path / f"out-{Path(file).stem}"
        assert main(["convert", str(source), str(out), "--labels", str(tmp_path / file), "--no-verify"]) == 0
        config = AutoConfig.from_pretrained(out)
        assert config.id2label == dict(enumerate(names))
        assert config.label2id["C"] == 2


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("short.txt", "A\nB\n", "2 labels: expected 7"),
        ("gap.json", '{"0": "A", "2": "C"}', "expected 7, numbered from 0"),
        ("words.json", '{"A": 0}', "cannot be read as label names"),
        ("numbers.json", "[1, 2]", "holds more than names"),
        ("torn.json", '["A"', "is not JSON"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    file: str, text: str, named: str, folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = folder("ViTForImageClassification")
    (tmp_path / file).write_text(text)
    arguments = ["convert", str(source), str(tmp_path / "out"), "--labels", str(tmp_path / file)]
    assert main(arguments) == CheckpointError.exit_code
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow(quick=["ViTForImageClassification"])
@pytest.mark.parametrize("case", ["ViTForImageClassification", "CLIPForImageClassification"])
def test_names_of_the_classes_settle_stale_labels(case: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module, names = tiny_transformers(case), list("abcde")
    module.classifier = randomize_(nn.Linear(40, 5))
    module.config.problem_type = "multi_label_classification"
    module.save_pretrained(tmp_path / "stale")
    for refused in (lambda: from_checkpoint(tmp_path / "stale"), lambda: from_module(module)):
        with pytest.raises(CheckpointError, match=r"7 labels, the classifier 5: .*id2label=, a list of 5 .*\(--labels"):
            refused()
    with pytest.raises(CheckpointError, match="id2label names 3 labels: expected 5"):
        from_checkpoint(tmp_path / "stale", id2label=names[:3])
    converted = from_checkpoint(tmp_path / "stale", id2label=names, verify=True)
    assert converted.report.is_independent
    for model in (converted.model, from_module(module, id2label=dict(enumerate(names)))):
        assert model.config.id2label == dict(enumerate(names))
        assert model.config.label2id["c"] == 2
        assert model.config.problem_type == "multi_label_classification"
        pixel_values = pixels_for(module)
        assert difference(eager(model)(pixel_values).logits, module(pixel_values).logits) == 0.0
    (tmp_path / "names.txt").write_text("\n".join(names))
    words = ["convert", str(tmp_path / "stale"), str(tmp_path / "out")]
    assert main(words) == CheckpointError.exit_code
    assert "--labels FILE" in capsys.readouterr().err
    assert main([*words, "--labels", str(tmp_path / "names.txt")]) == 0
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == dict(enumerate(names))
    assert main(["inspect", str(tmp_path / "stale"), "--labels", str(tmp_path / "names.txt")]) == 0


def test_an_export_never_replaces_its_source(folder: Callable[[str], Path]) -> None:
    source = folder("ViTForImageClassification")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    arguments = ["export", str(source), str(source), "--to", "transformers", "--force", "--no-image-processor"]
    assert main(arguments) == OutputError.exit_code
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


# Other packages' models in transformers' own class, opened without plain-vit


def _timm() -> nn.Module:
    return timm.create_model("vit_base_patch16_224", img_size=56, patch_size=14, embed_dim=40, num_heads=5, depth=3,
                             num_classes=7)  # fmt: skip


def _timm_deit() -> nn.Module:
    return timm.create_model("deit_tiny_distilled_patch16_224", img_size=56, patch_size=14, embed_dim=40, num_heads=5,
                             depth=3, num_classes=7)  # fmt: skip


def _timm_dinov2() -> nn.Module:
    return timm.create_model("vit_small_patch14_reg4_dinov2", img_size=56, embed_dim=40, num_heads=5, depth=3)


def _torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(image_size=56, patch_size=14, num_layers=3, num_heads=5, hidden_dim=40,
                                                mlp_dim=52, num_classes=7)  # fmt: skip


def _vit_pytorch_of_2021() -> nn.Module:
    release = vit_pytorch_release("0.19.6")
    return release.ViT(image_size=56, patch_size=14, num_classes=7, dim=40, depth=3, heads=3, dim_head=12, mlp_dim=52)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, float]] = {
    "timm": (_timm, "vit", 0.0),
    "timm_deit": (_timm_deit, "deit", 0.0),
    "timm_dinov2": (_timm_dinov2, "dinov2_with_registers", 0.0),
    "torchvision": (_torchvision, "vit", 0.0),
    # A convolution sums pixels in a different order than a dense layer.
    "vit_pytorch_of_2021": (_vit_pytorch_of_2021, "vit", TOLERANCE),
}

# Loaded like by another user: without plain-vit, offline, without trust in remote code.
ELSEWHERE = """
    import importlib.abc, json, pathlib, sys
    import torch

    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "plain_vit":
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Absent())
    from transformers import (
        AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification,
        DeiTForImageClassificationWithTeacher,
    )

    said = {}
    for folder in sorted(pathlib.Path("exported").iterdir()):
        config = AutoConfig.from_pretrained(folder)
        (name,) = config.architectures
        kind = AutoModelForImageClassification if name.endswith("ForImageClassification") else AutoModel
        if name.endswith("WithTeacher"):  # no Auto class has it
            kind = DeiTForImageClassificationWithTeacher
        model, info = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        with torch.no_grad():
            outputs = model.eval()(torch.load("pixels.pt"))
        torch.save(outputs.logits if "logits" in outputs else outputs.last_hidden_state, folder.with_suffix(".pt").name)
        processor = AutoImageProcessor.from_pretrained(folder)
        said[folder.name] = [config.model_type, type(model).__module__, type(processor).__module__]
    print(json.dumps(said))
"""


@pytest.mark.slow
def test_models_of_other_packages_open_where_plain_vit_is_not(tmp_path: Path) -> None:
    pixel_values = torch.randn(2, 3, 56, 56)
    torch.save(pixel_values, tmp_path / "pixels.pt")
    models = {name: eager(from_module(randomize_(make()).eval())) for name, (make, _, _) in MODELS.items()}
    for name, model in models.items():
        processor = PlainViTImageProcessorPil(size={"height": 56, "width": 56})
        to_checkpoint(model, tmp_path / "exported" / name, format="transformers", image_processor=processor)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ELSEWHERE)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for name, model in models.items():
        _, model_type, allowed = MODELS[name]
        assert said[name][0] == model_type
        assert said[name][1].startswith("transformers.models.")
        assert said[name][2].startswith("transformers.models.vit.")
        with torch.no_grad():
            outputs = model(pixel_values)
        ours = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        assert difference(torch.load(tmp_path / f"{name}.pt"), ours) <= allowed
        # And back to plain-vit.
        again = eager(from_checkpoint(tmp_path / "exported" / name).model)
        with torch.no_grad():
            outputs = again(pixel_values)
        assert difference(outputs.logits if "logits" in outputs else outputs.last_hidden_state, ours) <= allowed


def test_current_vit_pytorch_is_refused_for_its_additional_parts() -> None:
    import vit_pytorch

    model = from_module(
        vit_pytorch.ViT(image_size=56, patch_size=14, num_classes=7, dim=40, depth=3, heads=3, dim_head=12, mlp_dim=52)
    )
    with pytest.raises(ExportError) as caught:
        to_module(model, "transformers", layout="ViTForImageClassification")
    assert {part.partition("=")[0] for part in caught.value.parts} == {"patch_pre_norm", "patch_post_norm"}


def test_a_centre_crop_that_transformers_cannot_do_is_refused_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(image_size=56, patch_size=14)))
    model.save_pretrained(tmp_path / "ours")
    PlainViTImageProcessorPil(
        size={"shortest_edge": 64}, do_center_crop=True, crop_size={"height": 56, "width": 56}
    ).save_pretrained(tmp_path / "ours")
    command = ["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "transformers"]
    assert main(command) == ExportError.exit_code
    assert "a centre crop whose margin depends on the image" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, "--no-image-processor"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    shutil.rmtree(tmp_path / "out")


def test_a_folder_whose_names_only_the_whole_models_loader_knows_has_the_weights_of_the_live_model(
    folder: Callable[[str], Path],
) -> None:
    case = "QianfanOCRForConditionalGeneration"
    live, opened = from_module(tiny_transformers(case)).state_dict(), from_checkpoint(folder(case)).model.state_dict()
    assert live.keys() == opened.keys()
    assert all(torch.equal(live[name], opened[name]) for name in live)


@pytest.mark.parametrize("case", ["QianfanOCRForConditionalGeneration", "QianfanOCRModel", "AltCLIPModel"])
def test_the_model_to_compare_with_gets_its_weights_from_transformers_own_loader(
    folder: Callable[[str], Path], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_transformers(case)
    config, live = from_module(module).config, tower_of(module).state_dict()
    tensors = load_file(folder(case) / "model.safetensors")
    (prefix,) = {name.split(".")[0] + "." for name in tensors if name.startswith("vision")}
    stored = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
    monkeypatch.setattr(type(TRANSFORMERS), "rows", None)  # disables our own table
    loaded = TRANSFORMERS.for_module(stored, config, f"{type(tower_of(module)).__name__} 4.x")
    assert loaded.keys() == live.keys()
    assert all(torch.equal(loaded[name], live[name]) for name in live)
