"""Features and predictions of images as columns of a table.

Legend: `B` batch, `h w` patch grid, `L` tokens, `D` hidden size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..configuration_plain_vit import PlainViTConfig
from ..errors import TrainingError
from ..modeling_plain_vit import PlainViTForImageClassification
from ..scores import REGRESSION, scores
from ..system.extras import needs
from ..training.models import names_of_classes
from .engine_models import EngineModel

with needs("plain-vit[train]"):
    import pyarrow as pa

EXACT = {"mixed_precision": "no", "dtype": "float32"}  # the options least likely to overflow

Columns = dict[str, pa.Array]


def features_of(
    model: Any, inputs: Mapping[str, torch.Tensor], *, kind: str, layers: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the features of images, by the names of their columns.

    Args:
        model: A `PlainViTModel`.
        inputs: Outputs of the image processor.
        kind: `pooled`: the input of a classifier; `cls`; `mean` of the patches; `cls_mean`: both concatenated;
            `patches`: a grid [B, h, w, D].
        layers: Numbers, from 1, of the blocks whose outputs to use; empty for the last block, after the final norm.

    Raises:
        TrainingError: The images have many sizes, and the features are not `pooled`.
    """
    if kind != "pooled" and {"spatial_shapes", "image_sizes"} & inputs.keys():
        raise TrainingError("Of images of many sizes only pooled features can be extracted: give --feature pooled.")
    inputs = {name: values.to(model.dtype) if name == "pixel_values" else values for name, values in inputs.items()}
    read = num_tokens_needed(model, kind, layers)
    outputs = model(**inputs, num_output_tokens=read, output_hidden_states=bool(layers))
    if kind == "pooled":
        return {"feature": outputs.pooler_output}
    tokens = {f"feature_{layer}": outputs.hidden_states[layer] for layer in layers}
    size = inputs["pixel_values"].shape[-2:]
    return {
        name: _gather(model, states, (size[0], size[1]), kind)
        for name, states in (tokens or {"feature": outputs.last_hidden_state}).items()
    }


def num_tokens_needed(model: Any, kind: str, layers: Sequence[int]) -> int | None:
    """Return how many leading tokens the last block must compute; None for all, as in the graph of an engine."""
    if layers or isinstance(model, EngineModel):
        return None
    return {"pooled": model.pooler.num_tokens_read, "cls": 1}.get(kind)


def _gather(model: Any, states: torch.Tensor, size: tuple[int, int], kind: str) -> torch.Tensor:
    if kind == "cls":
        return states[:, 0]
    grid = model.tokens_to_map(states, *size)  # B D h w
    if kind == "patches":
        return grid.permute(0, 2, 3, 1)
    mean = grid.flatten(2).mean(dim=2)
    return mean if kind == "mean" else torch.cat((states[:, 0], mean), dim=1)


def check_features(config: PlainViTConfig, kind: str, layers: Sequence[int]) -> None:
    """Refuse features that a model does not have.

    Raises:
        TrainingError: The model has no class token, no pooling or fewer blocks, or pooled features of a block are
            requested.
    """
    if "cls" in kind and not config.use_class_token:
        raise TrainingError("The model has no class token: give --feature mean or patches.")
    if kind == "pooled" and config.pooling == "none":
        raise TrainingError("The model does not pool its tokens: give --feature mean or patches.")
    if kind == "pooled" and layers:
        raise TrainingError("Only the last block is pooled: omit --layers, or give --feature cls, mean or patches.")
    wrong = [layer for layer in layers if not 1 <= layer <= config.num_hidden_layers]
    if wrong:
        raise TrainingError(f"--layers {wrong[0]}: the model has the blocks 1 to {config.num_hidden_layers}.")


def check_outputs(model: Any, layers: Sequence[int], engine: str) -> None:
    """Refuse features that the graph of an engine does not return.

    Raises:
        TrainingError: The graph is a classifier's, or outputs of blocks are requested.
    """
    is_graph = isinstance(model, EngineModel)
    if layers and (is_graph or engine != "torch"):
        raise TrainingError("A graph in an engine gives no outputs of blocks: omit --layers, or compute with torch.")
    if is_graph and isinstance(model, PlainViTForImageClassification):
        raise TrainingError("The graph gives logits only: export model.base_model, with to_checkpoint in Python.")


def as_columns(tensors: Mapping[str, torch.Tensor]) -> Columns:
    """Return tensors of shape (B, ...) as columns of fixed-size lists."""
    columns = {}
    for name, tensor in tensors.items():
        values = pa.array(tensor.cpu().flatten().numpy())
        for size in reversed(tensor.shape[1:]):
            values = pa.FixedSizeListArray.from_arrays(values, size)
        columns[name] = values
    return columns


def predictions_of(model: Any, inputs: Mapping[str, torch.Tensor], *, top: int) -> Columns:
    """Return the likeliest classes or labels of images: `label` and `probability`, and lists of the first `top`.

    For a regression, return the names of its numbers, `labels`, and the predicted `values`.

    Args:
        model: A `PlainViTForImageClassification`.
        inputs: Outputs of the image processor.
        top: Number of classes in the lists, at most all.
    """
    inputs = {name: values.to(model.dtype) if name == "pixel_values" else values for name, values in inputs.items()}
    shares = scores(model(**inputs).logits.float(), model.config.problem_type)
    names = names_of_classes(model.config)
    if model.config.problem_type == REGRESSION:
        return {
            "labels": pa.array([names] * len(shares), pa.list_(pa.string())),
            "values": pa.array(shares.tolist(), pa.list_(pa.float32())),
        }
    probabilities, classes = (values.cpu().numpy() for values in shares.topk(min(top, shares.shape[-1]), dim=-1))
    labels = np.asarray(names, dtype=object)[classes]
    return {
        "label": pa.array(labels[:, 0], pa.string()),
        "probability": pa.array(probabilities[:, 0]),
        "labels": pa.array(labels.tolist(), pa.list_(pa.string())),
        "probabilities": pa.array(probabilities.tolist(), pa.list_(pa.float32())),
    }


def with_columns(batch: Mapping[str, Any], columns: Columns, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add columns to a batch, for `table_of`.

    Args:
        batch: The batch, with `rows`, `paths`, `names` and others.
        columns: The features or predictions of these rows.
        settings: Settings of the computation; missing ones are those in `EXACT`.

    Raises:
        TrainingError: A feature or prediction is not a finite number.
    """
    for name, values in columns.items():
        flat = values
        while isinstance(flat, pa.ListArray | pa.FixedSizeListArray):
            flat = flat.flatten()
        if not pa.types.is_floating(flat.type):
            continue
        numbers = flat.to_numpy(zero_copy_only=False)
        if len(wrong := np.flatnonzero(~np.isfinite(numbers))):
            place = wrong[0] * len(values) // len(numbers)  # each row has as many numbers
            image = batch["names"][place]
            ways = [f"--{option} {exact}" for option, exact in EXACT.items() if settings.get(option, exact) != exact]
            advice = f"Give {' and '.join(ways)}" if ways else "Check the weights of the model, or export it in float32"
            raise TrainingError(f"The {name} of {image} is {numbers[wrong[0]]}: expected finite numbers. {advice}.")
    return {**batch, "columns": columns}


def table_of(batches: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the columns of batches from `with_columns` as one table."""
    columns: dict[str, list[pa.Array]] = {}
    for batch in batches:
        shown = {"row": pa.array(batch["rows"], pa.int64()), "path": pa.array(batch["paths"], pa.string())}
        for name, values in (shown | batch["columns"]).items():
            columns.setdefault(name, []).append(values)
    return pa.table({name: pa.chunked_array(values) for name, values in columns.items()}).combine_chunks()
