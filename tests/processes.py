"""Run code in forked processes, which saves the seconds that importing torch and transformers takes.

`in_a_process` forks the test's process, including its state. `run_forked` forks a server that has only imported the
libraries, like a process that a user starts.
"""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 300.0  # seconds that a script may take
processes = multiprocessing.get_context("fork")  # inherits all imports of this process
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["matplotlib.pyplot", "plain_vit.training.loop"])


def in_a_process(function: Callable[..., Any], *arguments: object, context: Any = processes) -> Any:
    """Call a function in a child process, and return its result or raise its exception.

    Pass `context=server` for a function with a backward pass: torch refuses it in a fork of a process in which autograd
    has started threads.
    """
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    child.start()
    sender.close()
    succeeded, result = receiver.recv()
    child.join()
    if not succeeded:
        raise result
    return result


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        sender.send((True, function(*arguments)))
    except BaseException as error:
        sender.send((False, error))


def kilobytes(field: str) -> int:
    """Return a field of /proc/self/status, such as VmHWM, the peak memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def run_forked(words: list[str], count: int = 1, limit: float = LIMIT) -> str:
    """Run `python WORDS...` in `count` processes, like torchrun if there are several, and return their output.

    Raises:
        AssertionError: A process failed, or did not end in time.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        runs = [server.Process(target=_run, args=(words, each, log.name)) for each in _environments(count)]
        for run in runs:
            run.start()
        end = time.monotonic() + limit
        while any(run.exitcode is None for run in runs) and all(run.exitcode in (None, 0) for run in runs):
            multiprocessing.connection.wait([run.sentinel for run in runs if run.exitcode is None], 1.0)
            if time.monotonic() > end:
                break
        codes = [run.exitcode for run in runs]
        for run in runs:
            run.kill()
            run.join()
        output = log.read()
    assert codes == [0] * count, f"{codes}\n{output}"
    return output


def _environments(count: int) -> list[dict[str, str]]:
    """Return the environment of each process, including torchrun's variables."""
    if count == 1:
        return [dict(os.environ)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    where = {**os.environ, **size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _run(words: list[str], environment: dict[str, str], log: str) -> None:
    """Run a script, a module after `-m` or a program after `-c` in this process."""
    gc.freeze()  # excludes imported objects from garbage collection
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")
