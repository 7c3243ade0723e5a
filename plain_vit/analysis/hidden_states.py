"""Logit lens and token norms, layer by layer.

Legend: `B` batch, `C` channels, `H W` pixels, `L` tokens, `D` hidden size.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from .inspection import as_array, classify, encoder, prepared, record_outputs


def logit_lens(model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any]) -> np.ndarray:
    """Return the class scores that the model would give if it stopped after each layer.

    The model's own final norm, pooling and classifier are applied to the tokens of every layer.

    Args:
        model: A plain ViT with a classifier.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.

    Returns:
        Logits of shape (B, layers + 1, classes): after the embeddings, after layer 0, and so on. The last are
        the model's own logits.

    Raises:
        AnalysisError: The model has no classifier, or the pixels do not fit it.

    Source:
        nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    model, pixel_values, _ = prepared(model, pixel_values)
    *below, last = encoder(model).embeddings, *encoder(model).layers
    states = record_outputs(*below)
    # The last layer outputs the tokens of all layers as one batch, so the model's own head is applied to each.
    last.register_forward_hook(lambda _module, _args, output: torch.cat([*states, output]))
    with torch.no_grad():
        logits = classify(model, pixel_values)
    return as_array(logits.unflatten(0, (len(below) + 1, -1)).transpose(0, 1))


def token_norms(model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any]) -> np.ndarray:
    """Return the norm of every token after every layer; artefact tokens have unusually large norms.

    Args:
        model: A plain ViT.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.

    Returns:
        Euclidean norms of shape (B, layers + 1, L): after the embeddings, after layer 0, and so on. `token_layout`
        gives the order of the tokens.

    Raises:
        AnalysisError: The pixels do not fit the model.

    Source:
        Darcet et al. 2024, section 2.1.
    """
    model, pixel_values, _ = prepared(model, pixel_values)
    vit = encoder(model)
    states = record_outputs(vit.embeddings, *vit.layers)
    with torch.no_grad():
        model(pixel_values)
    return as_array(torch.stack([state.float().norm(dim=-1) for state in states], dim=1))
