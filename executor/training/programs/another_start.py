"""Another start of a program with an empty `${checkpoint}`, as another trial has: it must be like the first one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rubberband.executor.training import restarts
from rubberband.executor.training.failures import TrialFailure
from rubberband.executor.training.programs import own_files
from rubberband.executor.training.programs.values import Outcome, Trained

_ENDED = ", without a report of "
"""In the failure of a program that has ended well, and too early."""


class AnotherStart:
    """Starts a program once more, and without the files that its first start has left in its folder."""

    def __init__(
        self, folder: Path, before: Collection[str], left: Sequence[str], train: Callable[[], Outcome]
    ) -> None:
        """`before`: the paths in the `folder` before the first start; `left`: those that it has written.

        `train`: trains an iteration.
        """
        self._folder, self._train, self._left = folder, train, own_files.states(left)
        self._new = [path for path in self._left if path not in before]
        self.outcome = train()

    def fault(self, first: Trained, most: int, metric: str) -> str:
        """Return what is wrong with it, beside the `first` start of `most` iterations; empty if nothing is known."""
        other = self.outcome
        if other is None or (isinstance(other, Trained) and other.metrics[0][metric] == first.metrics[0][metric]):
            return ""
        again: Outcome = None
        if self._new:
            with own_files.without(self._new, self._folder):
                again = self._train()
        share = (
            f"trials share {own_files.shown(self._left)} in the program's folder: another start without a checkpoint "
        )
        fix = "write what a trial loads again below ${checkpoint}"
        if isinstance(other, TrialFailure):
            if other.kind == "not_a_number":
                return ""
            ends = _ENDED in str(other)
            why = "ends without a report" if ends else f"fails ({other})"
            if isinstance(again, Trained):
                return f"{share}finds what the first has left there, and {why}; {fix}"
            return f"each start after the first {why}"
        if how := _difference(first, other, again, most, metric):
            return f"{share}goes on from what the first has left there ({how}); {fix}"
        return ""


def _difference(first: Trained, other: Trained, again: Outcome, most: int, metric: str) -> str:
    """Return by what another start goes on from the first one's files; empty if that is not known."""
    if isinstance(again, Trained) and again.metrics[0][metric] == first.metrics[0][metric]:
        return f"{metric} {other.metrics[0][metric]:.6g} for {first.metrics[0][metric]:.6g}"
    if isinstance(again, Trained) and again.numbers != first.numbers:
        return ""
    numbers = restarts.later_numbers(other.numbers, first.numbers, most + 2)
    return "it begins with " + " ".join(f"{word} {number:g}" for word, number in numbers.items()) if numbers else ""
