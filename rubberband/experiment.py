"""An experiment: what to tune, by when and for how much, in the words of the experiment file.

This model is the edge: the same words in YAML, in Python (`Experiment(name=..., search={...})`) and over REST.
Attribute names carry their units (`constraints.deadline_s`); the file's words are their aliases (`deadline`). What the
schema knows and this release does not build yet is refused with one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    ValidationError,
    model_validator,
)

from rubberband.errors import InputError
from rubberband.offer import Billing
from rubberband.plan import Constraints as PlanningConstraints
from rubberband.plan import Market, Stage
from rubberband.profile import Profile
from rubberband.profile_file import InlineProfile, load_profile
from rubberband.search import Search
from rubberband.units import shown
from rubberband.words import (
    Amount,
    Deadline,
    Duration,
    Gpus,
    Spread,
    Tally,
    Usd,
    Words,
    fault,
    supported,
    word_error,
)


class Constraints(Words):
    """By when and for how much."""

    deadline: Deadline | None = None
    """A duration from the start, or an absolute time with its zone."""
    max_cost_usd: Usd | None = Field(None, alias="max_cost")
    """The whole bill never passes this, in US dollars."""
    confidence: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.95
    """P(deadline and budget hold) that a plan must reach when the profile is noisy."""
    objective: Literal["min_cost", "min_time"] = "min_cost"
    """The cheapest plan within the deadline, or the fastest within the budget; both limits hold either way."""
    iteration_timeout_s: Annotated[Duration, Field(gt=0)] | None = Field(None, alias="iteration_timeout")
    """A trial that reports nothing for so long is taken to hang; by default it follows from the profile."""
    max_failures: Tally = 1
    """How often a trial whose process died or hung is tried again."""

    @property
    def deadline_s(self) -> float | None:
        """The deadline in seconds from the start; None if there is none or it is absolute."""
        return None if isinstance(self.deadline, datetime) else self.deadline

    @property
    def deadline_at(self) -> float | None:
        """The absolute deadline in Unix time; None if there is none or it is a duration."""
        return self.deadline.timestamp() if isinstance(self.deadline, datetime) else None

    def deadline_from(self, now: float) -> float | None:
        """Seconds from `now` (Unix time, the start of the experiment) to the deadline; None if there is none.

        Raises InputError if an absolute deadline has passed.
        """
        if self.deadline_at is None:
            return self.deadline_s
        left_s = self.deadline_at - now
        if left_s <= 0:
            now_text = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
            raise InputError(f"constraints.deadline: {self.deadline} has passed (it is {now_text}); give a later one")
        return left_s


class GpusPerTrial(Words):
    """How many GPUs a plan may give to one trial."""

    min: Gpus = 1
    max: Gpus | None = None
    """By default the GPUs of one instance (or `min`, if that is more)."""

    @model_validator(mode="after")
    def _ordered(self) -> GpusPerTrial:
        if self.max is not None and self.max < self.min:
            raise fault(f"min={self.min} is more than max={self.max}; lower min or raise max")
        return self


class DelayDistribution(Words):
    """A delay that differs from one time to the next; not supported yet."""

    mean: Duration
    cv: Spread


def _fixed_delay(value: Any) -> Any:
    if isinstance(value, Mapping):
        raise fault("a distribution {mean, cv} is not supported yet; use a duration such as 15s")
    return value


Delay = Annotated[
    Duration,
    BeforeValidator(_fixed_delay, json_schema_input_type=Annotated[float, Field(ge=0)] | str | DelayDistribution),
]


class Resources(Words):
    """Where the trials train, and what of the catalogue or of a measurement is overridden (None: it is not)."""

    provider: Annotated[Literal["local", "aws", "virtual"], supported("local", "virtual")] = "local"
    region: Annotated[str, Field(min_length=1)] = "us-east-1"
    instance_type: Annotated[str, Field(min_length=1)] | None = None
    instance_types: list[str] | None = Field(None, exclude=True)
    """Several types for the planner to choose from; so far one."""
    market: Annotated[Market, supported("on_demand")] = "on_demand"
    max_instances: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 16
    gpus_per_trial: GpusPerTrial = Field(default_factory=lambda: GpusPerTrial())
    gpus_per_instance: Gpus | None = None
    price_usd_per_hour: Usd | None = Field(None, alias="price_per_hour")
    """Price of one instance."""
    billing: Billing = "per_instance"
    minimum_billed_s: Duration = Field(60.0, alias="minimum_billed")
    """An instance is billed for at least this long."""
    provision_delay_s: Delay | None = Field(None, alias="provision_delay")
    """From asking for an instance until it runs."""
    init_delay_s: Delay | None = Field(None, alias="init_delay")
    """From a running instance until trials can start on it."""
    dataset_gb: Amount = 0.0
    data_price_usd_per_gb: Usd = Field(0.0, alias="data_price_per_gb")
    head_price_usd_per_hour: Usd = Field(0.0, alias="head_price_per_hour")
    lease_s: Annotated[Duration, Field(ge=2)] = Field(60.0, alias="lease")
    """How long an instance outlives a driver that died; at least 2 s."""
    checkpoints: Annotated[str, Field(min_length=1)] | None = None
    """URL of the checkpoint store: a directory that every instance sees. By default one in the experiment's folder."""

    @model_validator(mode="before")
    @classmethod
    def _one_instance_type(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("instance_types") is None:
            return data
        if data.get("instance_type") is not None:
            raise fault("instance_type is given as well; keep one of the two", at="instance_types")
        types = data["instance_types"]
        if not isinstance(types, list | tuple) or len(types) != 1:
            raise fault("more than one type is not supported yet; use instance_type with one", at="instance_types")
        return {**{key: value for key, value in data.items() if key != "instance_types"}, "instance_type": types[0]}


class Batch(Words):
    """How the batch size of a trial is chosen."""

    policy: Annotated[Literal["fixed", "goodput"], supported("fixed")] = "fixed"

    @model_validator(mode="before")
    @classmethod
    def _no_goodput(cls, data: Any) -> Any:
        """Say it before goodput's own keys are called unknown."""
        if isinstance(data, Mapping) and data.get("policy") == "goodput":
            raise fault("goodput is not supported yet; use fixed", at="policy")
        return data


_ENTRYPOINT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _entrypoint(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, str) and _ENTRYPOINT.fullmatch(value)):
        return value
    raise fault(f"{shown(value)} is not an entry point; write module:attribute, such as examples.digits:DigitsTrial")


def _entrypoint_words(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


def _name(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[a-z0-9-]{1,63}", value, re.ASCII):
        return value
    raise fault(f"{shown(value)} is not a name; use 1 to 63 of a-z, 0-9 and -, such as digits-sha")


def _version(value: Any) -> Any:
    if type(value) is not int or value != 1:
        raise fault(f"{shown(value)} as version of the experiment file is not known; this release reads version: 1")
    return value


class Experiment(Words):
    """What to tune, by when and for how much.

    `Experiment(name=..., entrypoint=..., search={...}, constraints={...}, resources={...}, profile={...})` takes the
    words of the experiment file. Raises InputError (one line, with the key path) for whatever does not fit.
    """

    version: Annotated[Literal[1], BeforeValidator(_version)] = 1
    name: Annotated[
        str, PlainValidator(_name, json_schema_input_type=Annotated[str, Field(pattern="^[a-z0-9-]{1,63}$")])
    ]
    entrypoint: Annotated[
        Any,
        PlainValidator(_entrypoint, json_schema_input_type=str | None),
        PlainSerializer(_entrypoint_words),
    ] = None
    """`module:attribute` of a trial, or (in Python) the class or function itself; needed to run, not to estimate."""
    search: Search
    constraints: Constraints = Field(default_factory=lambda: Constraints())
    resources: Resources = Field(default_factory=lambda: Resources())
    profile: (
        Annotated[
            Annotated[InlineProfile, Tag("inline")] | Annotated[str, Tag("path")],
            Discriminator(lambda value: "path" if isinstance(value, str) else "inline"),
        ]
        | None
    ) = None
    """The profile itself, or the path of a file that `rubberband profile` wrote."""
    batch: Batch = Field(default_factory=lambda: Batch())

    def __init__(self, **words: Any) -> None:
        try:
            super().__init__(**words)
        except ValidationError as error:
            raise word_error(error) from None

    def stages(self) -> tuple[Stage, ...]:
        """The stages of the job."""
        return self.search.scheduler.stages()

    def configurations(self) -> list[dict[str, Any]]:
        """The configuration of every trial, in order; always the same for the same experiment."""
        return self.search.configurations()

    def loaded_profile(self) -> Profile | None:
        """The profile, read from its file if it has one; None if the experiment has none.

        Raises ProfileMissingError if the file does not exist, InputError if it is no profile.
        """
        if isinstance(self.profile, str):
            return load_profile(self.profile)
        return None if self.profile is None else self.profile.to_profile()

    def planning_constraints(self, now: float, gpus_per_instance: int) -> PlanningConstraints:
        """What a plan must keep if the experiment starts at `now` (Unix time) on instances of `gpus_per_instance` GPUs.

        Raises InputError for a deadline that has passed, and for GPUs per trial that no gang can have.
        """
        asked = self.resources.gpus_per_trial
        for key, gpus in (("min", asked.min), ("max", asked.max)):
            if gpus is not None:
                _check_gang(f"resources.gpus_per_trial.{key}", gpus, gpus_per_instance)
        all_gpus = self.resources.max_instances * gpus_per_instance
        if asked.min > all_gpus:
            raise InputError(
                f"resources.gpus_per_trial.min: {asked.min} GPUs are more than {self.resources.max_instances} "
                f"instances have ({all_gpus}); lower it to {all_gpus} or raise max_instances"
            )
        return PlanningConstraints(
            deadline_s=self.constraints.deadline_from(now),
            max_cost_usd=self.constraints.max_cost_usd,
            min_gpus_per_trial=asked.min,
            max_gpus_per_trial=min(asked.max or max(gpus_per_instance, asked.min), all_gpus),
            confidence=self.constraints.confidence,
        )

    def to_words(self) -> dict[str, Any]:
        """The experiment in the file's words, as JSON holds it; `Experiment(**words)` is equal to this one."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _check_gang(key: str, gpus: int, gpus_per_instance: int) -> None:
    if gpus <= gpus_per_instance or gpus % gpus_per_instance == 0:
        return
    below = gpus // gpus_per_instance * gpus_per_instance
    raise InputError(
        f"{key}: {gpus} GPUs are more than an instance has ({gpus_per_instance}) and no whole multiple; "
        f"use {below} or {below + gpus_per_instance}"
    )
