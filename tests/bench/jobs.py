"""Jobs that the benchmarks of the planner plan: the speed cases, and random ones by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from rubberband.errors import InfeasibleError
from rubberband.spec.schedulers import sha
from rubberband.values.offer import Billing, Offer
from rubberband.values.plan import PlanningConstraints, Policy, Stage
from rubberband.values.profile import Profile
from tests.builders.plans import plan

ITERATION_S = {1: 110.0, 2: 57.0, 4: 30.0, 8: 18.0, 16: 13.0, 32: 11.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    stages: tuple[Stage, ...]
    profile: Profile
    offer: Offer
    limits: PlanningConstraints


def p3_8xlarge(max_instances: int, billing: Billing = "per_instance") -> Offer:
    """The 4-GPU instance of the experiment file."""
    return Offer(
        instance_type="p3.8xlarge",
        gpus=4,
        price_usd_per_hour=12.24,
        max_instances=max_instances,
        provision_delay_s=15.0,
        init_delay_s=15.0,
        billing=billing,
    )


def profile(speed_up: float) -> Profile:
    """The profile of the experiment file, `speed_up` times as fast."""
    return Profile(
        seconds_per_iteration={gpus: seconds / speed_up for gpus, seconds in ITERATION_S.items()}, trial_startup_s=2.0
    )


def paper_job(speed_up: float = 27.5, max_instances: int = 32) -> BenchJob:
    """SHA(64,4,508,2) within 20 minutes."""
    return BenchJob(
        stages=sha(64, 4, 508, 2),
        profile=profile(speed_up),
        offer=p3_8xlarge(max_instances),
        limits=PlanningConstraints(deadline_s=1200.0, max_gpus_per_trial=16),
    )


def random_job(source: random.Random) -> BenchJob:
    """A job of up to 64 trials, with a deadline between the shortest time and three times that."""
    gpus = source.choice([1, 2, 4, 8])
    single_s, efficiency = source.uniform(5.0, 120.0), source.uniform(0.5, 1.0)
    fast = Profile(
        seconds_per_iteration={count: single_s / count**efficiency for count in (1, 2, 4, 8, 16)},
        trial_startup_s=source.choice([0.0, 2.0, 10.0]),
    )
    offer = Offer(
        instance_type="random",
        gpus=gpus,
        price_usd_per_hour=3.06 * gpus,
        max_instances=source.randint(max(1, 8 // gpus), 128 // gpus),
        provision_delay_s=source.choice([0.0, 15.0, 120.0]),
        init_delay_s=source.choice([0.0, 15.0, 120.0]),
        billing=source.choice(["per_instance", "per_instance", "per_function"]),
        minimum_billed_s=source.choice([0.0, 60.0]),
        data_usd_per_instance=source.choice([0.0, 0.0, 0.1]),
        head_price_usd_per_hour=source.choice([0.0, 0.2]),
    )
    eta = source.choice([2, 3, 4])
    stages = sha(source.randint(4, 64), source.choice([1, 2, 4]), source.choice([27, 50, 81]), eta)
    open_limits = PlanningConstraints(max_gpus_per_trial=source.choice([4, 8]))
    shortest_s = plan(stages, fast, offer, open_limits, objective="min_time").prediction.jct_s
    limits = replace(open_limits, deadline_s=source.uniform(1.0, 3.0) * shortest_s)
    return BenchJob(stages=stages, profile=fast, offer=offer, limits=limits)


def cost_usd(job: BenchJob, policy: Policy) -> float | None:
    """What a policy's plan costs, None if it has none."""
    try:
        return plan(job.stages, job.profile, job.offer, job.limits, policy).prediction.cost_usd
    except InfeasibleError:
        return None
