"""`/metrics` for Prometheus: spend, slack, plan error, instances and trials of experiments, and counts of requests.

Only active experiments and the latest ended ones have labels, so that the number of series stays bounded.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rubberband.api.routes import Reader
from rubberband.api.routes.answers import only_documented
from rubberband.api.store import Store
from rubberband.cloud.pool import RemotePool
from rubberband.errors import ProviderError
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.result.result import Result
from rubberband.spec.pool import pools_up
from rubberband.states import OVER, ExperimentState
from rubberband.values.submission import Submission
from rubberband.views.experiment import slack_s

MAX_ENDED = 100
"""Ended experiments with labels."""
MAX_OPEN = 500
"""Active experiments with labels."""


class ExperimentMeasures(Collector):
    """Collector over the summaries in the store, read at each scrape."""

    def __init__(self, store: Store, result: Callable[[str], Result | None]) -> None:
        self._store, self._result = store, result

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the measures as of now."""
        still_open = [state for state in ExperimentState if state not in OVER]
        open_ = self._store.submissions(states=still_open, limit=MAX_OPEN).items
        every = [*open_, *self._store.submissions(states=OVER, limit=MAX_ENDED).items]
        yield self._states()
        yield _family("rubberband_spend_usd", "The bill so far.", every, lambda one: one.summary.cost_usd)
        yield _family("rubberband_max_cost_usd", "The cap.", every, lambda one: one.summary.max_cost_usd)
        text = "Seconds from the (expected) end to the deadline; negative if late."
        yield _family("rubberband_deadline_slack_seconds", text, every, slack_s)
        yield _plan_errors(every)
        yield _family("rubberband_instances", "Instances held.", open_, lambda one: one.summary.instances)
        yield self._trials(open_)

    def _states(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("rubberband_experiments", "Experiments in each state.", labels=["state"])
        counts = self._store.count_states()
        for state in ExperimentState:
            family.add_metric([state.value], counts.get(state, 0))
        return family

    def _trials(self, running: Sequence[Submission]) -> GaugeMetricFamily:
        family = GaugeMetricFamily("rubberband_trials", "Trials by status.", labels=["experiment", "status"])
        for one in running:
            if one.state is not ExperimentState.RUNNING:
                continue
            result = self._result(one.name)
            counts = collections.Counter(trial.status for trial in (() if result is None else result.trials))
            for status in TrialStatus:
                family.add_metric([one.name, status.value], counts[status.value])
        return family


class PoolMeasures(Collector):
    """Collector over the pools of a home that are up: it asks their brokers at each scrape, and skips dead ones."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the measures as of now."""
        pools = []
        for folder in pools_up(self._home):
            with suppress(ProviderError):
                pools.append(RemotePool(folder).glance())
        yield self._of(pools, "instances", "Instances rented.", {"": lambda pool: pool["instances"]})
        gpus = {"held": lambda pool: pool["gpus"] - pool["free_gpus"], "free": lambda pool: pool["free_gpus"]}
        yield self._of(pools, "gpus", "GPUs of the rented instances.", gpus, label="state")
        yield self._of(pools, "waiting_requests", "Requests that wait.", {"": lambda pool: len(pool["waiting"])})
        usd = {part: partial(_usd, part) for part in ("lent", "idle")}
        yield self._of(pools, "spend_usd", "The provider's bill so far, in parts.", usd, label="part")
        yield self._of(pools, "started_instances", "Instances started so far.", {"": lambda pool: pool["started"]})
        loans = {"warm": partial(_loans, True), "cold": partial(_loans, False)}
        yield self._of(pools, "loans", "Instances lent so far, by whether they ran already.", loans, label="start")

    def _of(
        self,
        pools: Sequence[Mapping[str, Any]],
        name: str,
        documentation: str,
        values: Mapping[str, Callable[[Mapping[str, Any]], float]],
        *,
        label: str = "",
    ) -> GaugeMetricFamily:
        labels = ["pool", *([label] if label else [])]
        family = GaugeMetricFamily(f"rubberband_pool_{name}", documentation, labels=labels)
        for pool in pools:
            for kind, value in values.items():
                family.add_metric([pool["name"], *([kind] if label else [])], value(pool))
        return family


def _usd(part: str, pool: Mapping[str, Any]) -> float:
    return float(pool["usd"][part])


def _loans(warm: bool, pool: Mapping[str, Any]) -> float:
    return sum(loan["was_warm"] is warm for loan in pool["loans"])


def _family(
    name: str, documentation: str, experiments: Sequence[Submission], value: Callable[[Submission], float | None]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, documentation, labels=["experiment"])
    for one in experiments:
        if (measured := value(one)) is not None:
            family.add_metric([one.name], measured)
    return family


def _plan_errors(experiments: Sequence[Submission]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "rubberband_plan_error_ratio",
        "Deviation of the actual (or forecast) value from the first plan: 0.1 is a tenth more.",
        labels=["experiment", "what"],
    )
    for one in experiments:
        for what, ratio in plan_errors(one).items():
            family.add_metric([one.name, what], ratio)
    return family


def plan_errors(one: Submission) -> dict[str, float]:
    """Return the relative error of the plan for `time` and `cost`, by the actual or forecast values that are known."""
    summary = one.summary
    over = one.state is ExperimentState.DONE
    came = {
        "time": (summary.jct_s if over else summary.forecast_jct_s, summary.planned_jct_s),
        "cost": (summary.cost_usd if over else summary.forecast_cost_usd, summary.planned_cost_usd),
    }
    known = {"time": 0.0, "cost": summary.profiling_cost_usd}  # before it was planned
    return {
        what: (value - known[what]) / (planned - known[what]) - 1.0
        for what, (value, planned) in came.items()
        if value is not None and planned is not None and planned > known[what]
    }


# Requests, counted by route and never by a value that clients choose freely.

_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RequestMeasures:
    """Counts of one app."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route", "status")
        self._requests = Counter("rubberband_requests", "Requests answered.", labels, registry=registry)
        self._latency = Histogram(
            "rubberband_request_seconds",
            "Seconds until a request was answered completely.",
            ("method", "route"),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._streams = Gauge("rubberband_event_streams", "Open event streams.", registry=registry)

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with its requests counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status, begun_s = 0, time.perf_counter()
            stream = scope["path"] == "/v1/events"

            async def sending(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            if stream:
                self._streams.inc()
            try:
                await app(scope, receive, sending)
            finally:
                if stream:
                    self._streams.dec()
                self._count(scope, status, None if stream else time.perf_counter() - begun_s)

        return counted

    def _count(self, scope: Scope, status: int, took_s: float | None) -> None:
        route = getattr(scope.get("route"), "path", "") or "(none)"
        method = scope["method"] if scope["method"] in _METHODS else "(other)"
        self._requests.labels(method, route, str(status or 499)).inc()
        if took_s is not None:
            self._latency.labels(method, route).observe(took_s)


router = APIRouter(tags=["service"], dependencies=[Depends(only_documented)])

_EXAMPLE = """\
# HELP rubberband_spend_usd The bill so far.
# TYPE rubberband_spend_usd gauge
rubberband_spend_usd{experiment="digits-sha"} 0.13
"""


@router.get(
    "/metrics",
    summary="Measures for Prometheus",
    operation_id="getMetrics",
    response_class=Response,
    response_model=None,
    responses={
        200: {
            "description": "The text format of Prometheus.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": _EXAMPLE}},
        }
    },
)
def get_metrics(request: Request, _reader: Reader) -> Response:
    """Spend, slack to the deadline, plan error, instances and trials by experiment; requests by route."""
    registry: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
