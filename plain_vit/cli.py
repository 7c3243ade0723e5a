"""The `plain-vit` command: look into a checkpoint, convert it, prove it, and go back."""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .errors import CheckpointError, PlainViTError

FORMATS = ("timm", "vit_pytorch", "torchvision", "transformers", "google")
# The options that are arguments of `from_checkpoint` too, under the same names.
HINTS = (
    "format", "num_attention_heads", "head_dim", "attention_scale", "layer_norm_eps", "hidden_act", "pooling",
    "pool_prefix_tokens", "block_type", "position_embedding_type", "position_embedding_on_prefix", "image_size",
    "patch_size", "num_channels", "architecture", "layout", "key", "image_mean", "image_std", "revision",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words of the command line behind its name; those of this process if not given.

    Returns:
        The exit code: 0, or that of the error's kind (see `plain_vit.errors`).
    """
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except PlainViTError as error:
        if options.debug:
            traceback.print_exc()
        else:
            print(f"plain-vit: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the stack trace of an error")

    hints = argparse.ArgumentParser(add_help=False)
    known = hints.add_argument_group("what you know and the checkpoint may not say")
    known.add_argument("--format", choices=FORMATS)
    flag = argparse.BooleanOptionalAction
    known.add_argument("--num-attention-heads", type=int, help="heads of each attention")
    known.add_argument("--head-dim", type=int, help="width of one head")
    scale = "factor on the attention scores: a number, head_dim**-0.5 or hidden_size**-0.5"
    known.add_argument("--attention-scale", type=number_or_word, metavar="SCALE", help=scale)
    known.add_argument("--layer-norm-eps", type=float, help="epsilon of every norm")
    known.add_argument("--hidden-act", help="activation of the MLP, such as gelu or quick_gelu")
    known.add_argument("--pooling", help="what the classifier reads, such as cls or mean")
    known.add_argument("--pool-prefix-tokens", action=flag, help="whether the pooling reads class and register tokens")
    known.add_argument("--block-type", help="sequential, post_norm, parallel or branches")
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

    main_parser = argparse.ArgumentParser(prog="plain-vit", description=__doc__)
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, parents=[shared, *parents])
        added.set_defaults(run=run)
        return added

    added = command("inspect", inspect, "say what a checkpoint is, what was inferred and what is open", hints)
    added.add_argument("source", help="file, folder or Hub id")

    added = command("convert", convert, "turn any plain ViT checkpoint into a Hugging Face folder", hints)
    added.add_argument("source", help="file, folder or Hub id")
    added.add_argument("out", type=Path, nargs="?", help="new or empty folder; may be left out with --push")
    added.add_argument("--no-verify", action="store_true", help="do not compare with the source's own package")
    added.add_argument("--force", action="store_true", help="replace what OUT holds")
    added.add_argument("--push", metavar="REPO", help="send the folder to this repository on the Hub (user/name)")
    added.add_argument("--private", action="store_true", help="let nobody else see that repository")
    added.set_defaults(refuse=added.error)

    added = command("verify", verify, "print the largest difference between two checkpoints, stage by stage", hints)
    added.add_argument("a", help="file, folder or Hub id; the options describe this one")
    added.add_argument("b", help="file, folder or Hub id")

    added = command("export", export, "write a checkpoint in another package's own layout", hints)
    added.add_argument("source", help="file, folder or Hub id")
    added.add_argument("out", type=Path, help="a new file, or a new or empty folder, as the format has it")
    added.add_argument("--to", required=True, choices=FORMATS)
    added.add_argument("--to-layout", help="which of that format's layouts; today's if not given")
    dropped = "leave out a part that no output reads and the target has no place for: mask_token"
    added.add_argument("--drop", action="append", default=[], metavar="PART", help=dropped)
    added.add_argument("--no-image-processor", action="store_true", help="write the model alone")
    added.add_argument("--force", action="store_true", help="replace what OUT holds")

    added = command("push", push, "send the folder of a saved model to the Hub, in one commit")
    added.add_argument("folder", type=Path)
    added.add_argument("repo", help="user/name; made if it is not there")
    added.add_argument("--private", action="store_true", help="let nobody else see the repository")
    added.add_argument("--revision", help="branch to commit to, made if it is not there")
    added.add_argument("--dry-run", action="store_true", help="list what would be sent, and send nothing")
    added.add_argument("--allow", nargs="+", default=[], metavar="PATTERN", help="send these files in any case")
    added.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="do not send these files")
    added.add_argument("--message", default="Upload model", help="of the commit")

    added = command("show", show, "draw what a model sees in images: pictures, one page, and their arrays", hints)
    added.add_argument("images", nargs="+", metavar="IMAGE")
    added.add_argument("--model", required=True, help="file, folder or Hub id; the options describe this one")
    added.add_argument("--compare", help="a second model, drawn beside the first")
    added.add_argument("--out", required=True, type=Path, help="new or empty folder")
    return main_parser


def inspect(options: argparse.Namespace) -> None:
    """Print what a checkpoint is."""
    from .conversion import from_checkpoint

    print(from_checkpoint(options.source, **hints_of(options)).report)


def convert(options: argparse.Namespace) -> None:
    """Write a Hugging Face folder, after the source's own package has confirmed the numbers."""
    from .conversion import convert_checkpoint
    from .conversion.writing import staged_folder
    from .hub import check_repository, push_folder
    from .model_card import facts_of_conversion, write_card

    if options.out is None and options.push is None:
        options.refuse("say where to write: OUT, or --push REPO")
    if options.push is not None:
        check_repository(options.push)
    sources = [options.source] if Path(options.source).exists() else []
    with ExitStack() as temporary:
        out = options.out
        if out is None:
            out = Path(temporary.enter_context(TemporaryDirectory()), options.push.rpartition("/")[2])
        with staged_folder(out, force=options.force, sources=sources) as folder:  # refuses one in use before any work
            converted = convert_checkpoint(options.source, folder, verify=not options.no_verify, **hints_of(options))
            write_card(folder, facts_of_conversion(converted.report, out.name, options.revision))
            print(converted.report)
        if options.out is not None:
            print(f"written: {out}")
        if options.push is not None:
            print(push_folder(out, options.push, private=options.private))


def verify(options: argparse.Namespace) -> None:
    """Print how far two checkpoints are apart."""
    from .conversion import from_checkpoint
    from .conversion.parity import compare_models, probe_images

    a = from_checkpoint(options.a, **hints_of(options))
    b = from_checkpoint(options.b)
    differences = compare_models(a.model, b.model, probe_images(a.report.config))
    print(f"{'stage':12} {'max |a - b|':>12} {'max |a|':>12} {'share':>12}")
    for stage in differences:
        print(f"{stage.stage:12} {stage.difference:12.2e} {stage.scale:12.2e} {stage.relative:12.2e}")
    for name, opened in ((options.a, a), (options.b, b)):
        if opened.report.unproven:
            print(f"not proven by this, as no tensor of {name} shows it:")
            print("\n".join(f"  {inference}" for inference in opened.report.unproven))


def export(options: argparse.Namespace) -> None:
    """Write another package's own layout."""
    from .conversion import from_checkpoint, to_checkpoint

    converted = from_checkpoint(options.source, **hints_of(options))
    written = to_checkpoint(
        converted.model,
        options.out,
        format=options.to,
        layout=options.to_layout,
        image_processor=None if options.no_image_processor else converted.image_processor,
        force=options.force,
        sources=[options.source] if Path(options.source).exists() else [],
        drop=options.drop,
    )
    print(written)


def push(options: argparse.Namespace) -> None:
    """Send a folder to the Hub."""
    from .hub import push_folder

    names = ("private", "revision", "dry_run", "allow", "exclude", "message")
    print(push_folder(options.folder, options.repo, **{name: getattr(options, name) for name in names}))


def show(options: argparse.Namespace) -> None:
    """Draw what a model sees."""
    from .analysis.sheet import draw_sheet
    from .conversion import from_checkpoint

    first = from_checkpoint(options.model, **hints_of(options))
    names, compare = (options.model, ""), None
    if options.compare is not None:
        second = from_checkpoint(options.compare)
        names, compare = (options.model, options.compare), (second.model, second.image_processor)
    page = draw_sheet(options.images, first.model, first.image_processor, options.out, compare=compare, names=names)
    print(f"written: {page}")


def hints_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the hints that were given, by the names that `from_checkpoint` has."""
    given = {name: getattr(options, name) for name in HINTS}
    given["id2label"] = None if options.labels is None else read_labels(options.labels)
    return {name: value for name, value in given.items() if value is not None}


def read_labels(path: Path) -> list[str] | dict[int, str]:
    """Read names of labels, in their order or by their numbers.

    Raises:
        CheckpointError: It cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        names = json.loads(text) if path.suffix == ".json" else text.splitlines()
        if isinstance(names, dict):
            names = {int(number): name for number, name in names.items()}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as names of labels: {error}") from error
    listed = list(names.values()) if isinstance(names, dict) else names
    if not isinstance(listed, list) or not all(isinstance(name, str) and name.strip() for name in listed):
        raise CheckpointError(f"{path} holds more than names: expected a list, an object from number to name, or lines")
    return names


def size(text: str) -> int | tuple[int, int]:
    """Read 224 or 224x192 (height x width)."""
    sides = [int(side) for side in text.lower().split("x")]
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError(text)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def number_or_word(text: str) -> float | str:
    """Read a number, or leave a word as it is."""
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main())
