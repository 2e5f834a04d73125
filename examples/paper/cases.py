"""Cases of the RubberBand paper (EuroSys '21): scaling curves, the instance, and plans.

Table 1 has the only throughputs that the paper prints; both curves start there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from rubberband.cloud.catalogue import catalogue
from rubberband.planner import JobPlan, Objective, Problem, plan, predict
from rubberband.spec.schedulers import sha
from rubberband.values.offer import Billing, Offer
from rubberband.values.plan import Plan, Planned, PlanningConstraints, Policy, Stage, StagePlan
from rubberband.values.profile import Profile

PLACED = {1: 749.58, 2: 1480.07, 4: 2773.04}
"""GPUs -> samples per second of ResNet-50 with placement control (Table 1)."""
SCATTERED = {1: 673.76, 2: 947.76, 4: 1209.51}
"""The same without placement control, which is the flatter curve."""
POLICIES: Mapping[str, Policy] = {"fixed": "static", "elastic": "optimal"}
MAX_GPUS_PER_TRIAL = 16


def undivided_share(samples_per_s: Mapping[int, float]) -> float:
    """Return the share of an iteration that more GPUs do not shorten (Amdahl's law), from the speed-up with 4 GPUs."""
    return (4.0 * samples_per_s[1] / samples_per_s[4] - 1.0) / 3.0


def profile(
    samples_per_s: Mapping[int, float],
    iteration_s: float,
    *,
    share: float | None = None,
    iteration_cv: float = 0.0,
    trial_cv: float = 0.0,
) -> Profile:
    """Return the seconds per iteration with 1 to 16 GPUs, `iteration_s` with one.

    1, 2 and 4 GPUs are as measured; beyond them (and everywhere, if `share` is given) Amdahl's law continues.
    """
    undivided = undivided_share(samples_per_s) if share is None else share
    seconds = {gpus: iteration_s * (undivided + (1.0 - undivided) / gpus) for gpus in (1, 2, 4, 8, 16)}
    if share is None:
        seconds |= {gpus: iteration_s * samples_per_s[1] / speed for gpus, speed in samples_per_s.items()}
    return Profile(seconds_per_iteration=seconds, law="normal", iteration_cv=iteration_cv, trial_cv=trial_cv)


def p3_8xlarge(
    *, max_instances: int, billing: Billing = "per_instance", init_delay_s: float = 0.0, data_usd: float = 0.0
) -> Offer:
    """Return the paper's instance at the catalogue's price; `data_usd` is for the data set of one instance."""
    row = catalogue()["p3.8xlarge"]
    return Offer(
        instance_type="p3.8xlarge",
        gpus=row.gpus,
        price_usd_per_hour=row.prices_usd_per_hour["us-east-1"],
        max_instances=max_instances,
        billing=billing,
        init_delay_s=init_delay_s,
        data_usd_per_instance=data_usd,
    )


def best(
    stages: Sequence[Stage],
    job_profile: Profile,
    offer: Offer,
    deadline_s: float | None,
    policy: Policy,
    objective: Objective = "min_cost",
) -> Planned | None:
    """Return the policy's best plan in time (if times vary, with a probability of one half); None without one."""
    limits = PlanningConstraints(deadline_s=deadline_s, max_gpus_per_trial=MAX_GPUS_PER_TRIAL, confidence=0.5)
    problem = Problem(
        brackets=(stages,), profile=job_profile, offer=offer, constraints=limits, policy=policy, objective=objective
    )
    found = plan(problem)
    return found.lanes[0].planned if isinstance(found, JobPlan) else None


def of_stages(choices: Iterable[tuple[int, int]]) -> Plan:
    return Plan(stages=tuple(StagePlan(instances=count, gpus_per_trial=gpus) for count, gpus in choices))


STAGES = sha(32, 1, 50, 3)
PAPER_PLAN = of_stages(((8, 1), (5, 2), (4, 4), (2, 8)))
PAPER_JCT_S, PAPER_USD, PAPER_FIXED = 18 * 60.0 + 56.0, 15.68, 6
"""Table 2, RubberBand within 20 minutes (simulated); and the best static cluster that the text names."""
INIT_S = 15.0


def warm() -> Offer:
    """Return at most 128 instances: the 512 GPUs that the paper names for Table 2."""
    return p3_8xlarge(max_instances=128, init_delay_s=INIT_S)


@cache
def resnet101(share: float | None = None) -> Profile:
    """Return the seconds per epoch, by Table 1's scaling or Amdahl's law with `share`.

    The time with one GPU is the one at which Table 3's plan takes Table 2's JCT.
    """
    per_second = predict(STAGES, PAPER_PLAN, profile(PLACED, 1.0, share=share), warm()).jct_s - INIT_S
    return profile(PLACED, (PAPER_JCT_S - INIT_S) / per_second, share=share)
