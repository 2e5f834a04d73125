"""Buy one instance: zone after zone, type after type, each asked for with one token until the answer is definite.

Every request is written down before it is made. A request without an answer is made again with the same token, never
replaced by another: EC2 answers it with the instance that came of it, if one did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rubberband.cloud.aws import calls
from rubberband.cloud.aws.calls import Choice
from rubberband.cloud.aws.errors import FAILURES, Verdict, explain, verdict
from rubberband.cloud.aws.fleet import Fleet
from rubberband.cloud.aws.intents import Attempt, Intent
from rubberband.cloud.aws.machines import Machines, NodeStart
from rubberband.cloud.aws.pricing import spot_prices
from rubberband.errors import ProviderError
from rubberband.plan import Market

_LEASE_SHARE = 0.95
"""How much of what the budget reaches is armed at first: while the rest lasts, the same request may be repeated."""
_BOOT_S = 60.0
"""From `running`, which is billed, until the boot script arms the lease, and from its end until the machine is off."""


def least_reach_s(least_lease_s: float) -> float:
    """How far ahead the budget (or the lease) must reach for an instance to live `least_lease_s` after booting."""
    return math.ceil((least_lease_s + _BOOT_S) / _LEASE_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ware:
    """An instance type that will do, with its prices as planned; None: not for sale on the spot market."""

    instance_type: str
    on_demand_usd_per_hour: float
    spot_usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One launch, as the provider was asked for it."""

    instance: str
    market: Market
    head_address: str
    reach_s: Callable[[], float]
    """For how long from now an instance may be paid."""
    given_up: Callable[[], str]
    """Why it is no longer asked for, as soon as that is so; else empty."""


class Launcher:
    """Launches what `wares` say on `machines`, in this order."""

    def __init__(
        self,
        fleet: Fleet,
        machines: Machines,
        wares: Sequence[Ware],
        *,
        gpus: int,
        lifetime_s: float,
        least_lease_s: float,
    ) -> None:
        """`gpus` are the slots of an instance; one that could not live for `least_lease_s` is refused."""
        self._fleet = fleet
        self._machines = machines
        self._wares = tuple(wares)
        self._gpus = gpus
        self._lifetime_s = lifetime_s
        self._least_lease_s = least_lease_s

    def launch(self, order: Order) -> None:
        """Return once EC2 has accepted it. Raises ProviderError if it is refused for good, or was given up."""
        intent = self._fleet.intents.get(order.instance)
        if intent is None:
            intent = Intent(
                instance=order.instance,
                experiment=self._fleet.run.experiment,
                market=order.market,
                requested_at=self._fleet.clock(),
                head_address=order.head_address,
            )
            self._fleet.intents.write(intent)
        if intent.refused:
            raise ProviderError(intent.refused)
        if intent.lives and not self._is_bought(order):
            self._try_all(order)

    def settle(self, order: Order) -> None:
        """Have an unanswered request answered, by repeating it, so that it can be ended at once."""
        if (intent := self._fleet.intents.get(order.instance)) is not None and intent.lives:
            self._is_bought(order)

    def _is_bought(self, order: Order) -> bool:
        """Whether the last attempt, if there is one, bought it; it is asked again where that is not known."""
        intent = self._fleet.intents.get(order.instance)
        if intent is None or intent.last is None or intent.last.outcome == "refused":
            return False
        if intent.last.outcome == "accepted":
            return True
        # What cut it off may have been late: it is asked again as one that was.
        self._fleet.intents.change_last(order.instance, doubtful=True, asked_at=self._fleet.clock())
        return self._ask(order) is None

    def _try_all(self, order: Order) -> None:
        hopeless: set[str] = set()
        for choice in self._choices(order.market):
            if choice.instance_type in hopeless:
                continue
            self._check(order)
            self._write(order, choice)
            refusal = self._ask(order)
            if refusal is None:
                return
            if refusal == "quota":
                hopeless.add(choice.instance_type)
            elif refusal != "capacity":
                break
        raise ProviderError(self._refuse(order.instance, self._refusals(order)))

    def _refuse(self, instance: str, reason: str) -> str:
        self._fleet.intents.change(instance, lambda intent: replace(intent, refused=reason))
        return reason

    def _refusals(self, order: Order) -> str:
        """Why nothing was to be had, zone by zone."""
        intent = self._fleet.intents.get(order.instance)
        assert intent is not None
        zones: dict[tuple[str, str], list[str]] = {}
        for attempt in intent.attempts:
            zones.setdefault((attempt.reason, attempt.choice.instance_type), []).append(attempt.choice.zone)
        places: dict[str, list[str]] = {}
        for (reason, name), where in zones.items():
            places.setdefault(reason, []).append(f"{name} in {', '.join(where)}")
        market = " on the spot market" if order.market == "spot" else ""
        told = "; ".join(f"{' and '.join(where)}{market}: {reason}" for reason, where in places.items())
        return told or "there is no zone to try"

    def _choices(self, market: Market) -> Iterator[Choice]:
        for ware in self._wares:
            if market == "on_demand":
                yield from self._on_demand(ware)
            elif ware.spot_usd_per_hour is not None:
                yield from self._on_spot(ware, ware.spot_usd_per_hour)

    def _on_demand(self, ware: Ware) -> Iterable[Choice]:
        price = ware.on_demand_usd_per_hour
        return [_choice(ware, zone, "on_demand", price) for zone in self._machines.subnets]

    def _on_spot(self, ware: Ware, planned_usd_per_hour: float) -> Iterable[Choice]:
        """The cheapest zone first; where a price is not known, the planned one."""
        name = ware.instance_type
        try:
            now = spot_prices(self._fleet.session, [name], self._fleet.clock()).get(name, {})
        except FAILURES:
            now = {}
        found = [_choice(ware, z, "spot", now.get(z, planned_usd_per_hour)) for z in self._machines.subnets]
        return sorted(found, key=lambda choice: choice.price_usd_per_hour)

    def _write(self, order: Order, choice: Choice) -> None:
        """Write the next attempt down. Raises ProviderError if an instance would end before it is of use."""
        fleet, machines, run = self._fleet, self._machines, self._fleet.run
        intent = fleet.intents.get(order.instance)
        assert intent is not None
        lease_s = float(math.floor(_LEASE_SHARE * order.reach_s() - _BOOT_S))
        if lease_s < self._least_lease_s:
            least_s = least_reach_s(self._least_lease_s)
            reason = (
                f"the budget, or its lease, reaches {max(0.0, order.reach_s()):.0f} s from now, and an instance needs "
                f"{least_s:.0f} s to be of use; raise max_cost, or resources.lease"
            )
            raise ProviderError(self._refuse(order.instance, reason))
        token = calls.client_token(run.experiment, run.run, order.instance, len(intent.attempts) + 1, choice)
        node = NodeStart(
            instances=(order.instance,),
            head_address=intent.head_address,
            gpus=self._gpus,
            lease_s=lease_s,
            lifetime_s=max(self._lifetime_s, lease_s),
        )
        tags = calls.tags_of(run.experiment, run.run, order.instance, machines.owner)
        request = calls.launch_request(machines, choice, token=token, tags=tags, user_data=machines.user_data(node))
        attempt = Attempt(token=token, choice=choice, request=request, lease_s=lease_s, asked_at=fleet.clock())
        fleet.intents.add_attempt(order.instance, attempt)

    def _ask(self, order: Order) -> Verdict | None:
        """Ask with the last attempt's token until the answer is definite; None if it was bought."""
        pauses = self._fleet.pauses()
        while True:
            attempt = self._fleet.intents.last(order.instance)
            if attempt.outcome == "accepted":  # a look found it
                return None
            if attempt.lease_s + _BOOT_S > order.reach_s():  # it would outlive the budget if it were launched only now
                return None if self._fleet.settle(order.instance) is not None else "capacity"
            try:
                answer = self._fleet.ec2.run_instances(**attempt.request)
            except FAILURES as error:
                meaning = verdict(error)
                if meaning not in ("unknown", "throttled"):
                    return self._refused(order, error, meaning)
                doubtful = attempt.doubtful or meaning == "unknown"
            else:
                return self._bought(order, answer["Instances"][0])
            self._check(order)
            self._fleet.sleep(next(pauses))
            self._check(order)
            self._fleet.intents.change_last(order.instance, doubtful=doubtful, asked_at=self._fleet.clock())

    def _refused(self, order: Order, error: BaseException, meaning: Verdict) -> Verdict | None:
        """A definite answer, unless an earlier one of the same token was lost."""
        attempt = self._fleet.intents.last(order.instance)
        if meaning == "mismatch":
            if self._fleet.settle(order.instance) is not None:
                return None
        elif attempt.doubtful:
            found = self._fleet.find_now(attempt)
            if found is not None:
                self._fleet.accept(order.instance, found)
                return None
        reason = explain(error)
        self._fleet.intents.change_last(order.instance, outcome="refused", reason=reason)
        return meaning

    def _bought(self, order: Order, machine: Mapping[str, Any]) -> Verdict | None:
        """Accepted: is it what was asked for? If not it is ended at once."""
        self._fleet.accept(order.instance, machine)
        attempt = self._fleet.intents.last(order.instance)
        choice = attempt.choice
        shown: Mapping[str, Any] = machine
        if choice.market == "spot" and "InstanceLifecycle" not in machine:
            shown = self._fleet.find_now(attempt) or {**machine, "InstanceLifecycle": "spot"}
        wrong = calls.amiss(shown, choice)
        if wrong:
            self._fleet.end(order.instance, f"not what was asked for: {wrong}")
            raise ProviderError(
                f"instance {order.instance} was ended at once: {wrong}, in {choice.zone}; it is not EC2 as it should "
                "be: see AWS_ENDPOINT_URL, and the account's policies"
            )
        return None

    def _check(self, order: Order) -> None:
        if reason := order.given_up():
            raise ProviderError(reason)


def _choice(ware: Ware, zone: str, market: Market, price_usd_per_hour: float) -> Choice:
    return Choice(
        instance_type=ware.instance_type,
        zone=zone,
        market=market,
        price_usd_per_hour=price_usd_per_hour,
        on_demand_usd_per_hour=ware.on_demand_usd_per_hour,
    )
