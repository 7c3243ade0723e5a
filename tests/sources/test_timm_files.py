"""timm's folders and bare state dicts: equal logits, questions about missing settings, and export."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from timm.layers import DiffAttention, HybridEmbed, LayerNorm, RmsNorm, SwiGLU, SwiGLUPacked
from timm.models import save_for_hf, vision_transformer, vision_transformer_hybrid
from torch import nn

from plain_vit.conversion import from_checkpoint, to_checkpoint
from plain_vit.conversion.sources.timm.constructors import constructor_named
from plain_vit.conversion.sources.timm.plain.source import VISION_TRANSFORMER
from plain_vit.conversion.sources.timm.relative.beit import BEIT as BEIT_CLASS
from plain_vit.conversion.sources.timm.relative.relpos import RELPOS as RELPOS_CLASS
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.tables.format import NO_TENSOR, Hints
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    UnknownFormatError,
)
from tests.conftest import randomize_
from tests.processes import run_forked
from tests.sources.timm_models import (
    DEEP,
    ENTRYPOINTS,
    EVA_REPRESENTATIVES,
    RELATIVE_QUICK,
    RELATIVE_SLOW,
    REPRESENTATIVES,
    asked_of,
    image_size,
    layout_of,
    meta_state,
    pixels_for,
    rounding,
    same_tensors,
    save_bare,
    small_arguments,
    stage_differences,
    tiny_timm,
    variants,
)
from tests.tiny import difference


def save_folder(module: nn.Module, folder: Path, *, model_args: dict[str, Any] | None = None, **config: Any) -> Path:
    """Save like timm's users, with the arguments if the module does not record them."""
    save_for_hf(module, folder, model_config=config or None, model_args=model_args, safe_serialization=True)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of a folder's config.json, or fields of an entry; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {name: config[name] | value if isinstance(value, dict) else value for name, value in changes.items()}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def noise(height: int, width: int) -> Image.Image:
    """Return an image."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_that_the_rest_of_an_image_is_cut_is_said_where_no_config_says_it(tmp_path: Path) -> None:
    module = timm.create_model("vit_so400m_patch14_siglip_384", depth=1, img_size=30, embed_dim=8, num_heads=2)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    found = from_checkpoint(
        tmp_path / "model.safetensors", num_attention_heads=2, image_size=30, layer_norm_eps=1e-6, pooling="map",
        hidden_act="gelu_pytorch_tanh", attention_scale="head_dim**-0.5", block_type="sequential",
        rope_type="none",
    )  # fmt: skip
    assert found.model.config.drop_partial_patches
    assert "drop_partial_patches = True" in str(found.report)
    assert "dynamic_img_pad" in str(found.report)


@variants([*((name, {}) for name in [*REPRESENTATIVES, *EVA_REPRESENTATIVES]), *RELATIVE_QUICK], DEEP, *RELATIVE_SLOW)
def test_a_folder_of_timm_opens_and_exports_back(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    arguments = {key: value for key, value in arguments.items() if key != "norm_layer"}  # a class, not for JSON
    module = tiny_timm(name, depth=2, **arguments)
    converted = from_checkpoint(save_folder(module, tmp_path / "theirs"), verify=name not in REPRESENTATIVES)
    found = stage_differences(module, converted.model, pixels_for(module))
    assert max(found.values()) <= rounding(module), found
    prepare: Any = converted.image_processor
    to_checkpoint(converted.model, tmp_path / "ours", format="timm", image_processor=prepare, layout=layout_of(module))
    again: Any = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    assert same_tensors(module, again)
    with torch.no_grad():
        assert torch.equal(module(pixels_for(module)), again(pixels_for(module)))
    image = noise(73, 91)
    theirs = create_transform(**resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'theirs'}")))(image)
    assert torch.equal(create_transform(**resolve_model_data_config(again))(image), theirs)
    assert torch.equal(prepare(image, return_tensors="pt")["pixel_values"][0], theirs)


def test_a_distilled_folder_with_an_ignored_pos_embed_opens(tmp_path: Path) -> None:
    module = tiny_timm("deit_tiny_distilled_patch16_224", pos_embed="")
    model = from_checkpoint(save_folder(module, tmp_path)).model
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0


def test_label_names_of_a_fine_tuned_model_are_kept_both_ways(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_classes=3)
    converted = from_checkpoint(save_folder(module, tmp_path / "theirs", label_names=["ant", "bee", "cat"]))
    assert converted.model.config.id2label == {0: "ant", 1: "bee", 2: "cat"}
    assert converted.model.config.label2id == {"ant": 0, "bee": 1, "cat": 2}
    to_checkpoint(converted.model, tmp_path / "ours", format="timm")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["label_names"] == ["ant", "bee", "cat"]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_336"])
@pytest.mark.parametrize("stale", [{"num_classes": 7}, {"label_names": ["one", "two"]}])
def test_names_of_the_classes_settle_stale_ones(name: str, stale: dict[str, Any], tmp_path: Path) -> None:
    names = [f"kind {number}" for number in range(11)]
    edit_config(save_folder(tiny_timm(name), tmp_path), **stale)
    with pytest.raises(CheckpointError, match=r"id2label=, a list of 11 names \(--labels FILE"):
        from_checkpoint(tmp_path)
    converted = from_checkpoint(tmp_path, id2label=names, verify=True)
    assert converted.report.is_independent
    assert list(converted.model.config.id2label.values()) == names


def test_the_older_flat_config_is_read(tmp_path: Path) -> None:
    module = tiny_timm("test_vit", img_size=160, embed_dim=64, num_heads=2, depth=6, num_classes=2)
    save_folder(module, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    flat = {"architecture": config["architecture"], **config["pretrained_cfg"], "labels": ["no", "yes"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    (tmp_path / "model.safetensors").unlink()
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    converted = from_checkpoint(tmp_path)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0
    assert converted.model.config.id2label == {0: "no", 1: "yes"}
    assert converted.image_processor is not None


def test_model_args_change_the_architecture(tmp_path: Path) -> None:
    arguments = {"norm_layer": "rmsnorm", "act_layer": "gelu_tanh", "global_pool": "avgmax", "reg_tokens": 3}
    module = tiny_timm("vit_tiny_patch16_224", **arguments)
    converted = from_checkpoint(save_folder(module, tmp_path))
    assert converted.model.config.hidden_act == "gelu_pytorch_tanh"
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0


@pytest.mark.parametrize(
    ("name", "pooling", "hints"),
    [
        ("vit_tiny_patch16_224", "avg", {}),
        ("eva02_tiny_patch14_224", "max", {}),
        ("beit_base_patch16_224", "token", {}),
        ("vit_relpos_medium_patch16_cls_224", "", {"pooling": "none"}),
    ],
)
def test_a_pooling_and_a_size_changed_after_construction_are_followed(
    name: str, pooling: str, hints: dict[str, Any], tmp_path: Path
) -> None:
    module = tiny_timm(name)
    module.reset_classifier(5, global_pool=pooling)
    if "relpos" in name or "beit" in name:
        module.set_input_size((32, 48))
    model = from_checkpoint(save_folder(randomize_(module), tmp_path), **hints).model
    assert model.config.image_shape == module.patch_embed.img_size
    assert (pooling, model.config.final_norm) != ("avg", "after_pooling")  # the position of the norm is unchanged
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0


def test_classes_are_named_as_imagenets_where_timm_infers_them(tmp_path: Path) -> None:
    converted = from_checkpoint(save_folder(timm.create_model("test_vit"), tmp_path))
    assert list(converted.model.config.id2label.values()) == ImageNetInfo("imagenet-1k").label_descriptions()
    assert "imagenet-1k" in str(converted.report)


def test_a_number_of_classes_names_those_of_published_weights_alone(tmp_path: Path) -> None:
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "mine.pt")
    assert from_checkpoint(tmp_path / "mine.pt", architecture="test_vit").model.config.id2label[0] == "LABEL_0"
    published = from_checkpoint(tmp_path / "mine.pt", architecture="test_vit.r160_in1k").model.config.id2label
    assert list(published.values()) == ImageNetInfo("imagenet-1k").label_descriptions()


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("test_vit", {}),
        ("vit_tiny_patch16_224", {"img_size": 64, "dynamic_img_size": True}),
        ("vit_tiny_patch16_224", {"img_size": 64}),
        ("eva02_tiny_patch14_224", {"img_size": 56, "dynamic_img_size": True}),
    ],
)
def test_images_have_the_size_that_timm_prepares_for_the_folder(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    image = noise(300, 200)
    module: Any = randomize_(timm.create_model(name, depth=1, num_classes=3, **arguments)).eval()
    module.pretrained_cfg["input_size"] = (3, 112, 112)
    save_for_hf(module, tmp_path / "theirs", model_args={"depth": 1, **arguments}, safe_serialization=True)
    converted = from_checkpoint(tmp_path / "theirs")
    processor: Any = converted.image_processor
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    logits = converted.model(pixels).logits
    to_checkpoint(converted.model, tmp_path / "again", format="timm", image_processor=converted.image_processor)
    is_fixed = arguments and "dynamic_img_size" not in arguments
    assert pixels.shape[-1] == (64 if is_fixed else 112)
    for folder in ("again",) if is_fixed else ("theirs", "again"):  # timm refuses its own 112 pixels
        opened: Any = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        prepared = create_transform(**resolve_model_data_config(opened))(image)[None]
        assert torch.equal(prepared, pixels)
        assert torch.equal(opened(prepared), logits)


def test_an_old_name_of_an_architecture_is_known(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_classes=4)
    edit_config(save_folder(module, tmp_path), architecture="vit_tiny_patch16_224_in21k")
    assert max(stage_differences(module, from_checkpoint(tmp_path).model, pixels_for(module)).values()) == 0.0


PLAIN, EVA, BEIT = "vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"
RELPOS, NAFLEX = "vit_relpos_base_patch16_224", "naflexvit_base_patch16_gap"


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        (PLAIN, {"architecture": "resnet50"}, UnknownFormatError, "resnet50"),
        (PLAIN, {"model_args": {"rope": True}}, ExportError, "rope"),
        (PLAIN, {"model_args": {"act_layer": "mish"}}, ExportError, "mish"),
        (PLAIN, {"model_args": {"norm_layer": "batchnorm"}}, ExportError, "batchnorm"),
        (PLAIN, {"label_names": ["one", "two"]}, CheckpointError, "2 label names for 11 classes"),
        (PLAIN, {"model_args": None}, MappingError, "embed_dim is 192 there and 56 in the tensors"),
        (PLAIN, {"num_classes": 7}, CheckpointError, "7 classes, the head 11"),
        (EVA, {"model_args": {"rope_type": "mrope"}}, ExportError, "mrope"),
        (EVA, {"model_args": {"rope": True}}, ExportError, "rope"),
        (EVA, {"model_args": {"dynamic_img_pad": True}}, ExportError, "dynamic_img_pad"),
        (EVA, {"model_args": {"embed_dim": 112}}, MappingError, "has shape"),
        (EVA, {"model_args": {"swiglu_mlp": False}}, MappingError, "fc1"),
        (BEIT, {"model_args": {"use_shared_rel_pos_bias": True}}, ExportError, "two biases"),
        (BEIT, {"model_args": {"rope": True}}, ExportError, "rope"),
        (BEIT, {"model_args": {"embed_dim": 112}}, MappingError, "has shape"),
        (BEIT, {"model_args": {"use_abs_pos_emb": True}}, MappingError, "missing: 'pos_embed'"),
        (RELPOS, {"model_args": {"rel_pos_type": "mlp_swin"}}, ExportError, "mlp_swin"),
        (RELPOS, {"model_args": {"rel_pos_dim": 9}}, MappingError, "has shape"),
        (RELPOS, {"model_args": {"global_pool": "token"}, "global_pool": None}, ExportError, "timm refuses"),
        (NAFLEX, {"model_args": {"rope_type": "axial"}}, ExportError, "rope_type='axial'"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(
    name: str, changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    known = {"model_args": small_arguments(name)} if name == NAFLEX else {}
    edit_config(save_folder(tiny_timm(name), tmp_path, **known), **changes)
    with pytest.raises(error, match=said):
        from_checkpoint(tmp_path)


# The arguments in the model cards of Virchow, Virchow2 and UNI2-h, and their config.json, for smaller models.
PACKED = {
    "virchow": ("vit_huge_patch14_224", {"global_pool": "", "mlp_ratio": 5.3375, "init_values": 1e-5}),
    "virchow2": ("vit_huge_patch14_224",
                 {"global_pool": "", "mlp_ratio": 5.3375, "init_values": 1e-5, "reg_tokens": 4}),
    "uni2": ("vit_giant_patch14_224",
             {"mlp_ratio": 5.33334, "init_values": 1e-5, "reg_tokens": 8, "no_embed_class": True}),
}  # fmt: skip


def save_with_code(folder: Path, name: str, given: dict[str, Any], code: dict[str, Any]) -> nn.Module:
    """Save a folder whose config.json contains the model's arguments, as far as JSON can represent them."""
    small = {"img_size": (42, 70), "embed_dim": 56, "num_heads": 7, "depth": 2, "num_classes": 0, **given}
    module: nn.Module = randomize_(timm.create_model(name, **small, **code)).eval()
    # timm does not save classes: such folders have a config.json without them, here from a model built without them.
    save_for_hf(timm.create_model(name, **small), folder, safe_serialization=True)
    save_bare(module, folder / "model.safetensors")
    return module


@pytest.mark.parametrize("which", PACKED)
def test_classes_that_code_gave_are_read_off_the_tensors_of_a_folder(which: str, tmp_path: Path) -> None:
    name, given = PACKED[which]
    module = save_with_code(tmp_path, name, given, {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU})
    with pytest.raises(AmbiguousCheckpointError, match="mlp_layer=SwiGLUPacked in code") as caught:
        from_checkpoint(tmp_path)
    assert {name: values[0] for name, values in caught.value.candidates.items()} == {
        "hidden_act": "silu",
        "mlp_type": "swiglu_packed",
    }
    converted = from_checkpoint(tmp_path, hidden_act="silu", mlp_type="swiglu_packed", verify=True)
    assert "mlp_layer = 'SwiGLUPacked', from the tensors" in str(converted.report)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0


@pytest.mark.parametrize(
    "code, said",
    [
        ({"norm_layer": RmsNorm}, {"norm_type": "rms_norm", "layer_norm_eps": 1e-6}),
        ({"norm_layer": functools.partial(RmsNorm, eps=1e-3)}, {"norm_type": "rms_norm", "layer_norm_eps": 1e-3}),
        ({"embed_norm_layer": LayerNorm}, {"layer_norm_eps": 1e-6}),
        ({"block_fn": vision_transformer.ParallelScalingBlock}, {}),
        ({"block_fn": vision_transformer.ParallelThingsBlock}, {}),
        ({"attn_layer": DiffAttention}, {}),
        ({"mlp_layer": SwiGLU, "act_layer": nn.ReLU}, {"hidden_act": "relu"}),
    ],
)  # fmt: skip
def test_every_class_that_tensors_show_is_read_off_them(
    code: dict[str, Any], said: dict[str, Any], tmp_path: Path
) -> None:
    module = save_with_code(tmp_path, "vit_small_patch14_dinov2", {"num_classes": 3}, code)
    if said:
        with pytest.raises(AmbiguousCheckpointError, match="in code") as caught:
            from_checkpoint(tmp_path)
        assert caught.value.candidates.keys() == said.keys()
    model = from_checkpoint(tmp_path, **said).model
    assert max(stage_differences(module, model, pixels_for(module)).values()) <= 1e-5


@pytest.mark.parametrize(
    "name, changed",
    [
        ("aimv2_large_patch14_224", {"norm_layer": "rmsnorm"}),
        ("vit_xsmall_patch16_clip_224", {"embed_norm_layer": "layernorm"}),
    ],
)
def test_two_epsilons_in_one_model_are_refused(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"an epsilon of 1e-0[56] in the norm of the patches and of 1e-0[56]"):
        from_checkpoint(save_folder(tiny_timm(name, **changed), tmp_path))


def test_a_stem_that_code_gave_is_read_off_the_tensors_of_a_folder(tmp_path: Path) -> None:
    stem = functools.partial(HybridEmbed, backbone=vision_transformer_hybrid._resnetv2((1,)))
    module = save_with_code(
        tmp_path, "vit_tiny_patch16_224", {"patch_size": 2, "img_size": (24, 40)}, {"embed_layer": stem}
    )
    model = from_checkpoint(tmp_path).model
    assert model.config.patch_shape == (8, 8)
    assert max(stage_differences(module, model, pixels_for(module)).values()) <= 1e-5


def test_a_pooling_of_which_config_json_says_two_is_asked_for(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_classes=5)
    edit_config(save_folder(module, tmp_path), global_pool="avg")  # like timm 0.9 after reset_classifier
    with pytest.raises(AmbiguousCheckpointError, match="says global_pool 'avg'") as caught:
        from_checkpoint(tmp_path)
    assert caught.value.candidates == {"pooling": ("mean", "cls")}
    module.global_pool = "avg"
    model = from_checkpoint(tmp_path, pooling="mean").model
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0
    module.global_pool = "token"
    model = from_checkpoint(tmp_path, pooling="cls", verify=True).model
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0


def test_another_architecture_than_config_json_says_is_refused(tmp_path: Path) -> None:
    save_folder(tiny_timm("vit_tiny_patch16_224"), tmp_path)
    with pytest.raises(CheckpointError, match="config.json says 'vit_tiny_patch16_224'"):
        from_checkpoint(tmp_path, architecture="vit_small_patch16_224")
    edit_config(tmp_path, architecture="cait_xxs24_224")
    with pytest.raises(UnknownFormatError, match=r"cait_xxs24_224.*cait\.py"):
        from_checkpoint(tmp_path)


# Bare state dicts


# All settings of a plain model of timm that no tensor shows.
FULL: dict[str, Any] = {
    "num_attention_heads": 7,
    "attention_scale": "head_dim**-0.5",
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "pooling": "cls",
    "pool_prefix_tokens": False,
    "block_type": "sequential",
    "rope_type": "none",
}


RELATIVE_NAMES = [*BEIT_CLASS.architectures, *RELPOS_CLASS.architectures]
ROTATED = "vit_tiny_patch16_dinov3_qkvb"
NAMED = {ROTATED: "rotated", "eva02_tiny_patch14_336": "rotated", "test_vit_relpos": r"relpos\.py",
         "vit_srelpos_small_patch16_224": r"relpos\.py", BEIT: r"beit\.py",
         "naflexvit_base_patch16_parfac_gap": "how positions are resampled"}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_bare_file_of_another_class_asks_for_its_architecture_and_opens_by_it_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constructor: Any = constructor_named(name)
    is_small = name.startswith("test_")
    own = {} if is_small else {"depth": 2, "embed_dim": 96, "num_heads": 3}
    monkeypatch.setitem(constructor.architectures, name, {**constructor.architectures[name], **own})
    native = {"pos_embed_grid_size": (3, 5)} if "naflex" in name else {}  # the others use the grid of their name
    module = randomize_(timm.create_model(name, num_classes=4, **own, **native)).eval()
    path = save_bare(module, tmp_path / "model.safetensors")
    with pytest.raises(AmbiguousCheckpointError, match=NAMED[name]) as caught:
        from_checkpoint(path)
    assert name in caught.value.candidates["architecture"]
    model = from_checkpoint(path, architecture=name, verify=is_small).model
    expected = (48, 80) if native else module.patch_embed.img_size
    assert model.config.image_shape == expected
    assert max(stage_differences(module, model, pixels_for(module)).values()) <= rounding(module)
    for said in ({"num_attention_heads": 4}, {"hidden_act": "relu"}):
        with pytest.raises(CheckpointError, match="hints contradict"):
            from_checkpoint(path, architecture=name, **said)


@pytest.mark.slow(quick=RELATIVE_NAMES[::8])
@pytest.mark.parametrize("name", RELATIVE_NAMES)
def test_a_bare_file_of_relative_positions_is_known_by_its_shapes(name: str) -> None:
    state = meta_state(name)
    assert name in asked_of(state).candidates["architecture"]
    described = TIMM.describe_checkpoint(state, {}, Hints(architecture=f"{name}.some_tag"))
    assert described.config.image_shape == (ENTRYPOINTS[name]["img_size"],) * 2


@pytest.mark.parametrize("name", [EVA, BEIT, RELPOS])
def test_a_depth_that_no_architecture_has_is_said(name: str) -> None:
    with pytest.raises(UnknownFormatError, match="none of the .* architectures .* has these names, shapes"):
        TIMM.describe_checkpoint(meta_state(name, depth=5), {}, Hints())


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (EVA, "eva02_small_patch14_224"),
        (BEIT, "beit_large_patch16_224"),
        (BEIT, "vit_relpos_base_patch16_cls_224"),
        ("naflexvit_base_patch16_parfac_gap", "naflexvit_base_patch16_map"),
    ],
)
def test_another_architecture_than_that_of_the_tensors_is_refused(name: str, other: str) -> None:
    with pytest.raises(MappingError, match=f"not of {other}, which the caller names"):
        TIMM.describe_checkpoint(meta_state(name), {}, Hints(architecture=other))


@pytest.mark.slow
def test_a_bare_file_never_opens_on_its_shapes_alone(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", img_size=224, embed_dim=192, num_heads=3, depth=12)
    path = save_bare(module, tmp_path / "vit.safetensors")
    with pytest.raises(AmbiguousCheckpointError, match="--architecture deit_tiny_patch16_224\n") as caught:
        from_checkpoint(path)
    assert caught.value.candidates == {"architecture": ("deit_tiny_patch16_224", "vit_tiny_patch16_224",
                                                        "vit_tiny_patch16_384")}  # fmt: skip
    assert caught.value.otherwise.keys() == FULL.keys() | {"image_size"}
    assert [values[0] for values in caught.value.otherwise.values()] == [3, *list(FULL.values())[1:], (224, 224)]
    for said in ({"architecture": "vit_tiny_patch16_224"}, {**FULL, "num_attention_heads": 3, "image_size": 224}):
        converted = from_checkpoint(path, **said)
        assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0
    assert "num_attention_heads = 3, from the architecture that the caller names" in str(
        from_checkpoint(path, architecture="vit_tiny_patch16_224").report
    )


def test_what_the_caller_says_narrows_the_architectures() -> None:
    state = meta_state("vit_base_patch32_clip_quickgelu_224", num_classes=0)
    names = asked_of(state).candidates["architecture"]
    assert {VISION_TRANSFORMER.architectures[str(name)].get("act_layer") for name in names} == {None, "quick_gelu"}
    narrowed = asked_of(state, hidden_act="quick_gelu")
    assert narrowed.candidates["architecture"] == ("vit_base_patch32_clip_quickgelu_224",)
    assert "hidden_act" not in narrowed.otherwise
    none = asked_of(state, hidden_act="relu")
    assert none.candidates.keys() == FULL.keys() - {"hidden_act"} | {"image_size"}
    config = TIMM.describe_checkpoint(
        state, {}, Hints(architecture="vit_base_patch32_clip_quickgelu_224", hidden_act="quick_gelu")
    ).config
    assert (config.hidden_act, config.layer_norm_eps, config.num_attention_heads) == ("quick_gelu", 1e-5, 12)


@pytest.mark.slow
def test_moco_v3s_small_model_opens_with_its_twelve_heads(tmp_path: Path) -> None:
    module = tiny_timm("vit_small_patch16_224", img_size=224, embed_dim=384, num_heads=12, depth=12)
    path = save_bare(module, tmp_path / "moco.safetensors")
    said = {**FULL, "num_attention_heads": 12, "image_size": 224}
    model = from_checkpoint(path, **said).model
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0
    with pytest.raises(CheckpointError, match=r"num_attention_heads=12 \(the source has 6\).*give all of: num_att"):
        from_checkpoint(path, architecture="vit_small_patch16_224", num_attention_heads=12)


@pytest.mark.slow
def test_timms_old_small_model_opens_with_its_scale(tmp_path: Path) -> None:
    arguments = {"img_size": 32, "embed_dim": 768, "num_heads": 8, "depth": 8, "mlp_ratio": 3, "qkv_bias": False}
    module = tiny_timm("vit_base_patch16_224", **arguments)
    for block in module.blocks:
        block.attn.scale, block.attn.fused_attn = 768**-0.5, False
    path = save_bare(module, tmp_path / "old.safetensors")
    asked = asked_of(module.state_dict())
    assert 8 in asked.candidates["num_attention_heads"]
    assert "hidden_size**-0.5" in asked.candidates["attention_scale"]
    said = {**FULL, "num_attention_heads": 8, "attention_scale": "hidden_size**-0.5", "image_size": 32}
    model = from_checkpoint(path, **said).model
    assert max(stage_differences(module, model, pixels_for(module)).values()) <= 1e-5


def test_the_name_of_an_architecture_says_what_a_bare_file_does_not(tmp_path: Path) -> None:
    name = "vit_xsmall_patch16_clip_224"
    module = tiny_timm(name, img_size=64, embed_dim=256, num_heads=4, depth=10)
    path = save_bare(module, tmp_path / "clip.safetensors")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path, architecture=name)
    assert caught.value.candidates == {"image_size": ((64, 64),)}
    converted = from_checkpoint(path, architecture=f"{name}.tinyclip_yfcc15m", image_size=64)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0
    assert converted.image_processor.image_mean[0] == pytest.approx(0.48145466)


def test_a_named_architecture_is_compared_with_all_that_the_tensors_show() -> None:
    state = meta_state("vit_medium_patch16_clip_224")
    with pytest.raises(MappingError) as caught:
        TIMM.describe_checkpoint(state, {}, Hints(architecture="deit3_small_patch16_224"))
    named = {fault.split(" is ")[0] for fault in caught.value.faults}
    assert named == {"embed_dim", "width", "layer_scale", "pre_norm"}
    with pytest.raises(UnknownFormatError, match=r"cait_xxs24_224.*cait.py"):
        TIMM.describe_checkpoint(state, {}, Hints(architecture="cait_xxs24_224.fb_dist_in1k"))


@pytest.mark.parametrize(
    "said",
    [{"pooling": "mean"}, {"layer_norm_eps": 1e-5}, {"hidden_act": "relu"}, {"patch_size": 8}, {"num_channels": 1},
     {"block_type": "post_norm"}, {"attention_scale": 0.5}, {"head_dim": 32}, {"position_embedding_type": "none"}],
)  # fmt: skip
def test_a_hint_that_contradicts_the_architecture_is_refused(said: dict[str, Any]) -> None:
    ((name, value),) = said.items()
    with pytest.raises(CheckpointError, match=f"the hints contradict vit_tiny_patch16_224.*{name}={value!r}"):
        TIMM.describe_checkpoint(
            meta_state("vit_tiny_patch16_224"), {}, Hints(architecture="vit_tiny_patch16_224", **said)
        )


def test_a_bare_file_of_its_own_geometry_asks_for_all_that_is_open_at_once(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224")
    path = save_bare(module, tmp_path / "vit.safetensors")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path)
    asked = caught.value.candidates
    assert asked.keys() == FULL.keys() | {"image_size"}
    assert 7 in asked["num_attention_heads"]
    assert 5 not in asked["num_attention_heads"]
    assert asked["image_size"] == ((64, 64),)  # a class token without a position; other grids are not offered
    converted = from_checkpoint(path, image_size=(48, 80), **FULL)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0
    assert "position_embedding_on_prefix = True, from the 16 rows" in str(converted.report)
    with pytest.raises(CheckpointError, match="image_size=\\(64, 80\\) has 20 patches"):
        from_checkpoint(path, image_size=(64, 80), **FULL)
    # The same table fits 4 x 4 patches if the class token has no position.
    other = from_checkpoint(path, image_size=64, **FULL).model
    assert not other.config.position_embedding_on_prefix


@pytest.mark.slow
def test_a_rotation_that_a_published_model_may_have_is_asked_for(tmp_path: Path) -> None:
    rotated = tiny_timm("vit_small_patch16_rope_ape_224", img_size=224, embed_dim=384, num_heads=6, depth=12)
    path = save_bare(rotated, tmp_path / "rotated.safetensors")  # names and shapes of DeiT III
    asked = asked_of(rotated.state_dict())
    assert {"deit3_small_patch16_224", "vit_small_patch16_rope_ape_224"} <= set(asked.candidates["architecture"])
    assert asked.otherwise["rope_type"] == ("none",)
    said = {**FULL, "num_attention_heads": 6, "image_size": 224, "position_embedding_type": "learned"}
    del said["rope_type"], said["block_type"]  # LayerScale shows the latter
    with pytest.raises(AmbiguousCheckpointError, match="rotation of queries and keys(?s:.*)rope_type= 'no"):
        from_checkpoint(path, **said)
    opened = from_checkpoint(path, architecture="vit_small_patch16_rope_ape_224")
    assert opened.model.config.rope_parameters["rope_type"] == "axial"
    assert max(stage_differences(rotated, opened.model, pixels_for(rotated)).values()) == 0.0
    assert NO_TENSOR["rope_type"] not in str(opened.report)
    other = from_checkpoint(path, **said, rope_type="none")
    assert NO_TENSOR["rope_type"] not in str(other.report)  # reported as given by the caller
    assert "rope_type = 'none', from the caller" in str(other.report)
    with pytest.raises(CheckpointError, match="more settings than its type. Give the architecture"):
        from_checkpoint(path, **said, rope_type="axial")


def test_a_missing_table_is_no_evidence_that_there_are_no_positions(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", pos_embed="none")
    path, asked = save_bare(module, tmp_path / "vit.safetensors"), asked_of(module.state_dict())
    assert {"position_embedding_type", "rope_type"} <= asked.candidates.keys()
    assert "sines and cosines, a rotation of queries and keys" in str(asked)
    said = {**FULL, "image_size": (48, 80)}
    with pytest.raises(CheckpointError, match="save it with the other tensors, as pos_embed of shape"):
        from_checkpoint(path, **said, position_embedding_type="sincos_2d")
    assert from_checkpoint(path, **said, position_embedding_type="none").model.config.position_embedding_type == "none"


def test_overlapping_patches_are_refused_by_name_and_no_size_is_offered(tmp_path: Path) -> None:
    # A re-identification model: 21 x 10 patches of 16 pixels, one every 12, in images of 256 x 128.
    module = tiny_timm("vit_tiny_patch16_224", img_size=(336, 160))
    path = save_bare(module, tmp_path / "reid.safetensors")
    asked = asked_of(module.state_dict())
    assert asked.candidates["image_size"] == ()
    assert "image_size= which the tensors do not show at all" in str(asked)
    with pytest.raises(CheckpointError, match="128 patches of .16, 16.*of 210 or 211, as of patches that overlap .one"):
        from_checkpoint(path, **FULL, image_size=(256, 128))


@pytest.mark.parametrize("name", ["vit_base_patch16_xp_224", "vit_dwee_patch16_reg1_gap_256"])
def test_heads_that_the_tensors_show_are_not_asked_for(name: str, tmp_path: Path) -> None:
    module = tiny_timm(name, img_size=48)
    path = save_bare(module, tmp_path / "vit.safetensors")
    told = {**FULL, "pooling": "mean" if "gap" in name else "cls", "image_size": 48}
    for shown in ("num_attention_heads", "block_type"):
        del told[shown]
    if "gap" in name:
        del told["attention_scale"]  # differential attention has only one
    else:
        told["norm_type"] = "rms_norm"
    model = from_checkpoint(path, **told).model
    assert model.config.num_attention_heads == 7
    assert max(stage_differences(module, model, pixels_for(module)).values()) <= rounding(module)


@pytest.mark.slow
def test_logits_of_a_reference_determine_missing_settings(tmp_path: Path) -> None:
    module = tiny_timm("vit_base_patch32_clip_quickgelu_224", img_size=(96, 160))
    path = save_bare(module, tmp_path / "vit.safetensors")
    pixel_values = pixels_for(module)
    with torch.no_grad():
        logits = module(pixel_values)
    known = {name: FULL[name] for name in ("attention_scale", "pool_prefix_tokens", "pooling")}
    converted = from_checkpoint(
        path, layer_norm_eps=1e-5, block_type="sequential", reference=(pixel_values, logits), **known
    )
    config = converted.model.config
    assert (config.num_attention_heads, config.hidden_act, config.image_size) == (7, "quick_gelu", (96, 160))


def test_deit3s_own_names_of_layer_scale_are_read(tmp_path: Path) -> None:
    module = tiny_timm("deit3_small_patch16_224", img_size=48)
    named = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor
             for name, tensor in module.state_dict().items()}  # fmt: skip
    torch.save({"model": named}, tmp_path / "deit3.pth")
    told = {name: value for name, value in FULL.items() if name != "block_type"}  # LayerScale shows it
    converted = from_checkpoint(tmp_path / "deit3.pth", image_size=48, **told)
    assert converted.model.config.layer_scale_init_value is not None
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0


def test_the_pre_training_head_of_older_timm_is_part_of_the_model(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", img_size=32, embed_dim=192, num_heads=3, depth=12)
    dense = nn.Linear(192, 11)
    head = nn.Linear(11, 5)
    state = module.state_dict() | {"head.weight": head.weight.detach(), "head.bias": head.bias.detach()}
    state |= {f"pre_logits.fc.{name}": tensor for name, tensor in dense.state_dict().items()}
    save_file(state, tmp_path / "old.safetensors")
    model = from_checkpoint(tmp_path / "old.safetensors", architecture="vit_tiny_patch16_224", image_size=32).model
    pixel_values = pixels_for(module)
    with torch.no_grad():
        expected = head(torch.tanh(dense(module.forward_head(module.forward_features(pixel_values), pre_logits=True))))
        assert torch.equal(model(pixel_values).logits, expected)


def test_the_decoder_of_a_masked_autoencoder_is_left_out_and_said(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", img_size=32, embed_dim=192, num_heads=3, depth=12, num_classes=0)
    extra = {"mask_token": torch.ones(1, 1, 8), "decoder_embed.weight": torch.ones(8, 192),
             "decoder_blocks.0.attn.qkv.weight": torch.ones(24, 8)}  # fmt: skip
    save_file(module.state_dict() | extra, tmp_path / "mae.safetensors")
    converted = from_checkpoint(tmp_path / "mae.safetensors", architecture="vit_tiny_patch16_224", image_size=32)
    assert converted.report.ignored.keys() == extra.keys()
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0


def test_a_tensor_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", img_size=32, embed_dim=192, num_heads=3, depth=12)
    state = module.state_dict() | {"blocks.3.attn.rel_pos": torch.ones(3)}
    save_file(state, tmp_path / "odd.safetensors")
    with pytest.raises(MappingError, match="rel_pos"):
        from_checkpoint(tmp_path / "odd.safetensors", architecture="vit_tiny_patch16_224", image_size=32)


# Writing


def test_a_processor_of_a_size_that_timms_model_refuses_is_not_written(tmp_path: Path) -> None:
    converted = from_checkpoint(save_folder(timm.create_model("test_vit", num_classes=3), tmp_path / "theirs"))
    processor = converted.image_processor
    processor.crop_size = {"height": 96, "width": 100}
    with pytest.raises(ExportError, match="100"):
        to_checkpoint(converted.model, tmp_path / "ours", format="timm", image_processor=processor)
    assert not (tmp_path / "ours").exists()


def test_what_needs_a_class_that_no_architecture_has_is_refused(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_classes=3)
    model = from_checkpoint(save_folder(module, tmp_path / "theirs")).model
    model.config.layer_norm_eps = 1e-3
    with pytest.raises(ExportError, match="norm_eps"):
        to_checkpoint(model, tmp_path / "ours", format="timm")


@pytest.mark.slow
def test_every_architecture_is_written_under_a_name_with_the_same_meaning() -> None:
    architectures, config_of = VISION_TRANSFORMER.architectures, VISION_TRANSFORMER.config_of
    for name, arguments in architectures.items():
        config = config_of(arguments)
        written, model_args = VISION_TRANSFORMER.architecture_for(config)
        assert config_of({**architectures[written], **model_args}).to_dict() == config.to_dict(), name
        assert not model_args.keys() & {"distilled", "norm_eps", "block_fn", "mlp_layer"}, name
        assert model_args.keys() <= VISION_TRANSFORMER.defaults.keys(), name


WITHOUT_TIMM = """
import sys
assert not any(name.partition(".")[0] == "timm" for name in sys.modules)
sys.modules["timm"] = None
from plain_vit.conversion import from_checkpoint, to_checkpoint
converted = from_checkpoint(sys.argv[1])
to_checkpoint(converted.model, sys.argv[2], format="timm", image_processor=converted.image_processor)
print(converted.report)
"""


@pytest.mark.slow
def test_timms_folders_open_and_are_written_where_timm_is_not_installed(tmp_path: Path) -> None:
    module = timm.create_model("test_vit").eval()
    save_folder(module, tmp_path / "theirs")
    (tmp_path / "script.py").write_text(WITHOUT_TIMM)
    said = run_forked([str(tmp_path / name) for name in ("script.py", "theirs", "ours")])
    assert "install timm to have them named" in said
    assert same_tensors(module, timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True))


@pytest.mark.parametrize("kind", ["TimmWrapperForImageClassification", "TimmWrapperModel"])
def test_a_folder_of_transformers_wrapper_opens_as_timms_model(kind: str, tmp_path: Path) -> None:
    settings = {"architecture": "test_vit", "num_labels": 5, "model_args": {"img_size": 32}}
    wrapped: Any = randomize_(getattr(transformers, kind)(transformers.TimmWrapperConfig(**settings))).eval()
    wrapped.save_pretrained(tmp_path)
    opened = from_checkpoint(tmp_path, verify=True)
    assert opened.report.is_independent
    assert "wrapper 'timm_model' removed" in opened.report.notes
    pixel_values = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        ours, theirs = opened.model(pixel_values), wrapped(pixel_values)
    name = "logits" if kind.endswith("Classification") else "pooler_output"
    assert difference(ours[name], theirs[name]) == 0.0


LEFT_BY_TRAINING = {
    "criterion.weight": torch.ones(11), "train_acc.tp": torch.ones(11, dtype=torch.long), "val_loss.mean_value":
    torch.ones(()), "val_acc_best.max_value": torch.ones(()), "test_metrics.confmat": torch.ones(11, 11).long(),
}  # fmt: skip


def test_losses_and_metrics_beside_a_model_are_ignored_and_listed(tmp_path: Path) -> None:
    module = tiny_timm("vit_base_patch16_224")
    state = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    torch.save({"state_dict": state | LEFT_BY_TRAINING, "epoch": 3}, tmp_path / "last.ckpt")
    said = {"num_attention_heads": 7, "attention_scale": "head_dim**-0.5", "layer_norm_eps": 1e-6, "hidden_act": "gelu",
            "pooling": "cls", "block_type": "sequential", "rope_type": "none",
            "image_size": image_size("vit_base_patch16_224")}  # fmt: skip
    opened = from_checkpoint(tmp_path / "last.ckpt", **said)
    assert opened.report.ignored == dict.fromkeys(LEFT_BY_TRAINING, "of a loss or a metric of the training")
    assert max(stage_differences(module, opened.model, pixels_for(module)).values()) == 0.0


@pytest.mark.parametrize("name, tensor", [
    ("criterion.weight", torch.ones(11, 56)), ("head2.bias", torch.ones(11)), ("projector.weight", torch.ones(3, 56)),
    ("accent.weight", torch.ones(3)), ("loss", torch.ones(3)),
])  # fmt: skip
def test_what_may_be_part_of_the_model_is_never_ignored(name: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    state = {f"model.{key}": value for key, value in tiny_timm("vit_base_patch16_224").state_dict().items()}
    torch.save({"state_dict": {**state, name: tensor}}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="key='state_dict.model'"):
        from_checkpoint(tmp_path / "last.ckpt")
