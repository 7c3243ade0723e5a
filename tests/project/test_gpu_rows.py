"""`make gpu`: the order of its rows, their budgets, what is missing, what they ask of benchmarks, and their figures."""

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import set_fused_attn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, harness, models, table
from benchmarks.bench_gpu_kernels import KernelTime, kind_of, shares
from benchmarks.bench_gpu_kernels import table as kernels_table
from benchmarks.bench_memory import largest
from benchmarks.bench_run import Watch
from tests import ROOT
from tests.sizes import NIGHTLY


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    return tmp_path


def rows(results: Path, *named: tuple[str, str, float]) -> list[gpu.Row]:
    words = {name: f"tests.project.gpu_rows {name} {how} {results}" for name, how, _ in named}
    return [gpu.Row(name, seconds, "no.such.command", words[name], ()) for name, _, seconds in named]


def ended(results: Path) -> dict[str, Any]:
    """Return the rows of the only page of the runner."""
    (page,) = results.glob("????-??-??-gpu-*.md")
    line = json.loads(page.read_text().split("```json\n")[1].split("\n```")[0])
    assert line["environment"]["versions"]
    return {one["name"]: one for one in line["results"]}


@pytest.mark.slow
def test_rows_run_within_their_budgets_and_the_next_start_goes_on_with_the_rest(
    results: Path, capsys: pytest.CaptureFixture
) -> None:
    all_rows = rows(results, ("stays", "stays", 1.5), ("fails", "fails", 5), ("long", "ends", 500), ("ends", "ends", 5))
    all_rows.insert(2, gpu.Row("lacks", 5, "", "", ("torch", "no_such_package")))

    def start(minutes: float) -> list[str]:
        (results / "ran.txt").unlink(missing_ok=True)
        gpu.run(all_rows, (), minutes, small=True)
        return (results / "ran.txt").read_text().split()

    assert start(minutes=0.2) == ["stays", "fails", "ends"]
    found = ended(results)
    assert {name: one["ended"] for name, one in found.items()} == {
        "stays": gpu.STOPPED, "fails": gpu.FAILED, "lacks": gpu.SKIPPED, "long": gpu.WAITING, "ends": gpu.DONE
    }  # fmt: skip
    assert found["stays"]["said"] == "measured so far: stays.md"
    assert found["stays"]["seconds"] < 3
    child = Path("/proc", (results / "child.txt").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"  # killed too
    assert found["fails"]["said"] == "fails runs\nno such kernel"
    assert found["lacks"]["said"] == "not installed: no_such_package"
    assert (found["ends"]["said"], found["ends"]["pages"]) == ("measured: ends.md", ["ends.md"])
    assert "not run yet, and first in the next start: long" in capsys.readouterr().out

    (page,) = results.glob("*-gpu-*.md")
    page.rename(page.with_name(f"2001-02-03{page.name[10:]}"))  # of another day
    assert start(minutes=10) == ["long", "stays", "fails"]  # what did not run before comes first
    assert [one["ended"] for one in ended(results).values()].count(gpu.DONE) == 2
    assert 2 < ended(results)["stays"]["seconds"] < 4  # with twice the budget
    gpu.run(all_rows, ["ends"], minutes=1, small=True)
    assert (results / "ran.txt").read_text().split()[-1] == "ends"  # asked for, it runs again


def test_without_a_gpu_it_says_how_to_try_it(capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for words, said in (([], "there is no GPU here"), (["--device", "cpu"], "a folder of their own")):
        with pytest.raises(SystemExit):
            gpu.main(words)
        assert said in capsys.readouterr().err


class Parsed(Exception):
    """The options that a benchmark has read."""


@pytest.mark.parametrize("row", gpu.ROWS, ids=lambda row: row.name)
def test_every_row_has_options_that_its_benchmark_knows(row: gpu.Row, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> None:
        raise Parsed(harness.name_of_run("", parser, parse(parser, words)))

    for command in (row.command, row.small):
        module, *words = shlex.split(command)
        if module == "pytest":
            continue
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        monkeypatch.setattr(sys, "argv", [module, *words])
        with pytest.raises(Parsed) as found:
            importlib.import_module(module).main()
        if command == row.command:
            assert (
                "kernels" in row.name
                or "largest" in row.name
                or any(run.endswith(str(found.value)) for run in table.RUNS)
            )


SMOKE = ["a whole run", "largest batches of base"]


@pytest.mark.slow
@pytest.mark.skipif(not NIGHTLY, reason="a row takes a minute: part of the nightly run")
def test_rows_run_on_a_cpu_in_a_tiny_size(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--results", tmp_path, "--rows", *SMOKE]
    subprocess.run(words, check=True, cwd=ROOT)
    found = ended(tmp_path)
    assert [found[name]["ended"] for name in SMOKE] == [gpu.DONE] * len(SMOKE), found
    pages = {name: (tmp_path / found[name]["pages"][0]).read_text() for name in SMOKE}
    for name in ("plain-vit", "timm"):
        assert re.search(rf"\| {name} \| [\d.]+ \| \d+% \| - \|", pages["a whole run"])
    assert "| tiny bfloat16: timm, eager, checkpointed | 1 | - |" in pages["largest batches of base"]


def test_the_operations_of_the_mfu_are_those_of_torchs_counter() -> None:
    set_fused_attn(False)  # whose backward pass computes the scores again, which does not count
    try:
        module = models.timm_model("tiny").to("meta")
    finally:
        set_fused_attn(True)
    shapes = models.matrix_shapes("tiny", 2)
    counter = FlopCounterMode(display=False)
    with counter:
        logits = module(torch.randn(2, 3, 224, 224, device="meta"))
        assert counter.get_total_flops() == models.operations(shapes, training=False)
        logits.sum().backward()
    of_the_images = models.operations(shapes[:1], training=False)  # their gradient is not computed
    assert counter.get_total_flops() == models.operations(shapes, training=True) - of_the_images


@pytest.mark.parametrize("room", [0, 1, 2, 3, 31, 32, 33, 100, 1000, 1001])
def test_the_largest_batch_is_found_to_a_thirty_second(room: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= room

    found = largest(fits, most=700)
    assert min(room, 700) * 31 / 32 - 1 < found <= min(room, 700)
    assert max(tried) <= 700
    assert len(tried) < 17
    if room < 64:
        assert found == room


def test_waiting_is_the_time_between_steps_without_the_first_and_the_last() -> None:
    watch = Watch("cpu")
    assert list(watch.steps(range(4))) == [0, 1, 2, 3]
    assert len(watch.marks) == 8
    watch.marks = [0, 10, 11, 13, 16, 18, 20, 99]  # begins and ends of 4 steps
    assert watch.figures(warm_up=1) == (2, 8, 1 + 3)


def test_the_shares_of_kernels_and_gaps_are_those_of_the_time() -> None:
    spent = [
        ("void cutlass::Kernel<gemm>", 10.0, 14.0), ("nvjet_tst_128x256", 12.0, 15.0),  # at the same time
        ("triton_poi_fused_addmm_gelu_1", 16.0, 18.0), ("pytorch_flash::flash_bwd_kernel", 18.0, 20.0),
    ]  # fmt: skip
    assert shares(spent) == {"products": 0.5, "gaps": 0.1, "triton_poi_fused_addmm_gelu_1": 0.2, "attention": 0.2}
    row = kernels_table([KernelTime("a", 4, 3, 1.0, shares(spent))]).splitlines()[2]
    assert (
        row
        == "| a | 4 | 3 | 1000.00 ms | 10.0% | 20.0% | 0.0% | 50.0% | 0.0% | `triton_poi_fused_addmm_gelu_1` 20.0% |"
    )
    kinds = {
        "aten::addmm": "products", "triton_tem_fused_mm_3": "products", "Memcpy HtoD": "copies",
        "void at::native::multi_tensor_apply_kernel<FusedAdam>": "optimizer", "aten::add": "aten::add",
    }  # fmt: skip
    assert {name: kind_of(name) for name in kinds} == kinds
