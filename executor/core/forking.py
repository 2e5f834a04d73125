"""A trial that goes on from another trial's checkpoint, with a configuration of its own. Writes the state. Pure.

From then on several trials refer to one checkpoint, and to the artifacts that the other had given until then: each is
deleted when none does any more. The trial takes over the other's reports up to there, so that its reports still are one
for each iteration; those that it made itself are kept apart (`TrialState.left`), as they show how fast it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rubberband.executor.core.events import CheckpointRef, Command, DiscardCheckpoint, TrialForked
from rubberband.executor.core.history import Fork
from rubberband.executor.core.state import LaneState, State
from rubberband.executor.core.trial_state import ConfigSpan, TrialState, TrialStatus


def fork(state: State, event: TrialForked) -> list[Command]:
    """Let a trial go on from its parent's checkpoint.

    It is left alone if it trains, if the user has stopped it, or if the checkpoint is not kept any more. One that had
    failed, completed, or ended by itself is paused then, and has not.
    """
    trial, parent = state.trials[event.trial], state.trials[event.parent]
    kept = list(parent.kept())
    at = next((at for at, (_, iterations) in enumerate(kept) if iterations == event.iterations), None)
    if at is None or parent is trial or trial.status is TrialStatus.RUNNING or trial.stopped_at is not None:
        return []
    state.history.add(
        Fork(
            at_s=state.elapsed_s(event.occurred_at),
            trial=trial.trial,
            parent=parent.trial,
            iterations=event.iterations,
            from_iterations=trial.iterations,
            configuration=event.configuration,
            changes=event.changes,
            reason=event.reason,
        )
    )
    freed = list(trial.files())
    trial.left += trial.reports[trial.inherited :]
    trial.reports = parent.reports[: event.iterations]
    trial.inherited = trial.iterations = event.iterations
    if state.curves is not None:
        state.curves.renew(trial)
    trial.checkpoint, trial.checkpoint_iterations = kept[at]
    trial.before, trial.before_iterations = kept[at + 1] if at + 1 < len(kept) else (None, 0)
    trial.best, trial.best_iterations = None, 0  # of its present configuration
    trial.artifacts |= {name: one for name, one in parent.artifacts.items() if one.iterations <= event.iterations}
    present = ConfigSpan(after=event.iterations, trial=trial.trial, configuration=event.configuration)
    trial.configured = (*_until(parent, event.iterations), present)
    trial.failures, trial.ended = 0, False
    if trial.status is TrialStatus.FAILED or trial.status is TrialStatus.COMPLETED:
        state.put(trial, TrialStatus.PAUSED)
    state.forked_configs[trial.trial] = event.configuration
    return discard(state, trial, freed)


def _until(trial: TrialState, iterations: int) -> tuple[ConfigSpan, ...]:
    """Return the configurations of a trial's first iterations."""
    spans = trial.configured or (ConfigSpan(after=0, trial=trial.trial, configuration=None),)
    return tuple(span for span in spans if span.after < iterations)


def rewind(trial: TrialState, iterations: int) -> None:
    """Take back a trial's reports after that many iterations, which it trains again with its present configuration."""
    del trial.reports[iterations:]
    trial.inherited = min(trial.inherited, iterations)
    if trial.configured and trial.configured[-1].after > iterations:
        present = trial.configured[-1]
        again = ConfigSpan(after=iterations, trial=present.trial, configuration=present.configuration)
        trial.configured = (*_until(trial, iterations), again)


def discard(state: State, trial: TrialState, files: Iterable[CheckpointRef | None]) -> list[Command]:
    """Order the deletion of files that a trial has given up, unless it or another trial still refers to them."""
    given_up = list(dict.fromkeys(file for file in files if file is not None))
    if given_up:
        holders = state.trials if state.forked_configs else [trial]  # until then, no trial has another's
        kept = {file.url for holder in holders for file in holder.files()}
        given_up = [file for file in given_up if file.url not in kept]
    return [DiscardCheckpoint(checkpoint=file) for file in given_up]


# Which trials take over checkpoints at a SYNC, and from which.


def takers(lane: LaneState) -> list[TrialState]:
    """Return the trials that are still to take over a checkpoint since a lane's latest SYNC, the best first.

    They are those of the last quantile, and all that failed. None does if no trial has a checkpoint to give.
    """
    order, taking = _in_order(lane)
    if not taking or not givers(lane):
        return []
    failed = [trial for trial in order if trial.trial not in lane.stage.ranking]
    last = [trial for trial in order[-taking:] if trial not in failed]
    return [trial for trial in (*last, *failed) if trial.trial not in lane.stage.forked]


def givers(lane: LaneState) -> Sequence[TrialState]:
    """Return the trials whose checkpoints are taken over: those of the first quantile that have one to go on from.

    One that has ended by itself has none, as its copies would end too.
    """
    order, taking = _in_order(lane)
    first = [trial for trial in order[:taking] if trial.trial in lane.stage.ranking]
    return [trial for trial in first if trial.checkpoint is not None and not trial.ended and _is_saved(trial)]


def _is_saved(trial: TrialState) -> bool:
    return trial.reports[-1].saved_iterations != 0


def _in_order(lane: LaneState) -> tuple[list[TrialState], int]:
    """Return the trials of the lane's latest stage, best first and failed ones last, and how many take over one.

    Trials that the user has stopped are left out. None takes over one where the stage is not over, or none is to.
    """
    if not lane.stages or lane.stage.ended_at is None or not lane.stage.ranking:
        return [], 0
    exchange = lane.job.stages[lane.stage.stage].exchange
    if exchange is None:
        return [], 0
    stage, trials = lane.stage, lane.state.trials
    numbers = (*stage.ranking, *(number for number in stage.trials if number not in stage.ranking))
    order = [trials[number] for number in numbers if trials[number].stopped_at is None]
    return order, exchange.takers(len(order))
