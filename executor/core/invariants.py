"""What must hold after every event, whatever happens: checked in tests, and by anyone who doubts the controller."""

from __future__ import annotations

import math

from rubberband.executor.core import budget
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Slot
from rubberband.executor.core.state import GONE, InstanceStatus, Job, Phase, State, TrialStatus


def validate(controller: Controller, *, is_told: bool = True) -> None:
    """Raise AssertionError, naming what is broken, if the controller's state is impossible.

    Where `is_told` is false, news may be on its way, of instances that ended at their leases: then the ledger may say
    more than is billed.
    """
    job, state = controller.job, controller.state
    _validate_indices(job, state)
    owner: dict[Slot, int] = {}
    for trial in state.running():
        for slot in trial.gang:
            assert slot not in owner, f"{slot} is given to trials {owner[slot]} and {trial.trial}"
            owner[slot] = trial.trial
            status = state.instances[slot.instance].status
            assert status in _USABLE, f"trial {trial.trial} runs on {slot.instance}, which is {status}"
        spread = {slot.instance for slot in trial.gang}
        whole = len(trial.gang) == len(spread) * job.offer.gpus
        assert len(spread) == 1 or whole, f"trial {trial.trial} is spread over {spread} without owning them"
    held = len(state.live()) + len(state.leaving())
    assert held <= job.offer.max_instances, f"{held} instances are held"
    others = [r for r in state.live() if r.market != state.chosen().market and not r.instead_of_spot]
    assert not others, f"{others} are held where {state.chosen().market} is planned"
    open_uses = [use for use in state.allocations if use.ended_at is None]
    assert sorted(use.trial for use in open_uses) == sorted(t.trial for t in state.running()), "an allocation leaks"
    for trial in state.trials:
        assert (trial.iterations == 0) == (trial.checkpoint is None), f"trial {trial.trial} has no durable progress"
        assert [report.iterations for report in trial.reports] == list(range(1, trial.iterations + 1)), (
            f"trial {trial.trial} trained an acknowledged iteration again, or skipped one"
        )
    if is_told and job.max_cost_usd is not None:
        spent_usd = budget.bill_usd(job, state, state.now)
        assert spent_usd <= job.max_cost_usd + 1e-6, f"{spent_usd} USD spent of {job.max_cost_usd}"
    if state.phase is Phase.FINISHED:
        held_still = [r.instance for r in state.instances.values() if r.status not in GONE]
        assert not held_still, f"finished with {held_still} held"
        if state.outcome == "done":
            ranked = state.stages[-1].ranking
            assert all(state.trials[t].status is TrialStatus.COMPLETED for t in ranked), "a winner is not complete"


def _validate_indices(job: Job, state: State) -> None:
    """What is kept of trials and slots is what a walk through all of them finds."""
    running = [trial for trial in state.trials if trial.status is TrialStatus.RUNNING]
    queued = [trial for trial in state.trials if trial.status is TrialStatus.QUEUED]
    assert (state.running(), len(state.runners)) == (running, len(running)), "the running trials are others"
    assert (state.queued(), len(state.waiters)) == (queued, len(queued)), "the waiting trials are others"
    assert state.waiters.first(2) == queued[:2], "others are the first to get a slot"
    first_due_at = min((trial.due_at for trial in running), default=math.inf)
    assert state.runners.first_due_at() == first_due_at, f"the first trial is due at {first_due_at}"
    assert state.runners.due(first_due_at) == [t for t in running if t.due_at <= first_due_at], "others are due"
    for instance in state.instances:
        there = [trial for trial in running if any(slot.instance == instance for slot in trial.gang)]
        assert (state.runners.on(instance), state.runners.uses(instance)) == (there, bool(there)), f"on {instance}"
    usable = {record.instance for record in state.instances.values() if record.status is InstanceStatus.READY}
    taken = sum(slot.instance in usable for trial in running for slot in trial.gang)
    free_gpus = len(usable) * job.offer.gpus - taken
    assert state.free_slots(job.offer.gpus).gpus == free_gpus, f"{free_gpus} GPUs are free"
    over = [(use, use.ended_at) for use in state.allocations if use.ended_at is not None]
    gpu_s = sum(len(use.gang) * max(0.0, ended_at - use.started_at) for use, ended_at in over)
    assert math.isclose(sum(state.used_gpu_s().values()), gpu_s, abs_tol=1e-6), f"{gpu_s} GPU-seconds are over"


_USABLE = (InstanceStatus.READY, InstanceStatus.LEAVING)
