"""A run of several brackets as it is shown: in lines, live, in the report, on the page and by REST."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.api.dashboard.sentences import stage_rows
from rubberband.executor import Controller, Event, Job, Result, summarise
from rubberband.views.charts.allocation import allocation
from rubberband.views.formatting import ranked
from rubberband.views.report.page import render_html
from rubberband.views.report.tables import stages
from rubberband.views.story import planned_spans, story
from tests.builders.brackets import divided
from tests.builders.virtual_runs import run_virtual
from tests.builders.watching import narration, pictures


def job() -> Job:
    found = divided([2, 1, 1], [1])
    offer = dataclasses.replace(found.offer, provision_delay_s=0.0, head_price_usd_per_hour=0.36)
    cost_usd = found.prediction.cost_usd + offer.head_cost_usd(30.0)
    prediction = dataclasses.replace(found.prediction, jct_s=40.0, cost_usd=cost_usd)
    return dataclasses.replace(found, offer=offer, prediction=prediction)


def setup_of(job: Job) -> dict[str, object]:
    return {"configurations": [{"x": trial} for trial in range(job.num_trials)]}


@pytest.fixture(scope="module")
def result() -> Result:
    controller, _, _ = run_virtual(job())
    return summarise(controller.state, setup_of(controller.job), controller.state.now)


def test_lines_name_the_bracket_and_its_stage() -> None:
    lines = [line.partition("  ")[2] for line in narration(job()).splitlines()]
    assert lines[0].startswith("test: 8 trials in 4 stages of 3 brackets, planned ")
    assert "bracket 0 stage 0: 4 trials x 1 iteration; launching 2: 0 -> 2 instances" in lines
    assert "bracket 1 stage 0: 2 trials x 3 iterations; launching 1: 0 -> 1 instance" in lines
    begun = [line for line in lines if "training" in line]
    assert [line.partition(":")[0] for line in begun] == [
        "bracket 0 stage 0",
        "bracket 1 stage 0",
        "bracket 0 stage 1",
        "bracket 2 stage 0",
    ]
    synced = [line.partition(":")[0] for line in lines if line.startswith("SYNC")]
    assert sorted(synced) == sorted(f"SYNC {line.partition(':')[0]}" for line in begun)


def test_the_table_that_moves_has_a_row_for_every_stage_and_the_iterations_of_its_own_trials() -> None:
    _, last = pictures(job())[-1]
    assert [stage.name for stage in last.stages] == ["0.0", "0.1", "2.0", "1.0"]
    assert [stage.iterations_done for stage in last.stages] == [4, 2, 2, 6]
    assert all(stage.iterations_done == stage.iterations for stage in last.stages)


def test_the_stages_and_the_head_node_add_up_to_the_bill(result: Result) -> None:
    costs_usd = sum(stage.actual_cost_usd or 0.0 for stage in result.stages)
    assert costs_usd + result.head_cost_usd == pytest.approx(result.actual_cost_usd)
    table = stages(result)
    assert [row[0] for row in table.rows] == ["0.0", "0.1", "2.0", "1.0", "head"]
    assert table.total is not None
    assert table.total[6] == "40s"


def test_a_stage_has_its_own_figures_also_while_others_have_not_begun() -> None:
    part: list[Result] = []

    def look(event: Event, controller: Controller) -> None:
        part.append(summarise(controller.state, setup_of(controller.job), event.occurred_at))

    run_virtual(job(), observers=[look])
    halfway = next(each for each in part if each.stages[0].promoted and each.stages[3].actual_s)
    assert [stage.actual_s is not None for stage in halfway.stages] == [True, True, False, True]
    rows = stages(halfway).rows
    assert [row[6] for row in rows][2] == ""
    assert rows[3][6] != ""


def test_brackets_of_a_lane_are_planned_one_after_another_and_lanes_side_by_side(result: Result) -> None:
    spans = {stage.name: (start_s, end_s) for stage, start_s, end_s in planned_spans(result.stages)}
    assert (spans["0.0"][0], spans["1.0"][0]) == (0.0, 0.0)
    assert spans["2.0"][0] == spans["0.1"][1]
    chart = allocation(result)
    assert chart is not None
    ghosts = [shape for shape in chart["layout"]["shapes"] if shape["type"] == "rect"]
    assert max(shape["y1"] for shape in ghosts) == 3 * 2 - 0.5


def test_trials_that_were_trained_to_the_end_come_first(result: Result) -> None:
    assert [trial.bracket for trial in result.trials] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert {trial.status for trial in ranked(result)[:5]} == {"completed"}


def test_the_page_and_the_report_name_them(result: Result) -> None:
    assert [(row.stage, row.iterations, row.status) for row in stage_rows(result)] == [
        ("0.0", "4 of 4", "done"),
        ("0.1", "2 of 2", "done"),
        ("2.0", "2 of 2", "done"),
        ("1.0", "6 of 6", "done"),
    ]
    answer = {entry.what: entry.text for entry in story(result)}
    assert answer["SYNC of bracket 0 stage 0"].startswith("1 of 4 trials promoted")
    assert answer["SYNC of bracket 1 stage 0"].startswith("2 of 2 trials finished")
    assert "2.0" in render_html(result)
