"""Description of the environment for bug reports: versions, processor, accelerator, threads. No paths, no keys."""

import functools
import importlib.metadata
import os
import platform
from pathlib import Path

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Dependencies of plain-vit and its extras, and the packages whose models it converts.
PACKAGES = (
    "plain-vit", "torch", "torchvision", "transformers", "huggingface_hub", "safetensors", "numpy", "pillow",
    "accelerate", "datasets", "peft", "matplotlib", "captum", "timm", "vit-pytorch",
)  # fmt: skip

# The functions that tell whether oneDNN multiplies matrices of a dtype; it always multiplies float32.
_PRODUCTS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def describe_environment() -> dict[str, str]:
    """Describe the environment.

    Returns:
        Values by name: the system, package versions, the processor, the accelerator and the threads.
    """
    known = {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    known["Python"] = f"{platform.python_implementation()} {platform.python_version()}"
    known |= {package: version(package) for package in PACKAGES}
    known["torch"] = torch.__version__  # includes the build, such as +cu128
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    known["processor"] = f"{_processor()}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    known["accelerator"] = _accelerator()
    known["threads"] = f"{torch.get_num_threads()} in an operation, {torch.get_num_interop_threads()} between them"
    return known


def has_products(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of a dtype on this processor.

    Otherwise, as for bfloat16 with AVX2, torch uses its own products, which are many times slower than float32.
    """
    if dtype not in _PRODUCTS or not torch.backends.mkldnn.is_available():  # without oneDNN it makes no difference
        return True
    return bool(getattr(torch.ops.mkldnn, _PRODUCTS[dtype])())


@functools.cache
def has_slow_float32_products() -> bool:
    """Return whether torch's float32 products run at half of this processor's speed, while oneDNN's do not.

    On AMD's Zen 5 (family 26), MKL reaches 0.21 TFLOP/s on two cores and oneDNN 0.45. On a Xeon they are equal, with
    MKL ahead in gradients. Earlier AMD processors, which split AVX-512 in halves, were not measured in training. The
    answer is False if `/proc/cpuinfo` does not name the processor.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    newest_of_amd = _described("vendor_id") == "AuthenticAMD" and int(_described("cpu family") or 0) >= 26
    return newest_of_amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def warn_of_slow_products(dtype: torch.dtype) -> None:
    """Warn, once per process, if the CPU may compute in a dtype far slower than in float32."""
    if not has_products(dtype):
        name = str(dtype).removeprefix("torch.")
        logger.warning_once(
            f"This processor has no products of {name} matrices, and torch's own may be many times slower than those "
            "of float32: compute in float32."
        )


def version(package: str) -> str:
    """Return the version of a package, or "not installed", as for plain-vit run from a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    return _described("model name") or platform.processor() or platform.machine()


def _described(key: str) -> str:
    """Return the value of this key for the first processor in Linux's cpuinfo; empty if there is none."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.is_file() else []
    values = (value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == key)
    return next(values, "")


def _accelerator() -> str:
    if not torch.accelerator.is_available():
        return "none"
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if kind is None or kind.type != "cuda":
        return f"{count} x {kind}"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    return f"{count} x {', '.join(names)}, {built}"
