"""Images in a store of objects, and features written there: S3, Google Cloud Storage and a Hub on this machine."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import datasets
import pytest
from pyarrow import parquet

from plain_vit.errors import DataError, MissingPackageError, OutputError, OutputExistsError
from plain_vit.inference.bulk import MANIFEST
from tests.hub.endpoint import HubEndpoint
from tests.inference.test_bulk_inference import IMAGES, as_parquet, contents, extract, images, model  # noqa: F401

pytestmark = pytest.mark.slow


@contextmanager
def s3(patched: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield the file system of moto's server, with a bucket."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: it is in the extra `test`")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    given = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**given, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        patched.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield s3fs.S3FileSystem(), "bucket"
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST"))  # buckets outlive a server
    server.stop()


@contextmanager
def gs(patched: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield the file system of an emulator of Google Cloud Storage, with a bucket."""
    gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed: it is in the extra `test`")
    from gcp_storage_emulator.server import create_server  # type: ignore[import-untyped]

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    host, port = server._api._httpd.server_address
    patched.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield gcsfs.GCSFileSystem(), "bucket"
    server.stop()


@contextmanager
def hf(patched: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a Hub, with a dataset repository."""
    from huggingface_hub import HfFileSystem

    hub = HubEndpoint(folder / "hub")
    hub.redirect(patched, folder / "cache")
    hub.add_repository("alice/bucket", "dataset")
    HfFileSystem.clear_instance_cache()
    yield HfFileSystem(), "datasets/alice/bucket"
    hub.close()


@pytest.fixture(scope="module", params=[s3, gs, hf], ids=lambda store: store.__name__)
def bucket(request: pytest.FixtureRequest, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:  # noqa: F811
    """Yield a file system with images and the same as parquet files, and the URL of their folder."""
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # or it reads no URL at all
        system, root = stack.enter_context(request.param(patched, tmp_path_factory.mktemp("store")))
        system.put(str(images), f"{root}/images", recursive=True)
        tables = as_parquet(images, tmp_path_factory.mktemp("tables"), [9, 8, 6])
        system.put(str(tables), f"{root}/tables", recursive=True)
        yield system, f"{request.param.__name__}://{root}"


@pytest.mark.parametrize("dataset", ["images", "images/*.png", "tables", "tables streamed"])
def test_features_of_images_in_a_bucket_are_those_of_the_files(
    dataset: str, bucket: tuple[Any, str], model: Path, images: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    system, root = bucket
    options = {"model": str(model), "streaming": dataset.endswith("streamed")}
    local = as_parquet(images, tmp_path, [9, 8, 6]) if dataset.startswith("tables") else images
    extract(**options, dataset=str(local), output_dir=str(tmp_path / "out"))
    url, out = f"{root}/{dataset.split()[0]}", f"{root}/out/{dataset.replace('/*', ' ')}"
    manifest = extract(**options, dataset=url, output_dir=out)
    assert manifest["complete"]
    assert manifest["images"] == IMAGES
    system.invalidate_cache()
    names = {path.rpartition("/")[2] for path in system.find(f"{out}/data")}
    assert names == {file.name for file in (tmp_path / "out" / "data").iterdir()}
    found, expected = (
        parquet.read_table(f"{out}/data".partition("://")[2], filesystem=system),
        parquet.read_table(tmp_path / "out" / "data"),
    )
    assert found["feature"].equals(expected["feature"])
    assert found["row"].equals(expected["row"])


def test_a_run_in_a_bucket_goes_on_and_belongs_to_one_model(
    bucket: tuple[Any, str], model: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    system, root = bucket
    options = {"model": str(model), "dataset": f"{root}/images", "output_dir": f"{root}/resumed"}
    extract(**options)
    system.invalidate_cache()
    whole = {path: system.cat(path) for path in system.find(f"{root}/resumed")}
    lost = sorted(path for path in whole if "part-" in path)[1]
    system.rm(lost)
    with pytest.raises(OutputExistsError, match="add --resume"):
        extract(**options)
    extract(**options, resume=True)
    system.invalidate_cache()
    assert {path: system.cat(path) for path in system.find(f"{root}/resumed")} == whole
    assert json.loads(system.cat(f"{root}/resumed/{MANIFEST}"))["complete"]
    with pytest.raises(OutputExistsError, match="of another run: feature"):
        extract(**options, resume=True, feature="mean")
    with pytest.raises(OutputExistsError, match="not an empty folder"):
        extract(**{**options, "output_dir": f"{root}/images"})
    with pytest.raises(DataError, match="names no images"):
        extract(**{**options, "dataset": f"{root}/nothing", "output_dir": f"{root}/none"})
    with pytest.raises(OutputError, match="nowhere/out.* cannot be reached: FileNotFoundError: .* Correct the URL"):
        extract(**{**options, "output_dir": f"{root.replace('bucket', 'nowhere')}/out"})


@pytest.mark.parametrize("option", ["dataset", "output_dir"])
def test_a_file_system_that_is_missing_is_told_before_the_model_is_opened(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    options = {"model": "nowhere.pt", "dataset": "digits", "output_dir": str(tmp_path / "out")}
    with pytest.raises(MissingPackageError, match="Install adlfs .*: pip install adlfs"):
        extract(**{**options, option: "az://container/x"})
    with pytest.raises(DataError, match="s33://bucket cannot be opened: .*; did you mean 's3'"):
        extract(**{**options, option: "s33://bucket"})


def test_a_pattern_of_files_is_a_dataset(model: Path, images: Path, tmp_path: Path) -> None:  # noqa: F811
    manifest = extract(model=str(model), dataset=f"{images}/0*.png", output_dir=str(tmp_path / "out"))
    assert manifest["images"] == 10
