"""What a new driver makes of the instances that it finds: which go on, which are asked for again, which are lost."""

from __future__ import annotations

from rubberband.executor.events import (
    Command,
    DriverResumed,
    EndedInstance,
    LaunchInstance,
    LiveInstance,
    ReleaseInstance,
)
from rubberband.executor.state import GONE, InstanceRecord, InstanceStatus, State

Loss = tuple[InstanceRecord, float, str, bool]
"""What is gone, since when, why, and whether the provider took it away."""


def sort_out(state: State, event: DriverResumed) -> tuple[list[Command], list[Loss]]:
    """Adopt what lives, and say what to order and what is lost. Writes the records of what is not lost."""
    live = {found.instance: found for found in event.live}
    ended = {found.instance: found for found in event.ended}
    commands: list[Command] = []
    lost: list[Loss] = []
    for record in state.instances.values():
        if record.status in GONE:
            continue
        if record.instance in live:
            found = live[record.instance]
            _note_running(record, found)
            commands += _adopt(record)
        elif record.instance in ended:
            gone = ended[record.instance]
            _note_running(record, gone)
            lost.append((record, gone.ended_at, "ended while no driver watched", gone.preempted))
        elif record.running_at is not None:
            lost.append((record, event.occurred_at, "unknown to the provider", False))
        elif record.status is InstanceStatus.REQUESTED:
            commands.append(
                LaunchInstance(instance=record.instance, market=record.market, first_lease_s=record.first_lease_s)
            )
        else:
            record.status, record.reason = InstanceStatus.REFUSED, "given up before it ran"
    state.rent_changed()
    return commands, lost


def _note_running(record: InstanceRecord, found: LiveInstance | EndedInstance) -> None:
    record.running_at = found.running_at
    if found.price_usd_per_hour is not None:
        record.price_usd_per_hour = found.price_usd_per_hour
    if found.hour_prices_usd is not None:
        record.hour_prices_usd = found.hour_prices_usd


def _adopt(record: InstanceRecord) -> list[Command]:
    if record.status in (InstanceStatus.RELEASING, InstanceStatus.LEAVING):
        record.status = InstanceStatus.RELEASING
        return [ReleaseInstance(instance=record.instance)]
    record.status = InstanceStatus.REQUESTED if record.running_at is None else InstanceStatus.RUNNING
    return []
