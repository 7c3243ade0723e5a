"""The plain Vision Transformer (Dosovitskiy et al. 2021), top to bottom in the order of the paper's Figure 1.

This file contains patch embeddings, class token and positions, blocks of attention and MLP, the final norm, pooling and
classifier. Attention is in `attention_plain_vit.py`, poolers and prediction heads are in `heads_plain_vit.py`, other
positions in `positions_plain_vit.py`, images of many sizes in `packed_plain_vit.py`, and alternatives to the plain
layers in `layers_plain_vit.py`: one class per choice, selected in a table.

Shapes: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size.
"""

import copy
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
)
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_plain_vit import Attention, attention_of
from .configuration_plain_vit import AUTO_MAP, PlainViTConfig, TravellingCode
from .heads_plain_vit import PATCH_PREDICTORS, POOLERS, classifier, image_classification_loss, representation
from .initialization_plain_vit import FreshWeights, init_as
from .intermediates_plain_vit import IntermediateLayers
from .layers_plain_vit import (
    PATCH_NORMS,
    BranchesLayer,
    LinearPatchEmbeddings,
    PackedSwiGLU,
    ParallelLayer,
    PatchDropout,
    PostNormLayer,
    ResNetPatchEmbeddings,
    SandwichLayer,
    ShiftedPatchEmbeddings,
    SwiGLU,
    dropout_or_none,
    layer_scale_or_none,
    norm_or_identity,
    norm_or_none,
    optional,
    stochastic_depth_or_none,
)
from .packed_plain_vit import PLAIN, OneSize, Places, Tokens, as_weights, refuse_masks, tokens_of, without_padding
from .positions_plain_vit import (
    FactorizedPositionEmbedding,
    GridTables,
    Learned2DPositionEmbedding,
    SinCos2DPositionEmbedding,
    is_used_as_it_is,
    relative_position_bias,
    repeats_positions,
    resample_grid,
    rotary_embedding,
)

# Embeddings: z0 = [class; x1 E; ...; xN E] + positions (equation 1)


class PlainViTPatchEmbeddings(nn.Module):
    """Split the image into patches and project each to a token: a convolution whose stride is its kernel size."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.patch_shape = size = config.patch_shape
        self.num_frames = config.num_frames
        channels = config.num_channels * self.num_frames
        projection = nn.Conv2d(channels, config.hidden_size, size, size, bias=config.patch_bias)
        self.projection = init_as("patches", projection)
        self.post_norm = norm_or_identity(config, config.patch_post_norm, norms=PATCH_NORMS)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if pixel_values.ndim < 4:  # flattened patches: project each as an image of one patch
            batch, count, _ = pixel_values.shape
            images = pixel_values.unflatten(2, (*self.patch_shape, -1)).permute(0, 1, 4, 2, 3).flatten(0, 1)
            return self.post_norm(self.projection(images).view(batch, count, -1))
        return self.post_norm(self.projection(pixel_values).flatten(2).transpose(1, 2))  # B N D


class FramesPatchEmbeddings(PlainViTPatchEmbeddings):
    """Project each patch of several copies of the image; the copies of a channel follow each other."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        channels = 1 if pixel_values.ndim == 4 else -1
        return super().forward(pixel_values.repeat_interleave(self.num_frames, dim=channels))


class PlainViTPositionEmbedding(GridTables):
    """Learned position embeddings of the prefix tokens and the native patch grid; resampled for other grids."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.grid_size = config.grid_size
        self.resampling = config.position_resampling
        self.is_square = config.position_resampling_to_square
        self.num_prefix_rows = config.num_prefix_tokens if config.position_embedding_on_prefix else 0
        rows = self.num_prefix_rows + self.grid_size[0] * self.grid_size[1]
        self.weight = nn.Parameter(torch.zeros(rows, config.hidden_size))

    def forward(self, grid_size: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        if is_used_as_it_is(self.grid_size, grid_size, self.resampling):
            return self.weight
        prefix, patches = self.weight[: self.num_prefix_rows], self.weight[self.num_prefix_rows :]
        return torch.cat((prefix, resample_grid(patches, self.grid_size, grid_size, self.resampling, self.is_square)))

    def resampled(self, config: PlainViTConfig) -> dict[str, torch.Tensor]:
        """Return the table for a config with another native grid."""
        if repeats_positions(config):
            h, w = config.grid_size
            raise ValueError(
                f'position_resampling "bucketed" rounds a grid of {h} x {w} patches so that some share a position, '
                "even at the native size: give another image_size"
            )
        prefix, patches = self.weight[: self.num_prefix_rows], self.weight[self.num_prefix_rows :]
        mode, square = config.position_resampling, config.position_resampling_to_square
        return {"weight": torch.cat((prefix, resample_grid(patches, self.grid_size, config.grid_size, mode, square)))}

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the table."""
        fresh.draw("positions", self.weight)


PATCH_EMBEDDINGS: dict[str, Callable[[PlainViTConfig], nn.Module]] = {
    "conv": PlainViTPatchEmbeddings,
    "linear": LinearPatchEmbeddings,
    "shifted": ShiftedPatchEmbeddings,
    "resnet": ResNetPatchEmbeddings,  # with a `resnet_stem`
    "frames": FramesPatchEmbeddings,  # with several `num_frames`
}
POSITION_EMBEDDINGS: dict[str, Callable[[PlainViTConfig], nn.Module | None]] = {
    "learned": PlainViTPositionEmbedding,
    "learned_2d": Learned2DPositionEmbedding,
    "factorized": FactorizedPositionEmbedding,
    "sincos_2d": SinCos2DPositionEmbedding,
    "none": lambda config: None,
}


class PlainViTEmbeddings(nn.Module):
    """Turn an image into tokens: project the patches, prepend the learned tokens, add positions."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.config = config
        self.patch_height, self.patch_width = config.patch_shape
        self.num_channels = config.num_channels
        self.positions_on_prefix = config.position_embedding_on_prefix
        self.register_tokens_last = config.register_tokens_last
        kinds = {"resnet": config.resnet_stem is not None, "frames": config.num_frames > 1}
        kind = next((kind for kind, is_chosen in kinds.items() if is_chosen), config.patch_projection)
        self.patch_embeddings = PATCH_EMBEDDINGS[kind](config)

        def tokens(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(1, count, config.hidden_size)) if count else None

        self.cls_token = tokens(int(config.use_class_token))
        self.distillation_token = tokens(int(config.use_distillation_token))
        self.register_tokens = tokens(config.num_register_tokens)
        self.mask_token = tokens(int(config.use_mask_token))
        self.position_embeddings = POSITION_EMBEDDINGS[config.position_embedding_type](config)
        embedding_dropout = config.embedding_dropout_prob
        self.dropout = dropout_or_none(config.hidden_dropout_prob if embedding_dropout is None else embedding_dropout)
        self.norm = norm_or_identity(config, config.embedding_norm)

    def forward(
        self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor | None = None, tokens: Tokens | None = None
    ) -> torch.Tensor:
        tokens = tokens_of(self.config, pixel_values) if tokens is None else tokens
        if pixel_values.ndim == 2:
            pixel_values = pixel_values[None]  # packed: one row
        patches = self.patch_embeddings(pixel_values)  # B N D
        if bool_masked_pos is not None:
            patches = self.mask(patches, bool_masked_pos, tokens)
        before = [self.cls_token, self.distillation_token, None if self.register_tokens_last else self.register_tokens]
        prefix = [token for token in before if token is not None]
        if self.position_embeddings is None:
            hidden_states = tokens.join(prefix, patches)
        elif self.positions_on_prefix:
            hidden_states = tokens.join(prefix, patches)
            positions = tokens.lay_out(self.position_embeddings, patches)
            hidden_states = hidden_states + positions[..., : hidden_states.shape[1], :]
        else:
            hidden_states = tokens.join(prefix, patches + tokens.lay_out(self.position_embeddings, patches))
        if self.register_tokens_last and self.register_tokens is not None:
            last = self.register_tokens.expand(patches.shape[0], -1, -1)
            hidden_states = torch.cat((hidden_states, last), dim=1)
        return self.norm(optional(self.dropout, hidden_states))

    def mask(self, patches: torch.Tensor, bool_masked_pos: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Replace the masked patches, given as (B, N) or (B, h, w), by the mask token."""
        if not isinstance(tokens, OneSize):
            raise ValueError("bool_masked_pos is for images of one size: give (batch, channels, height, width)")
        grid_size = tokens.grid_size
        if self.mask_token is None:
            raise ValueError("bool_masked_pos needs a mask token: build the model with use_mask_token=True")
        if not isinstance(bool_masked_pos, torch.Tensor):
            raise TypeError(f"bool_masked_pos is a {type(bool_masked_pos).__name__}: expected a tensor of torch.bool")
        if bool_masked_pos.is_floating_point() or bool_masked_pos.is_complex():
            raise ValueError(
                f"bool_masked_pos has dtype {bool_masked_pos.dtype}: expected torch.bool, true where masked; "
                "compare with a threshold first"
            )
        batch, patch_count = patches.shape[:2]
        if tuple(bool_masked_pos.shape) not in ((batch, *grid_size), (batch, patch_count)):
            raise ValueError(
                f"bool_masked_pos has shape {tuple(bool_masked_pos.shape)}: expected (batch, patches) or (batch, h, w) "
                f"of {batch} images with the patch grid {grid_size}"
            )
        masked = bool_masked_pos.flatten(1).unsqueeze(-1).bool()
        return torch.where(masked, self.mask_token.to(patches.dtype), patches)

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the tokens."""
        for kind in ("cls_token", "distillation_token", "register_tokens", "mask_token"):
            fresh.draw(kind, getattr(self, kind))


# MLP: fc2(gelu(fc1(z))), for each token


class PlainViTMLP(nn.Module):
    """Two dense layers with an activation between."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.fc1 = init_as("mlp", nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias))
        self.activation = ACT2FN[config.hidden_act]
        self.norm = norm_or_none(config, config.mlp_inner_norm, config.intermediate_size)
        self.fc2 = init_as("mlp", nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias))
        self.dropout = dropout_or_none(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = optional(self.dropout, self.activation(self.fc1(hidden_states)))
        hidden_states = self.fc2(optional(self.norm, hidden_states))
        return optional(self.dropout, hidden_states)


# Block: z' = attention(norm(z)) + z, then z = mlp(norm(z')) + z' (equations 2 and 3)


class PlainViTLayer(GradientCheckpointingLayer):
    """Pre-norm transformer block."""

    def __init__(self, config: PlainViTConfig, layer_idx: int, attention: Callable, mlp: Callable):
        super().__init__()
        self.layernorm_before = norm_or_identity(config, True)
        self.attention = attention(config, layer_idx)
        self.layer_scale1 = layer_scale_or_none(config)
        self.layernorm_after = norm_or_identity(config, True)
        self.mlp = mlp(config)
        self.layer_scale2 = layer_scale_or_none(config, config.scale_mlp_branch)
        self.drop_path = stochastic_depth_or_none(config, layer_idx)

    def forward(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None, places: Places = PLAIN, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), bias, places, **kwargs)
        attended = optional(self.drop_path, optional(self.layer_scale1, attended), places)
        hidden_states = places.first(hidden_states) + attended
        transformed = self.mlp(self.layernorm_after(hidden_states))
        return hidden_states + optional(self.drop_path, optional(self.layer_scale2, transformed), places)


MLPS: dict[str, Callable[[PlainViTConfig], nn.Module]] = {
    "mlp": PlainViTMLP,
    "swiglu": SwiGLU,
    "swiglu_packed": PackedSwiGLU,
}
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "sequential": PlainViTLayer,
    "post_norm": PostNormLayer,
    "sandwich": SandwichLayer,
    "parallel": ParallelLayer,
    "branches": BranchesLayer,
}


def build_layer(config: PlainViTConfig, layer_idx: int) -> nn.Module:
    """Return block number `layer_idx` of the types that the config selects."""
    attention, mlp = attention_of(config, layer_idx), MLPS[config.mlp_type]
    return LAYERS[config.block_type](config, layer_idx, attention, mlp)


# Models


class PlainViTPreTrainedModel(IntermediateLayers, TravellingCode, PreTrainedModel):
    """Base class of all plain ViT models: loading, saving, initialisation, and capabilities for transformers."""

    config: PlainViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)  # type: ignore[assignment]  # as transformers' own models write it
    supports_gradient_checkpointing = True
    _no_split_modules = ["PlainViTEmbeddings", *(layer.__name__ for layer in LAYERS.values())]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": list(LAYERS.values()),
        "attentions": OutputRecorder(Attention, index=1, layer_name="layers"),
    }
    _input_embed_layer = "patch_embeddings"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # the norms
        FreshWeights(self.config).draw_module(module)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        return self.config.num_prefix_tokens

    def grid_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the patches (down, across) of an image of this size, in pixels.

        Raises:
            ValueError: The patch size does not divide it.
        """
        return self.config.grid_of(height, width)

    def tokens_to_map(self, hidden_states: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Reshape the patch tokens to their positions in the image, without the other tokens.

        Args:
            hidden_states: Tokens of any layer, of shape (B, L, D).
            height: Image height in pixels.
            width: Image width in pixels.

        Returns:
            A map of shape (B, D, h, w).

        Raises:
            ValueError: These are not all the tokens of an image of that size.
        """
        grid_size = self.grid_size(height, width)
        patches = hidden_states[:, self.num_prefix_tokens :]
        if self.config.register_tokens_last:
            patches = patches[:, : patches.shape[1] - self.config.num_register_tokens]
        if patches.shape[1] != grid_size[0] * grid_size[1]:
            raise ValueError(
                f"got {hidden_states.shape[1]} tokens, {patches.shape[1]} of them patches: an image of {height} x "
                f"{width} pixels has {grid_size[0]} x {grid_size[1]}; give its own size, and no patch dropout"
            )
        return patches.transpose(1, 2).unflatten(2, grid_size)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: PreTrainedConfig | str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load as transformers does, but refuse the config or the folder of another model.

        With a `key_mapping` from its weight names to ours, the folder may contain any model.

        Raises:
            ValueError: The config or the folder belongs to another model; the message says how to convert it.
        """
        if isinstance(config, PreTrainedConfig):  # otherwise the config class reads and checks the file
            PlainViTConfig.check_model_type(config.to_dict())
            if pretrained_model_name_or_path is not None and "key_mapping" not in kwargs:
                cls._check_folder(pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)

    @classmethod
    def _check_folder(cls, place: str | os.PathLike, options: dict[str, Any]) -> None:
        """Refuse the folder of another model if one of our configs was passed with it."""
        names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
        given = {name: options[name] for name in names if name in options}
        folder = Path(place).parent if os.path.isfile(place) else place
        file = cached_file(folder, CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **given)
        saved = {} if file is None else PreTrainedConfig.get_config_dict(file)[0]
        if "model_type" in saved:
            whole = Path(folder, given.get("subfolder") or "")
            PlainViTConfig.check_model_type(saved, whole, given.get("revision"))

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[Any, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as transformers does, and delete weights of an earlier save that would be loaded instead of these.

        Raises:
            NotADirectoryError: `save_directory` is a file.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise NotADirectoryError(f"{folder} is a file: give the path of a folder to save the model in")
        variant = f".{kwargs['variant']}" if kwargs.get("variant") else ""
        forms = {folder / f"model{variant}.safetensors", folder / f"model.safetensors.index{variant}.json"}
        times = {file: file.stat().st_mtime_ns for file in forms if file.is_file()}
        auto_class = self._ours()._auto_class
        if self._auto_class is None and auto_class is not None:
            self.config.auto_map[auto_class] = AUTO_MAP[auto_class]
        super().save_pretrained(save_directory, is_main_process, state_dict, push_to_hub, **kwargs)
        if is_main_process:
            self._add_code(folder)
        written = {file for file in forms if file.is_file() and file.stat().st_mtime_ns != times.get(file)}
        for stale in forms - written if written else ():
            stale.unlink(missing_ok=True)


class PlainViTEncoder(PlainViTPreTrainedModel):
    """Embeddings and blocks, shared by all models."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        self.embeddings = PlainViTEmbeddings(config)
        self.patch_dropout = PatchDropout(config)
        self.rotary_embedding = rotary_embedding(config)
        self.relative_position_bias = relative_position_bias(config, shared=True)
        self.layers = nn.ModuleList([build_layer(config, i) for i in range(config.num_hidden_layers)])

    def get_input_embeddings(self) -> nn.Module:
        """Return the patch embeddings."""
        return self.embeddings.patch_embeddings

    def encode(
        self,
        pixel_values: torch.Tensor,
        tokens: Tokens,
        bool_masked_pos: torch.Tensor | None = None,
        stages: Container[int] = (),
        num_output_tokens: int | None = None,
        num_layers: int | None = None,
        kept: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the tokens (B, L, D) after the last block and after each of `stages`, where 0 is the embeddings.

        The last block computes only the first `num_output_tokens` of each image, or all if it is None. `num_layers` is
        the number of blocks to run, or None for all. The blocks see only the tokens of the numbers `kept`, (B, L), or
        those that patch dropout draws if it is None.
        """
        kwargs["output_attentions"] = kwargs.get("output_attentions") or self.config.output_attentions
        hidden_states = self.embeddings(pixel_values, bool_masked_pos, tokens)
        kept = self.patch_dropout(hidden_states) if kept is None else kept
        if kept is not None:
            hidden_states = hidden_states.take_along_dim(kept.unsqueeze(-1), dim=1)
        places = self.places(tokens, pixel_values, kept, tokens.num_readable(num_output_tokens))
        bias = None
        if self.relative_position_bias is not None and places:
            bias = self.relative_position_bias(places[0].distances)
        chosen = [hidden_states] if 0 in stages else []
        blocks = list(zip(self.layers, places, strict=True))[:num_layers]
        for number, (layer, place) in enumerate(blocks, start=1):
            hidden_states = layer(hidden_states, bias, place, **kwargs)
            if number in stages:
                chosen.append(hidden_states)
        return hidden_states, chosen

    def places(
        self, tokens: Tokens, like: torch.Tensor, kept: torch.Tensor | None, num_output_tokens: int | None
    ) -> list[Places]:
        """Return the `Places` of each block."""
        distances, windows = tokens.distances(self.config, like.device), tokens.windows(self.config, like.device)
        shared = Places(distances=distances, windows=windows, images=tokens.images)
        rotations = tokens.rotations(self.rotary_embedding, like, kept)
        places = [shared._replace(rotation=rotation) for rotation in rotations]
        return [*places[:-1], *(place._replace(num_output_tokens=num_output_tokens) for place in places[-1:])]


class PlainViTModel(PlainViTEncoder):
    """The plain Vision Transformer without a classifier.

    Without `add_pooling_layer` it has no pooler and returns no `pooler_output`.

    Outputs: `last_hidden_state` of shape (B, L, D), after the final norm if it precedes the pooling; `pooler_output` of
    shape (B, D), wider for pooling "cls_mean" and "prefix_joined", (B, representation_size), or (B, L, D) for
    pooling "none".
    The tokens are ordered class, distillation, registers, patches in raster order (registers last with
    `register_tokens_last`). Packed images of many sizes have all tokens in one row: B is 1, except in `pooler_output`.
    """

    _auto_class = "AutoModel"
    __call__: Callable[..., BaseModelOutputWithPooling]  # for editors: transformers' decorators hide the type

    def __init__(self, config: PlainViTConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.layernorm = norm_or_identity(config, config.final_norm in ("before_pooling", "both"))
        if add_pooling_layer:
            self.pooler = POOLERS[config.pooling](config)
            self.pooled_layernorm = norm_or_identity(config, config.final_norm in ("after_pooling", "both"))
            self.representation = representation(config)
        self.add_pooling_layer = add_pooling_layer
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.Tensor | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values: Normalised pixels of shape (B, C, H, W); the patch size must divide H and W. Or, with
                `spatial_shapes`, the flattened patches of images of many sizes, (B, N, P) or (N, P).
            bool_masked_pos: True for masked patches, of shape (B, N) or (B, h, w).
            pixel_attention_mask: 0 for padded patches, of shape (B, N); optional, since `spatial_shapes` implies it.
            spatial_shapes: Patch grid of each image, of shape (images, 2).
            image_sizes: Height and width in pixels of each image (B, C, H, W) before it was padded at the right and the
                bottom, of shape (B, 2), as Pixtral's image processor returns them. The tokens are then packed.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Raises:
            TypeError: The pixels or the mask are not tensors.
            ValueError: The pixels or the mask do not fit the model.
        """
        refuse_masks(kwargs)
        pixel_values = as_weights(pixel_values, self)
        pixel_values, spatial_shapes = without_padding(self.config, pixel_values, spatial_shapes, image_sizes)
        tokens = tokens_of(self.config, pixel_values, pixel_attention_mask, spatial_shapes)
        hidden_states, _ = self.encode(pixel_values, tokens, bool_masked_pos, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        pooled = self.forward_head(*tokens.by_image(hidden_states)) if self.add_pooling_layer else None
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def forward_head(self, features: torch.Tensor, *valid: torch.Tensor | None) -> torch.Tensor:
        """Pool the tokens (B, L, D) of `forward_features`, of which those that are not `valid` (B, L) are padding."""
        return self.representation(self.pooled_layernorm(self.pooler(features, *valid)))


class PlainViTForImageClassification(PlainViTPreTrainedModel):
    """The plain Vision Transformer with a linear classifier on its pooled features.

    With a distillation token there is a second classifier for it, and the logits are the mean of both (DeiT).
    """

    _auto_class = "AutoModelForImageClassification"
    __call__: Callable[..., ImageClassifierOutput]

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = PlainViTModel(config)
        self.dropout = dropout_or_none(config.classifier_dropout_prob)
        self.classifier = classifier(config)
        self.distillation_classifier = classifier(config) if config.use_distillation_token else None
        self.loss_function = image_classification_loss
        self.post_init()

    def get_classifier(self) -> nn.Module:
        """Return the linear classifier; an identity without labels."""
        return self.classifier

    @torch.no_grad()
    def reset_classifier(self, num_labels: int, pooling: str | None = None) -> None:
        """Replace the classifier by a new one, and the pooling if given, as in timm.

        Args:
            num_labels: Number of labels; 0 for none. If it changes, the labels lose their names, and the config its
                `problem_type` "single_label_classification": the next labels show theirs. Other types stay.
            pooling: A pooling of the config, with new weights if it has any. The final norm stays in its place.

        Raises:
            ValueError: The config cannot have these; the model is unchanged.
        """
        pooling = pooling or self.config.pooling
        problem = self.config.problem_type
        if num_labels != self.config.num_labels and problem == "single_label_classification":  # often only implied
            problem = None
        labels = {"id2label": None, "label2id": None, "num_labels": num_labels, "problem_type": problem}
        PlainViTConfig(**{**self.config.to_dict(), **labels, "pooling": pooling})  # raises, if they do not fit
        self.config.problem_type = problem
        weight, old_width, is_new = next(self.vit.parameters()), self.config.pooled_size, pooling != self.config.pooling
        self.config.num_labels = self.num_labels = num_labels
        self.config.pooling = cast(Any, pooling)
        replaced: list[tuple[nn.Module, str, Callable[[PlainViTConfig], nn.Module]]] = [
            (self, "classifier", classifier)
        ]
        if self.distillation_classifier is not None:
            replaced.append((self, "distillation_classifier", classifier))
        if is_new:
            replaced.append((self.vit, "pooler", POOLERS[pooling]))
        if self.config.pooled_size != old_width:
            replaced.append((self.vit, "representation", representation))
        for owner, name, make in replaced:
            module = make(self.config).to(weight).train(self.training)
            setattr(owner, name, module.apply(self._init_weights))

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Classify images.

        Args:
            pixel_values: Pixels or patches, as for `PlainViTModel`.
            labels: Class indices of shape (B,), multi-hot floats of shape (B, num_labels), or regression targets.
            pixel_attention_mask: As for `PlainViTModel`.
            spatial_shapes: As for `PlainViTModel`.
            image_sizes: As for `PlainViTModel`.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`, `num_items_in_batch`.

        Returns:
            `logits` of shape (B, num_labels), and `loss` if labels were given.

        Raises:
            TypeError: The pixels or the labels are not tensors.
            ValueError: The pixels do not fit the model, or labels are out of range (only on a CPU; on a GPU the check
                would synchronise).
        """
        shapes = {"pixel_attention_mask": pixel_attention_mask, "spatial_shapes": spatial_shapes}
        outputs: Any = self.vit(pixel_values, return_dict=True, image_sizes=image_sizes, **shapes, **kwargs)
        logits = self._logits(outputs.pooler_output, outputs.last_hidden_state)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def forward_head(self, features: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Pool the tokens (B, L, D) of `forward_features` and return logits, or the pooled features, as in timm."""
        pooled = self.vit.forward_head(features)
        if not pre_logits:
            return self._logits(pooled, features)
        return pooled if self.distillation_classifier is None else (pooled + features[:, 1]) / 2

    def _logits(self, pooled: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.classifier(optional(self.dropout, pooled))
        if self.distillation_classifier is not None:
            logits = (logits + self.distillation_classifier(optional(self.dropout, hidden_states[:, 1]))) / 2
        return logits


@dataclass
class PlainViTMaskedImageModelingOutput(MaskedImageModelingOutput):
    """Output of the masked-image model.

    Args:
        loss: Mean over the masked patches; None without `bool_masked_pos`.
        reconstruction: Predicted image of shape (B, C, H, W), normalised like the input. If mean colours are
            predicted, each patch has its most likely colour.
        hidden_states: Hidden states of the encoder.
        attentions: Attentions of the encoder.
        color_logits: If mean colours are predicted, their logits (B, N, 8 ** C), channel 0 in the lowest digit.
    """

    color_logits: torch.Tensor | None = None


class PlainViTForMaskedImageModeling(PlainViTPreTrainedModel):
    """The plain Vision Transformer for masked image modeling: it predicts masked patches.

    The target is `config.reconstruction_target`: pixels (SimMIM: Xie et al. 2022) or mean colours (Dosovitskiy et al.
    2021, appendix B.1.2). The model always has a mask token and sets `use_mask_token` in its own copy of the config.
    """

    _auto_class = "AutoModelForMaskedImageModeling"
    __call__: Callable[..., PlainViTMaskedImageModelingOutput]

    def __init__(self, config: PlainViTConfig):
        if not config.use_mask_token:  # such as a classifier's; the caller's config stays unchanged
            config = copy.deepcopy(config)
            config.use_mask_token = True
        if config.patch_dropout_prob:
            raise ValueError("a masked-image model predicts every patch: set patch_dropout_prob=0")
        if config.drop_partial_patches:
            raise ValueError("a masked-image model predicts every pixel: set drop_partial_patches=False")
        super().__init__(config)
        self.vit = PlainViTModel(config, add_pooling_layer=False)
        self.decoder = PATCH_PREDICTORS[config.reconstruction_target](config)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor | None = None, **kwargs: Any
    ) -> PlainViTMaskedImageModelingOutput:
        """Predict the patches of images.

        Args:
            pixel_values: Normalised pixels of shape (B, C, H, W); the patch size must divide H and W.
            bool_masked_pos: True for masked patches, of shape (B, N) or (B, h, w).
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Raises:
            TypeError: The pixels or the mask are not tensors.
            ValueError: The pixels or the mask do not fit the model.
        """
        outputs: Any = self.vit(pixel_values, bool_masked_pos=bool_masked_pos, return_dict=True, **kwargs)
        features = self.tokens_to_map(outputs.last_hidden_state, *pixel_values.shape[-2:])  # B D h w
        masked = None
        if bool_masked_pos is not None:
            masked = bool_masked_pos.to(features.device, torch.bool).view(-1, *features.shape[-2:])
        reconstruction, color_logits, loss = self.decoder(features, pixel_values.to(features.device), masked)
        return PlainViTMaskedImageModelingOutput(
            loss=loss,
            reconstruction=reconstruction,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            color_logits=color_logits,
        )


class PlainViTBackbone(BackboneMixin, PlainViTEncoder):
    """The plain Vision Transformer as a backbone for detection, segmentation and depth models.

    The stages are the embeddings ("stem") and the blocks ("stage1", ...); `config.out_features` selects some of them.
    The final norm is applied to each feature map (unless `apply_layernorm=False`, or the norm comes after the pooling),
    and each is reshaped to (B, D, h, w) (unless `reshape_hidden_states=False`).
    """

    _auto_class = "AutoBackbone"
    __call__: Callable[..., BackboneOutput]

    def __init__(self, config: PlainViTConfig):
        if config.patch_dropout_prob:
            raise ValueError("a backbone returns whole feature maps: set patch_dropout_prob=0")
        super().__init__(config)
        normed = config.apply_layernorm and config.final_norm in ("before_pooling", "both")
        self.layernorm = norm_or_identity(config, normed)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> BackboneOutput:
        """Extract feature maps.

        Args:
            pixel_values: Normalised pixels of shape (B, C, H, W); the patch size must divide H and W.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `feature_maps`, one per selected stage: (B, D, h, w), or (B, L, D) if not reshaped.

        Raises:
            TypeError: The pixels are not a tensor.
            ValueError: The pixels do not fit the model.
        """
        refuse_masks(kwargs)
        pixel_values = as_weights(pixel_values, self)
        tokens = tokens_of(self.config, pixel_values)
        wanted = [index % len(self.stage_names) for index in self.out_indices]  # some count from the end
        _, stages = self.encode(pixel_values, tokens, stages=wanted, **kwargs)
        features = [self.layernorm(hidden_states) for hidden_states in stages]
        if self.config.reshape_hidden_states:
            features = [self.tokens_to_map(tokens, *pixel_values.shape[-2:]) for tokens in features]
        return BackboneOutput(feature_maps=tuple(features))


__all__ = [
    "PlainViTBackbone",
    "PlainViTForImageClassification",
    "PlainViTForMaskedImageModeling",
    "PlainViTModel",
    "PlainViTPreTrainedModel",
]
