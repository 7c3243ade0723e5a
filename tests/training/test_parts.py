"""Parts of a training run: data order and augmentation, optimizer groups, schedule, heads, evaluation, files."""

import itertools
import json
import math
from collections import Counter, defaultdict
from typing import get_args

import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, Image
from timm.data.distributed_sampler import RepeatAugSampler
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from transformers import (
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    ResNetConfig,
    ResNetForImageClassification,
    SamImageProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    get_scheduler,
)
from transformers.modeling_outputs import ImageClassifierOutput
from vit_pytorch import ViT

from plain_vit import PlainViTConfig, PlainViTImageProcessor
from plain_vit.conversion import from_module
from plain_vit.errors import HubError, TrainingError
from plain_vit.training.data.augmentation import (
    AugmentedImages,
    TrainingTransform,
    input_size,
    training_transform,
)
from plain_vit.training.data.decoding import ProcessedImages, decode_image
from plain_vit.training.data.sampling import ShuffledStream, randomness
from plain_vit.training.metrics import evaluate_classifier, judge_logits
from plain_vit.training.models import checkpoint_hints, has_known_config, head_of, load_classifier, with_new_head
from plain_vit.training.optimization import (
    MovingAverage,
    heights_above_input,
    learning_rate_factor,
    make_optimizer,
)
from tests.conftest import randomize_
from tests.sizes import few
from tests.training.runs import RESNET, SMALL, small_vit


@pytest.fixture
def images() -> Dataset:
    """Return 11 noisy images of 9 by 13 pixels."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (11, 9, 13, 3), dtype=np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(3)})
    rows = {"image": [PIL.Image.fromarray(image) for image in pixels], "label": [row % 3 for row in range(11)]}
    return Dataset.from_dict(rows, features=features)


# The order of training


def in_batches(stream, size):
    drawn = list(stream)
    return [drawn[first : first + size] for first in range(0, len(drawn), size)]


def test_stream_visits_every_row_once_per_epoch_in_another_order():
    drawn = list(ShuffledStream(7, length=3 * 7 + 2, seed=5))
    orders = [[row for epoch, row in drawn if epoch == number] for number in range(4)]
    assert [sorted(order) for order in orders[:3]] == [list(range(7))] * 3
    assert len({tuple(order) for order in orders[:3]}) == 3
    assert len(orders[3]) == 2


@pytest.mark.parametrize("balanced_by", [None, [0] * 20 + [3] * 3], ids=["shuffled", "balanced"])
def test_stream_without_copies_is_that_of_numpy_whatever_the_batch(balanced_by):
    shares = None if balanced_by is None else [1 / 40] * 20 + [1 / 6] * 3
    expected = []
    for epoch in range(3):
        rng = np.random.default_rng((5, epoch))
        order = rng.permutation(23) if shares is None else rng.choice(23, size=23, p=shares)
        expected += [(epoch, row) for row in order.tolist()]
    for batch_size in (1, 5, 31):
        stream = ShuffledStream(23, length=60, seed=5, balanced_by=balanced_by, batch_size=batch_size)
        assert [place[:2] for place in stream] == expected[:60]
        assert len(set(stream)) == 60, "a row that is drawn again is augmented otherwise"
        assert balanced_by is not None or all(len(place) == 2 for place in stream)


def test_epoch_of_copies_has_as_many_images_and_a_third_of_them_distinct():
    drawn = list(ShuffledStream(23, length=4 * 23, seed=5, repeats=3, batch_size=7))
    plain = list(ShuffledStream(23, length=4 * 23, seed=5))
    for epoch in range(4):
        places = [place for place in drawn if place[0] == epoch]
        assert len(places) == len(set(places)) == 23
        copies = Counter(row for _, row, *_ in places)
        assert copies.keys() == {row for _, row in plain[23 * epoch : 23 * epoch + 8]}
        assert sorted(copies.values()) == [2, 3, 3, 3, 3, 3, 3, 3]
        assert Counter(place[2:] for place in places) == {(): 8, (1,): 8, (2,): 7}


def test_copies_are_drawn_in_the_order_of_timm():
    processes = [RepeatAugSampler(range(512), num_replicas=4, rank=rank, shuffle=False) for rank in range(4)]
    rows = [row for _, row, *_ in ShuffledStream(512, length=512, seed=5, repeats=3)]
    renamed = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    assert [renamed[row] for row in rows] == [row for step in zip(*processes, strict=True) for row in step]


def test_copies_share_a_batch_and_are_never_adjacent():
    for batch in in_batches(ShuffledStream(60, length=600, seed=5, repeats=3, batch_size=12), 12):
        rows = [row for _, row, *_ in batch]
        assert rows == rows[:4] * 3
        assert len(set(rows)) == 4
        assert [place[2:] for place in batch] == [()] * 4 + [(1,)] * 4 + [(2,)] * 4
    # Neither an epoch of 61 nor a batch of 14 is a multiple of 3, so copies of an image can fall into two batches.
    batches_of = defaultdict(set)
    for number, batch in enumerate(in_batches(ShuffledStream(61, length=238, seed=5, repeats=3, batch_size=14), 14)):
        images = [place[:2] for place in batch]
        assert all(image != neighbour for image, neighbour in itertools.pairwise(images))
        for image in images:
            batches_of[image].add(number)
    assert all(max(numbers) - min(numbers) <= 1 for numbers in batches_of.values())


@pytest.mark.parametrize("balanced_by", [None, [0] * 20 + [1] * 3], ids=["shuffled", "balanced"])
@pytest.mark.parametrize("repeats, batch_size", [(1, 12), (3, 1), (3, 12), (3, 31)])
def test_stream_resumes_where_it_stopped(repeats, batch_size, balanced_by):
    options = {"length": 93, "repeats": repeats, "batch_size": batch_size, "balanced_by": balanced_by}
    whole = list(ShuffledStream(23, **options, seed=5))
    for start in range(94):
        rest = ShuffledStream(23, **options, seed=5, start=start)
        assert list(rest) == whole[start:]
        assert len(rest) == 93 - start
    assert list(ShuffledStream(23, **options, seed=6)) != whole


def test_augmentation_depends_on_seed_epoch_row_and_copy_alone(images):
    transform = TrainingTransform(
        decode_image, v2.Compose([v2.PILToTensor(), v2.RandomCrop(5), v2.RandomHorizontalFlip()]), v2.Identity()
    )
    seen = AugmentedImages(images, transform, seed=1)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = seen[2, 4]["pixel_values"]
    assert torch.equal(torch.get_rng_state(), before), "it drew from the generator of the model"
    torch.manual_seed(4)
    assert torch.equal(seen[2, 4]["pixel_values"], first)
    epochs = {seen[epoch, 4]["pixel_values"].numpy().tobytes() for epoch in range(20)}
    assert len(epochs) > 10
    seeds = {AugmentedImages(images, transform, seed)[2, 4]["pixel_values"].numpy().tobytes() for seed in range(20)}
    assert len(seeds) > 10
    copies = {seen[2, 4, copy]["pixel_values"].numpy().tobytes() for copy in range(1, 20)}
    assert len(copies) > 10
    assert all(seen[2, 4, copy]["labels"] == seen[2, 4]["labels"] for copy in range(1, 20))


def test_first_copy_has_the_pixels_of_the_only_one(images):
    transform = training_transform(ViTImageProcessor(size={"height": 9, "width": 13}), augmentation="randaugment")
    for epoch, row in [(0, 0), (2, 4), (3, 10)]:
        torch.manual_seed(randomness(1, epoch, row))
        expected = transform.augment(transform.crop(images[row]["image"]))
        assert torch.equal(AugmentedImages(images, transform, seed=1)[epoch, row]["pixel_values"], expected)


def test_neighbouring_keys_give_unrelated_randomness():
    assert len({randomness(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100
    assert randomness(1, 2) != randomness(2, 1)
    assert randomness(1, 2, 4) == 17396702827223459338


# From image to pixels


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessor(size={"height": 24, "width": 16}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]),
        ViTImageProcessor(size={"height": 24, "width": 16}, do_normalize=False, rescale_factor=1 / 200),
        ViTImageProcessor(size={"height": 24, "width": 16}, do_rescale=False, image_mean=[9] * 3, image_std=[50] * 3),
        PlainViTImageProcessor(size={"height": 24, "width": 16}),
    ],
    ids=["mean and std", "no normalisation", "no rescaling", "ours"],
)
def test_plain_training_pixels_are_those_of_the_image_processor(processor, images):
    image = images[0]["image"]
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    pixels = training_transform(processor)(image)
    assert pixels.shape == (3, 24, 16)
    # Pillow, which resizes here, rounds after each pass: it differs from torchvision by up to 2 of 255 levels.
    level = (expected.max() - expected.min()) / 255
    assert (pixels - expected).abs().max() <= 2.5 * level


def test_input_size_is_the_crop_where_there_is_one():
    crop = {"do_center_crop": True, "crop_size": {"height": 24, "width": 16}}
    assert input_size(PlainViTImageProcessor(size={"shortest_edge": 32}, **crop)) == (24, 16)
    assert input_size(PlainViTImageProcessor(size={"shortest_edge": 32}, do_center_crop=False)) == (32, 32)
    assert input_size(SamImageProcessor(size={"longest_edge": 32}, pad_size={"height": 48, "width": 40})) == (48, 40)
    with pytest.raises(TrainingError, match="expected height and width"):
        input_size(ViTImageProcessor(size={"longest_edge": 32, "shortest_edge": 8}))


@pytest.mark.parametrize("augmentation", ["none", "affine", "randaugment", "trivialaugment"])
def test_augmented_pixels_keep_size_and_range(augmentation, images):
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16})
    transform = training_transform(
        processor, crop_scale=0.5, horizontal_flip=0.5, augmentation=augmentation, random_erasing=0.5
    )
    seen = [transform(images[0]["image"]) for _ in range(10)]
    assert all(pixels.shape == (3, 24, 16) and pixels.min() >= -1 and pixels.max() <= 1 for pixels in seen)
    assert len({pixels.numpy().tobytes() for pixels in seen}) == 10


# Optimisation


def test_weight_decay_falls_on_matrices_and_kernels_alone():
    model = small_vit(num_register_tokens=2, pooling="map")
    groups = make_optimizer(model, "adamw", learning_rate=0.1, weight_decay=0.3).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(parameter)] for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert decayed == {
        name
        for name, parameter in model.named_parameters()
        if name.endswith("weight") and parameter.ndim >= 2 and "position" not in name
    }


@pytest.mark.parametrize("stock", [False, True], ids=["plain-vit", "stock ViT"])
def test_layer_decay_slows_each_block_below_the_head(stock):
    model = ViTForImageClassification(ViTConfig(**SMALL, image_size=16, patch_size=8)) if stock else small_vit()
    optimizer = make_optimizer(model, "adamw", learning_rate=1.0, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {
        names[id(parameter)]: group["peak_lr"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert {rate for name, rate in rates.items() if "embeddings" in name} == {0.5**4}
    for block in range(3):
        assert {rate for name, rate in rates.items() if f".{block}." in name} == {0.5 ** (3 - block)}
    assert {rate for name, rate in rates.items() if name.startswith("classifier")} == {1.0}


def test_layer_decay_refuses_a_model_of_several_stacks():
    config = ResNetConfig(**RESNET)
    with pytest.raises(TrainingError, match="one stack of them"):
        heights_above_input([name for name, _ in ResNetForImageClassification(config).named_parameters()])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule_is_that_of_transformers_but_for_the_first_step(schedule):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    reference = get_scheduler(name, optimizer, num_warmup_steps=5, num_training_steps=23)
    for step in range(23):
        factor = learning_rate_factor(step, total=23, warmup=5, schedule=schedule)
        if step < 5:  # transformers' first step has a learning rate of zero
            assert factor == (step + 1) / 5
        else:
            assert math.isclose(factor, reference.get_last_lr()[0], abs_tol=1e-12)
        optimizer.step()
        reference.step()


def test_average_follows_its_formula():
    model = nn.Linear(3, 2)
    average = MovingAverage(model, 0.75, torch.device("cpu"))
    expected = None
    for _ in range(4):
        nn.init.normal_(model.weight)
        average.update_parameters(model)
        expected = model.weight.detach().clone() if expected is None else 0.75 * expected + 0.25 * model.weight.detach()
    assert torch.allclose(average.module.weight, expected)


def test_average_with_warmup_is_that_of_timm():
    model = nn.Linear(3, 2)
    ours, theirs = (
        MovingAverage(model, 0.75, torch.device("cpu"), warmup=True),
        ModelEmaV3(model, 0.75, use_warmup=True),
    )
    for step in range(1, 14):
        nn.init.normal_(model.weight)
        ours.update_parameters(model)
        theirs.update(model, step=step)
        torch.testing.assert_close(ours.module.weight, theirs.module.weight, rtol=1e-6, atol=1e-7)
    assert theirs.get_decay(5) < theirs.get_decay(14) == 0.75


# Heads


@pytest.mark.parametrize(
    "model",
    [
        lambda: small_vit(),
        lambda: small_vit(pooling="map", use_class_token=False),
        lambda: ViTForImageClassification(ViTConfig(**SMALL, image_size=24, patch_size=8, num_labels=5)),
        lambda: ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=5)),
        lambda: DeiTForImageClassificationWithTeacher(DeiTConfig(**SMALL, image_size=24, patch_size=8, num_labels=5)),
    ],
    ids=["plain-vit", "map pooling", "stock ViT", "ResNet", "two heads"],
)
@pytest.mark.parametrize("count", [4, 5])
def test_new_head_is_zero_and_all_else_is_kept(model, count):
    old = randomize_(model()).eval()
    new = with_new_head(old, [f"class {number}" for number in range(count)]).eval()
    assert new.config.num_labels == count
    assert new.config.id2label[1] == "class 1"
    head = head_of(old)
    assert head
    assert all(
        torch.equal(tensor, torch.zeros_like(tensor) if name in head else old.state_dict()[name])
        for name, tensor in new.state_dict().items()
    )
    assert old.config.num_labels == 5
    assert new(torch.randn(2, 3, 24, 24)).logits.abs().max() == 0


def test_checkpoint_without_weights_of_its_body_is_refused(tmp_path):
    config = ViTConfig(**SMALL, image_size=24, patch_size=8, num_labels=5)
    model = ViTForImageClassification(config)
    kept = {
        name: tensor for name, tensor in model.state_dict().items() if "layers.1" not in name and "layer.1" not in name
    }
    model.save_pretrained(tmp_path, state_dict=kept)
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match="lacks weights"):
        load_classifier(str(tmp_path), ["a", "b"])


def test_from_scratch_keeps_the_architecture_and_no_weight(tmp_path):
    small_vit(image_size=24, num_labels=7).save_pretrained(tmp_path)
    PlainViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    fresh, processor = load_classifier(str(tmp_path), ["a", "b"], from_scratch=True)
    assert {parameter.dtype for parameter in fresh.parameters()} == {torch.float32}
    tuned, _ = load_classifier(str(tmp_path), ["a", "b"])
    assert fresh.config.hidden_size == tuned.config.hidden_size == SMALL["hidden_size"]
    assert fresh.config.num_labels == 2
    assert dict(processor.size) == {"height": 24, "width": 24}
    names = [name for name, parameter in tuned.named_parameters() if parameter.ndim == 2 and "classifier" not in name]
    assert names
    assert not [name for name in names if torch.equal(fresh.state_dict()[name], tuned.state_dict()[name])]


def test_positions_from_scratch_are_drawn_for_the_training_size_and_not_resampled(tmp_path):
    # 64 x 64 positions resampled from 3 x 3 are smooth; random ones are not similar to their neighbours.
    small_vit(image_size=24, patch_size=8, position_resampling="truncate").save_pretrained(tmp_path)
    PlainViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    model, processor = load_classifier(str(tmp_path), ["a", "b"], from_scratch=True, image_size=(512, 512))
    assert input_size(processor) == (512, 512)
    assert model.config.image_shape == (512, 512)
    (table,) = (tensor for name, tensor in model.state_dict().items() if "position" in name)
    grid = table.squeeze(0)[-64 * 64 :].unflatten(0, (64, 64))
    neighbours = nn.functional.cosine_similarity(grid[:, 1:], grid[:, :-1], dim=-1).mean()
    assert abs(neighbours) < 0.05
    with pytest.raises(TrainingError, match="add --position_resampling"):  # a trained table needs resampling
        load_classifier(str(tmp_path), ["a", "b"], image_size=(512, 512))


def values_of(field):
    return get_args(PlainViTConfig.__annotations__[field])


POSITIONS = [
    *({"position_embedding_type": kind, "position_resampling": way} for kind in values_of("position_embedding_type")
      for way in values_of("position_resampling") if way not in ("truncate", "bucketed")),
    {"position_embedding_type": "learned", "position_resampling_to_square": True},
    *({"relative_position_bias": {"type": kind, "resampling": way, "shared": shared}}
      for kind in ("table", "mlp") for way in ("bilinear", "geometric") for shared in (False, True)),
    *({"rope_parameters": {"rope_type": kind}, "head_dim": 4} for kind in ("axial", "mixed")),
]  # fmt: skip


def saved_vit(folder, **fields):
    """Save a model for 24 x 24 pixels in 3 x 3 patches with random weights, and return it."""
    if fields.get("position_embedding_type") == "sincos_2d":
        fields["position_embedding_on_prefix"] = False
    model = randomize_(small_vit(image_size=24, patch_size=8, **fields)).eval()
    model.save_pretrained(folder)
    PlainViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    return model


QUICK = ["learned-bilinear", "learned_2d-bilinear_antialias", "factorized-bilinear_align_corners", "none-bicubic",
         "table-bilinear-True"]  # fmt: skip
OF_ROTATIONS = POSITIONS[-2:]


def name_of(fields):
    values = [part for value in fields.values() for part in (value.values() if isinstance(value, dict) else [value])]
    return "-".join(map(str, values))


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize(
    "fields",
    [fields for fields in POSITIONS if name_of(fields) in QUICK or fields in OF_ROTATIONS]
    + few((fields for fields in POSITIONS[:-2] if name_of(fields) not in QUICK), 19),
    ids=name_of,
)
def test_positions_of_every_kind_are_resampled_once_for_the_training_size(fields, tmp_path):
    source = saved_vit(tmp_path, **fields)
    model, _ = load_classifier(str(tmp_path), ["a", "b"], image_size=(40, 32))
    assert model.config.image_shape == (40, 32)
    pixels = torch.randn(2, 3, 40, 32)
    with torch.no_grad():
        before, after = source.vit(pixels).last_hidden_state, model.vit.eval()(pixels).last_hidden_state
        of_others = source.vit(torch.randn(2, 3, 40, 32)).last_hidden_state
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    assert not torch.allclose(before, of_others)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"relative_position_bias": {"type": "query"}}, "keep the model's own size"),
        ({"position_embedding_type": "learned_2d", "position_resampling_to_square": True}, "give a square size"),
        ({"position_embedding_type": "factorized", "position_resampling": "truncate"}, "cannot grow a table"),
    ],
)
def test_positions_that_no_other_grid_can_have_are_refused(fields, message, tmp_path):
    source = saved_vit(tmp_path, **fields)
    with pytest.raises(TrainingError, match=message):
        load_classifier(str(tmp_path), ["a", "b"], image_size=(40, 32))
    if "square" in message:
        model, _ = load_classifier(str(tmp_path), ["a", "b"], image_size=(40, 40))
        pixels = torch.randn(2, 3, 40, 40)
        torch.testing.assert_close(
            model.vit.eval()(pixels).last_hidden_state, source.vit(pixels).last_hidden_state, rtol=0, atol=1e-6
        )


def test_preset_is_trained_from_scratch_only():
    model, processor = load_classifier("vit-tiny-patch16-32", ["a", "b", "c"], from_scratch=True)
    assert model.config.num_labels == 3
    assert input_size(processor) == (32, 32)
    with pytest.raises(TrainingError, match="--from_scratch"):
        load_classifier("vit-tiny-patch16-32", ["a", "b"])


def test_a_model_by_name_is_opened_as_its_source_is(tmp_path, hub):
    fresh, processor = load_classifier("timm:test_vit", ["a", "b"], from_scratch=True)
    assert (fresh.config.model_type, fresh.config.num_labels) == ("plain_vit", 2)
    assert dict(processor.size)["shortest_edge"] == 168  # of timm's default weights: 160 / 0.95
    with pytest.raises(HubError, match="timm/test_vit.r160_in1k is neither"):
        load_classifier("timm:test_vit", ["a", "b"])
    stock = ViTForImageClassification(ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=3))
    stock.save_pretrained(tmp_path / "saved")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "saved")
    hub.add_repository("alice/vit", files={path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()})
    assert has_known_config("timm:test_vit")  # pre-training from scratch downloads nothing either
    assert not has_known_config("hf:alice/vit")
    for scratch in (False, True):
        model, _ = load_classifier("hf:alice/vit", ["a", "b"], from_scratch=scratch)
        assert (type(model), model.config.num_labels) == (ViTForImageClassification, 2)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_weights_are_trained_in_float32_as_they_were_stored(stored, tmp_path):
    source = small_vit(image_size=24).to(stored)
    source.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    PlainViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    model, _ = load_classifier(str(tmp_path), ["a", "b"])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(
        torch.equal(tensor, model.vit.state_dict()[name]) for name, tensor in source.vit.float().state_dict().items()
    )


def test_checkpoint_of_another_library_is_opened_in_float32_and_keeps_its_body(tmp_path):
    arguments = {"image_size": 24, "patch_size": 8, "dim": 12, "depth": 3, "heads": 2, "dim_head": 6, "mlp_dim": 20}
    source = randomize_(ViT(**arguments, num_classes=5)).bfloat16()
    torch.save(source.state_dict(), tmp_path / "vit.pt")
    expected = from_module(source.float()).vit.state_dict()
    hints = checkpoint_hints(["num_attention_heads=2", "image_size=24x24", "patch_size=8", "pooling=cls"])
    assert hints == {"num_attention_heads": 2, "image_size": (24, 24), "patch_size": 8, "pooling": "cls"}
    for wrong in ("heads=2", "num_attention_heads", "num_attention_heads="):
        with pytest.raises(
            TrainingError, match="is not a hint: expected name=value, the name one of num_attention_heads"
        ):
            checkpoint_hints([wrong])
    model, processor = load_classifier(str(tmp_path / "vit.pt"), ["a", "b"], hints=hints)
    assert input_size(processor) == (24, 24)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.vit.state_dict().items())
    assert not model.classifier.weight.any()
    fresh, _ = load_classifier(str(tmp_path / "vit.pt"), ["a", "b"], hints=hints, from_scratch=True)
    assert {parameter.dtype for parameter in fresh.parameters()} == {torch.float32}
    name = "layers.1.mlp.fc1.weight"
    assert not torch.equal(fresh.vit.state_dict()[name], expected[name])


# Evaluation


class Constant(nn.Module):
    """Return logits that are given as pixels."""

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=pixel_values)


def test_evaluation_equals_one_batch_of_everything():
    logits, labels = torch.randn(11, 4), torch.randint(4, (11,))
    rows = [{"pixel_values": row, "labels": label} for row, label in zip(logits, labels, strict=True)]
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(rows, batch_size=3))
    result = evaluate_classifier(Constant(), loader, accelerator, size=11)
    assert result.accuracy == (logits.argmax(1) == labels).double().mean().item()
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits.double(), labels).item(), rel=1e-6)
    assert result.count == 11
    assert np.array_equal(result.labels, labels.numpy())
    assert np.array_equal(result.predictions, logits.argmax(1).numpy())
    assert np.array_equal(result.confidences, logits.softmax(1).max(1).values.numpy())
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")
    assert np.array_equal(result.ranks, (order == labels.numpy()[:, None]).argmax(axis=1))
    with pytest.raises(TrainingError, match="11 images were evaluated, but the set has 12"):
        evaluate_classifier(Constant(), loader, accelerator, size=12)


def test_evaluation_gathers_a_few_numbers_of_each_image_however_many_classes_there_are(monkeypatch):
    rows = [{"pixel_values": torch.randn(500), "labels": torch.tensor(number)} for number in range(20)]
    accelerator = Accelerator(cpu=True)
    gathered: list[torch.Tensor] = []
    gather = accelerator.gather_for_metrics

    def recorded(tensors):
        gathered.extend(tensors)
        return gather(tensors)

    monkeypatch.setattr(accelerator, "gather_for_metrics", recorded)
    result = evaluate_classifier(Constant(), accelerator.prepare(DataLoader(rows, batch_size=6)), accelerator, size=20)
    assert sum(tensor.numel() for tensor in gathered) == 13 * 20
    kept = (result.labels, result.ranks, result.top, result.probabilities)
    assert sum(array.size for array in kept) == 12 * 20


def test_rank_of_equal_and_of_missing_logits():
    logits = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 2.0, 1.0], [math.nan, 1.0, 2.0]])
    classes, values = judge_logits(logits, torch.tensor([0, 2, 2, 0]))
    assert classes[:, 1].tolist() == [0, 2, 1, 3]
    assert values[3].isnan().all()


def test_evaluation_pixels_are_the_image_processors(images):
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16})
    batch = ProcessedImages(processor)([images[row] for row in (3, 5)])
    expected = processor([images[row]["image"] for row in (3, 5)], return_tensors="pt")["pixel_values"]
    assert torch.equal(batch["pixel_values"], expected)
    assert batch["labels"].tolist() == [0, 2]
