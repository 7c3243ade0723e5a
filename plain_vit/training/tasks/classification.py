"""Image classification as a task for the training loop, from labels and optionally a teacher (distillation)."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...configuration_plain_vit import PlainViTConfig
from ...errors import TrainingError
from ...scores import MULTI_LABEL, REGRESSION
from ...system.extras import needs
from ..arguments import ClassifierOptions
from ..data import ImageClassificationData
from ..data.inputs import model_inputs
from ..data.mixing import FOLLOWING, Blend, Mixing
from ..data.progressive import ProgressiveResizing
from ..hardware.sharding import is_sharded, whole_state
from ..loop import Batch, ResultT, Task
from ..losses import balancing_weights, classification_loss, distillation_loss
from ..metrics import LOWER_IS_BETTER, METRICS, Evaluation, evaluate_classifier
from ..models import Teacher, as_saved, check_positions, merged, one_size_error
from ..vector_metrics import METRICS as VECTOR_METRICS

with needs("plain-vit[train]"):
    from accelerate import Accelerator

SINGLE_LABEL = "single_label_classification"

# Losses of each problem, and values that can select its weights; the first ones are the defaults.
LOSSES = {
    SINGLE_LABEL: ("cross_entropy", "bce", "bce_sum"),
    MULTI_LABEL: ("bce", "bce_sum"),
    REGRESSION: ("mse", "l1", "smooth_l1"),
}
SCORES = {SINGLE_LABEL: METRICS, **VECTOR_METRICS}


def check_choices(options: ClassifierOptions) -> None:
    """Refuse a loss or a metric that does not fit the problem.

    Raises:
        TrainingError: The loss or the metric is for another problem.
    """
    problem = options.problem_type
    images = "one label per image" if problem == SINGLE_LABEL else problem
    for name, value, known in (("loss", options.loss, LOSSES), ("best_metric", options.best_metric, SCORES)):
        if value not in (None, *known[problem]):
            raise TrainingError(f"With {images}, {name} is {value}: expected {' or '.join(known[problem])}.")


class ImageTask(Task[ResultT]):
    """A task with an image classifier as model, and batches of images with targets.

    Args:
        model: any transformers image classifier, before it is prepared.
        image_processor: the model's image processor.
        data: the dataset with its classes.
        options: mixup, CutMix and progressive resizing.
        normalize: normalisation of a batch's `pixel_values` from [0, 255].

    Raises:
        TrainingError: The loss or the metric is for another problem, or progressive resizing is on and the model takes
            images of only one size.
    """

    check = staticmethod(check_choices)

    def __init__(
        self,
        model: nn.Module,
        image_processor: Any,
        data: ImageClassificationData,
        options: ClassifierOptions,
        normalize: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.check(options)
        self.image_processor, self.options, self.normalize = image_processor, options, normalize
        self.kind_of_loss = options.loss or LOSSES[options.problem_type][0]
        self.score = options.best_metric or SCORES[options.problem_type][0]
        self.lower_is_better = self.score in LOWER_IS_BETTER
        self.kind: type[PreTrainedModel] = type(as_saved(model))
        self.num_classes = len(data.label_names)
        off_epoch = options.mixup_off_epoch
        self.mixing = Mixing(
            options.mixup,
            options.cutmix,
            options.seed,
            probability=options.mixup_probability,
            switch_probability=options.switch_probability,
            off_step=None if off_epoch is None else math.ceil(off_epoch * data.train_images / options.batch_size),
        )
        self.blend: Blend | None = None  # blend of the current step
        self.resizing = progressive_resizing(options, model.config, data.train_images)
        self.step = 0

    def begin_step(self, step: int) -> None:
        """Draw the blend of the step."""
        self.step, self.blend = step, self.mixing.blend(step)

    def resized(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's inputs, resized to the size of the step."""
        if self.resizing is None:
            return inputs
        return {**inputs, "pixel_values": self.resizing(inputs["pixel_values"], self.step)}

    def inputs(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the model's inputs and the targets, blended if the step has a blend."""
        inputs, labels = model_inputs(batch), batch["labels"]
        inputs["pixel_values"] = self.normalize(inputs["pixel_values"])
        if self.blend is None:
            return inputs, labels
        # The images of a stream are not shared by processes: the first image of a micro-batch follows the last one.
        following = batch.get(FOLLOWING) or {"pixel_values": batch["pixel_values"][:1], "labels": labels[:1]}
        following = {**following, "pixel_values": self.normalize(following["pixel_values"])}
        inputs["pixel_values"], targets = self.blend(inputs["pixel_values"], labels, following, self.num_classes)
        return inputs, targets

    def save(self, folder: Path, model: nn.Module, accelerator: Accelerator) -> None:
        """Save the model and the image processor, loadable with the Auto classes."""
        save_classifier(folder, model, self.image_processor, accelerator)

    def reopen(self, folder: Path) -> nn.Module:
        """Load a saved model, whose LoRA adapters are merged."""
        return self.kind.from_pretrained(folder)


def progressive_resizing(options: ClassifierOptions, config: Any, images: int) -> ProgressiveResizing | None:
    """Return the sizes of the training images by step, or None if they always have the model's size.

    Raises:
        TrainingError: The model takes images of only one size, or the initial size does not fit it.
    """
    if options.initial_image_size is None:
        return None
    if options.growth_epochs is None:
        raise TrainingError("With initial_image_size, growth_epochs is missing: give it, such as 0.8 of all epochs.")
    if not isinstance(config, PlainViTConfig):
        raise one_size_error(type(config), "--initial_image_size")
    check_positions(config, "--initial_image_size")
    steps = options.growth_epochs * images / options.batch_size
    resizing = ProgressiveResizing(config.image_shape, config.patch_shape, options.initial_image_size, steps)
    if options.initial_image_size > min(config.image_shape):
        height, width = config.image_shape
        raise TrainingError(
            f"initial_image_size is {options.initial_image_size}, above the model's {height} x {width}: give a smaller "
            "one."
        )
    try:
        type(config)(**{**config.to_dict(), "image_size": resizing.size(0)})
    except ValueError as error:
        raise TrainingError(f"The model cannot be trained at --initial_image_size: {error}") from error
    return resizing


HEADS = ("classifier", "distillation_classifier")


def token_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Return the heads of the class and the distillation token by name; empty if there is only one head."""
    heads = {name.rpartition(".")[2]: module for name, module in model.named_modules()}
    return {name: heads[name] for name in HEADS} if heads.keys() >= set(HEADS) else {}


def _keeping(outputs: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    """Return a forward hook that stores the output of a module."""

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        outputs[name] = output

    return keep


class Classification(ImageTask[Evaluation]):
    """Image classification.

    Args:
        model: any transformers image classifier, before it is prepared.
        image_processor: the model's image processor.
        data: the dataset with its classes.
        options: loss, mixup, CutMix, and weight of the teacher.
        normalize: normalisation of a batch's `pixel_values` from [0, 255].
        teacher: teacher for distillation.

    Raises:
        TrainingError: The loss or the metric is for another problem.
    """

    measures = {"accuracy": 1}

    def __init__(
        self,
        model: nn.Module,
        image_processor: Any,
        data: ImageClassificationData,
        options: ClassifierOptions,
        normalize: Callable[[torch.Tensor], torch.Tensor],
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__(model, image_processor, data, options, normalize)
        self.columns = ("loss", "accuracy", options.best_metric or METRICS[0])
        self.teacher = teacher
        self.heads = {} if teacher is None else token_heads(model)
        self.head_logits: dict[str, torch.Tensor] = {}  # logits of each head in the last forward pass
        self.class_weights = None
        if options.class_balance == "loss":
            self.class_weights = balancing_weights(data.train["label"], self.num_classes)

    def prepare(self, accelerator: Accelerator) -> None:
        """Move the teacher and the class weights to the device."""
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(accelerator.device)
        if self.teacher is not None:
            self.teacher = accelerator.prepare_model(self.teacher, evaluation_mode=True)
        for name, head in self.heads.items():
            head.register_forward_hook(_keeping(self.head_logits, name))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of a batch, and the number of correct predictions."""
        options = self.options
        inputs, targets = self.inputs(batch)
        logits = model(**self.resized(inputs)).logits.float()
        # In DeiT, one token learns from the label, the other from the teacher; the model's logits are their mean.
        own, taught = (self.head_logits[name].float() for name in HEADS) if self.heads else (logits, logits)
        loss = classification_loss(
            own,
            targets,
            kind=self.kind_of_loss,
            label_smoothing=options.label_smoothing,
            class_weights=self.class_weights,
            target_threshold=options.bce_target_threshold,
        )
        if self.teacher is not None:
            distilled = distillation_loss(
                taught,
                self.teacher(inputs["pixel_values"]),
                kind=options.distillation,
                temperature=options.distillation_temperature,
            )
            loss = torch.lerp(loss, distilled, options.distillation_weight)
        return loss, {"accuracy": (logits.argmax(dim=-1) == batch["labels"]).sum()}

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], accelerator: Accelerator, *, size: int
    ) -> Evaluation:
        """Return accuracy and loss, and the probabilities of each image."""
        return evaluate_classifier(model, batches, accelerator, size=size)


def save_classifier(folder: Path, model: nn.Module, image_processor: Any, accelerator: Accelerator) -> None:
    """Save the model and the image processor, loadable with the Auto classes."""
    bare = accelerator.unwrap_model(model)
    if is_sharded(bare):
        state = whole_state(bare)  # collective: all processes must call it
        if accelerator.is_main_process:
            if hasattr(bare, "merge_and_unload"):
                merged(bare, state).save_pretrained(folder)
            else:
                bare.save_pretrained(folder, state_dict=state)
            image_processor.save_pretrained(folder)
        return
    saved = as_saved(bare)
    saved.save_pretrained(
        folder,
        state_dict=accelerator.get_state_dict(model) if saved is bare else saved.state_dict(),
        is_main_process=accelerator.is_main_process,
    )
    if accelerator.is_main_process:
        image_processor.save_pretrained(folder)
