"""After training: means of models, and probabilities that are as often right as they say."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from ...errors import DataError, TrainingError, few
from ...hub.card import ModelFacts, source_facts, source_origin
from ...hub.markdown import code, plain
from ..data import ImageClassificationData, load_classification_data
from ..data.decoding import ProcessedImages, ReadableImages, UnreadableImages
from ..hardware.processes import start_accelerator
from ..loop import BEST_MODELS
from ..metrics import Evaluation, evaluation_of, gather_results, judge_logits
from ..models import NOT_COMPUTED, head_of, matching_classes, names_of_classes, open_classifier, processor_settings
from .publishing import publish
from .report import environment

HIGHEST = 100.0  # temperature, and the inverse of the lowest


class Validation:
    """The validation images of a dataset, which are the same as in a run with these options.

    Args:
        batch_size: Images per forward pass.
        options: Arguments of `load_classification_data`.

    Raises:
        DataError: There are none.
    """

    def __init__(self, batch_size: int = 64, **options: Any) -> None:
        self.data: ImageClassificationData = load_classification_data(**options)
        self.batch_size = batch_size
        if self.data.validation is None:
            raise DataError(
                f"{options['dataset']} has no validation split: give the --validation-fraction and --seed of the run."
            )

    def logits(self, model: Any, image_processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits [B, K] of a classifier in float64, and the labels [B] by its numbers.

        Raises:
            DataError: The model has other classes, or is not for one label per image.
        """
        if model.config.problem_type not in (None, "single_label_classification"):
            raise DataError(f"The model is for {model.config.problem_type}: expected one label per image.")
        numbers = matching_classes(names_of_classes(model.config), self.data.label_names, labels_by="name")
        accelerator = start_accelerator(num_processes=None, mixed_precision="no")
        split: Any = self.data.validation
        loader = accelerator.prepare(
            DataLoader(ReadableImages(split), collate_fn=ProcessedImages(image_processor), batch_size=self.batch_size)
        )
        readable = UnreadableImages(stop=True, say=print, advice="Repair it, or remove it.").watch(loader)
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        logits, labels = gather_results(prepared, readable, accelerator, lambda *both: both, size=len(split))
        return logits.cpu().double(), torch.tensor(numbers)[labels.cpu()]

    def evaluate(self, model: Any, image_processor: Any) -> Evaluation:
        """Evaluate a classifier."""
        return evaluation_of(*judge_logits(*self.logits(model, image_processor)))


class Average(NamedTuple):
    """A mean of models.

    Args:
        model: The mean, in float32.
        image_processor: Its image processor.
        chosen: The folders of the models in it.
        accuracies: Accuracy of each model on the validation images, if there are any.
        accuracy: That of the mean.
    """

    model: Any
    image_processor: Any
    chosen: list[Path]
    accuracies: dict[Path, float]
    accuracy: float | None

    def facts(self, first: Path) -> ModelFacts:
        """Return the facts for the model card; the licence is that of the first source."""
        names = ", ".join(code(folder.name) for folder in self.chosen)
        how = (
            "all" if self.accuracy is None else f"{len(self.chosen)} of {len(self.accuracies)} models, chosen greedily"
        )
        origin = f"Mean of the weights of {names}: {how} (model soups, Wortsman et al. 2022). {_earlier(first)}"
        scores = {} if self.accuracy is None else {"validation_accuracy": f"{self.accuracy:.4f}"}
        return ModelFacts(origin=origin, recipe=scores, environment=environment(), **_known(first))


def average_models(sources: Sequence[Path], validation: Validation | None = None) -> Average:
    """Average the weights of classifiers, all with the same weight (a model soup, Wortsman et al. 2022).

    Sums are in float64 and the mean in float32. Two sums and two models are in memory at once, however many there are.

    Args:
        sources: Folders of models; a run that kept several `best_models` stands for these.
        validation: Images that choose (a greedy soup): from the most accurate model on, each one stays in the mean if
            the accuracy of the mean does not fall. Without them, all models are averaged.

    Raises:
        TrainingError: There are fewer than two models, or they differ in more than their weights.
    """
    folders = [each for source in sources for each in sorted((source / BEST_MODELS).glob("step_*")) or [source]]
    if len(folders) < 2:
        raise TrainingError(f"{folders[0]} is one model: give several, or a run that was trained with --best_kept 5.")
    mean, image_processor = open_classifier(str(folders[0]))
    for folder in folders[1:]:
        _refuse_others(folders[0], _settings(mean, image_processor), folder, _settings(*open_classifier(str(folder))))
    accuracies: dict[Path, float] = {}
    if validation is not None:
        accuracies = {each: validation.evaluate(*open_classifier(str(each))).accuracy for each in folders}
        folders.sort(key=lambda each: -accuracies[each])
    chosen, total, best = list[Path](), dict[str, torch.Tensor](), None
    for folder in folders:
        weights = open_classifier(str(folder))[0].state_dict()
        more = {name: total.get(name, 0) + weight.double() for name, weight in weights.items()}
        if validation is not None:
            _load_mean(mean, more, len(chosen) + 1)
            accuracy = validation.evaluate(mean, image_processor).accuracy
            if best is not None and accuracy < best:
                continue
            best = accuracy
        chosen, total = [*chosen, folder], more
    _load_mean(mean, total, len(chosen))
    return Average(mean, image_processor, chosen, accuracies, best)


def _load_mean(model: Any, total: dict[str, torch.Tensor], count: int) -> None:
    model.load_state_dict({name: weight / count for name, weight in total.items()})


def _settings(model: Any, image_processor: Any) -> dict[str, Any]:
    """Return what models must share to be averaged; what is dropped in training may differ."""
    settings = {**model.config.to_dict(), **processor_settings(image_processor)}
    return {name: value for name, value in settings.items() if name not in NOT_COMPUTED and "drop" not in name}


def _refuse_others(first: Path, settings: dict[str, Any], other: Path, others: dict[str, Any]) -> None:
    if differing := [name for name in {**settings, **others} if settings.get(name) != others.get(name)]:
        raise TrainingError(
            f"{first} and {other} differ in {few(differing)}: average models of one architecture, with the same "
            "classes and image processor."
        )


class Calibrated(NamedTuple):
    """A classifier whose logits were divided by a temperature, and its results on the validation images."""

    temperature: float
    before: Evaluation
    after: Evaluation

    def facts(self, source: Path, dataset: str) -> ModelFacts:
        """Return the facts for the model card."""
        origin = (
            f"The classifier of {code(source.name)}, divided by a temperature that was fitted on {self.before.count} "
            f"validation images of {plain(dataset)} (Guo et al. 2017). {_earlier(source)}"
        )
        errors = {"before": self.before.calibration.error, "after": self.after.calibration.error}
        recipe = {"temperature": f"{self.temperature:.4f}"}
        recipe |= {f"calibration_error_{when}": f"{error:.4f}" for when, error in errors.items()}
        return ModelFacts(origin=origin, recipe=recipe, environment=environment(), **_known(source))


def calibrate_model(model: Any, image_processor: Any, validation: Validation) -> Calibrated:
    """Divide the weights of a linear classifier by the temperature of the lowest loss (Guo et al. 2017), in place.

    Whatever opens the saved model then has these probabilities; predictions stay the same.

    Raises:
        TrainingError: The head is not linear.
    """
    logits, labels = validation.logits(model, image_processor)
    temperature = fit_temperature(logits, labels)
    head, state = head_of(model), model.state_dict()
    for name in head:
        state[name] /= temperature
    scaled = validation.logits(model, image_processor)[0]
    if not torch.allclose(scaled, logits / temperature, rtol=1e-4, atol=1e-5):
        raise TrainingError(
            f"The logits of {type(model).__name__} do not scale with {few(sorted(head))}: only a linear classifier can "
            "be calibrated."
        )
    before, after = (evaluation_of(*judge_logits(each, labels)) for each in (logits, scaled))
    return Calibrated(temperature, before, after)


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


def save_finished(folder: Path, model: Any, image_processor: Any, facts: ModelFacts, name: str) -> None:
    """Save a model with its image processor and its card of this name."""
    model.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    publish(folder, replace(facts, name=name), repo_id=None, private=False, say=print)


def _earlier(source: Path) -> str:
    origin = source_origin(source)[0]
    return f"Its card said: {origin}" if origin else ""


def _known(source: Path) -> dict[str, Any]:
    known = source_facts(source)
    return known | ({"license_from": "their source"} if "license" in known else {})
