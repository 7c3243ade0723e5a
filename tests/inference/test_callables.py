"""`FeatureExtractor` and `Predictor`: the forms of a batch, the engines that call them, and what travels to workers."""

import copy
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import sklearn.pipeline
import torch
from datasets import Dataset, Image
from PIL import Image as Pictures
from sklearn.base import clone
from sklearn.neighbors import KNeighborsClassifier

from plain_vit import FeatureExtractor, Predictor, prepare_for_inference
from plain_vit.errors import DataError, TrainingError
from plain_vit.inference import callables
from plain_vit.inference.callables import BatchCallable
from tests.inference.test_bulk_inference import IMAGES, extract, images, model, opened, predict, table_of  # noqa: F401
from tests.tiny import difference

BATCH = 5


@pytest.fixture(scope="module")
def expected(model: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:  # noqa: F811
    """Return the features that the script writes."""
    folder = tmp_path_factory.mktemp("features") / "out"
    extract(model=str(model), dataset=str(images), output_dir=str(folder), batch_size=BATCH, shard_size=100)
    return np.array(table_of(folder)["feature"], np.float32)


@pytest.fixture(scope="module")
def files(images: Path) -> list[str]:  # noqa: F811
    return sorted(map(str, images.glob("*.png")))


@pytest.fixture
def extractor(model: Path) -> FeatureExtractor:  # noqa: F811
    return FeatureExtractor(model, batch_size=BATCH)


def close(features: Any, expected: np.ndarray) -> bool:
    """Return whether features computed in other batches, or with another number of threads, are the same."""
    return difference(torch.tensor(features), torch.tensor(expected)) <= 1e-5


def pictures_of(files: list[str]) -> list[Any]:
    return [Pictures.open(file) for file in files]


def bytes_of(files: list[str]) -> list[bytes]:
    return [Path(file).read_bytes() for file in files]


def arrays_of(files: list[str]) -> list[np.ndarray]:
    return [np.asarray(picture) for picture in pictures_of(files)]


def objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def stored(files: list[str]) -> list[dict[str, Any]]:
    return [{"bytes": content, "path": None} for content in bytes_of(files)]


NUMBERS = list(range(IMAGES))
FORMS: dict[str, Callable[[list[str]], Any]] = {
    "dict of pictures": lambda files: {"image": pictures_of(files), "n": NUMBERS},
    "dict of paths in an array": lambda files: {"image": np.array(files), "n": np.array(NUMBERS)},
    "dict of arrays in an array": lambda files: {"n": np.array(NUMBERS), "picture": objects(arrays_of(files))},
    "dict of bytes": lambda files: {"path": files, "content": bytes_of(files), "n": NUMBERS},
    "list of rows": lambda files: [{"n": number, "image": file} for number, file in enumerate(files)],
    "table": lambda files: pa.table({"n": NUMBERS, "bytes": bytes_of(files)}),
    "record batch": lambda files: pa.RecordBatch.from_pydict({"image": stored(files), "n": NUMBERS}),
    "frame": lambda files: pd.DataFrame({"image": bytes_of(files), "n": NUMBERS}, index=range(7, 7 + IMAGES)),
    "frame of dicts": lambda files: pd.DataFrame({"it": stored(files), "n": NUMBERS}),
}


def values_of(batch: Any, name: str) -> np.ndarray:
    column = batch[name]
    return np.array(column.to_pylist() if isinstance(column, pa.Array | pa.ChunkedArray) else list(column))


def names_of(batch: Any) -> list[str]:
    return batch.schema.names if isinstance(batch, pa.Table | pa.RecordBatch) else [*batch]


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_any_form_comes_back_with_the_features_of_the_script(
    form: str, extractor: FeatureExtractor, files: list[str], expected: np.ndarray
) -> None:
    batch = FORMS[form](files)
    answer = extractor(batch)
    assert np.array_equal(values_of(answer, "feature").astype(np.float32), expected)
    assert values_of(answer, "n").tolist() == NUMBERS
    assert type(answer) is (dict if isinstance(batch, list) else type(batch))
    assert names_of(answer) == [*names_of(batch[0] if isinstance(batch, list) else batch), "feature"]
    if isinstance(batch, pd.DataFrame):
        assert answer.index.equals(batch.index)


def test_a_bare_column_becomes_a_dict_and_an_iterator_is_answered_batch_by_batch(
    extractor: FeatureExtractor, files: list[str], expected: np.ndarray
) -> None:
    for bare in (files, bytes_of(files), pd.Series(files), pa.array(files), objects(pictures_of(files))):
        (column,) = extractor(bare).values()
        assert np.array_equal(column, expected)
    frames = (pd.DataFrame({"image": files[begin : begin + BATCH]}) for begin in range(0, IMAGES, BATCH))
    answers = extractor(frames)
    assert next(answers).shape == (BATCH, 2)
    assert len(list(answers)) == len(range(0, IMAGES, BATCH)) - 1
    square = np.random.default_rng(3).integers(0, 256, (4, 23, 31, 3), dtype=np.uint8)
    assert np.array_equal(extractor({"image": square})["feature"], extractor({"image": list(square)})["feature"])


def test_batches_without_rows_have_the_columns_and_their_types(extractor: FeatureExtractor, files: list[str]) -> None:
    for form in ("table", "frame", "dict of bytes"):
        whole = FORMS[form](files)
        empty = {name: [] for name in whole} if isinstance(whole, dict) else whole[:0]
        answer, full = extractor(empty), extractor(whole)
        assert names_of(answer) == names_of(full)
        if form == "table":
            assert answer.schema == full.schema
        if isinstance(answer, dict):
            assert answer["feature"].shape == (0, full["feature"].shape[1])


def test_predictions_are_those_of_the_script_and_true_labels_stay(
    model: Path, images: Path, files: list[str], tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    predict(model=str(model), dataset=str(images), output_dir=str(tmp_path / "out"), batch_size=BATCH, top=3)
    rows = table_of(tmp_path / "out")
    predictor = Predictor(model, top=3, batch_size=BATCH)
    answer = predictor(pa.table({"image": files}))
    assert answer.select(answer.column_names[1:]).to_pydict() == {
        name: rows[name] for name in ("label", "probability", "labels", "probabilities")
    }
    as_arrays = predictor({"image": files})
    assert as_arrays["labels"].shape == as_arrays["probabilities"].shape == (IMAGES, 3)
    labelled = {"image": files, "label": ["true"] * IMAGES}
    with pytest.raises(DataError, match="already has the column 'label': give a prefix"):
        predictor(labelled)
    named = Predictor(model, prefix="predicted_", keep=["label"])(labelled)
    assert [*named] == ["label", *(f"predicted_{name}" for name in answer.column_names[1:])]
    assert named["predicted_label"].tolist() == rows["label"]


def test_features_of_layers_and_of_patches_have_their_shapes(model: Path, files: list[str]) -> None:  # noqa: F811
    config = opened(model)[0].config
    of_layers = FeatureExtractor(model, "cls_mean", layers=[1, 3], dtype="float16")
    batch = of_layers({"image": files[:3]})
    assert batch["feature_1"].shape == batch["feature_3"].shape == (3, 2 * config.hidden_size)
    assert batch["feature_1"].dtype == np.float16
    assert of_layers.transform(files[:3]).shape == (3, 4 * config.hidden_size)
    grid = FeatureExtractor(model, "patches")({"image": files[:3]})["feature"]
    assert grid.shape == (3, *config.grid_size, config.hidden_size)


# What travels, and when the model is opened


def test_it_travels_in_less_than_a_kilobyte_and_a_process_opens_the_model_once(
    model: Path, files: list[str], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    opening: list[Any] = []
    open_model = callables.open_model
    monkeypatch.setattr(callables, "OPENED", {})

    def open_and_count(*given: Any, **options: Any) -> Any:
        opening.append(given)
        return open_model(*given, **options)

    monkeypatch.setattr(callables, "open_model", open_and_count)
    extractor = FeatureExtractor(model, "cls", layers=[2], batch_size=3, model_hints=None)
    assert not opening
    extractor(files[:2])
    sent = pickle.dumps(extractor)
    assert len(sent) < 1000
    for copied in (pickle.loads(sent), copy.deepcopy(extractor), clone(extractor), extractor):
        assert copied.get_params() == extractor.get_params()
        copied(files[:2])
    FeatureExtractor(model, "mean", batch_size=3)(files[:2])  # of the same model
    assert len(opening) == 1
    extractor.set_params(batch_size=2)(files[:2])
    assert len(opening) == 2


def test_another_model_at_the_same_path_is_seen(model: Path, files: list[str], tmp_path: Path) -> None:  # noqa: F811
    folder = shutil.copytree(model, tmp_path / "model")
    sent, before = pickle.dumps(FeatureExtractor(folder)), FeatureExtractor(folder)(files[:2])["feature"]
    classifier, _ = opened(folder)
    with torch.no_grad():
        classifier.base_model.layernorm.bias.add_(1)
    classifier.save_pretrained(folder)
    assert pickle.dumps(FeatureExtractor(folder)) != sent  # `datasets` names its cache by a hash of this
    assert not np.allclose(FeatureExtractor(folder)(files[:2])["feature"], before)


def test_an_open_model_computes_as_it_is(model: Path, files: list[str], expected: np.ndarray) -> None:  # noqa: F811
    classifier, processor = opened(model)
    for given in (classifier, classifier.base_model, prepare_for_inference(classifier.base_model)):
        found = FeatureExtractor(given, image_processor=processor)(files)["feature"]
        assert close(found, expected)
    for given, options, named in (
        (classifier, {"image_processor": processor, "device": "cpu"}, "'device': a model that is open computes"),
        (classifier, {}, "give image_processor"),
        (copy.deepcopy(classifier).train(), {"image_processor": processor}, r"call model.eval\(\) first"),
    ):
        with pytest.raises(TrainingError, match=named):
            FeatureExtractor(given, **options)


# Engines


@pytest.mark.slow
def test_datasets_map_in_two_processes_forked_from_one_that_computed(
    extractor: FeatureExtractor, files: list[str], expected: np.ndarray, tmp_path: Path
) -> None:
    extractor(files)  # torch's threads run in this process, and not in those forked from it
    rows = Dataset.from_dict({"image": files, "label": NUMBERS}).cast_column("image", Image())
    for processes in (None, 2):
        done = rows.map(extractor, batched=True, batch_size=BATCH, num_proc=processes)
        assert done.features["feature"].feature.dtype == "float32"
        assert close(done["feature"][:], expected)
        assert done["label"][:] == NUMBERS
        kept = done.cast_column("image", Image(decode=False))[0]["image"]
        assert kept == {"bytes": None, "path": files[0]}  # not encoded again
    arrow = rows.with_format("arrow").map(extractor, batched=True, batch_size=BATCH)
    assert close(arrow.with_format(None)["feature"][:], expected)


class Rows(torch.utils.data.Dataset):
    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": self.files[number], "n": number}


@pytest.mark.slow
def test_workers_of_a_data_loader_and_of_joblib(
    extractor: FeatureExtractor, files: list[str], expected: np.ndarray
) -> None:
    loader = torch.utils.data.DataLoader(Rows(files), batch_size=BATCH, num_workers=2, collate_fn=extractor)
    batches = list(loader)
    assert [n for batch in batches for n in batch["n"]] == NUMBERS
    assert close(np.concatenate([batch["feature"] for batch in batches]), expected)
    parts = [files[begin : begin + BATCH] for begin in range(0, IMAGES, BATCH)]
    done = joblib.Parallel(n_jobs=2)(joblib.delayed(extractor)(part) for part in parts)
    assert close(np.concatenate([each["feature"] for each in done]), expected)


def test_a_pipeline_of_scikit_learn(model: Path, files: list[str], expected: np.ndarray) -> None:  # noqa: F811
    labels = np.array(NUMBERS) % 3
    pipeline = sklearn.pipeline.make_pipeline(FeatureExtractor(model, batch_size=BATCH), KNeighborsClassifier(1))
    cloned = clone(pipeline).set_params(featureextractor__feature="cls").set_params(featureextractor__feature="pooled")
    for fitted in (pipeline.fit(files, labels), cloned.fit(pictures_of(files), labels)):
        assert fitted.predict(files).tolist() == labels.tolist()
    assert np.array_equal(pipeline[:1].transform(files), expected)
    assert "FeatureExtractor" in pipeline._repr_html_()


def test_spark_s_iterators_of_frames_and_of_record_batches(
    extractor: FeatureExtractor, files: list[str], expected: np.ndarray
) -> None:
    """`mapInPandas` and `mapInArrow` call the function with an iterator and read the iterator that it returns."""
    sent = pickle.loads(pickle.dumps(extractor.set_params(keep=["path"])))
    content = bytes_of(files)
    begins = range(0, IMAGES, BATCH)
    whole = pa.table({"path": files, "length": NUMBERS, "content": content})
    for answers in (
        [pa.RecordBatch.from_pandas(frame) for frame in sent(whole[b : b + BATCH].to_pandas() for b in begins)],
        list(sent(iter(whole.to_batches(BATCH)))),
    ):
        answer = pa.Table.from_batches(answers)
        assert answer.schema.field("feature").type == pa.list_(pa.float32())
        assert answer.column_names == ["path", "feature"]
        assert np.array_equal(np.array(answer["feature"].to_pylist(), np.float32), expected)
        assert answer["path"].to_pylist() == files


# What cannot be computed


def test_images_that_cannot_be_read_end_the_batch_or_leave_it(
    extractor: FeatureExtractor, files: list[str], expected: np.ndarray
) -> None:
    contents: list[Any] = [*bytes_of(files[:4]), b"not an image", None, np.zeros((3, 24, 32), np.uint8), 7]
    batch = {"image": contents, "n": list(range(8)), "array": np.arange(8)}
    with pytest.raises(DataError, match=r'row 4 \(not an image of a known format\).*corrupted="skip"'):
        extractor(batch)
    skipping = clone(extractor).set_params(corrupted="skip")
    frames = {"image": objects(contents), "n": range(8), "array": range(8)}
    for given in (batch, pd.DataFrame(frames), pa.table({"image": [*contents[:6]], "n": range(6), "array": range(6)})):
        with pytest.warns(UserWarning, match="images left out, unreadable: row 4"):
            answer = skipping(given)
        assert values_of(answer, "n").tolist() == values_of(answer, "array").tolist() == [0, 1, 2, 3]
        assert close(values_of(answer, "feature"), expected[:4])
    with pytest.warns(UserWarning, match=r"row 6 \(its shape is \(3, 24, 32\).*row 7 \(it is a int"):
        skipping(batch)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (FeatureExtractor, {"feature": "clss"}, r"feature is 'clss': .*did you mean 'cls'"),
        (FeatureExtractor, {"batch_size": 0}, "batch_size is 0: expected 1 or more"),
        (Predictor, {"top": 0}, "top is 0"),
        (Predictor, {"engine": "tensorrt"}, "engine is 'tensorrt': expected 'torch' or"),
    ],
)
def test_unknown_options_are_refused_where_the_callable_is_built(
    kind: type[BatchCallable], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(TrainingError, match=named):
        kind("nowhere", **options)


@pytest.mark.parametrize(
    ("batch", "options", "named"),
    [
        ({"a": [b""], "b": [b""]}, {}, "Of the columns 'a', 'b', 'a', 'b' hold images: give image_column"),
        ({"a": ["x.png"], "b": ["y.png"]}, {}, "none holds images"),
        ({"a": ["x.png"]}, {"image_column": "image"}, "no column 'image', only 'a'"),
        (
            {"image": ["x.png"]},
            {"keep": ["label"]},
            "keep names 'label', but the columns are 'image'",
        ),
        (7, {}, "The batch is a int: expected a dict"),
    ],
)
def test_a_batch_without_a_clear_column_of_images_is_refused(
    batch: Any, options: dict[str, Any], named: str, extractor: FeatureExtractor, files: list[str]
) -> None:
    if isinstance(batch, dict) and "image" in batch:
        batch = {"image": files[:1]}
    with pytest.raises(DataError, match=named):
        extractor.set_params(**options)(batch)


def test_features_that_a_model_does_not_have_are_refused_when_it_opens(model: Path, files: list[str]) -> None:  # noqa: F811
    extractor = FeatureExtractor(model, "cls", layers=[4])
    with pytest.raises(TrainingError, match="the model has the blocks 1 to 3"):
        extractor(files)
    predictor = Predictor(opened(model)[0].base_model, image_processor=opened(model)[1])
    with pytest.raises(TrainingError, match="The PlainViTModel has no classifier"):
        predictor(files)


def test_an_image_in_memory_is_the_image_of_its_file(extractor: FeatureExtractor) -> None:
    """A picture with an orientation is turned, as the file is."""
    file, exif = io.BytesIO(), Pictures.Exif()
    exif[0x0112] = 6
    Pictures.effect_noise((31, 17), 80).convert("RGB").save(file, "PNG", exif=exif)
    answer = extractor([file.getvalue(), Pictures.open(file)])["feature"]
    assert np.array_equal(answer[0], answer[1])
