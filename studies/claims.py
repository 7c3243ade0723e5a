"""Claims of runs by processes: each claim is a folder made by `mkdir`, so machines can share a queue through files."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import filelock

BEAT = 20.0  # seconds between signs of life
DEAD = 300.0  # seconds without a sign of life after which a claim is free again


def this_machine() -> str:
    """Return an identifier of the scope of process numbers: the machine since its start, and a container in it."""
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    if boot.is_file() and container.is_symlink():
        parts += [boot.read_text(encoding="utf-8").strip(), os.readlink(container)]
    return " ".join(parts)


class Claims:
    """The claims of this process, to be used in a `with` statement, which releases them at its end.

    Args:
        folder: shared by all processes of the queue.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own: set[str] = set()
        self.owner: dict[str, Any] = {"machine": this_machine(), "processes": [os.getpid()]}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in [*self.own]:
            self.give_back(key)

    def take(self, key: str) -> bool:
        """Try to claim a run, and return whether it worked; a claim of a dead process does not count."""
        if self._make(key):
            return True
        if not self._is_dead(key):
            return False
        with filelock.FileLock(self.folder / ".lock"):  # only one process at a time checks for dead claims
            if self._is_dead(key):
                shutil.rmtree(self.folder / key, ignore_errors=True)
            return self._make(key)

    def note(self, key: str, process: int) -> None:
        """Record the process that does a claimed run: it may outlive this process, and holds the claim to its end."""
        owner = {**self.owner, "processes": [*self.owner["processes"], process]}
        (self.folder / key / "owner.json").write_text(json.dumps(owner), encoding="utf-8")

    def give_back(self, key: str) -> None:
        """Free a claimed run."""
        self.own.discard(key)
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def beat(self) -> None:
        """Give a sign of life; call this every BEAT seconds."""
        for key in [*self.own]:
            if (self.folder / key).is_dir():
                os.utime(self.folder / key)

    def _make(self, key: str) -> bool:
        try:
            (self.folder / key).mkdir()
        except FileExistsError:
            return False
        (self.folder / key / "owner.json").write_text(json.dumps(self.owner), encoding="utf-8")
        self.own.add(key)
        return True

    def _is_dead(self, key: str) -> bool:
        try:
            seen = (self.folder / key).stat().st_mtime
        except FileNotFoundError:  # released in the meantime
            return False
        owner = self._owner(key)
        if owner.get("machine") == self.owner["machine"] and Path("/proc").is_dir():
            return not any(Path("/proc", str(process)).exists() for process in owner["processes"])
        return self._now() - seen > DEAD

    def _owner(self, key: str) -> dict[str, Any]:
        try:
            return json.loads((self.folder / key / "owner.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # not written yet
            return {}

    def _now(self) -> float:
        """Return the time according to the disk, which may belong to another machine."""
        probe = self.folder / f".now-{os.getpid()}-{time.monotonic_ns()}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now
