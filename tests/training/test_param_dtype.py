"""Blocks that compute with bfloat16 copies of their weights: what they compute, and what stays unchanged."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.bench_kernels import Counter
from plain_vit import PlainViTForImageClassification
from plain_vit.errors import TrainingError
from plain_vit.training.hardware.precision import blocks_of, train_on_copies
from plain_vit.training.models import head_of, with_lora
from plain_vit.training.tasks import classification
from tests.conftest import randomize_
from tests.tiny import tiny_config
from tests.training.runs import assert_same_bits, open_script, save_stock_vit, weights_of

script = open_script("finetune_image_classification")
masked = open_script("pretrain")
SHORT = {
    "dataset": "digits", "shots_per_class": 7, "steps": 5, "batch_size": 12, "evaluations": 2, "log_every": 1,
    "report": False, "checkpoints_kept": 0, "mixed_precision": "bf16", "param_dtype": "bf16",
}  # fmt: skip
IMAGES = torch.randn(3, 3, 32, 24, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, 1])


def stock(attention: str = "sdpa") -> nn.Module:
    config = ViTConfig(hidden_size=20, num_hidden_layers=3, num_attention_heads=2, intermediate_size=28,
                       image_size=(32, 24), patch_size=8, num_labels=3, attn_implementation=attention)  # fmt: skip
    return randomize_(ViTForImageClassification(config)).train()


def plain(**changes: Any) -> nn.Module:
    config = tiny_config(image_size=(32, 24), patch_size=8, num_labels=3, num_hidden_layers=3, **changes)
    return randomize_(PlainViTForImageClassification(config)).train()


def logits(model: nn.Module, images: torch.Tensor = IMAGES) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(images).logits.float()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits(model), LABELS).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def distance(values: dict[str, Any], others: dict[str, Any]) -> float:
    """Return the relative distance between two sets of tensors, each flattened to one vector."""
    differences = torch.stack([(values[name] - other).double().norm() for name, other in others.items()])
    return float(differences.norm() / torch.stack([other.double().norm() for other in others.values()]).norm())


class InBfloat16(nn.Module):
    """A block that is entirely converted to bfloat16."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block.bfloat16()

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.block(tokens.bfloat16(), *args, **kwargs)


def test_a_block_computes_what_it_would_with_weights_in_bfloat16() -> None:
    model = stock("eager")
    converted = copy.deepcopy(model)
    layers: Any = converted.vit.layers
    for index, block in enumerate(layers):
        layers[index] = InBfloat16(block)
    train_on_copies(model, torch.bfloat16)
    assert torch.equal(logits(model), logits(converted))
    expected = {name.replace(".block.", "."): gradient for name, gradient in gradients(converted).items()}
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected[name].float()), name
        assert ".layers." not in name or expected[name].dtype == torch.bfloat16


VARIATIONS = {
    "plain": {},
    "rotary": {"rope_parameters": {"rope_type": "axial"}, "position_embedding_type": "none"},
    "relative": {"relative_position_bias": {"type": "table"}},
    "swiglu": {"mlp_type": "swiglu"},
}


@pytest.mark.parametrize("changes", VARIATIONS.values(), ids=VARIATIONS)
def test_gradients_are_as_near_to_those_in_float32_as_bfloat16_allows(changes: dict[str, Any]) -> None:
    model = plain(**changes)
    exact = copy.deepcopy(model)
    torch.nn.functional.cross_entropy(exact(IMAGES).logits, LABELS).backward()
    expected = {name: weight.grad for name, weight in exact.named_parameters() if weight.grad is not None}
    train_on_copies(model, torch.bfloat16)
    found = gradients(model)
    assert 1e-4 < distance(found, expected) < 0.04
    assert all(found[name] is None for name in found.keys() - expected.keys())


def test_weights_are_as_before_and_evaluations_have_the_same_bits() -> None:
    model = plain()
    weights = dict(model.named_parameters())
    before = logits(model.eval())
    train_on_copies(model, torch.bfloat16)
    gradients(model.train())
    with pytest.raises(ValueError, match="pixel_values has shape"):
        logits(model, IMAGES[:, :2])
    broken = copy.deepcopy(model)
    blocks_of(broken)[1].mlp.fc1.weight = nn.Parameter(torch.ones(3, 5))
    with pytest.raises(RuntimeError, match="shape"):
        logits(broken)
    for now in (model, broken):
        assert all(type(weight) is nn.Parameter and weight.is_leaf for weight in now.parameters())
    assert all(weight is weights[name] for name, weight in model.named_parameters())
    assert torch.equal(logits(model.eval()), before)
    assert [type(block).__name__ for block in blocks_of(model)] == ["PlainViTLayer"] * 3


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    model = plain()
    train_on_copies(model, torch.bfloat16)
    expected = gradients(model)  # this also records the parameters
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(2)
    again = gradients(copy.deepcopy(model))
    found = gradients(other)
    for name, gradient in gradients(model).items():
        assert gradient is not None
        assert torch.equal(gradient, expected[name])
        assert torch.equal(gradient, again[name])
    assert distance(found, expected) > 0.1
    assert all(weight.grad is found[name] for name, weight in other.named_parameters())


def test_frozen_weights_have_no_gradients_and_a_frozen_model_trains_adapters() -> None:
    model = plain()
    frozen = [block.mlp.fc1.weight for block in blocks_of(model)]
    for weight in frozen:
        weight.requires_grad_(False)
    train_on_copies(model, torch.bfloat16)
    found = gradients(model)
    assert [name for name, gradient in found.items() if gradient is None] == [
        name for name, weight in model.named_parameters() if not weight.requires_grad
    ]
    adapted = with_lora(plain(), rank=2, alpha=4, targets=[], head=head_of(plain()))
    train_on_copies(adapted, torch.bfloat16)
    assert all((gradient is not None) == ("lora" in name or ("classifier" in name and "original" not in name))
               for name, gradient in gradients(adapted).items())  # fmt: skip


def test_recomputed_blocks_have_the_same_gradients() -> None:
    model = plain()
    train_on_copies(model, torch.bfloat16)
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())


@pytest.mark.parametrize("make", [plain, stock])
def test_nothing_is_cast_but_the_weights_of_a_block_at_once_and_its_tokens(make: Any) -> None:
    casts = []
    for copied in (False, True):
        model = make()
        if copied:
            train_on_copies(model, torch.bfloat16)
        with Counter() as counter:
            gradients(model)
        casts.append(counter.casts)
    few = 18  # tensors of the embeddings, the last norm and the head
    assert casts[1] <= 2 * len(blocks_of(make())) + few < casts[0]


# Runs


@pytest.fixture
def run(model_folder: Path, tmp_path: Path) -> Any:
    """Return a function that does a short run and returns its folder."""

    def start(name: str, **options: Any) -> Path:
        values = {"model": str(model_folder), **SHORT, "output_dir": str(tmp_path / name), **options}
        script.finetune(script.FinetuneArguments(**values))
        return tmp_path / name

    return start


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_run_saves_float32_weights_and_resumes_to_the_same_bits(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"checkpoints_kept": 1, "checkpoint_every": 2, "ema_decay": 0.9, "gradient_accumulation_steps": 2}
    whole = run("whole", **options)
    assert {weight.dtype for weight in weights_of(whole).values()} == {torch.float32}
    assert "param_dtype" in (whole / "README.md").read_text()
    assert 0 < distance(weights_of(run("autocast", **options, param_dtype="float32")), weights_of(whole)) < 0.01
    monkeypatch.setattr(classification, "save_classifier", stop)
    with pytest.raises(KeyboardInterrupt):
        run("half", **options)
    monkeypatch.undo()
    assert_same_bits(run("half", resume=True, **options), whole)


def stop(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_stock_model_and_masked_prediction_train_with_it(run: Any, model_folder: Path, tmp_path: Path) -> None:
    folder = run("stock", model=str(save_stock_vit(tmp_path / "model")))
    assert json.loads((folder / "results.json").read_text())["images_evaluated"] > 0
    options = {name: SHORT[name] for name in ("dataset", "steps", "batch_size", "mixed_precision", "param_dtype")}
    weights = []
    for param_dtype in ("float32", "bf16"):
        folder = tmp_path / f"masked-{param_dtype}"
        arguments = {**options, "model": str(model_folder), "output_dir": str(folder), "param_dtype": param_dtype}
        masked.pretrain(masked.PretrainArguments(**arguments))
        weights.append(weights_of(folder))
    assert 0 < distance(*weights) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "no"}, "param_dtype bf16 needs mixed_precision bf16"),
        ({"compile": True}, "With compile, weights are already cast once: omit --param_dtype"),
        ({"shard": True}, "With shard, weights are already cast once: omit --param_dtype"),
    ],
)
def test_what_it_does_not_go_with_is_refused(run: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        run("refused", **options)
