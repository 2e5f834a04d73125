"""The choice of a batch against its limits, and against all that there is to choose from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rubberband.planner.goodput import candidates, choose, choose_at, choose_many, efficiency, gain, step_s
from rubberband.values.adaptive import BatchLimits
from tests.builders.goodput_strategies import batch_limits, noise_scales, throughputs

gang_sizes = st.integers(1, 64)


@given(throughputs(), noise_scales, batch_limits(2), gang_sizes, st.integers(1, 2))
def test_a_choice_keeps_every_limit(parameters, noise_scale, limits, gpus, least):
    assume(gpus * least <= limits.max)
    found = choose(parameters, noise_scale, limits, 1, gpus, least_per_gpu=least)
    passes = found.accumulation + 1
    assert limits.initial <= found.batch_size <= limits.max
    assert found.per_gpu == -(-found.batch_size // (gpus * passes))
    assert found.batch_size >= gpus * least
    assert least == 1 or found.batch_size // (gpus * passes) >= least
    assert found.per_gpu <= (limits.max_per_gpu or limits.max)
    assert passes == 1 or gpus * (passes - 1) * limits.max_per_gpu < found.batch_size, "no more passes than needed"
    if not limits.accumulation:
        assert found.accumulation == 0 or found.batch_size == max(limits.initial, gpus * least)


@given(throughputs(), noise_scales, batch_limits(), gang_sizes)
def test_a_choice_says_what_the_model_says(parameters, noise_scale, limits, gpus):
    assume(gpus <= limits.max)
    found = choose(parameters, noise_scale, limits, 2, gpus)
    seconds = step_s(parameters, 2, gpus, found.per_gpu, found.accumulation)
    assert found.step_s == pytest.approx(seconds)
    assert found.efficiency == pytest.approx(efficiency(noise_scale, limits.initial, found.batch_size))
    assert found.goodput == pytest.approx(found.batch_size / seconds * found.efficiency)
    again = choose_at(parameters, noise_scale, limits, 2, gpus, found.batch_size)
    assert (again.per_gpu, again.accumulation) == (found.per_gpu, found.accumulation)


@given(throughputs(), noise_scales, batch_limits(largest_initial=20), st.integers(1, 16))
def test_nothing_is_much_better_than_the_choice(parameters, noise_scale, limits, gpus):
    assume(gpus <= limits.max)
    most = limits.max_per_gpu or limits.max
    per_gpu = np.arange(1, most + 1)[:, None]
    accumulation = np.arange(-(-limits.max // gpus) if limits.accumulation else 1)
    batch_size = gpus * per_gpu * (accumulation + 1)
    rate = batch_size / step_s(parameters, 1, gpus, per_gpu, accumulation)
    goodput = rate * efficiency(noise_scale, limits.initial, batch_size)
    allowed = (limits.initial <= batch_size) & (batch_size <= limits.max)
    best = np.max(goodput, where=allowed, initial=0.0)
    assert choose(parameters, noise_scale, limits, 1, gpus).goodput >= 0.98 * best


@given(throughputs(), noise_scales, batch_limits(2), st.lists(gang_sizes, min_size=1, max_size=8), st.integers(0, 2))
def test_many_choices_at_once_are_the_single_ones(parameters, noise_scale, limits, gpus, least):
    assume(max(gpus) * least <= limits.max)
    instances = [-(-count // 8) for count in gpus]
    found = choose_many(parameters, noise_scale, limits, np.asarray(instances), np.asarray(gpus), least_per_gpu=least)
    for at, (nodes, count) in enumerate(zip(instances, gpus, strict=True)):
        single = choose(parameters, noise_scale, limits, nodes, count, least_per_gpu=least)
        assert found[at].batch_size == single.batch_size
        assert found[at].per_gpu == single.per_gpu
        assert found[at].accumulation == single.accumulation
        assert found[at].goodput == pytest.approx(single.goodput)


@given(throughputs(), batch_limits(), gang_sizes, noise_scales, noise_scales)
def test_more_noise_is_never_less_goodput(parameters, limits, gpus, one, other):
    assume(gpus <= limits.max)
    less, more = (choose(parameters, phi, limits, 1, gpus).goodput for phi in sorted((one, other)))
    assert less <= more * (1 + 1e-9)


@given(batch_limits(), gang_sizes, st.integers(2, 12))
def test_candidates_grow_from_the_initial_to_the_largest_batch(limits, gpus, num):
    assume(gpus <= limits.max)
    found = candidates(limits, gpus, num=num)
    sizes = found.batch_size
    assert len(sizes) <= num
    assert sizes[0] == max(limits.initial, gpus)
    assert np.all(np.diff(sizes) > 0)
    if limits.accumulation or limits.max <= gpus * (limits.max_per_gpu or limits.max):
        assert sizes[-1] == limits.max


@given(noise_scales, st.integers(1, 1000), st.floats(1.0, 100.0))
def test_efficiency_is_a_share_and_gain_is_between_one_step_and_linear(noise_scale, initial, growth):
    batch_size = initial * growth
    assert 0.0 < efficiency(noise_scale, initial, batch_size) <= 1.0
    assert 1.0 - 1e-9 <= gain(noise_scale, initial, batch_size) <= growth * (1 + 1e-9)


def test_rounding_up_does_not_pass_the_largest_batch():
    limits = BatchLimits(initial=128, max=4096, max_per_gpu=200)
    assert candidates(limits, 11).batch_size[-1] == 4096
