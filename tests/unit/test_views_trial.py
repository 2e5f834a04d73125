"""Figures of one trial: its lead over the others, and its share of the bill."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from rubberband.executor import Result
from rubberband.planner.exact.model import predict
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.views.trial import lead, trial_cards
from tests.builders.results import a_job, a_result


def with_values(mode: Literal["min", "max"], *values: float) -> Result:
    """Return a result whose trials have these values of its metric."""
    result = replace(a_result(), mode=mode)
    trials = [
        replace(trial, metrics={result.metric: value}) for trial, value in zip(result.trials, values, strict=False)
    ]
    return replace(result, trials=tuple(trials))


@pytest.mark.parametrize(
    ("mode", "values", "ours"),
    [
        ("min", (0.03125, 0.363636), "0.332 (91 %) better"),
        ("max", (0.03125, 0.363636), "0.332 (91 %) worse"),
        ("min", (1000.0, 1001.0), "1 (0.1 %) better"),
        ("max", (1000.0, 1001.0), "1 (0.1 %) worse"),
        ("min", (0.0, 0.5), "0.5 (100 %) better"),
    ],
)
def test_the_lead_is_over_the_best_of_the_others(
    mode: Literal["min", "max"], values: tuple[float, ...], ours: str
) -> None:
    result = with_values(mode, *values)
    assert lead(result, result.trials[0]).startswith(f"{ours} than trial 1, ")


def test_a_percentage_has_no_exponent() -> None:
    result = with_values("min", 0.363636, 0.03125)
    assert lead(result, result.trials[0]).startswith("0.332 (1064 %) worse than trial 1")
    stages, plan = (Stage(trials=1, iterations=2),), Plan(stages=(StagePlan(instances=1, gpus_per_trial=1),))
    job = a_job(stages=stages, plan=plan)
    only = a_result(replace(job, prediction=predict(stages, plan, job.profile, job.offer)))
    assert [card for card in trial_cards(only, only.trials[0]) if "100 % of the bill" in card.notes]
