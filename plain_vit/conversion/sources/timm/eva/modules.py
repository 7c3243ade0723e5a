"""Parts of live models of timm's Eva, from which its arguments are read."""

from dataclasses import dataclass

from ..modules import Parts


@dataclass(frozen=True)
class EvaParts(Parts):
    """The parts of a live model that `ARGUMENTS` reads."""

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
