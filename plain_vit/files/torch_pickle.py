"""Files of `torch.save`: reading only tensors from the pickle, without running code in it, and writing."""

import io
import pickletools
import re
import shlex
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import torch

from ..errors import CheckpointError, UnsafeFileError, few, shortened
from .kinds import MAX_HEADER_BYTES
from .tensors import LazyTensor, LazyTensors, UnchangedFile, check_name
from .zip_archives import data_start, opened_member, zip_members

RELEASE = torch.torch_version.TorchVersion(torch.__version__)
HAS_OFFSETS = RELEASE >= (2, 11)  # type: ignore[operator]  # torch.load records the offsets of tensors
MAX_PICKLE_OPCODES = 1_000_000  # about forty per tensor

# The names that torch.save writes for tensors. Others that torch accepts can allocate any amount of memory (bytearray,
# tensor classes) or are not dense weights (sparse, quantised and distributed tensors).
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
    *(
        f"torch {name}Storage"
        for name in ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
    ),
    *(f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}

# Objects that training scripts store with the tensors. They are read as `_Ignored`; the real classes are not imported.
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

# Keeps only the tensors of any pickle, under the same keys; `{}` stands for the code that loads it.
KEEP_TENSORS = (
    "import pickle, torch; t = lambda x: t(x.state_dict()) if hasattr(x, 'state_dict') else {{k: t(v) for k, v in "
    "x.items() if isinstance(v, dict) or hasattr(v, 'shape') or hasattr(v, 'state_dict')}} if isinstance(x, dict) "
    "else torch.as_tensor(x); torch.save(t({}), 'tensors.pt')"
)
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number of files older than torch 1.6


def _tensors_alone(path: Path) -> str:
    """Return the remedy for a pickle that plain-vit does not load, only for users who trust the file."""
    with path.open("rb") as file:
        start = file.read(64)
    by_torch = start.startswith(b"PK") or LEGACY_MAGIC in start
    loads = (
        f"torch.load({str(path)!r}, 'cpu', weights_only=False)"
        if by_torch
        else f"pickle.load(open({str(path)!r}, 'rb'))"
    )
    return (
        "If you trust the file, keep its tensors alone, where its code does no harm and the packages that it names are "
        f"installed, and give what this writes: python -c {shlex.quote(KEEP_TENSORS.format(loads))}"
    )


# The records that torch.save writes besides the pickle and the bytes of tensors, with allowed values and a description.
# torch uses some of them before it checks them: an alignment of 0 would crash the process.
RECORDS = {
    "byteorder": (rb"little", "the byte order 'little'"),
    "version": (rb"\d{1,2}\n?", "a version such as 3"),
    ".format_version": (rb"\d{1,2}", "a version such as 1"),
    ".storage_alignment": (rb"[1-9]\d{0,5}", "an alignment from 1 to 999999"),
    ".data/serialization_id": (rb"\d{1,40}", "up to 40 digits"),
}
LONGEST_RECORD = 40  # bytes


class _Ignored:
    """Placeholder for an object of a training script; accepts any state and keeps none."""

    def __new__(cls, *_: object) -> "_Ignored":
        return object.__new__(cls)

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class TorchFile:
    """A file of `torch.save`, unpickled as tensors only, without reading their bytes.

    Args:
        path: The file, either an archive (torch 1.6 and later) or the older single stream.
        is_overwritten: Whether writers may overwrite the file in place, as torch.save does.

    Raises:
        CheckpointError: The file is damaged, or uses a pickle protocol other than the default of torch.save.
        UnsafeFileError: The pickle refers to code, or this torch is too old to read any pickle safely.

    Attributes:
        tree: The saved object; with torch 2.11 or later, tensors of an archive are on the meta device.
    """

    tree: object

    def __init__(self, path: Path, is_overwritten: bool = True) -> None:
        self._is_overwritten = is_overwritten
        if RELEASE < (2, 10):  # type: ignore[operator]
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
        """Check the member names and the pickle of an archive; return the size of each record by its offset."""
        path = self._file.path
        members = zip_members(path)
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in members):
            raise UnsafeFileError(
                f"{path} is a TorchScript archive, which contains code, so nothing was loaded. If you trust the file, "
                "save its tensors in Python and give what that writes: torch.save(torch.jit.load("
                f"{str(path)!r}, map_location='cpu').float().state_dict(), 'tensors.pt')"
            )
        if len(pickles) != 1:
            raise CheckpointError(
                f"{path} is an archive without exactly one data.pkl: expected a file written by torch.save."
            )
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise CheckpointError(
                f"{path} was compressed by another program: save it again in Python, torch.save(torch.load("
                f"{str(path)!r}, weights_only=True), 'saved.pt'), and give that."
            )
        if members[pickles[0]].file_size > MAX_HEADER_BYTES:
            raise UnsafeFileError(f"{path}: a pickle of {members[pickles[0]].file_size} bytes: save only the tensors.")

        root = pickles[0].removesuffix("data.pkl")
        with opened_member(self._file, members[pickles[0]], f"{path}: the pickle") as stream:
            keys, _ = _check_pickle(io.BytesIO(stream.read()), path)
        for name in members:
            if name != pickles[0] and not name.startswith(f"{root}data/"):
                self._check_record(name, root, members[name])

        records: dict[int, int] = {}
        order: list[str] = []
        with self._file.open() as opened:
            for info in sorted(members.values(), key=lambda info: info.header_offset):
                if info.filename.startswith(f"{root}data/"):
                    start = data_start(opened, info, path)
                    records[start] = info.file_size
                    order.append(info.filename.removeprefix(f"{root}data/"))
        if f"{root}.format_version" in members and keys != order:  # in this version torch uses the order, not the names
            raise CheckpointError(f"{path} does not store its tensors in the order of its pickle: the file is damaged.")
        return records

    def _check_record(self, name: str, root: str, info: zipfile.ZipInfo) -> None:
        """Check that a record is one that torch.save writes, with a value that torch can use."""
        where = f"{self._file.path}: the record {shortened(repr(name))}"
        if (known := RECORDS.get(name.removeprefix(root))) is None or not name.startswith(root):
            raise CheckpointError(f"{where} is not one that torch.save writes: load the tensors and save them with it.")
        with opened_member(self._file, info, where) as stream:
            value = stream.read(LONGEST_RECORD + 1)
        pattern, expected = known
        if not re.fullmatch(pattern, value):
            raise CheckpointError(
                f"{where} is {value!r}; expected {expected}: the file is damaged, or of a machine of another kind."
            )

    def _check_stream(self) -> dict[int, int]:
        """Check the five pickles before the tensor bytes in a file older than torch 1.6."""
        with self._file.open() as opened:
            pickles = io.BytesIO(opened.read(MAX_HEADER_BYTES))
        # The magic number, the protocol version, the system information, the object, and the order of the storages.
        _, _, _, (keys, _), (_, listed) = [_check_pickle(pickles, self._file.path) for _ in range(5)]
        if not set(keys) <= set(listed):  # torch would leave unlisted storages uninitialized
            raise CheckpointError(f"{self._file.path} has tensors without bytes: the file is damaged.")
        return {}

    def _load(self) -> object:
        ignored = [(_Ignored, name.replace(" ", ".")) for name in sorted(IGNORED_GLOBALS)]
        location = "meta" if self._zipped and HAS_OFFSETS else "cpu"
        try:
            with (
                self._file.open() as opened,
                warnings.catch_warnings(action="ignore"),
                torch.serialization.safe_globals(ignored),  # type: ignore[arg-type]
            ):
                return torch.load(opened, map_location=location, weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # torch raises any type of error for a damaged pickle; no code was run
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise CheckpointError(
                f"{self._file.path} cannot be unpickled ({shortened(reason[0])}): it is damaged."
            ) from None

    def lazy(self, tensors: Mapping[str, torch.Tensor]) -> LazyTensors:
        """Return lazy tensors for tensors of `tree`.

        Args:
            tensors: Some of the tensors in `tree`, by the desired names.

        Returns:
            The lazy tensors, by the same names.

        Raises:
            CheckpointError: A tensor is outside the bytes stored for it.
            UnsafeFileError: The tensors are views that would take far more memory than the file has bytes.
        """
        lazy = LazyTensors({name: self._entry(name, tensor) for name, tensor in tensors.items()})
        if lazy.nbytes > 4 * self._file.size + 2**20:  # tied weights are stored once
            raise UnsafeFileError(
                f"{self._file.path} of {self._file.size} bytes holds views of {lazy.nbytes} bytes: save copies."
            )
        return lazy

    def _entry(self, name: str, tensor: torch.Tensor) -> LazyTensor:
        check_name(self._file.path, name)
        where = f"{self._file.path}: tensor {name!r}"
        tensor = torch.detach(tensor)  # drops attributes that a pickle may have set
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
        if start + span <= storage.nbytes() < tensor.numel() * dtype.itemsize:
            raise CheckpointError(
                f"{where} has {tensor.numel()} values in {storage.nbytes()} bytes, as an expanded tensor has: save "
                "it with .contiguous()."
            )
        if start + span > storage.nbytes():
            raise CheckpointError(f"{where} extends beyond its {storage.nbytes()} bytes: the file is damaged.")
        if storage.device.type != "meta":  # already read with the pickle
            return LazyTensor(shape, dtype, tensor.clone)
        offset = getattr(storage, "_checkpoint_offset", -1)  # set by torch.load on storages on the meta device
        if self._records.get(offset) != storage.nbytes():
            raise CheckpointError(f"{where} is outside the bytes that the archive stores for it: the file is damaged.")
        place = offset + start, span, dtype, shape, stride
        read, map = partial(_strided, self._file.read, *place), partial(_strided, self._file.map, *place)
        return LazyTensor(shape, dtype, read, map, self._is_overwritten)


def _strided(
    take: Callable[[int, int, torch.dtype], torch.Tensor],
    offset: int,
    span: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    return take(offset, span, dtype).as_strided(shape, stride)


def _check_pickle(stream: io.BytesIO, path: Path) -> tuple[list[str], list[str]]:
    """Check the opcodes of one pickle, without executing any.

    Returns:
        The keys of the storages in order of first use, and all strings.
    """
    names: set[str] = set()
    keys: dict[str, None] = {}
    texts: list[str] = []
    memo: dict[object, object] = {}
    top: object = None  # top of the stack if it is a string, else None
    pushed: list[object] = []  # since the last mark
    storage: list[object] = []  # items of the tuple created last
    malformed = False
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count > MAX_PICKLE_OPCODES:
                raise UnsafeFileError(f"{path}: a pickle of over {MAX_PICKLE_OPCODES} steps: save only the tensors.")
            kind = opcode.name
            if kind in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = top
                continue
            if kind == "PROTO" and argument != 2:
                raise CheckpointError(
                    f"{path} was pickled with protocol {argument}; torch reads tensors safely only from protocol 2, "
                    f"its default. {_tensors_alone(path)}"
                )
            if kind == "BINPERSID":
                key = storage[2] if len(storage) > 2 and storage[0] == "storage" else None
                if not isinstance(key, str):
                    malformed = True
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
    except Exception as error:  # pickletools raises any type of error for damaged data
        raise CheckpointError(f"{path} is not a complete pickle ({error}): it is truncated or damaged.") from None
    if blocked := sorted(names - TENSOR_GLOBALS - IGNORED_GLOBALS):
        shown = few([name.replace(" ", ".") for name in blocked], most=20)
        remedy = _tensors_alone(path)
        if any("qtensor" in name or "sparse" in name for name in blocked):
            remedy = "Save the state dict of the model before quantisation, with .to_dense() of sparse tensors."
        raise UnsafeFileError(f"{path} refers to {shown}; loading that could run code, so nothing was loaded. {remedy}")
    if malformed:
        raise CheckpointError(f"{path} does not name its storages as torch.save does: the file is damaged.")
    return list(keys), texts


def save_torch(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors with `torch.save`.

    Raises:
        OSError: The file could not be written, for example because the disk is full.
    """
    with path.open("wb") as file:
        watched = _WatchedFile(file)
        try:
            torch.save(tensors, watched)  # type: ignore[arg-type]  # torch.save uses no other methods
        except RuntimeError as error:
            raise watched.fault or error from None


class _WatchedFile:
    """A file that records the cause of a failed write, which torch's own error omits."""

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
