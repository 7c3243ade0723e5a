"""llama.cpp's `mmproj` files, compared with transformers' towers, whose tensors the package gguf names and writes."""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from PIL import Image

from plain_vit import PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint, to_checkpoint
from plain_vit.errors import CheckpointError, ExportError, MappingError, MissingPackageError, UnknownFormatError
from plain_vit.system import extras
from plain_vit_command import main
from tests.conftest import randomize_
from tests.sources.gguf_models import CASES, DEPTH, MEAN, SIZE, STD, TYPES, save, settings_of, tensors_of, tokens_of
from tests.sources.gguf_models import tower_of as tower
from tests.sources.sweep import record
from tests.tiny import difference, tiny_config


def mmproj(folder: Path, name: str = "gemma3", kind: str = "F32", **settings: Any) -> Path:
    """Write the file of one case, with some other settings; None for none."""
    case = CASES[name]
    given = {**settings_of(case), **{f"clip.{key}": value for key, value in settings.items()}}
    given = {key: value for key, value in given.items() if value is not None}
    return save(folder / f"mmproj-{kind}.gguf", given, tensors_of(case, tower(case)), kind)


def stored(path: Path) -> dict[str, tuple[str, bytes]]:
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_tower_has_the_tokens_of_transformers_after_every_block(name: str, tmp_path: Path) -> None:
    case, pixels = CASES[name], torch.randn(2, 3, SIZE, SIZE)
    model = tower(case)
    path = save(tmp_path / "mmproj.gguf", settings_of(case), tensors_of(case, model))
    converted = from_checkpoint(path)
    ours, theirs = converted.model(pixels, output_hidden_states=True), tokens_of(case, model, pixels)
    assert len(ours.hidden_states) == len(theirs) == case.last + 1
    assert all(torch.equal(one, other) for one, other in zip(ours.hidden_states, theirs, strict=True))
    last = theirs[-1] if case.dropped else model(pixels).last_hidden_state
    assert torch.equal(ours.last_hidden_state, last)
    assert sorted(converted.report.ignored) == ["mm.0.bias", "mm.0.weight"]
    assert converted.report.format == "gguf"
    again = to_checkpoint(converted.model, tmp_path / "again.gguf", format="gguf", into=path)
    assert again.changed == []
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()
    record({"source": f"gguf {name}", "logits": difference(ours.last_hidden_state, last), "way_back_bit_exact": True,
            "gguf": version("gguf"), "torch": torch.__version__})  # fmt: skip


@pytest.mark.parametrize("name", ["llava", "gemma3", "idefics3", "internvl"])
@torch.no_grad()
def test_other_sizes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case, pixels = CASES[name], torch.randn(2, 3, 21, 35)
    model = tower(case)
    ours = from_checkpoint(save(tmp_path / "mmproj.gguf", settings_of(case), tensors_of(case, model))).model
    asked = {"interpolate_pos_encoding": True} if name in ("llava", "gemma3") else {}
    theirs = tokens_of(case, model, pixels, **asked)[-1]
    assert torch.equal(ours(pixels, output_hidden_states=True).hidden_states[-1], theirs)


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_a_type_goes_there_and_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    path = mmproj(tmp_path, kind=kind)
    converted = from_checkpoint(path)
    model = converted.model.to(TYPES[kind])
    to_checkpoint(model, tmp_path / "alone.gguf", format="gguf", image_processor=converted.image_processor)
    alone, theirs = stored(tmp_path / "alone.gguf"), stored(path)
    matrices = [name for name in alone if name.endswith("weight") and "v.blk" in name and ".ln" not in name]
    assert len(matrices) == 6 * DEPTH
    assert all(alone[name] == theirs[name] for name in matrices)
    assert {name: type for name, (type, _) in alone.items() if name not in matrices and type != "F32"} == {}
    opened = from_checkpoint(tmp_path / "alone.gguf")
    assert opened.model.state_dict().keys() == model.state_dict().keys()
    assert all(
        torch.equal(one, opened.model.state_dict()[name].to(one.dtype)) for name, one in model.state_dict().items()
    )
    assert opened.image_processor.to_dict() == converted.image_processor.to_dict()


def test_the_exported_file_says_what_llama_cpp_reads(tmp_path: Path) -> None:
    path = mmproj(tmp_path)
    converted = from_checkpoint(path)
    to_checkpoint(converted.model, tmp_path / "alone.gguf", format="gguf", image_processor=converted.image_processor)
    theirs, ours = ({key: (field.types, field.contents()) for key, field in gguf.GGUFReader(each).fields.items()}
                    for each in (path, tmp_path / "alone.gguf"))  # fmt: skip
    extra = {key: found for key, found in ours.items() if theirs.get(key) != found and not key.startswith("GGUF.")}
    assert extra == {"clip.use_silu": ([gguf.GGUFValueType.BOOL], False)}
    assert set(theirs) - set(ours) == {"clip.vision.projection_dim", "general.languages"}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_tensors_are_dequantised_with_a_note(kind: str, tmp_path: Path) -> None:
    path = mmproj(tmp_path, kind=kind)
    converted = from_checkpoint(path)
    assert any(
        f"read as float32, which adds nothing to what they hold: {kind}" in note for note in converted.report.notes
    )
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "v.blk.1.attn_k.weight":
            assert tensor.tensor_type.name == kind
            held = converted.model.state_dict()["layers.1.attention.k_proj.weight"].numpy()
            assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), held)
    with pytest.raises(ExportError, match=r"(?s)cannot hold this .* is quantised"):
        to_checkpoint(converted.model, tmp_path / "again.gguf", format="gguf", into=path)
    assert not (tmp_path / "again.gguf").exists()


def test_without_the_package_gguf_only_what_is_quantised_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, quantised = mmproj(tmp_path, kind="F16"), mmproj(tmp_path, kind="Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(extras, "_is_absent", lambda package: True)
    model = from_checkpoint(plain).model
    to_checkpoint(model, tmp_path / "again.gguf", format="gguf", into=plain)
    for needing in (lambda: from_checkpoint(quantised),
                    lambda: to_checkpoint(model, tmp_path / "new.gguf", format="gguf")):  # fmt: skip
        with pytest.raises(MissingPackageError, match=r"plain-vit\[gguf\]"):
            needing()


def test_the_first_converters_names_and_settings_open(tmp_path: Path) -> None:
    """It called the layers of the MLP by each other's names, and named no projector."""
    case = CASES["llava"]
    model = tower(case)
    tensors = tensors_of(case, model)
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    swapped = {".".join(names.get(part, part) for part in name.split(".")): one for name, one in tensors.items()}
    settings = {**settings_of(case), "clip.has_llava_projector": True}
    del settings["clip.projector_type"]
    path = save(tmp_path / "old.gguf", settings, swapped)
    old, new = from_checkpoint(path), from_checkpoint(save(tmp_path / "new.gguf", settings_of(case), tensors))
    assert (old.report.layout, new.report.layout) == ("mlp swapped", "mlp")
    assert all(torch.equal(one, new.model.state_dict()[name]) for name, one in old.model.state_dict().items())
    to_checkpoint(old.model, tmp_path / "again.gguf", format="gguf", layout="mlp swapped")
    again = stored(tmp_path / "again.gguf")
    assert again == {name: one for name, one in stored(path).items() if name in again}


def test_pixels_are_those_of_the_file_and_what_they_are_not_is_said(tmp_path: Path) -> None:
    image = Image.effect_mandelbrot((90, 70), (-2, -1.5, 1, 1.5), 20).convert("RGB")
    converted = from_checkpoint(mmproj(tmp_path))
    assert converted.image_processor is not None
    (note,) = (note for note in converted.report.notes if "stretched" in note)
    assert note.endswith("to 28x28 pixels, bilinear; the model's own code does the same")
    expected = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR), np.float32) / 255
    expected = ((expected - np.float32(MEAN)) / np.float32(STD)).transpose(2, 0, 1)
    assert difference(converted.image_processor(image, return_tensors="pt")["pixel_values"][0],
                      torch.from_numpy(expected)) <= 1e-6  # fmt: skip
    notes = from_checkpoint(mmproj(tmp_path, "internvl")).report.notes
    assert any("the model's own code cuts larger images into tiles" in note for note in notes)
    unsaid = {"vision.image_mean": None, "vision.image_std": None}
    assert any("does not say" in note for note in from_checkpoint(mmproj(tmp_path, **unsaid)).report.notes)


def test_blocks_after_the_last_that_is_counted_are_ignored(tmp_path: Path) -> None:
    report = from_checkpoint(mmproj(tmp_path, **{"vision.block_count": DEPTH - 1})).report
    assert report.config.num_hidden_layers == DEPTH - 1
    assert report.ignored["v.blk.2.ln1.bias"] == "after the last block of the tower"


@pytest.mark.parametrize(
    "settings, raises, says",
    [
        ({"projector_type": "qwen2.5vl_merger"}, UnknownFormatError, "rotate queries and keys.*give the folder"),
        ({"projector_type": None}, UnknownFormatError, "clip.projector_type is None"),
        ({"projector_type": "internvl"}, CheckpointError, "v.class_embd is missing, unlike in any tower of internvl"),
        ({"vision.image_size": 56}, CheckpointError, r"image_size = 56 \(the tensors have 28\)"),
        ({"vision.embedding_length": 48}, CheckpointError, r"embedding_length = 48 \(the tensors have 32\)"),
        ({"vision.block_count": 5}, CheckpointError, r"block_count = 5 \(the tensors have 3\)"),
        ({"vision.block_count": 0}, CheckpointError, r"block_count = 0 \(the tensors have 1\)"),
        ({"vision.attention.head_count": None}, CheckpointError, "head_count is None: expected a number"),
        ({"vision.attention.head_count": 5}, CheckpointError, "describe no model"),
        ({"vision.attention.head_count": "4"}, CheckpointError, "head_count is '4': expected a number"),
        ({"vision.image_mean": [0.5]}, CheckpointError, r"image_mean is \(0.5,\): expected a number for each channel"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    settings: dict[str, Any], raises: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(raises, match=says):
        from_checkpoint(mmproj(tmp_path, **settings))


def test_what_no_tower_of_a_projector_has_is_left_over(tmp_path: Path) -> None:
    case = CASES["gemma3"]
    tensors = tensors_of(case, tower(case)) | {"v.blk.0.attn_q_norm.weight": torch.ones(32)}
    with pytest.raises(MappingError, match="left over: 'v.blk.0.attn_q_norm.weight'"):
        from_checkpoint(save(tmp_path / "mmproj.gguf", settings_of(case), tensors))
    with pytest.raises(CheckpointError, match="the hints contradict"):
        from_checkpoint(mmproj(tmp_path), num_attention_heads=8)


def test_other_files_of_llama_cpp_are_named(tmp_path: Path) -> None:
    language = save(tmp_path / "model.gguf", {"llama.block_count": 1}, {"token_embd.weight": torch.ones(5, 32)})
    with pytest.raises(UnknownFormatError, match="a language model of llama.cpp: give the mmproj file beside it"):
        from_checkpoint(language)
    with pytest.raises(UnknownFormatError, match="another tower of llama.cpp"):
        from_checkpoint(save(tmp_path / "audio.gguf", {}, {"a.blk.0.ln1.weight": torch.ones(5, 32)}))


def test_a_tower_is_found_in_its_folder_beside_another_config(tmp_path: Path) -> None:
    path = mmproj(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {"hidden_size": 1152}}')
    assert from_checkpoint(tmp_path).report.config.hidden_size == from_checkpoint(path).report.config.hidden_size == 32


def test_a_tuned_tower_goes_into_a_copy_of_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mmproj(tmp_path, kind="F16")
    before, model = stored(path), from_checkpoint(path).model
    randomize_(model, seed=7)
    with pytest.raises(ExportError, match=r"is float16 there and has other values: round the model first, model.to"):
        to_checkpoint(model, tmp_path / "again.gguf", format="gguf", into=path)
    model.half().save_pretrained(tmp_path / "tuned")
    words = [str(tmp_path / "tuned"), str(tmp_path / "again.gguf"), "--to", "gguf", "--into", str(path)]
    assert main(["export", *words]) == 0
    after = stored(tmp_path / "again.gguf")
    assert {name: kind for name, (kind, _) in after.items()} == {name: kind for name, (kind, _) in before.items()}
    assert {name for name in after if after[name] == before[name]} == {"mm.0.weight", "mm.0.bias"}
    opened = from_checkpoint(tmp_path / "again.gguf").model
    assert all(torch.equal(one.float(), opened.state_dict()[name]) for name, one in model.state_dict().items())
    (folder := tmp_path / "whole").mkdir()
    shutil.copy(path, folder)
    to_checkpoint(model, tmp_path / "by_folder", format="gguf", into=folder)
    assert (tmp_path / "by_folder" / path.name).read_bytes() == (tmp_path / "again.gguf").read_bytes()
    other = PlainViTForImageClassification(tiny_config(num_labels=0))
    with pytest.raises(ExportError, match="is another one"):
        to_checkpoint(other, tmp_path / "other.gguf", format="gguf", into=path)
    with pytest.raises(UnknownFormatError, match="does not have the names of timm"):
        to_checkpoint(other, tmp_path / "timm.gguf", format="timm", into=path)
    capsys.readouterr()


@pytest.mark.parametrize(
    "fields, part",
    [({"num_register_tokens": 2}, "num_register_tokens"), ({"hidden_act": "relu"}, "hidden_act"),
     ({"num_labels": 5}, "num_labels"), ({"image_size": (14, 28)}, "a row for each patch of a square"),
     ({"image_size": (14, 56)}, "image_size"), ({"position_embedding_type": "none"}, "position_embedding"),
     ({"block_type": "branches", "num_branches": 2}, "an MLP of another width"), ({"mlp_type": "swiglu"}, "mlp_type")],
)  # fmt: skip
def test_what_no_tower_can_represent_is_refused(fields: dict[str, Any], part: str, tmp_path: Path) -> None:
    base = {"image_size": 28, "patch_size": 7, "num_labels": 0, "hidden_act": "quick_gelu", "final_norm": "none"}
    fitting = PlainViTForImageClassification(tiny_config(**base, position_resampling="bicubic"))
    to_checkpoint(fitting, tmp_path / "fits.gguf", format="gguf")
    with pytest.raises(ExportError, match=part):
        to_checkpoint(PlainViTForImageClassification(tiny_config(**base | fields)), tmp_path / "x.gguf", format="gguf")
    assert not (tmp_path / "x.gguf").exists()
