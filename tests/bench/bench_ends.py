"""Time and cost of searches whose trials end by themselves: planned, forecast after the first SYNC, and seen.

Each run is one search on the virtual clock. A plan, and a forecast, assume that no trial ends later on: both are upper
bounds. Prints figures, asserts none.

Run: python -m tests.bench.bench_ends [RUNS]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import fmean

from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import Controller, Event, Forecast, Noise, VirtualBackend, bill_usd, drive, forecast
from rubberband.spec.search import sha
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile
from tests.builders.memory import MemoryJournal
from tests.builders.planned_jobs import planned_job

RUNS = 200
STAGES = tuple(sha(27, 1, 27, 3))
OFFER = Offer(
    instance_type="bench",
    gpus=4,
    price_usd_per_hour=12.24,
    max_instances=8,
    provision_delay_s=30.0,
    init_delay_s=20.0,
    minimum_billed_s=60.0,
)
PROFILE = Profile(seconds_per_iteration={1: 40.0, 2: 22.0, 4: 13.0}, trial_startup_s=5.0)
END_CHANCES = (0.0, 0.02, 0.05, 0.1, 0.3)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    print("chance  replan  iterations  planned s  forecast s   seen s  planned USD  forecast USD  seen USD  dearer")
    for end_chance in END_CHANCES:
        for replans in (False, True):
            rows = [run_one(seed, end_chance, replans=replans) for seed in range(runs)]
            iterations, *means = (fmean(column) for column in zip(*rows, strict=True))
            dearer = sum(row[6] > row[4] + 1e-9 for row in rows)
            expected = "{:10.0f}  {:10.0f}  {:7.0f}  {:11.2f}  {:12.2f}  {:8.2f}".format(*means)
            print(f"{end_chance:6.2f}  {replans!s:>6}  {iterations:10.1f} {expected}  {dearer:6}")


def run_one(seed: int, end_chance: float, *, replans: bool) -> tuple[float, ...]:
    """Iterations of all trials; seconds planned, forecast and seen; the same in USD."""
    job = replace(planned_job(STAGES, PROFILE, OFFER, slack=0.5), replan=replans)
    clock = VirtualClock()
    noise = Noise(PROFILE, OFFER, seed=seed, now=clock.now, end_chance=end_chance)
    backend = VirtualBackend(job.name, OFFER, PROFILE, metric=job.metric, faults=noise, clock=clock)
    controller, lines = Controller(job), list[Forecast]()

    def look(event: Event, controller: Controller) -> None:
        if not lines and (len(controller.state.stages) > 1 or controller.state.outcome is not None):
            lines.append(forecast(controller.state, controller.state.now))

    drive(controller, backend, MemoryJournal(), observers=[look])
    state = controller.state
    seen_s = max(stage.ended_at or 0.0 for stage in state.stages) - state.started_at
    iterations = sum(trial.iterations for trial in state.trials)
    seconds = job.prediction.jct_s, lines[0].jct_s, seen_s
    return iterations, *seconds, job.prediction.cost_usd, lines[0].cost_usd, bill_usd(state, state.now)


if __name__ == "__main__":
    main()
