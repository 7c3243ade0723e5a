"""Batches of images of many sizes, padded or packed: each image gets its outputs as alone, and SigLIP 2's numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from plain_vit import PlainViTBackbone, PlainViTForImageClassification, PlainViTForMaskedImageModeling
from plain_vit.conversion import from_module
from plain_vit.packed_plain_vit import cut_patches
from tests.conftest import randomize_
from tests.sources.transformers_models import CASES, NAFLEX, tiny_transformers, tower_of
from tests.tiny import VARIATIONS, build, difference, tiny_config

TOLERANCE = 1e-5
GRIDS = [(3, 4), (5, 2), (1, 7), (3, 4), (2, 2)]  # (3, 4) is the native grid
REFUSED = (
    "resnet",
    "relative",
    "masked_windows",
    "registers_last",
    "deit",
    "re_attention",
    "class_attention",
    "locality",
)
MANY = [name for name in VARIATIONS if not name.startswith((*REFUSED, "truncate"))]  # truncated tables cannot grow


def images_of(grids: list[tuple[int, int]], patch: tuple[int, int], seed: int = 1) -> list[torch.Tensor]:
    """Return an image (1, C, H, W) for each grid."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, h * patch[0], w * patch[1], generator=generator) for h, w in grids]


def padded(images: list[torch.Tensor], patch: tuple[int, int], extra: int = 0) -> dict[str, torch.Tensor]:
    """Return a row of patches per image, padded with large values to the longest row plus `extra`."""
    patches = [cut_patches(image, *patch)[0] for image in images]
    width = max(map(len, patches)) + extra
    rows = torch.full((len(images), width, patches[0].shape[1]), 100.0)
    mask = torch.zeros(len(images), width, dtype=torch.int32)
    for row, valid, own in zip(rows, mask, patches, strict=True):
        row[: len(own)], valid[: len(own)] = own, 1
    return {"pixel_values": rows, "pixel_attention_mask": mask, "spatial_shapes": grids_of(images, patch)}


def packed(images: list[torch.Tensor], patch: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return the concatenated patches of all images."""
    patches = torch.cat([cut_patches(image, *patch)[0] for image in images])
    return {"pixel_values": patches, "spatial_shapes": grids_of(images, patch)}


def grids_of(images: list[torch.Tensor], patch: tuple[int, int]) -> torch.Tensor:
    """Return the patch grid of each image."""
    return torch.tensor([(image.shape[-2] // patch[0], image.shape[-1] // patch[1]) for image in images])


def tokens_by_image(model: Any, outputs: Any, grids: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Return the tokens of each image without padding, from padded or packed outputs."""
    lengths = [model.num_prefix_tokens + h * w for h, w in grids]
    if len(outputs.last_hidden_state) == 1:
        return list(outputs.last_hidden_state[0].split(lengths))
    return [row[:length] for row, length in zip(outputs.last_hidden_state, lengths, strict=True)]


@pytest.mark.slow(quick=[
    "registers-sdpa", "linear_patches-sdpa", "rotary-eager", "differential-sdpa", "no_projection-eager",
    "cls_mean-sdpa",
])  # fmt: skip
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MANY)
def test_each_image_gets_the_tokens_and_logits_that_it_gets_alone(name: str, attention: str) -> None:
    model = build(name)
    model.set_attn_implementation(attention)
    patch = model.config.patch_shape
    images = images_of(GRIDS, patch)
    alone = [model.vit(image) for image in images]
    logits = [model(image).logits[0] for image in images]
    for inputs in (padded(images, patch), padded(images, patch, extra=3), packed(images, patch)):
        outputs = model.vit(**inputs)
        for ours, one in zip(tokens_by_image(model, outputs, GRIDS), alone, strict=True):
            assert difference(ours, one.last_hidden_state[0]) <= TOLERANCE
        for ours, one in zip(model(**inputs).logits, logits, strict=True):  # per token in models without pooling
            assert difference(ours[: len(one)], one) <= TOLERANCE


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "mean_max", "cls_mean", "map", "query", "prr"])
@pytest.mark.parametrize("over_prefix", [False, True])
def test_padding_is_in_no_pooling(pooling: str, over_prefix: bool) -> None:
    model = build("registers", pooling=pooling, pool_prefix_tokens=over_prefix)
    images = images_of(GRIDS, (8, 14))
    alone = torch.cat([model(image).logits for image in images])
    for inputs in (padded(images, (8, 14), extra=2), packed(images, (8, 14))):
        assert difference(model(**inputs).logits, alone) <= TOLERANCE


@pytest.mark.slow(quick=["packed"])
@pytest.mark.parametrize("form", [padded, packed])
def test_the_gradients_are_those_of_the_images_alone(form: Callable[..., dict[str, torch.Tensor]]) -> None:
    labels = torch.tensor([3, 1, 6, 0, 2])
    for name in ("plain", "factorized", "rotary_mixed"):
        model, again = build(name, pooling="mean"), build(name, pooling="mean")
        images = images_of(GRIDS, (8, 14))
        model(**form(images, (8, 14)), labels=labels).loss.backward()
        logits = torch.cat([again(image).logits for image in images])
        nn.functional.cross_entropy(logits, labels).backward()
        for (path, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
            if theirs.grad.abs().max() > 1e-6:  # key biases have only rounding errors
                assert difference(ours.grad, theirs.grad) <= 1e-4, path


def test_checkpointed_training_of_packed_images_gives_the_same_gradients() -> None:
    model, again = build("plain").train(), build("plain").train()
    again.gradient_checkpointing_enable()
    inputs = packed(images_of(GRIDS, (8, 14)), (8, 14))
    for one in (model, again):
        one(**inputs, labels=torch.arange(5)).loss.backward()
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_stochastic_depth_drops_whole_images_of_a_packed_batch() -> None:
    model = build("plain", drop_path_rate=0.5).train()
    images = images_of([(2, 3), (1, 4), (3, 3)], (8, 14))
    drawn = torch.tensor([0.1, 0.9, 0.7])[:, None, None]
    for layer in model.vit.layers:
        layer.drop_path.uniform = lambda count, *shape, device: drawn[:count]
    both = [model(**form(images, (8, 14))).logits for form in (padded, packed)]
    assert difference(*both) <= TOLERANCE
    for layer in model.vit.layers:
        layer.drop_path.uniform = lambda count, *shape, device: drawn[[1, 1, 2]]
    changed = [model(**form(images, (8, 14))).logits for form in (padded, packed)]
    assert all(difference(one[0], other[0]) > 1e-3 for one, other in zip(both, changed, strict=True))
    assert all(difference(one[1:], other[1:]) <= TOLERANCE for one, other in zip(both, changed, strict=True))


def test_attention_weights_of_packed_images_are_zero_between_images() -> None:
    model = build("plain")
    images = images_of([(2, 3), (1, 4)], (8, 14))
    weights = model(**packed(images, (8, 14)), output_attentions=True).attentions
    alone = [model(image, output_attentions=True).attentions for image in images]
    for layer, (first, second) in zip(weights, zip(*alone, strict=True), strict=True):
        assert layer.shape == (1, 5, 12, 12)
        assert difference(layer[:, :, :7, :7], first) <= TOLERANCE
        assert difference(layer[:, :, 7:, 7:], second) <= TOLERANCE
        assert not layer[:, :, :7, 7:].any()
        assert not layer[:, :, 7:, :7].any()


def test_packed_images_meet_no_product_of_all_tokens() -> None:
    model = build("plain")
    products = []

    def watch(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        products.append((query.shape[2], key.shape[2], mask))
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    transformers.AttentionInterface.register("watching", watch)
    model.set_attn_implementation("watching")
    model(**packed(images_of(GRIDS, (8, 14)), (8, 14)))
    assert products == [(1 + h * w, 1 + h * w, None) for h, w in GRIDS] * 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_source_combines_with_many_sizes_is_refused(name: str) -> None:
    for variation in [variation for variation in VARIATIONS if variation.startswith(name)]:
        model = build(variation)
        with pytest.raises(ValueError, match=r"images of many sizes are not combined with .* by any source"):
            model(**packed(images_of(GRIDS, model.config.patch_shape), model.config.patch_shape))


def _changed(**changes: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = padded(images_of(GRIDS, (8, 14)), (8, 14))
    return {name: value for name, value in {**inputs, **changes}.items() if value is not None}


IMPOSSIBLE = {
    "no grids": ({"spatial_shapes": None}, "need spatial_shapes beside them"),
    "grids beside pixels": ({"pixel_values": torch.zeros(5, 3, 24, 56)}, "beside spatial_shapes: expected"),
    "another patch": ({"pixel_values": torch.zeros(5, 12, 335)}, r"padded \(batch, patches, 336\)"),
    "a mask beside pixels": (
        {"pixel_values": torch.zeros(5, 3, 24, 56), "spatial_shapes": None}, "it needs spatial_shapes"
    ),
    "another number of grids": ({"spatial_shapes": torch.ones(4, 2, dtype=torch.long)}, "one for each row"),
    "too large a grid": ({"spatial_shapes": torch.full((5, 2), 4)}, "of at most as many patches"),
    "a grid of nothing": ({"spatial_shapes": torch.zeros(5, 2, dtype=torch.long)}, "at least one image, and one patch"),
    "no image": ({"spatial_shapes": torch.zeros(0, 2, dtype=torch.long)}, "at least one image, and one patch"),
    "three sides": ({"spatial_shapes": torch.ones(5, 3, dtype=torch.long)}, r"expected ints of shape \(images, 2\)"),
    "fractions": ({"spatial_shapes": torch.ones(5, 2)}, r"expected ints of shape \(images, 2\)"),
    "another mask": (
        {"pixel_attention_mask": torch.ones(5, 12, dtype=torch.int32)}, "contradicts spatial_shapes"
    ),
    "a mask of another shape": ({"pixel_attention_mask": torch.ones(5, 13)}, r"expected \(5, 12\), one per patch"),
    "another total": ({"pixel_values": torch.zeros(50, 336), "pixel_attention_mask": None},
                      "50 patches, and the grids"),
    "sizes beside grids": ({"image_sizes": torch.ones(5, 2, dtype=torch.long)}, "and no spatial_shapes"),
    "a size beyond the padding": ({"pixel_values": torch.zeros(2, 3, 24, 56), "spatial_shapes": None,
                                   "pixel_attention_mask": None, "image_sizes": torch.tensor([[24, 56], [32, 56]])},
                                  "at most H and W"),
    "another number of sizes": ({"pixel_values": torch.zeros(2, 3, 24, 56), "spatial_shapes": None,
                                 "pixel_attention_mask": None, "image_sizes": torch.tensor([[24, 56]])},
                                "and width of each"),
    "a size in part of a patch": ({"pixel_values": torch.zeros(1, 3, 24, 56), "spatial_shapes": None,
                                   "pixel_attention_mask": None, "image_sizes": torch.tensor([[24, 55]])},
                                  "24, 55"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_inputs_that_contradict_each_other_are_refused(case: str) -> None:
    changes, expected = IMPOSSIBLE[case]
    with pytest.raises(ValueError, match=expected):
        build("plain")(**_changed(**changes))


def test_padded_images_with_their_sizes_are_the_packed_patches() -> None:
    images, model = images_of(GRIDS, (8, 14)), build("rotary_alternating")
    inputs = packed(images, (8, 14))
    sizes = torch.tensor([image.shape[-2:] for image in images])
    height, width = sizes.amax(0).tolist()
    pixel_values = torch.full((len(images), 3, height + 1, width), 100.0)  # what padding holds is not read
    for row, image in zip(pixel_values, images, strict=True):
        row[:, : image.shape[-2], : image.shape[-1]] = image[0]
    with torch.no_grad():
        expected, found = model(**inputs).logits, model(pixel_values, image_sizes=sizes).logits
    assert torch.equal(found, expected)


def test_grids_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(TypeError, match="spatial_shapes is a list: expected a tensor"):
        build("plain")(**_changed(spatial_shapes=GRIDS))


def test_what_is_for_images_of_one_size_says_so() -> None:
    inputs = packed(images_of(GRIDS, (8, 14)), (8, 14))
    config = tiny_config(use_mask_token=True)
    masked = torch.ones(1, len(inputs["pixel_values"]), dtype=torch.bool)
    with pytest.raises(ValueError, match="bool_masked_pos is for images of one size"):
        PlainViTForImageClassification(config).vit(**inputs, bool_masked_pos=masked)
    for kind in (PlainViTBackbone, PlainViTForMaskedImageModeling):
        with pytest.raises((ValueError, TypeError), match="spatial_shapes|image"):
            kind(config)(**inputs)
    model = build("plain", patch_dropout_prob=0.5).train()
    with pytest.raises(ValueError, match="patch dropout is not combined with images of many sizes"):
        model(**inputs)
    model = build("plain")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="cannot leave out padding"):
        model(**padded(images_of(GRIDS, (8, 14)), (8, 14)))


# transformers' SigLIP 2


def siglip2(case: str, dtype: torch.dtype = torch.float32) -> Any:
    return randomize_(CASES[case]()).eval().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["Siglip2VisionModel", "Siglip2VisionModel without a head", "Siglip2ForImageClassification", "Siglip2Model"]
)
def test_siglip_2_has_the_same_numbers_for_images_of_many_sizes(case: str, dtype: torch.dtype) -> None:
    module = siglip2(case, dtype)
    model = from_module(module)
    grids = [(4, 4), (5, 3), (2, 7), (1, 1), (8, 2)]
    inputs = padded(images_of(grids, (14, 14)), (14, 14))
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    allowed = TOLERANCE if dtype == torch.float32 else 2e-2
    theirs, ours = tower_of(module)(**inputs), model(**inputs)
    if "logits" in theirs:
        assert difference(ours.logits, theirs.logits) <= allowed
        return
    expected = tokens_by_image(model, theirs, grids)
    for one, other in zip(tokens_by_image(model, ours, grids), expected, strict=True):
        assert difference(one, other) <= allowed
    if theirs.pooler_output is not None:
        assert difference(ours.pooler_output, theirs.pooler_output) <= allowed


@pytest.mark.parametrize("case", ["Idefics3VisionTransformer", "Idefics3VisionTransformer, positions that repeat"])
def test_idefics_has_the_same_tokens_for_images_of_many_sizes(case: str) -> None:
    module = tiny_transformers(case)
    model: Any = from_module(module)
    grids = [(4, 4), (5, 3), (2, 7), (1, 1), (5, 7)]
    images = images_of(grids, (14, 14))
    canvas, mask = torch.full((5, 3, 70, 98), 100.0), torch.zeros(5, 5, 7, dtype=torch.bool)
    for place, visible, image, (h, w) in zip(canvas, mask, images, grids, strict=True):
        place[:, : h * 14, : w * 14], visible[:h, :w] = image[0], True
    theirs = module(canvas, patch_attention_mask=mask).last_hidden_state
    for form in (padded, packed):
        tokens = tokens_by_image(model, model(**form(images, (14, 14))), grids)
        for one, other, visible in zip(tokens, theirs, mask, strict=True):
            assert difference(one, other[visible.flatten()]) <= TOLERANCE


def test_siglip_2_has_the_same_gradients_for_images_of_many_sizes() -> None:
    module = siglip2("Siglip2ForImageClassification")
    module.vision_model.use_head = False
    model = from_module(module)
    images = images_of([(4, 4), (5, 3), (2, 7)], (14, 14))
    inputs, labels = padded(images, (14, 14)), torch.tensor([1, 5, 2])
    module(**inputs, labels=labels).loss.backward()
    model(**inputs, labels=labels).loss.backward()
    named = dict(module.named_parameters())
    for ours, theirs in (
        ("vit.embeddings.position_embeddings.weight", "vision_model.embeddings.position_embedding.weight"),
        ("vit.embeddings.patch_embeddings.projection.weight", "vision_model.embeddings.patch_embedding.weight"),
        ("vit.layers.1.attention.q_proj.weight", "vision_model.encoder.layers.1.self_attn.q_proj.weight"),
        ("vit.layers.2.mlp.fc2.bias", "vision_model.encoder.layers.2.mlp.fc2.bias"),
        ("classifier.weight", "classifier.weight"),
    ):
        assert difference(model.get_parameter(ours).grad, named[theirs].grad) <= TOLERANCE, ours


def test_a_grid_that_is_no_square_is_refused_with_the_class_s_own_reason() -> None:
    config = transformers.Siglip2VisionConfig(**{**NAFLEX, "num_patches": 12})
    with pytest.raises(Exception, match="num_patches=12: the class itself takes the grid for a square"):
        from_module(transformers.Siglip2VisionModel(config))
