"""Load-test a running server from this machine, and print the outcome of all requests.

    python examples/serve/app.py OUT &
    python examples/serve/load_test.py 127.0.0.1:8000 examples/space/images/*.png

First, each image is sent alone; later answers are compared with these answers. Then clients that each send one request
after the other (closed loop) keep the server busy. The open loops start requests at regular intervals, whether or not
earlier ones are answered: at half, once and ten times the rate of the closed loop. Memory is that of the server, after
each load.
"""

import argparse
import asyncio
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-4  # of a score: rounding differs with the batch size
LONGEST = 60.0  # seconds until a request counts as failed
MOST_OPEN = 500  # open connections of the client, whose limits differ from the server's
HEADINGS = (
    "load",
    "due/s",
    "sent",
    "answered",
    "503",
    "failed",
    "wrong",
    "answered/s",
    "p50 ms",
    "p99 ms",
    "memory MB",
)


async def exchange(address: str, head: str, body: bytes = b"") -> tuple[int, Any]:
    """Send one request on its own connection; return the status and the JSON of the response.

    A general HTTP client would spend more time on a request than the server, on the same cores.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{head} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n".encode())
        writer.write(b"Content-Type: application/octet-stream\r\n\r\n" + body)
        status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        fields = dict(line.lower().split(": ", 1) for line in headers if line)
        return int(status.split()[1]), json.loads(await reader.readexactly(int(fields["content-length"])))
    finally:
        writer.close()


class LoadTest:
    """Sends images in turn, and counts the outcomes of the requests.

    Args:
        address: Host and port of the server.
        paths: Image files.
    """

    def __init__(self, address: str, paths: list[Path]):
        self.address, self.contents = address, [path.read_bytes() for path in paths]
        self.turns = itertools.cycle(range(len(paths)))
        self.expected: dict[int, dict[str, float]] = {}
        self.outcomes: Counter[str] = Counter()
        self.latencies: list[float] = []

    async def send(self) -> None:
        """Send the next image, and count the outcome."""
        self.outcomes["sent"] += 1
        turn, start = next(self.turns), time.perf_counter()
        try:
            async with asyncio.timeout(LONGEST):
                status, answer = await exchange(self.address, "POST /predict?top=1000", self.contents[turn])
        except (OSError, EOFError):
            status, answer = 0, None
        if status != 200:
            self.outcomes["refused" if status == 503 else "failed"] += 1
            return
        self.latencies.append(time.perf_counter() - start)
        scores = {one["label"]: one["score"] for one in answer[0]["labels"]}
        alone = self.expected.setdefault(turn, scores)
        same = scores.keys() == alone.keys() and all(abs(scores[key] - alone[key]) < TOLERANCE for key in alone)
        self.outcomes["answered" if same else "wrong"] += 1

    async def alone(self) -> None:
        """Send each image alone, and store the answers."""
        for _ in self.contents:
            await self.send()
        if len(self.expected) < len(self.contents):
            raise SystemExit(f"{dict(self.outcomes)}: give images and an address that are answered")

    async def closed_loop(self, clients: int, seconds: float) -> None:
        """Let this many clients each send one request after the other."""
        end = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self.send()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open_loop(self, rate: float, seconds: float) -> None:
        """Start requests at regular intervals, as far as this process keeps up."""
        start, free = time.perf_counter(), asyncio.Semaphore(MOST_OPEN)
        async with asyncio.TaskGroup() as tasks:
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
                await free.acquire()
                if time.perf_counter() > start + seconds:
                    break
                tasks.create_task(self.send()).add_done_callback(lambda _: free.release())

    async def measured(self, name: str, rate: float, load: Coroutine[Any, Any, None]) -> tuple[Any, ...]:
        """Run a load; return its row of the table."""
        self.outcomes.clear()
        self.latencies.clear()
        start = time.perf_counter()
        await load
        seconds = time.perf_counter() - start
        _, info = await exchange(self.address, "GET /info")
        counts = [self.outcomes[name] for name in ("sent", "answered", "refused", "failed", "wrong")]
        middle, slow = np.percentile(self.latencies or [math.nan], [50, 99]) * 1000
        return name, rate, *counts, counts[1] / seconds, middle, slow, info["memory_mb"]


async def rows_of(address: str, paths: list[Path], clients: int, seconds: float) -> AsyncIterator[tuple[Any, ...]]:
    """Run all loads, one after the other; yield a row for each."""
    test = LoadTest(address, paths)
    yield await test.measured("one by one", math.nan, test.alone())
    busy = await test.measured(f"{clients} clients", math.nan, test.closed_loop(clients, seconds))
    yield busy
    for times in (0.5, 1, 10, 10):
        rate = times * busy[HEADINGS.index("answered/s")]
        yield await test.measured(f"{times:g} times that", rate, test.open_loop(rate, seconds))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="host and port of the server")
    parser.add_argument("images", type=Path, nargs="+", help="image files")
    parser.add_argument("--clients", type=int, default=16, help="clients of the closed loop (16)")
    parser.add_argument("--seconds", type=float, default=8, help="seconds of each load (8)")
    arguments = parser.parse_args()
    print(" | ".join(HEADINGS))
    async for row in rows_of(arguments.address, arguments.images, arguments.clients, arguments.seconds):
        print(" | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
