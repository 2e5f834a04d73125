"""Calls of the service and their answers, described once for both clients. No I/O beyond experiment files.

A method of `Calls` makes the request; the client that has it sends that, and returns or awaits the answer.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload
from urllib.parse import quote

from rubberband.errors import InputError, ProfileMissingError, ServiceError
from rubberband.spec.experiment import Experiment, ProfilesByType
from rubberband.spec.loading import load_experiment
from rubberband.spec.profile_file import read_profile_file
from rubberband.states import ACTIVE, State

if TYPE_CHECKING:
    from rubberband.client.client import AsyncClient, Client

# Answers of the service. Instants are Unix time in seconds, `_s` means seconds, `_usd` US dollars.


class SummaryView(TypedDict):
    """Status of an experiment; zero or None before it started."""

    trials: int
    stages: int
    stage: int
    iterations: int
    target_iterations: int
    instances: int
    max_instances: int | None
    started_at: float | None
    ended_at: float | None
    jct_s: float
    cost_usd: float
    planned_jct_s: float | None
    planned_cost_usd: float | None
    forecast_jct_s: float | None
    forecast_cost_usd: float | None
    deadline_s: float | None
    max_cost_usd: float | None
    metric: str
    mode: Literal["max", "min"]
    best_value: float | None
    best_trial: int | None


class ExperimentView(TypedDict):
    """Experiment, as `GET /v1/experiments` lists it."""

    name: str
    state: State
    owner: str
    created_at: float
    changed_at: float
    reason: str
    policy: str
    plan: str | None
    attempt: int
    entrypoint: str | None
    provider: str | None
    slack_s: float | None
    """Time to the deadline by the forecast; negative when late."""
    summary: SummaryView


class SubmittedView(ExperimentView):
    """Experiment that a service accepted just now."""

    notes: list[str]
    """Remarks on what was changed, such as fewer instances in a smaller pool."""


class ExperimentDetail(ExperimentView):
    """Experiment with its stages, plan and forecast."""

    words: dict[str, Any]
    stages: list[dict[str, Any]]
    planned: dict[str, Any] | None
    forecast: dict[str, Any] | None
    best: dict[str, Any] | None
    extensions: list[dict[str, Any]]


class OutlookView(TypedDict):
    """Forecast of an experiment under given limits."""

    jct_s: float
    cost_usd: float
    deadline_s: float | None
    max_cost_usd: float | None
    plan: dict[str, Any]
    feasible: bool
    reason: str


class ExtensionView(TypedDict):
    """Forecasts of an experiment under its limits and under other limits."""

    before: OutlookView
    after: OutlookView
    stage: int
    added_s: float
    added_usd: float
    applied: bool


class EventView(TypedDict):
    """Event of the feed."""

    id: int
    experiment: str
    seq: int | None
    kind: str
    occurred_at: float
    data: dict[str, Any]


class LogLine(TypedDict):
    """Line of output of a trial or the experiment's process."""

    trial: int | None
    text: str


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


P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """Request whose JSON answer is a `T`."""

    method: str
    path: str
    params: Mapping[str, str | int | Sequence[str] | None] = field(default_factory=dict)
    content: bytes | None = None
    idempotency_key: str | None = None

    @property
    def may_be_repeated(self) -> bool:
        """Whether sending it twice has the same effect as sending it once."""
        return self.method == "GET" or self.idempotency_key is not None or self.path == "/v1/plans"

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for httpx."""
        headers = {} if self.content is None else {"Content-Type": "application/json"}
        if self.idempotency_key is not None:
            headers["Idempotency-Key"] = self.idempotency_key
        params = {name: value for name, value in self.params.items() if value is not None}
        return {"params": params, "content": self.content, "headers": headers}


Items = Generator[Call[Any] | float | list[T], Any, None]
"""Steps to items of type `T`: a call to send (its answer is sent back), seconds to sleep, or some of the items."""


class _Method(Protocol[P, T_co]):
    """Method of a client that returns a `T`, and of an asynchronous client that is awaited."""

    @overload
    def __get__(self, client: Client, kind: type, /) -> Callable[P, T_co]: ...
    @overload
    def __get__(self, client: AsyncClient, kind: type, /) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


class _Listing(Protocol[P, T_co]):
    """Method of a client that iterates over `T`, and of an asynchronous client for `async for`."""

    @overload
    def __get__(self, client: Client, kind: type, /) -> Callable[P, Iterator[T_co]]: ...
    @overload
    def __get__(self, client: AsyncClient, kind: type, /) -> Callable[P, AsyncIterator[T_co]]: ...


def _method(describe: Callable[Concatenate[Any, P], Call[T]]) -> _Method[P, T]:
    """Make a method of both clients from a function that returns the call to send."""

    @wraps(describe)
    def ask(client: Any, *args: P.args, **options: P.kwargs) -> Any:
        return client._send(partial(describe, client, *args, **options))

    return ask  # type: ignore[return-value]


def _listing(steps: Callable[Concatenate[Any, P], Items[T]]) -> _Listing[P, T]:
    """Make an iterating method of both clients from a generator of steps."""

    @wraps(steps)
    def iterate(client: Any, *args: P.args, **options: P.kwargs) -> Any:
        return client._each(steps(client, *args, **options))

    return iterate  # type: ignore[return-value]


def _get(path: str, **params: str | int | Sequence[str] | None) -> Call[Any]:
    return Call(method="GET", path=path, params=params)


def _post(path: str, body: object = None, *, key: str | None = None, **params: str | int | None) -> Call[Any]:
    try:
        content = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        raise InputError(f"{path}: NaN and infinity are not allowed; give a number, or leave it out") from None
    return Call(method="POST", path=path, params=params, content=content, idempotency_key=key)


def _key(given: str | None) -> str:
    return given or str(uuid.uuid4())


def _path(name: str, what: str = "") -> str:
    return f"/v1/experiments/{quote(name, safe='')}{what}"


def _pages(path: str, **params: str | int | Sequence[str] | None) -> Items[Any]:
    cursor: str | None = None
    while True:
        page = yield _get(path, cursor=cursor, **params)
        yield page["items"]
        cursor = page["next"]
        if cursor is None:
            return


class Calls:
    """Methods of both clients. `Client` returns the `X` of a `Call[X]`, and iterates over those of `Items[X]`.

    With `AsyncClient`, await the first, and iterate over the second with `async for`.
    """

    _url: str

    @property
    def url(self) -> str:
        """Address of the service."""
        return self._url

    @_method
    def plan(
        self,
        experiment: Submittable,
        *,
        overrides: Sequence[str] = (),
        policy: str = "optimal",
        frontier: bool = False,
        size: bool = False,
        seed: int = 0,
    ) -> Call[dict[str, Any]]:
        """Predict the time and cost of an experiment (`rubberband.estimate/1`, with the plan's `id`). Spends nothing.

        `experiment` is an Experiment, its words as a mapping, or the path of its file. With `size`, its search is
        first sized to the limits. Raises InfeasibleError, with the nearest limits.
        """
        words = self_contained(experiment, overrides)
        return _post("/v1/plans", words, policy=policy, frontier=frontier, size=size, seed=seed)

    @_method
    def stored_plan(self, id: str) -> Call[dict[str, Any]]:
        """Return a plan of an earlier preview."""
        return _get(f"/v1/plans/{quote(id, safe='')}")

    @_method
    def submit(
        self,
        experiment: Submittable,
        *,
        overrides: Sequence[str] = (),
        policy: str = "optimal",
        plan: str | None = None,
        idempotency_key: str | None = None,
    ) -> Call[SubmittedView]:
        """Plan an experiment and start it. A submission that is repeated with the same key starts it once.

        Raises InfeasibleError if no plan meets its constraints, NameTakenError if there is one of its name.
        """
        words = self_contained(experiment, overrides)
        return _post("/v1/experiments", words, key=_key(idempotency_key), policy=policy, plan=plan)

    @_listing
    def experiments(self, *states: State, search: str = "") -> Items[ExperimentView]:
        """Iterate over the experiments, newest first; only over those in one of `states`, if any are given.

        Every word of `search` is part of the name, owner or state.
        """
        return _pages("/v1/experiments", state=states, search=search or None, limit=100)

    @_method
    def experiment(self, name: str) -> Call[ExperimentDetail]:
        """Return one experiment: its status, stages and forecast."""
        return _get(_path(name))

    @_listing
    def trials(self, name: str, *, curves: bool = False) -> Items[dict[str, Any]]:
        """Iterate over the trials of an experiment; with `curves`, each has its learning curve."""
        return _pages(_path(name, "/trials"), curves=curves, limit=500)

    @_method
    def allocations(self, name: str) -> Call[dict[str, Any]]:
        """Return the instances of an experiment, the use of their GPUs, and the plan."""
        return _get(_path(name, "/allocations"))

    @_method
    def costs(self, name: str) -> Call[dict[str, Any]]:
        """Return the bill of an experiment, by stage and instance."""
        return _get(_path(name, "/costs"))

    @_method
    def decisions(self, name: str) -> Call[dict[str, Any]]:
        """Return the decisions at each SYNC, and the extensions of the limits."""
        return _get(_path(name, "/decisions"))

    @_method
    def report(self, name: str) -> Call[dict[str, Any]]:
        """Return the result of an experiment, as `rubberband report -o json` prints it."""
        return _get(_path(name, "/report"))

    @_listing
    def logs(
        self,
        name: str,
        *,
        trial: int | None = None,
        source: str = "trials",
        follow: bool = False,
        every_s: float = 1.0,
    ) -> Items[LogLine]:
        """Iterate over the output of the trials, or with source="process" of the experiment's process.

        With `follow`, wait for more lines until the experiment has ended.
        """
        cursor: str | None = None
        last_look = False
        while True:
            page = yield _get(_path(name, "/logs"), source=source, trial=trial, cursor=cursor, limit=1000)
            yield page["lines"]
            cursor = page["next"]
            if page["lines"]:
                continue
            if not follow or last_look:
                return
            last_look = (yield _get(_path(name)))["state"] not in ACTIVE
            if not last_look:
                yield every_s

    @_method
    def cancel(self, name: str, *, idempotency_key: str | None = None) -> Call[ExperimentView]:
        """Request a clean end: instances are released, and the best result so far is kept."""
        return _post(_path(name, "/cancel"), key=_key(idempotency_key))

    @_method
    def resume(self, name: str, *, idempotency_key: str | None = None) -> Call[ExperimentView]:
        """Resume an experiment that was interrupted."""
        return _post(_path(name, "/resume"), key=_key(idempotency_key))

    @_method
    def extend(
        self,
        name: str,
        *,
        deadline: str | float | None = None,
        max_cost: str | float | None = None,
        dry_run: bool = True,
        idempotency_key: str | None = None,
    ) -> Call[ExtensionView]:
        """Show the effect of a later deadline or a larger budget; with dry_run=False, grant it.

        A `deadline` is a duration from the start, as in the experiment's file, or a time with its zone; `max_cost` is
        in US dollars, such as 5 or "$5".
        """
        limits = {"deadline": deadline, "max_cost": max_cost, "dry_run": dry_run}
        body = {word: value for word, value in limits.items() if value is not None}
        return _post(_path(name, "/extend"), body, key=None if dry_run else _key(idempotency_key))

    @_method
    def limit(
        self, name: str, max_instances: int | None, *, idempotency_key: str | None = None
    ) -> Call[ExperimentView]:
        """Limit the instances of a running experiment from now on: 0 pauses it, None lifts the limit."""
        return _post(_path(name, "/limit"), {"max_instances": max_instances}, key=_key(idempotency_key))

    @_method
    def prices(self, *types: str, region: str = "us-east-1") -> Call[dict[str, Any]]:
        """Return the resources and prices of instance types."""
        return _get("/v1/prices", type=types, region=region)


def waiting(name: str, timeout_s: float | None, every_s: float) -> Items[ExperimentDetail]:
    """Steps to an experiment that is no longer active. Raises ServiceError after `timeout_s`."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        found = yield _get(_path(name))
        if found["state"] not in ACTIVE:
            yield [found]
            return
        if until is not None and time.monotonic() >= until:
            raise ServiceError(f"{name} is still {found['state']} after {timeout_s:g} s; wait longer", status=None)
        yield every_s
