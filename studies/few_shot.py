"""Few-shot accuracy of the pre-trained models of a study: ridge regression on their frozen features [Figure 4].

    python -m studies.few_shot data       # for the models before fine-tuning, which must be in runs/

The accuracies are appended to results/few_shot-STUDY.jsonl, a line per model, and the picture is drawn from that file.
"""

import sys
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from plain_vit.analysis.words import plain_figure
from studies.draw import PICTURES, add_grid, draw_lines, images_axis
from studies.frozen import run_probe
from studies.results import Row, append_result, chosen_rate, read_results
from studies.run import queue_of_models
from studies.study import REPORT, ROOT, Run, Study
from studies.work import Queue, environment

SHOTS = 5  # labels per class, as in the paper
DRAWS = 5  # random draws of these labels


def main(words: Sequence[str] | None = None) -> int:
    """Probe the models that have no result yet, draw the picture, and return the exit code."""
    queue = queue_of_models(words, __doc__)
    study, file = queue.study, queue.results / f"few_shot-{queue.study.name}.jsonl"
    if without := [name for name, of in study.description["contenders"].items() if "x" not in (of or {})]:
        print(
            f"{study.name} has no number of training images for {without[0]!r}: choose another study", file=sys.stderr
        )
        return 2
    for run in pretrained(study, read_results(queue.file)):
        assert run.after is not None
        if run.after.key not in read_results(file) and queue.is_kept(run.after):
            append_result(file, probe(run, queue))
    lines = read_results(file)
    if not lines:
        print(f"no model of {study.name} is in {queue.runs}, and {file.name} has none", file=sys.stderr)
        return 1
    picture = PICTURES / f"study_{study.name}_few_shot.png"
    draw(study, lines).savefig(picture, dpi=110)
    print(picture.relative_to(ROOT))
    return 0


def pretrained(study: Study, results: Mapping[str, Any]) -> list[Run]:
    """Return the reported runs that start from an earlier stage, for contenders whose learning rate is chosen."""
    chosen = {contender: chosen_rate(study, contender, results) for contender in study.contenders}
    runs = [study.run(name, REPORT, rate, seed) for name, rate in chosen.items() if rate for seed in study.seeds]
    return [run for run in runs if run.after is not None]


def probe(run: Run, queue: Queue) -> dict[str, Any]:
    """Return the result line of the model that a run starts from: the accuracies of several draws of labels."""
    assert run.after is not None
    folder = queue.runs / "few_shot" / run.after.key
    draws = ["--shots", str(SHOTS), "--seeds", *map(str, range(DRAWS))]
    results = run_probe(
        queue.folder(run.after), run.options["dataset"], folder, ["--mode", "few_shot", *draws], OMP_NUM_THREADS="1"
    )
    return {
        "key": run.after.key, "contender": run.contender, "seed": run.seed,
        "few_shot": results["few_shot"][str(SHOTS)], "environment": environment(),
    }  # fmt: skip


def draw(study: Study, lines: Mapping[str, Any]) -> Figure:
    """Draw the mean of each series over its training images, with a point for each model's mean over draws."""
    contenders = study.description["contenders"]
    rows = []
    for name in contenders:
        accuracies = [mean(line["few_shot"]) for line in lines.values() if line["contender"] == name]
        rows.append(Row(name, None, {}, accuracies, len(study.seeds), [], 0, None))
    figure = plain_figure(6.0, 4.0)
    axis = figure.subplots()
    places = {name: of["x"] for name, of in contenders.items()}
    draw_lines(axis, images_axis(study), places, {name: of["series"] for name, of in contenders.items()}, rows)
    axis.set_ylabel(f"ridge regression on {SHOTS} labels per class (%)")
    add_grid(axis)
    return figure


if __name__ == "__main__":
    sys.exit(main())
