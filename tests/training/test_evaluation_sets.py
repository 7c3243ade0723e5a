"""Evaluation on several sets: what labels mean, the classes that may be predicted, groups, and corruptions."""

import json
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pandas
import PIL.Image
import pytest
import torch
from skimage import color
from timm.data.real_labels import RealLabelsImagenet

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.errors import DataError, OutputExistsError, TrainingError
from plain_vit.training.arguments import parse_arguments
from plain_vit.training.data.corruptions import CORRUPTIONS, CorruptedImages, corrupted
from plain_vit.training.metrics import evaluation_of, judge_logits
from tests.training.runs import evaluate, open_script, save_plain_vit

Arguments = open_script("evaluate_image_classification").EvaluateArguments
NAMES = ["ant", "bee", "cow", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay"]
SYNSETS = [f"n{number:03}" for number in range(7, 17)]
IMAGES = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_plain_vit(folder, num_labels=10, id2label=dict(enumerate(NAMES)))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images of four of the classes, by other names, with the names of ImageNet's files and metadata."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(IMAGES):
        file = folder / "test" / SYNSETS[(number * 7) % 4 + 3] / f"ILSVRC2012_val_{number + 1:08}.JPEG"
        file.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(rng.integers(0, 256, (13, 17, 3), dtype=np.uint8)).save(file)
    (folder / "synsets.txt").write_text("\n".join(SYNSETS) + "\n")
    return folder


def logits_of(model: Path, folder: Path) -> tuple[torch.Tensor, list[str]]:
    """Return the model's logits, and the paths of the images in the order of the rows."""
    opened = PlainViTForImageClassification.from_pretrained(model).eval()
    files = sorted((folder / "test").rglob("*.JPEG"))
    pictures = [PIL.Image.open(file) for file in files]
    with torch.no_grad():
        pixels = PlainViTImageProcessor.from_pretrained(model)(pictures, return_tensors="pt")
        return opened(**pixels).logits, [*map(str, files)]


def test_sets_with_other_names_real_labels_and_few_classes_are_evaluated_in_one_run(model, images, tmp_path):
    rng = np.random.default_rng(1)
    real = [[*map(int, rng.choice(10, rng.integers(0, 4), replace=False))] for _ in range(IMAGES)]
    (tmp_path / "real.json").write_text(json.dumps(real))
    result = evaluate(
        model=model, dataset=images / "test", class_map=[str(images / "synsets.txt")], valid_labels="data",
        eval_dataset=[f"real={images}@test"], real_labels=[f"real={tmp_path / 'real.json'}"],
        output=tmp_path / "results.json",
    )  # fmt: skip
    logits, files = logits_of(model, images)
    labels = torch.tensor([SYNSETS.index(Path(file).parent.name) for file in files])
    valid = labels.unique()
    assert len(valid) == 4
    right = valid[logits[:, valid].argmax(1)] == labels  # as timm's --valid-labels
    assert result["top1_accuracy"] == pytest.approx(right.float().mean().item())
    assert result["top1_accuracy"] != (logits.argmax(1) == labels).float().mean().item()
    theirs = RealLabelsImagenet(files, str(tmp_path / "real.json"))
    theirs.add_result(logits)
    ours = result["eval_datasets"]["real"]
    assert ours["images_without_classes"] == real.count([]) > 0
    assert ours["images"] == IMAGES - real.count([])
    assert ours["top1_accuracy"] == pytest.approx(theirs.get_accuracy(1) / 100)
    assert ours["top5_accuracy"] == pytest.approx(theirs.get_accuracy(5) / 100)
    assert json.loads((tmp_path / "results.json").read_text())["eval_datasets"]["real"] == ours


def test_of_several_right_classes_the_likeliest_counts_and_others_are_never_predicted():
    logits = torch.randn(5, 9)
    several = torch.tensor([[3, 7, -1], [1, -1, -1], [0, 2, 4], [8, 5, -1], [6, -1, -1]])
    best = torch.stack([row[row >= 0][line[row[row >= 0]].argmax()] for row, line in zip(several, logits, strict=True)])
    for ours, theirs in zip(judge_logits(logits, several), judge_logits(logits, best), strict=True):
        assert torch.equal(ours, theirs)
    classes, values = judge_logits(logits, torch.tensor([1, 4, 4, 7, 1]), classes=[1, 4, 7])
    assert {*classes[:, 2:5].flatten().tolist()} == {1, 4, 7}
    torch.testing.assert_close(values[:, 1:4].sum(1), torch.ones(5))
    assert all(len({*row}) == 5 for row in classes[:, 2:].tolist())
    expected = -logits[:, [1, 4, 7]].log_softmax(1)[range(5), [0, 1, 1, 2, 0]]
    torch.testing.assert_close(values[:, 0], expected)


def test_groups_have_the_accuracies_of_pandas_and_corruptions_a_table_and_a_picture(model, images, tmp_path, capsys):
    files = sorted((images / "test").rglob("*.JPEG"))
    frame = pandas.DataFrame({
        "image": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": [NAMES[SYNSETS.index(file.parent.name)] for file in files],
        "hospital": [number % 3 for number in range(IMAGES)],
    })  # fmt: skip
    (tmp_path / "data").mkdir()
    frame.to_parquet(tmp_path / "data" / "test.parquet")
    given = {"model": model, "dataset": tmp_path / "data", "output": tmp_path / "results.json"}
    corruptions = {"corruptions": ["gaussian_noise", "pixelate"], "severities": [1, 4]}
    result = evaluate(**given, **corruptions, group_column="hospital", image_column="image")
    logits, _ = logits_of(model, images)
    frame["right"] = [NAMES[number] for number in logits.argmax(1)] == frame["label"]
    expected = frame.groupby("hospital")["right"].agg(["size", "mean"]).sort_values("mean", kind="stable")
    assert [(row["name"], row["images"], row["accuracy"]) for row in result["groups"]] == [
        (str(name), row["size"], pytest.approx(row["mean"])) for name, row in expected.iterrows()
    ]
    assert [row["name"] for row in result["corruptions"]] == corruptions["corruptions"]
    for row in result["corruptions"]:
        assert row["mean accuracy"] == pytest.approx((row["severity 1"] + row["severity 4"]) / 2)
    assert cv2.imread(str(tmp_path / "results.png")).shape[1] > 300
    printed = capsys.readouterr().out
    assert re.search(r"the worst groups +images +accuracy\n", printed)
    assert re.search(r"pixelate +\d+\.\d\d% +\d+\.\d\d%", printed)
    (tmp_path / "results.json").unlink()
    with pytest.raises(OutputExistsError, match=r"results.png already exists"):
        evaluate(**given, **corruptions)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a set without a name": ({"eval_dataset": ["digits"]}, "eval_dataset has 'digits': expected name=DATASET"),
    "a name twice": ({"eval_dataset": ["a=digits", "a=digits"]}, "has 'a=digits': .* with a new name"),
    "an unknown split": ({"eval_dataset": ["a=digits@zoo"]}, "There is no split 'zoo', only train, test"),
    "a missing map": ({"class_map": ["no.txt"]}, "There is no file no.txt: --class_map is"),
    "a map of others": ({"class_map": ["{names}"]}, "The model knows none of the 10 classes of the data"),
    "no lists": ({"real_labels": ["{numbers}"]}, "holds no list of numbers for each image .*: correct --real_labels"),
    "too few lists": (
        {"real_labels": ["{lists}"]},
        r"has 2 lists, of numbers such as .*one for each of the 360 images",
    ),
    "a map of another model": ({"class_map": ["{numbers}"]}, "has 1 lines: expected one for each of 10 classes"),
    "no such column": ({"group_column": "hospital"}, "There is no column 'hospital', only image, label"),
    "no such corruption": ({"corruptions": ["fog"]}, "corruptions has fog: expected all, or of gaussian_noise, "),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_the_model_or_the_data_is_refused(options, message, model, tmp_path):
    for name, text in {"names": "\n".join("klmnopqrst"), "numbers": "[1, 2]", "lists": "[[1], [2]]"}.items():
        (tmp_path / name).write_text(text)
    files = {name: str(tmp_path / name) for name in ("names", "numbers", "lists")}
    given = {name: [each.format(**files) for each in value] if isinstance(value, list) else value
             for name, value in options.items()}  # fmt: skip
    with pytest.raises((DataError, TrainingError), match=message):
        evaluate(**{"model": model, "dataset": "digits", "labels_by": "number", **given})


def test_sets_are_given_by_repeating_the_option():
    words = ["--model", "m", "--dataset", "d", "--eval_dataset", "a=1", "--eval-dataset=b=2", "--corruptions", "all"]
    assert parse_arguments(Arguments, words, description=None).eval_dataset == ["a=1", "b=2"]


# Corruptions

X = np.random.default_rng(2).integers(0, 256, (30, 46, 3), dtype=np.uint8)
X[:5, :5] = 0
BLURS = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))


def hsv_brighter(severity: int) -> np.ndarray:
    hsv = color.rgb2hsv(X)
    hsv[..., 2] = np.clip(hsv[..., 2] + 0.1 * severity, 0, 1)
    return color.hsv2rgb(hsv)


def defocused(severity: int) -> np.ndarray:
    radius, sigma = BLURS[severity - 1]
    far, size = (8, 3) if radius <= 8 else (radius, 5)
    y, x = np.mgrid[-far : far + 1, -far : far + 1]
    disk = np.float64(x**2 + y**2 <= radius**2)
    return cv2.filter2D(X / 255, -1, cv2.GaussianBlur(disk / disk.sum(), (size, size), sigma))


@pytest.mark.parametrize("severity", [1, 5])
def test_corruptions_without_chance_are_the_operations_of_the_authors_packages(severity):
    contrast = (0.4, 0.3, 0.2, 0.1, 0.05)[severity - 1]
    mean = cv2.mean(X)[:3]
    expected = {
        "brightness": hsv_brighter(severity),
        "defocus_blur": defocused(severity),
        "contrast": np.add(mean, (X - mean) * np.float64(contrast)) / 255,
    }
    for name, floats in expected.items():
        ours = corrupted(X, name, severity, np.random.default_rng(0))
        # Both are cut to integers, and a value just at one may fall to either side by rounding.
        assert abs(ours - np.floor(np.clip(floats, 0, 1) * 255 + 1e-9)).max() <= 1, name
        assert (ours == np.floor(np.clip(floats, 0, 1) * 255 + 1e-9)).mean() > 0.98, name


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_grow_with_severity_and_the_same_row_has_the_same_noise(name):
    processor = PlainViTImageProcessor(size={"height": 32, "width": 40}, image_mean=[0.1, 0.2, 0.3])
    smooth = cv2.GaussianBlur(X, (9, 9), 3)
    rows = [{"image": PIL.Image.fromarray(smooth), "label": 1, "row": row} for row in (4, 5)]
    clean = processor([row["image"] for row in rows], return_tensors="pt")["pixel_values"]
    away = []
    for severity in (1, 3, 5):
        batch = CorruptedImages(processor, name, severity)(rows)
        assert batch["pixel_values"].shape == clean.shape
        assert torch.equal(
            batch["pixel_values"][1:], CorruptedImages(processor, name, severity)(rows[1:])["pixel_values"]
        )
        away.append((batch["pixel_values"] - clean).square().mean().item())
        assert torch.equal(*batch["pixel_values"]) == ("noise" not in name)
    assert 0 < away[0] < away[1] < away[2]


def test_noise_has_the_strength_of_imagenet_c():
    grey = np.full((90, 110, 3), 128, dtype=np.uint8)
    draw = np.random.default_rng(0)
    gaussian = corrupted(grey, "gaussian_noise", 1, draw) / 255
    assert gaussian.std() == pytest.approx(0.08, rel=0.02)
    shot = corrupted(grey, "shot_noise", 3, draw) / 255
    assert shot.std() == pytest.approx(np.sqrt(128 / 255 / 12), rel=0.05)
    impulse = corrupted(grey, "impulse_noise", 5, draw)
    assert (impulse != 128).mean() == pytest.approx(0.27, abs=0.01)
    assert (impulse == 255).mean() == pytest.approx(0.135, abs=0.01)


def test_restricted_results_are_those_of_the_other_classes_being_absent():
    logits, labels = torch.randn(60, 8), torch.tensor([2, 5, 6] * 20)
    ours = evaluation_of(*judge_logits(logits, labels, classes=[2, 5, 6]))
    theirs = evaluation_of(*judge_logits(logits[:, [2, 5, 6]], torch.tensor([0, 1, 2] * 20)))
    assert ours.values == pytest.approx(theirs.values)
