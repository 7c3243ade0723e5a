"""Saved folders open with the Auto classes: with the package, and without it by the code in the folder."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    pipeline,
)

import plain_vit
from plain_vit import (
    PlainViTBackbone,
    PlainViTConfig,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTImageProcessor,
    PlainViTModel,
)
from tests import ROOT
from tests.conftest import randomize_
from tests.model import bare
from tests.releases import IS_LOCAL_CODE_PREFERRED
from tests.sources.transformers_models import tiny_transformers
from tests.tiny import VARIATIONS, difference, pixels, tiny_config

HUB_FILES = {
    f"{name}_plain_vit.py"
    for name in ("attention", "checks", "configuration", "heads", "initialization", "intermediates", "layers",
                 "modeling", "packed", "positions", "releases")
}  # fmt: skip
LABELS = dict(enumerate(["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]))
# Folders that together contain one of everything; "bare" is saved without an image processor.
FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {"id2label": LABELS, "label2id": {name: index for index, name in LABELS.items()}},
    "bare": {"use_mask_token": True, "out_indices": [1, 3], "initialization": "google", **VARIATIONS["registers"]},
    "branches": {**VARIATIONS["branches"], **VARIATIONS["rotary_mixed"]},
    "map": {**VARIATIONS["map"], "patch_size": 8},
    "differential": {**VARIATIONS["differential"], **VARIATIONS["linear_patches"]},
}
REORDERED = 1e-5  # other releases of torch sum in a different order

# Runs in a process that cannot import plain_vit: opens each folder in every way and records the outputs.
WITHOUT_PACKAGE = """
from pathlib import Path
import torch
from PIL import Image
from transformers import (
    AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification,
    AutoModelForMaskedImageModeling, pipeline,
)

source, target, images = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
pixel_values = torch.load(images / "pixels.pt")
trust = {"trust_remote_code": True}
found = {}
for folder in sorted(source.iterdir()):
    name = folder.name
    config = AutoConfig.from_pretrained(folder, **trust)
    model = AutoModelForImageClassification.from_pretrained(folder, **trust).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    found[name] = {
        "logits": model(pixel_values).logits,
        "tokens": AutoModel.from_pretrained(folder, **trust).eval()(pixel_values).last_hidden_state,
        "maps": list(
            # AutoBackbone.from_pretrained itself asks the Hub for local folders, those of DINOv2 too.
            type(AutoBackbone.from_config(config, **trust)).from_pretrained(folder)(pixel_values).feature_maps
        ),
        "labels": model.config.id2label,
    }
    model.save_pretrained(target / name)
    if (folder / "preprocessor_config.json").exists():
        processor = AutoImageProcessor.from_pretrained(folder, **trust)
        found[name]["prepared"] = processor(Image.open(images / "image.png"), return_tensors="pt").pixel_values
        processor.save_pretrained(target / name)
        classify = pipeline("image-classification", str(folder), **trust)
        found[name]["answers"] = classify(str(images / "image.png"), top_k=7)

folder = source / "bare"
masked = AutoModelForMaskedImageModeling.from_pretrained(folder, **trust)
found["bare"]["drawn"] = {key: value.clone() for key, value in masked.state_dict().items() if "decoder" in key}
found["bare"]["loss"] = masked(pixel_values, torch.ones(2, 3, 4, dtype=torch.bool)).loss
fresh = AutoModelForImageClassification.from_pretrained(folder, num_labels=4, ignore_mismatched_sizes=True, **trust)
found["bare"]["new head"] = fresh.classifier.weight.detach().clone()
fresh(pixel_values, labels=torch.tensor([3, 1])).loss.backward()
torch.optim.SGD(fresh.parameters(), lr=0.1).step()
found["bare"]["tuned"] = fresh.eval()(pixel_values).logits
fresh.save_pretrained(target.parent / f"{target.name}_tuned")
again = AutoModelForImageClassification.from_pretrained(target.parent / f"{target.name}_tuned", **trust).eval()
found["bare"]["tuned again"] = again(pixel_values).logits

found["refused"] = []
for kind, options in ((type(config), {}), (type(again), {}), (type(again), {"config": again.config})):
    try:
        kind.from_pretrained(images / "stock", **options)
    except ValueError as error:
        found["refused"].append(str(error))
torch.save(found, target.parent / f"{target.name}.pt")
"""


def build(name: str) -> PlainViTForImageClassification:
    """Return the classifier that is saved in the folder of this name."""
    model = PlainViTForImageClassification(tiny_config(**FOLDERS[name]))
    randomize_(model)
    return model.eval()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with saved models in `saved`, and in `once` what a process without the package saved of them."""
    root = tmp_path_factory.mktemp("travelling")
    torch.save(pixels(), root / "pixels.pt")
    colors = np.random.default_rng(0).integers(0, 256, (31, 67, 3), dtype=np.uint8)
    Image.fromarray(colors).save(root / "image.png")
    tiny_transformers("ViTForImageClassification").save_pretrained(root / "stock")
    processor = PlainViTImageProcessor(size={"height": 24, "width": 56})
    for name in FOLDERS:
        build(name).save_pretrained(root / "saved" / name)
        if name != "bare":
            processor.save_pretrained(root / "saved" / name)
    open_without_package(root, "saved", "once")
    return root


@pytest.fixture(scope="module")
def again(root: Path) -> Path:
    """Return the folder after a second process, with an empty cache, opened what the code in `once` had saved."""
    open_without_package(root, "once", "twice")
    return root


def open_without_package(root: Path, source: str, target: str, python: Path | None = None) -> dict[str, Any]:
    """Open the folders in `source` without the package, save them into `target`, and return their outputs."""
    program, home = bare.REFUSE + WITHOUT_PACKAGE, root / f"cache_{target}"
    arguments = root / source, root / target, root
    if python is None:
        bare.run(program, *arguments, cwd=root, home=home)
    else:
        environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        words = [python, "-c", program, *arguments]
        process = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
    return torch.load(root / f"{target}.pt")


@pytest.fixture(scope="module", params=["once", "twice"])
def found(root: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the outputs of the first or the second process."""
    if request.param == "twice":
        request.getfixturevalue("again")
    return torch.load(root / f"{request.param}.pt")


@pytest.mark.slow(quick=[f"once-{name}" for name in FOLDERS])
@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_the_code_that_came_along_gives_equal_numbers(found: dict[str, Any], root: Path, name: str) -> None:
    model = build(name)
    assert torch.equal(found[name]["logits"], model(pixels()).logits)
    assert torch.equal(found[name]["tokens"], model.vit(pixels()).last_hidden_state)
    shapes = [tuple(feature_map.shape) for feature_map in found[name]["maps"]]
    assert shapes == [(2, 40, 3, 7 if name == "map" else 4)] * (2 if name == "bare" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FOLDERS.keys() - {"bare"}))
def test_the_code_that_came_along_prepares_and_classifies_images(found: dict[str, Any], root: Path, name: str) -> None:
    processor = PlainViTImageProcessor(size={"height": 24, "width": 56})
    prepared = processor(Image.open(root / "image.png"), return_tensors="pt").pixel_values
    assert torch.equal(found[name]["prepared"], prepared)
    scores = build(name)(prepared).logits[0].softmax(0)
    names = FOLDERS[name].get("id2label", {index: f"LABEL_{index}" for index in range(7)})
    assert found[name]["labels"] == names
    assert [answer["label"] for answer in found[name]["answers"]] == [names[int(i)] for i in scores.argsort().flip(0)]
    assert found[name]["answers"][0]["score"] == pytest.approx(scores.max().item(), rel=1e-5)


@pytest.mark.slow
def test_the_code_that_came_along_draws_what_is_missing_and_trains(found: dict[str, Any]) -> None:
    bare = found["bare"]
    assert all(tensor.isfinite().all() for tensor in bare["drawn"].values())
    assert bare["loss"].isfinite()
    assert (bare["new head"] == 0).all()  # as in its initialization, "google"
    assert bare["tuned"].shape == (2, 4)
    assert bare["tuned"].abs().max() > 0
    assert torch.equal(bare["tuned again"], bare["tuned"])


@pytest.mark.slow
def test_the_code_that_came_along_refuses_the_folder_of_another_model(found: dict[str, Any], root: Path) -> None:
    line = f"from plain_vit.conversion import from_checkpoint; model = from_checkpoint({str(root / 'stock')!r}).model"
    assert len(found["refused"]) == 3
    assert all("model_type 'vit': expected 'plain_vit'" in said and said.endswith(line) for said in found["refused"])


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["saved", "once", "twice"])
def test_saved_folders_carry_the_whole_code_and_the_names_of_all_classes(again: Path, folder: str) -> None:
    root = again
    for name in FOLDERS:
        files = {path.name for path in (root / folder / name).iterdir()}
        processor = set() if name == "bare" else {"image_processing_plain_vit.py", "preprocessor_config.json"}
        assert files == {"config.json", "model.safetensors"} | HUB_FILES | processor
        for file in files & HUB_FILES:
            assert (root / folder / name / file).read_text() == (Path(plain_vit.__path__[0]) / file).read_text()
        config = json.loads((root / folder / name / "config.json").read_text())
        assert config["auto_map"] == plain_vit.configuration_plain_vit.AUTO_MAP
        assert config["architectures"] == ["PlainViTForImageClassification"]


@pytest.mark.slow
@pytest.mark.parametrize("releases", ["floors", "year"])
def test_other_releases_open_what_these_save_and_these_what_others_save(root: Path, releases: str) -> None:
    """Both use the code in the folders; "these" are the installed releases, "others" those of `make test-RELEASES`."""
    python = ROOT / f".venv-{releases}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there are no other releases: make test-{releases} installs them")
    there = open_without_package(root, "saved", f"by_{releases}", python)
    back = open_without_package(root, f"by_{releases}", f"from_{releases}")
    expected = torch.load(root / "once.pt")
    for name in FOLDERS:
        for found in (there[name], back[name]):
            for key in ("logits", "tokens", *(("prepared",) if name != "bare" else ())):
                assert difference(found[key], expected[name][key]) < REORDERED, (name, key)
            assert found["labels"] == expected[name]["labels"]
            for one, other in zip(found.get("answers", ()), expected[name].get("answers", ()), strict=True):
                assert (one["label"], one["score"]) == (other["label"], pytest.approx(other["score"], rel=1e-4))


# With the package


@pytest.mark.parametrize("folder", ["saved", "once"])
@pytest.mark.parametrize("trust", [None, False, *([True] if IS_LOCAL_CODE_PREFERRED else [])])
def test_with_the_package_its_own_classes_open_the_folder(root: Path, folder: str, trust: bool | None) -> None:
    path, trusted = root / folder / "plain", {"trust_remote_code": trust}
    config = AutoConfig.from_pretrained(path, **trusted)
    assert type(config) is PlainViTConfig
    assert config.label2id["fox"] == 5
    assert type(AutoModel.from_pretrained(path, **trusted)) is PlainViTModel
    assert type(AutoImageProcessor.from_pretrained(path, **trusted)) is PlainViTImageProcessor
    backbone: Any = cast(Any, type(AutoBackbone.from_config(config, **trusted))).from_pretrained(path)
    assert type(backbone) is PlainViTBackbone
    found = backbone(pixels())[0][0]
    assert torch.equal(
        found, backbone.tokens_to_map(AutoModel.from_pretrained(path)(pixels()).last_hidden_state, 24, 56)
    )
    masked = AutoModelForMaskedImageModeling.from_pretrained(path, **trusted)
    assert type(masked) is PlainViTForMaskedImageModeling
    model = AutoModelForImageClassification.from_pretrained(path, **trusted)
    assert type(model) is PlainViTForImageClassification
    assert torch.equal(model(pixels()).logits, build("plain")(pixels()).logits)


def test_with_the_package_pipelines_ask_for_no_trust(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a pipeline asked for trust"))
    path, image = str(root / "saved" / "plain"), Image.open(root / "image.png")
    classify = pipeline("image-classification", path)
    assert type(classify.model) is PlainViTForImageClassification
    assert {answer["label"] for answer in classify(image, top_k=7)} == set(LABELS.values())
    describe = pipeline("image-feature-extraction", path)
    assert type(describe.model) is PlainViTModel
    tokens = torch.tensor(describe(image))
    processor = PlainViTImageProcessor.from_pretrained(path)
    prepared = processor(image, return_tensors="pt").pixel_values
    assert difference(tokens, build("plain").vit(prepared).last_hidden_state) < 1e-6
    pooled = torch.tensor(describe(image, pool=True))
    assert difference(pooled, build("plain").vit(prepared).pooler_output) < 1e-6


def test_hub_files_import_only_what_every_user_has() -> None:
    allowed = {"torch", "torchvision", "transformers", "huggingface_hub", "numpy", "PIL", *sys.stdlib_module_names}
    for file in (*HUB_FILES, "image_processing_plain_vit.py"):
        for node in ast.walk(ast.parse((Path(plain_vit.__path__[0]) / file).read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= allowed, file
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert (node.level, f"{node.module}.py" in HUB_FILES) == (1, True), file
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] in allowed, file


# Subclasses in a user's file

MINE = """
from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel


class MyConfig(PlainViTConfig):
    my_field: int = 3


class MyOtherConfig(PlainViTConfig):
    model_type = "my_vit"


class Unregistered(PlainViTForImageClassification):
    pass


class OfMyConfig(PlainViTForImageClassification):
    config_class = MyConfig


class Registered(PlainViTForImageClassification):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + 1
        return outputs


Registered.register_for_auto_class("AutoModelForImageClassification")


class OfRegistered(Registered):
    pass
"""

SAVE_MINE = """
import sys

import torch
from torch import nn

sys.path.insert(0, sys.argv[1])
import mine
from plain_vit import PlainViTConfig
from tests.conftest import randomize_
from tests.tiny import SIZES, pixels

class InMain(mine.Unregistered):
    pass

config = PlainViTConfig(**SIZES)  # shared by several models: changes by one save must not leak into the next
for name, kind, config in (
    ("registered", mine.Registered, config),
    ("of_registered", mine.OfRegistered, config),
    ("unregistered", mine.Unregistered, config),
    ("in_main", InMain, config),
    ("made_by_torch", type("FSDPOurs", (mine.PlainViTForImageClassification,), {"__module__": nn.__name__}), config),
    ("my_config", mine.OfMyConfig, mine.MyConfig(**SIZES, my_field=5)),
    ("my_type", mine.Unregistered, mine.MyOtherConfig(**SIZES)),
):
    model = randomize_(kind(config)).eval()
    model.save_pretrained(f"{sys.argv[2]}/{name}")
    torch.save(model(pixels()).logits, f"{sys.argv[2]}/{name}/expected.pt")
mine.MyConfig(**SIZES).save_pretrained(sys.argv[2] + "_config")
"""

OPEN_MINE = """
import sys
from pathlib import Path

import torch
from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification

if sys.argv[3] == "with":
    import plain_vit

pixel_values = torch.load(sys.argv[2])
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if sys.argv[3] == "without" and folder.name == "registered":
        continue  # its own file imports the package, and is a requirement on who loads it
    trust = {"trust_remote_code": True}
    config = AutoConfig.from_pretrained(folder, **trust)
    model = AutoModelForImageClassification.from_pretrained(folder, **trust).eval()
    found, expected = model(pixel_values).logits, torch.load(folder / "expected.pt")
    added = {"of_registered": 1, "registered": 1}.get(folder.name, 0)  # what the class of ours does not add
    assert torch.allclose(found + added, expected, atol=1e-5), folder.name
    AutoModel.from_pretrained(folder, **trust)
    AutoBackbone.from_config(config, **trust)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the saved folders of subclasses."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    torch.save(pixels(), folder / "pixels.pt")
    bare.run(SAVE_MINE, folder, folder / "saved", cwd=ROOT, home=folder / "cache")
    return folder


@pytest.mark.slow
def test_a_subclass_s_folder_names_no_file_that_is_not_there(mine: Path) -> None:
    for folder in (mine / "saved").iterdir():
        files = {path.name for path in folder.iterdir()} - {"expected.pt"}
        own = {"mine.py"} if folder.name == "registered" else set()
        assert files == {"config.json", "model.safetensors"} | HUB_FILES | own, folder.name
        named = json.loads((folder / "config.json").read_text())["auto_map"]
        kind = "mine.Registered" if own else "modeling_plain_vit.PlainViTForImageClassification"
        expected = {**plain_vit.configuration_plain_vit.AUTO_MAP, "AutoModelForImageClassification": kind}
        assert named == expected, folder.name
    config = mine / "saved_config"
    assert {path.name for path in config.iterdir()} == {
        "checks_plain_vit.py",
        "config.json",
        "configuration_plain_vit.py",
        "releases_plain_vit.py",
    }


@pytest.mark.slow
@pytest.mark.parametrize("package", ["without", *(["with"] if IS_LOCAL_CODE_PREFERRED else [])])
def test_a_subclass_s_folder_opens(mine: Path, package: str) -> None:
    root = ROOT if package == "with" else mine
    program = bare.REFUSE + OPEN_MINE if package == "without" else OPEN_MINE
    bare.run(program, mine / "saved", mine / "pixels.pt", package, cwd=root, home=mine / f"cache_{package}")


def test_an_entry_whose_file_is_elsewhere_is_kept_or_falls_back_to_ours(tmp_path: Path) -> None:
    config = tiny_config(
        auto_map={"AutoModel": "gone.Model", "AutoModelForDepthEstimation": "me/depth--code.Depth", "AutoX": "gone.X"}
    )
    config.save_pretrained(tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert named == {
        **plain_vit.configuration_plain_vit.AUTO_MAP, "AutoModelForDepthEstimation": "me/depth--code.Depth",
    }  # fmt: skip


def test_the_code_of_a_subclass_is_uploaded_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(PlainViTForImageClassification):
        pass

    seen: list[set[str]] = []
    monkeypatch.setattr(
        "transformers.utils.hub.PushToHubMixin._upload_modified_files",
        lambda self, folder, *_args, **_kwargs: seen.append({path.name for path in Path(folder).iterdir()}),
    )
    model = Mine(tiny_config())
    model._upload_modified_files(tmp_path, "me/mine", {})
    model.config._upload_modified_files(tmp_path, "me/mine", {})
    assert seen[0] == HUB_FILES
