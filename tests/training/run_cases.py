"""Runs example scripts one after another in the same processes, which start once: `torchrun ... run_cases.py CASES`.

CASES is a JSON file: a list of [script, options].
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState

from plain_vit.training.loop import Loop
from tests.processes import LIMIT, run_forked
from tests.training.runs import open_script

ENTRIES = {
    "finetune_image_classification": ("finetune", "FinetuneArguments"),
    "pretrain_masked_patches": ("pretrain", "PretrainArguments"),
    "evaluate_image_classification": ("evaluate", "EvaluateArguments"),
    "extract_features": ("extract", "ExtractArguments"),
    "linear_probe": ("probe", "ProbeArguments"),
    "predict": ("predict", "PredictArguments"),
}


class Stopped(BaseException):
    """A run ends before it is done."""


def run_case(script: str, options: dict[str, object], *, stop_before: int | None = None) -> None:
    """Run a script with its options, in this process, to its end or up to this step."""
    module = open_script(script)
    function, arguments = ENTRIES[script]
    begin_step = Loop._begin_step

    def begin(loop: Loop[Any]) -> None:
        if loop.step == stop_before:
            loop.run.finish_saving()
            raise Stopped
        begin_step(loop)

    with (
        mock.patch.object(PartialState, "destroy_process_group"),  # the next case needs it
        mock.patch.object(Loop, "_begin_step", begin),
        suppress(Stopped),
    ):
        getattr(module, function)(getattr(module, arguments)(**options))
    AcceleratorState._reset_state(reset_partial_state=False)


def run_in_two(cases: Sequence[tuple[str, dict[str, Any]]], file: Path) -> None:
    """Run cases one after another in two processes, with one thread each.

    Args:
        cases: Scripts with their options.
        file: Where the cases are written.
    """
    file.write_text(json.dumps(cases))
    run_forked(["-m", "tests.training.run_cases", str(file)], 2, LIMIT * max(1, len(cases)))


def main() -> None:
    torch.set_num_threads(1)
    for script, options in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run_case(script, options)


if __name__ == "__main__":
    main()
