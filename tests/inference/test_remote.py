"""Images in a store of objects, and features written there: moto's S3 server on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from pyarrow import parquet

from plain_vit.errors import DataError, OutputExistsError
from plain_vit.inference.bulk import MANIFEST
from tests.inference.test_bulk_inference import IMAGES, as_parquet, contents, extract, images, model  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:  # noqa: F811
    """Return the file system of a server with a bucket `bucket`: images, and the same as parquet files."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: it is in the extra `test`")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
        given = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        for name, value in {**given, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            patched.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        system = s3fs.S3FileSystem()
        system.mkdir("bucket")
        system.put(str(images), "bucket/images", recursive=True)
        tables = as_parquet(images, tmp_path_factory.mktemp("tables"), [9, 8, 6])
        system.put(str(tables), "bucket/tables", recursive=True)
        yield system
    server.stop()


@pytest.mark.parametrize("dataset", ["images", "images/*.png", "tables", "tables streamed"])
def test_features_of_images_in_a_bucket_are_those_of_the_files(
    dataset: str, bucket: Any, model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # or it reads no URL at all
    streaming = dataset.endswith("streamed")
    options = {"model": str(model), "streaming": streaming}
    if dataset.startswith("tables"):
        local = str(as_parquet(images, tmp_path, [9, 8, 6]))
    else:
        local = str(images)
    extract(**options, dataset=local, output_dir=str(tmp_path / "out"))
    url, out = f"s3://bucket/{dataset.split()[0]}", f"s3://bucket/out/{dataset.replace('/*', ' ')}"
    manifest = extract(**options, dataset=url, output_dir=out)
    assert manifest["complete"]
    assert manifest["images"] == IMAGES
    names = {path.rpartition("/")[2] for path in bucket.find(f"{out}/data")}
    assert names == {file.name for file in (tmp_path / "out" / "data").iterdir()}
    found, expected = (
        parquet.read_table(f"{out}/data".removeprefix("s3://"), filesystem=bucket),
        parquet.read_table(tmp_path / "out" / "data"),
    )
    assert found["feature"].equals(expected["feature"])
    assert found["row"].equals(expected["row"])


def test_a_run_in_a_bucket_goes_on_and_belongs_to_one_model(
    bucket: Any, model: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    options = {"model": str(model), "dataset": "s3://bucket/images", "output_dir": "s3://bucket/resumed"}
    extract(**options)
    whole = {path: bucket.cat(path) for path in bucket.find("bucket/resumed")}
    lost = sorted(path for path in whole if "part-" in path)[1]
    bucket.rm(lost)
    with pytest.raises(OutputExistsError, match="add --resume"):
        extract(**options)
    extract(**options, resume=True)
    assert {path: bucket.cat(path) for path in bucket.find("bucket/resumed")} == whole
    assert json.loads(bucket.cat(f"bucket/resumed/{MANIFEST}"))["complete"]
    with pytest.raises(OutputExistsError, match="of another run: feature"):
        extract(**options, resume=True, feature="mean")
    with pytest.raises(OutputExistsError, match="not an empty folder"):
        extract(**{**options, "output_dir": "s3://bucket/images"})
    with pytest.raises(DataError, match="names no images"):
        extract(**{**options, "dataset": "s3://bucket/nothing", "output_dir": "s3://bucket/none"})


def test_a_pattern_of_files_is_a_dataset(model: Path, images: Path, tmp_path: Path) -> None:  # noqa: F811
    manifest = extract(model=str(model), dataset=f"{images}/0*.png", output_dir=str(tmp_path / "out"))
    assert manifest["images"] == 10
