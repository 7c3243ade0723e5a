"""Options of the training scripts: in groups, from the command line, from a file and from recipes."""

import dataclasses
import math
import sys
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import yaml
from transformers import HfArgumentParser

from ..errors import PlainViTError, TrainingError
from .recipes import describe_recipes, recipe_options

Options = TypeVar("Options")


def option(default: Any = dataclasses.MISSING, help: str = "") -> Any:
    """Declare an option with its line in `--help`."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


# What several scripts ask for, in groups of their own.


@dataclass(kw_only=True)
class WeightsOptions:
    """Which weights are opened."""

    model: str = option(help="transformers folder or Hub id, or another library's checkpoint")
    model_hints: list[str] | None = option(
        None, help="name=value: what another library's checkpoint does not say, such as num_attention_heads=4"
    )


@dataclass(kw_only=True)
class CheckpointOptions(WeightsOptions):
    """Which model is opened, of any class."""

    trust_remote_code: bool = option(False, help="run the code that a checkpoint brings along")


@dataclass(kw_only=True)
class ImageOptions:
    """Which images are opened."""

    dataset: str = option(
        help="digits, glyphs; a folder of images, of parquet or .tar files, or of save_to_disk; cifar10, cifar100, "
        "imagenet-1k, pets, flowers, food101, mnist, fashion-mnist, beans; or a Hub name"
    )
    dataset_subset: str | None = option(None, help="configuration of a Hub data set that has several")
    image_column: str | None = option(None, help="found by its type if not given")


@dataclass(kw_only=True)
class LabelOptions:
    """What their labels are."""

    label_column: str | None = option(None, help="found by its type if not given")
    label_names: str | None = option(None, help="text file with one class per line, for labels that are plain numbers")


@dataclass(kw_only=True)
class SplitOptions:
    """Which splits are learnt from, and which are evaluated."""

    train_split: str | None = option(None, help="split to learn from, or several joined by +; train if not given")
    validation_split: str | None = option(
        None, help="split to choose the best weights by; found by its name if not given"
    )
    test_split: str | None = option(None, help="held-out split; 'test' if not given and there is one")


@dataclass(kw_only=True)
class ProcessOptions:
    """Which processes do the work."""

    num_workers: int = option(0, help="processes that prepare images, per process that computes")
    num_processes: int | None = option(None, help="refuse to run with another number of processes")
    mixed_precision: Literal["no", "bf16", "fp16"] = option("no", help="precision of the forward and backward passes")


@dataclass(kw_only=True)
class ForwardOptions(ProcessOptions, LabelOptions, ImageOptions, CheckpointOptions):
    """Which images go through which model, that is not trained."""

    batch_size: int = option(256, help="images per forward pass, over all processes")


@dataclass(kw_only=True)
class StepOptions:
    """How many steps are taken, of how many images, and how far each one goes."""

    epochs: float | None = option(None, help="passes over the training images; 10 if neither they nor steps are given")
    steps: int | None = option(None, help="optimizer steps, instead of epochs")
    batch_size: int = option(64, help="images per optimizer step, over all processes and micro-batches")
    gradient_accumulation_steps: int = option(1, help="micro-batches that make one optimizer step")
    optimizer: str = option("adamw", help="of torch.optim, in small letters (the paper: sgd), or timm:NAME")
    learning_rate: float = option(1e-3, help="at its peak")
    momentum: float = option(0.9, help="of SGD; first beta of Adam")
    weight_decay: float = option(0.05, help="of matrices and kernels; nothing else decays")
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant"] = option(
        "cosine", help="of the learning rate after the warm-up"
    )
    warmup_fraction: float = option(0.1, help="part of the optimizer steps in which the learning rate rises")
    warmup_steps: int | None = option(None, help="the same as a number of optimizer steps")
    max_grad_norm: float = option(1.0, help="gradients are clipped to this norm; 0 leaves them")


@dataclass(kw_only=True)
class FolderOptions(ProcessOptions):
    """Where a run goes, and when it is logged, evaluated and saved."""

    output_dir: str = option(help="empty or new folder")
    resume: bool = option(False, help="go on from the newest checkpoint in output_dir")
    evaluations: int | None = option(None, help="how often to evaluate, evenly spread; once per epoch if not given")
    log_every: int = option(10, help="optimizer steps between logged values")
    checkpoint_every: int | None = option(
        None, help="optimizer steps between checkpoints; at each evaluation if not given"
    )
    checkpoints_kept: int = option(2, help="how many checkpoints stay; 0: write none")
    report_to: str = option("none", help="tensorboard, trackio and wandb, separated by commas")
    seed: int = option(0, help="decides everything random")


@dataclass(kw_only=True)
class LoopOptions(FolderOptions, StepOptions):
    """What the training loop reads, whatever is trained."""


# The groups of fine-tuning.


@dataclass(kw_only=True)
class ModelOptions(CheckpointOptions):
    """What is trained."""

    _argument_group_name: ClassVar[str] = "model"

    model: str = option(
        help="transformers folder or Hub id, another library's checkpoint, or a preset to train from scratch"
    )
    from_scratch: bool = option(False, help="keep the architecture only and draw new weights")
    freeze: list[str] = option(
        [],
        help="train the rest only: backbone (all but the head), a number of blocks from below, or names (a.*.weight)",
    )
    lora_rank: int | None = option(None, help="train low-rank additions to the attention instead of its weights (peft)")
    lora_alpha: int = option(16, help="the additions are scaled by lora_alpha / lora_rank")
    lora_targets: list[str] = option([], help="layers that get additions; queries and values if not given")
    gradient_checkpointing: bool = option(False, help="save memory by computing the forward pass twice")
    image_size: list[int] | None = option(
        None, help="train at this size, in pixels: one number, or height and width; positions are resampled once"
    )
    dropout: float | None = option(None, help="after each dense layer; as the model has it if not given")
    drop_path_rate: float | None = option(None, help="stochastic depth of the last block; as the model has it")


@dataclass(kw_only=True)
class DataOptions(SplitOptions, LabelOptions, ImageOptions):
    """What it learns from."""

    _argument_group_name: ClassVar[str] = "data"

    validation_fraction: float = option(0.0, help="part of the training split to carve out as validation split")
    shots_per_class: int | None = option(None, help="learn from this many images per class")
    corrupted: Literal["stop", "skip"] = option(
        "stop", help="an image that cannot be read ends the run, or is left out, named and counted"
    )
    streaming: bool = option(False, help="read the training images as they come instead of storing them first")
    stream_images: int | None = option(None, help="how many there are, for a stream that does not say")
    stream_buffer: int = option(10_000, help="images of a stream among which the next one is drawn")


@dataclass(kw_only=True)
class LearnerOptions:
    """How its weights are kept."""

    layer_decay: float = option(1.0, help="learning rate of a block, relative to the block above it")
    ema_decay: float | None = option(None, help="evaluate and save a moving average of the weights with this decay")
    shard: bool = option(False, help="divide weights, optimizer states and averages among the processes (FSDP2)")
    compile: bool = option(False, help="torch.compile the model for training")


@dataclass(kw_only=True)
class OptimizationOptions(LearnerOptions, StepOptions):
    """How it learns."""

    _argument_group_name: ClassVar[str] = "optimisation"

    recipe: list[str] = option([], help="named options that the others override (--list_recipes); several: in order")
    auto_micro_batch: bool = option(
        False, help="try before training what fits into memory, and make more micro-batches of a step if need be"
    )
    loss: Literal["cross_entropy", "bce"] = option("cross_entropy", help="bce: one yes or no per class")
    class_balance: Literal["none", "loss", "sampler"] = option(
        "none", help="give rare classes as much weight as others: in the loss, or by drawing them more often"
    )
    teacher: str | None = option(None, help="classifier of the same classes whose answers are learnt from too")
    distillation: Literal["soft", "hard"] = option("soft", help="learn the teacher's probabilities, or its decisions")
    distillation_weight: float = option(0.5, help="share of the teacher in the loss")
    distillation_temperature: float = option(1.0, help="of soft distillation")
    label_smoothing: float = option(0.1, help="part of the target that is spread over all classes")


@dataclass(kw_only=True)
class TransformOptions:
    """How each of its images is varied."""

    crop_scale: float = option(1.0, help="smallest part of an image that a random crop may keep; 1: no crop")
    resize_to: int | None = option(
        None, help="resize to this many pixels, then cut out a random part of the model's size"
    )
    horizontal_flip: float = option(0.0, help="probability")
    augmentation: Literal["none", "affine", "randaugment", "trivialaugment", "threeaugment"] = option(
        "none", help="affine: for characters"
    )
    magnitude: int = option(9, help="of randaugment")
    augmentation_layers: int = option(2, help="of randaugment: operations on one image")
    random_erasing: float = option(0.0, help="probability")


@dataclass(kw_only=True)
class AugmentationOptions(TransformOptions):
    """How its images are varied, each by itself and together."""

    _argument_group_name: ClassVar[str] = "augmentation"

    repeated_augmentation: int = option(
        1, help="copies of an image in a batch, each augmented anew; an epoch has so many times fewer distinct images"
    )
    mixup: float = option(0.0, help="alpha of mixup; 0: off")
    cutmix: float = option(0.0, help="alpha of CutMix; 0: off")


@dataclass(kw_only=True)
class RunOptions(FolderOptions):
    """Where it goes, when it is looked at, and on how many processes."""

    _argument_group_name: ClassVar[str] = "run"

    early_stopping: int | None = option(
        None, help="stop after this many evaluations in a row without a better validation accuracy"
    )
    eval_batch_size: int = option(256, help="images per evaluation batch, over all processes")
    report: bool = option(True, help="draw curves, confusion matrix and mistakes into output_dir/report")
    picture_every: float = option(5.0, help="epochs between looks at attention and positions for the report; 0: none")
    dry_run: bool = option(False, help="print the plan and what it needs, and write nothing")
    license: str | None = option(
        None, help="of the weights, for their page; what the page of the model says if not given"
    )
    push_to_hub: str | None = option(None, help="user/name of the repository that gets the result")
    hub_private: bool = option(False, help="make that repository private")


@dataclass(kw_only=True)
class ClassifierOptions(RunOptions, AugmentationOptions, OptimizationOptions, DataOptions, ModelOptions, LoopOptions):
    """Everything that is asked of the training of a classifier."""


def keywords(options: Any, *groups: Any) -> dict[str, Any]:
    """Return the options of whole groups as keywords, for a function that takes them all by these names."""
    return {each.name: getattr(options, each.name) for group in groups for each in dataclasses.fields(group)}


# Of these, the one that is given last replaces the others.
ALTERNATIVES = (frozenset({"epochs", "steps"}), frozenset({"warmup_fraction", "warmup_steps"}))


class Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Show defaults, and the description as it is written."""


def run_script(run: Callable[[Options], object], kind: type[Options], *, description: str | None) -> None:
    """Run a script as its command line says; an error that the project foresees is one line and an exit code."""
    try:
        run(parse_arguments(kind, sys.argv[1:], description=description))
    except PlainViTError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def parse_arguments(kind: type[Options], command_line: Sequence[str], *, description: str | None) -> Options:
    """Read options: recipes first, a YAML file over them, the command line over both.

    Args:
        kind: the dataclass to fill, made of the groups above.
        command_line: words; the first one may be a YAML file as a run wrote it.
        description: what the script does, for `--help`.

    Raises:
        TrainingError: A recipe is unknown, or is one of another script.
    """
    words = list(command_line)
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    layers = []
    if words and words[0].endswith((".yaml", ".yml")):
        values = yaml.safe_load(Path(words.pop(0)).read_text(encoding="utf-8"))
        layers += _with_recipe(_words_of(values), known)
    layers += _with_recipe(_by_option(words), known)
    merged: dict[str, list[str]] = {}
    for layer in layers:
        replaced = {other for group in ALTERNATIVES if group & layer.keys() for other in group - layer.keys()}
        merged = {name: given for name, given in merged.items() if name not in replaced} | layer
    groups: list[Any] = [group for group in reversed(kind.__mro__) if "_argument_group_name" in vars(group)]
    parser = HfArgumentParser(groups, description=description, formatter_class=Help, allow_abbrev=False)
    if "recipe" in known:
        recipes = describe_recipes()  # argparse says a version and leaves
        parser.add_argument("--list_recipes", action="version", version=recipes, help="say what each recipe is")
    stray = merged.pop("", [])
    given = parser.parse_args([*stray, *(word for name, values in merged.items() for word in (f"--{name}", *values))])
    return kind(**vars(given))


def _by_option(words: Sequence[str]) -> dict[str, list[str]]:
    """Split a command line by its options, `--name value ...`; what comes before them belongs to none."""
    layer: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            layer[name] = [value] if equals else []
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
    """Return the recipes that a layer names, each a layer, and the layer itself."""
    return [*(_words_of(recipe_options(name, known)) for name in layer.get("recipe", [])), layer]


def as_yaml(arguments: Any) -> str:
    """Write the options as a file that repeats the run."""
    values = {name: value for name, value in dataclasses.asdict(arguments).items() if value not in (None, [])}
    values.pop("resume", None)
    return yaml.safe_dump(values, sort_keys=False)


# What numbers may be: the lowest and the highest value.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("steps", "batch_size", "gradient_accumulation_steps", "evaluations", "eval_batch_size", "log_every",
         "checkpoint_every", "early_stopping", "lora_rank", "lora_alpha", "stream_images", "stream_buffer",
         "resize_to", "repeated_augmentation"),
        (1, math.inf),
    ),
    **dict.fromkeys(
        ("epochs", "learning_rate", "weight_decay", "layer_decay", "warmup_steps", "max_grad_norm", "checkpoints_kept",
         "num_workers", "mixup", "cutmix", "augmentation_layers", "distillation_temperature"),
        (0, math.inf),
    ),
    **dict.fromkeys(
        ("warmup_fraction", "label_smoothing", "crop_scale", "horizontal_flip", "random_erasing",
         "distillation_weight", "momentum"),
        (0, 1),
    ),
    "magnitude": (0, 30),
}  # fmt: skip
# Options that mean something only together with another one.
COMPANIONS = {
    "teacher": ("distillation", "distillation_weight", "distillation_temperature"),
    "lora_rank": ("lora_alpha", "lora_targets"),
    "streaming": ("stream_images", "stream_buffer"),
    "report": ("picture_every",),
    "push_to_hub": ("hub_private",),
}


def check_options(arguments: Any) -> None:
    """Refuse numbers that cannot be, two ways of saying the same, and options that would do nothing.

    Raises:
        TrainingError: There are some.
    """
    for name, (low, high) in RANGES.items():
        value = getattr(arguments, name, None)  # not every script has every option
        if value is not None and not low <= value <= high:
            expected = f"{low} to {high}" if high < math.inf else f"{low} or more"
            raise TrainingError(f"{name} is {value}: expected {expected}.")
    for name in ("epochs", "crop_scale", "distillation_temperature"):
        if getattr(arguments, name, None) == 0:
            raise TrainingError(f"{name} is 0: expected more.")
    if arguments.steps is not None and arguments.epochs is not None:
        raise TrainingError(f"Both steps ({arguments.steps}) and epochs ({arguments.epochs:g}) are given: give one.")
    defaults = {each.name: each.default for each in dataclasses.fields(arguments)}
    for name, companions in ((name, each) for name, each in COMPANIONS.items() if name in defaults):
        useless = [each for each in companions if getattr(arguments, each) not in (defaults[each], [])]
        if not getattr(arguments, name) and useless:
            raise TrainingError(
                f"Without {name} nothing comes of {', '.join(useless)}: leave that out, or give --{name}."
            )
