"""Logits that a source gave for some pixels, which tell apart the ways to read its checkpoint."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import CheckpointError

# Against logits that somebody else computed, perhaps on another machine. Wrong heads or poolings are far beyond, a
# wrong epsilon is not. Half precision rounds more, in every layer: so many of its roundings are allowed for.
REFERENCE_TOLERANCE = 1e-3
ROUNDINGS = 8


@dataclass(frozen=True)
class Reference:
    """Pixels and what a source's own model gives for them, in evaluation mode.

    Args:
        pixel_values: Of shape (B, C, H, W), in float32.
        logits: Of shape (B, num_labels), in float32; without a classifier what the model gives, (B, D) or (B, L, D).
        dtype: Of the two, the coarser one that they came in.
    """

    pixel_values: torch.Tensor
    logits: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def read(cls, reference: Any) -> "Reference":
        """Take a pair of tensors or arrays.

        Raises:
            CheckpointError: It is no such pair, or it tells no model from another.
        """
        try:
            pixel_values, logits = (torch.as_tensor(one).detach().cpu() for one in reference)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the reference is no pair of arrays (pixel_values, logits), as it has to be: {error}"
            ) from error
        shapes = f"pixel_values of shape {tuple(pixel_values.shape)} and logits of shape {tuple(logits.shape)}"
        if pixel_values.ndim != 4 or logits.ndim not in (2, 3) or len(pixel_values) != len(logits):
            raise CheckpointError(f"the reference has {shapes}: expected (B, C, H, W) and (B, num_labels)")
        if 0 in pixel_values.shape or 0 in logits.shape:
            raise CheckpointError(f"the reference has {shapes}, so nothing to compare: give at least one image")
        half = [one.dtype for one in (pixel_values, logits) if one.is_floating_point()]
        dtype = max([*half, torch.float32], key=lambda one: torch.finfo(one).eps)
        read = cls(pixel_values.float(), logits.float(), dtype)
        for name, values in (("pixel_values", read.pixel_values), ("logits", read.logits)):
            if not values.isfinite().all():
                raise CheckpointError(f"the {name} of the reference hold NaN or infinite values: compute them again")
        if not read.logits.any():
            raise CheckpointError(
                "the logits of the reference are all zero, as every model with a fresh head gives them: take those of "
                "a trained model"
            )
        return read

    def tolerance(self, dtypes: Iterable[torch.dtype]) -> float:
        """Return how far the right model may be off, given the dtypes of its tensors, as a share of the largest."""
        coarsest = max(torch.finfo(dtype).eps for dtype in (self.dtype, *dtypes) if dtype.is_floating_point)
        return max(REFERENCE_TOLERANCE, ROUNDINGS * coarsest)

    def distance(self, model: PreTrainedModel) -> float:
        """Return the largest difference to a model's logits, as a share of the largest of the reference's.

        Raises:
            ValueError: The model does not take these pixels, or gives something of another shape.
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
