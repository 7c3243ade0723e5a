"""Configuration of the plain Vision Transformer, with a field for every setting that changes its outputs."""

import dataclasses
import difflib
import os
import re
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from .releases_plain_vit import OLDEST  # noqa: F401  # isort: skip
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin
from transformers.dynamic_module_utils import custom_object_save

from .checks_plain_vit import MOST_PIXELS, check_counts, check_fields, check_labels, listed, shown

# The version of this code, which may be a copy in a checkpoint; saved configs record it.
VERSION = "0.1.0"
VERSION_KEY = "plain_vit_version"

# The sizes of the paper (Dosovitskiy et al. 2021, Table 1), of DeiT (Touvron et al. 2021, Table 1: tiny, small) and of
# Zhai et al. 2022 (Table 2: giant, gigantic).
PRESETS = {
    "tiny":     {"hidden_size":  192, "num_hidden_layers": 12, "num_attention_heads":  3, "intermediate_size":  768},
    "small":    {"hidden_size":  384, "num_hidden_layers": 12, "num_attention_heads":  6, "intermediate_size": 1536},
    "base":     {"hidden_size":  768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large":    {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "huge":     {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120},
    "giant":    {"hidden_size": 1408, "num_hidden_layers": 40, "num_attention_heads": 16, "intermediate_size": 6144},
    "gigantic": {"hidden_size": 1664, "num_hidden_layers": 48, "num_attention_heads": 16, "intermediate_size": 8192},
}  # fmt: skip
PRESET_NAME = re.compile(r"vit-(?P<size>[a-z]+)-patch(?P<patch>\d+)-(?P<image>\d+)")
# Returns the config of any other name, with some fields changed. The package sets it: a copy in a checkpoint has none.
OTHER_NAMES: list[Callable[..., "PlainViTConfig"]] = []

# The code of each Auto class in a saved folder; the dict names both backends of the image processor.
AUTO_MAP = {
    "AutoConfig": "configuration_plain_vit.PlainViTConfig",
    "AutoModel": "modeling_plain_vit.PlainViTModel",
    "AutoModelForImageClassification": "modeling_plain_vit.PlainViTForImageClassification",
    "AutoModelForMaskedImageModeling": "modeling_plain_vit.PlainViTForMaskedImageModeling",
    "AutoBackbone": "modeling_plain_vit.PlainViTBackbone",
    "AutoImageProcessor": {
        "torchvision": "image_processing_plain_vit.PlainViTImageProcessor",
        "pil": "image_processing_plain_vit.PlainViTImageProcessorPil",
    },
}

# Keywords that transformers passes, or that transformers and its Trainer save next to the fields.
TRANSFORMERS_KEYWORDS = {
    "_attn_implementation", "_commit_hash", "_name_or_path", "attn_implementation", "auto_map",
    "experts_implementation", "fusion_config", "model_type", "name_or_path", "num_labels", "out_features",
    "out_indices", "output_attentions", "quantization_config", "torch_dtype", "use_cache",
}  # fmt: skip
# Additional keywords that transformers passes to `from_dict`, and keywords that only an Auto class passes.
LOADING_KEYWORDS = {"_from_auto", "_from_pipeline", "dtype", "gguf_file", "return_unused_kwargs"}
AUTO_KEYWORDS = {"_from_auto", "name_or_path"}


class TravellingCode:
    """Mixin that saves the code of this package with every model, including models of subclasses.

    The code of a subclass is saved if it was registered with `register_for_auto_class`, as for stock classes; otherwise
    the folder names the plain-vit class it derives from and contains that code. The same applies to classes that torch
    derives, for example for sharding.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not _is_ours(cls) and "_auto_class" not in vars(cls):
            cast(Any, cls)._auto_class = None

    @classmethod
    def _ours(cls) -> Any:
        """Return the plain-vit class that this class is or derives from."""
        return next(base for base in cls.__mro__ if _is_ours(base))

    def _add_code(self, folder: str | os.PathLike) -> None:
        """Save the plain-vit code in the folder if transformers did not."""
        if not _is_ours(type(self)):
            custom_object_save(self._ours(), folder)

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        self._add_code(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]


def _is_ours(kind: type) -> bool:
    """Return whether a class is defined in one of our files, in the package or in a checkpoint."""
    return kind.__module__.rpartition(".")[2] in ("configuration_plain_vit", "modeling_plain_vit")


@strict
@dataclasses.dataclass
class RopeParameters:
    """Rotation of queries and keys by the place of their patch: the keys of `rope_parameters`, in transformers' form.

    Args:
        rope_type: "axial" (by the row and the column of the patch, with fixed frequencies) or "mixed" (with learned
            frequencies of both for each block and head: Heo et al. 2024).
        rope_theta: Base of the frequencies; the learned ones only start from it.
        coordinates: "index" (row and column numbers) or "centered" (centres of the patches in an image from -1 to 1,
            times 2 pi: DINOv3).
        axes: Order of the two coordinates among the channels: "yx" or "xy".
        offset: Added to the numbers of rows and columns.
        reference_grid: Grid (down, across) to which the numbers of other grids are scaled (EVA-02); None to count the
            patches.
        pairs: The rotated pairs of channels: "adjacent" (2 i and 2 i + 1) or "halves" (i and i + head_dim / 2).
        frequencies: Rounding of the frequencies: "inverse" (multiply by 1 / theta ** x) or "period" (divide by
            theta ** x: timm's DINOv3).
        axis_frequencies: "equal" (rows and columns have the same frequencies) or "alternating" (of one series, the
            first coordinate has every other frequency, the second the ones between: Pixtral).
        prefix_angles: Rotation of the tokens before the patches: "zero" (none) or "learned" (MLCD's class token).
        dtype: Dtype of cosines and sines: "float32", or that of the "weights".
        shift: Random shift of the coordinates in training, at most this far in each direction.
        jitter: Random factor on each coordinate in training, at most this.
        rescale: Random factor on both coordinates in training, at most this. All three are drawn once per batch.
    """

    rope_type: Literal["axial", "mixed"] = "axial"
    rope_theta: float | int = 10000.0
    coordinates: Literal["index", "centered"] = "index"
    axes: Literal["yx", "xy"] = "yx"
    offset: float | int = 0.0
    reference_grid: list[int] | tuple[int, int] | None = None
    pairs: Literal["adjacent", "halves"] = "adjacent"
    frequencies: Literal["inverse", "period"] = "inverse"
    axis_frequencies: Literal["equal", "alternating"] = "equal"
    prefix_angles: Literal["zero", "learned"] = "zero"
    dtype: Literal["float32", "weights"] = "float32"
    shift: float | int | None = None
    jitter: float | int | None = None
    rescale: float | int | None = None


@strict
@dataclasses.dataclass
class RelativePositionBias:
    """Bias on the attention scores by the distance of two tokens: the keys of `relative_position_bias`.

    Args:
        type: "table" (a learned bias of each head for each distance: BEiT), "mlp" (computed from the distances by a
            small network), "query" (the product of each query and a learned vector of the offset: Dosovitskiy et al.
            2021, appendix D.4) or "decomposed" (the products of each query and two learned vectors, of the distance
            down and of the distance across: SAM).
        shared: Use one such bias in all blocks, instead of one for each.
        mlp_size: Width of that network.
        resampling: How a table or vectors are resampled to another grid: "bilinear" (transformers) or "geometric"
            (finer for short distances: BEiT's code, and timm's).
    """

    type: Literal["table", "mlp", "query", "decomposed"] = "table"
    shared: bool = False
    mlp_size: int = 128
    resampling: Literal["bilinear", "geometric"] = "bilinear"


@strict
@dataclasses.dataclass
class ResNetStem:
    """ResNet whose feature map is cut into patches, instead of the image: the keys of `resnet_stem`.

    The root reduces the resolution by a factor of 4, each stage but the first by a factor of 2; the config's
    `patch_size` is in pixels of the image.

    Args:
        depths: Units in each stage; empty for the root only.
        style: The source it matches: "google" (kernels divided by their deviation + 1e-5, group norms of epsilon 1e-6)
            or "timm" (by sqrt(variance + 1e-8), 1e-5).
    """

    depths: list[int] | tuple[int, ...] = ()
    style: Literal["google", "timm"] = "google"


@strict
@dataclasses.dataclass
class WindowAttention:
    """Attention within square windows of the patch grid (Li et al. 2022): the keys of `window_attention`.

    Args:
        size: Side of a window in patches. The grid is padded with zeros at the right and at the bottom to whole
            windows.
        global_layers: Numbers of the blocks, from 0, that attend to the whole image.
        padding: "attended" (the padding takes part in the attention of its window: SAM) or "masked" (it does not, as
            if the last windows were smaller: Qwen2.5-VL).
    """

    size: int = 14
    global_layers: list[int] | tuple[int, ...] = ()
    padding: Literal["attended", "masked"] = "attended"


# Fields that are None without the part of the model that they describe.
GROUPS = {
    "rope_parameters": RopeParameters,
    "relative_position_bias": RelativePositionBias,
    "window_attention": WindowAttention,
    "resnet_stem": ResNetStem,
}
GROUP_DEFAULTS = {name: vars(kind()) for name, kind in GROUPS.items()}


@strict
class PlainViTConfig(TravellingCode, BackboneConfigMixin, PreTrainedConfig):
    """Configuration of a plain Vision Transformer.

    Sizes are (height, width) in pixels; an int means a square. `rope_parameters`, `relative_position_bias`,
    `window_attention` and `resnet_stem` are dicts, whose missing keys get their defaults, or None for a model without
    that part.

    Args:
        hidden_size: Width of a token.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Heads of each attention.
        head_dim: Width of one head (default: `hidden_size // num_attention_heads`).
        num_key_value_heads: Heads of keys and values, in all blocks or in each; groups of queries' heads share them
            (Ainslie et al. 2023; default: as many as `num_attention_heads`).
        intermediate_size: Width inside the MLP (after gating, for the gated kinds).
        image_size: Native input size, in pixels. Other sizes work too: the position table is resampled.
        patch_size: Size of a patch, in pixels. It must divide `image_size`.
        num_channels: Number of input channels.
        num_frames: Copies of the image that the patch projection takes, as frames of a video without motion (Qwen3-VL).
        drop_partial_patches: Crop the pixels at the right and at the bottom that do not fill a patch, instead of
            raising an error (SigLIP's 384 pixels in patches of 14).
        use_class_token: Put a learned class token before the patches.
        use_distillation_token: Put a learned distillation token after the class token (DeiT), with a head of its own.
        num_register_tokens: Number of learned tokens that no head reads (Darcet et al. 2024).
        register_tokens_last: Append the registers after the patches, without positions, instead of before them.
        use_mask_token: Add a learned token that replaces masked patches (`bool_masked_pos`).
        patch_projection: "conv" (a strided convolution), "linear" (a dense layer over pixels in the order
            row, column, channel, like vit-pytorch) or "shifted" (the same over the image and four copies of it, moved
            by one pixel to each side: Lee et al. 2021).
        resnet_stem: The ResNet before that convolution (the paper's hybrids, section 3.1): see `ResNetStem`.
        patch_bias: Give the patch projection a bias.
        patch_pre_norm: Normalise the raw pixels of each patch before the projection (linear and shifted only).
        patch_post_norm: Normalise each patch after the projection.
        embedding_norm: Normalise all tokens after the positions were added, before the blocks (CLIP).
        position_embedding_type: "learned" (a table), "learned_2d" (a table of rows and one of columns, half of the
            channels each: appendix D.4), "factorized" (the same with all channels, added: NaViT), "sincos_2d" (Beyer et
            al. 2022, computed) or "none".
        position_table_length: Rows of each of the "factorized" tables, of which an image uses the first (Gemma 4;
            default: those of the native grid).
        position_embedding_on_prefix: Also add position embeddings to the tokens before the patches.
        position_resampling: How the table is resampled to another grid. "truncate" uses the first rows in raster order,
            or the first of each of the "factorized" tables; "bucketed" the row of the place where a patch begins,
            relative to the image, and rounded as in Idefics (a "learned" table only).
        position_resampling_to_square: Resample to the square of the grid's longer side, and use the part of that at the
            top left, which keeps the aspect ratio (timm's NaFlexVit).
        rope_parameters: Rotation of queries and keys by the place of their patch: see `RopeParameters`.
        relative_position_bias: Bias on the attention scores by the distance of two tokens: see `RelativePositionBias`.
        window_attention: Attention within windows, in some of the blocks or in all: see `WindowAttention`.
        block_type: "sequential" (pre-norm), "post_norm" (the norm ends each residual branch), "sandwich" (a norm begins
            and another ends each residual branch: Gemma 4), "parallel" (attention and MLP in parallel after one norm:
            ViT-22B) or "branches" (several attentions, then several MLPs, summed).
        num_branches: Number of attentions and of MLPs in a block of type "branches".
        norm_type: "layer_norm" or "rms_norm", everywhere; or "layer_norm_without_bias", with a bias beside the patch
            projection alone (vit-pytorch's NaViT of nested tensors).
        layer_norm_eps: Epsilon of every norm. timm, Google and torchvision use 1e-6, vit-pytorch and CLIP 1e-5.
        attention_type: "self", "differential" (Ye et al. 2024), "re_attention" (the weights are mixed among the heads
            and normalised over them: DeepViT), "talking_heads" (scores and weights are mixed: CaiT) or "locality" (to
            the other tokens only, with a learned factor on the scores: Lee et al. 2021). The last three are computed
            with plain matrix products, with every implementation.
        attention_scale: Factor on the attention scores (default: `head_dim ** -0.5`).
        qkv_bias: Give the query, key and value projections biases.
        key_bias: Give the key projection one too (EVA, BEiT and DINOv3 do not).
        qk_norm: None, "norm" (`norm_type` over `head_dim`), "rms_per_head" (L2-normalised, one gain per head)
            or "rms_all_heads" (one RMS norm over the concatenated heads: InternViT-6B).
        value_norm: Divide the values of each head by their root mean square (Gemma 4).
        attention_inner_norm: Normalise the concatenated heads before the output projection (BEiT-3).
        attention_output_projection: Project the concatenated heads.
        attention_output_bias: Give that projection a bias.
        mlp_type: "mlp", "swiglu" or "swiglu_packed" (gate and value in one layer).
        mlp_bias: Give the layers of the MLP biases.
        mlp_inner_norm: Normalise inside the MLP, after the activation (BEiT-3).
        hidden_act: Activation of the MLP. "gelu" is exact; "gelu_pytorch_tanh" is JAX's default approximation.
        layer_scale_init_value: Initial value of the learned gain on each residual branch; None for no gain.
        scale_mlp_branch: Give the branch of the MLP a LayerScale too (Sapiens2 does not).
        final_norm: Position of the last norm: "before_pooling", "after_pooling", "both" or "none".
        pooling: "cls", "mean", "max", "mean_max" (their average), "cls_mean" (class token and mean concatenated, twice
            as wide: DINOv2's head), "map" (attention pooling), "query" (attention pooling without an MLP: AIMv2's),
            "prr" (the class token, or the average, after attention between all tokens without parameters),
            "class_attention" (a class token that reads the patches in blocks of its own: CaiT), "query_block" (a
            learned query that reads the patches as in a block without an MLP: vit-pytorch's NaViT), "query_attention"
            (the same without the query in the sum: its NaViT of nested tensors), "prefix_mean" (the mean of the first
            tokens: Pixio), "prefix_joined" (the first tokens concatenated: RADIO) or "none" (every token).
        pooling_num_attention_heads: Heads of the pooling, for "map", "query" and "prr" (default: those of the blocks).
        pooling_intermediate_size: Width inside the MLP of pooling "map" (default: that of the first layer of the
            blocks' MLP).
        pooling_num_layers: Blocks of pooling "class_attention" (default: 2).
        pooling_num_tokens: Tokens that pooling "prefix_mean" or "prefix_joined" reads (default: all prefix tokens).
        pool_prefix_tokens: Include class, distillation and register tokens in the pooling, not only the patches.
        representation_size: Width of a dense layer between pooling and classifier (the paper's pre-training head).
        representation_act: Activation of that layer.
        representation_bias: Give that layer a bias (the projections of CLIP have none).
        classifier_bias: Give the classifier a bias.
        hidden_dropout_prob: Dropout after each dense layer except query, key and value (paper, appendix B.1).
        embedding_dropout_prob: Dropout after adding positions (default: `hidden_dropout_prob`).
        attention_probs_dropout_prob: Dropout of the attention weights.
        classifier_dropout_prob: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0 at the first.
        patch_dropout_prob: Fraction of patches dropped in training.
        initialization: Source of the initial weights: "transformers" (normal everywhere), "timm" (the same for dense
            layers, PyTorch's own for the patch convolution), "google" (the paper's code: Xavier, LeCun, a zero head) or
            "vit_pytorch" (PyTorch's own for every layer, as its ViT and SimpleViT; unit normal tokens and positions).
        initializer_range: Standard deviation of the initial weights, for "transformers".
        zero_init_classifier: Initialise the classifier with zeros (the paper's fine-tuning, section 3.2).
        reconstruction_target: Target of the masked-image model for a masked patch: its "pixels" (SimMIM) or its
            "mean_color" in 3 bits per channel (paper, appendix B.1.2).
        image_mean: Mean that the image processor subtracts (for pixel values in [0, 1]); one number, or one per
            channel. Mean colours are classified by their values before normalisation.
        image_std: Standard deviation that the image processor divides by.
        apply_layernorm: Apply the final norm before the pooling to the backbone's feature maps.
        reshape_hidden_states: Return the backbone's features as maps (B, D, h, w), not as tokens (B, L, D). If
            False, a size given as a pair stays a pair, even with equal sides.
        out_features: Stages that the backbone returns: "stem" (the embeddings), "stage1", ... (default: the last).
        out_indices: The same by number; 0 is the stem.

    Raises:
        ValueError: A value or a combination cannot work, or a field does not exist. A saved dict (with
            `plain_vit_version`, as written by `to_dict`) may contain unknown keys: they are kept, with a warning that
            names them, unless a newer version wrote them, whose fields may change the outputs.
        huggingface_hub.errors.StrictDataclassFieldValidationError: A value has the wrong type, or is not among the
            choices of its field.
    """

    model_type = "plain_vit"
    _auto_class = "AutoConfig"

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    head_dim: int | None = None
    num_key_value_heads: int | list[int] | tuple[int, ...] | None = None
    intermediate_size: int = 3072
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    num_frames: int = 1
    drop_partial_patches: bool = False

    use_class_token: bool = True
    use_distillation_token: bool = False
    num_register_tokens: int = 0
    register_tokens_last: bool = False
    use_mask_token: bool = False

    patch_projection: Literal["conv", "linear", "shifted"] = "conv"
    resnet_stem: dict[str, Any] | None = None
    patch_bias: bool = True
    patch_pre_norm: bool = False
    patch_post_norm: bool = False
    embedding_norm: bool = False
    position_embedding_type: Literal["learned", "learned_2d", "factorized", "sincos_2d", "none"] = "learned"
    position_table_length: int | None = None
    position_embedding_on_prefix: bool = True
    position_resampling: Literal[
        "bicubic", "bicubic_antialias", "bicubic_align_corners",
        "bilinear", "bilinear_antialias", "bilinear_align_corners", "truncate", "bucketed",
    ] = "bicubic_antialias"  # fmt: skip
    position_resampling_to_square: bool = False
    rope_parameters: dict[str, Any] | None = None
    relative_position_bias: dict[str, Any] | None = None
    window_attention: dict[str, Any] | None = None

    block_type: Literal["sequential", "post_norm", "sandwich", "parallel", "branches"] = "sequential"
    num_branches: int = 1
    norm_type: Literal["layer_norm", "layer_norm_without_bias", "rms_norm"] = "layer_norm"
    layer_norm_eps: float | int = 1e-6
    attention_type: Literal["self", "differential", "re_attention", "talking_heads", "locality"] = "self"
    attention_scale: float | int | None = None
    qkv_bias: bool = True
    key_bias: bool = True
    qk_norm: Literal["norm", "rms_per_head", "rms_all_heads"] | None = None
    value_norm: bool = False
    attention_inner_norm: bool = False
    attention_output_projection: bool = True
    attention_output_bias: bool = True
    mlp_type: Literal["mlp", "swiglu", "swiglu_packed"] = "mlp"
    mlp_bias: bool = True
    mlp_inner_norm: bool = False
    hidden_act: str = "gelu"
    layer_scale_init_value: float | int | None = None
    scale_mlp_branch: bool = True

    final_norm: Literal["before_pooling", "after_pooling", "both", "none"] = "before_pooling"
    pooling: Literal[
        "cls", "mean", "max", "mean_max", "cls_mean", "map", "query", "prr", "class_attention", "query_block",
        "query_attention", "prefix_mean", "prefix_joined", "none",
    ] = "cls"  # fmt: skip
    pooling_num_attention_heads: int | None = None
    pooling_intermediate_size: int | None = None
    pooling_num_layers: int | None = None
    pooling_num_tokens: int | None = None
    pool_prefix_tokens: bool = False
    representation_size: int | None = None
    representation_act: str = "tanh"
    representation_bias: bool = True
    classifier_bias: bool = True

    hidden_dropout_prob: float | int = 0.0
    embedding_dropout_prob: float | int | None = None
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.0
    patch_dropout_prob: float | int = 0.0

    initialization: Literal["transformers", "timm", "google", "vit_pytorch"] = "transformers"
    initializer_range: float | int = 0.02
    zero_init_classifier: bool = False

    reconstruction_target: Literal["pixels", "mean_color"] = "pixels"
    image_mean: float | int | list[float] | tuple[float, ...] = 0.5
    image_std: float | int | list[float] | tuple[float, ...] = 0.5

    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if "model_type" in kwargs:
            self.check_model_type(kwargs)
            del kwargs["model_type"]
        saved, version = VERSION_KEY in kwargs, kwargs.pop(VERSION_KEY, None)
        unknown = [*sorted(kwargs.keys() - TRANSFORMERS_KEYWORDS), *self._complete_groups()]
        if saved:
            self._check_foreign(unknown, version)
        elif unknown:
            raise _no_field(type(self), unknown[0])
        check_labels(self, kwargs.get("num_labels"))
        check_counts(self)
        self._normalize()
        check_fields(self)
        stages = {name: kwargs.pop(name, None) for name in ("out_features", "out_indices")}
        for name, chosen in stages.items():
            if isinstance(chosen, list | tuple) and len(chosen) > self.num_hidden_layers + 1:
                raise ValueError(f"{name} names {len(chosen)} stages: there are {self.num_hidden_layers + 1}")
        self.set_output_features_output_indices(**stages)
        auto_map = {**AUTO_MAP, **(kwargs.pop("auto_map", None) or {})}
        super().__post_init__(**kwargs)
        self.auto_map = auto_map
        if unknown:
            _warn_of_foreign(unknown, flat_fields(self.to_dict()), version)

    def _complete_groups(self) -> list[str]:
        """Give the missing keys of each group their defaults, and return the names of the unknown keys."""
        unknown = []
        for name, kind in GROUPS.items():
            if (given := getattr(self, name)) is not None:
                known = {field.name for field in dataclasses.fields(kind)}
                unknown += [f"{name}.{key}" for key in sorted(given.keys() - known)]
                try:
                    complete = vars(kind(**{key: given[key] for key in given.keys() & known}))
                except StrictDataclassFieldValidationError as error:
                    raise StrictDataclassFieldValidationError(name, cast(Exception, error.__cause__)) from error
                setattr(self, name, complete | {key: given[key] for key in given.keys() - known})
        return unknown

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the keywords: the rotations of language models, which transformers completes here, are others."""
        return kwargs

    def validate_rope(self) -> None:
        """Leave the check to `check_fields`, for the same reason."""

    @classmethod
    def _check_foreign(cls, names: list[str], version: Any) -> None:
        """Refuse unknown keys of a saved config that must not be kept."""
        newer = _release(version) > _release(VERSION)
        if names and newer:
            raise ValueError(
                f"this config, saved by plain-vit {version}, holds {listed(names)}, which plain-vit {VERSION} does "
                "not know and which may change the outputs: use that version or a later one"
            )
        taken = [name for name in names if name == "self" or name.startswith("__") or hasattr(cls, name)]
        if taken:
            raise ValueError(
                f"this config holds {listed(taken)}, a name that {cls.__name__} uses itself: "
                "remove it from the dict or from config.json"
            )

    @classmethod
    def check_model_type(
        cls, saved: Mapping[str, Any], place: str | os.PathLike | None = None, revision: str | None = None
    ) -> None:
        """Refuse the config of another model: its weights have other names, and ours would stay random.

        Args:
            saved: The saved dict.
            place: Folder, file or Hub id of the config; None if unknown.
            revision: Branch, tag or commit of a Hub repository.

        Raises:
            ValueError: It is not a plain-vit config; the message says how to open that model.
        """
        found = saved.get("model_type")
        if saved.get(VERSION_KEY) is not None or found in (cls.model_type, PlainViTConfig.model_type):
            return
        source = "FOLDER" if place is None else _argument(Path(place), revision)
        remedy = (
            "convert it (its save_pretrained makes a folder for this class): from plain_vit.conversion import "
            f"from_checkpoint; model = from_checkpoint({source}).model"
        )
        parts = [part for part in saved.values() if isinstance(part, dict)]
        if any(part.get("model_type") == PlainViTConfig.model_type for part in parts):
            whole = shown(saved.get("architectures"))
            remedy = f"open the whole model, with from_pretrained({source}) of its class ({whole}), and take its part"
        raise ValueError(
            f"{'this config' if place is None else place} has model_type {shown(found)}: expected {cls.model_type!r}. "
            f"Its weights have other names: they would be ignored, and this model would stay random. Instead, {remedy}"
        )

    def _normalize(self) -> None:
        """Convert sizes to an int or a tuple, and set the default of `head_dim`."""
        for name in ("image_size", "patch_size"):
            size = getattr(self, name)
            pair = (size, size) if isinstance(size, int) else tuple(size)
            if len(pair) != 2 or min(pair) < 1 or pair[0] * pair[1] > MOST_PIXELS:
                raise ValueError(
                    f"{name} is {shown(size)}: expected a positive int or (height, width) in pixels, at most "
                    f"{MOST_PIXELS} pixels in total"
                )
            # ViTPose, which uses tokens instead of maps, reads its backbone's sizes as pairs: a given pair is kept.
            is_one_number = isinstance(size, int) or (pair[0] == pair[1] and self.reshape_hidden_states)
            setattr(self, name, pair[0] if is_one_number else pair)
        if self.resnet_stem is not None:
            self.resnet_stem["depths"] = tuple(self.resnet_stem["depths"])
        if self.window_attention is not None:
            self.window_attention["global_layers"] = tuple(sorted({*self.window_attention["global_layers"]}))
        if self.rope_parameters is not None and self.rope_parameters["reference_grid"] is not None:
            grid = (*self.rope_parameters["reference_grid"],)
            if len(grid) != 2 or not all(1 <= side <= MOST_PIXELS for side in grid):
                raise ValueError(
                    f"rope_parameters.reference_grid is {shown(grid)}: expected patches (down, across), or None"
                )
            self.rope_parameters["reference_grid"] = grid
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}: choose a head count that divides it, or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is not None:
            self.num_key_value_heads = self._shared_heads(self.num_key_value_heads)

    def _shared_heads(self, counts: int | list[int] | tuple[int, ...]) -> int | tuple[int, ...] | None:
        """Return the key and value heads: one number if all blocks have the same, None if no heads are shared."""
        given, heads = (counts,) if isinstance(counts, int) else tuple(counts), self.num_attention_heads
        expected = 1 if isinstance(counts, int) else self.num_hidden_layers
        if len(given) != expected or not all(0 < count <= heads and heads % count == 0 for count in given):
            raise ValueError(
                f"num_key_value_heads is {shown(counts)}: expected one number, or one for each of the "
                f"{self.num_hidden_layers} blocks, that divides num_attention_heads {heads}"
            )
        if len(set(given)) > 1:
            return given
        return given[0] if set(given) - {heads} else None

    @classmethod
    def from_name(cls, name: str, **kwargs: Any) -> "PlainViTConfig":
        """Return the configuration of a model by name.

        Args:
            name: A name such as "vit-base-patch16-224": size (tiny, small, base, large, huge, giant, gigantic), then
                patch and image size in pixels; or, where plain-vit is installed, any name that `create_model` takes,
                such as "timm:vit_base_patch16_224".
            **kwargs: Further fields, such as `num_labels`.

        Raises:
            ValueError: The name is unknown; suggests similar names.

        Source:
            Dosovitskiy et al. 2021, Table 1; Touvron et al. 2021, Table 1; Zhai et al. 2022, Table 2.
        """
        match = PRESET_NAME.fullmatch(name)
        if match is None or match["size"] not in PRESETS:
            for named in OTHER_NAMES:
                return named(name, **kwargs)
            raise ValueError(
                f"unknown name {name!r}: expected vit-SIZE-patchP-I with SIZE one of {', '.join(PRESETS)}; names of "
                "other packages, such as timm's, need the package plain-vit (import plain_vit, and its PlainViTConfig)"
            )
        sizes = {"patch_size": int(match["patch"]), "image_size": int(match["image"])}
        return cls(**{**PRESETS[match["size"]], **sizes, **kwargs})

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a saved config as transformers does, without building it.

        Raises:
            ValueError: The config belongs to another model. Auto classes choose the class by its `model_type`.
        """
        given = (
            {"model_type": kwargs.pop("model_type")} if "model_type" in kwargs else {}
        )  # it would replace the saved one
        saved, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        place = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        cls.check_model_type(saved, place, kwargs.get("revision"))
        return saved, unused | given

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from a saved dict; fields given as keywords override it and are validated together with the rest.

        Unknown keys of the dict are kept, with a warning. A group such as `rope_parameters` is overridden as a whole.

        Args:
            config_dict: The result of `to_dict`, or the content of `config.json`.
            **kwargs: Fields, keys of the dict, and keywords of transformers. Other keywords are refused, unless
                `return_unused_kwargs` returns them, or an Auto class passes them: it also passes keywords for models
                and image processors.

        Raises:
            ValueError: A keyword is not a field, or a value is invalid, as for the constructor.
        """
        names = (cls.__dataclass_fields__.keys() | config_dict.keys() | {"out_features", "out_indices"}) - {"dtype"}
        given = {name: kwargs.pop(name) for name in sorted(names & kwargs.keys() - TRANSFORMERS_KEYWORDS)}
        given |= {name: kwargs.pop(name) for name in ("out_features", "out_indices") if name in kwargs}
        unknown = {name: kwargs.pop(name) for name in sorted(kwargs.keys() - TRANSFORMERS_KEYWORDS - LOADING_KEYWORDS)}
        returned = kwargs.pop("return_unused_kwargs", False)
        if unknown and not returned and not kwargs.keys() & AUTO_KEYWORDS:
            raise _no_field(cls, next(iter(unknown)))
        if given.keys() & {"out_features", "out_indices"}:
            config_dict = {k: v for k, v in config_dict.items() if k not in ("out_features", "out_indices")}
        cls._check_foreign(["self"] if "self" in config_dict else [], config_dict.get(VERSION_KEY))
        fields = {VERSION_KEY: None, **config_dict, **given}
        config, unused = super().from_dict(fields, return_unused_kwargs=True, **kwargs)
        return (config, {**unused, **unknown}) if returned else config

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> Any:
        """Build from a saved file, like `from_dict`."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save as transformers does, but name no Auto classes whose code the folder lacks.

        The image processor's file may come later, when the processor is saved.
        """
        if cast(Any, self)._auto_class is None:
            self.auto_map["AutoConfig"] = AUTO_MAP["AutoConfig"]
        folder = Path(save_directory)
        kept = {name: where for name, where in self.auto_map.items() if _is_there(where, folder)}
        self.auto_map = {**AUTO_MAP, **kept}
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        self._add_code(folder)

    def to_dict(self) -> dict[str, Any]:
        """Return every field, the kept unknown keys, and the version of plain-vit.

        The backbone's stages are omitted if they are the last one, which follows from the depth.
        """
        fields = super().to_dict() | {VERSION_KEY: VERSION}
        if fields["out_indices"] == [self.num_hidden_layers]:
            del fields["out_features"], fields["out_indices"]
        return fields

    @property
    def stage_names(self) -> list[str]:
        """Names of the backbone's stages: the embeddings, then each block."""
        return ["stem", *(f"stage{number}" for number in range(1, self.num_hidden_layers + 1))]

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]  # depends on the fields
        """Layers that tensor parallelism splits: heads and MLP channels, unless a parameter spans all of them."""
        branches = self.block_type == "branches"
        attention = "layers.*.attention_branches.*.attention" if branches else "layers.*.attention"
        mlp = "layers.*.mlp_branches.*.mlp" if branches else "layers.*.mlp"
        plan: dict[str, str] = {}
        spanned = self.attention_inner_norm or self.attention_type != "self"
        spanned = spanned or self.qk_norm not in (None, "norm") or self.num_key_value_heads is not None
        spanned = spanned or self.rope_type == "mixed" or self.relative_position_bias is not None
        if self.attention_output_projection and not spanned:
            plan |= {f"{attention}.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")}
            plan |= {f"{attention}.o_proj": "rowwise"}
            if self.qk_norm is not None:
                plan |= {f"{attention}.{name}": "replicated_with_grad_allreduce" for name in ("q_norm", "k_norm")}
        if self.mlp_type != "swiglu_packed" and not self.mlp_inner_norm:
            plan |= {f"{mlp}.{name}": "colwise" for name in (["fc1", "gate"] if self.mlp_type == "swiglu" else ["fc1"])}
            plan |= {f"{mlp}.fc2": "rowwise"}
        return plan

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches (down, across) of an image of the native size."""
        return self.grid_of(*self.image_shape)

    @property
    def position_table_shape(self) -> tuple[int, int]:
        """Rows of the tables of positions down and across."""
        return self.grid_size if self.position_table_length is None else (self.position_table_length,) * 2

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the patch grid (down, across) of an image of this size.

        Args:
            height: Image height in pixels.
            width: Image width in pixels.

        Raises:
            ValueError: The patch size does not divide it.
        """
        patch_height, patch_width = self.patch_shape
        partial = (height % patch_height or width % patch_width) and not self.drop_partial_patches
        if height < patch_height or width < patch_width or partial:
            nearest = tuple(max(1, round(s / p)) * p for s, p in ((height, patch_height), (width, patch_width)))
            raise ValueError(
                f"an image of {(height, width)} pixels (height, width) is not a multiple of patch_size "
                f"{(patch_height, patch_width)}: use {nearest}, or another patch_size"
            )
        return height // patch_height, width // patch_width

    @property
    def attention_shape(self) -> tuple[int, int]:
        """Number of attention heads, and the width of each."""
        return self.num_attention_heads, cast(int, self.head_dim)  # set by _normalize

    def key_value_heads_of(self, layer_idx: int) -> int:
        """Return the number of heads of keys and values in a block."""
        counts = self.num_key_value_heads or self.num_attention_heads
        return counts if isinstance(counts, int) else counts[layer_idx]

    @property
    def image_shape(self) -> tuple[int, int]:
        """Pixels (down, across) of an image of the native size."""
        return _pair(self.image_size)

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Pixels (down, across) of one patch."""
        return _pair(self.patch_size)

    @property
    def pooled_size(self) -> int:
        """Width of the pooled features."""
        return self.hidden_size * {"cls_mean": 2, "prefix_joined": self.pooling_tokens}.get(self.pooling, 1)

    @property
    def pooling_tokens(self) -> int:
        """Leading tokens that pooling "prefix_mean" or "prefix_joined" reads."""
        return self.pooling_num_tokens or self.num_prefix_tokens

    @property
    def pooling_heads(self) -> int:
        """Number of heads of an attention pooling."""
        return self.pooling_num_attention_heads or self.num_attention_heads

    @property
    def pooling_width(self) -> int:
        """Width inside the MLP of pooling "map"; by default that of the first layer of the blocks' MLP, as in timm."""
        packed = self.mlp_type == "swiglu_packed"
        return self.pooling_intermediate_size or self.intermediate_size * (2 if packed else 1)

    @property
    def pooling_depth(self) -> int:
        """Blocks of pooling "class_attention"."""
        return self.pooling_num_layers or 2

    def group(self, name: str) -> dict[str, Any]:
        """Return a group of fields by key: the defaults where the model lacks the part that they describe.

        Args:
            name: "rope_parameters", "relative_position_bias", "window_attention" or "resnet_stem".
        """
        return getattr(self, name) or dict(GROUP_DEFAULTS[name])

    def window_of(self, layer_idx: int) -> int | None:
        """Return the side of the windows of a block in patches; None if it attends to the whole image."""
        chosen = self.window_attention
        return None if chosen is None or layer_idx in chosen["global_layers"] else chosen["size"]

    @property
    def rope_type(self) -> str:
        """Kind of the rotation, or "none"."""
        return "none" if self.rope_parameters is None else self.rope_parameters["rope_type"]

    @property
    def stem_stride(self) -> int:
        """Factor by which a ResNet stem reduces the resolution; 1 without one."""
        return 1 if self.resnet_stem is None else stem_stride(self.resnet_stem["depths"])

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        registers = 0 if self.register_tokens_last else self.num_register_tokens
        return int(self.use_class_token) + int(self.use_distillation_token) + registers


def stem_stride(depths: Sequence[int]) -> int:
    """Return the reduction factor of a ResNet stem: 4 for its root, times 2 for each stage after the first."""
    return 4 * 2 ** max(0, len(depths) - 1)


def _is_there(where: Any, folder: Path) -> bool:
    """Return whether the code named in an auto_map entry is in this folder, in another repository, or ours."""
    names = where.values() if isinstance(where, dict) else where if isinstance(where, list | tuple) else [where]
    ours = {"configuration_plain_vit", "modeling_plain_vit", "image_processing_plain_vit"}
    return all(
        "--" in name or name.partition(".")[0] in ours or (folder / f"{name.partition('.')[0]}.py").is_file()
        for name in names
        if name is not None
    )


def _no_field(kind: type[PlainViTConfig], name: str) -> ValueError:
    """Return the error for an unknown field, with suggestions."""
    fields = sorted(field.name for field in dataclasses.fields(kind) if not field.name.startswith("_"))
    for group, keys in GROUPS.items():
        fields += [f"{group}.{field.name}" for field in dataclasses.fields(keys)]
    close = difflib.get_close_matches(name, fields, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the fields are {', '.join(fields)}"
    return ValueError(f"{kind.__name__} has no field {listed([name])}: {hint}")


def _argument(place: Path, revision: str | None) -> str:
    """Return the arguments of `from_checkpoint` that open a folder, the folder of a file, or a Hub repository."""
    if place.exists():
        return repr(str(place.parent if place.is_file() else place))
    return repr(place.as_posix()) + ("" if revision in (None, "main") else f", revision={str(revision)!r}")


def _warn_of_foreign(names: Sequence[str], saved: Container[str], version: str | None) -> None:
    """Warn about unknown keys of a saved config, and say which of them are kept when saving."""
    by = f", saved by plain-vit {version}," if version else ""
    kept, left = [name for name in names if name in saved], [name for name in names if name not in saved]
    for some, fate in ((kept, "kept, but not used"), (left, "dropped when the config is saved again")):
        if some:
            warnings.warn(
                f"this config{by} holds {listed(some)}, which plain-vit {VERSION} does not know: {fate}",
                stacklevel=1,
            )


def _release(version: Any) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros; empty for None."""
    if version is None:
        return ()
    pattern = r"([0-9]{1,9}(?:\.[0-9]{1,9}){0,3})(?:[._+-]?[a-z][a-z0-9.+]{0,30})?"
    match = re.fullmatch(pattern, version) if isinstance(version, str) else None
    if match is None:
        raise ValueError(f'{VERSION_KEY} is {str(version)[:40]!r}: expected a version such as "{VERSION}"')
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def flat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with the keys of each group beside the other fields, named "group.key"."""
    flat = dict(fields)
    for group in GROUPS:
        flat |= {f"{group}.{key}": value for key, value in (flat.pop(group, None) or {}).items()}
    return flat


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of a size that may be an int."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


__all__ = ["PlainViTConfig"]
