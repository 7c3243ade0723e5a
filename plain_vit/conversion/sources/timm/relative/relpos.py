"""timm's VisionTransformerRelPos."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from .....configuration_plain_vit import PlainViTConfig
from ....tables.engine import Row
from ..arguments import ACTIVATIONS, QK_NORMS, Argument, timm_name_for
from ..modules import Parts, is_there
from ..tables import rows_of
from .constructor import ARGUMENTS, OUR_BIAS, OUR_SHARED_BIAS, TABLE, RelativeConstructor

KINDS = {"mlp": "mlp", "bias": "table"}
BLOCKS = {"RelPosBlock": "sequential", "ResPostRelPosBlock": "post_norm"}
MLP_SIZE = 128

POSITION_ROWS = [
    Row(f"{source}.{theirs}", f"{target}.{ours}")
    for source, target in (("blocks.{}.attn.rel_pos", OUR_BIAS), ("shared_rel_pos", OUR_SHARED_BIAS))
    for theirs, ours in ((TABLE, "table"), ("mlp.fc1", "fc1"), ("mlp.fc2", "fc2"))
]


def _bias(parts: Parts) -> Any:
    """Return the module of the relative positions."""
    return parts.model.shared_rel_pos or parts.attention.rel_pos


def _kind(parts: Parts) -> str:
    """Return timm's name for the kind of relative positions."""
    bias = _bias(parts)
    if type(bias).__name__ == "RelPosMlp":
        return "mlp" if bias.mode == "cr" else f"mlp_{bias.mode}"
    return "bias" if type(bias).__name__ == "RelPosBias" else type(bias).__name__


def _init_values(parts: Parts) -> float | None:
    """Return the initial LayerScale; None if the residual branches end in a norm instead."""
    return getattr(getattr(parts.block, "ls1", None), "init_values", None)


class VisionTransformerRelPos(RelativeConstructor):
    """timm's VisionTransformerRelPos."""

    name = "VisionTransformerRelPos"
    class_paths = ("timm.models.vision_transformer_relpos.VisionTransformerRelPos",)
    layouts = ("relpos",)
    data_file = "timm/relative/relpos_architectures.json"
    silent_arguments = frozenset({"weight_init", "fix_init"})
    code_only = (*RelativeConstructor.code_only, "block_fn", "act_layer")
    blocks = tuple(BLOCKS)
    kinds = ("mlp",)
    arguments = (
        *ARGUMENTS,
        Argument("qkv_bias", True, "qkv_bias", module=lambda m: m.attention.qkv.bias is not None),
        Argument("qk_norm", False, "qk_norm", QK_NORMS,
                 module=lambda m: is_there(m.attention.q_norm)),
        Argument("init_values", 1e-6, "layer_scale_init_value", module=_init_values),
        Argument("class_token", False, "use_class_token", module=lambda m: m.model.cls_token is not None),
        Argument("fc_norm", False, module=lambda m: is_there(m.model.fc_norm)),
        Argument("rel_pos_type", "mlp", words=KINDS, module=_kind),
        Argument("rel_pos_dim", None,
                 module=lambda m: _bias(m).mlp.fc1.out_features if hasattr(_bias(m), "mlp") else None),
        Argument("shared_rel_pos", False, module=lambda m: m.model.shared_rel_pos is not None),
        Argument("act_layer", "gelu", "hidden_act", ACTIVATIONS, module=lambda m: m.name_of(m.mlp.act)),
        Argument("block_fn", "RelPosBlock", "block_type", BLOCKS, module=lambda m: type(m.block).__name__),
    )  # fmt: skip

    def without_counterpart(self, given: Mapping[str, Any]) -> list[str]:
        """Return the combinations of arguments that timm refuses."""
        if given["global_pool"] == "token" and not given["class_token"]:
            return ["global_pool='token' without a class token, which timm refuses"]
        return []

    def joint_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of our config that depend on several arguments, or on part of one."""
        is_mlp, post_norm = given["rel_pos_type"] == "mlp", given["block_fn"] == "ResPostRelPosBlock"
        return {
            "position_embedding_type": "none",
            "embedding_dropout_prob": 0.0,
            "layer_scale_init_value": None if post_norm else given["init_values"] or None,
            "relative_position_bias": {
                "type": KINDS[given["rel_pos_type"]],
                "shared": bool(given["shared_rel_pos"]),
                "mlp_size": given["rel_pos_dim"] or MLP_SIZE if is_mlp else MLP_SIZE,
                "resampling": "geometric",
            },
            "final_norm": "after_pooling" if given["fc_norm"] else "before_pooling",
        }

    def joint_arguments(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments that depend on several fields of our config, or on the layout."""
        bias, gain = config.group("relative_position_bias"), config.layer_scale_init_value
        return {
            "rel_pos_type": timm_name_for(KINDS, bias["type"]),
            "shared_rel_pos": bias["shared"],
            "init_values": self.defaults["init_values"] if config.block_type == "post_norm" else gain,
            "rel_pos_dim": None if bias["mlp_size"] == MLP_SIZE else bias["mlp_size"],
            "fc_norm": config.final_norm == "after_pooling",
        }

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        return [*rows_of(config), *POSITION_ROWS]

    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""
        from timm import layers
        from timm.models import vision_transformer_relpos

        block = getattr(vision_transformer_relpos, arguments["block_fn"])
        activation = None if arguments["act_layer"] == "gelu" else layers.get_act_layer(arguments["act_layer"])
        return vision_transformer_relpos.VisionTransformerRelPos(
            **{**arguments, "block_fn": block, "act_layer": activation}, weight_init="skip"
        )


RELPOS = VisionTransformerRelPos()
