"""Code bases whose models are those of another source under other names: numbers, the way back, questions, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.sources.renamed import RENAMED
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError, UnknownFormatError
from tests.sources.code_bases import CODE_BASES, CodeBase, ViT
from tests.tiny import build, difference, pixels

TOLERANCE = 1e-6  # the attention of torch's MultiheadAttention and of einsum rounds in another order


def saved(name: str, folder: Path, **others: torch.Tensor) -> tuple[Path, CodeBase, ViT]:
    """Return a file with the tensors of a code base, and what it was made from."""
    base = CODE_BASES[name]
    model = ViT(base)
    torch.save({"meta": {"epoch": 3}, "state_dict": base.state(model) | others}, folder / "theirs.pth")
    return folder / "theirs.pth", base, model


def output_of(model: Any, images: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    outputs = model(images, output_hidden_states=True)
    return outputs.hidden_states[1:], outputs.logits if "logits" in outputs else outputs.last_hidden_state


@pytest.mark.parametrize("name", CODE_BASES)
def test_tokens_and_output_are_those_of_the_code_base(name: str, tmp_path: Path) -> None:
    path, base, model = saved(name, tmp_path)
    opened = from_checkpoint(path, **base.hints)
    assert opened.report.format == name.split(" ")[0]
    images = pixels(2, *base.image_size)
    with torch.no_grad():
        (tokens, output), (our_tokens, ours) = model(images), output_of(opened.model, images)
    assert max(map(difference, our_tokens, tokens)) <= TOLERANCE
    assert difference(ours, output) <= TOLERANCE


@pytest.mark.parametrize("name", CODE_BASES)
def test_the_way_back_has_the_same_tensors_by_the_same_names(name: str, tmp_path: Path) -> None:
    path, base, model = saved(name, tmp_path)
    opened = from_checkpoint(path, **base.hints)
    export = to_checkpoint(
        opened.model, tmp_path / "back.pth", format=opened.report.format, layout=opened.report.layout
    )
    assert not export.changed
    back, state = torch.load(tmp_path / "back.pth"), base.state(model)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[one], state[one]) for one in state)


@pytest.mark.parametrize("name", CODE_BASES)
def test_only_what_neither_file_nor_code_says_is_asked_for(name: str, tmp_path: Path) -> None:
    path, base, _ = saved(name, tmp_path)
    with pytest.raises(AmbiguousCheckpointError, match="not show everything that changes the logits") as caught:
        from_checkpoint(path)
    assert caught.value.candidates.keys() == base.hints.keys()
    assert not caught.value.otherwise
    for hint, value in base.hints.items():
        if hint != "image_size":  # only square ones are listed
            assert value in caught.value.candidates[hint]


@pytest.mark.parametrize("name", [name for name in CODE_BASES if " " not in name])
def test_a_hint_against_the_code_is_refused(name: str, tmp_path: Path) -> None:
    path, base, _ = saved(name, tmp_path)
    with pytest.raises(CheckpointError, match="the hints contradict"):
        from_checkpoint(path, **{**base.hints, "attention_scale": 0.3})
    with pytest.raises(CheckpointError, match="it has no effect here"):
        from_checkpoint(path, **base.hints, layout="mmseg_backbone")


LOST: dict[str, dict[str, Any]] = {  # what each can represent with tensors, and computes otherwise
    "openmmlab": {"pool_prefix_tokens": True, "pooling": "mean"},
    "swag": {"layer_norm_eps": 1e-5},
    "kornia": {"hidden_act": "relu", "pooling": "none", "num_labels": 0},
    "monai": {"layer_norm_eps": 1e-6},
}


@pytest.mark.parametrize("format", [one.name for one in RENAMED])
def test_an_export_that_would_change_the_model_is_refused(format: str, tmp_path: Path) -> None:
    square = {"image_size": 24, "patch_size": 8}
    with pytest.raises(ExportError, match=f"{format} cannot represent"):
        to_checkpoint(build(**square, **LOST[format]), tmp_path / "out.pth", format=format)
    with pytest.raises(ExportError, match=f"{format} has no place for parts") as caught:
        to_checkpoint(build(**square, num_register_tokens=2), tmp_path / "out.pth", format=format)
    assert "vit.embeddings.register_tokens" in caught.value.parts
    with pytest.raises(ExportError, match=f"layout='no such': {format} has "):
        to_checkpoint(build(**square), tmp_path / "out.pth", format=format, layout="no such")
    assert not (tmp_path / "out.pth").exists()


def test_a_segmenter_opens_by_the_key_that_the_error_names(tmp_path: Path) -> None:
    base = CODE_BASES["openmmlab mmseg"]
    state = {f"backbone.{name}": tensor for name, tensor in base.state(ViT(base)).items()}
    torch.save({"state_dict": state | {"decode_head.conv_seg.weight": torch.ones(3, 24, 1, 1)}}, tmp_path / "seg.pth")
    with pytest.raises(MappingError, match=r"key='state_dict\.backbone' names a model of openmmlab"):
        from_checkpoint(tmp_path / "seg.pth")
    assert from_checkpoint(tmp_path / "seg.pth", key="state_dict.backbone", **base.hints).report.format == "openmmlab"


def test_a_head_of_another_kind_is_refused_and_can_be_dropped(tmp_path: Path) -> None:
    path, base, model = saved("monai", tmp_path)
    state = torch.load(path)["state_dict"]
    for leaf in ("weight", "bias"):  # MONAI's usual head ends in a Tanh
        state[f"classification_head.0.{leaf}"] = state.pop(f"classification_head.{leaf}")
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"head of monai is not one that opens, it has 'classification_head\.0\."):
        from_checkpoint(path, **base.hints)
    ours = from_checkpoint(path, **base.hints, drop=("head",)).model
    images = pixels(2, *base.image_size)
    with torch.no_grad():
        tokens, _ = model(images)
        assert difference(ours(images).last_hidden_state, model.norm(tokens[-1])) <= TOLERANCE


def test_deit_iii_of_mmpretrain_is_refused_for_its_two_meanings(tmp_path: Path) -> None:
    path, base, _ = saved("openmmlab", tmp_path)
    state = torch.load(path)["state_dict"]
    state["backbone.pos_embed"] = state["backbone.pos_embed"][:, 1:]
    torch.save(state, path)
    with pytest.raises(UnknownFormatError, match="DeiT III in mmpretrain"):
        from_checkpoint(path, **base.hints)


def test_a_patch_projection_without_bias_opens(tmp_path: Path) -> None:
    path, base, model = saved("openmmlab mmseg", tmp_path)
    state = torch.load(path)["state_dict"]
    model.patch.bias = None
    del state["patch_embed.projection.bias"]
    torch.save(state, path)
    ours = from_checkpoint(path, **base.hints).model
    images = pixels(2, *base.image_size)
    with torch.no_grad():
        assert difference(ours(images).last_hidden_state, model(images)[1]) <= TOLERANCE


def test_a_gated_mlp_goes_to_mmpretrain_and_back(tmp_path: Path) -> None:
    model = build(mlp_type="swiglu_packed", hidden_act="silu", layer_scale_init_value=0.1, drop_path_rate=0.2)
    layout = "mmpretrain_swiglu_linear_head"
    export = to_checkpoint(model, tmp_path / "out.pth", format="openmmlab", layout=layout)
    assert {line.split(" ")[0] for line in export.changed} >= {"layer_scale_init_value", "drop_path_rate"}
    assert "backbone.layers.0.ffn.w12.weight" in torch.load(tmp_path / "out.pth")
    asked = ("num_attention_heads", "layer_norm_eps", "hidden_act", "pooling", "image_size")
    opened = from_checkpoint(tmp_path / "out.pth", **{name: getattr(model.config, name) for name in asked})
    assert opened.report.layout == layout
    assert all(torch.equal(tensor, opened.model.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_live_modules_are_refused_both_ways() -> None:
    with pytest.raises(ExportError, match="live modules of kornia do not open: save the state dict"):
        from_module(ViT(CODE_BASES["kornia"]), format="kornia")
    with pytest.raises(ExportError, match="builds no live modules of swag: write its state dict"):
        to_module(build(image_size=24, patch_size=8), "swag")
