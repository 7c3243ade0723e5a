"""Live models of timm: the same numbers in every block, everything read off the module, and every bit back."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models import vision_transformer
from torch import nn

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.conversion import from_module, to_module
from plain_vit.conversion.timm.source import TIMM
from plain_vit.errors import ExportError
from tests.conftest import randomize_
from tests.sources.timm_models import (
    REPRESENTATIVES,
    TOLERANCE,
    image_size,
    pixels_for,
    same_tensors,
    stage_differences,
    tiny_timm,
    tolerance,
)
from tests.tiny import VARIATIONS, difference, tiny_config

POOLINGS = ["", "token", "avg", "max", "avgmax", "map", "prr"]


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_every_block_and_the_logits_are_timms(name: str) -> None:
    module = tiny_timm(name)
    model = from_module(module)
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= tolerance(name), found
    assert same_tensors(module, to_module(model, "timm"))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_384", "vit_base_patch32_224",
                                  "vit_large_patch14_224", "vit_huge_patch14_224"])  # fmt: skip
def test_plain_models_of_full_width_give_equal_logits(name: str) -> None:
    arguments = {"depth": 1, "img_size": image_size(name), "num_classes": 13}
    module = randomize_(timm.create_model(name, **arguments)).eval()
    found = stage_differences(module, from_module(module), pixels_for(module))
    assert max(found.values()) == 0.0, found


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_gap_224"])
@pytest.mark.parametrize("classes", [0, 7])
def test_every_pooling_gives_equal_logits_or_features(name: str, pooling: str, classes: int) -> None:
    if pooling == "token" and "siglip" in name:
        pytest.skip("timm itself refuses to read a class token that is not there")
    module = tiny_timm(name, global_pool=pooling, num_classes=classes)
    model = from_module(module)
    assert isinstance(model, PlainViTForImageClassification if classes else PlainViTModel)
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) == 0.0, found
    assert same_tensors(module, to_module(model, "timm"))


@pytest.mark.parametrize("classes", [0, 5])
def test_a_changed_head_is_followed(classes: int) -> None:
    module = tiny_timm("deit_small_distilled_patch16_224", num_classes=11)
    module.reset_classifier(classes)
    randomize_(module, seed=3)
    model = from_module(module)
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0
    assert model.config.num_labels == classes


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_images_of_other_sizes_give_the_logits_of_timms_dynamic_size(name: str) -> None:
    module = tiny_timm(name, dynamic_img_size=True)
    patch, _ = module.patch_embed.patch_size
    pixel_values = pixels_for(module, size=(4 * patch, 2 * patch))
    found = stage_differences(module, from_module(module), pixel_values)
    assert max(found.values()) == 0.0, found


def test_a_module_set_to_another_size_keeps_its_resampled_positions() -> None:
    module = tiny_timm("vit_tiny_patch16_224")
    module.set_input_size((80, 32))
    model = from_module(module)
    assert model.config.image_size == (80, 32)
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_dwee_patch16_reg1_gap_256"])
def test_the_dtype_stays_and_gives_equal_logits(name: str, dtype: torch.dtype) -> None:
    module = tiny_timm(name).to(dtype)
    model = from_module(module)
    assert model.dtype == dtype
    assert max(stage_differences(module, model, pixels_for(module).to(dtype)).values()) == 0.0


def test_timms_attention_without_the_fused_kernel_is_ours_called_eager() -> None:
    module = tiny_timm("vit_tiny_patch16_224")
    for block in module.blocks:
        block.attn.fused_attn = False
    model = from_module(module)
    model.set_attn_implementation("eager")
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= TOLERANCE, found  # timm scales the queries, eager attention the scores


def test_training_settings_are_read_off_the_module_and_given_back() -> None:
    rates = {
        "drop_rate": 0.11, "pos_drop_rate": 0.12, "patch_drop_rate": 0.13, "proj_drop_rate": 0.14,
        "attn_drop_rate": 0.15, "drop_path_rate": 0.16,
    }  # fmt: skip
    module = tiny_timm("vit_small_patch14_reg4_dinov2", **rates).train()
    model = from_module(module)
    assert model.training
    config = model.config
    assert config.classifier_dropout_prob == 0.11
    assert config.embedding_dropout_prob == 0.12
    assert config.patch_dropout_prob == 0.13
    assert config.hidden_dropout_prob == 0.14
    assert config.attention_probs_dropout_prob == 0.15
    assert config.drop_path_rate == pytest.approx(0.16)
    assert [layer.drop_path.rate for layer in model.vit.layers] == pytest.approx([0, 0.08, 0.16])
    again = to_module(model, "timm")
    assert again.training
    assert repr(again) == repr(module)


def test_a_dropout_of_positions_that_are_not_there_is_never_reached() -> None:
    module = tiny_timm("vit_tiny_patch16_224", pos_embed="none", pos_drop_rate=0.9).train()
    model = from_module(module)
    assert model.config.embedding_dropout_prob == 0.0
    pixel_values = pixels_for(module)
    assert difference(model(pixel_values).logits, module(pixel_values)) <= TOLERANCE


def test_the_gradient_of_the_loss_is_timms() -> None:
    module = tiny_timm("vit_small_patch14_reg4_dinov2")
    model = from_module(module)
    labels = torch.tensor([3, 8])
    pixel_values = pixels_for(module)
    nn.functional.cross_entropy(module(pixel_values), labels).backward()
    loss = model(pixel_values, labels=labels).loss
    loss.backward()
    ours, theirs = model.vit.embeddings, module
    pairs = [
        (ours.cls_token, theirs.cls_token),
        (ours.register_tokens, theirs.reg_token),
        (ours.patch_embeddings.projection.weight, theirs.patch_embed.proj.weight),
        (model.vit.layers[1].mlp.fc1.weight, theirs.blocks[1].mlp.fc1.weight),
        (model.classifier.weight, theirs.head.weight),
    ]
    for one, other in pairs:
        assert difference(one.grad, other.grad) <= TOLERANCE  # q, k and v are one product in timm, three here


def test_nothing_is_shared_with_the_source() -> None:
    module = tiny_timm("vit_tiny_patch16_224")
    model = from_module(module)
    before = model.classifier.bias.clone()
    nn.init.zeros_(module.head.bias)
    assert torch.equal(model.classifier.bias, before)


def test_names_of_labels_that_timm_carries_are_kept() -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_classes=3)
    module.pretrained_cfg = {**module.pretrained_cfg, "num_classes": 3, "label_names": ["ant", "bee", "cat"]}
    assert from_module(module).config.id2label == {0: "ant", 1: "bee", 2: "cat"}
    module.reset_classifier(5)  # other classes than those that had names
    assert from_module(module).config.id2label[4] == "LABEL_4"


def _set_epsilon(module: Any) -> None:
    module.blocks[1].norm2.eps = 1e-3


def _replace_activation(module: Any) -> None:
    module.blocks[2].mlp.act = nn.ELU()


def _gate_attention(module: Any) -> None:
    module.blocks[0].attn.gate = nn.Linear(56, 56)


def _scale_queries(module: Any) -> None:
    for block in module.blocks:
        block.attn.scale = 0.1


def _pad_images(module: Any) -> None:
    module.patch_embed.dynamic_img_pad = True


def _wrap_a_layer(module: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(module.blocks[0].attn.proj)


def _read_both_norms(module: Any) -> None:
    module.fc_norm = type(module.norm)(56)


def _overlap_patches(module: Any) -> None:
    module.patch_embed.proj.stride = (8, 8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set_epsilon, "blocks.1.norm2.eps is 0.001, not 1e-06"),
        (_replace_activation, "blocks.2.mlp.act.class is torch.nn.modules.activation.ELU, not gelu"),
        (_gate_attention, "blocks.0.attn.gate.weight"),
        (_scale_queries, "blocks.0.attn.scale is 0.1"),
        (_pad_images, "dynamic_img_pad=True, which fills images up to whole patches"),
        (_wrap_a_layer, "blocks.0.attn.proj"),
        (_read_both_norms, "norm.class is layernorm, not torch.nn.modules.linear.Identity"),
        (_overlap_patches, "patch_embed.proj.stride is (8, 8), not (16, 16)"),
    ],
)
def test_a_part_that_plain_vit_does_not_know_is_named(change: Callable[[Any], None], named: str) -> None:
    module = tiny_timm("vit_tiny_patch16_224")
    change(module)
    with pytest.raises(ExportError) as caught:
        from_module(module)
    assert named in str(caught.value)


class Derived(vision_transformer.VisionTransformer):
    """A forward pass of its own, as people write it."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x, *args, **kwargs) * 2


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Derived(img_size=32, embed_dim=56, num_heads=7, depth=1), "Derived"),
        (timm.create_model("tnt_s_legacy_patch16_224", depth=1), "TNT"),
        (timm.create_model("vit_base_mci_224", depth=1), "patch_embed"),
    ],
    ids=["derived", "another model", "hybrid"],
)
def test_other_models_of_timm_are_refused_by_name(module: nn.Module, named: str) -> None:
    with pytest.raises(ExportError, match=named):
        from_module(module)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 12},
        {"attention_scale": 0.2},
        {"use_mask_token": True},
        {"num_register_tokens": 2, "register_tokens_last": True},
        {"patch_projection": "linear", "patch_pre_norm": True},
        {"patch_bias": False},
        {"embedding_norm": True},
        {"position_embedding_type": "sincos_2d", "position_embedding_on_prefix": False},
        {"qk_norm": "rms_per_head"},
        {"attention_output_projection": False},
        {"mlp_bias": False},
        {"block_type": "parallel", "mlp_type": "swiglu"},
        {"block_type": "parallel", "attention_type": "differential"},
        {"block_type": "parallel", "hidden_dropout_prob": 0.1},
        {"block_type": "post_norm", "layer_scale_init_value": 0.1},
        {"hidden_act": "mish"},
        {"final_norm": "both", "block_type": "branches"},
        {"representation_size": 30},
        {"use_distillation_token": True, "num_register_tokens": 2},
    ],
    ids=str,
)
def test_what_timm_cannot_express_is_refused(change: dict[str, object]) -> None:
    config = tiny_config(**change)
    with pytest.raises(ExportError):
        TIMM.build_module(config, None)


EXPRESSIBLE = ["plain", "deit", "registers", "post_norm", "branches", "rms", "differential", "inner_norms", "swiglu",
               "swiglu_packed", "mean", "max", "mean_max", "map", "no_pooling", "no_positions"]  # fmt: skip


@pytest.mark.parametrize("variation", EXPRESSIBLE)
def test_our_own_models_become_timms_and_come_back(variation: str) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(**VARIATIONS[variation]))).eval()
    module = to_module(model, "timm")
    again = from_module(module)
    assert {name: tensor.tolist() for name, tensor in again.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
    pixel_values = pixels_for(module)
    found = stage_differences(module, model, pixel_values)
    assert max(found.values()) <= TOLERANCE, found


def test_dense_patches_become_a_convolution() -> None:
    config = tiny_config(patch_projection="linear", qkv_bias=False)
    model = randomize_(PlainViTForImageClassification(config)).eval()
    module = to_module(model, "timm")
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= TOLERANCE, found  # a convolution sums its pixels in another order


def test_a_head_count_other_than_timms_usual_width_is_read_off_the_module() -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_heads=4)
    assert from_module(module).config.num_attention_heads == 4


@pytest.mark.parametrize("width", [29, 56, 96, 173, 1152, 1664])
def test_every_width_of_the_mlp_survives_timms_ratio(width: int) -> None:
    from plain_vit.conversion.timm.arguments import ratio_of

    assert all(int(width * ratio_of(inner, width)) == inner for inner in range(1, 6 * width))


def test_a_model_of_timm_can_be_described_by_our_config_alone() -> None:
    module = tiny_timm("aimv2_large_patch14_224")
    described = PlainViTConfig.from_dict(json.loads(from_module(module).config.to_json_string()))
    assert repr(TIMM.build_module(described, None)) == repr(to_module(from_module(module), "timm"))
