"""Many simulated runs of asha at once are those of a plain simulation, trial by trial."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.planner.asha import drawn
from rubberband.planner.noise.asha_runs import simulate
from rubberband.spec.search import asha, sha
from rubberband.values.offer import Offer, Spot, slots
from rubberband.values.plan import Market, StagePlan, gang_sizes
from rubberband.values.profile import Profile, Spread
from tests.builders.asha_reference import PlainRun
from tests.builders.budget import examples

SAMPLES, PLANS = 3, 3


def random_offer(source: Random, market: Market) -> Offer:
    gpus = source.choice([1, 2, 4, 8])
    rate, every = source.choice([0.0, 1.0, 6.0]), source.choice([1, 3])
    spot = Spot(price_usd_per_hour=gpus, interruptions_per_hour=rate, checkpoint_iterations=every, restart_s=90.0)
    return Offer(
        instance_type="any",
        gpus=gpus,
        price_usd_per_hour=3.0 * gpus,
        max_instances=source.randint(1, 12),
        provision_delay_s=source.choice([0.0, 15.0, 60.0]),
        provision_spread=source.choice([Spread(), Spread(cv=0.4)]),
        init_delay_s=source.choice([0.0, 15.0, 33.0]),
        init_spread=source.choice([Spread(), Spread(samples=(0.5, 1.5))]),
        billing=source.choice(["per_instance", "per_instance", "per_function"]),
        minimum_billed_s=source.choice([0.0, 60.0, 600.0]),
        data_usd_per_instance=source.choice([0.0, 0.1]),
        head_price_usd_per_hour=source.choice([0.0, 1.0]),
        spot=spot if market == "spot" else None,
    )


@pytest.mark.parametrize("market", ["on_demand", "spot"])
@given(seed=st.integers(0, 10**9))
@settings(deadline=None, max_examples=examples(24))
def test_runs_side_by_side_are_those_of_a_plain_simulation(market: Market, seed: int) -> None:
    source = Random(seed)
    eta, trials = source.choice([2, 3, 4]), source.choice([source.randint(1, 12), source.randint(4, 40), 70])
    stage = asha(sha(trials, source.choice([1, 2]), source.choice([4, 9, 27]), eta), eta)
    assert stage.ladder is not None
    offer, noisy = random_offer(source, market), market == "spot" or source.random() < 0.7
    profile = Profile(
        seconds_per_iteration={
            gpus: source.uniform(5.0, 90.0) / gpus**0.8 if noisy else float(source.randint(1, 90))
            for gpus in range(1, 17)
        },
        trial_startup_s=source.choice([0.0, 2.0, 10.0]),
        trial_cv=0.2 * noisy,
        iteration_cv=source.choice([0.0, 0.3]) * noisy,
        startup_cv=source.choice([0.0, 0.5]) * noisy,
        mean_cv=0.05 * noisy,
    )
    draw = drawn(stage, profile, offer, SAMPLES + 1, (seed,))
    if source.random() < 0.5:  # results in a rung say nothing of those in the next
        rungs = np.repeat(draw.ranks, len(stage.ladder.totals), axis=0)
        draw = replace(draw, ranks=np.random.default_rng(seed).permuted(rungs, axis=2))
    plans = []
    for _ in range(PLANS):
        instances = source.randint(1, offer.max_instances)
        gangs = [gpus for gpus in gang_sizes(offer.gpus, 1, 16) if slots(instances, offer.gpus, gpus)]
        plans.append(StagePlan(instances=instances, gpus_per_trial=source.choice(gangs), market=market))
    samples = range(1, SAMPLES + 1)
    runs = simulate(stage, plans, profile, offer, draw, samples)
    for at, plan in enumerate(plans):
        for column, sample in enumerate(samples):
            plain = PlainRun(stage, plan, profile, offer, draw, sample)
            plain.to_end()
            reached = [plain.rung[trial] for trial in range(trials)]
            assert runs.rungs[at, column].tolist() == reached
            assert runs.jct_s[at, column] == pytest.approx(plain.now, rel=1e-6)
            assert runs.cost_usd[at, column] == pytest.approx(plain.cost_usd(), rel=1e-6)
