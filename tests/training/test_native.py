"""Fine-tuning that keeps the aspect ratio of images: packed patches in training, the processor's in evaluations."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from timm.data.naflex_transforms import RandomResizedCropToSequence
from torchvision.transforms import InterpolationMode
from transformers import AutoImageProcessor, AutoModelForImageClassification, PixtralImageProcessor

from plain_vit import PlainViTImageProcessor
from plain_vit.analysis import attention_maps
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import TrainingError
from plain_vit.inference.columns import features_of
from plain_vit.packing import pack, unpad
from plain_vit.training.arguments import ClassifierOptions
from plain_vit.training.data import load_splits
from plain_vit.training.data.augmentation import RelativeCrop, training_transform
from plain_vit.training.data.inputs import PackedImages, images_in
from plain_vit.training.models import with_native_aspect_ratio
from plain_vit.training.reports import show_batch as show_batch_module
from plain_vit.training.tasks import classification
from tests.sources.transformers_models import tiny_transformers
from tests.training.runs import (
    evaluate,
    finetune,
    predict,
    pretrain,
    runs_in,
    save_mixed_sizes,
    save_stock_vit,
    small_vit,
)

# 42 images in batches of 8.
SHORT = {
    "steps": 7, "batch_size": 8, "evaluations": 2, "log_every": 1, "report": False, "checkpoints_kept": 0,
    "native_aspect_ratio": True, "max_num_patches": 21, "crop_scale": 0.4, "horizontal_flip": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_mixed_sizes(tmp_path_factory.mktemp("mixed") / "data"))


@pytest.fixture
def run(model_folder: Path, data: str, tmp_path: Path) -> Any:
    """Return a function that does a short run and returns its folder."""
    return runs_in(tmp_path, model=model_folder, dataset=data, **SHORT)


def photo(height: int, width: int, seed: int = 0) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


# Runs


@pytest.fixture(scope="module")
def folder(model_folder: Path, data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    place = tmp_path_factory.mktemp("trained") / "run"
    options = {**SHORT, "model": str(model_folder), "dataset": data, "report": True, "eval_batch_size": 13}
    finetune(**options, output_dir=place)
    return place


def test_saved_folder_gives_the_numbers_of_the_evaluation(folder, data, tmp_path):
    results = json.loads((folder / "results.json").read_text())
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    test = load_splits(data)["test"]
    inputs = processor(test["image"][:], return_tensors="pt")
    assert processor.max_num_patches == 21
    assert len(set(map(tuple, inputs["spatial_shapes"].tolist()))) > 5
    labels = torch.tensor(test["label"][:])
    with torch.no_grad():
        logits = model(**inputs).logits
    assert results["test_accuracy"] == (logits.argmax(dim=-1) == labels).float().mean().item()
    assert results["test_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-6)
    assert "max_num_patches = 21" in (folder / "README.md").read_text()
    assert "at most 21 patches of 8 x 8 pixels" in (folder / "report/index.html").read_text()
    assert "for images of many sizes" in (folder / "README.md").read_text()
    assert "must be multiples" not in (folder / "README.md").read_text()
    again = evaluate(model=folder, dataset=data, batch_size=13)
    assert again["top1_accuracy"] == results["test_accuracy"]
    assert again["loss"] == results["test_loss"]
    with pytest.raises(TrainingError, match="keeps the aspect ratio of images, within 21 patches"):
        evaluate(model=folder, dataset=data, views="flip")
    predict(model=folder, dataset=data, split="test", output_dir=tmp_path / "shards")


def test_number_of_patches_is_that_of_the_processor_or_else_of_the_image_size(folder):
    square, trained = PlainViTImageProcessor(image_mean=(0.1, 0.2, 0.3)), AutoImageProcessor.from_pretrained(folder)
    model = small_vit()  # 3 x 2 patches
    for processor, given, most in ((square, None, 6), (square, 15, 15), (trained, None, 21), (trained, 15, 15)):
        native = with_native_aspect_ratio(processor, model, given)
        assert (native.max_num_patches, native.patch_size) == (most, 8)
        assert native.image_mean == processor.image_mean


def test_model_of_many_sizes_is_not_trained_as_if_they_were_one(run, folder, tmp_path):
    with pytest.raises(TrainingError, match="add --native_aspect_ratio"):
        run("refused", model=str(folder), native_aspect_ratio=False, max_num_patches=None)
    options = {"model": str(folder), "dataset": "digits", "output_dir": str(tmp_path / "pretrained"), "steps": 1}
    with pytest.raises(TrainingError, match="needs images of one size"):
        pretrain(**options)


@pytest.mark.slow
def test_first_batch_is_drawn_as_the_model_gets_it(run, tmp_path, monkeypatch):
    seen: dict[str, Any] = {}
    drawn = show_batch_module.plot_training_batch

    def record(images: list[np.ndarray], shares: np.ndarray, names: list[str]) -> Any:
        seen["images"] = images
        return drawn(images, shares, names)

    monkeypatch.setattr(show_batch_module, "plot_training_batch", record)
    with pytest.raises(SystemExit):
        run("dry", dry_run=True, show_batch=str(tmp_path / "batch.png"), augmentation="randaugment")
    given = []
    learnt = classification.Classification.loss

    def watch(task: Any, model: Any, batch: Any) -> Any:
        given.append(task.inputs(batch)[0])
        return learnt(task, model, batch)

    monkeypatch.setattr(classification.Classification, "loss", watch)
    run("trained", augmentation="randaugment", steps=1, evaluations=1)
    assert given[0]["pixel_values"].shape == (given[0]["spatial_shapes"].prod(dim=1).sum(), 8 * 8 * 3)
    images = images_in(given[0], PlainViTImageProcessor(patch_size=8, max_num_patches=21))
    assert len({image.shape for image in images}) > 1
    for image, shown in zip(images, seen["images"], strict=True):
        assert np.allclose(shown, (image / 2 + 0.5).permute(1, 2, 0).numpy(), atol=1e-6)


@pytest.mark.slow
def test_several_labels_are_learnt_and_micro_batches_that_fit_are_found(run, data, tmp_path):
    splits = load_splits(data)
    for name, rows in splits.items():
        labels = [[number, (number + 1) % 3] for number in rows["label"][:]]
        splits[name] = rows.remove_columns("label").add_column("labels", labels)
    splits.save_to_disk(tmp_path / "labels")
    folder = run("vectors", dataset=str(tmp_path / "labels"), problem_type="multi_label_classification",
                 auto_micro_batch=True)  # fmt: skip
    assert json.loads((folder / "results.json").read_text())["images_evaluated"] == 31


# Errors


GIVEN = {
    "mixup": 0.1, "cutmix": 1.0, "teacher": "x", "image_size": [32], "test_size": [32], "initial_image_size": 16,
    "test_crop": 0.9, "resize_to": 64, "crop_padding": 2, "compile": True,
}  # fmt: skip


def test_options_for_images_of_one_size_are_refused(run):
    rules = {each.name: each.metadata["help"].excludes for each in dataclasses.fields(ClassifierOptions)}
    assert GIVEN.keys() == {name for name, excludes in rules.items() if "native_aspect_ratio" in excludes}
    for name, value in GIVEN.items():
        with pytest.raises(TrainingError, match=f"many sizes, and {name} .*: omit it"):
            run("refused", **{"crop_scale": 1.0, name: value})
    with pytest.raises(TrainingError, match="Without native_aspect_ratio, max_num_patches has no effect"):
        run("refused", native_aspect_ratio=False)
    with pytest.raises(TrainingError, match="max_num_patches is 0: expected 1 or more"):
        run("refused", max_num_patches=0)


MODELS = {
    "a distillation token": {"use_distillation_token": True},
    "register_tokens_last": {"num_register_tokens": 2, "register_tokens_last": True},
    "relative position bias": {"relative_position_bias": {"type": "table"}},
    "8 x 4 pixels": {"patch_size": (8, 4)},
    "patch_dropout_prob": {"patch_dropout_prob": 0.2},
    "the positions of other places": {"position_resampling": "truncate"},
    "cannot grow a table": {"position_resampling": "truncate", "position_embedding_type": "factorized"},
}


def test_models_for_images_of_one_size_are_refused(run, tmp_path):
    for reason, fields in MODELS.items():
        with pytest.raises(TrainingError, match=f"--native_aspect_ratio[:,] .*{reason}"):
            with_native_aspect_ratio(PlainViTImageProcessor(), small_vit(**fields), 30)
    folder = save_stock_vit(tmp_path / "stock")
    with pytest.raises(TrainingError, match="ViTForImageClassification takes images of one size"):
        run("refused", model=str(folder))


# Pixels


@pytest.mark.parametrize("most", [1, 7, 64])
def test_whole_images_are_trained_on_in_the_size_that_they_are_evaluated_in(most):
    processor = PlainViTImageProcessor(patch_size=8, max_num_patches=most, image_mean=(0.2, 0.5, 0.7))
    transform = training_transform(processor)
    draw = np.random.default_rng(0)
    for seed, (height, width) in enumerate([(1, 1), (1, 300), (400, 3), *draw.integers(1, 200, (30, 2)).tolist()]):
        image = photo(height, width, seed)
        evaluated = processor([image], return_tensors="pt")
        trained = transform(image)
        h, w = evaluated["spatial_shapes"][0].tolist()
        assert trained.shape == (3, 8 * h, 8 * w)
        (expected,) = images_in(evaluated, processor)
        assert (trained - expected).abs().max() <= 4 / 255 / 0.5  # torch's resize, not Pillow's


def test_packed_training_images_are_normalised_as_the_processor_does():
    processor = PlainViTImageProcessor(patch_size=8, max_num_patches=60, image_mean=(0.2, 0.5, 0.7), do_resize=False)
    transform = training_transform(processor)
    images = [photo(16, 40), photo(24, 8, 1), photo(48, 72, 2)]
    levels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    examples = [{"pixel_values": level, "labels": place, "broken": ""} for place, level in enumerate(levels)]
    batch = PackedImages(8)(examples)
    assert batch["pixel_values"].dtype == torch.uint8
    assert batch["broken"] == ["", "", ""]
    assert batch["labels"].tolist() == [0, 1, 2]
    expected = pack(unpad(processor(images, return_tensors="pt")))
    assert torch.equal(batch["spatial_shapes"], expected["spatial_shapes"])
    normalized = transform.normalize_batch(batch["pixel_values"])
    assert (normalized - expected["pixel_values"]).abs().max() <= 1e-6
    for inputs in (processor(images, return_tensors="pt"), expected):
        for image, seen in zip(levels, images_in(inputs, processor), strict=True):
            assert (transform.normalize(image) - seen).abs().max() <= 1e-6


def test_crops_are_distributed_as_timms_for_naflex():
    crop, image = RelativeCrop(0.2), torch.empty(3, 90, 333, device="meta")
    torch.manual_seed(0)
    ours = [crop.make_params([image]) for _ in range(2000)]
    drawn = [RandomResizedCropToSequence.get_params(image, (0.2, 1), (3 / 4, 4 / 3), patch_h=8, patch_w=8,
                                                    max_seq_len=9, interpolation=InterpolationMode.BILINEAR)[0]
             for _ in range(500)]  # fmt: skip
    theirs = [dict(zip(("top", "left", "height", "width"), part, strict=True)) for part in drawn]
    for name, side in (("top", 90), ("left", 333), ("height", 90), ("width", 333)):
        one, other = (np.array([part[name] for part in parts]) / side for parts in (ours, theirs))
        assert abs(one.mean() - other.mean()) < 0.04, name
        assert abs(one.std() - other.std()) < 0.03, name


def test_crops_are_within_the_image_and_have_about_its_aspect_ratio():
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    for height, width in [(1, 1), (1, 500), (3, 2), *draw.integers(200, 900, (300, 2)).tolist()]:
        part = RelativeCrop(0.08).make_params([torch.empty(3, height, width, device="meta")])
        assert min(part["top"], part["left"]) >= 0
        assert 1 <= part["height"] <= height - part["top"]
        assert 1 <= part["width"] <= width - part["left"]
        if min(height, width) >= 200:
            stretched = (part["width"] / width) / (part["height"] / height)
            assert 3 / 4 * 0.96 <= stretched <= 4 / 3 * 1.04
            assert part["width"] * part["height"] / (width * height) >= 0.08 * 0.95


@pytest.mark.slow
def test_tower_of_pixtral_is_trained_on_images_of_many_sizes_and_looked_at(data, tmp_path):
    source = tmp_path / "pixtral"
    tiny_transformers("PixtralVisionModel").save_pretrained(source)
    sides = {"size": {"longest_edge": 60}, "patch_size": {"height": 14, "width": 14}}
    PixtralImageProcessor(**sides).save_pretrained(source)
    run = runs_in(tmp_path, model=str(source), dataset=data, **SHORT)
    with pytest.raises(TrainingError, match="keeps the aspect ratio of images: add --native_aspect_ratio"):
        run("refused", native_aspect_ratio=False, max_num_patches=None)
    folder = run("run")
    processor = AutoImageProcessor.from_pretrained(folder)
    assert processor.image_mean == pytest.approx(PixtralImageProcessor.image_mean)
    results = json.loads((folder / "results.json").read_text())
    assert evaluate(model=folder, dataset=data, batch_size=13)["top1_accuracy"] == results["test_accuracy"]
    converted = from_checkpoint(source)
    prepare: Any = converted.image_processor
    test = load_splits(data)["test"]["image"][:]
    with pytest.raises(TrainingError, match="only pooled features"):
        features_of(converted.model, prepare(test, return_tensors="pt"), kind="mean", layers=())
    inputs = prepare(test, return_tensors="pt")
    features = features_of(converted.model, inputs, kind="pooled", layers=())["feature"]
    for number in (0, 1):
        inputs = prepare(test[number], return_tensors="pt")
        alone = features_of(converted.model, inputs, kind="pooled", layers=())["feature"][0]
        assert torch.allclose(features[number], alone, rtol=0, atol=1e-5 * alone.abs().max().item())
        height, width = inputs["image_sizes"][0].tolist()
        assert attention_maps(converted.model, inputs).shape == (1, 3, 5, height // 14, width // 14)
