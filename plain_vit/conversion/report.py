"""Report of a conversion, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..configuration_plain_vit import PlainViTConfig
from ..errors import printable
from .format import UNPROVEN, Inference
from .parity import StageDifference

# For the same computation in another order of operations, in float32; the only tolerance of the project.
TOLERANCE = 1e-5
REFERENCE = "the reference"  # prefix of the source of inferences made from reference logits


@dataclass(frozen=True)
class Report:
    """The report of a conversion.

    Args:
        source: File, folder or Hub id.
        format: Its format.
        layout: Its layout.
        config: Our configuration of the model.
        inferences: The inferred values and their origins.
        given_hints: The hints of the caller.
        used: Number of tensors used by the model.
        ignored: Tensors of the source that our model does not use, each with the reason.
        notes: Choices and assumptions made, and content skipped.
        differences: The largest difference to the source's own model at each stage; None if they were not compared.
        is_independent: Whether that model was built from the source's own configuration, not from ours.
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
        """Settings that affect logits and are not in the tensors; a model built from them cannot confirm them."""
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
    """A converted checkpoint.

    Args:
        model: Our model, with a classifier if the source has one.
        image_processor: Processor with the preprocessing of the source; None if unknown.
        report: The report of the conversion.
    """

    model: PreTrainedModel
    image_processor: Any | None
    report: Report
