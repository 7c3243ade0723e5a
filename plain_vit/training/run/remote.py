"""A run folder in a store of objects, such as S3: the run works in a local folder, which is copied beside training.

The manifest of a checkpoint is uploaded last and deleted first, so what an interrupted upload leaves has none and is no
checkpoint. The newest checkpoint decides where a run goes on: in the store, or in the local folder of the same run.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import constants

from ...errors import OutputError, OutputExistsError
from ...files.manifest import MANIFEST, manifest_problem
from ...files.staging import STAGED
from ..data.folders import file_system_of

OPTIONS, CHECKPOINTS = "run.json", "checkpoints"


def working_folder(place: str | Path) -> Path:
    """Return the local folder of a run: the given one, or for a URL one in the cache of the Hub (`HF_HOME`)."""
    if "://" not in str(place):
        return Path(place)
    url = str(place).rstrip("/")
    name = f"{PurePosixPath(url).name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    return Path(constants.HF_HOME) / "plain_vit" / "runs" / name


class RemoteFolder:
    """The copy of a run folder in a store of objects; only the main process uses it.

    Args:
        url: A URL of fsspec: `s3://`, `gs://`, `hf://`, ...

    Raises:
        DataError: fsspec knows no such file system.
        MissingPackageError: The package that opens this kind of URL is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url, self.folder = url.rstrip("/"), working_folder(url)
        self.system, self.root = file_system_of(self.url)
        self.uploaded: dict[str, tuple[int, int]] = {}  # size and time of the last change, by name

    def fetch(self, say: Callable[[str], Any], *, resume: bool) -> None:
        """Make the local folder that of the run in the store, with the newest undamaged checkpoint of both.

        Args:
            say: Prints a line.
            resume: Whether the run goes on; a new one needs an empty place in the store.

        Raises:
            OutputExistsError: The place is not empty, and `resume` is False.
            OutputError: The store cannot be read.
        """
        with self._reporting("read", "Give a place that exists, and credentials that open it."):
            self.system.invalidate_cache()
            held = {path.removeprefix(f"{self.root}/") for path in self.system.find(self.root)}
            if held and not resume:
                raise OutputExistsError(f"{self.url} is not empty: give another place, or continue with --resume.")
            own = self.folder / OPTIONS
            if held and own.is_file() and own.read_bytes() != self.system.cat_file(self._at(OPTIONS)):
                aside = self.folder.rename(self.folder.with_name(f"{self.folder.name}-{time.time_ns()}"))
                say(f"The local folder of {self.url} held another run, which is now {aside}.")
            steps = (self.folder / CHECKPOINTS).glob("step_*")  # a killed download leaves one without its manifest
            mine = max((path.name for path in steps if not manifest_problem(path)), default="")
            complete = {PurePosixPath(name).parent.name for name in held if name.endswith(f"/{MANIFEST}")}
            newer = sorted(step for step in complete if step.startswith("step_") and step > mine)
            if newer or not own.is_file():
                self._download(name for name in held if not name.startswith(f"{CHECKPOINTS}/"))
            for step in reversed(newer):
                self._download(name for name in held if name.startswith(f"{CHECKPOINTS}/{step}/"))
                if not (problem := manifest_problem(self.folder / CHECKPOINTS / step)):
                    return
                say(f"The checkpoint {self.url}/{CHECKPOINTS}/{step} is damaged: {problem}.")

    def upload(self) -> None:
        """Upload all changed files but the checkpoints, `config.json` last.

        Raises:
            OutputError: The store cannot be written.
        """
        names = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        kept = [name for name in names if not name.startswith((STAGED, CHECKPOINTS)) and f"/{STAGED}" not in name]
        self._upload(sorted(kept, key=lambda name: (name.endswith("config.json"), name)))

    def upload_checkpoint(self, name: str) -> None:
        """Upload a complete checkpoint, then delete those that are no longer kept.

        Raises:
            OutputError: The store cannot be written.
        """
        kept = self.folder / CHECKPOINTS
        files = sorted(path.relative_to(self.folder).as_posix() for path in (kept / name).iterdir())
        self._upload(sorted(files, key=lambda file: file.endswith(f"/{MANIFEST}")))
        with self._reporting("written"):
            self.system.invalidate_cache()
            for old in self.system.ls(self._at(CHECKPOINTS), detail=False):
                if not (kept / PurePosixPath(old).name).exists():
                    files = self.system.find(old)
                    for file in sorted(files, key=lambda file: not file.endswith(f"/{MANIFEST}")):
                        self.system.rm_file(file)

    def _upload(self, names: Iterable[str]) -> None:
        with self._reporting("written"):
            for name in names:
                if self.uploaded.get(name) != (state := self._state(name)):
                    self.system.put_file(str(self.folder / name), self._at(name))
                    self.uploaded[name] = state

    def _state(self, name: str) -> tuple[int, int]:
        status = (self.folder / name).stat()
        return status.st_size, status.st_mtime_ns

    def _download(self, names: Iterable[str]) -> None:
        for name in names:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self.system.get_file(self._at(name), str(target))
            self.uploaded[name] = self._state(name)

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    @contextmanager
    def _reporting(self, done: str, advice: str = "") -> Iterator[None]:
        try:
            yield
        except OutputExistsError:
            raise
        except Exception as error:  # every file system of fsspec has its own
            reason = str(error).strip().splitlines() or [type(error).__name__]
            advice = advice or f"The run's own files are in {self.folder}, and --resume continues."
            raise OutputError(f"{self.url} cannot be {done}: {reason[0]}. {advice}") from error
