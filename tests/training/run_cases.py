"""Run example scripts one after another in processes that start only once: `torchrun ... run_cases.py CASES`.

CASES is a JSON file with a list of [script, options] or [script, options, step before which the run stops].
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
from tests.training.runs import call


class Stopped(BaseException):
    """Raised to stop a run early."""


def run_case(script: str, options: dict[str, object], *, stop_before: int | None = None) -> None:
    """Run a script with its options in this process, to its end or up to a step."""
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
        call(script, **options)
    AcceleratorState._reset_state(reset_partial_state=False)


def run_in_two(cases: Sequence[tuple[Any, ...]], file: Path) -> str:
    """Run cases one after another in two processes with one thread each, and return their output.

    Args:
        cases: Scripts with their options, and optional steps before which they stop.
        file: File to which the cases are written.
    """
    file.write_text(json.dumps(cases))
    return run_forked(["-m", "tests.training.run_cases", str(file)], 2, LIMIT * max(1, len(cases)))


def main() -> None:
    torch.set_num_threads(1)
    torch._logging._internal._init_logs()  # applies TORCH_LOGS, which torch reads only on import, before the fork
    for script, options, *stop in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run_case(script, options, stop_before=stop[0] if stop else None)


if __name__ == "__main__":
    main()
