"""An experiment in the words of its file: what to tune, the deadline, the budget, and the resources.

The words are the same in YAML, in Python (`Experiment(name=..., search={...})`) and over REST. Attribute names carry
their units (`constraints.deadline_s`); the file's words are their aliases (`deadline`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from rubberband import markup
from rubberband.errors import InputError, ProfileMissingError
from rubberband.features import part, require_features
from rubberband.installation import require_driver, require_ray
from rubberband.spec.fields import MODULE_ATTRIBUTE, Deadline, Duration, Name, Tally, Usd, Words, fault, word_error
from rubberband.spec.observers import Notify, Trackers
from rubberband.spec.profile_file import InlineProfile, load_profile
from rubberband.spec.program import Program, check_env, check_program
from rubberband.spec.resources import Resources
from rubberband.spec.samplers import trial_seed
from rubberband.spec.schedulers import PROBE
from rubberband.spec.search import Search
from rubberband.spec.space import to_words
from rubberband.spec.space_notes import constant_notes
from rubberband.spec.stopping import check_stop
from rubberband.spec.training import Batch, Training
from rubberband.units import counted, format_duration, instant_text, nearest, shown
from rubberband.values.environment import HASH_SEED, LONGEST_SPACE, SPACE, Environment
from rubberband.values.kinds import part_of
from rubberband.values.memory import TrialMemory
from rubberband.values.plan import PlanningConstraints, SizeKey, Stage
from rubberband.values.profile import Profile

if TYPE_CHECKING:
    from rubberband.types import ExperimentDict


class Constraints(Words):
    """The limits of time and money."""

    deadline: Deadline | None = None
    """A duration from the start, or an absolute time with its zone."""
    max_cost_usd: Usd | None = Field(None, alias="max_cost")
    """Upper limit of the whole bill, in US dollars."""
    confidence: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.95
    """Probability of keeping both limits that a plan must reach if the profile is noisy."""
    objective: Literal["min_cost", "min_time"] = "min_cost"
    """The cheapest plan within the deadline, or the fastest within the budget; both limits hold either way."""
    iteration_timeout_s: Annotated[Duration, Field(gt=0)] | None = Field(None, alias="iteration_timeout")
    """A trial without a report for this time counts as hung; by default it follows from the profile."""
    max_failures: Tally = 1
    """Retries of a trial whose process died or hung."""
    resize_in_stage: Annotated[bool, Field(strict=True)] = True
    """Whether GPUs that have no trial while others of a stage train are given back or join the gangs of those."""

    @property
    def deadline_s(self) -> float | None:
        """Seconds from the start to the deadline; None if there is none or it is absolute."""
        return None if isinstance(self.deadline, datetime) else self.deadline

    @property
    def deadline_at(self) -> float | None:
        """Unix time of the deadline; None if there is none or it is a duration."""
        return self.deadline.timestamp() if isinstance(self.deadline, datetime) else None

    def deadline_from(self, now: float) -> float | None:
        """Return seconds from `now` (Unix time, the start of the experiment) to the deadline; None without one.

        Raises InputError if an absolute deadline has passed.
        """
        if self.deadline_at is None:
            return self.deadline_s
        left_s = self.deadline_at - now
        if left_s <= 0:
            passed = f"{instant_text(self.deadline_at)} has passed (it is {instant_text(now)})"
            raise InputError(f"constraints.deadline: {passed}; give a later one")
        return left_s


WrittenProfile = Annotated[
    Annotated[InlineProfile, Tag("inline")] | Annotated[str, Tag("path")],
    Discriminator(lambda value: "path" if isinstance(value, str) else "inline"),
]
"""The profile itself, or the path of a file that `rubberband profile` wrote."""


class ProfilesByType(Words):
    """One profile per instance type, for types with different GPUs."""

    by_instance_type: Annotated[dict[str, WrittenProfile], Field(min_length=1)]


def _profile_kind(value: Any) -> str:
    if isinstance(value, ProfilesByType) or (isinstance(value, Mapping) and "by_instance_type" in value):
        return "by type"
    return "path" if isinstance(value, str) else "inline"


def _entrypoint(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, str) and MODULE_ATTRIBUTE.fullmatch(value)):
        return value
    raise fault(f"{shown(value)} is not an entry point; write module:attribute, such as examples.digits:DigitsTrial")


def entrypoint_words(value: Any) -> str | None:
    """Return an entry point in one text: `module:attribute`, or a program's command line; None if there is none."""
    if isinstance(value, Program):
        return str(value)
    return value if value is None or isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


def _version(value: Any) -> Any:
    if type(value) is not int or value != 1:
        raise fault(f"{shown(value)} as version of the experiment file is not known; this release reads version: 1")
    return value


class Experiment(Words):
    """Experiment: what to tune, by when, for how much, and on which resources.

    `Experiment(name=..., entrypoint=..., search={...}, constraints={...}, resources={...}, profile={...})` takes the
    words of the experiment file. Raises InputError (one line, with the key path) for a value that does not fit.

    Examples:
        >>> experiment = rubberband.Experiment(
        ...     name="digits",
        ...     search={
        ...         "space": {"lr": rubberband.loguniform(1e-4, 1e-1)},
        ...         "scheduler": {"type": "asha", "num_samples": 64, "max_t": 81},
        ...         "metric": "accuracy",
        ...         "mode": "max",
        ...     },
        ...     constraints={"deadline": "2h", "max_cost": 20},
        ... )
        >>> experiment.constraints.deadline
        7200.0
    """

    version: Annotated[Literal[1], BeforeValidator(_version)] = 1
    name: Name
    entrypoint: Annotated[
        Annotated[Program, Tag("program")]
        | Annotated[
            Any,
            PlainValidator(_entrypoint, json_schema_input_type=str | None),
            PlainSerializer(entrypoint_words),
            Tag("code"),
        ],
        Discriminator(lambda value: "program" if isinstance(value, Mapping | Program) else "code"),
    ] = None
    """`module:attribute` of a trial, a command, or (in Python) the class or function itself; needed to run, not to
    estimate."""
    search: Search
    constraints: Constraints = Field(default_factory=Constraints.defaults)
    resources: Resources = Field(default_factory=Resources.defaults)
    profile: (
        Annotated[
            Annotated[InlineProfile, Tag("inline")]
            | Annotated[str, Tag("path")]
            | Annotated[ProfilesByType, Tag("by type")],
            Discriminator(_profile_kind),
        ]
        | None
    ) = None
    """The profile itself, the path of a file that `rubberband profile` wrote, or one of these per type."""
    batch: Batch = Field(default_factory=Batch.defaults)
    """The choice of a trial's batch size: fixed, or adapted within limits."""
    training: Training = Field(default_factory=Training.defaults)
    """Whether a trial's workers take each optimizer step together, or train asynchronously."""
    track: Trackers | None = None
    """Trackers that record the trials while it runs: csv, tensorboard, mlflow, wandb."""
    notify: Notify | None = None
    """Variables with the addresses that get a notice when it ends, will be late, or has trouble."""
    _notes: tuple[str, ...] = PrivateAttr(())
    _is_function: bool = PrivateAttr(default=False)
    _memory: TrialMemory | str = PrivateAttr("its parameters were not counted")
    _fetch_s: tuple[float, float] = PrivateAttr((0.0, 0.0))

    @model_validator(mode="before")
    @classmethod
    def _has_its_features(cls, words: Any) -> Any:
        if isinstance(words, Mapping):
            require_features(words)
        return words

    def __init__(self, **words: Unpack[ExperimentDict]) -> None:
        try:
            super().__init__(**dict[str, Any](words))
        except ValidationError as error:
            raise word_error(error, words, lambda rest: type(self)(**rest)) from None

    @model_validator(mode="after")
    def _agrees(self) -> Experiment:
        if isinstance(self.entrypoint, Program):
            check_program(self.entrypoint, self.search, self.resources.env)
        elif self.entrypoint is not None:  # a journal keeps it apart
            check_env(self.resources.env)
        _check_limits(self.search, self.constraints)
        _check_money(self.constraints, self.resources)
        check_stop(
            self.search.stop,
            self.constraints.deadline_s if self.constraints.deadline_at is None else inf,
            self.constraints.max_cost_usd,
            has_price=self.resources.has_price or self.resources.pool is not None,
        )
        if isinstance(self.profile, ProfilesByType):
            _check_profiles(self.profile, self.resources)
        _check_batch(self.batch, self.resources)
        _check_training(self.training, self.batch)
        _check_sharing(self.resources, self.training, self.batch)
        return self

    @classmethod
    def kept(cls, words: Mapping[str, Any]) -> Experiment:
        """Return an experiment that was accepted before, maybe with a name or a trial that no file may have.

        Raises InputError for words that this version does not read.
        """
        found = cls(**{**words, "name": "any", "entrypoint": None})
        # A trial that is defined in a function has a name which no file can have.
        trial = words.get("entrypoint")
        trial = Program.model_validate(trial) if isinstance(trial, Mapping) else trial
        return found.model_copy(update={"name": words.get("name"), "entrypoint": trial})

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on words that its pool has changed, and on constants of the space that look like domains."""
        is_typed = not isinstance(self.entrypoint, Program)
        return (*self._notes, *constant_notes(self.search.space, is_typed=is_typed))

    def with_notes(self, *notes: str) -> Experiment:
        """Return the experiment with remarks, which every estimate of it shows."""
        noted = self.model_copy()
        noted._notes = (*self._notes, *notes)
        return noted

    def environment(self, given: Mapping[str, str]) -> Environment:
        """Return the variables of trials' processes; see `Resources.environment`.

        The seed of Python's hashes follows from that of the search, so that sets have one order in all starts. On a
        pool it is 0, as its processes begin before the experiment.
        """
        resources = self.resources
        seed = "0" if resources.pool is not None else str(self.search.sampler.seed % 2**32)
        if resources.pool is not None and resources.env.get(HASH_SEED, seed) != seed:
            raise InputError(
                f"resources.env: {HASH_SEED} is 0 on a pool, whose processes start before the experiment; leave it out"
            )
        found = resources.environment(given)
        space = json.dumps({name: to_words(value) for name, value in self.search.space.items()})
        known = {SPACE: space} if len(space) <= LONGEST_SPACE else {}
        if resources.fetch is not None and resources.kind.is_this_machine:
            known |= part("fetch").OFFLINE
        return replace(found, variables={HASH_SEED: seed, **known, **found.variables})

    @property
    def is_function(self) -> bool:
        """Whether its trial is known to be a function, which trains in one process."""
        return self._is_function

    def of_function(self) -> Experiment:
        """Return the experiment with a function as its trial: `gpus_per_trial.max` is 1."""
        marked = self.model_copy()
        marked._is_function = True
        return marked

    @property
    def memory(self) -> TrialMemory | str:
        """The memory of its trial's parameters, or why it is not known; only sought if `gpus_per_trial.min` is auto."""
        return self._memory

    def with_memory(self, memory: TrialMemory | str) -> Experiment:
        """Return the experiment with the memory of its trial's parameters, or why it is not known."""
        known = self.model_copy()
        known._memory = memory
        return known

    @property
    def fetch_s(self) -> tuple[float, float]:
        """Seconds in which an instance fetches models and data, and those of them that pass while it starts."""
        return self._fetch_s

    def with_fetch(self, seconds: float, beside_s: float) -> Experiment:
        """Return the experiment with the time of its fetch; see `fetch_s`."""
        known = self.model_copy()
        known._fetch_s = seconds, beside_s
        return known

    def with_least_gang(self, gpus: int) -> Experiment:
        """Return the experiment with a number as `gpus_per_trial.min`, which is not validated again."""
        asked = self.resources.gpus_per_trial.model_copy(update={"min": gpus})
        return self.model_copy(update={"resources": self.resources.model_copy(update={"gpus_per_trial": asked})})

    @property
    def gains_from_mixtures(self) -> bool:
        """Whether a gang of unequal GPUs is faster than one of its slowest: the others do not wait for that."""
        return self.batch.balance.policy != "equal" and self.training.max_staleness is None

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Return the job's chains of stages, which may run side by side: one, or several for hyperband.

        Trials are numbered across the brackets, in the order of `configurations`.
        """
        return self.search.brackets()

    def sized(self, key: SizeKey, number: int) -> Experiment:
        """Return the experiment with a number as the size of its search."""
        return self.model_copy(update={"search": self.search.sized(key, number)})

    def probed(self) -> Experiment:
        """Return the experiment with some number in place of an auto size, for what looks at single trials."""
        return self if self.search.auto is None else self.sized(self.search.auto, PROBE)

    def require_runnable(self, *, is_lent: bool = False) -> None:
        """Raise InputError for an experiment that can only be planned.

        That is a cloud without a checkpoint store, billing that is not the provider's, and what lacks Ray, its sampler
        or the driver of its checkpoint store.
        A pool, which bills its instances by the second, need not be named if `is_lent`.
        """
        self.search.require_sampler()
        if not self.resources.kind.is_simulated:
            require_ray(f"resources.provider: {self.resources.provider}", *self.resources.kind.modules)
            url = self.resources.checkpoints
            if url is not None and require_driver(url) == "memory":
                raise InputError(
                    f"resources.checkpoints: {url} is in the memory of one process, which no worker sees; leave it "
                    "out, or give a directory or a bucket"
                )
        if (runnable := part_of(self.resources.provider, "runnable")) is not None:
            runnable(self.resources, is_lent=is_lent or self.resources.pool is not None)
        if self.resources.kind.is_rented and self.resources.checkpoints is None:
            raise InputError(
                f"resources.checkpoints: missing, and instances of {self.resources.provider} do not see this machine's "
                "files; name a bucket, such as checkpoints: s3://my-bucket/rubberband, or a folder that they see"
            )

    def configurations(self) -> list[dict[str, Any]]:
        """Return the configuration of every trial, in order; always the same for the same experiment."""
        return self.search.configurations()

    def trial_seeds(self) -> list[int]:
        """Return a seed for every trial, from the sampler's: initial weights and data order follow from it."""
        return [trial_seed(self.search.sampler.seed, trial) for trial in range(self.search.num_trials)]

    def loaded_profile(self, instance_type: str | None = None) -> Profile | None:
        """Return the profile for an instance type (by default that of `resources`), read from its file if it has one.

        A profile that is not written by type holds for every type. None if the experiment has none.

        Raises ProfileMissingError if the file or the type's profile is missing, InputError if the file is no profile or
        the type is ambiguous.
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
        """Return the one profile, or instance type -> profile if it is written by type; None without one.

        Raises as `loaded_profile` does.
        """
        if isinstance(self.profile, ProfilesByType):
            return {name: _loaded(written) for name, written in self.profile.by_instance_type.items()}
        return self.loaded_profile()

    def max_gpus_per_trial(self, gpus_per_instance: int, known_gpus: int | None = None) -> int:
        """Return the most GPUs of a trial on instances of `gpus_per_instance`: as asked, or the largest that packs.

        A program has one unless more are asked for: each worker of a gang would train on its own if it forms no group.

        `known_gpus` is the largest number that the profile knows; without a profile, trials stay within an instance.

        Raises InputError for more than 1 where the trial is a function.
        """
        asked = self.resources.gpus_per_trial
        if self._is_function:
            for key, gpus in asked.written():
                if gpus > 1:
                    raise InputError(
                        f"{entrypoint_words(self.entrypoint)} is a function, which trains in one process, but "
                        f"resources.gpus_per_trial.{key} is {gpus}; set it to 1, or write @rubberband.distributed "
                        "above it, and train as under torchrun"
                    )
            return 1
        if asked.most is not None:
            return asked.most
        if self.resources.trials_per_gpu > 1:
            return 1
        if isinstance(self.entrypoint, Program):  # it may not know of gangs
            return asked.least
        most = gpus_per_instance if known_gpus is None else known_gpus
        if most > gpus_per_instance:
            most = min(most, self.resources.max_instances * gpus_per_instance) // gpus_per_instance * gpus_per_instance
        return max(most, asked.least)

    def planning_constraints(
        self, now: float, gpus_per_instance: int, known_gpus: int | None = None
    ) -> PlanningConstraints:
        """Return the limits of a plan that starts at `now` (Unix time) on instances of `gpus_per_instance` GPUs.

        `known_gpus` is the largest number of GPUs that the profile knows, None without one.

        Raises InputError for a deadline that has passed, and for GPUs per trial that no gang can have.
        """
        asked = self.resources.gpus_per_trial
        for key, gpus in asked.written():
            _check_gang(f"resources.gpus_per_trial.{key}", gpus, gpus_per_instance)
        all_gpus = self.resources.max_instances * gpus_per_instance
        if asked.least > all_gpus:
            larger = "raise max_instances" if self.resources.pool is None else "use a larger pool"
            key = asked.written()[0][0]
            raise InputError(
                f"resources.gpus_per_trial.{key}: {asked.least} GPUs are more than {self.resources.max_instances} "
                f"instances have ({all_gpus}); lower it to {all_gpus} or {larger}"
            )
        most = min(self.max_gpus_per_trial(gpus_per_instance, known_gpus), all_gpus)
        return PlanningConstraints(
            deadline_s=self.constraints.deadline_from(now),
            max_cost_usd=self.constraints.max_cost_usd,
            min_gpus_per_trial=asked.least,
            max_gpus_per_trial=min(most, self.batch.max or most),
            gpus_per_trial_sizes=asked.sizes or (),
            confidence=self.constraints.confidence,
        )

    def _repr_html_(self) -> str:
        """Return the search space, and the words that are not defaults, as tables for notebooks."""
        written = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        search = written.pop("search") | {"space": {}}
        rest = {"search": search} | {key: value for key, value in written.items() if key != "name"}
        if self.track:
            rest["track"] = ", ".join(tracker.type for tracker in self.track)
        if self.notify:
            rest["notify"] = ", ".join(address.url_from for address in self.notify)
        if self.constraints.deadline_s is not None:
            rest["constraints"]["deadline"] = format_duration(self.constraints.deadline_s)
        space = [(name, _domain(words)) for name, words in self.to_words()["search"]["space"].items()]
        rows = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in _flat(rest)]
        count = sum(bracket[0].trials for bracket in self.brackets())
        return markup.card(
            f"{self.name}: {counted(count, 'trial')}",
            markup.table(("parameter", "domain"), space, words=(0, 1)),
            markup.table(("key", "value"), rows, words=(0, 1)),
        )

    def to_words(self) -> dict[str, Any]:
        """Return the experiment in the file's words, as JSON values; `Experiment(**words)` is equal to this one."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def given_words(self) -> dict[str, Any]:
        """Return the words of `to_words` without defaults: an estimate distinguishes given settings from defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


def _domain(words: Any) -> str:
    """Return a parameter in one line: `loguniform(0.0001, 0.1)`."""
    if not isinstance(words, Mapping):
        return json.dumps(words, ensure_ascii=False)
    arguments = [json.dumps(value, ensure_ascii=False) for key, value in words.items() if key not in ("type", "base")]
    return f"{words['type']}({', '.join(arguments)})"


def _flat(words: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values by their whole keys; of a profile, only that it is there."""
    for name, value in words.items():
        if name == "profile" and isinstance(value, Mapping):
            yield name, "inline"
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _check_gang(key: str, gpus: int, gpus_per_instance: int) -> None:
    if gpus <= gpus_per_instance or gpus % gpus_per_instance == 0:
        return
    below = gpus // gpus_per_instance * gpus_per_instance
    raise InputError(
        f"{key}: {counted(gpus, 'GPU')} are more than an instance has ({gpus_per_instance}) and no whole multiple; "
        f"use {below} or {below + gpus_per_instance}"
    )


def _loaded(written: InlineProfile | str) -> Profile:
    return load_profile(written) if isinstance(written, str) else written.to_profile()


def _check_limits(search: Search, constraints: Constraints) -> None:
    if search.auto is not None and constraints.deadline is None and constraints.max_cost_usd is None:
        raise fault(
            "auto is sized to the limits, and there are none; set constraints.deadline or constraints.max_cost, or "
            "write a number",
            at=("search", "scheduler", search.auto),
        )


def _check_money(constraints: Constraints, resources: Resources) -> None:
    price = resources.price_usd_per_hour
    if constraints.max_cost_usd == 0.0 and resources.has_price:
        prices = f"{price:g} USD per hour" if price else f"the prices of provider {resources.provider}"
        raise fault(f"0 USD pays for nothing at {prices}; raise it, or leave it out", at=("constraints", "max_cost"))


def _check_batch(batch: Batch, resources: Resources) -> None:
    least = resources.gpus_per_trial.least
    if batch.max is not None and batch.max < least:
        raise fault(
            f"{batch.max} samples are too few for {least} GPUs, the fewest of resources.gpus_per_trial; raise it to "
            f"{least}",
            at=("batch", "max"),
        )


def _check_training(training: Training, batch: Batch) -> None:
    if training.mode == "async" and "balance" in batch.model_fields_set:
        raise fault(
            "divides a batch among workers, and with training.mode: async each has its own; leave it out, or set "
            "training.mode to sync",
            at=("batch", "balance"),
        )
    if training.mode == "async" and batch.policy != "fixed":
        raise fault(
            f"{batch.policy} adapts the batch that all workers share, and with training.mode: async each has its own; "
            "set batch.policy to fixed, or training.mode to sync",
            at=("batch", "policy"),
        )


def _check_sharing(resources: Resources, training: Training, batch: Batch) -> None:
    if resources.trials_per_gpu == 1:
        return
    shared = f"resources.trials_per_gpu is {resources.trials_per_gpu}"
    if training.mode == "async":
        raise fault(
            f"async trains a trial on several GPUs, and {shared}: a trial has one GPU then; set training.mode to sync, "
            "or trials_per_gpu to 1",
            at=("training", "mode"),
        )
    if batch.policy == "goodput":
        raise fault(
            f"goodput fits batches to a GPU's speed, which trials beside change, and {shared}; set batch.policy to "
            "fixed, or trials_per_gpu to 1",
            at=("batch", "policy"),
        )


def _check_profiles(profiles: ProfilesByType, resources: Resources) -> None:
    asked = resources.instance_types or ((resources.instance_type,) if resources.instance_type else ())
    for name in asked:
        if name not in profiles.by_instance_type:
            raise fault(
                f"{shown(name)} of resources has no profile; {nearest(name, profiles.by_instance_type)}",
                at=("profile", "by_instance_type"),
            )
