"""Argument parser of the `plain-vit` command, without torch.

`plain_vit/cli.py` implements the commands. Importing it takes seconds, because the package registers its classes with
transformers, so it is imported only after the arguments are valid.
"""

import argparse
import os
import re
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

FORMATS = ("timm", "vit_pytorch", "torchvision", "transformers", "open_clip", "google")
ENGINES = ("onnx", "openvino")
PRECISIONS = ("float32", "float16", "bfloat16", "int8")
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npz")
# Commands that run a script of `examples/` with the remaining arguments: (script, help text, example).
SCRIPTS = {
    "finetune": ("finetune_image_classification", "train an image classifier", "--output_dir runs/digits"),
    "evaluate": ("evaluate_image_classification", "evaluate a classifier on labelled images", "--output digits.json"),
    "pretrain": ("pretrain_masked_patches", "pre-train without labels", "--output_dir runs/masked"),
    "probe": ("linear_probe", "evaluate frozen features", "--output_dir runs/probe"),
}
ENGINE_OPTIONS = ("precision", "dynamic_size", "calibration", "tolerance")  # fields of `EngineOptions`
FEATURES = ("pooled", "cls", "mean", "cls_mean", "patches")
MAPS = ("pca", "umap")
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
INTERRUPTED = 130  # the shells' exit code for Ctrl-C
NOT_FOUND = 3  # the exit code of a CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line after the program name (default: `sys.argv[1:]`).

    Returns:
        The exit code: 0, or the exit code of the error class (see `plain_vit.errors`).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in SCRIPTS:
            return start_script(words[0], words[1:])
        options = parser().parse_args(words)
        options.words = words
        for name in options.reads:
            if (path := missing(getattr(options, name))) is not None:
                print(f"plain-vit: {path!r} does not exist, and is not a Hub id (user/name)", file=sys.stderr)
                return NOT_FOUND
        return with_package(options)
    except KeyboardInterrupt:
        print("plain-vit: interrupted", file=sys.stderr)
        return INTERRUPTED


def start_script(command: str, words: list[str]) -> int:
    """Run an example script as its `__main__`."""
    script = str(examples_folder() / f"{SCRIPTS[command][0]}.py")
    before, sys.argv = sys.argv, [script, *words]
    try:
        runpy.run_path(script, {"PROGRAM": f"plain-vit {command}"}, run_name="__main__")
    finally:
        sys.argv = before
    return 0


def examples_folder() -> Path:
    """Return the folder of the examples: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).absolute().parent
    return next(folder for folder in (here / "plain_vit" / "examples", here / "examples") if folder.is_dir())


def with_package(options: argparse.Namespace) -> int:
    """Import the package and run the command."""
    in_main = threading.current_thread() is threading.main_thread()
    if ours := in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    try:
        # The slowest import, which most commands need: do it while Ctrl-C exits at once.
        from plain_vit import cli, conversion  # noqa: F401
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.run(options)


def leave(number: int, frame: Any) -> None:
    """Exit at once: nothing has started yet, and an exception raised during an import may surface as another one."""
    os.write(2, b"plain-vit: interrupted\n")
    os._exit(INTERRUPTED)


def missing(named: Any) -> str | None:
    """Return the first of these paths that does not exist and cannot be the id of a Hub repository."""
    for path in map(str, named if isinstance(named, list) else [named]):
        if not os.path.exists(path) and (not HUB_ID.fullmatch(path) or path.endswith(WEIGHTS)):
            return path
    return None


Command = Callable[..., argparse.ArgumentParser]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    main_parser = Parser(
        prog="plain-vit",
        description="Inspect, convert, verify, export and use Vision Transformer checkpoints.",
    )
    main_parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version and exit")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, help: str, example: str, reads: Sequence[str] = ()) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=help, description=help, epilog=f"example: plain-vit {name} {example}".rstrip()
        )
        added.add_argument("--debug", action="store_true", help="show the stack trace of an error")
        added.set_defaults(command=name, reads=reads, refuse=added.error)
        return added

    add_conversions(command)
    add_uses(command)
    add_browsing(command)
    for name, (script, text, last) in SCRIPTS.items():
        text = f"{text} (the options are those of {script}.py: {name} --help)"
        example = f"example: plain-vit {name} --model glyphs --dataset digits {last}"
        commands.add_parser(name, help=text, description=text, epilog=example, add_help=False)
    add_others(command)
    return main_parser


def add_conversions(command: Command) -> None:
    """Add the commands that open and write checkpoints."""
    text = "report the format and config of a checkpoint, what was inferred and what is missing"
    added = command("inspect", text, "vit.pt --num-attention-heads 12", ["source"])
    added.add_argument("source", help="file, folder or Hub id")
    add_hints(added)

    text = "convert a plain ViT checkpoint to a Hugging Face folder"
    added = command("convert", text, "vit_b_16-c867db91.pth vit-b-16", ["source"])
    added.add_argument("source", help="file, folder or Hub id")
    added.add_argument("out", type=Path, nargs="?", help="new or empty folder; optional with --push")
    added.add_argument("--no-verify", action="store_true", help="skip the comparison with the source's own package")
    added.add_argument(
        "--force", action="store_true", help="replace OUT; a folder with other files is renamed and kept"
    )
    added.add_argument("--push", metavar="REPO", help="upload the folder to this Hub repository (user/name)")
    added.add_argument("--private", action="store_true", help="make that repository private")
    add_hints(added)

    text = "print the largest difference between two checkpoints, stage by stage, and fail if it is too large"
    added = command("verify", text, "vit_b_16-c867db91.pth vit-b-16", ["a", "b"])
    added.add_argument("a", help="file, folder or Hub id; the options describe this one")
    added.add_argument("b", help="file, folder or Hub id")
    allowed = "largest difference that passes, relative to the largest value of its stage (default: 1e-5)"
    added.add_argument("--tolerance", type=share, metavar="NUMBER", help=allowed)
    add_hints(added)

    text = "write a checkpoint in the format of another package, or as the graph of an inference engine"
    added = command("export", text, "vit-b-16 timm-folder --to timm", ["source"])
    added.add_argument("source", help="file, folder or Hub id")
    folders = ", ".join(("timm", "transformers", *ENGINES))
    added.add_argument("out", type=Path, help=f"new or empty folder for {folders}; new file for the others")
    added.add_argument("--to", required=True, choices=(*FORMATS, *ENGINES), help="the package or the engine")
    added.add_argument("--to-layout", help="one of that format's layouts (default: the current one)")
    added.add_argument("--no-image-processor", action="store_true", help="write only the model")
    added.add_argument(
        "--force", action="store_true", help="replace OUT; a folder with other files is renamed and kept"
    )
    add_engine_options(added)
    add_hints(added)


def add_engine_options(command: argparse.ArgumentParser) -> None:
    """Add the options of an export to an engine."""
    engine = command.add_argument_group(f"engines ({', '.join(ENGINES)})")
    engine.add_argument("--precision", choices=PRECISIONS, help="precision of the weights (default: float32)")
    engine.add_argument(
        "--dynamic-size", action="store_true", default=None, help="take every size that the patch size divides"
    )
    images = "for int8: images that set the ranges, and on which the accuracy is measured before and after"
    engine.add_argument("--calibration", type=Path, metavar="FOLDER", help=images)
    allowed = "largest difference of an output that passes, relative to its largest value (default: by the precision)"
    engine.add_argument("--tolerance", type=share, metavar="NUMBER", help=allowed)


def add_uses(command: Command) -> None:
    """Add the commands that run a model on images."""
    text = "print the likeliest classes of image files"
    added = command("predict", text, "cat.jpg dog.jpg --model vit-b-16", ["images", "model"])
    add_images_and_model(added)
    added.add_argument("--top", type=int, default=5, help="classes of each image (default: 5)")
    shown = added.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON instead of a table")
    shown.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    add_hints(added)

    text = "write the features of image files to a parquet file"
    added = command("embed", text, "cat.jpg dog.jpg --model vit-b-16 --out features.parquet", ["images", "model"])
    add_images_and_model(added)
    added.add_argument("--out", required=True, type=Path, help="new .parquet file")
    kinds = "what a classifier would read (default); class token, mean of the patches, both; or the grid of patches"
    added.add_argument("--feature", choices=FEATURES, default="pooled", help=kinds)
    added.add_argument("--force", action="store_true", help="replace OUT")
    add_hints(added)

    text = "draw attention and other figures of a model on images: one page, PNG files and arrays"
    added = command("show", text, "cat.jpg dog.jpg --model vit-b-16 --out page", ["images", "model"])
    add_images_and_model(added)
    added.add_argument("--compare", help="a second model, shown side by side with the first")
    place = "place in the first image to compare all patches with: 0 0 top left, 1 1 bottom right (default: 0.5 0.5)"
    added.add_argument("--point", type=float, nargs=2, default=(0.5, 0.5), metavar=("DOWN", "ACROSS"), help=place)
    added.add_argument("--out", required=True, type=Path, help="new or empty folder")
    add_hints(added)


def add_browsing(command: Command) -> None:
    """Add the command that writes a page of many images."""
    text = "write a page to look through the images of features or predictions: a map, neighbours, mistakes"
    added = command("browse", text, "features --predictions predictions --out page")
    added.add_argument("features", help="parquet file, or output folder of extract_features.py or predict.py")
    added.add_argument("--out", required=True, type=Path, help="new or empty folder")
    added.add_argument("--predictions", metavar="PATH", help="predictions for the same images, joined by row")
    added.add_argument("--column", help="column of features (default: feature, or the only one)")
    added.add_argument("--map", choices=MAPS, default="pca", help="how images are placed (umap: with umap-learn)")
    source = "where the images and true labels are, if not in the files of the column path: as for finetune"
    added.add_argument("--dataset", help=source)
    added.add_argument("--dataset-subset", "--dataset_subset", help="configuration of a dataset that has several")
    added.add_argument("--split", help="split of the dataset (default: that of the run, else train)")
    added.add_argument("--image-column", "--image_column", help="image column of the dataset, if there are several")
    labels = "column of true labels, of the dataset if one is given (default: found by its type or name)"
    added.add_argument("--label-column", "--label_column", help=labels)
    matching = "match true labels with the model's classes by name or by number, as evaluate does; none: leave them out"
    choices = ("name", "number", "none")
    added.add_argument("--labels-by", "--labels_by", choices=choices, default="name", help=matching)


def add_others(command: Command) -> None:
    """Add the commands for the Hub, the examples and bug reports."""
    added = command("push", "upload the folder of a saved model to the Hub, in one commit", "vit-b-16 user/vit-b-16")
    added.add_argument("folder", type=Path, help="folder of a saved model")
    added.add_argument("repo", help="user/name; created if it does not exist")
    added.add_argument("--private", action="store_true", help="make the repository private")
    added.add_argument("--revision", help="branch to commit to; created if it does not exist")
    added.add_argument("--dry-run", action="store_true", help="list what would be uploaded, without uploading")
    included = "also upload this file of the folder, by its exact path: plain text, PNG or JPEG; repeatable"
    added.add_argument("--include", action="append", default=[], metavar="PATH", help=included)
    report = "also upload the report of a training run: it shows images of the dataset, with the names of their files"
    added.add_argument("--include-report", action="store_true", help=report)
    added.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="do not upload these files")
    added.add_argument("--message", default="Upload model", help="commit message")

    command("env", "print installed versions and hardware, for bug reports", "")

    text = "write the example scripts, images and small trained checkpoint that come with the package"
    added = command("examples", text, "my-examples")
    added.add_argument("out", type=Path, nargs="?", default=Path("examples"), help="new folder (default: ./examples)")
    added.set_defaults(find_examples=examples_folder)
    added.add_argument(
        "--path", action="store_true", help="print the folder in which they are installed, and write nothing"
    )


def add_images_and_model(command: argparse.ArgumentParser) -> None:
    """Add the arguments for the images and the model."""
    command.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    command.add_argument("--model", required=True, help="file, folder or Hub id; the options describe this one")


def size(text: str) -> int | tuple[int, int]:
    """Parse an image size: 224 or 224x192 (height x width)."""
    sides = [int(side) for side in text.lower().split("x")]
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError(text)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


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


# Options with the names of arguments of `from_checkpoint`, and their argparse keywords.
HINTS: dict[str, dict[str, Any]] = {
    "format": {"choices": FORMATS, "help": "format of the checkpoint, if its names do not show it"},
    "num_attention_heads": {"type": int, "help": "number of attention heads"},
    "head_dim": {"type": int, "help": "width of one head"},
    "attention_scale": {
        "type": number_or_word,
        "metavar": "SCALE",
        "help": "factor on the attention scores: a number, head_dim**-0.5 or hidden_size**-0.5",
    },
    "layer_norm_eps": {"type": float, "help": "epsilon of the norms"},
    "hidden_act": {"help": "activation of the MLP, such as gelu or quick_gelu"},
    "pooling": {"help": "pooling before the classifier, such as cls or mean"},
    "pool_prefix_tokens": {
        "action": argparse.BooleanOptionalAction,
        "help": "whether the pooling includes class and register tokens",
    },
    "final_norm": {"help": "before_pooling, after_pooling, both or none"},
    "block_type": {"help": "sequential, post_norm, parallel or branches"},
    "norm_type": {"help": "layer_norm or rms_norm"},
    "mlp_type": {"help": "mlp, swiglu or swiglu_packed (the gate is the first half)"},
    "position_embedding_type": {"help": "learned (a table), sincos_2d or none"},
    "rope_type": {"help": "none: nothing rotates queries and keys (a rotation opens by its --architecture)"},
    "position_embedding_on_prefix": {
        "action": argparse.BooleanOptionalAction,
        "help": "whether the tokens before the patches have position embeddings",
    },
    "image_size": {"type": size, "metavar": "SIZE", "help": "in pixels: 224, or 224x192 (height x width)"},
    "patch_size": {"type": size, "metavar": "SIZE", "help": "in pixels: 16, or 16x8 (height x width)"},
    "num_channels": {"type": int, "help": "number of input channels"},
    "architecture": {
        "help": "the source's name of the model, such as vit_small_patch16_224 (timm) or vit_b_16 (torchvision), or "
        "its class, such as ViTModel, if it is of transformers and has no config.json"
    },
    "layout": {"help": "one of the format's layouts, such as the release that wrote the checkpoint"},
    "image_mean": {"type": float, "nargs": "+", "help": "mean of each channel, for pixel values in [0, 1]"},
    "image_std": {"type": float, "nargs": "+", "help": "standard deviation of each channel, for values in [0, 1]"},
    "key": {"help": "which model, if a file contains several, such as ema"},
    "drop": {
        "action": "append",
        "metavar": "PART",
        "help": "leave out a part: head, the classifier, to open the encoder alone; in an export also mask_token, "
        "which no output depends on, if the target cannot store it",
    },
    "revision": {"help": "branch, tag or commit of a Hub repository"},
}


def add_hints(command: argparse.ArgumentParser) -> None:
    """Add the options for settings that a checkpoint may not contain, as the last group of the help."""
    known = command.add_argument_group("settings that the checkpoint may not contain")
    for name, option in HINTS.items():
        known.add_argument(f"--{name.replace('_', '-')}", **option)
    labels = "file with the label names: a JSON list or object (number to name), or one name per line"
    known.add_argument("--labels", type=Path, metavar="FILE", help=labels)


class Parser(argparse.ArgumentParser):
    """Parser whose error messages contain only printable characters, even if a file name does not."""

    def error(self, message: str) -> NoReturn:
        super().error("".join(char if char.isprintable() else ascii(char)[1:-1] for char in message[:1000]))


class ShowVersion(argparse.Action):
    """Action that looks up and prints the version of the installed package."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        import importlib.metadata  # slow: a third of the time that printing the help takes

        print(f"plain-vit {importlib.metadata.version('plain-vit')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
