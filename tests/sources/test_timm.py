"""Live models of timm: equal outputs of every block, all settings read from the module, and exact export."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models import vision_transformer
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.conversion import from_module, to_module
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.errors import ExportError
from tests.conftest import randomize_
from tests.sizes import few
from tests.sources.timm_models import (
    DEEP,
    ENTRYPOINTS,
    EVA_REPRESENTATIVES,
    NAFLEX_VARIANTS,
    RELATIVE_QUICK,
    RELATIVE_SLOW,
    REPRESENTATIVES,
    TOLERANCE,
    VARIANTS,
    image_size,
    layout_of,
    pixels_for,
    rounding,
    same_tensors,
    stage_differences,
    tiny_timm,
    variants,
)
from tests.tiny import VARIATIONS, difference, tiny_config


@variants(VARIANTS, DEEP, *RELATIVE_SLOW)
def test_every_block_and_the_logits_are_timms(name: str, arguments: dict[str, Any]) -> None:
    module = tiny_timm(name, **arguments)
    for dtype in (torch.float32, torch.bfloat16):
        module = module.to(dtype)
        model = from_module(module)
        assert model.dtype == dtype
        found = stage_differences(module, model, pixels_for(module))
        assert max(found.values()) <= rounding(module), found
        assert same_tensors(module, to_module(model, "timm", layout=layout_of(module)))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_384", "vit_base_patch32_224",
                                  "vit_large_patch14_224", "vit_huge_patch14_224"])  # fmt: skip
def test_plain_models_of_full_width_give_equal_logits(name: str) -> None:
    arguments = {"depth": 1, "img_size": image_size(name), "num_classes": 13}
    module = randomize_(timm.create_model(name, **arguments)).eval()
    found = stage_differences(module, from_module(module), pixels_for(module))
    assert max(found.values()) == 0.0, found


# Poolings of each class with settings of its own.
POOLINGS = ["", "token", "avg", "max", "avgmax", "map", "prr"]
POOLED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "vit_small_patch14_reg4_dinov2": (POOLINGS, {}),
    "vit_base_patch16_siglip_gap_224": (POOLINGS, {}),
    "vit_base_patch16_rope_ape_224": (POOLINGS[:-1], {"num_reg_tokens": 2}),
    "beit_base_patch16_224": (POOLINGS[:3], {}),
    "vit_relpos_medium_patch16_cls_224": (POOLINGS[:3], {}),
}
OTHERS = [name for name in REPRESENTATIVES if "_r26_" not in name]  # pooling does not depend on the ResNet


@pytest.mark.slow(quick=[*POOLED])
@pytest.mark.parametrize("name", [*POOLED, *few(OTHERS, 6)])
def test_every_pooling_gives_equal_logits_or_features(name: str) -> None:
    poolings, arguments = POOLED.get(name, (POOLINGS, {}))
    followed = set()
    for pooling in poolings:
        for classes in (0, 7):
            try:
                module = tiny_timm(name, global_pool=pooling, num_classes=classes, depth=2, **arguments)
            except AssertionError:  # timm refuses class token pooling without a class token
                continue
            limit = rounding(module) if name in POOLED or module.num_prefix_tokens else TOLERANCE
            if classes and name not in POOLED:
                module.reset_classifier(5)
                randomize_(module, seed=2)
            model = from_module(module)
            assert isinstance(model, PlainViTForImageClassification if classes else PlainViTModel)
            found = stage_differences(module, model, pixels_for(module))
            assert max(found.values()) <= limit, (pooling, found)
            assert same_tensors(module, to_module(model, "timm"))
            followed.add(pooling)
    assert followed | {"token"} == {*poolings, "token"}


@pytest.mark.parametrize("classes", [0, 5])
def test_a_changed_head_is_followed(classes: int) -> None:
    module = tiny_timm("deit_small_distilled_patch16_224", num_classes=11)
    module.reset_classifier(classes)
    randomize_(module, seed=3)
    model = from_module(module)
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0
    assert model.config.num_labels == classes


RESIZED = [
    ("vit_tiny_patch16_224", {}),
    ("vit_small_patch14_reg4_dinov2", {}),
    *((name, {}) for name in EVA_REPRESENTATIVES[::3]),
    *RELATIVE_QUICK,
    *NAFLEX_VARIANTS,
]


@variants(RESIZED, *RELATIVE_SLOW)
def test_images_of_other_sizes_give_the_logits_of_timms_model_for_them(name: str, arguments: dict[str, Any]) -> None:
    is_relative, is_naflex = "beit" in name or "relpos" in name, "naflex" in name
    flexible = {} if is_relative or is_naflex else {"dynamic_img_size": True}
    patch = ENTRYPOINTS[name]["patch_size"]
    for grid, dtype in (((4, 2), torch.float32), ((7, 9), torch.float32 if is_relative else torch.bfloat16)):
        module = tiny_timm(name, **arguments, **flexible).to(dtype)
        model, size = from_module(module), (grid[0] * patch, grid[1] * patch)
        if is_relative:
            module.set_input_size(size)
        found = stage_differences(module, model, pixels_for(module, size=size))
        assert max(found.values()) <= (TOLERANCE if is_relative else rounding(module)), found
        if not is_naflex:
            fixed = tiny_timm(name, **arguments).to(dtype)
            fixed.set_input_size(size)
            resized = from_module(fixed)
            assert resized.config.image_shape == size
            assert max(stage_differences(fixed, resized, pixels_for(fixed)).values()) <= rounding(fixed)
            assert same_tensors(fixed, to_module(resized, "timm", layout=layout_of(fixed)))


def test_the_dtype_stays_and_gives_equal_logits() -> None:
    module = tiny_timm("vit_dwee_patch16_reg1_gap_256").double()
    model = from_module(module)
    assert model.dtype == torch.float64
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0


def test_timms_attention_without_the_fused_kernel_is_ours_called_eager() -> None:
    module = tiny_timm("vit_tiny_patch16_224")
    for block in module.blocks:
        block.attn.fused_attn = False
    model = from_module(module)
    model.set_attn_implementation("eager")
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= TOLERANCE, found  # timm scales queries, eager attention scores


# Training

RATES = {"drop_rate": 0.11, "proj_drop_rate": 0.14, "attn_drop_rate": 0.15, "drop_path_rate": 0.16}
AFTER_POSITIONS = {"pos_drop_rate": 0.12}
OF_PATCHES = {**AFTER_POSITIONS, "patch_drop_rate": 0.13}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("vit_small_patch14_reg4_dinov2", OF_PATCHES),
        ("vit_small_plus_patch16_dinov3", OF_PATCHES),
        ("eva02_tiny_patch14_224", OF_PATCHES),
        ("eva_giant_patch14_224", OF_PATCHES),
        ("beit_base_patch16_224", AFTER_POSITIONS),
        ("vit_relpos_small_patch16_224", {}),
        ("vit_relpos_small_patch16_rpn_224", {}),
        ("naflexvit_base_patch16_gap", OF_PATCHES),
    ],
)
def test_training_settings_are_read_off_the_module_and_given_back(name: str, others: dict[str, float]) -> None:
    module = tiny_timm(name, **RATES, **others).train()
    model = from_module(module)
    assert model.training
    config = model.config
    assert config.classifier_dropout_prob == 0.11
    assert config.embedding_dropout_prob == others.get("pos_drop_rate", 0.0)
    assert config.patch_dropout_prob == others.get("patch_drop_rate", 0.0)
    assert config.hidden_dropout_prob == 0.14
    assert config.attention_probs_dropout_prob == 0.15
    assert config.drop_path_rate == pytest.approx(0.16)
    assert [layer.drop_path.rate for layer in model.vit.layers] == pytest.approx([0, 0.08, 0.16])
    again = to_module(model, "timm", layout=layout_of(module))
    assert again.training
    assert repr(again) == repr(module)


def test_a_dropout_of_positions_that_are_not_there_is_never_reached() -> None:
    module = tiny_timm("vit_tiny_patch16_224", pos_embed="none", pos_drop_rate=0.9).train()
    model = from_module(module)
    assert model.config.embedding_dropout_prob == 0.0
    pixel_values = pixels_for(module)
    assert difference(model(pixel_values).logits, module(pixel_values)) <= TOLERANCE


@variants(
    [("vit_small_patch14_reg4_dinov2", {}), *((name, {}) for name in EVA_REPRESENTATIVES), *RELATIVE_QUICK],
    *RELATIVE_SLOW,
)
def test_the_gradients_are_timms(name: str, arguments: dict[str, Any]) -> None:
    module = tiny_timm(name, **arguments)
    model, layout = from_module(module), layout_of(module)
    labels, pixel_values = torch.tensor([3, 8]), pixels_for(module)
    nn.functional.cross_entropy(module(pixel_values), labels).backward()
    model(pixel_values, labels=labels).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    ours = to_module(model, "timm", layout=layout).state_dict()  # maps the gradients to timm's names and shapes
    theirs = dict(module.named_parameters())
    assert ours.keys() == theirs.keys()
    negligible = 1e-7 if isinstance(module, Beit | VisionTransformerRelPos) else 1e-12
    for key, parameter in theirs.items():
        if parameter.grad.abs().max() > negligible:  # biases of all keys or scores have no effect
            assert difference(ours[key], parameter.grad) <= TOLERANCE, key


# Settings read from a module


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
    module.reset_classifier(5)  # the class names belonged to other classes
    assert from_module(module).config.id2label[4] == "LABEL_4"


def _scale_queries(module: Any) -> None:
    for block in module.blocks:
        block.attn.scale = 0.1


def _give_keys_a_bias(module: Any) -> None:
    module.blocks[1].attn.k_bias[2] = 0.5


def _change_the_index(module: Any) -> None:
    module.blocks[1].attn.relative_position_index[2, 3] += 1


def _set(path: str, name: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets an attribute of a module inside a model."""
    return lambda module: setattr(module.get_submodule(path), name, value)


TINY, EVA02, BEIT = "vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (TINY, _set("blocks.1.norm2", "eps", 1e-3), "blocks.1.norm2.eps is 0.001, not 1e-06"),
        (TINY, _set("blocks.2.mlp", "act", nn.ELU()), "blocks.2.mlp.act.class is torch.*activation.ELU, not gelu"),
        (TINY, _set("blocks.0.attn", "gate", nn.Linear(56, 56)), "blocks.0.attn.gate.weight"),
        (TINY, _scale_queries, "blocks.0.attn.scale is 0.1"),
        (TINY, _set("patch_embed", "dynamic_img_pad", True), "dynamic_img_pad=True, which fills images up to whole pa"),
        (TINY, lambda module: nn.utils.parametrizations.weight_norm(module.blocks[0].attn.proj), "blocks.0.attn.proj"),
        (TINY, _set("", "fc_norm", nn.LayerNorm(56)), "norm.class is layernorm, not torch.nn.modules.linear.Identity"),
        (TINY, _set("patch_embed.proj", "stride", (8, 8)), r"patch_embed.proj.stride is \(8, 8\), not \(16, 16\)"),
        (EVA02, lambda module: module.to(torch.bfloat16).float(),
         "rope.pos_embed has not the values.*init_non_persistent_buffers"),
        (EVA02, _set("rope", "bands", torch.tensor([1.0, 3.0])), "rope.bands has not the values"),
        (EVA02, _give_keys_a_bias, "blocks.1.attn.k_bias has not the values"),
        (EVA02, _set("rope", "temperature", 50.0), "rope.bands has not the values"),
        (EVA02, _set("blocks.0.attn", "gate", nn.Linear(56, 56)), "blocks.0.attn.gate"),
        (EVA02, _set("blocks.1.norm2", "eps", 1e-3), "blocks.1.norm2.eps is 0.001, not 1e-06"),
        (BEIT, _change_the_index,
         "blocks.1.attn.relative_position_index has not the values.*init_non_persistent_buffers"),
        (BEIT, _give_keys_a_bias, "blocks.1.attn.k_bias has not the values"),
        (BEIT, _set("blocks.2.attn", "relative_position_bias_table", None),
         "blocks.2.attn.relative_position_bias_table"),
        (BEIT, _set("blocks.1.norm2", "eps", 1e-3), "blocks.1.norm2.eps is 0.001, not 1e-06"),
        (BEIT, lambda module: module.prune_intermediate_layers(1, prune_norm=True), "norm"),
    ],
)  # fmt: skip
def test_a_part_that_plain_vit_does_not_know_is_named(name: str, change: Callable[[Any], Any], named: str) -> None:
    module = tiny_timm(name)
    change(module)
    with pytest.raises(ExportError, match=named):
        from_module(module)


RELPOS, NAFLEX = "vit_relpos_small_patch16_224", "naflexvit_base_patch16_gap"


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        (BEIT, {"use_shared_rel_pos_bias": True}, "two biases"),
        (RELPOS, {"rel_pos_type": "mlp_swin"}, "rel_pos_type='mlp_swin': expected one of"),
        (RELPOS, {"act_layer": nn.Mish}, "act_layer"),
        (RELPOS, {"norm_layer": nn.BatchNorm1d}, "norm_layer"),
        (NAFLEX, {"rope_type": "axial"}, "rope_type='axial'|blocks.0 is a"),
        (NAFLEX, {"swiglu_mlp": True}, "blocks.0 is a"),
        (NAFLEX, {"dynamic_img_pad": True}, "dynamic_img_pad=True"),
        (NAFLEX, {"patchify_channels_last": False}, "patchify_channels_last=False"),
        (NAFLEX, {"enable_patch_interpolator": True}, "enable_patch_interpolator=True"),
        (NAFLEX, {"pos_embed_use_grid_sample": True}, "pos_embed_use_grid_sample=True"),
        (NAFLEX, {"pos_embed_interp_mode": "bilinear", "pos_embed_align_corners": True}, "with pos_embed_antialias=Tr"),
        (NAFLEX, {"norm_layer": nn.BatchNorm1d}, "norm_layer"),
        (NAFLEX, {"attn_layer": "diff"}, "attn"),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_refused_with_the_reason(name: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        from_module(tiny_timm(name, **arguments))


class Derived(vision_transformer.VisionTransformer):
    """A subclass with its own forward pass, as users write it."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x, *args, **kwargs) * 2


SMALL: dict[str, Any] = {"img_size": 32, "embed_dim": 56, "num_heads": 7, "depth": 1}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Derived(**SMALL), "Derived"),
        (lambda: type("Derived", (Eva,), {})(**SMALL), "Derived"),
        (lambda: type("Derived", (Beit,), {})(**SMALL), "Derived"),
        (lambda: type("Derived", (VisionTransformerRelPos,), {})(**SMALL), "Derived"),
        (lambda: type("Derived", (NaFlexVit,), {})(NaFlexVitCfg(embed_dim=56, num_heads=7, depth=1)), "Derived"),
        (lambda: timm.create_model("tnt_s_legacy_patch16_224", depth=1), "TNT"),
        (lambda: timm.create_model("vit_base_mci_224", depth=1), "patch_embed"),
    ],
    ids=["derived", "of Eva", "of Beit", "of RelPos", "of NaFlex", "another model", "hybrid"],
)
def test_other_models_of_timm_are_refused_by_name(make: Callable[[], nn.Module], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        from_module(make())


# Export


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"head_dim": 12}, "heads of 12"),
        ({"attention_scale": 0.2}, "attention_scale"),
        ({"use_mask_token": True}, "use_mask_token"),
        ({"num_register_tokens": 2, "register_tokens_last": True}, "register_tokens_last"),
        ({"patch_projection": "linear", "patch_pre_norm": True}, "patch_pre_norm"),
        ({"patch_bias": False}, "patch_bias"),
        ({"embedding_norm": True}, "patch_bias=True"),
        ({"position_embedding_type": "sincos_2d", "position_embedding_on_prefix": False}, "sincos_2d"),
        ({"qk_norm": "rms_per_head"}, "qk_norm"),
        ({"attention_output_projection": False}, "attention_output_projection"),
        ({"mlp_bias": False}, "attention_output_bias"),
        ({"block_type": "parallel", "mlp_type": "swiglu"}, "mlp_type"),
        ({"block_type": "parallel", "attention_type": "differential"}, "attention_output_bias"),
        ({"block_type": "parallel", "hidden_dropout_prob": 0.1}, "proj_drop_rate"),
        ({"block_type": "post_norm", "layer_scale_init_value": 0.1}, "layer_scale_init_value"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"final_norm": "both", "block_type": "branches"}, "final_norm"),
        ({"representation_size": 30}, "representation_size"),
        ({"use_distillation_token": True, "num_register_tokens": 2}, "a distillation token with registers"),
        ({"rope_parameters": {"rope_type": "axial", "frequencies": "period"}}, "rope_parameters.frequencies"),
        ({"rope_parameters": {"rope_type": "mixed", "offset": 1.0}}, "rope_parameters.offset"),
        ({"rope_parameters": {"rope_type": "axial"}, "hidden_act": "relu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "axial"}, "position_resampling": "bilinear"}, "position_resampling"),
        ({"key_bias": False, "mlp_bias": False}, "mlp_bias"),
        ({"relative_position_bias": {"type": "mlp"}, "position_embedding_type": "learned"}, "position_embedding_type"),
        (
            {"relative_position_bias": {"type": "mlp"}, "num_register_tokens": 2, "position_embedding_type": "none"},
            "register",
        ),
        ({"relative_position_bias": {"type": "table"}, "key_bias": False, "mlp_bias": False}, "mlp_bias"),
    ],
    ids=str,
)
def test_what_no_class_of_timm_expresses_is_refused_by_the_nearest(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ExportError, match=part):
        TIMM.build_module(tiny_config(**fields), None)


EXPRESSIBLE = ["plain", "deit", "registers", "post_norm", "branches", "rms", "differential", "inner_norms", "swiglu",
               "swiglu_packed", "mean", "max", "mean_max", "map", "no_pooling", "no_positions"]  # fmt: skip
RELATIVE_TABLE = {"relative_position_bias": {"type": "table"}, "position_embedding_type": "none"}
EVA_LAYOUTS = (None, "eva", "eva_separate")
SEPARATE = (None, "eva_separate")  # fewer keys than queries


@pytest.mark.parametrize(
    ("fields", "kind", "layouts"),
    [
        *((VARIATIONS[name], VisionTransformer, (None,)) for name in EXPRESSIBLE),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0, "axes": "xy", "offset": 1.0}}, Eva,
         EVA_LAYOUTS),
        ({"rope_parameters": {"rope_type": "mixed", "dtype": "weights"}, "num_register_tokens": 2}, Eva, EVA_LAYOUTS),
        ({"key_bias": False, "final_norm": "both"}, Eva, EVA_LAYOUTS),
        ({"num_key_value_heads": (5, 1, 1), "layer_scale_init_value": 0.3, "scale_mlp_branch": False}, Eva, SEPARATE),
        ({"num_key_value_heads": 1, "qkv_bias": False, "rope_parameters": {"rope_type": "axial"}}, Eva, SEPARATE),
        ({"pooling": "map", "pool_prefix_tokens": True, "pooling_num_attention_heads": 2,
          "pooling_intermediate_size": 9}, Eva, EVA_LAYOUTS),
        ({"relative_position_bias": {"type": "table"}, "key_bias": False}, Beit, (None,)),
        ({**RELATIVE_TABLE, "key_bias": False}, Beit, (None,)),
        (RELATIVE_TABLE, VisionTransformerRelPos, (None,)),
        ({**RELATIVE_TABLE, "relative_position_bias": {"type": "mlp", "shared": True}},
         VisionTransformerRelPos, (None,)),
    ],
    ids=str,
)  # fmt: skip
def test_our_own_models_become_timms_and_come_back(
    fields: dict[str, Any], kind: type, layouts: tuple[str | None, ...]
) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(**fields))).eval()
    if layouts == SEPARATE:
        with pytest.raises(ExportError, match="use layout 'eva_separate'"):
            to_module(model, "timm", layout="eva")
    for layout in layouts:
        module = to_module(model, "timm", layout=layout)
        assert isinstance(module, kind)
        assert same_tensors(from_module(module), model)
        assert max(stage_differences(module, model, pixels_for(module)).values()) <= TOLERANCE


def test_a_model_that_keeps_the_aspect_ratio_of_positions_goes_to_no_other_class_of_timm() -> None:
    model = from_module(tiny_timm("naflexvit_base_patch16_par_gap"))
    assert type(to_module(model, "timm")) is NaFlexVit
    model.config.position_resampling = "bilinear_align_corners"
    model.config.qk_norm = "rms_per_head"
    with pytest.raises(ExportError, match="timm's NaFlexVit cannot represent this model"):
        to_module(model, "timm")


def test_dense_patches_become_a_convolution() -> None:
    config = tiny_config(patch_projection="linear", qkv_bias=False)
    model = randomize_(PlainViTForImageClassification(config)).eval()
    module = to_module(model, "timm")
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= TOLERANCE, found  # a convolution sums pixels in a different order


def test_a_head_count_other_than_timms_usual_width_is_read_off_the_module() -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_heads=4)
    assert from_module(module).config.num_attention_heads == 4


@pytest.mark.parametrize("width", [29, 56, 96, 173, 1152, 1664])
def test_every_width_of_the_mlp_survives_timms_ratio(width: int) -> None:
    from plain_vit.conversion.tables.infer import ratio_of

    assert all(int(width * ratio_of(inner, width)) == inner for inner in range(1, 6 * width))


def test_a_model_of_timm_can_be_described_by_our_config_alone() -> None:
    module = tiny_timm("aimv2_large_patch14_224")
    described = PlainViTConfig.from_dict(json.loads(from_module(module).config.to_json_string()))
    assert repr(TIMM.build_module(described, None)) == repr(to_module(from_module(module), "timm"))
