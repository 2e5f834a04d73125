"""Simulates a workload on a pool, under one policy after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rubberband.app import workload
from rubberband.cloud.catalogue import catalogue, nearest_types
from rubberband.errors import InputError
from rubberband.planner.sharing import Capacity, make_policy
from rubberband.planner.sharing.jobs import Elasticity
from rubberband.planner.sharing.simulation import INTERVAL_S, Outcome, SimulatedJob, simulate
from rubberband.spec.pool import PoolFile

ELASTICITY: Mapping[str, Elasticity] = {"tiresias": "rigid", "optimus": "fixed_batch"}
"""Policy -> what it may change of a job; the others may change all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Outcomes of one workload on one pool."""

    pool: str
    workload: str
    capacity: Capacity
    usd_per_hour: float
    """Price of all instances of the pool."""
    outcomes: Mapping[str, Outcome]
    """Policy -> outcome, in the order asked."""

    def to_json(self) -> dict[str, object]:
        """Return the figures as JSON values."""
        return {
            "schema": "rubberband.simulation/1",
            "pool": self.pool,
            "workload": self.workload,
            "gpus": self.capacity.gpus,
            "policies": {name: outcome.summary(self.usd_per_hour) for name, outcome in self.outcomes.items()},
        }


def simulated(
    pool: PoolFile,
    file: Path,
    policies: Sequence[str],
    traces: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Simulation:
    """Run the workload in `file` under every policy; with `traces` it is one of AdaptDL's.

    `progress` gets a line after each policy. Raises InputError for a policy, pool or file that cannot be used.
    """
    capacity, usd_per_hour = _capacity(pool)
    made = {name: make_policy(name) for name in policies}
    outcomes: dict[str, Outcome] = {}
    for name, policy in made.items():
        elasticity = ELASTICITY.get(name.partition(":")[0], "adaptive")
        jobs: Sequence[SimulatedJob]
        if traces is None:
            jobs = workload.read_jobs(file, capacity.gpus, capacity.gpus_per_instance, elasticity)
        else:
            jobs = workload.read_traces(file, traces, elasticity)
        outcomes[name] = simulate(jobs, capacity, policy, interval_s=None if traces is None else INTERVAL_S)
        progress(f"{name}: {len(jobs)} jobs simulated in {outcomes[name].cpu_s:.1f} CPU s")
    return Simulation(
        pool=pool.name, workload=file.name, capacity=capacity, usd_per_hour=usd_per_hour, outcomes=outcomes
    )


def _capacity(pool: PoolFile) -> tuple[Capacity, float]:
    """Return the instances of a pool, and what all of them cost per hour."""
    row = None
    if pool.instance_type is not None and (pool.gpus_per_instance is None or pool.price_usd_per_hour is None):
        row = catalogue().get(pool.instance_type)
    gpus = pool.gpus_per_instance if pool.gpus_per_instance is not None else 0 if row is None else row.gpus
    if not gpus and row is None:
        near = nearest_types(str(pool.instance_type), catalogue())
        raise InputError(f"the catalogue does not know {pool.instance_type!r}; {near} or set gpus_per_instance")
    if not gpus:
        raise InputError(f"instance_type {pool.instance_type!r} has no GPUs; choose another, or set gpus_per_instance")
    price = pool.price_usd_per_hour
    if price is None:
        price = 0.0 if row is None else row.prices_usd_per_hour.get(pool.region, 0.0)
    return Capacity(instances=pool.instances, gpus_per_instance=gpus), price * pool.instances
