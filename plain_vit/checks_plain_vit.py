"""Checks of a config: the range of each field, and unsupported combinations, each with the remedy."""

import re
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from transformers.activations import ACT2FN

# Activations with parameters are excluded: no source uses them, and no initialisation here covers them.
ACTIVATIONS = sorted(ACT2FN.keys() - {"prelu", "xielu"})
PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")

# The upper limit of each count: far above any model (ViT-22B has width 6,144, DeepNet has 1,000 layers), and far below
# values that exhaust memory before any tensor is allocated.
MOST_LAYERS, MOST_PIXELS = 1000, 2**28
LARGEST = {
    **dict.fromkeys(("hidden_size", "head_dim", "intermediate_size", "representation_size", "num_channels"), 2**20),
    "num_frames": 2**10,
    "relative_position_bias.mlp_size": 2**20,
    "window_attention.size": 2**8,
    "pooling_intermediate_size": 2**20,
    "pooling_num_layers": MOST_LAYERS,
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_register_tokens",
            "pooling_num_attention_heads",
            "pooling_num_tokens",
            "position_table_length",
        ),
        2**16,
    ),
    **dict.fromkeys(("num_hidden_layers", "num_branches"), MOST_LAYERS),
    "num_labels": 500_000,
}
MAY_BE_ZERO = ("num_hidden_layers", "num_register_tokens", "num_labels")
# Minimum and maximum of each numeric field, and the description of valid values.
RANGES = {
    "layer_norm_eps": (5e-324, 1, "a small positive number such as 1e-6"),
    "attention_scale": (5e-324, 1e6, "a positive number such as head_dim ** -0.5"),
    "initializer_range": (0, 1e6, "a standard deviation of at least 0"),
    "layer_scale_init_value": (-1e6, 1e6, "a number such as 1e-5"),
    "rope_parameters.rope_theta": (1e-6, 1e8, "a positive number such as 100"),
    "rope_parameters.offset": (-1e6, 1e6, "a number such as 1"),
    "rope_parameters.shift": (0, 1e6, "a distance of at least 0"),
    "rope_parameters.jitter": (1, 1e6, "a factor of at least 1"),
    "rope_parameters.rescale": (1, 1e6, "a factor of at least 1"),
    "image_mean": (-1e6, 1e6, "a pixel value from 0 to 1 for all channels, or one for each"),
    "image_std": (5e-324, 1e6, "a positive standard deviation for all channels, or one for each"),
}


def check_labels(config: Any, number: Any = None) -> None:
    """Refuse label names that cannot be saved, and so many labels that their names would exhaust memory.

    Args:
        number: The intended number of labels (default: the number of names).

    Raises:
        ValueError: A label is invalid; the message names it.
    """
    most, names = LARGEST["num_labels"], config.id2label
    if number is not None and (
        isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= int(number) <= most
    ):
        raise ValueError(
            f"num_labels is {shown(number)}: expected the number of classes, or 0 for no head, at most {most}"
        )
    if names is not None and (not isinstance(names, dict) or len(names) > most):
        raise ValueError(
            f"id2label is {shown(names)}: expected a dict from label number to name, with at most {most} entries"
        )
    for key, name in (names or {}).items():
        if not re.fullmatch("[0-9]{1,9}", str(key)):
            raise ValueError(f"id2label has the key {shown(key)}: expected a label number")
        if not isinstance(name, str) or not is_text(name):
            raise ValueError(f"id2label names label {key} {shown(name)}: expected a string")


def check_counts(config: Any) -> None:
    """Refuse counts and sizes far above those of any model."""
    for name, most in LARGEST.items():
        value, least = value_of(config, name), int(name not in MAY_BE_ZERO)
        if name != "num_labels" and value is not None and not least <= value <= most:
            expected = f"a positive int, at most {most}" if least else f"0 or more, at most {most}"
            raise ValueError(f"{name} is {shown(value)}: expected {expected}")
    depths = config.group("resnet_stem")["depths"]
    blocks = config.num_hidden_layers * config.num_branches, sum(depths[: MOST_LAYERS + 1])
    if max(*blocks, len(depths)) > MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers {config.num_hidden_layers}, num_branches {config.num_branches} and resnet_stem.depths "
            f"{shown(depths)} make more than {MOST_LAYERS} blocks: expected fewer"
        )


def value_of(config: Any, name: str) -> Any:
    """Return the value of a field, or of the key of a group, named "group.key"."""
    group, _, key = name.partition(".")
    return config.group(group)[key] if key else getattr(config, name)


def check_fields(config: Any) -> None:
    """Validate values and their combinations."""
    config.grid_of(*config.image_shape)
    for name in ("hidden_dropout_prob", "embedding_dropout_prob", "attention_probs_dropout_prob",
                 "classifier_dropout_prob", "drop_path_rate", "patch_dropout_prob"):  # fmt: skip
        if not 0 <= (getattr(config, name) or 0) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}: expected a number in [0, 1)")
    for name in ("hidden_act", "representation_act"):
        if getattr(config, name) not in ACTIVATIONS:
            raise ValueError(f"{name} is {getattr(config, name)!r}: expected one of {', '.join(ACTIVATIONS)}")
    for name, (least, most, expected) in RANGES.items():
        value = value_of(config, name)
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is not None and not least <= number <= most:  # also true for NaN
                raise ValueError(f"{name} is {shown(value)}: expected {expected}")
    if config.problem_type not in PROBLEM_TYPES:
        raise ValueError(f"problem_type is {config.problem_type!r}: expected one of {PROBLEM_TYPES}")
    for name in ("image_mean", "image_std"):
        levels = getattr(config, name)
        if isinstance(levels, list | tuple) and len(levels) != config.num_channels:
            raise ValueError(
                f"{name} is {levels}: expected one number, or one for each of the {config.num_channels} channels"
            )
    for conflicts in (
        conflicts_in_embeddings(config),
        conflicts_in_positions(config),
        conflicts_in_attention(config),
        conflicts_in_blocks(config),
        conflicts_in_heads(config),
    ):
        for impossible, remedy in conflicts:
            if impossible:
                raise ValueError(remedy)


def conflicts_in_embeddings(config: Any) -> tuple[tuple[bool, str], ...]:
    """Return unsupported combinations of patches and prefix tokens: whether each occurs, and the remedy."""
    has_stem, depths = config.resnet_stem is not None, config.group("resnet_stem")["depths"]
    return (
        (config.register_tokens_last and config.use_distillation_token,
         "register_tokens_last is not combined with a distillation token by any source"),
        (config.patch_pre_norm and config.patch_projection not in ("linear", "shifted"),
         'patch_pre_norm needs the flattened pixels of each patch: set patch_projection="linear" or "shifted"'),
        (config.num_frames > 1 and (has_stem or config.patch_projection != "conv"),
         'frames are projected by a convolution: set patch_projection="conv" and resnet_stem=None, or num_frames=1'),
        (has_stem and config.patch_projection != "conv",
         'the feature map of a ResNet is projected by a convolution: set patch_projection="conv"'),
        (any(depth < 1 for depth in depths),
         f"resnet_stem.depths is {depths}: expected at least one unit in each stage"),
        (any(side % config.stem_stride for side in config.patch_shape),
         f"the stem reduces the resolution by {config.stem_stride}: patch_size {config.patch_size} must be a "
         "multiple of that"),
        (has_stem and config.drop_partial_patches,
         "drop_partial_patches is not combined with a ResNet stem by any source: its padding depends on the size"),
    )  # fmt: skip


def conflicts_in_positions(config: Any) -> tuple[tuple[bool, str], ...]:
    """Return unsupported combinations of positions: whether each occurs, and the remedy."""
    head_dim, rotary = config.attention_shape[1], config.rope_parameters is not None
    rope = config.group("rope_parameters")
    centered = rope["coordinates"] == "centered"
    return (
        (config.position_embedding_type == "sincos_2d" and config.hidden_size % 4 != 0,
         f"sincos_2d positions need a hidden_size that is a multiple of 4, not {config.hidden_size}"),
        (config.position_embedding_type == "sincos_2d" and config.hidden_size < 8,
         f"sincos_2d positions need two frequencies: hidden_size must be 8 or more, not {config.hidden_size}"),
        (config.position_embedding_type == "sincos_2d" and config.position_embedding_on_prefix
         and config.num_prefix_tokens > 0,
         "sincos_2d has no positions for the tokens before the patches: set position_embedding_on_prefix=False"),
        (config.position_embedding_type == "learned_2d" and config.hidden_size % 2 != 0,
         f"learned_2d positions halve the channels: hidden_size must be even, not {config.hidden_size}"),
        (config.position_embedding_type == "learned_2d" and config.position_resampling == "truncate",
         "learned_2d positions are not truncated by any source: set another position_resampling"),
        (config.position_resampling_to_square and (config.position_resampling == "truncate"
         or config.position_embedding_type not in ("learned", "learned_2d", "factorized")),
         "position_resampling_to_square resamples a table of positions: set it to False"),
        (config.position_table_length is not None and (config.position_embedding_type != "factorized"
         or config.position_resampling != "truncate"),
         'position_table_length is of tables that are not resampled: set position_embedding_type="factorized" and '
         'position_resampling="truncate", or position_table_length=None'),
        (max(config.grid_size) > max(config.position_table_shape),
         f"position_table_length {config.position_table_length} is less than the native grid {config.grid_size}: set a "
         "smaller image_size"),
        (config.position_embedding_type == "sincos_2d" and config.position_resampling == "truncate",
         "sincos_2d is computed for every grid and has no table to truncate: set another position_resampling"),
        (config.position_resampling == "bucketed"
         and (config.position_embedding_type != "learned" or config.position_resampling_to_square),
         'position_resampling "bucketed" looks up rows of one table: set position_embedding_type="learned" and '
         "position_resampling_to_square=False"),
        (rotary and config.attention_type != "self",
         f'attention_type "{config.attention_type}" is not combined with a rotation by any source'),
        (rotary and config.register_tokens_last,
         "register_tokens_last is not combined with a rotation by any source: put the registers first"),
        (rotary and head_dim % 4 != 0,
         f"a rotation gives half of its pairs of channels to each axis: head_dim must be a multiple of 4, not "
         f"{head_dim}"),
        (rope["prefix_angles"] == "learned" and (config.num_prefix_tokens == 0 or config.rope_type == "mixed"),
         'prefix_angles "learned" rotates tokens before the patches, and is not combined with a "mixed" rotation: '
         'set it to "zero" in rope_parameters'),
        (rope["axis_frequencies"] != "equal" and config.rope_type == "mixed",
         'a "mixed" rotation learns its frequencies: set axis_frequencies="equal" in rope_parameters'),
        (centered and config.rope_type == "mixed",
         'a "mixed" rotation learns the frequencies of row and column numbers: set coordinates="index" in '
         "rope_parameters"),
        (centered and rope["reference_grid"] is not None,
         '"centered" coordinates are the same for every grid: set reference_grid=None in rope_parameters'),
    )  # fmt: skip


def conflicts_in_attention(config: Any) -> tuple[tuple[bool, str], ...]:
    """Return unsupported combinations of relative positions and windows: whether each occurs, and the remedy."""
    rotary, relative = config.rope_parameters is not None, config.relative_position_bias is not None
    bias, windows = config.group("relative_position_bias"), config.window_attention is not None
    layers, padding = (config.group("window_attention")[key] for key in ("global_layers", "padding"))
    has_tokens = config.num_prefix_tokens + config.num_register_tokens > 0
    return (
        (relative and config.attention_type != "self",
         f'attention_type "{config.attention_type}" is not combined with a relative position bias by any source'),
        (relative and config.register_tokens_last,
         "register_tokens_last is not combined with a relative position bias by any source"),
        (relative and bias["type"] in ("table", "query") and config.num_prefix_tokens > 1,
         "a table of relative positions has rows for a class token only: set num_register_tokens=0 and "
         "use_distillation_token=False"),
        (bias["type"] == "query" and (bias["shared"] or rotary),
         'a relative position bias of type "query" has vectors in each block, and no source rotates its queries: set '
         'relative_position_bias={"type": "query", "shared": False} and rope_parameters=None'),
        (bias["type"] == "decomposed" and (bias["shared"] or rotary or has_tokens),
         'a relative position bias of type "decomposed" has vectors of patches in each block: set shared=False in '
         "relative_position_bias, rope_parameters=None, use_class_token=False, use_distillation_token=False and "
         "num_register_tokens=0"),
        (windows and (config.attention_type != "self" or has_tokens or bool(config.patch_dropout_prob)),
         'windows are cut from the whole grid of patches: set attention_type="self", use_class_token=False, '
         "use_distillation_token=False, num_register_tokens=0 and patch_dropout_prob=0"),
        (windows and rotary != (padding == "masked"),
         f'windows with padding "{padding}" are {"not " if rotary else "only "}combined with a rotation by any source: '
         f'set padding="{"masked" if rotary else "attended"}" in window_attention'),
        (windows and relative and bias["type"] != "decomposed",
         f"a relative position bias of type \"{bias['type']}\" is not combined with windows by any source: set "
         'type="decomposed" in relative_position_bias'),
        (any(not 0 <= layer < config.num_hidden_layers for layer in layers),
         f"window_attention.global_layers is {shown(layers)}: expected numbers of the {config.num_hidden_layers} "
         "blocks, from 0"),
        (relative and bool(config.patch_dropout_prob),
         "patch dropout is not combined with a relative position bias by any source: set patch_dropout_prob=0"),
    )  # fmt: skip


def conflicts_in_blocks(config: Any) -> tuple[tuple[bool, str], ...]:
    """Return unsupported combinations inside the blocks: whether each occurs, and the remedy."""
    heads, head_dim = config.attention_shape
    shared = config.num_key_value_heads is not None
    weighs = config.attention_type in ("re_attention", "talking_heads", "locality")
    return (
        (not config.attention_output_projection and heads * head_dim != config.hidden_size,
         f"without an output projection the concatenated heads ({heads} x {head_dim}) "
         f"must be hidden_size {config.hidden_size} wide"),
        (config.block_type != "branches" and config.num_branches != 1,
         f'num_branches {config.num_branches} needs block_type="branches"'),
        (config.block_type == "parallel" and (config.attention_inner_norm or config.mlp_inner_norm),
         "parallel blocks have no norms inside attention or MLP in any source"),
        (config.block_type == "sandwich" and config.layer_scale_init_value is not None,
         'blocks of type "sandwich" have no LayerScale in any source: set layer_scale_init_value=None'),
        (config.value_norm and (config.attention_type != "self" or config.pooling.startswith("query_")),
         'values are normalised in plain attention alone: set attention_type="self" and another pooling, or '
         "value_norm=False"),
        (config.attention_type == "differential" and head_dim % 2 != 0,
         f"differential attention halves each head: head_dim must be even, not {head_dim}"),
        (config.attention_type == "differential" and config.qk_norm not in (None, "norm"),
         'differential attention takes qk_norm None or "norm"'),
        (shared and config.attention_type != "self",
         f"{config.attention_type} attention does not share keys and values in any source: set "
         "num_key_value_heads=None"),
        (shared and config.qk_norm not in (None, "norm"),
         'keys that several heads share take qk_norm None or "norm"'),
        (shared and config.rope_type == "mixed",
         'a "mixed" rotation has frequencies for each head of the queries: set num_key_value_heads=None'),
        (not config.scale_mlp_branch and config.layer_scale_init_value is None,
         "scale_mlp_branch=False leaves a LayerScale on the attention: set layer_scale_init_value"),
        (not config.scale_mlp_branch and config.block_type != "sequential",
         'a LayerScale on the attention alone is in blocks of type "sequential" in every source'),
        (weighs and (config.qk_norm is not None or config.attention_inner_norm),
         f'attention_type "{config.attention_type}" has no norms of queries, keys or heads in any source'),
        (config.attention_type == "locality" and config.attention_scale is not None,
         "locality attention learns the factor on the scores: set attention_scale=None"),
        (config.attention_type == "locality" and not config.use_class_token,
         "locality attention leaves nothing to attend to for a single token: set use_class_token=True"),
    )  # fmt: skip


def conflicts_in_heads(config: Any) -> tuple[tuple[bool, str], ...]:
    """Return unsupported combinations of poolings and heads: whether each occurs, and the remedy."""
    return (
        (config.pooling in ("cls", "cls_mean") and not config.use_class_token,
         f'pooling "{config.pooling}" reads the class token: set use_class_token=True, or another pooling'),
        (config.pooling in ("cls_mean", "prefix_joined") and config.final_norm in ("after_pooling", "both"),
         f'pooling "{config.pooling}" concatenates tokens, and no source normalises them together: set '
         'final_norm="before_pooling" or "none"'),
        (config.use_distillation_token and config.pooling != "cls",
         'a distillation token follows a class token and has its own classifier: set pooling="cls"'),
        (config.pooling in ("map", "query", "prr") and config.hidden_size % config.pooling_heads != 0,
         f"pooling \"{config.pooling}\" divides hidden_size {config.hidden_size} among {config.pooling_heads} "
         "heads: choose a head count that divides it (pooling_num_attention_heads, by default "
         "num_attention_heads), or another pooling"),
        (config.pooling_num_attention_heads is not None and config.pooling not in ("map", "query", "prr"),
         f"pooling \"{config.pooling}\" has no heads: set pooling_num_attention_heads=None"),
        (config.pooling_intermediate_size is not None and config.pooling != "map",
         f"pooling \"{config.pooling}\" has no MLP: set pooling_intermediate_size=None"),
        (config.pooling_num_layers is not None and config.pooling != "class_attention",
         f"pooling \"{config.pooling}\" has no blocks: set pooling_num_layers=None"),
        (config.pooling_num_tokens is not None and not config.pooling.startswith("prefix"),
         f"pooling \"{config.pooling}\" reads no number of tokens: set pooling_num_tokens=None"),
        (config.pooling.startswith("prefix") and not 1 <= config.pooling_tokens <= config.num_prefix_tokens,
         f'pooling "{config.pooling}" reads {config.pooling_tokens} tokens, and {config.num_prefix_tokens} precede the '
         "patches: set pooling_num_tokens to at most that, or another pooling"),
        ((config.pooling == "class_attention") != (config.attention_type == "talking_heads"),
         'pooling "class_attention" and attention_type "talking_heads" are not combined with others by any source: '
         "set both"),
        (config.pooling == "class_attention"
         and (config.num_prefix_tokens > 0 or config.num_register_tokens > 0 or config.mlp_type != "mlp"
              or config.mlp_inner_norm or config.block_type != "sequential"),
         'pooling "class_attention" has its own class token and follows plain blocks of patches in every source: '
         'set use_class_token=False, num_register_tokens=0, mlp_type="mlp", mlp_inner_norm=False and '
         'block_type="sequential"'),
        (config.pooling in ("query_block", "query_attention")
         and (config.attention_type != "self" or config.num_key_value_heads is not None
              or config.relative_position_bias is not None),
         f'pooling "{config.pooling}" follows plain attention in every source: set attention_type="self", '
         "num_key_value_heads=None and relative_position_bias=None"),
        (config.reconstruction_target == "mean_color" and config.num_channels > 4,
         f"mean_color has 8 ** num_channels colours: it takes at most 4 channels, not {config.num_channels}"),
    )  # fmt: skip


def shown(value: Any, longest: int = 80) -> str:
    """Return the repr of an untrusted value, truncated; a description replaces numbers with thousands of digits."""
    if isinstance(value, int) and not -(10**longest) < value < 10**longest:
        return f"a number of more than {longest} digits"
    if isinstance(value, list | tuple | dict) and len(value) > longest:
        return f"a {type(value).__name__} of {len(value)} entries"
    text = ascii(value)
    return text if len(text) <= longest else f"{text[:longest]}…"


def is_text(name: str) -> bool:
    """Return whether a string can be encoded: it has no lone surrogate."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def listed(names: Sequence[str], most: int = 5, longest: int = 40) -> str:
    """Return the first few untrusted names, quoted and truncated."""
    cut = [repr(name if len(name) <= longest else f"{name[:longest]}…") for name in names[:most]]
    return ", ".join(cut) + (f" and {len(names) - most} more" if len(names) > most else "")
