"""The paper's hybrids: Google's `.npz` files against numpy, timm's live models and files against timm."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import _resnetv2

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.analysis.embeddings import patch_filters
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.errors import AnalysisError, ExportError
from tests.conftest import randomize_
from tests.sources.google_models import CLASSES, DEPTH, MLP, WIDTH, random_arrays, save
from tests.sources.sweep import record
from tests.sources.test_google import TOLERANCE, differences, source_record

# Units of each stage, gains of four axes as in the paper's own file, the grid (not square: the caller says the size).
STEMS: dict[str, tuple[tuple[int, ...], bool, tuple[int, int]]] = {
    "root_alone": ((), False, (3, 5)),
    "one_stage": ((2,), True, (2, 3)),
    "two_stages": ((1, 2), False, (2, 1)),
}


def written(path: Path, name: str) -> tuple[dict[str, np.ndarray], Path, dict[str, Any]]:
    """Return the arrays of a small hybrid, the file they were written to, and what the caller has to say."""
    stem, four, (h, w) = STEMS[name]
    arrays = random_arrays(stem=stem, gains_4d=four, grid=(h, w))
    stride = 8 if len(stem) == 2 else 4  # the projection's kernel is 1 x 2
    return arrays, save(path / f"{name}.npz", arrays), {"image_size": (stride * h, 2 * stride * w)}


@pytest.mark.parametrize("name", STEMS)
def test_an_npz_gives_the_numbers_of_the_published_equations(tmp_path: Path, name: str) -> None:
    arrays, path, hints = written(tmp_path, name)
    model = from_checkpoint(path, **hints).model
    assert model.config.stem_depths == STEMS[name][0]
    assert (model.config.patch_projection, model.config.stem_style) == ("resnet", "google")
    found = differences(model, arrays)
    assert max(found.values()) <= TOLERANCE, found
    record({**source_record(f"hybrid {name}"), "logits": max(found.values())})


@pytest.mark.parametrize("name", STEMS)
def test_timms_own_loader_reads_the_same_tensors(tmp_path: Path, name: str) -> None:
    stem, four, (h, w) = STEMS[name]
    path = save(tmp_path / "model.npz", random_arrays(stem=stem, gains_4d=four, grid=(h, w), shared_width=True))
    stride = 8 if len(stem) == 2 else 4
    size = (stride * h, 2 * stride * w)
    source = VisionTransformer(
        img_size=size, patch_size=(1, 2), embed_dim=WIDTH, depth=DEPTH, num_heads=5, mlp_ratio=MLP / WIDTH,
        num_classes=CLASSES, embed_layer=functools.partial(HybridEmbed, backbone=_resnetv2(stem)),
    ).eval()  # fmt: skip
    source.load_pretrained(str(path))
    theirs, ours = from_module(source), from_checkpoint(path, image_size=size, hidden_act="gelu").model
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[key]) for key, tensor in ours.state_dict().items())
    pixel_values = torch.randn(2, 3, *size)
    with torch.no_grad():
        assert torch.equal(theirs(pixel_values).logits, source(pixel_values))


def test_whose_epsilons_the_stem_has_shows(tmp_path: Path) -> None:
    arrays, path, hints = written(tmp_path, "one_stage")
    google = from_checkpoint(path, **hints).model
    config = PlainViTConfig.from_dict({**google.config.to_dict(), "stem_style": "timm"})
    timm_style = PlainViTForImageClassification(config).eval()
    timm_style.load_state_dict(google.state_dict())
    assert max(differences(timm_style, arrays).values()) > 10 * TOLERANCE


@pytest.mark.parametrize("name", STEMS)
def test_an_npz_exports_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    arrays, path, hints = written(tmp_path, name)
    converted = from_checkpoint(path, **hints)
    to_checkpoint(converted.model, tmp_path / "back.npz", format="google", layout=converted.report.layout)
    with np.load(tmp_path / "back.npz", allow_pickle=False) as back:
        assert set(back) == set(arrays)
        for key, array in arrays.items():
            assert (back[key].shape, back[key].tobytes()) == (array.shape, array.tobytes()), key
    record({**source_record(f"hybrid {name}"), "way_back_bit_exact": True})


@pytest.mark.parametrize(
    "target, part",
    [
        ("timm", "stem_style='google'"),
        ("torchvision", "patch_projection='resnet'"),
        ("vit_pytorch", "patch_projection = 'resnet'"),
    ],
)
def test_what_a_target_cannot_express_of_a_hybrid_is_refused(target: str, part: str) -> None:
    config = PlainViTConfig(
        patch_projection="resnet", patch_size=4, image_size=8, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=12, layer_norm_eps=1e-5 if target == "vit_pytorch" else 1e-6,
        qkv_bias=target != "vit_pytorch", patch_post_norm=target == "vit_pytorch",
    )  # fmt: skip
    with pytest.raises(ExportError, match=part):
        to_module(PlainViTForImageClassification(config), target)


def test_fresh_units_of_googles_code_begin_as_their_shortcuts() -> None:
    config = PlainViTConfig(
        patch_projection="resnet", stem_depths=[1, 1], patch_size=8, image_size=8, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=12, initialization="google",
    )  # fmt: skip
    stages = PlainViTForImageClassification(config).vit.embeddings.patch_embeddings.stages
    assert not any(unit.norm3.weight.any() for stage in stages for unit in stage)
    assert all((unit.norm2.weight == 1).all() for stage in stages for unit in stage)


def test_a_projection_that_reads_no_pixels_has_no_patch_filters() -> None:
    config = PlainViTConfig(
        patch_projection="resnet", patch_size=4, image_size=8, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=12,
    )  # fmt: skip
    with pytest.raises(AnalysisError, match="features of a ResNet"):
        patch_filters(PlainViTForImageClassification(config))


def test_a_hybrid_comes_back_from_its_own_folder(tmp_path: Path) -> None:
    config = PlainViTConfig(
        patch_projection="resnet", stem_depths=[1, 1], patch_size=(8, 16), image_size=(16, 48), hidden_size=8,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, stem_style="timm", num_labels=3,
    )  # fmt: skip
    model = randomize_(PlainViTForImageClassification(config)).eval()
    model.save_pretrained(tmp_path)
    again = PlainViTForImageClassification.from_pretrained(tmp_path)
    pixel_values = torch.randn(2, 3, 16, 48)
    assert torch.equal(model(pixel_values).logits, again(pixel_values).logits)
    assert (again.config.stem_depths, again.config.stem_style) == ((1, 1), "timm")
