"""Serve an exported ONNX classifier over HTTP.

    plain-vit export FOLDER OUT --to onnx
    python examples/serve/app.py OUT --port 8000
    curl -F image=@cat.jpg -F image=@dog.jpg 'http://127.0.0.1:8000/predict?top=3'
    curl -H 'Content-Type: image/jpeg' --data-binary @cat.jpg http://127.0.0.1:8000/predict

On a public network, put it behind a reverse proxy such as nginx, which limits connections and waits for slow clients.

Each process serves one model. While `max_requests` requests are in progress, others are refused with 503 before their
bodies are read. Otherwise the images of a request are read, decoded by threads, and queued; one thread runs the model
on batches of queued images, from one request or many. Each step has a limit in time and size.
"""

import sys
from argparse import Namespace
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.light_package()

from plain_vit.errors import CheckpointError, PlainViTError, printable, told
from plain_vit.system.command_line import Parser


def limit(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the service; each is an option on the command line."""

    max_requests: int = limit(64, "requests that are read or computed at a time; further ones are refused with 503")
    max_images: int = limit(16, "images of one request")
    max_body: int = limit(20_000_000, "bytes of one request")
    max_pixels: int = limit(50_000_000, "pixels of one image, height times width, as sent and as resized")
    max_queued_pixels: int = limit(200_000_000, "pixels of all images to decode; a request takes half of what is free")
    max_seconds: float = limit(20.0, "seconds in which a request has to arrive after its headers")
    max_work_seconds: float = limit(10.0, "seconds in which a request that arrived is answered or refused with 503")
    max_batch: int = limit(8, "images that the model is run on at a time")
    max_wait: float = limit(0.0, "seconds that the model waits for a batch to fill")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value >= 0 or (value == 0 and name != "max_wait"):
                raise ValueError(f"{name} is {value}: expected a positive number{', or 0' * (name == 'max_wait')}")
        if 2 * self.max_pixels > self.max_queued_pixels:
            raise ValueError(
                f"max_queued_pixels is {self.max_queued_pixels:,}, of which a request takes at most half: expected at "
                f"least {2 * self.max_pixels:,}, for one image of max_pixels ({self.max_pixels:,})"
            )


def graph_of(folder: Path) -> Path:
    """Return the graph in an exported folder.

    Raises:
        CheckpointError: There is none.
    """
    graph = folder / "onnx" / "model.onnx"
    if not graph.is_file():
        raise CheckpointError(
            f"{folder} has no onnx/model.onnx: give a folder written by `plain-vit export FOLDER OUT --to onnx`"
        )
    return graph


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(None, __doc__)
    made.add_argument("folder", type=Path, help="folder that `plain-vit export --to onnx` wrote")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on; others see only this machine's")
    made.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    made.add_argument("--threads", type=int, default=0, help="threads of the model; 0 for one on each core")
    made.add_argument("--docs", action="store_true", help="serve /docs, /redoc and /openapi.json too")
    for one in fields(Limits):
        name, kind = f"--{one.name.replace('_', '-')}", type(one.default)
        made.add_argument(name, type=kind, default=one.default, help=one.metadata["help"])
    return made


def read_arguments() -> Namespace:
    """Return the command-line arguments, including the limits as one object; exit at `--help` and mistakes."""
    arguments = parser().read(sys.argv[1:])
    try:
        arguments.limits = Limits(**{one.name: getattr(arguments, one.name) for one in fields(Limits)})
    except ValueError as error:
        parser().error(str(error))
    try:
        graph_of(arguments.folder)
    except CheckpointError as error:
        leave(error)
    return arguments


def leave(error: PlainViTError) -> NoReturn:
    """Exit with an error in one line."""
    print(told(error), file=sys.stderr)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    ARGUMENTS = read_arguments()
    plain_vit_command.whole_package()

import asyncio
import logging
import math
import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import BytesIO

import numpy as np
import torch
from PIL import Image, PngImagePlugin, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from transformers import AutoConfig
from transformers.image_utils import load_image

from plain_vit import PlainViTImageProcessor
from plain_vit.image_processing_plain_vit import DEEP_MODES
from plain_vit.scores import scores as scores_of
from plain_vit.system.extras import needs

with needs("plain-vit[serve]", script=__name__ == "__main__"):
    import onnxruntime
    import psutil
    import uvicorn
    from fastapi import FastAPI, HTTPException, Query, Request, Response
    from pydantic import BaseModel, Field
    from python_multipart.exceptions import FormParserError
    from starlette.formparsers import MultiPartException, MultiPartParser
    from starlette.requests import ClientDisconnect

# Formats without nested files, so the size in the header is the size that is decoded. Pillow opens many more, including
# PostScript, which it passes to another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_SCANS = 100  # of a progressive JPEG; each scan goes through all pixels; encoders write about 10
MOST_TEXT = 4_000_000  # bytes of text in a PNG, decompressed with its header; Pillow allows 16 times as much
LONGEST_NAME = 100  # characters of a client's file name to repeat in a response
FORM, BYTES = "multipart/form-data", "application/octet-stream"
IMAGE = {"type": "string", "format": "binary"}
BODY = {FORM: {"schema": {"properties": {"image": {"type": "array", "items": IMAGE}}}}, "image/*": {"schema": IMAGE}}
log = logging.getLogger("uvicorn.error")


class BadImage(Exception):
    """Raised for an image that the service cannot classify, with the reason."""


class Classifier:
    """The graph of an exported folder, with its image processor and labels.

    Args:
        folder: Folder written by `plain-vit export --to onnx`: `onnx/model.onnx` and the two configs.
        threads: Number of threads that run the graph.
    """

    def __init__(self, folder: Path, threads: int):
        graph = graph_of(folder)
        self.name = folder.resolve().name
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads that spin while waiting take half of the CPU time from the decoders (measured).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self.config: Any = AutoConfig.from_pretrained(folder)
            self.image_processor = PlainViTImageProcessor.from_pretrained(folder)  # the folder names a stock class
            self.session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            self.input_shape = self._check()
        except CheckpointError:
            raise
        except Exception as error:  # onnxruntime's errors have no common base class
            raise CheckpointError(
                f"{folder} cannot be served ({type(error).__name__}: {error}): export the model again"
            ) from error

    def _check(self) -> tuple[int, ...]:
        """Run the graph on a wide and a tall image, and return the shape of one preprocessed image."""
        names = [one.name for one in self.session.get_inputs()]
        if names != ["pixel_values"]:
            raise CheckpointError(f"the graph takes {names}: expected ['pixel_values'], of a classifier of images")
        wide, tall = (self.pixels_of(Image.new("RGB", size)) for size in ((64, 48), (48, 64)))
        if wide.shape != tall.shape:
            raise CheckpointError(
                f"the image processor makes images of {wide.shape} and {tall.shape}, which fit in no batch: expected "
                "one that resizes or crops to one size"
            )
        scores = self.scores([wide, tall])
        if scores.shape != (2, len(self.config.id2label)):
            raise CheckpointError(
                f"the graph's first output for two images is {scores.shape}: expected the logits of the "
                f"{len(self.config.id2label)} labels in config.json"
            )
        return wide.shape

    def measure(self, data: bytes, max_pixels: int) -> int:
        """Return the pixel count of an image file, as sent or resized, from its header; 0 if `read` will refuse it."""
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                pixels = max(image.height * image.width, math.prod(self.resized(image.height, image.width)))
                return pixels if pixels <= max_pixels else 0
        except MemoryError:
            raise
        except Exception:  # broken files raise many classes of errors; `read` reports them
            return 0

    def read(self, name: str, data: bytes, max_pixels: int) -> np.ndarray:
        """Decode and preprocess one image file to (C, H, W).

        Raises:
            BadImage: The file is not an image, broken, or too large; the message names it.
        """
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > max_pixels:
                    raise BadImage(f"has {image.width} x {image.height} pixels: expected at most {max_pixels:,}")
                if image.mode in DEEP_MODES:
                    raise BadImage(f"has more than 8 bits per channel (mode {image.mode}): expected 8, scale it first")
                if isinstance(image, JpegImageFile) and (scans := data.count(b"\xff\xda")) > MOST_SCANS:
                    raise BadImage(f"has {scans} scans: expected at most {MOST_SCANS}, save it again")
                upright = load_image(image)
                self.check_resized(upright.height, upright.width, max_pixels)
                return self.processed(upright)
        except BadImage as error:
            raise BadImage(f"{name} {error}") from None
        except UnidentifiedImageError:
            known = ", ".join(FORMATS)
            raise BadImage(f"{name} begins with {data[:8]!r}, like no image: expected a file of {known}") from None
        except MemoryError:
            raise
        except Exception as error:  # decoders raise many classes of errors for broken files
            reason = printable(f"{type(error).__name__}: {error}")[:LONGEST_NAME]
            raise BadImage(f"{name} is broken ({reason}): expected a whole image file") from error

    def check_resized(self, height: int, width: int, max_pixels: int) -> None:
        """Refuse an image that the image processor would enlarge too much, such as a thin one before the centre crop.

        Raises:
            BadImage: The resized image would have too many pixels.
        """
        try:
            sides = self.resized(height, width)
        except ValueError as error:
            raise BadImage(f"cannot be resized: {error}") from None
        if sides[0] * sides[1] > max_pixels:
            raise BadImage(
                f"has {width} x {height} pixels, resized {sides[1]} x {sides[0]}: expected at most {max_pixels:,}, "
                "crop it to another aspect ratio first"
            )

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which the image processor resizes an image before cropping."""
        processor = self.image_processor
        return processor._resized_sides(height, width, processor.size) if processor.do_resize else (height, width)

    def pixels_of(self, image: Image.Image) -> np.ndarray:
        """Preprocess an image as transformers' pipeline does: upright and in RGB before the image processor."""
        return self.processed(load_image(image))

    def processed(self, image: Image.Image) -> np.ndarray:
        """Preprocess an image that is upright and in RGB."""
        return self.image_processor(image, return_tensors="np")["pixel_values"][0]

    def scores(self, images: list[np.ndarray]) -> np.ndarray:
        """Run the graph; return the scores (B, labels) that transformers' pipeline would give."""
        logits = self.session.run(None, {"pixel_values": np.stack(images)})[0]
        return scores_of(torch.from_numpy(logits), self.config.problem_type).numpy()


class Decoders:
    """Threads that decode images, within a limit on the pixels that are queued or being decoded.

    Decoding cannot be cancelled: if the client disconnects, its pixels count until the decoder finishes.

    Args:
        max_pixels: Limit of the pixels of all images together.
    """

    def __init__(self, max_pixels: int):
        self.free = max_pixels
        self.threads = ThreadPoolExecutor(os.cpu_count(), "decoder")

    def submit(self, pixels: int, decode: Callable[[], np.ndarray]) -> "asyncio.Future[np.ndarray]":
        """Queue an image; it leaves the queue if the future is cancelled."""
        loop = asyncio.get_running_loop()
        self.free -= pixels
        work = self.threads.submit(decode)
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, pixels))
        return asyncio.wrap_future(work)

    def _release(self, pixels: int) -> None:
        self.free += pixels


class Batches:
    """A queue of single images, and the loop that runs the model on batches of them.

    The queue needs no limit of its own: it holds at most `max_images` images of each of `max_requests` requests.

    Args:
        run: Computes the scores of a list of images; always called in the same thread.
        max_batch: Maximum number of images in a batch.
        max_wait: Seconds to wait for a batch to fill; 0 takes the images that are queued.
    """

    def __init__(self, run: Callable[[list[np.ndarray]], np.ndarray], max_batch: int, max_wait: float):
        self.run, self.max_batch, self.max_wait = run, max_batch, max_wait
        self.queue: asyncio.Queue[tuple[np.ndarray, asyncio.Future[np.ndarray]]] = asyncio.Queue()
        self.thread = ThreadPoolExecutor(1, "model")
        self.counts: Counter[str] = Counter(images=0, batches=0)

    async def scores(self, pixels: np.ndarray) -> np.ndarray:
        """Return the scores of one image; if the caller is cancelled while queued, the image is skipped."""
        scores: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((pixels, scores))
        return await scores

    async def run_forever(self) -> None:
        while True:
            batch = [await self.queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.max_wait):
                    while len(batch) < self.max_batch:
                        batch.append(await self.queue.get())
            batch = [(pixels, scores) for pixels, scores in batch if not scores.done()]
            if batch:
                await self._run(batch)

    async def _run(self, batch: list[tuple[np.ndarray, asyncio.Future[np.ndarray]]]) -> None:
        self.counts.update(images=len(batch), batches=1)
        images = [pixels for pixels, _ in batch]
        found: list[Any]
        try:
            found = list(await asyncio.get_running_loop().run_in_executor(self.thread, self.run, images))
        except Exception as error:
            log.exception("the model failed on a batch of %d images", len(batch))
            found = [error] * len(batch)
        for (_, scores), result in zip(batch, found, strict=True):
            if scores.done():  # the client has disconnected
                continue
            if isinstance(result, Exception):
                scores.set_exception(result)
            else:
                scores.set_result(result)


class Label(BaseModel):
    label: str
    score: float


class Prediction(BaseModel):
    file: str
    labels: list[Label]


class Options(BaseModel, extra="forbid"):
    """Options of a prediction, from the query string."""

    top: int = Field(5, ge=1, description="number of labels, the likeliest first")


class Service:
    """Handles requests within the limits."""

    def __init__(self, classifier: Classifier, limits: Limits):
        self.classifier, self.limits = classifier, limits
        self.batches = Batches(classifier.scores, limits.max_batch, limits.max_wait)
        self.decoders = Decoders(limits.max_queued_pixels)
        self.headers = ThreadPoolExecutor(1, "headers")
        self.held = 0  # requests accepted but not answered yet
        self.counts: Counter[str] = Counter(accepted=0, answered=0, rejected=0, postponed=0, abandoned=0, refused=0)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the batch loop from before the first request until after the last, for which uvicorn waits."""
        loop = asyncio.create_task(self.batches.run_forever())
        yield
        loop.cancel()
        self.decoders.threads.shutdown()
        log.info("Served: %s", ", ".join(f"{count} {name}" for name, count in self.counts.items()))

    async def predict(self, request: Request, options: Annotated[Options, Query()]) -> Any:
        """Classify the images of a form, or the single image in the body."""
        if self.held >= self.limits.max_requests:
            self.counts["refused"] += 1
            raise busy(f"{self.held} requests are in work, which is the limit")
        self.held += 1
        self.counts["accepted"] += 1
        outcome = "failed"
        try:
            answer = await self._answer(request, options.top)
            outcome = "answered"
            return answer
        except HTTPException as error:
            if error.status_code < 500:
                outcome = "rejected"
            elif error.status_code == 503:
                outcome = "postponed"
            raise
        except ClientDisconnect:
            outcome = "abandoned"
            return Response(status_code=499)  # nobody receives it
        finally:
            self.held -= 1
            self.counts[outcome] += 1

    async def _answer(self, request: Request, top: int) -> list[Prediction]:
        try:
            async with asyncio.timeout(self.limits.max_seconds):
                files = await read_files(BoundedRequest(request, self.limits.max_body), self.limits.max_images)
        except TimeoutError:
            reason = f"the request was not complete after {self.limits.max_seconds:g} seconds: send it faster"
            raise HTTPException(408, reason, headers={"Connection": "close"}) from None
        work = asyncio.create_task(self._classify(files))
        gone = asyncio.create_task(disconnected(request))
        most = self.limits.max_work_seconds
        try:
            done, _ = await asyncio.wait({work, gone}, timeout=most, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise busy(f"the request could not be answered within {most:g} seconds")
            if not work.done():
                raise ClientDisconnect
        finally:
            work.cancel()
            gone.cancel()
        return [self._prediction(name, scores, top) for (name, _), scores in zip(files, work.result(), strict=True)]

    async def _classify(self, files: list[tuple[str, bytes]]) -> list[np.ndarray]:
        """Return the scores of each image; one error lists all refused images."""
        loop, most = asyncio.get_running_loop(), self.limits.max_pixels
        sizes = await loop.run_in_executor(
            self.headers, lambda: [self.classifier.measure(data, most) for _, data in files]
        )
        self._check_pixels(sum(sizes))
        reading = [
            self.decoders.submit(pixels, partial(self.classifier.read, *file, most))
            for pixels, file in zip(sizes, files, strict=True)
        ]
        images = await asyncio.gather(*reading, return_exceptions=True)
        if faults := [str(image) for image in images if isinstance(image, BadImage)]:
            raise HTTPException(422, "; ".join(faults))
        if errors := [image for image in images if isinstance(image, BaseException)]:
            raise errors[0]
        return await asyncio.gather(*(self.batches.scores(image) for image in images if isinstance(image, np.ndarray)))

    def _check_pixels(self, pixels: int) -> None:
        """Refuse a request that would take more than half of the free pixels, to leave room for small requests.

        Raises:
            HTTPException: The request has too many pixels, at the moment (503) or in any case (422).
        """
        if pixels > (most := self.limits.max_queued_pixels // 2):
            raise HTTPException(
                422, f"the images have {pixels:,} pixels together: expected at most {most:,}, send fewer at a time"
            )
        if pixels > self.decoders.free // 2:
            raise busy(f"images of {self.limits.max_queued_pixels - self.decoders.free:,} pixels are in work")

    def _prediction(self, name: str, scores: np.ndarray, top: int) -> Prediction:
        if not np.isfinite(scores).all():
            raise HTTPException(500, f"the model gave scores for {name} that are not finite: nothing can be said of it")
        best = np.argsort(-scores, kind="stable")[:top]
        names = self.classifier.config.id2label
        return Prediction(file=name, labels=[Label(label=names[int(n)], score=float(scores[n])) for n in best])

    async def live(self) -> dict[str, str]:
        """Report that the process is alive."""
        return {"status": "live"}

    async def ready(self, response: Response) -> dict[str, str]:
        """Report whether a request would be accepted now."""
        if self.held < self.limits.max_requests:
            return {"status": "ready"}
        response.status_code = 503
        return {"status": "busy"}

    async def info(self) -> dict[str, Any]:
        """Describe the model, its image processor, the limits, and the requests served so far."""
        return {
            "model": self.classifier.name,
            "labels": len(self.classifier.config.id2label),
            "input_shape": self.classifier.input_shape,
            "image_processor": self.classifier.image_processor.settings(),
            "limits": asdict(self.limits),
            "counts": {**self.counts, **self.batches.counts},
            "memory_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
        }


def busy(reason: str) -> HTTPException:
    return HTTPException(503, f"{reason}: try again after a second", headers={"Retry-After": "1"})


class BoundedRequest(Request):
    """A request whose body is read only up to a limit, whether or not its length is declared.

    Args:
        request: The request, before its body is read.
        max_body: Limit in bytes.
    """

    def __init__(self, request: Request, max_body: int):
        super().__init__(request.scope, request.receive)
        self.max_body = max_body

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the body; all other methods that read the body call this one.

        Raises:
            HTTPException: The body is too long.
        """
        self._check(int(self.headers.get("content-length", 0)))
        length = 0
        async for chunk in super().stream():
            length += len(chunk)
            self._check(length)
            yield chunk

    def _check(self, length: int) -> None:
        if length > self.max_body:
            raise HTTPException(413, f"the request has {length:,} bytes or more: expected at most {self.max_body:,}")


class WholeForm(MultiPartParser):
    """A form parser that records whether it saw the end; a truncated form lacks its last file."""

    whole = False
    spool_max_size = sys.maxsize  # never spool files to disk, which takes descriptors; the body is limited

    def on_end(self) -> None:
        self.whole = True


async def read_files(request: Request, max_images: int) -> list[tuple[str, bytes]]:
    """Return the names and contents of the images of a request.

    Raises:
        HTTPException: The body does not hold images, or holds too many or none.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == FORM:
        return await read_form(request, max_images)
    if not kind.startswith("image/") and kind != BYTES:
        kind = printable(kind)[:LONGEST_NAME]
        raise HTTPException(415, f"the content type is {kind!r}: expected {FORM}, image/* or {BYTES}")
    return [("the image", await request.body())]


async def read_form(request: Request, max_images: int) -> list[tuple[str, bytes]]:
    """Return the names and contents of the files of a form."""
    parser = WholeForm(request.headers, request.stream(), max_files=max_images, max_fields=max_images)
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError) as error:  # older releases of Starlette raise the latter
        reason = printable(str(error))[:LONGEST_NAME]
        raise HTTPException(400, f"the form cannot be read ({reason}): expected {FORM} of files") from error
    try:
        if not parser.whole:
            raise HTTPException(400, "the form breaks off before its last boundary: send it whole")
        files: list[tuple[str, bytes]] = []
        for key, value in form.multi_items():
            if isinstance(value, str):
                key = printable(key)[:LONGEST_NAME]
                raise HTTPException(422, f"the field {key!r} is text: expected a file, with curl -F image=@FILE")
            name = printable(value.filename or f"image {len(files) + 1}")[:LONGEST_NAME]
            files.append((name, await value.read()))
    finally:
        await form.close()
    if not files:
        raise HTTPException(422, "the form has no file: expected at least one image, with curl -F image=@FILE")
    return files


async def disconnected(request: Request) -> None:
    """Wait until the client of a fully read request disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def build_app(classifier: Classifier, limits: Limits, docs: bool = False) -> FastAPI:
    """Return the application for uvicorn; `docs` adds API pages, which load scripts from other hosts."""
    service = Service(classifier, limits)
    pages: dict[str, Any] = {} if docs else {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(title="plain-vit", lifespan=service.lifespan, **pages)
    body = {"requestBody": {"content": BODY, "required": True}}
    app.post("/predict", response_model=list[Prediction], openapi_extra=body)(service.predict)
    app.get("/health/live")(service.live)
    app.get("/health/ready")(service.ready)
    app.get("/info")(service.info)
    return app


def main(arguments: Namespace) -> None:
    limits: Limits = arguments.limits
    torch.set_num_threads(1)  # images are preprocessed in parallel, each in its own thread
    Image.MAX_IMAGE_PIXELS = None  # `max_pixels` replaces it
    PngImagePlugin.MAX_TEXT_MEMORY = MOST_TEXT
    try:
        classifier = Classifier(arguments.folder, arguments.threads)
    except PlainViTError as error:
        leave(error)
    uvicorn.run(
        build_app(classifier, limits, arguments.docs),
        host=arguments.host,
        port=arguments.port,
        ws="none",
        timeout_graceful_shutdown=math.ceil(limits.max_seconds + limits.max_work_seconds),
    )


if __name__ == "__main__":
    main(ARGUMENTS)
