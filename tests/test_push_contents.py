"""Content of a push: planted secrets, pickles and training states are not uploaded, over real HTTP, in any encoding."""

import base64
import html
import io
import json
import os
import random
import re
import string
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image, PngImagePlugin

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.errors import PushRefusedError
from plain_vit.hub import files, push_folder, search
from plain_vit.hub.anchors import lower
from plain_vit.hub.files import look_into
from plain_vit.hub.pickles import is_pickle
from plain_vit.hub.pictures import NotAPicture, without_metadata
from plain_vit.hub.search import secrets_in
from tests.hub_endpoint import HubEndpoint
from tests.planted import PICKLES, SECRETS, STATES, plant
from tests.tiny import tiny_config

REPO = "alice/model"
WHOLE = {
    "README.md", "config.json", "model.safetensors", "preprocessor_config.json", "configuration_plain_vit.py",
    "attention_plain_vit.py", "heads_plain_vit.py", "layers_plain_vit.py", "modeling_plain_vit.py",
    "packed_plain_vit.py", "positions_plain_vit.py", "image_processing_plain_vit.py",
}  # fmt: skip
ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    PlainViTForImageClassification(tiny_config()).save_pretrained(folder)
    PlainViTImageProcessor(size={"height": 24, "width": 56}).save_pretrained(folder)
    return folder


def secret(title: str, seed: int = 0) -> str:
    return SECRETS[title](random.Random(f"{title} {seed}"))


# ---- over HTTP ----


def test_of_140_planted_files_none_is_sent_and_none_goes_by_its_path(hub: HubEndpoint, folder: Path) -> None:
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


def test_a_secret_in_a_file_that_is_sent_refuses_the_push(hub: HubEndpoint, folder: Path) -> None:
    kept = {name: (folder / name).read_bytes() for name in WHOLE - {"README.md"}}
    hidden = secret("Hugging Face token")
    config = json.loads(kept["config.json"])
    plants: dict[str, bytes] = {
        "README.md": f"# Mine\n\nRun it with {hidden}.\n".encode(),
        "config.json": json.dumps({**config, "id2label": {**config["id2label"], "0": hidden}}).encode(),
        "modeling_plain_vit.py": kept["modeling_plain_vit.py"] + f"# {hidden}\n".encode(),
        "LICENSE": f"Apache\n{hidden}".encode("utf-16"),
        "labels.txt": "\n".join(["ant", hidden, "bee"]).encode(),
        "report/index.html": f"<p>{html.escape(hidden)}</p>".encode(),
    }
    for name, data in plants.items():
        plant(folder, {name: data})
        with pytest.raises(PushRefusedError) as caught:
            push_folder(folder, REPO)
        assert [fault.split(" ")[0] for fault in caught.value.faults] == [name]
        assert hidden not in str(caught.value)
        (folder / name).unlink()
        plant(folder, {name: kept[name]} if name in kept else {})
    assert not hub.path(REPO, "model").exists()


def test_the_command_and_the_message_of_the_commit_are_searched(hub: HubEndpoint, folder: Path) -> None:
    with pytest.raises(PushRefusedError, match="commit message"):
        push_folder(folder, REPO, message=f"with {secret('GitHub token')}")
    assert not hub.path(REPO, "model").exists()


def test_secrets_of_the_environment_are_found_by_value(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    plant(folder, {"labels.txt": b"ant\n0123456789abcdef0123456789abcdef01234567\n"})
    with pytest.raises(PushRefusedError, match="a secret of this machine"):
        push_folder(folder, REPO, dry_run=True)
    plant(folder, {"labels.txt": b"ant hf_write\n"})
    with pytest.raises(PushRefusedError, match="a secret of this machine"):
        push_folder(folder, REPO, dry_run=True)


# ---- metadata ----


def test_metadata_of_weights_is_refused_unless_the_key_is_named(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt", "author": "bob", "place": "x"})
    with pytest.raises(PushRefusedError, match="'author' in its metadata") as caught:
        push_folder(folder, REPO, dry_run=True, include=["model.safetensors:place"])
    assert len(caught.value.faults) == 1
    push_folder(folder, REPO, dry_run=True, include=["model.safetensors:place", "model.safetensors:author"])
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": secret("npm token")})
    for include in ([], ["model.safetensors:format"]):
        with pytest.raises(PushRefusedError, match="token of npm in its header"):
            push_folder(folder, REPO, dry_run=True, include=include)


def test_a_secret_is_found_in_the_names_and_in_the_bytes_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    noise = np.random.default_rng(0).normal(size=5_000_000).astype(np.float32)
    safetensors.torch.save_file({secret("Slack token"): torch.ones(2)}, path)
    assert look_into(path, known=()).faults
    safetensors.torch.save_file({"a": torch.from_numpy(noise)}, path)
    assert look_into(path, known=()).faults == []
    data = np.frombuffer(secret("Hugging Face token").encode(), np.uint8)
    for place in (0, 7, 16 * 2**20 - 100, 16 * 2**20 - 20, noise.nbytes - len(data)):
        planted = noise.copy()
        planted.view(np.uint8)[place : place + len(data)] = data
        safetensors.torch.save_file({"a": torch.from_numpy(planted)}, path)
        assert look_into(path, known=()).faults == ["contains a token of Hugging Face in its tensors"]
    safetensors.torch.save_file({"exp_avg": torch.ones(2)}, path)
    assert "a training state" in look_into(path, known=()).faults[0]


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
    frames = [Image.fromarray(draw.integers(0, 256, (13, 7, 3), np.uint8)) for _ in range(2)]
    save("moving.png", opened["RGB"], "PNG", save_all=True, append_images=frames, pnginfo=texts)
    for name, image in {"L": opened["L"], "RGB": opened["RGB"], "CMYK": opened["RGB"].convert("CMYK")}.items():
        for progressive in (False, True):
            save(f"{name}{progressive}.jpg", image, "JPEG", progressive=progressive, exif=exif, icc_profile=icc,
                 comment=hidden.encode(), restart_marker_blocks=1)  # fmt: skip
    return saved


def test_pictures_lose_their_metadata_and_no_pixel(hub: HubEndpoint, folder: Path) -> None:
    saved = pictures()
    page = "# Mine\n" + "\n".join(f"![{name}](report/{name})" for name in saved)
    inside = base64.b64encode(saved["RGB.png"]).decode()
    report = f'<img src="data:image/png;base64,{inside}" alt="x">'.encode()
    plant(folder, {"README.md": page.encode(), "report/index.html": report})
    plant(folder, {f"report/{name}": data for name, data in saved.items()})
    push = push_folder(folder, REPO)
    assert set(push.cleaned) == {f"report/{name}" for name in [*saved, "index.html"]}
    sent = hub.files(REPO)
    hidden = secret("Hugging Face token").encode()
    for name, data in saved.items():
        clean = sent[f"report/{name}"]
        assert hidden[:12] not in clean
        before, after = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(clean))
        for frame in range(getattr(before, "n_frames", 1)):
            before.seek(frame)
            after.seek(frame)
            assert (before.mode, before.size, before.tobytes()) == (after.mode, after.size, after.tobytes())
        assert before.getexif().get(0x0112) == after.getexif().get(0x0112)
        assert set(after.getexif()) <= {0x0112}
        assert without_metadata(clean) == clean
        assert (folder / "report" / name).read_bytes() == data  # the folder stays as it is
    inside = sent["report/index.html"].decode().split("base64,")[1].split('"')[0]
    assert base64.b64decode(inside) == sent["report/RGB.png"]


def notebook(mime: str, data: bytes, encode: Callable[[bytes], bytes] = base64.b64encode) -> str:
    """A notebook whose cell shows a file."""
    output = {"output_type": "display_data", "metadata": {}, "data": {mime: encode(data).decode(), "text/plain": ["x"]}}
    return json.dumps({"cells": [{"cell_type": "code", "metadata": {}, "outputs": [output]}], "nbformat": 4}, indent=1)


CONTAINERS: dict[str, Callable[[str, bytes], str]] = {
    "an output": notebook,
    "an output in lines": lambda mime, data: notebook(mime, data, base64.encodebytes),
    "an address": lambda mime, data: f'<img src="DATA:{mime};charset=utf-8;base64,{base64.b64encode(data).decode()}">',
    "an address in lines": lambda mime, data: f'<img src="data:{mime};base64,\n{base64.encodebytes(data).decode()}">',
    "an address of letters for addresses": lambda mime, data: (
        f"![x](data:{mime};base64,{base64.urlsafe_b64encode(data).decode()}) and more"
    ),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_files_in_base64_lose_their_metadata_or_are_refused(container: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.ipynb"
    saved, contain = pictures(), CONTAINERS[container]
    for name, kind in {"RGB.png": "png", "RGBFalse.jpg": "jpeg"}.items():
        data = saved[name].removesuffix(secret("Hugging Face token").encode())
        path.write_text(contain(f"image/{kind}", data))
        looked = look_into(path, known=())
        assert (looked.faults, looked.cleaned) == ([], True)
        clean = contain(f"image/{kind}", without_metadata(data))
        assert isinstance(looked.content, bytes)
        assert re.sub(r"\\n|\s", "", looked.content.decode()) == re.sub(r"\\n|\s", "", clean)  # now in one line
        path.write_text(clean)
        assert look_into(path, known=()) == files.Looked(clean.encode())
        path.write_text(contain(f"image/{kind}", data[: len(data) // 2]))
        assert "an image that cannot be inspected" in look_into(path, known=()).faults[0]
    for mime, data in OTHER_FILES.items():
        path.write_text(contain(mime, data))
        assert f"contains {mime} in base64" in look_into(path, known=()).faults[0]


def saved_as(kind: str) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x010F] = "somewhere"
    Image.new("RGB", (13, 7)).save(file, kind, exif=exif)
    return file.getvalue().ljust(200, b"\xff")


OTHER_FILES = {
    **{f"image/{kind}": saved_as(kind) for kind in ("webp", "gif", "tiff", "bmp")},
    "application/pdf": b"%PDF-1.4\n%\xe2\xe3\n" + bytes(range(256)),
    "font/woff2": b"wOF2" + bytes(range(256)),
    "application/octet-stream": bytes(range(256)),
}


def test_texts_and_examples_in_base64_are_no_files(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    drawing = base64.b64encode("<svg><text>clé</text></svg>".encode() * 9).decode()
    for text in (
        f'<img src="data:image/svg+xml;base64,{drawing}">', f'{{"image/svg+xml": "{drawing}"}}',
        '{"image/png": "iVBORw0KGgo...", "image/jpeg": ".jpg", "text/plain": "' + "ACGT" * 50 + '"}',
        "data:image/png;base64,... and data:image/webp;base64,${data} and `data:image/jpeg;base64,/9j/4AAQ`",
        "<img src='data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7'>",
        json.dumps({"data/a.bin": "9f86d081884c7d65" * 8, "application/x": "9f86d081884c7d65" * 8}),
        json.dumps({"user/name": "supercalifragilisticexpialidocious" * 3, "image/name": "cat"}),
        json.dumps({"values": base64.b64encode(np.random.default_rng(0).normal(size=300).tobytes()).decode()}),
    ):  # fmt: skip
        path.write_text(text)
        assert look_into(path, known=()) == files.Looked(text.encode())
    data = saved_as("png")
    for text in (base64.b64encode(data).decode(), "\\/".join(re.findall(".{1,50}", base64.b64encode(data).decode()))):
        path.write_text(f"image: {text}")  # without anything that says what it is
        looked = look_into(path, known=())
        assert looked.faults or b"somewhere" not in base64.b64decode(looked.content[7:])


def test_a_damaged_picture_is_refused_and_never_an_error_of_its_own() -> None:
    saved = pictures()
    draw = random.Random(0)
    for _ in range(300):
        data = bytearray(saved[draw.choice(list(saved))][:-37])
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        del data[draw.randrange(len(data), len(data) + 200) :]
        try:
            clean = without_metadata(bytes(data))
        except NotAPicture:
            continue
        assert without_metadata(clean) == clean


# ---- what counts as a secret ----

CARRIERS: dict[str, Callable[[str], bytes]] = {
    "as it is": str.encode,
    "after a mark": lambda text: text.encode("utf-8-sig"),
    "in UTF-16": lambda text: text.encode("utf-16"),
    "in UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "in big-endian UTF-16 without a mark": lambda text: text.encode("utf-16-be"),
    "in UTF-32": lambda text: text.encode("utf-32"),
    "in JSON": lambda text: json.dumps({"text": text}).encode(),
    "in JSON in JSON": lambda text: json.dumps({"text": json.dumps({"text": text})}).encode(),
    "in JSON, escaped": lambda text: b'{"text": "' + "".join(f"\\u{ord(char):04x}" for char in text).encode() + b'"}',
    "in HTML": lambda text: f"<p>{html.escape(text)}</p>".encode(),
    "in HTML, by numbers": lambda text: "".join(f"&#{ord(char)};" for char in text).encode(),
    "percent-encoded": lambda text: "".join(f"%{ord(char):02X}" for char in text).encode(),
    "in base64": lambda text: b"see " + base64.b64encode(text.encode()),
    "in base64 twice": lambda text: base64.b64encode(base64.b64encode(text.encode())),
    "in base64, in lines": lambda text: base64.encodebytes(f"{'x' * (len(text) % 57)} {text}".encode()),
    "in base64, in lines of a string": lambda text: json.dumps(base64.encodebytes(text.encode()).decode()).encode(),
    "in base64, in a list of lines": lambda text: json.dumps(
        base64.encodebytes(b"x " * 23 + text.encode()).decode().splitlines(keepends=True), indent=1
    ).encode(),
    "in base64 after a word": lambda text: b"image-of-the-day/" + base64.urlsafe_b64encode(text.encode()),
    "in base64, with accents": lambda text: base64.b64encode(f"clé d\u2019accès: é\n{text}\né".encode()),
    "in base64, in UTF-16 with accents": lambda text: base64.b64encode(f"clé: é\n{text}\né".encode("utf-16")),
    "in base64, among bytes": lambda text: base64.b64encode(b"\0\1\xff\n" + text.encode() + b"\n\0\xfe"),
    "in hexadecimal": lambda text: text.encode().hex().encode(),
    "in hexadecimal, in lines": lambda text: text.encode().hex(" ", 1).replace(" 2", "\n2").encode(),
    "in numbers in hexadecimal": lambda text: ", ".join(f"0x{each:02x}" for each in text.encode()).encode(),
    "with invisible characters": lambda text: "\u200b".join(text).encode(),
    "in wide characters": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text).encode(),
}
SUFFIXES = (".md", ".txt", ".json", ".html", ".py", ".yaml", "")
WORDS = ["the", "model", "sees", "ant", "and", "16 x 16", "pixels", "(224, 0.5)", "-", "#", "*", "|", "&", "é", "花"]


def planted_anywhere(seed: int) -> tuple[str, str, bytes]:
    """Return which secret, how it is written, and a text with it somewhere in it."""
    draw = random.Random(seed)
    title, carrier = draw.choice(list(SECRETS)), draw.choice(list(CARRIERS))
    words = " ".join(draw.choices(WORDS, k=draw.choice((0, 3, 50, 2000)))).encode()
    if "UTF" in carrier or "JSON" in carrier:
        around = words.decode()
        return title, carrier, CARRIERS[carrier](f"{around}\n{secret(title, seed)}\n{around}")
    return title, carrier, words + b"\n" + CARRIERS[carrier](secret(title, seed)) + b"\n" + words


def check_draws(tmp_path: Path, draws: range) -> None:
    for seed in draws:
        title, carrier, data = planted_anywhere(seed)
        path = tmp_path / f"file{random.Random(seed).choice(SUFFIXES)}"
        path.write_bytes(data)
        assert look_into(path, known=()).faults, f"draw {seed}: {title} {carrier}"


def test_a_secret_is_found_wherever_it_is_and_however_it_is_written(tmp_path: Path) -> None:
    check_draws(tmp_path, range(200))


def test_around_its_words_a_rule_finds_what_it_finds_in_the_whole_text() -> None:
    for seed in range(60):
        text = "\n".join(secret(title, seed) + " " * seed + "x" * seed for title in SECRETS) + "-" * 3000
        lowered = lower(text)
        assert len(lowered) == len(text)
        for kind, rule, anchors in search._rules():
            whole = [match.span() for match in rule.finditer(text)]
            regions = list(anchors.regions(text, lowered))
            assert [match.span() for place in regions for match in rule.finditer(text, *place)] == whole, kind
        for plugin, patterns in search._plugins():
            regions = [place for anchors in patterns for place in anchors.regions(text, lowered)]
            found = {value for start, end in regions for value in plugin.analyze_string(text[start:end])}
            assert found == set(plugin.analyze_string(text)), plugin.secret_type


def test_every_rule_has_words() -> None:
    without = [kind for kind, _, anchors in search._rules() if anchors.words is None]
    without += [plugin.secret_type for plugin, patterns in search._plugins() for each in patterns if each.words is None]
    assert without == []
    assert len(search._plugins()) > 15


# Texts on which a search may take time that grows with the square of their length.
REPEATED = {
    "spaces": " ", "letters": "a", "headers of tokens": "eyJ", "headers and dashes": "eyJ-", "addresses": "://a:",
    "names": "token=", "parts of names": "pass_", "quotes": '"auth":"', "escapes": "\\u0041", "markup": "![a",
    "pictures": "data:image/png;base64,", "commands": "curl ", "logins": "machine a login b ", "percent": "%41",
    "entities": "&#65;", "keys": "-----BEGIN A ", "hexadecimal": "00 ", "npm": "//a/:_auth", "lines": "\n",
    "words in base64": "QUJDREVGR0hJSktMTU5P ", "lines of base64": "QUJD" * 19 + "\n", "base64": "QUJD",
    "ends of lines": "\\n", "short lines": "a" * 32 + "\n", "long words": "a" * 79 + " ", "files": "data:a/b;base64,",
    "starts of files": "data:", "keys of files": '"a/b": "', "passwords": "'password\":'", "options": "--password ",
    "users": "username.-", "logins in code": "login(", "bytes": "0x00, ", "variables": "A_KEY=",
    "wide": "\uff41", "invisible": "a\u200b", "brackets": '{"', "openai": "sk-", "slack": "xoxb-1-",
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_searching_a_text_takes_time_in_proportion_to_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "LICENSE"
    path.write_text((REPEATED[name] * 200_000)[:200_000], encoding="utf-8")
    look_into(path, known=())  # what is compiled once
    started = time.process_time()
    look_into(path, known=())
    assert time.process_time() - started < 1.5


def test_base64_in_a_string_is_decoded_once_and_its_texts_searched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, calls = random.Random(0), Counter[str]()
    for name in ("from_base64", "_in_plain"):
        function = getattr(search, name)
        monkeypatch.setattr(search, name, lambda *args, name=name, do=function: calls.update([name]) or do(*args))
    lines = base64.encodebytes("".join(draw.choices(string.ascii_lowercase + " ", k=20_000)).encode()).decode()
    counts = []
    for text in (lines, json.dumps({"a": lines}), json.dumps(json.dumps({"a": lines.replace("\n", "\r\n")}))):
        calls.clear()
        assert secrets_in(text) == []
        assert calls["_in_plain"] < 40  # of 351 lines
        counts.append(calls["from_base64"])
    assert max(counts) < 1.1 * counts[0]
    noted = base64.encodebytes(b"x" * 57 + f"password: {secret('Hugging Face token')}".encode()).decode()
    assert secrets_in(json.dumps({"a": noted}, indent=1))[0][0] == 2  # the line of the string


@pytest.mark.slow
def test_a_text_of_64_megabytes_is_searched_in_half_a_minute(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randrange(2, 10))) for _ in range(3000)]
    lines = [" ".join(draw.choices(words, k=12)) + "\n" for _ in range(10_000)]
    path = tmp_path / "LICENSE"
    path.write_text("".join(draw.choices(lines, k=900_000)) + secret("AWS key id"))
    assert 55e6 < path.stat().st_size < 70e6
    started = time.process_time()
    assert look_into(path, known=()).faults
    assert time.process_time() - started < 30


@pytest.mark.slow
def test_a_secret_is_found_in_thousands_of_draws(tmp_path: Path) -> None:
    check_draws(tmp_path, range(200, 4200))


def test_a_text_is_searched_whole_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "KEPT_BYTES", 50_000)  # of a longer one it reads pieces
    monkeypatch.setattr(files, "READ_BYTES", 30_000)
    hidden = secret("AWS key id")
    for encoding in ("utf-8", "utf-16-le"):
        for place in (0, 299, 301, 799):
            lines = ["-" * 99] * 800
            lines[place] = f"key {hidden}"
            (tmp_path / "LICENSE").write_text("\n".join(lines), encoding=encoding)
            found = look_into(tmp_path / "LICENSE", known=()).faults
            assert len(found) == 1
            assert f"(line {place + 1})" in found[0]
    (tmp_path / "LICENSE").write_bytes(b"-" * 60_000 + b"\0")
    assert "cannot be inspected" in look_into(tmp_path / "LICENSE", known=()).faults[0]


def test_ordinary_texts_hold_no_secret() -> None:
    for path in (ROOT / "README.md", ROOT / "LICENSE", *ROOT.glob("docs/*.md"), *ROOT.glob("plain_vit/*.py")):
        assert secrets_in(path.read_text(encoding="utf-8")) == [], path
    for text in (
        "hf_ is how a token begins; set HF_TOKEN=hf_xxx or api_key=$KEY, password: required, secret = None",
        "cls_token: model-00001-of-00006.safetensors", 'token="YOUR_TOKEN"', "num_register_tokens=4",
        "self.mask_token = nn.Parameter(torch.zeros(1, 1, 768))", "https://huggingface.co/google/vit-base-patch16-224",
        "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "ant, secretary bird, keyboard",
        '{"key": "abc", "cache_key": "9f86d081884c7d659a2feaa0c55ad015"}', "key: 9f86d081884c7d659a2feaa0c55ad015",
        "wandb @ git+https://github.com/wandb/wandb@9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "IMAGE_KEY = 'image_1'",
        'SSH_PUBLIC_KEY="AAAAC3NzaC1lZDI1NTE5AAAAIJ7m2k1vQ"', "login() works: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "password: str", "password: SecretStr", "password: userPassword", "password = user_password",
        '{"password": "new-password", "passed": "first-second"}', "- Password: the one of your account",
        "--password PASSWORD", "`--password option`", '["password", "username1"]',
    ):  # fmt: skip
        assert secrets_in(text) == [], text


def test_labels_and_prose_are_no_pickles_and_pickles_are() -> None:
    draw = random.Random(0)
    letters = string.ascii_letters + string.digits + " ,()[]{}'-"
    for _ in range(3000):
        lines = ["".join(draw.choices(letters, k=draw.randrange(1, 20))) for _ in range(draw.randrange(1, 30))]
        assert not is_pickle("\n".join(lines).encode()), lines
    for name, data in PICKLES.items():
        if name.startswith(("protocol", "call", "text", "word", "old_style", "MODEL")):
            assert is_pickle(data), name
            assert is_pickle(data + b"\n"), name


def test_a_page_of_other_people_may_show_only_pictures_of_the_folder(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "outside.png")
    Image.new("RGB", (3, 2)).save(folder / "mine.png")
    Image.new("RGB", (3, 2)).save(folder / "other.png")
    (folder / "wandb").mkdir()
    Image.new("RGB", (3, 2)).save(folder / "wandb" / "run.png")
    os.symlink(tmp_path / "outside.png", folder / "link.png")
    shown = ("../outside.png", "/etc/passwd", "mine.png", "wandb/run.png", "notes.txt", "https://example.org/x.png")
    (folder / "notes.txt").write_text("x")
    (folder / "README.md").write_text("# Mine\n" + "\n".join(f"![x]({name})" for name in shown))
    assert set(push_folder(folder, REPO, dry_run=True).sent) == WHOLE | {"mine.png"}
    (folder / "README.md").write_text('# Mine\n<img width="3" src="link.png">\n')
    with pytest.raises(PushRefusedError, match="a link out of the folder"):
        push_folder(folder, REPO, dry_run=True)


def test_every_letter_that_a_rule_ignoring_case_matches_is_found_as_the_same_letter() -> None:
    characters = [chr(code) for code in range(0x110000) if re.match("[a-z]", chr(code), re.IGNORECASE)]
    assert len(characters) > 52  # not only the letters of ASCII
    for character in characters:
        assert re.fullmatch(lower(character), character, re.IGNORECASE)
        assert "a" <= lower(character) <= "z"
