"""Fixtures of the engines."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from plain_vit.inference import engines as inference_engines
from plain_vit.training.models import weights_hash

PROGRAMS: dict[Any, Any] = {}


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Trace each model once, however often it is exported or prepared: that takes longer than the rest of an export."""
    trace = inference_engines.trace

    def remembered(model: Any, dynamic_size: bool) -> Any:
        config = json.dumps({**model.config.to_dict(), "architectures": None}, default=str)
        key = type(model).__name__, weights_hash(model), config, dynamic_size
        if key not in PROGRAMS:
            PROGRAMS[key] = trace(model, dynamic_size)
        return PROGRAMS[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inference_engines, "trace", remembered)
        yield
