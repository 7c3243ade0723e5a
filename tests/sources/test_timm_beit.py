"""timm's Beit and VisionTransformerRelPos: live modules, folders and bare files with the same numbers and bits."""

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config
from timm.layers import RmsNorm
from timm.models import save_for_hf
from timm.models.beit import Beit
from timm.models.beit import gen_relative_position_index as beit_index
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock, VisionTransformerRelPos
from torch import nn

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.format import Hints
from plain_vit.conversion.timm.architectures import ARCHITECTURES as PLAIN
from plain_vit.conversion.timm.relative.beit import BEIT
from plain_vit.conversion.timm.relative.relpos import RELPOS
from plain_vit.conversion.timm.source import TIMM
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError, UnknownFormatError
from tests import ROOT
from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.sweep import record
from tests.sources.timm_models import TOLERANCE, measurements, pixels_for, same_tensors, stage_differences
from tests.tiny import difference, tiny_config

ARCHITECTURES = {**BEIT.architectures, **RELPOS.architectures}

# One line for each kind of relative position, block, norm, projection, token and head that the entrypoints have.
REPRESENTATIVES = [
    "beit_base_patch16_224",  # a table in each block, biases on queries and values, LayerScale
    "vit_relpos_base_patch16_plus_240",  # a network in each block, biases, norm before the pooling
    "test_vit_relpos",  # norm after the pooling
    "vit_srelpos_small_patch16_224",  # one network for all blocks
    "vit_relpos_medium_patch16_cls_224",  # a class token, a network of another width
    "vit_relpos_base_patch16_clsgap_224",  # a class token that is not pooled
    "vit_relpos_base_patch32_plus_rpn_256",  # norms at the end of the residual branches
]
TABLES = {"rel_pos_type": "bias"}
SHARED_TABLE = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
# Entrypoints with arguments that none has.
VARIANTS = [
    *((name, {}) for name in REPRESENTATIVES),
    ("beit_base_patch16_224", SHARED_TABLE),
    ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_abs_pos_emb": True, "init_values": None}),
    ("beitv2_base_patch16_224", {"use_abs_pos_emb": True, "swiglu_mlp": True, "scale_mlp": True}),
    ("beit_large_patch16_224", {"qkv_bias": False, "init_values": 0.0, "use_fc_norm": False, "scale_mlp": True}),
    ("vit_relpos_base_patch16_plus_240", {**TABLES, "qk_norm": True}),
    ("vit_srelpos_small_patch16_224", {**TABLES, "init_values": None}),
    ("vit_relpos_base_patch16_cls_224", {**TABLES, "qkv_bias": True}),
    ("vit_relpos_small_patch16_rpn_224", {**TABLES, "shared_rel_pos": True, "class_token": True}),
]  # fmt: skip


def some(values: list[Any], step: int) -> list[Any]:
    """Return all as parameters of a test, of which only one in so many is run by default."""
    slow = pytest.mark.slow
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), id=str(value), marks=[slow] if i % step else []
        )
        for i, value in enumerate(values)
    ]


# How far values may be apart where timm multiplies or adds in another order, each rounded to the 8 bits of bfloat16.
BFLOAT16_REORDERED = 2e-2


def tiny(name: str, **arguments: Any) -> Any:
    """Return timm's entrypoint at a small geometry, in evaluation mode, every parameter random."""
    patch = ARCHITECTURES[name]["patch_size"]
    small = {"img_size": (3 * patch, 5 * patch), "embed_dim": 56, "num_heads": 7, "depth": 3, "num_classes": 11}
    return randomize_(timm.create_model(name, **{**small, **arguments})).eval()


def is_reordered(module: Any) -> bool:
    """Return whether timm computes in another order.

    A bias of three dimensions, that of Beit's blocks together, takes torch's unfused kernel. Without a token before the
    patches, tokens are transposed in memory: their products, where no norm comes before, and their mean add up in
    another order.
    """
    return getattr(module, "rel_pos_bias", None) is not None or module.num_prefix_tokens == 0


def rounding(module: Any) -> float:
    """Return how far a model's numbers may be off."""
    if not is_reordered(module):
        return 0.0
    return TOLERANCE if next(module.parameters()).dtype == torch.float32 else BFLOAT16_REORDERED


# Live modules


@pytest.mark.parametrize(("name", "arguments"), VARIANTS, ids=str)
def test_every_block_and_the_logits_are_timms(name: str, arguments: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = tiny(name, **arguments).to(dtype)
        model = from_module(module)
        found = stage_differences(module, model, pixels_for(module).to(dtype))
        assert max(found.values()) <= rounding(module), found
        layout = TIMM.describe_module(module, Hints()).layout
        assert same_tensors(module, to_module(model, "timm", layout=layout))


@pytest.mark.parametrize("size", [(4, 2), (7, 9)])
@pytest.mark.parametrize(("name", "arguments"), some(VARIANTS, 3))
def test_images_of_other_sizes_give_the_logits_of_timms_model_set_to_them(
    name: str, arguments: dict[str, Any], size: tuple[int, int]
) -> None:
    module = tiny(name, **arguments)
    model = from_module(module)
    patch = ARCHITECTURES[name]["patch_size"]
    height, width = size[0] * patch, size[1] * patch
    module.set_input_size((height, width))
    pixel_values = pixels_for(module)
    assert tuple(pixel_values.shape[-2:]) == (height, width)
    assert max(stage_differences(module, model, pixel_values).values()) <= TOLERANCE
    resized = from_module(module)
    assert resized.config.image_shape == (height, width)
    assert max(stage_differences(module, resized, pixel_values).values()) <= rounding(module)
    layout = TIMM.describe_module(module, Hints()).layout
    assert same_tensors(module, to_module(resized, "timm", layout=layout))


@pytest.mark.parametrize("pooling", ["", "token", "avg"])
@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_medium_patch16_cls_224"])
def test_every_pooling_gives_equal_logits_or_features(name: str, pooling: str) -> None:
    for classes in (0, 7):
        module = tiny(name, global_pool=pooling, num_classes=classes)
        model = from_module(module)
        assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0
        assert same_tensors(module, to_module(model, "timm"))


@pytest.mark.parametrize(("name", "arguments"), some(VARIANTS, 3))
def test_the_gradients_are_timms(name: str, arguments: dict[str, Any]) -> None:
    module = tiny(name, **arguments)
    model = from_module(module)
    layout = TIMM.describe_module(module, Hints()).layout
    labels, pixel_values = torch.tensor([3, 8]), pixels_for(module)
    nn.functional.cross_entropy(module(pixel_values), labels).backward()
    model(pixel_values, labels=labels).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    ours = to_module(model, "timm", layout=layout).state_dict()  # gives the gradients their names and shapes
    theirs = dict(module.named_parameters())
    assert ours.keys() == theirs.keys()
    for key, parameter in theirs.items():
        if parameter.grad.abs().max() > 1e-7:  # not that of a bias of all keys or scores, which softmax ignores
            assert difference(ours[key], parameter.grad) <= TOLERANCE, key


def test_the_network_of_the_distances_drops_units_in_training_as_timms() -> None:
    for shared in (False, True):
        module = tiny("vit_relpos_base_patch16_cls_224", shared_rel_pos=shared).train()
        model = from_module(module)
        assert model.training
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            theirs = module(pixels_for(module))
            torch.manual_seed(seed)
            ours = model(pixels_for(module)).logits
            assert difference(ours, theirs) <= TOLERANCE
            found.append(ours)
        assert difference(*found) > 1e-4


def test_training_settings_are_read_off_the_module_and_given_back() -> None:
    rates = {"drop_rate": 0.11, "proj_drop_rate": 0.14, "attn_drop_rate": 0.15, "drop_path_rate": 0.16}
    for name in ("beit_base_patch16_224", "vit_relpos_small_patch16_224", "vit_relpos_small_patch16_rpn_224"):
        module = tiny(name, **rates, **({"pos_drop_rate": 0.12} if "beit" in name else {})).train()
        again = to_module(from_module(module), "timm")
        assert again.training
        assert repr(again) == repr(module)


def _change_the_index(module: Any) -> None:
    module.blocks[1].attn.relative_position_index[2, 3] += 1


def _give_keys_a_bias(module: Any) -> None:
    module.blocks[1].attn.k_bias[2] = 0.5


def _remove_a_table(module: Any) -> None:
    module.blocks[2].attn.relative_position_bias_table = None


def _set_epsilon(module: Any) -> None:
    module.blocks[1].norm2.eps = 1e-3


def _prune(module: Any) -> None:
    module.prune_intermediate_layers(1, prune_norm=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_change_the_index, r"blocks.1.attn.relative_position_index has not the values.*init_non_persistent_buffers"),
        (_give_keys_a_bias, r"blocks.1.attn.k_bias has not the values"),
        (_remove_a_table, r"blocks.2.attn.relative_position_bias_table"),
        (_set_epsilon, r"blocks.1.norm2.eps is 0.001, not 1e-06"),
        (_prune, r"norm"),
    ],
)
def test_what_no_argument_says_is_named(change: Callable[[Any], None], named: str) -> None:
    module = tiny("beit_base_patch16_224")
    change(module)
    with pytest.raises(ExportError, match=named):
        from_module(module)


def test_coordinates_rounded_by_a_cast_and_back_are_named_and_computed_again() -> None:
    module = tiny("vit_srelpos_small_patch16_224").to(torch.bfloat16).float()
    with pytest.raises(ExportError, match=r"shared_rel_pos.rel_coords_log has not .*'shared_rel_pos'"):
        from_module(module)
    module.get_submodule("shared_rel_pos").init_non_persistent_buffers()
    assert max(stage_differences(module, from_module(module), pixels_for(module)).values()) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True}, "two biases"),
        ("vit_relpos_small_patch16_224", {"rel_pos_type": "mlp_swin"}, "rel_pos_type='mlp_swin': expected one of"),
        ("vit_relpos_small_patch16_224", {"act_layer": nn.Mish}, "act_layer"),
        ("vit_relpos_small_patch16_224", {"norm_layer": nn.BatchNorm1d}, "norm_layer"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_reason(name: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        from_module(tiny(name, **arguments))


class DerivedBeit(Beit):
    """A forward pass of its own, as people write it."""


class DerivedRelPos(VisionTransformerRelPos):
    """A forward pass of its own, as people write it."""


@pytest.mark.parametrize("kind", [DerivedBeit, DerivedRelPos])
def test_a_derived_class_is_refused(kind: Any) -> None:
    with pytest.raises(ExportError, match="Derived"):
        from_module(kind(img_size=32, embed_dim=56, num_heads=7, depth=1))


# Drawn at random


def drawn(seed: int) -> Any:
    """Draw a model of one of the two classes; not all of the arguments fit together."""
    draw = random.Random(seed)
    heads = draw.choice([2, 3])
    shared: dict[str, Any] = {
        "img_size": draw.choice([(24, 40), (32, 16), (8, 32)]), "patch_size": 8, "embed_dim": heads * 8,
        "num_heads": heads, "depth": draw.choice([1, 3]), "mlp_ratio": draw.choice([1, 2.7, 4]), "num_classes": 5,
        "global_pool": draw.choice(["", "avg", "token"]), "qkv_bias": draw.random() < 0.6,
        "init_values": draw.choice([None, 0.0, 0.1]),
        "norm_layer": functools.partial(draw.choice([nn.LayerNorm, RmsNorm]), eps=draw.choice([1e-6, 1e-5])),
    }  # fmt: skip
    if draw.random() < 0.5:
        return Beit(
            **shared, swiglu_mlp=draw.random() < 0.4, scale_mlp=draw.random() < 0.3,
            use_abs_pos_emb=draw.random() < 0.5, use_rel_pos_bias=draw.random() < 0.6,
            use_shared_rel_pos_bias=draw.random() < 0.3, use_fc_norm=draw.choice([None, True, False]),
        )  # fmt: skip
    return VisionTransformerRelPos(
        **shared, qk_norm=draw.random() < 0.3, class_token=draw.random() < 0.5, fc_norm=draw.random() < 0.5,
        rel_pos_type=draw.choice(["mlp", "bias"]), rel_pos_dim=draw.choice([None, 12]),
        shared_rel_pos=draw.random() < 0.4, act_layer=draw.choice([None, nn.SiLU, nn.ReLU]),
        block_fn=draw.choice([RelPosBlock, ResPostRelPosBlock]),
    )  # fmt: skip


@pytest.mark.slow
def test_random_models_open_with_equal_numbers_and_go_back() -> None:
    opened, count = 0, draws(20, nightly=400)
    for seed in range(count):
        try:
            module: Any = randomize_(drawn(seed), seed).eval()
            module(pixels_for(module))
        except (AssertionError, ValueError, RuntimeError):  # timm's own refusal
            continue
        if (
            getattr(module, "rel_pos_bias", None) is not None
            and module.blocks[0].attn.relative_position_index is not None
        ):
            with pytest.raises(ExportError, match="two biases"):  # of these, all without a counterpart
                from_module(module)
            continue
        model = from_module(module)
        opened += 1
        found = stage_differences(module, model, pixels_for(module))
        assert max(found.values()) <= (TOLERANCE if is_reordered(module) else 0.0), (seed, found)
        layout = TIMM.describe_module(module, Hints()).layout
        back = to_module(model, "timm", layout=layout)
        assert same_tensors(module, back), seed
        assert from_module(back).config.to_dict() == model.config.to_dict(), seed
    assert opened > count / 2


# The way back


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"relative_position_bias": "table", "key_bias": False}, Beit),
        ({"relative_position_bias": "table", "key_bias": False, "position_embedding_type": "none"}, Beit),
        ({"relative_position_bias": "table", "position_embedding_type": "none"}, VisionTransformerRelPos),
        (
            {"relative_position_bias": "mlp", "relative_position_shared": True, "position_embedding_type": "none"},
            VisionTransformerRelPos,
        ),
    ],
    ids=str,
)
def test_our_own_models_become_timms_and_come_back(fields: dict[str, Any], kind: type) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(**fields))).eval()
    module = to_module(model, "timm")
    assert type(module) is kind
    again = from_module(module)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert max(stage_differences(module, model, pixels_for(module)).values()) <= TOLERANCE


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"relative_position_bias": "mlp", "position_embedding_type": "learned"}, "position_embedding_type"),
        ({"relative_position_bias": "mlp", "num_register_tokens": 2, "position_embedding_type": "none"}, "register"),
        ({"relative_position_bias": "table", "key_bias": False, "mlp_bias": False}, "mlp_bias"),
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


@pytest.mark.parametrize(("name", "arguments"), some(VARIANTS, 3))
def test_a_folder_of_timm_opens_and_exports_back(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    module = tiny(name, depth=2, **arguments)
    save_for_hf(module, tmp_path / "theirs", safe_serialization=True)
    converted = from_checkpoint(tmp_path / "theirs", verify=True)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) <= rounding(module)
    layout = TIMM.describe_module(module, Hints()).layout
    to_checkpoint(
        converted.model, tmp_path / "ours", format="timm", image_processor=converted.image_processor, layout=layout
    )
    again: Any = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    assert same_tensors(module, again)
    with torch.no_grad():
        assert torch.equal(module(pixels_for(module)), again(pixels_for(module)))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (73, 91, 3), dtype=np.uint8))
    prepare: Any = converted.image_processor
    theirs = create_transform(**resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'theirs'}")))(image)
    assert torch.equal(create_transform(**resolve_model_data_config(again))(image), theirs)
    assert torch.equal(prepare(image, return_tensors="pt")["pixel_values"][0], theirs)


@pytest.mark.slow(quick=["beit_base_patch16_224"])
@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_base_patch32_plus_rpn_256"])
def test_a_table_that_timm_reads_as_that_of_a_square_is_not_written(name: str, tmp_path: Path) -> None:
    patch = 16 if name.startswith("beit") else 32
    kind = {} if name.startswith("beit") else {"rel_pos_type": "bias"}
    for grid, refused in (((2, 14), True), ((14, 2), True), ((2, 13), False), ((3, 3), False)):
        size = tuple(side * patch for side in grid)
        module = tiny(name, img_size=size, depth=1, **kind)
        save_for_hf(module, tmp_path / f"theirs {grid}", safe_serialization=True)
        loaded = timm.create_model(f"local-dir:{tmp_path / f'theirs {grid}'}", pretrained=True)
        assert same_tensors(module, loaded) == (not refused)  # timm's own file, read by timm
        model = from_checkpoint(tmp_path / f"theirs {grid}").model
        assert max(stage_differences(module, model, pixels_for(module)).values()) <= rounding(module)
        if refused:
            with pytest.raises(ExportError, match=f"{grid[0]} x {grid[1]} patches, 81 distances"):
                to_checkpoint(model, tmp_path / f"ours {grid}", format="timm")
            assert same_tensors(module, to_module(model, "timm"))
        else:
            to_checkpoint(model, tmp_path / f"ours {grid}", format="timm")


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_medium_patch16_cls_224"])
def test_a_pooling_and_a_size_changed_after_construction_are_followed(name: str, tmp_path: Path) -> None:
    module = tiny(name)
    module.reset_classifier(5, global_pool="" if "cls" in name else "token")
    module.set_input_size((32, 48))
    save_for_hf(randomize_(module), tmp_path, safe_serialization=True)
    hints = {} if "beit" in name else {"pooling": "none"}
    model = from_checkpoint(tmp_path, **hints).model
    assert model.config.image_shape == (32, 48)
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True}, ExportError, "two biases"),
        ("beit_base_patch16_224", {"rope": True}, ExportError, "rope"),
        ("beit_base_patch16_224", {"embed_dim": 112}, MappingError, "has shape"),
        ("beit_base_patch16_224", {"use_abs_pos_emb": True}, MappingError, "missing: 'pos_embed'"),
        ("vit_relpos_base_patch16_224", {"rel_pos_type": "mlp_swin"}, ExportError, "mlp_swin"),
        ("vit_relpos_base_patch16_224", {"rel_pos_dim": 9}, MappingError, "has shape"),
        ("vit_relpos_base_patch16_224", {"global_pool": "token"}, ExportError, "timm refuses"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    name: str, changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    save_for_hf(tiny(name), tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"] |= changes
    (tmp_path / "config.json").write_text(json.dumps({**config, "global_pool": None}))
    with pytest.raises(error, match=said):
        from_checkpoint(tmp_path)


def meta_state(name: str, **arguments: Any) -> dict[str, torch.Tensor]:
    """Return an entrypoint's tensors, without values."""
    with torch.device("meta"):
        return timm.create_model(name, **arguments).state_dict()


@pytest.mark.parametrize("name", some(list(ARCHITECTURES), 8))
def test_a_bare_file_asks_for_its_architecture_and_opens_by_it(name: str) -> None:
    state = meta_state(name)
    with pytest.raises(AmbiguousCheckpointError, match=r"beit\.py|relpos\.py") as caught:
        TIMM.describe_checkpoint(state, {}, Hints())
    assert name in caught.value.candidates["architecture"]
    described = TIMM.describe_checkpoint(state, {}, Hints(architecture=f"{name}.some_tag"))
    assert described.config.image_shape == (ARCHITECTURES[name]["img_size"],) * 2


@pytest.mark.parametrize(
    "name", ["test_vit_relpos", *some(["vit_srelpos_small_patch16_224", "beit_base_patch16_224"], 2)[1:]]
)
def test_a_bare_file_opens_by_the_name_of_its_architecture_alone(name: str, tmp_path: Path) -> None:
    module = randomize_(timm.create_model(name, num_classes=4)).eval()
    path = save_bare(module, tmp_path / "model.safetensors")
    converted = from_checkpoint(path, architecture=name, verify=True)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) <= rounding(module)
    with pytest.raises(CheckpointError, match="num_attention_heads=2 .the source has"):
        from_checkpoint(path, architecture=name, num_attention_heads=2)


def test_the_table_tells_the_grids_that_are_possible() -> None:
    state = meta_state("beit_base_patch16_224", img_size=(48, 80))
    with pytest.raises(AmbiguousCheckpointError, match="relative_position_bias_table has 48 rows") as caught:
        TIMM.describe_checkpoint(state, {}, Hints(architecture="beit_base_patch16_224"))
    assert caught.value.candidates["image_size"][:2] == ((48, 80), (80, 48))
    said = Hints(architecture="beit_base_patch16_224", image_size=(80, 48))
    assert TIMM.describe_checkpoint(state, {}, said).config.image_size == (80, 48)
    with pytest.raises(CheckpointError, match="correct image_size"):
        TIMM.describe_checkpoint(state, {}, Hints(architecture="beit_base_patch16_224", image_size=224))
    with pytest.raises(AmbiguousCheckpointError, match="Beit") as caught:
        TIMM.describe_checkpoint(state, {}, Hints())
    assert "beit_base_patch16_384" in caught.value.candidates["architecture"]
    state = {name: tensor[:-1] if name.endswith("table") else tensor for name, tensor in state.items()}
    with pytest.raises(MappingError, match="47 rows"):
        TIMM.describe_checkpoint(state, {}, Hints(architecture="beit_base_patch16_224"))


def old_file(path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, torch.Tensor]) -> tuple[Any, Path]:
    """Return a small model and its file with the integers that earlier releases saved, of which some are changed."""
    small = {"embed_dim": 56, "num_heads": 7, "depth": 3, "mlp_ratio": 4.0, "img_size": (48, 80)}
    monkeypatch.setitem(BEIT.architectures, NAME, {**BEIT.architectures[NAME], **small})
    module = tiny(NAME)
    index = {f"blocks.{i}.attn.relative_position_index": beit_index((3, 5)) for i in range(3)}
    save_file({**module.state_dict(), **index, **changed}, path)
    return module, path


NAME = "beit_base_patch16_224"


def test_the_integers_that_earlier_releases_saved_are_compared_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = old_file(tmp_path / "old.safetensors", monkeypatch, {})
    with pytest.raises(AmbiguousCheckpointError, match="Beit"):
        from_checkpoint(path)
    converted = from_checkpoint(path, architecture=NAME, verify=True)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0
    with pytest.raises(MappingError, match=r"blocks.0.attn.relative_position_index.*grid of \(5, 3\)"):
        from_checkpoint(path, architecture=NAME, image_size=(80, 48))
    monkeypatch.undo()
    to_checkpoint(converted.model, tmp_path / "ours", format="timm", layout="beit_index")
    ours, theirs = load_file(tmp_path / "ours" / "model.safetensors"), load_file(path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again: Any = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    assert same_tensors(module, again)


def test_other_integers_than_ours_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"blocks.1.attn.relative_position_index": beit_index((3, 5)).flip(0)}
    _, path = old_file(tmp_path / "old.safetensors", monkeypatch, changed)
    with pytest.raises(MappingError, match=r"blocks.1.attn.relative_position_index.*grid of \(3, 5\)"):
        from_checkpoint(path, architecture=NAME)


def test_a_depth_that_no_architecture_has_is_said() -> None:
    for name in ("beit_base_patch16_224", "vit_relpos_base_patch16_224"):
        with pytest.raises(UnknownFormatError, match="none of the .* architectures .* has these names, shapes"):
            TIMM.describe_checkpoint(meta_state(name, depth=5), {}, Hints())


def test_another_architecture_than_that_of_the_tensors_is_refused() -> None:
    state = meta_state("beit_base_patch16_224")
    for other in ("beit_large_patch16_224", "vit_relpos_base_patch16_cls_224"):
        with pytest.raises(MappingError, match=f"not of {other}, which the caller names"):
            TIMM.describe_checkpoint(state, {}, Hints(architecture=other))


# The tables


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_has_the_sizes_and_settings_of_timm(name: str) -> None:
    with torch.device("meta"):
        module = timm.create_model(name, depth=1)
    read = TIMM.describe_module(module, Hints()).config
    (constructor,) = [one for one in (BEIT, RELPOS) if name in one.architectures]
    arguments = {**ARCHITECTURES[name], "depth": 1, "num_classes": module.num_classes}
    ours: PlainViTConfig = constructor.config_of(arguments)
    without = {name: value for name, value in read.to_dict().items() if name not in ("id2label", "label2id")}
    assert without == {name: ours.to_dict()[name] for name in without}
    assert name not in PLAIN


def test_the_tables_have_all_entrypoints_of_both_files() -> None:
    assert set(BEIT.architectures) == set(timm.list_models(module="beit"))
    assert set(RELPOS.architectures) == set(timm.list_models(module="vision_transformer_relpos"))
    assert (len(BEIT.architectures), len(RELPOS.architectures)) == (7, 14)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "all 21 of `beit` and `vision_transformer_relpos`" in readme


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_entrypoint_opens_with_equal_numbers_and_exports_back(name: str) -> None:
    module = tiny(name)
    model = from_module(module)
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= rounding(module), found
    assert same_tensors(module, to_module(model, "timm"))
    headless = tiny(name, num_classes=0)
    features = stage_differences(headless, from_module(headless), pixels_for(headless))
    assert max(features.values()) <= rounding(headless), features
    halves = tiny(name).to(torch.bfloat16)
    rounded = stage_differences(halves, from_module(halves), pixels_for(halves).to(torch.bfloat16))
    assert max(rounded.values()) <= rounding(halves), rounded
    patch = ARCHITECTURES[name]["patch_size"]
    module.set_input_size((4 * patch, 2 * patch))
    resized = max(stage_differences(module, model, pixels_for(module)).values())
    assert resized <= TOLERANCE
    record(measurements(name, found, features, rounded, resized))
