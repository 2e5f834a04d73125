"""Invariants of the controller, and of a pool, after every event."""

from __future__ import annotations

import math

from rubberband.cloud.pool.state import PoolState
from rubberband.executor import (
    Controller,
    InstanceCapChanged,
    InstanceStatus,
    Job,
    Phase,
    Slot,
    State,
    TrialsJoined,
    TrialStatus,
    best_trial,
    bill_usd,
    is_result,
)
from rubberband.executor.core.ends import reaching
from rubberband.executor.core.fleet import GONE
from rubberband.executor.core.limits import can_go_on
from rubberband.executor.core.state import LaneState
from rubberband.spec.pool import CAP_SLACK_USD


def validate(controller: Controller, *, is_informed: bool = True) -> None:
    """Raise AssertionError, naming what is broken, if the controller's state is impossible.

    Where `is_informed` is false, news of instances that ended at their leases may be on its way: the ledger may then
    say more than is billed.
    """
    job, state = controller.job, controller.state
    _validate_indices(job, state)
    owner: dict[Slot, int] = {}
    for trial in state.running():
        number = state.lane_of[trial.trial]
        for slot in trial.gang:
            assert slot not in owner, f"{slot} is given to trials {owner[slot]} and {trial.trial}"
            owner[slot] = trial.trial
            status = state.instances[slot.instance].status
            assert status in _USABLE, f"trial {trial.trial} runs on {slot.instance}, which is {status}"
            assigned = state.instances[slot.instance].lane
            assert assigned == number, f"trial {trial.trial} of lane {number} runs on lane {assigned}'s"
        assert len(trial.gang) in job.gang_sizes(len(trial.gang)), f"trial {trial.trial} may not have {trial.gang}"
        spread = {slot.instance for slot in trial.gang}
        whole = len(trial.gang) == len(spread) * job.offer.slots
        assert len(spread) == 1 or whole, f"trial {trial.trial} is spread over {spread} without owning them"
    for choice in state.plan.stages if job.gpus_per_trial_sizes else ():
        assert choice.gpus_per_trial in job.gpus_per_trial_sizes, f"the plan has {choice}"
    held = len(state.fleet.live()) + len(state.fleet.leaving())
    assert held <= job.offer.max_instances, f"{held} instances are held"
    moved = state.history.of(InstanceCapChanged)
    is_taken_in = not moved or moved[-1].at_s < state.elapsed_s(state.now)
    most, cap = sum(lane.max_instances for lane in state.active()), state.most_instances
    assert most <= cap, f"lanes may have {most} instances of {cap}"
    for lane in state.active() if state.stages else ():
        ours, market = lane.held, lane.chosen.market
        kept = len(ours.live) + sum(record.recalled_at is None for record in ours.leaving)
        assert kept <= lane.max_instances or not is_taken_in, f"lane {lane.lane} holds {ours}"
        others = [r for r in ours.live if r.market != market and not r.instead_of_spot]
        # Between two stages a lane may have been handed what another one held: its next stage has a plan for that.
        assert not others or lane.phase is Phase.PLANNING, f"{others} are held where {market} is planned"
    open_uses = [use for use in state.allocations if use.ended_at is None]
    assert sorted(use.trial for use in open_uses) == sorted(t.trial for t in state.running()), "an allocation leaks"
    for trial in state.trials:
        by_user = trial.stopped_at is not None
        assert not by_user or trial.status is TrialStatus.STOPPED, f"trial {trial.trial} goes on after its stop"
        goes_on = trial.status in (TrialStatus.QUEUED, TrialStatus.RUNNING, TrialStatus.FAILED)
        assert not (trial.ended and goes_on), f"trial {trial.trial} has ended by itself, and is {trial.status}"
        assert not trial.ended or trial.reports, f"trial {trial.trial} has ended without a report"
        held = trial.checkpoint_iterations
        assert (held == 0) == (trial.checkpoint is None), f"trial {trial.trial} has a checkpoint of nothing"
        assert trial.before_iterations <= held <= trial.iterations, f"trial {trial.trial} has checkpoints out of order"
        assert [report.iterations for report in trial.reports] == list(range(1, trial.iterations + 1)), (
            f"trial {trial.trial} trained an acknowledged iteration again, or skipped one"
        )
    if is_informed and job.max_cost_usd is not None:
        spent_usd = bill_usd(state, state.now)
        assert spent_usd <= job.max_cost_usd + 1e-6, f"{spent_usd} USD spent of {job.max_cost_usd}"
    if state.phase is Phase.FINISHED:
        held_still = [r.instance for r in state.instances.values() if r.status not in GONE]
        assert not held_still, f"finished with {held_still} held"
        if state.ended_by is not None:
            best = best_trial(state)
            assert state.outcome == "done", f"{state.ended_by.rule} ended it, and it is {state.outcome}"
            assert best is not None, "a rule ended it without a result"
            if state.ended_by.rule == "target" and not can_go_on(state):
                assert reaching(state, [best]) is best, f"the best one, {best.trial}, does not reach the target"
        elif state.outcome == "done":
            winners = [trial for trial in state.trials if is_result(trial)]
            assert winners, "there is no winner"
            for winner in (one for one in winners if one.stopped_at is None):
                last = job.bracket_of(winner.last_stage).end_stage - 1
                complete = winner.ended or winner.iterations == job.iterations_by(last)
                assert complete, f"the winner {winner.trial} is not complete"


def _validate_indices(job: Job, state: State) -> None:
    """Check that the indices of trials and slots are what a walk through all of them finds."""
    for lane in state.lanes:
        _validate_lane(job, state, lane)
        _validate_rungs(job, state, lane)
    over = [(use, use.ended_at) for use in state.allocations if use.ended_at is not None]
    gpu_s = sum(len(use.gang) * max(0.0, ended_at - use.started_at) for use, ended_at in over)
    assert math.isclose(sum(state.used_gpu_s().values()), gpu_s, abs_tol=1e-6), f"{gpu_s} GPU-seconds are over"


def _validate_rungs(job: Job, state: State, lane: LaneState) -> None:
    """Check the trials and the results of every rung, of a job whose trials climb rungs without a SYNC."""
    if job.has_sync or not lane.stages:
        return
    totals, quota = job.stages[0].rungs.totals, job.stages[0].rungs.quota
    for trial in state.trials:
        ended = trial.status in (TrialStatus.PAUSED, TrialStatus.COMPLETED)
        has_done = trial.ended or trial.iterations == totals[trial.rung]
        assert not ended or has_done, f"trial {trial.trial} pauses within a rung"
        active = trial.status in (TrialStatus.RUNNING, TrialStatus.QUEUED)
        assert not active or trial.iterations < totals[trial.rung], f"trial {trial.trial} trains past its rung"
        assert trial.status is not TrialStatus.COMPLETED or trial.rung + 1 == len(totals), f"{trial.trial} ended early"
    numbers = range(0, len(state.trials), job.repeats)
    every = [state.trials[number : number + job.repeats] for number in numbers]
    for rung, count in enumerate(lane.rungs.counts()):
        above = sum(any(trial.rung > rung for trial in repeats) for repeats in every)
        here, gone = 0, 0
        for repeats in every:
            left = [one for one in repeats if one.status is not TrialStatus.FAILED and one.stopped_at is None]
            if all(one.rung <= rung for one in repeats):
                counting = repeats if job.repeats == 1 else left
                ended = [one.rung == rung and (one.ended or one.iterations == totals[rung]) for one in counting]
                here += bool(ended) and all(ended)
                gone += job.repeats > 1 and len(left) < len(repeats)
        is_right = above + here <= count <= above + here + gone
        assert is_right, f"{count} results count in rung {rung}, and {above + here} configurations ended it"
        joined = state.history.of(TrialsJoined)[-1:]
        is_taken_in = not joined or joined[0].at_s < state.elapsed_s(state.now)
        if state.course == "running" and lane.phase is Phase.TRAINING and lane.runners and is_taken_in:
            best = lane.rungs.promotable()
            assert best is None or not lane.room, f"{best} may go on, and a slot is free"
        assert above <= count, f"{above} trials left rung {rung} of {count}"
        stopped = any(trial.stopped_at is not None for trial in state.trials)
        assert stopped or above >= quota(count) or lane.rungs.may_promote(rung), (
            f"rung {rung} has promoted {above} of {count}"
        )


def _validate_lane(job: Job, state: State, lane: LaneState) -> None:
    ours = [state.trials[trial] for trial in lane.stage.trials] if lane.stages else []
    running = [trial for trial in ours if trial.status is TrialStatus.RUNNING]
    queued = [trial for trial in ours if trial.status is TrialStatus.QUEUED]
    assert (lane.running(), len(lane.runners)) == (running, len(running)), "the running trials are others"
    assert (lane.queued(), len(lane.waiters)) == (queued, len(queued)), "the waiting trials are others"
    assert lane.waiters.first(2) == queued[:2], "others are the first to get a slot"
    first_due_at = min((trial.due_at for trial in running), default=math.inf)
    assert lane.runners.first_due_at() == first_due_at, f"the first trial is due at {first_due_at}"
    assert lane.runners.due(first_due_at) == [t for t in running if t.due_at <= first_due_at], "others are due"
    records = [record for record in state.instances.values() if record.lane == lane.lane]
    for record in records:
        there = [trial for trial in running if any(slot.instance == record.instance for slot in trial.gang)]
        found = lane.runners.on(record.instance), lane.runners.uses(record.instance)
        assert found == (there, bool(there)), f"on {record.instance}"
    usable = {record.instance for record in records if record.status is InstanceStatus.READY}
    taken = sum(slot.instance in usable for trial in running for slot in trial.gang)
    free_slots = len(usable) * job.offer.slots - taken
    assert lane.free_slots.gpus == free_slots, f"{free_slots} slots are free"


_USABLE = (InstanceStatus.READY, InstanceStatus.LEAVING)


def validate_pool(state: PoolState, at: float) -> None:
    """Raise AssertionError if the state of a pool is impossible, or beyond its limits."""
    limits = state.limits
    assert len(state.live) <= limits.instances, "more machines than the pool may have"
    placed: dict[str, int] = {}
    for held in state.held.values():
        assert held.ended_at is None, f"{held.instance} is held and has ended"
        assert held.running_at is None or held.running_at >= held.requested_at, f"{held.instance} ran too early"
        if held.machine is not None:
            assert held.machine.name in state.live, f"{held.instance} is on a machine that is gone"
            assert held.machine.status != "releasing", f"{held.instance} is on a machine that is being released"
            placed[held.machine.name] = placed.get(held.machine.name, 0) + held.gpus
    for machine in state.live.values():
        assert placed.get(machine.name, 0) == machine.gpus - machine.free_gpus, f"{machine.name}: lost a slice"
        assert machine.free_gpus >= 0, f"{machine.name}: a GPU is lent twice"
    if limits.max_usd_per_hour is not None:
        assert state.usd_per_hour() <= limits.max_usd_per_hour + CAP_SLACK_USD, "the cap per hour is passed"
    if limits.max_usd_per_month is not None:
        assert state.month_usd(at) <= limits.max_usd_per_month + CAP_SLACK_USD, "the cap per month is passed"
    lent_gpu_s: dict[str, float] = {}
    for loan in state.slices.values():
        if loan.machine is not None and loan.running_at is not None and loan.running_at <= at:
            until = at if loan.ended_at is None else min(at, loan.ended_at)
            seconds = loan.gpus * (until - loan.running_at)
            lent_gpu_s[loan.machine.name] = lent_gpu_s.get(loan.machine.name, 0.0) + seconds
    for name, lent_s in lent_gpu_s.items():
        ran = state.machines[name]
        assert ran.running_at is not None, f"{name}: lent before it ran"
        ran_s = (at if ran.ended_at is None else min(at, ran.ended_at)) - ran.running_at
        assert lent_s <= ran.gpus * ran_s + 1e-3, f"{name}: more GPU time is billed than it had"
