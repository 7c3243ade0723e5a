"""A student learns the features that stock transformers gives, of the same crop of each image."""

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset, Image
from transformers import (
    AutoModel,
    BitImageProcessor,
    Dinov2Config,
    Dinov2Model,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from plain_vit import PlainViTImageProcessor, PlainViTModel
from plain_vit.errors import TrainingError
from plain_vit.training.arguments import PretrainArguments, check_options
from plain_vit.training.tasks.unlabelled import UnlabelledImages
from tests.conftest import randomize_
from tests.training.runs import SMALL, open_script, pretrain, save_plain_vit, weights_of


def save_dinov2(folder: Path) -> Any:
    """Save a teacher with 5 x 5 patches, which crops the centre of images, and return it with its image processor."""
    model = randomize_(
        Dinov2Model(
            Dinov2Config(
                hidden_size=12, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=35, patch_size=7
            )
        )
    )
    processor = BitImageProcessor(size={"shortest_edge": 41}, crop_size={"height": 35, "width": 35})
    model.save_pretrained(folder), processor.save_pretrained(folder)
    return model.eval(), processor


def save_siglip(folder: Path) -> Any:
    """Save a teacher without a class token, which stretches images."""
    config = SiglipVisionConfig(**SMALL, image_size=36, patch_size=9)
    model = randomize_(SiglipVisionModel(config))
    processor = SiglipImageProcessor(size={"height": 36, "width": 36})
    model.save_pretrained(folder), processor.save_pretrained(folder)
    return model.eval(), processor


def task_of(folder: Path, **options: Any) -> Any:
    """Return the task of a run with a student of 3 x 3 patches."""
    script = open_script("pretrain")
    student = save_plain_vit(folder / "student", image_size=24, use_class_token=True)
    levels = {"image_mean": [0.2, 0.4, 0.3], "image_std": [0.3, 0.2, 0.6]}
    PlainViTImageProcessor(size={"height": 24, "width": 24}, **levels).save_pretrained(student)
    arguments = PretrainArguments(
        model=str(student), dataset="digits", output_dir="run", method="distillation", teacher=str(folder / "teacher"),
        **options,
    )  # fmt: skip
    return script.METHODS["distillation"](arguments, script.open_encoder(arguments))


def images(count: int = 3) -> list[PIL.Image.Image]:
    """Return smooth images of 60 x 90 pixels."""
    draw = np.random.default_rng(0)
    small = draw.integers(0, 256, (count, 4, 6, 3), dtype=np.uint8)
    return [PIL.Image.fromarray(levels).resize((90, 60), PIL.Image.Resampling.BICUBIC) for levels in small]


@pytest.mark.parametrize("save", [save_dinov2, save_siglip])
def test_loss_is_that_of_features_of_the_teacher_in_transformers(save, tmp_path):
    teacher, processor = save(tmp_path / "teacher")
    task, pictures = task_of(tmp_path), images()
    split = Dataset.from_dict({"image": pictures}).cast_column("image", Image())
    examples = UnlabelledImages(split, task.transforms(scaled=False), task.targets, 0, epoch=7)
    batch = {name: torch.stack([examples[row][name] for row in range(3)]) for name in examples[0]}
    theirs = processor(pictures, return_tensors="pt").pixel_values
    torch.testing.assert_close(batch["teacher_pixels"], theirs, rtol=0, atol=1e-5)

    output = teacher(theirs)
    tokens = output.last_hidden_state[:, 1:] if save is save_dinov2 else output.last_hidden_state
    side = int(tokens.shape[1] ** 0.5)
    maps = tokens.transpose(1, 2).unflatten(2, (side, side))
    maps = F.interpolate(maps, (3, 3), mode="bilinear", antialias=True)
    expected = torch.zeros(())
    own = task.module.model(batch["pixel_values"])
    for found, wanted, projection in (
        (own.last_hidden_state[:, 1:], maps.flatten(2).transpose(1, 2), task.module.patches),
        (own.pooler_output, output.pooler_output, task.module.pooled),
    ):
        mean, variance = wanted.mean(-1, keepdim=True), wanted.var(-1, keepdim=True, unbiased=False)
        difference = (projection(found) - (wanted - mean) / (variance + 1e-5).sqrt()).abs()
        expected += torch.where(difference < 2, difference**2 / 4, difference - 1).mean()  # beta is 2
    loss, _ = task.module(**task.complete(batch))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    each, _ = task.module(**task.complete(batch), each=True)
    torch.testing.assert_close(each.mean(), loss)


@pytest.mark.parametrize("options", [{}, {"crop_scale": 0.2, "horizontal_flip": 0.5}])
def test_student_and_teacher_see_the_same_crop(options, tmp_path):
    save_dinov2(tmp_path / "teacher")
    task = task_of(tmp_path)
    split = Dataset.from_dict({"image": images()}).cast_column("image", Image())
    examples = UnlabelledImages(split, task.transforms(**options), task.targets, 0)
    for place in ((epoch, row) for epoch in range(3) for row in range(3)):
        example = examples[place]
        levels = {
            name: example[name] * torch.tensor(one.image_std)[:, None, None]
            + torch.tensor(one.image_mean)[:, None, None]
            for name, one in (("pixel_values", task.image_processor), ("teacher_pixels", task.teacher_processor))
        }
        smaller = F.interpolate(levels["teacher_pixels"][None], (24, 24), mode="bilinear", antialias=True)[0]
        assert (smaller - levels["pixel_values"]).abs().mean() < 0.01


@pytest.mark.slow
def test_student_is_saved_without_projections(tmp_path):
    save_siglip(tmp_path / "teacher")
    student = save_plain_vit(tmp_path / "student", image_size=24, pooling="map", use_class_token=False)
    options = {"dataset": "digits", "steps": 2, "batch_size": 6, "validation_fraction": 0.01, "evaluations": 1}
    results = pretrain(
        model=student, output_dir=tmp_path / "run", method="distillation", teacher=tmp_path / "teacher", **options
    )
    assert results["validation_loss"] > 0
    vit, weights = AutoModel.from_pretrained(tmp_path / "run"), weights_of(tmp_path / "run")
    assert isinstance(vit, PlainViTModel)
    assert vit.state_dict().keys() == weights.keys()
    assert not torch.equal(weights["pooler.probe"], weights_of(student)["vit.pooler.probe"])  # it is trained too
    card = (tmp_path / "run" / "README.md").read_text()
    assert "by learning the features of a teacher." in card
    assert "| teacher | teacher |" in card


def test_teacher_is_required_and_only_for_distillation(tmp_path):
    options = {"model": "vit-tiny-patch16-32", "dataset": "digits", "output_dir": "run"}
    with pytest.raises(TrainingError, match="needs a model to learn from"):
        pretrain(**options, method="distillation")
    with pytest.raises(TrainingError, match="With the method mae, teacher has no effect"):
        check_options(PretrainArguments(**options, method="mae", teacher="glyphs"))
    with pytest.raises(TrainingError, match="With the method distillation, mask_ratio has no effect"):
        check_options(PretrainArguments(**options, method="distillation", teacher="glyphs", mask_ratio=0.3))
