"""The charts that the dashboard and the report share: what they draw adds up, and stays small for many trials."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest

from rubberband.executor import Forecast, Result
from rubberband.executor.result.rows import trial_rows
from rubberband.values.offer import SideCost
from rubberband.views.charts.allocation import allocation
from rubberband.views.charts.learning import MOST_POINTS, learning_curves
from rubberband.views.charts.parallel_coordinates import MOST_TRIALS, parallel_coordinates
from rubberband.views.charts.search import contour, contours, slices
from rubberband.views.charts.spending import shares, spend, spending, trial_costs_usd, trial_growth
from tests.builders.results import EVERY_RESULT, FAULTS, a_job, a_result, cut_short
from tests.builders.virtual_runs import run_virtual

CHARTS = {
    "allocation": allocation,
    "curves": learning_curves,
    "spend": spend,
    "parallel": parallel_coordinates,
    "slices": slices,
    "contour": contour,
    "contours": contours,
}


def drawn(figure: dict[str, Any] | None) -> dict[str, Any]:
    assert figure is not None
    return figure


@pytest.mark.parametrize("which", list(EVERY_RESULT))
@pytest.mark.parametrize("chart", list(CHARTS))
def test_any_result_is_a_figure_that_json_holds_or_none(chart: str, which: str) -> None:
    figure = CHARTS[chart](EVERY_RESULT[which]())
    json.dumps(figure, allow_nan=False)
    assert figure is None or figure["layout"]["height"] > 0


@pytest.mark.parametrize("which", list(EVERY_RESULT))
def test_the_bill_over_time_never_falls_and_ends_at_the_bill(which: str) -> None:
    result = EVERY_RESULT[which]()
    bill = spending(result)
    assert list(bill.at_s) == sorted(bill.at_s)
    assert all(before <= after + 1e-12 for before, after in itertools.pairwise(bill.amount))
    assert bill.at(math.inf) == pytest.approx(result.actual_cost_usd, abs=1e-9)


BESIDE_THE_RENT: list[dict[str, Any]] = [
    {},
    {"head_price_usd_per_hour": 0.5},
    {"data_usd_per_instance": 0.3},
    {"side_costs": (SideCost(line="a", usd_per_hour=2.0), SideCost(line="b", usd_once=0.5))},
]


@pytest.mark.parametrize("beside", BESIDE_THE_RENT, ids=lambda beside: ", ".join(beside) or "rent")
@pytest.mark.parametrize("faults", [None, FAULTS])
def test_the_bill_over_time_is_at_every_sync_what_the_stages_add_up_to(faults: Any, beside: dict[str, Any]) -> None:
    offer = dataclasses.replace(a_job().offer, **beside)
    result = a_result(a_job(offer=offer, max_cost_usd=None), faults)
    bill, at_s, spent_usd = spending(result), 0.0, 0.0
    for stage in result.stages[:-1]:
        assert stage.actual_s is not None
        assert stage.actual_cost_usd is not None
        at_s, spent_usd = at_s + stage.actual_s, spent_usd + stage.actual_cost_usd
        assert bill.at(at_s) == pytest.approx(spent_usd)


def test_functions_are_paid_for_while_trials_hold_them() -> None:
    job = a_job()
    offer = dataclasses.replace(job.offer, billing="per_function")
    result = a_result(dataclasses.replace(job, offer=offer))
    bill = spending(result)
    first_s = min(use.start_s for use in result.busy)
    assert bill.at(first_s - 1.0) == pytest.approx(0.0)
    assert bill.at(math.inf) == pytest.approx(result.actual_cost_usd)


@pytest.mark.parametrize("faults", [None, FAULTS])
def test_the_trials_shares_add_up_to_the_bill(faults: Any) -> None:
    result = a_result(a_job(), faults)
    whole = [growth.at(math.inf) for growth in trial_growth(result, result.trials).values()]
    assert sum(whole) == pytest.approx(result.actual_cost_usd)
    assert list(trial_costs_usd(result).values()) == pytest.approx(whole)
    assert [row["cost_usd"] for row in trial_rows(result)] == pytest.approx(whole), "files say the same as pages"


def test_a_trial_s_share_grows_with_every_report() -> None:
    result = a_result()
    for trial in result.trials:
        costs = shares(result, [trial])[trial.trial]
        assert len(costs) == len(trial.curve)
        assert all(0 < before < after for before, after in itertools.pairwise(costs))


def test_a_chart_of_many_reports_draws_some_and_the_last_of_each_trial() -> None:
    result = a_result()
    trials = tuple(
        dataclasses.replace(trial, curve=tuple((n * 0.01, n + 1, {"score": 0.5}) for n in range(5000)))
        for trial in result.trials
    )
    figure = drawn(learning_curves(dataclasses.replace(result, trials=trials)))
    count = sum(y is not None for trace in figure["data"] for y in trace["y"])
    assert count <= MOST_POINTS + 2 * len(trials)
    assert [x for trace in figure["data"] for x in trace["x"]].count(5000) == len(trials)


def wide(trials: int) -> Result:
    """As if the first trial had been run so often."""
    result = a_result()
    first = result.trials[0]
    made = tuple(
        dataclasses.replace(first, trial=n, configuration={"lr": 10.0 ** (-1 - n / trials), "n": n % 7})
        for n in range(trials)
    )
    uses = tuple(dataclasses.replace(use, instance=f"i-{n:03d}", gpu=0) for n in range(300) for use in result.busy[:20])
    rented = tuple(dataclasses.replace(result.instances[0], instance=f"i-{n:03d}") for n in range(300))
    return dataclasses.replace(result, trials=made, busy=uses, instances=rented)


def test_many_trials_and_instances_stay_a_chart_of_bearable_size() -> None:
    result = wide(2 * MOST_TRIALS)
    gantt, parallel = drawn(allocation(result)), drawn(parallel_coordinates(result))
    assert gantt["layout"]["height"] < 3000
    assert len(gantt["layout"]["yaxis"]["categoryarray"]) == 300, "one row for each instance"
    bars = [bar for bar in gantt["data"] if bar["name"].startswith("stage")]
    assert sum(len(bar["x"]) for bar in bars) < len(result.busy)
    assert sum(trace["x"].count(None) for trace in parallel["data"]) == MOST_TRIALS
    assert "Only the best 3,000 of" in parallel["layout"]["meta"]["note"]
    assert "note" not in drawn(parallel_coordinates(a_result()))["layout"]["meta"], "nothing is left out"


def test_a_chart_of_many_trials_draws_the_best_and_counts_all() -> None:
    result = wide(2 * MOST_TRIALS)
    losers = [dataclasses.replace(t, metrics={result.metric: -1.0}, curve=t.curve[:1]) for t in result.trials[1::2]]
    mixed = sorted([*result.trials[::2], *losers], key=lambda trial: trial.trial)
    figure = drawn(learning_curves(dataclasses.replace(result, trials=tuple(mixed))))
    shown = {label[0] for trace in figure["data"] for label in trace["customdata"] if label}
    assert shown == {trial.trial for trial in result.trials[::2]}
    assert "(1 trial)" not in (name := " ".join(trace["name"] for trace in figure["data"]))
    assert f"{2 * MOST_TRIALS - 1} trials" in name.replace(",", "")


def names(figure: dict[str, Any]) -> list[str]:
    return [trace["name"] for trace in figure["data"]]


def test_a_running_experiment_s_spend_has_a_forecast_and_one_that_is_over_has_none() -> None:
    forecast = Forecast(jct_s=2000.0, cost_usd=0.9)
    assert names(drawn(spend(a_result(), forecast))) == ["planned", "spent"]
    running = drawn(spend(cut_short(30, cancel=False), forecast))
    assert names(running) == ["planned", "forecast", "spent"]
    assert running["data"][1]["y"][-1] == 0.9


def test_max_cost_is_a_line_or_in_words_where_it_is_far_above() -> None:
    near = drawn(spend(a_result(a_job(max_cost_usd=0.05))))["layout"]
    far = drawn(spend(a_result(a_job(max_cost_usd=500.0))))["layout"]
    assert any(shape["y0"] == 0.05 for shape in near["shapes"])
    assert far["yaxis"]["range"][1] < 500
    assert any("500.00 USD is above" in note["text"] for note in far["annotations"])


def test_axes_are_drawn_as_their_domains_are() -> None:
    space = {
        "lr": {"type": "loguniform", "lower": 1e-3, "upper": 1.0},
        "n": {"type": "choice", "values": list(range(12))},
    }
    result = a_result()
    figure = drawn(parallel_coordinates(result, space))
    assert figure["layout"]["meta"]["axes"] == ["lr", "n", "score"]
    ticks = {(note["x"], note["text"]): note["y"] for note in figure["layout"]["annotations"]}
    assert ticks[0, "0.01"] == pytest.approx(1 / 3)
    assert ticks[1, "0"] < ticks[1, "11"]


def test_a_trial_without_a_parameter_is_below_the_axis_of_those_that_have_it() -> None:
    result = a_result()
    trials = [
        dataclasses.replace(
            trial,
            configuration={"optimizer": "sgd", "momentum": 0.1 * trial.trial}
            if trial.trial % 2
            else {"optimizer": "adam"},
        )
        for trial in result.trials
    ]
    sgd = {"name": "sgd", "space": {"momentum": {"type": "uniform", "lower": 0.0, "upper": 1.0}}}
    space = {"optimizer": {"type": "choice", "values": ["adam", sgd]}}
    figure = drawn(parallel_coordinates(dataclasses.replace(result, trials=tuple(trials)), space))
    assert figure["layout"]["meta"]["axes"][:2] == ["optimizer", "momentum"]
    ticks = {mark["text"]: mark["y"] for mark in figure["layout"]["annotations"] if mark["x"] == 1}
    assert ticks["-"] == 0.0 < ticks["0"] < ticks["1"] <= 1.0
    places = [y for trace in figure["data"] for x, y in zip(trace["x"], trace["y"], strict=True) if x == 1]
    assert places.count(0.0) == sum(trial.trial % 2 == 0 for trial in trials if trial.metrics)


def test_a_line_s_places_are_its_trial_s_values_and_constants_have_no_axis() -> None:
    result = a_result(a_job(), None, fixed="adam")
    figure = drawn(parallel_coordinates(result, {"lr": {"type": "uniform", "lower": 0.0, "upper": 0.1}}))
    assert "fixed" not in figure["layout"]["meta"]["axes"]
    places = {trial: y for trace in figure["data"] for trial, y, x in zip(*_columns(trace), strict=True) if x == 0}
    assert places[0] == pytest.approx(1.0)
    assert places[9] == pytest.approx(0.1)


def _columns(trace: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return trace["customdata"], trace["y"], trace["x"]


def test_the_best_trial_is_drawn_last_whichever_way_is_better() -> None:
    for mode in ("max", "min"):
        job = a_job(mode=mode)
        result = a_result(job)
        figure = drawn(parallel_coordinates(result))
        assert result.best is not None
        best = max(result.trials, key=lambda t: (1 if mode == "max" else -1) * t.metrics["score"])
        assert figure["data"][-1]["customdata"][-2] in {result.best.trial, best.trial}


def test_configurations_of_any_kind_have_a_place() -> None:
    job = a_job()
    controller, _, _ = run_virtual(job)
    assert controller.is_over
    result = a_result(job)
    odd: list[Any] = [True, False, None, "a", [1, 2], {"x": 1}, -3.0, 0, 10**9, "</script>", "", "long" * 20]
    trials = tuple(
        dataclasses.replace(trial, configuration={"odd": value})
        for trial, value in zip(result.trials, odd, strict=True)
    )
    figure = drawn(parallel_coordinates(dataclasses.replace(result, trials=trials)))
    assert "</script>" not in json.dumps(figure)
    assert all(y is None or 0 <= y <= 1 for trace in figure["data"] for y in trace["y"])


def test_quotes_of_choices_are_quotes_on_the_axis() -> None:
    result = a_result()
    trials = tuple(
        dataclasses.replace(trial, configuration={"opt": 'sgd "fast" & <b>' if trial.trial % 2 else "it's"})
        for trial in result.trials
    )
    figure = drawn(parallel_coordinates(dataclasses.replace(result, trials=trials)))
    texts = [note["text"] for note in figure["layout"]["annotations"]]
    assert "it's" in texts
    assert not [text for text in texts if "&quot;" in text or "<b" in text.removeprefix("<b>").removesuffix("</b>")]
