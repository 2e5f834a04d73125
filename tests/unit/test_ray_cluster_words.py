"""The words of an experiment on an existing Ray cluster, and the part of the cluster that it gets."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray._private.services import get_node_ip_address

from rubberband.cloud.offers import offer
from rubberband.cloud.provider import ClusterNode
from rubberband.cloud.ray_cluster import view
from rubberband.cloud.ray_cluster.view import ClusterView, require_versions, share
from rubberband.errors import InputError
from rubberband.executor.result.batch_history import copied
from rubberband.planning.clusters import on_cluster
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas
from rubberband.planning.prices_and_quotas import EstimateAnswer, answer, local_prices_and_quotas
from rubberband.planning.startup_history import record_join
from rubberband.running.estimating import PlanEstimate
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFile
from rubberband.spec.resources import Resources
from rubberband.units import in_unit
from rubberband.views.estimate.tables import tables
from rubberband.views.report.page import render_html
from rubberband.views.report.text import print_report
from tests.builders.results import a_result

SEARCH: Mapping[str, Any] = {
    "space": {"lr": {"type": "uniform", "lower": 0, "upper": 1}},
    "scheduler": {"type": "sha", "num_samples": 4, "max_t": 4, "reduction_factor": 2},
    "metric": "loss",
    "mode": "min",
}


def node(at: int, gpus: int = 0, free: int = 0, cpus: int = 8, labels: dict[str, str] | None = None) -> ClusterNode:
    return ClusterNode(
        node=f"n{at}",
        address="10.0.0.5",
        gpus=gpus,
        free_gpus=free,
        cpus=cpus,
        free_cpus=free,
        accelerator="",
        labels=labels or {},
    )


def of_nodes(*nodes: ClusterNode) -> ClusterView:
    return ClusterView(address="10.0.0.5:6379", nodes=nodes, ray_version="", python_version="")


def cluster(*gpus: int, free: int = 0, labels: dict[str, str] | None = None) -> ClusterView:
    return of_nodes(*(node(at, size, free, labels=labels) for at, size in enumerate(gpus)))


def resources(**words: Any) -> Resources:
    return Resources(provider="ray", **words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"provider": "ray", "address": "ray://head:10001"}, "Ray Client"),
        ({"provider": "ray", "address": "head"}, "no address of a Ray cluster"),
        ({"provider": "local", "address": "head:6379"}, "read with provider: ray"),
        ({"provider": "aws", "node_labels": {"pool": "a100"}}, "read with provider: ray"),
        ({"provider": "ray", "node_labels": {"pool": "in(a,b)"}}, "node_labels"),
        ({"provider": "ray", "market": "spot"}, "a Ray cluster has none"),
        ({"provider": "ray", "side_price_per_hour": 1}, "a Ray cluster has none"),
        ({"provider": "ray", "lease": "5m"}, "Ray frees the GPUs of a driver that died within seconds"),
        ({"provider": "ray", "instance_type": "p3.8xlarge"}, "a Ray cluster has none"),
        ({"provider": "ray", "region": "eu-west-1"}, "a Ray cluster has none"),
        ({"provider": "ray", "gpus_per_instance": 0}, "for instances without GPUs write slots: 2"),
    ],
)
def test_words_that_a_cluster_does_not_read_are_refused(words: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Resources(**words)


def test_a_pool_is_not_made_of_a_ray_cluster() -> None:
    with pytest.raises(ValueError, match="shares its nodes by itself"):
        PoolFile(name="team", provider="ray", instances=2, gpus_per_instance=2)


def test_words_of_a_journal_are_read_again() -> None:
    resources = {"provider": "ray", "address": "head:6379", "node_labels": {"pool": "a100"}}
    experiment = Experiment(name="a", search=SEARCH, resources=resources)
    assert Experiment(**experiment.to_words()) == experiment


def test_an_instance_has_the_commonest_number_of_gpus() -> None:
    found = share(cluster(8, 4, 4, 0, free=1), resources())
    assert (found.gpus_per_instance, found.fitting) == (4, 4)
    assert (
        found.line == "10.0.0.5:6379: 1 node x 8 GPUs + 2 nodes x 4 GPUs, 3 free now (the plan counts on all of them)"
    )


def test_an_instance_may_be_a_part_of_a_node_and_not_of_a_smaller_one() -> None:
    assert share(cluster(4, 4), resources(gpus_per_instance=2)).fitting == 4
    found = share(cluster(8, 4, 2), resources(gpus_per_instance=4))
    assert (found.fitting, [one.node for one in found.nodes]) == (3, ["n0", "n1"])


@pytest.mark.parametrize(("cpus", "bundle"), [(4, {"GPU": 1.0, "CPU": 1.0}), (3, {"GPU": 1.0})])
def test_each_gpu_comes_with_a_cpu_where_all_nodes_have_as_many(cpus: int, bundle: dict[str, float]) -> None:
    assert share(of_nodes(node(0, gpus=4, cpus=8), node(1, gpus=4, cpus=cpus)), resources()).bundle == bundle


def test_nodes_with_fewer_cpus_than_slots_do_not_count() -> None:
    found = share(of_nodes(*(node(at, cpus=2) for at in range(3)), node(3, cpus=8)), resources(slots=4))
    assert (found.bundle, found.fitting, [one.node for one in found.nodes]) == ({"CPU": 2.0}, 1, ["n3"])


@pytest.mark.parametrize(
    ("words", "billed_s"),
    [({"provider": "ray"}, 0.0), ({"provider": "ray", "minimum_billed": "60s"}, 60.0), ({"provider": "local"}, 60.0)],
)
def test_an_instance_of_a_cluster_is_counted_for_as_long_as_it_is_held(words: dict[str, Any], billed_s: float) -> None:
    assert offer(Resources(**words)).minimum_billed_s == billed_s


@pytest.mark.parametrize(
    ("nodes", "words", "together"),
    [
        ([node(0, 1, 1), node(1, 1, 1), node(2, 1, 0)], {}, 2),  # three Ray nodes on one machine
        ([node(0, 4, 4), replace(node(1, 8, 3), address="10.0.0.6")], {"gpus_per_instance": 1}, 4),
        ([node(0, 4, 4), replace(node(1, 4, 4), address="10.0.0.6")], {}, 1),
        ([node(0, 4, 3)], {"gpus_per_instance": 2}, 1),
        ([node(0, 0, 4, cpus=4), node(1, 0, 4, cpus=4)], {"slots": 2}, 2),
        ([node(0, 4, 0)], {}, 0),
    ],
)
def test_instances_on_one_machine_are_counted_by_its_address(
    nodes: list[ClusterNode], words: dict[str, Any], together: int
) -> None:
    assert share(of_nodes(*nodes), resources(**words)).free_together == together


@pytest.mark.parametrize(
    ("found", "words", "reason"),
    [
        (cluster(0, 0), {}, "has no GPUs on its 2 nodes"),
        (cluster(4, labels={"pool": "b"}), {"node_labels": {"pool": "a"}}, "one with labels pool=a; there are pool=b;"),
        (cluster(4), {"node_labels": {"pool": "a"}, "slots": 2}, "one with labels pool=a; nodes have none;"),
        (cluster(0, labels={"pool": "b"}), {"node_labels": {"pool": "b"}}, "no GPUs on its 1 node with labels pool=b"),
        (cluster(4, 2), {"gpus_per_instance": 8}, "more than a node"),
        (cluster(4, 2), {"gpus_per_instance": 8, "max_instances": 2}, "more than a node"),
        (cluster(0), {"gpus_per_instance": 8}, "write gpus_per_instance and max_instances"),
        (cluster(4, 4), {"slots": 2}, "has none .the largest has 0."),
        (cluster(0), {"slots": 16}, "16 need a node without GPUs and with 16 CPUs"),
    ],
)
def test_a_cluster_without_such_nodes_is_refused(found: ClusterView, words: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        share(found, resources(**words))


def test_nodes_that_an_autoscaler_adds_may_be_all_of_them() -> None:
    found = share(cluster(0), resources(gpus_per_instance=4, max_instances=2))
    assert (found.gpus_per_instance, found.fitting, found.nodes) == (4, 0, ())
    assert found.line == "10.0.0.5:6379: no node with GPUs now"


def test_nodes_that_an_autoscaler_adds_may_have_labels_that_no_node_has_yet() -> None:
    found = share(cluster(4), resources(gpus_per_instance=4, max_instances=2, node_labels={"pool": "a"}))
    assert found.nodes == ()


def test_gpus_of_several_kinds_are_named_and_planned_as_equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [replace(node(at, 4, 4), accelerator=kind) for at, kind in enumerate(("T4", "A100", "A100", ""))]
    line = "2 nodes x 4 GPUs (A100) + 1 node x 4 GPUs (T4), 12 free now"
    monkeypatch.setattr(view, "require_versions", lambda found: None)
    words = {"provider": "ray", "address": "head:6379"}
    for used, note in [
        (kinds[:3], f"cluster: 10.0.0.5:6379: {line}. The plan takes A100 and T4 to be equally fast; .*node_labels"),
        (kinds[1:3], r"cluster: 10.0.0.5:6379: 2 nodes x 4 GPUs \(A100\), 8 free now\.$"),
    ]:
        monkeypatch.setattr(view, "view", lambda address, used=used: of_nodes(*used))
        (first, *_) = on_cluster(Experiment(name="a", search=SEARCH, resources=words)).notes
        assert re.search(note.replace("(A100) +", r"\(A100\) \+").replace("(T4)", r"\(T4\)"), first)


def test_slots_share_the_cpus_of_the_commonest_node_without_gpus() -> None:
    found = share(
        of_nodes(node(0, cpus=16), node(1, cpus=8, free=8), node(2, cpus=9), node(3, gpus=4)), resources(slots=4)
    )
    assert (found.gpus_per_instance, found.bundle) == (4, {"CPU": 4.0})
    assert [one.node for one in found.nodes] == ["n0"]
    found = share(of_nodes(node(0, cpus=16), node(1, cpus=8, free=8), node(2, cpus=9), node(3)), resources(slots=4))
    assert (found.bundle, found.fitting, len(found.nodes)) == ({"CPU": 2.0}, 5, 4)
    assert found.line.startswith("10.0.0.5:6379: 1 node x 16 CPUs + 1 node x 9 CPUs + 2 nodes x 8 CPUs, 8 free now (")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Experiment]:
    """Makes an experiment on a cluster of two nodes with 4 GPUs each."""
    monkeypatch.setattr(view, "view", lambda address: cluster(4, 4))
    monkeypatch.setattr(view, "require_versions", lambda found: None)

    def make(constraints: dict[str, Any], **words: Any) -> Experiment:
        scheduler = {"type": "sha", "num_samples": 8, "max_t": 8, "reduction_factor": 2}
        space = {"lr": {"type": "uniform", "lower": 0, "upper": 1}}
        search = {"space": space, "scheduler": scheduler, "metric": "loss", "mode": "min"}
        return on_cluster(
            Experiment(
                name="a",
                search=search,
                constraints=constraints,
                resources={"provider": "ray", "address": "head:6379", "gpus_per_trial": {"max": 1}, **words},
                profile={"seconds_per_iteration": {1: 600}, "trial_startup": 60},
            )
        )

    return make


def estimated(experiment: Experiment, prices: PricesAndQuotas | None = None) -> EstimateAnswer:
    profile = experiment.loaded_profiles()
    assert profile is not None
    return answer(experiment, profile, prices or PricesAndQuotas(), PlanningOptions(now=0.0))


def test_a_plan_has_the_time_until_nodes_join_as_it_is_given_seen_or_assumed(
    planned: Callable[..., Experiment], tmp_path: Path
) -> None:
    def provisioning(**words: Any) -> tuple[str, str, list[str]]:
        experiment = planned({"deadline": "24h"}, **words)
        found = estimated(experiment, local_prices_and_quotas(experiment, tmp_path))
        (one,) = [one for one in found.assumptions if one.name == "provisioning of an instance"]
        return one.value, one.basis, [note for note in found.notes if "joins" in note]

    assert provisioning() == ("1s", "default", [])
    assert provisioning(max_instances=3, provision_delay="50s") == ("50s", "given", [])
    value, basis, (note,) = provisioning(max_instances=3)
    assert (value, basis) == ("2m", "default")
    assert "takes 2m, which is assumed" in note
    for _ in range(3):
        record_join(tmp_path, "10.0.0.5:6379", 45.0)
    value, basis, (note,) = provisioning(max_instances=3)
    assert (value, basis) == ("45s", "measured")
    assert "takes 45s, as the last 3 nodes did" in note


def test_without_a_price_the_fastest_or_the_plan_of_fewest_gpu_hours_is_chosen(
    planned: Callable[..., Experiment],
) -> None:
    fastest, fewest = (
        estimated(planned({"deadline": "24h"})),
        estimated(planned({"deadline": "24h", "objective": "min_cost"})),
    )
    priced = estimated(planned({"deadline": "24h", "objective": "min_cost"}, price_per_hour=4))
    assert fastest.estimate.prediction
    assert fewest.estimate.prediction
    assert priced.estimate.prediction
    assert fastest.estimate.prediction.jct_s < fewest.estimate.prediction.jct_s
    assert 0.0 < fewest.estimate.prediction.cost_usd < fastest.estimate.prediction.cost_usd
    assert fewest.estimate.prediction.cost_usd == priced.estimate.prediction.cost_usd
    shown = str(copied(PlanEstimate, fewest))
    assert "GPU-h" in shown
    assert "USD" not in shown
    assert "USD" in str(copied(PlanEstimate, priced))


def test_a_budget_without_a_price_is_refused_with_the_line_to_write(planned: Callable[..., Experiment]) -> None:
    with pytest.raises(InputError, match=r"max_cost: 5.00 USD limits nothing .* write resources.price_per_hour: 4,"):
        planned({"deadline": "24h", "max_cost": 5})
    with pytest.raises(InputError, match="limits nothing"):
        planned({"deadline": "24h", "max_cost": 0}, price_per_hour=0)
    assert planned({"deadline": "24h", "max_cost": 5}, price_per_hour=4).constraints.max_cost_usd == 5


def test_an_estimate_of_slots_names_no_gpus(
    planned: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "view", lambda address: cluster(0, 0))
    found = estimated(planned({"deadline": "24h"}, slots=2))
    shown = "\n".join(str(table) for table in tables(found.estimate, found.assumptions, found.notes, found.bill))
    assert "slots/trial" in shown
    assert "slot-hours" in shown
    named = [line for line in shown.splitlines() if "GPU" in line.replace("GPU-h", "")]
    assert not [line for line in named if "same GPUs per trial" not in line]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("spent 1.25 USD; forecast 2 USD, (USD) 4 USD/h", "spent 1.25 GPU-h; forecast 2 GPU-h, (GPU-h) 4 GPU-h/h"),
        ("my-USD and USD_a of aUSD/USD+", "my-USD and USD_a of aUSD/USD+"),
        ('<th class="n">USD</th><th>expected USD</th>', '<th class="n">GPU-h</th><th>expected GPU-h</th>'),
        ('{"title":{"text":"USD"}}', '{"title":{"text":"GPU-h"}}'),
        ("USD: the whole bill", "GPU-h: the whole bill"),
        ("<td>USD</td> currency=USD no USD rates", "<td>USD</td> currency=USD no USD rates"),
        (r'"3 USD\u003cextra"', r'"3 GPU-h\u003cextra"'),
    ],
)
def test_amounts_are_shown_in_the_unit_that_they_count(text: str, shown: str) -> None:
    assert in_unit(text, "GPU-h") == shown
    assert in_unit(text, "USD") == text


def test_a_report_in_gpu_hours_names_no_dollars_but_a_user_s(capsys: pytest.CaptureFixture[str]) -> None:
    result = replace(a_result(currency="USD"), unit="GPU-h")
    print_report(result, verbose=True)
    text, page = capsys.readouterr().out, render_html(result)
    assert "GPU-h" in text
    assert set(re.findall(r"\S* ?\bUSD\b", text)) == {"currency=USD"}
    assert set(re.findall(r"(?:[\d}] |\(|<th[^>]*>|data-label=\"|\"text\":\")USD\b", page)) == set()
    assert "currency=USD" in page


def test_other_versions_are_refused_with_the_fix() -> None:
    other = ClusterView(address="a:1", nodes=(), ray_version="2.1.0", python_version="")
    with pytest.raises(InputError, match=r"pip install ray==2.1.0"):
        require_versions(other)
    other = ClusterView(address="a:1", nodes=(), ray_version="", python_version="3.9.1")
    with pytest.raises(InputError, match=r"runs Python 3.9.1"):
        require_versions(other)


def test_ray_s_own_switch_allows_another_patch_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, patch = platform.python_version_tuple()
    other = ClusterView(address="a:1", nodes=(), ray_version="", python_version=f"{major}.{minor}.{patch}9")
    with pytest.raises(InputError, match="runs Python"):
        require_versions(other)
    monkeypatch.setenv("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
    require_versions(other)
    with pytest.raises(InputError, match="runs Python"):
        require_versions(replace(other, python_version=f"{major}.{minor}9.1"))


def test_a_cluster_that_is_away_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no Ray cluster answers"):
        view.view("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(InputError, match="Ray Client"):
        view.resolve("auto")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert view.resolve("auto") == "head:6379"
    assert view.resolve("other:6379") == "other:6379"


def test_a_dashboard_s_address_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(InputError, match=r"RAY_ADDRESS: 'http://127.0.0.1:8265' is no address of a Ray cluster"):
        view.resolve("auto")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_has_the_address_that_a_connected_process_reports(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"{host}:6379")
    expected = f"{get_node_ip_address()}:6379"
    assert view.resolve("auto") == view.resolve(f"{host}:6379") == expected != f"{host}:6379"
