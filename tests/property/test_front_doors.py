"""`estimate` and `run` give the same answer: random experiments, with limits around those that their plan keeps."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.builders.front_doors import LIMITS_EACH, compare, world

PROVIDERS = pytest.mark.parametrize("provider", ["local", "virtual", "aws"])


def compared(provider: str, seeds: range, limits: int) -> Counter[str]:
    found: Counter[str] = Counter()
    with world() as (home, account):
        for seed in seeds:
            compare(provider, seed, home, account, found, limits)
    assert found["disagree"] == 0
    assert found["refused"] == 0, "a remedy is accepted by the run"
    return found


@pytest.mark.by_default(1)
@PROVIDERS
def test_estimate_and_run_agree(provider: str) -> None:
    compared(provider, range(1), 2)


@pytest.mark.long
@PROVIDERS
def test_estimate_and_run_agree_on_hundreds_of_limits(provider: str) -> None:
    found = compared(provider, range(67), LIMITS_EACH)
    assert 0 < found["feasible"] < found["limits"]
