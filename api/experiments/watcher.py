"""The thread that watches all experiments: it starts queued ones, follows running ones, finds those run by hand."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rubberband.api.experiments.budgets import Spending
from rubberband.api.experiments.queueing import NO_LINE, Line, Queue, Waiting, holder_of, waiting_of
from rubberband.api.experiments.recording import LONG_MOMENT_S, MOMENT_S, Newcomers, Recorder
from rubberband.api.experiments.sharing import Member, Sharing
from rubberband.api.experiments.starting import GOES_ON, AdmissionPolicy, NotStartedError, Processes
from rubberband.api.settings import Settings
from rubberband.api.store import Store
from rubberband.errors import JournalError
from rubberband.executor.journal.folder import ExperimentFolder, Stamp, stamp_of
from rubberband.executor.journal.inbox import DriverRequest, HostedRun, Inbox
from rubberband.executor.run.follower import JournalFollower, at_work
from rubberband.executor.run.notices import notice_refusal
from rubberband.states import AT_WORK, ExperimentState
from rubberband.values.kinds import kind_in
from rubberband.values.submission import Submission
from rubberband.views.formatting import printable

log = logging.getLogger("rubberband.api.experiments")
_Found = TypeVar("_Found")

BRISK_S, FAST_S, SLOW_S, RETRY_S = 0.02, 0.1, 1.0, 1.0
LOOK_AROUND_S = 2.0
"""Interval of looking for experiments that are run or resumed by hand."""
LOOKING_SHARE = 0.02
"""Largest share of the time spent looking, where there are very many."""
FOLLOWED_AT_ONCE = 5
"""Unfinished newcomers handled in one round, so that others do not wait."""
PRUNE_S = 60.0
WELL_S = 60.0
"""The watcher is unhealthy if one round takes longer than this."""

IDLE = frozenset({ExperimentState.QUEUED, ExperimentState.UNREADABLE})
"""Known, and not followed in every round."""


class Watcher:
    """Watches the experiments of one server in a thread. Requests report their changes by `kick`."""

    def __init__(self, store: Store, processes: Processes, wake: Callable[[], None], settings: Settings) -> None:
        self._settings, self._policy = settings, AdmissionPolicy(settings, store)
        self._store, self._processes, self._wake, self._clock = store, processes, wake, settings.clock
        self._rows: dict[str, Submission] = {}
        """Experiments that are queued, run, or cannot be read."""
        self._queue = Queue({} if settings.pool is None else settings.pool.weights)
        self._waiting: dict[str, Waiting] = {}
        """Name -> experiment of the queue."""
        self.line: Line = NO_LINE
        """The queue and the slots as the latest round left them. Any thread may read it."""
        self._settled: dict[str, Stamp | float] = {}
        """All others: the stamp of the journal, or `changed_at` of the row until the journal is looked at."""
        self._recorders: dict[str, Recorder] = {}
        self._spawned: set[tuple[str, float, int]] = set()
        """Name, begin and attempt: a deleted experiment's name is free for another one."""
        self._by_hand: set[str] = set()
        """Experiments resumed by hand: they never restart automatically."""
        self._logged: set[str] = set()
        self._loaded = False
        self._is_lost = self._is_pruning = False
        self._look_at, self._pruned_at = -math.inf, -math.inf
        pool = settings.pool
        self._spending = Spending(settings, store)
        self._sharing = None if pool is None else Sharing(pool, store, self.folder, self._clock)
        self._newcomers = Newcomers(settings, store, wake)
        self._dirty: dict[str, None] = {}
        """Names of rows that requests changed, in that order."""
        self._dirty_lock = threading.Lock()
        self._kicked = threading.Event()
        self._closing = threading.Event()
        self._well_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="rubberband-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        self._kicked.set()
        if self._thread is not None:
            self._thread.join()
        for recorder in self._recorders.values():
            recorder.close()
        self._processes.let_go()

    def kick(self, name: str) -> None:
        """Look at this experiment at once: its row or its folder was changed."""
        with self._dirty_lock:
            self._dirty[name] = None
        self._kicked.set()

    def follower(self, name: str) -> JournalFollower | None:
        """Return the journal of an experiment that is followed now."""
        recorder = self._recorders.get(name)
        return None if recorder is None else recorder.follower

    def shares_pool(self, row: Submission) -> bool:
        """Whether a pool allots an experiment its instances."""
        return self._sharing is not None and self._sharing.is_member(row)

    @property
    def promising(self) -> AbstractContextManager[object]:
        """Held while promises of a pool move: none is added meanwhile."""
        return nullcontext() if self._sharing is None else self._sharing.promising

    def folder(self, name: str) -> ExperimentFolder:
        """Return the folder of an experiment."""
        return ExperimentFolder(home=self._settings.home, name=name, store=self._settings.store)

    @property
    def is_well(self) -> bool:
        """Whether the store answers and no round hangs."""
        alive = self._thread is not None and self._thread.is_alive()
        return alive and not self._is_lost and time.monotonic() - self._well_at < WELL_S

    def _run(self) -> None:
        while not self._closing.is_set():
            wait_s = RETRY_S
            try:
                self.round()
                busy = self._runs_any or self._is_pruning or bool(self._newcomers.others or len(self._queue))
                wait_s = BRISK_S if self._newcomers.found else FAST_S if busy else SLOW_S
                if self._is_lost:
                    log.warning("the store can be used again")
                self._is_lost, self._well_at = False, time.monotonic()
            except JournalError as error:
                if not self._is_lost:
                    log.error(
                        "the store cannot be used; experiments continue, and are watched again once it can: %s", error
                    )
                self._is_lost = True
            except Exception:
                log.exception("watching the experiments failed; retrying")
            self._kicked.wait(wait_s)
            self._kicked.clear()

    @property
    def _runs_any(self) -> bool:
        return any(row.state in AT_WORK for row in self._rows.values())

    def round(self) -> None:
        """Look at everything once. The next round catches up with what this one could not do.

        Raises JournalError if the store does not answer, or if another server has it: then nothing is changed.
        """
        self._store.keep()
        if not self._loaded:
            self._load()
        self._take_changes()
        self._processes.reap()
        for name in [name for name, row in self._rows.items() if row.state not in IDLE]:
            self._alone(name, self._follow)
        for row, why in self._spending.to_end(self._rows.values()):
            self._alone(row.name, partial(self._end, why=why))
        self._start_queued()
        self._share()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_around()
            took_s = time.monotonic() - now
            self._look_at = now + max(LOOK_AROUND_S, took_s / LOOKING_SHARE)
        for row, stamp in self._newcomers.take(self._is_known, MOMENT_S if self._runs_any else LONG_MOMENT_S):
            self._settled[row.name] = stamp
        for _ in self._newcomers.others[:FOLLOWED_AT_ONCE]:
            self._take_in(self._newcomers.others.pop())
        self._prune(now)

    def _share(self) -> None:
        """Let the pool decide who may hold how many instances."""
        if self._sharing is None:
            return
        at_work = [row for row in self._rows.values() if row.state in AT_WORK]
        try:
            self._sharing.round([Member(row, self.follower(row.name), self._waits(row)) for row in at_work])
        except JournalError:
            raise
        except Exception:
            if "the pool" not in self._logged:
                self._logged.add("the pool")
                log.exception("the pool cannot be shared; retrying")

    def _prune(self, now: float) -> None:
        """Delete old data; events a few in each round, so that running experiments do not wait."""
        if now - self._pruned_at >= PRUNE_S:
            self._store.prune(at=self._clock())
            self._pruned_at, self._is_pruning = now, True
        if self._is_pruning:
            self._is_pruning = self._store.prune_feed(at=self._clock()) > 0

    def _alone(self, name: str, act: Callable[[str], _Found]) -> _Found | None:
        """Call `act` for one experiment. An error is logged once, and harms no other experiment."""
        try:
            return act(name)
        except JournalError:
            raise
        except Exception:
            if name not in self._logged:
                self._logged.add(name)
                log.exception("experiment %s cannot be watched; retrying", name)
            return None

    # Rows

    def _load(self) -> None:
        page = self._store.submissions(limit=500)
        rows = [*page.items]
        while page.next is not None:
            page = self._store.submissions(limit=500, after=page.next)
            rows += page.items
        for row in reversed(rows):
            self._take(row)
        for name in self._queue:
            self._alone(name, self._is_refused)
        self._loaded = True

    def _take_changes(self) -> None:
        with self._dirty_lock:
            dirty = list(self._dirty)
        for name in dirty:
            with self._dirty_lock:
                self._dirty.pop(name, None)
            try:
                row = self._store.submission(name)
            except JournalError:
                self.kick(name)
                raise
            if row is not None:
                self._take(row)
            else:
                self._forget(name)
        if dirty:
            self._wake()

    def _forget(self, name: str) -> None:
        """Forget a deleted experiment."""
        self._leave_queue(name)
        self._rows.pop(name, None)
        self._settled.pop(name, None)
        self._by_hand.discard(name)
        if (recorder := self._recorders.pop(name, None)) is not None:
            recorder.close()

    def _take(self, row: Submission) -> None:
        """File a row by its state; those of another home are left to its service."""
        if row.home:
            return
        name = row.name
        if row.state is ExperimentState.QUEUED:
            self._queue.put(name, row.owner)
            self._waiting[name] = waiting_of(row)
        else:
            self._leave_queue(name)
        if row.state in AT_WORK | IDLE:
            self._rows[name] = row
            self._settled.pop(name, None)
        elif name in self._rows or name not in self._settled:
            self._settle(row)

    def _leave_queue(self, name: str) -> None:
        self._queue.drop(name)
        self._waiting.pop(name, None)

    def _settle(self, row: Submission) -> None:
        was_followed = self._rows.pop(row.name, None) is not None
        recorder = self._recorders.pop(row.name, None)
        if recorder is not None:
            recorder.close()
        folder = self.folder(row.name)
        stamp = stamp_of(folder)
        # It may have been resumed and have written since: then it is looked at again.
        self._settled[row.name] = row.changed_at if not was_followed else () if at_work(folder) else stamp

    # Running experiments

    def _follow(self, name: str) -> None:
        row = self._rows[name]
        recorder = self._recorders.get(name)
        if recorder is None:
            recorder = self._recorders[name] = Recorder(self.folder(name), self._store, self._wake, clock=self._clock)
        found = recorder.look(row)
        if found is None:
            if not self._is_refused(name):
                self._spawn(row)
            return
        was_cut_off = found.state is ExperimentState.INTERRUPTED and row.state in AT_WORK
        may_go_on = was_cut_off and name not in self._by_hand
        act = self._policy.resumption(row, self.folder(name), recorder.follower) if may_go_on else None
        kept = recorder.keep(row, found, restarts=act is not None)
        if was_cut_off and kept.state in (ExperimentState.INTERRUPTED, row.state):
            ended = "its process has ended; resume it to continue"
            log.warning("experiment %s: %s", name, GOES_ON if act is not None else printable(found.reason) or ended)
        if act is not None and kept.state is row.state:
            cost_usd = None if recorder.follower is None else recorder.follower.resumed().cost_usd
            self._recorders.pop(name).close()
            self.restart(kept, act, cost_usd)
        else:
            self._take(kept)  # it closes the journal

    def restart(self, row: Submission, act: str, cost_usd: float | None) -> None:
        """Queue an experiment whose process died; it starts once there is money for the rest of `cost_usd`."""
        self._change(row, ExperimentState.QUEUED, GOES_ON, request=act, admitted_usd=cost_usd)

    def _end(self, name: str, why: str) -> None:
        """Ask an experiment to end, as its owner's budget is used up."""
        row = self._rows[name]
        asked = DriverRequest(id=f"budget-{row.attempt}", kind="cancel", asked_at=self._clock(), reason=why)
        Inbox(self.folder(name).inbox).put(asked)
        self._spending.ends(row)  # only now: if the disk was full, it is asked again
        log.warning("experiment %s: %s", name, why)

    # Queued experiments

    def _start_queued(self) -> None:
        """Start those that a pool has promised instances, and others while slots are free: owners take turns."""
        running = Counter(row.owner for row in self._holders())
        promised = self._promised()
        for queued in self._queue:
            if queued in promised:
                running[self._rows[queued].owner] += bool(self._alone(queued, self._begin))
        tried = set(promised)
        while running.total() < self._settings.limits.max_running:
            name = self._queue.next(running, without=tried)
            if name is None:
                break
            tried.add(name)
            owner = self._rows[name].owner
            if self._alone(name, self._begin):
                running[owner] += 1
                self._queue.took_turn(owner)
        self._publish(promised)

    def _holders(self) -> list[Submission]:
        """The experiments that have a slot."""
        begun = (row for row in self._rows.values() if row.state in AT_WORK and row.attempt > 0)
        return [row for row in begun if not self._waits(row)]

    def _publish(self, promised: Collection[str]) -> None:
        """Let requests read the queue: without those that a pool has promised instances, or that wait for money."""
        rows = ((name, self._rows[name]) for name in self._queue)
        elsewhere = [name for name, row in rows if name in promised or row.reason not in ("", GOES_ON)]
        self.line = Line(
            queue=self._queue.copy(without=elsewhere),
            running=[holder_of(row) for row in self._holders()],
            waiting=dict(self._waiting),
            slots=self._settings.limits.max_running,
        )

    def _waits(self, row: Submission) -> bool:
        return (recorder := self._recorders.get(row.name)) is not None and recorder.waits

    def _promised(self) -> Collection[str]:
        """The experiments that a pool has promised instances: they wait for no slot."""
        if self._sharing is None or not len(self._queue):
            return ()
        return {promise.experiment for promise in self._store.promises()}

    def _begin(self, name: str) -> bool:
        """Record a new attempt, then start its process; return False if it must wait or cannot start."""
        row, folder = self._rows[name], self.folder(name)
        if at_work(folder):  # an earlier process has not quite ended
            return False
        if row.words and row.attempt == 0 and folder.exists:
            self._refuse(row, ExperimentState.REFUSED, "an experiment run by hand has taken the name")
            return False
        if not self._spending.is_due(row) or self._is_refused(name):
            return False
        if reason := self._spending.shortage(row):
            if reason != row.reason:
                self._change(row, ExperimentState.QUEUED, reason)
            return False
        attempt = row.attempt + 1
        if not self._change(row, ExperimentState.STARTING, "", attempt=attempt):
            return False
        self._spawn(self._store.submission(row.name) or row)  # its limits may have changed while it was queued
        return True

    def _is_refused(self, name: str) -> bool:
        """Whether the settings of now forbid a start; if so, record it."""
        refused = self._policy.refused(self._rows[name], self.folder(name))
        if refused is not None:
            self._refuse(self._rows[name], refused.state, refused.reason)
        return refused is not None

    def _spawn(self, row: Submission) -> None:
        """Start its process, unless this attempt failed to start before."""
        folder = self.folder(row.name)
        order = self._order(row, folder)
        try:
            if (row.name, row.created_at, row.attempt) in self._spawned:
                raise NotStartedError(f"its process ended before the experiment started; see {folder.process_log}")
            if self.shares_pool(row) and self._sharing is not None:
                self._sharing.begin(row)
            self._by_hand.discard(row.name)
            self._spawned.add((row.name, row.created_at, row.attempt))  # only now: what fails before is tried again
            self._processes.start(folder, order)
        except NotStartedError as error:
            state = ExperimentState.INTERRUPTED if order.resume else ExperimentState.REFUSED
            self._refuse(row, state, str(error))

    def _order(self, row: Submission, folder: ExperimentFolder) -> HostedRun:
        return HostedRun.of(
            attempt=row.attempt,
            resume=folder.exists,
            words=row.words,
            submitted_at=row.created_at,
            policy=row.policy,
            code=tuple(map(str, self._settings.code)),
            entrypoints=tuple(self._settings.entrypoints),
            most_usd=self._settings.limits.max_cost_usd,
            pool=self._settings.pool.folder if self._settings.pool is not None and self.shares_pool(row) else None,
            waits=self._settings.auto_resume,
            store=self._settings.store,
        )

    def _refuse(self, row: Submission, state: ExperimentState, reason: str) -> None:
        """Record that it does not start, and send the operator a notice."""
        if self._change(row, state, reason) and self._settings.notify:
            is_rehearsal = kind_in(row.words).is_simulated
            notice_refusal(row.name, state, reason, self._settings.notify, is_rehearsal=is_rehearsal)

    def _change(
        self,
        row: Submission,
        state: ExperimentState,
        reason: str,
        *,
        attempt: int | None = None,
        request: str = "",
        admitted_usd: float | None = None,
    ) -> bool:
        given = {"attempt": attempt, "admitted_usd": admitted_usd}
        change: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        change |= {"state": state, "reason": reason}
        at = self._clock()
        kept = self._store.change(row.name, at=at, expected={row.state}, request=request, **change)
        if kept:
            self._wake()
            self._take(replace(row, changed_at=at, **change))
        else:
            self.kick(row.name)
        return kept

    # Experiments run by hand

    def _look_around(self) -> None:
        for name in [name for name, row in self._rows.items() if row.state is ExperimentState.UNREADABLE]:
            self._alone(name, self._follow)
        for name, seen in list(self._settled.items()):
            folder = self.folder(name)
            stamp = stamp_of(folder)
            if _is_newer(stamp, seen) or (stamp is None and at_work(folder)):
                self._wake_up(name)
            else:
                self._settled[name] = stamp
        self._newcomers.look(self._rows.keys() | self._settled.keys())

    def _is_known(self, name: str) -> bool:
        return name in self._rows or name in self._settled

    def _wake_up(self, name: str) -> None:
        """Follow an experiment again that was resumed or changed by hand."""
        row = self._store.submission(name)
        if row is None:
            self._forget(name)
        elif row.state is ExperimentState.QUEUED:  # a request resumed it since the last look: no process has begun
            self._take(row)
        elif not row.home:
            self._settled.pop(name, None)
            self._rows[name] = row
            self._by_hand.add(name)
            self._alone(name, self._follow)

    def _take_in(self, folder: ExperimentFolder) -> None:
        """Add an experiment that was run by hand; its events come first, so that none is lost."""
        if self._is_known(folder.name):  # submitted meanwhile
            return
        recorder = Recorder(folder, self._store, self._wake, patience=1, clock=self._clock)
        try:
            row = recorder.first_row()
        except JournalError:
            recorder.close()
            raise
        if row is None:
            recorder.close()
            return
        if not self._store.add(row):  # submitted at this moment
            row = self._store.submission(folder.name) or row
        if row.home:
            recorder.close()
            return
        self._recorders[folder.name] = recorder
        self._wake()
        self._rows[folder.name] = row
        self._take(row)


def _is_newer(stamp: Stamp, seen: Stamp | float) -> bool:
    """Whether a journal was written since `seen`, a stamp or Unix time."""
    if isinstance(seen, float):
        return any(written_ns > seen * 1e9 for written_ns, _ in stamp or ())
    return stamp != seen
