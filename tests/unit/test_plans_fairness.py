"""Questions that take long stand in nobody's way, and callers take turns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.plans import pool
from rubberband.api.plans.pool import Turns
from rubberband.api.plans.previews import PlanAnswer, Plans, Preview, PreviewOptions
from rubberband.api.settings import ServiceLimits
from tests.builders.plan_services import of, preview, served


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
