"""`rubberband check` of programs: real ones, without Ray."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.errors import InputError
from rubberband.executor import checking
from rubberband.running import check as check_module
from rubberband.running.check import CheckReport, check_experiment, check_first, named_entrypoint
from rubberband.spec.experiment import Experiment
from tests.builders.checks import check_here
from tests.builders.program_folder import enter

LOADS = """
import pathlib, sys, time, rubberband
out = pathlib.Path(sys.argv[1])
done = int((out / "n").read_text()) if (out / "n").exists() else 0
"""
FORGETS = LOADS.replace('int((out / "n").read_text()) if (out / "n").exists() else 0', "0")
TRAINS = """
for epoch in range(done + 1, 9):
    {save}
    rubberband.report({{"loss": 1 / epoch}})
"""
SAVES = '(out / "n").write_text(str(epoch))'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch)


def checked(
    source: str, command: str = "python train.py ${checkpoint}", *, most: int = 1, **changes: object
) -> CheckReport:
    Path("train.py").write_text(source)
    with mock.patch.object(check_module, "check", check_here):
        return check_experiment(experiment({"command": command, **changes}, most), search_path=[Path.cwd()], quick=True)


def experiment(entrypoint: object, most: int, space: object = None) -> Experiment:
    return Experiment(
        name="train",
        entrypoint=entrypoint,
        search={
            "space": space or {"lr": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "sha", "num_samples": 4, "max_t": 8, "reduction_factor": 2},
            "metric": "loss",
            "mode": "min",
        },
        resources={
            "provider": "local",
            "gpus_per_instance": most,
            "price_per_hour": 1,
            "max_instances": 1,
            "gpus_per_trial": {"min": 1, "max": most},
        },
    )


@pytest.mark.parametrize("least", [1, 2])
def test_a_program_that_does_not_fit_one_worker_passes_if_gangs_are_larger(least: int) -> None:
    Path("train.py").write_text(
        "class OutOfMemoryError(RuntimeError): ...\nraise OutOfMemoryError('CUDA out of memory')"
    )
    given = experiment({"command": "python train.py ${checkpoint}"}, 2)
    words = given.to_words()
    words["resources"]["gpus_per_trial"]["min"] = least
    with mock.patch.object(check_module, "check", check_here):
        report = check_experiment(Experiment.kept(words), search_path=[Path.cwd()], quick=True)
    found = [each for each in report.remarks if "one worker has too little memory" in each]
    assert (report.ok, len(found)) == (least == 2, least - 1)
    assert all("OutOfMemoryError: CUDA out of memory" in each for each in found)


def test_a_program_that_resumes_passes_with_its_times_and_its_checkpoint() -> None:
    report = checked(LOADS + TRAINS.format(save=SAVES))
    assert (report.problems, report.trial.kind) == ((), "program")
    assert report.trial.metrics == {"loss": 1.0}
    assert report.trial.checkpoint_bytes
    assert {"set-up", "iteration", "next", "save", "restore", "continue"} <= report.trial.seconds.keys()
    assert report.trial.first_extra_s is not None, "its start is timed apart from its iterations"
    assert min(report.trial.first_extra_s, report.trial.cold_extra_s) > 0.0
    assert report.remarks == (
        "entrypoint.command never names lr, which changes nothing then, unless the program reads RUBBERBAND_CONFIG; "
        "write ${lr} where it belongs, or ${args}",
    )


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("source", "remark"),
    [
        (
            FORGETS + TRAINS.format(save=SAVES),
            "started again from the checkpoint of 1 iteration, the program starts from zero, as at each stage, and "
            "repeats its iterations; load its checkpoint at the start (docs/commands.md)",
        ),
        (LOADS + TRAINS.format(save="pass"), "the program saved nothing in ${checkpoint}"),
        (LOADS + "rubberband.report({'loss': 1})", "the program ended after one report"),
    ],
)
def test_a_program_that_would_not_resume_gets_a_remark(source: str, remark: str) -> None:
    report = checked(source, "python train.py ${checkpoint} ${lr}")
    assert report.ok
    assert any(each.startswith(remark) for each in report.remarks), report.remarks


def test_an_iteration_of_a_program_that_saves_is_timed_whole() -> None:
    saves = "import pathlib, sys, time\nplace = pathlib.Path(sys.argv[1], 'state')\n"
    saves += "epoch = int(place.read_text()) if place.exists() else 0\nwhile epoch < 8:\n"
    saves += "    time.sleep(0.3)\n    epoch += 1\n    place.write_text(str(epoch))\n"
    saves += "    print(f'{epoch} loss={1 / epoch}')\n"
    report = checked(saves, metrics="stdout")
    assert report.trial.seconds["iteration"] > 0.25, "it sleeps for 0.3 s, also while its files are awaited"


def test_the_line_of_the_metric_is_shown() -> None:
    report = checked(
        "import time\nfor n in range(1, 9): print(f'epoch {n} loss=0.5 (best)', flush=True); time.sleep(0.12)",
        metrics="stdout",
    )
    assert report.trial.line == "epoch 1 loss=0.5 (best)"
    assert report.to_json()["line"] == report.trial.line
    assert "no checkpoint" in report.summary()


TWO_LINES = """
import time
for epoch in range(8):
    {batches}
    time.sleep(0.1)
    print(f"{one} {{1 / (epoch + 1)}}", flush=True)
    time.sleep(0.1)
    print(f"{other} {{2 / (epoch + 1)}}", flush=True)
"""
LONG = "for batch in range(15): time.sleep(0.15); print(f'Epoch {epoch} [{batch}/5] loss: 0.5', flush=True)"
BATCHES = "for batch in range(5): time.sleep(0.1); print(f'Epoch {epoch} [{batch}/5] loss: 0.5', flush=True)"


def test_two_values_in_a_line_are_a_problem_with_a_pattern() -> None:
    line = "print(f'step {n}: val loss {n + 1}, train loss {n}', flush=True)"
    source = f"import time\nfor n in range(8): time.sleep(0.1); {line}"
    [found] = checked(source, "python train.py ${lr}", metrics="stdout").problems
    fix = r"say by entrypoint.metrics.pattern which one counts, such as {pattern: '\bval loss (?P<loss>\S+)'}"
    assert found.line == f"iteration: a line has loss as 1 and 0: 'step 0: val loss 1, train loss 0'; {fix}"
    told = checked(source, "python train.py ${lr}", metrics={"pattern": r"\bval loss (?P<loss>\S+)"})
    assert told.trial.metrics == {"loss": 1.0}


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("batches", "one", "other", "found"),
    [
        (
            "pass",
            "Train loss:",
            "Val loss:",
            "next: two kinds of line have loss, 'Train loss: 1.0' and 'Val loss: 2.0', and each would count as an "
            "iteration; say by entrypoint.metrics.pattern which one counts, such as {pattern: '^Val loss: (?P<loss>",
        ),
        ("pass", "loss:", "best loss:", "next: two kinds of line have loss, 'loss: 1.0' and 'best loss: 2.0'"),
        (
            BATCHES,
            "Epoch {{epoch}} loss:",
            "",
            "later lines: two kinds of line have loss, 'Epoch 0 [4/5] loss: 0.5' and",
        ),
        (LONG, "Epoch {{epoch}} loss:", "", "later lines: two kinds of line have loss, 'Epoch 0 [14/5] loss: 0.5' and"),
    ],
)
def test_a_metric_in_two_kinds_of_line_is_a_problem(batches: str, one: str, other: str, found: str) -> None:
    source = TWO_LINES.format(batches=batches, one=one, other=other)
    report = checked(source, "python train.py ${lr}", metrics="stdout")
    assert [problem.line[: len(found)] for problem in report.problems] == [found]
    told = checked(source, "python train.py ${lr}", metrics={"pattern": rf"^{one.partition('{')[0]}.* (?P<loss>\S+)$"})
    assert told.ok


def test_a_number_without_a_sign_is_none_beside_lines_that_have_one() -> None:
    lines = "print(f'loss={1 / epoch}'); print(f'new best loss {1 / epoch}', flush=True)"
    report = checked(
        f"import time\nfor epoch in range(1, 9): time.sleep(0.1); {lines}", "python train.py ${lr}", metrics="stdout"
    )
    assert report.ok
    report = checked(
        "import time\nfor _ in range(8): time.sleep(0.1); print('loss  5.02', flush=True)", metrics="stdout"
    )
    assert report.trial.metrics == {"loss": 5.02}


def tried(source: str, command: str, space: object, *, quick: bool = False, **changes: object) -> CheckReport:
    Path("train.py").write_text(textwrap.dedent(source))
    given = experiment({"command": f"python train.py {command}", "metrics": "stdout", **changes}, 1, space)
    with mock.patch.object(check_module, "check", check_here):
        return check_experiment(given, search_path=[Path.cwd()], quick=quick)


SHIFT = """
    import argparse, time
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--shift", type=float)
    for epoch in range(8):
        print(f"loss={abs(parser.parse_args().shift + 2e-5)}", flush=True)
        time.sleep(0.1)
"""
SHIFTS = {"shift": {"type": "uniform", "lower": -0.02, "upper": 0.02}}
"""Its extremes are no options for argparse, and what is next to 0 is one: -4e-05."""


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("source", "command", "error", "fix"),
    [
        (SHIFT, "--shift ${shift}", "expected one argument", "--shift=${shift}"),
        (SHIFT.replace('"--shift"', '"shift"'), "${shift}", "error: ", "-- ${shift}"),
    ],
)
def test_small_negative_values_are_tried(source: str, command: str, error: str, fix: str) -> None:
    [found] = tried(source, command, SHIFTS).problems
    assert found.line.startswith(
        "values: the program takes a value that begins with - for an option: train.py: error: "
    )
    assert error in found.line
    assert found.line.endswith(f"; write {fix} in entrypoint.command")


@pytest.mark.long
def test_values_are_tried_unless_it_has_to_be_quick() -> None:
    report = tried(SHIFT, "--shift=${shift}", SHIFTS)
    assert (report.ok, report.trial.tried, report.trial.to_try) == (True, 4, 4)
    assert tried(SHIFT, "--shift ${shift}", SHIFTS, quick=True).trial.tried == 0


CHOOSES = """
    import argparse, math, sys
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kind", choices=["a", "b"])
    args = parser.parse_args()
    if args.heads == 3:
        raise ValueError("16 is not divisible by 3")
    print("loss=nan" if args.heads == 2 else "loss=1")
"""


def test_each_choice_is_tried_and_only_what_the_parser_refuses_is_a_problem() -> None:
    heads = {"type": "choice", "values": [1, 4, 5, 6, 2, 3]}
    report = tried(CHOOSES, "--heads ${heads} --kind a", {"heads": heads})
    assert report.ok
    line = "with heads=3 the program fails: ValueError: 16 is not divisible by 3"
    assert [each for each in report.remarks if "with heads=" in each and each.startswith(line)], report.remarks
    report = tried(CHOOSES, "--heads 1 --kind ${kind}", {"kind": {"type": "choice", "values": ["a", "c"]}})
    [found] = report.problems
    assert "argument --kind: invalid choice: 'c'" in found.line


READS = """
    import argparse, ast, random, sys
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--classic", type=bool, default=True)
    parser.add_argument("--python", type=lambda text: text == "True")
    parser.add_argument("--number", type=lambda text: bool(int(text)) if text.isdigit() else True)
    parser.add_argument("--right", type=lambda text: text.lower() == "true")
    parser.add_argument("--fire", default="False")
    parser.add_argument("--late")
    parser.add_argument("--switch", action="store_true")
    args = parser.parse_args()
    try:
        fire = ast.literal_eval(args.fire)
    except ValueError:
        fire = args.fire
    noise = random.random() if {noise} else 0
    print(f"loss={{noise}} a={{args.python or 0:d}} d={{args.right or 0:d}} e={{bool(fire):d}} f={{args.switch:d}}")
"""
CLASSIC = "classic is read alike for true and false: the type of --classic takes every text for true, as bool does"


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("name", "style", "problem"),
    [
        (
            "python",
            "true/false",
            "python is read alike for true and false: the type of --python distinguishes True/False; write",
        ),
        (
            "fire",
            "true/false",
            "values: fire is read alike for true and false: the program distinguishes True/False; write boole",
        ),
        ("classic", "True/False", f"{CLASSIC}; compare the text there (text == 'True')"),
        ("python", "True/False", None),
        ("number", "1/0", None),
        ("switch", "flag", None),
    ],
)
def test_a_boolean_that_the_program_reads_otherwise_is_a_problem(name: str, style: str, problem: str | None) -> None:
    space = {name: {"type": "choice", "values": [True, False]}}
    source = READS.format(noise=name != "fire")
    report = tried(source, f"--{name} ${{{name}}}", space, booleans={"style": style})
    assert [each.line[: len(problem or "")] for each in report.problems] == ([] if problem is None else [problem])


def test_a_boolean_without_an_effect_is_a_problem() -> None:
    space = {"late": {"type": "choice", "values": [True, False]}}
    [found] = tried(READS.format(noise=False), "--late=${late}", space).problems
    assert found.line == (
        "values: late changes nothing: True and False give the same output in the first iteration; the program has the "
        "option and never uses it: use it, or leave it out of search.space"
    )


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("metrics", "waits"),
    [
        ("stdout", "no line of its output has had loss yet"),
        ("report", "python train.py ${lr} has not called rubberband.report yet"),
    ],
)
def test_a_time_that_is_over_shows_what_was_waited_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, metrics: str, waits: str
) -> None:
    def passed_s() -> float:
        """Real time until the program has printed for a while; then the limit passes at once."""
        return time.monotonic() + (1e6 if (here / "printed").exists() else 0.0)

    monkeypatch.setattr(checking, "time", SimpleNamespace(monotonic=passed_s))
    source = "import time\nfor _ in range(5): print('acc=3', flush=True); time.sleep(0.2)\nopen('printed', 'w')\n"
    Path("train.py").write_text(source + "time.sleep(1000)")
    given = experiment({"command": "python train.py ${lr}", "metrics": metrics}, 1)
    [found] = check_experiment(given, search_path=[Path.cwd()], limit_s=90.0).problems
    assert found.line.startswith(f"iteration: not over after 1m30s; {waits}; its last lines: acc=3")
    assert found.line.endswith("; correct it, or allow more with --limit 4m30s")


def test_a_run_announces_what_its_check_remarks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    no_runs = "import os\nassert os.environ['WANDB_MODE'] == 'disabled', 'a check makes no run of W&B'\n"
    trains = TRAINS.format(save=SAVES).replace("1 / epoch", "float(sys.argv[2]) / epoch")
    Path("train.py").write_text(no_runs + FORGETS + trains)
    given, announced = experiment({"command": "python train.py ${checkpoint} ${lr}"}, 1), list[str]()
    check_first(given, named_entrypoint(given, [here]), here / "home", None, announced.append)
    assert announced[0].startswith("checked python train.py")
    assert any("starts from zero, as at each stage" in each for each in announced)


def test_a_program_that_saves_in_the_folder_of_all_trials_gets_a_remark() -> None:
    save = 'pathlib.Path("snapshot.json").write_text(str(epoch)); ' + SAVES
    report = checked(LOADS + TRAINS.format(save=save))
    assert report.ok
    assert "the program wrote snapshot.json into its folder, which all trials share" in report.remarks[0]


LOOP = """
import argparse, json, os, pathlib, random, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--gamma", type=float, default=0.5)
parser.add_argument("--epochs", type=int)
parser.add_argument("--out", default=".")
args = parser.parse_args()
file = pathlib.Path(args.out, "state.json")
epoch, x = json.loads(file.read_text()) if file.exists() else (0, 1.0)
while epoch < args.epochs:
    time.sleep(0.11)
    x -= args.lr * x * args.gamma**epoch
    epoch += 1
    file.write_text(json.dumps([epoch, x]))
    print(f"epoch {epoch} loss={x:.6f}", flush=True)
"""
LINE = "python train.py --lr ${lr} --gamma 0.9 --epochs ${max_t} --out ${checkpoint}"
BOTH = {
    "lr": {"type": "loguniform", "lower": 0.01, "upper": 0.5},
    "gamma": {"type": "uniform", "lower": 0.1, "upper": 0.9},
}


def loops(replaced: str, by: str, *, quick: bool = True, command: str = LINE, space: object = None) -> CheckReport:
    """Check a loop with a change; where values are tried it is too fast for its files to be taken."""
    assert replaced in LOOP
    given = experiment({"command": command, "metrics": "stdout"}, 1, space or {"lr": BOTH["lr"]})
    Path("train.py").write_text(LOOP.replace(replaced, by).replace("0.11", "0.11" if quick else "0.01"))
    with mock.patch.object(check_module, "check", check_here):
        return check_experiment(given, search_path=[Path.cwd()], quick=quick)


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("replaced", "by", "resumes", "restart"),
    [
        ("import argparse", "import argparse", True, "resumes exactly"),
        ("if file.exists()", "if False", False, "starts again: every stage repeats its epochs"),
        ("file.write_text", "str", False, "starts again: every stage repeats its epochs"),
        ("x -= args", "x -= random.random() / 99 + args", True, "resumes; other random numbers (loss 0."),
        (
            "while",
            "if epoch: print(f'epoch {epoch} loss={x:.6f}')\nwhile",
            True,
            "evaluates again after a restart: counted",
        ),
    ],
)
def test_the_restart_is_said_in_one_line(replaced: str, by: str, resumes: bool, restart: str) -> None:
    report = loops(replaced, by)
    assert report.ok
    assert (report.trial.resumes, report.trial.restart[: len(restart)]) == (resumes, restart)
    assert (report.to_json()["resumes"], report.to_json()["restart"]) == (resumes, report.trial.restart)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("replaced", "by", "problem"),
    [
        ("while", "if epoch: print(f'epoch {epoch} loss=9.5')\nwhile", "loss 9.5 for "),
        ("while", "if epoch: sys.exit()\nwhile", "ends without a report, and an unbroken run goes on"),
        ("while", "os.mkdir('exp')\nwhile", "FileExistsError"),
    ],
)
def test_a_restart_that_loses_the_training_is_a_problem(replaced: str, by: str, problem: str) -> None:
    [found] = loops(replaced, by).problems
    assert found.line.startswith("continue: ")
    assert problem in found.line
    assert not Path("exp").exists(), "an empty folder would fail the next check too"


@pytest.mark.by_default(2)
@pytest.mark.parametrize("name", ["model.pt", "outputs/last.json"])
@pytest.mark.parametrize("noise", ["", " + random.random() / 99"])
def test_a_file_of_the_programs_folder_that_another_start_loads_is_a_problem(name: str, noise: str) -> None:
    Path("outputs").mkdir()
    with mock.patch(f"{__name__}.LOOP", LOOP.replace("x -= ", f"x -= 0{noise} + ").replace("epochs:", "epochs + 4:")):
        [found] = loops(
            "state.json", f"../{name}" if name == "" else name, command=LINE.rpartition(" --out")[0]
        ).problems
    assert found.line.startswith(f"another start: trials share {name} in the program's folder: another start without a")
    assert ("goes on from what the first has left there" in found.line) or "ends without a report" in found.line
    assert Path(name).exists() == (name != "model.pt"), "a run would load the model"


def test_files_that_no_start_loads_are_no_problem() -> None:
    writes = "    for name in ('best.pt', 'mine.pt'): pathlib.Path(name).write_text('x')\n"
    writes += "    os.makedirs('lightning_logs/version_0', exist_ok=True)\n"
    writes += "    pathlib.Path('lightning_logs/version_0/metrics.csv').write_text(str(epoch))\n"
    Path("mine.pt").write_text("mine")
    report = loops("    file.write", f"{writes}    file.write")
    assert report.ok
    [remark] = report.remarks
    assert remark.startswith("the program wrote best.pt, mine.pt into its folder")
    assert remark.endswith("; the check has removed best.pt")
    assert sorted(path.name for path in Path().glob("*.pt")) == ["mine.pt"], "what was there before stays"


def test_a_program_that_reports_once_at_its_end_gets_a_note() -> None:
    report = loops("    print", "if True:\n    print")
    assert report.trial.is_once
    assert "an iteration is a whole training, and stopping it early saves nothing" in report.remarks[0]


NO_USE = "the program has the option and never uses it"


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("replaced", "by", "problem"),
    [
        (
            "args.lr",
            "0.1",
            f"values: lr changes nothing: 0.498 and 0.01 give the same output in the first 8 iterations; {NO_USE}",
        ),
        ("file =", "print(args)\nargs.lr = 0.1\nfile =", "values: lr changes nothing: 0.498 and 0.01 give"),
        (
            "args.gamma",
            "0.5",
            f"values: gamma changes nothing: 0.899 and 0.101 give the same output in the first 8 iterations; {NO_USE}",
        ),
        (
            "args.lr * x * args.gamma**epoch",
            "0.1",
            f"values: lr and gamma change nothing: two values of each give the same output; {NO_USE}",
        ),
        ("x -= args", "x -= random.random() / 99 + args", None),
        ("args.gamma**epoch", "(args.gamma if epoch > 5 else 1)", None),
    ],
)
def test_a_parameter_without_an_effect_is_a_problem(replaced: str, by: str, problem: str | None) -> None:
    command = LINE.replace("0.9", "${gamma}")
    report = loops(replaced, by, quick=False, command=command, space=BOTH)
    assert [each.line[: len(problem or "")] for each in report.problems] == ([problem] if problem else [])


def test_a_parameter_with_a_late_effect_gets_a_note() -> None:
    report = loops(
        "args.gamma**epoch",
        "(args.gamma if epoch > 99 else 1)",
        quick=False,
        command=LINE.replace("0.9", "${gamma}"),
        space=BOTH,
    )
    assert report.ok
    assert report.remarks[-1].startswith(
        "gamma changes nothing: 0.899 and 0.101 give the same output in the first 8 iterations: an effect"
    )


def test_a_program_that_reads_no_arguments_is_a_problem() -> None:
    source = "import time\nfor epoch in range(4): time.sleep(0.01); print(f'loss={0.9**epoch:.6f}', flush=True)"
    [found] = tried(source, "${args}", BOTH).problems
    assert found.line.startswith("values: lr and gamma change nothing: ")
    assert "the program reads no arguments: read them with argparse" in found.line


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("source", "command", "problem"),
    [
        ("print('hi'); raise SystemExit(3)", "python train.py", "python train.py ${args} ended with exit code 3"),
        ("print('hi')", "python train.py", "without a report of loss"),
        ("", "python nosuch.py", "entrypoint.command: there is no nosuch.py in /"),
        ("", "nosuch train.py", "entrypoint.command: nosuch is not here; install it, or give its path"),
        ("", "torchrun train.py --lr ${lr}", "torchrun starts workers itself"),
    ],
)
def test_a_program_that_cannot_train_is_a_problem(source: str, command: str, problem: str) -> None:
    if "torchrun" in command:
        with pytest.raises(Exception, match=problem):
            checked(source, command)
        return
    [found, *_] = checked(source, command).problems
    assert problem in found.line


MEETS = """
import os, socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if size > 1 and rank == 0:
    listener = socket.create_server(address)
    listener.accept()
while size > 1 and rank > 0:
    try:
        line = socket.create_connection(address)
        break
    except OSError:
        time.sleep(0.01)
"""
DISTRIBUTED = f"""
import pathlib, time
folder = rubberband.get_checkpoint()
done = int(pathlib.Path(folder, "n").read_text()) if folder else 0
{MEETS}
for epoch in range(done + 1, 9):
    pathlib.Path(f"out{{rank}}").mkdir(exist_ok=True)
    pathlib.Path(f"out{{rank}}", "n").write_text(str(epoch))
    rubberband.report({{"loss": size / epoch}}, checkpoint=f"out{{rank}}")
"""


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("source", "remark"),
    [
        (MEETS + TRAINS.format(save=SAVES), None),
        (
            MEETS + TRAINS.format(save=SAVES).replace("1 / epoch", "size / epoch"),
            "two workers report loss=1, twice what one reports from the same checkpoint (0.5): average the metric",
        ),
        (
            MEETS + TRAINS.format(save=SAVES).replace("1 / epoch", "(1 + 0.1 * size) / epoch"),
            "two workers report loss=0.6, and one 0.55 from the same checkpoint: divide the batch by WORLD_SIZE",
        ),
    ],
)
def test_a_metric_that_depends_on_the_size_of_the_gang_gets_a_remark(source: str, remark: str | None) -> None:
    report = checked(LOADS + source, "python train.py ${checkpoint} ${lr}", most=2)
    assert report.problems == ()
    assert [each[: len(remark or "")] for each in report.remarks] == ([] if remark is None else [remark])
    assert ("gang" in report.trial.seconds) == (remark is None)


@pytest.mark.long
def test_a_distributed_function_is_compared_on_two_workers(here: Path) -> None:
    (here / "trials.py").write_text(
        f"import rubberband\n\n@rubberband.distributed\ndef train(config):\n{textwrap.indent(DISTRIBUTED, '    ')}"
    )
    remark = "two workers report loss=1, twice what one reports from the same checkpoint (0.5): average the metric"
    [found] = check_experiment(experiment("trials:train", 2), search_path=[here]).remarks
    assert found.startswith(remark)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            TRAINS.format(save=f"time.sleep(0.5); {SAVES}"),
            "gang: on two workers, 2 workers trained each on its own: call",
        ),
        (
            "import os\nif os.environ['RANK'] != '0': raise SystemExit('no data')" + MEETS + TRAINS.format(save=SAVES),
            "no data",
        ),
    ],
)
def test_a_gang_that_cannot_train_is_a_problem(source: str, problem: str) -> None:
    [found] = checked(LOADS + source, "python train.py ${checkpoint} ${lr}", most=2).problems
    assert problem in found.line


SHARDS = (
    LOADS
    + MEETS
    + """
saved = sorted(path.name for path in out.glob("part-*"))
{loads}
def barrier():
    if size > 1:
        peer = listener.accept()[0] if rank == 0 else socket.create_connection(address)
        peer.sendall(b"x"), peer.recv(1)
for epoch in range(done + 1, 9):
    barrier()
    (out / f"part-{{rank}}").write_text(str(epoch))
    if rank == 0:
        (out / "n").write_text(str(epoch))
    barrier()
    rubberband.report({{"loss": {loss}}})
"""
)
"""Each rank saves a part of its own."""


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("loads", "loss", "problem", "remark"),
    [
        ("", "1 / epoch", None, None),
        (
            "if done == 2 and len(saved) != size: raise ValueError(f'{len(saved)} parts for {size} workers')",
            "1 / epoch",
            "gang: one worker from what two saved, ValueError: 2 parts for 1 workers (",
            None,
        ),
        (
            "",
            "(1 if epoch < 3 else size) / epoch",
            None,
            "from what two workers saved, one reports loss=0.333333 and two 0.666667: divide the batch by WORLD_SIZE",
        ),
    ],
)
def test_a_start_of_any_size_loads_what_two_workers_saved(
    loads: str, loss: str, problem: str | None, remark: str | None
) -> None:
    source = SHARDS.format(loads=loads, loss=loss)
    report = checked(source, "python train.py ${checkpoint} ${lr}", most=2)
    assert [problem and problem in each.line for each in report.problems] == ([True] if problem else [])
    assert [remark and remark in each for each in report.remarks] == ([True] if remark else [])
    if problem:
        assert "let a start load what any number of workers saved, or give resources.gpus_per_trial one number" in (
            report.problems[0].line
        )


def test_a_metric_of_the_loaded_checkpoint_without_a_number_gets_a_remark() -> None:
    loads = LOADS + "if done: print(f'=> loaded epoch {done}, loss={1 / done:.1f}')\n"
    prints = "print(f'loss={1 / epoch:.1f}')"  # too few digits to know it again
    trains = f"for epoch in range(done + 1, 9):\n    time.sleep(0.12)\n    if epoch > 1: {SAVES}\n    {prints}"
    report = checked(loads + trains, metrics="stdout")
    assert report.trial.restart == "evaluates again after a restart: counted twice (loss 0.5)"
    assert any("of the last of these once more" in remark for remark in report.remarks), report.remarks


def test_a_script_is_checked_without_a_file() -> None:
    Path("train.py").write_text(
        "import argparse, pathlib\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.1)\n"
        "p.add_argument('--out')\na = p.parse_args()\nf = pathlib.Path(a.out, 'n')\n"
        "for epoch in range(int(f.read_text()) if f.exists() else 0, 99):\n"
        "    import time\n    time.sleep(0.1)\n    f.write_text(str(epoch + 1))\n"
        "    print(f'loss={a.lr / (epoch + 1)}')\n"
    )
    done = CliRunner().invoke(cli.app, ["check", "--quick", "train.py"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "(program)" in done.stdout
    assert "continued by another iteration" in done.stdout
    assert "train.py passes; write its experiment: rubberband init train.py" in done.stdout
    assert "note" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", ["bash", "plain", "ddp"])
def test_the_examples_of_commands_pass_their_check(name: str) -> None:
    file = Path(__file__).parents[2] / f"examples/commands/{name}.yaml"
    done = CliRunner().invoke(cli.app, ["check", str(file)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "note" not in done.stderr, done.stderr
    assert ("two workers train what one trains" in done.stdout) == (name == "ddp")


def test_the_findings_are_last_and_the_output_is_folded(tmp_path: Path) -> None:
    Path("train.py").write_text("import sys\nprint('loading')\nprint('at work', file=sys.stderr)\nsys.exit(3)")
    words = experiment({"command": "python train.py ${lr}", "metrics": "stdout"}, 1).to_words()
    Path("train.json").write_text(json.dumps({"version": 1, **words}))
    done = CliRunner().invoke(cli.app, ["check", "train.json"])
    *_, above, last = done.stderr.splitlines()
    assert (done.exit_code, above) == (1, "at work")
    assert last.startswith("problem: iteration: python train.py ${lr} ended with exit code 3")
    Path("train.py").write_text(
        "import sys\nprint('loading')\nfor n in (1, 2): print(f'loss={n * float(sys.argv[1])}')"
    )
    done = CliRunner().invoke(cli.app, ["check", "--quick", "train.json"])
    assert done.exit_code == 0
    assert "loading" not in done.output
    assert "restart        starts again: every stage repeats its epochs" in done.stdout


def test_a_command_that_holds_the_value_of_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aVerySecretToken")
    experiment = Experiment(
        name="train",
        entrypoint={"command": "python train.py --token hf_aVerySecretToken ${lr}"},
        search={
            "space": {"lr": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "sha", "num_samples": 4, "max_t": 8, "reduction_factor": 2},
            "metric": "loss",
            "mode": "min",
        },
        resources={"secrets": ["HF_TOKEN"], "gpus_per_instance": 1, "price_per_hour": 1},
    )
    with pytest.raises(InputError, match="it holds the value of a secret"):
        named_entrypoint(experiment)


def test_variables_of_an_experiment_are_filled_when_its_program_starts() -> None:
    Path("train.py").write_text(
        "import json, os, pathlib\n"
        "out = pathlib.Path(os.environ['SM_MODEL_DIR'])\n"
        "assert json.loads(os.environ['SM_HPS']) == {'lr': float(os.environ['SM_HP_LR'])}\n"
        "epoch = int((out / 'n').read_text()) if (out / 'n').exists() else 0\n"
        "for epoch in range(epoch + 1, 9):\n"
        "    (out / 'n').write_text(str(epoch))\n"
        "    print(f'loss={1 / epoch}', flush=True)\n"
        "    import time; time.sleep(0.1)\n"
    )
    words = experiment({"command": ["python", "train.py"], "metrics": "stdout"}, 1).to_words()
    words["resources"]["env"] = {"SM_MODEL_DIR": "${checkpoint}", "SM_HPS": "${args_json}", "SM_HP_LR": "${lr}"}
    with mock.patch.object(check_module, "check", check_here):
        report = check_experiment(Experiment(**words), search_path=[Path.cwd()], quick=True)
    assert (report.problems, report.trial.metrics) == ((), {"loss": 1.0})
    assert report.trial.checkpoint_bytes
