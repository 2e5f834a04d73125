"""The runner of a function trial: the function runs in a thread, and every `report` is one iteration."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rubberband.errors import CheckpointError
from rubberband.executor.core.events import WITHOUT_CHECKPOINT
from rubberband.executor.training.runner import TrialFailure, clean_metrics, pack, unpack
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.segment import BatchReport, Segment
from rubberband.executor.training.trial import TrainFunction, current_session

END_TIMEOUT_S = 10.0
"""How long a function may take to end once its segment is over."""

_log = logging.getLogger(__name__)


class SegmentOver(BaseException):
    """Raised by `report` to end the function; not an Exception, so that `except Exception` lets it pass."""


@dataclass(frozen=True, slots=True)
class _Ended:
    error: BaseException | None


class FunctionRunner:
    """Runs `train(config)` on one worker, letting it go on from one `report` to the next."""

    def __init__(self, function: TrainFunction, segment: Segment) -> None:
        self._function = function
        self._segment = segment
        self._state: bytes | None = None
        """The function's last checkpoint, pickled when it was passed, so that later changes do not reach it."""
        self._state_iterations = 0
        self._iteration = segment.from_iterations
        """The iteration that the function does; behind the segment's while it repeats some since its checkpoint."""
        self._over = False
        self._go: SimpleQueue[None] = SimpleQueue()
        self._answers: SimpleQueue[Mapping[str, Any] | _Ended] = SimpleQueue()
        self._thread: Thread | None = None

    def restore(self, payload: bytes) -> None:
        """Go on from the function's last checkpoint."""
        content = unpack(payload, "function", self._segment.from_iterations)
        self._state, self._state_iterations = content["state"], content["state_iterations"]
        self._iteration = self._state_iterations

    def catch_up(self) -> Iterator[int]:
        """Train again what came after the function's last checkpoint; from zero where it never passed one."""
        while self._iteration < self._segment.from_iterations:
            self._next_report()
            yield self._iteration

    def saved_iterations(self, iterations: int) -> int:
        """Those that the function's last checkpoint holds; 0 before the first."""
        return self._state_iterations

    def iterate(self, iterations: int) -> Mapping[str, float]:
        """Let the function run until its next report."""
        return clean_metrics(self._next_report(), self._segment.metric)

    def batch_report(self) -> BatchReport:
        """Nothing: batches are the function's own matter."""
        return BatchReport()

    def dump(self, iterations: int, metrics: Mapping[str, float]) -> bytes:
        """The function's last checkpoint, and when it was passed."""
        content = {"state": self._state, "state_iterations": self._state_iterations, "metrics": dict(metrics)}
        return pack("function", iterations, content)

    def part(self) -> None:
        """Nothing: a function trial has one worker."""

    def close(self) -> None:
        """End the function: its `report` raises, now or when it is called next."""
        self._over = True
        self._go.put(None)
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)
            if self._thread.is_alive():
                _log.warning("trial %d: the function goes on after its segment is over", self._segment.trial)

    def report(self, metrics: Mapping[str, Any], checkpoint: Any) -> None:
        """In the function's thread: hand over one iteration, and wait until the next is wanted."""
        if self._over:
            raise SegmentOver
        if checkpoint is not None:
            try:
                self._state = pickle.dumps(checkpoint)
            except Exception as error:
                raise CheckpointError(f"the checkpoint cannot be pickled: {type(error).__name__}: {error}") from error
            self._state_iterations = self._iteration
        elif self._iteration == 1 and self._segment.from_iterations == 0:
            name = getattr(self._function, "__name__", "train")
            print(f"rubberband: {name}() {WITHOUT_CHECKPOINT}", file=sys.stderr, flush=True)
        self._answers.put(metrics)
        self._go.get()
        if self._over:
            raise SegmentOver

    def checkpoint(self) -> Any:
        """In the function's thread: its last checkpoint."""
        return None if self._state is None else pickle.loads(self._state)

    def _next_report(self) -> Mapping[str, Any]:
        self._iteration += 1
        if self._thread is None:
            name = f"rubberband trial {self._segment.trial}"
            self._thread = Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        else:
            self._go.put(None)
        answer = self._answers.get()
        if not isinstance(answer, _Ended):
            return answer
        if answer.error is not None:
            raise answer.error
        raise TrialFailure(
            "raised",
            f"the function returned before iteration {self._iteration}; it must call rubberband.report() once per "
            f"iteration and go on until report() ends it",
        )

    def _run(self) -> None:
        current_session.set(self)
        reseed("train", self._segment.seed, self._state_iterations, self._segment.rank)
        error: BaseException | None = None
        try:
            self._function(dict(self._segment.config))
        except SegmentOver:
            pass
        except BaseException as raised:
            error = raised
        self._answers.put(_Ended(error))
