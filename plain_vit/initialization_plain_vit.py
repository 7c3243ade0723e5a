"""Initial weights: how each source draws every kind of tensor.

`init_as` marks a layer that some source initialises in its own way; a module with parameters of its own defines
`init_own_weights`. `config.initialization` selects the table.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .configuration_plain_vit import PlainViTConfig


def init_as(kind: str, layer: nn.Module) -> nn.Module:
    """Mark a layer with a kind that a source may initialise differently from "dense", and return the layer."""
    layer.init_kind = kind  # type: ignore[assignment]
    return layer


def _normal(tensor: torch.Tensor, std: float) -> None:
    init.trunc_normal_(tensor, std=std)


def _normal_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    init.trunc_normal_(layer.weight, std=std)
    _bias(layer, init.zeros_)


def _torch_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    """Draw weight and bias like torch's `reset_parameters`."""
    bound = layer.weight[0].numel() ** -0.5
    init.uniform_(layer.weight, -bound, bound)
    _bias(layer, lambda bias: init.uniform_(bias, -bound, bound))


def _xavier_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    init.xavier_uniform_(layer.weight)
    _bias(layer, init.zeros_)


def _xavier_mlp_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    init.xavier_uniform_(layer.weight)
    _bias(layer, lambda bias: init.normal_(bias, std=1e-6))


def _lecun_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    """Draw from a normal truncated at two deviations, scaled to variance 1 / fan-in (JAX's lecun_normal)."""
    scale = layer.weight[0].numel() ** -0.5 / 0.87962566103423978
    init.trunc_normal_(layer.weight, std=scale, a=-2 * scale, b=2 * scale)
    _bias(layer, init.zeros_)


def _zero_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    init.zeros_(layer.weight)
    _bias(layer, init.zeros_)


def _bias(layer: nn.Linear | nn.Conv2d, draw: Callable[[torch.Tensor], Any]) -> None:
    if layer.bias is not None:
        draw(layer.bias)


def _all_kinds(layers: dict[str, Callable], tokens: dict[str, Callable]) -> dict[str, Callable[[Any, float], Any]]:
    """Return a complete table: kinds of layers default to "dense", kinds of tokens to "tokens"."""
    kinds = dict.fromkeys(("mlp", "patches", "classifier", "head_mix"), layers["dense"])
    names = ("cls_token", "distillation_token", "register_tokens", "positions")
    return {
        **kinds, "last_gain": lambda norm, std: init.ones_(norm.weight), **layers,
        **dict.fromkeys(names, tokens["tokens"]), **tokens, "mask_token": lambda token, std: init.zeros_(token),
    }  # fmt: skip


# By source, then by kind of tensor; `std` is config.initializer_range.
INITIALIZATIONS: dict[str, dict[str, Callable[[Any, float], Any]]] = {
    "transformers": _all_kinds({"dense": _normal_layer}, {"tokens": _normal}),
    "timm": _all_kinds(
        {"dense": lambda layer, std: _normal_layer(layer, 0.02), "patches": _torch_layer},
        {
            "tokens": lambda token, std: init.normal_(token, std=1e-6),
            "distillation_token": lambda token, std: _normal(token, 0.02),
            "positions": lambda table, std: _normal(table, 0.02),
        },
    ),
    "google": _all_kinds(
        {
            "dense": _xavier_layer,
            "mlp": _xavier_mlp_layer,
            "patches": _lecun_layer,
            "classifier": _zero_layer,
            "last_gain": lambda norm, std: init.zeros_(norm.weight),
        },
        {
            "tokens": lambda token, std: init.normal_(token, std=0.02),
            "cls_token": lambda token, std: init.zeros_(token),
        },
    ),
    "vit_pytorch": _all_kinds(
        {"dense": _torch_layer, "head_mix": lambda mix, std: init.normal_(mix.weight)},
        {"tokens": lambda token, std: init.normal_(token)},
    ),
}


class FreshWeights:
    """Weight initialiser of a config: draws each kind of tensor as the source does."""

    def __init__(self, config: PlainViTConfig):
        self.std = config.initializer_range
        self.kinds = dict(INITIALIZATIONS[config.initialization])
        if config.zero_init_classifier:
            self.kinds["classifier"] = _zero_layer

    def draw(self, kind: str, tensor: Any) -> None:
        """Draw a tensor of this kind, or the tensors of a layer; None is ignored."""
        if tensor is not None:
            self.kinds[kind](tensor, self.std)

    def draw_module(self, module: nn.Module) -> None:
        """Initialise a module's own tensors: with its `init_own_weights` if it has one, else by the kind of layer."""
        if hasattr(module, "init_own_weights"):
            module.init_own_weights(self)  # type: ignore[operator]
        elif hasattr(module, "init_kind"):
            self.draw(str(module.init_kind), module)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            self.draw("dense", module)
