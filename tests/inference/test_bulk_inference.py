"""Features and predictions of many images: values, shard boundaries, processes, kills, and unreadable images."""

import contextlib
import csv
import itertools
import json
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_dataset
from PIL import Image
from pyarrow import parquet
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DINOv3ViTImageProcessor,
    Siglip2ImageProcessor,
    Siglip2ImageProcessorPil,
    ViTImageProcessor,
    ViTImageProcessorPil,
    pipeline,
)

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor, PlainViTModel
from plain_vit.errors import DataError, OutputExistsError, TrainingError
from plain_vit.files.csv import csv_table
from plain_vit.inference import batches
from plain_vit.inference.batches import THREADS
from plain_vit.inference.bulk import MANIFEST, SHARDS, Parts, Shard
from plain_vit.inference.columns import features_of, with_columns
from plain_vit.inference.prepared import simplify
from plain_vit.training.data import decoding
from plain_vit.training.models import processor_settings
from plain_vit_command import FEATURES, main
from tests.conftest import randomize_
from tests.processes import in_a_process, server
from tests.sizes import few
from tests.tiny import difference, tiny_config
from tests.training.runs import PYTHON, TORCHRUN, children_of, finish, launch, open_script, start

extraction, prediction = open_script("extract_features"), open_script("predict")
IMAGES, SHARD = 23, 7  # the last shard is short, and the batches of 3 do not divide a shard
TOLERANCE = 1e-5


def extract(**options: Any) -> dict[str, Any]:
    return extraction.extract(extraction.ExtractArguments(**{"shard_size": SHARD, "batch_size": 3, **options}))


def predict(**options: Any) -> dict[str, Any]:
    return prediction.predict(prediction.PredictArguments(**{"shard_size": SHARD, "batch_size": 3, **options}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a saved classifier of 4 classes with random parameters."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(num_labels=4, id2label={number: f"class {number}" for number in range(4)})
    randomize_(PlainViTForImageClassification(config)).eval().save_pretrained(folder)
    height, width = config.image_shape
    PlainViTImageProcessor(size={"height": height, "width": width}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of images of many sizes."""
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(IMAGES):
        height, width = generator.integers(5, 60, 2)
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return folder


def opened(folder: Path) -> tuple[PlainViTForImageClassification, PlainViTImageProcessor]:
    model = PlainViTForImageClassification.from_pretrained(folder).eval()
    return model, PlainViTImageProcessor.from_pretrained(folder)


def pixels_of(images: Path, processor: PlainViTImageProcessor) -> torch.Tensor:
    pictures = [Image.open(file) for file in sorted(images.glob("*.png"))]
    return processor(pictures, return_tensors="pt")["pixel_values"]


def table_of(folder: Path) -> dict[str, list[Any]]:
    return parquet.read_table(folder / "data").to_pydict()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# Numbers


@pytest.mark.parametrize("feature", ["pooled", "cls", "mean", "cls_mean", "patches"])
def test_features_are_those_of_the_model(model: Path, images: Path, tmp_path: Path, feature: str) -> None:
    manifest = extract(model=str(model), dataset=str(images), output_dir=str(tmp_path / "out"), feature=feature)
    assert manifest["images"] == IMAGES
    assert manifest["complete"]
    assert list(manifest["shards"].values()) == [7, 7, 7, 2]
    classifier, processor = opened(model)
    body: Any = classifier.base_model
    pixels = pixels_of(images, processor)
    with torch.no_grad():
        outputs = body(pixels)
    tokens, prefix = outputs.last_hidden_state, body.num_prefix_tokens
    patches = tokens[:, prefix:]
    expected = {
        "pooled": outputs.pooler_output,
        "cls": tokens[:, 0],
        "mean": patches.mean(dim=1),
        "cls_mean": torch.cat((tokens[:, 0], patches.mean(dim=1)), dim=1),
        "patches": patches.unflatten(1, body.config.grid_size),
    }[feature]
    rows = table_of(tmp_path / "out")
    assert list(rows["row"]) == list(range(IMAGES))
    assert [Path(path).name for path in rows["path"]] == [f"{number:02d}.png" for number in range(IMAGES)]
    stored = load_dataset(
        "parquet", data_dir=str(tmp_path / "out" / "data"), split="train", cache_dir=tmp_path / "cache"
    )
    got = torch.tensor(np.asarray(stored["feature"]))
    assert difference(got, expected) <= TOLERANCE


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_last_block_computes_only_the_tokens_that_a_feature_reads(pooling: Any) -> None:
    config = tiny_config(pooling=pooling)
    body: Any = simplify(PlainViTModel(config))
    inputs = {"pixel_values": torch.rand(2, config.num_channels, *config.image_shape)}
    operations = {}
    for kind in FEATURES:
        with FlopCounterMode(display=False) as counter:
            features_of(body, inputs, kind=kind, layers=())
        operations[kind] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        simplify(PlainViTForImageClassification(config))(**inputs)
    assert operations["cls"] < operations["mean"] == operations["cls_mean"] == operations["patches"]
    assert operations["pooled"] == operations["cls" if pooling == "cls" else "mean"]
    classifier = 2 * 2 * config.hidden_size * config.num_labels
    assert counter.get_total_flops() == operations["pooled"] + classifier


def test_the_layers_asked_for_are_columns_and_float16_rounds_them(model: Path, images: Path, tmp_path: Path) -> None:
    options = {"model": str(model), "dataset": str(images), "feature": "mean", "layers": [1, 3]}
    extract(**options, output_dir=str(tmp_path / "whole"))
    extract(**options, output_dir=str(tmp_path / "half"), dtype="float16")
    classifier, processor = opened(model)
    body = classifier.base_model
    with torch.no_grad():
        states = body(pixels_of(images, processor), output_hidden_states=True).hidden_states
    whole, half = table_of(tmp_path / "whole"), table_of(tmp_path / "half")
    assert list(whole) == ["row", "path", "feature_1", "feature_3"]
    for layer in (1, 3):
        expected = states[layer][:, body.num_prefix_tokens :].mean(dim=1)
        got = torch.tensor(whole[f"feature_{layer}"])
        assert difference(got, expected) <= TOLERANCE
        assert torch.equal(torch.tensor(half[f"feature_{layer}"]), got.half().float())
    schema = parquet.read_schema(next((tmp_path / "half").glob(SHARDS)))
    assert schema.field("feature_1").type.value_type == pa.float16()


def with_problem(model: Path, folder: Path, problem: str | None) -> Path:
    """Return a copy of a model for another problem."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": problem}))
    return folder


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification"])
def test_predictions_are_those_of_the_pipeline(model: Path, images: Path, tmp_path: Path, problem: str | None) -> None:
    model = with_problem(model, tmp_path / "model", problem)
    predict(model=str(model), dataset=str(images), output_dir=str(tmp_path / "out"), top=3)
    files = sorted(map(str, images.glob("*.png")))
    expected = pipeline("image-classification", model=str(model), top_k=3)(files)
    rows = table_of(tmp_path / "out")
    assert rows["labels"] == [[each["label"] for each in likeliest] for likeliest in expected]
    assert rows["label"] == [likeliest[0] for likeliest in rows["labels"]]
    assert rows["probability"] == [shares[0] for shares in rows["probabilities"]]
    scores = [[each["score"] for each in likeliest] for likeliest in expected]
    assert np.allclose(rows["probabilities"], scores, rtol=0, atol=TOLERANCE)


def test_predicted_numbers_are_those_of_the_pipeline_in_the_model_s_order(
    model: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_problem(model, tmp_path / "model", "regression")
    predict(model=str(model), dataset=str(images), output_dir=str(tmp_path / "out"), top=3)
    files = sorted(map(str, images.glob("*.png")))
    rows, answers = table_of(tmp_path / "out"), pipeline("image-classification", model=str(model), top_k=4)(files)
    assert sorted(rows) == ["labels", "path", "row", "values"]
    names = [f"class {number}" for number in range(4)]
    expected = [{each["label"]: each["score"] for each in answer} for answer in answers]
    for labels, values, of_image in zip(rows["labels"], rows["values"], expected, strict=True):
        assert labels == names
        assert np.allclose(values, [of_image[name] for name in names], rtol=0, atol=TOLERANCE)
    capsys.readouterr()
    assert main(["predict", files[0], "--model", str(model), "--output-format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "path,rank,label,value"
    printed = [float(line.rpartition(",")[2]) for line in lines[1:]]
    assert np.allclose(printed, rows["values"][0], rtol=0, atol=TOLERANCE)
    assert main(["predict", files[0], "--model", str(model)]) == 0
    assert "%" not in capsys.readouterr().out


# Shard boundaries, processes, streams, kills


def as_parquet(images: Path, folder: Path, sizes: list[int]) -> Path:
    """Write the images as parquet files with these numbers of rows."""
    files, begin = sorted(images.glob("*.png")), 0
    for number, size in enumerate(sizes):
        rows = [{"bytes": file.read_bytes(), "path": file.name} for file in files[begin : begin + size]]
        Dataset.from_dict({"image": rows}).cast_column("image", load_dataset_image()).to_parquet(
            folder / f"train-{number:05d}-of-{len(sizes):05d}.parquet"
        )
        begin += size
    return folder


def load_dataset_image() -> Any:
    from datasets import Image as ImageFeature

    return ImageFeature(decode=False)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
def test_two_processes_with_workers_write_the_bytes_of_one(
    model: Path, images: Path, tmp_path: Path, streaming: bool
) -> None:
    (tmp_path / "files").mkdir()
    data = as_parquet(images, tmp_path / "files", [14, 2, 0, 7])  # two shards, a short one, an empty one, a whole one
    options = {"model": str(model), "dataset": str(data), "streaming": streaming}
    extract(output_dir=str(tmp_path / "one"), **options)
    split = {"num_workers": 1 if streaming else 2, "shard_size": SHARD, "batch_size": 3}
    launch("extract_features", TORCHRUN, output_dir=tmp_path / "two", **split, **options)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one == two
    assert len(one) == (6 if streaming else 5)
    rows = table_of(tmp_path / "one")
    assert [Path(path).name for path in rows["path"]] == [f"{number:02d}.png" for number in range(IMAGES)]
    classifier, processor = opened(model)
    with torch.no_grad():
        expected = classifier.base_model(pixels_of(images, processor)).pooler_output
    assert difference(torch.tensor(rows["feature"]), expected) <= TOLERANCE


def test_a_run_is_that_of_an_image_processor_whatever_names_its_class(model: Path) -> None:
    """Runs that began before the names were in `to_dict` can be resumed."""
    ours = opened(model)[1]
    names = {"image_processor_type", "auto_map"}
    assert processor_settings(ours) == {name: value for name, value in ours.to_dict().items() if name not in names}
    theirs = ViTImageProcessor(size={"height": 24, "width": 16})
    assert processor_settings(theirs) == theirs.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("streaming", few([False, True], 1), ids=few(["stored", "streamed"], 1))
def test_a_killed_run_goes_on_to_the_same_bytes_and_keeps_what_it_wrote(
    model: Path, images: Path, tmp_path: Path, streaming: bool
) -> None:
    (tmp_path / "files").mkdir()
    data = as_parquet(images, tmp_path / "files", [IMAGES - 2, 2])
    options = {"model": str(model), "dataset": str(data), "shard_size": 2, "batch_size": 1, "streaming": streaming}
    extract(output_dir=str(tmp_path / "whole"), **options)
    folder = tmp_path / "killed"
    process = start("extract_features", PYTHON, output_dir=folder, **options)
    while len(list(folder.glob(SHARDS))) < 2 and process.poll() is None:
        time.sleep(0.002)
    for each in [*children_of(process.pid), process.pid]:
        os.kill(each, signal.SIGKILL)
    finish(process)
    before = {file: file.stat().st_mtime_ns for file in folder.glob(SHARDS)}
    assert 2 <= len(before) < 12, "the run was over before it was killed"
    assert not json.loads((folder / MANIFEST).read_text())["complete"]
    with pytest.raises(OutputExistsError, match="--resume"):
        extract(output_dir=str(folder), **options)
    extract(output_dir=str(folder), resume=True, **options)
    whole, resumed = contents(tmp_path / "whole"), contents(folder)
    assert {name: whole[name] for name in whole} == {name: resumed[name] for name in whole}
    assert all(file.stat().st_mtime_ns == when for file, when in before.items())
    extract(output_dir=str(folder), resume=True, **options)  # nothing is missing
    assert contents(folder) == resumed


@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
def test_jobs_that_share_a_folder_write_the_bytes_of_one(
    model: Path, images: Path, tmp_path: Path, streaming: bool
) -> None:
    (tmp_path / "files").mkdir()
    data = as_parquet(images, tmp_path / "files", [9, 8, 6])
    options = {"model": str(model), "dataset": str(data), "streaming": streaming}
    extract(**options, output_dir=str(tmp_path / "one"))
    shared = {**options, "output_dir": str(tmp_path / "shared")}
    assert [extract(**shared, part=part)["complete"] for part in ("3/3", "1/3")] == [False, False]
    before = contents(tmp_path / "shared" / "data")
    assert not extract(**shared, part="1/3")["complete"]  # a job that is started again
    assert contents(tmp_path / "shared" / "data") == before
    assert extract(**shared, part="2/3")["images"] == IMAGES
    assert contents(tmp_path / "shared") == contents(tmp_path / "one")
    with pytest.raises(OutputExistsError, match="of another run: feature"):
        extract(**shared, part="1/3", feature="mean")
    for part in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(TrainingError, match="expected the number of a job"):
            extract(**shared, part=part)


@pytest.mark.slow
def test_jobs_that_start_at_once_begin_one_folder(model: Path, images: Path, tmp_path: Path) -> None:
    options = {"model": model, "dataset": images, "output_dir": tmp_path / "out", "shard_size": 2}
    jobs = [start("extract_features", PYTHON, **options, part=f"{number}/3") for number in (1, 2, 3)]
    outputs = [finish(job) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], outputs
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["images"] == IMAGES
    assert list(table_of(tmp_path / "out")["row"]) == list(range(IMAGES))


@pytest.mark.slow(quick=["streamed"])
@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
def test_a_complete_run_that_lost_any_shards_gets_them_back(
    model: Path, images: Path, tmp_path: Path, streaming: bool
) -> None:
    (tmp_path / "files").mkdir()
    data = as_parquet(images, tmp_path / "files", [IMAGES - 2, 2])
    options = {"model": str(model), "dataset": str(data), "streaming": streaming, "output_dir": str(tmp_path / "out")}
    extract(**options)
    whole, files = contents(tmp_path / "out"), sorted((tmp_path / "out").glob(SHARDS))
    assert len(files) == 4
    for lost in (files[:1], files[1:2], files[2:3], files[3:], files[:2], [files[0], files[2]]):
        for file in lost:
            file.unlink()
        assert extract(**options, resume=True)["images"] == IMAGES
        assert contents(tmp_path / "out") == whole
    other = files[3].with_stem("part-000001-000009")  # not a shard of this run
    shutil.copy(files[3], other)
    with pytest.raises(OutputExistsError, match=r"part-000001-000009.parquet is not a shard of this run: remove it"):
        extract(**options, resume=True)


# Threads


def with_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Set the number of reading threads, but not of torch's threads, on which the order of sums depends."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def opening_together(threads: int, opened_by: set[int]) -> Callable[[Any], Any]:
    """Return an `open_stored` that records its threads; the first `threads` calls wait for one another."""
    meeting, number, open_stored = threading.Barrier(threads), itertools.count(), decoding.open_stored

    def open_together(stored: Any) -> Any:
        opened_by.add(threading.get_ident())
        if next(number) < threads:
            meeting.wait(timeout=60)
        return open_stored(stored)

    return open_together


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]


@pytest.mark.slow
def test_any_number_of_threads_reads_the_same(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, broken = tmp_path / "images", ["03.png", "04.png", *(f"{number:02d}.png" for number in range(7, 14))]
    folder.mkdir()
    for file in images.glob("*.png"):
        whole = file.read_bytes()
        cut = whole[: len(whole) // 2] if file.name == "04.png" else b"not an image"
        (folder / file.name).write_bytes(cut if file.name in broken else whole)
    options = {"model": str(model), "dataset": str(folder), "batch_size": SHARD}
    shards, manifests, named, errors = {}, {}, {}, {}
    for threads in (1, 2, 5):
        with_threads(monkeypatch, threads)
        opened_by: set[int] = set()
        monkeypatch.setattr(batches, "open_stored", opening_together(threads, opened_by))
        out = tmp_path / f"out of {threads}"
        manifests[threads] = extract(**options, output_dir=str(out), corrupted="skip")
        assert len(opened_by) >= threads
        assert (threading.get_ident() in opened_by) == (threads == 1)
        del manifests[threads]["environment"]  # contains the number of threads
        shards[threads] = contents(out / "data")
        named[threads] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
        with pytest.raises(DataError) as error:
            extract(**options, output_dir=str(tmp_path / f"stopped {threads}"))
        errors[threads] = str(error.value)
    assert sorted(shards[1]) == [f"part-{part:06d}-000000.parquet" for part in range(4)]
    assert shards[1] == shards[2] == shards[5]
    assert named[1] == named[2] == named[5]
    assert manifests[1] == manifests[2] == manifests[5]
    assert "03.png" in errors[1]
    assert errors[1] == errors[2] == errors[5]
    assert [Path(text.split(" (")[0]).name for text in manifests[5]["unreadable_images"]] == broken
    assert len(named[5]) == len(broken)
    kept = [number for number in range(IMAGES) if f"{number:02d}.png" not in broken]
    assert list(table_of(tmp_path / "out of 5")["row"]) == kept


SIDES = {"height": 24, "width": 32}
PROCESSORS: dict[str, Any] = {
    "plain-vit": PlainViTImageProcessor(size={"shortest_edge": 40}, crop_size=SIDES, do_center_crop=True, resample=3),
    "plain-vit, torch": PlainViTImageProcessor(size=SIDES, resize_with="torch"),
    "plain-vit, patches": PlainViTImageProcessor(max_num_patches=20, patch_size=8),
    "transformers": ViTImageProcessor(size=SIDES),
    "transformers, Pillow": ViTImageProcessorPil(size=SIDES),
    "transformers, patches": Siglip2ImageProcessor(max_num_patches=20, patch_size=8),
    "transformers, patches, Pillow": Siglip2ImageProcessorPil(max_num_patches=20, patch_size=8),
    "transformers, scaled first": DINOv3ViTImageProcessor(size=SIDES),
    "padded to the largest": PlainViTImageProcessor(do_resize=False, do_pad=True),
}


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", PROCESSORS)
def test_images_processed_by_threads_are_those_of_one_call(
    images: Path, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_threads(monkeypatch, threads)
    files = [
        file for file in sorted(images.glob("*.png")) for _ in range(2)
    ]  # of equal size: they are resized together
    rows = [{"image": {"path": str(file), "bytes": None}} for file in files]
    for batch in Parts(rows, PROCESSORS[name], len(rows), 16, [Shard(0, 0)]):  # in pieces of 16, 2 and 1
        pictures = [Image.open(files[number]) for number in batch["rows"]]
        expected = dict(PROCESSORS[name](pictures, return_tensors="pt"))
        assert batch["inputs"].keys() == expected.keys()
        for key, values in expected.items():
            assert batch["inputs"][key].dtype == values.dtype
            assert torch.equal(batch["inputs"][key], values)


def test_an_error_of_the_image_processor_that_is_of_no_single_image_is_its_own_with_threads_too(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"image": {"path": str(file), "bytes": None}} for file in sorted(images.glob("*.png"))]
    for threads in (1, 3):
        with_threads(monkeypatch, threads)
        with pytest.raises(ValueError, match="tensor"):  # images of several sizes without padding
            list(Parts(rows, PlainViTImageProcessor(do_resize=False), 7, 3, [Shard(0, 0)]))
    assert not reading_threads()


def test_threads_end_with_their_batch_and_on_an_interrupt(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_threads(monkeypatch, 3)
    rows = [{"image": {"path": str(file), "bytes": None}} for file in sorted(images.glob("*.png"))]
    for _ in Parts(rows, PROCESSORS["plain-vit"], 7, 4, [Shard(0, 0)]):
        assert not reading_threads()
    assert [batch["inputs"] for batch in Parts([], PROCESSORS["plain-vit"], 7, 4, [Shard(0, 0)])] == [None]
    begun = []

    def interrupted(image: Any) -> Any:
        begun.append(image)
        if len(begun) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # like Ctrl-C
        time.sleep(0.2)
        return image

    monkeypatch.setattr(batches, "decode_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(Parts(rows, PROCESSORS["plain-vit"], IMAGES, IMAGES, [Shard(0, 0)]))
    assert len(begun) < IMAGES  # the rest of the batch is abandoned
    assert not reading_threads()


def test_a_thread_in_whose_start_an_interrupt_came_ends_too(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_threads(monkeypatch, 3)
    rows = [{"image": {"path": str(file), "bytes": None}} for file in sorted(images.glob("*.png"))]
    start, decode = threading.Thread.start, batches.decode_image

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == f"{THREADS}_1":
            raise KeyboardInterrupt

    def slow(image: Any) -> Any:
        time.sleep(0.2)
        return decode(image)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(batches, "decode_image", slow)
    with pytest.raises(KeyboardInterrupt):
        list(Parts(rows, PROCESSORS["plain-vit"], IMAGES, IMAGES, [Shard(0, 0)]))
    assert not reading_threads()


def test_torch_computes_with_one_thread_in_each_of_those_that_read(images: Path) -> None:
    counts: set[int] = set()
    before = torch.get_num_threads()

    class Counted(PlainViTImageProcessor):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            counts.add(torch.get_num_threads())
            return super().__call__(*args, **kwargs)

    rows = [{"image": {"path": str(file), "bytes": None}} for file in sorted(images.glob("*.png"))]
    torch.set_num_threads(3)
    try:
        for _ in Parts(rows, Counted(size=SIDES), 7, 4, [Shard(0, 0)]):
            assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
    assert counts == {1}


# Images that cannot be read


def test_images_that_cannot_be_read_are_named_and_left_out_on_request(
    model: Path, images: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for file in images.glob("*.png"):
        (folder / file.name).write_bytes(file.read_bytes())
    broken = ["03.png", *(f"{number:02d}.png" for number in range(7, 14))]  # among them a whole shard
    for name in broken:
        (folder / name).write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    options = {"model": str(model), "dataset": str(folder)}
    with pytest.raises(DataError, match=r"03.png .*--corrupted skip"):
        extract(**options, output_dir=str(tmp_path / "stopped"))
    manifest = extract(**options, output_dir=str(tmp_path / "out"), corrupted="skip")
    assert [Path(text.split(" (")[0]).name for text in manifest["unreadable_images"]] == broken
    assert list(manifest["shards"].values()) == [6, 0, 7, 2]
    assert manifest["images"] == IMAGES - len(broken)
    schemas = [parquet.read_schema(file).remove_metadata() for file in sorted((tmp_path / "out").glob(SHARDS))]
    assert all(schema == schemas[0] for schema in schemas)
    kept = [number for number in range(IMAGES) if f"{number:02d}.png" not in broken]
    assert list(table_of(tmp_path / "out")["row"]) == kept


def test_images_of_a_stream_that_cannot_be_read_are_named_by_part_and_row(
    model: Path, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    names = [f"train-{number:05d}-of-00003.parquet" for number in range(3)]
    good, broken = (images / "00.png").read_bytes(), b"\x89PNG\r\n\x1a\n cut off"
    for name, contents_of_rows in zip(names, ([good, broken], [good], [good, good, broken]), strict=True):
        rows = [{"bytes": each, "path": None} for each in contents_of_rows]
        data = Dataset.from_dict({"image": rows}).cast_column("image", load_dataset_image())
        data.to_parquet(tmp_path / "files" / name)
    options = {"model": str(model), "dataset": str(tmp_path / "files"), "corrupted": "skip"}
    manifest = extract(**options, output_dir=str(tmp_path / "streamed"), streaming=True)
    assert [text.split(" (")[0] for text in manifest["unreadable_images"]] == ["row 1 of part 0", "row 2 of part 2"]
    manifest = extract(**options, output_dir=str(tmp_path / "stored"))
    assert [text.split(" (")[0] for text in manifest["unreadable_images"]] == ["row 1", "row 5"]


@pytest.mark.parametrize("threads", [1, 5])
def test_images_that_the_image_processor_refuses_are_named_like_those_that_cannot_be_read(
    model: Path, images: Path, tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with_threads(monkeypatch, threads)
    folder, cropped = shutil.copytree(images, tmp_path / "images"), shutil.copytree(model, tmp_path / "model")
    thin = folder / "01.png"
    Image.new("RGB", (5000, 1)).save(thin)
    (folder / "02.png").write_bytes(b"not an image")
    Image.new("RGB", (1, 5000)).save(folder / "05.png")
    height, width = opened(model)[0].config.image_shape
    sides = {"height": height, "width": width}
    PlainViTImageProcessor(size={"shortest_edge": 256}, crop_size=sides, do_center_crop=True).save_pretrained(cropped)
    options = {"model": str(cropped), "dataset": str(folder)}
    with pytest.raises(DataError, match=r"01\.png \(an image of 1x5000 pixels would become .*--corrupted skip"):
        extract(**options, output_dir=str(tmp_path / "stopped"))
    manifest = extract(**options, output_dir=str(tmp_path / "out"), corrupted="skip")
    named = [Path(text.split(" (")[0]).name for text in manifest["unreadable_images"]]
    assert named == ["01.png", "02.png", "05.png"]
    assert list(table_of(tmp_path / "out")["row"]) == [0, 3, 4, *range(6, IMAGES)]
    capsys.readouterr()
    assert main(["predict", str(thin), str(folder / "00.png"), "--model", str(cropped)]) == DataError.exit_code
    printed = capsys.readouterr()
    assert "01.png (an image of 1x5000 pixels would become" in printed.err
    assert "00.png" in printed.out


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, ZeroDivisionError])
def test_an_image_for_which_an_image_processor_raises_any_error_is_named(images: Path, kind: type[Exception]) -> None:
    files = sorted(images.glob("*.png"))[:4]
    with Image.open(files[2]) as image:
        odd = image.size

    class Odd(PlainViTImageProcessor):
        def __call__(self, images: Any, *args: Any, **kwargs: Any) -> Any:
            if odd in [image.size for image in images]:
                raise kind("odd sides")
            return super().__call__(images, *args, **kwargs)

    rows = [{"image": {"path": str(file), "bytes": None}} for file in files]
    (batch,) = Parts(rows, Odd(size=SIDES), 4, 4, [Shard(0, 0)])
    assert batch["rows"] == [0, 1, 3]
    assert len(batch["inputs"]["pixel_values"]) == 3
    (broken,) = batch["broken"]
    assert broken.startswith(f"{files[2]} (")
    assert "odd sides" in broken


# Outputs that are not finite


def with_large_weights(model: Path, folder: Path, **sizes: float) -> Path:
    """Return a copy of a model in which all weights of these modules have these magnitudes."""
    classifier, processor = opened(model)
    with torch.no_grad():
        for name, module in classifier.named_modules():
            if (size := sizes.get(name.rpartition(".")[2])) is not None:
                module.weight.sign_().mul_(size)
    classifier.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("problem", ["single_label_classification", "regression"])
def test_predictions_that_are_not_finite_are_no_rows_and_not_printed(
    model: Path, images: Path, tmp_path: Path, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_problem(model, tmp_path / "problem", problem)
    model = with_large_weights(model, tmp_path / "model", classifier=1e38, layernorm=1e9)
    for skip in ("stop", "skip"):  # the image is not at fault
        folder = tmp_path / skip
        with pytest.raises(TrainingError, match=r"00\.png .*expected finite numbers.*Check the weights"):
            predict(model=str(model), dataset=str(images), output_dir=str(folder), corrupted=skip)
        assert not list(folder.glob(SHARDS))
    capsys.readouterr()
    assert main(["predict", str(images / "03.png"), "--model", str(model)]) == TrainingError.exit_code
    printed = capsys.readouterr()
    assert not printed.out
    assert "03.png" in printed.err


def test_features_that_overflow_are_no_rows(model: Path, images: Path, tmp_path: Path) -> None:
    large = str(with_large_weights(model, tmp_path / "model", layernorm=1e6))
    options = {"model": large, "dataset": str(images), "feature": "mean"}
    assert extract(**options, output_dir=str(tmp_path / "whole"))["complete"]
    with pytest.raises(TrainingError, match=r"feature of .*00\.png is -?inf: .* Give --dtype float32\."):
        extract(**options, output_dir=str(tmp_path / "half"), dtype="float16")
    assert not list((tmp_path / "half").glob(SHARDS))
    broken, out = str(with_large_weights(model, tmp_path / "broken", layernorm=3e38)), tmp_path / "out.parquet"
    assert main(["embed", str(images / "00.png"), "--model", broken, "--out", str(out)]) == TrainingError.exit_code
    assert not out.exists()


def test_the_image_of_an_answer_that_is_not_finite_is_named() -> None:
    grid = pa.FixedSizeListArray.from_arrays(pa.array([0.0] * 7 + [float("-inf")], pa.float16()), 2)
    batch = {"rows": [4, 9], "paths": [None, None], "names": ["row 4", "row 9"]}
    columns = {"labels": pa.array([["a"], ["b"]]), "grid": pa.FixedSizeListArray.from_arrays(grid, 2)}
    for settings, advice in (
        ({}, "Check the weights"),
        ({"mixed_precision": "bf16"}, "Give --mixed_precision no\\."),
        ({"mixed_precision": "fp16", "dtype": "float16"}, "Give --mixed_precision no and --dtype float32\\."),
    ):
        with pytest.raises(TrainingError, match=f"The grid of row 9 is -inf: expected finite numbers. {advice}"):
            with_columns(batch, columns, settings)
    empty = {name: values.slice(2) for name, values in columns.items()}
    assert with_columns({"rows": [], "paths": [], "names": []}, empty, {})["columns"] == empty


# Errors


def test_a_folder_of_another_run_or_with_other_files_is_refused(model: Path, images: Path, tmp_path: Path) -> None:
    options = {"model": str(model), "dataset": str(images)}
    extract(**options, output_dir=str(tmp_path / "out"))
    with pytest.raises(OutputExistsError, match=r"of another run: feature \(was 'pooled', is 'mean'\)"):
        extract(**options, output_dir=str(tmp_path / "out"), feature="mean", resume=True)
    other = tmp_path / "model"
    classifier, processor = opened(model)
    torch.nn.init.ones_(classifier.classifier.bias)
    classifier.save_pretrained(other)
    processor.save_pretrained(other)
    with pytest.raises(OutputExistsError, match="weights"):
        extract(model=str(other), dataset=str(images), output_dir=str(tmp_path / "out"), resume=True)
    shutil.copytree(model, tmp_path / "edited")
    file = tmp_path / "edited" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_act": "relu"}))
    with pytest.raises(OutputExistsError, match=r"of another run: model \(.*, configuration \(was "):
        extract(model=str(tmp_path / "edited"), dataset=str(images), output_dir=str(tmp_path / "out"), resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="not an empty folder"):
        extract(**options, output_dir=str(tmp_path / "full"))
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("stored", [False, True], ids=["files", "parquet"])
def test_images_of_other_sizes_under_the_same_names_are_not_resumed_and_copies_are(
    model: Path, images: Path, tmp_path: Path, stored: bool
) -> None:
    options = {"model": str(model), "output_dir": str(tmp_path / "out")}
    for name in ("images", "copied", "changed"):
        (tmp_path / name).mkdir()
        for file in images.glob("*.png"):
            (tmp_path / name / file.name).write_bytes(file.read_bytes())  # with new modification times
    Image.new("RGB", (7, 5)).save(tmp_path / "changed" / "17.png")
    data = {}
    for name in ("images", "copied", "changed"):
        data[name] = tmp_path / name
        if stored:
            (tmp_path / f"{name}-stored" / "of").mkdir(parents=True)
            data[name] = as_parquet(tmp_path / name, tmp_path / f"{name}-stored" / "of", [IMAGES])
    before, place = None, tmp_path / "place"
    for name in ("images", "copied"):  # at one place, one after the other
        data[name].rename(place)
        extract(**options, dataset=str(place), resume=before is not None)
        assert before in (None, contents(tmp_path / "out"))
        before = contents(tmp_path / "out")
        place.rename(tmp_path / f"{name}-done")
    data["changed"].rename(place)
    with pytest.raises(OutputExistsError, match=r"of another run: contents \(was "):
        extract(**options, dataset=str(place), resume=True)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": [4], "feature": "mean"}, r"--layers 4: the model has the blocks 1 to"),
        ({"layers": [1]}, "Only the last block is pooled"),
    ],
)
def test_features_that_a_model_does_not_have_are_refused(
    model: Path, images: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(TrainingError, match=named):
        extract(model=str(model), dataset=str(images), output_dir=str(tmp_path / "out"), **change)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_classifier_predicts_nothing(images: Path, tmp_path: Path) -> None:
    config = tiny_config(use_class_token=False, pooling="none")
    randomize_(PlainViTModel(config)).save_pretrained(tmp_path / "model")
    height, width = config.image_shape
    PlainViTImageProcessor(size={"height": height, "width": width}).save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "dataset": str(images), "output_dir": str(tmp_path / "out")}
    with pytest.raises(TrainingError, match="has no classifier"):
        predict(**options)
    with pytest.raises(TrainingError, match="top is 0"):
        predict(**options, top=0)
    for feature, named in (("cls", "no class token"), ("pooled", "does not pool")):
        with pytest.raises(TrainingError, match=named):
            extract(**options, feature=feature)
    assert extract(**options, feature="mean")["images"] == IMAGES


# The command, for a few files


def test_the_command_predicts_and_embeds_files_like_the_scripts(
    model: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(map(str, images.glob("*.png")))[:11]
    predict(model=str(model), dataset=str(images), output_dir=str(tmp_path / "predictions"), top=2)
    extract(model=str(model), dataset=str(images), output_dir=str(tmp_path / "features"), feature="cls_mean")
    capsys.readouterr()
    assert main(["predict", *files, "--model", str(model), "--top", "2", "--output-format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = table_of(tmp_path / "predictions")
    assert [each["path"] for each in printed] == files
    assert [each["labels"] for each in printed] == expected["labels"][:11]
    shares = np.stack([each["probabilities"] for each in printed])
    assert np.allclose(shares, expected["probabilities"][:11], rtol=0, atol=TOLERANCE)
    out = str(tmp_path / "few.parquet")
    assert main(["embed", *files, "--model", str(model), "--out", out, "--feature", "cls_mean"]) == 0
    got = torch.tensor(parquet.read_table(out)["feature"].to_pylist())
    assert difference(got, torch.tensor(table_of(tmp_path / "features")["feature"][:11])) <= TOLERANCE
    assert "few.parquet, 11 images" in capsys.readouterr().out
    out = str(tmp_path / "one.parquet")
    assert main(["embed", files[0], "--model", str(model), "--out", out]) == 0
    assert "one.parquet, 1 image\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_take_datasets_and_write_what_the_scripts_write(
    model: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(model), "--batch-size", "3", "--shard-size", str(SHARD)]
    for command, run in (("embed", extract), ("predict", predict)):
        run(model=str(model), dataset=str(images), output_dir=str(tmp_path / f"{command} script"))
        out = tmp_path / command
        assert main([command, str(images), *options, f"--out={out}"]) == 0
        assert contents(out) == contents(tmp_path / f"{command} script")
        with pytest.raises(SystemExit) as end:
            main([command, str(images), *options, "--out", str(out)])
        assert end.value.code == OutputExistsError.exit_code
        assert main([command, str(images), *options, "--out", str(out), "--resume"]) == 0
    capsys.readouterr()
    for dataset in (str(images), f"{images}/*.png"):
        assert main(["predict", dataset, "--model", str(model), "--output-format", "json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert [Path(each["path"]).name for each in printed] == [f"{number:02d}.png" for number in range(IMAGES)]
        assert [each["labels"] for each in printed] == [row[:5] for row in table_of(tmp_path / "predict")["labels"]]
    assert main(["embed", str(images), "--model", str(model), "--out", str(tmp_path / "one.parquet")]) == 0
    assert parquet.read_metadata(tmp_path / "one.parquet").num_rows == IMAGES
    capsys.readouterr()
    for words in (["predict", str(images / "00.png"), "--out", "out"], ["predict", "nothing.jpg"]):
        with contextlib.suppress(SystemExit):
            assert main([*words, "--model", str(model)]) != 0
    said = capsys.readouterr().err
    assert "--out is a folder, for one dataset" in said
    assert "nothing.jpg does not exist: expected an image file" in said


def test_the_command_prints_what_can_be_read_and_then_fails(
    model: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, out = str(images / "00.png"), tmp_path / "bad.png", tmp_path / "out.parquet"
    bad.write_bytes(b"not an image")
    assert main(["predict", good, str(bad), "--model", str(model), "--output-format", "csv"]) == DataError.exit_code
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + 4  # the header, and all 4 classes
    assert "left out, because they cannot be read" in printed.err
    assert "bad.png" in printed.err
    assert main(["embed", str(bad), "--model", str(model), "--out", str(out)]) == DataError.exit_code
    assert not out.exists()


def test_labels_of_strangers_in_csv_act_on_no_terminal_and_in_no_spreadsheet(
    model: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["\x1b]0;title\x07red", '=HYPERLINK("x")', "\u202egnp.exe", 'a, "quoted" word']
    labelled = PlainViTForImageClassification.from_pretrained(model)
    labelled.config.id2label = dict(enumerate(names))
    labelled.save_pretrained(tmp_path / "model")
    PlainViTImageProcessor.from_pretrained(model).save_pretrained(tmp_path / "model")
    formula = tmp_path / "-1+2.png"
    formula.write_bytes((images / "00.png").read_bytes())
    with contextlib.chdir(tmp_path):
        assert main(["predict", "./-1+2.png", str(formula), "--model", "model", "--output-format", "csv"]) == 0
    printed = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in printed)
    rows = list(csv.DictReader(printed.splitlines()))
    shown = {"\\x1b]0;title\\x07red", '\'=HYPERLINK("x")', "\\u202egnp.exe", 'a, "quoted" word'}
    assert {row["label"] for row in rows} == shown
    table = csv_table(["path", "x"], [["-1+2.png", "-0.25"], ["@SUM(1)", -3], ["+1", "-inf"]])
    assert table == "path,x\n'-1+2.png,-0.25\n'@SUM(1),-3\n+1,-inf\n"


def test_images_beyond_the_limits_are_named_before_their_pixels_are_decoded(
    model: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, out = str(images / "00.png"), str(tmp_path / "out.parquet")
    Image.new("L", (7100, 7100)).save(tmp_path / "large.png")
    Image.new("1", (66_000, 3)).save(tmp_path / "long.png")
    Image.new("L", (7100, 7100)).save(tmp_path / "large.webp", method=0, lossless=True)
    large = [str(tmp_path / name) for name in ("large.png", "long.png", "large.webp")]
    for command in (["predict"], ["embed", "--out", out]):
        assert main([*command, good, *large, "--model", str(model)]) == DataError.exit_code
        said = capsys.readouterr().err
        assert "7100 x 7100 pixels; expected at most 50,000,000" in said
        assert "66000 x 3 pixels; expected at most 50,000,000, and 65,535 a side" in said
        assert all(Path(name).name in said for name in large)


def run_command(words: list[str], errors: Path) -> int:
    """Run a command whose errors, and those of the libraries in C, go to a file."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    return main(words)


@pytest.mark.slow
def test_a_damaged_image_says_one_thing(images: Path, model: Path, tmp_path: Path) -> None:
    count = 65_535
    tags = b"".join(struct.pack("<HHII", number, 2, 2**20, 8) for number in range(count))
    (tmp_path / "tags.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, count) + tags + bytes(4))
    words = ["predict", str(tmp_path / "tags.tif"), str(images / "00.png"), "--model", str(model)]
    assert in_a_process(run_command, words, tmp_path / "errors", context=server) == DataError.exit_code
    said = (tmp_path / "errors").read_text()
    assert "tags.tif" in said
    assert len(said.splitlines()) < 10
