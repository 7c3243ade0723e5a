"""Mistakes of users, and full disks: one line says what to do, and nothing is lost."""

import dataclasses
import io
import re
import resource
import sys
import tarfile
import typing
from collections.abc import Iterator
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from safetensors.torch import load_file, save_file

from plain_vit.errors import CheckpointError, DataError, OutputError, PlainViTError, TrainingError
from plain_vit.training.arguments import parse_arguments, ranges_of
from plain_vit.training.data import load_classification_data, load_images, load_labelled_split
from plain_vit.training.hardware.processes import start_accelerator
from plain_vit.training.models import load_classifier, open_classifier
from tests import ROOT
from tests.processes import in_a_process, server
from tests.sources.bad_models import BAD_MODELS
from tests.training.runs import (
    ENTRIES,
    TORCHRUN,
    finetune,
    finish,
    open_script,
    probe,
    save_plain_vit,
    save_resnet,
    save_stock_vit,
    start,
    words_of,
)
from tests.training.test_streaming import add

SCRIPT = "finetune_image_classification"
script = open_script(SCRIPT)


def write_image(path: Path, number: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (9, 7), (number % 255, 3, 200)).save(path)


def image_folder(folder: Path, **classes: int) -> Path:
    """Write a number of images for each class of both splits."""
    for split in ("train", "test"):
        for name, count in classes.items():
            for number in range(count):
                write_image(folder / split / name / f"{name}_{number}.png", number)
    return folder


def save_rows(folder: Path, labels: list[Any], kind: Any) -> str:
    features = Features({"image": Image(), "label": kind})
    images = [PIL.Image.new("RGB", (9, 7), (number, 3, 200)) for number in range(len(labels))]
    rows = Dataset.from_dict({"image": images, "label": labels}, features=features)
    DatasetDict(train=rows, test=rows).save_to_disk(str(folder))
    return str(folder)


# Options


@pytest.mark.parametrize(("wrong", "right"), [
    ("batchsize", "--batch-size"), ("learning_rates", "--learning-rate"), ("no_reports", "--no-report"),
    ("lr-scheduler-type", "--schedule"), ("num_train_epochs", "--epochs"),
])  # fmt: skip
def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(wrong, right, tmp_path, capsys):
    words = ["--model", "m", "--dataset", "d", "--output_dir", "o"]
    (tmp_path / "old.yaml").write_text(f"model: m\n{wrong}: 3\n")
    for given in ([*words, f"--{wrong}", "3"], [str(tmp_path / "old.yaml")]):
        with pytest.raises(SystemExit, match="2"):
            parse_arguments(script.FinetuneArguments, given, description=None)
        assert re.search(rf"no option --{wrong.replace('_', '-')}; did you mean .*'{right}'", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(script.FinetuneArguments, ["--xyzxyz"], description=None)
    assert capsys.readouterr().err.startswith("plain-vit: there is no option --xyzxyz\nusage: ")
    assert not parse_arguments(script.FinetuneArguments, [*words, "--no-report"], description=None).report


HUGE, UNENDING = str(10**30), "1e400"
TAKEN = {("head_bias", "-1")}


def numeric_options(name: str) -> Iterator[tuple[str, type]]:
    """Yield the numeric options of a script, with their types."""
    for option, hint in typing.get_type_hints(kind_of(name)).items():
        parts = {hint, *typing.get_args(hint)}
        parts |= {inner for part in parts for inner in typing.get_args(part)}
        yield from ((option, type_) for type_ in (int, float) if type_ in parts)


def kind_of(name: str) -> Any:
    return getattr(open_script(name), ENTRIES[name][1])


@pytest.mark.parametrize("name", ENTRIES)
def test_every_number_of_every_script_has_a_range(name):
    assert [option for option, _ in numeric_options(name) if ranges_of(kind_of(name))[option] is None] == []


@pytest.mark.parametrize("name", ENTRIES)
def test_numbers_out_of_range_are_refused_by_every_script_with_the_name_of_the_option(name, capsys):
    kind = kind_of(name)
    asked = {each.name for each in dataclasses.fields(kind)} & {"model", "dataset", "output_dir"}
    needed = [word for option in sorted(asked) for word in (f"--{option}", "x")]
    parse_arguments(kind, needed, description=None)
    seen = 0
    for option, type_ in numeric_options(name):
        for value in ("-1", "nan", "inf", UNENDING) if type_ is float else ("-1", HUGE, "nan"):
            if (option, value) in TAKEN:
                continue
            seen += 1
            with pytest.raises((TrainingError, SystemExit)) as refused:
                parse_arguments(kind, [*needed, f"--{option}", value], description=None)
            said = str(refused.value) if isinstance(refused.value, TrainingError) else capsys.readouterr().err
            assert option.replace("_", "-") in said.replace("_", "-"), (option, value, said)
            assert "expected" in said or "invalid" in said
    assert seen > 5


@pytest.mark.parametrize(("option", "value"), [
    ("momentum", "1"), ("betas", "0.9 1"), ("seed", str(2**32)), ("epochs", "0"), ("epochs", "1e300"), ("steps", "0"),
    ("image_size", "0"), ("drop_path_rate", "1"), ("crop_scale", "0"), ("validation_fraction", "1"),
    ("distillation_temperature", "0"), ("max_images", "0"), ("ema_decay", "1"), ("num_processes", "0"),
])  # fmt: skip
def test_ends_that_cannot_be_are_refused_on_the_command_line_in_a_file_and_in_python(option, value, tmp_path):
    words = ["--model", "m", "--dataset", "d", "--output_dir", "o"]
    with pytest.raises(TrainingError, match=f"^{option} is .*: expected "):
        parse_arguments(script.FinetuneArguments, [*words, f"--{option}", *value.split()], description=None)
    (tmp_path / "old.yaml").write_text(f"model: m\ndataset: d\noutput_dir: o\n{option}: [{', '.join(value.split())}]\n")
    with pytest.raises(TrainingError, match=f"^{option} is .*: expected "):
        parse_arguments(script.FinetuneArguments, [str(tmp_path / "old.yaml")], description=None)
    with pytest.raises(TrainingError, match=f"^{option} is "):
        script.FinetuneArguments(model="m", dataset="d", output_dir="o", **{option: [*map(float, value.split())]})


@pytest.mark.parametrize("content", [None, b"model: [", b"- model", b"\xff", b"", b"7", b"3: 4", b"a: &a [*a]"])
def test_a_file_of_options_that_is_none_is_one_line(content, tmp_path):
    path = tmp_path / "arguments.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        (TrainingError, SystemExit), match=r"arguments\.yaml .*: give the arg|arguments\.yaml cannot|^2"
    ):
        parse_arguments(script.FinetuneArguments, [str(path)], description=None)


@pytest.mark.slow
def test_fewer_images_than_a_step_takes_are_remarked_on(capsys, tmp_path):
    save_plain_vit(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "dataset": "digits", "shots_per_class": 1, "epochs": 1,
               "batch_size": 64, "report": False}  # fmt: skip
    said = "10 training images are fewer than the 64 of a step: each step uses them 6.4 times"
    finetune(**options, output_dir=tmp_path / "run")
    assert said in capsys.readouterr().out
    with pytest.raises(SystemExit):
        finetune(**options, output_dir=tmp_path / "other", dry_run=True)
    assert said in capsys.readouterr().out


def test_a_launch_on_the_cpu_that_starts_one_process_says_so(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    start_accelerator(num_processes=None, mixed_precision="no")
    assert "One process: `accelerate launch --cpu` starts one" in capsys.readouterr().out
    start_accelerator(num_processes=1, mixed_precision="no")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    start_accelerator(num_processes=None, mixed_precision="no")
    assert capsys.readouterr().out == ""


# Labels


def test_images_beside_their_classes_are_refused_with_the_layout_that_is_expected(tmp_path):
    for number in range(4):
        write_image(tmp_path / "flat" / "train" / f"{number}.png")
    both = image_folder(tmp_path / "both", cat=3, dog=3)
    write_image(both / "train" / "stray.png")
    for folder in (tmp_path / "flat", both):
        for streaming in (False, True):
            with pytest.raises(DataError, match=r"train/CLASS/image\.jpg"):
                load_classification_data(str(folder), streaming=streaming, stream_images=4 if streaming else None)


@pytest.mark.parametrize("labels, kind", [
    ([0, 1, None, 1], ClassLabel(names=["a", "b"])),
    ([0, 1, None, 1], Value("int64")),
    (["a", "b", None, "b"], Value("string")),
])  # fmt: skip
def test_missing_label_is_named_by_its_row(labels, kind, tmp_path):
    name = save_rows(tmp_path / "rows", labels, kind)
    with pytest.raises(DataError, match="1 of the 4 images of the train split have no label, the first .* row 2"):
        load_classification_data(name, label_column="label")


def test_class_without_training_images_is_refused(tmp_path):
    name = save_rows(tmp_path / "rows", [0, 1, 1, 0], ClassLabel(names=["ant", "bee", "cat"]))
    with pytest.raises(DataError, match="1 of the 3 classes have no training images: 'cat'"):
        load_classification_data(name)
    folder = image_folder(tmp_path / "folder", cat=3, dog=3)
    write_image(folder / "test" / "emu" / "1.png")
    with pytest.raises(DataError, match="1 of the 3 classes have no training images: 'emu'"):
        load_classification_data(str(folder))


@pytest.mark.parametrize("sizes", [{"train": 6, "test": 0}, {"train": 0, "test": 6}, {"train": 0}])
@pytest.mark.parametrize("kind", ["saved", "parquet", "one file"])
def test_a_split_without_rows_is_refused_by_its_name(kind, sizes, tmp_path):
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
    labels = {name: [number % 2 for number in range(size)] for name, size in sizes.items()}
    images = {name: [PIL.Image.new("RGB", (9, 7), (number, 3, 200)) for number in labels[name]] for name in sizes}
    splits = {
        name: Dataset.from_dict({"image": images[name], "label": labels[name]}, features=features) for name in sizes
    }
    folder = tmp_path / "data"
    if kind == "saved":
        DatasetDict(splits).save_to_disk(str(folder))
    else:
        folder.mkdir()
        for name, rows in splits.items():
            rows.to_parquet(str(folder / f"{name}-0.parquet"))
    name = str(folder / f"{'train' if not sizes['train'] else 'test'}-0.parquet") if kind == "one file" else str(folder)
    for load in (
        load_classification_data, partial(load_classification_data, streaming=True), load_labelled_split, load_images
    ):  # fmt: skip
        with pytest.raises(DataError, match="without rows .*: remove it|split has no rows: remove it"):
            load(name)


@pytest.mark.parametrize("damage", ["parquet", "state", "arrow"])
def test_a_damaged_dataset_is_one_line_that_names_it(damage, tmp_path):
    name = Path(save_rows(tmp_path / "rows", [0, 1, 1, 0], ClassLabel(names=["a", "b"])))
    if damage == "parquet":
        DatasetDict.load_from_disk(name)["train"].to_parquet(tmp_path / "one.parquet")
        name = tmp_path / "one.parquet"
    damaged = {"parquet": name, "state": name / "train" / "state.json"}.get(damage) or next(name.glob("train/*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(DataError, match=f"{re.escape(str(name))} cannot be read: "):
        load_classification_data(str(name))


# Streams


def test_sizes_that_are_known_are_not_asked_for(tmp_path):
    folder = image_folder(tmp_path / "folder", cat=3, dog=4)
    saved = save_rows(tmp_path / "saved", [0, 1, 1, 0, 1], ClassLabel(names=["a", "b"]))
    rows = DatasetDict.load_from_disk(saved)
    files = tmp_path / "files"
    files.mkdir()
    for number in range(3):
        rows["train"].to_parquet(str(files / f"train-{number}.parquet"))
    rows["test"].to_parquet(str(files / "test-0.parquet"))
    for name, size in (("digits", 1437), (str(folder), 7), (saved, 5), (str(files), 15)):
        assert load_classification_data(name, streaming=True).train_images == size
        assert load_classification_data(name, streaming=True, stream_images=3).train_images == 3


@pytest.mark.slow
def test_documented_command_for_imagenet_21k_runs_on_tar_shards(tmp_path):
    text = (ROOT / "docs" / "guide" / "many_gpus.md").read_text(encoding="utf-8")
    [command] = [line for line in text.splitlines() if "imagenet21k" in line and "gpus.yaml" in line]
    words = command[command.index("--recipe") :].split()
    folder = tmp_path / "imagenet21k"
    folder.mkdir()
    for split in ("train", "validation"):
        for shard in range(8):
            with tarfile.open(folder / f"{split}-{shard:06d}.tar", "w") as tar:
                for number in range(3):
                    content = io.BytesIO()
                    PIL.Image.new("RGB", (40, 30), (number, shard, 3)).save(content, "jpeg")
                    add(tar, f"{shard}_{number}.jpg", content.getvalue())
                    add(tar, f"{shard}_{number}.cls", str(number % 2).encode())
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    changed = {
        "--model": "vit-tiny-patch16-224", "--dataset": str(folder), "--num_processes": "1", "--mixed_precision": "no",
        "--output_dir": str(tmp_path / "run"), "--label_names": str(tmp_path / "classes.txt"),
    }  # fmt: skip
    assert changed.keys() <= set(words)
    words = [changed.get(words[number - 1], word) for number, word in enumerate(words)]
    words.remove("--auto_micro_batch")
    words += ["--from_scratch", "--dry_run", "--batch_size", "8"]
    with pytest.raises(SystemExit) as ended:
        script.finetune(parse_arguments(script.FinetuneArguments, words, description=None))
    assert not ended.value.code


# Probes and reports


def test_probe_recommends_no_option_that_it_lacks(tmp_path):
    folder = image_folder(tmp_path / "folder", cat=12, dog=12)
    (folder / "train" / "cat" / "cat_3.png").write_bytes(b"nothing")
    model = save_plain_vit(tmp_path / "model")
    with pytest.raises(DataError, match=r"cat_3\.png .*Repair it, or remove it\.") as failure:
        probe(model=model, dataset=folder, output_dir=tmp_path / "out", shots=[1])
    assert "--corrupted" not in str(failure.value)


@pytest.mark.slow
def test_report_names_the_files_of_mistakes_and_no_private_path(tmp_path):
    folder = image_folder(tmp_path / "private" / "folder", cat=4, dog=4)
    model = save_plain_vit(tmp_path / "model")
    options = {"steps": 2, "batch_size": 4, "shots_per_class": 2, "log_every": 1}
    finetune(model=model, dataset=folder, output_dir=tmp_path / "run", **options)
    page = (tmp_path / "run" / "report" / "index.html").read_text(encoding="utf-8")
    assert sum(f"{name}/{name}_{number}.png (row" in page for name in ("cat", "dog") for number in range(4)) > 0
    assert f"{folder}/test" not in page


# Models and folders

OURS = [title for title in BAD_MODELS if title.startswith(("our folder", "configuration", "image processor"))]


def refused_by_both(source: Path, raises: type[PlainViTError], says: str) -> None:
    for load in (open_classifier, partial(load_classifier, label_names=["a", "b"])):
        with pytest.raises(raises, match=says):
            load(str(source))


@pytest.mark.parametrize("title", OURS)
def test_scripts_refuse_the_folders_that_inspect_refuses(title, tmp_path):
    bad = BAD_MODELS[title]
    refused_by_both(bad.make(tmp_path), bad.raises, re.escape(bad.says))


@pytest.mark.parametrize("save", [save_plain_vit, save_stock_vit, save_resnet])
def test_damaged_weights_and_settings_are_an_error_that_names_the_model(save, tmp_path):
    damages = {
        "model.safetensors": lambda content: content[: len(content) // 2],
        "config.json": lambda content: content[:-9],
        "preprocessor_config.json": lambda content: b"[]",
    }
    for name, damage in damages.items():
        folder = tmp_path / name
        save(folder)
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        refused_by_both(folder, CheckpointError, re.escape(str(folder)))
    folder = tmp_path / "spoilt"
    save(folder)
    tensors = load_file(folder / "model.safetensors")
    next(tensor for tensor in tensors.values() if tensor.is_floating_point()).view(-1)[0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused_by_both(folder, PlainViTError, "NaN")


@pytest.mark.parametrize("name", ENTRIES)
def test_an_output_below_a_file_is_one_line(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    option = "output" if name.startswith("evaluate") else "output_dir"
    model = save_plain_vit(tmp_path / "model", num_labels=10, id2label={number: str(number) for number in range(10)})
    words = ["--model", str(model), "--dataset", "digits", f"--{option}", str(tmp_path / "file" / "x")]
    words += ["--steps", "1"] if "steps" in {each.name for each in dataclasses.fields(kind_of(name))} else []
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as stopped:
        open_script(name).main()
    assert stopped.value.code == OutputError.exit_code
    [line] = [line for line in capsys.readouterr().err.splitlines() if "Error" in line]
    assert str(tmp_path / "file") in line
    assert (tmp_path / "file").read_text() == "mine"


# Disks


def train_within(limit: int, words: list[str]) -> tuple[object, str]:
    """Run the script in a process that cannot write files above a limit, and return its exit and its errors."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = ["finetune", *words]
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            open_script(SCRIPT).main()
    except SystemExit as stopped:
        return stopped.code, errors.getvalue()
    return None, errors.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [300, 5_000, 40_000, 100_000])
def test_disk_that_fills_is_one_line(limit, tmp_path):
    options = {"model": save_plain_vit(tmp_path / "model"), "dataset": image_folder(tmp_path / "folder", cat=4, dog=4),
               "output_dir": tmp_path / "run", "steps": 2, "batch_size": 4, "report": "no"}  # fmt: skip
    load_classification_data(str(tmp_path / "folder"))  # writes its cache beforehand
    code, errors = in_a_process(train_within, limit, words_of(options), context=server)
    assert code == OutputError.exit_code, errors
    [line] = [line for line in errors.splitlines() if "Error" in line]
    assert "File too large" in line
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_disk_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    model = save_plain_vit(tmp_path / "model")

    def refuse(path: Path, *args: object, **options: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    words = ["--model", str(model), "--dataset", "digits", "--output_dir", str(tmp_path / "run"), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["finetune", *words])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == OutputError.exit_code
    assert [line for line in capsys.readouterr().err.splitlines() if "Error" in line] == [
        f"plain-vit: OutputError: {tmp_path / 'run'} cannot be read or written: Read-only file system."
    ]


# Several processes


def test_under_torchrun_the_first_process_to_fail_prints_the_line(tmp_path, monkeypatch, capsys):
    command = ["finetune", "--model", str(tmp_path), "--dataset", "./nowhere", "--output_dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", command)
    for rank, lines in (("1", 1), ("0", 0)):  # torchrun ends a process that is slower, even the main one
        file = tmp_path / "attempt_0" / rank / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            script.main()
        assert capsys.readouterr().err.count("There is no file or folder ./nowhere") == lines
        assert "./nowhere" in file.read_text(), "for the summary of torchrun"


@pytest.mark.slow
def test_one_line_stays_visible_under_torchrun(tmp_path):
    process = start(SCRIPT, TORCHRUN, model=tmp_path, dataset="./nowhere", output_dir=tmp_path / "run")
    output = finish(process)
    assert process.returncode != 0
    line = "plain-vit: DataError: There is no file or folder ./nowhere: correct the path."
    assert line in output.splitlines(), "once by itself"
    assert line in output[output.index("Root Cause") :], "and in the summary at the end"
