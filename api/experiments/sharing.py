"""The sharing of a pool: a policy says how many instances each running experiment may hold, and its driver obeys.

Every experiment reports its demand (`rubberband.executor.core.demand`). The policy gives each at least what it is
promised, and divides the rest. It decides again when an experiment begins, ends or passes a SYNC, when a promise begins
or ends, and every half minute.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from rubberband.api.experiments.admission import calendar_of
from rubberband.api.settings import SharedPool
from rubberband.api.store.sql import Store
from rubberband.executor.core import rules
from rubberband.executor.core.demand import demand
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from rubberband.executor.observed import Observed
from rubberband.planner.sharing import Allotments, Capacity, Demand, make_policy
from rubberband.values.submission import Submission

DECIDE_EVERY_S = 30.0
"""Time after which it decides again, whatever happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A running experiment of the pool."""

    row: Submission
    observed: Observed | None
    """None: it has no journal yet."""


class Sharing:
    """Divides a pool among the running experiments of a service. For the watcher's thread."""

    def __init__(
        self, pool: SharedPool, store: Store, folder: Callable[[str], ExperimentFolder], clock: Callable[[], float]
    ) -> None:
        self._pool, self._store, self._folder, self._clock = pool, store, folder, clock
        self._policy = make_policy(pool.policy)
        self._capacity = Capacity(instances=pool.instances, gpus_per_instance=pool.gpus_per_instance)
        self._current: Allotments = {}
        self._asked: dict[tuple[str, int], int] = {}
        """Experiment and attempt -> instances that it was allotted last."""
        self._seen: object = None
        self._decide_at = 0.0

    def is_member(self, row: Submission) -> bool:
        """Whether an experiment runs on the pool."""
        return bool(row.words.get("resources", {}).get("provider") == self._pool.provider)

    def begin(self, row: Submission) -> None:
        """Allot an experiment that is about to start what it is promised, before it asks for an instance."""
        self._ask(row, 0)

    def round(self, members: Iterable[Member]) -> None:
        """Decide, if anything happened since the latest decision. Raises JournalError."""
        now, running = self._clock(), [member for member in members if self.is_member(member.row)]
        calendar = calendar_of(self._pool, self._store.promises())
        names = {*calendar.promises, *(member.row.name for member in running)}
        promised = {name: calendar.promised(name, now) for name in names}
        seen = promised, [_stage_of(member) for member in running]
        if seen == self._seen and now < self._decide_at:
            return
        self._seen, self._decide_at = seen, now + DECIDE_EVERY_S
        demands = [found for member in running if (found := self._demand(member, promised)) is not None]
        asking = {found.name for found in demands}
        demands += reserved(promised, asking, now)
        self._current = self._policy.allot(demands, self._capacity, self._current, now)
        for member in running:
            if member.observed is not None and member.row.name in asking:
                gpus = sum(self._current.get(member.row.name, {}).values())
                self._ask(member.row, gpus // member.observed.controller.job.offer.gpus, member.observed)

    def _demand(self, member: Member, promised: Mapping[str, int]) -> Demand | None:
        observed, row = member.observed, member.row
        if observed is None or observed.header.kind.is_simulated:
            return None
        controller = observed.controller
        weight = self._pool.weights.get(row.owner, 1.0)
        return demand(
            controller.job,
            controller.state,
            observed.now,
            arrived_at=row.created_at,
            weight=weight,
            promised_gpus=promised[row.name],
        )

    def _ask(self, row: Submission, instances: int, observed: Observed | None = None) -> None:
        """Ask the driver to hold so many instances; do nothing if that was the latest request or holds already."""
        key = row.name, row.attempt
        if self._asked.get(key) == instances:
            return
        if key not in self._asked and observed is not None:
            job, state = observed.controller.job, observed.controller.state
            if state.allotment is not None and rules.most_instances(job, state) == instances:
                self._asked[key] = instances
                return
        asked = DriverRequest(
            id=f"pool-{secrets.token_hex(8)}", kind="limit", asked_at=time.time(), max_instances=instances
        )
        Inbox(self._folder(row.name).inbox).put(asked)
        self._asked[key] = instances


def reserved(promised: Mapping[str, int], asking: Collection[str], now: float) -> list[Demand]:
    """Return demands for the promised GPUs of experiments that do not ask yet, as their processes start."""
    return [
        Demand(name=name, arrived_at=now, seconds_left=[1.0] * gpus, promised_gpus=gpus)
        for name, gpus in sorted(promised.items())
        if gpus > 0 and name not in asking
    ]


def _stage_of(member: Member) -> tuple[str, int, int, str]:
    """Return the facts that make it decide again: another experiment, attempt, stage, or end."""
    state = None if member.observed is None else member.observed.controller.state
    begun, course = (-1, "") if state is None else (len(state.stages), state.course)
    return member.row.name, member.row.attempt, begun, course
