"""What the judge is judged by: the executor's own runs on a virtual clock, and its terms as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import Controller, Job, VirtualBackend, bill_usd, brackets_of, drive, jct_s
from rubberband.executor import Noise as VirtualNoise
from rubberband.executor.virtual.backend import shuffled
from rubberband.planner.problem import JobPlan
from rubberband.values.offer import Offer
from rubberband.values.plan import Stage
from rubberband.values.profile import Profile, Spread
from tests.builders.memory import MemoryJournal
from tests.judge.cluster import Bools, Floats
from tests.judge.terms import Law, Noise, Step, Terms, Work


def job_of(brackets: Sequence[Sequence[Stage]], planned: JobPlan, offer: Offer, profile: Profile) -> Job:
    """Return the executor's job of a plan, which is carried out as it is."""
    several = len(brackets) > 1
    return Job(
        name="judged",
        stages=tuple(stage for lane in planned.lanes for stage in lane.stages),
        plan=planned.plan,
        prediction=planned.prediction,
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        brackets=brackets_of(brackets, [lane.brackets for lane in planned.lanes]),
        lane_instances=tuple(lane.max_instances for lane in planned.lanes) if several else (),
        replan=False,
    )


@dataclass(frozen=True, slots=True)
class VirtualRuns:
    """Virtual runs, shape (runs,)."""

    time_s: Floats
    cost_usd: Floats
    is_done: Bools
    """Whether it came to its end; a cap may stop it."""
    left_spot: Bools
    """Whether instances were bought on demand in place of spot ones: the simulation does not."""


def virtual_runs(job: Job, count: int, seed: object = 0) -> VirtualRuns:
    """Drive a job `count` times, each time in other weather; which trials are good is drawn too."""
    columns = list(zip(*[_virtual_run(job, f"{seed}/{number}") for number in range(count)], strict=True))
    return VirtualRuns(np.array(columns[0]), np.array(columns[1]), np.array(columns[2]), np.array(columns[3]))


def _virtual_run(job: Job, seed: str) -> tuple[float, float, bool, bool]:
    clock = VirtualClock()
    noise = VirtualNoise(job.profile, job.offer, seed=seed, now=clock.now)
    every = 1 if job.offer.spot is None else job.offer.spot.checkpoint_iterations
    backend = VirtualBackend(
        job.name,
        job.offer,
        job.profile,
        metric=job.metric,
        metric_of=shuffled(job.num_trials, seed),
        faults=noise,
        clock=clock,
        checkpoint_every=every,
    )
    controller = Controller(job)
    finish = drive(controller, backend, MemoryJournal())
    state = controller.state
    left_spot = any(record.instead_of_spot for record in state.instances.values())
    return jct_s(state, state.now), bill_usd(state, state.now), finish.outcome == "done", left_spot


_NEVER = 10**9


def plain(job: Job) -> tuple[Work, Terms, Noise]:
    """Return a job as the simulation takes it."""
    terms = terms_of(job.offer)
    if not job.profile.resumes:
        terms = replace(terms, checkpoint_iterations=_NEVER)
    terms = replace(terms, margin_s=job.release_margin_s, reserved_price=job.reserved_usd_per_hour)
    return _work(job), terms, noise_of(job.profile)


def _work(job: Job) -> Work:
    profile, rungs = job.profile, job.stages[0].rungs
    lanes: dict[int, list[Step]] = {}
    for bracket in job.all_brackets():
        for at in range(bracket.first_stage, bracket.end_stage):
            stage, choice = job.stages[at], job.plan.stages[at]
            lanes.setdefault(bracket.lane, []).append(
                Step(
                    trials=stage.trials,
                    iterations=stage.work,
                    instances=choice.instances,
                    gpus=choice.gpus_per_trial,
                    iteration_s=profile.iteration_s(choice.gpus_per_trial),
                    spot=choice.market == "spot",
                    begins=at == bracket.first_stage,
                )
            )
    work = Work(
        lanes=tuple(tuple(lanes[lane]) for lane in sorted(lanes)),
        startup_s=profile.trial_startup_s,
        quotas=job.lane_instances,
    )
    if job.has_sync:
        return work
    return replace(work, rungs=job.stages[0].rung_work, reduction=rungs.reduction_factor)


def terms_of(offer: Offer) -> Terms:
    """Return an offer as plain numbers."""
    spot, side = offer.spot, offer.side_usd_per_hour
    terms = Terms(
        gpus=offer.gpus,
        price=offer.price_usd_per_hour + side,
        provision_s=offer.provision_delay_s,
        provision=_law(offer.provision_spread),
        init_s=offer.init_delay_s,
        init=_law(offer.init_spread),
        per_function=offer.billing == "per_function",
        minimum_s=offer.minimum_billed_s,
        once_usd=offer.once_usd_per_instance,
        head_price=offer.head_price_usd_per_hour,
    )
    if spot is None:
        return terms
    return replace(
        terms,
        spot_price=spot.price_usd_per_hour + side,
        interruptions_per_hour=spot.interruptions_per_hour,
        checkpoint_iterations=spot.checkpoint_iterations,
    )


def _law(spread: Spread) -> Law:
    return Law(cv=spread.cv, samples=spread.samples)


def noise_of(profile: Profile) -> Noise:
    """Return a profile's noise as plain numbers."""
    is_normal = profile.law == "normal"
    return Noise(
        trial=Law(cv=profile.trial_cv, is_normal=is_normal),
        iteration=Law(cv=profile.iteration_cv, is_normal=is_normal),
        startup=Law(cv=profile.startup_cv),
        mean=Law(cv=profile.mean_cv),
    )
