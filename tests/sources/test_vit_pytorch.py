"""vit-pytorch, live and in files: every layout of its plain ViTs, compared with the releases themselves."""

import importlib
import importlib.metadata
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from vit_pytorch import ViT
from vit_pytorch.simple_vit import SimpleViT

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.sources.vit_pytorch.layouts import LAYOUTS
from plain_vit.errors import AmbiguousCheckpointError, ExportError, UnknownFormatError
from tests import ROOT
from tests.conftest import randomize_
from tests.peers import vit_pytorch_release
from tests.sources.sweep import record

NOW = "now"


@dataclass(frozen=True)
class Case:
    """A model of one release, with the settings that its live module and state dict do not show."""

    release: str
    file: str
    layout: str
    kind: str = "ViT"
    arguments: dict[str, Any] = field(default_factory=dict)
    square: bool = False  # the oldest releases only support square images
    image_size_is_told: bool = False  # the live module has a sine-cosine table

    def __str__(self) -> str:
        options = [str(value) for value in self.arguments.values()]
        return "-".join([self.release, self.file, *options])

    @property
    def record(self) -> dict[str, str]:
        """Return the fields that identify the source in the table of the docs."""
        name = self.file if self.file not in ("vit_pytorch", "vit") else "ViT"
        options = [f"{name}={value}" for name, value in self.arguments.items() if name not in SMALL]
        release = importlib.metadata.version("vit-pytorch") if self.release == NOW else self.release
        source = " ".join(["vit-pytorch", name, *options, f"of release {release}"])
        return {"source": source, "vit-pytorch": release, "torch": torch.__version__}

    @property
    def image_size(self) -> tuple[int, int]:
        return self.arguments.get("image_size", (25, 25) if self.square else (10, 21))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments of the class: unequal primes where possible."""
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
        settings = {**self.settings}
        if self.kind == "CaiT":  # always has three channels
            del settings["channels"]
        return randomize_(self.kind_of_module(**settings), seed).eval()

    @property
    def hints(self) -> dict[str, Any]:
        """Return settings that the state dict does not show; also pooling and layout if the names are ambiguous."""
        patch_size = self.settings["patch_size"]
        hints: dict[str, Any] = {
            "num_attention_heads": self.settings["heads"],
            "image_size": self.image_size,
            "patch_size": patch_size,
            "layout": self.layout,
        }
        if self.kind in ("ViT", "DeepViT", "DistillableViT") and "num_classes" not in self.arguments:
            hints["pooling"] = self.arguments.get("pool", "cls")
        return hints

    @property
    def live_hints(self) -> dict[str, Any]:
        return {} if self.square or self.image_size_is_told else {"image_size": self.image_size}

    def images(self, batch: int = 2) -> torch.Tensor:
        """Return ordinary, nearly constant and huge pixels, to detect a wrong epsilon; one for the first release."""
        images = torch.randn(batch, self.settings["channels"], *self.image_size)
        images[-1] *= 1e-3
        images[0, :, : self.image_size[0] // 2] *= 30
        return images[-1:] if self.release == "0.0.2" else images


SQUARE: dict[str, Any] = {"square": True}
MEAN: dict[str, Any] = {"arguments": {"pool": "mean"}}
SIMPLE: dict[str, Any] = {"kind": "SimpleViT"}
FIXED: dict[str, Any] = {"kind": "SimpleViT", "image_size_is_told": True}
SMALL: dict[str, Any] = {"image_size": (10, 20), "patch_size": 5}  # with square patches
CAIT: dict[str, Any] = {"cls_depth": 4, "channels": 3}

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
    # The relatives.
    Case("0.35.8", "parallel_vit", "parallel_vit 0.29.0"),
    Case("1.0.2", "parallel_vit", "parallel_vit 0.29.0", **MEAN),
    Case("1.5.3", "parallel_vit", "parallel_vit 1.4.3", arguments={"num_parallel_branches": 1}),
    Case(NOW, "parallel_vit", "parallel_vit 1.4.3"),
    Case(NOW, "parallel_vit", "parallel_vit 1.4.3", arguments={"pool": "mean", "num_parallel_branches": 3}),
    Case(NOW, "parallel_vit", "parallel_vit 1.4.3", arguments={"heads": 1, "dim_head": 20}),
    Case("0.10.3", "deepvit", "deepvit 0.9.0", "DeepViT", **SQUARE),
    Case("0.35.8", "deepvit", "deepvit 0.9.0", "DeepViT", **SQUARE, **MEAN),
    Case("1.0.2", "deepvit", "deepvit 1.0.0", "DeepViT", **SQUARE),
    Case("1.5.3", "deepvit", "deepvit 1.4.3", "DeepViT", **SQUARE),
    Case(NOW, "deepvit", "deepvit 1.4.3", "DeepViT", **SQUARE),
    Case(NOW, "deepvit", "deepvit 1.4.3", "DeepViT", **SQUARE, **MEAN),
    Case("0.19.6", "cait", "cait 0.14.0", "CaiT", **SQUARE, arguments=CAIT),
    Case("0.35.8", "cait", "cait 0.14.0", "CaiT", **SQUARE, arguments=CAIT),
    Case("1.0.2", "cait", "cait 1.0.0", "CaiT", **SQUARE, arguments=CAIT),
    Case("1.5.3", "cait", "cait 1.4.3", "CaiT", **SQUARE, arguments=CAIT),
    Case(NOW, "cait", "cait 1.4.3", "CaiT", **SQUARE, arguments=CAIT),
    Case("0.35.8", "vit_for_small_dataset", "vit_for_small_dataset 0.26.0", arguments=SMALL),
    Case("1.0.2", "vit_for_small_dataset", "vit_for_small_dataset 0.26.0", arguments={**SMALL, "pool": "mean"}),
    Case("1.5.3", "vit_for_small_dataset", "vit_for_small_dataset 1.4.3", arguments=SMALL),
    Case(NOW, "vit_for_small_dataset", "vit_for_small_dataset 1.4.3", arguments=SMALL),
    Case(NOW, "vit_for_small_dataset", "vit_for_small_dataset 1.4.3", arguments={**SMALL, "pool": "mean"}),
    Case(NOW, "vit_detpool", "vit_detpool 1.20.2", kind="ViTDetPool"),
    Case(NOW, "vit_detpool", "vit_detpool 1.20.2", kind="ViTDetPool", arguments={"use_cls_token": False}),
    Case("1.15.7", "distill", "vit 1.4.0", kind="DistillableViT"),
    Case(NOW, "distill", "vit 1.17.3", kind="DistillableViT", **MEAN),
]
# Their attention is torch's own kernel, so the comparison that requires 0.0 leaves them out.
FLASH = [
    Case("1.2.9", "simple_flash_attn_vit", "simple_vit 1.0.0", **SIMPLE),
    Case(NOW, "simple_flash_attn_vit", "simple_vit 1.0.0", **SIMPLE),
]


def outputs(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the logits of any model, or its features if it has no classifier."""
    with torch.no_grad():
        result = model(images)
    if isinstance(result, tuple):  # vit_with_decorr also returns a loss
        return result[0]
    if isinstance(result, torch.Tensor):
        return result
    return result.logits if "logits" in result else result.pooler_output


def tokens_between_blocks(module: nn.Module, case: Case, images: torch.Tensor) -> list[torch.Tensor]:
    """Return the tokens before each block of vit-pytorch's model, and after the last block before any norm."""
    caught: list[torch.Tensor] = []
    transformer = module.get_submodule("patch_transformer" if case.kind == "CaiT" else "transformer")
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
    """Return the largest difference relative to the largest value, the project's measure."""
    assert a.shape == b.shape
    return ((a - b).abs().max() / b.abs().max()).item()


def test_every_layout_has_a_case() -> None:
    elsewhere = {"na_vit 1.6.7", "na_vit_nested_tensor 1.7.6"}  # tests/sources/test_vit_pytorch_many_sizes.py
    assert {case.layout for case in CASES} | elsewhere == {layout.title for layout in LAYOUTS if layout.fault is None}


QUICK = [
    "0.0.2-vit_pytorch", "0.4.0-vit_pytorch", "0.6.6-vit_pytorch", "1.0.2-vit-mean", "1.4.0-vit-mean", "now-vit-0-mean",
    "0.40.2-simple_vit", "1.0.2-simple_vit", "now-simple_vit_with_register_tokens",
    "1.2.9-vit_with_patch_dropout-mean", "1.5.3-parallel_vit-1", "0.35.8-deepvit-mean",
]  # fmt: skip


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("case", CASES + FLASH, ids=str)
def test_a_model_opens_live_and_from_its_file_and_goes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    theirs, images = case.build(), case.images()
    state, expected = theirs.state_dict(), outputs(theirs, images)
    live = from_module(theirs, **case.live_hints)
    live.set_attn_implementation("sdpa")  # a different order of operations
    fused = distance(outputs(live, images), expected)
    assert fused <= 1e-5
    record({**case.record, "logits" if case in FLASH else "fused": fused})
    if case not in FLASH:
        live.set_attn_implementation("eager")
        with torch.no_grad():
            hidden_states = live(images, output_hidden_states=True).hidden_states
        tokens = tokens_between_blocks(theirs, case, images)
        assert len(hidden_states) == len(tokens) == 4
        blocks = [distance(a, b) for a, b in zip(hidden_states, tokens, strict=True)]
        logits = distance(outputs(live, images), expected)
        assert [*blocks, logits] == [0, 0, 0, 0, 0]
        record({**case.record, "logits": logits, "blocks": max(blocks)})

    torch.save(state, tmp_path / "theirs.pt")
    ours = from_checkpoint(tmp_path / "theirs.pt", **case.hints).model
    assert type(ours) is type(live)
    assert all(torch.equal(tensor, live.state_dict()[name]) for name, tensor in ours.state_dict().items())
    ours.set_attn_implementation(live.config._attn_implementation)
    assert torch.equal(outputs(ours, images), outputs(live, images))
    to_checkpoint(ours, tmp_path / "back.pt", format="vit_pytorch", layout=case.layout)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    decorrelation = {"decorr_loss.proj"}  # random directions, for a loss in training
    assert set(back) == set(state) - decorrelation
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.items())
    fresh = case.build(seed=1)
    fresh.load_state_dict(back, strict=not decorrelation & set(state))
    assert torch.equal(outputs(fresh, images), expected)
    record({**case.record, "way_back_bit_exact": True})


@pytest.mark.parametrize("case", [case for case in CASES if case.release == NOW], ids=str)
def test_live_module_of_today_comes_back_live(case: Case) -> None:
    if case.file in ("vit_with_decorr", "distill"):  # exported as the ViT inside
        case = Case(
            NOW, "vit", case.layout, arguments={name: case.arguments[name] for name in case.arguments if name == "pool"}
        )
    theirs, images = case.build(), case.images()
    back = to_module(from_module(theirs, **case.live_hints), "vit_pytorch")
    assert type(back) is type(theirs)
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.state_dict().items())
    assert torch.equal(outputs(back, images), outputs(theirs, images))


def small(kind: type[nn.Module] = ViT, **arguments: Any) -> nn.Module:
    """Return a small model of the installed release with random parameters."""
    sizes = {"image_size": (15, 28), "patch_size": (5, 7), "num_classes": 11, "dim": 20, "depth": 3, "heads": 3}
    return randomize_(kind(**{**sizes, "mlp_dim": 29, "dim_head": 13, **arguments})).eval()


# Other sizes than the native one


@pytest.mark.parametrize("release, pool", [("0.19.6", "cls"), ("0.19.6", "mean"), (NOW, "cls"), (NOW, "mean")])
def test_smaller_images_read_the_first_rows_of_the_table_as_the_package_does(release: str, pool: str) -> None:
    case = Case(release, "vit", "", arguments={"pool": pool, "image_size": (20, 28)})
    theirs, images = case.build(), torch.randn(3, 2, 15, 21)
    ours = from_module(theirs, image_size=(20, 28))
    ours.set_attn_implementation("eager")
    assert distance(outputs(ours, images), outputs(theirs, images)) == 0
    with pytest.raises(ValueError, match="cannot grow a table"):
        ours(torch.randn(3, 2, 25, 28))


def test_computed_positions_fit_any_grid_as_in_the_releases_that_computed_them() -> None:
    case = Case("0.40.2", "simple_vit", "", **SIMPLE)
    theirs, images = case.build(), torch.randn(3, 2, 25, 14)
    ours = from_module(theirs, image_size=case.image_size)
    ours.set_attn_implementation("eager")
    assert distance(outputs(ours, images), outputs(theirs, images)) == 0


# Other settings read from live modules


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_bfloat16_module_has_the_same_logits_in_bfloat16(pool: str) -> None:
    theirs, images = small(pool=pool).bfloat16(), torch.randn(2, 3, 15, 28).bfloat16()
    ours = from_module(theirs, image_size=(15, 28))
    ours.set_attn_implementation("eager")
    assert ours.dtype == torch.bfloat16
    assert distance(outputs(ours, images), outputs(theirs, images)) == 0
    assert to_module(ours, "vit_pytorch").state_dict()["mlp_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_and_dropouts_are_carried_there_and_back(training: bool) -> None:
    theirs = small(dropout=0.25, emb_dropout=0.125).train(training)
    ours = from_module(theirs, image_size=(15, 28))
    assert ours.training is training
    rates = (
        ours.config.hidden_dropout_prob,
        ours.config.attention_probs_dropout_prob,
        ours.config.embedding_dropout_prob,
    )
    assert rates == (0.25, 0.25, 0.125)
    back = to_module(ours, "vit_pytorch")
    assert back.training is training
    dropouts = [child.p for child in theirs.modules() if isinstance(child, nn.Dropout)]
    assert [child.p for child in back.modules() if isinstance(child, nn.Dropout)] == dropouts


def test_attention_weights_had_no_dropout_before_release_0_30() -> None:
    case = Case("0.19.6", "vit", "", arguments={"dropout": 0.25})
    config = from_module(case.build(), image_size=case.image_size).config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.25, 0)


def test_head_of_the_first_releases_has_dropout() -> None:
    case = Case("0.2.7", "vit_pytorch", "", **SQUARE, arguments={"dropout": 0.25})
    assert from_module(case.build()).config.classifier_dropout_prob == 0.25


@pytest.mark.parametrize(
    "file, kind", [("vit_with_patch_dropout", "ViT"), ("simple_vit_with_patch_dropout", "SimpleViT")]
)
def test_patch_dropout_is_carried_there_and_back(file: str, kind: str) -> None:
    case = Case(NOW, file, "", kind, arguments={"patch_dropout": 0.375})
    ours = from_module(case.build(), image_size=case.image_size)
    assert ours.config.patch_dropout_prob == 0.375
    assert to_module(ours, "vit_pytorch").get_submodule("patch_dropout").prob == 0.375


def test_nothing_is_shared_with_the_source() -> None:
    theirs = small()
    ours = from_module(theirs, image_size=(15, 28))
    back = to_module(ours, "vit_pytorch")
    memory = [tensor.untyped_storage().data_ptr() for model in (theirs, ours, back) for tensor in model.parameters()]
    assert len(set(memory)) == len(memory)
    assert all(parameter.requires_grad for parameter in (*ours.parameters(), *back.parameters()))


def test_model_without_classifier_is_the_bare_model_with_every_token() -> None:
    ours = from_module(small(num_classes=0), image_size=(15, 28))
    assert isinstance(ours, PlainViTModel)
    assert outputs(ours, torch.randn(2, 3, 15, 28)).shape == (2, 1 + 3 * 4, 20)


def test_image_size_is_asked_for_where_the_patches_make_no_square() -> None:
    with pytest.raises(AmbiguousCheckpointError, match="image_size") as caught:
        from_module(small())
    assert caught.value.candidates["image_size"] == ((15, 28), (20, 21), (10, 42), (30, 14), (5, 84), (60, 7))


def test_a_hint_that_contradicts_the_module_is_refused() -> None:
    with pytest.raises(ValueError, match="num_attention_heads=13 was given, but the module itself has 3"):
        from_module(small(), image_size=(15, 28), num_attention_heads=13)
    with pytest.raises(ValueError, match=r"image_size=.15, 21. has 9 patches"):
        from_module(small(), image_size=(15, 21))


def test_layers_with_unequal_heads_are_refused() -> None:
    theirs = small()
    setattr(theirs.get_submodule("transformer.layers.1.0"), "heads", 13)  # noqa: B010
    with pytest.raises(ExportError, match="heads"):
        from_module(theirs, image_size=(15, 28))


def test_parts_put_in_later_are_refused() -> None:
    theirs = small()
    theirs.get_submodule("transformer.layers.1.1.net")[2] = nn.ReLU()
    theirs.get_submodule("transformer.norm").eps = 1e-6  # type: ignore[assignment]
    with pytest.raises(ExportError) as caught:
        from_module(theirs, image_size=(15, 28))
    changed = {part.split(" ")[0] for part in caught.value.parts}
    assert changed >= {"transformer.layers.1.1.net.2.class", "transformer.norm.eps"}


def test_releases_whose_decorrelated_mlp_skips_its_norm_are_refused() -> None:
    case = Case("1.15.7", "vit_with_decorr", "")
    with pytest.raises(ExportError, match="does not read what its norm gives"):
        from_module(case.build(), image_size=case.image_size)


# Wrappers and derived classes


class Training(nn.Module):
    """A model as defined in a training script."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.augmentation = nn.Dropout2d()


class Renamed(ViT):
    """A derived class."""


def wrapped(name: str, theirs: nn.Module) -> nn.Module:
    """Return the model inside a wrapper of vit-pytorch, of torch, or of a script."""
    module = (
        importlib.import_module(f"vit_pytorch.{name}") if name in ("mae", "extractor", "recorder", "distill") else None
    )
    if name == "mae":
        return module.MAE(encoder=theirs, decoder_dim=17)
    if name == "extractor":
        return module.Extractor(theirs)
    if name == "recorder":
        return module.Recorder(theirs)
    if name == "compile":
        return torch.compile(theirs)  # type: ignore[return-value]
    return {"parallel": nn.DataParallel, "script": Training}[name](theirs)


@pytest.mark.parametrize("name", ["mae", "extractor", "recorder", "compile", "parallel", "script"])
def test_wrappers_are_unwrapped(name: str) -> None:
    theirs = small(SimpleViT)
    found, plain = from_module(wrapped(name, theirs)), from_module(theirs)
    assert all(torch.equal(tensor, plain.state_dict()[key]) for key, tensor in found.state_dict().items())


def test_derived_class_is_recognised() -> None:
    theirs, images = small(Renamed), torch.randn(2, 3, 15, 28)
    ours = from_module(theirs, image_size=(15, 28))
    assert distance(outputs(ours, images), outputs(theirs, images)) <= 1e-5  # fused attention


def test_copied_class_is_opened_when_its_format_is_given() -> None:
    copied = type("ViT", (nn.Module,), dict(vars(ViT)) | {"__module__": "my_models"})
    theirs: nn.Module = nn.Module.__new__(copied)
    theirs.__dict__.update(small().__dict__)
    with pytest.raises(UnknownFormatError, match="give format="):
        from_module(theirs)
    ours = from_module(theirs, format="vit_pytorch", image_size=(15, 28))
    assert ours.config.num_attention_heads == 3


def test_student_and_teacher_are_not_confused() -> None:
    student, teacher = small(SimpleViT), randomize_(small(SimpleViT), seed=1)
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_module(both)
    assert caught.value.candidates["key"] == ("student", "teacher")
    head = from_module(both, key="teacher").state_dict()["classifier.weight"]
    assert torch.equal(head, teacher.state_dict()["linear_head.weight"])


# Export of models that were not converted from vit-pytorch


def test_convolution_exports_back_as_a_dense_layer_over_the_pixels(tmp_path: Path) -> None:
    config = PlainViTConfig(
        hidden_size=21, num_hidden_layers=3, num_attention_heads=7, intermediate_size=29, image_size=(10, 21),
        patch_size=(5, 7), num_channels=2, layer_norm_eps=1e-5, qkv_bias=False, final_norm="after_pooling",
        pooling="mean", pool_prefix_tokens=True, num_labels=11,
    )  # fmt: skip
    ours, images = randomize_(PlainViTForImageClassification(config)).eval(), torch.randn(2, 2, 10, 21)
    to_checkpoint(ours, tmp_path / "vit.safetensors", format="vit_pytorch", layout="0.19.6")
    arguments = {"pool": "mean", "dim": 21, "heads": 7, "dim_head": 3, "num_classes": 11}
    theirs = Case("0.19.6", "vit", "", arguments=arguments).build()
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "vit.safetensors"))
    assert distance(outputs(theirs, images), outputs(ours, images)) <= 1e-5  # a convolution sums in a different order


def test_export_lists_all_parts_that_have_no_place() -> None:
    config = PlainViTConfig(
        hidden_size=20, num_hidden_layers=1, num_attention_heads=5, intermediate_size=29, layer_scale_init_value=0.1,
        use_distillation_token=True, drop_path_rate=0.25,
    )  # fmt: skip
    with pytest.raises(ExportError) as caught:
        to_module(PlainViTForImageClassification(config), "vit_pytorch")
    fields = {part.split(" ")[0] for part in caught.value.parts}
    assert fields >= {"layer_scale_init_value", "use_distillation_token", "qkv_bias", "layer_norm_eps"}


def test_a_module_that_would_train_differently_is_refused_but_its_file_is_not(tmp_path: Path) -> None:
    ours = from_module(small(), image_size=(15, 28))
    ours.config.drop_path_rate = 0.25
    with pytest.raises(ExportError, match=r"drop_path_rate = 0.25: 0 there"):
        to_module(ours, "vit_pytorch")
    to_checkpoint(ours, tmp_path / "vit.pt", format="vit_pytorch")


def test_export_names_the_layouts_that_have_a_place() -> None:
    case = Case("0.19.6", "vit", "")
    ours = from_module(case.build(), image_size=case.image_size)
    with pytest.raises(ExportError, match=r"layout=\.\.\.\) can write vit 0.6.7, vit 0.7.0, vit 0.10.1") as caught:
        to_module(ours, "vit_pytorch")
    assert caught.value.parts == ("position_embedding_on_prefix = True: False there",)  # of vit_with_patch_dropout
    with pytest.raises(ExportError, match="has no class in the layout vit 0.10.1"):
        to_module(ours, "vit_pytorch", layout="0.19.6")
    with pytest.raises(ValueError, match="'0.19.x' is no release of vit-pytorch"):
        to_module(ours, "vit_pytorch", layout="0.19.x")


def test_documentation_lists_every_layout() -> None:
    page = (ROOT / "docs" / "reference" / "vit_pytorch.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+ \d+\.\d+\.\d+)` \|", page, re.MULTILINE)
    assert listed == [layout.title for layout in LAYOUTS]
