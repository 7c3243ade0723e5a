"""The disk is full while pictures, pages and records are written: no partial file is left, and one line says so."""

import io
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.errors import OutputError
from plain_vit.files.staging import full_disk, staged_file
from plain_vit.training.hardware.sharding import ShardedState
from plain_vit.training.reports.report import ReportPage
from plain_vit.training.reports.snapshots import Snapshots
from plain_vit.training.run.folder import RunFolder, append_line, read_log, write_file
from plain_vit_command import main
from tests.conftest import randomize_
from tests.processes import in_a_process, server
from tests.sizes import few
from tests.tiny import pixels, tiny_config


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def limit_files(size: int | None) -> None:
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def show_with_a_full_disk(words: list[str], limit: int) -> tuple[int, str]:
    limit_files(limit)
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        return main(words), printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, *few([60_000, 5000], 1)])
def test_show_leaves_no_page_and_says_so_in_one_line(limit: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    sizes = {"image_size": 24, "patch_size": 8}
    randomize_(PlainViTForImageClassification(tiny_config(**sizes))).save_pretrained(model)
    PlainViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(model)
    Image.new("RGB", (31, 37), "red").save(tmp_path / "image.png")
    before = contents(tmp_path)
    words = ["show", str(tmp_path / "image.png"), "--model", str(model), "--out", str(tmp_path / "new" / "page")]
    code, printed = in_a_process(show_with_a_full_disk, words, limit, context=server)
    assert code == OutputError.exit_code
    assert contents(tmp_path) == before
    assert not (tmp_path / "new").exists()
    lines = [line for line in printed.split("\n") if line.startswith("plain-vit:")]
    assert len(lines) == 1
    assert re.search("(was not|cannot be) written: File too large", lines[0])
    assert lines[0].isprintable()
    assert "Traceback" not in printed


def snapshots_of(folder: Path) -> Snapshots:
    snapshots: Any = object.__new__(Snapshots)
    looked_at = {"folder": folder, "steps": {1, 2}, "taking": True, "pixels": pixels}
    vars(snapshots).update(looked_at)
    return snapshots


def take(folder: Path, limit: int | None) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config())).eval()
    limit_files(limit)
    snapshots_of(folder).take(1 if limit is None else 2, model)


def draw(folder: Path, limit: int | None) -> None:
    figure, axes = plt.subplots()
    axes.imshow(torch.rand(30, 30))
    limit_files(limit)
    ReportPage(folder).add("title", "caption", "curves", figure)


def write(folder: Path, limit: int | None) -> None:
    limit_files(limit)
    write_file(folder / "index.html", "<p>page</p>" * (1000 if limit is None else 1001))


def append(path: Path, limit: int) -> None:
    limit_files(limit)
    append_line(path, '{"step": 3, "loss": 0.123456789}')


@pytest.mark.parametrize("beyond", [0, 1, 20])
def test_a_log_never_ends_in_half_a_line(beyond: int, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, '{"step": 1}')
    append_line(path, '{"step": 2}')
    with pytest.raises(OutputError, match="was not written: File too large"):
        in_a_process(append, path, path.stat().st_size + beyond)
    assert read_log(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_file_that_cannot_be_appended_to_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="was not written: Is a directory"):
        append_line(tmp_path, "x")


def checkpoint_of_a_run(folder: Path, limit: int | None, sharded: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(131, 97)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # torch may refuse a backward pass in a forked process
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    accelerator.prepare(model, optimizer)
    run = RunFolder(folder / "run", accelerator, {"seed": 3}, resume=limit is not None)
    run.begin()
    limit_files(limit)
    step, state = 1 if limit is None else 2, ShardedState(model, optimizer, None) if sharded else None
    try:
        run.save({"step": step}, keep=2, sharded=state)
        run.finish_saving()
    finally:
        run.release()


def stage_with_torch(folder: Path, limit: int | None) -> None:
    limit_files(limit)
    with staged_file(folder / "tensors.pt", force=True) as new:
        torch.save({"matrix": torch.randn(97, 131)}, new)


TOO_LARGE = "was not written: File too large"
OF_A_RUN = "step_00000002 was not written: (File too large|torch's writer failed)"
# what writes twice into a folder, the second time with a limit, at which limits, and what is said
WRITERS: dict[str, tuple[Callable[[Path, int | None], None], list[int], str]] = {
    "take": (take, [0, 100, 700], TOO_LARGE),
    "draw": (draw, [0, 100, 700], TOO_LARGE),
    "write": (write, [0, 100, 700], TOO_LARGE),
    "checkpoint": (partial(checkpoint_of_a_run, sharded=False), [0, 300, 60_000, 103_000], OF_A_RUN),
    "sharded checkpoint": (partial(checkpoint_of_a_run, sharded=True), [0, 300, 60_000, 103_000], OF_A_RUN),
    "file of torch": (stage_with_torch, [0, 300, 40_000, 51_000], r"tensors.pt was not written: .* full disk"),
}  # fmt: skip


@pytest.mark.slow(quick=["write-700", "sharded checkpoint-103000", "file of torch-0"])
@pytest.mark.parametrize("name, limit", [(name, limit) for name in WRITERS for limit in WRITERS[name][1]])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(name: str, limit: int, tmp_path: Path) -> None:
    writer, _, says = WRITERS[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    in_a_process(writer, folder, None)
    before = contents(tmp_path)
    assert before
    with pytest.raises(OutputError, match=says) as caught:
        in_a_process(writer, folder, limit)
    assert str(caught.value).isprintable()
    assert contents(tmp_path) == before


def test_only_a_writer_that_fails_is_taken_for_a_full_disk(tmp_path: Path) -> None:
    others: list[Exception] = [RuntimeError("CUDA error"), OSError(5, "Input/output error"), ValueError("[Errno 28]")]
    torch.save({"matrix": torch.randn(3, 5)}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:-300])
    with pytest.raises(RuntimeError) as read:
        torch.load(tmp_path / "cut.pt")
    assert [full_disk(tmp_path, error) for error in [*others, read.value]] == [None] * 4
    full = OSError(28, "No space left on device")
    for error in (shutil.Error([("a", "b", str(full))]), ExceptionGroup("two", [others[0], full])):
        assert "No space left on device" in str(full_disk(tmp_path, error))
