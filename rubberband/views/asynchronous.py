"""Asynchronous training in words: how fast updates are, how stale, and where their time goes."""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.executor.result.result import Result
from rubberband.units import counted
from rubberband.values.asynchronous import AsyncUse
from rubberband.views.formatting import amount
from rubberband.views.report.tables import TextTable, ranked

_PLACES = (("compute", "compute_s"), ("up", "up_s"), ("waiting", "wait_s"), ("server", "server_s"), ("down", "down_s"))


def update_line(use: AsyncUse) -> str:
    """Return an iteration's updates in one line: their speed, staleness, and the shares of their time."""
    total_s = sum(getattr(use, field) for _, field in _PLACES)
    shares = ", ".join(f"{name} {100 * getattr(use, field) / total_s:.0f} %" for name, field in _PLACES)
    lost = f"; {counted(use.lost, 'gradient')} lost" if use.lost else ""
    return (
        f"{amount(use.updates_per_s)} updates/s of {counted(use.workers, 'worker')} and "
        f"{counted(use.servers, 'server')}; staleness {use.staleness:.1f} (at most {use.max_staleness}){lost}"
        f"{f'; {shares}' if total_s > 0.0 else ''}"
    )


def updates(result: Result, most: int | None) -> TextTable:
    """Return the updates of asynchronous trials, best trial first, for each number of workers; `most` trials."""
    trials = [trial for trial in ranked(result) if trial.updates]
    rows = [
        (str(trial.trial), str(workers), *_row([use for use in trial.updates if use.workers == workers]))
        for trial in trials[:most]
        for workers in sorted({use.workers for use in trial.updates})
    ]
    left = len(trials[most:]) if most is not None else 0
    return TextTable(
        title="Asynchronous updates, best trial first",
        header=("trial", "workers", "updates", "per s", "staleness", "most", "lost", *(name for name, _ in _PLACES)),
        rows=tuple(rows),
        notes=(
            "Times of one update, in milliseconds: to compute the gradient, to send it, to wait for other updates, to "
            "apply it, and to fetch the parameters. Staleness: updates by others in between.",
            *([f"{counted(left, 'more trial')} not shown."] if left else []),
        ),
    )


def _row(uses: Sequence[AsyncUse]) -> tuple[str, ...]:
    count = sum(use.updates for use in uses)
    duration_s = sum(use.duration_s for use in uses)
    staleness = sum(use.updates * use.staleness for use in uses) / max(count, 1)
    means_s = [sum(use.updates * getattr(use, field) for use in uses) / max(count, 1) for _, field in _PLACES]
    return (
        f"{count:,}",
        amount(count / duration_s) if duration_s > 0.0 else "-",
        f"{staleness:.2f}",
        str(max(use.max_staleness for use in uses)),
        str(sum(use.lost for use in uses)),
        *(f"{1e3 * mean_s:.2f}" for mean_s in means_s),
    )
