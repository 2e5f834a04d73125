"""`rubberband simulate`: workloads with profiles, and with traces in AdaptDL's format; the page; bad input."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from rubberband.commands.common import TableFormat
from rubberband.commands.pool import WorkloadFormat, simulate
from rubberband.errors import InputError
from rubberband.planner.sharing.jobs import Application, CurveJob
from rubberband.planner.sharing.simulation import fair_gpus
from rubberband.pools import simulating
from rubberband.pools.report import policy_table, render_simulation
from rubberband.pools.simulating import simulated
from rubberband.spec.loading import load_pool
from rubberband.spec.profile_file import load_profile
from tests.builders.adaptdl_data import HEADER, write_data

PROFILE = {
    "schema": "rubberband.profile/1",
    "seconds_per_iteration": {"1": 60.0, "2": 32.0, "4": 18.0, "8": 12.0},
    "trial_startup_s": 5.0,
}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return write(tmp_path / "team.yaml", "{instances: 2, gpus_per_instance: 4, price_per_hour: 3.60}")


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    write(tmp_path / "resnet.json", json.dumps(PROFILE))
    rows = [f"{60 * number}s,j{number},resnet,{20 + 10 * number},4" for number in range(5)]
    return write(tmp_path / "jobs.csv", "\n".join(["at,name,kind,iterations,gpus", *rows]) + "\n")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write_data(tmp_path) / "traces"


@pytest.fixture
def public(traces: Path) -> Path:
    return traces.parent / "workloads" / "workload-1.csv"


def test_policies_are_compared_in_json(pool: Path, jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(pool, jobs, None, ["default", "fifo"], output=TableFormat.json)
    found = json.loads(capsys.readouterr().out)
    assert set(found["policies"]) == {"default", "fifo"}
    figures = found["policies"]["default"]
    assert figures["unfinished"] == 0
    assert figures["median_jct_s"] <= figures["p99_jct_s"] <= figures["makespan_s"]
    assert figures["cost_usd"] == pytest.approx(2 * 3.60 * figures["makespan_s"] / 3600.0)
    assert set(figures) == {
        *("mean_jct_s", "median_jct_s", "p99_jct_s", "makespan_s", "utilisation"),
        *("mean_finish_time_fairness", "max_finish_time_fairness"),
        *("moves_per_job", "mean_instances", "cost_usd", "unfinished", "cpu_s", "sizes"),
    }


def test_interference_slows_gangs_that_share_machines(
    tmp_path: Path, jobs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three = write(tmp_path / "three.yaml", "{instances: 3, gpus_per_instance: 4}")
    header = "at,name,kind,iterations,gpus,min_gpus\n"
    both = write(tmp_path / "both.csv", header + "0s,a,resnet,10,6,6\n0s,b,resnet,10,6,6\n")

    def mean_jct_s(*, interference: float = 0.0, share_machines: bool = False) -> float:
        asked = {"interference": interference, "share_machines": share_machines}
        simulate(three, both, None, ["equal"], output=TableFormat.json, **asked)  # type: ignore[arg-type]
        found = json.loads(capsys.readouterr().out)
        assert {key: found[key] for key in asked} == asked
        return float(found["policies"]["equal"]["mean_jct_s"])

    alone_s = 10 * simulating.curve_of(load_profile(tmp_path / "resnet.json"), 12, 4, "adaptive")[5]
    # with avoidance the second gang waits for the first one
    assert mean_jct_s() == mean_jct_s(interference=0.5) == pytest.approx(5.0 + alone_s + (5.0 + alone_s) / 2)
    assert mean_jct_s(share_machines=True) == pytest.approx(5.0 + alone_s)
    assert mean_jct_s(interference=0.25, share_machines=True) == pytest.approx(5.0 + alone_s / 0.75)
    shared = simulated(load_pool(three), both, ["equal"], interference=0.25, share_machines=True)
    assert policy_table(shared).title.endswith("3 instances of 4 GPUs, shared by gangs, 25 % interference")
    assert "shared by gangs, 25 % interference" in render_simulation(shared)


@pytest.mark.parametrize("interference", [-0.1, 1.0, 25.0, math.nan, math.inf])
def test_a_wrong_interference_is_one_line(interference: float, pool: Path, jobs: Path) -> None:
    with pytest.raises(InputError, match=r"interference=.* is not a number from 0 to below 1; write 0\.25 for gangs"):
        simulated(load_pool(pool), jobs, ["equal"], interference=interference)


def test_a_pool_that_scales_pays_for_the_instances_in_use(
    tmp_path: Path, jobs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # on 1, 2, 4, 8 GPUs a job has 1, .94, .83, .625 of a single GPU's efficiency
    text = "{instances: 6, gpus_per_instance: 2, price_per_hour: 3.60, autoscale: {lower: 0.6, upper: 0.9}}"
    scaling, page = write(tmp_path / "scaling.yaml", text), tmp_path / "page.html"
    two = write(tmp_path / "two.csv", "at,name,kind,iterations\n0s,a,resnet,100\n2h,b,resnet,10\n")
    simulate(scaling, two, None, ["default"], output=TableFormat.json, html=page)
    found = json.loads(capsys.readouterr().out)
    assert found["autoscale"] == {"lower": 0.6, "upper": 0.9}
    figures = found["policies"]["default"]
    ends_s = [5.0 + 100 * 12.0, 7200.0 + 5.0 + 10 * 12.0]
    assert figures["sizes"] == [
        {"at": 0.0, "instances": 4},
        {"at": pytest.approx(ends_s[0]), "instances": 0},
        {"at": 7200.0, "instances": 4},
    ]
    held_s = 4 * (ends_s[0] + ends_s[1] - 7200.0)
    assert figures["cost_usd"] == pytest.approx(3.60 * held_s / 3600.0)
    assert figures["mean_instances"] == pytest.approx(held_s / ends_s[1])
    assert figures["utilisation"] == pytest.approx(1.0)
    assert "Instances of the pool by its autoscaling" in page.read_text()
    table = policy_table(simulated(load_pool(scaling), two, ["default"]))
    assert "at most 6 instances" in table.title
    assert dict(zip(table.header, table.rows[0], strict=True))["instances"] == f"{held_s / ends_s[1]:.1f}"


@pytest.mark.parametrize("policy", ["default", "equal", "hell", "tiresias", "optimus"])
def test_every_policy_trains_all_jobs_on_a_pool_that_scales(
    policy: str, tmp_path: Path, public: Path, traces: Path
) -> None:
    text = "{instances: 4, gpus_per_instance: 4, autoscale: {lower: 0.55, upper: 0.75}}"
    outcome = simulated(load_pool(write(tmp_path / "s.yaml", text)), public, [policy], traces).outcomes[policy]
    assert len(outcome.jcts_s) == len(outcome.jobs)
    assert len({instances for _, instances in outcome.sizes}) > 1
    assert outcome.utilisation <= 1.0 + 1e-9


def test_fairness_compares_with_a_fair_share_of_the_pool(tmp_path: Path, pool: Path, jobs: Path) -> None:
    rows = "0s,a,resnet,10,8\n0s,b,resnet,10,8\n"
    two = write(tmp_path / "two.csv", "at,name,kind,iterations,gpus\n" + rows)
    outcomes = simulated(load_pool(pool), two, ["equal", "fifo"]).outcomes
    # 4 of 8 GPUs each take 18 s an iteration; the first of fifo has all 8, and the second one waits for it
    assert outcomes["equal"].fairness == pytest.approx([1.0, 1.0])
    first_s, fair_s = 5.0 + 10 * 12.0, 5.0 + 10 * 18.0
    first, second = outcomes["fifo"].jobs
    assert first.fairness == pytest.approx(first_s / fair_s)
    assert second.fairness > 1.0


def test_fair_shares_follow_weights_and_the_time_that_jobs_are_there() -> None:
    def job(submitted_at: float, done_at: float | None, weight: float = 1.0) -> CurveJob:
        return CurveJob(name="j", submitted_at=submitted_at, kind="k", seconds=[1.0], weight=weight, done_at=done_at)

    assert fair_gpus([job(0.0, 10.0), job(0.0, 10.0, weight=3.0)], 8, 10.0) == [2, 6]
    assert fair_gpus([job(0.0, 10.0), job(5.0, 10.0), job(20.0, 30.0)], 8, 30.0) == [5, 4, 8]
    assert fair_gpus([job(0.0, None), job(0.0, None)], 8, 10.0) == [4, 4]
    assert fair_gpus([job(0.0, 10.0) for _ in range(20)], 8, 10.0) == [1] * 20


def test_a_job_begins_on_the_first_gpus_of_its_policy_and_doubles(pool: Path, public: Path, traces: Path) -> None:
    for policy, first in (("ranked", 2), ("ranked:first=1", 1), ("fitness", 1)):
        for shared in (False, True):
            found = simulated(load_pool(pool), public, [policy], traces, share_machines=shared).outcomes[policy]
            sizes = [counts["toy-0"] for _, counts in found.allocated if counts.get("toy-0")]
            assert sizes[0] == first
            assert all(after <= 2 * max(sizes[: at + 1]) for at, after in enumerate(sizes[1:]))


def test_a_rigid_job_trains_at_the_measured_speed(pool: Path, tmp_path: Path, traces: Path) -> None:
    rigid = write(tmp_path / "one.csv", f"{HEADER}\ntoy-0,0,toy,4,128\n")
    (job,) = simulating.read_traces(rigid, traces, "rigid")
    outcome = simulated(load_pool(pool), rigid, ["tiresias"], traces).outcomes["tiresias"]
    # 4 epochs of 1,000 steps, each worth gain(M) = (var + 1) / (var / 4 + 1); a step of 32 samples takes 62 ms
    steps = sum(1000.0 / ((var + 1.0) / (var / 4.0 + 1.0)) for var in (4.0, 5.0, 6.0, 7.0))
    assert job.application.step_s((4,), 32) == pytest.approx((0.062, 0.02))
    assert outcome.jobs[0].jct_s == pytest.approx(30.0 + 0.062 * steps, rel=1e-6)


def test_placements_are_looked_up_up_to_rotation_and_interpolated(public: Path, traces: Path) -> None:
    application = simulating.read_traces(public, traces, "adaptive")[0].application
    assert application.step_s((4, 4), 24) == pytest.approx((0.074, 0.04))
    unmeasured = application.step_s((4, 4, 4), 16)
    assert application.step_s((4, 4), 16)[0] < unmeasured[0] < 0.116
    assert application.passes(128, 1) == (32, 3)
    assert application.most_gpus == 16


def test_a_job_with_a_history_knows_how_it_scales_and_begins_on_its_first_gpus(public: Path, traces: Path) -> None:
    known, other = simulating.read_traces(public, traces, "adaptive")[:2]
    for gpus in (1, 2, 4):
        for per_gpu in (8, 32):
            assert known.time_step((gpus,), per_gpu) == known.application.step_s((gpus,), per_gpu)
    scales = [job.demand(0.0, 8).seconds_left[0] / job.demand(0.0, 8).seconds_left[7] for job in (known, other)]

    assert scales[0] < 2.0 < scales[1] == pytest.approx(8.0)
    assert [job.demand(0.0, 8).most_gpus for job in (known, other)] == [1, 1]


def test_a_job_that_gave_gpus_back_still_has_at_most_twice_the_most_that_it_trained_on(
    public: Path, traces: Path
) -> None:
    job = simulating.read_traces(public, traces, "adaptive")[0]
    for placement in ((4,), (1,)):
        job.resize(placement)
        job.advance(60.0, 0.0)

    assert job.demand(0.0, 16).most_gpus == 8


def test_each_job_has_the_measurements_of_its_own_model(tmp_path: Path, traces: Path) -> None:
    shutil.copytree(traces / "toy", traces / "other")
    both = write(tmp_path / "both.csv", f"{HEADER}\na,0,toy,1,32\nb,0,other,1,32\nc,0,toy,1,32\n")
    known: dict[str, Application] = {}
    jobs = simulating.read_traces(both, traces, "adaptive", 1, known)

    assert [job.kind for job in jobs] == ["toy", "other", "toy"]
    assert all(job.application is known[job.kind] for job in jobs)
    assert {name: each.name for name, each in known.items()} == {"toy": "toy", "other": "other"}


def test_without_a_price_there_is_no_cost(tmp_path: Path, jobs: Path) -> None:
    free = write(tmp_path / "free.yaml", "instances: 2\ngpus_per_instance: 4\n")
    assert "cost" not in policy_table(simulated(load_pool(free), jobs, ["equal"])).header


def test_the_page_shows_policies_completion_times_and_allotments(pool: Path, jobs: Path) -> None:
    found = simulated(load_pool(pool), jobs, ["default", "equal"])
    text = render_simulation(found)
    assert "Job completion times" in text
    assert "Finish-time fairness" in text
    assert "Allocations under equal" in text
    assert "nothing was charged" in text
    assert "USD" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at,name,kind\n", "has no column 'iterations'; its first line must name at, name, kind, iterations"),
        ("at,name,kind,iterations\n", "has no rows; write one for each job"),
        (
            "at,name,kind,iterations\n-5,a,resnet,1\n",
            "line 2: at: '-5' is not a duration from 0s to 3650d; write it as 90s",
        ),
        ("at,name,kind,iterations\n0s,a,resnet,-1\n", "line 2: iterations='-1' is not a number above 0; correct it"),
        ("at,name,kind,iterations\n0s,a,resnet,\n", "line 2: iterations is empty; fill it in"),
        ("at,name,kind,iterations\n0s,a,resnet,1\n0s,a,resnet,1\n", "two jobs with the name 'a'; name each job once"),
        ("at,name,kind,iterations,gpus\n0s,a,resnet,1,1.5\n", "gpus='1.5' is not a number; correct it"),
        (
            "at,name,kind,iterations,min_gpus\n0s,a,resnet,1,9\n",
            "line 2: job 'a' needs 9 GPUs, and the pool has 8; leave it out, or use a larger pool",
        ),
    ],
)
def test_a_wrong_workload_is_one_line(tmp_path: Path, pool: Path, jobs: Path, text: str, message: str) -> None:
    wrong = write(tmp_path / "wrong.csv", text)
    with pytest.raises(InputError) as caught:
        simulating.read_jobs(wrong, 8, 4, "adaptive")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_traces_policies_and_pools_are_one_line(tmp_path: Path, pool: Path, public: Path, traces: Path) -> None:
    asked = load_pool(pool)
    with pytest.raises(InputError, match="nothing; give the folder of traces, which has a folder for each model"):
        simulated(asked, public, ["default"], tmp_path / "nothing")
    with pytest.raises(InputError, match=r"there is no file .*placements\.csv; check the path"):
        simulated(asked, public, ["default"], tmp_path)
    negative = write(tmp_path / "negative.csv", f"{HEADER}\ntoy-0,-1,toy,1,32\n")
    with pytest.raises(InputError, match="line 2: time='-1' is not a number >= 0"):
        simulated(asked, negative, ["default"], traces)
    twice = write(tmp_path / "twice.csv", f"{HEADER}\ntoy-0,0,toy,1,32\ntoy-0,60,toy,1,32\n")
    with pytest.raises(InputError, match="two jobs with the name 'toy-0'; name each job once"):
        simulated(asked, twice, ["default"], traces)
    with pytest.raises(InputError, match="policy 'best' does not exist; choose one of default"):
        simulated(asked, public, ["best"], traces)
    with pytest.raises(InputError, match="need each other; give both, or none"):
        simulate(pool, public, None, None, WorkloadFormat.adaptdl)
    unknown = load_pool(write(tmp_path / "unknown.yaml", "{instances: 1, instance_type: g4dn.12xlagre}"))
    with pytest.raises(InputError, match=r"does not know 'g4dn.12xlagre'; did you mean 'g4dn.12xlarge'"):
        simulated(unknown, public, ["default"], traces)
    empty = write(tmp_path / "empty.yaml", "{instances: 2}")
    with pytest.raises(InputError, match="gpus_per_instance"):
        load_pool(empty)


def test_a_pool_of_a_known_type_has_its_gpus_and_price(tmp_path: Path, jobs: Path) -> None:
    known = write(tmp_path / "known.yaml", "{instances: 2, instance_type: g4dn.12xlarge, provider: aws}")
    found = simulated(load_pool(known), jobs, ["default"])
    assert found.capacity.gpus == 8
    assert found.usd_per_hour > 2.0
