"""The service for an exported ONNX file: answers, limits, broken and malicious requests, load, and shutdown."""

import asyncio
import json
import os
import re
import resource
import runpy
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from starlette.datastructures import Headers
from transformers import pipeline

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.errors import CheckpointError
from plain_vit_command import main
from tests.conftest import randomize_
from tests.processes import server
from tests.releases import HAS_REGRESSION
from tests.sizes import draws
from tests.tiny import tiny_config
from tests.training.runs import EXAMPLES, open_script

app = open_script("serve/app")
TOLERANCE = 1e-4
LIMITS = {
    "max_requests": 4, "max_images": 3, "max_body": 200_000, "max_pixels": 90_000, "max_seconds": 1.0, "max_batch": 3,
    "max_queued_pixels": 200_000,
}  # fmt: skip


# A folder, a server, images


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a saved classifier with random parameters, whose scores differ between images."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(num_hidden_layers=1, id2label={number: f"class {number}" for number in range(7)})
    randomize_(PlainViTForImageClassification(config)).eval().save_pretrained(folder)
    PlainViTImageProcessor(size={"height": 24, "width": 56}, image_mean=[0.4, 0.5, 0.6]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the exported folder that is served."""
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    assert main(["export", str(model), str(folder), "--to", "onnx"]) == 0
    return folder


def serve(words: list[str], log: Path, descriptors: int) -> None:
    """Run the service in this process, with its output in a file and a limit of file descriptors."""
    os.setsid()
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), output)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    if words[0] == "plain-vit":
        main(words[1:])
        return
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


SCRIPT = (str(EXAMPLES / "serve" / "app.py"),)


@contextmanager
def served(
    folder: Path, log: Path, descriptors: int = 4096, program: Sequence[str] = SCRIPT, **limits: object
) -> Iterator[tuple[BaseProcess, str]]:
    """Start the service on a free port with a limit of file descriptors, and yield its process and address."""
    options = {"port": 0, "threads": 1, **limits}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    log.touch()
    words = [*program, str(folder), *words]
    process = server.Process(target=serve, args=(words, log, descriptors))
    process.start()
    try:
        deadline = time.monotonic() + 180
        while not (found := re.search(r"running on http://(\S+)", log.read_text())):
            assert process.is_alive(), log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process, found[1]
    finally:
        process.kill()
        process.join()


def end(process: BaseProcess, log: Path) -> dict[str, int]:
    """Wait for a terminated server to end, and return its counts."""
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    assert "Traceback" not in log.read_text(), log.read_text()
    (line,) = re.findall(r"Served: (.*)", log.read_text())
    return {name: int(number) for number, name in (part.split() for part in line.split(", "))}


@pytest.fixture(scope="module")
def address(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server with small limits; after the tests it must shut down cleanly with every request accounted for."""
    log = tmp_path_factory.mktemp("server") / "log"
    with served(exported, log, **LIMITS) as (process, address):
        yield address
        process.terminate()
        counts = end(process, log)
        assert counts.pop("accepted") == sum(counts.values()) - counts.pop("refused")
        assert "failed" not in counts


@pytest.fixture
def client(address: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"http://{address}", timeout=60) as client:
        yield client
        wait_until(lambda: client.get("/health/ready").status_code == 200)


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def picture(number: int = 0, mode: str = "RGB", size: tuple[int, int] = (31, 43)) -> Image.Image:
    """Return a random image; its blocks survive resizing."""
    blocks = np.random.default_rng(number).integers(0, 256, (5, 4, 4), dtype=np.uint8)
    image = Image.fromarray(blocks, "RGBA").resize(size, Image.Resampling.NEAREST)
    return image if mode == "RGBA" else image.convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    image.save(file := BytesIO(), kind, **options)
    return file.getvalue()


def scores_of(prediction: dict[str, Any]) -> dict[str, float]:
    return {one["label"]: one["score"] for one in prediction["labels"]}


def predict(client: httpx2.Client, data: bytes) -> httpx2.Response:
    return client.post("/predict?top=7", content=data, headers={"Content-Type": "application/octet-stream"})


# Answers


def various_images() -> Iterator[tuple[str, bytes]]:
    for number, mode in enumerate(("RGB", "L", "P", "RGBA", "LA", "1", "CMYK")):
        yield mode, encoded(picture(number, mode), "JPEG" if mode == "CMYK" else "PNG")
    for kind in app.FORMATS:
        yield kind, encoded(picture(8, size=(50, 7)), kind)
    for orientation in (3, 6, 7):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"turned {orientation}", encoded(picture(9), "JPEG", exif=exif)


@pytest.mark.slow
def test_answers_are_those_of_transformers_pipeline_for_images_of_every_kind(
    client: httpx2.Client, model: Path
) -> None:
    classify = pipeline("image-classification", str(model), top_k=7)
    found = {}
    for name, data in various_images():
        answer = predict(client, data)
        assert answer.status_code == 200, (name, answer.text)
        (prediction,) = answer.json()
        expected = {one["label"]: one["score"] for one in classify(Image.open(BytesIO(data)))}
        found[name] = scores_of(prediction)
        assert found[name] == pytest.approx(expected, abs=TOLERANCE), name
        assert list(found[name].values()) == sorted(found[name].values(), reverse=True)
    spread = [max(one.values()) for one in found.values()]
    assert max(spread) - min(spread) > 100 * TOLERANCE  # answers differ between images


@pytest.mark.slow
def test_the_command_serves_as_the_script_does(exported: Path, tmp_path: Path, client: httpx2.Client) -> None:
    log = tmp_path / "log"
    with served(exported, log, program=("plain-vit", "serve")) as (process, address):
        with httpx2.Client(base_url=f"http://{address}") as other:
            answers = [predict(one, encoded(picture())).json() for one in (other, client)]
        process.terminate()
        assert end(process, log)["accepted"] == 1
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_form_and_a_body_give_equal_answers_in_the_order_of_the_files(client: httpx2.Client) -> None:
    images = [encoded(picture(number)) for number in range(3)]
    files = [("any", (f"{number}.png", data)) for number, data in enumerate(images)]
    answer = client.post("/predict", files=files, params={"top": 2})
    assert [one["file"] for one in answer.json()] == ["0.png", "1.png", "2.png"]
    for one, data in zip(answer.json(), images, strict=True):
        alone = scores_of(predict(client, data).json()[0])
        assert len(one["labels"]) == 2
        assert scores_of(one) == pytest.approx({name: alone[name] for name in scores_of(one)}, abs=TOLERANCE)


@pytest.mark.parametrize(
    "problem",
    ["multi_label_classification", "single_label_classification", None, *(["regression"] if HAS_REGRESSION else [])],
)
def test_scores_follow_the_problem_type_as_in_the_pipeline(problem: Any, exported: Path, model: Path) -> None:
    classifier, classify = app.Classifier(exported, 1), pipeline("image-classification", str(model), top_k=7)
    classifier.config.problem_type = classify.model.config.problem_type = problem
    scores = classifier.scores([classifier.pixels_of(picture())])[0]
    expected = {one["label"]: one["score"] for one in classify(picture())}
    assert {f"class {number}": score for number, score in enumerate(scores)} == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.slow
def test_the_service_describes_itself(client: httpx2.Client) -> None:
    info = client.get("/info").json()
    assert info["limits"] == LIMITS | {"max_wait": 0.0, "max_work_seconds": 10.0}
    assert (info["labels"], info["input_shape"]) == (7, [3, 24, 56])
    assert info["image_processor"]["image_mean"] == [0.4, 0.5, 0.6]
    assert client.get("/health/live").json() == {"status": "live"}


@pytest.mark.slow
def test_pages_that_describe_the_service_are_there_where_asked_for(client: httpx2.Client) -> None:
    pages = {"/docs", "/redoc", "/openapi.json"}
    assert [client.get(page).status_code for page in pages] == [404] * 3
    built = app.build_app(SlowClassifier(), app.Limits(), docs=True)
    assert pages < {route.path for route in built.routes if hasattr(route, "path")}
    content = built.openapi()["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert set(content) == {"multipart/form-data", "image/*"}


# Refused requests


PNG = encoded(picture())
DEEP = encoded(Image.fromarray(np.full((5, 4), 40_000, np.uint16)))


def form(*files: tuple[str, bytes]) -> dict[str, Any]:
    return {"files": [("image", file) for file in files]}


def body(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"content": data, "headers": {"Content-Type": kind}}


def pieces(data: bytes) -> Iterator[bytes]:
    yield from (data[start : start + 1000] for start in range(0, len(data), 1000))


def scans(count: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated up to `count` scans; each covers all pixels."""
    data = encoded(picture(), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * (count + 1 - data.count(b"\xff\xda")) + data[-2:]


def texts(count: int) -> bytes:
    """Return a small PNG with `count` text chunks that decompress to a megabyte each."""
    chunk = b"zTXtname\x00\x00" + zlib.compress(bytes(1_000_000))
    text = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return PNG[:33] + text * count + PNG[33:]


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "declared length": (body(bytes(200_001)), 413, "200,001 bytes or more: expected at most 200,000"),
    "chunked": ({"content": pieces(bytes(10**6)), "headers": {"Content-Type": "image/png"}}, 413, "at most 200,000"),
    "form too long": (form(("a.png", bytes(200_000))), 413, "expected at most 200,000"),
    "too many images": (form(*[("a.png", PNG)] * 4), 400, "Maximum number of files is 3"),
    "too many pixels": (form(("ok.png", PNG), ("big.png", encoded(picture(0, "L", (301, 300))))), 422,
                        "big.png has 301 x 300 pixels: expected at most 90,000"),
    "too many pixels together": (form(*[("a.png", encoded(picture(0, "L", (300, 299))))] * 2), 422,
                                 "the images have 179,400 pixels together: expected at most 100,000, send fewer"),
    "more than 8 bits": (form(("deep.png", DEEP)), 422, "deep.png has more than 8 bits per channel (mode I;16)"),
    "no image": (form(("notes.txt", b"hello")), 422,
                 "notes.txt begins with b'hello', like no image: expected a file of JPEG"),
    "broken image": (form(("cut.png", PNG[:-60])), 422, "cut.png is broken"),
    "many scans": (form(("scans.jpg", scans(101))), 422, "scans.jpg has 101 scans: expected at most 100"),
    "much text": (form(("text.png", texts(5))), 422, "text.png is broken (ValueError: Too much memory used in text"),
    "two broken images": (form(("a.png", b""), ("ok.png", PNG), ("b.png", PNG[:60])), 422, "a.png begins with b''"),
    "empty body": (body(b""), 422, "the image begins with b'', like no image"),
    "empty form": (body(b"--x--\r\n", "multipart/form-data; boundary=x"), 422, "the form has no file"),
    "text field": ({"files": {"image": (None, "cat.jpg")}}, 422,
                   "'image' is text: expected a file, with curl -F image=@FILE"),
    "no boundary": (body(b"--x", "multipart/form-data"), 400, "Missing boundary"),
    "bad form": (body(b"--x\r\nno header\r\n\r\n", "multipart/form-data; boundary=x"), 400,
                 "the form cannot be read ("),
    "part without a name": (body(b"--x\r\nA: b\r\n\r\nc\r\n--x--\r\n", "multipart/form-data; boundary=x"), 400,
                            'header field "name" must be provided'),
    "other form": (body(b"not a form", "multipart/form-data; boundary=x"), 400, "the form"),
    "other type": (body(b"{}", "application/json"), 415, "'application/json': expected multipart/form-data, image/*"),
    "no type": ({"content": PNG}, 415, "the content type is '': expected"),
    "no top": ({**body(PNG), "params": {"top": 0}}, 422, "greater than or equal to 1"),
    "unknown option": ({**body(PNG), "params": {"topk": 3}}, 422, "Extra inputs are not permitted"),
    "name of a file": (form(("\x1b[31m\u202e" + "n" * 500, b"x")), 422, "begins with b'x'"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken_is_refused_with_the_reason(name: str, client: httpx2.Client) -> None:
    request, status, words = REFUSED[name]
    answer = client.post("/predict", **request)
    assert answer.status_code == status, answer.text
    detail = answer.json()["detail"]
    assert words in (detail if isinstance(detail, str) else detail[0]["msg"])
    assert len(answer.text) < 600
    assert str(detail).isprintable()


@pytest.mark.slow
def test_all_broken_images_of_a_request_are_named(client: httpx2.Client) -> None:
    detail = client.post("/predict", **REFUSED["two broken images"][0]).json()["detail"]
    assert re.findall(r"(\w+\.png) (?:is|begins)", detail) == ["a.png", "b.png"]


def header_of(kind: str, width: int, height: int) -> bytes:
    """Return a file of a few bytes whose header claims an image of this size."""
    if kind == "PNG":
        header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        pixels = b"IDAT" + zlib.compress(bytes(1000))
        chunks = (
            struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in (header, pixels)
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    small = bytearray(encoded(Image.new("RGB", (16, 16)), kind, **({"lossless": True} if kind == "WEBP" else {})))
    if kind == "JPEG":
        start = small.index(b"\xff\xc0") + 5
        small[start : start + 4] = struct.pack(">HH", height, width)
    elif kind == "BMP":
        small[18:26] = struct.pack("<ii", width, height)
    elif kind == "GIF":  # the frame is larger than the screen
        start = small.index(b",", 13) + 5
        small[start : start + 4] = struct.pack("<HH", width, height)
    elif kind == "WEBP":
        start = small.index(b"VP8L") + 9
        small[start : start + 4] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    return bytes(small)


@pytest.mark.slow
@pytest.mark.parametrize("kind", app.FORMATS)
def test_an_image_is_measured_by_its_header_before_it_is_decoded(kind: str, client: httpx2.Client) -> None:
    before = client.get("/info").json()["memory_mb"]
    answer = predict(client, header_of(kind, 16_000, 16_000))  # decoded: 768 MB
    assert answer.status_code == 422
    assert "the image has 16000 x 16000 pixels: expected at most 90,000" in answer.text
    assert client.get("/info").json()["memory_mb"] < before + 100


def test_an_image_is_bounded_as_it_is_resized_too(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, sizes = app.Classifier(exported, 1), []
    cropped = PlainViTImageProcessor(
        size={"shortest_edge": 256}, crop_size={"height": 24, "width": 56}, do_center_crop=True
    )
    resize = cropped.resize

    def noting(image: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(image.size)
        return resize(image, *args, **kwargs)

    monkeypatch.setattr(cropped, "resize", noting)
    classifier.image_processor, most = cropped, 1_000_000
    assert classifier.read("a.png", encoded(picture(size=(900, 60))), most).shape == (3, 24, 56)
    turned = Image.Exif()
    turned[0x0112] = 6
    for size, words in (
        ((4090, 60), "has 4090 x 60 pixels, resized 17450 x 256: expected at most 1,000,000, crop it to another"),
        ((60, 4090), "has 60 x 4090 pixels, resized 256 x 17450: expected"),
        ((5000, 1), "thin.png cannot be resized: an image of 1x5000 pixels would become 256x1280000"),
    ):
        with pytest.raises(app.BadImage, match=words):
            classifier.read("thin.png", encoded(picture(size=size)), most)
    with pytest.raises(app.BadImage, match="has 60 x 4090 pixels, resized"):
        classifier.read("turned.jpg", encoded(picture(size=(4090, 60)), "JPEG", exif=turned), most)
    assert sizes == [(900, 60)]  # no other image reached resizing
    cropped.do_resize = False
    assert classifier.read("thin.png", encoded(picture(size=(4090, 60))), most).shape == (3, 24, 56)


@pytest.mark.slow
def test_a_form_that_breaks_off_anywhere_is_refused(client: httpx2.Client) -> None:
    request = client.build_request("POST", "/predict", **form(("a.png", PNG), ("b.png", PNG)))
    whole, headers = request.read(), {"Content-Type": request.headers["Content-Type"]}
    assert client.post("/predict", content=whole, headers=headers).status_code == 200
    last = whole.rindex(b"--\r\n")
    for length in [0, 5, *np.linspace(60, last - 60, 12, dtype=int), *range(last - 50, last, 3), last]:
        answer = client.post("/predict", content=whole[:length], headers=headers)
        assert answer.status_code == 400, (length, answer.text)
        assert "the form" in answer.json()["detail"]


def mutated(count: int) -> Iterator[bytes]:
    """Yield image files with changed, missing and repeated bytes."""
    random = np.random.default_rng(0)
    originals = [encoded(picture(1), kind) for kind in app.FORMATS]
    for number in range(count):
        data = bytearray(originals[number % len(originals)])
        for _ in range(random.integers(1, 6)):
            data[random.integers(len(data))] = random.integers(256)
        start, length = random.integers(len(data)), random.integers(1, 40)
        if number % 3 == 1:
            del data[start : start + length]
        elif number % 3 == 2:
            data[start:start] = data[start : start + length]
        yield bytes(data)


@pytest.mark.slow
def test_mutated_images_are_classified_or_refused(client: httpx2.Client) -> None:
    statuses = [predict(client, data).status_code for data in mutated(draws(60, nightly=3000))]
    assert set(statuses) == {200, 422}
    assert predict(client, PNG).status_code == 200


def test_files_of_a_form_take_no_descriptors() -> None:
    data = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + bytes(2_000_000) + b"\r\n"

    async def chunks() -> AsyncIterator[bytes]:
        yield data * 5 + b"--x--\r\n"

    async def parsed() -> Any:
        return await app.WholeForm(Headers({"content-type": "multipart/form-data; boundary=x"}), chunks()).parse()

    before = len(os.listdir("/dev/fd"))
    form = asyncio.run(parsed())
    assert len(form.multi_items()) == 5
    assert len(os.listdir("/dev/fd")) == before


# Slow clients, gone clients, load


@contextmanager
def begun(address: str, count: int, body: bytes = PNG) -> Iterator[list[socket.socket]]:
    """Open connections with requests that lack the last byte."""
    host, port = address.split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(count)]
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        for one in sockets:
            one.settimeout(60)
            one.sendall(head.encode() + body[:-1])
        yield sockets
    finally:
        for one in sockets:
            one.close()


@pytest.mark.slow
def test_a_full_server_refuses_at_once_says_when_to_come_again_and_answers_what_it_holds(
    address: str, client: httpx2.Client
) -> None:
    with begun(address, LIMITS["max_requests"]) as sockets:
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        refused = predict(client, bytes(150_000))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "4 requests are in work, which is the limit" in refused.json()["detail"]
        assert client.get("/health/live").status_code == 200
        for one in sockets:
            one.sendall(PNG[-1:])
        for one in sockets:
            assert one.recv(12) == b"HTTP/1.1 200"


@pytest.mark.slow
def test_a_slow_request_loses_its_place_in_time(address: str, client: httpx2.Client) -> None:
    with begun(address, LIMITS["max_requests"]) as sockets:
        answers = [b"".join(iter(lambda: one.recv(4096), b"")) for one in sockets]  # noqa: B023
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
        assert b"the request was not complete after 1 seconds" in answers[0]
        assert predict(client, PNG).status_code == 200


@pytest.mark.slow
def test_large_images_within_the_limits_leave_room_for_others(exported: Path, tmp_path: Path) -> None:
    large = encoded(Image.new("L", (7001, 6999), 77))  # 49 megapixels
    log = tmp_path / "log"
    with served(exported, log) as (process, address), ThreadPoolExecutor(64) as threads:

        def post(*files: bytes) -> tuple[int, float]:
            start = time.monotonic()
            answer = httpx2.post(f"http://{address}/predict", files=[("image", file) for file in files], timeout=120)
            return answer.status_code, time.monotonic() - start

        assert post(*[large] * 16)[0] == 422
        forms = [threads.submit(post, large, large) for _ in range(64)]
        wait_until(lambda: httpx2.get(f"http://{address}/info", timeout=60).json()["counts"]["accepted"] > 1)
        others = [post(PNG) for _ in range(5)]
        ends = [form.result() for form in forms]
        process.terminate()
        counts = end(process, log)
    assert {status for status, _ in others} == {200}
    assert max(seconds for _, seconds in others) < 8
    statuses = [status for status, _ in ends]
    assert set(statuses) == {200, 503}
    assert max(seconds for _, seconds in ends) < 15
    assert counts["postponed"] + counts["refused"] == statuses.count(503)


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_place(address: str, client: httpx2.Client) -> None:
    before = client.get("/info").json()["counts"]["abandoned"]
    with begun(address, 3):
        pass
    wait_until(lambda: client.get("/info").json()["counts"]["abandoned"] == before + 3)


def load(address: str, images: list[bytes], clients: int, seconds: float) -> Counter[str]:
    """Let clients each send one image after the other; compare the scores with those of the image alone."""
    url = f"http://{address}/predict?top=7"
    alone = [scores_of(httpx2.post(url, files={"image": image}).json()[0]) for image in images]
    outcomes: Counter[str] = Counter(answered=len(alone))
    end = time.monotonic() + seconds

    def send(number: int) -> None:
        with httpx2.Client(timeout=60) as one:
            while time.monotonic() < end:
                number = (number + 1) % len(images)
                answer = one.post(url, files={"image": images[number]})
                assert answer.status_code in (200, 503)
                outcomes["answered" if answer.status_code == 200 else "refused"] += 1
                if answer.status_code == 200:
                    assert scores_of(answer.json()[0]) == pytest.approx(alone[number], abs=TOLERANCE)

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(send, range(clients)))
    return outcomes


@pytest.mark.slow
def test_under_overload_each_request_is_answered_rightly_or_refused(address: str, client: httpx2.Client) -> None:
    before = client.get("/info").json()["counts"]
    outcomes = load(address, [encoded(picture(number)) for number in range(5)], clients=20, seconds=2)
    assert outcomes["answered"] > 5
    assert outcomes["refused"] > 0
    after = client.get("/info").json()["counts"]
    assert {name: after[name] - before[name] for name in outcomes} == outcomes


def slow_scores(images: list[np.ndarray]) -> np.ndarray:
    time.sleep(0.05)
    if any(image.sum() < 0 for image in images):
        raise RuntimeError("the graph failed")
    return np.stack([image.sum(keepdims=True) for image in images])


def in_batches(use: Callable[[Any], Any], **options: Any) -> Any:
    """Run a coroutine with a queue that runs `slow_scores`, and return both."""

    async def run() -> Any:
        batches = app.Batches(slow_scores, **{"max_batch": 4, "max_wait": 0.0} | options)
        loop = asyncio.create_task(batches.run_forever())
        result = await use(batches)
        assert not loop.done()
        loop.cancel()
        return batches, result

    return asyncio.run(run())


def test_what_is_queued_while_the_model_runs_becomes_one_batch() -> None:
    async def use(batches: Any) -> list[Any]:
        return await asyncio.gather(*(batches.scores(np.full(2, number)) for number in range(9)))

    batches, found = in_batches(use)
    assert [float(one[0]) for one in found] == [2 * number for number in range(9)]
    assert batches.counts == {"images": 9, "batches": 3}  # 4, 4 and 1


def test_a_batch_waits_for_images_as_long_as_it_may() -> None:
    async def use(batches: Any) -> None:
        first = asyncio.create_task(batches.scores(np.ones(1)))
        await asyncio.sleep(0.02)
        await asyncio.gather(first, batches.scores(np.ones(1)))

    assert in_batches(use)[0].counts == {"images": 2, "batches": 2}
    assert in_batches(use, max_wait=10.0, max_batch=2)[0].counts == {"images": 2, "batches": 1}


def test_images_whose_client_has_gone_are_not_computed() -> None:
    async def use(batches: Any) -> Any:
        tasks = [asyncio.create_task(batches.scores(np.full(1, number))) for number in range(10)]
        await asyncio.sleep(0.02)  # the first four are in the model
        for number in (0, *range(4, 9)):
            tasks[number].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    batches, found = in_batches(use)
    assert [float(one[0]) for one in found if not isinstance(one, BaseException)] == [1, 2, 3, 9]
    assert batches.counts == {"images": 5, "batches": 2}


def in_decoders(use: Callable[[Any], Any], max_pixels: int = 100) -> Any:
    """Run a coroutine with a single decoding thread, and return the decoder and the result."""

    async def run() -> Any:
        decoders = app.Decoders(max_pixels)
        decoders.threads = ThreadPoolExecutor(1)
        result = await use(decoders)
        decoders.threads.shutdown()
        await asyncio.sleep(0.01)
        return decoders, result

    return asyncio.run(run())


def slow_image(done: list[int], pixels: int) -> np.ndarray:
    time.sleep(0.02)
    done.append(pixels)
    if pixels == 13:
        raise app.BadImage("is unlucky")
    return np.full(1, pixels)


def test_pixels_count_until_their_image_is_decoded() -> None:
    done: list[int] = []

    async def use(decoders: Any) -> Any:
        images = [decoders.submit(pixels, lambda pixels=pixels: slow_image(done, pixels)) for pixels in (29, 31, 13, 5)]
        assert decoders.free == 100 - 29 - 31 - 13 - 5
        return await asyncio.gather(*images, return_exceptions=True)

    decoders, found = in_decoders(use)
    assert done == [29, 31, 13, 5]
    assert [isinstance(one, app.BadImage) or int(one[0]) for one in found] == [29, 31, True, 5]
    assert decoders.free == 100


def test_images_that_nobody_waits_for_are_forgotten_and_those_in_work_count_until_they_end() -> None:
    done: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def decode(pixels: int) -> np.ndarray:
        begun.set()
        may_end.wait(60)
        return slow_image(done, pixels)

    async def use(decoders: Any) -> Any:
        images = [decoders.submit(pixels, partial(decode, pixels)) for pixels in (29, 31, 7)]
        await asyncio.to_thread(begun.wait)
        images[0].cancel()
        images[1].cancel()
        await asyncio.sleep(0.01)
        assert decoders.free == 100 - 29 - 7
        may_end.set()
        return await images[2]

    decoders, found = in_decoders(use)
    assert done == [29, 7]
    assert (int(found[0]), decoders.free) == (7, 100)


class SlowClassifier:
    """Replacement for a slow model."""

    scores = staticmethod(slow_scores)
    config = PlainViTConfig(num_labels=1)

    def __init__(self, pixel: float = 1.0):
        self.pixel = pixel

    def measure(self, data: bytes, max_pixels: int) -> int:
        return 1

    def read(self, name: str, data: bytes, max_pixels: int) -> np.ndarray:
        return np.full(1, self.pixel)


class SlowDecoder(SlowClassifier):
    """Replacement for images that decode slowly."""

    def read(self, name: str, data: bytes, max_pixels: int) -> np.ndarray:
        time.sleep(0.5)
        return super().read(name, data, max_pixels)


def in_service(classifier: SlowClassifier, use: Callable[..., Any], **limits: Any) -> Any:
    """Run a coroutine with a service, a request and an event for the client leaving, and return the service."""

    async def run() -> Any:
        service, left = app.Service(classifier, app.Limits(max_batch=1, **limits)), asyncio.Event()
        messages = [{"type": "http.request", "body": PNG, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        request = app.Request({"type": "http", "headers": [(b"content-type", b"image/png")]}, receive)
        async with service.lifespan(None):
            await use(service, request, left)
        return service

    return asyncio.run(run())


def test_a_client_that_leaves_while_its_image_is_queued_frees_its_place_and_the_image_is_not_computed() -> None:
    async def use(service: Any, request: Any, left: asyncio.Event) -> None:
        running = asyncio.create_task(service.batches.scores(np.ones(1)))
        answer = asyncio.create_task(service.predict(request, app.Options()))
        await asyncio.sleep(0.02)
        assert service.held == 1
        left.set()
        assert (await answer).status_code == 499
        assert service.held == 0
        await running
        await asyncio.sleep(0.02)

    service = in_service(SlowClassifier(), use)
    assert service.batches.counts == {"images": 1, "batches": 1}
    assert {name for name, count in service.counts.items() if count} == {"accepted", "abandoned"}


@pytest.mark.parametrize("classifier", [SlowDecoder(), SlowClassifier()])
def test_work_that_takes_too_long_is_put_off(classifier: SlowClassifier) -> None:
    async def use(service: Any, request: Any, left: asyncio.Event) -> None:
        queue = [asyncio.create_task(service.batches.scores(np.ones(1))) for _ in range(4)]  # 0.2 seconds
        with pytest.raises(app.HTTPException, match="could not be answered within 0.1 seconds: try again") as caught:
            await service.predict(request, app.Options())
        assert (caught.value.status_code, caught.value.headers) == (503, {"Retry-After": "1"})
        assert service.held == 0
        await asyncio.gather(*queue)

    service = in_service(classifier, use, max_work_seconds=0.1)
    assert service.batches.counts["images"] == 4  # without the request's image
    assert {name for name, count in service.counts.items() if count} == {"accepted", "postponed"}


def test_scores_that_are_no_numbers_are_not_an_answer() -> None:
    async def use(service: Any, request: Any, left: asyncio.Event) -> None:
        with pytest.raises(app.HTTPException) as caught:
            await service.predict(request, app.Options())
        assert caught.value.status_code == 500
        assert "scores for the image that are not finite" in caught.value.detail

    service = in_service(SlowClassifier(np.nan), use)
    assert service.held == 0
    assert {name for name, count in service.counts.items() if count} == {"accepted", "failed"}


def test_a_batch_that_fails_is_reported_to_its_requests_alone() -> None:
    async def use(batches: Any) -> Any:
        values = [1, 1, 1, -1, 1]
        return await asyncio.gather(*(batches.scores(np.full(1, v)) for v in values), return_exceptions=True)

    _, found = in_batches(use)
    assert [isinstance(one, RuntimeError) for one in found] == [True] * 4 + [False]


# Start and end


def test_a_folder_that_cannot_be_served_is_refused_at_the_start(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no onnx/model.onnx: give a folder written by `plain-vit export"):
        app.Classifier(tmp_path, 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "onnx").symlink_to(exported / "onnx")
    for file in exported.glob("*.json"):
        (other / file.name).write_text(file.read_text())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a"}, "label2id": {"a": 0}}))
    with pytest.raises(CheckpointError, match=r"two images is \(2, 7\): expected the logits of the 1 labels"):
        app.Classifier(other, 1)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"size": {"height": 25, "width": 56}}))
    with pytest.raises(CheckpointError, match=r"(?s)cannot be served \(InvalidArgument: .*export the model again"):
        app.Classifier(other, 1)
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"size": {"shortest_edge": 24}}))
    with pytest.raises(CheckpointError, match="which fit in no batch: expected one that resizes or crops to one size"):
        app.Classifier(other, 1)


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "onnx/model.onnx"])
def test_a_folder_with_a_broken_file_is_refused_by_name(file: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "broken")
    (tmp_path / "broken" / file).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"broken cannot be served \(.*\): export the model again"):
        app.Classifier(tmp_path / "broken", 1)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*: expected a positive number"):
        app.Limits(**{name: value})


def test_the_largest_image_has_room_in_the_queue() -> None:
    with pytest.raises(ValueError, match="at least 120,000,000, for one image of max_pixels"):
        app.Limits(max_pixels=60_000_000, max_queued_pixels=110_000_000)
    app.Limits(max_pixels=60_000_000, max_queued_pixels=120_000_000)


@pytest.mark.slow
def test_a_terminated_server_answers_what_it_accepted_and_takes_no_more(exported: Path, tmp_path: Path) -> None:
    expected: dict[int, Any] = {}
    statuses: list[int] = []
    with served(exported, tmp_path / "log", max_requests=16) as (process, address):

        def send_until_refused(number: int) -> None:
            while True:
                try:
                    answer = httpx2.post(f"http://{address}/predict?top=7", files={"image": encoded(picture(number))})
                except httpx2.TransportError:
                    return
                statuses.append(answer.status_code)
                if answer.status_code == 200:
                    scores = scores_of(answer.json()[0])
                    assert scores == pytest.approx(expected.setdefault(number, scores), abs=TOLERANCE)

        with begun(address, 3) as sockets, ThreadPoolExecutor(30) as threads:
            wait_until(lambda: httpx2.get(f"http://{address}/info").json()["counts"]["accepted"] == 3)
            senders = [threads.submit(send_until_refused, number) for number in range(30)]
            wait_until(lambda: len(statuses) > 100)
            process.terminate()
            for sender in senders:
                sender.result()  # none goes on: new connections are not taken
            for one in sockets:  # what was being read is still accepted
                one.sendall(PNG[-1:])
                assert one.recv(12) == b"HTTP/1.1 200"
        counts = end(process, tmp_path / "log")
    assert set(statuses) <= {200, 503}
    assert counts["accepted"] == counts["answered"] == statuses.count(200) + 3
    assert counts["refused"] >= statuses.count(503)


@pytest.mark.slow
def test_memory_is_flat_under_ten_times_the_load(exported: Path, tmp_path: Path) -> None:
    image, found = encoded(picture(size=(640, 480))), []
    with served(exported, tmp_path / "log", max_requests=8) as (_, address):
        for _ in range(4):
            load(address, [image], clients=80, seconds=draws(2, nightly=6))
            found.append(httpx2.get(f"http://{address}/info").json()["memory_mb"])
    first, *later = found
    assert max(later) < first + 10
