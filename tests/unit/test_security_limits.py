"""How much one caller may ask, and how large a body may be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.problems import MALFORMED, RATE, TOO_LARGE, TOO_SLOW, HttpProblem
from rubberband.api.security import Buckets, address_key
from rubberband.api.security.middleware import Body, Message, RateLimiter
from rubberband.api.settings import ServiceLimits


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0, 3), max_size=200), st.floats(0.1, 20), st.integers(1, 10))
def test_no_more_pass_than_the_burst_and_what_the_rate_adds(gaps: list[float], per_s: float, burst: int) -> None:
    clock = Clock()
    buckets = Buckets(per_s=per_s, burst=burst, clock=clock)
    passed = 0
    for gap in gaps:
        clock.now += gap
        wait_s = buckets.take("a")
        passed += wait_s == 0
        assert wait_s <= 1 / per_s
        assert passed <= burst + clock.now * per_s + 1e-6


def test_a_client_that_waits_as_asked_may_ask_again() -> None:
    clock = Clock()
    buckets = Buckets(per_s=0.5, burst=2, clock=clock)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 2]
    assert buckets.take("b") == 0
    clock.now += 2
    assert [buckets.take("a") for _ in range(2)] == [0, 2]


def test_no_rate_is_no_limit() -> None:
    buckets = Buckets(per_s=0, burst=1)
    assert not any(buckets.take("a") for _ in range(100))


def test_few_are_served_at_the_same_time_and_streams_are_counted_apart() -> None:
    turnstile = RateLimiter(ServiceLimits(concurrent=2, streams=1))
    with ExitStack() as inside:
        for stream in (False, False, True):
            inside.enter_context(turnstile.passing("a", stream=stream))
        for stream, what in ((False, "2 requests"), (True, "1 streams")):
            with pytest.raises(HttpProblem, match=what) as caught, turnstile.passing("a", stream=stream):
                pass
            assert caught.value.kind is RATE
            assert {"Retry-After", "RateLimit", "RateLimit-Policy"} <= set(caught.value.headers)
        inside.enter_context(turnstile.passing("b", stream=False))
    with turnstile.passing("a", stream=True), turnstile.passing("a", stream=False):
        pass


def test_a_caller_that_asks_too_often_is_reported_when_to_come_back() -> None:
    turnstile = RateLimiter(ServiceLimits(requests_per_s=0.1, burst=1), clock=Clock())
    with turnstile.passing("a", stream=False):
        pass
    with pytest.raises(HttpProblem, match="ask again in 10 s") as caught, turnstile.passing("a", stream=False):
        pass
    headers = {"Retry-After": "10", "RateLimit-Policy": '"requests";q=1;w=10', "RateLimit": '"requests";r=0;t=10'}
    assert caught.value.headers == headers


@pytest.mark.parametrize(
    ("address", "key"),
    [("10.0.0.1", "10.0.0.1"), ("2001:db8::1:2:3:4", "2001:db8::/64"), ("fe80::1%eth0", "fe80::/64"), (":", ":")],
)
def test_addresses_of_one_network_count_as_one(address: str, key: str) -> None:
    assert address_key(address) == key


def _chunks(*parts: bytes) -> list[Message]:
    last = len(parts) - 1
    return [{"type": "http.request", "body": part, "more_body": index < last} for index, part in enumerate(parts)]


def _body(messages: Sequence[Message], limit_bytes: int, within_s: float = 30.0) -> Body:
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return Body(receive, limit_bytes=limit_bytes, within_s=within_s)


async def _read(body: Body) -> bytes:
    read = b""
    while True:
        message = await body.receive()
        read += bytes(message["body"])
        if not message["more_body"]:
            return read


def test_a_body_within_the_limit_comes_through() -> None:
    assert asyncio.run(_read(_body(_chunks(b"abc", b"", b"de"), 5))) == b"abcde"


def test_a_body_beyond_the_limit_does_not_however_often_it_is_asked_for() -> None:
    async def scenario() -> None:
        body = _body(_chunks(b"abc", b"def", b"g"), 5)
        await body.receive()
        for _ in range(2):
            with pytest.raises(HttpProblem) as caught:
                await body.receive()
            assert caught.value.kind is TOO_LARGE
            assert caught.value.headers == {"Connection": "close"}
        assert body.problem is caught.value
        await body.drain()

    asyncio.run(scenario())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def scenario() -> None:
        body = _body(_chunks(b"abc", b"def")[:1], 5, within_s=0.01)
        await body.receive()
        with pytest.raises(HttpProblem) as caught:
            await body.receive()
        assert caught.value.kind is TOO_SLOW

    asyncio.run(scenario())


def test_waiting_for_the_client_to_leave_has_no_limit() -> None:
    async def scenario() -> None:
        body = _body(_chunks(b"abc"), 5, within_s=0.01)
        await body.receive()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await body.receive()
        assert body.problem is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("length", "kind"),
    [("6", TOO_LARGE), ("9" * 5000, TOO_LARGE), ("-1", MALFORMED), ("²", MALFORMED), ("", MALFORMED)],
)
def test_a_body_announced_as_too_large_is_not_read(length: str, kind: object) -> None:
    with pytest.raises(HttpProblem) as caught:
        _body([], 5).require_announced(length)
    assert caught.value.kind is kind
    _body([], 5).require_announced("5")
    _body([], 5).require_announced(None)
