"""Facts about a fine-tuning run: plan, requirements, results, and contents of the model card."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from ...errors import counted
from ...files.place_names import public_name
from ...hub.card import ModelFacts
from ..arguments import (
    AugmentationOptions,
    ClassifierOptions,
    LoopOptions,
    ModelOptions,
    OptimizationOptions,
    StepOptions,
    idle_options,
    keywords,
)
from ..data import ImageClassificationData
from ..data.augmentation import input_size
from ..data.inputs import NoiseInputs, max_num_patches_of
from ..learner import Learner
from ..loop import Loop, Schedule, folders_of_best, speed_text
from ..metrics import Evaluation, metric_text
from ..optimization import scheduled_rate, settings_of
from ..run.dry_run import describe_needs, measure_needs
from ..run.folder import read_log
from ..run.remote import working_folder
from ..tasks.classification import ImageTask
from ..vector_metrics import VectorEvaluation
from .publishing import training_facts
from .report import environment

Facts = dict[str, object]
# Results shown in the report's first table.
SHOWN = ("accuracy", "mean_average_precision", "macro_f1", "mean_absolute_error", "r2", "calibration_error", "loss")
RANDAUGMENT_OPTIONS = {"magnitude_scale", "magnitude", "magnitude_std", "augmentation_layers"}


def run_facts(
    options: ClassifierOptions,
    data: ImageClassificationData,
    schedule: Schedule,
    model: nn.Module,
    task: ImageTask[Any],
    *,
    taken: int | None = None,
) -> Facts:
    """Return a summary of the run.

    Args:
        options: options of the run.
        data: the dataset.
        schedule: the steps.
        model: the model.
        task: the task.
        taken: number of steps taken (default: the planned steps).
    """
    parameters = list(model.parameters())
    steps = schedule.total_steps if taken is None else taken
    early = f"; stopped early, of {schedule.total_steps:,} planned" if steps < schedule.total_steps else ""
    return {
        "started from": public_name(options.model) + (" (architecture only)" if options.from_scratch else ""),
        "model": task.kind.__name__,
        "parameters": f"{sum(p.numel() for p in parameters):,}",
        "of them trained": f"{sum(p.numel() for p in parameters if p.requires_grad):,}",
        "data set": public_name(options.dataset),
        "images": count_images(data),
        "size of images": size_of_images(task.image_processor),
        "classes": len(data.label_names),
        "steps": f"{steps:,} of {counted(options.batch_size, 'image')}, {schedule.epochs_after(steps):.1f} epochs"
        + early,
        "optimizer": f"{options.optimizer}, weight decay {options.weight_decay}",
        "learning rate": f"{options.peak_learning_rate:g}, {options.schedule} after {schedule.warmup_steps} warm-up "
        "steps" + (f", down to {options.lowest_learning_rate:g}" if options.min_learning_rate else ""),
        "precision": ("float32" if options.mixed_precision == "no" else options.mixed_precision)
        + (", blocks train on bfloat16 copies of their weights" if options.param_dtype == "bf16" else "")
        + (", float32 products in TF32 while training" if _tf32(options) else ""),
        "seed": options.seed,
    }


def _tf32(options: StepOptions) -> bool:
    return options.tf32 and torch.cuda.is_available()


def recipe_of(options: LoopOptions, values: Mapping[str, object]) -> Facts:
    """Return the settings that are set and have an effect, as the recipe of a model card.

    Args:
        options: options of the run.
        values: settings by option name.
    """
    scaled = {} if options.base_batch_size is None else {"peak_learning_rate": f"{options.peak_learning_rate:g}"}
    useless = _without_effect(options)
    unset: tuple[object, ...] = (None, [], "none", "no")
    return {
        name: value
        for name, value in {**values, **scaled}.items()
        if value not in unset and value is not False and name not in useless
    }


def _without_effect(options: LoopOptions) -> set[str]:
    """Return the options without effect, and `warmup_fraction`, as `warmup_steps` already gives its result."""
    useless = idle_options(options) | {"warmup_fraction"}
    useless |= set() if _tf32(options) else {"tf32"}
    if not isinstance(options, ClassifierOptions):
        return useless
    useless |= set() if options.augmentation == "randaugment" else RANDAUGMENT_OPTIONS
    useless |= set() if options.random_erasing else {"random_erasing_mode"}
    return useless if options.problem_type == "single_label_classification" else useless | {"label_smoothing"}


def _selection(loop: Loop[Any]) -> str:
    """Describe which weights were selected."""
    metric = (loop.chooses_by or "").replace("_", " ")
    return f"of step {loop.selected}, selected by {metric} on the {loop.watched_name} split"


def best_evaluation(loop: Loop[Any]) -> str:
    """Say after which step the result was best, and what to do if it was worse at the end."""
    name = f"{loop.watched_name}_{loop.task.score}"
    results = {row["step"]: row[name] for row in read_log(loop.run.path) if name in row}
    best = (min if loop.task.lower_is_better else max)(results, key=lambda step: results[step])
    shown = {step: f"step {step:,}: {metric_text(str(loop.task.score), value)}" for step, value in results.items()}
    advice = ": train shorter, or let --validation_fraction 0.1 select the weights" if loop.selected is None else ""
    worse = f"; worse after the last, {shown[max(results)]}{advice}" if results[max(results)] != results[best] else ""
    return f"{name.replace('_', ' ')} after {shown[best]}{worse}"


def size_of_images(image_processor: Any) -> str:
    """Describe the size of evaluated images."""
    if most := max_num_patches_of(image_processor):
        side = image_processor.patch_size
        return f"aspect ratio kept, at most {most} patches of {side} x {side} pixels"
    height, width = input_size(image_processor)
    return f"{height} x {width} pixels"


def count_images(data: ImageClassificationData) -> str:
    """Describe the number of images of each split."""
    counts = {name: data.train_images if name == "train" else len(split) for name, split in data.splits.items()}
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def report_facts(
    options: ClassifierOptions,
    data: ImageClassificationData,
    loop: Loop[Any],
    results: dict[str, Any],
) -> dict[str, Facts]:
    """Return the tables of the report, by title."""
    model = loop.accelerator.unwrap_model(loop.learner.model)
    values = {name: results[f"{data.held_out}_{name}"] for name in SHOWN if f"{data.held_out}_{name}" in results}
    shown = {name: metric_text(name, value) for name, value in values.items()}
    result: Facts = {
        **{f"{data.held_out} {name.replace('_', ' ')}": value for name, value in shown.items()},
        "images evaluated": results["images_evaluated"],
        "weights": "the last ones" if loop.selected is None else _selection(loop),
        "best evaluation": best_evaluation(loop),
        "images per second": f"{results['images_per_second']:.0f}, while training",
        "waiting for data": f"{results['waiting_for_data']:.0%} of that time",
        **({} if loop.flops is None else {"FLOPs per image": f"{loop.flops / 1e9:.3g} G, forward and backward"}),
        **speed_text(results),
        "seconds in all": results["seconds"],
    }
    return {
        "Result": result,
        "Run": run_facts(options, data, loop.schedule, model, cast(ImageTask[Any], loop.task), taken=loop.step),
        "Environment": {"processes": loop.accelerator.num_processes, **environment()},
    }


def describe_plan(
    options: ClassifierOptions,
    data: ImageClassificationData,
    schedule: Schedule,
    learner: Learner,
    task: ImageTask[Any],
    image_processor: Any,
) -> dict[str, Facts]:
    """Return tables of the plan of a run and its requirements, by title. This changes the weights.

    Args:
        options: options of the run.
        data: the dataset.
        schedule: the steps.
        learner: the model with its optimizer.
        task: the task.
        image_processor: image processor of the training images.
    """
    accelerator, total = learner.accelerator, schedule.total_steps
    processes, accumulation = accelerator.num_processes, options.gradient_accumulation_steps
    micro_batch = options.batch_size // (processes * accumulation)
    marks = {f"{share:.0%}": min(int(share * total), total - 1) for share in (0, 0.25, 0.5, 0.75, 1)}
    warmup = schedule.warmup_steps
    factors = {mark: scheduled_rate(options, step, total=total, warmup=warmup) for mark, step in marks.items()}
    rates = ", ".join(f"{mark} {factor * options.peak_learning_rate:.2e}" for mark, factor in factors.items())
    splits = data.splits
    remark = schedule.remark(options.batch_size)
    note: Facts = {"note": remark} if remark else {}
    facts = {
        **run_facts(options, data, schedule, learner.model, task),
        "learning rate at": f"{rates} of the steps",
        "a step": f"{counted(options.batch_size, 'image')} = {counted(processes, 'process', 'processes')} x "
        f"{counted(accumulation, 'micro-batch', 'micro-batches')} x {counted(micro_batch, 'image')}",
        **note,
        "evaluations": f"{len(schedule.evaluation_steps)} of {len(splits[data.watched]):,} {data.watched} images, "
        f"at the end {len(splits[data.held_out]):,} {data.held_out} images",
        "checkpoints": f"{len(schedule.checkpoint_steps)}" if options.checkpoints_kept else "none",
    }
    averaged = learner.average is not None
    tables = describe_needs(
        measure_needs(learner.model, learner.optimizer, accelerator, NoiseInputs(image_processor), averaged=averaged),
        working_folder(options.output_dir),
        micro_batch=micro_batch,
        shards=processes if options.shard else 1,
        checkpoints_kept=options.checkpoints_kept,
        models_kept=0 if data.validation is None else folders_of_best(options),
    )
    return {"Run": facts, **tables}


def model_facts(
    options: ClassifierOptions,
    data: ImageClassificationData,
    loop: Loop[Any],
    result: Evaluation | VectorEvaluation,
) -> ModelFacts:
    """Return the facts about the run for the model card."""
    values = {
        **keywords(options, ModelOptions, OptimizationOptions, AugmentationOptions),
        **settings_of(loop.learner.optimizer),
        "teacher": None if options.teacher is None else public_name(options.teacher),
        "mixed_precision": options.mixed_precision,
    }
    del values["model"]  # the card already names it as the origin
    scores = {
        name: value for name, value in result.scores.items() if name != "top5_accuracy" or len(data.label_names) > 5
    }
    schedule = loop.schedule
    steps = {
        "epochs": f"{schedule.epochs_after(loop.step):.1f}",
        "steps": loop.step,
        **({"steps_planned": schedule.total_steps} if loop.step < schedule.total_steps else {}),
        "warmup_steps": schedule.warmup_steps,
        **({} if options.early_stopping is None else {"early_stopping": options.early_stopping}),
        **({} if loop.selected is None else {"best_metric": loop.chooses_by, "selected_step": loop.selected}),
    }
    return training_facts(
        loop.run.path,
        source=options.model,
        from_scratch=options.from_scratch,
        dataset=options.dataset,
        split_name=data.held_out,
        results=scores,
        images=count_images(data),
        recipe={**recipe_of(options, values), **steps, "seed": options.seed},
        environment={"processes": str(loop.accelerator.num_processes), **environment()},
        license=options.license,
    )
