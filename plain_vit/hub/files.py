"""Inspection of a file before it is pushed: its type, and content that must not be uploaded.

Three types of files can be inspected completely: text, images and safetensors. No others are uploaded: what cannot be
read cannot be searched. The metadata of images is removed.
"""

import base64
import binascii
import codecs
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from ..files.safetensors import open_safetensors
from .pickles import is_pickle, kind_of
from .pictures import NotAPicture, without_metadata
from .search import OVERLAP, secrets_among_numbers, secrets_in

READ_BYTES = 16 * 2**20  # at once
KEPT_BYTES = 64 * 2**20  # a longer text is searched in chunks, and must not contain images
PICTURES = (".png", ".jpg", ".jpeg")
METADATA = {"format": {"pt", "np", "tf", "flax", "mlx"}}  # metadata that the writers of safetensors set
STATE_TENSORS = re.compile(
    r"(?:^|[._/])(?:exp_avg(?:_sq)?|max_exp_avg_sq|momentum_buffer|optimizer|optim|rng_state)(?:$|[._/])"
)
STATE_KEYS = {"log_history", "global_step"}  # of transformers' trainer_state.json, whatever its name
BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
INLINE_PICTURE = re.compile(r"(data:image/(?:png|jpe?g);base64,)([A-Za-z0-9+/]+={0,2})")


@dataclass
class Looked:
    """The result of inspecting a file.

    Args:
        content: What to upload: the path, or the new content where some was removed.
        faults: Reasons why it must not be uploaded.
        cleaned: Whether metadata of images was removed.
    """

    content: Path | bytes
    faults: list[str] = field(default_factory=list)
    cleaned: bool = False


def look_into(path: Path, *, known: Collection[str], allowed_keys: Collection[str] = ()) -> Looked:
    """Inspect a file completely.

    Args:
        path: A regular file.
        known: Known secrets to search for, such as the user's token.
        allowed_keys: Keys allowed in the metadata of a safetensors file, besides those that its writers set.
    """
    with path.open("rb") as file:
        start = file.read(4096)
    if path.suffix == ".safetensors":
        return Looked(path, _faults_of_tensors(path, known, allowed_keys))
    if path.suffix.lower() in PICTURES:
        return _look_into_picture(path, known)
    encoding = _encoding(start)
    try:
        if path.stat().st_size <= KEPT_BYTES:
            return look_into_text(path.read_bytes(), encoding, known)
        return Looked(path, _faults_of_long_text(path, encoding, known))
    except UnicodeDecodeError:
        kind = kind_of(start + b"\0" * 200)
        can = "only text (UTF-8, UTF-16), PNG, JPEG and safetensors files can be searched: use `hf upload` for it"
        return Looked(path, [f"is {kind or 'of a type that cannot be inspected'}; {can}"])


def look_into_text(data: bytes, encoding: str, known: Collection[str]) -> Looked:
    """Inspect a text, and remove the metadata of its inline images.

    Raises:
        UnicodeDecodeError: It is not a text.
    """
    text = data.decode(encoding)
    _refuse_control(text, encoding)
    faults, cleaned = _faults_of_start(text), 0

    def clean(match: re.Match[str]) -> str:
        nonlocal cleaned
        try:
            picture = base64.b64decode(match[2], validate=True)
            new = without_metadata(picture)
        except (binascii.Error, NotAPicture):
            faults.append("contains an image that cannot be decoded")
            return match[0]
        faults.extend(f"contains an image with {kind}" for kind in secrets_among_numbers(new, known))
        cleaned += new != picture
        return match[0] if new == picture else match[1] + base64.b64encode(new).decode("ascii")

    text = INLINE_PICTURE.sub(clean, text)
    faults += _described(secrets_in(INLINE_PICTURE.sub("", text), known))
    return Looked(text.encode(encoding) if cleaned else data, faults, bool(cleaned))


def _look_into_picture(path: Path, known: Collection[str]) -> Looked:
    data = path.read_bytes()
    try:
        clean = without_metadata(data)
    except NotAPicture as error:
        return Looked(path, [f"is a damaged image: {error}"])
    faults = [f"contains {kind}" for kind in secrets_among_numbers(clean, known)]
    return Looked(clean, faults, clean != data)


def _faults_of_tensors(path: Path, known: Collection[str], allowed_keys: Collection[str]) -> list[str]:
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
    if state := next(filter(STATE_TENSORS.search, tensors), None):
        faults.append(f"is a training state: it contains {state!r}")
    header = "\n".join([*(f"{key}={value}" for key, value in metadata.items()), *tensors])
    faults += [f"contains what looks like {kind} in its header" for _, kind in secrets_in(header, known)]
    with path.open("rb") as file:
        before = b""
        while piece := file.read(READ_BYTES):
            faults += [f"contains {kind} in its tensors" for kind in secrets_among_numbers(before + piece, known)]
            before = piece[-OVERLAP // 4 :]
    return list(dict.fromkeys(faults))


def _faults_of_long_text(path: Path, encoding: str, known: Collection[str]) -> list[str]:
    decoder, faults, line, before = codecs.getincrementaldecoder(encoding)(), [], 0, ""
    with path.open("rb") as file:
        while True:
            piece = file.read(READ_BYTES)
            text = decoder.decode(piece, final=not piece)
            _refuse_control(text, encoding)
            faults += _faults_of_start(text) if not before else []
            if INLINE_PICTURE.search(text):
                faults.append(f"is a text of over {KEPT_BYTES:,} bytes with inline images: save them as separate files")
            faults += _described((line + number, kind) for number, kind in secrets_in(before + text, known))
            if not piece:
                return list(dict.fromkeys(faults))
            before, line = (before + text)[-OVERLAP:], line + (before + text)[:-OVERLAP].count("\n")


def _faults_of_start(text: str) -> list[str]:
    if is_pickle(text[:READ_BYTES].encode("utf-8", "surrogatepass")):
        return ["is a pickle, which runs code when loaded: save safetensors"]
    if text.lstrip().startswith("{"):
        try:
            keys = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if keys.keys() >= STATE_KEYS:
            return ["is a training state"]
    return []


def _refuse_control(text: str, encoding: str) -> None:
    if found := CONTROL.search(text):
        raise UnicodeDecodeError(encoding, found[0].encode(), 0, 1, "text has no control characters")


def _encoding(start: bytes) -> str:
    """Return the encoding of a text; UTF-16 without a byte order mark is recognized by its zero bytes."""
    for mark, encoding in BOMS:
        if start.startswith(mark):
            return encoding
    even, odd = start[::2].count(0), start[1::2].count(0)
    if max(even, odd) * 4 > len(start) // 2:
        return "utf-16-be" if even > odd else "utf-16-le"
    return "utf-8"


def _described(found: Iterable[tuple[int, str]]) -> list[str]:
    return [f"contains what looks like {kind} (line {number})" for number, kind in found]
