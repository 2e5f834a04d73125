"""How the metric depends on parameters: which trials are compared, odd values, and how large the charts get."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rubberband.executor import Result
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
from tests.builders.results import a_result

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


def drawn(trial: int) -> Configuration:
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


def figure(found: dict[str, Any] | None) -> dict[str, Any]:
    assert found is not None
    json.dumps(found, allow_nan=False)
    return found


def test_trials_are_compared_after_equal_iterations() -> None:
    # The stages of the job end after 1, 3 and 7 iterations.
    result = with_trials([drawn(n) for n in range(60)], iterations=lambda n: 7 if n < 5 else 4 if n < 25 else 1)
    compared = comparable(result)
    assert compared is not None
    assert (compared.iterations, len(compared.trials)) == (3, 25), "few reached the last end"
    assert compared.sentence(result) == "Compared: 25 of 60 trials, at their metric after 3 iterations."
    for trial, value in zip(compared.trials, compared.values, strict=True):
        assert value == trial.curve[2][2][result.metric]
    few = comparable(with_trials([drawn(n) for n in range(9)], iterations=lambda n: 7 if n < 3 else 1))
    assert few is not None
    assert (few.iterations, len(few.trials)) == (1, 9), "the most, where none has enough"


def test_without_two_metrics_nothing_is_compared() -> None:
    nothing = with_trials([drawn(0), drawn(1)], lambda values: math.nan)
    assert comparable(nothing) is None
    for result in (nothing, with_trials([drawn(0)]), with_trials([drawn(0)] * 9), with_trials([{}, {}], lambda _: 1.0)):
        assert slices(result) is None
        assert contour(result) is None
        assert contours(result) is None


def test_a_slice_has_each_trial_once_by_its_iterations_and_the_best_as_a_star() -> None:
    result = with_trials([drawn(n) for n in range(40)], iterations=lambda n: 7 if n < 5 else 3)
    made = figure(slices(result, SPACE))
    panels = [trace for trace in made["data"] if trace["xaxis"] == "x"]
    assert [trace["name"] for trace in panels] == ["3 iterations", "7 iterations", "best"]
    assert sorted(point[0] for trace in panels[:2] for point in trace["customdata"]) == list(range(40))
    titles = [made["layout"][f"xaxis{n or ''}"]["title"]["text"] for n in ("", 2, 3, 4)]
    assert sorted(titles) == ["hidden", "lr", "momentum", "optimizer"]


def test_a_parameter_that_a_trial_lacks_has_a_place_of_its_own() -> None:
    result = with_trials([drawn(n) for n in range(40)])
    made = figure(slices(result, SPACE))
    (axis,) = [n for n in ("", 2, 3, 4) if made["layout"][f"xaxis{n}"]["title"]["text"] == "momentum"]
    places = {
        point[0]: x
        for trace in made["data"]
        if trace["xaxis"] == f"x{axis}"
        for x, point in zip(trace["x"], trace["customdata"], strict=True)
    }
    for trial in result.trials:
        assert (places[trial.trial] == 0.0) == ("momentum" not in trial.configuration)
    cells = figure(contour(result, SPACE, x="momentum", y="lr"))["data"][0]
    assert {0.0} < set(cells["x"]), "the trials without it are cells beside the others"


def test_a_contour_is_blank_where_no_trial_is_and_has_the_metrics_of_those_nearby() -> None:
    result = with_trials([drawn(n) for n in range(200)])
    made = figure(contour(result, SPACE, x="lr", y="hidden"))
    cells = made["data"][0]
    assert set(cells["width"]) == {round(1 / 24, 4)}
    assert len(set(cells["base"])) == 3, "a row for each choice"
    colours = cells["marker"]["color"]
    best = [x for x, value in zip(cells["x"], colours, strict=True) if value > max(colours) - 0.1]
    assert all(abs(x - 1 / 3) < 0.15 for x in best), "the best learning rate is 0.01"
    corner = with_trials([{"a": n / 50, "b": n / 50} for n in range(50)], lambda values: values["a"])
    cells = figure(contour(corner))["data"][0]
    assert all(abs(x - y - tall / 2) < 0.5 for x, y, tall in zip(cells["x"], cells["base"], cells["y"], strict=True))


@pytest.mark.parametrize(("x", "y"), [("", ""), ("lr", "lr"), ("nosuch", "hidden"), ("hidden", ""), ("", "lr")])
def test_a_contour_is_always_of_two_different_parameters(x: str, y: str) -> None:
    made = figure(contour(with_trials([drawn(n) for n in range(30)]), SPACE, x=x, y=y))
    chosen = made["layout"]["meta"]["chosen"]
    assert len(set(chosen)) == 2
    assert set(chosen) <= set(contour_names(with_trials([drawn(n) for n in range(30)])))
    assert x in ("nosuch", "", *chosen)


def test_any_value_has_a_place() -> None:
    odd: list[Any] = [True, None, "a", [1], {"x": 1}, -3.0, 0, 10**9, "</script>", "", "long" * 20, math.inf]
    result = with_trials([{"odd": value, "n": n} for n, value in enumerate(odd)], lambda values: float(values["n"]))
    for made in (slices(result), contour(result), contours(result)):
        assert "</script>" not in json.dumps(figure(made))


@pytest.mark.long
def test_ten_thousand_trials_are_thinned_out_which_is_said() -> None:
    result = with_trials([drawn(n) | {f"p{k}": (n * k) % 97 for k in range(1, 9)} for n in range(10_000)])
    sliced = figure(slices(result, SPACE))
    assert sum(len(trace["x"]) for trace in sliced["data"]) < 5000
    assert "of 10,000 trials" in sliced["layout"]["meta"]["note"]
    assert len(json.dumps(figure(contours(result, SPACE)))) < 400_000
    question = question_of(result, SPACE)
    assert isinstance(question, ComparedTrials)
    assert len(question.metrics) <= MOST
    assert "chosen evenly" in question.note


def test_a_few_huge_losses_make_the_axis_logarithmic() -> None:
    result = with_trials([drawn(n) | {"n": n} for n in range(20)], lambda values: 1e6 if values["n"] == 3 else 0.5)
    assert figure(slices(result, SPACE))["layout"]["yaxis"]["type"] == "log"


def test_importance_is_of_what_makes_the_metric() -> None:
    result = with_trials([drawn(n) | {"noise": (n * 37) % 11} for n in range(60)])
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
    assert few in str(question_of(with_trials([drawn(n) for n in range(3)])))
    assert "same metric" in str(question_of(with_trials([drawn(n) for n in range(9)], lambda _: 1.0)))
    monkeypatch.setattr("rubberband.views.charts.search.find_spec", lambda name: None if name == "sklearn" else name)
    assert "pip install 'rubberband-tune[optuna]'" in str(importance(a_result()))
