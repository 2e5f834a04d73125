"""Every provider of ours conforms."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from rubberband.cloud.aws.calls import AwsSession, Machines
from rubberband.cloud.aws.client import open_session
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.pool import FileJournal, Pool, PoolLimits, PoolProvider, PoolServer, open_cluster
from rubberband.cloud.provider import ClusterRequest
from rubberband.cloud.ray_cluster import RayClusterProvider
from rubberband.cloud.ray_head import ray_node
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.executor import Connection
from rubberband.spec.pool import PoolFolder
from rubberband.spec.resources import Resources
from rubberband.testing.provider_conformance import TAKEN, ProviderConformance, ProviderUnderTest
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Market
from tests.builders import fake_nodes
from tests.builders.fake_ec2 import ONE_GPU, StubHead, World, boot_script, machines_of
from tests.builders.memory import MemoryPoolJournal
from tests.builders.waiting import eventually
from tests.ec2 import FakeAws
from tests.ec2.server import FakeServer, access_key

SHORT_S = 0.5
"""A lease of real processes, which end in real time; it need not last while an instance starts."""


def _local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    monkeypatch.setattr(ray_node, "head_command", fake_nodes.head_command)
    monkeypatch.setattr(ray_node, "instance_command", fake_nodes.instance_command)
    provider = LocalProvider("conformance", tmp_path, 2, token_path=tmp_path / "token")
    provider.ensure_head()  # first: it starts slowly on a busy machine, while a lease runs
    return ProviderUnderTest(provider, lambda: time.sleep(0.02), time.time, lease_s=SHORT_S, spot=False)


OFFER = Offer(
    instance_type="v",
    gpus=4,
    price_usd_per_hour=0.0,
    max_instances=8,
    provision_delay_s=5.0,
    spot=Spot(price_usd_per_hour=0.0, interruptions_per_hour=0.0),
)


def _virtual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    def faults_of(instance: str, _market: Market) -> InstanceFaults:
        return (
            InstanceFaults(ends_after_s=30.0, notice_s=10.0, preempted=True) if instance == TAKEN else InstanceFaults()
        )

    clock = VirtualClock(1000.0)
    provider = VirtualProvider("conformance", clock, offer=OFFER, faults_of=faults_of)
    return ProviderUnderTest(
        provider, lambda: clock.advance_to(clock.now() + 1.0), clock.now, lease_s=60.0, take=lambda: None
    )


def _pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    """A pool above a virtual provider, which takes the machine of TAKEN away."""

    def faults_of(machine: str, _market: Market) -> InstanceFaults:
        is_taken = any(lent.instance == TAKEN for lent in pool.state.held.values())
        return InstanceFaults(ends_after_s=30.0, notice_s=10.0, preempted=True) if is_taken else InstanceFaults()

    clock = VirtualClock(1000.0)
    below = VirtualProvider("pool", clock, offer=OFFER, faults_of=faults_of)
    limits = PoolLimits(instances=8, gpus=4)
    pool = Pool(below, MemoryPoolJournal(), limits, clock.now, start=lambda work: work())

    def wait() -> None:
        clock.advance_to(clock.now() + 1.0)
        pool.look()

    provider = PoolProvider("conformance", pool, 2, run="r1", clock=clock.now)
    return ProviderUnderTest(provider, wait, clock.now, lease_s=60.0, spot=False, take=lambda: None)


def _pool_on_ec2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    """A pool above the fake EC2, whose machines are beaten as by the agents of a broker."""
    world = World(tmp_path, experiment="team")
    limits = PoolLimits(instances=8, gpus=1, market="spot", price_usd_per_hour=1.006, lease_s=900.0)
    pool = Pool(world.driver(), MemoryPoolJournal(), limits, lambda: world.now, start=lambda work: work())

    def wait() -> None:
        world.sleep(1.0)
        pool.look()
        world.beat(world.now + 600.0)

    def take() -> None:
        machine = next(lent.machine for lent in pool.describe("conformance.r1") if lent.status.instance == TAKEN)
        taken = next(one for one in world.fake.instances if one.tags["rubberband:instance"] == machine)
        world.fake.reclaim(taken.instance_id, notice_s=10.0)

    provider = PoolProvider("conformance", pool, 1, run="r1", clock=lambda: world.now)
    return ProviderUnderTest(provider, wait, lambda: world.now, lease_s=60.0, take=take)


def _pool_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    """A pool of this machine's instances, behind the socket of its broker."""
    monkeypatch.setattr(ray_node, "head_command", fake_nodes.head_command)
    monkeypatch.setattr(ray_node, "instance_command", fake_nodes.instance_command)
    folder = PoolFolder(path=tmp_path / "team")
    folder.write({"instances": 8, "gpus_per_instance": 2})
    below = LocalProvider("team", folder.machines, 2, token_path=tmp_path / "token")
    pool = Pool(below, FileJournal(folder.path), PoolLimits(instances=8, gpus=2), below.clock)
    server = PoolServer(folder, pool, look_s=0.02)
    serving = threading.Thread(target=server.run)
    serving.start()
    eventually(folder.address.exists, "the address of the pool")

    def end() -> None:
        server.stop()
        serving.join()

    request = ClusterRequest(
        experiment="conformance",
        run="r",
        directory=tmp_path / "local",
        home=tmp_path,
        resources=Resources(pool=str(folder.path), lease=30.0),
        offer=replace(OFFER, gpus=2),
    )
    provider = open_cluster(request)
    wait = partial(time.sleep, 0.02)
    return ProviderUnderTest(provider, wait, provider.clock, lease_s=SHORT_S, spot=False, end=end)


def _fake_ec2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    return _on_the_fake(World(tmp_path, experiment="conformance"))


def _slow_ec2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    """What is launched is not to be seen for a minute."""
    return _on_the_fake(World(tmp_path, experiment="conformance", settings={"visible_after_s": 60.0}))


def _on_the_fake(world: World) -> ProviderUnderTest:
    def take() -> None:
        taken = next(one for one in world.fake.instances if one.tags["rubberband:instance"] == TAKEN)
        world.fake.reclaim(taken.instance_id, notice_s=10.0)

    provider = world.driver()
    return ProviderUnderTest(
        provider, lambda: world.sleep(provider.look_s), lambda: world.now, lease_s=200.0, heard=world.beat, take=take
    )


@dataclass
class Server:
    """A server that takes itself for AWS, as real boto3 reaches it."""

    session: AwsSession
    machines: Machines
    take: Callable[[str], None] | None = None
    """Take TAKEN away from a run."""

    def rental(self, directory: Path) -> ProviderUnderTest:
        """A run of its own. Neither server's instances have an operating system, and so no lease."""
        run, take = uuid.uuid4().hex, self.take
        provider = AwsProvider(
            "conformance",
            directory,
            self.session,
            self.machines,
            StubHead(),
            run=run,
            offers=ONE_GPU,
            gpus=1,
            look_s=0.0,
        )
        return ProviderUnderTest(
            provider,
            lambda: time.sleep(0.01),  # the server's clock is real
            time.time,
            lease_s=200.0,
            leases=False,
            take=None if take is None else lambda: take(run),
        )


def _session(url: str, key: str) -> AwsSession:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", url)
        environment.setenv("AWS_ACCESS_KEY_ID", key)
        environment.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        session = open_session("us-east-1")
        for service in ("ec2", "iam"):
            session.client(service)
    return session


@pytest.fixture(scope="module")
def moto() -> Iterator[Server]:
    """moto for EC2: instances run at once, and are not taken away. Its client tokens are not idempotent, which only a
    lost answer would show."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    session = _session(f"http://{host}:{port}", "testing")
    yield Server(session, _machines_of_moto(session))
    server.stop()


@pytest.fixture(scope="module")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The fake over HTTP, on the real clock; held to the policies that are shipped."""
    fake = FakeAws(time.time, pending_s=0.2, shutting_down_s=0.2)

    def take(run: str) -> None:
        tags = {"rubberband:run": run, "rubberband:instance": TAKEN}
        taken = next(one for one in fake.instances if tags.items() <= one.tags.items())
        fake.reclaim(taken.instance_id, notice_s=0.1)

    with FakeServer(fake, tmp_path_factory.mktemp("s3")) as server:
        yield Server(_session(server.url, access_key("driver")), machines_of(fake), take)


def _machines_of_moto(session: AwsSession) -> Machines:
    ec2, iam = session.client("ec2"), session.client("iam")
    iam.create_instance_profile(InstanceProfileName="rubberband-worker")
    subnet = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"][0]
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]
    return Machines(
        image=image["ImageId"],
        subnets={subnet["AvailabilityZone"]: subnet["SubnetId"]},
        security_group=ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"],
        instance_profile="rubberband-worker",
        key_name=None,
        owner="rubberband",
        volume_gb=100,
        root_device=image.get("RootDeviceName", "/dev/sda1"),
        user_data=boot_script,
    )


PROVIDERS = {
    "local": _local,
    "virtual": _virtual,
    "pool": _pool,
    "pool_process": _pool_process,
    "pool_on_ec2": _pool_on_ec2,
    "fake_ec2": _fake_ec2,
    "slow_ec2": _slow_ec2,
}


SERVERS = ("fake_server", "moto", "ray")


@dataclass
class RayNodes:
    """A Ray cluster with a node for every instance; Ray frees what a dead driver had, so that there are no leases."""

    address: str

    def rental(self, directory: Path) -> ProviderUnderTest:
        connection = Connection()
        provider = RayClusterProvider("conformance", directory, self.address, [{"GPU": 1.0}])
        connection.open(provider.ensure_head())
        wait = partial(time.sleep, 0.02)
        return ProviderUnderTest(
            provider, wait, provider.clock, lease_s=SHORT_S, leases=False, spot=False, end=connection.close
        )


@pytest.fixture(scope="module")
def ray() -> Iterator[RayNodes]:
    """One node with GPUs that are only counted."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 8})
    yield RayNodes(cluster.address)
    cluster.shutdown()


class TestProviders(ProviderConformance):
    @pytest.fixture(
        params=[*PROVIDERS, "fake_server", *(pytest.param(name, marks=pytest.mark.long) for name in ("moto", "ray"))]
    )
    def tested(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[ProviderUnderTest]:
        """Each provider in turn."""
        if request.param in SERVERS:
            server: Server | RayNodes = request.getfixturevalue(request.param)
            tested = server.rental(tmp_path)
        else:
            tested = PROVIDERS[request.param](tmp_path, monkeypatch)
        yield tested
        tested.provider.close()
        tested.end()
