"""The size of a search: the largest that fits."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError
from rubberband.executor import Job
from rubberband.planning.candidates import candidates
from rubberband.planning.feasible import largest, size
from rubberband.spec.experiment import Experiment
from rubberband.values.profile import Profile
from tests.builders.budget import examples
from tests.builders.plans import plan_job

MOST = 200


@given(
    starts=st.lists(st.integers(2, MOST), max_size=4, unique=True),
    lengths=st.lists(st.integers(0, MOST), min_size=5, max_size=5),
    spare=st.integers(0, 50),
    guess=st.none() | st.integers(0, 2 * MOST),
)
def test_the_largest_number_is_found(starts: list[int], lengths: list[int], spare: int, guess: int | None) -> None:
    edges = [1, *sorted(starts), MOST + 1]
    until = {start: start + length for start, length in zip(edges, lengths, strict=False)}
    looks = []

    def start_of(number: int) -> int:
        return max(start for start in edges[:-1] if start <= number)

    def fits(number: int) -> bool:
        looks.append(number)
        return number < until[start_of(number)]

    def may_fit(number: int) -> bool:
        return number < until[start_of(number)] + spare

    found = largest(edges[:-1], MOST, fits, may_fit, None if guess is None else lambda _: guess)
    fitting = [number for number in range(1, MOST + 1) if number < until[start_of(number)]]
    assert found == max(fitting, default=None)
    assert len(looks) <= 5 * 20


def job_words(source: random.Random, *, noisy: bool) -> dict[str, Any]:
    """A random job, small enough to try its sizes one by one."""
    cv = source.choice([0.05, 0.1, 0.2]) if noisy else 0.0
    scheduler: dict[str, Any] = {"type": "sha", "num_samples": "auto", "max_t": source.randint(2, 30)}
    if source.random() < 0.3:
        scheduler = {"type": "sha", "num_samples": source.randint(1, 12), "max_t": "auto"}
    scheduler["reduction_factor"] = source.randint(2, 4)
    constraints: dict[str, Any] = {"objective": source.choice(["min_cost", "min_time"]), "max_failures": 5}
    if source.random() < 0.8:
        constraints["deadline"] = source.uniform(120.0, 900.0)
    if source.random() < 0.7 or "deadline" not in constraints:
        constraints["max_cost"] = source.uniform(0.5, 4.0)
    return {
        "name": "sized",
        "search": {
            "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": scheduler,
            "metric": "loss",
            "mode": "min",
        },
        "constraints": constraints,
        "resources": {
            "provider": "virtual",
            "instance_type": "p3.8xlarge",
            "max_instances": source.randint(1, 5),
            "provision_delay": source.choice([0.0, 5.0]),
            "init_delay": source.choice([0.0, 20.0]),
            "minimum_billed": source.choice(["0s", "60s"]),
        },
        "profile": {
            "seconds_per_iteration": {1: 8.0, 2: 4.6, 4: 2.7},
            "trial_startup": 1,
            "trial_cv": cv,
            "iteration_cv": cv,
        },
    }


def sized(words: dict[str, Any]) -> tuple[Experiment, Profile, int | None, Any]:
    asked = Experiment(**words)
    profile = asked.loaded_profile()
    assert profile is not None
    found, _ = size(asked, candidates(asked, profile, 0.0))
    return asked, profile, found.number, found.key


def planned(asked: Experiment, profile: Profile, key: Any, number: int) -> Job | None:
    try:
        return plan_job(asked.sized(key, number), profile, now=0.0)
    except InfeasibleError:
        return None


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10**9))
def test_one_more_does_not_fit_and_larger_searches_do_not_either(seed: int) -> None:
    asked, profile, number, key = sized(job_words(random.Random(seed), noisy=False))
    number = number or 0
    if number:
        assert planned(asked, profile, key, number) is not None
    for larger in [*range(number + 1, number + 4), *(round((number + 1) * share) for share in (1.5, 2.0, 4.0, 9.0))]:
        assert planned(asked, profile, key, larger) is None


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_search_is_sized_by_what_its_noisy_times_allow(seed: int) -> None:
    asked, profile, number, key = sized(job_words(random.Random(seed), noisy=True))
    assert number is not None
    assert planned(asked, profile, key, number) is not None
    assert planned(asked, profile, key, number + 1) is None
