"""Every section of `plain-vit show` for generated models and images: arrays, or an error that says why there are none.

Arrays are finite, do not depend on other images in the batch or the attention implementation, and the model stays
unchanged.
"""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from transformers import ViTImageProcessor

from plain_vit import (
    PlainViTConfig,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTImageProcessor,
    PlainViTModel,
)
from plain_vit.analysis import (
    attention_distance,
    attention_maps,
    attention_rollout,
    average_over_images,
    displayable,
    gradient_rollout,
    pixel_batches,
    plots,
    predict,
    probe_attention,
    sheet,
)
from plain_vit.errors import AnalysisError
from tests.conftest import randomize_
from tests.sizes import draws
from tests.tiny import VARIATIONS, tiny_config

OF_EACH_IMAGE = (
    "top-classes", "attention-last-layer", "attention-layers", "rollout", "grad-cam", "gradient-rollout", "logit-lens",
    "token-norms",
)  # fmt: skip
KINDS = PlainViTForImageClassification, PlainViTModel, PlainViTForMaskedImageModeling
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def drawn_config(draw: random.Random) -> PlainViTConfig | None:
    """Return a config that combines up to three variations, or None if they contradict each other."""
    fields: dict[str, Any] = {}
    for name in draw.sample(sorted(VARIATIONS), draw.randint(1, 3)):
        fields |= VARIATIONS[name]
    fields |= {
        "num_channels": draw.choice([3, 3, 1, 4]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_labels": draw.choice([1, 2, 7]),
        "problem_type": draw.choice([None, None, "regression", "multi_label_classification"]),
    }
    if draw.random() < 0.2:
        fields["patch_size"] = (24, 56)
    if draw.random() < 0.3:
        fields["num_attention_heads"] = draw.choice([1, 2, 4])
    try:
        return tiny_config(**fields)
    except (ValueError, StrictDataclassError):
        return None


def drawn_case(draw: random.Random) -> tuple[Any, PlainViTImageProcessor, list[Image.Image]] | None:
    """Return a model, its image processor and images, or None if the config is invalid."""
    config = drawn_config(draw)
    if config is None:
        return None
    model = draw.choice([*KINDS, KINDS[0], KINDS[0]])(config)
    torch.manual_seed(draw.randrange(2**32))
    weights = draw.choice(["random", "random", "fresh", "zero"])
    if weights == "random":
        randomize_(model)
    elif weights == "zero":
        for parameter in model.parameters():
            parameter.data.zero_()
    model.eval()
    (height, width), (down, across) = config.image_shape, config.patch_shape
    size = draw.choice([(height, width), (height, width), (2 * height, width), (down, 2 * across)])
    channels = config.num_channels
    processor = PlainViTImageProcessor(
        size={"height": size[0], "width": size[1]}, image_mean=[0.4] * channels, image_std=[0.3] * channels
    )
    levels = np.random.default_rng(draw.randrange(2**32))
    brightest = draw.choice([256, 256, 1])  # or black
    images = [
        Image.fromarray(levels.integers(0, brightest, (*levels.integers(5, 60, 2), 4), dtype=np.uint8)).convert(
            MODES[channels]
        )
        for _ in range(draw.choice([1, 2, 3]))
    ]
    return model, processor, images


def sections(model: Any, processor: Any, images: Sequence[Image.Image]) -> dict[str, dict[str, np.ndarray] | str]:
    """Return the arrays of every section, or its error."""
    titles = [f"image {number}" for number in range(len(images))]
    subject = sheet._subject(model, processor, "model", images, titles, (0.3, 0.6), progress=False)
    found: dict[str, dict[str, np.ndarray] | str] = {}
    for section in sheet.SECTIONS:
        if section.concerns(subject):
            try:
                found[section.name] = section.draw(subject)[0]
            except AnalysisError as error:
                found[section.name] = str(error)
    return found


def assert_equal(one: Any, other: Any, what: str) -> None:
    """Compare the arrays of a section, or the errors."""
    if isinstance(one, str) or isinstance(other, str):
        assert one == other, what
        return
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5, err_msg=f"{what}: {name}")


@pytest.mark.slow
def test_every_section_has_arrays_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # No figure is drawn.
    figures = {name: lambda *_args, **_options: None for name in vars(plots) if name.startswith("plot_")}
    monkeypatch.setattr(sheet, "plots", SimpleNamespace(**{**vars(plots), **figures}))
    checked, count = 0, draws(25, nightly=400)
    for seed in range(count):
        draw = random.Random(seed)
        case = drawn_case(draw)
        if case is None:
            continue
        model, processor, images = case
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            together = sections(model, processor, images)
        except AnalysisError as error:
            if "cannot grow a table" not in str(error):
                raise
            continue
        for name, arrays in together.items():
            if not isinstance(arrays, str):
                assert all(np.isfinite(array).all() for array in arrays.values()), (seed, name)
        alone = sections(model, processor, images[-1:])
        for name in OF_EACH_IMAGE:
            arrays = together[name]
            if "no second image to compare with" in alone[name]:  # without labels, these maps are of pairs
                continue
            last = arrays if isinstance(arrays, str) else {what: array[-1:] for what, array in arrays.items()}
            assert_equal(last, alone[name], f"seed {seed}, {name}, alone and together")
        if model.config._attn_implementation != "eager":
            model.set_attn_implementation("eager")
            for name, arrays in sections(model, processor, images).items():
                if name in OF_EACH_IMAGE:
                    assert_equal(together[name], arrays, f"seed {seed}, {name}, eager attention")
        assert not model.training
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(parameter.grad is None for parameter in model.parameters())
        checked += 1
    assert checked >= 0.6 * count, "too many configs were refused to say anything"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7, 12, 20][: draws(2, nightly=4)])
def test_every_section_is_drawn_or_says_why_not(seed: int) -> None:
    case = drawn_case(random.Random(seed))
    assert case is not None
    assert sections(*case).keys() >= set(OF_EACH_IMAGE)


def test_differential_attention_has_no_gradient_rollout() -> None:
    model = PlainViTForImageClassification(tiny_config(attention_type="differential"))
    with pytest.raises(AnalysisError, match="'differential' is not computed from the weights that it returns"):
        gradient_rollout(model, torch.randn(1, 3, 24, 56))


@pytest.mark.parametrize("function", [attention_rollout, probe_attention])
@pytest.mark.parametrize("pooling", ["map", "query"])
def test_a_model_without_its_pooling_has_nothing_that_reads_the_patches(function: Any, pooling: str) -> None:
    config = tiny_config(pooling=pooling, use_class_token=False)
    for model in (PlainViTForMaskedImageModeling(config), PlainViTModel(config, add_pooling_layer=False)):
        with pytest.raises(AnalysisError, match=f"was built without its pooling '{pooling}'"):
            function(model, torch.randn(1, 3, 24, 56))


@pytest.fixture
def of_many_sizes() -> tuple[Any, PlainViTImageProcessor]:
    model = PlainViTForImageClassification(tiny_config(image_size=56, patch_size=14, patch_projection="linear"))
    return randomize_(model).eval(), PlainViTImageProcessor(patch_size=14, max_num_patches=20)


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_patches_of_images_of_one_size_are_analysed_as_their_images(of_many_sizes: Any) -> None:
    model, processor = of_many_sizes
    inputs = processor([noise(50, 70), noise(100, 140)], return_tensors="pt")
    assert inputs["spatial_shapes"].tolist() == [[4, 5], [4, 5]]
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    np.testing.assert_allclose(predict(model, inputs), outputs.logits.softmax(dim=-1), rtol=1e-4, atol=1e-6)
    expected = torch.stack(outputs.attentions, dim=1)[:, :, :, 0, 1:21].reshape(2, 3, 5, 4, 5)
    np.testing.assert_allclose(attention_maps(model, inputs), expected, rtol=1e-3, atol=1e-6)
    assert attention_rollout(model, inputs).shape == (2, 4, 5)
    with pytest.raises(AnalysisError, match="cut into patches: give the image processor too"):
        displayable(inputs)
    shown = displayable(inputs, processor)
    assert shown.shape == (2, 56, 70, 3)
    resized = np.asarray(noise(100, 140).resize((70, 56), Image.Resampling.BILINEAR)) / 255
    np.testing.assert_allclose(shown[1], resized, atol=1e-6)


@pytest.mark.slow
def test_images_of_many_sizes_are_analysed_one_by_one(of_many_sizes: Any, tmp_path: Any) -> None:
    model, processor = of_many_sizes
    images = [noise(50, 70), noise(51, 72), noise(70, 50)]
    inputs = processor(images, return_tensors="pt")
    with pytest.raises(AnalysisError, match=r"the images are of \(56, 70\) and \(70, 56\) pixels"):
        attention_rollout(model, inputs)
    batches = list(pixel_batches(images, processor))
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 56, 70), (1, 3, 70, 56)]
    each = [attention_distance(model, batch) for batch in batches]
    mean = average_over_images(attention_distance, model, batches, progress=False)
    np.testing.assert_allclose(mean, np.concatenate(each).mean(axis=0), rtol=1e-5)
    mean = average_over_images(attention_distance, model, (processor(image) for image in images), progress=False)
    np.testing.assert_allclose(mean, np.concatenate(each).mean(axis=0), rtol=1e-5)
    assert (sheet.draw_sheet(images[:2], model, processor, tmp_path / "two", progress=False)).is_file()
    with pytest.raises(AnalysisError, match="makes images of 56 x 70 and of 70 x 56 pixels"):
        sheet.draw_sheet(images, model, processor, tmp_path / "three", progress=False)


@pytest.mark.parametrize("kind", [PlainViTImageProcessor, ViTImageProcessor])
@pytest.mark.parametrize("settings", [{}, {"rescale_factor": 1 / 127.5}, {"do_rescale": False}, {"image_std": 0.3}])
def test_images_are_displayed_as_they_were(kind: Any, settings: dict[str, Any]) -> None:
    if kind is PlainViTImageProcessor and "image_std" in settings:
        settings = {"image_std": [0.3, 0.2, 0.1]}
    elif "image_std" in settings:
        settings = {"image_mean": 0.4, "image_std": 0.3}
    processor = kind(size={"height": 24, "width": 56}, **settings)
    image = noise(24, 56)
    shown = displayable(processor(image, return_tensors="pt"), processor)
    np.testing.assert_allclose(shown[0], np.asarray(image) / 255, atol=1e-6)
