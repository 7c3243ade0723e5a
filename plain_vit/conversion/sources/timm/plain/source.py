"""timm's VisionTransformer and VisionTransformerDistilled as a source: tensors, live modules and state dicts.

Many checkpoints of this class are bare tensors without a name: `describe_unnamed` opens them with the caller's hints.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .....configuration_plain_vit import PlainViTConfig, stem_stride
from .....errors import AmbiguousCheckpointError, ExportError
from ....tables.engine import Row
from ....tables.format import SCALES, Description, Hints, Inference, StateDict
from ....tables.infer import pair
from ..arguments import ACTIVATIONS, timm_name_for
from ..constructor import Constructor, Labels, classes_of
from ..tables import GAMMA_ROWS, rows_of
from . import dinov2
from .arguments import ARGUMENTS, BLOCKS, joint_arguments, joint_fields, norm_follows_pooling, without_counterpart
from .hints import ASKED, Settings
from .modules import CLASS_PATHS, VisionTransformerParts
from .shapes import CODE_ONLY, expected_observations, first_convolution, observed

# Tensors of MAE checkpoints outside the encoder.
IGNORED = (
    ("decoder_*", "the decoder of the masked autoencoder"),
    ("mask_token", "replaces hidden patches in the decoder of the masked autoencoder"),
)


class VisionTransformer(Constructor):
    """timm's VisionTransformer.

    The layout "gamma_1" has DeiT III's own names of the LayerScale gains. "dinov2" has DINOv2's own names and is
    followed by the number of blocks per chunk if training split the blocks.
    """

    name = "VisionTransformer"
    class_paths = CLASS_PATHS
    layouts = (None, "gamma_1")
    data_file = "timm/architectures.json"
    arguments = ARGUMENTS
    parts = VisionTransformerParts
    blocks = tuple(BLOCKS)
    block_module = "timm.models.vision_transformer"
    silent_arguments = frozenset({"dynamic_img_size", "weight_init", "fix_init"})
    code_only = ("distilled", "stem_depths", "block_fn", "mlp_layer", "num_parallel", "fuse_out_proj",
                 "embed_norm_layer")  # fmt: skip
    most_elongated = 4
    without_counterpart = staticmethod(without_counterpart)
    joint_fields = staticmethod(joint_fields)
    joint_arguments = staticmethod(joint_arguments)

    def as_json(self, args: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments that differ from an architecture's in the words of a `config.json`; None without words.

        A norm given by its name has timm's default epsilon.
        """
        if {"norm_layer", "norm_eps"} & args.keys():
            if wanted["norm_eps"] != self.defaults["norm_eps"] or wanted["embed_norm_layer"] is not None:
                return None
            args = {key: value for key, value in args.items() if key != "norm_eps"}
            args["norm_layer"] = wanted["norm_layer"]
        if "fc_norm" in args and args["fc_norm"] is None:
            args["fc_norm"] = norm_follows_pooling(wanted)
        return args

    # Modules

    def builds(self, layout: str | None) -> bool:
        """Return whether the installed timm builds a model with the names of this layout; None is the default."""
        return layout is None

    def build(self, config: PlainViTConfig, layout: str | None, **given: Any) -> nn.Module:
        """Build timm's own model of this config, with random weights; `given` may set `dynamic_img_size`."""
        if dinov2.is_own(layout):
            config, layout = dinov2.without_mask_token(config), None
        # timm resamples positions in one way, without partial patches. Otherwise its model keeps the native size.
        resamples = config.position_resampling == "bicubic_antialias" and not config.drop_partial_patches
        return super().build(config, layout, **{"dynamic_img_size": resamples, **given})

    def construct(self, arguments: dict[str, Any]) -> nn.Module:
        """Return the model that timm builds from these arguments."""
        from timm import layers
        from timm.models import deit, vision_transformer, vision_transformer_hybrid

        block = getattr(vision_transformer, arguments["block_fn"])
        branches, fused = arguments.pop("num_parallel"), arguments.pop("fuse_out_proj")
        if branches != 2:
            block = functools.partial(block, num_parallel=branches)
        if fused:
            block = functools.partial(block, fuse_out_proj=True)
        if (stem_depths := arguments.pop("stem_depths")) is not None:
            backbone = vision_transformer_hybrid._resnetv2(stem_depths, in_chans=arguments["in_chans"])
            arguments["embed_layer"] = functools.partial(layers.HybridEmbed, backbone=backbone)
            stride = stem_stride(stem_depths)
            arguments["patch_size"] = tuple(size // stride for size in pair(arguments["patch_size"]))
        kind = deit.VisionTransformerDistilled if arguments.pop("distilled") else vision_transformer.VisionTransformer
        classes = {
            "block_fn": block,
            "mlp_layer": getattr(layers, arguments["mlp_layer"]),
            "act_layer": None if arguments["act_layer"] == "gelu" else arguments["act_layer"],  # None is torch's
            "embed_norm_layer": arguments["norm_layer"] if arguments["embed_norm_layer"] else None,
        }
        return kind(**{**arguments, **classes}, weight_init="skip")

    def rebuild(
        self, module: Any, config: PlainViTConfig, layout: str | None, arguments: Mapping[str, Any]
    ) -> nn.Module:
        """Build a live module again."""
        rebuilt: Any = self.build(config, layout, dynamic_img_size=module.dynamic_img_size)
        if module.pos_embed is None:
            rebuilt.pos_drop = module.pos_drop  # timm returns before this dropout
        return rebuilt

    # Tensors

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        rows = rows_of(config)
        if layout == "gamma_1":
            rows = [row for row in rows if row.ours not in {old.ours for old in GAMMA_ROWS}] + GAMMA_ROWS
        return dinov2.rows(rows, config, str(layout)) if dinov2.is_own(layout) else rows

    def has_layout(self, layout: str | None) -> bool:
        """Return whether its tensors have this layout."""
        return super().has_layout(layout) or dinov2.is_own(layout)

    def shown(self, tensors: StateDict) -> StateDict:
        """Return the tensors by timm's names."""
        return tensors if dinov2.layout_of(tensors) is None else dinov2.as_timm(tensors)

    def described(self, arguments: Mapping[str, Any], tensors: StateDict, fields: Mapping[str, Any]) -> Description:
        """Return the config, the layout and the ignored tensors of a state dict, and what timm's model lacks."""
        config, layout, inferences = self.config_of(arguments, **fields), dinov2.layout_of(tensors), []
        if "blocks.0.gamma_1" in tensors:
            layout = "gamma_1"
        elif layout is not None:
            inferences.append(dinov2.adapt(config, tensors))
        if "pre_logits.fc.weight" in tensors:
            config.representation_size = tensors["pre_logits.fc.weight"].shape[0]
            inferences.append(Inference("representation_size", config.representation_size, "pre_logits.fc"))
        return Description(config, layout, inferences, IGNORED if "decoder_embed.weight" in tensors else ())

    def head_and_channels(self, arguments: Mapping[str, Any], tensors: StateDict) -> dict[str, Any]:
        """Return the arguments that users commonly change and that the tensors show."""
        return {"num_classes": classes_of(tensors), "in_chans": observed(tensors)["in_chans"]}

    def could_be(self, arguments: Mapping[str, Any], tensors: StateDict) -> bool:
        """Return whether the hidden size matches the tensors from `shown`."""
        return bool(arguments["embed_dim"] == tensors[f"{self.projection}.weight"].shape[0])

    def faults(self, arguments: Mapping[str, Any], tensors: StateDict) -> list[str]:
        """Return how a state dict differs from the tensors of a model with these arguments."""
        known = observed(self.shown(tensors))
        there = expected_observations({**self.defaults, **arguments}, known)
        return [f"{key} is {there[key]!r} there and {known[key]!r} in the tensors"
                for key in known if there[key] != known[key]]  # fmt: skip

    def given_by(self, architecture: str, model_args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that a `config.json` adds to its architecture.

        Raises:
            ExportError: The epsilon of the patch norm differs from the block norms': a norm given by name has timm's
                default epsilon.
        """
        own = {**self.defaults, **self.architectures[self.entrypoint(architecture)]}
        given = super().given_by(architecture, model_args)
        for name in ("norm_layer", "embed_norm_layer", "act_layer"):
            if isinstance(given.get(name), str):
                given[name] = given[name].lower() if name == "act_layer" else given[name].lower().replace("_", "")
        named = self.defaults["norm_eps"]
        blocks, patches = (named if given.get(name) else own["norm_eps"] for name in ("norm_layer", "embed_norm_layer"))
        if {**own, **given}["embed_norm_layer"] is not None and blocks != patches:
            raise ExportError(
                f"plain-vit has no counterpart of parts of this timm model ({self.name}):",
                [f"an epsilon of {patches} in the norm of the patches and of {blocks} in the others"],
            )
        if own["distilled"]:
            given.pop("pos_embed", None)  # VisionTransformerDistilled ignores it and always has a position table
        return {**given, "norm_eps": blocks} if given.get("norm_layer") else given

    def norms_shown(self, tensors: StateDict) -> dict[str, Any]:
        """Return the arguments of the final norms that the tensors show, if the pooling is not the architecture's."""
        return {"fc_norm": "fc_norm.weight" in tensors}

    def set_in_code(
        self, arguments: dict[str, Any], given: Mapping[str, Any], tensors: StateDict, hints: Hints
    ) -> tuple[dict[str, Any], list[Inference]]:
        """Add the classes that the tensors show, and that no `config.json` can store, to the arguments.

        Raises:
            AmbiguousCheckpointError: for settings that such a class does not determine.
        """
        known, inferences = observed(tensors), []
        shown, arguments = expected_observations(arguments, known), dict(arguments)
        open_: dict[str, list[object]] = {}
        for name in CODE_ONLY:
            if shown[name] == known[name]:
                continue
            inferences.append(Inference(name, known[name], "the tensors: no config.json can hold a class"))
            if name == "embed_norm":
                arguments["embed_norm_layer"] = known["norm_layer"] if known[name] else None
                if known[name]:  # its epsilon may differ from the other norms'
                    open_["layer_norm_eps"] = [arguments["norm_eps"]]
            elif name == "stem_depths":
                stride = 1 if known[name] is None else stem_stride(known[name])
                kernel = pair(arguments["patch_size"])
                arguments |= {name: known[name], "patch_size": tuple(side * stride for side in kernel)}
            else:
                arguments[name] = known[name]
            if name == "mlp_layer" and "act_layer" not in given:
                open_["hidden_act"] = sorted(dict.fromkeys(ACTIVATIONS.values()), key=lambda act: act != "silu")
            if name == "mlp_layer" and known[name] == "SwiGLUPacked":
                open_["mlp_type"] = ["swiglu_packed"]
            if name == "norm_layer":
                open_["layer_norm_eps"] = [1e-6, 1e-5]
                if known[name] == "rmsnorm":
                    open_["norm_type"] = ["rms_norm"]
        if still := {name: values for name, values in open_.items() if getattr(hints, name) is None}:
            changed = ", ".join(f"{inference.field}={inference.value}" for inference in inferences)
            raise AmbiguousCheckpointError(
                f"the tensors show that the model was built with {changed} in code, which no config.json can hold; "
                "give what else that code said",
                still,
            )
        if "hidden_act" in open_:
            arguments["act_layer"] = timm_name_for(ACTIVATIONS, str(hints.hidden_act))
        if shown["norm_layer"] != known["norm_layer"]:
            arguments["norm_eps"] = hints.layer_norm_eps
        return arguments, inferences

    def advice(self, config: PlainViTConfig, hints: Hints) -> str:
        """Return how a model opens that differs from its architecture: with hints that fully describe it."""
        full = {
            "num_attention_heads": config.num_attention_heads,
            "attention_scale": SCALES[0],
            "layer_norm_eps": config.layer_norm_eps,
            "hidden_act": config.hidden_act,
            "pooling": config.pooling,
            "block_type": config.block_type,
            "image_size": config.image_shape,
        }
        if config.position_embedding_type == "none":
            full |= {"position_embedding_type": "none", "rope_type": "none"}
        if config.num_prefix_tokens:
            full["pool_prefix_tokens"] = config.pool_prefix_tokens
        full |= {name: value for name, value in hints.given().items() if name not in ("architecture", "layout", "key")}
        listed = ", ".join(f"{key}={value!r}" for key, value in full.items())
        return f"; for a modified model omit the architecture, and give all of: {listed}"

    # Folders

    def first_convolution(self, config: PlainViTConfig) -> str:
        """Return timm's name of the layer that reads the image."""
        return first_convolution(None if config.resnet_stem is None else config.resnet_stem["depths"])

    def resampling(self, config: PlainViTConfig, size: Sequence[int]) -> dict[str, Any]:
        """Return the arguments with which timm's model takes images of another size as our model does, if any."""
        fits = not any(side % patch for side, patch in zip(size, config.patch_shape, strict=True))
        resamples = tuple(size) != config.image_shape and fits and config.position_resampling == "bicubic_antialias"
        return {"dynamic_img_size": True} if resamples else {}

    # Bare state dicts

    def describe_unnamed(self, tensors: StateDict, hints: Hints, alike: Sequence[str], labels: Labels) -> Description:
        """Return the description of a state dict without an architecture name, from the caller's hints.

        Args:
            tensors: The state dict.
            hints: The caller's hints.
            alike: Architectures of timm's other classes with the same tensors.
            labels: Returns the label fields of our config for a number of classes.

        Raises:
            AmbiguousCheckpointError: lists all missing settings, with the architectures that fit.
            CheckpointError: for impossible hints.
        """
        shown = self.shown(tensors)
        known = observed(shown)
        rows = shown["pos_embed"].shape[1] if known["pos_embed"] == "learn" else None
        settings = Settings(known, rows, hints)
        if settings.open:
            raise self._question(settings, self.fitting(tensors, hints), alike)
        arguments = settings.arguments | self.head_and_channels(settings.arguments, shown)
        fields = {**settings.fields, **labels(arguments["num_classes"])}
        description = self.described(arguments, tensors, fields)
        kept = [one for one in settings.inferences
                if one.field != "position_embedding_on_prefix" or not dinov2.is_own(description.layout)]  # fmt: skip
        return replace(description, inferences=[*kept, *description.inferences])

    def _question(
        self, settings: Settings, names: Mapping[str, Sequence[object] | None], alike: Sequence[str]
    ) -> AmbiguousCheckpointError:
        """Return the error for missing settings; it asks for the image size if no architecture has this grid."""
        first = next(iter(names.values()), None)
        sizes = {} if first is None else {"image_size": first}
        asked = {name: settings.open[name] for name in ASKED if name in settings.open}
        message = "the tensors do not show everything that changes the logits; give"
        if settings.rows is None and asked.keys() & {"position_embedding_type", "rope_type"}:
            message = (
                "the tensors do not show everything that changes the logits, such as positions: there is no table of "
                "them, and code may compute them (sines and cosines, a rotation of queries and keys). Give the "
                "architecture, or for a model without any positions the settings"
            )
        elif alike:
            message = (
                "the tensors do not show everything that changes the logits, such as a rotation of queries and keys; "
                "give the architecture, or for a model without rotation the settings"
            )
        if names or alike:
            return AmbiguousCheckpointError(message, {"architecture": [*names, *alike], **sizes}, asked)
        return AmbiguousCheckpointError(message, asked)


VISION_TRANSFORMER = VisionTransformer()
