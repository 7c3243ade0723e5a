"""Fine-tune an image classifier, on one process or many.

    python            examples/finetune_image_classification.py --model DIR --dataset digits --output_dir OUT
    accelerate launch examples/finetune_image_classification.py --model DIR --dataset digits --output_dir OUT
    torchrun --nproc_per_node 2 examples/finetune_image_classification.py ...
    python            examples/finetune_image_classification.py OUT/arguments.yaml --output_dir OUT2

OUT becomes a model folder: `pipeline("image-classification", model=OUT)` opens it. Beside the model it holds the
arguments, `log.jsonl` with every value that was logged, `results.json`, and the checkpoints from which `--resume` goes
on, to the same numbers as if the run had never stopped.

The result does not depend on how many processes share the work: `--batch_size` counts the images of one optimizer step
over all processes, and everything random is a function of the seed, the epoch, the image and its copy.
"""

import dataclasses
import hashlib
import json
import math
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from plain_vit.errors import TrainingError
from plain_vit.extras import needs
from plain_vit.hub import check_repository
from plain_vit.model_card import ModelFacts

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import set_seed
    from datasets import Dataset

    from plain_vit.training.arguments import (
        AugmentationOptions,
        DataOptions,
        ModelOptions,
        OptimizationOptions,
        RunOptions,
        as_yaml,
        check_options,
        run_script,
    )
    from plain_vit.training.data import ImageClassificationData, load_classification_data
    from plain_vit.training.data.augmentation import AugmentedImages, batch_mixing, input_size, training_transform
    from plain_vit.training.data.decoding import ProcessedImages, ReadableImages, UnreadableImages
    from plain_vit.training.data.sampling import ShuffledStream, randomness
    from plain_vit.training.data.streaming import StreamedImages, streamed_batches
    from plain_vit.training.dry_run import describe_needs, measure_needs, text_tables
    from plain_vit.training.losses import balancing_weights, classification_loss, distillation_loss
    from plain_vit.training.memory import fitting_accumulation, lack_of_memory_explained, training_trial
    from plain_vit.training.metrics import Evaluation, evaluate_classifier
    from plain_vit.training.mistakes import top_accuracy
    from plain_vit.training.models import (
        Teacher,
        as_saved,
        checkpoint_hints,
        head_of,
        load_classifier,
        load_teacher,
        merged,
        with_lora,
    )
    from plain_vit.training.optimization import average_of, freeze, learning_rate_factor, make_optimizer, train_mode
    from plain_vit.training.processes import StopRequest, loading_options, start_accelerator
    from plain_vit.training.progress import Progress
    from plain_vit.training.publishing import publish, training_facts
    from plain_vit.training.report import environment, write_report
    from plain_vit.training.run import RunFolder, checkpoint_bytes, move_into, shared_staging, write_file
    from plain_vit.training.sharding import ShardedState, blocks_to_shard, held_here, is_sharded, shard, whole_state
    from plain_vit.training.snapshots import Snapshots
    from plain_vit.training.trackers import start_trackers, tracker_names


@dataclass(kw_only=True)
class FinetuneArguments(RunOptions, AugmentationOptions, OptimizationOptions, DataOptions, ModelOptions):
    """The options of a run; `plain_vit/training/arguments.py` says what each is.

    The defaults suit a small ViT on a small data set.
    """


# What may change when a run is resumed, because it does not decide the result.
FREE_ON_RESUME = (
    "output_dir", "resume", "num_workers", "num_processes", "checkpoints_kept", "eval_batch_size",
    "report_to", "report", "picture_every", "dry_run",
    "license", "push_to_hub", "hub_private",
)  # fmt: skip

# Where a run begins: how far it is, what it chose, and the sums of loss, right answers and images that it logs.
START: dict[str, Any] = {
    "step": 0,
    "best_accuracy": -1.0,
    "stale": 0,
    "window": [0.0] * 3,
    "since": [0.0] * 3,
    "unreadable": 0,
}


def finetune(arguments: FinetuneArguments) -> Evaluation:
    """Run what the arguments say.

    Args:
        arguments: as on the command line.

    Returns:
        How the saved model does on the held-out split: `test`, or the validation split where there is no other.
    """
    start = time.perf_counter()
    trackers = tracker_names(arguments.report_to)
    if arguments.push_to_hub is not None:
        check_repository(arguments.push_to_hub)
    accelerator = start_accelerator(
        num_processes=arguments.num_processes,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        mixed_precision=arguments.mixed_precision,
    )
    loading = loading_options(arguments.num_workers)
    say = tqdm.write if accelerator.is_main_process else lambda line: None
    set_seed(arguments.seed)

    # Data, model and plan. Whatever is wrong with them is found before anything is written.
    data = load_classification_data(
        arguments.dataset,
        subset=arguments.dataset_subset,
        image_column=arguments.image_column,
        label_column=arguments.label_column,
        train_split=arguments.train_split,
        validation_split=arguments.validation_split,
        test_split=arguments.test_split,
        validation_fraction=arguments.validation_fraction,
        shots_per_class=arguments.shots_per_class,
        label_names=arguments.label_names,
        skip_unreadable=arguments.corrupted == "skip",
        streaming=arguments.streaming,
        stream_images=arguments.stream_images,
        seed=arguments.seed,
    )
    plan = make_plan(arguments, data, accelerator.num_processes)
    model, image_processor, teacher = make_models(arguments, data)
    transform = training_transform(
        image_processor,
        crop_scale=arguments.crop_scale,
        resize_to=arguments.resize_to,
        horizontal_flip=arguments.horizontal_flip,
        augmentation=arguments.augmentation,
        magnitude=arguments.magnitude,
        augmentation_layers=arguments.augmentation_layers,
        random_erasing=arguments.random_erasing,
    )
    mix = batch_mixing(mixup=arguments.mixup, cutmix=arguments.cutmix, num_classes=len(data.label_names))
    optimizer_of = partial(
        make_optimizer,
        name=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        layer_decay=arguments.layer_decay,
        momentum=arguments.momentum,
    )
    optimizer = optimizer_of(model)
    average = average_of(model, arguments.ema_decay, accelerator) if arguments.ema_decay is not None else None
    class_weights = None
    if arguments.class_balance == "loss":
        class_weights = balancing_weights(data.train["label"], len(data.label_names)).to(accelerator.device)
    run = RunFolder(
        arguments.output_dir,
        accelerator,
        deciding_options(arguments, data, accelerator.num_processes),
        resume=arguments.resume,
    )

    if arguments.dry_run:
        if arguments.shard:
            blocks_to_shard(model, accelerator)
        say(text_tables(describe_plan(arguments, data, plan, model, image_processor, optimizer, accelerator)))
        sys.exit()

    # The next checkpoint is written before an old one goes, and the best model and the last one are kept beside them.
    checkpoint_size, kept = checkpoint_bytes(model, average), arguments.checkpoints_kept
    run.require_space((kept + 1 if kept else 0) * checkpoint_size + 2 * checkpoint_size, "the run")

    # The run begins, or continues from its newest checkpoint.
    saved_kind = type(as_saved(model))
    if arguments.compile:
        # Between the blocks sharded weights are gathered, which is not compiled.
        for part in blocks_to_shard(model, accelerator) if arguments.shard else [model]:
            part.compile()
    sharded = None
    if arguments.shard:
        shard(model, accelerator)
        optimizer = AcceleratedOptimizer(optimizer_of(model), device_placement=False)
        if average is not None:
            shard(average.module, accelerator)
        sharded = ShardedState(model, optimizer.optimizer, average)
        say("each process holds {:,} of {:,} parameters".format(*held_here(model)))
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    if teacher is not None:
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    progress = run.begin(average, sharded) or START
    if accelerator.is_main_process:
        write_file(run.path / "arguments.yaml", as_yaml(arguments))
    step, best_accuracy, stale = progress["step"], progress["best_accuracy"], progress["stale"]
    start_trackers(accelerator, trackers, run.path, dataclasses.asdict(arguments), step=step)
    # Loss, right answers and images of this process since the last line of the log, and since the last evaluation.
    window = torch.tensor(progress["window"], device=accelerator.device) * accelerator.is_main_process
    since_evaluation = torch.tensor(progress["since"], device=accelerator.device) * accelerator.is_main_process
    snapshots = Snapshots(
        run.path / "report" / "snapshots",
        plan.watched,
        data.label_names,
        image_processor,
        every=arguments.picture_every if arguments.report else 0,
        epochs=plan.epochs,
        total_steps=plan.total_steps,
        sharded=arguments.shard,
        accelerator=accelerator,
    )

    # Micro-batches that fit into memory; an optimizer step has as many images either way.
    accumulation = arguments.gradient_accumulation_steps
    if arguments.auto_micro_batch:
        trial = training_trial(model, accelerator, (3, *input_size(image_processor)))
        images = arguments.batch_size // accelerator.num_processes
        accumulation = fitting_accumulation(trial, accelerator, images=images, at_least=accumulation)
        accelerator.gradient_accumulation_steps = accumulation

    # Batches: one long stream for the whole training, and the splits to evaluate on.
    micro_batch = arguments.batch_size // accelerator.num_processes // accumulation
    evaluation = {"batch_size": plan.eval_micro_batch, "collate_fn": ProcessedImages(image_processor), **loading}
    watched_loader, held_out_loader = accelerator.prepare(
        DataLoader(ReadableImages(plan.watched), **evaluation), DataLoader(ReadableImages(plan.held_out), **evaluation)
    )
    if arguments.streaming:
        images = StreamedImages(
            data.train,
            transform,
            classes=len(data.label_names),
            batch_size=micro_batch,
            batches_before=step * accumulation,
            buffer=arguments.stream_buffer,
            process=(accelerator.process_index, accelerator.num_processes),
            seed=arguments.seed,
        )
        train_loader = streamed_batches(images, accelerator, count=(plan.total_steps - step) * accumulation, **loading)
    else:
        stream = ShuffledStream(
            len(data.train),
            length=plan.total_steps * arguments.batch_size,
            seed=arguments.seed,
            start=step * arguments.batch_size,
            balanced_by=data.train["label"] if arguments.class_balance == "sampler" else None,
            repeats=arguments.repeated_augmentation,
            batch_size=arguments.batch_size,
        )
        augmented = AugmentedImages(data.train, transform, arguments.seed)
        train_loader = accelerator.prepare(DataLoader(augmented, batch_size=micro_batch, sampler=stream, **loading))
    unreadable = UnreadableImages(
        stop=arguments.corrupted == "stop",
        say=tqdm.write,
        count=progress["unreadable"] * accelerator.is_main_process,
    )
    for broken in data.unreadable:
        say(f"left out of the evaluation, because it cannot be read: {broken}")

    def save_checkpoint() -> None:
        run.require_space(checkpoint_size, "the next checkpoint")
        sums, since = accelerator.reduce(window).tolist(), accelerator.reduce(since_evaluation).tolist()
        run.save(
            {
                "step": step,
                "best_accuracy": best_accuracy,
                "stale": stale,
                "window": sums,
                "since": since,
                "unreadable": unreadable.count_everywhere(accelerator),
            },
            keep=arguments.checkpoints_kept,
            average=average,
            sharded=sharded,
        )

    say(
        f"{data.train_images} images of {len(data.label_names)} classes, {plan.total_steps} steps of "
        f"{arguments.batch_size} images in {accelerator.num_processes} processes, {plan.epochs:.1f} epochs"
        + (f", from step {step} on" if step else "")
    )
    bar = Progress(
        total=plan.total_steps * arguments.batch_size,
        done=step * arguments.batch_size,
        shown=accelerator.is_main_process,
    )
    evaluated: nn.Module | None = None
    evaluated_at = -1
    with bar, StopRequest() as stop, lack_of_memory_explained():
        if step == 0:
            snapshots.take(0, model)
        train_mode(model)
        for micro_step, batch in enumerate(bar.batches(unreadable.watch(train_loader))):
            if micro_step % accumulation == 0:
                if stale == arguments.early_stopping:
                    say(f"Stopped early after step {step}: {stale} evaluations without a better accuracy.")
                    break
                # Dropout and mixup depend on the step alone, so that a resumed run repeats them.
                torch.manual_seed(randomness(arguments.seed, step, accelerator.process_index))
                factor = learning_rate_factor(
                    step, total=plan.total_steps, warmup=plan.warmup_steps, schedule=arguments.schedule
                )
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * factor

            with accelerator.accumulate(model):
                pixels, targets = mix(transform.normalize(batch["pixel_values"]), batch["labels"])
                logits = model(pixel_values=pixels).logits.float()
                loss = classification_loss(
                    logits,
                    targets,
                    kind=arguments.loss,
                    label_smoothing=arguments.label_smoothing,
                    class_weights=class_weights,
                )
                if teacher is not None:
                    taught = distillation_loss(
                        logits,
                        teacher(pixels),
                        kind=arguments.distillation,
                        temperature=arguments.distillation_temperature,
                    )
                    loss = torch.lerp(loss, taught, arguments.distillation_weight)
                accelerator.backward(loss)
                if accelerator.sync_gradients and arguments.max_grad_norm:
                    accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            right = (logits.argmax(dim=-1) == batch["labels"]).sum()
            seen = torch.stack([loss.detach() * len(logits), right, torch.full_like(right, len(logits))])
            window += seen
            since_evaluation += seen
            if not accelerator.sync_gradients:
                continue

            step += 1
            bar.update(arguments.batch_size)
            if average is not None:
                average.update_parameters(accelerator.unwrap_model(model))
            evaluated = average.module if average is not None else model

            if step % arguments.log_every == 0 or step == plan.total_steps:
                loss_sum, right_sum, images = accelerator.reduce(window).tolist()
                window.zero_()
                run.log(
                    step=step,
                    learning_rate=factor * arguments.learning_rate,
                    train_loss=loss_sum / images,
                    train_accuracy=right_sum / images,
                )
                accelerator.log(bar.rates(), step=step)
                bar.show(loss=f"{loss_sum / images:.3f}", accuracy=f"{right_sum / images:.1%}")

            if step in plan.evaluation_steps:
                loss_sum, right_sum, images = accelerator.reduce(since_evaluation).tolist()
                since_evaluation.zero_()
                with bar.pause():
                    result = evaluate_classifier(
                        evaluated, unreadable.watch(watched_loader), accelerator, size=len(plan.watched)
                    )
                evaluated_at = step
                train_mode(model)
                name, epoch = plan.watched_name, step / plan.total_steps * plan.epochs
                run.log(step=step, epoch=epoch, **{f"{name}_loss": result.loss, f"{name}_accuracy": result.accuracy})
                bar.row(
                    {
                        "epoch": f"{epoch:.1f}",
                        "step": str(step),
                        "train loss": f"{loss_sum / images:.4f}",
                        "train acc": f"{right_sum / images:.2%}",
                        f"{name} loss": f"{result.loss:.4f}",
                        f"{name} acc": f"{result.accuracy:.2%}",
                        "evaluated": f"{result.count} of {len(plan.watched)}",
                        "lr": f"{factor * arguments.learning_rate:.2e}",
                    }
                )
                stale += 1
                if plan.may_choose and result.accuracy > best_accuracy:
                    best_accuracy, stale = result.accuracy, 0
                    with shared_staging(run.path / "best", accelerator) as folder:
                        save_classifier(folder, evaluated, image_processor, accelerator)

            with bar.pause():
                snapshots.take(step, evaluated)
            if stop.requested_anywhere(accelerator):
                save_checkpoint()
                accelerator.end_training()
                say(f"Stopped after step {step} of {plan.total_steps}: go on with --resume.")
                sys.exit(128 + signal.SIGTERM)
            if arguments.checkpoints_kept and step in plan.checkpoint_steps:
                with bar.pause():
                    save_checkpoint()

    # The weights that the validation split chose, else the last ones, and what they make of the held-out split.
    if arguments.shard and not plan.may_choose:
        with shared_staging(run.path / "best", accelerator) as folder:
            save_classifier(folder, average.module if average is not None else model, image_processor, accelerator)
    if plan.may_choose or arguments.shard:
        chosen = saved_kind.from_pretrained(run.path / "best")
        final = accelerator.prepare_model(chosen, evaluation_mode=True)
    else:
        final = average.module if average is not None else model
        if arguments.lora_rank is not None:
            final = as_saved(accelerator.unwrap_model(final))
    final.eval()
    # Without a validation split the last weights may have been evaluated on the held-out split after the last step.
    if final is not evaluated or evaluated_at != step or plan.watched_name != plan.held_out_name:
        result = evaluate_classifier(final, unreadable.watch(held_out_loader), accelerator, size=len(plan.held_out))
    results = {
        f"{plan.held_out_name}_accuracy": result.accuracy,
        f"{plan.held_out_name}_loss": result.loss,
        "images_evaluated": result.count,
        "unreadable_images_left_out": len(data.unreadable),
        "unreadable_images_replaced": unreadable.count_everywhere(accelerator),
        "steps": step,
        "seconds": round(time.perf_counter() - start, 1),
        **bar.rates(),
    }
    if accelerator.is_main_process:
        write_file(run.path / "results.json", json.dumps(results, indent=2) + "\n")
    with shared_staging(run.path / "model", accelerator) as folder:
        save_classifier(folder, final, image_processor, accelerator)
    if accelerator.is_main_process:
        move_into(run.path / "model", run.path)
        if arguments.report:
            write_report(
                run.path,
                {
                    "Result": result_facts(plan, results),
                    "Run": run_facts(arguments, data, plan, accelerator.unwrap_model(model), saved_kind),
                    "Environment": {"processes": accelerator.num_processes, **environment()},
                },
                result,
                plan.held_out,
                split_name=plan.held_out_name,
                class_names=data.label_names,
                model=accelerator.unwrap_model(final),
                image_processor=image_processor,
                snapshots=snapshots,
            )
    say(
        f"{plan.held_out_name} accuracy {result.accuracy:.2%}, loss {result.loss:.4f}, on {result.count} of "
        f"{len(plan.held_out)} images, after {results['seconds']} s; the model is in {run.path}"
        + (f", the report is {run.path / 'report' / 'index.html'}" if arguments.report else "")
    )
    if accelerator.is_main_process:
        pushed = publish(
            run.path,
            model_facts(arguments, data, plan, result, accelerator),
            repo_id=arguments.push_to_hub,
            private=arguments.hub_private,
            say=say,
        )
        if pushed is not None:
            say(str(pushed))
    accelerator.end_training()
    accelerator.free_memory()
    return result


def make_models(arguments: FinetuneArguments, data: ImageClassificationData) -> tuple[nn.Module, Any, Teacher | None]:
    """Open the model with its image processor, take out of the training what is not trained, and open the teacher."""
    size = arguments.image_size
    if size is not None and len(size) > 2:
        raise TrainingError(f"image_size is {size}: expected one number, or height and width.")
    model, image_processor = load_classifier(
        arguments.model,
        data.label_names,
        from_scratch=arguments.from_scratch,
        trust_remote_code=arguments.trust_remote_code,
        hints=checkpoint_hints(arguments.model_hints),
        image_size=None if size is None else (size[0], size[-1]),
        hidden_dropout_prob=arguments.dropout,
        drop_path_rate=arguments.drop_path_rate,
    )
    if arguments.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise TrainingError(f"{type(model).__name__} has no gradient checkpointing: leave out the option.")
        model.gradient_checkpointing_enable()
    head = head_of(model)
    if arguments.freeze:
        freeze(model, arguments.freeze, head)
    teacher = None
    if arguments.teacher is not None:
        teacher = load_teacher(
            arguments.teacher, image_processor, data.label_names, trust_remote_code=arguments.trust_remote_code
        )
    if arguments.lora_rank is None:
        return model, image_processor, teacher
    adapted = with_lora(
        model, rank=arguments.lora_rank, alpha=arguments.lora_alpha, targets=arguments.lora_targets, head=head
    )
    return adapted, image_processor, teacher


@dataclass(frozen=True)
class Plan:
    """How many steps of how many images, and what the model is watched and judged by."""

    total_steps: int
    epochs: float
    warmup_steps: int
    evaluation_steps: frozenset[int]
    checkpoint_steps: frozenset[int]
    eval_micro_batch: int
    watched_name: str  # the split that is evaluated along the way
    watched: Dataset
    may_choose: bool  # whether it may choose the weights to keep: a test split may not
    held_out_name: str  # the split that is evaluated at the end
    held_out: Dataset


def make_plan(arguments: FinetuneArguments, data: ImageClassificationData, processes: int) -> Plan:
    """Count the steps and divide each among the processes."""
    check_options(arguments)
    parts = processes * arguments.gradient_accumulation_steps
    if arguments.batch_size % parts:
        raise TrainingError(
            f"batch_size {arguments.batch_size} does not divide among {processes} processes x "
            f"{arguments.gradient_accumulation_steps} micro-batches: use a multiple of {parts}."
        )
    splits = {"validation": data.validation, "test": data.test}
    if arguments.shard and arguments.auto_micro_batch:
        # A process that runs out of memory alone would leave the others waiting for its part of the weights.
        raise TrainingError(
            "--shard cannot try what fits into memory: leave out --auto_micro_batch, and give "
            "--gradient_accumulation_steps, by what --dry_run says."
        )
    if arguments.shard and arguments.mixed_precision == "fp16":
        raise TrainingError("--shard does not scale the losses of fp16: use --mixed_precision bf16.")
    if arguments.streaming and arguments.class_balance != "none":
        raise TrainingError("The classes of a stream are not known beforehand: leave out --class_balance.")
    if arguments.repeated_augmentation > 1:
        check_copies(arguments)
    if arguments.early_stopping is not None and splits["validation"] is None:
        raise TrainingError("early_stopping needs a validation split to choose by: add --validation_fraction 0.1.")
    present = [name for name, split in splits.items() if split is not None]
    if not present:
        raise TrainingError("The data set has one split, so nothing to evaluate on: add --validation_fraction 0.2.")
    watched_name, held_out_name = present[0], present[-1]
    passes = 10.0 if arguments.epochs is None else arguments.epochs
    total_steps = arguments.steps or math.ceil(passes * data.train_images / arguments.batch_size)
    epochs = total_steps * arguments.batch_size / data.train_images
    evaluations = arguments.evaluations or max(1, round(epochs))
    evaluation_steps = frozenset(math.ceil(total_steps * (count + 1) / evaluations) for count in range(evaluations))
    if arguments.warmup_steps is not None and arguments.warmup_steps > total_steps:
        raise TrainingError(
            f"The warm-up takes {arguments.warmup_steps} steps, the run {total_steps}: give --warmup_steps or "
            "--warmup_fraction."
        )
    every, warmup = arguments.checkpoint_every, arguments.warmup_steps
    return Plan(
        total_steps=total_steps,
        epochs=epochs,
        warmup_steps=round(arguments.warmup_fraction * total_steps) if warmup is None else warmup,
        evaluation_steps=evaluation_steps,
        checkpoint_steps=frozenset(range(every, total_steps + 1, every)) if every else evaluation_steps,
        eval_micro_batch=math.ceil(arguments.eval_batch_size / processes),
        watched_name=watched_name,
        watched=splits[watched_name],
        may_choose=watched_name == "validation",
        held_out_name=held_out_name,
        held_out=splits[held_out_name],
    )


def check_copies(arguments: FinetuneArguments) -> None:
    """Refuse copies of an image that cannot be made, cannot meet in a batch, or would be the same image again."""
    copies = arguments.repeated_augmentation
    if arguments.streaming:
        raise TrainingError("A stream gives each image once: leave out --streaming, or give --repeated_augmentation 1.")
    if arguments.batch_size < copies:
        raise TrainingError(f"batch_size is {arguments.batch_size}: expected at least the {copies} copies of an image.")
    varied = arguments.crop_scale < 1 or arguments.resize_to is not None or arguments.augmentation != "none"
    if not (varied or arguments.horizontal_flip or arguments.random_erasing):
        raise TrainingError(
            f"Nothing varies the images, so {copies} copies of each would be alike: add --crop_scale 0.08 or another "
            "augmentation, or leave out --repeated_augmentation."
        )


def deciding_options(arguments: FinetuneArguments, data: ImageClassificationData, processes: int) -> dict[str, Any]:
    """Return what decides the result of a run: the arguments that do, and the labels in their order."""
    options = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in FREE_ON_RESUME}
    options["training images"] = data.train_images
    if arguments.streaming:
        options["readers of the stream"] = f"{processes} processes with {arguments.num_workers} workers each"
    else:
        options["training labels"] = hashlib.sha256(str(data.train["label"][:]).encode()).hexdigest()
    options["classes"] = data.label_names
    return options


def run_facts(
    arguments: FinetuneArguments, data: ImageClassificationData, plan: Plan, model: nn.Module, kind: type
) -> dict[str, object]:
    """Return what a person wants to know of the run; `kind` is the class of what is saved."""
    parameters = list(model.parameters())
    return {
        "started from": arguments.model + (" (architecture only)" if arguments.from_scratch else ""),
        "model": kind.__name__,
        "parameters": f"{sum(p.numel() for p in parameters):,}",
        "of them trained": f"{sum(p.numel() for p in parameters if p.requires_grad):,}",
        "data set": arguments.dataset,
        "images": count_images(data),
        "classes": len(data.label_names),
        "steps": f"{plan.total_steps:,} of {arguments.batch_size} images, {plan.epochs:.1f} epochs",
        "optimizer": f"{arguments.optimizer}, weight decay {arguments.weight_decay}",
        "learning rate": f"{arguments.learning_rate}, {arguments.schedule} after {plan.warmup_steps} warm-up steps",
        "seed": arguments.seed,
    }


def model_facts(
    arguments: FinetuneArguments,
    data: ImageClassificationData,
    plan: Plan,
    result: Evaluation,
    accelerator: Accelerator,
) -> ModelFacts:
    """Return what the page of the model says of the run."""
    recipe = {
        name: value
        for group in (OptimizationOptions, AugmentationOptions)
        for name in (each.name for each in dataclasses.fields(group))
        if (value := getattr(arguments, name)) not in (None, [], "none") and value is not False
    }
    if arguments.teacher is None:
        recipe = {name: value for name, value in recipe.items() if not name.startswith("distillation")}
    if arguments.augmentation != "randaugment":
        recipe = {name: value for name, value in recipe.items() if name not in ("magnitude", "augmentation_layers")}
    top5 = {"top5_accuracy": top_accuracy(result, 5)} if len(data.label_names) > 5 else {}
    return training_facts(
        Path(arguments.output_dir),
        source=arguments.model,
        from_scratch=arguments.from_scratch,
        dataset=arguments.dataset,
        split_name=plan.held_out_name,
        results={"accuracy": result.accuracy, **top5},
        images=count_images(data),
        recipe={**recipe, "steps": plan.total_steps, "warmup_steps": plan.warmup_steps, "seed": arguments.seed},
        environment={"processes": str(accelerator.num_processes), **environment()},
        license=arguments.license,
    )


def count_images(data: ImageClassificationData) -> str:
    """Say how many images each split has."""
    counts = {"train": data.train_images}
    counts |= {
        name: len(split) for name, split in (("validation", data.validation), ("test", data.test)) if split is not None
    }
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def result_facts(plan: Plan, results: dict[str, Any]) -> dict[str, object]:
    """Return what came out of the run."""
    return {
        f"{plan.held_out_name} accuracy": f"{results[f'{plan.held_out_name}_accuracy']:.2%}",
        f"{plan.held_out_name} loss": f"{results[f'{plan.held_out_name}_loss']:.4f}",
        "images evaluated": results["images_evaluated"],
        "weights": "those the validation split chose" if plan.may_choose else "the last ones",
        "images per second": f"{results['images_per_second']:.0f}, while training",
        "waiting for data": f"{results['waiting_for_data']:.0%} of that time",
        "seconds in all": results["seconds"],
    }


def describe_plan(
    arguments: FinetuneArguments,
    data: ImageClassificationData,
    plan: Plan,
    model: nn.Module,
    image_processor: Any,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
) -> dict[str, dict[str, object]]:
    """Return what the run would do and what it would need, in tables by their titles."""
    parts = accelerator.num_processes * arguments.gradient_accumulation_steps
    marks = {
        f"{share:.0%}": min(int(share * plan.total_steps), plan.total_steps - 1) for share in (0, 0.25, 0.5, 0.75, 1)
    }
    rates = {
        mark: learning_rate_factor(
            step, total=plan.total_steps, warmup=plan.warmup_steps, schedule=arguments.schedule
        )
        * arguments.learning_rate
        for mark, step in marks.items()
    }  # fmt: skip
    facts = {
        **run_facts(arguments, data, plan, model, type(as_saved(model))),
        "learning rate at": ", ".join(f"{mark} {rate:.2e}" for mark, rate in rates.items()) + " of the steps",
        "a step": f"{arguments.batch_size} images = {accelerator.num_processes} processes x "
        f"{arguments.gradient_accumulation_steps} micro-batches x {arguments.batch_size // parts} images",
        "precision": arguments.mixed_precision,
        "evaluations": f"{len(plan.evaluation_steps)} of {len(plan.watched):,} {plan.watched_name} images, "
        f"at the end {len(plan.held_out):,} {plan.held_out_name} images",
        "checkpoints": f"{len(plan.checkpoint_steps)}" if arguments.checkpoints_kept else "none",
    }
    sharded = arguments.shard or accelerator.distributed_type == DistributedType.FSDP
    shape = (3, *input_size(image_processor))
    needs = measure_needs(model, optimizer, accelerator, shape, averaged=arguments.ema_decay is not None)
    tables = describe_needs(
        needs,
        Path(arguments.output_dir),
        micro_batch=arguments.batch_size // parts,
        shards=accelerator.num_processes if sharded else 1,
        checkpoints_kept=arguments.checkpoints_kept,
        keeps_best=plan.may_choose,
    )
    return {"Run": facts, **tables}


def save_classifier(folder: Path, model: nn.Module, image_processor: Any, accelerator: Accelerator) -> None:
    """Write what `AutoModelForImageClassification` and `AutoImageProcessor` open."""
    bare = accelerator.unwrap_model(model)
    if is_sharded(bare):
        state = whole_state(bare)  # all processes take part
        if accelerator.is_main_process:
            if hasattr(bare, "merge_and_unload"):
                merged(bare, state).save_pretrained(folder)
            else:
                bare.save_pretrained(folder, state_dict=state)
            image_processor.save_pretrained(folder)
        return
    saved = as_saved(bare)
    saved.save_pretrained(
        folder,
        state_dict=accelerator.get_state_dict(model) if saved is bare else saved.state_dict(),
        is_main_process=accelerator.is_main_process,
    )
    if accelerator.is_main_process:
        image_processor.save_pretrained(folder)


def main() -> None:
    run_script(finetune, FinetuneArguments, description=__doc__)


if __name__ == "__main__":
    main()
