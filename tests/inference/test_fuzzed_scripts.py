"""Random options of the scripts that run a model over images, in one and two processes, compared with a simple loop.

The loop opens each file with Pillow and passes single images through image processor and model, without datasets,
batches, matching of classes by name, shards or processes.
"""

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ConvNextImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from tests.conftest import randomize_
from tests.sizes import draws
from tests.tiny import VARIATIONS, tiny_config
from tests.training.run_cases import run_case, run_in_two
from tests.training.runs import RESNET
from tests.training.test_fuzzed_training import Options

COUNT = 23
TOLERANCE = 1e-5
SINGLE, SEVERAL, NUMBERS = "single_label_classification", "multi_label_classification", "regression"
EVALUATE, PREDICT, EXTRACT, PROBE = (
    "evaluate_image_classification", "predict", "extract_features", "linear_probe",
)  # fmt: skip


# Data


@dataclass
class Data:
    """Images as files, in the order of the dataset, and their labels.

    Args:
        place: what `--dataset` gets.
        files: the test images.
        problem: of the labels.
        names: of the classes, labels or numbers; empty for integers without names.
        labels: of each image a class by name (or number), several, or numbers.
        training: images and classes of the training split.
    """

    place: Path
    files: list[Path]
    problem: str
    names: list[str]
    labels: list[Any]
    training: tuple[list[Path], list[Any]]


def write_images(folder: Path, chance: random.Random, count: int) -> list[Path]:
    """Write images of many sizes, modes, formats and orientations."""
    folder.mkdir(parents=True)
    draw, files = np.random.default_rng(chance.randrange(2**32)), []
    for number in range(count):
        size = (chance.randint(5, 70), chance.randint(5, 70))
        image = PIL.Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8))
        mode, suffix = chance.choice([("RGB", "png"), ("L", "png"), ("RGBA", "png"), ("P", "png"), ("RGB", "jpg"),
                                      ("CMYK", "jpg"), ("RGB", "bmp"), ("1", "png"), ("LA", "png")])  # fmt: skip
        files.append(folder / f"{number:03d}.{suffix}")
        exif = PIL.Image.Exif()
        if suffix == "jpg" and chance.random() < 0.5:
            exif[274] = chance.choice([3, 6, 8])
        image.convert(mode).save(files[-1], **({"exif": exif} if suffix == "jpg" else {}))
    return files


def make_data(chance: random.Random, folder: Path) -> Data:
    """Return data of one kind, stored in one way."""
    kind = chance.choice(["folder", "names", "strings", "integers", "several", "several strings", "numbers", "number"])
    train = write_images(folder / "files" / "train", chance, COUNT)
    least = 2 if kind.startswith("number") else 1  # R2 is of two images at least
    test = write_images(folder / "files" / "test", chance, chance.choice([COUNT, COUNT, COUNT, least, 2, 3]))
    names = [*"gcadf"][: chance.randint(2, 5)]
    if "strings" in kind:  # these are sorted, where classes have an order of their own
        names.sort()
    picks = [chance.choice(names) for _ in test]
    trained = [names[place % len(names)] for place in range(COUNT)]
    if kind == "folder":
        for split, files, labels in (("train", train, trained), ("test", test, picks)):
            for file, label in zip(files, labels, strict=True):
                (folder / "data" / split / label).mkdir(parents=True, exist_ok=True)
                file.rename(folder / "data" / split / label / file.name)
        files, labels = _listed(folder / "data" / "test")
        training = _listed(folder / "data" / "train")
        return Data(folder / "data", files, SINGLE, sorted({*picks, *trained}), labels, training)
    problem, feature, labels, of_training = SINGLE, ClassLabel(names=names), picks, trained
    if kind == "strings":
        feature = Value("string")
    elif kind == "integers":
        feature, labels = Value("int64"), [names.index(pick) for pick in picks]
        of_training, names = [names.index(pick) for pick in trained], []
    elif kind.startswith("several"):
        problem, feature = SEVERAL, List(ClassLabel(names=names) if kind == "several" else Value("string"))
        labels, of_training = (
            [[name for name in names if chance.random() < 0.4] for _ in files] for files in (test, train)
        )
        labels[0] = of_training[0] = [*names]
    elif kind.startswith("number"):
        problem, width = NUMBERS, 1 if kind == "number" else 3
        values = np.random.default_rng(chance.randrange(2**32)).normal(size=(2 * COUNT, width)).astype(np.float32)
        rows = values.tolist() if width > 1 else values[:, 0].tolist()
        labels, of_training = rows[: len(test)], rows[COUNT:]
        feature = Value("float32") if width == 1 else List(Value("float32"))
        names = ["target"] if width == 1 else [f"target {place}" for place in range(width)]
    column = "target" if problem == NUMBERS else "label"
    features = Features({"image": Image(), column: feature})
    if chance.random() < 0.5:
        images: dict[str, list[Any]] = {"train": [str(file) for file in train], "test": [str(file) for file in test]}
    else:
        images = {name: [{"bytes": file.read_bytes(), "path": None} for file in files]
                  for name, files in (("train", train), ("test", test))}  # fmt: skip
    splits = {name: Dataset.from_dict({"image": images[name], column: of_split}, features=features)
            for name, of_split in (("train", of_training), ("test", labels))}  # fmt: skip
    DatasetDict(splits).save_to_disk(folder / "data")
    return Data(folder / "data", test, problem, names, labels, (train, of_training))


def _listed(folder: Path) -> tuple[list[Path], list[str]]:
    files = sorted(folder.rglob("*.*"))
    return files, [file.parent.name for file in files]


# The plainest loop


def pixels_of(file: Path, image_processor: Any) -> dict[str, torch.Tensor]:
    with PIL.Image.open(file) as image:
        upright = PIL.ImageOps.exif_transpose(image).convert("RGB")
    return dict(image_processor(upright, return_tensors="pt"))


@torch.no_grad()
def outputs_of(files: Sequence[Path], model: Any, image_processor: Any, **options: Any) -> list[Any]:
    return [model(**pixels_of(file, image_processor), **options) for file in files]


# Cases


def save_model(folder: Path, chance: random.Random, data: Data, *, script: str) -> tuple[str, list[str]]:
    """Save a model of classes in an order of its own, and return its kind and their names."""
    names = [*data.names] or [str(number) for number in range(6)]
    if data.problem != NUMBERS:
        names += ["extra", "more"][: chance.randint(0, 2)] if data.names else []
        if data.names:
            chance.shuffle(names)
    labels = dict(enumerate(names))
    fields: dict[str, Any] = {"num_labels": len(names), "id2label": labels, "problem_type": data.problem}
    kind = chance.choice(["plain", "plain", "native", "stock", "resnet"])
    if kind == "stock" or (kind == "resnet" and script in (EVALUATE, PROBE)):
        if kind == "stock":
            config: Any = ViTConfig(hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=28,
                                    image_size=24, patch_size=8, **fields)  # fmt: skip
            model, size = randomize_(ViTForImageClassification(config)), {"height": 24, "width": 24}
            ViTImageProcessor(size=size).save_pretrained(folder)
        else:
            model = randomize_(ResNetForImageClassification(ResNetConfig(**RESNET, **fields)))
            ConvNextImageProcessor(size={"shortest_edge": 33}, crop_pct=1.0).save_pretrained(folder)
        model.save_pretrained(folder)
        return kind, names
    variation = VARIATIONS[chance.choice([name for name in VARIATIONS if name not in ("no_pooling", "resnet")])]
    if kind == "native":
        variation = chance.choice([{}, {"pooling": "mean"}, {"position_embedding_type": "factorized"}])
        fields["patch_size"] = 8
    config = tiny_config(**{"patch_size": (8, 14), **variation, **fields})
    randomize_(PlainViTForImageClassification(config)).save_pretrained(folder)
    height, width = config.image_shape
    native = {"max_num_patches": 21, "patch_size": 8} if kind == "native" else {}
    PlainViTImageProcessor(size={"height": height, "width": width}, **native).save_pretrained(folder)
    return kind, names


def draw(chance: random.Random, script: str, kind: str, data: Data, names: list[str]) -> dict[str, Any]:
    """Return options of a script."""
    options = Options(chance, dataset=str(data.place), batch_size=chance.choice([1, 2, 5, 8, 64]))
    options.draw(0.2, "num_workers", 1, 2)
    if script == EVALUATE:
        options.draw(0.5, "split", "test")
        if data.problem == SINGLE:
            options.draw(0.3, "views", *["flip"] if kind != "native" else ["one"])
            if not data.names or names == data.names:
                options.draw(0.5, "labels_by", "number")
        return dict(options)
    if script == PROBE:
        return {**options, "mode": "knn", "neighbors": [1], "validation_fraction": 0.3}
    options["split"] = "test"
    options["shard_size"] = chance.choice([1, 4, 7, 1000])
    if data.files[0].parent.parent.name == "test":  # a folder of images
        options.draw(0.3, "streaming", True)
    if script == PREDICT:
        options.draw(0.5, "top", 1, 2, 9)
        return dict(options)
    if kind != "native":  # of images of many sizes there are pooled features only
        options.draw(0.5, "feature", "mean", "patches")
    if "feature" in options:
        options.draw(0.5, "layers", [1], [2, 1])
    return dict(options)


# Comparison


def check_evaluation(
    out: Path, data: Data, names: list[str], logits: torch.Tensor, flipped: torch.Tensor | None
) -> None:
    results = json.loads((out / "results.json").read_text())
    with (out / "predictions.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert (results["images"], len(rows)) == (len(data.files), len(data.files))
    if data.problem == NUMBERS:
        targets = torch.tensor(data.labels, dtype=torch.float32).view(len(rows), -1)
        assert results["loss"] == pytest.approx(F.mse_loss(logits, targets).item(), rel=1e-4)
        shown = np.asarray([[float(cell) for cell in row[2::2]] for row in rows])
        assert np.allclose(shown, logits, rtol=1e-4, atol=1e-4)
    elif data.problem == SEVERAL:
        targets = torch.tensor([[float(name in labels) for name in names] for labels in data.labels])
        assert results["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, targets).item(), rel=1e-4)
        assert head[1::2] == names
        assert np.allclose([[float(cell) for cell in row[2::2]] for row in rows], logits.sigmoid(), atol=1e-4)
    else:
        shares = logits.softmax(-1) if flipped is None else (logits.softmax(-1) + flipped.softmax(-1)) / 2
        true = [names.index(str(label)) for label in data.labels]
        assert results["loss"] == pytest.approx(F.nll_loss(shares.log(), torch.tensor(true)).item(), rel=1e-4)
        assert [row[1] for row in rows] == [str(label) for label in data.labels]
        for row, of_image in zip(rows, shares, strict=True):
            for name, share in zip(row[2::2], row[3::2], strict=True):
                assert float(share) == pytest.approx(of_image[names.index(name)].item(), abs=1e-4)
            assert float(row[3]) == pytest.approx(of_image.max().item(), abs=1e-4)
        best = np.asarray([names.index(row[2]) for row in rows])
        assert results["top1_accuracy"] == pytest.approx((best == true).mean())


def check_predictions(out: Path, data: Data, names: list[str], logits: torch.Tensor, top: int) -> None:
    rows = rows_of(out)
    scores = {NUMBERS: logits, SEVERAL: logits.sigmoid(), SINGLE: logits.softmax(-1)}[data.problem]
    if len(names) == 1 and data.problem != NUMBERS:
        scores = logits.sigmoid()
    assert len(rows) == len(data.files)
    for row, of_image in zip(rows, scores, strict=True):
        if data.problem == NUMBERS:
            assert row["labels"] == names
            assert np.allclose(row["values"], of_image, atol=1e-4)
            continue
        assert len(row["labels"]) == min(top, len(names))
        for name, share in zip(row["labels"], row["probabilities"], strict=True):
            assert share == pytest.approx(of_image[names.index(name)].item(), abs=1e-4)
        assert row["probability"] == pytest.approx(of_image.max().item(), abs=1e-4)


def check_features(out: Path, model: Any, outputs: list[Any], options: dict[str, Any]) -> None:
    rows, kind, layers = rows_of(out), options.get("feature", "pooled"), options.get("layers", [])
    body = model.base_model
    for row, of_image in zip(rows, outputs, strict=True):
        for name, states in {f"feature_{layer}": of_image.hidden_states[layer] for layer in layers}.items() or [
            ("feature", of_image.last_hidden_state)
        ]:
            if kind == "pooled":
                expected = of_image.pooler_output[0]
            else:
                prefix = body.num_prefix_tokens
                patches = states[0, :-prefix] if body.config.register_tokens_last and prefix else states[0, prefix:]
                expected = patches.mean(0) if kind == "mean" else patches.unflatten(0, body.config.grid_size)
            got = torch.tensor(row[name])
            assert got.shape == expected.shape
            assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


def rows_of(out: Path) -> list[dict[str, Any]]:
    files = sorted((out / "data").glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def bytes_of(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((out / "data").glob("*.parquet"))}


def check(seeds: Sequence[int], folder: Path) -> None:
    """Run each case in one process and in two, and compare both with the loop."""
    cases, of_two = [], []
    for seed in seeds:
        chance, here = random.Random(seed), folder / str(seed)
        script = chance.choice([EVALUATE, EVALUATE, PREDICT, EXTRACT, PROBE])
        data = make_data(chance, here)
        while script == PROBE and data.problem != SINGLE:
            script = chance.choice([EVALUATE, PREDICT, EXTRACT])
        kind, names = save_model(here / "model", chance, data, script=script)
        options = draw(chance, script, kind, data, names) | {"model": str(here / "model")}
        for name in ("one", "two"):
            (here / name).mkdir()
            files = {"output": "results.json", "predictions": "predictions.csv"}
            files = files if script == EVALUATE else {"output_dir": "out"}
            outputs = {option: str(here / name / file) for option, file in files.items()}
            if name == "one":
                run_case(script, {**options, **outputs})
            else:
                of_two.append((script, {**options, **outputs}))
        cases.append((seed, script, data, names, options))
    run_in_two(of_two, folder / "cases.json")
    for seed, script, data, names, options in cases:
        for name in ("one", "two"):
            try:
                compare(folder / str(seed), name, script, data, names, options)
            except Exception as error:
                error.add_note(f"case {seed}, {name}: {script} {options}")
                raise


def compare(here: Path, name: str, script: str, data: Data, names: list[str], options: dict[str, Any]) -> None:
    """Compare what a script wrote with the loop."""
    out = here / name
    image_processor = AutoImageProcessor.from_pretrained(here / "model")
    model = AutoModelForImageClassification.from_pretrained(here / "model").eval()
    if script == PROBE:
        features, files = load_file(out / "out" / "features.safetensors"), data.files
        seen: list[torch.Tensor] = []
        head = model.classifier[-1] if isinstance(model.classifier, torch.nn.Sequential) else model.classifier
        head.register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
        outputs_of(files, model, image_processor)
        assert (features["test.values"] - torch.cat(seen)).abs().max() <= TOLERANCE * torch.cat(seen).abs().max()
        classes = sorted({*data.training[1], *data.labels}, key=str) if not data.names else data.names
        assert [str(classes[label]) for label in features["test.labels"]] == [str(label) for label in data.labels]
        assert len(features["train.values"]) + len(features["validation.values"]) == COUNT
        return
    if script == EXTRACT:
        plain = PlainViTForImageClassification if model.config.model_type == "plain_vit" else None
        opened = model if plain else converted(here / "model")
        outputs = outputs_of(data.files, opened.base_model, image_processor, output_hidden_states=True)
        check_features(out / "out", opened, outputs, options)
    else:
        logits = torch.cat([of_image.logits for of_image in outputs_of(data.files, model, image_processor)])
        if script == PREDICT:
            check_predictions(out / "out", data, names, logits, options.get("top", 5))
        else:
            flipped = None
            if options.get("views") == "flip":
                with torch.no_grad():
                    flipped = torch.cat([
                        model(pixels_of(file, image_processor)["pixel_values"].flip(-1)).logits for file in data.files
                    ])  # fmt: skip
            check_evaluation(out, data, names, logits, flipped)
    if script in (PREDICT, EXTRACT) and name == "two":
        assert bytes_of(out / "out") == bytes_of(here / "one" / "out")


def converted(folder: Path) -> Any:
    from plain_vit.conversion import from_checkpoint

    return from_checkpoint(folder).model.eval()


@pytest.mark.slow
def test_generated_options_give_the_results_of_the_plainest_loop_in_one_process_and_two(tmp_path):
    check(range(draws(10, nightly=20)), tmp_path)
