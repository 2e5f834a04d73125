"""Experiments as measures for Prometheus: spend, slack, plan error, instances, trials. Read from the store when asked.

Those that are active and the latest that ended have labels of their own, so that the number of series stays bounded.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rubberband.api.store.protocol import Store
from rubberband.api.store.records import Submission
from rubberband.api.views_json import slack_s
from rubberband.executor.result import Result
from rubberband.executor.state import TrialStatus
from rubberband.states import OVER, ExperimentState

MAX_ENDED = 100
"""Experiments that are over and still have labels."""
MAX_OPEN = 500
"""Experiments that are not over and have labels."""
_PAGE = 500


class ExperimentMeasures(Collector):
    """A collector over the store's summaries."""

    def __init__(self, store: Store, result: Callable[[str], Result | None]) -> None:
        self._store, self._result = store, result

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing is read to register this."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The measures as of now."""
        open_, ended = self._labelled()
        yield self._states()
        yield _family("rubberband_spend_usd", "The bill so far.", [*open_, *ended], lambda one: one.summary.cost_usd)
        yield _family("rubberband_max_cost_usd", "The cap.", [*open_, *ended], lambda one: one.summary.max_cost_usd)
        yield _family(
            "rubberband_deadline_slack_seconds",
            "From the (expected) end to the deadline; negative where it is late.",
            [*open_, *ended],
            slack_s,
        )
        yield _plan_errors([*open_, *ended])
        yield _family("rubberband_instances", "Instances that are held.", open_, lambda one: one.summary.instances)
        yield self._trials(open_)

    def _labelled(self) -> tuple[Sequence[Submission], Sequence[Submission]]:
        still_open = [state for state in ExperimentState if state not in OVER]
        open_ = self._store.submissions(states=still_open, limit=MAX_OPEN).items
        return open_, self._store.submissions(states=OVER, limit=MAX_ENDED).items

    def _states(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("rubberband_experiments", "Experiments in each state.", labels=["state"])
        counts: collections.Counter[str] = collections.Counter(self._store.count_states())
        for state in ExperimentState:
            family.add_metric([state.value], counts[state])
        return family

    def _trials(self, running: Sequence[Submission]) -> GaugeMetricFamily:
        family = GaugeMetricFamily("rubberband_trials", "Trials by how they stand.", labels=["experiment", "status"])
        for one in running:
            if one.state is not ExperimentState.RUNNING:
                continue
            result = self._result(one.name)
            counts = (
                collections.Counter(trial.status for trial in result.trials)
                if result is not None
                else collections.Counter()
            )
            for status in TrialStatus:
                family.add_metric([one.name, status.value], counts[status.value])
        return family


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
        "How far what came (or is forecast) is from the first plan: 0.1 is a tenth more.",
        labels=["experiment", "what"],
    )
    for one in experiments:
        for what, ratio in plan_errors(one).items():
            family.add_metric([one.name, what], ratio)
    return family


def plan_errors(one: Submission) -> dict[str, float]:
    """`time` and `cost`: how far what came, or is forecast, is from the plan; only of what is known."""
    summary = one.summary
    over = one.state is ExperimentState.DONE
    came = {
        "time": (summary.jct_s if over else summary.forecast_jct_s, summary.planned_jct_s),
        "cost": (summary.cost_usd if over else summary.forecast_cost_usd, summary.planned_cost_usd),
    }
    return {what: value / planned - 1.0 for what, (value, planned) in came.items() if value is not None and planned}
