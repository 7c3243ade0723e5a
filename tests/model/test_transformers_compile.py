"""torch.compile, torch.export and ONNX: one program for any batch and image size, with the model's own outputs."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from plain_vit import PlainViTBackbone, PlainViTForImageClassification, PlainViTForMaskedImageModeling
from plain_vit.inference.adapters import LogitsOnly
from tests.conftest import randomize_
from tests.sizes import NIGHTLY, few
from tests.tiny import VARIATIONS, difference, pixels, tiny_config

# Generated kernels sum in a different order.
REORDERED = 1e-5
SIZES = [(2, 40, 28), (3, 24, 56), (5, 16, 98)]  # batch, height, width: another grid, the native grid, a third grid
RESAMPLED = SIZES if NIGHTLY else SIZES[::2]  # the native grid has its own graph
DYNAMIC = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}


def build(**fields: Any) -> Any:
    """Return a small classifier with random parameters."""
    return randomize_(PlainViTForImageClassification(tiny_config(**{"num_hidden_layers": 2, **fields}))).eval()


def compiled(model: Any, backend: str) -> Any:
    """Return a new compilation of the model as one graph for all sizes."""
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, dynamic=True, backend=backend)


def sizes_for(name: str) -> list[tuple[int, int, int]]:
    """Return the sizes that a variation accepts: truncated tables cannot grow, a hybrid has patches of 8 x 28."""
    if name == "resnet":
        return [(batch, height, 2 * width) for batch, height, width in RESAMPLED]
    sizes = SIZES if name in ("plain", "truncate") else RESAMPLED
    return [size for size in sizes if name != "truncate" or size[1] * size[2] <= 24 * 56]


def check_inference(name: str, backend: str) -> None:
    model = build(**VARIATIONS[name])
    program = compiled(model, backend)
    with torch.no_grad():
        for size in sizes_for(name):
            assert difference(program(pixels(*size)).logits, model(pixels(*size)).logits) < REORDERED


def gradients_of(forward: Any, model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    forward(images, labels=torch.arange(len(images))).loss.backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def check_training(name: str, backend: str, **fields: Any) -> None:
    fields = {**VARIATIONS[name], "pooling": VARIATIONS[name].get("pooling", "cls").replace("none", "mean"), **fields}
    # Compiled positions of another grid differ in the last bits (3e-7). In float32 this affects the gradients of
    # differential attention's lambdas, where terms up to 15,000 times as large as their sum cancel: compiled or not,
    # they are up to 2.4e-4 from the float64 gradients. In float64 the two programs differ by 3e-7.
    dtype, tolerance = (torch.float64, 1e-6) if name == "differential" else (torch.float32, 10 * REORDERED)
    model = build(**fields).train().to(dtype)
    for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
        dropout.p = 0.0  # relative_mlp has a fixed dropout, which is random in each forward pass
    program = compiled(model, backend)
    for size in sizes_for(name):
        found, expected = (gradients_of(forward, model, pixels(*size).to(dtype)) for forward in (program, model))
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            if gradient.abs().max() > 1e-6:  # key biases have no effect: their gradients are rounding errors
                assert difference(found[key], gradient) < tolerance, key


def test_inference_compiles_to_one_graph() -> None:
    check_inference("plain", "aot_eager")


@pytest.mark.slow(quick=["exported"])
@pytest.mark.parametrize("way", ["compiled", "exported"])
def test_a_loss_in_one_graph_is_that_of_the_labels_and_the_config_records_it(way: str) -> None:
    model, labels, images = build().train(), torch.rand(2, 7).round(), pixels()
    expected = nn.functional.binary_cross_entropy_with_logits(model(images).logits, labels)
    if way == "compiled":
        program = compiled(model, "aot_eager")
        found = [program(images, labels=labels).loss for _ in range(2)]  # the second call knows the problem type
    else:
        program = torch.export.export(model, (images,), {"labels": labels}).module()
        found = [program(images, labels=labels).loss]
    assert all(difference(loss, expected) < REORDERED for loss in found)
    assert model.config.problem_type == "multi_label_classification"


# One of each class of modules. Backends are not tested here, only that dynamo traces everything.
INFERRED = ["differential", "map", "query_block", "resnet", "shared_keys", "swiglu_packed"]
TRAINED = ["branches", "class_attention", "differential", "prr", "registers_last", "relative_table", "rotary_mixed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIATIONS) if NIGHTLY else INFERRED)
def test_every_variation_compiles_for_inference(name: str) -> None:
    check_inference(name, "inductor" if NIGHTLY and name in ("plain", "map", "differential") else "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIATIONS) if NIGHTLY else TRAINED)
def test_every_variation_compiles_for_training(name: str) -> None:
    check_training(name, "inductor" if NIGHTLY and name in ("plain", "registers") else "eager")


@pytest.mark.parametrize("mode", ["bicubic_antialias", "bilinear"])
def test_compiled_positions_are_resampled_in_float32_under_autocast(mode: str) -> None:
    positions = build(position_resampling=mode).vit.embeddings.position_embeddings
    program = compiled(positions, "aot_eager")
    with torch.autocast("cpu"):
        found = program((5, 7), positions.weight)
    assert difference(found, positions((5, 7), positions.weight)) < REORDERED


@pytest.mark.slow
@pytest.mark.parametrize("mode", few(["bicubic", "bilinear_antialias", "bilinear_align_corners"], 1))
def test_generated_kernels_train_positions_of_every_resampling_mode(mode: str) -> None:
    positions = build(position_resampling=mode).vit.embeddings.position_embeddings
    gradients = []
    for forward in (positions, compiled(positions, "inductor")):
        rows = forward((5, 7), positions.weight)
        gradients += torch.autograd.grad((rows * torch.arange(36)[:, None]).sum(), positions.weight)
    assert difference(gradients[1], gradients[0]) < REORDERED


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_and_checkpointing_compile_too(checkpointing: bool) -> None:
    rates = {"hidden_dropout_prob": 0.1, "drop_path_rate": 0.2, "patch_dropout_prob": 0.3}
    one_block = {"num_hidden_layers": 1, "patch_dropout_prob": 0.5}
    model = build(**one_block if checkpointing else rates).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    program = compiled(model, "aot_eager")
    for size in RESAMPLED:
        program(pixels(*size), labels=torch.arange(size[0])).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [PlainViTBackbone, PlainViTForMaskedImageModeling])
def test_other_heads_compile(model_class: Any) -> None:
    model = randomize_(model_class(tiny_config(num_hidden_layers=2, use_mask_token=True))).eval()
    program = compiled(model, "eager")
    for size in RESAMPLED:
        with torch.no_grad():
            found, expected = program(pixels(*size))[0], model(pixels(*size))[0]
        found, expected = (x[0] if isinstance(x, tuple) else x for x in (found, expected))
        assert difference(found, expected) < REORDERED


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["plain", *sorted(VARIATIONS.keys() - {"plain", "truncate"})], 5))
def test_an_exported_program_serves_every_batch_and_size(name: str, tmp_path: Path) -> None:
    model = build(**VARIATIONS[name])
    sizes = sizes_for(name)
    program = torch.export.export(model, (pixels(*sizes[0]),), dynamic_shapes=(DYNAMIC,))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for size in sizes:
        assert difference(loaded(pixels(*size)).logits, model(pixels(*size)).logits) < REORDERED


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["plain", "registers", "map", "differential", "swiglu"], 1))
def test_onnx_serves_every_batch_and_size(name: str, tmp_path: Path) -> None:
    """Export like a user; `tests/inference/test_inference_engines.py` has more variations."""
    model = build(**VARIATIONS[name])
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        LogitsOnly(model), (pixels(*SIZES[0]),), path, dynamo=True, dynamic_shapes=(DYNAMIC,),
        input_names=["pixel_values"], output_names=["logits"], verbose=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for size in SIZES:
        (logits,) = session.run(["logits"], {"pixel_values": pixels(*size).numpy()})
        assert difference(torch.tensor(logits), model(pixels(*size)).logits) < REORDERED
