"""Count the floating-point operations of models and finished runs on the meta device."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageClassification

from plain_vit.training import fast_steps
from studies import layer_positions  # noqa: F401  (registers the Auto classes)
from studies.study import Run, is_plain_vit

BACKWARD = 2  # cost of a backward pass, in forward passes


def training_operations(run: Run, results: Mapping[str, Any]) -> float:
    """Return the floating-point operations of a finished run and its earlier stages, excluding evaluations.

    Args:
        run: the run.
        results: result lines of all runs, by key.
    """
    stages = [*run.stages()]
    assert stages[0].model is not None
    architecture = dict(stages[0].model)
    images = sum(results[stage.key]["results"]["steps"] * stage.options["batch_size"] for stage in stages)
    return (1 + BACKWARD) * operations(architecture) * images


def operations(fields: Mapping[str, Any]) -> float:
    """Return the floating-point operations of a forward pass of one image; a multiply-add counts as two.

    Args:
        fields: fields of the config, including its `type`, as in a study.
    """
    return _operations(json.dumps(fields, sort_keys=True))


@functools.cache
def _operations(text: str) -> float:
    fields = json.loads(text)
    ours, size = is_plain_vit(fields), fields["image_size"]
    kind = fields.pop("type", "plain_vit")
    if not ours:
        fields.pop("image_size")
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(
            AutoConfig.for_model(kind, **fields), attn_implementation="eager"
        ).requires_grad_(False)  # the counter's hooks need an autograd graph if a parameter requires gradients
        pixels = torch.zeros(1, 3, size, size)
    with FlopCounterMode(display=False) as counter, fast_steps(model):
        model(pixel_values=pixels)
    return float(counter.get_total_flops())
