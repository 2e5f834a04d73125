"""Requests for trials of jobs that have no experiment file: their configurations are numbers."""

from __future__ import annotations

from rubberband.executor import DriverRequest, State, TrialsAdded
from rubberband.values.plan import Stage


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
    """Make the event of a request, as `sampling.Additions` does with a file."""
    trials = asked.trials
    assert trials is not None, "it asks for trials"
    count, parent = trials.count or 1, trials.clone_of
    if parent is not None and parent >= len(state.trials):
        parent = None
    done = 0 if parent is None else state.trials[parent].checkpoint_iterations
    return TrialsAdded(
        occurred_at=now,
        request=asked.id,
        configurations=tuple({"x": len(state.trials) + index} for index in range(count)),
        stages=halved(state, count),
        sampled=trials.count,
        clone_of=parent,
        from_iterations=done if trials.from_checkpoint and done < state.job.max_iterations else 0,
    )
