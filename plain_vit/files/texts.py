"""Small untrusted text files, such as a config.json, read and parsed within limits."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsafeFileError
from .kinds import MAX_HEADER_BYTES

MAX_JSON_PARTS = 500_000  # in a safetensors header, about ten per tensor
CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # a form feed is in many licences


def read_small_file(path: Path) -> bytes:
    """Read a file that describes a model, such as its configuration or label names.

    Raises:
        CheckpointError: The file is missing, or is a folder, a device or a pipe, which may never end.
        UnsafeFileError: The file is far larger than any such file.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing or not a regular file: expected a text file.")
        with path.open("rb") as file:
            content = file.read(MAX_HEADER_BYTES + 1)  # the stated size is 0 for files in /proc
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_HEADER_BYTES:
        raise UnsafeFileError(f"{path} has {path.stat().st_size} bytes; at most {MAX_HEADER_BYTES} are read.")
    return content


def plain_text(content: bytes) -> str:
    """Decode a plain text.

    Raises:
        CheckpointError: The text is not UTF-8, or contains control characters.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CheckpointError("it is not UTF-8 text") from None
    if found := CONTROL.search(text):
        raise CheckpointError(f"it contains the control character {found[0]!a}")
    return text


def parse_json(text: bytes, what: str, kinds: tuple[type, ...] = (dict,)) -> Any:
    """Parse untrusted JSON.

    Args:
        text: At most `MAX_HEADER_BYTES` bytes.
        what: Description of the text for error messages.
        kinds: Types allowed at the top level: dict, list.

    Returns:
        The parsed value.

    Raises:
        CheckpointError: The text is not UTF-8 or not JSON, or has an unpaired surrogate, another type at the top level
            or a duplicate key.
        UnsafeFileError: The text has so many elements that parsing would take many times its size in memory.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{what} names {twice!r} twice: the file is damaged.")
        return table

    parts = sum(map(text.count, (b"{", b"[", b",")))
    if parts > MAX_JSON_PARTS:
        raise UnsafeFileError(f"{what} has {parts} braces, brackets and commas; expected at most {MAX_JSON_PARTS}.")
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
        if b"\\ud" in text or b"\\uD" in text:
            json.dumps(parsed, ensure_ascii=False).encode()
    except CheckpointError:
        raise
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{what} holds half a character ({error.object[error.start]!a}): it is damaged."
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not UTF-8, not JSON, or a number with thousands of digits
        reason = str(error).partition(";")[0]  # the rest tells how to make Python read such a number
        raise CheckpointError(f"{what} is not JSON ({reason}): it is truncated or damaged.") from None
    if not isinstance(parsed, kinds):
        expected = " or ".join("object" if kind is dict else kind.__name__ for kind in kinds)
        raise CheckpointError(f"{what} is not a JSON {expected} but {type(parsed).__name__}.")
    return parsed
