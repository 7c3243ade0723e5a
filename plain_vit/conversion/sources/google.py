"""Google's checkpoints of vision_transformer and big_vision: the `.npz` files of the paper and later work.

The models are JAX programs, which are not run here. The tensors and their shapes determine nearly everything, and the
rest is the same in both code bases. Kernels have their inputs first; attention kernels have an axis for the heads.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configuration_plain_vit import PlainViTConfig, stem_stride
from ...errors import AmbiguousCheckpointError, CheckpointError, ExportError
from ...files.npz import save_npz
from ...image_processing_plain_vit import PlainViTImageProcessor
from ..tables.compare_modules import lost_fields
from ..tables.engine import DROP_FIRST_AXIS, IDENTITY, TRANSPOSED, UNSTACK, Row, Transform, each, revert, then
from ..tables.format import Description, FileFormat, Hints, Inference, StateDict, pair
from ..tables.infer import size_fault, square_grid
from ..tables.pixels import default_processor
from .timm.pixels import processor_from_timm

# Prefixes of the names: none, in a flax.optim state, in big_vision's parameters, in big_vision's image tower.
PREFIXES = ("", "opt/target/", "params/", "params/img/")

IGNORED = (
    ("opt/state/*", "state of the optimizer"),
    ("opt/[0-9]*", "state of the optimizer"),  # optax numbers its parts
    ("chrono/*", "clock of the training"),
    ("params/txt/*", "the text tower"),
    ("params/t", "the temperature of the image-text loss"),
    ("params/b", "the bias of the image-text loss"),
)

# Names of the position table, and whether it has a row for the class token: in the paper's code, in big_vision before
# 2022, in later big_vision.
POSITIONS = {
    "Transformer/posembed_input/pos_embedding": True,
    "Transformer/pos_embedding": True,
    "pos_embedding": False,
}

# flax before "linen" numbers all parts of a block together; linen numbers them per type.
BLOCKS = {
    "vision_transformer": ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "big_vision": ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
}
OWN_POSITIONS = {"vision_transformer": "Transformer/posembed_input/pos_embedding", "big_vision": "pos_embedding"}

# Common to all these models. Files do not contain the activation: flax's nn.gelu is the tanh approximation by default.
EPS = 1e-6
HIDDEN_ACT = "gelu_pytorch_tanh"
FIXED_FIELDS: dict[str, Any] = {
    "hidden_act": HIDDEN_ACT,
    "layer_norm_eps": EPS,
    "position_resampling": "bilinear_align_corners",  # scipy.ndimage.zoom of order 1
    "initialization": "google",
}

# The origin of settings that are not in a file.
FIXED_INFERENCES = (
    Inference("attention_scale", "head_dim**-0.5", "flax, the only value in this code"),
    Inference("layer_norm_eps", EPS, "flax, the only value in this code"),
    Inference(
        "hidden_act",
        HIDDEN_ACT,
        "flax's nn.gelu, with which these models were trained; timm and transformers use the exact one: give "
        "hidden_act='gelu' for that",
    ),
)

# Parts of a file that determine the pooling.
POOLED_BY = {"cls": "its class token", "map": "its MAPHead_0"}

# Fields that a file determines.
FILE_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size", "image_size",
    "patch_size", "num_channels", "resnet_stem", "use_class_token", "representation_size",
    "num_labels",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Names and shapes in a file, written as text in reports and hints, such as "big_vision scan".

    Args:
        code: The code base that the names of the blocks come from, "vision_transformer" or "big_vision".
        stacked: Whether the layers are stacked in one tensor ("scan").
        flat_gains: Whether the gains of group norms have four axes ("4d").
        positions: Name of the position table; part of the text if it is not the code base's default.
    """

    code: str
    stacked: bool
    flat_gains: bool
    positions: str

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse the text of a layout.

        Raises:
            ExportError: for an unknown word.
        """
        code, *words = text.split()
        unknown = [word for word in words if word not in {"scan", "4d", *POSITIONS}]
        if code not in BLOCKS or unknown:
            raise ExportError(
                f"layout is {text!r}: expected {' or '.join(BLOCKS)}, then any of scan, 4d, {', '.join(POSITIONS)}"
            )
        positions = next((word for word in words if word in POSITIONS), OWN_POSITIONS[code])
        return cls(code, "scan" in words, "4d" in words, positions)

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> "Layout":
        """Return the layout of these names and shapes.

        Raises:
            CheckpointError: The names of the attention are of neither code base.
        """
        stacked = any(name.startswith("Transformer/encoderblock/") for name in shapes)
        block = f"Transformer/encoderblock{'' if stacked else '_0'}"
        codes = [code for code, (_, attention, *_) in BLOCKS.items() if f"{block}/{attention}/query/kernel" in shapes]
        if len(codes) != 1:
            expected = " or ".join(f"{attention}/query/kernel" for _, attention, *_ in BLOCKS.values())
            raise CheckpointError(f"{block} has no attention of vision_transformer or big_vision: expected {expected}")
        positions = next((place for place in POSITIONS if place in shapes), OWN_POSITIONS[codes[0]])
        return cls(codes[0], stacked, len(shapes.get("gn_root/scale", ())) == 4, positions)

    @classmethod
    def to_write(cls, config: PlainViTConfig, text: str | None) -> "Layout":
        """Return the requested layout, or else the layout of the code base that adds positions as this model does."""
        paper = config.use_class_token and config.position_embedding_on_prefix
        return cls.parse(text or ("vision_transformer" if paper else "big_vision"))

    def __str__(self) -> str:
        own = self.positions == OWN_POSITIONS[self.code]
        words = (("scan", self.stacked), ("4d", self.flat_gains), (self.positions, not own))
        return " ".join([self.code, *(word for word, holds in words if holds)])


# Tensors

# (rows, columns, inputs, outputs) in the source.
CHANNELS_FIRST = each(
    "CHANNELS_FIRST",
    lambda kernel, config: kernel.permute(3, 2, 0, 1),
    lambda weight, config: weight.permute(2, 3, 1, 0),
)

# Query, key and value project (D,) to (heads, d).
FROM_HEADS = each(
    "FROM_HEADS",
    lambda kernel, config: kernel.flatten(1).mT,
    lambda weight, config: weight.mT.unflatten(1, (config.num_attention_heads, -1)),
)
BIAS_FROM_HEADS = each(
    "BIAS_FROM_HEADS",
    lambda bias, config: bias.flatten(),
    lambda bias, config: bias.unflatten(0, (config.num_attention_heads, -1)),
)

# The output projection projects (heads, d) to (D,).
JOIN_HEADS = each(
    "JOIN_HEADS",
    lambda kernel, config: kernel.flatten(0, 1).mT,
    lambda weight, config: weight.mT.unflatten(0, (config.num_attention_heads, -1)),
)

# Files of the paper store the gains of group norms as (1, 1, 1, C).
FLATTEN = each(
    "FLATTEN",
    lambda gain, config: gain.flatten(),
    lambda gain, config: gain.view(1, 1, 1, -1),
)


def dense_rows(source: str, ours: str, stacked: bool = False) -> list[Row]:
    """Return the rows of one dense layer, optionally stacked over all layers."""
    return _rows(source, ours, {"kernel": ("weight", TRANSPOSED), "bias": ("bias", IDENTITY)}, stacked)


def norm_rows(source: str, ours: str, stacked: bool = False) -> list[Row]:
    """Return the rows of one norm, optionally stacked over all layers."""
    return _rows(source, ours, {"scale": ("weight", IDENTITY), "bias": ("bias", IDENTITY)}, stacked)


def attention_rows(source: str, ours: str, stacked: bool = False) -> list[Row]:
    """Return the rows of one attention, optionally stacked over all layers."""
    inputs = {"kernel": ("weight", FROM_HEADS), "bias": ("bias", BIAS_FROM_HEADS)}
    output = {"kernel": ("weight", JOIN_HEADS), "bias": ("bias", IDENTITY)}
    rows = _rows(f"{source}/out", f"{ours}.o_proj", output, stacked)
    for name in ("query", "key", "value"):
        rows += _rows(f"{source}/{name}", f"{ours}.{name[0]}_proj", inputs, stacked)
    return rows


def _rows(source: str, ours: str, leaves: Mapping[str, tuple[str, Transform]], stacked: bool) -> list[Row]:
    """Return one row per tensor of a module, optionally stacked along a first axis."""
    return [
        Row(f"{source}/{theirs}", f"{ours}.{leaf}", then(UNSTACK, transform) if stacked else transform)
        for theirs, (leaf, transform) in leaves.items()
    ]


def block_rows(layout: Layout) -> list[Row]:
    """Return the rows of the blocks."""
    norm1, attention, norm2, mlp = BLOCKS[layout.code]
    stacked = layout.stacked
    source, ours = f"Transformer/encoderblock{'' if stacked else '_{}'}", "vit.layers.{}"
    return [
        *norm_rows(f"{source}/{norm1}", f"{ours}.layernorm_before", stacked),
        *attention_rows(f"{source}/{attention}", f"{ours}.attention", stacked),
        *norm_rows(f"{source}/{norm2}", f"{ours}.layernorm_after", stacked),
        *dense_rows(f"{source}/{mlp}/Dense_0", f"{ours}.mlp.fc1", stacked),
        *dense_rows(f"{source}/{mlp}/Dense_1", f"{ours}.mlp.fc2", stacked),
    ]


def stem_rows(config: PlainViTConfig, layout: Layout) -> list[Row]:
    """Return the rows of a hybrid's ResNet, where stages and units are counted from 1."""
    ours = "vit.embeddings.patch_embeddings"
    parts = {("conv_root", "gn_root"): (f"{ours}.conv", f"{ours}.norm")}
    for stage, depth in enumerate(config.group("resnet_stem")["depths"]):
        for unit in range(depth):
            there, here = f"block{stage + 1}/unit{unit + 1}", f"{ours}.stages.{stage}.{unit}"
            for n in (1, 2, 3):
                parts[f"{there}/conv{n}", f"{there}/gn{n}"] = f"{here}.conv{n}", f"{here}.norm{n}"
            if unit == 0:
                parts[f"{there}/conv_proj", f"{there}/gn_proj"] = f"{here}.shortcut.0", f"{here}.shortcut.1"
    gain = FLATTEN if layout.flat_gains else IDENTITY
    rows = []
    for (their_conv, their_norm), (conv, norm) in parts.items():
        rows += _rows(their_conv, conv, {"kernel": ("weight", CHANNELS_FIRST)}, False)
        rows += _rows(their_norm, norm, {"scale": ("weight", gain), "bias": ("bias", gain)}, False)
    return rows


def rows_of(config: PlainViTConfig, layout: Layout) -> list[Row]:
    """Return the table of tensors for this model."""
    return [
        Row("embedding/kernel", "vit.embeddings.patch_embeddings.projection.weight", CHANNELS_FIRST),
        Row("embedding/bias", "vit.embeddings.patch_embeddings.projection.bias"),
        *stem_rows(config, layout),
        Row("cls", "vit.embeddings.cls_token"),
        Row(layout.positions, "vit.embeddings.position_embeddings.weight", DROP_FIRST_AXIS),
        *block_rows(layout),
        *norm_rows("Transformer/encoder_norm", "vit.layernorm"),
        Row("MAPHead_0/probe", "vit.pooler.probe"),
        *attention_rows("MAPHead_0/MultiHeadDotProductAttention_0", "vit.pooler"),
        *norm_rows("MAPHead_0/LayerNorm_0", "vit.pooler.layernorm"),
        *dense_rows("MAPHead_0/MlpBlock_0/Dense_0", "vit.pooler.fc1"),
        *dense_rows("MAPHead_0/MlpBlock_0/Dense_1", "vit.pooler.fc2"),
        *dense_rows("pre_logits", "vit.representation.0"),
        *dense_rows("head", "classifier"),
    ]


# Checkpoints


class GoogleFormat(FileFormat):
    """The `.npz` files of Google's JAX code."""

    name = "google"
    suffixes: tuple[str, ...] = (".npz",)
    not_opened = "Google's models are JAX programs: open their .npz file with from_checkpoint"
    not_built = (
        "Google's models are JAX programs without a torch module: use to_checkpoint for an .npz file, "
        'or to_module(model, "timm")'
    )
    heads = tuple(f"{prefix}head" for prefix in PREFIXES)

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether the arrays have Google's names."""
        return any(
            f"{prefix}embedding/kernel" in names and f"{prefix}Transformer/encoder_norm/scale" in names
            for prefix in PREFIXES
        )

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration from the names and shapes.

        Raises:
            AmbiguousCheckpointError: for the image size if the positions form no square grid, and for the pooling if
                there is neither a class token nor a MAP head.
            CheckpointError: for names that no layout has, and for an image size that contradicts the positions.
        """
        prefix = next(prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in tensors)
        shapes = {name.removeprefix(prefix): tuple(tensor.shape) for name, tensor in tensors.items()}
        layout = Layout.of(shapes)
        geometry = _geometry(shapes, layout)
        _check_models_of_theirs(shapes, layout)
        pooling, open_ = _pooling(shapes, hints)
        try:
            positions, inferences = _positions(shapes, geometry["patch_size"], hints)
        except AmbiguousCheckpointError as error:
            raise AmbiguousCheckpointError(error.message, {**error.candidates, **open_}) from error
        if open_:
            raise AmbiguousCheckpointError(
                "there is neither a class token nor a MAPHead_0: most such models pool the mean of the patches; "
                "others (the first patch, every token with a head) do not open:",
                open_,
            )
        head, dense = shapes.get("head/kernel"), shapes.get("pre_logits/kernel")
        config = PlainViTConfig(
            **{
                **FIXED_FIELDS,
                **geometry,
                **positions,
                "pooling": pooling,
                "use_class_token": "cls" in shapes,
                "representation_size": None if dense is None else dense[-1],
                "num_labels": 0 if head is None else head[-1],
                "hidden_act": hints.hidden_act or HIDDEN_ACT,
                "layer_norm_eps": hints.layer_norm_eps or EPS,
                "attention_scale": hints.scale(geometry["hidden_size"], geometry["head_dim"]),
            }
        )
        inferences.append(Inference("num_attention_heads", config.num_attention_heads, "the axes of query/kernel"))
        if pooling in POOLED_BY:
            inferences.append(Inference("pooling", pooling, POOLED_BY[pooling]))
        inferences += [one for one in FIXED_INFERENCES if getattr(hints, one.field) is None]
        return Description(config, str(layout), inferences, IGNORED, prefix)

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return a processor with the preprocessing of Google's evaluation, as far as the file shows it."""
        if hints.image_mean is not None or hints.image_std is not None or config.num_channels != 3:
            return super().image_processor(config, settings, preprocessor, hints)
        antialias = "TensorFlow resizes without antialiasing: downscaled images differ slightly from its own"
        if config.position_embedding_type == "sincos_2d":
            cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear", "crop_pct": 224 / 256}
            noted = "pixels are prepared as for vit_s16_i1k: centre crop of 224/256 of the shorter side, in [-1, 1]"
            return processor_from_timm(cfg, image_size=config.image_size), (noted, antialias)
        noted = "pixels are prepared as vision_transformer evaluates: resized to the input size, in [-1, 1]"
        return processor_from_google(config.image_size), (noted, antialias)

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        return rows_of(config, Layout.to_write(config, layout))

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> None:
        """Write an `.npz` without prefix, with bfloat16 as two-byte voids. The format stores no processor.

        Raises:
            ExportError: lists every part that Google's code cannot represent.
        """
        target = Layout.to_write(config, layout)
        learned = config.position_embedding_type == "learned"
        fields = {
            **FIXED_FIELDS,
            **{name: getattr(config, name) for name in FILE_FIELDS},
            "resnet_stem": config.resnet_stem and {**config.resnet_stem, "style": "google"},
            "position_embedding_type": "learned" if learned else "sincos_2d",
            "position_embedding_on_prefix": learned and config.position_embedding_on_prefix,
            "pooling": _pooling_of(config),
        }
        lost = lost_fields(config, lambda: PlainViTConfig(**fields))
        if config.use_class_token and config.pooling == "map":
            lost.append("use_class_token=True with the map head")
        if config.use_class_token and learned and config.position_embedding_on_prefix != POSITIONS[target.positions]:
            lost.append(f"position_embedding_on_prefix={config.position_embedding_on_prefix} in {target.positions}")
        if lost:
            raise ExportError("Google's code cannot represent this model:", lost)
        save_npz(revert(rows_of(config, target), tensors, config), path)


def processor_from_google(image_size: int | Sequence[int]) -> PlainViTImageProcessor:
    """Return a processor with the preprocessing of Google's vision_transformer: resized directly, scaled to [-1, 1].

    TensorFlow resizes without antialiasing, so downscaled images differ slightly from the original's.

    Args:
        image_size: Input size of the model in pixels, an int or (height, width).

    Source:
        github.com/google-research/vision_transformer, `vit_jax/input_pipeline.py`.
    """
    return default_processor(image_size, num_channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)[0]


def _pooling_of(config: PlainViTConfig) -> str:
    """Return the pooling of Google's code for a model with these tokens and this head."""
    if config.pooling == "map" or config.use_class_token:
        return "map" if config.pooling == "map" else "cls"
    return "none" if config.pooling == "none" and not config.num_labels else "mean"


def _geometry(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> dict[str, Any]:
    """Return the fields of our config that the shapes of kernels determine."""
    kernel = shapes["embedding/kernel"]
    if len(kernel) != 4:
        raise CheckpointError(
            f"embedding/kernel has shape {kernel}: expected (rows, columns, channels, width); models of variable grids "
            "(NaFlex) are not plain Vision Transformers"
        )
    norm, attention, _, mlp = BLOCKS[layout.code]
    block = f"Transformer/encoderblock{'' if layout.stacked else '_0'}"
    depth = shapes[f"{block}/{norm}/scale"][0] if layout.stacked else _count(shapes, "Transformer/encoderblock_")
    _, heads, head_dim = shapes[f"{block}/{attention}/query/kernel"][-3:]
    stages = _count(shapes, "block")
    stem_depths = tuple(_count(shapes, f"block{stage}/unit") for stage in range(1, stages + 1))
    hybrid = "conv_root/kernel" in shapes
    stride = stem_stride(stem_depths) if hybrid else 1
    return {
        "hidden_size": kernel[3],
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": shapes[f"{block}/{mlp}/Dense_0/kernel"][-1],
        "num_channels": shapes["conv_root/kernel" if hybrid else "embedding/kernel"][2],
        "patch_size": (kernel[0] * stride, kernel[1] * stride),
        "resnet_stem": {"depths": stem_depths, "style": "google"} if hybrid else None,
    }


def _check_models_of_theirs(shapes: Collection[str], layout: Layout) -> None:
    """Refuse models that Google's code cannot produce, or that do not open yet.

    Raises:
        CheckpointError: gives the reason.
    """
    if "MAPHead_0/probe" in shapes and "cls" in shapes:
        raise CheckpointError("cls and MAPHead_0 are both there: expected only one, as in every model of Google's")
    if layout.code == "vision_transformer" and not any(place in shapes for place in POSITIONS):
        raise CheckpointError(
            "there is no table of positions, and vision_transformer computes none: models without one (its option "
            "add_position_embedding=False) do not open yet"
        )


def _pooling(shapes: Collection[str], hints: Hints) -> tuple[str | None, dict[str, Sequence[object]]]:
    """Return the pooling, or the candidates if neither class token, MAP head nor caller determines it."""
    if "MAPHead_0/probe" in shapes or "cls" in shapes:
        return ("cls" if "cls" in shapes else "map"), {}
    if hints.pooling is not None:
        return hints.pooling, {}
    return None, {"pooling": ["mean"] if "head/kernel" in shapes else ["mean", "none"]}


def _count(names: Collection[str], start: str) -> int:
    """Return the number of different numbers that follow this prefix of a name."""
    rests = (name.removeprefix(start) for name in names if name.startswith(start))
    return len({rest.split("/")[0] for rest in rests if rest[:1].isdigit()})


def _positions(
    shapes: Mapping[str, tuple[int, ...]], patch_size: tuple[int, int], hints: Hints
) -> tuple[dict[str, Any], list[Inference]]:
    """Return the fields for the positions and the image size, and the inferences.

    Raises:
        AmbiguousCheckpointError: if the image size is unknown.
        CheckpointError: if the caller's image size contradicts the table.
    """
    place = next((place for place in POSITIONS if place in shapes), None)
    height, width = patch_size
    given = hints.image_size
    size = None if given is None else pair(given)
    if place is None:
        if size is None:
            raise AmbiguousCheckpointError(
                "there is no table of positions: big_vision then computes sines and cosines for any grid, and the "
                "image size of the training is not in the file (vit_s16_i1k: 224):",
                {"image_size": [224]},
            )
        fields = {"position_embedding_type": "sincos_2d", "position_embedding_on_prefix": False, "image_size": size}
        return fields, [Inference("position_embedding_type", "sincos_2d", "no table of positions")]
    rows = shapes[place][-2]
    class_rows = int("cls" in shapes and POSITIONS[place])
    if size is not None:
        if fault := size_fault(size, patch_size, [rows - class_rows]):
            raise CheckpointError(f"{place} has {rows} rows, {class_rows} of them for the class token: {fault}")
    else:
        grid = square_grid(rows - class_rows)
        if grid is None:
            raise AmbiguousCheckpointError(
                f"{place} has {rows - class_rows} rows for patches, which do not form a square grid:",
                {"image_size": ["(height, width)"]},
            )
        size = (grid[0] * height, grid[1] * width)
    fields = {
        "position_embedding_type": "learned",
        "position_embedding_on_prefix": POSITIONS[place],
        "image_size": size,
    }
    origin = f"the {rows} rows of {place}, taken for a square grid as Google's code resamples them"
    return fields, [] if given else [Inference("image_size", size, origin)]


GOOGLE = GoogleFormat()
