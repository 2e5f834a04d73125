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
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    model_serializer,
    model_validator,
)

from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.fields import MODULE_ATTRIBUTE, Count, Deadline, Duration, Tally, Usd, Words, fault, word_error
from rubberband.spec.profile_file import InlineProfile, load_profile
from rubberband.spec.resources import Resources
from rubberband.spec.search import Search
from rubberband.units import nearest, shown
from rubberband.values.adaptive import INTERVAL, LR_SCALINGS, AdaptiveBatch
from rubberband.values.plan import PlanningConstraints, Stage
from rubberband.values.profile import Profile

EC2_MINIMUM_BILLED_S = 60.0


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


def _lr_scaling(value: Any) -> Any:
    if value is None or value in LR_SCALINGS or (isinstance(value, str) and MODULE_ATTRIBUTE.fullmatch(value)):
        return value
    raise fault(
        f"{shown(value)} is not one of {', '.join(LR_SCALINGS)}, nor module:function; "
        f"{nearest(str(value), LR_SCALINGS)}"
    )


class Batch(Words):
    """How the batch size of a trial is chosen. All but the policy is for goodput."""

    policy: Literal["fixed", "goodput"] = "fixed"
    """fixed: as the trial says; goodput: whatever makes the most progress per second on the trial's GPUs."""
    initial: Count | None = None
    """Samples per optimizer step that a trial starts with, over all of its GPUs, and never goes below; by default the
    trial's own batch size."""
    max: Count | None = None
    """Most samples per optimizer step; by default 32 times the initial ones."""
    max_per_gpu: Count | None = None
    """Most samples that go through the model on one GPU at once; by default the trial's own limit."""
    accumulation: Annotated[bool, Field(strict=True)] = True
    """Whether gradients may be accumulated over several passes, for a batch that does not fit otherwise."""
    lr_scaling: Annotated[str | None, BeforeValidator(_lr_scaling)] = None
    """How the learning rate follows the batch: adascale, linear, sqrt, legw, or module:function; by default adascale,
    or sqrt for Adam and its kin."""
    warmup_epochs: Annotated[float, Field(strict=True, ge=0, le=1000)] = 1.0
    """Of legw: epochs of warm-up at the initial batch size."""
    interval: Count = INTERVAL
    """Optimizer steps from one choice of the batch to the next."""

    @model_validator(mode="after")
    def _agrees(self) -> Batch:
        if self.policy == "fixed":
            self._refuse_keys_of_goodput()
        elif self.initial is not None and self.max is not None and self.max < self.initial:
            raise fault(f"{self.max} is less than initial={self.initial}; raise it, or lower initial", at="max")
        return self

    def _refuse_keys_of_goodput(self) -> None:
        for key in Batch.model_fields:
            if key != "policy" and key in self.model_fields_set:
                raise fault("is for policy: goodput; leave it out, or set policy: goodput", at=key)

    @model_serializer(mode="wrap")
    def _without_keys_of_goodput(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        return words if self.policy == "goodput" else {"policy": self.policy}

    def to_plain(self) -> AdaptiveBatch | None:
        """As the trials are told; None: the batch is fixed."""
        if self.policy == "fixed":
            return None
        return AdaptiveBatch(
            initial=self.initial,
            max=self.max,
            max_per_gpu=self.max_per_gpu,
            accumulation=self.accumulation,
            lr_scaling=self.lr_scaling,
            warmup_epochs=self.warmup_epochs,
            interval=self.interval,
        )


def _written_kind(value: Any) -> str:
    return "path" if isinstance(value, str) else "inline"


WrittenProfile = Annotated[
    Annotated[InlineProfile, Tag("inline")] | Annotated[str, Tag("path")], Discriminator(_written_kind)
]
"""The profile itself, or the path of a file that `rubberband profile` wrote."""


class ProfilesByType(Words):
    """A profile for every instance type, for types that differ in their GPUs."""

    by_instance_type: Annotated[dict[str, WrittenProfile], Field(min_length=1)]


def _profile_kind(value: Any) -> str:
    if isinstance(value, ProfilesByType) or (isinstance(value, Mapping) and "by_instance_type" in value):
        return "by type"
    return _written_kind(value)


def _entrypoint(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, str) and MODULE_ATTRIBUTE.fullmatch(value)):
        return value
    raise fault(f"{shown(value)} is not an entry point; write module:attribute, such as examples.digits:DigitsTrial")


def entrypoint_words(value: Any) -> str | None:
    """An entry point as the file has it: `module:attribute`; None if there is none."""
    return value if value is None or isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


_NAME_PATTERN = "^[a-z0-9][a-z0-9-]{0,62}$"
"""One that began with a dash would be taken for an option of a command, and `-` for its input."""


def _name(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(_NAME_PATTERN, value, re.ASCII):
        return value
    near = re.sub(r"[^a-z0-9]+", "-", value[:80].lower()).strip("-")[:63] if isinstance(value, str) else ""
    raise fault(
        f"{shown(value)} is not a name; use 1 to 63 of a-z, 0-9 and - (not first), such as {near or 'digits-sha'}"
    )


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
    name: Annotated[str, PlainValidator(_name, json_schema_input_type=Annotated[str, Field(pattern=_NAME_PATTERN)])]
    entrypoint: Annotated[
        Any,
        PlainValidator(_entrypoint, json_schema_input_type=str | None),
        PlainSerializer(entrypoint_words),
    ] = None
    """`module:attribute` of a trial, or (in Python) the class or function itself; needed to run, not to estimate."""
    search: Search
    constraints: Constraints = Field(default_factory=Constraints.model_construct)
    resources: Resources = Field(default_factory=Resources.model_construct)
    profile: (
        Annotated[
            Annotated[InlineProfile, Tag("inline")]
            | Annotated[str, Tag("path")]
            | Annotated[ProfilesByType, Tag("by type")],
            Discriminator(_profile_kind),
        ]
        | None
    ) = None
    """The profile itself, the path of a file that `rubberband profile` wrote, or one of these for every type."""
    batch: Batch = Field(default_factory=Batch.model_construct)
    """How the batch size of a trial is chosen: fixed, or adapted within limits."""

    def __init__(self, **words: Any) -> None:
        try:
            super().__init__(**words)
        except ValidationError as error:
            raise word_error(error) from None

    @model_validator(mode="after")
    def _agrees(self) -> Experiment:
        _check_money(self.constraints, self.resources)
        if isinstance(self.profile, ProfilesByType):
            _check_profiles(self.profile, self.resources)
        _check_batch(self.batch, self.resources)
        return self

    @classmethod
    def kept(cls, words: Mapping[str, Any]) -> Experiment:
        """An experiment that was accepted before, by its words: it may have a name that none gets any more, such as -.

        Raises InputError for what this version does not read.
        """
        return cls(**{**words, "name": "any"}).model_copy(update={"name": words.get("name", "")})

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """The chains of stages of the job, which may run side by side: one, or several for hyperband.

        Trials are numbered across the brackets, as `configurations` lists them.
        """
        return self.search.scheduler.brackets()

    def stages(self) -> tuple[Stage, ...]:
        """The stages of a job that is one chain of them. Raises InputError if it has several brackets."""
        brackets = self.brackets()
        if len(brackets) > 1:
            raise InputError(
                f"search.scheduler: {self.search.scheduler.type} has {len(brackets)} brackets; `rubberband estimate` "
                "plans them, `run` trains one chain of stages so far: use sha"
            )
        return brackets[0]

    def require_runnable(self) -> None:
        """Raise InputError for what can be planned and not be run.

        That is hyperband, and EC2 without a checkpoint store or billed otherwise than EC2 bills.
        """
        if self.resources.kind.is_rented:
            _require_ec2(self.resources)
        self.stages()

    def configurations(self) -> list[dict[str, Any]]:
        """The configuration of every trial, in order; always the same for the same experiment."""
        return self.search.configurations()

    def loaded_profile(self, instance_type: str | None = None) -> Profile | None:
        """The profile for an instance type, read from its file if it has one; None if the experiment has none.

        Without `instance_type` it is that of `resources`. A profile that is not written for a type holds for every one.

        Raises ProfileMissingError if the file does not exist or the type has no profile, InputError if it is no profile
        or if the type is not told.
        """
        if not isinstance(self.profile, ProfilesByType):
            return None if self.profile is None else _loaded(self.profile)
        name, written = instance_type or self.resources.instance_type, self.profile.by_instance_type
        if name is None:
            raise InputError(f"profile.by_instance_type: which of {', '.join(written)} is meant? set instance_type")
        if name not in written:
            raise ProfileMissingError(f"profile.by_instance_type: {shown(name)} has none; {nearest(name, written)}")
        return _loaded(written[name])

    def loaded_profiles(self) -> Profile | dict[str, Profile] | None:
        """The one profile, or instance type -> profile if it is written by type; None if the experiment has none.

        Raises as `loaded_profile` does.
        """
        if isinstance(self.profile, ProfilesByType):
            return {name: _loaded(written) for name, written in self.profile.by_instance_type.items()}
        return self.loaded_profile()

    def max_gpus_per_trial(self, gpus_per_instance: int, known_gpus: int | None = None) -> int:
        """The most GPUs of a trial on instances of `gpus_per_instance`: as asked, or else the largest that packs.

        `known_gpus` is the largest one that the profile knows; without a profile, trials stay within an instance.
        """
        asked = self.resources.gpus_per_trial
        if asked.max is not None:
            return asked.max
        most = gpus_per_instance if known_gpus is None else known_gpus
        if most > gpus_per_instance:
            most = min(most, self.resources.max_instances * gpus_per_instance) // gpus_per_instance * gpus_per_instance
        return max(most, asked.min)

    def planning_constraints(
        self, now: float, gpus_per_instance: int, known_gpus: int | None = None
    ) -> PlanningConstraints:
        """What a plan must keep if the experiment starts at `now` (Unix time) on instances of `gpus_per_instance` GPUs.

        `known_gpus` is the largest number of GPUs that the profile knows, None without one.

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
        most = min(self.max_gpus_per_trial(gpus_per_instance, known_gpus), all_gpus)
        return PlanningConstraints(
            deadline_s=self.constraints.deadline_from(now),
            max_cost_usd=self.constraints.max_cost_usd,
            min_gpus_per_trial=asked.min,
            max_gpus_per_trial=min(most, self.batch.max or most),
            confidence=self.constraints.confidence,
        )

    def to_words(self) -> dict[str, Any]:
        """The experiment in the file's words, as JSON holds it; `Experiment(**words)` is equal to this one."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _require_ec2(resources: Resources) -> None:
    if resources.checkpoints is None:
        raise InputError(
            "resources.checkpoints: missing, and instances of EC2 do not see this machine's files; name a bucket, such "
            "as checkpoints: s3://my-bucket/rubberband"
        )
    if resources.billing != "per_instance":
        raise InputError(
            f"resources.billing: {resources.billing} can be planned with, but EC2 bills instances, busy or not, so "
            "that max_cost would not be kept; leave it out"
        )
    if resources.minimum_billed_s < EC2_MINIMUM_BILLED_S:
        raise InputError(
            f"resources.minimum_billed: {resources.minimum_billed_s:g} s can be planned with, but EC2 bills a minute "
            "at least, so that max_cost would not be kept; leave it out"
        )


def _check_gang(key: str, gpus: int, gpus_per_instance: int) -> None:
    if gpus <= gpus_per_instance or gpus % gpus_per_instance == 0:
        return
    below = gpus // gpus_per_instance * gpus_per_instance
    raise InputError(
        f"{key}: {gpus} GPUs are more than an instance has ({gpus_per_instance}) and no whole multiple; "
        f"use {below} or {below + gpus_per_instance}"
    )


def _loaded(written: InlineProfile | str) -> Profile:
    return load_profile(written) if isinstance(written, str) else written.to_profile()


def _check_money(constraints: Constraints, resources: Resources) -> None:
    price = resources.price_usd_per_hour
    if constraints.max_cost_usd == 0.0 and (price or (price is None and not resources.kind.is_this_machine)):
        prices = f"{price:g} USD per hour" if price else f"the prices of provider {resources.provider}"
        raise fault(f"0 USD pays for nothing at {prices}; raise it, or leave it out", at=("constraints", "max_cost"))


def _check_batch(batch: Batch, resources: Resources) -> None:
    least = resources.gpus_per_trial.min
    if batch.max is not None and batch.max < least:
        raise fault(
            f"{batch.max} samples are too few for resources.gpus_per_trial.min={least} GPUs; raise it to {least}",
            at=("batch", "max"),
        )


def _check_profiles(profiles: ProfilesByType, resources: Resources) -> None:
    asked = resources.instance_types or ((resources.instance_type,) if resources.instance_type else ())
    for name in asked:
        if name not in profiles.by_instance_type:
            raise fault(
                f"{shown(name)} of resources has no profile; {nearest(name, profiles.by_instance_type)}",
                at=("profile", "by_instance_type"),
            )
