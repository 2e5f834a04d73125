"""Every call of the service and what it answers, once, for both clients. No I/O here."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

import httpx

from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.experiment import Experiment, ProfilesByType
from rubberband.spec.loading import load_experiment
from rubberband.spec.profile_file import ProfileFile, read_profile_file
from rubberband.states import State

# What the service answers, in its own words. Instants are Unix time in seconds, `_s` seconds, `_usd` US dollars.


class SummaryView(TypedDict):
    """What a list shows of an experiment; zero or None before it started."""

    trials: int
    stages: int
    stage: int
    iterations: int
    target_iterations: int
    instances: int
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
    """An experiment, as `GET /v1/experiments` lists it."""

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
    """To the deadline, by the forecast; negative: late."""
    summary: SummaryView


class ExperimentDetail(ExperimentView):
    """One experiment, whole."""

    words: dict[str, Any]
    stages: list[dict[str, Any]]
    planned: dict[str, Any] | None
    forecast: dict[str, Any] | None
    best: dict[str, Any] | None
    extensions: list[dict[str, Any]]


class OutlookView(TypedDict):
    """What is expected of an experiment under given limits."""

    jct_s: float
    cost_usd: float
    deadline_s: float | None
    max_cost_usd: float | None
    plan: dict[str, Any]
    feasible: bool
    reason: str


class ExtensionView(TypedDict):
    """An experiment by the limits that it has, and by other ones."""

    before: OutlookView
    after: OutlookView
    stage: int
    added_s: float
    added_usd: float
    applied: bool


class EventView(TypedDict):
    """One line of the feed."""

    id: int
    experiment: str
    seq: int | None
    kind: str
    occurred_at: float
    data: dict[str, Any]


class LogLine(TypedDict):
    """A line that a trial, or the experiment's process, printed."""

    trial: int | None
    text: str


class LogPage(TypedDict):
    """Lines, and where to go on."""

    lines: list[LogLine]
    next: str


# An experiment as it travels to the service: all in its words, with no file of this machine behind them.


Submittable = Experiment | Mapping[str, Any] | str | os.PathLike[str]
"""An experiment, its words, or the path of its file."""


def self_contained(experiment: Submittable, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The words of an experiment; a profile that is in a file is written out.

    `overrides` are for a file (`constraints.deadline=30m`). Raises InputError for what does not fit, and for what the
    service cannot be told: a catalogue of one's own, or code that has no name there.
    """
    found = _experiment(experiment, overrides)
    if found.resources.catalogue is not None:
        raise InputError(
            "resources.catalogue: the service has a catalogue of its own; leave it out, and write price_per_hour and "
            "gpus_per_instance instead"
        )
    words = found.to_words()
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


def _read(path: str) -> ProfileFile:
    try:
        return read_profile_file(path)
    except ProfileMissingError as error:
        raise ProfileMissingError(f"profile: {error}") from None


def _inline(path: str) -> dict[str, Any]:
    """A profile file in the experiment's words."""
    return _read(path).to_inline().model_dump(mode="json", by_alias=True, exclude_none=True)


Answer = TypeVar("Answer")
Params = Mapping[str, str | int | bool | Sequence[str] | None]


def _json(response: httpx.Response) -> Any:
    return response.json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Answer]):
    """A request, and what is made of its answer."""

    method: str
    path: str
    params: Params = field(default_factory=dict)
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    parse: Callable[[httpx.Response], Answer] = _json

    @property
    def may_be_repeated(self) -> bool:
        """Whether sending it twice has the effect of once."""
        return self.method in ("GET", "DELETE") or "Idempotency-Key" in self.headers or self.path == "/v1/plans"

    def query(self) -> httpx.QueryParams:
        """The parameters that are set, as the URL has them."""
        pairs: list[tuple[str, str | int | float | bool | None]] = []
        for name, value in self.params.items():
            if isinstance(value, bool):
                pairs.append((name, "true" if value else "false"))
            elif isinstance(value, str | int):
                pairs.append((name, str(value)))
            else:
                pairs += [(name, item) for item in value or ()]
        return httpx.QueryParams(pairs)


def _path(name: str, what: str = "") -> str:
    return f"/v1/experiments/{quote(name, safe='')}{what}"


def _post(path: str, body: object = None, *, key: str | None = None, params: Params | None = None) -> Call[Any]:
    try:
        content = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        raise InputError(f"{path}: NaN and infinity are not allowed; give a number, or leave it out") from None
    headers = {} if content is None else {"Content-Type": "application/json"}
    if key is not None:
        headers["Idempotency-Key"] = key
    return Call(method="POST", path=path, params=params or {}, content=content, headers=headers)


def _key(given: str | None) -> str:
    return given or str(uuid.uuid4())


def plan(
    experiment: Submittable, overrides: Sequence[str], policy: str, frontier: bool, seed: int
) -> Call[dict[str, Any]]:
    """Preview a plan."""
    words = self_contained(experiment, overrides)
    return _post("/v1/plans", words, params={"policy": policy, "frontier": frontier, "seed": seed})


def submit(
    experiment: Submittable, overrides: Sequence[str], policy: str, plan: str | None, key: str | None
) -> Call[ExperimentView]:
    """Start an experiment."""
    words = self_contained(experiment, overrides)
    return _post("/v1/experiments", words, key=_key(key), params={"policy": policy, "plan": plan})


def experiments(states: Sequence[str], limit: int, cursor: str | None) -> Call[dict[str, Any]]:
    """A page of the list."""
    return Call(method="GET", path="/v1/experiments", params={"state": states, "limit": limit, "cursor": cursor})


def experiment(name: str) -> Call[ExperimentDetail]:
    """One experiment."""
    return Call(method="GET", path=_path(name))


def part(name: str, what: str, params: Params | None = None) -> Call[dict[str, Any]]:
    """Its trials, allocations, costs, decisions or report."""
    return Call(method="GET", path=_path(name, f"/{what}"), params=params or {})


def logs(name: str, source: str, trial: int | None, cursor: str | None, limit: int) -> Call[LogPage]:
    """Some lines that were printed."""
    params: Params = {"source": source, "trial": trial, "cursor": cursor, "limit": limit}
    return Call(method="GET", path=_path(name, "/logs"), params=params)


def cancel(name: str, key: str | None) -> Call[ExperimentView]:
    """Ask for a clean end."""
    return _post(_path(name, "/cancel"), key=_key(key))


def resume(name: str, key: str | None) -> Call[ExperimentView]:
    """Go on."""
    return _post(_path(name, "/resume"), key=_key(key))


def extend(
    name: str, deadline: str | float | None, max_cost: str | float | None, dry_run: bool, key: str | None
) -> Call[ExtensionView]:
    """Look at other limits, or set them."""
    limits = {"deadline": deadline, "max_cost": max_cost, "dry_run": dry_run}
    body = {word: value for word, value in limits.items() if value is not None}
    return _post(_path(name, "/extend"), body, key=None if dry_run else _key(key))


def stored_plan(id: str) -> Call[dict[str, Any]]:
    """A plan of an earlier preview."""
    return Call(method="GET", path=f"/v1/plans/{quote(id, safe='')}")


def prices(types: Sequence[str], region: str) -> Call[dict[str, Any]]:
    """What instance types cost."""
    return Call(method="GET", path="/v1/prices", params={"type": types, "region": region})
