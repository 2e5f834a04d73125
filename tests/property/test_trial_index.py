"""Who runs, who waits and who is due, as the state keeps it: what a walk through all trials finds."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Slot
from rubberband.executor.core.state import StageRecord, TrialStatus
from tests.builders.budget import examples
from tests.builders.jobs import JOB

STATUSES = list(TrialStatus)


@settings(max_examples=examples(120))
@given(data=st.data())
def test_the_index_of_trials_equals_a_walk(data: st.DataObject) -> None:
    state, now = Controller(JOB).state, 0.0
    lane = state.lanes[0]
    lane.begin(StageRecord(stage=0, trials=tuple(range(len(state.trials))), started_at=now), state.trials)
    slots = [Slot(instance=f"i-{number}", gpu=gpu) for number in range(3) for gpu in range(2)]
    for _ in range(data.draw(st.integers(1, 30))):
        trial = data.draw(st.sampled_from(state.trials))
        if trial.status is TrialStatus.RUNNING and data.draw(st.booleans()):
            lane.runners.note_due(trial, now + data.draw(st.sampled_from([1.0, 5.0, 60.0])))
        else:
            status = data.draw(st.sampled_from(STATUSES))
            if trial.status is not TrialStatus.RUNNING:
                trial.gang = tuple(data.draw(st.lists(st.sampled_from(slots), min_size=1, unique=True)))
            state.put(trial, status)
        now += data.draw(st.sampled_from([0.0, 0.5, 10.0]))
        running = [trial for trial in state.trials if trial.status is TrialStatus.RUNNING]
        queued = [trial for trial in state.trials if trial.status is TrialStatus.QUEUED]
        assert (lane.running(), lane.queued()) == (running, queued)
        assert (len(lane.runners), len(lane.waiters)) == (len(running), len(queued))
        count = data.draw(st.integers(0, len(state.trials)))
        assert lane.waiters.first(count) == queued[:count]
        assert lane.runners.first_due_at() == min((trial.due_at for trial in running), default=math.inf)
        assert lane.runners.due(now) == [trial for trial in running if trial.due_at <= now]
        for instance in ("i-0", "i-1", "i-2"):
            there = [trial for trial in running if any(slot.instance == instance for slot in trial.gang)]
            assert (lane.runners.on(instance), lane.runners.uses(instance)) == (there, bool(there))
