"""The estimators' algebra: unbiased for any sizes of the parts, and never a phi that is infinite or negative."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor.training.noise_scale import NoiseEstimate, NoiseScale, moments

sizes = st.lists(st.integers(1, 500), min_size=2, max_size=6)
coordinates = st.floats(-10.0, 10.0)


@given(sizes=sizes, gradient=coordinates, spread=st.floats(0.1, 10.0))
def test_unbiased_over_all_equally_likely_outcomes(sizes, gradient, spread):
    """Noise of plus or minus one standard error in each part: the mean over all signs is the expectation."""
    batch_size = sum(sizes)
    weights = np.array(sizes) / batch_size
    found = []
    for signs in itertools.product((-1.0, 1.0), repeat=len(sizes)):
        parts = gradient + spread * np.array(signs) / np.sqrt(sizes)
        mean_square, square_of_mean = float(weights @ parts**2), float(weights @ parts) ** 2
        found.append(moments(mean_square, square_of_mean, num_parts=len(sizes), batch_size=batch_size))
    trace, squared_norm = np.mean(found, axis=0)
    assert trace == pytest.approx(spread**2, rel=1e-9)
    assert squared_norm == pytest.approx(gradient**2, rel=1e-9, abs=1e-9 * spread**2)


@given(sizes=sizes, data=st.data())
def test_the_trace_is_never_negative(sizes, data):
    parts = np.array(data.draw(st.lists(coordinates, min_size=len(sizes), max_size=len(sizes))))
    weights = np.array(sizes) / sum(sizes)
    mean_square, square_of_mean = float(weights @ parts**2), float(weights @ parts) ** 2
    trace, _ = moments(mean_square, square_of_mean, num_parts=len(sizes), batch_size=sum(sizes))
    assert trace >= -1e-9 * mean_square * sum(sizes)


values = st.floats(allow_nan=True, allow_infinity=True, width=32)
estimates = st.builds(
    NoiseEstimate,
    kind=st.sampled_from(["workers", "accumulation", "differenced"]),
    preconditioner=st.sampled_from(["identity", "adam"]),
    steps=st.floats(0.01, 1000.0),
    trace=st.one_of(values, st.floats(0.0, 100.0)),
    squared_norm=st.one_of(values, st.floats(-10.0, 10.0)),
)


@given(st.lists(estimates, max_size=40))
def test_phi_is_finite_for_any_input(history):
    scale = NoiseScale()
    for estimate in history:
        scale.add(estimate)
        reading = scale.reading()
        if reading.noise_scale is not None:
            assert math.isfinite(reading.noise_scale)
            assert reading.noise_scale >= 0.0
            assert reading.uncertainty >= 0.0


@given(st.lists(estimates, max_size=30), st.lists(estimates, max_size=30))
def test_a_state_resumes_where_it_was(before, after):
    scale, other = NoiseScale(), NoiseScale()
    for estimate in before:
        scale.add(estimate)
    scale.reading()
    other.load_state_dict(scale.state_dict())
    for estimate in after:
        scale.add(estimate)
        other.add(estimate)
    assert repr(scale.reading()) == repr(other.reading())
