"""timm's Eva as a source: its tensors, live modules and state dicts."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from .....configuration_plain_vit import PlainViTConfig
from .....errors import ExportError
from ....tables.engine import SPLIT_QKV, Row
from ....tables.format import Description, StateDict
from ..constructor import Constructor
from ..names import part_of
from ..tables import (
    EMBEDDING_ROWS,
    GAMMA_BLOCK_ROWS,
    HEAD_ROWS,
    QKV,
    WITHOUT_KEY_BIAS_ROWS,
    kernel_row,
    mlp_rows,
    parts_of,
)
from . import originals
from .arguments import ARGUMENTS, EvaParts, joint_arguments, joint_fields, separate_by_default, without_counterpart

FUSED, SEPARATE = "eva", "eva_separate"
BLOCK, LAYER = "blocks.{}", "vit.layers.{}"

BLOCK_ROWS = [
    Row(f"{BLOCK}.norm1", f"{LAYER}.layernorm_before"),
    Row(f"{BLOCK}.attn.q_norm", f"{LAYER}.attention.q_norm"),
    Row(f"{BLOCK}.attn.k_norm", f"{LAYER}.attention.k_norm"),
    Row(f"{BLOCK}.attn.norm", f"{LAYER}.attention.norm"),
    *GAMMA_BLOCK_ROWS,
    Row("rope.freqs", "vit.rotary_embedding.frequencies"),
]
SEPARATE_ROWS = [Row(f"{BLOCK}.attn.{name}_proj", f"{LAYER}.attention.{name}_proj") for name in "qkv"]
FUSED_ROWS = [Row(f"{BLOCK}.attn.qkv", QKV, SPLIT_QKV)]
# Parts that no VisionTransformer has. Without any of them, the tensors do not show the class.
CERTAIN = {
    "rope.freqs",
    *(f"{BLOCK}.attn.{name}" for name in ("q_bias", "v_bias", "q_proj", "k_proj", "v_proj")),
}


class Eva(Constructor):
    """timm's Eva.

    The layouts are "eva", with a fused projection of queries, keys and values, "eva_separate", with three projections,
    and the layouts of the original files.
    """

    name = "Eva"
    class_paths = ("timm.models.eva.Eva",)
    layouts = (FUSED, SEPARATE, *originals.LAYOUTS)
    old_layouts = originals.LAYOUTS
    data_file = "timm/eva/architectures.json"
    arguments = ARGUMENTS
    silent_arguments = frozenset({"head_init_scale"})
    parts = EvaParts
    blocks = ("EvaBlock", "EvaBlockPostNorm")
    free = ("attn_type", "dynamic_img_size", "rope_rotate_half")
    unseen = "how queries and keys are rotated, if they are"
    without_counterpart = staticmethod(without_counterpart)
    joint_fields = staticmethod(joint_fields)

    def layout_of(self, arguments: Mapping[str, Any]) -> str:
        """Return the layout of the tensors for timm's arguments."""
        return FUSED if {**self.defaults, **arguments}["qkv_fused"] else SEPARATE

    def shown(self, tensors: StateDict) -> StateDict:
        """Return the tensors by timm's names; only those that show channels, patches, grid and classes are needed."""
        layout = originals.layout_of(tensors)
        return tensors if layout is None else originals.shown(tensors, layout)

    def described(self, arguments: Mapping[str, Any], tensors: StateDict, fields: Mapping[str, Any]) -> Description:
        """Return the config, the layout and the ignored tensors of a state dict."""
        layout = originals.layout_of(tensors)
        if layout is None:
            return super().described(arguments, tensors, fields)
        return originals.described(self.config_of(arguments, **fields), tensors, layout)

    def norms_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that keep the final norms in place if the pooling is changed after construction."""
        where = self.config_of(arguments).final_norm
        return {"use_post_transformer_norm": where in ("before_pooling", "both"),
                "use_fc_norm": where in ("after_pooling", "both")}  # fmt: skip

    def joint_arguments(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments that depend on several fields of our config, or on the layout."""
        return {**joint_arguments(config), "qkv_fused": self._is_fused(config, layout)}

    def lost(self, config: PlainViTConfig, arguments: Mapping[str, Any]) -> list[str]:
        """Return the fields of our config that a model with these arguments would lose."""
        lost = super().lost(config, arguments)
        resamples = arguments["dynamic_img_size"] and arguments["use_abs_pos_emb"]
        if resamples and config.position_resampling != "bicubic_antialias":
            lost.append(f"position_resampling={config.position_resampling!r} (there it would be 'bicubic_antialias')")
        return lost

    def changed_buffers(self, module: Any) -> list[str]:
        """Return the non-persistent buffers whose values or dtypes differ from what timm computes."""
        dtype = module.patch_embed.proj.weight.dtype
        buffers = [] if module.rope is None else module.rope.named_buffers()
        return super().changed_buffers(module) + [
            f"rope.{name} is of {buffer.dtype}, and the weights of {dtype}: cast the whole model"
            for name, buffer in buffers
            if name.startswith("pos_embed") and buffer.dtype != dtype and not buffer.is_meta
        ]

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors (default: for the layout of `build`)."""
        if layout in originals.LAYOUTS:
            return originals.rows(self.rows(config, FUSED), config, layout)
        fused = WITHOUT_KEY_BIAS_ROWS if config.qkv_bias and not config.key_bias else FUSED_ROWS
        attention = fused if self._is_fused(config, layout) else SEPARATE_ROWS
        mlp = mlp_rows(f"{BLOCK}.mlp", f"{LAYER}.mlp", config)
        return [kernel_row(config), *EMBEDDING_ROWS, *BLOCK_ROWS, *attention, *mlp, *HEAD_ROWS]

    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""
        from timm.models import eva

        return eva.Eva(**arguments)

    def claims(self, config: PlainViTConfig) -> bool:
        """Return whether a model has parts of this class that the VisionTransformer lacks."""
        if config.relative_position_bias is not None:
            return False
        return config.rope_parameters is not None or (config.qkv_bias and not config.key_bias)

    def is_certain(self, names: Collection[str]) -> bool:
        """Return whether these names certainly belong to this class, not to a VisionTransformer."""
        if originals.layout_of(names) is not None:
            return True
        parts = {part_of(name) for name in names}
        return bool(parts & CERTAIN) and parts <= self._parts()

    def _parts(self) -> set[str]:
        """Return the parts, in the sense of `part_of`, of the names of its tensors."""
        rows = [*EMBEDDING_ROWS, *BLOCK_ROWS, *SEPARATE_ROWS, *FUSED_ROWS, *WITHOUT_KEY_BIAS_ROWS, *HEAD_ROWS]
        for gated in ("mlp", "swiglu"):
            rows += mlp_rows(f"{BLOCK}.mlp", f"{LAYER}.mlp", PlainViTConfig(mlp_type=gated))
        return parts_of(rows) | {"patch_embed.proj"}

    def _is_fused(self, config: PlainViTConfig, layout: str | None) -> bool:
        """Return whether the query, key and value projections are fused."""
        if layout == FUSED and config.num_key_value_heads is not None:
            raise ExportError(f"queries are wider than keys and values: use layout {SEPARATE!r}, not {FUSED!r}")
        return not separate_by_default(config) if layout is None else layout == FUSED


EVA = Eva()
