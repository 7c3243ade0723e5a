"""timm's Vision Transformers: live modules, files, and export.

VisionTransformer and VisionTransformerDistilled are read here, timm's other classes by `constructors.py`.
Everything is based on the arguments of timm's own constructor (`arguments.py`). They are read from a live module
(`modules.py`) or from `architecture` and `model_args` in a checkpoint's config.json, or inferred from a bare state dict
and compared with all of timm's architectures (`shapes.py`).
"""

import fnmatch
import functools
import importlib.util
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ....configuration_plain_vit import PlainViTConfig, stem_stride
from ....errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError, UnknownFormatError, few
from ....files.safetensors import save_state_dict
from ...tables.compare_modules import class_path
from ...tables.engine import Row, revert
from ...tables.format import Description, Format, Hints, Inference, Probes, StateDict, label_fields
from . import dinov2
from .arguments import (
    ACTIVATIONS,
    DEFAULTS,
    OPENED,
    POOLINGS,
    SILENT_ARGUMENTS,
    architecture_for,
    architecture_of,
    arguments_for,
    config_of,
    pair,
    timm_name_for,
)
from .constructor import Constructor
from .constructors import CONSTRUCTORS, constructor_named
from .eva import originals
from .modules import CLASS_PATHS, arguments_of, build, unknown_parts
from .naflex.source import NAFLEX
from .names import families, plain_names
from .pixels import processor_from_timm, processor_to_timm
from .shapes import (
    CODE_ONLY,
    Settled,
    expected_observations,
    families_of,
    first_convolution,
    observed,
    part_of,
    settled_by_hints,
    settled_by_name,
)
from .tables import GAMMA_ROWS, own_parts, parts_of, rows_of

# Datasets that timm identifies by their number of classes.
IMAGENETS = {
    1000: "imagenet-1k",
    11221: "imagenet-21k-miil",
    11821: "imagenet-12k",
    21841: "imagenet-22k",
    21842: "imagenet-22k-ms",
    21843: "imagenet-21k-goog",
}

# Tensors of MAE checkpoints outside the encoder.
IGNORED = (
    ("decoder_*", "the decoder of the masked autoencoder"),
    ("mask_token", "replaces hidden patches in the decoder of the masked autoencoder"),
)

# Checkpoints


@functools.cache
def _opened_parts() -> frozenset[str]:
    """Return the parts, in the sense of `part_of`, of all timm models that plain-vit opens."""
    parts = own_parts()
    configs = PlainViTConfig(), PlainViTConfig(mlp_type="swiglu")
    for constructor, config in itertools.product(CONSTRUCTORS, configs):
        for layout in constructor.layouts:
            parts |= parts_of(constructor.rows(config, layout))
    return frozenset(parts)


def _refuse_others(tensors: StateDict) -> None:
    """Refuse tensors that no hints can turn into a model that opens.

    Raises:
        UnknownFormatError: The tensors are of an unsupported family of timm; names its file and title.
        MappingError: There are tensors that no timm model that opens has.
    """
    names = [name for name in tensors if not any(fnmatch.fnmatch(name, pattern) for pattern, _ in IGNORED)]
    own = own_parts()
    if families := families_of(names, own):
        some = few([repr(name) for name in names if part_of(name) not in own])
        raise UnknownFormatError(
            f"tensors such as {some} are those of timm's {' or '.join(families)}, which plain-vit does not open: "
            f"it opens timm's {OPENED}"
        )
    faults = [f"left over: {name!r}" for name in names if part_of(name) not in _opened_parts()]
    kernel = tensors.get("patch_embed.proj.weight")
    if kernel is not None and kernel.ndim not in (2, 4):
        faults.append(f"'patch_embed.proj.weight' has shape {tuple(kernel.shape)}: expected a kernel over an image")
    if faults:
        raise MappingError(f"these are not the tensors of a model of timm that plain-vit opens, {OPENED}:", faults)


def _settled_by_folder(settings: Mapping[str, Any], known: dict[str, Any], rows: int | None, hints: Hints) -> Settled:
    """Return the settings of a `config.json` and its tensors.

    Raises:
        AmbiguousCheckpointError: for arguments set in code, which no `config.json` can store.
    """
    name, given = settings["architecture"], _model_args(settings)
    arguments = {**architecture_of(name), **given}
    if arguments.get("distilled"):
        arguments.pop("pos_embed", None)  # VisionTransformerDistilled ignores it and always has a position table
    if hints.architecture and architecture_of(hints.architecture) is not architecture_of(name):
        raise CheckpointError(f"architecture={hints.architecture!r}: config.json says {name!r}. Omit the hint")
    config_of(arguments)  # raises an error for arguments without a counterpart
    _check_one_epsilon(architecture_of(name), given)
    arguments, inferences = _with_code(arguments, given, known, hints)
    if settings.get("global_pool") not in (None, {**DEFAULTS, **arguments}["global_pool"]):
        arguments |= _pooling_of_two(arguments, settings["global_pool"], known, hints)
    cfg = _pretrained_cfg(settings, hints)
    size = given.get("img_size") or (tuple(cfg["input_size"])[1:] if cfg.get("input_size") else None)
    settled = settled_by_name(name, arguments, known, rows, hints, [(size, "config.json")], "config.json")
    settled.inferences += inferences
    return settled


def _check_one_epsilon(architecture: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a patch norm whose epsilon differs from the block norms'.

    Args:
        architecture: The arguments of the architecture.
        given: The arguments in `config.json`, where a norm given by name has timm's default epsilon.

    Raises:
        ExportError: The epsilons differ.
    """
    both = {**DEFAULTS, **architecture, **given}
    named = {**DEFAULTS, **architecture}["norm_eps"]
    blocks, patches = (
        DEFAULTS["norm_eps"] if given.get(name) else named for name in ("norm_layer", "embed_norm_layer")
    )
    if both["embed_norm_layer"] is not None and blocks != patches:
        raise ExportError(
            "plain-vit has no counterpart of parts of this timm model:",
            [f"an epsilon of {patches} in the norm of the patches and of {blocks} in the others"],
        )


def _with_code(
    arguments: dict[str, Any], given: Mapping[str, Any], known: Mapping[str, Any], hints: Hints
) -> tuple[dict[str, Any], list[Inference]]:
    """Add the classes that the tensors show, and that no `config.json` can store, to the arguments.

    Args:
        arguments: The arguments of the architecture, updated by `config.json`.
        given: The arguments in `config.json`.
        known: The result of `observed`.
        hints: The caller's hints.

    Raises:
        AmbiguousCheckpointError: for settings that such a class does not determine.
    """
    shown, inferences, arguments = expected_observations(arguments, known), [], dict(arguments)
    open_: dict[str, list[object]] = {}
    for name in CODE_ONLY:
        if shown[name] == known[name]:
            continue
        inferences.append(Inference(name, known[name], "the tensors: no config.json can hold a class"))
        if name == "embed_norm":
            arguments["embed_norm_layer"] = known["norm_layer"] if known[name] else None
            if known[name]:  # its epsilon may differ from the other norms'
                open_["layer_norm_eps"] = [{**DEFAULTS, **arguments}["norm_eps"]]
        elif name == "stem_depths":
            stride = 1 if known[name] is None else stem_stride(known[name])
            kernel = pair({**DEFAULTS, **arguments}["patch_size"])
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


def _pooling_of_two(arguments: Mapping[str, Any], other: str, known: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    """Return the pooling arguments if `config.json` has two poolings: in the arguments, and `other` at its top level.

    Raises:
        AmbiguousCheckpointError: The caller chooses neither.
    """
    said = _pooling_said({**DEFAULTS, **arguments}["global_pool"], other, hints)
    return {**said, "fc_norm": known["fc_norm"]} if said else {}


def _pooling_said(built: str, other: str, hints: Hints) -> dict[str, Any]:
    """Return the pooling argument to change if the caller chooses `other` over the architecture's pooling.

    Raises:
        AmbiguousCheckpointError: The caller chooses neither.
    """
    if hints.pooling is None:
        names = [POOLINGS.get(word, word) for word in (other, built)]
        raise AmbiguousCheckpointError(
            f"config.json says global_pool {other!r}, and its architecture and model_args {built!r}", {"pooling": names}
        )
    return {"global_pool": other} if hints.pooling == POOLINGS.get(other) else {}


def _model_args(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a `config.json` adds to its architecture."""
    given = {name: value for name, value in (settings.get("model_args") or {}).items() if name not in SILENT_ARGUMENTS}
    for name in ("norm_layer", "embed_norm_layer", "act_layer"):
        if isinstance(given.get(name), str):
            given[name] = given[name].lower() if name == "act_layer" else given[name].lower().replace("_", "")
    if given.get("norm_layer"):
        given["norm_eps"] = DEFAULTS["norm_eps"]  # a norm given by name has timm's default epsilon
    return given


def _pretrained_cfg(settings: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    """Return timm's `pretrained_cfg` including the labels, from a `config.json` of the current or the older flat form.

    The labels are left out if the caller names them or drops the classifier.
    """
    cfg = dict(settings.get("pretrained_cfg") or settings)
    cfg["label_names"] = settings.get("label_names") or settings.get("labels") or cfg.get("label_names")
    if settings.get("num_classes") is not None:
        cfg["num_classes"] = settings["num_classes"]
    if settings.get("architectures") == ["TimmWrapperModel"]:  # transformers' wrapper without a classifier
        cfg |= {"num_classes": 0, "label_names": None}
    if hints.drop or hints.id2label is not None:
        cfg = {name: value for name, value in cfg.items() if name not in ("num_classes", "label_names")}
    return cfg if settings else {}


def _labels(cfg: Mapping[str, Any], num_classes: int) -> dict[str, Any]:
    """Return the label fields of our config, if timm's configuration names this number of classes."""
    names = cfg.get("label_names")
    if not names or cfg.get("num_classes", num_classes) != num_classes:
        return {}
    if isinstance(names, Mapping):  # by index, perhaps incomplete
        named = {int(index): name for index, name in names.items()}
        return label_fields([named.get(index, f"LABEL_{index}") for index in range(num_classes)])
    if len(names) != num_classes:
        raise CheckpointError(
            f"config.json has {len(names)} label names for {num_classes} classes: correct one of them, or give "
            f"id2label=, a list of {num_classes} names (--labels FILE on the command line)"
        )
    return label_fields(names)


def _constructor_for(config: PlainViTConfig, layout: str | None) -> Constructor | None:
    """Return the class of a layout, or the first that represents the model; None for the VisionTransformer."""
    if layout is not None:
        return next((one for one in CONSTRUCTORS if layout in one.layouts), None)
    try:
        arguments_for(config)
    except ExportError:
        return next((one for one in CONSTRUCTORS if one.represents(config)), None)
    return None


def _resamples_to(config: PlainViTConfig, shape: Sequence[int]) -> bool:
    """Return whether timm's VisionTransformer resamples positions to another image size as the model does."""
    fits = not any(side % patch for side, patch in zip(shape, config.patch_shape, strict=True))
    return tuple(shape) != config.image_shape and fits and config.position_resampling == "bicubic_antialias"


def _check_represented(config: PlainViTConfig) -> None:
    """Refuse a model that no class represents.

    Raises:
        ExportError: lists the parts of the model that the closest class cannot represent.
    """
    if _constructor_for(config, None) is None:
        claiming = next((one for one in CONSTRUCTORS if one.claims(config)), None)
        if claiming is None:
            arguments_for(config)
        else:
            claiming.arguments_for(config, None)


def _described_by(
    constructor: Constructor, tensors: StateDict, settings: Mapping[str, Any], hints: Hints
) -> Description:
    """Return the description of a checkpoint of an architecture of this class."""
    cfg, named = _pretrained_cfg(settings, hints), settings.get("architecture")
    name = str(named or hints.architecture)
    base = name.split(".")[0]
    if named and hints.architecture and hints.architecture.split(".")[0] != base:
        raise CheckpointError(f"architecture={hints.architecture!r}: config.json says {name!r}. Omit the hint")
    changes = dict(settings.get("model_args") or {})
    arguments = {**constructor.defaults, **constructor.architectures[base], **changes}
    other = settings.get("global_pool")
    if other not in (None, arguments["global_pool"]):
        changes |= _pooling_said(arguments["global_pool"], other, hints)
    size = changes.get("img_size") or (tuple(cfg["input_size"])[1:] if cfg.get("input_size") else None)
    source = "config.json" if named else "the caller"
    description = constructor.describe_checkpoint(
        base, changes, [(size, "config.json")], tensors, hints, source, functools.partial(_labels, cfg)
    )
    config, inferences = description.config, list(description.inferences)
    _check_classes(cfg, config.num_labels or 0)
    inferences += _imagenet_labels(config, cfg, hints)
    return replace(description, inferences=inferences)


def _takes_any_size(architecture: str, model_args: Mapping[str, Any]) -> bool:
    """Return whether timm's model takes images of any size."""
    constructor, name = constructor_named(architecture), architecture.split(".")[0]
    if constructor is None:
        plain = plain_names()
        by_name = plain.old_names.get(name, name) in plain.any_size
    else:
        by_name = constructor.any_size or constructor.architectures[name].get("dynamic_img_size", False)
    return bool(model_args.get("dynamic_img_size", by_name))


def _check_classes(cfg: Mapping[str, Any], classes: int) -> None:
    """Raise an error if `config.json` and the head have different numbers of classes."""
    if cfg.get("num_classes", classes) != classes:
        raise CheckpointError(
            f"config.json has {cfg['num_classes']} classes, the head {classes}: correct the former, or give "
            f"id2label=, a list of {classes} names (--labels FILE on the command line)"
        )


def _imagenet_labels(config: PlainViTConfig, cfg: Mapping[str, Any], hints: Hints) -> list[Inference]:
    """Set the class names of an ImageNet, identified by the number of classes as in timm, if timm is installed.

    Only timm folders without names (as in transformers) and published weights (a name with a tag) get these names:
    other tensors may have any classes.
    """
    is_named = bool(cfg.get("label_names")) or hints.id2label is not None
    is_published = bool(cfg) or "." in (hints.architecture or "")
    subset = None if is_named or not is_published else IMAGENETS.get(config.num_labels or 0)
    if subset is None:
        return []
    if importlib.util.find_spec("timm") is None:
        unnamed = f"the number of classes is that of {subset}: install timm to have them named, or give id2label"
        return [Inference("id2label", "LABEL_0, LABEL_1, ...", unnamed)]
    from timm.data import ImageNetInfo

    for field, labels in label_fields(list(ImageNetInfo(subset).label_descriptions())).items():
        setattr(config, field, labels)
    return [
        Inference("id2label", f"the classes of {subset}", f"the number of classes, {config.num_labels}, as timm has it")
    ]


class TimmFormat(Format):
    """timm's plain Vision Transformers."""

    name = "timm"
    suffixes: tuple[str, ...] = ()
    probes = (Probes("patch_embed", "blocks.{}", "norm"),)
    heads = ("head", "head_dist")
    opens: Mapping[str, Sequence[str]] = {
        "timm.models": [path.rpartition(".")[2] for path in (*CLASS_PATHS, *(one.class_path for one in CONSTRUCTORS))]
    }

    @property
    def published_files(self) -> Mapping[str, str]:
        """Model and tag of each published file."""
        return plain_names().published_files

    @property
    def architectures(self) -> Collection[str]:
        """The current and earlier names of timm's models that open."""
        plain, others = plain_names(), itertools.chain(*(one.architectures for one in CONSTRUCTORS))
        return (*plain.architectures, *plain.old_names, *others)

    def has_architecture(self, name: str) -> bool:
        """Return whether a name, with or without the tag of published weights, is one of timm's."""
        base = name.split(".")[0]
        known = base in self.architectures or constructor_named(base) is not None
        return known or any(base in family.entrypoints for family in families().values())

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether a state dict has timm's names."""
        has_patches = "patch_embed.proj.weight" in names or "embeds.proj.weight" in names
        own = has_patches and any(name.startswith("blocks.0.") for name in names)
        return own or originals.layout_of(names) is not None

    def names_of_others(self, names: Collection[str]) -> str | None:
        """Return the unsupported models of timm that have such tensors, if any."""
        families = families_of(names, own_parts())
        return f"timm's {' or '.join(families)}" if families else None

    def unread(self, tensors: StateDict) -> dict[str, str]:
        """Return the mask token, unless it is DINOv2's or DINOv3's, which has two axes and is kept."""
        kept = ["mask_token"] if "mask_token" in tensors and tensors["mask_token"].ndim == 2 else []
        return {name: reason for name, reason in super().unread(tensors).items() if name not in kept}

    def matches_module(self, module: nn.Module) -> bool:
        """Return whether a live module is one of timm's Vision Transformers, or derived from one."""
        paths = {*CLASS_PATHS, *(one.class_path for one in CONSTRUCTORS)}
        return any(f"{base.__module__}.{base.__qualname__}" in paths for base in type(module).__mro__)

    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Read the configuration of a live module. It determines everything, so no hints are needed.

        Raises:
            ExportError: lists every part that plain-vit does not support.
        """
        cfg = getattr(module, "pretrained_cfg", None) or {}
        for constructor in CONSTRUCTORS:
            if class_path(module) == constructor.class_path:
                return constructor.describe_module(module, functools.partial(_labels, cfg))
        arguments = arguments_of(module)
        config = config_of(arguments, **_labels(cfg, arguments["num_classes"]))
        faults = unknown_parts(module, config)
        if faults:
            raise ExportError(
                "plain-vit does not know parts of this timm model (what it is, not what it would become):", faults
            )
        return Description(config)

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration of a state dict and of `config.json`, if there is one.

        Raises:
            AmbiguousCheckpointError: lists the settings that neither determines.
            UnknownFormatError: The tensors are of a timm model that plain-vit does not open.
            MappingError: The tensors do not match the named architecture.
        """
        cfg = _pretrained_cfg(settings, hints)
        name = settings.get("architecture") or hints.architecture
        if (constructor := constructor_named(name)) is not None:
            return _described_by(constructor, tensors, settings, hints)
        if name is None:
            for constructor in CONSTRUCTORS:
                if constructor.is_certain(tensors):
                    raise constructor.ask(tensors, hints)
        layout, names = dinov2.layout_of(tensors), list(tensors)
        tensors = tensors if layout is None else dinov2.as_timm(tensors)
        _refuse_others(tensors)
        known = observed(tensors)
        rows = tensors["pos_embed"].shape[1] if known["pos_embed"] == "learn" else None
        if settings.get("architecture"):
            settled = _settled_by_folder(settings, known, rows, hints)
        elif hints.architecture:
            arguments = architecture_of(hints.architecture)
            settled = settled_by_name(hints.architecture, arguments, known, rows, hints, [], "the caller")
        else:
            alike = [name for one in CONSTRUCTORS for name in one.fitting(tensors, hints)]
            settled = settled_by_hints(known, rows, hints, alike)
        arguments, inferences = settled.arguments, settled.inferences
        head = tensors.get("head.weight")
        arguments |= {"num_classes": 0 if head is None else head.shape[0], "in_chans": known["in_chans"]}
        _check_classes(cfg, arguments["num_classes"])
        layout = "gamma_1" if "blocks.0.gamma_1" in tensors else layout
        config = config_of(arguments, **settled.fields, **_labels(cfg, arguments["num_classes"]))
        if dinov2.is_own(layout):
            config, inferences = dinov2.adapted(config, names, inferences)
        if "pre_logits.fc.weight" in tensors:
            config.representation_size = tensors["pre_logits.fc.weight"].shape[0]
            inferences.append(Inference("representation_size", config.representation_size, "pre_logits.fc"))
        if config.drop_partial_patches and not settings.get("architecture"):
            rest = "the image size is no multiple of the patches: timm cuts the rest unless built with dynamic_img_pad"
            inferences.append(Inference("drop_partial_patches", True, rest))
        inferences += _imagenet_labels(config, cfg, hints)
        ignored = IGNORED if "decoder_embed.weight" in tensors else ()
        stated_by = "config.json" if settings.get("architecture") else "the caller" if hints.architecture else None
        return Description(config, layout, inferences, ignored, stated_by=stated_by)

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return a processor with the preprocessing of timm's evaluation transform.

        Without a `config.json`, the installed timm gives the preprocessing of the named architecture.
        """
        cfg, assumed = _pretrained_cfg(settings, hints), []
        if not cfg and hints.architecture and importlib.util.find_spec("timm"):
            from timm.models import get_pretrained_cfg

            found = get_pretrained_cfg(hints.architecture)
            cfg = {} if found is None else found.to_dict()
            assumed = [f"pixels are prepared as timm does for {hints.architecture} (tag {cfg.get('tag')})"]
        if not cfg:
            return super().image_processor(config, settings, preprocessor, hints)
        given = {"mean": hints.image_mean, "std": hints.image_std}
        cfg |= {name: value for name, value in given.items() if value is not None}
        size: Any = config.image_size
        constructor = constructor_named(settings.get("architecture") or hints.architecture)
        if constructor is not None and constructor.any_size:
            size = hints.image_size  # its position grid does not determine the image size
        elif settings.get("architecture") and hints.image_size is None:
            # For a model of any size, timm's transform uses the size in its configuration, not the model's own grid.
            takes_any = _takes_any_size(settings["architecture"], settings.get("model_args") or {})
            size = None if takes_any else config.image_size
        return processor_from_timm(cfg, num_channels=config.num_channels, image_size=size), assumed

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors.

        The layout "gamma_1" has DeiT III's own names of the LayerScale gains. "dinov2" has DINOv2's own names and is
        followed by the number of blocks per chunk if training split the blocks.
        """
        if (constructor := _constructor_for(config, layout)) is not None:
            return constructor.rows(config, layout)
        rows = rows_of(config)
        if layout == "gamma_1":
            rows = [row for row in rows if row.ours not in {old.ours for old in GAMMA_ROWS}] + GAMMA_ROWS
        if dinov2.is_own(layout):
            rows = dinov2.rows(rows, config, str(layout))
        return rows

    def independent_module(self, description: Description, settings: Mapping[str, Any]) -> nn.Module | None:
        """Let timm build the named architecture, with the arguments of its `config.json`."""
        named = next((one.value for one in description.inferences if one.field == "architecture"), None)
        config = description.config
        from_code = {one.field for one in description.inferences} & set(CODE_ONLY)
        constructor, layout = constructor_named(str(named)), description.layout
        is_todays = layout is None or (constructor is not None and layout not in constructor.old_layouts)
        if named is None or not is_todays or config.representation_size or from_code:
            return None
        if settings.get("global_pool") not in (None, timm_name_for(POOLINGS, config.pooling)):
            return None  # the caller chose the other of two poolings
        import timm

        # Head, channels and image size may differ from the architecture's.
        given = dict(settings.get("model_args") or {})
        given |= {"num_classes": config.num_labels, "in_chans": config.num_channels}
        given |= {"img_size": config.image_shape} if constructor is None else constructor.native_size(config)
        if "global_pool" in settings:
            given.setdefault("global_pool", settings["global_pool"])
        return timm.create_model(str(named), pretrained=False, **given)

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build timm's own model of this config, with random weights.

        Raises:
            ExportError: lists every part that timm cannot represent.
        """
        if dinov2.is_own(layout):
            return build(dinov2.without_mask_token(config))
        if layout is None:
            _check_represented(config)
        if (constructor := _constructor_for(config, layout)) is not None:
            return constructor.build(config, layout)
        if layout is not None:
            raise ExportError(
                f"timm builds no model with the names of layout {layout!r}: omit it for the current names"
            )
        return build(config)

    def for_module(self, tensors: StateDict, config: PlainViTConfig, layout: str | None) -> StateDict:
        """Return a checkpoint's tensors by timm's names."""
        return dinov2.for_module(tensors, config) if dinov2.is_own(layout) else tensors

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> None:
        """Write `config.json` and `model.safetensors` as timm's `save_for_hf` does; timm itself is not needed.

        `timm.create_model("local-dir:PATH", pretrained=True)` opens the folder.

        Raises:
            ExportError: lists every part of the model or the image processor that timm cannot represent.
        """
        if dinov2.is_own(layout):
            raise ExportError("a folder of timm has timm's own names: omit the layout", [f"layout={layout!r}"])
        if layout in originals.LAYOUTS:
            raise ExportError("a folder of timm has timm's own names: omit the layout", [f"layout={layout!r}"])
        if layout is None:
            _check_represented(config)
        constructor = _constructor_for(config, layout)
        if constructor is None:
            architecture, model_args = architecture_for(config)
        else:
            architecture, model_args = constructor.architecture_for(config, layout)
            if changed := constructor.changed_by_loading(config):
                raise ExportError(
                    "timm would change this model as it loads the folder; use to_module instead:", changed
                )
        input_size = (config.num_channels, *config.image_shape)
        native = {"img_size": config.image_shape} if constructor is None else constructor.native_size(config)
        preprocessing = {} if image_processor is None else processor_to_timm(image_processor)
        prepared = tuple(preprocessing.get("input_size", input_size))
        if constructor is None and _resamples_to(config, prepared[1:]):
            model_args["dynamic_img_size"] = True
        any_size = _takes_any_size(architecture, model_args)
        if prepared != input_size and not any_size:
            raise ExportError(
                "timm keeps one input size for model and preprocessing: give another image processor, or none",
                [f"the model takes {input_size} (C, H, W), the image processor makes {prepared}"],
            )
        labels = config.num_labels or 0
        stem_depths = None if config.resnet_stem is None else config.resnet_stem["depths"]
        names = [config.id2label[index] for index in range(labels)]  # type: ignore[index]
        described = {
            "architecture": architecture,
            "num_classes": labels,
            "num_features": config.hidden_size,
            "global_pool": timm_name_for(POOLINGS, config.pooling),
            **({"label_names": names} if any(name != f"LABEL_{i}" for i, name in enumerate(names)) else {}),
            "model_args": {**{name: value for name, value in model_args.items() if name != "img_size"}, **native},
            "pretrained_cfg": {
                "custom_load": False,
                "input_size": input_size,
                "fixed_input_size": not any_size,
                "pool_size": None,
                "first_conv": "embeds.proj" if constructor is NAFLEX else first_convolution(stem_depths),
                "classifier": ["head", "head_dist"] if config.use_distillation_token else "head",
                "num_classes": labels,
                **preprocessing,
            },
        }
        save_state_dict(
            revert(self.rows(config, layout), tensors, config),
            path / "model.safetensors",
            {"format": "pt"},
            progress=False,
        )
        (path / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


TIMM = TimmFormat()
