"""Evaluate an image classifier on any labelled dataset, on one process or many.

    python            examples/evaluate_image_classification.py --model DIR --dataset digits
    accelerate launch examples/evaluate_image_classification.py --model DIR --dataset digits --output results.json
    torchrun --nproc_per_node 2 examples/evaluate_image_classification.py ...

Prints top-1 and top-5 accuracy, balanced accuracy, F1 and calibration, the results of each class, the classes confused
most often, and images per second. `--output` writes all results as JSON, with every confused pair, and so the whole
confusion matrix; `--predictions` writes the five likeliest classes of each image as CSV. `--views` averages the
predictions over several views of each image. Each image counts once, however many processes share the work. DIR may be
a folder that `plain-vit export` wrote for an inference engine, for example to measure the accuracy in int8.

`--eval_dataset name=DATASET` adds sets, `--group_column` the accuracy of each group of images, `--corruptions all` that
on corrupted images.

Models for several labels per image, or for regression, need the same labels as `finetune_image_classification.py` with
`--problem_type`. Results and predictions are then given for each label or number.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("evaluate_image_classification", __doc__)

from torch.utils.data import DataLoader
from tqdm import tqdm

from plain_vit.errors import DataError, OutputError, OutputExistsError, TrainingError, counted
from plain_vit.files.other_files import is_exported
from plain_vit.files.staging import staged_file
from plain_vit.inference.engine_models import EngineModel, open_with_processor
from plain_vit.modeling_plain_vit import PlainViTForImageClassification
from plain_vit.scores import MULTI_LABEL, REGRESSION
from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    import pandas

    from plain_vit.analysis.drawing import png
    from plain_vit.analysis.plots import plot_training_curves
    from plain_vit.training.arguments import EvaluateArguments, ImageOptions, LabelOptions, keywords, run_script
    from plain_vit.training.data.corruptions import CORRUPTIONS, CorruptedImages
    from plain_vit.training.data.decoding import ProcessedImages, ReadableImages, UnreadableImages
    from plain_vit.training.evaluation_sets import EvaluationSet, named_sets, open_evaluation_set, value_of
    from plain_vit.training.hardware.processes import start_processes
    from plain_vit.training.metrics import Evaluation, evaluation_of, gather_results, judge_logits, metric_text
    from plain_vit.training.models import checkpoint_hints, names_of_classes, open_classifier
    from plain_vit.training.reports.mistakes import confused_pairs, results_by_class, results_by_group, top_accuracy
    from plain_vit.training.reports.report import environment, predictions_of
    from plain_vit.training.run.folder import as_json, write_file
    from plain_vit.training.run.progress import Progress
    from plain_vit.training.vector_metrics import METRICS, VectorEvaluation, evaluate_vectors
    from plain_vit.training.views import with_views

DATASET = "dataset"  # the name of the first set, for --class_map and --real_labels
SHOWN = 30  # classes and pairs to print; the output file has all
VECTORS = (MULTI_LABEL, REGRESSION)
MEANS = {name for names in METRICS.values() for name in names}  # results over all labels or numbers


class Evaluating:
    """The model, its image processor and the sets to evaluate on.

    Args:
        arguments: as on the command line.
    """

    def __init__(self, arguments: EvaluateArguments) -> None:
        check(arguments)
        self.arguments = arguments
        self.accelerator, self.loading = start_processes(arguments)
        self.loading["batch_size"] = -(-arguments.batch_size // self.accelerator.num_processes)
        model, image_processor = open_model(arguments, self.loading["batch_size"])
        self.class_names = names_of_classes(model.config)
        self.problem_type = model.config.problem_type or "single_label_classification"
        self.sets = open_sets(arguments, self.class_names, self.problem_type)
        if not isinstance(model, EngineModel):
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        self.model, self.image_processor = with_views(model, image_processor, arguments.views)

    def judge(self, images: EvaluationSet, collate: Callable[[Any], dict[str, Any]]) -> tuple[Any, dict[str, float]]:
        """Return the results of the model on a set, and images per second.

        Raises:
            TrainingError: The loss is not finite.
        """
        loader = self.accelerator.prepare(DataLoader(ReadableImages(images.rows), collate_fn=collate, **self.loading))
        given = {"accelerator": self.accelerator, "size": len(images.rows)}
        with Progress(total=len(images.rows), done=0, shown=self.accelerator.is_main_process) as bar:
            batches = readable_batches(bar, loader, self.accelerator.num_processes)
            result: Evaluation | VectorEvaluation
            if self.problem_type in VECTORS:
                result = evaluate_vectors(self.model, batches, problem_type=self.problem_type, **given)
            else:
                judge = partial(judge_logits, classes=images.classes if self.arguments.valid_labels == "data" else None)
                result = evaluation_of(*gather_results(self.model, batches, judge=judge, **given))
            if not math.isfinite(result.loss):
                raise TrainingError(f"The loss of {self.arguments.model} is not finite: {result.loss}.")
            return result, bar.rates()

    def results_on(self, name: str) -> dict[str, Any]:
        """Return the results on a set."""
        images, predictions = self.sets[name], self.arguments.predictions
        result, rates = self.judge(images, ProcessedImages(self.image_processor))
        if name == DATASET and predictions is not None and self.accelerator.is_main_process:
            write_file(Path(predictions), predictions_of(result, images.rows, self.class_names))
        return {
            "images": result.count,
            "images_without_classes": images.left_out,
            "processes": self.accelerator.num_processes,
            **summarize(result, self.class_names),
            **({"groups": results_by_group(result, images.rows["group"][:])} if self.arguments.group_column else {}),
            **rates,
        }

    def corrupted(self, clean: float) -> pandas.DataFrame:
        """Return the accuracy under each corruption by severity; that on the images as they are, at severity 0."""
        images, processor, severities = self.sets[DATASET], self.image_processor, sorted({*self.arguments.severities})
        names = [name for name in CORRUPTIONS if {name, "all"} & {*self.arguments.corruptions}]
        collates = {name: [CorruptedImages(processor, name, each) for each in severities] for name in names}
        rows = {
            name: [clean, *(self.judge(images, each)[0].accuracy for each in row)] for name, row in collates.items()
        }
        return pandas.DataFrame(rows, index=[0, *severities])


def evaluate(arguments: EvaluateArguments) -> dict[str, Any]:
    """Run the evaluation.

    Args:
        arguments: as on the command line.

    Returns:
        The results, as in the output file.
    """
    run = Evaluating(arguments)
    others = {name: run.results_on(name) for name in run.sets}
    described = {"model": arguments.model, "dataset": arguments.dataset, "views": arguments.views}
    results = {**described, **others.pop(DATASET), "eval_datasets": others, "environment": environment()}
    if arguments.corruptions:
        corrupted = run.corrupted(results["top1_accuracy"])
        rows = corrupted[1:].T.add_prefix("severity ").assign(**{"mean accuracy": corrupted[1:].mean()})
        results["corruptions"] = rows.rename_axis("name").reset_index().to_dict("records")
    if run.accelerator.is_main_process:
        tqdm.write(as_text(results))
        if arguments.output is not None:
            write_file(Path(arguments.output), as_json(results, indent=2) + "\n")
        if arguments.output is not None and arguments.corruptions:
            rows = corrupted.add_suffix("_accuracy").rename_axis("severity").reset_index().to_dict("records")
            with staged_file(Path(arguments.output).with_suffix(".png"), force=False) as new:
                new.write_bytes(png(plot_training_curves(rows, x="severity")))
    run.accelerator.free_memory()
    return results


def check(arguments: EvaluateArguments) -> None:
    """Refuse output files that cannot be written, and a precision without effect, before anything is opened.

    Raises:
        OutputError: A file has the wrong suffix, or exists.
        TrainingError: A precision is given for an exported graph.
    """
    drawn = str(Path(arguments.output).with_suffix(".png")) if arguments.output and arguments.corruptions else None
    for file, suffix in ((arguments.output, ".json"), (arguments.predictions, ".csv"), (drawn, ".png")):
        if file is not None and Path(file).suffix.lower() != suffix:
            raise OutputError(f"{file} is not the name of a {suffix} file, which is what would be written: rename it.")
        if file is not None and Path(file).exists():
            raise OutputExistsError(f"{file} already exists: give another file.")
    if unknown := {*arguments.corruptions} - {"all", *CORRUPTIONS}:
        raise TrainingError(f"corruptions has {', '.join(unknown)}: expected all, or of {', '.join(CORRUPTIONS)}.")
    if arguments.mixed_precision != "no" and is_exported(arguments.model):
        raise TrainingError(
            f"{arguments.model} was exported to an engine, in the precision of its graph: omit --mixed_precision."
        )


def open_model(arguments: EvaluateArguments, batch_size: int) -> tuple[Any, Any]:
    """Open the classifier, or its exported graph, and the image processor.

    Raises:
        TrainingError: The model has no head, or hints are given for a graph, which needs none.
    """
    hints = checkpoint_hints(arguments.model_hints)
    if not is_exported(arguments.model):
        return open_classifier(arguments.model, trust_remote_code=arguments.trust_remote_code, hints=hints)
    if hints:
        raise TrainingError(f"{arguments.model} was exported to an engine: omit {', '.join(hints)}.")
    model, image_processor = open_with_processor(arguments.model, batch_size=batch_size)
    if not isinstance(model, PlainViTForImageClassification):
        raise TrainingError(f"{arguments.model} lacks a classifier: export a fine-tuned classifier.")
    return model, image_processor


def open_sets(arguments: EvaluateArguments, class_names: list[str], problem_type: str) -> dict[str, EvaluationSet]:
    """Open `--dataset` and the sets of `--eval_dataset`, by name.

    Raises:
        DataError: The data do not fit the model, or the views do not fit the problem.
    """
    given = {"views": arguments.views != "one", "corruptions": arguments.corruptions}
    for name in (name for name in given if given[name] and problem_type in VECTORS):
        raise DataError(f"{name} are for single labels, and the model's problem is {problem_type}: omit --{name}.")
    common = keywords(arguments, ImageOptions, LabelOptions)
    sets = {DATASET: {"split": arguments.split}, **named_sets(arguments.eval_dataset, [DATASET])}
    return {
        name: open_evaluation_set(
            class_names,
            problem_type=problem_type,
            labels_by=arguments.labels_by,
            class_map=value_of(name, arguments.class_map, [*sets]),
            real_labels=value_of(name, arguments.real_labels, [*sets]),
            group_column=arguments.group_column,
            **{**common, **where},
        )
        for name, where in sets.items()
    }


def readable_batches(bar: Progress, loader: Iterable[dict[str, Any]], processes: int) -> Iterator[dict[str, Any]]:
    """Yield batches, and add their images in all processes to the progress bar.

    Raises:
        DataError: An image cannot be read.
    """
    unreadable = UnreadableImages(stop=True, say=tqdm.write, advice="Repair it, or remove it.")
    for batch in unreadable.watch(bar.batches(loader)):
        yield batch
        bar.update(min(len(batch["labels"]) * processes, (bar.total or 0) - bar.images))


def summarize(result: Evaluation | VectorEvaluation, class_names: list[str]) -> dict[str, Any]:
    """Return accuracies, results of the classes in the data, and all confused pairs, most frequent first.

    For several labels per image, or numbers, return the results over all of them and of each.
    """
    if isinstance(result, VectorEvaluation):
        rows = [
            {"name": row.name, "images": row.images, **{name: _number(value) for name, value in row.values.items()}}
            for row in result.by_label(class_names)
        ]
        return {**result.values, "labels": rows}
    pairs, by_class = confused_pairs(result, count=len(class_names) ** 2), results_by_class(result, class_names)
    return {
        "top1_accuracy": top_accuracy(result, 1),
        **({"top5_accuracy": top_accuracy(result, 5)} if len(class_names) > 5 else {}),
        **{name: value for name, value in result.values.items() if name != "accuracy"},
        "classes": [
            {name: _number(value) for name, value in asdict(row).items()}
            for row in by_class
            if row.images
        ],
        "predicted_without_images": [row.name for row in by_class if not row.images and row.f1 == 0],
        "confused": [
            {"true": class_names[pair.true], "predicted": class_names[pair.predicted], "count": pair.count,
             "share": pair.share}
            for pair in pairs
        ],
    }  # fmt: skip


def _number(value: Any) -> Any:
    """Return the value, or None for NaN, which JSON does not have."""
    return None if value != value else value


def as_text(results: dict[str, Any]) -> str:
    """Format the results as text, those of `--dataset` first."""
    parts = [of_set(results), *(f"{name}:\n{of_set(more)}" for name, more in results["eval_datasets"].items())]
    if "corruptions" in results:
        parts.append("\n".join(table("corruption", results["corruptions"])))
    return "\n\n".join(parts)


def of_set(results: dict[str, Any]) -> str:
    """Format the results of a set."""
    images = f"on {counted(results['images'], 'image')}"
    if without := results["images_without_classes"]:
        images += f" (left out: {without} for which no class is right)"
    rates = (
        f"{results['images_per_second']:.0f} images/s in {counted(results['processes'], 'process', 'processes')}, "
        f"{results['waiting_for_data']:.0%} of the time waiting for data"
    )
    if "labels" in results:
        means = [f"{name.replace('_', ' ')} {metric_text(name, results[name])}" for name in results if name in MEANS]
        rows = results["labels"]
        more = [f"and {len(rows) - SHOWN} more, in the file of --output"] if len(rows) > SHOWN else []
        return "\n".join([f"{', '.join(means)}, {images}", rates, "", *table("label", rows[:SHOWN]), *more])
    top5 = f", top-5 {results['top5_accuracy']:.2%}" if "top5_accuracy" in results else ""
    classes, title = results["classes"], "class"
    if len(classes) > SHOWN:
        title = f"the {SHOWN} worst of {len(classes)} classes"
        classes = sorted(classes, key=lambda row: row["recall"])[:SHOWN]
    without = len(results["predicted_without_images"])
    absent = f" (0 for {counted(without, 'predicted class', 'predicted classes')} without images)" if without else ""
    pairs = [
        f"{pair['true']} predicted as {pair['predicted']}: {pair['count']} ({pair['share']:.1%} of the class)"
        for pair in results["confused"][:10]
    ]
    lines = [
        f"top-1 accuracy {results['top1_accuracy']:.2%}{top5}, loss {results['loss']:.4f}, {images}",
        f"balanced accuracy {results['balanced_accuracy']:.2%}, macro F1 {results['macro_f1']:.2%}{absent}, "
        f"calibration error {results['calibration_error']:.2%}",
        rates,
        "",
        *table(title, classes),
        *(["", "confused most often", *pairs] if pairs else []),
        *(["", *table("the worst groups", results["groups"][:SHOWN])] if "groups" in results else []),
    ]
    return "\n".join(lines)


def table(title: str, rows: list[dict[str, Any]]) -> list[str]:
    """Format the results of classes, labels or numbers, each with its name, as the lines of a table."""
    names = [name for name in rows[0] if name != "name"]
    cells = [[title, *names]]
    for row in rows:
        texts = ("–" if row[name] is None else metric_text(name, row[name]) for name in names)
        cells.append([row["name"], *texts])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        f"{name:<{widths[0]}}{''.join(f'   {text:>{width}}' for text, width in zip(texts, widths[1:], strict=True))}"
        for name, *texts in cells
    ]


def main() -> None:
    run_script(evaluate, EvaluateArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)
