"""Models of generated configs, exported to each package and opened again: equal outputs, or an ExportError.

Settings that a file does not contain are answered from the config. For each target, one or two random settings are
changed in a config that it can represent, and sizes are drawn so that some coincide.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from transformers import AutoImageProcessor
from transformers.image_utils import PILImageResampling

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor, PlainViTModel
from plain_vit.conversion import to_checkpoint
from plain_vit.conversion.sources.torchvision.source import TORCHVISION
from plain_vit.errors import ExportError
from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.truthful import TOLERANCE, open_truthfully
from tests.tiny import VARIATIONS, difference, tiny_config

TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "timm": ("", {}),
    "transformers": ("", {}),
    "vit_pytorch": (".pt", {
        "patch_projection": "linear", "patch_pre_norm": True, "patch_post_norm": True, "layer_norm_eps": 1e-5,
        "qkv_bias": False, "position_resampling": "truncate",
    }),
    "torchvision": (".pth", {"image_size": 28, "patch_size": 14, "position_resampling": "bicubic_align_corners"}),
    "google": (".npz", {"hidden_act": "gelu_pytorch_tanh", "position_resampling": "bilinear_align_corners"}),
    "gguf": (".gguf", {
        "num_labels": 0, "image_size": 28, "patch_size": 14, "hidden_act": "quick_gelu", "final_norm": "none",
        "position_resampling": "bicubic",
    }),
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
    """Return a config close to one that a target can represent, or None if the changes contradict each other."""
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
def outputs_of(model: Any, config: PlainViTConfig, more: int = 0) -> Any:
    """Return the logits of three images, or the pooled features of a model without a classifier.

    Args:
        model: The model.
        config: Its config.
        more: Additional rows and columns of patches. The result is None if a model does not accept them.
    """
    height, width = (side + more * patch for side, patch in zip(config.image_shape, config.patch_shape, strict=True))
    pixels = torch.randn(3, config.num_channels, height, width, generator=torch.Generator().manual_seed(0))
    pixels[1] *= 1e-3
    try:
        outputs = model.eval()(pixels)
    except ValueError:
        if more:
            return None
        raise
    return outputs.logits if config.num_labels and "logits" in outputs else _encoder(model)(pixels).pooler_output


def _encoder(model: Any) -> Any:
    return getattr(model, "vit", model)


def check(target: str, seed: int, folder: Path) -> str:
    """Write and open a model, and return the outcome."""
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
        written = to_checkpoint(model, path, format=target, image_processor=processor, force=True)
    except ExportError as error:
        if "cannot be opened again" in str(error):
            raise
        return "refused"
    hints: dict[str, Any] = {} if path.is_dir() else {"image_mean": statistics, "image_std": statistics}
    outcome = open_truthfully(path, lambda name, _: answered(config, name), **hints)
    assert outcome.converted is not None, f"{target}, seed {seed}: {outcome.refusal} after {outcome.answers}"
    ours, theirs = outputs_of(model, config), outputs_of(outcome.converted.model, config)
    assert ours.shape == theirs.shape, f"{target}, seed {seed}"
    off = difference(theirs, ours)  # over all three images, as a single logit may be near 0
    assert off <= TOLERANCE, f"{target}, seed {seed}: off by {off:.1e}"
    larger = [outputs_of(each, config, 1) for each in (model, outcome.converted.model)]
    resampled = any("position_resampling" in line for line in written.changed)
    if None in larger:
        assert (larger[0] is None) == (larger[1] is None) or resampled, f"{target}, seed {seed}"
    elif not resampled:
        off = difference(larger[1], larger[0])
        assert off <= TOLERANCE, f"{target}, seed {seed}: off by {off:.1e} at a larger size, {written.changed}"
    return "equal, but for other sizes" if resampled else "equal"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_opens_with_the_same_numbers(target: str, tmp_path: Path) -> None:
    became = [check(target, seed, tmp_path) for seed in range(draws(16, nightly=300))]
    assert sum(each.startswith("equal") for each in became) >= len(became) / 5, became


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


def test_what_a_package_changes_or_does_not_store_is_said(tmp_path: Path) -> None:
    config = tiny_config(**TARGETS["torchvision"][1] | {"position_resampling": "bilinear", "num_labels": 2})
    config.id2label = {0: "cat", 1: "dog"}
    model = PlainViTForImageClassification(config)
    processor = PlainViTImageProcessor(size={"height": 28, "width": 28})
    written = to_checkpoint(model, tmp_path / "model.pth", format="torchvision", image_processor=processor)
    assert written.changed == [
        "position_resampling is 'bilinear' and 'bicubic_align_corners'",
        "the names of the classes are not stored",
        "the image processing is not stored",
    ]
    assert "\n  opened again: the names of the classes are not stored\n" in str(written)
    config.position_resampling = "bicubic_antialias"
    assert to_checkpoint(model, tmp_path / "timm", format="timm", image_processor=processor).changed == []


def test_a_filter_that_one_backend_of_transformers_lacks_is_written_and_said(tmp_path: Path) -> None:
    processor = PlainViTImageProcessor(resample=PILImageResampling.BOX)
    model = PlainViTForImageClassification(tiny_config())
    written = to_checkpoint(model, tmp_path / "out", format="transformers", image_processor=processor)
    assert any("one of them refuses an image of 300 x 200 pixels" in line for line in written.changed)
    image = Image.effect_noise((50, 70), 40).convert("RGB")
    opened = AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    prepared = (torch.as_tensor(each(image, return_tensors="pt")["pixel_values"]) for each in (processor, opened))
    assert torch.equal(*prepared)


def test_what_would_not_open_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = type(TORCHVISION).write

    def forgetful(self: Any, config: PlainViTConfig, tensors: dict[str, Any], *others: Any) -> None:
        write(self, config, {name: tensor.new_zeros(3, 5, 7) for name, tensor in tensors.items()}, *others)

    monkeypatch.setattr(type(TORCHVISION), "write", forgetful)
    model = PlainViTForImageClassification(tiny_config(**TARGETS["torchvision"][1]))
    with pytest.raises(ExportError, match="the exported checkpoint cannot be opened again"):
        to_checkpoint(model, tmp_path / "model.pth", format="torchvision")
    assert not [*tmp_path.glob("model*")]
