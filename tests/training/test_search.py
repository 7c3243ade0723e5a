"""`examples/search_hyperparameters.py`: a study that prunes and goes on."""

import json
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from plain_vit.errors import TrainingError
from tests.training.runs import EXAMPLES, open_script, save_plain_vit

SHORT = {"dataset": "digits", "shots_per_class": 4, "steps": 4, "batch_size": 12, "evaluations": 2,
         "validation_fraction": 0.1}  # fmt: skip


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(sys.modules, "finetune_image_classification", open_script("finetune_image_classification"))
    script, model = open_script("search_hyperparameters"), save_plain_vit(tmp_path / "model")

    def run(**options: Any) -> optuna.Study:
        given = {**SHORT, "model": str(model), "output_dir": str(tmp_path / "study"), **options}
        study: optuna.Study = script.search(script.SearchArguments(**given))
        return study

    return run


@pytest.mark.slow
def test_study_goes_on_and_prunes_trials_that_fall_behind(search, tmp_path):
    first = search(trials=1)
    (trial,) = first.trials
    results = json.loads((tmp_path / "study" / "trial_0000" / "results.json").read_text())
    log = [json.loads(line) for line in (tmp_path / "study" / "trial_0000" / "log.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["validation_accuracy"] for line in log if "validation_accuracy" in line}
    assert trial.intermediate_values == scores
    assert first.best_value == max(scores.values())
    assert results["steps"] == 4
    options = json.loads((tmp_path / "study" / "trial_0000" / "run.json").read_text())
    assert {name: options[name] for name in trial.params} == trial.params
    for _ in range(5):  # enough for the median
        first.add_trial(optuna.trial.create_trial(value=2.0, intermediate_values={2: 2.0, 4: 2.0}))
    again = search(trials=7)
    assert [trial.state for trial in again.trials] == [TrialState.COMPLETE] * 6 + [TrialState.PRUNED]
    assert [*again.trials[-1].intermediate_values] == [2]
    assert again.trials[-1].params != trial.params
    assert not (tmp_path / "study" / "trial_0006" / "results.json").exists()
    pictures = {path.name for path in (tmp_path / "study").glob("*.png")}
    assert pictures == {"optimization_history.png", "intermediate_values.png", "slice.png"}


def test_search_without_a_validation_split_or_of_one_run_is_refused(search):
    with pytest.raises(TrainingError, match="A search needs a validation split to choose by"):
        search(validation_fraction=0.0)
    with pytest.raises(TrainingError, match="resume: only for one run, so omit it"):
        search(resume=True)
