"""Code bases whose models are those of another source under other names: numbers, the way back, questions, refusals."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import timm.data
import torch
from timm.models import save_for_hf
from timm.models.vision_transformer_sam import VisionTransformerSAM, checkpoint_filter_fn
from torch import nn

from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.sources.renamed import RENAMED
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    PlainViTError,
    UnknownFormatError,
)
from tests.conftest import randomize_
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
    "segment_anything": {"layer_norm_eps": 1e-5, "use_class_token": False, "final_norm": "none", "num_labels": 0,
                         "pooling": "mean", "relative_position_bias": {"type": "decomposed"}},
}  # fmt: skip


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


# Segment Anything: timm reads its files too, and has the same encoder


def encoder_of_timm(**others: Any) -> VisionTransformerSAM:
    """Return timm's encoder with windows that its grid is no multiple of, in layers 0 and 2."""
    settings: dict[str, Any] = {"img_size": 96, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3,
                                "window_size": 5, "global_attn_indexes": (1,), "use_rel_pos": True, "neck_chans": 8,
                                "num_classes": 0, "norm_layer": partial(nn.LayerNorm, eps=1e-6)}  # fmt: skip
    module = VisionTransformerSAM(**settings | others).eval()
    randomize_(module)
    return module


def names_of_sam(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name.replace("mlp.fc", "mlp.lin"): tensor for name, tensor in state.items()}


SAM_FILES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "sam": lambda state: (
        names_of_sam(state, "image_encoder.")
        | {"prompt_encoder.no_mask_embed.weight": torch.ones(1, 8), "mask_decoder.iou_token.weight": torch.ones(1, 8)}
    ),
    "sam_encoder": lambda state: names_of_sam(state, ""),
    "timm": lambda state: state,
}


@pytest.mark.parametrize("settings", [{}, {"global_attn_indexes": ()}, {"window_size": 0, "qkv_bias": False},
                                      {"img_size": 40}, {"img_size": 24}], ids=str)  # fmt: skip
@pytest.mark.parametrize("layout", SAM_FILES)
def test_a_file_of_segment_anything_shows_everything(layout: str, settings: dict[str, Any], tmp_path: Path) -> None:
    module = encoder_of_timm(**settings)
    torch.save(SAM_FILES[layout](module.state_dict()), tmp_path / "sam.pth")
    peer = encoder_of_timm(**settings)
    peer.load_state_dict(
        module.state_dict() if layout == "sam_encoder" else checkpoint_filter_fn(torch.load(tmp_path / "sam.pth"), peer)
    )
    opened = from_checkpoint(tmp_path / "sam.pth", verify=True)
    assert (opened.report.format, opened.report.layout) == ("segment_anything", layout)
    in_windows = opened.model.config.window_attention is not None
    assert in_windows != ("window_attention" in {one.field for one in opened.report.inferences})
    images = pixels(2, *opened.model.config.image_shape)
    with torch.no_grad():
        tokens, (ours, _) = peer.patch_embed(images) + peer.pos_embed, output_of(opened.model, images)
        for block, found in zip(peer.blocks, ours, strict=True):
            tokens = block(tokens)
            assert difference(found, tokens.flatten(1, 2)) <= TOLERANCE
    to_checkpoint(opened.model, tmp_path / "back.pth", format="segment_anything", layout=layout)
    back, state = torch.load(tmp_path / "back.pth"), torch.load(tmp_path / "sam.pth")
    assert all("neck" in name or name.startswith(("prompt_", "mask_")) for name in state.keys() - back.keys())
    assert all(torch.equal(state[name], tensor) for name, tensor in back.items())


@pytest.mark.parametrize("width, height", [(137, 61), (50, 99), (192, 35), (20, 31), (96, 96)])
def test_pixels_are_those_of_segment_anything(width: int, height: int, tmp_path: Path) -> None:
    torch.save(SAM_FILES["sam"](encoder_of_timm().state_dict()), tmp_path / "sam.pth")
    processor: Any = from_checkpoint(tmp_path / "sam.pth").image_processor
    image = PIL.Image.effect_noise((width, height), 60).convert("RGB")
    scale = 96 / max(width, height)  # as in `ResizeLongestSide` and `Sam.preprocess`, with its levels of 255
    sides = int(width * scale + 0.5), int(height * scale + 0.5)
    resized = torch.from_numpy(np.array(image.resize(sides, PIL.Image.Resampling.BILINEAR))).permute(2, 0, 1)
    mean, std = (torch.tensor(level)[:, None, None] for level in ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375]))
    expected = nn.functional.pad((resized - mean) / std, (0, 96 - sides[0], 0, 96 - sides[1]))
    assert difference(processor(image, return_tensors="pt").pixel_values[0], expected) <= TOLERANCE
    said = from_checkpoint(tmp_path / "sam.pth", image_std=(0.5, 0.25, 1.0)).image_processor
    assert (said.image_std, said.image_mean, said.do_pad) == ((0.5, 0.25, 1.0), processor.image_mean, True)


def test_a_folder_of_timms_sam_opens_with_its_pixels(tmp_path: Path) -> None:
    module: Any = timm.create_model(
        "samvit_base_patch16", img_size=96, embed_dim=24, depth=3, num_heads=3, window_size=4
    )
    save_for_hf(randomize_(module), tmp_path, model_args={"img_size": 96})
    processor: Any = from_checkpoint(tmp_path).image_processor
    transform: Any = timm.data.create_transform(**timm.data.resolve_data_config({"img_size": 96}, model=module))
    image = PIL.Image.effect_noise((150, 130), 60).convert("RGB")
    assert torch.equal(processor(image, return_tensors="pt").pixel_values[0], transform(image))


@pytest.mark.parametrize(
    "settings, error",
    [({"use_rel_pos": False}, "names of segment_anything"),
     ({"use_rel_pos": False, "use_rope": True}, "names of segment_anything"),
     ({"qk_norm": True}, "q_norm"), ({"num_classes": 7}, "head of segment_anything is not one that opens")], ids=str
)  # fmt: skip
def test_another_encoder_than_segment_anythings_is_refused(
    settings: dict[str, Any], error: str, tmp_path: Path
) -> None:
    torch.save(encoder_of_timm(**settings).state_dict(), tmp_path / "timm.pth")
    with pytest.raises(PlainViTError, match=error):
        from_checkpoint(tmp_path / "timm.pth", format="segment_anything")


def test_live_modules_are_refused_both_ways() -> None:
    with pytest.raises(ExportError, match="live modules of kornia do not open: save the state dict"):
        from_module(ViT(CODE_BASES["kornia"]), format="kornia")
    with pytest.raises(ExportError, match="builds no live modules of swag: write its state dict"):
        to_module(build(image_size=24, patch_size=8), "swag")
