"""One request on its way out: its id, the headers that every answer has, and the line for the log."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping

from rubberband.api.problems import MEDIA_TYPE, Problem
from rubberband.api.security.bodies import Body, Message

Send = Callable[[Message], Awaitable[None]]

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Where a page sets one of its own, that one holds."""
_DEFAULTS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_HTTPS_ONLY = (b"strict-transport-security", b"max-age=31536000")
_ID = re.compile(r"[0-9A-Za-z._-]{1,64}", re.ASCII)

access_log = logging.getLogger("rubberband.access")


class Exchange:
    """What is answered to one request."""

    def __init__(self, send: Send, *, id: str | None, method: str, target: str, https: bool) -> None:
        self.id = id if id is not None and _ID.fullmatch(id) else secrets.token_hex(8)
        self._send, self._method, self._target, self._https = send, method, target, https
        self._began_at = time.monotonic()
        self._status = 0
        self.complete = False

    @property
    def started(self) -> bool:
        """Whether an answer has begun."""
        return self._status > 0

    async def send(self, message: Message) -> None:
        """Pass on a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = self._with_defaults(list(message.get("headers", ())))
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def answer(self, status: int, headers: Mapping[str, str], content: bytes, body: Body | None = None) -> None:
        """Answer at once; with `body`, the connection is kept until the client has sent that (or too much)."""
        told = {"Content-Length": str(len(content)), **headers}
        encoded = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in told.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})
        shown = b"" if self._method == "HEAD" else content
        await self.send({"type": "http.response.body", "body": shown, "more_body": body is not None})
        if body is not None:
            await body.drain()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, problem: Problem, body: Body | None = None) -> None:
        """Answer with a problem."""
        content = json.dumps(problem.to_json()).encode()
        await self.answer(problem.kind.status, {"Content-Type": MEDIA_TYPE, **problem.headers}, content, body)

    def tell(self, who: str, address: str) -> None:
        """Write the line of the log. The query is left out: it may hold what was pasted."""
        level = logging.DEBUG if self._target.startswith(("/static/", "/healthz", "/readyz")) else logging.INFO
        if access_log.isEnabledFor(level):
            took_ms = (time.monotonic() - self._began_at) * 1e3
            access_log.log(
                level,
                "%s %s %s %d %.1fms %s %s",
                address or "-",
                self._method,
                self._target,
                self._status,
                took_ms,
                who or "-",
                self.id,
            )

    def _with_defaults(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        present = {name.lower() for name, _ in headers}
        headers.append((b"x-request-id", self.id.encode()))
        headers.extend(pair for pair in _DEFAULTS if pair[0] not in present)
        if self._https:
            headers.append(_HTTPS_ONLY)
        return headers
