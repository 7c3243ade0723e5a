"""Every supported class of transformers: float32, bfloat16, another resolution, the export, and at its own size.

What is measured is recorded for the table in the docs (tests/sources/sweep.py).
"""

from typing import Any

import pytest
import torch
import transformers

from plain_vit.conversion import from_module, to_module
from plain_vit.conversion.compare_modules import empty_model
from plain_vit.conversion.engine import revert
from plain_vit.conversion.format import Hints
from plain_vit.conversion.live_modules import find_model
from plain_vit.conversion.sources import FORMATS
from plain_vit.conversion.transformers.families import CONTAINERS
from plain_vit.conversion.transformers.source import TRANSFORMERS
from tests.conftest import randomize_
from tests.sources.sweep import record
from tests.sources.transformers_models import (
    CASES,
    in_bfloat16,
    opens_as,
    pixels_for,
    size_of,
    stage_differences,
    tiny_transformers,
    tolerance,
    unread_by,
)

pytestmark = pytest.mark.nightly

# transformers' root mean square is rounded to 8 bits before the gain, torch's after it; SigLIP's pooling head, and the
# convolution that decodes masked patches (here a dense layer), sum in another order: as far apart as a few roundings.
BFLOAT16_REORDERED = 4e-2

# How a class is made to accept another size than its own; None if it does not (MAE counts its patches, masked-image
# models and AIMv2 their own grid).
RESIZED: dict[str, dict[str, Any] | None] = {
    "Dinov2": {},
    "DINOv3": {},
    "Sapiens2": {},
    "InternVL": {},
    "DepthAnything": {},
    "PromptDepthAnything": {},
    "ViTMAE": None,
    "Aimv2": None,
    "CLIPModel": None,
    "MetaClip2Model": None,
}


@pytest.mark.parametrize("case", CASES)
def test_a_class_opens_with_equal_numbers_and_exports_back(case: str) -> None:
    module = tiny_transformers(case)
    model = from_module(module)
    model.set_attn_implementation("eager")
    found = stage_differences(module, model, pixels_for(module))
    assert max(found.values()) <= tolerance(case), found

    attention = "sdpa" if module._supports_sdpa else "eager"
    halves = in_bfloat16(tiny_transformers(case, attention))
    model = from_module(halves)
    model.set_attn_implementation(attention)
    rounded = stage_differences(halves, model, pixels_for(halves).to(torch.bfloat16))
    reordered = BFLOAT16_REORDERED if tolerance(case) or "MaskedImage" in case else 0.0
    assert max(rounded.values()) <= reordered, rounded

    resized = resized_difference(case)
    assert resized is None or resized <= tolerance(case)

    name = type(module).__name__
    layout = CONTAINERS[name].holds if name in CONTAINERS else name
    theirs = next(part for part in module.modules() if opens_as(part, layout)).state_dict()
    model = from_module(module)
    back = to_module(model, "transformers", layout=layout).state_dict()
    way_back = all(torch.equal(back[key], theirs[key]) for key in back if not key.startswith(unread_by(layout)))
    assert way_back

    outputs = [stage for stage in ("logits", "reconstruction", "pooled", "tokens") if stage in found]
    record(
        {
            "source": f"transformers {case}",
            "opens": True,
            "logits": found[outputs[0]] if outputs else max(found.values()),
            "blocks": max(value for stage, value in found.items() if stage.startswith("block")),
            "bfloat16": max(rounded.values()),
            "another_resolution": resized,
            "way_back_bit_exact": way_back,
            "way_back_to": type(to_module(model, "transformers")).__name__,
            "parameters": parameters_at_full_size(name),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
    )


def resized_difference(case: str) -> float | None:
    """Return the difference for images of another size, where the class takes them."""
    options = next((value for start, value in RESIZED.items() if case.startswith(start)), _INTERPOLATED)
    module = tiny_transformers(case)
    if options is None or "Masked" in case or "partial" in case:
        return None
    if len(set(size_of(module))) > 1:
        # Of its own size, patches and image may be oblong; interpolating takes squares.
        module.config.image_size, module.config.patch_size = 56, 14
        module = randomize_(type(module)(module.config)).eval()
        module.set_attn_implementation("eager")
    model = from_module(module)
    model.set_attn_implementation("eager")
    return max(stage_differences(module, model, pixels_for(module, size=(42, 84)), **options).values())


_INTERPOLATED = {"interpolate_pos_encoding": True}


def parameters_at_full_size(name: str) -> int:
    """Return the count of our parameters for the class's own default configuration, whose every shape comes back."""
    if name.startswith("Sapiens2For"):  # their heads have no default sizes
        name = CONTAINERS[name].holds
    config = getattr(transformers, name).config_class()
    if hasattr(config, "encoder_stride"):
        config.encoder_stride = config.patch_size
    with torch.device("meta"):
        module = getattr(transformers, name)(config)
    module, source = find_model(module, FORMATS, None, None)
    assert source is TRANSFORMERS
    description = TRANSFORMERS.describe_module(module, Hints())
    ours = empty_model(description.config).state_dict()
    back = revert(TRANSFORMERS.rows(description.config, description.layout), ours, description.config)
    theirs = {key.removeprefix(description.prefix): tensor.shape for key, tensor in module.state_dict().items()}
    assert all(tensor.shape == theirs[key.removeprefix(description.prefix)] for key, tensor in back.items())
    return sum(tensor.numel() for tensor in ours.values())
