"""The report of adaptive batch sizes: tables, headline, charts and lines; and nothing of it where batches are fixed."""

from __future__ import annotations

import dataclasses
import io
import json
from itertools import pairwise
from typing import Any

import pytest

from rubberband.executor import Controller, Event, Faults, Journal, Result, drive
from rubberband.values.adaptive import BatchLimits, BatchPoint
from rubberband.views.charts.batches import batches_by_gpus, batches_over_time
from rubberband.views.charts.parts import MANY_POINTS
from rubberband.views.live.view import observe, open_view, summary
from rubberband.views.report import page as report_html
from rubberband.views.report.page import render_html, script_json
from rubberband.views.report.tables import batch_sizes, headlines
from rubberband.views.report.text import MOST_TRIALS
from tests.builders.adaptive_runs import MODEL, adaptive_backend, adaptive_result, an_adaptive_job
from tests.builders.results import EVERY_RESULT, a_result, render

ROWS = ["GPUs", "batch size", "efficiency (%)", "noise scale", "samples/s"]


@pytest.fixture(autouse=True)
def _small_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_html, "PLOTLY", "report.js")


def over_time(result: Result) -> dict[str, Any]:
    figure = batches_over_time(result)
    assert figure is not None
    return figure


def without_noise(result: Result) -> Result:
    """The same run before any noise scale was known, its steps too quick to be timed."""
    blank: dict[str, Any] = {"noise_scale": None, "throughput": None, "goodput": None}
    trials = tuple(
        dataclasses.replace(trial, batches=tuple(dataclasses.replace(s, **blank) for s in trial.batches))
        for trial in result.trials
    )
    return dataclasses.replace(result, trials=trials, best=trials[0])


def many(result: Result, times: int) -> Result:
    """Return the result with each stretch repeated `times` times."""
    trials = tuple(
        dataclasses.replace(trial, batches=tuple(s for s in trial.batches for _ in range(times)))
        for trial in result.trials
    )
    return dataclasses.replace(result, trials=trials)


@pytest.mark.parametrize("which", list(EVERY_RESULT))
def test_where_batches_are_fixed_the_report_says_nothing_of_them(which: str) -> None:
    result = EVERY_RESULT[which]()
    assert batches_over_time(result) is None
    assert batches_by_gpus(result) is None
    assert not batch_sizes(result, None).rows
    assert "batch" not in render(result).lower()
    assert "Batch sizes" not in render_html(result)


def test_every_trial_has_its_history_in_the_json() -> None:
    result = adaptive_result()
    trials = json.loads(json.dumps(result.to_json(), allow_nan=False))["trials"]
    first, *_, last = trials[0]["batches"]
    assert (first["batch_size"], first["gpus"], first["noise_scale"], first["efficiency"]) == (64, 1, None, 1.0)
    assert (last["gpus"], last["stage"], last["progress"]) == (2, 2, 7.0)
    assert last["batch_size"] > 64
    assert last["goodput"] == pytest.approx(last["throughput"] * last["efficiency"])
    assert last["end_s"] == pytest.approx(result.actual_jct_s)
    assert all(len(trial["batches"]) == 2 * trial["iterations"] for trial in trials)


def test_the_headline_shows_how_the_winner_s_batch_grew() -> None:
    *_, line = headlines(adaptive_result())
    assert line.startswith("batch size: 64 -> ")
    assert " on 1 -> 2 GPUs; noise scale " in line
    assert line.endswith("x the goodput")
    assert not [line for line in headlines(a_result()) if line.startswith("batch")]


def test_the_table_has_the_winner_first_and_counts_the_rest() -> None:
    table = batch_sizes(adaptive_result(), MOST_TRIALS)
    assert [row[0] for row in table.rows[:3]] == ["0", "1", "2"]
    assert len(table.rows) == MOST_TRIALS
    assert table.notes[-1] == "2 more trials not shown."
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert row["GPUs"] == "1 -> 2"
    assert row["batch size"].startswith("64 -> ")
    assert row["efficiency"].endswith(" %")
    assert float(row["goodput"].rstrip("x")) > 1.0


def test_the_table_s_efficiency_is_that_of_all_samples() -> None:
    trial = adaptive_result().trials[0]
    samples = [s.steps * s.batch_size for s in trial.batches]
    mean = sum(n * s.efficiency for n, s in zip(samples, trial.batches, strict=True)) / sum(samples)
    assert batch_sizes(adaptive_result(), None).rows[0][4] == f"{100 * mean:.0f} %"


def test_the_text_fits_eighty_columns() -> None:
    text = render(adaptive_result())
    table = text[text.index("Batch sizes, best") :].split("\n\n")[0]
    assert max(len(line) for line in table.splitlines() if line.startswith("  ")) <= 80


def test_a_gain_compares_all_training_at_the_first_batch_and_at_the_last() -> None:
    result = adaptive_result()
    model, *_ = result.trials[0].batches
    lines = [(64, 100.0, 1.0), (128, 300.0, 0.5), (128, 100.0, 0.5)]
    batches = tuple(
        dataclasses.replace(
            model, batch_size=size, steps=round(6 * speed), throughput=speed, efficiency=part, goodput=speed * part
        )
        for size, speed, part in lines
    )
    best = dataclasses.replace(result.trials[0], batches=batches)
    row = batch_sizes(dataclasses.replace(result, trials=(best,), best=best), None).rows[0]
    assert row[5:] == ("200", "2.0x", "1.0x")


def test_an_unknown_value_is_a_dash_and_not_drawn() -> None:
    result = without_noise(adaptive_result())
    assert batch_sizes(result, 1).rows[0][3] == "-"
    assert batch_sizes(result, 1).rows[0][5:] == ("-", "-", "-")
    assert headlines(result)[-1].startswith("batch size: 64 -> ")
    figure = over_time(result)
    assert all(value is None for trace in figure["data"][-4:] for value in trace["y"])
    points = batches_by_gpus(result)
    assert points is not None
    assert not [trace for trace in points["data"] if "model" in trace["name"]]
    assert script_json([figure, points])


def test_the_rows_are_above_each_other_and_share_one_legend() -> None:
    figure = over_time(adaptive_result())
    axes = [figure["layout"][f"yaxis{n}"] for n in range(1, 6)]
    assert [axis["title"]["text"] for axis in axes] == ROWS
    assert all(above["domain"][0] > below["domain"][1] for above, below in pairwise(axes))
    assert axes[-1]["domain"][0] == pytest.approx(0.0)
    shown = [trace["name"] for trace in figure["data"] if trace["showlegend"]]
    assert shown == ["stopped (11 trials)", "winner (trial 0)"]
    assert {trace["legendgroup"] for trace in figure["data"]} == {"stopped", "winner"}


@pytest.mark.parametrize("row", [1, 3])
def test_sizes_and_noise_scales_are_on_log_axes_that_hold_them(row: int) -> None:
    figure = over_time(adaptive_result())
    axis = figure["layout"][f"yaxis{row + 1}"]
    values = [v for trace in figure["data"] if trace["yaxis"] == f"y{row + 1}" for v in trace["y"] if v is not None]
    assert axis["type"] == "log"
    assert 10 ** axis["range"][0] < min(values) <= max(values) < 10 ** axis["range"][1]
    assert len(axis["tickvals"]) >= 2


def test_every_stretch_is_drawn_with_gaps_between_stages() -> None:
    result = adaptive_result()
    winner = next(t for t in over_time(result)["data"] if t["yaxis"] == "y2" and t["legendgroup"] == "winner")
    sizes = [size for size in winner["y"] if size is not None]
    assert sizes == [s.batch_size for s in result.trials[0].batches for _ in range(2)]
    assert winner["y"].count(None) == len(result.stages)
    assert [at is None for at in winner["x"]] == [size is None for size in winner["y"]]


def test_the_ends_of_stages_are_marked_over_time_and_not_over_iterations() -> None:
    figure = over_time(adaptive_result())
    dotted = [shape for shape in figure["layout"]["shapes"] if shape["line"]["dash"] == "dot"]
    assert len(dotted) == 3
    by_time, by_progress = (button["args"] for button in figure["layout"]["updatemenus"][0]["buttons"])
    assert by_time[1]["shapes"] == figure["layout"]["shapes"]
    assert by_progress[1]["shapes"] == []
    assert by_progress[1]["xaxis.range"][1] == pytest.approx(7 * 1.02)
    for xs in (by_time[0]["x"], by_progress[0]["x"]):
        assert [len(x) for x in xs] == [len(trace["y"]) for trace in figure["data"]]


def test_a_chart_of_many_stretches_draws_some_and_every_change() -> None:
    result = adaptive_result()
    stretches = sum(len(trial.batches) for trial in result.trials)
    crowded = over_time(many(result, 40 * MANY_POINTS // stretches))
    per_row = sum(len(trace["x"]) for trace in crowded["data"] if trace["yaxis"] == "y2")
    assert per_row < 2.5 * MANY_POINTS
    winner = next(t for t in crowded["data"] if t["yaxis"] == "y2" and t["legendgroup"] == "winner")
    assert set(winner["y"]) - {None} == {s.batch_size for s in result.trials[0].batches}
    assert all(trace["mode"] == "lines" for trace in crowded["data"])


def test_each_stage_is_a_series_by_gpus_and_lies_on_the_model_s_choice() -> None:
    figure = batches_by_gpus(adaptive_result())
    assert figure is not None
    series = {trace["name"]: trace for trace in figure["data"]}
    assert list(series) == [f"stage {n}, by the model" for n in (0, 1, 2)] + ["stage 0", "stage 1", "stage 2"]
    assert [round(series[f"stage {n}"]["x"][0]) for n in (0, 1, 2)] == [1, 1, 2]
    assert series["stage 0"]["x"][0] < 1 < series["stage 1"]["x"][0], "side by side"
    assert series["stage 2"]["x"] == [2]
    last, model = series["stage 2"], series["stage 2, by the model"]
    assert model["x"] == [1, 2]
    assert last["y"] == [model["y"][1]]
    spread = series["stage 0"]["error_y"]
    assert spread["array"][0] > 0
    assert spread["arrayminus"][0] > 0


def test_the_model_is_drawn_for_gpus_that_were_timed_and_not_used() -> None:
    point = BatchPoint(instances=2, gpus=4, per_gpu=64, accumulation=0, step_s=0.1)
    model = dataclasses.replace(MODEL, points=(point,))
    figure = batches_by_gpus(dataclasses.replace(adaptive_result(), goodput=model))
    assert figure is not None
    assert figure["data"][0]["x"] == [1, 2, 4]
    assert figure["layout"]["xaxis"]["tickvals"] == [1, 2, 4]


def test_without_a_model_only_points_are_drawn() -> None:
    figure = batches_by_gpus(dataclasses.replace(adaptive_result(), goodput=None))
    assert figure is not None
    assert [trace["name"] for trace in figure["data"]] == ["stage 0", "stage 1", "stage 2"]


def test_the_model_is_not_asked_for_more_gpus_than_samples() -> None:
    model = dataclasses.replace(MODEL, limits=BatchLimits(initial=1, max=1))
    figure = batches_by_gpus(dataclasses.replace(adaptive_result(), goodput=model))
    assert figure is not None
    assert [trace["x"] for trace in figure["data"][:3]] == [[1], [1], [1]]


@pytest.mark.parametrize(
    "faults", [Faults(), Faults(failures={(3, 1): "raised"}, lost_after_s={"i-002": 30.0})], ids=["smooth", "faults"]
)
def test_the_page_has_the_section_with_both_charts_and_the_table(faults: Faults) -> None:
    page = render_html(adaptive_result(faults=faults))
    assert page.count("<h2>Batch sizes</h2>") == 1
    assert 'id="batches"' in page
    assert 'id="batches-by-gpus"' in page
    assert "Batch sizes, best trial first" in page


def test_lines_and_the_view_show_the_batch() -> None:
    job, stream = an_adaptive_job(), io.StringIO()
    pictures: list[str] = []

    def look(event: Event, controller: Controller) -> None:
        progress = observe(job, controller.state)
        pictures.extend(str(line) for line in summary(progress, event.occurred_at) if str(line).startswith("batch"))

    journal = Journal("sqlite://", job.name, create=True)
    try:
        with open_view(job, lambda: 0.0, stream, is_terminal=False) as view:
            drive(Controller(job), adaptive_backend(job), journal, observers=[view, look])
    finally:
        journal.close()
    syncs = [line for line in stream.getvalue().splitlines() if "SYNC" in line]
    assert all("(trial 0, batch 64 -> " in line for line in syncs)
    assert "(trial 0, 7 iterations, batch 64 -> " in stream.getvalue().splitlines()[-1]
    assert any(" to " in picture and picture.endswith("(4 trials)") for picture in pictures)
    assert any(picture.endswith("(1 trial)") for picture in pictures)
