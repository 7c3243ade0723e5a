"""The `plain-vit` command, as far as it needs no torch: its words, their help, and what is wrong with them.

What each command does is in `plain_vit/cli.py`. Importing that takes seconds, because the package registers its classes
with transformers: it is left until there is something to do.
"""

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

FORMATS = ("timm", "vit_pytorch", "torchvision", "transformers", "google")
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npz")
# The options that are arguments of `from_checkpoint` too, under the same names.
HINTS = (
    "format", "num_attention_heads", "head_dim", "attention_scale", "layer_norm_eps", "hidden_act", "pooling",
    "pool_prefix_tokens", "block_type", "norm_type", "mlp_type", "position_embedding_type",
    "position_embedding_on_prefix", "image_size", "patch_size", "num_channels", "architecture", "layout", "key",
    "image_mean", "image_std", "revision",
)  # fmt: skip
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
INTERRUPTED = 130  # what shells know for Ctrl-C
NOT_FOUND = 3  # the exit code of a CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words of the command line after its name; those of this process if not given.

    Returns:
        The exit code: 0, or that of the error's kind (see `plain_vit.errors`).
    """
    try:
        options = parser().parse_args(arguments)
        for name in options.reads:
            if (path := missing(getattr(options, name))) is not None:
                print(f"plain-vit: {path!r} does not exist, and is not a Hub id (user/name)", file=sys.stderr)
                return NOT_FOUND
        return with_package(options)
    except KeyboardInterrupt:
        print("plain-vit: interrupted", file=sys.stderr)
        return INTERRUPTED


def with_package(options: argparse.Namespace) -> int:
    """Import the package, which takes seconds, and run the command."""
    in_main = threading.current_thread() is threading.main_thread()
    if ours := in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    try:
        # With the conversion, which most commands begin by importing: it takes the longest.
        from plain_vit import cli, conversion  # noqa: F401
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.run(options)


def leave(number: int, frame: Any) -> None:
    """Leave at once: in the middle of an import nothing has begun yet, and an exception may come out as another."""
    os.write(2, b"plain-vit: interrupted\n")
    os._exit(INTERRUPTED)


def missing(named: Any) -> str | None:
    """Return the first of these paths that does not exist and cannot be the id of a Hub repository."""
    for path in map(str, named if isinstance(named, list) else [named]):
        if not os.path.exists(path) and (not HUB_ID.fullmatch(path) or path.endswith(WEIGHTS)):
            return path
    return None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    main_parser = Parser(
        prog="plain-vit", description="Look into a ViT checkpoint, convert it, prove the numbers equal, and go back."
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

    text = "say what a checkpoint is, what was inferred and what is open"
    added = command("inspect", text, "vit.pt --num-attention-heads 12", ["source"])
    added.add_argument("source", help="file, folder or Hub id")
    add_hints(added)

    text = "turn any plain ViT checkpoint into a Hugging Face folder"
    added = command("convert", text, "vit_b_16-c867db91.pth vit-b-16", ["source"])
    added.add_argument("source", help="file, folder or Hub id")
    added.add_argument("out", type=Path, nargs="?", help="new or empty folder; may be left out with --push")
    added.add_argument("--no-verify", action="store_true", help="do not compare with the source's own package")
    added.add_argument("--force", action="store_true", help="replace OUT; a folder with other files is kept beside")
    added.add_argument("--push", metavar="REPO", help="send the folder to this repository on the Hub (user/name)")
    added.add_argument("--private", action="store_true", help="make that repository private")
    add_hints(added)

    text = "print the largest difference between two checkpoints, stage by stage, and fail where it is too large"
    added = command("verify", text, "vit_b_16-c867db91.pth vit-b-16", ["a", "b"])
    added.add_argument("a", help="file, folder or Hub id; the options describe this one")
    added.add_argument("b", help="file, folder or Hub id")
    allowed = "largest difference that passes, as a share of the largest value of its stage: 1e-5 if not given"
    added.add_argument("--tolerance", type=share, metavar="SHARE", help=allowed)
    add_hints(added)

    text = "write a checkpoint in another package's own layout"
    added = command("export", text, "vit-b-16 timm-folder --to timm", ["source"])
    added.add_argument("source", help="file, folder or Hub id")
    added.add_argument("out", type=Path, help="a new file, or a new or empty folder, as the format has it")
    added.add_argument("--to", required=True, choices=FORMATS, help="whose layout")
    added.add_argument("--to-layout", help="which of that format's layouts; today's if not given")
    dropped = "leave out a part that no output reads and the target has no place for: mask_token"
    added.add_argument("--drop", action="append", default=[], metavar="PART", help=dropped)
    added.add_argument("--no-image-processor", action="store_true", help="write the model alone")
    added.add_argument("--force", action="store_true", help="replace OUT; a folder with other files is kept beside")
    add_hints(added)

    command("env", "print the versions of what is installed, and the machine, to report a fault with", "")

    text = "write the examples that come with the package: scripts, images, and a small trained checkpoint"
    added = command("examples", text, "my-examples")
    added.add_argument(
        "out", type=Path, nargs="?", default=Path("examples"), help="new folder; ./examples if not given"
    )

    added = command("push", "send the folder of a saved model to the Hub, in one commit", "vit-b-16 user/vit-b-16")
    added.add_argument("folder", type=Path, help="folder of a saved model")
    added.add_argument("repo", help="user/name; made if it is not there")
    added.add_argument("--private", action="store_true", help="make the repository private")
    added.add_argument("--revision", help="branch to commit to, made if it is not there")
    added.add_argument("--dry-run", action="store_true", help="list what would be sent, and send nothing")
    included = "send this file of the folder besides; its exact path, once for each"
    added.add_argument("--include", action="append", default=[], metavar="PATH", help=included)
    added.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="do not send these files")
    added.add_argument("--message", default="Upload model", help="of the commit")

    text = "draw what a model sees in images: pictures, one page, and their arrays"
    added = command("show", text, "cat.jpg dog.jpg --model vit-b-16 --out page", ["images", "model"])
    added.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    added.add_argument("--model", required=True, help="file, folder or Hub id; the options describe this one")
    added.add_argument("--compare", help="a second model, drawn beside the first")
    added.add_argument("--out", required=True, type=Path, help="new or empty folder")
    add_hints(added)
    return main_parser


def add_hints(command: argparse.ArgumentParser) -> None:
    """Add the options that say what a checkpoint may not, last in the help."""
    known = command.add_argument_group("what you know and the checkpoint may not say")
    flag = argparse.BooleanOptionalAction
    known.add_argument("--format", choices=FORMATS, help="whose checkpoint it is, where its names do not show it")
    known.add_argument("--num-attention-heads", type=int, help="heads of each attention")
    known.add_argument("--head-dim", type=int, help="width of one head")
    scale = "factor on the attention scores: a number, head_dim**-0.5 or hidden_size**-0.5"
    known.add_argument("--attention-scale", type=number_or_word, metavar="SCALE", help=scale)
    known.add_argument("--layer-norm-eps", type=float, help="epsilon of every norm")
    known.add_argument("--hidden-act", help="activation of the MLP, such as gelu or quick_gelu")
    known.add_argument("--pooling", help="what the classifier reads, such as cls or mean")
    known.add_argument("--pool-prefix-tokens", action=flag, help="whether the pooling reads class and register tokens")
    known.add_argument("--block-type", help="sequential, post_norm, parallel or branches")
    known.add_argument("--norm-type", help="layer_norm or rms_norm")
    known.add_argument("--mlp-type", help="mlp, swiglu or swiglu_packed (its gate is the first half)")
    known.add_argument(
        "--position-embedding-type", help="learned (a table, and no rotary positions), sincos_2d or none"
    )
    prefixed = "whether the tokens before the patches have rows in the table of positions"
    known.add_argument("--position-embedding-on-prefix", action=flag, help=prefixed)
    known.add_argument("--image-size", type=size, metavar="SIZE", help="in pixels: 224, or 224x192 (height x width)")
    known.add_argument("--patch-size", type=size, metavar="SIZE", help="in pixels: 16, or 16x8 (height x width)")
    known.add_argument("--num-channels", type=int, help="channels of the input")
    named = "the source's name of the model, such as vit_small_patch16_224 (timm) or vit_b_16 (torchvision)"
    known.add_argument("--architecture", help=named)
    known.add_argument("--layout", help="which of the format's layouts, such as the release that wrote the checkpoint")
    known.add_argument("--image-mean", type=float, nargs="+", help="mean of each channel, as values in 0..1")
    known.add_argument("--image-std", type=float, nargs="+", help="deviation of each channel, as values in 0..1")
    known.add_argument("--key", help="which of several models in one file, such as ema")
    labels = "file with the names of the labels: a JSON list or object (number to name), or one name per line"
    known.add_argument("--labels", type=Path, metavar="FILE", help=labels)
    known.add_argument("--revision", help="branch, tag or commit of a Hub repository")


class Parser(argparse.ArgumentParser):
    """Prints its errors in printable characters, whatever was typed or expanded from the names of files."""

    def error(self, message: str) -> NoReturn:
        super().error("".join(char if char.isprintable() else ascii(char)[1:-1] for char in message[:1000]))


class ShowVersion(argparse.Action):
    """Prints the version of the installed package, which is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        import importlib.metadata  # which takes a third of the time that printing the help does

        print(f"plain-vit {importlib.metadata.version('plain-vit')}")
        parser.exit()


def size(text: str) -> int | tuple[int, int]:
    """Read 224 or 224x192 (height x width)."""
    sides = [int(side) for side in text.lower().split("x")]
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError(text)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def share(text: str) -> float:
    """Read a share, 0 or more."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number


def number_or_word(text: str) -> float | str:
    """Read a number, or leave a word as it is."""
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main())
