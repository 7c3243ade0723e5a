"""Opening checkpoints: missing settings are asked for, errors are listed, nothing is guessed."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import timm
import torch
import transformers
from timm.models import save_for_hf
from torch import nn
from vit_pytorch import ViT
from vit_pytorch.dino import Dino
from vit_pytorch.distill import DistillableViT, DistillWrapper
from vit_pytorch.mae import MAE
from vit_pytorch.simple_vit import SimpleViT

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor, PlainViTModel
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.sources.transformers.source import TRANSFORMERS
from plain_vit.conversion.sources.vit_pytorch.source import VIT_PYTORCH
from plain_vit.conversion.tables.format import Format
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    OutputError,
    PlainViTError,
    UnknownFormatError,
    VerificationError,
)
from tests.conftest import randomize_
from tests.peers import vit_pytorch_release
from tests.sources.transformers_models import tiny_transformers
from tests.tiny import difference

SIZES: dict[str, Any] = {
    "image_size": (15, 28), "patch_size": (5, 7), "num_classes": 11, "dim": 20, "depth": 3, "heads": 3,
    "mlp_dim": 29, "dim_head": 10,
}  # fmt: skip
SAID: dict[str, Any] = {"num_attention_heads": 3, "image_size": (15, 28), "patch_size": (5, 7)}


def small(kind: Any = ViT, seed: int = 0, **arguments: Any) -> nn.Module:
    return randomize_(kind(**{**SIZES, **arguments}), seed).eval()


def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result = model(images)
    return result if isinstance(result, torch.Tensor) else result.logits


def saved(content: Any, folder: Path, name: str = "vit.pt") -> Path:
    (safetensors.torch.save_file if name.endswith(".safetensors") else torch.save)(content, folder / name)
    return folder / name


def same_tensors(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return a.state_dict().keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in a.state_dict().items()
    )


# Settings that a file does not contain


def test_everything_that_is_missing_is_asked_for_at_once(tmp_path: Path) -> None:
    theirs = small(vit_pytorch_release("0.6.6").ViT, image_size=25, patch_size=5, channels=4)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(saved(theirs.state_dict(), tmp_path))
    assert caught.value.candidates == {
        "num_attention_heads": (5, 3, 6, 2, 10, 15, 1, 30),
        "pooling": ("cls", "mean"),
        "layout": ("vit 0.5.0", "vit 0.6.7"),
        "image_size": caught.value.candidates["image_size"],
        "patch_size": caught.value.candidates["patch_size"],
    }
    patch_sizes: Any = caught.value.candidates["patch_size"]
    assert patch_sizes[:4] == ((10, 10), (5, 5), (5, 20), (20, 5))  # with 1 channel, with 4, then oblong patches
    assert all(100 % (height * width) == 0 for height, width in patch_sizes)
    assert caught.value.candidates["image_size"][:2] == ((50, 50), (25, 25))


@pytest.mark.slow(quick=["said3-None-patch_sizes3"])
@pytest.mark.parametrize(
    "said, image_sizes, patch_sizes",
    [
        ({}, {(32, 32), (16, 64), (64, 16)}, {(8, 8), (4, 16), (16, 4)}),
        (
            {"num_channels": 3},
            {(32, 32), (16, 64), (64, 16)},
            {(8, 8), (4, 16), (16, 4), (2, 32), (32, 2), (1, 64), (64, 1)},
        ),
        ({"image_size": 32}, None, {(8, 8), (4, 16), (16, 4), (2, 32), (32, 2)}),
        ({"num_channels": 3, "image_size": (64, 16)}, None, {(8, 8), (16, 4), (4, 16), (32, 2), (64, 1)}),
        ({"patch_size": (4, 16)}, {(16, 64), (8, 128), (32, 32), (4, 256), (64, 16)}, None),
    ],
)
def test_sizes_that_are_asked_for_fit_each_other_and_what_was_said(
    said: dict[str, Any], image_sizes: set[Any] | None, patch_sizes: set[Any] | None, tmp_path: Path
) -> None:
    path = saved(small(ViT, image_size=32, patch_size=8).state_dict(), tmp_path)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path, num_attention_heads=3, **said)
    candidates = caught.value.candidates
    assert set(candidates) == {"image_size", "patch_size"} - said.keys()
    for name, expected in (("image_size", image_sizes), ("patch_size", patch_sizes)):
        if expected is not None:
            assert expected <= set(candidates[name])
            assert 0 < len(candidates[name]) <= 40
    # The printed command line contains the first candidate of each setting: together they describe a model.
    first: dict[str, Any] = {name: values[0] for name, values in candidates.items()}
    config = from_checkpoint(path, num_attention_heads=3, **{**said, **first}).report.config
    if said in ({}, {"num_channels": 3}):
        assert (config.image_shape, config.patch_shape, config.num_channels) == ((32, 32), (8, 8), 3)
    # Every candidate is possible: it is part of a model.
    for name, values in candidates.items():
        for value in values:
            with contextlib.suppress(AmbiguousCheckpointError):
                from_checkpoint(path, num_attention_heads=3, **{**said, name: value})


def test_patches_of_equal_numbers_give_other_logits_so_they_are_no_detail(tmp_path: Path) -> None:
    theirs, images = small(image_size=(16, 32), patch_size=(4, 16)), torch.randn(2, 3, 16, 32)
    path = saved(theirs.state_dict(), tmp_path)
    said: dict[str, Any] = {"num_attention_heads": 3, "image_size": (16, 32)}
    right = from_checkpoint(path, **said, patch_size=(4, 16)).model
    wrong = from_checkpoint(path, **said, patch_size=8).model
    assert torch.allclose(logits(right, images), logits(theirs, images), atol=1e-5)
    assert not torch.allclose(logits(wrong, images), logits(theirs, images), atol=1e-2)


@pytest.mark.parametrize("name", ["vit.pt", "vit.safetensors"])
def test_heads_and_size_are_asked_for_and_the_rest_is_reported(name: str, tmp_path: Path) -> None:
    theirs = small(patch_size=7, image_size=28)
    path = saved(theirs.state_dict(), tmp_path, name)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path)
    assert set(caught.value.candidates) == {"num_attention_heads", "image_size", "patch_size"}
    converted = from_checkpoint(path, head_dim=10, image_size=28, patch_size=7)
    images = torch.randn(2, 3, 28, 28)
    assert torch.equal(logits(converted.model, images), logits(from_module(theirs), images))
    report = str(converted.report)
    assert f"{path}: vit_pytorch, layout vit 1.17.3" in report
    assert "num_channels = 3, from the 147 numbers of a patch" in report
    assert "pooling = 'cls', from the class token" in report
    assert "head_dim = 10, from the caller" in report
    assert converted.image_processor.size == {"height": 28, "width": 28}


def test_the_usual_width_of_a_head_is_the_first_candidate(tmp_path: Path) -> None:
    path = saved(small(dim_head=64, heads=6, patch_size=7, image_size=28).state_dict(), tmp_path)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path)
    assert caught.value.candidates["num_attention_heads"][0] == 6


def test_size_and_file_of_a_model_without_a_position_table_are_asked_for(tmp_path: Path) -> None:
    path = saved(small(SimpleViT).state_dict(), tmp_path)
    with pytest.raises(AmbiguousCheckpointError, match="image_size= which the tensors do not show at all") as caught:
        from_checkpoint(path, num_attention_heads=3, patch_size=(5, 7))
    layouts = ("simple_vit 1.4.1", "simple_vit_3d 1.4.0", "simple_vit_1d 1.4.0")
    assert caught.value.candidates == {"layout": layouts, "image_size": ()}
    model = from_checkpoint(path, **SAID, layout="simple_vit 1.4.1").model
    assert same_tensors(model, from_module(small(SimpleViT)))
    for layout in layouts[1:]:
        with pytest.raises(ExportError, match=f"does not open this model of vit-pytorch yet:\n  - {layout}: they read"):
            from_checkpoint(path, **SAID, layout=layout)


@pytest.mark.parametrize(
    "wrong, fault",
    [
        ({"num_attention_heads": 7}, "the heads of this checkpoint are 30 wide together"),
        ({"num_attention_heads": 3, "head_dim": 11}, "the heads of this checkpoint are 30 wide together"),
        ({"pooling": "mean"}, "pooling='mean' does not fit"),
        ({"patch_size": (11, 7)}, "a patch has 105 numbers"),
        ({"num_channels": 2}, "a patch has 105 numbers"),
        ({"image_size": (28, 28)}, "has 20 patches of .5, 7., and the positions are of 12"),
        ({"layout": "0.19.6"}, "the tensors match no plain ViT of vit-pytorch"),
    ],
)
def test_hints_that_cannot_be_are_refused(wrong: dict[str, Any], fault: str, tmp_path: Path) -> None:
    path = saved(small().state_dict(), tmp_path)
    with pytest.raises(MappingError, match=fault):
        from_checkpoint(path, **{**SAID, **wrong})


@pytest.mark.parametrize(
    "wrong, fault",
    [
        ({"architecture": "vit_base_patch16_224"}, "architecture='vit_base_patch16_224' .it has no effect here"),
        ({"position_embedding_type": "sincos_2d"}, "position_embedding_type='sincos_2d' .the source has 'learned'"),
        ({"block_type": "post_norm"}, "block_type='post_norm' .the source has 'sequential'"),
        ({"pool_prefix_tokens": True}, "pool_prefix_tokens=True .the source has False"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0: expected a positive int"),
        ({"num_attention_heads": True}, "num_attention_heads is True: expected a positive int"),
        ({"num_channels": -4}, "num_channels is -4: expected a positive int"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan: expected a positive number"),
        ({"attention_scale": "d**-0.5"}, "attention_scale is 'd..-0.5': expected a positive number, or head_dim"),
        ({"hidden_act": "foo"}, "hidden_act is 'foo': expected one of .*gelu"),
        ({"pooling": "banana"}, "pooling is 'banana': expected one of cls, mean"),
        ({"image_size": (15, 28, 3)}, "expected a positive int or .height, width. in pixels"),
        ({"image_mean": (0.5, float("inf"))}, "image_mean is .*expected one finite number per channel"),
    ],
)
def test_hints_that_the_source_contradicts_or_that_no_model_can_have_are_refused_by_name(
    wrong: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    path = saved(small().state_dict(), tmp_path)
    with pytest.raises(CheckpointError, match=fault):
        from_checkpoint(path, **{**SAID, **wrong})
    if "architecture" not in wrong:
        with pytest.raises(PlainViTError):
            from_module(small(), **{"image_size": (15, 28), **wrong})


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_image_processor_of_other_channels_than_the_models_is_refused(count: int, tmp_path: Path) -> None:
    path = saved(small().state_dict(), tmp_path)
    wrong = {"image_mean": (0.4,) * count, "image_std": (0.6,) * count}
    with pytest.raises(CheckpointError, match=r"image_mean is .0\.4,.*, but the model has 3 channels: give one number"):
        from_checkpoint(path, **SAID, **wrong)
    with pytest.raises(PlainViTError, match="one number per channel"):
        from_checkpoint(path, **SAID, image_mean=(0.4,) * count)
    converted = from_checkpoint(path, **SAID)
    converted.model.save_pretrained(tmp_path / "ours")
    PlainViTImageProcessor(**wrong).save_pretrained(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"image_mean is .*or correct preprocessor_config.json"):
        from_checkpoint(tmp_path / "ours")
    converted.image_processor.save_pretrained(tmp_path / "ours")
    from_checkpoint(tmp_path / "ours")


def test_a_hint_that_does_not_exist_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="num_heads"):
        from_checkpoint(saved(small().state_dict(), tmp_path), num_heads=3)


# The reference


@pytest.mark.slow
@pytest.mark.parametrize("release, dim_scale", [("0.6.6", True), ("0.6.8", False)])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_reference_finds_heads_pooling_and_scale(release: str, dim_scale: bool, pool: str, tmp_path: Path) -> None:
    theirs = small(vit_pytorch_release(release).ViT, image_size=25, patch_size=5, channels=4, pool=pool)
    images = torch.randn(2, 4, 25, 25)
    converted = from_checkpoint(saved(theirs.state_dict(), tmp_path), reference=(images, logits(theirs, images)))
    config = converted.report.config
    assert (config.num_attention_heads, config.pooling, config.num_channels) == (3, pool, 4)
    assert config.attention_scale == (20**-0.5 if dim_scale else None)
    assert logits(converted.model, images).sub(logits(theirs, images)).abs().max() <= 1e-5
    assert "inferred: num_attention_heads = 3, from the reference" in str(converted.report)
    assert " ways were tried" in str(converted.report)


def test_reference_gives_the_size_of_a_model_without_a_position_table(tmp_path: Path) -> None:
    theirs, images = small(SimpleViT), torch.randn(2, 3, 15, 28)
    path = saved(theirs.state_dict(), tmp_path)
    converted = from_checkpoint(path, patch_size=(5, 7), reference=(images, logits(theirs, images)))
    assert (converted.report.config.image_size, converted.report.config.num_attention_heads) == ((15, 28), 3)


def test_reference_of_another_model_is_refused(tmp_path: Path) -> None:
    theirs, images = small(), torch.randn(2, 3, 15, 28)
    path = saved(theirs.state_dict(), tmp_path)
    with pytest.raises(VerificationError, match="none of the 8 ways"):
        from_checkpoint(path, patch_size=(5, 7), reference=(images, logits(small(seed=1), images)))
    with pytest.raises(VerificationError, match="none of the 1 ways"):
        from_checkpoint(path, **{**SAID, "num_attention_heads": 5}, reference=(images, logits(theirs, images)))


def test_a_reference_that_determines_nothing_says_so(tmp_path: Path) -> None:
    theirs, images = small(depth=1, image_size=(5, 7), pool="mean"), torch.randn(2, 3, 5, 7)  # one token: no attention
    path = saved(theirs.state_dict(), tmp_path)
    with pytest.raises(AmbiguousCheckpointError, match="fits 5 of 8 ways|fits 8 of 8 ways") as caught:
        from_checkpoint(path, patch_size=(5, 7), image_size=(5, 7), reference=(images, logits(theirs, images)))
    assert set(caught.value.candidates) == {"num_attention_heads"}


@pytest.mark.parametrize("hints", [{}, {"layer_norm_eps": 1e-3}])
def test_reference_of_another_epsilon_is_noted_until_it_is_given(hints: dict[str, float], tmp_path: Path) -> None:
    theirs, images = small(), torch.randn(2, 3, 15, 28)
    for module in theirs.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-3
    path = saved(theirs.state_dict(), tmp_path)
    reference = (images, logits(theirs, images))
    converted = from_checkpoint(path, patch_size=(5, 7), image_size=(15, 28), **hints, reference=reference)
    assert converted.report.config.num_attention_heads == 3  # found nevertheless
    assert any("try layer_norm_eps=" in note for note in converted.report.notes) == (not hints)


def test_reference_finds_the_clearly_nearest_of_several_ways_within_its_tolerance(tmp_path: Path) -> None:
    theirs, images = small(depth=1), torch.randn(2, 3, 15, 28)
    with torch.no_grad():
        theirs.get_submodule("transformer.layers.0.0.to_out.0").weight.mul_(1e-3)  # the number of heads hardly matters
    path = saved(theirs.state_dict(), tmp_path)
    reference = (images, logits(theirs, images))
    converted = from_checkpoint(path, patch_size=(5, 7), image_size=(15, 28), pooling="cls", reference=reference)
    assert converted.report.config.num_attention_heads == 3
    wrong = from_checkpoint(path, **{**SAID, "num_attention_heads": 6}).model
    off = (logits(wrong, images) - reference[1]).abs().max() / reference[1].abs().max()
    assert 1e-5 < off < 1e-3
    assert not any("reference" in note for note in converted.report.notes)


# Wrappers


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "vit.", "net."])
def test_prefixes_of_training_code_are_removed_and_reported(prefix: str, tmp_path: Path) -> None:
    theirs = small()
    path = saved({prefix + name: tensor for name, tensor in theirs.state_dict().items()}, tmp_path)
    converted = from_checkpoint(path, **SAID)
    assert same_tensors(converted.model, from_module(theirs, image_size=(15, 28)))
    assert f"wrapper {prefix.split('.')[0]!r} removed" in str(converted.report)


def test_training_checkpoint_with_its_optimizer_opens(tmp_path: Path) -> None:
    theirs = small()
    optimizer = torch.optim.AdamW(theirs.parameters())
    logits_with_grad = theirs(torch.randn(2, 3, 15, 28))
    logits_with_grad.sum().backward()
    optimizer.step()
    content = {"epoch": 3, "state_dict": theirs.state_dict(), "optimizer": optimizer.state_dict(), "best": 0.5}
    converted = from_checkpoint(saved(content, tmp_path, "last.ckpt"), **SAID)
    assert same_tensors(converted.model, from_module(theirs, image_size=(15, 28)))


@pytest.mark.parametrize("kind, layout", [(ViT, None), (SimpleViT, "simple_vit 1.4.1")])
def test_encoder_of_a_masked_autoencoder_opens(kind: type[nn.Module], layout: str | None, tmp_path: Path) -> None:
    theirs = small(kind)
    wrapper = randomize_(MAE(encoder=theirs, decoder_dim=17))
    converted = from_checkpoint(saved(wrapper.state_dict(), tmp_path), **SAID, layout=layout)
    assert same_tensors(converted.model, from_module(theirs, image_size=(15, 28)))
    assert "ignored decoder_pos_emb.weight: MAE: positions of the decoder" in str(converted.report)


@pytest.mark.parametrize("name", ["simmim", "mpp"])
def test_encoder_of_masked_pixel_models_of_their_time_opens(name: str, tmp_path: Path) -> None:
    release = vit_pytorch_release("1.15.7", name)
    theirs = small(vit_pytorch_release("1.15.7").ViT)
    if name == "simmim":
        wrapper = release.SimMIM(encoder=theirs)
    else:
        wrapper = release.MPP(transformer=theirs, patch_size=5, dim=20)
    path = saved(randomize_(wrapper).state_dict(), tmp_path)
    model = from_checkpoint(path, **SAID, pooling="cls").model
    assert same_tensors(model, from_module(theirs, image_size=(15, 28)))


@pytest.mark.parametrize("on_file", [True, False])
def test_student_and_teacher_are_asked_for(on_file: bool, tmp_path: Path) -> None:
    student = small(image_size=28, patch_size=7)
    wrapper = Dino(student, image_size=28, projection_hidden_size=13, num_classes_K=17, projection_layers=2)
    wrapper.teacher_encoder = randomize_(wrapper.teacher_encoder, seed=1)
    path = saved(wrapper.state_dict(), tmp_path)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path, num_attention_heads=3) if on_file else from_module(wrapper)
    assert len(caught.value.candidates["key"]) == 2
    for key in ("student_encoder", "teacher_encoder"):
        network = wrapper.get_submodule(f"{key}.net")
        if on_file:
            converted = from_checkpoint(path, num_attention_heads=3, image_size=28, patch_size=7, key=key)
            assert converted.report.ignored["projector.net.0.weight"].startswith("DINO")
            model = converted.model
        else:
            model = from_module(wrapper, key=key)
        assert same_tensors(model, from_module(network))


def test_student_of_a_distillation_with_a_token_opens(tmp_path: Path) -> None:
    student = small(DistillableViT)
    wrapper = DistillWrapper(student=student, teacher=nn.Linear(5, 7))
    path = saved(wrapper.state_dict(), tmp_path)
    model = from_checkpoint(path, **SAID, key="student").model
    assert same_tensors(model, from_module(student, image_size=(15, 28)))


# Faults of files


def test_damaged_state_dict_lists_what_is_missing_and_left_over(tmp_path: Path) -> None:
    tensors = small().state_dict()
    del tensors["transformer.norm.weight"], tensors["transformer.norm.bias"]
    tensors["transformer.layers.1.0.gate"] = torch.ones(3)
    with pytest.raises(MappingError, match="nearest") as caught:
        from_checkpoint(saved(tensors, tmp_path), **SAID)
    assert caught.value.faults == (
        "missing: 'transformer.norm'",
        "left over: 'transformer.layers.1.0.gate' of shape (3,)",
    )


@pytest.mark.parametrize(
    "fault, damage",
    [
        ("missing: 'transformer.layers.2.0.norm.bias'", lambda t: t.pop("transformer.layers.2.0.norm.bias")),
        ("missing: 'transformer.layers.1.1.net.4.weight'", lambda t: t.pop("transformer.layers.1.1.net.4.weight")),
        ("'to_patch_embedding.3.weight' of shape", lambda t: t.update({"to_patch_embedding.3.weight": torch.ones(19)})),
        ("with NaN or infinite values", lambda t: t["mlp_head.bias"].fill_(torch.inf)),
        ("of dtype torch.int64", lambda t: t.update({"mlp_head.bias": torch.ones(11, dtype=torch.int64)})),
        (
            "makes 'vit.layers.2.attention.o_proj",
            lambda t: t.update({"transformer.layers.2.0.to_out.0.weight": torch.ones(30, 20)}),
        ),
    ],
)
def test_damaged_tensors_are_named(fault: str, damage: Any, tmp_path: Path) -> None:
    tensors = small().state_dict()
    damage(tensors)
    with pytest.raises(MappingError, match=fault):
        from_checkpoint(saved(tensors, tmp_path), **SAID)


# The dtype of matrices, the dtype of the rest, and the smallest dtype that holds the values of both.
DTYPES = [
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float16, torch.float32),
    (torch.float32, torch.float64, torch.float64),
]


@pytest.mark.parametrize("matrices, rest, dtype", DTYPES)
@pytest.mark.parametrize("name", ["vit.pt", "vit.safetensors"])
def test_several_dtypes_become_the_one_that_holds_them_exactly(
    name: str, matrices: torch.dtype, rest: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = small().to(rest)
    tensors = {name: tensor.to(matrices if tensor.ndim > 1 else rest) for name, tensor in theirs.state_dict().items()}
    converted = from_checkpoint(saved(tensors, tmp_path, name), **SAID, verify=True)
    assert converted.model.dtype == dtype
    (note,) = [note for note in converted.report.notes if "holds all their values exactly" in note]
    assert all(str(one).removeprefix("torch.") in note for one in (matrices, rest, dtype))
    theirs.to(dtype).load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()})
    images = torch.randn(2, 3, 15, 28, dtype=dtype)
    converted.model.set_attn_implementation("eager")  # vit-pytorch's order of operations
    # Some processors divide a product in float64 by its width, and queries, keys and values are one product there: a
    # rounding in each of the operations that follow. A float32 between them would differ by 1e-8.
    limit = 16 * torch.finfo(dtype).eps if dtype == torch.float64 else 0.0
    assert difference(logits(converted.model, images), logits(theirs, images)) <= limit


def test_tensors_that_are_not_used_have_no_say_in_the_dtype(tmp_path: Path) -> None:
    module = tiny_transformers("CLIPModel")
    module.text_model.half()
    module.save_pretrained(tmp_path)
    converted = from_checkpoint(tmp_path)
    assert converted.model.dtype == torch.float32
    assert not [note for note in converted.report.notes if "dtype" in note]


def test_dtypes_that_none_holds_exactly_are_refused(tmp_path: Path) -> None:
    tensors = small().state_dict()
    tensors["mlp_head.bias"] = tensors["mlp_head.bias"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"several dtypes, torch.float32, torch.float8_e4m3fn.*save them in one"):
        from_checkpoint(saved(tensors, tmp_path, "vit.safetensors"), **SAID)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = saved(nn.Sequential(nn.Conv2d(3, 5, 7), nn.Linear(5, 3)).state_dict(), tmp_path)
    with pytest.raises(UnknownFormatError, match="its tensors are '0.weight', '0.bias'"):
        from_checkpoint(path)
    merging = vit_pytorch_release("1.15.7", "vit_with_patch_merger").ViT(**SIZES)
    with pytest.raises(MappingError, match="left over: 'transformer.patch_merger.queries'"):
        from_checkpoint(saved(merging.state_dict(), tmp_path), **SAID)


def test_releases_whose_decorrelated_mlp_skips_its_norm_are_asked_for_and_refused(tmp_path: Path) -> None:
    path = saved(small(vit_pytorch_release("1.15.7", "vit_with_decorr").ViT).state_dict(), tmp_path)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path, **SAID, pooling="cls")
    assert caught.value.candidates == {"layout": ("vit_with_decorr 1.21.5", "vit_with_decorr 1.15.0")}
    with pytest.raises(ExportError, match="does not read what its norm gives"):
        from_checkpoint(path, **SAID, pooling="cls", layout="vit_with_decorr 1.15.0")


# Our own folders, labels, verification, writing


@pytest.mark.parametrize("kind", [PlainViTForImageClassification, PlainViTModel])
def test_our_own_folder_opens_strictly(kind: Any, tmp_path: Path) -> None:
    config = PlainViTConfig(
        hidden_size=20,
        num_hidden_layers=3,
        num_attention_heads=5,
        intermediate_size=29,
        image_size=(15, 28),
        patch_size=(5, 7),
    )
    ours = randomize_(kind(config))
    ours.save_pretrained(tmp_path)
    converted = from_checkpoint(tmp_path)
    assert type(converted.model) is kind
    assert same_tensors(converted.model, ours)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.fc1.bias"))
    del tensors[name]
    safetensors.torch.save_file({**tensors, "gate": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MappingError) as caught:
        from_checkpoint(tmp_path)
    assert caught.value.faults == (f"missing: {name!r}, which {name!r} is made from", "left over: 'gate'")


def test_hints_for_our_own_folder_are_refused(tmp_path: Path) -> None:
    config = PlainViTConfig(hidden_size=20, num_hidden_layers=1, num_attention_heads=5, intermediate_size=29)
    PlainViTForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="contains everything: omit num_attention_heads, pooling"):
        from_checkpoint(tmp_path, num_attention_heads=5, pooling="cls")


@pytest.mark.parametrize("kind", [PlainViTForImageClassification, transformers.ViTForImageClassification])
def test_weights_beside_an_adapter_that_transformers_applies_are_refused(kind: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 28, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    model = kind(kind.config_class(intermediate_size=29, **sizes))
    model.save_pretrained(tmp_path)
    from_checkpoint(tmp_path)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has an adapter of peft beside its weights"):
        from_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", [PlainViTForImageClassification, transformers.ViTForImageClassification])
def test_another_dtype_of_the_config_than_of_the_weights_is_noted(kind: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 28, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    model = kind(kind.config_class(intermediate_size=29, **sizes))
    model.save_pretrained(tmp_path)
    assert not [note for note in from_checkpoint(tmp_path).report.notes if "bfloat16" in note]
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    converted = from_checkpoint(tmp_path)
    assert converted.model.dtype == torch.float32
    (note,) = [note for note in converted.report.notes if "bfloat16" in note]
    assert note.startswith("the weights stay float32, as in the file; config.json says bfloat16")


def test_labels_are_named_and_counted(tmp_path: Path) -> None:
    path = saved(small().state_dict(), tmp_path)
    names = [f"kind {i}" for i in range(11)]
    config = from_checkpoint(path, **SAID, id2label=names).model.config
    assert config.id2label[7] == "kind 7"
    assert config.label2id["kind 7"] == 7
    with pytest.raises(ValueError, match="names 10 labels: expected 11"):
        from_checkpoint(path, **SAID, id2label=names[:10])


@pytest.mark.parametrize("kind, layout", [(ViT, None), (SimpleViT, "simple_vit 1.4.1")])
def test_verification_runs_the_package_and_finds_no_difference(
    kind: type[nn.Module], layout: str | None, tmp_path: Path
) -> None:
    path = saved(small(kind).state_dict(), tmp_path)
    report = from_checkpoint(path, **SAID, layout=layout, verify=True).report
    assert report.differences is not None
    assert {"patches", "layer 2", "final norm", "logits"} <= {stage.stage for stage in report.differences}
    assert max(stage.relative for stage in report.differences) == 0
    assert "largest difference to the source's own model" in str(report)


def test_verification_lists_what_it_cannot_prove(tmp_path: Path) -> None:
    theirs, images = small(), torch.randn(2, 3, 15, 28)
    path = saved(theirs.state_dict(), tmp_path)
    wrong = from_checkpoint(path, **{**SAID, "num_attention_heads": 5}, verify=True)
    assert max(stage.relative for stage in wrong.report.differences or ()) == 0  # wrong heads on both sides
    assert not torch.allclose(logits(wrong.model, images), logits(theirs, images), atol=1e-2)
    assert not wrong.report.is_independent
    listed = str(wrong.report).partition("no tensor shows")[2]
    for line in ("num_attention_heads = 5, from the caller", "layer_norm_eps = 1e-05, from vit-pytorch",
                 "hidden_act = 'gelu', from vit-pytorch", "attention_scale = 'head_dim**-0.5', from what"):  # fmt: skip
        assert line in listed
    settled = from_checkpoint(path, patch_size=(5, 7), reference=(images, logits(theirs, images)), verify=True).report
    assert "num_attention_heads" not in {one.field for one in settled.unproven}
    assert "layer_norm_eps" in {one.field for one in settled.unproven}


def test_a_folder_is_compared_with_the_model_that_its_own_package_reads(tmp_path: Path) -> None:
    theirs = randomize_(tiny_transformers("ViTForImageClassification"))
    theirs.save_pretrained(tmp_path / "stock")
    named = randomize_(timm.create_model("test_vit", num_classes=5))
    save_for_hf(named, tmp_path / "timm", model_args={}, safe_serialization=True)
    for folder in ("stock", "timm"):
        report = from_checkpoint(tmp_path / folder, verify=True).report
        assert report.is_independent
        assert "built by its own package from the source's own configuration" in str(report)
        assert max(stage.relative for stage in report.differences or ()) <= 1e-5


@pytest.mark.parametrize("field, value", [("num_attention_heads", 2), ("layer_norm_eps", 1e-2), ("hidden_act", "relu")])
def test_a_setting_that_is_read_wrongly_is_found(
    field: str, value: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    randomize_(tiny_transformers("ViTForImageClassification")).save_pretrained(tmp_path / "stock")
    named = randomize_(timm.create_model("test_vit", num_classes=5, num_heads=4))
    save_for_hf(named, tmp_path / "timm", model_args={"num_heads": 4}, safe_serialization=True)
    for folder, origin in (("stock", TRANSFORMERS), ("timm", TIMM)):
        read = type(origin).describe_checkpoint

        def misread(self: Format, *arguments: Any, read: Any = read) -> Any:
            described = read(self, *arguments)
            changes = {field: value, **({"head_dim": None} if field == "num_attention_heads" else {})}
            config = PlainViTConfig.from_dict({**described.config.to_dict(), **changes})
            return dataclasses.replace(described, config=config)

        monkeypatch.setattr(type(origin), "describe_checkpoint", misread)
        with pytest.raises(VerificationError):
            from_checkpoint(tmp_path / folder, verify=True)


def test_other_numbers_of_the_package_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def with_another_epsilon(config: PlainViTConfig, layout: str | None) -> nn.Module:
        theirs = small()
        theirs.get_submodule("transformer.norm").eps = 0.1  # type: ignore[assignment]
        return theirs

    monkeypatch.setattr(VIT_PYTORCH, "build_module", with_another_epsilon)
    with pytest.raises(VerificationError, match="final norm: .*e-0"):
        from_checkpoint(saved(small().state_dict(), tmp_path), **SAID, verify=True)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("release", ["1.15.7", "1.16.0"])
def test_another_release_than_the_installed_is_compared_with_it_where_both_compute_the_same(
    release: str, pooling: str, tmp_path: Path
) -> None:
    theirs = small(vit_pytorch_release(release).ViT, pool=pooling)
    path = saved(theirs.state_dict(), tmp_path)
    report = from_checkpoint(path, **SAID, pooling=pooling, layout=release, verify=True).report
    assert any(note.startswith("compared with the installed release") for note in report.notes)
    assert report.differences is not None
    assert {"patches", "layer 2", "final norm", "logits"} <= {stage.stage for stage in report.differences}
    assert max(stage.relative for stage in report.differences) == 0


def test_a_release_that_computed_something_else_is_not_verified_and_named(tmp_path: Path) -> None:
    theirs = small(vit_pytorch_release("0.19.6").ViT)
    path = saved(theirs.state_dict(), tmp_path)
    report = from_checkpoint(path, **SAID, pooling="cls", layout="vit 0.10.1", verify=True).report
    assert report.differences is None
    (note,) = [note for note in report.notes if note.startswith("not verified: the installed vit-pytorch")]
    assert "vit 0.10.1: install that release" in note


def test_existing_or_wrongly_named_output_is_not_touched(tmp_path: Path) -> None:
    ours = from_module(small(), image_size=(15, 28))
    (tmp_path / "vit.pt").write_bytes(b"precious")
    with pytest.raises(OutputError, match="already exists"):
        to_checkpoint(ours, tmp_path / "vit.pt", format="vit_pytorch")
    with pytest.raises(OutputError, match="ends in '.onnx'"):
        to_checkpoint(ours, tmp_path / "vit.onnx", format="vit_pytorch")
    with pytest.raises(ExportError):
        to_checkpoint(ours, tmp_path / "vit.pt", format="vit_pytorch", layout="0.19.6", force=True)
    assert (tmp_path / "vit.pt").read_bytes() == b"precious"
    to_checkpoint(ours, tmp_path / "vit.pt", format="vit_pytorch", force=True)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".pt") == ["vit.pt"]
    assert torch.load(tmp_path / "vit.pt", weights_only=True).keys() == small().state_dict().keys()


def test_a_mapped_torch_file_gives_the_same_model_and_is_never_written_to(tmp_path: Path) -> None:
    source, images = small(), torch.randn(2, 3, 15, 28)
    path = saved(source.state_dict(), tmp_path)
    before = path.read_bytes()
    read, mapped = (from_checkpoint(path, **SAID, mmap=mmap).model for mmap in (False, True))
    assert torch.equal(logits(mapped, images), logits(read, images))
    mapped(images).logits.sum().backward()
    torch.optim.SGD(mapped.parameters(), lr=1.0).step()
    assert not torch.equal(logits(mapped, images), logits(read, images))
    assert path.read_bytes() == before
