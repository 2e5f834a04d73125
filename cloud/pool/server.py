"""The broker's process: a pool behind a socket of this machine that only this user can open.

Each request is a line of JSON, `{"call": "launch", …}`, and so is each answer: `{"answer": …}` or `{"error": …}`. All
calls are idempotent, so that a client repeats what was cut off.
"""

from __future__ import annotations

import json
import logging
import shutil
import socketserver
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from rubberband.cloud.pool.pool import Pool
from rubberband.cloud.pool.state import Machine, PoolState, Slice
from rubberband.errors import RubberbandError
from rubberband.files import write_atomically
from rubberband.spec.pool import PoolFolder

# A pool as of now: its machines, its tenants and its bill, the JSON of `rubberband pool status`.


def snapshot(pool: Pool, name: str) -> dict[str, Any]:
    """Return the pool as JSON values: `machines`, `tenants`, `waiting`, `loans` over time, and `usd`."""
    with pool.locked:
        now, state = pool.now(), pool.state
        return {
            "name": name,
            "now": now,
            "instances": len(state.live),
            "max_instances": state.limits.instances,
            "autoscaled": state.in_use(),
            "efficiency": pool.efficiency(),
            "gpus_per_instance": state.limits.gpus,
            "gpus": sum(machine.gpus for machine in state.live.values()),
            "free_gpus": sum(m.free_gpus for m in state.live.values() if not m.retired and m.running_at is not None),
            "started": state.past_machines + len(state.machines),
            "machines": [_machine(machine, now) for machine in state.live.values()],
            "tenants": _tenants(state, now),
            "waiting": [_slice(asked, now) for asked in state.waiting()],
            "scales": [
                {"at": scaled_at, "instances": machines, "efficiency": efficiency}
                for scaled_at, machines, efficiency in state.scales
            ],
            "sizes": [{"at": changed_at, "instances": size} for changed_at, size in _sizes(state)],
            "loans": [_slice(loan, now) for loan in state.slices.values() if loan.running_at is not None],
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


def _sizes(state: PoolState) -> list[tuple[float, int]]:
    """Return the instants at which the number of running machines changed, and that number from then on."""
    changes: Counter[float] = Counter()
    for machine in state.machines.values():
        if machine.running_at is not None:
            changes[machine.running_at] += 1
            if machine.ended_at is not None:
                changes[machine.ended_at] -= 1
    instants = sorted(changes)
    return list(zip(instants, accumulate(changes[instant] for instant in instants), strict=True))


def _machine(machine: Machine, now: float) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "status": "retiring" if machine.retired and machine.status == "running" else machine.status,
        "why": machine.retired,
        "gpus": machine.gpus,
        "free_gpus": machine.free_gpus,
        "running_at": machine.running_at,
        "held_by": sorted({held.experiment for held in machine.slices}),
        "usd": machine.bill_usd(now),
    }


def _tenants(state: PoolState, now: float) -> list[dict[str, Any]]:
    """Return each run that has ever held or asked for anything, the latest last."""
    return [
        {
            "tenant": tenant,
            "experiment": slices[0].experiment,
            "gpus": sum(loan.gpus for loan in slices if loan.ended_at is None and loan.machine is not None),
            "waiting_gpus": sum(loan.gpus for loan in slices if loan.ended_at is None and loan.machine is None),
            "since": slices[0].requested_at,
            "usd": sum(loan.bill_usd(now) for loan in slices),
        }
        for tenant, slices in state.tenants.items()
    ]


def _slice(loan: Slice, now: float) -> dict[str, Any]:
    return {
        "tenant": loan.tenant,
        "experiment": loan.experiment,
        "instance": loan.instance,
        "gpus": loan.gpus,
        "machine": None if loan.machine is None else loan.machine.name,
        "requested_at": loan.requested_at,
        "running_at": loan.running_at,
        "ended_at": loan.ended_at,
        "was_warm": loan.machine is not None and (loan.machine.running_at or now) < loan.requested_at,
        "reason": loan.reason,
        "usd": loan.bill_usd(now),
    }


_log = logging.getLogger(__name__)
_PLACE = "rb-pool-"
MOST_BYTES = 1 << 20
"""Longest request."""


class PoolServer:
    """Answers tenants, and looks after the pool, until it is asked to stop."""

    def __init__(self, folder: PoolFolder, pool: Pool, *, look_s: float) -> None:
        self._folder = folder
        self._pool = pool
        self._look_s = look_s
        self._stop = threading.Event()
        self._calls: Mapping[str, Callable[..., Any]] = {
            "ping": lambda: True,
            "launch": pool.launch,
            "describe": lambda tenant: [asdict(lent) for lent in pool.describe(tenant)],
            "release": lambda tenant, instance, fault="": asdict(pool.release(tenant, instance, fault)),
            "renew": pool.renew,
            "leave": pool.leave,
            "head": lambda: _head(pool.head()),
            "ensure_head": lambda: _head(pool.ensure_head()),
            "traits": pool.traits,
            "slowness": pool.slowness,
            "last_words": pool.last_words,
            "waiting": pool.waiting,
            "scale": pool.scale,
            "status": lambda: snapshot(pool, folder.name),
            "month_usd": pool.month_usd,
            "stop": self.stop,
        }

    def stop(self) -> None:
        """End the pool's machines, and the process."""
        self._stop.set()

    def run(self) -> None:
        """Serve until `stop` is called; then end every machine and note that the pool is closed."""
        self._clear_former_place()
        place = Path(tempfile.mkdtemp(prefix=_PLACE, dir="/tmp"))  # a socket's path has at most 107 characters
        server = _PoolServer(str(place / "socket"), _Handler)
        server.calls = self._calls
        threading.Thread(target=server.serve_forever, daemon=True, name="pool-server").start()
        try:
            write_atomically(self._folder.address, str(place / "socket").encode(), durable=False, mode=0o600)
            while not self._stop.is_set():
                try:
                    self._pool.look()
                except OSError as error:  # a full disk: nothing was decided, and the next look tries again
                    _log.warning("the journal cannot be written: %s", error)
                self._stop.wait(self._look_s)
            self._pool.close()
            self._folder.note_closed()
        finally:
            server.shutdown()
            server.server_close()
            shutil.rmtree(place, ignore_errors=True)

    def _clear_former_place(self) -> None:
        """Remove the socket's folder of a broker that was killed."""
        with suppress(OSError):
            former = Path(self._folder.address.read_text()).parent
            if former.parent == Path("/tmp") and former.name.startswith(_PLACE):
                shutil.rmtree(former)


def _head(head: Any) -> dict[str, Any] | None:
    return None if head is None else {**asdict(head), "environment": dict(head.environment)}


class _PoolServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    calls: Mapping[str, Callable[..., Any]]


class _Handler(socketserver.StreamRequestHandler):
    """Answers the one request of a connection."""

    def handle(self) -> None:
        with suppress(OSError):  # the client is gone, and repeats its request
            line = self.rfile.readline(MOST_BYTES)
            if line.endswith(b"\n"):
                self.wfile.write(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        calls = cast(_PoolServer, self.server).calls
        try:
            request = json.loads(line)
            return {"answer": calls[request.pop("call")](**request)}
        except RubberbandError as error:
            return {"error": str(error), "kind": type(error).__name__}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "kind": "ProviderError"}
