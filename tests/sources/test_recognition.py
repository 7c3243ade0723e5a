"""Recognition of files: their format, unsupported models, and the `key=` that selects a model."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import safetensors.torch
import timm
import torch
import vit_pytorch
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torchvision.models import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint
from plain_vit.conversion.registry import FORMATS
from plain_vit.errors import MappingError, PlainViTError, UnknownFormatError
from tests.sizes import NIGHTLY
from tests.sources import gguf_models
from tests.sources.code_bases import CODE_BASES, ViT

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "timm": lambda: timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5
    ),
    "vit_pytorch": lambda: vit_pytorch.ViT(
        image_size=16, patch_size=4, num_classes=5, dim=24, depth=2, heads=3, mlp_dim=20, dim_head=8
    ),
    "torchvision": lambda: VisionTransformer(16, 4, 2, 3, 24, 20, num_classes=5),
    "transformers": lambda: ViTForImageClassification(
        ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=16,
                  patch_size=4, num_labels=5)
    ),
    "open_clip": lambda: open_clip.transformer.VisionTransformer(16, 4, 24, 2, 3, 2.0, output_dim=7),
    "segment_anything": lambda: VisionTransformerSAM(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, window_size=3, use_rel_pos=True, num_classes=0
    ),
}  # fmt: skip
HINTS: dict[str, dict[str, Any]] = {
    "vit_pytorch": {"num_attention_heads": 3, "image_size": 16, "patch_size": 4},
    "torchvision": {"num_attention_heads": 3, "layer_norm_eps": 1e-6},
}


def google_file(folder: Path) -> Path:
    config = PlainViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=16, patch_size=4,
        num_labels=5, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, initialization="google",
        position_resampling="bilinear_align_corners",
    )  # fmt: skip
    to_checkpoint(PlainViTForImageClassification(config), folder / "google.npz", format="google")
    return folder / "google.npz"


def file_of(name: str, folder: Path) -> Path:
    if name == "google":
        return google_file(folder)
    if name == "gguf":
        case = gguf_models.CASES["gemma3"]
        state = gguf_models.tensors_of(case, gguf_models.tower_of(case))
        return gguf_models.save(folder / "tower.gguf", gguf_models.settings_of(case), state)
    if name in CODE_BASES:
        base = CODE_BASES[name]
        torch.save(base.state(ViT(base)), folder / f"{name}.pt")
        return folder / f"{name}.pt"
    torch.save(MODELS[name]().state_dict(), folder / f"{name}.pt")
    return folder / f"{name}.pt"


def opened_or_refused(path: Path, **options: Any) -> type[PlainViTError] | None:
    """Return the class of the error that a file raises, or None if it opens."""
    try:
        from_checkpoint(path, **options)
    except PlainViTError as error:
        return type(error)
    return None


@pytest.mark.slow(
    quick=["timm-torchvision", "vit_pytorch-vit_pytorch", "torchvision-timm", "torchvision-torchvision",
           "torchvision-google", "open_clip-open_clip"]
)  # fmt: skip
@pytest.mark.parametrize("said", FORMATS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_format_is_refused_and_the_likely_one_named(name: str, said: str, tmp_path: Path) -> None:
    path = file_of(name, tmp_path)
    if said == name:
        assert opened_or_refused(path, format=said) is not UnknownFormatError
        return
    with pytest.raises(UnknownFormatError, match=f"does not have the names of {said}: they look like {name}"):
        from_checkpoint(path, format=said)


@pytest.mark.parametrize("said", FORMATS)
def test_a_file_of_no_known_format_is_refused_with_any_hint(said: str, tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(3, 5), "b.weight": torch.ones(5)}, tmp_path / "own.pt")
    with pytest.raises(UnknownFormatError, match=f"not have the names of {said}: its tensors are 'a.weight', 'b.w"):
        from_checkpoint(tmp_path / "own.pt", format=said)
    np.savez(tmp_path / "own.npz", a=np.ones((3, 5)), b=np.ones(5))
    with pytest.raises(UnknownFormatError, match=f"does not have the names of {said}: its tensors are 'a', 'b'"):
        from_checkpoint(tmp_path / "own.npz", format=said)


PREFIXES = ("backbone", "encoder.vit", "a.b.c", "head", "body.0", "module.backbone", "state_dict", "x_1.model")
BESIDE: tuple[dict[str, tuple[int, ...]], ...] = (
    {}, {"fc.weight": (5, 3)}, {"fc.weight": (5, 3), "fc.bias": (5,), "scale": ()}
)  # fmt: skip
QUICK = ["vit_pytorch-encoder.vit-1-False", "vit_pytorch-body.0-0-False", "vit_pytorch-state_dict-2-False",
         "torchvision-encoder.vit-0-True", "torchvision-encoder.vit-1-False", "torchvision-body.0-0-False"]  # fmt: skip
EACH = {"-".join(map(str, case)): case for case in itertools.product(HINTS, PREFIXES, range(3), (False, True))}
# By default, only cases whose indices in the four lists have an even sum: half of all, with every pair of values.
PLACES = map(sum, itertools.product(range(2), range(8), range(3), range(2)))
INSIDE = [name for name, place in zip(EACH, PLACES, strict=True) if NIGHTLY or name in QUICK or place % 2 == 0]


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("case", INSIDE)
def test_the_error_names_the_key_that_opens_a_model_inside_another(case: str, tmp_path: Path) -> None:
    name, prefix, beside, nested = EACH[case]
    module = MODELS[name]()
    outer = "module." if prefix.startswith("module.") else ""
    state = {f"{prefix}.{tensor}": value for tensor, value in module.state_dict().items()}
    state |= {outer + stranger: torch.ones(shape) for stranger, shape in BESIDE[beside].items()}
    path = tmp_path / ("x.pt" if nested else "x.safetensors")
    if nested:
        torch.save({"state_dict": state, "epoch": 1}, path)
    else:
        safetensors.torch.save_file({tensor: value.contiguous() for tensor, value in state.items()}, path)
    options = HINTS[name]
    refused = opened_or_refused(path, **options)
    assert refused in (UnknownFormatError, MappingError) or not beside
    if refused is not None:
        with pytest.raises(refused, match="names a model of") as caught:
            from_checkpoint(path, **options)
        (key,) = re.findall(rf"key='([^']+)' names a model of {name}", str(caught.value))
        options = {**options, "key": key}
    model = from_checkpoint(path, **options).model
    live = from_module(module)
    assert all(torch.equal(value, live.state_dict()[tensor]) for tensor, value in model.state_dict().items())


def test_two_models_side_by_side_are_both_named(tmp_path: Path) -> None:
    states = [MODELS["torchvision"]().state_dict() for _ in range(2)]
    both = {f"{side}.{name}": value for side, state in zip("ab", states, strict=True) for name, value in state.items()}
    torch.save(both, tmp_path / "both.pt")
    with pytest.raises(UnknownFormatError, match="key='a' names a model of torchvision, key='b' names a"):
        from_checkpoint(tmp_path / "both.pt")


def test_a_bare_file_with_our_own_names_is_recognised(tmp_path: Path) -> None:
    model = PlainViTForImageClassification(
        PlainViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20, image_size=16,
                       patch_size=4)
    )  # fmt: skip
    torch.save(model.state_dict(), tmp_path / "ours.pt")
    with pytest.raises(PlainViTError, match="plain-vit's own names but no config.json: give the folder"):
        from_checkpoint(tmp_path / "ours.pt")
