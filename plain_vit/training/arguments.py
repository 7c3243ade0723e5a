"""Options of the training scripts, in groups; they are read from the command line, a file and recipes."""

import dataclasses
import errno
import json
import math
import os
import re
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml

from ..conversion.catalogue import named_by
from ..errors import AmbiguousCheckpointError, DataError, OutputError, PlainViTError, TrainingError, told
from ..files.kinds import WEIGHTS, path_of
from ..system.command_line import Parser, Show, typed_program
from .recipes import RECIPES, describe_recipes, recipe_options

Options = TypeVar("Options")


MOST = 10**9  # upper limit of every count


@dataclass(frozen=True)
class Range:
    """Range of a numeric option, or of each number in a list; numbers must be finite.

    Args:
        least: Lower end.
        most: Upper end.
        text: The expected range, as an error describes it.
        without: Ends that are excluded.
    """

    least: float
    most: float
    text: str
    without: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and math.isfinite(value) and value not in self.without


# Types of numeric options.
Count = Annotated[int, Range(1, MOST, f"1 or more, up to {MOST:,}")]
Natural = Annotated[int, Range(0, MOST, f"0 or more, up to {MOST:,}")]
Pixels = Annotated[int, Range(1, 2**16, f"1 or more, up to {2**16:,}")]
Magnitude = Annotated[int, Range(0, 30, "0 to 30")]
Seed = Annotated[int, Range(0, 2**32 - 1, f"0 to {2**32 - 1:,}")]
Epochs = Annotated[float, Range(0, 10**6, f"a positive number up to {10**6:,}", without=(0,))]
Finite = Annotated[float, Range(-math.inf, math.inf, "a finite number")]
Amount = Annotated[float, Range(0, math.inf, "0 or more, and finite")]
Positive = Annotated[float, Range(0, math.inf, "a positive number, and finite", without=(0,))]
Share = Annotated[float, Range(0, 1, "0 to 1")]
Part = Annotated[float, Range(0, 1, "a positive number up to 1", without=(0,))]
BelowOne = Annotated[float, Range(0, 1, "at least 0 and less than 1", without=(1,))]
Between = Annotated[float, Range(0, 1, "more than 0 and less than 1", without=(0, 1))]


@cache
def ranges_of(kind: type) -> dict[str, Range | None]:
    """Return the range of each option of a script; None for an option that is not a number."""
    return {name: _range_in(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _range_in(hint: Any) -> Range | None:
    if isinstance(hint, Range):
        return hint
    return next(filter(None, map(_range_in, get_args(hint))), None)


@dataclass(kw_only=True)
class Group:
    """A group of options, checked on construction wherever their values come from."""

    def __post_init__(self) -> None:
        """Refuse numbers outside the range of their option.

        Raises:
            TrainingError: A number is out of range.
        """
        kind: Any = type(self)
        for name, numbers in ranges_of(kind).items():
            value = getattr(self, name)
            for number in value if isinstance(value, list) else [value]:
                is_free = number is None or (name, number) == ("learning_rate", "auto")
                if numbers is not None and not is_free and number not in numbers:
                    raise TrainingError(f"{name} is {value}: expected {numbers.text}.")


class HelpText(str):
    """Help text of an option that also carries its rules, as the parser passes all other metadata to argparse."""

    needs: str = ""
    excludes: Mapping[str, str] = {}


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    needs: str = "",
    excludes: Mapping[str, str] = HelpText.excludes,
) -> Any:
    """Declare an option with its help text and its rules, which `check_options` applies unless it has its default.

    A condition is the name of another option, met if that option is on, or a name with a value: `schedule=plateau`.
    It may list several names, `mixup|cutmix`, or several values, `loss=bce|bce_sum`; one of them is enough.

    Args:
        default: The default; without one, the option is required.
        help: The help text.
        needs: Condition without which the option has no effect.
        excludes: Conditions under which the option is refused, each with the text of the error. In the text, `{names}`
            stands for all options that break the rule, `{value}` for the option's value, and `{other}` for the other
            option's value.
    """
    text = HelpText(help)
    text.needs, text.excludes = needs, excludes
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


RECORDING_MODES = ("reduce-overhead", "max-autotune")  # modes of torch.compile that record CUDA graphs
RECORDS = f"compile_mode={'|'.join(RECORDING_MODES)}"

# Rules shared by several options.
NEW_HEAD = {"keep_head": "{names} is for a new head: omit it, or keep_head."}
OVERWRITTEN = {
    RECORDS: "compile_mode {other} overwrites the gradients of a micro-batch with those of the next: use one per step, "
    "or another mode."
}
CAST_ONCE = "With {}, weights are already cast once: omit --param_dtype."
GIVE_ONE = "Both {} and {{names}} are given: give one."


def _one_size(reason: str) -> dict[str, str]:
    return {"native_aspect_ratio": f"With native_aspect_ratio images have many sizes, and {{names}} {reason}: omit it."}


BLENDS = _one_size("blends images pixel by pixel")
CUTS = _one_size("cuts images to one size")
SIZED = _one_size("is one size of all images")


def _whole_gradients(what: str) -> dict[str, str]:
    return {
        "shard": f"{what} needs the whole weights in each process: omit --shard, or {what}.",
        "mixed_precision=fp16": f"{what} does not know the scale of fp16 gradients: use --mixed_precision bf16.",
    }


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
# How position embeddings are resampled; without "truncate" and "bucketed", which give patches those of others.
Initialization = Literal["transformers", "timm", "google", "vit_pytorch"]
Resampling = Literal[
    "bicubic", "bicubic_antialias", "bicubic_align_corners", "bilinear", "bilinear_antialias", "bilinear_align_corners"
]  # fmt: skip

# Groups shared by several scripts.


@dataclass(kw_only=True)
class WeightsOptions(Group):
    """The checkpoint to open."""

    model: str = option(help="transformers folder or Hub id, another library's checkpoint, or a name (plain-vit list)")
    model_hints: list[str] | None = option(
        None, "name=value: settings that another library's checkpoint lacks, such as num_attention_heads=4"
    )


@dataclass(kw_only=True)
class CheckpointOptions(WeightsOptions):
    """The model to open, of any class."""

    trust_remote_code: bool = option(False, "run the code that comes with a checkpoint")


@dataclass(kw_only=True)
class ImageOptions(Group):
    """The dataset to open."""

    dataset: str = option(
        help="digits, glyphs; a folder of images, of parquet, .tar or IDX files, or of save_to_disk; a pattern such as "
        "'images/*.jpg'; s3://, gs:// or hf://datasets/ of such files, without labels; fashion_mnist, "
        "cifar10, cifar100, imagenet-1k, pets, flowers, food101, mnist, beans; or a Hub name"
    )
    dataset_subset: str | None = option(None, "configuration of a dataset that has several")
    image_column: str | None = option(None, "name of the column (default: found by its type)")


@dataclass(kw_only=True)
class LabelOptions(Group):
    """The labels of the dataset."""

    label_column: str | None = option(None, "name of the column (default: found by its type)")
    label_names: str | None = option(None, "text file with one class per line, for labels that are only numbers")


@dataclass(kw_only=True)
class EvaluationSetOptions(Group):
    """Sets to evaluate on beside the dataset."""

    eval_dataset: list[str] = option([], "name=DATASET or name=DATASET@SPLIT, repeatable: further sets to evaluate on")


@dataclass(kw_only=True)
class SplitOptions(Group):
    """The splits for training and evaluation."""

    train_split: str | None = option(
        None, "training split, or several joined by + (default: train); of a folder: folders in it, or all"
    )
    validation_split: str | None = option(None, "split for selecting the best weights (default: found by its name)")
    test_split: str | None = option(None, "held-out split (default: test, if there is one)")


@dataclass(kw_only=True)
class ProcessOptions(Group):
    """Processes and precision."""

    num_workers: Natural = option(0, "data loader workers per process")
    num_processes: Count | None = option(None, "fail with another number of processes")
    mixed_precision: Literal["no", "bf16", "fp16"] = option("no", "precision of the forward and backward passes")


@dataclass(kw_only=True)
class ForwardOptions(ProcessOptions, LabelOptions, ImageOptions, CheckpointOptions):
    """The images and the model, for scripts that only evaluate."""

    batch_size: Count = option(256, "images per forward pass, over all processes")


@dataclass(kw_only=True)
class BulkOptions(ProcessOptions, ImageOptions, WeightsOptions):
    """The images, the model and the output, for scripts that run a model over many images."""

    split: str | None = option(
        None, "split (default: all files of a folder of images, tables or shards; else train, or the only one)"
    )
    streaming: bool = option(False, "stream the dataset instead of storing it first")
    batch_size: Count = option(32, "images per forward pass of each process")
    shard_size: Count = option(1000, "images per file; a killed run loses at most one file of each process")
    corrupted: Literal["stop", "skip"] = option(
        "stop", "what to do about an image that cannot be read; those left out are named in manifest.json"
    )
    engine: Literal["torch", "openvino", "onnx"] = option(
        "torch", "what computes, on a CPU; or give --model a folder of `plain-vit export`, which may be in int8"
    )
    output_dir: str = option(help="new or empty folder, also s3://, gs:// or hf://datasets/")
    resume: bool = option(False, "go on with a run that ended early: compute only what is missing")
    part: str | None = option(
        None, "3/100: the third of 100 jobs, which share the work and output_dir, such as those of a SLURM array"
    )


@dataclass(kw_only=True)
class StepOptions(Group):
    """Optimization: steps, batch size, optimizer, learning rate schedule."""

    epochs: Epochs | None = option(None, "passes over the training images (default without --steps: 10)")
    steps: Count | None = option(
        None,
        "optimizer steps, instead of epochs",
        excludes={"epochs": "Both steps ({value}) and epochs ({other}) are given: give one."},
    )
    batch_size: Count = option(64, "images per optimizer step, over all processes and micro-batches")
    gradient_accumulation_steps: Count = option(1, "micro-batches per optimizer step", excludes=OVERWRITTEN)
    param_dtype: Literal["float32", "bf16"] = option(
        "float32",
        "bf16: with mixed_precision bf16, the blocks compute with copies of their weights instead of casting them "
        "at each operation; the weights of the optimizer stay in float32",
        excludes={
            "mixed_precision=no|fp16": "param_dtype bf16 needs mixed_precision bf16: add --mixed_precision bf16.",
            **{name: CAST_ONCE.format(name) for name in ("shard", "compile")},
        },
    )
    optimizer: str = option(
        "adamw",
        "of torch.optim, in lower case (the paper: sgd), or timm:NAME; muon is for the matrices in the blocks, "
        "with AdamW for the rest",
    )
    learning_rate: Amount | Literal["auto"] = option(
        1e-3, "peak learning rate; auto: that of a trial with rising rates for this batch size, see lr_find"
    )
    base_batch_size: Count | None = option(
        None, "batch size of learning_rate and min_learning_rate: both scale with batch_size (default: they do not)"
    )
    min_learning_rate: Amount = option(
        0.0, "learning rate at the end of a cosine or linear schedule", needs="schedule=cosine|linear|plateau"
    )
    momentum: BelowOne = option(0.9, "momentum of SGD and Muon; first beta of Adam")
    betas: list[BelowOne] | None = option(None, "both betas of Adam and similar (default: momentum and 0.999)")
    epsilon: Amount | None = option(None, "epsilon of the optimizer (default: its own)")
    weight_decay: Amount = option(0.05, "for matrices and kernels only")
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant", "plateau"] = option(
        "cosine", "learning rate schedule after the warm-up; plateau: lower where evaluations no longer improve"
    )
    restarts: Natural = option(
        0, "times that a cosine schedule starts again at the peak, in cycles of equal length", needs="schedule=cosine"
    )
    cooldown_steps: Natural = option(
        0,
        "last steps, in which a constant or inverse_sqrt schedule falls linearly to 0; a run can be lengthened "
        "up to them",
        needs="schedule=constant|inverse_sqrt",
    )
    plateau_patience: Count = option(
        3, "evaluations in a row without a better one before plateau lowers the rate", needs="schedule=plateau"
    )
    plateau_factor: Share = option(0.1, "factor by which plateau lowers the rate", needs="schedule=plateau")
    warmup_fraction: Share = option(0.1, "fraction of the optimizer steps used for warm-up")
    warmup_steps: Natural | None = option(None, "warm-up as a number of optimizer steps")
    max_grad_norm: Amount = option(1.0, "norm to which gradients are clipped; 0: no clipping")
    skip_nonfinite: Natural = option(
        0,
        "steps in a row to leave out where the gradients are not finite, instead of stopping at the first",
        excludes={"mixed_precision=fp16": "fp16 leaves out such steps itself: omit --skip_nonfinite."},
    )
    clip_mode: Literal["norm", "agc"] = option(
        "norm",
        "agc: max_grad_norm, such as 0.01, is relative to the norm of the weights of each unit (NFNets)",
        needs="max_grad_norm",
        excludes=_whole_gradients("clip_mode agc"),
    )
    sharpness_radius: Amount = option(
        0.0,
        "take the gradients where the loss is highest within this distance (SAM), such as 0.1; 0: off",
        excludes=_whole_gradients("sharpness_radius"),
    )
    tf32: bool = option(True, "on GPUs, multiply float32 matrices in TF32 while training; never in evaluations")

    @property
    def peak_learning_rate(self) -> float:
        """Return the peak learning rate for the batch size.

        Raises:
            TrainingError: It is not known yet.
        """
        if isinstance(self.learning_rate, str):
            raise TrainingError(f"learning_rate is {self.learning_rate}: give a number; auto is for fine-tuning.")
        return self.learning_rate * self._share_of_base

    @property
    def lowest_learning_rate(self) -> float:
        """Return the final learning rate of the schedule for the batch size."""
        return self.min_learning_rate * self._share_of_base

    @property
    def lowest_factor(self) -> float:
        """Return the final learning rate as a fraction of the peak."""
        return self.lowest_learning_rate / self.peak_learning_rate if self.min_learning_rate else 0.0

    @property
    def _share_of_base(self) -> float:
        return 1 if self.base_batch_size is None else self.batch_size / self.base_batch_size


@dataclass(kw_only=True)
class FolderOptions(ProcessOptions):
    """Run folder, logging, evaluation and checkpoints."""

    output_dir: str = option(help="new or empty folder, also s3://, gs:// or hf://, copied there beside training")
    resume: bool = option(False, "resume from the newest checkpoint in output_dir")
    evaluations: Count | None = option(None, "number of evaluations, evenly spaced (default: once per epoch)")
    log_every: Count = option(10, "optimizer steps between logged values")
    checkpoint_every: Count | None = option(None, "optimizer steps between checkpoints (default: at each evaluation)")
    checkpoint_minutes: Positive | None = option(
        None, "minutes after which a further checkpoint is written", needs="checkpoints_kept"
    )
    max_time: str | None = option(
        None, "time such as 11:45:00 after which the run saves and ends with exit status 75, for --resume"
    )
    checkpoints_kept: Natural = option(2, "number of checkpoints to keep; 0: write none")
    best_kept: Count = option(
        1, "models with the best results on the validation split to keep; more than one: by step, in best_models"
    )
    profile: Natural = option(
        0, "steps to profile after the first three: a trace, a table and a picture in output_dir/profile; 0: none"
    )
    report_to: str = option("none", "tensorboard, trackio, wandb, mlflow, comet_ml and clearml, separated by commas")
    seed: Seed = option(0, "random seed")


@dataclass(kw_only=True)
class LoopOptions(FolderOptions, StepOptions):
    """Options of the training loop, for every task."""

    def __post_init__(self) -> None:
        """Begin `max_time`."""
        super().__post_init__()
        self.until = time.perf_counter() + (math.inf if self.max_time is None else seconds_of(self.max_time))


def seconds_of(text: str) -> int:
    """Return the seconds of a time such as 11:45:00.

    Raises:
        TrainingError: The text is no such time.
    """
    if not (match := re.fullmatch(r"(\d{1,4}):([0-5]\d):([0-5]\d)", text)):
        raise TrainingError(f"max_time is {text!r}: expected hours, minutes and seconds, such as 11:45:00.")
    hours, minutes, seconds = map(int, match.groups())
    return (hours * 60 + minutes) * 60 + seconds


# Groups of fine-tuning.


@dataclass(kw_only=True)
class ModelOptions(CheckpointOptions):
    """The model to train."""

    _argument_group_name: ClassVar[str] = "model"

    model: str = option(
        help="transformers folder or Hub id, another library's checkpoint, or a preset to train from scratch"
    )
    from_scratch: bool = option(False, "use only the architecture, with new weights", excludes=NEW_HEAD)
    initialization: Initialization | None = option(
        None, "package whose new weights from_scratch draws (default: that of the model's config)", needs="from_scratch"
    )
    keep_head: bool = option(False, "keep the head, for the same classes, instead of a new one of zeros")
    freeze: list[str] = option(
        [], "parameters to freeze: backbone (all but the head), the first N blocks, or names (a.*.weight)"
    )
    lora_rank: Count | None = option(None, "train LoRA adapters of this rank on the attention (peft)")
    lora_alpha: Count = option(16, "scale of the adapters: lora_alpha / lora_rank", needs="lora_rank")
    lora_targets: list[str] = option([], "layers with adapters (default: queries and values)", needs="lora_rank")
    gradient_checkpointing: bool = option(False, "save memory by recomputing the forward pass")
    image_size: list[Pixels] | None = option(
        None, "training size in pixels: one number, or height and width; positions are resampled once", excludes=SIZED
    )
    position_resampling: Resampling | None = option(
        None, "how position embeddings are resampled to other sizes (default: the model's own way)"
    )
    test_size: list[Pixels] | None = option(
        None,
        "size of evaluated images, where it differs from the training size (FixRes), which the model keeps",
        excludes=SIZED,
    )
    native_aspect_ratio: bool = option(
        False, "keep the aspect ratio of images: train, evaluate and save with patches of images of many sizes"
    )
    max_num_patches: Count | None = option(
        None,
        "most patches of an image with native_aspect_ratio (default: those of the model's image size)",
        needs="native_aspect_ratio",
    )
    test_crop: Part | None = option(
        None,
        "evaluate the centre of images: its side divided by the shorter edge, such as 0.875 (default: the image "
        "processor's geometry)",
        excludes=CUTS,
    )
    dropout: BelowOne | None = option(None, "dropout after each dense layer (default: the model's)")
    drop_path_rate: BelowOne | None = option(None, "stochastic depth of the last block (default: the model's)")
    head_bias: Finite | None = option(
        None, "initial bias of the new head (default: the model's, else 0)", excludes=NEW_HEAD
    )


@dataclass(kw_only=True)
class LoadedOptions(SplitOptions, LabelOptions, ImageOptions):
    """The arguments of `load_classification_data`."""

    problem_type: ProblemType = option(
        "single_label_classification",
        "one label per image; a list of labels per image; a number, or a list of numbers, per image",
    )
    validation_fraction: BelowOne = option(0.0, "fraction of the training split to use for validation")
    shots_per_class: Count | None = option(None, "number of training images per class (default: all)")
    max_images: Count | None = option(None, "images of each split, drawn at random, for a quick trial (default: all)")
    streaming: bool = option(False, "stream the training images instead of storing them first")
    stream_images: Count | None = option(None, "number of images, if the stream does not say", needs="streaming")


@dataclass(kw_only=True)
class DataOptions(LoadedOptions):
    """The training data."""

    _argument_group_name: ClassVar[str] = "data"

    corrupted: Literal["stop", "skip"] = option(
        "stop", "on a corrupted image: stop the run, or skip, report and count it"
    )
    stream_buffer: Count = option(
        10_000, "images of a stream that are shuffled together, by each worker", needs="streaming"
    )


@dataclass(kw_only=True)
class LearnerOptions(Group):
    """Layer decay, moving average, sharding and compilation."""

    layer_decay: Amount = option(1.0, "learning rate of a block, relative to the next block")
    ema_decay: BelowOne | None = option(None, "evaluate and save a moving average of the weights with this decay")
    model_ema_warmup: bool = option(False, "timm's warm-up of the average", needs="ema_decay")
    shard: bool = option(
        False,
        "shard weights, optimizer states and averages over the processes (FSDP2)",
        excludes={
            RECORDS: "compile_mode {other} may read weights that --shard has moved: omit one of them.",
            "mixed_precision=fp16": "--shard does not scale the losses of fp16: use --mixed_precision bf16.",
            "auto_micro_batch": "--shard cannot try what fits into memory: omit --auto_micro_batch, and set "
            "--gradient_accumulation_steps, by what --dry_run says.",
        },
    )
    compile: bool = option(
        False, "torch.compile the model for training", excludes=_one_size("compiles the model for one size")
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "default",
        "mode of torch.compile; reduce-overhead records CUDA graphs, for models whose steps are short on a GPU",
        needs="compile",
    )


@dataclass(kw_only=True)
class OptimizationOptions(LearnerOptions, StepOptions):
    """Optimization of a classifier."""

    _argument_group_name: ClassVar[str] = "optimisation"

    recipe: list[str] = option([], "named options, overridden by others (--list_recipes); several apply in order")
    auto_micro_batch: bool = option(
        False, "before training, find the number of micro-batches that fits into memory", excludes=OVERWRITTEN
    )
    loss: Literal["cross_entropy", "bce", "bce_sum", "mse", "l1", "smooth_l1"] | None = option(
        None,
        "bce: binary cross-entropy, averaged over the classes; bce_sum: summed over them; mse, l1, smooth_l1: for "
        "regression (default: cross_entropy; with several labels bce; regression mse)",
    )
    bce_target_threshold: Share | None = option(
        None,
        "binary cross-entropy: a class whose share of a blended label is above this counts in full, before "
        "label_smoothing (timm smooths before, and this then removes it)",
        excludes={
            "loss=None|cross_entropy": "With the loss cross_entropy, {names} has no effect: omit it, or set --loss bce."
        },
    )
    class_balance: Literal["none", "loss", "sampler"] = option(
        "none",
        "balance classes in the loss, or by sampling rare ones more often",
        excludes={"streaming": "The classes of a stream are not known in advance: omit --class_balance."},
    )
    teacher: str | None = option(
        None,
        "classifier of the same classes for distillation; a distillation token learns from it alone (DeiT)",
        excludes=_one_size("needs the pixels of images of one size"),
    )
    distillation: Literal["soft", "hard"] = option(
        "soft", "distil the teacher's probabilities, or its decisions", needs="teacher"
    )
    distillation_weight: Share = option(0.5, "weight of the teacher in the loss", needs="teacher")
    distillation_temperature: Positive = option(1.0, "temperature of soft distillation", needs="teacher")
    label_smoothing: Share = option(0.1, "fraction of the target spread over all classes")


@dataclass(kw_only=True)
class TransformOptions(Group):
    """Augmentation of single images."""

    crop_scale: Part = option(
        1.0, "smallest fraction of the area that a random crop keeps; 1: resize and crop like the image processor"
    )
    resize_to: Pixels | None = option(
        None, "resize to this many pixels, then take a random crop of the model's size", excludes=CUTS
    )
    crop_padding: Natural = option(
        0,
        "resize the shorter edge, pad with this many pixels, then take a random crop of the model's size",
        excludes=CUTS,
    )
    train_interpolation: Literal["random", "bilinear", "bicubic"] | None = option(None, "default: the processor's")
    horizontal_flip: Share = option(0.0, "probability of the operation")
    vflip: Share = option(0.0, "probability of a vertical flip")
    augmentation: Literal["none", "affine", "randaugment", "autoaugment", "trivialaugment", "threeaugment"] = option(
        "none", "affine: for characters"
    )
    magnitude_scale: Literal["timm_increasing", "timm", "big_vision", "torchvision"] = option(
        "timm_increasing", "package whose randaugment is used: its operations, and the strength of a magnitude"
    )
    magnitude: Magnitude = option(9, "magnitude of randaugment; full strength at 10, in torchvision at 30")
    magnitude_std: Amount = option(0.0, "standard deviation of the magnitude, with the scales of timm")
    augmentation_layers: Natural = option(2, "operations per image of randaugment")
    color_jitter: list[Amount] = option([], "of brightness, contrast and saturation: 0.4; or of each, and of hue")
    grayscale_prob: Share = option(0.0, "probability of an image in grey")
    gaussian_blur_prob: Share = option(0.0, "probability of a blur of 0.1 to 2 pixels")
    random_erasing: Share = option(0.0, "probability of the operation")
    random_erasing_mode: Literal["mean", "pixel"] = option(
        "mean", "erase with the mean colour, or with normal noise in each pixel"
    )


@dataclass(kw_only=True)
class AugmentationOptions(TransformOptions):
    """Augmentation of images and batches."""

    _argument_group_name: ClassVar[str] = "augmentation"

    initial_image_size: Pixels | None = option(
        None,
        "shorter edge of the first training images, which then grow to the model's size (default: that size)",
        excludes=SIZED,
    )
    growth_epochs: Amount | None = option(None, "epochs after which they have that size", needs="initial_image_size")
    repeated_augmentation: Count = option(
        1,
        "differently augmented copies of an image in a batch; an epoch has that many times fewer images",
        excludes={"streaming": "A stream gives each image once: omit --streaming, or set --repeated_augmentation 1."},
    )
    mixup: Amount = option(0.0, "alpha of mixup; 0: off", excludes=BLENDS)
    cutmix: Amount = option(0.0, "alpha of CutMix; 0: off", excludes=BLENDS)
    mixup_probability: Share = option(1.0, "probability that the images of a step are blended", needs="mixup|cutmix")
    switch_probability: Share = option(
        0.5,
        "probability of CutMix instead of mixup, where both are on",
        needs="mixup|cutmix",
        excludes=dict.fromkeys(
            ("mixup=0", "cutmix=0"), "Without both mixup and cutmix, {names} has no effect: omit it."
        ),
    )
    mixup_off_epoch: Amount | None = option(
        None, "epochs after which images are no longer blended (default: never)", needs="mixup|cutmix"
    )


@dataclass(kw_only=True)
class RunOptions(EvaluationSetOptions, FolderOptions):
    """The run: folder, evaluation, report, upload."""

    _argument_group_name: ClassVar[str] = "run"

    best_metric: str | None = option(
        None,
        "result on the validation split by which the best weights are selected: accuracy, loss, "
        "balanced_accuracy, macro_f1, calibration_error; mean_average_precision, micro_f1; mean_absolute_error, r2 "
        "(default: accuracy; with several labels mean_average_precision; regression loss)",
    )
    early_stopping: Count | None = option(
        None, "stop after this many evaluations in a row without a better best_metric"
    )
    eval_batch_size: Count = option(64, "images per evaluation batch, in each process")
    report: bool = option(True, "write a report with curves, confusion matrix and mistakes to output_dir/report")
    picture_every: Amount = option(
        5.0, "epochs between snapshots of attention and positions for the report; 0: none", needs="report"
    )
    dry_run: bool = option(False, "print the plan and its requirements, and write nothing")
    show_batch: str | None = option(
        None,
        "PNG file: with --dry_run, draw the first training batch as the model gets it, with its labels",
        needs="dry_run",
    )
    overfit_batch: Count | None = option(
        None,
        "train this many steps on the images of one batch, say how well they are learnt, and write nothing",
        excludes={"dry_run": GIVE_ONE.format("dry_run")},
    )
    lr_find: str | None = option(
        None,
        "PNG file: draw the losses of 100 steps with rising learning rates, suggest one, and write nothing else",
        excludes={name: GIVE_ONE.format(name) for name in ("dry_run", "overfit_batch")},
    )
    license: str | None = option(
        None, "licence of the weights, for the model card (default: as in the card of the source)"
    )
    push_to_hub: str | None = option(None, "repository to upload the result to (user/name)")
    hub_private: bool = option(False, "make that repository private", needs="push_to_hub")


@dataclass(kw_only=True)
class ClassifierOptions(RunOptions, AugmentationOptions, OptimizationOptions, DataOptions, ModelOptions, LoopOptions):
    """All options of training a classifier."""


@dataclass(kw_only=True)
class SearchArguments(ClassifierOptions):
    """All options of a search for hyperparameters."""

    _argument_group_name: ClassVar[str] = "search"

    trials: Count = option(20, "trials of the whole study, which the same command continues")


# All options of each script in examples/.

# Of linear probes: learning rates as in DINOv2 (Oquab et al. 2023), and the temperature of votes as in DINO.
LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
TEMPERATURE = 0.07


@dataclass(kw_only=True)
class EvaluateArguments(EvaluationSetOptions, ForwardOptions):
    """Options of an evaluation."""

    _argument_group_name: ClassVar[str] = "evaluation"

    split: str | None = option(None, "split to evaluate on (default: test, else validation, else the only one)")
    labels_by: Literal["name", "number"] = option(
        "name", "match classes of data and model by name, or by number; integers without names are the model's"
    )
    class_map: list[str] = option([], "[name=]FILE: text with the data's name of each class of the model, one per line")
    real_labels: list[str] = option([], "[name=]FILE: JSON with the numbers of all right classes of each image (ReaL)")
    valid_labels: Literal["model", "data"] = option("model", "whose classes are predicted (data: ImageNet-A, -R)")
    group_column: str | None = option(None, "column whose values are groups of images, each with its own accuracy")
    corruptions: list[str] = option([], "all, or names such as contrast: corruptions of ImageNet-C to evaluate under")
    severities: list[Annotated[int, Range(1, 5, "1 to 5")]] = option([1, 2, 3, 4, 5], "of the corruptions")
    views: Literal["one", "flip", "ten_crop"] = option(
        "one",
        "average the probabilities of an image and its mirror image, or of centre and corners with their mirror "
        "images, of an image 8/7 as large",
    )
    output: str | None = option(None, "JSON file to write; it must not exist")
    predictions: str | None = option(
        None, "CSV file to write, with path, label and likeliest classes; it must not exist"
    )


@dataclass(kw_only=True)
class ExtractArguments(BulkOptions):
    """Options of the extraction."""

    _argument_group_name: ClassVar[str] = "features"

    feature: Literal["pooled", "cls", "mean", "cls_mean", "patches"] = option(
        "pooled",
        "what a classifier would read; the class token, the mean of the patch tokens, or both after one another; "
        "or all patch tokens, as a grid",
    )
    layers: list[Count] = option([], "blocks, from 1, whose outputs are used (default: the last, after its norm)")
    dtype: Literal["float32", "float16"] = option("float32", "of the stored features")


@dataclass(kw_only=True)
class PredictArguments(BulkOptions):
    """Options of the predictions."""

    _argument_group_name: ClassVar[str] = "predictions"

    top: Count = option(5, "classes of each image; a regression gives all its numbers")


@dataclass(kw_only=True)
class RayArguments(WeightsOptions):
    """Options of the extraction on a Ray cluster."""

    _argument_group_name: ClassVar[str] = "features"

    images: str = option(
        help="folder of image files, or of parquet files with a column of images, also s3://, gs:// or hf://datasets/"
    )
    format: Literal["images", "parquet"] = option("images", "of the files in that folder")
    image_column: str = option("image", "column of parquet files: bytes, or {bytes, path} as `datasets` stores images")
    output_dir: str = option(help="new folder, also s3://, gs:// or hf://datasets/")
    feature: Literal["pooled", "cls", "mean", "cls_mean", "patches"] = option("pooled", "as for extract_features.py")
    dtype: Literal["float32", "float16"] = option("float32", "of the stored features")
    batch_size: Count = option(32, "images per forward pass of each worker")
    corrupted: Literal["stop", "skip"] = option("stop", "what to do about an image that cannot be read")
    min_workers: Count = option(1, "workers to start with")
    max_workers: Count = option(1, "workers to go up to while images wait")
    cpus: Amount = option(1.0, "cores of a worker, and threads of its torch")
    gpus: Amount = option(0.0, "GPUs of a worker, such as 0.5")
    rows_per_file: Count = option(10_000, "least number of rows in a file")


@dataclass(kw_only=True)
class SourceOptions(SplitOptions, ForwardOptions):
    """Options of the feature extraction."""

    _argument_group_name: ClassVar[str] = "features"

    image_size: list[Pixels] | None = option(None, "in pixels (default: the model's own)")
    position_resampling: Resampling | None = option(
        None, "how position embeddings are resampled to image_size (default: the model's own way)"
    )
    validation_fraction: BelowOne = option(0.1, "fraction of the training split to use if there is none")
    output_dir: str = option(help="new or empty folder, or one with the features of the same model and data")
    seed: Seed = option(0, "of the validation split and of the order of the images")


@dataclass(kw_only=True)
class ProbeOptions(Group):
    """Options of the probes."""

    _argument_group_name: ClassVar[str] = "probe"

    recipe: list[str] = option([], "named options that the others override (--list_recipes)")
    mode: Literal["linear", "few_shot", "knn", "attentive", "both"] = option(
        "both", "linear probe, few-shot, nearest neighbours, attentive probe; both are the first two"
    )
    learning_rates: list[Amount] = option([*LEARNING_RATES], "for 256 images per step; all are trained at once")
    epochs: Epochs = option(10.0, "passes of a probe over the features")
    probe_batch_size: Count = option(256, "images per step of a probe")
    weight_decay: Amount = option(0.0, "of a probe")
    optimizer: Literal["sgd", "lars"] = option("sgd", "of the linear probe; the attentive one has AdamW")
    warmup_epochs: Amount = option(0.0, "passes over the features during which the learning rates rise")
    shots: list[Count] = option([1, 5, 10, 25], "training images per class")
    seeds: list[Seed] = option([0, 1, 2], "each selects other images")
    l2: Amount = option(2.0**10, "of the ridge regression")
    neighbors: list[Count] = option([10, 20], "training images that vote on each image")
    temperature: Positive = option(TEMPERATURE, "of the votes, which are weighted by exp(cosine / temperature)")


@dataclass(kw_only=True)
class ProbeArguments(ProbeOptions, SourceOptions):
    """All options of the script."""


@dataclass(kw_only=True)
class PretrainArguments(LoopOptions, ImageOptions, WeightsOptions):
    """Options of a run; `plain_vit/training/arguments.py` describes the inherited ones."""

    _argument_group_name: ClassVar[str] = "pre-training"

    model: str = option(help="preset, plain-vit folder or Hub id, or another library's checkpoint")
    from_scratch: bool = option(False, "use only the architecture, with new weights; always so for a preset")
    initialization: Initialization | None = option(
        None, "package whose new weights from_scratch draws (default: that of the model's config)", needs="from_scratch"
    )
    split: str | None = option(None, "training split (default: train, or else the only one)")
    validation_fraction: BelowOne = option(0.02, "fraction of its images used for validation instead of training")

    recipe: list[str] = option([], "named options, overridden by others (--list_recipes); several apply in order")
    method: Literal["masked_patches", "mae", "distillation"] = option(
        "masked_patches",
        "mae: a masked autoencoder, whose encoder sees only the patches that are not masked; distillation: the "
        "features of a teacher",
    )
    teacher: str | None = option(
        None, "model of any source that needs no hints, whose features are learnt", needs="method=distillation"
    )
    target: Literal["mean_color", "pixels"] = option(
        "mean_color", "prediction target of a patch", needs="method=masked_patches"
    )
    mask_ratio: Between | None = option(
        None, "fraction of the patches to predict (default: as published)", needs="method=masked_patches|mae"
    )
    hidden_share: Share | None = option(
        None, "fraction of those replaced by the mask token (default: as published)", needs="method=masked_patches"
    )
    exchanged_share: Share | None = option(
        None, "fraction of those replaced by another patch", needs="method=masked_patches"
    )
    mask_block: Count = option(
        1, "side, in patches, of the squares that are masked as a whole", needs="method=masked_patches|mae"
    )
    norm_pix_loss: bool = option(
        False, "predict pixels normalised by mean and standard deviation of their patch", needs="method=mae"
    )
    decoder_embed_dim: Count | None = option(
        None, "width of the decoder (default: the checkpoint's, else 512)", needs="method=mae"
    )
    decoder_depth: Count | None = option(
        None, "blocks of the decoder (default: the checkpoint's, else 8)", needs="method=mae"
    )
    decoder_num_heads: Count | None = option(
        None, "heads of the decoder (default: the checkpoint's, else 16)", needs="method=mae"
    )
    crop_scale: Part = option(1.0, "smallest fraction of the area that a random crop keeps; 1: no crop")
    horizontal_flip: Share = option(0.0, "probability")

    optimizer: str = option("adam", "of torch.optim, in lower case, or timm:NAME")
    learning_rate: Amount = option(2e-4, "peak learning rate")
    weight_decay: Amount = option(0.0, "for matrices and kernels only")


SCRIPTS: dict[str, type] = {
    "finetune_image_classification": ClassifierOptions,
    "evaluate_image_classification": EvaluateArguments,
    "extract_features": ExtractArguments,
    "predict": PredictArguments,
    "ray_features": RayArguments,
    "search_hyperparameters": SearchArguments,
    "linear_probe": ProbeArguments,
    "pretrain": PretrainArguments,
}


def keywords(options: Any, *groups: Any) -> dict[str, Any]:
    """Return all options of some groups as keyword arguments."""
    return {each.name: getattr(options, each.name) for group in groups for each in dataclasses.fields(group)}


TAKEN_BACK = "default"

PATHS = (".", "/", "~")  # how a name begins that is a path and not one of the Hub
# Of each set, the option given last replaces the others.
REPEATED = ("eval_dataset", "class_map", "real_labels")  # given again, they add to what was given before
ALTERNATIVES = (frozenset({"epochs", "steps"}), frozenset({"warmup_fraction", "warmup_steps"}))


# Errors of a disk that is full, read-only, forbidden or gone, and of an invalid path.
REFUSALS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE,
    errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


def run_script(run: Callable[[Options], object], kind: type[Options], *, description: str | None) -> None:
    """Run a script with its command line; a PlainViTError becomes one line and an exit code."""
    arguments = None
    try:
        arguments = parse_arguments(kind, sys.argv[1:], description=description)
        run(arguments)
    except AmbiguousCheckpointError as error:
        of_model = error.source is not None and error.source == getattr(arguments, "model", None)
        _end_with(error.on(_command_with_hints(arguments), as_hints=True) if of_model else error)
    except PlainViTError as error:
        _end_with(error)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        _end_with(OutputError(f"{error.filename or 'A file'} cannot be read or written: {error.strerror}."))


def check_words(arguments: Any) -> None:
    """Refuse what is wrong whatever the data: paths that do not exist, and options that contradict each other.

    Raises:
        PlainViTError: Something is.
    """
    model, dataset = arguments.model, getattr(arguments, "dataset", "")
    if named_by(model) is None and (os.path.isfile(model) or model.endswith(WEIGHTS) or model.startswith(PATHS)):
        path_of(model)
    if dataset.startswith(PATHS) and not os.path.exists(dataset):
        raise DataError(f"There is no file or folder {dataset}: correct the path.")
    if isinstance(arguments, LoopOptions):
        check_options(arguments)


def _command_with_hints(arguments: Any) -> list[str]:
    """Return the command as typed, with its hints about the model moved to the end."""
    program = typed_program()
    words = program.split() if program else ["python", sys.argv[0]]
    is_hint = False
    for word in sys.argv[1:]:
        if word.startswith("--"):
            is_hint = "model_hints" in _by_option([word])
        if not is_hint:
            words.append(word)
    return [*words, "--model_hints", *(arguments.model_hints or [])]


def _end_with(error: PlainViTError) -> NoReturn:
    """Exit with an error in one line.

    Under torchrun, whose summary shows the error file of each process, only the process that fails first prints the
    line: torchrun stops the others as soon as one has ended, be it the main one.
    """
    line = told(error)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_first = True
    if file:
        try:
            Path(file).parents[1].joinpath("printed").touch(exist_ok=False)  # beside the folders of all processes
        except OSError as failure:
            is_first = not isinstance(failure, FileExistsError)
        content = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": content}), encoding="utf-8")
    if is_first:
        print(line, file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def parse_arguments(kind: type[Options], command_line: Sequence[str], *, description: str | None) -> Options:
    """Parse options: recipes, overridden by a YAML file, overridden by the command line.

    `--name default` resets an option that a recipe sets.

    Args:
        kind: the dataclass to fill, made of the groups above.
        command_line: the arguments; the first one may be a YAML file written by a run.
        description: the description for `--help`.

    Raises:
        TrainingError: A number is out of range, or a recipe is unknown or belongs to another script.
        SystemExit: Anything else in the command line is wrong; its code is 2.
    """
    words = list(command_line)
    options = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known = [*options]
    layers = []
    if words and words[0].endswith((".yaml", ".yml")):
        layers += _with_recipe(_words_of(_read_options(words.pop(0))), known)
    layers += _with_recipe(_by_option(words), known)
    merged: dict[str, list[str]] = {}
    for layer in layers:
        replaced = {other for group in ALTERNATIVES if group & layer.keys() for other in group - layer.keys()}
        merged = {name: given for name, given in merged.items() if name not in replaced} | layer
    of_recipes = {name for recipe in RECIPES.values() for name in recipe.options}
    merged = {name: given for name, given in merged.items() if given != [TAKEN_BACK] or name not in of_recipes}
    parser = Parser(None, description)
    hints = get_type_hints(kind)
    for group in (group for group in reversed(kind.__mro__) if "_argument_group_name" in vars(group)):
        titled = parser.add_argument_group(vars(group)["_argument_group_name"])
        for name in [each.name for each in dataclasses.fields(group) if each.name in options]:
            _add_option(titled, options.pop(name), hints[name])
    if "recipe" in known:
        parser.add_argument("--list-recipes", action=Show, text=describe_recipes, help="describe the recipes and exit")
    stray = merged.pop("", [])
    given = parser.read([*stray, *(word for name, values in merged.items() for word in (f"--{name}", *values))])
    return kind(**vars(given))


def _add_option(group: Any, option: dataclasses.Field[Any], hint: Any) -> None:
    """Add an option to the parser; `X | None` is parsed as X."""
    name = f"--{option.name.replace('_', '-')}"
    default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
    settings: dict[str, Any] = {"dest": option.name, "help": option.metadata["help"]}
    settings |= {"required": True} if default is dataclasses.MISSING else {"default": default}
    hint = next((part for part in get_args(hint) if type(None) in get_args(hint)), hint)
    if hint is bool:
        group.add_argument(name, type=_as_bool, nargs="?", const=True, metavar="yes|no", **settings)
        if default is True:
            group.add_argument(f"--no-{name[2:]}", dest=option.name, action="store_false", help=f"as {name} no")
    elif get_origin(hint) is Literal:
        group.add_argument(name, choices=get_args(hint), **settings)
    elif Literal["auto"] in get_args(hint):
        group.add_argument(name, type=_number_or_auto, metavar="NUMBER|auto", **settings)
    else:
        is_list = get_origin(hint) is list
        kind = get_args(hint)[0] if is_list else hint
        group.add_argument(name, type=kind, nargs="+" if is_list else None, **settings)


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _as_bool(text: str) -> bool:
    """Parse yes or no, as a word of YAML or of transformers' parser."""
    words = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text.lower() not in words:
        raise ArgumentTypeError(f"{text!r} is neither yes nor no")
    return words[text.lower()]


def _read_options(path: str) -> dict[str, Any]:
    """Read a YAML file of options.

    Raises:
        TrainingError: The file cannot be read, or does not hold options.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise TrainingError(f"{path} cannot be read: {error}. Give the arguments.yaml of a run.") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise TrainingError(f"{path} holds no options by name: give the arguments.yaml of a run.")
    return values


def _by_option(words: Sequence[str]) -> dict[str, list[str]]:
    """Split a command line into options, `--name value ...`; words before the first option have the name ""."""
    layer: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            layer[name] = [*(layer.get(name, []) if name in REPEATED else []), *([value] if equals else [])]
        else:
            layer.setdefault(name, []).append(word)
    return layer


def _words_of(values: Mapping[str, Any]) -> dict[str, list[str]]:
    return {
        name: [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]
        for name, value in values.items()
        if value is not None
    }


def _with_recipe(layer: dict[str, list[str]], known: Sequence[str]) -> list[dict[str, list[str]]]:
    """Return the recipes of a layer, each as its own layer, followed by the layer itself."""
    return [*(_words_of(recipe_options(name, known)) for name in layer.get("recipe", [])), layer]


def as_yaml(arguments: Any) -> str:
    """Return the options as YAML that repeats the run."""
    every = dataclasses.asdict(arguments)
    values = {name: value for name, value in every.items() if value not in (None, [])}
    for recipe in values.get("recipe", []):
        values |= {name: TAKEN_BACK for name in RECIPES[recipe].options if every[name] in (None, [])}
    values.pop("resume", None)
    return yaml.safe_dump(values, sort_keys=False)


def is_met(condition: str, arguments: Any) -> bool:
    """Return whether the options meet a condition of a rule."""
    names, _, values = condition.partition("=")
    if values:
        return _as_text(getattr(arguments, names, None)) in values.split("|")
    return any(getattr(arguments, name, None) for name in names.split("|"))


def _as_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def idle_options(arguments: Any) -> set[str]:
    """Return the names of the options that have no effect because another option is missing."""
    needs = {each.name: each.metadata["help"].needs for each in dataclasses.fields(arguments)}
    return {name for name, condition in needs.items() if condition and not is_met(condition, arguments)}


def check_options(arguments: Any) -> None:
    """Refuse options that contradict each other or have no effect.

    Raises:
        TrainingError: Some options do.
    """
    idle = idle_options(arguments)
    faults: dict[str, list[str]] = {}  # error -> the options that break its rule
    for each in dataclasses.fields(arguments):
        if getattr(arguments, each.name) in (each.default, []):
            continue
        if each.name in idle:
            faults.setdefault(_without_needs(each.metadata["help"].needs, arguments), []).append(each.name)
        for condition, text in each.metadata["help"].excludes.items():
            if is_met(condition, arguments):
                value, other = getattr(arguments, each.name), getattr(arguments, condition.partition("=")[0])
                text = text.replace("{value}", _as_text(value)).replace("{other}", _as_text(other))
                faults.setdefault(text, []).append(each.name)
    for text, names in faults.items():
        raise TrainingError(text.replace("{names}", ", ".join(names)))
    if arguments.learning_rate == "auto" and isinstance(arguments, ClassifierOptions):
        peak = math.inf  # not known yet
    else:
        peak = arguments.peak_learning_rate
    if (lowest := arguments.lowest_learning_rate) > peak:
        raise TrainingError(f"min_learning_rate is {lowest:g}, above the peak of {peak:g}: give a lower one.")
    betas = arguments.betas
    if betas is not None and len(betas) != 2:
        raise TrainingError(f"betas is {betas}: expected two numbers from 0 to less than 1, such as 0.9 0.999.")


def _without_needs(condition: str, arguments: Any) -> str:
    names, _, values = condition.partition("=")
    if values:
        lacking, remedy = f"With the {names} {getattr(arguments, names)}", f"set --{names} {values.split('|')[0]}"
    else:
        lacking, remedy = f"Without {names.replace('|', ' or ')}", f"give --{names.split('|')[0]}"
    return f"{lacking}, {{names}} has no effect: omit it, or {remedy}."
