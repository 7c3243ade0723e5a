"""The tables of architectures, against the timm and the torchvision that are installed.

Where these are of another release than the tables were written from, each entry is still compared with them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import timm
import torch
import torchvision
from timm.models import deit, vision_transformer, vision_transformer_hybrid

from plain_vit.conversion import from_module
from plain_vit.conversion.format import Hints
from plain_vit.conversion.recognition import recognise
from plain_vit.conversion.sources import FORMATS
from plain_vit.conversion.timm.architectures import ARCHITECTURES, OLD_NAMES, PUBLISHED_FILES, TIMM_VERSION
from plain_vit.conversion.timm.arguments import DEFAULTS
from plain_vit.conversion.timm.constructors import CONSTRUCTORS
from plain_vit.conversion.timm.families import FAMILIES
from plain_vit.conversion.timm.shapes import part_of
from plain_vit.conversion.timm.source import TIMM
from plain_vit.conversion.timm.tables import own_parts
from plain_vit.conversion.torchvision.architectures import FILES, TORCHVISION_VERSION
from plain_vit.errors import AmbiguousCheckpointError, ExportError, PlainViTError, UnknownFormatError
from tests import ROOT
from tools import generate_architectures as generator

INSTALLED = {"timm": timm.__version__, "torchvision": ".".join(torchvision.__version__.split("+")[0].split(".")[:2])}
RECORDED = {"timm": TIMM_VERSION, "torchvision": TORCHVISION_VERSION}


def skip_other_releases(package: str) -> None:
    if INSTALLED[package] != RECORDED[package]:
        pytest.skip(f"the table is of {package} {RECORDED[package]}, and {INSTALLED[package]} is installed")


@pytest.mark.slow
def test_the_table_is_what_timm_builds() -> None:
    theirs = generator.timm_architectures()
    if INSTALLED["timm"] == TIMM_VERSION:
        assert len(theirs) == 179 + 9  # plain ones, and the hybrids whose ResNet is the paper's
        assert ARCHITECTURES.keys() == theirs.keys()
    for name in ARCHITECTURES.keys() & theirs.keys():
        assert {**DEFAULTS, **ARCHITECTURES[name]} == {**DEFAULTS, **theirs[name]}, name


@pytest.mark.slow(quick=["torchvision-torchvision/architectures.py-torchvision_module"])
@pytest.mark.parametrize(
    "package, table, write",
    [
        ("timm", "timm/architectures.py", generator.architectures_module),
        ("timm", "timm/eva/architectures.py", generator.eva_module),
        ("timm", "timm/relative/beit_architectures.py", generator.beit_module),
        ("timm", "timm/relative/relpos_architectures.py", generator.relpos_module),
        ("torchvision", "torchvision/architectures.py", generator.torchvision_module),
    ],
)
def test_a_table_is_written_again_as_it_is(package: str, table: str, write: Callable[[], str]) -> None:
    skip_other_releases(package)
    assert (generator.PACKAGE / table).read_text() == write()


@pytest.mark.nightly
def test_the_table_of_families_is_written_again_as_it_is() -> None:
    skip_other_releases("timm")
    assert (generator.PACKAGE / "timm/families.py").read_text() == generator.families_module()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_old_names_are_what_timm_maps_them_to() -> None:
    for old, name in OLD_NAMES.items():
        with mock.patch.object(vision_transformer, "build_model_with_cfg") as builder, \
                mock.patch.object(deit, "build_model_with_cfg", builder), \
                mock.patch.object(vision_transformer_hybrid, "build_model_with_cfg", builder):  # fmt: skip
            timm.model_entrypoint(old)()
        assert builder.call_args.args[1] == name


def test_published_files_are_known_by_the_hash_in_their_names() -> None:
    assert TIMM.published_files == PUBLISHED_FILES
    assert len(PUBLISHED_FILES) == 15
    assert PUBLISHED_FILES["deit_base_patch16_224-b5f2ef4d"] == "deit_base_patch16_224.fb_in1k"
    assert len(FILES) == 10


# Every entrypoint


def refusal(tensors: Mapping[str, torch.Tensor], **hints: Any) -> PlainViTError:
    """Return the error that a bare file of these tensors gets."""
    with pytest.raises((UnknownFormatError, AmbiguousCheckpointError)) as caught:
        recognise(tensors, FORMATS, "the file", tensors, ()).describe_checkpoint(tensors, {}, Hints(**hints))
    return caught.value


def check_supported(name: str) -> None:
    """A supported entrypoint asks without a name, and opens with its own."""
    tensors = generator.shapes_of(name)
    asked = refusal(tensors)
    assert isinstance(asked, AmbiguousCheckpointError)
    assert name in asked.candidates["architecture"], (name, asked.candidates)
    config = TIMM.describe_checkpoint(tensors, {}, Hints(architecture=name)).config
    assert (config.num_attention_heads, config.image_shape) == (
        ARCHITECTURES[name]["num_heads"], (ARCHITECTURES[name]["img_size"],) * 2
    )  # fmt: skip


def check_refused(file: str, name: str) -> None:
    """An entrypoint of another file is refused by that file's name, live, from its tensors and by its own name."""
    with torch.device("meta"):
        module = timm.create_model(name)
    error = refusal(module.state_dict())
    assert f"{file}.py" in str(error), f"{name}: {error}"
    assert isinstance(error, UnknownFormatError)
    with pytest.raises(UnknownFormatError, match=rf"{name}.*{file}\.py"):
        TIMM.describe_checkpoint(generator_plain(), {"architecture": name}, Hints())
    with pytest.raises((ExportError, UnknownFormatError), match=type(module).__name__):
        from_module(module)


def generator_plain() -> dict[str, torch.Tensor]:
    """Return the tensors of a small plain model, whatever a name says of them."""
    with torch.device("meta"):
        return timm.create_model("test_vit").state_dict()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_dwee_patch16_reg1_gap_256", "vit_tiny_r_s16_p8_224"])
def test_an_entrypoint_asks_and_opens_by_its_name(name: str) -> None:
    check_supported(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_entrypoint_asks_and_opens_by_its_name(name: str) -> None:
    check_supported(name)


@pytest.mark.parametrize("name", ["convit_tiny", "cait_xxs24_224", "vit_base_mci_224", "levit_128",
                                  "samvit_base_patch16"])  # fmt: skip
def test_another_model_of_timm_is_refused_by_name(name: str) -> None:
    (file,) = [file for file, family in FAMILIES.items() if name in family.entrypoints]
    check_refused(file, name)


@pytest.mark.nightly
@pytest.mark.parametrize("file", FAMILIES)
def test_every_other_model_of_timm_is_refused_by_name(file: str) -> None:
    for name in FAMILIES[file].entrypoints:
        check_refused(file, name)


@pytest.mark.slow
def test_the_families_hold_all_of_their_files() -> None:
    skip_other_releases("timm")
    entrypoints = generator.other_entrypoints()
    assert {file: list(family.entrypoints) for file, family in FAMILIES.items()} == entrypoints
    opened = set(ARCHITECTURES).union(*(constructor.architectures for constructor in CONSTRUCTORS))
    assert not opened & {name for names in entrypoints.values() for name in names}


# The files of timm's Vision Transformers; docs/timm.md lists those of their models that do not open.
VIT_FILES = ("vision_transformer", "deit", "vision_transformer_hybrid", "vision_transformer_relpos", "eva", "beit",
             "naflexvit")  # fmt: skip


def refused_with_a_reason() -> set[str]:
    """Return the entrypoints in the table of refusals, each row of which has a reason."""
    page = (ROOT / "docs" / "timm.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", page, re.M)
    assert all(len(reason) > 20 for _, reason in rows)
    return {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}


def test_all_entrypoints_of_timms_vision_transformers_open_or_are_listed_with_a_reason() -> None:
    skip_other_releases("timm")
    entrypoints = {name for file in VIT_FILES for name in timm.list_models(module=file)}
    opened = set(ARCHITECTURES).union(*(constructor.architectures for constructor in CONSTRUCTORS))
    assert len(entrypoints) == 293
    assert opened <= entrypoints
    assert refused_with_a_reason() == entrypoints - opened
    assert len(opened) >= 285


@pytest.mark.nightly
@pytest.mark.parametrize("file", VIT_FILES)
def test_every_entrypoint_of_a_file_opens_at_its_own_size_or_is_on_the_list(file: str) -> None:
    for name in timm.list_models(module=file):
        with torch.device("meta"):  # what it is does not depend on its numbers
            module = timm.create_model(name)
        if name in refused_with_a_reason():
            with pytest.raises(ExportError, match="does not open|plain-vit does not know|no counterpart"):
                from_module(module)
        else:
            from_module(module)


def test_no_part_of_another_family_is_one_of_a_plain_model() -> None:
    own = own_parts()
    assert not any((family.marks | family.others) & own for family in FAMILIES.values())
    marks = [mark for family in FAMILIES.values() for mark in family.marks]
    assert len(marks) == len(set(marks)) > 500
    for name in ("vit_base_patch16_224", "deit_tiny_distilled_patch16_224", "test_vit3"):
        assert {part_of(tensor) for tensor in generator.shapes_of(name)} <= own
