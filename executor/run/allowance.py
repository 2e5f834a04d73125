"""The limits of renting: nothing without a limit of its bill, and nothing beyond the policy of the account.

Every door asks here before it rents: runs, measurements, submissions, resumes, extensions, pools and images; an
estimate and a check say what a run would be refused for. The month counts what the runs and the pools of the home have
spent in it, and what those that run may still spend.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rubberband.cloud.catalogue import Table, types_of
from rubberband.cloud.offers import offers
from rubberband.errors import DamagedJournalError, InputError, ProviderError, RubberbandError
from rubberband.executor.journal.folder import ExperimentFolder, folders, open_folder, stamp_of
from rubberband.executor.run.follower import JournalFollower, at_work, salvage, summary_of
from rubberband.features import parts
from rubberband.files import EXCLUSIVE, locked, make_directories, private, write_atomically
from rubberband.installation import default_home, default_store
from rubberband.planning.feasible import PricesAndQuotas
from rubberband.planning.month_cap import Expense, MonthCap
from rubberband.spec.account import POLICY_FILE, AccountPolicy
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_policy
from rubberband.spec.pool import PoolFile, PoolFolder
from rubberband.spec.resources import Resources
from rubberband.units import MONEY_SLACK_USD, did_you_mean, format_usd, month_begin, month_end, shown
from rubberband.values.kinds import NOT_INSTALLED, kind_in
from rubberband.values.offer import Offer
from rubberband.values.submission import Summary

NO_CAP = "missing, and without it the bill of rented instances has no limit"
_SPENDING = "spending"
"""Folder of a home with what experiments may spend before they have a journal, or have spent beside it."""
_STARTS_S = 900.0
"""Time after which a head knows of a run that was started on it."""
_PATIENCE_S = 30.0
"""Longest wait for another process that looks at the month."""


def require_runnable(
    experiment: Experiment, home: Path, *, store: str | None = None, is_lent: bool = False, no_cap: bool = False
) -> None:
    """Raise InputError for an experiment that can only be planned, or for which nothing may be rented, for notices
    without an address, and for a warm start from an experiment that is not there.

    `store` has the journals of the home, by default that of RUBBERBAND_STORE. A service whose pool lends the instances
    says `is_lent`; `no_cap` allows a missing max_cost, where the policy has no limit of money.
    """
    experiment.require_runnable(is_lent=is_lent)
    for require in parts("runnable"):
        require(experiment)
    folder = ExperimentFolder(home=home, name=experiment.name, store=store or default_store())
    for name in experiment.search.warm_start:
        if not replace(folder, name=name).exists:
            known = [one.name for one in folders(home, folder.store)]
            hint = did_you_mean(name, known) or "; `rubberband ps` lists them"
            raise InputError(f"search.warm_start: experiment {name!r} not found{hint}")
    _require_allowed(experiment, folder, None, is_lent=is_lent, no_cap=no_cap)


def require_rate(experiment: Experiment, home: Path, table: Table | None) -> None:
    """Raise InputError where the policy does not allow all instances of an experiment at the live prices of `table`."""
    resources = experiment.resources
    if resources.rents and (policy := load_policy(home)) is not None:
        _require_rate(policy, resources, table)


def _require_allowed(
    experiment: Experiment, folder: ExperimentFolder, table: Table | None, *, is_lent: bool, no_cap: bool = False
) -> None:
    resources, most_usd = experiment.resources, experiment.constraints.max_cost_usd
    if not resources.kind.is_rented:
        return
    is_lent = is_lent or resources.pool is not None  # the pool has caps, and was checked when it came up
    if most_usd is None and not is_lent and not no_cap:
        raise InputError(f"constraints.max_cost: {NO_CAP}; write max_cost, or --no-cap with `rubberband run`")
    policy = load_policy(folder.home)
    if policy is None:
        return
    _require_per_run(policy, most_usd, "constraints.max_cost")
    if not is_lent:
        _require_place(policy, resources.region, types_of(resources), "resources.")
        _require_rate(policy, resources, table)
        _require_month(policy, folder, most_usd)


def require_going_on(
    follower: JournalFollower, home: Path, *, max_cost_usd: float | None, no_cap: bool = False, goes_on: bool = True
) -> None:
    """Raise InputError for an experiment that may not be resumed, or not be given another max_cost.

    `max_cost_usd` is the limit of its whole bill from now on. Without `goes_on` it is only given that.
    """
    words, name = follower.header.setup["experiment"], follower.header.name
    kind = kind_in(words)
    if not kind.is_rented or kind is NOT_INSTALLED:  # what opens the provider says that it is missing
        return
    resources = Experiment.kept(words).resources
    if max_cost_usd is None and resources.pool is None and not no_cap:
        way = f"go on without one by `rubberband resume {name} --no-cap`, or run it again with one"
        raise InputError(f"max_cost: {NO_CAP}; {way}")
    policy = load_policy(home)
    if policy is None:
        return
    _require_per_run(policy, max_cost_usd, "max_cost")
    if resources.pool is not None:
        return
    if goes_on:
        _require_place(policy, resources.region, types_of(resources), "resources.")
        _require_rate(policy, resources, None)
    _require_month(policy, follower.folder, max_cost_usd, follower.summary())


def require_capped(pool: PoolFile) -> None:
    """Raise InputError for a pool of rented instances that nothing limits."""
    if pool.max_usd_per_hour is None and pool.max_usd_per_month is None:
        raise InputError(f"max_usd_per_month: {NO_CAP}; write max_usd_per_month, or max_usd_per_hour")


def require_pool(pool: PoolFile, home: Path, offered: Offer) -> None:
    """Raise InputError for a pool beyond the policy of the account, with the prices of `offered`."""
    policy = load_policy(home)
    if policy is None:
        return
    _require_place(policy, pool.region, [offered.instance_type], "")
    if policy.max_usd_per_hour is not None:
        usd, cap_usd = _usd_per_hour(offered, pool.instances), policy.max_usd_per_hour
        if min(usd, usd if pool.max_usd_per_hour is None else pool.max_usd_per_hour) > cap_usd + MONEY_SLACK_USD:
            why = f"this pool may cost more than {format_usd(cap_usd)} an hour"
            raise _beyond("max_usd_per_hour", why, "write a max_usd_per_hour of that at most, or raise the policy")
    if policy.max_usd_per_month is not None:
        if pool.max_usd_per_month is None:
            raise _beyond("max_usd_per_month", "this pool has no max_usd_per_month", "write one")
        folder = open_folder(pool.name, home)
        _require_month(policy, folder, pool.max_usd_per_month, pool=pool.name, key="max_usd_per_month")


def require_image(resources: Resources, home: Path, builder: str, most_usd: float | None) -> None:
    """Raise InputError where the policy does not allow the instance that builds an image, which costs `most_usd`."""
    policy = load_policy(home)
    if policy is None:
        return
    _require_place(policy, resources.region, [builder], "resources.")
    if most_usd is None:
        for key in ("max_usd_per_run", "max_usd_per_month"):
            if getattr(policy, key) is not None:
                raise _beyond(key, f"the price of a {builder} is not known", "try again once AWS answers")
    _require_per_run(policy, most_usd, "the cost of the builder")
    _require_month(policy, open_folder("", home), most_usd, key="")


def with_allowance(
    prices: PricesAndQuotas, experiment: Experiment, home: Path, *, is_lent: bool = False
) -> PricesAndQuotas:
    """Return what an estimate is made of, with a remark on what a run would be refused for; it may still be planned."""
    if not experiment.resources.kind.is_rented:
        return prices
    try:
        _require_allowed(experiment, open_folder(experiment.name, home), prices.table, is_lent=is_lent)
    except RubberbandError as error:
        return replace(prices, notes=(*prices.notes, f"a run is refused now: {error}."))
    return prices


# The limits of a policy, one by one.


def _beyond(key: str, why: str, fix: str) -> InputError:
    return InputError(f"{key} of {POLICY_FILE}: {why}; {fix}")


def _require_place(policy: AccountPolicy, region: str, types: Sequence[str], above: str) -> None:
    if policy.regions is not None and region not in policy.regions:
        allowed = ", ".join(policy.regions)
        raise _beyond("regions", f"{above}region={shown(region)} is not one of {allowed}", "use one, or add it")
    _require_types(policy, types)


def _require_types(policy: AccountPolicy, types: Sequence[str]) -> None:
    for name in types:
        if policy.refuses_type(name):
            allowed = ", ".join(policy.instance_types or ())
            raise _beyond("instance_types", f"{shown(name)} is not one of {allowed}", "use one, or add it")


def _require_per_run(policy: AccountPolicy, most_usd: float | None, what: str) -> None:
    cap_usd = policy.max_usd_per_run
    if cap_usd is None:
        return
    if most_usd is None:
        raise _beyond("max_usd_per_run", f"{what} is missing", f"set it to at most {format_usd(cap_usd)}")
    if most_usd > cap_usd + MONEY_SLACK_USD:
        why = f"{what} is {format_usd(most_usd)}, more than {format_usd(cap_usd)}"
        raise _beyond("max_usd_per_run", why, "lower it, or raise the policy")


def _usd_per_hour(offered: Offer, instances: int) -> float:
    """Return the price of that many instances, on the more expensive market, with their volumes, addresses and head."""
    price_usd = offered.price_usd_per_hour
    if offered.spot is not None:
        price_usd = max(price_usd, offered.spot.price_usd_per_hour)
    return instances * (price_usd + offered.side_usd_per_hour) + offered.head_price_usd_per_hour


def _require_rate(policy: AccountPolicy, resources: Resources, table: Table | None) -> None:
    """Raise InputError where `max_instances` at once cost too much: a run may rent them all to keep its deadline."""
    cap_usd = policy.max_usd_per_hour
    if cap_usd is None:
        return
    priced: Sequence[Offer] = ()
    with suppress(InputError):  # a price that only EC2 knows: the run has it, and asks again
        priced = offers(resources, table=table)
    for offer in priced:
        usd = _usd_per_hour(offer, resources.max_instances)
        if usd > cap_usd + MONEY_SLACK_USD:
            head_usd = _usd_per_hour(offer, 0)
            affordable = int((cap_usd + MONEY_SLACK_USD - head_usd) / (_usd_per_hour(offer, 1) - head_usd))
            asked = f"resources.max_instances={resources.max_instances} of {offer.instance_type}"
            why = f"{asked} may cost {format_usd(usd)} an hour, more than {format_usd(cap_usd)}"
            fix = f"lower it to {affordable}" if affordable >= 1 else "use a cheaper type"
            raise _beyond("max_usd_per_hour", why, f"{fix}, or raise the policy")


def _require_month(
    policy: AccountPolicy,
    folder: ExperimentFolder,
    most_usd: float | None,
    spent: Summary | None = None,
    *,
    pool: str | None = None,
    key: str = "max_cost",
) -> None:
    """Raise InputError where an experiment, or a `pool`, may spend more than the others leave of the month."""
    cap_usd, now = policy.max_usd_per_month, time.time()
    if cap_usd is None:
        return
    if most_usd is None:
        raise _beyond("max_usd_per_month", f"{key} is missing", f"set it to at most {format_usd(cap_usd)}")
    own_usd = most_usd if spent is None else spent.month_usd(now) + max(0.0, most_usd - spent.cost_usd)
    used_usd = committed_usd(
        folder.home, now, store=folder.store, but=folder.name if pool is None else "", but_pool=pool
    )
    committed, title = {month_begin(now): used_usd}, f"max_usd_per_month of {POLICY_FILE}"
    cap = MonthCap(title=title, cap_usd=cap_usd, committed_usd=committed, used_words="spent or may be")
    short = cap.shortage(Expense(cost_usd=own_usd, start_at=now, duration_s=0.0), now)
    if short is not None:
        lower = f"lower {key}, " if key else ""
        fix = f"{lower}wait for the others or the next month, or raise the policy"
        if any(_head_note(folder.home, "x").path.parent.glob("head.*.json")):
            fix += "; `rubberband ps --on head` asks the head for its part anew"
        raise InputError(f"{short.words('this may cost')}; {fix}")


# The month: what the home has spent on rented instances, and what may still be.


def committed_usd(
    home: Path, now: float, *, store: str | None = None, but: str = "", but_pool: str | None = None
) -> float:
    """Return what this home has spent this month (UTC) on rented instances, and what its runs and pools still may.

    The experiment `but` and the pool `but_pool` are left out. Runs on heads count as the heads reported last; images,
    heads themselves and disks are not counted. Raises InputError where it is not known, JournalError where a journal or
    the `store` cannot be read.
    """
    notes = [_Note(path) for path in (home / _SPENDING).glob("*.json")]  # first: a journal may take one's place
    begun = [folder for folder in folders(home, store) if folder.store is None or folder.is_here]
    pools = [PoolFolder(path=path.parent) for path in (home / "pools").glob("*/pool.json")]
    return sum(
        [
            *(_experiment_usd(folder, now) for folder in begun if folder.name != but),
            *(note.month_usd({folder.name for folder in begun}, now) for note in notes),
            *(_pool_usd(pool, now) for pool in pools if pool.name != but_pool),
        ]
    )


def _rents(words: Mapping[str, Any]) -> bool:
    """Return whether the instances of an experiment, in the words of a journal, are on no pool's bill."""
    return kind_in(words).is_rented and words["resources"].get("pool") is None


def _experiment_usd(folder: ExperimentFolder, now: float) -> float:
    busy, written_ns = at_work(folder), [ns for ns, _ in stamp_of(folder) or ()]
    if not busy and folder.store is None and max(written_ns, default=0) < month_begin(now) * 1e9:
        return 0.0
    try:
        with closing(JournalFollower(folder)) as follower:
            words = follower.header.setup["experiment"]
            if not _rents(words):
                return 0.0
            follower.refresh(live=busy)
            summary, most_usd = follower.summary(), follower.max_cost_usd
    except DamagedJournalError as error:
        left = salvage(folder)
        if left is None:
            why = f"the cost of {folder.name} is not known ({error})"
            raise _beyond("max_usd_per_month", why, f"move {folder.path} away") from None
        if not kind_in(left.header.setup["experiment"]).is_rented:
            return 0.0
        summary, most_usd = summary_of(left.header, left.controller, left.controller.state.now), None
    spent_usd = summary.month_usd(now)
    if not busy:
        return spent_usd
    most_usd = summary.forecast_cost_usd if most_usd is None else most_usd
    return spent_usd + max(0.0, (most_usd or 0.0) - summary.cost_usd)


def _pool_usd(folder: PoolFolder, now: float) -> float:
    pool = PoolFile(**folder.read())
    if not pool.kind.is_rented:
        return 0.0
    if not folder.is_up:
        return float(folder.broker().closed_month_usd(now))
    if pool.max_usd_per_month is not None:
        return pool.max_usd_per_month
    try:
        return float(folder.broker().month_usd(starts=True))
    except ProviderError as error:
        why = f"the bill of pool {folder.name} is not known ({error})"
        raise _beyond("max_usd_per_month", why, "try again") from None


# What has no journal: experiments that were deleted, and profiles that are measured.


def spent_this_month_usd(follower: JournalFollower) -> float:
    """Return what the home has spent on an experiment this month; 0 if it rents nothing, or a pool's bill has it."""
    if not _rents(follower.header.setup["experiment"]):
        return 0.0
    return follower.summary().month_usd(time.time())


def keep_spent(folder: ExperimentFolder, created_at: float, spent_usd: float) -> None:
    """Let what an experiment has spent this month count without its journal, which is deleted next. Idempotent.

    Raises OSError.
    """
    note = _Note(folder.home / _SPENDING / f"{folder.name}.deleted-{created_at:.6f}.json")
    make_directories(note.path.parent)
    note.write(usd=spent_usd)


@dataclass(slots=True)
class Pledge:
    """The bill of an experiment that will be in no journal, once that is known."""

    spent_usd: float = 0.0


@contextmanager
def pledged(experiment: Experiment, folder: ExperimentFolder) -> Iterator[Pledge]:
    """Let all that an experiment may spend count in the month until it has a journal, or ends without one.

    If the process dies before, all of it counts on. Raises InputError where others have taken the rest of the month
    meanwhile.
    """
    resources, held = experiment.resources, Pledge()
    if not resources.rents:
        yield held
        return
    note = _Note(folder.home / _SPENDING / f"{folder.name}.{secrets.token_hex(4)}.json")
    try:
        with _alone(note):  # one process at a time looks whether the month has room, and notes
            if (policy := load_policy(folder.home)) is not None:
                _require_month(policy, folder, experiment.constraints.max_cost_usd)
            until = {} if folder.exists else {"until": folder.name}
            note.write(usd=experiment.constraints.max_cost_usd, **until)
    except OSError as error:
        raise InputError(f"{note.path} cannot be written ({error.strerror}); make room or give access") from None
    try:
        yield held
    except RubberbandError as error:
        held.spent_usd += error.spent_usd
        note.settle(held.spent_usd)
        raise
    note.settle(held.spent_usd)


@contextmanager
def _alone(note: _Note) -> Iterator[None]:
    make_directories(note.path.parent)
    with open(note.path.with_name("lock"), "a", opener=private) as lock:
        if not locked(lock, EXCLUSIVE, wait_s=_PATIENCE_S):
            raise InputError(f"{note.path.with_name('lock')} is locked by another process; try again")
        yield


# What heads spend, which have homes of their own (`rubberband run FILE --on head`).


def pledge_on_head(home: Path, head: str, most_usd: float | None) -> None:
    """Count what a run on a head may spend from now on in the month of this home, before it starts.

    `head`: its account, region and owner. Raises InputError where the policy of this home does not allow it.
    """
    note, now = _head_note(home, head), time.time()
    with _alone(note):
        if (policy := load_policy(home)) is not None:
            _require_month(policy, open_folder("", home), most_usd)
        more_usd = most_usd or 0.0
        usd, open_usd = note.month_usd((), now) + more_usd, note.month_usd((), month_end(now)) + more_usd
        note.write(usd=usd, open=open_usd, starts=[*note.starts(now), now])


def require_head(home: Path, region: str, instance_type: str | None = None) -> None:
    """Raise InputError where the policy of this home allows no head there, or not of that type.

    The usual type of heads needs no mention in the policy.
    """
    policy, usual = load_policy(home), Resources().aws.head_instance_type
    if policy is not None:
        types = [] if instance_type in (None, usual) else [str(instance_type)]
        _require_place(policy, region, types, "resources.")


def require_on_head(home: Path, most_usd: float | None, types: Sequence[str] = ()) -> None:
    """Raise InputError for what may not go on on a head: a max_cost, or types, beyond the policy of this home."""
    if (policy := load_policy(home)) is not None:
        _require_per_run(policy, most_usd, "max_cost")
        _require_types(policy, types)


def note_of_head(home: Path, head: str, usd: float, open_usd: float, *, has_ended: bool) -> None:
    """Count what a head reports: what its home has spent or may still spend this month, and what it may still.

    Shortly after a start the head may not know of it yet: then the figures do not fall. A run that `has_ended` was the
    first of those that were started.
    """
    note, now = _head_note(home, head), time.time()
    with _alone(note):
        starts = note.starts(now)[int(has_ended) :]
        if starts:
            usd, open_usd = max(usd, note.month_usd((), now)), max(open_usd, note.month_usd((), month_end(now)))
        note.write(usd=usd, open=open_usd, starts=starts)


def note_end_of_head(home: Path, head: str) -> None:
    """Count nothing that may still be spent on a head, which has ended."""
    note = _head_note(home, head)
    if note.path.exists():
        with _alone(note):
            note.write(usd=note.month_usd((), time.time()), open=0.0)


def heads_that_may_spend(home: Path) -> dict[str, float]:
    """Return each head on which something may still be spent, by account, region and owner, and the USD."""
    open_usd = {
        path.name.removeprefix("head.").removesuffix(".json"): _Note(path).month_usd((), month_end(time.time()))
        for path in sorted((home / _SPENDING).glob("head.*.json"))
    }
    return {head: usd for head, usd in open_usd.items() if usd > 0.0}


def _head_note(home: Path, head: str) -> _Note:
    return _Note(home / _SPENDING / f"head.{head}.json")


@dataclass(frozen=True, slots=True)
class _Note:
    """File of what was spent, or may be: an experiment's `until` it has a journal, or beside that; or a head's."""

    path: Path

    def write(self, **words: Any) -> None:
        write_atomically(self.path, json.dumps({"at": time.time(), **words}).encode(), durable=True)

    def settle(self, spent_usd: float) -> None:
        """Keep what was spent and is in no journal; on a full disk all that was pledged counts on."""
        with suppress(OSError):
            if spent_usd > 0.0:
                self.write(usd=spent_usd)
            else:
                self.path.unlink(missing_ok=True)

    def starts(self, now: float) -> list[float]:
        """Return when runs were started of which their head may not know yet; none without a note that can be read."""
        with suppress(OSError, ValueError):
            starts = json.loads(self.path.read_bytes()).get("starts", ())
            return [started_at for started_at in starts if now - started_at < _STARTS_S]
        return []

    def month_usd(self, begun: Collection[str], now: float) -> float:
        """Return what counts of it this month, where the experiments `begun` have journals."""
        try:
            note = json.loads(self.path.read_bytes())
            if note["at"] < month_begin(now):
                return float(note.get("open", 0.0))
            return 0.0 if note.get("until") in begun else float(note["usd"])
        except FileNotFoundError:  # it has just got its journal
            return 0.0
        except (OSError, ValueError, KeyError, TypeError):
            why = f"what was spent by {self.path} is not known"
            raise _beyond("max_usd_per_month", why, "write its usd into it, or remove it") from None


if __name__ == "__main__":  # on a head: the two figures of its home, for `note_of_head`
    home, store, now = default_home(), default_store(), time.time()
    print(json.dumps([committed_usd(home, instant, store=store) for instant in (now, month_end(now))]))
