"""Parameter names of vit-pytorch's (lucidrains) plain ViTs, release by release.

Data only. Each table contains the changes since the previous one. Fingerprints and releases were read from the
package's history; the tests compare them with the releases themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Our side of the tables

CLASS_TOKEN = "vit.embeddings.cls_token"
REGISTERS = "vit.embeddings.register_tokens"
POSITIONS = "vit.embeddings.position_embeddings.weight"
ROWS, COLUMNS = "vit.embeddings.position_embeddings.rows", "vit.embeddings.position_embeddings.columns"
PIXEL_NORM = "vit.embeddings.patch_embeddings.pre_norm"
PROJECTION = "vit.embeddings.patch_embeddings.projection"
PATCH_NORM = "vit.embeddings.patch_embeddings.post_norm"
NORM_1 = "vit.layers.{}.layernorm_before"
Q, K, V = (f"vit.layers.{{}}.attention.{letter}_proj" for letter in "qkv")
Q_NORM = "vit.layers.{}.attention.q_norm.weight"
K_NORM = "vit.layers.{}.attention.k_norm.weight"
Q_HEAD_NORM, K_HEAD_NORM = "vit.layers.{}.attention.q_norm", "vit.layers.{}.attention.k_norm"  # the same for all heads
OUT = "vit.layers.{}.attention.o_proj"
NORM_2 = "vit.layers.{}.layernorm_after"
FC1 = "vit.layers.{}.mlp.fc1"
FC2 = "vit.layers.{}.mlp.fc2"
HEAD_MIX = "vit.layers.{}.attention.head_mix.weight"
HEAD_NORM = "vit.layers.{}.attention.head_norm"
TEMPERATURE = "vit.layers.{}.attention.temperature"
SCORES_MIX = "vit.layers.{}.attention.scores_mix.weight"
WEIGHTS_MIX = "vit.layers.{}.attention.weights_mix.weight"
SCALE_1, SCALE_2 = "vit.layers.{}.layer_scale1.weight", "vit.layers.{}.layer_scale2.weight"
POOLER_TOKEN = "vit.pooler.cls_token"
POOLER_QUERY = "vit.pooler.query"
FINAL_NORM = "vit.layernorm"
POOLED_NORM = "vit.pooled_layernorm"
HIDDEN = "vit.representation.0"
HEAD = "classifier"

Names = dict[str | tuple[str, ...], str]


def without(names: Names, *parts: str | tuple[str, ...]) -> Names:
    """Return a table without some of our parts."""
    return {ours: name for ours, name in names.items() if ours not in parts}


# Their side: `ViT`, release by release; each table contains the changes since the previous one

VIT_0_0_4: Names = {
    CLASS_TOKEN: "cls_token",
    POSITIONS: "pos_embedding",
    PROJECTION: "patch_to_embedding",
    NORM_1: "transformer.layers.{}.0.fn.norm",
    (Q, K, V): "transformer.layers.{}.0.fn.fn.to_qkv",
    OUT: "transformer.layers.{}.0.fn.fn.to_out",
    NORM_2: "transformer.layers.{}.1.fn.norm",
    FC1: "transformer.layers.{}.1.fn.fn.net.0",
    FC2: "transformer.layers.{}.1.fn.fn.net.2",
    HIDDEN: "mlp_head.0",
    HEAD: "mlp_head.2",
}
# In the first releases, the blocks were one list of alternating attentions and MLPs.
VIT_0_0_2: Names = VIT_0_0_4 | {
    NORM_1: "transformer.net.{even}.fn.norm",
    (Q, K, V): "transformer.net.{even}.fn.fn.to_qkv",
    OUT: "transformer.net.{even}.fn.fn.to_out",
    NORM_2: "transformer.net.{odd}.fn.norm",
    FC1: "transformer.net.{odd}.fn.fn.net.0",
    FC2: "transformer.net.{odd}.fn.fn.net.2",
}
VIT_0_2_0: Names = VIT_0_0_4 | {POOLED_NORM: "mlp_head.0", HIDDEN: "mlp_head.1", HEAD: "mlp_head.3"}
VIT_0_2_1: Names = VIT_0_2_0 | {FC2: "transformer.layers.{}.1.fn.fn.net.3"}
VIT_0_2_2: Names = VIT_0_2_1 | {OUT: "transformer.layers.{}.0.fn.fn.to_out.0", HEAD: "mlp_head.4"}
VIT_0_3_0: Names = without(VIT_0_2_2, HIDDEN) | {HEAD: "mlp_head.1"}
VIT_0_7_0: Names = VIT_0_3_0 | {PROJECTION: "to_patch_embedding.1"}
VIT_0_10_1: Names = VIT_0_7_0 | {
    NORM_1: "transformer.layers.{}.0.norm",
    (Q, K, V): "transformer.layers.{}.0.fn.to_qkv",
    OUT: "transformer.layers.{}.0.fn.to_out.0",
    NORM_2: "transformer.layers.{}.1.norm",
    FC1: "transformer.layers.{}.1.fn.net.0",
    FC2: "transformer.layers.{}.1.fn.net.3",
}
NORMED_PATCHES: Names = {
    PIXEL_NORM: "to_patch_embedding.1",
    PROJECTION: "to_patch_embedding.2",
    PATCH_NORM: "to_patch_embedding.3",
}
VIT_1_0_0: Names = VIT_0_10_1 | NORMED_PATCHES
UNWRAPPED_BLOCKS: Names = {
    NORM_1: "transformer.layers.{}.0.norm",
    (Q, K, V): "transformer.layers.{}.0.to_qkv",
    OUT: "transformer.layers.{}.0.to_out.0",
    NORM_2: "transformer.layers.{}.1.net.0",
    FC1: "transformer.layers.{}.1.net.1",
    FC2: "transformer.layers.{}.1.net.4",
}
VIT_1_4_0: Names = (
    without(VIT_1_0_0, POOLED_NORM) | UNWRAPPED_BLOCKS | {FINAL_NORM: "transformer.norm", HEAD: "mlp_head"}
)

# Their side: `SimpleViT`, release by release

SIMPLE_0_35_2: Names = {
    PROJECTION: "to_patch_embedding.1",
    NORM_1: "transformer.layers.{}.0.norm",
    (Q, K, V): "transformer.layers.{}.0.to_qkv",
    OUT: "transformer.layers.{}.0.to_out",
    NORM_2: "transformer.layers.{}.1.net.0",
    FC1: "transformer.layers.{}.1.net.1",
    FC2: "transformer.layers.{}.1.net.3",
    POOLED_NORM: "linear_head.0",
    HEAD: "linear_head.1",
}
SIMPLE_1_0_0: Names = SIMPLE_0_35_2 | NORMED_PATCHES
# In release 1.4.0, and in every release of the variant with query and key norms, the head is only a LayerNorm.
SIMPLE_1_4_0: Names = without(SIMPLE_1_0_0, HEAD) | {FINAL_NORM: "transformer.norm", POOLED_NORM: "linear_head"}
SIMPLE_1_4_1: Names = without(SIMPLE_1_4_0, POOLED_NORM) | {HEAD: "linear_head"}

# Variants of both

SEPARATE_QUERY: Names = without(VIT_0_7_0 | UNWRAPPED_BLOCKS, (Q, K, V)) | {
    Q: "transformer.layers.{}.0.to_q",
    (K, V): "transformer.layers.{}.0.to_kv",
}
DECORR: Names = VIT_1_4_0 | {
    NORM_2: "transformer.layers.{}.1.norm",
    FC1: "transformer.layers.{}.1.net.0",
    FC2: "transformer.layers.{}.1.net.3",
}
WITHOUT_FINAL_NORM: Names = VIT_1_0_0 | UNWRAPPED_BLOCKS
HEAD_NORMS: Names = {Q_NORM: "transformer.layers.{}.0.q_norm.gamma", K_NORM: "transformer.layers.{}.0.k_norm.gamma"}

# Relatives of the plain ViT, which replace one of its parts


def in_branches(names: Names) -> Names:
    """Return a table whose blocks have several attentions and MLPs."""
    for half in ("transformer.layers.{}.0.", "transformer.layers.{}.1."):
        names = {ours: name.replace(half, half + "fns.{}.") for ours, name in names.items()}
    return names


PARALLEL_0_29_0: Names = in_branches(VIT_0_10_1)
PARALLEL_1_4_3: Names = in_branches(VIT_0_10_1 | UNWRAPPED_BLOCKS)
DEEP_0_9_0: Names = VIT_0_7_0 | {
    HEAD_MIX: "transformer.layers.{}.0.fn.fn.reattn_weights",
    HEAD_NORM: "transformer.layers.{}.0.fn.fn.reattn_norm.1",
}
DEEP_1_0_0: Names = DEEP_0_9_0 | NORMED_PATCHES
DEEP_1_4_3: Names = WITHOUT_FINAL_NORM | {
    HEAD_MIX: "transformer.layers.{}.0.reattn_weights",
    HEAD_NORM: "transformer.layers.{}.0.reattn_norm.1",
}
SMALL_0_26_0: Names = VIT_0_10_1 | {
    PIXEL_NORM: "to_patch_embedding.to_patch_tokens.1",
    PROJECTION: "to_patch_embedding.to_patch_tokens.2",
    TEMPERATURE: "transformer.layers.{}.0.fn.temperature",
}
SMALL_1_4_3: Names = SMALL_0_26_0 | UNWRAPPED_BLOCKS | {TEMPERATURE: "transformer.layers.{}.0.temperature"}


def in_pooler(ours: str | tuple[str, ...], place: str = "vit.pooler.blocks.{}.") -> Any:
    """Return our names of a part of a block as names in the pooling's blocks, or in its only block."""
    if isinstance(ours, tuple):
        return tuple(in_pooler(name, place) for name in ours)
    return ours.replace("vit.layers.{}.", place).replace(".mlp.", ".")


def class_attention(block: Names) -> Names:
    """Return the table of blocks for the patches and for the class token, from the names in a block."""
    patches = {ours: f"patch_transformer.layers.{{}}.{name}" for ours, name in block.items()}
    return patches | {in_pooler(ours): f"cls_transformer.layers.{{}}.{name}" for ours, name in block.items()}


CAIT_1_4_3_BLOCK: Names = {
    SCALE_1: "0.scale",
    NORM_1: "0.fn.norm",
    Q: "0.fn.to_q",
    (K, V): "0.fn.to_kv",
    SCORES_MIX: "0.fn.mix_heads_pre_attn",
    WEIGHTS_MIX: "0.fn.mix_heads_post_attn",
    OUT: "0.fn.to_out.0",
    SCALE_2: "1.scale",
    NORM_2: "1.fn.net.0",
    FC1: "1.fn.net.1",
    FC2: "1.fn.net.4",
}
CAIT_0_14_0_BLOCK: Names = {ours: name.replace("0.fn.", "0.fn.fn.") for ours, name in CAIT_1_4_3_BLOCK.items()} | {
    NORM_1: "0.fn.norm",
    NORM_2: "1.fn.norm",
    FC1: "1.fn.fn.net.0",
    FC2: "1.fn.fn.net.3",
}
AROUND_CAIT: Names = {
    POOLER_TOKEN: "cls_token",
    POSITIONS: "pos_embedding",
    PROJECTION: "to_patch_embedding.1",
    POOLED_NORM: "mlp_head.0",
    HEAD: "mlp_head.1",
}
CAIT_0_14_0: Names = AROUND_CAIT | class_attention(CAIT_0_14_0_BLOCK)
CAIT_1_0_0: Names = CAIT_0_14_0 | NORMED_PATCHES
CAIT_1_4_3: Names = AROUND_CAIT | NORMED_PATCHES | class_attention(CAIT_1_4_3_BLOCK)


GAINS = {".weight": ".gamma", ".bias": ".beta"}  # of a norm of na_vit; its bias is a buffer of zeros
BLOCK_OF_QUERY = "vit.pooler."  # prefix of the pooling attention in our model


def na_vit_attention(name: str) -> Names:
    """Return the table of an attention of na_vit, and of its norms."""
    return {
        **{f"{NORM_1}{leaf}": f"{name}.norm{theirs}" for leaf, theirs in GAINS.items()},
        Q_NORM: f"{name}.q_norm.gamma",
        K_NORM: f"{name}.k_norm.gamma",
        Q: f"{name}.to_q",
        (K, V): f"{name}.to_kv",
        OUT: f"{name}.to_out.0",
    }


def nested_attention(name: str) -> Names:
    """Return the table of an attention of na_vit_nested_tensor, and of its norms."""
    return {
        NORM_1: f"{name}.norm",
        Q_HEAD_NORM: f"{name}.query_norm",
        K_HEAD_NORM: f"{name}.key_norm",
        Q: f"{name}.to_queries",
        K: f"{name}.to_keys",
        V: f"{name}.to_values",
        OUT: f"{name}.to_out",
    }


def na_vit(
    attention: Callable[[str], Names], pixel_norm: Mapping[str, str] = GAINS, norm: Mapping[str, str] = GAINS
) -> Names:
    """Return the table of a na_vit, from the table of its attention and the ends of the names in its norms."""

    def normed(ours: str, name: str, leaves: Mapping[str, str] = norm) -> Names:
        return {f"{ours}{leaf}": f"{name}{theirs}" for leaf, theirs in leaves.items()}

    return {
        **normed(PIXEL_NORM, "to_patch_embedding.0", pixel_norm),
        PROJECTION: "to_patch_embedding.1",
        **normed(PATCH_NORM, "to_patch_embedding.2"),
        ROWS: "pos_embed_height",
        COLUMNS: "pos_embed_width",
        **attention("transformer.layers.{}.0"),
        **normed(NORM_2, "transformer.layers.{}.1.0"),
        FC1: "transformer.layers.{}.1.1",
        FC2: "transformer.layers.{}.1.4",
        **normed(FINAL_NORM, "transformer.norm"),
        POOLER_QUERY: "attn_pool_queries",
        **{in_pooler(ours, BLOCK_OF_QUERY): name for ours, name in attention("attn_pool").items()},
        **normed(POOLED_NORM, "mlp_head.0"),
        HEAD: "mlp_head.1",
    }


NA_VIT: Names = na_vit(na_vit_attention)
NESTED_NA_VIT: Names = na_vit(nested_attention, {".weight": ".weight", ".bias": ".bias"}, {"": ""})


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a file of the package from one release on.

    Args:
        file: Current name of the file.
        since: The first release.
        names: Our names -> their names.
        token_axes: Number of axes of the class token.
        position_axes: Number of axes of the position table.
        scale: Attention scores are divided by the square root of this: "head_dim", "hidden_size" before release 0.6.7,
            or "nothing" if query and key are normalised.
        poolings: Poolings that the class supports.
        mean_has_class_token: Whether a model with mean pooling has a class token.
        mean_reads_class_token: Whether the mean includes the class token.
        class_token_has_position: Whether the position table has a row for the class token.
        optional: Our parts that checkpoints may have or lack.
        output_bias: Whether the attention's output projection has a bias.
        fields: Further fields of our config that the class determines.
        square: Which of `image_size` and `patch_size` must be square.
        channels_first: Whether the values of a patch are in the order channel, row, column.
        fault: The reason why these releases are not a plain ViT, although their checkpoints look like one.
    """

    file: str
    since: str
    names: Names
    token_axes: int = 3
    position_axes: int = 3
    scale: str = "head_dim"
    poolings: tuple[str, ...] = ("cls", "mean")
    mean_has_class_token: bool = True
    mean_reads_class_token: bool = True
    class_token_has_position: bool = True
    optional: frozenset[str] = frozenset({OUT})
    output_bias: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    square: tuple[str, ...] = ()
    channels_first: bool = False
    fault: str | None = None

    @property
    def title(self) -> str:
        """The name of the layout in reports and hints."""
        return f"{self.file} {self.since}"

    @property
    def states_scale(self) -> bool:
        """Whether a live attention stores the factor on its scores."""
        return not {Q_NORM, Q_HEAD_NORM, TEMPERATURE} & self.names.keys()


EARLY: dict[str, Any] = {"scale": "hidden_size", "poolings": ("cls",), "optional": frozenset()}
VIDEOS = "they read videos: a patch has frames too"
SERIES = "they read series of one dimension"
SAMPLING = "they leave out patches on the way, those that are attended to least"
SIMPLE: dict[str, Any] = {"poolings": ("mean",), "optional": frozenset(), "output_bias": False}
PARALLEL: dict[str, Any] = {"fields": {"block_type": "branches"}}
DEEP: dict[str, Any] = {
    "optional": frozenset(),
    "fields": {"attention_type": "re_attention"},
    "square": ("image_size", "patch_size"),
}
CAIT: dict[str, Any] = {
    "poolings": ("class_attention",),
    "class_token_has_position": False,
    "optional": frozenset(),
    "fields": {"attention_type": "talking_heads", "layer_scale_init_value": 0.1, "num_channels": 3},
    "square": ("image_size", "patch_size"),
}
SMALL: dict[str, Any] = {
    "optional": frozenset(),
    "fields": {"attention_type": "locality", "attention_scale": None, "patch_projection": "shifted"},
    "square": ("patch_size",),
}
NAVIT: dict[str, Any] = {
    "scale": "nothing",
    "poolings": ("query_block",),
    "optional": frozenset(),
    "output_bias": False,
    "fields": {
        "patch_pre_norm": True, "patch_post_norm": True, "patch_projection": "linear", "final_norm": "both",
        "position_embedding_type": "factorized", "position_resampling": "truncate", "classifier_bias": False,
    },
    "square": ("patch_size",),
    "channels_first": True,
}  # fmt: skip
NESTED_NAVIT: dict[str, Any] = {
    **NAVIT,
    "scale": "head_dim",
    "poolings": ("query_attention",),
    "fields": {**NAVIT["fields"], "norm_type": "layer_norm_without_bias", "qk_norm": "norm"},
}

LAYOUTS = (
    Layout("vit", "0.0.2", VIT_0_0_2, **EARLY),
    Layout("vit", "0.0.4", VIT_0_0_4, **EARLY),
    Layout("vit", "0.2.0", VIT_0_2_0, **EARLY),
    Layout("vit", "0.2.1", VIT_0_2_1, **EARLY),
    Layout("vit", "0.2.2", VIT_0_2_2, **EARLY),
    Layout("vit", "0.3.0", VIT_0_3_0, **EARLY),
    Layout("vit", "0.5.0", VIT_0_3_0, scale="hidden_size", optional=frozenset()),
    Layout("vit", "0.6.7", VIT_0_3_0, optional=frozenset()),
    Layout("vit", "0.7.0", VIT_0_7_0),
    Layout("vit", "0.10.1", VIT_0_10_1),
    Layout("vit", "1.0.0", VIT_1_0_0),
    Layout("vit", "1.4.0", VIT_1_4_0),
    Layout("vit", "1.16.0", VIT_1_4_0, mean_has_class_token=False),
    Layout("vit", "1.16.1", VIT_1_4_0, 2, 2, mean_has_class_token=False),
    Layout("vit", "1.17.3", VIT_1_4_0, 2, 2, mean_has_class_token=False, optional=frozenset({OUT, HEAD})),
    Layout("simple_vit", "0.35.2", SIMPLE_0_35_2, **SIMPLE),
    Layout("simple_vit", "1.0.0", SIMPLE_1_0_0, **SIMPLE),  # and simple_flash_attn_vit
    Layout("simple_vit", "1.4.0", SIMPLE_1_4_0, **SIMPLE),
    Layout("simple_vit", "1.4.1", SIMPLE_1_4_1, **SIMPLE),  # and simple_vit_with_patch_dropout
    Layout("simple_vit_with_register_tokens", "1.5.0", SIMPLE_1_4_1 | {REGISTERS: "register_tokens"}, **SIMPLE),
    Layout("simple_vit_with_qk_norm", "1.4.2", SIMPLE_1_4_0 | HEAD_NORMS, scale="nothing", **SIMPLE),
    Layout("vit_with_patch_dropout", "0.40.0", VIT_0_10_1, 3, 2, class_token_has_position=False),
    Layout("vit_with_patch_dropout", "1.4.3", VIT_0_7_0 | UNWRAPPED_BLOCKS, 3, 2, class_token_has_position=False),
    Layout("vit_with_decorr", "1.15.0", DECORR, fault="the MLP does not read what its norm gives"),
    Layout("vit_with_decorr", "1.21.5", DECORR),
    Layout("learnable_memory_vit", "0.31.0", SEPARATE_QUERY, poolings=("cls",), optional=frozenset()),
    Layout("learnable_memory_vit", "1.0.0", SEPARATE_QUERY | NORMED_PATCHES, poolings=("cls",), optional=frozenset()),
    Layout(
        *("vit_detpool", "1.20.2", VIT_1_4_0, 1, 2),
        poolings=("mean",),
        mean_reads_class_token=False,
        class_token_has_position=False,
        optional=frozenset({OUT, HEAD, CLASS_TOKEN}),
    ),
    Layout("parallel_vit", "0.29.0", PARALLEL_0_29_0, **PARALLEL),
    Layout("parallel_vit", "1.4.3", PARALLEL_1_4_3, **PARALLEL),
    Layout("deepvit", "0.9.0", DEEP_0_9_0, **DEEP),
    Layout("deepvit", "1.0.0", DEEP_1_0_0, **DEEP),
    Layout("deepvit", "1.4.3", DEEP_1_4_3, **DEEP),
    Layout("cait", "0.14.0", CAIT_0_14_0, **CAIT),
    Layout("cait", "1.0.0", CAIT_1_0_0, **CAIT),
    Layout("cait", "1.4.3", CAIT_1_4_3, **CAIT),
    Layout("vit_for_small_dataset", "0.26.0", SMALL_0_26_0, **SMALL),
    Layout("vit_for_small_dataset", "1.4.3", SMALL_1_4_3, **SMALL),
    Layout("na_vit", "1.2.6", NA_VIT, fault="attention leaves out every patch and reads the padding", **NAVIT),
    Layout("na_vit", "1.6.7", NA_VIT, **NAVIT),
    Layout("na_vit_nested_tensor", "1.7.6", NESTED_NA_VIT, **NESTED_NAVIT),
    # Other models with the names of a plain ViT, and most with its shapes too: only the caller can tell them apart.
    Layout("vit_3d", "0.36.0", VIT_0_10_1, fault=VIDEOS),
    Layout("vit_3d", "1.0.0", VIT_1_0_0, fault=VIDEOS),
    Layout("vit_3d", "1.4.3", WITHOUT_FINAL_NORM, fault=VIDEOS),
    Layout("ats_vit", "0.24.3", VIT_0_10_1, fault=SAMPLING, poolings=("cls",), optional=frozenset()),
    Layout("ats_vit", "1.0.0", VIT_1_0_0, fault=SAMPLING, poolings=("cls",), optional=frozenset()),
    Layout("ats_vit", "1.4.3", WITHOUT_FINAL_NORM, fault=SAMPLING, poolings=("cls",), optional=frozenset()),
    Layout("vit_1d", "0.39.0", VIT_0_10_1, 1, fault=SERIES, poolings=("cls",)),
    Layout("vit_1d", "1.0.0", VIT_1_0_0, 1, fault=SERIES, poolings=("cls",)),
    Layout("vit_1d", "1.4.3", WITHOUT_FINAL_NORM, 1, fault=SERIES, poolings=("cls",)),
    Layout("simple_vit_3d", "0.36.1", SIMPLE_0_35_2, fault=VIDEOS, **SIMPLE),
    Layout("simple_vit_3d", "1.0.0", SIMPLE_1_0_0, fault=VIDEOS, **SIMPLE),
    Layout("simple_vit_3d", "1.4.0", SIMPLE_1_4_1, fault=VIDEOS, **SIMPLE),
    Layout("simple_vit_1d", "0.39.0", SIMPLE_0_35_2, fault=SERIES, **SIMPLE),
    Layout("simple_vit_1d", "1.0.0", SIMPLE_1_0_0, fault=SERIES, **SIMPLE),
    Layout("simple_vit_1d", "1.4.0", SIMPLE_1_4_1, fault=SERIES, **SIMPLE),
)

# Name of each file's class, and new names of the oldest releases' files

CLASSES = {
    "vit": "ViT",
    "vit_with_patch_dropout": "ViT",
    "vit_with_decorr": "ViT",
    "vit_detpool": "ViTDetPool",
    "learnable_memory_vit": "ViT",
    "parallel_vit": "ViT",
    "deepvit": "DeepViT",
    "cait": "CaiT",
    "vit_for_small_dataset": "ViT",
    "na_vit": "NaViT",
    "na_vit_nested_tensor": "NaViT",
    "simple_vit": "SimpleViT",
    "simple_vit_with_patch_dropout": "SimpleViT",
    "simple_vit_with_register_tokens": "SimpleViT",
    "simple_vit_with_qk_norm": "SimpleViT",
    "simple_flash_attn_vit": "SimpleViT",
}
RENAMED_FILES = {"vit_pytorch": "vit"}
