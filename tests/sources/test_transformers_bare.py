"""Weights of transformers without a config.json: class and settings that no tensor shows are asked, not guessed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from plain_vit import PlainViTModel
from plain_vit.conversion import from_checkpoint, from_module
from plain_vit.conversion.sources.transformers.families import ARCHITECTURES, container_of
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, MappingError
from plain_vit_command import main
from tests.conftest import randomize_
from tests.sizes import few
from tests.sources.test_transformers import eager
from tests.sources.transformers_models import (
    CASES,
    REPRESENTATIVES,
    pixels_for,
    stage_differences,
    tiny_transformers,
    tolerance,
)
from tests.sources.truthful import truth_among
from tests.tiny import difference

# Settings that no tensor shows and that are not asked but reported; here they are not the defaults.
ASSUMED = {"DINOv3ViTModel": "rope_theta", "Sapiens2Model": "rope_theta", "ViTModel": "representation_act",
           "PixtralVisionModel": "rope_theta", "MLCDVisionModel": "rope_theta"}  # fmt: skip


def bare_file(module: Any, folder: Path) -> Path:
    """Save a model with transformers, and keep only the weights."""
    module.save_pretrained(folder / "whole")
    (folder / "whole" / "model.safetensors").rename(folder / "clip_vision.safetensors")
    return folder / "clip_vision.safetensors"


def truth_of(module: Any) -> dict[str, Any]:
    """Return the settings of a model that its tensors do not show."""
    config = from_module(module).config
    fields = ("num_attention_heads", "layer_norm_eps", "hidden_act", "image_size", "patch_size")
    return {"architecture": type(module).__name__, **{field: getattr(config, field) for field in fields}}


def asked(path: Path, **said: Any) -> AmbiguousCheckpointError:
    """Return the error with the questions about a file."""
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(path, **said)
    return caught.value


ALONE = [
    case
    for case in CASES
    if "partial" not in case
    and (name := container_of(case.split()[0].rstrip(",")).holds) in ARCHITECTURES
    and ARCHITECTURES[name].family.is_bare
]
FIRST = [case for case in REPRESENTATIVES if case in ALONE]
OTHERS = few((case for case in ALONE if case not in FIRST), 15)


@pytest.mark.slow(
    quick=["ViTForMaskedImageModeling", "IJepaForImageClassification", "Data2VecVisionForImageClassification",
           "OwlViTVisionModel", "InternVLVisionModel, class token, mask token", "Aimv2VisionModel"]
)  # fmt: skip
@pytest.mark.parametrize("case", [*FIRST, *OTHERS])
def test_weights_alone_open_with_what_no_tensor_shows(case: str, tmp_path: Path) -> None:
    module = tiny_transformers(case)
    live, truth, path = from_module(module), truth_of(module), bare_file(module, tmp_path)
    question = asked(path)
    assert truth["architecture"] in question.candidates["architecture"]
    for name in ("num_attention_heads", "layer_norm_eps", "hidden_act"):
        assert name not in question.candidates or truth_among(truth[name], question.candidates[name]) is not None
    said = {name: truth[name] for name in question.candidates}
    opened = from_checkpoint(path, **said, verify=True)
    ours, theirs = opened.model.state_dict(), live.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert not opened.report.is_independent
    unproven = {one.field for one in opened.report.unproven}
    assert {"architecture", "num_attention_heads", "layer_norm_eps", "hidden_act", "attention_scale"} <= unproven
    if case in ASSUMED:
        assert ASSUMED[case] in unproven
        configs = opened.model.config, live.config
        ours, theirs = ({**one.to_dict(), **one.group("rope_parameters")}[ASSUMED[case]] for one in configs)
        assert ours != theirs
        return
    pixel_values = pixels_for(module)
    found = stage_differences(module, eager(opened.model), pixel_values)
    assert max(found.values()) <= tolerance(case), found


@pytest.mark.slow(quick=FIRST[::3])
@pytest.mark.parametrize("case", FIRST)
def test_the_config_json_that_is_suggested_opens_the_weights(case: str, tmp_path: Path) -> None:
    module = tiny_transformers(case)
    truth, path = truth_of(module), bare_file(module, tmp_path)
    question = asked(path, architecture=truth["architecture"])
    described = re.search(r"with the values of the model, (\{.*\}); or give", question.message)
    assert described is not None
    settings = json.loads(described[1])
    tower = settings.get("vision_config", settings)
    epsilon = "rms_norm_eps" if type(module).__name__.startswith(("Aimv2", "Sapiens2")) else "layer_norm_eps"
    tower |= {epsilon if field == "layer_norm_eps" else field: truth[field] for field in question.candidates}
    if "head_dim" in tower:  # consistent with the suggested number of heads
        tower["head_dim"] = from_module(module).config.head_dim
    (tmp_path / "beside").mkdir()
    path.rename(tmp_path / "beside" / path.name)
    (tmp_path / "beside" / "config.json").write_text(json.dumps(settings))
    opened, live = from_checkpoint(tmp_path / "beside", verify=True), from_module(module)
    assert opened.report.is_independent
    ours, theirs = opened.model.state_dict(), live.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_tower_inside_a_larger_model_opens_by_its_place(tmp_path: Path) -> None:
    module = tiny_transformers("BlipForConditionalGeneration")
    path, truth = bare_file(module, tmp_path), truth_of(module.vision_model)
    with pytest.raises(CheckpointError, match="key= with its place, which ends in 'vision_model', opens it alone"):
        from_checkpoint(path)
    said = {name: truth[name] for name in asked(path, key="vision_model").candidates}
    opened = from_checkpoint(path, key="vision_model", **said, verify=True)
    assert max(stage_differences(module, eager(opened.model), pixels_for(module)).values()) == 0.0


def test_two_lines_describe_a_model_of_the_default_size(tmp_path: Path) -> None:
    module = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=2), add_pooling_layer=False).eval()
    path = bare_file(module, tmp_path)
    said = {"num_attention_heads": 12, "layer_norm_eps": 1e-12, "image_size": 224}
    question = asked(path, architecture="ViTModel", **said)
    assert '{"model_type": "vit", "architectures": ["ViTModel"], "num_hidden_layers": 2}' in question.message
    opened = from_checkpoint(path, architecture="ViTModel", hidden_act="gelu", **said)
    assert (
        difference(
            opened.model(torch.ones(1, 3, 224, 224)).last_hidden_state,
            module(torch.ones(1, 3, 224, 224)).last_hidden_state,
        )
        <= 1e-5
    )  # the order of operations differs


def test_a_tower_for_a_user_interface_opens_in_two_dtypes_with_its_counters(tmp_path: Path) -> None:
    module = tiny_transformers("CLIPVisionModelWithProjection")
    path = bare_file(module, tmp_path)
    state = {name: tensor.half() if tensor.ndim > 1 else tensor for name, tensor in load_file(path).items()}
    counted = {"vision_model.embeddings.position_ids": torch.arange(17)[None]}
    save_file({**state, **counted}, path)
    question = asked(path)
    assert question.candidates["architecture"][0] == "CLIPVisionModelWithProjection"
    assert "image_size" not in question.candidates  # the class itself assumes square grids
    truth = truth_of(module)
    opened = from_checkpoint(path, **{name: truth[name] for name in question.candidates})
    assert list(opened.report.ignored.values()) == ["counts the positions"]
    module.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    assert max(stage_differences(module, eager(opened.model), pixels_for(module)).values()) == 0.0


@pytest.mark.slow
def test_the_logits_of_some_images_settle_what_no_tensor_shows(tmp_path: Path) -> None:
    module = tiny_transformers("ViTForImageClassification, wide heads, no qkv bias")
    state = {f"model.net.{name}": tensor for name, tensor in module.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt")
    pixel_values = pixels_for(module) * torch.tensor([1.0, 1e-3]).view(2, 1, 1, 1)  # low variance: epsilon matters
    with torch.no_grad():
        reference = pixel_values, module(pixel_values).logits
    opened = from_checkpoint(tmp_path / "last.ckpt", reference=reference)
    assert (opened.model.config.num_attention_heads, opened.model.config.head_dim) == (5, 12)
    assert opened.model.config.hidden_act == "gelu_pytorch_tanh"
    assert max(stage_differences(module, eager(opened.model), pixels_for(module)).values()) == 0.0


class Own(nn.Module):
    """A custom classifier on a pooler, or on the mean of all tokens."""

    def __init__(self, *, is_pooled: bool, head: str) -> None:
        super().__init__()
        self.vit = tiny_transformers("ViTModel" if is_pooled else "ViTModel without a pooler")
        setattr(self, head, nn.Linear(30 if is_pooled else 40, 5))


@pytest.mark.parametrize("head", ["classifier", "fc"])
@pytest.mark.parametrize("is_pooled", [True, False])
def test_the_encoder_of_a_module_of_ones_own_opens_alone(is_pooled: bool, head: str, tmp_path: Path) -> None:
    module: Any = randomize_(Own(is_pooled=is_pooled, head=head)).eval()
    torch.save(
        {"state_dict": {f"model.{name}": tensor for name, tensor in module.state_dict().items()}}, tmp_path / "x.pt"
    )
    truth = truth_of(module.vit)
    if head == "classifier" and not is_pooled:  # a class of transformers has the same
        question = asked(tmp_path / "x.pt")
        assert question.candidates["architecture"] == ("ViTForImageClassification", "ViTMSNForImageClassification")
        assert "If a class of your own has the classifier: to open the encoder alone" in question.message
    else:
        with pytest.raises(CheckpointError, match=rf"'{head}.weight', .*key= with its place, which ends in 'vit'"):
            from_checkpoint(tmp_path / "x.pt")
    ways: list[dict[str, Any]] = [
        {"key": "state_dict.model.vit"},
        *([{"drop": ["head"]}] if head == "classifier" else []),
    ]
    del truth["patch_size"]
    for way in ways:
        opened = from_checkpoint(tmp_path / "x.pt", **truth, **way)
        assert isinstance(opened.model, PlainViTModel)
        found = stage_differences(module.vit, eager(opened.model), pixels_for(module.vit))
        assert found["tokens"] == 0.0


def test_what_the_caller_says_is_checked(tmp_path: Path) -> None:
    module = tiny_transformers("ViTForImageClassification")
    path, truth = bare_file(module, tmp_path), truth_of(module)
    del truth["patch_size"]
    with pytest.raises(
        CheckpointError, match="Clasification' is not an architecture of.*did you mean 'ViTForImageClassification'"
    ):
        from_checkpoint(path, architecture="ViTForImageClasification")
    with pytest.raises(CheckpointError, match="ViTModel and DeiTModel"):
        from_checkpoint(path, architecture="ViTModel", layout="DeiTModel")
    with pytest.raises(CheckpointError, match="pooling='mean'"):
        from_checkpoint(path, **truth, pooling="mean")
    with pytest.raises(MappingError, match="distillation_token"):
        from_checkpoint(path, **truth | {"architecture": "DeiTForImageClassification"})
    with pytest.raises(MappingError, match="position"):
        from_checkpoint(path, **truth | {"image_size": (48, 56)})
    assert from_checkpoint(path, **{**truth, "architecture": None, "layout": "ViTForImageClassification"}).report.layout


def test_the_commands_ask_for_the_class_and_take_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module = tiny_transformers("ViTForImageClassification")
    path = bare_file(module, tmp_path)
    words = ["convert", str(path), str(tmp_path / "out")]
    assert main(words) == AmbiguousCheckpointError.exit_code
    (suggested,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  plain-vit ")]
    assert "--architecture ViTForImageClassification --num-attention-heads " in suggested
    said = ["24x56" if word == "VALUE" else word for word in suggested.split()[len(words) + 1 :]]
    said[said.index("--num-attention-heads") + 1] = "5"
    assert main([*words, *said]) == 0
    printed = capsys.readouterr().out
    assert "logits: 0.0e+00" in printed
    assert "architecture = 'ViTForImageClassification', from the caller" in printed
    assert main(["verify", str(path), str(tmp_path / "out"), *said]) == 0
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert max(stage_differences(module, model, pixels_for(module)).values()) == 0.0
