"""The command line: what it prints, what it writes, and what it leaves untouched when something is wrong."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import vit_pytorch
from transformers import AutoModelForImageClassification

from plain_vit.cli import main
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, MappingError, OutputExistsError, PlainViTError
from tests.conftest import randomize_


@pytest.fixture
def foreign() -> torch.nn.Module:
    return randomize_(
        vit_pytorch.ViT(image_size=(15, 21), patch_size=(5, 7), num_classes=11, dim=24, depth=2, heads=3, dim_head=8,
                        mlp_dim=40)
    ).eval()  # fmt: skip


@pytest.fixture
def checkpoint(foreign: torch.nn.Module, tmp_path: Path) -> Path:
    path = tmp_path / "foreign.pt"
    torch.save(foreign.state_dict(), path)
    return path


HINTS = ["--num-attention-heads", "3", "--image-size", "15x21", "--patch-size", "5x7"]


def test_convert_writes_a_folder_with_the_numbers_of_the_source(
    foreign: torch.nn.Module, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), *HINTS]) == 0
    printed = capsys.readouterr().out
    assert "told: num_attention_heads = 3" in printed
    assert "logits: 0.0e+00" in printed  # the source's own model was run
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out", attn_implementation="eager")
    pixel_values = torch.randn(2, 3, 15, 21)
    with torch.no_grad():
        assert torch.equal(model(pixel_values).logits, foreign(pixel_values))


def test_inspect_says_what_is_open_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["inspect", str(checkpoint)]) == AmbiguousCheckpointError.exit_code
    printed = capsys.readouterr().err
    assert "num_attention_heads" in printed
    assert "Traceback" not in printed
    assert main(["inspect", str(checkpoint), *HINTS]) == 0
    assert "2 layers of width 24, 3 heads" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before


def test_verify_finds_the_first_stage_that_differs(
    foreign: torch.nn.Module, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "a"), "--no-verify", *HINTS]) == 0
    with torch.no_grad():
        foreign.transformer.layers[1][1].net[1].bias += 1
    torch.save(foreign.state_dict(), checkpoint)
    capsys.readouterr()
    assert main(["verify", str(checkpoint), str(tmp_path / "a"), *HINTS]) == 0
    table, _, unproven = capsys.readouterr().out.partition("not proven by this")
    shares = {line[:12].strip(): float(line.split()[-1]) for line in table.splitlines()[1:]}
    assert "num_attention_heads = 3, from the caller" in unproven
    assert shares["embeddings"] == shares["layer 1"] == 0
    assert shares["layer 2"] > 1e-3
    assert shares["logits"] > 1e-3


def test_export_gives_the_source_back_bit_for_bit(foreign: torch.nn.Module, checkpoint: Path, tmp_path: Path) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "ours"), *HINTS]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back.pt"), "--to", "vit_pytorch"]) == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == foreign.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in foreign.state_dict().items())


def test_an_output_in_use_is_refused_before_any_work_and_stays(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), *HINTS]) == OutputExistsError.exit_code
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_force_replaces_a_whole_model_folder(checkpoint: Path, tmp_path: Path) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), *HINTS]) == 0
    (tmp_path / "out" / "stale.txt").write_text("of the old model")
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--force", *HINTS]) == 0
    assert not (tmp_path / "out" / "stale.txt").exists()
    from_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    "spoil, kind",
    [
        (lambda state: state.pop("transformer.layers.1.0.to_qkv.weight"), MappingError),
        (lambda state: state.update(surplus=torch.ones(2)), MappingError),
        (lambda state: state["mlp_head.weight"].fill_(float("nan")), MappingError),
    ],
)
def test_a_spoilt_checkpoint_is_refused_and_nothing_is_written(
    spoil: Callable[[dict], object], kind: type[PlainViTError], foreign: torch.nn.Module, tmp_path: Path
) -> None:
    state = foreign.state_dict()
    spoil(state)
    torch.save(state, tmp_path / "spoilt.pt")
    assert main(["convert", str(tmp_path / "spoilt.pt"), str(tmp_path / "out"), *HINTS]) == kind.exit_code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spoilt.pt"]


def test_a_truncated_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), *HINTS]) == CheckpointError.exit_code
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_stack_trace(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(tmp_path / "missing.pt"), "--debug"]) == CheckpointError.exit_code
    assert "Traceback" in capsys.readouterr().err


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("plain-vit")
    help_text = subprocess.run([str(command), "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in help_text for name in ("convert", "export", "inspect", "verify"))
