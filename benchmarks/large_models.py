"""Files of a ViT-L/16 (304 million parameters, 1.2 GB in float32) with random weights, as each package writes them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import vit_pytorch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.models import TOLERANCE, logits_of, require_equal
from plain_vit.conversion import convert_checkpoint

# Settings missing in the files, as options of `from_checkpoint`.
SOURCES: dict[str, dict[str, Any]] = {
    "timm": {},
    "vit_pytorch.pt": {"num_attention_heads": 16, "image_size": 224, "patch_size": 16},
    "torchvision.pth": {"architecture": "vit_l_16"},
    "plain_vit": {},
}


@contextmanager
def written() -> Iterator[tuple[Path, int]]:
    """Write all sources to a temporary folder; yield it and the size of the weights in bytes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_all(folder)
        yield folder, weights(folder / "timm").stat().st_size


def write_all(folder: Path) -> None:
    """Write `folder / name` for each name in `SOURCES`, and transformers' own folder `folder / "transformers"`.

    The logits of each for one image are saved as `folder / "logits of NAME"`.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        of_timm = timm.create_model("vit_large_patch16_224")
        of_vit_pytorch = vit_pytorch.ViT(
            image_size=224, patch_size=16, num_classes=1000, dim=1024, depth=24, heads=16, mlp_dim=4096
        )
        of_torchvision = torchvision.models.vit_l_16()
        sizes: dict[str, Any] = {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
            "num_labels": 1000,
        }  # fmt: skip
        of_transformers = ViTForImageClassification(ViTConfig(**sizes))
    timm.models.save_for_hf(_filled(of_timm, folder / "timm"), str(folder / "timm"), safe_serialization=True)
    torch.save(_filled(of_vit_pytorch, folder / "vit_pytorch.pt").state_dict(), folder / "vit_pytorch.pt")
    torch.save(_filled(of_torchvision, folder / "torchvision.pth").state_dict(), folder / "torchvision.pth")
    _filled(of_transformers, folder / "transformers").save_pretrained(folder / "transformers")
    (folder / "plain_vit").mkdir()
    convert_checkpoint(folder / "timm", folder / "plain_vit", verify=False)
    _expected(folder / "plain_vit").write_bytes(_expected(folder / "timm").read_bytes())


def check(model: nn.Module, source: Path) -> None:
    """Check that a model's logits equal those that its source gave when it was written.

    Raises:
        RuntimeError: The logits differ.
    """
    require_equal(_answer(model), torch.load(_expected(source)), TOLERANCE, source.name)


def weights(source: Path) -> Path:
    """Return the file with the weights of a source."""
    return source / "model.safetensors" if source.is_dir() else source


def _filled(module: nn.Module, target: Path) -> Any:
    module.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.03, 0.03)
    torch.save(_answer(module), _expected(target))
    return module


def _answer(module: nn.Module) -> torch.Tensor:
    image = torch.linspace(-2, 2, 3 * 224 * 224).sin().view(1, 3, 224, 224)
    with torch.no_grad():
        return logits_of(module(image))


def _expected(source: Path) -> Path:
    return source.with_name(f"logits of {source.name}")
