"""From files to training pixels: decoding at reduced size, crops and batches."""

import errno
import io
import random
import struct
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.ExifTags
import PIL.Image
import PIL.ImageFile
import PIL.ImageFilter
import PIL.TiffTags
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from sklearn.datasets import load_sample_image
from torch.utils.data import DataLoader
from torchvision.transforms import InterpolationMode, v2
from transformers import ViTImageProcessor

from plain_vit import PlainViTImageProcessor
from plain_vit.errors import DataError, TrainingError
from plain_vit.files.images import decoding, read_image
from plain_vit.training.data import augmentation
from plain_vit.training.data.augmentation import AugmentedImages, CroppedImage, training_transform
from plain_vit.training.data.decoding import ProcessedImages, as_files, decode_image, open_stored, read_rows, try_image
from plain_vit.training.data.sampling import ShuffledStream
from plain_vit.training.hardware.processes import loading_options
from tests.model import bare

ORIENTATION = PIL.ExifTags.Base.Orientation
SIZE = (37, 29)  # height, width of a result


def photograph(width: int, height: int) -> PIL.Image.Image:
    """Return a photograph with detail at every scale."""
    return PIL.Image.fromarray(load_sample_image("flower.jpg")).resize((width, height), PIL.Image.Resampling.LANCZOS)


def stored(image: PIL.Image.Image, kind: str, **options: object) -> dict[str, object]:
    """Return an image as `datasets` stores it."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return {"bytes": file.getvalue(), "path": None}


def plain_crop(interpolation: InterpolationMode = InterpolationMode.BILINEAR) -> v2.RandomResizedCrop:
    """Return torchvision's own transform."""
    return v2.RandomResizedCrop(SIZE, scale=(0.1, 1), interpolation=interpolation)


def both_ways(
    file: dict[str, object], seed: int, interpolation: InterpolationMode, scaled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels (C, H, W) of a random crop by our code and by torchvision, from the same random state."""
    crop = plain_crop(interpolation)
    torch.manual_seed(seed)
    ours = CroppedImage(SIZE, interpolation, crop=crop, scaled=scaled)(open_stored(file))
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    theirs = v2.functional.pil_to_tensor(crop(datasets.Image(mode="RGB").decode_example(file)))
    assert torch.equal(torch.get_rng_state(), after), "another number of draws"
    return ours.float(), theirs.float()


def change_within_half_a_pixel(levels: torch.Tensor) -> torch.Tensor:
    """Return how much levels (C, H, W) of a smooth image may change if it is shifted by half a pixel."""
    padded = torch.nn.functional.pad(levels, (1, 1, 1, 1), mode="replicate")
    around = padded.unfold(1, 3, 1).unfold(2, 3, 1).flatten(-2)
    return 0.5 * (around.amax(-1) - around.amin(-1)) + 2  # 2 for rounding: once in the file, twice in resizing


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
@pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
def test_images_that_are_decoded_whole_have_torchvisions_crops(mode, interpolation):
    image = photograph(211, 157).convert(mode)
    kinds = {"RGB": ["png", "jpeg", "webp"], "L": ["png", "jpeg"], "CMYK": ["jpeg"]}.get(mode, ["png"])
    for kind in kinds:
        for seed in range(10):
            ours, theirs = both_ways(stored(image, kind), seed, interpolation, scaled=kind != "jpeg")
            # Both round after each of two passes, torch with weights of at most 16 bits, Pillow with 22 bits.
            assert (ours - theirs).abs().max() <= (1 if interpolation is InterpolationMode.BILINEAR else 2)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_crops_of_files_decoded_at_less_than_their_size_are_moved_by_half_a_pixel_at_most(mode):
    smooth = photograph(1201, 803).filter(PIL.ImageFilter.GaussianBlur(40)).convert(mode)
    file = stored(smooth, "jpeg", quality=95)
    for seed in range(20):
        ours, theirs = both_ways(file, seed, InterpolationMode.BILINEAR, scaled=True)
        assert ((ours - theirs).abs() <= change_within_half_a_pixel(theirs)).all()


def test_crops_of_files_decoded_at_less_than_their_size_are_near_to_those_of_whole_ones():
    file = stored(photograph(1201, 803), "jpeg", quality=95)
    pairs = [both_ways(file, seed, InterpolationMode.BILINEAR, scaled=True) for seed in range(20)]
    # In levels, for a photograph full of edges: measured 1.7 on average, and 3.3 for the worst crop.
    assert np.mean([(ours - theirs).abs().mean() for ours, theirs in pairs]) < 2.5
    assert max((ours - theirs).abs().mean() for ours, theirs in pairs) < 5
    ours, theirs = both_ways(file, 1, InterpolationMode.BILINEAR, scaled=False)
    assert (ours - theirs).abs().max() <= 1


def test_a_file_is_decoded_at_the_smallest_size_that_its_crop_needs():
    file = stored(photograph(421, 331), "jpeg")
    seen = set()
    for seed in range(60):
        crop = plain_crop()
        torch.manual_seed(seed)
        image = open_stored(file)
        part = crop.make_params([image])
        torch.manual_seed(seed)
        CroppedImage(SIZE, InterpolationMode.BILINEAR, crop=crop)(image)
        divisor = round(421 / image.width)
        seen.add(divisor)
        excess = min(part["height"] / SIZE[0], part["width"] / SIZE[1]) / divisor
        assert excess >= 1
        assert excess < 2.1 or divisor == 8  # Pillow's sizes are integers, rounded up in close cases
    assert seen == {2, 4, 8}
    whole = open_stored(file)
    CroppedImage(SIZE, InterpolationMode.BILINEAR, scaled=False)(whole)
    assert whole.size == (421, 331)


def damaged(file: bytes, draw: random.Random) -> bytes:
    """Return a file unchanged, truncated, or with some bytes changed, inserted or zeroed."""
    place, kind = draw.randrange(2, len(file)), draw.choice(["whole", "whole", "cut", "end", "flip", "longer", "clear"])
    some = draw.randbytes(5)
    return {
        "whole": file, "cut": file[:place], "end": file[: -draw.randrange(1, 8)],
        "flip": file[:place] + some[:1] + file[place + 1 :], "longer": file[:place] + some + file[place:],
        "clear": file[:place] + bytes(9) + file[place + 9 :],
    }[kind]  # fmt: skip


@pytest.mark.slow
def test_simplejpeg_reads_the_pixels_that_pillow_reads_and_no_file_that_pillow_refuses(monkeypatch):
    draw, crop = random.Random(0), CroppedImage((16, 16), InterpolationMode.BILINEAR, crop=v2.RandomResizedCrop(16))
    fast = augmentation.jpeg_levels
    outcomes: Counter[str] = Counter()
    for seed in range(200):
        mode = draw.choice(["RGB", "RGB", "RGB", "L", "CMYK"])
        as_rgb = mode == "RGB" and draw.random() < 0.2
        options = {"quality": draw.randrange(5, 100), "progressive": draw.random() < 0.3, "keep_rgb": as_rgb,
                   "subsampling": 0 if as_rgb else draw.randrange(3),
                   "restart_marker_blocks": draw.choice([0, 2])}  # fmt: skip
        size = draw.randrange(8, 200), draw.randrange(8, 200)
        file = stored(photograph(*size).convert(mode), "jpeg", **options)
        file["bytes"] = damaged(file["bytes"], draw)
        used: list[np.ndarray | None] = []
        results = []
        for reader in (fast, lambda image: None):

            def recorded(image, reader=reader, used=used):
                used.append(reader(image))
                return used[-1]

            monkeypatch.setattr(augmentation, "jpeg_levels", recorded)
            torch.manual_seed(seed)
            results.append(try_image(file, "a file", crop))
        (levels, broken), (expected, refused) = results
        assert broken == refused
        assert (levels is None) == (expected is None)
        assert levels is None or torch.equal(levels, expected)
        outcomes["refused" if broken else "simplejpeg" if used and used[0] is not None else "Pillow"] += 1
    assert min(outcomes.values()) > 10, outcomes


def test_an_image_that_was_decoded_smaller_is_cropped_as_it_is():
    image = open_stored(stored(photograph(1201, 803), "jpeg"))
    CroppedImage((50, 50), InterpolationMode.BILINEAR)(image)
    assert image.size == (151, 101)
    small = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(CroppedImage((101, 151), InterpolationMode.BILINEAR)(image), small)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_they_say(orientation):
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    smooth = photograph(1201, 803).filter(PIL.ImageFilter.GaussianBlur(40))
    file = stored(smooth, "jpeg", exif=exif, quality=95)
    upright = datasets.Image(mode="RGB").decode_example(file)
    assert upright.size == ((1201, 803) if orientation < 5 else (803, 1201))
    assert np.array_equal(np.array(decode_image(open_stored(file))), np.array(upright))
    ours, theirs = both_ways(file, 3, InterpolationMode.BILINEAR, scaled=False)
    assert (ours - theirs).abs().max() <= 1
    ours, theirs = both_ways(file, 3, InterpolationMode.BILINEAR, scaled=True)
    assert ((ours - theirs).abs() <= change_within_half_a_pixel(theirs)).all()


@pytest.mark.parametrize("kind, count, value", [
    ("SHORT", 1, "0000"), ("SHORT", 1, "0900"), ("SHORT", 1, "ffff"), ("SIGNED_SHORT", 1, "ffff"), ("SHORT", 0, ""),
    ("SHORT", 2, "06000600"), ("LONG", 1, "06000000"), ("BYTE", 1, "06"), ("ASCII", 2, "3600"), ("UNDEFINED", 1, "06"),
    ("FLOAT", 1, "0000c07f"), ("FLOAT", 1, "0000d040"), ("RATIONAL", 1, "0600000000000000"),
    ("RATIONAL", 1, "0600000001000000"),
])  # fmt: skip
def test_an_orientation_of_any_type_and_value_is_read_as_datasets_does(kind, count, value):
    """Otherwise the crop would lie outside the image, and be black."""
    content = bytes.fromhex(value)
    start = content.ljust(4, b"\0") if len(content) <= 4 else struct.pack("<I", 26)
    tag = struct.pack("<HHI", ORIENTATION, getattr(PIL.TiffTags, kind), count) + start
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + tag + bytes(4) + (content if len(content) > 4 else b"")
    file = stored(photograph(120, 80), "jpeg", exif=exif)
    assert np.array_equal(decode_image(open_stored(file)), datasets.Image(mode="RGB").decode_example(file))
    ours, theirs = both_ways(file, 3, InterpolationMode.BILINEAR, scaled=False)
    assert (ours - theirs).abs().max() <= 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_evaluated_images_are_decoded_as_datasets_does(mode):
    file = stored(photograph(31, 23).convert(mode), "png")
    expected = datasets.Image(mode="RGB").decode_example(file)
    assert np.array_equal(np.array(decode_image(open_stored(file))), np.array(expected))


def test_a_file_cut_short_is_named_at_whatever_size_it_is_decoded():
    file = stored(photograph(1201, 803), "jpeg")
    short = {"bytes": file["bytes"][: len(file["bytes"]) // 2], "path": "cut.jpg"}
    for scaled in (True, False):
        levels, broken = try_image(short, "", CroppedImage(SIZE, InterpolationMode.BILINEAR, scaled=scaled))
        assert levels is None
        assert broken.startswith("cut.jpg (")


def test_what_pillow_warns_of_in_a_damaged_file_is_not_shown():
    """Such a file may cause a warning for each of 65,535 tags."""
    file = io.BytesIO()
    photograph(40, 30).save(file, "tiff")
    content = bytearray(file.getvalue())
    last_tag = struct.unpack_from("<I", content, 4)[0] + 2 + 12 * (struct.unpack_from("<H", content, 8)[0] - 1)
    struct.pack_into("<I", content, last_tag + 4, 7)  # 7 values instead of one
    with pytest.warns(UserWarning, match="had too many entries: 7"):
        PIL.Image.open(io.BytesIO(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with decoding():
            PIL.Image.open(io.BytesIO(content)).load()


READERS: dict[str, Callable[[Path], object]] = {
    "training": lambda path: raised(try_image({"bytes": None, "path": str(path)}, "")[1]),
    "analysis and calibration": read_image,
}


def raised(broken: str) -> None:
    """Raise the error that stops a run at a broken image."""
    if broken:
        raise DataError(broken)


@pytest.mark.parametrize("error", [
    RuntimeError("Failed to decode frame 0"), NotImplementedError("pixel format"), AttributeError("istep"),
    OSError("truncated"), KeyError(3), SyntaxError("broken"), PIL.Image.DecompressionBombError("size"),
])  # fmt: skip
@pytest.mark.parametrize("reader", READERS)
def test_whatever_a_decoder_raises_the_image_is_named(reader, error, tmp_path, monkeypatch):
    path = tmp_path / "photo.png"
    photograph(9, 7).save(path)
    READERS[reader](path)
    for owner, name in ((PIL.ImageFile.ImageFile, "load"), (PIL.Image, "open"), (PIL.Image.Image, "getexif")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, raising(error))
            with pytest.raises(DataError, match=f"photo.png .*{error.args[0]}"):
                READERS[reader](path)


@pytest.mark.parametrize("error", [
    MemoryError(), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left"), OSError(errno.EMFILE, "Too many files")
])  # fmt: skip
@pytest.mark.parametrize("reader", READERS)
def test_what_the_computer_lacks_is_not_the_fault_of_an_image(reader, error, tmp_path, monkeypatch):
    photograph(9, 7).save(tmp_path / "photo.png")
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", raising(error))
    with pytest.raises(type(error)) as found:
        READERS[reader](tmp_path / "photo.png")
    assert found.value is error


def raising(error: BaseException) -> Callable[..., None]:
    """Return a function that raises an error."""

    def function(*args: object, **kwargs: object) -> None:
        raise error

    return function


def test_an_image_that_the_image_processor_refuses_is_named_and_the_others_stay(tmp_path):
    for name, size in (("wide", (30, 20)), ("thin", (5000, 1))):
        PIL.Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    paths = [str(tmp_path / f"{name}.png") for name in ("wide", "thin")]
    rows = Dataset.from_dict({"image": paths, "label": [0, 1]}).cast_column("image", Image())
    processor = PlainViTImageProcessor(
        size={"shortest_edge": 256}, crop_size={"height": 24, "width": 24}, do_center_crop=True
    )
    batch = ProcessedImages(processor)(read_rows(as_files(rows), [0, 1]))
    assert batch["pixel_values"].shape == (2, 3, 24, 24)
    assert batch["broken"][0] == ""
    assert batch["broken"][1].startswith(f"{paths[1]} (an image of 1x5000 pixels would become")
    assert torch.equal(
        batch["pixel_values"][:1], processor(PIL.Image.new("RGB", (30, 20), "red"), return_tensors="pt").pixel_values
    )


def test_a_damaged_avif_file_is_named():
    file: Any = stored(photograph(61, 47), "avif")
    begin = file["bytes"].find(b"mdat") + 4
    file["bytes"] = file["bytes"][:begin] + bytes(16) + file["bytes"][begin + 16 :]
    image, broken = try_image(file, "row 3")
    assert image is None
    assert broken.startswith("row 3 (RuntimeError: Failed to decode")


# Batches


@pytest.fixture
def photographs() -> Dataset:
    """Return 5 JPEG files of several sizes."""
    sizes = [(401, 307), (613, 401), (211, 523), (1201, 803), (97, 53)]
    rows = {"image": [stored(photograph(*size), "jpeg") for size in sizes], "label": [0, 1, 2, 0, 1]}
    return Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(3)}))


@pytest.mark.slow
def test_batches_of_jpeg_files_do_not_depend_on_workers_or_on_how_they_are_read(photographs):
    transform = training_transform(
        ViTImageProcessor(size={"height": 37, "width": 29}),
        crop_scale=0.1, horizontal_flip=0.5, augmentation="randaugment", random_erasing=0.5,
    )  # fmt: skip
    images = AugmentedImages(photographs, transform, seed=1)
    places = list(ShuffledStream(5, length=12, seed=2))
    one_by_one = torch.stack([images[place]["pixel_values"] for place in places])
    for workers in (0, 2):
        stream = ShuffledStream(5, length=12, seed=2)
        batches = DataLoader(images, batch_size=3, sampler=stream, **loading_options(workers))
        seen = torch.cat([batch["pixel_values"] for batch in batches])
        assert seen.dtype == torch.uint8
        assert torch.equal(seen, one_by_one)
    # A resumed run begins in the middle.
    rest = DataLoader(images, batch_size=3, sampler=ShuffledStream(5, length=12, seed=2, start=6))
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in rest]), one_by_one[6:])


def test_a_batch_is_normalised_as_its_images_are():
    processor = ViTImageProcessor(size={"height": 37, "width": 29}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 1])
    transform = training_transform(processor)
    levels = torch.randint(0, 256, (3, 3, 37, 29), dtype=torch.uint8)
    kept = levels.clone()
    assert torch.equal(transform.normalize(levels), torch.stack([transform.normalize(image) for image in levels]))
    assert torch.equal(levels, kept)
    expected = processor(levels, do_resize=False, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(transform.normalize(levels), expected, rtol=0, atol=1e-6)  # scaled to [0, 1] first


def test_an_opened_image_can_be_transformed_again():
    image = open_stored(stored(photograph(1201, 803), "jpeg"))
    transform = training_transform(ViTImageProcessor(size={"height": 37, "width": 29}), crop_scale=0.1)
    torch.manual_seed(0)
    first = [transform(image) for _ in range(5)]
    torch.manual_seed(0)
    assert all(torch.equal(transform(image), pixels) for pixels in first)
    assert image.size == (1201, 803)


def test_erased_parts_have_the_mean_colour():
    processor = ViTImageProcessor(size={"height": 37, "width": 29}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 1])
    white = PIL.Image.new("RGB", (37, 29), (255, 255, 255))
    pixels = training_transform(processor, random_erasing=1.0)(white)
    unchanged = training_transform(processor)(white)
    erased = pixels != unchanged
    assert erased.any()
    assert (erased == erased[:1]).all()
    half_a_level = 0.5 / 255 / 0.4
    assert pixels[erased].abs().max() <= half_a_level + 1e-6


def test_resizing_that_torchvision_lacks_is_refused():
    with pytest.raises(TrainingError, match="resizes with BOX: expected bilinear"):
        training_transform(ViTImageProcessor(resample=PIL.Image.Resampling.BOX))


def test_a_set_without_a_readable_image_ends_the_run():
    rows = {"image": [{"bytes": b"no image", "path": "one.jpg"}] * 3, "label": [0, 1, 2]}
    broken = Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(3)}))
    images = AugmentedImages(broken, training_transform(ViTImageProcessor()), seed=0)
    with pytest.raises(DataError, match=r"None of the 3 training images can be read, the first one is one.jpg"):
        images[0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "import plain_vit.training.data",
        "from plain_vit.inference import calibration\n"
        "try: calibration.image_sets('.', None, None)\n"
        "except Exception as error: assert 'image files' in str(error), error",
    ],
    ids=["training", "calibration"],
)
def test_pillow_tries_the_common_formats_first(program, tmp_path):
    orders = []
    for before in (program, "PIL.Image.preinit()"):
        text = f"import PIL.Image\n{before}\nPIL.Image.init()\nprint(PIL.Image.ID)"
        orders.append(bare.run(text, cwd=tmp_path, home=tmp_path))
    assert orders[0] == orders[1]
