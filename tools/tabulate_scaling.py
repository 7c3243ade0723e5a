"""Write docs/notes/scaling.md: the cost of a training step on many GPUs, counted on fake tensors, and its bounds.

python -m tools.tabulate_scaling
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.harness import read_page
from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.training.hardware import fast_steps
from plain_vit.training.hardware.throughput import PEAKS

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "notes" / "scaling.md"

SIZES = {
    "Ti/16": "vit-tiny-patch16-224",
    "S/16": "vit-small-patch16-224",
    "B/16": "vit-base-patch16-224",
    "L/16": "vit-large-patch16-224",
    "H/14": "vit-huge-patch14-224",
}
GIANT = "vit-giant-patch14-224"  # measured by others
GPUS = (8, 64, 512)
STEP_IMAGES = 4096  # of AugReg's and most of NeMo's recipes
LARGEST_MICRO_BATCH = 512
FEW = 64  # memory is counted for 2x and 3x this many images; with fewer, weight gradients may set the peak
STRATEGIES = ("DDP", "FSDP2", "HSDP")


@dataclass(frozen=True)
class Machine:
    """Peak performance of a GPU.

    Args:
        name: Name of the GPU.
        flops: Floating-point operations per second in bf16 or fp16 matrix products with float32 accumulation.
        bandwidth: Memory bandwidth in bytes per second.
        memory: Memory size in bytes.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float


H100 = Machine("H100", PEAKS["H100"], 3.35e12, 80e9)
H200 = Machine("H200", PEAKS["H200"], 4.8e12, 141e9)
RTX_3090 = Machine("RTX 3090", 71e12, 936e9, 24e9)
FREE = 0.9  # share of the memory for counted tensors; the rest is for working memory and the allocator
NODE = 8  # GPUs of a node
NVLINK, NETWORK = 450e9, 50e9  # bytes per second per GPU and direction
LAUNCH = 10e-6  # host time of a call in eager PyTorch, in seconds


# ---- what a step does ----

IDLE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
CHANGED = {"_fused_adamw_": (0, 2, 3), "_foreach_add_": (0,)}  # arguments (lists) that are changed in place
FUSED_ATTENTION = "fused_attention_of_a_gpu"


@dataclass(frozen=True)
class Kernel:
    """One operation on a GPU.

    Args:
        phase: "forward", "backward" or "optimizer".
        name: Name of the ATen operation.
        flops: Operations as counted by torch's own counter.
        reads: Bytes read from each storage.
        writes: Bytes written to each storage.
    """

    phase: str
    name: str
    flops: int
    reads: Mapping[int, int]
    writes: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


class Recorder(TorchDispatchMode):
    """Record the kernels that run inside this context: operations that neither return a view nor only allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.phase = "forward"
        self.storages: list[Any] = []  # kept alive, so that addresses are not reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace == "aten" and not func.is_view and name not in IDLE:
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=outputs) if count else 0
            written = [args[place] for place in CHANGED[name]] if name in CHANGED else outputs
            self.kernels.append(Kernel(self.phase, name, flops, self._bytes((args, kwargs)), self._bytes(written)))
        return outputs

    def _bytes(self, values: Any) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for tensor in (value for value in tree_leaves(values) if isinstance(value, torch.Tensor)):
            self.storages.append(tensor.untyped_storage())
            key = tensor.untyped_storage()._cdata
            sizes[key] = sizes.get(key, 0) + bytes_of(tensor)
        return sizes


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in memory; an expanded tensor has fewer than its elements suggest."""
    sides = (side for side, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sides) * tensor.element_size()


class Allocations(TorchDispatchMode):
    """Count current and peak bytes allocated inside this context, without weights and their gradients.

    Args:
        model: The model whose weights are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.present = self.peak = 0
        self._sizes = {parameter.untyped_storage()._cdata: 0 for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: self._leave_out(one.grad.untyped_storage()._cdata))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in (value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.present += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        self.peak = max(self.peak, self.present)
        return outputs

    def _leave_out(self, key: int) -> None:
        self.present -= self._sizes[key]
        self._sizes[key] = 0

    def _forget(self, key: int) -> None:
        self.present -= self._sizes.pop(key)


@contextmanager
def weightless(name: str, checkpointing: bool = False, several: bool = False) -> Iterator[nn.Module]:
    """Build a model with 1000 classes from fake tensors, with the attention that runs on GPUs.

    Args:
        name: Name of the model, as for `PlainViTConfig.from_name`.
        checkpointing: Whether blocks are recomputed in the backward pass.
        several: Whether it runs as in one of several processes.
    """
    kernel = ALL_ATTENTION_FUNCTIONS["sdpa"]
    # Registered under another name, because on a CPU the model replaces "sdpa" by plain products in bf16.
    AttentionInterface.register(FUSED_ATTENTION, lambda *args, **kwargs: kernel(*args, **kwargs))
    # Fake weights have another class than the parameters that `can_join` accepts.
    whole = patch.object(fast_steps, "can_join", lambda attention: "project" in vars(attention))
    among = patch.object(fast_steps, "among_processes", lambda: several)
    with FakeTensorMode(), no_init_weights(), whole, among:
        model = PlainViTForImageClassification(PlainViTConfig.from_name(name, num_labels=1000)).train()
        model.set_attn_implementation(FUSED_ATTENTION)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with fast_steps.fast_steps(model):
            yield model


def record(name: str, images: int, several: bool = False) -> list[Kernel]:
    """Return the kernels of a step in bf16 autocast with fused AdamW.

    Args:
        name: As in `weightless`.
        images: Number of images in the batch, of the size in the name.
        several: As in `weightless`.
    """
    with weightless(name, several=several) as model:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = noise(name, images)
        for recorder in (Recorder(), Recorder()):  # the optimizer creates its states in the first step
            with recorder:
                loss = loss_of(model, *batch)
                recorder.phase = "backward"
                loss.backward()
                recorder.phase = "optimizer"
                optimizer.step()
            optimizer.zero_grad()
        return recorder.kernels


def peak_bytes(name: str, images: int, checkpointing: bool = False) -> int:
    """Return the peak bytes of one of several processes in a step, without weights, gradients and AdamW's states.

    The rest is the batch, activations saved for the backward pass, temporary tensors, and with checkpointing also the
    block that is being recomputed.

    Args:
        name: As in `weightless`.
        images: Number of images in the batch, of the size in the name.
        checkpointing: As in `weightless`.
    """
    with weightless(name, checkpointing, several=True) as model, Allocations(model) as allocations:
        loss_of(model, *noise(name, images)).backward()
        return allocations.peak


def noise(name: str, images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images of the size in a model's name, and their labels."""
    side = int(name.rpartition("-")[2])
    return torch.empty(images, 3, side, side), torch.zeros(images, dtype=torch.long)


def loss_of(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a forward pass in bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.cross_entropy(model(pixels).logits.float(), labels)


def compiled(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Fuse all kernels between two matrix products, the best case for a compiler.

    A fused kernel reads each input once, and writes only outputs that are used later.
    """
    last_use = {key: place for place, kernel in enumerate(kernels) for key in kernel.reads}
    result: list[Kernel] = []
    numbered = groupby(enumerate(kernels), lambda pair: (pair[1].phase, pair[1].flops > 0))
    for (phase, is_product), pairs in numbered:
        run = list(pairs)
        if is_product or phase == "optimizer":
            result += [kernel for _, kernel in run]
            continue
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for _, kernel in run:
            outside = {key: size for key, size in kernel.reads.items() if key not in writes}
            reads |= {key: max(size, reads.get(key, 0)) for key, size in outside.items()}
            writes |= kernel.writes
        used = {key: size for key, size in writes.items() if last_use.get(key, -1) > run[-1][0]}
        result.append(Kernel(phase, "joined", 0, reads, used))
    return result


@dataclass(frozen=True)
class Linear:
    """A quantity that grows linearly with the number of images in a batch."""

    fixed: float
    per_image: float

    @classmethod
    def through(cls, two: float, three: float, few: int = 1) -> "Linear":
        """Return the line through the values for two and three times `few` images."""
        return cls(3 * two - 2 * three, (three - two) / few)

    def at(self, images: float) -> float:
        """Return the value for a number of images."""
        return self.fixed + images * self.per_image


@dataclass(frozen=True)
class Line:
    """A kernel for any batch size."""

    phase: str
    flops: Linear
    nbytes: Linear

    def seconds(self, images: int, machine: Machine) -> tuple[float, float]:
        """Return the times for arithmetic and for memory traffic; the longer is the bound of the kernel."""
        return self.flops.at(images) / machine.flops, self.nbytes.at(images) / machine.bandwidth


@dataclass(frozen=True)
class Model:
    """Counts of one model.

    Args:
        name: As for `PlainViTConfig.from_name`.
        groups: Shapes of the parameters of each block, with the parameters outside the blocks last.
        eager: Kernels of a step, in order.
        compiled: Fused kernels of a step, in order.
        forward_flops: Operations of the matrix products in one image's forward pass.
    """

    name: str
    groups: tuple[tuple[torch.Size, ...], ...]
    eager: tuple[Line, ...]
    compiled: tuple[Line, ...]
    forward_flops: float

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(shape.numel() for group in self.groups for shape in group)

    @property
    def flops(self) -> float:
        """Floating-point operations per image that count for the MFU: three times a forward pass."""
        return 3 * self.forward_flops


@cache
def counted(name: str, several: bool = False) -> Model:
    """Count a model, in one process or in one of several."""
    pair = [record(name, images, several) for images in (2, 3)]
    eager, joined = _lines(pair), _lines([compiled(kernels) for kernels in pair])
    forward = sum(line.flops.per_image for line in eager if line.phase == "forward")
    return Model(name, groups_of(name), eager, joined, forward)


def _lines(pair: Sequence[Sequence[Kernel]]) -> tuple[Line, ...]:
    return tuple(
        Line(two.phase, Linear.through(two.flops, three.flops), Linear.through(two.nbytes, three.nbytes))
        for two, three in zip(*pair, strict=True)
    )


@cache
def activations(name: str, checkpointing: bool = False) -> Linear:
    """Return the `peak_bytes` as a function of the batch size."""
    two, three = (peak_bytes(name, number * FEW, checkpointing) for number in (2, 3))
    return Linear.through(two, three, FEW)


@cache
def groups_of(name: str) -> tuple[tuple[torch.Size, ...], ...]:
    """Return the `parameter_groups` of a model."""
    with weightless(name) as model:
        return parameter_groups(model)


def parameter_groups(model: Any) -> tuple[tuple[torch.Size, ...], ...]:
    """Return the shapes of the parameters that FSDP2 gathers together: one group per block, and one for the rest."""
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    inside = [list(block.parameters()) for block in blocks]
    known = {id(parameter) for parameters in inside for parameter in parameters}
    inside.append([parameter for parameter in model.parameters() if id(parameter) not in known])
    return tuple(tuple(parameter.shape for parameter in parameters) for parameters in inside)


# ---- what the processes send ----


@dataclass(frozen=True)
class Messages:
    """Collectives of one kind in a step.

    Args:
        kind: "all_reduce", "all_gather" or "reduce_scatter".
        phase: Phase of the step in which they run.
        number: Number of collectives.
        nbytes: Total bytes of the full tensors: the inputs of a reduction, the result of a gather.
        members: Number of processes that take part in each.
        rate: Bytes per second per process and direction.
    """

    kind: str
    phase: str
    number: int
    nbytes: int
    members: int
    rate: float

    @property
    def seconds(self) -> float:
        """Time on the links: each process sends and receives all bytes except its own once, in an all-reduce twice."""
        return (2 if self.kind == "all_reduce" else 1) * (self.members - 1) / self.members * self.nbytes / self.rate


def messages(groups: Sequence[Sequence[torch.Size]], strategy: str, gpus: int, node: int = NODE) -> list[Messages]:
    """Return the collectives of one step without accumulation.

    Args:
        groups: As in `Model`.
        strategy: One of `STRATEGIES`. DDP sends float32 gradients, FSDP2 bf16 weights and float32 gradients; HSDP does
            the same within a node and sums the gradient shards over nodes.
        gpus: Number of processes.
        node: Number of processes per node.
    """
    # All GPUs of a node send to the next node in parallel, each through its own adapter.
    rate = NVLINK if gpus <= node else min(NVLINK, node * NETWORK)
    if strategy == "DDP":
        shapes = [shape for group in groups for shape in group]
        gradients = [torch.empty(shape, device="meta") for shape in reversed(shapes)]
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]  # DistributedDataParallel's own
        buckets, _ = dist._compute_bucket_assignment_by_size(gradients, limits)
        nbytes = 4 * sum(shape.numel() for shape in shapes)
        return [Messages("all_reduce", "backward", len(buckets), nbytes, gpus, rate)]
    shards = min(gpus, node) if strategy == "HSDP" else gpus
    rate = NVLINK if strategy == "HSDP" else rate
    # Every process holds equally many rows of each tensor; the last processes may hold padding.
    padded = sum(math.ceil(s[0] / shards) * shards * s[1:].numel() for group in groups for s in group)
    found = [
        Messages("all_gather", "forward", len(groups), 2 * padded, shards, rate),
        Messages("all_gather", "backward", len(groups), 2 * padded, shards, rate),
        Messages("reduce_scatter", "backward", len(groups), 4 * padded, shards, rate),
    ]
    if shards < gpus:
        found.append(Messages("all_reduce", "backward", len(groups), 4 * padded // shards, gpus // shards, NETWORK))
    return found


def on_links(found: Iterable[Messages], phase: str) -> float:
    """Return the seconds on the links in a phase; links within and between nodes work in parallel."""
    times: dict[float, float] = {}
    for each in found:
        if each.phase == phase:
            times[each.rate] = times.get(each.rate, 0.0) + each.seconds
    return max(times.values(), default=0.0)


# ---- the bounds of a step ----


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of the time of a step, in seconds.

    Args:
        images: Images per micro-batch and GPU.
        micro_batches: Micro-batches per step.
        arithmetic: Time of kernels that are limited by arithmetic.
        memory: Time of kernels that are limited by memory bandwidth.
        launches: Time of the host for all launches, without compilation.
        links: Time of the collectives.
        step: Time of the step if everything that can overlap does.
        mfu: Model FLOPs utilisation at this step time.
    """

    images: int
    micro_batches: int
    arithmetic: float
    memory: float
    launches: float
    links: float
    step: float
    mfu: float

    @property
    def limit(self) -> str:
        """What takes longest."""
        times = {"arithmetic": self.arithmetic, "memory": self.memory}
        gpu = sum(times.values())
        waits = {name: time for name, time in (("links", self.links), ("launches", self.launches)) if time > gpu}
        return max(waits or times, key=lambda name: (waits or times)[name])


def bounds(
    model: Model, images: int, micro_batches: int, found: Sequence[Messages], machine: Machine,
    *, kernels: Sequence[Line], shards: int = 1, launch: float = 0.0,
) -> Bounds:  # fmt: skip
    """Return the bounds of a step.

    Args:
        model: The model that is trained.
        images: Images per micro-batch and GPU.
        micro_batches: Micro-batches per step; sharded models communicate in each.
        found: Messages of a step with one micro-batch.
        machine: The GPU.
        kernels: Either list of the model's kernels.
        shards: Number of processes that share the optimizer's work.
        launch: Seconds of the host per kernel.
    """
    arithmetic = memory = host = 0.0
    by_phase = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    for line in kernels:
        often = 1 / shards if line.phase == "optimizer" else micro_batches
        times = [often * time for time in line.seconds(images, machine)]
        arithmetic, memory = (arithmetic + times[0], memory) if times[0] > times[1] else (arithmetic, memory + times[1])
        by_phase[line.phase] += max(times)
        host += launch * max(often, 1)
    again = 1 if {each.kind for each in found} <= {"all_reduce"} else micro_batches
    sending = {phase: again * on_links(found, phase) for phase in by_phase}
    # DDP communicates in the last micro-batch only.
    alone = by_phase["backward"] * (1 - 1 / micro_batches) if again == 1 else 0.0
    step = max(by_phase["forward"], sending["forward"]) + by_phase["optimizer"]
    step = max(step + alone + max(by_phase["backward"] - alone, sending["backward"]), host)
    mfu = model.flops * images * micro_batches / step / machine.flops
    return Bounds(images, micro_batches, arithmetic, memory, host, sum(sending.values()), step, mfu)


def state_bytes(model: Model, strategy: str, gpus: int) -> float:
    """Return the bytes of weights, gradients and AdamW's two states, all float32, in one process."""
    return 16 * model.parameters / {"DDP": 1, "FSDP2": gpus, "HSDP": min(gpus, NODE)}[strategy]


def most_images(model: Model, strategy: str, gpus: int, checkpointing: bool = False) -> int:
    """Return how many images fit into the memory of a GPU beside its share of the state."""
    needed = activations(model.name, checkpointing)
    room = FREE * H100.memory - state_bytes(model, strategy, gpus) - needed.fixed
    return max(0, int(room // needed.per_image))


def micro_batch(model: Model, images: int, strategy: str, gpus: int) -> int:
    """Return the largest micro-batch that fits into the memory of a GPU, a power of two; 0 if none does."""
    most = min(images, most_images(model, strategy, gpus), LARGEST_MICRO_BATCH)
    return 1 << most.bit_length() - 1 if most else 0


# ---- tables ----


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table whose first column is text and whose others are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def short(value: float) -> str:
    """Format a number with two significant digits, or as an integer from 100 on."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:.{digits}f}"


def size(nbytes: float) -> str:
    """Format a number of bytes."""
    return f"{short(nbytes / 1e9)} GB" if nbytes >= 1e9 else f"{short(nbytes / 1e6)} MB"


def percent(share: float) -> str:
    """Format a share."""
    return f"{100 * share:.0f}%"


def steps_table() -> str:
    """Return the table of the work of a step, per image and per step."""
    heads = ["model", "parameters", "GFLOP, forward", "GFLOP, step", "activations", "checkpointed", "kernels, eager",
             "joined", "traffic, eager", "joined", "and per step"]  # fmt: skip
    rows = []
    for label, name in SIZES.items():
        model = counted(name)
        traffic = [Linear(*map(sum, zip(*((k.nbytes.fixed, k.nbytes.per_image) for k in kernels), strict=True)))
                   for kernels in (model.eager, model.compiled)]  # fmt: skip
        rows.append([
            label, f"{model.parameters / 1e6:.1f} M", short(model.forward_flops / 1e9), short(model.flops / 1e9),
            size(activations(name).per_image), size(activations(name, checkpointing=True).per_image),
            f"{len(model.eager):,}", f"{len(model.compiled):,}", size(traffic[0].per_image),
            size(traffic[1].per_image), size(traffic[1].fixed),
        ])  # fmt: skip
    return table(heads, rows)


def launches_table() -> str:
    """Return the table for one GPU: what limits a step of 64 images, and below which micro-batch launches do."""
    heads = ["model", "arithmetic", "memory, eager", "memory, compiled", "launches, eager", "MFU, eager",
             "MFU, compiled", "launches limit eager steps below"]  # fmt: skip
    rows = []
    for label, name in SIZES.items():
        model = counted(name)
        eager, joined = (alone(model, 64, kernels, launch) for kernels, launch in
                         ((model.eager, LAUNCH), (model.compiled, 0.0)))  # fmt: skip
        least = first_without_waiting(model)
        rows.append([
            label, *(f"{short(1000 * time)} ms" for time in (joined.arithmetic, eager.memory, joined.memory,
                                                             eager.launches)),
            percent(eager.mfu), percent(joined.mfu), f"{least} images",
        ])  # fmt: skip
    return table(heads, rows)


def alone(model: Model, images: int, kernels: Sequence[Line], launch: float, machine: Machine = H100) -> Bounds:
    """Return the bounds of one GPU."""
    return bounds(model, images, 1, [], machine, kernels=kernels, launch=launch)


def messages_table() -> str:
    """Return the table of the collectives of a step, with number and bytes."""
    heads = ["model", "DDP", *(f"FSDP2, {gpus} GPUs" for gpus in GPUS), "HSDP, within a node", "HSDP, between nodes"]
    rows = []
    for label, name in SIZES.items():
        groups = groups_of(name)
        sharded = [messages(groups, "FSDP2", gpus) for gpus in GPUS]
        hybrid = messages(groups, "HSDP", GPUS[-1])
        columns = [messages(groups, "DDP", NODE), *sharded, hybrid[:3], hybrid[3:]]
        rows.append([label, *(_sent(column) for column in columns)])
    return table(heads, rows)


def _sent(found: Sequence[Messages]) -> str:
    return f"{sum(each.number for each in found)}: {size(sum(each.nbytes for each in found))}"


def memory_table() -> str:
    """Return the table of the bytes of weights, gradients and optimizer, and the largest micro-batch."""
    heads = ["model", "DDP", *(f"FSDP2, {gpus} GPUs" for gpus in GPUS), "images, DDP", "checkpointed",
             f"images, FSDP2 on {NODE}", "checkpointed"]  # fmt: skip
    rows = []
    for label, name in SIZES.items():
        model = counted(name, several=True)
        held = [state_bytes(model, "DDP", 1), *(state_bytes(model, "FSDP2", gpus) for gpus in GPUS)]
        fitting = [
            most_images(model, strategy, NODE, checkpointing)
            for strategy in ("DDP", "FSDP2")
            for checkpointing in (False, True)
        ]
        rows.append([label, *map(size, held), *(f"{number:,}" for number in fitting)])
    return table(heads, rows)


def planned(name: str, strategy: str, gpus: int, launch: float = 0.0) -> Bounds:
    """Return the bounds of a step of `STEP_IMAGES` images: compiled, or eager if `launch` is given."""
    model = counted(name, several=True)
    images = STEP_IMAGES // gpus
    number = micro_batch(model, images, strategy, gpus)
    shards = {"DDP": 1, "FSDP2": gpus, "HSDP": min(gpus, NODE)}[strategy]
    found = messages(model.groups, strategy, gpus)
    kernels = model.eager if launch else model.compiled
    return bounds(model, number, images // number, found, H100, kernels=kernels, shards=shards, launch=launch)


def plans_table() -> str:
    """Return the table of each model on each number of GPUs, by strategy."""
    heads = ["model", "GPUs", "images of a GPU", "on the GPU", *(f"{strategy}: links" for strategy in STRATEGIES),
             *(f"MFU, {strategy}" for strategy in STRATEGIES), "limited by", "MFU, eager DDP", "its limit"]  # fmt: skip
    rows = []
    for label, name in SIZES.items():
        for gpus in GPUS:
            plans = [planned(name, strategy, gpus) for strategy in STRATEGIES]
            eager = planned(name, "DDP", gpus, LAUNCH)
            first = plans[0]
            split = f"{first.micro_batches} x {first.images}" if first.micro_batches > 1 else str(first.images)
            rows.append([
                label, gpus, split, f"{short(1000 * (first.arithmetic + first.memory))} ms",
                *(f"{short(1000 * plan.links)} ms" for plan in plans), *(percent(plan.mfu) for plan in plans),
                first.limit, percent(eager.mfu), eager.limit,
            ])  # fmt: skip
    return table(heads, rows)


def newest_results(name: str) -> list[dict[str, Any]]:
    """Return the figures of the newest page of a benchmark for each machine, oldest first."""
    pages: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob(f"*-{name}-*.md")):
        page = read_page(path)
        if page["benchmark"] == name:
            pages[page["environment"]["processor"], page["environment"]["GPU"]] = page
    return list(pages.values())


def images_table() -> str:
    """Return the table of the images that a host must decode, and the cores that this takes."""
    pages = newest_results("data")
    kinds = ("500 x 375", "3000 x 2000")
    rates = [
        next(one["images"] / one["seconds"] for one in page["results"] if one["name"] == f"{kind}: plain-vit")
        for page in pages
        for kind in kinds
    ]
    of_core = [f"{kind}, {short(rate)}/s" for kind, rate in zip(kinds * len(pages), rates, strict=True)]
    rows = []
    for label, name in SIZES.items():
        model = counted(name)
        bound = alone(model, 64, model.compiled, 0.0)
        gpu, host = 64 / bound.step, NODE * 64 / bound.step
        rows.append([label, f"{short(gpu)}/s", f"{short(host)}/s", *(short(host / one) for one in rates)])
    return table(["model", "one GPU", f"host of {NODE} GPUs", *of_core], rows)


# ---- measured by others, and here ----


@dataclass(frozen=True)
class Measured:
    """A published measurement of training the same architecture.

    Args:
        what: Model, software and source, as on the page.
        name: Name of the model, as for `PlainViTConfig.from_name`.
        machine: The GPU.
        gpus: Number of GPUs.
        images: Images per micro-batch and GPU.
        rate: Images per second of all GPUs.
        compiled: Whether kernels are fused.
    """

    what: str
    name: str
    machine: Machine
    gpus: int
    images: int
    rate: float
    compiled: bool = False


NEMO = "g/14, Megatron's kernels [5]"
TIMM = "timm, eager [6]"
SMALL = "a ViT of S/16's size [7]"
MEASURED = [
    *(Measured(NEMO, GIANT, H100, gpus, 64, rate, compiled=True)
      for gpus, rate in ((8, 1428), (16, 2846), (32, 5737), (64, 11222), (128, 21561))),
    Measured(f"{SMALL}, compiled", SIZES["S/16"], H100, 1, 256, 7716, compiled=True),
    Measured(f"{SMALL}, eager", SIZES["S/16"], H100, 1, 256, 2305),
    *(Measured(f"{label}, {TIMM}", SIZES[label], RTX_3090, 1, images, rate) for label, images, rate in (
        ("Ti/16", 512, 2293.54), ("S/16", 384, 1052.92), ("B/16", 192, 390.86), ("L/16", 64, 117.08),
        ("H/14", 16, 39.94))),
]  # fmt: skip


def comparison_table() -> str:
    """Return the table of bounds beside measurements."""
    heads = ["what", "GPUs", "images of a GPU", "measured", "MFU", "bound", "MFU of the bound", "measured / bound"]
    rows = []
    for one in MEASURED:
        model, gpus = counted(one.name, one.gpus > 1), one.gpus
        found = messages(model.groups, "DDP", gpus) if gpus > 1 else []
        kernels, launch = (model.compiled, 0.0) if one.compiled else (model.eager, LAUNCH)
        bound = bounds(model, one.images, 1, found, one.machine, kernels=kernels, launch=launch)
        most = one.images * gpus / bound.step
        reached = one.rate * model.flops / gpus / one.machine.flops
        rows.append([one.what, f"{gpus} {one.machine.name}", one.images, f"{one.rate:,.0f}/s", percent(reached),
                     f"{most:,.0f}/s", percent(bound.mfu), f"{one.rate / most:.2f}"])  # fmt: skip
    return table(heads, rows)


def kernel_times_table() -> str:
    """Return the times of the kernels of our own eager steps on a GPU, beside their bounds."""
    labels = {name.split("-")[1]: label for label, name in SIZES.items()}
    rows = []
    for page in newest_results("gpu-kernels"):
        (machine,) = [machine for machine in (H100, H200) if machine.name in page["environment"]["GPU"]]
        for one in page["results"]:
            case, _, package = one["name"].partition(": ")
            kind, _, size, images, *_ = case.replace(",", "").split()
            if (kind, package) != ("step", "plain_vit, eager"):
                continue
            model = counted(SIZES[labels[size]])
            bound = alone(model, int(images), model.eager, 0.0, machine)
            least = bound.arithmetic + bound.memory
            times = [f"{short(1000 * seconds)} ms" for seconds in (least, one["seconds"])]
            share = f"{least / one['seconds']:.2f}"
            rows.append([labels[size], machine.name, images, len(model.eager), one["launches"], *times, share])
    heads = ["model", "GPU", "images", "kernels counted", "launches", "bound", "time of the kernels", "bound / time"]
    return table(heads, sorted(rows, key=lambda row: list(SIZES).index(str(row[0]))))


def measured_steps() -> str:
    """Return the times of our own compiled steps on one GPU, beside their bounds."""
    rows = []
    for label, size, images in (("B/16", "base", 256), ("L/16", "large", 128)):
        for page in newest_results(f"train-step-cuda-{size}-{images}-compiled"):
            (machine,) = [machine for machine in (H100, H200) if machine.name in page["environment"]["GPU"]]
            times = {one["name"].partition(": ")[2]: one["seconds"] for one in page["results"]}
            model, seconds = counted(SIZES[label]), times["plain_vit, compiled, as our scripts train"]
            bound = alone(model, images, model.compiled, 0.0, machine)
            mfu = model.flops * images / seconds / machine.flops
            rows.append([label, machine.name, images, *(f"{short(1000 * one)} ms" for one in (bound.step, seconds)),
                         percent(bound.mfu), percent(mfu), f"{bound.step / seconds:.2f}"])  # fmt: skip
    heads = ["model", "GPU", "images", "bound", "measured", "MFU of the bound", "MFU", "bound / measured"]
    return table(heads, rows) if rows else "Not run yet: `make gpu` measures B/16 with 256 images and L/16 with 128."


def share_on_cpus() -> str:
    """Return the shares of the matrix rate that our training step reached on CPUs, as text."""
    found = []
    for page in newest_results("train-step"):
        times = {one["name"]: one["seconds"] for one in page["results"]}
        for name, seconds in times.items():
            setting, _, case = name.partition(": ")
            if case != "plain_vit, eager" or f"{setting}: one large product" not in times:
                continue
            size, images = setting.split()[0], int(setting.split()[1].removeprefix("b"))
            label = {"tiny": "Ti/16", "small": "S/16"}[size]
            rate = 2 * 2048**3 / times[f"{setting}: one large product"]
            share = counted(SIZES[label]).flops * images / seconds / rate
            processor = page["environment"]["processor"].partition(",")[0].replace("(R)", "")
            found.append((setting.rpartition(" ")[2], label, images, processor, share))
    rows = [
        [f"{label}, {processor}", dtype, images, percent(share)] for dtype, label, images, processor, share in found
    ]
    return table(["model and processor", "dtype", "images", "share of the matrix rate"], rows)


# ---- the page ----


def facts() -> dict[str, str]:
    """Return the numbers that the text contains."""
    tiny, base = (counted(SIZES[label]) for label in ("Ti/16", "B/16"))
    large, huge = (counted(SIZES[label], several=True) for label in ("L/16", "H/14"))
    least = {model.name: first_without_waiting(model) for model in (tiny, base)}
    few = alone(huge, STEP_IMAGES // GPUS[-1], huge.compiled, 0.0)
    adam = sum(max(line.seconds(0, H100)) for line in huge.compiled if line.phase == "optimizer")
    sent = messages(huge.groups, "FSDP2", GPUS[-1])
    count = sum(each.number for each in sent)
    return {
        "more": str(len(counted(base.name, several=True).eager) - len(base.eager)),
        "ti_least": str(least[tiny.name]),
        "b_least": str(least[base.name]),
        "ti_eager": percent(planned(tiny.name, "DDP", GPUS[-1], LAUNCH).mfu),
        "l_fit": str(most_images(large, "DDP", 1)),
        "adam": f"{short(1000 * adam)} ms",
        "h_step": f"{short(1000 * few.step)} ms",
        "h_messages": str(count),
        "h_message": f"{short(1e6 * planned(huge.name, 'FSDP2', GPUS[-1]).step / count)} µs",
        "free": percent(FREE),
        "images": f"{STEP_IMAGES:,}",
        "machines": ", then ".join(
            page["environment"]["processor"].partition(",")[0] for page in newest_results("data")
        ),
    }


def first_without_waiting(model: Model) -> int:
    """Return the smallest batch size at which an eager step does not wait for launches."""
    return next(n for n in range(1, 1025) if alone(model, n, model.eager, LAUNCH).limit != "launches")


def page() -> str:
    """Return the page."""
    return PAGE.format(
        steps=steps_table(), launches=launches_table(), messages=messages_table(), memory=memory_table(),
        plans=plans_table(), data=images_table(), comparison=comparison_table(), kernel_times=kernel_times_table(),
        steps_measured=measured_steps(), cpus=share_on_cpus(), **facts(),
    )  # fmt: skip


PAGE = """# Scaling

What a training step computes, moves and sends, and the time that it takes at least on 8, 64 and 512 H100 GPUs.
**Times, rates and MFU on this page are predicted, not measured**, unless a column says so: none of these runs was
made here. Counts are of this project's own models: `python -m tools.tabulate_scaling` runs a step of each on tensors
without memory, records every kernel with its operations and bytes, and writes this page. Tests compare the operations
with torch's own counter on a real model, the memory with what a real step allocates, and the messages with those of
real processes.

A prediction here is a bound: each kernel takes as long as its arithmetic or its memory traffic at the GPU's peak,
whichever is longer; the host takes 10 µs to launch a kernel of an eager model [4]; links run at their full rate,
while the GPU works. [The last section](#how-far-off) says how far measured runs stay behind: expect 0.2 to 0.7 of the
rates and MFU given here.

| | |
|---|---|
| H100 (SXM) | 989 TFLOP/s in bf16 without sparsity, 3.35 TB/s, 80 GB [1] |
| NVLink | 900 GB/s of each GPU, both directions together: 450 GB/s each [1] |
| network | InfiniBand NDR, one adapter of 400 Gbit/s for each GPU: 50 GB/s in each direction [2]; all 8 GPUs of a node together send 400 GB/s to the next one |
| training | 224 pixels, bf16 autocast over float32 weights, fused AdamW, cross-entropy with 1000 classes, torch's fused attention |

## A step

Of one image, except for the number of kernels. "Activations" are what each image adds to the most memory that an eager
step has at a time: what is kept for the backward pass, and what kernels pass on to each other. "Checkpointed"
(`--gradient_checkpointing`), these are the inputs of all blocks, and all of one block, which the backward pass has
computed again. "Joined" is what a compiler can make of a step at best: everything between two matrix products is one
kernel, which reads once what comes from outside and writes what is used later. A step counts for the MFU as three
forward passes; recomputation does not count. The last block computes only the class token where it can, so the counts
are somewhat below those of other implementations.

Query, key and value are one product. One process joins their weights once per step, for all blocks. Of several
processes, each block joins its own, so that their gradients are sent with those of its block: {more} kernels more for
B/16, which the section about many GPUs counts. FSDP2 and HSDP gather weights in bf16 already, with fewer casts than
are counted.

{steps}

## One GPU

A step of 64 images on one H100: the arithmetic of the kernels that arithmetic limits, the memory traffic of the
others, the launches of all, and what follows for the MFU.

{launches}

## Messages

Number of messages in a step, and the bytes of what they reduce or gather. DDP sums float32 gradients in buckets of 25
MiB. FSDP2 (`--shard`) gathers the weights of each block in bf16 for the forward and again for the backward pass, and
sums its gradients in float32; rows of each tensor are padded to a multiple of the number of GPUs, which is why its
messages grow. HSDP shards within each node of 8, and sums over the nodes what each GPU holds.

{messages}

## Memory

Weights, gradients and AdamW's states of one GPU, and the images that fit beside them into {free} of 80 GB, without and
with `--gradient_checkpointing`.

{memory}

## 8, 64 and 512 GPUs

Steps of {images} images, compiled; the last two columns are of an eager model. Where a GPU has more images than fit,
they are accumulated; DDP then sends once, FSDP2 and HSDP with each micro-batch.

{plans}

## Which options to take

- **bf16 always** (`--mixed_precision bf16`), and **`--compile` wherever steps are short**: an eager step of Ti/16
  waits for launches below {ti_least} images per GPU, one of B/16 below {b_least}. Compiling also joins what memory
  limits, which is most of Ti and S on an H100.
- **Ti/16, S/16**: few GPUs with large micro-batches. On 512 GPUs, {images} images are 8 for each, and an eager Ti/16
  uses {ti_eager} of a GPU. Larger steps (`--batch_size` with `--base_batch_size`) are what makes more GPUs worth
  their price.
- **B/16, L/16**: DDP (`gpus.yaml` on one machine, `several_machines.yaml`), compiled. {l_fit} images of an L/16 fit
  beside its state, so larger shares of a step are accumulated (`--gradient_accumulation_steps`, or
  `--auto_micro_batch`).
- **H/14**: DDP still fits, and sends half the bytes. `--shard` pays on many GPUs with few images each, because it
  divides AdamW's work too, which is {adam} of the {h_step} of a step of 8 images. Sharding is what larger models
  need; none of these does.
- **`--gradient_checkpointing`** costs one more forward pass beside the three that a step is: a third more arithmetic.
  No model here needs it at 224 pixels; it pays at larger sizes, or where not even one image fits.
- **Shard within nodes (HSDP)?** Its bound is between the others. What speaks for it is not in the bound: with FSDP2
  on 512 GPUs, {h_messages} messages of an H/14 leave {h_message} for each, in which all 512 GPUs must answer; HSDP
  asks 8 at a time. The scripts do not offer it: `--shard` shards over all processes. Accelerate's
  `parallelism_config` does (`dp_replicate_size`, `dp_shard_size`); nobody has run the scripts with it.
- **Accumulate with DDP rather than with `--shard`** where both fit: DDP sends once per step, FSDP2 with each
  micro-batch.

## Images

What one host of 8 GPUs must decode, augment and collate for the compiled models at the bound above, and the cores
that this takes on the host, at the rates of one core measured for `plain-vit` in `benchmarks/results/` ({machines}).

{data}

## How far off

What others measured, beside the bound of this page for our model of the same size, with the same batch and GPU (for
the RTX 3090: 71 TFLOP/s with sums in float32, 936 GB/s [3]). timm's attention was not yet fused.

{comparison}

NVIDIA's g/14 reaches 0.4 of its bound on one node as on sixteen: as predicted, the links are not what is missing.
Large models come closest, with 0.7 of an older GPU's bound. Small ones stay farthest behind, eager ones most: their
kernels are too short for the peak of the arithmetic or of the memory. Missing in the bound are the time of a message
besides that on the links, imperfect overlap, clocks under load (bf16 products of the best shape reach about 780
TFLOP/s on an H100 [8]), and everything between steps. So MFU on this page rank options and show what limits a step;
for a forecast of time, take the share of the row that is most like yours.

Our own eager steps on one GPU, by torch's profiler (`benchmarks/bench_gpu_kernels.py`): how long their kernels take beside
their bound (4.8 TB/s on an H200 [9]), without the pauses between them. The pauses are long where the host is slow: beside the
H100 (a virtual machine with Intel's Xeon), the step of Ti/16 with 32 images took 22.7 ms for kernels of 5.4 ms, 33 µs for each
launch instead of the 10 of this page.

{kernel_times}

Our own compiled steps on one GPU, whole, beside the bound of a compiled step of the same model, batch and GPU:

{steps_measured}

On CPUs, where each page of `benchmarks/results/` measures the rate of one large matrix product in the same turns, an
eager step of `plain-vit` reached these shares of it:

{cpus}

## Sources

1. NVIDIA, H100 Tensor Core GPU, data sheet (SXM5; the 1,979 TFLOP/s given there are with sparsity); MLCommons,
   inference results 4.1, system descriptions of H200 (18 NVLink, 900 GB/s).
2. NVIDIA, DGX H100 User Guide: eight ConnectX-7 ports of 400 Gbit/s. 46 to 48 GB/s of each is what NCCL's authors
   expect to be measured ([nccl-tests #290](https://github.com/NVIDIA/nccl-tests/issues/290)). Bytes on the links as
   in [nccl-tests, PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
3. NVIDIA, Ampere GA102 GPU Architecture, whitepaper 2.1.
4. An assumption, in the range of 5 to 25 µs that is usually given for PyTorch's dispatch and launch.
5. [NeMo Framework, ViT,
   performance](https://docs.nvidia.com/nemo-framework/user-guide/latest/MultimodalModels/VisionLanguageFoundation/Vit/Perf.html):
   g/14 on 1 to 16 nodes with 8 H100; 64 images per GPU by its predefined configuration.
6. pytorch-image-models, `results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv`.
7. [nvSubquadratic, benchmarks](https://nvidia-bionemo.github.io/nvSubquadratic/benchmarks.html): ViT-5-Small, 22
   million parameters, with other norms and positions than ours.
8. [Chillee, H100 peak matmul FLOPS](https://gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405).
9. NVIDIA, H200 Tensor Core GPU, data sheet (SXM).
"""  # noqa: E501 (a table and an address)


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
    print(OUT)
