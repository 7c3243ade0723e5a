"""Tests that need a GPU: the outputs of the CPU and of the source, half precision, flash attention, compilation,
memory, and training with the same steps as on a CPU.

`make test` runs them if there is a GPU; otherwise they are skipped.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor, prepare_for_inference
from plain_vit.conversion import from_module
from plain_vit.training.data.augmentation import Normalization
from plain_vit.training.data.inputs import NoiseInputs
from plain_vit.training.hardware.memory import fitting_accumulation, training_trial
from plain_vit.training.hardware.precision import tf32
from plain_vit.training.hardware.processes import start_accelerator
from plain_vit.training.optimization import MovingAverage, orthogonalised
from plain_vit.training.run.folder import read_log
from tests.model.test_packed import GRIDS, MANY, images_of, packed, padded
from tests.tiny import VARIATIONS, build, difference, pixels
from tests.training.runs import PYTHON, launch, launch_and_kill, save_plain_vit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OTHER_KERNELS = 1e-5  # float32 sums in a different order
HALF = 2e-2  # bfloat16 keeps 8 bits of the mantissa
DIGITS = {
    "dataset": "digits", "shots_per_class": 8, "steps": 6, "batch_size": 16, "warmup_steps": 0, "learning_rate": 3e-3,
    "log_every": 1, "evaluations": 1, "report": False, "checkpoints_kept": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nondeterministic() -> None:
    """Allow operations without a deterministic GPU kernel."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_logits_and_gradients_on_a_gpu_are_those_on_the_cpu(name: str) -> None:
    model = build(**VARIATIONS[name])
    there = copy.deepcopy(model).cuda()
    expected, found = model(pixels()).logits, there(pixels().cuda()).logits  # per token, without pooling
    assert difference(found.cpu(), expected) < OTHER_KERNELS
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(gradient)
    found.backward(gradient.cuda())
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
    assert (there.cpu() - expected).abs().max() <= 7 / 255 / 0.5 + 1e-6  # 7 levels, for noise and a bicubic filter


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_every_kernel_of_sdpa_gives_the_eager_logits(backend: SDPBackend) -> None:
    model = build(hidden_size=80, intermediate_size=104).cuda().bfloat16()  # 16 per head: flash needs multiples of 8
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


@pytest.mark.parametrize("package", ["plain_vit", "timm", "torchvision", "transformers", "vit_pytorch"])
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_logits_on_a_gpu_are_those_of_the_source(package: str, size: str) -> None:
    from benchmarks.models import build, logits_of

    theirs = build(package, size).cuda()
    ours: Any = from_module(theirs) if package != "plain_vit" else copy.deepcopy(theirs)
    assert next(ours.parameters()).device.type == "cuda"
    images = pixels(8, 224, 224).cuda()
    with torch.no_grad():
        found, expected = ours.eval()(images).logits, logits_of(theirs.eval()(images))
    assert difference(found, expected) < OTHER_KERNELS


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_a_prepared_model_on_a_gpu_has_its_logits(name: str) -> None:
    model, images = build(**VARIATIONS[name]).cuda(), pixels(16).cuda()
    prepared: Any = prepare_for_inference(model)
    with torch.no_grad():
        for each in (images, images + 1, pixels(3).cuda(), images):
            assert difference(prepared(each).logits, model(each).logits) < OTHER_KERNELS
        expected = model(images).logits
        plain = copy.deepcopy(model).bfloat16()(images.bfloat16()).logits
        found = prepare_for_inference(model, dtype=torch.bfloat16)(images).logits
    assert (found.float() - expected).norm() < 2 * (plain.float() - expected).norm()
    assert all(prepared.graphs.recorded.values()), prepared.graphs.recorded.keys()


def test_recorded_passes_keep_out_of_each_other_s_way() -> None:
    model, images = build().cuda(), pixels(4).cuda()
    prepared: Any = prepare_for_inference(model, batch_size=4)
    with torch.no_grad():
        expected, other = model(images).logits, model(images + 1).logits
        kept = prepared(images).logits
        prepared(pixel_values=images + 1)
        assert difference(kept, expected) < OTHER_KERNELS
        for count in range(1, 8):  # more shapes than the cache records
            assert difference(prepared(images[:1].repeat(count, 1, 1, 1)).logits[:1], expected[:1]) < OTHER_KERNELS
        assert len(prepared.graphs.recorded) == 4
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                found = [prepared(images).logits, prepared(images + 1).logits]
            stream.synchronize()
            assert difference(found[0], expected) < OTHER_KERNELS
            assert difference(found[1], other) < OTHER_KERNELS
    with torch.inference_mode():
        assert difference(prepared(images).logits, expected) < OTHER_KERNELS
    assert difference(copy.deepcopy(prepared)(images).logits, expected) < OTHER_KERNELS


def test_what_is_not_recorded_is_computed_as_ever() -> None:
    model, images = build().cuda(), pixels().cuda()
    prepared: Any = prepare_for_inference(model, batch_size=2)
    before = len(prepared.graphs.recorded)
    assert len(prepared(images, output_hidden_states=True).hidden_states) == 4
    with pytest.raises(ValueError, match="normalised floats"):
        prepared((images * 10).to(torch.uint8))
    with pytest.raises(RuntimeError):
        prepared(images.cpu())
    seen: list[torch.Tensor] = []
    handle = prepared.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output))
    prepared(images)
    prepared(images)
    handle.remove()
    assert len(seen) == 2
    assert len(prepared.graphs.recorded) == before
    with pytest.raises(ValueError, match="is not a multiple of patch_size"):
        prepared(images[..., 1:])
    assert difference(prepared(images).logits, model(images).logits) < OTHER_KERNELS


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_a_pass_does_not_wait_for_the_gpu(name: str, training: bool) -> None:
    model, images = build(**VARIATIONS[name]).cuda().train(training), pixels().cuda()
    model(images).logits.sum().backward()  # initialises the libraries
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(images).logits.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_normalisation_and_average_do_not_wait_for_the_gpu() -> None:
    normalize = Normalization((120.0, 110.0, 100.0), (60.0, 50.0, 40.0))
    model = build().cuda()
    average = MovingAverage(model, 0.9, torch.device("cuda"))
    levels = torch.randint(0, 256, (2, 3, 24, 56), dtype=torch.uint8).cuda()
    for mode in ("default", "error", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            normalized = normalize(levels)
            average.update_parameters(model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(normalized.cpu(), normalize(levels.cpu()))


@pytest.mark.parametrize("name", ["plain", "rotary", "relative_table", "swiglu_packed", "map"])
def test_a_compiled_prepared_model_on_a_gpu_has_its_logits(name: str) -> None:
    model, images = build(**VARIATIONS[name]).cuda(), pixels(8).cuda()
    prepared = prepare_for_inference(model, compile=True)
    with torch.no_grad():
        assert difference(prepared(images).logits, model(images).logits) < 10 * OTHER_KERNELS


@pytest.mark.parametrize("name", MANY)
def test_images_of_many_sizes_get_the_logits_of_the_cpu(name: str) -> None:
    model = build(**VARIATIONS[name])
    images = images_of(GRIDS, model.config.patch_shape)
    for inputs in (padded(images, model.config.patch_shape, extra=3), packed(images, model.config.patch_shape)):
        with torch.no_grad():
            expected = model.cpu()(**inputs).logits
            found = model.cuda()(**{key: value.cuda() for key, value in inputs.items()}).logits
        assert difference(found.cpu(), expected) < OTHER_KERNELS


@pytest.mark.parametrize("places", ["cuda", "auto", {"": 0}])
def test_a_model_is_opened_on_a_gpu(places: Any, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    opened = PlainViTForImageClassification.from_pretrained(tmp_path, device_map=places)
    assert opened.device.type == "cuda"
    for name, tensor in opened.state_dict().items():
        assert torch.equal(tensor.cpu(), model.state_dict()[name]), name


def test_tf32_is_what_it_is_said_to_be() -> None:
    left, right = torch.randn(2, 512, 512, dtype=torch.float64, device="cuda")
    off_by = {}
    for enabled in (True, False):
        with tf32(enabled):
            off_by[enabled] = difference((left.float() @ right.float()).double(), left @ right)
    assert off_by[False] < 1e-6 < 1e-5 < off_by[True] < 1e-2


def test_matrices_are_orthogonalised_as_on_the_cpu() -> None:
    matrices = torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(0))
    found = torch.linalg.svdvals(orthogonalised(matrices.cuda()).double())
    expected = torch.linalg.svdvals(orthogonalised(matrices).double())
    assert (found.cpu() - expected).abs().max() < 0.05  # products in bfloat16
    assert 0.6 < found.min() < found.max() < 1.3


@pytest.mark.usefixtures("fresh_accelerator")
def test_micro_batches_are_the_largest_that_fit(tmp_path: Path) -> None:
    accelerator = start_accelerator(num_processes=1, mixed_precision="no")
    wide = {"hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": 6, "image_size": (24 * 8, 56 * 4)}
    model = accelerator.prepare(build(**wide).train())
    size = dict(zip(("height", "width"), model.config.image_size, strict=True))
    trial = training_trial(model, accelerator, NoiseInputs(PlainViTImageProcessor(size=size)))
    images = 2**14
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(2**31 / total)
        parts = fitting_accumulation(trial, accelerator, images=images)
        assert 1 < parts < images
        with pytest.raises(torch.OutOfMemoryError):
            trial(2 * images // parts)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def losses_in(folder: Path) -> np.ndarray:
    """Return the loss of each step of a run."""
    return np.array([entry["train_loss"] for entry in read_log(folder) if "train_loss" in entry])


def losses(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, device: str, **options: object) -> np.ndarray:
    """Fine-tune with the script on a device and return the loss of each step."""
    with monkeypatch.context() as context:
        if device == "cpu":
            context.setenv("CUDA_VISIBLE_DEVICES", "")
        launch("finetune_image_classification", PYTHON, model=model, output_dir=folder, **{**DIGITS, **options})
    return losses_in(folder)


@pytest.mark.parametrize(
    "options, tolerance",
    [
        ({}, 1e-4),
        ({"gradient_accumulation_steps": 4, "gradient_checkpointing": True}, 1e-4),
        ({"drop_path_rate": 0.3, "mixup": 0.4, "random_erasing": 0.5, "ema_decay": 0.9}, 1e-4),
        ({"lora_rank": 4}, 1e-4),
        ({"optimizer": "timm:lamb"}, 1e-4),
        ({"optimizer": "muon"}, 1e-2),  # orthogonalises in bfloat16
        ({"compile": True}, 1e-4),
        ({"compile": True, "compile_mode": "reduce-overhead", "drop_path_rate": 0.3, "ema_decay": 0.9}, 1e-4),
    ],
    ids=["plain", "accumulated", "random", "lora", "lamb", "muon", "compiled", "recorded"],
)
def test_training_on_a_gpu_takes_the_steps_of_a_cpu(
    options: dict[str, object], tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = save_plain_vit(tmp_path / "model"), {**options, "tf32": False}
    found = losses(tmp_path / "gpu", model, monkeypatch, "cuda", **options)
    eager = {name: value for name, value in options.items() if not name.startswith("compile")}
    expected = losses(tmp_path / "cpu", model, monkeypatch, "cpu", **eager)
    assert len(expected) == DIGITS["steps"]
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(found, expected, rtol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}, {"mixed_precision": "bf16", "param_dtype": "bf16"}, {}],
    ids=["bf16", "fp16", "copies", "tf32"],
)
def test_training_in_less_precision_stays_near_float32(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_plain_vit(tmp_path / "model")
    found = losses(tmp_path / "less", model, monkeypatch, "cuda", **options)
    expected = losses(tmp_path / "float32", model, monkeypatch, "cuda", tf32=False)
    np.testing.assert_allclose(found, expected, rtol=HALF)
    assert not np.array_equal(found, expected)  # otherwise it ran in float32


def test_a_run_killed_on_a_gpu_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**DIGITS, "checkpoints_kept": 1, "checkpoint_every": 2, "steps": 40, "mixed_precision": "bf16"}
    model = save_plain_vit(tmp_path / "model")
    expected = losses(tmp_path / "whole", model, monkeypatch, "cuda", **options)
    script, folder = "finetune_image_classification", tmp_path / "killed"
    launch_and_kill(script, PYTHON, after_step=6, output_dir=folder, model=model, **options)
    launch(script, PYTHON, model=model, output_dir=folder, resume=True, **options)
    found = losses_in(folder)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_the_other_scripts_find_on_a_gpu_what_they_find_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    launch("finetune_image_classification", PYTHON, model="vit-tiny-patch16-32", from_scratch=True, output_dir=model,
           **{**DIGITS, "steps": 60, "shots_per_class": 100, "mixed_precision": "bf16"})  # fmt: skip
    found: dict[str, Any] = {}
    for device in ("cuda", "cpu"):
        if device == "cpu":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        evaluation = tmp_path / f"evaluation-{device}.json"
        probe, masked = (tmp_path / f"{name}-{device}" for name in ("probe", "masked"))
        launch("evaluate_image_classification", PYTHON, model=model, dataset="digits", output=evaluation)
        launch("linear_probe", PYTHON, model=model, dataset="digits", output_dir=probe)
        launch("pretrain", PYTHON, model="vit-tiny-patch16-32", dataset="digits", output_dir=masked,
               steps=4, batch_size=16, warmup_steps=0, log_every=1, tf32=False)  # fmt: skip
        found[device] = [
            json.loads(evaluation.read_text())["top1_accuracy"],
            json.loads((probe / "results.json").read_text())["linear"]["test_accuracy"],
            *losses_in(masked),
        ]
    np.testing.assert_allclose(found["cuda"], found["cpu"], atol=0.006)  # two of 360 images
