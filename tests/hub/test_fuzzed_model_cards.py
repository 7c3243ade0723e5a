"""Model cards of generated models: following their text by hand gives the results of model and image processor."""

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

FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
MODES = {"grayscale": "L", "RGB": "RGB"}
EXTENT = r"(\d+) x (\d+) pixels"


def section(card: str, title: str) -> str:
    return card.partition(f"## {title}\n\n")[2].partition("\n\n## ")[0]


def followed(words: str, image: Image.Image) -> np.ndarray:
    """Do with an image what the section "Preprocessing" says, and nothing else: (C, H, W).

    Sides are chosen by the caller such that nothing has to be rounded.
    """
    assert words.endswith(" The image processor in this repository applies these steps."), words
    words = words.removesuffix(" The image processor in this repository applies these steps.")
    pixels: np.ndarray | None = None
    black: list[float] = []
    for sentence in re.split(r"(?<=\.) (?=[A-Z])", words):
        if found := re.fullmatch(r"Images are converted to (\w+)\.", sentence):
            image = image.convert(MODES[found[1]])
            continue
        if found := re.fullmatch(r"(?:They|Images) are resized to (.*) \((\w+)\)\.", sentence):
            sides = resized(found[1], *image.size)
            image = image.resize(sides, FILTERS[found[2]])
            continue
        if pixels is None:
            pixels = levels_of(image)
        if found := re.fullmatch(
            rf"(?:They|Images) are center-cropped to {EXTENT}; the area beyond a smaller image is (black|\(.*\))\.",
            sentence,
        ):
            black = [0.0] if found[3] == "black" else [float(level) for level in found[3].strip("()").split(", ")]
            pixels = cropped(pixels, int(found[1]), int(found[2]), black)
        elif sentence == "Values are rescaled from [0, 255] to [0, 1].":
            pixels = pixels / 255
        elif found := re.fullmatch(r"Values are multiplied by (.*)\.", sentence):
            pixels = pixels * float(found[1])
        elif found := re.fullmatch(
            r"Each channel is normalized with mean \((.*)\) and standard deviation \((.*)\)\.", sentence
        ):
            mean, std = (np.array([float(value) for value in listed.split(", ")]) for listed in found.groups())
            pixels = (pixels - mean[:, None, None]) / std[:, None, None]
        elif found := re.fullmatch(rf"(?:They|Images) are padded with zeros .* right to {EXTENT}\.", sentence):
            height, width = int(found[1]), int(found[2])
            pixels = np.pad(pixels, ((0, 0), (0, height - pixels.shape[1]), (0, width - pixels.shape[2])))
        else:
            raise AssertionError(f"unknown words: {sentence}")
    return levels_of(image) if pixels is None else pixels


def levels_of(image: Image.Image) -> np.ndarray:
    """Return the levels of an image as it is: (C, H, W)."""
    levels = np.asarray(image)
    return (levels[None] if levels.ndim == 2 else levels.transpose(2, 0, 1)).astype(np.float64)


def resized(words: str, width: int, height: int) -> tuple[int, int]:
    """Return (width, height) after the resize that these words describe."""
    if found := re.fullmatch(EXTENT, words):
        return int(found[2]), int(found[1])
    if found := re.fullmatch(rf"(cover|fit into) {EXTENT}, aspect ratio kept", words):
        ratios = int(found[2]) / height, int(found[3]) / width
        ratio = max(ratios) if found[1] == "cover" else min(ratios)
    elif found := re.fullmatch(rf"at most {EXTENT}, aspect ratio kept", words):
        ratio = min(int(found[1]) / height, int(found[2]) / width)
    elif found := re.fullmatch(r"(\d+) pixels along the shortest edge", words):
        ratio = int(found[1]) / min(height, width)
    elif found := re.fullmatch(
        r"(\d+) pixels along the shortest edge, or less where the longest edge would exceed (\d+) pixels", words
    ):
        ratio = min(int(found[1]) / min(height, width), int(found[2]) / max(height, width))
    else:
        raise AssertionError(f"unknown words: {words}")
    return round(width * ratio), round(height * ratio)


def cropped(pixels: np.ndarray, height: int, width: int, fill: list[float]) -> np.ndarray:
    """Crop (C, H, W) at the centre; both margins are even."""
    canvas = np.empty((len(pixels), height, width))
    canvas[:] = np.broadcast_to(np.array(fill), (len(pixels),))[:, None, None]
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    rows = slice(max(top, 0), max(top, 0) + min(height, pixels.shape[1]))
    columns = slice(max(left, 0), max(left, 0) + min(width, pixels.shape[2]))
    part = pixels[:, rows, columns]
    canvas[:, max(-top, 0) :, max(-left, 0) :][:, : part.shape[1], : part.shape[2]] = part
    return canvas


def generated_settings(draw: random.Random, channels: int) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return settings of an image processor, some of them missing, and (width, height) of an image without rounding."""
    unit = 24 * draw.randint(1, 2)  # every side that follows is a multiple of 4
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
        "resample": draw.choice(list(FILTERS.values())),
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
    return settings, (4 * unit * across, 4 * unit * down)


def written_processor(folder: Path, kind: type, settings: Mapping[str, Any]) -> None:
    """Write the settings as given, with nothing added, as old files and files edited by hand are."""
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "image_processor_type": kind.__name__}))


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("seed", range(draws(4, nightly=12)))
def test_the_words_about_the_image_processor_are_what_it_does(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    compared = 0
    for number in range(25):
        kind = draw.choice([PlainViTImageProcessor] * 3 + [ViTImageProcessor, CLIPImageProcessor, SiglipImageProcessor])
        channels = draw.choice([1, 3]) if kind is PlainViTImageProcessor else 3
        settings, sides = generated_settings(draw, channels)
        if kind is not PlainViTImageProcessor:
            settings = {name: value for name, value in settings.items() if name not in ("resize_mode", "pad_color")}
        folder = tmp_path / str(number)
        PlainViTModel(tiny_config(num_channels=channels)).save_pretrained(folder)
        written_processor(folder, kind, settings)
        words = section(card_text(folder, ModelFacts()), "Preprocessing")
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        mode = "RGB" if getattr(processor, "do_convert_rgb", None) or channels == 3 else "L"
        levels = np.random.default_rng(draw.randrange(1000)).integers(0, 256, (*sides[::-1], 3), dtype=np.uint8)
        image = Image.fromarray(levels).convert(mode)
        got = np.asarray(processor(image, return_tensors="np")["pixel_values"][0], np.float64)
        expected = followed(words, image) if words else levels_of(image)
        assert got.shape == expected.shape, (settings, words)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=f"{kind} {settings} {words}")
        compared += bool(words)
    assert compared >= 20


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


def test_a_processor_with_steps_of_its_own_is_named(tmp_path: Path) -> None:
    PlainViTModel(tiny_config()).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 24}, "crop_pct": 0.9})
    )
    assert section(card_text(tmp_path, ModelFacts()), "Preprocessing") == (
        "Images are prepared by transformers' `ConvNextImageProcessor` with its settings in this repository."
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "OfMyOwn", "size": "large"}))
    assert section(card_text(tmp_path, ModelFacts()), "Preprocessing") == (
        "Images are prepared by `OfMyOwn`, the image processor in this repository."
    )


def test_the_words_about_patches_are_the_limit_of_the_image_processor(tmp_path: Path) -> None:
    PlainViTModel(tiny_config(image_size=56, patch_size=14)).save_pretrained(tmp_path)
    PlainViTImageProcessor(patch_size=14, max_num_patches=20).save_pretrained(tmp_path)
    words = section(card_text(tmp_path, ModelFacts()), "Preprocessing")
    assert "They are resized to at most 20 patches of 14 x 14 pixels, aspect ratio kept (bilinear)." in words
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    for sides in ((50, 70), (300, 20), (20, 300)):
        shapes = processor(Image.new("RGB", sides), return_tensors="pt")["spatial_shapes"]
        assert 0 < shapes.prod() <= 20
