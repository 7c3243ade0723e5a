"""Alternatives to the plain layers that a config can select: norms, MLPs, blocks, patch embeddings.

Shapes: `B` batch, `C` channels, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size, `d` head width.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_plain_vit import PlainViTConfig
from .initialization_plain_vit import FreshWeights, init_as
from .packed_plain_vit import PLAIN, Places, cut_patches

# Norms

NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer_norm": nn.LayerNorm,
    "layer_norm_without_bias": partial(nn.LayerNorm, bias=False),
    "rms_norm": nn.RMSNorm,
}
PATCH_NORMS = NORMS | {"layer_norm_without_bias": nn.LayerNorm}  # next to the patch projection


def norm_or_identity(
    config: PlainViTConfig, present: bool, width: int | None = None, *, norms: Mapping[str, Callable] = NORMS
) -> nn.Module:
    """Return the config's norm over `width` (default: the hidden size), or an identity."""
    if not present:
        return nn.Identity()
    return norms[config.norm_type](config.hidden_size if width is None else width, eps=config.layer_norm_eps)


# Missing layers are None, not identities: for a single image on a GPU, a call costs more than the work inside it


def norm_or_none(config: PlainViTConfig, present: bool, width: int | None = None) -> nn.Module | None:
    """Return the config's norm over `width` (default: the hidden size), or None."""
    return norm_or_identity(config, present, width) if present else None


def dropout_or_none(rate: float) -> nn.Module | None:
    """Return a Dropout, or None if the rate is 0."""
    return nn.Dropout(rate) if rate else None


def optional(layer: nn.Module | None, hidden_states: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Apply a layer, or return the hidden states unchanged if it is None."""
    return hidden_states if layer is None else layer(hidden_states, *rest)


# Residual branches


class LayerScale(nn.Module):
    """Multiply each channel of a residual branch by a learned gain (Touvron et al. 2021b, section 2)."""

    def __init__(self, width: int, initial_value: float):
        super().__init__()
        self.initial_value = initial_value
        self.weight = nn.Parameter(torch.full((width,), float(initial_value)))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Start every gain at the same value."""
        init.constant_(self.weight, self.initial_value)


class StochasticDepth(nn.Module):
    """Drop a residual branch for some images of the batch, in training (Huang et al. 2016)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int):
        super().__init__()
        self.rate = config.drop_path_rate * layer_idx / max(1, config.num_hidden_layers - 1)
        self.uniform = torch.rand  # a training loop may replace it with random numbers tied to each sample

    def forward(self, hidden_states: torch.Tensor, places: Places) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return hidden_states
        count = hidden_states.shape[0] if places.images is None else len(places.images.grids)
        keep = self.uniform(count, 1, 1, device=hidden_states.device) >= self.rate
        keep = keep if places.images is None else places.images.spread(keep)
        return hidden_states * keep.to(hidden_states.dtype) / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def stochastic_depth_or_none(config: PlainViTConfig, layer_idx: int) -> nn.Module | None:
    """Return a StochasticDepth, or None if the config drops no branches."""
    return StochasticDepth(config, layer_idx) if config.drop_path_rate else None


def layer_scale_or_none(config: PlainViTConfig, present: bool = True) -> nn.Module | None:
    """Return a LayerScale, or None if the config has none."""
    gain = config.layer_scale_init_value if present else None
    return None if gain is None else LayerScale(config.hidden_size, gain)


# MLPs


class SwiGLU(nn.Module):
    """Gated MLP: fc2(act(gate(x)) * fc1(x)) (Shazeer 2020, section 2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.gate = init_as("mlp", nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias))
        self.fc1 = init_as("mlp", nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias))
        self.activation = ACT2FN[config.hidden_act]
        self.norm = norm_or_none(config, config.mlp_inner_norm, config.intermediate_size)
        self.fc2 = init_as("mlp", nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias))
        self.dropout = dropout_or_none(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = cast_once(hidden_states)
        hidden_states = self.activation(self.gate(hidden_states)) * self.fc1(hidden_states)
        hidden_states = optional(self.norm, optional(self.dropout, hidden_states))
        return optional(self.dropout, self.fc2(hidden_states))


class PackedSwiGLU(nn.Module):
    """Gated MLP whose first layer computes gate and value, in this order (DINOv2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.fc1 = init_as("mlp", nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias))
        self.activation = ACT2FN[config.hidden_act]
        self.norm = norm_or_none(config, config.mlp_inner_norm, config.intermediate_size)
        self.fc2 = init_as("mlp", nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias))
        self.dropout = dropout_or_none(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, value = self.fc1(hidden_states).chunk(2, dim=-1)
        hidden_states = optional(self.norm, optional(self.dropout, self.activation(gate) * value))
        return optional(self.dropout, self.fc2(hidden_states))


def cast_once(hidden_states: torch.Tensor) -> torch.Tensor:
    """Cast the shared input of several products once under autocast; otherwise each makes and keeps a copy."""
    device = hidden_states.device.type
    if device == "meta" or hidden_states.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return hidden_states
    return hidden_states.to(torch.get_autocast_dtype(device))


def is_eager() -> bool:
    """Return whether operations run eagerly: no compiler, tracer, dispatch mode or functorch transform is active."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    )


# Blocks: each takes factories for its attention and its MLP, so that every combination works. `places` decides whether
# a block returns all tokens or only the first few


class PostNormLayer(GradientCheckpointingLayer):
    """Block with its norms at the end of the residual branches instead of at the beginning."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        self.attention = attention(config, layer_idx)
        self.layernorm_before = norm_or_identity(config, True)
        self.mlp = mlp(config)
        self.layernorm_after = norm_or_identity(config, True)
        self.drop_path = stochastic_depth_or_none(config, layer_idx)

    def forward(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None, places: Places = PLAIN, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = self.attention(hidden_states, bias, places, **kwargs)
        attended = optional(self.drop_path, self.layernorm_before(attended), places)
        hidden_states = places.first(hidden_states) + attended
        transformed = self.layernorm_after(self.mlp(hidden_states))
        return hidden_states + optional(self.drop_path, transformed, places)


class SandwichLayer(GradientCheckpointingLayer):
    """Block with a norm at the beginning and another at the end of each residual branch (Ding et al. 2021)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        self.layernorm_before = norm_or_identity(config, True)
        self.attention = attention(config, layer_idx)
        self.attention_norm = norm_or_identity(config, True)
        self.layernorm_after = norm_or_identity(config, True)
        self.mlp = mlp(config)
        self.mlp_norm = norm_or_identity(config, True)
        self.drop_path = stochastic_depth_or_none(config, layer_idx)

    def forward(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None, places: Places = PLAIN, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), bias, places, **kwargs)
        attended = optional(self.drop_path, self.attention_norm(attended), places)
        hidden_states = places.first(hidden_states) + attended
        transformed = self.mlp_norm(self.mlp(self.layernorm_after(hidden_states)))
        return hidden_states + optional(self.drop_path, transformed, places)


class ParallelLayer(GradientCheckpointingLayer):
    """Block that applies attention and MLP in parallel after one norm (Dehghani et al. 2023, section 2)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        self.layernorm_before = norm_or_identity(config, True)
        self.attention = attention(config, layer_idx)
        self.mlp = mlp(config)
        self.layer_scale1 = layer_scale_or_none(config)
        self.drop_path = stochastic_depth_or_none(config, layer_idx)

    def forward(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None, places: Places = PLAIN, **kwargs: Any
    ) -> torch.Tensor:
        normed = self.layernorm_before(hidden_states)
        attended, _ = self.attention(normed, bias, places, **kwargs)
        both = optional(self.layer_scale1, attended + self.mlp(places.first(normed)))
        return places.first(hidden_states) + optional(self.drop_path, both, places)


class AttentionBranch(nn.Module):
    """One of several parallel attentions of a block."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable):
        super().__init__()
        self.layernorm = norm_or_identity(config, True)
        self.attention = attention(config, layer_idx)
        self.layer_scale = layer_scale_or_none(config)
        self.drop_path = stochastic_depth_or_none(config, layer_idx)

    def forward(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None, places: Places, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = self.attention(self.layernorm(hidden_states), bias, places, **kwargs)
        return optional(self.drop_path, optional(self.layer_scale, attended), places)


class MLPBranch(nn.Module):
    """One of several parallel MLPs of a block."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, mlp: Callable):
        super().__init__()
        self.layernorm = norm_or_identity(config, True)
        self.mlp = mlp(config)
        self.layer_scale = layer_scale_or_none(config)
        self.drop_path = stochastic_depth_or_none(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, places: Places) -> torch.Tensor:
        transformed = self.mlp(self.layernorm(hidden_states))
        return optional(self.drop_path, optional(self.layer_scale, transformed), places)


class BranchesLayer(GradientCheckpointingLayer):
    """Block of several attentions, then several MLPs, each group summed (Touvron et al. 2022b, section 3)."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        branches = range(config.num_branches)
        self.attention_branches = nn.ModuleList([AttentionBranch(config, layer_idx, attention) for _ in branches])
        self.mlp_branches = nn.ModuleList([MLPBranch(config, layer_idx, mlp) for _ in branches])

    def forward(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None, places: Places = PLAIN, **kwargs: Any
    ) -> torch.Tensor:
        branches = [branch(hidden_states, bias, places, **kwargs) for branch in self.attention_branches]
        hidden_states = places.first(hidden_states) + torch.stack(branches).sum(dim=0)
        return hidden_states + torch.stack([branch(hidden_states, places) for branch in self.mlp_branches]).sum(dim=0)


# Patch embeddings


class LinearPatchEmbeddings(nn.Module):
    """Flatten each patch in the order row, column, channel, and project it: vit-pytorch's patch embedding.

    Attributes:
        num_views: Number of views of the image that each patch is cut from, concatenated along the channels.
    """

    num_views = 1

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.patch_shape = config.patch_shape
        width = math.prod(self.patch_shape) * config.num_channels * self.num_views
        self.pre_norm = norm_or_identity(config, config.patch_pre_norm, width, norms=PATCH_NORMS)
        self.projection = init_as("patches", nn.Linear(width, config.hidden_size, bias=config.patch_bias))
        self.post_norm = norm_or_identity(config, config.patch_post_norm, norms=PATCH_NORMS)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        patches = pixel_values if pixel_values.ndim < 4 else cut_patches(pixel_values, *self.patch_shape)
        return self.post_norm(self.projection(self.pre_norm(patches)))


class ShiftedPatchEmbeddings(LinearPatchEmbeddings):
    """Cut each patch also from four copies of the image, shifted one pixel to each side (Lee et al. 2021, section 3.1).

    Source: vit-pytorch's `vit_for_small_dataset.py`; the paper shifts by half a patch along the diagonals.
    """

    num_views = 5

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        moves = ((1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1))  # left, right, top, bottom
        return super().forward(torch.cat([pixel_values, *(F.pad(pixel_values, move) for move in moves)], dim=1))


def pad_same(images: torch.Tensor, kernel: int, stride: int, value: float = 0.0) -> torch.Tensor:
    """Pad like TensorFlow's "SAME" if the stride divides the sides, with the odd pixel at the end."""
    margin = max(0, kernel - stride)
    before, after = margin // 2, margin - margin // 2
    return F.pad(images, (before, after, before, after), value=value)


class StandardizedConv2d(nn.Conv2d):
    """Convolution with standardised kernels (Qiao et al. 2019)."""

    def __init__(self, config: PlainViTConfig, channels_in: int, channels_out: int, kernel: int, stride: int = 1):
        super().__init__(channels_in, channels_out, kernel, stride, bias=False)
        init_as("patches", self)
        self.standardize = STEM_STYLES[config.group("resnet_stem")["style"]][0]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = pad_same(images, self.kernel_size[0], self.stride[0])
        return F.conv2d(images, self.standardize(self.weight), stride=self.stride)


def _standardize_as_timm(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.reshape(1, weight.shape[0], -1)
    return F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-8).reshape_as(weight)


def _standardize_as_google(weight: torch.Tensor) -> torch.Tensor:
    std, mean = torch.std_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
    return (weight - mean) / (std + 1e-5)


# By the source whose outputs are matched: standardisation of the kernels, and epsilon of the group norms.
STEM_STYLES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "timm": (_standardize_as_timm, 1e-5),
    "google": (_standardize_as_google, 1e-6),
}


class Bottleneck(nn.Module):
    """Residual unit of three convolutions; the middle one may halve the resolution."""

    def __init__(self, config: PlainViTConfig, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        inner, eps = channels_out // 4, STEM_STYLES[config.group("resnet_stem")["style"]][1]
        self.conv1 = StandardizedConv2d(config, channels_in, inner, 1)
        self.norm1 = nn.GroupNorm(32, inner, eps)
        self.conv2 = StandardizedConv2d(config, inner, inner, 3, stride)
        self.norm2 = nn.GroupNorm(32, inner, eps)
        self.conv3 = StandardizedConv2d(config, inner, channels_out, 1)
        self.norm3 = init_as("last_gain", nn.GroupNorm(32, channels_out, eps))
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
        self.norm = nn.GroupNorm(32, channels, STEM_STYLES[config.group("resnet_stem")["style"]][1])
        self.stages = nn.ModuleList()
        for number, depth in enumerate(config.group("resnet_stem")["depths"]):
            wide, stride = 256 * 2**number, 2 if number else 1
            first = Bottleneck(config, channels, wide, stride)
            self.stages.append(nn.Sequential(first, *(Bottleneck(config, wide, wide, 1) for _ in range(depth - 1))))
            channels = wide
        height, width = (pixels // config.stem_stride for pixels in config.patch_shape)
        projection = nn.Conv2d(channels, config.hidden_size, (height, width), (height, width), bias=config.patch_bias)
        self.projection = init_as("patches", projection)
        self.post_norm = norm_or_identity(config, config.patch_post_norm, norms=PATCH_NORMS)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.norm(self.conv(pixel_values)))
        features = F.max_pool2d(pad_same(features, 3, 2, -math.inf), 3, 2)
        for stage in self.stages:
            features = stage(features)
        return self.post_norm(self.projection(features).flatten(2).transpose(1, 2))  # B N D


class PatchDropout(nn.Module):
    """Keep a random fraction of the patches of each image in training (Liu et al. 2023).

    The tokens before the patches, and registers after them, are always kept.
    """

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.rate = config.patch_dropout_prob
        self.before = config.num_prefix_tokens
        self.after = config.num_register_tokens if config.register_tokens_last else 0
        self.uniform = torch.rand  # as in `StochasticDepth`

    @torch.compiler.assume_constant_result  # as a symbol it would fail in a checkpointed block with dynamic shapes
    def share_kept(self) -> float:
        """Return the fraction of patches that is kept."""
        return 1 - self.rate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Draw the indices of the tokens to keep, of shape (B, L); None keeps all."""
        if not self.training or self.rate == 0:
            return None
        batch, length, device = *hidden_states.shape[:2], hidden_states.device
        count = length - self.before - self.after
        kept = max(1, int(count * self.share_kept()))
        chosen = self.uniform(batch, count, device=device).argsort(dim=-1)[:, :kept]
        numbers = torch.arange(length, device=device).expand(batch, -1)
        return torch.cat((numbers[:, : self.before], chosen + self.before, numbers[:, length - self.after :]), dim=1)
