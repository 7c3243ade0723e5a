"""Processors made from each source's settings give the source's own pixels, and convert back to the source."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.transforms import str_to_pil_interp
from transformers import (
    AutoImageProcessor,
    BitImageProcessorPil,
    CLIPImageProcessor,
    ViTImageProcessor,
    ViTImageProcessorPil,
)
from transformers.image_processing_utils import BaseImageProcessor

from plain_vit import PlainViTConfig
from plain_vit.conversion import from_checkpoint
from plain_vit.conversion.sources.google import processor_from_google
from plain_vit.conversion.sources.timm.pixels import processor_from_timm, processor_to_timm
from plain_vit.conversion.sources.torchvision.pixels import processor_from_torchvision
from plain_vit.conversion.sources.transformers.pixels import processor_from_transformers, stock_processor
from plain_vit.conversion.tables.pixels import INTERPOLATIONS, default_processor
from plain_vit.errors import CheckpointError, ExportError
from plain_vit.image_processing_plain_vit import PlainViTImageProcessor, PlainViTImageProcessorPil
from tests.sizes import draws

PLAIN_MODULES = ("vision_transformer", "deit")
ALL_MODULES = (*PLAIN_MODULES, "eva", "beit", "naflexvit", "vision_transformer_hybrid", "vision_transformer_relpos")
SETTINGS = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")

# Width and height, unequal and odd; their margins have all remainders modulo 4.
IMAGE_SIZES = ((331, 257), (149, 421), (223, 227), (640, 479))


def tags(*modules: str) -> list[str]:
    return [tag for module in modules for tag in timm.list_models(module=module, pretrained=True)]


def pretrained_cfg(tag: str) -> dict:
    cfg = timm.get_pretrained_cfg(tag)
    assert cfg is not None
    return cfg.to_dict()


def settings_of(cfg: dict) -> tuple:
    return tuple(tuple(cfg[key]) if isinstance(cfg[key], (list, tuple)) else cfg[key] for key in SETTINGS)


def noise(width: int, height: int, channels: int = 3) -> Image.Image:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return Image.fromarray(np.random.default_rng(width * height).integers(0, 256, shape, dtype=np.uint8))


def pixels(processor: BaseImageProcessor, image: Image.Image) -> torch.Tensor:
    return processor(image, return_tensors="pt")["pixel_values"][0]


def with_backend(processor: BaseImageProcessor, backend: str) -> BaseImageProcessor:
    """Return the processor of either backend with these settings."""
    kind = {"pil": PlainViTImageProcessorPil, "torchvision": PlainViTImageProcessor}[backend]
    return kind.from_dict(processor.to_dict())


PLAIN_SETTINGS = sorted({settings_of(pretrained_cfg(tag)) for tag in tags(*PLAIN_MODULES)})


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
@pytest.mark.parametrize("settings", PLAIN_SETTINGS, ids=lambda settings: "-".join(map(str, settings[:4])))
def test_pixels_equal_timms_for_every_setting_of_its_plain_vits(settings: tuple, backend: str) -> None:
    cfg = dict(zip(SETTINGS, settings, strict=True))
    processor = with_backend(processor_from_timm(cfg), backend)
    transform = create_transform(**resolve_data_config(pretrained_cfg=cfg), is_training=False)
    for size in IMAGE_SIZES[:2]:
        image = noise(*size)
        assert torch.equal(pixels(processor, image), transform(image))


@pytest.mark.slow
@pytest.mark.parametrize("settings", PLAIN_SETTINGS, ids=lambda settings: "-".join(map(str, settings[:4])))
def test_pixels_of_a_saved_processor_equal_timms(settings: tuple, tmp_path: Path) -> None:
    cfg = dict(zip(SETTINGS, settings, strict=True))
    transform = create_transform(**resolve_data_config(pretrained_cfg=cfg), is_training=False)
    made = processor_from_timm(cfg)
    made.save_pretrained(tmp_path)
    opened = AutoImageProcessor.from_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    del saved["resize_with"]  # early 0.1.0 files lack this field
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(saved))
    processors = [made, opened, AutoImageProcessor.from_pretrained(tmp_path)]
    assert [type(processor) for processor in processors] == [PlainViTImageProcessor] * 3
    for size in IMAGE_SIZES[2:]:
        image = noise(*size)
        expected = transform(image)
        for processor in (*processors, with_backend(made, "pil")):
            assert torch.equal(pixels(processor, image), expected)


def test_a_processor_of_images_and_text_brings_the_pixels_of_its_folder(tmp_path: Path) -> None:
    size = {"hidden_size": 28, "intermediate_size": 29, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**size, "image_size": 28, "patch_size": 14}
    transformers.CLIPModel(
        transformers.CLIPConfig(vision_config=vision, text_config={**size, "vocab_size": 3})
    ).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    CLIPImageProcessor(image_mean=[0.1] * 3).save_pretrained(tmp_path)  # left by an earlier save
    theirs = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)
    transformers.CLIPProcessor(theirs, tokenizer).save_pretrained(tmp_path)
    ours = from_checkpoint(tmp_path).image_processor
    assert type(ours) is type(AutoImageProcessor.from_pretrained(tmp_path))
    assert torch.equal(pixels(ours, noise(50, 70)), pixels(theirs, noise(50, 70)))


def test_one_mean_for_all_channels_is_read() -> None:
    assert processor_from_timm({"mean": 0.5, "std": 0.25}).image_mean == (0.5,) * 3


def test_every_tag_of_timms_vits_opens_and_exports_back_to_the_same_settings() -> None:
    opened = tags(*ALL_MODULES)
    assert len(opened) >= 463
    for tag in opened:
        cfg = pretrained_cfg(tag)
        back = processor_to_timm(processor_from_timm(cfg))
        assert settings_of(back) == settings_of(resolve_data_config(pretrained_cfg=cfg)), tag


CROP_MODES = ("center", "squash", "border")
TARGETS = (((3, 97, 61), 0.9), ((3, 64, 111), 1.0), ((3, 75, 75), 0.8))  # input size and crop fraction


@pytest.mark.parametrize("mode", range(3), ids=CROP_MODES)
@pytest.mark.parametrize("number, interpolation", list(enumerate(INTERPOLATIONS)))
def test_pixels_equal_timms_for_settings_that_no_tag_has(number: int, interpolation: str, mode: int) -> None:
    input_size, crop_pct = TARGETS[(number + mode) % 3]  # every pair of settings occurs
    cfg = {
        "input_size": input_size,
        "crop_pct": crop_pct,
        "crop_mode": CROP_MODES[mode],
        "interpolation": interpolation,
        "mean": (0.11, 0.52, 0.93),
        "std": (0.31, 0.22, 0.13),
    }
    transform = create_transform(**resolve_data_config(pretrained_cfg=cfg), is_training=False)
    processors = [with_backend(processor_from_timm(cfg), backend) for backend in ("pil", "torchvision")]
    for size in IMAGE_SIZES:
        image = noise(*size)
        expected = transform(image)
        assert all(torch.equal(pixels(processor, image), expected) for processor in processors)
    for processor in processors:
        assert settings_of(processor_to_timm(processor)) == settings_of(cfg)


@pytest.mark.parametrize("cfg", [{"architecture": "?"}, dict.fromkeys(SETTINGS), {"crop_pct": 0, "mean": ()}])
def test_pixels_equal_timms_where_the_pretrained_cfg_says_nothing(cfg: dict) -> None:
    image = noise(211, 307)
    transform = create_transform(**resolve_data_config(pretrained_cfg=cfg), is_training=False)
    assert torch.equal(pixels(processor_from_timm(cfg), image), transform(image))


def test_one_channel_takes_the_mean_that_all_channels_share_and_refuses_to_choose_one() -> None:
    cfg = {"input_size": (1, 28, 44), "mean": (0.13,), "std": (0.31,), "crop_pct": 1.0}
    image = noise(57, 83, channels=1)
    transform = create_transform(**resolve_data_config(pretrained_cfg=cfg), is_training=False)
    assert torch.equal(pixels(processor_from_timm(cfg), image), transform(image))
    shared = processor_from_timm({"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}, num_channels=1)
    assert (shared.image_mean, shared.image_std) == ((0.5,), (0.2,))
    with pytest.raises(CheckpointError, match=r"mean has 3 values .* the model 1 channels: give image_mean"):
        processor_from_timm({}, num_channels=1)


def test_image_size_overrides_the_input_size_of_the_cfg() -> None:
    processor = processor_from_timm({"crop_pct": 0.9}, image_size=(96, 160))
    assert pixels(processor, noise(331, 257)).shape == (3, 96, 160)


@pytest.mark.parametrize("key, value", [("crop_mode", "middle"), ("interpolation", "random")])
def test_a_timm_setting_that_does_not_exist_is_refused(key: str, value: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is '{value}': expected one of"):
        processor_from_timm({key: value})


def torchvision_weights() -> list:
    names = [name for name in torchvision.models.list_models() if name.startswith("vit_")]
    return [weights for name in names for weights in torchvision.models.get_model_weights(name)]


@pytest.mark.parametrize("weights", torchvision_weights(), ids=str)
def test_pixels_equal_torchvisions_for_all_its_weights(weights: torchvision.models.WeightsEnum) -> None:
    transform = weights.transforms()
    for size in IMAGE_SIZES[:2]:
        image = noise(*size)
        for backend in ("torchvision", "pil"):
            processor = with_backend(processor_from_torchvision(Path(weights.url).stem), backend)
            assert torch.equal(pixels(processor, image), transform(image))


@pytest.mark.parametrize("named", ["CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPFeatureExtractor"])
def test_a_stock_processor_stays_what_it_is(named: str) -> None:
    key = "feature_extractor_type" if named.endswith("Extractor") else "image_processor_type"
    settings = {key: named, "size": {"shortest_edge": 67}, "crop_size": {"height": 43, "width": 59}}
    processor = processor_from_transformers(settings)
    assert type(processor) is CLIPImageProcessor  # AutoImageProcessor's own choice
    image = noise(331, 257)
    expected = CLIPImageProcessor(size={"shortest_edge": 67}, crop_size={"height": 43, "width": 59})
    assert torch.equal(pixels(processor, image), pixels(expected, image))


def test_the_model_type_names_the_processor_where_an_old_file_does_not() -> None:
    settings = {"do_normalize": True, "do_resize": True, "image_mean": [0.5] * 3, "resample": 2, "size": 37}
    processor = processor_from_transformers(settings, {"model_type": "vit"})
    assert type(processor).__name__ == "ViTImageProcessor"
    assert pixels(processor, noise(331, 257)).shape == (3, 37, 37)


def test_plain_vits_own_folders_open_too() -> None:
    settings = {"size": {"height": 31, "width": 43}, "resize_mode": "cover"}
    processor = processor_from_transformers(settings, json.loads(PlainViTConfig().to_json_string()))
    assert type(processor) is PlainViTImageProcessor
    assert processor.to_dict().items() >= settings.items()


@pytest.mark.parametrize(
    "settings", [{}, {"image_processor_type": "NoSuchImageProcessor"}, {"size": 3, "auto_map": {}}]
)
@pytest.mark.parametrize("model_config", [None, {}, {"model_type": "no_such_model"}, {"model_type": "bert"}])
def test_a_folder_that_names_no_known_processor_is_refused(settings: dict, model_config: dict | None) -> None:
    with pytest.raises(CheckpointError, match="expected one of transformers or plain-vit"):
        processor_from_transformers(settings, model_config)


def test_google_pixels_lie_in_minus_one_to_one() -> None:
    black_and_white = Image.fromarray(np.array([[[0] * 3, [255] * 3]], dtype=np.uint8))
    prepared = pixels(processor_from_google((1, 2)), black_and_white)
    assert prepared.tolist() == [[[-1.0, 1.0]]] * 3


def test_a_default_names_what_it_assumes() -> None:
    processor, assumed = default_processor((34, 51), num_channels=1)
    assert pixels(processor, noise(83, 57, channels=1)).shape == (1, 34, 51)
    assert len(assumed) == 2
    assert "34x51" in assumed[0]
    assert "image_mean 0.5" in assumed[1]
    processor, assumed = default_processor(34, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    assert processor.image_mean == (0.1, 0.2, 0.3)
    assert len(assumed) == 1


SQUASHED = sorted({settings for settings in PLAIN_SETTINGS if settings[3] == "squash"})


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
@pytest.mark.parametrize("settings", SQUASHED, ids=lambda settings: "-".join(map(str, settings[:3])))
def test_the_stock_processor_prepares_the_same_pixels_wherever_timm_squashes(settings: tuple, backend: str) -> None:
    processor: Any = with_backend(processor_from_timm(dict(zip(SETTINGS, settings, strict=True))), backend)
    stock = stock_processor(processor)
    assert type(stock) is ViTImageProcessorPil
    for image in (noise(331, 257), noise(149, 421, channels=1)):
        assert torch.equal(pixels(stock, image), pixels(processor, image))


def test_the_stock_processor_resizes_with_torch_where_that_is_asked_for() -> None:
    processor = PlainViTImageProcessor(size=(43, 59), resize_with="torch")
    stock = stock_processor(processor)
    assert type(stock) is ViTImageProcessor
    image = noise(331, 257)
    torch.testing.assert_close(pixels(stock, image), pixels(processor, image), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
def test_the_stock_processor_leaves_grey_images_grey_for_a_model_of_one_channel(backend: str) -> None:
    processor: Any = with_backend(default_processor((34, 51), num_channels=1)[0], backend)
    image = noise(149, 421, channels=1)
    assert torch.equal(pixels(stock_processor(processor), image), pixels(processor, image))


@pytest.mark.parametrize(
    "cfg",
    [
        {"crop_pct": 0.9},
        {"crop_pct": 0.9, "input_size": (3, 96, 160)},
        {"crop_pct": 0.9, "crop_mode": "border"},
        {"crop_pct": 0.95, "crop_mode": "squash"},  # 235 - 224 = 11: the two crops round differently
    ],
)
def test_the_stock_processor_is_refused_where_its_pixels_would_differ(cfg: dict) -> None:
    with pytest.raises(ExportError, match="ViTImageProcessor would prepare other pixels"):
        stock_processor(processor_from_timm(cfg))


@pytest.mark.parametrize(
    "processor, part",
    [
        (PlainViTImageProcessorPil(do_resize=False), "do_resize=False"),
        (PlainViTImageProcessorPil(do_rescale=False), "do_rescale=False"),
        (PlainViTImageProcessor(resize_with="torch"), "resize_with='torch'"),
        (PlainViTImageProcessorPil(rescale_factor=1 / 127.5), "rescale_factor"),
        (PlainViTImageProcessorPil(do_pad=True, pad_size={"height": 7, "width": 7}), "do_pad"),
        (PlainViTImageProcessorPil(size={"shortest_edge": 67}), "depends on the image"),
        (PlainViTImageProcessorPil(size={"shortest_edge": 67, "longest_edge": 99}), "longest_edge"),
        (PlainViTImageProcessorPil(size=[67, 43], resize_mode="cover"), "depends on the image"),
        (PlainViTImageProcessorPil(size=[99, 67], resize_mode="contain", crop_size=[43, 41]), "another colour"),
        (
            PlainViTImageProcessorPil(size={"shortest_edge": 67}, crop_size=[43, 59], do_center_crop=True),
            "43x59 out of 67x67",
        ),
        (
            PlainViTImageProcessorPil(size=[67, 67], resize_mode="cover", crop_size=[43, 43], do_center_crop=True),
            "cover",
        ),
        (BitImageProcessorPil(), "own centre crop"),
        (BitImageProcessorPil(resample=9, do_center_crop=False), "resample=9"),
    ],
)
def test_what_timm_cannot_express_is_refused_by_name(processor: BaseImageProcessor, part: str) -> None:
    with pytest.raises(ExportError) as caught:
        processor_to_timm(processor)
    assert any(part in named for named in caught.value.parts)


def test_processors_without_normalisation_export_back_to_timm_as_mean_0_and_deviation_1() -> None:
    back = processor_to_timm(PlainViTImageProcessor(do_normalize=False))
    assert (back["mean"], back["std"]) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_interpolations_have_timms_names_and_pillows_numbers() -> None:
    modes = {mode.value for mode in torchvision.transforms.InterpolationMode} - {"nearest-exact"}
    assert {name: str_to_pil_interp(name) for name in modes} == INTERPOLATIONS


MODES = ("RGB", "L", "RGBA", "LA", "CMYK", "P", "1", "YCbCr", "HSV")


def drawn_image(rng: np.random.Generator, target: tuple[int, int]) -> Image.Image:
    """Return noise of any size and shape, in any mode that is converted to RGB."""
    sides = [int(rng.choice([1, 2, 3, rng.integers(1, 41), rng.integers(41, 500)])) for _ in range(2)]
    height, width = target if rng.random() < 0.15 else sides
    mode = str(rng.choice(MODES))
    levels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    if mode in ("P", "1"):
        image = Image.fromarray(levels[..., :3])
        return image.quantize(16) if mode == "P" else image.convert("1")
    return Image.merge(
        mode, [Image.fromarray(plane) for plane in levels.transpose(2, 0, 1)[: Image.getmodebands(mode)]]
    )


def test_any_image_by_any_settings_has_timms_pixels_or_is_refused_as_by_timm() -> None:
    rng, equal, count = np.random.default_rng(60), 0, draws(60, nightly=1500)
    for _ in range(count):
        target = (int(rng.integers(1, 120)), int(rng.integers(1, 120)))
        target = target if rng.random() < 0.5 else (target[0], target[0])
        cfg = {
            "input_size": (3, *target),
            "crop_pct": float(rng.choice([1.0, 0.875, 0.9, 0.95, rng.uniform(0.3, 1.2)])),
            "crop_mode": str(rng.choice(["center", "squash", "border"])),
            "interpolation": str(rng.choice(list(INTERPOLATIONS))),
            "mean": tuple(rng.uniform(0, 1, 3).tolist()),
            "std": tuple(rng.uniform(0.05, 2, 3).tolist()),
        }
        image = drawn_image(rng, target)
        transform = create_transform(**resolve_data_config(pretrained_cfg=cfg), is_training=False)
        try:
            expected: Any = transform(image.convert("RGB"))
        except ValueError:  # a side would have no pixels
            expected = None
        for backend in ("torchvision", "pil"):
            processor = with_backend(processor_from_timm(cfg), backend)
            if expected is None:
                with pytest.raises(ValueError, match="has no pixel left|expected height and width"):
                    processor(image)
            else:
                assert torch.equal(pixels(processor, image), expected), (cfg, image)
        equal += expected is not None
    assert equal > 0.8 * count
