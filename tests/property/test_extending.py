"""What a preview says of other limits is what comes of them, where all goes as planned."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.executor import (
    Controller,
    Event,
    Extension,
    Job,
    LimitsChanged,
    Phase,
    State,
    VirtualBackend,
    bill_usd,
    drive,
)
from rubberband.executor.core.extending import extension
from tests.builders.budget import examples
from tests.builders.invariants import validate
from tests.builders.memory import MemoryJournal
from tests.builders.planned_jobs import planned_jobs
from tests.builders.timed_requests import TimedInbox, extend
from tests.builders.virtual_runs import jct_s


class Watch:
    """Looks at a run when its limits are changed: what the preview says just then, of both."""

    def __init__(self, job: Job, deadline_s: float) -> None:
        self._job = job
        self._deadline_s = deadline_s
        self.seen: Extension | None = None

    def __call__(self, event: Event, controller: Controller) -> None:
        validate(controller)
        if isinstance(event, LimitsChanged) and controller.state.outcome is None:
            now, state = event.occurred_at, controller.state.supposed(job=self._job)
            self.seen = extension(state, now, deadline_s=self._deadline_s)


def run(job: Job, at: float | None, deadline_s: float) -> tuple[State, Watch]:
    """Drive `job` to its end; `at` an instant it is given until `deadline_s`."""
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    watch = Watch(job, deadline_s)
    asked = [] if at is None else [extend(at, deadline_s=deadline_s)]
    controller = Controller(job)
    drive(controller, backend, MemoryJournal(), observers=[watch], requests=TimedInbox(backend.now, *asked))
    return controller.state, watch


@given(
    planned_jobs(st.sampled_from([0.0, 0.1, 0.5]), st.none()),
    st.floats(0.0, 0.95),
    st.sampled_from([1.05, 1.3, 2.0, 10.0]),
)
@settings(deadline=None, max_examples=examples(125))
def test_expectations_with_and_without_a_later_deadline_come_true(job: Job, when: float, later: float) -> None:
    assert job.deadline_s is not None
    deadline_s = later * job.deadline_s
    extended, watch = run(job, when * job.prediction.jct_s, deadline_s)
    seen = watch.seen
    assume(seen is not None)
    assert seen is not None
    as_it_was, _ = run(job, None, deadline_s)
    for state, outlook in ((as_it_was, seen.before), (extended, seen.after)):
        assert state.phase is Phase.FINISHED
        assert outlook.feasible
        assert outlook.jct_s == pytest.approx(jct_s(state), abs=1e-3)
        assert outlook.cost_usd == pytest.approx(bill_usd(state, state.now), abs=0.005)
        assert outlook.plan.stages[seen.stage :] == state.plan.stages[seen.stage :]
    assert seen.added_usd <= 0.005
