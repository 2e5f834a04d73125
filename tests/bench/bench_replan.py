"""What replanning at SYNC is worth, on virtual runs: `python tests/bench/bench_replan.py [JOBS]` from the checkout.

The same random jobs (3-4 stages, a deadline between the shortest JCT and well beyond the cheapest plan's) run on times
that the profile did not foresee, with and without replanning. Prints figures, asserts none. "A replan can": from the
first SYNC on, with the true times, some plan of the rest ends before the deadline.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rubberband.errors import InfeasibleError
from rubberband.executor.accounting import bill_usd
from rubberband.executor.controller import Controller
from rubberband.executor.driver import drive
from rubberband.executor.events import Event
from rubberband.executor.journal import Journal
from rubberband.executor.replanning import decide
from rubberband.executor.state import Job, Phase
from rubberband.executor.virtual import VirtualBackend
from rubberband.offer import Offer
from rubberband.profile import Profile
from rubberband.scheduler import sha
from tests.property.first_sync import FirstSync
from tests.property.planned_jobs import planned_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How one virtual run came out."""

    jct_s: float
    cost_usd: float
    changes: int
    shortest_jct_s: float
    """The best that a replan at the first SYNC could do."""
    deciding_s: list[float]


def random_job(chance: random.Random, trial_cv: float) -> Job:
    """A successive-halving job of 16-64 trials on 4-GPU instances, and its optimal plan."""
    single_s, efficiency = chance.uniform(5.0, 60.0), chance.uniform(0.6, 0.95)
    profile = Profile(
        seconds_per_iteration={gpus: single_s / gpus**efficiency for gpus in (1, 2, 4, 8)},
        trial_startup_s=chance.uniform(0.0, 5.0),
        trial_cv=trial_cv,
    )
    offer = Offer(
        instance_type="p3.8xlarge",
        gpus=4,
        price_usd_per_hour=12.24,
        max_instances=chance.choice([8, 16, 32]),
        provision_delay_s=chance.uniform(0.0, 60.0),
        init_delay_s=chance.uniform(0.0, 30.0),
    )
    stages = sha(chance.choice([16, 32, 64]), chance.choice([2, 4]), chance.choice([50, 100]), chance.choice([2, 3, 4]))
    return planned_job(stages, profile, offer, slack=chance.uniform(0.0, 2.0))


def run(job: Job, slowdown: float, pace_of: Callable[[int], float]) -> Run:
    """Drive `job` on a virtual clock."""
    deciding_s: list[float] = []

    def time_decision(_event: Event, controller: Controller) -> None:
        if controller.state.phase is Phase.PLANNING:
            began_s = time.perf_counter()
            decide(job, controller.state, controller.state.now)
            deciding_s.append(time.perf_counter() - began_s)

    first, controller = FirstSync(slowdown), Controller(job)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, slowdown=slowdown, pace_of=pace_of)
    journal = Journal("sqlite://", job.name, create=True)
    drive(controller, backend, journal, observers=[first, time_decision])
    journal.close()
    state = controller.state
    ended_at = state.stages[-1].ended_at
    assert ended_at is not None
    return Run(
        jct_s=ended_at - state.started_at,
        cost_usd=bill_usd(job, state, state.now),
        changes=sum(decision.changed for decision in state.decisions),
        shortest_jct_s=first.shortest_jct_s,
        deciding_s=deciding_s,
    )


def jobs(count: int, trial_cv: float) -> list[Job]:
    """The jobs, the same every time."""
    chance = random.Random(7)
    found: list[Job] = []
    while len(found) < count:
        try:
            found.append(random_job(chance, trial_cv))
        except InfeasibleError:
            continue
    return found


def row(name: str, count: int, slowdown: float, trial_cv: float = 0.0) -> str:
    """One line of the table."""
    can = met = met_without = changed = 0
    cost_ratios: list[float] = []
    deciding_s: list[float] = []
    for number, job in enumerate(jobs(count, trial_cv)):
        chance = random.Random(number)
        paces = [chance.lognormvariate(-(trial_cv**2) / 2.0, trial_cv) for _ in range(job.stages[0].trials)]
        replanned = run(job, slowdown, paces.__getitem__)
        fixed = run(replace(job, replan=False), slowdown, paces.__getitem__)
        assert job.deadline_s is not None
        can += replanned.shortest_jct_s <= job.deadline_s
        met += replanned.jct_s <= job.deadline_s + 1e-3
        met_without += fixed.jct_s <= job.deadline_s + 1e-3
        changed += replanned.changes > 0
        cost_ratios.append(replanned.cost_usd / fixed.cost_usd)
        deciding_s += replanned.deciding_s
    mean_ms, worst_ms = 1e3 * statistics.fmean(deciding_s), 1e3 * max(deciding_s)
    return (
        f"{name:<34} {count:>5} {can:>8} {met:>9} {met_without:>12} {changed:>8} "
        f"{statistics.fmean(cost_ratios) - 1.0:>+10.1%} {mean_ms:>9.1f} {worst_ms:>9.1f}"
    )


def main() -> None:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    head = ("jobs", "can", "met", "met, fixed", "changed", "cost", "decide ms", "worst ms")
    widths = (5, 8, 9, 12, 8, 10, 9, 9)
    print(f"{'true times':<34} " + " ".join(f"{name:>{width}}" for name, width in zip(head, widths, strict=True)))
    print(row("as profiled", count, 1.0))
    print(row("1.3 times as long", count, 1.3))
    print(row("0.6 times as long", count, 0.6))
    print(row("1.3 times, trials differ by 10 %", count, 1.3, trial_cv=0.1))
    print("can: a replan at the first SYNC can meet the deadline; met: with replanning; met, fixed: without.")
    print("changed: runs whose plan was changed; cost: mean of replanned over fixed.")


if __name__ == "__main__":
    main()
