"""Staging of outputs: whatever fails, the previous content of the target is kept intact.

An output is written to a staging path next to its target, synced to disk, and moved into place by one rename. A lock
next to the target excludes other writers, and the remains of a crash are removed by the next writer.
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

from ..errors import OutputError, OutputExistsError, listed
from ..system.calls import exchange_names, sync
from .marks import TRAVELLING, is_untouched

DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
CODE = re.compile(r"(?:os error |\[Errno )(\d+)")  # in the messages of safetensors and shutil
TORCH_WRITER = re.compile(r"PytorchStreamWriter|inline_container\.cc.*unexpected pos")  # a failed torch.save to a path
MODEL_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.npz", "config.json")

# Only the owner of the lock creates or removes these, so fixed names suffice, and identify what a crash left behind.
LOCK, NEW, OLD = "lock", "new", "old"
STAGED = ".plain-vit-"  # prefix of their names
REMAINS = (f"{STAGED}{LOCK}.", f"{STAGED}{NEW}.")  # prefixes of what a killed writer leaves, and nobody needs


# Files that plain-vit writes into a folder, if the folder's config.json has its model type.
WRITTEN = re.compile(
    r"config\.json|preprocessor_config\.json|README\.md|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
LONGEST_NAME = 255  # bytes, in all common file systems


@contextmanager
def staged_folder(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
    keep: bool = True,
) -> Iterator[Path]:
    """Yield a new folder to write into, which becomes the target when the block ends without an error.

    Args:
        target: The folder to create. It may exist if it is empty.
        force: Replace the whole folder if it contains a model. A folder with only files written by plain-vit is
            deleted; with any other file, it is kept next to the target under another name, with a warning.
        sources: Inputs of the output (files and folders), which must not be the target, inside it or a parent of it.
        keep: Keep a folder with other files; False for a run's own folder, in which nobody else writes.

    Yields:
        The staging folder, next to the target.

    Raises:
        OutputExistsError: The target is not empty, and `force` was not given or it contains no model.
        OutputError: The target is a file, a link or a source, is being written by another process, or cannot be
            written, for example because the disk is full.
    """
    place = _place(target, sources)
    with _only_writer(place):
        _check_folder(place, force)
        new = _next_to(place, NEW)
        new.mkdir()
        yield new
        _sync(new)
        foreign = foreign_names(place, new) if keep else []
        kept = _kept(place) if foreign else None
        _put_in_place(new, place, kept)
        if foreign:
            warnings.warn(
                f"{place} contained files not written by plain-vit ({listed(foreign)}): its content is kept as {kept}",
                stacklevel=3,
            )


@contextmanager
def staged_file(
    target: str | os.PathLike[str], *, force: bool = False, sources: Iterable[str | os.PathLike[str]] = ()
) -> Iterator[Path]:
    """Yield a path to write a file to, which becomes the target when the block ends without an error.

    Args:
        target: The file to create.
        force: Replace the file if it exists.
        sources: Inputs of the output (files and folders), which must not be the target or a parent of it.

    Yields:
        The path of the staging file, next to the target and with its suffix; it does not exist yet.

    Raises:
        OutputExistsError: The target exists and `force` was not given.
        OutputError: The target is a folder, a link or a source, is being written by another process, or cannot be
            written.
    """
    place = _place(target, sources)
    with _only_writer(place):
        if place.is_dir():
            raise OutputError(f"{place} is a folder: give the name of a file.")
        if place.exists() and not force:
            raise OutputExistsError(f"{place} already exists: give another name, or replace it with force.")
        new = _next_to(place, NEW)
        yield new
        _sync(new)
        _put_in_place(new, place)


def _place(target: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str]]) -> Path:
    """Return the target's absolute path after checking it against the sources."""
    path = Path(os.path.abspath(os.path.expanduser(target)))
    try:
        if path.is_symlink():
            raise OutputError(f"{path} is a link to {os.readlink(path)}: give that path itself.")
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{path} cannot be an output: {error.strerror}.") from error
    place = Path(os.path.realpath(path.parent), path.name)
    if not place.name:
        raise OutputError(f"{place} cannot be an output: give a separate folder.")
    for source in sources:
        given = Path(os.path.realpath(os.path.expanduser(source)))
        if not given.exists():  # a repository on the Hub
            continue
        if place == given:
            raise OutputError(f"{place} is both the source and the output: give another output.")
        if given in place.parents or place in given.parents:
            raise OutputError(
                f"One of the output {place} and the source {given} is inside the other: give another output."
            )
    return place


def _check_folder(place: Path, force: bool) -> None:
    """Refuse a target that must not be replaced."""
    if not place.exists():
        return
    if not place.is_dir():
        raise OutputError(f"{place} is a file: give the name of a folder.")
    if not any(place.iterdir()):
        return
    if not force:
        raise OutputExistsError(f"{place} is not empty: give another folder, or replace the whole folder with force.")
    if place in (Path.cwd(), *Path.cwd().parents, Path.home(), *Path.home().parents):
        raise OutputExistsError(
            f"{place} is or contains your working or home folder, which is never replaced: give another folder."
        )
    if not any(next(place.glob(pattern), None) for pattern in MODEL_FILES):
        raise OutputExistsError(
            f"{place} contains files but no model, so force does not replace it: remove it yourself."
        )


def hold_folder(folder: Path) -> filelock.BaseFileLock:
    """Lock an existing folder until `release_folder`, or until this process ends in any way.

    Raises:
        OutputError: Another process holds it.
    """
    lock = filelock.FileLock(folder / f"{_staged(LOCK)}folder", blocking=False, is_singleton=True)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise OutputError(
            f"Another process still writes to {folder}: wait for it, or end it, or give another folder. Processes may "
            "outlive the launcher that started them."
        ) from None
    return lock


def release_folder(lock: filelock.BaseFileLock) -> None:
    """Release a folder, and remove its lock file."""
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release(force=True)


def is_vacant(folder: Path) -> bool:
    """Return whether a path is free, or a folder that is empty except for the remains of a killed writer."""
    if not folder.is_dir():
        return not os.path.lexists(folder)
    return all(name.startswith(REMAINS) for name in os.listdir(folder))


def remains(folder: Path) -> list[Path]:
    """Return what a killed writer left in a folder: its locks, and versions that it did not put in place."""
    return [folder / name for name in os.listdir(folder) if name.startswith(REMAINS)] if folder.is_dir() else []


def foreign_names(folder: Path, replacement: Path | None = None) -> list[str]:
    """Return the names of the entries of a folder that plain-vit did not write.

    They include a config.json of another model type, and an edited README.md.

    Args:
        folder: The folder, which may be missing.
        replacement: The folder that replaces it; files identical in both are not lost and so not foreign.
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
        is_ours = config.get("model_type") == "plain_vit"
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


def _next_to(place: Path, role: str) -> Path:
    """Return the path for a role next to the target; the suffix is kept, because it indicates the file type."""
    name = f"{_staged(role)}{place.name}"
    if len(os.fsencode(name)) > LONGEST_NAME:
        digest = hashlib.blake2b(os.fsencode(place.name), digest_size=16).hexdigest()
        suffix = place.suffix if len(os.fsencode(place.suffix)) < 50 else ""
        name = f"{_staged(role)}{digest}{suffix}"
    return place.with_name(name)


def _staged(role: str) -> str:
    return f"{STAGED}{role}."


def _kept(place: Path) -> Path:
    """Return a free name next to a target, for its previous content."""
    stem, number = place.name, 1
    while len(os.fsencode(stem)) > LONGEST_NAME - 20:
        stem = stem[:-1]
    while os.path.lexists(kept := place.with_name(f"{stem}.kept-{number}")):
        number += 1
    return kept


@contextmanager
def _only_writer(place: Path) -> Iterator[None]:
    """Hold the target's lock; remove the remains of earlier writers at the start and all staging paths at the end."""
    absent = [parent for parent in place.parents if not parent.exists()]
    lock = filelock.FileLock(_next_to(place, LOCK), blocking=False)
    began = False
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        _clear(place)
        began = True
        yield
    except filelock.Timeout:
        raise OutputError(
            f"{place} is being written by another process: wait for it, or give another output."
        ) from None
    except OutputError:
        raise
    except Exception as error:
        if (full := full_disk(place, error)) is not None:
            raise full from error
        if began or not isinstance(error, OSError):  # raised in the caller's block, maybe for an unrelated file
            raise
        raise OutputError(f"{place} cannot be written: {error.strerror} ({error.filename}).") from error
    finally:
        if lock.is_locked:
            _clear(place)
            _next_to(place, LOCK).unlink(missing_ok=True)  # still held: a waiting writer notices and retries
            lock.release()
        for parent in absent:
            with suppress(OSError):  # kept if it is not empty
                parent.rmdir()


def full_disk(place: Path, error: BaseException) -> OutputError | None:
    """Return an OutputError if a library's error came from a full disk, or None if it has another cause."""
    reason = next(filter(None, map(_refusal_of_the_disk, _chain(error))), None)
    if reason is None:
        return None
    return OutputError(
        f"{place} was not written: {reason}. Free disk space or give another path; the previous content is unchanged."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the errors in its group, and the errors in its causes and contexts."""
    while error is not None:
        yield error
        for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            yield from _chain(each)
        error = error.__cause__ or error.__context__


def _refusal_of_the_disk(error: BaseException) -> str | None:
    """Return the message of a full disk or an exceeded quota, or None if the error has another cause."""
    if isinstance(error, RuntimeError) and TORCH_WRITER.search(str(error)):
        return "torch's writer failed and does not say why, as it does on a full disk and beyond a quota"
    code = error.errno if isinstance(error, OSError) else None
    if code is None and isinstance(error, (OSError, SafetensorError)) and (found := CODE.search(str(error))):
        code = int(found[1])
    return os.strerror(code) if code in DISK_FULL else None


def _clear(place: Path) -> None:
    """Remove staged and replaced versions; restore a target that was moved away but not replaced."""
    new, old = _next_to(place, NEW), _next_to(place, OLD)
    if old.exists() and not place.exists():
        old.rename(place)
    elif old.is_dir() and foreign_names(old):
        old.rename(_kept(place))
    for path in (new, old):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _put_in_place(new: Path, place: Path, kept: Path | None = None) -> None:
    """Rename the staged version to its target; the previous version is kept next to it until then.

    Args:
        new: The staged version.
        place: The target.
        kept: A path for the previous version, if it stays. The new version is first renamed to that path, so an
            interruption at any point loses nothing.
    """
    if kept is not None:
        os.rename(new, kept)
        new = kept
    if place.is_dir() and not any(place.iterdir()):
        place.rmdir()  # Windows cannot replace a folder
    if not place.is_dir():
        os.replace(new, place)
    elif not exchange_names(new, place):
        old = _next_to(place, OLD)
        os.rename(place, old)
        os.rename(new, place)
        if kept is not None:
            os.rename(old, kept)
    sync(place.parent)


def _sync(path: Path) -> None:
    """Sync a file, or a folder with all its contents, to disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    if path.is_file():
        sync(path)
