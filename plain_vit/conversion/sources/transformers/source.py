"""transformers' own Vision Transformers: live modules, files with current and 4.x names, and export.

Each family (ViT and its kin, DINOv2 and 3, BEiT, the vision towers of CLIP, SigLIP and of models that contain such a
tower, ...) is a table of tensors and a table of settings in `families.py`, both read in either direction. To find out
what a class cannot represent, our config is written as its settings, read back and compared.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ....configuration_plain_vit import PlainViTConfig
from ....errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    MissingPackageError,
    PlainViTError,
    UnknownFormatError,
    did_you_mean,
    few,
)
from ....image_processing_plain_vit import SourcePreprocessing
from ...tables.compare_modules import MASKED, class_path, differences, empty_model, lost_fields, meta_device
from ...tables.engine import Row, ignored_names, revert, sources_of, without_prefix
from ...tables.format import DROP_HEAD, UNSEEN, Contract, Description, Format, Hints, Inference, StateDict
from ...tables.infer import pair
from . import bare
from .families import (
    ARCHITECTURES,
    AROUND,
    BOOKKEEPING,
    CANDIDATES,
    COMPOSITES,
    CONTAINERS,
    KERNEL,
    KERNELS,
    LAYER,
    NOT_OURS,
    ON_THE_NORM,
    PATCHES,
    PROBES,
    UNREAD_POOLER,
    Architecture,
    container_of,
    original_in,
    per_channel,
)
from .installed import STAND_INS, class_named, config_class
from .pixels import processor_from_transformers, stock_processor, uncut

# Attributes that do not affect the outputs: stored constructor arguments, training switches, plans for several devices.
# The configuration is read from the model; all its parts share it. `_changed_values` checks what is left out of it.
SILENT_ATTRIBUTES = {
    "all_tied_weights_keys", "backbone_type", "config", "fullatt_block_indexes", "gradient_checkpointing",
    "kernel_config", "loss_type",
    "name_or_path", "num_labels", "num_patches", "num_positions", "warnings_issued",
    "_can_record_outputs", "_ep_plan", "_fsdp_plan", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save",
    "_no_split_modules", "_output_capturing_hooks_installed", "_pp_plan", "_skip_keys_device_placement", "_tp_plan",
    # Left by loading, training and preparing a model. Hooks and replaced functions are detected separately.
    "_gradient_checkpointing_func", "_is_accelerate_prepared", "_require_grads_hook", "_require_grads_hooks",
    "_use_kernels", "_weight_conversions", "hf_device_map",
}  # fmt: skip
# Attention implementations that differ only in the order of operations.
ATTENTIONS = {None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}
PLACES = {"image_grid_thw", "image_position_ids"}  # beside patches that are not in raster order, or not packed as ours
TYPES_THAT_NORMALISE = {one.family.model_type for one in ARCHITECTURES.values() if one.family.normalises}
SHOWN_BY_TENSORS = {"projection_dim", "use_head", "vision_use_head"}
# `model_type` of the models that open. timm's wrapper is read by the timm source.
MODEL_TYPES = [*dict.fromkeys(one.family.model_type for one in ARCHITECTURES.values()), *COMPOSITES, "timm_wrapper"]
# Hints that a config.json does not determine.
HINTS = {"layout", "key", "image_mean", "image_std", "drop", "id2label"}
# Classes whose live modules are read as a whole. In other containers, the module inside is found.
LIVE = {*ARCHITECTURES, *(name for name, container in CONTAINERS.items() if container.whole)}
POSITION_COUNTERS = ("*position_ids", "counts the positions")


class TransformersFormat(Format):
    """transformers' own Vision Transformers.

    A layout is the name of a class, followed by a second word if the tensors come from a file, without the prefix of
    the encoder: "4.x" for the names that transformers writes to files, "bare" for the names of current modules.
    """

    name = "transformers"
    suffixes: tuple[str, ...] = ()
    opens: Mapping[str, Sequence[str]] = {"transformers.models": MODEL_TYPES}
    architectures = (*ARCHITECTURES, *CONTAINERS)
    probes = PROBES
    heads = ("classifier", "cls_classifier", "distillation_classifier")

    def config_of_settings(self, settings: Mapping[str, Any]) -> PlainViTConfig | None:
        """Return our config of the model that a `config.json` describes, or of the only encoder in it."""
        if (original := original_in(settings)) is not None:
            return self.config_of_settings(original)
        if (outer := _other_type(settings)) is not None:
            towers = _towers_in(_read_config(CONFIG_MAPPING[outer], settings))
            return self.config_of_settings(towers[0]) if len(towers) == 1 else None
        if settings.get("model_type") not in MODEL_TYPES or "architecture" in settings:  # of timm's wrapper
            return None
        name, _ = _class_of(settings, {}, Hints())
        kind = class_named(name)
        whole: PreTrainedConfig = config_class(name, settings["model_type"]).from_dict(dict(settings))
        with meta_device():
            tensors = kind(whole if isinstance(whole, kind.config_class) else _tower_config(whole)).state_dict()
        return self._described(name, settings, tensors, Hints()).config

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether a state dict has the patch embeddings and the first block of one of the families."""
        prefix, found = _prefix(names), set(names)
        # In some files (MSN, BEiT backbones), the blocks lack the prefix of the embeddings.
        ends = [end for end in PATCHES if any(f".{name}".endswith(f".{end}") for name in names)]
        marks = {mark for end in ends for mark in _marks()[end]}
        first = {f"{place}{mark}{leaf}" for place in ("", prefix) for mark in marks for leaf in ("", ".weight")}
        has_block = not found.isdisjoint(first) or not any(".0." in name for name in names)  # or the model has no block
        return prefix is not None and has_block and any(name.endswith(NOT_OURS) for name in names)

    def settings_of_others(self, settings: Mapping[str, Any]) -> str | None:
        """Return the type of a transformers model that plain-vit does not open, whatever its tensors are called."""
        return None if (model_type := _other_type(settings)) is None else f"transformers' {_closed(model_type)}"

    def owns(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a `config.json` has the `model_type` of a class that opens."""
        model_type = settings.get("model_type")  # of any type
        return any(one.family.model_type == model_type for one in ARCHITECTURES.values())

    def models_inside(self, settings: Mapping[str, Any], tensors: StateDict) -> Mapping[str, Mapping[str, Any]]:
        """Return the vision towers of a model that does not open as a whole, such as LLaVA."""
        if (original := original_in(settings)) is not None:
            return dict.fromkeys(_prefixes(tensors), original)
        if (model_type := _other_type(settings)) is None:
            return {}
        towers = _towers_in(_read_config(CONFIG_MAPPING[model_type], settings))
        found: dict[str, list[dict[str, Any]]] = {}
        for prefix in sorted(_prefixes(tensors)):
            own = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
            fitting = [one for one in towers if _unread(one["architectures"][0], one, own, Hints()) is not None]
            found |= {prefix: fitting} if fitting else {}
        return {prefix: fitting[0] for prefix, fitting in found.items()}

    def unread(self, tensors: StateDict) -> dict[str, str]:
        """Return mask tokens outside the embeddings; those inside are kept, and DINOv2's and TIPS's, with two axes."""
        found = super().unread(tensors)
        outside = {name: reason for name, reason in found.items() if not name.endswith("embeddings.mask_token")}
        return {name: reason for name, reason in outside.items() if name != "mask_token" or tensors[name].ndim != 2}

    def matches_module(self, module: nn.Module) -> bool:
        """Return whether a live module is an instance of one of the classes."""
        return any(
            base.__module__.startswith("transformers.models.") and base.__name__ in LIVE
            for base in type(module).__mro__
        )

    def contains_model(self, module: nn.Module) -> bool:
        """Return whether a live module is of a class that contains a vision tower and other parts."""
        if not type(module).__module__.startswith("transformers.models."):
            return False
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        return type(module).__name__ in CONTAINERS or _other_type({"model_type": model_type}) is not None

    def contract_of(self, module: nn.Module) -> Contract | None:
        """Return how a class of transformers takes images."""
        name = container_of(type(module).__name__).holds
        is_theirs = type(module).__module__.startswith("transformers.models.") and name in ARCHITECTURES
        return ARCHITECTURES[name].family.contract if is_theirs else None

    def describe_module(self, module: Any, hints: Hints) -> Description:
        """Read the configuration of a live module. It determines everything, so no hints are needed.

        Raises:
            ExportError: lists every part and every setting that plain-vit does not support.
        """
        name = type(module).__name__
        if not class_path(module).startswith("transformers.models.") or name not in LIVE:
            raise ExportError(f"{class_path(module)} is derived from a class of transformers: pass that itself")
        config, inferences, ignored = _describe(name, module.config.to_dict(), module.state_dict(), hints)
        name = container_of(name).holds
        with meta_device():
            rebuilt = self.build_module(config, name)
        if config.pooling == "cls" and getattr(module, "pooler", module) is None:
            rebuilt.pooler = None  # type: ignore[assignment]  # a pooler of the class token may have no weights
        faults = [*_changed_parts(module, rebuilt), *_changed_values(module)]
        unread = ignored_names([fault.partition(" is ")[0] for fault in faults], ignored)
        if faults := [fault for fault in faults if fault.partition(" is ")[0] not in unread]:
            raise ExportError(f"plain-vit does not know parts of this {name} (found, not expected):", faults)
        is_inner = _prefix(module.state_dict()) != _names_in_modules(name)[1]
        return Description(config, f"{name} bare" if is_inner else name, inferences, ignored)

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration from `config.json`, or without one from the tensors and hints.

        Raises:
            CheckpointError: for unsupported settings; lists all of them.
        """
        if "model_type" not in settings:
            return self._describe_bare(tensors, hints)
        if superfluous := [name for name, value in vars(hints).items() if value is not None and name not in HINTS]:
            raise CheckpointError(f"config.json determines everything: omit {', '.join(superfluous)}")
        name, source = _class_of(settings, tensors, hints)
        described = self._described(name, settings, tensors, hints)
        settled = [Inference(field, getattr(described.config, field), "config.json") for field in UNSEEN]
        layout = Inference("layout", str(described.layout).split()[0], source)
        stated_by = source if source == "the caller" else f"{source}, which names {name},"
        return replace(described, inferences=[layout, *settled, *described.inferences], stated_by=stated_by)

    def _describe_bare(self, tensors: StateDict, hints: Hints) -> Description:
        """Read the configuration of tensors without a `config.json`.

        Raises:
            AmbiguousCheckpointError: lists the settings and classes that neither tensors nor hints determine.
            CheckpointError: The tensors match none of the classes.
        """
        name, prefix = bare.named(hints), _prefix(tensors) or ""
        if name is None:
            raise bare.ask(self._fitting(tensors, hints), is_named=False, has_head=bool(self.heads_in(tensors)))
        found = bare.read(name, tensors, prefix, hints)
        if found.open:
            raise bare.ask({name: found}, is_named=True, has_head=False)
        described = self._described(name, found.settings, tensors, hints)
        unseen = [Inference("architecture", name, "the caller"), Inference("layout", name, "the caller")]
        scale = Inference("attention_scale", "head_dim**-0.5", "transformers' code, the only value there")
        inferences = [*unseen, scale, *found.inferences, *described.inferences]
        return replace(described, inferences=inferences, stated_by="the caller")

    def _fitting(self, tensors: StateDict, hints: Hints) -> dict[str, bare.Bare]:
        """Return the classes that have exactly these tensors, with the settings that the tensors show.

        Raises:
            CheckpointError: There is no such class.
        """
        fitting, prefix = {}, _prefix(tensors) or ""
        for name in (*ARCHITECTURES, *CONTAINERS):
            if not bare.has_parts(name, tensors, prefix, is_headless=bool(hints.drop)):
                continue
            with suppress(MappingError, MissingPackageError):
                found = bare.read(name, tensors, prefix, hints)
                heads: Sequence[Any] = found.open.get("num_attention_heads", [hints.num_attention_heads])
                if any(self._fits(name, tensors, replace(hints, num_attention_heads=count)) for count in heads):
                    fitting[name] = found
        if not fitting:
            outside = [repr(one) for one in tensors if not one.startswith(prefix)]
            place = f"key= with its place, which ends in {prefix[:-1]!r}, opens it alone"
            beside = f" {few(outside)} are outside the encoder: {place}."
            raise CheckpointError(
                "the tensors have names of transformers, but are those of no class that plain-vit opens without its "
                "config.json: give the folder with it, or architecture=, the class, to see how they differ from it."
                + (beside if outside else "")
            )
        return fitting

    def _fits(self, name: str, tensors: StateDict, hints: Hints) -> bool:
        """Return whether a class has exactly these tensors, given the first candidate of every open setting.

        Raises:
            MappingError: The class has other tensors, whatever the number of heads.
        """
        settings = bare.read(name, tensors, _prefix(tensors) or "", hints).settings
        try:
            described = self._described(name, settings, tensors, hints)
        except MappingError:
            raise
        except (PlainViTError, ValueError, LookupError):  # such as a head width that rotary embeddings cannot have
            return False
        whole = empty_model(described.config).state_dict()
        expected = revert(self.rows(described.config, described.layout), whole, described.config)
        own = without_prefix(tensors, described.prefix, described.ignored)
        known = [row for row in described.ignored if row not in UNREAD_POOLER]  # not saved by the class itself
        unused = ignored_names([one for one in own if one not in expected], known)
        if differing := expected.keys() ^ (own.keys() - unused):
            raise MappingError("the tensors are not those of the class:", sorted(differing))
        return all(tensor.shape == own[key].shape for key, tensor in expected.items())

    def _described(self, name: str, settings: Mapping[str, Any], tensors: StateDict, hints: Hints) -> Description:
        """Return the description of a checkpoint of this class with these settings."""
        try:
            config, inferences, ignored = _describe(name, settings, tensors, hints)
        except ExportError as error:
            raise CheckpointError(str(error)) from error
        layout = _layout_in_file(name, tensors)
        return Description(config, layout, inferences, ignored, _prefix(tensors) or "")

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return transformers' own processor as described by `preprocessor_config.json`, or else a default."""
        mean, std = (per_channel(value, config) for value in (config.image_mean, config.image_std))
        around = _other_type(settings)
        towers = [settings] if around is None else _towers_in(_read_config(CONFIG_MAPPING[around], settings))
        normalises = any(one.get("model_type") in TYPES_THAT_NORMALISE for one in towers)  # and no processor does
        if normalises and not preprocessor:
            hints = replace(hints, image_mean=hints.image_mean or mean, image_std=hints.image_std or std)
        default = super().image_processor(config, settings, preprocessor, hints)
        if not preprocessor:
            return default
        processor: Any = processor_from_transformers(preprocessor, settings)
        if normalises:
            processor.do_normalize, processor.image_mean, processor.image_std = True, mean, std
        if around is None and PLACES.isdisjoint(processor.model_input_names):
            return processor, ()
        whole, notes = uncut(processor)
        return default if whole is None and hints.image_mean is not None else (whole, notes)

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        name, *words = (layout or _class_for(config)).split()
        architecture = _architecture(name)
        on_disk, prefix = ("4.x" in words, "") if words else _names_in_modules(name)
        encoder = architecture.family.rows_of(config, on_disk)
        encoder = [replace(row, source=tuple(prefix + name for name in row.sources)) for row in encoder]
        return [*encoder, *architecture.head.rows]

    def independent_module(self, description: Description, settings: Mapping[str, Any]) -> nn.Module | None:
        """Build the source's own class from its `config.json`."""
        config, name = description.config, (description.layout or "").split()[0]
        if "model_type" not in settings or name in STAND_INS:
            return None
        kind, architecture = class_named(name), _architecture(name)
        whole: PreTrainedConfig = config_class(name, settings["model_type"]).from_dict(dict(settings))
        tower = _tower_config(whole)
        whole.num_labels = config.num_labels or 0  # the caller may name other labels, or drop the classifier
        # Parts that the tensors show to exist or not, whatever config.json says: a tower may be saved without its head.
        left_out = {name: getattr(type(tower)(), name) for name in architecture.family.left_out if hasattr(tower, name)}
        shown = {name: value for name, value in architecture.head.write(config).items() if name in SHOWN_BY_TENSORS}
        for setting, value in {**shown, **left_out}.items():
            setattr(tower, setting, value)
        return kind(whole if isinstance(whole, kind.config_class) else tower, **architecture.head.options(config))

    def build_module(self, config: PlainViTConfig, layout: str | None) -> PreTrainedModel:
        """Build transformers' own model of this config, with random weights.

        Raises:
            ExportError: lists every part of the model that the class cannot represent.
        """
        name = (layout or _class_for(config)).split()[0]
        stock, options = _recipe(config, name)
        model: PreTrainedModel = class_named(name)(stock, **options)
        return model

    def for_module(self, tensors: StateDict, config: PlainViTConfig, layout: str | None) -> StateDict:
        """Return tensors by the names of the module; transformers' own loader renames the tensors of a file."""
        name, *words = (layout or _class_for(config)).split()
        architecture = _architecture(name)
        if words and architecture.family.loader is not None:
            return _loaded_whole(_recipe(config, name)[0], tensors, *architecture.family.loader)
        unread = _unread_tensors(name, config, next(iter(tensors.values())))
        if not words:
            return {**tensors, **unread}
        beside = tuple(str(row.source) for row in architecture.head.rows)
        prefix = _names_in_modules(name)[1]
        stored = {tensor if tensor.startswith(beside) else prefix + tensor: tensors[tensor] for tensor in tensors}
        stock, options = _recipe(config, name)
        loaded = class_named(name).from_pretrained(None, config=stock, state_dict=stored | unread, **options)
        return loaded.state_dict()

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> None:
        """Write the folder that transformers itself writes, which its `from_pretrained` opens without plain-vit.

        Raises:
            ExportError: lists every part of the model or the image processor that transformers cannot represent.
        """
        name = (layout or _class_for(config)).split()[0]
        if name in STAND_INS:
            raise ExportError(
                f"{name} is code of its repository, which is not run: layout={_class_for(config)!r} writes a class of "
                "transformers with the same tokens"
            )
        processor = image_processor
        if isinstance(image_processor, SourcePreprocessing):
            processor = stock_processor(image_processor)
        with meta_device():
            module = self.build_module(config, name)
        state = self.for_module(revert(self.rows(config, name), tensors, config), config, name)
        module.load_state_dict(dict(state), assign=True)
        module.save_pretrained(path)
        if processor is not None:
            processor.save_pretrained(path)


# Configuration of a source


def _changed_parts(module: nn.Module, rebuilt: nn.Module) -> list[str]:
    """Return the differences of a model to a rebuilt one; of a container, only the parts that the rebuilt model has."""
    same = next((part for part in rebuilt.modules() if type(part) is type(module)), None)
    if same is not None:
        return differences(module, same, KERNELS, SILENT_ATTRIBUTES)
    return [
        f"{path}.{fault}"
        for path, part in rebuilt.named_children()
        for fault in differences(module.get_submodule(path), part, KERNELS, SILENT_ATTRIBUTES)
    ]


def _changed_values(module: PreTrainedModel) -> list[str]:
    """Return the settings and buffers that differ from the model's own configuration and affect a forward pass."""
    faults = []
    config = module.config
    said = [one.to_dict() for one in (config, _tower_config(config))]
    for path, part in module.named_modules():
        own = getattr(part, "config", None)
        if isinstance(own, PreTrainedConfig) and own is not config and own.to_dict() not in said:
            faults.append(f"{path}.config is another configuration than the model's")
        if getattr(part, "_use_kernels", False):
            faults.append(f"{path or 'model'}._use_kernels is True: kernels of the Hub replace its own functions")
        attention = getattr(own, "_attn_implementation", None)
        if attention not in ATTENTIONS:
            faults.append(f"{path}.config._attn_implementation is {attention!r}, which may compute anything")
        computed = next((name for name in ("inv_freq", "freqs_ci") if hasattr(part, name)), None)
        if computed is not None and not (frequencies := getattr(part, computed)).is_meta:
            with torch.device("cpu"):
                fresh = getattr(type(part)(own), computed)
            if not torch.equal(frequencies.cpu(), fresh):
                faults.append(
                    f"{path}.{computed} has not the values of its configuration: a cast such as .to(torch.bfloat16) "
                    "rounds them; load the model with dtype= instead, which does not"
                )
        layers = getattr(part, "fullatt_block_indexes", ())
        if layers and [*layers] != [*getattr(own, "fullatt_block_indexes", ())]:
            faults.append(f"{path}.fullatt_block_indexes is {layers}, which its configuration does not say")
        counters = part._buffers.get("position_ids")
        if counters is not None and not counters.is_meta:
            counted = torch.arange(counters.shape[-1], device=counters.device)
            if not torch.equal(counters.flatten(), counted):
                faults.append(f"{path}.position_ids does not count the positions from 0")
    return faults


def _other_type(settings: Mapping[str, Any]) -> str | None:
    """Return the `model_type` of a `config.json` if it is of transformers, and of no model that opens as a whole."""
    model_type = settings.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    is_around = settings.get("backbone_config") and not settings.get("is_hybrid")
    return str(model_type) if known and (model_type not in MODEL_TYPES or is_around) else None


def _towers_in(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the different configurations of encoders inside another, each with the class of an encoder."""
    towers: list[dict[str, Any]] = []
    for inner in (one for one in vars(config).values() if isinstance(one, PreTrainedConfig)):
        kind = type(inner).model_type  # published files of Idefics say that of the whole model
        name = next((name for name, one in ARCHITECTURES.items() if one.family.model_type == kind), None)
        found = [{**inner.to_dict(), "architectures": [name]}] if name else _towers_in(inner)
        towers += [one for one in found if one not in towers]
    return towers


def _prefixes(names: Collection[str]) -> set[str]:
    """Return the prefixes of all encoders."""
    return {name.removesuffix(end) for name in names for end in PATCHES if f".{name}".endswith(f".{end}")}


def _prefix(names: Collection[str]) -> str | None:
    """Return the prefix of the encoder; None if there is no encoder."""
    found = _prefixes(names)
    if found == {""}:
        return next((one for one in ON_THE_NORM if any(name.startswith(f"{one}layernorm.") for name in names)), "")
    return found.pop() if len(found) == 1 else None


def _tower_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the vision tower's configuration if `config` contains one, otherwise `config` itself."""
    return getattr(config, "vision_config", config)


@functools.cache
def _marks() -> Mapping[str, set[str]]:
    """Return the names of the first block's projections of queries, by the name of the family's patch projection."""
    marks: dict[str, set[str]] = {end: set() for end in PATCHES}
    for family in (one.family for one in ARCHITECTURES.values()):
        rows = [*family.rows, *family.on_disk]
        query = f"{LAYER}.attention.q_proj"
        queries = [row for row in rows if any(name.removesuffix(".weight") == query for name in row.targets)]
        first = {name.replace("{}", "0") for row in queries for name in row.sources}
        for row in rows:
            if row.ours == KERNEL:
                marks[family.mark or row.sources[0]] |= first
    return marks


def _closed(model_type: str) -> str:
    near = "" if model_type in CONFIG_MAPPING else did_you_mean(model_type, MODEL_TYPES)
    return f"model_type {model_type!r}, which plain-vit does not open: it opens {', '.join(MODEL_TYPES)}{near}"


def _architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise UnknownFormatError(f"layout is {name!r}: expected one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _class_of(settings: Mapping[str, Any], tensors: StateDict, hints: Hints) -> tuple[str, str]:
    """Return the class that a checkpoint was saved from, and what names it.

    Raises:
        AmbiguousCheckpointError: Nothing names a class; lists the classes with these tensors.
        UnknownFormatError: The named class does not open.
    """
    model_type = settings["model_type"]
    tower = COMPOSITES.get(model_type, model_type)
    of_type = [name for name, one in ARCHITECTURES.items() if one.family.model_type == tower]
    if not of_type:
        raise UnknownFormatError(f"config.json is of {_closed(str(model_type))}")
    of_type += [name for name, container in CONTAINERS.items() if container.holds in of_type]
    named = settings.get("architectures") or []
    if hints.layout is not None:
        name, source = hints.layout.split()[0], "the caller"
    elif named:
        name, source = named[0], "config.json"
    else:
        raise _without_class(of_type, settings, tensors, hints)
    if name not in of_type or len(named) > 1:
        raise UnknownFormatError(
            f"config.json is of {', '.join(named) or 'no class'} and model_type {model_type!r}, taken as {name}: "
            f"expected layout= one of {', '.join(of_type)}"
        )
    return name, source


def _without_class(
    of_type: Sequence[str], settings: Mapping[str, Any], tensors: StateDict, hints: Hints
) -> AmbiguousCheckpointError:
    """Return the error for a `config.json` without a class, which is needed to know which tokens the head reads."""
    fitting = {name: names for name in of_type if (names := _unread(name, settings, tensors, hints)) is not None}
    beside = [f"{name} does not read {', '.join(names)}" for name, names in fitting.items() if names]
    own = f"; a head of your own may read another token: {DROP_HEAD}"
    return AmbiguousCheckpointError(
        "config.json names no class (architectures), and the tensors do not show which tokens a head reads. Give the "
        "class of transformers that computes what these tensors were trained for"
        + (own if TRANSFORMERS.heads_in(tensors) else "")
        + (f" ({'; '.join(beside)})" if beside else ""),
        {"layout": list(fitting or of_type)},
    )


def _unread(name: str, settings: Mapping[str, Any], tensors: StateDict, hints: Hints) -> list[str] | None:
    """Return the tensors that no output of a class depends on; None if the class has other names or shapes."""
    try:
        config, _, ignored = _describe(name, settings, tensors, hints)
        short = without_prefix(tensors, _prefix(tensors) or "", ignored)
        rows = TRANSFORMERS.rows(config, _layout_in_file(name, tensors))
        expected = revert(rows, empty_model(config).state_dict(), config)
    except PlainViTError:
        return None
    unread = list(ignored_names([one for one in short if one not in expected], ignored))
    shapes = {one: tensor.shape for one, tensor in short.items() if one not in unread}
    return unread if shapes == {one: tensor.shape for one, tensor in expected.items()} else None


@functools.cache
def _names_in_modules(name: str) -> tuple[bool, str]:
    """Return whether the installed class names its blocks as files do, and the prefix of its encoder.

    transformers renamed the modules in 5.6, 5.9 or 5.18, depending on the family.
    """
    kind = class_named(name)
    with meta_device():
        names = kind(kind.config_class()).state_dict()
    return _layout_in_file(name, names).endswith("4.x"), _prefix(names) or ""


def _layout_in_file(name: str, tensors: Collection[str]) -> str:
    """Return the layout of a class's file: its blocks have the names of 4.x or of current modules."""
    held = container_of(name).holds
    sources = (row.source for row in _architecture(held).family.on_disk)
    marks = [one.replace("{}", "0") for one in sources if isinstance(one, str) and "{}" in one]
    prefix = _prefix(tensors) or ""
    on_disk = any(tensor.removeprefix(prefix).startswith(mark) for mark in marks for tensor in tensors)
    return f"{held} {'4.x' if on_disk else 'bare'}"


def _describe(
    name: str, settings: Mapping[str, Any], tensors: StateDict, hints: Hints
) -> tuple[PlainViTConfig, list[Inference], list[tuple[str, str]]]:
    """Return our config, remarks for the report, and the ignored tensors.

    Args:
        name: Name of the class.
        settings: Contents of its configuration.
        tensors: Tensors by the names in the source; shapes are enough.
        hints: The caller's hints.

    Raises:
        ExportError: lists every setting that plain-vit does not support.
        CheckpointError: for settings that contradict each other or the tensors.
    """
    container = container_of(name)
    architecture = ARCHITECTURES[container.holds]
    whole = _read_config(config_class(name, settings["model_type"]), settings)
    family, said = architecture.family, whole.to_dict()
    outer = {}
    if settings["model_type"] in COMPOSITES:
        tower = _tower_config(whole)
        outer, said = said, tower.to_dict()
        if tower.model_type != family.model_type:
            raise ExportError(
                f"plain-vit does not know this tower of a {name}:",
                [f"model_type={tower.model_type!r}: expected {family.model_type!r}"],
            )
    known = {*family.settings.values(), *family.unread, "head_dim", *BOOKKEEPING, *AROUND}
    unknown = {key: value for key, value in said.items() if key not in known}
    declared = {one.name for one in dataclasses.fields(whole)}  # the outer model's settings do not affect its tower
    unknown |= {key: value for key, value in outer.items() if key not in BOOKKEEPING | declared}
    faults = [f"{key}={value!r}" for key, value in sorted(unknown.items()) if value]
    prefix = _prefix(tensors) or ""
    ignored = [*architecture.ignored, *container.ignored, POSITION_COUNTERS]
    short = without_prefix(tensors, prefix, ignored)
    head, head_faults = _read_head(architecture, short, said)
    if faults := [*faults, *head_faults]:
        raise ExportError(f"plain-vit does not know settings of this {name}:", faults)
    labels = _labels(whole, head["num_labels"], is_named=hints.id2label is not None)
    try:
        config = PlainViTConfig(**{**family.fields(said), **architecture.fields, **head, **labels})
    except ValueError as error:
        raise CheckpointError(f"config.json describes a model that plain-vit cannot be: {error}") from error
    if architecture.head.is_decoder:
        config.architectures = [MASKED]
    return config, _remarks(architecture, config, said), ignored


def _read_config(kind: type[PreTrainedConfig], settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a configuration of transformers.

    Raises:
        CheckpointError: transformers refuses it.
    """
    try:
        config: PreTrainedConfig = kind.from_dict(dict(settings))
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise CheckpointError(f"transformers itself refuses this configuration: {error}") from error
    return config


def _read_head(
    architecture: Architecture, tensors: StateDict, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that the tensors after the encoder determine, and unsupported settings of the class."""
    fields: dict[str, Any] = {"num_labels": 0}
    faults = []
    if not {"embeddings.mask_token", "mask_token"}.isdisjoint(tensors):
        fields["use_mask_token"] = True
    for name in ("classifier.weight", "cls_classifier.weight"):
        if name in tensors:
            fields["num_labels"] = tensors[name].shape[0]
    fields |= architecture.head.read(tensors, settings)
    if architecture.head.is_decoder and settings["encoder_stride"] != settings["patch_size"]:
        faults = [f"encoder_stride={settings['encoder_stride']} beside patch_size={settings['patch_size']}"]
    faults += architecture.family.faults(settings)
    for size in ("image_size", "patch_size"):
        if size in settings and architecture.family.square and len(set(pair(settings[size]))) > 1:
            faults.append(f"{size}={settings[size]}: the class itself takes the grid for a square")
    return fields, faults


def _labels(config: PreTrainedConfig, num_labels: int, is_named: bool) -> dict[str, Any]:
    """Return the label fields of a classifier; if the caller names the labels, the configuration's are stale."""
    if not num_labels:
        return {}
    if is_named:
        return {"problem_type": config.problem_type}
    if config.num_labels != num_labels:
        raise CheckpointError(
            f"the configuration has {config.num_labels} labels, the classifier {num_labels}: correct the former, or "
            f"give id2label=, a list of {num_labels} names (--labels FILE on the command line)"
        )
    # Published files may have numbers as names in id2label, and strings as numbers in label2id, which is rebuilt.
    names = {index: str(name) for index, name in (config.id2label or {}).items()}
    return {
        "id2label": names,
        "label2id": {name: index for index, name in names.items()},
        "problem_type": config.problem_type,
    }


def _remarks(architecture: Architecture, config: PlainViTConfig, settings: Mapping[str, Any]) -> list[Inference]:
    """Return remarks for the report: choices not determined by the source, and settings that only affect training."""
    remarks, family, head = [], architecture.family, architecture.head
    unpooled = head.is_optional and config.representation_size is None
    if unpooled or (not head.rows and (family.pools or config.pooling == "mean")):
        there = f"what is usual for the family: this model {family.pools or 'pools nothing'}"
        remarks.append(Inference("pooling", config.pooling, there))
    if architecture.fields.get("num_register_tokens"):
        remarks.append(Inference("num_register_tokens", 1, "the distillation token, which no head of this class reads"))
    if config.drop_path_rate and not family.drop_path_rises:
        rate = "drop_path_rate, which there is that of every block, and here that of the last"
        remarks.append(Inference("drop_path_rate", config.drop_path_rate, rate))
    if config.hidden_dropout_prob:
        there = "hidden_dropout_prob, which here acts after the first layer of the MLP too"
        remarks.append(Inference("hidden_dropout_prob", config.hidden_dropout_prob, there))
    if settings.get("mask_ratio"):
        remarks.append(Inference("mask_ratio", 0, "no patch is hidden or shuffled here, as in fine-tuning"))
    return remarks


# Models that a class can represent

REMEDY = " (settings that only affect training, such as drop_path_rate, can be set to 0 in the model's config first)"


def _class_for(config: PlainViTConfig) -> str:
    """Return the first class that can represent a model.

    Raises:
        ExportError: lists the parts that the nearest class cannot represent.
    """
    masked = MASKED in (config.architectures or [])
    names = CANDIDATES["masked" if masked else "classifier" if config.num_labels else "encoder"]
    lost = {name: _lost(config, ARCHITECTURES[name]) for name in names}
    nearest = min(names, key=lambda name: len(lost[name]))
    if lost[nearest]:
        raise ExportError(
            f"none of transformers' own Vision Transformers can represent this model; {nearest} is the closest, except "
            f"for the following{REMEDY}:",
            lost[nearest],
        )
    return nearest


def _lost(config: PlainViTConfig, architecture: Architecture) -> list[str]:
    """Return the parts of a model that a class cannot represent."""
    family = architecture.family
    sizes = {name: getattr(config, name) for name in ("image_size", "patch_size")}
    faults = [f"{name}={size} (there a square)" for name, size in sizes.items() if not isinstance(size, int)]
    if faults and (family.square or architecture.head.is_decoder):
        return faults
    faults = []
    if architecture.head.is_decoder and config.reconstruction_target != "pixels":
        faults.append(f"reconstruction_target={config.reconstruction_target!r} (there it would be 'pixels')")
    if family.many_sizes and config.position_resampling != (there := family.fixed["position_resampling"]):
        faults.append(f"position_resampling={config.position_resampling!r} (there it would be {there!r})")
    settings = _settings_for(config, architecture)
    fields = {**family.fields(settings), **architecture.fields, **_equal_fields(config, architecture)}
    return [*faults, *lost_fields(config, lambda: PlainViTConfig(**{**fields, "num_labels": config.num_labels}))]


def _recipe(config: PlainViTConfig, name: str) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the configuration of a class for our model, and the other arguments of its constructor.

    Raises:
        ExportError: lists every part of the model that the class cannot represent.
    """
    architecture = _architecture(name)
    if lost := _lost(config, architecture):
        raise ExportError(f"transformers' {name} cannot represent this model{REMEDY}:", lost)
    stock = config_class(name, architecture.family.model_type)(**_settings_for(config, architecture))
    if not isinstance(stock, own := class_named(name).config_class):
        stock = own(vision_config=stock.to_dict())
    if config.num_labels:
        stock.id2label, stock.label2id = copy.copy(config.id2label), copy.copy(config.label2id)
        stock.problem_type = config.problem_type
    else:
        stock.num_labels = 0
    return stock, architecture.head.options(config)


def _unread_tensors(name: str, config: PlainViTConfig, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the initial values of the tensors that a class always has but the outputs of this model do not depend on.

    They are a mask token or register tokens that this model lacks, a norm that the logits do not depend on, and layers
    that merge the tokens for a language model; in each block, a LayerScale that this model lacks.
    """
    stock, options = _recipe(config, name)
    blocks = range(config.num_hidden_layers)
    setattr(_tower_config(stock), _architecture(name).family.settings["num_hidden_layers"], len(blocks[:1]))
    with torch.random.fork_rng(devices=[]):
        fresh = class_named(name)(stock, **options).state_dict()
    fresh |= {one.replace(".0.", f".{i}."): fresh[one] for one in fresh if "layer_scale" in one for i in blocks}
    made = sources_of(TRANSFORMERS.rows(config, name), empty_model(config).state_dict())
    read = {source for sources in made.values() for source in sources}
    return {one: fresh[one].clone().to(like) for one in fresh if one not in read}


def _loaded_whole(stock: PreTrainedConfig, tensors: StateDict, name: str, tower: str) -> StateDict:
    """Return a tower's tensors as the whole model's loader renames them, with a tiny text model."""
    kind = class_named(name)
    text = {"vocab_size": 4, "hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1}
    whole = kind.config_class(vision_config=stock.to_dict(), text_config=text)
    fresh = kind(whole).state_dict()
    stored = {tensor: fresh[tensor] for tensor in fresh if not tensor.startswith(tower)}
    stored |= {tower + re.sub(r"attn\.(?=[qk]_norm)", "attention.", tensor): tensors[tensor] for tensor in tensors}
    loaded = kind.from_pretrained(None, config=whole, state_dict=stored).state_dict()
    return {tensor.removeprefix(tower): loaded[tensor] for tensor in loaded if tensor.startswith(tower)}


def _equal_fields(config: PlainViTConfig, architecture: Architecture) -> dict[str, Any]:
    """Return our fields for which the class supports any value, or which do not affect this model's outputs."""
    family = architecture.family
    # Tokens without positions get rows of zeros.
    equal: dict[str, Any] = {"position_embedding_on_prefix": config.position_embedding_on_prefix}
    if config.pooling == "cls" or not config.num_prefix_tokens + config.num_register_tokens:
        equal["pool_prefix_tokens"] = config.pool_prefix_tokens
    whole = all(pixels % step == 0 for pixels, step in zip(config.image_shape, config.patch_shape, strict=True))
    if whole:
        equal["drop_partial_patches"] = config.drop_partial_patches
    of_any_size = config.position_embedding_type == "none" or config.position_table_length is not None
    if of_any_size and "image_size" not in family.settings:
        equal["image_size"] = config.image_size  # no setting and no tensor says it
    reads_class_token = (
        architecture.fields.get("pooling", family.fixed.get("pooling", "cls")) == config.pooling == "cls"
    )
    is_classifier = [row.source for row in architecture.head.rows] == ["classifier"]
    if is_classifier and reads_class_token and config.final_norm == "after_pooling":
        equal["final_norm"] = "after_pooling"  # equal, because each token is normalised by itself
    return {**equal, **architecture.head.any_value(config)}


def _settings_for(config: PlainViTConfig, architecture: Architecture) -> dict[str, Any]:
    """Return the settings of the class closest to our model."""
    return {**architecture.family.settings_for(config), **architecture.head.write(config)}


TRANSFORMERS = TransformersFormat()
