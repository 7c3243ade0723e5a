"""The shipped vit-pytorch checkpoint: its architecture and accuracy, and that its script reproduces it."""

import json

import pytest
import torch
from vit_pytorch import ViT

from plain_vit.training.data import datasets as data
from plain_vit.training.data.glyphs import CHARACTERS, render_glyphs
from tests.sizes import NIGHTLY, draws
from tests.training.runs import EXAMPLES, open_script

script = open_script("train_vit_pytorch_on_glyphs")
CHECKPOINT = EXAMPLES / "checkpoints" / "glyphs_vit.pt"
NOTES = json.loads(CHECKPOINT.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _threads():
    """Restore the number of threads, which the script changes."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_shipped_checkpoint_is_small_and_a_bare_state_dict():
    assert CHECKPOINT.stat().st_size < 2_000_000
    state = torch.load(CHECKPOINT, weights_only=True)
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
    ViT(**NOTES["constructor"]).load_state_dict(state, strict=True)


@pytest.mark.slow
def test_shipped_checkpoint_has_its_recorded_accuracy():
    model = ViT(**NOTES["constructor"])
    model.load_state_dict(torch.load(CHECKPOINT, weights_only=True))
    images, labels = render_glyphs(NOTES["test_images"], seed=1)
    pixels = torch.from_numpy(images)[:, None].expand(-1, 3, -1, -1) / 127.5 - 1
    # Rounding on other machines may change the class of a few images.
    assert script.accuracy(model, pixels, torch.from_numpy(labels)) == pytest.approx(NOTES["accuracy"], abs=0.001)


def test_training_depends_on_the_seed_alone(monkeypatch):
    monkeypatch.setattr(data, "GLYPHS_PER_CLASS", {"train": 8, "test": 2})
    models = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)
        model, accuracy, count = script.train(epochs=1, seed=seed)
        assert count == 2 * len(CHARACTERS)
        assert 0 <= accuracy <= 1
        models.append(model.state_dict())
    same, other = ([torch.equal(tensor, state[name]) for name, tensor in models[0].items()] for state in models[1:])
    assert all(same)
    assert not any(other[:3])


@pytest.mark.slow
def test_script_makes_the_shipped_checkpoint_again(tmp_path, monkeypatch):
    if not NIGHTLY:  # the full size takes a quarter of an hour
        monkeypatch.setattr(data, "GLYPHS_PER_CLASS", {"train": 8, "test": 2})
    script.main(tmp_path, draws(1, nightly=NOTES["epochs"]), NOTES["seed"])
    notes = json.loads((tmp_path / "glyphs_vit.json").read_text(encoding="utf-8"))
    assert notes.keys() == NOTES.keys()
    assert notes["constructor"] == NOTES["constructor"]
    assert (tmp_path / "glyphs_vit.pt").stat().st_size == CHECKPOINT.stat().st_size
    if NIGHTLY:
        assert abs(notes["accuracy"] - NOTES["accuracy"]) <= NOTES["margin"]
