"""The `search` of an experiment file: its space, scheduler, sampler and metric."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Tag,
    TypeAdapter,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rubberband.errors import InputError
from rubberband.installation import require
from rubberband.spec.fields import WHOLE, Count, Path, Words, fault, input_checked
from rubberband.spec.population import Pbt
from rubberband.spec.samplers import SamplerType, check, check_point, grid_size, is_grid, leaves, sample
from rubberband.spec.scheduling import Scheduler
from rubberband.spec.space import DOMAINS, DomainType, check_names, parse, plain, to_words
from rubberband.spec.stopping import Stop, idle
from rubberband.units import counted, shown
from rubberband.values.plan import SizeKey, Stage
from rubberband.values.ranking import Limit, Ranking
from rubberband.values.schedulers import Ladder
from rubberband.values.stopping import StopRules

Constant = None | bool | int | float | str | list[Any]


class _ParameterSchema:
    """The JSON Schema of a parameter; put together only when it is asked for."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        one_of: Any = functools.reduce(operator.or_, map(_model_of, DOMAINS.values()))
        domain: Any = Annotated[one_of, Field(discriminator="type")]
        return handler(TypeAdapter(domain | Constant).core_schema)


def _model_of(row: DomainType) -> type[BaseModel]:
    kind, number = row.name.lower(), int if row.whole else float
    types: dict[str, Any] = {"values": list[Any], "base": float}
    fields: dict[str, Any] = {"type": (Literal[kind], kind)}
    fields |= {name: (types.get(name, number), default) for name, default in row.arguments.items()}
    return create_model(
        row.name, __doc__=str(row.make.__doc__).partition("\n")[0], __config__=ConfigDict(extra="forbid"), **fields
    )


Parameter = Annotated[Any, PlainValidator(input_checked(parse)), PlainSerializer(to_words), _ParameterSchema()]
"""A domain, or a constant."""


def _point(value: Any) -> dict[str, Any]:
    found = plain(value)
    if not isinstance(found, dict):
        raise InputError(f"{shown(value)} is not a mapping; write {{parameter: value}}")
    return found


MAX_TRIALS = 1_000_000
"""Most trials that an experiment may have."""
MAX_ASHA_TRIALS = 10_000
"""Most trials of asha and none: their plans are found by simulation, trial by trial."""
Trials = Annotated[int, Field(strict=True, ge=1, le=MAX_TRIALS), WHOLE]
AUTO = "auto"
_BY_KIND = Discriminator(lambda value: AUTO if value == AUTO else "number")
Auto = Annotated[Literal["auto"], Tag(AUTO)]
"""Size that is as large as the deadline and the budget allow."""
AshaTrials = Annotated[int, Field(strict=True, ge=1, le=MAX_ASHA_TRIALS), WHOLE]
SizedTrials = Annotated[Annotated[Trials, Tag("number")] | Auto, _BY_KIND]
SizedCount = Annotated[Annotated[Count, Tag("number")] | Auto, _BY_KIND]
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


class _Sized(Scheduler):
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


class _Halving(_Sized):
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
    type: Literal["asha"]
    num_samples: Annotated[Annotated[AshaTrials, Tag("number")] | Auto, _BY_KIND]
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


class NoScheduler(_Sized):
    """No scheduler: each trial trains once, to its end, and a free slot takes the next one (Ray Tune's FIFO)."""

    label = "none: each trial trains to its end"
    type: Literal["none"]
    num_samples: Annotated[Annotated[AshaTrials, Tag("number")] | Auto, _BY_KIND]
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


Point = Annotated[dict[str, Any], PlainValidator(input_checked(_point), json_schema_input_type=dict[str, Any])]


_OF_SEVERAL = ("tpe", "gp", "nsgaii")
"""Samplers of Optuna that learn from several metrics."""


class Sampler(Words):
    """The drawing of configurations from the space."""

    type: SamplerType = "random"
    """`random`; `quasi` spreads the trials evenly (a Sobol sequence); `grid` trains every configuration, and is the
    default where all domains are grids; `optuna` learns from results when a bracket starts, with
    asha and none when a trial starts."""
    sampler: Literal["tpe", "gp", "cmaes", "nsgaii"] | None = None
    """For `optuna`: its sampler; by default tpe."""
    multi_objective: Annotated[bool, Field(strict=True)] = False
    """For `optuna`: whether it learns from `metric` and the metrics of `also` alike, to find their Pareto front."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1), WHOLE] = 0

    @model_validator(mode="after")
    def _agrees(self) -> Sampler:
        if self.sampler is not None and not self.learns:
            raise fault("is for type: optuna; leave it out, or set type: optuna", at="sampler")
        if self.multi_objective and self.algorithm not in _OF_SEVERAL:
            raise fault(f"is for the samplers {', '.join(_OF_SEVERAL)} of type: optuna; use one", at="multi_objective")
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        return {key: value for key, value in words.items() if value is not None and value is not False}

    @property
    def learns(self) -> bool:
        """Whether configurations follow from results, and are drawn when a bracket starts."""
        return self.type == "optuna"

    @property
    def algorithm(self) -> str:
        """The name of the sampler: of Optuna's where that draws."""
        return self.sampler or "tpe" if self.learns else self.type


_START = 10
"""Results before which Optuna's samplers draw at random."""
_OPTIONAL = ("points_to_evaluate", "evaluated_rewards", "warm_start", "also", "stop")
"""Left out of the words where they are empty, as `repeats` is where it is 1."""


Bound = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Also(Words):
    """A metric that is reported beside the one that ranks."""

    metric: Annotated[str, Field(min_length=1)]
    """Its key in the reported metrics."""
    mode: Literal["min", "max"]
    """Whether a lower or a higher value is better; with one limit it follows: min from at_most."""
    at_most: Bound | None = None
    """Highest value of a feasible trial. Trials that exceed it, or do not report the metric, rank behind the others."""
    at_least: Bound | None = None
    """Lowest value of a feasible trial."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = super().__get_pydantic_json_schema__(schema, handler)
        handler.resolve_ref_schema(found)["required"].remove("mode")
        return found

    @model_validator(mode="before")
    @classmethod
    def _with_mode(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "mode" in data:
            return data
        given = [key for key in ("at_most", "at_least") if data.get(key) is not None]
        return {**data, "mode": "min" if given == ["at_most"] else "max"} if len(given) == 1 else data

    @model_validator(mode="after")
    def _agrees(self) -> Also:
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise fault(f"is more than at_most={self.at_most:g}, so no trial is feasible; lower it", at="at_least")
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        return {key: value for key, value in words.items() if value is not None}


class Search(Words):
    """The space to search, and the rules of the search."""

    space: dict[str, Parameter] = Field(default_factory=dict)
    """Name of a parameter -> its domain or constant."""
    scheduler: Annotated[AnyScheduler, Field(discriminator="type")]
    sampler: Sampler = Field(default_factory=Sampler.model_construct)
    repeats: Annotated[int, Field(strict=True, ge=1, le=100), WHOLE] = 1
    """How often each configuration is trained, each time by a trial with a seed of its own. Configurations are ranked
    by the mean of their trials, which are promoted or stopped together."""
    points_to_evaluate: tuple[Point, ...] = ()
    """Configurations of the first trials; what a point leaves out is drawn by the sampler."""
    evaluated_rewards: tuple[Annotated[float, Field(strict=True)], ...] = ()
    """The metrics of all points_to_evaluate, known beforehand: no trial trains the points, and the sampler learns from
    them."""
    warm_start: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of earlier experiments of the same space and metric. A sampler that learns begins with their results; other
    samplers train the best configuration of each first."""
    metric: Annotated[str, Field(min_length=1)]
    """The key of the reported metrics that ranks trials."""
    mode: Literal["min", "max"]
    """Whether a lower or a higher metric is better."""
    also: tuple[Also, ...] = ()
    """Metrics that are shown beside the one that ranks, with the trials that no other beats in all of them (Pareto).
    Where one has a limit (at_most, at_least), trials that keep it rank before those that do not."""
    stop: Stop = Field(default_factory=Stop.model_construct)
    """Rules by which trials, and the whole search, end before the plan does."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_grid(cls, data: Any) -> Any:
        return _with_grid(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _can_sample(self) -> Search:
        input_checked(lambda _: check_names(self.space))(None)
        input_checked(lambda _: self._check_rewards())(None)
        named = [self.metric, *(one.metric for one in self.also)]
        for at, metric in enumerate(named[1:]):
            if metric in named[: at + 1]:
                raise fault(f"{metric!r} is named twice; leave one out", at=("also", at, "metric"))
        key, probed = self.auto, self
        if key is not None:
            if self.sampler.type == "grid" and key != self.scheduler.sized_by[1]:
                size, out = (
                    grid_size(self.space),
                    {"num_samples": "leave it out", "max_t": "use the scheduler sha"}[key],
                )
                raise fault(
                    f"auto changes the number of trials, and the grid has {counted(size, 'configuration')}; {out}",
                    at=("scheduler", key),
                )
            probed = self.sized(key, PROBE)
        input_checked(lambda _: probed.check())(None)
        for rule, reason in probed.idle_rules():
            raise fault(reason, at=("stop", *rule))
        most = MAX_ASHA_TRIALS if self.scheduler.type in ("asha", "none") else MAX_TRIALS
        if key is None and self.num_trials > most:
            raise fault(
                f"{counted(self.num_configurations, 'configuration')}, each trained {self.repeats} times, are "
                f"{self.num_trials:,} trials, more than {most:,}; lower it",
                at="repeats",
            )
        if self.repeats > 1 and self.scheduler.type == "pbt":
            raise fault(
                "does not go with scheduler: {type: pbt}, whose trials change configurations; leave it out",
                at="repeats",
            )
        return self

    def _check_rewards(self) -> None:
        if self.sampler.multi_objective and not self.also:
            raise InputError(
                "sampler.multi_objective needs more metrics than one; name the others in also, or leave it out"
            )
        points, rewards = len(self.points_to_evaluate), len(self.evaluated_rewards)
        if self.warm_start and self.sampler.multi_objective:
            raise InputError("warm_start gives results of one metric, and the sampler is multi_objective; leave it out")
        if self.warm_start and self.sampler.learns and points and not rewards:
            raise InputError(
                f"warm_start gives the {self.sampler.algorithm} sampler results, and points_to_evaluate have none; "
                "give evaluated_rewards too, or leave one of them out"
            )
        if not rewards:
            return
        if not self.sampler.learns:
            raise InputError(
                f"evaluated_rewards: the {self.sampler.type} sampler learns nothing from them; write sampler: "
                "{type: optuna}, or leave them out to train the points first"
            )
        if self.sampler.multi_objective:
            raise InputError("evaluated_rewards are of one metric, and the sampler is multi_objective; leave them out")
        if self.limits:
            raise InputError(
                f"evaluated_rewards say nothing of {self.limits[0].metric}, which has a limit; leave them out"
            )
        if rewards != points:
            raise InputError(
                f"evaluated_rewards has {rewards} numbers and points_to_evaluate {points} points; give one for each"
            )
        for index, point in enumerate(self.points_to_evaluate):
            check_point(self.space, point, f"points_to_evaluate[{index}]", complete=True)

    @model_serializer(mode="wrap")
    def _without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        if self.repeats == 1:
            words.pop("repeats", None)
        return {key: value for key, value in words.items() if key not in _OPTIONAL or value}

    @property
    def points_to_train(self) -> tuple[dict[str, Any], ...]:
        """The points that are the configurations of the first trials: all, unless their metrics are known."""
        return () if self.evaluated_rewards else self.points_to_evaluate

    @property
    def results_needed(self) -> int:
        """Results before which a sampler that learns draws at random: as in Optuna, and as BOHB for many parameters."""
        return max(_START, sum(1 for _ in leaves(self.space)) + 3)

    @property
    def objectives(self) -> list[tuple[str, str]]:
        """The metrics that a sampler learns from, each with its mode: `metric`, or all if it is multi-objective."""
        also = self.also if self.sampler.multi_objective else ()
        return [(self.metric, self.mode), *((one.metric, one.mode) for one in also)]

    @property
    def stop_rules(self) -> StopRules:
        """The rules of `stop`, as the controller has them."""
        return self.stop.to_rules(getattr(self.scheduler, "grace_period", 1))

    def idle_rules(self) -> Iterator[tuple[Path, str]]:
        """Iterate over the keys of `stop` that can never act, each with the reason and the fix."""
        return idle(self.stop, self.brackets(), self.metric, self.mode)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of `also`."""
        limited = [one for one in self.also if one.at_most is not None or one.at_least is not None]
        return tuple(Limit(metric=one.metric, at_most=one.at_most, at_least=one.at_least) for one in limited)

    @property
    def ranking(self) -> Ranking:
        """The order of its results."""
        return Ranking(metric=self.metric, mode=self.mode, limits=self.limits, repeats=self.repeats)

    def require_sampler(self) -> None:
        """Raise InputError if the sampler needs a library that is not installed."""
        if not self.sampler.learns:
            return
        beside = {"cmaes": ("cmaes",), "gp": ("torch",)}.get(self.sampler.algorithm, ())
        require(f"search.sampler: {self.sampler.algorithm}", "optuna", *beside)

    def check(self) -> None:
        """Raise InputError for a space that the sampler cannot draw the trials from."""
        self.scheduler.check(self.space, self.sampler.type)
        check(self.space, self.sampler.type, self.num_configurations, self.points_to_train)

    def sized(self, key: SizeKey, number: int) -> Search:
        """Return the search with a number as size."""
        return self.model_copy(update={"scheduler": self.scheduler.model_copy(update={key: number})})

    @property
    def auto(self) -> SizeKey | None:
        """The key of the scheduler that is sized to the limits; None if all are numbers."""
        return auto_key(self.scheduler)

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """The scheduler's chains of stages, whose trials are all repeats. Raises InputError if its size is auto."""
        return tuple(self.repeated(stages) for stages in self.scheduler.brackets())

    def other_scheduler(self) -> tuple[str, tuple[Stage, ...]] | None:
        """Return the scheduler to show beside its own, and the stages of the same trials under that; None: none."""
        other = self.scheduler.other()
        return None if other is None else (other[0], self.repeated(other[1]))

    def repeated(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return stages of configurations as stages of trials."""
        return tuple(
            replace(
                stage,
                trials=self.repeats * stage.trials,
                ladder=None if stage.ladder is None else replace(stage.ladder, repeats=self.repeats),
            )
            for stage in stages
        )

    @property
    def num_trials(self) -> int:
        """Trials that are started, over all brackets."""
        return self.repeats * self.num_configurations

    @property
    def num_configurations(self) -> int:
        """Configurations that are trained, over all brackets."""
        return sum(bracket[0].trials for bracket in self.scheduler.brackets())

    def configurations(self) -> list[dict[str, Any]]:
        """The configuration of every trial, bracket after bracket; of a sampler that learns, those without results."""
        drawn = sample(
            self.space, self.sampler.type, self.num_configurations, self.sampler.seed, points=self.points_to_train
        )
        return [configuration for configuration in drawn for _ in range(self.repeats)]


def _with_grid(words: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a search with the defaults that follow from a grid: the sampler, and the number of trials."""
    sampler, scheduler = words.get("sampler", {}), words.get("scheduler")
    try:
        space = {name: parse(value) for name, value in dict(words.get("space", {})).items()}
    except (InputError, TypeError, ValueError):
        return words  # the space's own validation says what is wrong
    if isinstance(sampler, Mapping) and "type" not in sampler and is_grid(space):
        sampler = {**sampler, "type": "grid"}
        words = {**words, "sampler": sampler}
    if not (isinstance(sampler, Mapping) and sampler.get("type") == "grid" and isinstance(scheduler, Mapping)):
        return words
    if issubclass(SCHEDULERS.get(str(scheduler.get("type")), Words), _Sized):
        words = {**words, "scheduler": {"num_samples": grid_size(space), **scheduler}}
    return words
