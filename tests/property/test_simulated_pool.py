"""The simulation of a pool agrees with real controllers and the real broker on the same workload."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.harness.simulated_pool import run_jcts_s, simulated_jcts_s

STARTS = 0.08
"""What starts of instances and drivers, and GPUs that are given back at a checkpoint only, may add to a mean JCT."""


@pytest.mark.long
def test_real_experiments_take_as_long_as_simulated_ones_and_a_little_for_starts() -> None:
    simulated, real = dict[str, float](), dict[str, float]()
    for policy in ("default", "equal", "fifo"):
        by_job = simulated_jcts_s(policy), run_jcts_s(policy)
        assert by_job[0].keys() == by_job[1].keys()
        simulated[policy], real[policy] = (fmean(each.values()) for each in by_job)
        assert 1.0 <= real[policy] / simulated[policy] <= 1.0 + STARTS
    assert sorted(real, key=real.__getitem__) == sorted(simulated, key=simulated.__getitem__)
