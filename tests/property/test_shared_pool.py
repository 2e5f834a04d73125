"""Pools in random weather: tenants, real controllers, promises and budgets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import cast
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.api.experiments import budgets
from rubberband.api.experiments.admission import START_S, Admission
from rubberband.api.plans.previews import PlanAnswer
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import SharedPool
from rubberband.api.store import Store
from rubberband.api.store.schema import Promise
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import month_begin, month_end
from rubberband.values.submission import Submission, Summary
from tests.builders.budget import examples
from tests.builders.fake_runs import words
from tests.harness.pool_runs import PoolRun
from tests.harness.shared_pool import SharedRun, replay_command, wrong_end
from tests.harness.simulated_pool import run_jcts_s, simulated_jcts_s

FEW, MANY = 10, 1_000


def failures(seeds: Iterable[int], seen: Counter[str], *, odd: bool = False, sick: bool = False) -> list[str]:
    """Return a line for each seed that ends as it must not, with the command that replays it."""
    found = []
    for seed in seeds:
        run = SharedRun(seed, odd=odd, sick=sick)
        if wrong := wrong_end(run):
            found.append(f"{replay_command(seed, odd=odd, sick=sick)}  # {wrong}")
        seen.update(run.seen)
    return found


def test_experiments_that_share_a_pool_get_what_they_were_promised_and_pay_what_they_held() -> None:
    seen: Counter[str] = Counter()
    found = failures(range(FEW), seen)
    assert not found, "\n".join(found)
    assert {"broker dies", "driver dies", "promise kept", "refused", "ended done", "scaled"} <= set(seen)


def test_a_pool_keeps_its_caps_in_odd_orders_too() -> None:
    seen: Counter[str] = Counter()
    found = failures(range(4), seen, odd=True)
    assert not found, "\n".join(found)
    odd = {"answer lost", "limit by hand", "service restarts"}
    assert odd <= set(seen)


@pytest.mark.long
def test_a_sick_machine_costs_an_experiment_its_own_time_only() -> None:
    seen: Counter[str] = Counter()
    found = failures([0, 57, 110], seen, sick=True)
    assert not found, "\n".join(found)
    assert {"cut off", "its workers did not start", "its Ray node stopped answering", "retired as silent"} <= set(seen)


@pytest.mark.parametrize("seed", [929, 2218, 2509, 3587, 20837, 21357])
def test_a_promised_deadline_is_kept_whatever_others_do(seed: int) -> None:
    assert not failures([seed], Counter())


def test_an_instance_that_is_lent_no_more_does_not_block_the_pool() -> None:
    assert not failures([2342], Counter())


@pytest.mark.parametrize("seed", [1235, 8683])
def test_nothing_is_billed_after_a_lease_though_driver_and_broker_were_dead_as_it_ended(seed: int) -> None:
    assert not failures([seed], Counter())


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 10 * MANY, MANY))
def test_ten_thousand_of_them(first: int) -> None:
    found = failures(range(first, first + MANY), Counter()) + failures(range(first, first + MANY), Counter(), sick=True)
    assert not found, "\n".join(found)


@pytest.mark.long
def test_a_broker_that_expires_no_lease_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubberband.cloud.pool.broker.Broker.expiries", lambda broker, at: [])
    assert any(failures([seed], Counter()) for seed in range(FEW))


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=examples(30))
def test_a_pool_keeps_its_promises_in_random_weather(seed: int) -> None:
    PoolRun(seed).run()


STARTS = 0.08
"""What starts of instances and drivers, and GPUs that are given back at a checkpoint only, may add to a mean JCT."""


@pytest.mark.long
def test_real_experiments_take_as_long_as_simulated_ones_and_a_little_for_starts() -> None:
    simulated, real = dict[str, float](), dict[str, float]()
    for policy in ("default", "equal", "fifo"):
        by_job = simulated_jcts_s(policy), run_jcts_s(policy)
        assert by_job[0].keys() == by_job[1].keys()
        simulated[policy], real[policy] = (fmean(each.values()) for each in by_job)
        assert 1.0 <= real[policy] / simulated[policy] <= 1.0 + STARTS
    assert sorted(real, key=real.__getitem__) == sorted(simulated, key=simulated.__getitem__)


START = datetime(2026, 11, 29, tzinfo=UTC).timestamp()
HOUR_S, DAY_S = 3600.0, 86400.0
CAP_USD, GPUS = 20.0, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that there is for an experiment."""

    stages: Sequence[tuple[int, float]]
    """Instances and seconds of each."""
    cost_usd: float

    @property
    def jct_s(self) -> float:
        return sum(seconds for _, seconds in self.stages)

    def answer(self) -> PlanAnswer:
        at, stages = 0.0, []
        for instances, seconds in self.stages:
            stages.append({"start_s": at, "provisioning_s": 0.0, "duration_s": seconds, "instances": instances})
            at += seconds
        spread = dict.fromkeys(("mean", "p95"), self.jct_s)
        prediction = {"jct_s": spread, "cost_usd": {"mean": self.cost_usd}}
        return PlanAnswer(
            id="p", status=200, body=json.dumps({"plan": {"stages": stages}, "prediction": prediction}).encode()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A submission, some time after the one before."""

    after_s: float
    deadline_s: float | None
    candidates: Sequence[Candidate]


@dataclass(slots=True)
class Kept:
    """A store, and the provider's bill of what runs exactly as promised."""

    rows: dict[str, Submission] = field(default_factory=dict)
    kept: dict[str, Promise] = field(default_factory=dict)
    now: float = START

    def promises(self) -> list[Promise]:
        return [promise for promise in self.kept.values() if promise.end_at > self.now]

    def going_on(self, owner: str | None = None) -> list[Submission]:
        return [
            replace(self.rows[one.experiment], summary=Summary(cost_usd=self.cost_usd(one, START, self.now)))
            for one in self.promises()
        ]

    def cost_usd(self, promise: Promise, from_at: float, to_at: float) -> float:
        """What a promise costs between two instants, at a constant price per GPU."""
        used_s, at = 0.0, promise.start_at
        for gpus, seconds in promise.spans:
            used_s += gpus * max(0.0, min(at + seconds, to_at) - max(at, from_at))
            at += seconds
        return promise.cost_usd * used_s / sum(gpus * seconds for gpus, seconds in promise.spans)

    def month_usd(self, *, starts: bool) -> float:
        begin = month_begin(self.now)
        return sum(self.cost_usd(one, begin, self.now) for one in self.kept.values())


async def _submit(admission: Admission, store: Kept, asked: Asked, name: str) -> None:
    """Submit an experiment whose cheapest plan within its limits is found."""

    async def plan(experiment: Experiment) -> PlanAnswer:
        limits = experiment.constraints
        fitting = [
            one
            for one in asked.candidates
            if one.jct_s <= (limits.deadline_s or 1e12)
            and one.cost_usd <= (limits.max_cost_usd or 1e12)
            and max(instances for instances, _ in one.stages) <= experiment.resources.max_instances
        ]
        if not fitting:
            return PlanAnswer(id="none", status=422, body=b"{}")
        return min(fitting, key=lambda one: one.cost_usd).answer()

    given = words(name=name, constraints__deadline=asked.deadline_s, resources__gpus_per_instance=1)
    experiment = admission.within(Experiment(**given))
    answer = await plan(experiment)
    if answer.status != 200:
        return
    try:
        promise = await admission.admit(experiment, answer, store.now, plan, owner="")
    except HttpProblem:
        return
    if promise is None:  # it runs at once, as it was planned
        found = json.loads(answer.body)
        stages = [(stage["instances"], stage["duration_s"]) for stage in found["plan"]["stages"]]
        spans = [(stages[0][0], START_S), *stages]
        cost_usd = found["prediction"]["cost_usd"]["mean"]
        promise = Promise(experiment=name, start_at=store.now, spans=spans, cost_usd=cost_usd)
    store.kept[name] = promise
    store.rows[name] = Submission(
        name=name,
        state=ExperimentState.RUNNING,
        created_at=store.now,
        changed_at=store.now,
        words={"resources": {"provider": "virtual"}},
    )


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        stages=st.lists(st.tuples(st.integers(1, GPUS // 2), st.floats(60.0, 30 * HOUR_S)), min_size=1, max_size=3),
        cost_usd=st.floats(0.01, 12.0),
    ),
    min_size=1,
    max_size=4,
)
ASKED = st.builds(
    Asked,
    after_s=st.floats(0.0, DAY_S),
    deadline_s=st.none() | st.floats(HOUR_S, 8 * DAY_S),
    candidates=CANDIDATES,
)


@settings(max_examples=examples(300))
@given(st.lists(ASKED, min_size=4, max_size=12))
def test_no_admitted_set_of_plans_passes_the_cap_of_a_month(submissions: list[Asked]) -> None:
    store = Kept()
    pool = SharedPool(
        name="p", provider="virtual", instances=GPUS, gpus_per_instance=1, max_usd_per_month=CAP_USD, folder="/pool"
    )
    admission = Admission(replace(pool, folder=None), cast(Store, store))
    admission.budgets = budgets.Budgets(pool, cast(Store, store))
    with patch.object(budgets, "RemotePool", lambda folder: store):
        for number, asked in enumerate(submissions):
            store.now += asked.after_s
            asyncio.run(_submit(admission, store, asked, f"e{number}"))
    month = month_begin(START)
    while any(promise.end_at > month for promise in store.kept.values()):
        planned_usd = sum(store.cost_usd(promise, month, month_end(month)) for promise in store.kept.values())
        assert planned_usd <= CAP_USD + 1e-6
        month = month_end(month)


def test_the_oracle_divides_a_cost_as_a_clock_would() -> None:
    store, promise = Kept(), Promise(experiment="a", start_at=START, spans=[(2, 10.0), (1, 20.0)], cost_usd=4.0)
    assert store.cost_usd(promise, START, START + 5.0) == pytest.approx(1.0)
    assert store.cost_usd(promise, START + 10.0, START + 1e6) == pytest.approx(2.0)
