"""Tests that need a GPU: the same outputs there, half precision, flash attention, compilation, training.

Without one every test here is skipped. `make test` runs them where there is one.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from tests.conftest import randomize_
from tests.tiny import VARIATIONS, difference, pixels, tiny_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OTHER_KERNELS = 1e-5  # float32 sums in another order
HALF = 2e-2  # bfloat16 keeps 8 bits of the mantissa


@pytest.fixture(autouse=True)
def _nondeterministic() -> None:
    """Let operations run that have no deterministic kernel on a GPU."""
    torch.use_deterministic_algorithms(False)


def build(**fields: Any) -> Any:
    """Return a small model on the CPU whose every parameter differs."""
    return randomize_(PlainViTForImageClassification(tiny_config(**fields))).eval()


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_logits_and_gradients_on_a_gpu_are_those_on_the_cpu(name: str) -> None:
    model = build(**VARIATIONS[name])
    there = copy.deepcopy(model).cuda()
    labels = torch.tensor([1, 2])
    expected = model(pixels(), labels=labels)
    found = there(pixels().cuda(), labels=labels.cuda())
    assert difference(found.logits.cpu(), expected.logits) < OTHER_KERNELS
    expected.loss.backward()
    found.loss.backward()
    theirs = dict(model.named_parameters())
    largest = max(p.grad.abs().max() for p in theirs.values() if p.grad is not None)
    for path, parameter in there.named_parameters():
        if parameter.grad is not None:
            assert (parameter.grad.cpu() - theirs[path].grad).abs().max() < OTHER_KERNELS * largest, path


def test_pixels_sent_to_a_gpu_are_the_cpus_and_tensors_there_are_resized_there() -> None:
    levels = np.random.default_rng(0).integers(0, 256, (2, 97, 131, 3), dtype=np.uint8)
    images = [Image.fromarray(image) for image in levels]
    processor = PlainViTImageProcessor(size={"height": 48, "width": 80}, image_mean=[0.4, 0.5, 0.6], resample=3)
    expected = processor(images, return_tensors="pt").pixel_values
    sent = processor(images, device="cuda", return_tensors="pt").pixel_values
    assert sent.device.type == "cuda"
    assert torch.equal(sent.cpu(), expected)
    there = processor(torch.from_numpy(levels).cuda(), return_tensors="pt").pixel_values
    assert there.device.type == "cuda"
    assert (there.cpu() - expected).abs().max() <= 7 / 255 / 0.5 + 1e-6  # levels, of noise by a bicubic filter


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_every_kernel_of_sdpa_gives_the_eager_logits(backend: SDPBackend) -> None:
    model = build(hidden_size=80, intermediate_size=104).cuda().bfloat16()  # heads of 16: flash takes multiples of 8
    images = pixels().cuda().bfloat16()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(images).logits
        model.set_attn_implementation("sdpa")
        with sdpa_kernel(backend):
            found = model(images).logits
    assert difference(found.float(), expected.float()) < HALF


def test_flash_attention_gives_the_eager_logits() -> None:
    pytest.importorskip("flash_attn", reason="the package flash-attn is not installed")
    model = build(hidden_size=80, intermediate_size=104).cuda().bfloat16()
    images = pixels().cuda().bfloat16()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(images).logits
        model.set_attn_implementation("flash_attention_2")
        found = model(images).logits
    assert difference(found.float(), expected.float()) < HALF


def test_a_compiled_training_step_has_the_eager_loss_and_gradients() -> None:
    model = build().cuda().train()
    labels = torch.tensor([1, 2], device="cuda")
    gradients = []
    for step in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        loss = step(pixel_values=pixels().cuda(), labels=labels).loss
        loss.backward()
        gradients.append((loss.item(), model.vit.layers[0].mlp.fc1.weight.grad.clone()))
    (expected_loss, expected), (found_loss, found) = gradients
    assert abs(found_loss - expected_loss) < OTHER_KERNELS * expected_loss
    assert difference(found, expected) < 10 * OTHER_KERNELS


def test_the_fine_tuning_script_trains_on_a_gpu_in_half_precision(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "examples" / "finetune_image_classification.py"
    words = (
        f"--model vit-tiny-patch16-32 --dataset digits --output_dir {tmp_path}/out --epochs 3 --mixed_precision bf16 "
        "--batch_size 64 --checkpoints_kept 0"
    )
    process = subprocess.run([sys.executable, str(script), *words.split()], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads((tmp_path / "out" / "results.json").read_text())["test_accuracy"] > 0.3
