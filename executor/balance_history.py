"""How the workers of a trial divided its batches over its training, from its reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rubberband.executor.copying import copied
from rubberband.executor.core.events import Gang
from rubberband.executor.core.state import Allocation, TrialReport
from rubberband.values.balance import BalanceUse


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceStretch(BalanceUse):
    """The shares and times of the workers over an iteration in which they were unequal."""

    stage: int
    iterations: int
    """Iterations done at its end."""
    end_s: float
    """Its report, from the start of the run."""
    workers: Gang
    """The slot of each worker, by rank."""


def balance_history(
    reports: Sequence[TrialReport], uses: Iterable[Allocation], started_at: float
) -> tuple[BalanceStretch, ...]:
    """Return the stretches of unequal workers in `reports`, in order; empty where all are equal.

    `uses` are the trial's stretches on gangs, `started_at` is the start of the run.
    """
    told = [report for report in reports if report.balance is not None]
    gangs = list(uses) if told else []
    return tuple(
        copied(
            BalanceStretch,
            report.balance,
            stage=report.stage,
            iterations=report.iterations,
            end_s=report.reported_at - started_at,
            workers=_gang_at(gangs, report.reported_at),
        )
        for report in told
    )


def _gang_at(uses: Sequence[Allocation], at: float) -> Gang:
    """Return the gang that reported at an instant: the latest one that had begun."""
    return next((use.gang for use in reversed(uses) if use.started_at <= at), ())
