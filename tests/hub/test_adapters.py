"""Pushing adapters that peft has saved, over real HTTP: they arrive with our page and a base that others can open."""

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from huggingface_hub import ModelCard, snapshot_download
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.errors import CheckpointError, HubError
from plain_vit.files.marks import is_untouched
from plain_vit.hub import push, push_folder
from plain_vit.hub.adapters import open_adapter
from tests.conftest import randomize_
from tests.hub.endpoint import HubEndpoint
from tests.hub.test_hub import run_elsewhere
from tests.processes import in_a_process
from tests.tiny import pixels, tiny_config

BASE, REPO = "alice/base", "alice/adapter"
ARRIVES = {"README.md", "adapter_config.json", "adapter_model.safetensors"}


def save_base(place: Path) -> Path:
    randomize_(PlainViTForImageClassification(tiny_config())).save_pretrained(place / "base")
    return place / "base"


def adapted(base: str | Path, **options: Any) -> peft.PeftModel:
    whole = PlainViTForImageClassification.from_pretrained(base, **options)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    model: Any = peft.get_peft_model(whole, config).eval()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:  # the base stays that of the Hub
            parameter.data.normal_(generator=draw)
    return model


def save_adapter(folder: Path, base: str | Path, **fields: Any) -> Path:
    """Save an adapter as peft does, with other values of some fields of its settings."""
    adapted(base).save_pretrained(folder)
    return with_fields(folder, **fields)


def with_fields(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def metadata(page: bytes) -> dict[str, Any]:
    return ModelCard(page.decode()).data.to_dict()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """An adapter of a model that was opened from a folder."""
    return save_adapter(tmp_path / "adapter", save_base(tmp_path))


@pytest.mark.slow
def test_adapters_arrive_with_pages_whose_blocks_give_the_same_numbers(hub: HubEndpoint, tmp_path: Path) -> None:
    push_folder(save_base(tmp_path), BASE)
    models = {REPO: adapted(BASE), "alice/other": adapted(BASE, num_labels=11, ignore_mismatched_sizes=True)}
    torch.save(pixels(), tmp_path / "pixels.pt")
    script = ["import torch"]
    for number, (repo_id, model) in enumerate(models.items()):
        folder = tmp_path / f"adapter {number}"
        model.save_pretrained(folder)
        written = {path.name: path.read_bytes() for path in folder.iterdir()}
        pushed = push_folder(folder, repo_id)
        files = hub.files(repo_id)
        assert set(files) == ARRIVES == set(pushed.sent)
        assert all(files[name] == written[name] for name in ARRIVES - {"README.md"})
        assert (folder / "README.md").read_bytes() == written["README.md"]  # the folder stays as it is
        page = files["README.md"]
        assert is_untouched(page)
        assert b"More Information Needed" not in page
        assert b"your-name" not in page
        said = metadata(page)
        assert (said["base_model"], said["base_model_relation"], said["library_name"]) == (BASE, "adapter", "peft")
        assert f"[{BASE}](https://huggingface.co/{BASE})" in page.decode()
        script += re.findall(r"```python\n(.*?)```", page.decode(), re.DOTALL)
        assert script[-1].startswith("import plain_vit\n")  # the process that runs them has imported it
        script.append(f"torch.save(model.eval()(torch.load('pixels.pt')).logits, 'logits {number}.pt')")
    assert push_folder(folder, repo_id).sent == {}  # nothing has changed
    in_a_process(run_elsewhere, hub, "\n".join(script), tmp_path)
    for number, model in enumerate(models.values()):
        with torch.no_grad():
            assert torch.equal(torch.load(tmp_path / f"logits {number}.pt"), model(pixels()).logits)


@pytest.mark.slow
def test_an_adapter_in_memory_is_pushed_with_its_page_and_tags(hub: HubEndpoint, tmp_path: Path) -> None:
    push_folder(save_base(tmp_path), BASE)
    processor = PlainViTImageProcessor(size={"height": 24, "width": 56})
    push(adapted(BASE), "alice/of-peft", image_processor=processor, tags=["insects"])
    code = {"image_processing_plain_vit.py", "releases_plain_vit.py"}
    assert set(hub.files("alice/of-peft")) == ARRIVES | {"preprocessor_config.json"} | code
    page = hub.files("alice/of-peft")["README.md"]
    assert is_untouched(page)
    assert (metadata(page)["base_model"], "insects" in metadata(page)["tags"]) == (BASE, True)
    model = PlainViTForImageClassification.from_pretrained(BASE)
    try:  # transformers 5.24 asks for a release of peft that did not exist when it came out
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"transformers {transformers.__version__} refuses peft {peft.__version__}: {error}")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    push(model, REPO, tags=["insects"])
    files = hub.files(REPO)
    assert set(files) == ARRIVES
    assert (metadata(files["README.md"])["base_model"], "insects" in metadata(files["README.md"])["tags"]) == (
        BASE,
        True,
    )


@pytest.mark.slow
def test_the_image_processor_next_to_an_adapter_goes_along(hub: HubEndpoint, tmp_path: Path) -> None:
    push_folder(save_base(tmp_path), BASE)
    folder = save_adapter(tmp_path / "adapter", BASE)
    PlainViTImageProcessor(size={"height": 24, "width": 56}).save_pretrained(folder)
    push_folder(folder, REPO)
    code = {"image_processing_plain_vit.py", "releases_plain_vit.py"}
    assert set(hub.files(REPO)) == ARRIVES | {"preprocessor_config.json"} | code


def test_a_base_in_a_local_folder_is_refused_in_one_line_that_says_what_to_do(hub: HubEndpoint, local: Path) -> None:
    for dry_run in (True, False):
        with pytest.raises(CheckpointError) as caught:
            push_folder(local, REPO, dry_run=dry_run)
        message = str(caught.value)
        assert "\n" not in message
        assert "base_model_name_or_path" in message
        assert "push the base model, and write its id (user/name) there" in message
    assert not hub.path(REPO, "model").exists()


@pytest.mark.parametrize(
    "base",
    ["/home/bob/base", "./base", "../base", "~/base", "C:\\Users\\bob\\base", "file:///home/bob", "runs/2026/base",
     "", ".", "a b", "\x1b[31mred", "x" * 300, None, 7, ["alice/base"]],
)  # fmt: skip
def test_an_invalid_hub_id_is_not_a_base(base: object, local: Path) -> None:
    with pytest.raises(CheckpointError, match="base_model_name_or_path") as caught:
        push_folder(with_fields(local, base_model_name_or_path=base), REPO, dry_run=True)
    assert str(caught.value).isprintable()


def test_a_relative_folder_that_looks_like_an_id_is_refused(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_adapter(local, "base")  # its page says so too
    with pytest.raises(CheckpointError, match="push the base model"):
        push_folder(local, REPO, dry_run=True)


@pytest.mark.slow
def test_a_base_in_the_hub_cache_is_named_by_its_id(hub: HubEndpoint, tmp_path: Path) -> None:
    push_folder(save_base(tmp_path), BASE)
    folder = save_adapter(tmp_path / "adapter", snapshot_download(BASE))
    with pytest.raises(CheckpointError, match=f"write '{BASE}' there"):
        push_folder(folder, REPO)
    push_folder(with_fields(folder, base_model_name_or_path=BASE), REPO)
    assert not any(str(tmp_path).encode() in data for data in hub.files(REPO).values())


def test_a_base_that_is_not_on_the_hub_is_refused_before_a_repository_is_made(
    hub: HubEndpoint, local: Path, tmp_path: Path
) -> None:
    save_adapter(local, tmp_path / "base", base_model_name_or_path="alice/elsewhere")
    with pytest.raises(HubError, match="alice/elsewhere, the base model of the adapter, is not on the Hub"):
        push_folder(local, REPO)
    assert not hub.path(REPO, "model").exists()
    hub.add_repository("alice/elsewhere")
    push_folder(local, REPO)
    assert set(hub.files(REPO)) == ARRIVES


def test_an_adapter_next_to_a_whole_model_needs_a_base_too(local: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "base" / name).write_bytes((local / name).read_bytes())
    with pytest.raises(CheckpointError, match="push the base model"):
        push_folder(tmp_path / "base", REPO, dry_run=True)


# ---- the page ----


@pytest.mark.slow
def test_text_written_by_hand_is_kept(hub: HubEndpoint, tmp_path: Path) -> None:
    hub.add_repository(BASE)
    folder = save_adapter(tmp_path / "adapter", save_base(tmp_path), base_model_name_or_path=BASE)
    page = (folder / "README.md").read_text().replace(str(tmp_path / "base"), BASE)
    mine = page.replace("# Model Card for Model ID", "# Ants and bees")
    (folder / "README.md").write_text(mine)
    push_folder(folder, REPO)
    assert hub.files(REPO)["README.md"].decode() == mine
    (folder / "README.md").write_text(page.replace("library_name: peft", "library_name: peft\nlicense: cc-by-4.0"))
    push_folder(folder, "alice/other")
    sent = hub.files("alice/other")["README.md"]
    assert is_untouched(sent)  # of peft's template only the metadata was filled in
    assert metadata(sent)["license"] == "cc-by-4.0"
    assert b"`cc-by-4.0`" in sent
    (folder / "README.md").unlink()
    push_folder(folder, "alice/third")
    assert is_untouched(hub.files("alice/third")["README.md"])
    push_folder(folder, "alice/fourth", exclude=["README.md"])
    assert "README.md" not in hub.files("alice/fourth")


def test_an_edited_page_that_names_another_base_is_refused(hub: HubEndpoint, tmp_path: Path) -> None:
    hub.add_repository(BASE)
    folder = save_adapter(tmp_path / "adapter", save_base(tmp_path), base_model_name_or_path=BASE)
    page = (folder / "README.md").read_text().replace("Model ID", "ants")
    pages = [
        page,  # a local path
        page.replace(f"base_model: {tmp_path / 'base'}", f"base_model: {BASE}"),  # one in a tag alone
        "# Mine\n",
        "---\nbase_model: [a\n---\n# Mine\n",
        "---\n- base_model\n---\n# Mine\n",
        "---\nbase_model: alice/another\n---\n# Mine\n",
    ]
    for text in pages:
        (folder / "README.md").write_text(text)
        with pytest.raises(CheckpointError, match=rf"README\.md .* base_model: {BASE}") as caught:
            push_folder(folder, REPO, dry_run=True)
        assert str(caught.value).isprintable()
    for said in (BASE, f"[{BASE}]"):
        (folder / "README.md").write_text(f"---\nbase_model: {said}\n---\n# Mine\n")
        assert "README.md" in push_folder(folder, REPO, dry_run=True).sent


def test_odd_settings_of_an_adapter_stay_words_on_its_page(tmp_path: Path) -> None:
    folder = save_adapter(
        tmp_path / "adapter", save_base(tmp_path), base_model_name_or_path=BASE, peft_type="`x`\n# Hacked",
        r=10**400, revision="main\n# Hacked", target_modules={"a": ["\x1b[31m"]},
    )  # fmt: skip
    (folder / "README.md").unlink()
    page = open_adapter(folder).page(None)
    assert all(line.isprintable() for line in page.splitlines())
    assert not re.search(r"^# Hacked", page, re.MULTILINE)
    assert metadata(page.encode())["base_model"] == BASE
