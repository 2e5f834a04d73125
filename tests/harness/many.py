"""Runs of one harness by the thousand: how they ended, what they met, and what replays each that went wrong.

Run: python -m tests.harness.many HARNESS [RUNS] [FIRST_SEED]. Exits with 1 if a run went wrong. The harnesses:

* `chaos`: random runs of every family in random weather; `ends`: half of their trials end by themselves; `stops`: rules
  of search.stop end trials and searches; `odd`: they are resumed after their ends, answers to launches are lost, clocks
  step back.
* `together`: all of these and more at once, as a seed draws them; `points_together`: also killed at a call on EC2.
* `population`: planned searches of type pbt; time and cost of each run equal its plan to the millisecond and the cent.
* `crash_points`: RUNS drawn from all calls before and after which a driver on EC2, or an image build, is killed.
* `outages`: hours in which parts of AWS, its machines and its driver fail.
* `pool`: tenants of a pool that only ask, hold and give back; `shared`: real controllers share it; `shared_odd`:
  answers are lost, limits are set by hand, what has ended is resumed; `shared_sick`: machines fall silent.
* `budgets`: owners who spend; none passes the budget of a month by more than a minute of what runs for him.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

from rubberband.executor import Fork, bill_usd
from tests.builders import populations
from tests.builders.money_stories import tell, world
from tests.builders.virtual_runs import jct_s
from tests.harness import chaos, crash_points, outages, replay_command, shared_pool
from tests.harness.chaos_cases import FAMILIES, Family
from tests.harness.crash_cases import TOGETHER
from tests.harness.crash_images import ImagePoint, image_points, quick, run_image_point
from tests.harness.pool_runs import PoolRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    replay: str
    """The command that tells its story."""
    wrong: Sequence[str]
    ended: str = "done"
    seen: Counter[str] = field(default_factory=Counter)


def of_chaos(seeds: range, *, ends: bool = False, odd: bool = False, stops: bool = False) -> Iterator[Ran]:
    for family in ["caps"] if odd else FAMILIES:
        for seed in seeds:
            replan = seed % 50 == 0 and not family.startswith("asha")  # without a SYNC nothing is planned again
            every = 10 if odd else 1_000_000
            options = {"replan": replan, "ends": ends, "odd": odd, "stops": stops}
            yield _of_seed(seed, family, every, **options)


def of_together(seeds: range) -> Iterator[Ran]:
    for seed in seeds:
        yield _of_seed(seed, "together", 5)


def _of_seed(seed: int, family: Family | Literal["together"], check_every: int, **options: bool) -> Ran:
    found = chaos.run_seed(seed, family, check_every=check_every, **options)
    replay = replay_command("chaos", seed, family, **options)
    return Ran(replay=replay, wrong=found.wrong, ended=found.ended, seen=found.seen)


def of_population(seeds: range) -> Iterator[Ran]:
    for seed in seeds:
        source = Random(f"{seed}/population")
        experiment = populations.random_population(source)
        job = replace(populations.job_within(experiment, source), replan=source.random() < 0.5)
        controller, _, finish = populations.run(experiment, job=job)
        state, wrong = controller.state, list[str]()
        off_s = jct_s(state) - job.prediction.jct_s
        off_usd = bill_usd(state, state.now) - job.prediction.cost_usd
        if abs(off_s) > 5e-4 or abs(off_usd) > 5e-3:
            wrong.append(f"it takes {off_s:+.3f} s and costs {off_usd:+.4f} USD more than planned")
        seen = Counter({"exchanges": len(state.history.of(Fork)), "stages": len(state.stages)})
        seen["plans that change their instances"] += len({choice.instances for choice in job.plan.stages}) > 1
        replay = f"python -m tests.harness.many population 1 {seed}"
        yield Ran(replay=replay, wrong=wrong, ended=finish.outcome, seen=seen)


def of_crash_points(seeds: range) -> Iterator[Ran]:
    every = [*crash_points.points(seeds.start), *image_points(seeds.start)]
    with quick() as folder:
        for point in Random(seeds.start).sample(every, min(len(seeds), len(every))):
            if isinstance(point, ImagePoint):
                found, replay = run_image_point(folder, point), replay_command("crash_images", str(point))
            else:
                found, replay = crash_points.run_point(point), replay_command("crash_points", str(point))
            yield Ran(replay=replay, wrong=found.wrong, ended=found.ended, seen=Counter(found.died_in))


def of_points_together(seeds: range) -> Iterator[Ran]:
    for seed in seeds:
        try:
            point = crash_points.point_of(seed)
        except AssertionError as error:
            yield Ran(replay=replay_command("crash_points", f"markets={TOGETHER}{seed}"), wrong=[str(error)])
            continue
        found = crash_points.run_point(point)
        replay = replay_command("crash_points", str(point))
        yield Ran(replay=replay, wrong=found.wrong, ended=found.ended, seen=Counter(found.died_in))


def of_outages(seeds: range) -> Iterator[Ran]:
    for seed in seeds:
        found = outages.run_seed(seed)
        ended, wrong = found.outcome.ended, found.outcome.wrong
        yield Ran(replay=replay_command("outages", seed), wrong=wrong, ended=ended, seen=found.seen)


def of_pool(seeds: range) -> Iterator[Ran]:
    for seed in seeds:
        run, wrong = PoolRun(seed), list[str]()
        try:
            run.run()
        except AssertionError as error:
            wrong.append(str(error) or "an assertion failed")
        seen = Counter({"broker dies": run.kills, "machines": len(run.pool.state.machines)})
        yield Ran(replay=f"python -m tests.harness.many pool 1 {seed}", wrong=wrong, seen=seen)


def of_shared(seeds: range, *, odd: bool = False, sick: bool = False) -> Iterator[Ran]:
    for seed in seeds:
        run = shared_pool.SharedRun(seed, odd=odd, sick=sick)
        wrong = shared_pool.wrong_end(run)
        replay = replay_command("shared_pool", seed, odd=odd, sick=sick)
        yield Ran(replay=replay, wrong=[wrong] if wrong else [], seen=run.seen)


def of_budgets(seeds: range) -> Iterator[Ran]:
    for seed in seeds:
        with crash_points.folder() as home, world(Path(home)) as made:
            tell(made, Random(seed), 14)
            wrong = [f"a budget is passed by {made.passed_usd:.2f} USD"] if made.passed_usd > 1e-9 else []
            seen = Counter({"asked": made.asked, "refused": made.refused})
        yield Ran(replay=f"python -m tests.harness.many budgets 1 {seed}", wrong=wrong, seen=seen)


HARNESSES: dict[str, Callable[[range], Iterator[Ran]]] = {
    "chaos": of_chaos,
    "ends": partial(of_chaos, ends=True),
    "stops": partial(of_chaos, stops=True),
    "together": of_together,
    "odd": partial(of_chaos, odd=True),
    "population": of_population,
    "crash_points": of_crash_points,
    "points_together": of_points_together,
    "outages": of_outages,
    "pool": of_pool,
    "shared": of_shared,
    "shared_odd": partial(of_shared, odd=True),
    "shared_sick": partial(of_shared, sick=True),
    "budgets": of_budgets,
}


def main() -> None:
    """Run the seeds; print each run that went wrong at once, and figures of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("harness", choices=HARNESSES)
    parser.add_argument("runs", type=int, nargs="?", default=1_000)
    parser.add_argument("first_seed", type=int, nargs="?", default=0)
    asked = parser.parse_args()
    logging.disable(logging.ERROR)
    gc.freeze()
    began, ended, seen, wrong = time.process_time(), Counter[str](), Counter[str](), 0
    for run in HARNESSES[asked.harness](range(asked.first_seed, asked.first_seed + asked.runs)):
        ended[run.ended] += 1
        seen += run.seen
        if run.wrong:
            wrong += 1
            print(f"  {run.replay}  # {'; '.join(run.wrong)}", flush=True)
    count = ended.total()
    each_ms = 1e3 * (time.process_time() - began) / count
    for what, counts in (("ended", ended), ("seen", seen)):
        print(f"{what}: " + ", ".join(f"{name} {number}" for name, number in counts.most_common()))
    print(f"{wrong} of {count} runs went wrong ({each_ms:.1f} ms of CPU each)")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
