"""vit-pytorch's models that replace one part of the plain ViT: gradients, bfloat16, folders, other sizes."""

import pkgutil
import re
from pathlib import Path

import pytest
import torch
import vit_pytorch
from torch import nn
from transformers import AutoModelForImageClassification

from plain_vit.conversion import from_checkpoint, from_module, to_module
from plain_vit.conversion.sources.vit_pytorch.layouts import CLASSES
from plain_vit.errors import AmbiguousCheckpointError, ExportError, MappingError
from tests import ROOT
from tests.sources.test_vit_pytorch import CASES, NOW, Case, distance, outputs

FILES = ("parallel_vit", "deepvit", "cait", "vit_for_small_dataset")
RELATIVES = [case for case in CASES if case.release == NOW and case.file in FILES]
relatives = pytest.mark.parametrize("case", RELATIVES, ids=str)


def opened(theirs: nn.Module, case: Case) -> nn.Module:
    ours = from_module(theirs, **case.live_hints)
    ours.set_attn_implementation("eager")
    return ours


def test_every_relative_has_a_case() -> None:
    assert {case.file for case in RELATIVES} == set(FILES) <= CLASSES.keys()


@relatives
def test_gradients_are_those_of_the_package(case: Case) -> None:
    # In float64, because terms in the gradient of a temperature cancel: in float32 rounding exceeds 1e-5.
    theirs, images = case.build().double(), case.images(batch=3).double()
    ours = opened(theirs, case).double()
    weights = torch.randn(3, 7, dtype=torch.float64)
    (theirs(images) * weights).sum().backward()
    (ours(images).logits * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    theirs.load_state_dict(gradients)  # in place of the weights, to be converted
    expected = from_module(theirs, **case.live_hints).state_dict()
    for name, parameter in ours.named_parameters():
        assert distance(parameter.grad, expected[name]) <= 1e-10, name


@relatives
def test_bfloat16_has_the_same_logits(case: Case) -> None:
    theirs, images = case.build().bfloat16(), case.images().bfloat16()
    # The package rounds after each branch, plain-vit and timm after all branches.
    rounding = 2**-7 if case.arguments.get("num_parallel_branches", 2) > 2 else 0
    assert distance(outputs(opened(theirs, case), images), outputs(theirs, images)) <= rounding


@relatives
def test_a_saved_folder_opens_with_the_same_logits(case: Case, tmp_path: Path) -> None:
    ours, images = from_module(case.build(), **case.live_hints), case.images()
    ours.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(outputs(again, images), outputs(ours, images))


@relatives
def test_smaller_images_have_the_logits_of_the_package(case: Case) -> None:
    theirs = case.build()
    rows, columns = (side - pixels for side, pixels in zip(case.image_size, pair_of(case), strict=True))
    images = torch.randn(2, case.settings["channels"], rows, columns)
    # With few tokens, products sum in a different order if queries and keys are parts of one tensor.
    assert distance(outputs(opened(theirs, case), images), outputs(theirs, images)) <= 1e-5


def pair_of(case: Case) -> tuple[int, int]:
    size = case.settings["patch_size"]
    return (size, size) if isinstance(size, int) else size


def test_the_heads_of_a_deepvit_are_known_from_its_file(tmp_path: Path) -> None:
    case = next(case for case in RELATIVES if case.file == "deepvit")
    torch.save(case.build().state_dict(), tmp_path / "vit.pt")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(tmp_path / "vit.pt")
    assert caught.value.candidates.keys() == {"pooling", "patch_size", "image_size"}
    with pytest.raises(MappingError, match="3 by the shape of what mixes them"):
        from_checkpoint(tmp_path / "vit.pt", **{**case.hints, "num_attention_heads": 11})


def test_a_cait_that_drops_layers_in_evaluation_is_refused() -> None:
    case = next(case for case in RELATIVES if case.file == "cait")
    theirs = case.build()
    theirs.patch_transformer.layer_dropout = 0.25
    with pytest.raises(ExportError, match="layer_dropout is 0.25, not 0.0"):
        from_module(theirs)


def test_the_channels_of_a_cait_are_three(tmp_path: Path) -> None:
    case = next(case for case in RELATIVES if case.file == "cait")
    torch.save(case.build().state_dict(), tmp_path / "vit.pt")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(tmp_path / "vit.pt")
    assert caught.value.candidates.keys() == {"patch_size", "image_size"}
    assert (5, 5) in caught.value.candidates["patch_size"]


def test_a_learned_factor_is_no_setting(tmp_path: Path) -> None:
    case = next(case for case in RELATIVES if case.file == "vit_for_small_dataset")
    ours = from_module(case.build(), image_size=case.image_size)
    assert ours.config.attention_scale is None
    with pytest.raises(ValueError, match="attention_scale=0.5"):
        from_module(case.build(), image_size=case.image_size, attention_scale=0.5)


def test_classes_with_square_sizes_do_not_represent_others() -> None:
    case = next(case for case in RELATIVES if case.file == "deepvit")
    ours = from_module(case.build())
    ours.config.image_size = (25, 50)
    with pytest.raises(ExportError, match=r"image_size = \(25, 50\): a square there"):
        to_module(ours, "vit_pytorch", layout="deepvit 1.26.11")


def test_every_module_of_the_package_opens_or_is_on_the_list_with_a_reason() -> None:
    page = (ROOT / "docs" / "reference" / "vit_pytorch.md").read_text(encoding="utf-8")
    section = page.split("## What does not open")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    modules = {info.name for info in pkgutil.iter_modules(vit_pytorch.__path__)}
    assert sorted(listed) == sorted(modules - CLASSES.keys())
