"""Inspection of a file before it is pushed: its type, and content that must not be uploaded.

Three types of files can be inspected completely: text, images and safetensors. No others are uploaded: what cannot be
read cannot be searched. The same holds for a file in base64 within a text, such as an output of a notebook. The
metadata of images is removed.
"""

import base64
import codecs
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from ..files.safetensors import open_safetensors
from .pickles import is_pickle, kind_of
from .pictures import JPEG, PNG, NotAPicture, without_metadata
from .search import OVERLAP, SHORTEST_FILE, from_base64, secrets_among_numbers, secrets_in

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
# Base64 of a file: in one line of any length, or in lines of up to 80. No part matches in two ways: time is linear.
LETTERS, LINE_END = "[A-Za-z0-9+/_-]", r"(?:\\+[rn]|\s)"  # also `\n` in a string
LINE = rf"{LETTERS}{{32,80}}+(?!{LETTERS})"
INLINE = re.compile(
    rf"(?<!{LETTERS})(?:(?<=\\)[rn])?"
    rf"(?P<letters>(?:{LINE}(?:{LINE_END}++{LINE})*+(?:{LINE_END}++{LETTERS}{{1,31}}+)?+|{LETTERS}{{81,}}+)={{0,2}})"
)
# What names the type of a file in base64: a data URI, or the key of an output of a notebook.
TYPE = re.compile(
    r"(?:data:(?P<uri>[^,\s\"'<>]*);base64,"
    r"|\"(?P<key>(?:image|application|audio|video|font|model)/[\w.+-]+)\"\s*:\s*\[?\s*\")(?:\\[rn]|\s)*$",
    re.IGNORECASE,
)
HASH = re.compile("[0-9a-fA-F]+")
ENDS = (b"IEND\xaeB`\x82", b"\xff\xd9")  # of PNG and JPEG


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
    faults, sent, searched, place = _faults_of_start(text), [], [], 0
    for match in INLINE.finditer(text):
        inline = _look_into_inline(text, match, known)
        if inline is not None:
            faults += inline.faults
            before, place = text[place : match.start("letters")], match.end()
            sent += [before, inline.letters]
            searched += [before, "\n" * match[0].count("\n")]
    faults += _described(secrets_in("".join([*searched, text[place:]]), known))
    new = "".join([*sent, text[place:]])
    return Looked(data if new == text else new.encode(encoding), list(dict.fromkeys(faults)), new != text)


@dataclass
class Inline:
    """An inspected file in base64 within a text.

    Args:
        letters: The base64 to upload.
        faults: Reasons why it must not be uploaded.
    """

    letters: str
    faults: list[str]


def _look_into_inline(text: str, match: re.Match[str], known: Collection[str]) -> Inline | None:
    """Inspect a file in base64; None if it is searched with the rest, as a text or an unknown value."""
    letters = re.sub(rf"{LINE_END}|=", "", match["letters"])
    data = from_base64(letters)
    named = TYPE.search(text, max(0, match.start() - 200), match.start("letters"))
    if len(data) < SHORTEST_FILE:
        return None
    if not data.startswith((PNG, JPEG + b"\xff")):
        if named is None or (named["key"] and HASH.fullmatch(letters)) or _is_text(data):
            return None
        kind = (named["uri"] or named["key"] or "a file").partition(";")[0]
        return Inline(match["letters"], [f"contains {kind} in base64, but only text, PNG and JPEG can be inspected"])
    try:
        new = without_metadata(data)
        if any(map(str.isspace, match["letters"])) and not data.endswith(ENDS):
            raise NotAPicture("other text follows its lines of base64")
    except NotAPicture as error:
        return Inline(match["letters"], [f"contains an image that cannot be inspected: {error}"])
    faults = [f"contains an image with {kind}" for kind in secrets_among_numbers(new, known)]
    if new == data:
        return Inline(match["letters"], faults)
    other = b"-_" if set(letters) & {"-", "_"} else None
    return Inline(base64.b64encode(new, other).decode("ascii"), faults)


def _is_text(data: bytes) -> bool:
    encoding = _encoding(data[:4096])
    try:
        _refuse_control(data.decode(encoding), encoding)
    except UnicodeDecodeError:
        return False
    return True


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
            if any(_look_into_inline(text, match, known) for match in INLINE.finditer(text)):
                faults.append(f"is a text of over {KEPT_BYTES:,} bytes with inline files: save them as separate files")
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
