"""All that comes of the words of an experiment: its job, plan and header, its trials' segments, requests to a cloud.

Nothing is started. `wires` returns name -> value, plain, so that two experiments are compared wire by wire.
"""

from __future__ import annotations

import base64
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rubberband.cloud.aws import provider as aws
from rubberband.cloud.aws.head import ensure_head
from rubberband.cloud.provider import ClusterNode, ClusterRequest, Head
from rubberband.cloud.ray_cluster import provider as ray_cluster
from rubberband.cloud.ray_cluster.view import ClusterView
from rubberband.cloud.ray_head.ray_node import RayHead
from rubberband.executor import (
    ExperimentFolder,
    Job,
    RunSpec,
    Slot,
    StartTrial,
    cluster_request,
    entrypoint_of,
    open_provider,
    sampling,
)
from rubberband.executor.ray import async_attempt
from rubberband.executor.ray import backend as backends
from rubberband.executor.run import trackers
from rubberband.executor.run.notices import addresses, all_of
from rubberband.executor.training import run_spec
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, planned
from rubberband.running.job import job_of
from rubberband.running.profile import profiling_limits
from rubberband.running.profile_cache import content_to_measure
from rubberband.spec.loading import experiment_of
from rubberband.values.plan import Spent
from tests.builders import populations
from tests.builders.aws_account import Account
from tests.builders.filled import plain
from tests.builders.memory import MemoryJournal
from tests.ec2.world import Reservation

NOW = 1_800_000_000.0
ENVIRONMENT = {"FIRST": "https://one/a", "SECOND": "https://two/b", "A_SECRET": "hidden", "B_SECRET": "hidden"}
Wires = dict[str, Any]


def wires(words: Mapping[str, Any], folder: Path) -> Wires:
    """Return what the words come to; `folder` is a home, whose path no wire has."""
    return {name: _without(str(folder), value) for name, value in _wires(words, folder).items()}


def _without(path: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_without(path, each) for each in value]
    return value.replace(path, "HOME") if isinstance(value, str) else value


def _wires(words: Mapping[str, Any], folder: Path) -> Wires:
    experiment = experiment_of(dict(words))
    home = ExperimentFolder(home=folder, name=experiment.name)
    profiles, spent = experiment.loaded_profiles(), Spent()
    options = PlanningOptions(now=NOW, clock=lambda: 0.0)
    found = planned(experiment, profiles, PricesAndQuotas(), options)
    job = job_of(found, spent)
    entrypoint = None if experiment.entrypoint is None else entrypoint_of(experiment)
    with mock.patch("secrets.token_hex", return_value="run"), mock.patch.object(run_spec, "files_of"):
        spec = RunSpec.of(found.experiment, entrypoint, home, spent)
    taken: Wires = dict(_fields("job", job, but=("offer", "profile", "plan", "prediction")))
    for part in ("offer", "profile"):
        taken |= _fields(part, getattr(job, part))
    taken["plan"] = plain((job.plan, job.prediction))
    taken |= _fields("header", spec, but=("experiment", "code"))
    taken |= {"lease": spec.lease_s, "header.provider": spec.to_json()["provider"]}
    taken["environment"] = plain(experiment.resources.environment(ENVIRONMENT))
    taken["notices"] = [plain(one) for one in addresses(all_of(experiment.notify or (), ENVIRONMENT), ENVIRONMENT)]
    taken["trackers"] = [_tracked(tracker, home.path) for tracker in experiment.track or ()]
    if spec.experiment.search.sampler.learns:
        taken["drawn"] = _drawn(spec)
    if job.stages[0].exchange is not None:
        taken["explored"], taken["guided"] = _explored(spec), _guided(spec)
    if entrypoint is not None:
        taken["measured"] = plain(content_to_measure(experiment, entrypoint))
    taken["measuring"] = plain(profiling_limits(experiment, job.offer, 1, found.estimate.problem.constraints))
    if not experiment.resources.kind.is_simulated:
        taken |= _backend(spec, job, folder)
    if experiment.resources.provider == "aws":
        taken |= _ec2(spec, job, home)
    if experiment.resources.kind.is_borrowed:
        taken |= _ray_cluster(spec, job, home)
    return taken


def _fields(name: str, value: Any, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    return ((f"{name}.{each.name}", plain(getattr(value, each.name))) for each in fields(value) if each.name not in but)


def _tracked(words: Any, folder: Path) -> Any:
    """What a tracker does at a start and a report: the paths that it writes to, or what it asks of its library."""
    library, run = mock.MagicMock(), SimpleNamespace(name="wired", metric="loss", is_resumed=False)
    report = SimpleNamespace(trial=0, config={}, metrics={}, iterations=1, reported_at=0.0, elapsed_s=0.0, stage=0)
    names = ("mlflow", "mlflow.tracking", "mlflow.entities", "wandb", "tensorboardX", "tensorboardX.summary")
    with mock.patch.dict(sys.modules, dict.fromkeys(names, library)), mock.patch.object(trackers, "_is_installed"):
        tracker: Any = trackers.TRACKERS[words.type](words, folder, "run")
        tracker.open({})
        tracker.on_experiment_start(run)
        tracker.on_trial_report(report)
        tracker.flush()
    asked = [
        (name, [str(each) for each in (*given, *named.items()) if "Mock" not in str(each)])
        for name, given, named in library.mock_calls
        if not name.startswith("__")
    ]
    return [words.type, str(asked), str(getattr(tracker, "_path", ""))]


def _explored(spec: RunSpec) -> Any:
    """The configurations that a population goes on with, by many numbers."""
    search = spec.experiment.search
    return [
        search.scheduler.explored(search.space, spec.configurations[0], lambda path, purpose, by=at: by / 40)
        for at in range(1, 40)
    ]


def _guided(spec: RunSpec) -> bool:
    """Whether a model chooses numbers in a run on the virtual clock."""
    journal = MemoryJournal()
    populations.run(spec.experiment, journal=journal)
    return any(event.reason.endswith("by gp") for event in populations.forks(journal))


def _drawn(spec: RunSpec) -> Any:
    """The configurations after twelve results with two metrics."""
    search = spec.experiment.search
    done = [{"lr": 0.001 * (trial + 1)} for trial in range(12)]
    metrics = [{"loss": abs(each["lr"] - 0.004), "size": each["lr"]} for each in done]
    report = [[SimpleNamespace(metrics=each)] for each in metrics]
    trials = [SimpleNamespace(reports=each, inherited=0, ended=False, stopped_at=None, status=None) for each in report]
    state: Any = SimpleNamespace(trials=trials, sampled_configs={})
    return plain(sampling.draw(search, state, dict(enumerate(done)), [12, 13, 14], lambda: 0.0).configurations)


def _backend(spec: RunSpec, job: Job, folder: Path) -> Wires:
    """The orders to a trial's workers."""
    taken: list[Any] = []

    class Attempt(SimpleNamespace):
        def __init__(self, *order: Any) -> None:
            taken.extend([type(self).__name__, *order[:3]])

        def begin(self) -> None: ...

    provider: Any = SimpleNamespace(device="cpu", remote=False, node="", node_label="", group=None)
    started = StartTrial(
        trial=0, attempt=1, gang=(Slot(instance="a", gpu=0),), from_iterations=0, until_iterations=1, checkpoint=None
    )
    spec = RunSpec(**{each.name: getattr(spec, each.name) for each in fields(spec)} | {"configurations": [{"lr": 0.5}]})
    with (
        mock.patch.object(backends, "Attempt", Attempt),
        mock.patch.object(async_attempt, "AsyncAttempt", type("AsyncAttempt", (Attempt,), {})),
        mock.patch.object(backends, "Leases") as leases,
        mock.patch.object(backends, "RayFleet") as fleet,
    ):
        backend = backends.RayBackend(
            provider,
            spec,
            store=mock.Mock(),
            gpus_per_instance=job.offer.gpus,
            logs=folder / "logs",
            known_points=() if job.profile.goodput is None else job.profile.goodput.points,
        )
        backend.execute(started)
    kind, _, segment, log = taken
    kept_bytes = fleet.call_args.kwargs["log_limit_bytes"], log.limit_bytes
    wire = dict(_fields("segment", segment, but=("config",)))
    return wire | {"attempt": kind, "logs": kept_bytes, "leases": leases.call_args.kwargs["lease_s"]}


def _ec2(spec: RunSpec, job: Job, home: ExperimentFolder) -> Wires:
    """The requests to EC2 of an instance and of a head, with their boot scripts by variable."""
    account = _account()
    session = account.fake.session("admin")
    head = Head(address="10.0.0.5:6379", temp_dir=None, environment={})
    taken: Wires = {}
    with ExitStack() as stack:
        patch = mock.patch
        stack.enter_context(patch.object(aws, "own_place", return_value=account.place))
        stack.enter_context(patch.object(RayHead, "ensure", lambda _: head))
        stack.enter_context(patch.object(RayHead, "living", lambda _: head))
        opened = stack.enter_context(patch.object(aws, "open_session", return_value=session))
        heads = stack.enter_context(patch.object(aws, "RayHead", wraps=RayHead))
        guards = stack.enter_context(patch.object(aws, "Schedules"))
        opening, no_time = aws.AwsProvider, {"sleep": _no_sleep, "clock": lambda: account.now}
        at_once = mock.Mock(side_effect=lambda *named, **more: opening(*named, **more | no_time))
        made = stack.enter_context(patch.object(aws, "AwsProvider", at_once))
        stack.enter_context(patch.dict("os.environ", {"RUBBERBAND_HOME": str(home.home)}))
        asked = cluster_request(home, spec, job.offer)
        provider = open_provider(replace(asked, highest_price_usd_per_hour=job.highest_price_usd_per_hour))
        stack.callback(provider.close)
        taken["ec2.region"], taken["ec2.host"] = opened.call_args.args, heads.call_args.kwargs["host"]
        taken["ec2.guard"] = [call.args[1] for call in guards.call_args_list]
        taken["ec2.offers"] = plain(made.call_args.kwargs["offers"])
        market = job.plan.stages[0].market
        provider.launch("a", market)
        taken |= _requests("worker", account)
    account = _account()
    admin = account.fake.session("admin")
    ensure_head(admin, spec.experiment.resources, clock=lambda: account.now, sleep=account.sleep)
    return taken | _requests("head", account)


def _account() -> Account:
    """With all that a line of `resources.aws` names."""
    account = Account()
    world = account.fake.world
    for name in ("mine", "yours"):
        world.key_pairs.add(name)
    for name, zone in (("cr-1", world.zones[0]), ("cr-2", world.zones[1])):
        world.reservations[name] = Reservation(
            reservation_id=name, instance_type="g5.xlarge", zone=zone, instances=4, begins_at=0.0
        )
    return account


def _no_sleep(seconds: float) -> None:
    pass


def _requests(role: str, account: Account) -> Wires:
    """The parameters of the first launch, by name; its UserData by the variables of the script."""
    call = next(call for call in account.fake.calls if call.operation == "RunInstances")
    script = base64.b64decode(call.params["UserData"]).decode()
    values = dict(re.findall(r"^([A-Z_0-9]+)=(.*)$", script, re.M))
    found = {f"{role}.{name}": value for name, value in call.params.items() if name not in ("UserData", "ClientToken")}
    return found | {f"{role}_script.{name}": shlex.split(value) for name, value in values.items()}


def _ray_cluster(spec: RunSpec, job: Job, home: ExperimentFolder) -> Wires:
    """What a head is asked for a group of GPUs."""
    nodes = [
        ClusterNode(
            node=name,
            address=f"10.0.0.{name}",
            gpus=8,
            free_gpus=8,
            cpus=8,
            free_cpus=8,
            accelerator="T4",
            labels={"kind": kind},
        )
        for name, kind in (("1", "a"), ("2", "b"))
    ]
    asked: list[Any] = []
    group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "1"))
    request = ClusterRequest(
        experiment=spec.experiment.name,
        run="run",
        directory=home.instances,
        home=home.home,
        resources=spec.experiment.resources,
        offer=job.offer,
    )

    def view(address: str) -> ClusterView:
        asked.append(address)
        return ClusterView(address=address, nodes=tuple(nodes), ray_version="", python_version="")

    def make(bundles: Any, selector: Any, name: str) -> Any:
        asked.append([plain(list(map(dict, bundles))), dict(selector)])
        return group

    with (
        mock.patch.object(ray_cluster, "view", view),
        mock.patch.object(ray_cluster, "require_versions"),
        mock.patch.object(ray_cluster, "_make_group", make),
        mock.patch.object(ray_cluster, "_remove_group"),
        mock.patch.object(ray_cluster, "_tables", dict),
        mock.patch.object(ray_cluster, "answers", return_value=True),
        mock.patch.object(ray_cluster.RayClusterProvider, "_is_connected", return_value=True),
    ):
        provider = ray_cluster.open_cluster(request)
        provider.launch("a")
        provider.close()
    address, group_of = asked
    return {"ray.address": address, "ray.group": group_of}
