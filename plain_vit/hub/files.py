"""Inspection of a file before it is pushed: safetensors, pictures and plain text; no other kind is sent."""

import re
from collections.abc import Collection
from io import BytesIO
from pathlib import Path

from ..errors import CheckpointError
from ..files.images import UNREADABLE, open_image, reason, upright
from ..files.safetensors import open_safetensors
from .search import secrets_in

WEIGHTS = ".safetensors"
PICTURES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
# Plain text without these suffixes is sent if the list of a model repository names the file, such as LICENSE.
TEXTS = {
    ".bib", ".cff", ".csv", ".ini", ".json", ".jsonl", ".log", ".md", ".py", ".rst", ".sh", ".toml", ".tsv", ".txt",
    ".yaml", ".yml",
}  # fmt: skip
LONGEST_TEXT = 10_000_000  # bytes; such a text is searched in about 15 s
METADATA = {"format": {"pt", "np", "tf", "flax", "mlx"}}  # metadata that the writers of safetensors set
CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
INLINE_PICTURE = re.compile(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"')  # in the page of a report
JPEG_OPTIONS = {"quality": 95, "subsampling": 0}


def look_into(path: Path, known: Collection[str], allowed_keys: Collection[str] = ()) -> tuple[Path | bytes, list[str]]:
    """Inspect a file.

    Args:
        path: A regular file.
        known: Known secrets to search for, such as the user's token.
        allowed_keys: Keys allowed in the metadata of a safetensors file, besides those that its writers set.

    Returns:
        What to upload: the path of weights, or the content; and the reasons why it must not be uploaded.
    """
    if path.suffix == WEIGHTS:
        return path, _faults_of_weights(path, known, allowed_keys)
    try:
        if path.suffix.lower() in PICTURES:
            return _reencoded(path), []
        if (size := path.stat().st_size) > LONGEST_TEXT:
            return path, [f"is a text of {size:,} bytes; expected at most {LONGEST_TEXT:,}"]
        data = path.read_bytes()
        return data, faults_of_text(data, known, path.name)
    except UNREADABLE as error:
        return path, [f"cannot be read: {reason(error)}"]


def faults_of_text(data: bytes, known: Collection[str], name: str) -> list[str]:
    """Return the reasons why a text must not be uploaded."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return ["is not plain text in UTF-8: save it as such"]
    if found := CONTROL.search(text):
        return [f"has the control character {found[0]!r}: expected plain text"]
    if name.endswith(".html"):
        text = INLINE_PICTURE.sub("", text)
    # In other files than code, a value without quotes is one too.
    rules_of = name if name.endswith(".py") else "text.yaml"
    return [f"contains what looks like {kind} (line {number})" for number, kind in secrets_in(text, known, rules_of)]


def _reencoded(path: Path) -> bytes:
    """Return an image file with the pixels of another one, upright, and nothing else of it."""
    kind = PICTURES[path.suffix.lower()]
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


def _faults_of_weights(path: Path, known: Collection[str], allowed_keys: Collection[str]) -> list[str]:
    try:
        tensors, metadata = open_safetensors(path)
    except CheckpointError as error:
        return [f"is not a valid safetensors file: {error}"]
    faults = [
        f"has {key!r} in its metadata, which no writer of safetensors sets: remove it, or allow it with "
        f"--include '{path.name}:{key}'"
        for key, value in metadata.items()
        if key not in allowed_keys and value not in METADATA.get(key, ())
    ]
    header = "\n".join([*(f"{key}={value}" for key, value in metadata.items()), *tensors])
    return faults + [f"contains what looks like {kind} in its header" for _, kind in secrets_in(header, known)]
