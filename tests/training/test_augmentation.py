"""Strength, probability and reproducibility of augmentations, compared with their original packages."""

import io
import pickle
import random
from collections import Counter
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageChops
import PIL.ImageFilter
import PIL.ImageOps
import pytest
import torch
from sklearn.datasets import load_sample_image
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision.transforms import InterpolationMode, v2

from plain_vit import PlainViTImageProcessor
from plain_vit.errors import TrainingError
from plain_vit.training.data import randaugment
from plain_vit.training.data.augmentation import training_transform
from plain_vit.training.data.randaugment import MAGNITUDE_SCALES, OPERATIONS, Canvas, rand_augment, three_augment

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
COLOR = (124, 116, 104)
CANVAS = Canvas(COLOR, PIL.Image.Resampling.BICUBIC)
TIMM_HYPERPARAMETERS = {"translate_const": 100, "img_mean": COLOR, "interpolation": PIL.Image.Resampling.BICUBIC}

# Our operation, timm's, and timm's with increasing strength.
NAMES = {
    "auto_contrast": ("AutoContrast", "AutoContrast"),
    "equalize": ("Equalize", "Equalize"),
    "invert": ("Invert", "Invert"),
    "rotate": ("Rotate", "Rotate"),
    "posterize": ("Posterize", "PosterizeIncreasing"),
    "solarize": ("Solarize", "SolarizeIncreasing"),
    "solarize_add": ("SolarizeAdd", "SolarizeAdd"),
    "color": ("Color", "ColorIncreasing"),
    "contrast": ("Contrast", "ContrastIncreasing"),
    "brightness": ("Brightness", "BrightnessIncreasing"),
    "sharpness": ("Sharpness", "SharpnessIncreasing"),
    "shear_x": ("ShearX", "ShearX"),
    "shear_y": ("ShearY", "ShearY"),
    "translate_x": ("TranslateXRel", "TranslateXRel"),
    "translate_y": ("TranslateYRel", "TranslateYRel"),
}


def photograph(width: int = 61, height: int = 47) -> PIL.Image.Image:
    return PIL.Image.fromarray(load_sample_image("flower.jpg")).resize((width, height), PIL.Image.Resampling.LANCZOS)


def difference(one: PIL.Image.Image, other: PIL.Image.Image) -> int:
    return int(np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max())


# Operations


@pytest.mark.parametrize("scale, column", [("timm", 0), ("timm_increasing", 1)])
def test_operations_and_strengths_are_those_of_timm_at_every_magnitude(scale, column, monkeypatch):
    strengths = MAGNITUDE_SCALES[scale].strengths
    theirs = auto_augment.rand_augment_choices("", increasing=scale == "timm_increasing")
    assert {NAMES[name][column] for name in strengths} == set(theirs)
    assert len(strengths) == len(theirs)
    image = photograph()
    for name, strength in strengths.items():
        timm_name = NAMES[name][column]
        for magnitude in np.arange(0, 10.5, 0.5):
            for sign in (1, -1):
                monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value, sign=sign: sign * value)
                level = auto_augment.LEVEL_TO_ARG[timm_name]
                arguments = () if level is None else level(magnitude, TIMM_HYPERPARAMETERS)
                ours = strength(magnitude / 10, sign)
                assert not arguments or ours == arguments[0], (name, magnitude)
                operation = auto_augment.NAME_TO_OP[timm_name]
                if timm_name.startswith("Posterize") and arguments == (0,):
                    expected = PIL.Image.new(
                        "RGB", image.size
                    )  # timm passes 0 bits, which Pillow refuses from version 13 on
                else:
                    expected = operation(image, *arguments, fillcolor=COLOR, resample=CANVAS.resample)
                assert difference(OPERATIONS[name](image, ours, CANVAS), expected) == 0, (name, magnitude)


# Computed by hand from `level_to_arg` in big_vision's `pp/autoaugment.py`; distances in pixels of 224.
BIG_VISION = {
    #                 0     10    15    20
    "rotate":       (0.0, 30.0, 45.0, 60.0),
    "posterize":    (1, 4, 6, 8),  # 0 bits in the source, but TensorFlow shifts by at most 7
    "solarize":     (0, 256, 384, 512),
    "solarize_add": (0, 110, 165, 220),
    "color":        (0.1, 1.9, 2.8, 3.7),
    "contrast":     (0.1, 1.9, 2.8, 3.7),
    "brightness":   (0.1, 1.9, 2.8, 3.7),
    "sharpness":    (0.1, 1.9, 2.8, 3.7),
    "shear_x":      (0.0, 0.3, 0.45, 0.6),
    "shear_y":      (0.0, 0.3, 0.45, 0.6),
    "translate_x":  (0.0, 100 / 224, 150 / 224, 200 / 224),
    "translate_y":  (0.0, 100 / 224, 150 / 224, 200 / 224),
    "cutout":       (0.0, 40 / 224, 60 / 224, 80 / 224),
    "auto_contrast": None,
    "equalize": None,
    "invert": None,
}  # fmt: skip


def test_strengths_of_big_vision_go_beyond_the_full_scale():
    strengths = MAGNITUDE_SCALES["big_vision"].strengths
    assert strengths.keys() == BIG_VISION.keys()
    for name, expected in BIG_VISION.items():
        if expected is not None:
            measured = [strengths[name](magnitude / 10, 1) for magnitude in (0, 10, 15, 20)]
            assert measured == pytest.approx(expected, abs=1e-12), name


def test_magnitude_0_of_big_vision_is_not_nothing():
    image, black = photograph(), PIL.Image.new("RGB", (61, 47))
    strengths = MAGNITUDE_SCALES["big_vision"].strengths
    at_0 = {name: OPERATIONS[name](image, strength(0, 1), CANVAS) for name, strength in strengths.items()}
    assert np.asarray(at_0["brightness"]).max() <= 26
    assert difference(at_0["solarize"], PIL.ImageChops.invert(image)) == 0
    assert set(np.unique(np.asarray(at_0["posterize"]))) == {0, 128}
    assert difference(at_0["color"], image) > 50
    for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", "solarize_add", "cutout"):
        assert difference(at_0[name], image) == 0, name
    assert difference(at_0["brightness"], black) > 0


def test_a_square_of_the_right_size_is_cut_out_anywhere():
    image = PIL.Image.new("RGB", (224, 112), (1, 2, 3))
    strength = MAGNITUDE_SCALES["big_vision"].strengths["cutout"](1.5, 1)
    covered = []
    for seed in range(200):
        torch.manual_seed(seed)
        cut = np.asarray(OPERATIONS["cutout"](image, strength, Canvas((128,) * 3, CANVAS.resample))) == 128
        rows, columns = cut.all(-1).any(1), cut.all(-1).any(0)
        assert np.array_equal(cut.all(-1), rows[:, None] & columns)
        covered.append((rows.sum(), columns.sum()))
    # A radius of 60 in 224 pixels, 30 in 112; less if the centre is near an edge.
    assert max(covered) == (60, 120)
    assert min(rows for rows, _ in covered) < 40


# RandAugment


def posterize_before_pillow_13(image: PIL.Image.Image, bits: int) -> PIL.Image.Image:
    return image.point([level & ~(2 ** (8 - bits) - 1) for level in range(256)] * 3)


def timm_randaugment(text: str) -> Any:
    return auto_augment.rand_augment_transform(text, dict(TIMM_HYPERPARAMETERS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, options",
    [
        ("rand-m9-mstd0.5-inc1", {"scale": "timm_increasing", "magnitude": 9, "magnitude_std": 0.5, "layers": 2}),
        ("rand-m5-n3", {"scale": "timm", "magnitude": 5, "magnitude_std": 0.0, "layers": 3}),
    ],
)
def test_images_are_changed_as_strongly_as_by_timm(text, options, monkeypatch):
    image, draws = photograph(), 3000
    theirs, ours = timm_randaugment(text), rand_augment(**options, canvas=CANVAS)
    monkeypatch.setattr(PIL.ImageOps, "posterize", posterize_before_pillow_13)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    changes = np.array(
        [
            [np.abs(np.asarray(augment(image), dtype=float) - np.asarray(image)).mean() for augment in (ours, theirs)]
            for _ in range(draws)
        ]
    )
    # Two samples of one distribution: means within three standard errors, and equally many unchanged images.
    error = np.hypot(*changes.std(axis=0)) / np.sqrt(draws)
    assert abs(changes[:, 0].mean() - changes[:, 1].mean()) < 3 * error
    unchanged = (changes == 0).mean(axis=0)
    assert abs(unchanged[0] - unchanged[1]) < 3 * np.sqrt(0.5 / draws)
    for quantile in (0.5, 0.9):
        assert np.quantile(changes[:, 0], quantile) == pytest.approx(np.quantile(changes[:, 1], quantile), rel=0.1)


def test_noise_of_the_magnitude_is_cut_at_the_ends_of_the_scale(monkeypatch):
    drawn: list[float] = []

    def record(share: float, sign: int) -> float:
        drawn.append(share)
        return 0.0

    strengths = {"rotate": record}
    scale = randaugment.MagnitudeScale(10, strengths, 1.0, takes_noise=True)
    monkeypatch.setitem(MAGNITUDE_SCALES, "timm", scale)
    augment = rand_augment("timm", magnitude=9, magnitude_std=2.0, layers=2, canvas=CANVAS)
    torch.manual_seed(0)
    image = photograph(3, 2)
    for _ in range(1000):
        augment(image)
    assert len(drawn) == 2000
    assert max(drawn) == 1.0
    assert np.mean(np.array(drawn) == 1.0) == pytest.approx(0.309, abs=0.04)  # above 10: half a deviation
    assert np.median(drawn) == pytest.approx(0.9, abs=0.02)


def test_operations_of_torchvision_are_its_own():
    image = photograph()
    ours = rand_augment("torchvision", magnitude=17, magnitude_std=0.0, layers=3, canvas=CANVAS)
    theirs = v2.RandAugment(3, 17, interpolation=v2.InterpolationMode.BILINEAR)
    for seed in range(30):
        torch.manual_seed(seed)
        one = ours(image)
        torch.manual_seed(seed)
        assert difference(one, theirs(image)) == 0


@pytest.mark.parametrize(
    "scale, options, message",
    [
        ("timm", {"magnitude": 11}, "magnitude is 11: expected 0 to 10, the range of timm"),
        ("timm_increasing", {"magnitude": 15}, "expected 0 to 10, the range of timm_increasing"),
        ("big_vision", {"magnitude": 31}, "expected 0 to 30"),
        ("torchvision", {"magnitude": -1}, "magnitude is -1"),
        ("big_vision", {"magnitude_std": 0.5}, "magnitude_std is 0.5, which big_vision does not have"),
        ("torchvision", {"magnitude_std": 0.5}, "magnitude_std is 0.5, which torchvision does not have"),
    ],
)
def test_magnitudes_that_a_scale_does_not_have_are_refused(scale, options, message):
    with pytest.raises(TrainingError, match=message):
        rand_augment(scale, **{"magnitude": 5, "magnitude_std": 0.0, "layers": 2, **options}, canvas=CANVAS)


# 3-Augment


def test_three_augment_is_grey_solarised_or_blurred_equally_often_and_by_up_to_two_pixels(monkeypatch):
    image = photograph()
    kinds: Counter[str] = Counter()
    radii: list[float] = []
    filtered = PIL.ImageFilter.GaussianBlur

    def record(radius: float) -> PIL.ImageFilter.GaussianBlur:
        radii.append(radius)
        return filtered(radius)

    monkeypatch.setattr(PIL.ImageFilter, "GaussianBlur", record)
    varied: Any = three_augment()
    varied = varied.transforms
    torch.manual_seed(0)
    solarized, grey = v2.functional.solarize(image, 128), v2.functional.rgb_to_grayscale(image, 3)
    for _ in range(900):
        seen = varied[0](image)
        kind = "grey" if difference(seen, grey) == 0 else "solarised" if difference(seen, solarized) == 0 else "blurred"
        kinds[kind] += 1
    assert len(radii) == kinds["blurred"]
    assert all(abs(count - 300) < 60 for count in kinds.values())
    assert len(kinds) == 3
    assert 0.1 <= min(radii) < 0.2
    assert 1.9 < max(radii) <= 2.0
    assert np.mean(radii) == pytest.approx(1.05, abs=0.1)
    jitter = varied[1]
    assert (list(jitter.brightness), list(jitter.contrast), list(jitter.saturation)) == ([0.7, 1.3],) * 3
    assert jitter.hue is None


# Random erasing


def test_pixels_are_erased_as_by_timm():
    processor = PlainViTImageProcessor(size={"height": 40, "width": 56}, **IMAGENET)
    image = PIL.Image.new("RGB", (56, 40), (250, 3, 120))
    plain = training_transform(processor)(image).numpy()
    ours = training_transform(processor, random_erasing=0.6, random_erasing_mode="pixel")
    theirs = RandomErasing(0.6, mode="pixel", device="cpu")
    random.seed(0)
    torch.manual_seed(0)
    counts: dict[str, list[int]] = {"ours": [], "theirs": []}
    noise: dict[str, list[np.ndarray]] = {"ours": [], "theirs": []}
    for _ in range(600):
        for name, pixels in (("ours", ours(image)), ("theirs", theirs(torch.from_numpy(plain.copy())))):
            part = np.abs(pixels.numpy() - plain).max(axis=0) > 1e-3
            counts[name].append(int(part.sum()))
            rows, columns = part.any(axis=1), part.any(axis=0)
            inside = pixels.numpy()[:, rows][:, :, columns]
            noise[name].append(inside.ravel())
    erased = {name: np.mean(np.array(values) > 0) for name, values in counts.items()}
    assert erased["ours"] == pytest.approx(erased["theirs"], abs=0.09)
    assert np.mean(counts["ours"]) == pytest.approx(np.mean(counts["theirs"]), rel=0.12)
    for values in noise.values():
        together = np.concatenate(values)
        assert together.mean() == pytest.approx(0, abs=0.01)
        assert together.std() == pytest.approx(1, abs=0.01)
        assert np.abs(together).max() > 3.5  # not limited to the range of pixels


def test_pixels_that_are_not_erased_keep_their_exact_levels():
    processor = PlainViTImageProcessor(size={"height": 16, "width": 16})
    levels = torch.arange(256, dtype=torch.uint8).reshape(16, 16).repeat(3, 1, 1)
    image = v2.functional.to_pil_image(levels)
    transform = training_transform(processor, random_erasing=1e-9, random_erasing_mode="pixel")
    kept = transform.augment(transform.crop(image))
    assert kept.dtype == torch.float16
    assert torch.equal(kept, levels.half())
    assert torch.equal(transform.normalize(kept), training_transform(processor)(image))


# Colours


@pytest.mark.parametrize(("grey", "blur"), [(0.5, 0.0), (0.0, 0.5), (0.3, 0.3)])
@pytest.mark.parametrize("jitter", [[], [0.4], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4]], ids=len)
def test_colours_and_vertical_flips_are_those_of_timm_with_the_same_draws(jitter, grey, blur):
    options = {"vflip": 0.5, "color_jitter": jitter, "grayscale_prob": grey, "gaussian_blur_prob": blur}
    transform = training_transform(PlainViTImageProcessor(size={"height": 31, "width": 45}), **options)
    image = photograph(45, 31)
    given = {**options, "color_jitter": {0: None, 1: 0.4}.get(len(jitter), jitter)}
    first, second, _ = transforms_imagenet_train((31, 45), hflip=0, separate=True, **given)
    for seed in range(12):
        torch.manual_seed(seed)
        ours = transform.augment(transform.crop(image))
        torch.manual_seed(seed)
        theirs = v2.Compose([*first.transforms[1:], *second.transforms])(image)
        off = (ours.int() - v2.functional.pil_to_tensor(theirs)).abs().max()
        assert off <= (blur > 0)  # torchvision's two classes of blurs may round the same value up and down


def test_small_images_are_blurred_too():
    transform = training_transform(PlainViTImageProcessor(size={"height": 5, "width": 9}), gaussian_blur_prob=1.0)
    levels = transform.crop(photograph(45, 31))
    torch.manual_seed(1)
    assert transform.augment(levels).float().var() < levels.float().var()


def test_interpolation_of_training_is_one_or_drawn_from_two_and_needs_a_crop():
    processor, image = PlainViTImageProcessor(size={"height": 24, "width": 16}, resample=3), photograph(80, 96)
    resized = {
        name: v2.functional.resize(v2.functional.pil_to_tensor(image), [24, 16], InterpolationMode(name))
        for name in ("bilinear", "bicubic")
    }
    for name, expected in resized.items():
        assert torch.equal(training_transform(processor, train_interpolation=name, scaled=False).crop(image), expected)
    crop = training_transform(processor, train_interpolation="random").crop
    drawn = Counter(torch.equal(crop(image), resized["bicubic"]) for _ in range(200))
    assert 70 < drawn[True] < 130
    cropping = PlainViTImageProcessor(
        size={"shortest_edge": 24}, do_center_crop=True, crop_size={"height": 16, "width": 16}
    )
    for options, message in (
        ({"train_interpolation": "bilinear"}, "train_interpolation needs a random crop: add --crop_scale"),
        ({"color_jitter": [0.1, 0.2]}, r"color_jitter is \[0.1, 0.2\]: expected one, three or four numbers"),
        ({"color_jitter": [0.1, 0.2, 0.3, 0.6]}, "the last up to 0.5"),
    ):
        with pytest.raises(TrainingError, match=message):
            training_transform(cropping, **options)


# Combined transforms


@pytest.mark.parametrize(
    "options",
    [
        *({"augmentation": "randaugment", "magnitude_scale": scale, "magnitude": 9} for scale in MAGNITUDE_SCALES),
        {"augmentation": "randaugment", "magnitude_std": 0.5, "random_erasing": 0.5, "random_erasing_mode": "pixel"},
        {"augmentation": "autoaugment"},
        {"train_interpolation": "random", "vflip": 0.5, "color_jitter": [0.4], "gaussian_blur_prob": 0.5},
        {"augmentation": "threeaugment", "crop_scale": 1.0, "crop_padding": 4},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_augmentations_depend_on_the_key_alone_also_in_a_worker(options):
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16})
    transform = training_transform(processor, **{"crop_scale": 0.5, "horizontal_flip": 0.5, **options})
    again = pickle.loads(pickle.dumps(transform))  # as sent to a worker
    stored = {"bytes": png_of(photograph(45, 31)), "path": None}
    seen = []
    for key in range(8):
        random.seed(key)
        np.random.seed(key)
        first, _ = transform.read(stored, "", (1, key))
        random.seed(99)
        np.random.seed(99)
        torch.manual_seed(99)
        second, _ = again.read(stored, "", (1, key))
        assert torch.equal(first, second)
        assert first.shape == (3, 24, 16)
        seen.append(first.numpy().tobytes())
    assert len(set(seen)) == 8


def png_of(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()
