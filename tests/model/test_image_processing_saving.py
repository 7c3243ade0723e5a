"""Saved processors load on both backends, with and without the package, also after loading and saving again."""

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    CLIPProcessor,
    CLIPTokenizer,
    LlavaConfig,
    VisionTextDualEncoderProcessor,
    pipeline,
)

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.image_processing_plain_vit import AUTO_MAP, PlainViTImageProcessor, PlainViTImageProcessorPil
from tests import ROOT
from tests.model import bare
from tests.releases import IS_LOCAL_CODE_PREFERRED

CLASSES = {"torchvision": PlainViTImageProcessor, "pil": PlainViTImageProcessorPil}
SETTINGS: dict[str, Any] = {
    "size": {"height": 67, "width": 41},
    "resize_mode": "contain",
    "pad_color": (7, 130, 250),
    "crop_size": {"height": 60, "width": 36},
    "do_center_crop": True,
    "resample": 3,
    "image_mean": (0.1, 0.5, 0.9),
    "image_std": (0.3, 0.2, 0.4),
}

# Runs in a process that cannot import plain_vit: opens the given folders, saves them in every way, opens the copies.
WITHOUT_PACKAGE = """
import json
from pathlib import Path
import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, AutoProcessor, pipeline

root = Path(sys.argv[1])
image = Image.open(root / "image.png")
opened = {}

def open_and_prepare(folder):
    for backend in ("torchvision", "pil"):
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True, backend=backend)
        opened[f"{folder.name} {backend}"] = [type(processor).__name__, type(processor).__module__.split(".")[0]]
        np.save(root / f"{folder.name} {backend}.npy", processor(image)["pixel_values"][0])
    return processor

for name in ("with_model", "alone", "processor_first"):
    processor = open_and_prepare(root / name)
    processor.save_pretrained(root / f"{name}_saved_alone")
    open_and_prepare(root / f"{name}_saved_alone")
    processor.save_pretrained(root / name)
    open_and_prepare(root / name)

for name in ("composite", "composite_of_model"):
    open_and_prepare(root / name)
    both = AutoProcessor.from_pretrained(root / name, trust_remote_code=True)
    assert type(both.image_processor).__module__.startswith("transformers_modules"), both.image_processor
    both.save_pretrained(root / f"{name}_saved")
    open_and_prepare(root / f"{name}_saved")

model = AutoModelForImageClassification.from_pretrained(root / "with_model", trust_remote_code=True)
model.save_pretrained(root / "both_saved")
processor.save_pretrained(root / "both_saved")
open_and_prepare(root / "both_saved")
classify = pipeline("image-classification", str(root / "both_saved"), trust_remote_code=True)
opened["pipeline"] = [type(classify.image_processor).__name__, len(classify(image))]
print(json.dumps(opened))
"""


@pytest.fixture(scope="module")
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (83, 131, 3), dtype=np.uint8))


def composite(processor: Any, kind: Any = CLIPProcessor) -> Any:
    """Return a processor for images and text."""
    return kind(processor, CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, image: Image.Image) -> Path:
    """Save folders of a model with its processor, in either order, and of processors alone, and an image."""
    root = tmp_path_factory.mktemp("saved")
    config = PlainViTConfig.from_name(
        "vit-tiny-patch12-60", image_size=(60, 36), hidden_size=24, num_hidden_layers=2, num_labels=5
    )
    model, processor = PlainViTForImageClassification(config), PlainViTImageProcessor(**SETTINGS)
    for step in (model, processor):
        step.save_pretrained(root / "with_model")
    for step in (processor, model):
        step.save_pretrained(root / "processor_first")
    processor.save_pretrained(root / "alone")
    LlavaConfig().save_pretrained(root / "composite")  # names no image processor code
    composite(processor).save_pretrained(root / "composite")
    model.save_pretrained(root / "composite_of_model")
    composite(processor, VisionTextDualEncoderProcessor).save_pretrained(root / "composite_of_model")
    image.save(root / "image.png")
    return root


@pytest.fixture(scope="module")
def opened_without_package(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Return what the process without the package opened: the class and its origin, for each folder and backend."""
    printed = bare.run(bare.REFUSE + WITHOUT_PACKAGE, saved, cwd=saved, home=tmp_path_factory.mktemp("hf_home"))
    return json.loads(printed.splitlines()[-1])


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every question to the user, such as whether to trust code."""
    asked: list[str] = []

    def refuse(question: str = "") -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", refuse)
    return asked


def contents(folder: Path) -> dict:
    return json.loads((folder / "preprocessor_config.json").read_text())


TRUST = ({}, {"trust_remote_code": True}) if IS_LOCAL_CODE_PREFERRED else ({},)
COMPOSITES = ["composite", "composite_saved", "composite_of_model", "composite_of_model_saved"]
FOLDERS = ["with_model", "processor_first", "alone", "with_model_saved_alone", "alone_saved_alone", "both_saved"]
FOLDERS += COMPOSITES


@pytest.mark.slow
@pytest.mark.parametrize("backend", CLASSES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_process_without_the_package_prepares_the_same_pixels(
    folder: str, backend: str, saved: Path, opened_without_package: dict, image: Image.Image
) -> None:
    name = CLASSES[backend].__name__
    assert opened_without_package[f"{folder} {backend}"] == [name, "transformers_modules"]
    expected = CLASSES[backend](**SETTINGS)(image)["pixel_values"][0]
    assert np.array_equal(np.load(saved / f"{folder} {backend}.npy"), expected)


@pytest.mark.slow
def test_a_process_without_the_package_classifies_with_a_pipeline(opened_without_package: dict) -> None:
    assert opened_without_package["pipeline"] == ["PlainViTImageProcessor", 5]


@pytest.mark.slow
@pytest.mark.parametrize("backend", CLASSES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_package_opens_what_either_process_saved_and_asks_nothing(
    folder: str, backend: str, saved: Path, opened_without_package: dict, image: Image.Image, prompts: list
) -> None:
    for trust in TRUST:  # local code is used in both cases
        processor = AutoImageProcessor.from_pretrained(saved / folder, backend=backend, **trust)
        assert type(processor) is CLASSES[backend]
        assert np.array_equal(
            processor(image)["pixel_values"][0], CLASSES[backend](**SETTINGS)(image)["pixel_values"][0]
        )
    assert prompts == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", COMPOSITES)
def test_a_composite_processor_reloads_with_its_image_processor(
    folder: str, saved: Path, opened_without_package: dict, image: Image.Image, prompts: list
) -> None:
    for trust in TRUST:
        both = AutoProcessor.from_pretrained(saved / folder, **trust)
        assert type(both.image_processor) is PlainViTImageProcessor
        assert both.image_processor.to_dict() == PlainViTImageProcessor(**SETTINGS).to_dict()
    expected = PlainViTImageProcessor(**SETTINGS)(image, return_tensors="pt")["pixel_values"]
    assert torch.equal(both(images=image, return_tensors="pt")["pixel_values"], expected)
    assert prompts == []


@pytest.mark.parametrize("backend", CLASSES)
def test_the_dict_names_the_class_its_settings_do_not_and_both_make_it_again(backend: str, tmp_path: Path) -> None:
    processor = CLASSES[backend](**SETTINGS)
    names = {"image_processor_type": "PlainViTImageProcessor", "auto_map": AUTO_MAP}
    assert processor.to_dict() == processor.settings() | names
    again = CLASSES[backend].from_dict(processor.to_dict())
    for one in (again, CLASSES[backend](**processor.settings()), copy.deepcopy(processor)):
        assert vars(one) == vars(processor)
    composite(again).save_pretrained(tmp_path)
    again.to_dict()["auto_map"].clear()
    assert again.to_dict() == processor.to_dict()
    assert repr(again) == repr(processor)
    assert set(AUTO_MAP["AutoImageProcessor"]) == set(CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["with_model", "processor_first", "both_saved", "composite_of_model"])
def test_a_pipeline_asks_for_no_trust_with_the_package(
    folder: str, saved: Path, opened_without_package: dict, image: Image.Image, prompts: list
) -> None:
    classify = pipeline("image-classification", str(saved / folder))
    assert type(classify.image_processor) is PlainViTImageProcessor
    assert len(classify(image)) == 5
    assert prompts == []


@pytest.mark.slow
def test_the_class_is_named_in_one_place_of_a_folder(saved: Path, opened_without_package: dict) -> None:
    for folder in ("with_model", "both_saved"):
        assert json.loads((saved / folder / "config.json").read_text())["auto_map"].items() >= AUTO_MAP.items()
        assert not contents(saved / folder).keys() & {"image_processor_type", "auto_map"}
    assert contents(saved / "alone")["image_processor_type"] == "PlainViTImageProcessor"
    assert contents(saved / "alone")["auto_map"] == AUTO_MAP
    for folder in ("with_model", "alone"):
        assert (saved / folder / "image_processing_plain_vit.py").is_file()


@pytest.mark.parametrize("backend", CLASSES)
def test_settings_survive_saving_exactly(backend: str, tmp_path: Path) -> None:
    processor = CLASSES[backend](**SETTINGS)
    processor.save_pretrained(tmp_path)
    assert AutoImageProcessor.from_pretrained(tmp_path, backend=backend).to_dict() == processor.to_dict()
    assert CLASSES[backend].from_pretrained(tmp_path).to_dict() == processor.to_dict()


def test_saving_next_to_a_config_of_another_model_names_the_class(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    PlainViTImageProcessorPil(**SETTINGS).save_pretrained(tmp_path)
    assert contents(tmp_path)["auto_map"] == AUTO_MAP
    assert type(AutoImageProcessor.from_pretrained(tmp_path, backend="pil")) is PlainViTImageProcessorPil


def test_settings_given_on_loading_override_those_of_the_file(saved: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(saved / "alone", image_std=[1.0, 2.0, 3.0])
    assert processor.image_std == (1.0, 2.0, 3.0)
    assert torch.equal(torch.tensor(processor.image_mean), torch.tensor(SETTINGS["image_mean"]))


OLD_CLIP: dict[str, Any] = {
    "crop_size": 24, "do_center_crop": True, "do_normalize": True, "do_resize": True, "image_mean": [0.48, 0.45, 0.40],
    "feature_extractor_type": "CLIPFeatureExtractor", "image_std": [0.26, 0.25, 0.27], "resample": 3, "size": 24,
}  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES.values())
def test_settings_of_another_class_are_refused_with_the_class_that_opens_them(kind: Any, tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (31, 67, 3), dtype=np.uint8))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(OLD_CLIP))
    with pytest.raises(ValueError, match=r"to 'CLIPFeatureExtractor'.*: use AutoImageProcessor.from_pretrained"):
        kind.from_pretrained(tmp_path)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    with pytest.raises(ValueError, match="to 'CLIPImageProcessor'"):
        kind.from_dict(theirs.to_dict())
    # Our own processor would read `size` as both sides, not as the shorter side.
    settings = {name: value for name, value in OLD_CLIP.items() if not name.endswith("type")}
    misread, right = (np.asarray(one(image)["pixel_values"][0]) for one in (kind(**settings), theirs))
    assert np.abs(misread - right).max() > 0.5


# Subclasses in a user's file

MINE = """
from plain_vit import PlainViTImageProcessor, PlainViTImageProcessorPil


class Unregistered(PlainViTImageProcessor):
    pass


class UnregisteredPil(PlainViTImageProcessorPil):
    pass


class Registered(PlainViTImageProcessor):
    def rescale_and_normalize(self, images, *args, **kwargs):
        return super().rescale_and_normalize(images, *args, **kwargs) + 1


Registered.register_for_auto_class("AutoImageProcessor")
"""


def require_code_named_in(folder: Path) -> None:
    """Check that the folder contains every code file that its settings name."""
    for file in folder.glob("*.json"):
        settings = json.loads(file.read_text())
        for named in (settings, settings.get("image_processor", {})):
            maps = named.get("auto_map", {}).values()
            paths = [path for one in maps for path in (one.values() if isinstance(one, dict) else [one])]
            assert all((folder / f"{path.partition('.')[0]}.py").is_file() for path in paths), file


@pytest.mark.parametrize("kind", ["Unregistered", "UnregisteredPil", "Registered"])
def test_a_composite_processor_of_a_subclass_reloads_with_its_pixels(
    kind: str, image: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    both = composite(getattr(importlib.import_module("mine"), kind)(**SETTINGS))
    both.save_pretrained(tmp_path / "saved")
    require_code_named_in(tmp_path / "saved")
    again = AutoProcessor.from_pretrained(tmp_path / "saved", trust_remote_code=kind == "Registered")
    assert type(again.image_processor).__name__ == ("Registered" if kind == "Registered" else "PlainViTImageProcessor")
    pixels = [np.asarray(one.image_processor(image)["pixel_values"][0]) for one in (both, again)]
    assert np.array_equal(*pixels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, beside_model",
    [("Unregistered", True), ("UnregisteredPil", False), ("Registered", True), ("Registered", False)],
)
def test_a_subclass_s_folder_names_code_that_is_there_and_opens(
    kind: str, beside_model: bool, image: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "saved"
    if beside_model:
        config = PlainViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        PlainViTForImageClassification(config).save_pretrained(folder)
    processor = getattr(importlib.import_module("mine"), kind)(**SETTINGS)
    processor.save_pretrained(folder)
    expected = np.asarray(processor(image)["pixel_values"][0])
    require_code_named_in(folder)
    program = (
        "import sys\nif sys.argv[3] == 'without': sys.modules['plain_vit'] = None\n"
        "import numpy as np\nfrom PIL import Image\nfrom transformers import AutoImageProcessor\n"
        "processor = AutoImageProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "np.save(sys.argv[2] + '/got.npy', processor(Image.open(sys.argv[2] + '/image.png'))['pixel_values'][0])"
    )
    image.save(tmp_path / "image.png")
    # A registered subclass's file imports the package, so whoever loads the folder needs the package.
    package = "with" if kind == "Registered" else "without"
    cwd = ROOT if package == "with" else tmp_path
    bare.run(program, folder, tmp_path, package, cwd=cwd, home=tmp_path / "hf")
    assert np.array_equal(np.load(tmp_path / "got.npy"), expected)
