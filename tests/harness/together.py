"""Random experiments that have all features at once, where they go together; runs in chaos and crash points have them.

A seed draws which features; each is then drawn from the seed too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from rubberband.executor import POLL_S, DriverRequest, Job, State, TrialEnd, TrialForked, TrialsDrawn, sampling
from rubberband.executor.core.state import LaneState
from rubberband.executor.journal.inbox import NewTrials
from rubberband.spec.search import Search
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile
from rubberband.values.ranking import Limit
from tests.builders.additions import WORDS, search_of
from tests.builders.memory import MemoryInbox
from tests.harness.chaos_cases import LEARNING, Case, Family, random_case, with_sizes
from tests.harness.chaos_stops import random_rules

KINDS: tuple[Family, ...] = ("27 trials", "random", "brackets", "asha", "population", *LEARNING)
POPULATION = Search.model_validate({**WORDS, "scheduler": {"type": "pbt", "population": 12, "generations": 1}})
"""What changes the configurations of a population; its stages are the job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What an experiment has."""

    family: Family | None = None
    """None: 27 trials, or random stages."""
    replan: bool | None = None
    """None: one in fifty is planned again."""
    repeats: int = 1
    limited: bool = False
    """Whether every fourth trial breaks a limit."""
    keeps_best: bool | None = None
    """None: some."""
    resumes: bool = True
    """Whether trials go on from checkpoints."""
    listed: bool = False
    """Whether trials may have some numbers of GPUs only."""
    stops: bool = False
    """Whether it has random rules of `search.stop`."""
    ends: bool = False
    """Whether half of the trials end by themselves."""
    adds: bool = False
    """Whether the user adds trials, also after its end."""
    capped: bool = False
    """Whether it may have fewer and more instances at random."""
    odd: bool = False
    """Whether it is resumed after its end with other caps, answers to launches are lost, and clocks step back."""


def all_together(seed: object, *kinds: Family) -> Features:
    """Draw which features an experiment has; `kinds`: the families, if not all."""
    source = Random(f"{seed}/together")

    def often() -> bool:
        return source.random() < 0.5

    family = source.choice(kinds or KINDS)
    capped = source.random() < 0.3
    return Features(
        family=family,
        replan=source.random() < 0.1,
        repeats=1 if family == "population" or often() else source.choice([2, 3]),
        limited=often(),
        keeps_best=often(),
        resumes=source.random() < 0.85,
        listed=source.random() < 0.3,
        stops=often(),
        ends=often(),
        adds=source.random() < 0.7,
        capped=capped,
        odd=capped and often(),
    )


def case_of(seed: object, features: Features, source: Random, small: tuple[Offer, Profile] | None = None) -> Case:
    """Draw an experiment with these features, and its weather; `small`: on instances of your choice."""
    case = random_case(
        source, features.family, replan=features.replan, repeats=features.repeats, resumes=features.resumes, on=small
    )
    job = case.job
    if features.listed:
        job = with_sizes(job, Random(f"{seed}/sizes"))
    if features.stops:
        job = replace(job, stop=random_rules(Random(f"{seed}/stops"), job))
    if features.limited:
        job = replace(job, limits=(Limit(metric="latency", at_most=20.0),))
    if features.keeps_best is not None:
        job = replace(job, keep_best=features.keeps_best)
    return replace(case, job=job)


def random_end(seed: object, trial: int) -> TrialEnd | None:
    """Half of the trials end by themselves, mostly soon."""
    source = Random(f"{seed}/ends/{trial}")
    if source.random() < 0.5:
        return None
    return TrialEnd(iterations=1 + int(source.expovariate(0.25)), returns=source.random() < 0.5)


# What the user asks for


class LaterInbox(MemoryInbox):
    """Gets requests when their time comes."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self._later: list[DriverRequest] = []

    def ask(self, request: DriverRequest) -> None:
        """Leave a request at the instant at which it is asked."""
        self._later.append(request)

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        """Those that were asked by now."""
        due = sorted((one for one in self._later if one.asked_at <= self._now()), key=lambda one: one.asked_at)
        for asked in due:
            self._later.remove(asked)
            self.put(asked)
        return super().pending(done)

    def next_at(self) -> float:
        """Return when a driver that polls sees the next request; infinite without any."""
        seen_at = self._now() + POLL_S
        if self.pending():
            return seen_at
        return max(seen_at, min((asked.asked_at for asked in self._later), default=math.inf))

    def wake_at(self, instant: float | None) -> float | None:
        """Return when such a driver wakes up that would sleep until the instant."""
        asked_at = self.next_at()
        return instant if asked_at == math.inf else asked_at if instant is None else min(instant, asked_at)


def new_trials(job: Job, user: Random, now: float) -> Iterator[DriverRequest]:
    """The user adds trials, or copies of one, while it runs or after its end."""
    for index in range(user.randint(1, 3)):
        asked_at = now + user.uniform(0.0, 1.2) * job.prediction.jct_s
        trials = NewTrials(count=user.randint(1, 4))
        if user.random() < 0.5:
            of = user.randrange(job.num_trials)
            trials = NewTrials(clone_of=of, from_checkpoint=user.random() < 0.5)
        yield DriverRequest(id=f"t-{index}", kind="add", asked_at=asked_at, trials=trials)


def caps(job: Job, pool: Random, now: float) -> Iterator[DriverRequest]:
    """The pool lets it have fewer and more instances, and in the end at least those that a gang of each lane has."""
    widest = max(choice.gpus_per_trial for choice in job.plan.stages)
    each = -(-min(job.gang_sizes(widest), default=widest) // job.offer.slots)
    least = min(job.offer.max_instances, each * max(1, len(job.lane_instances)))
    instants = sorted(pool.uniform(0.0, 2.0) * job.prediction.jct_s for _ in range(pool.randint(1, 6)))
    for index, after_s in enumerate(instants):
        most: int | None = pool.randint(least if after_s == instants[-1] else 0, job.offer.max_instances)
        most = None if pool.random() < 0.1 else most
        yield DriverRequest(id=f"a-{index}", kind="limit", asked_at=now + after_s, max_instances=most)


# What the driver draws


def draw(
    state: State, drawn: Mapping[int, Mapping[str, Any]], trials: Sequence[int], now: Callable[[], float]
) -> TrialsDrawn:
    """Draw as a run does. The journal has no trial's configuration twice."""
    assert list(trials) == list(range(trials[0], trials[0] + len(trials))), f"{trials} are not in a row"
    known = [trial for trial in trials if trial in drawn or state.trials[trial].attempt]
    assert not known, f"trials {known} have configurations, and are to be drawn again"
    assert len(trials) % state.job.repeats == 0, f"{trials} are not whole configurations"
    return sampling.draw(search_of(True, state.job.repeats, state.job.limits), state, drawn, trials, now)


def explore(lane: LaneState, now: Callable[[], float]) -> Sequence[TrialForked]:
    """Change configurations as a run does."""
    began = {"configurations": POPULATION.configurations()}
    return sampling.explore(POPULATION, sampling.configurations(lane.state, began), lane, now)
