"""Requests to the service, its answers, its problems and its feed, for both clients. No I/O beyond experiment files."""

from __future__ import annotations

import json
import os
import random
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedWriter
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import SSEError

import rubberband
from rubberband.client.models import EventView, ExperimentDetail
from rubberband.errors import (
    Change,
    InfeasibleError,
    InputError,
    NameTakenError,
    ProfileMissingError,
    Remedy,
    RubberbandError,
    ServiceError,
)
from rubberband.files import make_directories, new_file
from rubberband.spec.experiment import Experiment, ProfilesByType
from rubberband.spec.loading import load_experiment
from rubberband.spec.profile_file import read_profile_file

# An experiment as the service receives it: without references to files of this machine.

Submittable = Experiment | Mapping[str, Any] | str | os.PathLike[str]
"""An experiment, its words as a mapping, or the path of its file."""


def self_contained(experiment: Submittable, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the words of an experiment, with the contents of profile files in place of their paths.

    `overrides` are for a file (`constraints.deadline=30m`). Raises InputError if a value is invalid, or if the
    experiment has its own catalogue or code that the service cannot import.
    """
    found = _experiment(experiment, overrides)
    if found.resources.catalogue is not None:
        raise InputError(
            "resources.catalogue: the service has a catalogue of its own; leave it out, and write price_per_hour and "
            "gpus_per_instance instead"
        )
    words = found.to_words()
    # The pool of a service sets the resources that are left out.
    words["resources"] = found.resources.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    if "<locals>" in str(words.get("entrypoint", "")) or str(words.get("entrypoint", "")).startswith("__main__:"):
        raise InputError(
            f"entrypoint: {words['entrypoint']} has no name that the service could import; put it in a module that its "
            "operator installs, and write module:attribute"
        )
    if isinstance(found.profile, str):
        words["profile"] = _inline(found.profile)
    elif isinstance(found.profile, ProfilesByType):
        for name, written in found.profile.by_instance_type.items():
            if isinstance(written, str):
                words["profile"]["by_instance_type"][name] = _inline(written)
    return words


def _experiment(experiment: Submittable, overrides: Sequence[str]) -> Experiment:
    if isinstance(experiment, str | os.PathLike):
        return load_experiment(experiment, overrides)
    if overrides:
        raise InputError("overrides apply to a file; change the mapping itself")
    return experiment if isinstance(experiment, Experiment) else Experiment(**experiment)


def _inline(path: str) -> dict[str, Any]:
    """Return the contents of a profile file in the words of an experiment."""
    try:
        found = read_profile_file(path)
    except ProfileMissingError as error:
        raise ProfileMissingError(f"profile: {error}") from None
    return found.to_inline().model_dump(mode="json", by_alias=True, exclude_none=True)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """Request whose JSON answer is a `T`."""

    method: str
    path: str
    params: Mapping[str, str | int | Sequence[str] | None] = field(default_factory=dict)
    content: bytes | None = None
    idempotency_key: str | None = None
    asks_first: bool = False
    """Whether a service must be there before it is sent: other programs get no experiment."""
    is_anonymous: bool = False
    """Whether it is sent without the token."""

    @property
    def may_be_repeated(self) -> bool:
        """Whether sending it twice has the same effect as sending it once."""
        return self.method in ("GET", "PATCH") or self.idempotency_key is not None or self.path == "/v1/plans"

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for httpx."""
        headers = {} if self.content is None else {"Content-Type": "application/json"}
        if self.idempotency_key is not None:
            headers["Idempotency-Key"] = self.idempotency_key
        if self.is_anonymous:
            headers["Authorization"] = ""
        params = {name: value for name, value in self.params.items() if value is not None}
        return {"params": params, "content": self.content, "headers": headers}


WHO: Call[dict[str, Any]] = Call(method="GET", path="/healthz", is_anonymous=True)
"""Question whose answer shows a service, and no other program, which must not get the token."""


def get(path: str, **params: str | int | Sequence[str] | None) -> Call[T]:
    """Return the request of what is at `path`."""
    return Call(method="GET", path=path, params=params)


def post(path: str, body: object = None, *, key: str | None = None, **params: str | int | None) -> Call[T]:
    """Return the request that posts `body` as JSON. Raises InputError for NaN and infinity."""
    try:
        content = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        raise InputError(f"{path}: NaN and infinity are not allowed; give a number, or leave it out") from None
    return Call(method="POST", path=path, params=params, content=content, idempotency_key=key)


def act(path: str, body: object = None, *, key: str | None = None, **params: str | int | None) -> Call[T]:
    """Return a request that has its effect once, however often it is sent with the same key; by default a new one."""
    return post(path, body, key=key or str(uuid.uuid4()), **params)


def patch(path: str, body: object) -> Call[T]:
    """Return the request that changes what is at `path`; repeating it changes nothing more."""
    return replace(post(path, body), method="PATCH")


def delete(path: str, *, key: str | None, **params: str | int | None) -> Call[T]:
    """Return the request to delete what is at `path`, once for each key; by default a new one."""
    return Call(method="DELETE", path=path, params=params, idempotency_key=key or str(uuid.uuid4()))


def path(name: str, what: str = "") -> str:
    """Return the path of an experiment, or of a part of it."""
    return f"/v1/experiments/{quote(name, safe='')}{what}"


def artifact(name: str, trial: int, artifact: str) -> Call[Any]:
    """Return the request of a file that a trial gave to be kept."""
    return get(path(name, f"/trials/{trial}/artifacts/{quote(artifact)}"))


def checkpoint(name: str, trial: int, iterations: int | None, best: bool) -> Call[Any]:
    """Return the request of a trial's checkpoint."""
    return get(path(name, f"/trials/{trial}/checkpoint"), iterations=iterations, best="true" if best else None)


@contextmanager
def download(place: Path) -> Iterator[BufferedWriter]:
    """Yield a draft of a file that is downloaded; it is there under its name once it is whole.

    Raises InputError for a file that is there, and one that cannot be written.
    """
    if place.exists():
        raise InputError(f"{place} is there, and is not overwritten; give another path")
    try:
        make_directories(place.parent)
        with new_file(place, durable=False) as draft, open(draft, "wb") as file:
            yield file
    except OSError as error:
        raise InputError(f"{place} cannot be written: {error.strerror or error}; give another path") from error


def logs(name: str, source: str, trial: int | None, rank: int | None, cursor: str | None) -> Call[Any]:
    """Return the request of a page of an experiment's output."""
    return get(path(name, "/logs"), source=source, trial=trial, rank=rank, cursor=cursor, limit=1000)


MOST_TRIES = 4
LONGEST_WAIT_S = 10.0
BUSY = (429, 502, 503, 504)
"""States of answers after which a request may be sent again."""


def wait_s(call: Call[Any], tried: int, outcome: httpx.Response | httpx.TransportError) -> float | None:
    """Return the pause before a call is sent again after `tried` times, or None if it is not sent again.

    Pauses grow and vary, so that clients do not come back at the same time.
    """
    if tried >= MOST_TRIES or not call.may_be_repeated:
        return None
    if isinstance(outcome, httpx.Response):
        is_being_served = outcome.status_code == 409 and b"/problems/idempotency-key-busy" in outcome.content
        if outcome.is_success or (outcome.status_code not in BUSY and not is_being_served):
            return None
        wanted = outcome.headers.get("Retry-After", "")
        if wanted.isascii() and wanted.isdigit():
            return min(float(wanted), LONGEST_WAIT_S)
    return varied_s(tried)


def varied_s(tried: int) -> float:
    """Return a pause that grows with the number of tries, and varies."""
    longest_s: float = 0.25 * 2.0**tried
    return min(longest_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def answer_of(call: Call[T], outcome: httpx.Response | httpx.TransportError, url: str) -> T:
    """Return the answer to a call. Raises what `raise_for` raises, and ServiceError if there is no answer."""
    if not isinstance(outcome, httpx.Response):
        raise unreachable(url, outcome) from None
    if call is WHO and outcome.status_code < 500 and not {"status", "checks"} <= _problem(outcome).keys():
        raise ServiceError(
            f"what answers at {url} is no service of RubberBand; start one with `rubberband serve`, and give its "
            "address in RUBBERBAND_SERVER or --server",
            status=None,
        )
    raise_for(outcome)
    answer: T = outcome.json()
    return answer


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
    text = " ".join(str(error).split()) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        remedy = "name the file of the authority that signed it in SSL_CERT_FILE"
    else:
        remedy = "start one with `rubberband serve`, or set RUBBERBAND_SERVER"
    return ServiceError(f"the service at {url} does not answer ({text}); {remedy}", status=None)


def _remedy(words: dict[str, Any]) -> Remedy:
    changes = tuple(Change(key=one["key"], value=one["value"], was=one["was"]) for one in words["changes"])
    figures = {name: words[name] for name in ("jct_s", "cost_usd", "later_s", "extra_usd")}
    return Remedy(changes=changes, **figures)


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        found = json.loads(response.content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


DEFAULT_SERVER = "http://127.0.0.1:8642"
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
    return InputError(f"{_shown(url)!r} is not the address of a service ({why}); write it as {DEFAULT_SERVER}")


def _shown(url: str) -> str:
    """Return an address, also one that is none, without user and password."""
    return re.sub(r"//[^/?#]*@", "//", url)


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
        is_final = isinstance(error, ServiceError) and error.status not in BUSY
        if is_final or self.failed >= (MOST_REOPENED if self.was_open else MOST_TRIES):
            raise error if isinstance(error, ServiceError) else unreachable(self.url, error) from None
        return varied_s(self.failed)


class Connected:
    """Client of a service at an address."""

    _url: str

    @property
    def url(self) -> str:
        """Address of the service, without user and password."""
        return _shown(self._url)


def require_time(found: ExperimentDetail, until: float | None, timeout_s: float | None) -> None:
    """Raise ServiceError once an experiment was waited for too long."""
    if until is not None and time.monotonic() >= until:
        text = f"{found['name']} is still {found['state']} after {timeout_s:g} s; wait longer"
        raise ServiceError(text, status=None)
