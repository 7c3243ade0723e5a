"""Work in a forked process, which is there at once and whose limits and memory are its own."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

processes = multiprocessing.get_context("fork")  # with all imports of this process


def in_a_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a child process and return what it returned or raise what it raised."""
    receiver, sender = processes.Pipe(duplex=False)

    def body() -> None:
        try:
            sender.send((True, function(*arguments)))
        except BaseException as error:
            sender.send((False, error))

    child = processes.Process(target=body, daemon=True)
    child.start()
    sender.close()
    succeeded, result = receiver.recv()
    child.join()
    if not succeeded:
        raise result
    return result


def kilobytes(field: str) -> int:
    """Return a field of /proc/self/status, such as VmHWM, the most memory that this process ever had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])
