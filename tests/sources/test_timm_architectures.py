"""The tables of architectures, compared with the installed timm and torchvision.

Every entry is compared even if the installed releases differ from those that the tables were generated from.
"""

import json
import re
from typing import Any
from unittest import mock

import open_clip
import pytest
import timm
import torch
import torchvision
import transformers
from timm.models import deit, vision_transformer, vision_transformer_hybrid
from torch.overrides import TorchFunctionMode

from plain_vit.conversion import from_module
from plain_vit.conversion.recognition import recognise
from plain_vit.conversion.registry import FORMATS
from plain_vit.conversion.sources.timm.constructors import CONSTRUCTORS
from plain_vit.conversion.sources.timm.names import families, part_of
from plain_vit.conversion.sources.timm.plain.source import VISION_TRANSFORMER
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.sources.timm.tables import own_parts
from plain_vit.conversion.sources.torchvision.pixels import published_files
from plain_vit.conversion.tables.data_files import SOURCES, data_file
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import AmbiguousCheckpointError, ExportError
from tests import ROOT
from tests.sizes import NIGHTLY, draws, few
from tools import generate_architectures as generator

INSTALLED = {
    "open_clip": open_clip.__version__,
    "timm": timm.__version__,
    "transformers": transformers.__version__,
    "torchvision": ".".join(torchvision.__version__.split("+")[0].split(".")[:2]),
}
RECORDED = {name: data_file(f"{name}/architectures.json")[name] for name in INSTALLED}
ARCHITECTURES, FAMILIES = VISION_TRANSFORMER.architectures, families()
DEFAULTS = VISION_TRANSFORMER.defaults


class Unfilled(TorchFunctionMode):
    """Skip the initialisation of tensors: all functions whose names end in an underscore."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fills = re.search("[a-z]_$", getattr(func, "__name__", "")) and isinstance(next(iter(args), None), torch.Tensor)
        return args[0] if fills else func(*args, **(kwargs or {}))


def skip_other_releases(package: str) -> None:
    if INSTALLED[package] != RECORDED[package]:
        pytest.skip(f"the table is of {package} {RECORDED[package]}, and {INSTALLED[package]} is installed")


@pytest.mark.slow
def test_the_table_is_what_timm_builds() -> None:
    theirs = generator.timm_architectures()
    if INSTALLED["timm"] == RECORDED["timm"]:
        assert len(theirs) == 179 + 9  # plain models, and hybrids with the paper's ResNet
        assert ARCHITECTURES.keys() == theirs.keys()
    for name in ARCHITECTURES.keys() & theirs.keys():
        assert {**DEFAULTS, **ARCHITECTURES[name]} == {**DEFAULTS, **theirs[name]}, name


@pytest.mark.slow(quick=["torchvision/architectures.json"])
@pytest.mark.parametrize("name", [name for name in generator.tables() if "families" not in name])
def test_a_table_is_written_again_as_it_is(name: str) -> None:
    skip_other_releases(name.partition("/")[0])
    assert (SOURCES / name).read_text(encoding="utf-8") == generator.as_json(generator.tables()[name]())


@pytest.mark.slow
def test_the_table_of_families_is_written_again_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_other_releases("timm")
    listed = timm.list_models
    models = [name for file in timm.list_modules() for name in few(listed(module=file), 2)]
    monkeypatch.setattr(timm, "list_models", lambda module="": listed(module=module) if module else models)
    with Unfilled():
        text = generator.as_json(generator.families_table())
    recorded = (SOURCES / "timm/families.json").read_text(encoding="utf-8")
    found, known = json.loads(text)["families"], json.loads(recorded)["families"]
    assert [*found] == [*known]
    for file, family in known.items():
        assert (found[file]["title"], found[file]["entrypoints"]) == (family["title"], family["entrypoints"])
    # Skipped models have further parts of their own file, or also have parts of another file.
    assert sum(found[file] != known[file] for file in known) <= draws(8, nightly=0)
    assert not NIGHTLY or text == recorded
    opened = set().union(*(constructor.architectures for constructor in CONSTRUCTORS))
    assert not opened & {name for family in FAMILIES.values() for name in family.entrypoints}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_old_names_are_what_timm_maps_them_to() -> None:
    for old, name in VISION_TRANSFORMER.old_names.items():
        with mock.patch.object(vision_transformer, "build_model_with_cfg") as builder, \
                mock.patch.object(deit, "build_model_with_cfg", builder), \
                mock.patch.object(vision_transformer_hybrid, "build_model_with_cfg", builder):  # fmt: skip
            timm.model_entrypoint(old)()
        assert builder.call_args.args[1] == VISION_TRANSFORMER.entrypoint(old) == name.partition(".")[0]
        assert name in TIMM.models or name.endswith("_224.sam")  # timm's own slip: its tag is sam_in1k


def test_published_files_are_known_by_the_hash_in_their_names() -> None:
    assert len(TIMM.published_files) == 15
    assert TIMM.published_files["deit_base_patch16_224-b5f2ef4d"] == "deit_base_patch16_224.fb_in1k"
    assert len(published_files()) == 10


# Every entrypoint


NAMES = ("vit_tiny_patch16_224", "vit_dwee_patch16_reg1_gap_256", "vit_tiny_r_s16_p8_224")


@pytest.mark.slow(quick=NAMES)
@pytest.mark.parametrize("name", [*NAMES, *few(sorted(ARCHITECTURES.keys() - NAMES), 24)])
def test_an_entrypoint_asks_without_its_name_and_opens_by_it(name: str) -> None:
    with Unfilled():
        tensors = generator.shapes_of(name)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        recognise(tensors, FORMATS, "the file", tensors, ()).describe_checkpoint(tensors, {}, Hints())
    assert name in caught.value.candidates["architecture"]
    config = TIMM.describe_checkpoint(tensors, {}, Hints(architecture=name)).config
    assert config.num_attention_heads == ARCHITECTURES[name]["num_heads"]
    assert config.image_shape == (ARCHITECTURES[name]["img_size"],) * 2


# The files of timm's Vision Transformers; docs/reference/timm.md lists their unsupported models.
VIT_FILES = ("vision_transformer", "deit", "vision_transformer_hybrid", "vision_transformer_relpos", "eva", "beit",
             "naflexvit")  # fmt: skip


def refused_with_a_reason() -> set[str]:
    """Return the entrypoints in the table of unsupported models, and check that each row has a reason."""
    page, _, _ = (ROOT / "docs" / "reference" / "timm.md").read_text(encoding="utf-8").partition("\n## Heads")
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", page, re.M)
    assert all(len(reason) > 20 for _, reason in rows)
    return {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}


def test_all_entrypoints_of_timms_vision_transformers_open_or_are_listed_with_a_reason() -> None:
    skip_other_releases("timm")
    entrypoints = {name for file in VIT_FILES for name in timm.list_models(module=file)}
    opened = set().union(*(constructor.architectures for constructor in CONSTRUCTORS))
    assert len(entrypoints) == 293
    assert opened <= entrypoints
    assert refused_with_a_reason() == entrypoints - opened
    assert len(opened) >= 285


@pytest.mark.slow
@pytest.mark.parametrize("file", VIT_FILES)
def test_an_entrypoint_of_a_file_opens_at_its_own_size_or_is_on_the_list(file: str) -> None:
    names, listed = timm.list_models(module=file), refused_with_a_reason()
    for name in {*few(names, 4), *(listed & set(names))}:
        with torch.device("meta"), Unfilled():  # recognition does not depend on values
            module = timm.create_model(name)
        if name in listed:
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
