"""What may be started, and what goes on by itself: the operator may allow less than when an experiment was accepted."""

from __future__ import annotations

import time
from contextlib import closing

from pydantic import ValidationError

from rubberband.api.experiments.body import require_allowed
from rubberband.api.experiments.following import Standing
from rubberband.api.experiments.states import loses_profile
from rubberband.api.problems import REFUSED, Problem
from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store
from rubberband.errors import InputError, RubberbandError
from rubberband.executor.core.purse import MONEY_SLACK_USD
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.hosting import read_ending, read_mark
from rubberband.executor.journal.inbox import Inbox
from rubberband.executor.observed import Observed, outcome_of
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import format_usd, parse_deadline
from rubberband.values.submission import Submission

GOES_ON = "its process ended unexpectedly (killed, or the machine restarted); it restarts automatically"
_ONCE_IN_S = 30 * 24 * 3600.0
"""For so long it is known that an experiment went on by itself, and got no further."""


class Gate:
    """One for each server."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store

    @property
    def auto_resume(self) -> bool:
        """Whether experiments go on by themselves."""
        return self._settings.auto_resume

    def refused(self, row: Submission, folder: ExperimentFolder) -> Standing | None:
        """Where an experiment stands, and why, that may not be started as the service is run now; None if it may."""
        if not folder.exists:
            reason = self._reason(row, None)
            return Standing(state=ExperimentState.REFUSED, reason=reason) if reason else None
        try:
            with closing(Observed(folder)) as observed:
                observed.refresh(live=False)
                reason, outcome = self._reason(row, observed), outcome_of(observed.controller)[0]
        except RubberbandError:  # its process will tell what is wrong with the journal
            return None
        return Standing(state=outcome or ExperimentState.INTERRUPTED, reason=reason) if reason else None

    def resumption(self, row: Submission, folder: ExperimentFolder, observed: Observed | None) -> str | None:
        """An id of its going on by itself, now that its process is gone; None if that is for a person to say.

        It is the same until the experiment gets further, and good once; waiting for its checkpoint store was no try.
        `observed` is its journal, if it has begun. Raises JournalError.
        """
        now = time.time()
        if not self._settings.auto_resume or not _goes_on(row, folder, observed, now):
            return None
        done = 0 if observed is None else observed.summary().iterations
        mark = read_mark(folder)
        waited = f" waited {row.attempt}" if mark is not None and mark.waits_for else ""
        id = f"goes-on {row.name} {row.created_at!r} {done}{waited}"
        return None if self._store.has_acted(id, since=now - _ONCE_IN_S) else id

    def _reason(self, row: Submission, observed: Observed | None) -> str:
        """Why it may not be started; empty if it may."""
        try:
            if observed is not None:
                require_going_on(observed, self._settings)
            if row.words:
                require_allowed(Experiment.kept(row.words), self._settings, to_run=True)
        except Problem as problem:
            return f"the operator changed what may be run: {problem.detail}"
        except (InputError, ValidationError) as error:
            return f"this version of rubberband cannot read it: {' '.join(str(error).split())}"
        return ""


def require_going_on(observed: Observed, settings: Settings) -> None:
    """Raise Problem REFUSED unless what has begun may go on: where submissions may run, for what they may cost now."""
    provider, max_cost_usd = observed.header.setup["provider"], observed.max_cost_usd
    most_usd, reason = settings.limits.max_cost_usd, ""
    if provider not in settings.providers:
        allowed = ", ".join(settings.providers)
        reason = f"resources.provider: {provider} is not allowed here; allowed: {allowed}"
    elif most_usd is not None and (max_cost_usd is None or max_cost_usd > most_usd + MONEY_SLACK_USD):
        has = "none" if max_cost_usd is None else format_usd(max_cost_usd)
        reason = f"constraints.max_cost: {has} is not allowed here; at most {format_usd(most_usd)}"
    if reason:
        by_hand = f"continue it with `rubberband resume {observed.folder.name}` on the machine where it was run"
        raise Problem(REFUSED, f"{reason}; {by_hand}")


def _goes_on(row: Submission, folder: ExperimentFolder, observed: Observed | None, now: float) -> bool:
    """Whether it was submitted, its process was in this home and did not tell how it ended, it was not to end anyway,
    and it is not past its deadline.
    """
    mark, ending = read_mark(folder), read_ending(folder)
    if not row.words or mark is None or mark.attempt != row.attempt:
        return False
    if ending is not None and ending.attempt == row.attempt:
        return False
    if any(request.kind == "cancel" for request in Inbox(folder.inbox).pending()):
        return False
    if observed is not None:
        return not observed.is_ending and not _is_late(observed)
    if loses_profile(row):
        return False
    deadline = row.words.get("constraints", {}).get("deadline")
    ends_at = None if deadline is None else parse_deadline(deadline)
    return ends_at is None or isinstance(ends_at, float) or ends_at.timestamp() > now


def _is_late(observed: Observed) -> bool:
    summary = observed.summary()
    if observed.header.kind.is_simulated or summary.deadline_s is None or summary.started_at is None:
        return False
    return summary.started_at + summary.deadline_s <= observed.present
