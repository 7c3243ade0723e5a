"""Fine-tune an image classifier, on one process or many.

    python            examples/finetune_image_classification.py --model DIR --dataset digits --output_dir OUT
    accelerate launch examples/finetune_image_classification.py --model DIR --dataset digits --output_dir OUT
    torchrun --nproc_per_node 2 examples/finetune_image_classification.py ...
    python            examples/finetune_image_classification.py OUT/arguments.yaml --output_dir OUT2

OUT becomes a model folder: `pipeline("image-classification", model=OUT)` opens it. Besides the model, it holds the
arguments, `log.jsonl` with every logged value, `results.json`, and checkpoints. `--resume` continues from the newest
checkpoint, with the same numbers as if the run had never stopped.

The result does not depend on the number of processes: `--batch_size` counts the images of one optimizer step over all
processes, and all randomness is a function of the seed and of the place of an image in the step or in the epoch.
Exceptions: dropout, batch normalisation and streams.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("finetune_image_classification", __doc__)

import torch
from torch import nn
from torch.utils.data import DataLoader

from plain_vit.errors import TrainingError
from plain_vit.hub import check_repository
from plain_vit.modeling_plain_vit import PlainViTPreTrainedModel
from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from accelerate.utils import send_to_device

    from plain_vit.training.arguments import ClassifierOptions as FinetuneArguments
    from plain_vit.training.arguments import (
        ImageOptions,
        LabelOptions,
        LearnerOptions,
        LoadedOptions,
        TransformOptions,
        keywords,
        run_script,
    )
    from plain_vit.training.data import ImageClassificationData, load_classification_data, without_unreadable
    from plain_vit.training.data.augmentation import AugmentedImages, training_transform
    from plain_vit.training.data.decoding import ProcessedImages, ReadableImages
    from plain_vit.training.data.identity import dataset_identity, labels_hash
    from plain_vit.training.data.inputs import NoiseInputs
    from plain_vit.training.data.streaming import StreamedBatches, StreamedImages
    from plain_vit.training.evaluation_sets import named_sets, open_evaluation_set
    from plain_vit.training.hardware.memory import fitting_accumulation, training_trial
    from plain_vit.training.hardware.throughput import flops_per_image
    from plain_vit.training.learner import Learner
    from plain_vit.training.loop import Batch, Loop, Schedule, make_schedule, start_run
    from plain_vit.training.models import (
        Teacher,
        checkpoint_hints,
        head_of,
        load_classifier,
        load_teacher,
        set_head_bias,
        with_lora,
        with_native_aspect_ratio,
        with_test_crop,
        with_test_size,
    )
    from plain_vit.training.optimization import freeze, freeze_unused
    from plain_vit.training.reports.facts import describe_plan, model_facts, report_facts
    from plain_vit.training.reports.publishing import publish
    from plain_vit.training.reports.report import predictions_of, write_report
    from plain_vit.training.reports.show_batch import check_picture, show_batch
    from plain_vit.training.reports.snapshots import Snapshots
    from plain_vit.training.reports.trials import Outcome, check_trial, find_learning_rate, overfit, with_rate
    from plain_vit.training.run.dry_run import text_tables
    from plain_vit.training.run.folder import RunFolder, deciding_options, default_options, write_file
    from plain_vit.training.tasks.classification import Classification, ImageTask
    from plain_vit.training.tasks.vectors import VectorPrediction, check_vector_options


class FineTuning:
    """A run: its data, models, task and loop; errors in them are reported before anything is written.

    Args:
        arguments: as on the command line.
        data: the dataset (default: the dataset that the arguments name).
    """

    def __init__(self, arguments: FinetuneArguments, data: ImageClassificationData | None = None) -> None:
        self.arguments, self.since = arguments, time.perf_counter()
        check_outputs(arguments)
        self.accelerator, self.loading = start_run(arguments)
        processes = self.accelerator.num_processes
        data = data or open_data(arguments)
        common = {**keywords(arguments, ImageOptions, LabelOptions), "problem_type": arguments.problem_type}
        sets = named_sets(arguments.eval_dataset, [*data.splits])
        others = {name: open_evaluation_set(data.label_names, **common | where).rows for name, where in sets.items()}
        data = replace(data, others=others)
        schedule = make_plan(arguments, data, processes)
        model, self.image_processor, teacher = make_models(arguments, data)
        self.transform = training_transform(self.image_processor, **keywords(arguments, TransformOptions))
        # For evaluation and for the saved model.
        self.evaluated_processor = self.image_processor
        if arguments.test_size is not None:
            size = sides(arguments, "test_size")
            self.evaluated_processor = with_test_size(self.image_processor, model, size)
        if arguments.corrupted == "skip":
            data = without_unreadable(data, self.evaluated_processor, arguments.problem_type)
        self.data = data
        kind: Callable[..., ImageTask[Any]] = VectorPrediction
        if arguments.problem_type == "single_label_classification":
            kind = partial(Classification, teacher=teacher)
        self.task: ImageTask[Any] = kind(
            model, self.evaluated_processor, data, arguments, self.transform.normalize_batch
        )
        learner = Learner(model, arguments, self.accelerator, **keywords(arguments, LearnerOptions))
        decides, defaults = deciding(arguments, data, processes), default_options(arguments)
        self.loop: Loop[Any] = Loop(
            self.task,
            learner,
            schedule,
            RunFolder(arguments.output_dir, self.accelerator, decides, resume=arguments.resume, defaults=defaults),
            arguments,
            watched_name=data.watched,
            early_stopping=arguments.early_stopping,
            skip_unreadable=arguments.corrupted == "skip",
        )

    def show_plan(self) -> None:
        """Print what the run would do, and draw its first batch with `--show_batch`."""
        if self.arguments.show_batch is not None:
            self.draw_first_batch(self.arguments.show_batch)
        plan = describe_plan(
            self.arguments, self.data, self.loop.schedule, self.loop.learner, self.task, self.image_processor
        )
        self.accelerator.print(text_tables(plan))

    def draw_first_batch(self, file: str) -> None:
        """Draw the first batch that the first process would train on."""
        self.task.begin_step(0)
        batch = next(iter(self.training_batches({})))
        if broken := [name for name in batch["broken"] if name]:
            self.accelerator.print(f"replaced, because it cannot be read: {', '.join(broken)}")
        if self.accelerator.is_main_process:
            inputs, targets = self.task.inputs(batch)
            show_batch(file, self.task.resized(inputs), targets, self.image_processor, self.data.label_names)
            self.accelerator.print(f"the first batch is drawn in {file}")

    def find_micro_batches(self) -> None:
        """Raise the number of micro-batches per optimizer step until training fits into memory."""
        accelerator = self.accelerator
        trial = training_trial(self.loop.learner.model, accelerator, NoiseInputs(self.image_processor))
        at_least, images = accelerator.gradient_accumulation_steps, self.arguments.batch_size
        accelerator.gradient_accumulation_steps = fitting_accumulation(
            trial, accelerator, images=images // accelerator.num_processes, at_least=at_least
        )

    def count_operations(self) -> None:
        """Count the operations of an image, unless one process may not hold the whole model."""
        if self.arguments.shard:
            return
        model, noise, device = self.loop.learner.model, NoiseInputs(self.image_processor), self.accelerator.device
        model.to(device)
        self.loop.flops = flops_per_image(model, lambda: model(**send_to_device(noise(1), device)).logits)

    def training_batches(self, loading: dict[str, Any]) -> Iterable[Batch]:
        """Return the micro-batches of this process, starting at the current step of the run."""
        arguments, train, loop, accelerator = self.arguments, self.data.train, self.loop, self.accelerator
        if arguments.streaming:
            accumulation = accelerator.gradient_accumulation_steps
            streamed = StreamedImages(
                train,
                self.transform,
                classes=len(self.data.label_names),
                batch_size=loop.micro_batch,
                batches_before=loop.step * accumulation,
                buffer=arguments.stream_buffer,
                process=(accelerator.process_index, accelerator.num_processes),
                seed=arguments.seed,
                positions=loop.stream_positions,
            )
            count = (loop.schedule.total_steps - loop.step) * accumulation
            return StreamedBatches(streamed, accelerator, count=count, **loading)
        return loop.batches(
            AugmentedImages(train, self.transform, arguments.seed),
            balanced_by=train["label"] if arguments.class_balance == "sampler" else None,
            repeats=arguments.repeated_augmentation,
            followed=arguments.mixup > 0 or arguments.cutmix > 0,
            collate=self.transform.collate,
            **loading,
        )

    def evaluation_batches(self) -> dict[str, DataLoader]:
        """Return the loaders of the validation split, the held-out split and the other sets, by name."""
        data = self.data
        for broken in data.unreadable:
            self.accelerator.print(f"omitted from the evaluation, because it cannot be read: {broken}")
        options = {"batch_size": self.arguments.eval_batch_size, **self.loading}
        collate = ProcessedImages(self.evaluated_processor)
        evaluated = {name: data.splits[name] for name in (data.watched, data.held_out)} | {**data.others}
        return {
            name: self.accelerator.prepare(DataLoader(ReadableImages(rows), collate_fn=collate, **options))
            for name, rows in evaluated.items()
        }

    def results_of(self, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
        """Return the content of `results.json`, from the results on the held-out split and on the other sets."""
        return {
            **{f"{where}_{name}": value for where, each in outcomes.items() for name, value in each.values.items()},
            "images_evaluated": outcomes[self.data.held_out].count,
            "unreadable_images_left_out": len(self.data.unreadable),
            "unreadable_images_replaced": self.loop.unreadable.count_everywhere(self.accelerator),
            **self.loop.figures(since=self.since),
        }

    def describe_result(self, snapshots: Snapshots, model: nn.Module, result: Outcome, results: dict[str, Any]) -> None:
        """Write predictions, report and model card, and push the folder if requested."""
        arguments, data, path = self.arguments, self.data, self.loop.run.path
        held_out = data.splits[data.held_out]
        write_file(path / "predictions.csv", predictions_of(result, held_out, data.label_names))
        if arguments.report:
            facts, shown = report_facts(arguments, data, self.loop, results), self.accelerator.unwrap_model(model)
            page = write_report(snapshots, facts, result, held_out, split_name=data.held_out, model=shown)
            print(f"the report is {page}")
        print(
            f"{data.held_out} {result.summary}, on {result.count} of {len(held_out)} images, after "
            f"{results['seconds']} s; the model is in {self.loop.run.place}"
        )
        card = model_facts(arguments, data, self.loop, result)
        pushed = publish(path, card, repo_id=arguments.push_to_hub, private=arguments.hub_private, say=print)
        if pushed is not None:
            print(str(pushed))


def finetune(
    arguments: FinetuneArguments,
    data: ImageClassificationData | None = None,
    *,
    described: bool = True,
    on_score: Callable[[int, float], None] | None = None,
) -> Outcome:
    """Run the fine-tuning.

    Args:
        arguments: as on the command line.
        data: the dataset (default: the dataset that the arguments name).
        described: whether to write predictions, report and model card, and print where they are; False in a trial.
        on_score: called with the step and the score of each evaluation of the validation split; what it raises ends
            the run.

    Returns:
        The result of the saved model on the held-out split: `test`, or else the validation split.
    """
    if arguments.learning_rate == "auto":
        data = data or open_data(arguments)
        arguments = with_rate(arguments, data, partial(finetune, described=False))
    run = FineTuning(arguments, data)
    loop, accelerator, data = run.loop, run.accelerator, run.data
    if arguments.dry_run:
        run.show_plan()
        sys.exit()
    if on_score is not None:
        if loop.chooses_by is None:
            raise TrainingError("A search needs a validation split to choose by: add --validation_fraction 0.1.")
        loop.on_score = on_score

    # Start the run, or resume it from its newest checkpoint.
    run.count_operations()
    loop.begin()
    every = arguments.picture_every if arguments.report else 0
    snapshots = Snapshots(loop, data.splits[data.watched], data.label_names, run.evaluated_processor, every=every)
    if arguments.auto_micro_batch:
        run.find_micro_batches()
    batches = run.training_batches(run.loading)
    evaluated = run.evaluation_batches()
    accelerator.print(f"{data.train_images} images of {len(data.label_names)} classes")
    loop.train(batches, evaluated[data.watched], on_step=snapshots.take)

    # The weights selected on the validation split (or else the last ones), and their results on the held-out split.
    final = loop.final_model()
    outcomes = {name: loop.judge(final, evaluated[name]) for name in (data.held_out, *data.others)}
    result, results = outcomes[data.held_out], run.results_of(outcomes)
    for name in data.others:
        accelerator.print(f"{name} {outcomes[name].summary}, on {outcomes[name].count} images")
    loop.finish(final, results)
    if accelerator.is_main_process and described:
        run.describe_result(snapshots, final, result, results)
    loop.run.upload()
    if described or on_score is not None:  # after a trial of rates, the run follows in the same processes
        accelerator.end_training()
    accelerator.free_memory()
    return result


def check_outputs(arguments: FinetuneArguments) -> None:
    """Refuse pictures and Hub repositories that cannot be written."""
    if arguments.show_batch is not None:
        check_picture(arguments.show_batch, "show_batch")
    if arguments.push_to_hub is not None:
        check_repository(arguments.push_to_hub)


def open_data(arguments: FinetuneArguments) -> ImageClassificationData:
    """Open the dataset."""
    if arguments.problem_type != "single_label_classification":
        check_vector_options(arguments)
    return load_classification_data(**keywords(arguments, LoadedOptions), seed=arguments.seed)


def make_plan(arguments: FinetuneArguments, data: ImageClassificationData, processes: int) -> Schedule:
    """Plan the steps, and refuse combinations that cannot work."""
    if arguments.repeated_augmentation > 1:
        check_copies(arguments)
    if arguments.early_stopping is not None and data.validation is None:
        raise TrainingError("early_stopping needs a validation split to choose by: add --validation_fraction 0.1.")
    if len(data.splits) == 1:
        raise TrainingError("The dataset has only one split and nothing to evaluate on: add --validation_fraction 0.2.")
    return make_schedule(arguments, data.train_images, processes)


def check_copies(arguments: FinetuneArguments) -> None:
    """Refuse repeated augmentation if copies cannot share a batch or would be identical."""
    copies = arguments.repeated_augmentation
    if arguments.batch_size < copies:
        raise TrainingError(f"batch_size is {arguments.batch_size}: expected at least the {copies} copies of an image.")
    cropped = arguments.crop_scale < 1 or arguments.resize_to is not None or arguments.crop_padding
    varied = ("horizontal_flip", "vflip", "color_jitter", "grayscale_prob", "gaussian_blur_prob", "random_erasing")
    if not (cropped or arguments.augmentation != "none" or any(getattr(arguments, name) for name in varied)):
        raise TrainingError(
            f"Without augmentation the {copies} copies of each image would be identical: add --crop_scale 0.08 or "
            "another augmentation, or omit --repeated_augmentation."
        )


def make_models(arguments: FinetuneArguments, data: ImageClassificationData) -> tuple[nn.Module, Any, Teacher | None]:
    """Open the model with its image processor, freeze parameters that are not trained, and open the teacher."""
    model, image_processor = load_classifier(
        arguments.model,
        data.label_names,
        from_scratch=arguments.from_scratch,
        trust_remote_code=arguments.trust_remote_code,
        hints=checkpoint_hints(arguments.model_hints),
        image_size=None if arguments.image_size is None else sides(arguments, "image_size"),
        problem_type=arguments.problem_type,
        keep_head=arguments.keep_head,
        initialization=arguments.initialization,
        position_resampling=arguments.position_resampling,
        hidden_dropout_prob=arguments.dropout,
        drop_path_rate=arguments.drop_path_rate,
    )
    if arguments.native_aspect_ratio:
        image_processor = with_native_aspect_ratio(image_processor, model, arguments.max_num_patches)
    elif {"spatial_shapes", "image_sizes"} & {*image_processor.model_input_names}:
        raise TrainingError(f"{arguments.model} keeps the aspect ratio of images: add --native_aspect_ratio.")
    if arguments.test_crop is not None:
        image_processor = with_test_crop(image_processor, arguments.test_crop)
    if arguments.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise TrainingError(f"{type(model).__name__} has no gradient checkpointing: omit the option.")
        model.gradient_checkpointing_enable()
    if arguments.head_bias is not None:
        set_head_bias(model, arguments.head_bias)
    elif arguments.problem_type == "regression" and not arguments.keep_head:
        set_head_bias(model, torch.tensor(data.train["label"][:]).mean(dim=0))
    head = head_of(model)
    if arguments.freeze:
        freeze(model, arguments.freeze, head)
    teacher = None
    if arguments.teacher is not None:
        teacher = load_teacher(
            arguments.teacher, image_processor, data.label_names, trust_remote_code=arguments.trust_remote_code
        )
    trained: nn.Module = model
    if arguments.lora_rank is not None:
        trained = with_lora(
            model, rank=arguments.lora_rank, alpha=arguments.lora_alpha, targets=arguments.lora_targets, head=head
        )
    if not isinstance(model, PlainViTPreTrainedModel):  # plain ViTs use every parameter
        freeze_unused(trained, NoiseInputs(image_processor)(1))
    return trained, image_processor, teacher


def sides(arguments: FinetuneArguments, name: str) -> tuple[int, int]:
    """Return the height and width of an option that takes one or two numbers."""
    size = getattr(arguments, name)
    if len(size) not in (1, 2):
        raise TrainingError(f"{name} is {size}: expected one number, or height and width.")
    return size[0], size[-1]


def deciding(arguments: FinetuneArguments, data: ImageClassificationData, processes: int) -> dict[str, Any]:
    """Return the options, images and labels that determine the result and must not change on resuming."""
    if arguments.streaming:
        readers = f"{processes} processes with {arguments.num_workers} workers each"
        images = {"readers_of_the_stream": readers}
    else:
        images = {"training_labels": labels_hash(data.train)}
    return deciding_options(
        arguments,
        dataset=dataset_identity(arguments.dataset, data.train),
        training_images=data.train_images,
        classes=data.label_names,
        **images,
    )


def start(arguments: FinetuneArguments) -> None:
    """Run the fine-tuning, or a trial of it."""
    trials = {"overfit_batch": overfit, "lr_find": find_learning_rate}
    for name, trial in trials.items():
        if getattr(arguments, name) is not None:
            check_trial(arguments, name)
            trial(arguments, open_data(arguments), partial(finetune, described=False))
            return
    finetune(arguments)


def main() -> None:
    run_script(start, FinetuneArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)
