"""The variations that a config can choose instead of the plain layers: norms, MLPs, blocks, poolers, positions.

Shapes: `B` batch, `C` channels, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size, `d` head width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_plain_vit import PlainViTConfig

# Fresh weights: each table says how its source draws every kind of tensor; `std` is the config's initializer_range


def drawn_as(kind: str, layer: nn.Module) -> nn.Module:
    """Say which kind of layer this is, for a source that draws it otherwise than "dense"; return it."""
    layer.drawn_as = kind  # type: ignore[assignment]
    return layer


def _normal(tensor: torch.Tensor, std: float) -> None:
    init.trunc_normal_(tensor, std=std)


def _normal_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    init.trunc_normal_(layer.weight, std=std)
    _bias(layer, init.zeros_)


def _torch_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    """Draw weight and bias from where `reset_parameters` of torch does."""
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
    """Draw a normal cut at two deviations, of variance 1 / fan-in after the cut (jax.nn.initializers.lecun_normal)."""
    scale = layer.weight[0].numel() ** -0.5 / 0.87962566103423978
    init.trunc_normal_(layer.weight, std=scale, a=-2 * scale, b=2 * scale)
    _bias(layer, init.zeros_)


def _zero_layer(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    init.zeros_(layer.weight)
    _bias(layer, init.zeros_)


def _bias(layer: nn.Linear | nn.Conv2d, draw: Callable[[torch.Tensor], Any]) -> None:
    if layer.bias is not None:
        draw(layer.bias)


def _drawn(layers: dict[str, Callable], tokens: dict[str, Callable]) -> dict[str, Callable[[Any, float], Any]]:
    """Return a whole table: kinds of layers are drawn as "dense" and kinds of tokens as "tokens" where not named."""
    kinds = dict.fromkeys(("mlp", "patches", "classifier"), layers["dense"])
    names = ("cls_token", "distillation_token", "register_tokens", "positions")
    return {
        **kinds, **layers, "zeros": _zero_layer, "last_gain": lambda gain, std: init.ones_(gain),
        **dict.fromkeys(names, tokens["tokens"]), **tokens, "mask_token": lambda token, std: init.zeros_(token),
    }  # fmt: skip


INITIALIZATIONS: dict[str, dict[str, Callable[[Any, float], Any]]] = {
    "transformers": _drawn({"dense": _normal_layer}, {"tokens": _normal}),
    "timm": _drawn(
        {"dense": lambda layer, std: _normal_layer(layer, 0.02), "patches": _torch_layer},
        {
            "tokens": lambda token, std: init.normal_(token, std=1e-6),
            "distillation_token": lambda token, std: _normal(token, 0.02),
            "positions": lambda table, std: _normal(table, 0.02),
        },
    ),
    "google": _drawn(
        {"dense": _xavier_layer, "mlp": _xavier_mlp_layer, "patches": _lecun_layer, "classifier": _zero_layer},
        {
            "tokens": lambda token, std: init.normal_(token, std=0.02),
            "cls_token": lambda token, std: init.zeros_(token),
            "last_gain": lambda gain, std: init.zeros_(gain),
        },
    ),
    "vit_pytorch": _drawn({"dense": _torch_layer}, {"tokens": lambda token, std: init.normal_(token)}),
}


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


# What is on a residual branch


class LayerScale(nn.Module):
    """Multiply each channel of a residual branch by a learned gain (Touvron et al. 2021b, section 2)."""

    def __init__(self, width: int, initial_value: float):
        super().__init__()
        self.initial_value = initial_value
        self.weight = nn.Parameter(torch.full((width,), float(initial_value)))

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
    gain = config.layer_scale_init_value
    return nn.Identity() if gain is None else LayerScale(config.hidden_size, gain)


# MLPs


class SwiGLU(nn.Module):
    """Gated MLP: fc2(act(gate(x)) * fc1(x)) (Shazeer 2020, section 2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.gate = drawn_as("mlp", nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias))
        self.fc1 = drawn_as("mlp", nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias))
        self.activation = ACT2FN[config.hidden_act]
        self.norm = norm_or_identity(config, config.mlp_inner_norm, config.intermediate_size)
        self.fc2 = drawn_as("mlp", nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = cast_once(hidden_states)
        hidden_states = self.activation(self.gate(hidden_states)) * self.fc1(hidden_states)
        return self.dropout(self.fc2(self.norm(self.dropout(hidden_states))))


class PackedSwiGLU(nn.Module):
    """Gated MLP whose first layer holds gate and value one above the other (DINOv2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.fc1 = drawn_as("mlp", nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias))
        self.activation = ACT2FN[config.hidden_act]
        self.norm = norm_or_identity(config, config.mlp_inner_norm, config.intermediate_size)
        self.fc2 = drawn_as("mlp", nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, value = self.fc1(hidden_states).chunk(2, dim=-1)
        return self.dropout(self.fc2(self.norm(self.dropout(self.activation(gate) * value))))


# Blocks: each takes makers of its attention and its MLP, so that every kind of either fits every kind of block, and
# gives the first `read` tokens, or all


def first_tokens(hidden_states: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return the first tokens, or all where no count is given."""
    return hidden_states if count is None else hidden_states[:, :count].contiguous()


def cast_once(hidden_states: torch.Tensor) -> torch.Tensor:
    """Cast under autocast what several products read: each would make, and keep for its gradient, a copy of its own."""
    device = hidden_states.device.type
    if hidden_states.dtype != torch.float32 or not torch.amp.is_autocast_available(device):  # "meta" has none
        return hidden_states
    if not torch.is_autocast_enabled(device):
        return hidden_states
    return hidden_states.to(torch.get_autocast_dtype(device))


class PostNormLayer(GradientCheckpointingLayer):
    """Block whose norms end the residual branches instead of opening them."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        self.attention = attention(config, layer_idx)
        self.layernorm_before = norm_or_identity(config, True)
        self.mlp = mlp(config)
        self.layernorm_after = norm_or_identity(config, True)
        self.drop_path = StochasticDepth(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, read: int | None = None, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.attention(hidden_states, read, **kwargs)
        hidden_states = first_tokens(hidden_states, read) + self.drop_path(self.layernorm_before(attended))
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

    def forward(self, hidden_states: torch.Tensor, read: int | None = None, **kwargs: Any) -> torch.Tensor:
        normed = self.layernorm_before(hidden_states)
        attended, _ = self.attention(normed, read, **kwargs)
        transformed = self.mlp(first_tokens(normed, read))
        return first_tokens(hidden_states, read) + self.drop_path(self.layer_scale1(attended + transformed))


class AttentionBranch(nn.Module):
    """One of several attentions side by side in a block."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable):
        super().__init__()
        self.layernorm = norm_or_identity(config, True)
        self.attention = attention(config, layer_idx)
        self.layer_scale = layer_scale_or_identity(config)
        self.drop_path = StochasticDepth(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, read: int | None = None, **kwargs: Any) -> torch.Tensor:
        return self.drop_path(self.layer_scale(self.attention(self.layernorm(hidden_states), read, **kwargs)[0]))


class MLPBranch(nn.Module):
    """One of several MLPs side by side in a block."""

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

    def forward(self, hidden_states: torch.Tensor, read: int | None = None, **kwargs: Any) -> torch.Tensor:
        branches = [branch(hidden_states, read, **kwargs) for branch in self.attention_branches]
        hidden_states = first_tokens(hidden_states, read) + torch.stack(branches).sum(dim=0)
        return hidden_states + torch.stack([branch(hidden_states) for branch in self.mlp_branches]).sum(dim=0)


# Patch embeddings


class LinearPatchEmbeddings(nn.Module):
    """Flatten each patch in the order row, column, channel, and project it: vit-pytorch's patch embedding."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.patch_height, self.patch_width = config.patch_shape
        width = self.patch_height * self.patch_width * config.num_channels
        self.pre_norm = norm_or_identity(config, config.patch_pre_norm, width)
        self.projection = drawn_as("patches", nn.Linear(width, config.hidden_size, bias=config.patch_bias))
        self.post_norm = norm_or_identity(config, config.patch_post_norm)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = pixel_values.shape
        h, w = height // self.patch_height, width // self.patch_width
        pixel_values = pixel_values[..., : h * self.patch_height, : w * self.patch_width]
        patches = pixel_values.reshape(batch, channels, h, self.patch_height, w, self.patch_width)
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # B N (rows columns C)
        return self.post_norm(self.projection(self.pre_norm(patches)))


def pad_same(images: torch.Tensor, kernel: int, stride: int, value: float = 0.0) -> torch.Tensor:
    """Pad as TensorFlow's "SAME" does where the stride divides the sides, the odd pixel at the end."""
    margin = max(0, kernel - stride)
    before, after = margin // 2, margin - margin // 2
    return F.pad(images, (before, after, before, after), value=value)


class StandardizedConv2d(nn.Conv2d):
    """Convolution whose kernels are standardised (Qiao et al. 2019)."""

    def __init__(self, config: PlainViTConfig, channels_in: int, channels_out: int, kernel: int, stride: int = 1):
        super().__init__(channels_in, channels_out, kernel, stride, bias=False)
        drawn_as("patches", self)
        self.standardize = STEM_STYLES[config.stem_style][0]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = pad_same(images, self.kernel_size[0], self.stride[0])
        return F.conv2d(images, self.standardize(self.weight), stride=self.stride)


def _standardize_as_timm(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.reshape(1, weight.shape[0], -1)
    return F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-8).reshape_as(weight)


def _standardize_as_google(weight: torch.Tensor) -> torch.Tensor:
    std, mean = torch.std_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
    return (weight - mean) / (std + 1e-5)


# Whose numbers the stem gives: how kernels are standardised, and the epsilon of its group norms.
STEM_STYLES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "timm": (_standardize_as_timm, 1e-5),
    "google": (_standardize_as_google, 1e-6),
}


class Bottleneck(nn.Module):
    """Residual unit of three convolutions, of which the middle one may halve the resolution."""

    def __init__(self, config: PlainViTConfig, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        inner, eps = channels_out // 4, STEM_STYLES[config.stem_style][1]
        self.conv1 = StandardizedConv2d(config, channels_in, inner, 1)
        self.norm1 = nn.GroupNorm(32, inner, eps)
        self.conv2 = StandardizedConv2d(config, inner, inner, 3, stride)
        self.norm2 = nn.GroupNorm(32, inner, eps)
        self.conv3 = StandardizedConv2d(config, inner, channels_out, 1)
        self.norm3 = drawn_as("last_gain", nn.GroupNorm(32, channels_out, eps))
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != channels_out or stride != 1:
            conv = StandardizedConv2d(config, channels_in, channels_out, 1, stride)
            self.shortcut = nn.Sequential(conv, nn.GroupNorm(32, channels_out, eps))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.norm1(self.conv1(images)))
        features = F.relu(self.norm2(self.conv2(features)))
        return F.relu(self.norm3(self.conv3(features)) + self.shortcut(images))


class ResNetPatchEmbeddings(nn.Module):
    """The paper's hybrid: a ResNet with group norms, then a convolution over its features (section 3.1, B.1.4)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        channels = 64
        self.conv = StandardizedConv2d(config, config.num_channels, channels, 7, 2)
        self.norm = nn.GroupNorm(32, channels, STEM_STYLES[config.stem_style][1])
        self.stages = nn.ModuleList()
        for number, depth in enumerate(config.stem_depths):
            wide, stride = 256 * 2**number, 2 if number else 1
            first = Bottleneck(config, channels, wide, stride)
            self.stages.append(nn.Sequential(first, *(Bottleneck(config, wide, wide, 1) for _ in range(depth - 1))))
            channels = wide
        height, width = (pixels // config.stem_stride for pixels in config.patch_shape)
        projection = nn.Conv2d(channels, config.hidden_size, (height, width), (height, width), bias=config.patch_bias)
        self.projection = drawn_as("patches", projection)
        self.post_norm = norm_or_identity(config, config.patch_post_norm)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.norm(self.conv(pixel_values)))
        features = F.max_pool2d(pad_same(features, 3, 2, -math.inf), 3, 2)
        for stage in self.stages:
            features = stage(features)
        return self.post_norm(self.projection(features).flatten(2).transpose(1, 2))  # B N D


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
    """Fit a table of patch positions to another grid, with the numbers of `torch.nn.functional.interpolate`.

    Its two-dimensional filters are products of one-dimensional ones: one small matrix for the rows, one for the
    columns. Written so, they compile and export with any size, and their gradient is deterministic everywhere; what
    they round otherwise is left to compiled programs.

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
    grid = table.float().reshape(*old_grid, -1)
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or table.device.type not in ("cpu", "cuda"):
        return _by_matrices(grid, new_grid, mode).flatten(0, 1).to(table.dtype)
    resampled = _by_torch(grid, new_grid, mode)
    if torch.is_grad_enabled() and table.requires_grad:
        differentiable = _by_matrices(grid, new_grid, mode)
        resampled = resampled.detach() + (differentiable - differentiable.detach())  # adds zeros, and a gradient
    return resampled.flatten(0, 1).to(table.dtype)


def _by_torch(grid: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """Resample (h, w, D) as the sources do: one call, the channels last in memory, to the bit."""
    kind, _, option = mode.partition("_")
    image = grid[None].permute(0, 3, 1, 2)
    corners, antialias = option == "align_corners", option == "antialias"
    return F.interpolate(image, size=size, mode=kind, align_corners=corners, antialias=antialias)[0].permute(1, 2, 0)


def _by_matrices(grid: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """Resample (h, w, D) by a product for each axis, in float32 under autocast too."""
    device = grid.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _by_matrices(grid, size, mode)
    rows = _interpolation_matrix(grid.shape[0], size[0], mode, grid.device)
    columns = _interpolation_matrix(grid.shape[1], size[1], mode, grid.device)
    return torch.einsum("yh,xw,hwd->yxd", rows, columns, grid)


def _interpolation_matrix(old: int, new: int, mode: str, device: torch.device) -> torch.Tensor:
    """Return the (new, old) matrix that resamples one axis, with the filter and the borders that torch has."""
    cubic = mode.startswith("bicubic")
    index = torch.arange(new, device=device, dtype=torch.float32)
    # A tensor, because of a symbolic size a compiler would ask whether it shrinks or grows the axis.
    scale = torch.full((), old, device=device, dtype=torch.float32) / new
    if mode.endswith("align_corners"):
        centers = index * (old - 1) / (new - 1) if new > 1 else index
    else:
        centers = (index + 0.5) * scale - 0.5
    sources = torch.arange(old, device=device, dtype=torch.float32)
    if mode.endswith("antialias"):
        # The filter widens when the axis shrinks, and is cut and renormalised at the borders.
        stretch = scale.clamp(min=1)
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
    """Pass on every token."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def fused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend by torch's fused kernel; it takes no batch of 0 images."""
    if query.shape[0] == 0:
        return query @ key.transpose(-2, -1) @ value
    return F.scaled_dot_product_attention(query, key, value)


class PatchPooler(nn.Module):
    """Base of the poolers that read the patches, or all tokens where the config says so."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.first = 0 if config.pool_prefix_tokens else config.num_prefix_tokens
        self.after = 0 if config.pool_prefix_tokens or not config.register_tokens_last else config.num_register_tokens

    def select(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the tokens that are pooled."""
        return hidden_states[:, self.first : hidden_states.shape[1] - self.after]


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


class ClassMeanPooler(PatchPooler):
    """Put the class token and the average of the patches side by side (Oquab et al. 2023, section 7.1)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.cat((hidden_states[:, 0], self.select(hidden_states).mean(dim=1)), dim=1)


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
        inner = config.intermediate_size * (2 if config.mlp_type == "swiglu_packed" else 1)  # as timm counts them
        self.fc1 = drawn_as("mlp", nn.Linear(width, inner))
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = drawn_as("mlp", nn.Linear(inner, width))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.select(hidden_states)
        probe = self.probe.expand(hidden_states.shape[0], -1, -1)
        query, key, value = (
            projection(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B heads L d
            for projection, tokens in (
                (self.q_proj, probe), (self.k_proj, hidden_states), (self.v_proj, hidden_states)
            )
        )  # fmt: skip
        pooled = fused_attention(query, key, value)
        pooled = self.o_proj(pooled.transpose(1, 2).flatten(2))
        pooled = pooled + self.fc2(self.activation(self.fc1(self.layernorm(pooled))))
        return pooled[:, 0]


class QueryPooler(PatchPooler):
    """Let a learned query attend to the patches, and project what it found (AIMv2: Fini et al. 2024)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        self.k_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.select(hidden_states)
        query, key, value = (
            tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B heads L d
            for tokens in (
                self.query.expand(hidden_states.shape[0], -1, -1),
                self.k_proj(hidden_states),
                self.v_proj(hidden_states),
            )
        )
        pooled = fused_attention(query, key, value)
        return self.o_proj(pooled.transpose(1, 2).flatten(2))[:, 0]


class RefinementPooler(nn.Module):
    """Let all tokens attend to each other without weights; read the class token, or their average where there is none.

    Source: the "prr" pooling of timm 1.0.31 (patch representation refinement).
    """

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.use_class_token = config.use_class_token

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = hidden_states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B heads L d
        refined = fused_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return refined[:, 0] if self.use_class_token else refined.mean(dim=1)


POOLERS: dict[str, Callable[[PlainViTConfig], nn.Module]] = {
    "cls": ClassTokenPooler,
    "mean": MeanPooler,
    "max": MaxPooler,
    "mean_max": MeanMaxPooler,
    "cls_mean": ClassMeanPooler,
    "map": MapPooler,
    "query": QueryPooler,
    "prr": RefinementPooler,
    "none": NoPooler,
}


def differential_lambda_init(layer_idx: int) -> float:
    """Return the fixed part of the weight of the second attention map (Ye et al. 2024, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


# What a masked-image model predicts of a patch. Each turns features (B, D, h, w) into an image (B, C, H, W), the logits
# (B, N, colours) of a choice among colours, and the mean loss over the patches that `masked` (B, h, w) hides


class PixelPredictor(nn.Module):
    """Predict every pixel of each patch by one dense layer (Xie et al. 2022, section 3.3)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.shape = (config.num_channels, *config.patch_shape)
        self.projection = nn.Linear(config.hidden_size, math.prod(self.shape))

    def forward(
        self, features: torch.Tensor, pixel_values: torch.Tensor, masked: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        pixels = self.projection(features.permute(0, 2, 3, 1)).unflatten(-1, self.shape)  # B h w C rows columns
        image = pixels.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        if masked is None:
            return image, None, None
        hidden = masked.repeat_interleave(self.shape[1], 1).repeat_interleave(self.shape[2], 2).unsqueeze(1)  # B 1 H W
        difference = F.l1_loss(image, pixel_values.to(image.dtype), reduction="none") * hidden
        return image, None, difference.sum() / (hidden.sum() * self.shape[0]).clamp(min=1)


class MeanColorPredictor(nn.Module):
    """Predict the mean colour of each patch, as one of 8 levels per channel (Dosovitskiy et al. 2021, B.1.2)."""

    LEVELS = 8  # 3 bits

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_shape = config.patch_shape
        self.mean, self.std = config.pixel_mean, config.pixel_std
        self.projection = nn.Linear(config.hidden_size, self.LEVELS**config.num_channels)

    def forward(
        self, features: torch.Tensor, pixel_values: torch.Tensor, masked: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        logits = self.projection(features.permute(0, 2, 3, 1))  # B h w colours
        image = self.paint(logits.argmax(dim=-1), logits)
        if masked is None:
            return image, logits.flatten(1, 2), None
        losses = F.cross_entropy(logits.permute(0, 3, 1, 2), self.colors(pixel_values), reduction="none")  # B h w
        return image, logits.flatten(1, 2), (losses * masked).sum() / masked.sum().clamp(min=1)

    def colors(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the number of each patch's mean colour, of shape (B, h, w): channel 0 is its lowest digit."""
        mean, std = self.statistics(pixel_values)
        averages = F.avg_pool2d(pixel_values * std + mean, self.patch_shape)
        bounds = torch.arange(1, self.LEVELS, device=averages.device, dtype=averages.dtype) / self.LEVELS
        return (torch.bucketize(averages.contiguous(), bounds) * self.digits(averages.device)).sum(dim=1)

    def paint(self, colors: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the normalised image (B, C, H, W) of these colours (B, h, w), each level at its middle."""
        mean, std = self.statistics(like)
        levels = colors.unsqueeze(1) // self.digits(colors.device) % self.LEVELS  # B C h w
        image = ((levels + 0.5) / self.LEVELS - mean) / std
        return image.repeat_interleave(self.patch_shape[0], 2).repeat_interleave(self.patch_shape[1], 3)

    def digits(self, device: torch.device) -> torch.Tensor:
        """Return what one level of each channel counts, of shape (C, 1, 1)."""
        return (self.LEVELS ** torch.arange(self.num_channels, device=device)).view(-1, 1, 1)

    def statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the image processor subtracted and divided by, each of shape (C or 1, 1, 1)."""
        mean, std = like.new_tensor(self.mean), like.new_tensor(self.std)
        return mean.view(-1, 1, 1), std.view(-1, 1, 1)


PATCH_PREDICTORS: dict[str, Callable[[PlainViTConfig], nn.Module]] = {
    "pixels": PixelPredictor,
    "mean_color": MeanColorPredictor,
}
