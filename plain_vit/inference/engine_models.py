"""Models whose forward pass runs in an inference engine: exported folders, opened again."""

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput, ModelOutput
from transformers.utils import IMAGE_PROCESSOR_NAME

from ..configuration_plain_vit import PlainViTConfig
from ..errors import CheckpointError, PlainViTError, PreparedModelError
from ..files.other_files import DESCRIPTION
from ..image_processing_plain_vit import PlainViTImageProcessor
from ..modeling_plain_vit import PlainViTForImageClassification, PlainViTModel
from .engine_checks import Run
from .engines import ENGINES, MODEL, to_engine
from .prepared import RECORDED, Prepared


class EngineModel(Prepared):
    """Mixin of models whose forward pass is a graph in an inference engine, on the CPU.

    They have a config but no weights, take images of the graph's sizes, and return its outputs. Copies, including those
    in other processes, open the graph on their first call.
    """

    config: PlainViTConfig
    run: Run | None = None  # in this process
    process = 0  # its number
    engine: str  # its name
    outputs: list[str]  # names, in the order of the graph
    dynamic_size: bool  # the graph takes every size that the patch size divides, not only that of the config
    files: "Files"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return what a copy or another process needs to open the same graph."""
        contents = {name: bytes(content) for name, content in self.files.graph.items()}
        return copied, (Files(self.files.description, contents, self.files.options),), {"config": self.config}

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of inputs and outputs, whatever the engine computes in."""
        return torch.float32

    def forward(self, pixel_values: torch.Tensor, *, return_dict: bool | None = None, **kwargs: Any) -> Any:
        """Compute the outputs of the graph.

        Args:
            pixel_values: Normalised pixels of shape (B, C, H, W).
            return_dict: False for a tuple (default: as the config says).
            **kwargs: Other inputs and options of the model, which a graph does not support.

        Raises:
            PreparedModelError: Another input is given, the image size does not fit the graph, hidden states or
                attention weights are requested, or this process was forked from the one that opened the graph.
        """
        if self.run is None:
            self.files, self.process, self.run = opened_again(self.files)
        if self.process != os.getpid():
            raise PreparedModelError(
                "this process was forked from the one that opened the graph, without its threads: pass the model to "
                "the process as an argument, or start the process by spawn"
            )
        given = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
        given += [name for name in RECORDED if name not in kwargs and getattr(self.config, name)]
        if given:
            raise PreparedModelError(
                f"{', '.join(given)}: a graph in an engine takes pixel_values and gives "
                f"{' and '.join(self.outputs)}; use the model itself"
            )
        self.check_size(pixel_values)
        pixels = pixel_values.detach().to("cpu", torch.float32).contiguous().numpy()
        found = {name: torch.from_numpy(values) for name, values in self.run(pixels).items()}
        kind: type[ModelOutput] = ImageClassifierOutput if "logits" in found else BaseModelOutputWithPooling
        outputs = kind(**found)
        return outputs if (self.config.return_dict if return_dict is None else return_dict) else outputs.to_tuple()

    def check_size(self, pixel_values: torch.Tensor) -> None:
        """Refuse images that do not fit the graph: an engine may accept them silently."""
        shape, size, channels = tuple(pixel_values.shape), tuple(pixel_values.shape[2:]), self.config.num_channels
        if self.dynamic_size:
            down, across = self.config.patch_shape
            expected = f"multiples of {down} x {across} pixels"
            fits = len(size) == 2 and all(size) and not size[0] % down and not size[1] % across
        else:
            expected, fits = "{} x {} pixels".format(*self.config.image_shape), size == self.config.image_shape
        if len(shape) != 4 or shape[1] != channels or not shape[0] or not fits:
            raise PreparedModelError(
                f"pixel_values have the shape {shape}: the graph takes (B, {channels}, H, W), with H and W {expected}"
            )


@dataclass(frozen=True)
class Files:
    """The files of an exported folder, which stay readable when they are deleted.

    Args:
        description: The contents of `engine.json`.
        graph: The contents of the graph and its weights, by path in the folder.
        options: Options for opening the graph: `dtype` and `batch_size`.
    """

    description: dict[str, Any]
    graph: Mapping[str, mmap.mmap | bytes]
    options: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, graph: Path, description: dict[str, Any], options: dict[str, Any]) -> "Files":
        """Memory-map the files that are named like the graph."""
        mapped = {}
        for path in filter(Path.is_file, sorted(graph.parent.glob(f"{graph.stem}*"))):
            with path.open("rb") as file:
                mapped[path.relative_to(folder).as_posix()] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls(description, mapped, options)

    def hash(self) -> str:
        """Return a hash of the graph and its weights, as 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for content in self.graph.values():
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()[:16]

    def write(self, folder: Path) -> None:
        """Write the files to a folder."""
        (folder / DESCRIPTION).write_text(json.dumps(self.description), encoding="utf-8")
        for name, content in self.graph.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def open_exported(
    path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, batch_size: int = 8
) -> PlainViTForImageClassification | PlainViTModel:
    """Open a folder that `to_checkpoint` or `plain-vit export` wrote for an engine, as a model that runs in it.

    The model uses as many threads as torch does now.

    Args:
        path: The folder.
        dtype: Dtype of the arithmetic: `torch.float32`, or in OpenVINO `torch.bfloat16` on a CPU that supports it.
        batch_size: Expected number of images per batch; others work too, possibly slower.

    Raises:
        CheckpointError: The folder was not exported for an engine, or is damaged.
        PreparedModelError: The engine does not compute in this dtype here.
        MissingPackageError: The engine is not installed.
    """
    folder = Path(path)
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        model = described(description)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {DESCRIPTION}: expected a folder written by `plain-vit export --to openvino` or onnx"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"{folder / DESCRIPTION} does not describe a model ({reason}): export it again"
        ) from error
    engine, config = ENGINES[model.engine], model.config
    engine.check_installed("float32")
    graph = folder / engine.graph
    try:
        expected = (batch_size, config.num_channels, *config.image_shape)
        model.files = Files.read(folder, graph, description, {"dtype": dtype, "batch_size": batch_size})
        model.run, model.process = engine.load(folder, dtype=dtype, expected=expected), os.getpid()
        found = model(torch.zeros(expected))
    except PlainViTError:
        raise
    except Exception as error:  # each engine has errors of its own
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{graph} cannot be run by {engine.runtime} ({reason}): export it again") from error
    width = config.num_labels if "logits" in model.outputs else config.hidden_size
    if list(found) != model.outputs or found[model.outputs[0]].shape[-1] != width:
        raise CheckpointError(f"{graph} is not the graph that {DESCRIPTION} describes: export it again")
    return model


def described(description: dict[str, Any]) -> Any:
    """Build a model without a graph, in evaluation mode, from the contents of `engine.json`."""
    engine, config = ENGINES[description["engine"]], PlainViTConfig.from_dict(description[MODEL])
    outputs = [str(output["name"]) for output in description["outputs"]]
    base: Any = PlainViTForImageClassification if "logits" in outputs else PlainViTModel
    kind: Any = type(base.__name__, (EngineModel, base), {})
    with torch.device("meta"), no_init_weights():
        model = kind(config)
    model._modules.clear()
    model.engine, model.outputs, model.dynamic_size = engine.name, outputs, bool(description["dynamic_size"])
    return model.eval()


def copied(files: Files) -> Any:
    """Return a model that opens the graph in these files on its first call."""
    model = described(files.description)
    model.files = files
    return model


def opened_again(files: Files) -> tuple[Files, int, Run]:
    """Return the mapped files of a graph, the id of this process, and the function that runs the graph in it."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        files.write(Path(temporary))
        model: Any = open_exported(temporary, **files.options)
    return model.files, model.process, model.run


def open_with_processor(path: str | os.PathLike[str], **options: Any) -> tuple[Any, PlainViTImageProcessor]:
    """Open an exported folder, and the image processor next to the graph.

    Args:
        path: The folder.
        **options: Options of `open_exported`.

    Raises:
        CheckpointError: There is no image processor, or `open_exported` fails.
    """
    if not Path(path, IMAGE_PROCESSOR_NAME).is_file():
        raise CheckpointError(f"{path} has no {IMAGE_PROCESSOR_NAME}: export a model that has an image processor")
    return open_exported(path, **options), PlainViTImageProcessor.from_pretrained(path)


def in_engine(model: PreTrainedModel, engine: str, dtype: torch.dtype, batch_size: int) -> Any:
    """Export a model to an engine, compare the two, and open the graph: `prepare_for_inference(model, engine=...)`.

    Raises:
        PreparedModelError: There is no such engine, or the model is not on the CPU.
        ExportError: The model cannot be exported.
        VerificationError: An output of the graph differs from the model's.
        MissingPackageError: A package is missing.
    """
    if engine not in ENGINES:
        raise PreparedModelError(f"engine is {engine!r}: expected torch, {' or '.join(ENGINES)}")
    if model.device.type != "cpu":
        raise PreparedModelError(f"the model is on {model.device}: engines run on the CPU, move it there first")
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        exported = to_engine(model, Path(temporary, "graph"), engine=engine)
        return open_exported(exported.path, dtype=dtype, batch_size=batch_size)
