"""Facts about a fine-tuning run: plan, requirements, results, and content of the model card."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ...extras import needs
from ...model_card import ModelFacts
from ..arguments import MIXING, AugmentationOptions, ClassifierOptions, OptimizationOptions, keywords
from ..data import ImageClassificationData
from ..data.augmentation import input_size
from ..data.inputs import NoiseInputs, max_num_patches_of
from ..learner import Learner
from ..loop import Loop, Schedule, folders_of_best
from ..metrics import Evaluation
from ..optimization import scheduled_rate
from ..tasks.classification import ImageTask
from ..vector_metrics import VectorEvaluation
from .dry_run import describe_needs, measure_needs
from .publishing import training_facts
from .report import environment

with needs("plain-vit[train]"):
    from accelerate import DistributedType

Facts = dict[str, object]
# Results of the report's first table.
SHOWN = ("accuracy", "mean_average_precision", "macro_f1", "mean_absolute_error", "r2", "loss")
RANDAUGMENT_OPTIONS = {"magnitude_scale", "magnitude", "magnitude_std", "augmentation_layers"}


def run_facts(
    options: ClassifierOptions,
    data: ImageClassificationData,
    schedule: Schedule,
    model: nn.Module,
    task: ImageTask[Any],
) -> Facts:
    """Return a summary of the run."""
    parameters = list(model.parameters())
    return {
        "started from": options.model + (" (architecture only)" if options.from_scratch else ""),
        "model": task.kind.__name__,
        "parameters": f"{sum(p.numel() for p in parameters):,}",
        "of them trained": f"{sum(p.numel() for p in parameters if p.requires_grad):,}",
        "data set": options.dataset,
        "images": count_images(data),
        "size of images": size_of_images(task.image_processor),
        "classes": len(data.label_names),
        "steps": f"{schedule.total_steps:,} of {options.batch_size} images, {schedule.epochs:.1f} epochs",
        "optimizer": f"{options.optimizer}, weight decay {options.weight_decay}",
        "learning rate": f"{options.peak_learning_rate:g}, {options.schedule} after {schedule.warmup_steps} warm-up "
        "steps" + (f", down to {options.min_learning_rate:g}" if options.min_learning_rate else ""),
        "precision": options.mixed_precision
        + (", blocks train on bfloat16 copies of their weights" if options.param_dtype == "bf16" else "")
        + (", float32 products in TF32 while training" if _tf32(options) else ""),
        "seed": options.seed,
    }


def _tf32(options: ClassifierOptions) -> bool:
    return options.tf32 and torch.cuda.is_available()


def size_of_images(image_processor: Any) -> str:
    """Return the size of evaluated images, in words."""
    if most := max_num_patches_of(image_processor):
        side = image_processor.patch_size
        return f"aspect ratio kept, at most {most} patches of {side} x {side} pixels"
    height, width = input_size(image_processor)
    return f"{height} x {width} pixels"


def count_images(data: ImageClassificationData) -> str:
    """Return the number of images of each split, in words."""
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
    shown = {name: f"{value:.2%}" if name == "accuracy" else f"{value:.4f}" for name, value in values.items()}
    result: Facts = {
        **{f"{data.held_out} {name.replace('_', ' ')}": value for name, value in shown.items()},
        "images evaluated": results["images_evaluated"],
        "weights": "selected on the validation split" if data.validation is not None else "the last ones",
        "images per second": f"{results['images_per_second']:.0f}, while training",
        "waiting for data": f"{results['waiting_for_data']:.0%} of that time",
        "seconds in all": results["seconds"],
    }
    return {
        "Result": result,
        "Run": run_facts(options, data, loop.schedule, model, cast(ImageTask[Any], loop.task)),
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
    """Return tables of the plan and its requirements, by title. This changes the weights.

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
        "a step": f"{options.batch_size} images = {processes} processes x {accumulation} micro-batches x "
        f"{micro_batch} images",
        **note,
        "evaluations": f"{len(schedule.evaluation_steps)} of {len(splits[data.watched]):,} {data.watched} images, "
        f"at the end {len(splits[data.held_out]):,} {data.held_out} images",
        "checkpoints": f"{len(schedule.checkpoint_steps)}" if options.checkpoints_kept else "none",
    }
    sharded = options.shard or accelerator.distributed_type == DistributedType.FSDP
    averaged = learner.average is not None
    tables = describe_needs(
        measure_needs(learner.model, learner.optimizer, accelerator, NoiseInputs(image_processor), averaged=averaged),
        Path(options.output_dir),
        micro_batch=micro_batch,
        shards=processes if sharded else 1,
        checkpoints_kept=options.checkpoints_kept,
        models_kept=0 if data.validation is None else folders_of_best(options),
    )
    return {"Run": facts, **tables}


def model_facts(
    options: ClassifierOptions,
    data: ImageClassificationData,
    schedule: Schedule,
    result: Evaluation | VectorEvaluation,
    processes: int,
) -> ModelFacts:
    """Return the content of the model card about the run."""
    values = {
        **keywords(options, OptimizationOptions, AugmentationOptions),
        "mixed_precision": options.mixed_precision,
        "native_aspect_ratio": options.native_aspect_ratio,
    }
    recipe = {name: value for name, value in values.items() if value not in (None, [], "none") and value is not False}
    if options.teacher is None:
        recipe = {name: value for name, value in recipe.items() if not name.startswith("distillation")}
    without_effect = set() if options.augmentation == "randaugment" else RANDAUGMENT_OPTIONS
    without_effect |= set() if _tf32(options) else {"tf32"}
    without_effect |= set() if options.random_erasing else {"random_erasing_mode"}
    without_effect |= set() if options.mixup or options.cutmix else set(MIXING)
    recipe = {name: value for name, value in recipe.items() if name not in without_effect}
    if options.problem_type != "single_label_classification":
        recipe.pop("label_smoothing", None)
    scores = {
        name: value for name, value in result.scores.items() if name != "top5_accuracy" or len(data.label_names) > 5
    }
    steps = {"steps": schedule.total_steps, "warmup_steps": schedule.warmup_steps}
    return training_facts(
        Path(options.output_dir),
        source=options.model,
        from_scratch=options.from_scratch,
        dataset=options.dataset,
        split_name=data.held_out,
        results=scores,
        images=count_images(data),
        recipe={**recipe, **steps, "seed": options.seed},
        environment={"processes": str(processes), **environment()},
        license=options.license,
    )
