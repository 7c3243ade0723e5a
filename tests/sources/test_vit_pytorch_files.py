"""Bare files of vit-pytorch, opened with correct hints: the module's outputs, or an error."""

import importlib
import inspect
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plain_vit.conversion.sources.vit_pytorch.layouts import CLASSES as OPENED
from plain_vit.conversion.sources.vit_pytorch.layouts import RENAMED_FILES
from tests.conftest import randomize_
from tests.peers import FOLDER, RELEASES, vit_pytorch_release
from tests.sizes import NIGHTLY, draws, few
from tests.sources.test_families import CLASSES, build
from tests.sources.truthful import TOLERANCE, Tally, logits_differ_by, open_truthfully

NOW = "1.26.11"
# Files whose models are the same as another file's.
SQUARE = {"deepvit", "cait", "vit_for_small_dataset"}  # with square patches
SAME = {"simple_flash_attn_vit": "simple_vit", "simple_vit_with_patch_dropout": "simple_vit", "distill": "vit"}


class FirstOutput(nn.Module):
    """Wrap a model that returns a loss with its logits; call it image by image, as the first release requires."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        results = [self.model(image[None]) for image in pixel_values]
        return torch.cat([result[0] if isinstance(result, tuple) else result for result in results])


@dataclass(frozen=True)
class Truth:
    """The owner's knowledge of how a model was built.

    Args:
        file: The file of the package.
        release: Release of the package.
        arguments: Arguments of the class.
    """

    file: str
    release: str
    arguments: dict[str, Any]

    def __call__(self, name: str, candidates: Sequence[object]) -> object | None:
        answers = {
            "num_attention_heads": self.arguments.get("heads", 3),
            "image_size": self.arguments.get("image_size", 32),
            "patch_size": self.arguments.get("patch_size", self.arguments.get("image_patch_size")),
            "num_channels": self.arguments.get("channels", 3),
            "pooling": self.arguments.get("pool", "cls"),
        }
        return self.layout(candidates) if name == "layout" else answers.get(name)

    def layout(self, candidates: Sequence[object]) -> object | None:
        """Return the newest candidate that this file had in this release."""
        file = RENAMED_FILES.get(self.file, self.file)
        known = [str(title).split() for title in candidates]
        mine = [
            since for title, since in known if title == SAME.get(file, file) and number(since) <= number(self.release)
        ]
        return f"{SAME.get(file, file)} {max(mine, key=number)}" if mine else None


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def equal_or_refused(module: nn.Module, truth: Truth, path: Path, shape: Sequence[int], **options: Any) -> str:
    """Return why a bare file was refused, or an empty text if it opened with the outputs of the module."""
    torch.save(module.state_dict(), path)
    outcome = open_truthfully(path, truth, **options)
    if outcome.converted is None:
        return outcome.refusal
    off = logits_differ_by(FirstOutput(module), outcome.converted.model, shape)
    assert off <= TOLERANCE, f"{truth} opened with {outcome.answers} and is off by {off}"
    return ""


# Every class of the package

# Options that remove names from a class, so that it resembles others.
OPTIONS: dict[str, dict[str, Any]] = {
    "attn_residual_with_dca_simple_vit.SimpleViT": {"gate": False},
    "na_vit_nested_tensor.NaViT": {"qk_rmsnorm": False},
    "rvt.RvT": {"use_rotary": False, "use_ds_conv": False, "use_glu": False},
    "simple_vit_attn_residual.SimpleViTAttnResidual": {"learned_query": False},
    "simple_vit_orthog_residual_update.SimpleViT": {"orthog_residual_update_kwargs": {"learned": True}},
    "simple_vit_with_sparse_gating.SimpleViTWithSparseGating": {"num_register_tokens": 0},
    "simple_vit_with_specialized_cls.SimpleViT": {"specialize_qkv_depth": 0},
    "vat.ViT": {"num_register_tokens": 0},
    "vit_nd.ViTND": {"pool": "mean"},
}
REFUSED_WITH = {"na_vit_nested_tensor.NaViT"}  # supported without these options
# Wrappers around a model, and an encoder without a head, which its names do not distinguish from others.
AROUND = {"learnable_memory_vit.Adapter", "efficient.ViT", "distill.DistillableEfficientViT"}
STUDENTS = {"distill.DistillableT2TViT": "t2t"}


def built_with(name: str, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of the installed release, and the arguments it was built with."""
    file, kind = CLASSES[name]
    said: dict[str, Any] = {}

    class Recorded(kind):  # type: ignore[misc, valid-type]
        __signature__ = inspect.signature(kind)

        def __init__(self, *args: Any, **kwargs: Any):
            said.update(kwargs, **options)
            super().__init__(*args, **{**kwargs, **options})

    return build(file, Recorded), said


@pytest.mark.slow(
    quick=[
        "learnable_memory_vit.Adapter-False",
        "look_vit.LookViT-False",
        "parallel_vit.ViT-False",
        "simple_vit_attn_residual.SimpleViTAttnResidual-False",
    ]
)
@pytest.mark.parametrize("name, options", [*((name, False) for name in CLASSES), *((name, True) for name in OPTIONS)])
def test_a_file_of_any_class_opens_with_its_numbers_or_is_refused_by_its_name(
    name: str, options: bool, tmp_path: Path
) -> None:
    file, kind = CLASSES[name]
    try:
        module, said = built_with(name, OPTIONS[name] if options else {})
    except TypeError:  # a distillation student cannot be subclassed
        module, said = build(file, kind), {}
    said = {"image_size": 32, "patch_size": 8, **said}
    if all(parameter.numel() for parameter in module.parameters()):
        randomize_(module)
    refusal = equal_or_refused(module.eval(), Truth(file, NOW, said), tmp_path / "vit.pt", (3, 32, 32))
    if file in OPENED and OPENED[file] == kind.__name__ and not (options and name in REFUSED_WITH):
        assert not refusal
    elif refusal and name not in AROUND:
        assert STUDENTS.get(name, file) in refusal or "does not open this model of vit-pytorch yet" in refusal, refusal


def classes_of(release: str) -> Iterator[tuple[str, type[nn.Module]]]:
    """Yield the classes of an old release with a configurable number of classes, with their files."""
    for path in sorted((FOLDER / f"vit_pytorch-{release}" / "vit_pytorch").glob("*.py")):
        if path.stem == "__init__":
            continue
        try:
            file = vit_pytorch_release(release, path.stem)
        except ImportError:  # an audio model, which needs another package
            continue
        for kind in vars(file).values():
            own = inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == file.__name__
            if own and {"num_classes", "dim"} <= inspect.signature(kind).parameters.keys():
                yield path.stem, kind


@pytest.mark.slow
@pytest.mark.parametrize("release", few(RELEASES, 11))
def test_a_file_of_any_class_of_an_old_release_opens_with_its_numbers_or_is_refused(
    release: str, tmp_path: Path
) -> None:
    opened = 0
    for file, kind in classes_of(release):
        if file == "t2t" and number(release) < (0, 35) and not NIGHTLY:
            continue  # has 800 million parameters at any size
        taken = inspect.signature(kind).parameters
        try:
            module = build(file, kind)
        except (AssertionError, AttributeError, TypeError, ValueError):  # needs other sizes than the rest
            continue
        said = {name: value for name, value in SIZES.items() if name in taken}
        truth = Truth(file, release, said)
        if all(parameter.numel() for parameter in module.parameters()):
            randomize_(module)
        opened += not equal_or_refused(module.eval(), truth, tmp_path / "vit.pt", (3, 32, 32))
    assert opened or release in ("0.2.7", "0.3.0", "0.4.0", "0.6.6", "0.6.8")  # these need more patches


SIZES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "image_patch_size": 8, "heads": 3, "channels": 3}

# Random models

FILES: list[tuple[str, str]] = [
    *((NOW, file) for file in OPENED),
    ("0.1.0", "vit_pytorch"), ("0.2.1", "vit_pytorch"), ("0.6.6", "vit_pytorch"), ("0.6.8", "vit_pytorch"),
    ("0.7.6", "vit_pytorch"), ("0.19.6", "vit"), ("0.40.2", "vit"), ("0.40.2", "vit_3d"), ("0.40.2", "ats_vit"),
    ("0.40.2", "simple_vit"), ("0.40.2", "simple_vit_1d"), ("0.40.2", "vit_with_patch_dropout"), ("1.2.9", "vit"),
    ("1.2.9", "vit_3d"), ("1.2.9", "simple_vit"), ("1.4.0", "simple_vit"), ("1.15.7", "vit"), ("1.16.2", "vit"),
    ("1.15.7", "vit_with_decorr"), (NOW, "vit_3d"), (NOW, "simple_vit_3d"), (NOW, "simple_vit_1d"), (NOW, "vit_nd"),
    (NOW, "ats_vit"), (NOW, "vit_1d"),
]  # fmt: skip


def drawn(rng: random.Random) -> tuple[nn.Module, Truth, tuple[int, int, int]]:
    """Return a random model, how it was built, and the shape of its images."""
    while True:
        release, file = rng.choice(FILES)
        module = (
            importlib.import_module(f"vit_pytorch.{file}") if release == NOW else vit_pytorch_release(release, file)
        )
        name = (
            OPENED.get(RENAMED_FILES.get(file, file))
            or {"vit_nd": "ViTND"}.get(file)
            or ("SimpleViT" if file.startswith("simple") else "ViT")
        )
        kind = getattr(module, name)
        taken = inspect.signature(kind).parameters
        patch = rng.randint(1, 6), rng.randint(1, 6)
        grid = rng.randint(1, 5), rng.randint(1, 5)
        channels = 3 if file == "cait" else rng.randint(1, 5)
        if number(release) < (0, 19) or file in SQUARE:
            patch, grid = (patch[0], patch[0]), (grid[0] + 4, grid[0] + 4)
        if file in ("na_vit", "na_vit_nested_tensor"):
            patch = patch[0], patch[0]
        size = patch[0] * grid[0], patch[1] * grid[1]
        square = number(release) < (0, 19) or file in SQUARE
        heads, head_dim = rng.randint(1, 4), rng.choice([4, 6, 8])
        depth = rng.randint(1, 3)
        arguments: dict[str, Any] = {
            "image_size": size[0] if square else size, "patch_size": patch[0] if square else patch,
            "image_patch_size": patch, "frames": 2, "frame_patch_size": rng.choice([1, 2]), "seq_len": 4 * patch[0],
            "ndim": 2, "input_shape": size, "max_tokens_per_depth": (3,) * depth, "channels": channels,
            "num_classes": rng.choice([3, 5, 7]), "dim": rng.choice([heads * head_dim, 12, 16, 20]), "depth": depth,
            "heads": heads, "dim_head": head_dim, "mlp_dim": rng.randint(1, 30), "pool": rng.choice(["cls", "mean"]),
            "num_register_tokens": rng.randint(1, 3), "patch_dropout": 0.25, "use_cls_token": rng.random() < 0.5,
            "qk_norm": True, "cls_depth": 2,
        }  # fmt: skip
        if file in ("simple_vit_1d", "vit_1d", "na_vit", "na_vit_nested_tensor"):
            arguments["patch_size"] = patch[0]
        if "dim_head" not in taken:
            arguments["dim"] = heads * head_dim
        arguments["dim"] += -arguments["dim"] % (heads if "dim_head" not in taken else 1)
        if "simple" in file or file == "vit_3d":  # sine-cosine positions in four or six parts
            arguments["dim"] += -arguments["dim"] % 12
        try:
            model = kind(**{name: value for name, value in arguments.items() if name in taken})
        except AssertionError:  # too few patches for some releases
            continue
        said = {name: value for name, value in arguments.items() if name in taken}
        return randomize_(model, rng.randint(0, 99)).eval(), Truth(file, release, said), (channels, *size)


@pytest.mark.slow
def test_random_files_open_with_the_numbers_of_their_model_or_are_refused(tmp_path: Path) -> None:
    rng, tally = random.Random(0), Tally()
    for draw in range(draws(60, nightly=1000)):
        module, truth, shape = drawn(rng)
        path = tmp_path / "vit.pt"
        torch.save(module.state_dict(), path)
        plain = OPENED.get(RENAMED_FILES.get(truth.file, truth.file)) == type(module).__name__
        options: dict[str, Any] = {}
        if plain and draw % 6 == 0:
            pixel_values = torch.randn(2, *shape)
            with torch.no_grad():
                options["reference"] = pixel_values, FirstOutput(module)(pixel_values)
        outcome = open_truthfully(path, truth, **options)
        refused_rightly = not plain or (truth.file, truth.release) == ("vit_with_decorr", "1.15.7")
        if outcome.converted is None:
            assert refused_rightly, f"{truth} was refused: {outcome.refusal}"
            tally.add(outcome)
            continue
        assert not refused_rightly, f"{truth} opened, with {outcome.answers}"
        off = logits_differ_by(FirstOutput(module), outcome.converted.model, shape)
        assert off <= TOLERANCE, f"{truth} opened with {outcome.answers} and is off by {off}"
        tally.add(outcome, off)
    assert tally.opened >= tally.total / 2, str(tally)
