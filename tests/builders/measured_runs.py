"""A run of which a test says what its iterations took."""

from __future__ import annotations

import dataclasses

from rubberband.executor import Controller, GangRun, Slot, State, TrialReport
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile
from tests.builders.jobs import JOB

OFFER = Offer(
    instance_type="test", gpus=4, price_usd_per_hour=3.6, max_instances=4, provision_delay_s=60.0, init_delay_s=30.0
)


PROFILE = Profile(seconds_per_iteration={1: 10.0, 2: 6.0, 4: 4.0}, trial_startup_s=5.0)


def seen(steps_s: dict[int, list[list[float]]], startup_s: float = 5.0, profile: Profile = PROFILE) -> State:
    """A run of which, for each gang size, trials took these seconds for their iterations."""
    job = dataclasses.replace(JOB, profile=profile, offer=OFFER)
    state = Controller(job).state
    trials = state.trials
    for gpus, every in steps_s.items():
        for steps in every:
            if len(state.allocations) >= len(trials):
                trials.append(dataclasses.replace(trials[0], trial=len(trials), reports=[]))
            trial = trials[len(state.allocations)]
            at = 100.0 + startup_s
            gang = tuple(Slot(instance="i-001", gpu=gpu) for gpu in range(gpus))
            state.allocations.append(
                GangRun(trial=trial.trial, attempt=1, stage=0, gang=gang, started_at=100.0, training_at=at)
            )
            for number, step in enumerate(steps, start=1):
                at += step
                trial.reports.append(TrialReport(reported_at=at, iterations=number, metrics={}, stage=0))
            state.allocations[-1].ended_at = at
    return state
