"""The table of timm's architectures, against the installed timm."""

import functools
from typing import Any
from unittest import mock

import pytest
import timm
from timm.models import deit, vision_transformer, vision_transformer_hybrid

from plain_vit.conversion.timm_architectures import ARCHITECTURES, OLD_NAMES
from plain_vit.conversion.timm_arguments import DEFAULTS, SILENT_ARGUMENTS

NAMES = {
    "LayerNorm": "layernorm",
    "RmsNorm": "rmsnorm",
    "SiLU": "silu",
    "GluMlp": "SwiGLUPacked",
}


def arguments_of_timm() -> dict[str, dict[str, Any]]:
    """Return what each entrypoint of the two files hands to timm's builder, in the words of our table."""
    caught: dict[str, dict[str, Any]] = {}

    def catch(kind: type, variant: str, pretrained: bool, **arguments: Any) -> None:
        given = {name: value for name, value in arguments.items() if not name.startswith("pretrained")}
        given = {name: value for name, value in given.items() if name not in SILENT_ARGUMENTS | {"feature_cfg"}}
        if isinstance(given.get("norm_layer"), functools.partial):
            given["norm_eps"] = given["norm_layer"].keywords["eps"]
        given["distilled"] = kind is deit.VisionTransformerDistilled
        if "embed_layer" in given:
            backbone = given.pop("embed_layer").keywords["backbone"]
            depths = tuple(len(stage.blocks) for stage in getattr(backbone, "stages", ()))
            given |= {"stem_depths": depths, "patch_size": given["patch_size"] * 4 * 2 ** max(0, len(depths) - 1)}
        height, width = timm.get_pretrained_cfg(variant).input_size[1:]
        assert height == width
        caught[variant] = {"img_size": height, **{name: word_of(value) for name, value in given.items()}}

    for module in (vision_transformer, deit, vision_transformer_hybrid):
        with mock.patch.object(module, "build_model_with_cfg", catch):  # it is the caller's arguments that are wanted
            for name in timm.list_models(module=module.__name__.split(".")[-1]):
                if module is not vision_transformer_hybrid or ("_r" in name and "resnet" not in name):
                    timm.model_entrypoint(name)()
    return caught


def word_of(value: Any) -> Any:
    """Return the name of a class or a partial of one; other values as they are."""
    kind = value.func if isinstance(value, functools.partial) else value
    return NAMES.get(kind.__name__, kind.__name__) if isinstance(kind, type) else value


def test_the_table_is_what_timm_builds() -> None:
    theirs = arguments_of_timm()
    assert len(theirs) == 179 + 9  # plain ones, and the hybrids whose ResNet is the paper's
    assert ARCHITECTURES.keys() == theirs.keys()
    for name, arguments in theirs.items():
        assert {**DEFAULTS, **ARCHITECTURES[name]} == {**DEFAULTS, **arguments}, name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_old_names_are_what_timm_maps_them_to() -> None:
    for old, name in OLD_NAMES.items():
        with mock.patch.object(vision_transformer, "build_model_with_cfg") as builder, \
                mock.patch.object(deit, "build_model_with_cfg", builder), \
                mock.patch.object(vision_transformer_hybrid, "build_model_with_cfg", builder):  # fmt: skip
            timm.model_entrypoint(old)()
        assert builder.call_args.args[1] == name
