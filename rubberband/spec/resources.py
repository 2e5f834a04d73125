"""The `resources` of an experiment file: where the trials train, and values that override the catalogue's.

Attribute names carry their units; the file's words are their aliases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from rubberband.errors import InputError
from rubberband.spec.fetching import Fetch
from rubberband.spec.fields import (
    BY_KIND,
    WHOLE,
    Amount,
    Auto,
    Bytes,
    Count,
    Delay,
    Duration,
    Gpus,
    Usd,
    Words,
    delay_of,
    fault,
    input_checked,
    word_error,
)
from rubberband.units import shown
from rubberband.values.environment import HASH_SEED, LEAST_SECRET, Environment
from rubberband.values.kinds import KINDS, OWN, ProviderKind, known_provider, part_of
from rubberband.values.offer import Billing, Unit
from rubberband.values.plan import Market

MOST_TRIALS_PER_GPU = 16
LOG_LIMIT_BYTES = 64_000_000
"""Default limit of a trial's log."""


class GpusPerTrial(Words):
    """The number of GPUs that a plan may give to one trial: from `min` to `max`, or one of `sizes`."""

    min: Annotated[Annotated[Gpus, Tag("number")] | Auto, BY_KIND] | None = None
    """By default the smallest number that the profile has; 1 while a profile is measured. auto: the fewest GPUs of each
    instance type on which a `TorchTrial` fits: its weights, gradients and optimizer states."""
    max: Gpus | None = None
    """By default the largest number that the profile has and `max_instances` instances allow; while a profile is
    measured, the GPUs of one instance. Never less than `min`."""
    sizes: (
        Annotated[tuple[Gpus, ...], Field(min_length=1, max_length=64), AfterValidator(lambda x: tuple(sorted({*x})))]
        | None
    ) = None
    """The only numbers, such as [1, 2, 4], instead of `min` and `max`. A profile measures each of them that fits."""

    @property
    def least(self) -> int:
        """The fewest GPUs of a trial, as far as the file has them."""
        return self.sizes[0] if self.sizes else 1 if self.min is None or self.min == "auto" else self.min

    @property
    def most(self) -> int | None:
        """The most GPUs of a trial, if the file has them."""
        return self.sizes[-1] if self.sizes else self.max

    def written(self) -> list[tuple[str, int]]:
        """Return the key and the value of each number that the file has."""
        if self.sizes:
            return [("sizes", gpus) for gpus in self.sizes]
        return [(key, gpus) for key, gpus in (("min", self.min), ("max", self.max)) if isinstance(gpus, int)]

    @model_serializer(mode="wrap")
    def _words(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = whole(self)
        return {"sizes": words["sizes"]} if self.sizes else words

    @model_validator(mode="after")
    def _ordered(self) -> GpusPerTrial:
        if self.sizes and self.model_fields_set & {"min", "max"}:
            raise fault("min or max is given as well; keep the list, or the range", at="sizes")
        if self.max is not None and self.max < self.least:
            raise fault(f"min={self.least} is more than max={self.max}; lower min or raise max")
        return self


class SpotMarket(Words):
    """The spot market; read if `market` is `spot`."""

    price_usd_per_hour: Usd | None = Field(None, alias="price_per_hour")
    """Price of one instance; by default the catalogue's indicative one."""
    interruptions_per_hour: Annotated[Amount, Field(le=3600)] = 0.05
    """Interruptions of one instance; by default one in 20 hours, a guess that a measurement should replace."""
    checkpoint_iterations: Count = 1
    """Iterations between checkpoints."""
    restart_s: Duration | None = Field(None, alias="restart")
    """From an interruption until the trial trains again; by default both delays and the profile's trial start-up."""


def _package_index(url: str) -> str:
    """Raise a fault unless this is the address of a package index, without secrets: instances do not keep them."""
    remedy = "write https://HOST/PATH, or file:///PATH of the image"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise fault(f"{shown(url)} is no URL ({error}); {remedy}") from None
    if "@" in parts.netloc:
        raise fault(
            f"the URL of {parts.hostname} has a user name or a password, and every process of an instance can read it; "
            "leave it out, and put it into the netrc file of an image of your own"
        )
    complete = (parts.scheme, bool(parts.hostname)) in (("https", True), ("file", False))
    if not complete or parts.query or parts.fragment or re.search(r"\s", url):
        raise fault(f"{shown(url.partition('?')[0])} is no package index; {remedy}")
    return url


def _idle(seconds: float) -> float:
    """Raise a fault for a head that would stop during its setup."""
    if 0.0 < seconds < 600.0:
        raise fault(f"{seconds:g} s are less than the 10 minutes that setting the head up may take; give 10m, or 0")
    return seconds


class Aws(Words):
    """The renting of instances from EC2; read if `provider` is `aws`. All defaults work."""

    image: Annotated[str, Field(min_length=1)] | None = None
    """An AMI (`ami-…`) or an SSM parameter that names one (`ssm:/aws/service/…`). By default the latest Deep Learning
    AMI for the type's architecture."""
    install: Annotated[str, Field(min_length=1)] | None = None
    """Python packages that an instance installs beside the driver's rubberband, such as `scikit-learn`. Packages
    get the driver's versions, unless a version is given here. The URL of a wheel (https:// or s3://) of
    rubberband-tune replaces the driver's. `none` for an image that has everything."""
    index_url: Annotated[str, AfterValidator(_package_index)] | None = None
    """Your own package index (https:// or file://), from which instances install rubberband-tune in the driver's
    version and everything else (uv, pip, setuptools and wheel too). By default they install the driver's own files, as
    a wheel from the bucket of `checkpoints`, and other packages from PyPI."""
    setup: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=100)] = ()
    """Shell commands that an instance runs as root before it joins."""
    subnets: Annotated[tuple[Annotated[str, Field(pattern="^subnet-")], ...], Field(max_length=32)] = ()
    """Subnets in the order of attempts, one per zone. By default those of the driver's VPC."""
    security_group: Annotated[str, Field(pattern="^sg-")] | None = None
    """By default a new one in the VPC, with ingress from itself only."""
    reservation: Annotated[str, Field(pattern="^cr-[0-9a-f]+$")] | None = None
    """A capacity reservation or a capacity block of this account (`cr-…`) in which instances are launched, on demand.
    RubberBand never buys one."""
    key_name: Annotated[str, Field(min_length=1)] | None = None
    """An SSH key pair; by default none."""
    worker_profile: Annotated[str, Field(min_length=1)] = "rubberband-worker"
    """The instance profile (IAM) of instances; its role needs cloud/aws/policies/worker.json."""
    head_profile: Annotated[str, Field(min_length=1)] = "rubberband-head"
    """The instance profile of the head that `rubberband cloud up` starts; its role needs cloud/aws/policies/driver.json
    and session.json (`rubberband aws setup`)."""
    head_instance_type: Annotated[str, Field(min_length=1)] = "m7i-flex.large"
    """The type of the head that `rubberband cloud up` starts."""
    head_idle_s: Annotated[Duration, AfterValidator(_idle)] = Field(3600.0, alias="head_idle")
    """The head stops itself after this time without an experiment or a signed-in user: at least 10 min, or 0 for never.
    A stopped head costs only its disk."""
    guard_role: Annotated[str, Field(min_length=1)] | None = "rubberband-guard"
    """The role with which AWS terminates an instance that outlives its lease because its guest never booted and its
    driver died (cloud/aws/policies/guard.json). Without the role, or with null, such instances stay."""
    owner: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,63}$")] = "rubberband"
    """The tag `rubberband:owner` of all rented resources; the policies allow terminating only those."""
    volume_gb: Annotated[int, Field(strict=True, ge=8, le=16_384), WHOLE] | None = None
    """Size of the root volume; by default the image's."""
    driver_address: Annotated[str, Field(min_length=1)] | None = None
    """IP address at which instances reach the driver's machine; by default its address in the VPC."""


_ADDRESS = re.compile(r"(auto|[^\s/:]+:\d{1,5}|\[[0-9A-Fa-f:]+\]:\d{1,5})")
_LABEL = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"


def cluster_address(address: str) -> str:
    """Raise InputError for another address than one that a driver on a node of the cluster connects to."""
    if address.startswith("ray://"):
        raise InputError(
            f"{shown(address)} is for Ray Client, whose driver is not on the cluster; run rubberband on the head with "
            "address: auto, or submit it there (`ray job submit -- rubberband run FILE`)"
        )
    if not _ADDRESS.fullmatch(address):
        raise InputError(
            f"{shown(address)} is no address of a Ray cluster; write auto, or HOST:PORT, such as 10.0.0.5:6379"
        )
    return address


_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_AT_START = ("PYTHON", "LD_")
_OWN = ("RUBBERBAND_", "RAY_")
_HASH_SEEDS = 2**32


def variable_name(name: str) -> str:
    """Raise a fault for a name that no variable has, or that takes no effect in a trial's process."""
    if not _VARIABLE.fullmatch(name):
        raise fault(f"{shown(name)} is no name of a variable; use letters, digits and _")
    if name.startswith(_OWN) or name == "CUDA_VISIBLE_DEVICES":
        raise fault(f"{name} is set by rubberband itself; leave it out")
    if name.startswith(_AT_START) and name != HASH_SEED:
        raise fault(
            f"{name} is read when a process starts, before rubberband can set it; set it for `rubberband` itself"
        )
    return name


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise fault(
            f"{shown(value)} is no text, and variables are texts; write it in quotes, and behind -s in two pairs"
        )
    if "\0" in value:
        raise fault("has a null character, which no variable can hold; remove it")
    if re.search(r"\$[A-Za-z_]", value):
        raise fault(
            "names another variable, and texts are taken as they are; write the text, or list a secret in secrets"
        )
    return value


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise fault("is no mapping; write {NAME: text}")
    return value


def _names(value: Any) -> Any:
    """Raise a fault for other things than names, without the values that people write there."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise fault("takes names only; write [HF_TOKEN], and run `export HF_TOKEN=…` before the command")
    if any(not _VARIABLE.fullmatch(name) for name in value):
        raise fault("takes names only, of letters, digits and _; their values come from the environment")
    return value


_Provider = Annotated[
    str,
    AfterValidator(input_checked(known_provider)),
    WithJsonSchema({"anyOf": [{"enum": list(OWN)}, {"type": "string"}]}),
]


def _unread(provider: str, kind: ProviderKind) -> dict[str, str]:
    """Return word -> why the provider reads none."""
    if kind.is_borrowed:
        words = ("market", "instance_type", "instance_types", "catalogue", "region", "aws")
        found = dict.fromkeys((*words, "side_usd_per_hour"), "a Ray cluster has none")
        return {**found, "lease_s": "Ray frees the GPUs of a driver that died within seconds"}
    found = dict.fromkeys(("address", "node_labels"), "it is read with provider: ray")
    if provider not in OWN:
        found["aws"] = "it is read with provider: aws"
    if kind.region is None:
        found["region"] = "there are no regions"
    if not kind.has_spot:
        found["market"] = "there is no spot market"
    return found


def _some_gpus(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):
        raise fault("has none; for instances without GPUs write slots: 2, the trials at a time on one")
    return value


class Resources(Words):
    """Resources on which the trials train, and values that override the catalogue's or measured ones."""

    provider: _Provider = "local"
    """`local`, `aws`, `ray`, `virtual`, or one that an installed package brings."""
    pool: Annotated[str, Field(min_length=1)] | None = None
    """A pool (`rubberband pool up`) whose instances this experiment shares with others. It sets provider, region, type,
    price and the most instances; `gpus_per_instance` below the pool's asks for parts of its instances."""
    address: Annotated[str, AfterValidator(input_checked(cluster_address))] = "auto"
    """Address of a Ray cluster that is there, with provider `ray`: HOST:PORT of its head, or `auto` for that of
    RAY_ADDRESS, or the one that this machine is a node of."""
    node_labels: Annotated[
        dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(pattern=_LABEL)]], Field(max_length=32)
    ] = Field(default_factory=dict)
    """Ray labels of the nodes that may be used, with provider `ray`; by default all nodes."""
    region: Annotated[str, Field(min_length=1)] = "us-east-1"
    """Region of EC2; by default that of `rubberband aws setup`."""
    instance_type: Annotated[str, Field(min_length=1)] | None = None
    """Type of all instances, such as g5.xlarge. On EC2 it sets GPUs and price."""
    instance_types: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=64)] | None = None
    """Several types, of which the planner chooses one; a single one equals `instance_type`."""
    catalogue: Annotated[str, Field(min_length=1)] | None = None
    """Path of a table of instance types that replaces the catalogue's own (rubberband.cloud.catalogue)."""
    market: Market = "on_demand"
    """With `spot`, each stage of a plan is on spot or, where the deadline is tight, on demand."""
    spot: SpotMarket = Field(default_factory=SpotMarket.defaults)
    max_instances: Annotated[int, Field(strict=True, ge=1, le=10_000), WHOLE] = 16
    """Most instances at any moment."""
    gpus_per_trial: GpusPerTrial = Field(default_factory=GpusPerTrial.defaults)
    trials_per_gpu: Annotated[int, Field(strict=True, ge=1, le=MOST_TRIALS_PER_GPU), WHOLE] = 1
    """Trials that train side by side on each GPU, up to 16, for models too small to fill one. Each has one GPU, and an
    equal part of its memory."""
    slots: Gpus | None = None
    """For instances without GPUs: the trials that train at a time on one. They share its CPUs, and use no GPU of this
    machine. On a Ray cluster an instance has the CPUs of the commonest node without GPUs."""
    gpus_per_instance: Annotated[Gpus | None, BeforeValidator(_some_gpus, json_schema_input_type=Gpus | None)] = None
    """GPUs of an instance that are used; by default the type's. `slots` sets it to the same."""
    price_usd_per_hour: Usd | None = Field(None, alias="price_per_hour")
    """Price of one instance, on demand."""
    side_usd_per_hour: Usd | None = Field(None, alias="side_price_per_hour")
    """Price of an instance's volume and address; by default EC2's, and 0 elsewhere. A Ray cluster has none."""
    billing: Billing = "per_instance"
    """per_instance: each held instance is paid; per_function: GPUs are paid while a trial trains on them."""
    minimum_billed_s: Duration = Field(60.0, alias="minimum_billed")
    """An instance is billed for at least this long; by default 0 on a Ray cluster."""
    provision_delay: Delay | None = None
    """From asking for an instance until it runs."""
    init_delay: Delay | None = None
    """From a running instance until trials can start on it."""
    dataset_gb: Amount = 0.0
    """Data that each instance downloads once."""
    data_price_usd_per_gb: Usd = Field(0.0, alias="data_price_per_gb")
    """Price of a gigabyte of that data."""
    head_price_usd_per_hour: Usd = Field(0.0, alias="head_price_per_hour")
    """Price of the machine that drives the run; on EC2 by default that of the head."""
    lease_s: Annotated[Duration, Field(ge=2)] | None = Field(None, alias="lease")
    """Time that an instance outlives a dead driver, at least 2 s; by default a minute, or 10 on EC2. There, one that
    still installs may take up to 15 (1.5 times `init_delay`, if that is longer)."""
    log_limit_bytes: Annotated[Bytes, Field(ge=64_000)] = Field(LOG_LIMIT_BYTES, alias="log_limit")
    """Limit of a trial's log, at least 64KB; of a longer one the beginning and the end are kept."""
    checkpoints: Annotated[str, Field(min_length=1)] | None = None
    """URL of the checkpoint store: a directory that every instance sees, `s3://bucket/prefix`, or a bucket of Google
    (`gs://`), Azure (`az://`, `abfs://`) or Hugging Face (`hf://`). By default one in the experiment's folder, and on
    EC2 one in the bucket of `rubberband aws setup`."""
    keep: Literal["latest", "best"] = "latest"
    """Checkpoints of a trial that are kept: `latest`, the latest two; `best`, also that of its best evaluated
    iteration, for `rubberband best --iteration best`."""
    env: Annotated[
        dict[Annotated[str, AfterValidator(variable_name)], Annotated[str, BeforeValidator(_text)]],
        Field(max_length=1000),
        BeforeValidator(_mapping),
    ] = Field(default_factory=dict)
    """Variables of trials' processes on every instance, set before the trial's code is imported. Those of a program may
    have `${checkpoint}`, other places and parameters in them, which are filled when it starts."""
    secrets: Annotated[
        tuple[Annotated[str, AfterValidator(variable_name)], ...], Field(max_length=100), BeforeValidator(_names)
    ] = ()
    """Names of variables whose values come from the environment of `rubberband run` and `rubberband resume`. Values are
    not written down, and masked in logs."""
    fetch: Fetch | None = None
    """Models and datasets that each instance downloads once."""
    aws: Aws = Field(default_factory=Aws.defaults)
    options: dict[str, Any] = Field(default_factory=dict)
    """Words of a provider that an installed package brings, which describes them."""

    def environment(self, given: Mapping[str, str]) -> Environment:
        """Return the variables of trials' processes, with the values of secrets as `given`.

        Raises InputError for a secret that is not set, or is too short to be masked.
        """
        for name in self.secrets:
            value = given.get(name, "")
            if not value:
                raise InputError(f"resources.secrets: {name} is not set; run `export {name}=…` before this command")
            if len(value) < LEAST_SECRET:
                raise InputError(
                    f"resources.secrets: {name} has {len(value)} characters, and fewer than {LEAST_SECRET} cannot be "
                    "masked in logs; put it into resources.env"
                )
        return Environment(variables=self.env, secrets={name: given[name] for name in self.secrets})

    @property
    def kind(self) -> ProviderKind:
        """The record of the provider."""
        return KINDS[self.provider]

    @property
    def rents(self) -> bool:
        """Whether instances are rented for this experiment: a pool's are rented for the pool."""
        return self.kind.is_rented and self.pool is None

    @property
    def is_free(self) -> bool:
        """Whether instances cost nothing where no price is given: this machine's, and those of its rehearsal."""
        is_typed = self.instance_type is not None or self.instance_types is not None
        return not self.kind.is_rented and (not self.kind.is_simulated or (self.slots is not None and not is_typed))

    @property
    def has_price(self) -> bool:
        """Whether its instances cost something, as far as is written."""
        return bool(self.price_usd_per_hour) or (self.price_usd_per_hour is None and not self.is_free)

    @property
    def unit(self) -> Unit:
        """Unit of its costs: GPU-hours on a Ray cluster without a price."""
        return "GPU-h" if self.kind.is_borrowed and not self.price_usd_per_hour else "USD"

    @property
    def lease_length_s(self) -> float:
        """`lease_s`, or its default for the provider."""
        return self.kind.lease_s if self.lease_s is None else self.lease_s

    @property
    def init_delay_s(self) -> float | None:
        """The mean of `init_delay`, in seconds."""
        return None if self.init_delay is None else delay_of(self.init_delay)[0]

    @model_validator(mode="before")
    @classmethod
    def _slots_are_places(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("slots") is None:
            return data
        if data.get("gpus_per_instance") not in (None, data["slots"]):
            raise fault("is for instances without GPUs, and gpus_per_instance is given as well; keep one", at="slots")
        return {**data, "gpus_per_instance": data["slots"]}

    @model_validator(mode="before")
    @classmethod
    def _one_of_one(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("instance_types") is None:
            return data
        types = data["instance_types"]
        if data.get("instance_type") is not None:
            raise fault("instance_type is given as well; keep one of the two", at="instance_types")
        if not isinstance(types, list | tuple) or len(types) != 1:
            return data
        return {**{key: value for key, value in data.items() if key != "instance_types"}, "instance_type": types[0]}

    @model_validator(mode="before")
    @classmethod
    def _in_a_region(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "region" in data or data.get("provider", "local") in OWN:
            return data
        kind = KINDS.get(str(data["provider"]))  # an unknown one is refused where its name is read
        return data if kind is None or kind.is_borrowed else {**data, "region": kind.region or data["provider"]}

    @model_validator(mode="after")
    def _read_by_the_provider(self) -> Resources:
        """Refuse words of other providers, and options that the provider does not know."""
        plain = _plain()
        for key, why in _unread(self.provider, self.kind).items():
            unwritten = getattr(plain, key) if key != "region" or self.kind.is_borrowed else self.provider
            if getattr(self, key) != unwritten:
                word = Resources.model_fields[key].alias or key
                raise fault(f"{why}, and provider is {self.provider}; leave it out", at=word)
        if self.fetch is not None and self.fetch.mirror and (self.kind.is_this_machine or self.kind.is_borrowed):
            why = "its nodes keep" if self.kind.is_borrowed else "this machine keeps"
            raise fault(
                f"a mirror is for instances that begin empty, and with provider: {self.provider} {why} a cache; leave "
                "it out",
                at=("fetch", "from"),
            )
        if self.kind.options is None and self.options:
            raise fault(f"provider {self.provider} has none; leave them out", at="options")
        if self.kind.options is not None:
            try:
                input_checked(lambda name: part_of(name, "options"))(self.provider).model_validate(self.options)
            except ValidationError as error:
                first = word_error(error)
                raise fault(first.reason, at=("options", *first.path)) from None
        return self

    @model_validator(mode="after")
    def _sharing_gpus(self) -> Resources:
        """Refuse gangs, and instances without GPUs, where trials share GPUs."""
        shared = f"trials_per_gpu is {self.trials_per_gpu}"
        if self.trials_per_gpu > 1 and self.slots is not None:
            raise fault(
                f"slots={self.slots} has as many trials on an instance without GPUs, and {shared}; leave it out and "
                f"write slots: {self.slots * self.trials_per_gpu}",
                at="trials_per_gpu",
            )
        for key, gpus in self.gpus_per_trial.written() if self.trials_per_gpu > 1 else ():
            if gpus > 1:
                raise fault(
                    f"{gpus} GPUs are a gang, and {shared}: a trial has one GPU then; set it to 1, or trials_per_gpu "
                    "to 1",
                    at=("gpus_per_trial", key),
                )
        return self

    @model_validator(mode="after")
    def _each_variable_once(self) -> Resources:
        for index, name in enumerate(self.secrets):
            if name in self.secrets[:index]:
                raise fault(f"{name} occurs twice; remove one", at="secrets")
            if name in self.env:
                raise fault(f"{name} is in env as well; keep one of the two", at="secrets")
        seed = self.env.get(HASH_SEED, "0")
        if seed != "random" and not (seed.isdecimal() and seed.isascii() and int(seed) < _HASH_SEEDS):
            raise fault(f"{HASH_SEED}={shown(seed)} starts no process; write a number below 2**32", at="env")
        return self

    @model_validator(mode="after")
    def _several_types(self) -> Resources:
        if self.aws.reservation is not None and self.market == "spot":
            raise fault("spot instances are not launched in a reservation; set market: on_demand", at="market")
        if self.instance_types is None:
            return self
        if self.aws.reservation is not None:
            raise fault("a reservation is of one type; keep that one", at="instance_types")
        if not self.instance_types:
            raise fault("is empty; write at least one entry", at="instance_types")
        for index, name in enumerate(self.instance_types):
            if name in self.instance_types[:index]:
                raise fault(f"{shown(name)} occurs twice; remove one", at="instance_types")
        for key, given in (
            (("gpus_per_instance",), None if self.slots else self.gpus_per_instance),
            (("price_per_hour",), self.price_usd_per_hour),
            (("spot", "price_per_hour"), self.spot.price_usd_per_hour),
        ):
            if given is not None:
                raise fault(
                    f"{given:g} cannot hold for each of the {len(self.instance_types)} instance_types; keep one type, "
                    "or take it from the table of resources.catalogue",
                    at=key,
                )
        return self


@cache
def _plain() -> Resources:
    """Return the defaults: making them costs as much as reading a file."""
    return Resources.model_construct()
