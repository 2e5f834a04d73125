"""Providers: one record each of their differences, so that no other code compares their names.

The experiment file takes defaults from it, and functions that it names open clusters, list types and clean up. Other
packages add records by entry points, which are looked at only for a name that is not one of ours (docs/providers.md).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from rubberband.errors import InputError
from rubberband.features import is_word_here
from rubberband.units import nearest, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OwnProvider = Literal["local", "aws", "ray", "virtual"]

ENTRY_POINTS = "rubberband.providers"
"""Group of the entry points that name records of other packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderKind:
    """A kind of provider. Seconds, as everywhere.

    Functions are written as `module:function`, and imported when they are needed.
    """

    open_cluster: str = ""
    """Takes a `rubberband.cloud.provider.ClusterRequest`, and returns the provider of its instances."""
    options: str | None = None
    """Class derived from `rubberband.spec.fields.Words`, or another model of pydantic: the words of
    `resources.options`. None: there are none."""
    runnable: str | None = None
    """Takes `Resources` and `is_lent` (whether a pool lends the instances), and raises InputError for words that can be
    planned with, but not run. None: there are none."""
    instance_types: str | None = None
    """Takes `Resources` and environment variables, and returns the table of types with their prices, which it keeps:
    name -> `rubberband.cloud.catalogue.InstanceType`. None: GPUs and price of an instance are the file's."""
    share: str | None = None
    """Takes `Resources`, and returns the `rubberband.cloud.provider.Share` of the cluster that is there. None: the file
    says how many instances there are, and of how many GPUs."""
    extras: str | None = None
    """Takes `Resources`, a type, the table and the seconds until an instance runs, and returns a
    `rubberband.cloud.provider.Extras`. Raises InputError for a type that cannot be used. None: there are none."""
    prices: str | None = None
    """Takes `Resources`, the home and when the experiment must be done (Unix time), and returns a
    `rubberband.cloud.provider.Today`; what the cloud does not say is a note. None: prices are those of the table."""
    preflight: str | None = None
    """Takes what `prices` takes (no time for a pool: None), a function for remarks, `on_head` (whether this machine
    drives the run) and `together` (whether trials may span instances); checks the account and returns a `Today`.
    Raises InputError for the first reason why a run would fail. None: nothing is checked."""
    reserved: str | None = None
    """Takes `Resources` of a pool, and when an experiment on it must be done, and returns notes on capacity that the
    user has reserved. Raises InputError if that ends before. None: nothing can be reserved."""
    restored: str | None = None
    """Takes the folder of a provider's records that came from a backup, and does what they do not know: launches since.
    None: nothing has to be done."""
    head: str | None = None
    """Module of `--on head`, as `rubberband.commands.on_head`: `run_on_head` starts a machine of the provider that
    drives a run, `forward` carries another command out there. None: this machine drives all runs."""
    clean_up: str | None = None
    """Takes the home and the name of an experiment (None: all), ends instances whose driver is dead, and returns a
    `rubberband.cloud.provider.CleanedUp`. None: their leases end them."""
    is_simulated: bool = False
    """Instances, trials and the clock are simulated: no process trains, there are no leases, no entry point is needed,
    and the clock of its events starts at 0."""
    is_this_machine: bool = False
    """All instances are processes of this machine, which they share; they cost nothing."""
    is_rented: bool = False
    """Instances are rented from a cloud, which bills them and sees no file of this machine."""
    is_borrowed: bool = False
    """Instances are nodes of a Ray cluster that was there before and stays: a release gives GPUs back, and Ray frees
    those of a driver that died. It sees this machine's files only where both share a file system."""
    modules: tuple[str, ...] = ()
    """Modules of rubberband's extras that a run needs, beside Ray."""
    replaces_types: bool = False
    """Whether it rents other types of the file where the planned one is sold out (`speeds` of a `ClusterRequest`)."""
    has_spot: bool = False
    """Whether instances may be on the spot market."""
    region: str | None = None
    """The region where none is named. None: the provider has no regions, and prices are those of a region of its own
    name."""
    default_type: str | None = None
    """The instance type where none is named; None: one must be. Where instances are priced, it needs price_per_hour."""
    provision_s: float = 0.0
    init_s: float = 0.0
    """Assumed times of provisioning and initialising, if neither the file nor the profile has them."""
    release_margin_s: float
    """Longest time to release instances, with retries; the budget reserves it. Leases end half of it before the budget:
    a machine on EC2 takes seconds to notice, ten to stop its workers, and more to be off."""
    lease_s: float = 60.0
    """Default time that an instance outlives a dead driver."""
    lease_interval_s: float = 2.0
    """Interval of renewals of its lease; a quarter of the lease, if that is shorter."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether instances are other machines, to which the trial's code is sent."""
        return self.is_rented or self.is_borrowed

    def is_charged(self, unit: str) -> bool:
        """Return whether instances are paid for, and not only metered; a Ray cluster's price is the user's own rate."""
        return self.is_rented or (self.is_borrowed and unit == "USD")


_CATALOGUE = "rubberband.cloud.catalogue:usual_table"

_OWN = {
    # On one machine four Ray nodes take about 3 s to start and their first workers about 8 s (mostly importing
    # torch, once for all of them). The type has one GPU.
    "local": ProviderKind(
        open_cluster="rubberband.cloud.local.provider:open_cluster",
        instance_types=_CATALOGUE,
        clean_up="rubberband.cloud.local.provider:clean_up",
        is_this_machine=True,
        has_spot=True,
        region="us-east-1",
        default_type="local",
        provision_s=3.0,
        init_s=8.0,
        release_margin_s=3.0,
    ),
    # The delays are a guess, which a measured profile replaces: booting (longer on bare metal and on p4, p5 and p6,
    # see `boot_timeouts`), and installing torch.
    "aws": ProviderKind(
        open_cluster="rubberband.cloud.aws.provider:open_cluster",
        instance_types=_CATALOGUE,
        runnable="rubberband.cloud.aws.extras:require_runnable",
        extras="rubberband.cloud.aws.extras:extras",
        prices="rubberband.cloud.aws.today:prices",
        preflight="rubberband.cloud.aws.today:checked",
        reserved="rubberband.cloud.aws.today:reserved",
        restored="rubberband.cloud.aws.intents:renew_requests",
        head="rubberband.commands.on_head",
        clean_up="rubberband.cloud.aws:clean_up_home",
        is_rented=True,
        modules=("boto3",),
        replaces_types=True,
        has_spot=True,
        region="us-east-1",
        provision_s=20.0,
        init_s=180.0,
        release_margin_s=60.0,
        lease_s=600.0,
        lease_interval_s=5.0,
    ),
    # The first worker of a node imports torch, and a group of free GPUs is placed at once.
    "ray": ProviderKind(
        open_cluster="rubberband.cloud.ray_cluster.provider:open_cluster",
        share="rubberband.cloud.ray_cluster.view:share_now",
        is_borrowed=True,
        default_type="ray",
        provision_s=1.0,
        init_s=10.0,
        release_margin_s=30.0,
        lease_s=10.0,
    ),
    "virtual": ProviderKind(
        instance_types=_CATALOGUE,
        is_simulated=True,
        has_spot=True,
        region="us-east-1",
        default_type="virtual",
        release_margin_s=0.0,
    ),
}
OWN: Mapping[str, ProviderKind] = {
    name: kind for name, kind in _OWN.items() if is_word_here(f"resources.provider: {name}")
}
"""Providers that come with rubberband. No entry point replaces one."""

_WITH_RAY = ("kubernetes", "k8s", "slurm", "gcp", "azure", "lambda", "runpod")
"""Places that other tools name, where a Ray cluster can be started."""

NOT_INSTALLED = ProviderKind(is_rented=True, release_margin_s=60.0)
"""A journal's provider whose package is not installed here."""


class _Providers(Mapping[str, ProviderKind]):
    """Own providers, then those of other packages that load."""

    def __getitem__(self, name: str) -> ProviderKind:
        kind = OWN.get(name) or _loaded(name)
        if not isinstance(kind, ProviderKind):
            raise KeyError(name)
        return kind

    def __iter__(self) -> Iterator[str]:
        yield from OWN
        yield from (name for name in _installed() if isinstance(_loaded(name), ProviderKind))

    def __len__(self) -> int:
        return sum(1 for _ in self)


KINDS: Mapping[str, ProviderKind] = _Providers()
"""Provider, as experiment files and journals name it -> its kind."""


def kind_in(words: Mapping[str, Any]) -> ProviderKind:
    """Return the kind of the provider that an experiment's words name; NOT_INSTALLED if its package is not there."""
    return KINDS.get(words.get("resources", {}).get("provider", "local"), NOT_INSTALLED)


def known_provider(name: str) -> str:
    """Return the name. Raises InputError unless this provider can be used, with those that can."""
    if name in KINDS:
        return name
    why = _loaded(name)
    if isinstance(why, str):
        raise InputError(why)
    if name.lower() in _WITH_RAY:
        raise InputError(f"{shown(name)} is no provider; start Ray there, and write provider: ray with its address")
    raise InputError(f"{shown(name)} is not installed here; {nearest(name, KINDS)}")


def part_of(name: str, part: str) -> Any:
    """Return what the record of a provider names, None for nothing. Raises InputError for what its package lacks."""
    where = getattr(KINDS[known_provider(name)], part)
    if where is None:
        return None
    try:
        return pkgutil.resolve_name(where)
    except Exception as error:
        if name in OWN:
            raise
        (point,) = _installed()[name]
        raise InputError(_fault(name, point, f"{part} is {shown(where)} ({type(error).__name__}: {error})")) from None


def provider_faults() -> list[str]:
    """Return a line for each entry point that is left out."""
    own = [
        f"provider {name} of {_package(point)} is left out: the name is rubberband's own"
        for name, points in _installed(own=True).items()
        for point in points
    ]
    return [*own, *(why for name in _installed() if isinstance(why := _loaded(name), str))]


def look_again() -> None:
    """Forget the packages that were found: one was installed since, or uninstalled."""
    _installed.cache_clear()
    _loaded.cache_clear()


@cache
def _installed(*, own: bool = False) -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points under each name that is not one of ours, or under each that is (`own`)."""
    from importlib.metadata import entry_points

    points_of: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if (point.name in OWN) == own:
            points_of.setdefault(point.name, []).append(point)
    return points_of


@cache
def _loaded(name: str) -> ProviderKind | str | None:
    """Return the record of another package, or why there is none in one line; None: no package names it."""
    points = _installed().get(name, ())
    if len(points) > 1:
        packages = " and ".join(sorted(map(_package, points)))
        return f"provider {name} is registered by {packages}; uninstall all but one"
    for point in points:
        try:
            record = point.load()
        except Exception as error:
            return _fault(name, point, f"{type(error).__name__}: {error}")
        if not isinstance(record, ProviderKind) or not record.open_cluster:
            return _fault(name, point, f"{point.value} is no ProviderKind with open_cluster")
        if record.is_simulated or record.is_this_machine + record.is_rented + record.is_borrowed != 1:
            return _fault(name, point, "one of is_this_machine, is_rented and is_borrowed must be True")
        return record
    return None


def _fault(name: str, point: EntryPoint, why: str) -> str:
    return f"provider {name} of {_package(point)} cannot be used: {' '.join(why.split())}; update or uninstall it"


def _package(point: EntryPoint) -> str:
    return "another package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
