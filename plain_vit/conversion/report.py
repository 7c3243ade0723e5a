"""The result of a conversion and its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..configuration_plain_vit import PlainViTConfig
from ..errors import few, printable
from .parity import StageDifference
from .tables.format import NO_TENSOR, UNPROVEN, Inference

# For equal computations in float32 that differ in the order of operations; the only tolerance of the project.
TOLERANCE = 1e-5
REFERENCE = "the reference"  # prefix of `Inference.source` for values found with reference logits
SUBTLE = ("layer_norm_eps", "hidden_act")  # a wrong value may change logits by less than the reference's tolerance


@dataclass(frozen=True)
class Report:
    """The report of a conversion.

    Args:
        source: File, folder or Hub id.
        format: Format of the source.
        layout: Layout of the source; None if its format has only one.
        config: Our configuration of the model.
        inferences: The inferred values and their origins.
        given_hints: The hints of the caller.
        used: Number of tensors used by the model.
        ignored: Tensors of the source that our model does not use, each with the reason.
        notes: Choices and assumptions made, and content skipped.
        differences: The largest difference to the source's own model at each stage; None if not compared.
        is_independent: Whether that model was built from the source's own configuration, not from ours.
        stated_by: What names the class of the model, such as its config.json; None if nothing does.
        fits_reference: Whether the outputs match a reference.
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
    stated_by: str | None = None
    fits_reference: bool = False

    @property
    def unproven(self) -> list[Inference]:
        """Settings that affect the outputs but that no tensor proves. A model built from them cannot confirm them."""
        given = [Inference(name, value, "the caller") for name, value in self.given_hints.items()]
        known = [one for one in (*given, *self.inferences) if not one.source.startswith(REFERENCE)]
        proven = {one.field for one in self.inferences} - {one.field for one in known}
        found = {one.field: one for one in reversed(known)}
        fields = SUBTLE if self.fits_reference else UNPROVEN
        settings = [found[field] for field in fields if field in found and field not in proven]
        return [*settings, *(Inference(name, "none", self._why_absent) for name in self._absent)]

    @property
    def _absent(self) -> list[str]:
        """The names in `NO_TENSOR` that this model does not compute; only the source's class can confirm that."""
        if self.fits_reference or self.format == PlainViTConfig.model_type:
            return []
        rotates = self.config.rope_parameters is not None or "rope_type" in self.given_hints
        computed = {"rope_type": rotates, "attention_mask": self.config.window_attention is not None}
        return [name for name in NO_TENSOR if not computed.get(name)]

    @property
    def _why_absent(self) -> str:
        return "assumed" if self.stated_by is None else f"as {self.stated_by} names the model"

    @property
    def _remedy(self) -> str:
        return "and a reference hardly does" if self.fits_reference else "but reference= proves"

    def unproven_lines(self) -> list[str]:
        """Return `unproven` as lines: one per setting, and one for all absent computations."""
        lines = [str(one) for one in self.unproven if one.source != self._why_absent]
        absent = ", ".join(NO_TENSOR[name] for name in self._absent)
        return [*lines, *([f"absent, {self._why_absent}: {absent}"] if absent else [])]

    def __str__(self) -> str:
        config, unproven = self.config, self.unproven
        hidden = {one.field for one in unproven}
        lines = [
            f"{self.source}: {self.format}" + (f", layout {self.layout}" if self.layout else ""),
            f"  {config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, "
            f"patches of {config.patch_size}, images of {config.image_size}, {config.num_labels} labels",
            *(f"  inferred: {inference}" for inference in self.inferences if inference not in unproven),
            *(f"  given: {field} = {value!r}" for field, value in self.given_hints.items() if field not in hidden),
            *([f"  no tensor shows, {self._remedy}:"] if unproven else []),
            *(f"    {line}" for line in self.unproven_lines()),
            f"  tensors: {self.used} used, {len(self.ignored)} ignored",
            *(f"    ignored {names}: {reason}" for reason, names in self._ignored_by_reason().items()),
            *(f"  note: {note}" for note in self.notes),
        ]
        if self.differences is not None:
            lines.append("  largest difference to the source's own model, as a share of the largest value:")
            lines += [f"    {stage.stage}: {stage.relative:.1e}" for stage in self.differences]
            if self.is_independent:
                lines.append("  that model was built by its own package from the source's own configuration")
            else:
                lines[-1] += self._condition()
        return printable("\n".join(lines))

    def _ignored_by_reason(self) -> dict[str, str]:
        """Return the ignored tensors of each reason; of many, the first ones."""
        names: dict[str, list[str]] = {}
        for name, reason in self.ignored.items():
            names.setdefault(reason, []).append(name)
        return {reason: few(ignored) for reason, ignored in names.items()}

    def _condition(self) -> str:
        """Return the unproven settings on which the comparison with a model built from them depends."""
        settings = [f"{one.field} = {one.value!r}" for one in self.unproven if one.source != self._why_absent]
        absent = ["nothing is computed that leaves no tensor"] if self._absent else []
        return f", if {', '.join([*settings, *absent])}" if settings or absent else ""


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
