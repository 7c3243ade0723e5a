"""The paper's hybrids: Google's `.npz` files compared with numpy, timm's live models and files with timm."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import _resnetv2

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.analysis.embeddings import patch_filters
from plain_vit.conversion import from_checkpoint, from_module, to_module
from plain_vit.errors import AnalysisError, ExportError
from tests.conftest import randomize_
from tests.sources.google_models import CLASSES, DEPTH, MLP, WIDTH, random_arrays, save
from tests.sources.test_google import KINDS, TOLERANCE, differences

SMALL: dict[str, Any] = {"resnet_stem": {}, "hidden_size": 8, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "intermediate_size": 12}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "hybrid" in kind])
def test_timms_own_loader_reads_the_same_tensors(tmp_path: Path, kind: str) -> None:
    fields, _, hints = KINDS[kind]
    path, size = save(tmp_path / "model.npz", random_arrays(**fields, shared_width=True)), hints["image_size"]
    source = VisionTransformer(
        img_size=size, patch_size=(1, 2), embed_dim=WIDTH, depth=DEPTH, num_heads=5, mlp_ratio=MLP / WIDTH,
        num_classes=CLASSES, embed_layer=functools.partial(HybridEmbed, backbone=_resnetv2(fields["stem"])),
    ).eval()  # fmt: skip
    source.load_pretrained(str(path))
    theirs, ours = from_module(source), from_checkpoint(path, image_size=size, hidden_act="gelu").model
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[key]) for key, tensor in ours.state_dict().items())
    pixel_values = torch.randn(2, 3, *size)
    with torch.no_grad():
        assert torch.equal(theirs(pixel_values).logits, source(pixel_values))


def test_whose_epsilons_the_stem_has_shows(tmp_path: Path) -> None:
    fields, _, hints = KINDS["hybrid_one_stage"]
    arrays = random_arrays(**fields)
    google = from_checkpoint(save(tmp_path / "model.npz", arrays), **hints).model
    config = PlainViTConfig.from_dict(
        {**google.config.to_dict(), "resnet_stem": {**google.config.resnet_stem, "style": "timm"}}
    )
    timm_style = PlainViTForImageClassification(config).eval()
    timm_style.load_state_dict(google.state_dict())
    assert max(differences(timm_style, arrays).values()) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "target, part",
    [
        ("timm", "resnet_stem.style='google'"),
        ("torchvision", "resnet_stem={'depths': ()"),
        ("vit_pytorch", "resnet_stem = {'depths': ()"),
    ],
)
def test_what_a_target_cannot_express_of_a_hybrid_is_refused(target: str, part: str) -> None:
    config = PlainViTConfig(
        **SMALL, patch_size=4, image_size=8, layer_norm_eps=1e-5 if target == "vit_pytorch" else 1e-6,
        qkv_bias=target != "vit_pytorch", patch_post_norm=target == "vit_pytorch",
    )  # fmt: skip
    with pytest.raises(ExportError, match=re.escape(part)):
        to_module(PlainViTForImageClassification(config), target)


def test_fresh_units_of_googles_code_begin_as_their_shortcuts() -> None:
    config = PlainViTConfig(
        **{**SMALL, "resnet_stem": {"depths": [1, 1]}}, patch_size=8, image_size=8, initialization="google"
    )
    stages = PlainViTForImageClassification(config).vit.embeddings.patch_embeddings.stages
    assert not any(unit.norm3.weight.any() for stage in stages for unit in stage)
    assert all((unit.norm2.weight == 1).all() for stage in stages for unit in stage)


def test_a_projection_that_reads_no_pixels_has_no_patch_filters() -> None:
    config = PlainViTConfig(**SMALL, patch_size=4, image_size=8)
    with pytest.raises(AnalysisError, match="features of a ResNet"):
        patch_filters(PlainViTForImageClassification(config))


def test_a_hybrid_comes_back_from_its_own_folder(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"patch_size": (8, 16), "image_size": (16, 48), "num_labels": 3}
    config = PlainViTConfig(**{**SMALL, **sizes, "resnet_stem": {"depths": [1, 1], "style": "timm"}})
    model = randomize_(PlainViTForImageClassification(config)).eval()
    model.save_pretrained(tmp_path)
    again = PlainViTForImageClassification.from_pretrained(tmp_path)
    pixel_values = torch.randn(2, 3, 16, 48)
    assert torch.equal(model(pixel_values).logits, again(pixel_values).logits)
    assert again.config.resnet_stem == {"depths": (1, 1), "style": "timm"}
