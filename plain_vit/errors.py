"""Errors of plain-vit, all derived from `PlainViTError`.

Every message says what was found, what was expected and what to do. The command line prints the message without a
stack trace and exits with the `exit_code` of the class (0 is success, 2 an invalid command line; any other code not
below is a bug in plain-vit).
"""

import difflib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence

SHOWN = 40  # faults or candidates printed in one message; the attributes contain all of them
LONGEST_LINE = 4000  # characters
LONGEST_NAME = 300  # characters of a name from a file, such as a tensor's
MOST_LINES = 400
CONDITIONS = {"image_size": "if patches do not overlap"}  # under which the candidates of an argument fit


def printable(text: str) -> str:
    """Return text that is safe for a terminal: no control characters, and lines of bounded number and length.

    Messages contain names, labels and keys of untrusted files: an escape sequence would recolour the terminal, and a
    bidirectional control character would display another name.

    Args:
        text: One line or several; line breaks are kept.
    """
    lines = text.split("\n")
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more lines"]
    return "\n".join(map(_shown, lines))


def _shown(line: str) -> str:
    if len(line) > LONGEST_LINE:
        line = f"{line[:LONGEST_LINE]}... and {len(line) - LONGEST_LINE} more characters"
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)


def told(error: BaseException) -> str:
    """Return an error as the command line prints it, after the same prefix wherever it was raised."""
    words = "there is not enough memory" if isinstance(error, MemoryError) else printable(str(error))
    return f"plain-vit: {type(error).__name__}: {words}"


class PlainViTError(Exception):
    """Base class of all errors of plain-vit.

    Args:
        message: What was found, what was expected and what to do; made `printable`.
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class CheckpointError(PlainViTError, ValueError):
    """A checkpoint cannot be read: missing, truncated, malformed, or not what its name says."""

    exit_code = 3


class UnsafeFileError(CheckpointError):
    """A file was refused because reading it could run code, escape its folder or exhaust memory."""

    exit_code = 4


class UnknownFormatError(CheckpointError):
    """The file is valid, but its tensors belong to no architecture that plain-vit opens."""

    exit_code = 5


class AmbiguousCheckpointError(PlainViTError, ValueError):
    """The file fits several models, and only its owner knows which.

    Args:
        message: Which settings are missing, and why the file does not determine them.
        candidates: For each missing argument of `from_checkpoint`, the values that fit.
        otherwise: An alternative set of arguments, if no candidate is right.
        source: The file, to print a complete command line; None if there is none.
        command: Words of the command to which the arguments are added as options (default: convert the source). A
            candidate for `source` replaces the source in them.
        as_hints: Add the arguments as `name=value` instead, like the hints of the training scripts.
    """

    exit_code = 6

    def __init__(
        self,
        message: str,
        candidates: Mapping[str, Sequence[object]] | None = None,
        otherwise: Mapping[str, Sequence[object]] | None = None,
        source: str | None = None,
        command: Sequence[str] | None = None,
        as_hints: bool = False,
    ) -> None:
        self.message, self.source = message, source
        self.candidates = {argument: tuple(values) for argument, values in (candidates or {}).items()}
        self.otherwise = {argument: tuple(values) for argument, values in (otherwise or {}).items()}
        lines = [message, *_argument_lines(self.candidates)]
        if self.otherwise:
            lines += ["or, where none of these is the model, all of:", *_argument_lines(self.otherwise)]
        if command is None and source is not None:
            command = ["plain-vit", "convert", source, "OUT"]
        if command is not None and "source" in self.candidates:
            command = [str(self.candidates["source"][0]) if word == source else word for word in command]
        commands = [_command(command, one, as_hints) for one in (self.candidates, self.otherwise) if command and one]
        commands = [line for line in commands if len(line) <= LONGEST_LINE]  # a truncated command would be another one
        if commands:
            lines += ["On the command line, with the values of the model:", *commands]
        super().__init__("\n".join(lines))

    def on(self, command: Sequence[str], *, as_hints: bool = False) -> "AmbiguousCheckpointError":
        """Return the same error with another command."""
        return type(self)(self.message, self.candidates, self.otherwise, self.source, command, as_hints)


class FaultsError(PlainViTError):
    """Base class of errors with a list.

    Args:
        message: What was found, and what to do.
        faults: One line per fault.
    """

    def __init__(self, message: str, faults: Sequence[str] = ()) -> None:
        self.message, self.faults = message, tuple(faults)
        super().__init__("\n".join([message, *_bulleted(self.faults)]))


class MappingError(FaultsError, ValueError):
    """Tensors are missing, unused or of another shape than the model needs; `faults` has a line for each of them."""

    exit_code = 7


class ExportError(FaultsError, ValueError):
    """The target format cannot represent this model; `parts` are the parts that it cannot represent."""

    exit_code = 8

    @property
    def parts(self) -> tuple[str, ...]:
        """The faults."""
        return self.faults


class VerificationError(PlainViTError):
    """Two models, such as a converted one and its source, differ in their outputs or sizes."""

    exit_code = 9


class OutputError(PlainViTError, OSError):
    """The output cannot be written: full disk, read-only folder, another writer; existing files are unchanged."""

    exit_code = 10


class OutputExistsError(OutputError, FileExistsError):
    """The output already exists, and replacing it was not requested."""

    exit_code = 11


class TrainingError(PlainViTError):
    """Training cannot start or continue: contradictory options, a checkpoint of another run, a lost process."""

    exit_code = 12


class DataError(PlainViTError, ValueError):
    """A dataset is unknown, or its columns, labels or images cannot be used."""

    exit_code = 13


class HubError(PlainViTError, OSError):
    """The Hub refused a request or cannot be reached: no network, no token, no permission, no such repository."""

    exit_code = 14


class PushRefusedError(FaultsError):
    """A folder contains something that must not be uploaded, such as a secret, a pickle or a huge file.

    `faults` has a line for each of them.
    """

    exit_code = 16


class AnalysisError(PlainViTError, ValueError):
    """An analysis is impossible: a layer, head or patch outside the model, or an unsupported kind of model."""

    exit_code = 15


class MissingPackageError(PlainViTError, ImportError):
    """An optional package is missing.

    Args:
        fault: What is missing.
        packages: What to install, as pip requirements.
    """

    exit_code = 18

    def __init__(self, fault: str, packages: Sequence[str] = ()) -> None:
        self.fault = fault
        words = " ".join(f'"{package}"' if "[" in package else package for package in packages)
        super().__init__(f"{fault}: pip install {words}" if packages else fault)


class PreparedModelError(PlainViTError, RuntimeError):
    """A model cannot be prepared for inference, or a prepared model was used for something else."""

    exit_code = 17


def in_bytes(count: float) -> str:
    """Format a number of bytes, with a unit in which it is not 0.0."""
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun: `1 image`, `1,200 images`.

    Args:
        number: The number.
        noun: Its singular noun.
        nouns: The plural (default: the noun with an s).
    """
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def listed(values: Sequence[object]) -> str:
    """Return the first values, with strings quoted, and the count of the rest."""
    return few([repr(value) for value in values], most=SHOWN)


def few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, each `shortened`, and the count of the rest."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(shortened, names[:most])) + rest


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question that suggests the known names nearest to an unknown one; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def shortened(name: str) -> str:
    """Return a name from an untrusted file, abbreviated in the middle if it is very long."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:200]}...{name[-80:]} ({len(name)} characters)"


def _argument_lines(candidates: Mapping[str, Sequence[object]]) -> list[str]:
    return [f"  {argument}= {_offered(argument, values)}" for argument, values in candidates.items()]


def _offered(argument: str, values: Sequence[object]) -> str:
    """Return the values that fit, and under what condition."""
    if not values:
        return "which the tensors do not show at all"
    condition = CONDITIONS.get(argument, "")
    if len(values) == 1:
        return f"{listed(values)}, {condition or 'the only value that opens'}"
    return f"one of {listed(values)}" + (f", {condition}" if condition else "")


def _command(command: Sequence[str], candidates: Mapping[str, Sequence[object]], as_hints: bool) -> str:
    """Return the command line with the first value of each argument."""
    words = list(command)
    for argument, values in candidates.items():
        value = values[0] if values else "VALUE"
        if argument == "source":
            continue
        if as_hints:
            words.append(f"{argument}={json.dumps(value) if isinstance(value, bool) else _text(value)}")
        else:
            words += option_words(argument, value)
    return "  " + " ".join(map(_quoted, words))


def option_words(argument: str, value: object) -> list[str]:
    """Return the words of the command line for an argument of `from_checkpoint`."""
    option = "--" + argument.replace("_", "-")
    if isinstance(value, bool):
        return [option if value else f"--no-{argument.replace('_', '-')}"]
    if argument in ("image_mean", "image_std") and isinstance(value, Sequence):
        return [option, *map(str, value)]
    text = _text(value)
    return [f"{option}={text}"] if text.startswith("-") else [option, text]


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _quoted(word: str) -> str:
    """Return a word quoted for a shell, in printable characters."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
                      for char in word.replace("\\", "\\\\").replace("'", "\\'"))  # fmt: skip
    return f"$'{escaped}'"


def _bulleted(lines: Sequence[str]) -> list[str]:
    rest = [f"  ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"  - {line}" for line in lines[:SHOWN]] + rest
