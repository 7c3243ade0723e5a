"""The studies: their files, the queue that runs them, and statistics and pictures of their results."""

import dataclasses
import json
import os
import signal
import sys
import time
from io import StringIO
from pathlib import Path
from resource import struct_rusage
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from datasets import DatasetDict
from scipy import stats  # type: ignore[import-untyped]
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    BitConfig,
    BitForImageClassification,
    ViTImageProcessor,
)

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.training.arguments import check_options, parse_arguments
from plain_vit.training.data import load_splits
from plain_vit.training.loop import make_schedule
from studies import claims as claims_module
from studies import few_shot, frozen, work
from studies.claims import Claims
from studies.compute import operations
from studies.draw import PAGE, PICTURES, draw, has_accuracies, images_axis, section, table, with_block
from studies.frozen import frozen_table
from studies.layer_positions import LayerPositionsConfig
from studies.paper import GPUS, hours_alone, hours_of, print_commands, training_images
from studies.results import (
    append_result,
    chosen_rate,
    count_runs,
    is_flat,
    planned_runs,
    read_results,
    results_file,
    rows_of,
    seconds_left,
)
from studies.run import main, options_of_machine, stopping
from studies.study import CHOOSE, FIRST, HERE, REPORT, ROOT, SIZES, Study, open_study, study_names
from studies.work import Queue, command
from tests.processes import in_a_process, processes, run_forked
from tests.sizes import NIGHTLY
from tests.training.runs import open_script

STUDIES = study_names()
# Behaves like a training script but takes a tenth of a second: it reports progress, ends on SIGTERM, resumes, and its
# results are functions of its options.
SCRIPT = """
import json, sys, time
from pathlib import Path
words = sys.argv[1:]
option = lambda name: words[words.index("--" + name) + 1]
folder, rate, seed = Path(option("output_dir")), float(option("learning_rate")), int(option("seed"))
if "fails" in words[words.index("--model") + 1]:
    sys.exit("no such thing")
if folder.exists() and "--resume" not in words:
    sys.exit("the folder is not empty")
folder.mkdir(parents=True, exist_ok=True)
(folder / "run.json").write_text("{}")
(folder / "began").open("a").write("x")
times = folder.parent / "times"
times.open("a").write(f"{folder.name} begins\\n")
time.sleep(float(option("pause")))
times.open("a").write(f"{folder.name} ends\\n")
curve = [0.5, 0.7, 0.8 - abs(rate - 2e-3) * 10, 0.8 - abs(rate - 2e-3) * 10]
(folder / "log.jsonl").write_text("".join(json.dumps({"validation_accuracy": v}) + chr(10) for v in curve))
(folder / "results.json").write_text(json.dumps({"test_accuracy": 0.6 + seed / 100 + rate}))
tensors = {"weight": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
           "bias": {"dtype": "F32", "shape": [3], "data_offsets": [60, 72]}}
header = json.dumps(tensors).encode()
(folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(72))
(folder / "config.json").write_text("{}")
"""
TOY = """
title: A toy
question: Does the queue work?
paper: {source: none, numbers: {one: 61.5}}
prediction: It does.
seeds: [1, 2]
learning_rates: [1.0e-3, 2.0e-3, 3.0e-3]
options: {pause: 0.01}
stages:
  before: {options: {learning_rate: 0.1, pause: 0.01}}
contenders:
  one: {model: {hidden_size: 4, num_attention_heads: 2}}
  the other: {after: [before]}
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Return a study with a fast script."""
    (tmp_path / "toy.yaml").write_text(TOY)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setitem(work.SCRIPTS, "finetune", str(tmp_path / "script.py"))
    monkeypatch.setattr(work, "WAIT", 0.1)
    return open_study("toy", "desk", tmp_path)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the scripts for training and probing instead of starting them."""

    def run(queue: Queue, key: str, words: list[str], log: Path) -> tuple[int, struct_rusage]:
        less = [] if NIGHTLY or "finetune" not in words[1] else ["--max_images", "200"]
        run_forked([str(ROOT / word) if word.startswith("examples/") else word for word in [*words[1:], *less]])
        return 0, struct_rusage([0.0] * 16)

    monkeypatch.setattr(Queue, "_run", run)
    probe = SimpleNamespace(run=lambda words, **options: run_forked([str(ROOT / words[1]), *words[2:]]))
    monkeypatch.setattr(frozen, "subprocess", probe)


def queue_of(study: Study, folder: Path, said: list[str] | None = None, **options: Any) -> Queue:
    say = ([] if said is None else said).append
    return Queue(study, folder / "runs", folder / "results", **{"jobs": 2, "threads": 1, "say": say, **options})


def results_of(queue: Queue) -> dict[str, dict[str, Any]]:
    """Do all runs of a queue, and return its results."""
    assert queue.work(), queue.failed
    return read_results(queue.file)


def line_of(study: Study, contender: str, role: str, rate: float, seed: int, **values: Any) -> dict[str, Any]:
    """Return a result line like the queue's."""
    run = study.run(contender, role, rate, seed)
    usual = {"validation": [0.5, 0.6], "flat": True, "cpu_seconds": 9.0, "threads": 1, "parameters": 18,
             "resumed": False, "environment": {"accelerator": "none"}}  # fmt: skip
    return {"key": run.key, **usual, "results": {"test_accuracy": values.pop("test", 0.5)}, **values}


def open_yaml_study(folder: Path, **fields: Any) -> Study:
    """Return the toy study with other fields, runs of 30 epochs, and choosing runs of 3 epochs."""
    lengths = {"options": {"epochs": 30}, "choosing": {"epochs": 3}}
    (folder / "toy.yaml").write_text(yaml.safe_dump({**yaml.safe_load(TOY), **lengths, **fields}))
    return open_study("toy", "desk", folder)


# The files


@pytest.mark.slow(quick=["pooling-smoke"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", STUDIES)
def test_every_command_of_every_study_is_one_that_its_script_understands(name: str, size: str) -> None:
    study = open_study(name, size)
    kinds = {"finetune": open_script("finetune_image_classification").FinetuneArguments,
             "masked": open_script("pretrain").PretrainArguments}  # fmt: skip
    for contender in study.contenders:
        rate = study.learning_rates(contender)[0]
        reported, choosing = (study.run(contender, role, rate, 1) for role in (REPORT, CHOOSE))
        for run in [*reported.stages(), choosing]:
            words = command(run, study.launch, Path("model"), Path("out"))
            arguments = parse_arguments(kinds[run.script], words[words.index("--model") :], description=None)
            check_options(arguments)
            assert arguments.seed == 1
            assert not any("{" in word for word in words)
            if size == "paper":
                make_schedule(arguments, training_images(run), GPUS)  # raises if the warm-up is longer than the run
            if run.model is not None:
                fields = dict(run.model)
                AutoConfig.for_model(fields.pop("type", "plain_vit"), **fields)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_what_it_asks_and_what_was_expected(name: str) -> None:
    study = open_study(name, "desk")
    assert study.description["question"].endswith("?")
    assert study.description["prediction"].startswith("Written on 2026-")
    assert study.description["paper"].keys() <= {"source", "numbers", "words"}
    assert {*study.description["paper"].get("numbers", {})} <= {*study.contenders}
    assert len(study.seeds) >= 3
    assert 0 not in study.seeds, "seed 0 chooses the learning rates"
    for contender in study.contenders:
        run = study.run(contender, CHOOSE, 1e-3, 0)
        assert run.options["validation_fraction"] > 0, "the test split chooses nothing"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"contender": {}}, r"toy.yaml has \['contender'\]: expected only"),
        ({"question": None}, r"toy.yaml lacks \['question'\]"),
        ({"learning_rates": [1e-3, 2e-3]}, r"one has \[0.001, 0.002\]: expected 3 learning rates or more"),
        ({"contenders": {"one": {"modle": {}}}}, r"contenders.one has \['modle'\]"),
        ({"contenders": {"one": {"after": ["there"]}}}, "one comes after {'there'}, which no stage is called"),
        (
            {"contenders": {"one": {"after": ["before"], "checkpoint": "a.pt"}}},
            "one has a stage before it and a checkpoint",
        ),
        ({"sizes": {"desk": {"option": {}}}}, r"sizes.desk has \['option'\]"),
        ({"x": "seconds"}, "x is 'seconds': expected 'compute', or each contender's own x"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    fields = {**yaml.safe_load(TOY), **change}
    fields = {name: value for name, value in fields.items() if value is not None}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(ValueError, match=message):
        open_study("toy", "desk", tmp_path)
    with pytest.raises(ValueError, match="no study 'nothing'"):
        open_study("nothing", "desk")


def test_a_run_is_known_by_what_its_result_depends_on(toy: Study) -> None:
    run = toy.run("one", CHOOSE, 1e-3, 0)
    assert run.key == toy.run("one", REPORT, 1e-3, 0).key
    others = [toy.run("one", CHOOSE, 2e-3, 0), toy.run("one", CHOOSE, 1e-3, 1), toy.run("the other", CHOOSE, 1e-3, 0)]
    assert len({run.key, *(other.key for other in others)}) == 4
    before, last = toy.run("the other", REPORT, 1e-3, 1).stages()
    assert (before.role, before.learning_rate, last.model, last.after) == (FIRST, 0.1, None, before)
    assert before.key == next(toy.run("the other", REPORT, 3e-3, 1).stages()).key, "shared by all learning rates"
    assert before.key != next(toy.run("the other", REPORT, 3e-3, 2).stages()).key


@pytest.mark.parametrize(
    "size, contender, model, from_scratch",
    [
        ("desk", "from glyphs, 100 per class", "examples/checkpoints/glyphs_vit.pt", []),
        ("desk", "from scratch, 100 per class", "examples/checkpoints/glyphs_vit.pt", ["--from_scratch", "True"]),
        ("paper", "from glyphs, 100 per class", "google/vit-base-patch16-224-in21k", []),
        ("paper", "from scratch, 100 per class", "runs/models/from-scratch-100-per-class-", ["--from_scratch"]),
    ],
)
def test_a_contender_starts_from_the_checkpoint_of_its_size_or_from_scratch(
    tmp_path: Path, size: str, contender: str, model: str, from_scratch: list[str]
) -> None:
    study = open_study("labels", size)
    run = study.run(contender, REPORT, 1e-3, 1)
    words = command(run, "python", work.model_of(run, queue_of(study, tmp_path)), Path("out"))
    start = str(words[words.index("--model") + 1])
    assert start.removeprefix(f"{tmp_path}/").startswith(model)
    place = words.index("--from_scratch") if from_scratch else len(words)
    assert words[place : place + len(from_scratch)] == from_scratch
    assert words.count("--from_scratch") == bool(from_scratch)
    assert run.key != dataclasses.replace(run, checkpoint="another").key


@pytest.mark.slow
def test_options_of_a_machine_are_in_every_command_and_no_part_of_what_a_run_is(
    toy: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in results_of(queue_of(toy, tmp_path, more=options_of_machine(["num_workers=3"], toy))).values():
        assert line["command"].endswith(" --num_workers 3")
    assert queue_of(toy, tmp_path).waiting() == []
    for wrong, message in {"num_workers": "expected NAME=VALUE", "epochs=1": "the study decides"}.items():
        assert main(["positions", "--more", wrong, "--results", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err


def test_seconds_of_cores_are_of_runs_without_a_gpu(toy: Study) -> None:
    lines = [line_of(toy, "one", CHOOSE, rate, 0) for rate in toy.learning_rates("one")]
    rate = chosen_rate(toy, "one", {line["key"]: line for line in lines}) or 0
    lines.append(line_of(toy, "one", REPORT, rate, 1, environment={"accelerator": "H200"}))
    assert rows_of(toy, {line["key"]: line for line in lines})[0].core_seconds is None
    lines.append(line_of(toy, "one", REPORT, rate, 2, cpu_seconds=5.0))
    assert rows_of(toy, {line["key"]: line for line in lines})[0].core_seconds == 5.0


def test_the_runs_that_choose_a_rate_may_be_shorter_than_those_that_count(toy: Study) -> None:
    shorter = dataclasses.replace(toy, description={**toy.description, "choosing": {"pause": 0.001}})
    choosing, reported = (shorter.run("the other", role, 1e-3, 1) for role in (CHOOSE, REPORT))
    assert reported.options["pause"] == 0.01
    assert choosing.options == {**reported.options, "pause": 0.001}
    assert choosing.after == reported.after
    assert choosing.key != reported.key
    assert count_runs(shorter) == count_runs(toy)


def test_some_contenders_have_the_same_runs_as_all(toy: Study) -> None:
    some = toy.only(["the other"])
    assert some.contenders == ["the other"]
    assert {run.key for run in planned_runs(some, {})} < {run.key for run in planned_runs(toy, {})}
    with pytest.raises(ValueError, match="toy has no contender 'two': expected some of"):
        toy.only(["two"])


# The plan and the statistics


def test_learning_rates_are_chosen_on_the_validation_split_and_never_on_the_test_split(toy: Study) -> None:
    rates = toy.learning_rates("one")
    lines = [
        line_of(toy, "one", CHOOSE, rate, 0, validation=[0.1, best, 0.2], test=test)
        for rate, best, test in zip(rates, (0.6, 0.8, 0.7), (0.1, 0.2, 0.99), strict=True)
    ]
    results = {line["key"]: line for line in lines}
    assert chosen_rate(toy, "one", results) == rates[1]
    assert chosen_rate(toy, "the other", results) is None
    assert chosen_rate(toy, "one", {line["key"]: line for line in lines[1:]}) is None


def test_the_plan_grows_with_the_choices_and_ends_with_the_count(toy: Study) -> None:
    planned = planned_runs(toy, {})
    assert [run.role for run in planned] == [CHOOSE] * 3 + [FIRST] + [CHOOSE] * 3
    results = {run.key: line_of(toy, run.contender, run.role, run.learning_rate, run.seed) for run in planned}
    whole = planned_runs(toy, results)
    assert len(whole) == count_runs(toy) == 3 + 3 + 3 + 2 + 2
    assert [run.seed for run in whole[7:]] == [1, 1, 1, 2, 2, 2], (
        "seed by seed, so that an unfinished study is balanced"
    )


@pytest.mark.parametrize("name", STUDIES)
def test_runs_are_counted_by_their_learning_rates_where_these_are_known(name: str) -> None:
    study = open_study(name, "smoke")
    assert all(len(study.learning_rates(contender)) == 1 for contender in study.contenders)
    assert count_runs(study) == len(planned_runs(study, {}))


def test_means_have_students_interval(toy: Study) -> None:
    lines = [line_of(toy, "one", CHOOSE, rate, 0) for rate in toy.learning_rates("one")]
    lines += [line_of(toy, "one", REPORT, 1e-3, seed, test=value) for seed, value in ((1, 0.80), (2, 0.84))]
    row = rows_of(toy, {line["key"]: line for line in lines})[0]
    low, high = stats.t.interval(0.95, 1, loc=0.82, scale=stats.sem([0.80, 0.84]))
    assert row.mean == pytest.approx(0.82)
    assert row.interval == pytest.approx((high - low) / 2)
    assert row.at_the_edge
    assert rows_of(toy, {})[1].mean is None


@pytest.mark.parametrize(
    "curve, flat",
    [
        ([0.5, 0.8, 0.8, 0.8, 0.8], True),
        ([0.5, 0.6, 0.7, 0.8, 0.9], False),
        ([0.5, 0.8, 0.79, 0.78, 0.77], True),
        ([0.9] * 8 + [0.92, 0.92], False),
        ([0.9] * 8 + [0.901, 0.901], True),
        ([0.9, 0.9], False),
    ],
)
def test_flat_is_a_curve_that_no_longer_rises(curve: list[float], flat: bool) -> None:
    assert is_flat(curve) == flat


# The file of results


def test_results_survive_a_killed_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results" / "toy-desk.jsonl"
    assert read_results(file) == {}
    append_result(file, {"key": "a", "value": 1})
    with file.open("ab") as stream:
        stream.write(b'{"key": "b", "val')
    append_result(file, {"key": "c", "value": 3})
    append_result(file, {"key": "a", "value": 4})
    assert {key: line["value"] for key, line in read_results(file).items()} == {"a": 4, "c": 3}
    assert "toy-desk.jsonl has a damaged line" in capsys.readouterr().out


def append_many(file: Path, writer: int) -> None:
    for number in range(40):
        append_result(file, {"key": f"{writer}-{number}", "more": "x" * 5000})


@pytest.mark.slow
def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    writers = [processes.Process(target=append_many, args=(tmp_path / "r.jsonl", number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(read_results(tmp_path / "r.jsonl")) == 120


# Claims


def test_a_claim_is_held_by_one_and_given_back(tmp_path: Path) -> None:
    with Claims(tmp_path) as first:
        assert first.take("run")
        assert not Claims(tmp_path).take("run")
    second = Claims(tmp_path)
    assert second.take("run")


def test_the_claim_of_a_dead_process_is_free_at_once_and_of_another_machine_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = processes.Process(target=int)
    ended.start()
    ended.join()
    first, second = Claims(tmp_path), Claims(tmp_path)
    first.owner["processes"] = [ended.pid]
    assert first.take("run")
    assert second.take("run")
    elsewhere = Claims(tmp_path)
    elsewhere.owner["machine"] = "another machine"
    assert elsewhere.take("far")
    assert not second.take("far")
    os.utime(tmp_path / "far", (0, time.time() - claims_module.DEAD - 60))
    elsewhere.beat()
    assert not second.take("far")
    os.utime(tmp_path / "far", (0, time.time() - claims_module.DEAD - 60))
    assert second.take("far")


def test_the_time_left_is_by_epochs_and_by_what_is_most_alike(tmp_path: Path) -> None:
    study = open_yaml_study(tmp_path, stages={"before": {"options": {"learning_rate": 0.1, "epochs": 5}}})
    lines = [
        line_of(study, "one", CHOOSE, 1e-3, 0, cpu_seconds=30.0, seconds=900.0),
        line_of(study, "one", CHOOSE, 2e-3, 0, cpu_seconds=80.0, threads=2),
        line_of(study, "one", CHOOSE, 3e-3, 0, cpu_seconds=2.0, resumed=True),
    ]
    found = {line["key"]: line for line in lines}
    by_epoch = (30 + 80 / 2) / 2 / 3  # the first was paused, the last partly timed
    # one: 2 runs of 30 epochs; the other: 3 choices of 3, 2 runs of 30, and a stage of 5 before each seed's first run.
    assert seconds_left(study, found) == pytest.approx(by_epoch * (2 * 30 + 3 * 3 + 2 * 30 + 3 * 5))
    stage = study.run("the other", CHOOSE, 1e-3, 0).after
    lines += [line_of(study, "one", REPORT, chosen_rate(study, "one", found) or 0, 1, cpu_seconds=600.0)]
    lines += [{**lines[0], "key": stage.key, "cpu_seconds": 10.0}]
    found = {line["key"]: line for line in lines}
    expected = 30 * 20.0 + (3 * 3) * by_epoch + 2 * 30 * 20.0 + 2 * 5 * 2.0
    assert seconds_left(study, found) == pytest.approx(expected)


# The queue


@pytest.mark.slow
def test_a_queue_does_everything_once_and_a_second_one_nothing(toy: Study, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + "while time.process_time() < 0.06: pass\n")
    said: list[str] = []
    lines = results_of(queue_of(toy, tmp_path, said))
    assert len(lines) == count_runs(toy)
    assert chosen_rate(toy, "one", lines) == 2e-3
    assert any(f"[13/{count_runs(toy)}]" in line and "minutes left" in line for line in said)
    for line in lines.values():
        assert line["parameters"] == 18
        assert line["command"].startswith("python ")
        assert {"torch", "processor"} <= line["environment"].keys()
        assert line["threads"] == 1
        assert 0 < line["cpu_seconds"] < 60
    folders = [*(tmp_path / "runs").glob("*-desk/*/began")]
    assert [folder.read_text() for folder in folders] == ["x"] * count_runs(toy)
    assert not [*(tmp_path / "runs" / "claims").glob("[!.]*")]
    said.clear()
    assert queue_of(toy, tmp_path, said).work()
    assert said == []


@pytest.mark.slow
def test_a_missing_model_is_made_again_for_the_runs_that_start_from_it(toy: Study, tmp_path: Path) -> None:
    queue = queue_of(toy, tmp_path, most=4)
    assert not queue.work()
    (stage,) = (run for run in planned_runs(toy, read_results(queue.file)) if run.role == FIRST)
    assert stage.key in read_results(queue.file)
    (queue.folder(stage) / "config.json").unlink()
    assert queue_of(toy, tmp_path).work()
    assert (queue.folder(stage) / "config.json").is_file()


@pytest.mark.slow
def test_a_failing_run_is_named_and_the_others_go_on(toy: Study, tmp_path: Path) -> None:
    said: list[str] = []
    description = {**toy.description, "contenders": {"it fails": {"model": {"hidden_size": 8}}, "one": None}}
    study = Study("toy", "desk", description, toy.shared)
    queue = queue_of(study, tmp_path, said)
    assert not queue.work()
    assert sum(line.startswith("failed: it fails, choose") for line in said) == 3
    assert "exit code 1, see" in said[-1]
    assert len(read_results(queue.file)) == 3 + 2


def worker(folder: Path) -> Any:
    """Start a process that works on the study until it is stopped from outside."""
    process = processes.Process(target=do_until_ended, args=(folder,))
    process.start()
    return process


def do_until_ended(folder: Path) -> None:
    queue = queue_of(open_study("toy", "desk", folder), folder)
    signal.signal(signal.SIGTERM, stopping(queue))
    queue.work()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_queue_goes_on(toy: Study, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "toy.yaml").write_text(TOY.replace("pause: 0.01", "pause: 1"))
    killed = worker(tmp_path)
    end = time.monotonic() + 120
    while not [*tmp_path.glob("runs/toy-desk/*/began")] and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(killed.pid, number)
    killed.join()
    assert len(read_results(results_file(tmp_path / "results", toy))) < 3
    (tmp_path / "script.py").write_text(SCRIPT.replace('float(option("pause"))', "0"))
    lines = results_of(queue_of(open_study("toy", "desk", tmp_path), tmp_path))
    assert len(lines) == count_runs(toy)
    times = (tmp_path / "runs" / "toy-desk" / "times").read_text().splitlines()
    if number == signal.SIGKILL:  # runs of the killed queue go on, and no other process uses their folders
        for folder in {line.split()[0] for line in times}:
            words = [line.split()[1] for line in times if line.startswith(folder)]
            assert words == ["begins", "ends"] * (len(words) // 2)
    assert any(line["resumed"] for line in lines.values()) == (number == signal.SIGTERM)


@pytest.mark.slow
def test_two_processes_share_a_queue(toy: Study, tmp_path: Path) -> None:
    workers = [worker(tmp_path) for _ in range(2)]
    for each in workers:
        each.join()
    assert [each.exitcode for each in workers] == [0, 0]
    file = results_file(tmp_path / "results", toy)
    assert len(file.read_text().splitlines()) == len(read_results(file)) == count_runs(toy)
    assert {began.read_text() for began in tmp_path.glob("runs/toy-desk/*/began")} == {"x"}


# Pictures, tables, estimates


@pytest.mark.slow
def test_the_page_has_the_numbers_of_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in STUDIES:
        study = open_study(name, "desk")
        results = read_results(results_file(HERE / "results", study))
        assert with_block(text, name, section(study, results)) == text, f"python -m studies.draw {name}"
        assert not has_accuracies(study, results) or (PICTURES / f"study_{name}.png").is_file()
    assert with_block(text, "frozen", frozen_table(read_results(frozen.RESULTS))) == text, "python -m studies.draw"


@pytest.mark.parametrize("name", STUDIES)
def test_contenders_can_be_told_apart_by_their_curves_of_learning_rates(name: str) -> None:
    study = open_study(name, "desk")
    results = read_results(results_file(HERE / "results", study))
    rates = draw(study, results).axes[-1]
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in rates.lines]
    assert len({*looks}) == len(looks) == sum(bool(row.choices) for row in rows_of(study, results)) > 0
    images = {(contender or {}).get("x") for contender in study.description["contenders"].values()} - {None}
    legend = rates.get_legend()
    assert {text.get_text() for text in (legend.get_texts() if legend else ())} == {f"{count:,}" for count in images}


def test_a_table_says_what_is_missing(toy: Study) -> None:
    lines = [line_of(toy, "one", CHOOSE, rate, 0, validation=[rate]) for rate in toy.learning_rates("one")]
    lines += [line_of(toy, "one", REPORT, 3e-3, 2, test=0.8125, flat=False)]
    results = {line["key"]: line for line in lines}
    rows = table(toy, results).splitlines()
    assert rows[2] == "| one | 0.003* | 81.25% (1 of 2 seeds) | - | 81.25% to 81.25% | 9 | 18 | 0 of 1 | 61.50% |"
    assert rows[3] == "| the other | not chosen yet | not run | not run | not run | not run | not run | not run | - |"
    words = [text.get_text() for axis in draw(toy, results).axes for text in axis.texts]
    assert words == ["not run yet"]


@pytest.mark.parametrize("shared", [False, True])
def test_positions_are_added_before_every_layer(tmp_path: Path, shared: bool) -> None:
    kind = "shared" if shared else "own"
    model = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    fields = {**model, "intermediate_size": 8, "type": LayerPositionsConfig.model_type, "layer_positions": kind}
    work.write_architecture(fields, tmp_path / "model", with_weights=True)
    layered: Any = AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = layered(pixels, output_hidden_states=True).hidden_states
        for layer, own, before, after in zip(layered.vit.layers, range(-1, 2), states[:-1], states[1:], strict=True):
            table = layered.vit.embeddings.position_embeddings.weight
            if own >= 0:
                table = table if shared else layered.layer_positions[own].weight
                assert table.std() > 0.01
                before = before + table
            forward = type(layer).forward  # without the hook
            torch.testing.assert_close(forward(layer, before), after, rtol=0, atol=1e-6)
    assert sum("layer_positions" in name for name in layered.state_dict()) == (0 if shared else 2)
    plain = PlainViTForImageClassification(PlainViTConfig(**model, intermediate_size=8))
    assert layered.num_parameters() == plain.num_parameters() + (0 if shared else 2 * 5 * 8)


def test_operations_are_those_of_the_paper_s_model() -> None:
    study = open_study("positions", "paper")
    fields = dict(study.run("learned", REPORT, 1e-3, 1).model or {})
    # ViT-B/16: 17.6 billion multiplications, 12 blocks of 197 tokens; our last block computes one token only.
    assert operations(fields) == pytest.approx(2 * 17.5e9, rel=0.1)
    assert hours_of(study.run("learned", REPORT, 1e-3, 1)) == pytest.approx(
        3 * operations(fields) * 300 * (1_281_167 - 12_812) / (8 * 0.4 * 312e12) / 3600
    )


def test_contenders_are_placed_by_the_operations_and_the_seconds_of_their_training() -> None:
    study = open_study("compute", "desk").only(["ViT", "small ResNet", "hybrid"])
    results: dict[str, dict[str, Any]] = {}
    for contender, seconds in (("ViT", 100.0), ("small ResNet", 40.0)):
        lines = [line_of(study, contender, CHOOSE, rate, 0) for rate in study.learning_rates(contender)]
        lines += [line_of(study, contender, REPORT, 3e-4, seed, cpu_seconds=seconds) for seed in study.seeds]
        results |= {line["key"]: line for line in lines}
    for line in results.values():
        line["results"]["steps"] = 938
    by_name = {row.contender: row for row in rows_of(study, results)}
    # Three blocks of 50 tokens, and keys and values of a fourth, of which only the class token is read.
    tokens = 50
    block = 2 * tokens * (4 * 96 * 96 + 2 * 96 * 192) + 4 * tokens**2 * 96
    assert by_name["ViT"].operations == pytest.approx(3 * 938 * 32 * 3.3 * block, rel=0.1)
    ratio = (by_name["small ResNet"].operations or 0) / (by_name["ViT"].operations or 1)
    assert 0.1 < ratio < 0.5
    rows = table(study, results).splitlines()
    assert rows[0].endswith("| flat | TFLOP |")
    assert rows[2].endswith("| 3 of 3 | 2.6 |")
    assert rows[4].endswith("| not run | not run |")
    by_operations, by_seconds, _ = draw(study, results).axes
    assert by_operations.get_xlabel() == "floating-point operations of training (TFLOP)"
    assert by_seconds.get_xlabel() == "core seconds"
    assert [line.get_xdata()[0] for line in by_seconds.lines[:2]] == [100.0, 40.0]
    assert "hybrid (not run yet)" in [text.get_text() for text in by_operations.get_legend().get_texts()]


def test_hours_are_those_of_the_size_that_a_recipe_fine_tunes_at() -> None:
    study = open_study("labels", "paper")
    run = study.run("from glyphs, 10 per class", REPORT, 1e-2, 1)
    large = operations({**(run.model or {}), "image_size": 384})
    assert hours_of(run) == pytest.approx(3 * large * 500 * 512 / (8 * 0.4 * 312e12) / 3600)


def test_the_hours_of_a_study_count_a_shared_stage_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = open_study("fine_tuning", "paper").only(["Adam"])
    run = study.run("Adam", REPORT, 1e-3, 1)
    stage, last = map(hours_alone, run.stages())
    assert hours_of(run) == stage + last
    print_commands(study, tmp_path)
    # One stage for the seed that chooses among three rates, and one for each of the three reported seeds.
    assert f"Estimated: {4 * stage + 6 * last:,.0f} hours" in capsys.readouterr().out


@pytest.mark.slow(quick=["masked"])
@pytest.mark.parametrize("name", STUDIES)
def test_the_hours_of_every_study_are_estimated(name: str) -> None:
    study = open_study(name, "paper")
    hours = [hours_of(study.run(contender, REPORT, 1e-3, 1)) for contender in study.contenders[-2:]]
    assert all(0.001 < each < 1000 for each in hours)


def left_by_its_reader(words: list[str]) -> tuple[int, str]:
    """Return the exit code and the errors of a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    with os.fdopen(1, "w", closefd=False) as sys.stdout, StringIO() as sys.stderr:
        code = main(words)
        sys.stdout.flush()  # like Python at exit
        return code, sys.stderr.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["labels", "--size", "paper"]])
def test_a_reader_who_leaves_is_no_fault(words: list[str], tmp_path: Path) -> None:
    assert in_a_process(left_by_its_reader, [*words, "--runs", str(tmp_path)]) == (1, "")


@pytest.mark.slow
def test_contenders_share_their_earlier_stages_and_those_that_are_the_same_their_runs(
    toy: Study, tmp_path: Path
) -> None:
    model = {"hidden_size": 4, "num_attention_heads": 2}
    contenders = {name: {"model": model, "after": ["before"]} for name in ("one", "the other", "a third")}
    contenders["a third"]["options"] = {"pause": 0.02}
    shared = dataclasses.replace(toy, description={**toy.description, "contenders": contenders})
    lines = results_of(queue_of(shared, tmp_path))
    assert len(lines) == count_runs(shared) == 3 + 2 * (3 + 2)
    assert all(len(row.accuracies) == 2 for row in rows_of(shared, lines))


@pytest.mark.slow
def test_what_another_study_has_done_is_not_done_again(toy: Study, tmp_path: Path) -> None:
    assert queue_of(toy, tmp_path).work()
    said: list[str] = []
    lines = results_of(queue_of(dataclasses.replace(toy, name="again"), tmp_path, said))
    assert len(lines) == count_runs(toy)
    known = [line for line in said if line.endswith("the study toy has done it")]
    choices, stages = 2 * 3, 3  # reported runs, whose models may be analysed, are repeated
    assert len(known) == choices + stages
    assert all(line["study"] == "again" for line in lines.values())

    # A stage whose model is missing is repeated.
    third = queue_of(dataclasses.replace(toy, name="third"), tmp_path)
    (stage, *_) = (run for run in planned_runs(toy, {}) if run.role == FIRST)
    (third.folder(stage) / "config.json").unlink()
    assert third.known_elsewhere(stage) is None
    assert third.work()
    assert third.is_kept(stage)


def test_a_table_of_frozen_features_has_what_was_measured() -> None:
    few = {"10": [0.5, 0.625, 0.75], "1000": [0.75]}
    results = {"few_shot": few, "linear": {"test_accuracy": 0.875}, "knn": {"20": 0.8125}}
    line = {"results": results, "image_size": 24, "parameters": 205600, "cpu_seconds": 61.4}
    other = {**line, "results": {**results, "few_shot": {"10": [0.5]}, "knn": {"10": 0.25}}}
    assert frozen_table({"characters": line, "other": other}).splitlines() == [
        "| | pixels | parameters | 10 per class | 1,000 per class | all: linear probe | all: 20 neighbours "
        "| all: 10 neighbours | core seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| characters | 24 | 205,600 | 62.50% (50.0% to 75.0%) | 75.00% (75.0% to 75.0%) | 87.50% | 81.25% | - | 61 |",
        "| other | 24 | 205,600 | 50.00% (50.0% to 50.0%) | - | 87.50% | - | 25.00% | 61 |",
    ]


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "digits"
    DatasetDict({name: split.select(range(200)) for name, split in load_splits("digits").items()}).save_to_disk(folder)
    return str(folder)


def small_classifier(folder: Path) -> PlainViTForImageClassification:
    """Save a small classifier with its image processor, and return it."""
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = PlainViTForImageClassification(PlainViTConfig(image_size=8, patch_size=4, **shape))
    model.save_pretrained(folder)
    PlainViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_few_shot_accuracy_of_a_pretrained_model_is_measured(toy: Study, few_digits: str, tmp_path: Path) -> None:
    study = dataclasses.replace(toy, description={**toy.description, "options": {"dataset": few_digits}})
    queue = queue_of(study, tmp_path)
    run = study.run("the other", REPORT, 1e-3, 1)
    assert run.after is not None
    small_classifier(queue.folder(run.after))
    line = few_shot.probe(run, queue)
    assert (line["key"], line["contender"], line["seed"]) == (run.after.key, "the other", 1)
    assert len({*line["few_shot"]}) > 1
    assert len(line["few_shot"]) == few_shot.DRAWS
    assert all(0 < accuracy < 1 for accuracy in line["few_shot"])


def test_few_shot_accuracies_are_drawn_over_the_size_of_the_pretraining_set() -> None:
    study = open_study("data", "desk")
    lines = {
        str(number): {"contender": name, "seed": number, "few_shot": [accuracy, accuracy + 0.1]}
        for number, (name, accuracy) in enumerate({"ViT, 680": 0.3, "ViT, 3,400": 0.5}.items())
    }
    (axis,) = few_shot.draw(study, lines).axes
    drawn = {line.get_label(): line for line in axis.lines}
    np.testing.assert_array_equal(drawn["ViT"].get_xdata(), [680, 3400])
    np.testing.assert_allclose(drawn["ViT"].get_ydata(), [35, 55])
    assert "ResNet (not run yet)" in drawn
    assert axis.get_xlabel() == images_axis(study) == "images of pre-training"
    assert {images_axis(open_study(name, "desk")) for name in ("labels", "unlabelled")} == {"training images"}
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["680", "3,400", "34,000"]
    assert len(few_shot.pretrained(study, {})) == 0


def test_few_shot_accuracies_need_sizes_and_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--runs", str(tmp_path), "--results", str(tmp_path)]
    assert few_shot.main(["transfer", *folders]) == 2
    assert "no number of training images for 'digits, from scratch'" in capsys.readouterr().err
    assert few_shot.main(["data", *folders]) == 1
    assert "no model of data is in" in capsys.readouterr().err


def test_frozen_features_need_the_mean_of_the_pixels(tmp_path: Path) -> None:
    small_classifier(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="no mean and standard deviation of its pixels"):
        frozen.write_classifier(str(tmp_path), None, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_frozen_features_are_evaluated_once(few_digits: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = small_classifier(tmp_path / "model")
    file = tmp_path / "frozen.jsonl"
    words = ["a name", str(tmp_path / "model"), "--image_size", "16", "--dataset", few_digits, "--shots", "5"]
    words += ["--runs", str(tmp_path), "--results", str(file)]
    assert frozen.main(words) == 0
    (line,) = read_results(file).values()
    written = AutoModelForImageClassification.from_pretrained(tmp_path / "frozen" / "a-name" / "model")
    assert torch.equal(written.vit.layers[0].mlp.fc1.weight, model.vit.layers[0].mlp.fc1.weight)
    assert (line["image_size"], line["parameters"]) == (16, model.vit.num_parameters())
    assert len(line["results"]["few_shot"]["5"]) == 3
    assert line["results"]["images"]["test"] == 200
    assert 0 < line["results"]["linear"]["test_accuracy"] < 1
    assert 0 < line["results"]["knn"]["10"] < 1
    assert frozen_table({"a name": line}).count("%") == 6
    capfd.readouterr()
    assert frozen.main(words) == 0
    assert "remove its line" in capfd.readouterr().out
    assert len(file.read_text().splitlines()) == 1


# Both scripts, a model from another run, and a model whose code belongs to the studies.
SMOKE = {"masked": "pixels", "positions": "learned, in every layer"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", STUDIES if NIGHTLY else SMOKE)
def test_the_smoke_size_of_a_study_runs(name: str, tmp_path: Path) -> None:
    study = open_study(name, "smoke")
    study = study if NIGHTLY else study.only([SMOKE[name]])
    results = results_of(queue_of(study, tmp_path, jobs=1))
    assert len(results) == count_runs(study, results)
    assert all(row.mean is not None for row in rows_of(study, results))
    json.dumps(results)


@pytest.mark.parametrize(("name", "contender"), [("compute", "small ResNet"), ("data", "ResNet, 680")])
def test_commands_of_the_paper_s_size_open_a_resnet(name: str, contender: str, tmp_path: Path) -> None:
    script = open_script("finetune_image_classification")
    config = BitConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4)
    BitForImageClassification(config).save_pretrained(tmp_path / "resnet")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "resnet")
    run = open_study(name, "paper").run(contender, "choose", 1e-3, 0)
    for stage in run.stages():
        words = command(stage, "python", tmp_path / "resnet", tmp_path / "run")[2:]
        arguments = parse_arguments(script.FinetuneArguments, words, description=None)
        if arguments.from_scratch:
            model = script.make_models(arguments, SimpleNamespace(label_names=["a", "b"]))[0]
            assert model.config.model_type == "bit"
