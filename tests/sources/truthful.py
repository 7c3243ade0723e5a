"""Open a bare file with true answers to all questions: it gives the source's outputs, or is refused.

Questions and answers differ between sources, so each source has an oracle: a function that knows how the model was
built. The loop and the comparison are shared.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plain_vit.conversion import Converted, from_checkpoint
from plain_vit.errors import AmbiguousCheckpointError, PlainViTError
from tests.tiny import difference

TOLERANCE = 1e-5
ROUNDS = 5  # of questions: all are asked at once, but an answer may raise new ones

# Maps the name of an argument and its candidates to the true value, or None if there is no true answer.
Oracle = Callable[[str, Sequence[object]], object | None]


@dataclass
class Outcome:
    """Outcome for one file.

    Args:
        converted: The model; None if the file was refused or a question has no true answer.
        answers: Answers of the oracle.
        refusal: Why the file did not open.
    """

    converted: Converted | None
    answers: Mapping[str, object]
    refusal: str = ""


@dataclass
class Tally:
    """Outcomes of many files: the number that opened, and reasons why others did not."""

    opened: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0

    def add(self, outcome: Outcome, off: float = 0.0) -> None:
        """Count the outcome of a file, with the largest difference `off` if it opened."""
        if outcome.converted is None:
            self.refused[outcome.refusal.splitlines()[0][:100]] += 1
        else:
            self.opened += 1
            self.largest = max(self.largest, off)

    @property
    def total(self) -> int:
        """Number of files that were tried."""
        return self.opened + sum(self.refused.values())

    def __str__(self) -> str:
        lines = [f"{self.opened} of {self.total} opened, off by {self.largest:.1e} at most; refused:"]
        return "\n".join([*lines, *(f"  {count} x {reason}" for reason, count in self.refused.most_common())])


def open_truthfully(path: Path, oracle: Oracle, **options: Any) -> Outcome:
    """Open a file, and answer questions until it opens, is refused or asks a question without a true answer.

    Args:
        path: The file or folder.
        oracle: Answers each question.
        **options: Options of `from_checkpoint`, passed from the start.
    """
    answers: dict[str, object] = {}
    for _ in range(ROUNDS):
        try:
            return Outcome(from_checkpoint(path, **options, **answers), answers)
        except AmbiguousCheckpointError as error:
            asked = error
        except PlainViTError as error:
            return Outcome(None, answers, f"{type(error).__name__}: {error}")
        said = _answers(oracle, asked.candidates) or _answers(oracle, asked.otherwise)
        names = [*asked.candidates, *asked.otherwise]
        assert names, f"the error asks for nothing: {asked}"
        if not said:
            return Outcome(None, answers, f"no true answer among {', '.join(names)}")
        assert not said.keys() & answers.keys(), f"asked again for what was said, {answers}: {asked}"
        answers |= said
    raise AssertionError(f"{path} still asks after {ROUNDS} rounds, with {answers}")


def _answers(oracle: Oracle, candidates: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """Return a true answer to each question, or no answers if one question has none."""
    said = {name: oracle(name, values) for name, values in candidates.items()}
    return {} if any(value is None for value in said.values()) else dict(said)


@torch.no_grad()
def logits_differ_by(
    source: nn.Module, ours: nn.Module, shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32
) -> float:
    """Return the largest difference of two models' outputs, relative to the largest value.

    Args:
        source: The model that the file was written from.
        ours: The opened model.
        shape: Shape of the pixels: channels, height, width.
        seed: Seed of the pixels.
        dtype: Dtype of the models and the pixels.

    The second image has almost no variance, which reveals a wrong epsilon.
    """
    generator = torch.Generator().manual_seed(seed)
    pixel_values = torch.randn(3, *shape, generator=generator)
    pixel_values[1] *= 1e-3
    pixel_values = pixel_values.to(dtype)
    outputs = ours(pixel_values)
    got = outputs.logits if "logits" in outputs else outputs.pooler_output
    expected = source.eval()(pixel_values)
    assert got.shape == expected.shape, f"{tuple(got.shape)} instead of {tuple(expected.shape)}"
    return max(difference(*pair) for pair in zip(got, expected, strict=True))


def truth_among(truth: object, candidates: Sequence[object]) -> object | None:
    """Return the true value if it is one of the candidates."""
    return truth if truth in candidates else None
