"""Model cards of generated models: what they say of model and image processor is what these do."""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModel,
    CLIPImageProcessor,
    SiglipImageProcessor,
    ViTImageProcessor,
    pipeline,
)

from plain_vit import (
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTImageProcessor,
    PlainViTModel,
)
from plain_vit.hub.card import ModelFacts, card_text
from tests.sizes import draws
from tests.tiny import tiny_config

FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers


def section(card: str, title: str) -> str:
    return card.partition(f"## {title}\n\n")[2].partition("\n\n## ")[0]


def generated_settings(draw: random.Random, channels: int) -> dict[str, Any]:
    """Return settings of an image processor, some of them missing."""
    unit = 24 * draw.randint(1, 2)
    down, across = draw.choice([(1, 1), (1, 2), (2, 1), (3, 2)])
    size: dict[str, int] = draw.choice(
        [
            {"height": unit, "width": unit},
            {"height": unit, "width": 2 * unit},
            {"shortest_edge": unit * min(down, across)},
            {"shortest_edge": unit * min(down, across), "longest_edge": draw.choice([1, 2]) * unit * min(down, across)},
            {"max_height": 2 * unit * down, "max_width": unit * across},
        ]
    )
    settings: dict[str, Any] = {
        "size": size,
        "resample": draw.randrange(len(FILTERS)),
        "do_resize": draw.random() < 0.9,
        "do_convert_rgb": True,
        "do_rescale": draw.random() < 0.9,
        "rescale_factor": draw.choice([1 / 255, 1 / 127.5, 0.5]),
        "do_normalize": draw.random() < 0.9,
        "image_mean": [draw.choice([0.5, 0.48145466, 0.0]) for _ in range(channels)],
        "image_std": [draw.choice([0.5, 0.26862954, 1.0]) for _ in range(channels)],
    }
    if draw.random() < 0.5:
        crop = 4 * draw.randint(1, 30)
        settings |= {"do_center_crop": True, "crop_size": {"height": crop, "width": draw.choice([crop, 24])}}
    elif draw.random() < 0.2:
        settings |= {"do_pad": True, "pad_size": {"height": 512, "width": 512}}
    if set(size) == {"height", "width"} and draw.random() < 0.5:
        settings["resize_mode"] = draw.choice(["cover", "contain"])
    if draw.random() < 0.3:
        settings["pad_color"] = [draw.choice([0, 128, 255]) for _ in range(channels)]
    missing = {"resample", "do_resize", "do_convert_rgb", "do_rescale", "rescale_factor", "do_normalize", "resize_mode"}
    for name in sorted(missing & settings.keys()):
        if draw.random() < 0.15:
            del settings[name]
    return settings


def written_processor(folder: Path, kind: type, settings: Mapping[str, Any]) -> None:
    """Write the settings as given, with nothing added, as old files and files edited by hand are."""
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "image_processor_type": kind.__name__}))


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("seed", range(draws(4, nightly=12)))
def test_the_card_names_the_settings_that_the_image_processor_uses(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for number in range(25):
        kind = draw.choice([PlainViTImageProcessor] * 3 + [ViTImageProcessor, CLIPImageProcessor, SiglipImageProcessor])
        channels = draw.choice([1, 3]) if kind is PlainViTImageProcessor else 3
        settings = generated_settings(draw, channels)
        folder = tmp_path / str(number)
        PlainViTModel(tiny_config(num_channels=channels)).save_pretrained(folder)
        written_processor(folder, kind, settings)
        words = section(card_text(folder, ModelFacts()), "Preprocessing")
        processor: Any = AutoImageProcessor.from_pretrained(folder)
        assert words.startswith(f"Images are prepared by `{kind.__name__}`"), words
        named = dict(one.split(" = ", 1) for one in re.findall("`([^`]* = [^`]*)`", words))
        used = {
            "size": processor.do_resize and dict(processor.size),
            "resample": processor.do_resize and FILTERS[int(processor.resample)],
            "crop_size": processor.do_center_crop and dict(processor.crop_size),
            "rescale_factor": processor.do_rescale and processor.rescale_factor,
            "image_mean": processor.do_normalize and list(processor.image_mean),
            "image_std": processor.do_normalize and list(processor.image_std),
        }
        for name, value in used.items():
            found = named.get(name, "").replace("(", "[").replace(",)", "]").replace(")", "]")
            assert found == (str(value) if value else ""), (name, settings, words)


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("seed", range(draws(3, nightly=6)))
def test_the_words_about_the_model_are_what_it_returns(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for number in range(4):
        count, problem = draw.choice([1, 2, 5]), draw.choice([None, "regression", "multi_label_classification"])
        channels, pooling = draw.choice([1, 3]), draw.choice(["cls", "mean", "none"])
        kind = draw.choice([PlainViTForImageClassification, PlainViTModel, PlainViTForMaskedImageModeling])
        if kind is PlainViTForImageClassification and pooling == "none":
            pooling = "cls"
        config = tiny_config(
            num_channels=channels, pooling=pooling, num_labels=count, problem_type=problem, use_mask_token=True
        )
        folder = tmp_path / f"{number}"
        torch.manual_seed(seed)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():  # so that no score looks like a probability by chance
                parameter.add_(torch.randn_like(parameter))
        model.save_pretrained(folder)
        PlainViTImageProcessor(
            size={"height": 24, "width": 56}, image_mean=[0.5] * channels, image_std=[0.5] * channels
        ).save_pretrained(folder)
        card = card_text(folder, ModelFacts())
        assert ("in 1 channel" in card) == (channels == 1)
        assert ("`AutoModelForMaskedImageModeling`" in card) == (kind is PlainViTForMaskedImageModeling)
        image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 60, 3), dtype=np.uint8))
        if kind is PlainViTForImageClassification:
            scores = [row["score"] for row in pipeline("image-classification", str(folder))(image, top_k=count)]
            are_probabilities = all(0 <= score <= 1 for score in scores)
            if count > 1 and are_probabilities and abs(sum(scores) - 1) < 1e-5:
                limit, what = f"Every image gets one of the {count} labels", f"It has {count} labels"
            elif are_probabilities:
                limit, what = "Each label is scored on its own", f"It has {count} label"
            else:
                limit, what = "Every image gets its numbers", f"It returns {count} number"
            ways = "Every image gets one", "Each label is", "Every image gets its"
            assert [words for words in ways if words in card] == [words for words in ways if limit.startswith(words)]
            assert limit in card
            assert what in card
        else:
            inputs = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")
            pooled = AutoModel.from_pretrained(folder)(**inputs).pooler_output
            assert ("it returns one vector per image and one per patch" in card) == (pooled.ndim == 2)
            assert ("it returns one vector per patch" in card) == (pooled.ndim == 3)


def test_a_processor_of_another_kind_is_named(tmp_path: Path) -> None:
    PlainViTModel(tiny_config()).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 24}, "crop_pct": 0.9})
    )
    assert section(card_text(tmp_path, ModelFacts()), "Preprocessing") == (
        "Images are prepared by `ConvNextImageProcessor`, the image processor in this repository, with "
        "`size = {'shortest_edge': 24}`, `resample = bicubic`, `rescale_factor = 0.00392156862745098`, "
        "`image_mean = (0.5, 0.5, 0.5)`, `image_std = (0.5, 0.5, 0.5)`."
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "OfMyOwn", "size": "large"}))
    assert section(card_text(tmp_path, ModelFacts()), "Preprocessing") == (
        "Images are prepared by `OfMyOwn`, the image processor in this repository."
    )


def test_the_words_about_patches_are_the_limit_of_the_image_processor(tmp_path: Path) -> None:
    PlainViTModel(tiny_config(image_size=56, patch_size=14)).save_pretrained(tmp_path)
    PlainViTImageProcessor(patch_size=14, max_num_patches=20).save_pretrained(tmp_path)
    words = section(card_text(tmp_path, ModelFacts()), "Preprocessing")
    assert "`max_num_patches = 20`" in words
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    for sides in ((50, 70), (300, 20), (20, 300)):
        shapes = processor(Image.new("RGB", sides), return_tensors="pt")["spatial_shapes"]
        assert 0 < shapes.prod() <= 20
