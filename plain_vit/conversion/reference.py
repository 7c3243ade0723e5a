"""Find the missing settings of a checkpoint with reference logits from its source."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..errors import AmbiguousCheckpointError, CheckpointError, PlainViTError, VerificationError
from ..files.tensors import LazyTensors
from .plan import ConversionPlan
from .report import REFERENCE, TOLERANCE
from .tables.compare_modules import empty_model
from .tables.engine import without_prefix
from .tables.format import HINTS, Description, Format, Hints, Inference

# For logits that may come from another machine. A wrong head count or pooling exceeds this by far, a wrong epsilon does
# not. Half precision rounds more, in every layer, so a number of its rounding errors is allowed as well.
REFERENCE_TOLERANCE = 1e-3
ROUNDINGS = 8


@dataclass(frozen=True)
class Reference:
    """Pixels and the source model's output for them, in evaluation mode.

    Args:
        pixel_values: Shape (B, C, H, W), in float32.
        logits: Shape (B, num_labels), in float32; without a classifier the output of the model, (B, D) or (B, L, D).
        dtype: The coarser of the two original dtypes.
    """

    pixel_values: torch.Tensor
    logits: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def read(cls, reference: Any) -> "Reference":
        """Validate a pair of tensors or arrays.

        Raises:
            CheckpointError: The pair is invalid, or cannot distinguish models.
        """
        try:
            pixel_values, logits = (torch.as_tensor(one).detach().cpu() for one in reference)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the reference is not a pair of arrays (pixel_values, logits): {error}") from error
        shapes = f"pixel_values of shape {tuple(pixel_values.shape)} and logits of shape {tuple(logits.shape)}"
        if pixel_values.ndim != 4 or logits.ndim not in (2, 3) or len(pixel_values) != len(logits):
            raise CheckpointError(f"the reference has {shapes}: expected (B, C, H, W) and (B, num_labels)")
        if 0 in pixel_values.shape or 0 in logits.shape:
            raise CheckpointError(f"the reference has {shapes}, which is empty: give at least one image")
        half = [one.dtype for one in (pixel_values, logits) if one.is_floating_point()]
        dtype = max([*half, torch.float32], key=lambda one: torch.finfo(one).eps)
        read = cls(pixel_values.float(), logits.float(), dtype)
        for name, values in (("pixel_values", read.pixel_values), ("logits", read.logits)):
            if not values.isfinite().all():
                raise CheckpointError(f"the {name} of the reference hold NaN or infinite values: compute them again")
        if not read.logits.any():
            raise CheckpointError(
                "the logits of the reference are all zero, as of every model with a new head: give those of a trained "
                "model"
            )
        return read

    def tolerance(self, dtypes: Iterable[torch.dtype]) -> float:
        """Return the tolerance for a correct model with tensors of these dtypes, relative to the largest logit."""
        coarsest = max(torch.finfo(dtype).eps for dtype in (self.dtype, *dtypes) if dtype.is_floating_point)
        return max(REFERENCE_TOLERANCE, ROUNDINGS * coarsest)

    def distance(self, model: PreTrainedModel) -> float:
        """Return the largest difference to a model's logits, relative to the largest logit of the reference.

        Raises:
            ValueError: The model does not accept these pixels, or its output has another shape.
        """
        with torch.no_grad():
            outputs = model.float().eval()(self.pixel_values)
        got = outputs.logits if "logits" in outputs else outputs.pooler_output
        got = outputs.last_hidden_state if got is None else got
        if got.shape != self.logits.shape:
            raise ValueError(
                f"the reference has logits of shape {tuple(self.logits.shape)}, the model gives {tuple(got.shape)}"
            )
        distance = ((got - self.logits).abs().max() / self.logits.abs().max()).item()
        return distance if math.isfinite(distance) else math.inf


Way = tuple[Hints, Description]
SHOW_PROGRESS_FROM = 20  # ways
MAX_WAYS = 1000  # each takes at least 0.1 s, for one image with a ViT-B


class ForeignCheckpoint:
    """A checkpoint of another package that may be interpreted in several ways."""

    def __init__(self, origin: Format, tensors: LazyTensors, settings: Mapping[str, Any]):
        self.origin = origin
        self.tensors = tensors
        self.settings = settings
        self.notes: list[str] = []

    def describe(self, hints: Hints) -> Description:
        """Return the only description that the checkpoint and the hints allow.

        Raises:
            AmbiguousCheckpointError: There are several; names the format that was recognised.
        """
        try:
            return self.origin.describe_checkpoint(self.tensors.meta(), self.settings, hints)
        except AmbiguousCheckpointError as error:
            if self.origin.name.replace("_", "-") in error.message:
                raise
            message = f"a checkpoint of {self.origin.name}: {error.message}"
            raise AmbiguousCheckpointError(message, error.candidates, error.otherwise) from error

    def plan(self, description: Description) -> ConversionPlan:
        """Return the conversion plan for a description."""
        tensors = LazyTensors(without_prefix(self.tensors.entries, description.prefix, description.ignored))
        rows = self.origin.rows(description.config, description.layout)
        return ConversionPlan(empty_model(description.config), rows, tensors, description, self.origin, self.settings)

    def try_reference(self, hints: Hints, reference: Reference) -> Description:
        """Try every possible description, and return the one that gives the reference logits.

        Raises:
            VerificationError: No description gives the logits.
            AmbiguousCheckpointError: Several descriptions give them, or there are too many to try.
        """
        tolerance = reference.tolerance(entry.dtype for entry in self.tensors.entries.values())
        tried: list[tuple[float, Hints, Description]] = []
        impossible: list[Exception] = []
        faults: list[Exception] = []
        nearest = math.inf
        for ways in self.possible(hints, reference, impossible):
            tried += self.distances(ways, reference, faults)
            nearest = min((attempt[0] for attempt in tried), default=math.inf)
            if nearest <= tolerance:
                break
        if not tried:
            fault = next(iter([*faults, *impossible]))
            if isinstance(fault, PlainViTError):
                raise fault
            raise VerificationError(f"the reference cannot be of this checkpoint: {fault}") from fault
        if not nearest <= tolerance:
            raise VerificationError(
                f"none of the {len(tried)} ways to read the checkpoint gives the logits of the reference; the nearest "
                f"is off by {nearest:.1e} of the largest ({tolerance:.0e} is allowed). Give the preprocessed pixels "
                "and the logits in the dtype of the computation, in evaluation mode."
            )
        asked = [field.name for field in fields(Hints)
                 if any(getattr(one[1], field.name) != getattr(hints, field.name) for one in tried)]  # fmt: skip
        # Another way fits as well if rounding explains its distance, or its distance is close to the nearest way's.
        fitting = [attempt for attempt in tried if attempt[0] <= max(TOLERANCE, 10 * nearest)]
        # Several hints may describe the same model.
        fitting = list({str(attempt[2].config): attempt for attempt in reversed(fitting)}.values())[::-1]
        if len(fitting) > 1:
            remaining = {name: list({getattr(one[1], name): None for one in fitting}) for name in asked}
            raise AmbiguousCheckpointError(
                f"the reference fits {len(fitting)} of {len(tried)} ways to read the checkpoint; use more images, of "
                "several kinds, or give:",
                {name: values for name, values in remaining.items() if len(values) > 1},
            )
        ((distance, complete, description),) = fitting
        found = f"{REFERENCE}, off by {distance:.1e} of its largest logit; {len(tried)} ways were tried"
        inferences = [Inference(name, getattr(complete, name), found) for name in asked]
        if distance > TOLERANCE:
            self.notes.append(
                f"the reference is off by {distance:.1e} of its largest logit, more than float32 in another order of "
                f"operations explains ({TOLERANCE}): if it is of the same dtype, try layer_norm_eps= or hidden_act="
            )
        others = [inference for inference in description.inferences if inference.field not in asked]
        return replace(description, inferences=[*others, *inferences])

    def possible(self, hints: Hints, reference: Reference, impossible: list[Exception]) -> Iterator[list[Way]]:
        """Yield the ways to complete the hints: first with the missing hints, then with their alternatives.

        Errors from impossible ways are appended to `impossible`.
        """
        try:
            yield [(hints, self.describe(hints))]
        except AmbiguousCheckpointError as error:
            if not error.candidates or not error.candidates.keys() <= set(HINTS) - {"key"}:
                raise
            if "patch_size" in error.candidates and hints.num_channels is None:  # each determines the other
                hints = replace(hints, num_channels=reference.pixel_values.shape[1])
                yield from self.possible(hints, reference, impossible)
                return
            for candidates in filter(None, (error.candidates, error.otherwise)):
                yield self.completed(hints, candidates, reference, impossible)

    def completed(
        self, hints: Hints, candidates: Mapping[str, Sequence[Any]], reference: Reference, impossible: list[Exception]
    ) -> list[Way]:
        """Return every possible way to set these hints, and any hints that are then still missing.

        Raises:
            AmbiguousCheckpointError: There are too many ways, or a hint has no candidates.
        """
        height, width = reference.pixel_values.shape[-2:]
        if "image_size" in candidates and hints.image_size is None:
            others = {name: values for name, values in candidates.items() if name != "image_size"}
            ways = self.completed(replace(hints, image_size=(height, width)), others, reference, impossible)
            if ways or not candidates["image_size"]:
                return ways
        count = math.prod(map(len, candidates.values()))
        if count == 0:
            raise AmbiguousCheckpointError(
                "a reference settles only what has candidates: give the others, as the model was built:", candidates
            )
        if count > MAX_WAYS:
            raise AmbiguousCheckpointError(
                f"there are {count} ways to read the checkpoint, and a reference distinguishes up to {MAX_WAYS}: give "
                "some of these, as the model was built:",
                candidates,
            )
        ways = []
        for values in itertools.product(*candidates.values()):
            settled: dict[str, Any] = dict(zip(candidates, values, strict=True))
            complete = replace(hints, **settled)
            try:
                ways.append((complete, self.describe(complete)))
            except AmbiguousCheckpointError as error:
                further = {name: value for name, value in error.candidates.items() if name not in settled}
                if not further:
                    raise
                ways += self.completed(complete, further, reference, impossible)
            except (PlainViTError, ValueError) as error:
                impossible.append(error)
        return ways

    def distances(
        self, ways: Sequence[Way], reference: Reference, faults: list[Exception]
    ) -> list[tuple[float, Hints, Description]]:
        """Return the ways with their distances from the reference logits.

        If the weights do not load, or the pixels do not fit the model, the error is appended to `faults`.
        """
        converted: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}
        known: dict[str, float | None] = {}  # distances by model
        distances = []
        for complete, description in tqdm(ways, desc="trying", unit="way", disable=len(ways) < SHOW_PROGRESS_FROM):
            computed = description.config.to_dict()
            if description.config.position_resampling == "truncate":  # the table is used without its grid
                del computed["image_size"]
            key = str(computed)
            if key not in known:
                known[key] = None
                try:
                    known[key] = reference.distance(self.plan(description).load(converted))
                except (PlainViTError, ValueError) as error:
                    faults.append(error)
            if (distance := known[key]) is not None:
                distances.append((distance, complete, description))
        return distances
