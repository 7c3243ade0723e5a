"""Custom classifiers: a dense layer in a container is converted, other classifiers are refused or dropped."""

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import transformers
import vit_pytorch
from open_clip.timm_model import TimmModel
from timm.models import save_for_hf
from torch import nn

from plain_vit import PlainViTForImageClassification, PlainViTModel
from plain_vit.conversion import convert_checkpoint, from_checkpoint, from_module, to_checkpoint
from plain_vit.conversion.heads import dropout_of
from plain_vit.errors import CheckpointError, ExportError
from plain_vit_command import main
from tests.conftest import randomize_
from tests.peers import vit_pytorch_release
from tests.sources.test_torchvision import tiny as tiny_torchvision
from tests.sources.timm_models import tiny_timm
from tests.sources.transformers_models import tiny_transformers
from tests.tiny import difference, tiny_config

NAMES = ["ant", "bee", "cat", "dog"]
TOLERANCE = 1e-5  # torchvision's attention has a different order of operations


class Source(NamedTuple):
    """A model with a classifier: its maker, path of the classifier, image size, and hints for file and live module."""

    make: Callable[[], Any]
    place: str
    size: tuple[int, int]
    said: Mapping[str, Any] = {}
    said_live: Mapping[str, Any] = {}


def tiny_vit_pytorch(kind: Any = vit_pytorch.ViT, **sizes: Any) -> Any:
    """Return a model of vit-pytorch at a small geometry."""
    usual: dict[str, Any] = {"image_size": (15, 28), "patch_size": (5, 7), "num_classes": 11, "dim": 20, "depth": 3}
    return randomize_(kind(**{**usual, **sizes}, heads=3, mlp_dim=29, dim_head=10)).eval()


SIZES = {"image_size": (15, 28), "patch_size": (5, 7)}
SOURCES = {
    "timm": Source(lambda: tiny_timm("vit_tiny_patch16_224"), "head", (48, 80), {
        "num_attention_heads": 7, "attention_scale": "head_dim**-0.5", "layer_norm_eps": 1e-6, "hidden_act": "gelu",
        "pooling": "cls", "block_type": "sequential", "rope_type": "none", "image_size": (48, 80),
    }),
    "vit_pytorch": Source(tiny_vit_pytorch, "mlp_head", (15, 28), {"num_attention_heads": 3, **SIZES}, SIZES),
    "SimpleViT": Source(lambda: tiny_vit_pytorch(vit_pytorch.SimpleViT), "linear_head", (15, 28), {
        "num_attention_heads": 3, "layout": "simple_vit 1.4.1", **SIZES,
    }),
    "vit_pytorch of 2021": Source(
        lambda: tiny_vit_pytorch(vit_pytorch_release("0.19.6").ViT, image_size=25, patch_size=5),
        "mlp_head.1",
        (25, 25),
        {"num_attention_heads": 3, "image_size": 25, "patch_size": 5, "pooling": "cls", "layout": "vit 0.10.1"},
    ),
    "torchvision": Source(
        tiny_torchvision, "heads", (40, 40), {"num_attention_heads": 7, "layer_norm_eps": 1e-6},
    ),
    "torchvision, inside its heads": Source(
        tiny_torchvision, "heads.head", (40, 40), {"num_attention_heads": 7, "layer_norm_eps": 1e-6}
    ),
    "ViT": Source(lambda: tiny_transformers("ViTForImageClassification"), "classifier", (24, 56)),
    "DINOv2": Source(lambda: tiny_transformers("Dinov2ForImageClassification"), "classifier", (56, 56)),
}  # fmt: skip


def with_head(name: str, *layers: Callable[[int], nn.Module]) -> Any:
    """Return a model of a source with another classifier, whose layers are made for a number of features."""
    source = SOURCES[name]
    module = source.make()
    features = [part for part in module.get_submodule(source.place).modules() if isinstance(part, nn.Linear)][-1]
    head = randomize_(nn.Sequential(*(layer(features.in_features) for layer in layers)), seed=1)
    module.set_submodule(source.place, head)
    return module.eval()


def saved(name: str, module: Any, folder: Path) -> Path:
    """Save a model in its source's way."""
    if hasattr(module, "save_pretrained"):
        module.save_pretrained(folder / "model")
        return folder / "model"
    torch.save(module.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def pixels(name: str) -> torch.Tensor:
    return torch.randn(2, 3, *SOURCES[name].size, generator=torch.Generator().manual_seed(1))


def logits_of(module: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    outputs: Any = module(pixel_values)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def dropout(features: int) -> nn.Module:
    return nn.Dropout(0.3)


def dense(features: int) -> nn.Module:
    return nn.Linear(features, 4)


class Bias(nn.Module):
    """Adds a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + self.bias


# Heads that compute something other than a dense layer with a bias.
ODD: dict[str, tuple[Callable[[int], nn.Module], ...]] = {
    "two layers": (lambda n: nn.Linear(n, 9), lambda n: nn.ReLU(), lambda n: nn.Linear(9, 4)),
    "no bias, as a cosine": (lambda n: nn.Linear(n, 4, bias=False),),
    "a norm": (nn.LayerNorm, dense),
    "a bias of its own": (lambda n: nn.Linear(n, 4, bias=False), lambda n: Bias()),
    "statistics": (lambda n: nn.BatchNorm1d(n, affine=False), dense),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_dense_layer_after_a_dropout_opens_live_and_from_its_file(name: str, tmp_path: Path) -> None:
    module, pixel_values = with_head(name, dropout, dense), pixels(name)
    expected = logits_of(module, pixel_values)
    live = from_module(module, id2label=NAMES, **SOURCES[name].said_live)
    said = {**SOURCES[name].said, "id2label": NAMES}
    converted = from_checkpoint(saved(name, module, tmp_path), **said, verify=True)
    for model in (live, converted.model):
        assert isinstance(model, PlainViTForImageClassification)
        assert list(model.config.id2label.values()) == NAMES
        assert difference(logits_of(model, pixel_values), expected) <= TOLERANCE
    assert live.config.classifier_dropout_prob == 0.3
    assert not converted.report.is_independent
    (found,) = [one for one in converted.report.unproven if one.field == "head"]
    assert f"{SOURCES[name].place}.1" in found.source
    assert module.get_submodule(f"{SOURCES[name].place}.0").p == 0.3  # the source is unchanged


@pytest.mark.parametrize("name, odd", [*((name, "two layers") for name in SOURCES), *(("timm", odd) for odd in ODD)])
def test_another_head_is_refused_and_the_encoder_opens_without_it(name: str, odd: str, tmp_path: Path) -> None:
    module, pixel_values, said = with_head(name, *ODD[odd]), pixels(name), SOURCES[name].said
    path = saved(name, module, tmp_path)
    with pytest.raises(CheckpointError, match=r"drop=\('head',\) in Python, --drop head on the command line"):
        from_checkpoint(path, **said)
    with pytest.raises(ExportError, match=r"drop=\('head',\) in Python, --drop head on the command line"):
        from_module(module, **SOURCES[name].said_live)
    converted = from_checkpoint(path, **said, drop=("head",), verify=True)
    head = module.get_submodule(SOURCES[name].place)
    expected = logits_of(module, pixel_values)
    for model in (from_module(module, drop=("head",), **SOURCES[name].said_live), converted.model):
        assert isinstance(model, PlainViTModel)
        outputs = model(pixel_values)
        got = head(outputs.pooler_output)
        assert difference(got, expected) <= TOLERANCE
    place = SOURCES[name].place
    assert {key for key, why in converted.report.ignored.items() if "drop= leaves out" in why} == {
        key for key in module.state_dict() if key.startswith(f"{place}.")
    }
    assert torch.equal(logits_of(module, pixel_values), expected)  # the source is unchanged


def test_a_file_of_a_head_asks_for_nothing_else_first(tmp_path: Path) -> None:
    path = saved("timm", with_head("timm", *ODD["two layers"]), tmp_path)
    with pytest.raises(CheckpointError, match="head is not one dense layer with a bias, it has .*'head.0.weight'"):
        from_checkpoint(path)


def test_a_replaced_head_of_another_number_of_classes_opens_live() -> None:
    module = tiny_timm("vit_tiny_patch16_224")
    module.head = randomize_(nn.Linear(56, 4))
    assert difference(logits_of(from_module(module), pixels("timm")), module(pixels("timm"))) == 0.0
    assert module.num_classes == 11


def test_dropouts_in_a_row_drop_as_one() -> None:
    module = with_head("timm", dropout, lambda n: nn.Dropout(0.5), dense)
    module.head_drop = nn.Dropout(0.2).eval()
    assert from_module(module).config.classifier_dropout_prob == pytest.approx(1 - 0.8 * 0.7 * 0.5)
    assert dropout_of([0.0, 0.3, 0.0]) == 0.3
    assert dropout_of([]) == 0.0


def test_a_dropout_after_the_dense_layer_is_refused() -> None:
    with pytest.raises(ExportError, match=r"head.1 is a torch.nn.modules.dropout.Dropout"):
        from_module(with_head("timm", dense, dropout))


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_336",
                                  "beit_base_patch16_224", "naflexvit_base_patch16_gap"])  # fmt: skip
def test_every_class_of_timm_opens_without_its_head(name: str) -> None:
    sizes = {"img_size": 32} if "beit" in name else {} if "naflex" in name else {"img_size": (48, 80)}
    module: Any = randomize_(timm.create_model(name, depth=2, num_classes=5, embed_dim=48, num_heads=4, **sizes)).eval()
    model = from_module(module, drop=("head",))
    patch = 14 if "14" in name else 16
    pixel_values = torch.randn(2, 3, 2 * patch, 2 * patch) if "beit" in name else torch.randn(2, 3, 48, 80)
    module.reset_classifier(0)
    expected = module(pixel_values)
    outputs = model(pixel_values)
    got = outputs.logits if "logits" in outputs else outputs.pooler_output
    assert difference(got, expected) == 0.0


def test_a_folder_of_timm_whose_classes_are_stale_opens_without_its_head(tmp_path: Path) -> None:
    small = {"img_size": (48, 80), "embed_dim": 56, "num_heads": 7, "depth": 2}
    module: Any = randomize_(timm.create_model("vit_base_patch16_224", **small)).eval()
    module.head = randomize_(nn.Sequential(nn.Linear(56, 9), nn.Tanh(), nn.Linear(9, 4)))
    save_for_hf(module, tmp_path, model_args=small, safe_serialization=True)
    converted = from_checkpoint(tmp_path, drop=["head"], verify=True)
    assert converted.report.is_independent
    expected = module.head(converted.model(pixels("timm")).pooler_output)
    assert difference(expected, module(pixels("timm"))) == 0.0


def test_a_tower_of_timm_in_a_clip_opens_without_its_head(tmp_path: Path) -> None:
    module: Any = randomize_(TimmModel("test_vit", embed_dim=30, proj="mlp", pool="avg", image_size=160)).eval()
    torch.save({f"visual.{name}": tensor for name, tensor in module.state_dict().items()}, tmp_path / "clip.pt")
    said = {"architecture": "test_vit", "pooling": "mean", "drop": ("head",)}
    with pytest.raises(ExportError, match="no projection .*--drop head"):
        from_module(module)
    model, pixel_values = from_module(module, drop=("head",)), torch.randn(2, 3, 160, 160)
    assert difference(model(pixel_values).pooler_output, module.trunk(pixel_values)) == 0.0
    del said["architecture"], said["pooling"]
    settled = {
        "num_attention_heads": 1, "attention_scale": "head_dim**-0.5", "layer_norm_eps": 1e-6, "hidden_act": "gelu",
        "pooling": "mean", "pool_prefix_tokens": False, "block_type": "sequential",
        "rope_type": "none", "image_size": 160,
    }  # fmt: skip
    with pytest.raises(Exception, match="no projection .*--drop head"):
        from_checkpoint(tmp_path / "clip.pt", **settled)
    converted = from_checkpoint(tmp_path / "clip.pt", **settled, **said)
    assert sorted(converted.report.ignored)[0] == "visual.head.mlp.fc1.bias"


def test_what_has_no_head_has_none_to_drop(tmp_path: Path) -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_classes=0)
    with pytest.raises(ExportError, match="has no classifier: omit it"):
        from_module(module, drop=("head",))
    torch.save(module.state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="the checkpoint has no classifier: omit it"):
        from_checkpoint(tmp_path / "model.pt", drop=("head",))
    with pytest.raises(CheckpointError, match=r"drop is 'head': expected a list of parts, such as \('head',\)"):
        from_module(module, drop="head")
    PlainViTForImageClassification(tiny_config()).save_pretrained(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="plain-vit's own, .*omit drop"):
        from_checkpoint(tmp_path / "ours", drop=("head",))


def test_a_file_of_google_opens_without_its_head(tmp_path: Path) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6)))
    to_checkpoint(model.eval(), tmp_path / "vit.npz", format="google")
    said = {"image_size": (24, 56)}
    converted = from_checkpoint(tmp_path / "vit.npz", **said, drop=("head",))
    assert set(converted.report.ignored) == {"head/kernel", "head/bias"}
    images = torch.randn(2, 3, 24, 56)
    assert difference(model.classifier(converted.model(images).pooler_output), model(images).logits) == 0.0


def test_the_commands_drop_the_head_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module = with_head("ViT", *ODD["two layers"])
    path = saved("ViT", module, tmp_path)
    for words in (["inspect", str(path)], ["convert", str(path), str(tmp_path / "out")]):
        assert main(words) == CheckpointError.exit_code
        assert "--drop head" in capsys.readouterr().err
        assert main([*words, "--drop", "head"]) == 0
        assert re.search(
            "ignored .*classifier.2.weight.*: of the head, which drop= leaves out", capsys.readouterr().out
        )
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Its classifier was left out." in card
    assert "drop" not in card
    streamed = tmp_path / "streamed"
    streamed.mkdir()
    convert_checkpoint(path, streamed, verify=False, drop=("head",))
    assert (streamed / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert main(["verify", str(path), str(streamed), "--drop", "head"]) == 0
    out = tmp_path / "exported"
    assert main(["export", str(path), str(out), "--to", "transformers", "--drop", "head"]) == 0
    model = transformers.ViTModel.from_pretrained(out, add_pooling_layer=False)
    images = pixels("ViT")
    tokens = model(images).last_hidden_state
    assert difference(module.classifier(tokens[:, 0]), logits_of(module, images)) <= TOLERANCE
    words = ["export", str(out), str(tmp_path / "timm"), "--to", "timm", "--drop", "mask_tokens"]
    assert main(words) == ExportError.exit_code
    assert "drop has 'mask_tokens': expected one of ['mask_token']" in capsys.readouterr().err


# Pre-training


class Projector(nn.Sequential):
    """MoCo v3's projector: dense layers without bias, each with a batch norm, the last one without gains."""

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(pairwise(widths), start=2):
            layers += [nn.Linear(before, after, bias=False)]
            inner = number < len(widths)
            layers += [nn.BatchNorm1d(after), nn.ReLU()] if inner else [nn.BatchNorm1d(after, affine=False)]
        super().__init__(*layers)


@pytest.mark.parametrize("encoder", ["base_encoder", "momentum_encoder"])
def test_the_encoders_of_moco_open_by_their_key(encoder: str, tmp_path: Path) -> None:
    pair = nn.ModuleDict({"predictor": Projector(20, 60, 20)})
    for seed, name in enumerate(["base_encoder", "momentum_encoder"]):
        pair[name] = tiny_timm("vit_tiny_patch16_224")
        pair[name].head = Projector(56, 60, 60, 20)
        randomize_(pair[name], seed)
    state = {f"module.{name}": tensor for name, tensor in pair.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state, "optimizer": {"state": {}}}, tmp_path / "checkpoint.pth.tar")
    key, theirs = f"state_dict.module.{encoder}", pair[encoder].eval()
    converted = from_checkpoint(tmp_path / "checkpoint.pth.tar", key=key, **SOURCES["timm"].said, verify=True)
    images = pixels("timm")
    expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    assert difference(converted.model(images).pooler_output, expected) == 0.0
    assert set(converted.report.ignored.values()) == {"MoCo's projector, which only its loss reads"}
    assert len(converted.report.ignored) == len(theirs.head.state_dict())


@pytest.mark.parametrize(
    "entrypoint, name, shape",
    [("vit_tiny_patch16_224", "mask_token", (1, 1)), ("eva02_tiny_patch14_224", "masked_embed", (1,))],
)
def test_a_token_for_hidden_patches_is_ignored_beside_timms_names(
    entrypoint: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    module: Any = randomize_(timm.create_model(entrypoint, num_classes=5)).eval()
    torch.save({**module.state_dict(), name: torch.ones(*shape, module.embed_dim)}, tmp_path / "model.pt")
    converted = from_checkpoint(tmp_path / "model.pt", architecture=entrypoint)
    assert converted.report.ignored == {name: "stands for hidden patches in pre-training, and no output reads it"}
    assert difference(converted.model(torch.ones(1, 3, 224, 224)).logits, module(torch.ones(1, 3, 224, 224))) == 0.0


@pytest.mark.parametrize("name", ["vit_pytorch", "torchvision"])
def test_a_token_for_hidden_patches_is_ignored_beside_the_names_of_others(name: str, tmp_path: Path) -> None:
    module = SOURCES[name].make()
    torch.save({**module.state_dict(), "mask_token": torch.ones(1, 1, 20)}, tmp_path / "model.pt")
    converted = from_checkpoint(tmp_path / "model.pt", **SOURCES[name].said)
    assert list(converted.report.ignored) == ["mask_token"]
    assert difference(logits_of(converted.model, pixels(name)), logits_of(module, pixels(name))) <= TOLERANCE
