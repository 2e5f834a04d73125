"""Experiments of this machine, read from their journals, with the answers that a service would give."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import rubberband
from rubberband.client.models import ExperimentDetail, ExperimentView, ExtensionView
from rubberband.errors import InputError, RubberbandError
from rubberband.executor.journal.folder import ExperimentFolder, folders, open_folder, read_labels, stamp_of
from rubberband.executor.journal.inbox import DriverRequest, Inbox, NewTrials, pool_of
from rubberband.executor.logs.pages import PrintedLine, Wanted, page, trial_files
from rubberband.executor.run.follower import JournalFollower, at_work, explaining, outcome_of
from rubberband.files import write_atomically
from rubberband.states import OVER, Action, ExperimentState, Fact, obstacle, pool_sets_instances
from rubberband.values.submission import WITHDRAWN, Submission
from rubberband.views.experiment import experiment_detail, experiment_view, extension_view, to_bytes
from rubberband.views.trial import why_not_stopped

PAGE_LINES = 10_000
FOLLOW_EVERY_S = 0.5


class LocalExperiment:
    """Experiment of this machine."""

    def __init__(self, folder: ExperimentFolder, follower: JournalFollower) -> None:
        self._folder, self._follower = folder, follower

    def look(self) -> ExperimentDetail:
        """Return the answer of `GET /v1/experiments/NAME`. Raises JournalError."""
        return experiment_detail(self._now(), self._follower.result())

    def listed(self) -> ExperimentView:
        """Return it as `GET /v1/experiments` lists it. Raises JournalError."""
        return experiment_view(self._now())

    def _now(self) -> Submission:
        follower, busy = self._follower, at_work(self._folder)
        follower.refresh(live=busy)
        header = follower.header
        outcome, reason = outcome_of(follower.controller)
        return Submission(
            name=header.name,
            state=outcome or (ExperimentState.RUNNING if busy else ExperimentState.INTERRUPTED),
            created_at=header.created_at,
            changed_at=header.created_at,
            words=header.setup["experiment"],
            reason=reason if outcome or busy else follower.controller.state.stopped,
            summary=follower.summary(),
            labels=read_labels(self._folder),
        )

    def extension(
        self,
        deadline: str | None,
        max_cost_usd: float | None,
        target: float | None = None,
        trials: str | dict[str, Any] | None = None,
        *,
        granted: bool,
    ) -> ExtensionView:
        """Return the effect of other limits or more trials, and send them to the driver if `granted`.

        `trials`: as `num_samples` has them, or the values of a `NewTrials`. Raises InputError.
        """
        view, busy = self.look(), at_work(self._folder)
        if why := self._obstacle(view, "extend" if trials is None else "add"):
            raise InputError(f"experiment {view['name']!r} is {view['state']}: {why}")
        new = NewTrials(**trials) if isinstance(trials, dict) else None
        if isinstance(trials, str):
            new = self._follower.new_trials(trials)
        limits = self._follower.limits(deadline=deadline, max_cost_usd=max_cost_usd, target=target)
        found = self._follower.extension(limits, driven=busy, trials=new)
        if max_cost_usd is not None:
            from rubberband.executor.run.allowance import require_going_on

            require_going_on(self._follower, self._folder.home, max_cost_usd=max_cost_usd, goes_on=False)
        if granted:
            pool = self._follower.header.setup["experiment"].get("resources", {}).get("pool")
            if pool is not None:
                from rubberband.planning.month_cap import require_money

                require_money(Path(pool), found.added_usd, found.added_s, "the extension")
            if (deadline, max_cost_usd, target) != (None, None, None):
                self._ask("extend", **asdict(limits))
            if new is not None:
                self._ask("add", trials=new)
        return {**extension_view(found), "applied": granted}

    def cancel(self) -> str:
        """Ask its driver for a clean end. Returns the effect in one line."""
        view = self.look()
        if why := self._obstacle(view, "cancel"):
            return f"{view['name']} is {view['state']}: {why}"
        if view["state"] == "done":
            inbox = Inbox(self._folder.inbox)
            for request in inbox.extensions():
                inbox.discard(request.id)
            if not at_work(self._folder):
                return f"{view['name']} is done: {WITHDRAWN}"
        self._ask("cancel")
        return f"{view['name']}: cancellation requested"

    def limit(self, max_instances: int | None) -> None:
        """Ask its driver to hold at most `max_instances` from now on; None lifts the limit. Raises InputError."""
        view = self.look()
        if why := self._obstacle(view, "limit"):
            raise InputError(f"experiment {view['name']!r} is {view['state']}: {why}")
        if (pool := pool_of(self._folder)) is not None:
            raise InputError(f"experiment {view['name']!r} is {view['state']}: {pool_sets_instances(Path(pool).name)}")
        self._ask("limit", max_instances=max_instances)

    def stop(self, trials: Sequence[int]) -> None:
        """Ask its driver to train trials no more: all of them or, if one cannot be stopped, none. Raises InputError."""
        view = self.look()
        why = self._obstacle(view, "stop")
        result = None if why else self._follower.result()
        for trial in trials:
            if why := why or why_not_stopped(result, trial):
                raise InputError(f"experiment {view['name']!r} is {view['state']}: {why}")
        for trial in trials:
            self._ask("stop", trial=trial)

    def _obstacle(self, view: ExperimentDetail, action: Action) -> str:
        """Return the reason why the action is not possible; empty if it is."""

        def holds(fact: Fact) -> bool:
            if fact == "targeted":
                return self._follower.has_reached
            if fact == "asked":
                return bool(Inbox(self._folder.inbox).extensions())
            return fact != "open" or self._follower.goes_on()

        return obstacle(ExperimentState(view["state"]), action, holds)

    def lines(
        self, trial: int | None, *, rank: int | None = None, process: bool, follow: bool
    ) -> Iterator[tuple[int | None, int | None, str]]:
        """Iterate over the output of its trials (or one, or its process) and failures, as (trial, rank, text).

        With `follow`, wait for more until it has ended. Raises InputError if the trial does not exist.
        """
        view = self.look()
        num_trials = view["summary"]["trials"]
        if trial is not None and not 0 <= trial < num_trials:
            raise InputError(f"experiment {view['name']!r} has no trial {trial}; it has 0 to {num_trials - 1}")
        cursor: str | None = None
        while True:
            is_whole = not follow or view["state"] != "running"
            found, following = self._page(trial, process, cursor, is_whole, Wanted(rank=rank))
            yield from ((line.trial, line.rank, line.text) for line in found)
            goes_on, cursor = bool(found) or following != cursor, following
            if not goes_on and is_whole:
                return
            if not goes_on:
                time.sleep(FOLLOW_EVERY_S)
                view = self.look()

    def _page(
        self, trial: int | None, process: bool, cursor: str | None, is_whole: bool, wanted: Wanted
    ) -> tuple[list[PrintedLine], str]:
        read = partial(page, cursor=cursor, limit=PAGE_LINES, is_whole=is_whole, wanted=wanted)
        if process:
            return read({None: self._folder.process_log}, ())
        failures = [failure for failure in self._follower.failures if trial in (None, failure.trial)]
        return read(trial_files(self._folder.logs, trial), failures)

    def _ask(self, kind: Any, **limits: Any) -> None:
        request = DriverRequest(id=f"{kind}-{uuid.uuid4()}", kind=kind, asked_at=time.time(), **limits)
        Inbox(self._folder.inbox).put(request)


@contextmanager
def local_experiment(name: str) -> Iterator[LocalExperiment]:
    """Open an experiment of this machine. Raises InputError, with the existing names, if it is not here."""
    folder = open_folder(name)
    folder.require()
    with _opened(folder) as found:
        yield found


@contextmanager
def _opened(folder: ExperimentFolder) -> Iterator[LocalExperiment]:
    with explaining(folder), closing(JournalFollower(folder)) as follower:
        yield LocalExperiment(folder, follower)


def local_experiments(home: Path, store: str | None) -> Iterator[ExperimentView]:
    """Yield the experiments of a home (and a store of journals), by name, also those whose journal cannot be read."""
    for folder in folders(home, store):
        try:
            yield _kept_line(folder) or _line(folder)
        except RubberbandError as error:
            state = ExperimentState.UNREADABLE
            unreadable = Submission(name=folder.name, state=state, created_at=0.0, changed_at=0.0, reason=str(error))
            yield experiment_view(unreadable)


# Journals of hundreds of experiments take seconds to read: the line of one that is over is kept beside its journal.


def _line(folder: ExperimentFolder) -> ExperimentView:
    """Return the line of an experiment by its journal, and keep it if the experiment is over."""
    with _opened(folder) as found:
        line = found.listed()
    stamp = stamp_of(folder)
    if stamp and line["state"] in OVER and not at_work(folder):
        kept = {"version": rubberband.__version__, "stamp": stamp, "line": line}
        with suppress(OSError):  # a home that only others may write to
            write_atomically(folder.listed, to_bytes(kept), durable=False)
    return line


def _kept_line(folder: ExperimentFolder) -> ExperimentView | None:
    """Return the kept line with the labels of now; None unless it is of this journal and this version."""
    try:
        kept = json.loads(folder.listed.read_bytes())
        stamp = tuple(tuple(part) for part in kept["stamp"])
        if kept["version"] != rubberband.__version__ or stamp != stamp_of(folder) or at_work(folder):
            return None
        line: ExperimentView = kept["line"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    labels = read_labels(folder)
    return {**line, "tags": list(labels.tags), "note": labels.note, "archived": labels.archived}
