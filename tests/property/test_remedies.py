"""Remedies of experiments without a plan: each makes one possible, and one step less does not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.errors import Change, InputError, Remedy
from rubberband.planner.estimates import Estimate
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas
from rubberband.planning.prices_and_quotas import answer
from rubberband.planning.remedies import MOST_S
from rubberband.spec.loading import experiment_of
from rubberband.units import parse_duration
from tests.builders.budget import examples

INTEGERS = ("resources.gpus_per_trial.max", "resources.gpus_per_trial.min", "resources.max_instances")
NEVER: Callable[[], float] = itertools.repeat(0.0).__next__
"""A clock with which time is never up."""


def estimated(words: dict[str, Any], *overrides: str, most_usd: float | None = None) -> Estimate:
    experiment = experiment_of(copy.deepcopy(words), overrides=overrides)
    profiles = experiment.loaded_profiles()
    assert profiles is not None
    return answer(
        experiment, profiles, PricesAndQuotas(), PlanningOptions(now=0.0, clock=NEVER, most_usd=most_usd)
    ).estimate


def feasible(words: dict[str, Any], *overrides: str) -> bool:
    try:
        return estimated(words, *overrides).feasible
    except InputError:
        return False


def lesser(change: Change) -> list[Change]:
    """What lies between a change and what there was: of an integer all, of a limit the nearest."""
    value, was = change.value, change.was
    between: list[int | float | str]
    if isinstance(value, int) and isinstance(was, int):
        between = list(range(was + 1, value) if value > was else range(value + 1, was))
    elif change.key == "constraints.deadline":
        between = [f"{parse_duration(value) - 1:.0f}s"]
    else:
        between = [float(value) - (0.01 if float(value) >= 0.11 else 0.0001)]
    return [Change(key=change.key, value=each, was=was) for each in between]


SHA = {"type": "sha", "num_samples": 9, "max_t": 9, "reduction_factor": 3}
STAGES = {"type": "stages", "stages": [{"trials": 6, "iterations": 2}, {"trials": 2, "iterations": 5}]}


@st.composite
def jobs(draw: st.DrawFn, schedulers: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """The words of a small job whose limits are tight."""
    seconds = {1: draw(st.sampled_from([20, 40, 60]))}
    for gpus in (2, 4, 8, 16):
        seconds[gpus] = seconds[gpus // 2] * draw(st.sampled_from([0.55, 0.7, 0.95]))
    least = draw(st.sampled_from([1, 1, 2]))
    instances = draw(st.integers(least, 4))
    scheduler = draw(schedulers)
    resources: dict[str, Any] = {
        "provider": "virtual",
        "max_instances": instances,
        "gpus_per_trial": {"min": least, "max": draw(st.sampled_from([least, 2, 4]))},
        "billing": draw(st.sampled_from(["per_instance", "per_instance", "per_function"])),
        "provision_delay": 15,
        "init_delay": 15,
        "head_price_per_hour": draw(st.sampled_from([0, 0.5])),
    }
    if draw(st.booleans()):
        resources |= {"instance_types": ["p3.2xlarge", "p3.8xlarge"]}
    else:
        resources |= {"instance_type": "p3.8xlarge"}
    constraints: dict[str, Any] = {"objective": draw(st.sampled_from(["min_cost", "min_time"]))}
    if draw(st.booleans()):
        constraints["max_cost"] = draw(st.sampled_from([0.05, 0.5, 1.0, 2.0]))
    if "max_cost" not in constraints or draw(st.booleans()):
        constraints["deadline"] = draw(st.integers(30, 400))
    return {
        "name": "small",
        "search": {"scheduler": scheduler, "metric": "loss", "mode": "min"},
        "constraints": constraints,
        "resources": resources,
        "profile": {"seconds_per_iteration": seconds, "trial_startup": 2},
    }


def check(words: dict[str, Any], remedy: Remedy) -> None:
    """What is told of the remedy is so."""
    cured = estimated(words, *(change.setting for change in remedy.changes))
    assert cured.feasible
    assert cured.prediction is not None
    assert (cured.prediction.jct_s, cured.prediction.cost_usd) == pytest.approx((remedy.jct_s, remedy.cost_usd))


def check_that_less_does_not_do(words: dict[str, Any], remedy: Remedy) -> None:
    for change in remedy.changes:
        others = [other.setting for other in remedy.changes if other is not change]
        if others and change.key in INTEGERS:
            continue  # with a larger limit beside it, less may do
        for less in lesser(change):
            assert not feasible(words, *others, less.setting), (change, less)


@settings(max_examples=examples(150), deadline=None)
@given(jobs(st.sampled_from([SHA, STAGES])))
def test_a_remedy_suffices_and_nothing_less_does(words: dict[str, Any]) -> None:
    found = estimated(words)
    assert bool(found.remedies) == (not found.feasible)
    for remedy in found.remedies:
        check(words, remedy)
        check_that_less_does_not_do(words, remedy)


@settings(max_examples=3, deadline=None)
@given(jobs(st.just(STAGES)), st.sampled_from([0.8, 0.95]), st.booleans())
def test_remedies_suffice_with_the_confidence_that_is_asked_for(
    words: dict[str, Any], confidence: float, spot: bool
) -> None:
    words["constraints"]["confidence"] = confidence
    words["profile"] |= {"trial_cv": 0.1, "iteration_cv": 0.2}
    if spot:
        words["resources"] |= {"market": "spot"}
    for remedy in estimated(words).remedies:
        check(words, remedy)
        if len(remedy.changes) == 1 and remedy.changes[0].key in INTEGERS:
            assert not any(feasible(words, less.setting) for less in lesser(remedy.changes[0])[-1:])


@settings(max_examples=examples(60), deadline=None)
@given(jobs(st.just(STAGES)), st.sampled_from([0.1, 1.0, 3.0]))
def test_no_remedy_costs_more_than_may_be_spent(words: dict[str, Any], most_usd: float) -> None:
    for remedy in estimated(words, most_usd=most_usd).remedies:
        cured = estimated(words, *(change.setting for change in remedy.changes))
        assert remedy.cost_usd <= most_usd
        assert (cured.constraints.max_cost_usd or 0.0) <= most_usd or "max_cost" in words["constraints"]


def test_those_that_concede_nothing_come_first_and_then_the_cheapest() -> None:
    words = {
        "name": "wide",
        "search": {"scheduler": {"type": "sha", "num_samples": 32, "max_t": 50}, "metric": "loss", "mode": "min"},
        "constraints": {"deadline": "20m"},
        "resources": {
            "provider": "virtual",
            "instance_type": "p3.8xlarge",
            "gpus_per_trial": {"max": 4},
            "provision_delay": 15,
            "init_delay": 15,
        },
        "profile": {"seconds_per_iteration": {1: 110, 2: 57, 4: 30, 8: 18, 16: 13, 32: 11}, "trial_startup": 2},
    }
    first, second = (remedy.changes[0].setting for remedy in estimated(words).remedies)
    assert (first, second) == ("resources.gpus_per_trial.max=8", "constraints.deadline=26m5s")
    best, other = estimated(words, "constraints.max_cost=13", "resources.gpus_per_trial.max=8").remedies
    assert [best.changes[0].key, other.changes[0].key] == ["constraints.deadline", "constraints.max_cost"]
    assert best.cost_usd < other.cost_usd
    assert (best.later_s, other.extra_usd) == (pytest.approx(499.0), pytest.approx(1.48))
    both = estimated(words, "constraints.max_cost=5").remedies
    assert [change.setting for change in both[0].changes] == [first, "constraints.max_cost=14.48"]


def test_a_slow_lookup_is_left_out() -> None:
    experiment = experiment_of(
        {
            "name": "slow",
            "search": {"scheduler": STAGES, "metric": "loss", "mode": "min"},
            "constraints": {"deadline": 10},
            "resources": {"price_per_hour": 3.6},
            "profile": {"seconds_per_iteration": {1: 20}},
        }
    )
    profile = experiment.loaded_profile()
    assert profile is not None
    ticks = itertools.count(step=2 * MOST_S)
    found = answer(
        experiment, profile, PricesAndQuotas(), PlanningOptions(now=0.0, clock=lambda: float(next(ticks)))
    ).estimate
    assert found.remedies == ()
    assert "raise the deadline to" in str(found.reason)
