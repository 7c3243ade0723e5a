"""After training: means of models, and probabilities that are as often right as they say."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from ...errors import DataError, TrainingError, few
from ...hub.card import ModelFacts, source_facts, source_origin
from ..data import ImageClassificationData, load_classification_data
from ..data.decoding import ProcessedImages, ReadableImages, UnreadableImages
from ..hardware.processes import start_accelerator
from ..loop import BEST_MODELS
from ..metrics import Evaluation, evaluation_of, gather_results, judge_logits
from ..models import NOT_COMPUTED, head_of, matching_classes, names_of_classes, open_classifier, processor_settings
from .publishing import publish
from .report import environment

HIGHEST = 100.0  # temperature, and the inverse of the lowest


def validation_data(dataset: str, **options: Any) -> ImageClassificationData:
    """Open a dataset with the validation split of a run that had these options; see `load_classification_data`.

    Raises:
        DataError: It has none.
    """
    data: ImageClassificationData = load_classification_data(dataset, **options)
    if data.validation is None:
        raise DataError(f"{dataset} has no validation split: give the --validation-fraction and --seed of the run.")
    return data


def validation_logits(
    model: Any, image_processor: Any, data: ImageClassificationData
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [B, K] of a classifier in float64, and the labels [B] by its numbers.

    Raises:
        DataError: The model has other classes, or is not for one label per image.
    """
    if (problem := model.config.problem_type) not in (None, "single_label_classification"):
        raise DataError(f"The model is for {problem}: expected one label per image.")
    numbers = matching_classes(names_of_classes(model.config), data.label_names, labels_by="name")
    accelerator, split = start_accelerator(num_processes=None, mixed_precision="no"), data.splits["validation"]
    loader = DataLoader(ReadableImages(split), collate_fn=ProcessedImages(image_processor), batch_size=64)
    unreadable = UnreadableImages(stop=True, say=print, advice="Repair it, or remove it.")
    readable = unreadable.watch(accelerator.prepare(loader))
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    logits, labels = gather_results(prepared, readable, accelerator, lambda *both: both, size=len(split))
    return logits.cpu().double(), torch.tensor(numbers)[labels.cpu()]


class Average(NamedTuple):
    """A mean of models in float32, its image processor, the folders in it, and accuracies on validation images."""

    model: Any
    image_processor: Any
    chosen: list[Path]
    accuracies: dict[Path | str, float]  # of each folder, and of their "mean"


def average_models(sources: Sequence[Path], data: ImageClassificationData | None = None) -> Average:
    """Average the weights of classifiers, all with the same weight (a model soup, Wortsman et al. 2022).

    Sums are in float64 and the mean in float32. Two sums and two models are in memory at once, however many there are.

    Args:
        sources: Folders of models; a run that kept several `best_models` stands for these.
        data: Its validation images choose (a greedy soup): from the most accurate model on, each one stays in the mean
            if the accuracy of the mean does not fall. Without them, all models are averaged.

    Raises:
        TrainingError: There are fewer than two models, or they differ in more than their weights.
    """
    folders = [each for source in sources for each in sorted((source / BEST_MODELS).glob("step_*")) or [source]]
    if len(folders) < 2:
        raise TrainingError(f"{folders[0]} is one model: give several, or a run that was trained with --best_kept 5.")
    mean, image_processor = open_classifier(str(folders[0]))
    settings, accuracies = _settings(mean, image_processor), dict[Path | str, float]()
    for folder in folders:
        model, processor = open_classifier(str(folder))
        others = _settings(model, processor)
        if differing := [name for name in {**settings, **others} if settings.get(name) != others.get(name)]:
            raise TrainingError(
                f"{folders[0]} and {folder} differ in {few(differing)}: average models of one architecture, with the "
                "same classes and image processor."
            )
        if data is not None:
            accuracies[folder] = _evaluate(*validation_logits(model, processor, data)).accuracy
    chosen, total = list[Path](), dict[str, torch.Tensor]()
    for folder in sorted(folders, key=lambda each: -accuracies.get(each, 0)):
        weights = open_classifier(str(folder))[0].state_dict()
        more = {name: total.get(name, 0) + weight.double() for name, weight in weights.items()}
        if data is not None:
            mean.load_state_dict({name: weight / (len(chosen) + 1) for name, weight in more.items()})
            accuracy = _evaluate(*validation_logits(mean, image_processor, data)).accuracy
            if accuracy < accuracies.get("mean", 0):
                continue
            accuracies["mean"] = accuracy
        chosen, total = [*chosen, folder], more
    mean.load_state_dict({name: weight / len(chosen) for name, weight in total.items()})
    return Average(mean, image_processor, chosen, accuracies)


def _settings(model: Any, image_processor: Any) -> dict[str, Any]:
    """Return what models must share to be averaged; what is dropped in training may differ."""
    settings = {**model.config.to_dict(), **processor_settings(image_processor)}
    return {name: value for name, value in settings.items() if name not in NOT_COMPUTED and "drop" not in name}


def _evaluate(logits: torch.Tensor, labels: torch.Tensor) -> Evaluation:
    return evaluation_of(*judge_logits(logits, labels))


def calibrate_model(
    model: Any, image_processor: Any, data: ImageClassificationData
) -> tuple[float, Evaluation, Evaluation]:
    """Divide the weights of a linear classifier by the temperature of the lowest loss (Guo et al. 2017), in place.

    Whatever opens the saved model then has these probabilities; predictions stay the same.

    Returns:
        The temperature, and the results on the validation images before and after.

    Raises:
        TrainingError: The head is not linear.
    """
    logits, labels = validation_logits(model, image_processor, data)
    temperature, head, state = fit_temperature(logits, labels), head_of(model), model.state_dict()
    for name in head:
        state[name] /= temperature
    scaled, _ = validation_logits(model, image_processor, data)
    if not torch.allclose(scaled, logits / temperature, rtol=1e-4, atol=1e-5):
        raise TrainingError(f"The logits do not scale with {few(sorted(head))}: only a linear head can be calibrated.")
    return temperature, _evaluate(logits, labels), _evaluate(scaled, labels)


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the temperature that minimises the cross-entropy, which is convex in its inverse.

    Args:
        logits: Logits [B, K] in float64.
        labels: Classes [B].

    Raises:
        DataError: The loss has no minimum from 0.01 to 100, as where all predictions are right.
    """
    own = logits.gather(1, labels[:, None]).mean()

    def slope(inverse: float) -> float:
        return float(((logits * inverse).softmax(dim=-1) * logits).sum(dim=-1).mean() - own)

    low, high = 1 / HIGHEST, HIGHEST  # of the inverse
    if not slope(low) < 0 < slope(high):
        raise DataError(
            f"On {len(labels)} images, no temperature from {low:g} to {high:g} has the lowest loss, as if all or none "
            "were right: give more validation images, which the model was not trained on."
        )
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / low


def save_finished(
    folder: Path, model: Any, image_processor: Any, source: Path, *, name: str, origin: str, **recipe: str
) -> None:
    """Save a model with its image processor and its card, which has the licence of the source."""
    model.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    earlier, known = source_origin(source)[0], source_facts(source)
    origin += f" The card of its source says: {earlier}" if earlier else ""
    facts = {"origin": origin, "recipe": recipe, "environment": environment(), "license_from": "their source", **known}
    publish(folder, ModelFacts(name=name, **facts), repo_id=None, private=False, say=print)
