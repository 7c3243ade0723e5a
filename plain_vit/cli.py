"""What the commands of `plain-vit` do; `plain_vit_command.py` has their words and their help."""

import argparse
import io
import os
import shutil
import sys
import traceback
import warnings
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plain_vit_command import HINTS, main

from .errors import (
    CheckpointError,
    OutputExistsError,
    PlainViTError,
    UnsafeFileError,
    VerificationError,
    in_bytes,
    printable,
)


def run(options: argparse.Namespace) -> int:
    """Run the command that was parsed, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a letter gets its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            COMMANDS[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # as by `| head`: nobody reads any more, and nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PlainViTError.exit_code
    except (PlainViTError, OSError, MemoryError) as error:
        if options.debug:
            traceback.print_exc()
        else:
            words = "there is not enough memory" if isinstance(error, MemoryError) else printable(str(error))
            print(f"plain-vit: {type(error).__name__}: {words}", file=sys.stderr)
        return error.exit_code if isinstance(error, PlainViTError) else PlainViTError.exit_code
    return 0


def say(what: object) -> None:
    """Print what a command found, in which there may be names of other people's files."""
    print(printable(str(what)))


def show_warning(message: Warning | str, *where: Any, **others: Any) -> None:
    """Print a warning without the line of code that gave it."""
    print(f"plain-vit: {printable(str(message))}", file=sys.stderr)


def inspect(options: argparse.Namespace) -> None:
    """Print what a checkpoint is."""
    from .conversion import from_checkpoint

    say(from_checkpoint(options.source, **hints_of(options)).report)


def convert(options: argparse.Namespace) -> None:
    """Write a Hugging Face folder, after the source's own package has confirmed the numbers."""
    from .conversion import convert_checkpoint
    from .files.staging import staged_folder
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
            say(converted.report)
        if options.out is not None:
            say(f"written: {out}")
        if options.push is not None:
            say(push_folder(out, options.push, private=options.private))


def verify(options: argparse.Namespace) -> None:
    """Print how far two checkpoints are apart, and fail where that is more than the tolerance."""
    from .conversion import from_checkpoint
    from .conversion.parity import compare_models, memory_of_probing, probe_images
    from .conversion.plan import free_memory
    from .conversion.report import TOLERANCE

    names = options.a, options.b
    opened = from_checkpoint(options.a, **hints_of(options)), from_checkpoint(options.b)
    configs = [each.report.config for each in opened]
    for size in ("image_shape", "num_channels", "num_labels"):
        a, b = (getattr(config, size) for config in configs)
        if a != b:
            raise VerificationError(f"{size} of {names[0]} is {a}, of {names[1]} {b}: these are different models")
    if (needed := max(map(memory_of_probing, configs))) > (free := free_memory()):
        raise UnsafeFileError(f"comparing takes {in_bytes(needed)} of memory, and {in_bytes(free)} are free")
    differences = compare_models(opened[0].model, opened[1].model, probe_images(configs[0]))
    print(f"{'stage':12} {'max |a - b|':>12} {'max |a|':>12} {'share':>12}")
    for stage in differences:
        say(f"{stage.stage:12} {stage.difference:12.2e} {stage.scale:12.2e} {stage.relative:12.2e}")
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    if beyond := [stage for stage in differences if not stage.relative <= tolerance]:  # NaN is no number within it
        first, (a_dtype, b_dtype) = beyond[0], (each.model.dtype for each in opened)
        dtypes = "" if a_dtype == b_dtype else f" (the dtypes differ, {a_dtype} and {b_dtype})"
        raise VerificationError(
            f"they differ: {first.stage} by {first.relative:.1e} of its largest value, and {tolerance:.0e} is allowed"
            f"{dtypes}; --tolerance allows more"
        )
    say(f"equal: no stage differs by more than {tolerance:.0e} of its largest value")
    for name, each in zip(names, opened, strict=True):
        if each.report.unproven:
            lines = [f"  {inference}" for inference in each.report.unproven]
            say("\n".join([f"not proven by this, as no tensor of {name} shows it:", *lines]))


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
    say(written)


def push(options: argparse.Namespace) -> None:
    """Send a folder to the Hub."""
    from .hub import push_folder

    names = ("private", "revision", "dry_run", "include", "exclude", "message")
    say(push_folder(options.folder, options.repo, **{name: getattr(options, name) for name in names}))


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
    say(f"written: {page}")


def env(options: argparse.Namespace) -> None:
    """Print what a report of a fault needs to say of the machine."""
    from .environment import describe_environment

    for name, value in describe_environment().items():
        say(f"{name + ':':18} {value}")


def examples(options: argparse.Namespace) -> None:
    """Write the examples, which are in the package where it was installed, and beside it in a checkout."""
    from .files.staging import staged_folder

    if options.out.is_dir() and any(options.out.iterdir()):
        raise OutputExistsError(f"{options.out} is not empty: give the name of a new folder.")
    here = Path(__file__).parent
    shipped = next(folder / "examples" for folder in (here, here.parent) if (folder / "examples").is_dir())
    with staged_folder(options.out, sources=[shipped]) as folder:
        shutil.copytree(shipped, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    say(f"written: {options.out}")


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
    from .files.texts import parse_json, read_small_file

    content = read_small_file(path)
    try:
        names = (
            parse_json(content, str(path), (dict, list)) if path.suffix == ".json" else content.decode().splitlines()
        )
        if isinstance(names, dict):
            names = {int(number): name for number, name in names.items()}
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as names of labels: {error}") from error
    listed = list(names.values()) if isinstance(names, dict) else names
    if not all(isinstance(name, str) and name.strip() for name in listed):
        raise CheckpointError(f"{path} holds more than names: expected a list, an object from number to name, or lines")
    return names


COMMANDS = {
    "inspect": inspect, "convert": convert, "verify": verify, "export": export, "push": push, "show": show, "env": env,
    "examples": examples,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
