"""Files of `torch.save`: their pickle is walked and read as tensors only, no code in it is run; and written."""

import io
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO

import torch

from ..errors import CheckpointError, UnsafeFileError
from .tensors import MAX_HEADER_BYTES, LazyTensor, LazyTensors, UnchangedFile
from .zip_archives import data_start, opened_member, zip_members

MAX_PICKLE_OPCODES = 1_000_000  # of a tensor some forty

# What torch.save writes for tensors. Other names that torch would still accept can allocate at will (bytearray, tensor
# classes) or hold no weights (sparse, quantised and distributed tensors).
TENSOR_GLOBALS = {
    "collections OrderedDict",
    "__builtin__ set",
    "_codecs encode",
    "torch Size",
    "torch device",
    "torch._tensor _rebuild_from_type_v2",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch.nn.parameter Parameter",
    "torch.storage TypedStorage",
    "torch.storage UntypedStorage",
    "torch BFloat16Storage",
    "torch BoolStorage",
    "torch ByteStorage",
    "torch CharStorage",
    "torch DoubleStorage",
    "torch FloatStorage",
    "torch HalfStorage",
    "torch IntStorage",
    "torch LongStorage",
    "torch ShortStorage",
    *(
        f"torch {name}Storage"
        for name in ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
    ),
    *(f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}

# What training scripts store beside the tensors. These names are read as `_Ignored`: the real classes are not imported.
IGNORED_GLOBALS = {
    "argparse Namespace",
    "types SimpleNamespace",
    "numpy dtype",
    "numpy.core.multiarray scalar",
    "numpy._core.multiarray scalar",
    "pathlib PosixPath",
    "pathlib WindowsPath",
    "pathlib._local PosixPath",
    "pathlib._local WindowsPath",
}


class _Ignored:
    """Stands for an object of a training script; takes whatever it is given and keeps nothing."""

    def __new__(cls, *_: object) -> "_Ignored":
        return object.__new__(cls)

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class TorchFile:
    """A file of `torch.save`, unpickled as tensors only; the bytes of the tensors stay in the file.

    Args:
        path: The file, an archive (torch 1.6 and later) or the older single stream.

    Raises:
        CheckpointError: The file is damaged, or written by a pickle protocol that torch.save does not use by itself.
        UnsafeFileError: The pickle asks for code, or this torch is too old to read any pickle safely.

    Attributes:
        tree: What was saved, with tensors on the meta device in place of those in the file.
    """

    tree: object

    def __init__(self, path: Path) -> None:
        if torch.torch_version.TorchVersion(torch.__version__) < (2, 10):  # type: ignore[operator]
            raise UnsafeFileError(
                f"{path} is a pickle, and torch {torch.__version__} can be made to run code by one in spite of "
                "weights_only (CVE-2026-24747): update to torch 2.10, or convert the file to safetensors elsewhere."
            )
        self._file = UnchangedFile(path)
        with self._file.open() as opened:
            self._zipped = opened.read(4) == b"PK\x03\x04"
        self._records = self._check_archive() if self._zipped else self._check_stream()
        self.tree = self._load()

    def _check_archive(self) -> dict[int, int]:
        """Check names and pickle of an archive; return the size of each record by where its bytes start."""
        path = self._file.path
        members = zip_members(path)
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in members):
            raise UnsafeFileError(f"{path} is a TorchScript archive, which holds code: save its state_dict() instead.")
        if len(pickles) != 1:
            raise CheckpointError(f"{path} is an archive without one data.pkl: torch.save did not write it.")
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise CheckpointError(f"{path} was packed again by another program: unpack it, or save it with torch.save.")
        if members[pickles[0]].file_size > MAX_HEADER_BYTES:
            raise UnsafeFileError(f"{path}: a pickle of {members[pickles[0]].file_size} bytes: save the tensors alone.")

        root = pickles[0].removesuffix("data.pkl")
        with opened_member(self._file, members[pickles[0]], f"{path}: the pickle") as stream:
            keys, _ = _check_pickle(io.BytesIO(stream.read()), path)
        if f"{root}byteorder" in members:
            with opened_member(self._file, members[f"{root}byteorder"], f"{path}: the byte order") as stream:
                if (byte_order := stream.read(16)) != b"little":
                    raise CheckpointError(
                        f"{path} has the byte order {byte_order!r}: save it on a little-endian machine."
                    )

        records: dict[int, int] = {}
        order: list[str] = []
        with self._file.open() as opened:
            for info in sorted(members.values(), key=lambda info: info.header_offset):
                if info.filename.startswith(f"{root}data/"):
                    start = data_start(opened, info, path)
                    records[start] = info.file_size
                    order.append(info.filename.removeprefix(f"{root}data/"))
        if (
            f"{root}.format_version" in members and keys != order
        ):  # there torch takes places from the order, not the names
            raise CheckpointError(f"{path} does not hold its tensors in the order of its pickle: the file is damaged.")
        return records

    def _check_stream(self) -> dict[int, int]:
        """Check the five pickles before the bytes in files older than torch 1.6."""
        with self._file.open() as opened:
            pickles = io.BytesIO(opened.read(MAX_HEADER_BYTES))
        # The magic number, the protocol, the system, the object, and the order in which the storages follow.
        _, _, _, (keys, _), (_, listed) = [_check_pickle(pickles, self._file.path) for _ in range(5)]
        if not set(keys) <= set(listed):  # torch would leave what is not listed as memory that nobody has written
            raise CheckpointError(f"{self._file.path} has tensors without bytes: the file is damaged.")
        return {}

    def _load(self) -> object:
        ignored = [(_Ignored, name.replace(" ", ".")) for name in sorted(IGNORED_GLOBALS)]
        location = "meta" if self._zipped else "cpu"
        try:
            with (
                self._file.open() as opened,
                warnings.catch_warnings(action="ignore"),
                torch.serialization.safe_globals(ignored),  # type: ignore[arg-type]
            ):
                return torch.load(opened, map_location=location, weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle makes torch fail in any way; nothing of the file was run
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise CheckpointError(f"{self._file.path} cannot be unpickled ({reason[0]:.300}): it is damaged.") from None

    def lazy(self, tensors: Mapping[str, torch.Tensor]) -> LazyTensors:
        """Turn tensors of `tree` into tensors that are read from the file when asked for.

        Args:
            tensors: Some of the tensors in `tree`, by the names they shall have.

        Returns:
            The same names, to be read.

        Raises:
            CheckpointError: A tensor does not lie where the archive holds its bytes.
            UnsafeFileError: The tensors are views that would take far more memory than the file.
        """
        lazy = LazyTensors({name: self._entry(name, tensor) for name, tensor in tensors.items()})
        if lazy.nbytes > 4 * self._file.size + 2**20:  # tied weights are stored once
            raise UnsafeFileError(f"{self._file.path} of {self._file.size} bytes holds views of {lazy.nbytes} bytes.")
        return lazy

    def _entry(self, name: str, tensor: torch.Tensor) -> LazyTensor:
        where = f"{self._file.path}: tensor {name!r}"
        tensor = torch.detach(tensor)  # without what a pickle may have hung on it
        if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
            raise CheckpointError(
                f"{where} is not an ordinary dense tensor: save it with .to_dense() or .resolve_neg()."
            )
        storage = tensor.untyped_storage()
        shape, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        start = int(tensor.storage_offset()) * dtype.itemsize
        span = (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * dtype.itemsize
        if tensor.numel() == 0:
            return LazyTensor(shape, dtype, partial(torch.empty, shape, dtype=dtype))
        if start + span > storage.nbytes() or tensor.numel() * dtype.itemsize > storage.nbytes():
            raise CheckpointError(f"{where} reaches beyond its {storage.nbytes()} bytes: the file is damaged.")
        if not self._zipped:
            return LazyTensor(shape, dtype, tensor.clone)
        offset = getattr(storage, "_checkpoint_offset", -1)  # torch.load leaves it on storages of the meta device
        if self._records.get(offset) != storage.nbytes():
            raise CheckpointError(f"{where} does not lie where the archive holds bytes for it: the file is damaged.")
        return LazyTensor(shape, dtype, partial(self._read, offset + start, span, dtype, shape, stride))

    def _read(
        self, offset: int, span: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        return self._file.read(offset, span, dtype).as_strided(shape, stride)


def _check_pickle(stream: io.BytesIO, path: Path) -> tuple[list[str], list[str]]:
    """Walk one pickle's instructions, without executing any, up to its end.

    Returns:
        The keys of the storages in the order in which they are first asked for, and all texts.
    """
    names: set[str] = set()
    keys: dict[str, None] = {}
    texts: list[str] = []
    memo: dict[object, object] = {}
    top: object = None  # what lies on the stack where that is a text
    pushed: list[object] = []  # since the last mark
    storage: list[object] = []  # the items of a tuple that was just made
    strange = False
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count > MAX_PICKLE_OPCODES:
                raise UnsafeFileError(f"{path}: a pickle of over {MAX_PICKLE_OPCODES} steps: save the tensors alone.")
            kind = opcode.name
            if kind in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = top
                continue
            if kind == "PROTO" and argument != 2:
                raise CheckpointError(
                    f"{path} was pickled with protocol {argument}; torch reads tensors safely from protocol 2 only, "
                    "its default: save it again without pickle_protocol."
                )
            if kind == "BINPERSID":
                key = storage[2] if len(storage) > 2 and storage[0] == "storage" else None
                if not isinstance(key, str):
                    strange = True
                    continue
                keys[key] = None
            storage = pushed if kind == "TUPLE" else []
            top = argument if kind == "BINUNICODE" else None
            if kind == "BINUNICODE":
                texts.append(str(argument))
            elif kind in ("GLOBAL", "INST"):
                names.add(str(argument))
            elif kind in ("BINGET", "LONG_BINGET"):
                top = memo.get(argument)
            pushed = [] if kind == "MARK" else [*pushed[:6], top]
    except CheckpointError:
        raise
    except Exception as error:  # pickletools leaves the faults of a damaged text as they come
        raise CheckpointError(f"{path} is not a whole pickle ({error}): it is truncated or damaged.") from None
    if blocked := sorted(names - TENSOR_GLOBALS - IGNORED_GLOBALS):
        shown = ", ".join(name.replace(" ", ".") for name in blocked[:20]) + (" ..." if len(blocked) > 20 else "")
        raise UnsafeFileError(
            f"{path} asks for {shown}; loading that could run code, so nothing was loaded. Where you trust the file, "
            "save its tensors alone: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')."
        )
    if strange:
        raise CheckpointError(f"{path} does not name its storages as torch.save does: the file is damaged.")
    return list(keys), texts


def save_torch(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors with `torch.save`.

    Raises:
        OSError: what went wrong, such as a full disk.
    """
    with path.open("wb") as file:
        watched = _WatchedFile(file)
        try:
            torch.save(tensors, watched)  # type: ignore[arg-type]  # which asks for nothing else
        except RuntimeError as error:
            raise watched.fault or error from None


class _WatchedFile:
    """Remembers why writing failed: torch's own error, of a file on a full disk say, does not tell."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.fault: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.fault = error
            raise

    def flush(self) -> None:
        self.file.flush()
