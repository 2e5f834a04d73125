"""Find and end what drivers that died left on EC2. It never launches: unanswered requests are settled by looking."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubberband.cloud.aws.calls import EXPERIMENT_TAG, ROLE_TAG, RUN_TAG, AwsSession, by_tags, name_of, tags_in
from rubberband.cloud.aws.client import described, pages
from rubberband.cloud.aws.fleet import VISIBILITY_S, Ec2Fleet
from rubberband.cloud.aws.intents import Intent, Intents, Run, runs_in
from rubberband.cloud.aws.metadata import OwnInstance, own_place
from rubberband.cloud.aws.network import delete_clusters, delete_groups
from rubberband.cloud.aws.resolving import in_one_line
from rubberband.cloud.aws.states import ALIVE
from rubberband.cloud.aws.token import delete_token
from rubberband.cloud.local.instance import lock
from rubberband.cloud.steady import elapsed_s
from rubberband.errors import ProviderError, RubberbandError

SWEPT = "swept: its driver was dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundInstance:
    """An instance on EC2."""

    experiment: str
    instance: str
    """Its name."""
    instance_id: str
    instance_type: str
    zone: str

    def __str__(self) -> str:
        return f"{self.instance} of {self.experiment} ({self.instance_id}, {self.instance_type} in {self.zone})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep came to."""

    ended: tuple[FoundInstance, ...] = ()
    unknown: tuple[FoundInstance, ...] = ()
    """Instances of the same owners that no folder here knows, which live on: their driver may be elsewhere."""
    troubles: tuple[str, ...] = ()
    """What may still run and could not be ended, or not be looked for, a line each."""
    notes: tuple[str, ...] = ()
    """Why AWS could not be asked, where nothing is known to be left."""


def sweep(
    directories: Iterable[Path],
    open_session: Callable[[str], AwsSession],
    experiment: str | None = None,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Swept:
    """End every instance of `experiment` (None: of all) that a provider's directory knows and whose driver is dead.

    What a living driver holds is left alone. AWS is not asked where the directories know no run.
    """
    places: defaultdict[tuple[str, str], list[tuple[Path, Run]]] = defaultdict(list)
    ended: list[FoundInstance] = []
    unknown: list[FoundInstance] = []
    troubles: list[str] = []
    notes: list[str] = []
    for directory in directories:
        try:
            for run in runs_in(directory):
                places[run.region, run.owner].append((directory, run))
        except ProviderError as error:  # the others are swept all the same
            troubles.append(str(error))
    for (region, owner), runs in sorted(places.items()):
        meant = [run for _, run in runs if experiment in (None, run.experiment)]
        if not meant:
            continue
        try:
            place = _Place(open_session(region), owner, runs, clock, sleep)
            ended += place.end(meant, troubles)
            unknown += place.unknown() if experiment is None else ()
        except RubberbandError as error:
            told = f"{owner} in {region}: {error}"
            (troubles if any(not _over(directory, run, clock()) for directory, run in runs) else notes).append(told)
    return Swept(ended=tuple(ended), unknown=tuple(unknown), troubles=tuple(troubles), notes=tuple(notes))


def _over(directory: Path, run: Run, now: float) -> bool:
    """Whether all of a run has ended, as far as its driver wrote down."""
    try:
        intents = Intents(directory, run)
    except ProviderError:
        return False
    return not intents.living() and not intents.in_doubt(now, VISIBILITY_S)


class _Place:
    """What one owner has in one region."""

    def __init__(
        self,
        session: AwsSession,
        owner: str,
        runs: Sequence[tuple[Path, Run]],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._session = session
        self._runs = runs
        self._clock = clock
        self._sleep = sleep
        wanted = [*by_tags(owner=owner), {"Name": "instance-state-name", "Values": list(ALIVE)}]
        self._alive = [m for m in described(session, wanted) if tags_in(m).get(ROLE_TAG) != "head"]

    def unknown(self) -> list[FoundInstance]:
        known = {(run.experiment, run.run) for _, run in self._runs}
        return [_found(machine) for machine in self._alive if _run_of(machine) not in known]

    def end(self, meant: Sequence[Run], troubles: list[str]) -> list[FoundInstance]:
        ended = []
        for directory, run in self._runs:
            if run in meant:
                try:
                    with lock(directory / "driver") as dead:
                        ended += self._end_run(directory, run, troubles) if dead else []
                except ProviderError as error:
                    troubles.append(str(error))
        return ended

    def _end_run(self, directory: Path, run: Run, troubles: list[str]) -> list[FoundInstance]:
        """End what lives of a run whose driver is dead; nothing is asked where all of it has ended."""
        alive = any(_run_of(machine) == (run.experiment, run.run) for machine in self._alive)
        if not alive and _over(directory, run, self._clock()):
            return []
        intents = Intents(directory, run)
        fleet = Ec2Fleet(self._session, run, intents, clock=self._clock, sleep=self._sleep)
        before = {intent.instance for intent in intents.living()}
        try:
            fleet.end_all(lambda instance: fleet.end(instance, SWEPT))
        except ProviderError as error:
            troubles.append(str(error))
        ours = [i for i in intents.all() if i.instance in before and i.reason == SWEPT]
        swept = {i.last.instance_id: _intended(i) for i in ours if i.last is not None and i.last.instance_id}
        strays = {identity: _found(machine) for identity, machine in fleet.strays.items()}
        return list((strays | swept).values())


def _run_of(machine: Mapping[str, Any]) -> tuple[str, str]:
    tags = tags_in(machine)
    return tags.get(EXPERIMENT_TAG, ""), tags.get(RUN_TAG, "")


def _found(machine: Mapping[str, Any]) -> FoundInstance:
    tags = tags_in(machine)
    return FoundInstance(
        experiment=tags.get(EXPERIMENT_TAG, ""),
        instance=name_of(machine) or "an instance",
        instance_id=machine["InstanceId"],
        instance_type=machine.get("InstanceType", ""),
        zone=machine.get("Placement", {}).get("AvailabilityZone", ""),
    )


def _intended(intent: Intent) -> FoundInstance:
    assert intent.last is not None
    return FoundInstance(
        experiment=intent.experiment,
        instance=intent.instance,
        instance_id=intent.last.instance_id,
        instance_type=intent.last.choice.instance_type,
        zone=intent.last.choice.zone,
    )


# End everything of one owner in one region: instances, head, published token, groups. Idempotent.


_LIVING = ("pending", "running", "stopping", "stopped")
_LOOK_S = 5.0
_PATIENCE_S = 900.0
_LOOKS = 2
"""EC2 is eventually consistent: nothing left is believed after so many looks."""
_VISIBLE_S = 300.0
"""After so long EC2 shows whatever was launched. A security group in use tells of something that it does not yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """An instance that carries the owner's tag."""

    instance_id: str
    role: str
    experiment: str
    name: str
    instance_type: str

    def __str__(self) -> str:
        what = f"{self.name} of {self.experiment}" if self.experiment else self.role or "an instance"
        return f"{what} ({self.instance_id}, {self.instance_type})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What `end_everything` has ended."""

    instances: tuple[Owned, ...]
    token: bool
    security_groups: tuple[str, ...]
    kept_groups: tuple[str, ...] = ()
    """Security groups that something still uses."""
    placement_groups: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.instances or self.token or self.security_groups or self.placement_groups)


def living(session: AwsSession, owner: str) -> tuple[Owned, ...]:
    """Every instance of the owner that lives, in the order of their launch. Raises InputError."""
    with in_one_line():
        return tuple(_owned(one) for one in _described(session, owner, _LIVING))


def end_everything(
    session: AwsSession,
    owner: str,
    *,
    place: OwnInstance | None = None,
    clock: Callable[[], float] = elapsed_s,
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """End all of the owner's instances, wait until they are gone, then delete the token and our groups.

    The machine that this runs on, if it is one of them, comes last, and its security group stays. Raises InputError if
    the role lacks rights, ProviderError if something does not end.
    """
    place = place or own_place()
    own = place.instance_id if place is not None else ""
    before = clock() + _VISIBLE_S
    with in_one_line():
        ended = _end_instances(session, owner, own, clock, sleep)
        token = delete_token(session, owner)
        last = [one for one in living(session, owner) if one.instance_id == own]
        groups, kept = delete_groups(session, owner)
        while kept and not last and clock() < before:
            sleep(_LOOK_S)
            ended |= _end_instances(session, owner, own, clock, sleep)
            deleted, kept = delete_groups(session, owner)
            groups += deleted
        clusters = delete_clusters(session, owner)
        if last:
            session.client("ec2").terminate_instances(InstanceIds=[own])
    return Ended(
        instances=(*ended.values(), *last),
        token=token,
        security_groups=groups,
        kept_groups=kept,
        placement_groups=clusters,
    )


def _end_instances(
    session: AwsSession, owner: str, own: str, clock: Callable[[], float], sleep: Callable[[float], None]
) -> dict[str, Owned]:
    ended: dict[str, Owned] = {}
    looks, before = 0, clock() + _PATIENCE_S
    while looks < _LOOKS:
        left = [one for one in _described(session, owner, (*_LIVING, "shutting-down")) if one["InstanceId"] != own]
        alive = [one for one in left if one["State"]["Name"] != "shutting-down"]
        if alive:
            session.client("ec2").terminate_instances(InstanceIds=[one["InstanceId"] for one in alive])
            ended |= {one["InstanceId"]: _owned(one) for one in alive}
        looks = 0 if left else looks + 1
        if clock() > before:
            names = ", ".join(one["InstanceId"] for one in left)
            raise ProviderError(f"{names} did not end within {_PATIENCE_S:g} s; run `rubberband down` again")
        if looks < _LOOKS:
            sleep(_LOOK_S)
    return ended


def _described(session: AwsSession, owner: str, states: tuple[str, ...]) -> list[Any]:
    filters = [*by_tags(owner=owner), {"Name": "instance-state-name", "Values": list(states)}]
    shown = pages(session.client("ec2").describe_instances, "Reservations", Filters=filters)
    return sorted((one for each in shown for one in each["Instances"]), key=lambda one: one["LaunchTime"])


def _owned(instance: Any) -> Owned:
    tags = tags_in(instance)
    return Owned(
        instance_id=instance["InstanceId"],
        role=tags.get("rubberband:role", ""),
        experiment=tags.get("rubberband:experiment", ""),
        name=name_of(instance),
        instance_type=instance["InstanceType"],
    )
