"""The image processors crop, convert and open images like timm, torchvision and their loaders, or raise an error."""

import base64
import http.server
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform
from timm.data.transforms import ResizeKeepRatio
from torchvision.transforms import functional, v2
from transformers import CLIPImageProcessorPil
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import SizeDict

from plain_vit import PlainViTImageProcessor, PlainViTImageProcessorPil

BACKENDS = (PlainViTImageProcessor, PlainViTImageProcessorPil)
MEAN, STD = (0.11, 0.52, 0.93), (0.31, 0.22, 0.13)
SIDES = st.integers(1, 41)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 23 + y / 17 + phase) for phase in range(3)]
    return np.stack([np.round(127.5 + 127.5 * wave) for wave in waves], axis=-1).astype(np.uint8)


def prepare(processor: BaseImageProcessor, image: object) -> torch.Tensor:
    return processor(image, return_tensors="pt")["pixel_values"][0]


# Geometry


@given(SIDES, SIDES, SIDES, SIDES)
def test_the_crop_is_torchvisions_at_every_size(height: int, width: int, crop_height: int, crop_width: int) -> None:
    image = noise(3, height, width)
    expected = functional.center_crop(torch.from_numpy(image), [crop_height, crop_width])
    size = SizeDict(height=crop_height, width=crop_width)
    assert torch.equal(PlainViTImageProcessor().center_crop(torch.from_numpy(image), size), expected)
    assert np.array_equal(PlainViTImageProcessorPil().center_crop(image, size), expected)


def test_transformers_own_crop_is_off_by_one_where_the_margin_leaves_3_by_4() -> None:
    row = np.arange(3 * 1 * 11, dtype=np.uint8).reshape(3, 1, 11)
    size = SizeDict(height=1, width=4)  # a margin of 7: 3.5 rounds to 4 in torchvision, to 3 in transformers
    assert CLIPImageProcessorPil().center_crop(row, size)[0, 0].tolist() == [3, 4, 5, 6]
    assert PlainViTImageProcessorPil().center_crop(row, size)[0, 0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_crop_fills_with_the_pad_color(backend: type) -> None:
    processor = backend(
        do_resize=False,
        do_rescale=False,
        do_normalize=False,
        do_center_crop=True,
        crop_size=(7, 4),
        pad_color=(9, 8, 7),
    )
    prepared = prepare(processor, np.full((2, 5, 3), 200, dtype=np.uint8))
    assert prepared.shape == (3, 7, 4)
    assert prepared[:, 2:4].eq(200).all()  # 5 rows are missing: 2 above, 3 below
    for channel, level in enumerate((9, 8, 7)):
        assert prepared[channel, [0, 1, 4, 5, 6]].eq(level).all()


@pytest.mark.parametrize("interpolation", [v2.InterpolationMode.BILINEAR, v2.InterpolationMode.BICUBIC])
def test_resized_with_torch_pixels_equal_torchvisions_tensor_operations(interpolation: v2.InterpolationMode) -> None:
    resample = {"bilinear": 2, "bicubic": 3}[interpolation.value]
    processor = PlainViTImageProcessor(
        size={"shortest_edge": 75}, crop_size=(64, 70), do_center_crop=True, resample=resample, image_mean=MEAN,
        image_std=STD, resize_with="torch",
    )  # fmt: skip
    to_levels = v2.Compose([v2.Resize(75, interpolation, antialias=True), v2.CenterCrop([64, 70])])
    for shape in ((3, 131, 97), (3, 60, 202)):
        levels = to_levels(torch.from_numpy(noise(*shape)))
        last = noise(*shape).transpose(1, 2, 0)
        for image in (noise(*shape), torch.from_numpy(noise(*shape)), Image.fromarray(last), last):
            assert torch.equal(processor(image, do_normalize=False, do_rescale=False)["pixel_values"][0], levels)
            expected = functional.normalize(functional.convert_image_dtype(levels), MEAN, STD)
            assert torch.equal(prepare(processor, image), expected)


@pytest.mark.parametrize("mode, longest", [("cover", 0.0), ("contain", 1.0)])
def test_resized_with_torch_the_sides_are_the_same_as_timms(mode: str, longest: float) -> None:
    settings = {"size": (61, 90), "resize_mode": mode, "do_rescale": False, "do_normalize": False}
    processor = PlainViTImageProcessor(**settings, resize_with="torch")
    for shape in ((3, 89, 131), (3, 131, 89), (3, 211, 310)):
        image = torch.from_numpy(noise(*shape))
        sides = ResizeKeepRatio.get_params(image, (61, 90), longest)
        expected = v2.functional.resize(image, sides, v2.InterpolationMode.BILINEAR, antialias=True)
        assert torch.equal(prepare(processor, image), expected)


# Largest difference between resizing in torch and in Pillow, in levels of 255, over six sizes.
@pytest.mark.slow(quick=["3-smooth-2"])
@pytest.mark.parametrize(
    "resample, picture, levels", [(2, "smooth", 1), (2, "noise", 1), (3, "smooth", 2), (3, "noise", 7)]
)
def test_torch_resizes_to_within_a_few_levels_of_pillow(
    resample: int, picture: str, levels: int, record_property: Callable[[str, object], None]
) -> None:
    largest = 0
    sizes = [(257, 331, 224, 224), (421, 149, 96, 160), (227, 223, 235, 235), (479, 640, 224, 300), (40, 50, 224, 224)]
    for height, width, to_height, to_width in [*sizes, (1200, 1600, 224, 224)]:
        image = {"smooth": smooth(height, width), "noise": noise(height, width, 3)}[picture]
        settings = {"size": (to_height, to_width), "resample": resample, "do_rescale": False, "do_normalize": False}
        torchs, pillows = (
            prepare(PlainViTImageProcessor(**settings, resize_with=name), image).int() for name in ("torch", "pillow")
        )
        largest = max(largest, int((torchs - pillows).abs().max()))
    record_property("levels", largest)
    print(f"torch against Pillow, resample {resample}, {picture}: {largest} of 255 levels")
    assert 0 < largest <= levels


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_unequal_images_is_prepared_as_each_alone(backend: type) -> None:
    processor = backend(size={"shortest_edge": 37}, crop_size=(31, 29), do_center_crop=True)
    images = [
        Image.fromarray(noise(*shape, seed=seed)) for seed, shape in enumerate([(83, 57, 3), (40, 71, 3), (83, 57, 3)])
    ]
    batch = processor(images, return_tensors="pt")["pixel_values"]
    assert batch.shape == (3, 3, 31, 29)
    for prepared, image in zip(batch, images, strict=True):
        assert torch.equal(prepared, prepare(processor, image))


# Kinds of images


def palette_with_transparency() -> Image.Image:
    image = Image.fromarray(noise(97, 61, 3)).quantize(17)
    image.info["transparency"] = 3
    return image


FILES = {
    "grey.png": Image.fromarray(noise(97, 61)),
    "grey_alpha.png": Image.fromarray(noise(97, 61, 2)),
    "rgba.png": Image.fromarray(noise(97, 61, 4)),
    "palette.gif": Image.fromarray(noise(97, 61, 3)).quantize(17),
    "palette_transparent.png": palette_with_transparency(),
    "black_white.png": Image.fromarray(noise(97, 61)).convert("1"),
    "cmyk.jpg": Image.fromarray(noise(97, 61, 4)[..., :3]).convert("CMYK"),
    "rgb.webp": Image.fromarray(noise(97, 61, 3)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one file of every kind; rotated.jpg has an EXIF rotation by 90 degrees."""
    folder = tmp_path_factory.mktemp("images")
    for name, image in FILES.items():
        image.save(folder / name)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(smooth(97, 61)).save(folder / "rotated.jpg", exif=exif)
    Image.fromarray(noise(97, 61).astype(np.uint16) * 257).save(folder / "16_bit.png")
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", [*FILES, "rotated.jpg"])
def test_every_kind_of_file_is_prepared_as_timm_prepares_it(
    name: str, channels: int, backend: type, folder: Path
) -> None:
    mean, std = MEAN[:channels], STD[:channels]
    processor = backend(
        size={"shortest_edge": 47}, crop_size=(43, 43), do_center_crop=True, resample=3, image_mean=mean, image_std=std
    )
    transform = create_transform((channels, 43, 43), crop_pct=0.9, interpolation="bicubic", mean=mean, std=std)
    with Image.open(folder / name) as image:
        expected = transform(image.convert({1: "L", 3: "RGB"}[channels]))  # timm.data.ImageDataset
        assert torch.equal(prepare(processor, image), expected)
    assert torch.equal(prepare(processor, folder / name), expected)
    assert torch.equal(prepare(processor, str(folder / name)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [3, 1])
def test_an_image_of_more_than_8_bits_is_refused(channels: int, backend: type, folder: Path) -> None:
    processor = backend(image_mean=MEAN[:channels], image_std=STD[:channels])
    with Image.open(folder / "16_bit.png") as sixteen:
        for image in (sixteen, sixteen.convert("I"), sixteen.convert("F")):
            with pytest.raises(ValueError, match="would clip every level above 255"):
                processor(image)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_is_not_converted_where_that_is_turned_off(backend: type) -> None:
    processor = backend(do_convert_rgb=False, do_resize=False)
    rgb = Image.fromarray(noise(13, 17, 3))
    assert torch.equal(prepare(processor, rgb), prepare(backend(do_resize=False), rgb))
    for other in (rgb.convert("L"), rgb.quantize(17), rgb.convert("RGBA")):
        with pytest.raises(ValueError, match=f"mode {other.mode}, which is not converted to the 3 channels"):
            processor(other)
    grey = backend(do_convert_rgb=False, image_mean=(0.5,), image_std=(0.5,))
    for other in (rgb.convert("1"), rgb.quantize(17), rgb.convert("I")):  # one band, but not grey levels
        with pytest.raises(ValueError, match=f"mode {other.mode}, which is not converted to the 1 channels"):
            grey(other)
    with pytest.raises(ValueError, match="got an image of 1 channels"):
        processor(noise(13, 17))


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_and_tensors_in_either_layout_equal_the_opened_image(backend: type) -> None:
    processor = backend(size=(31, 43))
    levels = noise(53, 37, 3)
    expected = prepare(processor, Image.fromarray(levels))
    first = np.ascontiguousarray(levels.transpose(2, 0, 1))
    read_only = np.asarray(Image.fromarray(levels))
    mirrored = np.ascontiguousarray(levels[:, ::-1])[:, ::-1]
    strided = np.repeat(levels, 2, axis=1)[:, ::2]
    for image in (levels, first, read_only, mirrored, strided, torch.from_numpy(levels), torch.from_numpy(first)):
        assert torch.equal(prepare(processor, image), expected)
    assert torch.equal(prepare(processor, first.transpose(1, 2, 0)), expected)
    assert torch.equal(prepare(processor, mirrored.transpose(2, 0, 1)), expected)
    for width in (37, 3, 1):  # widths that could be numbers of channels
        grey = noise(53, width)
        expected = prepare(processor, Image.fromarray(grey))
        for image in (grey, torch.from_numpy(grey)):
            assert torch.equal(prepare(processor, image), expected)
    grey = noise(53, 37)
    for image in (grey[None], grey[..., None]):
        assert torch.equal(prepare(processor, image), prepare(processor, Image.fromarray(grey)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_and_nested_lists_are_prepared_image_by_image(backend: type) -> None:
    processor = backend(size=(31, 43), image_mean=MEAN, image_std=STD)
    batch = noise(4, 53, 37, 3)
    images = [Image.fromarray(levels) for levels in batch]
    expected = torch.stack([prepare(processor, image) for image in images])
    first = batch.transpose(0, 3, 1, 2)
    for together in (images, tuple(images), [images[:1], images[1:]], batch, first, [first[:3], batch[3:]]):
        assert torch.equal(processor(together, return_tensors="pt")["pixel_values"], expected)
    for tensors in (torch.from_numpy(batch), torch.from_numpy(first), list(torch.from_numpy(batch))):
        assert torch.equal(processor(tensors, return_tensors="pt")["pixel_values"], expected)
    mixed = [images[0], batch[1], torch.from_numpy(first[2]), images[3]]
    assert torch.equal(processor(mixed, return_tensors="pt")["pixel_values"], expected)
    kind = {PlainViTImageProcessor: torch.Tensor, PlainViTImageProcessorPil: np.ndarray}[backend]
    assert all(isinstance(prepared, kind) for prepared in processor(images)["pixel_values"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_array_that_can_be_read_in_two_layouts_is_asked_about(backend: type) -> None:
    processor = backend(size=(31, 43))
    row = noise(1, 37, 3)  # ambiguous: a colour image of one row, or a grey image of width 3
    with pytest.raises(ValueError, match=r"\(1, 37, 3\): expected 1 or 3 channels.*give input_data_format"):
        processor(row)
    coloured = processor(row, input_data_format="channels_last", return_tensors="pt")["pixel_values"][0]
    assert torch.equal(coloured, prepare(processor, Image.fromarray(row)))
    grey = processor(row, input_data_format="channels_first", return_tensors="pt")["pixel_values"][0]
    assert torch.equal(grey, prepare(processor, Image.fromarray(row[0])))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_pixels_or_no_layout_is_refused(backend: type) -> None:
    for empty in (np.zeros((0, 5, 3), np.uint8), torch.zeros(3, 5, 0, dtype=torch.uint8), Image.new("RGB", (0, 5))):
        with pytest.raises(ValueError, match="which has no pixels"):
            backend()(empty)
    with pytest.raises(ValueError, match="empty list"):
        backend()([])
    for shape in ((5,), (2, 2, 3, 5, 7)):
        with pytest.raises(ValueError, match=r"expected \(height, width\)"):
            backend()(np.zeros(shape, np.uint8))
    thin = backend(size=(31, 43), resize_mode="contain")
    with pytest.raises(ValueError, match="1x500 pixels has no pixel left at 0x43"):
        thin(noise(1, 500))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint16", "bool"])
def test_levels_that_are_not_bytes_are_refused(dtype: str, backend: type) -> None:
    with pytest.raises(ValueError, match=rf"got an image of {dtype}: expected uint8 \(0..255\)"):
        backend()(noise(13, 17, 3).astype(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_floating_point_values_are_normalised_as_they_are(backend: type) -> None:
    processor = backend(do_resize=False, image_mean=MEAN, image_std=STD)
    levels = noise(13, 17, 3)
    for scaled in ((levels / 255).astype(np.float32), torch.from_numpy(levels) / 255, levels / 255):
        kept = scaled.clone() if isinstance(scaled, torch.Tensor) else scaled.copy()
        prepared = processor(scaled, do_rescale=False, return_tensors="pt")["pixel_values"][0]
        assert torch.equal(prepared, prepare(processor, levels))
        assert (scaled == kept).all()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_scaled_floating_point_tensors_are_prepared_as_timm_prepares_them(interpolation: str) -> None:
    transform = create_transform((3, 43, 43), crop_pct=0.9, interpolation=interpolation, mean=MEAN, std=STD)
    settings = {
        "size": {"shortest_edge": 47}, "crop_size": (43, 43), "do_center_crop": True, "image_mean": MEAN,
        "image_std": STD, "resample": {"bilinear": 2, "bicubic": 3}[interpolation], "do_rescale": False,
    }  # fmt: skip
    for shape in ((3, 97, 61), (3, 30, 211)):
        scaled = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 3 - 1
        expected = transform(scaled.clone())
        for image in (scaled, scaled.numpy(), scaled.permute(1, 2, 0), scaled.double()):
            assert torch.equal(prepare(PlainViTImageProcessor(**settings), image), expected)
            # torch computes filter weights in float32, Pillow in float64; the values have a range of 3.
            torchs, pillows = (prepare(backend(**settings, do_normalize=False), image) for backend in BACKENDS)
            torch.testing.assert_close(pillows, torchs, rtol=0, atol=3 * 1e-5)


@pytest.mark.parametrize("resample", [4, 5])
def test_filters_that_torch_has_not_are_refused_for_what_torch_resizes(resample: int) -> None:
    scaled = torch.rand(3, 97, 61)
    with pytest.raises(ValueError, match=f'resample={resample} on cpu: pass uint8 images .* or use backend="pil"'):
        PlainViTImageProcessor(resample=resample, do_rescale=False)(scaled)
    with pytest.raises(ValueError, match=f"torch cannot resize with resample={resample}"):
        PlainViTImageProcessor(resample=resample, resize_with="torch")(noise(97, 61, 3))
    settings = {"size": (31, 43), "resample": resample, "do_normalize": False, "do_rescale": False}
    prepared = prepare(PlainViTImageProcessorPil(**settings), scaled)
    planes = [np.asarray(Image.fromarray(plane).resize((43, 31), resample)) for plane in scaled.numpy()]
    assert torch.equal(prepared, torch.from_numpy(np.stack(planes)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels, model", [(4, 3), (3, 1), (2, 3)])
def test_an_array_of_other_channels_than_the_models_is_refused(channels: int, model: int, backend: type) -> None:
    processor = backend(image_mean=MEAN[:model], image_std=STD[:model])
    with pytest.raises(ValueError, match="channel"):
        processor(noise(13, 17, channels))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_models_of_any_number_of_channels_prepare_each_as_pillow_alone(channels: int, backend: type) -> None:
    mean, std = (0.1, 0.2, 0.3, 0.4, 0.5)[:channels], (0.6, 0.7, 0.8, 0.9, 1.0)[:channels]
    levels = noise(channels, 37, 53)
    planes = [Image.fromarray(plane).resize((43, 31), Image.Resampling.BILINEAR) for plane in levels]
    expected = torch.from_numpy(np.stack([np.asarray(plane) for plane in planes]))
    expected = v2.functional.normalize(expected / 255, mean, std)
    processor = backend(size=(31, 43), image_mean=mean, image_std=std)
    for image in (levels, torch.from_numpy(levels), levels.transpose(1, 2, 0)):
        assert torch.equal(prepare(processor, image), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["LA", "RGBA", "CMYK"])
def test_an_image_that_has_the_channels_of_the_model_is_prepared_as_timm_prepares_it(mode: str, backend: type) -> None:
    image = Image.merge(mode, [Image.fromarray(plane) for plane in noise(Image.getmodebands(mode), 97, 61)])
    mean = (0.1, 0.2, 0.3, 0.4)[: len(image.getbands())]
    transform = create_transform((len(mean), 43, 43), crop_pct=0.9, interpolation="bicubic", mean=mean, std=mean)
    processor = backend(
        size={"shortest_edge": 47}, crop_size=(43, 43), do_center_crop=True, resample=3, image_mean=mean, image_std=mean
    )
    assert torch.equal(prepare(processor, image), transform(image))  # Pillow premultiplies RGBA and LA by alpha
    with pytest.raises(ValueError, match=f"mode RGB, which is not converted to the {len(mean)} channels"):
        processor(Image.fromarray(noise(13, 17, 3)))


# Sources of images


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """Start a server for the folder of images, and return its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()


@pytest.mark.slow(quick=["PlainViTImageProcessorPil"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_urls_are_opened_as_files_are(backend: type, server: str, folder: Path) -> None:
    processor = backend(size=(31, 43))
    data = base64.b64encode((folder / "rotated.jpg").read_bytes()).decode()
    from_urls = processor([f"{server}/rotated.jpg", f"data:image/jpeg;base64,{data}"], return_tensors="pt")
    expected = prepare(processor, folder / "rotated.jpg")
    assert all(torch.equal(prepared, expected) for prepared in from_urls["pixel_values"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_is_not_an_image_is_refused(backend: type, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        backend()(tmp_path / "missing.png")
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(Image.UnidentifiedImageError):
        backend()(tmp_path / "text.png")
    with pytest.raises(TypeError):
        backend()({"image": 3})


# Settings


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"resize_with": "torchvision"}, r"resize_with is 'torchvision': expected one of \('pillow', 'torch'\)"),
        ({"resize_with": None}, "resize_with is None: expected one of"),
        ({"sise": 3}, r"has no setting \['sise'\]"),
        ({"resize_mode": "stretch"}, "resize_mode is 'stretch': expected one of"),
        ({"resize_mode": "cover", "size": {"shortest_edge": 7}}, "'cover' needs a size with height and width"),
        ({"pad_color": (1, 2)}, "expected one value from 0 to 255 per channel, 3 in total"),
        ({"image_mean": 0.5}, "one number per channel"),
        ({"image_mean": (0.5,)}, "one number per channel"),
        ({"image_std": (0.5, 0.0, 0.5)}, "one per channel, greater than 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict, message: str, backend: type) -> None:
    with pytest.raises(ValueError, match=message):
        backend(**settings)


# Invalid values, in a file or in a call: for any numeric setting, and for single settings.
ODD: list[Any] = [math.nan, math.inf, -math.inf, True, "1", "false", [[1]], {"height": "7"}, 10**9, 10**400, b"1"]
ODD_IN: dict[str, list[Any]] = {
    "image_mean": [], "image_std": [0, -7], "rescale_factor": [0, -7], "resample": [8, -1, 2.5], "pad_color": [-1, 256],
    "size": [0, -7, {"height": 7, "width": 0}, {"height": 2**15, "width": 2**15}, {"height": math.nan, "width": 7}],
    "crop_size": [0, -7, {"height": 7, "width": 1e3}, {"height": True, "width": 7}],
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ODD_IN)
def test_a_setting_of_numbers_takes_no_others_from_a_file_or_a_caller(name: str, backend: type) -> None:
    for value in [*ODD, *ODD_IN[name]]:
        listed = [[0.5, value, 0.5]] if name in ("image_mean", "image_std", "pad_color") else []
        for odd in [value, *listed]:
            with pytest.raises((ValueError, TypeError)) as caught:
                backend(**{name: odd})
            assert len(str(caught.value)) < 1000
            if name != "pad_color":  # not an argument of a call
                with pytest.raises((ValueError, TypeError, StrictDataclassError)):
                    backend()(noise(13, 17, 3), do_center_crop=True, **{name: odd})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_convert_rgb"])
def test_a_word_is_no_truth_value(name: str, backend: type) -> None:
    odd: list[Any] = ["false", 0, math.nan, []]
    for value in odd:
        with pytest.raises(ValueError, match=f"{name} is .*: expected True or False"):
            backend(**{name: value})


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_of_any_ratio_costs_bounded_memory(backend: type) -> None:
    line = np.zeros((2, 60_000, 3), np.uint8)
    with pytest.raises(ValueError, match="would become 224x6720000"):
        backend(size={"shortest_edge": 224})(line)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_refuses_other_channels_and_settings_that_belong_to_the_processor(backend: type) -> None:
    with pytest.raises(ValueError, match="one number per channel"):
        backend()(noise(13, 17, 3), image_mean=[0.5])
    with pytest.raises(TypeError, match="resize_mode"):
        backend()(noise(13, 17, 3), resize_mode="cover")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_processor_reaches_the_workers_of_a_loader_whole(backend: type) -> None:
    processor = backend(
        size=(31, 43), resize_mode="contain", pad_color=(1, 2, 3), crop_size=(31, 43), do_center_crop=True
    )
    again = pickle.loads(pickle.dumps(processor))
    assert again.to_dict() == processor.to_dict()
    image = noise(53, 37, 3)
    assert torch.equal(prepare(again, image), prepare(processor, image))


def test_the_backend_of_pillow_refuses_to_resize_with_torch() -> None:
    with pytest.raises(ValueError, match="resize_with is 'torch', which the Pillow backend does not support"):
        PlainViTImageProcessorPil(resize_with="torch")


# On other devices; "meta" replaces an accelerator, test_gpu.py uses a real one


def test_tensors_elsewhere_are_prepared_there_and_images_can_be_sent_there() -> None:
    processor = PlainViTImageProcessor(size=(31, 43))
    there = processor(torch.zeros(2, 3, 53, 37, dtype=torch.uint8, device="meta"), return_tensors="pt")["pixel_values"]
    assert (there.shape, there.device.type) == ((2, 3, 31, 43), "meta")
    images = [Image.fromarray(noise(53, 37, 3)), noise(53, 37, 3)]
    assert processor(images, device="meta", return_tensors="pt")["pixel_values"].device.type == "meta"
    assert torch.equal(
        processor(images, device="cpu", return_tensors="pt")["pixel_values"],
        processor(images, return_tensors="pt")["pixel_values"],
    )


def test_images_on_several_devices_are_refused_and_by_the_backend_of_pillow_all_but_the_cpus() -> None:
    there = torch.zeros(3, 53, 37, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="on the CPU together with tensors on an accelerator: move them"):
        PlainViTImageProcessor()([there, Image.fromarray(noise(53, 37, 3))])
    with pytest.raises(ValueError, match=r'tensor on meta.*backend="torchvision"'):
        PlainViTImageProcessorPil()(there)
