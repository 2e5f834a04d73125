"""Checks of a request: rate and concurrency of its caller, its Host, and the page that sent it."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from rubberband.api.problems import FOREIGN_HOST, FOREIGN_ORIGIN, RATE, HttpProblem
from rubberband.api.settings import ServiceLimits
from rubberband.units import shown

_MOST_KEYS = 10_000
"""Callers remembered. A forgotten one has its whole burst again."""


class Buckets:
    """Token bucket for each caller. `per_s` of zero sets no limit."""

    def __init__(self, *, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self.burst, self._clock = per_s, burst, clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> float:
        """Take one token and return 0, or return the seconds to wait for one."""
        if not self.per_s:
            return 0.0
        level, at = self._levels.get(key, (float(self.burst), 0.0))
        now = self._clock()
        level = min(float(self.burst), level + (now - at) * self.per_s)
        if level < 1.0:
            return (1.0 - level) / self.per_s
        self._levels[key] = (level - 1.0, now)
        self._levels.move_to_end(key)
        if len(self._levels) > _MOST_KEYS:
            self._levels.popitem(last=False)
        return 0.0

    def refuse(self, wait_s: float, detail: str) -> HttpProblem:
        """Return the problem for a caller that must wait."""
        seconds = max(1, math.ceil(wait_s))
        window_s = max(1, math.ceil(self.burst / self.per_s))
        headers = {
            "Retry-After": str(seconds),
            "RateLimit-Policy": f'"requests";q={self.burst};w={window_s}',
            "RateLimit": f'"requests";r=0;t={seconds}',
        }
        return HttpProblem(RATE, f"{detail}; ask again in {seconds} s", headers=headers)


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
    headers = {
        "Retry-After": "1",
        "RateLimit-Policy": f'"concurrent";q={most}',
        "RateLimit": '"concurrent";r=0',
    }
    return HttpProblem(RATE, f"{most} {what} already, the most at the same time; wait for one to end", headers=headers)


def address_key(address: str) -> str:
    """Return the key of an address: itself, or for IPv6 its network of 64 bits, which belongs to one site."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


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


def safe_next(wanted: str | None) -> str:
    """Return the path to show after signing in: `wanted` if it is a path of this service, else `/`."""
    path = wanted or "/"
    plain = path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    inside = path.startswith("/") and not path.startswith("//")
    return path if plain and inside and len(path) <= 2000 else "/"
