"""Money is asked for wherever it may be spent: a submission, a resume, an extension, a restart, a start."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.experiments import ExperimentRuns, watcher
from rubberband.api.experiments import budgets as spending
from rubberband.api.experiments.budgets import Budgets
from rubberband.api.problems import REFUSED, UNAVAILABLE, HttpProblem
from rubberband.api.settings import ServiceLimits, SharedPool
from rubberband.errors import InputError
from rubberband.executor import (
    CancelRequested,
    DriverRequest,
    Ending,
    ExperimentFolder,
    Header,
    HostedRun,
    Inbox,
    RequestQueue,
    Stamp,
    bill_usd,
    holding,
    read_ending,
    write_ending,
    write_order,
)
from rubberband.executor.run.follower import summary_of
from rubberband.running import hosted
from rubberband.running.profile import noting
from rubberband.spec.pool import PoolFile, PoolFolder
from rubberband.states import ExperimentState
from rubberband.units import month_begin, month_end
from rubberband.values.submission import Submission, Summary
from tests.builders.clocks import MID_MONTH
from tests.builders.fake_runs import FakeService, fake_service, spent, words
from tests.builders.jobs import JOB
from tests.builders.service_runs import DONE, House, experiment, extend
from tests.builders.stories import Story
from tests.builders.virtual_runs import run_virtual
from tests.builders.waiting import eventually

QUEUED, INTERRUPTED, RUNNING = ExperimentState.QUEUED, ExperimentState.INTERRUPTED, ExperimentState.RUNNING
POOL = SharedPool(name="team", provider="virtual", instances=4, gpus_per_instance=1)


def limited(house: House, budget_usd: float, **settings: Any) -> None:
    """From now on the token without a name has this budget."""
    house.set(pool=replace(POOL, budgets_usd={"": budget_usd}), **settings)


def spend(house: House, cost_usd: float, name: str = "other") -> None:
    """An experiment that is over, and cost this much."""
    now = house.clock()
    row = Submission(name=name, state=DONE, created_at=now, changed_at=now, summary=spent(cost_usd, now))
    assert house.store.add(row)


def cut_off(house: House, name: str = "one") -> Submission:
    """An experiment whose process died amid its events."""
    house.tell(**{name: "cut"})
    with house.open() as runs:
        runs.submit(experiment(name))
        return house.wait(name, INTERRUPTED)


def test_a_resume_asks_for_what_is_left_of_it_and_counts_with_the_whole(house: House) -> None:
    row = cut_off(house)
    spent_usd = row.summary.cost_usd
    assert 0.0 < spent_usd < (row.summary.forecast_cost_usd or 0.0)
    limited(house, 1.0, limits=ServiceLimits(max_running=0))
    spend(house, 0.9)
    now = house.clock()
    with house.open() as runs:
        with pytest.raises(HttpProblem, match=r"budget of : .* are spent or planned in .*, and the rest of it costs"):
            runs.resume("one")
        assert house.row("one").state is INTERRUPTED
        house.store.change("other", at=now, summary=spent(0.3, now))
        assert runs.resume("one").state is QUEUED
    used_usd = Budgets(replace(POOL), house.store).used_usd("", now)
    assert used_usd - 0.3 > spent_usd, "the rest of it counts from then on"
    assert house.row("one").admitted_usd == pytest.approx(used_usd - 0.3)


@pytest.mark.usefixtures("zone")
def test_a_months_budget_is_whole_again_as_the_month_ends_in_utc_wherever_the_service_is(house: House) -> None:
    limited(house, 0.3, limits=ServiceLimits(max_running=0))
    december, january = (datetime(*of, 1, tzinfo=UTC).timestamp() for of in ((2026, 12), (2027, 1)))
    house.clock.now = december - 60.0
    spend(house, 0.25)
    with house.open() as runs:
        with pytest.raises(HttpProblem, match=r"0\.25 USD of 0\.30 USD are spent or planned in"):
            runs.submit(experiment("one"), admitted_usd=0.2)
        house.clock.now = december
        assert runs.submit(experiment("one"), admitted_usd=0.2).state is QUEUED
        house.clock.now = january - 60.0
        with pytest.raises(HttpProblem, match=r"0\.20 USD of 0\.30 USD are spent or planned in"):
            runs.submit(experiment("two"), admitted_usd=0.2)


def test_an_experiment_that_waits_for_money_starts_as_the_next_month_begins(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "ASK_EVERY_S", 0.01)
    limited(house, 0.3, limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment("late"), admitted_usd=0.2)
    spend(house, 0.2)
    limited(house, 0.3)
    with house.open():
        eventually(lambda: "it waits for money" in house.row("late").reason)
        house.clock.now = month_end(house.clock())
        house.tell()
        assert house.wait("late", DONE).attempt == 1


def test_cancelled_experiments_do_not_multiply_a_budget_by_being_resumed(house: House) -> None:
    for name in ("one", "two"):
        cut_off(house, name)
    limited(house, 1.0, limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        assert runs.resume("one").state is QUEUED
    both_usd = house.row("one").admitted_usd + house.row("two").summary.cost_usd
    limited(house, both_usd + 0.01, limits=ServiceLimits(max_running=0))
    with house.open() as runs, pytest.raises(HttpProblem) as refused:
        runs.resume("two")
    assert refused.value.kind is REFUSED


def test_a_resume_that_the_watcher_meets_as_it_looks_around_is_not_undone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(house)
    house.allow(max_running=0)
    later = house.clock() + 1e6
    os.utime(ExperimentFolder(home=house.home, name="one").journal, (later, later))  # as of a run that goes on by hand
    real, looks, opened, resumed = watcher.stamp_of, count(), list[ExperimentRuns](), list[Submission]()

    def stamp_of(folder: ExperimentFolder) -> Stamp:
        if next(looks) == 1:  # the first one is as its row is loaded
            resumed.append(eventually(lambda: opened)[0].resume("one"))
        return real(folder)

    monkeypatch.setattr(watcher, "stamp_of", stamp_of)
    with house.open() as runs:
        opened.append(runs)
        eventually(lambda: resumed)
    assert (resumed[0].state, house.row("one").state) == (QUEUED, QUEUED)


def test_a_restart_that_the_budget_does_not_cover_waits_for_money(house: House) -> None:
    limited(house, 0.5, auto_resume=True)
    spend(house, 0.49)
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment())
        row = eventually(lambda: row if "it waits for money: budget of " in (row := house.row("one")).reason else None)
    assert row.state is QUEUED
    assert len(house.starts()) == 1


def test_an_experiment_of_the_queue_waits_while_what_runs_leaves_no_money(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "ASK_EVERY_S", 0.01)
    spend(house, 0.05)
    limited(house, 0.3, limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment("late"), admitted_usd=0.2)
    house.store.change("other", at=house.clock(), summary=spent(0.2, house.clock()))
    limited(house, 0.3)
    with house.open():
        text = eventually(lambda: reason if (reason := house.row("late").reason) else None)
        assert text.startswith("it waits for money: budget of : 0.20 USD of 0.30 USD are spent or planned in")
        assert house.row("late").state is QUEUED
        house.store.change("other", at=house.clock(), summary=spent(0.05, house.clock()))
        assert house.wait("late", DONE).attempt == 1


def test_a_running_experiment_ends_once_its_owner_has_spent_the_budget(house: House) -> None:
    house.tell(one="hold")
    limited(house, 0.5)
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        spend(house, 0.6)
        inbox = Inbox(ExperimentFolder(home=house.home, name="one").inbox)
        (asked,) = eventually(lambda: inbox.pending() or None)
        house.go()
        house.wait("one", DONE)
    assert (asked.kind, asked.reason.partition(" are")[0][-12:]) == ("cancel", " of 0.50 USD")
    assert asked.reason.endswith("are spent this month; resume it next month, or once the budget is raised")


def test_an_end_that_a_full_disk_kept_from_being_asked_is_asked_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.tell(one="hold")
    limited(house, 0.5)
    real, tries = Inbox.put, list[str]()

    def put(inbox: Inbox, request: DriverRequest) -> None:
        tries.append(request.id)
        if len(tries) == 1:
            raise InputError("inbox cannot be written (No space left on device)")
        real(inbox, request)

    monkeypatch.setattr(Inbox, "put", put)
    monkeypatch.setattr(spending, "COUNT_EVERY_S", 0.01)
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        spend(house, 0.6)
        eventually(lambda: Inbox(ExperimentFolder(home=house.home, name="one").inbox).pending() or None)
        house.go()
        house.wait("one", DONE)
    assert tries == ["budget-1"] * 2


def test_two_submissions_at_the_same_moment_do_not_get_the_same_money(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(house, 0.3, limits=ServiceLimits(max_running=0))
    require, lock, at_the_door, lines = Budgets.require, threading.RLock(), set[str](), list[str]()

    class Door:
        """The lock of the promises; it notes who wants it."""

        def __enter__(self) -> None:
            at_the_door.add(threading.current_thread().name)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def slow(*arguments: Any, **named: Any) -> None:
        require(*arguments, **named)
        eventually(lambda: at_the_door >= {"one", "two"})

    def submit(runs: ExperimentRuns, name: str) -> None:
        try:
            lines.append(runs.submit(experiment(name), admitted_usd=0.2).state.value)
        except HttpProblem as problem:
            lines.append(problem.kind.slug)

    monkeypatch.setattr(watcher.Watcher, "promising", property(lambda _: Door()))
    monkeypatch.setattr(Budgets, "require", slow)
    with house.open() as runs:
        threads = [threading.Thread(target=submit, args=(runs, name), name=name) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(lines) == ["not-allowed-here", "queued"]


def test_an_extended_experiment_of_the_queue_counts_with_its_new_plan(house: House) -> None:
    limited(house, 10.0, limits=ServiceLimits(max_running=0))
    now = house.clock()
    with house.open() as runs:
        runs.submit(experiment(deadline="10m", max_cost=5.0, objective="min_time"), admitted_usd=0.01)
        after = extend(runs, house.home, "one", max_cost_usd=6.0, request="more").after
        assert Budgets(POOL, house.store).used_usd("", now) == pytest.approx(after.cost_usd)
        limited_to = replace(POOL, budgets_usd={"": after.cost_usd / 2.0})
        monkey = Budgets(limited_to, house.store)
        row, dearer = house.row("one"), replace(after, cost_usd=2.0 * after.cost_usd)
        with pytest.raises(HttpProblem, match="and the extension costs"):
            monkey.require_extension(row, replace(_extension(after), after=dearer), now, bill_usd=None)


def test_an_extension_of_an_ended_experiment_asks_for_what_it_adds(house: House) -> None:
    limited(house, 10.0, limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment(deadline="10m", max_cost=5.0, objective="min_time"), admitted_usd=0.01)
        after = extend(runs, house.home, "one", max_cost_usd=6.0, request="more").after
    house.store.change("one", at=house.clock(), state=ExperimentState.CANCELLED, summary=spent(0.1, house.clock()))
    granted = replace(_extension(replace(after, cost_usd=0.55)), before=replace(after, cost_usd=0.5))
    spend(house, 0.8)
    budgets = Budgets(replace(POOL, budgets_usd={"": 1.0}), house.store)
    assert budgets.require_extension(house.row("one"), granted, house.clock(), bill_usd=None) == pytest.approx(0.15)


def test_a_start_asks_for_the_pools_own_bill(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the idle time of instances, which no experiment has."""
    folder = PoolFolder(path=house.home / "pools" / "team")
    monkeypatch.setattr("rubberband.api.experiments.budgets.RemotePool.month_usd", lambda *_, **__: 4.9)
    budgets = Budgets(replace(POOL, folder=str(folder.path), max_usd_per_month=5.0), house.store)
    row = Submission(
        name="one", state=QUEUED, created_at=1.0, changed_at=1.0, words=experiment().to_words(), admitted_usd=0.2
    )
    assert house.store.add(row)
    with pytest.raises(
        HttpProblem, match=r"4\.90 USD of 5\.00 USD are spent or planned .* this experiment costs 0\.20 USD"
    ):
        budgets.require_start(row, house.clock())


def test_each_attempt_is_asked_to_end_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending, "COUNT_EVERY_S", 0.0)
    monkeypatch.setattr(spending, "COUNTING_SHARE", 1e9)
    limited(house, 0.5)
    spend(house, 0.6)
    found = spending.Spending(house.settings, house.store)
    first = Submission(name="one", state=RUNNING, created_at=1.0, changed_at=1.0, attempt=1)
    second = replace(first, attempt=2)
    assert [row for row, _ in found.to_end([first])] == [first]
    found.ends(first)
    assert found.to_end([first]) == []
    assert [row for row, _ in found.to_end([second])] == [second]


def _extension(outlook: Any) -> Any:
    from rubberband.executor import Extension

    return Extension(before=outlook, after=outlook, stage=0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    pool = replace(POOL, budgets_usd={"": 0.30})
    with fake_service(tmp_path, pool=pool) as made:
        yield made


def submit(service: FakeService, name: str, **constraints: Any) -> Any:
    """Submit an experiment without a profile, and without a deadline: it cannot be promised anything."""
    asked = words(name=name, profile=None, constraints=constraints)
    asked["resources"] = {"provider": "local", "price_per_hour": 3.6}
    asked["entrypoint"] = "examples.digits:DigitsTrial"
    return service.client.post("/v1/experiments", json=asked)


def test_without_a_profile_an_experiment_counts_with_its_max_cost_until_it_is_planned(service: FakeService) -> None:
    unbounded = submit(service, "none", objective="min_cost")
    assert unbounded.status_code == 422
    assert unbounded.json()["detail"] == (
        "constraints.max_cost: without a profile its cost is not known, and it counts in the budget of ; set it, or "
        "run `rubberband profile` first"
    )
    assert submit(service, "one", max_cost=0.2).status_code == 201
    row = service.store.submission("one")
    assert row is not None
    assert row.admitted_usd == 0.2
    assert Budgets(POOL, service.store).used_usd("", service.clock()) == pytest.approx(0.2)


def test_money_counts_in_the_month_in_which_it_is_spent_or_planned(service: FakeService) -> None:
    now = service.clock()
    month, later = month_begin(now), month_end(now)
    old = spent(9.0, month - 1.0)
    service.add("last-month", state=DONE, created_at=month - 9e5, changed_at=now, summary=old)
    across = Summary(cost_usd=5.0, month_at=month, month_cost_usd=1.5, forecast_cost_usd=5.0)
    service.add("across", state=RUNNING, created_at=month - 9e5, changed_at=now, summary=across)
    ends = Summary(forecast_cost_usd=4.0, forecast_jct_s=2.0 * (later - now))
    service.add("ends-next-month", state=RUNNING, created_at=now, changed_at=now, summary=ends)
    asked = Budgets(POOL, service.store)
    assert asked.used_usd("", now) == pytest.approx(1.5 + 4.0)
    assert asked.used_usd("", later + 60.0) == pytest.approx(4.0), (
        "what was not spent yet is to come, whenever it began"
    )


def test_a_measurement_that_died_counts_with_all_that_it_may_have_cost(service: FakeService) -> None:
    now = service.clock()
    row = service.add("lost", state=INTERRUPTED, created_at=now, changed_at=now, admitted_usd=0.25, attempt=1)
    asked = Budgets(POOL, service.store)
    assert asked.used_usd("", now) == pytest.approx(0.25)
    assert service.store.change(row.name, at=now, summary=spent(0.1, now, started_at=now))
    assert asked.used_usd("", now) == pytest.approx(0.1)


def test_a_profile_whose_run_did_not_begin_is_paid_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(house, 5.0)
    house.tell(one="refuse")
    folder = ExperimentFolder(home=house.home, name="one")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", ExperimentState.REFUSED)
        assert house.row("one").summary.cost_usd == 0.0
    ending = Ending(attempt=1, exit_code=3, error="no plan", at=house.clock(), spent_usd=0.7)
    write_ending(folder, ending)
    house.store.change("one", at=house.clock(), state=ExperimentState.STARTING)
    with house.open():
        house.wait("one", ExperimentState.REFUSED)
    assert house.row("one").summary.cost_usd == 0.7
    assert Budgets(POOL, house.store).used_usd("", house.clock()) == pytest.approx(0.7)


def test_a_broker_that_does_not_answer_is_said_and_started_and_its_bill_is_never_guessed(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, started = PoolFolder(path=tmp_path / "pools" / "team"), list[PoolFolder]()
    folder.write(PoolFile(name="team", instances=1, gpus_per_instance=1, max_usd_per_month=5.0).model_dump(mode="json"))
    monkeypatch.setattr("rubberband.cloud.pool.provider.start_broker", started.append)
    asked = Budgets(replace(POOL, folder=str(folder.path), max_usd_per_month=5.0), service.store)
    with pytest.raises(
        HttpProblem, match=r"the broker of pool team does not answer .* is not known; try again"
    ) as refused:
        asked.bill_usd()
    assert (refused.value.kind, started) == (UNAVAILABLE, [folder])


def test_a_summary_has_the_cost_of_the_profile_and_the_part_of_the_latest_month() -> None:
    controller, _, _ = run_virtual(replace(JOB, offer=replace(JOB.offer, minimum_billed_s=0.0)))
    ended_s = controller.state.ended_at or 0.0
    whole_usd, half_usd = (bill_usd(controller.state, at) for at in (ended_s, ended_s / 2.0))
    month = month_begin(MID_MONTH)

    def seen(created_at: float) -> Summary:
        setup = {"provider": "virtual", "profiling_cost_usd": 5.0}
        header = Header(name="one", created_at=created_at, job=JOB, setup=setup)
        return summary_of(header, controller, ended_s)

    within, across = seen(month + 10.0), seen(month - ended_s / 2.0)
    for one in (within, across):
        assert one.cost_usd == pytest.approx(5.0 + whole_usd)
        assert (one.profiling_cost_usd, one.month_at) == (5.0, month)
        assert one.planned_cost_usd == pytest.approx(5.0 + controller.job.prediction.cost_usd)
    assert within.month_cost_usd == pytest.approx(within.cost_usd)
    assert across.month_cost_usd == pytest.approx(whole_usd - half_usd)
    assert 0.0 < half_usd < whole_usd, "the profile and this half are the earlier month's"


def test_an_error_carries_the_cost_of_the_profile_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def profiled(*_: object) -> None:
        with noting(lambda: 0.5), noting(lambda: 0.2):
            raise InputError("no plan")

    folder = ExperimentFolder(home=tmp_path, name="one")
    with holding(folder):
        write_order(folder, HostedRun(attempt=1, resume=False, words={}))
    monkeypatch.setattr(hosted, "run_patiently", profiled)
    monkeypatch.setattr(hosted, "ENDS", ())  # signals of this process are handled as ever
    assert hosted.main([str(tmp_path), "one"]) == 2
    ending = read_ending(folder)
    assert ending is not None
    assert (ending.error, ending.spent_usd) == ("no plan", pytest.approx(0.7))


def test_a_driver_that_is_asked_to_end_for_money_says_so_in_its_result(tmp_path: Path) -> None:
    inbox, story = Inbox(tmp_path), Story(JOB)
    inbox.put(DriverRequest(id="budget-1", kind="cancel", asked_at=1.0, reason="budget of ann: spent"))
    (event,) = RequestQueue(inbox, lambda: False).asked(story.controller, story.state.now, at_once=True)
    assert isinstance(event, CancelRequested)
    story.controller.handle(event)
    assert story.state.reason == "budget of ann: spent"
