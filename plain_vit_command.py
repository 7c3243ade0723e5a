"""The `plain-vit` command: a table of its commands with their arguments, read without torch.

`plain_vit/cli.py` implements the commands. Importing torch and transformers takes seconds, so that happens only after
the words are found valid: `light_package` makes the package's modules importable without its `__init__`.
"""

import atexit
import gc
import importlib.metadata
import importlib.util
import os
import runpy
import signal
import sys
import threading
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIXES = ("timm", "torchvision", "open_clip", "hf", "plain_vit")  # of the names of models
FORMATS = (
    *("timm", "vit_pytorch", "torchvision", "transformers", "open_clip", "google", "gguf"),
    *("openmmlab", "swag", "kornia", "monai", "segment_anything"),
)
ENGINES = ("onnx", "openvino")
FOLDERS = ("timm", "transformers", *ENGINES)  # whose exports are folders
OTHER_FILES = (".onnx", ".xml", ".html", ".png", ".json", ".csv", ".parquet")  # with which no folder may be named
PRECISIONS = ("float32", "float16", "bfloat16", "int8")
FEATURES = ("pooled", "cls", "mean", "cls_mean", "patches")
MAPS = ("pca", "umap")
INTERRUPTED = 130  # the shells' exit code for Ctrl-C
LOST_OUTPUT = 120  # Python's own exit code where the last output cannot be written
NO_TORCH = ("examples", "list")  # commands that do without


def source(text: str) -> str:
    """Parse the name of a checkpoint: `prepare` refuses one that is neither here, nor a Hub id, nor of a model."""
    return text


def image(text: str) -> str:
    """Parse the name of an image file: `prepare` refuses one that does not exist."""
    return text


def size(text: str) -> int | tuple[int, int]:
    """Parse an image size: 224 or 224x192 (height x width)."""
    sides = [int(side) for side in text.lower().split("x")]
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError(text)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def count(text: str) -> int:
    """Parse a number from 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def share(text: str) -> float:
    """Parse a finite, non-negative number."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number


def number_or_word(text: str) -> float | str:
    """Parse a number, or return a word unchanged."""
    try:
        return float(text)
    except ValueError:
        return text


Argument = tuple[str, Mapping[str, Any]]


def argument(name: str, help: str, **settings: Any) -> Argument:
    """Return a row: the name of an argument, or `--name` of an option, and how argparse treats it."""
    return name, {"help": help, **settings}


def flag(name: str, help: str) -> Argument:
    """Return the row of an option without a value."""
    return argument(name, help, action="store_true")


@dataclass(frozen=True)
class Command:
    """A command, as the parser and the help know it.

    Args:
        help: What it does.
        example: An example, after the name of the command.
        arguments: Its arguments, in the order of the help.
        groups: Further arguments under a title of their own.
        script: The script of `examples/` that it runs, whose options it has.
    """

    help: str
    example: str
    arguments: Sequence[Argument] = ()
    groups: Mapping[str, Sequence[Argument]] = field(default_factory=dict)
    script: str | None = None


# Options with the names of arguments of `from_checkpoint`.
HINTS = dict([
    argument("format", "format of the checkpoint, if its names do not show it", choices=FORMATS),
    argument("num_attention_heads", "number of attention heads", type=int),
    argument("head_dim", "width of one head", type=int),
    argument("attention_scale", "factor on the attention scores: a number, head_dim**-0.5 or hidden_size**-0.5",
             type=number_or_word, metavar="SCALE"),
    argument("layer_norm_eps", "epsilon of the norms", type=float),
    argument("hidden_act", "activation of the MLP, such as gelu or quick_gelu"),
    argument("pooling", "pooling before the classifier, such as cls or mean"),
    argument("pool_prefix_tokens", "whether the pooling includes class and register tokens",
             action=BooleanOptionalAction),
    argument("final_norm", "before_pooling, after_pooling, both or none"),
    argument("block_type", "sequential, post_norm, parallel or branches"),
    argument("norm_type", "layer_norm or rms_norm"),
    argument("mlp_type", "mlp, swiglu or swiglu_packed (the gate is the first half)"),
    argument("position_embedding_type", "learned (a table), sincos_2d or none"),
    argument("rope_type", "none: nothing rotates queries and keys (a rotation opens by its --architecture)"),
    argument("position_embedding_on_prefix", "whether the tokens before the patches have position embeddings",
             action=BooleanOptionalAction),
    argument("image_size", "in pixels: 224, or 224x192 (height x width)", type=size, metavar="SIZE"),
    argument("patch_size", "in pixels: 16, or 16x8 (height x width)", type=size, metavar="SIZE"),
    argument("num_channels", "number of input channels", type=int),
    argument("architecture", "the source's name of the model, such as vit_small_patch16_224 (timm) or vit_b_16 "
             "(torchvision), or its class, such as ViTModel, if it is of transformers and has no config.json"),
    argument("layout", "one of the format's layouts, such as the release that wrote the checkpoint"),
    argument("image_mean", "mean of each channel, for pixel values in [0, 1]", type=float, nargs="+"),
    argument("image_std", "standard deviation of each channel, for values in [0, 1]", type=float, nargs="+"),
    argument("key", "which model, if a file contains several, such as ema"),
    argument("drop", "leave out a part: head, the classifier, to open the encoder alone; in an export also mask_token, "
             "which no output depends on, if the target cannot store it", action="append", metavar="PART"),
    argument("revision", "branch, tag or commit of a Hub repository"),
])  # fmt: skip
LABELS = argument(
    "--labels", "file with the label names: a JSON list or object (number to name), or one name per line",
    type=Path, metavar="FILE",
)  # fmt: skip
OF_CHECKPOINT = {
    "settings that the checkpoint may not contain": [
        *((f"--{name.replace('_', '-')}", settings) for name, settings in HINTS.items()), LABELS,
    ]
}  # fmt: skip

JSON = argument("--output-format", "how the result is printed", choices=("text", "json"), default="text")
CSV = argument("--output-format", "how the result is printed", choices=("text", "json", "csv"), default="text")
SOURCE = argument("source", "file, folder, Hub id or name", type=source)
FORCE = flag("--force", "replace OUT; a folder with other files is renamed and kept")
IMAGES = argument("images", "image files", nargs="+", metavar="IMAGE", type=image)
IMAGES_OR_DATASET = argument(
    "images", "image files; or one dataset: a folder, 'images/*.jpg', a parquet or tar file, s3://..., or a Hub name",
    nargs="+", metavar="IMAGE", type=image,
)  # fmt: skip
MODEL = argument("--model", "file, folder, Hub id or name; the options describe this one", required=True, type=source)
OUT_FOLDER = argument("--out", "new or empty folder", required=True, type=Path)
ENGINE_ROWS = (
    argument("--precision", "precision of the weights (default: float32)", choices=PRECISIONS),
    argument("--dynamic-size", "take every size that the patch size divides", action="store_true", default=None),
    argument("--calibration", "for int8: images that set the ranges, and on which the accuracy is measured before and "
             "after", type=Path, metavar="FOLDER"),
    argument("--tolerance", "largest difference of an output that passes, relative to its largest value (default: by "
             "the precision)", type=share, metavar="NUMBER"),
)  # fmt: skip
ENGINE_OPTIONS = tuple(name[2:].replace("-", "_") for name, _ in ENGINE_ROWS)  # fields of `EngineOptions`

VALIDATION = (
    argument("--validation-split", "name of the validation split (default: found by its name)"),
    argument("--validation-fraction", "fraction of the training images for validation, as in the run", type=share),
    argument("--seed", "seed of the run, which draws this fraction (default: 0)", type=int),
)

COMMANDS = {
    "inspect": Command(
        "report the format and config of a checkpoint, what was inferred and what is missing",
        "vit.pt --num-attention-heads 12",
        [SOURCE, JSON],
        OF_CHECKPOINT,
    ),
    "convert": Command(
        "convert a plain ViT checkpoint to a Hugging Face folder",
        "vit_b_16-c867db91.pth vit-b-16",
        [
            SOURCE,
            argument("out", "new or empty folder; optional with --push", type=Path, nargs="?"),
            flag("--no-verify", "skip the comparison with the source's own package"),
            FORCE,
            argument("--push", "upload the folder to this Hub repository (user/name)", metavar="REPO"),
            flag("--private", "make that repository private"),
            JSON,
        ],
        OF_CHECKPOINT,
    ),
    "verify": Command(
        "print the largest difference between two checkpoints, stage by stage, and fail if it is too large",
        "vit_b_16-c867db91.pth vit-b-16",
        [
            argument("a", "file, folder, Hub id or name; the options describe this one", type=source),
            argument("b", "file, folder, Hub id or name", type=source),
            argument("--tolerance", "largest difference that passes, relative to the largest value of its stage "
                     "(default: 1e-5)", type=share, metavar="NUMBER"),
            CSV,
        ],
        OF_CHECKPOINT,
    ),
    "export": Command(
        "write a checkpoint in the format of another package, or as the graph of an inference engine",
        "vit-b-16 timm-folder --to timm",
        [
            SOURCE,
            argument("out", f"new or empty folder for {', '.join(FOLDERS)}; new file for "
                     "the others", type=Path),
            argument("--to", "the package or the engine", required=True, choices=(*FORMATS, *ENGINES)),
            argument("--to-layout", "one of that format's layouts (default: the current one)"),
            argument("--into", "the folder or the file of a larger model: write a copy that contains this model",
                     type=Path, metavar="CHECKPOINT"),
            argument("--into-key", "the place in it, if it contains several models"),
            flag("--no-image-processor", "write only the model"),
            FORCE,
            JSON,
        ],
        {f"engines ({', '.join(ENGINES)})": ENGINE_ROWS, **OF_CHECKPOINT},
    ),
    "predict": Command(
        "print the likeliest classes of images; with --out DIR, write those of any number of images",
        "cat.jpg dog.jpg --model vit-b-16",
        [
            IMAGES_OR_DATASET,
            MODEL,
            argument("--out", "new folder, for a dataset, with the options of predict.py", type=Path),
            argument("--top", "classes of each image", type=count, default=5),
            CSV,
        ],
        OF_CHECKPOINT,
    ),
    "embed": Command(
        "write the features of images to a parquet file, or of any number of images to a folder",
        "cat.jpg dog.jpg --model vit-b-16 --out features.parquet",
        [
            IMAGES_OR_DATASET,
            MODEL,
            argument("--out", "new .parquet file; or a folder, for a dataset, with the options of extract_features.py",
                     required=True, type=Path),
            argument("--feature", "what a classifier would read; class token, mean of the patches, both; or the grid "
                     "of patches", choices=FEATURES, default="pooled"),
            FORCE,
        ],
        OF_CHECKPOINT,
    ),
    "show": Command(
        "draw attention and other figures of a model on images: one page, PNG files and arrays",
        "cat.jpg dog.jpg --model vit-b-16 --out page",
        [
            IMAGES,
            MODEL,
            argument("--compare", "a second model, shown side by side with the first", type=source),
            argument("--point", "place in the first image to compare all patches with: 0 0 top left, 1 1 bottom right",
                     type=float, nargs=2, default=(0.5, 0.5), metavar=("DOWN", "ACROSS")),
            OUT_FOLDER,
        ],
        OF_CHECKPOINT,
    ),
    "browse": Command(
        "write a page to look through the images of features or predictions: a map, neighbours, mistakes",
        "features --predictions predictions --out page",
        [
            argument("features", "parquet file, or output folder of extract_features.py or predict.py"),
            OUT_FOLDER,
            argument("--predictions", "predictions for the same images, joined by row", metavar="PATH"),
            argument("--column", "column of features (default: feature, or the only one)"),
            argument("--map", "how images are placed (umap: with umap-learn)", choices=MAPS, default="pca"),
            argument("--dataset", "where the images and true labels are, if not in the files of the column path: as "
                     "for finetune"),
            argument("--dataset-subset", "configuration of a dataset that has several"),
            argument("--split", "split of the dataset (default: that of the run, else train)"),
            argument("--image-column", "image column of the dataset, if there are several"),
            argument("--label-column", "column of true labels, of the dataset if one is given (default: found by its "
                     "type or name)"),
            argument("--labels-by", "match true labels with the model's classes by name or by number, as evaluate "
                     "does; none: leave them out", choices=("name", "number", "none"), default="name"),
        ],
    ),
    "finetune": Command(
        "train an image classifier",
        "--model glyphs --dataset digits --output-dir runs/digits",
        script="finetune_image_classification",
    ),
    "evaluate": Command(
        "evaluate a classifier on labelled images",
        "--model glyphs --dataset digits --output digits.json",
        script="evaluate_image_classification",
    ),
    "pretrain": Command(
        "pre-train without labels",
        "--model glyphs --dataset digits --output-dir runs/masked",
        script="pretrain",
    ),
    "probe": Command(
        "evaluate frozen features", "--model glyphs --dataset digits --output-dir runs/probe", script="linear_probe"
    ),
    "average": Command(
        "average the weights of classifiers: of all, or of those that make it better on validation images",
        "runs/digits --out soup --dataset digits --validation-fraction 0.1",
        [
            argument("folders", "folders of models; a run with --best-kept 5 stands for five", nargs="+", type=Path),
            OUT_FOLDER,
            argument("--dataset", "choose by the accuracy on its validation images (a greedy soup); as for finetune"),
            *VALIDATION,
        ],
    ),
    "calibrate": Command(
        "divide a classifier by the temperature with which its probabilities are right on validation images",
        "runs/digits --out calibrated --dataset digits --validation-fraction 0.1",
        [SOURCE, OUT_FOLDER, argument("--dataset", "labelled images, as for finetune", required=True), *VALIDATION],
    ),
    "serve": Command(
        "answer requests over HTTP with the predictions of an exported model",
        "glyphs-onnx --port 8000",
        script="serve/app",
    ),
    "push": Command(
        "upload the folder of a saved model to the Hub, in one commit",
        "vit-b-16 user/vit-b-16",
        [
            argument("folder", "folder of a saved model", type=Path),
            argument("repo", "user/name; created if it does not exist"),
            flag("--private", "make the repository private"),
            argument("--revision", "branch to commit to; created if it does not exist"),
            flag("--dry-run", "list what would be uploaded, without uploading"),
            argument("--include", "also upload this file of the folder, by its exact path: plain text, PNG or JPEG; "
                     "repeatable", action="append", default=[], metavar="PATH"),
            flag("--include-report", "also upload the report of a training run: it shows images of the dataset, with "
                 "the names of their files"),
            argument("--exclude", "do not upload these files", nargs="+", default=[], metavar="PATTERN"),
            argument("--message", "commit message", default="Upload model"),
            JSON,
        ],
    ),
    "list": Command(
        "print the names of the models that open by name, which every SOURCE and MODEL may be",
        "'*dinov3*' --source timm",
        [
            argument("pattern", "a name, in which * stands for any characters", nargs="?", default="*"),
            argument("--source", "only models of this package, hf (in the documentation of transformers) or plain_vit",
                     choices=PREFIXES),
            flag("--pretrained", "print the names of published weights, instead of models"),
            JSON,
        ],
    ),
    "env": Command("print installed versions and hardware, for bug reports", "", [JSON]),
    "examples": Command(
        "write the example scripts, images and small trained checkpoint that come with the package",
        "my-examples",
        [
            argument("out", "new folder (default: ./examples)", type=Path, nargs="?", default=Path("examples")),
            flag("--path", "print the folder in which they are installed, and write nothing"),
        ],
    ),
}  # fmt: skip

BULK = {"predict": "predict", "embed": "extract_features"}  # scripts of the commands over a dataset, into a folder
SCRIPTS = {name: command.script for name, command in COMMANDS.items() if command.script is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line after the program name (default: `sys.argv[1:]`).

    Returns:
        The exit code: 0, or the exit code of the error class (see `plain_vit.errors`).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        light_package()
        name = words[0] if words and words[0] in COMMANDS else ""
        if name in SCRIPTS:
            return start_script(name, SCRIPTS[name], words[1:])
        if (of_script := bulk_words(name, words[1:])) is not None:
            return start_script(name, BULK[name], of_script)
        options = parser_of(name).read(words[1:] if name else words)
        options.command, options.words = name, words
        from plain_vit.cli import run

        return run(options, partial(prepare, options))
    except KeyboardInterrupt:
        print("plain-vit: interrupted", file=sys.stderr)
        return INTERRUPTED


def parser_of(name: str) -> Any:
    """Return the parser of a command; that of the name "" only describes the commands."""
    from plain_vit.system.command_line import Parser, Show

    if not name:
        listed = "\n".join(f"  {each:10} {command.help}" for each, command in COMMANDS.items())
        text = "Inspect, convert, verify, export, train and use Vision Transformer checkpoints."
        parser = Parser("plain-vit", f"{text}\n\ncommands:\n{listed}", "plain-vit COMMAND --help describes one")
        parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=SUPPRESS)
        parser.add_argument("--version", action=Show, text=version, help="print the version and exit")
        return parser
    command = COMMANDS[name]
    description = command.help[0].upper() + command.help[1:] + "."
    parser = Parser(f"plain-vit {name}", description, f"example: plain-vit {name} {command.example}".rstrip())
    for title, rows in {"": command.arguments, **command.groups}.items():
        group = parser.add_argument_group(title) if title else parser
        for argument_name, settings in rows:
            group.add_argument(argument_name, **settings)
    parser.add_argument("--debug", action="store_true", help="show the stack trace of an error")
    parser.set_defaults(refuse=parser.error)
    return parser


def version() -> str:
    """Return the version of the installed package."""
    return f"plain-vit {importlib.metadata.version('plain-vit')}"


def prepare(options: Namespace) -> None:
    """Refuse arguments that are wrong whatever is in the files, and import torch if the command needs it."""
    from plain_vit.conversion.catalogue import named_by
    from plain_vit.errors import DataError
    from plain_vit.files.kinds import path_of

    refuse_contradictions(options)
    for name, settings in COMMANDS[options.command].arguments:
        given = value_in(options, name)
        for value in given if isinstance(given, list) else [given] * (given is not None):
            if settings.get("type") is source and named_by(value) is None:
                path_of(value)
            elif settings.get("type") is image and not (
                os.path.lexists(value) or (given == [value] and names_dataset(value))
            ):
                raise DataError(f"{value} does not exist: expected an image file")
    refuse_output_name(options)
    if options.command not in NO_TORCH:
        whole_package()


def value_in(options: Namespace, name: str) -> Any:
    """Return the value of an argument by its name in the table."""
    return getattr(options, name.removeprefix("--").replace("-", "_"))


def refuse_contradictions(options: Namespace) -> None:
    """Exit with code 2 because of options that need another one."""

    def given(*names: str) -> str | None:
        return next((name for name in names if value_in(options, name) is not None), None)

    if options.command == "convert" and given("out", "--push") is None:
        options.refuse("give an output: OUT, or --push REPO")
    if options.command == "export" and options.to not in ENGINES and (name := given(*dict(ENGINE_ROWS))):
        options.refuse(f"{name} is for --to {' and '.join(ENGINES)}")
    if options.command == "average" and options.dataset is None and (name := given(*dict(VALIDATION))):
        options.refuse(f"{name} is for choosing on a dataset: give --dataset too")
    of_dataset = "--dataset-subset", "--split", "--image-column"
    if options.command == "predict" and given("--out"):
        options.refuse("--out is a folder, for one dataset: name the dataset first, or redirect what is printed")
    if options.command == "browse" and options.dataset is None and (name := given(*of_dataset)):
        options.refuse(f"{name} is of a dataset: give --dataset too")


def refuse_output_name(options: Namespace) -> None:
    """Refuse an output folder named like a file, and features named like another kind of file.

    Raises:
        OutputError: The output has such a name.
    """
    from plain_vit.errors import OutputError
    from plain_vit.files.kinds import WEIGHTS

    out, command = getattr(options, "out", None), options.command
    suffix = "" if out is None else out.suffix.lower()
    if command == "embed" and suffix != ".parquet":
        raise OutputError(
            f"{out} is not the name of a parquet file, as features are written: end it in .parquet, or name one "
            "dataset first, for a folder"
        )
    is_file = command == "embed" or (command == "export" and options.to not in FOLDERS)
    if suffix in (*WEIGHTS, *OTHER_FILES) and not is_file:
        what = f"what {options.to} opens" if command == "export" else f"what {command} writes"
        raise OutputError(f"{out} ends in {suffix!r} like a file, but {what} is a folder: give a name without it")


def bulk_words(command: str, words: Sequence[str]) -> list[str] | None:
    """Return the words of the script that runs over a dataset, if the command names one, and a folder to write."""
    places = [place for place, word in enumerate(words) if word == "--out" or word.startswith("--out=")]
    if command not in BULK or not words or not names_dataset(words[0]) or not places:
        return None
    out = words[places[-1] :][:2] if words[places[-1]] == "--out" else words[places[-1]].split("=", 1)
    if out[-1].endswith(".parquet"):
        return None  # one table, in memory
    rest = [word.replace("--out", "--output-dir", 1) if place in places else word for place, word in enumerate(words)]
    return ["--dataset", *rest]


def names_dataset(word: str) -> bool:
    """Return whether a word is a folder, a pattern, a URL, a table, a shard or a name, and no image file."""
    suffix = os.path.splitext(word)[1]
    is_pattern = any(character in word for character in "*?[") and not os.path.lexists(word)
    is_name = not suffix and not os.path.lexists(word) and not word.startswith("-")
    return os.path.isdir(word) or "://" in word or suffix in (".parquet", ".tar") or is_pattern or is_name


def start_script(command: str, script: str, words: list[str]) -> int:
    """Run an example script as its `__main__`."""
    from plain_vit.cli import examples_folder

    script = str(examples_folder() / f"{script}.py")
    before, sys.argv = sys.argv, [script, *words]
    try:
        runpy.run_path(script, {"PROGRAM": f"plain-vit {command}"}, run_name="__main__")
    finally:
        sys.argv = before
    return 0


def check_script(script: str, description: str | None) -> None:
    """Answer `--help` and mistakes in the words of a script, and return if there are none.

    Args:
        script: Its name in `examples/`, also of a copy.
        description: What it does.
    """
    light_package()
    from plain_vit.training.arguments import SCRIPTS, check_words, run_script

    run_script(check_words, SCRIPTS[script], description=description)
    whole_package()


def read_words(description: str | None, *rows: Argument) -> Namespace:
    """Return the words of a script that has few options, and exit at `--help` and mistakes.

    Args:
        description: What it does.
        rows: Its arguments, see `argument`.
    """
    light_package()
    from plain_vit.system.command_line import Parser

    parser = Parser(None, description)
    for name, settings in rows:
        parser.add_argument(name, **settings)
    words = parser.read(sys.argv[1:])
    whole_package()
    return words


def light_package() -> None:
    """Make modules of the package importable without its `__init__`, which runs when a name of it is first used."""
    if "plain_vit" not in sys.modules:
        specification: Any = importlib.util.find_spec("plain_vit")
        package = sys.modules["plain_vit"] = importlib.util.module_from_spec(specification)
        vars(package)["__getattr__"] = lambda name: getattr(whole_package(), name)


def whole_package() -> ModuleType:
    """Run the package's `__init__`, unless it has run; Ctrl-C exits at once while torch is imported."""
    package: Any = sys.modules["plain_vit"]
    if "__version__" in vars(package):
        return package
    vars(package).pop("__getattr__", None)  # of `light_package`; `__init__` sets its own
    gc.disable()
    in_main = threading.current_thread() is threading.main_thread()
    if ours := in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    try:
        package.__spec__.loader.exec_module(package)
        import plain_vit.conversion.open  # noqa: F401  (the slowest import, which most commands need)
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()
    gc.freeze()  # a million objects, none of them garbage, which each collection would visit
    atexit.register(gc.unfreeze)  # or extensions report what the end did not collect
    vars(package)["_is_frozen"] = True
    return package


def program() -> None:
    """The program `plain-vit`."""
    run(main)


def run(function: Callable[[], int | None]) -> None:
    """Run a program, and end its process without taking apart what it has imported, which would take a second.

    Args:
        function: Returns the exit status.
    """
    if "PROGRAM" in function.__globals__:  # of a script that `start_script` runs inside of a command
        function()
        return
    try:
        status: Any = function()
    except SystemExit as ended:
        status = ended.code
    is_frozen = "_is_frozen" in vars(sys.modules.get("plain_vit", sys))
    if not is_frozen or not isinstance(status, int | None):  # what little there is, or what others have imported
        if status:
            sys.exit(status)
        return
    # As processes of `multiprocessing` end.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = status or LOST_OUTPUT
    os._exit(status or 0)


def leave(number: int, frame: Any) -> None:
    """Exit at once: nothing has started yet, and an exception raised during an import may surface as another one."""
    os.write(2, b"plain-vit: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    program()
