"""Runs in a store of objects: a bucket of S3 on this machine."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from plain_vit.errors import OutputError, OutputExistsError, TrainingError
from plain_vit.training.run.remote import RemoteFolder, working_folder
from tests.inference.test_remote import gs, hf, s3
from tests.training.run_cases import run_case
from tests.training.runs import assert_same_bits, save_plain_vit

pytestmark = pytest.mark.slow
SCRIPT, RUN = "finetune_image_classification", "s3://bucket/runs/one"
COMMON = {"dataset": "digits", "steps": 6, "batch_size": 12, "evaluations": 3, "checkpoint_every": 2, "report": False,
          "validation_fraction": 0.2, "early_stopping": 3, "checkpoints_kept": 2}  # fmt: skip


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Yield the file system of a bucket; local copies of its runs are in a folder of the test."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    with s3(monkeypatch, tmp_path) as (system, _):
        yield system


def names(system: Any) -> set[str]:
    """Return the names of the files of the run in the bucket."""
    system.invalidate_cache()
    return {path.removeprefix("bucket/runs/one/") for path in system.find("bucket/runs/one")}


def steps(found: set[str]) -> set[str]:
    """Return the names of the checkpoints."""
    return {name.split("/")[1] for name in found if name.startswith("checkpoints/")}


def test_a_run_in_a_bucket_goes_on_elsewhere_with_the_same_bits(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**COMMON, "model": str(save_plain_vit(tmp_path / "model"))}
    run_case(SCRIPT, {**options, "output_dir": str(tmp_path / "local")})
    remote = {**options, "output_dir": RUN}
    with pytest.raises(TrainingError, match="s3://bucket/runs/one contains no run to resume"):
        run_case(SCRIPT, {**remote, "resume": True})
    run_case(SCRIPT, remote, stop_before=5)
    here, held = working_folder(RUN), names(store)
    assert {name.split("/")[1] for name in held if name.startswith("checkpoints/")} == {
        "step_00000002",
        "step_00000004",
    }
    assert {"log.jsonl", "best/config.json"} <= held
    assert store.cat_file("bucket/runs/one/run.json") == (here / "run.json").read_bytes()
    with pytest.raises(OutputExistsError, match="s3://bucket/runs/one is not empty: give another place, or continue"):
        run_case(SCRIPT, remote)

    # Another machine, which finds the newest checkpoint without a manifest, and then one that is damaged.
    shutil.rmtree(here)
    store.rm_file("bucket/runs/one/checkpoints/step_00000004/manifest.json")
    RemoteFolder(RUN).fetch(print, resume=True)
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step_00000002"]
    store.put_file(str(here / "checkpoints/step_00000002/manifest.json"),
                   "bucket/runs/one/checkpoints/step_00000004/manifest.json")  # fmt: skip
    shutil.rmtree(here)
    RemoteFolder(f"{RUN}/").fetch(print, resume=True)  # the same folder
    (here / "checkpoints/step_00000002/manifest.json").unlink()  # as a killed download leaves it
    run_case(SCRIPT, {**remote, "resume": True})
    assert "checkpoints/step_00000004 is damaged" in capsys.readouterr().out
    assert_same_bits(here, tmp_path / "local")
    store.get(RUN, str(tmp_path / "down"), recursive=True)
    assert_same_bits(tmp_path / "down", tmp_path / "local")
    assert steps(names(store)) == {"step_00000004", "step_00000006"}
    assert {"results.json", "README.md", "predictions.csv"} <= names(store)


@pytest.mark.parametrize("kind", [gs, hf], ids=lambda kind: kind.__name__)
def test_other_stores_hold_runs_too(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    with kind(monkeypatch, tmp_path) as (system, root):
        options = {**COMMON, "model": str(save_plain_vit(tmp_path / "model")), "steps": 4, "evaluations": 2}
        url, local = f"{kind.__name__}://{root}/run", tmp_path / "local"
        run_case(SCRIPT, {**options, "output_dir": str(local)})
        run_case(SCRIPT, {**options, "output_dir": url}, stop_before=3)
        shutil.rmtree(working_folder(url))
        run_case(SCRIPT, {**options, "output_dir": url, "resume": True, "checkpoints_kept": 1})
        assert_same_bits(working_folder(url), local)
        system.invalidate_cache()
        assert steps({path.removeprefix(f"{root}/run/") for path in system.find(f"{root}/run")}) == {"step_00000004"}


def test_a_place_that_cannot_be_used_is_refused_before_the_first_step(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: Any, path: str, target: str, **others: Any) -> None:
        raise PermissionError("Access Denied")

    options = {**COMMON, "model": str(save_plain_vit(tmp_path / "model"))}
    with pytest.raises(OutputError, match="elsewhere/run cannot be read: .*bucket does not exist. Give a place that"):
        run_case(SCRIPT, {**options, "output_dir": "s3://elsewhere/run"})
    monkeypatch.setattr(type(store), "_put_file", refused)
    type(store).clear_instance_cache()
    with pytest.raises(OutputError, match="s3://bucket/runs/one cannot be written: Access Denied"):
        run_case(SCRIPT, {**options, "output_dir": RUN})
    assert not (working_folder(RUN) / "log.jsonl").exists()


def test_a_store_that_is_lost_loses_nothing(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**COMMON, "model": str(save_plain_vit(tmp_path / "model")), "output_dir": RUN}
    put = type(store)._put_file

    async def lost(self: Any, path: str, target: str, **others: Any) -> None:
        if "step_00000004" in target:
            raise ConnectionError("no route to host")
        await put(self, path, target, **others)

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "_put_file", lost)
        type(store).clear_instance_cache()
        with pytest.raises(OutputError, match=r"runs/one cannot be written: no route to host. The run's own files are"):
            run_case(SCRIPT, options)
    type(store).clear_instance_cache()
    here = working_folder(RUN)
    assert (here / "checkpoints/step_00000004/manifest.json").is_file()
    assert not any("step_00000004" in name for name in names(store))
    RemoteFolder(RUN).fetch(print, resume=True)
    assert (here / "checkpoints/step_00000004/manifest.json").is_file()
    store.pipe_file("bucket/runs/one/run.json", b"{}")  # another run took the place
    RemoteFolder(RUN).fetch(print, resume=True)
    (aside,) = (path for path in here.parent.iterdir() if path != here)
    assert (aside / "checkpoints/step_00000004/manifest.json").is_file()
    assert (here / "run.json").read_bytes() == b"{}"
