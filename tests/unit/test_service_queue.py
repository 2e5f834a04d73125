"""The queue of a service foretold: places and expected starts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from typer.testing import CliRunner

from rubberband import cli
from rubberband.api.experiments.queueing import Holder, Line, Queue, Turn, Waiting, holder_of, waiting_of
from rubberband.api.plans.previews import PlanAnswer
from rubberband.api.problems import HttpProblem
from rubberband.api.routes.queueing import shortest_s
from rubberband.client import models
from rubberband.commands import run
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import parse_duration
from rubberband.values.submission import Submission, Summary
from rubberband.views.live.status import headline
from rubberband.views.queueing import NO_PLAN_AHEAD, about, ordinal, queue_line, queue_view, submitted_line
from tests.builders.fake_runs import fake_service, words
from tests.builders.service_runs import DONE, RUNNING, House, experiment, extend, extension
from tests.builders.waiting import eventually

NOW = 1000.0
LENGTHS = st.floats(0.0, 1e5)
OWNERS = st.sampled_from("abc")


@st.composite
def lines(draw: st.DrawFn, *, slots: int | None = None, known: bool = False) -> Line:
    number = draw(st.integers(1, 5)) if slots is None else slots
    ends = LENGTHS.map(lambda seconds: NOW - 5e4 + seconds) if known else st.none() | LENGTHS
    running = draw(st.lists(st.builds(Holder, owner=OWNERS, ends_at=ends), min_size=number, max_size=number + 2))
    queue, waiting = Queue(draw(st.dictionaries(OWNERS, st.floats(0.5, 3.0)))), {}
    takes = LENGTHS if known else st.none() | LENGTHS
    for at, owner in enumerate(draw(st.lists(OWNERS, max_size=12))):
        queue.put(f"{owner}-{at}", owner)
        deadlines = st.none() if known else st.none() | LENGTHS
        waiting[f"{owner}-{at}"] = Waiting(
            takes_s=draw(takes), shortest_s=draw(st.floats(0.0, 100.0)), deadline_at=draw(deadlines)
        )
    return Line(queue=queue, running=running, waiting=waiting, slots=number)


@given(lines())
def test_starts_are_never_before_the_present_and_never_before_those_of_places_ahead(line: Line) -> None:
    turns = [*line.turns(NOW).values()]
    assert [turn.place for turn in turns] == [*range(1, len(line.queue) + 1)]
    assert [turn.ahead for turn in turns] == [len(line.running) + at for at in range(len(turns))]
    starts = [turn.start_at for turn in turns]
    known = [start_at for start_at in starts if start_at is not None]
    assert starts == known + [None] * (len(starts) - len(known)), "no start is known behind one that is not"
    assert known == sorted(known)
    assert all(start_at >= NOW for start_at in known)


@given(lines())
def test_starts_are_known_until_one_ahead_has_no_plan(line: Line) -> None:
    known = all(one.ends_at is not None for one in line.running)
    for turn in line.turns(NOW).values():
        assert (turn.start_at is not None) is known
        known = known and turn.waiting.takes_s is not None


@given(lines(slots=1, known=True))
def test_one_slot_starts_each_at_the_end_of_the_one_before(line: Line) -> None:
    at = max([NOW, *(one.ends_at or 0.0 for one in line.running)])
    for turn in line.turns(NOW).values():
        assert turn.start_at == pytest.approx(at)
        at += turn.waiting.takes_s or 0.0


@given(lines(known=True))
def test_the_places_are_those_in_which_slots_are_given(line: Line) -> None:
    """A service that is followed from end to end starts them in this order, at these times."""
    queue, running, at = line.queue.copy(), [(one.ends_at or 0.0, one.owner) for one in line.running], NOW
    for name, turn in line.turns(NOW).items():
        while len(running) >= line.slots:
            first = min(running, key=lambda one: max(NOW, one[0]))
            running.remove(first)
            at = max(at, first[0])
        assert queue.next(Counter(owner for _, owner in running)) == name or _tied(line)
        assert turn.start_at == pytest.approx(at)
        owner = queue.owner(name)
        queue.drop(name)
        queue.took_turn(owner)
        running.append((at + (turn.waiting.takes_s or 0.0), owner))


def _tied(line: Line) -> bool:
    """Whether slots end at the same time, in any order."""
    ends = [max(NOW, one.ends_at or 0.0) for one in line.running]
    return len(set(ends)) < len(ends) or any(one.takes_s == 0.0 for one in line.waiting.values())


@given(lines(), st.floats(0.0, 1e5))
def test_a_joining_experiment_moves_no_one_of_its_owner_and_leaves_the_line_as_it_is(
    line: Line, takes_s: float
) -> None:
    before = line.turns(NOW)
    joined = line.joined("new", "a", Waiting(takes_s=takes_s)).turns(NOW)
    assert line.turns(NOW) == before
    assert {*joined} == {*before, "new"}
    ours = [name for name in before if name.startswith("a-")]
    assert [name for name in joined if name.startswith("a-") or name == "new"] == [*ours, "new"]


def line_of(*takes_s: float | None, running: tuple[float | None, ...] = (NOW + 60.0,), slots: int = 1) -> Line:
    queue = Queue({})
    for at in range(len(takes_s)):
        queue.put(str(at), "")
    return Line(
        queue=queue,
        running=[Holder(owner="", ends_at=at) for at in running],
        waiting={str(at): Waiting(takes_s=one) for at, one in enumerate(takes_s)},
        slots=slots,
    )


def starts(line: Line) -> list[float | None]:
    return [turn.start_at for turn in line.turns(NOW).values()]


def test_slots_are_taken_as_they_end() -> None:
    two = line_of(100.0, 10.0, 5.0, running=(NOW + 60.0, NOW + 30.0), slots=2)
    assert starts(two) == [NOW + 30.0, NOW + 60.0, NOW + 70.0]
    assert starts(line_of(1.0, running=())) == [NOW]
    assert starts(line_of(1.0, running=(NOW - 60.0,))) == [NOW], "late ones may end at any moment"
    assert starts(line_of(1.0, slots=0)) == [None]
    assert line_of(running=()).is_free
    assert not line_of(1.0, running=()).is_free
    assert not line_of().is_free


def test_experiments_that_start_too_late_for_their_deadlines_hold_no_slot() -> None:
    def turn(deadline_at: float) -> list[float | None]:
        line = line_of(300.0, 10.0)
        late = Waiting(takes_s=300.0, shortest_s=50.0, deadline_at=deadline_at)
        return starts(replace(line, waiting={**line.waiting, "0": late}))

    assert turn(NOW + 109.0) == [NOW + 60.0, NOW + 60.0]
    assert turn(NOW + 110.0) == [NOW + 60.0, NOW + 110.0], "its plan is as short as it has to be"
    assert turn(NOW + 9999.0) == [NOW + 60.0, NOW + 360.0]


def row(**changes: Any) -> Submission:
    given: dict[str, Any] = {"name": "one", "state": ExperimentState.QUEUED, "created_at": NOW, "changed_at": NOW}
    local = {"resources": {"provider": "local"}, "constraints": {"deadline": "1970-01-01T00:20:00Z"}}
    return Submission(**given | {"words": local} | changes)


def test_an_experiment_holds_its_slot_as_long_as_its_plan_or_what_is_left_of_it() -> None:
    planned = Summary(planned_jct_s=90.0, shortest_jct_s=20.0)
    found = waiting_of(row(summary=planned))
    assert (found.takes_s, found.shortest_s, found.deadline_at) == (90.0, 20.0, 1200.0)
    assert found.last_start_at == 1180.0
    assert waiting_of(row()).takes_s is None
    begun = replace(planned, started_at=NOW - 500.0, jct_s=50.0, forecast_jct_s=100.0)
    assert waiting_of(row(summary=begun)) == Waiting(takes_s=50.0, shortest_s=20.0)
    assert holder_of(row(summary=begun)).ends_at == NOW - 400.0
    assert holder_of(row(summary=planned, state=ExperimentState.STARTING)).ends_at == NOW + 90.0
    assert holder_of(row(state=ExperimentState.STARTING)).ends_at is None
    rehearsal = {"resources": {"provider": "virtual"}}
    assert waiting_of(row(summary=planned, words=rehearsal)).takes_s == 0.0
    assert holder_of(row(words=rehearsal)).ends_at == NOW
    assert row(words={"constraints": {"deadline": "soon"}}).deadline_at is None


@pytest.mark.parametrize(("mean_s", "p95_s"), [(50.0, 70.0), (50.0, 50.0)])
def test_the_last_start_leaves_the_time_of_95_of_100_shortest_plans(mean_s: float, p95_s: float) -> None:
    asked = list[Experiment]()

    async def plan(one: Experiment) -> PlanAnswer:
        asked.append(one)
        found = {"prediction": {"jct_s": {"mean": mean_s, "p95": p95_s}}}
        return PlanAnswer(id="p-1", status=200, body=json.dumps(found).encode())

    assert asyncio.run(shortest_s(Experiment(**words(constraints={"deadline": "9m"})), plan)) == p95_s
    assert [(one.constraints.deadline, one.constraints.objective) for one in asked] == [(None, "min_time")]


def shown(start_at: float | None, *, deadline_at: float | None = NOW + 80.0, now: float = NOW, **others: Any) -> Any:
    turn = Turn(
        place=4, ahead=4, start_at=start_at, waiting=Waiting(takes_s=70.0, shortest_s=75.0, deadline_at=deadline_at)
    )
    return queue_view(
        place=turn.place,
        ahead=turn.ahead,
        start_at=turn.start_at,
        last_start_at=turn.waiting.last_start_at,
        deadline_at=deadline_at,
        created_at=NOW,
        now=now,
        **others,
    )


def test_the_place_and_the_deadline_are_in_plain_words() -> None:
    before = shown(NOW + 540.0, is_submitted=False)
    assert before["text"] == "4 are ahead; it starts in about 9m"
    assert (before["warning"], before["deadline"]) == ("so the deadline of 1m20s cannot be met", "11m")
    waits = shown(NOW + 540.0)
    assert waits["text"] == "4th in the queue; starts in about 9m"
    why = "its deadline 1970-01-01T00:18:00Z cannot be met then, so it is refused at its turn unless extended"
    assert waits["warning"] == why
    assert queue_line("one", waits) == f"{waits['text']}; {why}: `rubberband extend one --deadline 11m`"
    assert submitted_line("one", waits).endswith("; next time: -s constraints.deadline=11m")
    assert "can no longer be met" in shown(NOW + 540.0, now=NOW + 6.0)["warning"]
    assert shown(NOW + 5.0)["warning"] == ""
    free = shown(NOW + 540.0, deadline_at=None)
    assert (free["warning"], queue_line("one", free)) == ("", free["text"])


def test_a_start_that_is_not_known_is_said_to_be_so() -> None:
    found = shown(None)
    assert found["text"] == f"4th in the queue; {NO_PLAN_AHEAD}"
    assert (found["warning"], found["deadline"]) == ("", None)
    late = shown(None, now=NOW + 6.0)
    assert "can no longer be met" in late["warning"]
    assert queue_line("one", late).endswith("`rubberband extend one --deadline TIME`")
    assert submitted_line("one", late) == queue_line("one", late)


@given(st.floats(0.0, 1e6), st.floats(1.0, 1e6), st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_a_deadline_that_is_offered_is_later_and_can_be_met(
    start_s: float, deadline_s: float, shortest_s: float, passed_s: float
) -> None:
    now = NOW + passed_s
    found = queue_view(
        place=1,
        ahead=1,
        start_at=now + start_s,
        last_start_at=NOW + deadline_s - shortest_s,
        deadline_at=NOW + deadline_s,
        created_at=NOW,
        now=now,
    )
    assert bool(found["warning"]) is (now + start_s > NOW + deadline_s - shortest_s) is (found["deadline"] is not None)
    if found["deadline"] is not None:
        offered_s = parse_duration(found["deadline"])
        assert offered_s > deadline_s
        assert NOW + offered_s + 1e-6 >= now + start_s + shortest_s


def test_durations_and_places_are_rounded_and_counted_as_people_do() -> None:
    assert [about(one) for one in (6.0, 42.0, 95.0, 541.0, 7810.0, 2e5)] == ["5s", "40s", "2m", "9m", "2h10m", "2d8h"]
    assert [ordinal(one) for one in (1, 2, 3, 4, 11, 12, 21, 112)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "21st",
        "112th",
    ]


def test_a_service_publishes_its_queue_as_experiments_come_start_and_go(house: House) -> None:
    house.allow(max_running=1)
    house.tell(one="hold", two="hold")
    with house.open() as runs:
        runs.submit(experiment("one"))
        house.wait("one", RUNNING)
        for name in ("two", "three", "four"):
            runs.submit(experiment(name))

        def places() -> dict[str, int]:
            return {name: turn.place for name, turn in runs.line.turns(house.clock()).items()}

        eventually(lambda: places() == {"two": 1, "three": 2, "four": 3})
        runs.cancel("three")
        eventually(lambda: places() == {"two": 1, "four": 2})
        house.store.change("four", at=house.clock(), reason="it waits for money: none is left")
        runs.watcher.kick("four")
        eventually(lambda: places() == {"two": 1})
        house.go()
        house.wait("two", DONE)
        eventually(lambda: places() == {})


def test_a_queued_experiment_whose_deadline_has_passed_takes_a_later_one(house: House) -> None:
    house.allow(max_running=0)
    with house.open() as runs:
        runs.submit(experiment("late", max_cost=0.9))
        house.clock.now += 7200.0
        with pytest.raises(HttpProblem, match=r"has passed \(it is 2026-11-15T02:00:00Z\); give a later one$"):
            extension(runs, house.home, "late", max_cost_usd=1.0)
        found = extend(runs, house.home, "late", request="later", deadline="3h")
        assert (found.after.feasible, found.after.reason) == (True, "it is queued; nothing has started")
        assert (found.before.feasible, found.before.reason) == (False, "its deadline passes before it starts")
        assert house.row("late").words["constraints"]["deadline"].startswith("2026-11-15T03:00:00")


def test_other_limits_of_a_queued_experiment_are_planned_from_its_expected_start(house: House) -> None:
    house.allow(max_running=0)
    with house.open() as runs:
        runs.submit(experiment("waits", max_cost=0.9))
        eventually(lambda: runs.line.waiting)
        busy = Holder(owner="", ends_at=house.clock() + 540.0)
        runs.close()  # it publishes no other line
        runs.watcher.line = replace(runs.line, running=[busy], slots=1)
        found = extension(runs, house.home, "waits", max_cost_usd=1.0)
    assert found.after.reason == "it is queued; starts in about 9m, and times count from then"
    assert found.after.deadline_s == pytest.approx(3600.0 - 540.0, abs=1.0)


def test_previews_and_submissions_say_their_place_where_no_slot_is_free(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        ask = partial(service.client.post, json=words(constraints__deadline="10m"))
        assert "queue" not in ask("/v1/plans").json()
        now = service.clock()
        running = Summary(started_at=now, planned_jct_s=1800.0)
        service.add("busy", summary=running, words={"resources": {"provider": "local"}})
        service.runs.slots = 1
        answer = ask("/v1/plans")
        assert answer.headers["cache-control"] == "no-store"
        queue = answer.json()["queue"]
        TypeAdapter(models.QueueView).validate_python(queue, strict=True)
        assert (queue["place"], queue["ahead"], queue["deadline"]) == (1, 1, "34m")
        assert queue["start_at"] == pytest.approx(now + 1800.0)
        assert queue["last_start_at"] < now + 600.0, "the shortest plan takes some time"
        assert queue["text"] == "1 is ahead; it starts in about 30m"
        assert queue["warning"] == "so the deadline of 10m cannot be met"
        told = ask("/plan/check").json()
        assert told["queue"]["text"] == queue["text"]
        made = ask("/v1/experiments").json()
        answer = service.client.get(f"/v1/experiments/{made['name']}")
        TypeAdapter(models.ExperimentDetail).validate_json(answer.content, strict=True)
        seen = answer.json()
        assert made["queue"]["text"] == seen["queue"]["text"] == "1st in the queue; starts in about 30m"
        assert made["summary"]["shortest_jct_s"] == pytest.approx(
            made["created_at"] + 600.0 - queue["last_start_at"], abs=1
        )
        (listed,) = service.client.get("/v1/experiments?state=queued").json()["items"]
        assert listed["queue"]["place"] == 1
        assert "queue" not in service.client.get("/v1/experiments/busy").json()
        assert headline(seen) == f"{made['name']}: queued: {queue_line(made['name'], seen['queue'])}"


def test_submit_prints_the_place_in_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views = [{"name": "one", "state": "queued", "notes": []}]
    views.append({**views[0], "queue": shown(NOW + 540.0)})
    service = SimpleNamespace(url="http://rb.test", submit=lambda *_, **__: views.pop())
    monkeypatch.setattr(run, "open_client", lambda _: nullcontext(service))
    waits, starts = (CliRunner().invoke(cli.app, ["submit", "one.yaml"]) for _ in range(2))
    assert waits.stdout == starts.stdout == "one\n"
    assert "one: 4th in the queue; starts in about 9m; its deadline" in waits.stderr
    assert waits.stderr.splitlines()[1].endswith("-s constraints.deadline=11m")
    assert "queue;" not in starts.stderr


def test_a_search_that_is_sized_to_its_limits_and_one_without_a_profile_have_no_last_start(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        service.runs.slots = 0
        sized = words(search__scheduler__num_samples="auto", search__scheduler__grace_period=1)
        for body in (words(profile=None), sized):
            told = service.client.post("/plan/check", json=body).json()
            assert (told["reason"], told["queue"]["start_at"], told["queue"]["warning"]) == ("", None, "")
