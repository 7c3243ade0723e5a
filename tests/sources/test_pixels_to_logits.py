"""From image file to logits: a converted folder gives the same result as its source.

The sources open files like their loaders: `Image.open(path).convert("RGB")`. Google is left out because it resizes with
TensorFlow, without antialiasing.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image, ImageOps
from timm.data import create_transform, resolve_model_data_config
from torch import nn
from torchvision import transforms
from torchvision.models.vision_transformer import VisionTransformer
from torchvision.transforms._presets import ImageClassification
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification
from vit_pytorch import ViT

from plain_vit import PlainViTImageProcessor
from plain_vit.conversion import from_checkpoint
from tests.conftest import randomize_
from tests.sources.test_timm_files import save_folder
from tests.sources.timm_models import tiny_timm
from tests.tiny import difference

REORDERED = 1e-5
FILES = (
    "photo.jpg", "grey.jpg", "cmyk.jpg", "rotated.jpg", "palette.png", "rgba.png", "one_row.png", "one_column.png",
    "large.jpg",
)  # fmt: skip

# Opens every folder without options except trust in its code, and returns the result for every file.
OPEN = """
from pathlib import Path
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

def outcomes(folders, images, **trust):
    found = {}
    for folder in sorted(Path(folders).iterdir()):
        processor = AutoImageProcessor.from_pretrained(folder, **trust)
        model = AutoModelForImageClassification.from_pretrained(folder, **trust).eval()
        classify = pipeline("image-classification", str(folder), **trust)
        files = found[folder.name] = {"class": f"{type(processor).__module__}.{type(processor).__name__}"}
        for path in sorted(Path(images).iterdir()):
            with Image.open(path) as image:
                opened = processor(image.convert("RGB"), return_tensors="pt").pixel_values
            pixel_values = processor(str(path), return_tensors="pt").pixel_values
            with torch.no_grad():
                logits = model(opened).logits
            answers = classify(str(path), top_k=99, function_to_apply="none")
            scores = {answer["label"]: answer["score"] for answer in answers}
            files[path.name] = {
                "opened": opened[0], "pixels": pixel_values[0], "logits": logits[0],
                "scores": torch.tensor([scores[model.config.id2label[i]] for i in range(len(scores))]),
            }
    return found
"""
WITHOUT_PACKAGE = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "plain_vit":
            raise ModuleNotFoundError(f"{{name}} must not be imported here")

sys.meta_path.insert(0, Refuse())
{OPEN}
torch.save(outcomes(*sys.argv[1:3], trust_remote_code=True), sys.argv[3])
"""


@dataclass(frozen=True)
class Source:
    """A model of another package, and its users' preprocessing of an opened image.

    Args:
        module: Maps a batch of pixels to logits or to an output with logits.
        prepare: Maps a Pillow image to pixels (C, H, W).
    """

    module: nn.Module
    prepare: Callable[[Image.Image], torch.Tensor]

    def logits(self, image: Image.Image) -> torch.Tensor:
        """Return the logits of one image."""
        with torch.no_grad():
            output = self.module(self.prepare(image)[None])
        return output[0] if isinstance(output, torch.Tensor) else output.logits[0]


def write_images(folder: Path) -> None:
    """Write a file of every kind; rotated.jpg has an EXIF rotation by 90 degrees."""
    rng = np.random.default_rng(0)

    def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
        return rng.integers(0, 256, (height, width, channels), dtype=np.uint8)

    folder.mkdir()
    photo = Image.fromarray(noise(97, 131))
    photo.save(folder / "photo.jpg")
    photo.convert("L").save(folder / "grey.jpg")
    photo.convert("CMYK").save(folder / "cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    photo.save(folder / "rotated.jpg", exif=exif)
    palette = photo.quantize(17)
    palette.info["transparency"] = 3
    palette.save(folder / "palette.png")
    Image.fromarray(noise(97, 131, 4)).save(folder / "rgba.png")
    Image.fromarray(noise(1, 113)).save(folder / "one_row.png")
    Image.fromarray(noise(113, 1)).save(folder / "one_column.png")
    Image.fromarray(noise(75, 100)).resize((1600, 1200), Image.Resampling.BICUBIC).save(folder / "large.jpg")


def timm_centre(place: Path) -> tuple[Source, Any]:
    """Save a folder of timm with a centre crop to a square."""
    return of_timm(place, {"crop_pct": 0.9, "crop_mode": "center", "interpolation": "bicubic"}, (3, 48, 48))


def timm_oblong(place: Path) -> tuple[Source, Any]:
    """Save a folder of timm with a centre crop to an oblong."""
    return of_timm(place, {"crop_pct": 0.875, "crop_mode": "center", "interpolation": "bilinear"}, (3, 48, 80))


def timm_squash(place: Path) -> tuple[Source, Any]:
    """Save a folder of timm that stretches images, like those of SigLIP and CLIP."""
    return of_timm(place, {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bicubic"}, (3, 48, 48))


def of_timm(place: Path, said: dict[str, Any], input_size: tuple[int, int, int]) -> tuple[Source, Any]:
    module = tiny_timm("vit_tiny_patch16_224", img_size=input_size[1:], depth=2)
    module.pretrained_cfg.update(said, input_size=input_size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    converted = from_checkpoint(save_folder(module, place))
    again: Any = timm.create_model(f"local-dir:{place}", pretrained=True).eval()
    return Source(again, create_transform(**resolve_model_data_config(again))), converted


def of_torchvision(place: Path) -> tuple[Source, Any]:
    """Save a state dict of torchvision, with the transform of a published file."""
    sizes: dict[str, Any] = {"image_size": 40, "patch_size": 8, "num_layers": 2, "num_heads": 7, "hidden_dim": 56}
    module = randomize_(VisionTransformer(**sizes, mlp_dim=70, num_classes=11)).eval()
    torch.save(module.state_dict(), place.with_suffix(".pth"))
    converted: Any = from_checkpoint(place.with_suffix(".pth"), num_attention_heads=7, layer_norm_eps=1e-6)
    transform = ImageClassification(crop_size=40, resize_size=46)
    geometry: Any = {"size": {"shortest_edge": 46}, "crop_size": {"height": 40, "width": 40}, "do_center_crop": True}
    processor = PlainViTImageProcessor(**geometry, image_mean=transform.mean, image_std=transform.std)
    object.__setattr__(converted, "image_processor", processor)
    return Source(module, transform), converted


def of_transformers(place: Path) -> tuple[Source, Any]:
    """Save a folder of transformers; the pixels come from the processor that transformers opens."""
    sizes: dict[str, Any] = {"image_size": 48, "patch_size": 8, "hidden_size": 40, "num_hidden_layers": 2}
    config = ViTConfig(**sizes, num_attention_heads=5, intermediate_size=52, num_labels=7)
    module = randomize_(ViTForImageClassification(config)).eval()
    module.save_pretrained(place)
    said: dict[str, Any] = {"size": {"height": 48, "width": 48}, "image_mean": [0.4, 0.5, 0.6]}
    transformers.ViTImageProcessor(**said).save_pretrained(place)
    stock: Any = AutoImageProcessor.from_pretrained(place)
    return Source(module, lambda image: stock(image, return_tensors="pt").pixel_values[0]), from_checkpoint(place)


def of_vit_pytorch(place: Path) -> tuple[Source, Any]:
    """Save a state dict of vit-pytorch, whose users preprocess images with torchvision."""
    sizes: dict[str, Any] = {"image_size": (24, 56), "patch_size": (8, 14), "dim": 40, "depth": 2, "heads": 5}
    module = randomize_(ViT(**sizes, dim_head=12, mlp_dim=52, num_classes=7)).eval()
    torch.save(module.state_dict(), place.with_suffix(".pt"))
    told: dict[str, Any] = {"num_attention_heads": 5, "image_size": (24, 56), "patch_size": (8, 14), "pooling": "cls"}
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    converted = from_checkpoint(place.with_suffix(".pt"), **told, image_mean=mean, image_std=std)
    steps = [transforms.Resize((24, 56)), transforms.ToTensor(), transforms.Normalize(mean, std)]
    return Source(module, transforms.Compose(steps)), converted


SOURCES = (timm_centre, timm_oblong, timm_squash, of_torchvision, of_transformers, of_vit_pytorch)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pixels_to_logits")
    (root / "sources").mkdir()
    write_images(root / "images")
    return root


@pytest.fixture(scope="module")
def sources(root: Path) -> dict[str, Source]:
    """Return the sources; folders converted from their files are in `folders`."""
    made = {}
    for make in SOURCES:
        made[make.__name__], converted = make(root / "sources" / make.__name__)
        for part in (converted.model, converted.image_processor):
            part.save_pretrained(root / "folders" / make.__name__)
    return made


@pytest.fixture(scope="module")
def with_package(root: Path, sources: dict[str, Source]) -> dict[str, dict[str, Any]]:
    names: dict[str, Any] = {}
    exec(OPEN, names)
    return names["outcomes"](root / "folders", root / "images")


@pytest.fixture(scope="module")
def without_package(root: Path, sources: dict[str, Source]) -> dict[str, dict[str, Any]]:
    environment = {**os.environ, "HF_HOME": str(root / "cache"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    arguments = [root / "folders", root / "images", root / "outcomes.pt"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, *arguments], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return torch.load(root / "outcomes.pt")


@pytest.fixture(params=["with_package", pytest.param("without_package", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return the results for every file, in a process with the package and in one without it."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=[make.__name__ for make in SOURCES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def image(file: str, root: Path) -> Iterator[Image.Image]:
    with Image.open(root / "images" / file) as opened:
        yield opened


def test_a_file_gives_the_pixels_and_the_logits_of_the_source(
    name: str, file: str, image: Image.Image, sources: dict[str, Source], found: dict[str, dict[str, Any]], root: Path
) -> None:
    outcome, image = found[name][file], image.convert("RGB")
    assert torch.equal(outcome["opened"], sources[name].prepare(image))
    assert difference(outcome["logits"], sources[name].logits(image)) < REORDERED
    expected = outcome["opened"]
    if name == "of_transformers":  # its processor decodes paths with torchvision, and rotates images
        stock: Any = AutoImageProcessor.from_pretrained(root / "sources" / name)
        expected = stock(str(root / "images" / file), return_tensors="pt").pixel_values[0]
    assert torch.equal(outcome["pixels"], expected)


def test_a_pipeline_answers_as_the_source_does_for_the_image_turned_and_in_rgb(
    name: str, file: str, image: Image.Image, sources: dict[str, Source], found: dict[str, dict[str, Any]]
) -> None:
    turned = ImageOps.exif_transpose(image).convert("RGB")
    assert difference(found[name][file]["scores"], sources[name].logits(turned)) < REORDERED


@pytest.mark.slow
def test_both_processes_compute_the_same_bits(
    with_package: dict[str, dict[str, Any]], without_package: dict[str, dict[str, Any]], sources: dict[str, Source]
) -> None:
    assert with_package.keys() == without_package.keys() == sources.keys()
    for name, files in with_package.items():
        code = "plain_vit." if name != "of_transformers" else "transformers."
        assert files["class"].startswith(code)
        travelled = "transformers_modules." if name != "of_transformers" else "transformers."
        assert without_package[name]["class"].startswith(travelled)
        for file in FILES:
            for kind, value in files[file].items():
                assert torch.equal(value, without_package[name][file][kind]), (name, file, kind)
