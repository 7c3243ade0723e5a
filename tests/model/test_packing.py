"""Packing of images into batches of limited numbers of tokens."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.packing import greedy_packs, pack, unpad
from tests.conftest import randomize_
from tests.tiny import difference, tiny_config


def test_every_image_is_in_one_batch_and_no_batch_has_too_many_tokens() -> None:
    draw = random.Random(0)
    for _ in range(50):
        most = draw.randint(5, 60)
        lengths = [draw.randint(1, most) for _ in range(draw.randint(0, 40))]
        packs = greedy_packs(lengths, most)
        assert sorted(index for one in packs for index in one) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in one) <= most for one in packs)
        # Two half-empty batches would fit into one.
        assert sum(2 * sum(lengths[index] for index in one) <= most for one in packs) <= 1


def test_an_image_longer_than_a_batch_is_refused() -> None:
    for lengths in ([3, 9], [3, 0]):
        with pytest.raises(ValueError, match="image 1 has"):
            greedy_packs(lengths, 8)


def photos(count: int) -> list[Image.Image]:
    """Return images of many sizes."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(10, 90, (count, 2))
    return [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def test_packed_batches_of_a_loader_give_each_image_the_logits_that_it_gets_padded() -> None:
    processor = PlainViTImageProcessor(patch_size=14, max_num_patches=20)
    model = randomize_(PlainViTForImageClassification(tiny_config(patch_size=14, image_size=56))).eval()
    padded = processor(photos(9), return_tensors="pt")
    expected = model(**padded).logits
    images = [{**image, "labels": index} for index, image in enumerate(unpad(padded))]
    batches = greedy_packs([len(image["pixel_values"]) for image in images], most=45)
    seen = []
    for batch in DataLoader(images, batch_sampler=batches, collate_fn=pack):
        assert len(batch["pixel_values"]) <= 45
        rows = batch.pop("labels")
        seen += rows.tolist()
        assert difference(model(**batch).logits, expected[rows]) <= 1e-5
    assert sorted(seen) == list(range(9))


def test_images_with_different_entries_are_refused() -> None:
    image = {"pixel_values": torch.zeros(4, 3), "spatial_shapes": torch.tensor([2, 2])}
    for images in ([], [image, {**image, "labels": 1}]):
        with pytest.raises(ValueError, match="all with the same entries"):
            pack(images)


@pytest.mark.slow
def test_transformers_trainer_learns_from_packed_images_of_many_sizes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    draw = np.random.default_rng(1)
    dark, light = ([Image.fromarray(draw.integers(low, low + 100, (*draw.integers(14, 60, 2), 3), dtype=np.uint8))
                    for _ in range(16)] for low in (0, 150))  # fmt: skip
    processor = PlainViTImageProcessor(patch_size=14, max_num_patches=12)
    images = unpad(processor([*dark, *light], return_tensors="pt"))
    data = [{**image, "labels": index // 16} for index, image in enumerate(images)]
    model = PlainViTForImageClassification(tiny_config(patch_size=14, image_size=56, num_labels=2))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=20, per_device_train_batch_size=8, learning_rate=2e-3, report_to=[], use_cpu=True,
        seed=0, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=pack)
    trainer.train()
    found = model.eval()(**{name: value for name, value in pack(data).items() if name != "labels"}).logits.argmax(-1)
    assert (found == torch.tensor([image["labels"] for image in data])).all()
