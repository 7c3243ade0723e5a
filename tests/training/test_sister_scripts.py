"""The other training scripts: evaluation of a classifier, and masked pre-training."""

import json
import re
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support
from transformers import AutoImageProcessor

from plain_vit import (
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTImageProcessor,
)
from plain_vit.errors import CheckpointError, DataError, OutputExistsError, TrainingError
from plain_vit.inference import to_engine
from plain_vit.training.data import load_splits
from plain_vit.training.data.glyphs import CHARACTERS, render_glyphs
from plain_vit.training.run.folder import read_log
from plain_vit.training.tasks.masked_patches import (
    CORRUPTIONS,
    Corruption,
    MaskedPrediction,
    draw_corruption,
    rearrange_patches,
)
from tests.conftest import randomize_
from tests.tiny import tiny_config
from tests.training.runs import (
    EXAMPLES,
    evaluate,
    extract,
    finetune,
    predict,
    pretrain,
    probe,
    save_plain_vit,
    save_resnet,
    weights_of,
)

DIGITS = [str(digit) for digit in range(10)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plain ViT for digits and two more classes, in a different order than the data."""
    names = ["blank", *DIGITS[::-1], "other"]
    return save_plain_vit(tmp_path_factory.mktemp("classifier"), num_labels=12, id2label=dict(enumerate(names)))


# Evaluating


@pytest.mark.slow
def test_one_image_is_not_called_images(classifier, tmp_path, capsys):
    one = Features({"image": Image(), "label": ClassLabel(names=DIGITS)})
    images = [PIL.Image.new("RGB", (9, 7), "red")]
    Dataset.from_dict({"image": images, "label": [3]}, features=one).save_to_disk(tmp_path / "one")
    common = {"model": str(classifier), "dataset": str(tmp_path / "one")}
    evaluate(**common)
    predict(**common, output_dir=tmp_path / "predicted")
    extract(**common, output_dir=tmp_path / "extracted")
    pretrain(
        **{**common, **SHORT, "dataset": "digits", "steps": 1, "validation_fraction": 0.0005},
        output_dir=tmp_path / "pretrained",
    )  # fmt: skip
    said = capsys.readouterr().out
    for words in (", on 1 image\n", "predictions of 1 image are in", "features of 1 image are in", "on 1 image; the"):
        assert words in said


@pytest.mark.slow
def test_evaluation_gives_the_numbers_of_scikit_learn(classifier, tmp_path, capsys):
    results = evaluate(model=classifier, dataset="digits", batch_size=77, output=tmp_path / "results.json")
    test = load_splits("digits")["test"]
    model = PlainViTForImageClassification.from_pretrained(classifier).eval()
    processor = PlainViTImageProcessor.from_pretrained(classifier)
    with torch.no_grad():
        pixels = processor([image.convert("RGB") for image in test["image"][:]], return_tensors="pt")["pixel_values"]
        predictions = model(pixels).logits.argmax(dim=-1).tolist()
    names = [model.config.id2label[number] for number in predictions]
    labels = [str(label) for label in test["label"][:]]
    assert results["images"] == len(labels) == 360
    assert results["top1_accuracy"] == np.mean(np.array(names) == np.array(labels))
    assert [row["name"] for row in results["classes"]] == DIGITS[::-1]  # in the model's order
    precision, recall, f1, images = precision_recall_fscore_support(
        labels, names, labels=DIGITS[::-1], zero_division=np.nan
    )
    for row, *expected in zip(results["classes"], precision, recall, f1, images, strict=True):
        got = [row["precision"], row["recall"], row["f1"], row["images"]]
        assert [np.nan if value is None else value for value in got] == pytest.approx(expected, nan_ok=True)
    assert results["macro_f1"] == pytest.approx(f1_score(labels, names, average="macro"))
    absent = [name for name in ("blank", "other") if name in names]
    assert (results["predicted_without_images"], bool(absent)) == (absent, True)
    # The file has the whole confusion matrix.
    stored = json.loads((tmp_path / "results.json").read_text())
    matrix = confusion_matrix(labels, names, labels=["blank", *DIGITS, "other"])
    order = {name: number for number, name in enumerate(["blank", *DIGITS, "other"])}
    for pair in stored["confused"]:
        assert matrix[order[pair["true"]], order[pair["predicted"]]] == pair["count"]
    assert sum(pair["count"] for pair in stored["confused"]) == matrix.sum() - np.trace(matrix)
    assert stored["images_per_second"] > 0
    said = capsys.readouterr().out
    assert re.search(r"top-5(.|\n)* macro F1 \S+ \(0 for [12] predicted class(es)? without images\)", said)
    with pytest.raises(OutputExistsError, match="already exists"):
        evaluate(model=classifier, dataset="digits", output=tmp_path / "results.json")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_an_exported_folder_is_evaluated_and_any_training_of_it_is_refused(engine, classifier, tmp_path):
    folder, model = tmp_path / "exported", PlainViTForImageClassification.from_pretrained(classifier)
    processor = PlainViTImageProcessor.from_pretrained(classifier)
    to_engine(model, folder, engine=engine, image_processor=processor)
    options = {"dataset": "digits", "views": "flip"}
    expected = evaluate(model=classifier, **options)
    results = evaluate(model=folder, **options)
    assert results["top1_accuracy"] == expected["top1_accuracy"]
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    for wrong, named in (({"mixed_precision": "bf16"}, "mixed_precision"), ({"model_hints": ["key=a"]}, "key")):
        with pytest.raises(TrainingError, match=f"exported.*: omit .*{named}"):
            evaluate(model=folder, **options, **wrong)
    training = {"model": str(folder), "dataset": "digits", "output_dir": str(tmp_path / "out")}
    starts = [
        lambda: finetune(**training),
        lambda: finetune(**training, from_scratch=True),
        lambda: finetune(**training | {"model": classifier}, teacher=folder),
        lambda: probe(**training),
        lambda: pretrain(**training, from_scratch=True),
    ]
    for start in starts:
        with pytest.raises(CheckpointError, match="was exported to an engine, and is no checkpoint"):
            start()


def test_classes_that_are_left_out_of_an_error_are_counted(tmp_path):
    save_plain_vit(tmp_path, num_labels=5, id2label=dict(enumerate("abcde")))
    with pytest.raises(DataError, match=r"of the data: 0, 1, 2, 3, 4 and 5 more\. The model's are a, b, c, d, e\. If"):
        evaluate(model=tmp_path, dataset="digits")


@pytest.mark.slow
def test_any_image_classifier_is_evaluated_and_its_classes_must_match(tmp_path):
    options = {"model": str(save_resnet(tmp_path, num_labels=10)), "dataset": "digits"}
    with pytest.raises(DataError, match="knows none of the 10 classes of the data.*--labels_by number"):
        evaluate(**options)
    results = evaluate(**options, labels_by="number")
    assert [row["name"] for row in results["classes"]] == [f"LABEL_{digit}" for digit in range(10)]
    with pytest.raises(DataError, match="no split 'validation', only train, test"):
        evaluate(**options, split="validation")
    with pytest.raises(TrainingError, match="The config of .* is complete: omit num_attention_heads"):
        evaluate(**options, model_hints=["num_attention_heads=4"])
    save_resnet(tmp_path, num_labels=3)
    with pytest.raises(DataError, match="The data has 10 classes, the model 3"):
        evaluate(**options, labels_by="number")


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["one label", "several"])
def test_labels_that_are_numbers_are_the_numbers_of_the_model_s_classes(tmp_path, several):
    """Classes keep their numbers if the split has no image of some classes."""
    problem = "multi_label_classification" if several else "single_label_classification"
    model = save_plain_vit(tmp_path / "model", num_labels=6, problem_type=problem)
    numbers, draw = [1, 4, 4, 1, 4, 1, 4], np.random.default_rng(0)
    images = [PIL.Image.fromarray(draw.integers(0, 256, (32, 24, 3), dtype=np.uint8)) for _ in numbers]
    kind = List(Value("int64")) if several else Value("int64")
    labels = [[number] for number in numbers] if several else numbers
    features = Features({"image": Image(), "label": kind})
    Dataset.from_dict({"image": images, "label": labels}, features=features).save_to_disk(tmp_path / "data")
    options = {"model": str(model), "dataset": str(tmp_path / "data")}
    results = evaluate(**options, labels_by="number")
    found = PlainViTForImageClassification.from_pretrained(model).eval()
    pixels = AutoImageProcessor.from_pretrained(model)(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        logits = found(pixels).logits
    if several:
        targets = torch.nn.functional.one_hot(torch.tensor(numbers), 6).float()
        assert results["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, targets).item(), rel=1e-5)
    else:
        right = logits.argmax(1) == torch.tensor(numbers)
        assert results["top1_accuracy"] == right.double().mean().item()
        assert results["loss"] == pytest.approx(F.cross_entropy(logits, torch.tensor(numbers)).item(), rel=1e-5)
    save_plain_vit(tmp_path / "model", num_labels=3, problem_type=problem)
    with pytest.raises(DataError, match="4"):
        evaluate(**options, labels_by="number")


def test_classes_with_names_are_matched_by_number_only_if_they_are_as_many(tmp_path):
    """An image folder only has the classes that occur in it: its fifth class may not be the model's fifth."""
    options = {"model": str(save_resnet(tmp_path / "model", num_labels=9)), "dataset": str(tmp_path / "images")}
    for name in ("deer", "frog"):
        (tmp_path / "images" / "test" / name).mkdir(parents=True)
        PIL.Image.new("RGB", (40, 40)).save(tmp_path / "images" / "test" / name / "1.png")
    with pytest.raises(DataError, match="The data has 2 classes, the model 9"):
        evaluate(**options, labels_by="number")


@pytest.mark.slow
def test_a_name_of_two_classes_is_not_matched(tmp_path):
    """ImageNet has two classes named crane, a bird and a machine."""
    names = ["crane", "cat", "crane"]
    options = {"model": str(save_plain_vit(tmp_path / "model", id2label=dict(enumerate(names))))}
    for data, classes in {"both": ["cat", "crane"], "one": ["cat"]}.items():
        features = Features({"image": Image(), "label": ClassLabel(names=classes)})
        rows = {"image": [PIL.Image.new("RGB", (8, 8))] * 2, "label": [0, len(classes) - 1]}
        Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / data)
    with pytest.raises(DataError, match="'crane' is the name of several classes of the model, 0 and 2"):
        evaluate(**options, dataset=tmp_path / "both")
    assert evaluate(**options, dataset=tmp_path / "one")["images"] == 2


def test_an_image_without_a_label_is_named(tmp_path):
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b", "c"])})
    rows = {"image": [PIL.Image.new("RGB", (8, 8))] * 3, "label": [0, None, 2]}
    Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "data")
    model = save_plain_vit(tmp_path / "model", id2label=dict(enumerate("abc")))
    with pytest.raises(DataError, match="1 of the 3 images .* have no label, the first one is at row 1"):
        evaluate(model=model, dataset=tmp_path / "data")


@pytest.mark.slow
def test_checkpoint_of_another_library_is_evaluated_head_and_all(tmp_path):
    pixels, labels = render_glyphs(340, seed=1)  # the seed of the held-out glyphs
    features = Features({"image": Image(), "label": ClassLabel(names=list(CHARACTERS))})
    images = [PIL.Image.fromarray(glyph) for glyph in pixels]
    Dataset.from_dict({"image": images, "label": labels}, features=features).save_to_disk(tmp_path / "glyphs")
    checkpoint = EXAMPLES / "checkpoints" / "glyphs_vit.pt"
    results = evaluate(
        model=checkpoint, model_hints=["num_attention_heads=4", "image_size=24", "patch_size=4"],
        dataset=tmp_path / "glyphs", labels_by="number",
    )  # fmt: skip
    assert results["images"] == 340
    assert results["top1_accuracy"] > 0.9  # 95.3% of all held-out glyphs


# Hiding patches


def test_corruption_hides_exchanges_and_leaves_the_shares_of_the_paper():
    generator = torch.Generator().manual_seed(0)
    counts = np.zeros((5, 8))
    for _ in range(200):
        predicted, hidden, seen = draw_corruption((5, 8), CORRUPTIONS["mean_color"], generator)
        exchanged = seen.view(5, 8) != torch.arange(40).view(5, 8)
        assert [int(kind.sum()) for kind in (predicted, hidden, exchanged)] == [20, 16, 2]  # half; 80% and 10% of it
        assert not (hidden & exchanged).any()
        assert not ((hidden | exchanged) & ~predicted).any()
        counts += predicted.numpy()
    assert counts.min() > 60  # every patch is predicted sometimes: 100 times on average
    assert counts.max() < 140


def test_masked_blocks_are_squares():
    corruption = Corruption(0.6, block=2)
    predicted, hidden, seen = draw_corruption((6, 8), corruption, torch.Generator().manual_seed(0))
    blocks = predicted.view(3, 2, 4, 2).permute(0, 2, 1, 3).flatten(2)
    assert set(blocks.sum(dim=-1).flatten().tolist()) == {0, 4}
    assert predicted.sum() == 4 * round(0.6 * 12)
    assert torch.equal(predicted, hidden)
    assert torch.equal(seen, torch.arange(48))
    with pytest.raises(TrainingError, match="Blocks of 2 x 2 patches do not fill the grid of 5 x 8"):
        draw_corruption((5, 8), corruption, torch.Generator())
    for grid_size, block in (((1, 1), 1), ((2, 2), 2)):
        with pytest.raises(TrainingError, match=rf"The grid of {grid_size[0]} x {grid_size[1]} patches is one block"):
            draw_corruption(grid_size, Corruption(0.6, exchanged=0.1, hidden=0.8, block=block), torch.Generator())


def test_patches_are_exchanged_whole():
    pixels = torch.arange(3 * 6 * 10.0).view(3, 6, 10)
    seen = torch.arange(9)  # patches of 2 x 3 pixels in a 3 x 3 grid, an image of width 9
    pixels = pixels[..., :9]
    assert torch.equal(rearrange_patches(pixels, (2, 3), seen), pixels)
    seen[4], seen[0] = 8, 1
    moved = rearrange_patches(pixels, (2, 3), seen)
    assert torch.equal(moved[:, 2:4, 3:6], pixels[:, 4:6, 6:9])
    assert torch.equal(moved[:, 0:2, 0:3], pixels[:, 0:2, 3:6])
    moved[:, 2:4, 3:6], moved[:, 0:2, 0:3] = pixels[:, 2:4, 3:6], pixels[:, 0:2, 0:3]
    assert torch.equal(moved, pixels)


@pytest.mark.parametrize("target", ["mean_color", "pixels"])
def test_loss_without_exchanged_patches_is_that_of_the_model(target):
    config = tiny_config(use_mask_token=True, reconstruction_target=target)
    model = randomize_(PlainViTForMaskedImageModeling(config)).eval()
    pixels, masked = torch.randn(97, 3, 24, 56), torch.rand(97, 3, 4) < 0.5
    masked[:, 0, 0] = True
    loss, right = MaskedPrediction(model)(pixels, pixels, masked, masked)
    assert loss == model(pixels, bool_masked_pos=masked).loss
    losses, rights = MaskedPrediction(model)(pixels, pixels, masked, masked, each=True)
    weights = masked.flatten(1).sum(dim=1) / masked.sum()
    torch.testing.assert_close((losses * weights).sum(), loss)
    assert rights.sum() == right
    if target == "mean_color":
        output = model(pixels, bool_masked_pos=masked)
        found = output.color_logits.argmax(dim=-1) == model.decoder.colors(pixels).flatten(1)
        assert right == found[masked.flatten(1)].sum()
        assert right < found.sum()  # some patches outside the mask are also right


def test_patches_that_are_seen_are_predicted_too_but_others_do_not_count():
    config = tiny_config(use_mask_token=True, reconstruction_target="mean_color")
    model = randomize_(PlainViTForMaskedImageModeling(config)).eval()
    pixels = torch.randn(2, 3, 24, 56)
    predicted = torch.zeros(2, 3, 4, dtype=torch.bool)
    predicted[:, 1, 2] = True
    nothing = torch.zeros_like(predicted)
    loss, _ = MaskedPrediction(model)(pixels, pixels, nothing, predicted)
    elsewhere = pixels.clone()
    elsewhere[..., :8, :14] += 1  # a different patch, whose target does not matter
    assert MaskedPrediction(model)(elsewhere, pixels, nothing, predicted)[0] == loss
    there = pixels.clone()
    there[..., 8:16, 28:42] += 1
    assert MaskedPrediction(model)(there, pixels, nothing, predicted)[0] != loss


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"ratio": 0.0}, "mask ratio is 0.0"),
        ({"ratio": 0.5, "hidden": 0.8, "exchanged": 0.3}, "with a sum of at most 1"),
        ({"ratio": 0.5, "block": 0}, "mask block is 0"),
    ],
)
def test_impossible_corruption_is_refused(fields, message):
    with pytest.raises(TrainingError, match=message):
        Corruption(**fields)


# Pre-training

# 1,437 images, 29 of them held out, in batches of 12.
SHORT = {"dataset": "digits", "steps": 6, "batch_size": 12, "evaluations": 2, "log_every": 1, "learning_rate": 1e-3}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["mean_color", "pixels"])
def test_loss_of_hidden_patches_goes_down(target, model_folder, tmp_path):
    options = {**SHORT, "steps": 60, "evaluations": 3, "target": target}
    pretrain(model=model_folder, from_scratch=True, output_dir=tmp_path / "run", **options)
    losses = [line["validation_loss"] for line in read_log(tmp_path / "run") if "validation_loss" in line]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    first = next(line["train_loss"] for line in read_log(tmp_path / "run"))
    assert losses[2] < 0.8 * first


@pytest.mark.slow
@pytest.mark.parametrize("target, masked", [("mean_color", (0.5, 0.8, 0.1)), ("pixels", (0.6, 1.0, 0.0))])
def test_the_card_of_pre_training_has_the_masking_and_the_learning_rates_it_had(target, masked, model_folder, tmp_path):
    options = {**SHORT, "target": target, "gradient_accumulation_steps": 3, "base_batch_size": 48, "from_scratch": True}
    options |= {"min_learning_rate": 1e-5, "mixed_precision": "bf16", "momentum": 0.8}
    AcceleratorState._reset_state(reset_partial_state=True)
    pretrain(model=model_folder, output_dir=tmp_path / "run", **options)
    AcceleratorState._reset_state(reset_partial_state=True)
    highest = max(line["learning_rate"] for line in read_log(tmp_path / "run") if "learning_rate" in line)
    card = (tmp_path / "run" / "README.md").read_text()
    assert highest == 1e-3 * 12 / 48
    expected = {
        **dict(zip(("mask_ratio", "hidden_share", "exchanged_share"), masked, strict=True)),
        "learning_rate": 0.001, "base_batch_size": 48, "peak_learning_rate": 0.00025, "min_learning_rate": "1e-05",
        "mixed_precision": "bf16", "gradient_accumulation_steps": 3, "betas": "0.8, 0.999", "steps": 6,
    }  # fmt: skip
    for name, value in expected.items():
        assert f"| {name} | {value} |" in card
    assert re.search(r"Pre-trained from scratch on digits \(.*\), by predicting masked patches\.", card)
    for absent in ("warmup_fraction", "plateau_factor", "cooldown_steps", "restarts | 1", "momentum"):
        assert f"| {absent}" not in card


@pytest.fixture(scope="module")
def pretrained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    pretrain(model=model_folder, output_dir=folder, **SHORT)
    return folder


@pytest.mark.slow
def test_pretrained_folder_is_fine_tuned(pretrained, model_folder, tmp_path):
    weights = weights_of(pretrained)
    card = (pretrained / "README.md").read_text()
    assert re.search(r"Pre-trained from `\w+` on digits \(.*\), by predicting masked patches\.", card)
    assert "AutoModelForMaskedImageModeling" in card
    assert "| target | mean_color |" in card
    name = "vit.layers.0.mlp.fc1.weight"
    assert not torch.equal(weights[name], weights_of(model_folder)[name])
    result = finetune(
        model=pretrained, output_dir=tmp_path / "run", dataset="digits", shots_per_class=2, steps=2,
        batch_size=10, learning_rate=0.0, weight_decay=0.0, report=False,
    )  # fmt: skip
    assert result.count == 360
    tuned = weights_of(tmp_path / "run")
    assert "vit.embeddings.mask_token" not in tuned  # several processes would wait for its gradient
    shared = {name for name in tuned if name in weights}
    assert {name for name in tuned if name not in weights} == {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(tuned[name], weights[name]) for name in shared)
    assert not (weights.keys() - tuned.keys()) - {
        "vit.embeddings.mask_token", "decoder.projection.weight", "decoder.projection.bias"
    }  # fmt: skip


@pytest.mark.slow
def test_pretraining_goes_on_from_a_pretrained_folder(pretrained, tmp_path):
    options = {**SHORT, "steps": 1, "evaluations": 1, "learning_rate": 0.0}
    pretrain(model=pretrained, output_dir=tmp_path / "second", **options)
    before, after = (weights_of(folder) for folder in (pretrained, tmp_path / "second"))
    body = [name for name in before if name.startswith("vit.")]
    assert "vit.embeddings.mask_token" in body
    assert all(torch.equal(before[name], after[name]) for name in body)


@pytest.mark.slow
def test_pretraining_refuses_bad_input_before_anything_is_written(model_folder, tmp_path):
    good = {"model": str(model_folder), "output_dir": str(tmp_path / "run"), **SHORT}
    map_pooling = save_plain_vit(tmp_path / "map", pooling="map", use_class_token=False)
    for changed, error, message in (
        ({"dataset": "./nowhere"}, DataError, "no file or folder"),
        ({"split": "training"}, DataError, "no split 'training'"),
        ({"batch_size": 13, "gradient_accumulation_steps": 2}, TrainingError, "multiple of 2"),
        ({"validation_fraction": 0.0}, TrainingError, "are 0: expected at least 1"),
        ({"mask_ratio": 1.0}, TrainingError, "mask_ratio is 1.0: expected more than 0"),
        ({"mask_block": 2}, TrainingError, "do not fill the grid of 4 x 3"),
        ({"model": str(map_pooling)}, TrainingError, "pooling 'map' has weights"),
        ({"epochs": 1.0}, TrainingError, "give one"),
        ({"resume": True}, TrainingError, "contains no run"),
        ({"report_to": "paper"}, TrainingError, "report_to"),
    ):
        with pytest.raises(error, match=message):
            pretrain(**{**good, **changed})
        assert not (tmp_path / "run").exists(), changed


@pytest.mark.slow
def test_images_without_labels_are_enough(model_folder, tmp_path):
    images = load_splits("digits")["train"]["image"][:30]
    (tmp_path / "images").mkdir()
    for number, image in enumerate(images):
        image.save(tmp_path / "images" / f"{number}.png")
    options = {**SHORT, "dataset": str(tmp_path / "images"), "validation_fraction": 0.1, "steps": 1, "evaluations": 1}
    results = pretrain(model=model_folder, output_dir=tmp_path / "run", **options)
    assert results["validation_loss"] > 0


@pytest.mark.slow
def test_image_that_cannot_be_read_is_named_by_every_script(classifier, tmp_path):
    for split in ("train", "test"):
        for number, image in enumerate(load_splits("digits")[split]["image"][:20]):
            (tmp_path / "images" / split / str(number % 10)).mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / "images" / split / str(number % 10) / f"{number}.png")
        (tmp_path / "images" / split / "4" / "14.png").write_bytes(b"no image")
    options = {"model": str(classifier), "dataset": str(tmp_path / "images")}
    with pytest.raises(DataError, match="cannot be read: .*test/4/14.png"):
        evaluate(**options)
    with pytest.raises(DataError, match="cannot be read: .*train/4/14.png"):
        pretrain(**options, output_dir=tmp_path / "run", epochs=1.0, batch_size=2, validation_fraction=0.1)
    # The image is the first of its class, which is read before training.
    with pytest.raises(DataError, match="cannot be read: .*test/4/14.png"):
        finetune(**options, output_dir=tmp_path / "tuned", steps=1)
