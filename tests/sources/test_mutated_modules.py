"""Live models with any one part replaced: they open with the outputs of the modified model, or raise an error."""

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from plain_vit.conversion import from_module
from plain_vit.errors import PlainViTError
from tests.sizes import draws
from tests.sources import test_torchvision as torchvision_tests
from tests.sources.test_vit_pytorch import CASES as RELEASES
from tests.sources.test_vit_pytorch import NOW, Case
from tests.sources.timm_models import REPRESENTATIVES, tiny_timm
from tests.sources.timm_models import pixels_for as timm_pixels
from tests.sources.transformers_models import CASES, outputs_of, tiny_transformers
from tests.sources.transformers_models import pixels_for as transformers_pixels
from tests.tiny import difference

TOLERANCE = 1e-5
# Replacements for activations, norms and other parts.
LAYERS: list[Callable[[], nn.Module]] = [
    nn.Identity, nn.ReLU, nn.SiLU, nn.GELU, functools.partial(nn.GELU, "tanh"), nn.Tanh, nn.ELU, nn.Hardswish,
    functools.partial(nn.Dropout, 0.3), functools.partial(nn.Softmax, -1), functools.partial(nn.LeakyReLU, 0.3),
    nn.Sequential,
]  # fmt: skip
FUNCTIONS = [torch.relu, torch.tanh, nn.functional.gelu, functools.partial(nn.functional.gelu, approximate="tanh")]
# Attributes of every module, and the flag for hooks that record states: installed twice, they would record twice.
INHERITED = {*vars(nn.Module()), "_output_capturing_hooks_installed"}


class Subject(NamedTuple):
    """A model to mutate, its inputs, and the hints that its class needs."""

    make: Callable[[], Any]
    pixels: Callable[[Any], torch.Tensor]
    hints: dict[str, Any]


class Mutation(NamedTuple):
    """The mutation, in words and as a function."""

    title: str
    change: Callable[[Any], None]


def _images(case: Case, module: nn.Module) -> torch.Tensor:
    return case.images()


SUBJECTS: dict[str, Subject] = {
    **{f"timm {name}": Subject(functools.partial(tiny_timm, name), timm_pixels, {}) for name in REPRESENTATIVES},
    "torchvision": Subject(torchvision_tests.tiny, lambda module: torchvision_tests.pixels(), {}),
    "torchvision with a representation": Subject(
        lambda: torchvision_tests.tiny(representation_size=30), lambda module: torchvision_tests.pixels(), {}
    ),
    **{
        f"vit-pytorch {case}": Subject(case.build, functools.partial(_images, case), case.live_hints)
        for case in RELEASES
        if case.release in (NOW, "1.2.9", "0.19.6", "0.6.8")
    },
    **{
        f"transformers {case}": Subject(functools.partial(tiny_transformers, case), transformers_pixels, {})
        for case in CASES
    },
}
# A few models of every package, with more mutations each.
SOME = [
    "timm vit_base_patch16_224", "timm aimv2_large_patch14_224", "timm test_vit3",
    "torchvision with a representation", "vit-pytorch now-vit", "vit-pytorch now-simple_vit_with_qk_norm",
    "transformers ViTForImageClassification", "transformers CLIPVisionModelWithProjection",
    "transformers Dinov2ForImageClassification",
]  # fmt: skip


def mutations(module: nn.Module) -> Iterator[Mutation]:
    """Yield everything that can be replaced in a model, with some plausible replacements each."""
    for path, part in module.named_modules():
        if path:
            for layer in LAYERS:
                yield Mutation(f"{path} = {layer}", functools.partial(_put, path=path, make=layer))
            for kind, norm in _norms(part):
                yield Mutation(f"{path} = {kind}", functools.partial(_put, path=path, make=norm))
        for name, value in vars(part).items():
            if name not in INHERITED:
                for another in _others(value):
                    yield Mutation(
                        f"{path}.{name}: {value!r:.60} -> {another!r:.60}",
                        functools.partial(_set, path=path, name=name, value=another),
                    )
        for name, tensor in part._buffers.items():
            if tensor is not None:
                yield Mutation(f"{path}.{name} flipped", functools.partial(_flip, path=path, name=name))
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield Mutation(f"{path}.{name} doubled", functools.partial(_double, path=path, name=name))
    config = getattr(module, "config", None)
    for name, value in (config.to_dict() if config is not None else {}).items():
        for another in _others(value):
            yield Mutation(
                f"config.{name}: {value!r:.60} -> {another!r:.60}",
                functools.partial(_configure, name=name, value=another),
            )


def _put(module: nn.Module, path: str, make: Callable[[], nn.Module]) -> None:
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._modules[name] = make().eval()


def _set(module: nn.Module, path: str, name: str, value: Any) -> None:
    setattr(module.get_submodule(path), name, copy.deepcopy(value))


def _configure(module: Any, name: str, value: Any) -> None:
    setattr(module.config, name, value)


def _flip(module: nn.Module, path: str, name: str) -> None:
    part = module.get_submodule(path)
    buffer: Any = part._buffers[name]
    part._buffers[name] = buffer.flip(-1) if buffer.ndim else buffer + 1


def _double(module: nn.Module, path: str, name: str) -> None:
    with torch.no_grad():
        parameter: Any = module.get_submodule(path)._parameters[name]
        parameter.mul_(2)


def _norms(part: nn.Module) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield other norms with the same tensors as replacements for a norm."""
    shape = getattr(part, "normalized_shape", None)
    if shape is not None:
        for kind in (nn.LayerNorm, nn.RMSNorm):
            for eps in (1e-3, 1e-5, 1e-6):
                yield f"{kind.__name__} of eps {eps}", functools.partial(kind, shape, eps=eps)
        yield "RMSNorm", functools.partial(nn.RMSNorm, shape)


def _others(value: Any) -> list[Any]:
    """Return alternative values of an attribute."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(0, value - 1), 2 * value]
    if isinstance(value, float):
        return [value * 2, value + 0.1, 1e-3, 0.0]
    if isinstance(value, str):
        return ["mean", "cls", "tanh", "gelu_pytorch_tanh", "reflect", "token", "avg", ""]
    if isinstance(value, torch.Tensor):
        return [value * 2, value.flip(0)]
    if isinstance(value, tuple | list) and value and isinstance(value[0], int):
        return [type(value)((value[0] + 1, *value[1:])), type(value)(2 * number for number in value)]
    if isinstance(value, dict) and value:
        first = next(iter(value))
        return [{**value, first: another} for another in _others(value[first])[:1]]
    return FUNCTIONS if callable(value) and not isinstance(value, type) else [] if value is not None else [1, 0.5]


@torch.no_grad()
def outputs(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the outputs of a model of any package."""
    if type(model).__module__.startswith("transformers.models."):
        stages = outputs_of(model, pixel_values)
        results = {name: value for name, value in stages.items() if not name.startswith("block")}
        return results or stages  # a backbone has only block outputs
    result = model(pixel_values)
    result = result[0] if isinstance(result, tuple) else result
    return {"output": result}


@torch.no_grad()
def ours(model: nn.Module, pixel_values: torch.Tensor, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same outputs of our model."""
    result = model(pixel_values)
    if "output" in theirs:
        return {"output": result.logits if "logits" in result else result.pooler_output}
    if "logits" in theirs and "logits" not in result:  # the classifier was removed: compare its input
        return {"logits": result.pooler_output}
    stages = outputs_of(model, pixel_values)
    return {name: stages[name] for name in theirs}


def verdict(subject: Subject, original: nn.Module, mutation: Mutation, pixel_values: torch.Tensor) -> str:
    """Apply a mutation and return its outcome: "equal", "refused", or "broken" if the source itself fails."""
    module = copy.deepcopy(original)
    try:
        mutation.change(module)
        theirs = outputs(copy.deepcopy(module), pixel_values)
        if not all(isinstance(value, torch.Tensor) and value.isfinite().all() for value in theirs.values()):
            return "broken"
    except Exception:
        return "broken"
    try:
        model = from_module(module, **subject.hints)
    except (PlainViTError, ValueError):
        return "refused"
    found = ours(model, pixel_values, theirs)
    worst = max(
        difference(found[name], value) if found[name].shape == value.shape else float("inf")
        for name, value in theirs.items()
    )
    return "equal" if worst <= TOLERANCE else f"off by {worst:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_replaced_parts_of_a_model_are_followed_or_refused(name: str) -> None:
    count = draws(20 if name in SOME else 3, nightly=40)
    subject = SUBJECTS[name]
    original = subject.make()
    pixel_values = subject.pixels(original)
    assert verdict(subject, original, Mutation("nothing", lambda module: None), pixel_values) == "equal"
    every = list(mutations(original))
    drawn = random.Random(name).sample(every, min(count, len(every)))
    seen: Counter[str] = Counter()
    wrong = []
    for mutation in drawn:
        said = verdict(subject, original, mutation, pixel_values)
        seen[said.split(" by")[0]] += 1
        if said.startswith("off"):
            wrong.append(f"{mutation.title}: {said}")
    assert not wrong, "\n".join(wrong)
    assert seen["refused"] > 0 or count < 30
    assert seen["equal"] > 0 or name not in SOME  # in the others, few mutations leave outputs unchanged
