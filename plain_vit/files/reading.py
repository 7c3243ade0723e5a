"""Reading checkpoints from any location: a file, a folder in one of the known layouts, or a repository on the Hub.

The type of a file is determined by its content, and its name must match. Nothing in a checkpoint is executed, no path
in it may leave its folder, and an ambiguous checkpoint is never guessed at: the caller must choose.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import huggingface_hub
import torch
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError

from ..errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    HubError,
    UnknownFormatError,
    UnsafeFileError,
    few,
    listed,
    shortened,
)
from .gguf import open_gguf
from .kinds import SUFFIXES, WEIGHTS, kind_of, path_of
from .npz import open_npz
from .other_files import ALONE, described_archive, described_folder
from .safetensors import open_safetensors
from .tensors import MAX_TENSORS, LazyTensor, LazyTensors
from .texts import parse_json, read_small_file
from .torch_pickle import TorchFile
from .zip_archives import zip_members

T = TypeVar("T")

# The folder layouts of transformers and timm, and of open_clip, in order of preference, then the file names on the Hub.
LAYOUTS = (
    ("model", ".safetensors"),
    ("pytorch_model", ".bin"),
    ("open_clip_model", ".safetensors"),
    ("open_clip_pytorch_model", ".bin"),
)
OPEN_CLIP_CONFIG = "open_clip_config.json"
# Settings of the image processor: since transformers 5, a processor of several modalities contains those of each.
PROCESSOR_CONFIG, IMAGE_PROCESSOR_CONFIG = "processor_config.json", "preprocessor_config.json"
ADAPTER_CONFIG = "adapter_config.json"
COMPANIONS = [
    "config.json",
    OPEN_CLIP_CONFIG,
    PROCESSOR_CONFIG,
    IMAGE_PROCESSOR_CONFIG,
    ADAPTER_CONFIG,
    "README.md",
    "LICEN[CS]E*",
    "COPYING*",
    "NOTICE*",
]
HUB_PATTERNS = (
    *([stem + suffix, f"{stem}{suffix}.index.json", f"{stem}-*-of-*{suffix}"] for stem, suffix in LAYOUTS),
    ["*.npz"],
    ["*mmproj*.gguf"],  # vision towers, beside language models
)
SHARD = re.compile(r"-\d+-of-\d+\.")
NOT_WEIGHTS = re.compile(r"optimizer|scheduler|scaler|sampler|training_args|rng_state|random_states|adapter_model")

# Fields of a config.json that are counts or sizes, by the names of every package. Each layer, block or branch has at
# least one tensor.
COUNTS = re.compile(
    r"depths?|(.*_)?(layers|blocks|branches|classes|labels|heads|tokens|dim|size|features|width|channels)"
)
LAYER_COUNTS = re.compile(r"(stem_)?depths?|(num_|n_)?(hidden_)?(layers|blocks)|num_branches")
LABEL_COUNTS = re.compile(r"num_(classes|labels)")
LABEL_TABLES = ("id2label", "label2id", "label_names", "labels", "label_descriptions")
MAX_COUNT, MAX_LAYERS, MAX_FIELDS = 1_000_000, 1000, 10_000
MAX_LABELS = 50_000  # for a model without a head, whose configuration may keep the labels of another model
LAYER_NUMBER = re.compile(r"(?:^|[./_])(\d+)(?=[./]|$)")  # as in blocks.7.norm1 and encoder_layer_7/ln
ATTENTION_CHOICES = ("_attn_implementation", "attn_implementation")

# Entries of a training checkpoint that contain tensors but never a model.
NOT_A_MODEL = re.compile(r"optim|sched|scaler|loss|callback|rng|loops|hyper_?param|hparam", re.IGNORECASE)

# Modules that training code wraps around a model; TRANSPARENT ones are also removed in the middle of a name.
TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
WRAPPERS = (
    *TRANSPARENT,
    *("module", "model", "timm_model", "net", "network", "vit", "encoder", "backbone", "trunk"),
    *("student", "student_encoder", "teacher", "teacher_encoder", "ema", "ema_model", "model_ema", "online_model"),
)
COUNTERS = ("n_averaged", "initted", "step")  # of torch's AveragedModel and of ema-pytorch
# Modules that a Lightning module has besides its model: losses, and metrics with their counts.
LOSSES_AND_METRICS = re.compile(
    r"((train|training|val|valid|validation|eval|test)_?)?(top_?\d+_?)?"
    r"(acc|accuracy|loss|losses|criterion|metrics?|f1|f1_?score|auroc|auc|confmat|confusion_matrix|precision|recall)"
    r"(_(fn|func|function|train|val|test|best|top_?\d+))?\d*",
    re.IGNORECASE,
)

# Two of these next to each other are two models of the same kind, and only the user can choose.
RIVALS = {
    *("student", "student_encoder", "teacher", "teacher_encoder", "model", "online_model", "ema", "ema_model"),
    *("model_ema", "online_encoder", "target_encoder", "context_encoder", "momentum_encoder", "base_encoder"),
    *("encoder_q", "encoder_k"),
}


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: headers have been read and checked, tensors are read on access.

    Attributes:
        tensors: The tensors by their names in the file. `.meta()` gives shapes and dtypes without reading.
        kind: `"safetensors"`, `"torch"`, `"npz"` or `"gguf"`.
        files: The files that contain the tensors.
        config: Contents of the folder's `config.json` or `open_clip_config.json`, or the settings in a GGUF file; None
            for another single file.
        preprocessor_config: Settings of the image processor that `AutoImageProcessor` finds in the folder; None for a
            single file.
        has_adapter: Whether the folder has an adapter of peft, which transformers applies to the weights.
        wrappers: Keys under which the tensors were nested in a training checkpoint, outermost first.
        notes: Choices made and content skipped while opening, for the report.
    """

    tensors: LazyTensors
    kind: str
    files: tuple[Path, ...]
    config: dict[str, Any] | None = None
    preprocessor_config: dict[str, Any] | None = None
    has_adapter: bool = False
    wrappers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Stripped(NamedTuple):
    """The result of `strip_wrappers`: the short form of each name, the removed prefixes, and the skipped counters."""

    names: dict[str, str]
    prefixes: tuple[str, ...]
    counters: tuple[str, ...]


def read_checkpoint(
    source: str | os.PathLike[str], *, key: str | None = None, revision: str | None = None, prefer: str = ""
) -> Checkpoint:
    """Open a checkpoint and check everything that can be checked without reading its tensors.

    Args:
        source: A `.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt`, `.npz` or `.gguf` file; a folder in the layout of
            transformers or timm; or the id of a Hub repository, from which weights and configuration are downloaded,
            never code.
        key: The model to use if the file contains several: a key of the saved dictionary (`"state_dict_ema"`), a
            prefix of the names (`"teacher.backbone"`), or `"."` for everything that is not nested.
        revision: Branch, tag or commit, for a Hub repository.
        prefer: First words of the file to read where a folder has the weights in several layouts: "open_clip".

    Returns:
        The checkpoint; each tensor is read on access.

    Raises:
        CheckpointError: The file does not exist, is truncated or damaged, or does not match its name.
        UnsafeFileError: Reading it could run code, leave its folder or exhaust the memory.
        AmbiguousCheckpointError: It contains several models; choose one with `key`.
        HubError: The repository cannot be downloaded.
    """
    path = Path(os.path.expanduser(source))
    try:
        if path_of(source) is None:
            path = _download(os.fspath(source), revision, prefer)
        elif revision is not None:
            raise CheckpointError(f"{path} is a local path and has no revision {revision!r}: omit the revision.")
        return _read_folder(Path(os.path.realpath(path)), key, prefer) if path.is_dir() else _read_file(path, key)
    except HubError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror}.") from error


def download_settings(repo_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of a Hub repository and the settings of its image processor, without its weights.

    Raises:
        CheckpointError: They are not JSON objects.
        UnsafeFileError: They describe a model that is too large.
        HubError: The repository cannot be downloaded.
    """
    folder = _snapshot(repo_id, None, [])
    name = "config.json" if os.path.lexists(folder / "config.json") else OPEN_CLIP_CONFIG
    config = _read_json(folder, name) or {}
    _check_config(config, folder / name, {"labels": MAX_LABELS, "layers": MAX_LAYERS})
    return config, image_processor_config(folder) or {}


def _download(repo_id: str, revision: str | None, prefer: str) -> Path:
    """Download the configuration, and the weights in the safest format that the repository has."""
    for patterns in sorted(HUB_PATTERNS, key=lambda patterns: not patterns[0].startswith(prefer)):
        folder = _snapshot(repo_id, revision, patterns)
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return folder
    raise UnknownFormatError(
        f"The Hub repository {repo_id} has no weights that plain-vit reads: expected one of {HUB_PATTERNS}."
    )


def _snapshot(repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download the files with these names, and the configuration."""
    try:
        patterns = [*COMPANIONS, *patterns]
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except (OSError, EntryNotFoundError, HFValidationError, HTTPError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise HubError(
            f"{repo_id} is neither a file or folder here nor could it be fetched from the Hub: {reason[0]} "
            "Check the name and the network; a private or gated repository needs `hf auth login`."
        ) from error


# ---- folders ----


def _read_folder(folder: Path, key: str | None, prefer: str) -> Checkpoint:
    notes: list[str] = []
    name = _weights_of(folder, prefer, notes)
    if name.endswith(".index.json"):
        checkpoint = _read_shards(folder, name)
        tensors, wrappers = _narrowed(checkpoint.tensors, key, folder)
        checkpoint = replace(checkpoint, tensors=tensors, wrappers=wrappers)
    else:
        checkpoint = _read_file(inside(folder, name), key, name)
    # A folder may have weights for several packages, each with its own configuration.
    is_open_clip = name.startswith("open_clip_") or not os.path.lexists(folder / "config.json")
    config_name = OPEN_CLIP_CONFIG if is_open_clip else "config.json"
    config = checkpoint.config or _read_json(folder, config_name)
    if config is not None and checkpoint.config is None:
        shapes = (entry.shape for entry in checkpoint.tensors.entries.values())
        longest = max((size for shape in shapes for size in shape), default=0)
        most_layers = max(len(checkpoint.tensors), MAX_LAYERS)
        _check_config(config, folder / config_name, {"labels": max(longest, MAX_LABELS), "layers": most_layers})
        config = {name: value for name, value in config.items() if name not in ATTENTION_CHOICES}
    return replace(
        checkpoint,
        config=config,
        preprocessor_config=image_processor_config(folder),
        has_adapter=os.path.lexists(folder / ADAPTER_CONFIG),
        notes=(*notes, *checkpoint.notes),
    )


def _weights_of(folder: Path, prefer: str, notes: list[str]) -> str:
    """Return the name of the folder's weights file, or of the index of its shards."""
    names = sorted(entry.name for entry in folder.iterdir())
    found = []
    for stem, suffix in sorted(LAYOUTS, key=lambda layout: not layout[0].startswith(prefer)):
        single, index = f"{stem}{suffix}", f"{stem}{suffix}.index.json"
        shards = [name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+{re.escape(suffix)}", name)]
        if single in names and (index in names or shards):
            rest = ", ".join([index] * (index in names) + shards[:3])
            raise CheckpointError(
                f"{folder} contains both {single} and {rest}: one of them is left over from an earlier save, and "
                "nothing tells which one. Delete the stale files, or give the file itself."
            )
        if shards and index not in names:
            raise CheckpointError(
                f"{folder} contains {shards[0]} but no {index}: copy or download the whole folder again."
            )
        found += [name for name in (single, index) if name in names]
    others = [name for name in names if name.endswith(WEIGHTS) and not NOT_WEIGHTS.search(name)]
    if found:
        others = [name for name in others if name != found[0] and not SHARD.search(name)]
        if beside := [*(name for name in found[1:] if name not in others), *others]:
            notes.append(f"{found[0]} was read and {few(beside)} ignored")
        return found[0]
    if not others:
        raise _no_weights(folder, names)
    if len(others) > 1:
        candidates = {"source": [str(folder / name) for name in others]}
        raise AmbiguousCheckpointError(f"{folder} holds several checkpoints; give one of them:", candidates)
    return others[0]


def _no_weights(folder: Path, names: Sequence[str]) -> Exception:
    """Return the error for a folder without a weights file, as specific as the names in it allow."""
    if (described := described_folder(folder, names)) is not None:
        return CheckpointError(f"{folder} is {described}")
    for name in filter(ALONE.fullmatch, names):
        try:
            _kind(inside(folder, name))
        except CheckpointError as error:
            return error
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and _has_weights(path)]
    if below:
        message = f"{folder} holds no weights itself; give one of the folders in it that do:"
        return AmbiguousCheckpointError(message, {"source": list(map(str, below))})
    return CheckpointError(f"{folder} holds no weights: expected model.safetensors, pytorch_model.bin or the like.")


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has weights in a known layout, or in a layout that a specific error explains."""
    names = [entry.name for entry in folder.iterdir()]
    layouts = {f"{stem}{suffix}{end}" for stem, suffix in LAYOUTS for end in ("", ".index.json")}
    return not layouts.isdisjoint(names) or described_folder(folder, names) is not None


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; refuse a link that leads out of the folder."""
    path = folder / name
    real = Path(os.path.realpath(path))  # pathlib's own raises for a link to itself
    homes = [folder]
    if folder.parent.name == "snapshots":  # the Hub's cache links from its snapshots to its blobs
        homes.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise UnsafeFileError(f"{path} is a link that leads out of its folder, to {real}: give that file itself.")
    if not real.is_file():
        raise CheckpointError(f"{path} is missing or not a regular file: copy or download the folder again.")
    return path


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    if not os.path.lexists(folder / name):
        return None
    path = inside(folder, name)
    return parse_json(read_small_file(path), str(path))


def image_processor_config(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a folder's image processor, from the file that transformers prefers; None without one.

    Raises:
        CheckpointError: The settings are not a JSON object.
    """
    nested = (_read_json(folder, PROCESSOR_CONFIG) or {}).get("image_processor")
    if nested is None:
        return _read_json(folder, IMAGE_PROCESSOR_CONFIG)
    if not isinstance(nested, dict):
        raise CheckpointError(
            f"{folder / PROCESSOR_CONFIG} has image_processor = {nested!r}: expected an object with its settings."
        )
    return nested


def _check_config(config: Mapping[str, Any], path: Path, limits: Mapping[str, int]) -> None:
    """Refuse a configuration whose model would be too large, or whose attention code would be downloaded."""
    if len(config) > MAX_FIELDS:
        raise UnsafeFileError(f"{path} has {len(config)} fields in one object: expected at most {MAX_FIELDS}.")
    for name, value in config.items():
        if name in ATTENTION_CHOICES and "/" in str(value):
            raise UnsafeFileError(
                f"{path} requests the attention code of {value!r}: remove {name}, no code is fetched."
            )
        if name in LABEL_TABLES and isinstance(value, dict | list):
            if len(value) > limits["labels"]:
                raise UnsafeFileError(
                    f"{path} has {len(value)} labels in {name}, but no tensor is longer than {limits['labels']}."
                )
            continue
        if isinstance(value, dict):
            _check_config(value, path, limits)
        for count in value if isinstance(value, list) else [value]:
            if not isinstance(count, (int, float)):
                continue
            if COUNTS.fullmatch(name) and not abs(count) <= MAX_COUNT:
                raise UnsafeFileError(f"{path} has {name} = {count}: expected at most {MAX_COUNT}.")
            if LAYER_COUNTS.fullmatch(name) and count > limits["layers"]:
                raise UnsafeFileError(
                    f"{path} has {name} = {count}: expected at most {limits['layers']}, the number of tensors."
                )
            if LABEL_COUNTS.fullmatch(name) and count > limits["labels"]:
                raise UnsafeFileError(f"{path} has {name} = {count}, but no tensor is longer than {limits['labels']}.")


def _read_shards(folder: Path, index_name: str) -> Checkpoint:
    """Open the shards listed in an index, and compare the tensors of each with the index."""
    weight_map = (_read_json(folder, index_name) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{folder / index_name} has no weight_map from tensor names to file names: it is damaged."
        )
    if not weight_map or len(weight_map) > MAX_TENSORS:
        raise UnsafeFileError(f"{folder / index_name} names {len(weight_map)} tensors; expected 1 to {MAX_TENSORS}.")
    suffix = "." + index_name.removesuffix(".index.json").rsplit(".", 1)[1]
    shards = sorted(set(weight_map.values()))
    for name in shards:
        if Path(name).name != name or "\\" in name or not name.endswith(suffix):
            raise UnsafeFileError(
                f"{folder / index_name} points to {name!r}: expected the name of a {suffix} file in the same folder."
            )

    entries: dict[str, LazyTensor] = {}
    kind, faults = "", []
    for name in shards:
        if not os.path.lexists(folder / name):
            faults.append(f"{name} is missing")
            continue
        shard = _read_file(inside(folder, name), ".", name)
        kind = shard.kind
        named = {tensor for tensor, file in weight_map.items() if file == name}
        faults += [f"{name} lacks {tensor!r}, which the index assigns to it" for tensor in named - set(shard.tensors)]
        faults += [
            f"{name} contains {tensor!r}, which the index does not assign to it"
            for tensor in set(shard.tensors) - named
        ]
        entries.update(shard.tensors.entries)
    stem = index_name.split(".", 1)[0]
    unlisted = {path.name for path in folder.glob(f"{stem}-*-of-*{suffix}")} - set(shards)
    faults += [f"{name} is not in the index: it is left over from another save" for name in unlisted]
    if faults:
        found = "; ".join(map(shortened, sorted(faults)[:20]))
        raise CheckpointError(
            f"{folder / index_name} does not match the shards: {found}. Copy or download the folder again."
        )
    return Checkpoint(LazyTensors(entries), kind, tuple(folder / name for name in shards))


# ---- files ----


def _read_file(path: Path, key: str | None, name: str | None = None) -> Checkpoint:
    """Open one file, named `name` in its folder."""
    kind = _kind(path)
    name = name or path.name
    if not name.endswith(SUFFIXES[kind]):
        known = " or ".join(SUFFIXES[kind])
        raise CheckpointError(
            f"{path} is a {kind} file by its content: rename it to end in {known}, or check its source."
        )
    if kind == "torch":
        file = TorchFile(path, is_overwritten=not _is_in_hub_cache(path))
        state_dict, wrappers, notes = _find_state_dict(file.tree, key, path)
        return Checkpoint(file.lazy(state_dict), kind, (path,), wrappers=wrappers, notes=notes)
    settings, notes = None, ()
    if kind == "gguf":
        tensors, settings, notes = open_gguf(path)
    else:
        tensors = open_safetensors(path)[0] if kind == "safetensors" else open_npz(path)
    if not tensors:
        raise CheckpointError(f"{path} contains no tensors: expected the weights of a model.")
    tensors, wrappers = _narrowed(tensors, key, path)
    return Checkpoint(tensors, kind, (path,), settings, wrappers=wrappers, notes=notes)


def _is_in_hub_cache(path: Path) -> bool:
    """Return whether a file is a link to a blob in the Hub's cache, which is named by its content and never changes."""
    home = path.parent.parent
    return (
        path.is_symlink() and home.name == "snapshots" and Path(os.path.realpath(path)).parent == home.parent / "blobs"
    )


def _kind(path: Path) -> str:
    """Return the type of a file, by its first bytes."""
    kind = kind_of(path)
    return _kind_of_archive(path) if kind == "zip" else kind


def _kind_of_archive(path: Path) -> str:
    """Return the type of a zip archive, by the names of its members."""
    members = zip_members(path)
    if any(name.endswith(("/data.pkl", "/constants.pkl")) for name in members):
        return "torch"
    if (described := described_archive(members)) is not None:
        raise CheckpointError(f"{path} is {described}")
    if path.suffix != ".npz" and not any(name.endswith(".npy") for name in members):
        held = listed(list(members)) or "nothing"
        raise CheckpointError(f"{path} is a zip archive of {held}, not of tensors: unpack it, and give the weights.")
    return "npz"


# ---- finding the model in a saved object ----


def _find_state_dict(
    tree: object, key: str | None, path: Path
) -> tuple[dict[str, torch.Tensor], tuple[str, ...], tuple[str, ...]]:
    """Return the model's tensors, the keys under which they were nested, and notes on skipped content."""
    found = {".".join(where): (where, table) for where, table in _state_dicts(tree, path)}
    if key == "." and isinstance(tree, dict):
        found = {"": ((), tree)}
    if not found:
        held = listed(list(tree)) if isinstance(tree, dict) else type(tree).__name__
        raise UnknownFormatError(f"{path} contains no dictionary of named tensors but {held}: expected a state dict.")
    rest = ""
    if key is None:
        if len({id(table) for _, table in found.values()}) > 1:
            candidates = {"key": [name or "." for name in found]}
            raise AmbiguousCheckpointError(
                f"{path} contains several sets of tensors; which one is the model?", candidates
            )
        where, table = next(iter(found.values()))
    else:
        asked = "" if key == "." else key
        outer = [name for name in found if asked == name or not name or asked.startswith(f"{name}.")]
        if not outer:
            raise CheckpointError(f"{path} has nothing called {key!r}; it holds {listed(list(found))}.")
        name = max(outer, key=len)
        where, table = found[name]
        rest = asked[len(name) :].lstrip(".")
    tensors = {
        name: value for name, value in table.items() if isinstance(name, str) and isinstance(value, torch.Tensor)
    }
    others = [str(name) for name in table if name not in tensors]
    notes = (f"ignored entries that are not tensors: {few(others, most=20)}",) if others else ()
    if rest:
        return _below(rest, tensors, key, path), (*where, rest), notes
    if key is None:
        _check_rivals(tensors, where, path)
    return tensors, where, notes


def _state_dicts(tree: object, path: Path) -> list[tuple[tuple[str, ...], dict[Any, Any]]]:
    """Return every nested dictionary that could be a state dict, with the keys that lead to it."""
    found = []
    queue: list[tuple[tuple[str, ...], object]] = [((), tree)]
    for where, node in queue:
        if not isinstance(node, dict):
            continue
        tensors = [value for name, value in node.items() if isinstance(name, str) and isinstance(value, torch.Tensor)]
        if len(tensors) > 1 and any(tensor.ndim > 1 for tensor in tensors):
            found.append((where, node))
        if len(where) < 4:
            queue += [
                ((*where, name), value)
                for name, value in node.items()
                if isinstance(name, str) and isinstance(value, dict) and not NOT_A_MODEL.search(name)
            ]
        if len(queue) > MAX_TENSORS:
            raise UnsafeFileError(f"{path} nests over {MAX_TENSORS} dictionaries: save the state dict alone.")
    return found


def _narrowed(tensors: LazyTensors, key: str | None, path: Path) -> tuple[LazyTensors, tuple[str, ...]]:
    """Return the tensors whose names begin with the key, and that prefix."""
    if key is None:
        _check_rivals(tensors, (), path)
    if key is None or key == ".":
        return tensors, ()
    return LazyTensors(_below(key, tensors.entries, key, path)), (key,)


def _below(place: str, tensors: Mapping[str, T], key: str | None, path: Path) -> dict[str, T]:
    """Return the tensors under a prefix, by the rest of their names."""
    prefix = f"{place}."
    chosen = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not chosen:
        raise CheckpointError(f"{path} has no tensor whose name begins with {prefix!r}, as key={key!r} requires.")
    return chosen


def _check_rivals(names: Iterable[str], where: tuple[str, ...], path: Path) -> None:
    """Refuse two models next to each other in one state dict."""
    split = [name.split(".") for name in names]
    depth = len(list(takewhile(lambda column: len(set(column)) == 1, zip(*split, strict=False))))
    heads = Counter(tuple(parts[: depth + 1]) for parts in split if len(parts) > depth + 1)
    rivals = [".".join((*where, *head)) for head, count in heads.items() if head[-1] in RIVALS and count > 1]
    if len(rivals) > 1:
        raise AmbiguousCheckpointError(
            f"{path} contains several models side by side; which one should be used (or any longer prefix)?",
            {"key": rivals},
        )


def check_layer_numbers(names: Collection[str], source: str) -> None:
    """Refuse a layer number higher than any model has, since that many layers would be built.

    Raises:
        UnsafeFileError: A number is too high; the message names the tensor.
    """
    for name in names:
        for number in LAYER_NUMBER.findall(name):
            if len(number) > 9 or int(number) >= MAX_LAYERS:
                raise UnsafeFileError(
                    f"{source} has a tensor {name!r}, number {number} of its kind, and {len(names)} tensors in all: "
                    f"expected fewer than {MAX_LAYERS} layers"
                )


def losses_and_metrics(tensors: LazyTensors) -> list[str]:
    """Return the names of the tensors of losses and metrics next to a model, which do not affect its outputs.

    Floating point matrices are excluded: a loss with learned classes (ArcFace) contains the classifier.
    """
    return [
        name
        for name, tensor in tensors.entries.items()
        if "." in name and LOSSES_AND_METRICS.fullmatch(name.partition(".")[0])
        if len(tensor.shape) < 2 or not tensor.dtype.is_floating_point
    ]


def strip_wrappers(names: Iterable[str]) -> Stripped:
    """Remove the prefixes that training code adds to tensor names.

    A prefix (`module.`, `_orig_mod.`, `model.`, ... see `WRAPPERS`) is removed, repeatedly, only if every name has it;
    those in `TRANSPARENT`, such as `_orig_mod`, are removed anywhere. Counters of averaged models are separated.

    Args:
        names: The names of all tensors.

    Returns:
        The short form of each name, in the same order; the prefixes, outermost first; the counters.

    Raises:
        CheckpointError: Two short names are the same.
    """
    names = list(names)
    counters = tuple(name for name in names if name in COUNTERS)
    split = {
        name: [part for part in name.split(".") if part not in TRANSPARENT] for name in names if name not in counters
    }
    prefixes = sorted({part for name in names for part in name.split(".") if part in TRANSPARENT})
    while split and all(len(parts) > 1 for parts in split.values()):
        heads = {parts[0] for parts in split.values()}
        if len(heads) > 1 or not heads <= set(WRAPPERS):
            break
        prefixes += heads
        split = {name: parts[1:] for name, parts in split.items()}
    short = {name: ".".join(parts) for name, parts in split.items()}
    if len(set(short.values())) < len(short):
        twice = next(name for name, count in Counter(short.values()).items() if count > 1)
        raise CheckpointError(f"Two tensors are named {twice!r} after removing their wrappers: choose one with key=.")
    return Stripped(short, tuple(prefixes), counters)
