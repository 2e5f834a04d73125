"""Results of virtual runs, one of every kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from rubberband.executor import Controller, Event, Faults, Job, Journal, Result, VirtualBackend, drive, summarise
from rubberband.planner.exact.model import predict
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile
from rubberband.views.document import render_document
from rubberband.views.report.headlines import headlines
from rubberband.views.report.text import MOST_TRIALS, tables
from tests.builders.virtual_runs import run_virtual

UPDATES = AsyncUse(
    workers=2,
    servers=1,
    updates=50,
    duration_s=0.5,
    compute_s=0.010,
    up_s=0.002,
    wait_s=0.001,
    server_s=0.004,
    down_s=0.003,
    staleness=0.96,
    max_staleness=4,
    lost=1,
    largest_shard=0.7,
)
FAULTS = Faults(failures={(2, 1): "raised", (2, 2): "died", (5, 1): "hung", (7, 1): "not_a_number"})


def a_job(**changes: Any) -> Job:
    offer = Offer(
        instance_type="test",
        gpus=2,
        price_usd_per_hour=0.36,
        max_instances=4,
        provision_delay_s=35.0,
        init_delay_s=12.0,
    )
    profile = Profile(seconds_per_iteration={1: 10.0, 2: 6.0}, trial_startup_s=1.5)
    job_stages = (Stage(trials=12, iterations=1), Stage(trials=4, iterations=2), Stage(trials=1, iterations=4))
    chosen = ((3, 1), (2, 1), (1, 2))
    plan = Plan(stages=tuple(StagePlan(instances=k, gpus_per_trial=g) for k, g in chosen))
    job = Job(
        name="digits",
        stages=job_stages,
        plan=plan,
        prediction=predict(job_stages, plan, profile, offer),
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        deadline_s=1200.0,
        max_cost_usd=1.0,
        replan=False,
    )
    return dataclasses.replace(job, **changes)


def configurations(job: Job, **values: Any) -> dict[str, Any]:
    return {"configurations": [{"lr": 0.1 / (n + 1), "n": n, **values} for n in range(job.stages[0].trials)]}


def a_result(job: Job | None = None, faults: Faults | None = None, **values: Any) -> Result:
    job = job or a_job()
    controller, backend, _ = run_virtual(job, faults)
    return summarise(controller.state, configurations(job, **values), backend.now())


def cut_short(after_events: int, job: Job | None = None, cancel: bool = True) -> Result:
    """Return the result of a run that is cancelled, or only looked at, after `after_events` events."""
    job = job or a_job()
    controller, seen = Controller(job), []
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    looked: list[Result] = []

    def look(_event: Event, controller: Controller) -> None:
        seen.append(1)
        if len(seen) == after_events:
            looked.append(summarise(controller.state, configurations(job), backend.now()))

    journal = Journal("sqlite://", job.name, create=True)
    try:
        drive(controller, backend, journal, observers=[look], cancelled=lambda: cancel and len(seen) >= after_events)
    finally:
        journal.close()
    return summarise(controller.state, configurations(job), backend.now()) if cancel else looked[0]


EVERY_RESULT = {
    "done": lambda: a_result(),
    "free": lambda: a_result(a_job(offer=dataclasses.replace(a_job().offer, price_usd_per_hour=0.0), max_cost_usd=0.0)),
    "faults": lambda: a_result(faults=FAULTS),
    "lost": lambda: a_result(faults=Faults(lost_after_s={"i-001": 20.0}, refused={"i-002"})),
    "late": lambda: a_result(a_job(deadline_s=60.0)),
    "no limits": lambda: a_result(a_job(deadline_s=None, max_cost_usd=None)),
    "budget": lambda: a_result(a_job(max_cost_usd=0.02)),
    "all failed": lambda: a_result(faults=Faults(failures={(t, 1): "not_a_number" for t in range(12)})),
    "no instance": lambda: a_result(faults=Faults(refused={f"i-{n:03d}" for n in range(30)})),
    "cancelled": lambda: cut_short(13),
    "cancelled at once": lambda: cut_short(1),
    "nothing yet": lambda: cut_short(1, cancel=False),
    "unfinished": lambda: cut_short(20, cancel=False),
    "per function": lambda: a_result(
        a_job(offer=dataclasses.replace(a_job().offer, billing="per_function"), max_cost_usd=None)
    ),
}


ATTACK = "</script><script>alert(1)</script>"


def hostile() -> Result:
    job = dataclasses.replace(a_job(), name=f"x{ATTACK}", metric=f"m{ATTACK}")
    result = a_result(job, Faults(failures={(3, 1): "not_a_number"}), **{f"k{ATTACK}": ATTACK, "quote": "\"'&<!--"})
    trials = tuple(
        dataclasses.replace(trial, failure=f"raised: {ATTACK}") if trial.failure else trial for trial in result.trials
    )
    instances = (dataclasses.replace(result.instances[0], reason=ATTACK), *result.instances[1:])
    return dataclasses.replace(result, trials=trials, instances=instances, outcome="failed", reason=ATTACK)


def render(result: Result) -> str:
    return render_document(headlines(result), tables(result, MOST_TRIALS))
