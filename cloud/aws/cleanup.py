"""Termination of instances on EC2 that crashed drivers left, and of everything of one owner.

It never launches: requests without an answer are settled by describe calls.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubberband.cloud.aws.calls import EXPERIMENT_TAG, ROLE_TAG, RUN_TAG, AwsSession, by_tags, name_of, tags_in
from rubberband.cloud.aws.client import ALIVE, account_of, age, described, instances
from rubberband.cloud.aws.errors import FAILURES, PROTECTED, code_of, explain, in_one_line, verdict
from rubberband.cloud.aws.fleet import VISIBILITY_S, Ec2Fleet
from rubberband.cloud.aws.intents import Intent, Intents, Run, runs_in
from rubberband.cloud.aws.joining import delete_token
from rubberband.cloud.aws.network import OwnInstance, delete_clusters, delete_groups, own_place
from rubberband.cloud.clock import elapsed_s
from rubberband.cloud.provider import CleanedUp
from rubberband.cloud.ray_head.instance import lock
from rubberband.errors import InputError, ProviderError, RubberbandError

CLEANED_UP = "ended by cleanup: its driver was dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundInstance:
    """An instance on EC2, by its tags."""

    experiment: str
    instance: str
    """Its name."""
    instance_id: str
    instance_type: str
    zone: str = ""
    role: str = ""
    runs: bool = True
    since: float | None = None
    """Unix time of its last start."""

    def __str__(self) -> str:
        what = f"{self.instance} of {self.experiment}" if self.experiment else self.role or "an instance"
        where = f" in {self.zone}" if self.zone else ""
        return f"{what} ({self.instance_id}, {self.instance_type}{where})"


def clean_up(
    directories: Iterable[Path],
    open_session: Callable[[str], AwsSession],
    experiment: str | None = None,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> CleanedUp:
    """Terminate every instance of `experiment` (None: of all) that a directory knows and whose driver is dead.

    Instances of a living driver are left alone. AWS is not called if the directories know no run. Instances of the same
    owners that no directory knows keep running, as their driver may be elsewhere; a note names each.
    """
    places: defaultdict[tuple[str, str, str], list[tuple[Path, Run]]] = defaultdict(list)
    ended: list[FoundInstance] = []
    unknown: list[FoundInstance] = []
    troubles: list[str] = []
    notes: list[str] = []
    for directory in directories:
        try:
            for run in runs_in(directory):
                places[run.region, run.owner, run.account].append((directory, run))
        except ProviderError as error:  # the others are still ended
            troubles.append(str(error))
    known = {(run.experiment, run.run) for runs in places.values() for _, run in runs}
    for (region, owner, account), runs in sorted(places.items()):
        meant = [run for _, run in runs if experiment in (None, run.experiment)]
        if not meant:
            continue
        try:
            session = open_session(region)
            if account and (here := account_of(session)) != account:
                raise InputError(f"that is in account {account}, and these credentials are of {here}; set AWS_PROFILE")
            place = _OwnerRegion(session, owner, runs, clock, sleep)
            ended += place.end(meant, troubles)
            unknown += [one for one in place.unknown(known) if experiment is None and one not in unknown]
        except RubberbandError as error:
            trouble = f"{owner} in {region}: {error}"
            (troubles if any(not _over(directory, run, clock()) for directory, run in runs) else notes).append(trouble)
    notes += [
        f"not touched: {one}, which belongs to no experiment here; `rubberband cloud down` ends it if no driver does"
        for one in unknown
    ]
    return CleanedUp(ended=tuple(ended), notes=tuple(notes), troubles=tuple(troubles))


def _over(directory: Path, run: Run, now: float) -> bool:
    """Return whether all of a run has ended, by its driver's files."""
    try:
        intents = Intents(directory, run)
    except ProviderError:
        return False
    return not intents.living() and not intents.in_doubt(now, VISIBILITY_S)


class _OwnerRegion:
    """Instances of one owner in one region."""

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
        alive = described(session, by_tags(owner=owner), *ALIVE)
        self._alive = [machine for machine in alive if tags_in(machine).get(ROLE_TAG) != "head"]

    def unknown(self, known: Collection[tuple[str, str]]) -> list[FoundInstance]:
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
        """Terminate the instances of a run whose driver is dead; call nothing if all of them have ended."""
        alive = any(_run_of(machine) == (run.experiment, run.run) for machine in self._alive)
        if not alive and _over(directory, run, self._clock()):
            return []
        intents = Intents(directory, run)
        fleet = Ec2Fleet(self._session, run, intents, clock=self._clock, sleep=self._sleep)
        before = {intent.instance for intent in intents.living()}
        try:
            fleet.terminate_all(lambda instance: fleet.terminate(instance, CLEANED_UP))
        except ProviderError as error:
            troubles.append(str(error))
        ours = [i for i in intents.all() if i.instance in before and i.reason == CLEANED_UP]
        cleaned = {i.last.instance_id: _intended(i) for i in ours if i.last is not None and i.last.instance_id}
        strays = {identity: _found(machine) for identity, machine in fleet.strays.items()}
        return list((strays | cleaned).values())


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
        role=tags.get(ROLE_TAG, ""),
        runs=machine.get("State", {}).get("Name") in ("pending", "running"),
        since=machine["LaunchTime"].timestamp() if "LaunchTime" in machine else None,
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


# Terminate everything of one owner in one region: instances, head, published token, groups. Idempotent.


_LOOK_S = 5.0
_PATIENCE_S = 900.0
_LOOKS = 2
"""EC2 is eventually consistent: number of empty looks after which nothing is left."""
_VISIBLE_S = 300.0
"""EC2 shows each launch after this time. Until then only its security group, which is in use, may reveal it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of `end_everything`."""

    instances: tuple[FoundInstance, ...]
    token: bool
    security_groups: tuple[str, ...]
    kept_groups: tuple[str, ...] = ()
    """Security groups that something still uses."""
    placement_groups: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.instances or self.token or self.security_groups or self.placement_groups)


def living(session: AwsSession, owner: str) -> tuple[FoundInstance, ...]:
    """Return every instance of the owner that is not terminated, in the order of launch. Raises InputError."""
    with in_one_line():
        return tuple(_found(one) for one in sorted(instances(session, by_tags(owner=owner), *ALIVE), key=age))


def living_elsewhere(
    session: AwsSession, owner: str, open_session: Callable[[str], AwsSession]
) -> tuple[dict[str, tuple[FoundInstance, ...]], list[str]]:
    """Return the owner's instances in the account's other regions, region -> instances, and what could not be asked."""
    try:
        shown = session.client("ec2").describe_regions()["Regions"]
    except FAILURES as error:
        return {}, [f"other regions is not known: {explain(error)}"]
    regions = sorted(one["RegionName"] for one in shown if one["RegionName"] != session.region)

    def look(region: str) -> tuple[FoundInstance, ...] | str:
        try:
            return living(open_session(region), owner)
        except (RubberbandError, OSError) as error:
            return f"{region} is not known: {error}"

    with ThreadPoolExecutor(max_workers=8) as threads:
        looks = dict(zip(regions, threads.map(look, regions), strict=True))
    found = {region: look for region, look in looks.items() if look and not isinstance(look, str)}
    return found, [look for look in looks.values() if isinstance(look, str)]


def end_everything(
    session: AwsSession,
    owner: str,
    *,
    place: OwnInstance | None = None,
    clock: Callable[[], float] = elapsed_s,
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """Terminate all of the owner's instances, wait until they are gone, then delete the token and our groups.

    If this machine is one of them, it comes last, and its security group stays. Raises InputError if the role lacks
    permissions, ProviderError if an instance does not end.
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


def _terminate(session: AwsSession, identities: list[str]) -> dict[str, str]:
    """Terminate instances; return those that EC2 does not let end, and why. Raises botocore's errors if that is all.

    EC2 ends none of a zone together with one that it does not let end, such as one with termination protection.
    """
    ec2, refused = session.client("ec2"), dict[str, str]()
    try:
        ec2.terminate_instances(InstanceIds=identities)
    except FAILURES as error:
        if verdict(error) not in ("refused", "absent") or (len(identities) == 1 and code_of(error) != PROTECTED):
            raise
        for identity in identities:
            try:
                ec2.terminate_instances(InstanceIds=[identity])
            except FAILURES as one:
                if verdict(one) != "absent":  # the next look shows whether it is
                    refused[identity] = explain(one)
    return refused


def _end_instances(
    session: AwsSession, owner: str, own: str, clock: Callable[[], float], sleep: Callable[[float], None]
) -> dict[str, FoundInstance]:
    ended: dict[str, FoundInstance] = {}
    looks, before = 0, clock() + _PATIENCE_S
    while looks < _LOOKS:
        shown = sorted(instances(session, by_tags(owner=owner), *ALIVE, "shutting-down"), key=age)
        left = [one for one in shown if one["InstanceId"] != own]
        alive = [one for one in left if one["State"]["Name"] != "shutting-down"]
        refused = _terminate(session, [one["InstanceId"] for one in alive]) if alive else {}
        ended |= {one["InstanceId"]: _found(one) for one in alive if one["InstanceId"] not in refused}
        if refused and len(left) == len(refused):
            others = f"; {len(ended)} others have ended" if ended else ""
            raise ProviderError(
                f"{'; '.join(dict.fromkeys(refused.values()))}{others}; then run `rubberband cloud down` again"
            )
        looks = 0 if left else looks + 1
        if clock() > before:
            names = ", ".join(one["InstanceId"] for one in left)
            raise ProviderError(f"{names} did not end within {_PATIENCE_S:g} s; run `rubberband cloud down` again")
        if looks < _LOOKS:
            sleep(_LOOK_S)
    return ended
