"""Requests for trials of jobs that have no experiment file, and the search that such a job stands for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rubberband.executor import DriverRequest, State, TrialsAdded
from rubberband.executor.sampling import Additions
from rubberband.spec.search import Search
from rubberband.values.plan import Stage
from rubberband.values.ranking import Limit

WORDS = {
    "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}, "y": {"type": "choice", "values": [1, 2]}},
    "scheduler": {"type": "sha", "num_samples": 1, "max_t": 1},
    "metric": "score",
    "mode": "max",
}


@dataclass(frozen=True, slots=True)
class _Chain:
    """Stands for the scheduler of a job: an addition is one more bracket like its first one."""

    state: State

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        return (self.state.job.stages,)

    def chain(self, count: int) -> tuple[Stage, ...]:
        return halved(self.state, count)

    @property
    def eta(self) -> int | None:
        """Of rungs, and of every other job with SYNCs."""
        first = self.state.job.stages[0]
        if not first.has_sync:
            return first.rungs.reduction_factor
        return 2 if first.iterations % 2 else None


@lru_cache
def search_of(draws: bool, repeats: int, limits: tuple[Limit, ...]) -> Search:
    """Return the search of jobs that a sampler which learns draws for, or not; its scheduler is the job's."""
    also = [{"metric": one.metric, "at_most": one.at_most, "at_least": one.at_least, "mode": "min"} for one in limits]
    sampler = {"type": "optuna"} if draws else {"type": "random"}
    return Search.model_validate({**WORDS, "sampler": sampler, "repeats": repeats, "also": also})


class JobAdditions(Additions):
    """Makes the events of requests for trials of a job, as for an experiment with a file."""

    def __init__(self, state: State) -> None:
        job = state.job
        search = search_of(job.draws, job.repeats, job.limits)
        self.search = search.model_copy(update={"scheduler": _Chain(state)})
        drawn = len(state.sampled_configs) if job.draws else job.num_trials
        super().__init__({"configurations": [] if job.draws else [{"x": 0.5, "y": 1}] * drawn})


def halved(state: State, count: int) -> tuple[Stage, ...]:
    """Stages of one more bracket: those of the first one, with a trial for each of its own in proportion."""
    job = state.job
    if not job.has_sync:
        return ()
    first = job.all_brackets()[0]
    stages = job.stages[first.first_stage : first.end_stage]
    return tuple(
        Stage(trials=max(1, count * stage.trials // stages[0].trials), iterations=stage.iterations) for stage in stages
    )


def add(state: State, asked: DriverRequest, now: float) -> TrialsAdded:
    """Make the event of a request. Raises InputError as a driver's does."""
    return JobAdditions(state)(state, asked, now)
