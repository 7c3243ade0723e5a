"""After `import plain_vit`, in any order and process, the Auto classes and `pipeline` know its models without trust."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import plain_vit
from tests import ROOT
from tests.tiny import tiny_config

pytestmark = pytest.mark.slow

USE = """
def use(folder):
    from PIL import Image
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline

    assert type(AutoConfig.from_pretrained(folder)).__module__ == "plain_vit.configuration_plain_vit"
    assert type(AutoModel.from_pretrained(folder)).__module__ == "plain_vit.modeling_plain_vit"
    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    for found in (model, processor):
        assert type(found).__module__.startswith("plain_vit."), type(found)
    image = Image.new("RGB", (30, 20), "brown")
    answers = pipeline("image-classification", folder)(image)
    assert len(pipeline("image-feature-extraction", folder)(image)) == 1
    return sorted(answer["label"] for answer in answers)
"""
ORDERS = {
    "plain_vit first": "import plain_vit, transformers",
    "transformers first": "import transformers, plain_vit",
    "Auto classes first": "from transformers import AutoModel, AutoImageProcessor, pipeline; import plain_vit",
    "a part of the package alone": "import plain_vit.errors",
    "the conversion alone": "from plain_vit.conversion import from_checkpoint",
}
SPAWNED = """
import multiprocessing
import sys
from answer import use  # the file that a worker imports too

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(use, (sys.argv[1],)))
"""
SENT = """
import multiprocessing
import sys
from answer import answer_with

if __name__ == "__main__":
    import plain_vit

    config = plain_vit.PlainViTConfig.from_pretrained(sys.argv[1])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(answer_with, (config, sys.argv[1])))
"""
ANSWER = "['ant', 'bee', 'cat']"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    config = tiny_config(num_labels=3, id2label={0: "ant", 1: "bee", 2: "cat"}, num_channels=3)
    plain_vit.PlainViTForImageClassification(config).save_pretrained(path)
    height, width = config.image_shape
    plain_vit.PlainViTImageProcessor(size={"height": height, "width": width}).save_pretrained(path)
    return path


def run(program: str, folder: Path, cwd: Path) -> str:
    """Run a program on the folder in a process of its own; return its last line."""
    (cwd / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(cwd / "home"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "program.py", str(folder)]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list((cwd / "home").rglob("modeling_plain_vit.py")), "the code of the folder was used"
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("imports", ORDERS.values(), ids=ORDERS.keys())
def test_any_order_of_imports_serves(imports: str, folder: Path, tmp_path: Path) -> None:
    assert run(f"import sys\n{imports}\n{USE}\nprint(use(sys.argv[1]))", folder, tmp_path) == ANSWER


def test_a_spawned_worker_knows_the_classes_that_its_module_imported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "answer.py").write_text(f"import plain_vit\n{USE}")
    assert run(SPAWNED, folder, tmp_path) == ANSWER


def test_a_spawned_worker_knows_the_classes_once_it_was_sent_anything_of_the_package(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "answer.py").write_text(f"{USE}\ndef answer_with(config, folder):\n    return use(folder)\n")
    assert run(SENT, folder, tmp_path) == ANSWER
