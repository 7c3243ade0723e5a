"""Commands of `plain-vit`; `plain_vit_command.py` parses their arguments.

What needs torch is imported by the commands themselves: before, mistakes are reported, which takes no time.
"""

import argparse
import io
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    DataError,
    ExportError,
    OutputExistsError,
    PlainViTError,
    UnsafeFileError,
    VerificationError,
    counted,
    in_bytes,
    printable,
    told,
)

BATCH = 8  # images in a forward pass over a few files


def run(options: argparse.Namespace, prepare: Callable[[], object]) -> int:
    """Run the parsed command, and return its exit code.

    Args:
        options: Its arguments.
        prepare: Refuses wrong paths, and imports torch.
    """
    for stream in (sys.stdout, sys.stderr):  # escape characters that the terminal cannot print
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            prepare()
            COMMANDS[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PlainViTError.exit_code
    except (PlainViTError, OSError, MemoryError) as error:
        if options.debug:
            traceback.print_exc()
        else:
            shown = error
            if isinstance(error, AmbiguousCheckpointError) and error.source == described_source(options):
                shown = error.on(["plain-vit", *options.words])
            print(told(shown), file=sys.stderr)
        return error.exit_code if isinstance(error, PlainViTError) else PlainViTError.exit_code
    return 0


def described_source(options: argparse.Namespace) -> str | None:
    """Return the source checkpoint named in a command's options, or None."""
    return next((str(getattr(options, name)) for name in ("source", "a", "model") if name in options), None)


def say(what: object) -> None:
    """Print a result, escaping names from untrusted files."""
    print(printable(str(what)))


def tell(
    options: argparse.Namespace,
    result: Any,
    lines: Sequence[object] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Print a result as `--output-format` asks for.

    Args:
        options: The options of the command.
        result: What JSON shows; numbers that are not finite become null.
        lines: What a person reads (default: the result).
        rows: What CSV shows, for commands that have it.
    """
    from .files.csv import csv_table

    if options.output_format == "json":
        known = json.loads(json.dumps(result, default=_plain), parse_constant=lambda number: None)
        print(json.dumps(known, indent=2))
    elif options.output_format == "csv":
        print(csv_table(rows[0], [row.values() for row in rows]) if rows else "", end="")
    else:
        for line in [result] if lines is None else lines:
            say(line)


def _plain(value: Any) -> Any:
    """Return what JSON has no form for: a config, a result, or a mapping that is no dict."""
    if hasattr(value, "to_json_string"):
        return json.loads(value.to_json_string(use_diff=False))
    return dict(value) if isinstance(value, Mapping) else vars(value)


def show_warning(message: Warning | str, *where: Any, **others: Any) -> None:
    """Print a warning without the line of code that raised it."""
    print(f"plain-vit: {printable(str(message))}", file=sys.stderr)


def inspect(options: argparse.Namespace) -> None:
    """Print the report of a checkpoint."""
    from .conversion import from_checkpoint

    report = from_checkpoint(options.source, **hints_of(options)).report
    tell(options, {**vars(report), "unproven": report.unproven}, [report])


def convert(options: argparse.Namespace) -> None:
    """Write a Hugging Face folder, after comparing its outputs with those of the source's own package."""
    from .conversion import convert_checkpoint
    from .files.staging import staged_folder
    from .hub import check_repository, push_folder
    from .hub.card import facts_of_conversion, source_folder, write_card
    from .hub.licenses import copy_license_files

    if options.push is not None:
        check_repository(options.push)
    shown = say if options.output_format == "text" else str  # JSON is one object, at the end
    sources = [options.source] if Path(options.source).exists() else []
    with ExitStack() as temporary:
        out = options.out
        if out is None:
            out = Path(temporary.enter_context(TemporaryDirectory()), options.push.rpartition("/")[2])
        with staged_folder(
            out, force=options.force, sources=sources
        ) as folder:  # fails before any work if the folder is in use
            converted = convert_checkpoint(options.source, folder, verify=not options.no_verify, **hints_of(options))
            if (read := source_folder(converted.report, options.revision)) is not None:
                copy_license_files(read, folder)
            write_card(folder, facts_of_conversion(converted.report, out.name, options.revision))
            shown(converted.report)
        result = {**vars(converted.report), "unproven": converted.report.unproven}
        if options.out is not None:
            result["written"] = str(out)
            shown(f"written: {out}")
        if options.push is not None:
            result["push"] = push_folder(out, options.push, private=options.private)
            shown(result["push"])
    if options.output_format == "json":
        tell(options, result)


def verify(options: argparse.Namespace) -> None:
    """Print the differences between two checkpoints, and fail if one exceeds the tolerance."""
    import psutil

    from .conversion import from_checkpoint
    from .conversion.parity import compare_models, memory_of_probing, probe_images
    from .conversion.report import TOLERANCE
    from .conversion.unseen import Described, unseen_differences

    names = options.a, options.b
    opened = from_checkpoint(options.a, **hints_of(options)), from_checkpoint(options.b)
    configs = [each.report.config for each in opened]
    for size in ("image_shape", "num_channels", "num_labels"):
        a, b = (getattr(config, size) for config in configs)
        if a != b:
            raise VerificationError(f"{size} of {names[0]} is {a}, of {names[1]} {b}: these are different models")
    if (needed := max(map(memory_of_probing, configs))) > (free := psutil.virtual_memory().available):
        raise UnsafeFileError(f"the comparison needs {in_bytes(needed)} of memory, but only {in_bytes(free)} are free")
    differences = compare_models(opened[0].model, opened[1].model, probe_images(configs[0]))
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    beyond = [stage for stage in differences if not stage.relative <= tolerance]  # NaN is beyond it too
    lines, unproven = [f"{'stage':12} {'max |a - b|':>12} {'max |a|':>12} {'relative':>12}"], dict[str, list[str]]()
    for each in differences:
        lines.append(f"{each.stage:12} {each.difference:12.2e} {each.scale:12.2e} {each.relative:12.2e}")
    others = list[str]()
    if not beyond:
        lines.append(f"equal: no stage differs by more than {tolerance:.0e} of its largest value")
        if others := unseen_differences(*(Described(one.report.config, one.image_processor) for one in opened)):
            lines += ["differences without effect on these images:", *(f"  {line}" for line in others)]
        for name, one in zip(names, opened, strict=True):
            if given := one.report.unproven_lines():
                unproven[name] = given
                lines.append(f"not proven, because the tensors of {name} do not show it:")
                lines += [f"  {line}" for line in given]
    stages = [{**vars(each), "relative": each.relative} for each in differences]
    verdict = {"equal": not beyond, "tolerance": tolerance, "without_effect": others, "unproven": unproven}
    tell(options, {**verdict, "stages": stages}, lines, stages)
    if beyond:
        first, (a_dtype, b_dtype) = beyond[0], (each.model.dtype for each in opened)
        dtypes = "" if a_dtype == b_dtype else f" (the dtypes differ, {a_dtype} and {b_dtype})"
        raise VerificationError(
            f"they differ: {first.stage} by {first.relative:.1e} of its largest value, where {tolerance:.0e} is allowed"
            f"{dtypes}; --tolerance allows more"
        )


def export(options: argparse.Namespace) -> None:
    """Export a checkpoint to the format of another package, or to the graph of an engine."""
    from .conversion import from_checkpoint, to_checkpoint
    from .conversion.tables.format import HEAD
    from .inference import EngineOptions, to_engine
    from .inference.engines import ENGINES

    names = [field.name for field in fields(EngineOptions)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    parts: list[str] = options.drop or []
    if options.to in ENGINES and (options.to_layout or options.into or options.into_key or parts):
        raise ExportError(
            f"{options.to} is an engine, which has no layouts and stores only the model, without what no output needs"
        )
    engine_options = EngineOptions(**given)  # fails before any work
    hints = {**hints_of(options), "drop": [HEAD] if HEAD in parts else None}
    converted = from_checkpoint(options.source, **hints)
    shared: dict[str, Any] = {
        "image_processor": None if options.no_image_processor else converted.image_processor,
        "force": options.force,
        "sources": [options.source] if Path(options.source).exists() else [],
    }
    if options.to in ENGINES:
        tell(options, to_engine(converted.model, options.out, engine=options.to, options=engine_options, **shared))
    else:
        drop = [part for part in parts if part != HEAD]
        shared |= {"layout": options.to_layout, "into": options.into, "into_key": options.into_key}
        export = to_checkpoint(converted.model, options.out, format=options.to, drop=drop, **shared)
        tell(options, export)


def average(options: argparse.Namespace) -> None:
    """Write the mean of classifiers."""
    from .files.staging import staged_folder
    from .hub.markdown import code
    from .training.reports.finishing import average_models, save_finished

    with staged_folder(options.out, sources=options.folders) as folder:
        mean = average_models(options.folders, None if options.dataset is None else validation_of(options))
        origin = f"Mean of the weights of {', '.join(code(one.name) for one in mean.chosen)} (Wortsman et al. 2022)."
        save_finished(folder, *mean[:2], options.folders[0], name=options.out.name, origin=origin)
    for one, accuracy in mean.accuracies.items():
        say(f"{one}: accuracy {accuracy:.2%}" + ("" if one in [*mean.chosen, "mean"] else ", left out"))
    say(f"written: {options.out}, the mean of {len(mean.chosen)} models")


def calibrate(options: argparse.Namespace) -> None:
    """Write a classifier with calibrated probabilities."""
    from .files.staging import staged_folder
    from .hub.markdown import code
    from .training.models import open_classifier
    from .training.reports.finishing import calibrate_model, save_finished

    with staged_folder(options.out, sources=[options.source]) as folder:
        opened, source = open_classifier(options.source), Path(options.source)
        temperature, *results = calibrate_model(*opened, validation_of(options))
        origin = f"{code(source.name)}, its classifier divided by a temperature (Guo et al. 2017)."
        values = {"temperature": f"{temperature:.4f}", "fitted_on": f"{results[0].count} images"}
        save_finished(folder, *opened, source, name=options.out.name, origin=origin, **values)
    for when, each in zip(("before", "after"), results, strict=True):
        say(f"{when}: loss {each.loss:.4f}, calibration error {each.calibration.error:.2%}")
    say(f"written: {options.out}, temperature {temperature:.4f}, from {results[0].count} images")


def validation_of(options: argparse.Namespace) -> Any:
    """Open the dataset of a command with its validation split."""
    from .training.reports.finishing import validation_data

    given = {name: getattr(options, name) for name in ("dataset", "validation_split", "validation_fraction", "seed")}
    return validation_data(**{name: value for name, value in given.items() if value is not None})


def push(options: argparse.Namespace) -> None:
    """Upload a folder to the Hub."""
    from .hub import push_folder

    names = ("private", "revision", "dry_run", "include", "exclude", "include_report", "message")
    tell(options, push_folder(options.folder, options.repo, **{name: getattr(options, name) for name in names}))


def show(options: argparse.Namespace) -> None:
    """Write the page of figures about a model."""
    from .analysis.sheet import draw_sheet
    from .conversion import from_checkpoint

    first = from_checkpoint(options.model, **hints_of(options))
    names, compare = (options.model, ""), None
    if options.compare is not None:
        second = from_checkpoint(options.compare)
        names, compare = (options.model, options.compare), (second.model, second.image_processor)
    point = options.point[0], options.point[1]
    page = draw_sheet(
        options.images, first.model, first.image_processor, options.out, compare=compare, point=point, names=names
    )
    say(f"written: {page}")


def predict(options: argparse.Namespace) -> None:
    """Print the likeliest classes or labels of images, or the values of a regression."""
    from .inference import Predictor

    table, broken = table_of_files(Predictor, options, top=options.top)
    many, one, form = ("values", "value", "12.5g") if "values" in table.column_names else (
        "probabilities", "probability", "7.2%")  # fmt: skip
    images = [
        {"path": image["path"] or f"row {image['row']}", **{name: image[name] for name in ("labels", many)}}
        for image in table.to_pylist()
    ]
    lines, rows = [], []
    for image in images:
        lines.append(image["path"])
        for rank, (label, score) in enumerate(zip(image["labels"], image[many], strict=True), start=1):
            lines.append(f"  {score:{form}}  {label}")
            rows.append({"path": image["path"], "rank": rank, "label": label, one: score})
    tell(options, images, lines, rows)
    refuse_broken(broken)


def embed(options: argparse.Namespace) -> None:
    """Write the features of images."""
    from .files.staging import staged_file
    from .inference import FeatureExtractor
    from .inference.bulk import parquet

    with staged_file(options.out, force=options.force, sources=options.images) as new:
        table, broken = table_of_files(FeatureExtractor, options, feature=options.feature)
        parquet.write_table(table, new)
    say(f"written: {options.out}, {counted(table.num_rows, 'image')}")
    refuse_broken(broken)


def browse(options: argparse.Namespace) -> None:
    """Write the page for browsing many images."""
    from .browse import DatasetOptions, write_page

    where = {name: getattr(options, name) for name in ("dataset_subset", "split", "image_column")}
    names = ("column", "label_column", "predictions", "labels_by")
    page = write_page(
        options.features,
        options.out,
        **{name: getattr(options, name) for name in names},
        dataset=None if options.dataset is None else DatasetOptions(options.dataset, **where),
        map_kind=options.map,
    )
    say(page)
    for broken in page.broken:
        print(f"plain-vit: cannot be read: {printable(broken)}", file=sys.stderr)


def table_of_files(kind: Any, options: argparse.Namespace, **chosen: Any) -> tuple[Any, list[str]]:
    """Return the columns of images, and which cannot be read and why."""
    model, image_processor = open_for_inference(options)  # not prepared: that takes as long as a batch
    work = kind(model, image_processor=image_processor, batch_size=BATCH, **chosen)
    table, broken = work.table(images_of(options.images))
    if not table.num_rows:
        raise DataError(f"No image can be read: {', '.join(broken)}.")
    return table, broken


def images_of(named: Sequence[str]) -> Sequence[Any]:
    """Return image files, or the images of the one dataset that is named."""
    from .training.data import load_images
    from .training.data.decoding import as_files

    if len(named) > 1 or (Path(named[0]).is_file() and Path(named[0]).suffix not in (".parquet", ".tar")):
        return named
    images: Sequence[Any] = as_files(load_images(named[0], all_of_folder=True))["image"][:]
    return images


def open_for_inference(options: argparse.Namespace) -> tuple[Any, Any]:
    """Open the model of a command in float32, without gradients, or in its engine, and its image processor."""
    from .conversion import from_checkpoint
    from .files.other_files import is_exported
    from .inference.engine_models import open_with_processor

    hints = hints_of(options)
    if is_exported(options.model):
        if hints:
            raise CheckpointError(f"{options.model} was exported to an engine: omit the settings of a checkpoint")
        return open_with_processor(options.model)
    converted = from_checkpoint(options.model, **hints)
    if converted.image_processor is None:
        raise CheckpointError(f"{options.model} has no image processor: give --image-mean and --image-std")
    return converted.model.float().requires_grad_(False), converted.image_processor


def refuse_broken(broken: Sequence[str]) -> None:
    """Fail because of unreadable images, after all others are done."""
    if broken:
        raise DataError(f"left out, because they cannot be read: {', '.join(broken)}")


def list_names(options: argparse.Namespace) -> None:
    """Print the names of models."""
    from .conversion.catalogue import list_models, suggestion

    found = list_models(options.pattern, options.source, options.pretrained)
    if not found:
        raise CheckpointError(f"no name is like {options.pattern!r}{suggestion(options.pattern)}")
    tell(options, found, found)


def env(options: argparse.Namespace) -> None:
    """Print versions and hardware for a bug report."""
    from .system.environment import describe_environment

    found = describe_environment()
    tell(options, found, [f"{name + ':':18} {value}" for name, value in found.items()])


def examples(options: argparse.Namespace) -> None:
    """Copy the examples to a folder, or print where they are."""
    from .files.staging import staged_folder

    shipped = examples_folder()
    if options.path:
        say(str(shipped))
        return
    if options.out.is_dir() and any(options.out.iterdir()):
        raise OutputExistsError(f"{options.out} is not empty: give a new folder.")
    with staged_folder(options.out, sources=[shipped]) as folder:
        shutil.copytree(shipped, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    say(f"written: {options.out}")


def examples_folder() -> Path:
    """Return the folder of the examples: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).absolute().parent
    return next(folder for folder in (here / "examples", here.parent / "examples") if folder.is_dir())


def hints_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given hints as keyword arguments of `from_checkpoint`; label names are read from their file."""
    from .conversion.tables.format import HINTS

    names = {*HINTS, "format", "revision"} - {"id2label"}
    given = {name: getattr(options, name) for name in sorted(names)}
    given["id2label"] = None if options.labels is None else read_labels(options.labels)
    return {name: value for name, value in given.items() if value is not None}


def read_labels(path: Path) -> list[str] | dict[int, str]:
    """Read label names, as a list or by number.

    Raises:
        CheckpointError: The file cannot be read, or does not contain label names.
    """
    from .files.texts import parse_json, read_small_file

    content = read_small_file(path)
    try:
        if path.suffix == ".json":
            names = parse_json(content, str(path), (dict, list))
        else:
            names = content.decode("utf-8-sig").splitlines()  # drops a byte order mark
        if isinstance(names, dict):
            names = {int(number): name for number, name in names.items()}
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as label names: {error}") from error
    listed = list(names.values()) if isinstance(names, dict) else names
    if not all(isinstance(name, str) and name.strip() for name in listed):
        raise CheckpointError(
            f"{path} holds more than names: expected a JSON list, a JSON object (number to name), or one name per line"
        )
    return names


COMMANDS = {
    "inspect": inspect, "convert": convert, "verify": verify, "export": export, "push": push, "show": show, "env": env,
    "examples": examples, "predict": predict, "embed": embed,
    "browse": browse, "list": list_names, "average": average, "calibrate": calibrate,
}  # fmt: skip
