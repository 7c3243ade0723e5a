"""Attention, softmax(q k^T / sqrt(d)) v (equations 5 to 8), its variants, and the kernels that compute it.

Shapes: `B` batch, `L` tokens, `D` hidden size, `d` head width.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.nn.modules import module as registry
from torch.utils.module_tracker import ModuleTracker
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .configuration_plain_vit import PlainViTConfig
from .layers_plain_vit import (
    NORMS,
    Dropout,
    FreshWeights,
    apply,
    cast_once,
    first_tokens,
    init_as,
    is_watched,
    norm_or_identity,
    norm_or_none,
)
from .packed_plain_vit import UNMASKED, ManySizes
from .positions_plain_vit import Distances, Rotation, relative_position_bias

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
LONGEST_PRODUCTS = 1024  # tokens; beyond that, the weights take much memory and save little time


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
    """Call torch's fused kernel as transformers' "sdpa" does, without what that decides for other models."""
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
    return attended.transpose(1, 2), None  # B L heads d


# "sdpa" is the default. It was once called "plain_vit", which saved folders may contain.
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


# Projections of query, key and value, joined for a training step


class JoinedProjection(NamedTuple):
    """Weight and bias that project tokens to query, key and value, one after the other, and the rows of each."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: list[int]


def join_projections(blocks: Sequence[nn.Module]) -> list[JoinedProjection | None]:
    """Join query, key and value of each block, so that one product computes them; a block that is not joined gets None.

    The parameters of all blocks are copied, and under autocast cast, at once; their gradients are then ready at once,
    after all others. Processes exchange gradients during the backward pass: there none is joined here, each attention
    joins its own, and their gradients are ready with those of its block.
    """
    if among_processes() or not any(block.training for block in blocks):
        return [None] * len(blocks)
    return join([getattr(block, "attention", None) for block in blocks])


def among_processes() -> bool:
    """Return whether this process is one of several."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def join(attentions: Sequence[Any]) -> list[JoinedProjection | None]:
    """Copy and cast, at once, the parameters for query, key and value of each attention that can be joined.

    A product of more rows is as exact, but rounds in another order: in evaluation nothing is joined. Nor is it where
    the call of a layer is seen or is another, such as with a hook, an adapter, a shard or a quantised weight.
    """
    layers = [projections(attention) for attention in attentions]
    every = [layer for of_one in layers for layer in of_one]
    parts = [layer.weight for layer in every]
    if len({(weight.device, weight.dtype, weight.shape[1]) for weight in parts}) != 1:
        return [None] * len(layers)
    width, rows = parts[0].shape[1], [[layer.weight.shape[0] for layer in of_one] for of_one in layers]
    counts = [sum(of_one) for of_one in rows]
    parts, sizes = [weight.flatten() for weight in parts], [width * count for count in counts]
    if any(layer.bias is not None for layer in every):
        parts += [bias_or_zeros(layer) for layer in every]
        sizes += counts
    weights_and_biases = cast_once(torch.cat(parts)).split(sizes)
    weights, biases = weights_and_biases[: len(rows)], weights_and_biases[len(rows) :] or [None] * len(rows)
    return [
        JoinedProjection(weight.view(-1, width), bias, of_one) if of_one else None
        for weight, bias, of_one in zip(weights, biases, rows, strict=True)
    ]


def projections(attention: Any) -> list[nn.Linear]:
    """Return the layers for query, key and value if one product may take their place in training; else none."""
    if not isinstance(attention, PlainViTAttention) or not attention.training:
        return []
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    return layers if all(map(is_plain, layers)) else []


def bias_or_zeros(layer: nn.Linear) -> torch.Tensor:
    """Return the bias of a layer; some keys have none beside a query that has one."""
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a dense layer with whole weights, without a hook, and with torch's `forward`."""
    return (
        type(layer) is nn.Linear
        and type(layer.weight) in (nn.Parameter, torch.Tensor)
        and not hooks_of(layer)
        and "forward" not in vars(layer)
    )


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return all hooks that see the inputs or outputs of a module, or their gradients: its own, and every module's.

    Those of torch's counters of operations only note which module runs.
    """
    if not is_watched(module):
        return []
    own = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    of_all = (
        *(registry._global_forward_pre_hooks, registry._global_forward_hooks),
        *(registry._global_backward_pre_hooks, registry._global_backward_hooks),
    )
    found = [hook for hooks in (*own, *of_all) if hooks for hook in hooks.values()]
    return [hook for hook in found if getattr(hook, "__module__", None) != ModuleTracker.__module__]


# Attentions: each maps tokens (B, L, D) to the first `num_output_tokens` of them, or all, and the weights on request


class Attention(nn.Module):
    """Base class: separate projections of query, key and value; a dot product of query and key has `width` terms."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, width: int):
        super().__init__()
        self.config = config
        self.scaling = width**-0.5 if config.attention_scale is None else config.attention_scale
        self.attention_dropout = config.attention_probs_dropout_prob
        self.is_causal = False  # read by the kernels
        joined, shared = math.prod(config.attention_shape), config.key_value_heads_of(layer_idx)
        self.group_size = config.num_attention_heads // shared
        self.q_proj = nn.Linear(config.hidden_size, joined, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, joined // self.group_size, bias=config.qkv_bias and config.key_bias)
        self.v_proj = nn.Linear(config.hidden_size, joined // self.group_size, bias=config.qkv_bias)
        self.q_norm = QK_NORMS[config.qk_norm](config, width)
        self.k_norm = QK_NORMS[config.qk_norm](config, width)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_attentions: bool,
        bias: torch.Tensor | None = None,
        segments: ManySizes | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention with the config's implementation, or the eager one if the weights are requested.

        Each head of key and value is that of a group of heads of the query. A bias on the scores has the shape
        (heads, L, L) or (B, heads, L, L); of the first tokens, only their rows are used. Of images of many sizes,
        `segments` keeps attention within each, and there is no bias.

        In evaluation torch's fused kernel is bit-equal to most sources. Training does not need that and uses the
        fastest kernel, unless someone replaced transformers' own "sdpa". The kernels do not accept an empty batch.
        """
        implementation = "eager" if output_attentions or query.shape[0] == 0 else self.config._attn_implementation
        kernel: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if kernel is SDPA:
            kernel = fast_attention_forward if self.training else fused_attention_forward
        kwargs |= {"scaling": self.scaling, "dropout": self.attention_dropout if self.training else 0.0}
        if self.group_size > 1:
            key, value = (heads.repeat_interleave(self.group_size, dim=1) for heads in (key, value))
        if segments is not None:
            compute = functools.partial(kernel, self)
            return segments.attend(compute, implementation, query, key, value, **kwargs)
        if bias is not None:
            if any(kind in implementation for kind in UNMASKED):
                raise ValueError(
                    f"attention {implementation!r} cannot add a relative position bias to its scores: call "
                    'set_attn_implementation("sdpa")'
                )
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
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        distances: Distances | None = None,
        rotation: Rotation | None = None,
        num_output_tokens: int | None = None,
        output_attentions: bool = False,
        projection: JoinedProjection | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.project(cast_once(hidden_states), num_output_tokens, projection)
        query = apply(self.q_norm, query).transpose(1, 2)
        key = apply(self.k_norm, key).transpose(1, 2)  # B heads L d
        value = value.transpose(1, 2)
        if rotation is not None:
            query, key = rotation.rotate(query), rotation.rotate(key)
        if self.relative_position_bias is not None:
            position_bias = self.relative_position_bias(distances, query, self.scaling)
        attended, weights = self.attend(query, key, value, output_attentions, position_bias, **kwargs)
        attended = self.o_proj(apply(self.norm, attended.flatten(2)))
        return self.dropout(attended), weights

    def project(
        self, hidden_states: torch.Tensor, num_queries: int | None, joined: JoinedProjection | None
    ) -> tuple[torch.Tensor, ...]:
        """Return queries of the first tokens, keys and values, of shape (B, L, heads, d)."""
        heads = (-1, self.head_dim)
        if joined is None and self.training and among_processes():
            (joined,) = join([self])
        if joined is not None:
            counts = [rows // self.head_dim for rows in joined.rows]
            projected = nn.functional.linear(hidden_states, joined.weight, joined.bias).unflatten(-1, heads)
            query, key, value = projected.split(counts, dim=2)
            return query if num_queries is None else query[:, :num_queries], key, value
        query = self.q_proj(first_tokens(hidden_states, num_queries)).unflatten(-1, heads)
        return query, self.k_proj(hidden_states).unflatten(-1, heads), self.v_proj(hidden_states).unflatten(-1, heads)


class PlainViTDifferentialAttention(Attention):
    """The difference of two attention maps, which cancels their common noise (Ye et al. 2024, section 2.1)."""

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
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: None = None,
        distances: Distances | None = None,
        rotation: None = None,
        num_output_tokens: int | None = None,
        output_attentions: bool = False,
        projection: None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, halves = cast_once(hidden_states), (-1, 2, self.half_dim)
        querying = first_tokens(hidden_states, num_output_tokens)
        query = apply(self.q_norm, self.q_proj(querying).unflatten(-1, halves)).transpose(1, 2)
        key = apply(self.k_norm, self.k_proj(hidden_states).unflatten(-1, halves)).transpose(1, 2)  # B heads L 2 d/2
        value = self.v_proj(hidden_states).unflatten(-1, (-1, 2 * self.half_dim)).transpose(1, 2)
        share = self.noise_share().type_as(value)
        attended, weights = self.attend(query[..., 0, :], key[..., 0, :], value, output_attentions, **kwargs)
        noise, noise_weights = self.attend(query[..., 1, :], key[..., 1, :], value, output_attentions, **kwargs)
        attended = self.head_norm(attended - share * noise) * (1 - self.lambda_init)
        attended = self.o_proj(apply(self.norm, attended.flatten(2)))
        if weights is not None and noise_weights is not None:
            weights = weights - share * noise_weights
        return self.dropout(attended), weights

    def noise_share(self) -> torch.Tensor:
        """Return the learned weight of the second map."""
        first = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1).float())
        second = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2).float())
        return first - second + self.lambda_init

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the vectors of that weight as the paper's code does."""
        for weight in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            init.normal_(weight, std=0.1)


# Self-attentions that compute their weights in another way


class WeighingAttention(PlainViTAttention):
    """Base class: no kernel computes these weights, so plain matrix products do, with every implementation."""

    @abstractmethod
    def weigh(self, products: torch.Tensor) -> torch.Tensor:
        """Return the weights (B, heads, L, L) for the products of queries and keys."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_attentions: bool,
        bias: torch.Tensor | None = None,
        segments: ManySizes | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention with the weights of this class; biases and images of many sizes are refused earlier."""
        weights = self.weigh(torch.matmul(query, key.transpose(2, 3)))
        return torch.matmul(weights, value).transpose(1, 2), weights

    def drop(self, weights: torch.Tensor) -> torch.Tensor:
        """Apply the dropout of the weights."""
        return nn.functional.dropout(weights, p=self.attention_dropout, training=self.training)


class HeadMix(nn.Module):
    """Replace the maps of the heads by learned combinations of them (Shazeer et al. 2020)."""

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
    """Attention of each token to the others only, with a learned temperature (Lee et al. 2021, section 3.2)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.temperature = nn.Parameter(torch.zeros(()))  # logarithm of the factor on the products

    def weigh(self, products: torch.Tensor) -> torch.Tensor:
        itself = torch.eye(*products.shape[-2:], device=products.device, dtype=torch.bool)
        scores = (products * self.temperature.exp()).masked_fill(itself, -torch.finfo(products.dtype).max)
        return self.drop(scores.softmax(dim=-1))

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Start from the usual factor."""
        init.constant_(self.temperature, math.log(self.scaling))


ATTENTIONS: dict[str, Callable[[PlainViTConfig, int], nn.Module]] = {
    "self": PlainViTAttention,
    "differential": PlainViTDifferentialAttention,
    "re_attention": ReAttention,
    "talking_heads": TalkingHeadsAttention,
    "locality": LocalityAttention,
}


def output_projection(config: PlainViTConfig) -> nn.Module:
    """Return the projection of the concatenated heads, or an identity if the config has none."""
    if not config.attention_output_projection:
        return nn.Identity()
    return nn.Linear(math.prod(config.attention_shape), config.hidden_size, bias=config.attention_output_bias)
