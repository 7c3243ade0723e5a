"""Operating system calls, each measured to be needed: its docstring gives the gain."""

import contextlib
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
from types import CodeType, FrameType
from typing import Any

# Of glibc's mallopt: how much free memory at the end of the heap goes back, and how large a block is mapped on its own,
# which goes back when it is freed. Older releases take 32 MiB at most.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_FROM = (2**27, 2**25)


def exchange_names(one: Path, other: Path) -> bool:
    """Swap two names in one step, so that no reader ever finds the second one missing.

    Two renames in a row leave a moment without it, in which a reader fails and a crash loses the name.

    Returns:
        Whether the system and the file system offer it; if not, nothing was changed.
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
    """Let this process use memory again that it has freed, instead of giving it back to the system.

    A training step on a CPU asks for the same large blocks as the step before it. Given back and asked for again, each
    of their pages is filled with zeros anew. Blocks of 128 MiB and more still go back.

    Returns:
        Whether the C library can be set so: glibc can.
    """
    library = _c_library()
    if library is None or platform.libc_ver()[0] != "glibc":
        return False
    library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return any(library.mallopt(M_MMAP_THRESHOLD, size) for size in MAPPED_FROM)


def start_fork_server(imported: Sequence[str], ignored: Sequence[signal.Signals]) -> bool:
    """Start the process that later processes are forked from, in which no thread but its own has ever run.

    A process that is forked from one that trains may hang for ever, if a thread of gloo, NCCL or CUDA holds a lock at
    that moment; before Python 3.11.8 the interpreter's own is such a lock (python/cpython#112275).

    Args:
        imported: Modules that it imports, once for all of them.
        ignored: Signals that it ignores.

    Returns:
        Whether the system can have such a process.
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
    """Inside this context signals are handled like this, where Python allows it: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class HeldInterrupts:
    """Holds back interrupts from the keyboard while a context manager begins and ends, so that both are whole.

    One handler is in place all the time. Exchanged only for the end, it would come too late for an interrupt between
    the end of the `with` block and that exchange. Python raises KeyboardInterrupt between any two instructions: at the
    wrong one it would leave a lock or a staging folder.

    Args:
        guard: The code of the context manager that uses it; those of the same file around it count as well.
    """

    def __init__(self, guard: CodeType) -> None:
        self.guard = guard
        self.before = signal.getsignal(signal.SIGINT)
        self.are_held = True
        self.came: list[FrameType | None] = []
        # Interrupts of other threads, and interrupts without a handler in Python, go elsewhere.
        self.are_mine = threading.current_thread() is threading.main_thread() and callable(self.before)

    def take_over(self) -> None:
        """Hold them back from here on."""
        if self.are_mine:
            signal.signal(signal.SIGINT, self._handle)

    def let_through(self) -> None:
        """Let them through, the held ones first, until `are_held` is set again: by a plain assignment, no call."""
        self.are_held = False
        self._deliver()

    def give_back(self) -> None:
        """Restore the handler of before, and hand it what was held."""
        if self.are_mine:
            signal.signal(signal.SIGINT, self.before)
        self._deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.are_held or self._is_guard(frame):
            self.came.append(frame)
        else:
            self.before(number, frame)  # type: ignore[operator,misc]

    def _is_guard(self, frame: FrameType | None) -> bool:
        """Return whether one came just before or after the `with` block, where raising it would skip the end."""
        if frame is None or frame.f_code is self.guard:
            return frame is not None
        if frame.f_code.co_filename != contextlib.__file__:
            return False
        manager = getattr(frame.f_locals.get("self"), "gen", None)
        return manager is not None and manager.gi_code.co_filename == self.guard.co_filename

    def _deliver(self) -> None:
        if self.came:
            frame = self.came[0]
            self.came.clear()
            self.before(signal.SIGINT, frame)  # type: ignore[operator,misc]
