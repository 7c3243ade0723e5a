"""Processes forked from a Python that has imported torch, but neither transformers nor this package.

They serve tests of imports. Forking saves the seconds that importing torch takes in a new process.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The beginning of a program that cannot import the package.
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("plain_vit", "mine"):
            raise ModuleNotFoundError(f"{name} must not be imported here")

sys.meta_path.insert(0, Refuse())
"""
SERVER = """
import contextlib
import json
import os
import sys
import traceback

import numpy, PIL.Image, torch

with contextlib.suppress(ImportError):
    import torchvision

assert not {"plain_vit", "transformers", "huggingface_hub"} & sys.modules.keys()
for line in sys.stdin:
    order, failed = json.loads(line), 1
    if child := os.fork():
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv[1:] = order["arguments"]
        exec(order["program"], vars(sys.modules["__main__"]))
        failed = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(failed)
"""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@functools.cache
def server() -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(started.communicate)
    return started


def run(program: str, *arguments: object, cwd: Path, home: Path) -> str:
    """Run `python -c PROGRAM ARGUMENTS...` with `home` for Hugging Face's caches, and return its output."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        order = {"program": program, "arguments": list(map(str, arguments)), "cwd": str(cwd), "log": log.name,
                 "environment": {**environment(), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}}  # fmt: skip
        stdin, stdout = server().stdin, server().stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(order), file=stdin, flush=True)
        status, output = stdout.readline(), log.read()
    assert status == "0\n", output
    return output
