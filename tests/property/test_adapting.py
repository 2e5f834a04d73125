"""Profiles of trials that adapt their batch: never slower than a fixed one, quicker with more noise, kept by files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.planner.goodput.planning import adapted, at_noise_scale, fixed_seconds_per_iteration
from rubberband.spec.profile_file import GoodputWords
from rubberband.values.adaptive import BatchLimits, BatchPoint, GoodputProfile, Throughput
from rubberband.values.profile import Profile

SIZES = [1, 2, 3, 4, 8, 16]
seconds = st.floats(1e-5, 10.0)
throughputs = st.builds(
    Throughput,
    alpha_grad_s=seconds,
    beta_grad_s=st.floats(1e-7, 0.1),
    alpha_local_s=seconds | st.just(0.0),
    beta_local_s=st.floats(0.0, 0.1),
    alpha_node_s=seconds | st.just(0.0),
    beta_node_s=st.floats(0.0, 0.1),
    gamma=st.floats(1.0, 10.0),
)
limits = st.builds(
    lambda initial, growth, per_gpu, accumulation: BatchLimits(
        initial=initial, max=initial * growth, max_per_gpu=per_gpu, accumulation=accumulation
    ),
    st.integers(16, 512),
    st.integers(1, 64),
    st.none() | st.integers(1, 4096),
    st.booleans(),
)
points = st.builds(
    BatchPoint,
    instances=st.integers(1, 4),
    gpus=st.integers(1, 16),
    per_gpu=st.integers(1, 4096),
    accumulation=st.integers(0, 9),
    step_s=seconds,
)
models = st.builds(
    GoodputProfile,
    throughput=throughputs,
    noise_scale=st.floats(1.0, 1e7),
    samples_per_iteration=st.floats(1.0, 1e7),
    limits=limits,
    overhead_s=st.floats(0.0, 100.0),
    points=st.lists(points, max_size=5).map(tuple),
    fit_error=st.floats(0.0, 1.0),
)


@given(model=models, slower=st.lists(st.floats(0.2, 5.0), min_size=len(SIZES), max_size=len(SIZES)))
@settings(deadline=None)
def test_adapting_is_never_planned_slower_than_what_is_known_of_a_fixed_batch(
    model: GoodputProfile, slower: list[float]
) -> None:
    by_model = fixed_seconds_per_iteration(replace(model, points=()), 4, SIZES)
    table = {gpus: factor * by_model[gpus] for gpus, factor in zip(SIZES, slower, strict=True)}
    found = adapted(Profile(seconds_per_iteration=table, goodput=model), 4, SIZES)
    assert all(found.iteration_s(gpus) <= table[gpus] for gpus in SIZES)
    assert found.goodput == model


@given(model=models, factor=st.floats(1.0, 1000.0))
@settings(deadline=None)
def test_more_noise_makes_no_iteration_longer(model: GoodputProfile, factor: float) -> None:
    profile = adapted(Profile(seconds_per_iteration={1: 1e9}, goodput=model), 4, SIZES)
    later = at_noise_scale(profile, 4, factor * model.noise_scale)
    for gpus in SIZES:
        assert later.iteration_s(gpus) <= profile.iteration_s(gpus) * (1 + 1e-9)
        assert at_noise_scale(later, 4, model.noise_scale).iteration_s(gpus) == pytest.approx(profile.iteration_s(gpus))


@given(model=models)
def test_a_model_reads_back_from_its_words(model: GoodputProfile) -> None:
    assert GoodputWords.model_validate(json.loads(json.dumps(asdict(model)))).to_plain() == model
