"""EC2 as a provider: instances that join the driver's Ray head, with known prices and a certain end.

Each request is written below `directory` before it is made (see `intents`); EC2 shows what exists (see `fleet`). The
head makes sure that one driver at a time holds a directory. `open_cluster` puts it together.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import AwsSession, Machines
from rubberband.cloud.aws.client import account_of, open_session, type_facts
from rubberband.cloud.aws.errors import FAILURES, in_one_line
from rubberband.cloud.aws.fleet import LOOK_S, PATIENCE_S, Ec2Fleet
from rubberband.cloud.aws.guards import Schedules
from rubberband.cloud.aws.intents import Intent, Intents, Run, runs_in
from rubberband.cloud.aws.launching import AT_ONCE, LEAST_LEASE_S, Launcher, LaunchOrder
from rubberband.cloud.aws.network import OwnInstance, own_address, own_place
from rubberband.cloud.aws.prices import live_table
from rubberband.cloud.catalogue import reach_s, types_of
from rubberband.cloud.offers import fallback_offers
from rubberband.cloud.provider import ClusterProvider, ClusterRequest, Head, InstanceDescription
from rubberband.cloud.ray_head.ray_node import RayHead
from rubberband.errors import InputError, ProviderError
from rubberband.features import part
from rubberband.spec.resources import Resources
from rubberband.units import shown
from rubberband.values.offer import Offer
from rubberband.values.plan import Market

CLOSED = "given back with all others, as its driver closed"
_GATHER_S = 0.3
"""A launch waits this long for others that are bought with it."""


class AwsProvider(ClusterProvider):
    """EC2, for one run of one experiment."""

    def __init__(
        self,
        experiment: str,
        directory: Path,
        session: AwsSession,
        machines: Machines,
        head: RayHead,
        *,
        run: str,
        offers: Sequence[Offer],
        gpus: int,
        lease_s: float = 600.0,
        device: Literal["cpu", "cuda"] = "cuda",
        together: bool = False,
        account: str = "",
        look_s: float = LOOK_S,
        at_once: int = AT_ONCE,
        guards: Schedules | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`run` distinguishes runs of one name. `account`: its number. `guards` terminate instances that outlive driver
        and lease. Until `renew_lease` is called, leases reach `lease_s` from now. See `Launcher` for the other words.

        Raises ProviderError if the files of an earlier driver cannot be read.
        """
        self._head, self._guards = head, guards
        self.device: Literal["cpu", "cuda"] = device
        self.clock, self.look_s = clock, look_s
        this = Run(experiment=experiment, run=run, region=session.region, owner=machines.owner, account=account)
        self._intents = Intents(directory, this)
        self._fleet = Ec2Fleet(session, this, self._intents, clock=clock, sleep=sleep, look_s=look_s)
        self._launcher = Launcher(
            self._fleet, machines, offers, gpus=gpus, lease_s=lease_s, together=together, at_once=at_once
        )
        self._orders: dict[tuple[Market, str, float | None], LaunchOrder] = {}
        """Orders that more names may still join."""
        self._launching: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._ending: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._mutex, self._unwanted, self._closed = threading.Lock(), set[str](), False
        self._lease_s, self._until = lease_s, clock() + lease_s
        self._fleet.keep_until(self._until)  # not the head's: an earlier driver's budget may reach no further

    def last_words(self, instance: str) -> str:
        """Return the last step of its boot script that the console shows, and the last output."""
        return self._fleet.last_words(instance)

    def head(self) -> Head | None:
        """Return the living head, or None."""
        return self._head.living()

    def ensure_head(self) -> Head:
        """Return the living head; start one on this machine if there is none. Raises ProviderError."""
        return self._head.ensure()

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Buy an instance under the name `instance`; a repeated call buys once.

        Launches at the same moment are bought together. Zones are tried in order (on the spot market the cheapest
        first), then other types if there are any. A request without an answer is repeated until it has one, unless
        the instance is released meanwhile.

        Raises ProviderError if nothing is available, with the reason of every zone, or if the budget is too short.
        """
        for error in self.launch_all([instance], market, first_lease_s=first_lease_s).values():
            raise error

    def launch_all(
        self, instances: Sequence[str], market: Market = "on_demand", *, first_lease_s: float | None = None
    ) -> dict[str, ProviderError]:
        """Launch all of `instances` at the same moment. Return name -> why it was not bought."""
        if self._closed:
            raise ProviderError(f"the provider of experiment {self._fleet.run.experiment} is closed; open a new one")
        address = self._head.ensure().address
        with ExitStack() as stack:
            for name in sorted({*instances}):
                stack.enter_context(self._lock_of(self._launching, name))  # a name is bought once
            stack.callback(self._guard)
            self._fleet.launching.update(instances)
            stack.callback(self._fleet.launching.difference_update, instances)
            failed, wanted = dict[str, ProviderError](), list[str]()
            for name in instances:
                try:
                    if self._launcher.begin(name, market, address):
                        wanted.append(name)
                except ProviderError as error:
                    failed[name] = error
            if wanted:
                together = self._bought(wanted, market, address, first_lease_s)
                failed |= {name: together[name] for name in wanted if name in together}
            for name, why in failed.items():
                if self._intents.wanted(name):  # a caller that sees the failure does not repeat the request
                    self._fleet.terminate_soon(name, str(why))
        return failed

    def _bought(
        self, instances: Sequence[str], market: Market, address: str, first_lease_s: float | None
    ) -> Mapping[str, ProviderError]:
        """Buy instances, with those of other threads that ask for the same at the same moment: the first of them buys
        for all. Return the failures of all."""
        key = market, address, first_lease_s
        with self._mutex:
            leads = key not in self._orders
            order = self._orders.setdefault(key, self._order(market, address, self._unless_released, first_lease_s))
            order.names.extend(instances)
        if leads:
            try:
                self._fleet.sleep(_GATHER_S)
            finally:  # other threads wait for it
                with self._mutex:
                    del self._orders[key]
                self._launcher.buy(order)
        order.done.wait()
        return order.failed

    def describe(self) -> Sequence[InstanceDescription]:
        """Return every instance of this run, living or ended, in the order of launch, as of `look_s` ago.

        Raises ProviderError if EC2 does not answer.
        """
        if self._intents.living() or (self._intents.all() and not self._closed):
            try:
                self._fleet.look()
                self._end_what_has_no_head()
            finally:  # the leases are renewed on the instances, also while EC2 does not answer
                self._guard()
        return [intent.status() for intent in self._intents.all() if not intent.refused]

    def _guard(self) -> None:
        """Have AWS terminate instances that outlive their leases. Does not wait."""
        if self._guards is not None:
            bought = [(one.last.instance_id, one.instance) for one in self._intents.living() if one.last is not None]
            self._guards.tend({identity: self._fleet.latest_end(name) for identity, name in bought if identity})

    def _end_what_has_no_head(self) -> None:
        living = [intent for intent in self._intents.living() if intent.instance not in self._fleet.launching]
        if living:
            head = self._head.living()
            for intent in living:
                if head is None or intent.head_address != head.address:
                    self._fleet.terminate_soon(intent.instance, "the Ray head ended")

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """Terminate the instance and return its final status; idempotent. EC2 has accepted that, and billing has ended.

        Raises ProviderError if the instance was never launched, or if EC2 does not accept yet.
        """
        self._unwanted.add(instance)
        with self._lock_of(self._ending, instance):
            intent = self._intents.get(instance)
            if intent is None or intent.refused:
                self._unwanted.discard(instance)
                raise ProviderError(f"instance {instance} was never launched by this run; nothing to release")
            return self._end(intent).status()

    def _end(self, intent: Intent, reason: str = "") -> Intent:
        began_at = self._fleet.clock()
        unanswered = f"EC2 does not show yet whether instance {intent.instance} exists; try again"

        def impatient(_: str) -> str:
            return unanswered if self._fleet.clock() - began_at >= PATIENCE_S else ""

        self._launcher.settle(intent.instance, self._order(intent.market, "", impatient))
        self._fleet.terminate(intent.instance, reason)
        self._fleet.hours.look(self._fleet.clock())
        return self._intents.known(intent.instance)

    def renew_lease(self, until: float) -> None:
        """Let head and instances live until `until` (Unix time), and no longer.

        The driver's worker on an instance renews its lease. Here it bounds new launches, and may be further ahead than
        the lease of the head and of instances that have joined.
        """
        self._until = until
        leased_until = min(until, self._fleet.clock() + self._lease_s)
        self._fleet.keep_until(leased_until)
        self._head.renew_lease(leased_until)

    def close(self) -> None:
        """Terminate every instance of this run, those of unanswered requests included, and the head. Idempotent.

        Raises ProviderError in the end if an instance may still run.
        """
        with self._mutex:
            closed, self._closed = self._closed, True
        try:
            if not closed or self._intents.living():
                self._fleet.terminate_all(self._give_back)
                if self._guards is not None:
                    self._guards.close()
        finally:
            self._head.close()

    def _give_back(self, instance: str) -> None:
        with self._lock_of(self._ending, instance):
            intent = self._intents.get(instance)
            if intent is not None and intent.lives:
                self._end(intent, CLOSED)

    def _unless_released(self, instance: str) -> str:
        is_released = self._closed or instance in self._unwanted
        return f"instance {instance} was released while it was requested" if is_released else ""

    def _order(
        self, market: Market, address: str, given_up: Callable[[str], str], first_lease_s: float | None = None
    ) -> LaunchOrder:
        most_s = math.inf if first_lease_s is None else first_lease_s
        return LaunchOrder(
            market=market,
            head_address=address,
            reach_s=lambda: min(most_s, self._until - self._fleet.clock()),
            given_up=given_up,
        )

    def _lock_of(self, locks: Mapping[str, threading.RLock], instance: str) -> threading.RLock:
        with self._mutex:
            return locks[instance]


DEVICE_VARIABLE = "RUBBERBAND_DEVICE"
"""Environment variable of the driver: `cpu` or `cuda`, the trials' device on any type. For the fake EC2, whose
instances are machines without GPUs."""
_DEVICES: Mapping[str, Literal["cpu", "cuda"]] = {"cpu": "cpu", "cuda": "cuda"}


def open_cluster(
    request: ClusterRequest, *, session: AwsSession | None = None, environment: Mapping[str, str] = os.environ
) -> AwsProvider:
    """Open EC2 for one run of an experiment.

    If the offer's type is sold out, the experiment's other types are used (see `fallback_offers`), up to the request's
    price. Raises InputError for a problem in the account or on this machine, with the remedy; ProviderError if another
    driver holds the directory.
    """
    resources, offer, speeds = request.resources, request.offer, request.speeds
    check_lease(resources)
    session = session or open_session(resources.region)
    place, role, lease_s = own_place(), resources.aws.guard_role, resources.lease_length_s
    host = _host(resources, place)
    device = device_of(session, offer.instance_type, environment)
    machines = resolve(
        session,
        resources.aws,
        offer.instance_type,
        checkpoints=resources.checkpoints,
        place=place,
        device=device,
        hash_seed=request.hash_seed,
        fetch="" if resources.fetch is None else part("fetch").boot_order(resources),
    )
    limit_usd = max(offer.price_usd_per_hour, request.highest_price_usd_per_hour or 0.0)
    table = live_table(resources, request.home) if len(types_of(resources)) > 1 else None
    others = fallback_offers(resources, offer, speeds=speeds, table=table, environment=environment)
    head = RayHead(request.experiment, request.directory, host=host, lease_s=lease_s, not_before=request.not_before)
    return AwsProvider(
        request.experiment,
        request.directory,
        session,
        machines,
        head,
        run=request.run or _latest_run(request.directory, resources),
        offers=[offer, *_suitable(session, offer, others, speeds, limit_usd)],
        gpus=offer.gpus,
        lease_s=lease_s,
        device=device,
        guards=None if role is None else Schedules(session, role, clock=head.clock),
        clock=head.clock,
        together=request.largest_gang > offer.gpus,
        account=_account(session),
    )


def _latest_run(directory: Path, resources: Resources) -> str:
    """Return the run whose instances the directory has, or a new one: brokers of one pool are one run."""
    place = (resources.region, resources.aws.owner)
    runs = [known.run for known in runs_in(directory) if (known.region, known.owner) == place]
    return runs[0] if runs else secrets.token_hex(6)


def _account(session: AwsSession) -> str:
    """Return the account for `cleanup`, which else takes any for the right one; empty if AWS does not say it now."""
    try:
        return account_of(session)
    except InputError:
        return ""


def check_lease(resources: Resources) -> None:
    """Raise InputError for a lease that ends before its first renewal."""
    lease_s, least_s = resources.lease_length_s, reach_s(LEAST_LEASE_S)
    if lease_s < least_s:
        raise InputError(
            f"resources.lease: {lease_s:g} s is too short for EC2, where an instance must boot before the lease can be "
            f"renewed; give at least {least_s:.0f} s"
        )


def _host(resources: Resources, place: OwnInstance | None) -> str:
    """Return this machine's address as instances reach it."""
    if resources.aws.driver_address is not None:
        return own_address(resources.aws.driver_address)
    if place is None:
        raise InputError(
            "resources.aws.driver_address: this machine is not in EC2, and instances could not reach it; start a head "
            "there with `rubberband cloud up FILE` and run it there, or give this machine's address in the VPC"
        )
    return place.address


def _suitable(
    session: AwsSession, offer: Offer, others: Sequence[Offer], speeds: Mapping[str, float], limit_usd: float
) -> list[Offer]:
    """Return the offers of no more than `limit_usd` whose types boot the image of `offer`'s: its model of GPU does."""
    return [
        other
        for other in others
        if other.price_usd_per_hour <= limit_usd
        and (other.instance_type not in speeds or _boots_alike(session, other.instance_type, offer.instance_type))
    ]


def _boots_alike(session: AwsSession, other: str, name: str) -> bool:
    """Whether a type boots the image of another one, as far as EC2 says: it has the same processor architecture."""
    try:
        found, wanted = type_facts(session, other).architectures, type_facts(session, name).architectures
    except InputError:
        return False
    except FAILURES:
        return True
    return not set(found).isdisjoint(wanted)


def device_of(
    session: AwsSession, instance_type: str, environment: Mapping[str, str] = os.environ
) -> Literal["cpu", "cuda"]:
    """Return the trials' device on a type: its GPUs, or RUBBERBAND_DEVICE. Raises InputError for a bad value there."""
    asked = environment.get(DEVICE_VARIABLE, "")
    if asked in _DEVICES:
        return _DEVICES[asked]
    if asked:
        raise InputError(f"{DEVICE_VARIABLE}={shown(asked)}: a device is cpu or cuda; leave it unset")
    with in_one_line():
        return "cuda" if type_facts(session, instance_type).gpus else "cpu"
