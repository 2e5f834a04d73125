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
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any, Concatenate, ParamSpec, Self
from urllib.parse import quote
from weakref import WeakSet

import httpx
from httpx_sse import SSEError, aconnect_sse, connect_sse

import rubberband
from rubberband.client import calls, models
from rubberband.client.calls import Call, T, raise_for, unreachable
from rubberband.client.models import EventView, ExperimentDetail
from rubberband.errors import InputError, ServiceError
from rubberband.states import ACTIVE, State

P = ParamSpec("P")

DEFAULT_SERVER = "http://127.0.0.1:8265"
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(5.0, read=45.0)
"""A stream of events has heartbeats, closer together than this."""
RECONNECT_S = 0.25
"""Pause before a stream that the service has closed is opened again."""
MOST_REOPENED = 30
"""Attempts to reopen a stream that was open once: they last about as long as the service's store may be away."""


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
        is_final = isinstance(error, ServiceError) and error.status not in calls.BUSY
        if is_final or self.failed >= (MOST_REOPENED if self.was_open else calls.MOST_TRIES):
            raise error if isinstance(error, ServiceError) else unreachable(self.url, error) from None
        return calls.varied_s(self.failed)


class _Connected:
    _url: str

    @property
    def url(self) -> str:
        """Address of the service."""
        return self._url


def _require_time(found: ExperimentDetail, until: float | None, timeout_s: float | None) -> None:
    """Raise ServiceError once an experiment was waited for too long."""
    if until is not None and time.monotonic() >= until:
        text = f"{found['name']} is still {found['state']} after {timeout_s:g} s; wait longer"
        raise ServiceError(text, status=None)


class Client(_Connected):
    """Client of a `rubberband serve`, safe to use from several threads. Close it, or use it in a `with`.

    Every method raises the same errors as without a service (InputError, NameTakenError, InfeasibleError, …), and
    ServiceError if the service does not answer or fails. Calls are retried a few times where that is safe.

    Examples:
        >>> with rubberband.Client() as client:  # RUBBERBAND_SERVER, or http://127.0.0.1:8265
        ...     for experiment in client.experiments():
        ...         print(experiment["name"], experiment["state"])
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

    def plan(
        self,
        experiment: calls.Submittable,
        *,
        overrides: Sequence[str] = (),
        policy: str = "optimal",
        frontier: bool = False,
        size: bool = False,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Predict the time and cost of an experiment (`rubberband.estimate/1`, with the plan's `id`). Spends nothing.

        `experiment` is an Experiment, its words as a mapping, or the path of its file. With `size`, its search is
        first sized to the limits. Raises InfeasibleError, with the nearest limits.
        """
        words = calls.self_contained(experiment, overrides)
        return self._send(calls.post("/v1/plans", words, policy=policy, frontier=frontier, size=size, seed=seed))

    def stored_plan(self, id: str) -> dict[str, Any]:
        """Return a plan of an earlier preview."""
        return self._send(calls.get(f"/v1/plans/{quote(id, safe='')}"))

    def submit(
        self,
        experiment: calls.Submittable,
        *,
        overrides: Sequence[str] = (),
        policy: str = "optimal",
        plan: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.SubmittedView:
        """Plan an experiment and start it. A submission that is repeated with the same key starts it once.

        Raises InfeasibleError if no plan meets its constraints, NameTakenError if there is one of its name.
        """
        words = calls.self_contained(experiment, overrides)
        return self._send(calls.act("/v1/experiments", words, key=idempotency_key, policy=policy, plan=plan))

    def experiments(
        self, *states: State, search: str = "", tags: Sequence[str] = (), archived: bool = False
    ) -> Iterator[models.ExperimentView]:
        """Iterate over the experiments, newest first; only over those in one of `states`, if any are given.

        Every word of `search` is part of the name, owner, state, note or a tag, and each has all `tags`. With
        `archived`, iterate over those that were archived instead.
        """
        asked = {"search": search or None, "archived": "true" if archived else None, "limit": 100}
        return self._pages("/v1/experiments", state=states, tag=tags, **asked)

    def experiment(self, name: str) -> ExperimentDetail:
        """Return one experiment: its status, stages and forecast."""
        return self._send(calls.get(calls.path(name)))

    def trials(self, name: str, *, curves: bool = False) -> Iterator[dict[str, Any]]:
        """Iterate over the trials of an experiment; with `curves`, each has its learning curve."""
        return self._pages(calls.path(name, "/trials"), curves=curves, limit=500)

    def allocations(self, name: str) -> models.Allocations:
        """Return the instances of an experiment, the use of their GPUs, and the plan."""
        return self._send(calls.get(calls.path(name, "/allocations")))

    def costs(self, name: str) -> models.Costs:
        """Return the bill of an experiment, by stage and instance."""
        return self._send(calls.get(calls.path(name, "/costs")))

    def decisions(self, name: str) -> models.Decisions:
        """Return the decisions at each SYNC, and the extensions of the limits."""
        return self._send(calls.get(calls.path(name, "/decisions")))

    def report(self, name: str) -> dict[str, Any]:
        """Return the result of an experiment, as `rubberband report -o json` prints it."""
        return self._send(calls.get(calls.path(name, "/report")))

    def logs(
        self,
        name: str,
        *,
        trial: int | None = None,
        source: str = "trials",
        follow: bool = False,
        every_s: float = 1.0,
    ) -> Iterator[models.LogLine]:
        """Iterate over the output of the trials, or with source="process" of the experiment's process.

        With `follow`, wait for more lines until the experiment has ended.
        """
        cursor: str | None = None
        is_over = not follow
        while True:
            page = self._send(calls.logs(name, source, trial, cursor))
            yield from page["lines"]
            cursor = page["next"]
            if page["lines"]:
                continue
            if is_over:
                return
            is_over = self.experiment(name)["state"] not in ACTIVE
            if not is_over:
                self._sleep(every_s)

    def cancel(self, name: str, *, idempotency_key: str | None = None) -> models.ExperimentView:
        """Request a clean end: instances are released, and the best result so far is kept."""
        return self._send(calls.act(calls.path(name, "/cancel"), key=idempotency_key))

    def resume(self, name: str, *, idempotency_key: str | None = None) -> models.ExperimentView:
        """Resume an experiment that was interrupted."""
        return self._send(calls.act(calls.path(name, "/resume"), key=idempotency_key))

    def tag(
        self,
        name: str,
        *add: str,
        remove: Sequence[str] = (),
        note: str | None = None,
        archived: bool | None = None,
    ) -> models.ExperimentView:
        """Add and remove tags, replace the note, and archive an experiment or undo that; None leaves a value as it is.

        Lists leave out what is archived, unless it runs.
        """
        change = {"add_tags": add, "remove_tags": remove, "note": note, "archived": archived}
        body = {word: value for word, value in change.items() if value not in (None, ())}
        return self._send(calls.patch(calls.path(name), body))

    def delete(self, name: str, *, dry_run: bool = False, idempotency_key: str | None = None) -> models.RemovalView:
        """Delete an experiment that has ended, with its journal, logs and checkpoints; with `dry_run`, only look.

        Checkpoints in a bucket stay, and its cost counts on.
        """
        return self._send(calls.delete(calls.path(name), key=idempotency_key, dry_run="true" if dry_run else None))

    def extend(
        self,
        name: str,
        *,
        deadline: str | float | None = None,
        max_cost: str | float | None = None,
        dry_run: bool = True,
        idempotency_key: str | None = None,
    ) -> models.ExtensionView:
        """Show the effect of a later deadline or a larger budget; with dry_run=False, grant it.

        A `deadline` is a duration from the start, as in the experiment's file, or a time with its zone; `max_cost` is
        in US dollars, such as 5 or "$5".
        """
        limits = {"deadline": deadline, "max_cost": max_cost, "dry_run": dry_run}
        body = {word: value for word, value in limits.items() if value is not None}
        send = calls.post if dry_run else calls.act
        return self._send(send(calls.path(name, "/extend"), body, key=None if dry_run else idempotency_key))

    def limit(
        self, name: str, max_instances: int | None, *, idempotency_key: str | None = None
    ) -> models.ExperimentView:
        """Limit the instances of a running experiment from now on: 0 pauses it, None lifts the limit."""
        body = {"max_instances": max_instances}
        return self._send(calls.act(calls.path(name, "/limit"), body, key=idempotency_key))

    def stop(self, name: str, trial: int, *, idempotency_key: str | None = None) -> models.ExperimentView:
        """Stop one trial of a running experiment for good; its latest report and checkpoint are kept.

        Raises InputError for a trial that is over or unknown.
        """
        return self._send(calls.act(calls.path(name, f"/trials/{trial}/stop"), key=idempotency_key))

    def prices(self, *types: str, region: str = "us-east-1") -> models.PriceList:
        """Return the resources and prices of instance types."""
        return self._send(calls.get("/v1/prices", type=types, region=region))

    def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until the experiment has ended, or only a resume continues it. Raises ServiceError after `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self.experiment(name)
            if found["state"] not in ACTIVE:
                return found
            _require_time(found, until, timeout_s)
            self._sleep(every_s)

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

    def _pages(self, path: str, **params: Any) -> Iterator[Any]:
        cursor: str | None = None
        while True:
            page: dict[str, Any] = self._send(calls.get(path, cursor=cursor, **params))
            yield from page["items"]
            cursor = page["next"]
            if cursor is None:
                return

    def _send(self, call: Call[T]) -> T:
        for tried in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(call.method, call.path, **call.options())
            except httpx.TransportError as error:
                outcome = error
            pause_s = calls.wait_s(call, tried, outcome)
            if pause_s is None:
                break
            self._sleep(pause_s)
        return calls.answer_of(call, outcome, self.url)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return a method of `Client` for the client whose requests are awaited."""

    @wraps(method)
    async def ask(client: Any, *args: P.args, **options: P.kwargs) -> T:
        answer: Awaitable[T] = method(client, *args, **options)  # type: ignore[assignment]
        return await answer

    return ask  # type: ignore[return-value]


def _iterated(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """Return a method of `Client` that iterates over pages for the client that awaits each."""
    return method  # type: ignore[return-value]


class AsyncClient(_Connected):
    """Client of a `rubberband serve` for an event loop. Close it, or use it in an `async with`.

    Its methods are those of `Client`, to be awaited; those that iterate are for `async for`.

    Every method raises the same errors as without a service (InputError, NameTakenError, InfeasibleError, …), and
    ServiceError if the service does not answer or fails. Calls are retried a few times where that is safe.

    Examples:
        >>> import asyncio
        >>> async def names():
        ...     async with rubberband.AsyncClient() as client:
        ...         return [experiment["name"] async for experiment in client.experiments()]
        >>> asyncio.run(names())
        []
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

    plan = _awaited(Client.plan)
    stored_plan = _awaited(Client.stored_plan)
    submit = _awaited(Client.submit)
    experiments = _iterated(Client.experiments)
    experiment = _awaited(Client.experiment)
    trials = _iterated(Client.trials)
    allocations = _awaited(Client.allocations)
    costs = _awaited(Client.costs)
    decisions = _awaited(Client.decisions)
    report = _awaited(Client.report)
    cancel = _awaited(Client.cancel)
    resume = _awaited(Client.resume)
    extend = _awaited(Client.extend)
    limit = _awaited(Client.limit)
    stop = _awaited(Client.stop)
    tag = _awaited(Client.tag)
    delete = _awaited(Client.delete)
    prices = _awaited(Client.prices)

    async def logs(
        self,
        name: str,
        *,
        trial: int | None = None,
        source: str = "trials",
        follow: bool = False,
        every_s: float = 1.0,
    ) -> AsyncIterator[models.LogLine]:
        """Iterate over the output of the trials, as `Client.logs` does."""
        cursor: str | None = None
        is_over = not follow
        while True:
            page = await self._send(calls.logs(name, source, trial, cursor))
            for line in page["lines"]:
                yield line
            cursor = page["next"]
            if page["lines"]:
                continue
            if is_over:
                return
            is_over = (await self.experiment(name))["state"] not in ACTIVE
            if not is_over:
                await self._sleep(every_s)

    async def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until the experiment has ended, or only a resume continues it. Raises ServiceError after `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = await self.experiment(name)
            if found["state"] not in ACTIVE:
                return found
            _require_time(found, until, timeout_s)
            await self._sleep(every_s)

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

    async def _pages(self, path: str, **params: Any) -> AsyncIterator[Any]:
        cursor: str | None = None
        while True:
            page: dict[str, Any] = await self._send(calls.get(path, cursor=cursor, **params))
            for item in page["items"]:
                yield item
            cursor = page["next"]
            if cursor is None:
                return

    async def _send(self, call: Call[T]) -> T:
        for tried in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(call.method, call.path, **call.options())
            except httpx.TransportError as error:
                outcome = error
            pause_s = calls.wait_s(call, tried, outcome)
            if pause_s is None:
                break
            await self._sleep(pause_s)
        return calls.answer_of(call, outcome, self.url)

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
