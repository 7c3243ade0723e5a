"""Inspection of a file before it is pushed: its kind, and content that must not be uploaded.

Three kinds of files can be looked into wholly: texts, pictures and safetensors. No other is sent: what cannot be read
cannot be searched. Pictures go without their metadata.
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
KEPT_BYTES = 64 * 2**20  # a longer text is searched piece by piece, and may hold no pictures
PICTURES = (".png", ".jpg", ".jpeg")
METADATA = {"format": {"pt", "np", "tf", "flax", "mlx"}}  # what safetensors' own writers put into a header
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
    """What came of looking into a file.

    Args:
        content: What is sent: the file itself, or its bytes where some of them go.
        faults: Why it must not be sent.
        cleaned: Metadata of pictures was left away.
    """

    content: Path | bytes
    faults: list[str] = field(default_factory=list)
    cleaned: bool = False


def look_into(path: Path, *, known: Collection[str], allowed_keys: Collection[str] = ()) -> Looked:
    """Look into a file, whole.

    Args:
        path: An ordinary file.
        known: Secrets themselves, such as the token of the user.
        allowed_keys: Of the metadata of a safetensors file, beside its writers' own.
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
        can = "only texts (UTF-8, UTF-16), PNG and JPEG pictures and safetensors can be searched: `hf upload` sends it"
        return Looked(path, [f"is {kind or 'of a kind that cannot be looked into'}; {can}"])


def look_into_text(data: bytes, encoding: str, known: Collection[str]) -> Looked:
    """Look into a text, and clean the pictures that it holds.

    Raises:
        UnicodeDecodeError: It is no text.
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
            faults.append("holds a picture that cannot be decoded")
            return match[0]
        faults.extend(f"holds a picture with {kind}" for kind in secrets_among_numbers(new, known))
        cleaned += new != picture
        return match[0] if new == picture else match[1] + base64.b64encode(new).decode("ascii")

    text = INLINE_PICTURE.sub(clean, text)
    faults += _said(secrets_in(INLINE_PICTURE.sub("", text), known))
    return Looked(text.encode(encoding) if cleaned else data, faults, bool(cleaned))


def _look_into_picture(path: Path, known: Collection[str]) -> Looked:
    data = path.read_bytes()
    try:
        clean = without_metadata(data)
    except NotAPicture as error:
        return Looked(path, [f"is a damaged picture: {error}"])
    faults = [f"holds {kind}" for kind in secrets_among_numbers(clean, known)]
    return Looked(clean, faults, clean != data)


def _faults_of_tensors(path: Path, known: Collection[str], allowed_keys: Collection[str]) -> list[str]:
    try:
        tensors, metadata = open_safetensors(path)
    except CheckpointError as error:
        return [f"is no whole safetensors file: {error}"]
    faults = [
        f"has {key!r} in its metadata, which no writer of safetensors puts there: remove it, or name it with "
        f"--include '{path.name}:{key}'"
        for key, value in metadata.items()
        if key not in allowed_keys and value not in METADATA.get(key, ())
    ]
    if state := next(filter(STATE_TENSORS.search, tensors), None):
        faults.append(f"is a state of the training: it holds {state!r}")
    header = "\n".join([*(f"{key}={value}" for key, value in metadata.items()), *tensors])
    faults += [f"holds what looks like {kind} in its header" for _, kind in secrets_in(header, known)]
    with path.open("rb") as file:
        before = b""
        while piece := file.read(READ_BYTES):
            faults += [f"holds {kind} among its tensors" for kind in secrets_among_numbers(before + piece, known)]
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
                faults.append(
                    f"is a text of over {KEPT_BYTES:,} bytes with pictures in it: keep them in files of their own"
                )
            faults += _said((line + number, kind) for number, kind in secrets_in(before + text, known))
            if not piece:
                return list(dict.fromkeys(faults))
            before, line = (before + text)[-OVERLAP:], line + (before + text)[:-OVERLAP].count("\n")


def _faults_of_start(text: str) -> list[str]:
    if is_pickle(text[:READ_BYTES].encode("utf-8", "surrogatepass")):
        return ["is a pickle, which runs code where it is loaded: save safetensors"]
    if text.lstrip().startswith("{"):
        try:
            keys = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if keys.keys() >= STATE_KEYS:
            return ["is a state of the training"]
    return []


def _refuse_control(text: str, encoding: str) -> None:
    if found := CONTROL.search(text):
        raise UnicodeDecodeError(encoding, found[0].encode(), 0, 1, "a control character is in no text")


def _encoding(start: bytes) -> str:
    """Return how a text is encoded, if it is one; without a mark UTF-16 shows by its zeros."""
    for mark, encoding in BOMS:
        if start.startswith(mark):
            return encoding
    even, odd = start[::2].count(0), start[1::2].count(0)
    if max(even, odd) * 4 > len(start) // 2:
        return "utf-16-be" if even > odd else "utf-16-le"
    return "utf-8"


def _said(found: Iterable[tuple[int, str]]) -> list[str]:
    return [f"holds what looks like {kind} (line {number})" for number, kind in found]
