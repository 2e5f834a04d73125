"""The processes that plan: asked, shared, ended and replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.plans import Plans, Preview, fingerprint
from rubberband.api.problems import MALFORMED, TOO_LONG, UNAVAILABLE, Problem
from rubberband.api.settings import Limits, Settings
from rubberband.api.store.sql import open_store
from rubberband.experiment import Experiment
from tests.unit.experiment_words import words


def served(home: Path, act: Callable[[Plans], Awaitable[None]], **settings: Any) -> None:
    """Act on the plans of a service in `home`."""

    async def run() -> None:
        store = open_store(None, home)
        plans = Plans(Settings(home=home, **settings), store)
        await plans.start()
        try:
            await act(plans)
        finally:
            await plans.close()
            store.close()

    asyncio.run(run())


def preview(**changes: Any) -> Preview:
    return Preview(body=json.dumps(words(**changes)).encode())


def of(asked: Preview) -> bytes:
    return fingerprint(asked.body)


def test_a_question_is_planned_once_and_known_after_a_restart(tmp_path: Path) -> None:
    ids, bodies = set[str](), set[bytes]()

    async def ask(plans: Plans) -> None:
        asked = preview()
        answers = await asyncio.gather(
            *(plans.answer(asked, of(asked)) for _ in range(10)),
            # The same words, spelt otherwise, while another process is at them perhaps.
            *(plans.answer(Preview(body=asked.body + b" " * at), b"%d" % at) for at in range(1, 5)),
            plans.preview(Experiment(**words())),
        )
        assert plans.recall(of(asked)) == answers[0]
        assert await plans.find(answers[0].id) == answers[0]
        assert await plans.find("unknown") is None
        ids.update(answer.id for answer in answers)
        bodies.update(answer.body for answer in answers)

    for _ in range(2):
        served(tmp_path, ask, planners=2)
    assert len(ids) == len(bodies) == 1


def test_what_is_wrong_is_told_again_without_asking(tmp_path: Path) -> None:
    async def ask(plans: Plans) -> None:
        asked = Preview(body=b"{")
        for raise_again in (lambda: plans.answer(asked, of(asked)), lambda: asyncio.to_thread(plans.recall, of(asked))):
            with pytest.raises(Problem) as caught:
                await raise_again()
            assert caught.value.kind is MALFORMED

    served(tmp_path, ask)


def test_a_plan_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def ask(plans: Plans) -> None:
        for _ in range(2):  # it is not remembered
            with pytest.raises(Problem, match="max_instances") as caught:
                await plans.answer(preview(), of(preview()))
            assert caught.value.kind is TOO_LONG

    # A process does not even start within so little.
    served(tmp_path, ask, limits=Limits(planning_s=0.001))


def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    async def ask(plans: Plans) -> None:
        await plans.answer(preview(), of(preview()))
        (pid,) = plans.pids
        os.kill(pid, signal.SIGKILL)
        other = preview(name="other")
        with pytest.raises(Problem) as caught:
            await plans.answer(other, of(other))
        assert caught.value.kind is UNAVAILABLE
        assert caught.value.headers["Retry-After"]
        assert (await plans.answer(other, of(other))).status == 200
        assert plans.pids != [pid]

    served(tmp_path, ask)


def test_the_service_ends_what_it_asked(tmp_path: Path) -> None:
    pids: list[int] = []

    async def ask(plans: Plans) -> None:
        await plans.answer(preview(), of(preview()))
        pids.extend(plans.pids)
        busy = asyncio.create_task(plans.answer(preview(name="b"), b"b"))
        await asyncio.sleep(0)
        busy.cancel()

    served(tmp_path, ask)
    (pid,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
