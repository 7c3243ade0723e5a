"""timm's Beit: BEiT, and BEiT v2."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from .....configuration_plain_vit import PlainViTConfig
from .....positions_plain_vit import distances_of
from ....tables.engine import Row, Tensors, Transform
from ....tables.format import Description, StateDict
from ..arguments import Argument
from ..modules import is_there
from ..tables import EMBEDDING_ROWS, GAMMA_BLOCK_ROWS, HEAD_ROWS, WITHOUT_KEY_BIAS_ROWS, kernel_row, mlp_rows
from .constructor import ARGUMENTS, OUR_BIAS, OUR_SHARED_BIAS, TABLE, RelativeConstructor

BLOCK, LAYER = "blocks.{}", "vit.layers.{}"

BLOCK_ROWS = [
    Row(f"{BLOCK}.norm1", f"{LAYER}.layernorm_before"),
    *WITHOUT_KEY_BIAS_ROWS,
    Row(f"{BLOCK}.attn.{TABLE}", f"{OUR_BIAS}.table"),
    *GAMMA_BLOCK_ROWS,
    Row(f"rel_pos_bias.{TABLE}", f"{OUR_SHARED_BIAS}.table"),
]
# Index of the distance of each pair of tokens. timm computes it from the grid; early releases also saved it.
INDEX = "relative_position_index"


def _without_index(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    """Return a table, after comparing the index stored with it with the index that we compute."""
    table, index = tensors
    if not index.is_meta and not torch.equal(index, _index(config)):
        raise ValueError(f"the latter are not the distances of all pairs of tokens on a grid of {config.grid_size}")
    return [table]


def _index(config: PlainViTConfig) -> torch.Tensor:
    distances = distances_of(config, config.grid_size, torch.device("cpu"))
    return torch.empty(0) if distances is None else distances.of_pairs


WITH_INDEX = Transform("WITH_INDEX", _without_index, lambda tensors, config: [tensors[0], _index(config)])


class Beit(RelativeConstructor):
    """timm's Beit.

    The layouts are "beit", and "beit_index" with the index that early releases saved.
    """

    name = "Beit"
    class_paths = ("timm.models.beit.Beit",)
    layouts = ("beit", "beit_index")
    old_layouts = ("beit_index",)
    data_file = "timm/relative/beit_architectures.json"
    silent_arguments = frozenset({"head_init_scale"})
    blocks = ("Block",)
    kinds = ("table",)
    arguments = (
        *ARGUMENTS,
        Argument("qkv_bias", True, "qkv_bias", module=lambda m: m.attention.q_bias is not None),
        Argument("swiglu_mlp", False, "mlp_type", {False: "mlp", True: "swiglu"},
                 module=lambda m: m.name_of(m.mlp) != "Mlp"),
        Argument("scale_mlp", False, "mlp_inner_norm", module=lambda m: is_there(m.mlp.norm)),
        Argument("pos_drop_rate", 0.0, "embedding_dropout_prob", module=lambda m: m.model.pos_drop.p),
        Argument("init_values", None, "layer_scale_init_value", module=lambda m: m.block.init_values),
        Argument("use_abs_pos_emb", True, "position_embedding_type", {True: "learned", False: "none"},
                 module=lambda m: m.model.pos_embed is not None),
        Argument("use_rel_pos_bias", False, module=lambda m: m.attention.relative_position_bias_table is not None),
        Argument("use_shared_rel_pos_bias", False, module=lambda m: m.model.rel_pos_bias is not None),
        Argument("use_fc_norm", None, module=lambda m: is_there(m.model.fc_norm)),
    )  # fmt: skip

    def without_counterpart(self, given: Mapping[str, Any]) -> list[str]:
        """Return the combinations of arguments without a counterpart in our model."""
        if given["use_rel_pos_bias"] and given["use_shared_rel_pos_bias"]:
            return ["use_shared_rel_pos_bias=True beside use_rel_pos_bias=True, two biases whose sum each block adds"]
        return []

    def norms_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that keep the final norms in place if the pooling is changed after construction."""
        return {"use_fc_norm": self.config_of(arguments).final_norm == "after_pooling"}

    def joint_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of our config that depend on several arguments, or on part of one."""
        after = given["global_pool"] == "avg" if given["use_fc_norm"] is None else given["use_fc_norm"]
        shared = bool(given["use_shared_rel_pos_bias"])
        bias = {"type": "table", "shared": shared, "resampling": "geometric"}
        return {
            "hidden_act": "silu" if given["swiglu_mlp"] else "gelu",
            "key_bias": not given["qkv_bias"],
            "layer_scale_init_value": given["init_values"] or None,
            "relative_position_bias": bias if shared or given["use_rel_pos_bias"] else None,
            "final_norm": "after_pooling" if after else "before_pooling",
        }

    def joint_arguments(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments that depend on several fields of our config, or on the layout."""
        shared = config.group("relative_position_bias")["shared"]
        has_table = config.relative_position_bias is not None
        after = config.final_norm == "after_pooling"
        return {
            "use_rel_pos_bias": has_table and not shared,
            "use_shared_rel_pos_bias": has_table and shared,
            "use_fc_norm": None if after == (config.pooling == "mean") else after,
        }

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        mlp = mlp_rows(f"{BLOCK}.mlp", f"{LAYER}.mlp", config)
        block = [_with_index(row) for row in BLOCK_ROWS] if layout == "beit_index" else BLOCK_ROWS
        return [kernel_row(config), *EMBEDDING_ROWS, *block, *mlp, *HEAD_ROWS]

    def is_certain(self, names: Collection[str]) -> bool:
        """Return whether these names certainly belong to this class, not to a VisionTransformer."""
        return super().is_certain([name for name in names if not name.endswith(f".{INDEX}")])

    def described(self, arguments: Mapping[str, Any], tensors: StateDict, fields: Mapping[str, Any]) -> Description:
        """Return the config and the layout of a state dict."""
        layout = "beit_index" if any(name.endswith(f".{INDEX}") for name in tensors) else "beit"
        return Description(self.config_of(arguments, **fields), layout)

    def faults(self, arguments: Mapping[str, Any], tensors: StateDict) -> list[str]:
        """Return how a state dict differs from the tensors of a model with these arguments, apart from the index."""
        return super().faults(arguments, {name: tensors[name] for name in tensors if not name.endswith(f".{INDEX}")})

    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""
        from timm.models import beit

        return beit.Beit(**arguments)


def _with_index(row: Row) -> Row:
    """Add the index to the row of a relative position table; other rows are returned unchanged."""
    source = str(row.source)
    if not source.endswith(TABLE):
        return row
    return Row((source, source.removesuffix(TABLE) + INDEX), row.ours, WITH_INDEX)


BEIT = Beit()
