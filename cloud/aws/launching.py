"""Launches: zone after zone, type after type, with one request for all instances wanted at the same moment.

On the spot market each instance has a request of its own, several of them side by side. A request has one token and
asks for as many instances as a zone has; the next zone is asked for the rest. Every request is written down before it
is made. One without an answer is repeated with the same token, never replaced by another: EC2 answers it with the
instances that it launched, if any.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rubberband.cloud import catalogue
from rubberband.cloud.aws import calls
from rubberband.cloud.aws.calls import Machines, NodeStart, Purchase
from rubberband.cloud.aws.client import type_facts
from rubberband.cloud.aws.errors import FAILURES, MORE_ROOM, Verdict, explain, verdict
from rubberband.cloud.aws.fleet import Ec2Fleet
from rubberband.cloud.aws.intents import Intent, LaunchAttempt
from rubberband.cloud.aws.network import Fabric, ensure_cluster, fabric_of
from rubberband.cloud.aws.quotes import spot_prices
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.values.offer import Offer
from rubberband.values.plan import Market

_log = logging.getLogger(__name__)


class Choices:
    """Types, zones and placement groups, in the order in which a launch tries them."""

    def __init__(self, fleet: Ec2Fleet, machines: Machines, offers: Sequence[Offer], *, together: bool = False) -> None:
        """The first of `offers` is preferred. `together`: all instances must be in one zone, as trials may span
        them."""
        self.together = together
        self._fleet = fleet
        self._machines = machines
        self._offers = tuple(offers)
        self._clusters: dict[tuple[str, str], str | None] = {}
        """(type, zone) -> its placement group; None: there is none."""
        self._fabric: Fabric | None = None

    def turns(self, market: Market, count: int) -> Iterator[tuple[Purchase, int]]:
        """Yield the choices in the order to try them, each with its least number of instances.

        If all must be in one zone: first zones that have all of them, then half of them, then any; after the first
        launch only its zone. A zone's cluster may be full although the zone is not.
        """
        if not self.together:
            for choice in self._of(market):
                yield choice, 1
            return
        choices = self._joined(list(self._of(market)))
        for share in dict.fromkeys((count, -(-count // 2), 1)):
            for choice in choices:
                for group in dict.fromkeys((self._cluster(choice), None)):
                    home = self.home()
                    if home in (None, choice.zone):
                        yield replace(choice, placement_group=group), share if home is None else 1

    def home(self) -> str | None:
        """Return the zone in which the run's instances are, or may be."""
        zones = Counter(choice.zone for choice in self._living())
        return max(zones, key=lambda zone: zones[zone], default=None)

    def _living(self) -> list[Purchase]:
        living = [intent.last for intent in self._fleet.intents.living()]
        return [last.choice for last in living if last and last.outcome != "refused"]

    def _joined(self, choices: Sequence[Purchase]) -> list[Purchase]:
        """Return the choices with their Elastic Fabric Adapters, unless instances without any run. Raises ProviderError
        if EC2 does not say what can be had: instances of two networks do not reach each other."""
        if self._fabric is None:
            types = [offer.instance_type for offer in self._offers]
            try:
                self._fabric = fabric_of(self._fleet.session, self._machines, types)
            except FAILURES as error:
                raise ProviderError(f"EC2 does not describe the network of {types[0]}: {explain(error)}") from error
            if self._fabric.note:
                _log.warning("%s", self._fabric.note)
        if not all(choice.efa_cards for choice in self._living()):
            return list(choices)
        cards = self._fabric.cards
        return [replace(one, efa_cards=cards.get((one.instance_type, one.zone), ())) for one in choices]

    def _cluster(self, choice: Purchase) -> str | None:
        """Return the placement group of a choice, if its type supports one."""
        place = choice.instance_type, choice.zone
        if place not in self._clusters:
            session, found = self._fleet.session, None
            try:
                if self._machines.reservation is None and type_facts(session, choice.instance_type).clusters:
                    found = ensure_cluster(session, self._machines.owner, choice.zone, choice.instance_type)
            except FAILURES as error:
                _log.warning("instances of trials that span them are not placed close together: %s", explain(error))
            self._clusters[place] = found
        return self._clusters[place]

    def _of(self, market: Market) -> Iterator[Purchase]:
        """Yield the choices on a market; those that refused a moment ago come last."""
        last: list[Purchase] = []
        for offer in self._offers:
            for choice in self._of_type(offer, market):
                if self._fleet.refused_lately(choice):
                    last.append(choice)
                else:
                    yield choice
        yield from last

    def _of_type(self, offer: Offer, market: Market) -> list[Purchase]:
        """Return a choice for each zone. On spot the cheapest comes first, and the planned price stands for a missing
        one."""
        name, planned_usd, prices_usd = offer.instance_type, offer.price_usd_per_hour, dict[str, float]()
        if market == "spot":
            if offer.spot is None:
                return []
            planned_usd = offer.spot.price_usd_per_hour
            with suppress(*FAILURES):
                prices_usd = spot_prices(self._fleet.session, [name], self._fleet.clock()).get(name, {})
        found = [
            Purchase(
                instance_type=name,
                zone=zone,
                market=market,
                price_usd_per_hour=prices_usd.get(zone, planned_usd),
                on_demand_usd_per_hour=offer.price_usd_per_hour,
            )
            for zone in self._machines.subnets
        ]
        return sorted(found, key=lambda choice: choice.price_usd_per_hour)


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchOrder:
    """Instances that are wanted at the same moment, on one market and for one head."""

    market: Market
    head_address: str
    reach_s: Callable[[], float]
    """Returns how long from now the budget covers an instance."""
    given_up: Callable[[str], str]
    """Returns why the instance of a name is no longer wanted; empty while it is."""
    names: list[str] = field(default_factory=list)
    failed: dict[str, ProviderError] = field(default_factory=dict)
    """Name -> why the instance is not bought."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set once all instances are bought or have failed."""

    def refuse(self, name: str, reason: str, *, sold_out: bool = False) -> None:
        """Note why the instance of a name is not bought; the first reason counts."""
        self.failed.setdefault(name, NoCapacityError(reason) if sold_out else ProviderError(reason))


_FURTHEST: Sequence[Verdict] = ("refused", "mismatch", "quota", "capacity", "absent", "unknown")
"""Refusals of equal requests, the one first that also holds for other zones and types."""


class _GivenUpError(ProviderError):
    """No instance of a request is wanted any more."""


LIFETIME_S = 7 * 24 * 3600.0
"""Hard stop: an instance ends itself this long after booting even if its lease is renewed."""
LEAST_LEASE_S = 60.0
"""An instance with a shorter first lease is useless and refused; it would be billed for this long anyway."""
AT_ONCE = 8
"""EC2 takes five requests at once, and then two a second ("Request throttling for the Amazon EC2 API")."""


class Launcher:
    """Launches instances in the order of its choices. Thread-safe."""

    def __init__(
        self,
        fleet: Ec2Fleet,
        machines: Machines,
        offers: Sequence[Offer],
        *,
        gpus: int,
        lease_s: float,
        together: bool = False,
        at_once: int = AT_ONCE,
    ) -> None:
        """`gpus` are the slots of an instance. `offers` and `together`: see `Choices`. Up to `at_once` requests are
        made side by side.

        While it boots, an instance renews its lease itself: `lease_s` ahead, as far as its order reaches.
        """
        self._fleet = fleet
        self._intents = fleet.intents
        self._machines = machines
        self._choices = Choices(fleet, machines, offers, together=together)
        self._gpus = gpus
        self._at_once = at_once
        self._armed_s = max(LEAST_LEASE_S, catalogue.armed_s(min(lease_s, LIFETIME_S)))
        self._one_zone = threading.RLock()
        """Held while instances are bought that must be in one zone."""
        self._not_before = 0.0
        """No request before this time, as EC2 throttles."""
        self._mutex = threading.Lock()
        self._asking: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        """Token -> held during its requests."""

    def begin(self, name: str, market: Market, head_address: str) -> bool:
        """Write down that an instance is wanted. Return whether it is still to be bought.

        Raises ProviderError if it was refused for good, or cannot be written.
        """
        intent = self._intents.get(name)
        if intent is None:
            intent = self._intents.write(
                Intent(
                    instance=name,
                    experiment=self._fleet.run.experiment,
                    market=market,
                    requested_at=self._fleet.clock(),
                    head_address=head_address,
                )
            )
        if intent.refused:
            raise ProviderError(intent.refused)
        return intent.lives and not _is_bought(intent)

    def settle(self, name: str, order: LaunchOrder) -> None:
        """Repeat an unanswered request until it has an answer, so that its instance can be terminated at once.

        Raises ProviderError if it is given up before.
        """
        intent = self._intents.get(name)
        if intent is None or not intent.lives or intent.last is None or intent.last.outcome != "unknown":
            return
        with self._token(intent.last.token):
            if self._intents.unanswered(intent.last):  # an interrupted request may have taken effect
                self._intents.change_unanswered(intent.last, doubtful=True, asked_at=self._fleet.clock())
                self._ask(intent.last, order, [name])

    def buy(self, order: LaunchOrder) -> None:
        """Buy all instances of an order; those that are not bought have failed for good."""
        try:
            with self._one_zone if self._choices.together else nullcontext():
                self._buy(order)
        except BaseException:
            for name in self._left(order, order.names):  # other threads wait for them
                order.refuse(name, f"the launch of {name} was interrupted")
            raise
        finally:
            order.done.set()

    def _buy(self, order: LaunchOrder) -> None:
        for name in self._left(order, order.names):
            try:
                self.settle(name, order)
            except ProviderError as error:
                order.refuse(name, str(error))
        left = [name for name in order.names if not self._is_over(order, name)]
        hopeless, sold_out = set[str](), True
        for choice, at_least in self._choices.turns(order.market, len(left)):
            if not left:
                break
            if choice.instance_type in hopeless:
                continue
            left, refusal = self._buy_here(choice, order, left, at_least)
            if refusal == "quota":
                hopeless.add(choice.instance_type)
            elif refusal not in (None, "capacity") and choice.placement_group is None:
                sold_out = False
                break
        for name in self._left(order, left):
            order.refuse(name, self._refuse(name, self._refusals(name)), sold_out=sold_out)

    def _is_over(self, order: LaunchOrder, name: str) -> bool:
        """Return whether an instance is bought or has failed."""
        return name in order.failed or _is_bought(self._intents.known(name))

    def _left(self, order: LaunchOrder, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are still to be bought; refuse those that were given up."""
        left = [name for name in names if not self._is_over(order, name)]
        for name in left:
            reason = order.given_up(name)
            if not reason and not self._intents.wanted(name):
                reason = f"instance {name} was released while it was requested"
            if reason:
                order.refuse(name, reason)
        return [name for name in left if name not in order.failed]

    def _buy_here(
        self, choice: Purchase, order: LaunchOrder, names: Sequence[str], at_least: int
    ) -> tuple[list[str], Verdict | None]:
        """Buy all that a choice has. Return the names that are left, and why it has no more.

        EC2 launches as many as a zone has. If a quota is exceeded it may launch none: a smaller request may succeed.
        """
        left, most, at_once = self._left(order, names), len(names), 1
        while left:
            attempts = self._write_all(choice, order, left, most, at_least, at_once)
            refusals = self._ask_all(attempts, order, left)
            left = self._left(order, left)
            if choice.market == "spot":  # a first request alone learns that a zone is sold out
                at_once = min(4 * at_once, self._at_once)
            largest = max((len(attempt.names) for attempt in attempts), default=0)
            if "quota" in refusals and largest > 1:
                most = largest // 2
            elif definite := [one for one in refusals if one not in (None, "throttled")]:
                refusal = min(definite, key=_FURTHEST.index)
                if refusal in ("capacity", "quota"):
                    self._fleet.note_refusal(choice)
                return left, refusal
        return left, None

    def _write_all(
        self, choice: Purchase, order: LaunchOrder, names: Sequence[str], most: int, at_least: int, at_once: int
    ) -> list[LaunchAttempt]:
        """Write down up to `at_once` requests, each for up to `most` of `names`."""
        written: list[LaunchAttempt] = []
        while len(written) < at_once:
            others = [name for name in names if not any(name in attempt.names for attempt in written)]
            attempt = self._write(choice, order, others[:most], at_least) if others else None
            if attempt is None:
                break
            written.append(attempt)
        return written

    def _ask_all(
        self, attempts: Sequence[LaunchAttempt], order: LaunchOrder, names: Sequence[str]
    ) -> list[Verdict | None]:
        """Return the refusal of each request, all of which are made side by side. Raises what one of them raised, once
        all have an answer."""
        answers = [Future[Verdict | None]() for _ in attempts]

        def ask(attempt: LaunchAttempt, answer: Future[Verdict | None]) -> None:
            try:
                answer.set_result(self._ask(attempt, order, [name for name in names if name in attempt.names]))
            except _GivenUpError:
                answer.set_result("throttled")
            except BaseException as error:
                answer.set_exception(error)

        requests = list(zip(attempts, answers, strict=True))
        for request in requests[1:]:
            threading.Thread(target=ask, args=request, name="launch", daemon=True).start()
        for request in requests[:1]:
            ask(*request)
        wait(answers)
        return [answer.result() for answer in answers]

    def _refuse(self, instance: str, reason: str) -> str:
        self._intents.change(instance, lambda intent: replace(intent, refused=reason))
        return reason

    def _refusals(self, name: str) -> str:
        """Return why nothing was available, zone by zone."""
        zones: dict[tuple[str, str], dict[str, None]] = {}
        intent = self._intents.known(name)
        for attempt in intent.attempts:
            zones.setdefault((attempt.reason, attempt.choice.instance_type), {})[attempt.choice.zone] = None
        places: dict[str, list[str]] = {}
        for (reason, instance_type), where in zones.items():
            places.setdefault(reason, []).append(f"{instance_type} in {', '.join(where)}")
        market = " on the spot market" if intent.market == "spot" else ""
        text = "; ".join(f"{' and '.join(where)}{market}: {reason}" for reason, where in places.items())
        if self._choices.together and (home := self._choices.home()) is not None:
            text += f"; the others are in {home}, and trials that span instances need all of them in one zone"
        return text or "no zone is left to try"

    def _write(self, choice: Purchase, order: LaunchOrder, names: Sequence[str], at_least: int) -> LaunchAttempt | None:
        """Write down the next request, for as many of `names` as fit into one; return None if one was given up.

        All are refused if their instances would end before they are useful. Raises ProviderError if it cannot be
        written.
        """
        firmware_s = catalogue.firmware_s(choice.instance_type)
        reach_s = order.reach_s()
        boot_s = catalogue.armed_s(reach_s, firmware_s)  # they live no longer after booting, unless they join
        if boot_s < LEAST_LEASE_S:
            least_s = catalogue.reach_s(LEAST_LEASE_S, firmware_s)
            reason = (
                f"the budget, or its lease, reaches {max(0.0, reach_s):.0f} s from now, and an instance "
                f"needs {least_s:.0f} s to be useful; raise max_cost, or resources.lease"
            )
            for name in names:
                order.refuse(name, self._refuse(name, reason))
        names = self._left(order, names)
        if not names:
            return None
        node = NodeStart(
            instances=tuple(names[: calls.share(names, choice.market)]),
            head_address=order.head_address,
            gpus=self._gpus,
            lease_s=min(boot_s, self._armed_s),
            boot_s=boot_s,
            lifetime_s=max(LIFETIME_S, boot_s),
        )
        attempt = self._attempt(choice, node, at_least)
        return attempt if self._intents.add_attempt(attempt) else None

    def _attempt(self, choice: Purchase, node: NodeStart, at_least: int) -> LaunchAttempt:
        """Return a request for the names of `node`."""
        machines, run, names = self._machines, self._fleet.run, node.instances
        known = [intent for name in names if (intent := self._intents.get(name)) is not None]
        number = 1 + max(len(intent.attempts) for intent in known)
        token = calls.client_token(run.experiment, f"{run.run}{self._intents.restored}", names, number, choice)
        request = calls.launch_request(
            machines,
            choice,
            token=token,
            tags=calls.tags_of(run.experiment, run.run, names, machines.owner),
            user_data=machines.user_data(node),
            instances=len(names),
            at_least=min(at_least, len(names)),
        )
        return LaunchAttempt(
            token=token, choice=choice, request=request, names=names, lease_s=node.boot_s, asked_at=self._fleet.clock()
        )

    def _ask(self, attempt: LaunchAttempt, order: LaunchOrder, names: Sequence[str]) -> Verdict | None:
        """Repeat a request until EC2's answer is definite. `names`: those of its instances that the order waits for.

        Return None if all of these are bought. `throttled`: it was withdrawn before it took effect, as some of it is
        not wanted any more. Raises ProviderError once all `names` are given up.
        """
        with self._token(attempt.token):
            pauses, firmware_s = self._fleet.pauses(), catalogue.firmware_s(attempt.choice.instance_type)
            while shares := self._intents.unanswered(attempt):
                last = self._intents.last(shares[0].instance)
                # An instance launched only now would outlive the budget.
                if last.lease_s + firmware_s > order.reach_s():
                    found = [self._fleet.settle(share.instance) for share in shares]
                    return self._answered(attempt, [one for one in found if one is not None], order, names)
                self._pause_until(self._not_before)
                try:
                    answer = self._fleet.ec2.run_instances(**last.request)
                except FAILURES as error:
                    meaning = verdict(error)
                    if meaning not in ("unknown", "throttled"):
                        return self._refused(attempt, order, names, error, meaning)
                    doubtful = last.doubtful or meaning == "unknown"
                else:
                    return self._answered(attempt, answer["Instances"], order, names)
                if self._taken_back(attempt, order, names, doubtful):
                    return "throttled"
                self._not_before = max(self._not_before, self._fleet.clock() + next(pauses))
                self._pause_until(self._not_before)
                if self._taken_back(attempt, order, names, doubtful):
                    return "throttled"
                self._intents.change_unanswered(attempt, doubtful=doubtful, asked_at=self._fleet.clock())
            return self._answered(attempt, [], order, names)  # a describe call, or another thread, found all of it

    def _pause_until(self, instant: float) -> None:
        if (seconds := instant - self._fleet.clock()) > 0.0:
            self._fleet.sleep(seconds)

    def _taken_back(self, attempt: LaunchAttempt, order: LaunchOrder, names: Sequence[str], doubtful: bool) -> bool:
        """Withdraw the request if one of `names` was given up and EC2 has certainly launched nothing; return whether it
        was.

        Raises ProviderError if none of `names` is wanted any more.
        """
        reasons = [reason for name in names if (reason := order.given_up(name))]
        taken_back = bool(reasons) and not doubtful
        if taken_back:
            self._intents.change_unanswered(attempt, outcome="refused", reason=reasons[0])
        if len(reasons) == len(names):
            raise _GivenUpError(reasons[0])
        return taken_back

    def _refused(
        self, attempt: LaunchAttempt, order: LaunchOrder, names: Sequence[str], error: BaseException, meaning: Verdict
    ) -> Verdict | None:
        """Record a refusal: it is definite, unless an earlier answer for the same token was lost."""
        shares = self._intents.unanswered(attempt)
        found = []
        if any(share.last is not None and share.last.doubtful for share in shares):
            found = [one for share in shares if (one := self._fleet.find_now(share.instance)) is not None]
        if found or meaning == "mismatch":  # it took effect: EC2 shows all of its instances after a while
            found = [one for share in shares if (one := self._fleet.settle(share.instance)) is not None]
        self._intents.change_unanswered(attempt, outcome="refused", reason=explain(error))
        return self._answered(attempt, found, order, names) and meaning

    def _answered(
        self, attempt: LaunchAttempt, machines: Sequence[Mapping[str, Any]], order: LaunchOrder, names: Sequence[str]
    ) -> Verdict | None:
        """Accept the instances of a request one by one; the missing ones were sold out. Return None if none is."""
        for machine in machines:
            name = calls.named(attempt.names, machine.get("AmiLaunchIndex", 0))
            self._accept(name, attempt, machine, order)
        self._intents.change_unanswered(
            attempt,
            outcome="refused",
            doubtful=False,
            reason=f"EC2 has no room for more than {len(machines)} of {len(attempt.names)}; {MORE_ROOM}",
        )
        return None if all(self._is_over(order, name) for name in names) else "capacity"

    def _accept(self, name: str, attempt: LaunchAttempt, machine: Mapping[str, Any], order: LaunchOrder) -> None:
        """Accept a launched instance; terminate it at once if it is not the requested one, or not wanted any more."""
        intent = self._intents.get(name)
        if intent is None or not intent.lives or intent.last is None or intent.last.token != attempt.token:
            self._fleet.terminate_stray(machine)
            return
        self._fleet.accept(name, machine)
        choice = attempt.choice
        shown: Mapping[str, Any] = machine
        if choice.market == "spot" and "InstanceLifecycle" not in machine:
            shown = self._fleet.find_now(name) or {**machine, "InstanceLifecycle": "spot"}
        if wrong := calls.mismatch(shown, choice):
            self._fleet.terminate(name, f"not what was asked for: {wrong}")
            order.refuse(
                name,
                f"instance {name} was ended at once: {wrong}, in {choice.zone}; the endpoint does not behave like "
                "EC2: see AWS_ENDPOINT_URL, and the account's policies",
            )
        elif intent.ending is not None:
            self._fleet.terminate_soon(name, intent.ending)

    def _token(self, token: str) -> threading.RLock:
        with self._mutex:
            return self._asking[token]


def _is_bought(intent: Intent) -> bool:
    return intent.last is not None and intent.last.outcome == "accepted"
