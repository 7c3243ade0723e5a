"""Untrusted text in messages: printable characters in bounded number."""

import inspect
from pathlib import Path

import hypothesis
import pytest
import safetensors.torch
import torch
from hypothesis import strategies

from plain_vit import errors
from plain_vit.errors import LONGEST_LINE, MOST_LINES, PlainViTError, printable
from plain_vit_command import main

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PlainViTError)]
ACTING = "\x1b]0;title\x07\x1b[2J\x1b[31m\r\x08\x9b31m\u202egnp.\u2028\udcff"


@pytest.mark.slow
@hypothesis.given(strategies.text(strategies.characters(), max_size=200))
def test_every_line_is_printable_and_plain_text_stays_as_it_is(text: str) -> None:
    shown = printable(text)
    assert all(line.isprintable() for line in shown.split("\n"))
    assert shown.encode("utf-8").decode("utf-8") == shown
    if all(line.isprintable() for line in text.split("\n")):
        assert shown == text


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_lets_a_character_act_on_the_terminal(kind: type[PlainViTError]) -> None:
    message = str(kind(f"the tensor {ACTING} is left over"))
    assert message.isprintable()
    assert r"\x1b]0;title\x07" in message
    assert r"\u202egnp." in message


def test_long_lines_and_many_lines_are_cut() -> None:
    shown = printable("a" * 3_000_000 + "\n" + "b\n" * 100_000)
    assert shown.startswith("a" * LONGEST_LINE + "... and 2996000 more characters\nb\n")
    assert len(shown.split("\n")) == MOST_LINES + 1
    assert shown.endswith("more lines")


@pytest.mark.parametrize("name", [ACTING.replace("\udcff", ""), "x" * 3_000_000])
def test_names_of_tensors_and_files_do_not_act_on_the_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name[:40]}.safetensors"
    safetensors.torch.save_file({name: torch.ones(2, 3), f"{name}.weight": torch.ones(3, 2)}, path)
    assert main(["inspect", str(path)]) != 0
    printed = capsys.readouterr().err
    assert all(line.isprintable() for line in printed.split("\n"))
    assert len(printed) < 20_000
