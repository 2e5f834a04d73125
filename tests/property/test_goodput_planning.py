"""Plans with goodput: adapting is never slower than not, by the model, and more noise never slows a gang down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.planner.goodput.planning import (
    LOWER,
    fixed_seconds_per_iteration,
    scaled_size,
    scaling_efficiencies,
    seconds_per_iteration,
    should_scale,
)
from tests.builders.goodput_strategies import goodput_profiles, noise_scales

SIZES = [1, 2, 3, 4, 8, 16, 64]


@given(goodput_profiles())
def test_adapting_is_never_slower_than_a_fixed_batch(profile):
    fixed = fixed_seconds_per_iteration(profile, 4, SIZES)
    for gpus, seconds in seconds_per_iteration(profile, 4, SIZES).items():
        assert seconds <= fixed[gpus] * (1 + 1e-9)


@given(goodput_profiles())
def test_where_the_batch_may_not_grow_both_are_equal(profile):
    narrow = replace(profile, limits=replace(profile.limits, max=profile.limits.initial))
    assert seconds_per_iteration(narrow, 4, SIZES) == fixed_seconds_per_iteration(profile, 4, SIZES)


@given(goodput_profiles(), noise_scales)
def test_more_noise_is_never_slower(profile, other):
    less, more = (
        seconds_per_iteration(replace(profile, noise_scale=phi), 4, SIZES)
        for phi in sorted((profile.noise_scale, other))
    )
    assert all(more[gpus] <= less[gpus] * (1 + 1e-9) for gpus in SIZES)


@given(goodput_profiles(), st.sampled_from(SIZES))
def test_a_gang_grows_only_as_far_as_it_scales(profile, gpus):
    share = scaling_efficiencies(profile, 4, SIZES)
    size = scaled_size(profile, 4, SIZES, gpus)
    assert share[1] == pytest.approx(1.0)
    assert size >= gpus
    assert size == gpus or (should_scale(profile, 4, gpus) and share[size] >= LOWER)
    assert not should_scale(profile, 4, gpus) or all(share[larger] < LOWER for larger in SIZES if larger > size)
