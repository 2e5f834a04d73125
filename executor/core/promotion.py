"""Promotion without a SYNC: trials climb rungs, and idle instances go. Writes the state, returns orders. Pure.

The stage of such a job is its whole run. A trial that ends a rung pauses there; whenever a slot is free, the trial that
`rubberband.values.schedulers` names goes on, before a new one starts. A trial that was interrupted goes before both.
"""

from __future__ import annotations

from rubberband.executor.core import instances
from rubberband.executor.core.events import Command
from rubberband.executor.core.fleet import InstanceStatus
from rubberband.executor.core.history import InstanceCapChanged, Promotion
from rubberband.executor.core.ranking import repeats_of
from rubberband.executor.core.state import LaneState
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.core.trials import pause


def promote(lane: LaneState) -> None:
    """Queue the trials that go on, as many as there are free slots for; one that has ended climbs without a slot."""
    state, rungs = lane.state, lane.rungs
    room = lane.room if lane.runners else max(1, lane.room)  # without an instance, a trial that may go on waits for one
    waiting = sum(trial.attempt > 0 for trial in lane.waiters.first(room))
    while waiting < room:
        found = rungs.promotable()
        rung = _last_hope(lane) if found is None else found[0]
        if rung is None:
            break
        first = rungs.promote(rung) * lane.job.repeats
        repeats = state.trials[first : first + lane.job.repeats]
        for trial in [one for one in repeats if one.status is TrialStatus.PAUSED and one.rung == rung]:
            trial.rung = rung + 1
            state.history.add(Promotion(at_s=state.elapsed_s(state.now), trial=trial.trial, rung=rung + 1))
            if trial.ended:
                pause(lane, trial)
                continue
            state.put(trial, TrialStatus.QUEUED)
            waiting += 1


def pending_configs(lane: LaneState) -> tuple[int, ...]:
    """Return the trials for which there is a slot, and no configuration yet."""
    if not lane.job.draws:
        return ()
    lacking = [trial for trial in lane.waiters.first(lane.room) if not lane.state.has_config(trial)]
    every = list(dict.fromkeys(one.trial for trial in lacking for one in repeats_of(lane.state, trial)))
    return tuple(trial for at, trial in enumerate(every) if trial == every[0] + at)  # one draw is of consecutive ones


def _last_hope(lane: LaneState) -> int | None:
    """Return the rung whose best trial goes on although it is not among the best 1/eta; None: none has to.

    That is where trials failed, so that too few results are left for any trial to reach the last rung.
    """
    if lane.runners or lane.waiters:
        return None
    if any(lane.state.trials[trial].status is TrialStatus.COMPLETED for trial in lane.stage.trials):
        return None
    return lane.rungs.highest()


def _awaits_repeats(lane: LaneState) -> bool:
    """Whether repeats have ended a rung and wait for others of their configuration: all of them may go on then."""
    if lane.job.repeats == 1:
        return False
    running = [trial for trial in lane.runners.sorted() if not lane.ends_last_rung(trial)]
    return any(one.status is TrialStatus.PAUSED for trial in running for one in repeats_of(lane.state, trial))


def release_idle(lane: LaneState) -> list[Command]:
    """Give back instances without a trial, once no trial waits: no more slots are ever needed than trials run then.

    A result makes at most one configuration go on, and the slots of its trials are free, as none is given back while
    repeats wait for each other. But a trial on an instance that is left soon needs a slot elsewhere. Before a SYNC,
    what the next stage holds is kept.
    """
    if lane.job.has_sync:
        return instances.release_unneeded(lane)
    lane.needs = lane.needed_instances
    if lane.waiters or lane.rungs.promotable() is not None or _awaits_repeats(lane):
        return []
    held = lane.held
    idle = [record for record in held.live if not lane.runners.uses(record.instance)]
    if held.leaving:
        idle.sort(key=lambda record: record.status is not InstanceStatus.READY)
        idle = idle[max(0, lane.needs - (len(held.live) - len(idle))) :]
    if lane.state.history.of(InstanceCapChanged):  # gangs may be narrower: what is idle is not asked for again
        recalled = sum(lane.runners.uses(record.instance) for record in held.leaving)
        lane.needs = min(lane.needs, len(held.live) - len(idle) + recalled)
    return instances.give_up(lane, idle)
