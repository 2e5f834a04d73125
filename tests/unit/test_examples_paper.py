"""The papers' experiments run, on reduced sizes, and have the shape that the papers give them."""

import importlib
import re
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rubberband.errors import RubberbandError
from tests.builders.adaptdl_data import write_data

FOLDER = Path(__file__).parents[2] / "examples" / "paper"
ROWS = [
    *(("async_sgd", part) for part in ("figure_1", "figure_5", "figure_10", "figure_13", "figure_15", "table_2")),
    *(("elastic", part) for part in ("figure_4", "figure_9", "figure_10", "figure_11", "figure_12")),
    *(("elastic", part) for part in ("table_2", "table_3", "table_4")),
    *(
        ("lb_bsp", part)
        for part in ("figure_1", "figure_2", "figure_4", "figure_6", "figure_7", "figure_8", "figure_11")
    ),
    ("pollux", "table_3"),
]
"""Script and part."""
ON_DATA = (
    *("figure_1", "figure_2", "figure_3", "table_2", "figure_5", "figure_6", "overheads", "figure_7"),
    *("figure_8a", "figure_8b", "figure_8c", "prior_exploration", "figure_9", "table_3_measured"),
)
"""Parts of `pollux.py` that need measurements."""
TINY = 1e-9


@pytest.fixture(scope="module")
def load() -> Iterator[dict[str, ModuleType]]:
    """The examples as modules that find each other as when one of them is run as a script."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert not names & set(sys.modules), "no other module has an example's name"
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in sorted(names)}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


def test_paying_per_instance_is_never_cheaper_and_stragglers_widen_the_gap(load: dict[str, ModuleType]) -> None:
    elastic = load["elastic"]

    def bill(policy: str, sigma_s: float, billing: str) -> float:
        return float(elastic.bill_usd("stage", "no queue", policy, sigma_s, billing, 2000))

    for policy in ("fixed", "elastic"):
        few, many = (bill(policy, s, "per_instance") / bill(policy, s, "per_function") for s in (1.0, 10.0))
        assert 1.0 <= few < many


def test_dear_data_leaves_elastic_little_to_save_and_never_makes_it_dearer(load: dict[str, ModuleType]) -> None:
    for curve in load["cases"].CURVES:
        free, paid, small = (
            fixed / elastic
            for fixed, elastic in (
                load["elastic"].data_costs(data, curve, price)
                for data, price in (("ImageNet", 0.0), ("ImageNet", 0.16), ("CIFAR-10", 0.16))
            )
        )
        assert 1.0 - TINY <= paid < free
        assert paid < small


@pytest.mark.parametrize("billing", ["per_instance", "per_function"])
@pytest.mark.parametrize("curve", ["placed", "scattered"])
def test_more_trials_widen_the_difference(load: dict[str, ModuleType], billing: str, curve: str) -> None:
    few, many = (load["elastic"].trial_costs(billing, curve, trials) for trials in (64, 256))
    fair, fixed, elastic = few

    assert elastic <= fixed + TINY
    assert fixed <= fair + TINY
    assert 0.0 < fair - elastic < many[0] - many[2]


def test_a_fixed_cluster_can_run_every_elastic_plan_where_holding_is_free(load: dict[str, ModuleType]) -> None:
    fair, fixed, elastic = load["elastic"].trial_costs("per_function", "scattered", 64)

    assert fixed == pytest.approx(elastic)
    assert fair > 1.1 * fixed


def test_start_up_of_instances_makes_plans_dearer_and_the_tightest_deadline_saves_most(
    load: dict[str, ModuleType],
) -> None:
    elastic = load["elastic"]
    short, long = elastic.pair(1.0, 90), elastic.pair(100.0, 90)

    for policy in ("fixed", "elastic"):
        assert getattr(long, policy).prediction.cost_usd > getattr(short, policy).prediction.cost_usd
    assert elastic.tightest(1.0).saving > short.saving > elastic.pair(1.0, 160).saving > 1.0


def test_no_policy_is_cheaper_than_the_exact_search_and_more_time_never_dearer(load: dict[str, ModuleType]) -> None:
    elastic = load["elastic"]
    cost = {cell: planned.prediction.cost_usd for cell, planned in elastic.table_plans().items()}

    for minutes in elastic.MINUTES:
        for policy in elastic.ALL_POLICIES:
            assert cost[elastic.EXACT, minutes] <= cost[policy, minutes] + TINY
    for policy in (elastic.STATIC, elastic.NAIVE, elastic.EXACT):
        assert cost[policy, 20] >= cost[policy, 30] >= cost[policy, 40]


def test_the_plan_has_the_papers_gangs_and_the_papers_own_cannot_cost_what_it_says(load: dict[str, ModuleType]) -> None:
    cases, ours = load["cases"], load["elastic"].table_plans()[load["elastic"].EXACT, 20]
    paper = cases.predict(cases.STAGES, cases.PAPER_PLAN, cases.resnet101(), cases.warm())

    assert [(each.instances, each.gpus_per_trial) for each in ours.plan.stages] == [(8, 1), (5, 2), (3, 4), (2, 8)]
    assert paper.jct_s == pytest.approx(cases.PAPER_JCT_S)
    assert ours.prediction.cost_usd < paper.cost_usd < cases.PAPER_USD


@pytest.mark.long
def test_gangs_that_span_instances_are_slower_on_real_local_instances(load: dict[str, ModuleType]) -> None:
    placed, scattered = (load["local_runs"].measured(gpus) for gpus in (4, 1))

    assert [each.instances for each in placed.values()] == [1, 1, 1]
    assert [each.instances for each in scattered.values()] == [1, 2, 4]


def test_a_gang_that_a_replan_left_out_is_named_with_the_remedy(
    load: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = [{"gpus": gpus, "step_s": 1.0, "instances": 1.0} for gpus in (1.0, 2.0)]
    trials = [SimpleNamespace(curve=[(0.0, 1, each) for each in metrics])]
    monkeypatch.setattr(load["local_runs"], "run", lambda *_, **__: SimpleNamespace(trials=trials))

    with pytest.raises(RubberbandError, match=r"placed-on-4: no gang of 4 workers ran, .* run it again"):
        load["local_runs"].measured(4)


def test_connections_of_a_ring_know_which_of_them_leave_their_instance_and_rank_0_may_be_late(
    load: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: dict[int, Any] = {}
    kept = socket.create_server(("127.0.0.1", 0), backlog=8)
    place = f"tcp://127.0.0.1:{kept.getsockname()[1]}"

    def join(rank: int, instance: str) -> None:
        context = SimpleNamespace(rank=rank, num_workers=3, rendezvous=place)
        rings[rank] = load["sleeping"].Ring(context, instance)
        rings[rank].reduce()

    with ThreadPoolExecutor() as threads:
        others = [threads.submit(join, rank, instance) for rank, instance in ((1, "a"), (2, "b"))]
        for _ in others:
            kept.accept()[0].close()
        kept.close()
        others.append(threads.submit(join, 0, "a"))
        for each in others:
            each.result()
    for ring in rings.values():
        ring.close()

    assert [rings[rank].leaves for rank in range(3)] == [False, True, True]
    assert {ring.instances for ring in rings.values()} == {2}


@pytest.mark.by_default(4)
@pytest.mark.parametrize(("name", "part"), ROWS)
def test_a_row_has_a_verdict_statements_and_cpu_seconds(
    load: dict[str, ModuleType], name: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load["rows"].show(load[name].PARTS, "Rows.", [part, "--small"])

    expect_a_row(capsys.readouterr().out.splitlines())


def expect_a_row(lines: list[str]) -> None:
    """Raise AssertionError unless the lines are those of one part."""
    assert re.match(r"(agrees|partly|differs) +\w+( \w+)*: .* \(\d+\.\d CPU s\)$", lines[0])
    assert re.match(r"  \[(agrees|partly|differs)\] “", lines[1])
    assert re.fullmatch(r"\d agrees, \d partly, \d differs; \d+ CPU s in \d+ s", lines[-1])


@pytest.fixture(scope="module")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic data in the format of Pollux's."""
    return write_data(tmp_path_factory.mktemp("data"), num_jobs=4)


@pytest.mark.by_default(3)
@pytest.mark.parametrize("part", ON_DATA)
def test_a_row_of_pollux_is_computed_from_the_given_data(
    load: dict[str, ModuleType], part: str, measurements: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load["pollux"].main([part, "--small", "--data", str(measurements)])

    expect_a_row(capsys.readouterr().out.splitlines())


def test_parts_that_need_data_are_named_with_the_remedy_where_it_is_missing(load: dict[str, ModuleType]) -> None:
    with pytest.raises(SystemExit, match=r"^no measurements for figure_7: give their folder with --data DIR$"):
        load["pollux"].main(["figure_7"])


def test_a_folder_without_workloads_is_refused_in_one_line(load: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no workloads/workload-N\.csv; give the folder of the public data"):
        load["pollux"].main(["figure_7", "--data", str(tmp_path)])


def test_a_part_that_fails_is_one_line_and_the_others_follow(
    load: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    def figure_1(small: bool) -> Iterator[Any]:
        """Needs a package."""
        importlib.import_module("nosuch")
        yield "never"

    def figure_2(small: bool) -> Iterator[Any]:
        """Needs instances."""
        raise RubberbandError("no instance started")
        yield "never"

    def figure_3(small: bool) -> Iterator[Any]:
        """Agrees."""
        yield load["rows"].Statement("Words.", "agrees", "Found.")

    with pytest.raises(SystemExit, match="1"):
        load["rows"].show((figure_1, figure_2, figure_3), "Rows.", [])

    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == "failed   Figure 1: it needs nosuch; run pip install 'rubberband-tune[examples]'"
    assert lines[1] == "failed   Figure 2: no instance started"
    assert lines[2].startswith("agrees   Figure 3: Agrees (")
    assert lines[-1].startswith("1 agrees, 0 partly, 0 differs, 2 failed;")


def test_help_lists_every_part_with_its_title(load: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        load["rows"].show(load["lb_bsp"].PARTS, "Rows.", ["--help"])

    assert "  figure_7      Test accuracy by training\n" in capsys.readouterr().out


def test_an_unknown_row_is_refused_with_the_known_ones(
    load: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load["rows"].show(load["async_sgd"].PARTS, "Rows.", ["figure_99"])

    assert "no part 'figure_99'; choose from figure_1, figure_3" in capsys.readouterr().err


def test_a_row_that_is_not_measured_is_the_same_again(load: dict[str, ModuleType]) -> None:
    part = load["async_sgd"].figure_9

    once = list(part(True))
    load["async_sgd"].simulated.cache_clear()

    assert list(part(True)) == once


def test_a_search_on_the_simulator_is_the_same_again_and_its_trials_run_four_at_a_time(
    load: dict[str, ModuleType],
) -> None:
    tuning = load["tuning"]
    arms = {name: tuning.ARMS[name] for name in ("Baseline", "Pollux")}
    once, again = (
        {name: tuning.Tuned(arm=arm, world=tuning.PLAIN, trials=14, seed=3).run().jobs for name, arm in arms.items()}
        for _ in range(2)
    )

    assert once == again
    for jobs in once.values():
        assert [job.name for job in jobs] == [str(trial) for trial in range(14)]
        assert sum(job.submitted_at == 0.0 for job in jobs) == 4
        assert {job.submitted_at for job in jobs[4:]} <= {job.done_at for job in jobs}
    assert sum(job.jct_s for job in once["Pollux"]) < sum(job.jct_s for job in once["Baseline"])


@pytest.mark.long
def test_tpe_tunes_on_a_real_pool_with_fixed_and_with_adaptive_batches(load: dict[str, ModuleType]) -> None:
    runs = load["tuning_runs"].both(6)

    for result in runs.values():
        assert [trial.status for trial in result.trials] == ["completed"] * 6
        begins = sorted(min(use.start_s for use in result.busy if use.trial == trial) for trial in range(6))
        assert begins[3] < min(use.end_s for use in result.busy) <= begins[4]
    largest = {
        name: max((each.batch_size for trial in result.trials for each in trial.batches), default=64)
        for name, result in runs.items()
    }
    assert largest["Baseline"] == 64 < largest["Pollux"]


def test_eq_2_exceeds_a_link_by_up_to_a_third_and_falls(load: dict[str, ModuleType]) -> None:
    share, over = load["async_sgd"].faults()

    assert share < 0.5
    assert over == pytest.approx(1 / 3, rel=1e-6)


def test_a_threshold_of_eq_4_lies_between_links_that_share_and_that_do_not(load: dict[str, ModuleType]) -> None:
    server, station = load["parameter_server"], load["async_sgd"].network(load["async_sgd"].SMALL)
    early, late = (server.hybrid(station, 10, begins) for begins in (0.3, 0.95))

    assert (early <= late + TINY).all()
    assert (late <= server.first_come(station, 10) + TINY).all()


def test_jobs_join_the_shortest_of_the_chunks_and_wait_their_turn(load: dict[str, ModuleType]) -> None:
    scheduling = load["scheduling"]
    jobs = [
        scheduling.CurveJob(name=f"job-{at}", submitted_at=float(at), kind="any", seconds=[10.0] * 100)
        for at in range(3)
    ]

    scheduling.chunked(50, jobs)

    assert [job.done_at for job in jobs] == [10.0, 11.0, 20.0]


def test_transfers_of_two_workers_that_use_a_link_in_turn_never_overlap(load: dict[str, ModuleType]) -> None:
    example = load["async_sgd"]
    turns, shares = (load["parameter_server"].slept(example.SMALL, 2, links, 8) for links in ("in turn", "shared"))

    assert example.overlap(turns) == pytest.approx(0.0, abs=TINY)
    assert example.overlap(shares) > 0.0


@pytest.mark.parametrize(
    ("holds", "expected"),
    [((True, True), "agrees"), ((True, False), "partly"), ((False,), "differs")],
)
def test_a_verdict_is_computed_from_what_holds(
    load: dict[str, ModuleType], holds: tuple[bool, ...], expected: str
) -> None:
    assert load["rows"].verdict(*holds) == expected


def test_both_policies_balance_the_papers_four_gpus_and_the_search_does_it_in_fewer_steps(
    load: dict[str, ModuleType],
) -> None:
    gpus = load["lb_bsp"]
    paper, auto = (gpus.run(policy, 150) for policy in gpus.POLICIES)

    for found in (paper, auto):
        assert all(abs(a - b) <= 5 for a, b in zip(found[-1].shares, gpus.PAPER_SHARES, strict=True))
    assert gpus.steps_until_balanced(auto, 0) < gpus.steps_until_balanced(paper, 0)


def test_balanced_gpus_are_faster_than_bsp_and_asp_and_a_cluster_of_likes_gains_less(
    load: dict[str, ModuleType],
) -> None:
    gpus = load["lb_bsp"]
    unlike, alike = gpus.per_update(gpus.GPUS * 4, 32), gpus.per_update(gpus.GPUS[:1] * 16, 32)

    assert unlike["LB-BSP"] < unlike["ASP"] < unlike["BSP"]
    assert alike["LB-BSP"] == pytest.approx(1.0, abs=0.01)


def test_forecasts_from_resources_beat_those_from_past_speeds_alone(load: dict[str, ModuleType]) -> None:
    cpus = load["shared_cpus"]
    made = cpus.cluster(400, 200)
    names = ("Memoryless", "EMA", "ARIMA", "NARX for all", "normalised EMA")
    found = {name: cpus.forecast(made, cpus.PREDICTORS[name]) for name in names}

    for name in names[3:]:
        assert all(found[name].rmse < found[other].rmse for other in names[:3])
        assert made.clairvoyant_time < found[name].time < 0.6


def test_knee_and_hell_are_alike_at_low_load_and_srpt_and_waterfill_are_the_worst(load: dict[str, ModuleType]) -> None:
    scheduling = load["scheduling"]
    found = scheduling.sweep(tuple(scheduling.DNNS), False, True)

    assert found.over("knee", "hell")[0] == pytest.approx(1.0, rel=0.2)
    for at in range(2):
        means_h = {name: points[at].mean_h for name, points in found.points.items()}
        assert sorted(means_h, key=means_h.__getitem__)[-2:] == ["waterfill", "srpt"]
        assert means_h["default"] < means_h["hell"]


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_a_recurrent_forecast_is_the_moving_average_at_first_and_its_own_after_enough_samples(
    load: dict[str, ModuleType], kind: str
) -> None:
    predictors = load["predictors"]
    network, ema, ones = predictors.Recurrent(50, kind), predictors.Ema(50), np.ones(50)
    random = np.random.default_rng(0)
    for look in range(14):
        speeds = 10.0 * np.exp(0.1 * random.normal(size=50))
        for each in (network, ema):
            each.observe(speeds, ones, ones)
        assert (network.forecast().tolist() == ema.forecast().tolist()) is (look < 11)

    assert network.forecast() == pytest.approx(ema.forecast(), rel=0.3)


def test_helpers_shorten_an_iteration_and_never_below_that_of_known_speeds(load: dict[str, ModuleType]) -> None:
    cpus = load["shared_cpus"]
    speeds = np.array([1.0, 4.0, 4.0, 4.0])

    assert 4.0 / speeds.sum() < cpus.flex_rr_s(speeds) < 0.6
    assert cpus.flex_rr_s(np.ones(4)) == pytest.approx(1.0)


def test_balanced_training_learns_as_bsp_does_in_less_time_and_stale_gradients_are_behind(
    load: dict[str, ModuleType],
) -> None:
    found, first = load["lb_bsp"].learnt(16 * 60), load["coordination"].first
    bsp, balanced = found["BSP"], found["LB-BSP"]

    assert [each.accuracy for each in balanced] == pytest.approx([each.accuracy for each in bsp], abs=0.03)
    assert balanced[-1].seconds < 0.5 * bsp[-1].seconds
    assert first(found["ASP"], 0.95).updates > 1.2 * first(bsp, 0.95).updates
