"""The benchmark harness: turns in separate processes, reports, and failing cases."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import bench_batch, bench_extract, bench_kernels, harness
from benchmarks import table as speeds
from benchmarks.harness import (
    Case,
    Result,
    compare,
    memory_bandwidth,
    name_of_run,
    parser,
    ratio_interval,
    report,
    slug,
    table,
)
from tests.processes import in_a_process, server
from tests.project.cases import CASES, failing, in_one_process, sleeping, with_a_process
from tests.sizes import few


@pytest.fixture
def prepared_server() -> None:
    """Start the server from which the processes of cases are forked with the imports of tests/processes.py."""
    in_a_process(os.getpid, context=server)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_server")
def test_cases_take_turns_and_tell_their_time_and_memory() -> None:
    cases = [*CASES, Case("process", with_a_process, {"seconds": 0.2})]
    short, long, large, process = compare(cases, turns=3)
    assert_as_expected(short, long, large)
    assert short.ratio == short.ratio_of_fastest == 1
    assert long.ratio == long.seconds / short.seconds
    assert 1.5 < long.ratio_of_fastest <= 0.5 / 0.2 + 0.1
    assert (short.limit, long.limit) == (None, 0.4)
    assert process.seconds >= 0.2
    if large.own is not None:  # where the system tells
        assert large.own == pytest.approx(300e6, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_server")
def test_a_case_that_fails_is_named_with_its_trace() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^second failed:.*StopIteration"):
        compare([Case("first", sleeping, {"seconds": 0}), Case("second", failing, {"after": 1})], turns=3)


@pytest.mark.slow
def test_cases_can_take_turns_in_one_process() -> None:
    assert_as_expected(*in_a_process(in_one_process, context=server))
    with pytest.raises(RuntimeError, match=r"^failing failed:\nTraceback(?s:.*)StopIteration"):
        compare([Case("short", sleeping, {"seconds": 0}), Case("failing", failing, {"after": 1})], 2, one_process=True)


def assert_as_expected(short: Result, long: Result, large: Result) -> None:
    assert 0.2 <= short.fastest <= short.seconds <= short.slowest
    assert 0.5 <= long.fastest <= long.seconds
    assert (short.difference, long.difference) == (None, 0.25)
    assert large.peak is None or large.peak == pytest.approx(300e6, rel=0.05)
    assert short.peak is None or short.peak < 10e6


def test_a_report_is_a_table_and_a_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    results = [
        Result("copy", 1.5, 1.25, 2, 1, (1, 1), 1, 0.0625, None, 4 * 10**6, None, None),
        Result("convert", 0.03, 0.02, 0.04, 0.02, (0.01, 0.03), 0.016, None, 5, None, 7 * 10**6, None, 0.0012),
    ]
    report("convert", "Converting", "How it is.", results, write=True)
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-convert-[a-z0-9-]*[a-z0-9]\.md", path.name)
    page = path.read_text()
    assert page in capsys.readouterr().out
    assert "| of it its own | off by |\n" in page
    assert "| copy | 1.50 s | 1.25 s | 2.00 s | 1.00 (1.00 to 1.00) | 1.00 | 62.5 ms | 4 MB | - | - |" in page
    assert "| convert | 30.0 ms | 20.0 ms | 40.0 ms | 0.02 (0.01 to 0.03) | 0.02 | - | - | 7 MB | 1.2e-03 |" in page
    line = json.loads(page.split("```json\n")[1].split("\n```")[0])
    assert [one["name"] for one in line["results"]] == ["copy", "convert"]
    assert f"torch {torch.__version__.partition('+')[0]}" in line["environment"]["versions"]


@pytest.mark.parametrize(
    "processor, gpu, name",
    [
        ("AMD EPYC, 2 cores, 24 GiB", "none", "amd-epyc"),
        ("AMD EPYC (AVX512 bf16), 2 cores, 24 GiB", "none", "amd-epyc-avx512-bf16"),
        ("Intel(R) Xeon(R) Processor, 2 cores, 24 GiB", "none", "intel-xeon"),
        ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz, 12 cores, 16 GiB", "none", "intel-core-i7-9750h"),
        ("AMD EPYC, 16 cores, 128 GiB", "NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
    ],
)
def test_a_page_is_named_by_its_machine(processor: str, gpu: str, name: str) -> None:
    assert slug({"processor": processor, "GPU": gpu}) == name


def test_memory_of_the_gpu_has_a_column_where_there_is_one() -> None:
    assert "GPU memory" not in table([Result("a", 1, 1, 1, 1, (1, 1), 1, None, None, None, None, None)])
    assert "| 5 MB |" in table([Result("a", 1, 1, 1, 1, (1, 1), 1, None, None, None, None, 5 * 10**6)])


def test_the_limit_of_the_machine_is_what_machines_have() -> None:
    assert 1e8 < memory_bandwidth(2**24) < 1e12


def test_the_interval_of_a_ratio_is_that_of_turns_taken_together() -> None:
    first = [1.0, 2.0, 3.0, 5.0, 8.0]
    assert ratio_interval([3 * seconds for seconds in first], first) == pytest.approx((3, 3))
    low, high = ratio_interval([4.0, 2.0, 9.0, 3.0, 8.0], first)
    assert 3 / 8 <= low < 4 / 3 < high <= 8


def test_a_run_is_named_by_the_options_that_it_was_given() -> None:
    options = parser(None)
    options.add_argument("--device", default="cpu")
    options.add_argument("--sizes", nargs="+")
    options.add_argument("--sides", nargs="+", type=int)
    options.add_argument("--compile", action="store_true")

    def name(line: str) -> str:
        return name_of_run("forward", options, options.parse_args(line.split()))

    assert name("") == name("--turns 3 --write") == "forward"
    assert name("--compile") == "forward-compile"
    assert name("--sides 64 224") == "forward-64-224"
    assert name("--sizes tiny:32 base:8 --device cuda") == "forward-cuda-tiny-32-base-8"


# Features


@pytest.mark.slow
def test_all_ways_to_features_give_the_same_and_another_model_is_noticed(tmp_path: Path) -> None:
    where = {"size": "tiny", "folder": str(tmp_path)}
    assert 20 < bench_extract.write_files(3, tmp_path / "tiny images") < 200
    bench_extract.write_model("tiny", tmp_path)
    turns = [
        bench_extract.forward(**where),
        bench_extract.ours(**where, num_workers=0),
        bench_extract.by_pipeline(**where, batch=2),
        bench_extract.by_timm(**where, batch=2, workers=0, precision="no"),
    ]
    features = [turn() for turn in turns]  # which compares the first ones
    assert all(isinstance(each, torch.Tensor) and each.shape == (3, 192) for each in features)
    assert bench_extract.reading(**where)() == 3
    torch.save(torch.load(tmp_path / "tiny.pt").roll(1, dims=0), tmp_path / "tiny.pt")
    for prepare, more in ((bench_extract.ours, {"num_workers": 0}), (bench_extract.by_pipeline, {"batch": 3})):
        with pytest.raises(RuntimeError, match="differ"):
            prepare(**where, **more)()


def test_extraction_is_compared_with_a_run_that_does_one_after_the_other() -> None:
    seconds = {"forward alone": 4, "reading alone": 2, "plain-vit": 6, "plain-vit, 1 worker": 7, "FeatureExtractor": 5}
    seconds |= {f"transformers' pipeline, batch {batch}": 7 + batch for batch in (1, 8, 32)}
    results = [
        Result(f"{size}: {name}", one, one, one, 1, (1, 1), 1, None, 20, None, None, None)
        for size in ("tiny", "base")
        for name, one in seconds.items()
    ]
    lines = bench_extract.ratio_table(results, threads=2).splitlines()[2:]
    assert lines[:4] == [
        "| tiny | forward alone | 0.67 | - |",
        "| tiny | forward alone and reading alone | 0.83 | 0.95 |",  # 4 s and half of 2
        "| tiny | FeatureExtractor | 0.83 | - |",
        "| tiny | the fastest transformers' pipeline | 1.33 | 1.2 |",
    ]
    assert lines[4:6] == [
        "| base | forward alone | 0.67 | 0.95 |",
        "| base | forward alone and reading alone | 0.83 | - |",
    ]
    assert bench_extract.rate_table(results).splitlines()[2] == "| tiny: forward alone | 5 |"


# Kernels


def test_kernels_bytes_and_casts_are_counted_and_views_are_not() -> None:
    words, halves = torch.ones(3, 5), torch.ones(3, 5, dtype=torch.bfloat16)
    cases: list[tuple[Callable[[], object], tuple[int, int, int]]] = [
        (lambda: words.t()[:2].unsqueeze(0).expand(7, -1, -1).detach(), (0, 0, 0)),
        (lambda: torch.empty_like(words), (0, 0, 0)),
        (lambda: torch.zeros(3, 5), (1, 0, 60)),
        (lambda: words + words, (1, 0, 180)),
        (lambda: words + 1, (1, 0, 120)),
        (lambda: words + torch.tensor(1.0, dtype=torch.float64), (1, 0, 120 + 8)),
        (lambda: words[:1].expand(3, 5) + words, (1, 0, 20 + 60 + 60)),
        (lambda: words + halves, (1, 1, 60 + 30 + 60)),
        (lambda: words.to(torch.bfloat16), (1, 1, 90)),
        (lambda: halves.copy_(words), (1, 1, 90)),
        (lambda: words.clone().zero_(), (2, 0, 120 + 60)),
        (lambda: halves.sum(dtype=torch.float32), (1, 0, 30 + 4)),
        (lambda: halves.sum(0, dtype=torch.float32), (1, 1, 30 + 20)),
        (lambda: torch._foreach_copy_([halves, halves, words], [words, words, words]), (1, 2, 2 * 90 + 120)),
    ]
    for work, expected in cases:
        counted = bench_kernels.counted(work)
        assert (counted.kernels, counted.casts, counted.nbytes) == expected


@pytest.mark.slow
def test_a_training_step_has_no_more_kernels_and_casts_than_timm_s() -> None:
    most = {"float32": (371, 0), "bfloat16 autocast": (604, 257)}
    for dtype, (kernels, casts) in most.items():
        ours, theirs = (bench_kernels.count("tiny", package, dtype, fused=True) for package in ("plain_vit", "timm"))
        assert ours.step.kernels <= min(kernels, theirs.step.kernels)
        assert ours.step.casts <= min(casts, theirs.step.casts)
        assert ours.optimizer.kernels <= theirs.optimizer.kernels
    on_this_cpu = bench_kernels.count("tiny", "plain_vit", "bfloat16 autocast")
    assert on_this_cpu.step.kernels <= 757
    on_copies = bench_kernels.count("tiny", "plain_vit", "bfloat16 autocast", fused=True, copied=True)
    assert (on_copies.step.kernels, on_copies.step.casts) <= (436, 41)


ROTATED = [
    ("DINOv3-S", "bfloat16 autocast", (478, 1014, 417)), ("DINOv3-S", "float32", (294, 693, 0)),
    ("EVA-02-Ti", "float32", (280, 643, 0)), ("EVA-02-Ti", "bfloat16 autocast", (464, 964, 393)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype", "most"), few(ROTATED, 2))
def test_rotated_queries_and_keys_need_few_kernels(model: str, dtype: str, most: tuple[int, int, int]) -> None:
    found = bench_kernels.count(model, "plain_vit", dtype, fused=True)
    forward, step, casts = most
    assert found.forward.kernels <= forward
    assert found.step.kernels <= step
    assert found.step.casts <= casts


def test_a_forward_pass_calls_few_functions_more_than_transformers() -> None:
    ours, theirs = (bench_kernels.count("tiny", package, "float32").calls for package in ("plain_vit", "transformers"))
    assert ours <= 1.1 * theirs  # for one image on a GPU, these calls are what takes the time


def test_calls_are_counted_in_python_and_in_c() -> None:
    def work() -> None:
        [len(one) for one in ("", "a")]

    assert bench_kernels.calls_of(work) in (4, 5)  # of work, its list before Python 3.12, len twice, and setprofile


@pytest.mark.slow
def test_joined_in_each_block_a_step_among_processes_has_few_kernels_more() -> None:
    most = {"float32": (393, 0), "bfloat16 autocast": (648, 279)}
    for dtype, (kernels, casts) in most.items():
        found = bench_kernels.count("tiny", "plain_vit", dtype, fused=True, several=True)
        assert found.step.kernels <= kernels
        assert found.step.casts <= casts
        assert found.name.endswith("among processes")


def test_the_largest_batch_follows_from_what_an_image_adds_to_the_peak() -> None:
    def result(batch: int, seconds: float, peak: int | None) -> Result:
        return Result(str(batch), seconds, seconds, seconds, 1.0, (1.0, 1.0), 1.0, None, batch, peak, None, None)

    gibibyte = bench_batch.GIBIBYTE
    of_tiny = {("ViT-Ti/16", 224, 1): result(1, 0.5, gibibyte), ("ViT-Ti/16", 224, 4): result(4, 1.0, 4 * gibibyte)}
    untold = {("ViT-S/16", 64, 1): result(1, 0.5, None), ("ViT-S/16", 64, 4): result(4, 3.0, None)}
    noise = {("ViT-B/32", 64, 1): result(1, 0.5, 9000), ("ViT-B/32", 64, 4): result(4, 3.0, 9100)}
    found = bench_batch.summary(of_tiny | untold | noise, {"ViT-Ti/16": 2 * gibibyte, "ViT-S/16": 0, "ViT-B/32": 0})
    hardly = {64: (2.0, 1, None)}
    assert found == {"ViT-Ti/16": {224: (4.0, 4, 14)}, "ViT-S/16": hardly, "ViT-B/32": hardly}
    assert bench_batch.table(found).splitlines()[2:] == [
        "| ViT-Ti/16 | 224 | 4 | 4 | 14 |",
        "| ViT-S/16 | 64 | 2 | 1 | - |",
        "| ViT-B/32 | 64 | 2 | 1 | - |",
    ]


def test_the_tables_of_speed_are_made_from_the_newest_results() -> None:
    assert len(speeds.PAGES) == 2
    for page, chosen in speeds.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert speeds.with_speeds(text, chosen) == text, "run python -m benchmarks.table"


def test_there_is_one_page_of_results_for_each_run_and_machine() -> None:
    names = [path.stem[len("2026-11-21-") :] for path in harness.RESULTS.iterdir()]
    assert sorted(set(names)) == sorted(names), "delete the older page"


def test_the_speed_table_compares_each_of_our_cases_with_the_fastest_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert speeds.speeds() == ""

    def result(name: str, seconds: float, images: int | None = None) -> Result:
        return Result(name, seconds, seconds, seconds, 1, (1, 1), 1, None, images, None, None, None)

    forward = [
        result("tiny: plain_vit, eager", 2, 32),
        result("tiny: timm, eager", 3, 32),
        result("tiny: vit_pytorch, eager", 2.5, 32),
        result("tiny: timm, compiled", 1.5, 32),
        result("tiny: plain_vit, prepared", 1, 32),
        result("tiny: bare products", 0.5, 32),
        result("base: plain_vit, eager", 8, 9876),
        result("base: timm, eager", 4, 8),
    ]
    load = [
        result("transformers opens its own folder", 0.3),
        result("timm opens its own folder", 0.8),
        result("torch opens torchvision.pth", 0.1),
        result("plain_vit opens its own folder", 0.2),
        result("plain_vit converts timm", 0.4),
        result("plain_vit converts torchvision.pth", 0.2),
    ]
    convert = [result("copy and sync", 2.0), result("plain_vit converts timm", 4.0)]
    report("forward", "Forward", "", forward, write=True)
    report("load", "Opening", "", load, write=True)
    report("convert", "Converting", "", convert, write=True)
    report("forward-quick", "Forward", "", forward[:2], write=True)
    (newest,) = tmp_path.glob("*-load-*.md")
    today = newest.read_text()
    (tmp_path / f"2001-02-03-load-{slug(harness.machine())}.md").write_text(
        today.replace('"seconds": 0.4', '"seconds": 7')
    )
    lines = speeds.speeds().splitlines()
    assert lines[2:10] == [
        "| forward pass: tiny, eager | 16 images/s | vit_pytorch 12.8 images/s | 1.25 |",
        "| forward pass: tiny, prepared | 32 images/s | timm 21.3 images/s | 1.50 |",
        "| forward pass: base, eager | 1,234 images/s | timm 2 images/s | 617.25 |",
        "| loading a ViT-L (1.2 GB): opens its own folder | 0.2 s | none measured | - |",
        "| loading a ViT-L (1.2 GB): converts timm | 0.4 s | timm opens its own folder 0.8 s | 2.00 |",
        "| loading a ViT-L (1.2 GB): converts torchvision.pth | 0.2 s | torch opens torchvision.pth 0.1 s | 0.50 |",
        "| converting a ViT-L (1.2 GB): converts timm | 4 s | copy and sync 2 s | 0.50 |",
        "",
    ]
    assert lines[12].startswith("Rows of `make gpu` that no GPU has run yet: tests of numbers on a GPU; compiled steps")
    assert len(lines) == 13
    chosen = {"loading a ViT-L (1.2 GB): converts timm": "open", "forward pass: tiny, eager": "forward"}
    assert speeds.speeds(chosen).splitlines()[2:5] == [
        "| open | 0.4 s | timm opens its own folder 0.8 s | 2.00 |",
        "| forward | 16 images/s | vit_pytorch 12.8 images/s | 1.25 |",
        "",
    ]
    with pytest.raises(ValueError, match=r"has no \['import'\]: run that benchmark"):
        speeds.speeds({**chosen, "import": "import"})
    readme = f"before\n{speeds.START}old\n{speeds.END}after\n"
    assert speeds.with_speeds(readme) == f"before\n{speeds.START}{speeds.speeds()}{speeds.END}after\n"
