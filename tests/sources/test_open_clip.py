"""OpenCLIP's and OpenAI's image towers: live, in files and folders, and back."""

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import timm
import torch
from open_clip.model import _build_vision_tower, convert_weights_to_lp, resize_pos_embed
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from plain_vit import PlainViTForImageClassification, PlainViTModel
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.recognition import recognise
from plain_vit.conversion.registry import FORMATS
from plain_vit.conversion.sources.open_clip.pixels import processor_from_open_clip
from plain_vit.conversion.sources.open_clip.settings import architectures
from plain_vit.conversion.sources.open_clip.source import OPEN_CLIP
from plain_vit.conversion.sources.timm.constructors import constructor_named
from plain_vit.conversion.sources.timm.plain.source import VISION_TRANSFORMER
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    PlainViTError,
    UnknownFormatError,
)
from tests.conftest import randomize_
from tests.hub.endpoint import HubEndpoint
from tests.sizes import draws
from tests.sources.open_clip_models import (
    CLIPA,
    EMBED_DIM,
    NATIVE,
    TRUNKS,
    clip,
    openai_clip,
    tower_settings,
    trunk_settings,
)
from tests.sources.sweep import record
from tests.sources.truthful import Tally, logits_differ_by, open_truthfully
from tests.tiny import difference, tiny_config

TOLERANCE = 1e-5  # torch multiplies by the projection's transpose, which rounds differently
# Settings that no tensor of a plain tower shows.
SAID: dict[str, Any] = {"num_attention_heads": 5, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "pooling": "cls",
                        "image_size": (24, 56)}  # fmt: skip


def pixels_of(model_cfg: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normalised pixels of the size of a tower."""
    size = model_cfg["vision_cfg"]["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def features(tower: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the features of a tower or of our model."""
    outputs = tower(pixel_values)
    if isinstance(outputs, torch.Tensor | tuple):
        return outputs[0] if isinstance(outputs, tuple) else outputs
    return outputs.pooler_output


def same_tensors(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in state.items())


def save_folder(folder: Path, model: nn.Module, model_cfg: dict[str, Any], **preprocess_cfg: Any) -> Path:
    """Write a folder as open_clip pushes it to the Hub, with both weight formats."""
    folder.mkdir()
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    described = {"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg}
    (folder / "open_clip_config.json").write_text(json.dumps(described))
    return folder


def source_record(name: str) -> dict[str, str]:
    """Return the fields that identify the source in the table of the docs."""
    return {"source": f"open_clip {name}", "open_clip": open_clip.__version__, "torch": torch.__version__}


ALL = {
    **{f"VisionTransformer, {name}": tower_settings(**changes) for name, changes in NATIVE.items()},
    **{f"TimmModel, {name}": trunk_settings(name) for name in TRUNKS},
}


# Live modules


@pytest.mark.parametrize("name", ALL)
def test_every_block_and_the_features_are_the_sources_and_every_tensor_goes_back(name: str, tmp_path: Path) -> None:
    tower, pixel_values = clip(ALL[name]).visual, pixels_of(ALL[name])
    model = from_module(tower)
    assert isinstance(model, PlainViTModel)
    tokens: list[torch.Tensor] = []
    blocks = tower.trunk.blocks if name.startswith("TimmModel") else tower.transformer.resblocks
    for block in blocks:
        block.register_forward_hook(lambda _, args, result: tokens.append(result))
    theirs, ours = features(tower, pixel_values), model(pixel_values, output_hidden_states=True)
    differing = [difference(mine, other) for mine, other in zip(ours.hidden_states[1:], tokens, strict=True)]
    assert max(differing) == 0.0
    logits = difference(ours.pooler_output, theirs)
    assert logits <= TOLERANCE
    with torch.no_grad():  # without gradients, torch's own attention is one native operation
        native = difference(features(model, pixel_values), features(tower, pixel_values))
    assert native <= TOLERANCE
    layout = OPEN_CLIP.describe_module(tower, Hints()).layout
    assert same_tensors(tower.state_dict(), to_module(model, "open_clip", layout=layout).state_dict())
    to_checkpoint(model, tmp_path / "tower.safetensors", format="open_clip", layout=layout)
    assert same_tensors(tower.state_dict(), load_file(tmp_path / "tower.safetensors"))
    to_checkpoint(model, tmp_path / "whole.pt", format="open_clip", layout=f"visual {layout}")
    assert {f"visual.{path}" for path in tower.state_dict()} == torch.load(tmp_path / "whole.pt").keys()
    halves, pixel_values = clip(ALL[name]).visual.bfloat16(), pixel_values.bfloat16()
    rounded = difference(features(from_module(halves), pixel_values).float(), features(halves, pixel_values).float())
    assert rounded <= 2**-6  # only the projection rounds differently, once
    record({**source_record(name), "logits": logits, "blocks": max(differing), "fused": native, "bfloat16": rounded,
            "way_back_bit_exact": True})  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_the_sources(name: str) -> None:
    tower, pixel_values = clip(ALL[name]).visual, pixels_of(ALL[name])
    model, layout = from_module(tower), OPEN_CLIP.describe_module(tower, Hints()).layout
    for one in (tower, model):
        features(one, pixel_values).square().mean().backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = to_module(model, "open_clip", layout=layout).state_dict()
    theirs = {path: parameter.grad for path, parameter in tower.named_parameters() if parameter.grad is not None}
    largest = max(gradient.abs().max() for gradient in theirs.values())  # key biases have only rounding errors
    for path, gradient in theirs.items():
        assert (gradients[path] - gradient).abs().max() <= TOLERANCE * largest, path


@pytest.mark.parametrize("custom_text", [False, True])
def test_of_a_whole_live_model_the_image_tower_opens(custom_text: bool) -> None:
    model_cfg = tower_settings()
    whole = clip(model_cfg, custom_text)
    pixel_values = pixels_of(model_cfg)
    assert difference(features(from_module(whole), pixel_values), whole.encode_image(pixel_values)) <= TOLERANCE
    wrapped = nn.DataParallel(whole)
    assert difference(features(from_module(wrapped), pixel_values), whole.encode_image(pixel_values)) <= TOLERANCE


def test_coca_opens_without_its_attentional_pooling() -> None:
    coca = {"context_length": 7, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
    model_cfg = tower_settings(output_tokens=True)
    text = {**model_cfg["text_cfg"], "output_tokens": True, "embed_cls": True}
    whole = randomize_(open_clip.CoCa(**{**model_cfg, "text_cfg": text}, multimodal_cfg=coca)).eval()
    pixel_values = pixels_of(model_cfg)
    theirs, tokens = whole.visual(pixel_values)
    ours = from_module(whole)(pixel_values)
    assert difference(ours.pooler_output, theirs) <= TOLERANCE
    assert difference(ours.last_hidden_state[:, 1:], tokens) == 0.0
    model_cfg["vision_cfg"] |= {"attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 3}
    whole = open_clip.CoCa(**{**model_cfg, "text_cfg": text}, multimodal_cfg=coca)
    with pytest.raises(ExportError, match="CoCa's attentional pooling"):
        from_module(whole)


def test_openais_own_class_opens_live_and_from_its_files(tmp_path: Path) -> None:
    whole = openai_clip()
    pixel_values = torch.randn(2, 3, 40, 40)
    theirs = whole.encode_image(pixel_values)
    live = from_module(whole)
    assert difference(features(live, pixel_values), theirs) <= TOLERANCE
    torch.save(whole.state_dict(), tmp_path / "clip.pt")
    said = {**SAID, "num_attention_heads": 2, "hidden_act": "quick_gelu", "image_size": 40}
    opened = from_checkpoint(tmp_path / "clip.pt", **said, verify=True)
    assert opened.report.differences is not None
    assert difference(features(opened.model, pixel_values), theirs) <= TOLERANCE
    assert same_tensors(to_module(live, "open_clip").state_dict(), whole.visual.state_dict())
    record({**source_record("(OpenAI's clip) VisionTransformer"), "way_back_bit_exact": True,
            "logits": difference(features(live, pixel_values), theirs)})  # fmt: skip
    whole.visual.proj = None
    assert difference(features(from_module(whole), pixel_values), whole.encode_image(pixel_values)) == 0.0


def _other_norm(tower: Any) -> None:
    tower.transformer.resblocks[1].ln_2.eps = 1e-3


def _other_activation(tower: Any) -> None:
    tower.transformer.resblocks[2].mlp.gelu = nn.ReLU()


def _another_block(tower: Any) -> None:
    tower.transformer.resblocks[1] = nn.Identity()


def _relu_after(tower: Any) -> None:
    tower.ln_post = nn.Sequential(tower.ln_post, nn.ReLU())


@pytest.mark.parametrize("change, named", [
    (_other_norm, "resblocks.1.ln_2.eps is 0.001"), (_other_activation, "resblocks.2.mlp.gelu.class"),
    (_another_block, "resblocks.1.class"), (_relu_after, "ln_post.class"),
])  # fmt: skip
def test_a_part_that_plain_vit_does_not_know_is_named(change: Any, named: str) -> None:
    for tower in (clip(tower_settings(quick_gelu=True)).visual, openai_clip().visual):
        change(tower)
        with pytest.raises(ExportError) as caught:
            from_module(tower)
        assert named in str(caught.value)


@pytest.mark.parametrize("change, reason", [
    ({"scaled_cosine_attn": True}, "by the cosine"), ({"scale_heads": True}, "output of each head"),
    ({"scale_attn": True}, "norm after the attention"), ({"attentional_pool": True, "attn_pooler_heads": 3}, "CoCa's"),
    ({"attentional_pool": "parallel", "attn_pooler_heads": 3}, "CoCa's"),
])  # fmt: skip
def test_what_no_plain_vit_has_is_refused_with_its_reason_live_in_folders_and_files(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model_cfg = tower_settings(**change)
    whole = clip(model_cfg)
    folder = save_folder(tmp_path / "folder", whole, model_cfg)
    refusals = [lambda: from_module(whole), lambda: from_checkpoint(folder),
                lambda: from_checkpoint(folder / "open_clip_pytorch_model.bin", **SAID)]  # fmt: skip
    for refused in refusals:
        with pytest.raises(ExportError, match=reason):
            refused()


@pytest.mark.parametrize("name, proj, part", [
    ("resnet10t", "linear", "ResNet, which plain-vit does not open"), ("test_vit", "mlp", "head.mlp is a timm"),
])  # fmt: skip
def test_another_model_of_timm_or_another_head_is_refused(name: str, proj: str, part: str) -> None:
    whole = clip(tower_settings(timm_model_name=name, timm_pool="avg", timm_proj=proj, image_size=160))
    with pytest.raises(ExportError, match=part):
        from_module(whole)


def test_a_modified_resnet_is_refused_by_name(tmp_path: Path) -> None:
    whole = open_clip.CLIP(**tower_settings(layers=[1, 1, 1, 1], width=8, image_size=64))
    torch.save(whole.state_dict(), tmp_path / "clip.pt")
    with pytest.raises(UnknownFormatError, match="modified ResNet"):
        from_checkpoint(tmp_path / "clip.pt")
    with pytest.raises(ExportError, match="of open_clip it opens transformer.VisionTransformer"):
        from_module(whole)


# Files and folders


@pytest.mark.parametrize("name", ALL)
def test_a_folder_of_open_clip_opens_as_its_own_package_reads_it(name: str, tmp_path: Path) -> None:
    whole = clip(ALL[name], custom_text=True)
    folder = save_folder(tmp_path / "folder", whole, ALL[name])
    opened = from_checkpoint(folder, verify=True)
    pixel_values = pixels_of(ALL[name])
    assert opened.report.is_independent
    assert difference(features(opened.model, pixel_values), features(whole.visual, pixel_values)) <= TOLERANCE
    live = {"dtype": None, "layer_scale_init_value": opened.model.config.layer_scale_init_value}  # not in modules
    assert opened.model.config.to_dict() | live == from_module(whole).config.to_dict() | live
    (folder / "open_clip_model.safetensors").unlink()
    again = from_checkpoint(folder)
    assert same_tensors(again.model.state_dict(), opened.model.state_dict())


def test_a_folder_with_weights_of_two_packages_opens_each_with_its_own_configuration(tmp_path: Path) -> None:
    model_cfg = tower_settings()
    folder = save_folder(tmp_path / "folder", clip(model_cfg), model_cfg)
    (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))  # belongs to transformers
    assert from_checkpoint(folder).report.format == "open_clip"
    (folder / "open_clip_config.json").unlink()
    with pytest.raises(AmbiguousCheckpointError, match="num_attention_heads"):
        from_checkpoint(folder)


def test_a_repository_of_open_clip_opens_from_the_hub(hub: HubEndpoint, tmp_path: Path) -> None:
    model_cfg = tower_settings(**CLIPA)
    whole = clip(model_cfg)
    folder = save_folder(tmp_path / "folder", whole, model_cfg, resize_mode="squash")
    for left_out in ("open_clip_pytorch_model.bin", "open_clip_model.safetensors"):
        name = f"alice/without-{left_out.split('.')[1]}"
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != left_out}
        hub.add_repository(name, files={**files, "model.py": b"raise SystemExit(99)"})
        opened = from_checkpoint(name)
        assert difference(features(opened.model, pixels_of(model_cfg)), whole.encode_image(pixels_of(model_cfg))) < 1e-5
        assert opened.image_processor.size == {"height": 24, "width": 56}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("part", ["whole", "wrapped", "tower"])
def test_a_bare_file_opens_with_what_no_tensor_shows(part: str, suffix: str, tmp_path: Path) -> None:
    model_cfg = tower_settings()
    whole, path, pixel_values = clip(model_cfg), tmp_path / f"clip{suffix}", pixels_of(model_cfg)
    state = whole.visual.state_dict() if part == "tower" else whole.state_dict()
    if part == "wrapped":
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    if suffix == ".pt":  # written by open_clip's training
        torch.save({"epoch": 3, "name": "run", "state_dict": state, "optimizer": {"state": {}}}, path)
    else:
        save_file(state, path)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path)
    assert caught.value.candidates.keys() == SAID.keys()
    opened = from_checkpoint(path, **SAID, verify=True)
    assert opened.report.differences is not None
    assert difference(features(opened.model, pixel_values), whole.encode_image(pixel_values)) <= TOLERANCE


def test_the_features_of_some_images_settle_what_no_tensor_shows(tmp_path: Path) -> None:
    model_cfg = tower_settings()
    whole, pixel_values = clip(model_cfg), pixels_of(model_cfg)
    torch.save(whole.state_dict(), tmp_path / "clip.pt")
    reference = pixel_values, whole.encode_image(pixel_values).detach()
    found = from_checkpoint(tmp_path / "clip.pt", reference=reference, layer_norm_eps=1e-5).report.config
    settled = (found.num_attention_heads, found.hidden_act, found.pooling, found.image_size)
    assert settled == (5, "gelu", "cls", (24, 56))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_two_dtypes_opens_in_float32_from_its_file_and_live(dtype: torch.dtype, tmp_path: Path) -> None:
    model_cfg = tower_settings()
    theirs = clip(model_cfg)
    convert_weights_to_lp(theirs, dtype)
    assert len({tensor.dtype for tensor in theirs.visual.state_dict().values()}) == 2
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "clip.pt")
    converted = from_checkpoint(tmp_path / "clip.pt", **SAID, verify=True)
    with pytest.warns(UserWarning, match="the model is in float32"):
        live = from_module(theirs)
    expected = features(theirs.float().visual, pixels_of(model_cfg))
    assert [note for note in converted.report.notes if "holds all their values exactly" in note]
    for model in (converted.model, live):
        assert model.dtype == torch.float32
        assert difference(features(model, pixels_of(model_cfg)), expected) <= TOLERANCE


@pytest.mark.parametrize("name", TRUNKS)
def test_a_bare_file_with_a_model_of_timm_opens_by_its_name(name: str, tmp_path: Path) -> None:
    whole, path = clip(trunk_settings(name)), tmp_path / "clip.pt"
    torch.save(whole.state_dict(), path)
    with pytest.raises(AmbiguousCheckpointError, match="num_attention_heads"):
        from_checkpoint(path)
    pooling = {"token": "cls", "avg": "mean"}[TRUNKS[name]["timm_pool"]]
    said = {"num_attention_heads": 2, "attention_scale": "head_dim**-0.5", "layer_norm_eps": 1e-6, "hidden_act": "gelu"}
    said |= {"pooling": pooling, "block_type": "sequential", "rope_type": "none", "image_size": 160}
    said |= {} if pooling == "cls" else {"pool_prefix_tokens": False}
    opened = from_checkpoint(path, **said)
    pixel_values = pixels_of(trunk_settings(name))
    assert difference(features(opened.model, pixel_values), whole.encode_image(pixel_values)) <= TOLERANCE


def test_another_size_is_the_one_that_open_clip_resizes_to_as_it_loads(tmp_path: Path) -> None:
    model_cfg = tower_settings(image_size=40, patch_size=8)
    whole = clip(model_cfg)
    model = from_module(whole)
    for size in (24, 56, (64, 24)):
        other = clip(tower_settings(image_size=size, patch_size=8))
        state = dict(whole.state_dict())
        resize_pos_embed(state, other)
        other.load_state_dict(state)
        pixel_values = pixels_of(tower_settings(image_size=size))
        off = difference(features(model, pixel_values), features(other.visual, pixel_values))
        assert off <= TOLERANCE
        record({**source_record("VisionTransformer, plain"), "another_resolution": off})
    # The size in a folder's config may differ from the size of its weights.
    folder = save_folder(tmp_path / "folder", whole, tower_settings(image_size=56, patch_size=8))
    opened = from_checkpoint(folder)
    assert (opened.model.config.image_size, opened.image_processor.crop_size.height) == (40, 56)
    assert "open_clip resizes them for 56 pixels" in str(opened.report)


def test_hints_that_contradict_a_folder_are_refused(tmp_path: Path) -> None:
    model_cfg = tower_settings()
    folder = save_folder(tmp_path / "folder", clip(model_cfg), model_cfg)
    for hint in ({"num_attention_heads": 4}, {"hidden_act": "quick_gelu"}, {"pooling": "mean"}, {"layout": "native"},
                 {"architecture": "ViT-B-32"}, {"image_size": 32}, {"final_norm": "after_pooling"}):  # fmt: skip
        with pytest.raises(PlainViTError):
            from_checkpoint(folder, **hint)
    for name, value in (("width", 56), ("layers", 2), ("no_ln_pre", True), ("ls_init_value", 0.1), ("qk_norm", True)):
        other = save_folder(tmp_path / name, clip(model_cfg), tower_settings(**{name: value}))
        with pytest.raises(MappingError, match="the tensors are not of the model that open_clip_config.json describes"):
            from_checkpoint(other)
    other = save_folder(tmp_path / "strange", clip(model_cfg), tower_settings(rotary=True))
    with pytest.raises(CheckpointError, match="rotary"):
        from_checkpoint(other)
    other = save_folder(tmp_path / "trunk", clip(model_cfg), trunk_settings("projection"))
    with pytest.raises(CheckpointError, match="a model of timm, but the tensors are of open_clip's own tower"):
        from_checkpoint(other)


def test_a_missing_and_a_strange_tensor_are_both_named(tmp_path: Path) -> None:
    state = clip(tower_settings()).state_dict()
    del state["visual.ln_post.weight"]
    state["visual.transformer.resblocks.1.gate"] = torch.ones(40)
    torch.save(state | {"vision.extra": torch.ones(3)}, tmp_path / "clip.pt")
    with pytest.raises(MappingError) as caught:
        from_checkpoint(tmp_path / "clip.pt", **SAID)
    assert all(name in str(caught.value) for name in ("ln_post.weight", "resblocks.1.gate", "vision.extra"))


# Names of models


def opens(name: str) -> bool:
    """Return whether plain-vit opens a model of open_clip."""
    vision_cfg = architectures()[name]["vision_cfg"]
    if "timm_model_name" not in vision_cfg:
        return "attentional_pool" not in vision_cfg
    try:
        constructor = constructor_named(vision_cfg["timm_model_name"])
    except UnknownFormatError:
        return False
    return constructor is not VISION_TRANSFORMER or vision_cfg["timm_proj"] != "mlp"


def _on_meta(name: str) -> nn.Module:
    model_cfg = architectures()[name]
    with torch.device("meta"):
        return _build_vision_tower(model_cfg["embed_dim"], dict(model_cfg["vision_cfg"]), model_cfg.get("quick_gelu"))


def make_shallow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce a named model to two blocks in open_clip and our tables, along with models it could be confused with."""
    vision_cfg = architectures()[name]["vision_cfg"]
    if "timm_model_name" not in vision_cfg:
        changed = {**architectures()[name], "vision_cfg": {**vision_cfg, "layers": 2}}
        monkeypatch.setitem(architectures(), name, changed)
        return
    trunk = vision_cfg["timm_model_name"].split(".")[0]
    table = constructor_named(trunk).architectures
    for each, arguments in table.items():
        monkeypatch.setitem(table, each, {**arguments, "depth": 2})
    monkeypatch.setattr(timm, "create_model", functools.partial(timm.create_model, depth=2))


def test_the_models_of_open_clip_that_open_are_counted() -> None:
    known = {name for name in open_clip.list_models() if not isinstance(
        open_clip.get_model_config(name)["vision_cfg"].get("layers"), list)}  # fmt: skip
    assert known == architectures().keys()
    opened = [name for name in architectures() if opens(name)]
    assert (len(open_clip.list_models()), len(architectures()), len(opened)) == (144, 134, 97)


@pytest.mark.slow(quick=["ViT-B-32-quickgelu", "ViT-B-16-SigLIP", "PE-Core-T-16-384"])
@pytest.mark.parametrize("name", [name for name in architectures() if opens(name)])
def test_a_named_model_has_the_config_of_the_live_one_and_its_shapes_alone_do_not_open(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shallow(name, monkeypatch)
    tower = _on_meta(name)
    tensors = {f"visual.{path}": tensor for path, tensor in tower.state_dict().items()}
    live = from_module(tower)
    described = OPEN_CLIP.describe_checkpoint(tensors, {}, Hints(architecture=name))
    fields = live.config.to_dict().keys() - {"dtype", "architectures", "layer_scale_init_value", "drop_path_rate"}
    assert {key: live.config.to_dict()[key] for key in fields} == {
        key: described.config.to_dict()[key] for key in fields
    }
    assert sum(p.numel() for p in live.parameters()) == sum(p.numel() for p in tower.parameters())
    with pytest.raises(AmbiguousCheckpointError) as caught:
        OPEN_CLIP.describe_checkpoint(tensors, {}, Hints())
    assert "timm_model_name" in architectures()[name]["vision_cfg"] or name in caught.value.candidates["architecture"]


@pytest.mark.parametrize("name", ["coca_ViT-B-32", "ViTamin-S", "convnext_tiny"])
def test_a_named_model_that_does_not_open_is_refused_with_a_reason(name: str) -> None:
    tensors = {f"visual.{path}": tensor for path, tensor in _on_meta(name).state_dict().items()}
    with pytest.raises((ExportError, UnknownFormatError)) as caught:
        recognise(tensors, FORMATS, name, tensors, ()).describe_checkpoint(tensors, {}, Hints(architecture=name))
    assert "timm" in str(caught.value) or "attentional pooling" in str(caught.value)


# Pixels


# Every pair of settings occurs.
@pytest.mark.parametrize("resize_mode, size, interpolation", [
    ("shortest", 48, "bicubic"), ("shortest", (40, 56), "bilinear"), ("shortest", (56, 40), "random"),
    ("longest", 48, "bilinear"), ("longest", (40, 56), "random"), ("longest", (56, 40), "bicubic"),
    ("squash", 48, "random"), ("squash", (40, 56), "bicubic"), ("squash", (56, 40), "bilinear"),
])  # fmt: skip
def test_pixels_are_open_clips(resize_mode: str, size: Any, interpolation: str) -> None:
    cfg = {"mean": (0.1, 0.5, 0.3), "std": (0.2, 0.3, 0.4), "resize_mode": resize_mode, "fill_color": 77,
           "interpolation": interpolation}  # fmt: skip
    theirs = image_transform_v2(PreprocessCfg(size=size, **cfg), is_train=False)
    ours: Any = processor_from_open_clip(cfg, size)
    chance = np.random.default_rng(0)
    for width, height, channels in [(61, 45, 3), (45, 61, 3), (31, 200, 1), (200, 31, 3), (48, 48, 1), (20, 21, 3)]:
        shape = (height, width, channels) if channels == 3 else (height, width)
        image = Image.fromarray(chance.integers(0, 256, shape, dtype=np.uint8))
        assert torch.equal(ours(image, return_tensors="pt")["pixel_values"][0], theirs(image))


def test_pixels_of_every_published_tag_are_open_clips() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (301, 277, 3), dtype=np.uint8))
    seen = set()
    for name, tag in open_clip.list_pretrained():
        cfg = {key: value for key, value in open_clip.get_pretrained_cfg(name, tag).items() if value is not None}
        cfg = {key: cfg[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in cfg}
        if str(cfg) not in seen:
            seen.add(str(cfg))
            theirs = image_transform_v2(PreprocessCfg(size=56, **cfg), is_train=False)
            ours: Any = processor_from_open_clip(cfg, 56)
            assert torch.equal(ours(image, return_tensors="pt")["pixel_values"][0], theirs(image))
    assert len(seen) >= 4


@pytest.mark.parametrize("cfg, fault", [
    ({"resize_mode": "stretch"}, "resize_mode"), ({"interpolation": "lanczos"}, "interpolation"),
    ({"mode": "L"}, "mode"), ({"mean": (0.5, 0.5)}, "mean"),
])  # fmt: skip
def test_preprocessing_that_open_clip_does_not_have_is_refused(cfg: dict[str, Any], fault: str) -> None:
    with pytest.raises(CheckpointError, match=fault):
        processor_from_open_clip(cfg, 48)


# Back


@pytest.mark.parametrize("change", [
    {"num_channels": 1}, {"use_class_token": False, "pooling": "mean"}, {"patch_bias": True}, {"pooling": "max"},
    {"qkv_bias": False}, {"hidden_act": "silu"}, {"num_register_tokens": 2}, {"attention_scale": 0.3},
    {"head_dim": 12}, {"hidden_dropout_prob": 0.1}, {"drop_path_rate": 0.1}, {"final_norm": "both"},
    {"representation_act": "tanh"}, {"representation_bias": True}, {"num_labels": 4}, {"norm_type": "rms_norm"},
], ids=str)  # fmt: skip
def test_what_open_clips_tower_cannot_express_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    fields = {"patch_bias": False, "embedding_norm": True, "representation_size": 30, "representation_act": "linear",
              "representation_bias": False, "num_labels": 0}  # fmt: skip
    assert isinstance(OPEN_CLIP.build_module(tiny_config(**fields), "native"), nn.Module)
    config = tiny_config(**fields | change)
    with pytest.raises(ExportError) as caught:
        OPEN_CLIP.build_module(config, "native")
    assert next(iter(change)) in str(caught.value) or "heads of 12" in str(caught.value)
    model = PlainViTForImageClassification(config) if config.num_labels else PlainViTModel(config)
    with pytest.raises(ExportError):
        to_checkpoint(model, tmp_path / "clip.pt", format="open_clip", layout="native")


def test_open_clip_itself_loads_an_exported_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_cfg = tower_settings(quick_gelu=True)
    tower = clip(model_cfg).visual
    to_checkpoint(from_module(tower), tmp_path / "tower.pt", format="open_clip")
    (tmp_path / "small.json").write_text(json.dumps(model_cfg))
    for registry in ("_MODEL_CONFIG_PATHS", "_MODEL_CONFIGS"):  # copies: other tests need the originals
        monkeypatch.setattr(open_clip.factory, registry, getattr(open_clip.factory, registry).copy())
    open_clip.add_model_config(tmp_path)
    loaded = open_clip.create_model("small", pretrained_image_path=str(tmp_path / "tower.pt"))
    assert same_tensors(loaded.visual.state_dict(), tower.state_dict())


# Random towers


def draw(chance: random.Random) -> dict[str, Any]:
    """Return a random `model_cfg`."""
    head_width, heads = chance.choice([8, 12, 16]), chance.choice([1, 2, 3, 5])
    height, width = patch_size = chance.choice([(4, 4), (5, 5), (4, 6)])
    changes: dict[str, Any] = {
        "image_size": (height * chance.randint(1, 4), width * chance.randint(1, 4)),
        "patch_size": patch_size,
        "width": head_width * heads,
        "head_width": head_width,
        "layers": chance.randint(1, 3),
        "mlp_ratio": chance.choice([1.5, 2.0, 4.0, 4.9231]),
        "quick_gelu": chance.random() < 0.5,
        "no_ln_pre": chance.random() < 0.3,
        "pool_type": chance.choice(["tok", "avg", "none"]),
        "final_ln_after_pool": chance.random() < 0.5,
        "ls_init_value": chance.choice([None, None, 0.1]),
        **{name: chance.random() < 0.2 for name in ("qk_norm", "scale_attn_inner", "scale_fc")},
        **{name: chance.random() < 0.03 for name in ("scale_heads", "scale_attn")},
    }
    if chance.random() < 0.2:
        changes["norm_kwargs"] = {"eps": 1e-6}
    return tower_settings(**changes)


@pytest.mark.slow
def test_random_towers_and_bare_files_are_the_sources_or_refused(tmp_path: Path) -> None:
    chance, tally = random.Random(0), Tally()
    for _ in range(draws(25, nightly=500)):
        model_cfg = draw(chance)
        said = model_cfg["vision_cfg"]
        whole = clip(model_cfg, custom_text=chance.random() < 0.5)
        truth = {
            "num_attention_heads": said["width"] // said["head_width"],
            "hidden_act": "quick_gelu" if model_cfg["quick_gelu"] else "gelu",
            "layer_norm_eps": said.get("norm_kwargs", {}).get("eps", 1e-5),
            "pooling": {"tok": "cls", "avg": "mean", "none": "none"}[said["pool_type"]],
            "final_norm": "after_pooling" if said["final_ln_after_pool"] else "before_pooling",
            "image_size": said["image_size"],
        }

        def oracle(name: str, candidates: Sequence[object], truth: dict[str, Any] = truth) -> object | None:
            assert not candidates or truth[name] in candidates
            return truth[name]

        torch.save(whole.state_dict(), tmp_path / "clip.pt")
        outcome = open_truthfully(tmp_path / "clip.pt", oracle)
        plain = not (said["scale_heads"] or said["scale_attn"])
        assert plain == (outcome.converted is not None), (model_cfg, outcome.refusal)
        off = 0.0
        if outcome.converted is not None:
            shape = (3, *said["image_size"])
            off = max(
                logits_differ_by(whole.visual, one, shape) for one in (outcome.converted.model, from_module(whole))
            )
        assert off <= TOLERANCE, (model_cfg, off)
        tally.add(outcome, off)
    print(tally)
    assert tally.opened > 0.8 * tally.total


@pytest.mark.parametrize(
    "setting, rate", [("timm_drop_path", "drop_path_rate"), ("patch_dropout", "patch_dropout_prob")]
)
def test_a_folder_keeps_what_training_drops(setting: str, rate: str, tmp_path: Path) -> None:
    model_cfg = tower_settings(timm_model_name="test_vit", image_size=160, **{setting: 0.25})
    whole = clip(model_cfg)
    assert getattr(from_module(whole).config, rate) == pytest.approx(0.25)
    folder = save_folder(tmp_path / "folder", whole, model_cfg)
    assert getattr(from_checkpoint(folder).model.config, rate) == 0.25


@pytest.mark.parametrize(
    "settings",
    [
        {"block_type": "default", "qk_norm": True, "scale_fc": True, "scaled_cosine_attn": True},
        {"norm_kwargs": {"elementwise_affine": True, "bias": True}},
        {"act_kwargs": {"approximate": "none"}},
    ],
)
def test_settings_that_change_nothing_are_not_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    model_cfg = tower_settings(**settings)
    whole = clip(model_cfg)
    ours = from_checkpoint(save_folder(tmp_path / "folder", whole, model_cfg)).model
    pixels = pixels_of(model_cfg)
    torch.testing.assert_close(features(ours, pixels), features(whole.visual, pixels), rtol=1e-5, atol=1e-6)


def test_a_dropout_before_the_projection_is_refused_live_and_from_a_folder(tmp_path: Path) -> None:
    model_cfg = tower_settings(timm_model_name="test_vit", image_size=160, timm_drop=0.2)
    whole = clip(model_cfg)
    folder = save_folder(tmp_path / "folder", whole, model_cfg)
    for refused in (lambda: from_module(whole), lambda: from_checkpoint(folder)):
        with pytest.raises(ExportError, match=r"before the projection: set (its p|it) to 0"):
            refused()


def test_the_embedding_is_as_wide_as_the_projection() -> None:
    assert from_module(clip(tower_settings())).config.representation_size == EMBED_DIM
