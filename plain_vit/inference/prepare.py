"""`prepare_for_inference`: the fastest copy of a model for a device, a dtype and an engine."""

import math
from typing import cast

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention_plain_vit import FAST_ATTENTION, SDPA
from ..errors import PreparedModelError
from ..system.environment import warn_of_slow_products
from .cuda_graphs import CudaGraphs
from .prepared import Model, pack, refuse_prepared, simplified


def prepare_for_inference(
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    compile: bool = False,
    batch_size: int = 8,
    engine: str = "torch",
) -> Model:
    """Return a copy of a model for faster inference only; the model itself is unchanged.

    The copy is in evaluation mode and has no gradients. Query, key and value projections are one layer, which includes
    the scale of the query; LayerScale gains are folded into the layer before them; the last block computes only the
    tokens that a class-token head reads. On a CPU with AVX-512 the weights are in oneDNN's fastest memory layout, with
    the MLP's activation fused into the product (if the model is compiled, the compiler does both). On a GPU of NVIDIA,
    the kernels of a pass are recorded for each of the first four shapes of `pixel_values`, and start as one from then
    on (a CUDA graph), unless the model is compiled, anything else is given or asked for, or a hook is to run.

    All this is done to modules that are as the config builds them. Another one, such as an adapter that is not merged,
    stays as it is, with all that is computed together with it; so does one that a hook sees.

    The copy can itself be copied, pickled and passed to other processes.

    In float32 the logits differ by at most 1e-5 of the largest one; in bfloat16 by bfloat16's rounding. A CPU that has
    no fast products of the dtype is warned of.

    Args:
        model: A model on the device where it is to run. It may be of the code saved in its folder; the copy is of the
            package's own class.
        dtype: Dtype of the copy (default: that of the model).
        compile: Also compile the copy, which takes minutes. Images of another size or number are compiled again.
        batch_size: Expected number of images per batch; others work too, possibly slower.
        engine: "torch"; or "openvino" or "onnx", which compute on the CPU and need the extra `plain-vit[engines]`. The
            copy then has no weights, takes images of the model's size, and gives logits, or tokens and pooled features,
            in float32. Its graph is run beside the model first.

    Raises:
        PreparedModelError: The model is not a plain ViT or is already prepared, or the engine cannot compute so; or its
            code is that of its folder, and a module is not as the config builds it. The copy raises it on any attempt
            to train, save, move or cast it.
        ExportError, VerificationError, MissingPackageError: As `to_checkpoint`, for an engine.
    """
    if engine != "torch":
        from .engine_models import in_engine  # on use: it imports the conversion

        if compile:
            raise PreparedModelError(f"compile is for torch, not for {engine}: omit one of them")
        refuse_prepared(model)
        return cast(Model, in_engine(model, engine, dtype or model.dtype, batch_size))
    prepared, as_built = simplified(model, dtype)
    config = prepared.config
    if prepared.device.type == "cpu":
        warn_of_slow_products(prepared.dtype)
    if prepared.device.type == "cpu" and not compile:
        pack(prepared, as_built, batch_size * (config.num_prefix_tokens + math.prod(config.grid_size)))
    if ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation) is SDPA:
        prepared.set_attn_implementation(FAST_ATTENTION)
    if compile:
        prepared.compilation = {"options": {"freezing": True} if prepared.device.type == "cpu" else None}
        prepared.compile(**prepared.compilation)
    if prepared.device.type == "cuda" and torch.version.cuda and not compile and prepared.is_as_built:
        prepared.graphs = CudaGraphs()
    height, width = (count * pixels for count, pixels in zip(config.grid_size, config.patch_shape, strict=True))
    prepared(torch.zeros(batch_size, config.num_channels, height, width, device=prepared.device))
    return cast(Model, prepared)
