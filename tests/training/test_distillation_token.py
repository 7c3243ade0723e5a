"""Distillation through a distillation token: the loss of timm and DeiT, and runs."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm.task.token_distillation import TokenDistillationTask
from torch import nn
from torch.nn import functional as F

from plain_vit import PlainViTImageProcessor
from plain_vit.conversion import from_module
from plain_vit.training.models import Teacher
from plain_vit.training.tasks.classification import Classification
from tests.conftest import randomize_
from tests.training.runs import finetune, open_script, save_plain_vit, weights_of

script = open_script("finetune_image_classification")
SIZES = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 12, "depth": 2, "num_classes": 5}
NAMES = ["a", "b", "c", "d", "e"]


def timm_model(kind, heads, mean):
    model = kind(**SIZES, num_heads=heads)
    randomize_(model)
    model.pretrained_cfg = {"mean": mean, "std": (0.5, 0.4, 0.3), "num_classes": 5, "input_size": (3, 16, 24)}
    return model


def converted(model):
    result = from_module(model)
    result.config.id2label = dict(enumerate(NAMES))
    config = model.pretrained_cfg
    processor = PlainViTImageProcessor(
        size={"height": 16, "width": 24}, image_mean=list(config["mean"]), image_std=list(config["std"])
    )
    return result, processor


@pytest.mark.parametrize(
    ("kind", "temperature", "weight"), [("soft", 3.0, 0.3), ("soft", 1.0, 0.5), ("hard", 1.0, 0.5)]
)
def test_loss_and_gradients_are_those_of_timm_s_task_and_of_deit(kind, temperature, weight):
    torch.manual_seed(0)
    student = timm_model(VisionTransformerDistilled, 3, (0.5, 0.5, 0.5))
    teacher = timm_model(VisionTransformer, 2, (0.3, 0.4, 0.5)).eval()
    model, processor = converted(student)
    options = script.FinetuneArguments(
        model="m", dataset="d", output_dir="o", teacher="t", label_smoothing=0.0, distillation=kind,
        distillation_weight=weight, distillation_temperature=temperature,
    )  # fmt: skip
    taught = Teacher(*converted(teacher), processor, NAMES)
    data = SimpleNamespace(label_names=NAMES, train_images=9)
    task = Classification(model, processor, data, options, lambda pixels: pixels, taught)
    task.prepare(Accelerator(cpu=True))
    pixels, labels = torch.randn(7, 3, 16, 24), torch.randint(5, (7,))
    loss, sums = task.loss(model.train(), {"pixel_values": pixels, "labels": labels})
    loss.backward()

    reference = TokenDistillationTask(
        student_model=student.train(), teacher_model=teacher, criterion=nn.CrossEntropyLoss(), distill_type=kind,
        task_loss_weight=1 - weight, temperature=temperature, verbose=False,
    )  # fmt: skip
    expected = reference(pixels, labels)
    expected["loss"].backward()
    torch.testing.assert_close(loss, expected["loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.classifier.weight.grad, student.head.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        model.distillation_classifier.weight.grad, student.head_dist.weight.grad, rtol=1e-4, atol=1e-6
    )
    own, dist = student(pixels)
    assert sums["accuracy"] == (((own + dist) / 2).argmax(1) == labels).sum()
    answers = taught(pixels)
    if kind == "hard":  # DeiT's formula; its soft loss also divides by the number of classes
        deit = F.cross_entropy(dist, answers.argmax(1))
    else:
        deit = 5 * temperature**2 / dist.numel() * F.kl_div(
            F.log_softmax(dist / temperature, 1), F.log_softmax(answers / temperature, 1), reduction="sum",
            log_target=True,
        )  # fmt: skip
    torch.testing.assert_close(loss, F.cross_entropy(own, labels) * (1 - weight) + deit * weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_two_heads_of_a_trained_model_differ(tmp_path):
    model = save_plain_vit(tmp_path / "model", use_distillation_token=True)
    teacher = save_plain_vit(tmp_path / "teacher", num_labels=10, id2label=dict(enumerate(map(str, range(10)))))
    finetune(
        model=model, teacher=teacher, output_dir=tmp_path / "run", dataset="digits", shots_per_class=4,
        steps=2, batch_size=12, evaluations=1, distillation="hard", learning_rate=0.05, report=False, ema_decay=0.5,
    )  # fmt: skip
    weights = weights_of(tmp_path / "run")
    assert not torch.equal(weights["classifier.weight"], weights["distillation_classifier.weight"])
