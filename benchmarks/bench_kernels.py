"""Counts of kernels, bytes, casts and calls in a forward pass and a training step, compared with other packages.

    python -m benchmarks.bench_kernels --write

With a small batch, a GPU step waits for Python and for kernel launches, not for the kernels' work. Counting them needs
neither a GPU nor a quiet machine: the counts are the same in every run.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import bench_positions, models
from benchmarks.harness import MEGABYTE, RESULTS, name_of_run, publish
from plain_vit import attention_plain_vit
from plain_vit.training.hardware import fast_steps
from plain_vit.training.hardware.precision import train_on_copies

PACKAGES = ("plain_vit", *models.PEERS)
POSITIONS = ("DINOv3-S", "EVA-02-Ti")
BATCH = 2
AUTOCAST = {"float32": None, "bfloat16 autocast": torch.bfloat16}

# Operations that compute nothing, in addition to those that return views of their arguments.
IDLE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size"}
OVERWRITING = {"copy_", "fill_", "zero_"}  # do not read the tensor that they write
WITH_STATISTICS = ("attention", "norm")  # have statistics of another dtype as inputs and outputs, which is not a cast

NOTES = f"""ViT-Ti/16 and two models whose positions enter the attention, with a batch of {BATCH}, on a CPU, not
compiled. A kernel is a call of an ATen function that neither returns a view nor only allocates; some make two on a
device. A cast is a kernel with tensors of several floating-point dtypes, also where it does other work as well, such
as the sum of a float32 and a bfloat16 tensor; of lists of tensors, each is counted. Bytes are those of all tensors
that kernels read and write. "Calls" are those of functions, in Python and in C, in a forward pass. "Forward" is in
evaluation, "step" is the forward pass in training, the loss and backward; the optimizer is fused AdamW. ViT-Ti/16 has
one set of weights in every package and a cross-entropy, and the logits were found equal (vit-pytorch's has two norms
more and no biases in query, key and value). DINOv3-S and EVA-02-Ti have no classifier: their loss is the mean square
of the features.

In bfloat16 on a CPU, our attention in training is made of plain products, which are faster there; "fused attention" is
the kernel of a GPU, and of float32. Among processes, each of our blocks joins its own weights for query, key and
value, which one process joins for all blocks at once; exchanging gradients is not counted. "Copies": blocks train on
bfloat16 copies of their weights (`--param_dtype bf16`)."""
COMPILED = """Compiled by inductor for this CPU, the training step of ViT-Ti/16 has these graph breaks, and these
kernels generated for forward and backward; products and attention, which inductor calls, come on top of them."""


@dataclass(frozen=True)
class Work:
    """Counts of the kernels that were run.

    Args:
        kernels: Number of kernels.
        casts: Number of kernels, or of tensors in a list, that change a dtype.
        nbytes: Bytes read and written.
    """

    kernels: int
    casts: int
    nbytes: int


class Counter(TorchDispatchMode):
    """Count the kernels that run inside this context.

    Attributes:
        calls: Names of the kernels, in order.
        casts: As in `Work`.
        nbytes: As in `Work`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.casts = 0
        self.nbytes = 0

    @property
    def work(self) -> Work:
        """Return the counts."""
        return Work(len(self.calls), self.casts, self.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in IDLE:
            return outputs
        self.calls.append(name)
        read = args[1:] if name in OVERWRITING else args
        self.nbytes += sum(map(bytes_of, [*tensors_in((read, kwargs)), *tensors_in(outputs)]))
        self.casts += casts(name, args, outputs)
        return outputs


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in memory; an expanded tensor has fewer than its elements suggest."""
    sides = (side for side, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return torch.Size(sides).numel() * tensor.element_size()


def casts(name: str, args: tuple[Any, ...], outputs: Any) -> int:
    """Return how many casts a kernel does: 0 or 1, or one per tensor for kernels on lists of tensors."""
    if name.startswith(("_foreach", "_fused")):
        lists = [value for value in args if isinstance(value, list | tuple)]
        return sum(len(float_dtypes(of_one)) > 1 for of_one in zip(*lists, strict=False))
    outputs = next(tensors_in(outputs), None)
    inputs = next(tensors_in(args), None) if any(word in name for word in WITH_STATISTICS) else args
    return int(len(float_dtypes((inputs, outputs))) > 1)


def float_dtypes(values: Any) -> set[torch.dtype]:
    """Return the floating-point dtypes of tensors, except scalar tensors, whose dtype does not matter."""
    return {value.dtype for value in tensors_in(values) if value.is_floating_point() and value.ndim}


@dataclass(frozen=True)
class Counts:
    """Counts of a model.

    Args:
        name: Model, dtype and package.
        forward: Work of the forward pass in evaluation mode.
        step: Work of forward pass, loss and backward pass in training.
        optimizer: Work of the optimizer's step.
        calls: Function calls in the forward pass in evaluation mode.
    """

    name: str
    forward: Work
    step: Work
    optimizer: Work
    calls: int


def build(model: str, package: str) -> tuple[Any, Callable[[Any], torch.Tensor], int]:
    """Return a model, a function from its outputs to a loss, and the side of its images in pixels."""
    if model in POSITIONS:
        features: Callable[[Any], torch.Tensor] = bench_positions.features_of
        side = bench_positions.MODELS[model][1]
        return bench_positions.build(model, package), lambda outputs: features(outputs).float().square().mean(), side
    labels = torch.arange(BATCH)
    return (
        models.build(package, model),
        lambda outputs: nn.functional.cross_entropy(models.logits_of(outputs).float(), labels),
        224,
    )


def count(
    model: str, package: str, dtype: str, fused: bool = False, several: bool = False, copied: bool = False
) -> Counts:
    """Count the kernels of a model.

    Args:
        model: A size in `models.PATCHES`, or one of `POSITIONS`.
        package: One of `PACKAGES`.
        dtype: A key of `AUTOCAST`.
        fused: Whether our attention uses the fused kernel of GPUs in training.
        several: Whether our model runs as it does in one of several processes.
        copied: Whether our blocks train on copies of their weights.
    """
    module, loss_of, side = build(model, package)
    if copied:
        train_on_copies(module, torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    images = torch.randn(BATCH, 3, side, side)
    precision = AUTOCAST[dtype]

    def forward() -> Any:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            return loss_of(module(images)) if module.training else module(images)

    products = 0 if fused else attention_plain_vit.LONGEST_PRODUCTS
    with (
        patch.object(attention_plain_vit, "LONGEST_PRODUCTS", products),
        patch.object(fast_steps, "among_processes", lambda: several),
    ):
        with torch.no_grad():
            module.eval()
            in_evaluation = counted(forward)
            calls = calls_of(forward)
        module.train()
        with fast_steps.fast_steps(module):
            forward().backward()
            optimizer.step()  # creates its states
            optimizer.zero_grad()
            in_training = counted(lambda: forward().backward())
        of_optimizer = counted(optimizer.step)
    ways = {"fused attention": fused, "copies": copied, "among processes": several}
    title = f"{model} {dtype}: {', '.join([package, *(way for way, is_taken in ways.items() if is_taken)])}"
    return Counts(title, in_evaluation, in_training, of_optimizer, calls)


def counted(work: Callable[[], object]) -> Work:
    """Return the counts of the kernels that a function runs."""
    with Counter() as counter:
        work()
    return counter.work


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions a function calls, in Python and in C."""
    before, count = sys.getprofile(), 0

    def note(frame: object, event: str, function: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a training step.

    Args:
        name: Model, dtype and package.
        graph_breaks: Number of places where the compiled program returns to Python.
        kernels: Number of kernels that inductor generates; calls of existing ones, such as products, are not counted.
    """

    name: str
    graph_breaks: int
    kernels: int


def compile_step(model: str, package: str, dtype: str) -> Compiled:
    """Compile a training step; takes a minute or more."""
    module, loss_of, side = build(model, package)
    precision = AUTOCAST[dtype]
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    with inductor_config.patch(force_disable_caches=True):
        program = torch.compile(module.train())
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = loss_of(program(torch.randn(BATCH, 3, side, side)))
        loss.backward()
    breaks = sum(counters["graph_break"].values())
    return Compiled(f"{model} {dtype}: {package}, compiled", breaks, metrics.generated_kernel_count)


def table(counts: Sequence[Counts]) -> str:
    """Return a Markdown table with a row for each case."""
    lines = [
        "| case | forward: kernels | casts | MB | calls | step: kernels | casts | MB | optimizer: kernels | casts |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for one in counts:
        in_evaluation, in_training = (
            f"{work.kernels} | {work.casts} | {work.nbytes / MEGABYTE:.0f}" for work in (one.forward, one.step)
        )
        of_optimizer = f"{one.optimizer.kernels} | {one.optimizer.casts}"
        lines.append(f"| {one.name} | {in_evaluation} | {one.calls:,} | {in_training} | {of_optimizer} |")
    return "\n".join(lines)


def compiled_table(compiled: Sequence[Compiled]) -> str:
    """Return a Markdown table with a row for each case."""
    lines = [COMPILED, "", "| case | graph breaks | generated kernels |", "|---|---:|---:|"]
    return "\n".join([*lines, *(f"| {one.name} | {one.graph_breaks} | {one.kernels} |" for one in compiled)])


def all_counts(model: str) -> list[Counts]:
    """Return the counts of every package and dtype."""
    found = []
    for dtype in AUTOCAST:
        for package in packages_of(model):
            found.append(count(model, package, dtype))
            if package == "plain_vit":
                fused = dtype != "float32"  # float32 has fused attention anyway
                found += [count(model, package, dtype, fused)] if fused else []
                found.append(count(model, package, dtype, fused, several=True))
                if AUTOCAST[dtype] is not None:
                    found += [count(model, package, dtype, fused, several, copied=True) for several in (False, True)]
    return found


def packages_of(model: str) -> tuple[str, ...]:
    """Return the packages that have a model, ours first."""
    if model not in POSITIONS:
        return PACKAGES
    return ("plain_vit", "timm", "transformers") if bench_positions.MODELS[model][3] else ("plain_vit", "timm")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}/")
    options.add_argument("--compile", action="store_true", help="also the compiled models, which takes minutes")
    chosen = options.parse_args()
    counts = [one for model in ("tiny", *POSITIONS) for one in all_counts(model)]
    body, results = f"{NOTES}\n\n{table(counts)}", [asdict(one) for one in counts]
    if chosen.compile:
        compiled = [compile_step("tiny", package, dtype) for dtype in AUTOCAST for package in PACKAGES]
        body, results = f"{body}\n\n{compiled_table(compiled)}", [*results, *(asdict(one) for one in compiled)]
    publish(name_of_run("kernels", options, chosen), "Kernels", body, results, chosen.write)


if __name__ == "__main__":
    main()
