"""The command line: its output, the files it writes, and files that stay untouched after errors."""

import argparse
import getpass
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import vit_pytorch
from matplotlib.figure import Figure
from PIL import Image
from transformers import AutoModelForImageClassification

import plain_vit
from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor, cli
from plain_vit.cli import read_labels
from plain_vit.conversion import catalogue, from_checkpoint
from plain_vit.conversion.registry import FORMATS as REGISTRY
from plain_vit.conversion.tables.format import HINTS as ARGUMENTS
from plain_vit.conversion.tables.format import Inference
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    DataError,
    HubError,
    MappingError,
    OutputError,
    OutputExistsError,
    PlainViTError,
    VerificationError,
)
from plain_vit.training.arguments import SCRIPTS as SCRIPT_OPTIONS
from plain_vit.training.arguments import parse_arguments
from plain_vit.training.data.glyphs import CHARACTERS
from plain_vit_command import COMMANDS, ENGINES, FOLDERS, FORMATS, HINTS, PREFIXES, SCRIPTS, main, parser_of
from tests import ROOT
from tests.conftest import randomize_
from tests.hub.endpoint import HubEndpoint
from tests.model import bare
from tests.sizes import few
from tests.tiny import tiny_config
from tests.training.runs import open_script


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


@pytest.fixture
def converted(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> list[str]:
    """Return the words that compare the checkpoint with the folder, its name with a point, that it was converted to."""
    folder = str(tmp_path / "vit.v1.5")
    assert main(["convert", str(checkpoint), folder, "--no-verify", *SAID]) == 0
    capsys.readouterr()
    return ["verify", str(checkpoint), folder, *SAID]


SAID = ["--num-attention-heads", "3", "--image-size", "15x21", "--patch-size", "5x7"]


def test_convert_writes_a_folder_with_the_numbers_of_the_source(
    foreign: torch.nn.Module, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), *SAID]) == 0
    printed = capsys.readouterr().out
    assert "num_attention_heads = 3, from the caller" in printed
    assert "logits: 0.0e+00" in printed  # the source's own model was run
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out", attn_implementation="eager")
    pixel_values = torch.randn(2, 3, 15, 21)
    with torch.no_grad():
        assert torch.equal(model(pixel_values).logits, foreign(pixel_values))


def test_inspect_reports_what_is_missing_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["inspect", str(checkpoint)]) == AmbiguousCheckpointError.exit_code
    printed = capsys.readouterr().err
    assert "num_attention_heads" in printed
    assert "AmbiguousCheckpointError: the tensors of a ViT of vit-pytorch (" in printed  # which says the format itself
    assert "Traceback" not in printed
    assert main(["inspect", str(checkpoint), *SAID]) == 0
    assert "2 layers of width 24, 3 heads" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_that_was_typed_is_suggested_with_what_is_missing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    Image.new("RGB", (30, 40)).save(tmp_path / "image.png")
    out, seen = str(tmp_path / "out"), str(tmp_path / "image.png")
    for words in (
        ["inspect", str(checkpoint), *SAID[2:]],
        ["verify", str(checkpoint), str(checkpoint)],
        ["export", str(checkpoint), out, "--to", "timm"],
        ["show", seen, "--model", str(checkpoint), "--out", out],
        ["predict", seen, "--model", str(checkpoint)],
    ):
        assert main(words) == AmbiguousCheckpointError.exit_code
        (command,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  plain-vit ")]
        assert command.startswith(f"  {shlex.join(['plain-vit', *words])} --num-attention-heads ")
    assert main(["convert", str(checkpoint), out, *SAID, "--no-verify"]) == 0
    assert main(["verify", out, str(checkpoint)]) == AmbiguousCheckpointError.exit_code
    assert f"  plain-vit convert {checkpoint} OUT --num-attention-heads " in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if script in SCRIPT_OPTIONS])
def test_the_command_of_a_script_is_suggested_with_hints_about_its_model(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def suggested(words: list[str]) -> str:
        with pytest.raises(SystemExit) as left:
            main([name, *words])
        assert left.value.code == AmbiguousCheckpointError.exit_code
        (command,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  plain-vit ")]
        return command

    folder = "--output" if name == "evaluate" else "--output_dir"
    words = ["--model", str(checkpoint), "--dataset", "digits", folder, str(tmp_path / "out.json")]
    command = suggested(words)
    typed = shlex.join(["plain-vit", name, *words])
    assert re.fullmatch(re.escape(f"  {typed}") + r" --model_hints( [a-z_]+=\w+){3}", command)
    given = command.split("--model_hints ")[1].split()
    assert {word.split("=")[0] for word in given} == {"num_attention_heads", "image_size", "patch_size"}
    again = suggested(["--model-hints", *given[1:], *words])
    assert again == f"  {typed} --model_hints {' '.join([*given[1:], given[0]])}"


@pytest.mark.slow
def test_the_missing_settings_of_a_teacher_are_no_hints_about_the_model(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--model", "vit-base-patch16-224", "--from_scratch", "--teacher", str(checkpoint), "--dataset", "digits"]
    with pytest.raises(SystemExit):
        main(["finetune", *words, "--output_dir", str(tmp_path / "out")])
    assert f"  plain-vit convert {checkpoint} OUT --num-attention-heads " in capsys.readouterr().err


def test_a_value_without_an_alternative_is_no_choice() -> None:
    error = AmbiguousCheckpointError("give", {"pooling": ["cls"], "head_dim": [3, 4], "image_size": []})
    assert str(error).splitlines()[1:] == [
        "  pooling= 'cls', the only value that opens",
        "  head_dim= one of 3, 4",
        "  image_size= which the tensors do not show at all",
    ]


def test_verify_finds_the_first_stage_that_differs(
    foreign: torch.nn.Module, checkpoint: Path, converted: list[str], capsys: pytest.CaptureFixture
) -> None:
    with torch.no_grad():
        foreign.transformer.layers[1][1].net[1].bias += 1
    torch.save(foreign.state_dict(), checkpoint)
    assert main(converted) == VerificationError.exit_code
    printed = capsys.readouterr()
    shares = {line[:12].strip(): float(line.split()[-1]) for line in printed.out.splitlines()[1:]}
    assert "they differ: layer 1 by" in printed.err
    assert shares["embeddings"] == shares["layer 0"] == 0
    assert shares["layer 1"] > 1e-3
    assert shares["logits"] > 1e-3


def test_verify_says_that_two_are_equal_and_what_that_does_not_prove(
    converted: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main(converted) == 0
    _, _, verdict = capsys.readouterr().out.partition("equal: no stage differs by more than 1e-05")
    assert "num_attention_heads = 3, given by the caller" in verdict or "num_attention_heads = 3, from" in verdict


def test_results_are_printed_as_json_and_tables_as_csv(
    checkpoint: Path, converted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def printed(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    out, json_wanted = str(tmp_path / "again"), ("--output-format", "json")
    for words in (["inspect", str(checkpoint)], ["convert", str(checkpoint), out, "--no-verify"]):
        report = json.loads(printed(*words, *SAID, *json_wanted))
        assert (report["format"], report["used"], report["config"]["patch_size"]) == ("vit_pytorch", 34, [5, 7])
        assert {"field": "num_attention_heads", "value": 3, "source": "the caller"} in report["unproven"]
        assert report.get("written") == (out if words[0] == "convert" else None)
    verdict = json.loads(printed(*converted, *json_wanted))
    assert verdict["equal"]
    assert [stage["stage"] for stage in verdict["stages"]][-1] == "logits"
    head, *rows = printed(*converted, "--output-format", "csv").splitlines()
    assert head == "stage,difference,scale,relative"
    assert len(rows) == len(verdict["stages"])
    exported = json.loads(printed("export", out, str(tmp_path / "back.pt"), "--to", "vit_pytorch", *json_wanted))
    assert (exported["format"], exported["path"]) == ("vit_pytorch", str(tmp_path / "back.pt"))
    assert json.loads(printed("env", *json_wanted))["torch"] == torch.__version__


def saved(folder: Path, fields: dict[str, Any], pixels: dict[str, Any]) -> Path:
    model = randomize_(PlainViTForImageClassification(tiny_config(**fields)), seed=1)
    model.save_pretrained(folder)
    PlainViTImageProcessor(**{"size": {"height": 24, "width": 56}, **pixels}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("fields", "pixels", "says"),
    [
        ({}, {}, None),
        ({"initializer_range": 0.1}, {}, None),
        ({"position_resampling": "bilinear"}, {}, "position_resampling is 'bicubic_antialias' and 'bilinear'"),
        ({"drop_partial_patches": True}, {}, "drop_partial_patches is False and True"),
        ({"hidden_dropout_prob": 0.1}, {}, "hidden_dropout_prob is 0.0 and 0.1"),
        ({"id2label": dict(enumerate("abdcefg"))}, {}, "the names of 2 classes: the first, 2, is 'c' and 'd'"),
        ({"id2label": None, "num_labels": 7}, {}, None),
        ({"problem_type": "single_label_classification"}, {}, None),
        ({"problem_type": "regression"}, {}, "problem_type is 'single_label_classification' and 'regression'"),
        ({}, {"image_mean": [0.5, 0.5, 0.6]}, "the image processors: their pixels differ by up to 0.2, after norm"),
        ({}, {"size": {"height": 24, "width": 28}}, "one makes (3, 24, 56) of an image of 300 x 200 pixels, the other"),
        ({}, {"resample": 3}, "the image processors: their pixels differ by up to"),
    ],
)
def test_verify_says_what_differs_without_effect_on_the_outputs(
    fields: dict[str, Any], pixels: dict[str, Any], says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = {"id2label": dict(enumerate("abcdefg"))}
    folders = saved(tmp_path / "a", names, {}), saved(tmp_path / "b", names | fields, pixels)
    capsys.readouterr()
    assert main(["verify", *map(str, folders)]) == 0
    _, _, others = capsys.readouterr().out.partition("equal: no stage differs by more than 1e-05 of its largest value")
    if says is None:
        assert others.strip() == ""
    else:
        assert others.strip().startswith("differences without effect on these images:")
        assert says in others


def test_verify_allows_what_is_asked_for_and_no_more(
    foreign: torch.nn.Module, checkpoint: Path, converted: list[str], capsys: pytest.CaptureFixture
) -> None:
    with torch.no_grad():
        foreign.mlp_head.bias += 0.01
    torch.save(foreign.state_dict(), checkpoint)
    assert main(converted) == VerificationError.exit_code
    assert "they differ: logits by" in capsys.readouterr().err
    assert main([*converted, "--tolerance", "1e-6"]) == VerificationError.exit_code
    assert main([*converted, "--tolerance", "0.5"]) == 0
    for wrong in ("nan", "inf", "-1", "much"):
        with pytest.raises(SystemExit) as stopped:
            main([*converted, f"--tolerance={wrong}"])
        assert stopped.value.code == 2


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"image_size": (32, 56)}, "image_shape of .* is .24, 56., of .* .32, 56.: these are different models"),
        ({"num_channels": 4}, "num_channels of .* is 3, of .* 4"),
        ({"num_labels": 8}, "num_labels of .* is 7, of .* 8"),
        ({"num_labels": 0}, "num_labels of .* is 7, of .* 0"),
        ({"num_hidden_layers": 2}, "they differ: .* by"),
        ({"hidden_size": 45}, "they differ: logits by"),
        ({"patch_size": (8, 28)}, "they differ: logits by"),
    ],
)  # fmt: skip
def test_verify_of_models_of_other_sizes_is_a_verdict(
    fields: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name, sizes in {"a": {}, "b": fields}.items():
        config = tiny_config(**sizes)
        randomize_(PlainViTForImageClassification(config), len(name)).save_pretrained(tmp_path / name)
    refusals = []
    for words in (("a", "b"), ("b", "a")):
        capsys.readouterr()
        assert main(["verify", *(str(tmp_path / word) for word in words)]) == VerificationError.exit_code
        printed = capsys.readouterr().err
        assert printed.startswith("plain-vit: VerificationError: ")
        assert "Traceback" not in printed
        refusals.append(printed)
    assert re.search(says, refusals[0])


def test_verify_takes_nan_for_no_number(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model: Any = randomize_(PlainViTForImageClassification(tiny_config()))
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        model.classifier.weight.fill_(3e38)  # finite, as a checkpoint has to be; the logits are not
    model.save_pretrained(tmp_path / "b")
    for words in (("a", "b"), ("b", "a"), ("b", "b")):
        code = main(["verify", *(str(tmp_path / word) for word in words), "--tolerance", "1e30"])
        assert code == VerificationError.exit_code
        assert re.search("logits by (nan|inf)", capsys.readouterr().err)


def test_export_gives_the_source_back_bit_for_bit(foreign: torch.nn.Module, checkpoint: Path, tmp_path: Path) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "ours"), *SAID]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back.pt"), "--to", "vit_pytorch"]) == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == foreign.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in foreign.state_dict().items())


@pytest.mark.parametrize("command", [
    "convert CHECKPOINT out.safetensors", "export CHECKPOINT out.SAFETENSORS --to timm",
    "export CHECKPOINT out.bin --to transformers", "export CHECKPOINT out.onnx --to onnx",
    "show CHECKPOINT --model CHECKPOINT --out page.html", "browse CHECKPOINT --out page.html",
    "embed CHECKPOINT --model CHECKPOINT --out out.csv", "embed CHECKPOINT --model CHECKPOINT --out out",
])  # fmt: skip
def test_a_name_of_another_kind_of_output_is_refused(
    command: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.replace("CHECKPOINT", checkpoint.name).split()) == OutputError.exit_code
    assert re.search("is a folder: give a name without it|end it in .parquet", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name]


def test_an_output_in_use_is_refused_before_any_work_and_stays(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), *SAID]) == OutputExistsError.exit_code
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_force_replaces_a_model_folder_and_keeps_what_else_was_in_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["convert", str(checkpoint), str(tmp_path / "out"), *SAID]
    assert main(words) == 0
    assert main([*words, "--force"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign.pt", "out"]
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    capsys.readouterr()
    with warnings.catch_warnings(action="default"):
        assert main([*words, "--force"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "thesis" in line]
    kept = f"its content is kept as {tmp_path}/out.kept-1"
    assert said == [f"plain-vit: {tmp_path}/out contained files not written by plain-vit ('thesis.tex'): {kept}"]
    assert (tmp_path / "out.kept-1" / "thesis.tex").read_text() == "years of work"
    from_checkpoint(tmp_path / "out.kept-1")
    from_checkpoint(tmp_path / "out")


def test_force_keeps_a_thesis_next_to_a_config_of_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with warnings.catch_warnings(action="ignore"):
        assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--force", *SAID]) == 0
    assert (tmp_path / "out.kept-1" / "thesis.tex").read_text() == "years of work"


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
    assert main(["convert", str(tmp_path / "spoilt.pt"), str(tmp_path / "out"), *SAID]) == kind.exit_code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spoilt.pt"]


def test_debug_shows_the_stack_trace(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "empty.pt").touch()
    assert main(["inspect", str(tmp_path / "empty.pt"), "--debug"]) == CheckpointError.exit_code
    assert "Traceback" in capsys.readouterr().err


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("plain-vit")
    help_text = subprocess.run([str(command), "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in help_text for name in ("convert", "export", "inspect", "verify"))


# Only the arguments


HEAVY = {"torch", "transformers", "datasets", "accelerate", "huggingface_hub", "numpy"}
EXAMPLES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").rglob("*.py"))]
# The words, the exit code, what is printed, and in how many lines.
WORDS = [
    ("--help", 0, "COMMAND", 30),
    ("--version", 0, f"plain-vit {plain_vit.__version__}", 1),
    *((f"{name} --help", 0, f"usage: plain-vit {name} ", 420) for name in COMMANDS),
    *((f"{script} --help", 0, f"usage: {Path(script).name} ", 420) for script in EXAMPLES),
    *((f"{script} --x", 2, "there is no option --x", 3) for script in EXAMPLES),
    ("finetune --list-recipes", 0, "Published: ", 1000),
    ("examples --path", 0, "examples", 1),
    ("convret", 2, "there is no 'convret'; did you mean 'convert'?", 3),
    ("", 2, "required: COMMAND", 3),
    ("convert", 2, "required: source", 3),
    ("convert vit.pt out more", 2, "unexpected: more", 3),
    ("convert vit.pt out --num-heads 3", 2, "no option --num-heads; did you mean .*'--num-attention-heads'?", 3),
    ("inspect vit.pt --format tim", 2, "argument --format: there is no 'tim'; did you mean 'timm'?", 3),
    ("inspect vit.pt --format json", 2, "there is no 'json'; did you mean '--output-format json'?", 3),
    ("env --json", 2, "there is no option --json; did you mean '--output-format'?", 3),
    ("inspect vit.pt --num-attention-heads x", 2, "argument --num-attention-heads: invalid int value: 'x'", 3),
    ("inspect not-there.pt", 3, "CheckpointError: not-there.pt does not exist: expected a checkpoint file", 1),
    ("inspect user/name.pt", 3, "CheckpointError: user/name.pt does not exist", 1),
    ("inspect vit_bse_patch16_224", 3, "and is no model by name; did you mean 'vit_base_patch16_224'", 1),
    ("convert timm:vit_base_patch16_24 out", 3, "is no model of timm: .*; did you mean 'vit_base_patch16_224' or", 1),
    ("finetune RUN --model timm:vit_bse_patch16_224", 3, "no model of timm: .*; did you mean 'vit_base_p", 1),
    ("list *dinov4_* --source timm", 3, "CheckpointError: no name is like '\\*dinov4_\\*'", 1),
    ("list *tiny*s16*224 --source timm", 0, "^timm:vit_tiny_r_s16_p8_224$", 1),
    ("verify bad.bin b/c/d", 3, "CheckpointError: bad.bin is an HTML or XML page", 1),
    ("convert empty.pt out", 3, "CheckpointError: empty.pt is empty", 1),
    ("show not-there.jpg --model folder --out page", 13, "DataError: not-there.jpg does not exist", 1),
    ("predict bad.bin --model noise.npz", 3, "CheckpointError: noise.npz begins with ", 1),
    ("convert folder", 2, "give an output: OUT, or --push REPO", 3),
    ("convert folder out.safetensors", 10, "OutputError: out.safetensors ends in '.safetensors' like a file", 1),
    ("export folder out --to timm --precision int8", 2, "--precision is for --to onnx and openvino", 3),
    ("browse features --split test --out page", 2, "--split is of a dataset: give --dataset too", 3),
    ("predict bad.bin --model folder --top 0", 2, "argument --top: invalid count value: '0'", 3),
    ("finetune --model m", 2, "required: --dataset, --output-dir", 3),
    ("finetune RUN --tracker wandb", 2, "no option --tracker; did you mean '--report-to'?", 3),
    ("finetune RUN --lerning_rate 1", 2, "no option --lerning-rate; did you mean '--learning-rate'", 3),
    ("finetune RUN --lr 1", 2, "no option --lr; did you mean '--learning-rate'?", 3),
    ("finetune RUN --schedule cosin", 2, "argument --schedule: there is no 'cosin'; did you mean 'cosine'?", 3),
    ("finetune RUN --recipe vit-cifar", 12, "TrainingError: There is no recipe 'vit-cifar': did you mean", 1),
    ("finetune RUN --batch_size 0", 12, "TrainingError: batch_size is 0: expected 1 or more", 1),
    ("finetune RUN --mixup-probability 0.3", 12, "Without mixup or cutmix, mixup_probability has no effect", 1),
    ("finetune RUN --dataset ./nowhere", 13, "DataError: There is no file or folder ./nowhere: correct the path", 1),
    ("evaluate --model not-there.pt --dataset digits", 3, "CheckpointError: not-there.pt does not exist", 1),
    ("serve folder", 3, "CheckpointError: folder has no onnx/model.onnx: give a folder written by", 1),
    ("serve folder --max-batch 0", 2, "plain-vit: max_batch is 0: expected a positive number", 3),
    ("examples/predict.py --model bad.bin --dataset d --output-dir o", 3, "CheckpointError: bad.bin is an HTML", 1),
]  # fmt: skip


@pytest.mark.slow(quick=["--help", "finetune --help", "convret", "convert empty.pt out", "finetune RUN --lr 1"])
@pytest.mark.parametrize("words, code, printed, lines", WORDS, ids=[words for words, *_ in WORDS])
def test_help_and_mistakes_are_answered_at_once_without_torch(
    words: str, code: int, printed: str, lines: int, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.pt").touch()
    (tmp_path / "bad.bin").write_text("<html><body>404</body></html>")
    (tmp_path / "noise.npz").write_bytes(bytes(4096))
    name, *rest = words.replace("RUN", "--model m --dataset digits --output_dir out").split(" ")
    command = [ROOT / name, *rest] if name.endswith(".py") else [ROOT / "plain_vit_command.py", name, *rest]
    program = f"""
import os, resource, runpy, sys
code = 0
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as left:
    code = left.code or 0
used = resource.getrusage(resource.RUSAGE_SELF)
sys.stdout.flush()
print("used", used.ru_utime + used.ru_stime, *sorted({HEAVY!r} & sys.modules.keys()))
sys.exit(code)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", program, *filter(None, map(str, command))],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    *said, used = (done.stderr + done.stdout).splitlines()
    assert done.returncode == code, said
    assert re.search(printed.replace("?", "[?]"), "\n".join(said)), said
    assert len(said) <= lines, said
    assert (done.stderr == "") == (code == 0)
    assert code == 0 or said[0].startswith("plain-vit: ")
    assert "(default: None)" not in done.stdout
    _, seconds, *imported = used.split()
    assert imported == []
    assert float(seconds) < 0.5


AFTER_A_LIGHT_START = """
import sys
import plain_vit_command

assert plain_vit_command.main(["list", "no-such-name"]) == 3
assert "transformers" not in sys.modules
plain_vit_command.whole_package()
import plain_vit
from transformers import AutoConfig

assert type(AutoConfig.for_model("plain_vit")) is plain_vit.PlainViTConfig
assert plain_vit_command.whole_package() is plain_vit
assert callable(plain_vit.list_models)
"""


def test_a_command_that_started_without_torch_runs_with_the_whole_package(tmp_path: Path) -> None:
    printed = bare.run(AFTER_A_LIGHT_START, cwd=Path(plain_vit.__file__).parents[1], home=tmp_path)
    assert "plain-vit: CheckpointError: no name is like 'no-such-name'" in printed


def test_every_option_has_a_help_and_every_command_an_example() -> None:
    for name in COMMANDS:
        command = parser_of(name)
        assert command.epilog.startswith(f"example: plain-vit {name}")
        assert [action.dest for action in command._actions if not action.help] == []
        words = shlex.split(command.epilog.removeprefix(f"example: plain-vit {name}"))
        if SCRIPTS.get(name) in SCRIPT_OPTIONS:
            parse_arguments(SCRIPT_OPTIONS[SCRIPTS[name]], words, description=None)
        elif name in SCRIPTS:
            open_script(SCRIPTS[name]).parser().read(words)
        else:
            command.read(words)


def test_an_inferred_value_is_shown_as_it_would_be_given() -> None:
    assert str(Inference("attention_scale", None, "it")) == "attention_scale = 'head_dim**-0.5', from it"
    assert str(Inference("pooling", "cls", "config.json")) == "pooling = 'cls', from config.json"


def test_the_options_are_the_hints_and_the_formats_those_of_the_registry() -> None:
    assert HINTS.keys() == {*ARGUMENTS, "format", "revision"} - {"id2label"}  # the last is --labels FILE
    assert {*FORMATS} == REGISTRY.keys()
    assert PREFIXES == catalogue.PREFIXES
    assert {*FOLDERS} == {*ENGINES, *(name for name, format in REGISTRY.items() if not format.suffixes)}


@pytest.mark.slow(quick=["plain_vit"])
@pytest.mark.parametrize(
    "module", few(["plain_vit", "torch", "transformers", "plain_vit.conversion", "plain_vit.cli"], 2)
)
def test_an_interrupt_while_the_package_is_imported_is_one_line(module: str, tmp_path: Path) -> None:
    program = f"""
import sys, time
import plain_vit_command

class Slow:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            print("here", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
sys.exit(plain_vit_command.main(["inspect", "user/name"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(plain_vit.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate()[1] == "plain-vit: interrupted\n"
    assert child.returncode == 130


@pytest.mark.parametrize(
    "error, code, said",
    [
        (MemoryError(), 1, "plain-vit: MemoryError: "),
        (OSError(36, "File name too long", "\x1b[31mred"), 1, "plain-vit: OSError: "),
        (PermissionError(13, "no", "x"), 1, "plain-vit: PermissionError: "),
        (KeyboardInterrupt(), 130, "plain-vit: interrupted\n"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def failing(options: argparse.Namespace) -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "inspect", failing)
    assert main(["inspect", "user/name"]) == code
    printed = capsys.readouterr().err
    assert printed.startswith(said)
    assert printed.count("\n") == 1
    assert printed[:-1].isprintable()


PROGRAM = """
import atexit, sys, threading, time, plain_vit_command

def program():
    plain_vit_command.light_package()
    plain_vit_command.whole_package()
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    print("program", end=" ")
    {end}

plain_vit_command.run(program)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("return 7", 7, ""), ("1 / 0", 1, "ZeroDivisionError: division by zero\n")],
    ids=["status", "traceback"],
)
def test_a_program_ends_with_its_status_its_threads_and_all_that_it_printed(end: str, status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "program thread\nat exit\n")
    assert done.stderr.endswith(said)
    assert "leaked" not in done.stderr


@pytest.mark.slow
def test_a_terminal_without_a_letter_and_a_reader_who_leaves_are_no_faults(
    checkpoint: Path, foreign: torch.nn.Module, tmp_path: Path
) -> None:
    (tmp_path / "labels.txt").write_text("\n".join(f"猫 {i}" for i in range(11)), encoding="utf-8")
    words = (
        f"inspect {shlex.quote(str(checkpoint))} {shlex.join(SAID)} --labels {shlex.quote(str(tmp_path))}/labels.txt"
    )
    command = shlex.quote(str(Path(sys.executable).with_name("plain-vit")))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(plain_vit.__file__).parents[1])}
    renamed = checkpoint.rename(tmp_path / "猫.pt")
    words = words.replace(str(checkpoint), str(renamed))
    for line in (f"{command} {words}", f"{command} {words} | true"):
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0
        assert done.stderr == ""
        assert line.endswith("true") or "\\u732b.pt" in done.stdout


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("labels.json", b'{"0": "a"', "not JSON"),
        ("labels.json", b'"a"', "no|not a JSON object or list but str"),
        ("labels.json", b'["a", "\\ud800"]', "half a character"),
        ("labels.json", b'["a", 3]', "holds more than names"),
        ("labels.json", b'["a", " "]', "holds more than names"),
        ("labels.json", b'{"a": "b"}', "cannot be read as label names"),
        ("labels.json", b'{"' + b"9" * 5000 + b'": "b"}', "cannot be read as label names"),
        ("labels.json", b"[" * 100_000, "not JSON"),
        ("labels.json", b"[" + b"1," * 600_000 + b"1]", "braces, brackets and commas"),
        ("labels.txt", b"a\xff\nb", "cannot be read as label names"),
        ("labels.txt", b"a\n\n\nb", "holds more than names"),
        ("labels.txt", bytes(20_000_000), "20000000 bytes; at most"),
        ("labels.txt", b"a\nb\nc", "names 3 labels: expected 11"),
    ],
)
def test_odd_names_of_labels_are_refused(
    name: str, content: bytes, says: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["inspect", str(checkpoint), *SAID, "--labels", str(tmp_path / name)]) in (3, 4)
    assert re.search(says, capsys.readouterr().err)


def test_a_byte_order_mark_is_no_part_of_the_first_label(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes(b"\xef\xbb\xbfcat\r\ndog\r\n")
    assert read_labels(tmp_path / "labels.txt") == ["cat", "dog"]


@pytest.mark.parametrize("made", ["device", "pipe", "folder", "link to a device", "nothing", "no right to read"])
def test_no_option_reads_a_special_file(
    made: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = Path("/dev/zero") if made == "device" else tmp_path / "labels.txt"
    if made == "pipe":
        os.mkfifo(place)
    elif made == "folder":
        place.mkdir()
    elif made == "link to a device":
        place.symlink_to("/dev/zero")
    elif made == "no right to read":
        if os.geteuid() == 0:
            pytest.skip("whoever runs this may read everything")
        place.touch(0o000)
    assert main(["inspect", str(checkpoint), *SAID, "--labels", str(place)]) == CheckpointError.exit_code
    assert re.search("not a regular file|cannot be read", capsys.readouterr().err)


def test_show_waits_at_no_pipe(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    os.mkfifo(tmp_path / "image.png")
    words = ["show", str(tmp_path / "image.png"), "--model", str(model_folder), "--out", str(tmp_path / "page")]
    assert main(words) == DataError.exit_code
    assert "is a folder, a pipe or a device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_of_show_has_no_path_of_the_machine(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda figure, data, **options: data.write(b"PNG"))  # its text is enough
    images = []
    for place in ("one", "other"):  # equal names are distinguished by their folders
        images.append(tmp_path / place / "image.png")
        images[-1].parent.mkdir()
        Image.new("RGB", (31, 17), "red").save(images[-1])
    words = ["show", *map(str, images), "--model", str(model_folder), "--compare", str(model_folder)]
    assert main([*words, "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert str(tmp_path) not in page
    assert str(model_folder.parent) not in page
    assert f"A look inside {model_folder.name} and {model_folder.name} (2)" in page


@pytest.mark.parametrize("name", ["a" * 300, "~nobody-of-this-name/vit.pt", "a/" * 3000])
def test_a_name_that_cannot_be_is_no_fault(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", name]) == CheckpointError.exit_code or main(["inspect", name]) == HubError.exit_code
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(PlainViTError):
        from_checkpoint(name)


def test_env_names_versions_processor_and_threads_and_nothing_that_is_private(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    known = {name: value.strip() for name, _, value in (line.partition(":") for line in printed.splitlines())}
    assert known["torch"] == torch.__version__
    assert known["plain-vit"] == importlib.metadata.version("plain-vit")
    assert known["Python"].endswith(platform.python_version())
    assert {"system", "processor", "accelerator", "threads", "transformers", "timm"} <= known.keys()
    assert known["threads"].startswith(f"{torch.get_num_threads()} ")
    private = [os.environ["HF_TOKEN"], str(Path.home()), sys.prefix, str(tmp_path), platform.node(), getpass.getuser()]
    words = set(printed.split())
    assert not [secret for secret in private if secret in (words if len(secret) < 8 else printed)]


def test_env_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def nowhere(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", nowhere)
    assert main(["env"]) == 0
    assert capsys.readouterr().out.count("not installed") == 14  # all but torch


def test_examples_are_written_whole_and_never_over_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples"]) == 0
    source = Path(plain_vit.__file__).parents[1] / "examples"
    expected = {path.relative_to(source) for path in source.rglob("*") if "__pycache__" not in path.parts}
    assert {path.relative_to("examples") for path in Path("examples").rglob("*")} == expected
    (tmp_path / "examples" / "mine.txt").write_text("mine")
    assert main(["examples"]) == OutputExistsError.exit_code
    assert "examples is not empty" in capsys.readouterr().err
    assert (tmp_path / "examples" / "mine.txt").read_text() == "mine"
    assert main(["examples", "other"]) == 0


def test_the_path_of_the_examples_is_printed_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "--path"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "accelerate_configs" / "gpus.yaml").is_file()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if script in SCRIPT_OPTIONS])
def test_a_command_of_a_script_has_its_options_and_its_exit_codes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, code, said in (
        (["--help"], 0, f"usage: plain-vit {name} --"),
        (["--model", "m", "--model_hints", "nothing", "--dataset", "./none", "--output_dir", "out"], None, "rror: "),
    ):
        words = [word if name != "evaluate" else word.replace("--output_dir", "--output") for word in words]
        before = list(sys.argv)
        with pytest.raises(SystemExit) as left:
            main([name, *words])
        assert left.value.code == code or (code is None and left.value.code > 1)
        captured = capsys.readouterr()
        assert said in captured.out + captured.err
        assert captured.err.count("\n") <= 1
        assert sys.argv == before


def test_the_names_of_the_shipped_labels_are_those_that_it_learned() -> None:
    shipped = Path(plain_vit.__file__).parents[1] / "examples" / "checkpoints" / "glyphs_labels.txt"
    assert shipped.read_text(encoding="utf-8").split() == list(CHARACTERS)


@pytest.mark.slow
def test_a_name_is_taken_wherever_a_source_is(hub: HubEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    name, folder = "timm:test_vit.r160_in1k", tmp_path / "timm"
    timm.models.save_for_hf(randomize_(timm.create_model("test_vit.r160_in1k")), folder, safe_serialization=True)
    hub.add_repository("timm/test_vit.r160_in1k", files={path.name: path.read_bytes() for path in folder.iterdir()})
    out = str(tmp_path / "out")
    assert main(["convert", name, out]) == 0
    assert "logits: 0.0e+00" in capsys.readouterr().out
    assert "base_model: timm/test_vit.r160_in1k" in Path(out, "README.md").read_text(encoding="utf-8")
    assert main(["verify", "test_vit", out]) == 0  # timm's default weights
    assert main(["export", "hf:timm/test_vit.r160_in1k", str(tmp_path / "back"), "--to", "timm"]) == 0
    assert main(["predict", "examples/space/images/3.png", "--model", name, "--top", "2"]) == 0
    assert "%" in capsys.readouterr().out
