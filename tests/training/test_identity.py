"""The identity of a run's images: selected rows equal the same rows stored separately, and other images differ."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from plain_vit.training.data.identity import READ, contents_hash, image_paths

COUNT, KIND = 41, Features({"image": Image()})


def write(folder: Path, seed: int = 0) -> list[Path]:
    """Write uncompressed images, all of the same file size."""
    folder.mkdir(exist_ok=True)
    draw, files = np.random.default_rng(seed), [folder / f"{number}.bmp" for number in range(COUNT)]
    for file in files:
        PIL.Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(file)
    return files


def rows_of(files: list[Path], *, stored: bool) -> Dataset:
    images = [{"path": None, "bytes": file.read_bytes()} if stored else str(file) for file in files]
    return Dataset.from_dict({"image": images}, features=KIND)


@pytest.mark.parametrize("stored", [False, True], ids=["files", "bytes"])
def test_the_hash_of_selected_images_is_that_of_the_same_images_alone(tmp_path, stored):
    files = write(tmp_path / "one")
    PIL.Image.new("RGB", (9, 5)).save(files[7])
    rows, order = rows_of(files, stored=stored), np.random.default_rng(1).permutation(COUNT)[:23]
    selected = contents_hash(rows.select(order))
    assert selected == contents_hash(rows_of([files[row] for row in order], stored=stored))
    assert selected != contents_hash(rows.select(order[::-1]))
    assert selected != contents_hash(rows.select(order[1:]))
    assert contents_hash(rows.select(range(3, 9))) == contents_hash(rows_of(files[3:9], stored=stored))


@pytest.mark.parametrize("stored", [False, True], ids=["files", "bytes"])
def test_any_image_of_another_size_and_nearly_any_other_content_has_another_hash(tmp_path, stored, monkeypatch):
    files = write(tmp_path / "one")
    before = contents_hash(rows_of(files, stored=stored))
    copies = [tmp_path / "copied" / file.name for file in files]
    (tmp_path / "copied").mkdir()
    for file, copy in zip(files, copies, strict=True):
        copy.write_bytes(file.read_bytes())
    assert contents_hash(rows_of(copies, stored=stored)) == before
    assert contents_hash(rows_of(write(tmp_path / "other", seed=1), stored=stored)) != before
    for number in (0, 17, COUNT - 1):
        content = copies[number].read_bytes()
        copies[number].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert contents_hash(rows_of(copies, stored=stored)) != before
        copies[number].write_bytes(content)
    monkeypatch.setattr("plain_vit.training.data.identity.READ", 2)  # so that only the first and last bytes are read
    before = contents_hash(rows_of(copies, stored=stored))
    PIL.Image.new("RGB", (5, 4)).save(copies[17])
    assert contents_hash(rows_of(copies, stored=stored)) != before
    assert READ > COUNT


def test_paths_of_rows_whose_labels_were_given_names(tmp_path):
    """After the cast, `datasets` lists the columns of the rows, and does not rename them when it flattens them."""
    files = [str(file) for file in write(tmp_path / "one")]
    kind = Features({"image": Image(), "label": Value("int64")})
    rows = Dataset.from_dict({"image": files, "label": [number % 3 for number in range(COUNT)]}, features=kind)
    named = rows.cast_column("label", ClassLabel(names=["a", "b", "c"])).cast_column("image", Image(mode="RGB"))
    assert image_paths(named) == files
    assert contents_hash(named) == contents_hash(rows)


def test_an_image_that_is_missing_and_an_empty_split_have_a_hash(tmp_path):
    files = write(tmp_path / "one")
    before = contents_hash(rows_of(files, stored=False))
    files[3].unlink()
    assert contents_hash(rows_of(files, stored=False)) != before
    assert contents_hash(Dataset.from_dict({"image": [None, None]}, features=KIND))
    assert contents_hash(Dataset.from_dict({"image": []}, features=KIND))
