"""Google's `.npz` files, written here in their exact layout, compared with an independent forward pass in numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError, OutputError
from plain_vit_command import main
from tests.conftest import randomize_
from tests.sources.google_models import (
    BIG_VISION,
    CLASSES,
    DEPTH,
    HEAD_DIM,
    HEADS,
    MLP,
    PATCH,
    REPRESENTATION,
    WIDTH,
    as_bfloat16,
    forward,
    random_arrays,
    save,
    stacked,
)
from tests.sources.sweep import record
from tests.tiny import difference, tiny_config

# float32 compared with float64, and sums in a different order.
TOLERANCE = 1e-5

# For each code base: arguments of its arrays, the prefix, and the hints that a caller must give.
KINDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "imagenet21k": ({"representation": True}, "", {}),
    "augreg": ({}, "", {}),
    "opt_target": ({"representation": True}, "opt/target/", {}),
    "linen": ({"names": BIG_VISION}, "", {}),
    "before_2022": ({"names": BIG_VISION, "positions": "Transformer/pos_embedding"}, "params/", {}),
    "big_vision_cls": ({"names": BIG_VISION, "positions": "pos_embedding"}, "params/", {}),
    "big_vision_gap": (
        {"names": BIG_VISION, "positions": "pos_embedding", "class_token": False}, "", {"pooling": "mean"}
    ),
    "siglip": (
        {
            "names": BIG_VISION, "positions": "pos_embedding", "class_token": False, "map_head": True, "classes": 0,
        },
        "params/img/",
        {},
    ),
    "simple_vit": (
        {"names": BIG_VISION, "positions": None, "class_token": False, "representation": True},
        "",
        {"image_size": (20, 28), "pooling": "mean"},
    ),
    "not_square": ({"grid": (3, 5)}, "", {"image_size": (15, 35)}),
    # Their grids are not square either; gains have four axes as in the paper's own file.
    "hybrid_root_alone": ({"stem": (), "grid": (3, 5)}, "", {"image_size": (12, 40)}),
    "hybrid_one_stage": ({"stem": (2,), "gains_4d": True, "grid": (2, 3)}, "", {"image_size": (8, 24)}),
    "hybrid_two_stages": ({"stem": (1, 2), "grid": (2, 1)}, "", {"image_size": (16, 16)}),
}  # fmt: skip
# Separate layers, and layers stacked by a scan.
LAYERS = [(kind, scanned) for kind in KINDS for scanned in (False, True) if not (scanned and "hybrid" in kind)]


def images(height: int, width: int, channels: int = 3) -> np.ndarray:
    """Return normalised images (B, H, W, C): one ordinary, one nearly constant, one with very large values."""
    noise = np.random.default_rng(5).normal(size=(3, height, width, channels))
    return (noise * np.array([1.0, 1e-3, 10.0]).reshape(3, 1, 1, 1)).astype(np.float32)


@torch.no_grad()
def differences(model: Any, arrays: dict[str, np.ndarray], gelu: str = "tanh") -> dict[str, float]:
    """Return the largest difference of each output from numpy's, relative to its largest value."""
    height, width = (side * size for side, size in zip(model.config.grid_size, model.config.patch_shape, strict=True))
    pixels = images(height, width)
    expected = {name: torch.from_numpy(value) for name, value in forward(arrays, pixels, gelu).items()}
    pixel_values = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    base = model.vit if isinstance(model, PlainViTForImageClassification) else model
    outputs = base(pixel_values)
    got = {"tokens": outputs.last_hidden_state, "pooled": outputs.pooler_output}
    if "logits" in expected:
        got["logits"] = model(pixel_values).logits
    return {name: difference(got[name].double(), expected[name]) for name in expected}


def source_record(kind: str, scanned: bool = False) -> dict[str, str]:
    """Return the fields that identify the source in the table of the docs."""
    name = f"google .npz {kind.replace('_', ' ')}" + (", layers stacked" if scanned else "")
    return {"source": name, "numpy": np.__version__, "torch": torch.__version__}


@pytest.mark.parametrize("kind, scanned", LAYERS)
def test_every_layout_gives_the_numbers_of_the_published_equations(tmp_path: Path, kind: str, scanned: bool) -> None:
    fields, prefix, hints = KINDS[kind]
    arrays = random_arrays(**fields)
    path = save(tmp_path / "model.npz", stacked(arrays) if scanned else arrays, prefix)
    converted = from_checkpoint(path, **hints)
    found = differences(converted.model, arrays)
    assert max(found.values()) <= TOLERANCE, found
    record({**source_record(kind, scanned), "logits": max(found.values())})
    assert isinstance(converted.model, PlainViTModel if kind == "siglip" else PlainViTForImageClassification)
    config = converted.model.config
    assert (config.resnet_stem is not None) == ("hybrid" in kind)
    if "hybrid" in kind:
        assert config.resnet_stem == {"depths": fields["stem"], "style": "google"}


def test_shapes_tell_the_geometry(tmp_path: Path) -> None:
    config = from_checkpoint(save(tmp_path / "model.npz", random_arrays(representation=True))).model.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (WIDTH, DEPTH, MLP)
    assert (config.num_attention_heads, config.head_dim, config.num_labels) == (HEADS, HEAD_DIM, CLASSES)
    assert (config.patch_size, config.image_size, config.representation_size) == (PATCH, (20, 28), REPRESENTATION)
    assert (config.pooling, config.final_norm, config.representation_act) == ("cls", "before_pooling", "tanh")
    assert (config.layer_norm_eps, config.position_resampling) == (1e-6, "bilinear_align_corners")


def test_the_activation_is_that_of_jax_unless_the_caller_wants_the_exact_one(tmp_path: Path) -> None:
    arrays = random_arrays()
    path = save(tmp_path / "model.npz", arrays)
    default, exact = from_checkpoint(path), from_checkpoint(path, hidden_act="gelu")
    assert max(differences(exact.model, arrays, gelu="erf").values()) <= TOLERANCE
    assert max(differences(exact.model, arrays).values()) > 10 * TOLERANCE  # so the choice has an effect
    assert "hidden_act = 'gelu_pytorch_tanh', from flax" in str(default.report)
    assert "hidden_act = 'gelu', from the caller" in str(exact.report)


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    halves = as_bfloat16(random_arrays())
    model = from_checkpoint(save(tmp_path / "model.npz", halves)).model
    assert model.dtype == torch.bfloat16
    whole = {name: (half.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for name, half in halves.items()}
    assert max(differences(model.float(), whole).values()) <= TOLERANCE


def test_tensors_next_to_the_model_are_ignored_and_reported(tmp_path: Path) -> None:
    fields, prefix, _ = KINDS["siglip"]
    beside = {"params/txt/head/kernel": np.ones((2, 3)), "params/t": np.ones(1), "params/b": np.ones(1),
              "opt/0/mu": np.ones(4)}  # fmt: skip
    report = from_checkpoint(save(tmp_path / "model.npz", random_arrays(**fields), prefix, beside)).report
    assert set(report.ignored) == set(beside)
    state = {"opt/state/step": np.ones(1)}
    report = from_checkpoint(save(tmp_path / "state.npz", random_arrays(), "opt/target/", state)).report
    assert set(report.ignored) == set(state)


# timm reads stacked layers only under big_vision's names.
LOADED_BY_TIMM = [
    *((kind, False) for kind in ("augreg", "opt_target", "big_vision_cls", "big_vision_gap", "siglip")),
    *((kind, True) for kind in ("big_vision_cls", "big_vision_gap", "siglip")),
]


@pytest.mark.parametrize("kind, scanned", LOADED_BY_TIMM)
def test_timms_own_loader_reads_the_same_tensors(tmp_path: Path, kind: str, scanned: bool) -> None:
    fields, prefix, hints = KINDS[kind]
    arrays = random_arrays(**{**fields, "shared_width": True, "representation": False})
    path = save(tmp_path / "model.npz", stacked(arrays) if scanned else arrays, prefix)
    pooling = "map" if fields.get("map_head") else "avg" if not fields.get("class_token", True) else "token"
    source = VisionTransformer(
        img_size=(20, 28), patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=5, mlp_ratio=MLP / WIDTH,
        class_token=pooling == "token", global_pool=pooling, fc_norm=False, num_classes=fields.get("classes", CLASSES),
        no_embed_class=kind == "big_vision_cls",
    )  # fmt: skip
    source.load_pretrained(str(path))
    theirs = from_module(source).state_dict()
    ours = from_checkpoint(path, **hints).model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("broken", ["missing", "left over", "shape", "layer"])
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, broken: str) -> None:
    arrays = random_arrays()
    name = "Transformer/encoderblock_1/MlpBlock_3/Dense_0/bias"
    if broken == "missing":
        del arrays[name]
    elif broken == "left over":
        arrays["extra/kernel"] = arrays[name]
    elif broken == "shape":
        arrays[name] = arrays[name][1:]
    else:
        arrays = {key: array for key, array in arrays.items() if "encoderblock_1" not in key}
    with pytest.raises(MappingError, match="extra/kernel" if broken == "left over" else "Transformer/encoderblock_1/"):
        from_checkpoint(save(tmp_path / "model.npz", arrays))


@pytest.mark.parametrize(
    "fields, hints, error, words",
    [
        (
            {"grid": (3, 5)},
            {},
            AmbiguousCheckpointError,
            "15 rows for patches, which do not form a square grid.*image_size",
        ),
        ({"positions": None}, {}, CheckpointError, "no table of positions, and vision_transformer computes none"),
        (
            {"names": BIG_VISION, "positions": None, "class_token": False},
            {},
            AmbiguousCheckpointError,
            "no table of positions.*image_size= 224, if patches do not overlap\n  pooling= 'mean', the only",
        ),
        (
            {"names": BIG_VISION, "positions": "pos_embedding", "class_token": False, "classes": 0},
            {},
            AmbiguousCheckpointError,
            "^a checkpoint of google: there is neither a class token nor a MAPHead_0.*pooling= one of 'mean', 'none'",
        ),
        (
            {},
            {"image_size": (20, 35)},
            CheckpointError,
            "17 rows, 1 of them for the class token.*has 20 patches.*of 16",
        ),
        ({}, {"num_attention_heads": 4}, CheckpointError, r"num_attention_heads=4 \(the source has 3\)"),
        ({}, {"pooling": "mean"}, CheckpointError, r"pooling='mean' \(the source has 'cls'\)"),
        ({}, {"patch_size": 5}, CheckpointError, r"patch_size=\(5, 5\) \(the source has \(5, 7\)\)"),
        ({"map_head": True}, {}, CheckpointError, "cls and MAPHead_0 are both there"),
        ({"names": ("LayerNorm_0", "Attention", "LayerNorm_1", "MlpBlock_0")}, {}, CheckpointError, "has no attention"),
    ],
)
def test_what_is_open_or_contradicts_the_file_is_said(
    tmp_path: Path, fields: dict[str, Any], hints: dict[str, Any], error: type[Exception], words: str
) -> None:
    path = save(tmp_path / "model.npz", random_arrays(**fields))
    with pytest.raises(error, match=f"(?s){words}"):
        from_checkpoint(path, **hints)


def test_a_model_of_variable_grids_is_refused(tmp_path: Path) -> None:
    arrays = random_arrays()
    arrays["embedding/kernel"] = arrays["embedding/kernel"].reshape(-1, WIDTH)
    with pytest.raises(CheckpointError, match="NaFlex"):
        from_checkpoint(save(tmp_path / "model.npz", arrays))


@pytest.mark.parametrize("kind, scanned", LAYERS)
def test_the_export_gives_every_array_bit_for_bit(tmp_path: Path, kind: str, scanned: bool) -> None:
    fields, _, hints = KINDS[kind]
    arrays = random_arrays(**fields)
    arrays = stacked(arrays) if scanned else arrays
    converted = from_checkpoint(save(tmp_path / "model.npz", arrays), **hints)
    to_checkpoint(converted.model, tmp_path / "back.npz", format="google", layout=converted.report.layout)
    with np.load(tmp_path / "back.npz", allow_pickle=False) as back:
        assert set(back) == set(arrays)
        for name, array in arrays.items():
            assert (back[name].shape, back[name].tobytes()) == (array.shape, array.tobytes()), name
    record({**source_record(kind, scanned), "way_back_bit_exact": True})


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_what_is_pooled_without_a_token_is_said_and_exports_back(tmp_path: Path, pooling: str) -> None:
    arrays = random_arrays(names=BIG_VISION, positions="pos_embedding", class_token=False, classes=0)
    converted = from_checkpoint(save(tmp_path / "model.npz", arrays), pooling=pooling)
    assert converted.report.config.pooling == pooling
    to_checkpoint(converted.model, tmp_path / "back.npz", format="google", layout=converted.report.layout)
    with np.load(tmp_path / "back.npz", allow_pickle=False) as back:
        assert all(np.array_equal(back[name], array) for name, array in arrays.items())


def test_the_command_exports_to_google_and_back_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = random_arrays(representation=True)
    source, ours, back = save(tmp_path / "model.npz", arrays), tmp_path / "ours", tmp_path / "back.npz"
    assert main(["convert", str(source), str(ours)]) == 0
    assert main(["export", str(ours), str(tmp_path / "back.bin"), "--to", "google"]) == OutputError.exit_code
    assert "a checkpoint of google is a file, .npz" in capsys.readouterr().err
    assert main(["export", str(ours), str(back), "--to", "google"]) == 0
    with np.load(back, allow_pickle=False) as written:
        assert set(written) == set(arrays)
        assert all(written[name].tobytes() == array.tobytes() for name, array in arrays.items())
    again = tmp_path / "again.npz"
    assert main(["export", str(back), str(again), "--to", "google"]) == 0
    assert main(["verify", str(back), str(ours)]) == 0
    assert again.read_bytes() == back.read_bytes()


def test_bfloat16_exports_back_as_it_came(tmp_path: Path) -> None:
    halves = as_bfloat16(random_arrays())
    to_checkpoint(from_checkpoint(save(tmp_path / "model.npz", halves)).model, tmp_path / "back.npz", format="google")
    with np.load(tmp_path / "back.npz", allow_pickle=False) as back:
        assert all(back[name].dtype == "V2" and back[name].tobytes() == half.tobytes() for name, half in halves.items())


def test_a_model_of_ours_opens_again_from_the_file_it_was_written_to(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "position_resampling": "bilinear_align_corners"}
    config = tiny_config(**fields)
    model = randomize_(PlainViTForImageClassification(config)).eval()
    to_checkpoint(model, tmp_path / "model.npz", format="google")
    again = from_checkpoint(tmp_path / "model.npz", image_size=config.image_size).model
    pixel_values = torch.randn(2, 3, 24, 56)
    assert torch.equal(model(pixel_values).logits, again(pixel_values).logits)


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05"),
        ({"pooling": "mean"}, "pooling='mean'"),
        ({"pooling": "map", "num_attention_heads": 5}, "use_class_token=True with the map head"),
        ({"num_register_tokens": 2}, "num_register_tokens=2"),
        ({"position_embedding_type": "none"}, "position_embedding_type='none'"),
        ({"qkv_bias": False, "layer_scale_init_value": 0.1}, "qkv_bias=False.*layer_scale_init_value|layer_scale"),
    ],
)
def test_what_googles_code_cannot_express_is_refused(tmp_path: Path, fields: dict[str, Any], part: str) -> None:
    model = PlainViTForImageClassification(tiny_config(**{"hidden_act": "gelu_pytorch_tanh", **fields}))
    with pytest.raises(ExportError, match=f"(?s){part}"):
        to_checkpoint(model, tmp_path / "model.npz", format="google")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["flax", "big_vision stacked"])
def test_an_unknown_layout_is_refused_with_the_known_ones(tmp_path: Path, layout: str) -> None:
    model = PlainViTForImageClassification(tiny_config(hidden_act="gelu_pytorch_tanh"))
    with pytest.raises(ExportError, match="expected vision_transformer or big_vision, then any of scan"):
        to_checkpoint(model, tmp_path / "model.npz", format="google", layout=layout)


def test_positions_that_the_layout_adds_elsewhere_are_refused(tmp_path: Path) -> None:
    model = PlainViTForImageClassification(tiny_config(hidden_act="gelu_pytorch_tanh"))
    with pytest.raises(ExportError, match="position_embedding_on_prefix=True in pos_embedding"):
        to_checkpoint(model, tmp_path / "model.npz", format="google", layout="big_vision")


def test_there_is_no_live_module_of_google() -> None:
    model = PlainViTModel(
        PlainViTConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1)
    )
    with pytest.raises(ExportError, match="to_checkpoint"):
        to_module(model, "google")


def test_pixels_are_prepared_as_google_evaluates(tmp_path: Path) -> None:
    converted = from_checkpoint(save(tmp_path / "model.npz", random_arrays()))
    processor = converted.image_processor
    assert processor.size == {"height": 20, "width": 28}
    assert not processor.do_center_crop
    assert (tuple(processor.image_mean), tuple(processor.image_std)) == ((0.5,) * 3, (0.5,) * 3)
    assert "in [-1, 1]" in str(converted.report)
    simple = from_checkpoint(
        save(tmp_path / "simple.npz", random_arrays(**KINDS["simple_vit"][0])), image_size=140, pooling="mean"
    )
    # big_vision's `resize_small(256)|central_crop(224)`, here of 140 pixels
    assert simple.image_processor.size == {"shortest_edge": 160}
    assert simple.image_processor.crop_size == {"height": 140, "width": 140}
    told = from_checkpoint(tmp_path / "model.npz", image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6))
    assert tuple(told.image_processor.image_mean) == (0.1, 0.2, 0.3)
