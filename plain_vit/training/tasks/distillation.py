"""Distillation of features as a task for the training loop: a student learns those of a teacher, without labels.

The loss is that of feature distillation (Wei et al. 2022, arXiv 2205.14141, section 3): smooth L1 between a linear
projection of the student's features and the whitened features of the teacher. It compares the patches and, as
lightly-train does, the pooled features too.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches, `D` hidden size.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...conversion import from_checkpoint
from ...errors import TrainingError
from ...files.place_names import public_name
from ...modeling_plain_vit import PlainViTModel
from ...system.extras import needs
from ..arguments import PretrainArguments
from ..data.augmentation import TrainingTransform, input_size, training_transform
from ..loop import Batch
from ..models import with_processed_size
from .unlabelled import Start, Unlabelled

with needs("plain-vit[train]"):
    from accelerate import Accelerator

BETA = 2.0  # of the smooth L1 loss


def features_of(model: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of the patches, (B, D, h, w), and the pooled ones, (B, D), or the mean without pooling."""
    output = model(pixel_values, return_dict=True)
    patches = model.tokens_to_map(output.last_hidden_state, *pixel_values.shape[-2:])
    pooled = output.pooler_output
    return patches, pooled if pooled is not None and pooled.ndim == 2 else patches.mean(dim=(2, 3))


def pooled_size(model: PlainViTModel) -> int:
    """Return the number of pooled features."""
    config = model.config
    pools = model.add_pooling_layer and config.pooling != "none"
    return config.representation_size or config.pooled_size if pools else config.hidden_size


def whitened(features: torch.Tensor) -> torch.Tensor:
    """Return features (..., D) with a mean of 0 and a variance of 1 in each vector."""
    return F.layer_norm(features.float(), features.shape[-1:])


class Student(nn.Module):
    """A model with projections of its features to those of a teacher, and the loss.

    Args:
        model: the student.
        teacher: the teacher, of which only the numbers of features are used.
    """

    def __init__(self, model: PlainViTModel, teacher: PlainViTModel) -> None:
        super().__init__()
        self.model = model
        self.patches = nn.Linear(model.config.hidden_size, teacher.config.hidden_size)
        self.pooled = nn.Linear(pooled_size(model), pooled_size(teacher))

    def forward(
        self, pixel_values: torch.Tensor, patches: torch.Tensor, pooled: torch.Tensor, each: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss, and 0 for the number of correct predictions.

        Args:
            pixel_values: images of shape (B, C, H, W).
            patches: whitened features of the teacher at each patch of the student, of shape (B, N, D of the teacher).
            pooled: whitened pooled features of the teacher, of shape (B, D of the teacher).
            each: return both per image, of shape (B,).
        """
        own_patches, own_pooled = features_of(self.model, pixel_values)
        own_patches = self.patches(own_patches.flatten(2).transpose(1, 2))
        losses = smooth_l1(own_patches, patches) + smooth_l1(self.pooled(own_pooled), pooled)
        losses = losses if each else losses.mean()
        return losses, torch.zeros_like(losses)


def smooth_l1(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean smooth L1 loss of each image."""
    return F.smooth_l1_loss(found.float(), wanted, reduction="none", beta=BETA).flatten(1).mean(dim=1)


class Distillation(Unlabelled):
    """The features of a teacher, which sees the same crop of each image, prepared by its own image processor.

    Args:
        model: the student.
        start: its image processor.
        teacher: the teacher; it is frozen.
        teacher_processor: its image processor.
        name: the teacher, as given.
    """

    def __init__(self, model: PlainViTModel, start: Start, teacher: PlainViTModel, teacher_processor: Any, name: str):
        self.teacher: Any = teacher.float().eval().requires_grad_(False)
        self.teacher_processor = teacher_processor
        size = input_size(start.image_processor)
        self.grid_size = model.config.grid_of(*size)
        # The student's pixels, cropped as the teacher's: its own image processor may crop another part.
        self.cropped = with_processed_size(teacher_processor, size)
        self.cropped.resample = start.image_processor.resample
        super().__init__(
            Student(model, self.teacher),
            start.image_processor,
            saved={"model": "."},
            summary="by learning the features of a teacher",
            settings={"teacher": public_name(name)},
        )

    def prepare(self, accelerator: Accelerator) -> None:
        """Move the teacher to the device."""
        self.teacher = accelerator.prepare_model(self.teacher, evaluation_mode=True)

    def transforms(self, **options: Any) -> dict[str, TrainingTransform]:
        """Return the transforms of the student's and of the teacher's images."""
        own = training_transform(self.image_processor, **options)
        return {
            "pixel_values": replace(training_transform(self.cropped, **options), normalize=own.normalize),
            "teacher_pixels": training_transform(self.teacher_processor, **options),
        }

    @torch.no_grad()
    def complete(self, batch: Batch) -> Batch:
        """Return the student's pixels, and what the teacher makes of its own."""
        patches, pooled = features_of(self.teacher, batch["teacher_pixels"])
        if tuple(patches.shape[-2:]) != self.grid_size:
            patches = F.interpolate(patches, self.grid_size, mode="bilinear", antialias=True, align_corners=False)
        patches = whitened(patches.flatten(2).transpose(1, 2))
        return {"pixel_values": batch["pixel_values"], "patches": patches, "pooled": whitened(pooled)}


def distillation(options: PretrainArguments, start: Start) -> Unlabelled:
    """Return the distillation of a teacher's features as a task.

    Raises:
        TrainingError: There is no teacher, or it has no image processor for images of one size.
    """
    if options.teacher is None:
        raise TrainingError(
            "The method distillation needs a model to learn from: give its name or folder as --teacher."
        )
    converted = from_checkpoint(options.teacher)
    teacher, processor = converted.model.base_model, converted.image_processor
    if processor is None or not isinstance(teacher, PlainViTModel):
        raise TrainingError(
            f"{options.teacher} has no image processor, or is a backbone: convert the whole model first."
        )
    return Distillation(start.fill(PlainViTModel(start.config)), start, teacher, processor, options.teacher)
