"""What was answered before: which question a request asks, and its answer, as much as fits in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from rubberband.api.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The answer to a preview, ready to be sent."""

    id: str
    status: int
    """200; 422 where no plan meets the constraints."""
    body: bytes
    """`rubberband.estimate/1` as JSON, or a problem that carries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a request is known to ask: the id of a question, or what is wrong with it."""

    meaning: str | Problem
    until: float | None = None
    """Unix time; None: for ever."""


class Memory:
    """Answers by id, and the ids of requests; what was not asked for longest is forgotten first."""

    def __init__(self, most_bytes: int, most_requests: int) -> None:
        self._most_bytes, self._most_requests = most_bytes, most_requests
        self._requests: OrderedDict[Hashable, Known] = OrderedDict()
        self._answers: OrderedDict[str, PlanAnswer] = OrderedDict()
        self._bytes = 0

    def recall(self, request: Hashable, now: float) -> PlanAnswer | Problem | None:
        """What the request was answered with, if that still holds at `now` (Unix time)."""
        known = self._requests.get(request)
        if known is None:
            return None
        if known.until is not None and known.until <= now:
            del self._requests[request]
            return None
        self._requests.move_to_end(request)
        return known.meaning if isinstance(known.meaning, Problem) else self.answer(known.meaning)

    def answer(self, id: str) -> PlanAnswer | None:
        """The answer to a question."""
        found = self._answers.get(id)
        if found is not None:
            self._answers.move_to_end(id)
        return found

    def keep_answer(self, answer: PlanAnswer) -> None:
        """Remember an answer, unless it alone is too large."""
        before = self._answers.pop(answer.id, None)
        self._bytes -= 0 if before is None else len(before.body)
        if len(answer.body) > self._most_bytes:
            return
        self._answers[answer.id] = answer
        self._bytes += len(answer.body)
        while self._bytes > self._most_bytes:
            _, oldest = self._answers.popitem(last=False)
            self._bytes -= len(oldest.body)

    def keep_request(self, request: Hashable, known: Known) -> None:
        """Remember what a request asks."""
        self._requests[request] = known
        self._requests.move_to_end(request)
        if len(self._requests) > self._most_requests:
            self._requests.popitem(last=False)
