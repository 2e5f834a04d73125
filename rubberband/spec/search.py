"""What an experiment tunes and how: its space, scheduler, sampler and metric, in the words of the experiment file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, PlainSerializer, PlainValidator, TypeAdapter, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rubberband.errors import InputError
from rubberband.spec.fields import Count, Words, told
from rubberband.spec.space import (
    Choice,
    Grid,
    LogRandint,
    LogUniform,
    QLogRandint,
    QLogUniform,
    QRandint,
    QRandn,
    QUniform,
    Randint,
    Randn,
    SamplerType,
    Uniform,
    check,
    grid_size,
    is_grid,
    parse,
    sample,
    to_words,
)
from rubberband.units import shown
from rubberband.values.plan import Stage

# Schedulers: which trials train for how long, as a list of stages (design/planning-model.md, The job).
#
# Successive halving follows Ray Tune's words: `grace_period` is the paper's r, `max_t` its R, `reduction_factor` its
# eta.


MAX_TRIALS = 1_000_000
"""Most trials that an experiment may have."""
MAX_ITERATIONS = 1_000_000_000
"""Most iterations that a trial may train for."""


def sha(num_samples: int, grace_period: int, max_t: int, reduction_factor: int) -> tuple[Stage, ...]:
    """Successive halving: stage i trains floor(num_samples / eta^i) trials for grace_period * eta^i more iterations.

    The last stage is the one after which fewer than one trial would be left, or the one in which the trials reach
    `max_t`; it lasts until each of its trials has `max_t` iterations in all.

    Raises InputError for counts below one, `grace_period` beyond `max_t`, or `reduction_factor` below two.
    """
    _check_count("num_samples", num_samples, MAX_TRIALS)
    _check_count("grace_period", grace_period, MAX_ITERATIONS)
    _check_count("max_t", max_t, MAX_ITERATIONS)
    _check_reduction(reduction_factor)
    if grace_period > max_t:
        raise InputError(
            f"grace_period={grace_period} is more than max_t={max_t}; lower grace_period to {max_t} or raise max_t"
        )
    rungs: list[Stage] = []
    trials, iterations, done = num_samples, grace_period, 0
    while trials >= reduction_factor and done + iterations < max_t:
        rungs.append(Stage(trials=trials, iterations=iterations))
        done += iterations
        trials //= reduction_factor
        iterations *= reduction_factor
    return (*rungs, Stage(trials=trials, iterations=max_t - done))


def stages(written: Sequence[Mapping[str, int] | Stage]) -> tuple[Stage, ...]:
    """Stages that the user wrote out: `[{trials: 32, iterations: 1}, ...]`.

    Raises InputError if there are none, if a count is below one, or if a stage has more trials than the one before.
    """
    if not written:
        raise InputError("stages is empty; write at least one, such as {trials: 32, iterations: 1}")
    chain = tuple(_stage(index, words) for index, words in enumerate(written))
    for index in range(1, len(chain)):
        before, after = chain[index - 1].trials, chain[index].trials
        if after > before:
            raise InputError(
                f"stage {index} has {after} trials and the stage before has {before}: only survivors train on; "
                f"lower it to {before} or less"
            )
    return chain


def hyperband(max_t: int, reduction_factor: int) -> tuple[tuple[Stage, ...], ...]:
    """Hyperband's brackets (Li et al. 2018, Algorithm 1), each a chain of stages; the one with most trials comes first.

    Bracket s = s_max ... 0 has n = ceil((s_max + 1) / (s + 1) * eta^s) trials, and its rung i trains floor(n / eta^i)
    of them until they have R / eta^(s - i) iterations in all. Where that is no whole number, it is rounded to the
    nearest one (halves up): at least 1, more in every rung than in the one before, and R in the last. Algorithm 1
    counts here (as in Ray Tune); the paper's Table 1 has fewer trials in the middle brackets: for R = 81 and eta = 3,
    27, 9 and 6 where these have 34, 15 and 8.

    Raises InputError for counts below one, `reduction_factor` below two, and more trials than an experiment may have.
    """
    _check_count("max_t", max_t, MAX_ITERATIONS)
    _check_reduction(reduction_factor)
    s_max = 0
    while reduction_factor ** (s_max + 1) <= max_t:
        s_max += 1
    sizes = {s: -(-(s_max + 1) * reduction_factor**s // (s + 1)) for s in range(s_max, -1, -1)}
    if sum(sizes.values()) > MAX_TRIALS:
        raise InputError(
            f"max_t={max_t} with reduction_factor={reduction_factor} makes {sum(sizes.values()):,} trials, more than "
            f"{MAX_TRIALS:,}; lower max_t or raise reduction_factor"
        )
    return tuple(_bracket(size, s, max_t, reduction_factor) for s, size in sizes.items())


def _bracket(trials: int, s: int, max_t: int, eta: int) -> tuple[Stage, ...]:
    totals = [0, *((2 * max_t + eta ** (s - i)) // (2 * eta ** (s - i)) for i in range(s + 1))]
    return tuple(Stage(trials=trials // eta**i, iterations=totals[i + 1] - totals[i]) for i in range(s + 1))


def _stage(index: int, words: Mapping[str, int] | Stage) -> Stage:
    stage = words if isinstance(words, Stage) else _stage_of_mapping(index, words)
    _check_count(f"stage {index}: trials", stage.trials, MAX_TRIALS)
    _check_count(f"stage {index}: iterations", stage.iterations, MAX_ITERATIONS)
    return stage


def _stage_of_mapping(index: int, words: Mapping[str, int]) -> Stage:
    if set(words) != {"trials", "iterations"}:
        raise InputError(f"stage {index} is {shown(dict(words))}; write it as {{trials: 32, iterations: 1}}")
    return Stage(trials=words["trials"], iterations=words["iterations"])


def _check_count(name: str, value: int, most: int) -> None:
    _check_integer(name, value)
    if not 1 <= value <= most:
        raise InputError(f"{name}={shown(value)} must be from 1 to {most:,}; raise or lower it")


def _check_reduction(reduction_factor: int) -> None:
    _check_integer("reduction_factor", reduction_factor)
    if reduction_factor < 2:
        raise InputError(
            f"reduction_factor={reduction_factor} keeps every trial; the least is 2, Ray Tune's usual is 3"
        )


def _check_integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}={shown(value)} is not a whole number; write one, such as 3")


Constant = None | bool | int | float | str | list[Any]
Domain = Annotated[
    Uniform
    | QUniform
    | LogUniform
    | QLogUniform
    | Randn
    | QRandn
    | Randint
    | LogRandint
    | QRandint
    | QLogRandint
    | Choice
    | Grid,
    Field(discriminator="type"),
]


class _WordsOfParameter:
    """What the JSON Schema says of a parameter; put together only when it is asked for."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(Domain | Constant).core_schema)


Parameter = Annotated[Any, PlainValidator(told(parse)), PlainSerializer(to_words), _WordsOfParameter()]
"""A domain, or a constant."""


class Sha(Words):
    """Successive halving (Ray Tune's words)."""

    type: Literal["sha"]
    num_samples: Count
    """Trials to start. The grid sampler needs none: every configuration of the grid is a trial."""
    grace_period: Count = 1
    max_t: Count
    reduction_factor: Annotated[int, Field(strict=True, ge=2, le=1_000_000)] = 3

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = super().__get_pydantic_json_schema__(schema, handler)
        handler.resolve_ref_schema(found)["required"].remove("num_samples")
        return found

    @model_validator(mode="after")
    def _has_stages(self) -> Sha:
        told(lambda _: self.brackets())(None)
        return self

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Its one chain of stages."""
        return (sha(self.num_samples, self.grace_period, self.max_t, self.reduction_factor),)


class Hyperband(Words):
    """Hyperband (Li et al. 2018): several successive halvings side by side (Ray Tune's words)."""

    type: Literal["hyperband"]
    max_t: Count
    reduction_factor: Annotated[int, Field(strict=True, ge=2, le=1_000_000)] = 3

    @model_validator(mode="after")
    def _has_brackets(self) -> Hyperband:
        told(lambda _: self.brackets())(None)
        return self

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Its brackets, each a chain of stages."""
        return hyperband(self.max_t, self.reduction_factor)


class WrittenStage(Words):
    """A stage: `trials` trials train for `iterations` more iterations."""

    trials: Count
    iterations: Count


class WrittenStages(Words):
    """Stages written out one by one."""

    type: Literal["stages"]
    written: Annotated[tuple[WrittenStage, ...], Field(alias="stages", min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _has_stages(self) -> WrittenStages:
        told(lambda _: self.brackets())(None)
        return self

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Its one chain of stages."""
        written = [Stage(trials=stage.trials, iterations=stage.iterations) for stage in self.written]
        return (stages(written),)


class Sampler(Words):
    """How configurations are drawn from the space."""

    type: Literal["random", "grid"] = "random"
    """By default `grid` where every domain of the space is a grid, and `random` elsewhere."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)] = 0


class Search(Words):
    """What is tuned, and how."""

    space: dict[str, Parameter] = Field(default_factory=dict)
    """Name of a parameter -> its domain or constant."""
    scheduler: Annotated[Sha | WrittenStages | Hyperband, Field(discriminator="type")]
    sampler: Sampler = Field(default_factory=Sampler.model_construct)
    metric: Annotated[str, Field(min_length=1)]
    """The key of the reported metrics that ranks trials."""
    mode: Literal["min", "max"]
    """Whether a lower or a higher metric is better."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_grid(cls, data: Any) -> Any:
        return _with_grid(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _can_sample(self) -> Search:
        told(lambda _: check(self.space, self._sampler(), self.num_trials))(None)
        return self

    @property
    def num_trials(self) -> int:
        """Trials that are started, over all brackets."""
        return sum(bracket[0].trials for bracket in self.scheduler.brackets())

    def configurations(self) -> list[dict[str, Any]]:
        """The configuration of every trial, bracket after bracket."""
        return sample(self.space, self._sampler(), self.num_trials, self.sampler.seed)

    def _sampler(self) -> SamplerType:
        return "grid" if self.sampler.type == "grid" else "random"


def _with_grid(words: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A search with what follows from the grid that its space is: the sampler, and how many trials sha starts."""
    sampler, scheduler = words.get("sampler", {}), words.get("scheduler")
    try:
        space = {name: parse(value) for name, value in dict(words.get("space", {})).items()}
    except (InputError, TypeError, ValueError):
        return words  # the space's own validation says what is wrong
    if isinstance(sampler, Mapping) and "type" not in sampler and is_grid(space):
        sampler = {**sampler, "type": "grid"}
        words = {**words, "sampler": sampler}
    by_grid = isinstance(sampler, Mapping) and sampler.get("type") == "grid"
    if by_grid and isinstance(scheduler, Mapping) and scheduler.get("type") == "sha":
        words = {**words, "scheduler": {"num_samples": grid_size(space), **scheduler}}
    return words
