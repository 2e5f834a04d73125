"""Does the service grow? Mixed requests to a real server on loopback, on SQLite and on a PostgreSQL server.

Run: python tests/bench/bench_service_memory.py [REQUESTS] [sqlite|postgresql] [DIFFERENT]. Prints the resident memory
and the open files of the server and of its planners at the start, after each quarter and at the end, and asserts none.

A server remembers answers to plans, up to 64 MiB, and what 50,000 requests asked. Where all plans are different, as
they are without DIFFERENT, it grows by that (7 kB a plan here); with 100, say, all are soon known, and anything else
that grew would be seen.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rubberband.api.security import Tokens
from rubberband.api.store import open_store
from tests.builders.databases import database, programs, server
from tests.builders.fake_runs import words
from tests.builders.server_process import ServerProcess, serving

CLIENTS = 8
WARM_UP = 500
MIB = 1 << 20


class Caller:
    """One connection that is kept open."""

    def __init__(self, address: str) -> None:
        self._place = urlsplit(address)
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str] = {}, body: str = "", *, leave: bool = False
    ) -> int:
        """The status of the answer; with `leave` the connection is left amid it."""
        if self._ends is None:
            self._ends = await asyncio.open_connection(self._place.hostname, self._place.port)
        reader, writer = self._ends
        sent = {"Host": self._place.netloc, "Content-Length": str(len(body.encode())), **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", body]
        writer.write("\r\n".join(lines).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if leave:
            await reader.read(1)
        elif "content-length: " in head:
            await reader.readexactly(int(head.partition("content-length: ")[2].split("\r\n")[0]))
        elif "chunked" in head:
            while size := int((await reader.readline()).split(b";")[0], 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        if leave or "connection: close" in head:
            writer.close()
            self._ends = None
        return int(head.split()[1])


async def one(caller: Caller, number: int, bearer: Mapping[str, str], different: int) -> tuple[str, int]:
    """Send request `number`, one of `different` of its kind; return what it was and the status of its answer."""
    which = number if not different else number % (10 * different)
    sends = {**bearer, "Content-Type": "application/json"}
    wrong = f"rb_{number:012x}_{'0' * 64}"
    keyed = {**sends, "Idempotency-Key": "kept"}
    match number % 10:
        case 0 | 1:
            body = json.dumps(words(constraints__deadline=f"20m{which / 1000:g}s"))
            return "new plan", await caller.ask("POST", "/v1/plans", sends, body)
        case 2:
            return "repeated plan", await caller.ask("POST", "/v1/plans", sends, json.dumps(words()))
        case 3:
            body = f'{{"name": {which}, "x": NaN}}' if number % 20 < 10 else json.dumps(words(search__metric=which))
            return "bad input", await caller.ask("POST", "/v1/plans", sends, body)
        case 4:
            headers = {"Authorization": f"Bearer {wrong}"}
            return "wrong token", await caller.ask("GET", "/v1/experiments", headers)
        case 5:
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            return "wrong sign-in", await caller.ask("POST", "/login", form, f"token={wrong}")
        case 6:
            return "stream, left", await caller.ask("GET", "/v1/events", bearer, leave=True)
        case 7:
            body = json.dumps(words(name=f"refused-{number}", entrypoint="os:system", resources__provider="local"))
            return "refused submission", await caller.ask("POST", "/v1/experiments", sends, body)
        case 8:
            body = json.dumps(words(name="kept"))
            return "retried submission", await caller.ask("POST", "/v1/experiments", keyed, body)
    path = ("/", "/v1/experiments", "/experiments/kept", "/metrics", f"/v1/experiments/absent-{number}")[
        number // 10 % 5
    ]
    return "page or list", await caller.ask("GET", path, {**bearer, "Accept": "text/html"})


async def ask_all(
    address: str, numbers: Iterator[int], requests: int, bearer: Mapping[str, str], different: int
) -> Counter[str]:
    """So many requests by all clients; how often which kind had which status."""
    expected: Counter[str] = Counter()

    async def client(share: int) -> None:
        caller = Caller(address)
        for _ in range(share):
            kind, status = await one(caller, next(numbers), bearer, different)
            expected[f"{kind} {status}"] += 1

    await asyncio.gather(*(client(requests // CLIENTS) for _ in range(CLIENTS)))
    return expected


def sizes(process: psutil.Process) -> str:
    """Memory and open files of the server, and of the processes that it started."""
    below = process.children(recursive=True)
    planners = " + ".join(f"{child.memory_info().rss / MIB:.1f}" for child in below) or "none"
    return f"server {process.memory_info().rss / MIB:.1f} MiB, {process.num_fds()} files; planners {planners} MiB"


def measure(started: ServerProcess, token: str, requests: int, different: int) -> None:
    """Ask, and print how large it is meanwhile."""
    process, numbers, text = psutil.Process(started.process.pid), count(), Counter[str]()
    bearer = {"Authorization": f"Bearer {token}"}
    print(f"  start:          {sizes(process)}", flush=True)
    text += asyncio.run(ask_all(started.address, numbers, WARM_UP, bearer, different))
    print(f"  after {text.total():6}:   {sizes(process)}", flush=True)
    for _ in range(4):
        begun = time.monotonic()
        text += asyncio.run(ask_all(started.address, numbers, (requests - WARM_UP) // 4, bearer, different))
        rate = (requests - WARM_UP) / 4 / (time.monotonic() - begun)
        print(f"  after {text.total():6}:   {sizes(process)}; {rate:.0f} requests/s", flush=True)
    failed = sum(times for name, times in text.items() if int(name.split()[-1]) >= 500)
    print(f"  {failed} answers of 5xx; " + ", ".join(f"{name}: {times}" for name, times in sorted(text.items())))


@contextmanager
def stores(wanted: str) -> Iterator[dict[str, str | None]]:
    """The URLs of new stores, by their kinds."""
    with ExitStack() as stack:
        found: dict[str, str | None] = {"sqlite": None}
        bin = programs()
        if bin is not None and wanted in ("", "postgresql"):
            found["postgresql"] = stack.enter_context(database(stack.enter_context(server(bin)).url))
        yield {kind: url for kind, url in found.items() if wanted in ("", kind)}


def main() -> None:
    """Measure on each store."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    different = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    with stores(sys.argv[2] if len(sys.argv) > 2 else "") as urls:
        for kind, url in urls.items():
            print(f"{kind}: {requests} requests by {CLIENTS} clients", flush=True)
            with tempfile.TemporaryDirectory() as home:
                with closing(open_store(url, Path(home))) as store:
                    _, token = Tokens(store).create("bench", "submit")
                with serving(Path(home), "--auth", "--rate", "0", *(("--store", url) if url else ())) as started:
                    measure(started, token, requests, different)


if __name__ == "__main__":
    main()
