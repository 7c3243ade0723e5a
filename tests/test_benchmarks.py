"""The harness of the benchmarks: turns in processes of their own, what it reports, and a case that fails."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import Case, Result, compare, matmul_rate, memory_bandwidth, report, table


def sleeping(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def allocating(megabytes: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(megabytes * 10**6, dtype=torch.uint8)


def failing(after: int) -> Callable[[], None]:
    turns = iter(range(after))
    return lambda: print(next(turns))


@pytest.mark.slow
def test_cases_take_turns_and_tell_their_time_and_memory() -> None:
    cases = [
        Case("short", sleeping, {"seconds": 0.2}),
        Case("long", sleeping, {"seconds": 0.5}, limit=0.4),
        Case("large", allocating, {"megabytes": 300}),
    ]
    short, long, large = compare(cases, turns=3)
    assert 0.2 <= short.fastest <= short.seconds <= short.slowest
    assert 0.5 <= long.fastest <= long.seconds
    assert short.ratio == short.ratio_of_fastest == 1
    assert long.ratio == long.seconds / short.seconds
    assert 1.5 < long.ratio_of_fastest <= 0.5 / 0.2 + 0.1
    assert (short.limit, long.limit) == (None, 0.4)
    if large.peak is not None and large.own is not None and short.peak is not None:  # where the system tells
        assert large.peak == pytest.approx(300e6, rel=0.05)
        assert large.own == pytest.approx(300e6, rel=0.05)
        assert short.peak < 10e6


@pytest.mark.slow
def test_a_case_that_fails_is_named_with_its_trace() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^second failed:.*StopIteration"):
        compare([Case("first", sleeping, {"seconds": 0}), Case("second", failing, {"after": 1})], turns=3)


def test_a_report_is_a_table_and_a_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    results = [
        Result("copy", 1.5, 1.25, 2, 1, 1, 0.0625, 4 * 10**6, None, None),
        Result("convert", 0.03, 0.02, 0.04, 0.02, 0.016, None, None, 7 * 10**6, None),
    ]
    report("convert", "Converting", "How it is.", results, write=True)
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-convert.md")
    page = path.read_text()
    assert page in capsys.readouterr().out
    assert "| copy | 1.50 s | 1.00 | 1.25 s | 1.00 | 2.00 s | 62.50 ms | 4 MB | - |" in page
    assert "| convert | 30.00 ms | 0.02 | 20.00 ms | 0.02 | 40.00 ms | - | - | 7 MB |" in page
    line = json.loads(page.split("```json\n")[1].split("\n```")[0])
    assert [one["name"] for one in line["results"]] == ["copy", "convert"]
    assert f"torch {torch.__version__.partition('+')[0]}" in line["environment"]["versions"]


def test_memory_of_the_gpu_has_a_column_where_there_is_one() -> None:
    assert "GPU memory" not in table([Result("a", 1, 1, 1, 1, 1, None, None, None, None)])
    assert "| 5 MB |" in table([Result("a", 1, 1, 1, 1, 1, None, None, None, 5 * 10**6)])


def test_the_limits_of_the_machine_are_what_machines_have() -> None:
    assert 1e8 < memory_bandwidth(2**24) < 1e12
    assert 1e8 < matmul_rate(size=256) < 1e15
