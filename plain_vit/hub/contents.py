"""Selection of the files to push: those of a model repository, and those requested by path."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from ..errors import PushRefusedError
from .card import CARD
from .files import PICTURES, TEXTS, faults_of_text, look_into
from .opening import Opened
from .search import secrets_in

NO_PART = "not part of a model repository"
LIMIT_BYTES = 5_000_000_000  # per file; a larger one is more often a mistake than a model

# Files that accompany a model: model card, licences and label names.
ACCOMPANYING = re.compile(
    r"README\.md|(LICEN[CS]E|COPYING|NOTICE|CITATION)([.-][\w.-]{1,40})?|\.gitattributes"
    r"|(labels?|label_names|class_names|classes|id2label|label2id|synsets?)\.(txt|json|csv)"
)
# The report of a training run, which is sent if it is asked for.
REPORT = re.compile(
    r"report/(index\.html|(curves|reliability|confusion_matrix|confused_pairs|mistakes|attention|positions_\d{1,3})\.png)"
)
NO_REPORT = "the report of the run: --include-report sends it"
HOLDS = (
    "the report is sent: it shows images of the dataset (mistakes and attention), with the names of their files and "
    "classes, and the settings of the run"
)
LINKED = re.compile(
    r"!\[[^\]\n]{0,2000}\]\(<?([^\s()<>]{1,500})>?(?:\s[^)\n]{0,500})?\)|<img\b[^>]{0,2000}?\bsrc=[\"']?([^\s\"'>]{1,500})"
)
SECRET_NAME = re.compile(
    r"(?i)(.*[._-])?(tokens?|secrets?|credentials?|passwords?|passwd|netrc|htpasswd|pem|key|env)([._].*)?|id_[a-z]*\d*\..*"
)


@dataclass
class Contents:
    """The files of a push.

    Args:
        sent: Path or content of each file to upload.
        left_out: For each other file, the reason why it is not uploaded.
        stamps: Size, time and inode of each file uploaded by path, to detect later changes.
    """

    sent: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    stamps: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def add_text(self, name: str, data: bytes, known: Collection[str]) -> None:
        """Add a generated text, after scanning it like any other.

        Raises:
            PushRefusedError: It contains a secret.
        """
        if faults := faults_of_text(data, known, name):
            raise PushRefusedError(f"{name} was not pushed:", [f"{name} {fault}" for fault in faults])
        self.sent[name] = data

    @property
    def reencoded(self) -> list[str]:
        """The pictures."""
        return [name for name in self.sent if PurePosixPath(name).suffix.lower() in PICTURES]

    def changed(self) -> list[str]:
        """Return the files that have changed since they were inspected."""
        paths = {name: path for name, path in self.sent.items() if isinstance(path, Path)}
        return [name for name, path in paths.items() if _stamp(path) != self.stamps[name]]


def gather(
    folder: Path,
    opened: Opened,
    known: Collection[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    include_report: bool = False,
) -> Contents:
    """Select and inspect the files of a folder to upload.

    Args:
        folder: Folder of a saved model.
        opened: The opened folder, with the files that it needs.
        known: Known secrets to search for.
        include: Relative paths of additional files to upload; "model.safetensors:key" allows that key in the file's
            metadata.
        exclude: Patterns of relative paths not to upload.
        include_report: Also upload the report of a training run.

    Raises:
        PushRefusedError: lists every file that must not be uploaded.
    """
    files = dict(_walk(folder))
    asked, keys, faults = _asked(include, files)
    shown = _linked(folder, files)
    contents = Contents()
    for name, path in files.items():
        is_report = bool(REPORT.fullmatch(name))
        is_part = name in opened.needed or bool(ACCOMPANYING.fullmatch(name)) or name in shown
        if any(fnmatch(name, pattern) for pattern in exclude):
            if name in opened.needed:
                faults.append(f"{name} is needed: the model does not open without it")
            contents.left_out[name] = "excluded"
        elif not (is_part or name in asked or (is_report and include_report)):
            contents.left_out[name] = NO_REPORT if is_report else NO_PART
        elif not (is_part or (is_report and include_report)) and (never := _never(name)):
            faults.append(f"{name} {never}")
        else:
            faults += [f"{name} {fault}" for fault in _add(contents, name, path, folder, known, keys.get(name, ()))]
    if faults:
        message = f"{folder} was not pushed. Remove or fix these files, or skip them with --exclude:"
        raise PushRefusedError(message, faults)
    return contents


def _asked(include: Sequence[str], files: Collection[str]) -> tuple[set[str], dict[str, set[str]], list[str]]:
    """Return the requested files, the allowed metadata keys, and an error for every other entry."""
    asked: set[str] = set()
    keys: dict[str, set[str]] = {}
    faults = []
    for each in include:
        name, _, key = each.partition(":")
        if each in files or each == CARD:  # a missing card is generated
            asked.add(each)
        elif name in files and key:
            keys.setdefault(name, set()).add(key)
        else:
            faults.append(f"{each} does not exist: --include takes the exact path of a file in the folder")
    return asked, keys, faults


def _add(
    contents: Contents, name: str, path: Path, folder: Path, known: Collection[str], keys: Collection[str]
) -> list[str]:
    """Add a file, or return the reasons why it must not be uploaded."""
    if secrets_in(name, known) or not name.isprintable():
        return ["has a name that contains a secret or unprintable characters"]
    real = Path(os.path.realpath(path))  # pathlib's own raises for a link to itself
    if not real.is_relative_to(os.path.realpath(folder)):
        return [f"is a link out of the folder, to {real}"]
    if not path.is_file():
        return ["is not a regular file"]
    stamp = _stamp(path)
    if stamp[0] > LIMIT_BYTES:
        return [f"has {stamp[0]:,} bytes; expected at most {LIMIT_BYTES:,}"]
    contents.sent[name], faults = look_into(path, known, keys)
    contents.stamps[name] = stamp
    return faults


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative path and the path of every file below a folder; links to folders are not followed."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(place, name).is_symlink()]
        for path in (Path(place, name) for name in sorted([*names, *links])):
            yield path.relative_to(folder).as_posix(), path


def _never(name: str) -> str | None:
    """Return why a file is not sent even if it is asked for."""
    path = PurePosixPath(name)
    if any(part.startswith(".") for part in path.parts):
        return "is hidden or in a hidden folder: it is never uploaded"
    if SECRET_NAME.fullmatch(path.name):
        return "is named like a secret: it is never uploaded"
    if path.suffix.lower() not in {*TEXTS, *PICTURES}:
        return "is neither plain text nor PNG or JPEG, and --include sends nothing else: use `hf upload` for it"
    return None


def _linked(folder: Path, files: Collection[str]) -> set[str]:
    """Return the images in the folder that its model card shows."""
    page = folder / CARD
    if not page.is_file() or page.stat().st_size > 10_000_000:
        return set()
    links = (one or other for one, other in LINKED.findall(page.read_text(encoding="utf-8", errors="replace")))
    names = {PurePosixPath(link.removeprefix("./")).as_posix() for link in links if "://" not in link}
    pictures = {name for name in names if PurePosixPath(name).suffix.lower() in PICTURES}
    return {name for name in pictures if name in files and not _never(name)}


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
