"""Content of a push: the list of a model repository, over real HTTP; texts are searched, and pictures re-encoded."""

import io
import json
import os
import random
import time
import timeit
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image, PngImagePlugin

from plain_vit.errors import PushRefusedError
from plain_vit.hub import contents, push_folder
from plain_vit.hub.contents import look_into
from plain_vit.hub.search import secrets_in
from tests import ROOT
from tests.hub.endpoint import HubEndpoint
from tests.hub.planted import PICKLES, SECRETS, STATES, plant
from tests.hub.test_hub import REPO, WHOLE, save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "saved")


def secret(title: str, seed: int = 0) -> str:
    return SECRETS[title](random.Random(f"{title} {seed}"))


# ---- over HTTP ----


@pytest.mark.slow
def test_of_140_planted_files_none_is_sent_even_if_asked_for_by_its_path(hub: HubEndpoint, folder: Path) -> None:
    secrets = {f"notes/{number}.txt": secret(title).encode() for number, title in enumerate(SECRETS)}
    planted = {**secrets, **PICKLES, **STATES}
    assert len(planted) >= 140
    plant(folder, planted)
    with pytest.raises(PushRefusedError) as caught:
        push_folder(folder, REPO, include=list(planted))
    assert {fault.split(" ")[0] for fault in caught.value.faults} == set(planted)
    assert not hub.path(REPO, "model").exists()
    push = push_folder(folder, REPO)
    assert set(hub.files(REPO)) == WHOLE == set(push.sent)
    assert set(push.left_out) == set(planted)


@pytest.mark.slow
def test_a_secret_in_a_file_that_is_sent_refuses_the_push(hub: HubEndpoint, folder: Path) -> None:
    hidden = secret("Hugging Face token")
    config = json.loads((folder / "config.json").read_text())
    plants: dict[str, bytes] = {
        "README.md": f"# Mine\n\nRun it with {hidden}.\n".encode(),
        "config.json": json.dumps({**config, "id2label": {**config["id2label"], "0": hidden}}).encode(),
        "modeling_plain_vit.py": (folder / "modeling_plain_vit.py").read_bytes() + f"# {hidden}\n".encode(),
        "LICENSE": f"Apache\n{hidden}".encode("utf-8-sig"),
        "labels.txt": "\n".join(["ant", hidden, "bee"]).encode(),
    }
    plant(folder, plants)
    with pytest.raises(PushRefusedError) as caught:
        push_folder(folder, REPO)
    assert sorted(fault.split(" ")[0] for fault in caught.value.faults) == sorted(plants)
    assert hidden not in str(caught.value)
    assert not hub.path(REPO, "model").exists()


def test_the_command_and_the_message_of_the_commit_are_searched(hub: HubEndpoint, folder: Path) -> None:
    with pytest.raises(PushRefusedError, match="commit message"):
        push_folder(folder, REPO, message=f"with {secret('GitHub token')}")
    assert not hub.path(REPO, "model").exists()


@pytest.mark.slow
def test_secrets_of_the_environment_are_found_by_value(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    plant(folder, {"labels.txt": b"ant\n0123456789abcdef0123456789abcdef01234567\n"})
    with pytest.raises(PushRefusedError, match="a secret of this machine"):
        push_folder(folder, REPO, dry_run=True)
    plant(folder, {"labels.txt": b"ant hf_write\n"})
    with pytest.raises(PushRefusedError, match="a secret of this machine"):
        push_folder(folder, REPO, dry_run=True)


# ---- kinds ----


@pytest.mark.slow
def test_texts_that_are_asked_for_arrive_as_they_are(hub: HubEndpoint, folder: Path) -> None:
    texts = {f"notes/one{suffix}": "caf\u00e9\r\n\t1, 2\n".encode() for suffix in sorted(contents.TEXTS)}
    plant(folder, texts)
    push = push_folder(folder, REPO, include=list(texts))
    assert set(push.sent) == WHOLE | set(texts)
    assert {name: hub.files(REPO)[name] for name in texts} == texts


def test_a_text_that_is_too_long_to_be_searched_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(folder, {"labels.txt": b"ant\n" * 10_000})
    monkeypatch.setattr(contents, "LONGEST_TEXT", 39_999)
    with pytest.raises(PushRefusedError, match="labels.txt is a text of 40,000 bytes; expected at most 39,999"):
        push_folder(folder, REPO, dry_run=True)


@pytest.mark.slow
def test_a_report_is_sent_if_it_is_asked_for_and_said_to_hold_images(hub: HubEndpoint, folder: Path) -> None:
    names = [f"report/{name}.png" for name in ("curves", "mistakes", "attention", "positions_0")]
    for name in names:
        plant(folder, {name: pictures()["RGBA.png"]})
    page = b'<img src="data:image/png;base64,' + b"QUtJQQ" * 100 + b'" alt="x"><p>mine</p>'
    plant(folder, {"report/index.html": page, "report/other.html": b"x", "report/snapshots/0.npz": b"x"})
    push = push_folder(folder, REPO)
    assert set(hub.files(REPO)) == WHOLE
    assert {push.left_out[name] for name in (*names, "report/index.html")} == {
        "the report of the run: --include-report sends it"
    }
    assert not push.notes
    push = push_folder(folder, REPO, include_report=True)
    assert set(hub.files(REPO)) == WHOLE | {*names, "report/index.html"}
    assert hub.files(REPO)["report/index.html"] == page
    assert "it shows images of the dataset" in str(push)
    plant(folder, {"report/index.html": page + secret("Hugging Face token").encode()})
    with pytest.raises(PushRefusedError, match="index.html contains what looks like a token of Hugging Face"):
        push_folder(folder, REPO, include_report=True)


# ---- metadata ----


@pytest.mark.slow
def test_metadata_that_no_writer_sets_is_refused(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt", "author": "bob", "place": "x"})
    with pytest.raises(PushRefusedError, match="'author' in its metadata") as caught:
        push_folder(folder, REPO, dry_run=True)
    assert len(caught.value.faults) == 2
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": secret("npm token")})
    with pytest.raises(PushRefusedError, match="token of npm in its header"):
        push_folder(folder, REPO, dry_run=True)


def test_a_secret_is_found_in_the_names_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({secret("Slack token"): torch.ones(2)}, path)
    assert look_into(path, ()) == (path, ["contains what looks like a token of Slack in its header"])
    safetensors.torch.save_file({"a": torch.ones(2)}, path)
    assert look_into(path, ()) == (path, [])


def pictures() -> dict[str, bytes]:
    """Pictures of every kind that are saved, with a secret wherever a text fits."""
    draw = np.random.default_rng(0)
    hidden = secret("Hugging Face token")
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Comment", hidden)
    texts.add_text("Zipped", hidden, zip=True)
    texts.add_itxt("Note", hidden, "en", "Note", zip=True)
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x9286] = 6, hidden, hidden
    levels = {
        "L": draw.integers(0, 256, (13, 7), np.uint8), "LA": draw.integers(0, 256, (13, 7, 2), np.uint8),
        "RGB": draw.integers(0, 256, (13, 7, 3), np.uint8), "RGBA": draw.integers(0, 256, (13, 7, 4), np.uint8),
        "I;16": draw.integers(0, 2**16, (13, 7), np.uint16),
    }  # fmt: skip
    opened = {mode: Image.fromarray(array) for mode, array in levels.items()}
    opened |= {"P": opened["RGB"].quantize(5), "1": opened["L"].convert("1")}
    saved = {}

    def save(name: str, image: Image.Image, kind: str, **options: object) -> None:
        file = io.BytesIO()
        image.save(file, kind, **options)
        saved[name] = file.getvalue() + hidden.encode()

    icc = hidden.encode() * 4000
    for mode, image in opened.items():
        save(f"{mode}.png", image, "PNG", pnginfo=texts, exif=exif, icc_profile=icc)
    save("transparent.png", opened["P"], "PNG", pnginfo=texts, exif=exif, icc_profile=icc, transparency=2)
    for name, image in {"L": opened["L"], "RGB": opened["RGB"], "CMYK": opened["RGB"].convert("CMYK")}.items():
        for progressive in (False, True):
            save(f"{name}{progressive}.jpg", image, "JPEG", progressive=progressive, exif=exif, icc_profile=icc,
                 comment=hidden.encode(), restart_marker_blocks=1)  # fmt: skip
    return saved


@pytest.mark.slow
def test_pictures_arrive_upright_with_their_pixels_and_nothing_else(hub: HubEndpoint, folder: Path) -> None:
    saved = pictures()
    page = "# Mine\n" + "\n".join(f"![{name}](report/{name})" for name in saved)
    plant(folder, {"README.md": page.encode()})
    plant(folder, {f"report/{name}": data for name, data in saved.items()})
    push = push_folder(folder, REPO)
    assert set(push.reencoded) == {f"report/{name}" for name in saved}
    sent = hub.files(REPO)
    hidden = secret("Hugging Face token").encode()
    for name, data in saved.items():
        assert hidden[:12] not in sent[f"report/{name}"]
        after = Image.open(io.BytesIO(sent[f"report/{name}"]))
        after.load()
        assert not {"exif", "icc_profile", "comment", "Comment", "Zipped", "Note"} & set(after.info)
        before = Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_270)  # as its metadata says
        if name.endswith(".png"):
            mode = "RGBA" if name in ("P.png", "transparent.png") else after.mode
            assert np.array_equal(np.asarray(before.convert(mode)), np.asarray(after.convert(mode))), name
        else:  # JPEG loses a little of noise at quality 95
            difference = np.asarray(before, np.int16) - np.asarray(after, np.int16)
            assert before.mode == after.mode
            assert np.abs(difference).mean() < 4, name
        assert (folder / "report" / name).read_bytes() == data  # the folder stays as it is


@pytest.mark.slow
def test_what_is_no_single_picture_is_refused(folder: Path) -> None:
    saved = pictures()
    frames = [Image.new("RGB", (7, 13), color) for color in ("red", "blue")]
    frames[0].save(folder / "moving.png", save_all=True, append_images=frames[1:])
    Image.new("1", (8000, 7000)).save(folder / "large.png")
    plant(folder, {"cut.png": saved["RGB.png"][:150], "cut.jpg": saved["RGBFalse.jpg"][:200], "x.jpg": saved["L.png"]})
    names = ["moving.png", "large.png", "cut.png", "cut.jpg", "x.jpg"]
    with pytest.raises(PushRefusedError) as caught:
        push_folder(folder, REPO, dry_run=True, include=names)
    faults = {fault.split()[0]: fault for fault in caught.value.faults}
    assert set(faults) == set(names)
    assert "it is animated" in faults["moving.png"]
    assert "8000 x 7000 pixels; expected at most 50,000,000" in faults["large.png"]


def test_a_damaged_picture_is_refused_and_never_an_error_of_its_own(tmp_path: Path) -> None:
    saved = pictures()
    draw = random.Random(0)
    for _ in range(200):
        name = draw.choice(list(saved))
        data = bytearray(saved[name][:-37])
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        del data[draw.randrange(len(data), len(data) + 200) :]
        path = tmp_path / f"picture{Path(name).suffix}"
        path.write_bytes(data)
        content, faults = look_into(path, ())
        assert isinstance(content, bytes) or faults


# ---- what counts as a secret ----

AROUND = {"": "", "my_": "", "x": " ", "'": "'", '{"a": "': '"}', "**": "**", "a line\n": "\nanother", "<b>": "</b>"}


@pytest.mark.slow(
    quick=["GitHub token", "AWS secret", "Groq key", "Weights and Biases code", "Stripe key", "address with a password"]
)
@pytest.mark.parametrize("title", SECRETS)
def test_a_secret_is_found_whatever_stands_around_it(title: str) -> None:
    for seed in range(30):
        hidden = secret(title, seed)
        before, after = random.Random(seed).choice(list(AROUND.items()))
        prose = "The model sees 16 x 16 patches, & 0.5.\n" * random.Random(seed).randrange(40)
        found = secrets_in(prose + before + hidden + after)
        assert found, (seed, before)
        assert all(hidden not in kind for _, kind in found)


def test_the_line_of_a_secret_is_named() -> None:
    lines = ["-" * 99] * 50
    for kind in ("AWS key id", "password of a file"):
        for place in (0, 7, 49):
            found = secrets_in("\n".join([*lines[:place], secret(kind), *lines[place:]]))
            assert [line for line, _ in found] == [place + 1]
    long = "-" * 5000  # read in pieces
    assert secrets_in(f"\n{long} {secret('password of a file')} {long}")[0][0] == 2


# Texts on which a search may take time that grows with the square of their length.
REPEATED = {
    "spaces": " ", "letters": "a", "headers of tokens": "eyJ", "headers and dashes": "eyJ-", "addresses": "://a:",
    "names": "token=", "parts of names": "pass_", "quotes": '"auth":"', "pictures": "data:image/png;base64,",
    "keys": "-----BEGIN A ", "npm": "//a/:_auth", "lines": "\n", "short lines": "a" * 32 + "\n",
    "words in base64": "QUJDREVGR0hJSktMTU5P ", "lines of base64": "QUJD" * 19 + "\n", "base64": "QUJD",
    "ends of lines": "\\n", "long words": "a" * 79 + " ", "passwords": "'password\":'", "named": "password: ",
    "logins": "wandb.login(", "variables": "A_KEY=", "wide": "\uff41", "openai": "sk-", "slack": "xoxb-1-",
}  # fmt: skip


@pytest.mark.slow(quick=["slack"])
@pytest.mark.parametrize("name", REPEATED)
def test_searching_a_text_takes_time_in_proportion_to_it(name: str, tmp_path: Path) -> None:
    seconds = []
    secrets_in("what is imported and compiled once")
    for size in (12_500, 100_000):
        path = tmp_path / str(size) / "LICENSE"
        path.parent.mkdir()
        path.write_text((REPEATED[name] * size)[:size], encoding="utf-8")
        seconds.append(min(timeit.repeat(partial(look_into, path, ()), timer=time.process_time, number=1, repeat=2)))
    assert seconds[1] < 20 * seconds[0] + 0.2  # 8 times as long; by each pair of places it would be 64 times


@pytest.mark.slow
def test_ordinary_texts_hold_no_secret() -> None:
    code = [*ROOT.glob("plain_vit/*.py"), *ROOT.glob("plain_vit/hub/*.py")]
    for path in (ROOT / "README.md", ROOT / "LICENSE", *ROOT.glob("docs/**/*.md"), *code):
        assert look_into(path, ())[1] == [], path
    for text in (
        "hf_ is how a token begins; set HF_TOKEN=hf_xxx or api_key=$KEY, password: required, secret = None",
        "cls_token: model-00001-of-00006.safetensors", 'token="YOUR_TOKEN"', "num_register_tokens=4",
        "self.mask_token = nn.Parameter(torch.zeros(1, 1, 768))", "https://huggingface.co/google/vit-base-patch16-224",
        "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "ant, secretary bird, keyboard",
        '{"key": "abc", "cache_key": "9f86d081884c7d659a2feaa0c55ad015"}', "key: 9f86d081884c7d659a2feaa0c55ad015",
        "wandb @ git+https://github.com/wandb/wandb@9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "IMAGE_KEY = 'image_1'",
        'SSH_PUBLIC_KEY="AAAAC3NzaC1lZDI1NTE5AAAAIJ7m2k1vQ"', "login() works: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "password: str", "- Password: the one of your account", "--password PASSWORD", "`--password option`",
        '{"secretary": 12, "secret": 3, "1": "secretary bird"}', "task-aware-vision-transformer-with-more-words",
        "coco_instances_val2017_results_of_the_model", json.dumps({"0": "ACGT" * 30}), ("-" * 300 + "\n") * 9,
        ("-" * 80 + "\n") * 9, "secret: a class of images of secrets, password: required, with words",
    ):  # fmt: skip
        assert secrets_in(text) == [], text


@pytest.mark.slow
def test_a_page_of_other_people_may_show_only_pictures_of_the_folder(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "outside.png")
    Image.new("RGB", (3, 2)).save(folder / "mine.png")
    Image.new("RGB", (3, 2)).save(folder / "other.png")
    (folder / ".cache").mkdir()
    Image.new("RGB", (3, 2)).save(folder / ".cache" / "run.png")
    os.symlink(tmp_path / "outside.png", folder / "link.png")
    shown = ("../outside.png", "/etc/passwd", "mine.png", ".cache/run.png", "notes.txt", "https://example.org/x.png")
    (folder / "notes.txt").write_text("x")
    (folder / "README.md").write_text("# Mine\n" + "\n".join(f"![x]({name})" for name in shown))
    assert set(push_folder(folder, REPO, dry_run=True).sent) == WHOLE | {"mine.png"}
    (folder / "README.md").write_text('# Mine\n<img width="3" src="link.png">\n')
    with pytest.raises(PushRefusedError, match="a link out of the folder"):
        push_folder(folder, REPO, dry_run=True)
