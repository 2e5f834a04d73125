"""The schedulers of an experiment file: their words, and the stages that they make."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rubberband.errors import InputError
from rubberband.spec.fields import AUTO, BY_KIND, WHOLE, Auto, Count, Words, fault, input_checked
from rubberband.spec.population import Pbt
from rubberband.spec.scheduling import MAX_TRIALS, Scheduler
from rubberband.values.plan import SizeKey, Stage
from rubberband.values.schedulers import Ladder

MAX_ASHA_TRIALS = 10_000
"""Most trials of asha and none: their plans are found by simulation, trial by trial."""
Trials = Annotated[int, Field(strict=True, ge=1, le=MAX_TRIALS), WHOLE]
AshaTrials = Annotated[int, Field(strict=True, ge=1, le=MAX_ASHA_TRIALS), WHOLE]
SizedTrials = Annotated[Annotated[Trials, Tag("number")] | Auto, BY_KIND]
SizedCount = Annotated[Annotated[Count, Tag("number")] | Auto, BY_KIND]
PROBE = 1024
"""Size that is used as long as the real one is not known: large enough to profile with, and to check the space."""
ReductionFactor = Annotated[int, Field(strict=True, ge=2, le=1_000_000), WHOLE]


def sha(num_samples: int, grace_period: int, max_t: int, reduction_factor: int) -> tuple[Stage, ...]:
    """Successive halving: stage i trains floor(num_samples / eta^i) trials for grace_period * eta^i more iterations.

    In Ray Tune's words `grace_period` is the paper's r, `max_t` its R and `reduction_factor` its eta. The last stage is
    the one after which fewer than one trial would be left, or the one in which the trials reach `max_t`; it lasts until
    each of its trials has `max_t` iterations in all.
    """
    rungs: list[Stage] = []
    trials, iterations, done = num_samples, grace_period, 0
    while trials >= reduction_factor and done + iterations < max_t:
        rungs.append(Stage(trials=trials, iterations=iterations))
        done += iterations
        trials //= reduction_factor
        iterations *= reduction_factor
    return (*rungs, Stage(trials=trials, iterations=max_t - done))


def hyperband(max_t: int, reduction_factor: int, num_samples: int | None = None) -> tuple[tuple[Stage, ...], ...]:
    """Hyperband's brackets (Li et al. 2018, Algorithm 1), each a chain of stages; the one with most trials comes first.

    Bracket s = s_max ... 0 has n = ceil((s_max + 1) / (s + 1) * eta^s) trials, and its rung i trains floor(n / eta^i)
    of them until they have R / eta^(s - i) iterations in all. Where that is no whole number, it is rounded to the
    nearest one (halves up): at least 1, more in every rung than in the one before, and R in the last. Algorithm 1
    counts here (as in Ray Tune); the paper's Table 1 has fewer trials in the middle brackets: for R = 81 and eta = 3,
    27, 9 and 6 where these have 34, 15 and 8.

    With `num_samples` there are that many trials in all. As in Ray Tune, they fill the brackets that halve least first,
    and all brackets again once all are full.

    Raises InputError for more trials than an experiment may have.
    """
    # In whole numbers: math.log(243, 3) is 4.999…, which would lose a bracket.
    s_max = 0
    while reduction_factor ** (s_max + 1) <= max_t:
        s_max += 1
    sizes = {s: -(-(s_max + 1) * reduction_factor**s // (s + 1)) for s in range(s_max, -1, -1)}
    if num_samples is not None:
        sizes = _filled(sizes, num_samples)
    if sum(sizes.values()) > MAX_TRIALS:
        raise InputError(
            f"max_t={max_t} with reduction_factor={reduction_factor} makes {sum(sizes.values()):,} trials, more than "
            f"{MAX_TRIALS:,}; lower max_t or raise reduction_factor"
        )
    return tuple(_bracket(size, s, max_t, reduction_factor) for s, size in sizes.items())


def _filled(sizes: Mapping[int, int], num_samples: int) -> dict[int, int]:
    whole, left = divmod(num_samples, sum(sizes.values()))
    found: dict[int, int] = {}
    for s in sorted(sizes):
        found[s] = whole * sizes[s] + min(left, sizes[s])
        left -= min(left, sizes[s])
    return {s: found[s] for s in sizes if found[s]}


def _bracket(trials: int, s: int, max_t: int, eta: int) -> tuple[Stage, ...]:
    totals = [0, *((2 * max_t + eta ** (s - i)) // (2 * eta ** (s - i)) for i in range(s + 1))]
    return tuple(Stage(trials=max(1, trials // eta**i), iterations=totals[i + 1] - totals[i]) for i in range(s + 1))


def _merged(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages, those without a halving between them as one."""
    found: list[Stage] = []
    for stage in stages:
        if found and found[-1].trials == stage.trials:
            found[-1] = Stage(trials=stage.trials, iterations=found[-1].iterations + stage.iterations)
        else:
            found.append(stage)
    return tuple(found)


class Sized(Scheduler):
    """A scheduler of some trials; the grid sampler needs no number of them."""

    sized_by = ("num_samples", "max_t")
    num_samples: SizedTrials
    """Trials to start; auto: as many as deadline and budget allow. The grid sampler needs none: every configuration of
    the grid is a trial."""
    max_t: SizedCount
    """Iterations of a trial that is never stopped; auto: as many as deadline and budget allow."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = super().__get_pydantic_json_schema__(schema, handler)
        handler.resolve_ref_schema(found)["required"].remove("num_samples")
        return found

    @model_validator(mode="after")
    def _is_one_auto(self) -> Self:
        if self.num_samples == "auto" and self.max_t == "auto":
            raise fault("num_samples and max_t are both auto, and one follows from the other; write one as a number")
        return self


class _Halving(Sized):
    """Successive halving of some trials."""

    type: Literal["sha", "asha"]
    grace_period: Count = 1
    """Iterations of every trial before the first ones are stopped."""
    reduction_factor: ReductionFactor = 3
    """With 4, a quarter of the trials is promoted, and trains four times longer."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.max_t != "auto" and self.max_t < self.grace_period:
            raise fault(
                f"grace_period={self.grace_period} is more than max_t={self.max_t}; lower grace_period to {self.max_t} "
                "or raise max_t"
            )
        return self

    def stages(self) -> tuple[Stage, ...]:
        """Its chain of stages, with a SYNC after every rung. Raises InputError if its size is auto."""
        if self.num_samples == "auto" or self.max_t == "auto":
            raise _unsized(self)
        return sha(self.num_samples, self.grace_period, self.max_t, self.reduction_factor)

    def falls(self, key: SizeKey) -> list[int]:
        """Return the sizes from which on a larger search never needs less, each up to the next one.

        With `num_samples`, a stage more begins at every power of `reduction_factor`: then fewer trials reach `max_t`.
        """
        if key == "max_t":
            return [self.grace_period]
        assert isinstance(self.max_t, int), "one of the two is a number"
        found, done, iterations = [1], self.grace_period, self.grace_period
        while done < self.max_t and (start := found[-1] * self.reduction_factor) <= MAX_TRIALS:
            found.append(start)
            iterations *= self.reduction_factor
            done += iterations
        return found


class Sha(_Halving):
    """Successive halving (Ray Tune's words)."""

    label = "sha: elastic, SYNC after each rung"
    type: Literal["sha"]

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Its one chain of stages. Raises InputError if its size is auto."""
        return (self.stages(),)

    def other(self) -> tuple[str, tuple[Stage, ...]]:
        """Return the same rungs without a SYNC."""
        return "asha", (asha(self.stages(), self.reduction_factor),)

    def chain(self, trials: int) -> tuple[Stage, ...]:
        """Return the stages of a search of `trials` trials."""
        assert isinstance(self.max_t, int), "what runs has a size"
        return sha(trials, self.grace_period, self.max_t, self.reduction_factor)

    @property
    def eta(self) -> int:
        """Its reduction factor."""
        return self.reduction_factor


class Asha(_Halving):
    """Asynchronous successive halving (Li et al. 2020, Algorithm 2; Ray Tune's words): no trial waits for its rung.

    The rungs are those of `sha`. A trial pauses at the end of a rung and goes on when it is among the best
    1/`reduction_factor` of the results there. A free slot takes such a trial, of the highest rung, else a new one.
    The search ends when all trials have started and none may go on.
    """

    label = "asha: no SYNC, fixed cluster"
    most_trials = MAX_ASHA_TRIALS
    type: Literal["asha"]
    num_samples: Annotated[Annotated[AshaTrials, Tag("number")] | Auto, BY_KIND]
    """Trials to start; auto: as many as deadline and budget allow. The grid sampler needs none: every configuration of
    the grid is a trial."""

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """One stage, whose trials climb the rungs. Raises InputError if its size is auto."""
        return ((asha(self.stages(), self.reduction_factor),),)

    def other(self) -> tuple[str, tuple[Stage, ...]]:
        """Return the same rungs with a SYNC after each."""
        return "sha", self.stages()


def asha(stages: Sequence[Stage], reduction_factor: int) -> Stage:
    """Return the one stage of asynchronous halving with the trials and the rungs of `sha`."""
    totals = tuple(itertools.accumulate(stage.iterations for stage in stages))
    ladder = Ladder(totals=totals, reduction_factor=reduction_factor)
    return Stage(trials=stages[0].trials, iterations=totals[-1], ladder=ladder)


class NoScheduler(Sized):
    """No scheduler: each trial trains once, to its end, and a free slot takes the next one (Ray Tune's FIFO)."""

    label = "none: each trial trains to its end"
    most_trials = MAX_ASHA_TRIALS
    type: Literal["none"]
    num_samples: Annotated[Annotated[AshaTrials, Tag("number")] | Auto, BY_KIND]
    """Trials to start; auto: as many as deadline and budget allow. The grid sampler needs none: every configuration of
    the grid is a trial."""
    max_t: SizedCount
    """Iterations (reports) of a trial, at most: 1 for code that reports once. A trial whose code ends before trains no
    longer. auto: as many as deadline and budget allow."""

    @model_validator(mode="before")
    @classmethod
    def _has_a_length(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "max_t" not in data:
            raise fault("is required: the most reports of a trial; write 1 if its code reports once", at="max_t")
        return data

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """One stage without a SYNC. Raises InputError if its size is auto."""
        if self.num_samples == "auto" or self.max_t == "auto":
            raise _unsized(self)
        ladder = Ladder(totals=(self.max_t,), reduction_factor=1)
        return ((Stage(trials=self.num_samples, iterations=self.max_t, ladder=ladder),),)


class Hyperband(Scheduler):
    """Hyperband (Li et al. 2018): several successive halvings of one job (Ray Tune's words)."""

    sized_by = ("max_t", None)
    type: Literal["hyperband"]
    max_t: SizedCount
    """Iterations of a trial that is never stopped; auto: as many as deadline and budget allow."""
    reduction_factor: ReductionFactor = 3
    num_samples: Trials | None = None
    """Trials in all, which fill the brackets that halve least first; by default as many as fill each bracket once."""

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        return {key: value for key, value in words.items() if value is not None}

    @model_validator(mode="after")
    def _has_brackets(self) -> Hyperband:
        if self.max_t != "auto":
            input_checked(lambda _: self.brackets())(None)
        return self

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Its brackets, each a chain of stages. Raises InputError if its size is auto."""
        if self.max_t == "auto":
            raise _unsized(self)
        return hyperband(self.max_t, self.reduction_factor, self.num_samples)

    def chain(self, trials: int) -> tuple[Stage, ...]:
        """Return the stages of its bracket that halves most, with `trials` trials."""
        assert isinstance(self.max_t, int), "what runs has a size"
        halvings = 0
        while self.reduction_factor ** (halvings + 1) <= self.max_t:
            halvings += 1
        return _merged(_bracket(trials, halvings, self.max_t, self.reduction_factor))

    @property
    def eta(self) -> int:
        """Its reduction factor."""
        return self.reduction_factor


def auto_key(scheduler: BaseModel) -> SizeKey | None:
    """Return the key of a scheduler that is `auto`; None without any."""
    keys: tuple[SizeKey, SizeKey] = ("num_samples", "max_t")
    return next((key for key in keys if getattr(scheduler, key, None) == AUTO), None)


def _unsized(scheduler: BaseModel) -> InputError:
    return InputError(
        f"search.scheduler.{auto_key(scheduler)}: auto is sized when the experiment is planned; `rubberband estimate` "
        "says to which number"
    )


class WrittenStage(Words):
    """A stage: `trials` trials train for `iterations` more iterations."""

    trials: Trials
    iterations: Count


class WrittenStages(Scheduler):
    """Stages written out one by one."""

    type: Literal["stages"]
    written: Annotated[tuple[WrittenStage, ...], Field(alias="stages", min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _agrees(self) -> WrittenStages:
        for index, (before, after) in enumerate(pairwise(self.written), start=1):
            if after.trials > before.trials:
                raise fault(
                    f"stage {index} has {after.trials} trials and the stage before has {before.trials}: only survivors "
                    f"train on; lower it to {before.trials} or less"
                )
        return self

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Its one chain of stages."""
        return (tuple(Stage(trials=stage.trials, iterations=stage.iterations) for stage in self.written),)

    def chain(self, trials: int) -> tuple[Stage, ...]:
        """Return the stages with `trials` trials in the first one, and in proportion in the later ones."""
        first = self.written[0].trials
        return _merged(
            [Stage(trials=max(1, one.trials * trials // first), iterations=one.iterations) for one in self.written]
        )


AnyScheduler = Sha | Asha | Hyperband | NoScheduler | WrittenStages | Pbt
SCHEDULERS: dict[str, type[Scheduler]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(AnyScheduler)
}
"""`scheduler.type` -> its class."""
