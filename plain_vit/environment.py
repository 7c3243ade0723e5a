"""Description of the environment for bug reports: versions, processor, accelerator, threads. No paths, no keys."""

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

# Dependencies of plain-vit and its extras, and the packages whose models it converts.
PACKAGES = (
    "plain-vit", "torch", "torchvision", "transformers", "huggingface_hub", "safetensors", "numpy", "pillow",
    "accelerate", "datasets", "peft", "matplotlib", "captum", "timm", "vit-pytorch",
)  # fmt: skip


def describe_environment() -> dict[str, str]:
    """Describe the environment.

    Returns:
        Values by name: the system, package versions, the processor, the accelerator and the threads.
    """
    known = {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    known["Python"] = f"{platform.python_implementation()} {platform.python_version()}"
    known |= {package: _version(package) for package in PACKAGES}
    known["torch"] = torch.__version__  # includes the build, such as +cu128
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    known["processor"] = f"{_processor()}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    known["accelerator"] = _accelerator()
    known["threads"] = f"{torch.get_num_threads()} in an operation, {torch.get_num_interop_threads()} between them"
    return known


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.is_file() else []
    named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return next(filter(None, [*named, platform.processor()]), platform.machine())


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
