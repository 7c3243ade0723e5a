"""Memory of `show`: one image at a time, of bounded size, however many there are and whatever they claim."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from transformers.image_utils import load_image

from plain_vit import PlainViTImageProcessor
from plain_vit.analysis import photographs
from plain_vit.analysis.photographs import BYTES_PER_PIXEL, MOST_BYTES, MOST_BYTES_PER_PIXEL, ImageFiles, read_image
from plain_vit.analysis.streams import pixel_batches
from plain_vit.errors import DataError
from tests import ROOT

BOUND = 220  # MB beyond the process, for images of any number and size: MOST_BYTES, and room
MEASURE = """
import json, sys
from pathlib import Path
from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor, PlainViTModel
from plain_vit.analysis.sheet import draw_sheet
from plain_vit.errors import DataError

def resident(peak):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM" if peak else "VmRSS")) / 1024

config = PlainViTConfig(**json.loads(sys.argv[4]))
kind = PlainViTForImageClassification if "num_labels" in sys.argv[4] else PlainViTModel
model, processor = kind(config).eval(), PlainViTImageProcessor.from_pretrained(sys.argv[2])
out, results = Path(sys.argv[1]), {}
for case, files in json.loads(sys.argv[3]).items():
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, said = resident(peak=False), ""
    try:
        draw_sheet(files, model, processor, out / case, progress=False)
    except DataError as error:
        said = str(error)
    results[case] = [resident(peak=True) - before, said]
print(json.dumps(results))
"""
pytestmark = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux tells peaks")


def photograph(path: Path, width: int, height: int) -> Path:
    """Write a JPEG file of this many pixels that is quick to make."""
    tile = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    tile.resize((width, height), Image.Resampling.NEAREST).save(path, quality=50)
    return path


SMALL: dict[str, Any] = {
    "hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 5, "intermediate_size": 23, "image_size": 24,
    "patch_size": 6,
}  # fmt: skip


def measured(
    folder: Path, cases: dict[str, list[Path]], fields: dict[str, Any] = SMALL
) -> dict[str, tuple[float, str]]:
    """Draw the sheets of these images in a process of its own; return what each added to its peak, in MB.

    Args:
        folder: For the sheets.
        cases: Images by the name of the sheet.
        fields: Those of the model's config; one with `num_labels` is a classifier.
    """
    side = fields["image_size"]
    PlainViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder / "processor")
    words = [
        str(folder),
        str(folder / "processor"),
        json.dumps({case: [str(file) for file in files] for case, files in cases.items()}),
        json.dumps(fields),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", MEASURE, *words], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {case: (added, said) for case, (added, said) in json.loads(run.stdout).items()}


@pytest.mark.slow
def test_memory_is_bounded_for_many_photographs_and_for_bombs(tmp_path: Path) -> None:
    one = photograph(tmp_path / "photo.jpg", 4000, 3000)
    photos = []
    for i in range(8):
        photos.append(tmp_path / f"photo {i}.jpg")
        os.link(one, photos[-1])
    bomb = tmp_path / "bomb.png"
    Image.new("1", (13_000, 13_000)).save(bomb)
    assert bomb.stat().st_size < 30_000
    results = measured(tmp_path, {"bomb": [bomb], "photos": photos})
    added, said = results["bomb"]
    assert "has 13000 x 13000 pixels" in said
    assert added < 30
    added, said = results["photos"]
    assert not said
    assert added < 250  # kept, they are 384 MB


def small_images(folder: Path, count: int) -> list[Path]:
    """Write so many images, all different."""
    paths = [folder / f"small {i}.png" for i in range(count)]
    for i, path in enumerate(paths):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.mark.slow
def test_attention_to_many_patches_is_computed_of_one_image_at_a_time(tmp_path: Path) -> None:
    many = {**SMALL, "num_hidden_layers": 3, "image_size": 186, "num_labels": 5}
    ((added, said),) = measured(tmp_path, {"sheet": small_images(tmp_path, 8)}, many).values()
    assert not said
    assert added < 600  # one image takes 310 MB, eight take 390; all at once they took 1,090


@pytest.mark.slow
def test_memory_is_bounded_for_the_largest_images_that_are_decoded(tmp_path: Path) -> None:
    one = photograph(tmp_path / "photo.jpg", 4000, 3000)
    photos = [tmp_path / f"photo {i}.jpg" for i in range(60)]
    for path in photos:
        os.link(one, path)
    for mode in ("1", "P", "RGB", "RGBA"):
        side = int((MOST_BYTES / BYTES_PER_PIXEL.get(mode, MOST_BYTES_PER_PIXEL)) ** 0.5)
        Image.new(mode, (side, side)).save(tmp_path / f"largest {mode}.png", compress_level=1)
    cases = {
        "sixty": photos,
        "large jpeg": [photograph(tmp_path / "large.jpg", 13_300, 13_300)],
        **{mode: [tmp_path / f"largest {mode}.png"] for mode in ("1", "P", "RGB", "RGBA")},
    }
    results = measured(tmp_path, cases)
    print({case: round(added) for case, (added, _) in results.items()})
    assert [said for _, said in results.values()] == [""] * len(cases)
    assert max(added for added, _ in results.values()) < BOUND


def test_one_image_is_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for i in range(5):
        paths.append(tmp_path / f"{i}.png")
        Image.new("RGB", (20, 10), (i, i, i)).save(paths[-1])
    prepared: list[int] = []
    opened: list[int] = []
    read = photographs.read_image

    def counted(path: Path) -> Image.Image:
        opened.append(1)
        return read(path)

    monkeypatch.setattr(photographs, "read_image", counted)

    class Processor(PlainViTImageProcessor):
        def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
            prepared.append(len(opened))
            return super().__call__(images, *args, **options)

    (batch,) = pixel_batches(ImageFiles(paths), Processor(size={"height": 4, "width": 6}), 8)
    assert prepared == [1, 2, 3, 4, 5]
    whole = PlainViTImageProcessor(size={"height": 4, "width": 6})(
        [Image.open(path) for path in paths], return_tensors="pt"
    )
    torch.testing.assert_close(batch, whole["pixel_values"], rtol=0, atol=0)


def test_jpeg_files_are_decoded_smaller_only_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = photograph(tmp_path / "photo.jpg", 330, 170)
    assert read_image(path).size == (330, 170)
    np.testing.assert_array_equal(np.asarray(read_image(path)), np.asarray(Image.open(path)))
    monkeypatch.setattr(photographs, "MOST_BYTES", 60_000)
    assert read_image(path).size == (165, 85)
    monkeypatch.setattr(photographs, "MOST_BYTES", 4000)
    assert read_image(path).size == (42, 22)
    monkeypatch.setattr(photographs, "MOST_BYTES", 3200)
    with pytest.raises(DataError, match="photo.jpg has 330 x 170 pixels"):
        read_image(path)
    Image.open(path).save(tmp_path / "progressive.jpg", progressive=True)
    monkeypatch.setattr(photographs, "MOST_BYTES", 60_000)
    with pytest.raises(DataError, match="progressive.jpg has 330 x 170 pixels"):  # its coefficients are held whole
        read_image(tmp_path / "progressive.jpg")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_read_upright_as_transformers_reads_them(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / "photo.png"
    Image.open(photograph(tmp_path / "photo.jpg", 33, 17)).save(path, exif=exif)
    (image,) = ImageFiles([path])
    np.testing.assert_array_equal(np.asarray(image), np.asarray(load_image(str(path))))
    assert image.size == ((33, 17) if orientation < 5 else (17, 33))


def test_an_image_that_is_turned_is_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    path = tmp_path / "photo.png"
    Image.new("RGB", (40, 20)).save(path, exif=exif)
    monkeypatch.setattr(photographs, "MOST_BYTES", 40 * 20 * 8)
    assert read_image(path).size == (20, 40)
    monkeypatch.setattr(photographs, "MOST_BYTES", 40 * 20 * 8 - 1)
    with pytest.raises(DataError, match="photo.png has 40 x 20 pixels"):
        read_image(path)


def test_a_file_that_is_no_image_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (20, 10)).save(good)
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match="bad.png cannot be read as an image"):
        ImageFiles([good] * 50 + [bad]).check()
