"""The Space in a real browser: it starts on the shipped checkpoint, classifies, shows attention and compares."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.analysis import predict
from tests import ROOT
from tests.conftest import randomize_
from tests.tiny import tiny_config

pytest.importorskip("gradio", reason="gradio is not installed: `make test-space` has it")

APP = ROOT / "examples" / "space" / "app.py"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the app like its users, and return its address."""
    folder = tmp_path_factory.mktemp("space")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, str(APP)], env=environment, cwd=folder, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(600):
            assert process.poll() is None, (folder / "log").read_text()
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        else:
            pytest.fail((folder / "log").read_text())
        yield url
    finally:
        process.terminate()
        process.wait()


def test_a_visitor_classifies_an_image_sees_attention_and_compares_two_checkpoints(
    address: str, browser: Any, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 1100})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(address)
    page.get_by_text("34 labels (0, 1, 2").wait_for()
    page.locator("input[type=file]").first.set_input_files(str(APP.parent / "images" / "K.png"))
    page.get_by_role("button", name="Look").click()
    answers = page.get_by_test_id("label-output-value")
    answers.nth(1).wait_for(timeout=60_000)
    assert answers.nth(0).inner_text().strip() == "K"
    titles = [title.inner_text() for title in page.locator("[data-testid=block-label]").all()]
    assert {"shipped checkpoint", "before its training", "shipped checkpoint: attention"} <= set(titles)
    rows = page.locator("[data-testid$='-confidence-set']").all_inner_texts()
    assert len(rows) == 10  # the five most likely of each model
    sure, unsure = (int(re.search(r"(\d+)%", rows[i])[1]) for i in (0, 5))
    assert sure > 90
    assert unsure < 30  # one of 34, by a model that has learnt nothing
    pictures = page.locator("[data-testid='matplotlib'] img")
    assert pictures.count() == 2
    assert all(picture.get_attribute("src").startswith("data:image") for picture in pictures.all())
    page.wait_for_timeout(500)
    page.screenshot(path=str(tmp_path / "space.png"))

    before = pictures.nth(0).get_attribute("src")
    page.get_by_label("number input for Attention in layer").fill("5")
    page.get_by_role("button", name="Look").click()
    for _ in range(300):
        if pictures.nth(0).get_attribute("src") != before:
            break
        page.wait_for_timeout(100)
    else:
        pytest.fail("another layer gave the same picture")
    assert faults == []


def test_of_two_classes_with_one_name_the_likelier_is_shown() -> None:
    specification: Any = importlib.util.spec_from_file_location("space_app", APP)
    app = importlib.util.module_from_spec(specification)
    sys.modules["space_app"] = app  # its dataclass looks it up
    specification.loader.exec_module(app)
    config = tiny_config(num_labels=3, id2label={0: "crane", 1: "cat", 2: "crane"})
    model = randomize_(PlainViTForImageClassification(config))
    height, width = config.image_shape
    shown = app.Shown(model, PlainViTImageProcessor(size={"height": height, "width": width}))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    likely, _ = shown.look(image, app.ROLLOUT)
    (probabilities,) = predict(model, shown.image_processor(image, return_tensors="pt"))
    assert likely == {"crane": max(probabilities[[0, 2]]), "cat": probabilities[1]}


def test_without_an_image_it_says_so(address: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(address)
    page.get_by_role("button", name="Look").click()
    page.get_by_text(re.compile("Give an image first")).first.wait_for(timeout=60_000)


def test_a_space_made_as_its_page_says_starts_without_models_and_one_without_the_checkpoint_says_what_to_do(
    tmp_path: Path,
) -> None:
    root = APP.parents[2]
    copied = next(line for line in (APP.parent / "README.md").read_text().splitlines() if line.startswith("cp -r"))
    for name in ("examples", "plain_vit"):
        (tmp_path / name).symlink_to(root / name)
    subprocess.run(["bash", "-e", "-c", copied], cwd=tmp_path, check=True)
    space = tmp_path / "my-space"
    words = [sys.executable, "-c", "import app; print(*app.load_models([]), sep='; ')"]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MODELS")}
    done = subprocess.run(words, cwd=space, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "shipped checkpoint; before its training"
    shutil.rmtree(space / "checkpoints")
    done = subprocess.run(words, cwd=space, env=kept, capture_output=True, text=True)
    assert "Set the variable MODELS in the Space's settings" in done.stderr
    assert "CheckpointError" in done.stderr
