"""Graphs for ONNX Runtime and OpenVINO: outputs, exported folders, and errors."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from PIL import Image

from plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTImageProcessor,
    PlainViTModel,
)
from plain_vit.errors import DataError, ExportError, MissingPackageError, VerificationError
from plain_vit.inference import EngineOptions, onnx_runtime, to_engine
from plain_vit.inference import engines as inference_engines
from plain_vit.inference.calibration import image_sets
from plain_vit.inference.engine_checks import relative_difference
from plain_vit.inference.engines import ENGINES
from plain_vit_command import ENGINE_OPTIONS, PRECISIONS, main
from plain_vit_command import ENGINES as NAMES
from tests.conftest import randomize_
from tests.sizes import NIGHTLY, few
from tests.tiny import VARIATIONS, build, difference, pixels, tiny_config

REORDERED = 1e-5
SIZES = [(2, 40, 28), (1, 24, 56), (5, 16, 98), (3, 8, 28)]  # batch, height, width
LABELS = ["cat", "dog", "owl", "fox", "bee", "ant", "elk"]

pytestmark = pytest.mark.usefixtures("traced_once")


def processor() -> PlainViTImageProcessor:
    """Return the image processor of these models."""
    return PlainViTImageProcessor(size={"height": 24, "width": 56})


def runner(folder: Path, engine: str) -> Any:
    """Return a function that runs the graph of a folder as its user would, and returns outputs by name."""
    if engine == "onnx":
        session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return lambda images: dict(
            zip(names, map(torch.tensor, session.run(None, {"pixel_values": images.numpy()})), strict=True)
        )
    compiled = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: {
        output.any_name: torch.tensor(value) for output, value in compiled({"pixel_values": images.numpy()}).items()
    }


def sizes_for(name: str, dynamic_size: bool) -> list[tuple[int, int, int]]:
    """Return the batches that a graph of the variation takes."""
    if not dynamic_size:
        return [(batch, 24, 56) for batch in (1, 2, 5)]
    if name == "resnet":
        return [(batch, height, 2 * width) for batch, height, width in SIZES]
    return [size for size in SIZES if name != "truncate" or size[1] * size[2] <= 24 * 56]


def check(model: Any, name: str, engine: str, dynamic_size: bool, folder: Path) -> None:
    options = EngineOptions(dynamic_size=dynamic_size)
    exported: Any = to_engine(model, folder, engine=engine, options=options)
    run = runner(folder, engine)
    for size in sizes_for(name, dynamic_size):
        images = pixels(*size)
        with torch.no_grad():
            expected = model(images)
        found = run(images)
        assert list(found) == [output["name"] for output in exported.description["outputs"]]
        for output, values in found.items():
            assert difference(values, expected[output]) < REORDERED, (output, size)


# One of each class of parts, and models without a classifier.
GRAPHS: list[tuple[str, Any]] = [(name, PlainViTForImageClassification) for name in (
    "class_attention", "differential", "factorized", "relative_mlp", "rotary_centered", "swiglu_packed",
)] + [("map", PlainViTModel), ("no_pooling", PlainViTModel)]  # fmt: skip
if NIGHTLY:
    GRAPHS = [(name, kind) for kind in (PlainViTForImageClassification, PlainViTModel) for name in sorted(VARIATIONS)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
@pytest.mark.parametrize("dynamic_size", few([True, False], 1))
@pytest.mark.parametrize("name, kind", GRAPHS)
def test_every_variation_keeps_its_numbers(
    name: str, kind: Any, dynamic_size: bool, engine: str, tmp_path: Path
) -> None:
    check(build(name, kind, num_hidden_layers=1), name, engine, dynamic_size, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["plain", "registers_last", "map", "no_pooling"], 1))
def test_a_model_that_does_not_pool_gives_its_tokens_alone(name: str, tmp_path: Path) -> None:
    config = tiny_config(**{**VARIATIONS[name], "num_hidden_layers": 1})
    features = randomize_(PlainViTModel(config, add_pooling_layer=False)).eval()
    exported: Any = to_engine(features, tmp_path / "features", engine="onnx")
    assert [output["name"] for output in exported.description["outputs"]] == ["last_hidden_state"]


# One model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved model with an image processor, which no test writes into."""
    folder = tmp_path_factory.mktemp("saved")
    labels = {"id2label": dict(enumerate(LABELS)), "problem_type": "multi_label_classification"}
    model = build(num_hidden_layers=1, **labels, label2id={name: number for number, name in enumerate(LABELS)})
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved: Path) -> Any:
    return PlainViTForImageClassification.from_pretrained(saved).eval()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_the_command_writes_a_folder_that_others_open(
    engine: str, model: Any, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(saved), str(out), "--to", engine, "--dynamic-size"]) == 0
    printed = capsys.readouterr().out
    assert f"written: {out}" in printed
    assert "any multiple of 8 x 14 pixels" in printed
    said = json.loads((out / "engine.json").read_text())
    assert f"logits: largest difference {said['outputs'][0]['difference']:.1e}" in printed
    assert said["inputs"] == [{"name": "pixel_values", "dtype": "float32", "shape": ["batch", 3, "height", "width"]}]
    assert (out / said["graph"]).is_file()
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "vit"
    assert config["id2label"] == {str(number): name for number, name in enumerate(LABELS)}
    assert config["problem_type"] == "multi_label_classification"
    assert "auto_map" not in json.loads((out / "preprocessor_config.json").read_text())
    assert PlainViTImageProcessor.from_pretrained(out).to_dict() == processor().to_dict()
    run = runner(out, engine)
    for size in SIZES:
        with torch.no_grad():
            assert difference(run(pixels(*size))["logits"], model(pixels(*size)).logits) < REORDERED


def test_the_graph_of_onnx_has_the_names_and_the_opset_that_are_written(model: Any, tmp_path: Path) -> None:
    to_engine(model, tmp_path / "out", engine="onnx")
    graph = onnx.load(tmp_path / "out" / "onnx" / "model.onnx")
    assert [value.name for value in graph.graph.input] == ["pixel_values"]
    assert [value.name for value in graph.graph.output] == ["logits"]
    assert {each.version for each in graph.opset_import if each.domain == ""} == {inference_engines.OPSET}
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()


@pytest.mark.slow(quick=["onnx-float16-11"])
@pytest.mark.parametrize(
    "engine, precision, bits",
    [("onnx", "float16", 11), ("onnx", "bfloat16", 8), ("openvino", "float16", 11), ("openvino", "bfloat16", 8)],
)
def test_weights_of_16_bits_halve_the_file_and_round_the_outputs(
    engine: str, precision: str, bits: int, model: Any, tmp_path: Path
) -> None:
    sizes = {}
    for each in ("float32", precision):
        options = EngineOptions(precision=each)
        exported: Any = to_engine(model, tmp_path / each, engine=engine, options=options)
        graph = tmp_path / each / exported.description["graph"]
        sizes[each] = (graph if engine == "onnx" else graph.with_suffix(".bin")).stat().st_size
    (output,) = exported.description["outputs"]
    assert 2.0 ** -(bits + 6) < output["difference"] < 2.0 ** (3 - bits)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert 1.5 * weights < sizes["float32"] - sizes[precision] < 2.1 * weights
    with torch.no_grad():
        expected = model(pixels()).logits
    assert difference(runner(tmp_path / precision, engine)(pixels())["logits"], expected) < 2.0 ** (3 - bits)


def photographs(folder: Path, names: list[str], count: int = 3) -> Path:
    """Write random images into subfolders of these names."""
    generator = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image = Image.fromarray(generator.integers(0, 256, (30, 44, 3), dtype=np.uint8))
            image.save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("engine", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_int8_is_calibrated_on_half_of_the_images_and_measured_on_the_others(
    engine: str, model: Any, tmp_path: Path
) -> None:
    images = photographs(tmp_path / "images", LABELS)
    exported: Any = to_engine(
        model, tmp_path / "out", engine=engine, image_processor=processor(),
        options=EngineOptions(precision="int8", calibration=images, tolerance=0.5),
    )  # fmt: skip
    measured = exported.description["images"]
    assert (measured["setting"], measured["compared"]) == (11, 10)
    sets = image_sets(images, processor(), model.config)
    run, right, same, before = runner(tmp_path / "out", engine), [], [], []
    for batch in sets.compared:
        with torch.no_grad():
            expected = model(torch.tensor(batch)).logits
        found = run(torch.tensor(batch))["logits"]
        assert difference(found, expected) > REORDERED  # it is not the graph in float32
        same += (found.argmax(-1) == expected.argmax(-1)).tolist()
        right += found.argmax(-1).tolist()
        before += expected.argmax(-1).tolist()
    labels = list(sets.labels or [])
    assert measured["agreement"] == pytest.approx(np.mean(same))
    assert measured["accuracy_after"] == pytest.approx(np.mean([a == b for a, b in zip(right, labels, strict=True)]))
    assert measured["accuracy_before"] == pytest.approx(np.mean([a == b for a, b in zip(before, labels, strict=True)]))
    assert "accuracy" in str(exported)
    graph = tmp_path / "out" / exported.description["graph"]
    if engine == "openvino":
        assert b"FakeQuantize" in graph.read_bytes()
        return
    nodes = onnx.load(graph).graph.node
    made_by = {name: node.op_type for node in nodes for name in node.output}
    in_float32 = [node for node in nodes if node.op_type == "MatMul" and made_by[node.input[0]] != "DequantizeLinear"]
    assert len(in_float32) == 2 * model.config.num_hidden_layers  # those of attention


def test_images_without_labels_give_no_accuracy_and_wrong_folders_are_refused(model: Any, tmp_path: Path) -> None:
    assert image_sets(photographs(tmp_path / "a", ["x"]), processor(), model.config).labels is None
    assert image_sets(photographs(tmp_path / "b", LABELS[:2]), processor(), model.config).labels == [0, 1, 1]
    with pytest.raises(DataError, match="folders that are not labels of the model, 'x'"):
        image_sets(photographs(tmp_path / "c", ["cat", "x"]), processor(), model.config)
    with pytest.raises(DataError, match="1 image files"):
        image_sets(photographs(tmp_path / "d", ["x"], count=1), processor(), model.config)
    folder = photographs(tmp_path / "e", ["x"])
    (folder / "x" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="1.png cannot be read as an image"):
        list(image_sets(folder, processor(), model.config).compared)


@pytest.mark.slow
def test_what_differs_is_refused_and_leaves_what_was_there(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = EngineOptions(precision="bfloat16", tolerance=1e-5)
    with pytest.raises(VerificationError, match=r"logits by .* where 1e-05 is allowed"):
        to_engine(model, out, engine="onnx", options=options)
    assert list(tmp_path.iterdir()) == []
    to_engine(model, out, engine="onnx")
    before = (out / "onnx" / "model.onnx").read_bytes()
    with pytest.raises(VerificationError):
        to_engine(model, out, engine="openvino", options=options, force=True)
    assert (out / "onnx" / "model.onnx").read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_outputs_that_are_no_numbers_are_refused() -> None:
    expected = np.ones((2, 3))
    for wrong in (np.nan, np.inf):
        difference = relative_difference("logits", np.full((2, 3), wrong), expected)
        with pytest.raises(VerificationError):
            inference_engines.refuse_beyond({"logits": difference}, EngineOptions(), ENGINES["onnx"])
    with pytest.raises(VerificationError, match="shape"):
        relative_difference("logits", np.ones((1, 3)), expected)


@pytest.mark.slow(quick=["bfloat16"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_beyond_the_limit_of_a_file_are_beside_it(
    precision: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_runtime, "LARGEST_FILE", 1000)
    to_engine(model, tmp_path / "out", engine="onnx", options=EngineOptions(precision=precision))
    files = {path.name: path.stat().st_size for path in (tmp_path / "out" / "onnx").iterdir()}
    assert files.keys() == {"model.onnx", "model.onnx_data"}
    assert files["model.onnx_data"] > 1000
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["transformers.js_config"] == {"use_external_data_format": True}
    with torch.no_grad():
        expected = model(pixels()).logits
    assert difference(runner(tmp_path / "out", "onnx")(pixels())["logits"], expected) < 0.05
    to_engine(model, tmp_path / "openvino", engine="openvino")


@pytest.mark.parametrize("kind", [PlainViTBackbone, PlainViTForMaskedImageModeling])
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_models_with_other_outputs_are_refused(kind: Any, engine: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"{kind.__name__} has no graph"):
        to_engine(build(kind=kind), tmp_path / "out", engine=engine)
    assert list(tmp_path.iterdir()) == []


def test_contradictory_options_are_refused_before_any_work(saved: Path, tmp_path: Path) -> None:
    model, out = build(), tmp_path / "out"
    patches = PlainViTImageProcessor(patch_size=8, max_num_patches=20)
    images = photographs(tmp_path / "images", ["x"])
    with pytest.raises(ExportError, match="images of many sizes"):
        to_engine(model, out, engine="onnx", image_processor=patches)
    with pytest.raises(ExportError, match="engine is 'timm': expected onnx or openvino"):
        to_engine(model, out, engine="timm")
    with pytest.raises(ExportError, match="precision is 'int4'"):
        EngineOptions(precision="int4")
    with pytest.raises(ExportError, match="needs images"):
        EngineOptions(precision="int8")
    with pytest.raises(ExportError, match="calibration is for precision int8"):
        EngineOptions(calibration=images)
    options = EngineOptions(precision="int8", calibration=images)
    with pytest.raises(ExportError, match="need an image processor"):
        to_engine(model, out, engine="onnx", options=options)
    with pytest.raises(SystemExit):
        main(["export", str(saved), str(out), "--to", "timm", "--precision", "float16"])
    assert main(["export", str(saved), str(out), "--to", "onnx", "--precision", "int8"]) == ExportError.exit_code
    assert not out.exists()


@pytest.mark.parametrize("engine, package", [("onnx", "onnxruntime"), ("openvino", "openvino"), ("openvino", "nncf")])
def test_a_missing_package_is_named_with_what_to_install(
    engine: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    options = EngineOptions(precision="int8", calibration=tmp_path) if package == "nncf" else EngineOptions()
    with pytest.raises(MissingPackageError, match=rf'{package}.*: pip install "plain-vit\[engines\]"'):
        to_engine(build(), tmp_path / "out", engine=engine, options=options)


def test_the_command_line_has_the_names_of_the_package() -> None:
    assert set(NAMES) == set(ENGINES)
    assert set(PRECISIONS) == set(inference_engines.TOLERANCES)
    assert set(ENGINE_OPTIONS) == set(EngineOptions.__dataclass_fields__)
