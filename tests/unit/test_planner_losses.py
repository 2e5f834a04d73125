"""Spot instances that are lost: several times, in a replacement too, and between two stages."""

from __future__ import annotations

import numpy as np
import pytest

from rubberband.planner.exact.model import Rates
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.builders.plans import sample

RATE = 5.0 / 3600.0


def offer(restart_s: float = 90.0, **changes: float) -> Offer:
    spot = Spot(price_usd_per_hour=3.6, interruptions_per_hour=5.0, restart_s=restart_s)
    return Offer(instance_type="test", gpus=1, price_usd_per_hour=9.0, max_instances=8, spot=spot, **changes)


def times_s(instances: int, profile: Profile, prices: Offer, *stages: Stage) -> np.ndarray:
    choices = tuple(StagePlan(instances=instances, gpus_per_trial=1, market="spot") for _ in stages)
    return sample(stages, Plan(stages=choices), profile, prices).jct_s


def test_a_trial_that_never_passes_a_checkpoint_begins_anew_until_an_instance_lives_long_enough() -> None:
    """Mean time until one lives for d: (e^(rate d) - 1) (1/rate + wait)."""
    length_s, wait_s = 600.0, 90.0
    prices = offer(provision_delay_s=wait_s)
    found = times_s(1, Profile(seconds_per_iteration={1: length_s}), prices, Stage(trials=1, iterations=1))
    expected_s = wait_s + np.expm1(RATE * length_s) * (1.0 / RATE + wait_s)
    assert found.mean() == pytest.approx(expected_s, rel=0.02)


def test_work_that_a_checkpoint_holds_is_not_done_again() -> None:
    """With very short iterations a loss costs the wait alone."""
    found = times_s(1, Profile(seconds_per_iteration={1: 1e-2}), offer(), Stage(trials=1, iterations=60_000))
    assert found.mean() == pytest.approx(600.0 * (1.0 + RATE * 90.0), rel=0.01)


def test_a_trial_goes_on_at_once_on_an_idle_instance() -> None:
    profile, stage = Profile(seconds_per_iteration={1: 1e-2}), Stage(trials=1, iterations=60_000)
    assert times_s(3, profile, offer(), stage).mean() == pytest.approx(600.0, abs=1.0)


def test_a_stage_waits_for_what_was_lost_before_it_and_in_its_start() -> None:
    """Two instances of 300 s of INIT_INSTANCE: ready at once only if neither is lost meanwhile."""
    prices = offer(300.0, init_delay_s=300.0)
    found = times_s(2, Profile(seconds_per_iteration={1: 1e-3}), prices, Stage(trials=1, iterations=1))
    assert (found <= 300.1).mean() == pytest.approx(np.exp(-2 * RATE * 300.0), abs=0.01)
    short = Stage(trials=1, iterations=60_000)
    ready_s = times_s(2, Profile(seconds_per_iteration={1: 1e-2}), offer(), short).mean()
    both_s = times_s(2, Profile(seconds_per_iteration={1: 1e-2}), offer(), short, short).mean()
    # The other instance was lost in the last 90 s with 1 - e^-x, x = rate * 90 s: on average 90 s - (1 - e^-x) / rate.
    again_s = 90.0 - -np.expm1(-RATE * 90.0) / RATE
    assert both_s - 2.0 * ready_s == pytest.approx(again_s * (1.0 + RATE * 90.0), abs=1.5)


def test_a_lost_instance_is_not_billed_until_its_replacement_runs() -> None:
    rates = Rates.of(offer(provision_delay_s=72.0, data_usd_per_instance=0.5))
    usd_per_s, renewals = 3.6 / 3600.0, 1.0 / (1.0 + RATE * 72.0)
    assert rates.prices_usd_per_s["spot"] == pytest.approx((usd_per_s + RATE * 0.5) * renewals)
    assert rates.prices_usd_per_s["on_demand"] == pytest.approx(9.0 / 3600.0)
