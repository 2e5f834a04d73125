"""What every request passes before it reaches a route: a plain ASGI layer, outside of all others.

In this order: an id and the headers of the answer; the Host; the announced size of the body; who asks; whether a page
of another site asks in that one's name; how much that one asks. The body is counted while the app reads it. What is
refused is answered here, as a problem. Nothing is read, and nothing is looked up, before it has to be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import quote

from rubberband.api.problems import INTERNAL, UNAVAILABLE, Problem, problem_of
from rubberband.api.security.access import STRANGER
from rubberband.api.security.authentication import UNKNOWN, Doorkeeper, Visitor, Way, stranger_refused
from rubberband.api.security.bodies import Body, Message, Receive
from rubberband.api.security.exchange import Exchange, Send
from rubberband.api.security.hosts import require_host, require_own_page, safe_next
from rubberband.api.security.limits import Turnstile, address_key
from rubberband.api.security.tokens import Tokens
from rubberband.api.service import Service
from rubberband.errors import RubberbandError

Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC = ("/healthz", "/readyz", "/login", "/logout")
PUBLIC_BELOW = "/static/"
_STREAMS = "/v1/events"
_SIGN_IN = ("POST", "/login")
_SIGN_IN_BYTES = 32 << 10
"""Of its form, the largest body that is read of a stranger."""
_FOR_PROGRAMS = ("/v1/", "/metrics", "/openapi.json", "/problems/")

log = logging.getLogger("rubberband.server")


def secure(app: ASGIApp, service: Service) -> ASGIApp:
    """The app behind all that guards it. Inside, `request.state` has `principal`, `still_allowed` and so on."""
    settings = service.settings
    tokens = Tokens(service.store, session_s=settings.keeping.sessions_s, ended=service.feed.wake)
    return _Secured(app, service, Doorkeeper(tokens, required=settings.auth))


def is_public(path: str) -> bool:
    """Whether a path is answered without a token."""
    return path in PUBLIC or path.startswith(PUBLIC_BELOW)


class _Secured:
    def __init__(self, app: ASGIApp, service: Service, doorkeeper: Doorkeeper) -> None:
        self._app, self._settings, self._doorkeeper = app, service.settings, doorkeeper
        self._hosts = frozenset(host.lower() for host in service.settings.hosts)
        self._turnstile = Turnstile(service.settings.limits)

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
        scope.setdefault("state", {}).update(request_id=exchange.id, doorkeeper=self._doorkeeper, principal=STRANGER)
        try:
            await self._serve(scope, headers, address, body, exchange)
        except Problem as problem:
            await _refuse(exchange, problem, body, headers)
        except RubberbandError as error:
            await _refuse(exchange, problem_of(error), body, headers)
        except asyncio.CancelledError:
            # By uvicorn, of what is being served when the time to end is over, such as a body that does not come.
            if exchange.started:
                raise
            await _refuse(exchange, Problem(UNAVAILABLE, "the service ends; ask again when it is back"), body, headers)
        except Exception:
            log.exception("request %s failed", exchange.id)
            await _refuse(exchange, Problem(INTERNAL, f"this is in the log as {exchange.id}"), body, headers)
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
        still_allowed = partial(self._doorkeeper.still_good, visitor.credential)
        scope["state"].update(principal=principal, still_allowed=still_allowed)
        _require_own_page(method, headers, visitor.way)
        if principal is STRANGER and not is_public(path):
            if not _is_visit(method, path, headers):
                raise stranger_refused()
            await exchange.answer(303, {"Location": _sign_in_page(scope)}, b"")
            return
        scope["state"]["caller"] = caller = principal.token or address_key(address)
        if (method, path) == _SIGN_IN:  # by the address it would be limited by who else is there; wrong tokens are
            await self._pass_on(scope, body, exchange)
            return
        with self._turnstile.passing(caller, stream=path == _STREAMS):
            await self._pass_on(scope, body, exchange)

    async def _who(self, path: str, headers: Mapping[str, str], address: str) -> Visitor:
        try:
            return await self._doorkeeper.who(headers, address)
        except (Problem, RubberbandError):
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


async def _refuse(exchange: Exchange, problem: Problem, body: Body, headers: Mapping[str, str]) -> None:
    """Answer with a problem, unless an answer was given; one that was begun cannot be mended, only cut off."""
    if exchange.complete:
        return
    if exchange.started:
        raise problem
    sends_anyway = "connection" in {name.lower() for name in problem.headers} and "expect" not in headers
    await exchange.refuse(problem, body if sends_anyway else None)


def _headers(scope: Scope) -> dict[str, str]:
    """By name, in lower case. Of those that come twice, those that are lists are joined, and others are refused."""
    found: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
        found[name] = f"{found[name]}{'; ' if name == 'cookie' else ', '}{text}" if name in found else text
    return found


def _require_own_page(method: str, headers: Mapping[str, str], way: Way) -> None:
    """A token in a header is sent by nobody but who has it."""
    if way != "bearer":
        require_own_page(
            method,
            fetch_site=headers.get("sec-fetch-site"),
            origin=headers.get("origin"),
            host=headers.get("host", ""),
        )


def _is_visit(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a person opens a page."""
    reads = method in {"GET", "HEAD"} and headers.get("sec-fetch-mode", "navigate") == "navigate"
    return reads and not path.startswith(_FOR_PROGRAMS)


def _sign_in_page(scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("latin-1")
    wanted = safe_next(quote(scope["path"]) + (f"?{query}" if query else ""))
    return "/login" if wanted == "/" else f"/login?next={quote(wanted, safe='')}"
