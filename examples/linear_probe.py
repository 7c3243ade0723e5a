"""Evaluate frozen features with linear and attentive probes, few-shot ridge regression and nearest neighbours.

    python examples/linear_probe.py --model DIR --dataset digits --output_dir OUT
    python examples/linear_probe.py --model DIR --dataset digits --output_dir OUT --mode few_shot --shots 1 5 10 25
    torchrun --nproc_per_node 2 examples/linear_probe.py ...

The features of all images are computed once, by all processes, and stored in OUT. With the same OUT, you can then try
other modes, learning rates and shots in seconds.

- linear: one linear classifier per learning rate, all trained at once on standardised features. The validation split
  selects one; OUT becomes a model folder with it as the head. The reported accuracy is on the held-out split.
- few_shot: closed-form ridge regression on a few images per class, over several seeds (the paper's section 4.1).
- knn: votes of the nearest training images by cosine similarity (DINO's protocol).
- attentive: a learned query pools the patch tokens, and a linear layer classifies the result (AIM's probe), one per
  learning rate as for linear. The tokens are stored in OUT too, in float16.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("linear_probe", __doc__)

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel

from plain_vit.errors import OutputExistsError, TrainingError, counted
from plain_vit.files.staging import is_vacant, staged_file, staged_folder
from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from plain_vit.training import models, probing
    from plain_vit.training.arguments import (
        ImageOptions,
        LabelOptions,
        ProbeArguments,
        SplitOptions,
        keywords,
        run_script,
    )
    from plain_vit.training.data import ImageClassificationData, load_classification_data
    from plain_vit.training.data.decoding import ProcessedImages, ReadableImages, UnreadableImages
    from plain_vit.training.data.identity import contents_hash, labels_hash
    from plain_vit.training.data.inputs import max_num_patches_of
    from plain_vit.training.data.splits import choose_shots
    from plain_vit.training.hardware.processes import start_processes
    from plain_vit.training.probing import Features
    from plain_vit.training.reports.facts import count_images
    from plain_vit.training.reports.publishing import publish, training_facts
    from plain_vit.training.reports.report import environment
    from plain_vit.training.run.folder import as_json, changed_settings, move_into, read_json, write_file

FEATURES, SOURCE = "features.safetensors", "source"  # the file, and its metadata entry about their origin
# Settings shared by the results for all numbers of shots or of neighbours.
SETTINGS = {"few_shot": ("seeds", "l2"), "knn": ("temperature",)}
OF_TRAINING = ("learning_rates", "epochs", "weight_decay", "optimizer", "warmup_epochs")  # options of `train_probes`


class Probing:
    """The frozen model, the data, and the folder of their features.

    Args:
        arguments: as on the command line.
    """

    def __init__(self, arguments: ProbeArguments) -> None:
        self.arguments, self.folder = arguments, Path(arguments.output_dir)
        self.accelerator, self.loading = start_processes(arguments)
        self.data = open_data(arguments)
        if len(self.data.splits) < 2:
            raise TrainingError("There is no split to evaluate on: set --test_split.")
        check_counts(arguments, self.data)
        size = arguments.image_size
        self.model, self.image_processor = models.load_classifier(
            arguments.model,
            self.data.label_names,
            trust_remote_code=arguments.trust_remote_code,
            hints=models.checkpoint_hints(arguments.model_hints),
            image_size=None if size is None else (size[0], size[-1]),
            position_resampling=arguments.position_resampling,
        )
        self.width = probing.head_layer(self.model)[1].in_features
        self.loading["batch_size"] = -(-arguments.batch_size // self.accelerator.num_processes)
        self.loading["collate_fn"] = ProcessedImages(self.image_processor)

    def features(self) -> dict[str, Features]:
        """Return the features of all splits: those in the folder, if the settings are the same, or new ones."""
        source = describe_source(self.arguments, self.data, self.model, self.image_processor)
        if (stored := stored_features(self.folder, source)) is not None:
            return stored
        prepared = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        features = {
            split: probing.extract_features(prepared, self.batches_of(split), self.accelerator, size=len(rows))
            for split, rows in self.data.splits.items()
        }
        if self.accelerator.is_main_process:
            store_features(self.folder, source, features)
        return features

    def tokens(self, features: dict[str, Features]) -> dict[str, Features]:
        """Return the patch tokens of all splits; write those that an earlier probe has not written."""
        files = {split: self.folder / f"tokens-{split}.npy" for split in self.data.splits}
        self.accelerator.wait_for_everyone()  # so that all processes see the same files
        missing = [split for split, file in files.items() if not file.is_file()]
        self.accelerator.wait_for_everyone()
        prepared = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        for split in missing:
            size = len(self.data.splits[split])
            probing.write_tokens(prepared, self.batches_of(split), self.accelerator, files[split], size=size)
        if not self.accelerator.is_main_process:
            return {}
        return {split: probing.open_tokens(files[split], of.labels) for split, of in features.items()}

    def batches_of(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield batches of the processed images of a split, in order; an unreadable image raises an error."""
        loader = self.accelerator.prepare(DataLoader(ReadableImages(self.data.splits[split]), **self.loading))
        bar = tqdm(loader, desc=f"features of {split}", disable=not self.accelerator.is_main_process)
        return UnreadableImages(stop=True, say=tqdm.write, advice="Repair it, or remove it.").watch(bar)

    def add_results(self, results: dict[str, Any], mode: str, found: dict[str, Any]) -> None:
        """Add the results of a mode to those of other modes, and of other shots or neighbours with equal settings."""
        if mode in SETTINGS:
            settings = {name: getattr(self.arguments, name) for name in SETTINGS[mode]}
            of_modes = results.setdefault("settings", {})
            if of_modes.get(mode) == settings:
                found = {**results[mode], **found}
            of_modes[mode] = settings
        results[mode] = found
        write_file(self.folder / "results.json", as_json(results, indent=2) + "\n")

    def fit_classifier(
        self, mode: str, model: PreTrainedModel, splits: dict[str, Features], results: dict[str, Any]
    ) -> None:
        """Train a probe per learning rate, and save the model with the probe that is best on the validation split."""
        arguments, held_out = self.arguments, self.data.held_out
        probes = probing.train_probes(
            splits["train"],
            len(self.data.label_names),
            heads=probing.attentive_heads(model) if mode == "attentive" else None,
            batch_size=arguments.probe_batch_size,
            seed=arguments.seed,
            **{name: getattr(arguments, name) for name in OF_TRAINING},
        )
        accuracies = {each.learning_rate: each.accuracy(splits["validation"]) for each in probes}
        for rate, accuracy in accuracies.items():
            tqdm.write(f"{mode} probe, learning rate {rate:8.1e}: validation accuracy {accuracy:.2%}")
        best = max(probes, key=lambda each: accuracies[each.learning_rate])
        accuracy = best.accuracy(splits[held_out])
        tqdm.write(
            f"{mode} probe: {held_out} accuracy {accuracy:.2%} at the learning rate {best.learning_rate:g}, selected "
            "on the validation split"
        )
        found = {
            "validation_accuracies": {str(rate): accuracy for rate, accuracy in accuracies.items()},
            "learning_rate": best.learning_rate,
            f"{held_out}_accuracy": accuracy,
        }
        probing.use_probe(model, best)
        self.add_results(results, mode, found)
        with staged_folder(self.folder / "model", force=True, keep=False) as staged:
            model.save_pretrained(staged)
            self.image_processor.save_pretrained(staged)
        move_into(self.folder / "model", self.folder)
        self.describe_model(mode, found)
        tqdm.write(f"the model is in {self.folder}")

    def by_neighbors(self, features: dict[str, Features]) -> dict[str, float]:
        """Return the accuracy of nearest neighbours by number of neighbours."""
        arguments, held_out, results = self.arguments, features[self.data.held_out], {}
        predictions = probing.classify_by_neighbors(
            features["train"],
            held_out.values,
            len(self.data.label_names),
            counts=arguments.neighbors,
            temperature=arguments.temperature,
        )
        for count, predicted in predictions.items():
            results[str(count)] = (predicted == held_out.labels).double().mean().item()
            tqdm.write(
                f"{counted(count, 'nearest neighbour'):>22}, temperature {arguments.temperature:g}: "
                f"{self.data.held_out} accuracy {results[str(count)]:.2%}"
            )
        return results

    def few_shots(self, features: dict[str, Features]) -> dict[str, list[float]]:
        """Return the accuracies of ridge regression, one per seed, by number of images per class."""
        arguments, held_out, results = self.arguments, self.data.held_out, {}
        for shots in arguments.shots:
            accuracies = probing.few_shot_accuracies(
                features["train"],
                features[held_out],
                len(self.data.label_names),
                shots=shots,
                seeds=arguments.seeds,
                l2=arguments.l2,
            )
            results[str(shots)] = accuracies
            tqdm.write(
                f"{counted(shots, 'shot'):>8}: {held_out} accuracy {np.mean(accuracies):.2%} on average over "
                f"{counted(len(accuracies), 'seed')}, {min(accuracies):.2%} to {max(accuracies):.2%}"
            )
        return results

    def describe_model(self, mode: str, results: dict[str, Any]) -> None:
        """Write the model card."""
        arguments, data, rate = self.arguments, self.data, results["learning_rate"]
        options = ("epochs", "probe_batch_size", "weight_decay", "warmup_epochs", "seed")
        optimizer: dict[str, Any] = {"optimizer": arguments.optimizer, "momentum": probing.MOMENTUM}
        if mode == "attentive":
            optimizer = {"optimizer": "adamw", "betas": ", ".join(map(str, probing.BETAS))}
        facts = training_facts(
            self.folder,
            source=arguments.model,
            from_scratch=False,
            dataset=arguments.dataset,
            split_name=data.held_out,
            results={"accuracy": results[f"{data.held_out}_accuracy"]},
            images=count_images(data),
            recipe={
                "mode": mode,
                **optimizer,
                "learning_rate": rate,
                "base_batch_size": probing.BASE_BATCH_SIZE,
                "peak_learning_rate": f"{rate * arguments.probe_batch_size / probing.BASE_BATCH_SIZE:g}",
                **{name: getattr(arguments, name) for name in options},
            },
            environment=environment(),
            method=f"{'A linear' if mode == 'linear' else 'An attentive'} classifier, trained on {{data}} on the "
            "frozen features of {start}",
        )
        publish(self.folder, facts, repo_id=None, private=False, say=tqdm.write)


def probe(arguments: ProbeArguments) -> dict[str, Any]:
    """Run the probes.

    Args:
        arguments: as on the command line.

    Returns:
        The contents of `results.json`.
    """
    run, mode, attentive = Probing(arguments), arguments.mode, None
    if mode == "attentive":
        if max_num_patches_of(run.image_processor):
            raise TrainingError(
                "An attentive probe needs the same number of patches in every image: use another mode or model."
            )
        attentive = probing.attentive_classifier(run.model)
    features = run.features()
    tokens = run.tokens(features) if attentive is not None else {}
    file = run.folder / "results.json"
    results: dict[str, Any] = {
        **(read_json(file) if file.is_file() else {}),  # of earlier probes on the same features
        "model": arguments.model,
        "dataset": arguments.dataset,
        "images": {split: len(of.labels) for split, of in features.items()},
        "features": run.width,
    }
    if not run.accelerator.is_main_process:
        return results
    if mode in ("linear", "both"):
        run.fit_classifier("linear", run.model, features, results)
    if mode in ("few_shot", "both"):
        run.add_results(results, "few_shot", run.few_shots(features))
    if mode == "knn":
        run.add_results(results, "knn", run.by_neighbors(features))
    if attentive is not None:
        run.fit_classifier("attentive", attentive, tokens, results)
    return results


def check_counts(arguments: ProbeArguments, data: ImageClassificationData) -> None:
    """Refuse more shots or neighbours than there are training images."""
    labels = np.asarray(data.train["label"])
    if arguments.mode in ("few_shot", "both"):
        for shots in arguments.shots:
            choose_shots(labels, data.label_names, shots, seed=0)
    if arguments.mode == "knn":
        probing.check_neighbors(len(labels), arguments.neighbors, arguments.temperature)


def open_data(arguments: ProbeArguments) -> ImageClassificationData:
    """Open the dataset, and split off a validation split if a probe needs one and there is none."""
    named = keywords(arguments, ImageOptions, LabelOptions, SplitOptions) | {"seed": arguments.seed}
    data = load_classification_data(**named)
    if data.validation is None:
        data = load_classification_data(**named, validation_fraction=arguments.validation_fraction)
    return data


def describe_source(
    arguments: ProbeArguments, data: ImageClassificationData, model: PreTrainedModel, image_processor: Any
) -> dict[str, Any]:
    """Return everything that determines the features: the settings, then the data and model that they name."""
    deciding = ("model", "model_hints", "image_size", "position_resampling", "mixed_precision", "dataset",
                "dataset_subset", "image_column")  # fmt: skip
    return {
        **{name: getattr(arguments, name) for name in deciding},
        "classes": data.label_names,
        "weights": models.weights_hash(model, without=models.head_of(model)),
        "configuration": models.configuration_hash(model.config),
        "image_processor": models.processor_settings(image_processor),
        **{f"{name} labels": labels_hash(split) for name, split in data.splits.items()},
        **{f"{name} images": contents_hash(split) for name, split in data.splits.items()},
    }


def stored_features(folder: Path, source: dict[str, Any]) -> dict[str, Features] | None:
    """Return the features of an earlier probe, or None if the folder is empty.

    Raises:
        OutputExistsError: The folder holds other files, or features from other settings.
    """
    if is_vacant(folder):
        return None
    try:
        with safe_open(folder / FEATURES, "pt") as file:
            before = json.loads(file.metadata()[SOURCE])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise OutputExistsError(f"{folder} contains something other than a probe: give another folder.") from error
    if changed := changed_settings(before, source):
        raise OutputExistsError(f"The features in {folder} differ in {changed}: give another folder.")
    tensors = load_file(folder / FEATURES)
    names = {name.partition(".")[0] for name in tensors}
    return {
        name: Features(tensors[f"{name}.values"], tensors[f"{name}.labels"])
        for name in ("train", "validation", "test")
        if name in names
    }


def store_features(folder: Path, source: dict[str, Any], features: dict[str, Features]) -> None:
    """Write the features and the description of their source to one file."""
    tensors: dict[str, torch.Tensor] = {}
    for name, of_split in features.items():
        tensors |= {f"{name}.values": of_split.values, f"{name}.labels": of_split.labels}
    with staged_file(folder / FEATURES, force=True) as new:
        save_file(tensors, new, {SOURCE: as_json(source)})


def main() -> None:
    run_script(probe, ProbeArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)
