"""Attention, softmax(q k^T / sqrt(d)) v (equations 5 to 8), its variants, and the kernels that compute it.

Shapes: `B` batch, `L` tokens, `D` hidden size, `d` head width.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .configuration_plain_vit import PlainViTConfig
from .initialization_plain_vit import FreshWeights, init_as
from .layers_plain_vit import NORMS, cast_once, dropout_or_none, norm_or_identity, norm_or_none, optional
from .packed_plain_vit import PLAIN, Places, refuse_unmasked
from .positions_plain_vit import DecomposedRelativePositionBias, Windows, relative_position_bias

# Kernels


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with plain matrix products, and return the weights too."""
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling  # B heads L L
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights  # B L heads d


SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]
LONGEST_PRODUCTS = 1024  # tokens; beyond this, the attention matrix takes much memory and saves little time


def fast_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Use the kernel measured fastest: plain matrix products for bf16 on a CPU, torch's fused kernel elsewhere."""
    on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16 and not torch.compiler.is_exporting()
    if attention_mask is not None or not on_cpu or key.shape[2] > LONGEST_PRODUCTS:
        return fused_attention_forward(module, query, key, value, attention_mask, scaling, dropout)
    query = query if scaling == 1 else query * scaling
    key = key.contiguous()  # `matmul` would copy it transposed, channel by channel
    weights = torch.matmul(query, key.transpose(2, 3)).softmax(dim=-1)  # B heads L L
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), None  # B L heads d


def fused_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call torch's fused kernel like transformers' "sdpa", without its special cases for other models."""
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
    return attended.transpose(1, 2), None  # B L heads d


# "sdpa" is the default. Saved folders may contain its alias "plain_vit".
DEFAULT_ATTENTION, FAST_ATTENTION = "sdpa", "plain_vit_fast"
AttentionInterface.register("plain_vit", SDPA)
AttentionInterface.register(FAST_ATTENTION, fast_attention_forward)


# Norms of query and key


class PerHeadRMSNorm(nn.Module):
    """Scale each head's query or key to length sqrt(d), times a learned gain (vit-pytorch's qk norm)."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.normalize(hidden_states, dim=-1)
        return normed * hidden_states.shape[-1] ** 0.5 * self.weight  # B L heads d

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Start with gains of 1."""
        init.ones_(self.weight)


class AllHeadsRMSNorm(nn.RMSNorm):
    """Divide the concatenated heads of a query or key by their root mean square (InternViT-6B: Chen et al. 2023)."""

    def __init__(self, config: PlainViTConfig, head_dim: int):
        super().__init__(config.num_attention_heads * head_dim, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.flatten(-2)).view_as(hidden_states)  # B L heads d


QK_NORMS: dict[str | None, Callable[[PlainViTConfig, int], nn.Module | None]] = {
    None: lambda config, head_dim: None,
    "norm": lambda config, head_dim: NORMS[config.norm_type](head_dim, eps=config.layer_norm_eps),
    "rms_per_head": lambda config, head_dim: PerHeadRMSNorm(config.num_attention_heads, head_dim),
    "rms_all_heads": AllHeadsRMSNorm,
}


# Attentions: each maps tokens (B, L, D) to the output tokens that `places` selects, and returns the weights on request


class Attention(nn.Module):
    """Base class with separate query, key and value projections; `width` is the width of a query or key vector."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, width: int):
        super().__init__()
        self.config = config
        self.scaling = width**-0.5 if config.attention_scale is None else config.attention_scale
        self.attention_dropout = config.attention_probs_dropout_prob
        self.is_causal = False  # read by the kernels
        heads, head_dim = config.attention_shape
        self.group_size = heads // config.key_value_heads_of(layer_idx)
        inner, shared = heads * head_dim, heads * head_dim // self.group_size
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=config.qkv_bias and config.key_bias)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=config.qkv_bias)
        self.q_norm = QK_NORMS[config.qk_norm](config, width)
        self.k_norm = QK_NORMS[config.qk_norm](config, width)
        gainless = nn.RMSNorm(head_dim, eps=config.layer_norm_eps, elementwise_affine=False)
        self.v_norm = gainless if config.value_norm else None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None,
        places: Places = PLAIN, output_attentions: bool = False, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Compute attention with the config's implementation, or the eager one if the weights are requested.

        Each key and value head serves a group of query heads. A bias on the scores has shape (heads, L, L) or
        (B, heads, L, L); only its rows for the given queries are used. In a batch of images of many sizes, each image
        attends only to itself, without a bias.

        In evaluation, torch's fused kernel is bit-equal to most sources. Training does not need that and uses the
        fastest kernel, unless the user replaced transformers' "sdpa". The kernels do not accept an empty batch.
        """
        implementation = "eager" if output_attentions or query.shape[0] == 0 else self.config._attn_implementation
        kernel: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if kernel is SDPA:
            kernel = fast_attention_forward if self.training else fused_attention_forward
        kwargs |= {"scaling": self.scaling, "dropout": self.attention_dropout if self.training else 0.0}
        if self.group_size > 1:
            key, value = (heads.repeat_interleave(self.group_size, dim=1) for heads in (key, value))
        if places.images is not None:
            return places.images.attend(functools.partial(kernel, self), implementation, query, key, value, **kwargs)
        if bias is not None:
            refuse_unmasked(implementation, "add a relative position bias or a mask to its scores")
            bias = bias[..., : query.shape[2], :].to(query.dtype)
            bias = bias if bias.ndim == 4 else bias[None]
        return kernel(self, query, key, value, bias, **kwargs)


class PlainViTAttention(Attention):
    """Multi-head self-attention; positions may rotate queries and keys, and add a bias to the scores."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        heads, head_dim = config.attention_shape
        super().__init__(config, layer_idx, head_dim)
        self.head_dim = head_dim
        self.relative_position_bias = relative_position_bias(config, shared=False)
        self.norm = norm_or_none(config, config.attention_inner_norm, heads * head_dim)
        self.o_proj = output_projection(config)
        self.dropout = dropout_or_none(config.hidden_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None, places: Places = PLAIN, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.project(hidden_states, places)
        query = optional(self.q_norm, query).transpose(1, 2)
        key = optional(self.k_norm, key).transpose(1, 2)  # B heads L d
        value = optional(self.v_norm, value).transpose(1, 2)
        if places.rotation is not None:
            query, key = places.rotation.rotate(query), places.rotation.rotate(key)
        if self.relative_position_bias is not None:
            bias = self.relative_position_bias(places.distances, query, self.scaling)
        attended, weights = self.attend(query, key, value, bias, places, **kwargs)
        attended = self.o_proj(optional(self.norm, attended.flatten(2)))
        return optional(self.dropout, attended), weights

    def project(self, hidden_states: torch.Tensor, places: Places) -> tuple[torch.Tensor, ...]:
        """Return the queries of the tokens to compute, and all keys and values, of shape (B, L, heads, d)."""
        hidden_states, heads = cast_once(hidden_states), (-1, self.head_dim)
        query = self.q_proj(places.first(hidden_states)).unflatten(-1, heads)
        return query, self.k_proj(hidden_states).unflatten(-1, heads), self.v_proj(hidden_states).unflatten(-1, heads)


class PlainViTWindowAttention(PlainViTAttention):
    """Self-attention within windows of the patch grid."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if self.relative_position_bias is not None:
            self.relative_position_bias = DecomposedRelativePositionBias(config, config.window_of(layer_idx))

    def forward(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None, places: Places = PLAIN, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        windows, batch = cast(Windows, places.windows), hidden_states.shape[0]
        rotation = windows.rotation(places.rotation, batch)
        inside = places._replace(rotation=rotation, distances=windows.distances, num_output_tokens=None)
        mask = bias if windows.mask is None else windows.mask.repeat(batch, 1, 1, 1)
        attended, weights = super().forward(windows.cut(hidden_states), mask, inside, **kwargs)
        return places.first(windows.join(attended)), None if weights is None else windows.spread(weights)


class PlainViTDifferentialAttention(Attention):
    """Attention with the difference of two maps, which cancels common noise (Ye et al. 2024, section 2.1)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        heads, head_dim = config.attention_shape
        super().__init__(config, layer_idx, head_dim // 2)
        self.half_dim = head_dim // 2
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        self.lambda_q1 = nn.Parameter(torch.zeros(self.half_dim))
        self.lambda_k1 = nn.Parameter(torch.zeros(self.half_dim))
        self.lambda_q2 = nn.Parameter(torch.zeros(self.half_dim))
        self.lambda_k2 = nn.Parameter(torch.zeros(self.half_dim))
        self.head_norm = nn.RMSNorm(head_dim, eps=1e-5)
        self.norm = norm_or_none(config, config.attention_inner_norm, heads * head_dim)
        self.o_proj = output_projection(config)
        self.dropout = dropout_or_none(config.hidden_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, bias: None = None, places: Places = PLAIN, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, halves = cast_once(hidden_states), (-1, 2, self.half_dim)
        query = self.q_proj(places.first(hidden_states)).unflatten(-1, halves)
        query = optional(self.q_norm, query).transpose(1, 2)
        key = optional(self.k_norm, self.k_proj(hidden_states).unflatten(-1, halves)).transpose(1, 2)  # B heads L 2 d/2
        value = self.v_proj(hidden_states).unflatten(-1, (-1, 2 * self.half_dim)).transpose(1, 2)
        share = self.noise_share().type_as(value)
        attended, weights = self.attend(query[..., 0, :], key[..., 0, :], value, None, places, **kwargs)
        noise, noise_weights = self.attend(query[..., 1, :], key[..., 1, :], value, None, places, **kwargs)
        attended = self.head_norm(attended - share * noise) * (1 - self.lambda_init)
        attended = self.o_proj(optional(self.norm, attended.flatten(2)))
        if weights is not None and noise_weights is not None:
            weights = weights - share * noise_weights
        return optional(self.dropout, attended), weights

    def noise_share(self) -> torch.Tensor:
        """Return the learned weight of the second map."""
        first = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1).float())
        second = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2).float())
        return first - second + self.lambda_init

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the lambda vectors as the paper's code does."""
        for weight in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            init.normal_(weight, std=0.1)


# Self-attentions with other attention weights


class WeighingAttention(PlainViTAttention):
    """Base class for weights that no kernel computes: every implementation falls back to plain matrix products."""

    @abstractmethod
    def weigh(self, products: torch.Tensor) -> torch.Tensor:
        """Return the weights (B, heads, L, L) for the products of queries and keys."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention with the weights of this class; biases and images of many sizes are refused earlier."""
        weights = self.weigh(torch.matmul(query, key.transpose(2, 3)))
        return torch.matmul(weights, value).transpose(1, 2), weights

    def drop(self, weights: torch.Tensor) -> torch.Tensor:
        """Apply the dropout of the weights."""
        return nn.functional.dropout(weights, p=self.attention_dropout, training=self.training)


class HeadMix(nn.Module):
    """Mix the attention maps of the heads with a learned matrix (Shazeer et al. 2020)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        heads = config.num_attention_heads
        self.weight = nn.Parameter(torch.zeros(heads, heads))  # from, to
        self.register_parameter("bias", None)
        init_as("head_mix", self)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhij,hg->bgij", maps, self.weight)


class ReAttention(WeighingAttention):
    """Attention whose weights are mixed among the heads, then normalised over them (DeepViT: Zhou et al. 2021)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.head_mix = HeadMix(config)
        self.head_norm = norm_or_identity(config, True, config.num_attention_heads)

    def weigh(self, products: torch.Tensor) -> torch.Tensor:
        mixed = self.head_mix(self.drop((products * self.scaling).softmax(dim=-1)))
        return self.head_norm(mixed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class TalkingHeadsAttention(WeighingAttention):
    """Attention whose scores and weights are both mixed among the heads (Shazeer et al. 2020; CaiT)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scores_mix = HeadMix(config)
        self.weights_mix = HeadMix(config)

    def weigh(self, products: torch.Tensor) -> torch.Tensor:
        return self.weights_mix(self.drop(self.scores_mix(products * self.scaling).softmax(dim=-1)))


class LocalityAttention(WeighingAttention):
    """Attention of each token to all other tokens, with a learned temperature (Lee et al. 2021, section 3.2)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.temperature = nn.Parameter(torch.zeros(()))  # logarithm of the factor on the products

    def weigh(self, products: torch.Tensor) -> torch.Tensor:
        itself = torch.eye(*products.shape[-2:], device=products.device, dtype=torch.bool)
        scores = (products * self.temperature.exp()).masked_fill(itself, -torch.finfo(products.dtype).max)
        return self.drop(scores.softmax(dim=-1))

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the temperature to the usual scale."""
        init.constant_(self.temperature, math.log(self.scaling))


ATTENTIONS: dict[str, Callable[[PlainViTConfig, int], nn.Module]] = {
    "self": PlainViTAttention,
    "differential": PlainViTDifferentialAttention,
    "re_attention": ReAttention,
    "talking_heads": TalkingHeadsAttention,
    "locality": LocalityAttention,
}


def attention_of(config: PlainViTConfig, layer_idx: int) -> Callable[[PlainViTConfig, int], nn.Module]:
    """Return the attention of a block."""
    return ATTENTIONS[config.attention_type] if config.window_of(layer_idx) is None else PlainViTWindowAttention


def output_projection(config: PlainViTConfig) -> nn.Module:
    """Return the output projection of the concatenated heads, or an identity if the config has none."""
    if not config.attention_output_projection:
        return nn.Identity()
    return nn.Linear(math.prod(config.attention_shape), config.hidden_size, bias=config.attention_output_bias)
