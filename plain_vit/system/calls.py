"""Operating system calls; each docstring gives the gain."""

import ctypes
import errno
import multiprocessing
import os
import platform
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Options of glibc's mallopt: the free memory at the end of the heap, in bytes, from which it goes back to the system;
# and the size from which a block is mapped on its own and goes back when freed. Older releases take at most 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_FROM = (2**27, 2**25)


def exchange_names(one: Path, other: Path) -> bool:
    """Swap two names atomically, so that no reader ever finds the second one missing.

    Between two separate renames, a reader would fail and a crash would lose the name.

    Returns:
        Whether the system and the file system support it; if not, nothing was changed.
    """
    renameat2 = getattr(_c_library(), "renameat2", None)  # Linux
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _c_library() -> ctypes.CDLL | None:
    """Return the C library of this process, or None on Windows."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except TypeError:
        return None


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk. A folder that cannot be opened, as on Windows, is skipped."""
    flags = os.O_RDWR if os.name == "nt" and path.is_file() else os.O_RDONLY  # Windows only syncs writable files
    try:
        descriptor = os.open(path, flags)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_freed_memory() -> bool:
    """Let this process reuse memory that it has freed, instead of returning it to the system.

    Each training step on a CPU allocates the same large blocks. If they were returned to the system, every page would
    be zeroed again in each step. Blocks of 128 MiB and more are still returned.

    Returns:
        Whether the C library supports it: glibc does.
    """
    library = _c_library()
    if library is None or platform.libc_ver()[0] != "glibc":
        return False
    library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return any(library.mallopt(M_MMAP_THRESHOLD, size) for size in MAPPED_FROM)


def start_fork_server(imported: Sequence[str], ignored: Sequence[signal.Signals]) -> bool:
    """Start the server from which later processes are forked, which has never run any other thread.

    A process forked from one that trains may hang forever if a thread of gloo, NCCL or CUDA holds a lock at that
    moment; before Python 3.11.8, the interpreter itself has such a lock (python/cpython#112275).

    Args:
        imported: Modules that the server imports once for all forked processes.
        ignored: Signals that the server ignores.

    Returns:
        Whether the system supports such a server.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return False
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload(list(imported))
    with handled_signals(dict.fromkeys(ignored, signal.SIG_IGN)):  # which the server inherits
        forkserver.ensure_running()
    return True


@contextmanager
def handled_signals(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Install these signal handlers inside this context, if Python allows it: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
