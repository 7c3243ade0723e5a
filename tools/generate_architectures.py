"""Generate the architecture tables from the installed timm, torchvision and open_clip.

    python -m tools.generate_architectures          # make architectures
    python -m tools.generate_architectures --check  # writes nothing; the exit code is 1 where a table would change

The tables hold: the constructor arguments of timm's plain Vision Transformers and of the models in its `eva.py`, old
names that timm still maps, and published files with a hash in their names; for similar models of timm, their names and
the parts that only they have; torchvision's builders and files; open_clip's image tower configurations; the published
weights of all three by name; the Hub ids in the documentation of transformers. Nothing is downloaded.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

SOURCES = Path(__file__).parent.parent / "plain_vit" / "conversion" / "sources"

# Files of timm with models that consist of Vision Transformer blocks, or are named after it.
FAMILIES = (
    *("beit", "cait", "coat", "convit", "crossvit", "csatv2", "davit", "deepseek_vit", "efficientformer"),
    *("efficientvit_mit", "efficientvit_msra", "eva", "gcvit", "gemma4_vit", "hiera", "hieradet_sam2", "levit"),
    *("maxxvit", "mlp_mixer", "mobilevit", "mvitv2", "naflexvit", "nest", "nextvit", "pit", "pvt_v2", "qwen3_vit"),
    *("sequencer", "shvit", "swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr", "tiny_vit", "tnt"),
    *("twins", "visformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam"),
    *("vitamin", "volo", "xcit"),
)

CLASS_NAMES = {"LayerNorm": "layernorm", "RmsNorm": "rmsnorm", "SiLU": "silu", "GluMlp": "SwiGLUPacked"}
COLUMNS = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")


# timm's plain Vision Transformers


def timm_architectures() -> dict[str, dict[str, Any]]:
    """Return the arguments that each plain entrypoint passes to timm's builder, under the names of our table."""
    import timm
    from timm.models import deit

    from plain_vit.conversion.sources.timm.plain.source import VISION_TRANSFORMER

    defaults, silent = VISION_TRANSFORMER.defaults, VISION_TRANSFORMER.silent_arguments
    found: dict[str, dict[str, Any]] = {}
    for variant, (kind, arguments) in _timm_calls().items():
        given = {name: value for name, value in arguments.items() if name not in silent | {"feature_cfg"}}
        if isinstance(given.get("norm_layer"), functools.partial):
            given["norm_eps"] = given["norm_layer"].keywords["eps"]
        given["distilled"] = kind is deit.VisionTransformerDistilled
        if "embed_layer" in given:
            backbone = given.pop("embed_layer").keywords["backbone"]
            depths = tuple(len(stage.blocks) for stage in getattr(backbone, "stages", ()))
            given |= {"stem_depths": depths, "patch_size": given["patch_size"] * 4 * 2 ** max(0, len(depths) - 1)}
        cfg: Any = timm.get_pretrained_cfg(variant)
        height, width = cfg.input_size[1:]
        if height != width:
            raise ValueError(f"{variant} is for images of {height} x {width}: the table has one column for both")
        named = {"img_size": height, **{name: _word(value) for name, value in given.items()}}
        found[variant] = {
            name: value for name, value in named.items() if name in COLUMNS or value != defaults.get(name, value)
        } | {name: value for name, value in named.items() if name not in defaults}
    return {name: {column: defaults[column] for column in COLUMNS} | given for name, given in found.items()}


def timm_any_size() -> list[str]:
    """Return the plain entrypoints whose models accept images of any size."""
    return sorted(name for name, (_, arguments) in _timm_calls().items() if arguments.get("dynamic_img_size"))


def _timm_calls() -> dict[str, tuple[type, dict[str, Any]]]:
    """Return the class and the arguments that each plain entrypoint passes to timm's builder."""
    import timm
    from timm.models import deit, vision_transformer, vision_transformer_hybrid

    caught: dict[str, tuple[type, dict[str, Any]]] = {}

    def catch(kind: type, variant: str, pretrained: bool, **arguments: Any) -> None:
        caught[variant] = kind, {key: value for key, value in arguments.items() if not key.startswith("pretrained")}

    for module in (vision_transformer, deit, vision_transformer_hybrid):
        with mock.patch.object(module, "build_model_with_cfg", catch):  # to capture the caller's arguments
            for name in timm.list_models(module=module.__name__.split(".")[-1]):
                if module is not vision_transformer_hybrid or _has_resnet_v2(name):
                    timm.model_entrypoint(name)()
    return caught


def constructor_architectures(constructor: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments that each entrypoint of another class passes to timm's builder, if plain-vit opens it.

    Args:
        constructor: The class, as in `timm/constructors.py`.
    """
    import timm

    from plain_vit.conversion.tables.infer import pair
    from plain_vit.errors import ExportError

    caught: dict[str, dict[str, Any]] = {}

    def catch(kind: type, variant: str, pretrained: bool, **arguments: Any) -> None:
        unused = {"feature_cfg", "pretrained_filter_fn", *constructor.silent_arguments}
        if "cfg" in arguments:  # NaFlexVit's, a dataclass
            described = dataclasses.asdict(arguments.pop("cfg"))
            arguments |= {name: value for name, value in described.items() if value is not None}
            rows, columns = arguments["pos_embed_grid_size"]
            arguments["img_size"] = (rows * arguments["patch_size"], columns * arguments["patch_size"])
        given = {name: _word(value) for name, value in arguments.items() if name not in unused}
        if isinstance(arguments.get("norm_layer"), functools.partial):
            given["norm_eps"] = arguments["norm_layer"].keywords["eps"]
        cfg: Any = timm.get_pretrained_cfg(variant)
        height, width = cfg.input_size[1:]
        height, width = pair(given.get("img_size", (height, width)))
        given["img_size"] = height if height == width else (height, width)
        kept = {name: value for name, value in given.items() if value != constructor.defaults.get(name, ...)}
        caught[variant] = {column: constructor.defaults[column] for column in COLUMNS} | kept

    module = importlib.import_module(constructor.class_paths[0].rpartition(".")[0])
    with mock.patch.object(module, "build_model_with_cfg", catch):  # to capture the caller's arguments
        for name in timm.list_models(module=module.__name__.split(".")[-1]):
            timm.model_entrypoint(name)()
    opened = {}
    for name, arguments in caught.items():
        try:
            constructor.config_of(arguments)
        except ExportError:
            continue
        opened[name] = arguments
    return opened


def _has_resnet_v2(name: str) -> bool:
    return "_r" in name and "resnet" not in name


def _word(value: Any) -> Any:
    """Return the name of a class or a partial of one; other values unchanged."""
    kind = value.func if isinstance(value, functools.partial) else value
    return CLASS_NAMES.get(kind.__name__, kind.__name__) if isinstance(kind, type) else value


def old_names(known: Mapping[str, Any]) -> dict[str, str]:
    """Return the earlier names that timm still maps to plain architectures, with the weights that they stood for."""
    from timm.models import _registry

    mapped = {old: str(new) for old, new in _registry._deprecated_models.items()}
    return {old: name for old, name in mapped.items() if name.partition(".")[0] in known and old not in known}


def published_timm_files(known: Mapping[str, Any]) -> dict[str, str]:
    """Return the published files of plain architectures whose names end in the first digits of their SHA-256."""
    import timm

    found = {}
    for name in timm.list_pretrained():
        if name.split(".")[0] in known:
            cfg: Any = timm.get_pretrained_cfg(name, allow_unregistered=False)
            if match := re.search(r"/([^/]+-[0-9a-f]{8})\.\w+$", cfg.url or ""):
                found[match[1]] = name
    return dict(sorted(found.items()))


# The settings in timm's record of published weights that a config or an image processor depends on.
TIMM_SETTINGS = (
    *("num_classes", "input_size", "fixed_input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std"),
    *("license",),
)


def timm_models(known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the published weights of each architecture by name, timm's default first.

    An architecture without weights has an entry of its own name. The values are the settings that differ from timm's
    defaults, the Hub id if it is not `timm/` and the name, and the address of weights that are not on the Hub.
    """
    from timm.models import PretrainedCfg, _registry

    defaults, found = PretrainedCfg(), dict[str, dict[str, Any]]()
    for name in known:
        listed: Any = _registry._model_default_cfgs[name]
        for tag in listed.tags:
            cfg = listed.cfgs[tag]
            if not cfg.has_weights and tag != listed.tags[0]:
                continue
            full = f"{name}.{tag}" if cfg.has_weights and tag else name
            entry = {key: value for key in TIMM_SETTINGS if (value := getattr(cfg, key)) != getattr(defaults, key)}
            if cfg.hf_hub_id is not None:
                hub = f"{cfg.hf_hub_id}{full}" if cfg.hf_hub_id.endswith("/") else cfg.hf_hub_id
                entry |= {"hub": hub} if hub != f"timm/{full}" else {}
            elif cfg.has_weights:
                entry["url"] = cfg.url
            found[full] = entry
    return found


# timm's other models


def other_entrypoints(files: Sequence[str] = FAMILIES) -> dict[str, list[str]]:
    """Return the entrypoints of timm's other files with similar models."""
    import timm

    from plain_vit.conversion.sources.timm.constructors import CONSTRUCTORS

    opened = set(timm_architectures()).union(*map(constructor_architectures, CONSTRUCTORS[1:]))
    found = {file: [name for name in timm.list_models(module=file) if name not in opened] for file in files}
    return {file: names for file, names in found.items() if names}


def shapes_of(name: str) -> dict[str, torch.Tensor]:
    """Return a model's tensors on the meta device."""
    import timm

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(timm.create_model(name).state_dict())


# Modules that users replace, add or repeat: names in them do not identify a family.
REPLACED = re.compile(r"head|fc|norm|neck|classifier|stem|patch_embed\d*\.(?!backbone)|(encoder\.)?(aligner|merger)")


class Parts(NamedTuple):
    """The parts of a file's models that timm's Vision Transformer lacks: `marks`, and other parts beside them."""

    marks: set[str]
    others: set[str]


def families(entrypoints: Mapping[str, Sequence[str]]) -> dict[str, Parts]:
    """Return the distinguishing parts of each file's models.

    A mark is a part of the layers that no model of another file has. Files without marks are not recognised by tensors.

    Args:
        entrypoints: Entrypoints by file.
    """
    import timm

    from plain_vit.conversion.sources.timm.names import part_of
    from plain_vit.conversion.sources.timm.tables import own_parts

    own = own_parts()
    listed = {name: file for file, names in entrypoints.items() for name in names}
    parts: dict[str, set[str]] = {}
    for name in timm.list_models():
        names = {tensor for tensor in shapes_of(name) if not tensor.endswith("num_batches_tracked")}
        parts.setdefault(listed.get(name, ""), set()).update(set(map(part_of, names)) - own)
    inside = re.compile(rf"(.+\.)?({'|'.join(map(re.escape, own))})")  # a Vision Transformer inside another model
    found = {}
    for file in entrypoints:
        elsewhere = set().union(*(theirs for other, theirs in parts.items() if other != file))
        layers = (part for part in parts[file] - elsewhere if "{}" in part and not inside.fullmatch(part))
        marks = {part for part in layers if not REPLACED.match(part)}
        modules = {part.partition(".")[0] for part in marks}
        found[file] = Parts(marks, {part for part in parts[file] - marks if part.partition(".")[0] in modules})
    return found


# Titles for files whose own description does not begin with one.
TITLES = {"vision_transformer_sam": "the image encoder of Segment Anything, a ViTDet"}


def titles(files: Sequence[str]) -> dict[str, str]:
    """Return the title of each timm file: the first line of its own description."""
    found = dict(TITLES)
    for file in set(files) - found.keys():
        module = importlib.import_module(f"timm.models.{file}")
        lines = (line.strip(" #*") for line in (module.__doc__ or "").splitlines())
        found[file] = re.sub(r" *\(?https?:.*", "", next(filter(None, lines), file)).rstrip(".")
    return found


# torchvision


def torchvision_architectures() -> dict[str, tuple[int, int, int, int, int]]:
    """Return patch size, width, depth, heads and width of the MLP of each builder."""
    from torchvision.models import vision_transformer

    found = {}
    for name in vision_transformer.__all__:
        if re.fullmatch(r"vit_[a-z]_\d+", name):
            with mock.patch.object(vision_transformer, "_vision_transformer") as builder:
                getattr(vision_transformer, name)()
            given = builder.call_args.kwargs
            columns = ("patch_size", "hidden_dim", "num_layers", "num_heads", "mlp_dim")
            found[name] = tuple(given[column] for column in columns)
    return found


def torchvision_files() -> dict[str, tuple[int, int, str]]:
    """Return the preprocessing of each published file: resize of the shorter side, centre crop, interpolation."""
    from torchvision.models import get_model_weights

    found = {}
    for name in torchvision_architectures():
        for weights in get_model_weights(name):
            transform = weights.transforms()
            file = weights.url.rpartition("/")[2].rpartition(".")[0]
            found[file] = transform.resize_size[0], transform.crop_size[0], transform.interpolation.value
    return found


def torchvision_models() -> dict[str, dict[str, str]]:
    """Return the file of the published weights of each builder, and their licence if torchvision states it."""
    from torchvision.models import get_model_weights

    return {
        f"{name}.{weights.name}": {
            "file": weights.url.rpartition("/")[2].rpartition(".")[0],
            **{key: weights.meta[key] for key in ("license",) if key in weights.meta},
        }
        for name in torchvision_architectures()
        for weights in get_model_weights(name)
    }


# open_clip


def open_clip_models() -> dict[str, dict[str, Any]]:
    """Return the `model_cfg` of each open_clip model without the text tower; modified ResNets are left out."""
    import open_clip

    found = {}
    for name in open_clip.list_models():
        model_cfg = open_clip.get_model_config(name)
        vision_cfg = {key: value for key, value in model_cfg["vision_cfg"].items() if key != "timm_model_pretrained"}
        if not isinstance(vision_cfg.get("layers"), list):
            quick_gelu = {"quick_gelu": True} if model_cfg.get("quick_gelu") else {}
            found[name] = {"embed_dim": model_cfg["embed_dim"], **quick_gelu, "vision_cfg": vision_cfg}
    return found


def open_clip_closed(known: Mapping[str, Any]) -> list[str]:
    """Return the names of open_clip's models whose image tower does not open."""
    from plain_vit.conversion.sources.open_clip.source import OPEN_CLIP
    from plain_vit.errors import PlainViTError

    def opens(model_cfg: Mapping[str, Any]) -> bool:
        try:
            return OPEN_CLIP.config_of_settings({"model_cfg": model_cfg}) is not None
        except PlainViTError:
            return False

    return sorted(name for name, model_cfg in known.items() if not opens(model_cfg))


def open_clip_weights(known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the Hub id and the preprocessing of the published weights of these models.

    Weights that were trained with the other kind of GELU than the model has are left out: open_clip only warns. They
    are listed under the model that has their kind.
    """
    import open_clip

    from plain_vit.conversion.sources.open_clip.pixels import DEFAULTS

    found = {}
    for name, tag in open_clip.list_pretrained():
        cfg = open_clip.get_pretrained_cfg(name, tag)
        if name in known and cfg["hf_hub"] and cfg.get("quick_gelu", False) == known[name].get("quick_gelu", False):
            settings = {key: value for key, value in cfg.items() if key in DEFAULTS and value != DEFAULTS[key]}
            found[f"{name}.{tag}"] = {"hub": cfg["hf_hub"].rstrip("/"), **settings}
    return found


# transformers


def transformers_models() -> dict[str, dict[str, str]]:
    """Return the Hub ids that transformers names in the documentation of the models that open, with their type."""
    import inspect

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from plain_vit.conversion.sources.transformers.source import MODEL_TYPES

    found: dict[str, dict[str, str]] = {}
    for model_type in MODEL_TYPES:
        source = inspect.getsource(CONFIG_MAPPING[model_type])
        if match := re.search(r'auto_docstring\(checkpoint="([^"]+/[^"]+)"', source):
            found.setdefault(match[1], {"model_type": model_type})
    return dict(sorted(found.items()))


# Writing


def in_order(entries: Mapping[str, Any], shared: Callable[[Any], Any], rank: Callable[[Any], Any]) -> dict[str, Any]:
    """Sort a table in the order in which names are suggested to users: entries with the most common settings first.

    Args:
        entries: Entries by name.
        shared: Returns the settings of an entry that are counted.
        rank: Returns the sort key among entries with equal settings; ties are sorted by name.
    """
    groups = {name: str(shared(entry)) for name, entry in entries.items()}
    sizes = Counter(groups.values())
    names = sorted(entries, key=lambda name: (-sizes[groups[name]], groups[name], rank(entries[name]), name))
    return {name: entries[name] for name in names}


def timm_in_order(known: Mapping[str, Any]) -> dict[str, Any]:
    """Sort entrypoints of timm, and put the table's columns before the other arguments of each."""

    def others(given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in sorted(given.items()) if name not in COLUMNS}

    written = {
        name: {**{column: given[column] for column in COLUMNS}, "mlp_ratio": float(given["mlp_ratio"]), **others(given)}
        for name, given in known.items()
    }
    return in_order(written, others, lambda given: (given["embed_dim"], given["depth"]))


def timm_table(constructor: Any = None) -> dict[str, Any]:
    """Return the table of a class of timm.

    Args:
        constructor: The class, as in `timm/constructors.py`; None for VisionTransformer.
    """
    import timm

    if constructor is not None:
        known = timm_in_order(constructor_architectures(constructor))
        return {"timm": timm.__version__, "architectures": known, "models": timm_models(known)}
    known = timm_in_order(timm_architectures())
    return {
        "timm": timm.__version__,
        "architectures": known,
        "models": timm_models(known),
        "any_size": timm_any_size(),
        "old_names": old_names(known),
        "published_files": published_timm_files(known),
    }


def families_table() -> dict[str, Any]:
    """Return timm's other models, by file."""
    import timm

    entrypoints = other_entrypoints()
    parts, called = families(entrypoints), titles(FAMILIES)
    described = {
        file: {
            "title": called[file],
            "entrypoints": names,
            "marks": sorted(parts[file].marks),
            "others": sorted(parts[file].others),
        }
        for file, names in entrypoints.items()
    }
    return {"timm": timm.__version__, "families": described}


def torchvision_table() -> dict[str, Any]:
    """Return torchvision's builders and published files."""
    import torchvision

    version = ".".join(torchvision.__version__.split("+")[0].split(".")[:2])
    return {
        "torchvision": version,
        "architectures": torchvision_architectures(),
        "files": torchvision_files(),
        "models": torchvision_models(),
    }


def open_clip_table() -> dict[str, Any]:
    """Return open_clip's models."""
    import open_clip

    def shared(model_cfg: dict[str, Any]) -> dict[str, Any]:
        vision_cfg = model_cfg["vision_cfg"]
        sizes = ("image_size", "patch_size", "width", "layers")
        columns = ("image_size", "timm_model_name") if "timm_model_name" in vision_cfg else sizes
        rest = {key: value for key, value in sorted(vision_cfg.items()) if key not in columns}
        return {"columns": columns, "quick_gelu": model_cfg.get("quick_gelu", False), "shared": rest}

    known = in_order(open_clip_models(), shared, lambda model_cfg: 0)
    closed = open_clip_closed(known)
    weights = open_clip_weights({name: known[name] for name in sorted(known.keys() - closed)})
    return {"open_clip": open_clip.__version__, "architectures": known, "closed": closed, "models": weights}


def transformers_table() -> dict[str, Any]:
    """Return the Hub ids in transformers' own documentation."""
    import transformers

    return {"transformers": transformers.__version__, "models": transformers_models()}


def as_json(table: Mapping[str, Any]) -> str:
    """Return the text of a data file, with a line for each entry of its tables."""

    def written(value: Any) -> str:
        if not isinstance(value, dict):
            return json.dumps(value)
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "\n }"

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {written(value)}" for name, value in table.items()) + "\n}\n"


def tables() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the function that makes each data file; the families depend on the parts in the first table."""
    from plain_vit.conversion.sources.timm.constructors import CONSTRUCTORS

    return {
        "timm/architectures.json": timm_table,
        **{one.data_file: functools.partial(timm_table, one) for one in CONSTRUCTORS[1:]},
        "timm/families.json": families_table,
        "torchvision/architectures.json": torchvision_table,
        "open_clip/architectures.json": open_clip_table,
        "transformers/architectures.json": transformers_table,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or list those that would change."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table would change")
    check = parser.parse_args(arguments).check
    changed = []
    for name, table in tables().items():
        path, text = SOURCES / name, as_json(table())
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            changed.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    print(f"{'would change' if check else 'written'}: {', '.join(changed) or 'nothing'}")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
