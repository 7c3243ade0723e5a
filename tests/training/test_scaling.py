"""docs/notes/scaling.md equals the output of its script, and the script's counts match real runs."""

import importlib
import itertools
import json
from types import ModuleType

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import matrix_shapes, operations
from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.training import fast_steps
from plain_vit.training.hardware import fast_steps as module
from tests.processes import run_forked
from tests.sizes import NIGHTLY, few

TINY = "vit-tiny-patch16-224"


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("tools.tabulate_scaling")


@pytest.mark.slow
def test_the_flops_are_those_of_torchs_counter_on_a_real_model_and_of_its_products(script: ModuleType) -> None:
    kernels = script.record(TINY, 2)
    model = PlainViTForImageClassification(PlainViTConfig.from_name(TINY, num_labels=1000)).train()
    counter = FlopCounterMode(display=False)
    with counter, fast_steps(model):
        loss = model(torch.randn(2, 3, 224, 224)).logits.sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert sum(kernel.flops for kernel in kernels) == counter.get_total_flops()
    assert sum(kernel.flops for kernel in kernels if kernel.phase == "forward") == forward
    tokens, width, inner = 197, 192, 768
    # The last block computes attention, projection and MLP for the class token only.
    of_token = 2 * (width**2 + 2 * width * inner) + 2 * 2 * tokens * width
    assert forward == operations(matrix_shapes("tiny", 2), training=False) - 2 * (tokens - 1) * of_token


def test_a_joined_kernel_neither_reads_nor_writes_what_stays_inside(script: ModuleType) -> None:
    def kernel(name: str, flops: int, reads: dict[int, int], writes: dict[int, int]) -> object:
        return script.Kernel("forward", name, flops, reads, writes)

    kernels = [
        kernel("mm", 7, {1: 10, 2: 20}, {3: 30}),
        kernel("add", 0, {3: 30, 4: 40}, {5: 50}),
        kernel("gelu", 0, {5: 50, 4: 40}, {6: 60}),
        kernel("mm", 7, {6: 60, 2: 20}, {7: 70}),
    ]
    first, joined, last = script.compiled(kernels)
    assert (first, last) == (kernels[0], kernels[3])
    assert (joined.reads, joined.writes, joined.flops) == ({3: 30, 4: 40}, {6: 60}, 0)


@pytest.mark.slow
def test_kernels_of_any_batch_follow_from_two_batches(script: ModuleType) -> None:
    model, kernels = script.counted(TINY), script.record(TINY, 5)
    assert [(line.flops.at(5), line.nbytes.at(5)) for line in model.eager] == [
        (kernel.flops, kernel.nbytes) for kernel in kernels
    ]
    assert [line.nbytes.at(5) for line in model.compiled] == [kernel.nbytes for kernel in script.compiled(kernels)]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_is_what_a_real_step_allocates(
    script: ModuleType, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "among_processes", lambda: True)  # as it is counted
    counted = {
        images: script.peak_bytes(TINY, images, checkpointing) for images in (12, 16)
    }  # of fewer images, gradients of weights are the peak
    model = PlainViTForImageClassification(PlainViTConfig.from_name(TINY, num_labels=1000)).train()
    model.set_attn_implementation(script.FUSED_ATTENTION)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    real = {}
    for images in counted:
        with fast_steps(model), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            script.loss_of(model, *script.noise(TINY, images)).backward()
        model.zero_grad()
        events = [one.nbytes() for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
        real[images] = max(itertools.accumulate(events))
    assert counted[16] - counted[12] == pytest.approx(real[16] - real[12], rel=0.05)


def test_the_cores_on_the_page_are_those_of_a_whole_host(script: ModuleType) -> None:
    def number(cell: str) -> float:
        return float(cell.rpartition(" ")[2].removesuffix("/s").replace(",", ""))

    section = script.OUT.read_text(encoding="utf-8").partition("## Images\n")[2]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    rates = [number(head) for head in lines[0][3:]]
    for _, _, host, *cores in lines[2 : 2 + len(script.SIZES)]:
        assert list(map(number, cores)) == pytest.approx([number(host) / rate for rate in rates], rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("processes", few([4, 2], 1))
def test_the_collectives_are_those_of_real_processes(script: ModuleType, processes: int) -> None:
    strategies = ["DDP", "FSDP2", "HSDP"] if processes > 2 else ["DDP", "FSDP2"]
    printed = run_forked(["-m", "tests.training.collectives", *strategies], processes)
    (real,) = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    groups = script.groups_of(TINY)
    for strategy in strategies:
        found = script.messages(groups, strategy, processes, node=2)
        expected = {f"{one.phase} {one.kind} {one.members}": [one.number, one.nbytes] for one in found}
        assert real[strategy] == expected, strategy


def test_the_messages_on_the_page_are_those_of_the_models(script: ModuleType) -> None:
    assert script.messages_table() in script.OUT.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_is_what_the_script_writes(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = script.OUT.read_text(encoding="utf-8")
    if NIGHTLY:
        assert script.page() == page, "run python -m tools.tabulate_scaling"
    monkeypatch.setattr(script, "SIZES", dict(few(script.SIZES.items(), 1)))
    for table in (script.steps_table(), script.launches_table(), script.images_table()):
        assert set(table.splitlines()) <= set(page.splitlines())


@pytest.mark.slow
def test_measured_steps_stand_beside_their_bounds(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.measured_steps() in script.OUT.read_text(encoding="utf-8")
    model = script.counted(TINY)
    bound = script.alone(model, 256, model.compiled, 0.0, script.H200)
    names = {"plain_vit, compiled": 1.0, "plain_vit, compiled, as our scripts train": 2 * bound.step}
    results = [{"name": f"base b256 bfloat16: {name}", "seconds": seconds} for name, seconds in names.items()]
    pages = {"train-step-cuda-base-256-compiled": [{"environment": {"GPU": "NVIDIA H200"}, "results": results}]}
    monkeypatch.setattr(script, "newest_results", lambda name: pages.get(name, []))
    monkeypatch.setitem(script.SIZES, "B/16", TINY)
    (row,) = script.measured_steps().splitlines()[2:]
    label, gpu, images, least, measured, most, mfu, share = row.strip("| ").split(" | ")
    assert (label, gpu, images, share) == ("B/16", "H200", "256", "0.50")
    assert float(measured.split()[0]) == pytest.approx(2 * float(least.split()[0]), rel=0.06)
    assert float(most.strip("%")) == pytest.approx(2 * float(mfu.strip("%")), abs=1)
