"""Other limits for experiments: what is to be planned before they are granted, and that they are granted once.

`rubberband.api.routes.experiments` plans them; what the plan assumed is checked again here.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

from rubberband.api.experiments.limit_preview import RestAnswer, RestQuestion, instant_of, with_limits
from rubberband.api.experiments.reading import Journals
from rubberband.api.experiments.states import KEY_GOOD_S, told_as_problems, waits
from rubberband.api.experiments.watcher import Watcher
from rubberband.api.problems import REFUSED, Problem
from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store
from rubberband.executor.core.extending import Extension
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from rubberband.states import ExperimentState
from rubberband.units import format_usd
from rubberband.values.plan import Policy
from rubberband.values.submission import Submission


class Extensions:
    """Safe to use from several threads. Everything raises Problem."""

    def __init__(self, settings: Settings, store: Store, watcher: Watcher, journals: Journals) -> None:
        self._settings, self._store, self._watcher, self._journals = settings, store, watcher, journals
        self._granting = threading.Lock()

    def question(
        self, name: str, *, deadline: object = None, max_cost_usd: float | None = None, request: str = ""
    ) -> Extension | RestQuestion:
        """What is to be planned to tell what these limits bring; if `request` had them granted already, what it was
        told then.
        """
        row = self._journals.row(name)
        if request and (granted := self._granted(row, request)) is not None:
            return granted
        self._require_within(max_cost_usd)
        self._journals.require(row, "extend")
        with told_as_problems():
            instant = self._instant(row, deadline)
            if waits(row):
                other = with_limits(row.words, cast("datetime | None", instant), max_cost_usd)
                return _of_waiting(row, other)
            with self._journals.opened(name) as observed:
                limits = observed.limits(deadline=instant, max_cost_usd=max_cost_usd)
            return RestQuestion(name=name, limits=limits, driven=row.state is ExperimentState.RUNNING)

    def grant(self, question: RestQuestion, answer: RestAnswer, request: str) -> Extension | None:
        """Put the limits in force; None if it has other ones by now than those that the answer was reckoned from.

        `request` makes it happen once. What nobody is at work on has them from when it is resumed.
        """
        if question.is_granted:
            return replace(answer.extension, applied=True)
        with self._granting:
            row = self._journals.row(question.name)
            if isinstance(granted := self._granted(row, request), Extension):
                return granted
            self._journals.require(row, "extend")
            kept = self._kept(row, question, request) if question.words else self._asked(question, answer, request)
        self._watcher.kick(question.name)
        return replace(answer.extension, applied=True) if kept else None

    def _kept(self, row: Submission, question: RestQuestion, request: str) -> bool:
        """Change the words of what waits."""
        if not waits(row) or row.words != question.words:
            return False
        queued = {ExperimentState.QUEUED}
        return self._store.change(question.name, at=time.time(), words=question.other, expected=queued, request=request)

    def _asked(self, question: RestQuestion, answer: RestAnswer, request: str) -> bool:
        """Ask the driver, or whoever resumes it."""
        with self._journals.opened(question.name) as observed:
            if observed.limits_in_force != answer.had:
                return False
        limits = question.limits
        asked = DriverRequest(
            id=request,
            kind="extend",
            asked_at=time.time(),
            deadline_s=limits.deadline_s,
            max_cost_usd=limits.max_cost_usd,
        )
        with told_as_problems():
            Inbox(self._watcher.folder(question.name).inbox).put(asked)
        return True

    def _granted(self, row: Submission, request: str) -> Extension | RestQuestion | None:
        """What came of the request, if it was made before; the question what that was, of what has not begun."""
        acted = self._store.has_acted(request, since=time.time() - KEY_GOOD_S)
        if not self._journals.exists(row.name):
            return _of_waiting(row, dict(row.words), is_granted=True) if acted and row.words else None
        with self._journals.opened(row.name) as observed:
            return observed.granted() if acted or observed.has_taken(request) else None

    def _instant(self, row: Submission, deadline: object) -> object:
        """A duration counts from the submission; of what was run by hand, from its start."""
        return deadline if deadline is None or not row.words else instant_of(deadline, row.created_at)

    def _require_within(self, max_cost_usd: float | None) -> None:
        most_usd = self._settings.limits.max_cost_usd
        if most_usd is not None and max_cost_usd is not None and max_cost_usd > most_usd:
            raise Problem(
                REFUSED, f"max_cost={format_usd(max_cost_usd)} is more than is allowed here ({format_usd(most_usd)})"
            )


def _of_waiting(row: Submission, other: dict[str, Any], *, is_granted: bool = False) -> RestQuestion:
    policy = cast(Policy, row.policy)
    return RestQuestion(name=row.name, words=dict(row.words), other=other, policy=policy, is_granted=is_granted)
