"""Every ViT-like family of vit-pytorch and transformers, live: equal outputs, or an error that names it.

The families of timm are in tests/sources/test_refusals.py.
"""

import contextlib
import copy
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
import vit_pytorch
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto
from vit_pytorch import learnable_memory_vit

from plain_vit.conversion import from_module
from plain_vit.conversion.sources.transformers import bare, families, source
from plain_vit.conversion.sources.transformers.families import ARCHITECTURES, CONTAINERS
from plain_vit.conversion.sources.transformers.source import LIVE, MODEL_TYPES
from plain_vit.conversion.sources.vit_pytorch.modules import file_of
from plain_vit.errors import AmbiguousCheckpointError, ExportError, PlainViTError
from tests.conftest import randomize_
from tests.sizes import draws, few
from tests.sources.test_torchvision import output
from tests.tiny import difference

TOLERANCE = 1e-5
OPENED = {*ARCHITECTURES, *CONTAINERS}


def refused_by_name(module: nn.Module) -> None:
    """Assert that the error for a model names its class and what opens, or a part of it that may be meant."""
    with pytest.raises(PlainViTError) as caught:
        from_module(module)
    assert type(module).__qualname__ in str(caught.value)
    if not isinstance(caught.value, AmbiguousCheckpointError):
        assert isinstance(caught.value, ExportError)
        assert "does not open yet" in str(caught.value)


# vit-pytorch

SIZES: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "mlp_dim": 20,
    "channels": 3, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "spatial_depth": 1, "temporal_depth": 1,
    "cls_depth": 1, "seq_len": 32, "ndim": 2, "input_shape": (32, 32), "max_tokens_per_depth": (8, 6), "sm_dim": 24,
    "lg_dim": 36, "freq_patch_size": 8, "num_residual_streams": 2, "num_hierarchies": 2,
    "block_repeats": (1, 1), "num_slots": 2,
    "mlp_mult": 2, "reduction_factor": (8, 4, 2, 1), "max_frames": 4, "dims": (24, 28, 32),
    "transformer": nn.Identity(),
}  # fmt: skip
VIT = {"image_size", "patch_size", "num_classes", "dim", "depth", "heads", "mlp_dim"}
# Sizes for classes that need others than the rest.
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "cct": {"num_layers": 2, "num_heads": 3, "embedding_dim": 24},
    "cct_3d": {"num_layers": 2, "num_heads": 3, "embedding_dim": 24},
    "crossformer": {"dim": (8, 16, 24, 32), "depth": (1, 1, 1, 1)},
    "cross_vit": {"image_size": 48},
    "distill": {"depth": 2, "heads": 3, "mlp_dim": 20},
    "jet_vit": {"dim": 32, "heads": 1, "dim_head": 32},
    "levit": {"image_size": 224, "dim": (24, 28, 32), "depth": 1, "heads": (2, 3, 4)},
    "look_vit": {"patch_size": 16, "highres_patch_size": 8},
    "looped_vit": {"image_size": 32, "patch_size": 8},
    "max_vit": {"dim": 32, "depth": (1, 1)},
    "max_vit_with_registers": {"dim": 32, "depth": (1, 1)},
    "mobile_vit": {"image_size": (64, 64), "channels": (8,) * 10 + (16,)},
    "pit": {"depth": (1, 1)},
    "regionvit": {"dim": (8, 16, 24, 32), "depth": (1, 1, 1, 1)},
    "scalable_vit": {"depth": (1, 1, 1, 1), "heads": (1, 1, 1, 1)},
    "sep_vit": {"depth": (1, 1), "heads": (1, 1)},
    "t2t": {"depth": 2, "heads": 3, "mlp_dim": 20},
    "twins_svt": {"s1_emb_dim": 8, "s2_emb_dim": 12, "s3_emb_dim": 16, "s4_emb_dim": 20, "s3_depth": 1, "s4_depth": 1},
}


def vit_pytorch_classes() -> Iterator[tuple[str, type[nn.Module]]]:
    """Yield every class of the package with a configurable number of classes, with its file."""
    for info in pkgutil.iter_modules(vit_pytorch.__path__):
        try:
            file = importlib.import_module(f"vit_pytorch.{info.name}")
        except ImportError:  # an audio model, which needs another package
            continue
        for kind in vars(file).values():
            own = inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == file.__name__
            if own and "num_classes" in _parameters(kind):
                yield info.name, kind


def _parameters(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class's constructor; for a distillation student, those of its base class."""
    own = dict(inspect.signature(kind).parameters)
    if "args" in own and "kwargs" in own and kind is not nn.Module:
        return _parameters(next(base for base in kind.__mro__[1:] if issubclass(base, nn.Module)))
    return own


def build(file: str, kind: type[nn.Module]) -> nn.Module:
    sizes = {**SIZES, **OTHER_SIZES.get(file, {})}
    taken = {
        name: sizes[name]
        for name, parameter in _parameters(kind).items()
        if name in sizes and (parameter.default is inspect.Parameter.empty or name in OTHER_SIZES.get(file, {}))
    }
    if kind.__name__ == "Adapter":  # adds memories and heads to a model
        taken["vit"] = learnable_memory_vit.ViT(**{name: SIZES[name] for name in taken.keys() | VIT})
    return kind(**taken).eval()


CLASSES = {f"{file}.{kind.__name__}": (file, kind) for file, kind in vit_pytorch_classes()}


def test_the_classes_of_vit_pytorch_are_found() -> None:
    assert len(CLASSES) >= 60
    assert {"vit.ViT", "cait.CaiT", "na_vit.NaViT", "distill.DistillableViT"} <= CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_vit_pytorch_opens_with_its_numbers_or_is_refused_by_name(name: str) -> None:
    file, kind = CLASSES[name]
    module = build(file, kind)
    if not any(file_of(base) is not None for base in kind.__mro__):
        refused_by_name(module)
        return
    randomize_(module)
    pixel_values = torch.randn(2, 3, 32, 32)
    theirs = module(pixel_values)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    model = from_module(module, **({} if hasattr(module, "pos_embedding") else {"image_size": 32}))
    assert difference(output(model, pixel_values), theirs) <= TOLERANCE


# transformers

# Heads and towers of every kind of vision model; the slow test uses all classes.
TRANSFORMERS = {
    "dpt": "DPTForDepthEstimation", "groupvit": "GroupViTModel", "sam": "SamModel",
    "swin": "SwinForImageClassification",
    "vision-text-dual-encoder": "VisionTextDualEncoderModel", "vitdet": "VitDetModel",
    "vitpose": "VitPoseForPoseEstimation", "vivit": "VivitModel", "yolos": "YolosModel",
}  # fmt: skip


def with_patches(settings: Any) -> bool:
    """Tell whether a configuration, or one in it, has patches."""
    return isinstance(settings, dict) and ("patch_size" in settings or any(map(with_patches, settings.values())))


# Settings that count layers, or have a value for each layer.
STACKS = ("num_hidden_layers", "num_layers", "depth", "encoder_layers", "decoder_layers", "layer_types")


def shallow(config: Any) -> Any:
    """Reduce a configuration and its parts to two layers, unless it names layers by number."""
    for name, value in list(vars(config).items()):
        if name in STACKS and isinstance(value, int | list) and not hasattr(config, "out_features"):
            setattr(config, name, value[:2] if isinstance(value, list) else min(value, 2))
        elif isinstance(value, transformers.PreTrainedConfig):
            shallow(value)
    return config


def transformers_model(model_type: str, name: str) -> Any:
    """Build a class of transformers on the meta device, with default settings and, if possible, two layers."""
    kind: Any = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])
    if model_type == "vision-text-dual-encoder":
        config = kind.from_vision_text_configs(transformers.ViTConfig(), transformers.BertConfig())
    elif model_type == "vitpose":
        config = kind(backbone_config=transformers.VitPoseBackboneConfig(out_indices=[12]))
    else:
        config = kind()
    with torch.device("meta"):
        try:
            less = shallow(copy.deepcopy(config))
            less.validate()
            return getattr(transformers, name)(less)
        except Exception:  # other settings name layers that were removed
            return getattr(transformers, name)(config)


def every_vision_class(model_type: str, first: str = "") -> list[str]:
    """Return the classes of a model type with patches that transformers itself can build, after a given class."""
    names = set[str]()
    with contextlib.suppress(Exception):  # it has no settings of its own, or needs a package
        config = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])()
        if with_patches(config.to_dict()):
            mappings = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
            for named in (mapping.get(model_type) or () for mapping in mappings):
                names |= {named} if isinstance(named, str) else {*named}
    found = sorted(name for name in names if hasattr(transformers, name) and not name.endswith("Config"))
    return [name for name in dict.fromkeys([first, *found]) if name]


@pytest.mark.parametrize("module", [source, bare])
def test_a_family_of_transformers_is_data(module: Any) -> None:
    """Neither reading nor writing names a family or a class: a new one is an entry of `families.py` alone."""
    named = {name for name, value in vars(families).items() if isinstance(value, families.Family)}
    assert len(named) > 20
    assert not named & vars(module).keys()
    assert not OPENED & {*re.findall(r"\w+", inspect.getsource(module))}


@pytest.mark.slow
def test_the_classes_of_transformers_with_patches_are_found() -> None:
    types = few(sorted(configuration_auto.CONFIG_MAPPING_NAMES), 100)
    assert sum(len(every_vision_class(model_type)) for model_type in types) >= draws(30, nightly=350)


@pytest.mark.slow(quick=TRANSFORMERS)
@pytest.mark.parametrize(
    "model_type", [*TRANSFORMERS, *few(sorted({*configuration_auto.CONFIG_MAPPING_NAMES} - {*TRANSFORMERS}), 200)]
)
def test_a_family_of_transformers_opens_or_is_refused_by_name(model_type: str) -> None:
    names = every_vision_class(model_type, TRANSFORMERS.get(model_type, ""))
    for name in names if OPENED & set(names) else few(names, 1):
        try:
            module = transformers_model(model_type, name)
        except Exception:
            if name in TRANSFORMERS.values():
                raise
            continue  # it needs a package, or has no settings of its own
        towers = [part for part in module.modules() if type(part).__name__ in LIVE]
        is_inside = len(towers) == 1 and model_type not in MODEL_TYPES
        if name in OPENED or is_inside:
            from_module(module)
        else:  # of several towers, the error asks which
            refused_by_name(module)
