"""Heads on the last block's tokens: poolers, the classification loss, and predictors of masked patches.

Shapes: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size, `d` head
width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .attention_plain_vit import ATTENTIONS, PlainViTAttention
from .configuration_plain_vit import PlainViTConfig
from .initialization_plain_vit import FreshWeights, init_as
from .layers_plain_vit import dropout_or_none, is_eager, layer_scale_or_none, norm_or_identity, optional
from .packed_plain_vit import Places

# Poolers: each maps tokens (B, L, D) to features, and states how many leading tokens it reads, so that the last block
# can skip the others. For images of many sizes, `valid` (B, L) is false for padding


class Pooler(nn.Module):
    """Base class of the poolers.

    Attributes:
        num_tokens_read: Number of leading tokens that the pooler reads; None for all.
    """

    num_tokens_read: int | None = None

    def __init__(self, config: PlainViTConfig):
        super().__init__()


class ClassTokenPooler(Pooler):
    """Return the class token; a distillation token has a classifier of its own."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        self.num_tokens_read = 1 + config.use_distillation_token

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_states[:, 0]


class NoPooler(Pooler):
    """Return every token."""

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_states


class PrefixMeanPooler(Pooler):
    """Return the mean of the first tokens."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        self.num_tokens_read = config.pooling_tokens

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_states[:, : self.num_tokens_read].mean(dim=1)


class PrefixJoinedPooler(PrefixMeanPooler):
    """Concatenate the first tokens."""

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_states[:, : self.num_tokens_read].flatten(1)


class PatchPooler(Pooler):
    """Base class of the poolers over the patches, or over all tokens with `pool_prefix_tokens`."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        self.first = 0 if config.pool_prefix_tokens else config.num_prefix_tokens
        self.after = 0 if config.pool_prefix_tokens or not config.register_tokens_last else config.num_register_tokens

    def select(
        self, hidden_states: torch.Tensor, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tokens to pool, and which of them are not padding."""
        tokens = hidden_states[:, self.first : hidden_states.shape[1] - self.after]
        return tokens, None if valid is None else valid[:, self.first :]


def average(tokens: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of the valid tokens (B, L, D)."""
    if valid is None:
        return tokens.mean(dim=1)
    return tokens.masked_fill(~valid.unsqueeze(-1), 0).sum(dim=1) / valid.sum(dim=1, keepdim=True)


def maximum(tokens: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return the maximum of each channel over the valid tokens (B, L, D)."""
    return (tokens if valid is None else tokens.masked_fill(~valid.unsqueeze(-1), -math.inf)).amax(dim=1)


class MeanPooler(PatchPooler):
    """Average the patches."""

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return average(*self.select(hidden_states, valid))


class MaxPooler(PatchPooler):
    """Take the maximum of each channel over the patches."""

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return maximum(*self.select(hidden_states, valid))


class MeanMaxPooler(PatchPooler):
    """Return the average of the patches' mean and maximum."""

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        hidden_states, valid = self.select(hidden_states, valid)
        return 0.5 * (maximum(hidden_states, valid) + average(hidden_states, valid))


class ClassMeanPooler(PatchPooler):
    """Concatenate the class token and the average of the patches (Oquab et al. 2023, section 7.1)."""

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat((hidden_states[:, 0], average(*self.select(hidden_states, valid))), dim=1)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention to the valid tokens with torch's fused kernel, which does not accept an empty batch."""
    if query.shape[0] == 0:
        return query @ key.transpose(-2, -1) @ value
    mask = None if valid is None else valid[:, None, None]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


class MapPooler(PatchPooler):
    """Attention pooling: a learned probe attends to the patches, followed by an MLP (Zhai et al. 2022, section 3.2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        width = config.hidden_size
        self.num_heads = config.pooling_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)
        self.layernorm = norm_or_identity(config, True)
        self.fc1 = init_as("mlp", nn.Linear(width, config.pooling_width))
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = init_as("mlp", nn.Linear(config.pooling_width, width))

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        hidden_states, valid = self.select(hidden_states, valid)
        probe = self.probe.expand(hidden_states.shape[0], -1, -1)
        query, key, value = (
            projection(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B heads L d
            for projection, tokens in (
                (self.q_proj, probe), (self.k_proj, hidden_states), (self.v_proj, hidden_states)
            )
        )  # fmt: skip
        pooled = fused_attention(query, key, value, valid)
        pooled = self.o_proj(pooled.transpose(1, 2).flatten(2))
        pooled = pooled + self.fc2(self.activation(self.fc1(self.layernorm(pooled))))
        return pooled[:, 0]

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the probe as timm does."""
        init.trunc_normal_(self.probe, std=self.probe.shape[-1] ** -0.5)


class QueryPooler(PatchPooler):
    """Attention pooling: a learned query attends to the patches, followed by a projection (AIMv2: Fini et al. 2024)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        width = config.hidden_size
        self.num_heads = config.pooling_heads
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        self.k_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        hidden_states, valid = self.select(hidden_states, valid)
        query, key, value = (
            tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B heads L d
            for tokens in (
                self.query.expand(hidden_states.shape[0], -1, -1),
                self.k_proj(hidden_states),
                self.v_proj(hidden_states),
            )
        )
        pooled = fused_attention(query, key, value, valid)
        return self.o_proj(pooled.transpose(1, 2).flatten(2))[:, 0]

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the query with the config's standard deviation."""
        init.normal_(self.query, std=fresh.std)


class RefinementPooler(Pooler):
    """Apply attention without parameters to all tokens; return the class token, or the average if there is none.

    Source: the "prr" pooling of timm 1.0.31 (patch representation refinement).
    """

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        self.num_heads = config.pooling_heads
        self.use_class_token = config.use_class_token

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        heads = hidden_states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B heads L d
        refined = fused_attention(heads, heads, heads, valid).transpose(1, 2).flatten(2)
        return refined[:, 0] if self.use_class_token else average(refined, valid)


class ClassAttentionLayer(nn.Module):
    """Block that updates only a class token, which attends to its normalised self and to the patches as they are."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.layernorm_before = norm_or_identity(config, True)
        self.attention = ATTENTIONS[config.attention_type](config, 0)
        self.layer_scale1 = layer_scale_or_none(config)
        self.layernorm_after = norm_or_identity(config, True)
        self.fc1 = init_as("mlp", nn.Linear(width, inner, bias=config.mlp_bias))
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = init_as("mlp", nn.Linear(inner, width, bias=config.mlp_bias))
        self.layer_scale2 = layer_scale_or_none(config)
        self.dropout = dropout_or_none(config.hidden_dropout_prob)

    def forward(self, token: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat((self.layernorm_before(token), patches), dim=1)
        attended, _ = self.attention(tokens, places=Places(num_output_tokens=1))
        token = token + optional(self.layer_scale1, attended)
        transformed = optional(self.dropout, self.activation(self.fc1(self.layernorm_after(token))))
        return token + optional(self.layer_scale2, optional(self.dropout, self.fc2(transformed)))


class ClassAttentionPooler(Pooler):
    """Let a class token attend to the final patches in blocks of its own (CaiT: Touvron et al. 2021b, section 3).

    Source: vit-pytorch's `cait.py`; the paper's code also normalises the patches, and has no talking heads here.
    """

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.blocks = nn.ModuleList([ClassAttentionLayer(config) for _ in range(config.pooling_depth)])

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        token = self.cls_token.expand(hidden_states.shape[0], -1, -1)
        for block in self.blocks:
            token = block(token, hidden_states)
        return token[:, 0]

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the token."""
        fresh.draw("cls_token", self.cls_token)


class QueryAttentionPooler(PatchPooler):
    """Let a learned query attend to the final patches, with the attention of the blocks.

    Source: vit-pytorch's `na_vit_nested_tensor.py`.
    """

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        self.query = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.layernorm_before = norm_or_identity(config, True)
        self.attention = PlainViTAttention(config, 0)

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        patches, valid = self.select(hidden_states, valid)
        attention, heads = self.attention, (-1, self.attention.head_dim)
        token = self.query.expand(patches.shape[0], -1, -1)
        query = attention.q_proj(self.layernorm_before(token)).unflatten(-1, heads)
        query = optional(attention.q_norm, query).transpose(1, 2)
        key = optional(attention.k_norm, attention.k_proj(patches).unflatten(-1, heads)).transpose(1, 2)  # B heads L d
        value = attention.v_proj(patches).unflatten(-1, heads).transpose(1, 2)
        pooled = fused_attention(query, key, value, valid, attention.scaling)
        return attention.o_proj(optional(attention.norm, pooled.transpose(1, 2).flatten(2)))[:, 0]

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the query."""
        fresh.draw("cls_token", self.query)


class QueryBlockPooler(QueryAttentionPooler):
    """Add the attention output to the learned query, as in a pre-norm block without an MLP.

    Source: vit-pytorch's `na_vit.py`.
    """

    def forward(self, hidden_states: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return self.query[:, 0] + super().forward(hidden_states, valid)


POOLERS: dict[str, Callable[[PlainViTConfig], nn.Module]] = {
    "cls": ClassTokenPooler,
    "mean": MeanPooler,
    "max": MaxPooler,
    "mean_max": MeanMaxPooler,
    "cls_mean": ClassMeanPooler,
    "map": MapPooler,
    "query": QueryPooler,
    "prr": RefinementPooler,
    "class_attention": ClassAttentionPooler,
    "query_block": QueryBlockPooler,
    "query_attention": QueryAttentionPooler,
    "prefix_mean": PrefixMeanPooler,
    "prefix_joined": PrefixJoinedPooler,
    "none": NoPooler,
}


# Classification


def representation(config: PlainViTConfig) -> nn.Module:
    """Return the dense layer of the paper's pre-training head, or an identity if the config has none."""
    if config.representation_size is None:
        return nn.Identity()
    return nn.Sequential(
        init_as("patches", nn.Linear(config.pooled_size, config.representation_size, bias=config.representation_bias)),
        ACT2FN[config.representation_act],
    )


def classifier(config: PlainViTConfig) -> nn.Module:
    """Return the linear classifier, or an identity if there are no labels."""
    if not config.num_labels:
        return nn.Identity()
    width = config.representation_size or config.pooled_size
    return init_as("classifier", nn.Linear(width, config.num_labels, bias=config.classifier_bias))


def image_classification_loss(
    labels: torch.Tensor,
    logits: torch.Tensor,
    config: PlainViTConfig,
    num_items_in_batch: torch.Tensor | int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the loss for the config's problem type, or for the one inferred from the labels.

    Args:
        labels: Class indices of shape (B,), -100 to ignore one; multi-hot floats of shape (B, num_labels); or
            regression targets of shape (B,) or (B, num_labels).
        logits: Logits of shape (B, num_labels).
        config: The config with `num_labels` and `problem_type`; without a problem type, a single label means
            regression, int64 and int32 labels mean classes, and other labels multi-label classification. The inferred
            type is stored in the config, except for classes in a compiled graph.
        num_items_in_batch: Number of values in all `labels` of one step; the loss is divided by it, so that
            accumulated gradients equal those of one large batch.
        **kwargs: Other arguments of the model; ignored.

    Raises:
        TypeError: The labels are not a tensor.
        ValueError: Labels are out of range (only checked on a CPU).
    """
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels is a {type(labels).__name__}: expected a tensor, such as torch.tensor(labels)")
    labels = labels.to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    num_labels, problem_type = config.num_labels or 0, config.problem_type
    if problem_type is None:
        classes = labels.dtype in (torch.int64, torch.int32)
        problem_type = "single_label_classification" if classes else "multi_label_classification"
        problem_type = "regression" if num_labels == 1 else problem_type
    if problem_type == "single_label_classification":
        check_classes(labels, num_labels)
        loss = F.cross_entropy(logits.view(-1, num_labels), labels.view(-1), reduction=reduction)
    elif problem_type == "multi_label_classification":
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)
    else:
        loss = F.mse_loss(logits.view(labels.shape), labels.to(logits.dtype), reduction=reduction)
    # Users of the trained model must know what its logits mean. None already means classes, and a changed config would
    # trigger recompilation
    if config.problem_type is None and (is_eager() or problem_type != "single_label_classification"):
        config.problem_type = problem_type
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def check_classes(labels: torch.Tensor, num_labels: int) -> None:
    """Refuse labels out of range; skipped on accelerators and in compiled or traced code."""
    if labels.device.type != "cpu" or type(labels) is not torch.Tensor or not is_eager():
        return
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= num_labels))]
    if len(wrong):
        raise ValueError(
            f"labels hold {sorted(set(wrong.tolist()))}: expected classes from 0 to {num_labels - 1}, or -100 for "
            "none; set num_labels in the config to the number of classes of the data"
        )


# Predictors of masked patches. Each maps features (B, D, h, w) to an image (B, C, H, W), the logits (B, N, colours) of
# the colour classes, and the mean loss over the patches where `masked` (B, h, w) is true


class PixelPredictor(nn.Module):
    """Predict every pixel of each patch with a dense layer (Xie et al. 2022, section 3.3)."""

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
        self.mean, self.std = config.image_mean, config.image_std
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
        """Return the class of each patch's mean colour, of shape (B, h, w): channel 0 is its lowest digit."""
        mean, std = self.statistics(pixel_values)
        averages = F.avg_pool2d(pixel_values * std + mean, self.patch_shape)
        bounds = torch.arange(1, self.LEVELS, device=averages.device, dtype=averages.dtype) / self.LEVELS
        return (torch.bucketize(averages.contiguous(), bounds) * self.digits(averages.device)).sum(dim=1)

    def paint(self, colors: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the normalised image (B, C, H, W) of colour classes (B, h, w), each level at its midpoint."""
        mean, std = self.statistics(like)
        levels = colors.unsqueeze(1) // self.digits(colors.device) % self.LEVELS  # B C h w
        image = ((levels + 0.5) / self.LEVELS - mean) / std
        return image.repeat_interleave(self.patch_shape[0], 2).repeat_interleave(self.patch_shape[1], 3)

    def digits(self, device: torch.device) -> torch.Tensor:
        """Return the place value of each channel's digit, of shape (C, 1, 1)."""
        return (self.LEVELS ** torch.arange(self.num_channels, device=device)).view(-1, 1, 1)

    def statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of the image processor, each of shape (C or 1, 1, 1)."""
        mean, std = like.new_tensor(self.mean), like.new_tensor(self.std)
        return mean.view(-1, 1, 1), std.view(-1, 1, 1)


PATCH_PREDICTORS: dict[str, Callable[[PlainViTConfig], nn.Module]] = {
    "pixels": PixelPredictor,
    "mean_color": MeanColorPredictor,
}
