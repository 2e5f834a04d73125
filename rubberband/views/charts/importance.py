"""Importance of the parameters for the metric: fANOVA (Hutter et al., ICML 2014), as Optuna computes it.

It needs the extra `optuna` and scikit-learn. As a command it reads a question as JSON from its standard input and
prints the shares: the service runs it in a process of its own, for Optuna's memory and time.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from rubberband.executor.result.result import Result
from rubberband.installation import install_hint
from rubberband.views.charts.parallel_coordinates import ABSENT, axis_of, domains_of, parameters, short_label
from rubberband.views.charts.parts import Figure
from rubberband.views.charts.search import Space, comparable
from rubberband.views.formatting import listed, printable, setting

FEWEST, MOST = 8, 300
"""Trials. The time grows with the square of their number: some seconds for the largest."""
_MOST_PARAMETERS = 30
IMPORTANCE_NOTE = (
    "Share of the metric's variance that each parameter explains alone (fANOVA); the rest are interactions and noise."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTrials:
    """Compared trials: the values of each parameter, and the metrics."""

    metrics: list[float]
    values: dict[str, list[Any]]
    """Parameter -> value of each trial; categories as text."""
    kinds: dict[str, str]
    """Parameter -> linear, log or category."""
    note: str


def question_of(result: Result, space: Space = None) -> ComparedTrials | str:
    """Return the trials to compare; or, in a sentence, why none are compared."""
    if not all(find_spec(name) for name in ("optuna", "sklearn")):
        return f"The importance of parameters needs Optuna and scikit-learn: {install_hint('optuna')}"
    compared = comparable(result)
    count = 0 if compared is None else len(compared.trials)
    if compared is None or count < FEWEST:
        found = f"; {count} have one" if count else ""
        return f"The importance of parameters needs {FEWEST} trials with a metric after equal iterations{found}."
    if min(compared.values) == max(compared.values):
        return "All compared trials have the same metric, so no parameter explains it."
    step = math.ceil(count / MOST)
    trials, metrics = compared.trials[::step], list(compared.values[::step])
    varying = [name for name, varies in parameters(trials).items() if varies][:_MOST_PARAMETERS]
    partial = [name for name in varying if any(name not in trial.configuration for trial in trials)]
    names = [name for name in varying if name not in partial]
    if not names:
        return "No parameter that all compared trials have differs between them."
    domains = domains_of(space or {})
    values, kinds = dict[str, list[Any]](), dict[str, str]()
    for name in names:
        every = [trial.configuration[name] for trial in trials]
        seen = [trial.configuration.get(name, ABSENT) for trial in result.trials]
        kinds[name] = axis_of(name, seen, domains.get(name)).kind
        values[name] = [setting(value) for value in every] if kinds[name] == "category" else every
    notes = [IMPORTANCE_NOTE, compared.told(result)]
    notes += [f"{len(trials)} of these are used, chosen evenly."] if step > 1 else []
    notes += [f"Left out, as not all of them have it: {listed(map(printable, partial))}."] if partial else []
    return ComparedTrials(metrics=metrics, values=values, kinds=kinds, note=" ".join(notes))


def importances(question: ComparedTrials) -> dict[str, float]:
    """Return parameter -> share of the variance, the largest first. Imports Optuna."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    from optuna.importance import FanovaImportanceEvaluator

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions: dict[str, BaseDistribution] = {}
    for name, values in question.values.items():
        if question.kinds[name] == "category":
            distributions[name] = CategoricalDistribution(sorted(set(values)))
        else:
            distributions[name] = FloatDistribution(min(values), max(values), log=question.kinds[name] == "log")
    study = optuna.create_study()
    for at, metric in enumerate(question.metrics):
        params = {name: values[at] for name, values in question.values.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=metric))
    shares = FanovaImportanceEvaluator(seed=0).evaluate(study)
    return {name: float(share) for name, share in sorted(shares.items(), key=lambda item: -item[1])}


def importance_chart(shares: Mapping[str, float], note: str) -> Figure:
    """Return bars of the shares, the largest on top."""
    order = list(shares.items())[::-1]
    layout = {
        "height": 80 + 26 * len(order),
        "showlegend": False,
        "bargap": 0.35,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 40},
        "xaxis": {"title": {"text": "share of the variance"}, "tickformat": ".0%", "range": [0, 1]},
        "yaxis": {"type": "category", "showgrid": False},
        "meta": {"note": note},
    }
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [short_label(name, 30) for name, _ in order],
        "x": [round(share, 4) for _, share in order],
        "text": [f"{100 * share:.0f} %" for _, share in order],
        "textposition": "outside",
        "cliponaxis": False,
        "hoverinfo": "none",
        "marker": {"color": "#3b82c4"},
    }
    return {"data": [bars], "layout": layout}


def importance(result: Result, space: Space = None) -> Figure | str:
    """Return the chart, computed in this process; or, in a sentence, why there is none."""
    question = question_of(result, space)
    return question if isinstance(question, str) else importance_chart(importances(question), question.note)


def to_json(question: ComparedTrials) -> str:
    """Return a question for the command."""
    return json.dumps(asdict(question), allow_nan=False)


def main() -> None:
    """Answer the question on the standard input."""
    print(json.dumps(importances(ComparedTrials(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
