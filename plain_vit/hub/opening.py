"""Opening a saved folder before it is pushed, as its users will: strictly, and without running its code."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ..configuration_plain_vit import PlainViTConfig
from ..conversion.open import inspect_checkpoint
from ..conversion.tables.format import Hints
from ..errors import CheckpointError
from ..files.marks import TRAVELLING
from ..files.reading import IMAGE_PROCESSOR_CONFIG, PROCESSOR_CONFIG, image_processor_config, read_checkpoint
from ..files.safetensors import open_safetensors
from ..files.texts import parse_json
from . import adapters
from .adapters import Adapter, open_adapter

CONFIG = "config.json"


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

    @property
    def base_model(self) -> str | None:
        """Hub id of the adapter's base model; None without an adapter."""
        return None if self.adapter is None else self.adapter.base_model


def open_folder(folder: Path) -> Opened:
    """Open a folder with a model, and its image processor if it has one.

    Our models are opened with this package, every tensor accounted for; other transformers models with their class; of
    an adapter only the tensors are read. Code in the folder is parsed, not run, and must define every class named.

    Raises:
        CheckpointError: It does not open, or contains NaN; `MappingError` and other subclasses give the details.
    """
    if not (folder / adapters.SETTINGS).is_file():
        return _open_whole(folder)
    adapter = open_adapter(folder)
    _check_finite(folder, open_safetensors(folder / adapters.WEIGHTS)[0])
    opened = _open_whole(folder) if (folder / CONFIG).exists() else settings_alone(folder)
    opened.needed |= {adapters.SETTINGS, adapters.WEIGHTS}
    opened.notes.append(f"an adapter for {adapter.base_model}: its tensors were read, the model was not built")
    opened.adapter = adapter
    return opened


def settings_alone(folder: Path) -> Opened:
    """Inspect a configuration or an image processor saved without weights: settings and code."""
    config = parse_json((folder / CONFIG).read_bytes(), CONFIG) if (folder / CONFIG).is_file() else {}
    maps = (auto_map_of(settings) for settings in (config, image_processor_config(folder) or {}))
    named = {each for auto_map in maps for each in classes_of(auto_map)}
    there = {each for each in named if (folder / f"{each.split('.')[0]}.py").is_file()}
    return Opened({}, {*([CONFIG] if config else []), *_processor_files(folder), *check_code(folder, there)})


def _processor_files(folder: Path) -> set[str]:
    """Return the files with settings of the image processor; transformers prefers one of two."""
    names = {name for name in (IMAGE_PROCESSOR_CONFIG, PROCESSOR_CONFIG) if (folder / name).is_file()}
    if PROCESSOR_CONFIG in names and "image_processor" not in parse_json(
        (folder / PROCESSOR_CONFIG).read_bytes(), PROCESSOR_CONFIG
    ):
        names.remove(PROCESSOR_CONFIG)  # of a processor of text
    return names


def _open_whole(folder: Path) -> Opened:
    checkpoint = read_checkpoint(folder)
    if checkpoint.config is None:
        raise CheckpointError(f"{folder} has no {CONFIG}: give the folder of a saved model.")
    if checkpoint.kind != "safetensors":
        raise CheckpointError(
            f"{folder} has its weights in {checkpoint.files[0].name}, but only safetensors files are uploaded: run "
            "`plain-vit convert` to save them as safetensors."
        )
    config = checkpoint.config
    needed = {CONFIG, *(file.name for file in checkpoint.files)}
    needed |= {f"{name}.index.json" for name in ("model.safetensors",) if (folder / f"{name}.index.json").is_file()}
    auto_map = auto_map_of(config)
    if checkpoint.preprocessor_config is not None:
        needed |= _processor_files(folder)
        named = {*classes_of(auto_map), *classes_of(auto_map_of(checkpoint.preprocessor_config))}
    else:  # its code comes with the image processor
        named = set(classes_of({kind: value for kind, value in auto_map.items() if kind != "AutoImageProcessor"}))
    opened = Opened(config, needed | check_code(folder, named))
    foreign = sorted(name for name in opened.needed if name.endswith(".py") and not _is_ours(folder / name))
    if foreign:
        opened.notes.append(f"{', '.join(foreign)}: not the code of this version of plain-vit; it was parsed, not run")
    _open_model(folder, config, opened)
    return opened


def auto_map_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    auto_map = settings.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise CheckpointError(f"auto_map is {auto_map!r}: expected a mapping from Auto class to 'file.Class'.")
    return auto_map


def classes_of(auto_map: Mapping[str, Any]) -> Iterator[str]:
    """Yield each "file.Class" of an `auto_map`, in any of the forms that transformers reads."""
    waiting = list(auto_map.values())
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
            yield value


def check_code(folder: Path, named: set[str]) -> set[str]:
    """Return the files that define these classes, and the files in the folder that they import.

    Raises:
        CheckpointError: lists every missing file and class, and every file that is not valid Python.
    """
    faults: list[str] = []
    files: set[str] = set()
    outlines: dict[str, Outline] = {}
    waiting = sorted({each.partition(".")[0] for each in named})
    while waiting:
        module = waiting.pop()
        path = folder / f"{module}.py"
        if path.name in files or module in outlines:
            continue
        try:
            outlines[module] = _outline(path.read_bytes())
        except OSError:
            faults.append(f"{path.name} is missing")
            continue
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            faults.append(f"{path.name} is not valid Python: {error}")
            continue
        files.add(path.name)
        waiting += outlines[module].imports - outlines.keys()
    for module, name in (each.split(".") for each in sorted(named)):
        if module in outlines and name not in outlines[module].names:
            faults.append(f"{module}.py has no {name}, which auto_map refers to")
    if faults:
        lines = [f"{folder} would not open with its own code:", *(f"  - {fault}" for fault in dict.fromkeys(faults))]
        raise CheckpointError("\n".join(lines))
    return files


class Outline(NamedTuple):
    """The top-level names of a code file, and the files in its folder that it imports."""

    names: frozenset[str]
    imports: frozenset[str]


@lru_cache(maxsize=16)
def _outline(source: bytes) -> Outline:
    names, imports = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
            if node.level == 1:
                imports |= {node.module.partition(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return Outline(frozenset(names), frozenset(imports))


def _is_ours(path: Path) -> bool:
    return path.name in TRAVELLING and path.read_bytes() == TRAVELLING[path.name].read_bytes()


def _open_model(folder: Path, config: Mapping[str, Any], opened: Opened) -> None:
    model_type, architectures = config.get("model_type"), config.get("architectures")
    of_model = {kind: value for kind, value in auto_map_of(config).items() if kind != "AutoImageProcessor"}
    code = {f"{each.partition('.')[0]}.py" for each in classes_of(of_model)}
    if code - TRAVELLING.keys():
        _check_finite(folder, read_checkpoint(folder).tensors)
        opened.notes.append("the model needs its own code: its tensors were read, the model was not built")
    elif model_type != PlainViTConfig.model_type and architectures and hasattr(transformers, str(architectures[0])):
        _open_stock(folder, str(architectures[0]))
    else:
        plan, _ = inspect_checkpoint(folder, Hints(), beside_adapter=True)
        plan.load()


def _open_stock(folder: Path, name: str) -> None:
    """Open a model of transformers, of any kind, with its class."""
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
    _check_finite(folder, read_checkpoint(folder).tensors)


def _check_finite(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    broken = [
        name
        for name in tensors
        if (tensor := tensors[name]).is_floating_point() and not tensor.float().isfinite().all()
    ]
    if broken:
        raise CheckpointError(f"{folder}: {len(broken)} tensors contain NaN or infinite values, such as {broken[0]!r}.")
