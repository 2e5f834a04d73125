"""What the service answers, in its own words. Instants are Unix time in seconds, `_s` seconds, `_usd` US dollars."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from rubberband.states import State


class SummaryView(TypedDict):
    """What a list shows of an experiment; zero or None before it began."""

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
