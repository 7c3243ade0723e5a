"""Files and folders with weights that plain-vit does not read: what each one is, and what to do.

They are recognised by their first bytes, by their names if the bytes say little, and by the members of an archive;
nothing else in them is read.
"""

import os
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

MADE_FROM = "give the checkpoint that it was made from"
ELSEWHERE = "plain-vit opens no model of it. Give PyTorch or JAX (.npz) weights of the same model"
AS_ARRAYS = "save its arrays as an .npz (numpy.savez), each under its path with slashes"
# transformers 5 reads neither format; version 4 wrote them next to a config.json that names the class.
BEFORE_5 = (
    "Version 4 of transformers converts it, with {0} installed: CLASS.from_pretrained({{python}}, from_{1}=True)"
    ".save_pretrained('converted'), where CLASS is the class that config.json names"
)


DESCRIPTION = "engine.json"  # of a folder that was exported to an inference engine


class Other(NamedTuple):
    """A kind of file.

    Args:
        name: Regular expression for the file's name.
        start: Regular expression for its first bytes.
        says: What the file is and what to do; `{shell}` and `{python}` are its folder, quoted.
    """

    name: str
    start: bytes
    says: str


# The first match counts.
OTHERS = (
    Other(".*", rb"version https://git-lfs",
          "a Git LFS pointer, not the file itself: run `git lfs pull`, or download it again"),
    Other(".*", rb"\x93NUMPY", "a single numpy array: save the checkpoint as an .npz of several"),
    Other(r"tf_model\.h5", rb"\x89HDF",
          "an HDF5 file of transformers for TensorFlow. " + BEFORE_5.format("TensorFlow", "tf")),
    Other(".*", rb"\x89HDF", f"an HDF5 file, as Keras writes it: {ELSEWHERE}"),
    Other(r"flax_model\.msgpack", rb"[\x80-\x8f\xde\xdf]",
          "a msgpack file of transformers for Flax. " + BEFORE_5.format("Flax", "flax")),
    Other(r".*\.msgpack", rb"[\x80-\x8f\xde\xdf]", f"a msgpack file, as Flax writes it: {AS_ARRAYS}"),
    Other(".*", rb"....(TFL3|ET\d\d)|ptrt", f"a compiled program, not a checkpoint: {MADE_FROM}"),
    Other(r".*\.(engine|plan|trt|pte|tflite|mlmodel)", b"", f"a compiled program, not a checkpoint: {MADE_FROM}"),
    Other(".*", rb"\s*(<\?xml[^>]*>\s*)?<net\s", f"a graph of OpenVINO, not a checkpoint: {MADE_FROM}"),
    Other(".*", rb"\s*<", "an HTML or XML page, such as a login or error page: download the file itself"),
    Other(".*", rb"\s*\{", "a JSON file: give its folder, or the file with the weights"),
    Other(".*", rb"\x1f\x8b", "compressed with gzip: unpack it first"),
    Other(r"saved_model\.pb|.*\.ckpt.*\.(index|meta)|.*\.data-\d+-of-\d+", b"", f"a file of TensorFlow: {ELSEWHERE}"),
    Other(r".*\.onnx", rb"[\x08\x0a]", f"an ONNX graph, which has lost the names of the layers: {MADE_FROM}"),
    Other(".*", rb"\x08[\x01-\x20][\x12\x1a\x22\x3a]", f"an ONNX graph or a message like it: {MADE_FROM}"),
)  # fmt: skip

# Archives, by a member that identifies them.
ARCHIVES = (
    (r"(.*/)?model\.weights\.h5", f"an archive of Keras: {ELSEWHERE}"),
    (r"(.*/)?(models/.*\.json|serialized_exported_program\.(json|pt)|archive_format)",
     f"a program written by torch.export, not a checkpoint: {MADE_FROM}"),
)  # fmt: skip

DCP = (
    "a checkpoint of torch.distributed.checkpoint (files .metadata and *.distcp). If you trust it, because .metadata "
    "is a pickle that can run code, join it into one file and give that: python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch {shell} joined.pt"
)
# Folders, by an entry that identifies them.
FOLDERS = (
    (r"\.metadata|.*\.distcp", DCP),
    (r"zero_to_fp32\.py|.*zero_pp_rank_\d+_mp_rank_\d+_(optim|model)_states\.pt",
     "a checkpoint of DeepSpeed's ZeRO, in shards. Join them in the folder that has zero_to_fp32.py, with DeepSpeed "
     "installed, and give what it writes: python zero_to_fp32.py . joined"),
    (r"adapter_model\.(safetensors|bin)",
     "an adapter of peft without the model that it adapts: merge the two, save the result and give that: "
     "peft.PeftModel.from_pretrained(model, {python}).merge_and_unload().save_pretrained('merged')"),
    (r"_METADATA|manifest\.ocdbt|_CHECKPOINT_METADATA", f"an Orbax checkpoint: restore it, then {AS_ARRAYS}"),
    (r"saved_model\.pb|.*\.data-\d+-of-\d+", f"a model of TensorFlow: {ELSEWHERE}"),
)  # fmt: skip
# Names of files that are described one by one if a folder holds nothing else.
ALONE = re.compile(r".*\.(onnx|h5|hdf5|keras|msgpack|tflite|pte|engine|plan|trt|xml|pt2)", re.DOTALL)


def described_file(path: Path, start: bytes) -> str | None:
    """Describe a file that plain-vit does not read, and what to do; None if it is not recognised.

    Args:
        path: The file.
        start: Its first bytes.
    """
    if is_part_of_dcp(path):
        return f"part of {_in(DCP, path.parent)}"
    for name, begins, says in OTHERS:
        if re.fullmatch(name, path.name, re.DOTALL) and re.match(begins, start, re.DOTALL):
            return _in(says, path.parent)
    return None


def is_part_of_dcp(path: Path) -> bool:
    """Return whether a file is named like a part of a checkpoint of torch.distributed.checkpoint."""
    return path.suffix == ".distcp" or path.name == ".metadata"


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that was exported to an engine, without a checkpoint next to the graph."""
    exported = os.path.isfile(Path(path, DESCRIPTION))  # False for an invalid name
    return exported and not any(any(Path(path).glob(names)) for names in ("*.safetensors", "pytorch_model*.bin"))


def described_archive(members: Collection[str]) -> str | None:
    """Describe a zip archive that plain-vit does not read, and what to do; None if it is not recognised."""
    return next(
        (says for member, says in ARCHIVES if any(re.fullmatch(member, name, re.DOTALL) for name in members)), None
    )


def described_folder(folder: Path, names: Collection[str]) -> str | None:
    """Describe a folder without a weights file, and what to do; None if it is not recognised.

    Args:
        folder: The folder.
        names: The names of its entries.
    """
    for expression, says in FOLDERS:
        if any(re.fullmatch(expression, name, re.DOTALL) for name in names):
            return _in(says, folder)
    return None


def _in(says: str, folder: Path) -> str:
    return says.replace("{shell}", shlex.quote(str(folder))).replace("{python}", repr(str(folder)))
