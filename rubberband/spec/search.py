"""The `search` of an experiment file: its space, scheduler, sampler and metric."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rubberband.errors import InputError
from rubberband.installation import require
from rubberband.spec.fields import WHOLE, Path, Words, fault, input_checked
from rubberband.spec.samplers import SamplerType, check, check_point, grid_size, is_grid, leaves, sample
from rubberband.spec.schedulers import PROBE, SCHEDULERS, AnyScheduler, Sized, auto_key
from rubberband.spec.space import DOMAINS, DomainType, check_names, parse, plain, to_words
from rubberband.spec.stopping import Stop, idle
from rubberband.units import counted, shown
from rubberband.values.plan import SizeKey, Stage
from rubberband.values.ranking import Limit, Ranking
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
    sampler: Sampler = Field(default_factory=Sampler.defaults)
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
    stop: Stop = Field(default_factory=Stop.defaults)
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
        most = self.scheduler.most_trials
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
        if self.warm_start and self.sampler.learns and self.limits:
            raise InputError(
                f"warm_start gives the {self.sampler.algorithm} sampler results of {self.metric} alone, and "
                f"{self.limits[0].metric} has a limit; leave one of them out, or write sampler: {{type: random}}"
            )
        if len(set(self.warm_start)) < len(self.warm_start):
            raise InputError("warm_start names an experiment twice; leave one out")
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
    if issubclass(SCHEDULERS.get(str(scheduler.get("type")), Words), Sized):
        words = {**words, "scheduler": {"num_samples": grid_size(space), **scheduler}}
    return words
