"""Code bases whose models are those of another source under other names, with more settings fixed in code.

Each is a table of names, onto the names of the source that reads them, and the settings that its code fixes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...configuration_plain_vit import PlainViTConfig
from ...errors import AmbiguousCheckpointError, CheckpointError, ExportError, UnknownFormatError, few
from ...image_processing_plain_vit import PlainViTImageProcessor
from ..tables.compare_modules import RATES, lost_fields
from ..tables.engine import (
    ADD_FIRST_AXIS,
    IDENTITY,
    LEAVES,
    Row,
    Transform,
    each,
    ignored_names,
    inverse,
    revert,
    sources_of,
    then,
)
from ..tables.format import (
    DROP_HEAD,
    HINTS,
    NEUTRAL,
    SCALES,
    UNSEEN,
    Description,
    FileFormat,
    Format,
    Hints,
    Inference,
    StateDict,
    write_state_dict,
)
from ..tables.pixels import IMAGENET_MEAN, IMAGENET_STD
from .timm.source import TIMM
from .torchvision.source import TORCHVISION
from .transformers.source import TRANSFORMERS

# (L, 1, D) in the code base, (1, L, D) in the other source, and the reverse.
SEQUENCE_FIRST = each(
    "SEQUENCE_FIRST", lambda table, config: table.transpose(0, 1), lambda table, config: table.transpose(0, 1)
)


@dataclass(frozen=True, eq=False)
class RenamedFormat(FileFormat):
    """A code base whose models are those of another source under other names.

    Attributes:
        name: Name of the format.
        base: The source that reads the renamed tensors.
        tables: For each layout, the names of the code base and those of `base`, the usual layout first.
        fixed: Hints that the code of the code base answers.
        fields: Fields of our config that differ from those that `base` gives.
        adapt: Adds what the other source lacks to the config, given the names that `base` has, or refuses the model.
        heads: Modules of the classifier.
        ignored: Patterns of names that the code does not read, each with the reason.
        mark: End of a name that every file has, if the other names are those of another source too.
        base_layout: Layout of `base`, if it is not that of the code base.
        processor: Returns the image processor of the code base for RGB images, if its code has one.
    """

    name: str
    base: Format
    tables: Mapping[str, Sequence[Row]]
    fixed: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    adapt: Callable[[PlainViTConfig, Collection[str]], None] = lambda config, names: None
    heads: tuple[str, ...] = ()
    ignored: Sequence[tuple[str, str]] = ()
    mark: str = ""
    base_layout: str | None = None
    processor: Callable[[PlainViTConfig, Hints], Any] | None = None
    suffixes: tuple[str, ...] = (".pth", ".pt", ".safetensors")

    def layout_of(self, names: Collection[str]) -> str:
        """Return the layout that has most of these names, and then the fewest others."""
        sizes = {layout: sum(len(row.sources) for row in table) for layout, table in self.tables.items()}
        return max(self.tables, key=lambda layout: (len(self._known(layout, names)), -sizes[layout]))

    def _known(self, layout: str, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the names that a layout has, each with its names in the other source."""
        return sources_of(_inverted(self.tables[layout]), names)

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether a state dict has the names of the code base: most of those in the modules that it shares."""
        known = self._known(self.layout_of(names), names)
        unknown = len(names) - len(known) - len(self._outside(known, names))
        is_marked = any(name.endswith(self.mark) for name in known)
        return (
            is_marked
            and unknown <= len(known)
            and self.base.matches_names({name for one in known.values() for name in one})
        )

    def _outside(self, known: Collection[str], names: Collection[str]) -> list[str]:
        modules = {name.partition(".")[0] for name in known} | {*self.heads}
        return [name for name in names if name.partition(".")[0] not in modules]

    def unexpected_names(self, names: Collection[str]) -> list[str]:
        """Return the names outside the modules that the layout has."""
        if not self.matches_names(names):
            return []
        outside = self._outside(self._known(self.layout_of(names), names), names)
        return [name for name in outside if name not in ignored_names(outside, self.ignored)]

    def classifiers(self, tensors: StateDict) -> list[str]:
        """Return none: a classifier has the names of a table, or else `describe_checkpoint` refuses it."""
        return []

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration of a state dict as the other source does, with the settings fixed in code.

        Raises:
            AmbiguousCheckpointError: lists the settings that neither tensors nor code determine.
            CheckpointError: The head is of another kind.
        """
        layout = self.layout_of(tensors)
        known = self._known(layout, tensors)
        if others := [name for name in tensors if name not in known and name.partition(".")[0] in self.heads]:
            held = few(list(map(repr, others)))
            raise CheckpointError(f"the head of {self.name} is not one that opens, it has {held}; {DROP_HEAD}")
        renamed = revert(_inverted(self.tables[layout]), {name: tensors[name] for name in known}, PlainViTConfig())
        try:
            found = self.base.describe_checkpoint(renamed, {}, replace(hints, layout=None, **self.fixed))
        except AmbiguousCheckpointError as error:
            message = f"the tensors and the code of {self.name} do not show everything that changes the logits; give"
            raise AmbiguousCheckpointError(message, error.otherwise or error.candidates) from error
        vars(found.config).update(self.fields)
        self.adapt(found.config, renamed)
        said = hints.given().keys()
        inferences = [one for one in found.inferences if one.field not in {*self.fixed, "layout"} - said]
        told = {one.field for one in inferences} | said | {"architecture"}
        code = [
            Inference(name, value, f"the code of {self.name}, the only value there")
            for name, value in {**self.fixed, **self.fields}.items()
            if name not in told and (name in UNSEEN or getattr(found.config, name, value) == value)
        ]
        return Description(found.config, layout, [*inferences, *code], self.ignored)

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return the image processor of timm's `config.json`, if there is one, or else of the code, or a default."""
        if "architecture" in settings:
            return TIMM.image_processor(config, {**settings, "architecture": None}, preprocessor, hints)
        if self.processor is None or config.num_channels != 3:
            return super().image_processor(config, settings, preprocessor, hints)
        return self.processor(config, hints), [f"pixels are prepared as the code of {self.name} does"]

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the other source's table with the names of the code base."""
        layout = layout or next(iter(self.tables))
        table = {row.targets[0]: row for row in self.tables[layout]}
        rows = self.base.rows(config, self.base_layout or layout)
        return [renamed for row in rows for renamed in _renamed(row, table)]

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> str:
        """Write the state dict, with `torch.save` or as safetensors; the format stores no processor.

        Raises:
            ExportError: lists every part that the code base cannot represent.
        """
        layout = next(iter(self.tables)) if layout is None else layout
        if layout not in self.tables:
            raise ExportError(f"layout={layout!r}: {self.name} has {', '.join(self.tables)}")
        rows = self.rows(config, layout)
        if lost := [name for name in tensors if name not in sources_of(rows, tensors)]:
            raise ExportError(f"{self.name} has no place for parts of this model, with layout={layout!r}:", lost)
        state = revert(rows, tensors, config)
        answers = {name: getattr(config, name) for name in HINTS if hasattr(config, name) and name not in NEUTRAL}

        def read_back() -> PlainViTConfig:
            read = self.describe_checkpoint(state, {}, Hints(**answers)).config
            in_training = RATES | ({"layer_scale_init_value"} if read.layer_scale_init_value else set())
            vars(read).update({name: getattr(config, name) for name in in_training})
            return read

        if lost := lost_fields(config, read_back):
            raise ExportError(f"{self.name} cannot represent this model:", lost)
        write_state_dict(state, path)
        return layout


def _inverted(table: Sequence[Row]) -> list[Row]:
    """Return a table in the other direction."""
    return [Row(row.ours, row.source, inverse(f"{row.transform} inverted", row.transform)) for row in table]


def _renamed(row: Row, table: Mapping[str, Row]) -> Iterator[Row]:
    """Yield a row of the other source with the names of a table; nothing for parts that the table does not have.

    Args:
        row: A row of the other source.
        table: The rows of the code base by the name of the other source.
    """
    for leaf in LEAVES:
        found = [one for name in row.sources if (one := _theirs(f"{name}{leaf}", table)) is not None]
        if len(found) < len(row.sources):
            continue
        first = found[0].transform  # of a row with several sources, the names differ alone
        transform = row.transform if first is IDENTITY else then(first, row.transform)
        sources = tuple(name for one in found for name in one.sources)
        yield Row(sources, tuple(f"{name}{leaf}" for name in row.targets), transform)
        if not leaf:
            return


def _theirs(name: str, table: Mapping[str, Row]) -> Row | None:
    """Return the row of a module or tensor of the other source, or of a tensor in a module of the table."""
    if name in table:
        return table[name]
    module, _, leaf = name.rpartition(".")
    if module in table and f".{leaf}" in LEAVES:
        row = table[module]
        return replace(row, source=tuple(f"{one}.{leaf}" for one in row.sources), ours=name)
    return None


# OpenMMLab: mmpretrain (before, mmclassification) and the models pre-trained with it, such as those of Sapiens; mmseg.
# Source: mmpretrain 1.2.0, `models/backbones/{vision_transformer,deit,deit3}.py`, `models/heads`; mmseg 1.2.2,
# `models/backbones/vit.py`.

PLAIN = {"attention_scale": SCALES[0], "block_type": "sequential", "rope_type": "none",
         "pool_prefix_tokens": False, "mlp_type": "swiglu_packed"}  # fmt: skip
OPENMMLAB_ROWS = [
    *(Row(name, name) for name in ("cls_token", "dist_token", "pos_embed", "patch_embed.norm")),
    Row("patch_embed.projection", "patch_embed.proj"),
    Row("layers.{}.ln1", "blocks.{}.norm1"),
    Row("layers.{}.ln2", "blocks.{}.norm2"),
    Row("ln1", "norm"),
]
MLPS = {
    "": [Row("layers.{}.ffn.layers.0.0", "blocks.{}.mlp.fc1"), Row("layers.{}.ffn.layers.1", "blocks.{}.mlp.fc2")],
    "_swiglu": [Row("layers.{}.ffn.w12", "blocks.{}.mlp.fc1"), Row("layers.{}.ffn.w3", "blocks.{}.mlp.fc2")],
}
MMSEG_ROWS = [
    Row("pre_ln", "norm_pre"),
    Row("layers.{}.attn.attn.in_proj_weight", "blocks.{}.attn.qkv.weight"),
    Row("layers.{}.attn.attn.in_proj_bias", "blocks.{}.attn.qkv.bias"),
    Row("layers.{}.attn.attn.out_proj", "blocks.{}.attn.proj"),
]
MMPRETRAIN_ROWS = [
    Row("pre_norm", "norm_pre"),
    Row("layers.{}.attn.qkv", "blocks.{}.attn.qkv"),
    Row("layers.{}.attn.proj", "blocks.{}.attn.proj"),
    Row("layers.{}.attn.gamma1.weight", "blocks.{}.ls1.gamma"),
    Row("layers.{}.ffn.gamma2.weight", "blocks.{}.ls2.gamma"),
    Row("ln2", "fc_norm"),
]
HEADS = {
    "": [
        Row("head.layers.pre_logits", "pre_logits.fc"),
        Row("head.layers.head", "head"),
        Row("head.layers.head_dist", "head_dist"),
    ],
    "_linear_head": [Row("head.fc", "head")],
}
MMPRETRAIN = {name: [*OPENMMLAB_ROWS, *MMPRETRAIN_ROWS, *mlp] for name, mlp in MLPS.items()}


def _under(prefix: str, table: Sequence[Row]) -> list[Row]:
    return [replace(row, source=tuple(f"{prefix}{name}" for name in row.sources)) for row in table]


def _adapt_openmmlab(config: PlainViTConfig, names: Collection[str]) -> None:
    """Read whether patches have a bias, and refuse DeiT III.

    Raises:
        UnknownFormatError: The class token has no position, as in DeiT III alone.
    """
    config.patch_bias = "patch_embed.proj.bias" in names
    if config.use_class_token and not config.position_embedding_on_prefix:
        raise UnknownFormatError(
            "these are the tensors of DeiT III in mmpretrain, whose MLPs read the second norm of their block in its "
            "first releases and the first in 1.2, so that a file has two meanings: open the original of "
            "facebookresearch/deit, which mmpretrain converted, or timm's"
        )


OPENMMLAB = RenamedFormat(
    name="openmmlab",
    base=TIMM,
    tables={
        **{f"mmpretrain{mlp}{head}": [*_under("backbone.", rows), *HEADS[head]]
           for head in HEADS for mlp, rows in MMPRETRAIN.items()},
        **{f"mmpretrain{mlp}_backbone": rows for mlp, rows in MMPRETRAIN.items()},
        "mmseg_backbone": [*OPENMMLAB_ROWS, *MMSEG_ROWS, *MLPS[""]],
    },
    fixed=PLAIN,
    fields={"position_resampling": "bicubic"},
    adapt=_adapt_openmmlab,
    heads=("head",),
)  # fmt: skip

# SWAG. Source: facebookresearch/SWAG, `models/vision_transformer.py`.

BLOCK = "encoder.layers.encoder_layer_{}"
SWAG = RenamedFormat(
    name="swag",
    base=TORCHVISION,
    tables={
        "swag": [
            *(Row(name, name) for name in ("class_token", "conv_proj", "encoder.ln")),
            Row("encoder.pos_embedding", "encoder.pos_embedding", SEQUENCE_FIRST),
            *(Row(f"encoder.layers.layer_{{}}.{name}", f"{BLOCK}.{name}") for name in ("ln_1", "ln_2")),
            *(Row(f"encoder.layers.layer_{{}}.self_attention.{name}", f"{BLOCK}.self_attention.{name}")
              for name in ("in_proj_weight", "in_proj_bias", "out_proj")),
            Row("encoder.layers.layer_{}.mlp.linear_1", f"{BLOCK}.mlp.0"),
            Row("encoder.layers.layer_{}.mlp.linear_2", f"{BLOCK}.mlp.3"),
            Row("head.layers.pre_logits", "heads.pre_logits"),
            Row("head.layers.head", "heads.head"),
        ]
    },
    fixed={"layer_norm_eps": 1e-6},
    heads=("head",),
)  # fmt: skip

# kornia. Source: kornia 0.9.0, `models/vit.py`.

KORNIA = RenamedFormat(
    name="kornia",
    base=TIMM,
    tables={
        "kornia": [
            Row("patch_embedding.cls_token", "cls_token"),
            Row("patch_embedding.positions", "pos_embed", ADD_FIRST_AXIS),
            Row("patch_embedding.backbone", "patch_embed.proj"),
            Row("encoder.blocks.{}.0.fn.0", "blocks.{}.norm1"),
            Row("encoder.blocks.{}.0.fn.1.qkv", "blocks.{}.attn.qkv"),
            Row("encoder.blocks.{}.0.fn.1.projection", "blocks.{}.attn.proj"),
            Row("encoder.blocks.{}.1.fn.0", "blocks.{}.norm2"),
            Row("encoder.blocks.{}.1.fn.1.0", "blocks.{}.mlp.fc1"),
            Row("encoder.blocks.{}.1.fn.1.3", "blocks.{}.mlp.fc2"),
            Row("norm", "norm"),
        ]
    },
    fixed={**PLAIN, "layer_norm_eps": 1e-6, "hidden_act": "gelu", "pooling": "none"},
)

# MONAI, two-dimensional images. Source: MONAI 1.6.1, `networks/nets/vit.py`.


def _with_unread_norm(leaf: str, fill: Callable[[torch.Tensor], torch.Tensor]) -> Row:
    """Return the row of a tensor of the first norm, beside that of a norm that the code never calls or trains."""
    unread = Transform("UNREAD_NORM", lambda pair, config: pair[:1], lambda one, config: [one[0], fill(one[0])])
    return Row(
        (f"blocks.{{}}.norm1.{leaf}", f"blocks.{{}}.norm_cross_attn.{leaf}"), f"blocks.{{}}.norm1.{leaf}", unread
    )


MONAI_1_3 = [
    Row("cls_token", "cls_token"),
    Row("patch_embedding.position_embeddings", "pos_embed"),
    Row("patch_embedding.patch_embeddings", "patch_embed.proj"),
    Row("blocks.{}.norm1", "blocks.{}.norm1"),
    Row("blocks.{}.attn.qkv", "blocks.{}.attn.qkv"),
    Row("blocks.{}.attn.out_proj", "blocks.{}.attn.proj"),
    Row("blocks.{}.norm2", "blocks.{}.norm2"),
    Row("blocks.{}.mlp.linear1", "blocks.{}.mlp.fc1"),
    Row("blocks.{}.mlp.linear2", "blocks.{}.mlp.fc2"),
    Row("norm", "norm"),
    Row("classification_head", "head"),
]
MONAI = RenamedFormat(
    name="monai",
    base=TIMM,
    tables={
        "monai": [
            *(row for row in MONAI_1_3 if row.source != "blocks.{}.norm1"),
            _with_unread_norm("weight", torch.ones_like),
            _with_unread_norm("bias", torch.zeros_like),
        ],
        "monai_1.3": MONAI_1_3,
    },
    fixed={**PLAIN, "layer_norm_eps": 1e-5, "hidden_act": "gelu"},
    heads=("classification_head",),
    ignored=(("blocks.*.cross_attn.*", "attends to a context, which ViT has not"),),
)

# Segment Anything. Source: facebookresearch/segment-anything, `modeling/image_encoder.py`; timm 1.0.31,
# `models/vision_transformer_sam.py`, which has the same modules.

SAM_ROWS = [
    Row("pos_embed", "pos_embed"),
    Row("patch_embed.proj", "patch_embed.projection"),
    Row("blocks.{}.norm1", "layers.{}.layer_norm1"),
    Row("blocks.{}.norm2", "layers.{}.layer_norm2"),
    *(Row(f"blocks.{{}}.{name}", f"layers.{{}}.{name}")
      for name in ("attn.qkv", "attn.proj", "attn.rel_pos_h", "attn.rel_pos_w")),
]  # fmt: skip


def _sam_processor(config: PlainViTConfig, hints: Hints) -> PlainViTImageProcessor:
    """Return a processor that resizes the longer side, and pads the shorter one at its end after normalisation."""
    height, width = config.image_shape
    return PlainViTImageProcessor(
        size={"longest_edge": max(height, width)}, do_pad=True, pad_size={"height": height, "width": width},
        image_mean=hints.image_mean or IMAGENET_MEAN, image_std=hints.image_std or IMAGENET_STD,
    )  # fmt: skip


SAM_MLP, TIMM_MLP = (
    [Row(f"blocks.{{}}.mlp.{name}{one}", f"layers.{{}}.mlp.lin{one}") for one in (1, 2)] for name in ("lin", "fc")
)
SEGMENT_ANYTHING = RenamedFormat(
    name="segment_anything",
    base=TRANSFORMERS,
    tables={
        "sam": _under("image_encoder.", [*SAM_ROWS, *SAM_MLP]),
        "sam_encoder": [*SAM_ROWS, *SAM_MLP],
        "timm": [*SAM_ROWS, *TIMM_MLP],
    },
    heads=("head",),
    fixed={"architecture": "SamVisionModel", "layer_norm_eps": 1e-6, "hidden_act": "gelu"},
    ignored=(
        ("*neck.*", "the convolutions after the encoder"),
        ("prompt_encoder.*", "a part beside the image encoder"),
        ("mask_decoder.*", "a part beside the image encoder"),
    ),
    mark=".attn.rel_pos_h",
    base_layout="SamVisionModel bare",
    processor=_sam_processor,
)

RENAMED = (OPENMMLAB, SWAG, KORNIA, MONAI, SEGMENT_ANYTHING)
