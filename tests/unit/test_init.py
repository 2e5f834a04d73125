"""`rubberband init` of nothing, of a trial and of a program: what it writes is estimated, checked and run as it is."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import Result
from typer.testing import CliRunner

from rubberband import cli
from rubberband.commands.init import seen_in
from rubberband.errors import EntrypointError, InputError
from rubberband.running.first_file import TrialFindings, text_of
from rubberband.running.programs.options import ProgramFindings, program_of
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment, parse_experiment
from rubberband.spec.program import Program
from rubberband.spec.space import Domain

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's own; its modules are forgotten afterwards, as others have the same names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_trial", None)
    yield tmp_path
    for name in ("my_trial", "mydigits", "plain", "train", "sgd"):
        sys.modules.pop(name, None)


def rubberband(*arguments: str, exit_code: int = 0) -> Result:
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == exit_code, (done.output, done.exception)
    return done


@pytest.mark.parametrize("has_torch", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_new_user_starts_from_nothing(has_torch: bool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name, *more: find(name, *more) if has_torch or name != "torch" else None
    )
    first = rubberband("init")
    assert ("TorchTrial" in (here / "my_trial.py").read_text()) == has_torch
    answer = dict(line.split(maxsplit=1) for line in first.stdout.splitlines())
    assert list(answer) == ["metric", "parameters", "checkpoint", "resume", "time", "next"]
    assert answer["next"] == "adapt the ranges in experiment.yaml, then: rubberband estimate experiment.yaml"
    experiment = load_experiment("experiment.yaml")
    schema = re.match(r"# yaml-language-server: \$schema=(.*)\n", (here / "experiment.yaml").read_text())
    assert schema is not None
    jsonschema.validate(experiment.to_words(), json.loads(Path(schema[1]).read_text()))
    name = experiment.name
    assert here.name.replace("_", "-").startswith(name), (
        "neither my_trial nor MyTrial is a name of a project: the folder is"
    )
    assert rubberband("estimate", "experiment.yaml").stdout.startswith(f"{name}: ")
    assert "experiment.yaml passes" in rubberband("check", "experiment.yaml").stdout
    assert f"{name}: done in " in rubberband("run", "experiment.yaml", "-s", "resources.provider=virtual").stdout


def test_the_parameters_and_metrics_of_a_trial_are_found(here: Path) -> None:
    shutil.copy(ROOT / "examples/digits.py", here / "mydigits.py")
    rubberband("init", "mydigits:DigitsTrial", "--file", "d.yaml", "--no-check")
    found = load_experiment("d.yaml")
    assert (found.name, found.entrypoint) == ("digits", "mydigits:DigitsTrial")
    assert (found.search.metric, found.search.mode) == ("accuracy", "max")
    kinds = {name: domain.kind for name, domain in found.search.space.items() if isinstance(domain, Domain)}
    assert kinds == {"lr": "loguniform", "momentum": "uniform", "weight_decay": "loguniform", "width": "choice"}
    assert "seconds_per_iteration: {1: 10}" in Path("d.yaml").read_text()
    rubberband("estimate", "d.yaml")


def test_the_metric_that_an_iteration_reports_is_used_and_problems_are_listed(here: Path) -> None:
    (here / "plain.py").write_text(
        "import rubberband\n"
        "def train(config):\n"
        "    state = {'top-1 accuracy': config['x'], 'on': config.get('flag', True), 'n': config.get('n', 0.5)}\n"
        "    while True:\n        rubberband.report(state, checkpoint=1)\n"
        "def broken(config):\n    raise ValueError('no data here', config['x'])\n"
        "def fixed(config):\n    rubberband.report({'loss': 1})\n"
    )
    rubberband("init", "plain:train")
    assert load_experiment("experiment.yaml").search.metric == "top-1 accuracy"
    rubberband("check", "experiment.yaml")
    broken = rubberband("init", "plain:broken", "--file", "broken.yaml")
    assert "problem: iteration: ValueError: ('no data here'," in broken.stderr
    assert "then: rubberband check broken.yaml" in broken.stdout
    rubberband("estimate", "broken.yaml")
    fixed = rubberband("init", "plain:fixed", "--file", "fixed.yaml", exit_code=1)
    assert str(fixed.exception).startswith("no parameter was found in plain:fixed; read one from its configuration")
    assert not Path("fixed.yaml").exists(), "a placeholder would pass"


def test_a_module_in_place_of_a_program_names_its_trial(here: Path) -> None:
    (here / "train.py").write_text("import rubberband\ndef train(config):\n    rubberband.report({'loss': 1})\n")
    for command in ("init", "check"):
        refused = rubberband(command, "train.py", exit_code=1)
        assert str(refused.exception) == "train.py defines train, a trial in Python: rubberband init train:train"
        assert isinstance(rubberband(command, "train:main", exit_code=1).exception, InputError)
    assert [path.name for path in here.iterdir() if path.suffix == ".yaml"] == []


def test_an_experiment_is_named_by_its_trial_module_or_folder(here: Path) -> None:
    (here / "train.py").write_text("import rubberband\ndef train(config): rubberband.report({'loss': config['lr']})\n")
    (here / "sgd.py").write_text("from train import train\n")
    for trial in ("train:train", "sgd:train"):
        rubberband("init", trial, "--file", f"{trial[:3]}.yaml", "--no-check")
    assert load_experiment("tra.yaml").name == here.name.replace("_", "-")
    assert load_experiment("sgd.yaml").name == "sgd"


def test_an_interrupted_start_leaves_no_trial_behind(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rubberband.commands.init._tried", interrupt)
    rubberband("init", exit_code=130)
    assert [path.name for path in here.iterdir() if path.name != "__pycache__"] == [], "its import may be compiled"


def test_nothing_is_overwritten(here: Path) -> None:
    (here / "my_trial.py").write_text("mine")
    refused = rubberband("init", "--file", "one.yaml", exit_code=1)
    assert isinstance(refused.exception, InputError)
    assert "my_trial.py exists" in str(refused.exception)
    (here / "two.yaml").write_text("mine")
    refused = rubberband("init", "my_trial:Mine", "--file", "two.yaml", exit_code=1)
    assert "two.yaml exists" in str(refused.exception)
    assert isinstance(rubberband("init", "nosuch:Trial", exit_code=1).exception, EntrypointError)
    assert sorted(path.name for path in here.iterdir()) == ["my_trial.py", "two.yaml"]
    assert {path.read_text() for path in here.iterdir()} == {"mine"}


MNIST = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--test-batch-size", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=14)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--gamma", type=float, default=0.7)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight_decay", type=float, default=0.0)
parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--nesterov", action="store_true")
parser.add_argument("--big", type=bool, default=False)
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--save-model", default="mnist.pt")
parser.add_argument("--out", default="runs")
args = parser.parse_args()
open("trained", "w").close()
for epoch in range(args.epochs):
    print("epoch {} Test set: Average loss: {:.4f}, accuracy: {:.2%}".format(epoch, 1, 1))
"""


def found_in(source: str, text: str = "train.py") -> ProgramFindings:
    Path("train.py").write_text(source)
    return program_of(text, Path.cwd())


def text_without_look(source: str, text: str = "train.py") -> str:
    """The file as it is before a run has shown the metric."""
    Path("train.py").write_text(source)
    return text_of(replace(seen_in(text, Path("train.yaml")), metric="loss"), Path("train.yaml"))


def written(source: str, text: str = "train.py") -> Experiment:
    return parse_experiment(text_without_look(source, text), source="train.yaml")


def test_options_become_parameters_and_places_without_training(here: Path) -> None:
    experiment = written(MNIST)
    assert not (here / "trained").exists()
    assert isinstance(experiment.entrypoint, Program)
    assert experiment.entrypoint.command == (
        "python train.py --epochs ${max_t} --seed ${seed} --save-model ${checkpoint}/mnist.pt --out ${checkpoint} "
        "--batch-size ${batch_size} --lr ${lr} --gamma ${gamma} --momentum ${momentum} --weight_decay ${weight_decay} "
        "--optimizer ${optimizer}"
    )
    assert getattr(experiment.search.scheduler, "max_t", None) == 14
    kinds = {name: domain.kind for name, domain in experiment.search.space.items() if isinstance(domain, Domain)}
    assert kinds == {
        "batch_size": "choice",
        "lr": "loguniform",
        "gamma": "uniform",
        "momentum": "uniform",
        "weight_decay": "loguniform",
        "optimizer": "choice",
    }
    text = text_without_look(MNIST)
    assert "    lr: {type: loguniform, lower: 0.001, upper: 0.1} # the default is 0.01\n" in text
    switch = "the default is False; add --nesterov ${nesterov} to the command, and booleans: {style: flag}"
    assert f"    # nesterov: {{type: choice, values: [true, false]}} # {switch}\n" in text
    assert "    # amp: {type: choice, values: ['--amp', '--no-amp']} # the default is True; add ${am" in text
    assert "# Note: --big has type=bool, which reads every text as true" in text
    assert "--no-cuda" not in text
    rubberband("init", "train.py", "--no-check", "--yes")
    found = load_experiment("train.yaml")
    assert (here / "trained").exists()
    assert (found.search.metric, found.search.mode, found.entrypoint.metrics) == ("accuracy", "max", "stdout")
    rubberband("estimate", "train.yaml")


def test_words_that_are_given_stay_as_they_are() -> None:
    experiment = written(MNIST, "python train.py --lr 0.5 --save-model=here.pt --momentum=0.8")
    assert isinstance(experiment.entrypoint, Program)
    command = experiment.entrypoint.command
    assert str(command).startswith("python train.py --lr 0.5 --save-model=here.pt --momentum=0.8 --epochs ${max_t}")
    assert {"lr", "momentum"}.isdisjoint(experiment.search.space)


@pytest.mark.parametrize(
    ("given", "made"), [("--out here", "--out ${checkpoint}"), ("--out=here", "--out=${checkpoint}")]
)
def test_a_folder_that_trials_would_share_becomes_that_of_each(given: str, made: str) -> None:
    found = found_in(MNIST, f"python train.py {given} --lr 0.5")
    assert " ".join(found.words).startswith(f"python train.py {made} --lr 0.5 --epochs ${{max_t}}")
    assert "--out here is ${checkpoint} now: all trials would write into here" in found.remarks


RUN_GLUE = """
import logging
from dataclasses import dataclass, field
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

@dataclass
class DataTrainingArguments:
    task_name: str | None = field(default=None)
    max_seq_length: int = field(default=128)
    pad_to_max_length: bool = field(default=True)

@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "where the model is"})
    use_fast_tokenizer: bool = field(default=True)

def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    open("trained", "w").close()
    logging.info(f"Sample {1} of the training set: {data_args}.")
    trainer = Trainer(model=None, args=training_args, eval_dataset=data_args if training_args.do_eval else None)
    if training_args.do_train:
        trainer.train()

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
@pytest.mark.parametrize("out", [" --output_dir out", ""])
def test_a_script_with_the_parser_of_transformers_has_the_epochs_of_its_trainer(out: str) -> None:
    pytest.importorskip("transformers")
    experiment = written(RUN_GLUE, f"python train.py --model_name_or_path bert{out}")
    assert not Path("trained").exists()
    assert isinstance(experiment.entrypoint, Program)
    words = str(experiment.entrypoint.command).split()
    options = {word: words[at + 1] for at, word in enumerate(words[:-1])}
    assert options["--output_dir"] == "${checkpoint}"
    assert options["--num_train_epochs"] == "${max_t}"
    assert (options["--eval_strategy"], options["--save_strategy"]) == ("epoch", "epoch")
    assert {"--do_train", "--do_eval"} < {*words}
    assert {"learning_rate", "per_device_train_batch_size"} < experiment.search.space.keys()
    assert not {"auto_find_batch_size", "per_device_eval_batch_size"} & experiment.search.space.keys()
    text = text_without_look(RUN_GLUE, f"python train.py --model_name_or_path bert{out}")
    assert "is a switch" not in text
    assert ("--output_dir out is ${checkpoint} now" in text) == bool(out)


def test_the_chosen_subcommand_of_a_program_is_read() -> None:
    source = """
import argparse
parser = argparse.ArgumentParser()
commands = parser.add_subparsers(required=True)
fit = commands.add_parser("fit")
fit.add_argument("--lr", type=float, default=0.1)
commands.add_parser("test").add_argument("--depth", type=int, default=3)
parser.parse_args()
"""
    assert found_in(source, "python train.py fit").words == ("python", "train.py", "fit", "--lr", "${lr}")


def test_a_parser_in_an_imported_module_is_found(here: Path) -> None:
    (here / "options.py").write_text(
        "import argparse\ndef read():\n    p = argparse.ArgumentParser()\n"
        "    p.add_argument('--lr', type=float, default=0.1)\n    return p.parse_args()\n"
    )
    assert [*found_in("from options import read\nread()").space] == ["lr"]


ARGV = """
import sys
for epoch in range(3):
    print(f"Epoch [{epoch + 1}/3], Val Loss: {1 / (epoch + 1)}")
    open("model.pt", "w").close()
"""


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("train.py", "--lr", "${lr}", "--name=x", "--verbose"), "train.py --lr ${lr} --name=x --verbose"),
        (("python train.py lr=${lr} --epochs 3",), "train.py lr=${lr} --epochs 3"),
        (("--", "python", "train.py", "--metric", "1", "--lr=${lr}"), "train.py --metric 1 --lr=${lr}"),
        (("--yes", "train.py", "--wait=9s", "-lr", "${lr}", "--out", "o"), "train.py -lr ${lr} --out o"),
    ],
)
def test_the_words_of_a_program_need_no_quotes_and_options_of_init_stand_among_them(
    words: tuple[str, ...], command: str, here: Path
) -> None:
    (here / "train.py").write_text(ARGV)
    done = rubberband("init", *(["--no-check", *words]))
    found = load_experiment("train.yaml")
    assert isinstance(found.entrypoint, Program)
    assert found.entrypoint.command == f"python {command}"
    assert done.stdout.startswith("metric      val_loss (min), read from: Epoch [")
    assert "note: the program saved model.pt into its own folder" in done.stderr
    assert not (here / "model.pt").exists(), "the next start might load it"


def test_a_whole_look_and_a_check_are_six_lines(here: Path) -> None:
    (here / "run.py").write_text(TRAINED)
    done = rubberband("init", "run.py", "--depth", "3")
    text = Path("run.yaml").read_text()
    assert "lr: {type" in text
    assert "metrics: {pattern: '\\bval\\s+loss\\s+(?P<val_loss>[-+.\\w]*\\w)'} # a line" in text.replace("\\s*", "\\s+")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["metric", "parameters", "checkpoint", "resume", "time", "next"]
    assert lines[1] == "parameters  lr"
    assert re.fullmatch(r"checkpoint  0\.\d+ MB", lines[2])
    assert "batch 3" not in done.output, "the program's lines are folded"
    assert load_experiment("run.yaml").search.metric == "val_loss"


TRAINED = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--out", default="out")
args = parser.parse_args()
file = pathlib.Path(args.out, "state.json")
file.parent.mkdir(exist_ok=True)
epoch, x = json.loads(file.read_text()) if file.exists() else (0, 0.0)
import time
while epoch < args.epochs:
    for batch in range(4):
        time.sleep(0.03)
        print(f"batch {batch} of epoch {epoch + 1}")
    epoch, x = epoch + 1, x - args.lr * (x - args.depth)
    file.write_text(json.dumps([epoch, x]))
    print(f"epoch {epoch} train loss {(x - 2) ** 2:.6f} val loss {(x - args.depth) ** 2:.6f}", flush=True)
"""


def test_an_unknown_metric_needs_its_mode(here: Path) -> None:
    (here / "train.py").write_text("for number in range(9): print(f'generation {number} quality={number / 7}')")
    words = ("train.py", "--lr", "${lr}", "--no-check")
    refused = rubberband("init", *words, exit_code=1)
    assert "does not say whether more of it is better; add --mode max or --mode min" in str(refused.exception)
    rubberband("init", *words, "--mode", "max")
    assert load_experiment("train.yaml").search.mode == "max"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("train.py", "mine.yaml"),
            "there is no mine.yaml; the file to write is named by --file: init train.py --file",
        ),
        (("mine.yaml",), "there is no mine.yaml; the file to write is named by --file: init --file mine.yaml"),
        (("my.trial:Class", "--lr", "1"), "my.trial:Class is no program, and takes no words such as --lr"),
        (("nosuch.py", "--lr", "1"), "there is no nosuch.py in"),
        (("train.py", "--file", "out"), "--file out: an experiment file ends with .yaml; words of the program stand"),
        (("words",), "words is neither a trial (module:Class) nor a program (a script, or a command with its words)"),
    ],
)
def test_a_word_that_is_no_program_and_no_trial_is_refused(words: tuple[str, ...], line: str, here: Path) -> None:
    (here / "train.py").write_text("print('loss=1')")
    assert str(rubberband("init", *words, exit_code=1).exception).startswith(line)


def test_a_program_in_another_folder_is_named_from_the_file(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "train.py").write_text("print('loss=1')")
    rubberband("init", "train.py", "--lr", "${lr}", "--file", "sub/one.yaml", "--no-check")
    found = load_experiment("sub/one.yaml").entrypoint
    assert isinstance(found, Program)
    assert found.command == "python ../train.py --lr ${lr}"
    refused = rubberband("init", "nosuch.py", exit_code=1)
    assert str(refused.exception) == f"there is no nosuch.py in {here}; give its path from there"


def test_ctrl_c_during_a_look_ends_the_program_and_writes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    (here / "train.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nprint(1, flush=True)\ntime.sleep(99)"
    )
    monkeypatch.setattr("rubberband.commands.folding.Folded.add", interrupt)
    rubberband("init", "train.py", "--lr", "${lr}", exit_code=130)
    assert not Path("train.yaml").exists()
    assert not Path("/proc", Path("pid").read_text()).exists()


def test_the_part_of_a_start_within_the_first_iteration_is_written() -> None:
    seen = TrialFindings(
        entrypoint="trial:train",
        name="x",
        space={"lr": ("1", "")},
        metric="loss",
        startup_s=9.0,
        first_extra_s=8.0,
        cold_extra_s=12.0,
    )
    profile = parse_experiment(text_of(seen, Path("x.yaml")), source="x.yaml").loaded_profile()
    assert profile is not None
    found = profile.trial_startup_s, profile.first_iteration_extra_s, profile.cold_iteration_extra_s
    assert found == (9.0, 8.0, 12.0)


def test_a_program_that_starts_again_is_planned_so(here: Path) -> None:
    (here / "train.py").write_text(TRAINED.replace("file.write_text", "str"))
    done = rubberband("init", "train.py", "--depth", "3")
    profile = load_experiment("train.yaml").loaded_profile()
    assert profile is not None
    assert not profile.resumes
    assert "resume      starts again: every stage repeats its epochs" in done.stdout
    lines = "lines for it: rubberband init --patch train.py"
    assert f"checkpoint  none: the program saved nothing in ${{checkpoint}}; {lines}\n" in done.stdout
    assert "saved nothing" not in done.stderr, "the answer says it"


def test_a_script_of_a_shell_is_a_program(here: Path) -> None:
    (here / "train.sh").write_text("echo loss=$(date +%N)")
    rubberband("init", "train.sh", "--lr", "${lr}", "--no-check")
    assert getattr(load_experiment("train.yaml").entrypoint, "command", "") == "bash train.sh --lr ${lr}"


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("train.py", "'train.py' is Python, and no experiment file; write one with `rubberband init train.py`"),
        ("train.sh", "'train.sh' is a shell script, and no experiment file; write one with `rubberband init train.sh`"),
        (
            "python train.py --lr 1",
            "'python train.py --lr 1' is a command line, and no experiment file; write one with `rubberband init "
            "'python train.py --lr 1'`",
        ),
        ("nosuch.py", "there is no experiment file 'nosuch.py'; check the path"),
        ("my file.yaml", "there is no experiment file 'my file.yaml'; check the path"),
    ],
)
@pytest.mark.parametrize("command", ["run", "estimate"])
def test_a_program_in_place_of_a_file_is_refused_with_the_command_that_works(
    here: Path, command: str, given: str, refusal: str
) -> None:
    for name in ("train.py", "train.sh"):
        (here / name).write_text("")
    done = CliRunner().invoke(cli.app, [command, given])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(refusal)
