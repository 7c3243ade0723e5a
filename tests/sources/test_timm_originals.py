"""Original files of DINOv3, EVA-02 and Perception Encoder, compared with timm with the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.eva import checkpoint_filter_fn
from torch import nn

from plain_vit.conversion import from_checkpoint, to_checkpoint
from plain_vit.conversion.sources.timm.eva.source import EVA
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.tables.engine import revert
from plain_vit.errors import AmbiguousCheckpointError, ExportError, MappingError, PlainViTError, UnknownFormatError
from tests.sources.sweep import record
from tests.sources.timm_models import image_size, pixels_for, stage_differences, tiny_timm
from tests.tiny import difference

Tensors = dict[str, torch.Tensor]
DEPTH, HEADS = 2, 7
EMBEDDED = 11  # width after Perception Encoder's projection


def renamed(tensors: Tensors, *swaps: tuple[str, str]) -> Tensors:
    """Return tensors with parts of their names replaced, in this order."""
    result = {}
    for name, tensor in tensors.items():
        for ours, theirs in swaps:
            name = name.replace(ours, theirs)
        result[name] = tensor
    return result


def dinov3(state: Tensors) -> Tensors:
    """Return the tensors of timm's model under the names of DINOv3's own file."""
    width = state["cls_token"].shape[-1]
    for number in range(DEPTH):
        block = f"blocks.{number}.attn."
        biases = [state.pop(f"{block}{name}_bias", torch.zeros(width)) for name in "qv"]
        state[f"{block}qkv.bias"] = torch.cat((biases[0], torch.zeros(width), biases[1]))
        state[f"{block}qkv.bias_mask"] = torch.cat((torch.ones(width), torch.zeros(width), torch.ones(width)))
    count = width // HEADS // 4
    own = {"mask_token": torch.randn(1, width), "rope_embed.periods": 100 ** (torch.arange(count) / count)}
    gated = (("mlp.fc1_g", "mlp.w1"), ("mlp.fc1_x", "mlp.w2"), ("mlp.fc2", "mlp.w3"))
    swaps = (("reg_token", "storage_tokens"), ("gamma_1", "ls1.gamma"), ("gamma_2", "ls2.gamma"))
    return own | renamed(state, *swaps, *(gated if "blocks.0.mlp.fc1_g.weight" in state else ()))


def eva02(state: Tensors) -> Tensors:
    """Return the tensors of timm's model under the names of EVA-02's own file."""
    swaps = [("mlp.norm", "mlp.ffn_ln"), ("attn.norm", "attn.inner_attn_ln"), ("mlp.fc2", "mlp.w3"),
             ("mlp.fc1_g", "mlp.w1"), ("mlp.fc1_x", "mlp.w2"), ("mlp.fc1", "mlp.w12"), ("q_proj.bias", "q_bias"),
             ("v_proj.bias", "v_bias")]  # fmt: skip
    sines = {f"rope.freqs_{name}": torch.randn(15, 8) for name in ("cos", "sin")}
    return renamed(state, *swaps) | sines | {f"blocks.1.attn.{name}": sines[name] for name in sines}


def perception(state: Tensors) -> Tensors:
    """Return the tensors of timm's model under the names of Perception Encoder's own file, beside a text tower."""
    pooled = [(f"attn_pool.{name}", f"attn_pool.attn.{name}") for name in ("q", "kv", "proj")]
    state = renamed(
        state, *pooled, ("attn_pool.latent", "attn_pool.probe"), ("attn_pool.norm", "attn_pool.layernorm"),
        ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"), ("patch_embed.proj", "conv1"), ("norm_pre", "ln_pre"),
        ("blocks.", "transformer.resblocks."), (".norm1", ".ln_1"), (".norm2", ".ln_2"), ("attn.qkv.", "attn.in_proj_"),
        ("attn.proj", "attn.out_proj"), ("gamma_", "ls_"), ("cls_token", "class_embedding"),
        ("pos_embed", "positional_embedding"),
    )  # fmt: skip
    state = {f"{name}.gamma" if ".ls_" in name else name.replace("norm.", "ln_post.") if name.startswith("norm.")
             else name: tensor for name, tensor in state.items()}  # fmt: skip
    for leaf in ("weight", "bias"):
        if f"attn_pool.attn.q.{leaf}" in state:
            parts = [state.pop(f"attn_pool.attn.{name}.{leaf}") for name in ("q", "kv")]
            state[f"attn_pool.attn.in_proj_{leaf}"] = torch.cat(parts)
    state["positional_embedding"] = state["positional_embedding"][0]
    if "class_embedding" in state:
        state["class_embedding"] = state["class_embedding"].flatten()
    if "attn_pool.probe" in state:
        state["proj"] = torch.randn(state["ln_pre.weight"].shape[0], EMBEDDED)
    whole = {f"visual.{name}": tensor for name, tensor in state.items()}
    return whole | {"transformer.resblocks.0.ln_1.weight": torch.ones(4), "logit_scale": torch.ones(())}


CASES: dict[str, Callable[[Tensors], Tensors]] = {
    "vit_small_patch16_dinov3": dinov3,
    "vit_small_patch16_dinov3_qkvb": dinov3,
    "vit_small_plus_patch16_dinov3_qkvb": dinov3,
    "vit_7b_patch16_dinov3": dinov3,
    "eva02_tiny_patch14_336": eva02,
    "eva02_base_patch14_448": eva02,
    "eva02_large_patch14_clip_336": eva02,
    "vit_pe_core_tiny_patch16_384": perception,
    "vit_pe_core_gigantic_patch14_448": perception,
    "vit_pe_lang_large_patch14_448": perception,
    "vit_pe_spatial_tiny_patch16_512": perception,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, nn.Module, Tensors]]:
    """Return a function that registers a small architecture; it returns its name, timm's model and original tensors."""

    def make(name: str) -> tuple[str, nn.Module, Tensors]:
        small = {"img_size": image_size(name), "embed_dim": 56, "num_heads": HEADS, "depth": DEPTH}
        monkeypatch.setitem(EVA.architectures, f"tiny_{name}", {**EVA.architectures[name], **small})
        is_core = "pe_core" in name
        module = tiny_timm(name, depth=DEPTH, num_classes=EMBEDDED if is_core else 0)
        state = {key: tensor for key, tensor in module.state_dict().items() if not key.startswith("head.")}
        tensors = CASES[name](state)
        module.load_state_dict(checkpoint_filter_fn(dict(tensors), module))  # strict: timm reads these names
        return f"tiny_{name}", module, tensors

    return make


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_timms_and_every_tensor_goes_back(case: str, tiny: Callable, tmp_path: Path) -> None:
    name, module, tensors = tiny(case)
    torch.save(tensors, tmp_path / "original.pth")
    with pytest.raises(AmbiguousCheckpointError, match="rotated") as caught:
        from_checkpoint(tmp_path / "original.pth")
    assert name in caught.value.candidates["architecture"]
    opened = from_checkpoint(tmp_path / "original.pth", architecture=name)
    found = stage_differences(module, opened.model, pixels_for(module))
    blocks = max(value for stage, value in found.items() if stage != "logits")
    assert blocks == 0.0
    assert found["logits"] <= (1e-6 if "pe_core" in case else 0.0)  # timm adds a bias of zeros to the projection

    config = opened.model.config
    ours = {f"vit.{key}": tensor for key, tensor in opened.model.state_dict().items()}
    back = revert(TIMM.rows(config, opened.report.layout), ours, config)
    ignored = {key for key in tensors if "freqs_" in key or (key.startswith(("transformer.", "logit")))}
    assert back.keys() == tensors.keys() - ignored
    assert all(torch.equal(back[key], tensors[key]) for key in back)
    record({"source": f"timm original file, {case}", "logits": found["logits"], "way_back_bit_exact": True,
            "blocks": blocks, "timm": timm.__version__, "torch": torch.__version__})  # fmt: skip


def test_a_tower_without_its_prefix_opens_as_the_whole_model_does(tiny: Callable, tmp_path: Path) -> None:
    name, module, tensors = tiny("vit_pe_core_tiny_patch16_384")
    tower = {key.removeprefix("visual."): one for key, one in tensors.items() if key.startswith("visual.")}
    torch.save({"state_dict": tower}, tmp_path / "tower.pt")
    torch.save(tensors, tmp_path / "whole.pt")
    one, other = (from_checkpoint(tmp_path / f"{kind}.pt", architecture=name).model for kind in ("tower", "whole"))
    pixel_values = pixels_for(module)
    assert difference(one(pixel_values).pooler_output, other(pixel_values).pooler_output) == 0.0
    assert one.config.representation_size == EMBEDDED


def changed(tensors: Tensors, name: str, value: torch.Tensor | None) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name} | ({} if value is None else {name: value})


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("vit_small_patch16_dinov3_qkvb", lambda t: changed(t, "rope_embed.periods", torch.tensor([1.0, 7.0])),
         "periods are not those of rope_theta=100"),
        ("vit_small_patch16_dinov3_qkvb", lambda t: changed(t, "blocks.1.attn.qkv.bias_mask", torch.ones(168)),
         "keys have a bias"),
        ("vit_small_patch16_dinov3", lambda t: changed(t, "blocks.1.attn.qkv.bias", torch.ones(168)), "_qkvb"),
        ("vit_small_patch16_dinov3_qkvb", lambda t: t | {"cls_norm.weight": torch.ones(56)}, "left over: 'cls_norm"),
        ("eva02_base_patch14_448", lambda t: changed(t, "blocks.1.attn.v_bias", None), "missing: 'blocks.1.attn.v_bia"),
        ("vit_pe_core_tiny_patch16_384", lambda t: changed(t, "visual.ln_post.weight", None), "missing: 'visual.ln_po"),
    ],
)  # fmt: skip
def test_what_differs_from_the_source_is_named(
    case: str, change: Callable[[Tensors], Tensors], said: str, tiny: Callable, tmp_path: Path
) -> None:
    name, _, tensors = tiny(case)
    torch.save(change(tensors), tmp_path / "original.pth")
    with pytest.raises(MappingError, match=said):
        from_checkpoint(tmp_path / "original.pth", architecture=name)


def test_masks_and_small_crops_of_dinov3_s_training_are_kept_and_listed(tiny: Callable, tmp_path: Path) -> None:
    name, _, tensors = tiny("vit_small_patch16_dinov3_qkvb")
    torch.save(tensors | {"local_cls_norm.weight": torch.ones(56)}, tmp_path / "original.pth")
    opened = from_checkpoint(tmp_path / "original.pth", architecture=name)
    assert "local_cls_norm.weight" in str(opened.report)
    assert opened.model.config.use_mask_token
    folder = tmp_path / "timm"
    with pytest.raises(ExportError, match="omit the layout"):
        to_checkpoint(opened.model, folder, format="timm", layout="dinov3", drop=["mask_token"])
    to_checkpoint(opened.model, folder, format="timm", drop=["mask_token"])
    again = from_checkpoint(folder).model
    pixel_values = torch.randn(2, 3, *opened.model.config.image_shape)
    assert difference(again(pixel_values).pooler_output, opened.model(pixel_values).pooler_output) == 0.0


def test_a_perception_encoder_never_opens_as_a_clip(tiny: Callable, tmp_path: Path) -> None:
    hints: dict[str, Any] = {"num_attention_heads": HEADS, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
                             "attention_scale": "head_dim**-0.5", "pooling": "cls", "image_size": 48}  # fmt: skip
    for case, make in CASES.items():
        if make is perception:
            _, _, tensors = tiny(case)
            torch.save(tensors, tmp_path / "original.pth")
            for wanted in ({}, hints, {**hints, "format": "open_clip"}, {**hints, "final_norm": "none"}):
                with pytest.raises(PlainViTError) as caught:
                    from_checkpoint(tmp_path / "original.pth", **wanted)
                assert isinstance(caught.value, AmbiguousCheckpointError | UnknownFormatError)
