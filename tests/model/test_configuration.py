"""The configuration: invalid settings, saved fields, and the sizes of the paper."""

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

import plain_vit
from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel, configuration_plain_vit
from plain_vit.attention_plain_vit import ATTENTIONS, QK_NORMS
from plain_vit.configuration_plain_vit import AUTO_MAP, GROUPS, PRESETS
from plain_vit.heads_plain_vit import PATCH_PREDICTORS, POOLERS
from plain_vit.initialization_plain_vit import INITIALIZATIONS
from plain_vit.layers_plain_vit import NORMS, STEM_STYLES
from plain_vit.modeling_plain_vit import LAYERS, MLPS, PATCH_EMBEDDINGS, POSITION_EMBEDDINGS
from plain_vit.positions_plain_vit import RELATIVE_POSITION_BIASES, ROTARY_EMBEDDINGS
from tests.processes import in_a_process, kilobytes
from tests.releases import not_with_transformers
from tests.tiny import VARIATIONS, pixels, tiny_config

# Invalid settings, and the part of the error that says what to do instead.
CHECKED_THERE = not_with_transformers(5, 10, "other checks of its own fields")
PROBLEM = {"problem_type": "classification"}
IMPOSSIBLE: list[Any] = [
    ({"num_attention_heads": 3}, "choose a head count that divides it, or give head_dim"),
    ({"image_size": (24, 50)}, r"use \(24, 56\), or another patch_size"),
    ({"image_size": (4, 56)}, r"use \(8, 56\), or another patch_size"),
    ({"image_size": 0}, "expected a positive int or"),
    ({"patch_size": (8, -14)}, "expected a positive int or"),
    ({"hidden_size": 0}, "expected a positive int"),
    ({"num_attention_heads": -5}, "expected a positive int"),
    ({"head_dim": 0}, "expected a positive int"),
    ({"intermediate_size": 0}, "expected a positive int"),
    ({"num_channels": 0}, "expected a positive int"),
    ({"num_branches": 0}, "expected a positive int"),
    ({"representation_size": 0}, "expected a positive int"),
    ({"num_hidden_layers": -1}, "expected 0 or more"),
    ({"num_register_tokens": -1}, "expected 0 or more"),
    ({"num_labels": -1}, "expected the number of classes, or 0 for no head"),
    ({"hidden_dropout_prob": 1.0}, r"expected a number in \[0, 1\)"),
    ({"embedding_dropout_prob": -0.1}, "expected a number in"),
    ({"attention_probs_dropout_prob": 2}, "expected a number in"),
    ({"classifier_dropout_prob": 1}, "expected a number in"),
    ({"drop_path_rate": 1.0}, "expected a number in"),
    ({"patch_dropout_prob": 1.0}, "expected a number in"),
    ({"layer_norm_eps": 0.0}, "expected a small positive number"),
    ({"initializer_range": -0.02}, "expected a standard deviation of at least 0"),
    ({"hidden_act": "gellu"}, "expected one of gelu"),
    ({"hidden_act": "prelu"}, "expected one of gelu"),
    ({"representation_act": "tan"}, "expected one of gelu"),
    pytest.param(PROBLEM, "expected one of .*single_label_classification", marks=CHECKED_THERE),
    ({"use_class_token": False}, "set use_class_token=True, or another pooling"),
    ({"use_distillation_token": True, "pooling": "mean"}, 'set pooling="cls"'),
    (
        {"register_tokens_last": True, "num_register_tokens": 1, "use_distillation_token": True},
        "not combined with a distillation token",
    ),
    ({"patch_pre_norm": True}, 'set patch_projection="linear"'),
    ({"resnet_stem": {"depths": (2,)}, "patch_projection": "linear"}, 'set patch_projection="conv"'),
    ({"patch_size": (8, 28), "resnet_stem": {"depths": (1, 0)}}, "at least one unit in each stage"),
    ({"resnet_stem": {}, "patch_size": (8, 14)}, "resolution by 4: patch_size .* must be a multiple"),
    (
        {"resnet_stem": {}, "patch_size": (8, 28), "drop_partial_patches": True},
        "not combined with a ResNet stem",
    ),
    ({"position_embedding_type": "sincos_2d"}, "set position_embedding_on_prefix=False"),
    (
        {"position_embedding_type": "sincos_2d", "hidden_size": 30, "position_embedding_on_prefix": False},
        "a multiple of 4, not 30",
    ),
    (
        {
            "position_embedding_type": "sincos_2d", "hidden_size": 4, "num_attention_heads": 1,
            "position_embedding_on_prefix": False,
        },
        "must be 8 or more, not 4",
    ),
    (
        {
            "position_embedding_type": "sincos_2d", "position_embedding_on_prefix": False,
            "position_resampling": "truncate",
        },
        "no table to truncate",
    ),
    ({"attention_output_projection": False, "head_dim": 12}, r"\(5 x 12\) must be hidden_size 40 wide"),
    ({"num_branches": 2}, 'needs block_type="branches"'),
    ({"block_type": "parallel", "mlp_inner_norm": True}, "no norms inside"),
    ({"block_type": "parallel", "attention_inner_norm": True}, "no norms inside"),
    ({"attention_type": "differential", "head_dim": 7}, "must be even, not 7"),
    ({"attention_type": "differential", "qk_norm": "rms_per_head"}, 'takes qk_norm None or "norm"'),
    ({"attention_type": "re_attention", "qk_norm": "norm"}, 'attention_type "re_attention" has no norms'),
    ({"attention_type": "locality", "attention_inner_norm": True}, 'attention_type "locality" has no norms'),
    ({"attention_type": "talking_heads"}, "are not combined with others by any source"),
    ({"pooling": "class_attention", "use_class_token": False}, "are not combined with others by any source"),
    ({"pooling": "class_attention", "attention_type": "talking_heads"}, "has its own class token"),
    ({"pooling_num_layers": 2}, "set pooling_num_layers=None"),
    ({"position_table_length": 9}, 'set position_embedding_type="factorized"'),
    (
        {"position_table_length": 3, "position_embedding_type": "factorized", "position_resampling": "truncate"},
        "less than the native grid",
    ),
    ({"block_type": "sandwich", "layer_scale_init_value": 1.0}, "set layer_scale_init_value=None"),
    ({"value_norm": True, "pooling": "query_block"}, "value_norm=False"),
    ({"pooling_num_tokens": 2}, "set pooling_num_tokens=None"),
    ({"pooling": "prefix_mean", "pooling_num_tokens": 2}, "reads 2 tokens, and 1 precede"),
    ({"pooling": "prefix_joined", "final_norm": "after_pooling"}, "no source normalises them together"),
    ({"pooling": "query_block", "relative_position_bias": {"type": "table"}}, "follows plain attention in every"),
    ({"attention_type": "locality", "attention_scale": 0.1}, "set attention_scale=None"),
    ({"attention_type": "locality", "use_class_token": False, "pooling": "mean"}, "set use_class_token=True"),
    ({"attention_type": "re_attention", "rope_parameters": {}, "head_dim": 8}, "not combined with a rot"),
    ({"attention_type": "locality", "relative_position_bias": {"type": "table"}}, "not combined with a relative"),
    ({"num_key_value_heads": 3}, "that divides num_attention_heads 5"),
    ({"num_key_value_heads": [5, 1]}, "one for each of the 3 blocks"),
    ({"num_key_value_heads": [5, 1, 2]}, "that divides num_attention_heads 5"),
    ({"num_key_value_heads": 1, "attention_type": "differential"}, "num_key_value_heads=None"),
    ({"num_key_value_heads": 1, "attention_type": "re_attention"}, "num_key_value_heads=None"),
    ({"num_key_value_heads": 1, "qk_norm": "rms_all_heads"}, 'take qk_norm None or "norm"'),
    ({"num_key_value_heads": 1, "rope_parameters": {"rope_type": "mixed"}}, "set num_key_value_heads=None"),
    ({"attention_type": "differential", "qk_norm": "rms_all_heads"}, 'takes qk_norm None or "norm"'),
    ({"scale_mlp_branch": False}, "set layer_scale_init_value"),
    ({"scale_mlp_branch": False, "layer_scale_init_value": 0.1, "block_type": "parallel"}, 'type "sequential"'),
    ({"pooling": "map", "num_attention_heads": 3, "head_dim": 8}, "choose a head count that divides it"),
    ({"pooling": "query", "pooling_num_attention_heads": 3}, "choose a head count that divides it"),
    ({"pooling_num_attention_heads": 2}, "set pooling_num_attention_heads=None"),
    ({"pooling": "query", "pooling_intermediate_size": 9}, "set pooling_intermediate_size=None"),
    ({"reconstruction_target": "mean_color", "num_channels": 5}, "at most 4 channels, not 5"),
    ({"image_mean": [0.5, 0.4]}, "one for each of the 3 channels"),
    ({"image_std": (0.5, 0.4)}, "one for each of the 3 channels"),
    ({"image_std": 0}, "a positive standard deviation"),
    ({"image_mean": [0.5, math.nan, 0.5]}, "a pixel value from 0 to 1"),
    ({"attention_scale": 0.0}, "a positive number"),
    ({"id2label": {0: "\ud800"}}, r"names label 0 '\\ud800': expected a string"),
    pytest.param({"id2label": {0: 3}}, "names label 0 3: expected a string", marks=CHECKED_THERE),
    ({"id2label": {"first": "cat"}}, "the key 'first': expected a label number"),
    pytest.param({"id2label": ["cat", "dog"]}, "expected a dict", marks=CHECKED_THERE),
    ({"num_labels": 10**9}, "at most 500000"),
    ({"num_hidden_layers": 500, "num_branches": 3, "block_type": "branches"}, "more than 1000 blocks"),
    ({"resnet_stem": {"depths": [1] * 2000}}, "a list of 2000 entries make more than 1000 blocks"),
    ({"image_size": (2**15, 2**14)}, "at most 268435456 pixels"),
    ({"out_indices": [0] * 100_000}, "names 100000 stages: there are 4"),
    ({"out_indices": [4]}, "valid indices"),
    ({"out_features": ["stage4"]}, "subset of stage_names"),
]  # fmt: skip


@pytest.mark.parametrize("fields, remedy", IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_impossible_settings_are_refused_with_the_remedy(fields: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        tiny_config(**fields)


def test_heads_of_keys_and_values_have_one_form() -> None:
    for given, kept in ((None, None), (5, None), ([5, 5, 5], None), ([1, 1, 1], 1), ([5, 1, 5], (5, 1, 5)), (1, 1)):
        config = tiny_config(num_key_value_heads=given)
        assert config.num_key_value_heads == kept
        assert PlainViTConfig.from_dict(json.loads(config.to_json_string())).num_key_value_heads == kept


NUMBERS = [field.name for field in dataclasses.fields(PlainViTConfig)
           if {int, float} & {*get_args(field.type), field.type}]  # fmt: skip
CHECKED = [pytest.param(name, marks=CHECKED_THERE) if name == "chunk_size_feed_forward" else name for name in NUMBERS]


@pytest.mark.parametrize("name", [*CHECKED, "num_labels"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9, 10**400, -(10**9), True, "1", [[1]]], ids=ascii)
def test_every_field_refuses_non_numbers_and_impossible_numbers(name: str, value: Any) -> None:
    with pytest.raises((ValueError, StrictDataclassFieldValidationError)) as caught:
        PlainViTConfig(**{name: value})
    assert name in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_fields_that_transformers_tests_set_to_almost_zero_are_numbers() -> None:
    # Its common tests do so to every field whose name has one of these words, to compare initializations.
    words = ("init_range", "initializer_range", "initializer_factor", "_std", "layer_scale")
    names = [field.name for field in dataclasses.fields(PlainViTConfig) if any(word in field.name for word in words)]
    assert "initializer_range" in names
    for name in names:
        setattr(tiny_config(), name, 1e-10)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads its own size from /proc")
def test_no_number_costs_memory_before_it_is_used(tmp_path: Path) -> None:
    grown = in_a_process(grown_by_opening, tmp_path, [*NUMBERS, "num_labels"])
    assert max(grown.values()) < 50, grown  # MB; 10**8 names of stages or labels would take gigabytes


def grown_by_opening(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Return for each field by how many MB this process grows while it opens a config with 10**8 in that field."""
    grown = {}
    for name in names:
        (folder / "config.json").write_text(json.dumps({"model_type": "plain_vit", name: 10**8}))
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = kilobytes("VmRSS")
        with suppress(ValueError, StrictDataclassFieldValidationError):
            AutoConfig.from_pretrained(folder)
        grown[name] = (kilobytes("VmHWM") - before) / 1024
    return grown


@pytest.mark.parametrize(
    "misspelt, field",
    [("hiden_size", "hidden_size"), ("pool", "pooling"), ("num_attention_head", "num_attention_heads")],
)
def test_a_misspelt_field_is_refused_and_the_nearest_is_named(misspelt: str, field: str) -> None:
    with pytest.raises(ValueError, match=rf"no field '{misspelt}'.*{field}"):
        tiny_config(**{misspelt: 1})


def test_a_field_like_no_other_is_refused_with_the_list_of_fields() -> None:
    with pytest.raises(ValueError, match=r"no field 'xyzzy': the fields are .*hidden_size.*pooling"):
        tiny_config(xyzzy=1)


def choices(annotation: Any) -> set[str | None]:
    """Return the values of a Literal, and None if it is optional."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    literals = [part for part in get_args(annotation) if get_origin(part) is Literal]
    return {None, *get_args(literals[0])} if literals else set()


HINTS = {
    **PlainViTConfig.__annotations__,
    **{f"{group}.{key}": hint for group, kind in GROUPS.items() for key, hint in kind.__annotations__.items()},
}
CHOICES = {name: found for name, hint in HINTS.items() if (found := choices(hint))}


@pytest.mark.parametrize("field", sorted(CHOICES))
def test_an_unknown_choice_is_refused_with_the_known_ones(field: str) -> None:
    group, _, key = field.partition(".")
    given: Any = {key: "no such thing"} if key else "no such thing"
    with pytest.raises(StrictDataclassFieldValidationError) as caught:
        tiny_config(**{group: given})
    assert group in str(caught.value)
    assert (key or field) in str(caught.value)
    assert all(str(choice) in str(caught.value) for choice in CHOICES[field] if choice is not None)


@pytest.mark.parametrize("fields", [{"hidden_size": "40"}, {"image_size": 224.0}, {"qkv_bias": 1}, {"pooling": None}])
def test_a_value_of_the_wrong_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=next(iter(fields))):
        tiny_config(**fields)


def test_every_choice_has_its_implementation_and_every_implementation_its_choice() -> None:
    tables: dict[str, dict[Any, Any]] = {
        "patch_projection": PATCH_EMBEDDINGS, "resnet_stem.style": STEM_STYLES,
        "position_embedding_type": POSITION_EMBEDDINGS, "rope_parameters.rope_type": ROTARY_EMBEDDINGS,
        "relative_position_bias.type": RELATIVE_POSITION_BIASES,
        "block_type": LAYERS,
        "norm_type": NORMS, "attention_type": ATTENTIONS, "qk_norm": QK_NORMS, "mlp_type": MLPS, "pooling": POOLERS,
        "initialization": INITIALIZATIONS, "reconstruction_target": PATCH_PREDICTORS,
    }  # fmt: skip
    expected = {**CHOICES, "patch_projection": CHOICES["patch_projection"] | {"resnet", "frames"}}  # by other fields
    assert {field: set(table) for field, table in tables.items()} == {field: expected[field] for field in tables}
    # Choices without a class: strings that one function reads, and a position that the model reads.
    names = ("coordinates", "axes", "pairs", "frequencies", "axis_frequencies", "prefix_angles", "dtype")
    alternatives = {f"rope_parameters.{name}" for name in names}
    assert (
        CHOICES.keys() - tables.keys()
        == {"position_resampling", "relative_position_bias.resampling", "window_attention.padding", "final_norm"}
        | alternatives
    )


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_json_keeps_every_field(name: str, tmp_path: Any) -> None:
    config = tiny_config(**VARIATIONS[name], id2label=dict(enumerate("abcdefg")), out_indices=[1, 3])
    config.save_pretrained(tmp_path)
    loaded, unused = PlainViTConfig.from_pretrained(tmp_path, return_unused_kwargs=True)
    assert loaded.to_dict() == config.to_dict()
    assert unused == {}
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["auto_map"].keys() == AUTO_MAP.keys()
    assert loaded.id2label == dict(enumerate("abcdefg"))


def test_a_field_given_while_loading_is_checked_with_the_saved_ones(tmp_path: Any) -> None:
    tiny_config().save_pretrained(tmp_path)
    assert PlainViTConfig.from_pretrained(tmp_path, image_size=[40, 28]).image_size == (40, 28)
    with pytest.raises(ValueError, match=r"use \(40, 56\)"):
        PlainViTConfig.from_pretrained(tmp_path, image_size=(41, 56))
    with pytest.raises(ValueError, match="or another pooling"):
        PlainViTConfig.from_pretrained(tmp_path, use_class_token=False)


def test_labels_and_dtype_given_while_loading_replace_the_saved_ones(tmp_path: Any) -> None:
    tiny_config().save_pretrained(tmp_path)
    config = PlainViTConfig.from_pretrained(tmp_path, num_labels=4, dtype="float16", attn_implementation="eager")
    assert (config.num_labels, config.dtype, config._attn_implementation) == (4, "float16", "eager")
    config = PlainViTConfig.from_pretrained(tmp_path, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    assert (config.num_labels, config.id2label) == (2, {0: "cat", 1: "dog"})


def test_the_last_stage_follows_the_depth_unless_others_were_chosen(tmp_path: Any) -> None:
    config = tiny_config()
    assert (config.out_features, config.out_indices) == (["stage3"], [3])
    config.save_pretrained(tmp_path)
    shorter = PlainViTConfig.from_pretrained(tmp_path, num_hidden_layers=2)
    assert (shorter.stage_names, shorter.out_features) == (["stem", "stage1", "stage2"], ["stage2"])
    assert PlainViTConfig.from_pretrained(tmp_path, out_indices=[0, -1]).out_features == ["stem", "stage3"]
    tiny_config(out_features=["stage1", "stage2"]).save_pretrained(tmp_path)
    assert PlainViTConfig.from_pretrained(tmp_path).out_indices == [1, 2]
    assert PlainViTConfig.from_pretrained(tmp_path, out_indices=[3]).out_features == ["stage3"]


def test_sizes_are_height_and_width() -> None:
    config = PlainViTConfig(image_size=[96, 64], patch_size=16)
    assert (config.image_size, config.patch_shape, config.grid_size) == ((96, 64), (16, 16), (6, 4))
    assert config.grid_of(32, 80) == (2, 5)
    assert PlainViTConfig(image_size=(64, 64)).image_size == 64


def test_the_width_of_a_head_is_derived_unless_given() -> None:
    assert tiny_config().head_dim == 8
    assert tiny_config(head_dim=12).head_dim == 12


@pytest.mark.parametrize(
    "fields, count",
    [
        ({}, 1),
        ({"use_distillation_token": True}, 2),
        ({"num_register_tokens": 4}, 5),
        ({"num_register_tokens": 4, "register_tokens_last": True}, 1),
        ({"use_class_token": False, "pooling": "mean", "num_register_tokens": 3}, 3),
    ],
)
def test_prefix_tokens_are_counted(fields: dict[str, Any], count: int) -> None:
    assert tiny_config(**fields).num_prefix_tokens == count


# Parameter counts of the paper's models (Table 1) with 1000 classes, as timm gives them.
@pytest.mark.parametrize(
    "name, parameters",
    [
        ("vit-base-patch16-224", 86_567_656),
        ("vit-large-patch16-224", 304_326_632),
        ("vit-huge-patch14-224", 632_045_800),
    ],
)
def test_the_paper_s_models_have_the_paper_s_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = PlainViTForImageClassification(PlainViTConfig.from_name(name, num_labels=1000))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("size", sorted(PRESETS))
def test_a_name_says_size_patch_and_image(size: str) -> None:
    config = PlainViTConfig.from_name(f"vit-{size}-patch14-56", num_labels=3)
    assert (config.patch_size, config.image_size, config.num_labels) == (14, 56, 3)
    assert {field: getattr(config, field) for field in PRESETS[size]} == PRESETS[size]


@pytest.mark.parametrize("name", ["vit-medium-patch16-224", "base", "vit-base-patch16"])
def test_an_unknown_name_is_refused_with_the_known_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"vit-SIZE-patchP-I with SIZE one of tiny, small, base"):
        PlainViTConfig.from_name(name)
    monkeypatch.setattr(configuration_plain_vit, "OTHER_NAMES", [])  # as in the copy in a checkpoint
    with pytest.raises(ValueError, match="SIZE one of tiny, .*; names of other packages, .* need the package"):
        PlainViTConfig.from_name(name)


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_the_tensor_parallel_plan_names_layers_that_exist_and_whose_parts_fit(name: str) -> None:
    config = tiny_config(**VARIATIONS[name])
    with torch.device("meta"):
        model = PlainViTForImageClassification(config).vit
    modules = {n for n, _ in [*model.named_modules(), *model.named_parameters()]}
    for pattern, style in config.base_model_tp_plan.items():
        for path in (pattern.replace("*", str(index)) for index in range(config.num_branches)):
            assert path in modules, path
        assert style in ("colwise", "rowwise", "replicated_with_grad_allreduce")
    split = {pattern.rpartition(".")[2] for pattern in config.base_model_tp_plan}
    relative = [name for name in VARIATIONS if name.startswith("relative")]
    other = [name for name, fields in VARIATIONS.items() if fields.get("attention_type", "self") != "self"]
    heads = ("rms_per_head", "rms_all_heads", "shared_keys")
    whole = ("inner_norms", *heads, "no_projection", "rotary_mixed", *other, *relative)
    assert ("o_proj" in split) == (name not in whole)
    assert ("fc2" in split) == (name not in ("inner_norms", "swiglu_packed"))


def test_a_config_is_rebuilt_from_its_own_dict() -> None:
    config = tiny_config()
    assert PlainViTConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


# Foreign keys in a saved config


def saved_with(folder: Any, **keys: Any) -> dict[str, Any]:
    """Save a config, write these keys into its file, and return the content of the file."""
    tiny_config().save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(stored))
    return stored


FOREIGN: dict[str, Any] = {"batch_norm_eps": 1e-3, "tie_word_embeddings": True, "my_note": {"by": ["me", None]}}


def test_a_saved_config_says_by_which_version(tmp_path: Any) -> None:
    assert plain_vit.__version__ == configuration_plain_vit.VERSION
    assert saved_with(tmp_path)["plain_vit_version"] == plain_vit.__version__
    assert tiny_config().to_dict()["plain_vit_version"] == plain_vit.__version__


@pytest.mark.parametrize("version", [None, "0.0.9", "0.1", plain_vit.__version__, "0.1.0rc1"])
def test_keys_of_others_are_named_in_a_warning_and_kept_wherever_the_config_goes(
    version: str | None, tmp_path: Any
) -> None:
    stored = saved_with(tmp_path, **FOREIGN, plain_vit_version=version)
    if version is None:  # like folders saved before this key existed
        del stored["plain_vit_version"]
        (tmp_path / "config.json").write_text(json.dumps(stored))
    opened = [
        lambda: PlainViTConfig.from_pretrained(tmp_path),
        lambda: AutoConfig.from_pretrained(tmp_path),
        lambda: PlainViTConfig.from_dict(stored),
        lambda: PlainViTConfig.from_json_file(tmp_path / "config.json"),
        lambda: PlainViTModel(PlainViTConfig.from_pretrained(tmp_path)).config,
    ]
    for way in opened:
        by = f", saved by plain-vit {version}," if version else ""
        with pytest.warns(
            UserWarning, match=f"this config{by} holds 'batch_norm_eps', 'my_note', 'tie_word_embeddings'"
        ):
            config = way()
        for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert {name: getattr(same, name) for name in FOREIGN} == FOREIGN
            assert {name: same.to_dict()[name] for name in FOREIGN} == FOREIGN
            same.save_pretrained(tmp_path / "again")
            again = json.loads((tmp_path / "again" / "config.json").read_text())
            assert {name: again[name] for name in FOREIGN} == FOREIGN
            assert again["plain_vit_version"] == plain_vit.__version__


def test_a_model_s_folder_with_keys_of_others_opens_with_the_same_numbers(tmp_path: Any) -> None:
    model = PlainViTModel(tiny_config()).eval()
    model.config.my_note = 1
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="'my_note'"):
        opened = AutoModel.from_pretrained(tmp_path)
    assert opened.config.my_note == 1
    assert torch.equal(opened(pixels()).last_hidden_state, model(pixels()).last_hidden_state)


def test_the_dict_of_a_saved_config_is_one_also_for_the_constructor(tmp_path: Any) -> None:
    # The config of a detector creates its backbone's config in this way.
    config = tiny_config()
    config.my_note = 1
    with pytest.warns(UserWarning, match="'my_note'"):
        again = PlainViTConfig(**config.to_dict())
    assert again.to_dict() == config.to_dict()
    fields = {name: value for name, value in config.to_dict().items() if name != "plain_vit_version"}
    with pytest.raises(ValueError, match="no field 'my_note'"):
        PlainViTConfig(**fields)


@pytest.mark.parametrize("version", ["0.1.1", "0.2.0.dev1", "1", "0.1.0.1"])
def test_keys_of_a_newer_version_are_refused_and_both_versions_named(version: str, tmp_path: Any) -> None:
    stored = saved_with(tmp_path, window_size=7, plain_vit_version=version)
    for way in (
        lambda: PlainViTConfig.from_pretrained(tmp_path),
        lambda: PlainViTConfig(**stored),
        lambda: AutoModel.from_pretrained(tmp_path),
    ):
        with pytest.raises(
            ValueError,
            match=f"plain-vit {version}, holds 'window_size', which plain-vit {plain_vit.__version__} does not",
        ):
            way()
    del stored["window_size"]
    assert PlainViTConfig.from_dict(stored).to_dict() == tiny_config().to_dict()


@pytest.mark.parametrize("version", [3, "", "new", "0.1.0\x1b[31m", "9" * 100_000, ["0.1.0"], "1.2.3.4.5", "٣.1"])
def test_an_invalid_version_is_refused(version: Any) -> None:
    with pytest.raises(ValueError, match='expected a version such as "0.1.0"') as caught:
        PlainViTConfig.from_dict({**tiny_config().to_dict(), "plain_vit_version": version})
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name",
    [
        "to_dict",
        "grid_size",
        "__class__",
        "__dict__",
        "self",
        pytest.param("per_layer_config", marks=CHECKED_THERE),
    ],
)
def test_a_key_that_would_replace_a_part_of_the_class_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}', a name that PlainViTConfig uses itself"):
        PlainViTConfig.from_dict({**tiny_config().to_dict(), name: {}})


def test_keys_that_transformers_drops_are_reported_as_dropped() -> None:
    with pytest.warns(UserWarning, match="'temperature', .* dropped when the config is saved again"):
        config = PlainViTConfig.from_dict({**tiny_config().to_dict(), "temperature": 0.5})
    assert "temperature" not in config.to_dict()


def test_warnings_are_short_and_printable_whoever_chose_the_keys() -> None:
    keys = {f"{number}\x1b[31m\u202e\n{'x' * 10_000}": number for number in range(1000)}
    with pytest.warns(UserWarning, match="and 995 more") as caught:
        config = PlainViTConfig.from_dict({**tiny_config().to_dict(), **keys})
    assert len(caught) == 1
    assert len(str(caught[0].message)) < 700
    assert str(caught[0].message).isprintable()
    assert {name: config.to_dict()[name] for name in keys} == keys


def test_a_typo_of_whoever_loads_is_refused(tmp_path: Any) -> None:
    stored = saved_with(tmp_path)
    for way in (
        lambda: PlainViTConfig.from_pretrained(tmp_path, hiden_size=8),
        lambda: PlainViTConfig.from_dict(stored, hiden_size=8),
    ):
        with pytest.raises(ValueError, match=r"no field 'hiden_size': did you mean hidden_size"):
            way()
    PlainViTModel(tiny_config()).save_pretrained(tmp_path)
    for model_class in (PlainViTModel, AutoModel, AutoModelForImageClassification):
        with pytest.raises(TypeError, match="hiden_size"):
            model_class.from_pretrained(tmp_path, hiden_size=8)


def test_what_is_no_field_is_returned_where_it_is_asked_for_and_changes_nothing(tmp_path: Any) -> None:
    saved_with(tmp_path)
    given = {"typo": 1, "grid_size": (1, 2), "to_dict": 3}
    for config_class in (PlainViTConfig, AutoConfig):
        config, unused = config_class.from_pretrained(tmp_path, **given, pooling="mean", return_unused_kwargs=True)
        assert {name: unused[name] for name in given} == given
        assert config.to_diff_dict() == tiny_config(pooling="mean").to_diff_dict()
    # Only AutoConfig also gets arguments that are meant for the image processor.
    assert AutoConfig.from_pretrained(tmp_path, **given).to_diff_dict() == tiny_config().to_diff_dict()


def test_a_key_of_others_may_be_given_anew_while_loading(tmp_path: Any) -> None:
    saved_with(tmp_path, my_note=1)
    with pytest.warns(UserWarning, match="'my_note'"):
        assert PlainViTConfig.from_pretrained(tmp_path, my_note=2).my_note == 2
