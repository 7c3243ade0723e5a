"""Visible output of a run: progress bar, table, trackers and report."""

import base64
import gzip
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import operator
import os
import re
import sys
import termios
from collections.abc import Iterator
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from sklearn.metrics import recall_score, top_k_accuracy_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from transformers import (
    AutoModelForImageClassification,
    ViTForImageClassification,
)
from transformers.integrations import rewrite_logs

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.analysis import attention_maps, position_similarity
from plain_vit.analysis.page import html_page
from plain_vit.errors import HubError, TrainingError, in_bytes
from plain_vit.hub.card import ModelFacts, write_card
from plain_vit.hub.markdown import code, plain
from plain_vit.training.data import load_splits
from plain_vit.training.metrics import Evaluation, evaluation_of, judge_logits
from plain_vit.training.reports.facts import best_evaluation, recipe_of
from plain_vit.training.reports.mistakes import confident_mistakes, confused_pairs, results_by_class, top_accuracy
from plain_vit.training.reports.publishing import training_facts
from plain_vit.training.reports.report import environment
from plain_vit.training.reports.snapshots import look
from plain_vit.training.run import progress as progress_module
from plain_vit.training.run.dry_run import Needs, describe_needs, measure_needs
from plain_vit.training.run.folder import read_log
from plain_vit.training.run.profile import StepProfile
from plain_vit.training.run.progress import Progress
from plain_vit.training.run.trackers import TRACKERS, start_trackers, tracker_names
from tests.tiny import tiny_config
from tests.training.runs import open_script, save_resnet, save_stock_vit

script = open_script("finetune_image_classification")
SHORT = {"dataset": "digits", "shots_per_class": 7, "steps": 7, "batch_size": 12, "evaluations": 2, "log_every": 1}
PICTURES = {"curves", "reliability", "confusion_matrix", "confused_pairs", "mistakes"}
STORY = {"attention", "positions_0", "positions_1"}


@pytest.fixture(scope="module")
def finished(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with all kinds of output."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    script.finetune(script.FinetuneArguments(
        model=str(model_folder), output_dir=str(folder), picture_every=2.0, report_to="tensorboard", **SHORT
    ))  # fmt: skip
    return folder


class Page(HTMLParser):
    """Parse the visible content of a page and the resources that it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.pictures: dict[str, bytes] = {}
        self.loaded: list[str] = []
        self.cells: list[str] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attributes)
        for name in ("src", "href", "srcset", "data"):
            if name in values:
                kind, _, content = values[name].partition(";base64,")
                if kind == "data:image/png":
                    self.pictures[values["alt"]] = base64.b64decode(content)
                else:
                    self.loaded.append(values[name])

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "td":
            self.cells.append(data.strip())


# The bar and the table


class Clock:
    """A clock that is advanced manually."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module.time, "perf_counter", clock)
    return clock


def test_share_of_waiting_counts_the_wait_for_batches_and_leaves_pauses_out(clock):
    def slow_loader() -> Iterator[int]:
        for number in range(4):
            clock.now += 3
            yield number

    with Progress(total=80, done=0, shown=False) as bar:
        for _ in bar.batches(slow_loader()):
            clock.now += 5
            bar.update(20)
            with bar.pause():
                clock.now += 1000
        assert bar.seconds == 4 * (3 + 5)
        assert bar.rates() == {"images_per_second": 80 / 32, "waiting_for_data": 12 / 32}


def test_bar_and_table_show_what_was_measured(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(total=100, done=40, shown=True) as bar:
        clock.now += 2
        bar.update(30)
        bar.show(loss="1.250", accuracy="50.0%")
        bar.row({"epoch": "1.0", "validation loss": "1.5", "lr": "3.00e-04"})
        with bar.pause():
            clock.now += 60
        clock.now += 3
        bar.update(30)
        bar.row({"epoch": "2.0", "validation loss": "1.25", "lr": "1.00e-04"})
    printed = capsys.readouterr()
    head, first, second = printed.out.splitlines()
    assert head.split() == "epoch validation loss lr images/s time".split()  # noqa: SIM905
    assert first.split() == ["1.0", "1.5", "3.00e-04", "15", "00:02"]
    assert second.split() == ["2.0", "1.25", "1.00e-04", "10", "01:05"]
    assert len(head) == len(first) == len(second)  # columns are aligned
    assert "loss 1.250, accuracy 50.0%, waiting for data 0%" in printed.err
    assert "img/s" in printed.err


def test_file_gets_one_line_for_each_log_entry_instead_of_a_bar(clock, capsys):
    with Progress(total=200, done=40, shown=True) as bar:
        for _ in range(3):
            clock.now += 2
            bar.update(30)
            bar.show(loss="1.250")
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        " 35%, 70 of 200 images, 15 images/s, 00:08 left, loss 1.250, waiting for data 0%",
        " 50%, 100 of 200 images, 15 images/s, 00:06 left, loss 1.250, waiting for data 0%",
        " 65%, 130 of 200 images, 15 images/s, 00:04 left, loss 1.250, waiting for data 0%",
    ]
    with Progress(total=200, done=0, shown=False) as bar:
        bar.update(30)
        bar.show(loss="1.250")
    assert capsys.readouterr() == ("", "")


def test_cells_that_are_too_long_stay_apart(clock, capsys):
    with Progress(total=100_000_000, done=0, shown=True) as bar:
        bar.row({"epoch": "1.0", "evaluated": "50000 of 50000", "test loss": "12345678901.2345", "lr": "3.00e-04"})
    cells = capsys.readouterr().out.splitlines()[1]
    assert "50000 of 50000  12345678901.2345  3.00e-04" in cells


@pytest.mark.parametrize("columns", [40, 80])
def test_bar_fits_its_terminal(columns, monkeypatch):
    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    with open(terminal, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Progress(total=1_000_000, done=40, shown=True) as bar:
            bar.update(30)
            bar.show(**{"loss": "1.250", "accuracy": "50.00%", "TFLOP/s": "412", "MFU": "41.7%", "memory": "78.2 GB"})
            bar.bar.refresh()
        shown = os.read(main, 10_000).decode()
    os.close(main)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[\w", "", shown))
    assert any("loss 1" in line for line in lines) == (columns == 80)
    assert max(map(len, lines)) <= columns


# Trackers


def test_unknown_tracker_and_one_that_is_not_installed_are_refused():
    assert tracker_names("none") == []
    assert tracker_names("tensorboard, tensorboard") == ["tensorboard"]
    with pytest.raises(TrainingError, match="expected none, or some of tensorboard, trackio, wandb, mlflow"):
        tracker_names("tensorboard,tensorbored")
    for name in TRACKERS:
        if importlib.util.find_spec(name) is None:
            with pytest.raises(TrainingError, match=f"`pip install {name}`"):
                tracker_names(f"tensorboard,{name}")


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Replace the package of a tracker, which is not installed here, by a mock module."""
    package = MagicMock(__version__="9.0.0", __spec__=importlib.machinery.ModuleSpec(name, None))
    package.search_experiments.return_value = []
    package.utils.validation.MAX_PARAM_VAL_LENGTH, package.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 500, 100
    package.Task.current_task.return_value = None
    package.init.return_value.id = package.init.return_value.name = "drawn-0"
    package.start_run.return_value.info.run_id = package.Task.init.return_value.id = "drawn-0"
    package.start.return_value.get_key.return_value = "drawn-0"
    monkeypatch.setitem(sys.modules, name, package)
    return package


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "tensorboard"])
def test_trackers_that_are_not_installed_here_start_and_get_the_values(name, monkeypatch, tmp_path):
    package = stand_in(name, monkeypatch)
    accelerator = Accelerator(cpu=True)
    assert tracker_names(name) == [name]
    start_trackers(accelerator, [name], tmp_path, {"epochs": 3.0}, step=0)
    accelerator.log({"train_loss": 0.75}, step=4)
    said = str(package.mock_calls)
    assert "plain-vit" in said
    assert "train_loss" in said or "0.75" in said
    assert "epochs" in said


# The call that starts a run, and its arguments for a new run and for the run with the id "drawn-0".
STARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "wandb": ("init", {"id": None}, {"id": "drawn-0", "resume": "allow"}),
    "trackio": ("init", {"resume": "never"}, {"name": "drawn-0", "resume": "allow"}),
    "mlflow": ("start_run", {"run_id": None}, {"run_id": "drawn-0"}),
    "comet_ml": ("start", {"experiment_key": None}, {"experiment_key": "drawn-0"}),
    "clearml": (
        "Task.init", {"reuse_last_task_id": False, "continue_last_task": False},
        {"reuse_last_task_id": "drawn-0", "continue_last_task": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize("name", STARTS)
def test_a_tracker_goes_on_with_its_run_after_a_stop(name, step, monkeypatch, tmp_path):
    package = stand_in(name, monkeypatch)
    call, new, again = STARTS[name]
    start = operator.attrgetter(call)(package)
    for expected, epochs in ((new, 1), (again, 0)):
        package.reset_mock()
        accelerator = Accelerator(cpu=True)
        start_trackers(accelerator, [name], tmp_path, {"epochs": 3.0}, step=step if expected is again else 0)
        accelerator.end_training()
        given = start.call_args.kwargs
        assert {key: given[key] for key in expected} == expected
        assert ("epochs" in str(package.mock_calls)) is bool(epochs), "arguments are sent once"
    start_trackers(Accelerator(cpu=True), [name], tmp_path / "other", {"epochs": 3.0}, step=0)
    assert {key: start.call_args.kwargs[key] for key in new} == new, "another folder is another run"


def test_a_tracker_that_joins_a_resumed_run_starts_a_new_one_and_keeps_the_others(monkeypatch, tmp_path):
    packages = {name: stand_in(name, monkeypatch) for name in ("wandb", "mlflow")}
    start_trackers(Accelerator(cpu=True), ["wandb"], tmp_path, {"epochs": 3.0}, step=0)
    start_trackers(Accelerator(cpu=True), ["mlflow"], tmp_path, {"epochs": 3.0}, step=2)
    start_trackers(Accelerator(cpu=True), ["mlflow", "wandb"], tmp_path, {"epochs": 3.0}, step=5)
    assert [call.kwargs["id"] for call in packages["wandb"].init.call_args_list] == [None, "drawn-0"]
    assert [call.kwargs["run_id"] for call in packages["mlflow"].start_run.call_args_list] == [None, "drawn-0"]


@pytest.mark.slow
def test_tensorboard_has_every_logged_value(finished):
    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    logged = {
        (name, line["step"]): value for line in read_log(finished) for name, value in line.items() if name != "step"
    }
    # The names that transformers' Trainer gives its own log.
    names = {name: re.sub("^validation_", "eval_", name.removeprefix("train_")) for name, _ in logged}
    tag = {name: next(iter(rewrite_logs({theirs: 0}))) for name, theirs in names.items()}
    assert {"train/loss", "train/learning_rate"} <= {*tag.values()}
    assert {"eval/accuracy", "test/accuracy"} & {*tag.values()}
    shown = {(name, event.step): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)}
    of_work = ("images_per_second", "waiting_for_data", "memory_bytes", "tflops")
    rates = {key for key in shown if key[0] in {f"train/{name}" for name in of_work}}
    assert {step for _, step in rates} == {1, 2, 3, 4, 5, 6, 7}
    expected = {(tag[name], step): np.float32(value) for (name, step), value in logged.items()}
    assert {key: value for key, value in shown.items() if key not in rates} == expected


# Mistakes


def evaluation(labels: list[int], probabilities: list[list[float]]) -> Evaluation:
    """Return the evaluation of a model that predicts these probabilities."""
    return evaluation_of(*judge_logits(torch.tensor(probabilities, dtype=torch.float32).log(), torch.tensor(labels)))


def test_mistakes_are_counted_by_class_pair_and_image():
    judged = evaluation(
        [0, 0, 0, 1, 1, 2],
        [
            [0.1, 0.7, 0.2, 0], [0.3, 0.4, 0.3, 0], [0.9, 0.1, 0, 0],
            [0.0, 1.0, 0, 0], [0.95, 0.05, 0, 0], [0.1, 0.2, 0.7, 0],
        ],
    )  # fmt: skip
    names = ["ant", "bee", "cow", "dog"]
    ant, bee, cow, dog = results_by_class(judged, names)
    assert (ant.name, ant.images, ant.right, ant.recall, ant.precision) == ("ant", 3, 1, 1 / 3, 1 / 2)
    assert (bee.recall, bee.precision) == (1 / 2, 1 / 3)
    assert bee.f1 == pytest.approx(0.4)
    assert (cow.recall, cow.precision, cow.f1) == (1, 1, 1)
    assert dog.images == 0
    assert np.isnan([dog.recall, dog.precision, dog.f1]).all()
    pairs = confused_pairs(judged)
    assert [(pair.true, pair.predicted, pair.count, pair.share) for pair in pairs] == [(0, 1, 2, 2 / 3), (1, 0, 1, 0.5)]
    assert confused_pairs(judged, count=1) == pairs[:1]
    assert confident_mistakes(judged).tolist() == [4, 0, 1]
    assert confident_mistakes(judged, 2).tolist() == [4, 0]


def test_top_k_accuracy_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    probabilities, labels = rng.random((211, 13)), rng.integers(0, 13, 211)
    judged = evaluation(labels.tolist(), probabilities.tolist())
    for k in (1, 2, 5, 12):
        expected = top_k_accuracy_score(labels, probabilities.astype(np.float32), k=k, labels=range(13))
        assert top_accuracy(judged, k) == pytest.approx(expected)
    equal = evaluation([0, 1, 2, 2], [[0.25] * 4] * 4)  # of ties only the first count
    assert [top_accuracy(equal, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 1, 1]


# The profile


@pytest.mark.slow
def test_profile_has_the_phases_of_its_steps_as_trace_table_and_picture(model_folder, tmp_path):
    folder = tmp_path / "run" / "profile"
    options = {"model": str(model_folder), "output_dir": str(folder.parent), "profile": 2, "report": False}
    script.finetune(script.FinetuneArguments(**options, **SHORT))
    assert StepProfile(folder, 2, Accelerator(cpu=True), total_steps=7).steps == 0  # made once
    with gzip.open(folder / "trace.json.gz") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(events, key=operator.itemgetter("ts"))]
    one_step = ["waiting for data", "forward", "backward", "optimizer", "all else"]
    assert [name for name in names if name in one_step] == one_step * 2
    assert [name for name in names if name.startswith("ProfilerStep")] == ["ProfilerStep#3", "ProfilerStep#4"]
    shares, _, table = (folder / "operations.txt").read_text().partition("\n\n")
    assert [text.rpartition(" ")[0] for text in shares.split(", ")] == one_step
    assert sum(int(text[:-1].rpartition(" ")[2]) for text in shares.split(", ")) == pytest.approx(100, abs=3)
    assert "aten::addmm" in table
    with PIL.Image.open(folder / "steps.png") as picture:
        assert picture.convert("L").getextrema()[0] < 100


@pytest.mark.slow
def test_profile_needs_its_steps(tmp_path):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TrainingError, match="profile is 5, after the first 3 steps, but the run has 7: give fewer"):
        StepProfile(tmp_path / "profile", 5, accelerator, total_steps=7)
    stopped = StepProfile(tmp_path / "profile", 2, accelerator, total_steps=7)
    with stopped.profiler:
        for _ in range(4):
            stopped.phase("forward")
            stopped.step(pytest.fail)
    assert not (tmp_path / "profile").exists()


def test_run_says_its_work_and_memory(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results["tflops"] == pytest.approx(results["images_per_second"] * results["flops_per_image"] / 1e12)
    cells = Page(finished / "report" / "index.html").cells
    facts = dict(zip(cells[0::2], cells[1::2], strict=False))
    assert facts["FLOPs per image"] == f"{results['flops_per_image'] / 1e9:.3g} G, forward and backward"
    assert facts["TFLOP/s"] == f"{results['tflops']:.3g}"
    assert facts["memory"] == in_bytes(results["memory_bytes"])


@pytest.mark.parametrize(
    "results, selected, said",
    [
        ([0.5, 0.75, 0.75], None, "test accuracy after step 8: 75.00%"),
        (
            [0.5, 0.75, 0.2],
            None,
            "test accuracy after step 8: 75.00%; worse after the last, step 12: 20.00%: train shorter",
        ),
        ([0.5, 0.75, 0.2], 8, "test accuracy after step 8: 75.00%; worse after the last, step 12: 20.00%"),
    ],
)
def test_best_evaluation_says_what_to_do_only_where_the_end_was_worse(results, selected, said, tmp_path):
    rows = [{"step": 2, "train_loss": 1.0}]
    rows += [{"step": 4 * place, "test_accuracy": result} for place, result in enumerate(results, start=1)]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = SimpleNamespace(score="accuracy", lower_is_better=False)
    loop: Any = SimpleNamespace(task=task, watched_name="test", selected=selected, run=SimpleNamespace(path=tmp_path))
    assert best_evaluation(loop).removesuffix(", or let --validation_fraction 0.1 select the weights") == said


# The report


def test_report_has_every_picture_as_file_and_in_a_page_that_loads_nothing(finished):
    page = Page(finished / "report" / "index.html")
    files = {file.stem: file.read_bytes() for file in (finished / "report").glob("*.png")}
    assert files.keys() == PICTURES | STORY
    assert sorted(page.pictures.values()) == sorted(files.values())
    for data in files.values():
        assert PIL.Image.open(BytesIO(data)).convert("L").getextrema()[0] < 100  # something is drawn
    assert page.loaded == []
    assert "prefers-color-scheme: dark" in page.text
    assert not re.search(r"@import|url\(|<script", page.text)
    assert not list(finished.rglob("*.lock"))


def test_no_path_of_the_machine_is_in_the_report_or_the_card(finished, model_folder):
    for file in [*(finished / "report").glob("*.*"), finished / "README.md", finished / "config.json"]:
        content = file.read_bytes()
        for place in (finished, model_folder):
            assert str(place.parent).encode() not in content, file
    assert f"started from {model_folder.name}" in " ".join(Page(finished / "report" / "index.html").cells)


def test_the_curves_fit_the_page(finished):
    """The page's text is 76 rem wide, with a margin of 1.5 rem on each side."""
    with PIL.Image.open(finished / "report" / "curves.png") as picture:
        width, height = picture.size
    assert 2 * height < width <= 16 * (76 - 2 * 1.5)


def test_report_says_the_results_of_the_run_and_of_each_class(finished):
    page = Page(finished / "report" / "index.html")
    test = load_splits("digits")["test"]
    model = PlainViTForImageClassification.from_pretrained(finished).eval()
    images = [image.convert("RGB") for image in test["image"][:]]
    pixels = PlainViTImageProcessor.from_pretrained(finished)(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        predictions = model(pixels).logits.argmax(dim=-1).numpy()
    labels = np.asarray(test["label"][:])
    recalls = recall_score(labels, predictions, average=None)
    rows = page.cells.index("0", page.cells.index("device"))  # the seed is 0 too
    for digit in range(10):
        name, count, right, recall = page.cells[rows + 6 * digit : rows + 6 * digit + 4]
        assert (name, int(count)) == (str(digit), (labels == digit).sum())
        assert int(right) == ((labels == digit) & (predictions == digit)).sum()
        assert recall == f"{recalls[digit]:.1%}"
    facts = dict(zip(page.cells[0::2], page.cells[1::2], strict=False))
    assert facts["test accuracy"] == f"{(labels == predictions).mean():.2%}"
    assert facts["images"] == "train 70, test 360"


def test_snapshots_are_those_of_the_model_at_their_steps(finished):
    # 7 steps of 12 images, of 70, are 1.2 epochs: rows for start and end.
    files = sorted((finished / "report" / "snapshots").iterdir())
    assert [file.name for file in files] == ["step_00000000.npz", "step_00000007.npz"]
    model = PlainViTForImageClassification.from_pretrained(finished)
    test = load_splits("digits")["test"]
    labels = test["label"][:]
    images = [test[labels.index(digit)]["image"].convert("RGB") for digit in (0, 2, 4, 5, 7, 9)]
    pixels = PlainViTImageProcessor.from_pretrained(finished)(images, return_tensors="pt")["pixel_values"]
    with np.load(files[1]) as last, np.load(files[0]) as first:
        expected = attention_maps(model, pixels, layers=-1)[:, 0].mean(axis=1)
        assert last["attention"].shape == (6, 4, 3)
        np.testing.assert_array_equal(last["attention"], expected.astype(np.float16))
        np.testing.assert_array_equal(last["positions"], position_similarity(model).patches.astype(np.float16))
        assert not np.array_equal(first["attention"], last["attention"])


@pytest.mark.slow
def test_looking_leaves_the_training_as_it_is(finished, model_folder, tmp_path, capsys):
    options = {"model": str(model_folder), "output_dir": str(tmp_path / "run"), **SHORT}
    script.finetune(script.FinetuneArguments(**options, report=False))
    assert not (tmp_path / "run" / "report").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert read_log(tmp_path / "run") == read_log(finished)
    assert "Warning" not in capsys.readouterr().out


@pytest.mark.slow
def test_model_without_attention_gets_a_report_that_says_so_and_no_page(tmp_path, capsys):
    run = tmp_path / "run"
    script.finetune(script.FinetuneArguments(
        model=str(save_resnet(tmp_path / "resnet")), output_dir=str(run), picture_every=1.0, **SHORT
    ))  # fmt: skip
    assert {file.stem for file in (run / "report").glob("*.png")} == PICTURES
    text = (run / "report" / "index.html").read_text()
    assert text.count("ResNetForImageClassification is not a supported ViT.") == 2
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning: ")]
    assert len(warnings) == 1
    assert "type 'resnet' gets no model card" in warnings[0]
    assert not (run / "README.md").exists()


def test_vit_of_transformers_shows_what_the_same_plain_vit_shows(tmp_path):
    stock = ViTForImageClassification.from_pretrained(save_stock_vit(tmp_path)).eval()
    stock.set_attn_implementation("eager")
    pixels = torch.randn(5, 3, 24, 24)
    seen = look(stock, pixels)
    weights = stock(pixels, output_attentions=True).attentions[-1][:, :, 0, 1:].mean(dim=1)
    np.testing.assert_allclose(seen["attention"], weights.detach().unflatten(-1, (3, 3)).numpy(), rtol=1e-5)
    assert seen["positions"].shape == (3, 3, 3, 3)


def test_page_escapes_untrusted_text():
    assert "<title>&lt;b&gt;</title>" in html_page("<b>", "")


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image folder whose class names are HTML."""
    folder = tmp_path_factory.mktemp("awkward")
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("<i>a&b", "c'd\"e"):
            (folder / split / name).mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 255, (9, 11, 3), dtype=np.uint8)
                PIL.Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.mark.slow
def test_class_names_are_shown_as_they_are_and_the_image_processor_of_transformers_is_drawn(awkward, tmp_path):
    options = {**SHORT, "dataset": str(awkward), "shots_per_class": None, "steps": 3, "batch_size": 4}
    model, run = str(save_stock_vit(tmp_path / "vit")), tmp_path / "run"
    script.finetune(script.FinetuneArguments(model=model, output_dir=str(run), picture_every=0.5, **options))
    assert {file.stem for file in (run / "report").glob("*.png")} == PICTURES | STORY
    assert len(list((run / "report" / "snapshots").iterdir())) == 4  # at 0, 0.5, 1.0 and 1.5 epochs
    page = Page(run / "report" / "index.html")
    assert "i" not in page.tags
    assert {"<i>a&b", "c'd\"e"} <= set(page.cells)


# The page of the model, and the Hub


def test_page_of_the_model_says_what_came_out_and_how(finished, model_folder):
    card = huggingface_hub.ModelCard.load(finished / "README.md")
    test = load_splits("digits")["test"]
    results = {result.metric_type: result for result in card.data.eval_results}
    assert results.keys() == {"accuracy", "top5_accuracy", "calibration_error"}
    assert results["accuracy"].metric_value == read_log(finished)[-1]["test_accuracy"]
    assert results["accuracy"].dataset_split == "test"
    measured = json.loads((finished / "results.json").read_text())
    assert results["calibration_error"].metric_value == measured["test_calibration_error"]
    assert "calibration of the scores is unknown" not in card.text
    assert f"(train 70, test {len(test)})" in card.text
    assert "| learning_rate | 0.001 |" in card.text
    assert "| betas | 0.9, 0.999 |" in card.text
    assert "| epochs | 1.2 |" in card.text
    assert "momentum" not in card.text
    assert "distillation" not in card.text
    for folder in (finished.parent, model_folder.parent):  # private, as it may contain the host name
        assert str(folder) not in card.text
    for picture in ("curves", "confusion_matrix"):
        assert f"(report/{picture}.png)" in card.text


def test_card_and_report_say_what_was_done(finished, model_folder, tmp_path):
    options = {**SHORT, "steps": 40, "evaluations": 20, "early_stopping": 2, "validation_fraction": 0.2,
               "learning_rate": 0.0, "lora_rank": 2, "dropout": 0.125, "teacher": str(finished),
               "picture_every": 0.0}  # fmt: skip
    script.finetune(script.FinetuneArguments(model=str(model_folder), output_dir=str(tmp_path / "run"), **options))
    card, cells = (tmp_path / "run" / "README.md").read_text(), Page(tmp_path / "run" / "report" / "index.html").cells
    assert read_log(tmp_path / "run")[-1]["step"] == 6, "the third evaluation"
    for row in ("steps | 6", "steps_planned | 40", "epochs | 1.0", "early_stopping | 2", "best_metric | accuracy",
                "selected_step | 2", "lora_rank | 2", "lora_alpha | 16", "dropout | 0.125",
                "teacher | finished", "distillation | soft"):  # fmt: skip
        assert f"| {row} |" in card
    for name in ("plateau_patience", "plateau_factor", "cooldown_steps", "initialization", "growth_epochs"):
        assert f"| {name} |" not in card
    assert not any(str(folder.parent) in card for folder in (finished, model_folder)), "folders are private"
    assert cells[cells.index("steps") + 1] == "6 of 12 images, 1.0 epochs; stopped early, of 40 planned"
    assert cells[cells.index("weights") + 1] == "of step 2, selected by accuracy on the validation split"


@pytest.mark.parametrize("schedule, ends", [
    ("cosine", True), ("linear", True), ("plateau", True), ("constant", False), ("inverse_sqrt", False),
])  # fmt: skip
def test_a_recipe_has_a_lowest_learning_rate_only_where_a_schedule_ends_at_it(schedule, ends):
    arguments = script.FinetuneArguments(model="m", output_dir="o", dataset="digits", schedule=schedule)
    recipe = recipe_of(arguments, vars(arguments))
    assert ("min_learning_rate" in recipe) == ends
    assert ("plateau_factor" in recipe) == (schedule == "plateau")


@pytest.mark.slow
def test_the_card_has_the_learning_rates_and_the_warm_up_that_a_run_had(model_folder, tmp_path):
    options = {**SHORT, "steps": 1, "evaluations": 1, "validation_fraction": 0.2, "report": False}
    script.finetune(script.FinetuneArguments(
        model=str(model_folder), output_dir=str(tmp_path / "run"), **options, schedule="plateau", base_batch_size=6
    ))  # fmt: skip
    card = (tmp_path / "run" / "README.md").read_text()
    for row in (
        "min_learning_rate | 0.0",
        "plateau_factor | 0.1",
        "learning_rate | 0.001",
        "peak_learning_rate | 0.002",
    ):
        assert f"| {row} |" in card
    assert "| warmup_steps |" in card
    assert "warmup_fraction" not in card


def test_page_names_base_model_and_data_of_the_hub():
    common = {
        "split_name": "test", "results": {"accuracy": 0.5}, "images": "train 10, test 5", "recipe": {},
        "environment": {}, "license": None,
    }  # fmt: skip
    tuned = training_facts(Path(), source="google/vit-base", from_scratch=False, dataset="cifar10", **common)
    assert (tuned.base_model, tuned.base_model_relation) == ("google/vit-base", "finetune")
    assert list(tuned.datasets) == ["uoft-cs/cifar10"]
    assert tuned.results[0].dataset_type == "uoft-cs/cifar10"
    named = training_facts(Path(), source="hf:google/vit-base", from_scratch=False, dataset="cifar10", **common)
    assert (named.base_model, named.origin) == (tuned.base_model, tuned.origin)
    by_timm = training_facts(Path(), source="timm:test_vit", from_scratch=False, dataset="cifar10", **common)
    assert by_timm.base_model == "timm/test_vit.r160_in1k"
    scratch = training_facts(Path(), source="google/vit-base", from_scratch=True, dataset="digits", **common)
    assert (scratch.base_model, list(scratch.datasets)) == (None, [])
    assert scratch.origin == "Trained from scratch on digits (train 10, test 5)."


def test_the_origin_of_a_local_source_is_carried_on_as_text_that_cannot_be_markup(tmp_path):
    common: dict[str, Any] = {
        "split_name": "test", "results": {}, "images": "train 10", "recipe": {}, "environment": {}, "license": None,
    }  # fmt: skip
    source, hostile = tmp_path / "first", "`a`. <img src=x> [x](javascript:alert(1)) \n\n# Hacked"
    PlainViTForImageClassification(tiny_config()).save_pretrained(source)
    origin = f"Converted from {code('a_b.pt')}, given {code('key = 3')}; {plain(hostile)}"
    write_card(source, ModelFacts(origin=origin, base_model="alice/first"))
    facts = training_facts(Path(), source=str(source), from_scratch=False, dataset="digits", **common)
    told, shown = (facts.origin or "").partition("The card of `first` says: ")[::2]
    assert told == "Fine-tuned from `first` on digits (train 10). "
    assert shown.startswith("Converted from a_b.pt, given key = 3; ")
    assert not re.search(r"(?<!\\)[<\[\]]", shown)
    assert "\n" not in shown
    assert (facts.base_model, facts.base_model_relation) == ("alice/first", "finetune")
    write_card(source, facts)  # repeated over more than one run
    again = training_facts(Path(), source=str(source), from_scratch=False, dataset="digits", **common)
    assert "Converted from a_b.pt" in (again.origin or "")
    fresh = training_facts(Path(), source=str(source), from_scratch=True, dataset="digits", **common)
    assert (fresh.origin, fresh.base_model) == ("Trained from scratch on digits (train 10).", None)
    for ids, base in ((["alice/first"], "alice/first"), (["alice/first", "bob/second"], None)):
        (source / "README.md").write_text(f"---\nbase_model: {json.dumps(ids)}\n---\n")
        merged = training_facts(Path(), source=str(source), from_scratch=False, dataset="digits", **common)
        assert merged.base_model == base


@pytest.mark.slow
def test_push_sends_model_and_page_without_the_report_and_opens_from_the_hub(model_folder, tmp_path, hub):
    run = tmp_path / "run"
    options = {"model": str(model_folder), "output_dir": str(run), "report_to": "tensorboard", **SHORT}
    script.finetune(script.FinetuneArguments(
        **options, push_to_hub="alice/tiny-digits", hub_private=True, license="cc0-1.0"
    ))  # fmt: skip
    pushed = AutoModelForImageClassification.from_pretrained("alice/tiny-digits")
    saved = AutoModelForImageClassification.from_pretrained(run)
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in pushed.state_dict().items())
    api = huggingface_hub.HfApi(endpoint=hub.url)
    files = set(api.list_repo_files("alice/tiny-digits"))
    assert {"README.md", "config.json", "model.safetensors", "report/curves.png"} <= files
    assert not [file for file in files if file.startswith(("checkpoints", "tensorboard", "report/snapshots"))]
    assert {file for file in files if file.startswith("report")} == {"report/curves.png", "report/confusion_matrix.png"}
    assert not files & {"log.jsonl", "arguments.yaml", "results.json", "run.json"}
    assert api.model_info("alice/tiny-digits").private
    card = huggingface_hub.ModelCard.load("alice/tiny-digits")
    assert card.data.license == "cc0-1.0"
    assert "alice/tiny-digits" in card.text


@pytest.mark.slow
def test_push_that_fails_leaves_the_model_and_says_how_to_push_it(model_folder, tmp_path, hub):
    run = tmp_path / "run"
    options = {"model": str(model_folder), "output_dir": str(run), **SHORT}
    with pytest.raises(HubError, match=f"has no write access.*push it with `plain-vit push {run} jane/digits`"):
        script.finetune(script.FinetuneArguments(**options, push_to_hub="jane/digits"))
    AutoModelForImageClassification.from_pretrained(run)


def test_push_that_cannot_work_is_refused_before_the_training(model_folder, tmp_path, hub, monkeypatch):
    good = {"model": str(model_folder), "output_dir": str(tmp_path / "run"), **SHORT}
    for useless in ({"hub_private": True}, {"report": False, "picture_every": 1.0}):
        with pytest.raises(TrainingError, match="has no effect"):
            script.finetune(script.FinetuneArguments(**good, **useless))
    for repo_id, message in (("alice/a b", "is not a valid repository id"), ("digits", "has no owner")):
        with pytest.raises(HubError, match=message):
            script.finetune(script.FinetuneArguments(**good, push_to_hub=repo_id))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="no token"):
        script.finetune(script.FinetuneArguments(**good, push_to_hub="alice/digits"))
    assert not (tmp_path / "run").exists()


# The dry run


@pytest.mark.slow
def test_dry_run_says_what_the_run_then_does_and_writes_nothing(model_folder, tmp_path, capsys):
    run = tmp_path / "run"
    options = {
        "model": str(model_folder), "output_dir": str(run), **SHORT, "shots_per_class": None,
        "validation_fraction": 0.2, "ema_decay": 0.9, "checkpoints_kept": 1, "gradient_accumulation_steps": 2,
        "warmup_fraction": 0.5,
    }  # fmt: skip
    with pytest.raises(SystemExit) as stopped:
        script.finetune(script.FinetuneArguments(**options, dry_run=True))
    assert stopped.value.code in (None, 0)
    assert not list(tmp_path.iterdir())
    said = {
        line[: len("  optimizer states  ")].strip(): line[len("  optimizer states  ") :].strip()
        for line in capsys.readouterr().out.splitlines()
    }
    assert said["images"] == "train 1,149, validation 288, test 360"
    assert said["steps"] == "7 of 12 images, 0.1 epochs"
    assert said["learning rate"] == "0.001, cosine after 4 warm-up steps"
    assert said["learning rate at"].startswith("0% 2.50e-04, 25% 5.00e-04, 50% 1.00e-03, 75% ")
    assert said["a step"] == "12 images = 1 process x 2 micro-batches x 6 images"
    assert said["evaluations"] == "2 of 288 validation images, at the end 360 test images"

    script.finetune(script.FinetuneArguments(**options))
    (checkpoint,) = (run / "checkpoints").iterdir()
    files = {file.name: file.stat().st_size for file in checkpoint.iterdir()}
    weights = sum(tensor.nbytes for tensor in load_file(checkpoint / "model.safetensors").values())
    assert said["weights"] == said["gradients"] == said["moving average"] == in_bytes(weights)
    # Besides values, the files contain random states, and the names and settings of 70 parameters.
    stated = said["a checkpoint"].removeprefix("about ")
    assert stated.endswith(" KB")
    assert 0 < sum(files.values()) - float(stated.removesuffix(" KB")) * 1000 < 80_000


def test_needs_are_what_a_model_of_known_layers_takes():
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(3 * 5 * 7, 11, bias=False)
            self.second = torch.nn.Linear(11, 13, bias=False)
            self.frozen = torch.nn.Linear(13, 17, bias=False).requires_grad_(False)

        def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.frozen(torch.relu(self.second(self.first(pixel_values.flatten(1))))))

    model, accelerator = Layers(), Accelerator(cpu=True)
    trained, all_weights = 4 * (105 * 11 + 11 * 13), 4 * (105 * 11 + 11 * 13 + 13 * 17)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    needs = measure_needs(
        model, optimizer, accelerator, lambda images: {"pixel_values": torch.randn(images, 3, 5, 7)}, averaged=True
    )
    # Saved for the backward pass: the input, the input of the second layer, and the output of the relu.
    assert needs == Needs(all_weights, trained, trained, all_weights, 4 * (105 + 11 + 13))
    assert needs.memory(19) == 2 * all_weights + 2 * trained + 19 * 4 * 129
    assert needs.memory(19, shards=2) == (2 * all_weights + 2 * trained) // 2 + 19 * 4 * 129
    assert needs.checkpoint == 2 * all_weights + trained
    assert needs.disk(checkpoints_kept=3, models_kept=1) == 4 * needs.checkpoint + 3 * all_weights
    assert needs.disk(checkpoints_kept=0, models_kept=0) == all_weights


@pytest.mark.parametrize("autocast", [False, True])
def test_copies_of_weights_are_needed_once_and_not_for_each_image(autocast):
    model = PlainViTForImageClassification(tiny_config())
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    )
    needs = measure_needs(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accelerator,
        lambda images: {"pixel_values": torch.randn(images, 3, 24, 56)}, averaged=False,
    )  # fmt: skip
    names = ("q_proj", "k_proj", "v_proj")
    joined = sum(p.nbytes for name, p in model.named_parameters() if name.split(".")[-2] in names)
    assert needs.copies == joined or (autocast and joined / 2 < needs.copies <= needs.weights / 2)
    assert needs.memory(5) - needs.memory(3) == 2 * needs.activations


def test_too_little_disk_space_is_reported(tmp_path):
    needs = Needs(10**18, 0, 0, 0, 0)
    tables = describe_needs(needs, tmp_path / "a" / "b", micro_batch=3, shards=1, checkpoints_kept=1, models_kept=0)
    assert str(tables["Disk"]["free"]).endswith(f"at {tmp_path}: NOT ENOUGH")


def test_a_run_from_a_checkout_that_is_not_installed_has_an_environment(monkeypatch):
    installed = importlib.metadata.version

    def version(package: str) -> str:
        if package == "plain-vit":
            raise importlib.metadata.PackageNotFoundError(package)
        return installed(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = environment()
    assert (found["plain-vit"], found["torch"]) == ("not installed", installed("torch"))
