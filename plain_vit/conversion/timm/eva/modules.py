"""Live models of timm's Eva: reading their constructor arguments, and building them.

No part of a live model is overlooked: it is rebuilt from the arguments read, and the two are compared part by part.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError
from ...compare_modules import class_name, class_path, differences
from .. import modules
from .arguments import ARGUMENTS, DEFAULTS, arguments_for

CLASSES = {
    **modules.CLASSES,
    "timm.layers.attention.AttentionRope": "rope",
    "timm.models.eva.EvaAttention": "eva",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingCat": "cat",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingMixed": "mixed",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingDinoV3": "dinov3",
}
SILENT_ATTRIBUTES = modules.SILENT_ATTRIBUTES | {"head_init_scale"}
BLOCKS = ("EvaBlock", "EvaBlockPostNorm")


@dataclass(frozen=True)
class Parts:
    """The parts of a live model that `ARGUMENTS` reads."""

    model: Any
    block: Any
    attention: Any
    mlp: Any

    @property
    def mlp_type(self) -> str:
        """timm's name of the class of its MLPs."""
        return self.name_of(self.mlp)

    @property
    def attn_type(self) -> str:
        """timm's name of the class of its attentions."""
        return self.name_of(self.attention)

    @property
    def rope_type(self) -> str:
        """timm's name of the class of its rotation."""
        return "cat" if self.model.rope is None else self.name_of(self.model.rope)

    @property
    def qkv_bias(self) -> bool:
        """Whether queries have a bias, be it a parameter of its own."""
        attention = self.attention
        if attention.qkv is None:
            return attention.q_proj.bias is not None
        return attention.qkv.bias is not None or getattr(attention, "q_bias", None) is not None

    @property
    def num_kv_heads(self) -> tuple[int, ...] | None:
        """Heads of keys and values in each block; None where there are as many as of queries."""
        counts = tuple(getattr(block.attn, "num_kv_heads", block.attn.num_heads) for block in self.model.blocks)
        return None if set(counts) == {self.attention.num_heads} else counts

    @property
    def attn_only_layer_scale(self) -> bool:
        """Whether only the attention has a LayerScale."""
        gains = (getattr(self.block, name, None) for name in ("gamma_1", "gamma_2"))
        return [gain is not None for gain in gains] == [True, False]

    def name_of(self, module: nn.Module) -> str:
        """Return the name that timm's arguments have for a module's class; its own where they have none."""
        return class_name(module, CLASSES)


def arguments_of(module: Any) -> dict[str, Any]:
    """Return the arguments from which a live timm Eva was built, read from its parts.

    Raises:
        ExportError: for a class that plain-vit does not know.
    """
    if len(module.blocks) == 0:
        raise ExportError("the model has no blocks (depth=0): its heads and norms cannot be read")
    block = module.blocks[0]
    if type(block).__module__ != "timm.models.eva" or type(block).__name__ not in BLOCKS:
        raise ExportError(f"{class_path(module)} does not open: its blocks.0 is a {class_path(block)}")
    parts = Parts(module, block, block.attn, block.mlp)
    return {argument.name: argument.module(parts) for argument in ARGUMENTS}


# Arguments that our config does not determine, since they change no number of the model.
FREE = ("qkv_fused", "attn_type", "dynamic_img_size", "rope_rotate_half")


def unknown_parts(module: Any, config: PlainViTConfig, arguments: Mapping[str, Any]) -> list[str]:
    """Return the differences of a live model to the one that timm builds from our config of it."""
    rebuilt = build(config, device="meta", **{name: arguments[name] for name in FREE})
    return [*differences(module, rebuilt, CLASSES, SILENT_ATTRIBUTES), *_changed_buffers(module)]


def _changed_buffers(module: Any) -> list[str]:
    """Return the buffers that are not saved, and whose values are not those that timm computes."""
    faults = []
    for index, block in enumerate(module.blocks):
        bias = getattr(block.attn, "k_bias", None)
        if bias is not None and not bias.is_meta and bias.any():
            faults.append(f"blocks.{index}.attn.k_bias is not zero, as in every saved model of timm")
    if module.rope is None:
        return faults
    fresh, weights = copy.deepcopy(module.rope), module.patch_embed.proj.weight
    fresh.init_non_persistent_buffers()
    for name, buffer in module.rope.named_buffers():
        if buffer.is_meta:
            continue
        kept = fresh.get_buffer(name)
        if name.startswith("pos_embed") and buffer.dtype != weights.dtype:
            faults.append(f"rope.{name} is of {buffer.dtype}, and the weights of {weights.dtype}: cast the whole model")
        elif not (torch.equal(buffer, kept) if buffer.device.type == "cpu" else _close(buffer, kept)):
            faults.append(
                f"rope.{name} has not the values of its settings, such as after a cast to another dtype and back: "
                "module.rope.init_non_persistent_buffers() computes them again"
            )
    return faults


def _close(buffer: torch.Tensor, kept: torch.Tensor) -> bool:
    """Return whether two buffers differ at most by rounding: the sines of a GPU are not those of a CPU."""
    return torch.allclose(buffer, kept, rtol=0, atol=max(1e-5, torch.finfo(buffer.dtype).eps))


def build(config: PlainViTConfig, device: torch.device | str | None = None, **given: Any) -> nn.Module:
    """Return timm's own Eva for this config, with random weights.

    Args:
        config: Ours.
        device: Where its tensors are.
        **given: Arguments in `FREE` (default: as in timm's own architectures).

    Raises:
        ExportError: names every part that timm cannot represent.
    """
    from timm import layers
    from timm.models.eva import Eva

    arguments = {**DEFAULTS, **arguments_for(config), **given}
    norms = {"layernorm": layers.LayerNorm, "rmsnorm": layers.RmsNorm}
    norm = functools.partial(norms[arguments.pop("norm_layer")], eps=arguments.pop("norm_eps"))
    return Eva(**arguments, norm_layer=norm, device=device)
