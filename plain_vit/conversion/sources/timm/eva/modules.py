"""Parts of live models of timm's Eva, from which its arguments are read."""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ....tables.compare_modules import class_name
from .. import modules
from ..modules import Parts

CLASSES = {
    **modules.CLASSES,
    "timm.layers.attention.AttentionRope": "rope",
    "timm.models.eva.EvaAttention": "eva",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingCat": "cat",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingMixed": "mixed",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingDinoV3": "dinov3",
}


@dataclass(frozen=True)
class EvaParts(Parts):
    """The parts of a live model that `ARGUMENTS` reads."""

    @property
    def mlp_type(self) -> str:
        """timm's name for the class of its MLPs."""
        return class_name(self.mlp, CLASSES)

    @property
    def attn_type(self) -> str:
        """timm's name for the class of its attentions."""
        return class_name(self.attention, CLASSES)

    @property
    def rope_type(self) -> str:
        """timm's name for the class of its rotary embedding."""
        return "cat" if self.model.rope is None else class_name(self.model.rope, CLASSES)

    @property
    def qkv_bias(self) -> bool:
        """Whether queries have a bias, inside the projection or as a separate parameter."""
        attention = self.attention
        if attention.qkv is None:
            return attention.q_proj.bias is not None
        return attention.qkv.bias is not None or getattr(attention, "q_bias", None) is not None

    @property
    def num_kv_heads(self) -> tuple[int, ...] | None:
        """Number of key and value heads in each block; None if equal to the number of query heads."""
        counts = tuple(getattr(block.attn, "num_kv_heads", block.attn.num_heads) for block in self.model.blocks)
        return None if set(counts) == {self.attention.num_heads} else counts

    @property
    def attn_only_layer_scale(self) -> bool:
        """Whether only the attention has a LayerScale."""
        gains = (getattr(self.block, name, None) for name in ("gamma_1", "gamma_2"))
        return [gain is not None for gain in gains] == [True, False]


def changed_buffers(module: Any) -> list[str]:
    """Return the non-persistent buffers whose values differ from the values that timm computes."""
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
    """Return whether two buffers differ at most by rounding: GPUs and CPUs compute sines differently."""
    return torch.allclose(buffer, kept, rtol=0, atol=max(1e-5, torch.finfo(buffer.dtype).eps))
