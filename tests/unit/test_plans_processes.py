"""Plans of the service: remembered, planned in processes that are shared, ended and replaced, and asked in turns."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.body import read_experiment
from rubberband.api.plans import pool
from rubberband.api.plans.pool import Turns
from rubberband.api.plans.previews import KnownRequest, Memory, PlanAnswer, Plans, Preview, PreviewOptions
from rubberband.api.problems import INVALID, MALFORMED, MEDIA, NOT_FOUND, TOO_LONG, UNAVAILABLE, HttpProblem, Kind
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.api.store import open_store
from rubberband.api.store.schema import StoredPlan
from rubberband.planning.startup_history import StartRecord, record
from rubberband.spec.experiment import Experiment
from tests.builders.experiment_words import words
from tests.builders.plan_services import of, preview, served
from tests.builders.waiting import eventually


@pytest.mark.long
def test_a_question_is_planned_once(tmp_path: Path) -> None:
    async def ask(plans: Plans) -> None:
        asked = preview()
        answers = await asyncio.gather(
            *(plans.answer(asked, of(asked)) for _ in range(10)),
            # The same words, spelt otherwise, while another process is at them perhaps.
            *(plans.answer(Preview(body=asked.body + b" " * at), b"%d" % at) for at in range(1, 5)),
            plans.preview(Experiment(**words())),
        )
        assert len({answer.body for answer in answers}) == 1
        assert len({answer.id for answer in answers}) == 1
        assert plans.recall(of(asked)) == answers[0]
        assert await plans.find(answers[0].id) == answers[0]
        assert await plans.find("unknown") is None
        assert await plans.option("unknown", "asha") is None
        first, second = await asyncio.gather(*(plans.option(answers[0].id, "asha") for _ in range(2)))
        assert first is second is await plans.option(answers[0].id, "asha")

    served(tmp_path, ask, planners=2)


def test_a_row_beside_a_plan_is_refused_once_start_times_are_others(tmp_path: Path) -> None:
    start = StartRecord(entrypoint="code:train", instances=1, provision_s=100.0, init_s=50.0)

    async def ask(plans: Plans) -> None:
        asked = preview(entrypoint="code:train", resources__provision_delay=None, resources__init_delay=None)
        answer = await plans.answer(asked, of(asked))
        record(tmp_path, [start], at=1.0)
        with pytest.raises(HttpProblem, match="with other prices or start times than today's") as caught:
            await plans.option(answer.id, "asha")
        assert caught.value.kind is NOT_FOUND

    served(tmp_path, ask)


@pytest.mark.long
def test_answers_survive_a_restart_and_no_process_stays(tmp_path: Path) -> None:
    bodies: list[bytes] = []
    pids: list[int] = []

    async def ask(plans: Plans) -> None:
        bodies.append((await plans.answer(preview(), of(preview()))).body)
        await ask_what_is_wrong(plans)
        pids.extend(plans.pids)
        left = asyncio.create_task(plans.answer(preview(name="other"), b"other"))
        await asyncio.sleep(0)
        left.cancel()

    async def ask_what_is_wrong(plans: Plans) -> None:
        asked = Preview(body=b"{}")
        for _ in range(2):
            with pytest.raises(HttpProblem) as caught:
                await plans.answer(asked, of(asked))
            assert caught.value.kind is INVALID
        with pytest.raises(HttpProblem):
            plans.recall(of(asked))

    for _ in range(2):
        served(tmp_path, ask)
    assert bodies[0] == bodies[1]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (Preview(body=b'{"name": NaN}'), MALFORMED),
        (Preview(body=b'{"name": "a", "name": "a"}'), MALFORMED),
        (Preview(body=b"["), MALFORMED),
        (Preview(body=b"[]"), INVALID),
        (Preview(body=b"{}", media_type="image/png"), MEDIA),
    ],
)
def test_an_obvious_error_needs_no_process(tmp_path: Path, asked: Preview, kind: Kind) -> None:
    with pytest.raises(HttpProblem) as by_a_planner:
        read_experiment(asked.body, asked.media_type)

    async def ask(plans: Plans) -> None:
        with pytest.raises(HttpProblem) as caught:
            await plans.answer(asked, of(asked))
        assert (caught.value.kind, caught.value.detail) == (kind, by_a_planner.value.detail)
        assert plans.pids == []

    served(tmp_path, ask)


@pytest.mark.long
def test_a_plan_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def ask(plans: Plans) -> None:
        for _ in range(2):  # it is not remembered
            with pytest.raises(HttpProblem, match="max_instances") as caught:
                await plans.answer(preview(), of(preview()))
            assert caught.value.kind is TOO_LONG

    # A process does not even start within so little.
    served(tmp_path, ask, limits=ServiceLimits(planning_s=0.001))


@pytest.mark.long
def test_a_question_withdrawn_before_its_start_is_not_planned(tmp_path: Path) -> None:
    async def ask(plans: Plans) -> None:
        first, second = preview(name="first"), preview(name="second")
        begun = asyncio.create_task(plans.answer(first, of(first)))
        waits = asyncio.create_task(plans.answer(second, of(second)))
        await asyncio.sleep(0)
        waits.cancel()
        assert (await begun).status == 200
        assert plans.recall(of(second)) is None
        assert len(plans.pids) == 1
        again = await asyncio.gather(plans.answer(second, of(second)), waits, return_exceptions=True)
        assert not isinstance(again[0], BaseException)

    served(tmp_path, ask)


def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    async def ask(plans: Plans) -> None:
        await plans.answer(preview(), of(preview()))
        (pid,) = plans.pids
        os.kill(pid, signal.SIGKILL)
        other = preview(name="other")
        with pytest.raises(HttpProblem) as caught:
            await plans.answer(other, of(other))
        assert caught.value.kind is UNAVAILABLE
        assert caught.value.headers["Retry-After"]
        assert (await plans.answer(other, of(other))).status == 200
        assert plans.pids != [pid]

    served(tmp_path, ask)


@pytest.mark.long
def test_a_process_that_was_started_ahead_answers_the_first_question(tmp_path: Path) -> None:
    async def ask(plans: Plans) -> None:
        for _ in range(3):
            plans.warm_up()
        while not plans.pids:
            await asyncio.sleep(0.01)
        begun = plans.pids
        assert (await plans.answer(preview(), of(preview()))).status == 200
        plans.warm_up()
        assert plans.pids == begun
        assert len(begun) == 1

    served(tmp_path, ask)


@pytest.mark.long
def test_where_no_process_can_be_started_for_a_while_plans_are_made_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = preview()

    async def ask(plans: Plans) -> None:
        with monkeypatch.context() as full:
            full.setattr(asyncio, "create_subprocess_exec", refused)
            plans.warm_up()
            for _ in range(5):  # more often than there are planners
                with pytest.raises(HttpProblem) as caught:
                    await plans.answer(asked, of(asked))
                assert caught.value.kind is UNAVAILABLE
        answer = await plans.answer(asked, of(asked))
        assert answer.status == 200

    async def refused(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    served(tmp_path, ask)


@pytest.mark.long
def test_a_process_that_never_says_that_it_is_ready_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, begun = preview(), asyncio.create_subprocess_exec

    async def ask(plans: Plans) -> None:
        with monkeypatch.context() as stuck:
            stuck.setattr(pool, "_START_S", 0.1)
            stuck.setattr(asyncio, "create_subprocess_exec", silent)
            with pytest.raises(HttpProblem) as caught:
                await plans.answer(asked, of(asked))
        assert caught.value.kind is UNAVAILABLE
        answer = await plans.answer(asked, of(asked))
        assert answer.status == 200

    async def silent(*_: str, **options: Any) -> asyncio.subprocess.Process:
        return await begun("sleep", "600", **options)

    served(tmp_path, ask)


def hard(name: str) -> Preview:
    """Twenty stages of hundreds of trials whose iterations vary: minutes of work."""
    stages = [{"trials": 600 - 30 * stage, "iterations": 3 + stage} for stage in range(20)]
    asked = preview(
        name=name,
        search__scheduler={"type": "stages", "stages": stages},
        resources__max_instances=500,
        constraints__deadline="10h",
        profile__iteration_cv=0.3,
    )
    return Preview(body=asked.body, options=PreviewOptions(frontier=True))


def asking(plans: Plans, question: Preview, caller: str) -> asyncio.Task[PlanAnswer]:
    return asyncio.create_task(plans.answer(question, of(question), caller))


async def leave(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.long
def test_hard_questions_of_one_caller_do_not_delay_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one planner, and more hard questions than are planned at once; even if all come from one address."""
    monkeypatch.setattr(pool, "EASY_S", 1.0)  # an easy one takes less on any machine
    monkeypatch.setattr(pool, "OWN_S", 1.1)

    async def ask(plans: Plans) -> None:
        asked = [asking(plans, hard(f"hard-{number}"), "one") for number in range(2)]
        for caller in ("other", "one"):
            assert (await asking(plans, preview(name=f"easy-{caller}"), caller)).status == 200
        assert not any(task.done() for task in asked)
        assert len(plans.pids) <= 3
        await leave(*asked)

    served(tmp_path, ask, limits=ServiceLimits(planning_s=600.0))


def taken(turns: Turns[str], busy: tuple[str, ...] = ()) -> list[str]:
    return [turns.take(busy) for _ in range(len(turns))]


def waiting(*items: str) -> Turns[str]:
    """Of `a1` the caller is `a`."""
    turns: Turns[str] = Turns()
    for item in items:
        turns.put(item[0], item)
    return turns


def test_callers_take_turns() -> None:
    assert taken(waiting("a1", "a2", "a3", "b1", "c1", "b2")) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_caller_with_a_running_question_comes_after_the_others() -> None:
    assert taken(waiting("a1", "a2", "b1", "b2"), busy=("a",)) == ["b1", "b2", "a1", "a2"]


def test_a_caller_that_leaves_is_removed_from_the_queue() -> None:
    turns = waiting("a1", "a2", "b1")
    for item in ("a1", "a1", "b1", "c1"):
        turns.drop(item[0], item)
    assert turns.has_others("b")
    assert (len(turns), taken(turns)) == (1, ["a2"])
    assert not turns.has_others("a")
    with pytest.raises(LookupError):
        turns.take()


def test_without_room_the_caller_with_most_questions_waits_for_less() -> None:
    turns = waiting("a1", "a2", "a3", "b1")
    assert turns.displace("c") == "a3"
    assert turns.displace("a") is None
    assert turns.displace("b") is None
    assert taken(turns) == ["a1", "b1", "a2"]


def answer(id: str, size: int = 10) -> PlanAnswer:
    return PlanAnswer(id=id, status=200, body=b"x" * size)


def test_a_request_is_recalled_by_what_it_asks() -> None:
    memory = Memory(100, 10)
    memory.keep_answer(answer("a"))
    memory.keep_request("first", KnownRequest(meaning="a"))
    memory.keep_request("second", KnownRequest(meaning="a"))
    assert memory.recall("first", 0.0) == memory.recall("second", 0.0) == memory.answer("a") == answer("a")
    assert memory.recall("third", 0.0) is None
    problem = HttpProblem(INVALID, "name: is required; add it")
    memory.keep_request("wrong", KnownRequest(meaning=problem))
    assert memory.recall("wrong", 0.0) is problem


def test_an_expired_answer_is_asked_for_again() -> None:
    memory = Memory(100, 10)
    memory.keep_answer(answer("a"))
    memory.keep_request("first", KnownRequest(meaning="a", until=11.0))
    assert memory.recall("first", 10.5) == answer("a")
    assert memory.recall("first", 11.0) is None
    assert memory.answer("a") == answer("a")


def test_the_answers_that_were_not_asked_for_longest_are_forgotten_first() -> None:
    memory = Memory(30, 10)
    for id in "abc":
        memory.keep_answer(answer(id))
    memory.answer("a")
    memory.keep_answer(answer("d", 20))
    assert [id for id in "abcd" if memory.answer(id)] == ["a", "d"]
    memory.keep_answer(answer("a", 15))
    assert [id for id in "abcd" if memory.answer(id)] == ["a"]
    memory.keep_answer(answer("e", 31))
    assert [id for id in "abcde" if memory.answer(id)] == ["a"]


def test_requests_are_forgotten_without_their_answers() -> None:
    memory = Memory(100, 2)
    memory.keep_answer(answer("a"))
    for request in ("first", "second", "third"):
        memory.keep_request(request, KnownRequest(meaning="a"))
    assert [memory.recall(request, 0.0) is None for request in ("first", "second", "third")] == [True, False, False]


class Keeping(Plans):
    """Plans that are told what was planned."""

    def add(self, id: str) -> None:
        self._keep(StoredPlan(id=id, created_at=1.0, words={}, options={}, status=200, body=b"{}"))


def test_an_answer_is_stored_however_many_others_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(None, tmp_path)
    plans, keep_plans, added = Keeping(Settings(home=tmp_path), store), store.keep_plans, list[int]()

    def slowly(answers: Sequence[StoredPlan]) -> None:
        before = len(added)
        eventually(lambda: busy.done() or len(added) > before, "another answer meanwhile")
        keep_plans(answers)

    async def others() -> None:
        for number in itertools.count():
            plans.add(f"other-{number}")
            added.append(number)
            await asyncio.sleep(0.001)  # in small numbers, so that the first one is kept

    async def keep() -> None:
        nonlocal busy
        plans.add("first")
        busy = asyncio.create_task(others())
        try:
            async with asyncio.timeout(30.0):
                await plans.keep()
        finally:
            busy.cancel()

    busy: asyncio.Task[None]
    monkeypatch.setattr(store, "keep_plans", slowly)
    asyncio.run(keep())
    assert "first" in store.plan_ids()
    store.close()
