"""Bad inputs on the command line give the documented error and exit code, no traceback, and run or write nothing.

`python -m tests.cli.test_bad_inputs` writes docs/reference/bad_inputs.md, the table of all of them.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from plain_vit import PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import CheckpointError, PlainViTError
from plain_vit_command import main
from tests import ROOT
from tests.files.bad_files import BAD_FILES, PAYLOAD
from tests.sizes import few
from tests.sources.bad_models import BAD_MODELS, save_ours

PAGE = ROOT / "docs" / "reference" / "bad_inputs.md"
# A pickle that runs code, a stale shard, a link out of the folder, an .npz bomb, a configuration that is one.
SAMPLE = [
    "a Git LFS pointer named model.safetensors",
    "safetensors: cut in its data",
    "safetensors: overlapping tensors",
    "pickle that calls os.system",
    "old pickle that calls os.system",
    "hostile pickle named as safetensors",
    "npz of Python objects",
    "npz that unpacks to 320 MB",
    "index that leads to ../",
    "one file beside shards of an earlier save",
    "weights that link out of the folder",
    "configuration cut short",
]


def run(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str]:
    """Run the command in this process; return its exit code and what it said, in place of a stack trace."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return code, printed


def refused_as(raises: type[PlainViTError], code: int, printed: str) -> None:
    assert code == raises.exit_code
    errors = [line for line in printed.splitlines() if line.startswith("plain-vit: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"plain-vit: {raises.__name__}: ")
    assert len(printed) < 20_000


@pytest.mark.parametrize("title", BAD_FILES)
def test_inspect_says_what_is_wrong_with_a_bad_file(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input").mkdir()
    make, raises, says = BAD_FILES[title]
    source = make(tmp_path / "input")
    code, printed = run(capsys, "inspect", source)
    refused_as(raises, code, printed)
    assert re.search(says, printed)
    assert str(source) in printed
    assert PAYLOAD not in os.listdir(tmp_path)


@pytest.mark.parametrize("title", BAD_MODELS)
def test_inspect_says_what_is_wrong_with_a_bad_model(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input").mkdir()
    bad = BAD_MODELS[title]
    source = bad.make(tmp_path / "input")
    code, printed = run(capsys, "inspect", source, *bad.hints)
    refused_as(bad.raises, code, printed)
    assert bad.says in printed
    assert os.listdir(tmp_path) == ["input"]
    with pytest.raises(bad.raises):
        from_checkpoint(source, **arguments(bad.hints))


def arguments(hints: tuple[str, ...]) -> dict[str, object]:
    """Return the arguments of a command line as arguments of `from_checkpoint`."""
    kinds = {"num_attention_heads": int, "image_size": int, "patch_size": int, "layer_norm_eps": float}
    named = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(hints[::2], hints[1::2], strict=True)
    }
    return {name: kinds.get(name, str)(value) for name, value in named.items()}


@pytest.mark.parametrize("title", SAMPLE)
def test_the_other_commands_refuse_it_too_and_leave_everything_as_it_was(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    (tmp_path / "input").mkdir()
    bad = BAD_FILES[title]
    source = bad.make(tmp_path / "input")
    good = save_ours(tmp_path / "good")
    out = tmp_path / "out"
    before = sorted(tmp_path.rglob("*"))
    for words in (
        ("convert", source, out), ("convert", source, good, "--force"), ("verify", good, source),
        ("export", source, out, "--to", "timm"), ("convert", source, "--push", "alice/model"),
    ):  # fmt: skip
        refused_as(bad.raises, *run(capsys, *words))
    code, _ = run(capsys, "push", source, "alice/model")
    assert code == (bad.raises if source.is_dir() else CheckpointError).exit_code
    assert sorted(tmp_path.rglob("*")) == before
    from_checkpoint(good)


@pytest.mark.slow
@pytest.mark.parametrize(
    "title", few(["pickle that calls eval", "safetensors: a header of over 100 MB", "index that is empty"], 1)
)
def test_a_process_of_its_own_leaves_with_the_exit_code(title: str, tmp_path: Path) -> None:
    bad = BAD_FILES[title]
    (tmp_path / "input").mkdir()
    source = bad.make(tmp_path / "input")
    command = [Path(sys.executable).with_name("plain-vit"), "inspect", source]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    refused_as(bad.raises, process.returncode, process.stderr)
    assert not (tmp_path / PAYLOAD).exists()


# ---- code is never run ----

HOSTILE = "open({ran!r}, 'w').close()\nclass Evil: pass\n"


@pytest.fixture
def claims_to_be_ours(tmp_path: Path) -> Path:
    """Return a complete folder of ours, with foreign code for every name in `auto_map`."""
    folder = save_ours(tmp_path / "claims")
    hostile = HOSTILE.format(ran=str(tmp_path / "RAN"))
    for file in folder.glob("*.py"):
        file.write_text(hostile)
    (folder / "evil.py").write_text(hostile)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(config["auto_map"], "evil.Evil")
    (folder / "config.json").write_text(json.dumps(config))
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor["auto_map"] = {"AutoImageProcessor": "evil.Evil"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def test_code_from_a_folder_that_claims_to_be_ours_is_never_run(
    claims_to_be_ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked to trust code"))
    source = claims_to_be_ours
    good = save_ours(tmp_path / "good")
    for words in (
        ("inspect", source), ("convert", source, tmp_path / "out"), ("verify", source, good), ("verify", good, source),
        ("push", source, "alice/model", "--dry-run"), ("export", source, tmp_path / "timm", "--to", "timm"),
    ):  # fmt: skip
        code, printed = run(capsys, *words)
        assert code in (0, 8), printed  # 8: timm has no place for some of the small model's choices
    assert not (tmp_path / "RAN").exists()
    model = from_checkpoint(source).model
    assert type(model) is PlainViTForImageClassification
    expected = safetensors.torch.load_file(good / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_the_code_that_a_converted_folder_carries_is_ours_not_the_sources(
    claims_to_be_ours: Path, tmp_path: Path
) -> None:
    assert main(["convert", str(claims_to_be_ours), str(tmp_path / "out")]) == 0
    for file in (tmp_path / "out").glob("*.py"):
        assert file.read_text() == (ROOT / "plain_vit" / file.name).read_text()
    assert "evil" not in (tmp_path / "out" / "config.json").read_text()
    assert not (tmp_path / "RAN").exists()


@pytest.mark.slow
def test_a_payload_in_such_a_folder_does_run_for_those_who_trust_it(claims_to_be_ours: Path, tmp_path: Path) -> None:
    """Make sure that the payload works; otherwise the tests above would prove nothing."""
    code = (
        "import sys; from transformers import AutoConfig as A; A.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code, claims_to_be_ours], env=environment, capture_output=True)
    assert (tmp_path / "RAN").exists()


# ---- the page ----

# Situations other than files: what happens, and the test that shows it.
WRITING = {
    "the disk is full (`RLIMIT_FSIZE`)": (
        "OutputError", "files/test_writing.py::test_a_full_disk_leaves_what_was_there"),
    "the disk is full while exporting to another package's layout": (
        "OutputError", "files/test_writing.py::test_every_export_to_a_full_disk_leaves_what_was_there"),
    "the disk is full during `show`": (
        "OutputError, no page is left", "files/test_full_disk.py::test_show_leaves_no_page_and_says_so_in_one_line"),
    "the disk is full while a training run writes snapshots, figures or its report": (
        "OutputError, earlier files are unchanged",
        "files/test_full_disk.py::test_a_full_disk_is_one_line_and_leaves_what_was_there"),
    "the disk is full while a training run writes its log": (
        "OutputError, earlier lines are unchanged", "files/test_full_disk.py::test_a_log_never_ends_in_half_a_line"),
    "too little disk space, known in advance": (
        "OutputError", "files/test_writing.py::test_too_little_disk_space_is_found_before_anything_is_written"),
    "`kill -9` at a random moment": (
        "the old folder or the new one",
        "files/test_writing.py::test_killed_at_random_moments_the_target_is_whole"),
    "`kill -9` at a random moment of `convert` or `export`": (
        "the old output or the new one",
        "files/test_writing.py::test_killed_at_random_moments_of_a_command_its_output_is_whole",
    ),
    "the leftovers of a crash": (
        "recognised and cleared", "files/test_writing.py::test_every_state_that_a_crash_can_leave_is_recovered"),
    "Ctrl-C": ("the old output or the new one; what is left is cleared by the next command",
               "files/test_writing.py::test_interrupted_from_the_keyboard_the_target_is_whole_and_the_rest_is_cleared"),
    "a second writer": (
        "OutputError", "files/test_writing.py::test_a_second_writer_is_turned_away_until_the_first_is_gone"),
    "a read-only folder": ("OutputError", "files/test_writing.py::test_a_read_only_folder_is_a_clear_error"),
    "`--force` on a folder that contains a thesis, other weights or an edited model card": (
        "replaced, and kept under another name",
        "files/test_writing.py::test_force_keeps_a_folder_that_holds_what_plain_vit_did_not_write"),
    "`kill -9` at any file that training (but for checkpoints), a probe or `extract_features.py` stages": (
        "the same command, or with `--resume`, ends with the same weights and features",
        "training/test_killed_writes.py::test_a_run_killed_at_any_of_its_writes_can_be_run_again"),
    "`kill -9` during `--force`": (
        "every file is there", "files/test_writing.py::test_killed_while_a_folder_is_kept_every_thesis_survives"),
    "a name of the maximum length": (
        "written; one byte more is an OutputError",
        "files/test_writing.py::test_a_name_as_long_as_a_file_system_takes_is_written_and_recovered"),
    "an output that is in use": (
        "OutputExistsError", "cli/test_cli.py::test_an_output_in_use_is_refused_before_any_work_and_stays"),
}  # fmt: skip
HUB = {
    "no token, a wrong one, one without write permission": (
        "HubError", "hub/test_hub.py::test_token_and_permission_errors_are_clear"),
    "HTTP errors 401, 403, 412, 429, 500": (
        "HubError, nothing changed", "hub/test_hub.py::test_a_refusal_is_a_clear_error_and_changes_nothing"),
    "a transient error (500, 429, a dropped connection)": (
        "retried", "hub/test_hub.py::test_a_fault_that_passes_is_outlived"),
    "an interrupted push": (
        "resumed, nothing is sent twice", "hub/test_hub.py::test_an_interrupted_push_is_taken_up_where_it_broke_off"),
    "a lost response to a commit": (
        "no second commit", "hub/test_hub.py::test_a_commit_whose_answer_was_lost_is_not_made_twice"),
    "a concurrent change by someone else": (
        "HubError, the change is kept", "hub/test_hub.py::test_somebody_elses_change_is_not_overwritten"),
    "a truncated download": ("HubError", "hub/test_hub.py::test_a_cut_download_is_not_taken_for_the_file"),
    "no network, or offline mode": ("HubError", "hub/test_hub.py::test_without_a_network_the_error_says_so"),
    "files that do not belong to a model repository": (
        "not uploaded, but listed",
        "hub/test_push_contents.py::test_of_140_planted_files_none_is_sent_even_if_asked_for_by_its_path"),
    "the same with `--include`: secrets, pickles, notebooks, HTML, archives, encoded data": (
        "PushRefusedError",
        "hub/test_push_contents.py::test_of_140_planted_files_none_is_sent_even_if_asked_for_by_its_path"),
    "a secret in a text that is sent, not encoded": (
        "PushRefusedError", "hub/test_push_contents.py::test_a_secret_is_found_whatever_stands_around_it"),
    "the report of a run, which shows images": (
        "not uploaded without `--include-report`",
        "hub/test_push_contents.py::test_a_report_is_sent_if_it_is_asked_for_and_said_to_hold_images"),
    "a secret of the environment": (
        "PushRefusedError", "hub/test_push_contents.py::test_secrets_of_the_environment_are_found_by_value"),
    "safetensors metadata that their writers do not produce": (
        "PushRefusedError", "hub/test_push_contents.py::test_metadata_that_no_writer_sets_is_refused"),
    "metadata of images": (
        "removed: they are re-encoded",
        "hub/test_push_contents.py::test_pictures_arrive_upright_with_their_pixels_and_nothing_else"),
    "huge files, links out of the folder, pipes": (
        "PushRefusedError", "hub/test_hub.py::test_huge_files_links_and_pipes_are_refused"),
    "a file that changes meanwhile": ("CheckpointError", "hub/test_hub.py::test_a_folder_is_sent_as_it_was_looked_at"),
    "a folder that does not load: wrong sizes, NaN, missing code": (
        "CheckpointError, MappingError", "hub/test_hub.py::test_a_folder_that_does_not_open_is_not_pushed"),
    "a PEFT adapter whose base model is a local folder, or not a Hub id": (
        "CheckpointError", "hub/test_adapters.py::test_an_invalid_hub_id_is_not_a_base"),
    "a PEFT adapter whose base model is not on the Hub": (
        "HubError, no repository is created",
        "hub/test_adapters.py::test_a_base_that_is_not_on_the_hub_is_refused_before_a_repository_is_made"),
    "an adapter's model card that names another base model, or a local path": (
        "CheckpointError", "hub/test_adapters.py::test_an_edited_page_that_names_another_base_is_refused"),
    "licence files of a source that are huge, not text, with escape sequences, or links out of its folder": (
        "not copied, with a warning",
        "hub/test_licenses.py::test_only_short_texts_inside_the_folder_are_copied_and_the_rest_is_said"),
    "a first push that is refused permanently": (
        "HubError: the repository is empty", "hub/test_hub.py::test_a_refused_first_push_leaves_it_empty"),
    "labels, names and a source's model card that contain Markdown, HTML or YAML": (
        "escaped", "hub/test_model_card.py::test_untrusted_text_stays_text"),
    "invalid settings of the image processor": (
        "CheckpointError", "hub/test_model_card.py::test_odd_settings_of_the_image_processor_get_an_error_of_our_own"),
    "names that are not UTF-8": (
        "printed with escapes", "hub/test_model_card.py::test_names_that_are_no_utf_8_convert_and_push"),
    "an invalid revision": ("HubError", "hub/test_hub.py::test_a_revision_that_cannot_be_is_named"),
    "`--private` for an existing public repository": (
        "HubError", "hub/test_hub.py::test_private_is_never_pushed_into_a_public_repository"),
}  # fmt: skip

DRAWING = {
    "dollar signs, underscores, control characters, 5,000 characters in a file name or a label": (
        "drawn literally, made printable and truncated",
        "analysis/test_words.py::test_every_picture_draws_names_as_they_are"),
    "characters that no installed font has": (
        "their code points, and a warning that names them",
        "analysis/test_words.py::test_characters_that_no_font_has_are_shown_as_code_points_and_reported"),
    "labels that are equal when truncated": (
        "made different", "analysis/test_words.py::test_labels_fit_and_differ"),
    "many photographs; a small file of very many pixels": (
        "200 MB on top of the process; DataError",
        "analysis/test_memory.py::test_memory_is_bounded_for_many_photographs_and_for_bombs"),
    "images that are truncated, damaged or have false headers; of every mode, orientation and number of frames": (
        "DataError, or drawn",
        "cli/test_generated_attack.py::test_a_generated_attack_ends_in_one_printable_message"),
    "features that are NaN, of several lengths, a grid or too many, a run that did not end (`browse`)": (
        "DataError, no page is left", "analysis/test_browse.py::test_tables_that_cannot_be_shown_are_refused"),
    "paths and labels that contain HTML or control characters (`browse`)": (
        "escaped, and made printable", "analysis/test_browse.py::test_any_text_comes_back_as_text_and_adds_no_element"),
    "pipes, devices, truncated and huge files among the images (`browse`)": (
        "named; the page shows the others",
        "analysis/test_browse.py::test_images_that_cannot_be_read_are_named_and_the_others_shown"),
    "a file that is not an image": (
        "DataError", "analysis/test_memory.py::test_a_file_that_is_no_image_is_refused_before_anything_is_drawn"),
}  # fmt: skip
ENVIRONMENT = {
    "an extra is not installed (modules, scripts, `show`)": (
        "MissingPackageError", "cli/test_extras.py::test_every_module_and_script_says_in_one_line_what_is_missing"),
    "a folder is named like the missing package": (
        "MissingPackageError", "cli/test_extras.py::test_a_folder_of_the_packages_name_is_not_the_package"),
}  # fmt: skip


COMMAND = {
    "an unknown command, option or choice, a missing argument": (
        "three lines with the nearest word, exit code 2",
        "cli/test_cli.py::test_help_and_mistakes_are_answered_at_once_without_torch"),
    "a path that is not there, a file that begins as no weights do": (
        "the error within 0.5 s of CPU time",
        "cli/test_cli.py::test_help_and_mistakes_are_answered_at_once_without_torch"),
    "two models of different sizes, NaN, or a difference above `--tolerance`": (
        "VerificationError", "cli/test_cli.py::test_verify_of_models_of_other_sizes_is_a_verdict"),
    "`--labels` of a device, a pipe, a folder": (
        "CheckpointError", "cli/test_cli.py::test_no_option_reads_a_special_file"),
    "an image that is a pipe or a device": ("DataError", "cli/test_cli.py::test_show_waits_at_no_pipe"),
    "labels that are not JSON, not UTF-8, not names, or lone surrogates": (
        "CheckpointError", "cli/test_cli.py::test_odd_names_of_labels_are_refused"),
    "impossible file names": (
        "CheckpointError", "cli/test_cli.py::test_a_name_that_cannot_be_is_no_fault"),
    "Ctrl-C while the package is imported": (
        "one line, exit code 130", "cli/test_cli.py::test_an_interrupt_while_the_package_is_imported_is_one_line"),
    "no memory, no permission, a full output": (
        "one line, exit code 1", "cli/test_cli.py::test_what_the_system_refuses_is_one_line"),
    "a terminal that cannot print a character, a closed pipe (`\\| head`)": (
        "no error", "cli/test_cli.py::test_a_terminal_without_a_letter_and_a_reader_who_leaves_are_no_faults"),
    "NaN, infinity, booleans, strings or 10**9 in a config": (
        "ValueError", "model/test_configuration.py::test_every_field_refuses_non_numbers_and_impossible_numbers"),
    "a count in a config that would use much memory": (
        "ValueError", "model/test_configuration.py::test_no_number_costs_memory_before_it_is_used"),
    "the same in an image processor": (
        "ValueError",
        "model/test_image_processing.py::test_a_setting_of_numbers_takes_no_others_from_a_file_or_a_caller"),
}  # fmt: skip


def page() -> str:
    """Return docs/reference/bad_inputs.md."""

    def rows(entries: dict[str, tuple[type[PlainViTError], str]]) -> list[str]:
        lines = ["| input | error | exit code | the message contains |", "|---|---|---|---|"]
        for title, (raises, says) in entries.items():
            said = re.sub(r"\\(.)", r"\1", says).replace("|", " or ")
            lines.append(f"| {title.replace('|', chr(92) + '|')} | {raises.__name__} | {raises.exit_code} | `{said}` |")
        return lines

    def elsewhere(entries: dict[str, tuple[str, str]]) -> list[str]:
        lines = ["| situation | result | test |", "|---|---|---|"]
        return lines + [f"| {what} | {outcome} | `tests/{test}` |" for what, (outcome, test) in entries.items()]

    files = {title: (bad.raises, bad.says) for title, bad in BAD_FILES.items()}
    models = {title: (bad.raises, bad.says) for title, bad in BAD_MODELS.items()}
    return "\n".join([
        "# Bad inputs and their errors",
        "",
        "Generated by `python -m tests.cli.test_bad_inputs` from the lists of the tests, which check each input in",
        "Python and on the command line. Nothing in a checkpoint is executed, nothing is written, existing files stay.",
        "`plain-vit` prints the message without a stack trace (`--debug` shows it) and exits with the exit code.",
        "",
        f"## Files ({len(files)})",
        "",
        *rows(files),
        "",
        f"## Models ({len(models)})",
        "",
        "The files are valid; tensors, settings or hints do not fit.",
        "",
        *rows(models),
        "",
        "In addition, files and settings are mutated at random (`tests/files/test_hostile_files.py`,",
        "`tests/sources/test_fuzzed_models.py`; a thousand of each kind in the nightly run): they open with the values",
        "they contain, or raise one of these errors. Eleven attack generators (`tests/cli/test_generated_attack.py`;",
        "2,220 draws in the nightly run), and files made to be as expensive as possible, each end with one printable",
        "message; a file under 10 MB takes at most 200 MB of memory and 10 seconds.",
        "",
        "## On the command line, and in settings",
        "",
        *elsewhere(COMMAND),
        "",
        "## While writing",
        "",
        *elsewhere(WRITING),
        "",
        "## On the Hub",
        "",
        *elsewhere(HUB),
        "",
        "## While drawing (`show`)",
        "",
        *elsewhere(DRAWING),
        "",
        "## Without a package",
        "",
        *elsewhere(ENVIRONMENT),
        "",
    ])  # fmt: skip


def test_the_page_of_bad_inputs_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.cli.test_bad_inputs`"


def test_the_tests_that_the_page_names_are_there() -> None:
    for _, test in itertools.chain(*(table.values() for table in (COMMAND, WRITING, HUB, DRAWING, ENVIRONMENT))):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test


if __name__ == "__main__":
    PAGE.write_text(page())
