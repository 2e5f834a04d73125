"""The service in this process, without a socket: its app lives in a thread, and tests ask it one after the other.

Not for streams: an answer is there when it is whole.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

T = TypeVar("T")
ADDRESS = "http://127.0.0.1:8642"


class Client:
    """Asks an app whose lifespan has begun."""

    def __init__(self, app: FastAPI, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        self.app, self._loop, self._patience_s = app, loop, patience_s
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url=ADDRESS)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.wait(self._client.request(method, path, **options))

    def together(self, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
        """The answers to requests that are under way at the same time."""

        async def all_of() -> list[httpx.Response]:
            asked = (self._client.request(method, path, **options) for method, path, options in requests)
            return list(await asyncio.gather(*asked))

        return self.wait(all_of())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    def relay(self, request: httpx.Request) -> httpx.Response:
        """The answer to a request of `rubberband.Client`, whose transport asks by this."""
        path, headers = request.url.raw_path.decode(), dict(request.headers)
        answer = self.request(request.method, path, headers=headers, content=request.content)
        answer.headers.pop("content-encoding", None)  # its content is decoded
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives that runs where the app lives."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(self._patience_s)


@contextmanager
def served(app: FastAPI, patience_s: float = 120.0) -> Iterator[Client]:
    """The app from its beginning to its end; no answer may take longer than `patience_s`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="service")
    thread.start()
    try:
        client = Client(app, loop, patience_s)
        living = app.router.lifespan_context(app)
        client.wait(living.__aenter__())
        try:
            yield client
        finally:
            client.wait(client._client.aclose())
            client.wait(living.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
