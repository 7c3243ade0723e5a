"""Training with third-party tools: the Hugging Face Trainer, PEFT, torchao."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model
from peft.utils import constants
from PIL import Image
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, pipeline

from plain_vit import PlainViTForImageClassification, PlainViTForMaskedImageModeling, PlainViTImageProcessor
from plain_vit.inference import open_exported, to_engine
from plain_vit.inference.adapters import register_lora_targets
from plain_vit_command import main
from tests import peers
from tests.conftest import randomize_
from tests.model import bare
from tests.tiny import difference, pixels, tiny_config

# Merged weights are added before the multiplication, not after.
REORDERED = 1e-5


class Images(Dataset):
    """Twelve images whose brightness shows their class, or with several labels."""

    def __init__(self, several: bool = False, masked: bool = False):
        self.several, self.masked = several, masked

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        label = index % 3
        item = {"pixel_values": pixels(1, seed=index)[0] + label}
        if self.masked:
            return item | {"bool_masked_pos": torch.arange(12).view(3, 4) % 3 == label}
        if self.several:
            return item | {"labels": torch.tensor([float(index % n == 0) for n in range(1, 8)])}
        return item | {"labels": torch.tensor(label)}


def build(model_class: Any = PlainViTForImageClassification, **fields: Any) -> Any:
    """Return a small model with random parameters."""
    return randomize_(model_class(tiny_config(**fields)))


def trainer(model: Any, folder: Path, images: Dataset | None = None, **arguments: Any) -> Trainer:
    """Return a quiet Trainer that writes only to `folder`."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2, "report_to": "none",
        "save_strategy": "epoch", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "seed": 3,
    }  # fmt: skip
    images = images or Images()
    return Trainer(
        model, TrainingArguments(str(folder), **{**defaults, **arguments}), train_dataset=images, eval_dataset=images
    )


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert that two models are equal bit for bit."""
    expected = theirs.state_dict()
    assert len(expected) == len(ours.state_dict()) > 50
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trainer_resumes_with_every_tensor(tmp_path: Path) -> None:
    rates = {"hidden_dropout_prob": 0.2, "drop_path_rate": 0.2}
    whole = trainer(build(**rates), tmp_path / "whole", num_train_epochs=3)
    whole.train()
    checkpoint = sorted((tmp_path / "whole").glob("checkpoint-*"))[0]
    resumed = trainer(build(**rates), tmp_path / "resumed", num_train_epochs=3)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == whole.state.global_step == 9
    assert_same(resumed.model, whole.model)


def test_trainer_ends_with_its_best_model(tmp_path: Path) -> None:
    # The highest loss counts as best, so that the last weights are not the best ones.
    run = trainer(
        build(), tmp_path, num_train_epochs=3, learning_rate=1e-3, eval_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    run.train()
    losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert len(losses) == 3
    assert losses[0] > 1.2 * max(losses[1:])
    assert run.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-6)
    folder = run.state.best_model_checkpoint
    assert folder is not None
    assert_same(run.model, PlainViTForImageClassification.from_pretrained(folder))


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_accumulated_steps_are_those_of_large_batches(several: bool, tmp_path: Path) -> None:
    runs = {}
    for batch in (12, 3):
        run = trainer(
            build(), tmp_path / str(batch), Images(several), per_device_train_batch_size=batch, max_grad_norm=0.0,
            gradient_accumulation_steps=12 // batch, optim="sgd", num_train_epochs=1, save_strategy="no",
        )  # fmt: skip
        run.train()
        runs[batch] = run
    logged = [next(e["loss"] for e in run.state.log_history if "loss" in e) for run in runs.values()]
    assert logged[1] == pytest.approx(logged[0], rel=1e-3)  # the log is rounded to four digits
    expected = runs[12].model.state_dict()
    for name, tensor in runs[3].model.state_dict().items():
        assert difference(tensor, expected[name]) < REORDERED, name


def test_trainer_trains_a_masked_image_model(tmp_path: Path) -> None:
    run = trainer(
        build(PlainViTForMaskedImageModeling, use_mask_token=True), tmp_path, Images(masked=True),
        num_train_epochs=6, save_strategy="no",
    )  # fmt: skip
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_trainer_checkpoints_activations_and_predicts(tmp_path: Path) -> None:
    run = trainer(build(), tmp_path, gradient_checkpointing=True, num_train_epochs=1, save_strategy="no")
    run.train()
    found = run.predict(Images())
    assert isinstance(found.predictions, np.ndarray)
    assert found.predictions.shape == (12, 7)


# The problem type after a training in which only the labels reveal it


def trained(problem: str, way: str, folder: Path) -> Any:
    """Return a classifier in evaluation mode, trained on float labels by the Trainer or by a plain loop."""
    model = build(num_labels=7 if problem == "multi_label_classification" else 1)
    of_dataset = Images(several=problem == "multi_label_classification")
    images: Any = [of_dataset[index] for index in range(len(of_dataset))]
    images = [{**item, "labels": item["labels"].float()} for item in images]
    if way == "trainer":
        trainer(model, folder, images, num_train_epochs=1, save_strategy="no").train()
    else:
        optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
        for item in images:
            model(item["pixel_values"][None], labels=item["labels"][None]).loss.backward()
            optimizer.step()
    return model.eval()


@pytest.mark.slow(quick=["regression-by hand"])
@pytest.mark.parametrize("problem, way", [("multi_label_classification", "trainer"), ("regression", "by hand")])
def test_pipeline_command_and_graph_answer_as_the_labels_were_trained(
    problem: str, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder, exported = trained(problem, way, tmp_path / "run"), tmp_path / "model", tmp_path / "graph"
    processor = PlainViTImageProcessor(size={"height": 24, "width": 56})
    for part in (model, processor):
        part.save_pretrained(folder)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 56, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    with torch.no_grad():
        logits = model(processor(image, return_tensors="pt").pixel_values).logits[0]
    expected = dict(zip(model.config.id2label.values(), logits.tolist(), strict=True))
    if problem == "multi_label_classification":
        expected = {name: 1 / (1 + np.exp(-value)) for name, value in expected.items()}
    answers = pipeline("image-classification", str(folder), top_k=7)(image)
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(expected, abs=1e-5)
    to_engine(model, exported, engine="onnx", image_processor=processor)
    settings = json.loads((exported / "config.json").read_text())
    assert settings["problem_type"] == open_exported(exported).config.problem_type == problem
    for source in (folder, exported):
        capsys.readouterr()
        words = ["--model", str(source), "--top", "7", "--output-format", "json"]
        assert main(["predict", str(tmp_path / "image.png"), *words]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        found = dict(zip(row["labels"], row["values" if problem == "regression" else "probabilities"], strict=True))
        assert found == pytest.approx(expected, abs=1e-5)


# PEFT


def lora(model: Any) -> PeftModel:
    """Return the model with low-rank adapters of random weights on queries, values and the MLP, and a new head."""
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "fc1"], modules_to_save=["classifier"], lora_dropout=0.1
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    return adapted


def test_lora_trains_the_adapters_and_the_head_alone(tmp_path: Path) -> None:
    model = lora(build())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    run = trainer(model, tmp_path, num_train_epochs=2, save_strategy="no")
    run.train()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    wanted = {name for name in before if "lora_" in name or "classifier.modules_to_save" in name}
    assert len(wanted) == 3 * 3 * 2 + 2
    assert changed == wanted


def test_lora_merges_and_reloads(tmp_path: Path) -> None:
    model = lora(build()).eval()
    expected = model(pixel_values=pixels()).logits
    assert difference(build().eval()(pixels()).logits, expected) > 0.1
    model.save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(build(), str(tmp_path)).eval()
    assert torch.equal(reloaded(pixel_values=pixels()).logits, expected)
    merged = model.merge_and_unload()
    assert difference(merged(pixels()).logits, expected) < REORDERED
    merged.save_pretrained(tmp_path / "merged")
    again = PlainViTForImageClassification.from_pretrained(tmp_path / "merged")
    assert torch.equal(again(pixels()).logits, merged(pixels()).logits)


def test_lora_trains_with_checkpointed_activations() -> None:
    model = lora(build()).train()
    model.base_model.model.gradient_checkpointing_enable()
    model(pixel_values=pixels(), labels=torch.tensor([1, 2])).loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "layers.0" in name and "lora_A" in name]
    assert len(gradients) == 3
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)


# torchao


INT8 = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig
from plain_vit import PlainViTForImageClassification
from tests.model.test_transformers_training import build
from tests.tiny import difference, pixels

folder = Path(sys.argv[1])
model = build(hidden_size=120, intermediate_size=248).eval()
expected = model(pixels()).logits
model.save_pretrained(folder / "float")
config = TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["classifier"])
quantized = PlainViTForImageClassification.from_pretrained(folder / "float", quantization_config=config)
found = quantized(pixels()).logits
quantized.save_pretrained(folder / "int8")
again = PlainViTForImageClassification.from_pretrained(folder / "int8")
print(type(quantized.vit.layers[0].mlp.fc1.weight).__name__)
print(difference(found, expected))
print(torch.equal(again(pixels()).logits, found))
print(difference(quantized.train()(pixels()).logits, found))
"""


@pytest.mark.slow
def test_torchao_s_int8_weights_load_save_and_load(tmp_path: Path) -> None:
    """Use a separate process: transformers imports torchao if it is installed, and the import warns."""
    printed = bare.run(INT8, tmp_path, peers.FOLDER / "torchao", cwd=peers.TESTS.parent, home=tmp_path / "home")
    kind, distance, same, of_training = printed.split()[-4:]
    assert "Int8" in kind
    assert 0 < float(distance) < 0.05  # eight bits
    assert same == "True"
    assert float(of_training) < 1e-5  # its projections are not fused
    size = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("float", "int8")}
    assert size["int8"] < 0.5 * size["float"]


def test_peft_knows_what_to_adapt_once_it_was_registered() -> None:
    for table in (table for name, table in vars(constants).items() if name.endswith("_TARGET_MODULES_MAPPING")):
        table.pop("plain_vit", None)
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(PlainViTForImageClassification(tiny_config()), LoraConfig(r=3))
    assert register_lora_targets() == ["q_proj", "v_proj"]
    for kind in (LoraConfig, LoHaConfig, LoKrConfig):
        adapted = get_peft_model(PlainViTForImageClassification(tiny_config()), kind(r=3))
        trained = {name.rpartition(".default")[0] for name, p in adapted.named_parameters() if p.requires_grad}
        layers = {name.rpartition(".")[0].removeprefix("base_model.model.") for name in trained}
        assert {layer.split(".attention.")[1].split(".")[0] for layer in layers} == {"q_proj", "v_proj"}
    constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["plain_vit"] = ["fc1"]
    register_lora_targets()
    assert constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["plain_vit"] == ["fc1"]  # kept
    del constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["plain_vit"]
