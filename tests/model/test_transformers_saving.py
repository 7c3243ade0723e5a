"""Saving and loading in every format of transformers, without stale files or lost data."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from huggingface_hub import HfApi
from safetensors import safe_open
from timm.models import save_for_hf
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

from plain_vit import (
    PlainViTBackbone,
    PlainViTConfig,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
)
from tests.conftest import randomize_
from tests.hub.endpoint import HubEndpoint
from tests.releases import not_with_transformers
from tests.sources.transformers_models import size_of, tiny_transformers
from tests.tiny import SIZES, VARIATIONS, difference, pixels, tiny_config

HEADS: list[Any] = [
    PlainViTModel, PlainViTForImageClassification, PlainViTForMaskedImageModeling, PlainViTBackbone,
]  # fmt: skip


def build(model_class: Any = PlainViTForImageClassification, seed: int = 0, **fields: Any) -> Any:
    """Return a small model with random parameters."""
    return randomize_(model_class(tiny_config(**fields)), seed).eval()


def first_output(model: Any) -> torch.Tensor:
    """Return the model's output for fixed pixels."""
    with torch.no_grad():
        found = model(pixels().to(model.dtype))[0]
    return found[0] if isinstance(found, tuple) else found


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Assert that two state dicts are equal in names, dtypes and bits."""
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("model_class", HEADS)
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_every_head_comes_back_from_one_file_or_many(model_class: Any, shard: str, tmp_path: Path) -> None:
    model = build(model_class, use_mask_token=True)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors*"))
    assert (len(files) > 3) == (shard == "20KB")
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert not loaded.training
    assert_same(loaded, model)
    assert torch.equal(first_output(loaded), first_output(model))


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_every_variation_comes_back(name: str, tmp_path: Path) -> None:
    model = build(**VARIATIONS[name])
    model.save_pretrained(tmp_path)
    loaded = PlainViTForImageClassification.from_pretrained(tmp_path)
    elsewhere = {"_name_or_path": None, "dtype": None}
    assert loaded.config.to_dict() | elsewhere == model.config.to_dict() | elsewhere
    assert_same(loaded, model)
    assert torch.equal(first_output(loaded), first_output(model))


def test_names_on_disk_are_the_names_of_the_modules(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}
        assert file.metadata() == {"format": "pt"}
    assert not model._tied_weights_keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_and_can_be_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build().to(dtype)
    model.save_pretrained(tmp_path)
    loaded = PlainViTForImageClassification.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    assert_same(loaded, model)
    assert torch.equal(first_output(loaded), first_output(model))
    assert PlainViTForImageClassification.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
    build().save_pretrained(tmp_path)
    assert PlainViTForImageClassification.from_pretrained(tmp_path, dtype=dtype).dtype == dtype


def test_pixels_come_in_any_floating_dtype() -> None:
    model = build().bfloat16()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        assert model(pixels().to(dtype)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_places_the_model(device_map: Any, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = PlainViTForImageClassification.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(first_output(loaded), first_output(model))


@pytest.mark.parametrize("name", ["plain", "registers_last", "branches", "map", "sincos"])
def test_parts_can_be_offloaded_to_disk(name: str, tmp_path: Path) -> None:
    model = build(**VARIATIONS[name])
    model.save_pretrained(tmp_path / "model")
    places = {"vit.embeddings": "cpu", "vit.layers.0": "disk", "vit.layers.1": "cpu", "vit.layers.2": "disk"}
    rest = {f"vit.{part}": "cpu" for part, _ in model.vit.named_children() if part not in ("embeddings", "layers")}
    loaded = PlainViTForImageClassification.from_pretrained(
        tmp_path / "model", device_map={**places, **rest, "classifier": "disk"}, offload_folder=tmp_path / "disk"
    )
    assert next(loaded.vit.layers[0].parameters()).device.type == "meta"
    assert torch.equal(first_output(loaded), first_output(model))


@pytest.mark.parametrize("offload", ["cpu", "disk", "dispatch"])
def test_accelerate_offloads_every_layer(offload: str, tmp_path: Path) -> None:
    model = build()
    expected = first_output(model)
    if offload == "cpu":
        cpu_offload(model, execution_device="cpu")
    elif offload == "disk":
        disk_offload(model, str(tmp_path), execution_device="cpu")
    else:
        places = {"vit.embeddings": "cpu", "vit.layers": "disk", "vit.layernorm": "cpu", "vit.pooler": "cpu",
                  "vit.pooled_layernorm": "cpu", "vit.representation": "cpu", "dropout": "cpu",
                  "classifier": "cpu"}  # fmt: skip
        dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    assert next(model.vit.layers[0].parameters()).device.type == "meta"
    assert torch.equal(first_output(model), expected)


# Files of an earlier save are not loaded


@pytest.mark.parametrize("first, second", [("1GB", "20KB"), ("20KB", "1GB"), ("20KB", "60KB"), ("60KB", "20KB")])
@pytest.mark.parametrize("variant", [None, "fp32"])
def test_a_second_save_leaves_no_weights_of_the_first(
    first: str, second: str, variant: str | None, tmp_path: Path
) -> None:
    build(seed=1).save_pretrained(tmp_path, max_shard_size=first, variant=variant)
    (tmp_path / "notes.txt").write_text("mine")
    new = build(seed=2)
    new.save_pretrained(tmp_path, max_shard_size=second, variant=variant)
    assert_same(PlainViTForImageClassification.from_pretrained(tmp_path, variant=variant), new)
    weights = {path.name for path in tmp_path.glob("*.safetensors")}
    index = list(tmp_path.glob("*.index*.json"))
    if second == "1GB":
        assert (len(weights), index) == (1, [])
    else:
        assert weights == set(json.loads(index[0].read_text())["weight_map"].values())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_saving_one_variant_leaves_the_others(tmp_path: Path) -> None:
    plain, half = build(seed=1), build(seed=2)
    plain.save_pretrained(tmp_path)
    half.save_pretrained(tmp_path, variant="half", max_shard_size="20KB")
    assert_same(PlainViTForImageClassification.from_pretrained(tmp_path), plain)
    assert_same(PlainViTForImageClassification.from_pretrained(tmp_path, variant="half"), half)


@not_with_transformers(5, 10, "every process writes the tensors")
def test_a_process_that_does_not_write_removes_nothing(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    build(seed=2).save_pretrained(tmp_path, False, max_shard_size="20KB")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_saving_to_a_file_is_refused_and_the_file_kept(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("precious")
    with pytest.raises(NotADirectoryError, match="is a file: give the path of a folder"):
        build().save_pretrained(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "precious"


# Other heads, other labels, other grids


def test_heads_that_a_checkpoint_lacks_are_fresh_and_reported(tmp_path: Path) -> None:
    base = build(PlainViTModel)
    base.save_pretrained(tmp_path)
    model: Any = PlainViTForImageClassification
    loaded, info = model.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert_same(loaded.vit, base)
    assert 0 < loaded.classifier.weight.std() < 0.1
    loaded.save_pretrained(tmp_path)
    base_class: Any = PlainViTModel
    again, info = base_class.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"classifier.weight", "classifier.bias"}
    assert_same(again, base)


def test_another_number_of_labels_needs_a_word(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        PlainViTForImageClassification.from_pretrained(tmp_path, num_labels=4)
    loaded = PlainViTForImageClassification.from_pretrained(tmp_path, num_labels=4, ignore_mismatched_sizes=True)
    assert loaded(pixels()).logits.shape == (2, 4)
    assert_same(loaded.vit, model.vit)


def test_another_image_size_needs_no_other_checkpoint(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    loaded = PlainViTForImageClassification.from_pretrained(tmp_path)
    assert loaded(pixels(2, 40, 28)).logits.shape == (2, 7)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        PlainViTForImageClassification.from_pretrained(tmp_path, image_size=(40, 28))


def test_a_field_given_while_loading_changes_the_model_or_is_refused(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    assert PlainViTForImageClassification.from_pretrained(tmp_path, drop_path_rate=0.3).vit.layers[2].drop_path.rate > 0
    with pytest.raises(ValueError, match="or another pooling"):
        PlainViTForImageClassification.from_pretrained(tmp_path, use_class_token=False)
    with pytest.raises(TypeError, match="drop_pathrate"):
        PlainViTForImageClassification.from_pretrained(tmp_path, drop_pathrate=0.3)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_the_attention_implementation_is_chosen_while_loading(attention: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    loaded = PlainViTForImageClassification.from_pretrained(tmp_path, attn_implementation=attention)
    assert loaded.config._attn_implementation == attention
    assert "_attn_implementation" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.slow
def test_a_model_is_built_on_the_meta_device_and_filled(tmp_path: Path) -> None:
    for name in VARIATIONS:
        with torch.device("meta"):
            model = PlainViTForImageClassification(tiny_config(**VARIATIONS[name]))
        assert all(parameter.is_meta for parameter in model.parameters())
        source = build(**VARIATIONS[name])
        model.load_state_dict(source.state_dict(), assign=True)
        assert torch.equal(first_output(model.eval()), first_output(source)), name


def test_copies_and_pickles_compute_the_same() -> None:
    model = build(use_distillation_token=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(other, model)
        assert torch.equal(first_output(other), first_output(model))
        assert other(pixels(), labels=torch.tensor([1, 2])).loss == model(pixels(), labels=torch.tensor([1, 2])).loss


def test_weights_given_next_to_the_folder_are_used() -> None:
    model = build()
    loaded: Any = PlainViTForImageClassification
    loaded = loaded.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert_same(loaded, model)


# Folders of other models


def save_foreign(name: str, folder: Path) -> Any:
    """Save a model of another package in its own layout, and return it."""
    if name != "timm":
        model = tiny_transformers(name)
        model.save_pretrained(folder)
        return model
    model = randomize_(timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=7)).eval()
    save_for_hf(model, str(folder), safe_serialization=True)
    return model


@pytest.mark.parametrize("place", ["folder", "config.json"])
@pytest.mark.parametrize(
    "name, model_type",
    [
        ("ViTForImageClassification", "vit"),
        ("DeiTForImageClassification", "deit"),
        ("Dinov2ForImageClassification", "dinov2"),
        ("timm", "timm_wrapper"),
    ],
)
def test_the_folder_of_another_model_is_refused_with_the_line_that_opens_it(
    name: str, model_type: str, place: str, tmp_path: Path
) -> None:
    theirs = save_foreign(name, tmp_path)
    images = torch.randn(2, 3, *((224, 224) if name == "timm" else size_of(theirs)))
    ways = (PlainViTConfig,) if place == "config.json" else (PlainViTConfig, *HEADS)
    lines = set()
    for kind in ways:
        with pytest.raises(ValueError, match=f"has model_type '{model_type}': expected 'plain_vit'") as caught:
            kind.from_pretrained(tmp_path if place == "folder" else tmp_path / place)
        lines.add(str(caught.value).partition("makes a folder for this class): ")[2])
    (line,), scope = lines, dict[str, Any]()
    exec(line, scope)
    with torch.no_grad():
        expected = theirs(images)
        assert difference(scope["model"](images).logits, getattr(expected, "logits", expected)) < 1e-5
    again = tmp_path / "again"
    scope["model"].save_pretrained(again)
    assert_same(PlainViTForImageClassification.from_pretrained(again), scope["model"])


def test_the_line_opens_the_same_revision_of_a_repository(hub: HubEndpoint, tmp_path: Path) -> None:
    theirs, api = save_foreign("ViTForImageClassification", tmp_path / "old"), HfApi()
    api.create_repo("alice/vit")
    build().save_pretrained(tmp_path / "new")
    for version in ("old", "new"):
        api.upload_folder(repo_id="alice/vit", folder_path=tmp_path / version)
        api.create_tag("alice/vit", tag=version)
    for options in ({}, {"config": tiny_config()}):
        with pytest.raises(ValueError, match="alice/vit has model_type 'vit': expected 'plain_vit'") as caught:
            PlainViTForImageClassification.from_pretrained("alice/vit", revision="old", **options)
        assert first_output(PlainViTForImageClassification.from_pretrained("alice/vit", **options)).isfinite().all()
        line, scope = str(caught.value).partition("makes a folder for this class): ")[2], dict[str, Any]()
        exec(line, scope)
        images = torch.randn(2, 3, *size_of(theirs))
        assert difference(scope["model"](images).logits, theirs(images).logits) < 1e-5


def test_an_auto_class_opens_the_folder_of_another_model_with_that_model(tmp_path: Path) -> None:
    theirs = save_foreign("ViTForImageClassification", tmp_path)
    assert type(AutoModelForImageClassification.from_pretrained(tmp_path)) is type(theirs)


def test_no_other_way_in_opens_the_config_of_another_model(tmp_path: Path) -> None:
    theirs = save_foreign("ViTForImageClassification", tmp_path)
    ours, fields = PlainViTConfig(**SIZES), theirs.config.to_dict()
    ways: list[Callable[[], Any]] = [
        lambda: PlainViTModel.from_pretrained(tmp_path, config=ours),
        lambda: PlainViTModel.from_pretrained(tmp_path / "model.safetensors", config=ours),
        lambda: PlainViTModel.from_pretrained(tmp_path.parent, config=ours, subfolder=tmp_path.name),
        lambda: AutoModel.from_pretrained(tmp_path, config=ours),
        lambda: PlainViTModel.from_pretrained(tmp_path, config=theirs.config),
        lambda: PlainViTModel.from_pretrained(tmp_path, config=tmp_path),
        lambda: PlainViTModel.from_pretrained(tmp_path, config=tmp_path / "config.json"),
        lambda: PlainViTModel.from_pretrained(tmp_path, model_type="plain_vit"),
        lambda: PlainViTModel.from_pretrained(tmp_path.parent, subfolder=tmp_path.name),
        lambda: PlainViTModel.from_pretrained(None, config=theirs.config, state_dict={}),
        lambda: PlainViTConfig.from_dict(fields),
        lambda: PlainViTConfig.from_json_file(tmp_path / "config.json"),
        lambda: PlainViTConfig(model_type="vit", hidden_size=40),
    ]
    for way in ways:
        with pytest.raises(ValueError, match="has model_type 'vit': expected 'plain_vit'"):
            way()


def test_a_folder_that_names_no_model_type_is_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"dim": 40, "depth": 3}')
    with pytest.raises(ValueError, match="has model_type None: expected 'plain_vit'"):
        PlainViTModel.from_pretrained(tmp_path)


def test_a_config_may_be_given_for_weights_of_ours_in_any_folder(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    assert_same(PlainViTForImageClassification.from_pretrained(tmp_path, config=model.config), model)
    (tmp_path / "config.json").write_text('{"note": "by hand"}')
    assert_same(PlainViTForImageClassification.from_pretrained(tmp_path, config=model.config), model)


def test_a_folder_of_which_a_part_is_ours_is_refused_with_the_class_that_opens_it(tmp_path: Path) -> None:
    backbone = tiny_config(image_size=56, patch_size=14, out_indices=[1, 2, 3])
    config = UperNetConfig(backbone_config=backbone, hidden_size=16, auxiliary_in_channels=40, num_labels=3)
    whole = UperNetForSemanticSegmentation(config)
    whole.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"of its class \(\['UperNetForSemanticSegmentation'\]\), and take its part"):
        PlainViTBackbone.from_pretrained(tmp_path)
    opened = UperNetForSemanticSegmentation.from_pretrained(tmp_path)
    assert_same(opened.backbone, whole.backbone)
    loaded: Any = PlainViTBackbone.from_pretrained(tmp_path, config=backbone, key_mapping={"^backbone.": ""})
    assert_same(loaded, whole.backbone)
