"""Evaluate an image classifier on any labelled dataset, on one process or many.

    python            examples/evaluate_image_classification.py --model DIR --dataset digits
    accelerate launch examples/evaluate_image_classification.py --model DIR --dataset digits --output results.json
    torchrun --nproc_per_node 2 examples/evaluate_image_classification.py ...

Prints top-1 and top-5 accuracy, balanced accuracy, F1 and calibration, the results of each class, the classes confused
most often, and images per second. `--output` writes all results as JSON, with every confused pair, and so the whole
confusion matrix; `--predictions` writes the five likeliest classes of each image as CSV. `--views` averages the
predictions over several views of each image. Each image counts once, however many processes share the work. DIR may be
a folder that `plain-vit export` wrote for an inference engine, for example to measure the accuracy in int8.

Models for several labels per image, or for regression, need the same labels as `finetune_image_classification.py` with
`--problem_type`. Results and predictions are then given for each label or number.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("evaluate_image_classification", __doc__)

import numpy as np
from torch.utils.data import DataLoader
from tqdm import tqdm

from plain_vit.errors import DataError, OutputError, OutputExistsError, TrainingError, counted
from plain_vit.files.other_files import is_exported
from plain_vit.inference.engine_models import EngineModel, open_with_processor
from plain_vit.modeling_plain_vit import PlainViTForImageClassification
from plain_vit.scores import MULTI_LABEL, REGRESSION
from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from datasets import Dataset

    from plain_vit.training.arguments import (
        EvaluateArguments,
        ImageOptions,
        LabelOptions,
        keywords,
        run_script,
    )
    from plain_vit.training.data import load_labelled_split
    from plain_vit.training.data.decoding import ProcessedImages, ReadableImages
    from plain_vit.training.hardware.processes import start_processes
    from plain_vit.training.metrics import Evaluation, evaluate_classifier, metric_text
    from plain_vit.training.models import checkpoint_hints, matching_classes, names_of_classes, open_classifier
    from plain_vit.training.reports.mistakes import confused_pairs, results_by_class, top_accuracy
    from plain_vit.training.reports.report import environment, predictions_of
    from plain_vit.training.run.folder import as_json, write_file
    from plain_vit.training.run.progress import Progress
    from plain_vit.training.vector_metrics import METRICS, VectorEvaluation, evaluate_vectors
    from plain_vit.training.views import with_views

SHOWN = 30  # classes and pairs to print; the output file has all
VECTORS = (MULTI_LABEL, REGRESSION)
MEANS = {name for names in METRICS.values() for name in names}  # results over all labels or numbers


def evaluate(arguments: EvaluateArguments) -> dict[str, Any]:
    """Run the evaluation.

    Args:
        arguments: as on the command line.

    Returns:
        The results, as in the output file.
    """
    check(arguments)
    accelerator, loading = start_processes(arguments)
    loading["batch_size"] = -(-arguments.batch_size // accelerator.num_processes)
    model, image_processor = open_model(arguments, loading["batch_size"])
    in_engine = isinstance(model, EngineModel)
    problem_type = model.config.problem_type or "single_label_classification"
    class_names = names_of_classes(model.config)
    split = open_split(arguments, class_names, problem_type)

    prepared, image_processor = with_views(
        model if in_engine else accelerator.prepare_model(model, evaluation_mode=True),
        image_processor,
        arguments.views,
    )
    loader = accelerator.prepare(
        DataLoader(
            ReadableImages(split),
            collate_fn=ProcessedImages(image_processor),
            **loading,
        )
    )
    with Progress(total=len(split), done=0, shown=accelerator.is_main_process) as bar:
        batches = readable_batches(bar, loader, accelerator.num_processes)
        result: Evaluation | VectorEvaluation
        if problem_type in VECTORS:
            result = evaluate_vectors(prepared, batches, accelerator, size=len(split), problem_type=problem_type)
        else:
            result = evaluate_classifier(prepared, batches, accelerator, size=len(split))
        if not math.isfinite(result.loss):
            raise TrainingError(f"The loss of {arguments.model} is not finite: {result.loss}.")
        rates = bar.rates()
    results = {
        "model": arguments.model,
        "dataset": arguments.dataset,
        "images": result.count,
        "views": arguments.views,
        "processes": accelerator.num_processes,
        **summarize(result, class_names),
        **rates,
        "environment": environment(),
    }
    if accelerator.is_main_process:
        tqdm.write(as_text(results))
        if arguments.output is not None:
            write_file(Path(arguments.output), as_json(results, indent=2) + "\n")
        if arguments.predictions is not None:
            write_file(Path(arguments.predictions), predictions_of(result, split, class_names))
    accelerator.free_memory()
    return results


def check(arguments: EvaluateArguments) -> None:
    """Refuse output files that cannot be written, and a precision without effect, before anything is opened.

    Raises:
        OutputError: A file has the wrong suffix, or exists.
        TrainingError: A precision is given for an exported graph.
    """
    for file, suffix in ((arguments.output, ".json"), (arguments.predictions, ".csv")):
        if file is not None and Path(file).suffix.lower() != suffix:
            raise OutputError(f"{file} is not the name of a {suffix} file, which is what would be written: rename it.")
        if file is not None and Path(file).exists():
            raise OutputExistsError(f"{file} already exists: give another file.")
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


def open_split(arguments: EvaluateArguments, class_names: list[str], problem_type: str) -> Dataset:
    """Return the rows to evaluate on, with labels in the order of the model's classes.

    Raises:
        DataError: The data do not fit the model, or the views do not fit the problem.
    """
    if problem_type in VECTORS and arguments.views != "one":
        raise DataError(f"views are for single labels, and the model's problem is {problem_type}: omit --views.")
    split, data_classes = load_labelled_split(
        **keywords(arguments, ImageOptions, LabelOptions),
        split=arguments.split,
        problem_type=problem_type,
        classes=len(class_names) if arguments.labels_by == "number" else None,
    )
    if problem_type == REGRESSION:
        if len(data_classes) != len(class_names):
            raise DataError(
                f"Each image has {len(data_classes)} numbers, and the model predicts {len(class_names)}: give the data "
                "that it was trained on, or name the column with --label_column."
            )
        return split
    numbers = matching_classes(class_names, data_classes, labels_by=arguments.labels_by)
    labels = split["label"][:]
    if problem_type == MULTI_LABEL:
        given = np.asarray(labels, dtype=np.float32)
        vectors = np.zeros((len(given), len(class_names)), dtype=np.float32)
        vectors[:, numbers] = given
        return split.remove_columns("label").add_column("label", list(vectors))
    return split.remove_columns("label").add_column("label", [numbers[label] for label in labels])


def readable_batches(bar: Progress, loader: Iterable[dict[str, Any]], processes: int) -> Iterator[dict[str, Any]]:
    """Yield batches, and add their images in all processes to the progress bar.

    Raises:
        DataError: An image cannot be read.
    """
    for batch in bar.batches(loader):
        for broken in filter(None, batch.pop("broken")):
            raise DataError(f"An image cannot be read: {broken}. Repair it, or remove it.")
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
    """Format the results as text."""
    images = f"on {counted(results['images'], 'image')}"
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
