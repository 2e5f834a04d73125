"""A provider of an existing Ray cluster: an instance is a placement group, on one node.

Ray's placement group is the claim, and Ray's job is the lease: the groups of a driver that died are removed within
seconds. A group that waits for free GPUs is pending, and lets an autoscaler grow the cluster; one that has waited for
too long is given up. Records below `directory` say what was asked for, and when it ran; the head says what lives. A
driver that resumes reads both.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from rubberband.cloud.clock import elapsed_s, experiment_clock
from rubberband.cloud.provider import (
    NODE_LABEL,
    Bundle,
    ClusterNode,
    ClusterProvider,
    ClusterRequest,
    Head,
    HeadError,
    InstanceDescription,
    InstanceState,
)
from rubberband.cloud.ray_cluster.view import ClusterView, require_versions, resolve, rooms, share, view
from rubberband.cloud.ray_head.ray_node import answers
from rubberband.errors import InputError, ProviderError
from rubberband.files import make_directories, write_atomically
from rubberband.units import counted, format_duration
from rubberband.values.plan import Market

_SILENCE_S = 5.0
"""The head is taken for dead after this time without an answer."""
_ANSWER_S = 30.0
"""The longest wait for an answer of a head that accepts connections."""
WAIT_S, QUEUE_S = 20.0, 300.0
"""The longest waits for room for an instance: beside others that run, and of the first ones, for those of other jobs.

They are tried three times. Where a new node takes time, that is waited for twice.
"""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """Record of an instance; times are those of the experiment's clock."""

    name: str
    number: int
    """Its place in the order of launch."""
    requested_at: float
    group: str = ""
    """Ray's id of its placement group; empty: it was not made yet."""
    node: str = ""
    """Ray's id of its node; empty while it is pending."""
    running_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    waited: bool = False
    """Whether it was given up because no node had room."""

    def described(self, experiment: str) -> InstanceDescription:
        state: InstanceState = "pending" if self.running_at is None else "running"
        return InstanceDescription(
            instance=self.name,
            experiment=experiment,
            state=state if self.ended_at is None else "terminated",
            requested_at=self.requested_at,
            running_at=self.running_at,
            ended_at=self.ended_at,
            reason=self.reason,
            sold_out=self.waited,
        )


class RayClusterProvider(ClusterProvider):
    """The cluster whose head is at `address`.

    The process must be connected to the cluster from the first launch until `close`. Thread-safe.
    """

    is_borrowed = True
    node_label = NODE_LABEL
    look_s = 0.5

    def __init__(
        self,
        experiment: str,
        directory: Path,
        address: str,
        bundles: Sequence[Bundle],
        *,
        run: str = "",
        nodes: Sequence[ClusterNode] = (),
        avoided: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        node_s: float | None = None,
        on_join: Callable[[float], None] = lambda waited_s: None,
        not_before: float = 0.0,
    ) -> None:
        """Take over `directory`, which has all records of the instances, each of these `bundles` on a node.

        `nodes` are those that are there; others may join. Where their GPUs are only counted, trials use the CPU.
        `labels` are those of nodes to use, and `avoided` the ids of others. A node that joins is expected to take
        `node_s` (None: that is not known), and `on_join` gets the time of each.
        """
        self._experiment, self._run, self._address = experiment, run, address
        self._directory = directory
        make_directories(directory)
        self.nodes = tuple(nodes)
        self.joined: set[str] = set()
        """Ids of further nodes that instances ran on."""
        self._bundles, self._labels = bundles, dict(labels or {})
        self._wait_s = max(WAIT_S, 2.0 * (node_s or 0.0))
        self._queue_s = self._wait_s if node_s is not None else QUEUE_S
        self._on_join = on_join
        self._mutex = threading.RLock()
        self._groups: dict[str, Any] = {}
        self._avoided = set(avoided)
        """Nodes on which this driver asks for no group, such as those that failed it."""
        self._answered_at = elapsed_s()
        self.device: Literal["cpu", "cuda"] = _device(nodes)
        self.clock: Callable[[], float] = experiment_clock(directory, not_before=not_before)
        records = (_Record(**json.loads(path.read_text())) for path in directory.glob("*.instance.json"))
        self._records = {record.name: record for record in records}

    @property
    def slots_on_machine(self) -> int:
        """Most slots that instances may have on one machine, whose CPUs they share."""
        return max(len(self._bundles), *rooms(self.nodes, self._bundles[0]).values(), 0)

    def node(self, instance: str) -> str:
        """Return Ray's id of the node of an instance; empty while it has none."""
        with self._mutex:
            return self._records[instance].node if instance in self._records else ""

    def group(self, instance: str) -> Any:
        """Return the placement group of an instance that was launched."""
        with self._mutex:
            return self._groups.get(instance)

    def renew_lease(self, until: float) -> None:
        """Do nothing: Ray removes the groups of a driver that died."""

    def head(self) -> Head | None:
        """Return the head; None once it has not answered for a while."""
        now = elapsed_s()
        if answers(self._address):
            self._answered_at = now
        elif now - self._answered_at > _SILENCE_S:
            return None
        namespace = f"rubberband.{self._experiment}{self._run and f'.{self._run}'}"
        return Head(address=self._address, temp_dir=None, environment={}, namespace=namespace)

    def ensure_head(self) -> Head:
        """Return the head. Raises HeadError if it does not answer."""
        if (head := self.head()) is None:
            raise HeadError(f"the Ray cluster at {self._address} does not answer; start it, then resume")
        return head

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Ask Ray for a placement group on one node, once for repeated calls. It is pending until a node has room.

        Raises ProviderError if all nodes failed this driver before, or without a connection.
        """
        with self._mutex:
            record = self._records.get(instance)
            if record is None:
                record = _Record(name=instance, number=len(self._records), requested_at=self.clock())
                self._note(record)
            if record.group or record.ended_at is not None:
                return
            labels = dict(self._labels)
            if self._avoided:
                labels[NODE_LABEL] = f"!in({','.join(sorted(self._avoided))})"
            group = self._ask(lambda: _make_group(self._bundles, labels, f"{self._experiment}/{instance}"))
            self._groups[instance] = group
            self._note(replace(record, group=group.id.hex()))

    def describe(self) -> Sequence[InstanceDescription]:
        """Return all instances, living or ended, in the order of launch.

        Raises ProviderError without a connection to a head that answers.
        """
        with self._mutex:
            if any(record.ended_at is None for record in self._records.values()):
                self._look()
            records = sorted(self._records.values(), key=lambda record: record.number)
            return [record.described(self._experiment) for record in records]

    def _look(self) -> None:
        """Bring the records of living instances up to date."""
        if self.head() is None:
            self._end_all("the head of the Ray cluster ended")
            return
        table = self._ask(_tables)
        for record in [record for record in self._records.values() if record.ended_at is None]:
            group = table.get(record.group)
            nodes = set(group["bundles_to_node_id"].values()) if group is not None else set()
            if group is None or group["state"] == "REMOVED":
                self._end(record, "its driver ended, and Ray took its GPUs back")
            elif record.running_at is not None and (group["state"] != "CREATED" or nodes != {record.node}):
                self._end(record, "its Ray node died")
            elif group["state"] == "CREATED" and record.running_at is None:
                self._place(record, nodes.pop())
            elif record.running_at is None and (waited_s := self.clock() - record.requested_at) > self._patience_s():
                self._give_up(record, waited_s)

    def _place(self, record: _Record, node: str) -> None:
        """Note that an instance runs on a node, which may have joined for it."""
        running_at = self.clock()
        if node not in {known.node for known in self.nodes}:
            added = [other for other in self._view().nodes if other.node == node]
            if not self.nodes:
                self.device = _device(added)
            self.nodes += tuple(added)
            self.joined.add(node)
            self._on_join(running_at - record.requested_at)
        self._note(replace(record, running_at=running_at, node=node))
        self._groups.setdefault(record.name, self._group_of(record))

    def _view(self) -> ClusterView:
        try:
            return view(self._address)
        except InputError as error:
            raise ProviderError(str(error)) from error

    def _patience_s(self) -> float:
        runs = any(record.running_at is not None and record.ended_at is None for record in self._records.values())
        return self._wait_s if runs else max(self._wait_s, self._queue_s)

    def _give_up(self, record: _Record, waited_s: float) -> None:
        kind = "GPU" if "GPU" in self._bundles[0] else "CPU"
        wanted = counted(int(sum(bundle[kind] for bundle in self._bundles)), kind)
        reason = f"no node of the Ray cluster had {wanted} free within {format_duration(waited_s)}; see `ray status`"
        self._end(replace(record, waited=True), reason)

    @staticmethod
    def _group_of(record: _Record) -> Any:
        from ray import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        return PlacementGroup(PlacementGroupID(bytes.fromhex(record.group)))

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """Give the GPUs of an instance back to Ray, and return its final status; idempotent.

        With a `fault`, this driver asks for no other group on its node. Raises ProviderError if it was never launched.
        """
        with self._mutex:
            record = self._records.get(instance)
            if record is None:
                raise ProviderError(f"instance {instance} was never launched in {self._directory}; nothing to release")
            if fault and record.node:
                self._avoided.add(record.node)
            if record.ended_at is None:
                record = self._end(record, "")
            return record.described(self._experiment)

    def close(self) -> None:
        """Give all GPUs back. Idempotent."""
        with self._mutex:
            self._end_all("")

    def _end_all(self, reason: str) -> None:
        for record in [record for record in self._records.values() if record.ended_at is None]:
            self._end(record, reason)

    def _end(self, record: _Record, reason: str) -> _Record:
        """Remove its group, and note that it has ended. Raises ProviderError if a head that lives does not answer."""
        if record.group and self.head() is not None and self._is_connected():
            group = self._groups.get(record.name) or self._group_of(record)
            self._ask(lambda: _remove_group(group))
        ended = replace(record, ended_at=self.clock(), reason=reason)
        self._note(ended)
        return ended

    def _is_connected(self) -> bool:
        import ray

        return bool(ray.is_initialized()) and ray.get_runtime_context().gcs_address == self._address

    def _ask(self, call: Callable[[], _T]) -> _T:
        """Return the answer of the head. A request that is pending when the head dies is never answered."""
        if not answers(self._address):
            raise ProviderError(f"the Ray cluster at {self._address} does not answer")
        if not self._is_connected():
            raise ProviderError(f"this process is not connected to the Ray cluster at {self._address}")
        answer: Future[_T] = Future()

        def ask() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True, name="ray-cluster").start()
        give_up_at = elapsed_s() + _ANSWER_S
        while not wait([answer], timeout=self.look_s).done:
            if elapsed_s() >= give_up_at or not answers(self._address):
                raise ProviderError(f"the Ray cluster at {self._address} does not answer")
        return answer.result()

    def _note(self, record: _Record) -> None:
        path = self._directory / f"{record.name}.instance.json"
        write_atomically(path, json.dumps(asdict(record)).encode(), durable=True)
        self._records[record.name] = record


def _device(nodes: Sequence[ClusterNode]) -> Literal["cpu", "cuda"]:
    return "cuda" if nodes and all(node.accelerator for node in nodes) else "cpu"


def open_cluster(request: ClusterRequest) -> RayClusterProvider:
    """Return the provider of the cluster that the resources name.

    Raises InputError if it does not answer, has other versions of Ray or Python, or no node that can be used.
    """
    resources, gpus = request.resources, request.offer.gpus
    cluster = view(resolve(resources.address))
    require_versions(cluster)
    part = share(cluster, resources.model_copy(update={"gpus_per_instance": gpus}))
    grows = resources.provision_delay is not None or resources.max_instances > part.fitting
    return RayClusterProvider(
        request.experiment,
        request.directory,
        cluster.address,
        [part.bundle] * gpus,
        run=request.run,
        nodes=part.nodes,
        avoided=[node.node for node in cluster.nodes if node.gpus] if resources.slots else (),
        labels=resources.node_labels,
        node_s=request.join_s(cluster.address) if grows else None,
        on_join=partial(request.on_join, cluster.address),
        not_before=request.not_before,
    )


def _make_group(bundles: Sequence[Mapping[str, float]], selector: Mapping[str, str], name: str) -> Any:
    from ray.util.placement_group import placement_group

    selectors = [dict(selector)] * len(bundles) if selector else None
    return placement_group(
        [dict(bundle) for bundle in bundles], strategy="STRICT_PACK", name=name, bundle_label_selector=selectors
    )


def _remove_group(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _tables() -> Mapping[str, Mapping[str, Any]]:
    """Return id -> what Ray shows of a placement group, for all of the cluster."""
    from ray.util.placement_group import placement_group_table

    return dict(placement_group_table())
