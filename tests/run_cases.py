"""Runs example scripts one after another in the same processes, which start once: `torchrun ... run_cases.py CASES`.

CASES is a JSON file: a list of [script, options].
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState

from tests.training_runs import open_script

ENTRIES = {
    "finetune_image_classification": ("finetune", "FinetuneArguments"),
    "pretrain_masked_patches": ("pretrain", "PretrainArguments"),
}


def run_case(script: str, options: dict[str, object]) -> None:
    """Run a script with its options, in this process."""
    module = open_script(script)
    function, arguments = ENTRIES[script]
    with mock.patch.object(PartialState, "destroy_process_group"):  # the next case needs it
        getattr(module, function)(getattr(module, arguments)(**options))
    AcceleratorState._reset_state(reset_partial_state=False)


def main() -> None:
    torch.set_num_threads(1)
    for script, options in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run_case(script, options)


if __name__ == "__main__":
    main()
