"""From an experiment to its backend: what measuring may cost, and what is said before a run. Nothing real is rented."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.provider import ClusterRequest
from rubberband.cloud.ray_head import ray_node
from rubberband.errors import Cancelled, InputError, RubberbandError
from rubberband.executor import DriverRequest, Entrypoint, ExperimentFolder, Faults, Inbox, RunSpec, VirtualBackend
from rubberband.planning.prices_and_quotas import cloud_prices_and_quotas
from rubberband.running.profile import MeasuredProfile, measure_profile
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.experiment import Experiment
from rubberband.spec.profile_file import load_profile
from rubberband.spec.training import Batch
from rubberband.values.adaptive import BatchLimits, GoodputProfile, Throughput
from rubberband.values.plan import Spent
from tests.builders.adaptive_backend import AdaptiveBackend
from tests.builders.aws_account import Account
from tests.builders.experiments import PROFILE, experiment
from tests.builders.plans import plan_job

MODEL = GoodputProfile(
    throughput=Throughput(alpha_grad_s=0.02, beta_grad_s=0.001, alpha_local_s=0.01, gamma=2.0),
    noise_scale=300.0,
    samples_per_iteration=640.0,
    limits=BatchLimits(initial=64, max=1024),
)


def measured(
    asked: Experiment, home: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults | None = None
) -> MeasuredProfile:
    """What is measured on a virtual clock in place of the local provider."""

    def make_backend(_folder: object, spec: RunSpec, request: ClusterRequest) -> VirtualBackend:
        metric = spec.experiment.search.metric
        if spec.experiment.batch.policy == "goodput":
            return AdaptiveBackend("test", request.offer, PROFILE, metric=metric).reporting(MODEL, 500.0)
        return VirtualBackend("test", request.offer, PROFILE, metric=metric, faults=faults)

    monkeypatch.setattr("rubberband.running.profile.make_ray_backend", make_backend)
    entrypoint = Entrypoint.parse("tests.builders.trials.ray_trials:Counter", search_path=(home,))
    return measure_profile(asked, entrypoint, ExperimentFolder(home=home, name="test"))


ONE_GPU_S = 3.0 + 4.0 + 3.0 + 3 * 4.0
ALL_S = ONE_GPU_S + 3.0 + 2.5 + 3.0 + 3 * 2.5


def test_without_limits_all_is_measured_and_its_price_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(experiment(provision_delay="1s", init_delay="0s"), tmp_path, monkeypatch)
    assert [point.gpus for point in found.points] == [1, 2]
    assert found.cost_usd == pytest.approx(2 * 0.01 * ALL_S)
    assert not found.stopped_by


def test_a_function_is_billed_for_its_gpus_while_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(experiment(billing="per_function", init_delay="0s"), tmp_path, monkeypatch)
    assert found.cost_usd == pytest.approx(2 * 0.01 * ALL_S)


def test_a_batch_that_adapts_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapting = experiment().model_copy(update={"batch": Batch(policy="goodput")})
    found = measured(adapting, tmp_path, monkeypatch)
    lines = found.lines()
    assert re.fullmatch(
        r"1 GPU: 4\.000 s per iteration \(.*side by side\); a step of 64 in 84 ms, .*1024 in .*", lines[0]
    )
    assert lines[2].startswith("batches of 64 to 1024: noise scale 500, ")
    assert re.fullmatch(
        r"a trial scales to about \d+ GPUs( or more)?, which is extrapolated: 2 were measured", lines[3]
    )
    found.save(tmp_path / "test.profile.json")
    assert load_profile(tmp_path / "test.profile.json").goodput == found.profile.goodput
    job = plan_job(adapting, found.profile)
    assert job.profile.iteration_s(1) < 4.0
    assert plan_job(experiment(), found.profile).profile.iteration_s(1) == pytest.approx(4.0)


@pytest.mark.parametrize("billing", ["per_instance", "per_function"])
def test_measuring_keeps_to_max_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, billing: str) -> None:
    asked = experiment({"max_cost": 1.2}, billing=billing, init_delay="30s")
    found = measured(asked, tmp_path, monkeypatch)
    assert [point.gpus for point in found.points] == [1]
    assert found.cost_usd <= 1.2
    assert "beyond 1 GPU nothing was measured: max_cost=1.20 USD is reached; raise it" in found.lines()[-1]
    found.save(tmp_path / "test.profile.json")
    assert list(json.loads((tmp_path / "test.profile.json").read_text())["seconds_per_iteration"]) == ["1"]


def test_measuring_keeps_to_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RubberbandError, match=r"before its first point: deadline \(20s from now\) is reached"):
        measured(experiment({"deadline": "20s"}), tmp_path, monkeypatch)


def test_a_max_cost_that_covers_no_minute_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"max_cost=1\.00 USD does not cover measuring .*at least 1\.20 USD"):
        measured(experiment({"max_cost": 1.0}), tmp_path, monkeypatch)


def test_iteration_timeout_is_the_longest_silence_while_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(failures={(trial, 1): "hung" for trial in range(8)})
    with pytest.raises(RubberbandError, match="took more than 7 s"):
        measured(experiment({"iteration_timeout": "7s"}), tmp_path, monkeypatch, faults)


def test_logical_gpus_do_not_depend_on_hidden_ones(tmp_path: Path) -> None:
    base = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/bin"}
    assert "CUDA_VISIBLE_DEVICES" not in ray_node.environment(base, tmp_path, {}, ())
    assert ray_node.environment(base, tmp_path, {}, ("1", "2"))["CUDA_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(("host", "dead_after_s"), [("127.0.0.1", (3, 6)), ("10.0.0.5", (15, 40))])
def test_a_node_on_another_machine_may_be_busy_for_longer(
    tmp_path: Path, host: str, dead_after_s: tuple[int, int]
) -> None:
    chosen = ray_node.environment({}, tmp_path, {}, (), host=host)
    period, timeout, failures = (
        int(chosen[f"RAY_health_check_{word}"]) for word in ("period_ms", "timeout_ms", "failure_threshold")
    )
    assert failures * period / 1000 >= dead_after_s[0]
    assert failures * (period + timeout) / 1000 <= dead_after_s[1]


def test_every_run_has_a_name_of_its_own_in_the_cloud_and_in_the_bucket(tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test")
    one, other = (
        RunSpec.of(experiment(checkpoints="s3://bucket/all/"), None, folder, Spent(seconds=0.0)) for _ in range(2)
    )
    assert one.run != other.run
    assert one.checkpoints == f"s3://bucket/all/test-{one.run}"
    assert RunSpec.of(experiment(checkpoints="here"), None, folder, Spent()).checkpoints == str(Path("here").absolute())
    assert RunSpec.from_json(one.to_json()) == one


def on_ec2(account: Account, **words: Any) -> Experiment:
    """The experiment above, on the account's instances."""
    resources = account.resources(instance_type="g5.12xlarge", **words).model_dump(by_alias=True, exclude_none=True)
    return experiment(**resources, gpus_per_instance=None, price_per_hour=None)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    """The one that sessions are opened for; the driver is in its VPC."""
    made = Account()
    monkeypatch.setattr(time, "time", lambda: made.now)  # prices are asked for as of now
    monkeypatch.setattr("rubberband.cloud.aws.client.open_session", lambda *_: made.session)
    monkeypatch.setattr("rubberband.cloud.aws.preflight.own_place", lambda: made.place)
    return made


def test_before_a_run_on_ec2_prices_and_quotas_are_looked_up_and_reported(account: Account, tmp_path: Path) -> None:
    lines: list[str] = []
    asked = on_ec2(account)
    prices = cloud_prices_and_quotas(asked, tmp_path, lines.append)
    assert prices.table is not None
    assert prices.room is not None
    assert prices.room["g5.12xlarge"]["on_demand"] > 0
    job = plan_job(asked, PROFILE, table=prices.table, room=prices.room)
    assert job.offer.price_usd_per_hour > 0
    assert cloud_prices_and_quotas(experiment(), tmp_path, lines.append).table is None


def test_problems_with_ec2_are_found_before_a_run(account: Account, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nosuchbucket"):
        cloud_prices_and_quotas(on_ec2(account, checkpoints="s3://nosuchbucket/x"), tmp_path, lambda _: None)


def test_missing_credentials_are_reported_instead_of_missing_prices(account: Account, tmp_path: Path) -> None:
    account.session = account.fake.session("nobody")
    asked = on_ec2(account, market="spot")
    with pytest.raises(InputError, match="there are no AWS credentials"):
        cloud_prices_and_quotas(asked, tmp_path, lambda _: None)


def test_a_measurement_ends_what_one_that_was_cut_off_left_on_ec2(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Cluster:
        def __init__(self, request: ClusterRequest) -> None:
            self._run = request.run

        def close(self) -> None:
            closed.append(self._run)

    monkeypatch.setattr("rubberband.running.profile.open_provider", Cluster)
    note = tmp_path / "profiling" / "experiments" / "test" / "run"
    note.parent.mkdir(parents=True)
    note.write_text("of one that was cut off")
    measured(on_ec2(account, init_delay="0s", provision_delay="0s"), tmp_path, monkeypatch)
    assert closed == ["of one that was cut off"]
    assert not note.exists()
    measured(on_ec2(account, init_delay="0s", provision_delay="0s"), tmp_path, monkeypatch)
    assert len(closed) == 1


def test_measuring_ends_when_a_request_asks_for_it_and_the_request_is_gone_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test")
    inbox = Inbox(folder.inbox)
    monkeypatch.setattr(
        "rubberband.running.run.named_entrypoint",
        lambda *_: Entrypoint.parse("tests.builders.trials.ray_trials:Counter"),
    )

    def make_backend(_folder: object, spec: RunSpec, request: ClusterRequest) -> VirtualBackend:
        inbox.put(DriverRequest(id="c-1", kind="cancel", asked_at=1.0))
        return VirtualBackend("test", request.offer, PROFILE, metric=spec.experiment.search.metric)

    monkeypatch.setattr("rubberband.running.profile.make_ray_backend", make_backend)
    with pytest.raises(Cancelled, match="nothing was saved"):
        run_experiment(experiment(), folder, RunOptions(check=False))
    assert inbox.pending() == []
    assert not folder.exists
