"""Every supported class of transformers: float32, bfloat16, another resolution, export, and models at full size.

The measurements are recorded for the table in the docs (tests/sources/sweep.py).
"""

import os
from typing import Any

import pytest
import torch
import transformers

from plain_vit.conversion import from_module, to_module
from plain_vit.conversion.live_modules import find_model
from plain_vit.conversion.registry import FORMATS
from plain_vit.conversion.sources.transformers.families import ARCHITECTURES, CONTAINERS
from plain_vit.conversion.sources.transformers.installed import STAND_INS, class_named
from plain_vit.conversion.sources.transformers.source import TRANSFORMERS
from plain_vit.conversion.tables.compare_modules import empty_model
from plain_vit.conversion.tables.engine import revert
from plain_vit.conversion.tables.format import Hints
from tests.conftest import randomize_
from tests.sizes import few
from tests.sources.sweep import record
from tests.sources.transformers_models import (
    CASES,
    COMPOSITES,
    REPRESENTATIVES,
    in_bfloat16,
    layout_of,
    opens_as,
    pixels_for,
    size_of,
    stage_differences,
    tiny_transformers,
    tolerance,
    unread_by,
)

# transformers rounds its RMSNorm to 8 bits before the gain, torch after it. SigLIP's pooling head and the convolution
# that decodes masked patches (here a dense layer) sum in a different order. The differences are a few roundings.
BFLOAT16_REORDERED = 4e-2

# How to make a class accept another image size, or None if it does not (MAE checks the number of patches; masked-image
# models and AIMv2 require their own grid).
INTERPOLATED = {"interpolate_pos_encoding": True}
RESIZED: dict[str, dict[str, Any] | None] = {
    "Dinov2": {}, "DINOv3": {}, "Sapiens2": {}, "InternVL": {}, "DepthAnything": {}, "PromptDepthAnything": {},
    "CHMv2": {}, "DPT": {}, "Qwen": {}, "Glm": {}, "Exaone": {}, "PaddleOCR": {}, "VideoLlama3": {}, "MLCD": {},
    "Pixio": {}, "Tips": {}, "Radio": {}, "Gemma4": {}, "Llama4": None, "Kimi": {},
    "Pixtral": {}, "Mistral3": {}, "LightOnOcr": {},
    "ViTMAE": None, "Aimv2": None, "Sam": None, "Mgpstr": None, "GotOcr2": None, "DeepseekOcr2": {},
    "Cosmos3": {}, "GraniteDocling": None,
    "CLIPModel": None, "MetaClip2Model": None,
}  # fmt: skip


def record_of(case: str, **measured: Any) -> None:
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    record({"source": f"transformers {case}", **versions, **measured})


def opened(module: Any, attention: str = "eager") -> Any:
    model = from_module(module)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.slow
def test_the_classes_are_all_in_the_cases() -> None:
    cases = {type(part).__name__ for case in CASES for part in tiny_transformers(case).modules()}
    assert cases >= {*ARCHITECTURES, *CONTAINERS, *COMPOSITES} - STAND_INS.keys()


@pytest.mark.parametrize("case", CASES)
def test_every_block_and_every_output_are_the_sources(case: str) -> None:
    module = tiny_transformers(case)
    found = stage_differences(module, opened(module), pixels_for(module))
    assert max(found.values()) <= tolerance(case), found
    outputs = [stage for stage in ("logits", "reconstruction", "pooled", "tokens") if stage in found]
    blocks = max(value for stage, value in found.items() if stage.startswith("block"))
    logits = found[outputs[0]] if outputs else max(found.values())
    record_of(case, opens=True, logits=logits, blocks=blocks)


def test_windows_give_equal_bits_with_the_fused_kernel() -> None:
    module = tiny_transformers("SamVisionModel", "sdpa")
    found = stage_differences(module, opened(module, "sdpa"), pixels_for(module))
    assert max(found.values()) == 0.0, found


@pytest.mark.slow(quick=["ViTForImageClassification", "Dinov2WithRegistersModel", "CLIPVisionModel", "DINOv3ViTModel"])
@pytest.mark.parametrize("case", CASES)
def test_halves_are_the_sources_too(case: str) -> None:
    module = tiny_transformers(case)
    attention = "sdpa" if module._supports_sdpa else "eager"
    module.set_attn_implementation(attention)
    model = opened(in_bfloat16(module), attention)
    assert model.dtype == torch.bfloat16
    found = stage_differences(module, model, pixels_for(module).to(torch.bfloat16))
    reordered = BFLOAT16_REORDERED if tolerance(case) or "MaskedImage" in case else 0.0
    assert max(found.values()) <= reordered, found
    record_of(case, bfloat16=max(found.values()))


@pytest.mark.slow(
    quick=["ViTForMaskedImageModeling", "ViTMSNModel", "ViTMAEModel", "Dinov2Model", "BeitForImageClassification",
           "Dinov2WithRegistersForImageClassification", "Data2VecVisionForImageClassification", "CLIPVisionModel",
           "BeitModel, a shared bias beside positions, without a pooler", "DINOv3ViTModel, gated, no registers",
           "SiglipVisionModel"]
)  # fmt: skip
@pytest.mark.parametrize("case", [case for case in CASES if "partial" not in case])
def test_the_position_table_is_resampled_as_in_the_source(case: str) -> None:
    module = tiny_transformers(case)
    options = next((value for start, value in RESIZED.items() if case.startswith(start)), INTERPOLATED)
    if options is None or "Masked" in case:  # the class itself accepts no other size
        expected = (
            "bicubic_antialias" if case.startswith(("Aimv2", "Sam", "GotOcr2", "Llama4", "Mgpstr")) else "bicubic"
        )
        assert from_module(module).config.position_resampling == expected
        return
    if len(set(size_of(module))) > 1:
        # At its own size, patches and image may be oblong; interpolation requires squares.
        module.config.image_size, module.config.patch_size = 56, 14
        module = randomize_(type(module)(module.config)).eval()
        module.set_attn_implementation("eager")
    merges = case.startswith(("Qwen", "Glm", "Exaone", "Kimi", "Cosmos3"))  # squares of 2 x 2 patches
    found = stage_differences(
        module, opened(module), pixels_for(module, size=(56, 84) if merges else (42, 84)), **options
    )
    assert max(found.values()) <= tolerance(case), found
    record_of(case, another_resolution=max(found.values()))


@pytest.mark.slow(quick=REPRESENTATIVES)
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_exports_back_bit_for_bit(case: str) -> None:
    module = tiny_transformers(case)
    layout, model = layout_of(module), from_module(module)
    again = to_module(model, "transformers", layout=layout)
    assert type(again).__name__ == layout
    part = next(part for part in module.modules() if opens_as(part, layout))
    inside = part.state_dict()
    back = next((one for one in again.modules() if type(one) is type(part)), again).state_dict()
    assert all(torch.equal(back[name], inside[name]) for name in back if not name.startswith(unread_by(layout)))
    allowed = ("text_", "logit_", "visual_", "vision_model.head.", "std_")
    left_out = inside.keys() - back.keys()
    assert all(name.startswith(allowed) for name in left_out), left_out
    record_of(case, way_back_bit_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES if "PLAIN_VIT_SWEEP" in os.environ else few(CASES, 18))
def test_every_shape_of_a_class_at_its_own_size_comes_back(case: str) -> None:
    module = tiny_transformers(case)
    name = type(module).__name__
    if name.startswith("Sapiens2For") or name not in {*ARCHITECTURES, *CONTAINERS}:
        name = layout_of(module)  # heads without default sizes, language models of billions of parameters
    config = class_named(name).config_class()
    if hasattr(config, "encoder_stride"):
        config.encoder_stride = config.patch_size
    with torch.device("meta"):
        large = class_named(name)(config)
    large, source = find_model(large, FORMATS, None, None)
    assert source is TRANSFORMERS
    description = TRANSFORMERS.describe_module(large, Hints())
    ours = empty_model(description.config).state_dict()
    back = revert(TRANSFORMERS.rows(description.config, description.layout), ours, description.config)
    theirs = {key.removeprefix(description.prefix): tensor.shape for key, tensor in large.state_dict().items()}
    assert all(tensor.shape == theirs[key.removeprefix(description.prefix)] for key, tensor in back.items())
    record_of(
        case,
        parameters=sum(tensor.numel() for tensor in ours.values()),
        way_back_to=type(to_module(from_module(module), "transformers")).__name__,
    )
