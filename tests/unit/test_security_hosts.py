"""Which hosts and pages a request may come by, and where the service may listen."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rubberband.api.app.serving import is_loopback, require_auth, served_names, url_of
from rubberband.api.problems import FOREIGN_HOST, FOREIGN_ORIGIN, MALFORMED, RATE, TOO_LARGE, TOO_SLOW, HttpProblem
from rubberband.api.security import Buckets, address_key, safe_next
from rubberband.api.security.middleware import (
    Body,
    Exchange,
    Message,
    RateLimiter,
    host_of,
    require_host,
    require_own_page,
)
from rubberband.api.settings import ServiceLimits
from rubberband.errors import InputError

SERVED = frozenset({"localhost", "127.0.0.1", "[::1]"})


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8642", "localhost"),
        ("localhost.:80", "localhost"),
        ("[::1]:8642", "[::1]"),
        ("[::1]", "[::1]"),
        ("127.0.0.1:", "127.0.0.1"),
        ("", ""),
    ],
)
def test_the_host_is_what_the_port_is_not(value: str, host: str) -> None:
    assert host_of(value) == host


@pytest.mark.parametrize(
    "values",
    [[], ["localhost", "localhost"]]
    + [[host] for host in ("", "evil.example", "localhost.evil.example", "localhost@evil", "127.0.0.1.evil:80")]
    + [["*"], ["[::"], ["a" * 3000]],
    ids=range(10),
)
def test_other_hosts_are_not_answered(values: list[str]) -> None:
    with pytest.raises(HttpProblem) as caught:
        require_host(values, SERVED)
    assert caught.value.kind is FOREIGN_HOST
    require_host(values[:1] or ["anything"], frozenset({"*"}))


@pytest.mark.parametrize(
    ("fetch_site", "origin", "own"),
    [
        (None, None, True),
        ("same-origin", "http://localhost:8642", True),
        ("none", None, True),
        ("same-site", "http://localhost:9", False),
        ("cross-site", "http://localhost:8642", False),
        (None, "http://localhost:8642", True),
        (None, "http://localhost:9", False),
        (None, "http://evil.example", False),
        (None, "http://localhost:8642.evil.example", False),
        (None, "http://evil.example/localhost:8642", False),
        (None, "null", False),
        (None, "http://[", False),
        (None, "http://localhost:8642@evil", False),
        (None, "x" * 3000, False),
        (None, "\t", False),
    ],
)
def test_pages_of_other_sites_change_nothing(fetch_site: str | None, origin: str | None, own: bool) -> None:
    require_own_page("GET", fetch_site=fetch_site, origin=origin, host="localhost:8642")
    if own:
        require_own_page("POST", fetch_site=fetch_site, origin=origin, host="localhost:8642")
        return
    with pytest.raises(HttpProblem) as caught:
        require_own_page("POST", fetch_site=fetch_site, origin=origin, host="localhost:8642")
    assert caught.value.kind is FOREIGN_ORIGIN


OWN_PAGES = ["/", "/plan?x=1", "/experiments/a%20b"]
NO_PAGES = [None, "", "//evil", "https://evil", "/\\evil", "/a\nb", "/a b", "plan", "/é", "/" + "a" * 3000]


@pytest.mark.parametrize("wanted", [*OWN_PAGES, *NO_PAGES])
def test_one_resumes_to_a_page_of_the_service_and_nowhere_else(wanted: str | None) -> None:
    assert safe_next(wanted) == (wanted if wanted in OWN_PAGES else "/")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_on_loopback_tokens_are_a_choice_but_behind_a_proxy(host: str) -> None:
    assert is_loopback(host)
    assert [require_auth(host, wanted) for wanted in (None, False, True)] == [False, False, True]
    assert require_auth(host, None, ["10.0.0.1"])
    with pytest.raises(InputError, match=r"proxy 10\.0\.0\.1"):
        require_auth(host, False, ["10.0.0.1"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "tuning.example.org"])
def test_beyond_loopback_they_are_not(host: str) -> None:
    assert [require_auth(host, wanted) for wanted in (None, True)] == [True, True]
    with pytest.raises(InputError, match=r"--no-auth.*127\.0\.0\.1"):
        require_auth(host, False)


def test_the_service_answers_to_its_address_and_to_the_names_it_was_given() -> None:
    assert served_names("127.0.0.1", []) == ("127.0.0.1", "localhost", "[::1]")
    assert served_names("fd00::1", ["RB.example.org."])[:2] == ("rb.example.org", "[fd00::1]")
    assert served_names("0.0.0.0", ["*"])[0] == "*"
    assert "0.0.0.0" not in served_names("0.0.0.0", ["a"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_where_every_address_is_listened_on_a_name_is_needed(host: str) -> None:
    with pytest.raises(InputError, match="--host-name"):
        served_names(host, [])


@pytest.mark.parametrize("name", ["http://a", "a:80", "", "a b", "-a", "a/b"])
def test_a_name_is_a_host_alone(name: str) -> None:
    with pytest.raises(InputError, match="without scheme and port"):
        served_names("0.0.0.0", [name])


def test_the_address_is_one_that_a_browser_here_can_open() -> None:
    assert url_of("0.0.0.0", 80, https=False) == "http://127.0.0.1:80"
    assert url_of("::", 443, https=True) == "https://[::1]:443"
    assert url_of("localhost", 8642, https=False) == "http://localhost:8642"


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


@given(st.one_of(st.from_regex(r"[0-9A-Za-z._-]{1,64}", fullmatch=True), st.text(max_size=70)))
@example("a GET / 200 root")
@example("a\n")
@example("a" * 65)
def test_a_request_has_its_own_id_only_where_a_log_may_have_it(asked: str) -> None:
    found = Exchange(asyncio.sleep, id=asked, method="GET", target="/", https=False).id
    is_fit = 1 <= len(asked) <= 64 and set(asked) <= set(string.ascii_letters + string.digits + "._-")
    assert (found == asked) is is_fit
    assert set(found) <= set(string.ascii_letters + string.digits + "._-")
