"""The fine-tuning script as users run it: in one or two processes, terminated, resumed, and the model loaded."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import ViTForImageClassification, ViTImageProcessor, pipeline

from plain_vit.errors import DataError, OutputError, OutputExistsError, TrainingError
from plain_vit.training.arguments import parse_arguments
from plain_vit.training.data import load_splits
from plain_vit.training.optimization import MovingAverage
from plain_vit.training.run import folder as run_module
from plain_vit.training.run.folder import read_log
from tests.sizes import few
from tests.training.run_cases import run_in_two
from tests.training.runs import (
    EXAMPLES,
    PYTHON,
    TORCHRUN,
    assert_same_bits,
    finetune,
    finish,
    launch,
    open_script,
    save_stock_vit,
    start,
    wait_for_step,
    weights_of,
)

SCRIPT = "finetune_image_classification"
script = open_script(SCRIPT)
ACCELERATE = [*PYTHON, "-m", "accelerate.commands.launch"]
TWO_BY_CONFIG = [*ACCELERATE, "--config_file", str(EXAMPLES / "accelerate_configs" / "cpu_2_processes.yaml")]
# 70 images in batches of 12: epochs end within batches. 7 steps, evaluated twice.
SHORT = {"dataset": "digits", "shots_per_class": 7, "steps": 7, "batch_size": 12, "evaluations": 2, "log_every": 1,
         "report": False}  # fmt: skip


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stock ViT with dropout, for three classes."""
    return save_stock_vit(tmp_path_factory.mktemp("stock"), hidden_dropout_prob=0.1)


# Signals


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [PYTHON, TORCHRUN], ids=["1 process", "2 processes"])
def test_termination_saves_and_says_how_to_go_on(launcher, stock_folder, tmp_path):
    options = {**SHORT, "steps": 10_000, "checkpoint_every": 2, "num_workers": 2, "output_dir": tmp_path / "run"}
    process = start(SCRIPT, launcher, model=stock_folder, **options)
    wait_for_step(process, tmp_path / "run", 2)
    os.killpg(process.pid, signal.SIGTERM)  # torchrun forwards it to its processes
    output = finish(process)
    stopped = re.search(r"Stopped after step (\d+) of 10000: continue with --resume", output)
    assert stopped is not None, output
    assert max((tmp_path / "run" / "checkpoints").iterdir()).name == f"step_{int(stopped[1]):08d}"
    if launcher is PYTHON:  # torchrun itself ends with an error
        assert process.returncode == 128 + signal.SIGTERM
        assert "Traceback" not in output


def test_a_stalled_process_and_its_children_report_where_they_hang():
    code = "import os, time\nos.fork()\ndef hang():\n    os.write(1, b'hangs\\n'), time.sleep(100)\nhang()"
    process = subprocess.Popen(
        [*PYTHON, "-X", "faulthandler", "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["hangs\n"] * 2
    with pytest.raises(AssertionError, match="Not done after 0 s") as failure:
        finish(process, limit=0)
    assert str(failure.value).count("in hang\n") == 2


# Several processes


@pytest.fixture
def options(stock_folder, tmp_path):
    """Return options of a run whose result does not depend on the number of processes."""
    model = tmp_path / "model"
    ViTForImageClassification.from_pretrained(stock_folder, hidden_dropout_prob=0.0).save_pretrained(model)
    ViTImageProcessor.from_pretrained(stock_folder).save_pretrained(model)
    # 360 images are not a multiple of 26, so the last batches are padded. SGD, because the first step of Adam moves all
    # weights by the same amount, after which rounding decides between equally likely classes.
    return {**SHORT, "model": str(model), "eval_batch_size": 26, "optimizer": "sgd", "learning_rate": 0.1}


def check_two(output: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Compare a run of two processes with a run of one process, which is made here."""
    one = finetune(**options, output_dir=tmp_path / "one")
    assert "in 2 processes" in output
    assert output.count("360 of 360") == 3
    assert one.count == 360
    for line, line_of_two in zip(read_log(tmp_path / "one"), read_log(tmp_path / "two"), strict=True):
        # Averaging the gradients of two halves has a different order of sums than one batch.
        assert line_of_two == pytest.approx(line, rel=1e-5)
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
    assert results[0]["images_evaluated"] == results[1]["images_evaluated"] == 360
    assert results[0]["test_accuracy"] == results[1]["test_accuracy"] == one.accuracy
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert configs[0] == configs[1]
    saved = [weights_of(tmp_path / name) for name in ("one", "two")]
    assert saved[0].keys() == saved[1].keys()
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=0, atol=1e-5 * tensor.abs().max().item())


@pytest.mark.slow
def test_accelerate_launch_gives_the_result_of_one_process_which_opens_with_its_labels(options, tmp_path):
    check_two(launch(SCRIPT, TWO_BY_CONFIG, output_dir=tmp_path / "two", num_processes=2, **options), tmp_path, options)
    classifier = pipeline("image-classification", model=str(tmp_path / "two"))
    answers = classifier(load_splits("digits")["test"]["image"][:5], top_k=10)
    assert {answer["label"] for answer in answers[0]} == {str(digit) for digit in range(10)}
    assert classifier.model.config.label2id == {str(digit): digit for digit in range(10)}


@pytest.mark.slow
def test_two_machines_with_a_launcher_each_give_the_result_of_one_process(options, tmp_path):
    config = [
        "--config_file",
        str(EXAMPLES / "accelerate_configs" / "several_machines.yaml"),
        "--mixed_precision",
        "no",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launchers = [
        [*ACCELERATE, *config, "--num_machines", "2", "--num_processes", "2", "--machine_rank", "0",
         "--main_process_ip", "127.0.0.1", "--main_process_port", port],
        [*PYTHON, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", "1",
         "--master_addr", "127.0.0.1", "--master_port", port],
    ]  # fmt: skip
    runs = [start(SCRIPT, launcher, output_dir=tmp_path / "two", **options) for launcher in launchers]
    outputs = [finish(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
    check_two(outputs[0], tmp_path, options)


@pytest.mark.slow
@pytest.mark.parametrize("changes", few([{"lora_rank": 2}, {}, {"lora_rank": 2, "compile": True}], 1), ids=str)
def test_sharded_weights_give_the_result_of_whole_ones(changes, options, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "dynamo,graph_breaks")
    options |= {"ema_decay": 0.5, "report": True, **changes}
    output = run_in_two([(SCRIPT, {**options, "output_dir": str(tmp_path / "two"), "shard": True})], tmp_path / "cases")
    check_two(output, tmp_path, {**options, "compile": False})
    own, whole = (int(number.replace(",", "")) for number in re.search(
        r"each process holds ([\d,]+) of ([\d,]+) parameters", output
    ).groups())  # fmt: skip
    assert own == pytest.approx(whole / 2, rel=0.1)
    report = (tmp_path / "two" / "report" / "index.html").read_text(encoding="utf-8")
    assert "ViTForImageClassification" in report
    assert "FSDPViT" not in report
    assert ("done compiler function inductor" in output) == ("compile" in changes)
    assert "Graph break" not in output


@pytest.mark.slow
def test_dry_run_of_sharded_weights_divides_what_one_process_would_hold(options, tmp_path, capsys):
    options |= {"output_dir": str(tmp_path / "run"), "ema_decay": 0.5, "dry_run": True}
    with pytest.raises(SystemExit):
        finetune(**options)
    alone = rows_of(capsys.readouterr().out)
    shared = rows_of(launch(SCRIPT, TORCHRUN, **options, shard=True))
    assert not (tmp_path / "run").exists()
    assert shared["a step"] == "12 images = 2 processes x 1 micro-batch x 6 images"
    for name in ("weights", "gradients", "optimizer states", "moving average"):
        assert shared[name].endswith(f", 1/2 of {alone[name]}")
    assert "buffers of weights and gradients that processes exchange" in shared["how estimated"]
    assert shared["a checkpoint"] == alone["a checkpoint"]
    parameters = sum(tensor.numel() for tensor in weights_of(Path(options["model"])).values())
    assert float(shared["weights"].partition(" KB")[0]) * 1000 == pytest.approx(4 * parameters / 2, rel=0.1)


def rows_of(output: str) -> dict[str, str]:
    """Return the rows of the tables that a dry run printed."""
    return dict(re.findall(r"^  (\S.*?)  +(.*)$", output, flags=re.MULTILINE))


def test_impossible_sharding_is_refused(stock_folder, tmp_path, monkeypatch):
    good = {"model": str(stock_folder), "output_dir": str(tmp_path / "run"), **SHORT, "shard": True}
    for options in (good, {**good, "dry_run": True}):
        with pytest.raises(TrainingError, match="Sharding needs at least two processes"):
            finetune(**options)
    with pytest.raises(TrainingError, match="omit --auto_micro_batch, and set --gradient_accumulation_steps"):
        finetune(**good, auto_micro_batch=True)
    with pytest.raises(TrainingError, match="--shard does not scale the losses of fp16: use --mixed_precision bf16"):
        finetune(**good, mixed_precision="fp16")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--use_fsdp", "--use_deepspeed", "--use_megatron_lm", "--use_parallelism_config"])
def test_models_that_accelerate_would_divide_are_refused(flag, stock_folder, tmp_path, monkeypatch):
    words = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    arguments = launch_command_parser().parse_args([*words, flag, "script.py"])
    if flag == "--use_deepspeed":
        arguments.deepspeed_fields_from_accelerate_config = ""
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        arguments.multi_gpu = True
        environment = prepare_multi_gpu_env(arguments)
    for name in environment.keys() - os.environ.keys():
        monkeypatch.setenv(name, environment[name])
    kind = flag.removeprefix("--use_").upper()
    with pytest.raises(TrainingError, match=f"configured for {kind}, .* optimizer states with --shard"):
        finetune(model=stock_folder, output_dir=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


def test_another_number_of_processes_than_asked_for_is_refused(stock_folder, tmp_path):
    with pytest.raises(TrainingError, match="1 processes are running, 2 were requested"):
        finetune(model=stock_folder, output_dir=tmp_path / "run", num_processes=2, **SHORT)
    assert not (tmp_path / "run").exists()


# Results


@pytest.mark.slow
def test_arguments_are_written_back_and_repeat_the_run(stock_folder, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    finetune(model=stock_folder, output_dir=first, **SHORT)
    again = parse_arguments(
        script.FinetuneArguments, [str(first / "arguments.yaml"), "--output_dir", str(second)], description=None
    )
    script.finetune(again)
    assert yaml.safe_load((second / "arguments.yaml").read_text())["output_dir"] == str(second)
    assert_same_bits(first, second)


@pytest.mark.slow
def test_validation_split_chooses_the_weights_that_are_saved(tmp_path):
    # A learning rate so high that only the first step helps.
    finetune(
        model=str(EXAMPLES / "checkpoints" / "glyphs_vit.pt"), validation_fraction=0.2,
        model_hints=["num_attention_heads=4", "image_size=24", "patch_size=4"], output_dir=str(tmp_path / "run"),
        **{**SHORT, "steps": 6, "evaluations": 6}, checkpoints_kept=6,
        learning_rate=0.03, warmup_fraction=0.0, schedule="constant",
    )  # fmt: skip
    saved = weights_of(tmp_path / "run")
    lines = [line for line in read_log(tmp_path / "run") if "validation_accuracy" in line]
    accuracies = {line["step"]: line["validation_accuracy"] for line in lines}
    assert accuracies.keys() == {1, 2, 3, 4, 5, 6}
    best = max(accuracies, key=lambda step: accuracies[step])
    assert best < 6
    chosen = weights_of(tmp_path / "run" / "checkpoints" / f"step_{best:08d}")
    assert saved.keys() == chosen.keys()
    assert all(torch.equal(tensor, chosen[name]) for name, tensor in saved.items())


# Bad input


@pytest.mark.slow
def test_bad_input_is_refused_before_anything_is_written(stock_folder, tmp_path):
    good = {"model": str(stock_folder), "output_dir": str(tmp_path / "run"), **SHORT}
    for changed, error, message in (
        ({"dataset": "./nowhere"}, DataError, "no file or folder"),
        ({"image_column": "picture"}, DataError, "no column 'picture'"),
        ({"train_split": "training"}, DataError, "no split 'training'"),
        ({"shots_per_class": 400}, DataError, "fewer than the 400"),
        ({"batch_size": 13, "gradient_accumulation_steps": 2}, TrainingError, "multiple of 2"),
        ({"model": "vit-tiny-patch16-224"}, TrainingError, "--from_scratch"),
        ({"ema_decay": 1.5}, TrainingError, "ema_decay is 1.5"),
        ({"resume": True}, TrainingError, "contains no run"),
        ({"steps": 0}, TrainingError, "steps is 0"),
        ({"warmup_steps": 8}, TrainingError, "The warm-up takes 8 steps, the run 7"),
        ({"freeze": ["5"]}, TrainingError, "5 blocks cannot be frozen"),
        ({"optimizer": "sdg"}, TrainingError, "no optimizer 'sdg'"),
        ({"teacher": str(stock_folder)}, TrainingError, "lacks the classes"),
    ):
        with pytest.raises(error, match=message):
            finetune(**{**good, **changed})
        assert not (tmp_path / "run").exists(), changed


@pytest.mark.slow
def test_folder_that_is_not_empty_or_of_another_run_is_refused(stock_folder, tmp_path):
    run = tmp_path / "run"
    good = {"model": str(stock_folder), "output_dir": str(run), **SHORT, "steps": 2}
    finetune(**good)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(OutputExistsError, match="is not empty"):
        finetune(**good)
    with pytest.raises(TrainingError, match=r"learning_rate \(was 0\.001, is 0\.1\)"):
        finetune(**good, resume=True, learning_rate=0.1)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_begun_before_an_option_existed_is_resumed_with_its_default(stock_folder, tmp_path):
    good = {"model": str(stock_folder), "output_dir": str(tmp_path / "run"), **SHORT, "steps": 2}
    finetune(**good)
    file = tmp_path / "run" / "run.json"
    older = json.loads(file.read_text())
    del older["random_erasing"], older["betas"]
    file.write_text(json.dumps(older))
    with pytest.raises(TrainingError, match=r"differs in random_erasing \(was 0.0, is 0.25\): "):
        finetune(**good, resume=True, random_erasing=0.25)
    finetune(**good, resume=True)
    del older["training labels"]  # a field that no option sets, and without a default
    file.write_text(json.dumps(older))
    with pytest.raises(TrainingError, match="differs in training labels"):
        finetune(**good, resume=True)


@pytest.mark.slow
def test_resume_with_other_data_is_refused(stock_folder, tmp_path):
    digits = load_splits("digits")["test"]
    good = {**SHORT, "model": str(stock_folder), "output_dir": str(tmp_path / "run"), "dataset": str(tmp_path / "set"),
            "shots_per_class": None, "validation_fraction": 0.2}  # fmt: skip
    digits.save_to_disk(str(tmp_path / "set"))
    finetune(**good)
    shutil.rmtree(tmp_path / "set")
    digits.select(range(len(digits))[::-1]).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(TrainingError, match="differs in training labels"):
        finetune(**good, resume=True)


@pytest.mark.parametrize("file", sorted((EXAMPLES / "accelerate_configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_config_files_of_accelerate_are_read_by_it_and_say_whether_they_were_run(file):
    config = load_config_from_file(str(file))
    assert config.num_processes >= 2
    head = "".join(line for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert ("Run: tests/" in head) != ("Not run here" in head)
    assert f"--config_file examples/accelerate_configs/{file.name}" in head


def test_script_ends_with_one_line_and_the_exit_code_of_the_error(stock_folder, tmp_path, capsys, monkeypatch):
    words = ["--model", stock_folder, "--dataset", tmp_path / "nothing", "--output_dir", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["finetune", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == DataError.exit_code
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_full_disk_is_noticed_before_the_run_and_before_each_checkpoint(stock_folder, tmp_path, monkeypatch):
    good = {"model": str(stock_folder), **SHORT, "checkpoint_every": 2}
    free = iter([10**9, 10**9, 10**3])  # before the run, before the first checkpoint, before the second
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda place: usage._replace(free=next(free)))
    with pytest.raises(OutputError, match=r"1\.0 KB left, the next checkpoint needs .* KB: free some"):
        finetune(**good, output_dir=tmp_path / "run")
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]

    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda place: usage._replace(free=10**4))
    with pytest.raises(OutputError, match="the run needs"):
        finetune(**good, output_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()

    monkeypatch.undo()
    finetune(**good, output_dir=tmp_path / "run", resume=True)
    finetune(**good, output_dir=tmp_path / "whole")
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")


@pytest.mark.slow
def test_estimate_of_a_checkpoint_is_at_least_its_size_and_not_twice(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 100))
    model[0].requires_grad_(False)
    accelerator = Accelerator(cpu=True)
    average = MovingAverage(model, 0.5, accelerator.device)
    estimate = run_module.checkpoint_bytes(model, average)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model[1].parameters()))
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    folder = run_module.RunFolder(tmp_path, accelerator, {}, resume=False)
    folder.begin()
    folder.save({"step": 1}, keep=1, average=average)
    folder.finish_saving()  # until then, a thread moves the files
    written = sum(file.stat().st_size for file in (tmp_path / "checkpoints").rglob("*") if file.is_file())
    accelerator.free_memory()
    assert written < estimate + 50_000, "beside the tensors: names, and the states of the generators"
    assert estimate < written
