"""Folders saved by older versions with their code: they open with that code alone, and saving again updates the code.

The code of each version, as `save_pretrained` wrote it, is in `tests/model/golden/code-VERSION.zip`.
"""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification

import plain_vit
from plain_vit import (
    PlainViTBackbone,
    PlainViTConfig,
    PlainViTForImageClassification,
    PlainViTImageProcessor,
    PlainViTModel,
)
from plain_vit.configuration_plain_vit import AUTO_MAP
from plain_vit.hub import push, push_folder
from tests.conftest import randomize_
from tests.hub.endpoint import HubEndpoint
from tests.model import bare
from tests.model.golden.save_this_version import golden_pixels
from tests.model.test_golden import GOLDEN, REORDERED, VERSIONS
from tests.tiny import difference

TODAY = {path.name: path.read_bytes() for path in Path(plain_vit.__path__[0]).glob("*_plain_vit.py")}
ROUNDED = 1e-6  # 0.1.0 converted levels to floats in a different order than torchvision
DATA = {"config.json", "model.safetensors", "preprocessor_config.json"}
# One folder of each kind whose code differs most from the plain model's.
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "differential": {
        "attention_type": "differential", "rope_parameters": None, "qk_norm": "norm", "initialization": "timm",
    },
    "branches": {"block_type": "branches", "num_branches": 2, "qk_norm": "rms_per_head", "pooling": "query"},
    "parallel": {"block_type": "parallel", "mlp_type": "swiglu_packed", "pooling": "map", "initialization": "google"},
    "post_norm": {"block_type": "post_norm", "attention_inner_norm": True, "initialization": "vit_pytorch"},
}  # fmt: skip

# Runs without the package; argv: the working folder and, to save models before opening them, the fields of each model.
ALONE = """
import json
from pathlib import Path

import torch
from transformers import AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification

root, pixel_values = Path(sys.argv[1]), torch.load(sys.argv[1] + "/pixels.pt")
trust = {"trust_remote_code": True}
if len(sys.argv) > 2:
    seed = root / "seed"
    processor = AutoImageProcessor.from_pretrained(seed, **trust)
    for name, fields in json.loads(sys.argv[2]).items():
        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(seed, **fields, **trust)
        model = AutoModelForImageClassification.from_config(config, **trust)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand_like(parameter) - 0.4)
        model.save_pretrained(root / "old" / name)
        processor.save_pretrained(root / "old" / name)
found = {}
for folder in sorted(path.parent for path in root.glob("*/*/config.json")):
    config = AutoConfig.from_pretrained(folder, **trust)
    model = AutoModelForImageClassification.from_pretrained(folder, **trust).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    backbone = type(AutoBackbone.from_config(config, **trust)).from_pretrained(folder)
    image = (pixel_values[0] * 40 + 100).to(torch.uint8)
    torch.manual_seed(2)
    fresh = AutoModelForImageClassification.from_config(config, **trust).state_dict()
    found[str(folder.relative_to(root))] = {
        "logits": model(pixel_values).logits.detach(),
        "attentions": model(pixel_values, output_attentions=True).attentions[-1].detach(),
        "tokens": AutoModel.from_pretrained(folder, **trust).eval()(pixel_values).last_hidden_state.detach(),
        "map": backbone.eval()(pixel_values).feature_maps[0].detach(),
        "image": AutoImageProcessor.from_pretrained(folder, **trust)(image, return_tensors="pt").pixel_values,
        "fresh": torch.cat([tensor.flatten() for tensor in fresh.values()]),
    }
torch.save(found, root / "found.pt")
"""


def alone(root: Path, *arguments: str) -> dict[str, dict[str, torch.Tensor]]:
    """Open all folders inside a folder in a process without the package, and return the outputs of each."""
    bare.run(bare.REFUSE + ALONE, root, *arguments, cwd=root, home=root / "cache")
    return torch.load(root / "found.pt")


def code_of(version: str) -> dict[str, bytes]:
    """Return the code files saved with the folders of a version."""
    with zipfile.ZipFile(GOLDEN / f"code-{version}.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def code_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def root(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains only the starting point of a version's code."""
    root = tmp_path_factory.mktemp("older")
    (root / "seed").mkdir()
    for name, content in code_of(version).items():
        (root / "seed" / name).write_bytes(content)
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copyfile(GOLDEN / version / name, root / "seed" / name)
    torch.save(golden_pixels(), root / "pixels.pt")
    return root


@pytest.fixture(scope="module")
def then(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Save a folder of each kind in `old` with the code of the version, and return its outputs."""
    return alone(root, json.dumps(FIELDS))


@pytest.fixture(scope="module")
def saved_again(root: Path, then: Any) -> Path:
    """Return `new`, which contains the same folders, each opened and saved again in place by the current package."""
    shutil.copytree(root / "old", root / "new")
    for folder in (root / "new").iterdir():
        PlainViTForImageClassification.from_pretrained(folder).save_pretrained(folder)
        AutoImageProcessor.from_pretrained(folder).save_pretrained(folder)
    return root / "new"


@pytest.fixture(scope="module")
def now(root: Path, then: Any, saved_again: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the outputs of all folders in another process, which finds the cache left by the old ones."""
    return alone(root)


def test_every_version_keeps_the_code_that_it_saved() -> None:
    assert {path.name for path in GOLDEN.glob("code-*.zip")} == {f"code-{version}.zip" for version in VERSIONS}
    assert sum(path.stat().st_size for path in GOLDEN.glob("code-*.zip")) < 80_000 * len(VERSIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_an_old_folder_opens_with_its_own_code_and_no_package(
    root: Path, version: str, then: Any, now: Any, name: str
) -> None:
    assert code_in(root / "old" / name) == code_of(version)
    for kind, tensor in now[f"old/{name}"].items():
        assert torch.equal(tensor, then[f"old/{name}"][kind]), kind


@pytest.mark.slow
@pytest.mark.parametrize("trust", [None, True])
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_an_old_folder_opens_with_today_s_package(root: Path, then: Any, name: str, trust: bool | None) -> None:
    folder, trusted, expected = root / "old" / name, {"trust_remote_code": trust}, then[f"old/{name}"]
    config: Any = AutoConfig.from_pretrained(folder, **trusted)
    assert type(config) is PlainViTConfig
    model: Any = AutoModelForImageClassification.from_pretrained(folder, **trusted)
    assert type(model) is PlainViTForImageClassification
    vit: Any = AutoModel.from_pretrained(folder, **trusted)
    assert type(vit) is PlainViTModel
    assert type(AutoBackbone.from_config(config, **trusted)) is PlainViTBackbone
    backbone: Any = PlainViTBackbone.from_pretrained(folder)
    processor: Any = AutoImageProcessor.from_pretrained(folder, **trusted)
    assert type(processor) is PlainViTImageProcessor
    pixel_values = golden_pixels()
    with torch.no_grad():
        assert difference(model.eval()(pixel_values).logits, expected["logits"]) < REORDERED
        attentions = model(pixel_values, output_attentions=True).attentions[-1]
        assert difference(attentions, expected["attentions"]) < REORDERED
        assert difference(vit.eval()(pixel_values).last_hidden_state, expected["tokens"]) < REORDERED
        assert difference(backbone.eval()(pixel_values).feature_maps[0], expected["map"]) < REORDERED
    image = (pixel_values[0] * 40 + 100).to(torch.uint8)
    assert difference(processor(image, return_tensors="pt").pixel_values, expected["image"]) < ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_fresh_weights_of_a_seed_are_the_old_ones(root: Path, then: Any, name: str) -> None:
    torch.manual_seed(2)
    fresh = PlainViTForImageClassification(PlainViTConfig.from_pretrained(root / "old" / name)).state_dict()
    assert torch.equal(torch.cat([tensor.flatten() for tensor in fresh.values()]), then[f"old/{name}"]["fresh"])


@pytest.mark.slow
def test_saved_again_a_folder_holds_today_s_code_alone_under_the_old_names(root: Path, saved_again: Path) -> None:
    for folder in saved_again.iterdir():
        assert code_in(folder) == TODAY
        assert {path.name for path in folder.iterdir()} == DATA | TODAY.keys()
        for path in (root / "old" / folder.name, folder):
            assert json.loads((path / "config.json").read_text())["auto_map"] == AUTO_MAP


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_saved_again_a_folder_opens_without_the_package_where_the_old_one_was_opened(
    then: Any, now: Any, name: str
) -> None:
    for kind, tensor in now[f"new/{name}"].items():
        assert difference(tensor, then[f"old/{name}"][kind]) < (ROUNDED if kind == "image" else REORDERED), kind


@pytest.mark.slow
@pytest.mark.parametrize("way", ["push_folder", "push", "push_to_hub"])
def test_a_push_of_today_s_over_an_old_one_replaces_the_code_in_one_commit(
    root: Path, saved_again: Path, way: str, hub: HubEndpoint, tmp_path: Path
) -> None:
    repository, old = "alice/model", tmp_path / "old"
    shutil.copytree(root / "old" / "differential", old)
    with (old / "layers_plain_vit.py").open("a") as code:
        code.write("# older than today's, also right after a release\n")
    push_folder(old, repository)
    before = hub.files(repository)
    assert {name: data for name, data in before.items() if name.endswith(".py")} == code_in(old)
    commits, expected = len(hub.repository(repository, "model").commits), TODAY
    if way == "push_folder":
        push_folder(saved_again / "differential", repository)
    else:
        model = randomize_(PlainViTForImageClassification.from_pretrained(old))
        processor = PlainViTImageProcessor.from_pretrained(old)
        if way == "push":
            push(model, repository, image_processor=processor)
        else:
            model.push_to_hub(repository)
            alone = "image_processing_plain_vit.py"  # the image processor has its own code
            expected = TODAY | {alone: before[alone]}
    after = hub.files(repository)
    assert len(hub.repository(repository, "model").commits) == commits + 1
    assert {name: data for name, data in after.items() if name.endswith(".py")} == expected
    assert json.loads(after["config.json"])["auto_map"] == AUTO_MAP
