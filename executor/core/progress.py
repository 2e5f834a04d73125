"""Results as they come, for the rules that end trials and searches early. Plain data, a function of the reports."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rubberband.values.ranking import Ranking
from rubberband.values.stopping import Patience, Plateau, StopRules, is_evaluated

if TYPE_CHECKING:
    from rubberband.executor.core.trial_state import TrialReport, TrialState


@dataclass(slots=True, kw_only=True)
class BestSoFar:
    """The best result of a search, over all reports, and what has passed since."""

    merit: float = -math.inf
    """The metric, the higher the better."""
    trial: int | None = None
    """The trial that has it; None before the first result."""
    at: float = 0.0
    """Instant of the latest improvement, moved by the time for which the driver stood still since."""
    bill_usd: float = 0.0
    """At that instant."""
    trials: int = 0
    """Trials that have ended their first stage or rung since, without an improvement of their own."""
    syncs: int = 0
    """SYNCs in a row without an improvement since the one before."""
    since_sync: bool = False
    """Whether it has improved since the latest SYNC."""
    top: list[float] = field(default_factory=list)
    """The best merits, of all reports, in ascending order; empty without a rule about them."""
    alike: int = 0
    """Reports in a row after which those were alike."""

    def note(self, merit: float, trial: int, at: float, bill_usd: float, min_delta: float) -> None:
        """Take a result in."""
        if merit > self.merit + min_delta or self.trial is None:
            self.merit, self.trial, self.at, self.bill_usd = merit, trial, at, bill_usd
            self.trials, self.since_sync = 0, True

    def note_alike(self, merit: float, plateau: Plateau) -> None:
        """Take a result in, for the rule about the best ones."""
        insort(self.top, merit)
        del self.top[: -plateau.top]
        is_alike = len(self.top) == plateau.top and statistics.pstdev(self.top) <= plateau.std
        self.alike = self.alike + 1 if is_alike else 0

    def note_end(self, trial: int) -> None:
        """A trial has ended its first stage or rung."""
        self.trials += trial != self.trial

    def note_sync(self) -> None:
        """A stage has ended."""
        self.syncs = 0 if self.since_sync else self.syncs + 1
        self.since_sync = False


class Curve:
    """The evaluated results of one trial."""

    def __init__(self, stop: StopRules) -> None:
        self._stop = stop
        self.seen = 0
        """Reports that were looked at."""
        self.results = 0
        self.best = -math.inf
        self.waited = 0
        """Results since the latest improvement by more than `min_delta`."""
        self._improved = -math.inf
        self._latest: deque[float] = deque(maxlen=self._patience.iterations)
        self._sum = 0.0
        self.averages: list[float | None] = []
        """After each iteration, the mean of the results since `median.after`; None before."""

    @property
    def _patience(self) -> Patience:
        return self._stop.patience or Patience(iterations=1)

    def add(self, iterations: int, merit: float) -> None:
        """Take a result in."""
        self.results += 1
        self.best = max(self.best, merit)
        if merit > self._improved + self._patience.min_delta or self.results == 1:
            self._improved, self.waited = merit, 0
        else:
            self.waited += 1
        self._latest.append(merit)
        if (median := self._stop.median) is not None:
            kept = self.averages[-1] if self.averages else None
            self.averages += [kept] * (iterations - 1 - len(self.averages))
            over = self.results - median.after + 1
            self._sum += merit if over > 0 else 0.0
            self.averages.append(self._sum / over if over > 0 else None)

    @property
    def has_stalled(self) -> bool:
        """Whether its patience is over."""
        patience = self._stop.patience
        if patience is None:
            return False
        if patience.std is None:
            return self.waited >= patience.iterations
        return len(self._latest) == patience.iterations and statistics.pstdev(self._latest) < patience.std


class Curves:
    """The curves of all trials, and the averages of those that have come as far as each iteration."""

    def __init__(self, stop: StopRules, ranking: Ranking) -> None:
        self._stop, self._ranking = stop, ranking
        self._of: dict[int, Curve] = {}
        self._averages: list[list[float]] = []

    def of(self, trial: TrialState) -> Curve:
        """The curve of a trial, with its latest report."""
        curve = self._of.get(trial.trial)
        if curve is None:
            curve = self._of[trial.trial] = Curve(self._stop)
        known = len(curve.averages)
        for report in trial.reports[curve.seen :]:
            if (merit := merit_of(self._ranking, report)) is not None:
                curve.add(report.iterations, merit)
        curve.seen = len(trial.reports)
        self._averages += [[] for _ in range(len(curve.averages) - len(self._averages))]
        for at in range(known, len(curve.averages)):
            if (average := curve.averages[at]) is not None:
                insort(self._averages[at], average)
        return curve

    def renew(self, trial: TrialState) -> None:
        """Look at a trial anew, which has lost reports, or has taken over those of another."""
        if (curve := self._of.pop(trial.trial, None)) is not None:
            for at, average in enumerate(curve.averages):
                if average is not None:
                    del self._averages[at][bisect_left(self._averages[at], average)]
        self.of(trial)

    def median_of_others(self, curve: Curve, iterations: int, at_least: int) -> float | None:
        """The median of the averages of the other trials that have come as far; None where those are too few."""
        every = self._averages[iterations - 1] if iterations <= len(self._averages) else []
        own = curve.averages[iterations - 1] if iterations <= len(curve.averages) else None
        others = list(every)
        if own is not None:
            del others[bisect_left(others, own)]
        return statistics.median(others) if len(others) >= max(1, at_least) else None


def merit_of(ranking: Ranking, report: TrialReport) -> float | None:
    """Return the metric of a report, the higher the better; None where it was not evaluated."""
    value, metrics = report.metrics.get(ranking.metric), report.metrics
    if value is None or not math.isfinite(value) or not is_evaluated(report.iterations, metrics, ranking.metric):
        return None
    return -ranking.signed(value)
