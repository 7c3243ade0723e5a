"""The files of a push: a model repository's files, and files requested by path, each inspected before the upload.

Only weights in safetensors, pictures and plain text are uploaded.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError, PushRefusedError
from ..files.images import UNREADABLE, open_image, reason, upright
from ..files.safetensors import open_safetensors
from ..files.texts import plain_text
from .card import CARD
from .opening import Opened
from .search import secrets_in

NO_PART = "not part of a model repository"
LIMIT_BYTES = 5_000_000_000  # per file; a larger one is more often a mistake than a model
LONGEST_TEXT = 10_000_000  # bytes; searching such a text takes about 15 s
LONGEST_CARD = 10_000_000  # bytes; a longer card is not searched for images

WEIGHTS = ".safetensors"
METADATA = {"format": {"pt", "np", "tf", "flax", "mlx"}}  # metadata that the writers of safetensors set
PICTURES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
JPEG_OPTIONS = {"quality": 95, "subsampling": 0}
# Plain text without these suffixes is uploaded if it is a known file of a model repository, such as LICENSE.
TEXTS = {
    ".bib", ".cff", ".csv", ".ini", ".json", ".jsonl", ".log", ".md", ".py", ".rst", ".sh", ".toml", ".tsv", ".txt",
    ".yaml", ".yml",
}  # fmt: skip

# Files that accompany a model: model card, licences and label names.
ACCOMPANYING = re.compile(
    r"README\.md|(LICEN[CS]E|COPYING|NOTICE|CITATION)([.-][\w.-]{1,40})?|\.gitattributes"
    r"|(labels?|label_names|class_names|classes|id2label|label2id|synsets?)\.(txt|json|csv)"
)
# The report of a training run, which is uploaded on request.
REPORT = re.compile(
    r"report/(index\.html|(curves|reliability|confusion_matrix|confused_pairs|mistakes|attention|positions_\d{1,3})\.png)"
)
NO_REPORT = "the report of the run: --include-report sends it"
HOLDS = (
    "the report is sent: it shows images of the dataset (mistakes and attention), with the names of their files and "
    "classes, and the settings of the run"
)
INLINE_PICTURE = re.compile(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"')  # in the page of a report
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
        if faults := _faults_of_text(data, known, name):
            raise PushRefusedError(f"{name} was not pushed:", [f"{name} {fault}" for fault in faults])
        self.sent[name] = data

    @property
    def reencoded(self) -> list[str]:
        """The pictures."""
        return [name for name in self.sent if _suffix(name) in PICTURES]

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
        include: Relative paths of additional files to upload.
        exclude: Patterns of relative paths not to upload.
        include_report: Also upload the report of a training run.

    Raises:
        PushRefusedError: Some files must not be uploaded; the message lists all of them.
    """
    files = dict(_walk(folder))
    asked = {name for name in include if name in files or name == CARD}  # a missing card is generated
    faults = [
        f"{name} does not exist: --include takes the exact path of a file in the folder"
        for name in include
        if name not in asked
    ]
    shown = _linked(folder, files)
    contents = Contents()
    for name, path in files.items():
        is_report = bool(REPORT.fullmatch(name))
        is_part = name in opened.needed or bool(ACCOMPANYING.fullmatch(name)) or name in shown
        is_part = is_part or (is_report and include_report)
        if any(fnmatch(name, pattern) for pattern in exclude):
            if name in opened.needed:
                faults.append(f"{name} is needed: the model does not open without it")
            contents.left_out[name] = "excluded"
        elif not (is_part or name in asked):
            contents.left_out[name] = NO_REPORT if is_report else NO_PART
        elif not is_part and (never := _never(name)):
            faults.append(f"{name} {never}")
        else:
            faults += [f"{name} {fault}" for fault in _add(contents, name, path, folder, known)]
    if faults:
        message = f"{folder} was not pushed. Remove or fix these files, or skip them with --exclude:"
        raise PushRefusedError(message, faults)
    return contents


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative path and the path of every file below a folder; links to folders are not followed."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(place, name).is_symlink()]
        for path in (Path(place, name) for name in sorted([*names, *links])):
            yield path.relative_to(folder).as_posix(), path


def _never(name: str) -> str | None:
    """Return why a file is never uploaded, even on request; None if it may be."""
    path = PurePosixPath(name)
    if any(part.startswith(".") for part in path.parts):
        return "is hidden or in a hidden folder: it is never uploaded"
    if SECRET_NAME.fullmatch(path.name):
        return "is named like a secret: it is never uploaded"
    if _suffix(name) not in {*TEXTS, *PICTURES}:
        return "is neither plain text nor PNG or JPEG, and --include sends nothing else: use `hf upload` for it"
    return None


def _linked(folder: Path, files: Collection[str]) -> set[str]:
    """Return the images in the folder that its model card shows."""
    page = folder / CARD
    if not page.is_file() or page.stat().st_size > LONGEST_CARD:
        return set()
    links = (one or other for one, other in LINKED.findall(page.read_text(encoding="utf-8", errors="replace")))
    names = {PurePosixPath(link.removeprefix("./")).as_posix() for link in links if "://" not in link}
    return {name for name in names if name in files and _suffix(name) in PICTURES and not _never(name)}


def _add(contents: Contents, name: str, path: Path, folder: Path, known: Collection[str]) -> list[str]:
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
    contents.sent[name], faults = look_into(path, known)
    contents.stamps[name] = stamp
    return faults


def look_into(path: Path, known: Collection[str]) -> tuple[Path | bytes, list[str]]:
    """Inspect a file.

    Args:
        path: A regular file.
        known: Known secrets to search for, such as the user's token.

    Returns:
        What to upload, a path for weights and content otherwise; and the reasons why it must not be uploaded.
    """
    if path.suffix == WEIGHTS:
        return path, _faults_of_weights(path, known)
    try:
        if _suffix(path.name) in PICTURES:
            return _reencoded(path), []
        if (size := path.stat().st_size) > LONGEST_TEXT:
            return path, [f"is a text of {size:,} bytes; expected at most {LONGEST_TEXT:,}"]
        data = path.read_bytes()
        return data, _faults_of_text(data, known, path.name)
    except UNREADABLE as error:
        return path, [f"cannot be read: {reason(error)}"]


def _faults_of_text(data: bytes, known: Collection[str], name: str) -> list[str]:
    """Return the reasons why a text must not be uploaded."""
    try:
        text = plain_text(data)
    except CheckpointError as error:
        return [f"cannot be searched: {error}; save it as plain text"]
    if name.endswith(".html"):
        text = INLINE_PICTURE.sub("", text)
    # Outside code, an unquoted value counts as a secret too.
    rules_of = name if name.endswith(".py") else "text.yaml"
    return [f"contains what looks like {kind} (line {number})" for number, kind in secrets_in(text, known, rules_of)]


def _reencoded(path: Path) -> bytes:
    """Return a new image file with only the pixels of another one, upright."""
    kind = PICTURES[_suffix(path.name)]
    with open_image(path, formats=(kind,)) as opened:
        if kind == "PNG" and getattr(opened, "n_frames", 1) > 1:
            raise ValueError("it is animated: expected one image")
        image = upright(opened)
    if "transparency" in image.info:
        image = image.convert("RGBA")
    image.info = {}
    file = BytesIO()
    image.save(file, kind, **(JPEG_OPTIONS if kind == "JPEG" else {}))
    return file.getvalue()


def _faults_of_weights(path: Path, known: Collection[str]) -> list[str]:
    try:
        tensors, metadata = open_safetensors(path)
    except CheckpointError as error:
        return [f"is not a valid safetensors file: {error}"]
    faults = [
        f"has {key!r} in its metadata, which no writer of safetensors sets: save the tensors without it"
        for key, value in metadata.items()
        if value not in METADATA.get(key, ())
    ]
    header = "\n".join([*(f"{key}={value}" for key, value in metadata.items()), *tensors])
    return faults + [f"contains what looks like {kind} in its header" for _, kind in secrets_in(header, known)]


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
