"""Several labels per image, and regression, as tasks of the training loop."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import TrainingError
from ...scores import MULTI_LABEL, REGRESSION
from ...system.extras import needs
from ..arguments import ClassifierOptions
from ..data import ImageClassificationData
from ..loop import Batch
from ..losses import classification_loss
from ..metrics import LOWER_IS_BETTER
from ..vector_metrics import METRICS, VectorEvaluation, evaluate_vectors
from .classification import ImageTask

with needs("plain-vit[train]"):
    from accelerate import Accelerator

REGRESSION_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss,
}  # fmt: skip
LOSSES = {MULTI_LABEL: ("bce", "bce_sum"), REGRESSION: tuple(REGRESSION_LOSSES)}


class VectorPrediction(ImageTask[VectorEvaluation]):
    """Prediction of several labels, or of numbers.

    Args:
        model: any transformers image classifier, before it is prepared.
        image_processor: the model's image processor.
        data: the dataset, with vectors as labels.
        options: problem type, loss, mixup and CutMix.
        normalize: normalisation of a batch's `pixel_values` from [0, 255].

    Raises:
        TrainingError: An option does not apply to the problem.
    """

    def __init__(
        self,
        model: nn.Module,
        image_processor: Any,
        data: ImageClassificationData,
        options: ClassifierOptions,
        normalize: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(model, image_processor, data, options, normalize)
        check_vector_options(options)
        self.problem_type = options.problem_type
        self.kind_of_loss = options.loss or LOSSES[self.problem_type][0]
        self.score = options.best_metric or METRICS[self.problem_type][0]
        self.lower_is_better = self.score in LOWER_IS_BETTER

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of a batch."""
        inputs, targets = self.inputs(batch)
        logits = model(**self.resized(inputs)).logits.float()
        if self.problem_type == MULTI_LABEL:
            return classification_loss(logits, targets.float(), kind=self.kind_of_loss), {}
        return REGRESSION_LOSSES[self.kind_of_loss](logits, targets.float()), {}

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], accelerator: Accelerator, *, size: int
    ) -> VectorEvaluation:
        """Return the targets and the outputs for each image."""
        return evaluate_vectors(model, batches, accelerator, size=size, problem_type=self.problem_type)


def check_vector_options(options: ClassifierOptions) -> None:
    """Refuse options that do not apply to several labels, or to numbers.

    Raises:
        TrainingError: There is one.
    """
    problem = options.problem_type
    if options.loss is not None and options.loss not in LOSSES[problem]:
        raise TrainingError(f"With {problem}, loss is {options.loss}: expected {' or '.join(LOSSES[problem])}.")
    if options.best_metric is not None and options.best_metric not in METRICS[problem]:
        raise TrainingError(
            f"With {problem}, best_metric is {options.best_metric}: expected {' or '.join(METRICS[problem])}."
        )
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
