"""vit-pytorch, live and on file: every layout that its plain ViTs ever had, against the releases themselves."""

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plain_vit import PlainViTModel
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.vit_pytorch import LAYOUTS, RELEASE, VIT_PYTORCH
from tests.conftest import randomize_
from tests.peers import vit_pytorch_release

NOW = "now"


@dataclass(frozen=True)
class Case:
    """A model of one release, with what its live module and its state dict do not say."""

    release: str
    file: str
    layout: str
    kind: str = "ViT"
    arguments: dict[str, Any] = field(default_factory=dict)
    square: bool = False  # the oldest releases knew no other images
    image_size_is_told: bool = False  # the live module has a table of sines and cosines

    def __str__(self) -> str:
        options = [str(value) for value in self.arguments.values()]
        return "-".join([self.release, self.file, *options])

    @property
    def image_size(self) -> tuple[int, int]:
        return (25, 25) if self.square else (10, 21)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the class: unequal primes wherever it lets us."""
        sizes: dict[str, Any] = {"image_size": (10, 21), "patch_size": (5, 7), "channels": 2}
        if self.square:
            sizes = {"image_size": 25, "patch_size": 5, "channels": 2}
        heads: dict[str, Any] = {"dim": 20, "heads": 3, "dim_head": 11}
        if self.release in ("0.0.2", "0.1.0", "0.2.0", "0.2.1", "0.2.7", "0.3.0"):
            heads = {"dim": 33, "heads": 3}
        return {"num_classes": 7, "depth": 3, "mlp_dim": 29, **sizes, **heads, **self.arguments}

    @property
    def kind_of_module(self) -> type[nn.Module]:
        module = (
            importlib.import_module(f"vit_pytorch.{self.file}")
            if self.release == NOW
            else vit_pytorch_release(self.release, self.file)
        )
        return getattr(module, self.kind)

    def build(self, seed: int = 0) -> nn.Module:
        return randomize_(self.kind_of_module(**self.settings), seed).eval()

    @property
    def hints(self) -> dict[str, Any]:
        """What the state dict does not say; pooling and layout where the names are those of several."""
        patch_size = self.settings["patch_size"]
        hints: dict[str, Any] = {
            "num_attention_heads": self.settings["heads"],
            "image_size": self.image_size,
            "patch_size": patch_size,
            "layout": self.layout,
        }
        if self.kind in ("ViT", "DistillableViT") and "num_classes" not in self.arguments:
            hints["pooling"] = self.arguments.get("pool", "cls")
        return hints

    @property
    def live_hints(self) -> dict[str, Any]:
        return {} if self.square or self.image_size_is_told else {"image_size": self.image_size}

    def images(self, batch: int = 2) -> torch.Tensor:
        """Ordinary, nearly flat and glaring pixels, which show a wrong epsilon; the first release took one image."""
        images = torch.randn(batch, self.settings["channels"], *self.image_size)
        images[-1] *= 1e-3
        images[0, :, : self.image_size[0] // 2] *= 30
        return images[-1:] if self.release == "0.0.2" else images


SQUARE: dict[str, Any] = {"square": True}
MEAN: dict[str, Any] = {"arguments": {"pool": "mean"}}
SIMPLE: dict[str, Any] = {"kind": "SimpleViT"}
FIXED: dict[str, Any] = {"kind": "SimpleViT", "image_size_is_told": True}

CASES = [
    Case("0.0.2", "vit_pytorch", "vit 0.0.2", **SQUARE),
    Case("0.1.0", "vit_pytorch", "vit 0.0.4", **SQUARE),
    Case("0.2.0", "vit_pytorch", "vit 0.2.0", **SQUARE),
    Case("0.2.1", "vit_pytorch", "vit 0.2.1", **SQUARE),
    Case("0.2.7", "vit_pytorch", "vit 0.2.2", **SQUARE),
    Case("0.3.0", "vit_pytorch", "vit 0.3.0", **SQUARE),
    Case("0.4.0", "vit_pytorch", "vit 0.3.0", **SQUARE),
    Case("0.6.6", "vit_pytorch", "vit 0.5.0", **SQUARE),
    Case("0.6.6", "vit_pytorch", "vit 0.5.0", **SQUARE, **MEAN),
    Case("0.6.8", "vit_pytorch", "vit 0.6.7", **SQUARE),
    Case("0.6.8", "vit_pytorch", "vit 0.6.7", **SQUARE, **MEAN),
    Case("0.7.1", "vit_pytorch", "vit 0.7.0", **SQUARE),
    Case("0.7.6", "vit_pytorch", "vit 0.7.0", **SQUARE, **MEAN),
    Case("0.7.6", "vit_pytorch", "vit 0.7.0", **SQUARE, arguments={"heads": 1, "dim_head": 20}),
    Case("0.10.3", "vit", "vit 0.10.1", **SQUARE, **MEAN),
    Case("0.19.6", "vit", "vit 0.10.1"),
    Case("0.19.6", "vit", "vit 0.10.1", **MEAN),
    Case("0.19.6", "vit", "vit 0.10.1", arguments={"heads": 1, "dim_head": 20}),
    Case("0.40.2", "vit", "vit 0.10.1"),
    Case("1.0.2", "vit", "vit 1.0.0", **MEAN),
    Case("1.2.9", "vit", "vit 1.0.0"),
    Case("1.4.0", "vit", "vit 1.4.0", **MEAN),
    Case("1.15.7", "vit", "vit 1.4.0"),
    Case("1.15.7", "vit", "vit 1.4.0", **MEAN),
    Case("1.16.0", "vit", "vit 1.16.0"),
    Case("1.16.0", "vit", "vit 1.16.0", **MEAN),
    Case("1.16.2", "vit", "vit 1.16.1", **MEAN),
    Case(NOW, "vit", "vit 1.17.3"),
    Case(NOW, "vit", "vit 1.17.3", **MEAN),
    Case(NOW, "vit", "vit 1.17.3", arguments={"channels": 1}),
    Case(NOW, "vit", "vit 1.17.3", arguments={"heads": 1, "dim_head": 20}),
    Case(NOW, "vit", "vit 1.17.3", arguments={"num_classes": 0}),
    Case(NOW, "vit", "vit 1.17.3", arguments={"num_classes": 0, "pool": "mean"}),
    Case("0.35.8", "simple_vit", "simple_vit 0.35.2", **SIMPLE),
    Case("0.40.2", "simple_vit", "simple_vit 0.35.2", **SIMPLE),
    Case("1.0.2", "simple_vit", "simple_vit 1.0.0", **SIMPLE),
    Case("1.2.9", "simple_vit", "simple_vit 1.0.0", **FIXED),
    Case("1.4.0", "simple_vit", "simple_vit 1.4.0", **FIXED),
    Case("1.5.3", "simple_vit", "simple_vit 1.4.1", **FIXED),
    Case(NOW, "simple_vit", "simple_vit 1.4.1", **FIXED),
    Case(NOW, "simple_vit", "simple_vit 1.4.1", **FIXED, arguments={"heads": 1, "dim_head": 20}),
    # The plain variants.
    Case("0.40.2", "simple_vit_with_patch_dropout", "simple_vit 0.35.2", **SIMPLE),
    Case("1.2.9", "simple_vit_with_patch_dropout", "simple_vit 1.0.0", **SIMPLE),
    Case(NOW, "simple_vit_with_patch_dropout", "simple_vit 1.4.1", **SIMPLE),
    Case("1.5.3", "simple_vit_with_register_tokens", "simple_vit_with_register_tokens 1.5.0", **FIXED),
    Case(NOW, "simple_vit_with_register_tokens", "simple_vit_with_register_tokens 1.5.0", **FIXED),
    Case("1.5.3", "simple_vit_with_qk_norm", "simple_vit_with_qk_norm 1.4.2", **FIXED),
    Case(NOW, "simple_vit_with_qk_norm", "simple_vit_with_qk_norm 1.4.2", **FIXED),
    Case("0.40.2", "vit_with_patch_dropout", "vit_with_patch_dropout 0.40.0"),
    Case("1.2.9", "vit_with_patch_dropout", "vit_with_patch_dropout 0.40.0", **MEAN),
    Case("1.5.3", "vit_with_patch_dropout", "vit_with_patch_dropout 1.4.3", **MEAN),
    Case(NOW, "vit_with_patch_dropout", "vit_with_patch_dropout 1.4.3"),
    Case(
        NOW,
        "vit_with_decorr",
        "vit_with_decorr 1.21.5",
        arguments={"decorr_use_subspace": True, "decorr_dim_subspace": 5},
    ),
    Case("0.35.8", "learnable_memory_vit", "learnable_memory_vit 0.31.0"),
    Case("1.2.9", "learnable_memory_vit", "learnable_memory_vit 1.0.0"),
    Case(NOW, "learnable_memory_vit", "learnable_memory_vit 1.0.0"),
    Case(NOW, "vit_detpool", "vit_detpool 1.20.2", kind="ViTDetPool"),
    Case(NOW, "vit_detpool", "vit_detpool 1.20.2", kind="ViTDetPool", arguments={"use_cls_token": False}),
    Case("1.15.7", "distill", "vit 1.4.0", kind="DistillableViT"),
    Case(NOW, "distill", "vit 1.17.3", kind="DistillableViT", **MEAN),
]
# Their attention is torch's own kernel, so only the other tests say 0.0 of them.
FLASH = [
    Case("1.2.9", "simple_flash_attn_vit", "simple_vit 1.0.0", **SIMPLE),
    Case(NOW, "simple_flash_attn_vit", "simple_vit 1.0.0", **SIMPLE),
]

cases = pytest.mark.parametrize("case", CASES, ids=str)


def outputs(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return logits, or features where there is no classifier, of whatever model."""
    with torch.no_grad():
        result = model(images)
    if isinstance(result, tuple):  # vit_with_decorr adds its loss
        return result[0]
    if isinstance(result, torch.Tensor):
        return result
    return result.logits if "logits" in result else result.pooler_output


def tokens_between_blocks(module: nn.Module, case: Case, images: torch.Tensor) -> list[torch.Tensor]:
    """Return the tokens before each block of vit-pytorch's model, and behind the last one before any norm."""
    caught: list[torch.Tensor] = []
    transformer = module.get_submodule("transformer")
    first_halves = (
        [transformer.get_submodule(f"net.{2 * i}") for i in range(3)]
        if hasattr(transformer, "net")
        else [transformer.get_submodule(f"layers.{i}.0") for i in range(3)]
    )
    final_norm = getattr(transformer, "norm", None)
    hooks = [
        half.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].clone())) for half in first_halves
    ]
    if final_norm is not None:
        hooks.append(final_norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].clone())))
    else:
        hooks.append(transformer.register_forward_hook(lambda _, __, result: caught.append(result.clone())))
    outputs(module, images)
    for hook in hooks:
        hook.remove()
    return caught


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The project's measure: the largest difference as a share of the largest value."""
    assert a.shape == b.shape
    return ((a - b).abs().max() / b.abs().max()).item()


@cases
def test_live_module_has_the_same_tokens_at_every_block_and_the_same_logits(case: Case) -> None:
    theirs, images = case.build(), case.images()
    ours = from_module(theirs, **case.live_hints)
    ours.set_attn_implementation("eager")
    with torch.no_grad():
        hidden_states = ours(images, output_hidden_states=True).hidden_states
    expected = tokens_between_blocks(theirs, case, images)
    assert len(hidden_states) == len(expected) == 4
    assert [distance(a, b) for a, b in zip(hidden_states, expected, strict=True)] == [0, 0, 0, 0]
    assert distance(outputs(ours, images), outputs(theirs, images)) == 0


@pytest.mark.parametrize("case", CASES + FLASH, ids=str)
def test_live_module_has_nearly_the_same_logits_with_fused_attention(case: Case) -> None:
    theirs, images = case.build(), case.images()
    ours = from_module(theirs, **case.live_hints)
    ours.set_attn_implementation("sdpa")  # another order of operations
    assert distance(outputs(ours, images), outputs(theirs, images)) <= 1e-5


@pytest.mark.parametrize("case", CASES + FLASH, ids=str)
def test_file_opens_as_the_live_module_does_and_goes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    theirs, images = case.build(), case.images()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    ours = from_checkpoint(tmp_path / "theirs.pt", **case.hints).model
    live = from_module(theirs, **case.live_hints)
    assert type(ours) is type(live)
    assert all(torch.equal(tensor, live.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert torch.equal(outputs(ours, images), outputs(live, images))

    to_checkpoint(ours, tmp_path / "back.pt", format="vit_pytorch", layout=case.layout)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    decorrelation = {"decorr_loss.proj"}  # random directions, for a loss in training
    assert set(back) == set(theirs.state_dict()) - decorrelation
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.items())
    fresh = case.kind_of_module(**case.settings).eval()
    fresh.load_state_dict(back, strict=not decorrelation & set(theirs.state_dict()))
    assert torch.equal(outputs(fresh, images), outputs(theirs, images))


@pytest.mark.parametrize("case", [case for case in CASES if case.release == NOW], ids=str)
def test_live_module_of_today_comes_back_live(case: Case) -> None:
    if case.file in ("vit_with_decorr", "distill"):  # these come back as the ViT that they are
        case = Case(
            NOW, "vit", case.layout, arguments={name: case.arguments[name] for name in case.arguments if name == "pool"}
        )
    theirs, images = case.build(), case.images()
    back = to_module(from_module(theirs, **case.live_hints), "vit_pytorch")
    assert type(back) is type(theirs)
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.state_dict().items())
    assert torch.equal(outputs(back, images), outputs(theirs, images))
