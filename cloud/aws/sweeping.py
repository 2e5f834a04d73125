"""Find and end what drivers that died left on EC2. It never launches: unanswered requests are settled by looking."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubberband.cloud.aws.calls import EXPERIMENT_TAG, ROLE_TAG, RUN_TAG, by_tags, name_of, tags_in
from rubberband.cloud.aws.fleet import VISIBILITY_S, Fleet
from rubberband.cloud.aws.intents import Intent, Intents, Run, runs_in
from rubberband.cloud.aws.machines import Session
from rubberband.cloud.aws.pages import described
from rubberband.cloud.aws.states import ALIVE
from rubberband.cloud.local.instance import lock
from rubberband.errors import ProviderError, RubberbandError

SWEPT = "swept: its driver was dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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

    ended: tuple[Found, ...] = ()
    unknown: tuple[Found, ...] = ()
    """Instances of the same owners that no folder here knows, which live on: their driver may be elsewhere."""
    troubles: tuple[str, ...] = ()
    """What may still run and could not be ended, or not be looked for, a line each."""
    notes: tuple[str, ...] = ()
    """Why AWS could not be asked, where nothing is known to be left."""


def sweep(
    directories: Iterable[Path],
    open_session: Callable[[str], Session],
    experiment: str | None = None,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Swept:
    """End every instance of `experiment` (None: of all) that a provider's directory knows and whose driver is dead.

    What a living driver holds is left alone. AWS is not asked where the directories know no run.
    """
    places: defaultdict[tuple[str, str], list[tuple[Path, Run]]] = defaultdict(list)
    ended: list[Found] = []
    unknown: list[Found] = []
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
        session: Session,
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

    def unknown(self) -> list[Found]:
        known = {(run.experiment, run.run) for _, run in self._runs}
        return [_found(machine) for machine in self._alive if _run_of(machine) not in known]

    def end(self, meant: Sequence[Run], troubles: list[str]) -> list[Found]:
        ended = []
        for directory, run in self._runs:
            if run in meant:
                try:
                    with lock(directory / "driver") as dead:
                        ended += self._end_run(directory, run, troubles) if dead else []
                except ProviderError as error:
                    troubles.append(str(error))
        return ended

    def _end_run(self, directory: Path, run: Run, troubles: list[str]) -> list[Found]:
        """End what lives of a run whose driver is dead; nothing is asked where all of it has ended."""
        alive = any(_run_of(machine) == (run.experiment, run.run) for machine in self._alive)
        if not alive and _over(directory, run, self._clock()):
            return []
        intents = Intents(directory, run)
        fleet = Fleet(self._session, run, intents, clock=self._clock, sleep=self._sleep)
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


def _found(machine: Mapping[str, Any]) -> Found:
    tags = tags_in(machine)
    return Found(
        experiment=tags.get(EXPERIMENT_TAG, ""),
        instance=name_of(machine) or "an instance",
        instance_id=machine["InstanceId"],
        instance_type=machine.get("InstanceType", ""),
        zone=machine.get("Placement", {}).get("AvailabilityZone", ""),
    )


def _intended(intent: Intent) -> Found:
    assert intent.last is not None
    return Found(
        experiment=intent.experiment,
        instance=intent.instance,
        instance_id=intent.last.instance_id,
        instance_type=intent.last.choice.instance_type,
        zone=intent.last.choice.zone,
    )
