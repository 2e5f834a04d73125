"""Prices and quotas of an account on EC2 today, what the user has reserved there, and the checks before a run.

These are parts of the provider's record. AWS is asked; nothing is started or spent. boto3 is imported after it was
found to be there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rubberband.cloud.aws import calls
from rubberband.cloud.aws.prices import live_table
from rubberband.cloud.catalogue import LiveTable, types_of
from rubberband.cloud.offers import offers
from rubberband.cloud.provider import Today
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Resources
from rubberband.values.plan import MARKETS, Market

if TYPE_CHECKING:
    from rubberband.cloud.aws import capacity


def prices(resources: Resources, home: Path, until: float) -> Today:
    """Return prices, quotas and notes, also on what AWS does not say; prices are cached in `home`.

    Raises InputError if the account's quota allows none of the instances, if what is reserved ends before `until` (Unix
    time), for an unknown region, and without boto3.
    """
    session = calls.open_aws(resources.region)
    from rubberband.cloud.aws.capacity import block_note
    from rubberband.cloud.aws.quotes import with_side_facts

    table = live_table(resources, home, session=session)
    beside = with_side_facts(table, session, resources)
    if resources.aws.reservation is not None:
        return _reserved(session, resources, beside, until)
    stale = tuple(
        f"AWS prices are not available ({note}); earlier ones, or the catalogue's, are used instead."
        for note in table.notes
    )
    rooms, unknown = _rooms(session, resources)
    if rooms and not any(room.instances for room in rooms):
        raise InputError(f"resources.instance_type: {rooms[0].refusal(resources.max_instances)}")
    notes = (f"{room.note()}{_consequence(room, resources.max_instances)}." for room in rooms)
    return Today(
        table=beside,
        room=_by_type(rooms),
        notes=(*stale, *beside.notes[len(table.notes) :], *unknown, *notes),
        blocks=lambda *plan: block_note(session, *plan),
    )


def checked(
    resources: Resources,
    home: Path,
    until: float | None,
    announce: Callable[[str], None],
    *,
    on_head: bool = True,
    together: bool = True,
) -> Today:
    """Return prices and quotas of a run that begins now, after checking that EC2 can run it.

    `announce` gets a line on each remark; `on_head` and `together` as in `rubberband.cloud.aws.preflight`. Raises
    InputError (with the fix) for the first problem.
    """
    session = calls.open_aws(resources.region)
    from rubberband.cloud.aws.capacity import quotas
    from rubberband.cloud.aws.preflight import preflight, sign_in
    from rubberband.cloud.aws.quotes import with_side_facts

    sign_in(session)  # before prices, which would be missing for the same reason
    table = with_side_facts(live_table(resources, home, session=session), session, resources)
    found = preflight(resources, offers(resources, table=table), session=session, on_head=on_head, together=together)
    for note in (*table.notes, *found):
        announce(note)
    if resources.aws.reservation is not None:
        return _reserved(session, resources, table, until)
    return Today(table=table, room=_by_type(quotas(session, types_of(resources), MARKETS)))


def reserved(resources: Resources, until: float) -> list[str]:
    """Return notes on what the user has reserved. Raises InputError if it ends before `until` (Unix time)."""
    if resources.aws.reservation is None or resources.instance_type is None:
        return []
    session = calls.open_aws(resources.region)
    from rubberband.cloud.aws.capacity import check_time, reservation_of
    from rubberband.cloud.aws.errors import in_one_line

    with in_one_line():
        held = reservation_of(session, resources.aws.reservation, resources.instance_type)
    return [] if held is None else [*check_time(held, time.time(), until)]


def _reserved(session: calls.AwsSession, resources: Resources, table: LiveTable, until: float | None) -> Today:
    """Return prices of capacity that the user has reserved; no quota limits it further.

    Raises InputError if it cannot be used as the experiment asks.
    """
    from rubberband.cloud.aws.capacity import check_size, check_time, reservation_of, with_reservation
    from rubberband.cloud.aws.errors import in_one_line

    with in_one_line():
        held = reservation_of(session, resources.aws.reservation, types_of(resources)[0])
    assert held is not None, "the experiment names one"
    check_size(held, resources)
    notes = [*check_time(held, time.time(), until)]
    priced = with_reservation(table, held, resources)
    return Today(table=priced, notes=tuple(f"{note}." for note in (*priced.notes, *notes)))


def _by_type(rooms: Sequence[capacity.Room]) -> dict[str, dict[Market, int]]:
    found: dict[str, dict[Market, int]] = {}
    for room in rooms:
        found.setdefault(room.instance_type, {})[room.market] = room.instances
    return found


def _rooms(session: calls.AwsSession, resources: Resources) -> tuple[Sequence[capacity.Room], tuple[str, ...]]:
    """Return the account's quota for each type on each market that a plan may use, or a remark why it is unknown."""
    from rubberband.cloud.aws.capacity import quotas

    markets = MARKETS if resources.market == "spot" else MARKETS[:1]
    try:
        return quotas(session, types_of(resources), markets), ()
    except ProviderError as error:
        return (), (f"quota: not known ({error}); max_instances={resources.max_instances} is used unchecked.",)


def _consequence(room: capacity.Room, max_instances: int) -> str:
    """Return the effect on the plan of a quota below the file's max_instances."""
    if room.instances >= max_instances:
        return ""
    if room.instances:
        return f"; no more are planned with (max_instances={max_instances})"
    return "; it is left out"
