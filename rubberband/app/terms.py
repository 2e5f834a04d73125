"""From an experiment to its estimate, and where the figures come from: what every front door answers with.

The command line, the service and Python give the same JSON. No file is read; nothing is started or spent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rubberband.app.cases import Room, batch_notes, cases, with_start_times
from rubberband.app.remedies import Reached, find_remedies, reached
from rubberband.cloud.catalogue import Table, price_source, row_source, spot_source, types_of
from rubberband.cloud.prices import live_table
from rubberband.errors import InputError, ProviderError
from rubberband.planner.assumptions import Assumption, Basis, Name, assumptions, bill_lines
from rubberband.planner.estimate import Case, Estimate, best_job, estimate, estimate_plan
from rubberband.planner.solver import Objective
from rubberband.planner.wording import advice, none_within
from rubberband.spec.experiment import Experiment, ProfilesByType, entrypoint_words
from rubberband.spec.profile_file import InlineProfile
from rubberband.spec.resources import Resources
from rubberband.values.offer import BillLine, Offer
from rubberband.values.plan import Market, Plan, Policy, Stage
from rubberband.values.profile import Profile
from rubberband.values.start_times import StartTimes, start_times

if TYPE_CHECKING:
    from rubberband.cloud.aws import quota
    from rubberband.cloud.aws.calls import AwsSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Inputs of an estimate beside the file and its profile."""

    table: Table | None = None
    """Of instance types; None: that of the experiment."""
    room: Room | None = None
    """How many instances may be held; None: as many as the file says."""
    starts: StartTimes | None = None
    """How long instances take to start on this machine, where that is where they start and it has been seen."""
    notes: tuple[str, ...] = ()
    """Remarks on these: stale prices, quotas. Every screen of an estimate shows them."""


def local_terms(experiment: Experiment, home: Path) -> Terms:
    """Terms of an experiment on this machine, as runs of `home` measured them; empty terms for any other provider."""
    resources, name = experiment.resources, entrypoint_words(experiment.entrypoint)
    if not resources.kind.is_this_machine or name is None:
        return Terms()
    return Terms(starts=start_times(home, name, resources.max_instances))


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """An estimate, and what it rests on."""

    estimate: Estimate
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...]
    bill: tuple[BillLine, ...] = ()
    """The lines of the plan's bill, which add up to its (mean) cost."""

    def to_json(self) -> dict[str, Any]:
        """The object that `rubberband estimate -o json` prints."""
        data: dict[str, Any] = self.estimate.to_json()
        data["assumptions"] = [asdict(assumption) for assumption in self.assumptions]
        data["notes"] = list(self.notes)
        data["bill"] = [asdict(line) for line in self.bill]
        return data


def answer(
    experiment: Experiment,
    profiles: Profile | Mapping[str, Profile],
    terms: Terms,
    *,
    now: float,
    clock: Callable[[], float],
    policy: Policy = "optimal",
    plan: Plan | None = None,
    frontier: bool = False,
    seed: int = 0,
    most_usd: float | None = None,
) -> EstimateAnswer:
    """Estimate an experiment that starts at `now` (Unix time); no plan within the limits is an answer too.

    It then has remedies, none of which costs more than `most_usd`. `plan` is one of the user's, to be predicted instead
    of searched for. With the whole `frontier` it takes much longer. `clock` reads seconds, for the time that planning
    takes. Raises InputError for what cannot be planned.
    """
    written = experiment
    experiment, remarks, seen = with_start_times(written, terms.starts)
    found = cases(experiment, profiles, now, table=terms.table, room=terms.room)
    brackets, name = experiment.brackets(), experiment.name
    if plan is not None:
        case = case_of_plan(found, brackets)
        best = estimate_plan(brackets[0], plan, case, name, with_frontier=frontier, seed=seed)
    else:
        objective = experiment.constraints.objective
        best = estimate(
            brackets, found, policy, name, clock=clock, objective=objective, with_frontier=frontier, seed=seed
        )
    if best.job is None:
        best = _with_remedies(best, experiment, profiles, terms, now=now, clock=clock, most_usd=most_usd)
    return EstimateAnswer(
        estimate=best,
        assumptions=assumptions(best, bases(written, best.case, terms.table, seen)),
        notes=(*remarks, *notes_of(experiment, best.case, terms.table), *terms.notes),
        bill=bill_lines(best),
    )


def _with_remedies(
    best: Estimate,
    experiment: Experiment,
    profiles: Profile | Mapping[str, Profile],
    terms: Terms,
    *,
    now: float,
    clock: Callable[[], float],
    most_usd: float | None,
) -> Estimate:
    policy = cast(Policy, best.policy)

    def attempt(tried: Sequence[Case], objective: Objective) -> Reached | None:
        found = best_job(best.brackets, tried, policy, objective, seed=best.seed)
        return None if found is None else reached(found[1].prediction, found[0].constraints.confidence)

    def cases_of(changed: Experiment) -> tuple[Case, ...]:
        return cases(changed, profiles, now, table=terms.table, room=terms.room)

    remedies = find_remedies(experiment, cases_of, attempt, clock=clock, most_usd=most_usd, nearest=best.nearest)
    if not remedies and most_usd is None:
        return best
    told = advice(remedies[0]) if remedies else none_within(most_usd)
    return replace(best, remedies=remedies, reason=f"{best.obstacle}; {told}")


def case_of_plan(cases: Sequence[Case], brackets: Sequence[Sequence[Stage]]) -> Case:
    """The instance type that a plan of the user's is for. Raises InputError if that is not clear."""
    if len(brackets) > 1:
        raise InputError(
            f"--plan: a plan file holds one chain of stages and hyperband has {len(brackets)} brackets; "
            "leave --plan out, or use the scheduler sha or stages"
        )
    if len(cases) > 1:
        names = [case.offer.instance_type for case in cases]
        raise InputError(
            f"--plan: a plan is for one instance type and the experiment has {', '.join(names)}; "
            f"choose one with -s 'resources.instance_types=[{names[0]}]'"
        )
    return cases[0]


def bases(
    experiment: Experiment, case: Case, table: Table | None = None, seen: Collection[str] = ()
) -> dict[Name, Basis]:
    """Where the inputs of an estimate come from; what is not named is given in the experiment file.

    `seen` are the words in whose place there is what was seen on this machine.
    """
    resources, profile, instance_type = experiment.resources, case.profile, case.offer.instance_type
    by_file = profile.source == "file"
    profiled: Basis = "measured" if by_file else "given"
    found: dict[Name, Basis] = {
        "time per iteration": profiled,
        "noise scale of the gradients": "measured" if profile.goodput and profile.goodput.points else "given",
        "start-up of a trial": profiled if by_file or profile.trial_startup_s else "default",
        "noise of trials": profiled if profile.varies or _tells_noise(experiment, instance_type) else "default",
        "provisioning of an instance": _delay(resources.provision_delay, profile.provision_delay_s, profiled),
        "initialising of an instance": _delay(resources.init_delay, profile.init_delay_s, profiled),
        "price of an instance": _price(price_source(resources, instance_type, table=table)),
        "price of a spot instance": _price(spot_source(resources, instance_type, table=table)),
    }
    if "provision_delay" in seen:
        found["provisioning of an instance"] = "measured"
    if "init_delay" in seen:
        found["initialising of an instance"] = "measured"
    if _asks_head_price(resources, case.offer, table):
        found["head node"] = "live"
    if "interruptions_per_hour" not in resources.spot.model_fields_set:
        found["spot interruptions"] = "default"
    return found


def notes_of(experiment: Experiment, case: Case, table: Table | None = None) -> list[str]:
    """Where the prices come from, if not from the file, and what is worth knowing of the profile and the batches."""
    prices = _price_notes(experiment, case.offer, table)
    return [*prices, *batch_notes(experiment, case.profile.goodput), *(case.fixed or case.profile).notes()]


def _price_notes(experiment: Experiment, offer: Offer, table: Table | None) -> list[str]:
    resources, name = experiment.resources, offer.instance_type
    source = price_source(resources, name, table=table)
    notes = []
    if source == "free of charge":
        notes.append(f"price: {name} is {source}.")
    elif source.startswith("AWS"):
        notes.append(f"price: that of {name} is from {source}.")
    elif source != "the file":
        notes.append(f"price: that of {name} is from {source}; check it, or write resources.price_per_hour.")
    if offer.spot is not None and (spot := spot_source(resources, name, table=table)).startswith("AWS"):
        notes.append(f"price on spot: that of {name} is from {spot}.")
    if table is not None and _asks_head_price(resources, offer, table):
        head = resources.aws.head_instance_type
        notes.append(f"price of the head: that of {head} is from {row_source(table[head], resources.region)}.")
    return notes


def _asks_head_price(resources: Resources, offer: Offer, table: Table | None) -> bool:
    """Whether the price of the head is the cloud's, not the file's."""
    return table is not None and offer.head_price_usd_per_hour != resources.head_price_usd_per_hour


def _price(source: str) -> Basis:
    if source == "the file":
        return "given"
    return "live" if source.startswith("AWS") else "default"


def _delay(asked: object, of_profile_s: float | None, profiled: Basis) -> Basis:
    if asked is not None:
        return "given"
    return "default" if of_profile_s is None else profiled


def _tells_noise(experiment: Experiment, instance_type: str) -> bool:
    """Whether the experiment file says that there is no noise."""
    written: object = experiment.profile
    if isinstance(written, ProfilesByType):
        by_type: Mapping[str, object] = written.by_instance_type
        written = by_type.get(instance_type)
    return isinstance(written, InlineProfile) and bool(
        {"trial_cv", "iteration_cv", "startup_cv", "mean_cv"} & written.model_fields_set
    )


# What EC2 asks and allows today, as the terms of an estimate. Asks AWS; starts nothing and spends nothing.


def live_terms(experiment: Experiment, home: Path) -> Terms:
    """What an experiment is planned with today; prices that were asked for are kept in `home`.

    Raises InputError where the account may hold none of its instances, for a region that EC2 does not have, and where
    there is no boto3 to ask with.
    """
    if not experiment.resources.kind.is_rented:
        return local_terms(experiment, home)
    from rubberband.cloud.aws.calls import open_aws

    session = open_aws(experiment.resources.region)
    table = live_table(experiment.resources, home, session=session)
    from rubberband.cloud.aws.side_costs import with_side_facts

    beside = with_side_facts(table, session, experiment.resources)
    stale = tuple(
        f"AWS prices are not available ({note}); earlier ones, or the catalogue's, are used instead."
        for note in table.notes
    )
    rooms, unknown = _rooms(session, experiment, table.notes)
    markets: dict[str, dict[Market, int]] = {}
    for room in rooms:
        markets.setdefault(room.instance_type, {})[room.market] = room.instances
    if rooms and not any(room.instances for room in rooms):
        raise _no_quota(rooms, experiment.resources.max_instances)
    told = _quota_notes(rooms, experiment.resources.max_instances)
    return Terms(table=beside, room=markets, notes=(*stale, *beside.notes[len(table.notes) :], *unknown, *told))


def _rooms(
    session: AwsSession, experiment: Experiment, told: Sequence[str]
) -> tuple[Sequence[quota.Room], tuple[str, ...]]:
    """What the account may hold of each type on each market that a plan may use; or why that is not known.

    `told` is what was said of prices: it is not said again.
    """
    from rubberband.cloud.aws.quota import quotas

    resources = experiment.resources
    markets: tuple[Market, ...] = ("on_demand", "spot") if resources.market == "spot" else ("on_demand",)
    try:
        return quotas(session, types_of(resources), markets), ()
    except ProviderError as error:
        why = str(error)
    reason = "for the same reason" if why in told else why
    return (), (f"quota: not known ({reason}); max_instances={resources.max_instances} is used unchecked.",)


def _no_quota(rooms: Sequence[quota.Room], max_instances: int) -> Exception:
    return InputError(f"resources.instance_type: {rooms[0].refusal(max_instances)}")


def _quota_notes(rooms: Sequence[quota.Room], max_instances: int) -> tuple[str, ...]:
    return tuple(f"{room.note()}{_consequence(room, rooms, max_instances)}." for room in rooms)


def _consequence(room: quota.Room, rooms: Sequence[quota.Room], max_instances: int) -> str:
    """What becomes of the plan where the quota is less than what the file allows."""
    if room.instances >= max_instances:
        return ""
    if room.instances:
        return f"; no more are planned with (max_instances={max_instances})"
    if room.market == "spot":
        return "; planned without spot"
    spot = [other for other in rooms if (other.instance_type, other.market) == (room.instance_type, "spot")]
    if any(other.instances for other in spot):
        return "; a stage that is planned on demand would be refused"
    return "; it is left out"
