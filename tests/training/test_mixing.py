"""Randomness in a step depends on an image's position in the step's batch, and not on the process that holds it."""

from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from transformers import BeitConfig, BeitForImageClassification, SwinConfig, SwinForImageClassification

from plain_vit import PlainViTForImageClassification
from plain_vit.training.arguments import parse_arguments
from plain_vit.training.data import load_classification_data
from plain_vit.training.data.mixing import Mixing, collate_followed
from plain_vit.training.data.sampling import MicroBatches, ShuffledStream
from plain_vit.training.placed_randomness import PlacedUniform, Places, StepUniform, draw_by_place
from plain_vit.training.tasks.classification import Classification
from tests.conftest import randomize_
from tests.tiny import tiny_config
from tests.training.runs import open_script, small_vit

CPU = torch.device("cpu")
IMAGES = 12


# Mixup and CutMix


def blended(mixing: Mixing, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend images in micro-batches; each image is constant, with its number plus 1 as value."""
    pixels = (torch.arange(IMAGES) + 1.0)[:, None, None, None].expand(-1, 3, 20, 14).clone()
    blend = mixing.blend(step)
    assert blend is not None
    parts = []
    for first in range(0, IMAGES, micro_batch):
        own, after = slice(first, first + micro_batch), (first + micro_batch) % IMAGES
        following = {"pixel_values": pixels[after][None], "labels": torch.tensor([after])}
        parts.append(blend(pixels[own].clone(), torch.arange(IMAGES)[own], following, IMAGES))
    images, targets = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(targets)


@pytest.mark.parametrize("mixup, cutmix", [(0.4, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_blend_is_the_same_however_the_batch_is_divided(mixup, cutmix):
    mixing = Mixing(mixup, cutmix, seed=3)
    for step in range(20):
        images, targets = blended(mixing, step, IMAGES)
        for micro_batch in (1, 2, 3, 4, 6):
            again, targets_again = blended(mixing, step, micro_batch)
            assert torch.equal(images, again)
            assert torch.equal(targets, targets_again)


@pytest.mark.parametrize("mixup, cutmix", [(0.4, 0.0), (0.0, 1.0)])
def test_labels_have_the_shares_of_the_images(mixup, cutmix):
    seen = set()
    for step in range(50):
        images, targets = blended(Mixing(mixup, cutmix, seed=0), step, 4)
        assert torch.allclose(targets.sum(dim=1), torch.ones(IMAGES))
        for number in range(IMAGES):
            after = (number + 1) % IMAGES
            own, other = targets[number, number], targets[number, after]
            assert float(own + other) == pytest.approx(1, abs=1e-6)
            mean = float(images[number].mean())
            assert mean == pytest.approx(float(own * (number + 1) + other * (after + 1)), abs=1e-4)
        seen.add(round(float(targets[0, 0]), 4))
        if cutmix:
            assert set(images[0].unique().tolist()) <= {1.0, 2.0}
    assert len(seen) > 20, "each step draws its own share"


def test_shares_have_the_distribution_of_their_alpha():
    for alpha in (0.2, 1.0, 4.0):
        shares = [blend.share for step in range(4000) if (blend := Mixing(alpha, 0.0, seed=1).blend(step))]
        expected = np.random.default_rng(0).beta(alpha, alpha, 100_000)
        quantiles = np.linspace(0.1, 0.9, 9)
        assert np.abs(np.quantile(shares, quantiles) - np.quantile(expected, quantiles)).max() < 0.04
    cuts = [blend.center is not None for step in range(4000) if (blend := Mixing(0.2, 1.0, seed=1).blend(step))]
    assert 0.46 < np.mean(cuts) < 0.54


def test_nothing_is_blended_unless_asked():
    assert Mixing(0.0, 0.0, seed=0).blend(3) is None


def test_partner_in_another_process_comes_with_the_batch_and_is_counted_once():
    examples: list[dict[str, Any]] = [
        {"pixel_values": torch.full((3, 2, 5), float(number)), "labels": number, "broken": "a file" * (number == 3)}
        for number in range(4)
    ]
    batch = collate_followed(examples)
    assert batch["labels"].tolist() == [0, 1, 2]
    assert batch["broken"] == ["", "", ""]
    assert batch["following"]["labels"].tolist() == [3]
    assert batch["following"]["pixel_values"].shape == (1, 3, 2, 5)
    assert "broken" not in batch["following"]


# Micro-batches


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("balanced", [False, True])
def test_micro_batches_of_all_processes_are_the_stream(repeats, balanced):
    options = {"seed": 5, "repeats": repeats, "batch_size": 12, "balanced_by": [row % 3 for row in range(23)]}
    if not balanced:
        del options["balanced_by"]
    whole = list(ShuffledStream(23, length=96, **options))
    for start, processes, parts in ((0, 1, 1), (24, 2, 3), (0, 4, 1), (60, 3, 2), (0, 12, 1)):
        size = 12 // processes // parts
        streams = [
            list(
                MicroBatches(
                    ShuffledStream(23, length=96, start=start, **options), size, process=process, processes=processes,
                    followed=True,
                )
            )
            for process in range(processes)
        ]  # fmt: skip
        order = [batch for batches in zip(*streams, strict=True) for batch in batches]
        assert [key for batch in order for key in batch[:-1]] == whole[start:]
        for number, batch in enumerate(order):
            first_of_step = start + number * size // 12 * 12
            after = first_of_step + (number * size % 12 + size) % 12
            assert batch[-1] == whole[after]


def test_a_process_does_not_look_at_the_images_of_the_others(monkeypatch):
    asked = []
    whole_key = ShuffledStream._key

    def key(stream, place):
        asked.append(place)
        return whole_key(stream, place)

    monkeypatch.setattr(ShuffledStream, "_key", key)
    stream = ShuffledStream(1000, length=640, seed=1, batch_size=64)
    assert len(list(MicroBatches(stream, 8, process=3, processes=8))) == 10
    assert len(asked) == 80


# Layers that drop branches and patches


def test_numbers_are_uniform_and_unrelated():
    places = Places(seed=4)
    places.set(7, 0, 2000, CPU)
    numbers = PlacedUniform(places, 0)(2000, 50, device=CPU).double()
    other_layer = PlacedUniform(places, 1)(2000, 50, device=CPU).double()
    places.set(8, 0, 2000, CPU)
    other_step = PlacedUniform(places, 0)(2000, 50, device=CPU).double()
    counts = np.histogram(numbers.numpy(), bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 150, "chi-squared with 99 degrees of freedom"
    assert float(numbers.mean(dim=0).sub(0.5).abs().max()) < 0.04
    assert float(numbers.mean(dim=1).sub(0.5).abs().max()) < 0.25
    for one, other in (
        (numbers, other_layer), (numbers, other_step), (numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1]),
    ):  # fmt: skip
        assert abs(np.corrcoef(one.flatten(), other.flatten())[0, 1]) < 0.02


@pytest.mark.parametrize("batches", [1, 3])
def test_model_drops_the_same_branches_and_patches_however_the_batch_is_divided(batches):
    config = tiny_config(drop_path_rate=0.5, patch_dropout_prob=0.4)
    model = randomize_(PlainViTForImageClassification(config)).train()
    places = Places(seed=0)
    assert draw_by_place(model, places) == 4
    pixels = torch.randn(6, 3, 24, 56)
    places.set(3, 0, 6, CPU)
    state = torch.get_rng_state()
    expected = model(pixels).logits
    parts = []
    for first in range(0, 6, 6 // batches):
        places.set(3, first, 6 // batches, CPU)
        parts.append(model(pixels[first : first + 6 // batches]).logits)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), state), "nothing else is random"
    places.set(4, 0, 6, CPU)
    assert not torch.allclose(model(pixels).logits, expected, atol=1e-3)


def test_coordinates_of_rotary_positions_move_with_the_step_alone():
    limits = {"shift": 0.5, "jitter": 1.5, "rescale": 2.0}
    model = PlainViTForImageClassification(tiny_config(rope_parameters=limits)).train()
    places = Places(seed=5)
    assert draw_by_place(model, places) >= 1
    seen: list[torch.Tensor] = []
    for step, first, count in ((0, 0, 4), (0, 2, 2), (1, 0, 4)):
        places.set(step, first, count, CPU)
        torch.manual_seed(len(seen))
        seen.append(model.vit.rotary_embedding.coordinates((3, 4), CPU))
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2])
    numbers = torch.stack([StepUniform(places, layer)(5, CPU) for layer in range(400)])
    assert abs(numbers.mean().item() - 0.5) < 0.03
    assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max() < 0.2


def test_drop_path_of_other_libraries_draws_by_place_too():
    common = {"num_labels": 3, "drop_path_rate": 0.5, "image_size": 32}
    beit = BeitConfig(hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=20, patch_size=8,
                      hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **common)  # fmt: skip
    swin = SwinConfig(embed_dim=12, depths=[2, 2], num_heads=[2, 2], patch_size=4, window_size=4, **common)
    for model in (BeitForImageClassification(beit), SwinForImageClassification(swin)):
        randomize_(model).train()
        names = list(model.state_dict())
        places = Places(seed=0)
        assert draw_by_place(model, places) >= 2
        assert list(model.state_dict()) == names
        pixels = torch.randn(4, 3, 32, 32)
        places.set(1, 0, 4, CPU)
        first = model(pixels).logits
        torch.manual_seed(9)
        assert torch.equal(model(pixels).logits, first)
        places.set(2, 0, 4, CPU)
        assert not torch.allclose(model(pixels).logits, first, atol=1e-4)
        plain = type(model)(model.config)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model.eval()(pixels).logits, plain.eval()(pixels).logits)


@pytest.mark.parametrize(
    "probability, switch", [(1.0, 0.5), (0.3, 0.5), (0.7, 0.1), (1.0, 0.0), (1.0, 1.0), (0.0, 0.5)]
)
def test_steps_are_blended_and_cut_as_often_as_by_timm(probability, switch):
    options = {"probability": probability, "switch_probability": switch}
    blends = [Mixing(0.8, 1.0, seed=2, **options).blend(step) for step in range(3000)]
    theirs = timm.data.Mixup(0.8, 1.0, prob=probability, switch_prob=switch)
    np.random.seed(0)
    drawn = [theirs._params_per_batch() for _ in range(3000)]
    for ours, others in (
        ([blend is not None for blend in blends], [share != 1 for share, _ in drawn]),
        ([blend is not None and blend.center is not None for blend in blends], [cuts for _, cuts in drawn]),
    ):
        assert np.mean(ours) == pytest.approx(np.mean(others), abs=0.05)
    assert (np.mean([blend is None for blend in blends]) == 0) == (probability == 1)


def test_steps_after_the_last_epoch_of_mixing_are_not_blended():
    mixing = Mixing(0.8, 1.0, seed=2, off_step=7)
    assert [mixing.blend(step) is not None for step in range(10)] == [True] * 7 + [False] * 3
    assert [mixing.blend(step) for step in range(7)] == [Mixing(0.8, 1.0, seed=2).blend(step) for step in range(7)]
    assert Mixing(0.8, 1.0, seed=2, off_step=0).blend(0) is None


def test_options_of_mixing_reach_the_task():
    words = ["--model", "m", "--dataset", "digits", "--output_dir", "o", "--batch_size", "64", "--mixup", "0.2"]
    words += ["--cutmix", "1", "--mixup_probability", "0.7", "--switch_probability", "0.1", "--mixup_off_epoch", "2"]
    kind = open_script("finetune_image_classification").FinetuneArguments
    options = parse_arguments(kind, words, description=None)
    data = load_classification_data("digits")
    task = Classification(small_vit(), None, data, options, torch.nn.Identity())
    expected = Mixing(0.2, 1.0, 0, probability=0.7, switch_probability=0.1, off_step=45)  # 2 x 1,437 images / 64
    assert task.mixing == expected
