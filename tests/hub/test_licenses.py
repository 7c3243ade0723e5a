"""Licence files of a source are saved with the weights; other files with the same name are not."""

import os
import warnings
from pathlib import Path

import pytest
import timm
import torch
import vit_pytorch
from huggingface_hub import snapshot_download

from plain_vit.files.kinds import MAX_HEADER_BYTES
from plain_vit.hub import push_folder
from plain_vit.hub.licenses import MOST_FILES, copy_license_files
from plain_vit_command import main
from tests.hub.endpoint import HubEndpoint

TEXTS = {
    "LICENSE": b"Permission is granted\x0c\r\nto \xc3\xa9veryone.\n",
    "LICENCE.md": b"# Licence\n",
    "COPYING.txt": b"\xef\xbb\xbfThe GNU licence\n",
    "NOTICE": b"Made by bob\n",
    "LICENSE-weights.txt": b"Weights\n",
}
OTHERS = {"LICENSE.py": b"raise SystemExit", "LICENSE.safetensors": b"x", "NOTICED": b"x", "license.zip": b"PK"}


def save_source(folder: Path) -> Path:
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, num_heads=3, depth=1, num_classes=2)
    timm.models.save_for_hf(module, folder, safe_serialization=True)
    for name, content in (TEXTS | OTHERS).items():
        (folder / name).write_bytes(content)
    return folder


def texts_in(folder: Path) -> dict[str, bytes]:
    names = (name for name in os.listdir(folder) if name.upper().startswith(("LICEN", "COPYING", "NOTICE")))
    return {name: (folder / name).read_bytes() for name in names}


def convert(source: Path | str, out: Path, *more: str) -> dict[str, bytes]:
    assert main(["convert", str(source), str(out), "--no-verify", *more]) == 0
    return texts_in(out)


@pytest.mark.slow
def test_licence_files_of_a_folder_and_of_a_hub_repository_go_with_the_weights(
    hub: HubEndpoint, tmp_path: Path
) -> None:
    source = save_source(tmp_path / "source")
    assert convert(source, tmp_path / "from folder") == TEXTS
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.add_repository("bob/vit", files=files)
    assert convert("bob/vit", tmp_path / "from hub") == TEXTS
    assert convert(snapshot_download("bob/vit"), tmp_path / "from cache") == TEXTS
    assert convert(tmp_path / "from hub", tmp_path / "again") == TEXTS
    bare = vit_pytorch.ViT(image_size=24, patch_size=8, num_classes=5, dim=20, depth=1, heads=3, mlp_dim=24)
    torch.save(bare.state_dict(), source / "bare.pt")
    hints = ["--num-attention-heads", "3", "--image-size", "24", "--patch-size", "8"]
    assert convert(source / "bare.pt", tmp_path / "from file", *hints) == {}  # others may belong to another model
    push_folder(tmp_path / "from hub", "alice/vit")
    sent = hub.files("alice/vit")
    assert {name: sent[name] for name in TEXTS} == TEXTS
    card = sent["README.md"].decode()
    assert "[LICENSE](LICENSE)" in card
    assert "No licence of the weights is stated" not in card


@pytest.mark.filterwarnings("default::UserWarning")
def test_force_replaces_a_folder_whose_licence_stays_the_same_and_keeps_one_that_would_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = save_source(tmp_path / "source")
    out = tmp_path / "out"
    convert(source, out)
    convert(source, out, "--force")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    (out / "LICENSE").write_text("another one, written by hand")
    convert(source, out, "--force")
    assert "not written by plain-vit ('LICENSE')" in capsys.readouterr().err
    assert (tmp_path / "out.kept-1" / "LICENSE").read_text() == "another one, written by hand"
    assert texts_in(out) == TEXTS


def test_only_short_texts_inside_the_folder_are_copied_and_the_rest_is_said(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (tmp_path / "private.txt").write_text("private")
    (source / "LICENSE").symlink_to(tmp_path / "private.txt")
    (source / "LICENSE.md").symlink_to("LICENSE.md")
    (source / "LICENSE.txt").symlink_to("/dev/zero")
    (source / "LICENSE.rst").mkdir()
    os.mkfifo(source / "NOTICE")
    (source / "NOTICE.txt").symlink_to("gone")
    with (source / "NOTICE.md").open("wb") as file:
        file.truncate(10**12)  # takes no room
    (source / "LICENCE").write_bytes(b"a" * (MAX_HEADER_BYTES + 1))
    (source / "LICENCE.md").write_bytes(os.urandom(3000))
    (source / "LICENCE.txt").write_bytes("Lizenz".encode("utf-16"))
    (source / "COPYING").write_bytes(b"\x1b]0;title\x07 and \x1b[31mred")
    (source / "COPYING.md").write_bytes("a\x9b31mred".encode())
    (source / "COPYING.txt").write_bytes(b"\x80\x04\x95\x00.")
    (source / "LICENSE-good").write_bytes(b"Apache\n")
    (source / "LICENSE-linked.txt").symlink_to("LICENSE-good")
    bad = {path.name for path in source.iterdir()} - {"LICENSE-good", "LICENSE-linked.txt"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert copy_license_files(source, out) == ["LICENSE-good", "LICENSE-linked.txt"]
    assert texts_in(out) == {"LICENSE-good": b"Apache\n", "LICENSE-linked.txt": b"Apache\n"}
    assert not any(path.is_symlink() for path in out.iterdir())
    said = [str(warning.message) for warning in caught]
    assert len(said) == len(bad)
    for name in bad:
        (line,) = [line for line in said if f"{name} was not copied" in line]
        assert line.isprintable()


def test_of_very_many_licence_files_the_first_are_copied(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for number in range(300):
        (tmp_path / f"LICENSE-{number:03d}").write_text("x")
    with pytest.warns(UserWarning, match="has 300 licence files: the first 20 are copied") as caught:
        assert len(copy_license_files(tmp_path, tmp_path / "out")) == MOST_FILES
    assert len(caught) == 1
