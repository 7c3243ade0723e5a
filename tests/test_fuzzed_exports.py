"""Models of generated configs, written for each package and opened again: the same numbers, or an ExportError before.

What a file does not say is answered from the config. Each target has a config that it can represent; one or two random
settings are changed in it, and sizes are drawn so that some coincide.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor, PlainViTModel
from plain_vit.conversion import to_checkpoint
from plain_vit.errors import ExportError
from tests.conftest import randomize_
from tests.tiny import VARIATIONS, difference, tiny_config
from tests.truthful import TOLERANCE, open_truthfully

TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "timm": ("", {}),
    "transformers": ("", {}),
    "vit_pytorch": (".pt", {
        "patch_projection": "linear", "patch_pre_norm": True, "patch_post_norm": True, "layer_norm_eps": 1e-5,
        "qkv_bias": False, "position_resampling": "truncate",
    }),
    "torchvision": (".pth", {"image_size": 28, "patch_size": 14, "position_resampling": "bicubic_align_corners"}),
    "google": (".npz", {"hidden_act": "gelu_pytorch_tanh", "position_resampling": "bilinear_align_corners"}),
    "open_clip": (".pt", {
        "num_labels": 0, "image_size": 28, "patch_size": 14, "embedding_norm": True, "patch_bias": False,
        "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "final_norm": "after_pooling", "representation_size": 20,
        "representation_act": "linear", "representation_bias": False,
    }),
}  # fmt: skip
SMALL_CHANGES: tuple[dict[str, Any], ...] = (
    {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "quick_gelu"}, {"hidden_act": "relu"},
    {"layer_norm_eps": 1e-5}, {"layer_norm_eps": 1e-12}, {"num_channels": 1}, {"num_labels": 0}, {"num_labels": 1},
    {"num_labels": 40}, {"intermediate_size": 40}, {"intermediate_size": 41}, {"num_attention_heads": 1},
    {"num_attention_heads": 8}, {"head_dim": 8}, {"head_dim": 16}, {"image_size": 28, "patch_size": 28},
    {"image_size": (28, 56), "patch_size": 14}, {"image_size": 30, "patch_size": 14, "drop_partial_patches": True},
    {"use_class_token": False, "pooling": "mean"}, {"use_class_token": False, "pooling": "map"}, {"qkv_bias": False},
    {"position_embedding_on_prefix": False}, {"attention_scale": 0.1}, {"classifier_bias": False},
    {"hidden_dropout_prob": 0.1}, {"drop_path_rate": 0.1}, {"num_hidden_layers": 11}, {"num_hidden_layers": 0},
)  # fmt: skip


def drawn_config(draw: random.Random, base: dict[str, Any]) -> PlainViTConfig | None:
    """Return a config near one that a target can represent; None where the changes contradict each other."""
    fields = {"num_hidden_layers": draw.choice([1, 2, 3]), **base}
    for _ in range(draw.choice([0, 1, 1, 2])):
        fields |= VARIATIONS[draw.choice(sorted(VARIATIONS))] if draw.random() < 0.4 else draw.choice(SMALL_CHANGES)
    try:
        return tiny_config(**fields)
    except (ValueError, StrictDataclassError):
        return None


def answered(config: PlainViTConfig, name: str) -> object | None:
    """Return the true answer to a question about a file."""
    head_dim = config.attention_shape[1]
    said = {
        "image_size": config.image_shape,
        "patch_size": config.patch_shape,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
    }
    return said.get(name, getattr(config, name, None))


@torch.no_grad()
def outputs_of(model: Any, config: PlainViTConfig) -> torch.Tensor:
    """Return the logits, or pooled features of a model without a classifier, of three images of the native size."""
    pixels = torch.randn(3, config.num_channels, *config.image_shape, generator=torch.Generator().manual_seed(0))
    pixels[1] *= 1e-3
    outputs = model.eval()(pixels)
    return outputs.logits if config.num_labels and "logits" in outputs else _encoder(model)(pixels).pooler_output


def _encoder(model: Any) -> Any:
    return getattr(model, "vit", model)


def check(target: str, seed: int, folder: Path) -> str:
    """Write and open one model, and return what became of it."""
    draw = random.Random(f"{target} {seed}")
    suffix, base = TARGETS[target]
    config = drawn_config(draw, base)
    if config is None:
        return "no config"
    has_head = config.num_labels > 0 and draw.random() < 0.8
    model: Any = randomize_((PlainViTForImageClassification if has_head else PlainViTModel)(config), seed)
    if not has_head:
        config.num_labels = 0
    path, statistics = folder / f"{target}{suffix}", [0.5] * config.num_channels
    height, width = config.image_shape
    processor = PlainViTImageProcessor(
        size={"height": height, "width": width}, image_mean=statistics, image_std=statistics
    )
    if path.is_dir():
        shutil.rmtree(path)
    try:
        to_checkpoint(model, path, format=target, image_processor=processor, force=True)
    except ExportError:
        return "refused"
    hints: dict[str, Any] = {} if path.is_dir() else {"image_mean": statistics, "image_std": statistics}
    outcome = open_truthfully(path, lambda name, _: answered(config, name), **hints)
    assert outcome.converted is not None, f"{target}, seed {seed}: {outcome.refusal} after {outcome.answers}"
    ours, theirs = outputs_of(model, config), outputs_of(outcome.converted.model, config)
    assert ours.shape == theirs.shape, f"{target}, seed {seed}"
    off = max(difference(*pair) for pair in zip(theirs, ours, strict=True))
    assert off <= TOLERANCE, f"{target}, seed {seed}: off by {off:.1e}"
    return "equal"


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_opens_with_the_same_numbers(target: str, tmp_path: Path) -> None:
    became = [check(target, seed, tmp_path) for seed in range(25)]
    assert became.count("equal") >= 5, became


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_of_many_models_opens_with_the_same_numbers(target: str, tmp_path: Path) -> None:
    became = [check(target, seed, tmp_path) for seed in range(1000, 1300)]
    assert became.count("equal") >= 60, became


@pytest.mark.parametrize(
    ("target", "fields", "says"),
    [
        *((target, {"num_hidden_layers": 0}, "has no layers") for target in TARGETS if target != "transformers"),
        *(
            ("timm", {"pooling": pooling, "use_class_token": False}, f"  - pooling='{pooling}'")
            for pooling in ("query", "query_block", "query_attention")
        ),
        ("timm", VARIATIONS["class_attention"], "  - pooling='class_attention'"),
        ("google", {"image_size": 30, "patch_size": 14, "drop_partial_patches": True}, "not a multiple of patch_size"),
        ("torchvision", {"image_size": 30, "patch_size": 14, "drop_partial_patches": True}, "not a multiple of patch"),
        ("open_clip", {"num_channels": 1}, "num_channels=1 .there it would be 3."),
    ],
)
def test_what_a_package_cannot_hold_is_refused(target: str, fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    suffix, base = TARGETS[target]
    config = tiny_config(**{**base, **fields})
    model: Any = (PlainViTForImageClassification if config.num_labels else PlainViTModel)(config)
    with pytest.raises(ExportError, match=says):
        to_checkpoint(model, tmp_path / f"model{suffix}", format=target)
    assert not list(tmp_path.iterdir())
