from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.spec.schedulers import hyperband, sha
from rubberband.spec.search import Search
from rubberband.values.plan import Stage, total_iterations
from tests.builders.experiment_words import words


def pairs(chain: tuple[Stage, ...]) -> list[tuple[int, int]]:
    return [(stage.trials, stage.iterations) for stage in chain]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((32, 1, 50, 3), [(32, 1), (10, 3), (3, 9), (1, 37)]),
        ((1, 1, 10, 3), [(1, 10)]),
        ((2, 1, 10, 3), [(2, 10)]),
        ((9, 5, 5, 3), [(9, 5)]),
        ((9, 4, 5, 3), [(9, 4), (3, 1)]),
        ((27, 1, 4, 3), [(27, 1), (9, 3)]),
        ((64, 4, 508, 2), [(64, 4), (32, 8), (16, 16), (8, 32), (4, 64), (2, 128), (1, 256)]),
    ],
)
def test_sha(arguments: tuple[int, int, int, int], expected: list[tuple[int, int]]) -> None:
    chain = sha(*arguments)
    assert pairs(chain) == expected
    assert total_iterations(chain) == arguments[2]


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        ({"type": "sha", "num_samples": -3, "max_t": 50}, "num_samples: -3 must be at least 1; raise it"),
        ({"type": "sha", "num_samples": 10**6 + 1, "max_t": 50}, "num_samples: 1000001 must be at most 1000000; lower"),
        ({"type": "sha", "num_samples": True, "max_t": 50}, "num_samples: True is not a whole number"),
        ({"type": "sha", "num_samples": 9, "grace_period": 0, "max_t": 50}, "grace_period: 0 must be at least 1"),
        (
            {"type": "sha", "num_samples": 9, "grace_period": 51, "max_t": 50},
            "grace_period=51 is more than max_t=50; lower grace_period to 50 or raise max_t",
        ),
        ({"type": "sha", "num_samples": 9, "max_t": 50, "reduction_factor": 2.5}, "2.5 is not a whole number"),
        ({"type": "stages", "stages": []}, "stages: is empty"),
        (
            {"type": "stages", "stages": [{"trials": 1, "iterations": 1}, {"trials": 2, "iterations": 1}]},
            "stage 1 has 2 trials .* lower it to 1",
        ),
        ({"type": "stages", "stages": [{"trials": 0, "iterations": 1}]}, "stages.0.trials: 0 must be at least 1"),
        ({"type": "stages", "stages": [{"trial": 1}]}, "did you mean 'trials'"),
        ({"type": "hyperband", "max_t": 0}, "max_t: 0 must be at least 1"),
        ({"type": "hyperband", "max_t": 81, "reduction_factor": 1}, "reduction_factor: 1 must be at least 2"),
        (
            {"type": "hyperband", "max_t": 10**9, "reduction_factor": 2},
            "trials, more than 1,000,000; lower max_t or raise reduction_factor",
        ),
        ({"type": "hyperband", "max_t": 81.5}, "max_t: 81.5 is not a whole number"),
    ],
)
def test_a_scheduler_is_refused(scheduler: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Experiment(**words(search__scheduler=scheduler))


def test_written_stages() -> None:
    stages = [{"trials": 32, "iterations": 1}, {"trials": 32, "iterations": 2}]
    experiment = Experiment(**words(search__scheduler={"type": "stages", "stages": stages}))
    assert pairs(experiment.brackets()[0]) == [(32, 1), (32, 2)]


def totals(chain: tuple[Stage, ...]) -> list[tuple[int, int]]:
    """(trials, iterations in all) of each rung, as the tables of the paper have it."""
    done, rungs = 0, []
    for stage in chain:
        done += stage.iterations
        rungs.append((stage.trials, done))
    return rungs


@pytest.mark.parametrize(
    ("max_t", "reduction_factor", "expected"),
    [
        (
            81,
            3,
            [
                [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
                [(34, 3), (11, 9), (3, 27), (1, 81)],
                [(15, 9), (5, 27), (1, 81)],
                [(8, 27), (2, 81)],
                [(5, 81)],
            ],
        ),
        (27, 3, [[(27, 1), (9, 3), (3, 9), (1, 27)], [(12, 3), (4, 9), (1, 27)], [(6, 9), (2, 27)], [(4, 27)]]),
        (81, 4, [[(64, 1), (16, 5), (4, 20), (1, 81)], [(22, 5), (5, 20), (1, 81)], [(8, 20), (2, 81)], [(4, 81)]]),
        (2, 3, [[(1, 2)]]),
        (3, 3, [[(3, 1), (1, 3)], [(2, 3)]]),
    ],
)
def test_hyperband(max_t: int, reduction_factor: int, expected: list[list[tuple[int, int]]]) -> None:
    assert [totals(bracket) for bracket in hyperband(max_t, reduction_factor)] == expected


@given(st.integers(1, 20_000), st.integers(2, 50))
def test_every_bracket_of_hyperband_ends_at_max_t_with_survivors_only(max_t: int, reduction_factor: int) -> None:
    brackets = hyperband(max_t, reduction_factor)
    assert reduction_factor ** (len(brackets) - 1) <= max_t < reduction_factor ** len(brackets)
    for s, bracket in zip(range(len(brackets) - 1, -1, -1), brackets, strict=True):
        assert len(bracket) == s + 1
        assert total_iterations(bracket) == max_t
        assert all(stage.trials >= 1 and stage.iterations >= 1 for stage in bracket)
        assert all(after.trials == before.trials // reduction_factor for before, after in itertools.pairwise(bracket))


@pytest.mark.parametrize("power", [5, 10, 12])
def test_a_whole_power_has_no_rounding_in_its_logarithm(power: int) -> None:
    assert len(hyperband(3**power, 3)) == power + 1
    assert len(hyperband(3**power - 1, 3)) == power


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [
        (3, [[(3, 9)]]),
        (8, [[(5, 3), (1, 9)], [(3, 9)]]),
        (17, [[(9, 1), (3, 3), (1, 9)], [(5, 3), (1, 9)], [(3, 9)]]),
        (10, [[(2, 1), (1, 3), (1, 9)], [(5, 3), (1, 9)], [(3, 9)]]),
        (37, [[(18, 1), (6, 3), (2, 9)], [(10, 3), (3, 9)], [(9, 9)]]),
    ],
)
def test_hyperband_has_as_many_trials_as_are_asked_for(num_samples: int, expected: list[list[tuple[int, int]]]) -> None:
    """The brackets that halve least are filled first, and all again once all are full."""
    assert [totals(bracket) for bracket in hyperband(9, 3, num_samples)] == expected
    scheduler = {"type": "hyperband", "max_t": 9, "num_samples": num_samples}
    search = Search(scheduler=scheduler, metric="loss", mode="min")
    assert len(search.configurations()) == num_samples
    assert search.model_dump(by_alias=True)["scheduler"] == {**scheduler, "reduction_factor": 3}


FOLDERS = ["api", "executor", "planner", "rubberband/planning", "rubberband/running", "rubberband/views"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_a_stage_knows_its_scheduler(folder: str) -> None:
    asks = re.compile(
        r"\.ladder\b|\b(ladder|rungs) is (not )?None|scheduler(\.type)? (==|!=|in) |"
        r'(?<!examples=\[)"asha"(?!:)|"pbt"|\bPbt\b'
    )
    sources = {path: path.read_text() for path in (Path(__file__).parents[2] / folder).rglob("*.py")}
    writers = Path(__file__).parents[2] / "rubberband/running/programs"  # of an experiment file's words
    found = [str(path) for path, source in sources.items() if asks.search(source) and writers not in path.parents]
    assert found == []
