"""Export to the graph of an inference engine, ONNX Runtime or OpenVINO, which is checked by running it.

The folder has the layout of transformers.js and optimum (the graph, `config.json` and `preprocessor_config.json`), and
`engine.json`, which records what was written and measured.

Shapes: `B` batch, `C` channels, `H W` pixels.
"""

import copy
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import VERSION, PlainViTConfig
from ..conversion.report import TOLERANCE
from ..errors import ExportError, VerificationError
from ..files.other_files import DESCRIPTION
from ..files.staging import staged_folder
from ..system.extras import needs
from .calibration import ImageSets, image_sets
from .engine import EXTRA, INPUT, Engine
from .engine_checks import Agreement, agreement_on, compare, probes
from .onnx_runtime import OnnxRuntime
from .openvino_runtime import OpenVino
from .prepared import copy_of_travelled, simplify

# The largest allowed difference of an output, relative to its largest value. Weights have 11 bits of mantissa in
# float16, 8 in bfloat16. In int8 it bounds the logits of single images; the share of changed classes is printed.
TOLERANCES = {"float32": TOLERANCE, "float16": 1e-2, "bfloat16": 5e-2, "int8": 2e-1}
OPSET = 20  # of ONNX: the first with Gelu, which before takes five operations
MODEL = "plain_vit_config"  # the key of the model's own config in `engine.json`
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OnnxRuntime(), OpenVino())}

# The outputs of each class, in the order of the graph, and the class of transformers with the same outputs.
OUTPUTS = {
    modeling.PlainViTForImageClassification.__name__: (("logits",), "ViTForImageClassification"),
    modeling.PlainViTModel.__name__: (("last_hidden_state", "pooler_output"), "ViTModel"),
}


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an export to an engine.

    Args:
        precision: Precision of the weights, one of `TOLERANCES`.
        dynamic_size: Take every height and width that the patch size divides, not only the model's own.
        calibration: Folder of images, for int8: every second image sets the ranges, and the graph is compared with the
            model on the others. With subfolders named after the model's labels, the accuracy is measured too.
        tolerance: The largest relative difference allowed (default: that of the precision in `TOLERANCES`).

    Raises:
        ExportError: The precision is unknown, or only one of int8 and the images is given.
    """

    precision: str = "float32"
    dynamic_size: bool = False
    calibration: str | os.PathLike[str] | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in TOLERANCES:
            raise ExportError(f"precision is {self.precision!r}: expected one of {', '.join(TOLERANCES)}")
        if self.precision == "int8" and self.calibration is None:
            raise ExportError("precision int8 needs images, which set the ranges: give a folder of them (calibration)")
        if self.precision != "int8" and self.calibration is not None:
            raise ExportError(f"calibration is for precision int8, not for {self.precision}: leave it out")

    @property
    def allowed(self) -> float:
        """The largest relative difference allowed."""
        return TOLERANCES[self.precision] if self.tolerance is None else self.tolerance


@dataclass(frozen=True)
class EngineExport:
    """The result of an export to an engine.

    Args:
        path: The folder written.
        format: Name of the engine.
        description: The contents of its `engine.json`.
        notes: Files that the folder lacks, each with the reason.
    """

    path: str
    format: str
    description: Mapping[str, Any]
    notes: Sequence[str]

    def __str__(self) -> str:
        found = self.description
        size = "any multiple of {} x {} pixels" if found["dynamic_size"] else "{} x {} pixels"
        size = size.format(*found["multiple_of" if found["dynamic_size"] else "image_size"])
        lines = [f"written: {self.path}", f"  {found['graph']}: weights in {found['precision']}, any batch, {size}"]
        for output in found["outputs"]:
            lines.append(
                f"  {output['name']}: largest difference {output['difference']:.1e} of the largest value, in "
                f"{found['runtime']} {found['engine_version']} ({found['tolerance']:.0e} allowed)"
            )
        if "images" in found:
            lines.append(f"  {Agreement(**found['images'])}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def to_engine(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    engine: str,
    options: EngineOptions | None = None,
    image_processor: Any | None = None,
    force: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
) -> EngineExport:
    """Write the graph of a model for an engine, compare it with the model, and refuse it if an output differs.

    Args:
        model: A `PlainViTForImageClassification` or a `PlainViTModel`.
        path: A new folder.
        engine: One of `ENGINES`, "onnx" or "openvino"; its packages must be installed.
        options: Precision, sizes, images for int8, tolerance (default: float32, the model's size).
        image_processor: The processor to write next to the graph.
        force: Replace an existing output.
        sources: Files and folders that the model came from, which the output must not replace.

    Raises:
        ExportError: The model cannot be exported in this way.
        MissingPackageError: A package is missing.
        VerificationError: An output differs by more than the tolerance; the previous content is unchanged.
        DataError: The images for the calibration cannot be used.
        OutputError: The folder cannot be written; the previous content is unchanged.
    """
    if engine not in ENGINES:
        raise ExportError(f"engine is {engine!r}: expected {' or '.join(ENGINES)}")
    runtime, options = ENGINES[engine], options or EngineOptions()
    runtime.check_installed(options.precision)
    check_exportable(model, image_processor, options)
    reference = float32_copy(model)
    images: ImageSets | None = None
    if options.calibration is not None:
        images = image_sets(options.calibration, image_processor, reference.config)
        sources = [*sources, options.calibration]
    with staged_folder(path, force=force, sources=sources) as folder:
        program = trace(reference, options.dynamic_size)
        runtime.write(program, folder, options.precision, () if images is None else images.setting)
        run = runtime.load(folder)
        random = probes(reference.config, options.dynamic_size)
        batches = random if images is None else map(torch.from_numpy, images.compared)
        differences, classes = compare(reference, run, batches)
        agreement = None if images is None else agreement_on(images, classes)
        refuse_beyond(differences, options, runtime)
        description = describe(reference, options, runtime, differences, agreement)
        write_settings(folder, reference, image_processor, description)
    missing = [] if image_processor is not None else ["no preprocessor_config.json: there is no image processor"]
    return EngineExport(os.fspath(path), runtime.name, description, missing)


def check_exportable(model: PreTrainedModel, image_processor: Any | None, options: EngineOptions) -> None:
    """Refuse a model, an image processor or options that a graph cannot represent."""
    kind = type(model).__name__
    if kind not in OUTPUTS:
        raise ExportError(f"{kind} has no graph for an engine: expected {' or '.join(OUTPUTS)}")
    if {"spatial_shapes", "image_sizes"} & {*getattr(image_processor, "model_input_names", ())}:
        raise ExportError(
            "the image processor makes inputs of images of many sizes, and a graph takes images of one size "
            "(B, C, H, W): give an image processor with a size, or none"
        )
    if options.calibration is not None and image_processor is None:
        raise ExportError("the images for int8 need an image processor, and the model has none: give one")


def float32_copy(model: PreTrainedModel) -> Any:
    """Return a copy of a model, of the package's own class, in float32, on the CPU, in evaluation mode."""
    is_ours = isinstance(model, modeling.PlainViTPreTrainedModel)
    copied: Any = copy.deepcopy(model) if is_ours else copy_of_travelled(model)
    return copied.to("cpu", torch.float32).eval().requires_grad_(False)


class OutputTuple(nn.Module):
    """A model that returns its outputs as a tuple of tensors, in the order of the graph."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str]):
        super().__init__()
        self.model, self.names = model, names
        self.train(model.training)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(pixel_values=pixel_values)
        return tuple(outputs[name] for name in self.names)


def outputs_of(model: PreTrainedModel) -> list[str]:
    """Return the names of the outputs of a model, in the order of its graph."""
    names, _ = OUTPUTS[type(model).__name__]
    has_pooler = getattr(model, "add_pooling_layer", True)
    return [name for name in names if has_pooler or name != "pooler_output"]


def trace(reference: modeling.PlainViTPreTrainedModel, dynamic_size: bool) -> Any:
    """Trace a model with torch.onnx and return the program.

    The model is simplified first, and attention becomes plain matrix products, which engines fuse.

    Raises:
        ExportError: torch cannot trace the model.
    """
    config, names = reference.config, outputs_of(reference)
    simple: Any = simplify(reference)
    simple.set_attn_implementation("eager")
    dynamic: dict[int, Any] = {0: torch.export.Dim("batch", min=2)}  # of the export; the ONNX graph accepts 1 as well
    if dynamic_size:
        down, across = config.patch_shape
        dynamic |= {2: down * torch.export.Dim("rows"), 3: across * torch.export.Dim("columns")}
    example = torch.zeros(2, config.num_channels, *config.image_shape)
    with needs(EXTRA), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own tables
        try:
            return torch.onnx.export(
                OutputTuple(simple, names), (), kwargs={INPUT: example}, dynamic_shapes={INPUT: dynamic}, dynamo=True,
                input_names=[INPUT], output_names=names, opset_version=OPSET, verbose=False,
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            cause = str(error.__cause__ or error).strip().partition("\n")[0]
            raise ExportError(f"torch cannot trace this model as a graph: {cause}") from error


def refuse_beyond(differences: Mapping[str, float], options: EngineOptions, engine: Engine) -> None:
    """Refuse a graph with an output that differs by more than the tolerance, or is not a number."""
    beyond = [f"{name} by {value:.1e}" for name, value in differences.items() if not value <= options.allowed]
    if beyond:
        raise VerificationError(
            f"in {engine.runtime} with weights in {options.precision} the outputs differ from the model's: "
            f"{', '.join(beyond)} of the largest value, where {options.allowed:.0e} is allowed; nothing is written. "
            "Take another precision, or allow more with a tolerance"
        )


def describe(
    reference: PreTrainedModel,
    options: EngineOptions,
    engine: Engine,
    differences: Mapping[str, float],
    agreement: Agreement | None,
) -> dict[str, Any]:
    """Return the contents of `engine.json`."""
    config = cast(PlainViTConfig, reference.config)
    sides = ["height", "width"] if options.dynamic_size else list(config.image_shape)
    described = {
        "engine": engine.name,
        "runtime": engine.runtime,
        "engine_version": engine.version(),
        "settings": engine.settings(),
        "graph": engine.graph,
        "opset": OPSET,
        "precision": options.precision,
        "dynamic_size": options.dynamic_size,
        "image_size": list(config.image_shape),
        "multiple_of": list(config.patch_shape),
        "inputs": [{"name": INPUT, "dtype": "float32", "shape": ["batch", config.num_channels, *sides]}],
        "outputs": [{"name": name, "dtype": "float32", "difference": value} for name, value in differences.items()],
        "tolerance": options.allowed,
        "plain_vit": VERSION,
        "torch": torch.__version__,
        MODEL: json.loads(config.to_json_string(use_diff=False)),
    }
    return described if agreement is None else described | {"images": asdict(agreement)}


def write_settings(
    folder: Path, reference: PreTrainedModel, image_processor: Any | None, description: Mapping[str, Any]
) -> None:
    """Write the config, the processor's settings, and the measurements.

    transformers.js and optimum select classes by these names, and refuse names of other packages. Among the names they
    know, "vit" fits the graph: pixels in, logits or tokens out. `PlainViTImageProcessor` opens the folder too.
    """
    config = cast(PlainViTConfig, reference.config)
    _, architecture = OUTPUTS[type(reference).__name__]
    shared = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
              "layer_norm_eps", "num_channels")  # fmt: skip
    settings = {
        "model_type": "vit",
        "architectures": [architecture],
        **{name: getattr(config, name) for name in shared},
    }
    settings |= {"image_size": list(config.image_shape), "patch_size": list(config.patch_shape)}
    if "logits" in outputs_of(reference):
        settings |= {"id2label": config.id2label, "label2id": config.label2id, "problem_type": config.problem_type}
    if (folder / f"{description['graph']}_data").is_file():
        settings["transformers.js_config"] = {"use_external_data_format": True}
    files = {"config.json": settings, DESCRIPTION: description}
    if image_processor is not None:
        pixels = {name: value for name, value in image_processor.to_dict().items() if name != "auto_map"}
        files["preprocessor_config.json"] = {**pixels, "image_processor_type": "ViTImageProcessor"}
    for name, contents in files.items():
        (folder / name).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
