"""What an experiment tunes and how: its space, scheduler, sampler and metric, in the words of the experiment file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, PlainSerializer, PlainValidator, TypeAdapter, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rubberband import scheduler
from rubberband.domains import (
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
    Uniform,
)
from rubberband.plan import Stage
from rubberband.space import SamplerType, check, parse, sample, to_words
from rubberband.words import Count, Words, told

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
    grace_period: Count = 1
    max_t: Count
    reduction_factor: Annotated[int, Field(strict=True, ge=2, le=1_000_000)] = 3

    @model_validator(mode="after")
    def _has_stages(self) -> Sha:
        told(lambda _: self.brackets())(None)
        return self

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Its one chain of stages."""
        return (scheduler.sha(self.num_samples, self.grace_period, self.max_t, self.reduction_factor),)


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
        return scheduler.hyperband(self.max_t, self.reduction_factor)


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
        return (scheduler.stages(written),)


class Sampler(Words):
    """How configurations are drawn from the space."""

    type: Literal["random", "grid"] = "random"
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
