"""Which lines of a program are new iterations: after a start some are of an evaluation, or of training done again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rubberband.values.metric_lines import is_alike, passes

Restart = Literal["", "evaluates", "again", "numbers"]
"""Kinds of a program's start from its checkpoint.

Empty: its first line is a new iteration. `evaluates`: it evaluates what it has loaded. `again`: it trains iterations
again that the checkpoint should have. `numbers`: it goes on, and counts from its first number again.
"""
WHY = {
    "evaluates": "evaluates its checkpoint before it trains on: that line is no iteration",
    "again": "trains iterations again that its checkpoint should have: they are counted once",
    "number": "prints the number of an iteration again: that line is none",
    "numbers": "numbers its iterations from the first again, and is counted on from its checkpoint",
}


_HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|eval|evaluation|dev|test)(?![a-z])")
_RISEN = 2
"""Lines whose number has passed the one before until numbers are those of iterations."""
_MOST_AGAIN = 3
"""Lines without a later number until the numbers are none of iterations any more."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A line, or report, with the metric."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Word such as epoch -> the number beside it."""


class Counting:
    """Finds the new iterations of a trial among the lines of its program's starts."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._first, self._last, self._here = Seen(), Seen(), Seen()
        """The trial's first line, its latest iteration, and the line before of this start."""
        self._rises = True
        """Whether the numbers of each line have passed those of the line before."""
        self._risen = self._again = 0
        """How often they have, and the lines since they last have."""
        self._levels = False
        """Whether the latest two iterations have the same metrics, which say nothing then."""
        self._left = 0
        """Iterations that the program trains again, where it has no numbers."""
        self._is_behind = False
        """Whether numbers have not passed the latest iteration's yet."""
        self.restart: Restart = ""
        self.start = Seen()
        """The first line of this start from a checkpoint, which may be no new iteration."""
        self.goes_on = False
        """Whether numbers, or files that it has read, show that this start goes on from its checkpoint."""

    @property
    def first(self) -> Seen:
        """Return the trial's first line."""
        return self._first

    def kept(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        seen = {"first": asdict(self._first), "last": asdict(self._last)}
        return {**seen, "rises": self._rises, "risen": self._risen, "levels": self._levels}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on after the iteration of a checkpoint."""
        self._first, self._last = Seen(**kept["first"]), Seen(**kept["last"])
        self._rises, self._risen, self._levels = kept["rises"], kept["risen"], kept["levels"]

    def is_new(self, seen: Seen, iterations: int, has_read: Callable[[], bool | None]) -> bool:
        """Whether a line is a new iteration, of a program whose checkpoint has this number of `iterations`.

        `has_read`: whether it has read any file of the checkpoint; None: it is not known.
        """
        is_first, before = not self._here.metrics, self._here
        if is_first and not iterations and self._is_before_any_step(seen):
            self._first = seen
            return False
        self._here = seen
        if not is_first and self._repeats_number(seen, before):
            return False
        if is_first and iterations:
            self.start, is_read = seen, has_read()
            self._look(seen, iterations, is_read)
            self.goes_on = self.restart != "again" and (
                is_read is True or passes(seen.numbers, self._last.numbers) is True
            )
        is_old = self._left > 0
        if self._is_behind:
            is_old = self._is_behind = self._rises and passes(seen.numbers, self._last.numbers) is False
        elif is_old:
            self._left -= 1
        elif is_first and self.restart == "evaluates":
            is_old = True
        if not is_old:
            self._levels = is_alike(seen.metrics, self._last.metrics, self._metric)
            self._first, self._last = self._first if self._first.metrics else seen, seen
        return not is_old

    def _is_before_any_step(self, seen: Seen) -> bool:
        """Whether a trial's first line evaluates a model before any training, as `step 0: val loss 4.2` does.

        Epochs often begin with 0; those of the Trainer of Hugging Face, in a line with `eval_runtime`, are passed ones.
        """
        steps = [number for word, number in seen.numbers.items() if word != "batch"]
        is_held_out = _HELD_OUT.search(self._metric.lower()) is not None
        counts_passed = "epoch" not in seen.numbers or "eval_runtime" in seen.metrics
        return is_held_out and counts_passed and bool(steps) and not any(steps)

    def _repeats_number(self, seen: Seen, before: Seen) -> bool:
        """Whether a line has a number again that numbers iterations, as one at the end of training has."""
        if not self._rises or (passed := passes(seen.numbers, before.numbers)) is None:
            return False
        self._risen, self._again = self._risen + passed, 0 if passed else self._again + 1
        if passed or self._is_behind:
            self._rises = passed
            return False
        is_known = self._risen >= _RISEN and passes(seen.numbers, self._first.numbers)
        self._rises = bool(is_known and self._again <= _MOST_AGAIN)
        self._here = before
        return self._rises

    def _look(self, seen: Seen, iterations: int, has_read: bool | None) -> None:
        """Find out by the first line after a start what the program does."""
        passed = passes(seen.numbers, self._last.numbers) if self._rises else None
        if passed:
            return
        is_at_last = passed is False and not passes(self._last.numbers, seen.numbers)
        is_first, is_last = (
            not self._levels and is_alike(seen.metrics, other.metrics, self._metric)
            for other in (self._first, self._last)
        )
        if has_read is False:
            self.restart = "again"
        elif is_last:
            self.restart = "evaluates"
        elif passed is None or not passes(seen.numbers, self._first.numbers):
            is_below = passes(self._first.numbers, seen.numbers)  # no number of an iteration
            self.restart = "again" if is_first else "" if passed is None or is_below else "numbers"
        else:
            self.restart = "evaluates" if is_at_last else "again"
        self._is_behind = passed is False and (self.restart == "again" or (self.restart == "evaluates" and is_at_last))
        self._left = iterations if self.restart == "again" and not self._is_behind else 0


class ReadFiles:
    """Finds out whether a program has read any of its files, by the times of their latest access."""

    def __init__(self, folder: Path, place: Path, without: Path | None) -> None:
        """`place`: a new folder for links to the files, as the program may replace them; `without`: one that is not its
        state.
        """
        place.mkdir()
        self._known = dict[Path, int]()
        files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path != without)
        for number, path in enumerate(files):
            with suppress(OSError):
                os.link(path, link := place / str(number))
                if link.stat().st_size:
                    self._known[link] = link.stat().st_atime_ns
        probe = place / "probe"
        probe.write_bytes(b"probe")
        os.utime(probe, (1, 1))
        probe.read_bytes()
        self._is_known = probe.stat().st_atime > 1  # not where a file system is mounted with noatime

    def __call__(self) -> bool | None:
        """Return None if it is not known: there is nothing to read, or the file system does not keep the times."""
        if not self._is_known or not self._known:
            return None
        return any(link.stat().st_atime_ns != at for link, at in self._known.items())
