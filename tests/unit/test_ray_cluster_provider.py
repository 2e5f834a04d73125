"""Records of instances on a Ray cluster, with the answers of a head written here, and no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.offers import offer
from rubberband.cloud.provider import Bundle, ClusterNode, ClusterRequest
from rubberband.cloud.ray_cluster import provider as module
from rubberband.cloud.ray_cluster.provider import QUEUE_S, WAIT_S, RayClusterProvider
from rubberband.cloud.ray_cluster.view import ClusterView, share
from rubberband.spec.resources import Resources

GPU: Bundle = {"GPU": 1.0, "CPU": 1.0}


@dataclass
class _Id:
    text: str

    def hex(self) -> str:
        return self.text


@dataclass
class _Group:
    id: _Id


@dataclass
class Head:
    """What a head knows, and what was asked of it."""

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    selectors: list[dict[str, str]] = field(default_factory=list)
    answers: bool = True

    def make(self, bundles: Any, selector: Any, name: str) -> _Group:
        found = f"{len(self.groups):08x}"
        self.groups[found] = {"state": "PENDING", "bundles_to_node_id": dict.fromkeys(range(len(bundles)), "")}
        self.selectors.append(dict(selector))
        return _Group(_Id(found))

    def remove(self, group: _Group) -> None:
        if group.id.hex() in self.groups:
            self.groups[group.id.hex()]["state"] = "REMOVED"

    def place(self, group: int, *nodes: str) -> None:
        found = self.groups[f"{group:08x}"]
        found["state"], found["bundles_to_node_id"] = "CREATED", dict(enumerate(nodes))


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    made = Head()
    monkeypatch.setattr(module, "_make_group", made.make)
    monkeypatch.setattr(module, "_remove_group", made.remove)
    monkeypatch.setattr(module, "_tables", lambda: made.groups)
    monkeypatch.setattr(module, "answers", lambda address: made.answers)
    monkeypatch.setattr(RayClusterProvider, "_is_connected", lambda self: True)
    monkeypatch.setattr(RayClusterProvider, "_group_of", staticmethod(lambda record: _Group(_Id(record.group))))
    return made


def node(name: str, *, gpus: int = 0, cpus: int = 8) -> ClusterNode:
    return ClusterNode(
        node=name,
        address=f"10.0.0.{name}",
        gpus=gpus,
        free_gpus=gpus,
        cpus=cpus,
        free_cpus=cpus,
        accelerator="",
        labels={},
    )


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def provider(folder: Path, clock: Clock, **words: Any) -> RayClusterProvider:
    made = RayClusterProvider("a", folder, "h:1", [GPU, GPU], nodes=[node("n0", gpus=2), node("n1", gpus=4)], **words)
    made.clock = clock
    return made


def states(cluster: RayClusterProvider) -> list[str]:
    return [one.state for one in cluster.describe()]


def test_a_group_waits_longer_while_no_other_instance_runs(head: Head, tmp_path: Path) -> None:
    clock = Clock()
    cluster = provider(tmp_path, clock)
    cluster.launch("i-000")
    clock.now_s = QUEUE_S - 1.0
    assert states(cluster) == ["pending"]
    head.place(0, "n0", "n0")
    assert states(cluster) == ["running"]
    cluster.launch("i-001")
    clock.now_s += WAIT_S - 1.0
    assert states(cluster) == ["running", "pending"]
    clock.now_s += 2.0
    first, second = cluster.describe()
    assert (first.state, second.state, second.sold_out) == ("running", "terminated", True)
    assert second.reason.startswith("no node of the Ray cluster had 2 GPUs free within 21")
    assert head.groups["00000001"]["state"] == "REMOVED"
    cluster.release("i-000")
    cluster.launch("i-002")
    clock.now_s += QUEUE_S - 1.0
    assert states(cluster)[2] == "pending"
    clock.now_s += 2.0
    assert cluster.describe()[2].sold_out


def test_a_node_that_must_join_is_waited_for_twice_as_long_as_it_takes(head: Head, tmp_path: Path) -> None:
    clock = Clock()
    cluster = provider(tmp_path, clock, node_s=120.0)
    cluster.launch("i-000")
    clock.now_s = 239.0
    assert states(cluster) == ["pending"]
    clock.now_s = 241.0
    assert cluster.describe()[0].sold_out


def test_a_node_that_failed_or_has_gpus_where_slots_are_asked_for_gets_no_group(head: Head, tmp_path: Path) -> None:
    cluster = provider(tmp_path, Clock(), labels={"pool": "a"}, avoided=["g0"])
    cluster.launch("i-000")
    assert head.selectors == [{"pool": "a", "ray.io/node-id": "!in(g0)"}]
    head.place(0, "n1", "n1")
    assert (states(cluster), cluster.node("i-000")) == (["running"], "n1")
    cluster.release("i-000", fault="it hung")
    cluster.launch("i-001")
    assert head.selectors[1] == {"pool": "a", "ray.io/node-id": "!in(g0,n1)"}
    head.place(1, "n0", "n0")
    assert states(cluster)[1] == "running"
    cluster.release("i-001")
    cluster.launch("i-002")
    assert head.selectors[2] == head.selectors[1], "a node without a fault may be used again"
    plain = provider(tmp_path / "other", Clock(), labels={"pool": "a"})
    plain.launch("i-000")
    assert head.selectors[3] == {"pool": "a"}


def test_an_instance_ends_with_its_group_or_its_node(head: Head, tmp_path: Path) -> None:
    cluster = provider(tmp_path, Clock())
    for at in range(4):
        cluster.launch(f"i-00{at}")
        head.place(at, "n0", "n0")
    assert states(cluster) == ["running"] * 4
    head.place(1, "n1", "n1")  # Ray places the group of a dead node again
    head.groups["00000002"]["state"] = "RESCHEDULING"
    del head.groups["00000003"]
    found = {one.instance: (one.state, one.reason) for one in cluster.describe()}
    assert found["i-000"] == ("running", "")
    assert found["i-001"] == found["i-002"] == ("terminated", "its Ray node died")
    assert found["i-003"] == ("terminated", "its driver ended, and Ray took its GPUs back")
    again = provider(tmp_path, Clock())  # a driver that resumes
    assert [one.reason for one in again.describe()] == [reason for _, reason in found.values()]


def test_slots_of_a_machine_are_those_of_its_scarcest_resource(head: Head, tmp_path: Path) -> None:
    assert provider(tmp_path, Clock()).slots_on_machine == 4
    scarce = RayClusterProvider("a", tmp_path / "b", "h:1", [GPU], nodes=[node("n0", gpus=4, cpus=2)])
    assert scarce.slots_on_machine == 2
    found = share(
        ClusterView(address="h:1", nodes=(node("n0", cpus=8),), ray_version="", python_version=""),
        Resources(provider="ray", slots=3),
    )
    made = RayClusterProvider("a", tmp_path / "c", "h:1", [found.bundle] * 3, nodes=found.nodes)
    assert made.slots_on_machine == 4


@pytest.mark.parametrize(
    ("words", "selector"), [({"slots": 2}, {"ray.io/node-id": "!in(g0)"}), ({"slots": None, "node_labels": {}}, {})]
)
def test_slots_take_no_node_with_gpus(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], selector: dict[str, str]
) -> None:
    found = ClusterView(address="h:1", nodes=(node("c0"), node("g0", gpus=4)), ray_version="", python_version="")
    monkeypatch.setattr(module, "resolve", lambda address: address)
    monkeypatch.setattr(module, "view", lambda address: found)
    resources = Resources(provider="ray", **words)
    cluster = module.open_cluster(
        ClusterRequest(
            experiment="a", run="", directory=tmp_path, home=tmp_path, resources=resources, offer=offer(resources)
        )
    )
    cluster.launch("i-000")
    assert head.selectors == [selector]
