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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

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
    from accelerate import Accelerator

    from plain_vit.training.arguments import (
        Amount,
        BelowOne,
        Count,
        Epochs,
        ForwardOptions,
        Group,
        LabelOptions,
        Pixels,
        Positive,
        Resampling,
        Seed,
        SplitOptions,
        keywords,
        option,
        run_script,
    )
    from plain_vit.training.data import ImageClassificationData, load_classification_data
    from plain_vit.training.data.decoding import ProcessedImages, ReadableImages, UnreadableImages
    from plain_vit.training.data.identity import contents_hash, labels_hash
    from plain_vit.training.data.inputs import max_num_patches_of
    from plain_vit.training.hardware.processes import loading_options, start_accelerator
    from plain_vit.training.models import (
        checkpoint_hints,
        configuration_hash,
        head_of,
        load_classifier,
        processor_settings,
        weights_hash,
    )
    from plain_vit.training.probing import (
        BASE_BATCH_SIZE,
        BETAS,
        LEARNING_RATES,
        MOMENTUM,
        TEMPERATURE,
        Features,
        attentive_classifier,
        attentive_heads,
        check_neighbors,
        check_shots,
        classify_by_neighbors,
        extract_features,
        few_shot_accuracies,
        head_layer,
        open_tokens,
        train_probes,
        use_probe,
        write_tokens,
    )
    from plain_vit.training.reports.facts import count_images
    from plain_vit.training.reports.publishing import publish, training_facts
    from plain_vit.training.reports.report import environment
    from plain_vit.training.run.folder import as_json, changed_settings, move_into, read_json, write_file

FEATURES, SOURCE = "features.safetensors", "source"  # the file, and its metadata entry about their origin
# Settings shared by the results for all numbers of shots or of neighbours.
SETTINGS = {"few_shot": ("seeds", "l2"), "knn": ("temperature",)}


@dataclass(kw_only=True)
class SourceOptions(SplitOptions, ForwardOptions):
    """Options of the feature extraction."""

    _argument_group_name: ClassVar[str] = "features"

    image_size: list[Pixels] | None = option(None, "in pixels (default: the model's own)")
    position_resampling: Resampling | None = option(
        None, "how position embeddings are resampled to image_size (default: the model's own way)"
    )
    validation_fraction: BelowOne = option(0.1, "fraction of the training split to use if there is none")
    output_dir: str = option(help="new or empty folder, or one with the features of the same model and data")
    seed: Seed = option(0, "of the validation split and of the order of the images")


@dataclass(kw_only=True)
class ProbeOptions(Group):
    """Options of the probes."""

    _argument_group_name: ClassVar[str] = "probe"

    recipe: list[str] = option([], "named options that the others override (--list_recipes)")
    mode: Literal["linear", "few_shot", "knn", "attentive", "both"] = option(
        "both", "linear probe, few-shot, nearest neighbours, attentive probe; both are the first two"
    )
    learning_rates: list[Amount] = option([*LEARNING_RATES], "for 256 images per step; all are trained at once")
    epochs: Epochs = option(10.0, "passes of a probe over the features")
    probe_batch_size: Count = option(256, "images per step of a probe")
    weight_decay: Amount = option(0.0, "of a probe")
    optimizer: Literal["sgd", "lars"] = option("sgd", "of the linear probe; the attentive one has AdamW")
    warmup_epochs: Amount = option(0.0, "passes over the features during which the learning rates rise")
    shots: list[Count] = option([1, 5, 10, 25], "training images per class")
    seeds: list[Seed] = option([0, 1, 2], "each selects other images")
    l2: Amount = option(2.0**10, "of the ridge regression")
    neighbors: list[Count] = option([10, 20], "training images that vote on each image")
    temperature: Positive = option(TEMPERATURE, "of the votes, which are weighted by exp(cosine / temperature)")


@dataclass(kw_only=True)
class ProbeArguments(ProbeOptions, SourceOptions):
    """All options of the script."""


def probe(arguments: ProbeArguments) -> dict[str, Any]:
    """Run the probes.

    Args:
        arguments: as on the command line.

    Returns:
        The contents of `results.json`.
    """
    accelerator = start_accelerator(num_processes=arguments.num_processes, mixed_precision=arguments.mixed_precision)
    loading = loading_options(arguments.num_workers)
    data = open_data(arguments)
    if len(data.splits) < 2:
        raise TrainingError("There is no split to evaluate on: set --test_split.")
    check_counts(arguments, data)
    size = arguments.image_size
    model, image_processor = load_classifier(
        arguments.model,
        data.label_names,
        trust_remote_code=arguments.trust_remote_code,
        hints=checkpoint_hints(arguments.model_hints),
        image_size=None if size is None else (size[0], size[-1]),
        position_resampling=arguments.position_resampling,
    )
    _, head = head_layer(model)
    if arguments.mode == "attentive" and max_num_patches_of(image_processor):
        raise TrainingError("An attentive probe reads equally many patches of every image: take another mode or model.")
    attentive = attentive_classifier(model) if arguments.mode == "attentive" else None

    # Get the features from the folder of an earlier probe with the same settings, or compute them.
    folder = Path(arguments.output_dir)
    source = describe_source(arguments, data, model, image_processor)
    features = stored_features(folder, source)
    loading["batch_size"] = -(-arguments.batch_size // accelerator.num_processes)
    loading["collate_fn"] = ProcessedImages(image_processor)
    if features is None:
        features = compute_features(model, data, accelerator, loading)
        if accelerator.is_main_process:
            store_features(folder, source, features)
    if attentive is not None:
        compute_tokens(model, data, accelerator, loading, folder)
    results: dict[str, Any] = {
        **earlier_results(folder),
        "model": arguments.model,
        "dataset": arguments.dataset,
        "images": {split: len(of.labels) for split, of in features.items()},
        "features": head.in_features,
    }
    if not accelerator.is_main_process:
        return results

    if arguments.mode in ("linear", "both"):
        fit_classifier(arguments, "linear", model, image_processor, data, features, results)
    if arguments.mode in ("few_shot", "both"):
        add_results(results, "few_shot", probe_few_shots(arguments, features, data), arguments)
    if arguments.mode == "knn":
        add_results(results, "knn", probe_neighbors(arguments, features, data), arguments)
    if attentive is not None:
        tokens = {split: open_tokens(tokens_file(folder, split), of.labels) for split, of in features.items()}
        fit_classifier(arguments, "attentive", attentive, image_processor, data, tokens, results)
    return results


def check_counts(arguments: ProbeArguments, data: ImageClassificationData) -> None:
    """Refuse more shots or neighbours than there are training images."""
    labels = torch.tensor(data.train["label"][:])
    if arguments.mode in ("few_shot", "both"):
        for shots in arguments.shots:
            check_shots(labels, len(data.label_names), shots)
    if arguments.mode == "knn":
        check_neighbors(len(labels), arguments.neighbors, arguments.temperature)


def earlier_results(folder: Path) -> dict[str, Any]:
    """Return the results of earlier probes on the same features."""
    file = folder / "results.json"
    return read_json(file) if file.is_file() else {}


def add_results(results: dict[str, Any], mode: str, found: dict[str, Any], arguments: ProbeArguments) -> None:
    """Add the results of a mode to those of other modes, and of other shots or neighbours with the same settings."""
    if mode in SETTINGS:
        settings = {name: getattr(arguments, name) for name in SETTINGS[mode]}
        of_modes = results.setdefault("settings", {})
        if of_modes.get(mode) == settings:
            found = {**results[mode], **found}
        of_modes[mode] = settings
    results[mode] = found
    write_file(Path(arguments.output_dir) / "results.json", as_json(results, indent=2) + "\n")


def compute_features(
    model: PreTrainedModel, data: ImageClassificationData, accelerator: Accelerator, loading: dict[str, Any]
) -> dict[str, Features]:
    """Compute the features of all splits."""
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    features = {}
    for split, rows in data.splits.items():
        batches = batches_of(split, data, accelerator, loading)
        features[split] = extract_features(prepared, batches, accelerator, size=len(rows))
    return features


def compute_tokens(
    model: PreTrainedModel,
    data: ImageClassificationData,
    accelerator: Accelerator,
    loading: dict[str, Any],
    folder: Path,
) -> None:
    """Write the patch tokens of all splits that an earlier probe has not written."""
    accelerator.wait_for_everyone()  # so that all processes see the same files
    missing = [split for split in data.splits if not tokens_file(folder, split).is_file()]
    accelerator.wait_for_everyone()
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    for split in missing:
        batches = batches_of(split, data, accelerator, loading)
        write_tokens(prepared, batches, accelerator, tokens_file(folder, split), size=len(data.splits[split]))


def tokens_file(folder: Path, split: str) -> Path:
    """Return the path of the patch tokens of a split."""
    return folder / f"tokens-{split}.npy"


def batches_of(
    split: str, data: ImageClassificationData, accelerator: Accelerator, loading: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield batches of the processed images of a split, in order; an unreadable image raises an error."""
    loader = accelerator.prepare(DataLoader(ReadableImages(data.splits[split]), **loading))
    bar = tqdm(loader, desc=f"features of {split}", disable=not accelerator.is_main_process)
    return UnreadableImages(stop=True, say=tqdm.write, advice="Repair it, or remove it.").watch(bar)


def fit_classifier(
    arguments: ProbeArguments,
    mode: str,
    model: PreTrainedModel,
    image_processor: Any,
    data: ImageClassificationData,
    splits: dict[str, Features],
    results: dict[str, Any],
) -> None:
    """Train a probe per learning rate, and save the model with the probe that is best on the validation split."""
    folder, name = Path(arguments.output_dir), f"{mode} probe"
    probes = train_probes(
        splits["train"],
        len(data.label_names),
        heads=attentive_heads(model) if mode == "attentive" else None,
        learning_rates=arguments.learning_rates,
        epochs=arguments.epochs,
        batch_size=arguments.probe_batch_size,
        weight_decay=arguments.weight_decay,
        optimizer=arguments.optimizer,
        warmup_epochs=arguments.warmup_epochs,
        seed=arguments.seed,
    )
    accuracies = {each.learning_rate: each.accuracy(splits["validation"]) for each in probes}
    for rate, accuracy in accuracies.items():
        tqdm.write(f"{name}, learning rate {rate:8.1e}: validation accuracy {accuracy:.2%}")
    best = max(probes, key=lambda each: accuracies[each.learning_rate])
    accuracy = best.accuracy(splits[data.held_out])
    tqdm.write(
        f"{name}: {data.held_out} accuracy {accuracy:.2%} at the learning rate {best.learning_rate:g}, selected on the "
        "validation split"
    )
    found = {
        "validation_accuracies": {str(rate): accuracy for rate, accuracy in accuracies.items()},
        "learning_rate": best.learning_rate,
        f"{data.held_out}_accuracy": accuracy,
    }
    use_probe(model, best)
    add_results(results, mode, found, arguments)
    save_model(model, image_processor, folder)
    describe_model(arguments, data, mode, found)
    tqdm.write(f"the model is in {folder}")


def probe_neighbors(
    arguments: ProbeArguments, features: dict[str, Features], data: ImageClassificationData
) -> dict[str, float]:
    """Return the accuracy of nearest neighbours by number of neighbours."""
    held_out = features[data.held_out]
    predictions = classify_by_neighbors(
        features["train"],
        held_out.values,
        len(data.label_names),
        counts=arguments.neighbors,
        temperature=arguments.temperature,
    )
    results = {}
    for count, predicted in predictions.items():
        results[str(count)] = (predicted == held_out.labels).double().mean().item()
        tqdm.write(
            f"{counted(count, 'nearest neighbour'):>22}, temperature {arguments.temperature:g}: {data.held_out} "
            f"accuracy {results[str(count)]:.2%}"
        )
    return results


def probe_few_shots(
    arguments: ProbeArguments, features: dict[str, Features], data: ImageClassificationData
) -> dict[str, list[float]]:
    """Return the accuracies of ridge regression, one per seed, by number of images per class."""
    held_out, results = data.held_out, {}
    for shots in arguments.shots:
        accuracies = few_shot_accuracies(
            features["train"],
            features[held_out],
            len(data.label_names),
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


def open_data(arguments: ProbeArguments) -> ImageClassificationData:
    """Open the dataset, and split off a validation split if a probe needs one and there is none."""
    name = arguments.dataset
    options = {
        **keywords(arguments, LabelOptions, SplitOptions),
        "subset": arguments.dataset_subset,
        "image_column": arguments.image_column,
        "seed": arguments.seed,
    }
    data = load_classification_data(name, **options)
    if data.validation is None:
        data = load_classification_data(name, **options, validation_fraction=arguments.validation_fraction)
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
        "weights": weights_hash(model, without=head_of(model)),
        "configuration": configuration_hash(model.config),
        "image_processor": processor_settings(image_processor),
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


def save_model(model: Any, image_processor: Any, folder: Path) -> None:
    """Save the model and the image processor, loadable with the Auto classes."""
    with staged_folder(folder / "model", force=True, keep=False) as staged:
        model.save_pretrained(staged)
        image_processor.save_pretrained(staged)
    move_into(folder / "model", folder)


def describe_model(
    arguments: ProbeArguments, data: ImageClassificationData, mode: str, results: dict[str, Any]
) -> None:
    """Write the model card."""
    options = ("epochs", "probe_batch_size", "weight_decay", "warmup_epochs", "seed")
    optimizer: dict[str, Any] = {"optimizer": arguments.optimizer, "momentum": MOMENTUM}
    if mode == "attentive":
        optimizer = {"optimizer": "adamw", "betas": ", ".join(map(str, BETAS))}
    rate = results["learning_rate"]
    folder = Path(arguments.output_dir)
    facts = training_facts(
        folder,
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
            "base_batch_size": BASE_BATCH_SIZE,
            "peak_learning_rate": f"{rate * arguments.probe_batch_size / BASE_BATCH_SIZE:g}",
            **{name: getattr(arguments, name) for name in options},
        },
        environment=environment(),
        method=f"{'A linear' if mode == 'linear' else 'An attentive'} classifier, trained on {{data}} on the frozen "
        "features of {start}",
    )
    publish(folder, facts, repo_id=None, private=False, say=tqdm.write)


def main() -> None:
    run_script(probe, ProbeArguments, description=__doc__)


if __name__ == "__main__":
    main()
