"""The local Hub of the tests behaves like the real one for huggingface_hub's own client."""

from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, HfFileSystem
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from PIL import Image

from tests.hub.endpoint import HubEndpoint

WEIGHTS = bytes(range(256)) * 1000


@pytest.fixture
def api(hub: HubEndpoint, monkeypatch: pytest.MonkeyPatch) -> HfApi:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's tries
    return HfApi()


def push(api: HfApi, files: dict[str, bytes], repo_id: str = "alice/model", **options: Any) -> str:
    operations = [CommitOperationAdd(path, data) for path, data in files.items()]
    return api.create_commit(repo_id, operations, commit_message="Change", **options).oid


def test_small_and_large_files_come_back_as_they_were_pushed(hub: HubEndpoint, api: HfApi, tmp_path: Path) -> None:
    assert api.whoami()["name"] == "alice"
    assert api.create_repo("alice/model") == f"{hub.url}/alice/model"
    commit = push(api, {"config.json": b"{}", "sub/model.safetensors": WEIGHTS, "empty.txt": b""})
    asked = [path for method, path, status in hub.requests if method == "PUT"]
    assert len(asked) == 1  # the large one went through LFS
    folder = Path(huggingface_hub.snapshot_download("alice/model"))
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "sub" / "model.safetensors").read_bytes() == WEIGHTS
    assert folder.name == commit == api.model_info("alice/model").sha
    assert set(api.list_repo_files("alice/model")) == {"config.json", "sub/model.safetensors", "empty.txt"}
    (about,) = api.get_paths_info("alice/model", ["sub/model.safetensors"])
    assert about.lfs is not None
    assert about.lfs.size == len(WEIGHTS)
    assert hub.files("alice/model")["sub/model.safetensors"] == WEIGHTS


def test_branches_tags_and_commits_name_revisions(hub: HubEndpoint, api: HfApi) -> None:
    api.create_repo("alice/model")
    first = push(api, {"config.json": b"1"})
    api.create_branch("alice/model", branch="old/one")
    api.create_tag("alice/model", tag="v1")
    push(api, {"config.json": b"2"})
    for revision, expected in [("main", b"2"), ("old/one", b"1"), ("v1", b"1"), (first, b"1")]:
        path = huggingface_hub.hf_hub_download("alice/model", "config.json", revision=revision)
        assert Path(path).read_bytes() == expected
    with pytest.raises(RevisionNotFoundError):
        api.model_info("alice/model", revision="v2")
    with pytest.raises(EntryNotFoundError):
        huggingface_hub.hf_hub_download("alice/model", "gone.json")
    api.create_commit("alice/model", [CommitOperationDelete("config.json")], commit_message="Remove")
    assert api.list_repo_files("alice/model") == []
    api.delete_repo("alice/model")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("alice/model")


def test_a_private_repository_is_open_to_its_owner_alone(hub: HubEndpoint, api: HfApi) -> None:
    api.create_repo("alice/model", private=True)
    push(api, {"config.json": b"{}"})
    assert api.model_info("alice/model").private
    for token in (False, "hf_mallory"):
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("alice/model", token=token)
        with pytest.raises(RepositoryNotFoundError):
            huggingface_hub.hf_hub_download("alice/model", "config.json", token=token)
    hub.add_repository("alice/public")
    assert not api.model_info("alice/public", token=False).private
    for token in ("hf_mallory", "hf_read"):
        with pytest.raises(HfHubHTTPError, match="403"):
            push(api, {"config.json": b"[]"}, "alice/public", token=token)
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        api.whoami(token="hf_wrong")


def test_a_dropped_upload_is_tried_again_and_a_cut_download_is_begun_again(hub: HubEndpoint, api: HfApi) -> None:
    api.create_repo("alice/model")
    hub.drop("PUT", "/lfs/", after=1000, times=2)
    push(api, {"model.safetensors": WEIGHTS})
    hub.drop("GET", "/lfs/", after=100_000)
    path = huggingface_hub.hf_hub_download("alice/model", "model.safetensors")
    assert Path(path).read_bytes() == WEIGHTS
    outcomes = [(method, status) for method, path, status in hub.requests if path.startswith("/lfs/")]
    assert outcomes == [("PUT", 0), ("PUT", 0), ("PUT", 200), ("GET", 200), ("GET", 0), ("GET", 200)]


def test_a_range_of_a_file_is_read(hub: HubEndpoint) -> None:
    hub.add_repository("alice/model", files={"model.safetensors": WEIGHTS})
    file = HfFileSystem(endpoint=hub.url)
    assert file.read_block("alice/model/model.safetensors", 1000, 77) == WEIGHTS[1000:1077]
    assert ("GET", 206) in [(method, status) for method, _, status in hub.requests]


def test_a_data_set_loads(hub: HubEndpoint) -> None:
    hub.add_repository(
        "alice/digits", "dataset", {"train.csv": b"pixel,label\n0.5,3\n0.7,5\n", "test.csv": b"pixel,label\n0.1,4\n"}
    )
    loaded = datasets.load_dataset("alice/digits")
    assert {name: split["label"][:] for name, split in loaded.items()} == {"train": [3, 5], "test": [4]}
    assert HfFileSystem(endpoint=hub.url).exists("datasets/alice/digits/train.csv")


@pytest.mark.slow
def test_a_data_set_of_images_is_pushed_and_loads_privately(hub: HubEndpoint) -> None:
    images = [Image.new("RGB", (7, 5), color) for color in ("red", "blue")]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    made = datasets.Dataset.from_dict({"image": images, "label": [0, 1]}, features=features)
    datasets.DatasetDict(train=made, test=made.select([1])).push_to_hub("alice/insects", private=True)
    loaded = datasets.load_dataset("alice/insects")
    assert loaded["train"].features["label"].names == ["ant", "bee"]
    assert loaded["test"][0]["image"].getpixel((0, 0)) == (0, 0, 255)
    with pytest.raises(RepositoryNotFoundError):
        HfApi().dataset_info("alice/insects", token=False)


def test_without_an_answer_it_is_a_connection_error(hub: HubEndpoint, api: HfApi) -> None:
    hub.close()
    with pytest.raises(LocalEntryNotFoundError):
        huggingface_hub.hf_hub_download("alice/model", "config.json")
