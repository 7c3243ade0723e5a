"""Opening a saved folder before a push, as its users will: strictly, and without running its code."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.dynamic_module_utils import get_relative_imports

from ..configuration_plain_vit import PlainViTConfig
from ..conversion.open import inspect_checkpoint
from ..conversion.tables.engine import is_finite
from ..conversion.tables.format import Hints
from ..errors import CheckpointError
from ..files.marks import TRAVELLING
from ..files.reading import (
    IMAGE_PROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    Checkpoint,
    image_processor_config,
    read_checkpoint,
)
from ..files.safetensors import open_safetensors
from ..files.texts import parse_json
from . import adapters
from .adapters import Adapter, open_adapter

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


@dataclass
class Opened:
    """A folder that opens.

    Args:
        config: Contents of `config.json`; empty for an adapter.
        needed: The files needed to open it elsewhere: weights, settings and code.
        notes: Checks that could not be made.
        adapter: The peft adapter in the folder, if any.
    """

    config: Mapping[str, Any]
    needed: set[str]
    notes: list[str] = field(default_factory=list)
    adapter: Adapter | None = None


def open_folder(folder: Path) -> Opened:
    """Open a folder with a model, and its image processor if it has one.

    Our models are opened with this package, and every tensor must be accounted for; other transformers models are
    opened with their class; for an adapter, only the tensors are read. Code in the folder is parsed, not run, and must
    define every class named.

    Raises:
        CheckpointError: The folder does not open, or contains NaN; `MappingError` and other subclasses give details.
    """
    if not (folder / adapters.SETTINGS).is_file():
        return _open_whole(folder)
    adapter = open_adapter(folder)
    _check_finite(folder, open_safetensors(folder / adapters.WEIGHTS)[0])
    if (folder / CONFIG).exists():
        opened = _open_whole(folder)
    else:
        processor = image_processor_config(folder) or {}
        opened = Opened({}, _processor_files(folder) | _check_code(folder, _classes_of(processor)))
    opened.needed |= {adapters.SETTINGS, adapters.WEIGHTS}
    opened.notes.append(f"an adapter for {adapter.base_model}: its tensors were read, the model was not built")
    opened.adapter = adapter
    return opened


def _processor_files(folder: Path) -> set[str]:
    """Return the files with settings of the image processor, which may be in either of two files."""
    names = {name for name in (IMAGE_PROCESSOR_CONFIG, PROCESSOR_CONFIG) if (folder / name).is_file()}
    if PROCESSOR_CONFIG in names and "image_processor" not in parse_json(
        (folder / PROCESSOR_CONFIG).read_bytes(), PROCESSOR_CONFIG
    ):
        names.remove(PROCESSOR_CONFIG)  # of a processor of text
    return names


def _open_whole(folder: Path) -> Opened:
    checkpoint = read_checkpoint(folder)
    config = checkpoint.config
    if config is None:
        raise CheckpointError(f"{folder} has no {CONFIG}: give the folder of a saved model.")
    if checkpoint.kind != "safetensors":
        raise CheckpointError(
            f"{folder} has its weights in {checkpoint.files[0].name}, but only safetensors files are uploaded: run "
            "`plain-vit convert` to save them as safetensors."
        )
    needed = {CONFIG, *(file.name for file in checkpoint.files)} | ({INDEX} if (folder / INDEX).is_file() else set())
    model_code = _classes_of(config, leave_out="AutoImageProcessor")
    code = set(model_code)
    if checkpoint.preprocessor_config is not None:
        needed |= _processor_files(folder)
        code |= _classes_of(config) | _classes_of(checkpoint.preprocessor_config)
    opened = Opened(config, needed | _check_code(folder, code))
    foreign = sorted(name for name in opened.needed if name.endswith(".py") and not _is_ours(folder / name))
    if foreign:
        opened.notes.append(f"{', '.join(foreign)}: not the code of this version of plain-vit; it was parsed, not run")
    _open_model(folder, checkpoint, model_code, opened)
    return opened


def _classes_of(settings: Mapping[str, Any], *, leave_out: str = "") -> set[str]:
    """Return each "file.Class" of an `auto_map`, in any of the forms that transformers reads."""
    auto_map = settings.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise CheckpointError(f"auto_map is {auto_map!r}: expected a mapping from Auto class to 'file.Class'.")
    named: set[str] = set()
    waiting = [value for kind, value in auto_map.items() if kind != leave_out]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += list(value.values() if isinstance(value, dict) else value)
        elif value is not None:
            parts = value.split(".") if isinstance(value, str) else []
            if len(parts) != 2 or not all(map(str.isidentifier, parts)):
                raise CheckpointError(
                    f"auto_map has {value!r}: expected a file in the folder and a class, 'file.Class'."
                )
            named.add(value)
    return named


def _check_code(folder: Path, named: set[str]) -> set[str]:
    """Return the files that define these classes, and the files in the folder that they import.

    Raises:
        CheckpointError: A file or class is missing, or a file is not valid Python; the message lists all of them.
    """
    faults: list[str] = []
    defined: dict[str, set[str] | None] = {}
    waiting = sorted({each.partition(".")[0] for each in named})
    while waiting:
        module = waiting.pop()
        path = folder / f"{module}.py"
        if module in defined:
            continue
        defined[module] = None
        try:
            defined[module] = _defined_names(path.read_bytes())
            waiting += get_relative_imports(path)
        except OSError:
            faults.append(f"{path.name} is missing")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            faults.append(f"{path.name} is not valid Python: {error}")
    for module, name in (each.split(".") for each in sorted(named)):
        if (names := defined[module]) is not None and name not in names:
            faults.append(f"{module}.py has no {name}, which auto_map refers to")
    if faults:
        lines = [f"{folder} would not open with its own code:", *(f"  - {fault}" for fault in faults)]
        raise CheckpointError("\n".join(lines))
    return {f"{module}.py" for module in defined}


@lru_cache(maxsize=16)
def _defined_names(source: bytes) -> set[str]:
    """Return the names that code defines or imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _is_ours(path: Path) -> bool:
    return path.name in TRAVELLING and path.read_bytes() == TRAVELLING[path.name].read_bytes()


def _open_model(folder: Path, checkpoint: Checkpoint, named: set[str], opened: Opened) -> None:
    architecture = str((opened.config.get("architectures") or [None])[0])
    if {f"{each.partition('.')[0]}.py" for each in named} - TRAVELLING.keys():
        _check_finite(folder, checkpoint.tensors)
        opened.notes.append("the model needs its own code: its tensors were read, the model was not built")
    elif opened.config.get("model_type") != PlainViTConfig.model_type and hasattr(transformers, architecture):
        _check_opens(folder, architecture)
        _check_finite(folder, checkpoint.tensors)
    else:
        plan, _ = inspect_checkpoint(folder, Hints(), beside_adapter=True)
        plan.load()


def _check_opens(folder: Path, name: str) -> None:
    """Open a transformers model of any type with its class."""
    try:
        _, report = getattr(transformers, name).from_pretrained(
            folder, output_loading_info=True, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # every model raises its own errors
        lines = str(error).splitlines() or [""]
        raise CheckpointError(f"{folder} does not open as {name}: {type(error).__name__}: {lines[0]}") from error
    faults = [f"{len(names)} tensors are {kind.removesuffix('_keys')}: {sorted(map(str, names))[0]}, ..."
              for kind, names in report.items() if kind.endswith("_keys") and names]  # fmt: skip
    if faults:
        raise CheckpointError(f"{folder} does not open as {name}: {'; '.join(faults)}")


def _check_finite(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    broken = [name for name in tensors if not is_finite(tensors[name])]
    if broken:
        raise CheckpointError(f"{folder}: {len(broken)} tensors contain NaN or infinite values, such as {broken[0]!r}.")
