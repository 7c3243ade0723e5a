"""How much work a training step is, and which share of what the device can do it takes."""

from collections.abc import Callable

import psutil
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# Products per second in bfloat16 or float16 without sparsity, from NVIDIA's data sheets, by the name of the GPU; the
# first match counts. TF32 has half.
PEAKS = {
    "A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12,
}  # fmt: skip


def peak_flops(device: torch.device, *, tf32: bool = False) -> float | None:
    """Return the operations per second that a GPU can do at most, or None if this is not known here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((rate for known, rate in PEAKS.items() if known in name), None)
    return peak / 2 if tf32 and peak else peak


def flops_per_image(model: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Count the floating-point operations of matrix products and convolutions in a forward and a backward pass.

    What is computed again to save memory does not count, and what faster steps leave out is not subtracted.

    Args:
        model: the model; its weights and statistics are not changed, and gradients are cleared.
        forward: calls it on one image, and returns a tensor to differentiate.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    training = model.training
    model.eval()  # without checkpoints, dropout and statistics
    # Kernels of attention are not counted by every release and on every device, but their matrix products are.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        forward().float().sum().backward()
    model.train(training)
    model.zero_grad()
    return counter.get_total_flops()


def memory_of(device: torch.device) -> int:
    """Return the peak memory of this process on a GPU, or else its memory now (RSS), in bytes."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
