"""timm's Vision Transformers: live modules, files, and export.

Each class of timm is a `Constructor`, based on the arguments of timm's own constructor. They are read from a live
module, or from `architecture` and `model_args` in a checkpoint's config.json, or inferred from a bare state dict and
compared with all of timm's architectures (`plain`).
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

from ....configuration_plain_vit import PlainViTConfig
from ....errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError, UnknownFormatError, few
from ....files.safetensors import save_state_dict
from ...tables.compare_modules import class_path
from ...tables.data_files import data_file, models_of
from ...tables.engine import Row, revert
from ...tables.format import Description, Hints, Inference, NamedFormat, Probes, StateDict, label_fields
from .arguments import OPENED, POOLINGS, timm_name_for
from .constructor import CONFIG, Constructor
from .constructors import CONSTRUCTORS, constructor_named
from .eva import originals
from .names import families, families_of, part_of
from .pixels import processor_from_timm, processor_to_timm
from .plain import dinov2
from .plain.shapes import CODE_ONLY
from .plain.source import IGNORED, VISION_TRANSFORMER
from .tables import own_parts, parts_of

# Of towers of transformers, whose other names are timm's too.
OTHERS = {*(f"merger.{name}.weight" for name in ("norm", "ln_q", "post_projection_norm")), "blocks.0.mlp.c_fc.weight",
          "blocks.0.attn.rel_pos_h"}  # fmt: skip
# Datasets that timm identifies by their number of classes.
IMAGENETS = {
    1000: "imagenet-1k",
    11221: "imagenet-21k-miil",
    11821: "imagenet-12k",
    21841: "imagenet-22k",
    21842: "imagenet-22k-ms",
    21843: "imagenet-21k-goog",
}

# Checkpoints


@functools.cache
def _opened_parts() -> frozenset[str]:
    """Return the parts, in the sense of `part_of`, of all timm models that plain-vit opens."""
    parts = set(own_parts())
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


def _pooling_said(built: str, other: str, hints: Hints) -> bool:
    """Return whether the caller chooses `other` over the architecture's pooling.

    Raises:
        AmbiguousCheckpointError: The caller chooses neither.
    """
    if hints.pooling is None:
        names = [POOLINGS.get(word, word) for word in (other, built)]
        raise AmbiguousCheckpointError(
            f"config.json says global_pool {other!r}, and its architecture and model_args {built!r}", {"pooling": names}
        )
    return hints.pooling == POOLINGS.get(other)


def _described_by_name(
    name: str, tensors: StateDict, settings: Mapping[str, Any], hints: Hints, cfg: Mapping[str, Any], labels: Any
) -> Description:
    """Return the description of a checkpoint whose architecture `config.json` or the caller names."""
    constructor, in_folder = constructor_named(name), bool(settings.get("architecture"))
    if in_folder and hints.architecture and constructor.entrypoint(hints.architecture) != constructor.entrypoint(name):
        raise CheckpointError(f"architecture={hints.architecture!r}: config.json says {name!r}. Omit the hint")
    given, other = dict(settings.get("model_args") or {}), settings.get("global_pool")
    built = {**constructor.defaults, **constructor.architectures[constructor.entrypoint(name)], **given}["global_pool"]
    if other not in (None, built) and _pooling_said(built, other, hints):
        given |= {"global_pool": other, **constructor.norms_shown(tensors)}
    size = given.get("img_size") or (tuple(cfg["input_size"])[1:] if cfg.get("input_size") else None)
    source = CONFIG if in_folder else "the caller"
    return constructor.describe_checkpoint(name, given, size, tensors, hints, source, labels)


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


def _constructor_for(config: PlainViTConfig, layout: str | None) -> Constructor:
    """Return the class of a layout, or the first that represents the model, or the closest."""
    if layout is not None:
        return next((one for one in CONSTRUCTORS if one.has_layout(layout)), VISION_TRANSFORMER)
    exact = next((one for one in CONSTRUCTORS if one.represents(config)), None)
    return exact or next((one for one in CONSTRUCTORS if one.claims(config)), VISION_TRANSFORMER)


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

    vars(config).update(label_fields(list(ImageNetInfo(subset).label_descriptions())))
    return [
        Inference("id2label", f"the classes of {subset}", f"the number of classes, {config.num_labels}, as timm has it")
    ]


class TimmFormat(NamedFormat):
    """timm's plain Vision Transformers."""

    name = "timm"
    suffixes: tuple[str, ...] = ()
    probes = (Probes("patch_embed", "blocks.{}", "norm"),)
    heads = ("head", "head_dist")
    opens: Mapping[str, Sequence[str]] = {
        "timm.models": [path.rpartition(".")[2] for one in CONSTRUCTORS for path in one.class_paths]
    }

    @property
    def published_files(self) -> Mapping[str, str]:
        """Model and tag of each published file whose name ends in a prefix of its SHA-256."""
        return data_file(VISION_TRANSFORMER.data_file)["published_files"]

    @property
    def architectures(self) -> Collection[str]:
        """The current and earlier names of timm's models that open."""
        return [*itertools.chain(*((*one.architectures, *one.old_names) for one in CONSTRUCTORS))]

    def has_architecture(self, name: str) -> bool:
        """Return whether a name, with or without the tag of published weights, is one of timm's."""
        base = name.split(".")[0]
        return base in self.architectures or any(base in family.entrypoints for family in families().values())

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether a state dict has timm's names."""
        has_patches = any(f"{one.projection}.weight" in names for one in CONSTRUCTORS)
        own = has_patches and any(name.startswith("blocks.0.") for name in names) and OTHERS.isdisjoint(names)
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
        paths = {path for one in CONSTRUCTORS for path in one.class_paths}
        return any(f"{base.__module__}.{base.__qualname__}" in paths for base in type(module).__mro__)

    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Read the configuration of a live module. It determines everything, so no hints are needed.

        Raises:
            ExportError: lists every part that plain-vit does not support.
        """
        for constructor in CONSTRUCTORS:
            if class_path(module) in constructor.class_paths:
                cfg = getattr(module, "pretrained_cfg", None) or {}
                return constructor.describe_module(module, functools.partial(_labels, cfg))
        raise ExportError(
            f"{class_path(module)} is not a plain Vision Transformer and does not open yet: plain-vit opens timm's "
            f"{OPENED} themselves, not subclasses of them"
        )

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration of a state dict and of `config.json`, if there is one.

        Raises:
            AmbiguousCheckpointError: lists the settings that neither determines.
            UnknownFormatError: The tensors are of a timm model that plain-vit does not open.
            MappingError: The tensors do not match the named architecture.
        """
        cfg, name = _pretrained_cfg(settings, hints), settings.get("architecture") or hints.architecture
        labels = functools.partial(_labels, cfg)
        if name is None:
            for constructor in CONSTRUCTORS:
                if constructor.is_certain(tensors):
                    raise constructor.ask(tensors, hints)
        if name is None or constructor_named(name) is VISION_TRANSFORMER:
            _refuse_others(VISION_TRANSFORMER.shown(tensors))
        if name is None:
            alike = [name for one in CONSTRUCTORS[1:] for name in one.fitting(tensors, hints)]
            description = VISION_TRANSFORMER.describe_unnamed(tensors, hints, alike, labels)
        else:
            description = _described_by_name(name, tensors, settings, hints, cfg, labels)
        config, inferences = description.config, list(description.inferences)
        _check_classes(cfg, config.num_labels or 0)
        if config.drop_partial_patches and not settings.get("architecture"):
            rest = "the image size is no multiple of the patches: timm cuts the rest unless built with dynamic_img_pad"
            inferences.append(Inference("drop_partial_patches", True, rest))
        return replace(description, inferences=[*inferences, *_imagenet_labels(config, cfg, hints)])

    def settings_of(self, name: str) -> Mapping[str, Any]:
        """Return what timm's `config.json` says of a model; a name without a tag has the settings of the default."""
        return {"architecture": name.partition(".")[0], "pretrained_cfg": self.models[_with_tag(name)]}

    def config_of_settings(self, settings: Mapping[str, Any]) -> PlainViTConfig | None:
        """Return our config of the model that timm builds from a `config.json`."""
        if "architecture" not in settings:
            return None
        name, cfg = str(settings["architecture"]), _pretrained_cfg(settings, Hints())
        constructor, size = constructor_named(name), tuple(cfg.get("input_size", (3, 224, 224)))
        own = constructor.architectures[constructor.entrypoint(name)]
        labels = cfg.get("num_classes", 1000)
        given = {"num_classes": labels, "in_chans": size[0]}
        given |= {"img_size": size[1:]} if cfg.get("fixed_input_size") else {}
        given |= constructor.given_by(name, settings.get("model_args") or {})
        return constructor.config_of({**own, **given}, **_labels(cfg, labels))

    def weights_of(self, name: str) -> str | None:
        """Return the Hub id of weights, by default timm's own repository of this name."""
        name = _with_tag(name)
        entry = self.models[name]
        return entry.get("hub", f"timm/{name}" if "." in name and "url" not in entry else None)

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
        named, architecture = settings.get("architecture"), settings.get("architecture") or hints.architecture
        constructor = VISION_TRANSFORMER if architecture is None else constructor_named(architecture)
        if constructor.any_size:
            size = hints.image_size  # its position grid does not determine the image size
        elif named and hints.image_size is None and constructor.takes_any_size(named, settings.get("model_args") or {}):
            size = None  # timm's transform uses the size in its configuration, not the model's own grid
        return processor_from_timm(cfg, num_channels=config.num_channels, image_size=size), assumed

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        return _constructor_for(config, layout).rows(config, layout)

    def independent_module(self, description: Description, settings: Mapping[str, Any]) -> nn.Module | None:
        """Let timm build the named architecture, with the arguments of its `config.json`."""
        named = next((str(one.value) for one in description.inferences if one.field == "architecture"), None)
        if named is None:
            return None
        config, constructor = description.config, constructor_named(named)
        from_code = {one.field for one in description.inferences} & set(CODE_ONLY)
        if not constructor.builds(description.layout) or config.representation_size or from_code:
            return None
        if settings.get("global_pool") not in (None, timm_name_for(POOLINGS, config.pooling)):
            return None  # the caller chose the other of two poolings
        import timm

        # Head, channels and image size may differ from the architecture's.
        given = dict(settings.get("model_args") or {})
        given |= {"num_classes": config.num_labels, "in_chans": config.num_channels, **constructor.native_size(config)}
        if "global_pool" in settings:
            given.setdefault("global_pool", settings["global_pool"])
        return timm.create_model(constructor.entrypoint(named), pretrained=False, **given)

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build timm's own model of this config, with random weights.

        Raises:
            ExportError: lists every part that timm cannot represent.
        """
        return _constructor_for(config, layout).build(config, layout)

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
        if dinov2.is_own(layout) or layout in originals.LAYOUTS:
            raise ExportError("a folder of timm has timm's own names: omit the layout", [f"layout={layout!r}"])
        constructor = _constructor_for(config, layout)
        architecture, model_args = constructor.architecture_for(config, layout)
        if changed := constructor.changed_by_loading(config):
            raise ExportError("timm would change this model as it loads the folder; use to_module instead:", changed)
        input_size, native = (config.num_channels, *config.image_shape), constructor.native_size(config)
        preprocessing = {} if image_processor is None else processor_to_timm(image_processor)
        prepared = tuple(preprocessing.get("input_size", input_size))
        model_args |= constructor.resampling(config, prepared[1:])
        any_size = constructor.takes_any_size(architecture, model_args)
        if prepared != input_size and not any_size:
            raise ExportError(
                "timm keeps one input size for model and preprocessing: give another image processor, or none",
                [f"the model takes {input_size} (C, H, W), the image processor makes {prepared}"],
            )
        labels = config.num_labels or 0
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
                "first_conv": constructor.first_convolution(config),
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


def _with_tag(name: str) -> str:
    """Return the name of a model's default weights; the name itself if it has a tag, or the model no weights."""
    return next((one for one in models_of("timm") if one.startswith(f"{name}.")), name)


TIMM = TimmFormat()
