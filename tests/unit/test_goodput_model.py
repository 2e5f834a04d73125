"""The equations of Pollux by hand: time of a step, efficiency, gain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rubberband.planner.goodput import combined_s, efficiency, gain, grad_s, step_s, sync_s
from rubberband.values.adaptive import Throughput

MODEL = Throughput(
    alpha_grad_s=1.0,
    beta_grad_s=0.5,
    alpha_local_s=2.0,
    beta_local_s=0.1,
    alpha_node_s=5.0,
    beta_node_s=0.2,
    gamma=2.0,
)


def test_a_pass_has_a_constant_and_a_slope():
    assert grad_s(MODEL, np.asarray([0, 1, 6])).tolist() == [1.0, 1.5, 4.0]


@pytest.mark.parametrize(
    ("instances", "gpus", "seconds"), [(1, 1, 0.0), (1, 2, 2.0), (1, 4, 2.2), (2, 2, 5.0), (2, 8, 6.2)]
)
def test_synchronising_depends_on_where_the_gpus_are(instances, gpus, seconds):
    assert sync_s(MODEL, instances, gpus) == pytest.approx(seconds)


def test_a_step_synchronises_in_its_last_pass_only():
    assert step_s(MODEL, 1, 2, 1, 0) == pytest.approx(math.hypot(1.5, 2.0))
    assert step_s(MODEL, 1, 2, 1, 3) == pytest.approx(3 * 1.5 + math.hypot(1.5, 2.0))


def test_functions_broadcast():
    gpus, per_gpu = np.asarray([1, 2, 4])[:, None], np.asarray([8, 16])
    assert step_s(MODEL, 1, gpus, per_gpu, 0).shape == (3, 2)
    assert efficiency(np.asarray([1.0, 2.0])[:, None], 8, per_gpu).shape == (2, 2)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("gamma", [1.0, 3.0, 10.0])
def test_combining_neither_underflows_nor_overflows(scale, gamma):
    expected = (3.0**gamma + 4.0**gamma) ** (1 / gamma)
    assert combined_s(3.0 * scale, 4.0 * scale, gamma) / scale == pytest.approx(expected)
    assert combined_s(0.0, 0.0, gamma) == 0.0


@pytest.mark.parametrize(("noise_scale", "worth"), [(0.0, 1 / 8), (64.0, 2 / 9), (384.0, 1 / 2), (math.inf, 1.0)])
def test_efficiency_by_hand(noise_scale, worth):
    assert efficiency(noise_scale, 64, 512) == pytest.approx(worth)
    assert efficiency(noise_scale, 64, 64) == 1.0


def test_gain_is_adascales():
    initial, batch_size, trace, squared_norm = 64, 512, 300.0, 0.7
    variance, scale = trace / initial, batch_size / initial
    adascale = (variance + squared_norm) / (variance / scale + squared_norm)
    assert gain(trace / squared_norm, initial, batch_size) == pytest.approx(adascale)
