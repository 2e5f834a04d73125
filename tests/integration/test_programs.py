"""Programs as trials: real processes, through segments of one worker."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor.checkpoints import open_store
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.run import run_segment
from rubberband.executor.training.segment import SegmentEnded, SegmentFailure, SegmentRepeated, SegmentReport
from rubberband.values.command import Command, Metrics, words_of
from tests.builders.segments import SEGMENT

RESUMES = """
    import pathlib, sys, time, rubberband
    out = pathlib.Path(sys.argv[1])
    begin = int((out / "n").read_text()) if (out / "n").exists() else 0
    for epoch in range(begin + 1, 6):
        time.sleep(0.12)
"""
"""The beginning of programs whose loop goes on from the file n."""
SAVES_FIRST = f"""{RESUMES}
        (out / "n").write_text(str(epoch))
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
"""
PRINTS_FIRST = f"""{RESUMES}
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
        for name in ("m", "n"):
            with open(out / name, "w") as file:
                time.sleep(0.02)
                file.write(str(epoch))
"""
SAVES_EVALUATES_PRINTS = f"""{RESUMES}
        (out / "n").write_text(str(epoch))
        time.sleep(0.12)
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
"""
PRINTS_EVALUATES_SAVES = f"""{RESUMES}
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
        time.sleep(0.12)
        (out / "n").write_text(str(epoch))
"""
REPORTS = f"""{RESUMES}
        (out / "n").write_text(str(epoch))
        rubberband.report({{"loss": 1 / epoch}})
"""
REPORTS_A_FOLDER = """
    import pathlib, rubberband
    out = pathlib.Path("own")
    out.mkdir(exist_ok=True)
    folder = rubberband.get_checkpoint()
    begin = int(pathlib.Path(folder, "n").read_text()) if folder else 0
    for epoch in range(begin + 1, 6):
        (out / "n").write_text(str(epoch))
        rubberband.report({"loss": 1 / epoch}, checkpoint=out)
"""


class Trial:
    """A program in a folder, and the store of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_store(str(folder / "store"))

    def run(
        self, source: str, words: str = "${checkpoint}", *, metrics: Metrics | None = None, **changes: Any
    ) -> list[Any]:
        """Return all items of a segment of a program."""
        (self.folder / "train.py").write_text(textwrap.dedent(source))
        command = Command(words=words_of(f"{sys.executable} train.py {words}"), metrics=metrics or Metrics())
        entrypoint = Entrypoint(module="", attribute="", search_path=(str(self.folder),), command=command)
        segment = replace(SEGMENT, **{"max_iterations": 5, "until_iterations": 2, **changes})
        return list(run_segment(entrypoint, segment, self.store))


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


@pytest.mark.parametrize(
    ("instance", "line"),
    [
        ("", "nosuch is not on this machine (No such file or directory): install it, or give its path"),
        (
            "i-001",
            "nosuch is not on i-001 (No such file or directory): install it there (resources.aws.install or setup), or "
            "put it into the experiment's folder",
        ),
    ],
)
def test_a_program_that_is_not_there_names_the_instance(tmp_path: Path, instance: str, line: str) -> None:
    command = Command(words=("nosuch", "${args}"))
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(tmp_path),), command=command)
    items = list(run_segment(entrypoint, replace(SEGMENT, instance=instance), open_store(str(tmp_path / "store"))))
    assert items[-1].message == line
    (tmp_path / "nosuch").touch()
    here = replace(entrypoint, command=replace(command, words=("./nosuch",)))
    items = list(run_segment(here, replace(SEGMENT, instance=instance), open_store(str(tmp_path / "store"))))
    assert items[-1].message.endswith(
        "start ./nosuch (Permission denied): make it executable (chmod +x), and see its first line (#!)"
    )


def losses(items: list[Any]) -> list[tuple[int, float]]:
    return [(item.iterations, item.metrics["loss"]) for item in items if isinstance(item, SegmentReport)]


PRINTED = Metrics(source="stdout")


@pytest.mark.parametrize(
    ("source", "metrics"),
    [
        pytest.param(SAVES_FIRST, PRINTED, id="saves first"),
        pytest.param(PRINTS_FIRST, PRINTED, id="prints first"),
        pytest.param(SAVES_FIRST, Metrics(source="stdout", pattern=r"loss=(?P<loss>\S+)"), id="pattern"),
        pytest.param(REPORTS, Metrics(), id="reports"),
        pytest.param(REPORTS_A_FOLDER, Metrics(), id="reports a folder"),
    ],
)
def test_a_program_goes_on_from_its_files(trial: Trial, source: str, metrics: Metrics) -> None:
    first = trial.run(source, metrics=metrics)
    assert losses(first) == [(1, 1.0), (2, 0.5)]
    assert first[-1].saved_iterations is None  # the checkpoint holds both
    assert resumed(trial, source, metrics, first[-1]) == ([], [(3, 1 / 3), (4, 1 / 4), (5, 1 / 5)])


@pytest.mark.parametrize(
    "source", [SAVES_FIRST.replace("time.sleep(0.12)", "pass"), SAVES_EVALUATES_PRINTS, PRINTS_EVALUATES_SAVES]
)
def test_a_program_begins_again_if_the_iteration_of_its_files_is_not_known(
    trial: Trial, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    first = trial.run(source, metrics=PRINTED)
    assert losses(first) == [(1, 1.0), (2, 0.5)]
    assert first[-1].saved_iterations == 0
    assert "trials are trained from zero after every stage" in capfd.readouterr().err
    assert resumed(trial, source, PRINTED, first[-1]) == ([1, 2], [(3, 1 / 3), (4, 1 / 4), (5, 1 / 5)])


@pytest.mark.parametrize("source", [SAVES_FIRST, PRINTS_FIRST, SAVES_EVALUATES_PRINTS, PRINTS_EVALUATES_SAVES])
@pytest.mark.parametrize(
    ("every", "until"),
    [(2, 3), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, 1), (2, 4), (3, 1), (3, 3), (3, 4)))],
)
def test_a_program_that_saves_seldom_repeats_iterations(trial: Trial, source: str, every: int, until: int) -> None:
    head, source = source[: len(RESUMES)], source[len(RESUMES) :]
    begin = next(at for at, line in enumerate(source.splitlines()) if '(out / "n")' in line or "for name" in line)
    lines = source.splitlines()
    lines[begin] = lines[begin].replace("(out", f"epoch % {every} or (out")
    lines[begin] = lines[begin].replace("for name in", f"for name in () if epoch % {every} else")
    first = trial.run("\n".join([head, *lines]), metrics=PRINTED, until_iterations=until)
    repeated, later = resumed(trial, "\n".join([head, *lines]), PRINTED, first[-1])
    assert later == [(epoch, 1 / epoch) for epoch in range(until + 1, 6)]
    saved = first[-1].saved_iterations
    assert repeated == list(range((until if saved is None else saved) + 1, until + 1))


def resumed(
    trial: Trial, source: str, metrics: Metrics, last: SegmentReport
) -> tuple[list[int], list[tuple[int, float]]]:
    """Return the iterations that a program repeats, and the losses that it reports, until it ends by itself."""
    items = trial.run(
        source,
        metrics=metrics,
        from_iterations=last.iterations,
        until_iterations=9,
        max_iterations=9,
        checkpoint=last.checkpoint,
    )
    assert isinstance(items[-1], SegmentEnded)
    return [item.iterations for item in items if isinstance(item, SegmentRepeated)], losses(items)


def test_a_program_gets_its_configuration(trial: Trial) -> None:
    source = """
        import json, os, sys, rubberband
        config = json.loads(os.environ["RUBBERBAND_CONFIG"])
        assert sys.argv[1:] == ["--lr=0.5", "--flag=true"], sys.argv
        rubberband.report({"loss": config["lr"]})
    """
    items = trial.run(source, "", config={"lr": 0.5, "flag": True}, until_iterations=1, max_iterations=1)
    assert losses(items) == [(1, 0.5)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('hello'); raise SystemExit(3)", "ended with exit code 3 after"),
        ("print('hello')", "without a report of loss; call rubberband.report"),
        ("print('accuracy=1')", "without a report of loss"),
        ("import os; os.kill(os.getpid(), 11)", "ended with exit code 139"),
    ],
)
def test_a_program_that_fails_shows_its_last_lines(trial: Trial, source: str, message: str) -> None:
    [*_, failure] = trial.run(source, metrics=Metrics(source="stdout"))
    assert isinstance(failure, SegmentFailure)
    assert message in failure.message


def test_a_report_without_the_metric_is_refused(trial: Trial) -> None:
    [*_, failure] = trial.run("import rubberband; rubberband.report({'los': 1})")
    assert isinstance(failure, SegmentFailure)
    assert "the metric 'loss' is missing" in failure.message


def test_a_program_ends_with_what_it_started(trial: Trial) -> None:
    source = """
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
        print("loss=1", flush=True)
        print("loss=1", flush=True)
        time.sleep(1000)
    """
    trial.run(source, metrics=Metrics(source="stdout"))
    for pid in (trial.folder / "pids").read_text().split():
        assert not Path("/proc", pid).exists()


def test_a_report_outside_a_search_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import rubberband

    rubberband.report({"loss": 0.5, "epoch": 1})
    assert capfd.readouterr().out == "loss=0.5 epoch=1\n"
    assert rubberband.get_checkpoint() is None


def test_lines_reach_the_log_whole(trial: Trial, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
        import sys
        sys.stdout.write("x" * 300_000 + "\\n")
        print("epoch", 1, "loss=1")
        sys.stdout.write("the end")
    """
    items = trial.run(source, metrics=PRINTED, until_iterations=1, max_iterations=1)
    assert losses(items) == [(1, 1.0)]
    shown = capfd.readouterr().out
    assert shown.startswith("x" * 300_000 + "\nepoch 1 loss=1\n")
