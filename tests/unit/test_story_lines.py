"""A log and a history say each thing once: a stage that begins, and plans that stay as they are."""

from __future__ import annotations

import dataclasses
import re

import pytest

from rubberband.executor import DecisionResult, Result
from rubberband.views.charts.allocation import gangs
from rubberband.views.live.narration import Narrator
from rubberband.views.report import tables
from rubberband.views.story import story
from tests.builders.results import a_job, a_result
from tests.builders.special_results import bracket_job, spot_job
from tests.builders.virtual_runs import run_virtual


def decided(*changed: bool) -> Result:
    """A result with a decision every ten seconds."""
    figures = {"present_jct_s": 60.0, "present_cost_usd": 1.0, "jct_s": 61.0, "cost_usd": 1.5, "plan": a_job().plan}
    made = [
        DecisionResult(stage=1 + at % 2, at_s=10.0 * at, changed=one, reason=f"look {at}", **figures)
        for at, one in enumerate(changed)
    ]
    return dataclasses.replace(a_result(), decisions=tuple(made))


def test_plans_that_stay_in_a_row_are_one_line_of_the_history() -> None:
    entries = [
        entry for entry in story(decided(False, True, True, False, False, False)) if entry.kind in ("kept", "changed")
    ]
    assert [(entry.at_s, entry.what, entry.text.partition(" (")[0]) for entry in entries] == [
        (0.0, "plan unchanged from stage 1 on", "look 0"),
        (10.0, "plan changed from stage 2 on", "look 1"),
        (20.0, "plan changed from stage 1 on", "look 2"),
        (50.0, "plan unchanged 3 times in a row", "look 5"),
    ]


def test_plans_that_stay_in_a_row_are_one_row_of_the_report() -> None:
    rows = tables.decisions(decided(True, False, False, True)).rows
    assert [row[:3] for row in rows] == [
        ("1", "0s", "changed"),
        ("2 to 1", "20s", "kept 2 times"),
        ("2", "30s", "changed"),
    ]
    assert rows[1][3:] == ("1m -> 1m1s", "1.00 -> 1.50", "look 2")


@pytest.mark.parametrize("job", [a_job(), spot_job()], ids=["on demand", "spot"])
def test_each_stage_begins_in_one_line_of_the_log(job: object) -> None:
    narrator, said = Narrator(job), list[str]()
    run_virtual(job, observers=[lambda event, controller: said.extend(narrator.lines(event, controller))])
    begun = [line for line in said if line.startswith("stage ")]
    assert [line.partition(":")[0] for line in begun] == ["stage 0", "stage 1", "stage 2"]
    assert begun[1].endswith("; 1 GPU per trial, 4 at once")
    assert "launching" in begun[0]
    waited = sum("launching" in line for line in begun)
    assert sum(line.startswith("training ") for line in said) == waited, "others train as they begin"


def test_a_stage_that_waits_for_instances_beside_others_is_named_where_it_trains() -> None:
    narrator, said = Narrator(bracket_job()), list[str]()
    run_virtual(bracket_job(), observers=[lambda event, controller: said.extend(narrator.lines(event, controller))])
    training = [line for line in said if line.startswith("training ")]
    assert training
    assert all(re.match(r"training \d+ trials? of bracket \d stage 0 on ", line) for line in training)


def test_the_chart_of_a_trials_gangs_begins_with_the_trial() -> None:
    result = a_result()
    trial = max(result.busy, key=lambda use: use.start_s).trial
    later = tuple(use for use in result.busy if use.trial != trial or use.stage == 2)
    result = dataclasses.replace(result, busy=later)
    begin_s = min(use.start_s for use in later if use.trial == trial)
    assert begin_s > 0
    figure = gangs(result, trial)
    assert figure is not None
    begin, end = figure["layout"]["xaxis"]["range"]
    unit_s = begin_s / begin
    assert min(base for bar in figure["data"] for base in bar["base"]) == begin
    assert unit_s == pytest.approx(60.0 if "minutes" in figure["layout"]["xaxis"]["title"]["text"] else 1.0)
    assert end * unit_s > result.actual_jct_s
    assert all(shape["x0"] >= begin for shape in figure["layout"]["shapes"])
    assert all(note["x"] >= begin for note in figure["layout"]["annotations"])
