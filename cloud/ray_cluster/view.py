"""A Ray cluster as its head describes it: nodes, GPUs, versions. Reading it connects no driver and claims nothing.

A driver's connection takes seconds, and a process has one at most; asking the head's control store takes milliseconds,
in any process.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, cast

from rubberband.cloud.provider import NODE_LABEL, Bundle, ClusterNode, Share, fitting
from rubberband.cloud.ray_head.ray_node import answers
from rubberband.errors import InputError
from rubberband.spec.resources import Resources, cluster_address
from rubberband.units import counted

ADDRESS_VARIABLE = "RAY_ADDRESS"
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The living nodes of a cluster."""

    address: str
    nodes: tuple[ClusterNode, ...]
    ray_version: str
    python_version: str

    def usable(self, labels: Mapping[str, str], gpus: int) -> list[ClusterNode]:
        """Return the nodes with these labels and at least this number of GPUs."""
        return [node for node in self.nodes if node.gpus >= gpus and labels.items() <= node.labels.items()]


def resolve(address: str) -> str:
    """Return HOST:PORT of the head that `resources.address` means. Raises InputError if `auto` means none.

    This machine is meant by its IP address, as Ray names it, and not as localhost.
    """
    if address != "auto":
        return _reachable(address)
    given = os.environ.get(ADDRESS_VARIABLE, "")
    if given not in ("", "auto", "local"):
        try:
            return _reachable(cluster_address(given))
        except InputError as error:
            raise InputError(f"{ADDRESS_VARIABLE}: {error}") from None
    from ray._private.utils import read_ray_address

    joined = read_ray_address()
    if not joined:
        raise InputError(
            "resources.address: this machine is a node of no Ray cluster; run `ray start --head` or `ray start "
            f"--address=HOST:6379` first, or give address: HOST:PORT (or {ADDRESS_VARIABLE})"
        )
    return _reachable(str(joined))


def _reachable(address: str) -> str:
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address(address))


def view(address: str) -> ClusterView:
    """Return the cluster whose head is at `address` (HOST:PORT). Raises InputError if it does not answer."""
    require_answer(address)
    from ray.core.generated import gcs_pb2
    from ray.exceptions import AuthenticationError

    core, messages = cast(Any, import_module("ray._raylet")), cast(Any, gcs_pb2)
    options = core.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    try:
        metadata = json.loads(core.GcsClient(address=address).internal_kv_get(b"CLUSTER_METADATA", b"cluster") or b"{}")
        accessor = core.GlobalStateAccessor(options)  # without the head's leave it would end or block this process
        if not accessor.connect():
            raise ConnectionError("it does not let this process in")
        table = [node for node in accessor.get_node_table() if node["Alive"]]
        parsed = [messages.AvailableResources.FromString(message) for message in accessor.get_all_available_resources()]
    except AuthenticationError:
        raise InputError(
            f"resources.address: the Ray cluster at {address} asks for a token, and this process has none or another; "
            "run `export RAY_AUTH_MODE=token` first, with the token of the head in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None
    except Exception as error:
        raise InputError(
            f"resources.address: {address} does not answer as the head of a Ray cluster ({_first_line(error)})"
        ) from error
    free = {message.node_id.hex(): dict(message.resources_available) for message in parsed}
    return ClusterView(
        address=address,
        nodes=tuple(_node(node, free.get(node["NodeID"], {})) for node in table),
        ray_version=str(metadata.get("ray_version", "")),
        python_version=str(metadata.get("python_version", "")),
    )


def require_answer(address: str) -> None:
    """Raise InputError unless the head accepts connections."""
    if not answers(address):
        raise InputError(
            f"resources.address: no Ray cluster answers at {address}; start it, or correct the address (`ray status` "
            "shows whether it runs)"
        )


def _node(plain: Mapping[str, Any], free: Mapping[str, float]) -> ClusterNode:
    resources = plain["Resources"]
    return ClusterNode(
        node=plain["NodeID"],
        address=plain["NodeManagerAddress"],
        gpus=int(resources.get("GPU", 0)),
        free_gpus=int(free.get("GPU", 0)),
        cpus=int(resources.get("CPU", 0)),
        free_cpus=int(free.get("CPU", 0)),
        accelerator=next((key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR)), ""),
        labels={**plain["Labels"], NODE_LABEL: plain["NodeID"]},
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def require_versions(cluster: ClusterView) -> None:
    """Raise InputError if this process has another version of Ray or Python than the cluster."""
    level = os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "patch")
    parts = 2 if level == "minor" else 3
    ours, theirs = platform.python_version(), cluster.python_version
    if theirs and ours.split(".")[:parts] != theirs.split(".")[:parts]:
        raise InputError(
            f"resources.provider: the Ray cluster at {cluster.address} runs Python {theirs} and this process {ours}; "
            f"run rubberband with Python {theirs}, such as on the head"
        )
    if cluster.ray_version and (our_ray := version("ray")) != cluster.ray_version:
        raise InputError(
            f"resources.provider: the Ray cluster at {cluster.address} runs Ray {cluster.ray_version} and this process "
            f"{our_ray}; run `pip install ray=={cluster.ray_version}` here, or run rubberband on the head"
        )


def rooms(nodes: Sequence[ClusterNode], bundle: Bundle) -> Counter[str]:
    """Return IP address -> bundles that fit on that machine when it is idle; it may run several nodes."""
    room: Counter[str] = Counter()
    for node in nodes:
        room[node.address] += fitting({"GPU": node.gpus, "CPU": node.cpus}, bundle)
    return room


def share_now(resources: Resources) -> Share:
    """Return the part of the cluster at `resources.address` as it is now. Raises as `view` and `share` do."""
    cluster = view(resolve(resources.address))
    require_versions(cluster)
    return share(cluster, resources)


def share(cluster: ClusterView, resources: Resources) -> Share:
    """Return the nodes that an experiment may use, and the size of its instances.

    Raises InputError if there are none, or none with as many GPUs as it asks for. If there are none now, both sizes in
    the file say that an autoscaler adds them.
    """
    asked, labelled = resources.gpus_per_instance, _labelled(resources)
    may_grow = resources.slots is None and asked is not None and "max_instances" in resources.model_fields_set
    if not may_grow:
        _require_labels(cluster, resources)
    if resources.slots is not None:
        return _cpu_share(cluster, resources, resources.slots)
    nodes = cluster.usable(resources.node_labels, 1)
    if not nodes and not may_grow:
        raise InputError(
            f"resources.provider: the Ray cluster at {cluster.address} has no GPUs on its "
            f"{counted(len(cluster.nodes), 'node')}{labelled}; on CPU nodes, write slots: N (trials side by side on a "
            "node); if it grows by itself, write gpus_per_instance and max_instances"
        )
    if asked is not None and nodes and asked > (largest := max(node.gpus for node in nodes)):
        raise InputError(
            f"resources.gpus_per_instance: {asked} GPUs are more than a node of the Ray cluster at {cluster.address} "
            f"has{labelled} ({largest}); lower it to {largest}"
        )
    gpus = asked or _commonest([node.gpus for node in nodes])
    has_cpus = bool(nodes) and all(node.cpus >= node.gpus for node in nodes)
    return Share(
        address=cluster.address,
        gpus_per_instance=gpus,
        bundle={"GPU": 1.0, "CPU": 1.0} if has_cpus else {"GPU": 1.0},  # one CPU, as any Ray worker has
        fitting=sum(node.gpus // gpus for node in nodes),
        nodes=tuple(node for node in nodes if node.gpus >= gpus),
        line=_line(cluster, "GPU", nodes, labelled),
    )


def _cpu_share(cluster: ClusterView, resources: Resources, slots: int) -> Share:
    """Return the part without GPUs: an instance has the CPUs of the commonest node, in equal parts for its slots."""
    labelled = _labelled(resources)
    nodes = [node for node in cluster.usable(resources.node_labels, 0) if node.cpus and not node.gpus]
    if not nodes or slots > max(node.cpus for node in nodes):
        most = max((node.cpus for node in nodes), default=0)
        raise InputError(
            f"resources.slots: {slots} need a node without GPUs and with {counted(slots, 'CPU')}, and the Ray cluster "
            f"at {cluster.address} has none{labelled} (the largest has {most}); lower slots, or start such a node"
        )
    cpus = _commonest([node.cpus for node in nodes if node.cpus >= slots]) // slots
    wide = [node for node in nodes if node.cpus >= slots * cpus]
    return Share(
        address=cluster.address,
        gpus_per_instance=slots,
        bundle={"CPU": float(cpus)},
        fitting=sum(node.cpus // (slots * cpus) for node in wide),
        nodes=tuple(wide),
        line=_line(cluster, "CPU", nodes, labelled),
    )


def _require_labels(cluster: ClusterView, resources: Resources) -> None:
    """Raise InputError if no node has the labels that the file asks for."""
    if cluster.usable(resources.node_labels, 0):
        return
    there = sorted(
        {f"{key}={value}" for node in cluster.nodes for key, value in node.labels.items() if key != NODE_LABEL}
    )
    raise InputError(
        f"resources.node_labels: no node of the Ray cluster at {cluster.address} is one{_labelled(resources)}; "
        f"{'there are ' + ', '.join(there) if there else 'nodes have none'}; correct them, or start nodes with `ray "
        "start --labels=KEY=VALUE`"
    )


def _labelled(resources: Resources) -> str:
    labels = ", ".join(f"{key}={value}" for key, value in resources.node_labels.items())
    return f" with labels {labels}" if labels else ""


def _commonest(sizes: Sequence[int]) -> int:
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size))


def _line(cluster: ClusterView, what: str, nodes: Sequence[ClusterNode], labelled: str) -> str:
    """Return the cluster in words; `nodes` are those that may be used."""
    if not nodes:
        return f"{cluster.address}: no node{labelled} with {what}s now"
    sizes = [(node.gpus, node.accelerator) if what == "GPU" else (node.cpus, "") for node in nodes]
    free = sum(node.free_gpus if what == "GPU" else node.free_cpus for node in nodes)
    counts = Counter(sizes)
    parts = " + ".join(
        f"{counted(counts[size, kind], 'node')} x {counted(size, what)}{kind and f' ({kind})'}"
        for size, kind in sorted(counts, key=lambda pair: (-pair[0], pair[1]))
    )
    busy = " (the plan counts on all of them)" if free < sum(size for size, _ in sizes) else ""
    return f"{cluster.address}: {parts}{labelled}, {free} free now{busy}"
