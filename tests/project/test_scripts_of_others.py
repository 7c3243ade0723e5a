"""Scripts for timm and transformers give the same results with our models: one line differs, which makes the model.

Those for captum, scikit-learn, Lightning and sentence-transformers are in docs/reference/other_tools.md, which
`test_documentation.py` runs.
"""

from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import timm
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import plain_vit
from plain_vit import PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint, from_module
from plain_vit.training.data.glyphs import render_glyphs
from tests import ROOT
from tests.conftest import randomize_
from tests.tiny import tiny_config

TIMM = """
import torch

model = create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, patch_size=8, depth=3, num_classes=7).eval()
with torch.inference_mode():
    tokens = model.forward_features(pixels)
    logits = model.forward_head(tokens)
    final, maps = model.forward_intermediates(pixels, indices=[0, -1], norm=True)
    channels = [model.feature_info[index]["num_chs"] for index in (0, -1)]
    layers = model.get_intermediate_layers(pixels, n=2, reshape=True, norm=True)
    model.reset_classifier(0)
    features = model.forward_head(model.forward_features(pixels), pre_logits=True)
"""
TRANSFORMERS = """
import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image
from transformers import (
    AutoImageProcessor, AutoModelForImageClassification, DefaultDataCollator, Trainer, TrainingArguments, pipeline,
    set_seed,
)

features = Features({"image": Image(), "label": ClassLabel(names=["first half", "second half"])})
dataset = Dataset.from_dict({"image": images, "label": labels}, features=features)
dataset = dataset.train_test_split(test_size=0.25, seed=0)
names = dataset["train"].features["label"].names
id2label, label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
processor = AutoImageProcessor.from_pretrained(checkpoint)

def transforms(examples):
    pictures = [image.convert("RGB") for image in examples.pop("image")]
    return examples | {"pixel_values": processor(pictures, return_tensors="pt")["pixel_values"]}

model = AutoModelForImageClassification.from_pretrained(
    checkpoint, num_labels=len(names), id2label=id2label, label2id=label2id
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=f"{checkpoint}-trained", remove_unused_columns=False, eval_strategy="epoch", save_strategy="epoch",
        learning_rate=1e-3, per_device_train_batch_size=16, num_train_epochs=2, warmup_steps=2,
        load_best_model_at_end=True, metric_for_best_model="accuracy", report_to="none", use_cpu=True,
    ),
    data_collator=DefaultDataCollator(),
    train_dataset=dataset["train"].with_transform(transforms),
    eval_dataset=dataset["test"].with_transform(transforms),
    processing_class=processor,
    compute_metrics=lambda result: {"accuracy": float(np.mean(result.predictions.argmax(axis=1) == result.label_ids))},
)
set_seed(0)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model(f"{checkpoint}-best")
answers = pipeline("image-classification", model=f"{checkpoint}-best")(images[:4])
"""


def run(script: str, **names: Any) -> dict[str, Any]:
    """Run a script and return its names."""
    exec(compile(script, "script", "exec"), names)
    return names


def test_a_script_of_timm_gets_the_same_features() -> None:
    pixels, converted = torch.randn(2, 3, 32, 32), []

    def ours(*arguments: Any, **options: Any) -> Any:
        converted.append(randomize_(timm.create_model(*arguments, **options)))
        return from_module(converted[0])

    found = run(TIMM, create_model=ours, pixels=pixels)
    expected = run(TIMM, create_model=lambda *_, **__: converted[0], pixels=pixels)
    assert type(found["model"]) is PlainViTForImageClassification
    assert found["channels"] == expected["channels"]
    for name in ("tokens", "logits", "final", "maps", "layers", "features"):
        torch.testing.assert_close([*found[name]], [*expected[name]], rtol=1e-5, atol=1e-6)


def test_a_script_of_timm_builds_models_by_the_same_arguments() -> None:
    script = """
model = create_model("vit_tiny_patch16_224", pretrained=False, img_size=(32, 48), num_classes=7, in_chans=1).eval()
with torch.inference_mode():
    logits = model.forward_head(model.forward_features(pixels))
"""
    for create_model in (plain_vit.create_model, timm.create_model):
        found = run(script, create_model=create_model, torch=torch, pixels=torch.randn(2, 1, 32, 48))
        assert found["logits"].shape == (2, 7)
    with pytest.raises(ValueError, match="num_classes, num_labels name a field twice"):
        plain_vit.create_model("vit_tiny_patch16_224", num_labels=3, num_classes=3)


@pytest.mark.parametrize(
    "use",
    [
        lambda outputs: outputs.softmax(-1),
        lambda outputs: torch.topk(outputs, 5),
        lambda outputs: torch.nn.CrossEntropyLoss()(outputs, torch.tensor([1, 2])),
    ],
)
def test_an_output_taken_for_a_tensor_is_an_error_that_names_its_class(use: Any) -> None:
    page = (ROOT / "docs" / "reference" / "other_tools.md").read_text(encoding="utf-8")
    config = tiny_config(num_labels=7)
    outputs = PlainViTForImageClassification(config)(torch.zeros(2, config.num_channels, *config.image_shape))
    with pytest.raises((AttributeError, TypeError), match="ImageClassifierOutput") as raised:
        use(outputs)
    assert str(raised.value).partition("(): ")[2] in page.replace("\n", " ")
    use(outputs.logits)


@pytest.mark.slow
def test_a_script_of_transformers_trains_to_the_same_results(tmp_path: Path) -> None:
    pixels, numbers = render_glyphs(64, seed=3)
    images, labels = [PIL.Image.fromarray(image) for image in pixels], [int(number >= 17) for number in numbers]
    stock = ViTForImageClassification(
        ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=24,
                  patch_size=6, num_labels=2)
    )  # fmt: skip
    stock.save_pretrained(tmp_path / "stock")
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "stock")
    converted = from_checkpoint(tmp_path / "stock")
    for part in (converted.model, converted.image_processor):
        part.save_pretrained(tmp_path / "ours")
    expected, found = (
        run(TRANSFORMERS, checkpoint=str(tmp_path / name), images=images, labels=labels) for name in ("stock", "ours")
    )
    assert type(found["model"]) is PlainViTForImageClassification
    assert found["metrics"]["eval_loss"] == pytest.approx(expected["metrics"]["eval_loss"], rel=1e-4)
    assert found["metrics"]["eval_accuracy"] == expected["metrics"]["eval_accuracy"]
    for ours, theirs in zip(found["answers"], expected["answers"], strict=True):
        assert [answer["label"] for answer in ours] == [answer["label"] for answer in theirs]
        assert [answer["score"] for answer in ours] == pytest.approx([answer["score"] for answer in theirs], rel=1e-3)
