"""What a new driver makes of the instances that it finds: which go on, which are asked for again, which are lost."""

from __future__ import annotations

from rubberband.executor.events import Command, DriverResumed, LaunchInstance, ReleaseInstance
from rubberband.executor.state import InstanceRecord, InstanceStatus, State

Loss = tuple[InstanceRecord, float, str]
"""What is gone, since when, and why."""


def sort_out(state: State, event: DriverResumed) -> tuple[list[Command], list[Loss]]:
    """Adopt what lives, and say what to order and what is lost. Writes the records of what is not lost."""
    live = {found.instance: found for found in event.live}
    ended = {found.instance: found for found in event.ended}
    commands: list[Command] = []
    lost: list[Loss] = []
    for record in state.instances.values():
        if record.status in (InstanceStatus.ENDED, InstanceStatus.REFUSED):
            continue
        if record.instance in live:
            record.running_at = live[record.instance].running_at
            commands += _adopt(record)
        elif record.instance in ended:
            record.running_at = ended[record.instance].running_at
            lost.append((record, ended[record.instance].ended_at, "ended while no driver watched"))
        elif record.status is InstanceStatus.RELEASING and record.running_at is None:
            record.status, record.reason = InstanceStatus.REFUSED, "given up before it ran"
        elif record.running_at is None:
            commands.append(LaunchInstance(instance=record.instance))
        else:
            lost.append((record, event.occurred_at, "unknown to the provider"))
    return commands, lost


def _adopt(record: InstanceRecord) -> list[Command]:
    if record.status is InstanceStatus.RELEASING:
        return [ReleaseInstance(instance=record.instance)]
    record.status = InstanceStatus.REQUESTED if record.running_at is None else InstanceStatus.RUNNING
    return []
