"""A pool as of now: its machines, its tenants and its bill, the JSON of `rubberband pool status`."""

from __future__ import annotations

from typing import Any

from rubberband.cloud.pool.pool import Pool
from rubberband.cloud.pool.state import Machine, PoolState, Slice


def standing(pool: Pool, name: str) -> dict[str, Any]:
    """Return the pool as JSON values: `machines`, `tenants`, `waiting`, `loans` over time, and `usd`."""
    with pool.locked:
        now, state = pool.now(), pool.state
        return {
            "name": name,
            "now": now,
            "instances": len(state.live),
            "max_instances": state.limits.instances,
            "gpus_per_instance": state.limits.gpus,
            "gpus": sum(machine.gpus for machine in state.live.values()),
            "free_gpus": sum(m.free_gpus for m in state.live.values() if not m.retired and m.running_at is not None),
            "started": state.past_machines + len(state.machines),
            "machines": [_machine(machine, now) for machine in state.live.values()],
            "tenants": _tenants(state, now),
            "waiting": [_slice(one, now) for one in state.waiting()],
            "loans": [_slice(one, now) for one in state.slices.values() if one.running_at is not None],
            "usd": {
                "bill": state.bill_usd(now),
                "lent": state.past_lent_usd + sum(state.lent_usd(now).values()),
                "idle": state.idle_usd(now),
                "month": state.month_usd(now),
                "per_hour": state.usd_per_hour(),
                "max_per_hour": state.limits.max_usd_per_hour,
                "max_per_month": state.limits.max_usd_per_month,
            },
        }


def _machine(machine: Machine, now: float) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "status": "retiring" if machine.retired and machine.status == "running" else machine.status,
        "why": machine.retired,
        "gpus": machine.gpus,
        "free_gpus": machine.free_gpus,
        "running_at": machine.running_at,
        "held_by": sorted({one.experiment for one in machine.slices}),
        "usd": machine.bill_usd(now),
    }


def _tenants(state: PoolState, now: float) -> list[dict[str, Any]]:
    """Return each run that has ever held or asked for anything, the latest last."""
    found = []
    for tenant, slices in state.tenants.items():
        held = [one for one in slices if one.ended_at is None]
        found.append(
            {
                "tenant": tenant,
                "experiment": slices[0].experiment,
                "gpus": sum(one.gpus for one in held if one.machine is not None),
                "waiting_gpus": sum(one.gpus for one in held if one.machine is None),
                "since": slices[0].requested_at,
                "usd": sum(one.bill_usd(now) for one in slices),
            }
        )
    return found


def _slice(one: Slice, now: float) -> dict[str, Any]:
    return {
        "tenant": one.tenant,
        "experiment": one.experiment,
        "instance": one.instance,
        "gpus": one.gpus,
        "machine": None if one.machine is None else one.machine.name,
        "requested_at": one.requested_at,
        "running_at": one.running_at,
        "ended_at": one.ended_at,
        "was_warm": one.machine is not None and (one.machine.running_at or now) < one.requested_at,
        "reason": one.reason,
        "usd": one.bill_usd(now),
    }
