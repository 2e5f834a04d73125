"""Jobs and results with something of their own to show: adaptive batches, unequal workers, spot, brackets, slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rubberband.cloud.virtual import InstanceFaults
from rubberband.executor import Faults, Job, Result, VirtualBackend, summarise
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Spot
from rubberband.values.plan import Plan, StagePlan
from tests.builders.adaptive_runs import adaptive_result
from tests.builders.brackets import divided
from tests.builders.results import UPDATES, a_job, a_result, configurations
from tests.builders.timed_requests import extend
from tests.builders.virtual_runs import run_virtual
from tests.builders.watching import watch

UNEQUAL = a_job(
    plan=Plan(stages=tuple(StagePlan(instances=n, gpus_per_trial=g) for n, g in ((2, 1), (2, 2), (2, 4)))),
    profile=replace(a_job().profile, seconds_per_iteration={1: 10.0, 2: 6.0, 4: 4.0}),
)
SLOW = Faults(slow={"i-002": 3.0})
"""The last stage's only trial is on both instances, one of which is slow."""
SLOTS = replace(a_job(replan=True), offer=replace(a_job().offer, place="slot"))
TAKEN = Faults(
    instance_faults={
        "i-001": InstanceFaults(price_usd_per_hour=0.13),
        "i-002": InstanceFaults(ends_after_s=20.0, preempted=True),
        "i-003": InstanceFaults(ends_after_s=31.0, preempted=True, notice_s=1.0),
    }
)
EXTENSIONS = (extend(60.0, deadline_s=1800.0, max_cost_usd=2.5), extend(80.0, "r-2", deadline_s=2400.0))


def planned(job: Job, *chosen: StagePlan) -> Job:
    plan = Plan(stages=chosen)
    return replace(job, plan=plan, prediction=predict(job.stages, plan, job.profile, job.offer))


def spot_job() -> Job:
    job = a_job(offer=replace(a_job().offer, spot=Spot(price_usd_per_hour=0.12, interruptions_per_hour=0.05)))
    on_spot = [StagePlan(instances=n, gpus_per_trial=1, market="spot") for n in (3, 2)]
    return planned(job, *on_spot, StagePlan(instances=1, gpus_per_trial=2))


def straggling_job() -> Job:
    """Its last stage is long enough that a slow instance is replaced."""
    stages = (*UNEQUAL.stages[:2], replace(UNEQUAL.stages[2], iterations=60))
    return replace(UNEQUAL, objective="min_time", stages=stages)


STRAGGLER = Faults(slow={"i-002": 9.0}, slow_from=150.0)


def bracket_job() -> Job:
    job = divided([2, 1, 1], [1])
    offer = replace(job.offer, provision_delay_s=0.0, head_price_usd_per_hour=0.36)
    cost_usd = job.prediction.cost_usd + offer.head_cost_usd(30.0)
    return replace(job, offer=offer, prediction=replace(job.prediction, jct_s=40.0, cost_usd=cost_usd))


def bracket_result() -> Result:
    controller, _, _ = run_virtual(bracket_job())
    configured = {"configurations": [{"x": trial} for trial in range(controller.job.num_trials)]}
    return summarise(controller.state, configured, controller.state.now)


def extended_result() -> Result:
    return _watched(a_job(), requests=EXTENSIONS)


def replanned_result() -> Result:
    """A run that is half as fast as profiled, and begins with too few instances."""
    job = a_job(replan=True, deadline_s=150.0, max_gpus_per_trial=2)
    first, second, third = job.plan.stages
    job = planned(job, first, replace(second, instances=1), third)
    return _watched(job, backend=VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, slowdown=1.5))


def _watched(job: Job, **watched: object) -> Result:
    seen: list[Result] = []

    def look(event: object, controller: object) -> None:
        state = controller.state  # type: ignore[attr-defined]
        seen[:] = [summarise(state, configurations(job), state.now)]

    watch(job, [look], **watched)  # type: ignore[arg-type]
    return seen[-1]


def asynchronous_result() -> Result:
    """As if the best trial had been trained by updates, with one worker and with two."""
    result = a_result()
    uses = tuple(replace(UPDATES, max_staleness=most, updates=number) for most, number in ((4, 50), (9, 10), (2, 5)))
    best = replace(result.trials[0], updates=(*uses, replace(UPDATES, workers=1, lost=0)))
    return replace(result, trials=(best, *result.trials[1:]), best=best)


SPECIAL_RESULTS: dict[str, Callable[[], Result]] = {
    "adaptive": adaptive_result,
    "unequal": lambda: a_result(UNEQUAL, SLOW),
    "straggler": lambda: a_result(straggling_job(), STRAGGLER),
    "spot": lambda: a_result(spot_job(), TAKEN),
    "head": lambda: a_result(replace(spot_job(), offer=replace(spot_job().offer, head_price_usd_per_hour=36.0))),
    "brackets": bracket_result,
    "slots": lambda: a_result(SLOTS),
    "shared GPUs": lambda: a_result(a_job(offer=replace(a_job().offer, gpus=1, trials_per_gpu=2), replan=True)),
    "extended": extended_result,
    "replanned": replanned_result,
    "asynchronous": asynchronous_result,
    "profiled": lambda: replace(a_result(), profiling_s=31.0, deadline="20m31s", profiling_cost_usd=0.0123, resumes=2),
}
