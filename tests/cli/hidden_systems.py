"""Run commands with the features hidden that Windows or macOS lacks.

    python -m tests.cli.hidden_systems SYSTEM WORDS... [+ WORDS...]...

The libraries are imported first: their builds for those systems do not need it. Not simulated: the paths of Windows,
and its locks on open files.
"""

import builtins
import ctypes
import importlib
import io
import mmap
import multiprocessing
import multiprocessing.context
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGKILL", "SIGPIPE")
CALLS = ("fork", "setsid", "killpg", "getpgid", "setpgrp", "getuid", "geteuid", "fchmod", "mkfifo", "sysconf")
LIBRARIES = (
    "accelerate",
    "datasets",
    "evaluate",
    "filelock",
    "matplotlib.pyplot",
    "peft",
    "sklearn.datasets",
    "timm",
    "torchvision",
)
MODULES = ("fcntl", "resource", "pwd", "grp", "termios")


class CDLL(ctypes.CDLL):
    """Windows has no C library of the process."""

    def __init__(self, name: Any, *rest: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *rest, **options)


class NoRename(ctypes.CDLL):
    """The C library of macOS, which has no `renameat2` and no `mallopt`."""

    def __getattr__(self, name: str) -> Any:
        if name in ("renameat2", "mallopt"):
            raise AttributeError(name)
        return super().__getattr__(name)


def renaming(rename: Callable[..., None], replaces_files: bool) -> Callable[..., None]:
    """Rename like Windows, which never replaces a folder."""

    def renamed(source: Any, target: Any, **options: Any) -> None:
        if os.path.isdir(target):
            raise PermissionError(5, "Access is denied", str(target))
        if os.path.exists(target) and not replaces_files:
            raise FileExistsError(183, "Cannot create a file when that file already exists", str(target))
        rename(source, target, **options)

    return renamed


def opening(opened: Callable[..., int]) -> Callable[..., int]:
    """Open like Windows, which cannot open folders."""

    def open_file(path: Any, *rest: Any, **options: Any) -> int:
        if isinstance(path, str | bytes | os.PathLike) and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return opened(path, *rest, **options)

    return open_file


def hide_windows() -> None:
    """Hide features that Windows lacks."""
    ctypes.CDLL = CDLL  # type: ignore[misc]
    for name in SIGNALS:
        delattr(signal, name)
    for name in (*CALLS, "sched_getaffinity"):
        delattr(os, name)
    for name in dir(mmap):
        if name.startswith(("MAP_", "MADV_", "PROT_")):
            delattr(mmap, name)
    sys.modules.update(dict.fromkeys(MODULES))
    spawn_alone(("spawn",))
    os.rename, os.replace = renaming(os.rename, False), renaming(os.replace, True)
    os.open = opening(os.open)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]


def hide_macos() -> None:
    """Hide features that macOS lacks."""
    ctypes.CDLL = NoRename  # type: ignore[misc]
    del os.sched_getaffinity, mmap.MADV_HUGEPAGE
    spawn_alone(("spawn", "fork", "forkserver"))


def spawn_alone(methods: tuple[str, ...]) -> None:
    """Offer these ways to start a process, the first by default."""
    multiprocessing.set_start_method(methods[0], force=True)
    multiprocessing.get_all_start_methods = lambda: list(methods)
    known = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    for name in set(known) - set(methods):
        del known[name]


def without_linux(reads: Callable[..., Any]) -> Callable[..., Any]:
    """Read as on a system without `/proc`, `/sys` and `/dev/shm`."""

    def reads_present(path: Any, *rest: Any, **options: Any) -> Any:
        inside = isinstance(path, str | Path) and str(path).startswith(("/proc/", "/dev/shm", "/sys/"))
        if inside and not sys._getframe(1).f_globals["__name__"].startswith("psutil"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return reads(path, *rest, **options)

    return reads_present


def hide(system: str) -> None:
    """Hide features that the system lacks, except `/proc` for psutil, which has its own code for each system."""
    {"windows": hide_windows, "macos": hide_macos}[system]()
    platform.libc_ver = lambda *_, **__: ("", "")
    builtins.open = io.open = without_linux(builtins.open)
    os.stat = without_linux(os.stat)


def main() -> None:
    """Import the libraries, hide features that the system lacks, and run the command."""
    system, *words = sys.argv[1:]
    for library in LIBRARIES:
        importlib.import_module(library)
    from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, pipeline  # noqa: F401

    hide(system)
    import plain_vit_command

    while words:
        end = words.index("+") if "+" in words else len(words)
        command, words = words[:end], words[end + 1 :]
        sys.argv = ["plain-vit", *command]
        if code := plain_vit_command.main(command):
            sys.exit(code)


if __name__ == "__main__":
    main()
