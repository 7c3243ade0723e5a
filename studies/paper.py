"""Print the commands of a study in the paper's size, with hours estimated from the floating-point operations."""

import shlex
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from plain_vit.training.recipes import RECIPES
from studies.compute import BACKWARD, operations
from studies.results import runs_of
from studies.study import CHOOSE, CHOOSING_SEED, REPORT, Run, Study
from studies.work import Queue, command, model_of

IMAGES = {  # training images, and classes
    "imagenet-1k": (1_281_167, 1000), "food101": (75_750, 101), "pets": (3_680, 37), "flowers": (2_040, 102),
    "cifar10": (50_000, 10), "cifar100": (50_000, 100),
}  # fmt: skip
GPUS = 8
RATE = 0.4 * 312e12  # operations per second of one GPU: 40% of an A100's in bfloat16, a common share


def print_commands(study: Study, runs: Path) -> None:
    """Print the commands of a study, beginning with the choice of learning rates, and write the architectures.

    Args:
        study: the study, in the paper's size.
        runs: folder of the runs.
    """
    transformers_logging.disable_progress_bar()
    queue = Queue(study, runs, runs, jobs=1, threads=1)
    whole = runs_of(study)
    total = sum(map(hours_alone, whole))
    print(
        f"# {study.description['title']}, in the paper's size: {len(whole)} runs. Not run here. Estimated: "
        f"{total:,.0f} hours of {GPUS} A100, at {RATE / 1e12:.0f} TFLOP/s each, without evaluations."
    )
    for contender in study.contenders:
        print(f"\n# {contender}: {hours_of(study.run(contender, REPORT, 1.0, 1)):.1f} hours a run")
        choices = [study.run(contender, CHOOSE, rate, CHOOSING_SEED) for rate in study.learning_rates(contender)]
        for run in {stage.key: stage for choice in choices for stage in choice.stages()}.values():
            print(shlex.join(command(run, study.launch, model_of(run, queue), queue.folder(run))))
        print("# with the learning rate of the best validation accuracy in place of BEST:")
        for seed in study.seeds:
            for run in study.run(contender, REPORT, 0.0, seed).stages():
                words = command(run, study.launch, model_of(run, queue), queue.folder(run))
                if run.role == REPORT:
                    words[words.index("--learning_rate") + 1] = "BEST"
                    words[-1] = words[-1].replace(run.key, f"seed-{seed}")
                print(shlex.join(words))


def training_images(run: Run) -> int:
    """Return the number of training images of a run in the paper's size."""
    images, classes = IMAGES[run.options["dataset"]]
    images -= round(images * run.options.get("validation_fraction", 0))
    return min(images, classes * run.options.get("shots_per_class", images))


def hours_of(run: Run) -> float:
    """Return the estimated hours of a run including its earlier stages."""
    return sum(map(hours_alone, run.stages()))


def hours_alone(run: Run) -> float:
    """Return the estimated hours of a run, without its earlier stages."""
    architecture = next(stage.model for stage in run.stages() if stage.model is not None)
    options: dict[str, Any] = {}
    for recipe in run.options.get("recipe", []):
        options |= RECIPES[recipe].options
    options |= run.options
    size = options.get("image_size", architecture["image_size"])
    size = size[0] if isinstance(size, list) else size
    steps = options.get("steps")
    seen = steps * options["batch_size"] if steps else options["epochs"] * training_images(run)
    return (1 + BACKWARD) * operations({**architecture, "image_size": size}) * seen / (GPUS * RATE) / 3600
