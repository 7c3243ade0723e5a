"""Generator of the architecture tables from the installed timm, torchvision and open_clip.

    python -m tools.generate_architectures          # make architectures
    python -m tools.generate_architectures --check  # writes nothing; the exit code is 1 where a table would change

What they hold: timm's plain Vision Transformers and those of its `eva.py` as arguments of their constructors, the old
names that it still maps, the published files whose names carry a hash; of its other models that are like them the names
and the parts that theirs alone have; torchvision's builders and files; open_clip's configurations of
image towers. Nothing is downloaded.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

PACKAGE = Path(__file__).parent.parent / "plain_vit" / "conversion" / "sources"
WIDTH = 120

# Files of timm with models made of Vision Transformer blocks, or named after it.
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
    """Return the arguments that each plain entrypoint passes to timm's builder, with the names of our table."""
    import timm
    from timm.models import deit

    from plain_vit.conversion.sources.timm.arguments import DEFAULTS, SILENT_ARGUMENTS

    found: dict[str, dict[str, Any]] = {}
    for variant, (kind, arguments) in _timm_calls().items():
        given = {name: value for name, value in arguments.items() if name not in SILENT_ARGUMENTS | {"feature_cfg"}}
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
            name: value for name, value in named.items() if name in COLUMNS or value != DEFAULTS.get(name, value)
        } | {name: value for name, value in named.items() if name not in DEFAULTS}
    return {name: {column: DEFAULTS[column] for column in COLUMNS} | given for name, given in found.items()}


def timm_any_size() -> list[str]:
    """Return the plain entrypoints whose models take images of other sizes than their own."""
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

    module = importlib.import_module(constructor.class_path.rpartition(".")[0])
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
    """Return the earlier names that timm still maps to plain architectures."""
    from timm.models import _registry

    mapped = {old: str(new).split(".")[0] for old, new in _registry._deprecated_models.items()}
    return {old: name for old, name in mapped.items() if name in known and old not in known}


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


# timm's other models


def other_entrypoints(files: Sequence[str] = FAMILIES) -> dict[str, list[str]]:
    """Return the entrypoints of timm's other files with similar models."""
    import timm

    from plain_vit.conversion.sources.timm.constructors import CONSTRUCTORS

    opened = set(timm_architectures()).union(*map(constructor_architectures, CONSTRUCTORS))
    found = {file: [name for name in timm.list_models(module=file) if name not in opened] for file in files}
    return {file: names for file, names in found.items() if names}


def shapes_of(name: str) -> dict[str, torch.Tensor]:
    """Return a model's tensors, without values."""
    import timm

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(timm.create_model(name).state_dict())


# Modules that users replace, add or multiply: a name in them shows no family.
REPLACED = re.compile(r"head|fc|norm|neck|classifier|stem|patch_embed\d*\.(?!backbone)|(encoder\.)?(aligner|merger)")


class Parts(NamedTuple):
    """The parts of a file's models that a Vision Transformer of timm has not: `marks`, and others beside them."""

    marks: set[str]
    others: set[str]


def families(entrypoints: Mapping[str, Sequence[str]]) -> dict[str, Parts]:
    """Return the parts of each file's models.

    A mark is a part of the layers that no model of another file has. A file without any is never named by its tensors.

    Args:
        entrypoints: By file.
    """
    import timm

    from plain_vit.conversion.sources.timm.shapes import part_of
    from plain_vit.conversion.sources.timm.tables import own_parts

    own = own_parts()
    listed = {name: file for file, names in entrypoints.items() for name in names}
    parts: dict[str, set[str]] = {}
    for name in timm.list_models():
        names = {tensor for tensor in shapes_of(name) if not tensor.endswith("num_batches_tracked")}
        parts.setdefault(listed.get(name, ""), set()).update(set(map(part_of, names)) - own)
    inside = re.compile(rf"(.+\.)?({'|'.join(map(re.escape, own))})")  # as of a Vision Transformer in another model
    found = {}
    for file in entrypoints:
        elsewhere = set().union(*(theirs for other, theirs in parts.items() if other != file))
        layers = (part for part in parts[file] - elsewhere if "{}" in part and not inside.fullmatch(part))
        marks = {part for part in layers if not REPLACED.match(part)}
        modules = {part.partition(".")[0] for part in marks}
        found[file] = Parts(marks, {part for part in parts[file] - marks if part.partition(".")[0] in modules})
    return found


# Of files whose description begins with nothing of their own.
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


# open_clip


def open_clip_models() -> dict[str, dict[str, Any]]:
    """Return the `model_cfg` of each model of open_clip but for the text tower; modified ResNets are left out."""
    import open_clip

    found = {}
    for name in open_clip.list_models():
        model_cfg = open_clip.get_model_config(name)
        vision_cfg = {key: value for key, value in model_cfg["vision_cfg"].items() if key != "timm_model_pretrained"}
        if not isinstance(vision_cfg.get("layers"), list):
            quick_gelu = {"quick_gelu": True} if model_cfg.get("quick_gelu") else {}
            found[name] = {"embed_dim": model_cfg["embed_dim"], **quick_gelu, "vision_cfg": vision_cfg}
    return found


# Writing


def _literal(value: Any) -> str:
    """Return a literal with double quotes, like the formatter."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple) and len(value) > 8:
        return " + ".join(f"({one},) * {len(list(run))}" for one, run in itertools.groupby(value))
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_literal, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def _filled(words: Sequence[str], indent: int) -> str:
    prefix = " " * indent
    return textwrap.fill(" ".join(words), WIDTH, initial_indent=prefix, subsequent_indent=prefix,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _mapping(name: str, kind: str, entries: Mapping[str, Any]) -> str:
    lines = [f"    {_literal(key)}: {_literal(value)}," for key, value in entries.items()]
    return "\n".join([f"{name}: {kind} = {{", *lines, "}"])


def _groups(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the groups of a table: what its entrypoints share, then a line for each of them."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, arguments in known.items():
        shared = {key: value for key, value in sorted(arguments.items()) if key not in COLUMNS}
        groups.setdefault(repr(shared), (shared, []))[1].append(name)
    written = []
    for shared, names in sorted(groups.values(), key=lambda group: (-len(group[1]), str(group[0]))):
        names.sort(key=lambda name: (known[name]["embed_dim"], known[name]["depth"], name))
        head = f'    ({_literal(shared)}, """'
        if len(head) > WIDTH:
            each = (f"        {_literal(key)}: {_literal(value)}," for key, value in shared.items())
            head = "\n".join(["    ({", *each, '    }, """'])
        rows = []
        for name in names:
            sizes = known[name]
            ratio = int(sizes["mlp_ratio"]) if sizes["mlp_ratio"] == int(sizes["mlp_ratio"]) else sizes["mlp_ratio"]
            pixels = sizes["img_size"] if isinstance(sizes["img_size"], int) else "x".join(map(str, sizes["img_size"]))
            rows.append(f"        {name:42} {pixels:>4} {sizes['patch_size']:3} {sizes['embed_dim']:5} "
                        f"{sizes['depth']:3} {sizes['num_heads']:3}  {ratio}")  # fmt: skip
        written.append("\n".join([head, *rows, '    """),']))
    return "\n".join(written)


READING = "ARCHITECTURES = architectures_in(_GROUPS)\n"


def constructor_module(constructor: Any) -> str:
    """Return the text of the table of one of timm's other classes.

    Args:
        constructor: The class, as in `timm/constructors.py`.
    """
    import timm

    file = constructor.class_path.split(".")[-2]
    return f'''"""What timm's names of `{file}.py` mean, so that their files open without timm.

Written by `make architectures` from timm {timm.__version__}: the entrypoints that plain-vit opens, as arguments of its
`{constructor.name}`. `tests/sources/test_timm_sweep.py` compares the table with the installed timm.
"""

from typing import Any

from ..groups import architectures_in

# What the entrypoints of a group share, then each one's name, image size and patch size (pixels), width, depth, heads
# and width of the MLP over the width. Not timm's is `norm_eps`, the epsilon that it binds to `norm_layer`.
_GROUPS: list[tuple[dict[str, Any], str]] = [
{_groups(constructor_architectures(constructor))}
]  # fmt: skip

{READING}'''


def eva_module() -> str:
    """Return the text of `timm/eva/architectures.py`."""
    from plain_vit.conversion.sources.timm.eva.source import EVA

    return constructor_module(EVA)


def beit_module() -> str:
    """Return the text of `timm/relative/beit_architectures.py`."""
    from plain_vit.conversion.sources.timm.relative.beit import BEIT

    return constructor_module(BEIT)


def relpos_module() -> str:
    """Return the text of `timm/relative/relpos_architectures.py`."""
    from plain_vit.conversion.sources.timm.relative.relpos import RELPOS

    return constructor_module(RELPOS)


def naflex_module() -> str:
    """Return the text of `timm/naflex/architectures.py`."""
    from plain_vit.conversion.sources.timm.naflex.source import NAFLEX

    return constructor_module(NAFLEX)


def architectures_module() -> str:
    """Return the text of `timm/architectures.py`."""
    import timm

    known = timm_architectures()
    return f'''"""What timm's names of plain Vision Transformers mean, so that their files open without timm.

Written by `make architectures` from timm {timm.__version__}: all entrypoints of its `vision_transformer.py` and
`deit.py`, and the paper's hybrids of `vision_transformer_hybrid.py`, as arguments of its `VisionTransformer`.
`tests/sources/test_timm_architectures.py` compares the table with the installed timm.
"""

from typing import Any

from .groups import architectures_in

TIMM_VERSION = "{timm.__version__}"

# What the entrypoints of a group share, then each one's name, image size and patch size (pixels), width, depth, heads
# and width of the MLP over the width. Three arguments are not timm's: `distilled` names the class with a distillation
# token, `norm_eps` the epsilon that timm binds to `norm_layer`, `stem_depths` the stages of a hybrid's ResNet.
_GROUPS: list[tuple[dict[str, Any], str]] = [
{_groups(known)}
]  # fmt: skip

{READING}
# Those whose models take images of other sizes than their own.
ANY_SIZE = ({", ".join(map(_literal, timm_any_size()))})

# Names of earlier releases that today's timm still maps, and that older folders carry.
{_mapping("OLD_NAMES", "dict[str, str]", old_names(known))}

# Published files whose names end in the first digits of their SHA-256, and the model and tag that each holds.
{_mapping("PUBLISHED_FILES", "dict[str, str]", published_timm_files(known))}
'''


def families_module() -> str:
    """Return the text of `timm/families.py`."""
    import timm

    entrypoints = other_entrypoints()
    parts = families(entrypoints)
    called = titles(FAMILIES)
    written = []
    for file in entrypoints:
        filled = [
            f'"""\n{_filled(words, 8)}\n    """' if words else '""'
            for words in (entrypoints[file], sorted(parts[file].marks), sorted(parts[file].others))
        ]
        title = _literal(called[file].replace(chr(34), chr(39)))
        written.append(f"    ({_literal(file)}, {title}, {', '.join(filled)}),")
    return f'''"""Models of timm that are like its plain ones and do not open, so that the error can name them.

Written by `make architectures` from timm {timm.__version__}.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """A file of timm; `{{}}` in a part stands for every number.

    Args:
        title: What it says that it holds.
        entrypoints: Its models that plain-vit does not open.
        marks: Parts of their layers that no other model of timm has.
        others: Parts beside them, in the same modules, that a Vision Transformer of timm has not.
    """

    title: str
    entrypoints: tuple[str, ...]
    marks: frozenset[str]
    others: frozenset[str]


# File, title, entrypoints, marks, other parts.
_FAMILIES: list[tuple[str, str, str, str, str]] = [
{chr(10).join(written)}
]  # fmt: skip

FAMILIES = {{
    file: Family(title, tuple(names.split()), frozenset(marks.split()), frozenset(others.split()))
    for file, title, names, marks, others in _FAMILIES
}}
'''


def torchvision_module() -> str:
    """Return the text of `torchvision/architectures.py`."""
    import torchvision

    version = ".".join(torchvision.__version__.split("+")[0].split(".")[:2])
    return f'''"""torchvision's published Vision Transformers, so that their files open with nothing asked.

Written by `make architectures` from torchvision {version}, `torchvision/models/vision_transformer.py`.
"""

TORCHVISION_VERSION = "{version}"

# The published builders: patch size in pixels, width, depth, heads, width of the MLP.
{_mapping("ARCHITECTURES", "dict[str, tuple[int, int, int, int, int]]", torchvision_architectures())}

# The published files: resize of the shorter side, centre crop, interpolation, from the `transforms` of each; mean and
# deviation are ImageNet's in all of them.
{_mapping("FILES", "dict[str, tuple[int, int, str]]", torchvision_files())}
'''


def open_clip_module() -> str:
    """Return the text of `open_clip/architectures.py`."""
    import open_clip

    sizes = ("image_size", "patch_size", "width", "layers")
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, model_cfg in open_clip_models().items():
        vision_cfg = model_cfg["vision_cfg"]
        columns = ("image_size", "timm_model_name") if "timm_model_name" in vision_cfg else sizes
        shared = {key: value for key, value in sorted(vision_cfg.items()) if key not in columns}
        group = {"columns": columns, "quick_gelu": model_cfg.get("quick_gelu", False), "shared": shared}
        row = " ".join(str(cell) for cell in (model_cfg["embed_dim"], *(vision_cfg[column] for column in columns)))
        groups.setdefault(repr(group), (group, []))[1].append(f"        {name:36} {row}")
    written = []
    for group, rows in sorted(groups.values(), key=lambda group: (-len(group[1]), str(group[0]))):
        head = f"    ({_literal(group['columns'])}, {_literal(group['quick_gelu'])}, {_literal(group['shared'])}, "
        if len(head) + 3 > WIDTH:
            each = "".join(f"\n        {_literal(key)}: {_literal(one)}," for key, one in group["shared"].items())
            head = f"    ({_literal(group['columns'])}, {_literal(group['quick_gelu'])}, {{{each}\n    }}, "
        written.append("\n".join([f'{head}"""', *sorted(rows), '    """),']))
    return f'''"""Image towers of open_clip's models by name, so that their files open without open_clip.

Written by `make architectures` from open_clip {open_clip.__version__}: the `embed_dim`, `quick_gelu` and
`vision_cfg` of its model configurations.
"""

from typing import Any

OPEN_CLIP_VERSION = "{open_clip.__version__}"

# What the models of a group share: the columns of its rows after `embed_dim`, `quick_gelu`, the rest of the settings.
_GROUPS: list[tuple[tuple[str, ...], bool, dict[str, Any], str]] = [
{chr(10).join(written)}
]  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {{}}
for _columns, _quick_gelu, _shared, _rows in _GROUPS:
    for _row in _rows.strip().splitlines():
        _name, _embed_dim, *_cells = _row.split()
        _values = [int(_cell) if _cell.isdigit() else _cell for _cell in _cells]
        ARCHITECTURES[_name] = {{
            "embed_dim": int(_embed_dim),
            **({{"quick_gelu": True}} if _quick_gelu else {{}}),
            "vision_cfg": {{**_shared, **dict(zip(_columns, _values, strict=True))}},
        }}
'''


# Each table, and what writes it; the families are known by the parts that the first has.
TABLES: dict[str, Callable[[], str]] = {
    "timm/architectures.py": architectures_module,
    "timm/eva/architectures.py": eva_module,
    "timm/relative/beit_architectures.py": beit_module,
    "timm/relative/relpos_architectures.py": relpos_module,
    "timm/naflex/architectures.py": naflex_module,
    "timm/families.py": families_module,
    "torchvision/architectures.py": torchvision_module,
    "open_clip/architectures.py": open_clip_module,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or list those that would change."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table would change")
    check = parser.parse_args(arguments).check
    changed = []
    for name, written in TABLES.items():
        path, text = PACKAGE / name, written()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            changed.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    print(f"{'would change' if check else 'written'}: {', '.join(changed) or 'nothing'}")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
