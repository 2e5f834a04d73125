"""Asks an ASGI app for the beginning of its answer, in this process: what may stream without end is left there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """How an answer began."""

    status: int
    headers: Mapping[str, str]


async def ask(
    app: FastAPI,
    method: str,
    path: str,
    headers: Mapping[str, str] = {},
    body: bytes = b"",
    *,
    address: str = "127.0.0.1",
    scheme: str = "http",
) -> Began:
    """The status and headers of an answer. The client leaves when it has them."""
    began: asyncio.Future[Began] = asyncio.get_running_loop().create_future()
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return unread.pop() if unread else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found = {name.decode(): value.decode() for name, value in message["headers"]}
            began.set_result(Began(status=message["status"], headers=found))

    came = {"client": (address, 1234), "scheme": scheme}
    serving = asyncio.create_task(app(_scope(method, path, headers) | came, receive, send))
    await asyncio.wait([serving], timeout=PATIENCE_S)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert began.done(), f"{method} {path} is not answered"
    return began.result()


def _scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    sent = {"host": "localhost"} | {name.lower(): value for name, value in headers.items()}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "server": ("localhost", 80),
    }
