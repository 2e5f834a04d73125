"""Choices of a batch by hand: ties, memory, accumulation, least shares, refusals, hysteresis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rubberband.planner.goodput import better, candidates, choose, choose_at, choose_many
from rubberband.values.adaptive import BatchLimits, Throughput

MODEL = Throughput(
    alpha_grad_s=0.02,
    beta_grad_s=0.0002,
    alpha_local_s=0.05,
    beta_local_s=0.002,
    alpha_node_s=0.1,
    beta_node_s=0.003,
    gamma=1.5,
)
LIMITS = BatchLimits(initial=128, max=4096, max_per_gpu=256)


def test_without_noise_a_larger_batch_is_worth_nothing():
    free = replace(MODEL, beta_grad_s=0.0)
    assert choose(free, 0.0, LIMITS, 1, 4).batch_size == 128


def test_with_endless_noise_the_batch_is_the_largest():
    found = choose(MODEL, float("inf"), LIMITS, 1, 4)
    assert (found.batch_size, found.per_gpu, found.accumulation) == (4096, 256, 3)
    assert found.efficiency == 1.0


def test_more_gpus_and_more_noise_take_a_larger_batch():
    sizes = [[choose(MODEL, phi, LIMITS, 1, gpus).batch_size for gpus in (1, 4)] for phi in (300.0, 3000.0)]
    assert sizes[0][0] < sizes[0][1] < sizes[1][1]
    assert sizes[0][0] < sizes[1][0]


def test_a_batch_beyond_the_memory_is_accumulated():
    found = choose_at(MODEL, 1000.0, LIMITS, 1, 2, 1000)
    assert (found.per_gpu, found.accumulation) == (250, 1)


def test_the_initial_batch_is_accumulated_even_where_larger_ones_may_not_be():
    limits = BatchLimits(initial=128, max=4096, max_per_gpu=20, accumulation=False)
    found = choose(MODEL, 1e6, limits, 1, 4)
    assert (found.batch_size, found.per_gpu, found.accumulation) == (128, 16, 1)
    assert candidates(limits, 4).batch_size.tolist() == [128]


def test_without_accumulation_the_largest_batch_is_the_one_that_fits():
    assert choose(MODEL, 1e9, replace(LIMITS, accumulation=False), 1, 4).batch_size == 1024


def test_every_gpu_gets_what_it_needs():
    found = choose(MODEL, 0.0, BatchLimits(initial=4, max=64), 1, 8, least_per_gpu=2)
    assert (found.batch_size, found.per_gpu) == (16, 2)


@pytest.mark.parametrize(
    ("limits", "gpus", "message"),
    [
        (BatchLimits(initial=8, max=30), 16, r"16 GPUs with at least 2 samples .* batch.max to 32, or use at most 15"),
        (BatchLimits(initial=8, max=64, max_per_gpu=1), 2, "max_per_gpu=1 is less than the 2 samples"),
        (BatchLimits(initial=7, max=7, max_per_gpu=2), 3, "no batch of 7 to 7 samples can be split on 3 GPUs"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(limits, gpus, message):
    with pytest.raises(ValueError, match=message):
        choose(MODEL, 100.0, limits, 1, gpus, least_per_gpu=2)
    with pytest.raises(ValueError, match=message):
        choose_many(MODEL, 100.0, limits, np.asarray([1]), np.asarray([gpus]), least_per_gpu=2)


def test_an_unknown_noise_scale_keeps_the_initial_batch():
    assert choose(MODEL, float("nan"), LIMITS, 1, 4).batch_size == 128


@pytest.mark.parametrize(("current", "worth"), [(128, False), (122, False), (121, True), (134, False), (135, True)])
def test_small_changes_are_not_worth_making(current, worth):
    found = choose_at(MODEL, 100.0, LIMITS, 1, 1, 128)
    assert better(current, found) == worth
