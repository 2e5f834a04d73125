"""One workload twice: as `rubberband simulate` does it, and with real controllers and the real broker on virtual
instances. Both decide by the same policy."""

from __future__ import annotations

from dataclasses import replace

from rubberband.api.experiments.sharing import PoolDivision
from rubberband.cloud.virtual import InstanceFaults, VirtualProvider
from rubberband.executor import Job
from rubberband.planner.exact.model import predict
from rubberband.planner.sharing import Capacity, make_policy
from rubberband.planner.sharing.jobs import CurveJob
from rubberband.planner.sharing.simulation import simulate
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.harness.pool_runs import FaultyCloud
from tests.harness.shared_pool import GPUS, LEASE_S, MARGIN_S, Member, SharedRun, wrong_end

INSTANCES, STARTUP_S = 4, 5.0
WORKLOAD = (
    ("a", 0.0, 400, 20.0),
    ("b", 60.0, 60, 40.0),
    ("c", 120.0, 200, 10.0),
    ("d", 600.0, 30, 60.0),
    ("e", 900.0, 100, 30.0),
)
"""Name, second of the submission, iterations, and seconds of one on a single GPU."""


def profile_of(single_s: float) -> Profile:
    """Return a profile that scales as n^0.8."""
    sizes = (1, 2, 4, 8, 16)
    return Profile(seconds_per_iteration={n: single_s / n**0.8 for n in sizes}, trial_startup_s=STARTUP_S)


def simulated_jcts_s(policy: str) -> dict[str, float]:
    jobs = [
        CurveJob(
            name=name,
            submitted_at=at,
            kind="k",
            seconds=[iterations * profile_of(single_s).iteration_s(n) for n in range(1, INSTANCES * GPUS + 1)],
            resize_s=STARTUP_S,
            min_gpus=GPUS,
        )
        for name, at, iterations, single_s in WORKLOAD
    ]
    capacity = Capacity(instances=INSTANCES, gpus_per_instance=GPUS)
    return {job.name: job.jct_s for job in simulate(jobs, capacity, make_policy(policy), interval_s=None).jobs}


def run_jcts_s(policy: str) -> dict[str, float]:
    """Return the completion times of real experiments on the real broker; nothing fails there."""
    run = QuietRun(policy)
    wrong = wrong_end(run)
    assert not wrong, wrong
    return {member.name: member.ended_at - member.arrives_at for member in run.members}


class QuietRun(SharedRun):
    """The workload on a pool without faults. Instances start in 35 s; experiments want to end soon."""

    def __init__(self, policy: str) -> None:
        super().__init__(0)
        self.machine_faults = self.driver_faults = self.broker_faults = 0.0
        self.offer = replace(
            self.offer, max_instances=INSTANCES, provision_delay_s=30.0, init_delay_s=5.0, data_usd_per_instance=0.0
        )
        self.limits = replace(
            self.limits,
            instances=INSTANCES,
            price_usd_per_hour=self.offer.price_usd_per_hour,
            once_usd=0.0,
            idle_s=300.0,
            max_usd_per_hour=None,
            max_usd_per_month=None,
        )
        self.shared = replace(self.shared, instances=INSTANCES, policy=policy)
        self.division = PoolDivision(self.shared)
        self.below = VirtualProvider(
            "pool", self.clock, offer=self.offer, lease_s=LEASE_S, faults_of=lambda *_: InstanceFaults()
        )
        self.cloud = FaultyCloud(self.below, self.rng, 0.0)
        self.members = [self._experiment(*row) for row in WORKLOAD]

    def _experiment(self, name: str, at: float, iterations: int, single_s: float) -> Member:
        offer, profile = replace(self.offer, minimum_billed_s=0.0), profile_of(single_s)
        stages = (Stage(trials=1, iterations=iterations),)
        widest = StagePlan(instances=INSTANCES, gpus_per_trial=INSTANCES * GPUS, market="on_demand")
        job = Job(
            name=name,
            stages=stages,
            plan=Plan(stages=(widest,)),
            prediction=predict(stages, Plan(stages=(widest,)), profile, offer),
            offer=offer,
            profile=profile,
            metric="score",
            mode="max",
            objective="min_time",
            max_cost_usd=1000.0,
            release_margin_s=MARGIN_S,
            replan=True,
            lease_s=LEASE_S,
            start_attempts=3,
        )
        member = Member(self, job, self.start_at + at, None)
        member.begins_at = member.arrives_at + 1.0
        return member
