"""The processes that plan: asked, shared, ended and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.body import read_experiment
from rubberband.api.plans import pool
from rubberband.api.plans.previews import Plans, Preview
from rubberband.api.problems import INVALID, MALFORMED, MEDIA, TOO_LONG, UNAVAILABLE, HttpProblem, Kind
from rubberband.api.settings import ServiceLimits
from rubberband.spec.experiment import Experiment
from tests.builders.experiment_words import words
from tests.builders.plan_services import of, preview, served


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

    served(tmp_path, ask, planners=2)


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
def test_where_no_process_can_be_started_for_a_while_plans_are_made_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = preview()

    async def ask(plans: Plans) -> None:
        with monkeypatch.context() as full:
            full.setattr(asyncio, "create_subprocess_exec", refused)
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
