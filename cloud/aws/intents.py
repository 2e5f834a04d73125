"""Requests to EC2, each written before it is made, and their outcomes: one small file for each instance.

They lie in `ec2/RUN/instances` of a provider's directory; `ec2/RUN/run.json` names their run.

The files are the truth of what this driver did; EC2 is the truth of what exists. Terminated instances vanish from EC2
after an hour, so their ends are kept here. An end is final: nothing that EC2 shows later revives an instance.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from rubberband.cloud.aws.calls import Purchase, named
from rubberband.cloud.provider import InstanceDescription, InstanceState
from rubberband.errors import ProviderError
from rubberband.files import sync_directory, write_atomically
from rubberband.values.plan import Market

T = TypeVar("T")
HOUR_S = 3600.0
Outcome = Literal["unknown", "accepted", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAttempt:
    """One instance's part in one request, which has a client token: a type, a zone, a market."""

    token: str
    choice: Purchase
    request: Mapping[str, Any]
    """Exact parameters, which a token allows only once."""
    names: tuple[str, ...]
    """Names of all requested instances, in the order of EC2's launch index."""
    lease_s: float
    """Lease that its UserData arms: it ends itself this long after booting."""
    asked_at: float
    """Time of the last request."""
    outcome: Outcome = "unknown"
    doubtful: bool = False
    """Whether a request once had no answer: an instance may then appear even after a refusal."""
    instance_id: str = ""
    reason: str = ""
    """Reason of the refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """An instance wanted under a name, from before the first request to its end."""

    instance: str
    experiment: str
    market: Market
    requested_at: float
    head_address: str = ""
    """Address of the head that it joins; it cannot join another."""
    attempts: tuple[LaunchAttempt, ...] = ()
    refused: str = ""
    """Set if every attempt was refused: nothing was rented under this name, nor will be."""
    ending: str | None = None
    """Set once this driver terminates it: the reason, empty for a release."""
    running_at: float | None = None
    """Earliest time at which it can have begun to run."""
    seen_running_at: float | None = None
    """Latest such time."""
    ended_at: float | None = None
    reason: str = ""
    preempted: bool = False
    sold_out: bool = False
    """Whether EC2 accepted it, and then had no room for it."""
    hour_prices_usd: tuple[float, ...] = ()
    """Spot only: USD per hour of each hour that has begun, as far as is known."""

    @property
    def last(self) -> LaunchAttempt | None:
        """The attempt that counts: earlier ones were refused."""
        return self.attempts[-1] if self.attempts else None

    @property
    def lives(self) -> bool:
        """Whether it may still cost money, as far as is known."""
        return self.ended_at is None and not self.refused

    @property
    def doubtful_at(self) -> float | None:
        """Last time of a refused attempt of which an instance may still appear; None without one."""
        asked = [a.asked_at for a in self.attempts if a.doubtful and a.outcome == "refused"]
        return max(asked, default=None)

    def attempt_of(self, machine: Mapping[str, Any]) -> LaunchAttempt | None:
        """Return the attempt from which a described instance comes; None if it comes from none."""
        for attempt in self.attempts:
            if machine["InstanceId"] == attempt.instance_id or self.comes_of(attempt, machine):
                return attempt
        return None

    def comes_of(self, attempt: LaunchAttempt, machine: Mapping[str, Any]) -> bool:
        """Return whether an attempt under this name launched a described instance."""
        name = named(attempt.names, machine.get("AmiLaunchIndex", 0))
        return machine.get("ClientToken") == attempt.token and name == self.instance

    def status(self) -> InstanceDescription:
        """Return the description that the provider shows."""
        state: InstanceState = "pending" if self.running_at is None else "running"
        last = self.last
        return InstanceDescription(
            instance=self.instance,
            experiment=self.experiment,
            state="terminated" if self.ended_at is not None else state,
            requested_at=self.requested_at,
            running_at=self.running_at,
            ended_at=self.ended_at,
            reason=self.reason,
            market=self.market,
            instance_type="" if last is None else last.choice.instance_type,
            zone="" if last is None else last.choice.zone,
            price_usd_per_hour=None if last is None else last.choice.price_usd_per_hour,
            hour_prices_usd=billed_prices_usd(self) if self.market == "spot" else None,
            preempted=self.preempted,
            sold_out=self.sold_out,
        )


def billed_prices_usd(intent: Intent) -> tuple[float, ...]:
    """Return the known hourly bills. The first hour is free if EC2 interrupts the instance in it (EC2 User Guide,
    "Billing for interrupted Spot Instances": "No charge")."""
    if intent.preempted and intent.running_at is not None and intent.ended_at is not None:
        return (0.0,) if intent.ended_at - intent.running_at < HOUR_S else intent.hour_prices_usd
    return intent.hour_prices_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run, region and owner of the instances in a folder."""

    experiment: str
    run: str
    """Distinguishes runs of the same name."""
    region: str
    owner: str
    account: str
    """Number of the account; empty if AWS did not say it."""


def runs_in(directory: Path) -> list[Run]:
    """Return the runs in a provider's directory. Raises ProviderError if a file cannot be read."""
    return [_read(path, lambda plain: Run(**plain)) for path in sorted(directory.glob("ec2/*/run.json"))]


def renew_requests(directory: Path) -> None:
    """Let the next requests of the runs in a provider's directory have client tokens that no earlier one had.

    A run that was restored from a backup does not know what it launched since, under names that it uses again. Raises
    OSError.
    """
    for path in directory.glob("ec2/*/run.json"):
        write_atomically(path.with_name(_RESTORED), secrets.token_hex(8).encode(), durable=False, mode=0o600)


_RESTORED = "restored"


class Intents:
    """The intents of one run, in memory and in its folder below `directory`. Safe to use from several threads."""

    def __init__(self, directory: Path, run: Run) -> None:
        """Read the files. Raises ProviderError if one cannot be read, or the folder cannot be written."""
        self.folder = directory / "ec2" / run.run
        self._files = self.folder / "instances"
        self._mutex = threading.RLock()
        self._known: dict[str, Intent] = {}
        self.restored = ""
        """A part of client tokens since the latest restore from a backup; empty before the first."""
        with contextlib.suppress(FileNotFoundError):
            self.restored = (self.folder / _RESTORED).read_text()
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            if not (self.folder / "run.json").exists():
                for folder in (directory, directory / "ec2", self.folder):  # else a power cut may lose a new folder
                    sync_directory(folder)
                _write(self.folder / "run.json", asdict(run))
        except OSError as error:
            raise ProviderError(_unwritable(self.folder, error)) from error
        for path in sorted(self._files.glob("*.json")):
            intent = _read(path, _from_json)
            self._known[intent.instance] = intent
        self._drop_requests_never_made()

    def _drop_requests_never_made(self) -> None:
        """Refuse, in memory, requests that an earlier driver had not written for all of their instances.

        Such a request was never made. Its files stay, as a reader may lack the permission to write.
        """
        written = Counter(attempt.token for intent in self._known.values() for attempt in intent.attempts)
        for name, intent in self._known.items():
            last = intent.last
            if last is not None and last.outcome == "unknown" and written[last.token] < len(last.names):
                last = replace(last, outcome="refused", reason="the driver was interrupted before the request")
                self._known[name] = replace(intent, attempts=(*intent.attempts[:-1], last))

    def get(self, instance: str) -> Intent | None:
        """Return the intent of a name, if there is one."""
        with self._mutex:
            return self._known.get(instance)

    def known(self, instance: str) -> Intent:
        """Return the intent of a name that was written."""
        with self._mutex:
            return self._known[instance]

    def last(self, instance: str) -> LaunchAttempt:
        """Return the attempt that counts, of a name for which one was written."""
        last = self.known(instance).last
        assert last is not None, "an attempt is written before its request"
        return last

    def all(self) -> list[Intent]:
        """Return every intent, in the order of their requests."""
        with self._mutex:
            return sorted(self._known.values(), key=lambda intent: (intent.requested_at, intent.instance))

    def living(self) -> list[Intent]:
        """Return the intents that may cost money."""
        return [intent for intent in self.all() if intent.lives]

    def in_doubt(self, at: float, visible_after_s: float) -> bool:
        """Return whether an instance may still appear of a refused request that once had no answer."""
        asked = [intent.doubtful_at for intent in self.all() if intent.doubtful_at is not None]
        return any(at - asked_at < visible_after_s for asked_at in asked)

    def write(self, intent: Intent) -> Intent:
        """Write an intent durably, before it is acted on. Raises ProviderError if that fails: do not act then."""
        with self._mutex:
            try:
                self._save(intent)
            except OSError as error:
                raise ProviderError(_unwritable(self._files, error)) from error
            self._known[intent.instance] = intent
            return intent

    def wanted(self, instance: str) -> bool:
        """Return whether an instance may be requested (again): it has not ended and is not being terminated."""
        intent = self.get(instance)
        return intent is not None and intent.lives and intent.ending is None

    def add_attempt(self, attempt: LaunchAttempt) -> bool:
        """Write the next attempt of all of its `names` durably; return False and write nothing if one has ended.

        Raises ProviderError if it cannot be written: make no request then.
        """
        with self._mutex:
            if not all(map(self.wanted, attempt.names)):
                return False
            try:
                for name in attempt.names:
                    intent = self._known[name]
                    self.write(replace(intent, attempts=(*intent.attempts, attempt)))
            except ProviderError:
                self.change_unanswered(attempt, outcome="refused", reason="it could not be recorded")
                raise
            return True

    def unanswered(self, attempt: LaunchAttempt) -> list[Intent]:
        """Return the intents whose part in a request has no answer yet."""
        shares = [intent for name in attempt.names if (intent := self.get(name)) is not None]
        return [one for one in shares if one.last and (one.last.token, one.last.outcome) == (attempt.token, "unknown")]

    def change_unanswered(self, attempt: LaunchAttempt, **changes: Any) -> None:
        """Replace fields of a request where it has no answer yet."""
        with self._mutex:
            for intent in self.unanswered(attempt):
                self.change_last(intent.instance, **changes)

    def change(self, instance: str, change: Callable[[Intent], Intent]) -> Intent:
        """Replace an intent by `change` of it; one that has ended stays as it is."""
        with self._mutex:
            intent = self._known[instance]
            return intent if intent.ended_at is not None else self._replace(intent, change(intent))

    def _replace(self, intent: Intent, changed: Intent) -> Intent:
        if changed != intent:
            with contextlib.suppress(OSError):  # a full disk: memory has it, and EC2 can be asked again
                self._save(changed)
            self._known[intent.instance] = changed
        return changed

    def change_last(self, instance: str, **changes: Any) -> None:
        """Replace fields of an intent's last attempt."""

        def changed(intent: Intent) -> Intent:
            assert intent.last is not None, "an attempt is written before its request"
            return replace(intent, attempts=(*intent.attempts[:-1], replace(intent.last, **changes)))

        self.change(instance, changed)

    def price(self, instance: str, hour_prices_usd: tuple[float, ...]) -> None:
        """Note the hourly prices of an instance, which may have ended."""
        with self._mutex:
            intent = self._known[instance]
            self._replace(intent, replace(intent, hour_prices_usd=hour_prices_usd))

    def keep_until(self, until: float) -> None:
        """Remember, for a driver that takes over, the end of the latest lease."""
        with contextlib.suppress(OSError):  # a full disk
            self._until_path.touch()
            os.utime(self._until_path, (until, until))

    def kept_until(self) -> float:
        """Return the end of the latest lease that an earlier driver remembered; 0 without one."""
        try:
            return float(self._until_path.stat().st_mtime)
        except OSError:
            return 0.0

    @property
    def _until_path(self) -> Path:
        return self.folder / "until"

    def _save(self, intent: Intent) -> None:
        _write(self._files / f"{intent.instance}.json", asdict(intent))


def _read(path: Path, made_of: Callable[[dict[str, Any]], T]) -> T:
    try:
        return made_of(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProviderError(
            f"{path} cannot be read ({error}); it lists the requested EC2 instances: restore it, or end them by "
            "`rubberband cloud down` and delete it"
        ) from error


def _write(path: Path, plain: dict[str, Any]) -> None:
    # Durably: a reader sees the old file or the new one, also after a power cut.
    write_atomically(path, json.dumps(plain).encode(), durable=True, mode=0o600)


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"{error.filename or path} cannot be written ({error.strerror or error}), and nothing is rented before it is "
        "recorded; make room or give access"
    )


def _from_json(plain: dict[str, Any]) -> Intent:
    attempts, prices = tuple(map(_attempt, plain["attempts"])), tuple(plain["hour_prices_usd"])
    return Intent(**{**plain, "attempts": attempts, "hour_prices_usd": prices})


def _attempt(plain: dict[str, Any]) -> LaunchAttempt:
    choice = Purchase(**{**plain["choice"], "efa_cards": tuple(plain["choice"]["efa_cards"])})
    return LaunchAttempt(**{**plain, "choice": choice, "names": tuple(plain["names"])})
