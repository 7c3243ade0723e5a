"""timm's Eva: live modules, folders and bare files with the same numbers, and every bit back."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from timm.models import save_for_hf
from timm.models.eva import Eva
from torch import nn

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.format import Hints
from plain_vit.conversion.timm.architectures import ARCHITECTURES as PLAIN
from plain_vit.conversion.timm.eva.architectures import ARCHITECTURES
from plain_vit.conversion.timm.eva.source import EVA
from plain_vit.conversion.timm.source import TIMM
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    UnknownFormatError,
)
from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.timm_models import (
    EVA_REPRESENTATIVES,
    TOLERANCE,
    pixels_for,
    same_tensors,
    stage_differences,
    tiny_timm,
)
from tests.tiny import difference, tiny_config

# Live modules


@pytest.mark.parametrize("name", EVA_REPRESENTATIVES)
def test_every_block_and_the_logits_are_timms(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = tiny_timm(name).to(dtype)
        model = from_module(module)
        assert max(stage_differences(module, model, pixels_for(module).to(dtype)).values()) == 0.0
        assert same_tensors(module, to_module(model, "timm"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVA_REPRESENTATIVES[::3])
def test_images_of_other_sizes_give_timms_logits(name: str, dtype: torch.dtype) -> None:
    module = tiny_timm(name, dynamic_img_size=True).to(dtype)
    height, width = module.patch_embed.patch_size
    pixel_values = pixels_for(module, size=(4 * height, 2 * width)).to(dtype)
    assert max(stage_differences(module, from_module(module), pixel_values).values()) == 0.0
    fixed = tiny_timm(name, dynamic_img_size=False).to(dtype)
    fixed.set_input_size((4 * height, 2 * width))
    model = from_module(fixed)
    assert model.config.image_shape == (4 * height, 2 * width)
    assert max(stage_differences(fixed, model, pixel_values).values()) == 0.0
    assert same_tensors(fixed, to_module(model, "timm"))


@pytest.mark.parametrize("pooling", ["", "token", "avg", "max", "avgmax", "map"])
def test_every_pooling_gives_equal_logits_or_features(pooling: str) -> None:
    for classes in (0, 7):
        module = tiny_timm("vit_base_patch16_rope_ape_224", global_pool=pooling, num_classes=classes, num_reg_tokens=2)
        model = from_module(module)
        assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0
        assert same_tensors(module, to_module(model, "timm"))


@pytest.mark.parametrize("name", EVA_REPRESENTATIVES)
def test_the_gradients_are_timms(name: str) -> None:
    module = tiny_timm(name)
    model = from_module(module)
    labels, pixel_values = torch.tensor([3, 8]), pixels_for(module)
    nn.functional.cross_entropy(module(pixel_values), labels).backward()
    model(pixel_values, labels=labels).loss.backward()
    grown = to_module(model, "timm")  # gives the gradients their names and shapes
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    for one, (parameter, other) in zip(
        to_module(model, "timm").state_dict().values(), zip(module.parameters(), grown.parameters(), strict=True),
        strict=True,
    ):  # fmt: skip
        assert parameter.shape == other.shape
        if parameter.grad.abs().max() > 1e-12:  # as that of a key's bias, which softmax ignores
            assert difference(one, parameter.grad) <= TOLERANCE


@pytest.mark.parametrize("kind", ["cat", "dinov3", "mixed"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_coordinates_are_augmented_by_timms_draws_in_training(kind: str, dynamic: bool) -> None:
    name = {"cat": "vit_base_patch16_rope_224", "mixed": "vit_base_patch16_rope_mixed_224"}.get(
        kind, "vit_small_patch16_dinov3"
    )
    module = tiny_timm(
        name, rope_shift_coords=0.4, rope_jitter_coords=1.7, rope_rescale_coords=2.0, dynamic_img_size=dynamic
    ).train()
    model = from_module(module)
    assert model.training
    assert same_tensors(module, to_module(model, "timm"))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        theirs = module(pixels_for(module))
        torch.manual_seed(seed)
        ours = model(pixels_for(module)).logits
        assert difference(ours, theirs) <= TOLERANCE  # training has another attention kernel
        found.append(ours)
    assert difference(*found) > 1e-3


def test_training_settings_are_read_off_the_module_and_given_back() -> None:
    rates = {"drop_rate": 0.11, "pos_drop_rate": 0.12, "patch_drop_rate": 0.13, "proj_drop_rate": 0.14,
             "attn_drop_rate": 0.15, "drop_path_rate": 0.16}  # fmt: skip
    for name in ("vit_small_plus_patch16_dinov3", "eva02_tiny_patch14_224", "eva_giant_patch14_224"):
        module = tiny_timm(name, **rates).train()
        again = to_module(from_module(module), "timm")
        assert again.training
        assert repr(again) == repr(module)


def test_patches_that_are_dropped_lose_their_rotation_too() -> None:
    for name in ("vit_base_patch16_rope_224", "vit_base_patch16_rope_mixed_224"):
        module = tiny_timm(name, patch_drop_rate=0.5).train()
        model, pixels = from_module(module), pixels_for(module)
        torch.manual_seed(3)
        with mock.patch.object(torch, "randn", torch.rand):  # ours are drawn evenly, which chooses the same way
            theirs = module(pixels)
        torch.manual_seed(3)
        assert difference(model(pixels).logits, theirs) <= TOLERANCE


def _cast_there_and_back(module: Any) -> None:
    module.to(torch.bfloat16).float()


def _change_a_band(module: Any) -> None:
    module.rope.bands[1] = 3.0


def _give_keys_a_bias(module: Any) -> None:
    module.blocks[1].attn.k_bias[2] = 0.5


def _change_a_temperature(module: Any) -> None:
    module.rope.temperature = 50.0


def _gate_attention(module: Any) -> None:
    module.blocks[0].attn.gate = nn.Linear(56, 56)


def _set_epsilon(module: Any) -> None:
    module.blocks[1].norm2.eps = 1e-3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_cast_there_and_back, r"rope.pos_embed has not the values.*init_non_persistent_buffers"),
        (_change_a_band, r"rope.bands has not the values"),
        (_give_keys_a_bias, r"blocks.1.attn.k_bias is not zero"),
        (_change_a_temperature, r"rope.bands has not the values"),
        (_gate_attention, r"blocks.0.attn.gate"),
        (_set_epsilon, r"blocks.1.norm2.eps is 0.001, not 1e-06"),
    ],
)
def test_what_no_argument_says_is_named(change: Callable[[Any], None], named: str) -> None:
    module = tiny_timm("eva02_tiny_patch14_224")
    change(module)
    with pytest.raises(ExportError, match=named):
        from_module(module)


def test_a_cast_model_of_one_size_opens_with_rounded_sines_and_one_of_any_size_without() -> None:
    for dynamic, kept in ((False, "weights"), (True, "float32")):
        module = tiny_timm("eva02_tiny_patch14_224", dynamic_img_size=dynamic)
        assert from_module(module.to(torch.bfloat16)).config.rotary_dtype == kept


class Derived(Eva):
    """A forward pass of its own, as people write it."""


def test_a_derived_class_is_refused() -> None:
    with pytest.raises(ExportError, match="Derived"):
        from_module(Derived(img_size=32, embed_dim=56, num_heads=7, depth=1))


# Drawn at random


def drawn(seed: int) -> dict[str, Any]:
    """Draw arguments of timm's Eva; not all of them fit together."""
    draw = random.Random(seed)
    rotary, heads = draw.random() < 0.7, draw.choice([2, 3])
    return {
        "img_size": draw.choice([(24, 40), (32, 16)]), "patch_size": 8, "embed_dim": heads * draw.choice([8, 12]),
        "num_heads": heads, "depth": draw.choice([1, 3]), "mlp_ratio": draw.choice([1, 2.7, 4]), "num_classes": 5,
        "global_pool": draw.choice(["", "avg", "avgmax", "max", "token", "map"]),
        "qkv_bias": draw.random() < 0.7, "qkv_fused": draw.random() < 0.7, "qk_norm": draw.random() < 0.2,
        "swiglu_mlp": draw.random() < 0.4, "swiglu_align_to": draw.choice([0, 0, 8]),
        "scale_mlp": draw.random() < 0.2, "scale_attn_inner": draw.random() < 0.2,
        "attn_type": draw.choice(["eva", "rope"]), "init_values": draw.choice([None, 0.1]),
        "class_token": draw.random() < 0.8, "num_reg_tokens": draw.choice([0, 0, 2]),
        "no_embed_class": draw.random() < 0.3, "use_abs_pos_emb": draw.random() < 0.6, "use_rot_pos_emb": rotary,
        "rope_type": draw.choice(["cat", "cat", "dinov3", "mixed"]), "rope_grid_offset": draw.choice([0.0, 1.0, -0.3]),
        "rope_grid_indexing": draw.choice(["ij", "xy"]), "rope_temperature": draw.choice([10.0, 100, 1e4]),
        "rope_rotate_half": draw.random() < 0.3, "ref_feat_shape": draw.choice([None, 4, (5, 3)]),
        "use_post_norm": draw.random() < 0.2, "use_pre_transformer_norm": draw.random() < 0.3,
        "use_post_transformer_norm": draw.choice([None, None, True, False]),
        "use_fc_norm": draw.choice([None, None, True, False]), "attn_pool_num_heads": draw.choice([None, None, 1]),
        "attn_pool_mlp_ratio": draw.choice([None, None, 3]), "dynamic_img_size": draw.random() < 0.4,
        "attn_only_layer_scale": draw.random() < 0.2, "num_kv_heads": draw.choice([None, None, None, 1, heads]),
    }  # fmt: skip


@pytest.mark.slow
def test_random_models_open_with_equal_numbers_and_go_back() -> None:
    opened, count = 0, draws(40, nightly=400)
    for seed in range(count):
        try:
            module: Any = randomize_(Eva(**drawn(seed)), seed).eval()
            module(pixels_for(module))
        except (AssertionError, ValueError, RuntimeError):  # timm's own refusal
            continue
        if module.attn_pool is not None and drawn(seed)["swiglu_mlp"]:  # of these, all without a counterpart
            with pytest.raises(ExportError, match="swiglu_mlp=True, whose activations differ"):
                from_module(module)
            continue
        model = from_module(module)
        opened += 1
        found = stage_differences(module, model, pixels_for(module))
        # Without tokens before the patches, timm's tokens are transposed in memory: a mean sums in another order.
        assert max(found.values()) <= TOLERANCE, (seed, found)
        layout = TIMM.describe_module(module, Hints()).layout
        assert same_tensors(module, to_module(model, "timm", layout=layout)), seed
    assert opened > count / 2


# The way back


@pytest.mark.parametrize(
    "fields",
    [
        {"rotary_embedding_type": "axial", "rotary_theta": 100.0, "rotary_axes": "xy", "rotary_offset": 1.0},
        {"rotary_embedding_type": "mixed", "rotary_dtype": "weights", "num_register_tokens": 2},
        {"key_bias": False, "final_norm": "both"},
        {"num_key_value_heads": (5, 1, 1), "layer_scale_init_value": 0.3, "gain_on_mlp": False},
        {"num_key_value_heads": 1, "qkv_bias": False, "rotary_embedding_type": "axial"},
        {
            "pooling": "map",
            "pool_prefix_tokens": True,
            "pooling_num_attention_heads": 2,
            "pooling_intermediate_size": 9,
        },
    ],
    ids=str,
)
def test_our_own_models_become_timms_and_come_back(fields: dict[str, Any]) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(**fields))).eval()
    shared = "num_key_value_heads" in fields
    if shared:
        with pytest.raises(ExportError, match="use layout 'eva_separate'"):
            to_module(model, "timm", layout="eva")
    for layout in (None, "eva_separate") if shared else (None, "eva", "eva_separate"):
        module = to_module(model, "timm", layout=layout)
        assert type(module) is Eva
        again = from_module(module)
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
        assert max(stage_differences(module, model, pixels_for(module)).values()) <= TOLERANCE


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"rotary_embedding_type": "axial", "rotary_frequencies": "period"}, "rotary_frequencies"),
        ({"rotary_embedding_type": "mixed", "rotary_offset": 1.0}, "rotary_offset"),
        ({"rotary_embedding_type": "axial", "hidden_act": "relu"}, "hidden_act"),
        ({"rotary_embedding_type": "axial", "position_resampling": "bilinear"}, "position_resampling"),
        ({"key_bias": False, "mlp_bias": False}, "mlp_bias"),
    ],
    ids=str,
)
def test_what_no_class_of_timm_expresses_is_refused_by_the_nearest(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ExportError, match=part):
        TIMM.build_module(tiny_config(**fields), None)


# Folders and bare files


def save_bare(module: nn.Module, path: Path) -> Path:
    """Save the tensors alone."""
    save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("name", EVA_REPRESENTATIVES)
def test_a_folder_of_timm_opens_and_exports_back(name: str, tmp_path: Path) -> None:
    module = tiny_timm(name, depth=2)
    save_for_hf(module, tmp_path / "theirs", safe_serialization=True)
    converted = from_checkpoint(tmp_path / "theirs", verify=True)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0
    to_checkpoint(converted.model, tmp_path / "ours", format="timm", image_processor=converted.image_processor)
    again: Any = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    assert same_tensors(module, again)
    with torch.no_grad():
        assert torch.equal(module(pixels_for(module)), again(pixels_for(module)))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (73, 91, 3), dtype=np.uint8))
    prepare: Any = converted.image_processor
    theirs = create_transform(**resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'theirs'}")))(image)
    assert torch.equal(create_transform(**resolve_model_data_config(again))(image), theirs)
    assert torch.equal(prepare(image, return_tensors="pt")["pixel_values"][0], theirs)


def test_a_pooling_changed_after_construction_is_followed(tmp_path: Path) -> None:
    module = tiny_timm("eva02_tiny_patch14_224", num_classes=5)
    module.reset_classifier(5, global_pool="max")
    save_for_hf(module, tmp_path, safe_serialization=True)
    model = from_checkpoint(tmp_path).model
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"rope_type": "mrope"}, ExportError, "mrope"),
        ({"rope": True}, ExportError, "rope"),
        ({"dynamic_img_pad": True}, ExportError, "dynamic_img_pad"),
        ({"embed_dim": 112}, MappingError, "has shape"),
        ({"swiglu_mlp": False}, MappingError, "fc1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    save_for_hf(tiny_timm("eva02_tiny_patch14_224"), tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=said):
        from_checkpoint(tmp_path)


def meta_state(name: str, **arguments: Any) -> dict[str, torch.Tensor]:
    """Return an entrypoint's tensors, without values."""
    with torch.device("meta"):
        return timm.create_model(name, **arguments).state_dict()


def asked_of(tensors: Any, **hints: Any) -> AmbiguousCheckpointError:
    """Return what is asked about a state dict."""
    with pytest.raises(AmbiguousCheckpointError) as caught:
        TIMM.describe_checkpoint(tensors, {}, Hints(**hints))
    return caught.value


@pytest.mark.slow(quick=["vit_tiny_patch16_dinov3_qkvb"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_dinov3_qkvb", "eva02_tiny_patch14_336"])
def test_a_bare_file_opens_by_the_name_of_its_architecture_alone(name: str, tmp_path: Path) -> None:
    module = randomize_(timm.create_model(name, num_classes=4)).eval()
    path = save_bare(module, tmp_path / "model.safetensors")
    with pytest.raises(AmbiguousCheckpointError, match="rotated") as caught:
        from_checkpoint(path)
    assert name in caught.value.candidates["architecture"]
    converted = from_checkpoint(path, architecture=name)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0
    with pytest.raises(CheckpointError, match="num_attention_heads=2 .the source has 3"):
        from_checkpoint(path, architecture=name, num_attention_heads=2)


def test_a_reference_finds_the_architecture_among_those_that_fit(tmp_path: Path) -> None:
    module = randomize_(timm.create_model("vit_tiny_patch16_dinov3_qkvb", num_classes=4, img_size=48)).eval()
    path = save_bare(module, tmp_path / "model.safetensors")
    with torch.no_grad():
        reference = pixels_for(module), module(pixels_for(module))
    model = from_checkpoint(path, reference=reference).model
    assert model.config.rotary_coordinates == "centered"


def test_tensors_that_a_plain_model_has_too_are_asked_for_with_both() -> None:
    asked = asked_of(meta_state("vit_base_patch16_rope_ape_224"))
    names = asked.candidates["architecture"]
    assert {"deit3_base_patch16_224", "vit_base_patch16_rope_ape_224"} <= set(names)
    assert "rotation" in str(asked)
    asked = asked_of(meta_state("vit_small_patch16_dinov3"))
    assert asked.candidates["architecture"] == ("vit_small_patch16_dinov3",)
    # Nothing is inferred from a name that fits: who denies it answers all else.
    assert asked.otherwise["position_embedding_type"] == ("none",)


def test_a_depth_that_no_architecture_has_is_said() -> None:
    state = meta_state("eva02_tiny_patch14_224", depth=5)
    with pytest.raises(UnknownFormatError, match="none of the .* architectures .* has these names, shapes"):
        TIMM.describe_checkpoint(state, {}, Hints())


def test_another_architecture_or_size_than_that_of_the_tensors_is_refused() -> None:
    state = meta_state("eva02_tiny_patch14_224")
    with pytest.raises(MappingError, match="not of eva02_small_patch14_224, which the caller names"):
        TIMM.describe_checkpoint(state, {}, Hints(architecture="eva02_small_patch14_224"))
    other = meta_state("eva02_tiny_patch14_224", img_size=(56, 28))
    with pytest.raises(AmbiguousCheckpointError, match="another grid") as caught:
        TIMM.describe_checkpoint(other, {}, Hints(architecture="eva02_tiny_patch14_224"))
    assert caught.value.candidates["image_size"] == ()  # 2 patches are no square grid
    said = Hints(architecture="eva02_tiny_patch14_224", image_size=(56, 28))
    assert TIMM.describe_checkpoint(other, {}, said).config.image_size == (56, 28)
    with pytest.raises(CheckpointError, match="correct image_size"):
        TIMM.describe_checkpoint(other, {}, Hints(architecture="eva02_tiny_patch14_224", image_size=28))


# The table


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_has_the_sizes_and_settings_of_timm(name: str) -> None:
    module: Any = timm.create_model(name, device="meta")
    read = TIMM.describe_module(module, Hints()).config
    ours: PlainViTConfig = EVA.config_of({**EVA.defaults, **ARCHITECTURES[name], "num_classes": module.num_classes})
    without = {name: value for name, value in read.to_dict().items() if name not in ("id2label", "label2id")}
    assert without == {name: ours.to_dict()[name] for name in without}
    assert name not in PLAIN
