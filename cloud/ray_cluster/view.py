"""A Ray cluster as its head describes it: nodes, GPUs, versions. Reading it connects no driver and claims nothing.

A driver's connection takes seconds, and a process has one at most; asking the head's control store takes milliseconds,
in any process.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, cast

from rubberband.cloud.provider import NODE_LABEL
from rubberband.cloud.ray_head.ray_node import answers
from rubberband.errors import InputError
from rubberband.spec.resources import Resources
from rubberband.units import counted

ADDRESS_VARIABLE = "RAY_ADDRESS"
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One living node."""

    node: str
    """Ray's id."""
    address: str
    gpus: int
    free_gpus: int
    cpus: int
    accelerator: str
    """Type of its GPUs, such as A100; empty: it has none, or they are only counted."""
    labels: Mapping[str, str]


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
    """Return HOST:PORT of the head that `resources.address` means. Raises InputError if `auto` means none."""
    if address != "auto":
        return address
    given = os.environ.get(ADDRESS_VARIABLE, "")
    if given.startswith("ray://"):
        raise InputError(
            f"{ADDRESS_VARIABLE} is {given}, an address of Ray Client, whose driver is not on the cluster; run "
            "rubberband on the head, or submit it there (`ray job submit -- rubberband run FILE`)"
        )
    from ray._private.utils import read_ray_address

    found = given if given not in ("", "auto", "local") else read_ray_address()
    if not found:
        raise InputError(
            "resources.address: this machine is a node of no Ray cluster; run `ray start --head` or `ray start "
            f"--address=HOST:6379` first, or give address: HOST:PORT (or {ADDRESS_VARIABLE})"
        )
    return str(found)


def view(address: str) -> ClusterView:
    """Return the cluster whose head is at `address` (HOST:PORT). Raises InputError if it does not answer."""
    require_answer(address)
    from ray.core.generated import gcs_pb2

    core, messages = cast(Any, import_module("ray._raylet")), cast(Any, gcs_pb2)
    options = core.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    accessor = core.GlobalStateAccessor(options)
    try:
        accessor.connect()
        table = [node for node in accessor.get_node_table() if node["Alive"]]
        parsed = [messages.AvailableResources.FromString(each) for each in accessor.get_all_available_resources()]
        metadata = json.loads(core.GcsClient(address=address).internal_kv_get(b"CLUSTER_METADATA", b"cluster") or b"{}")
    except Exception as error:
        raise InputError(
            f"resources.address: {address} does not answer as the head of a Ray cluster ({_first_line(error)})"
        ) from error
    free = {each.node_id.hex(): dict(each.resources_available) for each in parsed}
    return ClusterView(
        address=address,
        nodes=tuple(_node(each, free.get(each["NodeID"], {})) for each in table),
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
        accelerator=next((key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR)), ""),
        labels={**plain["Labels"], NODE_LABEL: plain["NodeID"]},
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def require_versions(found: ClusterView) -> None:
    """Raise InputError if this process has another version of Ray or Python than the cluster."""
    level = os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "patch")
    parts = 2 if level == "minor" else 3
    ours, theirs = platform.python_version(), found.python_version
    if theirs and ours.split(".")[:parts] != theirs.split(".")[:parts]:
        raise InputError(
            f"resources.provider: the Ray cluster at {found.address} runs Python {theirs} and this process {ours}; run "
            f"rubberband with Python {theirs}, such as on the head"
        )
    if found.ray_version and (our_ray := version("ray")) != found.ray_version:
        raise InputError(
            f"resources.provider: the Ray cluster at {found.address} runs Ray {found.ray_version} and this process "
            f"{our_ray}; run `pip install ray=={found.ray_version}` here, or run rubberband on the head"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a cluster that an experiment may use."""

    gpus_per_instance: int
    fitting: int
    """Instances that the nodes have room for when they are idle."""
    nodes: tuple[ClusterNode, ...]
    line: str
    """The cluster in words: `10.0.0.5: 8 nodes x 4 GPUs, 6 free now`."""


def share(found: ClusterView, resources: Resources) -> Share:
    """Return the nodes that an experiment may use, and the size of its instances.

    Raises InputError if there are none, or none with as many GPUs as it asks for.
    """
    asked, labels = resources.gpus_per_instance, resources.node_labels
    labelled = f" with labels {', '.join(f'{key}={value}' for key, value in labels.items())}" if labels else ""
    nodes = found.usable(labels, 1)
    if not nodes:
        raise InputError(
            f"resources.provider: the Ray cluster at {found.address} has no GPUs on its "
            f"{counted(len(found.nodes), 'node')}{labelled}; on CPU nodes, let each say how many trials it trains side "
            "by side: `ray start --num-gpus=N`"
        )
    largest = max(node.gpus for node in nodes)
    if asked is not None and asked > largest:
        raise InputError(
            f"resources.gpus_per_instance: {asked} GPUs are more than a node of the Ray cluster at {found.address} has"
            f"{labelled} ({largest}); lower it to {largest}"
        )
    counts = Counter(node.gpus for node in nodes)
    gpus = asked or max(counts, key=lambda size: (counts[size], size))
    sizes = " + ".join(f"{counted(counts[size], 'node')} x {counted(size, 'GPU')}" for size in sorted(counts)[::-1])
    free = sum(node.free_gpus for node in nodes)
    return Share(
        gpus_per_instance=gpus,
        fitting=sum(node.gpus // gpus for node in nodes),
        nodes=tuple(node for node in nodes if node.gpus >= gpus),
        line=f"{found.address}: {sizes}{labelled}, {free} free now",
    )
