"""All 179 plain entrypoints of timm, its ResNet-V2 hybrids and its Eva: small with random parameters, and at their
own size.

What is measured is recorded for the table in the docs (tests/sources/sweep.py).
"""

import pytest
import torch

from plain_vit.conversion import from_module, to_module
from plain_vit.conversion.timm.architectures import ARCHITECTURES
from plain_vit.conversion.timm.eva.architectures import ARCHITECTURES as EVA
from tests.conftest import randomize_
from tests.sources.sweep import record
from tests.sources.timm_models import (
    TOLERANCE,
    image_size,
    measurements,
    pixels_for,
    same_tensors,
    stage_differences,
    tiny_timm,
    tolerance,
)

pytestmark = pytest.mark.nightly

POOLINGS = ["", "token", "avg", "max", "avgmax", "map", "prr"]

# One product of timm's parallel blocks is several here, each rounded to 8 bits: as far apart as two such roundings.
BFLOAT16_REORDERED = 2e-2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_entrypoint_opens_with_equal_numbers_and_exports_back(name: str) -> None:
    module = tiny_timm(name)
    model = from_module(module)
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= tolerance(name), found
    assert same_tensors(module, to_module(model, "timm"))

    headless = module_without_head(name)
    features = stage_differences(headless, from_module(headless), pixels_for(headless))
    assert max(features.values()) <= tolerance(name), features

    halves = tiny_timm(name).to(torch.bfloat16)
    rounded = stage_differences(halves, from_module(halves), pixels_for(halves).to(torch.bfloat16))
    assert max(rounded.values()) <= (BFLOAT16_REORDERED if tolerance(name) else 0.0), rounded

    resized = resized_difference(name)
    assert resized is None or resized <= tolerance(name)

    # The ResNet of a hybrid is slow, and no pooling reaches into it.
    poolings = POOLINGS if ARCHITECTURES[name].get("stem_depths") is None else ["avg"]
    pooled = {pooling: pooled_difference(name, pooling) for pooling in poolings}
    # Without tokens before the patches, timm's tokens are transposed in memory: a mean sums in another order.
    alone = not (module.has_class_token or module.num_reg_tokens)
    assert max(value for value in pooled.values() if value is not None) <= (TOLERANCE if alone else tolerance(name)), (
        pooled
    )

    record(measurements(name, found, features, rounded, resized) | {"poolings": pooled})


@pytest.mark.parametrize("name", EVA)
def test_an_entrypoint_of_eva_opens_with_equal_numbers_and_exports_back(name: str) -> None:
    module, halves = tiny_timm(name), tiny_timm(name).to(torch.bfloat16)
    model = from_module(module)
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) == 0.0, found
    assert same_tensors(module, to_module(model, "timm"))
    headless = module_without_head(name)
    features = stage_differences(headless, from_module(headless), pixels_for(headless))
    rounded = stage_differences(halves, from_module(halves), pixels_for(halves).to(torch.bfloat16))
    resized = resized_difference(name)
    assert max(max(features.values()), max(rounded.values()), resized or 0.0) == 0.0
    record(measurements(name, found, features, rounded, resized))


def module_without_head(name: str) -> torch.nn.Module:
    """Return the entrypoint without a classifier."""
    return tiny_timm(name, num_classes=0)


def resized_difference(name: str) -> float | None:
    """Return the difference for images of another size; None for partial patches, which timm takes at one size only."""
    patch = (ARCHITECTURES | EVA)[name]["patch_size"]
    if image_size(name)[0] % patch:
        return None
    module = tiny_timm(name, dynamic_img_size=True)
    return max(stage_differences(module, from_module(module), pixels_for(module, size=(4 * patch, 2 * patch))).values())


def pooled_difference(name: str, pooling: str) -> float | None:
    """Return the difference with another pooling, the head changed to 5 classes; None where timm refuses it."""
    try:
        module = tiny_timm(name, global_pool=pooling, depth=2)
    except AssertionError:  # timm's refusal
        return None
    module.reset_classifier(5)
    randomize_(module, seed=2)
    model = from_module(module)
    assert same_tensors(module, to_module(model, "timm"))
    return max(stage_differences(module, model, pixels_for(module)).values())
