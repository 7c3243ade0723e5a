"""OpenCLIP's and OpenAI's image towers: live modules, files and folders of whole models or towers, and export.

Only the image tower of a CLIP opens. Its output is the projection of the pooled token, our `pooler_output`. Exports
contain only the tower, and open with `open_clip.create_model(..., pretrained_image_path=...)`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import CheckpointError, ExportError
from ...tables.compare_modules import class_path
from ...tables.engine import IDENTITY, KERNEL_TO_PIXELS, Row, ignoring, revert
from ...tables.format import Description, Hints, Inference, NamedFormat, Probes, StateDict, write_state_dict
from ..timm.eva import originals
from ..timm.source import TIMM
from . import towers, trunks
from .pixels import processor_from_open_clip
from .settings import architectures, config_of, is_trunk, settings_for, vision_settings

VISUAL = "visual."  # prefix of the tower in a whole model
WHOLE_MODELS = {
    "open_clip.model.CLIP",
    "open_clip.model.CustomTextCLIP",
    "open_clip.coca_model.CoCa",
    "clip.model.CLIP",
}

# Tensors of a whole model outside the image tower.
BESIDE = (
    *ignoring("the text tower", "text.*", "transformer.*", "token_embedding.*", "ln_final.*", "positional_embedding"),
    *ignoring("the text tower", "text_projection", "text_projection.*", "attn_mask"),
    *ignoring("the decoder of captions", "text_decoder.*"),
    *ignoring("compares images with texts", "logit_scale", "logit_bias"),
    *ignoring("a setting of OpenAI's model", "input_resolution", "context_length", "vocab_size"),
)

BLOCK, LAYER = originals.RESBLOCK, originals.LAYER
ROWS = [
    *originals.CLIP_ROWS,
    Row(f"{BLOCK}.attn.ln_q", f"{LAYER}.attention.q_norm"),
    Row(f"{BLOCK}.attn.ln_k", f"{LAYER}.attention.k_norm"),
    Row(f"{BLOCK}.attn.ln_inner", f"{LAYER}.attention.norm"),
    Row(f"{BLOCK}.mlp.ln", f"{LAYER}.mlp.norm"),
    Row("ln_post", "vit.pooled_layernorm"),  # our model has this norm, or the one of the rows above
]
KERNEL = ("conv1.weight", "vit.embeddings.patch_embeddings.projection.weight")


@dataclass(frozen=True)
class Layout:
    """The place of a tower's tensors, written as text in reports and hints, such as "visual trunk".

    Args:
        whole: Whether the names are of a whole model, with the prefix "visual.".
        trunk: Whether the tower is a timm model (open_clip's TimmModel).
        head: Whether the projection is the classifier of the timm model.
    """

    whole: bool = False
    trunk: bool = False
    head: bool = False

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse the text of a layout.

        Raises:
            ExportError: The text has unknown words.
        """
        words = text.split()
        if unknown := set(words) - {"visual", "native", "trunk", "head"}:
            raise ExportError(f"layout is {text!r}, with {sorted(unknown)}: expected visual, native, trunk or head")
        return cls("visual" in words, "trunk" in words, "head" in words)

    def __str__(self) -> str:
        words = {"visual": self.whole, "native": not self.trunk, "trunk": self.trunk, "head": self.head}
        return " ".join(word for word, is_there in words.items() if is_there)


class OpenClipFormat(NamedFormat):
    """Image towers of OpenCLIP and OpenAI's CLIP, which have the same tensor names."""

    name = "open_clip"
    suffixes: tuple[str, ...] = (".safetensors", ".pt", ".pth", ".bin")
    opens: Mapping[str, Sequence[str]] = {
        "open_clip": [path.removeprefix("open_clip.") for path in (towers.OPEN_CLIP, trunks.TIMM_MODEL)],
        "clip.model": [path.rpartition(".")[2] for path in towers.OPENAI],
    }
    probes = (Probes("conv1", "transformer.resblocks.{}", None),)  # the last norm may act only on the pooled token

    @property
    def architectures(self) -> Collection[str]:
        """The names of open_clip's models, except for modified ResNets."""
        return architectures()

    def settings_of(self, name: str) -> Mapping[str, Any]:
        """Return what the `open_clip_config.json` of a model says."""
        preprocess_cfg = {key: value for key, value in self.models[name].items() if key != "hub"}
        return {"model_cfg": architectures()[name.partition(".")[0]], "preprocess_cfg": preprocess_cfg}

    def config_of_settings(self, settings: Mapping[str, Any]) -> PlainViTConfig | None:
        """Return our config of the image tower that an `open_clip_config.json` describes."""
        if "model_cfg" not in settings:
            return None
        known = vision_settings(settings["model_cfg"])
        return trunks.config_of(known) if is_trunk(known) else config_of(known)

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether a state dict has the names of a tower, alone or in a whole model."""
        if originals.layout_of(names) is not None:
            return False
        prefix = _prefix(names)
        native = {f"{prefix}conv1.weight", f"{prefix}class_embedding"} <= set(names)
        trunk = f"{prefix}trunk.patch_embed.proj.weight" in names
        return native or (trunk and any(name.startswith(f"{prefix}trunk.blocks.0.") for name in names))

    def names_of_others(self, names: Collection[str]) -> str | None:
        """Return a description of the image tower with these names if it is not a ViT, otherwise None."""
        if "visual.layer1.0.conv1.weight" in names:
            return "a CLIP with a modified ResNet, a convolutional network"
        inside = [name.removeprefix(f"{VISUAL}trunk.") for name in names if name.startswith(f"{VISUAL}trunk.")]
        if not inside:
            return None
        return f"an open_clip model with {TIMM.names_of_others(inside) or 'another model of timm'} as its image tower"

    def has_architecture(self, name: str) -> bool:
        """Return whether a name is one of open_clip's, or one of timm's for a tower that is a timm model."""
        return name in self.architectures or TIMM.has_architecture(name)

    def matches_module(self, module: nn.Module) -> bool:
        """Return whether a live module is one of the towers, or derived from one."""
        paths = {f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__}
        return not paths.isdisjoint({towers.OPEN_CLIP, *towers.OPENAI, trunks.TIMM_MODEL})

    def contains_model(self, module: nn.Module) -> bool:
        """Return whether a live module is a CLIP, whose text tower is not part of an image model."""
        return class_path(module) in WHOLE_MODELS

    def heads_in(self, tensors: StateDict) -> list[str]:
        """Return the modules that project the pooled token of a tower that is a timm model."""
        places = [f"{_prefix(tensors)}{place}" for place in ("head", trunks.OWN_HEAD)]
        return [place for place in places if any(name.startswith(f"{place}.") for name in tensors)]

    def classifiers(self, tensors: StateDict) -> list[str]:
        """Return an empty list: the heads are projections, which are part of the tower's description."""
        return []

    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Read the configuration of a live tower. It determines everything, so no hints are needed.

        Raises:
            ExportError: lists every part that plain-vit does not support.
        """
        path = class_path(module)
        if path == trunks.TIMM_MODEL:
            return trunks.describe_live(module)
        if path not in (towers.OPEN_CLIP, *towers.OPENAI):
            raise ExportError(f"{path} is derived from a CLIP's image tower: pass that itself")
        return replace(towers.describe_live(module), layout="native")

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration of a state dict and of `open_clip_config.json`, if there is one.

        Raises:
            AmbiguousCheckpointError: lists the settings that neither determines.
            ExportError: for a tower that plain-vit cannot represent.
            MappingError: The tensors do not match the named architecture or the folder's configuration.
        """
        prefix = _prefix(tensors)
        tower = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        known, whence = self._settings(settings, hints)
        if f"{prefix}conv1.weight" not in tensors:
            if known is not None and not is_trunk(known):
                raise CheckpointError(f"{whence} describes open_clip's own tower, but the tensors are of timm's")
            found = trunks.describe_checkpoint(tower, known, hints, whence)
        elif known is None and hints.architecture is not None:
            raise CheckpointError(
                f"architecture={hints.architecture!r} is of timm, but the tensors are of open_clip's own tower: omit it"
            )
        elif known is None:
            found = towers.describe_by_hints(tower, hints)
        elif is_trunk(known):
            raise CheckpointError(f"{whence} describes a model of timm, but the tensors are of open_clip's own tower")
        else:
            found = towers.describe_by_settings(tower, known, hints, whence, resizes=bool(settings))
        inferences = list(found.inferences)
        if known is not None and not settings:
            named = Inference("architecture", hints.architecture, "the caller")
            inferences = [named, *(one for one in inferences if one.field != "architecture")]
        layout = replace(Layout.parse(found.layout or "native"), whole=bool(prefix))
        stated_by = found.stated_by if known is None else "open_clip_config.json" if settings else "the caller"
        ignored = BESIDE if prefix else ()
        return replace(found, inferences=inferences, layout=str(layout), ignored=ignored, stated_by=stated_by)

    def _settings(self, settings: Mapping[str, Any], hints: Hints) -> tuple[dict[str, Any] | None, str]:
        """Return the settings of a folder or of a named architecture, and their origin."""
        if "model_cfg" in settings:
            return vision_settings(settings["model_cfg"]), "open_clip_config.json"
        if hints.architecture in architectures():
            return vision_settings(architectures()[str(hints.architecture)]), str(hints.architecture)
        return None, ""

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return a processor with the preprocessing of open_clip's evaluation transform."""
        if "model_cfg" in settings:
            size = vision_settings(settings["model_cfg"])["image_size"]
            return processor_from_open_clip(settings.get("preprocess_cfg") or {}, size), ()
        given = {"mean": hints.image_mean, "std": hints.image_std}
        assumed = "images were prepared as open_clip and OpenAI prepare them by default: the checkpoint does not say"
        if None in given.values():
            assumed += "; give image_mean and image_std if they were normalised otherwise"
        return processor_from_open_clip(given, config.image_size), (assumed,)

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        place = self._layout(config, layout)
        if place.trunk:
            rows = trunks.rows(config, place.head)
        else:
            kernel = KERNEL_TO_PIXELS if config.patch_projection == "linear" else IDENTITY
            rows = [*ROWS, Row(*KERNEL, kernel)]
        return [replace(row, source=f"{VISUAL}{row.source}") for row in rows] if place.whole else rows

    def _layout(self, config: PlainViTConfig, text: str | None) -> Layout:
        """Return the given layout, or else the layout of the first kind of tower that can represent the model."""
        if text is not None and set(text.split()) - {"visual"}:
            return Layout.parse(text)
        whole = text is not None
        try:
            settings_for(config)
            return Layout(whole)
        except (ExportError, ValueError):
            return Layout(whole, trunk=True)

    def for_module(self, tensors: StateDict, config: PlainViTConfig, layout: str | None) -> StateDict:
        """Return tensors by the names of the tower: the names of a whole model without the prefix."""
        return {name.removeprefix(VISUAL): tensor for name, tensor in tensors.items()}

    def independent_module(self, description: Description, settings: Mapping[str, Any]) -> nn.Module | None:
        """Let open_clip build the tower of its `open_clip_config.json`, or of a named architecture."""
        named = next((one.value for one in description.inferences if one.field == "architecture"), None)
        model_cfg = settings.get("model_cfg") or architectures().get(str(named))
        if model_cfg is None:
            return None
        from open_clip.model import _build_vision_tower

        vision_cfg = {**model_cfg["vision_cfg"], "output_tokens": False}
        settled = vision_settings(model_cfg)
        if is_trunk(settled) and settled["timm_proj"] != "none" and not description.config.representation_size:
            return None  # its projection was dropped
        vision_cfg["image_size"] = description.config.image_shape
        if "timm_model_name" in vision_cfg:
            vision_cfg["timm_model_pretrained"] = False
        return _build_vision_tower(model_cfg["embed_dim"], vision_cfg, bool(model_cfg.get("quick_gelu")))

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build open_clip's own tower of this config, with random weights.

        Raises:
            ExportError: lists every part of the model that open_clip cannot represent.
        """
        place = self._layout(config, layout)
        return trunks.build(config, place.head) if place.trunk else towers.build(config)

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> None:
        """Write the state dict of the tower, with `torch.save` or as safetensors; a tower stores no processor."""
        place = self._layout(config, layout)
        if place.trunk:
            TIMM.build_module(trunks.without_projection(config), None)
        else:
            settings_for(config)
        write_state_dict(revert(self.rows(config, layout), tensors, config), path)


def _prefix(names: Collection[str]) -> str:
    """Return the prefix of the tower: "visual." in a whole model, otherwise empty."""
    return VISUAL if any(name.startswith(VISUAL) for name in names) else ""


OPEN_CLIP = OpenClipFormat()
