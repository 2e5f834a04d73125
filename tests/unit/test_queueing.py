"""Throughput of asynchronous training: the published example, planning with it, and calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubberband.planner.queueing import (
    Network,
    blended,
    calibrated,
    curve,
    exact,
    highest,
    knee,
    scaled,
    seconds_per_iteration,
    with_servers,
)
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes
from rubberband.values.profile import Profile
from tests.builders.parameter_server import first_come, hybrid

TIMES = AsyncTimes(compute_s=0.029, up_s=0.072, server_s=0.018, down_s=0.072)
EXAMPLE = Network(delay_s=0.029, up_s=0.072, server_s=0.018, down_s=0.072)
"""The model of 8 MB (Lin et al., §3.2)."""
MODEL = AsyncProfile(times=TIMES, updates_per_iteration=100)


def profile(seconds: dict[int, float], model: AsyncProfile = MODEL) -> Profile:
    return Profile(seconds_per_iteration=seconds, asynchronous=model)


@pytest.mark.parametrize("form", [exact, first_come, hybrid, highest, lambda *given: blended(*given, 0.7)])
def test_a_worker_alone_does_not_wait(form):
    assert form(EXAMPLE, 1)[0] == pytest.approx(5.2356, abs=1e-4)


def test_the_example_has_the_known_values():
    found = exact(EXAMPLE, 100)
    assert [found[3], found[9], found[99]] == pytest.approx([10.6430, 12.5357, 13.7504], abs=1e-4)
    assert highest(EXAMPLE, 100)[99] == pytest.approx(13.889, abs=1e-3)


def test_more_servers_do_not_speed_up_a_workers_own_link():
    two = curve(replace(MODEL, servers=2), 50)
    assert two.point[0] == pytest.approx(1.0 / TIMES.update_s)
    assert two.high[-1] == pytest.approx(2.0 / 0.072)


def test_servers_divide_the_time_at_the_server_and_on_its_links():
    two = with_servers(MODEL, 2)
    assert two.times.server_s == pytest.approx(0.009)
    assert with_servers(two, 1) == MODEL
    uneven = replace(MODEL, servers=2, largest_shard=0.75)
    assert with_servers(uneven, 3).times.server_s == pytest.approx(0.018 / 0.75 / 3)


def test_the_largest_shard_bounds_the_throughput():
    uneven = curve(replace(MODEL, servers=3, largest_shard=0.6), 50)
    assert uneven.high[-1] == pytest.approx(1.0 / (0.6 * 0.072))


def test_the_knee_is_the_last_worker_worth_its_place():
    point = curve(MODEL, 20).point
    found = knee(MODEL)
    assert 1.0 - point[found - 2] / point[found - 1] >= 0.05 > 1.0 - point[found - 1] / point[found]


def test_a_server_that_never_waits_has_no_knee():
    alone = replace(MODEL, times=AsyncTimes(compute_s=1.0, up_s=0.0, server_s=0.0, down_s=0.0))
    assert knee(alone, 10) == 10
    assert curve(alone, 3).point == pytest.approx([1.0, 2.0, 3.0])


@pytest.mark.parametrize("blend", [0.0, 0.25, 0.8, 1.0])
def test_an_observation_shows_the_blend(blend):
    seen = float(blended(EXAMPLE, 2, blend)[1])
    assert calibrated(MODEL, {2: seen}).blend == pytest.approx(blend, abs=0.002)


@pytest.mark.parametrize(("seen", "blend"), [(1.0, 0.0), (100.0, 1.0)])
def test_outside_the_band_the_nearer_end_is_taken(seen, blend):
    assert calibrated(MODEL, {2: seen}).blend == blend


def test_a_single_worker_does_not_show_the_blend():
    assert calibrated(MODEL, {1: 5.0}).blend is None
    assert calibrated(replace(MODEL, blend=0.2), {}).blend == 0.2


def test_an_iteration_is_its_updates_and_its_overhead():
    table = seconds_per_iteration(replace(MODEL, overhead_s=3.0, blend=0.0), [1, 4])
    assert table == pytest.approx({1: 100 * 0.191 + 3.0, 4: 100 / 10.6430 + 3.0 / 4}, rel=1e-5)


def test_no_iteration_is_shorter_than_its_overhead():
    assert seconds_per_iteration(replace(MODEL, overhead_s=30.0), [8]) == {8: 30.0}


def test_measured_times_stay_and_others_follow_from_the_model():
    found = scaled(profile({1: 21.01}), [1, 2, 4])  # 10 % slower than the times of its updates
    modelled = seconds_per_iteration(MODEL, [2, 4])
    assert found.seconds_per_iteration == pytest.approx({1: 21.01, 2: 1.1 * modelled[2], 4: 1.1 * modelled[4]})
    assert found.asynchronous == MODEL


def test_a_measured_gang_calibrates_the_others():
    truth = replace(MODEL, blend=0.9)
    known = seconds_per_iteration(truth, [1, 2, 8])
    found = scaled(profile({1: known[1], 2: known[2]}), [1, 2, 4, 8])
    assert found.seconds_per_iteration[8] == pytest.approx(known[8], rel=1e-3)
    assert found.asynchronous is not None
    assert found.asynchronous.blend == pytest.approx(0.9, abs=0.002)
