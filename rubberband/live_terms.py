"""What EC2 asks and allows today, as the terms of an estimate. Asks AWS; starts nothing and spends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rubberband.cloud.catalogue import types_of
from rubberband.cloud.prices import live_table
from rubberband.errors import InputError, ProviderError
from rubberband.estimating import Terms, local_terms
from rubberband.experiment import Experiment
from rubberband.plan import Market

if TYPE_CHECKING:
    from rubberband.cloud.aws import quota
    from rubberband.cloud.aws.machines import Session


def live_terms(experiment: Experiment, home: Path) -> Terms:
    """What an experiment is planned with today; prices that were asked for are kept in `home`.

    Raises InputError where the account may hold none of its instances, for a region that EC2 does not have, and where
    there is no boto3 to ask with.
    """
    if experiment.resources.provider != "aws":
        return local_terms(experiment, home)
    from rubberband.cloud.aws.extra import open_aws

    session = open_aws(experiment.resources.region)
    table = live_table(experiment.resources, home, session=session)
    from rubberband.cloud.aws.side_costs import with_side_facts

    beside = with_side_facts(table, session, experiment.resources)
    stale = tuple(
        f"prices of AWS are missing ({note}); those that it told before, or the catalogue's, stand in."
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
    session: Session, experiment: Experiment, told: Sequence[str]
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
    return (), (f"quota: not known ({reason}); max_instances={resources.max_instances} is taken as it is.",)


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
