"""The variations that a config can choose instead of the plain layers: norms, MLPs, blocks, poolers, positions.

Shapes: `B` batch, `C` channels, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size, `d` head width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_plain_vit import PlainViTConfig

# Norms


class PerHeadRMSNorm(nn.Module):
    """Scale each head's query or key to length sqrt(d), times a learned gain (vit-pytorch's qk norm)."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.normalize(hidden_states, dim=-1) * hidden_states.shape[-1] ** 0.5 * self.weight  # B L heads d


NORMS: dict[str, Callable[..., nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}
QK_NORMS: dict[str | None, Callable[[PlainViTConfig, int], nn.Module]] = {
    None: lambda config, head_dim: nn.Identity(),
    "norm": lambda config, head_dim: NORMS[config.norm_type](head_dim, eps=config.layer_norm_eps),
    "rms_per_head": lambda config, head_dim: PerHeadRMSNorm(config.num_attention_heads, head_dim),
}


def norm_or_identity(config: PlainViTConfig, present: bool, width: int | None = None) -> nn.Module:
    """Return the config's norm over `width` (the hidden size if not given), or nothing at all."""
    if not present:
        return nn.Identity()
    return NORMS[config.norm_type](config.hidden_size if width is None else width, eps=config.layer_norm_eps)


# What stands on a residual branch


class LayerScale(nn.Module):
    """Multiply each channel of a residual branch by a learned gain (Touvron et al. 2021b, section 2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.initial_value = config.layer_scale_init_value
        self.weight = nn.Parameter(torch.full((config.hidden_size,), float(config.layer_scale_init_value)))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight


class StochasticDepth(nn.Module):
    """Leave a residual branch out for some samples of the batch, in training (Huang et al. 2016)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        super().__init__()
        self.rate = config.drop_path_rate * layer_idx / max(1, config.num_hidden_layers - 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return hidden_states
        keep = hidden_states.new_empty(hidden_states.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return hidden_states * keep / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def layer_scale_or_identity(config: PlainViTConfig) -> nn.Module:
    """Return a LayerScale, or nothing where the config has none."""
    return nn.Identity() if config.layer_scale_init_value is None else LayerScale(config)


# MLPs


class SwiGLU(nn.Module):
    """Gated MLP: fc2(act(gate(x)) * fc1(x)) (Shazeer 2020, section 2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = norm_or_identity(config, config.mlp_inner_norm, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.activation(self.gate(hidden_states)) * self.fc1(hidden_states)
        return self.dropout(self.fc2(self.norm(self.dropout(hidden_states))))


class PackedSwiGLU(nn.Module):
    """Gated MLP whose first layer holds gate and value one above the other (DINOv2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = norm_or_identity(config, config.mlp_inner_norm, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, value = self.fc1(hidden_states).chunk(2, dim=-1)
        return self.dropout(self.fc2(self.norm(self.dropout(self.activation(gate) * value))))


# Blocks: each takes makers of its attention and its MLP, so that every kind of either fits every kind of block


class PostNormLayer(GradientCheckpointingLayer):
    """Block whose norms end the residual branches instead of opening them."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        self.attention = attention(config, layer_idx)
        self.layernorm_before = norm_or_identity(config, True)
        self.mlp = mlp(config)
        self.layernorm_after = norm_or_identity(config, True)
        self.drop_path = StochasticDepth(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.attention(hidden_states, **kwargs)
        hidden_states = hidden_states + self.drop_path(self.layernorm_before(attended))
        return hidden_states + self.drop_path(self.layernorm_after(self.mlp(hidden_states)))


class ParallelLayer(GradientCheckpointingLayer):
    """Block that runs attention and MLP side by side on one norm (Dehghani et al. 2023, section 2)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        self.layernorm_before = norm_or_identity(config, True)
        self.attention = attention(config, layer_idx)
        self.mlp = mlp(config)
        self.layer_scale1 = layer_scale_or_identity(config)
        self.drop_path = StochasticDepth(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = self.layernorm_before(hidden_states)
        attended, _ = self.attention(normed, **kwargs)
        return hidden_states + self.drop_path(self.layer_scale1(attended + self.mlp(normed)))


class AttentionBranch(nn.Module):
    """One of several attentions that stand side by side in a block."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable):
        super().__init__()
        self.layernorm = norm_or_identity(config, True)
        self.attention = attention(config, layer_idx)
        self.layer_scale = layer_scale_or_identity(config)
        self.drop_path = StochasticDepth(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.drop_path(self.layer_scale(self.attention(self.layernorm(hidden_states), **kwargs)[0]))


class MLPBranch(nn.Module):
    """One of several MLPs that stand side by side in a block."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, mlp: Callable):
        super().__init__()
        self.layernorm = norm_or_identity(config, True)
        self.mlp = mlp(config)
        self.layer_scale = layer_scale_or_identity(config)
        self.drop_path = StochasticDepth(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.drop_path(self.layer_scale(self.mlp(self.layernorm(hidden_states))))


class BranchesLayer(GradientCheckpointingLayer):
    """Block of several attentions, then several MLPs, each group summed (Touvron et al. 2022b, section 3)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        branches = range(config.num_branches)
        self.attention_branches = nn.ModuleList([AttentionBranch(config, layer_idx, attention) for _ in branches])
        self.mlp_branches = nn.ModuleList([MLPBranch(config, layer_idx, mlp) for _ in branches])

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        branches = [branch(hidden_states, **kwargs) for branch in self.attention_branches]
        hidden_states = hidden_states + torch.stack(branches).sum(dim=0)
        return hidden_states + torch.stack([branch(hidden_states) for branch in self.mlp_branches]).sum(dim=0)


# Patch embeddings


class LinearPatchEmbeddings(nn.Module):
    """Flatten each patch in the order row, column, channel, and project it: vit-pytorch's patch embedding."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        size = config.patch_size
        self.patch_height, self.patch_width = (size, size) if isinstance(size, int) else size
        width = self.patch_height * self.patch_width * config.num_channels
        self.pre_norm = norm_or_identity(config, config.patch_pre_norm, width)
        self.projection = nn.Linear(width, config.hidden_size, bias=config.patch_bias)
        self.post_norm = norm_or_identity(config, config.patch_post_norm)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = pixel_values.shape
        h, w = height // self.patch_height, width // self.patch_width
        patches = pixel_values.view(batch, channels, h, self.patch_height, w, self.patch_width)
        patches = patches.permute(0, 2, 4, 3, 5, 1).reshape(batch, h * w, -1)  # B N (rows columns C)
        return self.post_norm(self.projection(self.pre_norm(patches)))


class PatchDropout(nn.Module):
    """Keep a random share of the patches of each image, and every other token, in training (Liu et al. 2023)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.rate = config.patch_dropout_prob

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return patches
        batch, count, width = patches.shape
        kept = max(1, int(count * (1 - self.rate)))
        chosen = torch.rand(batch, count, device=patches.device).argsort(dim=-1)[:, :kept]
        return patches.gather(1, chosen.unsqueeze(-1).expand(-1, -1, width))


# Positions


class SinCos2DPositionEmbedding(nn.Module):
    """Sines and cosines of column and row, for any grid (Beyer et al. 2022; in the order of big_vision)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.hidden_size = config.hidden_size

    def forward(self, grid_size: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        h, w = grid_size
        quarter = self.hidden_size // 4
        rows, columns = torch.meshgrid(
            torch.arange(h, device=like.device), torch.arange(w, device=like.device), indexing="ij"
        )
        frequencies = torch.arange(quarter, device=like.device) / (quarter - 1)
        frequencies = 1.0 / (10000**frequencies)
        rows, columns = rows.flatten()[:, None] * frequencies, columns.flatten()[:, None] * frequencies
        table = torch.cat((columns.sin(), columns.cos(), rows.sin(), rows.cos()), dim=1)  # N D
        return table.to(like.dtype)


def resample_positions(
    table: torch.Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], mode: str
) -> torch.Tensor:
    """Fit a table of patch positions to another grid.

    The two-dimensional filters of `torch.nn.functional.interpolate` are products of one-dimensional ones: one small
    matrix for the rows, one for the columns. Written so, they compile and export with any size.

    Args:
        table: Positions in raster order, of shape (h * w, D).
        old_grid: (h, w) of the table, in patches.
        new_grid: (h, w) wanted.
        mode: One of the values of `PlainViTConfig.position_resampling`.

    Returns:
        The positions of the new grid, of shape (new h * new w, D), in the dtype of the table.

    Raises:
        ValueError: when "truncate" is asked for more positions than the table has.
    """
    if mode == "truncate":
        wanted = new_grid[0] * new_grid[1]
        if wanted > table.shape[0]:
            raise ValueError(
                f"the position table has {table.shape[0]} rows and {wanted} patches came: "
                'position_resampling "truncate" cannot grow a table, choose another mode or smaller images'
            )
        return table[:wanted]
    rows = _interpolation_matrix(old_grid[0], new_grid[0], mode, table.device)
    columns = _interpolation_matrix(old_grid[1], new_grid[1], mode, table.device)
    grid = table.float().reshape(*old_grid, -1)
    return torch.einsum("yh,xw,hwd->yxd", rows, columns, grid).flatten(0, 1).to(table.dtype)


def _interpolation_matrix(old: int, new: int, mode: str, device: torch.device) -> torch.Tensor:
    """Return the (new, old) matrix that resamples one axis, with the filter and the borders that torch has."""
    cubic = mode.startswith("bicubic")
    index = torch.arange(new, device=device, dtype=torch.float32)
    if mode.endswith("align_corners"):
        centers = index * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        centers = (index + 0.5) * (old / new) - 0.5
    sources = torch.arange(old, device=device, dtype=torch.float32)
    if mode.endswith("antialias"):
        # The filter widens when the axis shrinks, and is cut and renormalised at the borders.
        stretch = max(old / new, 1.0)
        distance = (sources - centers[:, None]) / stretch
        weights = _cubic(distance, -0.5) if cubic else _triangle(distance)
        return weights / weights.sum(dim=1, keepdim=True)
    # The filter keeps its width, and taps beyond a border read the border.
    weights = torch.zeros(new, old, device=device)
    first = centers.floor()
    for offset in (-1, 0, 1, 2) if cubic else (0, 1):
        tap = first + offset
        weight = _cubic(tap - centers, -0.75) if cubic else _triangle(tap - centers)
        weights = weights + weight[:, None] * (tap.clamp(0, old - 1)[:, None] == sources)
    return weights


def _cubic(distance: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' cubic convolution kernel."""
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def _triangle(distance: torch.Tensor) -> torch.Tensor:
    """Linear interpolation kernel."""
    return (1 - distance.abs()).clamp(min=0)


# Poolers: each turns tokens (B, L, D) into features


class ClassTokenPooler(nn.Module):
    """Read the class token."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[:, 0]


class NoPooler(nn.Module):
    """Hand on every token."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class PatchPooler(nn.Module):
    """Base of the poolers that read the patches, or all tokens where the config says so."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.first = 0 if config.pool_prefix_tokens else config.num_prefix_tokens
        self.behind = 0 if config.pool_prefix_tokens or not config.register_tokens_last else config.num_register_tokens

    def select(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the tokens that are pooled."""
        return hidden_states[:, self.first : hidden_states.shape[1] - self.behind]


class MeanPooler(PatchPooler):
    """Average the patches."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.select(hidden_states).mean(dim=1)


class MaxPooler(PatchPooler):
    """Take the largest value of each channel over the patches."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.select(hidden_states).amax(dim=1)


class MeanMaxPooler(PatchPooler):
    """Take the midpoint of mean and maximum."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.select(hidden_states)
        return 0.5 * (hidden_states.amax(dim=1) + hidden_states.mean(dim=1))


class MapPooler(PatchPooler):
    """Let a learned probe attend to the patches, then an MLP (Zhai et al. 2022, section 3.2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)
        self.layernorm = norm_or_identity(config, True)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.select(hidden_states)
        probe = self.probe.expand(hidden_states.shape[0], -1, -1)
        query, key, value = (
            projection(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B heads L d
            for projection, tokens in (
                (self.q_proj, probe), (self.k_proj, hidden_states), (self.v_proj, hidden_states)
            )
        )  # fmt: skip
        pooled = F.scaled_dot_product_attention(query, key, value)
        pooled = self.o_proj(pooled.transpose(1, 2).flatten(2))
        pooled = pooled + self.fc2(self.activation(self.fc1(self.layernorm(pooled))))
        return pooled[:, 0]


POOLERS: dict[str, Callable[[PlainViTConfig], nn.Module]] = {
    "cls": ClassTokenPooler,
    "mean": MeanPooler,
    "max": MaxPooler,
    "mean_max": MeanMaxPooler,
    "map": MapPooler,
    "none": NoPooler,
}


def differential_lambda_init(layer_idx: int) -> float:
    """Return the fixed part of the weight of the second attention map (Ye et al. 2024, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
