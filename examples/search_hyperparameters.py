"""Search hyperparameters of a fine-tuning with Optuna: trials that fall behind end early, and a study can go on.

    python examples/search_hyperparameters.py --model DIR --dataset digits --validation_fraction 0.1 --output_dir OUT
    python examples/finetune_image_classification.py OUT/trial_0007/arguments.yaml --output_dir OUT2

The options are those of fine-tuning; edit `objective` to search others. The same command continues a study, and several
at the same time, also on machines that share OUT, work on one study. `OUT/study.log` holds it, the pictures in OUT show
it. A trial is scored by the best evaluation of the validation split (`--best_metric`; losses count as negative), and
never by the test split. Needs `pip install optuna`.
"""

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("search_hyperparameters", __doc__)

import warnings
from pathlib import Path

from plain_vit.errors import TrainingError
from plain_vit.system.extras import needs

with needs("plain-vit[train]", "optuna", script=__name__ == "__main__"):
    import optuna
    from finetune_image_classification import FinetuneArguments, finetune
    from optuna.storages.journal import JournalFileBackend, JournalStorage
    from optuna.trial import TrialState
    from optuna.visualization import matplotlib as pictures

    from plain_vit.training.arguments import SearchArguments, keywords, run_script

OF_ONE_RUN = ("resume", "dry_run", "overfit_batch", "lr_find", "push_to_hub")
PICTURES = ("plot_optimization_history", "plot_intermediate_values", "plot_slice")


def search(arguments: SearchArguments) -> optuna.Study:
    """Run the trials that the study still lacks, in this process, and draw it.

    Args:
        arguments: as on the command line.
    """

    def objective(trial: optuna.Trial) -> float:
        options = keywords(arguments, FinetuneArguments) | {
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-4, 0.3, log=True),
            "layer_decay": trial.suggest_float("layer_decay", 0.6, 1.0),
            "output_dir": str(out / f"trial_{trial.number:04d}"),
            "num_processes": arguments.num_processes or 1,
        }
        scores: list[float] = []

        def judge(step: int, score: float) -> None:
            scores.append(score)
            trial.report(score, step)
            if trial.should_prune():
                raise optuna.TrialPruned

        finetune(FinetuneArguments(**options), described=False, on_score=judge)
        return max(scores)

    if wrong := [name for name in OF_ONE_RUN if getattr(arguments, name)]:
        raise TrainingError(f"{', '.join(wrong)}: only for one run, so omit it. A study goes on by itself.")
    if "://" in arguments.output_dir:
        raise TrainingError(f"output_dir is {arguments.output_dir}: give a folder on a disk.")
    out = Path(arguments.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(out / "study.log")))
    study = optuna.create_study(storage=storage, study_name="study", load_if_exists=True, direction="maximize")
    study.sampler = optuna.samplers.TPESampler(seed=arguments.seed + len(study.trials))
    ended = len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
    study.optimize(objective, max(0, arguments.trials - ended), gc_after_trial=True)
    with warnings.catch_warnings(category=optuna.exceptions.ExperimentalWarning, action="ignore"):
        for name in PICTURES:
            axes = getattr(pictures, name)(study)
            (axes if hasattr(axes, "figure") else axes[0]).figure.savefig(out / f"{name[5:]}.png", bbox_inches="tight")
    print(f"best: {study.best_value:.4f} in {out / f'trial_{study.best_trial.number:04d}'}, {study.best_params}")
    return study


def main() -> None:
    run_script(search, SearchArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)
