"""The outermost ASGI layer, which every request passes before it reaches a route.

In this order: an id and the headers of the answer; the Host; the announced size of the body; authentication; requests
from pages of other sites; rate and concurrency. The body is counted while the app reads it. Refusals are answered here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

from rubberband.api.problems import (
    FOREIGN_HOST,
    FOREIGN_ORIGIN,
    INTERNAL,
    MALFORMED,
    MEDIA_TYPE,
    RATE,
    TOO_LARGE,
    TOO_SLOW,
    UNAVAILABLE,
    HttpProblem,
    problem_of,
)
from rubberband.api.security import (
    STRANGER,
    UNKNOWN,
    Authenticator,
    Bearer,
    Buckets,
    Tokens,
    Visitor,
    address_key,
    safe_next,
    stranger_refused,
)
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.errors import RubberbandError
from rubberband.units import shown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

BODY_S = 30.0
"""Time limit of a whole body."""
_DRAINED_BYTES = 64 << 20
_DRAINED_S = 10.0
_CLOSE = {"Connection": "close"}


class Body:
    """Body of a request, counted as it arrives and never kept. One that is too large or too slow is refused."""

    def __init__(self, receive: Receive, *, limit_bytes: int, within_s: float = BODY_S) -> None:
        self._receive, self._limit_bytes, self._within_s = receive, limit_bytes, within_s
        self._read_bytes = 0
        self._whole = False
        self._deadline: float | None = None
        self.problem: HttpProblem | None = None
        """Reason of a refusal; it replaces any answer of the app."""

    def require_announced(self, content_length: str | None) -> None:
        """Raise Problem if the announced size is too large, before any of it is read."""
        if content_length is None:
            return
        if not (content_length.isascii() and content_length.isdigit()):
            raise HttpProblem(MALFORMED, "Content-Length is not a number", headers=_CLOSE)
        if len(content_length) > 18 or int(content_length) > self._limit_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next message for the app. Raises Problem."""
        if self.problem is not None:
            raise self.problem
        if self._whole:
            return await self._receive()
        message = await self._next()
        if self._read_bytes > self._limit_bytes:
            self.problem = self._too_large()
            raise self.problem
        return message

    async def drain(self) -> None:
        """Read and discard for some seconds: clients that send everything first can then read the answer."""
        try:
            async with asyncio.timeout(_DRAINED_S):
                while not self._whole and self._read_bytes < _DRAINED_BYTES:
                    await self._counted()
        except TimeoutError:
            return

    async def _counted(self) -> Message:
        message = await self._receive()
        self._read_bytes += len(message.get("body", b""))
        self._whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def _next(self) -> Message:
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._within_s
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._counted()
        except TimeoutError:
            detail = f"the body did not arrive within {self._within_s:g} s; send it faster"
            self.problem = HttpProblem(TOO_SLOW, detail, headers=_CLOSE)
            raise self.problem from None

    def _too_large(self) -> HttpProblem:
        more = "send less, or ask the operator to raise --body-limit"
        detail = f"the body has more than {self._limit_bytes} bytes; {more}"
        return HttpProblem(TOO_LARGE, detail, headers=_CLOSE, limit_bytes=self._limit_bytes)


Send = Callable[[Message], Awaitable[None]]

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Default policy. Plotly writes inline styles; no page writes inline scripts."""
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
    """Answer to one request: its id, its default headers, and its line in the log."""

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
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = self._with_defaults(list(message.get("headers", ())))
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def answer(self, status: int, headers: Mapping[str, str], content: bytes, body: Body | None = None) -> None:
        """Answer at once; with `body`, keep the connection until the client has sent it (or too much)."""
        fields = {"Content-Length": str(len(content)), **headers}
        encoded = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": content, "more_body": body is not None})
        if body is not None:
            await body.drain()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, problem: HttpProblem, body: Body | None = None) -> None:
        """Answer with a problem."""
        content = json.dumps(problem.to_json()).encode()
        await self.answer(problem.kind.status, {"Content-Type": MEDIA_TYPE, **problem.headers}, content, body)

    def tell(self, who: str, address: str) -> None:
        """Write the line of the log, without the query, which may hold pasted secrets."""
        level = logging.DEBUG if self._target.startswith(("/static/", "/healthz", "/readyz")) else logging.INFO
        if access_log.isEnabledFor(level):
            took_ms = (time.monotonic() - self._began_at) * 1e3
            asked = (address or "-", self._method, self._target)
            access_log.log(level, "%s %s %s %d %.1fms %s %s", *asked, self._status, took_ms, who or "-", self.id)

    def _with_defaults(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        present = {name.lower() for name, _ in headers}
        headers.append((b"x-request-id", self.id.encode()))
        headers.extend(pair for pair in _DEFAULTS if pair[0] not in present)
        if self._https:
            headers.append(_HTTPS_ONLY)
        return headers


# Checks of a request: rate and concurrency of its caller, its Host, and the page that sent it.


class RateLimiter:
    """Limits the rate and the concurrency of callers."""

    def __init__(self, limits: ServiceLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._buckets = Buckets(per_s=limits.requests_per_s, burst=limits.burst, clock=clock)
        self._inside: Counter[tuple[str, bool]] = Counter()

    @contextmanager
    def passing(self, key: str, *, stream: bool) -> Iterator[None]:
        """Count a request while it is served. Raises Problem (RATE)."""
        wait_s = self._buckets.take(key)
        if wait_s:
            limits = self._limits
            raise self._buckets.refuse(
                wait_s, f"more than {limits.requests_per_s:g} requests a second, after {limits.burst} at once"
            )
        inside = (key, stream)
        most = self._limits.streams if stream else self._limits.concurrent
        if self._inside.get(inside, 0) >= most:
            raise _crowded(most, "streams of events are open" if stream else "requests are being served")
        self._inside[inside] += 1
        try:
            yield
        finally:
            self._inside[inside] -= 1
            if not self._inside[inside]:
                del self._inside[inside]


def _crowded(most: int, what: str) -> HttpProblem:
    headers = {"Retry-After": "1", "RateLimit-Policy": f'"concurrent";q={most}', "RateLimit": '"concurrent";r=0'}
    return HttpProblem(RATE, f"{most} {what} already, the most at the same time; wait for one to end", headers=headers)


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def host_of(value: str) -> str:
    """Return the name in a Host header, lower-case, without port and final dot: `[::1]:80` -> `[::1]`."""
    name, colon, port = value.strip().rpartition(":")
    if not colon or not (port == "" or port.isdigit()):
        name = value.strip()
    return name.lower().removesuffix(".")


def require_host(values: Collection[str], served: Collection[str]) -> None:
    """Raise Problem for a request to another host name (DNS rebinding)."""
    if "*" in served:
        return
    host = host_of(next(iter(values))) if len(values) == 1 else ""
    if host not in served:
        asked = shown(host) if host else "no single host"
        raise HttpProblem(
            FOREIGN_HOST,
            f"this service does not answer for the host {asked}; use one of its names, or start it with --host-name",
        )


def require_own_page(method: str, *, fetch_site: str | None, origin: str | None, host: str) -> None:
    """Raise Problem for a change that a page of another site requests (CSRF).

    Browsers send Sec-Fetch-Site, or else Origin; other clients send neither.
    """
    if method in SAFE_METHODS:
        return
    if fetch_site is not None:
        own = fetch_site in {"same-origin", "none"}
    else:
        own = origin is None or _netloc(origin) == host.lower()
    if not own:
        raise HttpProblem(
            FOREIGN_ORIGIN,
            "a page of another site sent this request; send it from this service's pages, or with a token",
        )


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC = ("/healthz", "/readyz", "/login", "/logout")
PUBLIC_BELOW = "/static/"
_STREAMS = "/v1/events"
_SIGN_IN = ("POST", "/login")
_SIGN_IN_BYTES = 32 << 10
"""Largest body of the form to sign in, which strangers send."""
_FOR_PROGRAMS = ("/v1/", "/metrics", "/openapi.json", "/problems/")

log = logging.getLogger("rubberband.server")


def secure(app: ASGIApp, settings: Settings, tokens: Tokens) -> ASGIApp:
    """Return the app behind all checks. They set `principal`, `still_allowed` and so on in `request.state`."""
    return _Secured(app, settings, Authenticator(tokens, required=settings.auth))


def is_public(path: str) -> bool:
    """Whether a path needs no token."""
    return path in PUBLIC or path.startswith(PUBLIC_BELOW)


class _Secured:
    def __init__(self, app: ASGIApp, settings: Settings, authenticator: Authenticator) -> None:
        self._app, self._settings, self._authenticator = app, settings, authenticator
        self._hosts = frozenset(host.lower() for host in settings.hosts)
        self._rates = RateLimiter(settings.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, address = _headers(scope), (scope.get("client") or ("",))[0]
        exchange = Exchange(
            send,
            id=headers.get("x-request-id"),
            method=scope["method"],
            target=scope.get("raw_path", b"").decode("latin-1") or quote(scope["path"]),
            https=scope.get("scheme") == "https",
        )
        most_bytes = self._settings.limits.body_bytes
        signs_in = (scope["method"], scope["path"]) == _SIGN_IN
        body = Body(receive, limit_bytes=min(most_bytes, _SIGN_IN_BYTES) if signs_in else most_bytes)
        scope.setdefault("state", {}).update(
            request_id=exchange.id, authenticator=self._authenticator, principal=STRANGER
        )
        try:
            await self._serve(scope, headers, address, body, exchange)
        except HttpProblem as problem:
            await _refuse(exchange, problem, body, headers)
        except RubberbandError as error:
            await _refuse(exchange, problem_of(error), body, headers)
        except asyncio.CancelledError:
            # By uvicorn, after the grace period of a shutdown.
            if exchange.started:
                raise
            await _refuse(
                exchange, HttpProblem(UNAVAILABLE, "the service is shutting down; try again later"), body, headers
            )
        except Exception:
            log.exception("request %s failed", exchange.id)
            await _refuse(exchange, HttpProblem(INTERNAL, f"the log has details under {exchange.id}"), body, headers)
        finally:
            exchange.tell(scope["state"]["principal"].name, address)

    async def _serve(
        self, scope: Scope, headers: Mapping[str, str], address: str, body: Body, exchange: Exchange
    ) -> None:
        path, method = scope["path"], scope["method"]
        require_host([value.decode("latin-1") for name, value in scope["headers"] if name == b"host"], self._hosts)
        body.require_announced(headers.get("content-length"))
        visitor = await self._who(path, headers, address)
        principal = visitor.principal
        still_allowed = partial(self._authenticator.still_good, visitor.credential)
        scope["state"].update(principal=principal, still_allowed=still_allowed)
        if not isinstance(visitor.credential, Bearer):  # browsers send no such header by themselves
            site, origin = headers.get("sec-fetch-site"), headers.get("origin")
            require_own_page(method, fetch_site=site, origin=origin, host=headers.get("host", ""))
        if principal is STRANGER and not is_public(path):
            if not _is_visit(method, path, headers):
                raise stranger_refused()
            await exchange.answer(303, {"Location": _sign_in_page(scope)}, b"")
            return
        scope["state"]["caller"] = caller = principal.token or address_key(address)
        if (method, path) == _SIGN_IN:  # limited by wrong tokens, not by its address, which others share
            await self._pass_on(scope, body, exchange)
            return
        with self._rates.passing(caller, stream=path == _STREAMS):
            await self._pass_on(scope, body, exchange)

    async def _who(self, path: str, headers: Mapping[str, str], address: str) -> Visitor:
        try:
            return await self._authenticator.who(headers, address)
        except (HttpProblem, RubberbandError):
            if is_public(path):
                return UNKNOWN
            raise

    async def _pass_on(self, scope: Scope, body: Body, exchange: Exchange) -> None:
        async def send(message: Message) -> None:
            if body.problem is None or exchange.started:
                await exchange.send(message)

        try:
            await self._app(scope, body.receive, send)
        except Exception:
            if body.problem is None:
                raise
        if body.problem is not None:
            raise body.problem


async def _refuse(exchange: Exchange, problem: HttpProblem, body: Body, headers: Mapping[str, str]) -> None:
    """Answer with a problem, unless the answer is complete; cut off an answer that has begun."""
    if exchange.complete:
        return
    if exchange.started:
        raise problem
    sends_anyway = "connection" in {name.lower() for name in problem.headers} and "expect" not in headers
    await exchange.refuse(problem, body if sends_anyway else None)


def _headers(scope: Scope) -> dict[str, str]:
    """Return lower-case name -> value; repeated headers are joined."""
    found: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
        found[name] = f"{found[name]}{'; ' if name == 'cookie' else ', '}{text}" if name in found else text
    return found


def _is_visit(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a browser opens a page."""
    reads = method in {"GET", "HEAD"} and headers.get("sec-fetch-mode", "navigate") == "navigate"
    return reads and not path.startswith(_FOR_PROGRAMS)


def _sign_in_page(scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("latin-1")
    wanted = safe_next(quote(scope["path"]) + (f"?{query}" if query else ""))
    return "/login" if wanted == "/" else f"/login?next={quote(wanted, safe='')}"
