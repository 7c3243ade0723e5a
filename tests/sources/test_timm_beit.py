"""Special features of timm's Beit and VisionTransformerRelPos: networks and tables of relative positions."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from timm.models.beit import gen_relative_position_index as beit_index

from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.sources.timm.relative.beit import BEIT
from plain_vit.conversion.sources.timm.relative.relpos import RELPOS
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError
from tests import ROOT
from tests.sources.timm_models import (
    TOLERANCE,
    asked_of,
    meta_state,
    pixels_for,
    rounding,
    same_tensors,
    stage_differences,
    tiny_timm,
)
from tests.tiny import difference

NAME = "beit_base_patch16_224"


@pytest.mark.parametrize("shared", [False, True])
def test_the_network_of_the_distances_drops_units_in_training_as_timms(shared: bool) -> None:
    module = tiny_timm("vit_relpos_base_patch16_cls_224", shared_rel_pos=shared).train()
    model = from_module(module)
    assert model.training
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        theirs = module(pixels_for(module))
        torch.manual_seed(seed)
        ours = model(pixels_for(module)).logits
        assert difference(ours, theirs) <= TOLERANCE
        found.append(ours)
    assert difference(*found) > 1e-4


def test_coordinates_rounded_by_a_cast_and_back_are_named_and_computed_again() -> None:
    module = tiny_timm("vit_srelpos_small_patch16_224").to(torch.bfloat16).float()
    with pytest.raises(ExportError, match=r"shared_rel_pos.rel_coords_log has not .*'shared_rel_pos'"):
        from_module(module)
    module.get_submodule("shared_rel_pos").init_non_persistent_buffers()
    assert max(stage_differences(module, from_module(module), pixels_for(module)).values()) <= TOLERANCE


@pytest.mark.slow(quick=[NAME])
@pytest.mark.parametrize("name", [NAME, "vit_relpos_base_patch32_plus_rpn_256"])
def test_a_table_that_timm_reads_as_that_of_a_square_is_not_written(name: str, tmp_path: Path) -> None:
    patch = 16 if name == NAME else 32
    kind = {} if name == NAME else {"rel_pos_type": "bias"}
    for grid, refused in (((2, 14), True), ((14, 2), True), ((2, 13), False), ((3, 3), False)):
        size = tuple(side * patch for side in grid)
        module = tiny_timm(name, img_size=size, depth=1, **kind)
        save_for_hf(module, tmp_path / f"theirs {grid}", safe_serialization=True)
        loaded = timm.create_model(f"local-dir:{tmp_path / f'theirs {grid}'}", pretrained=True)
        assert same_tensors(module, loaded) == (not refused)  # timm's own file, read by timm
        model = from_checkpoint(tmp_path / f"theirs {grid}").model
        assert max(stage_differences(module, model, pixels_for(module)).values()) <= rounding(module)
        if refused:
            with pytest.raises(ExportError, match=f"{grid[0]} x {grid[1]} patches, 81 distances"):
                to_checkpoint(model, tmp_path / f"ours {grid}", format="timm")
            assert same_tensors(module, to_module(model, "timm"))
        else:
            to_checkpoint(model, tmp_path / f"ours {grid}", format="timm")


def test_the_table_tells_the_grids_that_are_possible() -> None:
    state = meta_state(NAME, img_size=(48, 80))
    asked = asked_of(state, architecture=NAME)
    assert "relative_position_bias_table has 48 rows" in str(asked)
    assert asked.candidates["image_size"][:2] == ((48, 80), (80, 48))
    said = Hints(architecture=NAME, image_size=(80, 48))
    assert TIMM.describe_checkpoint(state, {}, said).config.image_size == (80, 48)
    with pytest.raises(CheckpointError, match="correct image_size"):
        TIMM.describe_checkpoint(state, {}, Hints(architecture=NAME, image_size=224))
    asked = asked_of(state)
    assert "Beit" in str(asked)
    assert "beit_base_patch16_384" in asked.candidates["architecture"]
    state = {name: tensor[:-1] if name.endswith("table") else tensor for name, tensor in state.items()}
    with pytest.raises(MappingError, match="47 rows"):
        TIMM.describe_checkpoint(state, {}, Hints(architecture=NAME))


def old_file(path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, torch.Tensor]) -> tuple[Any, Path]:
    """Return a small model and its file with the index buffers that older releases saved, some of them changed."""
    small = {"embed_dim": 56, "num_heads": 7, "depth": 3, "mlp_ratio": 4.0, "img_size": (48, 80)}
    monkeypatch.setitem(BEIT.architectures, NAME, {**BEIT.architectures[NAME], **small})
    module = tiny_timm(NAME, img_size=(48, 80))
    index = {f"blocks.{i}.attn.relative_position_index": beit_index((3, 5)) for i in range(3)}
    save_file({**module.state_dict(), **index, **changed}, path)
    return module, path


def test_the_integers_that_earlier_releases_saved_are_compared_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = old_file(tmp_path / "old.safetensors", monkeypatch, {})
    with pytest.raises(AmbiguousCheckpointError, match="Beit"):
        from_checkpoint(path)
    converted = from_checkpoint(path, architecture=NAME, verify=True)
    assert max(stage_differences(module, converted.model, pixels_for(module)).values()) == 0.0
    with pytest.raises(MappingError, match=r"blocks.0.attn.relative_position_index.*grid of \(5, 3\)"):
        from_checkpoint(path, architecture=NAME, image_size=(80, 48))
    monkeypatch.undo()
    to_checkpoint(converted.model, tmp_path / "ours", format="timm", layout="beit_index")
    ours, theirs = load_file(tmp_path / "ours" / "model.safetensors"), load_file(path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again: Any = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    assert same_tensors(module, again)


def test_other_integers_than_ours_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"blocks.1.attn.relative_position_index": beit_index((3, 5)).flip(0)}
    _, path = old_file(tmp_path / "old.safetensors", monkeypatch, changed)
    with pytest.raises(MappingError, match=r"blocks.1.attn.relative_position_index.*grid of \(3, 5\)"):
        from_checkpoint(path, architecture=NAME)


def test_the_tables_have_all_entrypoints_of_both_files() -> None:
    assert set(BEIT.architectures) == set(timm.list_models(module="beit"))
    assert set(RELPOS.architectures) == set(timm.list_models(module="vision_transformer_relpos"))
    assert (len(BEIT.architectures), len(RELPOS.architectures)) == (7, 14)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "all 21 of `beit` and `vision_transformer_relpos`" in readme
