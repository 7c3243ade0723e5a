"""Pushing and loading over real HTTP: exactly the checked files arrive, complete, and open everywhere."""

import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
import vit_pytorch
from huggingface_hub import ModelCard
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import CheckpointError, HubError, MappingError, PushRefusedError
from plain_vit.files.marks import is_untouched
from plain_vit.hub import push, push_folder
from plain_vit.hub.card import ModelFacts, write_card
from plain_vit.hub.contents import LIMIT_BYTES
from plain_vit_command import main
from tests.conftest import randomize_
from tests.hub.endpoint import HubEndpoint
from tests.processes import in_a_process
from tests.sizes import few
from tests.tiny import pixels, tiny_config

REPO = "alice/model"
PARTS = (
    *("attention", "checks", "configuration", "heads", "image_processing", "initialization", "intermediates", "layers"),
    *("modeling", "packed", "positions", "releases"),
)
CODE = {f"{name}_plain_vit.py" for name in PARTS}
WHOLE = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"} | CODE


def build(seed: int = 0, **fields: Any) -> PlainViTForImageClassification:
    model = PlainViTForImageClassification(tiny_config(**fields))
    randomize_(model, seed)
    return model.eval()


def save(folder: Path, seed: int = 0, **options: Any) -> Path:
    build(seed).save_pretrained(folder, **options)
    PlainViTImageProcessor(size={"height": 24, "width": 56}).save_pretrained(folder)
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(pixels()).logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "saved")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Skip the waits between retries, and return their lengths."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def run_elsewhere(hub: HubEndpoint, code: str, folder: Path) -> str:
    """Be another user, with a cache of their own, who runs code in a folder; return what is printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        hub.redirect(patch, folder / "other cache")
        patch.chdir(folder)
        exec(code, {"__name__": "__main__"})
    return printed.getvalue()


# ---- a push and a load ----


@pytest.mark.slow
def test_a_pushed_folder_needs_no_editing_and_opens_with_the_same_numbers(hub: HubEndpoint, folder: Path) -> None:
    pushed = push_folder(folder, REPO)
    files = hub.files(REPO)
    assert set(files) == WHOLE == set(pushed.sent)
    assert {name: len(data) for name, data in files.items()} == pushed.sent
    assert pushed.url.startswith(f"{hub.url}/{REPO}/commit/")
    card = files["README.md"].decode()
    assert f'from_checkpoint("{REPO}")' in card
    assert is_untouched(card.encode())
    assert not (folder / "README.md").exists()  # the folder stays as it is
    assert len([path for method, path, status in hub.requests if "/commit/" in path]) == 1
    model = AutoModelForImageClassification.from_pretrained(REPO)
    assert type(model) is PlainViTForImageClassification
    assert torch.equal(logits(model), logits(build()))
    assert type(AutoImageProcessor.from_pretrained(REPO)) is PlainViTImageProcessor
    assert torch.equal(logits(from_checkpoint(REPO).model), logits(build()))


@pytest.mark.slow
def test_the_blocks_of_a_pushed_page_run(hub: HubEndpoint, folder: Path, tmp_path: Path) -> None:
    push_folder(folder, REPO, private=True)
    Image.new("RGB", (67, 31), "red").save(tmp_path / "image.png")
    blocks = re.findall(r"```python\n(.*?)```", hub.files(REPO)["README.md"].decode(), re.DOTALL)
    assert len(blocks) == 3
    assert blocks[0].startswith("import plain_vit\n")  # the process that runs them has imported it
    printed = in_a_process(run_elsewhere, hub, "\n".join(blocks), tmp_path)
    assert "score" in printed
    assert f"{REPO}: plain_vit" in printed


WITHOUT_PACKAGE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "plain_vit":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoBackbone, AutoImageProcessor, AutoModel, AutoModelForImageClassification
repo_id, pixels, *revisions = sys.argv[1:]
for revision in revisions:
    options = dict(trust_remote_code=True, revision=revision)
    model = AutoModelForImageClassification.from_pretrained(repo_id, **options)
    assert type(model).__module__.startswith("transformers_modules.")
    vit = AutoModel.from_pretrained(repo_id, **options)
    AutoImageProcessor.from_pretrained(repo_id, **options)
    torch.save(model(torch.load(pixels)).logits, revision + ".pt")
    if revision == "sharded":
        backbone = AutoBackbone.from_pretrained(repo_id, **options)  # it asks whether the repository exists
        assert torch.equal(backbone.state_dict()["layernorm.weight"], vit.state_dict()["layernorm.weight"])
        model.push_to_hub("alice/copy")
        AutoImageProcessor.from_pretrained(repo_id, **options).push_to_hub("alice/copy")
        copy = AutoModelForImageClassification.from_pretrained("alice/copy", trust_remote_code=True)
        assert torch.equal(copy(torch.load(pixels)).logits, model(torch.load(pixels)).logits)
"""


@pytest.mark.slow
def test_without_the_package_it_opens_from_an_empty_cache_at_a_revision_sharded_and_offline_afterwards(
    hub: HubEndpoint, tmp_path: Path
) -> None:
    first = save(tmp_path / "first", seed=1, max_shard_size="30KB")
    assert (first / "model.safetensors.index.json").exists()
    push_folder(first, REPO, revision="sharded", private=True)
    push_folder(save(tmp_path / "second", seed=2), REPO, private=True)
    torch.save(pixels(), tmp_path / "pixels.pt")

    def run(*revisions: str, offline: bool = False) -> None:
        environment = hub.environment(tmp_path / "other cache", offline=offline)
        environment.pop("PYTHONPATH", None)
        process = subprocess.run(
            [sys.executable, "-c", WITHOUT_PACKAGE, REPO, "pixels.pt", *revisions], cwd=tmp_path, env=environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr

    run("sharded", "main")
    assert set(hub.files("alice/copy")) == WHOLE
    for revision, seed in (("sharded", 1), ("main", 2)):
        assert torch.equal(torch.load(tmp_path / f"{revision}.pt"), logits(build(seed)))
    hub.close()
    (tmp_path / "main.pt").unlink()
    run("main", offline=True)
    assert torch.equal(torch.load(tmp_path / "main.pt"), logits(build(2)))


@pytest.mark.slow
def test_model_and_processor_push_themselves_with_their_code_and_keep_our_page(hub: HubEndpoint, folder: Path) -> None:
    write_card(folder, ModelFacts(license="mit"))
    push_folder(folder, REPO)
    page = hub.files(REPO)["README.md"]
    build(seed=3).push_to_hub(REPO)
    PlainViTImageProcessor(size={"height": 16, "width": 28}).push_to_hub(REPO)
    files = hub.files(REPO)
    assert set(files) == WHOLE
    assert files["README.md"] == page
    assert torch.equal(logits(AutoModelForImageClassification.from_pretrained(REPO)), logits(build(3)))
    assert AutoImageProcessor.from_pretrained(REPO).size == {"height": 16, "width": 28}


@pytest.mark.slow
def test_a_model_that_pushes_itself_to_a_new_private_repository_opens(hub: HubEndpoint) -> None:
    build().push_to_hub(REPO, private=True, max_shard_size="30KB", revision="draft")
    assert hub.repository(REPO, "model").private
    assert set(hub.files(REPO, revision="draft")) >= {"model.safetensors.index.json", "config.json"} | CODE - {
        "image_processing_plain_vit.py"
    }
    model = AutoModel.from_pretrained(REPO, revision="draft").eval()
    with torch.no_grad():
        assert torch.equal(model(pixels()).last_hidden_state, build().vit(pixels()).last_hidden_state)


@pytest.mark.slow
def test_saving_with_push_to_hub_uploads_what_was_saved_and_nothing_else(hub: HubEndpoint, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    build(seed=2).save_pretrained(folder, push_to_hub=True, repo_id=REPO)
    assert set(hub.files(REPO)) == WHOLE - {"preprocessor_config.json", "image_processing_plain_vit.py"}
    assert torch.equal(logits(AutoModelForImageClassification.from_pretrained(REPO)), logits(build(2)))


@pytest.mark.slow
def test_weights_of_an_earlier_push_go(hub: HubEndpoint, tmp_path: Path) -> None:
    push_folder(save(tmp_path / "sharded", seed=1, max_shard_size="30KB"), REPO)
    shards = {name for name in hub.files(REPO) if ".safetensors" in name}
    assert len(shards) > 2
    pushed = push_folder(save(tmp_path / "single", seed=2), REPO)
    assert set(pushed.removed) == shards
    assert set(hub.files(REPO)) == WHOLE
    assert torch.equal(logits(from_checkpoint(REPO).model), logits(build(2)))


def test_a_timm_repository_opens(hub: HubEndpoint, tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2)
    randomize_(theirs).eval()
    timm.models.save_for_hf(theirs, tmp_path / "timm", safe_serialization=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "timm").iterdir()}
    hub.add_repository("alice/timm-vit", files={**files, "hostile.py": b"raise SystemExit(99)"})
    converted = from_checkpoint("alice/timm-vit", revision="main")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        ours, expected = converted.model(images).logits, theirs(images)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    fetched = {path.rsplit("/", 1)[1] for method, path, _ in hub.requests if "/resolve/" in path}
    assert "hostile.py" not in fetched


# ---- what is sent and what is not ----


def test_a_dry_run_lists_the_files_and_contacts_no_server(folder: Path) -> None:
    (folder / "checkpoints" / "step_00000007").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000007" / "model.safetensors").write_bytes(b"x")
    (folder / "optimizer.bin").write_bytes(b"x")
    (folder / "notes.txt").write_text("mine")
    (folder / "report").mkdir()
    Image.new("RGB", (3, 2)).save(folder / "report" / "curves.png")
    Image.new("RGB", (3, 2)).save(folder / "report" / "passport.png")
    (folder / "__pycache__").mkdir()
    for number in range(7):
        (folder / "__pycache__" / f"{number}.pyc").write_bytes(b"x")
    pushed = push_folder(folder, REPO, dry_run=True, exclude=["report/cur*"])  # the tests are offline
    assert set(pushed.sent) == WHOLE
    assert pushed.left_out["report/curves.png"] == "excluded"
    assert pushed.left_out["notes.txt"] == pushed.left_out["report/passport.png"] == "not part of a model repository"
    assert {pushed.left_out[name] for name in ("checkpoints/step_00000007/model.safetensors", "optimizer.bin")} == {
        "not part of a model repository"
    }
    assert len(pushed.left_out) == 12
    assert pushed.url is None
    shown = str(pushed).splitlines()
    assert shown[0] == "would send to alice/model:"
    assert "  left out __pycache__/: 7 files, not part of a model repository" in shown
    assert "  left out notes.txt: not part of a model repository" in shown


@pytest.mark.slow
def test_a_file_is_sent_besides_only_by_its_exact_path(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "first.txt").write_text("mine")
    (folder / "notes" / "second.txt").write_text("mine")
    assert "notes/first.txt" in push_folder(folder, REPO, dry_run=True, include=["notes/first.txt"]).sent
    asked = ["notes", "notes/*", "first.txt", "./notes/first.txt", "notes/third.txt"]
    with pytest.raises(PushRefusedError) as caught:
        push_folder(folder, REPO, dry_run=True, include=asked)
    assert [fault.split()[0] for fault in caught.value.faults if "exact path" in fault] == asked


@pytest.mark.slow
def test_what_the_model_needs_cannot_be_excluded(folder: Path) -> None:
    patterns = ["*.safetensors", "config.json", "layers*", "preprocessor_config.json"]
    with pytest.raises(PushRefusedError) as caught:
        push_folder(folder, REPO, dry_run=True, exclude=patterns)
    needed = {fault.split()[0] for fault in caught.value.faults if "is needed" in fault}
    assert needed == {"model.safetensors", "config.json", "layers_plain_vit.py", "preprocessor_config.json"}
    (folder / "README.md").write_text("# Mine\n")
    assert "README.md" not in push_folder(folder, REPO, dry_run=True, exclude=["README.md"]).sent


@pytest.mark.slow
def test_a_folder_is_sent_as_it_was_looked_at(hub: HubEndpoint, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = huggingface_hub.HfApi.list_repo_tree

    def meanwhile(self: huggingface_hub.HfApi, *arguments: Any, **options: Any) -> Any:
        (folder / "model.safetensors").write_bytes(b"something else")
        (folder / "config.json").write_text("something else")
        return listed(self, *arguments, **options)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", meanwhile)
    with pytest.raises(CheckpointError, match="model.safetensors changed after being inspected"):
        push_folder(folder, REPO)
    assert hub.files(REPO) == {}


@pytest.mark.slow
def test_huge_files_links_and_pipes_are_refused(folder: Path, tmp_path: Path) -> None:
    with (folder / "labels.txt").open("wb") as file:
        file.truncate(LIMIT_BYTES + 1)  # takes no room
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "private.txt").write_text("x")
    (folder / "LICENSE").symlink_to(tmp_path / "outside" / "private.txt")
    (folder / "linked.txt").symlink_to(tmp_path / "outside")
    (folder / "classes.txt").symlink_to("config.json")
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "NOTICE")
    with pytest.raises(PushRefusedError) as caught:
        push_folder(folder, REPO, dry_run=True, include=["pipe.txt", "linked.txt"])
    faults = {fault.split()[0]: fault for fault in caught.value.faults}
    assert set(faults) == {"labels.txt", "LICENSE", "linked.txt", "NOTICE", "pipe.txt"}
    assert "5,000,000,001 bytes" in faults["labels.txt"]
    assert "link out of the folder" in faults["linked.txt"]
    assert "not a regular file" in faults["pipe.txt"]
    for name in ("labels.txt", "LICENSE", "NOTICE"):
        (folder / name).unlink()
    pushed = push_folder(folder, REPO, dry_run=True)  # what stays here is not even opened
    assert {"linked.txt", "pipe.txt"} <= set(pushed.left_out)


def test_a_folder_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        push_folder(folder, REPO, dry_run=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "model-00001-of-00002.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="left over"):
        push_folder(folder, REPO, dry_run=True)
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        push_folder(folder, REPO, dry_run=True)
    with pytest.raises(CheckpointError, match="not a folder"):
        push_folder(tmp_path / "gone", REPO, dry_run=True)


@pytest.mark.slow
def test_a_folder_that_does_not_open_is_not_pushed(folder: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises((CheckpointError, MappingError), match=match):
            push_folder(folder, REPO, dry_run=True)

    def settings(name: str, **changes: Any) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **changes}))

    config = json.loads((folder / "config.json").read_text())
    settings("config.json", hidden_size=config["hidden_size"] + config["num_attention_heads"])
    refused("shape|width|tensor")
    settings("config.json", hidden_size=config["hidden_size"])
    for auto_map, says in (
        ({**config["auto_map"], "AutoModel": "gone.Model"}, "gone.py is missing"),
        ({**config["auto_map"], "AutoModel": "modeling_plain_vit.Gone"}, "has no Gone"),
        ({**config["auto_map"], "AutoModel": "other/repo--modeling_plain_vit.PlainViTModel"}, "a file in the folder"),
        ({"AutoModel": 3}, "a file in the folder"),
        ([], "expected a mapping|describe no model"),
    ):
        if auto_map:
            settings("config.json", auto_map=auto_map)
            refused(says)
    settings("config.json", auto_map=config["auto_map"])
    (folder / "layers_plain_vit.py").rename(folder / "elsewhere.py")
    refused("layers_plain_vit.py is missing")
    (folder / "elsewhere.py").rename(folder / "layers_plain_vit.py")
    settings("preprocessor_config.json", image_std=[0.0, 1.0, 1.0])
    refused("image_std|deviation")
    settings("preprocessor_config.json", image_std=[0.5, 0.5, 0.5])
    push_folder(folder, REPO, dry_run=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused("NaN")


@pytest.mark.slow
def test_code_of_ones_own_is_read_and_said_not_to_have_run(folder: Path) -> None:
    (folder / "layers_plain_vit.py").write_text((folder / "layers_plain_vit.py").read_text() + "\n# mine\n")
    pushed = push_folder(folder, REPO, dry_run=True)
    assert pushed.notes == ["layers_plain_vit.py: not the code of this version of plain-vit; it was parsed, not run"]
    assert pushed.notes[0] in str(pushed)
    (folder / "layers_plain_vit.py").write_text("def:\n")
    with pytest.raises(CheckpointError, match="layers_plain_vit.py is not valid Python"):
        push_folder(folder, REPO, dry_run=True)


@pytest.mark.slow
def test_an_unchanged_push_sends_nothing_and_another_one_what_has_changed(hub: HubEndpoint, folder: Path) -> None:
    push_folder(folder, REPO)
    commits = len(hub.repository(REPO, "model").commits)
    again = push_folder(folder, REPO)
    assert (dict(again.sent), set(again.unchanged)) == ({}, WHOLE)
    assert str(again).startswith(f"nothing to send: {REPO} already has all {len(WHOLE)} files")
    assert len(hub.repository(REPO, "model").commits) == commits
    third = push_folder(save(folder, seed=2), REPO)
    assert set(third.sent) == {"model.safetensors"}
    assert set(third.unchanged) == WHOLE - {"model.safetensors"}
    write_card(folder, ModelFacts(license="mit"))  # a person has not edited the one before
    assert set(push_folder(folder, REPO).sent) == {"README.md"}
    assert b"license: mit" in hub.files(REPO)["README.md"]


@pytest.mark.slow
@pytest.mark.parametrize("status", few([403, 400, 413], 1))
def test_a_refused_first_push_leaves_it_empty(status: int, hub: HubEndpoint, folder: Path) -> None:
    hub.fail("POST", "/commit/", status=status)
    with pytest.raises(HubError, match="was created for this push and is empty"):
        push_folder(folder, REPO)
    push_folder(folder, REPO)
    hub.fail("POST", "/commit/", status=status)
    with pytest.raises(HubError, match="was not changed"):
        push_folder(save(folder, seed=2), REPO)
    assert set(hub.files(REPO)) == WHOLE


@pytest.mark.slow
def test_a_revision_that_cannot_be_is_named(hub: HubEndpoint, folder: Path) -> None:
    for revision in ("a b", "a..b", "-x", "x.lock", "a~1", "", "/x", "\x1b[31m"):
        with pytest.raises(HubError, match="is not a valid branch name") as caught:
            push_folder(folder, REPO, revision=revision)
        assert str(caught.value).isprintable()
    assert not hub.path(REPO, "model").exists()
    hub.fail("POST", "/branch/", status=400)
    with pytest.raises(HubError, match="branch 'draft'"):
        push_folder(folder, REPO, revision="draft")


@pytest.mark.slow
def test_an_image_processor_within_another_is_pushed(hub: HubEndpoint, folder: Path) -> None:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    nested = {"image_processor": settings | {"size": {"height": 16, "width": 28}}, "processor_class": "CLIPProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    push_folder(folder, REPO)
    assert set(hub.files(REPO)) == WHOLE | {"processor_config.json"}
    assert AutoImageProcessor.from_pretrained(REPO).size == {"height": 16, "width": 28}


@pytest.mark.slow
def test_a_model_in_memory_is_pushed_with_its_page_and_its_image_processor(hub: HubEndpoint) -> None:
    processor = PlainViTImageProcessor(size={"height": 24, "width": 56})
    pushed = push(build(), REPO, image_processor=processor, tags=["insects"], private=True, message="First")
    files = hub.files(REPO)
    assert set(files) == WHOLE == set(pushed.sent)
    assert is_untouched(files["README.md"])
    assert "- insects" in files["README.md"].decode()
    assert "# model\n" in files["README.md"].decode()
    assert f'from_checkpoint("{REPO}")' in files["README.md"].decode()
    assert hub.repository(REPO, "model").private
    assert "First" in [commit["title"] for commit in hub.repository(REPO, "model").commits.values()]
    assert torch.equal(logits(AutoModelForImageClassification.from_pretrained(REPO)), logits(build()))
    assert AutoImageProcessor.from_pretrained(REPO).size == {"height": 24, "width": 56}
    push(build(seed=2), REPO, revision="draft")  # what the repository has besides stays
    assert torch.equal(
        logits(AutoModelForImageClassification.from_pretrained(REPO, revision="draft")), logits(build(2))
    )
    assert AutoImageProcessor.from_pretrained(REPO, revision="draft").size == {"height": 24, "width": 56}
    push(build(), "alice/other")
    assert set(hub.files("alice/other")) == WHOLE - {"preprocessor_config.json", "image_processing_plain_vit.py"}


@pytest.mark.slow
def test_a_model_in_memory_is_searched_before_it_is_pushed(hub: HubEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "aB3" * 12
    broken = build()
    with torch.no_grad():
        broken.classifier.bias[0] = float("nan")
    labels = dict(enumerate(["ant", "bee", token, "dog", "eel", "fox", "gnu"]))
    with pytest.raises(PushRefusedError, match=r"config\.json contains what looks like a token of Hugging Face"):
        push(build(id2label=labels), REPO)
    with pytest.raises((CheckpointError, MappingError), match="NaN"):
        push(broken, REPO)
    with pytest.raises(PushRefusedError, match="commit message"):
        push(build(), REPO, message=token)
    with pytest.raises(PushRefusedError, match=r"README\.md contains what looks like a token of Hugging Face"):
        push(build(), REPO, tags=[token])
    with pytest.raises(HubError, match="has no owner"):
        push(build(), "model")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="There is no token"):
        push(build(), REPO)
    assert not hub.path(REPO, "model").exists()


OF_ONES_OWN = """
from plain_vit import PlainViTForImageClassification

class Doubled(PlainViTForImageClassification):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 2 * outputs.logits
        return outputs

Doubled.register_for_auto_class("AutoModelForImageClassification")
"""


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["push", "push_to_hub"])
def test_a_class_of_ones_own_is_pushed_with_its_code_and_opens(
    hub: HubEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    name = f"of_ones_own_{whole}".lower()
    (tmp_path / f"{name}.py").write_text(OF_ONES_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module(name).Doubled(tiny_config())
    randomize_(model, 0).eval()
    push(model, REPO) if whole else model.push_to_hub(REPO)
    assert set(hub.files(REPO)) >= {"README.md", "config.json", "model.safetensors", f"{name}.py"}
    where = AutoConfig.from_pretrained(REPO).auto_map["AutoModelForImageClassification"]
    kind: Any = get_class_from_dynamic_module(where, REPO)  # not the class of the package
    opened = kind.from_pretrained(REPO)
    assert type(opened).__module__.startswith("transformers_modules.")
    assert torch.equal(logits(opened), 2 * logits(build(0)))


@pytest.mark.parametrize("repo_id", ["model", "a/b/c", "alice/mod el", "alice/-model", ""])
def test_a_name_that_cannot_be_is_refused(repo_id: str, folder: Path) -> None:
    with pytest.raises(HubError, match="is not a valid repository id|has no owner"):
        push_folder(folder, repo_id, dry_run=True)


@pytest.mark.slow
def test_code_in_the_folder_is_sent_but_never_run(
    hub: HubEndpoint, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in folder.glob("*.py"):
        file.write_text("open('RAN', 'w')\n" + file.read_text())
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoConfig"] = "hostile.Config"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hostile.py").write_text("open('RAN', 'w')\nclass Config: pass\n")
    push_folder(folder, REPO)
    assert not (tmp_path / "RAN").exists()
    assert b"RAN" in hub.files(REPO)["modeling_plain_vit.py"]


# ---- the page ----


@pytest.mark.slow
def test_a_page_that_a_person_edited_on_the_hub_stays(hub: HubEndpoint, folder: Path) -> None:
    push_folder(folder, REPO)
    mine = b"---\nlibrary_name: transformers\n---\n# Mine\n"
    huggingface_hub.upload_file(path_or_fileobj=mine, path_in_repo="README.md", repo_id=REPO)
    pushed = push_folder(save(folder, seed=2), REPO)
    assert "edited by a person" in pushed.left_out["README.md"]
    assert hub.files(REPO)["README.md"] == mine
    assert torch.equal(logits(from_checkpoint(REPO).model), logits(build(2)))
    push_folder(folder, REPO, include=["README.md"])
    assert is_untouched(hub.files(REPO)["README.md"])


def test_metadata_that_the_hub_refuses_is_said_before_anything_is_sent(hub: HubEndpoint, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: other\n---\n# Mine\n")
    with pytest.raises(HubError, match='the metadata of README.md: "license_name" is needed'):
        push_folder(folder, REPO)
    assert hub.files(REPO) == {}
    assert not [path for method, path, _ in hub.requests if method == "PUT" or "/commit/" in path]


# ---- trouble ----


def heads(hub: HubEndpoint) -> dict[str, str]:
    return hub.repository(REPO, "model").branches


@pytest.mark.slow
def test_a_fault_that_passes_is_outlived(hub: HubEndpoint, folder: Path, slept: list[float]) -> None:
    hub.fail("POST", "/commit/", status=500)
    hub.fail("POST", "/commit/", status=429, headers={"Retry-After": "7"})
    hub.fail("POST", "/api/repos/create", status=503)
    hub.drop("PUT", "/lfs/", after=100, times=2)
    hub.drop("POST", "/preupload/", times=1)
    push_folder(folder, REPO)
    assert set(hub.files(REPO)) == WHOLE
    assert 7.0 in slept


@pytest.mark.slow
def test_an_interrupted_push_is_taken_up_where_it_broke_off(hub: HubEndpoint, folder: Path, slept: list[float]) -> None:
    hub.fail("POST", "/commit/", status=500, times=99)
    with pytest.raises(HubError, match=r"alice/model was created for this push and is empty: internal error.*500"):
        push_folder(folder, REPO)
    assert heads(hub).keys() == {"main"}
    assert hub.files(REPO) == {}
    hub.faults.clear()
    uploads = [method for method, *_ in hub.requests].count("PUT")
    push_folder(folder, REPO)
    assert set(hub.files(REPO)) == WHOLE
    assert [method for method, *_ in hub.requests].count("PUT") == uploads == 1


@pytest.mark.slow
def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    hub: HubEndpoint, folder: Path, slept: list[float], tmp_path: Path
) -> None:
    push_folder(save(tmp_path / "sharded", max_shard_size="30KB"), REPO)
    hub.lose_answer("POST", "/commit/")
    push_folder(folder, REPO)
    commits = hub.repository(REPO, "model").commits
    assert len(commits) == 3  # the first, empty one and two pushes
    assert set(hub.files(REPO)) == WHOLE


REFUSALS = {
    401: "the token was rejected|does not exist or is not visible with this token",
    403: "no write access",
    412: "changed by someone else during this push",
    429: "too many requests",
    500: "internal error of the Hub",
}


@pytest.mark.slow
def test_a_refusal_is_a_clear_error_and_changes_nothing(hub: HubEndpoint, folder: Path, slept: list[float]) -> None:
    push_folder(folder, REPO)
    before = heads(hub)
    save(folder, seed=2)
    for status, says in REFUSALS.items():
        hub.faults.clear()
        hub.fail("POST", "/commit/", status=status, times=99)
        with pytest.raises(HubError, match=says) as caught:
            push_folder(folder, REPO)
        assert str(status) in str(caught.value) or "this token" in str(caught.value)
        assert heads(hub) == before


@pytest.mark.slow
def test_somebody_elses_change_is_not_overwritten(
    hub: HubEndpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_folder(folder, REPO)
    listed = huggingface_hub.HfApi.list_repo_tree

    def meanwhile(self: huggingface_hub.HfApi, *arguments: Any, **options: Any) -> Any:
        found = listed(self, *arguments, **options)
        repository = hub.repository(REPO, "model")
        repository.commit("main", "of somebody else", repository.files("main"))
        hub.save(repository)
        return found

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", meanwhile)
    with pytest.raises(HubError, match="changed by someone else during this push"):
        push_folder(save(folder, seed=2), REPO)
    assert torch.equal(logits(from_checkpoint(REPO).model), logits(build(0)))


@pytest.mark.slow
def test_token_and_permission_errors_are_clear(hub: HubEndpoint, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for token, says in [
        ("hf_wrong", "token was rejected"),
        ("hf_read", "no write access"),
        ("hf_mallory", "no write access"),
    ]:
        with pytest.raises(HubError, match=says):
            push_folder(folder, REPO, token=token)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="There is no token: run `hf auth login`"):
        push_folder(folder, REPO)
    assert not hub.path(REPO, "model").exists()


@pytest.mark.slow
def test_private_is_never_pushed_into_a_public_repository(hub: HubEndpoint, folder: Path) -> None:
    hub.add_repository(REPO)
    with pytest.raises(HubError, match="exists and is public"):
        push_folder(folder, REPO, private=True)
    assert hub.files(REPO) == {}
    push_folder(folder, "alice/other", private=True)
    assert hub.repository("alice/other", "model").private
    with pytest.raises(HubError, match="not changed|does not exist"):
        push_folder(folder, "alice/other", token="hf_mallory")


@pytest.mark.slow
def test_without_a_network_the_error_says_so(
    hub: HubEndpoint, folder: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.close()
    with pytest.raises(HubError, match="cannot be reached"):
        push_folder(folder, REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="unset HF_HUB_OFFLINE"):
        push_folder(folder, REPO)


@pytest.mark.slow
def test_a_cut_download_is_not_taken_for_the_file(hub: HubEndpoint, folder: Path, slept: list[float]) -> None:
    push_folder(folder, REPO)
    hub.drop("GET", "/lfs/", after=1000, times=99)
    with pytest.raises(HubError, match="could it be fetched from the Hub"):
        from_checkpoint(REPO)
    hub.faults.clear()
    assert torch.equal(logits(from_checkpoint(REPO).model), logits(build()))


@pytest.mark.slow
def test_a_file_that_changed_on_the_way_is_noticed(hub: HubEndpoint, folder: Path) -> None:
    push_folder(folder, REPO)
    entry = hub.repository(REPO, "model").files("main")["model.safetensors"]
    stored = hub.object(entry["lfs"])
    stored.write_bytes(stored.read_bytes()[:-8])
    with pytest.raises((HubError, CheckpointError)):
        from_checkpoint(REPO)


# ---- the command line ----


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = vit_pytorch.ViT(
        image_size=24, patch_size=8, num_classes=5, dim=20, depth=2, heads=2, mlp_dim=24, dim_head=10
    )
    torch.save(randomize_(model).state_dict(), tmp_path / "foreign.pt")
    return tmp_path / "foreign.pt"


HINTS = ["--num-attention-heads", "2", "--image-size", "24", "--patch-size", "8"]


@pytest.mark.slow
def test_convert_pushes_a_model_with_its_page_and_leaves_nothing_here(
    hub: HubEndpoint, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    before = sorted(tmp_path.rglob("*.safetensors"))
    assert main(["convert", str(checkpoint), "--push", REPO, "--private", *HINTS]) == 0
    assert f"sent to {REPO}:" in capsys.readouterr().out
    files = hub.files(REPO)
    assert set(files) == WHOLE
    assert hub.repository(REPO, "model").private
    card = files["README.md"].decode()
    assert card.startswith("---\n")
    assert "# model\n" in card
    assert "Converted from `foreign.pt`, a checkpoint of vit_pytorch, layout" in card
    assert "were given at conversion: `num_attention_heads = 2`" in card
    assert "0.0e+00 for the logits" in card
    assert str(tmp_path) not in card
    assert sorted(tmp_path.rglob("*.safetensors")) == before
    converted = from_checkpoint(checkpoint, num_attention_heads=2, image_size=24, patch_size=8).model
    opened = AutoModelForImageClassification.from_pretrained(REPO)
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        assert torch.equal(opened(images).logits, converted(images).logits)


@pytest.mark.slow
def test_push_sends_what_the_dry_run_listed(hub: HubEndpoint, folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "notes.pt").write_bytes(b"x")
    assert main(["push", str(folder), REPO, "--include", "notes.pt"]) == PushRefusedError.exit_code
    assert "notes.pt is neither plain text nor PNG or JPEG" in capsys.readouterr().err
    arguments = ["push", str(folder), REPO, "--exclude", "*.csv", "--revision", "draft", "--message", "First"]
    assert main([*arguments, "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert not hub.path(REPO, "model").exists()
    assert main(arguments) == 0
    sent = capsys.readouterr().out
    assert listed.splitlines()[1:] == sent.splitlines()[1:-1]
    assert set(hub.files(REPO, revision="draft")) == WHOLE
    assert hub.files(REPO) == {}
    commits = hub.repository(REPO, "model").commits
    assert "First" in [commit["title"] for commit in commits.values()]


def test_mistakes_at_a_push_have_exit_codes_and_no_stack_trace(
    hub: HubEndpoint, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert main(["push", str(tmp_path / "gone"), REPO]) == CheckpointError.exit_code
    assert main(["push", str(folder), "no owner"]) == HubError.exit_code
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", str(folder), REPO]) == HubError.exit_code
    assert main(["convert", str(folder), "--push", REPO]) == HubError.exit_code  # before any work
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(folder)])
    printed = capsys.readouterr().err
    assert "hf auth login" in printed
    assert "give an output: OUT, or --push REPO" in printed
    assert "Traceback" not in printed


def test_license_and_base_of_a_source_on_the_hub_are_in_the_model_card(hub: HubEndpoint, tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2)
    timm.models.save_for_hf(randomize_(theirs), tmp_path / "timm", safe_serialization=True)
    (tmp_path / "timm" / "README.md").write_text(
        "---\nlicense: cc-by-nc-4.0\ndatasets:\n- imagenet-1k\n---\n# Theirs\n"
    )
    hub.add_repository("bob/timm-vit", files={path.name: path.read_bytes() for path in (tmp_path / "timm").iterdir()})
    assert main(["convert", "bob/timm-vit", str(tmp_path / "ours")]) == 0
    card = ModelCard.load(tmp_path / "ours" / "README.md")
    assert (card.data.license, card.data.base_model, card.data.datasets) == (
        "cc-by-nc-4.0", "bob/timm-vit", ["imagenet-1k"],
    )  # fmt: skip
    assert "[bob/timm-vit](https://huggingface.co/bob/timm-vit)" in card.text
