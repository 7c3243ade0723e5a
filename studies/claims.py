"""Which process does which run: a folder per claimed run, made by `mkdir`, so that machines share a queue by files."""

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
DEAD = 300.0  # seconds without one after which a claim is free again


def this_machine() -> str:
    """Return what process numbers are unique within: the machine since its start, and a container in it."""
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    if boot.is_file() and container.is_symlink():
        parts += [boot.read_text(encoding="utf-8").strip(), os.readlink(container)]
    return " ".join(parts)


class Claims:
    """The claims of this process; use it in a `with` statement, which gives them back at its end.

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
        """Claim a run; return whether it is ours now. One claimed by a process that no longer lives is free."""
        if self._make(key):
            return True
        if not self._is_dead(key):
            return False
        with filelock.FileLock(self.folder / ".lock"):  # only one process looks at a dead claim at a time
            if self._is_dead(key):
                shutil.rmtree(self.folder / key, ignore_errors=True)
            return self._make(key)

    def note(self, key: str, process: int) -> None:
        """Note the process that does a claimed run: it may outlive this one, and the run is not free before its end."""
        owner = {**self.owner, "processes": [*self.owner["processes"], process]}
        (self.folder / key / "owner.json").write_text(json.dumps(owner), encoding="utf-8")

    def give_back(self, key: str) -> None:
        """Free a claimed run."""
        self.own.discard(key)
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def beat(self) -> None:
        """Show that this process lives; to be called every BEAT seconds."""
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
        except FileNotFoundError:  # given back in the meantime
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
        """Return the time of the disk, which may be another machine's."""
        probe = self.folder / f".now-{os.getpid()}-{time.monotonic_ns()}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now
