"""Length and learning rate schedule of a run: restarts, cool-down, plateaus, lengthened runs, data that moved."""

import shutil

import pytest
import torch
from torch import nn
from transformers import get_scheduler, get_wsd_schedule

from plain_vit.errors import TrainingError
from plain_vit.training.data import load_splits
from plain_vit.training.optimization import learning_rate_factor
from plain_vit.training.run.folder import read_log
from tests.training.runs import runs_in, weights_of

SHORT = {"dataset": "digits", "shots_per_class": 5, "batch_size": 10, "report": False, "learning_rate": 0.01,
         "warmup_steps": 2, "log_every": 1, "evaluations": 2}  # fmt: skip


@pytest.fixture
def run(model_folder, tmp_path):
    return runs_in(tmp_path, model=model_folder, **SHORT)


def rates(folder):
    return [row["learning_rate"] for row in read_log(folder) if "learning_rate" in row]


@pytest.mark.parametrize("restarts", [0, 1, 4])
def test_restarts_are_those_of_transformers(restarts):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = get_scheduler("cosine_with_restarts", optimizer, num_warmup_steps=3, num_training_steps=43,
                              scheduler_specific_kwargs={"num_cycles": restarts + 1})  # fmt: skip
    for step in range(43):
        if step >= 3:
            factor = learning_rate_factor(step, total=43, warmup=3, schedule="cosine", restarts=restarts)
            assert factor == pytest.approx(reference.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        reference.step()


def test_cooldown_is_the_decay_of_transformers_and_multiplies_the_inverse_root():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = get_wsd_schedule(
        optimizer, num_warmup_steps=4, num_decay_steps=10, num_training_steps=31, decay_type="linear"
    )
    for step in range(31):
        factor = learning_rate_factor(step, total=31, warmup=4, schedule="constant", cooldown=10)
        if step >= 4:
            assert factor == pytest.approx(reference.get_last_lr()[0], abs=1e-9)
        root = learning_rate_factor(step, total=31, warmup=4, schedule="inverse_sqrt")
        cooled = learning_rate_factor(step, total=31, warmup=4, schedule="inverse_sqrt", cooldown=10)
        if step >= 4:
            assert cooled == pytest.approx(root * factor)
        optimizer.step()
        reference.step()


@pytest.mark.slow
def test_plateau_lowers_the_rate_as_torch_does(run):
    options = {"schedule": "plateau", "plateau_patience": 2, "plateau_factor": 0.5, "min_learning_rate": 0.02,
               "steps": 12, "evaluations": 12, "validation_fraction": 0.5, "learning_rate": 0.1,
               "shots_per_class": None, "max_images": 100}  # fmt: skip
    whole = run("whole", **options)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max", factor=0.5, patience=1, threshold=0, min_lr=0.02
    )
    expected = []
    for row in read_log(whole):
        if "learning_rate" in row:
            expected.append(optimizer.param_groups[0]["lr"])
        if "validation_accuracy" in row:
            reference.step(row["validation_accuracy"])
    assert rates(whole)[2:] == pytest.approx(expected[2:])
    assert rates(whole)[-1] < 0.1
    with pytest.raises(TrainingError, match="plateau needs a validation split"):
        run("refused", schedule="plateau")


@pytest.mark.slow
def test_a_finished_run_is_lengthened_to_the_bits_of_a_long_one_and_cooled_down_after(run):
    options = {"schedule": "constant", "ema_decay": 0.9, "mixup": 0.2}
    long = run("long", steps=13, cooldown_steps=4, **options)
    short = run("short", steps=5, **options)
    run("short", steps=9, resume=True, **options)
    before = weights_of(short)
    after = weights_of(run("short", steps=13, cooldown_steps=4, resume=True, **options))
    assert all(torch.equal(after[name], tensor) for name, tensor in weights_of(long).items())
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    assert rates(short) == rates(long)


@pytest.mark.slow
def test_a_length_with_which_the_past_would_be_another_is_refused(run):
    folder = run("cosine", steps=5)
    log = (folder / "log.jsonl").read_bytes()
    for changes in ({"steps": 9}, {"steps": 5, "schedule": "linear"}, {"steps": 3}):
        with pytest.raises(TrainingError, match=r"taken 5 steps.*resume it with --steps 5 .*in another folder"):
            run("cosine", **changes, resume=True)
    constant = run("constant", steps=5, schedule="constant")
    for changes in ({"steps": 4}, {"steps": 6, "cooldown_steps": 3}, {"steps": 9, "warmup_steps": 3}):
        with pytest.raises(TrainingError, match="taken 5 steps"):
            run("constant", **changes, schedule="constant", resume=True)
    with pytest.raises(TrainingError, match="differs in learning_rate"):
        run("constant", steps=9, schedule="constant", learning_rate=0.5, resume=True)
    assert (folder / "log.jsonl").read_bytes() == log
    assert len(rates(constant)) == 5


@pytest.mark.slow
def test_rates_that_follow_evaluations_keep_them(run):
    options = {"shots_per_class": None, "max_images": 60, "validation_fraction": 0.5, "steps": 4, "resume": True}
    for name, schedule in (("plateau", "plateau"), ("constant", "constant")):
        run(name, **{**options, "resume": False}, schedule=schedule)
    for changes in ({"steps": 9}, {"evaluations": 4}, {"evaluations": 1}, {"schedule": "constant"}):
        with pytest.raises(TrainingError, match=r"taken 4 steps.*resume it with --steps 4 .*--evaluations 2"):
            run("plateau", **{**options, "schedule": "plateau", **changes})
    with pytest.raises(TrainingError, match="taken 4 steps"):
        run("constant", **options, schedule="plateau")
    assert len(rates(run("plateau", **{**options, "steps": 6, "evaluations": 3}, schedule="plateau"))) == 6


@pytest.mark.slow
def test_a_lengthened_run_says_that_its_own_evaluations_count_in_the_selection(run, capsys):
    options = {"shots_per_class": None, "max_images": 60, "validation_fraction": 0.5, "schedule": "constant"}
    run("run", **options, steps=4)
    for length, says in (({"steps": 6, "evaluations": 3}, False), ({"steps": 7, "evaluations": 3}, True)):
        capsys.readouterr()
        run("run", **options, **length, resume=True)
        assert ("was evaluated after the steps 2, 4" in capsys.readouterr().out) == says


def test_options_that_another_schedule_has_are_refused(run):
    for options, says in (
        ({"restarts": 2, "schedule": "linear"}, "restarts has no effect.*--schedule cosine"),
        ({"cooldown_steps": 2}, "cooldown_steps has no effect.*--schedule constant"),
        ({"plateau_patience": 2}, "plateau_patience has no effect.*--schedule plateau"),
        ({"cooldown_steps": 4, "steps": 5, "schedule": "constant"}, "are longer than the run of 5"),
    ):
        with pytest.raises(TrainingError, match=says):
            run("refused", **options)


@pytest.mark.slow
def test_a_run_whose_data_moved_is_resumed_and_other_files_are_refused(run, tmp_path):
    for row, digit in enumerate(load_splits("digits")["test"].select(range(60))):
        path = tmp_path / "set" / ("train" if row < 40 else "test") / f"class_{digit['label']}" / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        digit["image"].save(path)
    options = {"shots_per_class": None, "schedule": "constant"}
    run("run", dataset=str(tmp_path / "set"), steps=3, **options)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "set", tmp_path / "elsewhere" / "other")
    folder = run("run", dataset=str(tmp_path / "elsewhere" / "other"), steps=5, resume=True, **options)
    assert len(rates(folder)) == 5
    some = next((tmp_path / "elsewhere" / "other" / "train").rglob("*.png"))
    some.rename(some.with_name(f"a{some.name}"))
    with pytest.raises(TrainingError, match="differs in dataset"):
        run("run", dataset=str(tmp_path / "elsewhere" / "other"), steps=7, resume=True, **options)
