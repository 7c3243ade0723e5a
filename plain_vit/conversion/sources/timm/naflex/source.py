"""timm's NaFlexVit as a source: its arguments, tensors and live modules.

Source: timm 1.0.31, `timm/models/naflexvit.py`.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from .....configuration_plain_vit import PlainViTConfig
from .....errors import MappingError
from ....tables.engine import GRID_TABLE, Row, each
from ....tables.format import Hints, StateDict
from ....tables.infer import pair
from ..arguments import ACTIVATIONS, NORMS, QK_NORMS, Argument, timm_name_for
from ..constructor import ARGUMENTS, ATTENTION_POOLING, Constructor, classes_of, pooling_arguments, pooling_fields
from ..modules import Parts, is_there
from ..tables import HEAD_ROWS, sequential_rows

PROJECTION = "embeds.proj"
KERNEL = f"{PROJECTION}.weight"
POOLINGS = {"map": "map", "avg": "mean", "token": "cls", "": "none", "max": "max", "avgmax": "mean_max"}
POSITIONS = {"learned": "learned", "factorized": "factorized", "none": "none", "": "none"}
TABLES = ("learned", "factorized")
MODES = {"bicubic": "bicubic", "bilinear": "bilinear"}
PROJECTIONS = {"linear": "linear", "conv": "conv"}

# Arguments that no entrypoint changes. Other values than these have no counterpart in our model.
CLOSED: dict[str, Any] = {
    "num_kv_heads": None, "dynamic_img_pad": False, "patchify_channels_last": True, "enable_patch_interpolator": False,
    "pos_embed_use_grid_sample": False, "rope_type": "", "attn_type": "standard", "attn_gated": False,
    "swiglu_mlp": False, "attn_only_layer_scale": False, "block_fn": None, "mlp_layer": None, "attn_layer": None,
    "input_norm_layer": None,
}  # fmt: skip

EMBEDDINGS = "vit.embeddings"
AXIS_TABLE = each("AXIS_TABLE", lambda table, config: table.squeeze(0), lambda table, config: table.unsqueeze(0))
EMBEDDING_ROWS = [
    Row("embeds.cls_token", f"{EMBEDDINGS}.cls_token"),
    Row("embeds.reg_token", f"{EMBEDDINGS}.register_tokens"),
    Row("embeds.pos_embed", f"{EMBEDDINGS}.position_embeddings.weight", GRID_TABLE),
    Row("embeds.pos_embed_y", f"{EMBEDDINGS}.position_embeddings.rows", AXIS_TABLE),
    Row("embeds.pos_embed_x", f"{EMBEDDINGS}.position_embeddings.columns", AXIS_TABLE),
    Row("embeds.proj.bias", f"{EMBEDDINGS}.patch_embeddings.projection.bias"),
    Row("embeds.norm", f"{EMBEDDINGS}.patch_embeddings.post_norm"),
    Row("norm_pre", f"{EMBEDDINGS}.norm"),
]


@dataclasses.dataclass(frozen=True)
class NaFlexParts(Parts):
    """The parts of a live NaFlexVit from which the arguments are read."""

    @property
    def embeds(self) -> Any:
        """The module of the patch projection, the tokens and the positions."""
        return self.model.embeds

    @property
    def img_size(self) -> tuple[int, int]:
        """Image size of the position grid in pixels, (height, width)."""
        rows, columns = self.embeds.pos_embed_grid_size or (1, 1)
        return rows * self.embeds.patch_size[0], columns * self.embeds.patch_size[1]

    @property
    def rope_type(self) -> str:
        """Name of the rotary embedding's class; empty if there is none."""
        return "" if self.model.rope is None else type(self.model.rope).__name__


# Arguments that only this class has, or that it names or stores differently.
OWN = (
    Argument("img_size", 256, "image_size", module=lambda m: m.img_size),
    Argument("patch_size", 16, "patch_size", module=lambda m: tuple(m.embeds.patch_size)),
    Argument("norm_layer", "layernorm", "norm_type", NORMS | {None: "layer_norm"},
             module=lambda m: m.name_of(m.block.norm1)),
    Argument("act_layer", "gelu", "hidden_act", ACTIVATIONS | {None: "gelu"},
             module=lambda m: m.name_of(m.mlp.act)),
    Argument("global_pool", "map", "pooling", POOLINGS, module=lambda m: m.model.global_pool),
    Argument("qkv_bias", True, "qkv_bias", module=lambda m: m.attention.qkv.bias is not None),
    Argument("qk_norm", False, "qk_norm", QK_NORMS,
             module=lambda m: is_there(m.attention.q_norm)),
    Argument("proj_bias", True, "mlp_bias", module=lambda m: m.attention.proj.bias is not None),
    Argument("scale_mlp_norm", False, "mlp_inner_norm", module=lambda m: is_there(m.mlp.norm)),
    Argument("scale_attn_inner_norm", False, "attention_inner_norm",
             module=lambda m: is_there(m.attention.norm)),
    Argument("init_values", None, "layer_scale_init_value",
             module=lambda m: getattr(m.block.ls1, "init_values", None)),
    Argument("pos_drop_rate", 0.0, "embedding_dropout_prob", module=lambda m: m.embeds.pos_drop.p),
    Argument("patch_drop_rate", 0.0, "patch_dropout_prob",
             module=lambda m: getattr(m.model.patch_drop, "prob", 0.0)),
    Argument("class_token", False, "use_class_token", module=lambda m: m.embeds.cls_token is not None),
    Argument("reg_tokens", 0, "num_register_tokens", module=lambda m: m.model.num_reg_tokens),
    Argument("pos_embed", "learned", "position_embedding_type", POSITIONS,
             module=lambda m: m.embeds.pos_embed_type),
    Argument("pos_embed_interp_mode", "bicubic", None, MODES, module=lambda m: m.embeds.pos_embed_interp_mode),
    Argument("pos_embed_ar_preserving", False, "position_resampling_to_square",
             module=lambda m: m.embeds.pos_embed_ar_preserving),
    Argument("pos_embed_antialias", True, module=lambda m: m.embeds.pos_embed_antialias),
    Argument("pos_embed_align_corners", False, module=lambda m: m.embeds.pos_embed_align_corners),
    Argument("embed_proj_type", "linear", "patch_projection", PROJECTIONS,
             module=lambda m: "linear" if m.embeds.is_linear else "conv"),
    Argument("embed_norm_layer", None,
             module=lambda m: m.name_of(m.embeds.norm) if is_there(m.embeds.norm) else None),
    Argument("pre_norm", False, "embedding_norm", module=lambda m: is_there(m.model.norm_pre)),
    Argument("final_norm", True, module=lambda m: is_there(m.model.norm) or is_there(m.model.fc_norm)),
    Argument("fc_norm", None, module=lambda m: is_there(m.model.fc_norm)),
    Argument("pool_include_prefix", False, "pool_prefix_tokens", module=lambda m: m.model.pool_include_prefix),
    *ATTENTION_POOLING,
    Argument("dynamic_img_pad", False, module=lambda m: m.embeds.dynamic_img_pad),
    Argument("patchify_channels_last", True, module=lambda m: m.embeds.channels_last),
    Argument("enable_patch_interpolator", False, module=lambda m: m.embeds.enable_patch_interpolator),
    Argument("pos_embed_use_grid_sample", False, module=lambda m: m.embeds.pos_embed_use_grid_sample),
    Argument("rope_type", "", module=lambda m: m.rope_type),
)  # fmt: skip
# Arguments that are code and that no entrypoint passes. No part shows them: the comparison of modules detects them.
UNREAD = tuple(
    Argument(name, value, module=functools.partial(lambda value, parts: value, value))
    for name, value in CLOSED.items()
    if name not in {one.name for one in OWN}
)


class NaFlexVit(Constructor):
    """timm's NaFlexVit, without rotary embeddings."""

    name = "NaFlexVit"
    class_paths = ("timm.models.naflexvit.NaFlexVit",)
    layouts = ("naflexvit",)
    data_file = "timm/naflex/architectures.json"
    arguments = (*(one for one in ARGUMENTS if one.name not in {own.name for own in OWN}), *OWN, *UNREAD)
    # The rope_* settings act only with rotary embeddings; the key-only mask changes only padding tokens.
    silent_arguments = frozenset({
        "weight_init", "fix_init", "pos_embed_grid_size", "use_key_only_attn_mask", "qkv_fused", "swiglu_align_to",
        "rope_temperature", "rope_ref_feat_shape", "rope_grid_offset", "rope_grid_indexing", "rope_rotate_half",
        "rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords", "rope_mrope_section",
    })  # fmt: skip
    code_only = ("norm_eps",)
    projection = PROJECTION
    parts = NaFlexParts
    blocks = ("Block",)
    # Without a map of positions, some of these have no effect and are not in our config.
    free = ("pos_embed_interp_mode", "pos_embed_antialias", "pos_embed_align_corners", "pos_embed_ar_preserving")
    block_module = "timm.models.vision_transformer"
    unseen = "how positions are resampled, nor the number of heads"
    any_size = True

    def without_counterpart(self, given: Mapping[str, Any]) -> list[str]:
        """Return the arguments, and combinations of them, without a counterpart in our model."""
        closed = {name: given[name] for name, only in CLOSED.items() if given[name] not in (only, None, "", "none")}
        unknown = [f"{name}={value!r}" for name, value in closed.items()]
        if given["embed_norm_layer"] not in (None, given["norm_layer"]):
            unknown.append(f"embed_norm_layer={given['embed_norm_layer']!r} beside norm_layer={given['norm_layer']!r}")
        if given["pos_embed_antialias"] and given["pos_embed_align_corners"] and given["pos_embed"] == "learned":
            unknown.append("pos_embed_align_corners=True with pos_embed_antialias=True")
        if given["global_pool"] == "token" and not given["class_token"]:
            unknown.append("global_pool='token' without a class token, which timm refuses")
        return unknown

    def joint_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of our config that depend on several arguments, or on part of one."""
        after = given["global_pool"] == "avg" if given["fc_norm"] is None else given["fc_norm"]
        return {
            **pooling_fields(given),
            "position_embedding_on_prefix": False,
            "position_resampling": _resampling(given),
            "position_resampling_to_square": bool(given["pos_embed_ar_preserving"]) and given["pos_embed"] in TABLES,
            "patch_bias": not given["pre_norm"],
            "patch_post_norm": given["embed_norm_layer"] is not None,
            "attention_output_bias": given["proj_bias"],
            "layer_scale_init_value": given["init_values"] or None,
            "final_norm": "none" if not given["final_norm"] else "after_pooling" if after else "before_pooling",
        }

    def joint_arguments(self, config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
        """Return the arguments that depend on several fields of our config, or on the layout."""
        mode, _, option = config.position_resampling.partition("_")
        learned, after = config.position_embedding_type == "learned", config.final_norm == "after_pooling"
        resampled = {
            "pos_embed_interp_mode": mode,
            "pos_embed_antialias": option == "antialias",
            "pos_embed_align_corners": option == "align_corners",
        }
        return {
            **(resampled if learned and mode in MODES else {}),
            "embed_norm_layer": timm_name_for(NORMS, config.norm_type) if config.patch_post_norm else None,
            "final_norm": config.final_norm != "none",
            "fc_norm": None if after == (config.pooling == "mean") or config.final_norm == "none" else after,
            **pooling_arguments(config),
        }

    def lost(self, config: PlainViTConfig, arguments: Mapping[str, Any]) -> list[str]:
        """Return the fields of our config that a model with these arguments would lose, for images of any size."""
        given = {**self.defaults, **arguments}
        lost = super().lost(config, given)
        if config.position_embedding_type in TABLES:
            there = self.joint_fields(given)["position_resampling"]
            if config.position_resampling != there:
                lost.append(f"position_resampling={config.position_resampling!r} (there it would be {there!r})")
        return lost

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        projection = Row(KERNEL, f"{EMBEDDINGS}.patch_embeddings.projection.weight")
        return [projection, *EMBEDDING_ROWS, *sequential_rows(config), *HEAD_ROWS]

    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""
        from timm.models import naflexvit

        given = {name: value for name, value in arguments.items() if CLOSED.get(name, ...) != value}
        outside = {name: given.pop(name) for name in ("in_chans", "num_classes")}
        size = zip(pair(given.pop("img_size")), pair(given["patch_size"]), strict=True)
        given["pos_embed_grid_size"] = tuple(pixels // patch for pixels, patch in size)
        given["act_layer"] = None if given["act_layer"] == "gelu" else given["act_layer"]
        given["embed_norm_layer"] = given["norm_layer"] if given["embed_norm_layer"] else None
        return naflexvit.NaFlexVit(naflexvit.NaFlexVitCfg(**given), **outside)

    def claims(self, config: PlainViTConfig) -> bool:
        """Return whether a model has parts of this class that the VisionTransformer lacks."""
        return config.position_embedding_type == "factorized" or config.position_resampling_to_square

    def is_certain(self, names: Collection[str]) -> bool:
        """Return whether these names certainly belong to this class, not to a VisionTransformer."""
        return KERNEL in names

    def native_size(self, config: PlainViTConfig) -> dict[str, Any]:
        """Return the argument for the size of the position table."""
        return {"pos_embed_grid_size": config.grid_size}

    def could_be(self, arguments: Mapping[str, Any], tensors: StateDict) -> bool:
        """Return whether the hidden size matches the tensors."""
        return KERNEL in tensors and bool(tensors[KERNEL].shape[0] == arguments["embed_dim"])

    def head_and_channels(self, arguments: Mapping[str, Any], tensors: StateDict) -> dict[str, Any]:
        """Return the arguments that users commonly change and that the tensors show."""
        kernel = tensors.get(KERNEL)
        if kernel is None:
            raise MappingError("a NaFlexVit of timm has a projection of patches:", [f"missing: {KERNEL!r}"])
        height, width = pair(arguments["patch_size"])
        channels = kernel.shape[1] if kernel.ndim == 4 else kernel.shape[1] // (height * width)
        return {"num_classes": classes_of(tensors), "in_chans": channels}

    def position_rows(self, tensors: StateDict) -> str:
        """Describe, for errors, the tensor that shows the number of patches."""
        return "its positions are a map"

    def _image_size(
        self, arguments: Mapping[str, Any], tensors: StateDict, hints: Hints, stated: Sequence[tuple[Any, str]]
    ) -> tuple[Any, str] | list[tuple[int, int]]:
        """Return the image size, which the shape of the positions shows, and its origin."""
        height, width = pair(arguments["patch_size"])
        if "embeds.pos_embed" in tensors and tensors["embeds.pos_embed"].ndim == 4:
            rows, columns = tensors["embeds.pos_embed"].shape[1:3]
            return (rows * height, columns * width), "the map of positions"
        if "embeds.pos_embed_y" in tensors and "embeds.pos_embed_x" in tensors:
            rows, columns = (tensors[f"embeds.pos_embed_{axis}"].shape[1] for axis in "yx")
            return (rows * height, columns * width), "the tables of positions"
        size = hints.image_size or arguments["img_size"]
        return pair(size), "no position depends on it"


def _resampling(given: Mapping[str, Any]) -> str:
    """Return our name for how positions are resampled."""
    if given["pos_embed"] != "learned":
        return "bilinear"
    option = {(True, False): "_antialias", (False, True): "_align_corners", (False, False): ""}
    return (
        MODES[given["pos_embed_interp_mode"]]
        + option[bool(given["pos_embed_antialias"]), bool(given["pos_embed_align_corners"])]
    )


NAFLEX = NaFlexVit()
