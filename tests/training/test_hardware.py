"""Settings for GPUs: precision, transfers, workers and gradient exchange between processes."""

import copy
import datetime
from typing import Any

import pytest
import torch

from plain_vit.system import environment
from plain_vit.training.hardware.precision import tf32
from plain_vit.training.hardware.processes import loading_options, start_accelerator
from plain_vit.training.hardware.throughput import flops_per_image, peak_flops
from plain_vit.training.tasks.classification import Classification
from tests.training.runs import open_script, save_plain_vit, small_vit

script = open_script("finetune_image_classification")
SWITCHES = (torch.backends.cuda.matmul, torch.backends.cudnn)


def switched() -> tuple[bool, ...]:
    return tuple(switch.allow_tf32 for switch in SWITCHES)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_tf32_is_switched_in_its_context_only(enabled, before):
    with tf32(before):
        outside = switched()
        with tf32(enabled):
            assert switched() == (enabled, enabled)
        assert switched() == outside
        with pytest.raises(ZeroDivisionError), tf32(enabled):
            _ = 1 / 0
        assert switched() == outside


@pytest.mark.parametrize("checkpointing", [False, True])
def test_operations_are_those_of_the_products_of_a_forward_and_a_backward_pass(checkpointing):
    model = small_vit(num_hidden_layers=2).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    before = copy.deepcopy(model.state_dict())
    tokens, patches, width, inner = 1 + 3 * 2, 3 * 2, model.config.hidden_size, model.config.intermediate_size
    embedding, blocks = patches * 3 * 8 * 8 * width, tokens * width * (4 * width + 2 * inner + 2 * tokens)
    forward = embedding + 2 * blocks + width * 5
    expected = 2 * (3 * forward - embedding)  # the images have no gradient
    assert flops_per_image(model, lambda: model(torch.randn(1, 3, 24, 16)).logits) == expected
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "name, peak",
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("T4", None)],
)
def test_peaks_are_by_the_name_of_the_gpu_and_half_in_tf32(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cuda"), tf32=True) == (peak and peak / 2)
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [False, True])
def test_only_steps_of_training_use_tf32(enabled, tmp_path, monkeypatch):
    seen: dict[str, set[tuple[bool, ...]]] = {"loss": set(), "evaluate": set(), "save": set()}

    def noting(name: str) -> Any:
        function = getattr(Classification, name)

        def noted(*args: Any, **keywords: Any) -> Any:
            seen[name].add(switched())
            return function(*args, **keywords)

        return noted

    for name in seen:
        monkeypatch.setattr(Classification, name, noting(name))
    options = {"steps": 2, "batch_size": 4, "shots_per_class": 2, "report": False, "tf32": enabled}
    model = save_plain_vit(tmp_path / "model")
    script.finetune(
        script.FinetuneArguments(model=str(model), dataset="digits", output_dir=str(tmp_path / "run"), **options)
    )
    assert seen == {"loss": {(enabled, enabled)}, "evaluate": {(False, False)}, "save": {switched()}}


def test_processes_share_their_gradients_with_the_buckets_and_wait_for_an_hour():
    accelerator = start_accelerator(num_processes=1, mixed_precision="no")
    assert accelerator.ddp_handler is not None
    assert accelerator.ddp_handler.gradient_as_bucket_view
    assert accelerator.init_handler is not None
    assert accelerator.init_handler.timeout == datetime.timedelta(hours=1)
    assert accelerator.non_blocking


@pytest.mark.parametrize("precision, told", [("bf16", [True]), ("no", [])])
@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="does not compute on the CPU")
def test_training_in_a_dtype_without_products_is_said_to_be_slow(precision, told, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    warned: list[str] = []
    monkeypatch.setattr(environment.logger, "warning_once", warned.append)
    start_accelerator(num_processes=1, mixed_precision=precision)
    assert ["bfloat16" in text for text in warned] == told


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_are_kept_from_one_evaluation_to_the_next(workers):
    assert loading_options(workers).get("persistent_workers", False) == bool(workers)


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("processes", [1, 2])
def test_size_of_evaluated_batches_is_that_of_each_process(processes, tmp_path, monkeypatch):
    folder = save_plain_vit(tmp_path / "model")
    arguments = script.FinetuneArguments(
        model=str(folder), dataset="digits", output_dir=str(tmp_path / "run"), eval_batch_size=7
    )
    run = script.FineTuning(arguments)
    monkeypatch.setattr(type(run.accelerator), "num_processes", property(lambda self: processes))
    (loader,) = run.evaluation_batches().values()
    assert len(next(iter(loader))["labels"]) == 7
