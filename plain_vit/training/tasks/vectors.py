"""Several labels per image, and regression, as tasks for the training loop."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import TrainingError
from ...scores import MULTI_LABEL, REGRESSION
from ...system.extras import needs
from ..arguments import ClassifierOptions
from ..loop import Batch
from ..losses import classification_loss
from ..vector_metrics import VectorEvaluation, evaluate_vectors
from .classification import ImageTask, check_choices

with needs("plain-vit[train]"):
    from accelerate import Accelerator

REGRESSION_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss,
}  # fmt: skip


def check_vector_options(options: ClassifierOptions) -> None:
    """Refuse options that do not apply to several labels per image or to regression.

    Raises:
        TrainingError: An option does not apply.
    """
    problem = options.problem_type
    check_choices(options)
    given = {
        "teacher": options.teacher,
        "class_balance": options.class_balance != "none",
        "shots_per_class": options.shots_per_class,
        "streaming": options.streaming,
        "bce_target_threshold": options.bce_target_threshold is not None,
        "label_smoothing": options.label_smoothing not in (0, type(options).label_smoothing),
        "mixup or cutmix": problem == REGRESSION and (options.mixup or options.cutmix),
        "show_batch": problem == REGRESSION and options.show_batch,
    }
    useless = [name for name, value in given.items() if value]
    if useless:
        raise TrainingError(f"{', '.join(useless)} is for single labels, not for {problem}: omit it.")


class VectorPrediction(ImageTask[VectorEvaluation]):
    """Prediction of several labels per image, or of numbers.

    Args:
        model: any transformers image classifier, before it is prepared.
        image_processor: the model's image processor.
        data: the dataset, with vectors as labels.
        options: problem type, loss, mixup, CutMix.
        normalize: normalisation of a batch's `pixel_values` from [0, 255].

    Raises:
        TrainingError: An option does not apply to the problem.
    """

    check = staticmethod(check_vector_options)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of a batch."""
        inputs, targets = self.inputs(batch)
        logits = model(**self.resized(inputs)).logits.float()
        if self.options.problem_type == MULTI_LABEL:
            return classification_loss(logits, targets.float(), kind=self.kind_of_loss), {}
        return REGRESSION_LOSSES[self.kind_of_loss](logits, targets.float()), {}

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], accelerator: Accelerator, *, size: int
    ) -> VectorEvaluation:
        """Return targets and outputs of each image."""
        return evaluate_vectors(model, batches, accelerator, size=size, problem_type=self.options.problem_type)
