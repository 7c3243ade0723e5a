"""Live modules of the package: read settings that tensors do not show, detect modifications, and build modules."""

import copy
import importlib
import importlib.metadata
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError
from ....positions_plain_vit import SinCos2DPositionEmbedding
from ...tables.compare_modules import class_path, differences, meta_device
from ...tables.format import Hints
from .layouts import CLASSES, HIDDEN, POSITIONS, PROJECTION, RENAMED_FILES, K, Layout, Names, Q, V
from .shapes import name_pattern
from .tables import RELEASE

# Attributes of the decorrelation loss, and attributes of a whole model that store its arguments.
SILENT_ATTRIBUTES = {"has_decorr_loss", "decorr_layer_outputs_across_depth"}
KEPT_ARGUMENTS = {"args", "kwargs", "dim", "num_classes", "token_dropout_prob"}
# The argument for no patch dropout: na_vit does not accept 0, and na_vit_nested_tensor not None in training.
NO_PATCH_DROPOUT = {"na_vit": None, "na_vit_nested_tensor": 0.0}


def file_of(kind: type) -> str | None:
    """Return the file of the package that defines a class, by its current name."""
    package, *file = kind.__module__.split(".")
    if package != "vit_pytorch" or len(file) != 1:
        return None
    name = RENAMED_FILES.get(file[0], file[0])
    return name if CLASSES.get(name) == kind.__name__ else None


def live_hints(module: nn.Module, layout: Layout, hints: Hints) -> Hints:
    """Complete the hints from a live module, after checking the caller's hints against it."""
    names = layout.names
    attentions = [module.get_submodule(path) for path in _attention_paths(module, names)]
    known: dict[str, Any] = {"num_attention_heads": _same("heads", [attention.heads for attention in attentions])}
    if layout.states_scale:
        known["attention_scale"] = _same("attention scale", [attention.scale for attention in attentions])
    if "cls" in layout.poolings:
        known["pooling"] = getattr(module, "pool", "cls")  # the only pooling before release 0.5.0
    known["patch_size"] = _patch_size(module, names)
    table = getattr(module, "pos_embedding", None)
    if table is not None and POSITIONS not in names and not table.is_meta:
        known["image_size"] = tuple(
            count * side for count, side in zip(_sincos_grid(table), known["patch_size"], strict=True)
        )
    for field, value in known.items():
        given = getattr(hints, field)
        if given is not None and given != value and (given, given) != value:
            raise ValueError(f"{field}={given!r} was given, but the module itself has {value!r}: omit it")
    return replace(hints, **known)


def _attention_paths(module: nn.Module, names: Names) -> list[str]:
    """Return the paths of the attentions of a live module."""
    pattern = name_pattern(names.get((Q, K, V)) or names[Q])
    return [name.rpartition(".")[0] for name, _ in module.named_modules() if pattern.fullmatch(name)]


def _same(what: str, values: list[Any]) -> Any:
    if len(set(values)) != 1:
        raise ExportError(f"the layers of this model differ in their {what}, and ours have one:", [str(values)])
    return values[0]


def _patch_size(module: nn.Module, names: Names) -> tuple[int, int]:
    """Return the patch size from an attribute, or from the einops layer that cuts the image into patches."""
    size: Any = getattr(module, "patch_size", None)
    if isinstance(size, int):
        return size, size
    lengths: Any = module.get_submodule(f"{names[PROJECTION].rpartition('.')[0]}.0")
    return lengths.axes_lengths["p1"], lengths.axes_lengths["p2"]


def _sincos_grid(table: torch.Tensor) -> tuple[int, int]:
    """Return the grid of a sine-cosine table: the sine of the row index becomes nonzero where the second row begins."""
    count, width = table.shape
    later = table[:, width // 2].nonzero()
    columns = int(later[0]) if len(later) else count
    return count // columns, columns


def overridden_methods(kind: type) -> list[str]:
    """Return the methods of a subclass that may compute something else than the package's class."""
    derived: list[type] = []
    for base in kind.__mro__:
        if file_of(base) is not None:
            return [f"{base.__qualname__}.{name}" for base in derived for name, value in vars(base).items()
                    if callable(value) and name != "__init__"]  # fmt: skip
        if not base.__module__.startswith("vit_pytorch."):  # the package's own subclasses compute the same
            derived.append(base)
    return []


def changed_parts(module: nn.Module, config: PlainViTConfig, layout: Layout, without: str | None) -> list[str]:
    """Return the differences of a live module from a new instance of its class, such as a replaced activation.

    Args:
        module: The live module.
        config: Our config of it.
        layout: Its layout.
        without: Path of the classifier if it is left out.
    """
    kind = next((base for base in type(module).__mro__ if file_of(base) is not None), None)
    copied = kind is None  # a copy of the class, for which the caller gives format=
    if kind is None:
        kind = _class_of(layout.file)
    with meta_device():
        fresh = kind(**{**_arguments(kind, config), **({"num_classes": 1} if without else {})})
    if layout.states_scale:
        for path in _attention_paths(module, layout.names):  # our config has the scale
            fresh.get_submodule(path).scale = getattr(module.get_submodule(path), "scale", None)
    vars(fresh).update({name: vars(module)[name] for name in KEPT_ARGUMENTS & vars(module).keys()})
    same_classes = {class_path(module): class_path(fresh)}
    if copied:
        pairs = zip(module.modules(), fresh.modules(), strict=False)
        same_classes |= {class_path(one): class_path(other) for one, other in pairs
                         if type(one).__name__ == type(other).__name__}  # fmt: skip
    skipped = ("decorr_loss.", *([f"{without}."] if without else []))
    changed = differences(module, fresh, same_classes, SILENT_ATTRIBUTES, without=skipped)
    table = vars(module).get("pos_embedding")
    if isinstance(table, torch.Tensor) and not table.is_meta:
        positions = SinCos2DPositionEmbedding(config)(config.grid_size, table.new_empty(0, dtype=torch.float32))
        if table.shape != positions.shape or not torch.allclose(table.float(), positions, rtol=0, atol=1e-6):
            changed.append("pos_embedding holds other values than the sines and cosines of its grid")
    return changed


def mlp_reads_norm(mlp: nn.Module) -> bool:
    """Return whether an MLP of vit_with_decorr uses the output of its norm, which it does since release 1.21.5."""
    read: list[torch.Tensor] = []
    mlp = copy.deepcopy(mlp).float()  # its layers may be in several dtypes
    hook = mlp.get_submodule("net").register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    tokens = torch.ones_like(next(mlp.parameters()).detach()[None, None])
    mlp(tokens)
    hook.remove()
    return read[0] is not tokens


@torch.no_grad()
def reads_patches(module: Any) -> bool:
    """Return whether the attention of a na_vit reads patches; before release 1.6.7 it reads only padding."""
    masks: list[torch.Tensor] = []
    module = copy.deepcopy(module).float()  # its layers may be in several dtypes
    hook = module.transformer.register_forward_pre_hook(
        lambda _, args, options: masks.append(options["attn_mask"]), with_kwargs=True
    )
    patch = module.attn_pool_queries.new_zeros(module.channels, module.patch_size, module.patch_size)
    module([[patch]])
    hook.remove()
    return bool(masks[0].all())


def with_dropouts(config: PlainViTConfig, module: Any, names: Names) -> PlainViTConfig:
    """Return a copy of the config with the dropout rates of a live module."""
    paths = _attention_paths(module, names)
    rates: dict[str, list[float]] = {"weights": [], "blocks": [], "head": [0.0]}
    for path, child in module.named_modules():
        if isinstance(child, nn.Dropout) and "." in path:
            parent, _, name = path.rpartition(".")
            kind = (
                "head"
                if path.startswith(("mlp_head", "attn_pool"))
                else "weights"
                if parent in paths and name == "dropout"
                else "blocks"
            )
            rates[kind].append(child.p)
    attentions: list[Any] = [module.get_submodule(path) for path in paths]
    for attention in attentions:
        rate = getattr(attention, "dropout_p", getattr(attention, "dropout", None))
        rates["weights"] += [rate] if isinstance(rate, float | int) else []
    config = copy.deepcopy(config)
    config.hidden_dropout_prob = _same("dropout", rates["blocks"] or [0.0])
    config.attention_probs_dropout_prob = _same("dropout", rates["weights"] or [0.0])
    config.classifier_dropout_prob = rates["head"][-1]
    config.embedding_dropout_prob = (
        module.dropout.p if isinstance(getattr(module, "dropout", None), nn.Dropout) else 0.0
    )
    config.patch_dropout_prob = module.patch_dropout.prob if hasattr(module, "patch_dropout") else 0.0
    if constant := getattr(module, "token_dropout_prob", None):
        if not isinstance(constant, float | int):
            raise ExportError("token_dropout_prob of this model is no constant, as it is here:", [str(constant)])
        config.patch_dropout_prob = constant
    rate = getattr(module, "calc_token_dropout", None)
    if rate is not None and getattr(rate, "__qualname__", "").startswith("NaViT.__init__"):
        # A function that returns a constant. Other functions are refused as changes.
        config.patch_dropout_prob = rate(0, 0)
    return config


def installed_release() -> str:
    """Return the installed release, or `RELEASE` if the package is not installed."""
    try:
        return importlib.metadata.version("vit-pytorch")
    except importlib.metadata.PackageNotFoundError:
        return RELEASE


def _class_of(file: str) -> type[nn.Module]:
    """Return the class in a file of the installed package.

    Raises:
        ExportError: The package is not installed, or does not have the file.
    """
    try:
        package = importlib.import_module(f"vit_pytorch.{file}")
    except ImportError as error:
        raise ExportError(f"a module of vit-pytorch needs the package: pip install vit-pytorch=={RELEASE}") from error
    kind: type[nn.Module] = getattr(package, CLASSES[file])
    return kind


def build(layout: Layout, config: PlainViTConfig) -> nn.Module:
    """Build the class of a layout.

    Raises:
        ExportError: The class does not support the config's dropout rates.
    """
    file = layout.file
    if file == "simple_vit" and config.patch_dropout_prob:
        file = "simple_vit_with_patch_dropout"
    kind = _class_of(file)
    accepted = inspect.signature(kind).parameters
    dropout = config.hidden_dropout_prob
    expressed = {
        "hidden_dropout_prob": dropout if "dropout" in accepted else 0,
        "embedding_dropout_prob": config.embedding_dropout_prob if "emb_dropout" in accepted else 0,
        "attention_probs_dropout_prob": dropout if "dropout" in accepted else 0,
        "classifier_dropout_prob": dropout if HIDDEN in layout.names else 0,
        "drop_path_rate": 0,
        "patch_dropout_prob": config.patch_dropout_prob
        if {"patch_dropout", "token_dropout_prob"} & accepted.keys()
        else 0,
    }
    parts = [
        f"{field} = {getattr(config, field)}: {rate} there"
        for field, rate in expressed.items()
        if (getattr(config, field) or 0) != (rate or 0)
    ]
    if parts:
        raise ExportError(
            f"vit-pytorch's {file} cannot be trained on with these rates; set them in model.config:", parts
        )
    return kind(**_arguments(kind, config))


def _arguments(kind: type[nn.Module], config: PlainViTConfig) -> dict[str, Any]:
    """Return the arguments that a class of the package accepts."""
    dropout, embedding_dropout = config.hidden_dropout_prob, config.embedding_dropout_prob
    arguments = {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_classes": config.num_labels,
        "dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "mlp_dim": config.intermediate_size,
        "channels": config.num_channels,
        "dim_head": config.head_dim,
        "pool": "cls" if config.use_class_token and config.pooling != "mean" else "mean",
        "dropout": dropout,
        "emb_dropout": dropout if embedding_dropout is None else embedding_dropout,
        "patch_dropout": config.patch_dropout_prob,
        "token_dropout_prob": config.patch_dropout_prob or NO_PATCH_DROPOUT.get(str(file_of(kind))),
        "num_register_tokens": config.num_register_tokens,
        "use_cls_token": config.use_class_token,
        "num_parallel_branches": config.num_branches,
        "cls_depth": config.pooling_depth,
    }
    accepted = inspect.signature(kind).parameters
    return {name: value for name, value in arguments.items() if name in accepted}
