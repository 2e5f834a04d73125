"""Charts of pages and reports: what they draw adds up, stays small for many trials, and compares what is alike."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rubberband.executor import Forecast, Result, trial_rows
from rubberband.values.offer import SideCost
from rubberband.views.charts.allocation import allocation
from rubberband.views.charts.learning import MOST_POINTS, learning_curves
from rubberband.views.charts.parallel_coordinates import MOST_TRIALS, parallel_coordinates
from rubberband.views.charts.search import (
    FEWEST,
    MOST,
    ComparedTrials,
    comparable,
    contour,
    contour_names,
    contours,
    importance,
    importances,
    question_of,
    slices,
)
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


Configuration = dict[str, Any]
SPACE = {
    "lr": {"type": "loguniform", "lower": 1e-3, "upper": 1.0},
    "hidden": {"type": "choice", "values": [32, 64, 128]},
    "optimizer": {
        "type": "choice",
        "values": [
            {"name": "sgd", "space": {"momentum": {"type": "uniform", "lower": 0.0, "upper": 1.0}}},
            {"name": "adam", "space": {}},
        ],
    },
}


def pick(trial: int) -> Configuration:
    chance = random.Random(trial)
    made: Configuration = {"lr": 10.0 ** chance.uniform(-3, 0), "hidden": chance.choice([32, 64, 128])}
    made["optimizer"] = chance.choice(["sgd", "adam"])
    if made["optimizer"] == "sgd":
        made["momentum"] = chance.random()
    return made


def with_trials(
    configurations: Sequence[Configuration],
    value: Callable[[Configuration], float] = lambda values: -abs(math.log10(values["lr"]) + 2.0),
    iterations: Callable[[int], int] = lambda trial: 1,
) -> Result:
    """A result whose trials have these configurations, and a metric that grows with their iterations."""
    result = a_result()
    trials = []
    for number, values in enumerate(configurations):
        curve = tuple(
            (float(done), done, {result.metric: value(values) + done}) for done in range(1, iterations(number) + 1)
        )
        made = {"trial": number, "configuration": values, "iterations": len(curve), "curve": curve}
        trials.append(dataclasses.replace(result.trials[0], **made, metrics=curve[-1][2] if curve else {}))
    return dataclasses.replace(result, trials=tuple(trials), best=trials[0])


def checked(found: dict[str, Any] | None) -> dict[str, Any]:
    assert found is not None
    json.dumps(found, allow_nan=False)
    return found


def test_trials_are_compared_after_equal_iterations() -> None:
    # The stages of the job end after 1, 3 and 7 iterations.
    result = with_trials([pick(n) for n in range(60)], iterations=lambda n: 7 if n < 5 else 4 if n < 25 else 1)
    compared = comparable(result)
    assert compared is not None
    assert (compared.iterations, len(compared.trials)) == (3, 25), "few reached the last end"
    assert compared.sentence(result) == "Compared: 25 of 60 trials, at their metric after 3 iterations."
    for trial, value in zip(compared.trials, compared.values, strict=True):
        assert value == trial.curve[2][2][result.metric]
    few = comparable(with_trials([pick(n) for n in range(9)], iterations=lambda n: 7 if n < 3 else 1))
    assert few is not None
    assert (few.iterations, len(few.trials)) == (1, 9), "the most, where none has enough"
    alike = comparable(with_trials([pick(n) for n in range(9)], iterations=lambda n: 3))
    assert alike is not None
    assert alike.iterations == 3, "after the most iterations that all of them have"


def test_without_two_metrics_nothing_is_compared() -> None:
    nothing = with_trials([pick(0), pick(1)], lambda values: math.nan)
    assert comparable(nothing) is None
    for result in (nothing, with_trials([pick(0)]), with_trials([pick(0)] * 9), with_trials([{}, {}], lambda _: 1.0)):
        assert slices(result) is None
        assert contour(result) is None
        assert contours(result) is None


def test_a_slice_has_each_trial_once_by_its_iterations_and_the_best_as_a_star() -> None:
    result = with_trials([pick(n) for n in range(40)], iterations=lambda n: 7 if n < 5 else 3)
    made = checked(slices(result, SPACE))
    panels = [trace for trace in made["data"] if trace["xaxis"] == "x"]
    assert [trace["name"] for trace in panels] == ["3 iterations", "7 iterations", "best"]
    assert sorted(point[0] for trace in panels[:2] for point in trace["customdata"]) == list(range(40))
    titles = [made["layout"][f"xaxis{n or ''}"]["title"]["text"] for n in ("", 2, 3, 4)]
    assert sorted(titles) == ["hidden", "lr", "momentum", "optimizer"]


def test_a_parameter_that_a_trial_lacks_has_a_place_of_its_own() -> None:
    result = with_trials([pick(n) for n in range(40)])
    made = checked(slices(result, SPACE))
    (axis,) = [n for n in ("", 2, 3, 4) if made["layout"][f"xaxis{n}"]["title"]["text"] == "momentum"]
    places = {
        point[0]: x
        for trace in made["data"]
        if trace["xaxis"] == f"x{axis}"
        for x, point in zip(trace["x"], trace["customdata"], strict=True)
    }
    for trial in result.trials:
        assert (places[trial.trial] == 0.0) == ("momentum" not in trial.configuration)
    cells = checked(contour(result, SPACE, x="momentum", y="lr"))["data"][0]
    assert {0.0} < set(cells["x"]), "the trials without it are cells beside the others"


def test_a_contour_is_blank_where_no_trial_is_and_has_the_metrics_of_those_nearby() -> None:
    result = with_trials([pick(n) for n in range(200)])
    made = checked(contour(result, SPACE, x="lr", y="hidden"))
    cells = made["data"][0]
    assert set(cells["width"]) == {round(1 / 24, 4)}
    assert len(set(cells["base"])) == 3, "a row for each choice"
    colours = cells["marker"]["color"]
    best = [x for x, value in zip(cells["x"], colours, strict=True) if value > max(colours) - 0.1]
    assert all(abs(x - 1 / 3) < 0.15 for x in best), "the best learning rate is 0.01"
    corner = with_trials([{"a": n / 50, "b": n / 50} for n in range(50)], lambda values: values["a"])
    cells = checked(contour(corner))["data"][0]
    assert all(abs(x - y - tall / 2) < 0.5 for x, y, tall in zip(cells["x"], cells["base"], cells["y"], strict=True))


@pytest.mark.parametrize(("x", "y"), [("", ""), ("lr", "lr"), ("nosuch", "hidden"), ("hidden", ""), ("", "lr")])
def test_a_contour_is_always_of_two_different_parameters(x: str, y: str) -> None:
    made = checked(contour(with_trials([pick(n) for n in range(30)]), SPACE, x=x, y=y))
    chosen = made["layout"]["meta"]["chosen"]
    assert len(set(chosen)) == 2
    assert set(chosen) <= set(contour_names(with_trials([pick(n) for n in range(30)])))
    assert x in ("nosuch", "", *chosen)


def test_any_value_has_a_place() -> None:
    odd: list[Any] = [True, None, "a", [1], {"x": 1}, -3.0, 0, 10**9, "</script>", "", "long" * 20, math.inf]
    result = with_trials([{"odd": value, "n": n} for n, value in enumerate(odd)], lambda values: float(values["n"]))
    for made in (slices(result), contour(result), contours(result)):
        assert "</script>" not in json.dumps(checked(made))


@pytest.mark.long
def test_ten_thousand_trials_are_thinned_out_which_is_said() -> None:
    result = with_trials([pick(n) | {f"p{k}": (n * k) % 97 for k in range(1, 9)} for n in range(10_000)])
    sliced = checked(slices(result, SPACE))
    assert sum(len(trace["x"]) for trace in sliced["data"]) < 5000
    assert "of 10,000 trials" in sliced["layout"]["meta"]["note"]
    assert len(json.dumps(checked(contours(result, SPACE)))) < 400_000
    question = question_of(result, SPACE)
    assert isinstance(question, ComparedTrials)
    assert len(question.metrics) <= MOST
    assert "chosen evenly" in question.note


def test_a_few_huge_losses_make_the_axis_logarithmic() -> None:
    result = with_trials([pick(n) | {"n": n} for n in range(20)], lambda values: 1e6 if values["n"] == 3 else 0.5)
    assert checked(slices(result, SPACE))["layout"]["yaxis"]["type"] == "log"


def test_importance_is_of_what_makes_the_metric() -> None:
    result = with_trials([pick(n) | {"noise": (n * 37) % 11} for n in range(60)])
    question = question_of(result, SPACE)
    assert isinstance(question, ComparedTrials)
    assert question.kinds == {"lr": "log", "hidden": "category", "optimizer": "category", "noise": "linear"}
    assert "Left out, as not all of them have it: momentum." in question.note
    pytest.importorskip("optuna")
    shares = importances(question)
    assert next(iter(shares)) == "lr"
    assert shares["lr"] > 0.7
    assert sum(shares.values()) <= 1.0 + 1e-9


def test_why_there_is_no_importance_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    few = f"needs {FEWEST} trials with a metric after equal iterations; 3 have one."
    assert few in str(question_of(with_trials([pick(n) for n in range(3)])))
    assert "same metric" in str(question_of(with_trials([pick(n) for n in range(9)], lambda _: 1.0)))
    monkeypatch.setattr("rubberband.views.charts.search.find_spec", lambda name: None if name == "sklearn" else name)
    assert "pip install 'rubberband-tune[optuna]'" in str(importance(a_result()))
