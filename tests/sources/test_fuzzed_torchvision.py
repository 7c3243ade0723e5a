"""Random models of torchvision's constructor, live and as bare files: equal outputs, or an error."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from plain_vit.conversion import from_checkpoint, from_module
from plain_vit.errors import AmbiguousCheckpointError, ExportError
from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.truthful import TOLERANCE, Tally, logits_differ_by, open_truthfully

NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


def draw(chance: random.Random) -> dict[str, Any]:
    """Return arguments of torchvision's constructor; `norm` and `eps` are bound to its `norm_layer`."""
    patch_size, heads = chance.choice([4, 5, 7]), chance.choice([1, 2, 3, 4, 6])
    stem = ConvStemConfig(6, 3, 2) if chance.random() < 0.05 else None
    return {
        "image_size": patch_size * chance.randint(1, 4),
        "patch_size": patch_size,
        "num_layers": chance.randint(1, 3),
        "num_heads": heads,
        "hidden_dim": heads * chance.choice([4, 6, 8, 64]),
        "mlp_dim": chance.choice([13, 24, 40]),
        "num_classes": chance.choice([2, 5, 11]),
        "representation_size": chance.choice([None, None, 17]),
        "conv_stem_configs": None if stem is None else [stem],
        "norm": chance.choices(["LayerNorm", "RMSNorm"], [0.95, 0.05])[0],
        "eps": chance.choice([1e-6, 1e-6, 1e-5, 1e-3]),
    }


def build(arguments: dict[str, Any], seed: int) -> Any:
    rest = {name: value for name, value in arguments.items() if name not in ("norm", "eps")}
    norm: Any = partial(NORMS[arguments["norm"]], eps=arguments["eps"])
    return randomize_(VisionTransformer(**rest, norm_layer=norm), seed).eval()


def opens_by_its_logits(module: nn.Module, path: Path, shape: tuple[int, ...], eps: float) -> None:
    """Infer the number of heads from logits, which may stay ambiguous if attention hardly matters."""
    pixel_values = torch.randn(2, *shape)
    with torch.no_grad():
        reference = pixel_values, module(pixel_values)
    left_open, model = {"num_attention_heads"}, None
    try:
        model = from_checkpoint(path, reference=reference, layer_norm_eps=eps).model
    except AmbiguousCheckpointError as error:
        left_open = set(error.candidates)
    assert left_open == {"num_attention_heads"}
    assert model is None or logits_differ_by(module, model, shape) <= TOLERANCE


@pytest.mark.slow
def test_random_models_and_bare_files_are_the_sources_or_refused(tmp_path: Path) -> None:
    chance, tally = random.Random(0), Tally()
    for number in range(draws(40, nightly=1000)):
        arguments = draw(chance)
        truth = {"num_attention_heads": arguments["num_heads"], "layer_norm_eps": arguments["eps"]}

        def oracle(name: str, candidates: Sequence[object], truth: dict[str, Any] = truth) -> object | None:
            if name == "num_attention_heads":
                assert truth[name] in candidates
            return truth.get(name)  # the known architectures have other shapes

        module, path = build(arguments, number), tmp_path / "vit.pth"
        shape = (3, arguments["image_size"], arguments["image_size"])
        torch.save(module.state_dict(), path)
        outcome = open_truthfully(path, oracle)
        off = 0.0 if outcome.converted is None else logits_differ_by(module, outcome.converted.model, shape)
        assert off <= TOLERANCE, (arguments, off)
        tally.add(outcome, off)
        plain = arguments["norm"] == "LayerNorm" and arguments["conv_stem_configs"] is None
        assert plain == (outcome.converted is not None), (arguments, outcome.refusal)
        if plain:
            assert outcome.answers.keys() == truth.keys()  # neither was assumed
            assert logits_differ_by(module, from_module(module), shape) <= TOLERANCE
        else:
            with pytest.raises(ExportError):
                from_module(module)
        if plain and number % 8 == 0 and arguments["hidden_dim"] <= 48:
            opens_by_its_logits(module, path, shape, truth["layer_norm_eps"])
    print(tally)
    assert tally.opened > 0.7 * tally.total
