"""From an experiment and its profile to the job that is run: the plan, and the settings of its controller."""

from __future__ import annotations

import time
from dataclasses import replace

from rubberband.app.affordable import CasesLeft, Profiles, RunPlanner, dearest
from rubberband.app.cases import Room, Spent, stand_in_speeds
from rubberband.cloud.catalogue import Table, types_of
from rubberband.cloud.start_limits import start_limits
from rubberband.errors import InfeasibleError, InputError
from rubberband.executor.core.state import Job, brackets_of
from rubberband.planner.brackets import JobPlan
from rubberband.planner.estimate import Case
from rubberband.spec.experiment import Experiment
from rubberband.values.plan import Policy

START_ATTEMPTS = 3
"""A run stops buying for now after this number of instances in a row that never became ready."""
HUNG_REPLACEMENTS = 3
"""A run replaces at most this number of instances since trials hung on them."""


def plan_job(
    experiment: Experiment,
    profiles: Profiles,
    policy: Policy = "optimal",
    *,
    spent: Spent | None = None,
    table: Table | None = None,
    room: Room | None = None,
    most_usd: float | None = None,
    now: float | None = None,
) -> Job:
    """Return the job of an experiment that starts now, planned on the best of its instance types.

    `profiles` is one for all types, or type -> profile; `table` and `room` are those of `rubberband.app.cases.cases`.
    `now` is Unix time. Raises InfeasibleError if no plan meets the constraints; its remedies cost at most `most_usd`.
    """
    if experiment.constraints.spend is not None and policy != "optimal":
        raise InputError(
            f"constraints.spend: remaining plans again at every SYNC, and the policy {policy} does not; use the policy "
            "optimal, or leave it out"
        )
    used = spent or Spent()
    cases_of = CasesLeft(profiles, used, time.time() if now is None else now, table, room)
    options = cases_of(experiment)
    planner = RunPlanner.of(experiment, policy, options)
    try:
        narrowed, planned = planner.affordable(options)
    except InfeasibleError as error:
        raise planner.advised(error, cases_of, used, most_usd) from None
    case = next(case for case in options if case.offer.instance_type == narrowed.offer.instance_type)
    job = _job(experiment, case, planned, policy, dearest(experiment, options))
    return replace(job, speeds=stand_in_speeds(experiment, case, options))


def _job(
    experiment: Experiment, case: Case, planned: JobPlan, policy: Policy, dearest_usd_per_hour: float | None
) -> Job:
    constraints = case.constraints
    brackets = brackets_of(experiment.brackets(), [lane.brackets for lane in planned.lanes])
    return Job(
        name=experiment.name,
        stages=tuple(stage for lane in planned.lanes for stage in lane.stages),
        plan=planned.plan,
        prediction=planned.prediction,
        offer=case.offer,
        profile=case.profile,
        metric=experiment.search.metric,
        mode=experiment.search.mode,
        deadline_s=constraints.deadline_s,
        deadline_at=None if experiment.resources.kind.is_simulated else experiment.constraints.deadline_at,
        max_cost_usd=constraints.max_cost_usd,
        max_failures=experiment.constraints.max_failures,
        iteration_timeout_s=experiment.constraints.iteration_timeout_s,
        release_margin_s=experiment.resources.kind.release_margin_s,
        replan=policy == "optimal" and planned.lanes[0].stages[0].ladder is None,
        objective=experiment.constraints.objective,
        min_gpus_per_trial=constraints.min_gpus_per_trial,
        max_gpus_per_trial=constraints.max_gpus_per_trial,
        confidence=constraints.confidence,
        dearest_usd_per_hour=dearest_usd_per_hour,
        lease_s=None if experiment.resources.kind.is_simulated else experiment.resources.lease_length_s,
        boot_lease_s=_boot_lease_s(experiment),
        start_attempts=START_ATTEMPTS,
        hung_replacements=HUNG_REPLACEMENTS,
        draws=experiment.search.sampler.learns,
        brackets=brackets,
        lane_instances=tuple(lane.max_instances for lane in planned.lanes) if brackets else (),
        balances=experiment.batch.balance.policy != "equal",
        widening=None if experiment.constraints.spend is None else experiment.search.widening(),
    )


def _boot_lease_s(experiment: Experiment) -> float | None:
    """Return the lease of an instance while it starts; None: the usual one."""
    resources = experiment.resources
    if not resources.kind.is_rented or resources.pool is not None:  # what boots for a pool is its own
        return None
    return start_limits(types_of(resources), resources.init_delay_s).lease_s
