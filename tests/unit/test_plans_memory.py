from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from rubberband.api.plans.previews import Known, Memory, PlanAnswer, Plans
from rubberband.api.problems import INVALID, HttpProblem
from rubberband.api.store.schema import StoredPlan
from tests.builders.plan_services import served
from tests.builders.waiting import eventually


def answer(id: str, size: int = 10) -> PlanAnswer:
    return PlanAnswer(id=id, status=200, body=b"x" * size)


def test_a_request_is_recalled_by_what_it_asks() -> None:
    memory = Memory(100, 10)
    memory.keep_answer(answer("a"))
    memory.keep_request("first", Known(meaning="a"))
    memory.keep_request("second", Known(meaning="a"))
    assert memory.recall("first", 0.0) == memory.recall("second", 0.0) == memory.answer("a") == answer("a")
    assert memory.recall("third", 0.0) is None


def test_errors_are_recalled_too() -> None:
    memory, problem = Memory(100, 10), HttpProblem(INVALID, "name: is required; add it")
    memory.keep_request("first", Known(meaning=problem))
    assert memory.recall("first", 0.0) is problem


def test_an_expired_answer_is_asked_for_again() -> None:
    memory = Memory(100, 10)
    memory.keep_answer(answer("a"))
    memory.keep_request("first", Known(meaning="a", until=11.0))
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
        memory.keep_request(request, Known(meaning="a"))
    assert [memory.recall(request, 0.0) is None for request in ("first", "second", "third")] == [True, False, False]


def test_an_answer_is_stored_however_many_others_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(plans: Plans) -> None:
        async def others() -> None:
            for number in itertools.count():
                plans._keep(stored(f"other-{number}"))
                await asyncio.sleep(0.001)  # in small numbers, so that the first one is kept

        keep_plans = plans._store.keep_plans

        def slowly(answers: Sequence[StoredPlan]) -> None:  # others are answered meanwhile
            newest = next(reversed(plans._kept))
            eventually(lambda: busy.done() or next(reversed(plans._kept)) != newest, "another answer")
            keep_plans(answers)

        monkeypatch.setattr(plans._store, "keep_plans", slowly)
        plans._keep(stored("first"))
        busy = asyncio.create_task(others())
        try:
            async with asyncio.timeout(30.0):
                await plans.keep()
        finally:
            busy.cancel()
        assert "first" in plans._store.plan_ids()

    served(tmp_path, act)


def stored(id: str) -> StoredPlan:
    return StoredPlan(id=id, created_at=1.0, words={}, options={}, status=200, body=b"{}")
