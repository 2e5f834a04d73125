"""The body of a request, counted as it comes in and never kept: too much of it, or too slow, is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rubberband.api.problems import MALFORMED, TOO_LARGE, TOO_SLOW, Problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

BODY_S = 30.0
"""A body must be there whole by then."""
_DRAINED_BYTES = 64 << 20
_DRAINED_S = 10.0
_CLOSE = {"Connection": "close"}


class Body:
    """What an app receives of a request."""

    def __init__(self, receive: Receive, *, limit_bytes: int, within_s: float = BODY_S) -> None:
        self._receive, self._limit_bytes, self._within_s = receive, limit_bytes, within_s
        self._read_bytes = 0
        self._whole = False
        self._deadline: float | None = None
        self.problem: Problem | None = None
        """Why it is refused, once it is: what the app made of that is of no interest."""

    def require_announced(self, content_length: str | None) -> None:
        """Refuse what is announced as too large, before any of it is read. Raises Problem."""
        if content_length is None:
            return
        if not (content_length.isascii() and content_length.isdigit()):
            raise Problem(MALFORMED, "Content-Length is not a number", headers=_CLOSE)
        if len(content_length) > 18 or int(content_length) > self._limit_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next message for the app. Raises Problem for what is refused."""
        if self.problem is not None:
            raise self.problem
        if self._whole:
            return await self._receive()
        message = await self._next()
        self._read_bytes += len(message.get("body", b""))
        self._whole = message["type"] != "http.request" or not message.get("more_body", False)
        if self._read_bytes > self._limit_bytes:
            self.problem = self._too_large()
            raise self.problem
        return message

    async def drain(self) -> None:
        """Read on and throw away, for some seconds: who sends all before it reads shall find the answer."""
        try:
            async with asyncio.timeout(_DRAINED_S):
                while not self._whole and self._read_bytes < _DRAINED_BYTES:
                    message = await self._receive()
                    self._read_bytes += len(message.get("body", b""))
                    self._whole = message["type"] != "http.request" or not message.get("more_body", False)
        except TimeoutError:
            return

    async def _next(self) -> Message:
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._within_s
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            detail = f"the body was not there within {self._within_s:g} s; send it faster"
            self.problem = Problem(TOO_SLOW, detail, headers=_CLOSE)
            raise self.problem from None

    def _too_large(self) -> Problem:
        detail = f"the body has more than {self._limit_bytes} bytes; send less, or let the operator raise --body-limit"
        return Problem(TOO_LARGE, detail, headers=_CLOSE, limit_bytes=self._limit_bytes)
