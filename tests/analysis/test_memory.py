"""Memory of `show`: one image of bounded size at a time, for any number of images and any claimed size."""

import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from transformers.image_utils import load_image

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor, PlainViTModel
from plain_vit.analysis import sheet
from plain_vit.analysis.streams import pixel_batches
from plain_vit.errors import DataError
from plain_vit.files import images as image_files
from plain_vit.files.images import BYTES_PER_PIXEL, MOST_BYTES, MOST_BYTES_PER_PIXEL, read_image
from tests.processes import in_a_process, kilobytes, server

BOUND = 220  # MB beyond the process, for images of any number and size: MOST_BYTES, and room
SMALL: dict[str, Any] = {
    "hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 5, "intermediate_size": 23, "image_size": 24,
    "patch_size": 6,
}  # fmt: skip
MODES = ("1", "P", "RGB", "RGBA")
pytestmark = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux tells peaks")


def photograph(path: Path, width: int, height: int) -> Path:
    """Write a JPEG file with this many pixels quickly."""
    tile = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    tile.resize((width, height), Image.Resampling.NEAREST).save(path, quality=50)
    return path


def added_by_sheets(folder: Path, cases: dict[str, Sequence[Path]]) -> dict[str, tuple[float, str]]:
    """Draw a sheet of each case in this process; return what it added to the peak in MB, and why there is none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    whole, added = sheet.SECTIONS, {}
    for case, files in cases.items():
        fields = SMALL | ({"num_hidden_layers": 3, "image_size": 186, "num_labels": 5} if case == "patches" else {})
        model = (PlainViTForImageClassification if case == "patches" else PlainViTModel)(PlainViTConfig(**fields))
        processor = PlainViTImageProcessor(size={"height": fields["image_size"], "width": fields["image_size"]})
        # One figure is enough for the largest images.
        sections: Any = whole if len(files) > 1 else [one for one in whole if one.name == "rollout"]
        sheet.SECTIONS = sections
        gc.collect()
        trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, said = kilobytes("VmRSS"), ""
        try:
            sheet.draw_sheet(files, model.eval(), processor, folder / case, progress=False)
        except DataError as error:
            said = str(error)
        added[case] = (kilobytes("VmHWM") - before) / 1024, said
    return added


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, str]]:
    """Return how much sheets of extreme images, drawn one after the other in one process, added to its peak memory."""
    folder = tmp_path_factory.mktemp("images")
    one = photograph(folder / "photo.jpg", 4000, 3000)
    photos = [folder / f"photo {i}.jpg" for i in range(8)]
    for path in photos:
        os.link(one, path)
    bomb = folder / "bomb.png"
    Image.new("1", (13_000, 13_000)).save(bomb)
    assert bomb.stat().st_size < 30_000
    small = [folder / f"small {i}.png" for i in range(6)]
    for i, path in enumerate(small):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(path)
    for mode in MODES:
        side = int((MOST_BYTES / BYTES_PER_PIXEL.get(mode, MOST_BYTES_PER_PIXEL)) ** 0.5)
        Image.new(mode, (side, side)).save(folder / f"largest {mode}.png", compress_level=1)
    cases = {
        "bomb": [bomb], "photos": photos, "patches": small, "jpeg": [photograph(folder / "large.jpg", 10_000, 10_000)],
        **{mode: [folder / f"largest {mode}.png"] for mode in MODES},
    }  # fmt: skip
    return in_a_process(added_by_sheets, folder, cases, context=server)


@pytest.mark.slow
def test_memory_is_bounded_for_many_photographs_and_for_bombs(added: dict[str, tuple[float, str]]) -> None:
    megabytes, said = added["bomb"]
    assert "has 13000 x 13000 pixels" in said
    assert megabytes < 30
    megabytes, said = added["photos"]
    assert not said
    assert megabytes < BOUND  # 384 MB if kept


@pytest.mark.slow
def test_attention_to_many_patches_is_computed_of_one_image_at_a_time(added: dict[str, tuple[float, str]]) -> None:
    megabytes, said = added["patches"]
    assert not said
    assert megabytes < 600  # one image takes 310 MB, eight take 390; all at once they took 1,090


@pytest.mark.slow
@pytest.mark.parametrize("case", ["jpeg", *MODES])
def test_memory_is_bounded_for_the_largest_images_that_are_decoded(
    case: str, added: dict[str, tuple[float, str]]
) -> None:
    megabytes, said = added[case]
    assert not said
    assert megabytes < BOUND


def test_one_image_is_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for i in range(5):
        paths.append(tmp_path / f"{i}.png")
        Image.new("RGB", (20, 10), (i, i, i)).save(paths[-1])
    prepared: list[int] = []
    opened: list[int] = []

    def counted(path: Path) -> Image.Image:
        opened.append(1)
        return read_image(path)

    class Processor(PlainViTImageProcessor):
        def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
            prepared.append(len(opened))
            return super().__call__(images, *args, **options)

    (batch,) = pixel_batches(map(counted, paths), Processor(size={"height": 4, "width": 6}), 8)
    assert prepared == [1, 2, 3, 4, 5]
    whole = PlainViTImageProcessor(size={"height": 4, "width": 6})(
        [Image.open(path) for path in paths], return_tensors="pt"
    )
    torch.testing.assert_close(batch, whole["pixel_values"], rtol=0, atol=0)


def test_jpeg_files_are_decoded_smaller_only_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = photograph(tmp_path / "photo.jpg", 330, 170)
    assert read_image(path).size == (330, 170)
    np.testing.assert_array_equal(np.asarray(read_image(path)), np.asarray(Image.open(path)))
    monkeypatch.setattr(image_files, "MOST_BYTES", 60_000)
    assert read_image(path).size == (165, 85)
    monkeypatch.setattr(image_files, "MOST_BYTES", 4000)
    assert read_image(path).size == (42, 22)
    monkeypatch.setattr(image_files, "MOST_BYTES", 3200)
    with pytest.raises(DataError, match="photo.jpg has 330 x 170 pixels"):
        read_image(path)
    Image.open(path).save(tmp_path / "progressive.jpg", progressive=True)
    monkeypatch.setattr(image_files, "MOST_BYTES", 60_000)
    with pytest.raises(DataError, match="progressive.jpg has 330 x 170 pixels"):  # its coefficients are held whole
        read_image(tmp_path / "progressive.jpg")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_read_upright_as_transformers_reads_them(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / "photo.png"
    Image.open(photograph(tmp_path / "photo.jpg", 33, 17)).save(path, exif=exif)
    image = read_image(path)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(load_image(str(path))))
    assert image.size == ((33, 17) if orientation < 5 else (17, 33))


def test_an_image_that_is_turned_is_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    path = tmp_path / "photo.png"
    Image.new("RGB", (40, 20)).save(path, exif=exif)
    monkeypatch.setattr(image_files, "MOST_BYTES", 40 * 20 * 8)
    assert read_image(path).size == (20, 40)
    monkeypatch.setattr(image_files, "MOST_BYTES", 40 * 20 * 8 - 1)
    with pytest.raises(DataError, match="photo.png has 40 x 20 pixels"):
        read_image(path)


def test_a_file_that_is_no_image_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (20, 10)).save(good)
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match="bad.png cannot be read as an image"):
        sheet.draw_sheet([good] * 50 + [bad], torch.nn.Identity(), None, tmp_path / "page")
    assert not (tmp_path / "page").exists()
