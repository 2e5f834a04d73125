"""What an experiment tells its pool, and the cap that follows."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.experiments.sharing import DECIDE_EVERY_S, KEPT_S, Lender, Member, Sharing, demand
from rubberband.api.settings import SharedPool
from rubberband.api.store import Store
from rubberband.api.store.schema import Promise
from rubberband.errors import InputError, ProviderError
from rubberband.executor import (
    AllotmentChanged,
    CancelRequested,
    DriverRequest,
    DriverResumed,
    DriverStopped,
    ExperimentFolder,
    Inbox,
    Job,
    JournalFollower,
    Started,
)
from rubberband.planner.sharing import Autoscaling
from rubberband.states import ExperimentState
from rubberband.values.profile import Spread
from rubberband.values.submission import Submission
from tests.builders.jobs import JOB
from tests.builders.stories import Story, begun
from tests.harness.chaos_cases import random_case

WIDE = dataclasses.replace(JOB, replan=True, max_gpus_per_trial=2, objective="min_time")
"""Gangs of two GPUs are faster, so that four instances are of use."""


def test_before_it_starts_the_demand_is_that_of_the_whole_search() -> None:
    story = Story()
    found = demand(story.state, 100.0, arrived_at=90.0)
    assert found is not None
    # an instance has 2 GPUs: two waves of 10 s, then 20 s for the two that are left; with two instances, one wave
    assert found.seconds_left == [math.inf, 40.0, 40.0, 30.0, 30.0, 30.0, 30.0, 30.0]
    assert (found.min_gpus, found.max_gpus, found.progress, found.moves) == (2, 4, 0.0, 0)


def test_an_experiment_that_need_not_hurry_asks_for_the_instances_of_its_plan() -> None:
    for job, most in (
        (JOB, 2 * max(choice.instances for choice in JOB.plan.stages)),
        (dataclasses.replace(JOB, deadline_s=60.0), 2 * JOB.offer.max_instances),
        (WIDE, 2 * JOB.offer.max_instances),
    ):
        found = demand(Story(job).state, 100.0, arrived_at=90.0)
        assert found is not None
        assert found.max_gpus == most


def test_it_falls_as_trials_report_and_ends_with_the_search() -> None:
    story = begun()
    before = demand(story.state, story.at, arrived_at=90.0)
    story.report(0, 0.5)
    story.report(1, 0.5)
    after = demand(story.state, story.at, arrived_at=90.0)
    assert before is not None
    assert after is not None
    assert after.seconds_left[1] < before.seconds_left[1]
    assert after.progress == pytest.approx(2 / 8)
    assert after.attained_gpu_s == 0.0, "no trial has trained a first step"
    story.tell(DriverStopped, reason="the checkpoint store is away")
    assert demand(story.state, story.at, arrived_at=90.0) is None
    story.tell(DriverResumed, live=(), ended=())
    assert demand(story.state, story.at, arrived_at=90.0) is not None
    story.tell(CancelRequested)
    assert demand(story.state, story.at, arrived_at=90.0) is None


def test_the_deadline_counts_from_the_submission_and_moves_are_counted() -> None:
    story = begun(dataclasses.replace(JOB, deadline_s=60.0))
    story.tell(AllotmentChanged, request="r", max_instances=1)
    found = demand(story.state, story.at, arrived_at=91.0, weight=2.0, promised_gpus=2)
    assert found is not None
    assert (found.deadline_s, found.moves, found.weight, found.promised_gpus) == (70.0, 1, 2.0, 2)


@given(st.randoms(use_true_random=False))
def test_more_instances_never_take_longer(source: Any) -> None:
    case = random_case(source, source.choice(["27 trials", "brackets", "asha"]), replan=False)
    found = demand(Story(case.job).state, 0.0, arrived_at=0.0)
    assert found is not None
    whole = found.seconds_left[case.job.offer.gpus - 1 :: case.job.offer.gpus]
    if not case.job.is_divided:  # lanes get whole instances, by their quotas
        assert all(more <= fewer + 1e-9 for fewer, more in pairwise(whole))
    assert all(seconds > 0.0 for seconds in whole)


class FakeStore:
    def __init__(self) -> None:
        self.kept: list[Promise] = []
        self.lapses: list[float] = []

    def promises(self) -> list[Promise]:
        return self.kept

    def lapse(self, *, before: float, note: str) -> None:
        self.lapses.append(before)

    def move(self, promise: Promise) -> None:
        self.kept = [promise if one.experiment == promise.experiment else one for one in self.kept]


class Pool:
    """A service's sharing, with experiments that obey at once."""

    def __init__(self, tmp_path: Path, lender: Lender | None = None, **settings: Any) -> None:
        self.now, self.store, self.home = 100.0, FakeStore(), tmp_path
        given = {"name": "p", "provider": "local", "instances": 4, "gpus_per_instance": 2, "policy": "equal"}
        pool = SharedPool(**{**given, **settings})
        self.provider, self.settings = pool.provider, pool
        self.sharing = Sharing(pool, cast(Store, self.store), self.folder, lambda: self.now, lender)
        self.stories: dict[str, Story] = {}
        self.rows: dict[str, Submission] = {}
        self.waits: set[str] = set()
        """Experiments that wait for their checkpoint stores."""

    def folder(self, name: str) -> ExperimentFolder:
        return ExperimentFolder(home=self.home, name=name)

    def add(self, name: str, owner: str = "", job: Job = WIDE, provider: str = "") -> None:
        made = {"resources": {"provider": provider or self.provider}}
        state = ExperimentState.RUNNING
        self.rows[name] = Submission(name=name, state=state, created_at=99.0, changed_at=99.0, owner=owner, words=made)
        self.stories[name] = Story(dataclasses.replace(job, name=name))

    def obey(self, name: str, most: int, promised: int | None = None, recall: str = "at_checkpoint") -> None:
        """Let a driver hold what it was asked for."""
        story = self.stories[name]
        fields = {"max_instances": most, "promised_instances": promised, "recall": recall}
        story.tell(AllotmentChanged, request=f"r-{story.at}", **fields)
        self.sharing._asked.clear()  # its requests have other ids

    def decide(self) -> dict[str, int | None]:
        """Decide; return how many instances the experiments may have."""
        return {name: asked.max_instances for name, asked in self.asked().items()}

    def asked(self) -> dict[str, DriverRequest]:
        """Decide; return what the experiments were told."""
        members = []
        for name, row in self.rows.items():
            header = SimpleNamespace(kind=SimpleNamespace(is_simulated=False))
            seen = SimpleNamespace(controller=self.stories[name].controller, header=header, now=self.now)
            members.append(Member(row=row, follower=cast(JournalFollower, seen), waits=name in self.waits))
        self.sharing.round(members)
        expected: dict[str, DriverRequest] = {}
        for name in self.rows:
            inbox = Inbox(self.folder(name).inbox)
            for asked in inbox.pending():
                expected[name] = asked
                inbox.discard(asked.id)
        return expected


def test_experiments_share_the_pool_by_its_policy_and_hear_it_once(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.add("one")
    assert pool.decide() == {"one": 4}
    assert pool.decide() == {}
    pool.add("two")
    assert pool.decide() == {"one": 2, "two": 2}
    pool.now += DECIDE_EVERY_S
    assert pool.decide() == {}
    pool.stories["one"].controller.handle(CancelRequested(occurred_at=pool.now))
    assert pool.decide()["two"] == 4


def test_a_promise_comes_before_the_shares(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.add("one")
    pool.add("two")
    starting = Promise(experiment="starts", start_at=100.0, spans=[(8, 50.0)])
    pool.store.kept = [starting, Promise(experiment="two", start_at=150.0, spans=[(6, 100.0)])]
    assert pool.decide() == {"one": 0, "two": 0}
    pool.now = 150.0
    assert pool.decide() == {"one": 1, "two": 3}


def test_an_experiment_whose_promise_is_over_gets_what_the_policy_gives(tmp_path: Path) -> None:
    """As one whose plan was late, and whose promise could not move, since others have what comes after it."""
    pool = Pool(tmp_path)
    pool.add("late")
    over = Promise(experiment="late", start_at=10.0, spans=[(8, 50.0)])
    pool.store.kept = [over, Promise(experiment="starts", start_at=100.0, spans=[(6, 500.0)])]
    assert pool.decide() == {"late": 1}


def test_a_promise_follows_the_plan_it_was_made_for(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.add("early")
    pool.store.kept = [Promise(experiment="early", start_at=150.0, spans=[(4, 90.0)])]
    assert pool.asked()["early"].promised_instances == 2
    assert pool.store.lapses == [pool.now - KEPT_S], "and what is promised to interrupted ones lapses"
    (moved,) = pool.store.kept
    assert (moved.start_at, moved.end_at) == (100.0, 240.0), "it begins at once, and keeps its end"
    pool.now = 235.0
    pool.decide()
    (late,) = pool.store.kept
    assert late.end_at > 240.0, "it is not over by then"


def test_gpus_that_are_promised_to_another_are_given_back_at_once(tmp_path: Path) -> None:
    pool = Pool(tmp_path, instances=2)
    pool.add("one")
    pool.stories["one"] = begun(dataclasses.replace(WIDE, name="one"))
    pool.decide()
    pool.store.kept = [Promise(experiment="two", start_at=100.0, spans=[(2, 50.0)])]
    pool.add("two")
    answer = pool.asked()
    assert (answer["one"].max_instances, answer["one"].recall) == (0, "at_once")
    assert answer["two"].max_instances == 2
    pool.stories["two"] = begun(dataclasses.replace(WIDE, name="two"))
    pool.now += DECIDE_EVERY_S
    assert "one" not in pool.asked(), "it still gives them back, and needs no milder word"


def test_an_experiment_elsewhere_hears_nothing_and_one_that_begins_waits(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.add("elsewhere", provider="virtual")
    assert pool.decide() == {}
    pool.add("one")
    pool.sharing.begin(pool.rows["one"])
    assert [asked.max_instances for asked in Inbox(pool.folder("one").inbox).pending()] == [0]


def test_an_experiment_that_waits_for_its_checkpoint_store_leaves_its_share_to_others(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    for name in ("one", "two"):
        pool.add(name)
        pool.stories[name] = begun(dataclasses.replace(WIDE, name=name))
    assert pool.decide() == {"one": 2, "two": 2}
    for name in ("one", "two"):
        pool.obey(name, 2)
    pool.stories["one"].tell(DriverStopped, reason="the checkpoint store is away")
    assert pool.decide() == {"one": 0, "two": 4}, "it goes on with none until the pool has decided"
    pool.obey("two", 4)
    pool.obey("one", 0)
    assert pool.decide() == {}
    pool.stories["one"].tell(DriverResumed, live=(), ended=())
    assert pool.decide() == {"one": 2, "two": 2}


def test_a_process_that_waits_for_its_store_before_its_driver_stopped_has_no_share(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    for name in ("one", "two"):
        pool.add(name)
        pool.obey(name, 2)
    assert pool.decide() == {}
    pool.waits.add("one")
    assert pool.decide() == {"one": 0, "two": 4}
    pool.waits.clear()
    assert pool.decide() == {"one": 2, "two": 2}


def test_promised_gpus_wait_some_minutes_for_a_store_and_are_lent_until_it_is_back(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.store.kept = [Promise(experiment="promised", start_at=90.0, spans=[(6, 7200.0)])]
    for name in ("promised", "other"):
        pool.add(name)
        pool.stories[name] = begun(dataclasses.replace(WIDE, name=name))
    assert pool.decide() == {"promised": 3, "other": 1}
    pool.obey("promised", 3, promised=3)
    pool.obey("other", 1, recall="at_once")
    pool.stories["promised"].tell(DriverStopped, reason="the checkpoint store is away")
    assert pool.decide() == {"promised": 0}
    pool.obey("promised", 0, promised=3)
    pool.now += KEPT_S
    assert pool.decide() == {}
    pool.now += 1.0
    assert pool.decide() == {"other": 4}
    pool.obey("other", 4)
    pool.stories["promised"].tell(DriverResumed, live=(), ended=())
    text = pool.asked()
    assert {name: asked.max_instances for name, asked in text.items()} == {"promised": 3, "other": 1}


def test_a_cap_that_was_set_by_hand_is_set_right(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    for name in ("one", "two"):
        pool.add(name)
    assert pool.decide() == {"one": 2, "two": 2}
    pool.obey("two", 2)
    Inbox(pool.folder("one").inbox).put(DriverRequest(id="by-hand", kind="limit", asked_at=1.0, max_instances=None))
    assert pool.decide() == {"one": 2}, "it waits in the inbox"
    pool.obey("one", 2)
    pool.obey("one", 4)
    assert pool.decide() == {"one": 2}, "it is in force"


def test_a_service_that_restarts_while_a_request_waits_asks_for_what_is_right_then(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.add("one")
    for most in (2, 4):
        pool.obey("one", most)
    pool.sharing.begin(pool.rows["one"])
    pool.sharing = Sharing(pool.settings, cast(Store, pool.store), pool.folder, lambda: pool.now)
    assert pool.decide() == {"one": 4}


def test_a_request_that_is_taken_in_and_not_yet_read_is_not_repeated(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.add("one")
    (asked,) = pool.asked().values()
    pool.now += DECIDE_EVERY_S
    assert pool.decide() == {}
    pool.stories["one"].tell(AllotmentChanged, request=asked.id, max_instances=4)
    pool.now += DECIDE_EVERY_S
    assert pool.decide() == {}, "it is what the offer allows"


def test_requests_to_others_go_out_though_one_inbox_cannot_be_written(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    for name in ("one", "two"):
        pool.add(name)
        pool.obey(name, 4)
    folder = pool.folder("one").inbox
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        pool.decide()
    assert [asked.max_instances for asked in Inbox(pool.folder("two").inbox).pending()] == [2]
    folder.unlink()
    assert pool.decide()["one"] == 2


def test_a_clock_that_steps_back_keeps_no_decision_waiting(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.add("early")
    for _ in range(2):
        pool.store.kept = [Promise(experiment="early", start_at=pool.now + 50.0, spans=[(4, 90.0)])]
        pool.decide()
        assert pool.store.kept[0].start_at == pool.now, "the promise follows the plan"
        pool.now -= 3600.0


def test_a_token_with_more_weight_gets_more(tmp_path: Path) -> None:
    pool = Pool(tmp_path, policy="default", weights={"ann": 3.0}, instances=8)
    large = dataclasses.replace(WIDE, offer=dataclasses.replace(JOB.offer, max_instances=8))
    pool.add("ann-1", owner="ann", job=large)
    pool.add("bob-1", owner="bob", job=large)
    answer = pool.decide()
    assert (answer["ann-1"] or 0) >= (answer["bob-1"] or 0)


class Broker:
    """Says which requests wait for a machine."""

    def __init__(self, *waits: tuple[str, str]) -> None:
        self.waits: tuple[tuple[str, str], ...] | None = waits
        """None: it does not answer."""
        self.scales: list[tuple[int, float]] = []

    def scale(self, machines: int, efficiency: float) -> None:
        self.scales.append((machines, efficiency))

    def waiting(self) -> tuple[tuple[str, str], ...]:
        if self.waits is None:
            raise ProviderError("the broker is away")
        return self.waits


def stopped_after(tmp_path: Path, seconds: float, broker: Broker | None = None, **settings: Any) -> bool:
    """Return whether others are stopped at once where a promised instance does not run for a time after its request.

    Instances start in 20 s on the mean.
    """
    pool = Pool(tmp_path, lender=broker, **settings)
    slow = dataclasses.replace(WIDE, offer=dataclasses.replace(JOB.offer, provision_delay_s=20.0))
    for name in ("promised", "other"):
        pool.add(name, job=slow)
    pool.store.kept = [Promise(experiment="promised", start_at=90.0, spans=[(4, 3600.0)])]
    pool.stories["promised"].tell(Started)
    pool.stories["other"] = begun(dataclasses.replace(slow, name="other"))
    pool.decide()
    pool.now += seconds
    other = pool.asked().get("other")
    return other is not None and (other.max_instances, other.recall) == (0, "at_once")


def test_others_go_on_while_a_promised_machine_boots_however_slow_it_is(tmp_path: Path) -> None:
    assert not stopped_after(tmp_path, 25.0, Broker())
    assert not stopped_after(tmp_path, 3000.0, Broker())
    away = Broker()
    away.waits = None
    assert not stopped_after(tmp_path, 3000.0, away)


def test_others_are_stopped_for_a_promised_instance_that_no_machine_has_room_for(tmp_path: Path) -> None:
    waits = Broker(("promised", "i-001"), ("promised", "i-002"))
    assert not stopped_after(tmp_path, 20.0, waits), "it would not run by now on a new machine either"
    assert stopped_after(tmp_path, 25.0, waits)
    assert not stopped_after(tmp_path, 25.0, Broker(("other", "i-009")))


def test_without_a_broker_a_rented_instance_is_late_after_two_minutes_or_95_percent_of_the_starts(
    tmp_path: Path,
) -> None:
    assert not stopped_after(tmp_path, 120.0, provider="aws")
    assert stopped_after(tmp_path, 130.0, provider="aws")
    assert stopped_after(tmp_path, 25.0, provider="local")


@pytest.mark.parametrize(
    ("spread", "p95"),
    [
        (Spread(), 1.0),
        (Spread(samples=(0.5, 0.75, 1.0, 1.75)), 1.75),
        (Spread(samples=(*[0.9] * 19, 2.9)), 0.9),
        (Spread(cv=0.5), 1.95),  # exp(1.645 * sqrt(ln 1.25) - ln(1.25) / 2)
    ],
)
def test_the_95th_percentile_of_starts(spread: Spread, p95: float) -> None:
    assert spread.p95 == pytest.approx(p95, rel=0.01)


def test_a_pool_that_scales_divides_the_instances_that_are_efficient(tmp_path: Path) -> None:
    broker = Broker()
    pool = Pool(tmp_path, lender=broker, policy="equal", instances=4, autoscaling=Autoscaling(lower=0.65, upper=0.8))
    pool.add("one")
    # one instance leaves 40 s, two and three of them 22 s, four 18 s
    assert pool.decide() == {"one": 2}
    assert broker.scales == [(2, pytest.approx(40.0 / 22.0 / 2.0))]
    pool.add("two")
    assert pool.decide() == {"two": 2}
    assert [instances for instances, _ in broker.scales] == [2, 4]
    pool.stories["one"].controller.handle(CancelRequested(occurred_at=pool.now))
    assert pool.decide() == {}
    pool.store.kept = [Promise(experiment="later", start_at=pool.now, spans=[(4, 50.0)])]
    pool.now += DECIDE_EVERY_S
    assert pool.decide() == {}, "what is promised fits beside it"
    assert [instances for instances, _ in broker.scales][-2:] == [2, 4]
