"""torchvision's Vision Transformer: live, in files with current and earlier names, and exported."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer, ViT_B_16_Weights

from plain_vit import PlainViTForImageClassification, PlainViTModel
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.sources.torchvision.source import TORCHVISION, architectures
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError
from tests.conftest import randomize_
from tests.sources.sweep import record
from tests.tiny import difference, tiny_config

SIZES: dict[str, Any] = {"image_size": 40, "patch_size": 8, "num_layers": 3, "num_heads": 7, "hidden_dim": 56,
                         "mlp_dim": 70, "num_classes": 11}  # fmt: skip
SAID: dict[str, Any] = {"num_attention_heads": 7, "layer_norm_eps": 1e-6}  # settings that no tensor of `tiny` shows
TOLERANCE = 1e-5


def tiny(**arguments: Any) -> Any:
    """Return torchvision's model at a small geometry, in evaluation mode, with random parameters."""
    return randomize_(VisionTransformer(**{**SIZES, **arguments})).eval()


def pixels(size: int = 40) -> torch.Tensor:
    """Return normalised pixels."""
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def output(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the logits, or the features of a model without a classifier."""
    with torch.no_grad():
        outputs = model(pixel_values)
    if isinstance(outputs, torch.Tensor):
        return outputs
    return outputs.logits if "logits" in outputs else outputs.pooler_output


def source_record(representation_size: int | None) -> dict[str, str]:
    """Return the fields that identify the source in the table of the docs."""
    head = "" if representation_size is None else " with a representation layer"
    versions = {"torchvision": torchvision.__version__, "torch": torch.__version__}
    return {"source": f"torchvision VisionTransformer{head}", **versions}


@pytest.mark.parametrize("representation_size", [None, 30])
def test_every_block_and_the_logits_are_torchvisions(representation_size: int | None) -> None:
    module = tiny(representation_size=representation_size)
    model = from_module(module)
    tokens: list[torch.Tensor] = []
    for block in module.encoder.layers:
        block.register_forward_hook(lambda _, args, result: tokens.append(result))
    # Without gradients torchvision's attention is one native operation; with gradients it has our operations.
    theirs = module(pixels())
    ours = model(pixels(), output_hidden_states=True)
    blocks = [difference(mine, other) for mine, other in zip(ours.hidden_states[1:], tokens, strict=True)]
    assert max(blocks) == 0.0
    assert difference(ours.logits, theirs) == 0.0
    native = difference(output(model, pixels()), output(module, pixels()))
    assert native <= TOLERANCE
    record({**source_record(representation_size), "logits": difference(ours.logits, theirs), "blocks": max(blocks),
            "fused": native})  # fmt: skip


def test_a_file_with_a_representation_alone_has_no_classifier(tmp_path: Path) -> None:
    module = tiny(representation_size=30)
    tensors = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith("heads.head")}
    torch.save(tensors, tmp_path / "vit.pth")
    model = from_checkpoint(tmp_path / "vit.pth", **SAID).model
    module.heads.head = nn.Identity()
    assert difference(output(model, pixels()), output(module, pixels())) <= TOLERANCE


@pytest.mark.parametrize("representation_size", [None, 30])
def test_every_tensor_exports_back_bit_for_bit(representation_size: int | None) -> None:
    module = tiny(representation_size=representation_size, norm_layer=partial(nn.LayerNorm, eps=1e-5))
    model = from_module(module)
    assert model.config.layer_norm_eps == 1e-5
    again = to_module(model, "torchvision")
    assert repr(again) == repr(module)
    for (name, tensor), (other, twin) in zip(module.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(tensor, twin)
    record({**source_record(representation_size), "way_back_bit_exact": True})


@pytest.mark.parametrize("name", architectures())
def test_a_builder_of_torchvision_has_our_shapes_and_count(name: str) -> None:
    with torch.device("meta"):
        module = getattr(torchvision.models, name)()
        model = from_module(module)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in module.parameters())
    patch_size, width, depth, heads, mlp_width = architectures()[name]
    config = model.config
    assert (config.patch_size, config.hidden_size, config.num_hidden_layers) == (patch_size, width, depth)
    assert (config.num_attention_heads, config.intermediate_size, config.layer_norm_eps) == (heads, mlp_width, 1e-6)


def _linear(module: Any) -> None:
    module.heads = nn.Linear(56, 5)


def _linear_inside(module: Any) -> None:
    module.heads.head = nn.Linear(56, 5)


def _dropout_before(module: Any) -> None:
    module.heads = nn.Sequential(nn.Dropout(0.25), nn.Linear(56, 5))


def _nothing(module: Any) -> None:
    module.heads = nn.Identity()


@pytest.mark.parametrize("exchange", [_linear, _linear_inside, _dropout_before, _nothing])
def test_an_exchanged_head_is_read(exchange: Callable[[Any], None], tmp_path: Path) -> None:
    module = tiny()
    exchange(module)
    randomize_(module, seed=4).eval()
    model = from_module(module)
    assert isinstance(model, PlainViTModel if exchange is _nothing else PlainViTForImageClassification)
    assert model.config.classifier_dropout_prob == (0.25 if exchange is _dropout_before else 0.0)
    assert difference(output(model, pixels()), output(module, pixels())) <= TOLERANCE
    torch.save(module.state_dict(), tmp_path / "tuned.pth")
    opened = from_checkpoint(tmp_path / "tuned.pth", **SAID, verify=True)
    assert difference(output(opened.model, pixels()), output(module, pixels())) <= TOLERANCE
    assert opened.report.differences is not None


def _two_layers(module: Any) -> None:
    module.heads = nn.Sequential(nn.Linear(56, 20), nn.ReLU(), nn.Linear(20, 5))


def _other_norm(module: Any) -> None:
    module.encoder.layers[1].ln_2.eps = 1e-3


def _other_activation(module: Any) -> None:
    module.encoder.layers[2].mlp[1] = nn.ReLU()


def _attention_of_its_own(module: Any) -> None:
    module.encoder.layers[0].self_attention = nn.MultiheadAttention(56, 7, add_bias_kv=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_two_layers, "heads.1 is a torch.nn.modules.activation.ReLU"),
        (_other_norm, "ln_2.eps is 0.001"),
        (_other_activation, "mlp.1.class is torch.nn.modules.activation.ReLU"),
        (_attention_of_its_own, "self_attention.bias_k"),
    ],
)
def test_a_part_that_plain_vit_does_not_know_is_named(change: Callable[[Any], None], named: str) -> None:
    module = tiny()
    change(module)
    with pytest.raises(ExportError) as caught:
        from_module(module)
    assert named in str(caught.value)


def test_a_convolutional_stem_is_refused() -> None:
    module = tiny(conv_stem_configs=[ConvStemConfig(8, 8, 8)])
    with pytest.raises(ExportError, match="convolutional stem"):
        from_module(module)


@pytest.mark.parametrize(
    "change",
    [
        {"image_size": (16, 24)},
        {"num_channels": 1},
        {"pooling": "mean"},
        {"qkv_bias": False},
        {"hidden_act": "quick_gelu"},
        {"layer_scale_init_value": 0.1},
        {"num_register_tokens": 2},
        {"attention_scale": 0.3},
        {"head_dim": 12},
        {"embedding_dropout_prob": 0.1},
        {"classifier_dropout_prob": 0.1},
        {"drop_path_rate": 0.1},
    ],
    ids=str,
)
def test_what_torchvision_cannot_express_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(**{"image_size": 24, "patch_size": 8, **change})
    with pytest.raises(ExportError) as caught:
        TORCHVISION.build_module(config, None)
    assert next(iter(change)) in str(caught.value) or "heads of 12" in str(caught.value) or "size" in str(caught.value)
    with pytest.raises(ExportError):
        to_checkpoint(PlainViTForImageClassification(config), tmp_path / "vit.pth", format="torchvision")


def test_training_settings_are_read_and_given_back() -> None:
    module = tiny(dropout=0.1, attention_dropout=0.2).train()
    model = from_module(module)
    assert (model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob) == (0.1, 0.2)
    assert model.training
    assert to_module(model, "torchvision").encoder.layers[1].self_attention.dropout == 0.2


# Files


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_opens_and_exports_back(suffix: str, tmp_path: Path) -> None:
    module = tiny(representation_size=30)
    torch.save(module.state_dict(), tmp_path / "theirs.pth")
    converted = from_checkpoint(tmp_path / "theirs.pth", **SAID)
    assert difference(output(converted.model, pixels()), output(module, pixels())) <= TOLERANCE
    target = tmp_path / f"ours{suffix}"
    to_checkpoint(converted.model, target, format="torchvision")
    state = load_file(target) if suffix == ".safetensors" else torch.load(target, weights_only=True)
    assert state.keys() == module.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())


def test_earlier_names_of_the_mlp_are_read(tmp_path: Path) -> None:
    module = tiny()
    old = {name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
           for name, tensor in module.state_dict().items()}  # fmt: skip
    torch.save(old, tmp_path / "old.pth")
    converted = from_checkpoint(tmp_path / "old.pth", **SAID, verify=True)
    assert difference(output(converted.model, pixels()), output(module, pixels())) <= TOLERANCE
    assert converted.report.differences is not None


@pytest.mark.parametrize("name", architectures())
def test_a_named_architecture_settles_heads_and_epsilon_and_its_shapes_alone_do_not(name: str) -> None:
    with torch.device("meta"):
        tensors = getattr(torchvision.models, name)().state_dict()
    with pytest.raises(AmbiguousCheckpointError) as caught:
        TORCHVISION.describe_checkpoint(tensors, {}, Hints())
    assert caught.value.candidates == {"architecture": (name,)}
    assert set(caught.value.otherwise) == {"num_attention_heads", "layer_norm_eps"}
    described = TORCHVISION.describe_checkpoint(tensors, {}, Hints(architecture=name))
    assert described.config.num_attention_heads == architectures()[name][3]
    assert {"num_attention_heads", "layer_norm_eps", "hidden_act", "attention_scale"} <= {
        inference.field for inference in described.inferences
    }
    other = "vit_l_32" if name == "vit_b_16" else "vit_b_16"
    with pytest.raises(CheckpointError, match=f"and {other} is of"):
        TORCHVISION.describe_checkpoint(tensors, {}, Hints(architecture=other))


@pytest.mark.parametrize("heads, eps", [(4, 1e-6), (2, 1e-5), (1, 1e-3)])
def test_heads_and_epsilon_are_asked_for_at_once_and_settled_by_hints_or_by_logits(
    heads: int, eps: float, tmp_path: Path
) -> None:
    module = tiny(hidden_dim=128, num_heads=heads, norm_layer=partial(nn.LayerNorm, eps=eps))
    torch.save(module.state_dict(), tmp_path / "vit.pth")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(tmp_path / "vit.pth")
    assert caught.value.candidates == {
        "num_attention_heads": (4, 2, 8, 1, 16, 32, 64, 128),
        "layer_norm_eps": (1e-6, 1e-5),
    }
    assert f"plain-vit convert {tmp_path}/vit.pth OUT --num-attention-heads 4 --layer-norm-eps 1e-06" in str(
        caught.value
    )
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(tmp_path / "vit.pth", num_attention_heads=heads)
    assert set(caught.value.candidates) == {"layer_norm_eps"}
    # Small weights and nearly constant images, so that the epsilon has an effect.
    images = pixels() * 1e-3
    hints = {"num_attention_heads": heads, "layer_norm_eps": eps}
    opened = from_checkpoint(tmp_path / "vit.pth", **hints)
    assert difference(output(opened.model, images), output(module, images)) <= TOLERANCE
    if eps != 1e-3:
        found = from_checkpoint(tmp_path / "vit.pth", reference=(images, output(module, images))).report.config
        assert (found.num_attention_heads, found.layer_norm_eps) == (heads, eps)


@pytest.mark.parametrize("weights", ["ViT_B_16_Weights.IMAGENET1K_V1", "ViT_H_14_Weights.IMAGENET1K_SWAG_LINEAR_V1"])
def test_the_classes_and_pixels_of_a_published_file_are_torchvisions(weights: str) -> None:
    published = torchvision.models.get_weight(weights)
    name, builder = Path(published.url).stem, weights.split("_Weights")[0].lower()
    with torch.device("meta"):
        tensors = getattr(torchvision.models, builder)().state_dict()
        tuned = getattr(torchvision.models, builder)(num_classes=999).state_dict()
    described = TORCHVISION.describe_checkpoint(tensors, {}, Hints(architecture=name))
    assert list(described.config.id2label.values()) == published.meta["categories"]
    assert any("id2label = 'the classes of imagenet-1k'" in str(inference) for inference in described.inferences)
    for other, architecture in ((tuned, name), (tensors, builder)):
        # A thousand classes are not necessarily ImageNet's.
        config = TORCHVISION.describe_checkpoint(other, {}, Hints(architecture=architecture)).config
        assert config.id2label[1] == "LABEL_1"


@pytest.mark.slow
def test_a_published_file_is_known_by_its_hash_and_another_of_its_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures(), "vit_b_32", (32, 128, 2, 4, 80))
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "hidden_dim": 128, "mlp_dim": 80}
    build = partial(VisionTransformer, image_size=224, patch_size=32, **sizes)
    monkeypatch.setattr(torchvision.models, "vit_b_32", build)
    module = randomize_(build()).eval()
    torch.save(module.state_dict(), tmp_path / "vit.pth")
    digest = hashlib.sha256((tmp_path / "vit.pth").read_bytes()).hexdigest()[:8]
    path = (tmp_path / "vit.pth").rename(tmp_path / "vit_b_32-d86f8d99.pth")
    with pytest.raises(CheckpointError, match=f"begins with {digest} instead of d86f8d99"):
        from_checkpoint(path)
    opened = from_checkpoint(path, architecture="vit_b_32", verify=True)
    assert opened.report.is_independent
    assert difference(output(opened.model, pixels(224)), output(module, pixels(224))) <= TOLERANCE
    ours = path.rename(tmp_path / f"vit_b_32-{digest}.pth")
    monkeypatch.setattr(type(TORCHVISION), "published_files", {ours.stem: "vit_b_32-d86f8d99"})
    report = from_checkpoint(ours).report
    assert f"architecture = 'vit_b_32-d86f8d99', from the SHA-256 of the published file {ours.stem}" in str(report)
    assert report.config.id2label[1] == "goldfish"


def test_every_published_file_of_torchvision_is_known() -> None:
    kinds = [torchvision.models.get_model_weights(name) for name in architectures()]
    names = [Path(weights.url).stem for kind in kinds for weights in kind]
    assert sorted(TORCHVISION.published_files) == sorted(names)
    assert len(names) == 10


def test_a_missing_and_a_strange_tensor_are_both_named(tmp_path: Path) -> None:
    state = tiny().state_dict()
    del state["encoder.ln.weight"]
    torch.save(state | {"encoder.layers.encoder_layer_1.gamma": torch.ones(56)}, tmp_path / "vit.pth")
    with pytest.raises(MappingError) as caught:
        from_checkpoint(tmp_path / "vit.pth", **SAID)
    assert "encoder.ln.weight" in str(caught.value)
    assert "encoder_layer_1.gamma" in str(caught.value)


def test_a_table_of_no_square_grid_is_refused(tmp_path: Path) -> None:
    state = tiny().state_dict() | {"encoder.pos_embedding": torch.ones(1, 25, 56)}
    torch.save(state, tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match="square"):
        from_checkpoint(tmp_path / "vit.pth", **SAID)


def test_pixels_of_a_published_file_are_prepared_as_torchvision_does(tmp_path: Path) -> None:
    torch.save(tiny(image_size=224, patch_size=32).state_dict(), tmp_path / "vit.pth")
    config = tiny_config(image_size=224, patch_size=32)
    prepare: Any = TORCHVISION.image_processor(config, {}, {}, Hints(architecture="vit_b_16-c867db91"))[0]
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (301, 277, 3), dtype=np.uint8))
    theirs = ViT_B_16_Weights.IMAGENET1K_V1.transforms()(image)
    ours = prepare(image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(ours, theirs)
    assert "architecture=" in str(from_checkpoint(tmp_path / "vit.pth", **SAID).report)
