"""`rubberband check`: what a trial does wrong is found in seconds, without a cluster, and said with the fix."""

from __future__ import annotations

import _thread
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.errors import EntrypointError, InfeasibleError
from rubberband.executor import Entrypoint, ExperimentFolder, checking, content_of, digest
from rubberband.executor.training.entrypoint import has_sets
from rubberband.running import check as check_module
from rubberband.running.check import CheckReport, check_experiment, check_first
from rubberband.running.pace import Pace
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.experiment import Experiment
from tests.builders.checks import check_here
from tests.builders.waiting import eventually

TRIALS = """
import os, sys, threading, time
import rubberband
from helping import FACTOR

class Good(rubberband.Trial):
    def setup(self, config, context):
        self.config, self.iterations = config, 0
    def iterate(self):
        self.iterations += 1
        print("trained", flush=True)
        return {"score": FACTOR * self.config["x"] * self.iterations}
    def save(self): return bytes(1_000_000 + self.iterations)
    def load(self, state): self.iterations = len(state) - 1_000_000

class Busy(Good):
    def iterate(self):
        threading.Thread(target=time.sleep, args=(1000,)).start()
        assert "torch" not in sys.modules, "torch is imported only for a TorchTrial, as that takes seconds"
        return super().iterate()

class Seldom(Good):
    checkpoint_every = 5

class Misnamed(Good):
    def iterate(self): return {"scores": 1.0}
    def save(self): return lambda: None

class Forgetful(Good):
    def load(self, state): raise ValueError("the state has no momentum")

class Unready(Good):
    def setup(self, config, context): self.config = config
    def load(self, state): pass
    def iterate(self):
        self.iterations = getattr(self, "iterations", 0) + len(self.config)
        return {"score": 1.0} if self.iterations == 1 else {"score": float("nan")}

class Sometimes(Good):
    def setup(self, config, context):
        super().setup(config, context)
        if context.trial == 0: raise ValueError("an unlucky configuration")

class Leaves(Good):
    def iterate(self): os._exit(7)

class Greedy(Good):
    def iterate(self): os.kill(os.getpid(), 9)

class Hangs(Good):
    def iterate(self):
        open(os.path.join(os.path.dirname(__file__), "hangs"), "w").close()
        threading.Event().wait()

class Gpu(Good):
    def iterate(self): raise RuntimeError("Found no NVIDIA driver on your system")

class Half(Good):
    def iterate(self): raise RuntimeError("\\"cdist\\" not implemented for 'Half'")

class Compiled(rubberband.TorchTrial):
    compile, batch_size = True, 2
    def build_model(self, config):
        import torch
        return torch.nn.Linear(1, 1)
    def build_optimizer(self, config, model):
        import torch
        return torch.optim.SGD(model.parameters(), lr=0.1)
    def train_dataset(self, config): return [[1.0], [2.0]]  # loaded by other processes
    def loss(self, model, batch): return model(batch[0].float()[:, None]).square().mean()
    def evaluate(self, model, loader):
        import torch._dynamo.utils
        return {"score": len(torch._dynamo.utils.counters["frames"])}
    eval_dataset = train_dataset

def function(config):
    start = rubberband.get_checkpoint() or 0
    for done in range(start + 1, 100):
        rubberband.report({"score": done + config["x"]}, checkpoint=done)

def forgetful(config):
    for done in range(1, 100):
        rubberband.report({"score": done + config["x"]}, checkpoint=done)

def unsaved(config):
    while True:
        rubberband.report({"score": 1.0})
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "checked.py").write_text(TRIALS)
    (folder / "helping.py").write_text("FACTOR = 2.0\n")
    return folder


def experiment(entrypoint: str | None, **words: Any) -> Experiment:
    search = {
        "space": {"x": {"type": "uniform", "lower": 1, "upper": 2}},
        "scheduler": {"type": "sha", "num_samples": 4, "grace_period": 1, "max_t": 4, "reduction_factor": 2},
        "metric": "score",
        "mode": "max",
    }
    resources = {"gpus_per_instance": 1, "price_per_hour": 1, "gpus_per_trial": {"max": 1}}
    return Experiment(**{"name": "test", "entrypoint": entrypoint, "search": search, "resources": resources, **words})


def checked(code: Path, name: str, limit_s: float = 120.0, **words: Any) -> CheckReport:
    """In a process, as a user's check."""
    with open(os.devnull, "wb") as nothing:
        return check_experiment(
            experiment(f"checked:{name}", **words), search_path=(code,), limit_s=limit_s, output=nothing
        )


def quickly(code: Path, name: str, **words: Any) -> CheckReport:
    """The same in this process."""
    with mock.patch.object(check_module, "check", check_here):
        return checked(code, name, **words)


def test_a_good_trial_passes_whatever_threads_it_leaves(code: Path) -> None:
    report = checked(code, "Busy")
    assert report.ok, report.problems
    assert 2.0 <= report.trial.metrics["score"] <= 4.0
    assert report.trial.checkpoint_bytes is not None
    assert 1_000_000 < report.trial.checkpoint_bytes < 1_001_000
    assert list(report.trial.seconds) == ["import", "set-up", "iteration", "save", "restore", "continue"]
    assert json.loads(json.dumps(report.to_json()))["kind"] == "Trial"


def test_plans_on_spot_that_assume_other_checkpoints_than_the_trial_writes_are_named(code: Path) -> None:
    def remarks(**words: Any) -> Sequence[str]:
        resources = {**experiment(None).resources.model_dump(exclude_unset=True, by_alias=True), **words}
        return quickly(code, "Seldom", resources=resources).remarks

    (text,) = remarks(market="spot", spot={"price_per_hour": 0.3})
    assert "checkpoint_every is 5" in text
    assert text.endswith("write -s resources.spot.checkpoint_iterations=5")
    assert not remarks(market="spot", spot={"price_per_hour": 0.3, "checkpoint_iterations": 5})
    assert not remarks()


def test_a_deadline_that_no_plan_meets_is_refused_before_an_iteration_is_tried(code: Path, tmp_path: Path) -> None:
    (code / "tried.py").write_text(
        "import pathlib, rubberband\ndef train(config):\n"
        "    pathlib.Path(__file__).with_suffix('.txt').write_text('')\n    rubberband.report({'score': 1.0})\n"
    )
    asked = experiment(
        "tried:train", profile={"seconds_per_iteration": {1: 10}}, constraints={"deadline": "1s", "max_cost": 1}
    )
    options = RunOptions(search_path=(code,))
    with pytest.raises(InfeasibleError, match="deadline 1s cannot be met"):
        run_experiment(asked, ExperimentFolder(home=tmp_path, name="test"), options)
    assert not (code / "tried.txt").exists()


def test_a_constant_that_looks_like_a_domain_is_named(code: Path) -> None:
    search = experiment(None).search.model_dump(exclude_unset=True, by_alias=True)
    search["space"] = {"x": 1.5, "lr": [1e-3, 1]}
    (text,) = quickly(code, "Good", search=search).remarks
    assert text.startswith("space.lr: [0.001, 1] is a constant: each trial gets the whole list")


def test_a_function_continues_from_its_checkpoint_and_is_noted_if_it_has_none(code: Path) -> None:
    good, unsaved = quickly(code, "function"), quickly(code, "unsaved")
    assert good.ok
    assert "continue" in good.trial.seconds
    assert unsaved.ok
    assert "Pass checkpoint=" in unsaved.remarks[0]
    assert (good.trial.resumes, good.trial.restart) == (True, "resumes exactly")
    forgetful = quickly(code, "forgetful")
    assert forgetful.remarks[-1].endswith("call rubberband.get_checkpoint() at the start (docs/write-a-trial.md)")
    for found in (forgetful.trial, unsaved.trial):
        assert (found.resumes, found.restart) == (False, "starts again: every stage repeats its epochs")
    two = {"gpus_per_instance": 2, "price_per_hour": 1}
    assert quickly(code, "function", resources=two).ok
    (problem,) = quickly(code, "function", resources=two | {"gpus_per_trial": {"max": 2}}).problems
    assert "set it to 1, or write @rubberband.distributed above it" in problem.line


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("Misnamed", ["did you mean 'scores'?; report it, or set search.metric", "save: the checkpoint cannot be"]),
        ("Forgetful", ["restore: ValueError: the state has no momentum"]),
        ("Leaves", ["iteration: the trial ended its process with exit code 7; raise an exception instead"]),
        ("Gpu", ["iteration: it needs a GPU, and is checked on the CPU"]),
        ("Half", ["iteration: it needs a GPU, and is checked on the CPU"]),
        ("Nosuch", ["entrypoint checked:Nosuch: "]),
    ],
)
def test_every_problem_is_a_line_with_the_fix(code: Path, name: str, lines: list[str]) -> None:
    report = (checked if name == "Leaves" else quickly)(code, name)
    assert len(report.problems) == len(lines), report.problems
    for problem, line in zip(report.problems, lines, strict=True):
        assert line in problem.line
        assert "\n" not in problem.line
        assert "rubberband/executor" not in problem.details.partition("checked.py")[0]


def test_a_file_that_is_no_python_is_shown_at_its_line(code: Path) -> None:
    (code / "unclosed.py").write_text("def train(config):\n    return (\n")
    with open(os.devnull, "wb") as nothing:
        report = check_experiment(experiment("unclosed:train"), search_path=(code,), output=nothing)
    (problem,) = report.problems
    assert "entrypoint unclosed:train cannot be imported: SyntaxError" in problem.line
    assert "unclosed.py" in problem.details
    assert "frozen" not in problem.details


def test_nothing_of_a_trial_outlives_its_check(code: Path, tmp_path: Path) -> None:
    (code / "starting.py").write_text(
        "import pathlib, subprocess, threading\n"
        "def train(config):\n"
        f"    child = subprocess.Popen(['sleep', '1000'])\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "    threading.Event().wait()\n"
    )
    asked = experiment("starting:train")
    with open(os.devnull, "wb") as nothing, pytest.raises(KeyboardInterrupt):
        # Ctrl-C, as soon as the trial's process is there
        _interrupted(lambda: check_experiment(asked, search_path=(code,), output=nothing), tmp_path / "pid")
    command = Path(f"/proc/{(tmp_path / 'pid').read_text()}/cmdline")
    eventually(lambda: not command.exists() or not command.read_bytes(), "the end of the process")


def _interrupted(call: Any, when: Path) -> None:
    """Call it, and interrupt it once the file `when` has been written."""

    def wait() -> None:
        eventually(lambda: when.exists() and when.read_text(), f"the file {when}")
        _thread.interrupt_main()

    # Not with the handler of a command that another test called: it would remember the signal for the next run.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=wait, daemon=True).start()
        call()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_single_bad_configuration_is_only_noted(code: Path) -> None:
    report = quickly(code, "Sometimes")
    assert report.ok
    assert "trial 0 (x=" in report.remarks[0]
    assert "an unlucky configuration" in report.remarks[0]


def test_a_trial_that_hangs_is_given_up(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def passed_s() -> float:
        """Real time until it hangs, however long that takes; then the limit passes at once."""
        return time.monotonic() + (1e6 if (code / "hangs").exists() else 0.0)

    monkeypatch.setattr(checking, "time", SimpleNamespace(monotonic=passed_s))
    report = checked(code, "Hangs", limit_s=120.0)
    (problem,) = report.problems
    assert problem.line == "iteration: not over after 2m; allow more with --limit 6m"


@pytest.mark.long
def test_a_model_to_compile_is_checked_without_compiling(code: Path) -> None:
    report = checked(code, "Compiled")
    assert report.ok, report.problems
    assert report.trial.metrics["score"] == 0


def test_before_a_run_it_is_checked_once_for_the_same_content(code: Path, tmp_path: Path) -> None:
    said = list[str]()

    def before_a_run(name: str, **words: Any) -> Pace | None:
        said.clear()
        asked = experiment(f"checked:{name}", **words)
        return check_first(asked, Entrypoint.parse(f"checked:{name}", (code,)), tmp_path, None, said.append)

    pace = before_a_run("Good")
    assert said[0].startswith("checked checked:Good: 1 iteration in ")
    assert pace is not None
    assert pace.iteration_s > 0.0
    assert before_a_run("Good", constraints={"deadline": "3h"}) == pace
    assert said == []
    for path in (tmp_path / "checks").iterdir():
        path.write_text("checked:Good 1764500000\n")  # of an earlier version
    assert before_a_run("Good") is None
    assert said == []
    (code / "helping.py").write_text("FACTOR = 3.0\n")
    before_a_run("Good")
    assert len(said) == 1
    with pytest.raises(EntrypointError, match=r"Leaves does not pass the check: .*--no-check"):
        before_a_run("Leaves")
    with pytest.raises(EntrypointError, match="it needs a GPU"):
        before_a_run("Gpu")
    rented = {"provider": "aws", "instance_type": "g4dn.xlarge", "checkpoints": "s3://bucket/folder"}
    for name, why in (("Gpu", "it needs a GPU"), ("Greedy", "ended by SIGKILL; it may need less memory")):
        before_a_run(name, resources=rented)
        (line,) = said
        assert line.startswith("the trial was not checked, as this machine may lack what it needs: iteration: ")
        assert why in line


def test_the_command_prints_what_it_found(code: Path) -> None:
    file = code / "checked.yaml"
    words = experiment("checked:Good").to_words()
    file.write_text(json.dumps(words))
    done = CliRunner().invoke(cli.app, ["check", str(file)])
    assert done.exit_code == 0, done.output
    assert "restored in" in done.stdout
    assert f"run it: rubberband run {file}" in done.stdout
    failed = CliRunner().invoke(cli.app, ["check", str(file), "-o", "json", "-s", "search.metric=scor"])
    assert failed.exit_code == 1
    assert "did you mean 'score'" in json.loads(failed.stdout)["problems"][0]["line"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("order = [1, 2]", False),
        ("known = 'a' in {'a', 'b'}", False),
        ("def fit(names: list[str]): return {name: 1 for name in names}", False),
        ("ids = {word: i for i, word in enumerate({'a', 'b'})}", True),
        ("words = {word for word in 'ab'}", True),
        ("words = set('ab')", True),
        ("words = frozenset('ab')", True),
        ("part = hash('a') % 10", True),
        ("both = {}.keys() & {}.keys()", True),
        ("both = dict(a=1).items() - {}.items()", True),
        ("broken =", True),
    ],
)
def test_sets_are_found_in_the_users_sources(tmp_path: Path, source: str, expected: bool) -> None:
    (tmp_path / "beside.py").write_text(source)
    (tmp_path / "top.py").write_text("import json\ndef train(config):\n    import beside\n")
    assert has_sets(Entrypoint.parse("top:train", (tmp_path,))) == expected
    assert has_sets(Entrypoint.parse("beside:train", (tmp_path,))) == expected


def test_sets_are_possible_where_the_source_is_not_known(tmp_path: Path) -> None:
    assert has_sets(Entrypoint.parse("absent:train", (tmp_path,)))
    assert has_sets(Entrypoint(module="__main__", attribute="f.<locals>.train", pickled=b""))


def test_the_content_is_the_users_sources_and_the_versions_of_what_they_import(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("import json, numpy\nDEPTH = 1\n")
    (package / "near.py").write_text("from . import deep\n")
    (tmp_path / "top.py").write_text("def train(config):\n    from own.near import deep\n")
    (tmp_path / "beside.py").write_text("")
    entrypoint = Entrypoint.parse("top:train", (tmp_path,))
    found = content_of(entrypoint)
    assert found is not None
    assert set(found) == {"python", "rubberband", "top", "own", "own.near", "own.deep", "numpy"}
    (package / "deep.py").write_text("import json, numpy\nDEPTH = 2\n")
    changed = content_of(entrypoint)
    assert digest(changed) != digest(found)
    assert content_of(Entrypoint(module="__main__", attribute="f.<locals>.train", pickled=b"")) is None
