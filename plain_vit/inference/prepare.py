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
    """Return a copy of a model for inference only, which is faster; the model itself is unchanged.

    The copy is in evaluation mode and has no gradients. The query, key and value projections are fused into one layer,
    with the scale of the query in its weights. LayerScale gains are folded into the layer before them. The last block
    computes only the tokens that the head reads. On a CPU with AVX-512, the weights are in oneDNN's fastest memory
    layout, and the MLP's activation is fused into the product (in a compiled model, the compiler does both). On an
    NVIDIA GPU, the kernels of a pass are recorded as a CUDA graph for each of the first four shapes of `pixel_values`
    and replayed afterwards, unless the model is compiled, has hooks, or the call has other inputs or options.

    Only modules that are as the config builds them are changed. A different module, such as an unmerged adapter, or a
    module with a hook stays as it is, and so does everything that would be fused with it.

    The copy can itself be copied, pickled and passed to other processes.

    In float32 the logits differ by at most 1e-5 of the largest logit; in bfloat16 by bfloat16's rounding. If the CPU
    has no fast products of the dtype, a warning says so.

    Args:
        model: A model on the device where it will run. It may use the code saved in its folder; the copy uses the
            package's own class.
        dtype: Dtype of the copy (default: that of the model).
        compile: Also compile the copy, which takes minutes. Images of another size or number are compiled again.
        batch_size: Expected number of images per batch; others work too, possibly slower.
        engine: "torch"; or "openvino" or "onnx", which compute on the CPU and need the extra `plain-vit[engines]`. The
            copy then has no weights, takes images of the model's size, and returns logits, or tokens and pooled
            features, in float32. Its graph is compared with the model first.

    Raises:
        PreparedModelError: The model is not a plain ViT or is already prepared, the engine does not support the
            options, or the model uses the code of its folder and a module is not as the config builds it. The copy
            raises it on any attempt to train, save, move or cast it.
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
