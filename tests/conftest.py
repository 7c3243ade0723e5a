"""Fixtures for all tests: an offline, deterministic process, and modules with randomised parameters."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from tests.hub.endpoint import HubEndpoint

# huggingface_hub reads both when it is first imported, which is later than this. The tests neither read nor write the
# user's cache and token.
os.environ["HF_HUB_OFFLINE"] = "1"
_hf_home = tempfile.TemporaryDirectory(prefix="plain-vit-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _hf_home.name

# One thread here and in child processes: sums are taken in a fixed order, several pytest processes share the cores, and
# a forked child does not wait forever for threads of its parent.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Shells make background jobs ignore interrupts, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, without a deadline: the first example may compile or import something.
hypothesis.settings.register_profile("plain_vit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("plain_vit")


STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, help="the time the tests should take; the last lines say if they took longer"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases listed in `@pytest.mark.slow(quick=[...])` in the default tier."""
    named = dict[str, tuple[set[str], set[str]]]()
    for item in items:
        marks = [mark for mark in item.iter_markers("slow") if "quick" in mark.kwargs]
        if marks and isinstance(item, pytest.Function):
            quick, case = set(marks[0].kwargs["quick"]), item.callspec.id
            named.setdefault(item.nodeid.partition("[")[0], (quick, set()))[1].add(case)
            if case in quick:
                item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]
    for test, (quick, cases) in named.items():
        if quick - cases and not any("::" in word for word in config.args):
            raise pytest.UsageError(
                f"{test}: quick={sorted(quick - cases)} are none of its cases, {sorted(cases)[:5]}..."
            )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Report a tier that exceeds its time budget, without failing, because the machine may be slow."""
    expected, took = config.getoption("minutes"), (time.monotonic() - STARTED) / 60
    if expected is not None and took > expected:
        terminalreporter.write_line(
            f"took {took:.1f} minutes, expected at most {expected:g} on two quiet cores", red=True
        )


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    """Seed torch; refuse nondeterministic operations and TF32.

    In this mode torch fills new memory with NaN, so reading an uninitialised tensor is noticed.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)


def randomize_(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every parameter and running statistic of `module` with random values, and return the module.

    New norms contain only ones and zeros, and new biases and tokens are often zero, which would hide swapped or dropped
    tensors. The scales keep activations near one: matrices by fan-in, gains around one, biases and tokens smaller.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator) * std

    def positive(tensor: torch.Tensor) -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator) + 0.5  # in [0.5, 1.5)

    with torch.no_grad():
        for path, parameter in module.named_parameters():
            name = path.rpartition(".")[2]
            if name.endswith("bias"):
                parameter.copy_(normal(parameter, 0.2))
            elif name.endswith("weight") and parameter.ndim > 1:
                parameter.copy_(normal(parameter, parameter[0].numel() ** -0.5))
            elif parameter.ndim <= 1 or "gamma" in name:
                parameter.copy_(positive(parameter))
            else:  # class and register tokens, position tables, latent queries
                parameter.copy_(normal(parameter, 0.5))
        for path, buffer in module.named_buffers():
            if path.endswith("running_mean"):
                buffer.copy_(normal(buffer, 0.2))
            elif path.endswith("running_var"):
                buffer.copy_(positive(buffer))
    return module


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["HubEndpoint"]:
    """Start a local Hub and point the libraries of this process to it; see tests/hub/endpoint.py."""
    from tests.hub.endpoint import HubEndpoint

    endpoint = HubEndpoint(tmp_path / "hub")
    endpoint.redirect(monkeypatch, tmp_path / "cache")
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the read-only folder of a plain ViT with 4 x 3 patches and three classes."""
    from tests.training.runs import save_plain_vit

    return save_plain_vit(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a headless Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the extra `test` has it")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium: install the system's package `chromium`")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """Reset Accelerate, which otherwise keeps one precision per process."""
    from accelerate.state import AcceleratorState  # not installed for `make test-space`

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
