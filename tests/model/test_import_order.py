"""After `import plain_vit`, in any order and process, Auto classes and `pipeline` open its models without trust."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import plain_vit
from tests import ROOT
from tests.model import bare
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


def check_unused(home: Path) -> None:
    assert not list(home.rglob("modeling_plain_vit.py")), "the code of the folder was used"


@pytest.mark.parametrize("imports", ORDERS.values(), ids=ORDERS.keys())
def test_any_order_of_imports_serves(imports: str, folder: Path, tmp_path: Path) -> None:
    program = f"import sys\n{imports}\n{USE}\nprint(use(sys.argv[1]))"
    printed = bare.run(program, folder, cwd=ROOT, home=tmp_path / "home")
    assert printed.splitlines()[-1] == ANSWER
    check_unused(tmp_path / "home")


def test_a_spawned_worker_knows_the_classes_once_it_was_sent_anything_of_the_package(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "answer.py").write_text(f"{USE}\ndef answer_with(config, folder):\n    return use(folder)\n")
    (tmp_path / "program.py").write_text(SENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "program.py", str(folder)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ANSWER
    check_unused(tmp_path / "home")
