"""Models that run in an engine: outputs, errors, and the scripts and commands that accept them."""

import copy
import functools
import json
import multiprocessing
import pickle
import shutil
import textwrap
from pathlib import Path
from typing import Any

import datasets
import joblib
import numpy as np
import openvino
import pyarrow.parquet as parquet
import pytest
import torch
import transformers
from PIL import Image

from plain_vit import (
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTImageProcessor,
    PlainViTModel,
    prepare_for_inference,
)
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import CheckpointError, ExportError, OutputExistsError, PreparedModelError, TrainingError
from plain_vit.inference import EngineOptions, open_exported, openvino_runtime, to_engine
from plain_vit.inference import prepared as inference
from plain_vit.inference.engine_models import EngineModel
from plain_vit.training.models import weights_hash
from plain_vit_command import main
from tests import tiny
from tests.processes import run_forked
from tests.sizes import draws, few
from tests.tiny import difference, pixels
from tests.training.runs import PYTHON, TORCHRUN, launch, open_script

extraction, prediction = open_script("extract_features"), open_script("predict")
REORDERED = 1e-5
ENGINES = ["onnx", "openvino"]
LABELS = {number: f"class {number}" for number in range(7)}
IMAGES = 23

pytestmark = pytest.mark.usefixtures("traced_once")


build = functools.partial(tiny.build, id2label=LABELS, label2id={name: number for number, name in LABELS.items()})


def run(program: str, *arguments: object) -> str:
    """Run a program in a separate process with a time limit, and return its output."""
    return run_forked(["-c", textwrap.dedent(program), *map(str, arguments)])


@pytest.fixture(autouse=True)
def threads() -> Any:
    """Compute with two threads, so that large batches are divided."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, traced_once: None) -> Path:
    """Return read-only folders of a saved classifier and encoder, each exported to each engine."""
    folder = tmp_path_factory.mktemp("folders")
    classifier = build()
    height, width = classifier.config.image_shape
    processor = PlainViTImageProcessor(size={"height": height, "width": width})
    for name, model in {"classifier": classifier, "encoder": classifier.base_model}.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
        for engine in ENGINES:
            to_engine(model, folder / f"{name}-{engine}", engine=engine, image_processor=processor)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of images."""
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(IMAGES):
        Image.fromarray(generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(folder / f"{number:02d}.png")
    return folder


# Numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine", "batch_size"),
    [(PlainViTForImageClassification, "onnx", 1), (PlainViTModel, "onnx", 8), (PlainViTModel, "openvino", 1),
     (PlainViTModel, "openvino", 8), (PlainViTForImageClassification, "openvino", 32)],
)  # fmt: skip
def test_batches_of_any_size_have_the_numbers_of_the_model(kind: Any, engine: str, batch_size: int) -> None:
    model = build(kind=kind)
    prepared: Any = prepare_for_inference(model, engine=engine, batch_size=batch_size)
    assert isinstance(prepared, kind)
    assert next(prepared.parameters(), None) is None
    for count in (1, 3, 8, 11):
        images = pixels(count)
        with torch.no_grad():
            expected = model(images)
        found = prepared(images)
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        for name, values in expected.items():
            assert found[name].dtype == torch.float32
            assert difference(found[name], values) < REORDERED
        as_tuple = prepared(images, return_dict=False)
        assert all(torch.equal(one, other) for one, other in zip(as_tuple, found.to_tuple(), strict=True))


@pytest.mark.slow
def test_results_of_one_call_are_not_overwritten_by_the_next() -> None:
    for engine in ENGINES:
        prepared: Any = prepare_for_inference(build(), engine=engine, batch_size=1)
        first = prepared(pixels(1)).logits
        kept = first.clone()
        prepared(pixels(1) + 1)
        assert torch.equal(first, kept)


@pytest.mark.slow
def test_images_of_a_batch_stay_in_their_order_when_it_is_divided() -> None:
    model, count = build(), 5 * openvino_runtime.PIECE + 1
    prepared: Any = prepare_for_inference(model, engine="openvino", batch_size=count)
    images = pixels(count)
    for _ in range(5):
        found = prepared(images).logits
        alone = torch.cat([prepared(image[None]).logits for image in images])
        assert difference(found, alone) < REORDERED


@pytest.mark.slow
def test_threads_that_share_a_model_get_the_numbers_of_one(folders: Path) -> None:
    """Use a separate process, because concurrent calls could deadlock."""
    program = """
        import sys, torch
        from concurrent.futures import ThreadPoolExecutor
        from plain_vit import PlainViTForImageClassification, prepare_for_inference
        from plain_vit.inference import open_exported
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        model = PlainViTForImageClassification.from_pretrained(sys.argv[1])
        for engine in ("torch", "onnx", "openvino"):
            for batch_size in (1, 8):
                if engine == "torch":
                    prepared = prepare_for_inference(model, batch_size=batch_size)
                else:
                    prepared = open_exported(f"{sys.argv[1]}-{engine}", batch_size=batch_size)
                size = (3, *model.config.image_shape)
                batches = [torch.randn(count, *size) for count in (batch_size, batch_size + 3) for _ in range(5)]
                expected = [prepared(images).logits for images in batches]
                def call(number):
                    torch.set_grad_enabled(False)
                    return prepared(batches[number % 10]).logits
                with ThreadPoolExecutor(4) as pool:
                    found = list(pool.map(call, range(100)))
                same = [torch.equal(each, expected[number % 10]) for number, each in enumerate(found)]
                assert all(same), (engine, batch_size)
    """
    run(program, folders / "classifier")


@pytest.mark.slow
def test_threads_that_open_their_first_model_at_once_share_one_core(folders: Path) -> None:
    program = """
        import sys, threading, time, openvino
        from plain_vit.inference import open_exported
        made, begin, all_at_once = [], openvino.Core.__init__, threading.Barrier(2)
        def counted(core, *args):
            made.append(core)
            time.sleep(0.5)
            begin(core, *args)
        openvino.Core.__init__ = counted
        def opened():
            all_at_once.wait()
            open_exported(sys.argv[1])
        threads = [threading.Thread(target=opened) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(made))
    """
    assert run(program, folders / "classifier-openvino") == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "others"), [(1, [8, 2]), (8, [3, 9]), (32, [2, 31])])
def test_batches_of_the_expected_size_run_in_a_graph_of_that_shape(
    batch_size: int, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, compile_model = [], openvino.Core.compile_model

    def noted(core: Any, graph: Any, *args: Any) -> Any:
        batches.append(str(graph.inputs[0].partial_shape[0]))
        return compile_model(core, graph, *args)

    monkeypatch.setattr(openvino.Core, "compile_model", noted)
    model = build()
    prepared: Any = prepare_for_inference(model, engine="openvino", batch_size=batch_size)
    of_any_size, made = "?", list(batches)
    pieces = [str(openvino_runtime.PIECE)] * 2  # one stream compiles the kernels before the others
    assert made == [of_any_size, *(["1"] if batch_size == 1 else pieces)]  # the first compilation checks the export
    for count in (batch_size, *others):
        images = pixels(count)
        with torch.no_grad():
            assert difference(prepared(images).logits, model(images).logits) < REORDERED
        assert len(batches) == len(made) + (count != batch_size)
    assert batches[len(made) :] == [of_any_size]


@pytest.mark.slow
def test_streams_with_other_numbers_than_one_stream_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_engine(build(), tmp_path / "one", engine="openvino")
    to_engine(build(hidden_act="relu"), tmp_path / "other", engine="openvino")
    compile_model = openvino.Core.compile_model

    def spoilt(core: Any, graph: Any, device: str, settings: dict[str, Any]) -> Any:
        if settings["NUM_STREAMS"] > 1:
            shape = graph.inputs[0].shape
            graph = core.read_model(tmp_path / "other" / "openvino_model.xml")
            graph.reshape(list(shape))
        return compile_model(core, graph, device, settings)

    monkeypatch.setattr(openvino.Core, "compile_model", spoilt)
    with pytest.raises(
        PreparedModelError, match="2 streams of OpenVINO differ from one stream in logits: give a batch"
    ):
        open_exported(tmp_path / "one", batch_size=8)
    open_exported(tmp_path / "one", batch_size=7)


@pytest.mark.slow
def test_streams_have_the_numbers_of_the_model_in_every_process(tmp_path: Path) -> None:
    """When streams compile kernels concurrently, 4 to 12% of processes compute wrong outputs."""
    config = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 2}
    model = build(image_size=224, patch_size=16, **config)
    to_engine(model, tmp_path / "graph", engine="openvino")
    images = pixels(8, 224, 224)
    with torch.no_grad():
        torch.save({"images": images, "logits": model(images).logits}, tmp_path / "expected")
    program = """
        import sys, torch
        from plain_vit.inference import open_exported
        torch.set_num_threads(2)
        expected = torch.load(sys.argv[2])
        found = open_exported(sys.argv[1], batch_size=8)(expected["images"]).logits
        assert (found - expected["logits"]).abs().max() < 1e-5 * expected["logits"].abs().max()
    """
    for _ in range(draws(2, nightly=20)):
        run(program, tmp_path / "graph", tmp_path / "expected")


@pytest.mark.slow
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no bfloat16")
def test_bfloat16_is_computed_in_and_rounds() -> None:
    model, images = build(), pixels(16)
    prepared: Any = prepare_for_inference(model, engine="openvino", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(images).logits
    assert 1e-4 < difference(prepared(images).logits, expected) < 5e-2


@pytest.mark.slow
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no bfloat16")
def test_threads_that_share_loops_freely_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_model, shared = openvino.Core.compile_model, []

    def noted(core: Any, graph: Any, device: str, settings: dict[str, Any]) -> Any:
        shared.append(settings.get("TBB_PARTITIONER"))
        return compile_model(core, graph, device, settings)

    monkeypatch.setattr(openvino.Core, "compile_model", noted)
    found, used, model, images = [], [], build(), pixels(3)
    for setting in (openvino_runtime.PARTITIONER, {}):
        monkeypatch.setattr(openvino_runtime, "PARTITIONER", setting)
        prepared: Any = prepare_for_inference(model, engine="openvino", dtype=torch.bfloat16, batch_size=3)
        used.append(shared[-1])
        found += [prepared(images).logits for _ in range(5)]
    known = "TBB_PARTITIONER" in openvino_runtime.core().get_property("CPU", "SUPPORTED_PROPERTIES")
    assert used == ["AUTO" if known else None, None]
    assert all(torch.equal(each, found[0]) for each in found)


# Copies, and other processes


@pytest.fixture(scope="module")
def prepared_models(traced_once: None) -> dict[str, Any]:
    """Return a model prepared with torch and with each engine; torch's has packed weights."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inference, "is_worth_packing", lambda dtype: True)
        return {engine: prepare_for_inference(build(), engine=engine, batch_size=2) for engine in ["torch", *ENGINES]}


def hash_of(model: Any) -> str:
    return model.files.hash() if isinstance(model, EngineModel) else weights_hash(model)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_copies_and_pickles_run_the_same_graph(engine: str, prepared_models: dict[str, Any], folders: Path) -> None:
    for model in (prepared_models[engine], open_exported(folders / f"encoder-{engine}")):
        model.config.return_dict = False
        for found in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
            assert hash_of(found) == hash_of(model)
            assert all(map(torch.equal, found(pixels()), model(pixels())))
            assert hash_of(found) == hash_of(model)
            with pytest.raises(PreparedModelError, match="24 x 56 pixels"):
                found(pixels(1, 40, 28))
        model.config.return_dict = True


@pytest.mark.slow
@pytest.mark.parametrize("way", few(["spawn", "joblib"], 1))
def test_started_processes_run_every_engine(way: str, prepared_models: dict[str, Any]) -> None:
    models, images = prepared_models.values(), pixels()
    if way == "spawn":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = [pool.apply(model, (images,)).logits for model in models]
    else:
        found = [each.logits for each in joblib.Parallel(n_jobs=2)(joblib.delayed(model)(images) for model in models)]
    for engine, model, logits in zip(prepared_models, models, found, strict=True):
        assert difference(logits, model(images).logits) < REORDERED, engine


def add_logits(batch: dict[str, Any], model: Any) -> dict[str, Any]:
    """Add the logits of the images of a batch."""
    torch.set_num_threads(1)  # torch requires this in forked processes
    return {"logits": model(torch.tensor(batch["images"])).logits.tolist()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 warns at any fork
@pytest.mark.parametrize("engine", ["torch", *ENGINES])
def test_datasets_map_in_several_processes(engine: str, prepared_models: dict[str, Any]) -> None:
    model, images = prepared_models[engine], pixels(4)
    expected = model(images).logits
    data = datasets.Dataset.from_dict({"images": images.tolist()})
    options: dict[str, Any] = {"batched": True, "batch_size": 2, "num_proc": 2, "fn_kwargs": {"model": model}}
    if engine == "openvino":
        with pytest.raises(PreparedModelError, match="was forked from one that used it: start the process by spawn"):
            data.map(add_logits, **options)
    else:
        found = torch.tensor(data.map(add_logits, **options)["logits"])
        assert difference(found, expected) < REORDERED


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_process_refuses_the_graph_of_the_one_before(engine: str, prepared_models: dict[str, Any]) -> None:
    context = multiprocessing.get_context("fork")
    said, model = context.Queue(), prepared_models[engine]

    def call() -> None:
        try:
            said.put(model(pixels()).logits.shape)
        except PreparedModelError as error:
            said.put(str(error))

    process = context.Process(target=call)
    process.start()
    assert "without its threads: pass the model to the process as an argument" in said.get(timeout=60)
    process.join()


@pytest.mark.slow
def test_the_model_itself_is_unchanged() -> None:
    model = build(num_hidden_layers=1)  # which is traced here
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for engine in ENGINES:
        prepare_for_inference(model, engine=engine)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model) is PlainViTForImageClassification


@pytest.mark.slow
def test_transformers_pipeline_takes_it(folders: Path, images: Path) -> None:
    model = PlainViTForImageClassification.from_pretrained(folders / "classifier").eval()
    processor = PlainViTImageProcessor.from_pretrained(folders / "classifier")
    files = [str(file) for file in sorted(images.iterdir())[:3]]
    both = [
        transformers.pipeline("image-classification", model=one, image_processor=processor)(files)
        for one in (model, open_exported(folders / "classifier-openvino"))
    ]
    for plain, fast in zip(*both, strict=True):
        assert [each["label"] for each in fast] == [each["label"] for each in plain]
        assert [each["score"] for each in fast] == pytest.approx([each["score"] for each in plain], rel=1e-4)


@pytest.mark.slow
def test_signals_arrive_after_models_have_come_and_gone(folders: Path) -> None:
    """Two `openvino.Core` destroyed in the order of their creation leave signal handlers with a freed stack."""
    program = """
        import gc, os, signal, sys
        from plain_vit.inference import open_exported
        opened = [open_exported(sys.argv[1]) for _ in range(2)]
        while opened:
            del opened[0]
            gc.collect()
        signal.signal(signal.SIGINT, lambda *_: print("arrived", flush=True))
        os.kill(os.getpid(), signal.SIGINT)
    """
    assert run(program, folders / "classifier-openvino") == "arrived\n"


# Errors


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_graph_does_not_have_is_refused(engine: str, folders: Path) -> None:
    model: Any = open_exported(folders / f"encoder-{engine}")
    for wrong in (pixels(2, 40, 28), pixels(2)[:, :1], pixels(2)[0], pixels(2)[:0], pixels(2)[..., :-1]):
        with pytest.raises(PreparedModelError, match=r"the graph takes \(B, 3, H, W\), with H and W 24 x 56 pixels"):
            model(wrong)
    for option in ("output_hidden_states", "output_attentions", "bool_masked_pos", "spatial_shapes"):
        with pytest.raises(PreparedModelError, match=f"{option}: a graph in an engine takes pixel_values and gives"):
            model(pixels(1), **{option: torch.ones(1, 1) if "output" not in option else True})
    model.config.output_hidden_states = True
    with pytest.raises(PreparedModelError, match="output_hidden_states: a graph"):
        model(pixels(1))
    assert model(pixels(1), output_hidden_states=False).last_hidden_state.shape[0] == 1
    with pytest.raises(PreparedModelError, match="inference only"):
        model.train()
    with pytest.raises(PreparedModelError, match="stays on its device"):
        model.to("cpu")
    with pytest.raises(PreparedModelError, match="cannot be saved"):
        model.save_pretrained(folders / "none")


@pytest.mark.slow
def test_a_graph_of_any_size_takes_multiples_of_the_patches_only(tmp_path: Path) -> None:
    model = build(num_hidden_layers=1)
    to_engine(model, tmp_path / "any", engine="onnx", options=EngineOptions(dynamic_size=True))
    opened: Any = open_exported(tmp_path / "any")
    images = pixels(2, 40, 28)
    with torch.no_grad():
        assert difference(opened(images).logits, model(images).logits) < REORDERED
    for size in ((41, 28), (40, 27), (0, 14)):
        with pytest.raises(PreparedModelError, match="multiples of 8 x 14 pixels"):
            opened(torch.zeros(1, 3, *size))


@pytest.mark.slow
def test_preparations_that_cannot_be_are_refused() -> None:
    model = build()
    with pytest.raises(PreparedModelError, match="engine is 'tensorrt': expected torch, onnx or openvino"):
        prepare_for_inference(model, engine="tensorrt")
    with pytest.raises(PreparedModelError, match="compile is for torch"):
        prepare_for_inference(model, engine="openvino", compile=True)
    with pytest.raises(PreparedModelError, match=r"ONNX Runtime does not compute in torch.bfloat16 on a CPU"):
        prepare_for_inference(model, engine="onnx", dtype=torch.bfloat16)
    with pytest.raises(PreparedModelError, match=r"OpenVINO computes in float32 or bfloat16, not in torch.float16"):
        prepare_for_inference(model, engine="openvino", dtype=torch.float16)
    with pytest.raises(PreparedModelError, match="the model is on meta"):
        prepare_for_inference(build().to("meta"), engine="openvino")
    with pytest.raises(PreparedModelError, match="already prepared"):
        prepare_for_inference(prepare_for_inference(model), engine="openvino")
    with pytest.raises(ExportError, match="PlainViTForMaskedImageModeling has no graph"):
        prepare_for_inference(build(kind=PlainViTForMaskedImageModeling), engine="onnx")


@pytest.mark.slow
def test_a_folder_that_is_no_export_is_refused_and_an_export_is_no_checkpoint(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no engine.json"):
        open_exported(folders / "classifier")
    with pytest.raises(CheckpointError, match=r"was exported to an engine, and is no checkpoint"):
        from_checkpoint(folders / "classifier-onnx")
    both = tmp_path / "both"  # in the layout of transformers.js, a graph may be beside the checkpoint
    shutil.copytree(folders / "classifier", both)
    shutil.copytree(folders / "classifier-onnx" / "onnx", both / "onnx")
    shutil.copy(folders / "classifier-onnx" / "engine.json", both)
    assert next(from_checkpoint(both).model.parameters()).device.type == "cpu"
    description = json.loads((folders / "classifier-onnx" / "engine.json").read_text())
    no_config = {name: value for name, value in description.items() if name != "plain_vit_config"}
    for text in ("{", "[]", "7", json.dumps(no_config), json.dumps(description | {"engine": "../x"}),
                 json.dumps(description | {"plain_vit_config": {"hidden_size": "wide"}}),
                 json.dumps(description | {"outputs": None})):  # fmt: skip
        shutil.copytree(folders / "classifier-onnx", tmp_path / "changed")
        (tmp_path / "changed" / "engine.json").write_text(text)
        with pytest.raises(CheckpointError, match="does not describe a model"):
            open_exported(tmp_path / "changed")
        shutil.rmtree(tmp_path / "changed")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_graph_that_is_damaged_missing_or_of_another_model_is_refused(
    engine: str, folders: Path, tmp_path: Path
) -> None:
    graph = Path(json.loads((folders / f"encoder-{engine}" / "engine.json").read_text())["graph"])
    for name in ("cut", "garbage", "missing", "other"):
        folder = tmp_path / name
        shutil.copytree(folders / f"encoder-{engine}", folder)
        contents = (folder / graph).read_bytes()
        if name == "missing":
            (folder / graph).unlink()
        elif name == "other":
            shutil.copytree(
                (folders / f"classifier-{engine}" / graph).parent, (folder / graph).parent, dirs_exist_ok=True
            )
            shutil.copy(folders / f"encoder-{engine}" / "engine.json", folder)
        else:
            (folder / graph).write_bytes(contents[: len(contents) // 2] if name == "cut" else b"no graph")
        with pytest.raises(CheckpointError, match=r"export it again$") as caught:
            open_exported(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_other_inputs_cannot_be_taken_for_an_option(folders: Path) -> None:
    model: Any = open_exported(folders / "encoder-onnx")
    with pytest.raises(TypeError):
        model(pixels(1), torch.ones(1, 12, dtype=torch.bool))


# Scripts and commands


def columns(folder: Path) -> dict[str, Any]:
    """Return the columns of all shards."""
    return parquet.read_table(folder / "data").to_pydict()


def run_both(script: Any, arguments: Any, tmp_path: Path, plain: dict[str, Any], **fast: Any) -> list[dict[str, Any]]:
    """Return the columns of a script's output with torch and with other options."""
    found = []
    for name, options in {"plain": plain, "fast": {**plain, **fast}}.items():
        script(arguments(**{"batch_size": 8, "shard_size": 10, **options}, output_dir=str(tmp_path / name)))
        found.append(columns(tmp_path / name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "engine", "exported"),
    [("pooled", "onnx", True), ("cls_mean", "openvino", True), ("patches", "onnx", False),
     ("patches", "openvino", False)],
)  # fmt: skip
def test_features_from_an_engine_are_those_of_torch(
    feature: str, engine: str, exported: bool, folders: Path, images: Path, tmp_path: Path
) -> None:
    plain, fast = run_both(
        extraction.extract, extraction.ExtractArguments, tmp_path,
        {"model": str(folders / "encoder"), "dataset": str(images), "feature": feature},
        **{"model": str(folders / f"encoder-{engine}")} if exported else {"engine": engine},
    )  # fmt: skip
    assert plain["path"] == fast["path"]
    assert len(plain["path"]) == IMAGES
    assert difference(torch.tensor(fast["feature"]), torch.tensor(plain["feature"])) < REORDERED
    settings = [json.loads((tmp_path / name / "manifest.json").read_text())["settings"] for name in ("plain", "fast")]
    assert settings[0]["engine_version"] is None
    assert settings[1]["engine_version"].startswith("ONNX Runtime 1." if engine == "onnx" else "OpenVINO 20")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_predictions_from_an_engine_are_those_of_torch(
    engine: str, folders: Path, images: Path, tmp_path: Path
) -> None:
    plain, fast = run_both(
        prediction.predict, prediction.PredictArguments, tmp_path,
        {"model": str(folders / "classifier"), "dataset": str(images)}, engine=engine,
    )  # fmt: skip
    assert fast["labels"] == plain["labels"]
    np.testing.assert_allclose(fast["probabilities"], plain["probabilities"], rtol=1e-4)


@pytest.mark.slow
def test_a_graph_in_int8_is_run_from_its_folder_with_the_numbers_of_openvino(
    folders: Path, images: Path, tmp_path: Path
) -> None:
    model = PlainViTForImageClassification.from_pretrained(folders / "classifier")
    processor = PlainViTImageProcessor.from_pretrained(folders / "classifier")
    # Random weights lose more accuracy in int8 than trained ones: this only tests that the folder's graph runs.
    options = EngineOptions(precision="int8", calibration=images, tolerance=1.0)
    to_engine(model, tmp_path / "int8", engine="openvino", image_processor=processor, options=options)
    plain, fast = run_both(
        prediction.predict, prediction.PredictArguments, tmp_path,
        {"model": str(folders / "classifier"), "dataset": str(images)}, model=str(tmp_path / "int8"),
    )  # fmt: skip
    assert fast["path"] == plain["path"]
    assert fast["probability"] != plain["probability"]
    pictures = [Image.open(file) for file in sorted(images.iterdir())]
    pixel_values = processor(pictures, return_tensors="pt")["pixel_values"].numpy()
    # The graph for four images sums in a different order than the graph for any number, which may change int8 rounding.
    core, whole = openvino.Core(), IMAGES - IMAGES % openvino_runtime.PIECE
    graph = core.read_model(tmp_path / "int8" / "openvino_model.xml")
    of_any_size = core.compile_model(graph.clone(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    graph.reshape([openvino_runtime.PIECE, *pixel_values.shape[1:]])
    of_one_size = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    pieces = np.split(pixel_values[:whole], whole // openvino_runtime.PIECE)
    logits = [of_one_size(piece)[0].copy() for piece in pieces] + [of_any_size(pixel_values[whole:])[0]]
    expected = torch.from_numpy(np.concatenate(logits)).softmax(dim=-1).max(dim=-1).values
    np.testing.assert_allclose(fast["probability"], expected.numpy(), rtol=1e-4)


@pytest.mark.slow
def test_two_processes_write_the_same_files_and_another_graph_is_another_run(
    folders: Path, images: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model": str(folders / "classifier-openvino"), "dataset": str(images), "shard_size": 5,
                               "batch_size": 4}  # fmt: skip
    shards = []
    for name, launcher in {"one": PYTHON, "two": TORCHRUN}.items():
        launch("predict", launcher, output_dir=tmp_path / name, **options)
        shards.append({file.name: file.read_bytes() for file in sorted((tmp_path / name / "data").iterdir())})
    assert len(shards[0]) == 5
    assert shards[0] == shards[1]
    options |= {"model": str(folders / "classifier-onnx"), "output_dir": str(tmp_path / "one"), "resume": True}
    with pytest.raises(OutputExistsError, match="holds the output of another run: .*model .*weights"):
        prediction.predict(prediction.PredictArguments(**options))


@pytest.mark.slow
def test_options_that_an_engine_does_not_have_are_refused_before_the_folder_is_made(
    folders: Path, images: Path, tmp_path: Path
) -> None:
    common = {"dataset": str(images), "output_dir": str(tmp_path / "out")}
    features, encoder = extraction.ExtractArguments, str(folders / "encoder")
    for wrong, match in (
        ({"model": encoder, "engine": "onnx", "layers": [1]}, "no outputs of blocks"),
        ({"model": f"{encoder}-onnx", "feature": "cls", "layers": [1]}, "no outputs of blocks"),
        ({"model": f"{encoder}-onnx", "engine": "onnx"}, "neither --model_hints nor --engine"),
        ({"model": str(folders / "classifier-onnx")}, "logits only"),
    ):
        with pytest.raises(TrainingError, match=match):
            extraction.extract(features(**{"feature": "mean", **common, **wrong}))
    with pytest.raises(TrainingError, match="no classifier"):
        prediction.predict(prediction.PredictArguments(model=f"{encoder}-openvino", **common))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_commands_take_an_exported_folder(
    folders: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files = [str(file) for file in sorted(images.iterdir())[:3]]
    printed = []
    for model in ("classifier", "classifier-openvino"):
        assert main(["predict", *files, "--model", str(folders / model), "--top", "2"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    for model in ("encoder", "encoder-onnx"):
        assert (
            main(["embed", *files, "--model", str(folders / model), "--out", str(tmp_path / f"{model}.parquet")]) == 0
        )
    one, other = (parquet.read_table(tmp_path / f"{name}.parquet").to_pydict() for name in ("encoder", "encoder-onnx"))
    assert difference(torch.tensor(other["feature"]), torch.tensor(one["feature"])) < REORDERED
    capsys.readouterr()
    assert (
        main(["embed", *files, "--model", str(folders / "classifier-onnx"), "--out", str(tmp_path / "x.parquet")]) != 0
    )
    assert "logits only" in capsys.readouterr().err
    assert main(["predict", *files, "--model", str(folders / "classifier-onnx"), "--image-size", "24"]) != 0
    assert "omit the settings of a checkpoint" in capsys.readouterr().err
