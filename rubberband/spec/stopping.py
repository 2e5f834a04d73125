"""`search.stop` of an experiment file: rules by which trials, and the whole search, end early."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rubberband.errors import InputError
from rubberband.spec.fields import WHOLE, Amount, Count, Duration, Path, Tally, Usd, Words, fault, input_checked
from rubberband.units import counted, duration, format_usd, shown
from rubberband.values import stopping
from rubberband.values.plan import Stage

Finite = Annotated[float, Field(strict=True)]
Several = Annotated[int, Field(strict=True, ge=2, le=1_000_000), WHOLE]
Above = Annotated[float, Field(strict=True, gt=0, le=1e12)]

_WORTH = re.compile(r"(?P<gain>\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?) per USD")


def _worth(value: Any) -> float:
    match = _WORTH.fullmatch(" ".join(value.split())) if isinstance(value, str) else None
    if match is None or float(match["gain"]) == 0.0:
        raise InputError(
            f"{shown(value)} is not an improvement of the metric for a USD; write it as 0.001 per USD, above 0"
        )
    return float(match["gain"])


Worth = Annotated[
    float,
    BeforeValidator(input_checked(_worth), json_schema_input_type=str),
    PlainSerializer(lambda gain: f"{gain!r} per USD"),
]
"""An improvement of the metric that one USD must at least buy: `0.001 per USD`."""


class _Sparse(Words):
    """Words of which only those that differ from their defaults are written."""

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        defaults = {(field.alias or name): field.default for name, field in type(self).model_fields.items()}
        names = {name: field.alias or name for name, field in type(self).model_fields.items()}
        return {key: value for key, value in words.items() if value != defaults[names.get(key, key)]}


class Patience(_Sparse):
    """A trial ends when its metric gets no better. Only iterations that the trial evaluates count."""

    iterations: Count
    """Iterations in a row without an improvement after which the trial ends."""
    min_delta: Amount = 0.0
    """An improvement is more than this."""
    std: Above | None = None
    """Instead of `min_delta`: the trial ends when the standard deviation of its latest `iterations` results is less."""
    after: Tally = 0
    """Iterations before which it never ends."""

    @model_validator(mode="after")
    def _agrees(self) -> Patience:
        if self.std is not None and self.min_delta:
            raise fault("looks for an improvement, and std for results that are alike; leave one out", at="min_delta")
        if self.std is not None and self.iterations < 2:
            raise fault("1 result has no standard deviation; raise it to 2 or more", at="iterations")
        return self


class Median(_Sparse):
    """A trial ends when its best result so far is worse than the median of the running averages of the others that have
    come as far (Vizier's and Ray Tune's median stopping rule)."""

    after: Count = 1
    """Evaluated iterations before which no trial ends; the averages are of the results from this one on."""
    trials: Count = 3
    """Other trials that must have come as far."""


class Plateau(_Sparse):
    """The search ends when its best results are alike (Ray Tune's ExperimentPlateauStopper)."""

    top: Several
    """The number of best results, over the reports of all trials."""
    std: Amount
    """Their standard deviation is at most this."""
    reports: Tally = 0
    """For more reports in a row than this."""


class NoImprovement(_Sparse):
    """The search ends when its best result gets no better. If several are given, the first that is reached ends it."""

    trials: Count | None = None
    """Trials in a row that end their first stage, or their first rung, without an improvement."""
    time_s: Annotated[Duration, Field(gt=0)] | None = Field(None, alias="time")
    """Time without an improvement."""
    cost_usd: Annotated[Usd, Field(gt=0)] | None = Field(None, alias="cost")
    """Money that is spent without an improvement."""
    syncs: Count | None = None
    """SYNCs in a row without an improvement since the one before."""
    plateau: Plateau | None = None
    """Best results that are alike."""
    min_delta: Amount = 0.0
    """An improvement is more than this; not for `plateau`."""

    @model_validator(mode="after")
    def _agrees(self) -> NoImprovement:
        limits = (self.trials, self.time_s, self.cost_usd, self.syncs)
        if not any(limits) and self.plateau is None:
            raise fault("has no limit; write one of trials, time, cost, syncs, plateau, such as {trials: 20}")
        if self.min_delta and not any(limits):
            raise fault("is not for plateau, which has std; leave it out", at="min_delta")
        return self


class Stop(_Sparse):
    """Rules by which trials, and the whole search, end before the plan does."""

    target: Finite | None = None
    """The search ends when a trial reports this value of the metric, or a better one."""
    patience: Patience | None = None
    """A trial ends when its metric gets no better."""
    median: Median | None = None
    """A trial ends when it is worse than half of the others were on average."""
    no_improvement: NoImprovement | None = None
    """The search ends when its best result gets no better."""
    worth_per_usd: Worth | None = Field(None, alias="worth")
    """The search ends at a SYNC when one USD of what is left is expected to improve the metric by less, such as
    0.001 per USD. Needs constraints.max_cost or constraints.deadline."""

    def to_rules(self, grace_period: int) -> stopping.StopRules:
        """Return the rules of the controller."""
        plateau = self.no_improvement.plateau if self.no_improvement else None
        found: dict[str, Any] = {
            "patience": _plain(stopping.Patience, self.patience),
            "median": _plain(stopping.Median, self.median),
            "no_improvement": _plain(
                stopping.NoImprovement, self.no_improvement, plateau=_plain(stopping.Plateau, plateau)
            ),
        }
        rules = stopping.StopRules(target=self.target, worth_per_usd=self.worth_per_usd, **found)
        return replace(rules, grace_period=grace_period) if rules.ends_trials else rules


def _plain(kind: type[Any], words: Words | None, **changes: Any) -> Any:
    if words is None:
        return None
    return kind(**{field.name: getattr(words, field.name) for field in fields(kind)} | changes)


# What can never act


def idle(stop: Stop, brackets: Sequence[Sequence[Stage]], metric: str, mode: str) -> Iterator[tuple[Path, str]]:
    """Iterate over the keys of rules that can never act, each with the reason and the fix.

    `brackets` are the scheduler's. A rule that always acts, at the first report, is as useless.
    """
    if stop.target is not None and (wrong := stopping.target_fault(stop.target, metric, mode)):
        yield ("target",), wrong
    if brackets[0][0].exchange is not None:
        ending = {"patience": stop.patience, "median": stop.median}
        yield from (((name,), _OF_A_POPULATION) for name, rule in ending.items() if rule is not None)
    longest = max(sum(stage.iterations for stage in bracket) for bracket in brackets)
    trials = sum(bracket[0].trials for bracket in brackets)
    if (patience := stop.patience) is not None:
        most = longest - (2 if patience.std is None else 1)
        if patience.iterations > most:
            what = f"{counted(patience.iterations, 'iteration')} without an improvement"
            yield ("patience", "iterations"), _late(what, longest, most)
        elif patience.after >= longest:
            yield ("patience", "after"), _late(counted(patience.after, "iteration"), longest, longest - 1)
    if (median := stop.median) is not None:
        if median.after >= longest:
            yield ("median", "after"), _late(counted(median.after, "iteration"), longest, longest - 1)
        if median.trials >= trials:
            what = f"{counted(median.trials, 'other trial')} are more than there are, of {trials} in all"
            yield ("median", "trials"), f"{what}; {_lower(trials - 1)}"
    if (rule := stop.no_improvement) is not None:
        yield from ((("no_improvement", *at), reason) for at, reason in _idle_search(rule, brackets, trials))


_OF_A_POPULATION = (
    "ends trials, and a population replaces its worst ones at each SYNC; leave it out (target and no_improvement end "
    "the search)"
)


def _late(what: str, longest: int, most: int) -> str:
    return f"{what} are no fewer than a trial of {counted(longest, 'iteration')} has before its end; {_lower(most)}"


def _lower(most: int) -> str:
    return f"lower it to {most}" if most > 0 else "leave it out"


def _idle_search(rule: NoImprovement, brackets: Sequence[Sequence[Stage]], trials: int) -> Iterator[tuple[Path, str]]:
    has_sync = brackets[0][0].has_sync
    if rule.trials is not None:
        if has_sync and len(brackets) == 1:
            yield ("trials",), f"all {counted(trials, 'trial')} start at once; use syncs, time or cost instead"
        elif rule.trials > trials - 2:
            yield ("trials",), f"of {counted(trials, 'trial')} one improves, and the last ends it; {_lower(trials - 2)}"
    if rule.syncs is not None:
        syncs = sum(map(len, brackets)) if has_sync else 0
        if not has_sync:
            yield ("syncs",), "the scheduler has no SYNC; use trials, time or cost instead"
        elif rule.syncs > syncs - 2:
            yield (
                ("syncs",),
                f"of {counted(syncs, 'SYNC')} the first improves, and the last ends it; {_lower(syncs - 2)}",
            )


def check_stop(stop: Stop, deadline_s: float | None, max_cost_usd: float | None, *, has_price: bool) -> None:
    """Raise a fault for a rule that the limits, or instances without a price, make useless."""
    rule, has_limit = stop.no_improvement, deadline_s is not None or max_cost_usd is not None
    if stop.worth_per_usd is not None:
        if not has_limit:
            wrong = "weighs what is left against its cost, and nothing caps that; set constraints.max_cost or deadline"
            raise fault(wrong, at=("search", "stop", "worth"))
        if not has_price:
            raise fault("needs a price, and these instances have none; leave it out", at=("search", "stop", "worth"))
    if rule is None:
        return
    at = ("search", "stop", "no_improvement")
    if rule.cost_usd is not None and not has_price:
        raise fault("is in USD, and these instances have no price; use time instead", at=(*at, "cost"))
    if rule.cost_usd is not None and max_cost_usd is not None and rule.cost_usd >= max_cost_usd:
        wrong = f"{format_usd(rule.cost_usd)} are no less than constraints.max_cost; lower it, or leave it out"
        raise fault(wrong, at=(*at, "cost"))
    if rule.time_s is not None and deadline_s is not None and rule.time_s >= deadline_s:
        wrong = f"{duration(rule.time_s)} is no shorter than constraints.deadline; lower it, or leave it out"
        raise fault(wrong, at=(*at, "time"))
