"""The conversion engine: strict in both directions, independent of the order of its rows."""

import random

import pytest
import torch

from plain_vit import PlainViTConfig
from plain_vit.conversion.tables.engine import (
    ADD_FIRST_AXIS,
    DROP_FIRST_AXIS,
    IDENTITY,
    KERNEL_TO_PIXELS,
    PIXELS_TO_KERNEL,
    SPLIT_QKV,
    UNSTACK,
    Row,
    Transform,
    convert,
    revert,
    stream,
    then,
)
from plain_vit.errors import MappingError

CONFIG = PlainViTConfig(
    hidden_size=6, num_hidden_layers=11, num_attention_heads=2, image_size=(10, 21), patch_size=(5, 7), num_channels=2
)
ROWS = [
    Row("blocks.{}.qkv", ("layers.{}.q_proj", "layers.{}.k_proj", "layers.{}.v_proj"), SPLIT_QKV),
    Row("blocks.{}.gain", "layers.{}.scale.weight"),
    Row("blocks.{}.norm", "layers.{}.norm"),
    Row("patch.weight", "projection.weight", PIXELS_TO_KERNEL),
    Row("patch.bias", "projection.bias"),
    Row("positions", "table.weight", DROP_FIRST_AXIS),
    Row("cls", "token", ADD_FIRST_AXIS),
    Row("stacked.{}", "branches.{}.{}.fc", UNSTACK),
]


def source_tensors() -> dict[str, torch.Tensor]:
    tensors = {
        "patch.weight": torch.randn(6, 5 * 7 * 2),
        "patch.bias": torch.randn(6),
        "positions": torch.randn(1, 7, 6),
        "cls": torch.randn(1, 6),
    }
    for i in range(11):
        tensors[f"blocks.{i}.qkv.weight"] = torch.randn(15, 6)
        tensors[f"blocks.{i}.qkv.bias"] = torch.randn(15)
        tensors[f"blocks.{i}.gain"] = torch.randn(6)
        tensors[f"blocks.{i}.norm.weight"] = torch.randn(6)
        tensors[f"blocks.{i}.norm.bias"] = torch.randn(6)
    for i in range(2):
        tensors[f"stacked.{i}.weight"] = torch.randn(11, 3, 6)
    return tensors


def expected_tensors() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "projection.weight": (6, 2, 5, 7),
        "projection.bias": (6,),
        "table.weight": (7, 6),
        "token": (1, 1, 6),
    }
    for i in range(11):
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"layers.{i}.{name}.weight"], shapes[f"layers.{i}.{name}.bias"] = (5, 6), (5,)
        shapes[f"layers.{i}.scale.weight"] = (6,)
        shapes[f"layers.{i}.norm.weight"] = shapes[f"layers.{i}.norm.bias"] = (6,)
        for branch in range(2):
            shapes[f"branches.{branch}.{i}.fc.weight"] = (3, 6)
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_every_tensor_arrives_where_its_row_says() -> None:
    source = source_tensors()
    ours = convert(ROWS, source, expected_tensors(), CONFIG)
    assert set(ours) == set(expected_tensors())
    for i in range(11):
        joined = torch.cat([ours[f"layers.{i}.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")])
        assert torch.equal(joined, source[f"blocks.{i}.qkv.weight"])
        assert torch.equal(ours[f"layers.{i}.scale.weight"], source[f"blocks.{i}.gain"])
        assert torch.equal(ours[f"branches.1.{i}.fc.weight"], source["stacked.1.weight"][i])
    assert ours["projection.weight"][3, 1, 4, 2] == source["patch.weight"][3, 4 * 7 * 2 + 2 * 2 + 1]


def test_the_export_gives_every_tensor_bit_for_bit() -> None:
    source = source_tensors()
    back = revert(ROWS, convert(ROWS, source, expected_tensors(), CONFIG), CONFIG)
    assert set(back) == set(source)
    assert all(torch.equal(back[name], source[name]) for name in source)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_rows_and_names_means_nothing(seed: int) -> None:
    source = source_tensors()
    ours = convert(ROWS, source, expected_tensors(), CONFIG)
    shuffle = random.Random(seed).shuffle
    rows, items, expected = ROWS[:], list(source.items()), list(expected_tensors().items())
    for order in (rows, items, expected):
        shuffle(order)
    shuffled = convert(rows, dict(items), dict(expected), CONFIG)
    assert set(shuffled) == set(ours)
    assert all(torch.equal(shuffled[name], ours[name]) for name in ours)
    back = revert(rows, shuffled, CONFIG)
    assert all(torch.equal(back[name], source[name]) for name in source)


def test_one_error_lists_every_fault() -> None:
    source = source_tensors()
    del source["blocks.10.norm.bias"]
    source["blocks.11.norm.bias"] = torch.randn(6)
    source["blocks.3.gain"] = torch.randn(7)
    source["blocks.4.qkv.weight"][2, 3] = torch.nan
    source["blocks.5.qkv.bias"] = torch.ones(15, dtype=torch.int64)
    source["patch.weight"] = torch.randn(6, 71)
    source["stacked.0.weight"] = torch.randn(10, 3, 6)
    with pytest.raises(MappingError) as caught:
        convert(ROWS, source, expected_tensors(), CONFIG)
    message = str(caught.value)
    assert len(caught.value.faults) == 5 + 3 + 1  # an integer qkv is three of ours
    for fault in (
        "missing: 'blocks.10.norm.bias', which 'layers.10.norm.bias' is made from",
        "left over: 'blocks.11.norm.bias'",
        "'blocks.3.gain' of shape (7,) makes 'layers.3.scale.weight' of shape (7,): expected (6,)",
        "makes 'layers.4.q_proj.weight' with NaN or infinite values",
        "makes 'layers.5.k_proj.bias' of dtype torch.int64",
        "'patch.weight' of shape (6, 71) cannot become 'projection.weight'",
        "'stacked.0.weight' of shape (10, 3, 6) makes 10 tensors: expected 11",
    ):
        assert fault in message


def test_wrong_names_are_found_before_the_first_tensor_comes() -> None:
    source = source_tensors()
    del source["cls"]
    with pytest.raises(MappingError, match="missing: 'cls'"):
        next(stream(ROWS, source, expected_tensors(), CONFIG))


def test_a_table_that_claims_a_name_twice_is_refused() -> None:
    source, expected = source_tensors(), expected_tensors()
    ours = convert(ROWS, source, expected, CONFIG)
    twice_source = [*ROWS[:-2], Row("patch.bias", "token", ADD_FIRST_AXIS), ROWS[-1]]
    with pytest.raises(MappingError, match=r"2 rows use 'patch.bias'"):
        convert(twice_source, source, expected, CONFIG)
    with pytest.raises(MappingError, match=r"2 rows make 'patch.bias'"):
        revert(twice_source, ours, CONFIG)
    with pytest.raises(MappingError, match=r"2 rows fill 'projection.bias'"):
        convert([*ROWS, Row("patch.bias", "projection.bias")], source, expected, CONFIG)


def test_a_table_that_forgets_a_name_is_refused() -> None:
    ours = convert(ROWS, source_tensors(), expected_tensors(), CONFIG)
    with pytest.raises(MappingError, match="no row fills 'token'"):
        revert([row for row in ROWS if row.source != "cls"], ours, CONFIG)


def test_a_row_whose_names_are_only_half_there_is_refused() -> None:
    expected = expected_tensors()
    del expected["layers.2.k_proj.bias"]
    with pytest.raises(MappingError, match=r"a row fills 'layers.2.k_proj.bias', which the model does not have"):
        convert(ROWS, source_tensors(), expected, CONFIG)


def test_names_match_whole() -> None:
    rows = [Row("norm", "norm"), Row("norm.0", "norm.0"), Row("norm1", "norm1")]
    names = ["norm.weight", "norm.0.weight", "norm1.weight"]
    source = {name: torch.randn(3) for name in names}
    ours = convert(rows, source, {name: torch.empty(3) for name in names}, CONFIG)
    assert all(torch.equal(ours[name], source[name]) for name in names)


def test_what_is_ignored_must_be_named() -> None:
    source = {**source_tensors(), "teacher.head.weight": torch.randn(3), "step": torch.tensor(7)}
    with pytest.raises(MappingError, match="left over: 'step'") as caught:
        convert(ROWS, source, expected_tensors(), CONFIG, ignored=[("teacher.*", "the average is not asked for")])
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_keep_the_dtype_and_share_no_storage(dtype: torch.dtype) -> None:
    source = {name: tensor.to(dtype) for name, tensor in source_tensors().items()}
    ours = convert(ROWS, source, expected_tensors(), CONFIG)
    assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in ours.values())
    storages = [tensor.untyped_storage().data_ptr() for tensor in (*ours.values(), *source.values())]
    assert len(set(storages)) == len(storages)


def test_unshared_memory_is_reused_where_ours_is_a_contiguous_part_of_it() -> None:
    source = source_tensors()
    ours = convert(ROWS, source, expected_tensors(), CONFIG, owned=True)
    copied = convert(ROWS, source, expected_tensors(), CONFIG)
    spans = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in source.values()]
    changed = {
        name
        for name, tensor in ours.items()
        if not any(start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end for start, end in spans)
    }
    assert changed == {"projection.weight"}  # the only tensor whose elements are permuted
    for name, tensor in ours.items():
        assert torch.equal(tensor, copied[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    storages = [tensor.untyped_storage().data_ptr() for tensor in ours.values()]
    assert len(set(storages)) == len(storages)


def test_memory_is_not_reused_twice() -> None:
    twice = Transform("TWICE", lambda tensors, config: [tensors[0], tensors[0]], lambda tensors, config: [tensors[0]])
    expected = {"a": torch.empty(3), "b": torch.empty(3)}
    ours = convert([Row("one", ("a", "b"), twice)], {"one": torch.randn(3)}, expected, CONFIG, owned=True)
    assert torch.equal(ours["a"], ours["b"])
    assert ours["a"].data_ptr() != ours["b"].data_ptr()


def test_tables_are_checked_on_the_meta_device() -> None:
    source = {name: tensor.to("meta") for name, tensor in source_tensors().items()}
    ours = convert(ROWS, source, expected_tensors(), CONFIG)
    assert all(tensor.shape == expected_tensors()[name].shape for name, tensor in ours.items())


@pytest.mark.parametrize(
    "transform, shape",
    [
        (IDENTITY, (3, 5)),
        (SPLIT_QKV, (21, 5)),
        (UNSTACK, (5, 3, 2)),
        (ADD_FIRST_AXIS, (5, 3)),
        (DROP_FIRST_AXIS, (1, 5, 3)),
        (PIXELS_TO_KERNEL, (11, 70)),
        (KERNEL_TO_PIXELS, (11, 2, 5, 7)),
        (then(DROP_FIRST_AXIS, PIXELS_TO_KERNEL), (1, 11, 70)),
    ],
    ids=repr,
)
def test_every_transform_is_undone_by_its_inverse(transform: Transform, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    (back,) = transform.to_source(transform.to_ours([tensor], CONFIG), CONFIG)
    assert torch.equal(back, tensor)
