"""All supported entrypoints of timm: small models with random parameters, and models at their own width.

The measurements are recorded for the table in the docs (tests/sources/sweep.py).
"""

from typing import Any

import pytest
import timm
import torch

from plain_vit import PlainViTForImageClassification
from plain_vit.conversion import from_module, to_module
from plain_vit.conversion.sources.timm.constructors import CONSTRUCTORS, constructor_named
from plain_vit.conversion.sources.timm.naflex.source import NAFLEX
from plain_vit.conversion.sources.timm.relative.beit import BEIT
from plain_vit.conversion.sources.timm.relative.relpos import RELPOS
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.tables.engine import revert
from plain_vit.conversion.tables.format import Hints
from tests.model.test_packed import images_of, padded
from tests.sources.sweep import record
from tests.sources.timm_models import (
    ENTRYPOINTS,
    TOLERANCE,
    as_timm,
    image_size,
    layout_of,
    pixels_for,
    rounding,
    same_tensors,
    stage_differences,
    tiny_timm,
)
from tests.tiny import difference


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_an_entrypoint_opens_with_equal_numbers_and_exports_back(name: str) -> None:
    # A deep ResNet takes as long as everything else: there is only one, for images of any size.
    deep = bool(ENTRYPOINTS[name].get("stem_depths"))
    module = tiny_timm(name, depth=2, **{"dynamic_img_size": True} if deep else {})
    model = from_module(module)
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= rounding(module), found
    layout = "naflexvit" if name in NAFLEX.architectures else None  # a plain model can have the same tensors
    assert same_tensors(module, to_module(model, "timm", layout=layout))

    if not deep:
        headless = tiny_timm(name, depth=2, num_classes=0)
        features = stage_differences(headless, from_module(headless), pixels_for(headless))
        assert max(features.values()) <= rounding(headless), features

    resized = resized_difference(name, module, model)
    halves = (module if deep else tiny_timm(name, depth=2)).to(torch.bfloat16)
    rounded = stage_differences(halves, from_module(halves), pixels_for(halves))
    assert max(rounded.values()) <= rounding(halves), rounded

    record({
        "source": f"timm {name}", "opens": True, "logits": found["logits"],
        "blocks": max(value for stage, value in found.items() if stage != "logits"), "bfloat16": max(rounded.values()),
        "another_resolution": resized, "way_back_bit_exact": True,
        "timm": timm.__version__, "torch": torch.__version__,
    })  # fmt: skip


def resized_difference(name: str, module: Any, model: Any) -> float | None:
    """Return the difference for another image size; None for partial patches, which timm supports at one size only."""
    patch = ENTRYPOINTS[name]["patch_size"]
    size, limit = (4 * patch, 2 * patch), TOLERANCE
    if image_size(name)[0] % patch:
        return None
    if name in NAFLEX.architectures:
        inputs = padded(images_of([(6, 6), (3, 9), (8, 2)], (patch, patch)), (patch, patch))
        inputs["pixel_values"] = inputs["pixel_values"].clamp(-5, 5)  # of padding
        off = difference(model(**inputs).logits, module(as_timm(inputs)))
    else:
        if name in BEIT.architectures | RELPOS.architectures:
            module.set_input_size(size)
        else:
            limit = rounding(module)
            if not module.dynamic_img_size:
                module = tiny_timm(name, depth=2, dynamic_img_size=True)
                model = from_module(module)
        off = max(stage_differences(module, model, pixels_for(module, size=size)).values())
    assert off <= limit
    return off


@pytest.mark.slow(quick=[*BEIT.architectures, *RELPOS.architectures])
@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_the_table_has_the_sizes_and_settings_of_timm(name: str) -> None:
    constructor = constructor_named(name)
    own: dict[str, Any] = {"depth": 2}
    if "num_kv_heads" in ENTRYPOINTS[name] and constructor.name == "Eva":
        own["num_kv_heads"] = ENTRYPOINTS[name]["num_kv_heads"][:2]
    with torch.device("meta"):
        module: Any = timm.create_model(name, **own)
    description = TIMM.describe_module(module, Hints())
    arguments = {**ENTRYPOINTS[name], **own, "num_classes": module.num_classes}
    ours = constructor.config_of(arguments)
    read, said = ({**config.to_dict(), "id2label": None, "label2id": None} for config in (description.config, ours))
    assert read == said
    with torch.device("meta"):
        model = PlainViTForImageClassification(description.config)
    back = revert(TIMM.rows(description.config, layout_of(module)), model.state_dict(), description.config)
    assert {key: tensor.shape for key, tensor in back.items()} == {
        key: tensor.shape for key, tensor in module.state_dict().items()
    }
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        parameter.numel() for parameter in module.parameters()
    )


def test_no_entrypoint_is_in_two_tables() -> None:
    assert len(ENTRYPOINTS) == sum(len(constructor.architectures) for constructor in CONSTRUCTORS)
