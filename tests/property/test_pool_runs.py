"""Pools in random weather: no GPU is lent twice, no machine is left, no cap is passed, and the bills add up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.budget import examples
from tests.harness.pool_runs import PoolRun


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=examples(30))
def test_a_pool_keeps_its_promises_in_random_weather(seed: int) -> None:
    PoolRun(seed).run()
