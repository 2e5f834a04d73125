"""Judges a second start of a trial: whether it goes on from its checkpoint as an unbroken run does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rubberband.units import counted

Metrics = Mapping[str, float]

EXACTLY = "resumes exactly"
AGAIN = "starts again: every stage repeats its epochs"
EVALUATES = "evaluates again after a restart: counted once"
TWICE = "evaluates again after a restart: counted twice"
_LOAD = (
    "load its checkpoint at the start (docs/commands.md)",
    "call rubberband.get_checkpoint() at the start (docs/write-a-trial.md)",
)
_GROSS = 0.5
"""Part of a metric by which it changes if it is not restored."""
_LIKE_FIRST = 0.1
_TIMES_SPREAD = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Verdict on a second start."""

    line: str = ""
    resumes: bool | None = None
    remark: str = ""
    problem: str = ""


def exactly_or_not(metric: str, found: float, unbroken: float) -> str:
    """Return the line for a start that goes on: with the metric of the unbroken run, or another one."""
    return EXACTLY if found == unbroken else f"resumes; other random numbers ({_both(metric, found, unbroken)})"


def of_restart(
    metric: str,
    kind: str,
    seen: Sequence[Metrics],
    saved: int,
    found: Metrics | None,
    *,
    how: str = "",
    at_start: Metrics | None = None,
    is_sure: bool = True,
    fresh: Metrics | None = None,
) -> Restart:
    """Judge the iteration after a checkpoint by a second start.

    Args:
        seen: the iterations of the unbroken run, of which the checkpoint has `saved`.
        found: the iteration after it by the second start; None: it ended before.
        how: `evaluates`, `again`, `numbers` or nothing, as the lines are counted.
        at_start: the first metrics of the second start, which may be of the iteration before.
        is_sure: whether numbers or read files show that it goes on.
        fresh: the first iteration of another start without a checkpoint.

    """
    begin = f"started again from the checkpoint of {counted(saved, 'iteration')}, the {kind} "
    unbroken = seen[saved][metric] if saved < len(seen) else None
    first, last = seen[0][metric], seen[saved - 1][metric]
    zero = f"{begin}starts from zero, as at each stage, and repeats its iterations; {_LOAD[kind == 'function']}"
    again = Restart(line=AGAIN, resumes=False, remark=zero)
    if how == "again":
        return again
    if found is None:
        early = f"{begin}ends without a report, and an unbroken run goes on; let it continue from what it has saved"
        return Restart(problem="" if unbroken is None else early)
    value = found[metric]
    if not how and not is_sure and value == first != unbroken:
        return again
    if how == "evaluates" and at_start is not None and _is_worse(at_start[metric], last, unbroken):
        both = _both(metric, at_start[metric], last)
        return _changed(f"{begin}evaluates what it has loaded as {both}: the restart changes it")
    numbers = f"{begin}numbers its iterations from the first again; let it begin behind those in its checkpoint"
    remark = numbers if how == "numbers" else ""
    if unbroken is None:
        return Restart(line=EVALUATES if how == "evaluates" else "", resumes=True if is_sure else None, remark=remark)
    values, of_fresh = [each[metric] for each in seen], None if fresh is None else fresh[metric]
    if value != unbroken and _is_lost(value, unbroken, values, of_fresh):
        both = _both(metric, value, unbroken)
        return _changed(f"{begin}reports {both} of an unbroken run: the restart changes it")
    if how == "evaluates":
        return Restart(line=EVALUATES, resumes=True)
    if not how and value == last != unbroken:
        return _counted_twice(begin, f"{metric} {value:.6g}")
    if value != unbroken and not is_sure:
        return _unsure(_both(metric, value, unbroken), is_near=abs(value - unbroken) < abs(value - first) / 2.0)
    if _is_gross(value, unbroken) and abs(value - first) < abs(value - unbroken):
        remark = (
            f"{begin}reports {_both(metric, value, unbroken)} of an unbroken run, nearer to its first report: restore "
            "all that training has changed"
        )
    return Restart(line=exactly_or_not(metric, value, unbroken), resumes=True, remark=remark)


def _changed(what: str) -> Restart:
    """Return the verdict where the second start goes on, and not with what was saved."""
    remedy = "restore all that the metric comes from: weights, averages, the best so far"
    return Restart(resumes=True, problem=f"{what}; {remedy}")


def _counted_twice(begin: str, value: str) -> Restart:
    """Return the verdict where the first report is that of what was loaded."""
    remark = (
        f"{begin}reports {value} of the last of these once more, which counts as a new iteration; print the epoch "
        "beside the metric, or report no metric of what is loaded (docs/commands.md)"
    )
    return Restart(line=f"{TWICE} ({value})", resumes=True, remark=remark)


def _unsure(both: str, *, is_near: bool) -> Restart:
    """Return the verdict where only the metric shows whether it goes on."""
    if is_near:
        return Restart(line=f"resumes, as far as is known ({both})", resumes=True)
    return Restart(line=f"not known whether it resumes ({both}): print the epoch beside the metric")


def _both(metric: str, found: float, unbroken: float) -> str:
    """Return two values of a metric, with as many digits as they differ by."""
    digits = next((each for each in range(2, 17) if f"{found:.{each}g}" != f"{unbroken:.{each}g}"), 17)
    return f"{metric} {found:.{digits}g} for {unbroken:.{digits}g}"


def _is_gross(one: float, other: float) -> bool:
    return abs(one - other) > _GROSS * max(abs(one), abs(other))


def _is_worse(restored: float, last: float, unbroken: float | None) -> bool:
    """Whether a restored metric is far from what it was, and not towards what training makes of it."""
    return _is_gross(restored, last) and (unbroken is None or (restored - last) * (unbroken - last) <= 0.0)


def _is_lost(value: float, unbroken: float, seen: Sequence[float], fresh: float | None) -> bool:
    """Whether a metric after a restart is that of a trial that has lost its training, by far more than chance."""
    if fresh is None or not _is_gross(value, unbroken):
        return False
    firsts, step = (seen[0], fresh), abs(seen[0] - unbroken)
    is_first = all(abs(value - first) <= _LIKE_FIRST * step for first in firsts) and _is_gross(seen[0], unbroken)
    spread = max(*seen, fresh) - min(*seen, fresh)
    return is_first or abs(value - unbroken) > _TIMES_SPREAD * spread


def later_numbers(numbers: Mapping[str, float], first: Mapping[str, float], most: int) -> dict[str, float]:
    """Return the numbers of a start's first line that are right behind those of an earlier start's iterations."""
    return {
        word: numbers[word]
        for word in ("epoch", "iteration", "round", "episode")
        if word in numbers and word in first and first[word] < numbers[word] <= first[word] + most
    }
