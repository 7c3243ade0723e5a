"""Staging of outputs: whatever goes wrong, the previous content is still there and complete.

An output is made in a staging place beside its target, synced to the disk, and put in place by one rename. A lock
beside the target keeps a second writer out, and what a crash leaves is cleared away by the next writer.
"""

import errno
import filecmp
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
from safetensors import SafetensorError

from ..configuration_plain_vit import PlainViTConfig
from ..errors import OutputError, OutputExistsError, listed
from ..system import HeldInterrupts, exchange_names
from .marks import TRAVELLING, is_untouched

DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
MODEL_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.npz", "config.json")

# Only the owner of the lock makes or removes these, so fixed names are enough, and a crash's remains are known by them.
LOCK, NEW, OLD = "lock", "new", "old"


# What plain-vit itself writes into a folder, whose config.json then says so.
WRITTEN = re.compile(
    r"config\.json|preprocessor_config\.json|README\.md|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
LONGEST_NAME = 255  # bytes, in every file system of today


@contextmanager
def staged_folder(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
    keep: bool = True,
) -> Iterator[Path]:
    """Give a fresh folder to write into, which becomes the target when the block ends without an error.

    Args:
        target: The folder to make. It may exist if it is empty.
        force: Replace a target that holds a model, as a whole. What plain-vit wrote itself goes; a folder with anything
            else in it, be it one file, is kept beside the target under another name, and a warning says so.
        sources: Files and folders that the output is made from, and that must not be the target, in it or around it.
        keep: Whether such a folder is kept; not where it is part of a run, which alone writes there.

    Yields:
        The staging folder, beside the target.

    Raises:
        OutputExistsError: The target is not empty, and `force` was not given or it holds no model.
        OutputError: The target is a file, a link or a source, is being written, or cannot be written; the disk is full.
    """
    place = _place(target, sources)
    with _only_writer(place):
        _check_folder(place, force)
        new = _beside(place, NEW)
        new.mkdir()
        yield new
        _sync(new)
        foreign = foreign_names(place, new) if keep else []
        if foreign:
            kept = _put_in_place_of_foreign(new, place)
            warnings.warn(
                f"{place} held what plain-vit did not write ({listed(foreign)}): all that it held is kept as {kept}",
                stacklevel=3,
            )
        else:
            _put_in_place(new, place)


@contextmanager
def staged_file(
    target: str | os.PathLike[str], *, force: bool = False, sources: Iterable[str | os.PathLike[str]] = ()
) -> Iterator[Path]:
    """Give a path to write a file to, which becomes the target when the block ends without an error.

    Args:
        target: The file to make.
        force: Replace the file if it is there.
        sources: Files and folders that the output is made from, and that must not be the target or around it.

    Yields:
        The path of the staging file, beside the target and with its suffix; nothing is there yet.

    Raises:
        OutputExistsError: The target is there and `force` was not given.
        OutputError: The target is a folder, a link or a source, is being written, or cannot be written.
    """
    place = _place(target, sources)
    with _only_writer(place):
        if place.is_dir():
            raise OutputError(f"{place} is a folder: give the name of a file.")
        if place.exists() and not force:
            raise OutputExistsError(f"{place} is there already: give another name, or replace it with force.")
        new = _beside(place, NEW)
        yield new
        _sync(new)
        _put_in_place(new, place)


def _place(target: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str]]) -> Path:
    """Return the target's absolute path after checking it against the sources."""
    path = Path(os.path.abspath(os.path.expanduser(target)))
    try:
        if path.is_symlink():
            raise OutputError(f"{path} is a link to {os.readlink(path)}: give the place itself.")
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{path} cannot be an output: {error.strerror}.") from error
    place = Path(os.path.realpath(path.parent), path.name)
    if not place.name:
        raise OutputError(f"{place} cannot be an output: give a folder of its own.")
    for source in sources:
        given = Path(os.path.realpath(os.path.expanduser(source)))
        if not given.exists():  # a repository on the Hub
            continue
        if place == given:
            raise OutputError(f"{place} is both the source and the output: give another output.")
        if given in place.parents or place in given.parents:
            raise OutputError(
                f"The output {place} and the source {given} lie one inside the other: give another output."
            )
    return place


def _check_folder(place: Path, force: bool) -> None:
    """Refuse a target that may not be replaced."""
    if not place.exists():
        return
    if not place.is_dir():
        raise OutputError(f"{place} is a file: give the name of a folder.")
    if not any(place.iterdir()):
        return
    if not force:
        raise OutputExistsError(f"{place} is not empty: give another folder, or replace the whole folder with force.")
    if place in (Path.cwd(), *Path.cwd().parents, Path.home(), *Path.home().parents):
        raise OutputExistsError(f"{place} is, or holds, your working or home folder, and is never replaced.")
    if not any(next(place.glob(pattern), None) for pattern in MODEL_FILES):
        raise OutputExistsError(f"{place} holds files but no model, so force does not replace it: remove it yourself.")


def foreign_names(folder: Path, replacement: Path | None = None) -> list[str]:
    """Return the names of what a folder holds that plain-vit did not write.

    Where its config.json is none of plain-vit's, or its README.md was edited, that is foreign as well.

    Args:
        folder: It may be missing.
        replacement: A folder that takes its place; files with the same bytes in both are not lost, so not foreign.
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    foreign = [
        name
        for name in names
        if not _is_plain_file(folder / name)
        or not (_is_written(name) or (replacement is not None and _is_same_file(folder / name, replacement / name)))
    ]
    if "README.md" in names and not is_untouched((folder / "README.md").read_bytes()):
        foreign.append("README.md")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        is_ours = config.get("model_type") == PlainViTConfig.model_type
    except (OSError, ValueError, AttributeError, RecursionError):
        is_ours = False
    if names and not is_ours:
        foreign.append("config.json" if "config.json" in names else "no config.json")
    return foreign


def _is_written(name: str) -> bool:
    return name in TRAVELLING or WRITTEN.fullmatch(name) is not None


def _is_same_file(one: Path, other: Path) -> bool:
    return _is_plain_file(other) and filecmp.cmp(one, other, shallow=False)


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _beside(place: Path, role: str) -> Path:
    """Return the place of a role beside the target; the suffix stays, because it says what a file is."""
    name = f".plain-vit-{role}.{place.name}"
    if len(os.fsencode(name)) > LONGEST_NAME:
        digest = hashlib.blake2b(os.fsencode(place.name), digest_size=16).hexdigest()
        suffix = place.suffix if len(os.fsencode(place.suffix)) < 50 else ""
        name = f".plain-vit-{role}.{digest}{suffix}"
    return place.with_name(name)


def _kept(place: Path) -> Path:
    """Return a free name beside a target for what it held before."""
    stem, number = place.name, 1
    while len(os.fsencode(stem)) > LONGEST_NAME - 20:
        stem = stem[:-1]
    while os.path.lexists(kept := place.with_name(f"{stem}.kept-{number}")):
        number += 1
    return kept


@contextmanager
def _only_writer(place: Path) -> Iterator[None]:
    """Hold the target's lock, with nothing of an earlier writer in the way at the start and nothing left at the end."""
    absent = [parent for parent in place.parents if not parent.exists()]
    lock = filelock.FileLock(_beside(place, LOCK), blocking=False)
    began, interrupts = False, HeldInterrupts(GUARD)
    try:
        interrupts.take_over()
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        _clear(place)
        began = True
        interrupts.let_through()
        yield
    except filelock.Timeout:
        raise OutputError(
            f"{place} is being written by another process: wait for it, or give another output."
        ) from None
    except OutputError:
        raise
    except SafetensorError as error:  # as transformers and others write safetensors; it has the number in its text
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None or int(found[1]) not in DISK_FULL:
            raise
        raise _disk_full(place, os.strerror(int(found[1]))) from error
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _disk_full(place, error.strerror) from error
        if began:  # then it is the caller's, about a file that may have nothing to do with the target
            raise
        raise OutputError(f"{place} cannot be written: {error.strerror} ({error.filename}).") from error
    finally:
        interrupts.are_held = True  # no call, in which one could still come
        try:
            if lock.is_locked:
                _clear(place)
                _beside(place, LOCK).unlink(missing_ok=True)  # still held: a waiting writer notices, tries again
                lock.release()
            for parent in absent:
                with suppress(OSError):  # it stays when something lies in it
                    parent.rmdir()
        finally:
            interrupts.give_back()


def _disk_full(place: Path, reason: str | None) -> OutputError:
    return OutputError(
        f"{place} was not written: {reason}. Make room or give another place; what was there before is unchanged."
    )


GUARD = _only_writer.__wrapped__.__code__  # type: ignore[attr-defined]


def _clear(place: Path) -> None:
    """Remove staging and replaced versions; a target that was moved aside and not yet followed comes back."""
    new, old = _beside(place, NEW), _beside(place, OLD)
    if old.exists() and not place.exists():
        old.rename(place)
    elif old.is_dir() and foreign_names(old):
        old.rename(_kept(place))
    for path in (new, old):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _put_in_place(new: Path, place: Path) -> None:
    """Rename the staged version to its target; the version before stays beside it until then."""
    if not place.is_dir() or not any(place.iterdir()):
        os.replace(new, place)
    elif not exchange_names(new, place):
        os.rename(place, _beside(place, OLD))
        os.rename(new, place)
    _sync_one(place.parent)


def _put_in_place_of_foreign(new: Path, place: Path) -> Path:
    """Put a new version in the place of a folder with other people's files, and return where that is kept.

    The new version gets that other name first: whenever this is cut short, nothing is lost.
    """
    kept = _kept(place)
    os.rename(new, kept)
    if not exchange_names(kept, place):
        old = _beside(place, OLD)
        os.rename(place, old)
        os.rename(kept, place)
        os.rename(old, kept)
    _sync_one(place.parent)
    return kept


def _sync(path: Path) -> None:
    """Bring a file, or a folder with all it holds, to the disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            _sync_one(Path(folder, name))
        _sync_one(Path(folder))
    if path.is_file():
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
