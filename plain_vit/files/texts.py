"""Small untrusted text files, such as a config.json, read and parsed within limits."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsafeFileError
from .tensors import MAX_HEADER_BYTES

MAX_JSON_PARTS = 500_000  # of a safetensors header, a tensor takes some ten


def read_small_file(path: Path) -> bytes:
    """Read a file that says something of a model, such as its configuration or the names of its labels.

    Raises:
        CheckpointError: It is not there, or a device, a pipe or a folder, which may have no end.
        UnsafeFileError: It is far larger than any such file.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing or no ordinary file: expected a text file.")
        with path.open("rb") as file:
            content = file.read(MAX_HEADER_BYTES + 1)  # not by its size: the files of /proc say 0
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_HEADER_BYTES:
        raise UnsafeFileError(f"{path} has {path.stat().st_size} bytes; at most {MAX_HEADER_BYTES} are read.")
    return content


def parse_json(text: bytes, what: str, kinds: tuple[type, ...] = (dict,)) -> Any:
    """Parse JSON that somebody else wrote: an object, or one of the kinds that are expected.

    Args:
        text: The bytes, at most `MAX_HEADER_BYTES` of them.
        what: What the text is, as the error should call it.
        kinds: What it may be as a whole: dict, list.

    Returns:
        What was parsed.

    Raises:
        CheckpointError: It is not UTF-8, not JSON, holds half of a pair of surrogates, is of another kind, or names a
            key twice.
        UnsafeFileError: It has so many parts that it would take many times its size.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{what} names {twice!r} twice: the file is damaged.")
        return table

    parts = sum(map(text.count, (b"{", b"[", b",")))
    if parts > MAX_JSON_PARTS:
        raise UnsafeFileError(f"{what} has {parts} braces, brackets and commas; at most {MAX_JSON_PARTS} are read.")
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
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number of thousands of digits
        raise CheckpointError(f"{what} is not JSON ({error}): it is truncated or damaged.") from None
    if not isinstance(parsed, kinds):
        expected = " or ".join("object" if kind is dict else kind.__name__ for kind in kinds)
        raise CheckpointError(f"{what} is not a JSON {expected} but {type(parsed).__name__}.")
    return parsed
