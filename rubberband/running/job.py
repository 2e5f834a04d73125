"""The job of a run, made of a planned experiment."""

from __future__ import annotations

from dataclasses import replace

from rubberband.cloud.catalogue import boot_timeouts, types_of
from rubberband.executor.core.job import Job, brackets_of
from rubberband.planning.candidates import stand_in_speeds
from rubberband.planning.feasible import PlannedExperiment
from rubberband.spec.experiment import Experiment
from rubberband.spec.program import Program
from rubberband.values.plan import Spent
from rubberband.values.profile import Profile

START_ATTEMPTS = 3
"""A run stops buying for now after this number of instances in a row that never became ready."""
HUNG_REPLACEMENTS = 3
"""A run replaces at most this number of instances since trials hung on them."""


def job_of(found: PlannedExperiment, spent: Spent, submitted_at: float | None = None) -> Job:
    """Return the job of an experiment that starts now. Raises InfeasibleError if no plan keeps its limits.

    `submitted_at` is the Unix time of its submission to a service; None: run by hand.
    """
    chosen, experiment, problem = found.job, found.experiment, found.estimate.problem
    constraints, resources = problem.constraints, experiment.resources
    kind = resources.kind
    assert problem.reserve is not None, "the candidates of an experiment have one"
    brackets = brackets_of(experiment.brackets(), [lane.brackets for lane in chosen.lanes])
    return Job(
        name=experiment.name,
        stages=tuple(stage for lane in chosen.lanes for stage in lane.stages),
        plan=chosen.plan,
        prediction=chosen.prediction,
        offer=problem.offer,
        profile=_profile_of_starts(experiment, problem.profile),
        metric=experiment.search.metric,
        mode=experiment.search.mode,
        repeats=experiment.search.repeats,
        keep_best=resources.keep == "best",
        limits=experiment.search.limits,
        deadline_s=constraints.deadline_s,
        deadline_at=None if kind.is_simulated else experiment.constraints.deadline_at,
        max_cost_usd=constraints.max_cost_usd,
        max_failures=experiment.constraints.max_failures,
        iteration_timeout_s=experiment.constraints.iteration_timeout_s,
        release_margin_s=problem.reserve.margin_s,
        replan=found.estimate.policy == "optimal" and problem.has_sync,
        objective=experiment.constraints.objective,
        min_gpus_per_trial=constraints.min_gpus_per_trial,
        max_gpus_per_trial=constraints.max_gpus_per_trial,
        gpus_per_trial_sizes=constraints.gpus_per_trial_sizes,
        confidence=constraints.confidence,
        highest_price_usd_per_hour=problem.reserve.highest_price_usd_per_hour,
        lease_s=None if kind.is_simulated else resources.lease_length_s,
        boot_lease_s=boot_timeouts(types_of(resources), resources.init_delay_s).lease_s if resources.rents else None,
        start_attempts=START_ATTEMPTS,
        hung_replacements=HUNG_REPLACEMENTS,
        draws=experiment.search.sampler.learns,
        brackets=brackets,
        lane_instances=tuple(lane.max_instances for lane in chosen.lanes) if brackets else (),
        balances=experiment.gains_from_mixtures,
        speeds=stand_in_speeds(experiment, problem, found.candidates),
        resize_in_stage=experiment.constraints.resize_in_stage,
        keeps_width=experiment.training.mode == "async",
        profiling_s=spent.seconds,
        submitted_at=_on_clock(submitted_at, experiment, constraints.deadline_s),
        stop=experiment.search.stop_rules,
        trains=not kind.is_simulated,
    )


def _on_clock(submitted_at: float | None, experiment: Experiment, deadline_s: float | None) -> float | None:
    """Return the submission (Unix time) on the clock of its run; None without a deadline that is an instant."""
    deadline_at = experiment.constraints.deadline_at
    if submitted_at is None or deadline_at is None or deadline_s is None:
        return None
    return submitted_at - (deadline_at - deadline_s) if experiment.resources.kind.is_simulated else submitted_at


def _profile_of_starts(experiment: Experiment, profile: Profile) -> Profile:
    """Return the profile with the part of a start that passes within the first iteration."""
    if experiment.resources.kind.is_simulated:  # the start is whole before
        return replace(profile, first_iteration_extra_s=0.0, cold_iteration_extra_s=0.0)
    if isinstance(experiment.entrypoint, Program) and profile.first_iteration_extra_s == 0.0:
        return replace(profile, first_iteration_extra_s=profile.trial_startup_s)  # its imports, before it reports
    return profile
