"""timm's Eva as a source: its tensors, live modules and state dicts."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError
from ...engine import IDENTITY, KERNEL_TO_PIXELS, SPLIT_QKV, Row
from ...format import Description
from ..constructor import Constructor
from ..shapes import part_of
from ..tables import EMBEDDING_ROWS, HEAD_ROWS, mlp_rows
from .architectures import ARCHITECTURES
from .arguments import DEFAULTS, SILENT_ARGUMENTS, arguments_for, config_of, separate_by_default
from .modules import arguments_of, build, unknown_parts

FUSED, SEPARATE = "eva", "eva_separate"
BLOCK, LAYER = "blocks.{}", "vit.layers.{}"
QKV = tuple(f"{LAYER}.attention.{name}_proj" for name in "qkv")

BLOCK_ROWS = [
    Row(f"{BLOCK}.norm1", f"{LAYER}.layernorm_before"),
    Row(f"{BLOCK}.attn.q_norm", f"{LAYER}.attention.q_norm"),
    Row(f"{BLOCK}.attn.k_norm", f"{LAYER}.attention.k_norm"),
    Row(f"{BLOCK}.attn.norm", f"{LAYER}.attention.norm"),
    Row(f"{BLOCK}.attn.proj", f"{LAYER}.attention.o_proj"),
    Row(f"{BLOCK}.gamma_1", f"{LAYER}.layer_scale1.weight"),
    Row(f"{BLOCK}.norm2", f"{LAYER}.layernorm_after"),
    Row(f"{BLOCK}.gamma_2", f"{LAYER}.layer_scale2.weight"),
    Row("rope.freqs", "vit.rotary_embedding.frequencies"),
]
SEPARATE_ROWS = [Row(f"{BLOCK}.attn.{name}_proj", f"{LAYER}.attention.{name}_proj") for name in "qkv"]
FUSED_ROWS = [Row(f"{BLOCK}.attn.qkv", QKV, SPLIT_QKV)]
WITHOUT_KEY_BIAS_ROWS = [
    Row(f"{BLOCK}.attn.qkv.weight", tuple(f"{name}.weight" for name in QKV), SPLIT_QKV),
    Row(f"{BLOCK}.attn.q_bias", f"{LAYER}.attention.q_proj.bias"),
    Row(f"{BLOCK}.attn.v_bias", f"{LAYER}.attention.v_proj.bias"),
]
# Parts of its tensors that no VisionTransformer has; what it is if it has none of them, no tensor shows.
CERTAIN = {
    "rope.freqs",
    *(f"{BLOCK}.attn.{name}" for name in ("q_bias", "v_bias", "q_proj", "k_proj", "v_proj")),
}


class Eva(Constructor):
    """timm's Eva.

    Its layouts are "eva", with one projection for queries, keys and values, and "eva_separate", with three.
    """

    name = "Eva"
    class_path = "timm.models.eva.Eva"
    layouts = (FUSED, SEPARATE)
    architectures = ARCHITECTURES
    defaults = DEFAULTS
    silent_arguments = SILENT_ARGUMENTS
    unseen = "how queries and keys are rotated, if they are"

    def config_of(self, arguments: Mapping[str, Any], **fields: Any) -> PlainViTConfig:
        """Return our config for arguments of timm's."""
        return config_of(arguments, **fields)

    def layout_of(self, arguments: Mapping[str, Any]) -> str:
        """Return the layout of the tensors for arguments of timm's."""
        return FUSED if {**DEFAULTS, **arguments}["qkv_fused"] else SEPARATE

    def norms_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that keep the last norms where the pooling is changed after construction."""
        where = config_of(arguments).final_norm
        return {"use_post_transformer_norm": where in ("before_pooling", "both"),
                "use_fc_norm": where in ("after_pooling", "both")}  # fmt: skip

    def arguments_for(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments for our config, without those that have their default."""
        arguments = {**arguments_for(config), "qkv_fused": self._is_fused(config, layout)}
        return {name: value for name, value in arguments.items() if value != DEFAULTS[name]}

    def describe_module(self, module: Any, labels: Any) -> Description:
        """Read the configuration of a live module."""
        arguments = arguments_of(module)
        config, layout = config_of(arguments, **labels(arguments["num_classes"])), self.layout_of(arguments)
        if faults := unknown_parts(module, config, arguments):
            raise ExportError(
                "plain-vit does not know parts of this timm model (what it is, not what it would become):", faults
            )
        return Description(config, layout)

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors; without a layout that of `build`."""
        kernel = KERNEL_TO_PIXELS if config.patch_projection == "linear" else IDENTITY
        projection = Row("patch_embed.proj.weight", "vit.embeddings.patch_embeddings.projection.weight", kernel)
        fused = WITHOUT_KEY_BIAS_ROWS if config.qkv_bias and not config.key_bias else FUSED_ROWS
        attention = fused if self._is_fused(config, layout) else SEPARATE_ROWS
        mlp = mlp_rows(f"{BLOCK}.mlp", f"{LAYER}.mlp", config)
        return [projection, *EMBEDDING_ROWS, *BLOCK_ROWS, *attention, *mlp, *HEAD_ROWS]

    def build(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Return timm's own model for this config, with random weights."""
        return build(config, qkv_fused=self._is_fused(config, layout))

    def claims(self, config: PlainViTConfig) -> bool:
        """Return whether a model has parts that this class has and the VisionTransformer has not."""
        if config.relative_position_bias != "none":
            return False
        return config.rotary_embedding_type != "none" or (config.qkv_bias and not config.key_bias)

    def is_certain(self, names: Collection[str]) -> bool:
        """Return whether a state dict with these names cannot be that of a VisionTransformer, but of this class."""
        parts = {part_of(name) for name in names}
        return bool(parts & CERTAIN) and parts <= self._parts()

    def _parts(self) -> set[str]:
        """Return the parts of the names of its tensors, as `part_of` names them."""
        rows = [*EMBEDDING_ROWS, *BLOCK_ROWS, *SEPARATE_ROWS, *FUSED_ROWS, *WITHOUT_KEY_BIAS_ROWS, *HEAD_ROWS]
        for gated in ("mlp", "swiglu"):
            rows += mlp_rows(f"{BLOCK}.mlp", f"{LAYER}.mlp", PlainViTConfig(mlp_type=gated))
        return {part_of(str(row.source).replace("{}", "0")) for row in rows} | {"patch_embed.proj"}

    def _is_fused(self, config: PlainViTConfig, layout: str | None) -> bool:
        """Return whether one projection makes queries, keys and values."""
        return not separate_by_default(config) if layout is None else layout == FUSED


EVA = Eva()
