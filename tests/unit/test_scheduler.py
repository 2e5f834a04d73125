from __future__ import annotations

import pytest

from rubberband.errors import InputError
from rubberband.plan import Stage, total_iterations
from rubberband.scheduler import hyperband, sha, stages


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
    ("arguments", "why"),
    [
        ((0, 1, 50, 3), "num_samples=0"),
        ((-3, 1, 50, 3), "num_samples=-3"),
        ((32, 0, 50, 3), "grace_period=0"),
        ((32, 1, 0, 3), "max_t=0"),
        ((32, 51, 50, 3), "grace_period=51 is more than max_t=50; lower grace_period to 50 or raise max_t"),
        ((32, 1, 50, 1), "reduction_factor=1 keeps every trial; the least is 2"),
        ((32, 1, 50, 2.5), "reduction_factor=2.5 is not a whole number"),
        ((True, 1, 50, 3), "num_samples=True is not a whole number"),
    ],
)
def test_sha_refuses(arguments: tuple[int, int, int, int], why: str) -> None:
    with pytest.raises(InputError, match=why):
        sha(*arguments)


def test_written_stages() -> None:
    assert pairs(stages([{"trials": 32, "iterations": 1}, {"trials": 32, "iterations": 2}])) == [(32, 1), (32, 2)]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ([], "stages is empty"),
        ([{"trials": 1, "iterations": 1}, {"trials": 2, "iterations": 1}], "stage 1 has 2 trials .* lower it to 1"),
        ([{"trials": 0, "iterations": 1}], "trials=0"),
        ([{"trials": 1, "iterations": -1}], "iterations=-1"),
        ([{"trial": 1}], "write it as"),
    ],
)
def test_written_stages_refused(written: list[dict[str, int]], why: str) -> None:
    with pytest.raises(InputError, match=why):
        stages(written)


def test_hyperband_is_not_supported_yet() -> None:
    with pytest.raises(InputError, match="not supported yet; use sha"):
        hyperband(81, 3)
