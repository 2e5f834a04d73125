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

import pytest

from rubberband.errors import RubberbandError
from tests.builders.adaptdl_data import write_data

FOLDER = Path(__file__).parents[2] / "examples" / "paper"
ROWS = [
    ("async_sgd", "figure_1", "ap"),
    ("async_sgd", "figure_5", "a"),
    ("async_sgd", "figure_10", "p"),
    ("async_sgd", "figure_13", "pdd"),
    ("async_sgd", "figure_15", "ap"),
    ("async_sgd", "table_2", "pa"),
    ("elastic", "figure_4", "a"),
    ("elastic", "figure_9", "daa"),
    ("elastic", "figure_10", "aap"),
    ("elastic", "figure_11", "pa"),
    ("elastic", "figure_12", "dppp"),
    ("elastic", "table_2", "appp"),
    ("elastic", "table_3", "padda"),
    ("elastic", "table_4", "ad"),
    ("lb_bsp", "figure_1", "a"),
    ("lb_bsp", "figure_2", "a"),
    ("lb_bsp", "figure_4", "a"),
    ("lb_bsp", "figure_6", "apaa"),
    ("lb_bsp", "figure_7", "a"),
    ("lb_bsp", "figure_8", "aaa"),
    ("lb_bsp", "figure_11", "aa"),
    ("pollux", "table_3", "aaa"),
]
"""Script, part, and whether each of its statements (a)grees, (p)artly agrees or (d)iffers on reduced sizes."""
SLOW = ("figure_5", "figure_6", "figure_7", "figure_9", "figure_10", "figure_13", "table_2")
ON_DATA = (
    *("figure_1", "figure_2", "figure_3", "table_2", "figure_5", "figure_6", "overheads", "figure_7"),
    *("figure_8a", "figure_8b", "figure_8c", "prior_exploration", "figure_9", "table_3_measured"),
)
"""Parts of `pollux.py` that need measurements."""


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


@pytest.mark.by_default(12)
@pytest.mark.parametrize(("name", "part", "verdicts"), sorted(ROWS, key=lambda row: row[1] in SLOW))
def test_a_row_has_the_verdicts_of_its_statements(
    load: dict[str, ModuleType], name: str, part: str, verdicts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load["rows"].show(load[name].PARTS, "Rows.", [part, "--small"])

    lines = capsys.readouterr().out.splitlines()
    expect_a_row(lines)
    assert [line[3] for line in lines if line.startswith("  [")] == list(verdicts)


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


def test_an_unknown_row_is_refused_with_the_known_ones(
    load: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load["rows"].show(load["async_sgd"].PARTS, "Rows.", ["figure_99"])

    assert "no part 'figure_99'; choose from figure_1, figure_3" in capsys.readouterr().err


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
