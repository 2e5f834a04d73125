"""The report of unequal workers: table, headline and lines; and nothing of it where workers are equal."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest

from rubberband.executor import Faults, Result, VirtualBackend, summarise
from rubberband.executor.result.batch_history import BalanceStretch
from rubberband.values.balance import BalanceUse
from rubberband.values.plan import Plan, StagePlan
from rubberband.views.formatting import slow_workers, worker_values
from rubberband.views.live.view import observe, open_view, summary
from rubberband.views.report import page
from rubberband.views.report.page import render_html
from rubberband.views.report.tables import headlines, workers
from rubberband.views.story import story
from tests.builders.results import EVERY_RESULT, a_job, a_result, configurations, render
from tests.builders.virtual_runs import run_virtual

JOB = a_job(
    plan=Plan(stages=tuple(StagePlan(instances=n, gpus_per_trial=g) for n, g in ((2, 1), (2, 2), (2, 4)))),
    profile=dataclasses.replace(a_job().profile, seconds_per_iteration={1: 10.0, 2: 6.0, 4: 4.0}),
)
SLOW = Faults(slow={"i-002": 3.0})
"""The last stage's only trial is on both instances, one of which is slow."""


@pytest.fixture(autouse=True)
def _small_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PLOTLY", "report.js")


def use(**changes: Any) -> BalanceUse:
    fields: dict[str, Any] = {
        "shares": (48, 0),
        "compute_s": (0.5, 0.7),
        "step_s": 0.5,
        "equal_step_s": 1.0,
        "steps": 30,
    }
    return BalanceUse(**fields | changes)


def unequal_result() -> Result:
    return a_result(JOB, SLOW)


@pytest.mark.parametrize("which", list(EVERY_RESULT))
def test_where_workers_are_equal_the_report_does_not_mention_them(which: str) -> None:
    result = EVERY_RESULT[which]()
    assert not workers(result, None).rows
    assert all(not trial.balance for trial in result.trials)
    assert "unequal" not in render(result).lower()
    assert "unequal" not in render_html(result).lower()


def test_shares_follow_the_speeds_and_the_saving_is_said_to_be_a_model() -> None:
    row, *_ = workers(unequal_result(), None).rows
    assert row[:3] == ("0", "2", "96 / 96 / 32 / 32")
    assert row[4:] == ("0.12s", "0.24s", "50 %")
    assert "unequal workers in 1 trial: balancing saved 50 % of their steps' time, 24s" in render(unequal_result())
    assert "by a model from measured times" in render(unequal_result())
    assert "96 / 96 / 32 / 32" in render_html(unequal_result())


def test_a_balanced_gang_is_as_fast_as_its_workers_together() -> None:
    slow, even = unequal_result(), a_result(JOB)
    longer_s = (slow.stages[2].actual_s or 0.0) - (even.stages[2].actual_s or 0.0)
    assert longer_s == pytest.approx(4 * 4.0 * (4 / (2 + 2 / 3) - 1.0))


def test_the_json_has_the_shares_and_the_slots_of_the_workers() -> None:
    plain = json.loads(json.dumps(unequal_result().to_json(), allow_nan=False))
    last = plain["trials"][0]["balance"][-1]
    assert (last["shares"], last["stage"], last["iterations"]) == ([96, 96, 32, 32], 2, 7)
    assert [worker["instance"] for worker in last["workers"]] == ["i-001", "i-001", "i-002", "i-002"]
    assert Result.from_json(plain) == unequal_result()
    for trial in plain["trials"]:
        del trial["balance"]
    assert not workers(Result.from_json(plain), None).rows


def test_the_table_counts_the_trials_beyond_its_limit() -> None:
    result = unequal_result()
    stretch = result.trials[0].balance[-1]
    trials = tuple(dataclasses.replace(trial, balance=(stretch,)) for trial in result.trials)
    table = workers(dataclasses.replace(result, trials=trials), 2)
    assert (len(table.rows), table.notes[-1]) == (2, f"{len(trials) - 2} more trials not shown.")


def test_slow_workers_are_named() -> None:
    gang = unequal_result().trials[0].balance[-1].workers
    assert slow_workers(use(shares=(48, 0, 48, 0)), gang) == [
        "i-001 GPU 1, i-002 GPU 1 get no samples, which makes the step shorter"
    ]
    assert slow_workers(use(stragglers=(0,)), gang)[1] == "the step would be shorter without i-001 GPU 0"
    assert slow_workers(use(), ()) == ["worker 1 gets no samples, which makes the step shorter"]
    assert slow_workers(use(shares=(2, 1)), gang) == []


def test_a_worker_without_samples_is_named_in_the_notes_of_the_table() -> None:
    result = unequal_result()
    idle: BalanceStretch = dataclasses.replace(result.trials[0].balance[-1], shares=(128, 128, 0, 0))
    trial = dataclasses.replace(result.trials[0], balance=(idle,))
    notes = workers(dataclasses.replace(result, trials=(trial,)), None).notes
    assert notes[1] == "Trial 0: i-002 GPU 0, i-002 GPU 1 get no samples, which makes the step shorter."


@pytest.mark.parametrize(
    ("values", "text"),
    [((1024, 8), "1,024 / 8"), ((0.0312, 0.5), "0.0312 / 0.5"), (tuple(range(1, 65)), "1 to 64")],
)
def test_shares_and_times_are_short(values: tuple[float, ...], text: str) -> None:
    assert worker_values(values) == text


def test_a_loss_of_time_is_not_called_a_saving() -> None:
    assert use(step_s=1.1).saved == pytest.approx(-0.1)
    assert not [line for line in headlines(a_result()) if "balancing" in line]


def test_the_live_view_says_the_shares_once_and_keeps_them_in_its_summary() -> None:
    stream, lines = io.StringIO(), list[str]()
    backend = VirtualBackend(JOB.name, JOB.offer, JOB.profile, metric=JOB.metric, faults=SLOW)
    with open_view(JOB, backend.now, stream, False) as view:

        def watch(event: Any, controller: Any) -> None:
            view(event, controller)
            lines.extend(line.plain for line in summary(observe(JOB, controller.state), controller.state.now))

        controller, _, _ = run_virtual(JOB, backend=backend, observers=[watch])
    found = [line for line in stream.getvalue().splitlines() if "unequal" in line]
    saves = "96 / 96 / 32 / 32 samples per step; balancing saves 50 % against equal shares (model from measured times)"
    assert len(found) == 1
    assert found[0].endswith(f"trial 0: unequal workers: {saves}")
    assert f"workers   trial 0: {saves}" in lines
    assert summarise(controller.state, configurations(JOB), backend.now()).trials[0].balance


def test_a_straggler_is_named_when_it_is_known_and_its_replacement_is_explained() -> None:
    stream, job = io.StringIO(), dataclasses.replace(JOB, objective="min_time")
    job = dataclasses.replace(job, stages=(*JOB.stages[:2], dataclasses.replace(JOB.stages[2], iterations=60)))
    slow = Faults(slow={"i-002": 9.0}, slow_from=150.0)
    with open_view(job, lambda: 0.0, stream, False) as view:
        run_virtual(job, slow, observers=[view])
    assert "; the step would be shorter without i-002 GPU 0, i-002 GPU 1" in stream.getvalue()
    text = "i-002 holds up trial 0 and is replaced once another one is ready; this is expected to save "
    assert text in stream.getvalue()
    result = a_result(job, slow)
    assert text in render(result)
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert [entry.kind for entry in story(result)].count("replaced") == 1


def test_the_replacement_of_an_instance_on_which_a_trial_hung_is_explained() -> None:
    stream, job = io.StringIO(), dataclasses.replace(JOB, hung_replacements=1)
    with open_view(job, lambda: 0.0, stream, False) as view:
        run_virtual(job, Faults(slow={"i-002": 500.0}), observers=[view])
    text = "i-002 is replaced once another one is ready: trial 2 hung, and no other trial there has reported since"
    assert text in stream.getvalue()


def test_workers_that_are_equal_for_a_while_make_no_further_line() -> None:
    stream, last = io.StringIO(), JOB.stages[2]
    job = dataclasses.replace(JOB, stages=(*JOB.stages[:2], dataclasses.replace(last, iterations=20)))

    class Fitful(Faults):
        def pace(self, instance: str, at: float) -> float:
            return 3.0 if instance == "i-002" and at // 20.0 % 2 else 1.0

    with open_view(job, lambda: 0.0, stream, False) as view:
        run_virtual(job, Fitful(), observers=[view])
    assert stream.getvalue().count("unequal workers") == 1
