"""Generated attacks on every command: each ends with an exit code and a printable message, in bounded memory and time.

A file below 10 MB costs at most 200 MB beyond the process and 10 seconds of CPU time, whatever it contains.
"""

import contextlib
import ctypes
import gc
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
import vit_pytorch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.conversion import from_checkpoint, to_checkpoint
from plain_vit.hub.card import ModelFacts, write_card
from plain_vit_command import main
from tests.conftest import randomize_
from tests.processes import in_a_process, kilobytes, processes, server
from tests.sizes import draws, few
from tests.sources.test_timm_files import save_folder
from tests.sources.timm_models import tiny_timm
from tests.tiny import tiny_config

MOST_MB, MOST_SECONDS = 200, 10
EXIT_CODES = {0, 1, 2, *range(3, 18)}
SAID = {
    "vit_pytorch": ["--num-attention-heads", "3", "--image-size", "24", "--patch-size", "8"],
    "torchvision": ["--num-attention-heads", "3"],
}
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads its own size from /proc")


class Outcome(NamedTuple):
    """Outcome of an attack."""

    attack: str
    code: object
    printed: str
    megabytes: float
    seconds: float
    size: int


# ---- what is attacked ----


def save_bases(place: Path) -> None:
    """Save a valid checkpoint of every format, and an image."""
    torch.manual_seed(0)
    config = tiny_config(image_size=24, patch_size=8, hidden_act="gelu_pytorch_tanh", num_attention_heads=5)
    ours = randomize_(PlainViTForImageClassification(config)).eval()
    ours.save_pretrained(place / "ours")
    PlainViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(place / "ours")
    write_card(place / "ours", ModelFacts(name="ours"))
    to_checkpoint(from_checkpoint(place / "ours").model, place / "google.npz", format="google")
    foreign = vit_pytorch.ViT(image_size=24, patch_size=8, num_classes=7, dim=20, depth=2, heads=3, mlp_dim=28)
    torch.save(randomize_(foreign).state_dict(), place / "vit_pytorch.pt")
    vision = torchvision.models.VisionTransformer(
        image_size=24, patch_size=8, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=40, num_classes=7
    )
    torch.save(randomize_(vision).state_dict(), place / "torchvision.pth")
    save_folder(tiny_timm("vit_tiny_patch16_224", depth=2), place / "timm")
    sizes: dict[str, Any] = {"image_size": 24, "patch_size": 8, "hidden_size": 20, "num_hidden_layers": 2}
    stock = ViTConfig(**sizes, num_attention_heads=5, intermediate_size=28, num_labels=7)
    randomize_(ViTForImageClassification(stock)).save_pretrained(place / "transformers")
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(place / "transformers")
    Image.fromarray(np.arange(24 * 24 * 3, dtype=np.uint8).reshape(24, 24, 3)).save(place / "image.png")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bases")
    save_bases(place)
    return place


FILES = {"vit_pytorch": "vit_pytorch.pt", "torchvision": "torchvision.pth", "google": "google.npz"}
FOLDERS = ["ours", "timm", "transformers"]


def tensors_of(bases: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a valid checkpoint."""
    if name == "google":
        return {key: torch.from_numpy(value) for key, value in np.load(bases / "google.npz").items()}
    if name in FILES:
        return torch.load(bases / FILES[name], weights_only=True)
    return safetensors.torch.load_file(bases / name / "model.safetensors")


def save(tensors: dict[str, torch.Tensor], place: Path, kind: str) -> Path:
    """Save tensors as a kind of file, whatever their names."""
    path = place / f"weights.{kind}"
    if kind == "safetensors":
        path.write_bytes(raw_safetensors(tensors))
    elif kind == "npz":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, tensor in tensors.items():
                stream = io.BytesIO()
                np.save(stream, tensor.numpy())
                with contextlib.suppress(ValueError, IndexError):  # a name that no archive holds
                    archive.writestr(f"{name[:30_000]}.npy", stream.getvalue())
    else:
        torch.save(tensors, path)
    return path


def raw_safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    header, position = {}, 0
    names = {"F32": torch.float32, "F16": torch.float16, "I64": torch.int64}
    words = {dtype: word for word, dtype in names.items()}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": words[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [position, position + size]}  # fmt: skip
        position += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.numpy().tobytes() for tensor in tensors.values())


# ---- what is drawn ----

NUMBERS = ["0", "1", "7", "63", "999", "1000", "1001", "10000", "99999999", "9" * 10, "9" * 30, "9" * 5000, "007", "-1",
           "²", "１２"]  # fmt: skip
TEXTS = ["", " ", ".", "/", "..", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\nb", "\r\rfake", "\u202egnp.exe", "猫",
         "$x^2$", "{}", "{0.__class__}", "%s%n", "\\", "'", '"', "\0", "<img src=x>", "a" * 300, "\u2028", "[", "(?P<a",
         "*", "__class__", "auto_map", "no such word"]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1000, 10**6, 10**8, 10**9, 10**18, 10**400, -(10**9), 0.5, -0.0, 1e-400, 1e308,
    float("nan"), float("inf"), float("-inf"), [], {}, [[]], [{}], {"a": {}}, [10**8] * 3, [1] * 2000, "x" * 100_000,
]  # fmt: skip


def text(rng: random.Random) -> str:
    """Return a plausible word."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return "".join(
            chr(rng.choice((rng.randrange(32), rng.randrange(128), rng.randrange(0xD000)))) for _ in range(9)
        )
    return ".".join(rng.choice([*TEXTS, *NUMBERS, "blocks", "layers", "weight"]) for _ in range(rng.randrange(1, 9)))


def odd(rng: random.Random, depth: int = 3) -> Any:
    """Return a value for a field of any JSON."""
    if depth and rng.random() < 0.2:
        return {text(rng): odd(rng, depth - 1)} if rng.random() < 0.5 else [odd(rng, depth - 1), odd(rng, depth - 1)]
    return rng.choice(ODD) if rng.random() < 0.7 else text(rng)


def name_with_a_number(rng: random.Random, name: str) -> str:
    """Replace a part of a name by a number or a word, or insert one beside it or at the start."""
    parts = re.split(r"(?<=[./_])|(?=[./_])", name)
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    place = rng.choice(numbers) if numbers and rng.random() < 0.7 else rng.randrange(len(parts))
    new = rng.choice(NUMBERS) if rng.random() < 0.8 else text(rng)
    parts[place : place + rng.randrange(2)] = [new]
    return "".join(parts)


# ---- attacks: each makes files and returns the arguments of a command ----


def words_for(rng: random.Random, source: Path, base: str, bases: Path, place: Path) -> list[str]:
    """Return a command on a source, most often one that only inspects it."""
    hints = SAID.get(base, [])
    kind = rng.choice(["inspect"] * 5 + ["convert", "convert --no-verify", "export", "verify", "verify other"])
    if kind == "export":
        to = rng.choice(["timm", "vit_pytorch", "torchvision", "transformers", "google"])
        suffix = {"vit_pytorch": ".pt", "torchvision": ".pth", "google": ".npz"}.get(to, "")
        return ["export", str(source), str(place / f"out{suffix}"), "--to", to, *hints]
    if kind == "verify":
        return ["verify", str(source), str(bases / "ours"), *hints]
    if kind == "verify other":
        return ["verify", str(bases / "ours"), str(source)]
    command, *options = kind.split()
    return [command, str(source), *([str(place / "out")] if command == "convert" else []), *options, *hints]


def attack_names(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Names of tensors with numbers and words in any position."""
    base = rng.choice([*FILES, *FOLDERS])
    tensors = tensors_of(bases, base)
    names = list(tensors)
    for _ in range(rng.choice([1, 1, 2, 20])):
        name = rng.choice(names)
        value = tensors.pop(name) if name in tensors and rng.random() < 0.5 else torch.ones(rng.choice([1, 8]))
        tensors[name_with_a_number(rng, name)] = value
    return words_for(rng, save(tensors, place, rng.choice(["safetensors", "pt", "npz"])), base, bases, place)


def attack_many(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Very many small tensors, deep or long names."""
    base = rng.choice([*FILES, *FOLDERS])
    tensors, count = tensors_of(bases, base), rng.choice([100, 1000, 5000, 20_000, 45_000, 60_000])
    names, tiny = list(tensors), torch.ones(1)
    kind = rng.randrange(5)
    if kind == 0:  # as many layers as there are tensors
        pattern = re.sub(r"\d+", "{}", rng.choice([name for name in names if re.search(r"\d", name)]))
        tensors |= {pattern.replace("{}", str(index)): tiny for index in range(count)}
    elif kind == 1:
        tensors |= {f"{rng.choice(names)}.{index}": tiny for index in range(count)}
    elif kind == 2:
        tensors |= {"x" * rng.choice([300, 10**5, 3 * 10**6]): tiny}
    elif kind == 3:
        tensors |= {".".join(["a"] * rng.choice([300, 10**5])): tiny, ".".join(["0"] * 10**5): tiny}
    else:
        tensors |= {f"{a}.{index}.{b}": tiny for index in range(count // 30) for a in ("blocks", "layers", "fns")
                    for b in ("norm1.weight", "0.fns.7.weight", "net.0.weight")}  # fmt: skip
    kinds = ["safetensors", "pt"] + ["npz"] * (len(tensors) < 2000)
    return words_for(rng, save(tensors, place, rng.choice(kinds)), base, bases, place)


def attack_shapes(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Huge shapes: expanded tensors, false headers, zero next to huge."""
    base = rng.choice([*FILES, *FOLDERS])
    tensors = tensors_of(bases, base)
    names = rng.sample(list(tensors), min(len(tensors), rng.choice([1, 3])))
    big = rng.choice([10**4, 10**6, 2**31, 2**40])
    if rng.random() < 0.5:
        for name in names:
            value = torch.ones(1)
            shape = rng.choice([(big,), (big, 3), (0, big), (1, 1, big), (1,) * 60])
            with contextlib.suppress(RuntimeError):
                tensors[name] = value[:0].reshape(0, 1).expand(0, big) if 0 in shape else value.expand(shape)
        return words_for(rng, save(tensors, place, "pt"), base, bases, place)
    data = raw_safetensors(tensors)
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    for name in names:
        field = rng.choice(["shape", "data_offsets", "dtype"])
        header[name][field] = rng.choice([[big, big], [0, big], [big], [], [-1], odd(rng), ["1"], "F64"])
    text_ = json.dumps(header).encode()
    (place / "weights.safetensors").write_bytes(struct.pack("<Q", len(text_)) + text_ + data[8 + length :])
    return words_for(rng, place / "weights.safetensors", base, bases, place)


def attack_json(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Fields of config.json, preprocessor_config.json and an index with other values, and other fields."""
    base = rng.choice(FOLDERS)
    source = Path(shutil.copytree(bases / base, place / "source"))
    name = rng.choice(["config.json", "config.json", "preprocessor_config.json", "model.safetensors.index.json"])
    if name.endswith("index.json"):
        os.rename(source / "model.safetensors", source / "model-00001-of-00001.safetensors")
        tensors = tensors_of(bases, base)
        shards = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
        table: dict[str, Any] = {"metadata": {}, "weight_map": shards}
        if rng.random() < 0.7:
            table["weight_map"][rng.choice([text(rng), *tensors])] = rng.choice([text(rng), odd(rng)])
    else:
        table = json.loads((source / name).read_text()) if (source / name).exists() else {"image_mean": [0.5] * 3}
    for _ in range(rng.choice([0, 1, 1, 3])):
        inner = [value for value in table.values() if isinstance(value, dict)]
        target = rng.choice([table, *inner])
        key = rng.choice(list(target)) if target and rng.random() < 0.8 else text(rng)
        target[key] = odd(rng)
    written = json.dumps(table, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    if rng.random() < 0.1:
        written = re.sub(rb'"[^"]*"', rb'"\\ud800"', written, count=rng.randrange(1, 9))
    if rng.random() < 0.1:
        written = rng.choice(
            [b"[" * 10**5, b"[" + b"[]," * 10**6 + b"1]", b'{"a":' * 10**4, written[:-3], b"", b"\xff" + written]
        )
    (source / name).write_bytes(written)
    if rng.random() < 0.2:
        return ["push", str(source), "someone/model", "--dry-run"]
    return words_for(rng, source, base, bases, place)


def attack_labels(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Names of labels, in a file that is named and in the configuration."""
    names = [text(rng) for _ in range(rng.choice([7, 7, 7, 1, 0, 30_000]))]
    as_json = rng.random() < 0.7
    path = place / ("labels.json" if as_json else "labels.txt")
    table: Any = names if rng.random() < 0.4 else {str(index): name for index, name in enumerate(names)}
    if rng.random() < 0.2:
        table = odd(rng)
    said = json.dumps(table) if as_json else "\n".join(names)
    path.write_bytes(said.encode(errors="surrogatepass") if rng.random() < 0.9 else os.urandom(99))
    if rng.random() < 0.5:
        base = rng.choice(["vit_pytorch", "torchvision"])
        command = rng.choice(["inspect", "convert"])
        out = [str(place / "out")] if command == "convert" else []
        return [command, str(bases / FILES[base]), *out, "--labels", str(path), *SAID[base]]
    source = Path(shutil.copytree(bases / "ours", place / "source"))
    config = json.loads((source / "config.json").read_text())
    config["id2label"] = table
    (source / "config.json").write_text(json.dumps(config))
    return words_for(rng, source, "ours", bases, place)


def attack_card(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """The source's model card, from which licence and title are read."""
    base = rng.choice(["timm", "transformers", "ours"])
    source = Path(shutil.copytree(bases / base, place / "source"))
    lines = [f"{rng.choice(['license', 'license_link', 'license_name', 'tags', 'base_model', text(rng)])}: "
             f"{rng.choice([json.dumps(odd(rng)), text(rng), '&a [*a]', '!!python/object/apply:os.system [id]'])}"
             for _ in range(rng.randrange(1, 5))]  # fmt: skip
    if rng.random() < 0.15:  # nine levels of ten aliases each
        lines = [
            "a0: &a0 [x, x, x]",
            *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)),
            "license: *a9",
        ]
    said = "---\n" + "\n".join(lines) + "\n---\n# " + (text(rng) * rng.choice([1, 1, 10_000]))[:1_000_000]
    (source / "README.md").write_bytes(said.encode(errors="surrogatepass"))
    if rng.random() < 0.5:
        return ["push", str(source), "someone/model", "--dry-run"]
    return ["convert", str(source), str(place / "out"), "--no-verify"]


def attack_files(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Names of files and folders, for every option that takes one."""
    raw = rng.choice([b"\xff\xfe", b"\x1b[31mred", b"a\nb", b"-dash", b" ", b"\xe7\x8c\xab", b"m" * 255, b"$(id)",
                      b"'", b"~no", b"%s", b"\\", b"a" * 240 + b"\xff", b"*", b"m" * 300])  # fmt: skip
    name = os.fsdecode(raw)
    path = place / name
    base = rng.choice([*FILES, *FOLDERS])
    with contextlib.suppress(OSError):
        if base in FILES:
            suffix = Path(FILES[base]).suffix
            path = place / os.fsdecode(raw[: 255 - len(suffix)] + suffix.encode())
            shutil.copy(bases / FILES[base], path)
        else:
            shutil.copytree(bases / base, path)
    kind = rng.randrange(7)
    if kind == 0:
        return ["push", str(path), "someone/model", "--dry-run"]
    if kind == 1:
        return ["convert", str(bases / "ours"), str(place / "outs" / name), *rng.choice([[], ["--no-verify"]])]
    if kind == 2:
        return ["export", str(bases / "ours"), str(place / "outs" / name), "--to", "timm"]
    if kind == 3:
        return ["inspect", str(bases / "vit_pytorch.pt"), *SAID["vit_pytorch"], "--labels", str(path)]
    if kind == 4:
        image = place / os.fsdecode(raw[:250] + b".png")
        with contextlib.suppress(OSError):
            shutil.copy(bases / "image.png", image)
        return ["show", str(image), "--model", str(bases / "ours"), "--out", str(place / "page")]
    return words_for(rng, path, base, bases, place)


def attack_special_files(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Devices, pipes and folders wherever a file is expected."""
    kind = rng.choice(
        ["/dev/zero", "/dev/random", "/dev/full", "/proc/self/environ", "pipe", "folder", "loop", "nothing"]
    )
    special = Path(kind)
    if not kind.startswith("/"):
        special = place / "special.pt"
        if kind == "pipe":
            os.mkfifo(special)
        elif kind == "folder":
            special.mkdir()
        elif kind == "loop":
            special.symlink_to(special)
    where = rng.choice(["source", "labels", "image", "verify", "out", "push", *["inside"] * 4])
    if where == "inside":
        source = Path(shutil.copytree(bases / rng.choice(FOLDERS), place / "source"))
        name = rng.choice(["config.json", "preprocessor_config.json", "README.md", "model.safetensors", "LICENSE"])
        (source / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(source / name)
        else:
            (source / name).symlink_to(special)
        return rng.choice([["inspect", str(source)], ["convert", str(source), str(place / "out")],
                           ["push", str(source), "someone/model", "--dry-run"]])  # fmt: skip
    return {
        "source": ["inspect", str(special)],
        "labels": ["inspect", str(bases / "vit_pytorch.pt"), *SAID["vit_pytorch"], "--labels", str(special)],
        "image": ["show", str(special), "--model", str(bases / "ours"), "--out", str(place / "page")],
        "verify": ["verify", str(bases / "ours"), str(special)],
        "out": ["convert", str(bases / "ours"), str(special), "--force"],
        "push": ["push", str(special), "someone/model", "--dry-run"],
    }[where]


def attack_images(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Images of every mode, size and orientation, sound, damaged and lying, for the command that draws."""
    paths = []
    for number in range(rng.choice([1, 1, 2])):
        kind = rng.choice(["png", "jpg", "gif", "webp", "tiff", "bmp"])
        suffix = kind if rng.random() < 0.8 else rng.choice(["png", "jpg", "txt", "pt", ""])
        path = place / f"image {number}.{suffix}"
        data = bytearray(image_bytes(rng, kind))
        damage = rng.choice(["none", "cut", "flip", "lie", "text", "repeat"])
        if damage == "cut":
            del data[rng.randrange(len(data)) :]
        elif damage == "flip":  # also the checksums of PNG
            for _ in range(rng.choice([1, 3, 30])):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif damage == "lie":
            data = bytearray(lying_header(rng))
        elif damage == "text":
            data = bytearray(
                rng.choice([text(rng).encode(errors="surrogatepass"), b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"])
            )
        elif damage == "repeat":
            data *= rng.choice([2, 100])
        path.write_bytes(data)
        paths.append(str(path))
    return ["show", *paths, "--model", str(bases / "ours"), "--out", str(place / "page")]


def image_bytes(rng: random.Random, kind: str) -> bytes:
    """Return a sound file of a kind: any mode, a size that may be extreme, an orientation, perhaps several frames."""
    mode = rng.choice(["RGB", "L", "1", "P", "RGBA", "LA", "I;16", "I", "F", "CMYK", "YCbCr", "HSV"])
    sizes = [(1, 1), (1, 60_000), (60_000, 1), (2, 3), (37, 53), (7000, 7000), (16_000, 3000)]
    size = rng.choice(sizes[:5] if rng.random() < 0.9 else sizes)
    image = Image.new("L", size, rng.randrange(256)).convert(mode if mode not in ("I;16", "HSV", "LA") else "L")
    image = image.convert(mode) if mode != "HSV" else image.convert("RGB").convert("HSV")
    if size[0] * size[1] < 3000:
        image.putpixel((0, 0), image.getpixel((size[0] - 1, size[1] - 1)))
    exif = Image.Exif()
    exif[0x0112] = rng.choice([*range(10), 65535])
    options: dict[str, Any] = {"exif": exif} if kind in ("png", "jpg", "webp", "tiff") else {}
    if kind in ("gif", "png", "webp", "tiff") and rng.random() < 0.3 and size[0] * size[1] < 100_000:
        options |= {"save_all": True, "append_images": [image.copy() for _ in range(rng.choice([1, 30]))]}
    if kind == "jpg":
        options |= {"progressive": rng.random() < 0.5, "quality": rng.choice([1, 95])}
    if kind in ("gif", "png") and rng.random() < 0.3:
        options |= {"transparency": 0}
    stream = io.BytesIO()
    try:
        image.save(stream, {"jpg": "JPEG"}.get(kind, kind.upper()), **options)
    except Exception:  # Pillow raises many kinds for a mode or a size that this kind of file does not have
        stream = io.BytesIO()
        image.convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def lying_header(rng: random.Random) -> bytes:
    """Return the start of an image that announces far more than it has."""
    width, height = rng.choice([(60_000, 60_000), (2**31 - 1, 2**31 - 1), (1, 2**31 - 1), (0, 7), (7070, 7070)])
    kind = rng.choice(["png", "gif", "bmp", "jpg", "tiff"])
    if kind == "png":

        def chunk(name: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

        depth, colour = rng.choice([(8, 2), (16, 6), (8, 6), (1, 0), (8, 3), (99, 99)])
        data = zlib.compress(bytes(rng.choice([10, 10_000, 5_000_000])))
        text_chunk = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(50_000_000)))
        return b"\x89PNG\r\n\x1a\n" + b"".join([
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)),
            *([text_chunk] * rng.randrange(2)), chunk(b"IDAT", data), chunk(b"IEND", b""),
        ])  # fmt: skip
    if kind == "gif":
        size = struct.pack("<HH", width % 65536, height % 65536)
        return b"GIF89a" + size + b"\x80\0\0" + bytes(6) + b"," + bytes(4) + size + b"\0\x02\x02\x44\x01\0;"
    if kind == "bmp":
        header = struct.pack("<IiiHHIIiiII", 40, min(width, 2**31 - 1), height, 1, 24, 0, 0, 0, 0, 0, 0)
        return b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + header + bytes(50)
    if kind == "jpg":
        frame = struct.pack(">BHHB", 8, height % 65536, width % 65536, 3) + b"\1\x22\0\2\x11\1\3\x11\1"
        start = b"\xff\xd8\xff\xc0" + struct.pack(">H", len(frame) + 2) + frame
        return start + b"\xff\xda\0\x08\1\1\0\0\x3f\0" + bytes(99)
    entries = [(256, 4, width % 2**32), (257, 4, height % 2**32), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8),
               (277, 3, 1), (278, 4, height % 2**32), (279, 4, 2**31)]  # fmt: skip
    tags = b"".join(struct.pack("<HHII", tag, form, 1, value) for tag, form, value in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + tags + bytes(4)


def attack_bytes(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Bytes of a sound file changed, removed and repeated."""
    base = rng.choice(list(FILES))
    data = bytearray((bases / FILES[base]).read_bytes())
    for _ in range(rng.choice([1, 2, 30])):
        start, length = rng.randrange(len(data)), rng.choice([1, 4, 100])
        data[start : start + rng.choice([0, length])] = rng.choice(
            [b"", rng.randbytes(length), data[start : start + length] * 3]
        )
    path = place / FILES[base]
    path.write_bytes(data)
    return words_for(rng, path, base, bases, place)


def attack_options(rng: random.Random, bases: Path, place: Path) -> list[str]:
    """Values of options."""
    base = rng.choice([*FILES, *FOLDERS])
    source = bases / FILES.get(base, base)
    options = ["--num-attention-heads", "--head-dim", "--attention-scale", "--layer-norm-eps", "--hidden-act",
               "--pooling", "--block-type", "--norm-type", "--mlp-type", "--rope-type", "--image-size",
               "--patch-size", "--num-channels", "--architecture", "--layout", "--key", "--image-mean", "--image-std",
               "--revision", "--format", "--labels"]  # fmt: skip
    hints = SAID.get(base, [])
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = rng.choice(
            [text(rng), *NUMBERS, "nan", "inf", "1e999", "-5", "0x10", "1e9", "7x", "224x-1", "timm", "cls"]
        )
        hints = [*hints, f"{rng.choice(options)}={value}".replace("\0", "")]
    return ["inspect", str(source), *hints]


# ---- files of nearly 10 MB, made to cost as much as they can ----


def archive_of(pickle: bytes, place: Path) -> list[str]:
    """Save a pickle as torch.save does."""
    with zipfile.ZipFile(place / "weights.pt", "w") as archive:
        archive.writestr("weights/data.pkl", pickle)
        archive.writestr("weights/version", b"3")
    return ["inspect", str(place / "weights.pt")]


def header_of(text_: bytes, place: Path, data: bytes = b"") -> list[str]:
    (place / "weights.safetensors").write_bytes(struct.pack("<Q", len(text_)) + text_ + data)
    return ["inspect", str(place / "weights.safetensors")]


def config_of(place: Path, bases: Path, base: str = "ours", **fields: Any) -> list[str]:
    source = Path(shutil.copytree(bases / base, place / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | fields))
    return ["inspect", str(source)]


def folder_of(place: Path, bases: Path, **files: bytes) -> list[str]:
    source = Path(shutil.copytree(bases / "ours", place / "source"))
    for name, content in files.items():
        (source / name.replace("_json", ".json")).write_bytes(content)
    return ["inspect", str(source)]


def many_names(place: Path, count: int, pattern: str) -> list[str]:
    entry = ':{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    text_ = "{" + "".join(f'"{pattern.format(index)}"{entry}' for index in range(count))
    return header_of(text_.rstrip(",").encode() + b"}", place)


def many_members(place: Path, count: int) -> list[str]:
    stream = io.BytesIO()
    np.save(stream, np.zeros((), np.uint8))
    with zipfile.ZipFile(place / "weights.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for index in range(count):
            archive.writestr(f"Transformer/encoderblock_{index}/a.npy", stream.getvalue())
    return ["inspect", str(place / "weights.npz")]


LABELS = {str(index): f"name {index}" for index in range(330_000)}
BOMBS: dict[str, Callable[[Path, Path], list[str]]] = {
    "pickle of empty dictionaries": lambda p, _: archive_of(b"\x80\x02(" + b"}" * 1_900_000 + b"t.", p),
    "pickle of lists": lambda p, _: archive_of(b"\x80\x02(" + b"]" * 1_900_000 + b"t.", p),
    "pickle of numbers": lambda p, _: archive_of(b"\x80\x02(" + b"J\0\0\1\1" * 1_900_000 + b"t.", p),
    "pickle of texts": lambda p, _: archive_of(b"\x80\x02(" + b"X\2\0\0\0ab" * 1_300_000 + b"t.", p),
    "pickle that remembers": lambda p, _: archive_of(
        b"\x80\x02N" + b"".join(b"r" + struct.pack("<I", index) for index in range(1_800_000)) + b".", p),
    "pickle of marks": lambda p, _: archive_of(b"\x80\x02" + b"(" * 1_900_000 + b".", p),
    "pickle of tuples in tuples": lambda p, _: archive_of(b"\x80\x02)" + b"\x85" * 1_900_000 + b".", p),
    "pickle that doubles": lambda p, _: archive_of(b"\x80\x02)" + b"2\x86" * 900_000 + b".", p),
    "pickle of long numbers": lambda p, _: archive_of(
        b"\x80\x02(" + b"\x8b" + struct.pack("<I", 9_000_000) + b"\x7f" * 9_000_000 + b"t.", p),
    "pickle of tensors": lambda p, _: [
        "inspect", str(save({f"a.{index}.b": torch.ones(1) for index in range(14_000)}, p, "pt"))],
    "header of names": lambda p, _: many_names(p, 50_000, "blocks.{}.norm1.weight" + "x" * 100),
    "header of one block": lambda p, _: many_names(p, 50_000, "blocks.0.norm1.weight{}"),
    "header of branches": lambda p, _: many_names(p, 50_000, "transformer.layers.0.0.fns.{}.norm.weight"),
    "header of short names": lambda p, _: many_names(p, 49_000, "{}"),
    "header of numbers": lambda p, _: header_of(b'{"a":{"shape":[' + b"77777," * 490_000 + b"1]}}", p),
    "header of keys": lambda p, _: header_of(
        ("{" + ",".join(f'"{index}":1' for index in range(490_000)) + "}").encode(), p),
    "header of texts": lambda p, _: header_of(b'{"a":[' + b'"ab",' * 490_000 + b"1]}", p),
    "header of metadata": lambda p, _: header_of(b'{"__metadata__":{"a":"' + b"x" * 9_900_000 + b'"}}', p),
    "a name of 9 MB": lambda p, _: many_names(p, 1, "x" * 9_000_000 + "{}"),
    "a name of a million parts": lambda p, _: many_names(p, 1, "0." * 1_000_000 + "{}"),
    "names of many parts": lambda p, _: many_names(p, 50, "a.0." * 40_000 + "{}"),
    "a header of nine million digits": lambda p, _: header_of(b'{"a":' + b"9" * 9_000_000 + b"}", p),
    "names of labels": lambda p, bases: config_of(p, bases, id2label=LABELS),
    "names of labels in transformers' folder": lambda p, bases: config_of(p, bases, "transformers", id2label=LABELS),
    "names of labels in timm's folder": lambda p, bases: config_of(p, bases, "timm", label_names=list(LABELS.values())),
    "a number of labels": lambda p, bases: config_of(p, bases, num_labels=450_000, id2label=None, label2id=None),
    "a number of labels in transformers' folder": lambda p, bases: config_of(
        p, bases, "transformers", num_labels=900_000, id2label=None, label2id=None),
    "a number of classes in timm's folder": lambda p, bases: config_of(p, bases, "timm", num_classes=900_000),
    "a thousand layers": lambda p, bases: config_of(p, bases, num_hidden_layers=1000),
    "a thousand layers in transformers' folder": lambda p, bases: config_of(
        p, bases, "transformers", num_hidden_layers=1000),
    "a million registers": lambda p, bases: config_of(p, bases, num_register_tokens=60_000),
    "an image of 2**28 pixels": lambda p, bases: config_of(
        p, bases, image_size=2**14, patch_size=1, position_embedding_type="sincos_2d",
        position_embedding_on_prefix=False),
    "configuration of lists": lambda p, bases: folder_of(p, bases, config_json=b"[" + b"[]," * 3_000_000 + b"1]"),
    "configuration of foreign keys": lambda p, bases: config_of(
        p, bases, **{f"key {index}": index for index in range(240_000)}),
    "processor of foreign keys": lambda p, bases: folder_of(
        p, bases, preprocessor_config_json=json.dumps({f"key {index}": index for index in range(240_000)}).encode()),
    "index of tensors": lambda p, bases: folder_of(
        p, bases, **{"model.safetensors.index_json": json.dumps(
            {"weight_map": {f"a.{index}": f"model-{index}.safetensors" for index in range(49_000)}}).encode()}),
    "npz of members": lambda p, _: many_members(p, 40_000),
}  # fmt: skip


ATTACKS: dict[str, Callable[[random.Random, Path, Path], list[str]]] = {
    attack.__name__.removeprefix("attack_"): attack
    for attack in (attack_names, attack_many, attack_shapes, attack_json, attack_labels, attack_card, attack_files,
                   attack_special_files, attack_images, attack_bytes, attack_options)
}  # fmt: skip
SHOWING = {"files", "special_files", "images"}  # attacks on `show` too, which has a backward pass


# ---- what comes of them ----


def bytes_of(words: list[str]) -> int:
    """Return the total size of the files that a command names."""
    total = 0
    for word in words:
        with contextlib.suppress(OSError, ValueError):
            path = Path(word)
            files = path.rglob("*") if path.is_dir() else [path]
            total += sum(file.stat().st_size for file in files if file.is_file())
    return total


def carry_out(attack: str, seeds: Sequence[int], bases: Path, place: Path) -> list[Outcome]:
    """Carry out attacks one after the other in this process, which may take 1.5 GB more than now."""
    resource.setrlimit(resource.RLIMIT_AS, (kilobytes("VmSize") * 1024 + 1_500_000_000,) * 2)
    signal.signal(signal.SIGALRM, stop_waiting)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    outcomes = []
    for seed in seeds:
        here = place / "attack"
        here.mkdir()
        os.chdir(here)
        chance = random.Random(f"{attack} {seed}")
        words = BOMBS[attack](here, bases) if attack in BOMBS else ATTACKS[attack](chance, bases, here)
        size, printed = bytes_of(words), io.StringIO()
        gc.collect()
        trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before, started = kilobytes("VmRSS"), time.process_time()
        signal.setitimer(signal.ITIMER_REAL, 100)  # also for what waits, as at a pipe
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
                warnings.simplefilter("default")  # printed, as users have it; pytest's settings raise them
                code: object = main(words)
        except SystemExit as stopped:
            code = stopped.code
        except BaseException as error:
            last = "".join(traceback.format_tb(error.__traceback__)[-3:])
            code = f"{type(error).__name__}: {str(error)[:500]} {last}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds, grown = time.process_time() - started, (kilobytes("VmHWM") - before) / 1024
        outcomes.append(Outcome(f"{attack} {seed}: {words!a:.300}", code, printed.getvalue(), grown, seconds, size))
        os.chdir(place)
        shutil.rmtree(here, ignore_errors=True)
    return outcomes


def stop_waiting(number: int, frame: object) -> None:
    raise RuntimeError("still at it after 100 seconds")


def faults_of(outcome: Outcome) -> Iterator[str]:
    """Yield the faults of an outcome."""
    if outcome.code not in EXIT_CODES:
        yield f"ends in {outcome.code}"
    if "Traceback" in outcome.printed:
        yield "shows a stack trace"
    printed = re.sub(r"\r[^\r\n\x1b]*\||\r[^\r\n\x1b]*(/s|s/ images)\]", "", outcome.printed)  # bars of progress
    if odd_characters := sorted({ascii(char) for char in printed if char != "\n" and not char.isprintable()}):
        yield f"prints {' '.join(odd_characters)}"
    # Usage errors, whose code is 2, name no class.
    error = re.compile("plain-vit: " if outcome.code == 2 else r"plain-vit: ([A-Z]\w*(Error|Exception)|'|\")")
    lines = list(filter(error.match, outcome.printed.splitlines()))
    if outcome.code not in (0, None) and len(lines) != 1:
        yield f"says {len(lines)} things: {outcome.printed!a:.500}"
    if max(map(len, outcome.printed.split("\n"))) > 5000 or len(outcome.printed) > 60_000:
        yield f"prints {len(outcome.printed)} characters"
    if outcome.size < 10_000_000 and outcome.megabytes > MOST_MB:
        yield f"takes {outcome.megabytes:.0f} MB"
    if outcome.size < 10_000_000 and outcome.seconds > MOST_SECONDS:
        yield f"takes {outcome.seconds:.1f} s"


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_generated_attack_ends_in_one_printable_message(attack: str, bases: Path, tmp_path: Path) -> None:
    count = draws(3, nightly=120 if attack == "images" else 210)  # each sound image is drawn, which takes seconds
    context = server if attack in SHOWING else processes
    outcomes: list[Outcome] = in_a_process(carry_out, attack, range(count), bases, tmp_path, context=context)
    faults = [f"{outcome.attack}\n    {fault}" for outcome in outcomes for fault in faults_of(outcome)]
    assert not faults, f"{len(faults)} faults in {count} draws:\n" + "\n".join(faults[:20])
    codes = Counter(str(outcome.code) for outcome in outcomes)
    print(f"\n{attack}: codes {dict(codes)}, at most {max(o.megabytes for o in outcomes):.0f} MB and "
          f"{max(o.seconds for o in outcomes):.1f} s")  # fmt: skip
    same = "every draw came to the same: the attack is too blunt to say anything"
    assert len({outcome.printed for outcome in outcomes}) > 1, same
    assert len(codes) > 1 or count < 100, same


@pytest.mark.slow
@pytest.mark.parametrize("bomb", few(BOMBS, 13))
def test_a_file_of_ten_megabytes_costs_little_memory_and_time(bomb: str, bases: Path, tmp_path: Path) -> None:
    (outcome,) = in_a_process(carry_out, bomb, range(1), bases, tmp_path)
    assert not list(faults_of(outcome)), outcome
    assert outcome.size < 10_000_000, "too large to say anything"
