"""The fake's account: every call goes through here, and so do the clock, the faults, the log and the bill.

In process, `FakeAws(clock).session("driver")` is a Session as AwsProvider takes it; `server.py` is its HTTP front.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.ec2.access import Access
from tests.ec2.billing import Bill, billed
from tests.ec2.client import FakeSession
from tests.ec2.faults import FakeCall, FakeDisconnect, FakeError, Fault
from tests.ec2.instance import INSTANCE_INITIATED, SPOT_TERMINATION, Instance, Market
from tests.ec2.launch_rights import check_end
from tests.ec2.machine_types import Architecture
from tests.ec2.operations import OPERATIONS
from tests.ec2.policy import Statement
from tests.ec2.principals import BUCKET, PRINCIPALS, arn_of, shipped_policies
from tests.ec2.request import Request
from tests.ec2.world import Delay, Image, Pool, World

NO_FAULT = Fault()


class FakeAws:
    """One AWS account in one region. Safe to call from several threads.

    `world` is what exists, for a test to change: quotas, images, profiles, key pairs, `ignores_spot`, …
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        region: str = "us-east-1",
        seed: int = 0,
        pending_s: Delay = 20.0,
        shutting_down_s: Delay = 30.0,
        visible_after_s: Delay = 0.0,
        boot_s: Delay = 0.0,
        reads: Callable[[str], tuple[float, float]] | None = None,
        policies: Mapping[str, Sequence[Statement] | None] | None = None,
        validates: bool = True,
    ) -> None:
        """`clock` gives Unix time in seconds. `pending_s` from a launch to running, `shutting_down_s` from an end to
        terminated, `visible_after_s` until a look finds what was launched, and `boot_s` from running until UserData
        is run: each a number, or a function of the fake's random source that draws it for each instance.

        `reads` takes UserData to its (lease_s, lifetime_s): instances then end themselves at their lease as what runs
        on them would do (never, where `boot_s` is infinite), and `extend_lease` stands for their beat. None: only
        `power_off` says that they shut down.
        `policies`: principal -> what it may do (None: everything); by default those that the package ships.
        `validates`: whether clients hold parameters against the service model, as boto3 does.
        """
        self.clock = clock
        self.world = World(region, seed)
        self.world.pending_s, self.world.shutting_down_s = pending_s, shutting_down_s
        self.world.visible_after_s, self.world.boot_s, self.world.reads = visible_after_s, boot_s, reads
        self.world.guard_may_end = self._guard_may_end
        furnish(self.world)
        self.policies = dict(shipped_policies() if policies is None else policies)
        self.validates = validates
        self.fault: Callable[[FakeCall], Fault | None] | None = None
        """Asked before every call; what it returns happens to the call."""
        self.answers_late: Callable[[str], None] = lambda operation: None
        """Waits before a call is carried out, while others may be."""
        self.on_boot: Callable[[Instance], None] | None = None
        """Told of every instance that begins to run, from the thread of the call or tick that notices."""
        self.on_end: Callable[[Instance], None] | None = None
        """Told of every instance that shuts down, whoever wanted it, also of one that never ran."""
        self.calls: list[FakeCall] = []
        """Every call so far, with its outcome."""
        self._lock = threading.RLock()
        self.elsewhere: dict[str, FakeAws] = {}

    @property
    def region(self) -> str:
        return self.world.region

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All that were ever launched, visible or not, in order; they must not be changed."""
        self.tick()
        return tuple(self.world.instances.values())

    @property
    def living(self) -> tuple[Instance, ...]:
        self.tick()
        return tuple(self.world.living())

    def in_region(self, region: str) -> FakeAws:
        """EC2 in another region of the account: empty at first, with this one's faults and list of calls."""
        if region == self.region:
            return self
        with self._lock:
            if region not in self.elsewhere:
                self.elsewhere[region] = FakeAws(self.clock, region=region, policies=self.policies)
            other = self.elsewhere[region]
            other.fault, other.calls, other._lock = self.fault, self.calls, self._lock
            return other

    def session(self, principal: str = "driver", *, region: str | None = None) -> FakeSession:
        """Clients in this process, which take, return and raise what boto3's do. `principal`: `driver`, `worker`,
        `admin` (may do everything) or `nobody` (has no credentials)."""
        return FakeSession(self, principal, region or self.region)

    def launched(self, instance_type: str, **words: Any) -> Instance:
        """The last of what an administrator launches now, on an image of the account."""
        image = next(name for name, one in self.world.images.items() if one.architecture == "x86_64")
        asked = {"ImageId": image, "InstanceType": instance_type, "MinCount": 1, "MaxCount": 1, **words}
        shown = self.session("admin").client("ec2").run_instances(**asked)["Instances"]
        return self.world.instances[shown[-1]["InstanceId"]]

    def call(self, service: str, operation: str, params: Mapping[str, Any], principal: str) -> dict[str, Any]:
        """Carry out one call, `operation` as the API names it, with boto3's parameters and result (UserData in base64).

        Raises FakeError where AWS answers with an error, FakeDisconnect where no answer comes, and what the fault hook
        asks for.
        """
        self.answers_late(operation)
        try:
            with self._lock:
                return self._logged(service, operation, params, principal)
        finally:
            self._tell()

    def tick(self) -> None:
        """Let everything happen that was due by now, and tell `on_boot` and `on_end`. Every call does so too."""
        with self._lock:
            self.world.settle(self.clock())
        self._tell()

    def bill(self) -> Bill:
        """What everything has cost until now; what runs is billed until now."""
        self.tick()
        return billed([*self.world.earlier, *self.world.instances.values()], self.clock(), self.world.spot)

    def set_capacity(
        self,
        instances: int | None,
        *,
        instance_type: str | None = None,
        zone: str | None = None,
        market: Market | None = None,
    ) -> None:
        """At most so many instances live at once of those that match (None: any); `instances` None lifts the limit."""
        pool = Pool(instance_type=instance_type, zone=zone, market=market)
        self.world.capacity.pop(pool, None)
        if instances is not None:
            self.world.capacity[pool] = instances

    def reclaim(self, instance_id: str, *, notice_s: float | None) -> None:
        """Take a spot instance away, `notice_s` from now (AWS promises 120 and may give less) or, with None, at once
        and without notice. Its `notice_at` and `reclaim_at` are what its metadata service tells."""
        with self._lock:
            now = self.clock()
            self.world.settle(now)
            instance = self.world.instances[instance_id]
            if notice_s is None:
                self.world.end(instance, now, SPOT_TERMINATION)
            elif instance.lives():
                instance.notice_at, instance.reclaim_at = now, now + notice_s
        self._tell()

    def power_off(self, instance_id: str) -> None:
        """The instance's operating system shut down; its InstanceInitiatedShutdownBehavior says what becomes of it."""
        with self._lock:
            self.world.settle(self.clock())
            instance = self.world.instances[instance_id]
            self.world.end(instance, self.clock(), INSTANCE_INITIATED, instance.shutdown_behavior)
        self._tell()

    def break_down(self, instance_id: str, reason: str = "Server.InternalError") -> None:
        """AWS ends the instance for a reason of its own, which becomes its StateReason."""
        with self._lock:
            self.world.settle(self.clock())
            self.world.end(self.world.instances[instance_id], self.clock(), reason)
        self._tell()

    def extend_lease(self, instance_id: str, until: float) -> None:
        """What the driver's worker does on a running instance: it now ends itself at `until`, sooner or later than
        before. Nothing where it does not run (any more)."""
        with self._lock:
            now = self.clock()
            self.world.settle(now)
            instance = self.world.instances[instance_id]
            if instance.state(now) == "running" and instance.lease_until is not None:
                instance.lease_until = max(now, until)

    def _logged(self, service: str, operation: str, params: Mapping[str, Any], principal: str) -> dict[str, Any]:
        call = FakeCall(
            index=len(self.calls),
            service=service,
            operation=operation,
            params=params,
            principal=principal,
            at=self.clock(),
            region=self.region,
        )
        self.calls.append(call)
        try:
            fault = (self.fault(call) if self.fault is not None else None) or NO_FAULT
            result = self._carried_out(call, fault)
        except BaseException as error:
            self.calls[call.index] = replace(self.calls[call.index], outcome=_outcome(error))
            raise
        self.calls[call.index] = replace(call, outcome="ok", took_effect=True)
        return result

    def _carried_out(self, call: FakeCall, fault: Fault) -> dict[str, Any]:
        if fault.error is not None and not fault.took_effect:
            raise fault.error
        self.world.settle(call.at)
        operation = OPERATIONS.get((call.service, call.operation))
        if operation is None:
            raise FakeError("InvalidAction", f"The action {call.operation} is not valid for this web service.")
        request = Request(
            world=self.world, params=call.params, now=call.at, access=self._access(call.principal), fault=fault
        )
        result = operation(request)
        if fault.error is not None:
            self.calls[call.index] = replace(call, took_effect=True)
            raise fault.error
        return result

    def _access(self, principal: str) -> Access:
        if principal not in PRINCIPALS:
            raise FakeError("AuthFailure", "AWS was not able to validate the provided access credentials", 401)
        return Access(arn=arn_of(principal), region=self.region, policies=self.policies.get(principal))

    def _guard_may_end(self, instance: Instance) -> bool:
        try:
            check_end(self.world, self._access("guard"), instance)
        except FakeError:
            return False
        return True

    def _tell(self) -> None:
        """Outside of the lock, since whoever is told may call the fake from another thread and wait for it."""
        with self._lock:
            changes = self.world.changes()
        for kind, instance in changes:
            listener = self.on_boot if kind == "boot" else self.on_end
            if listener is not None:
                listener(instance)


def _outcome(error: BaseException) -> str:
    if isinstance(error, FakeError):
        return error.code
    return error.kind if isinstance(error, FakeDisconnect) else type(error).__name__


_DEEP_LEARNING = "/aws/service/deeplearning/ami"
_UBUNTU = "/aws/service/canonical/ubuntu/server"
_AMAZON = "/aws/service/ami-amazon-linux-latest"
_KERNEL = "kernel-default"


def furnish(world: World) -> None:
    """Add a new account's content: a bucket, and Amazon's images with the public parameters that name the latest.

    Image ids differ from one region to another, as they do with AWS.
    """
    world.buckets[BUCKET] = {}
    for arch, debian in (("x86_64", "amd64"), ("arm64", "arm64")):
        for version in ("22.04", "24.04"):
            for flavour in ("base-oss-nvidia-driver-gpu", "oss-nvidia-driver-gpu-pytorch-2.7"):
                name = f"Deep Learning {flavour} (Ubuntu {version}) {arch}"
                parameter = f"{_DEEP_LEARNING}/{arch}/{flavour}-ubuntu-{version}/latest/ami-id"
                _add(world, parameter, name, arch, "/dev/sda1", volume_gb=75)
            volume = "ebs-gp2" if version == "22.04" else "ebs-gp3"
            parameter = f"{_UBUNTU}/{version}/stable/current/{debian}/hvm/{volume}/ami-id"
            _add(world, parameter, f"ubuntu-{version}-{debian}-server", arch, "/dev/sda1", volume_gb=8)
        name = f"Deep Learning base-oss-nvidia-driver-gpu (Amazon Linux 2023) {arch}"
        parameter = f"{_DEEP_LEARNING}/{arch}/base-oss-nvidia-driver-gpu-al2023/latest/ami-id"
        _add(world, parameter, name, arch, "/dev/xvda", volume_gb=75)
        parameter = f"{_AMAZON}/al2023-ami-{_KERNEL}-{arch}"
        _add(world, parameter, f"al2023-ami-2023-{_KERNEL}-{arch}", arch, "/dev/xvda", volume_gb=8)


def _add(world: World, parameter: str, name: str, architecture: str, root_device: str, *, volume_gb: int) -> None:
    arch: Architecture = "arm64" if architecture == "arm64" else "x86_64"
    image = Image(
        image_id=world.new_id("ami"), name=name, architecture=arch, root_device=root_device, volume_gb=volume_gb
    )
    world.images[image.image_id] = image
    world.parameters[parameter] = {"Name": parameter, "Type": "String", "Value": image.image_id, "Version": 1}
