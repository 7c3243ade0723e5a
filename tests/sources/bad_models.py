"""Valid files with invalid models (tensors and settings that do not fit), and the error that each must raise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import timm
import torch
import torchvision
import vit_pytorch
from timm.models import save_for_hf

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    PlainViTError,
    UnknownFormatError,
    UnsafeFileError,
)
from tests.tiny import tiny_config

Tensors = dict[str, torch.Tensor]


class BadModel(NamedTuple):
    """How to make the file in an empty folder, the expected error and message, and further arguments."""

    make: Callable[[Path], Path]
    raises: type[PlainViTError]
    says: str
    hints: tuple[str, ...] = ()


BAD_MODELS: dict[str, BadModel] = {}


def _add(title: str, make: Callable[[Path], Path], raises: type[PlainViTError], says: str, *hints: str) -> None:
    assert title not in BAD_MODELS
    BAD_MODELS[title] = BadModel(make, raises, says, hints)


# ---- folders of our own ----


def save_ours(folder: Path) -> Path:
    """Save a small model with its image processor."""
    torch.manual_seed(0)
    PlainViTForImageClassification(tiny_config()).save_pretrained(folder)
    PlainViTImageProcessor(size={"height": 24, "width": 56}).save_pretrained(folder)
    return folder


def with_tensors(change: Callable[[Tensors], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = save_ours(folder) / "model.safetensors"
        tensors = safetensors.torch.load_file(path)
        change(tensors)
        safetensors.torch.save_file(tensors, path, {"format": "pt"})
        return folder

    return make


def with_json(name: str = "config.json", **changes: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = save_ours(folder) / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return make


def _put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


_FC1, _NORM = "vit.layers.1.mlp.fc1.weight", "vit.layernorm.weight"
for _title, _change, _raises, _says in [
    ("a missing tensor", lambda t: t.pop(_NORM), MappingError, "missing: 'vit.layernorm.weight'"),
    ("a tensor too many", lambda t: t.update(surplus=torch.ones(3)), MappingError, "'surplus'"),
    ("NaN in a tensor", _put(_NORM, lambda t: t.fill_(float("nan"))), MappingError, "NaN"),
    ("infinity in a tensor", _put(_FC1, lambda t: t.index_fill_(0, torch.tensor([3]), float("inf"))), MappingError,
     "infinite"),
    ("a tensor of integers", _put(_FC1, lambda t: t.to(torch.int32)), MappingError, "int32"),
    ("one float8 tensor among float32", _put(_FC1, lambda t: t.to(torch.float8_e5m2)), CheckpointError,
     "several dtypes"),
    ("a transposed matrix", _put(_FC1, lambda t: t.T), MappingError, "expected (52, 40)"),
    ("a flattened tensor", _put("vit.embeddings.cls_token", lambda t: t[0]), MappingError, "expected (1, 1, 40)"),
    ("the positions of another grid", _put("vit.embeddings.position_embeddings.weight", lambda t: t[:-3]),
     MappingError, "expected (13, 40)"),
    ("a classifier of another number of labels", _put("classifier.weight", lambda t: t[:5]), MappingError,
     "expected (7, 40)"),
    ("no tensor that it needs", lambda t: (t.clear(), t.update(a=torch.ones(2, 3))), MappingError, "missing"),
]:  # fmt: skip
    _add(f"our folder with {_title}", with_tensors(_change), _raises, _says)

for _title, _changes, _raises, _says in [
    ("a width of a million", {"hidden_size": 10**6}, MappingError, "expected (1, 1, 1000000)"),
    ("a million layers", {"num_hidden_layers": 10**6}, UnsafeFileError, "expected at most 1000"),
    ("a billion labels", {"id2label": None, "label2id": None, "num_labels": 10**9}, UnsafeFileError, "num_labels"),
    ("a billion branches", {"block_type": "branches", "num_branches": 10**9}, UnsafeFileError, "num_branches"),
    ("a billion blocks of a stem", {"resnet_stem": {"depths": [10**9]}}, UnsafeFileError, "depths"),
    ("images of a billion pixels", {"image_size": [8 * 10**8, 14 * 10**8]}, UnsafeFileError, "image_size"),
    ("a grid that the patches do not divide", {"patch_size": 5}, CheckpointError, "not a multiple of patch_size"),
    ("heads that do not divide the width", {"num_attention_heads": 7, "head_dim": None}, CheckpointError, "7"),
    ("other heads than its tensors", {"num_attention_heads": 7}, MappingError, "expected (56, 40)"),
    ("another number of labels", {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, MappingError,
     "expected (2, 40)"),
    ("registers that are not there", {"num_register_tokens": 4}, MappingError, "register_tokens"),
    ("a distillation token that is not there", {"use_distillation_token": True}, MappingError, "distillation_token"),
    ("a field of a newer version", {"rotary": True, "plain_vit_version": "99.0"}, CheckpointError, "99.0"),
    ("a text for a number", {"hidden_size": "40"}, CheckpointError, "expected int, got str"),
    ("a negative number of layers", {"num_hidden_layers": -1}, CheckpointError, "expected 0 or more"),
    ("an unknown dtype", {"dtype": "float99"}, CheckpointError, "float99"),
    ("code for an activation", {"hidden_act": "__import__('os').system('touch RAN')"}, CheckpointError, "expected one"),
    ("labels that are a text", {"id2label": "ant"}, CheckpointError, "describe no model"),
    ("an unknown class", {"architectures": ["Evil"]}, CheckpointError, "expected one of PlainViT"),
    ("a class that is a number", {"architectures": [3]}, CheckpointError, "expected one of PlainViT"),
    ("an attention from a repository", {"_attn_implementation": "evil/kernel"}, UnsafeFileError, "no code is fetched"),
]:  # fmt: skip
    _add(f"configuration with {_title}", with_json(**_changes), _raises, _says)

_add(
    "image processor of an unknown class",
    with_json("preprocessor_config.json", image_processor_type="Evil", auto_map={"AutoImageProcessor": "evil.Evil"}),
    CheckpointError,
    "Evil",
)


# ---- other packages ----


def _timm_state(change: Callable[[Tensors], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        tensors = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2).state_dict()
        change(tensors)
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"

    return make


def _timm_folder(**changes: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2)
        save_for_hf(model, folder, model_args={"img_size": 32, "depth": 2}, safe_serialization=True)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return make


def _vit_pytorch(change: Callable[[dict[str, Any]], object] = lambda saved: None) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = vit_pytorch.ViT(
            image_size=24, patch_size=8, num_classes=5, dim=20, depth=2, heads=3, dim_head=10, mlp_dim=24
        )
        saved: dict[str, Any] = dict(model.state_dict())
        change(saved)
        torch.save(saved, folder / "vit.pt")
        return folder / "vit.pt"

    return make


def _beside_itself(*names: str) -> Callable[[dict[str, Any]], object]:
    def change(saved: dict[str, Any]) -> None:
        whole = dict(saved)
        saved.clear()
        saved.update({name: dict(whole) for name in names})

    return change


def _twice_wrapped(saved: dict[str, Any]) -> None:
    saved.update({f"module.{name}": tensor for name, tensor in saved.items()})


_QKV = "blocks.1.attn.qkv.weight"
_TOLD = (
    *("--num-attention-heads", "3", "--attention-scale", "head_dim**-0.5", "--layer-norm-eps", "1e-6"),
    *("--hidden-act", "gelu", "--pooling", "cls", "--block-type", "sequential"),
    *("--rope-type", "none", "--image-size", "32"),
)
for _title, _change, _raises, _says in [
    ("fused q, k and v that are transposed", _put(_QKV, lambda t: t.T), MappingError, "qkv"),
    ("q and k without v", _put(_QKV, lambda t: t[:384]), MappingError, "qkv"),
    ("a missing bias", lambda t: t.pop("blocks.0.mlp.fc1.bias"), MappingError, "blocks.0.mlp.fc1.bias"),
    ("NaN", _put("norm.bias", lambda t: t.fill_(float("nan"))), MappingError, "NaN"),
]:  # fmt: skip
    _add(f"timm's tensors with {_title}", _timm_state(_change), _raises, _says, *_TOLD)

for _title, _changes, _raises, _says in [
    ("an unknown architecture", {"architecture": "evil_vit"}, UnknownFormatError, "'evil_vit' is not one of"),
    ("an architecture that is a list", {"architecture": ["a"]}, CheckpointError, "describe no model"),
    ("a million layers", {"model_args": {"depth": 10**6}}, UnsafeFileError, "depth = 1000000"),
    ("an unknown argument", {"model_args": {"evil": 1}}, ExportError, "evil"),
    ("patches of no size", {"model_args": {"patch_size": 0}}, CheckpointError, "describe no model"),
    ("arguments that are a list", {"model_args": [1]}, CheckpointError, "describe no model"),
    ("another number of classes", {"num_classes": 7}, CheckpointError, "7 classes, the head 5"),
    ("too few names of labels", {"label_names": ["a", "b"]}, CheckpointError, "2 label names for 5 classes"),
]:  # fmt: skip
    _add(f"timm folder with {_title}", _timm_folder(**_changes), _raises, _says)

_HEADS = ("--num-attention-heads", "3", "--image-size", "24", "--patch-size", "8")
_OTHER_SIZE = "has 64 patches of (8, 8), and the positions are of 9"
for _title, _change, _raises, _says, _hints in [
    ("no word on its heads", lambda saved: None, AmbiguousCheckpointError, "num_attention_heads", ()),
    ("the wrong heads given", lambda saved: None, MappingError, "30 wide together",
     ("--num-attention-heads", "7", *_HEADS[2:])),
    ("a pooling given that does not fit", lambda saved: None, MappingError, "trained with cls",
     (*_HEADS, "--pooling", "mean")),
    ("an image size given that does not fit", lambda saved: None, MappingError, _OTHER_SIZE,
     (*_HEADS, "--image-size", "64")),
    ("patches given that do not fit", lambda saved: None, MappingError, "a patch has",
     (*_HEADS, "--patch-size", "7")),
    ("a model and its moving average", _beside_itself("model", "ema"), AmbiguousCheckpointError, "key", _HEADS),
    ("tensors with and without a prefix", _twice_wrapped, AmbiguousCheckpointError, "side by side", _HEADS),
    ("a lost block", lambda saved: [saved.pop(name) for name in list(saved) if ".0.1." in name], MappingError,
     "missing", _HEADS),
]:  # fmt: skip
    _add(f"vit-pytorch's file with {_title}", _vit_pytorch(_change), _raises, _says, *_hints)


def _resnet(folder: Path) -> Path:
    safetensors.torch.save_file(torchvision.models.resnet18().state_dict(), folder / "resnet.safetensors")
    return folder / "resnet.safetensors"


_add("a model of another kind", _resnet, UnknownFormatError, "matches no known format")
