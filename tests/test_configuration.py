"""The configuration: what it refuses, what it keeps, and the sizes of the paper."""

import json
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.configuration_plain_vit import AUTO_MAP, PRESETS
from plain_vit.layers_plain_vit import INITIALIZATIONS, NORMS, PATCH_PREDICTORS, POOLERS, QK_NORMS, STEM_STYLES
from plain_vit.modeling_plain_vit import ATTENTIONS, LAYERS, MLPS, PATCH_EMBEDDINGS, POSITION_EMBEDDINGS
from tests.tiny import VARIATIONS, tiny_config

# What cannot work, and the words of the error that say what to do instead.
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
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
    ({"hidden_dropout_prob": 1.0}, "expected a share from 0 up to, not with, 1"),
    ({"embedding_dropout_prob": -0.1}, "expected a share"),
    ({"attention_probs_dropout_prob": 2}, "expected a share"),
    ({"classifier_dropout_prob": 1}, "expected a share"),
    ({"drop_path_rate": 1.0}, "expected a share"),
    ({"patch_dropout_prob": 1.0}, "expected a share"),
    ({"layer_norm_eps": 0.0}, "expected a small positive number"),
    ({"initializer_range": -0.02}, "expected a deviation, 0 or more"),
    ({"hidden_act": "gellu"}, "expected one of gelu"),
    ({"hidden_act": "prelu"}, "expected one of gelu"),
    ({"representation_act": "tan"}, "expected one of gelu"),
    ({"problem_type": "classification"}, "expected one of .*single_label_classification"),
    ({"use_class_token": False}, "set use_class_token=True, or another pooling"),
    ({"use_distillation_token": True, "pooling": "mean"}, 'set pooling="cls"'),
    (
        {"register_tokens_last": True, "num_register_tokens": 1, "use_distillation_token": True},
        "not combined with a distillation token",
    ),
    ({"patch_pre_norm": True}, 'set patch_projection="linear"'),
    ({"stem_depths": (2,)}, 'set patch_projection="resnet"'),
    ({"patch_projection": "resnet", "patch_size": (8, 28), "stem_depths": (1, 0)}, "one unit or more in each stage"),
    ({"patch_projection": "resnet", "patch_size": (8, 14)}, "4 times as small: patch_size .* must be a multiple"),
    (
        {"patch_projection": "resnet", "patch_size": (8, 28), "drop_partial_patches": True},
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
    ({"pooling": "map", "num_attention_heads": 3, "head_dim": 8}, "choose a head count that divides it"),
    ({"reconstruction_target": "mean_color", "num_channels": 5}, "4 channels at most, not 5"),
    ({"pixel_mean": [0.5, 0.4]}, "one for each of the 3 channels"),
    ({"pixel_std": (0.5, 0.4)}, "one for each of the 3 channels"),
    ({"out_indices": [4]}, "valid indices"),
    ({"out_features": ["stage4"]}, "subset of stage_names"),
]  # fmt: skip


@pytest.mark.parametrize("fields, remedy", IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused_with_the_remedy(fields: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        tiny_config(**fields)


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
    """Return the values of a Literal, and None where it may be missing."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    literals = [part for part in get_args(annotation) if get_origin(part) is Literal]
    return {None, *get_args(literals[0])} if literals else set()


CHOICES = {name: found for name, hint in PlainViTConfig.__annotations__.items() if (found := choices(hint))}


@pytest.mark.parametrize("field", sorted(CHOICES))
def test_an_unknown_choice_is_refused_with_the_known_ones(field: str) -> None:
    with pytest.raises(StrictDataclassFieldValidationError) as caught:
        tiny_config(**{field: "no such thing"})
    assert field in str(caught.value)
    assert all(str(choice) in str(caught.value) for choice in CHOICES[field] if choice is not None)


@pytest.mark.parametrize("fields", [{"hidden_size": "40"}, {"image_size": 224.0}, {"qkv_bias": 1}, {"pooling": None}])
def test_a_value_of_the_wrong_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=next(iter(fields))):
        tiny_config(**fields)


def test_every_choice_has_its_implementation_and_every_implementation_its_choice() -> None:
    tables: dict[str, dict[Any, Any]] = {
        "patch_projection": PATCH_EMBEDDINGS, "stem_style": STEM_STYLES,
        "position_embedding_type": POSITION_EMBEDDINGS, "block_type": LAYERS,
        "norm_type": NORMS, "attention_type": ATTENTIONS, "qk_norm": QK_NORMS, "mlp_type": MLPS, "pooling": POOLERS,
        "initialization": INITIALIZATIONS, "reconstruction_target": PATCH_PREDICTORS,
    }  # fmt: skip
    assert {field: set(table) for field, table in tables.items()} == {field: CHOICES[field] for field in tables}
    # The two that are no classes: strings that one function reads, and a place that the model reads.
    assert CHOICES.keys() - tables.keys() == {"position_resampling", "final_norm"}


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


# Of the paper (Table 1), with 1000 classes: the figures that timm gives for the same models.
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


@pytest.mark.parametrize("name", ["vit-medium-patch16-224", "base", "vit-base-patch16", "vit_base_patch16_224"])
def test_an_unknown_name_is_refused_with_the_known_form(name: str) -> None:
    with pytest.raises(ValueError, match=r"vit-SIZE-patchP-I with SIZE one of tiny, small, base"):
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
    assert ("o_proj" in split) == (name not in ("inner_norms", "rms_per_head", "no_projection", "differential"))
    assert ("fc2" in split) == (name not in ("inner_norms", "swiglu_packed"))


def test_a_config_is_rebuilt_from_its_own_dict() -> None:
    config = tiny_config()
    assert PlainViTConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
