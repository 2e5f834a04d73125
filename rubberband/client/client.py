"""Clients of the service: `Client`, and `AsyncClient` for event loops of asyncio.

with rubberband.Client("http://127.0.0.1:8265") as client:
    print(client.plan("digits.yaml")["prediction"]["cost_usd"]["mean"])
    client.submit("digits.yaml")
    print(client.wait("digits")["summary"]["best_value"])
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Self
from weakref import WeakSet

import httpx
from httpx_sse import SSEError, aconnect_sse, connect_sse

import rubberband
from rubberband.client.calls import Call, Calls, EventView, ExperimentDetail, Items, T, waiting
from rubberband.errors import (
    InfeasibleError,
    InputError,
    NameTakenError,
    ProfileMissingError,
    RubberbandError,
    ServiceError,
)
from rubberband.values.plan import Change, Remedy

DEFAULT_SERVER = "http://127.0.0.1:8265"
MOST_TRIES = 4
LONGEST_WAIT_S = 10.0
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(5.0, read=45.0)
"""A stream of events has heartbeats, closer together than this."""
RECONNECT_S = 0.25
"""Pause before a stream that the service has closed is opened again."""
MOST_REOPENED = 30
"""Attempts to reopen a stream that was open once: they last about as long as the service's store may be away."""
_AGAIN = (429, 502, 503, 504)


def connection(url: str | None, token: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options of an httpx client of the service.

    By default, `url` is RUBBERBAND_SERVER and `token` RUBBERBAND_TOKEN. Raises InputError if the URL is invalid.
    """
    found = (url or environment.get("RUBBERBAND_SERVER") or DEFAULT_SERVER).rstrip("/")
    try:
        parsed = httpx.URL(found)
    except httpx.InvalidURL as error:
        raise _no_url(found, str(error)) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _no_url(found, "it has no scheme and host")
    headers = {"User-Agent": f"rubberband/{rubberband.__version__}"}
    if token := token or environment.get("RUBBERBAND_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    return {"base_url": found, "headers": headers, "timeout": TIMEOUT}


def _no_url(url: str, why: str) -> InputError:
    return InputError(f"{url!r} is not the address of a service ({why}); write it as {DEFAULT_SERVER}")


def wait_s(call: Call[Any], tried: int, outcome: httpx.Response | httpx.TransportError) -> float | None:
    """Return the pause before a call is sent again after `tried` times, or None if it is not sent again.

    Pauses grow and vary, so that clients do not come back at the same time.
    """
    if tried >= MOST_TRIES or not call.may_be_repeated:
        return None
    if isinstance(outcome, httpx.Response):
        if outcome.is_success or (outcome.status_code not in _AGAIN and not _is_being_served(outcome)):
            return None
        wanted = outcome.headers.get("Retry-After", "")
        if wanted.isascii() and wanted.isdigit():
            return min(float(wanted), LONGEST_WAIT_S)
    return _varied_s(tried)


def _varied_s(tried: int) -> float:
    longest_s: float = 0.25 * 2.0**tried
    return min(longest_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def _is_being_served(answer: httpx.Response) -> bool:
    """Whether the same request came in before, and is not answered yet."""
    return answer.status_code == 409 and b"/problems/idempotency-key-busy" in answer.content


def answer_of(call: Call[T], outcome: httpx.Response | httpx.TransportError, url: str) -> T:
    """Return the answer to a call. Raises what `raise_for` raises, and ServiceError if there is no answer."""
    if not isinstance(outcome, httpx.Response):
        raise unreachable(url, outcome) from None
    raise_for(outcome)
    answer: T = outcome.json()
    return answer


FEED_FAILURES = (httpx.TransportError, SSEError, ServiceError)
"""Errors that end a connection to the feed."""


@dataclass(slots=True)
class FeedPlace:
    """Place of a reader in the feed. Events that are sent again after a reconnection are left out."""

    last_id: int | None
    url: str
    was_open: bool = False
    """Whether the service accepted a connection."""
    failed: int = 0
    """Failures since the last event."""

    def request(self, experiment: str | None) -> dict[str, Any]:
        """Return the options of the next connection."""
        return {
            "method": "GET",
            "url": "/v1/events",
            "params": {} if experiment is None else {"experiment": experiment},
            "headers": {} if self.last_id is None else {"Last-Event-ID": str(self.last_id)},
        }

    def next(self, data: str) -> EventView | None:
        """Return the event that was sent; None for one that is known, and for control messages such as `retry`."""
        if not data:
            return None
        event: EventView = json.loads(data)
        if self.last_id is not None and event["id"] <= self.last_id:
            return None
        self.last_id, self.failed = event["id"], 0
        return event

    def pause_s(self, error: httpx.TransportError | SSEError | ServiceError) -> float:
        """Return the pause before the feed is opened again. Raises ServiceError if that would be in vain."""
        self.failed += 1
        is_final = isinstance(error, ServiceError) and error.status not in _AGAIN
        if is_final or self.failed >= (MOST_REOPENED if self.was_open else MOST_TRIES):
            raise error if isinstance(error, ServiceError) else unreachable(self.url, error) from None
        return _varied_s(self.failed)


# Problem of the service -> the exception of the same mistake without a service.
_TYPES: dict[str, type[RubberbandError]] = {
    "name-taken": NameTakenError,
    "profile-missing": ProfileMissingError,
    "invalid": InputError,
    "malformed": InputError,
    "not-allowed-here": InputError,
    "not-found": InputError,
    "conflict": InputError,
    "too-large": InputError,
    "planning-too-long": InputError,
    "idempotency-key-reused": InputError,
}


def raise_for(response: httpx.Response) -> None:
    """Raise the error that a response reports, if any; its body must have been read.

    Raises InfeasibleError, NameTakenError, ProfileMissingError, InputError (all with the service's own words), or
    ServiceError.
    """
    if response.is_success:
        return
    problem = _problem(response)
    detail = str(problem.get("detail") or f"{response.status_code} {response.reason_phrase}")
    slug = str(problem.get("type", "")).rpartition("/")[2]
    nearest = problem.get("nearest")
    if slug == "infeasible" and isinstance(nearest, dict):
        raise InfeasibleError(
            detail,
            shortest_jct_s=nearest["jct_s"],
            cheapest_usd=nearest["cost_usd"],
            remedies=[_remedy(each) for each in problem.get("remedies", ())],
        )
    if response.status_code == 401:
        raise InputError(f"{detail}; set RUBBERBAND_TOKEN, or give token=")
    if response.status_code == 403:
        raise InputError(detail)
    if slug in _TYPES:
        raise _TYPES[slug](detail)
    where = f"{response.request.method} {response.request.url.copy_with(userinfo=None, query=None)}"
    raise ServiceError(f"{where} answered {response.status_code}: {detail}", status=response.status_code)


def unreachable(url: str, error: Exception) -> ServiceError:
    """Return the error for a service that does not answer."""
    told = " ".join(str(error).split()) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in told:
        remedy = "name the file of the authority that signed it in SSL_CERT_FILE"
    else:
        remedy = "start one with `rubberband serve`, or set RUBBERBAND_SERVER"
    return ServiceError(f"the service at {url} does not answer ({told}); {remedy}", status=None)


def _remedy(words: dict[str, Any]) -> Remedy:
    changes = tuple(Change(key=one["key"], value=one["value"], was=one["was"]) for one in words["changes"])
    figures = {name: words[name] for name in ("jct_s", "cost_usd", "later_s", "dearer_usd")}
    return Remedy(changes=changes, **figures)


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        found = json.loads(response.content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Client(Calls):
    """Client of a `rubberband serve`, safe to use from several threads. Close it, or use it in a `with`.

    A method that is shown to return `Call[X]` returns an `X`; with `Items[X]` it is an iterator over `X`.

    Every method raises the same errors as without a service (InputError, NameTakenError, InfeasibleError, …), and
    ServiceError if the service does not answer or fails. Calls are retried a few times where that is safe.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        """By default `url` is RUBBERBAND_SERVER, `token` RUBBERBAND_TOKEN; `options` go to httpx.Client."""
        found = connection(url, token)
        self._url = found["base_url"]
        self._http = httpx.Client(**{**found, "transport": transport, **options})
        self._sleep = sleep

    def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until the experiment has ended, or only a resume continues it. Raises ServiceError after `timeout_s`."""
        (found,) = self._each(waiting(name, timeout_s, every_s))
        return found

    def events(self, experiment: str | None = None, *, after: int | None = None) -> Iterator[EventView]:
        """Iterate without end over the events of the feed after the id `after`, or over all; each once and in order.

        A lost connection is opened again where it was, also while the service's store is away. Raises ServiceError
        if that fails for long.
        """
        place = FeedPlace(after, self.url)
        while True:
            try:
                yield from self._stream(experiment, place)
                self._sleep(RECONNECT_S)
            except FEED_FAILURES as error:
                self._sleep(place.pause_s(error))

    def _stream(self, experiment: str | None, place: FeedPlace) -> Iterator[EventView]:
        with connect_sse(self._http, **place.request(experiment), timeout=STREAM_TIMEOUT) as source:
            if not source.response.is_success:
                source.response.read()
                raise_for(source.response)
            place.was_open = True
            for sent in source.iter_sse():
                if (event := place.next(sent.data)) is not None:
                    yield event

    def _each(self, steps: Items[T]) -> Iterator[T]:
        """Take the steps, and yield the items."""
        answer: Any = None
        with suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = None
                if isinstance(step, Call):
                    answer = self._send(step)
                elif isinstance(step, list):
                    yield from step
                else:
                    self._sleep(step)

    def _send(self, described: Call[T] | Callable[[], Call[T]]) -> T:
        call = described if isinstance(described, Call) else described()
        for tried in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(call.method, call.path, **call.options())
            except httpx.TransportError as error:
                outcome = error
            pause_s = wait_s(call, tried, outcome)
            if pause_s is None:
                break
            self._sleep(pause_s)
        return answer_of(call, outcome, self.url)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(Calls):
    """Client of a `rubberband serve` for an event loop. Close it, or use it in an `async with`.

    A method that is shown to return `Call[X]` returns an `X` if awaited; with `Items[X]` it is for `async for`.

    Every method raises the same errors as without a service (InputError, NameTakenError, InfeasibleError, …), and
    ServiceError if the service does not answer or fails. Calls are retried a few times where that is safe.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: Any,
    ) -> None:
        """By default `url` is RUBBERBAND_SERVER, `token` RUBBERBAND_TOKEN; `options` go to httpx.AsyncClient."""
        found = connection(url, token)
        self._url = found["base_url"]
        self._http = httpx.AsyncClient(**{**found, "transport": transport, **options})
        self._sleep = sleep
        self._streams = _Streams()

    async def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until the experiment has ended, or only a resume continues it. Raises ServiceError after `timeout_s`."""
        (found,) = [item async for item in self._each(waiting(name, timeout_s, every_s))]
        return found

    def events(self, experiment: str | None = None, *, after: int | None = None) -> AsyncIterator[EventView]:
        """Iterate without end over the events of the feed after the id `after`, or over all; each once and in order.

        A lost connection is opened again where it was, also while the service's store is away. Raises ServiceError
        if that fails for long.
        """
        return self._streams.of(self._events(experiment, FeedPlace(after, self.url)))

    async def _events(self, experiment: str | None, place: FeedPlace) -> AsyncGenerator[EventView]:
        while True:
            try:
                async with aclosing(self._stream(experiment, place)) as events:
                    async for event in events:
                        yield event
                await self._sleep(RECONNECT_S)
            except FEED_FAILURES as error:
                await self._sleep(place.pause_s(error))

    async def _stream(self, experiment: str | None, place: FeedPlace) -> AsyncGenerator[EventView]:
        async with aconnect_sse(self._http, **place.request(experiment), timeout=STREAM_TIMEOUT) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise_for(source.response)
            place.was_open = True
            async with aclosing(source.aiter_sse()) as all_sent:
                async for sent in all_sent:
                    if (event := place.next(sent.data)) is not None:
                        yield event

    async def _each(self, steps: Items[T]) -> AsyncIterator[T]:
        """Take the steps, and yield the items."""
        answer: Any = None
        with suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = None
                if isinstance(step, Call):
                    answer = await self._send(step)
                elif isinstance(step, list):
                    for item in step:
                        yield item
                else:
                    await self._sleep(step)

    async def _send(self, described: Call[T] | Callable[[], Call[T]]) -> T:
        call = described if isinstance(described, Call) else described()
        for tried in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(call.method, call.path, **call.options())
            except httpx.TransportError as error:
                outcome = error
            pause_s = wait_s(call, tried, outcome)
            if pause_s is None:
                break
            await self._sleep(pause_s)
        return answer_of(call, outcome, self.url)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._streams.close()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Streams:
    """Open streams of a client.

    When a loop leaves an asynchronous generator by `break`, the event loop closes it later. It then also closes the
    generators inside it at the same time, which fails. Here each is closed in order, and `close` waits for all.
    """

    def __init__(self) -> None:
        self._open: WeakSet[_Stream[Any]] = WeakSet()
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, items: AsyncGenerator[T]) -> _Stream[T]:
        """Return the generator's items as a stream."""
        stream = _Stream(items, self)
        self._open.add(stream)
        return stream

    def left(self, items: AsyncGenerator[Any]) -> None:
        """Close a generator that has no reader any more, if an event loop runs."""
        with suppress(RuntimeError):
            task = asyncio.get_running_loop().create_task(_close(items))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Wait until all are closed. One that is being read at this moment ends with its connection. Idempotent."""
        for stream in tuple(self._open):
            with suppress(RuntimeError):
                await stream.aclose()
        while self._closing:
            await asyncio.wait(tuple(self._closing))


class _Stream(AsyncIterator[T]):
    """Items of a generator that holds a connection."""

    def __init__(self, items: AsyncGenerator[T], streams: _Streams) -> None:
        self._items, self._streams, self._is_over = items, streams, False

    async def __anext__(self) -> T:
        try:
            return await anext(self._items)
        except BaseException:
            self._is_over = True
            raise

    async def aclose(self) -> None:
        """Close it. Idempotent; raises RuntimeError while it is being read."""
        await self._items.aclose()
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over:
            self._streams.left(self._items)


async def _close(items: AsyncGenerator[Any]) -> None:
    await items.aclose()
