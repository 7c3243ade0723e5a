"""Report of a conversion, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..configuration_plain_vit import PlainViTConfig
from ..errors import printable
from .format import UNPROVEN, Inference
from .parity import StageDifference

# Against the same numbers in another order of operations, in float32; the project's one tolerance.
TOLERANCE = 1e-5
REFERENCE = "the reference"  # how the source of an inference begins that known logits settled


@dataclass(frozen=True)
class Report:
    """What a conversion did, in words.

    Args:
        source: File, folder or Hub id.
        format: The format that it was read as.
        layout: Which of the format's layouts.
        config: What was made of it.
        inferences: What was read off what.
        given_hints: What the caller said.
        used: Count of the tensors that the model is made of.
        ignored: Tensors of the source that our model has no use for, each with the reason.
        notes: What was chosen, passed over or assumed on the way.
        differences: The largest difference to the source's own model at each stage; None where it was not run.
        is_independent: Whether that model was built by the source's own reading of its configuration, not by ours.
    """

    source: str
    format: str
    layout: str | None
    config: PlainViTConfig
    inferences: Sequence[Inference]
    given_hints: Mapping[str, object]
    used: int
    ignored: Mapping[str, str]
    notes: Sequence[str]
    differences: Sequence[StageDifference] | None = None
    is_independent: bool = False

    @property
    def unproven(self) -> list[Inference]:
        """What logits depend on and the tensors do not show; a comparison with a model built from it proves none."""
        given = [Inference(name, value, "the caller") for name, value in self.given_hints.items()]
        known = [one for one in (*given, *self.inferences) if not one.source.startswith(REFERENCE)]
        proven = {one.field for one in self.inferences} - {one.field for one in known}
        found = {one.field: one for one in reversed(known)}
        return [found[field] for field in UNPROVEN if field in found and field not in proven]

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"{self.source}: {self.format}" + (f", layout {self.layout}" if self.layout else ""),
            f"  {config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, "
            f"patches of {config.patch_size}, images of {config.image_size}, {config.num_labels} labels",
            *(f"  inferred: {inference}" for inference in self.inferences),
            *(f"  given: {field} = {value!r}" for field, value in self.given_hints.items()),
            f"  tensors: {self.used} used, {len(self.ignored)} ignored",
            *(f"    ignored {name}: {reason}" for name, reason in self.ignored.items()),
            *(f"  note: {note}" for note in self.notes),
        ]
        if self.differences is not None:
            lines.append("  largest difference to the source's own model, as a share of the largest value:")
            lines += [f"    {stage.stage}: {stage.relative:.1e}" for stage in self.differences]
            if self.is_independent:
                lines.append("  that model was built by its own package from the source's own configuration")
            else:
                lines.append("  not proven by that, because the model compared with was built from the same readings:")
                lines += [f"    {one}" for one in self.unproven]
        return printable("\n".join(lines))


@dataclass(frozen=True)
class Converted:
    """A checkpoint that became ours.

    Args:
        model: With a classifier where the source has one.
        image_processor: Prepares pixels as the source did; None where nothing is known.
        report: What was done.
    """

    model: PreTrainedModel
    image_processor: Any | None
    report: Report
