"""Programs with the parsers that people use become commands: each option has a parameter, a place, or is left out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rubberband.commands.init import seen_in
from rubberband.errors import InputError
from rubberband.running.first_file import TrialFindings, text_of
from rubberband.running.programs.options import ProgramFindings, program_of
from rubberband.running.ranges import domain_of, middle_of
from rubberband.spec.loading import parse_experiment
from rubberband.spec.program import Program
from rubberband.values.command import ProgramCommand
from tests.builders.tables import cases


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's own, where python is the one of the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    yield tmp_path
    assert not Path("trained").exists(), "a program that is read does not train"


def found_in(files: Mapping[str, str], text: str) -> ProgramFindings:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    return program_of(text, Path.cwd())


def accepted(words: tuple[str, ...], found: ProgramFindings) -> None:
    """Run the command with a configuration, which the program parses."""
    values = {name: middle_of(yaml.safe_load(domain)) for name, (domain, _) in found.space.items()}
    command = ProgramCommand(words=words, booleans=found.booleans or "true/false")
    places = {"checkpoint": str(Path("made").absolute()), "max_t": "2", "seed": "7"}
    done = subprocess.run(command.line(values, places), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    Path("trained").unlink(missing_ok=True)


@cases("library", "files", "text", "command", "start", "space", "others", "booleans")
def test_the_options_of_a_parser_are_parameters_places_and_words(
    library: str,
    files: Mapping[str, str],
    text: str,
    command: str,
    start: str,
    space: Mapping[str, str],
    others: list[str],
    booleans: str,
) -> None:
    found = found_in(files, text)
    assert " ".join(found.words) == command
    assert " ".join(found.start) == start
    assert {name: domain for name, (domain, _) in found.space.items()} == space
    assert [*found.others] == others
    assert found.booleans == booleans
    seen = TrialFindings(
        command=found.words, metrics="stdout", name="x", space=found.space, others=found.others, metric="loss"
    )
    read = parse_experiment(text_of(seen, Path("x.yaml")), source="x.yaml")
    assert set(read.search.space) == set(space)
    accepted(found.words, found)
    accepted(found.start, found)


ARGPARSE = """
import argparse
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--out", default="runs")
    {options}
    args = parser.parse_args()
    open("trained", "w")
if __name__ == "__main__":
    main()
"""


@cases("text", "files", "words")
def test_a_program_that_is_started_by_others_keeps_its_words(
    text: str, files: Mapping[str, str], words: str, here: Path
) -> None:
    """`uv`, `poetry` and the like start Python here as they do elsewhere."""
    (here / "bin").mkdir()
    for name, first in (("uv", "python"), ("poetry", "")):
        (here / "bin" / name).write_text(f'#!/bin/bash\nshift\n[ "$1" = python ] && exec "$@"\nexec {first} "$@"\n')
        (here / "bin" / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{here}/bin:{Path(sys.executable).parent}:/usr/bin:/bin")
        found = found_in(
            {"train.py": ARGPARSE.format(options=""), "package/train.py": ARGPARSE.format(options="")} | files, text
        )
        assert " ".join(found.words) == words
        if "$@" not in words and not words.startswith("accelerate"):
            accepted(found.words, found)


@cases("text", "source", "refusal")
def test_a_program_whose_parameters_cannot_be_known_is_refused_in_a_line_that_says_what_to_do(
    text: str, source: str, refusal: str
) -> None:
    with pytest.raises(InputError) as refused:
        found_in({"train.py": source, "train.sh": source, "train.ipynb": source}, text)
    assert str(refused.value) == refusal
    assert "\n" not in refusal


def test_a_program_that_trains_before_it_parses_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubberband.running.programs.parsers.LIMIT_S", 1.0)
    with pytest.raises(InputError, match=r"python train\.py: it parsed no arguments within 1 s; mend this, or name"):
        found_in({"train.py": "import argparse, time\ntime.sleep(99)\n"}, "train.py")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('parser.add_argument("--resume", action="store_true")', ("--resume",)),
        ('parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=False)', ("--resume",)),
        (
            'parser.add_argument("--resume", type=lambda text: text.lower() in ("true", "1"), default=False)',
            ("--resume", "true"),
        ),
        ('parser.add_argument("--init_from", default="")', ("--init_from", "resume")),
        ('parser.add_argument("--resume", default="", help="last.pt")', ("--resume", "${checkpoint}/last.pt")),
        ('parser.add_argument("--checkpoint", help="checkpoint to load")', ()),
    ],
)
def test_an_option_that_resumes_is_no_parameter(options: str, words: tuple[str, ...]) -> None:
    compared = '"resume" if parser.parse_args().init_from == "resume" else 0' if "init_from" in options else ""
    found = found_in(
        {"train.py": ARGPARSE.format(options=options).replace('open("trained"', f'{compared}\n    open("trained"')},
        "train.py",
    )
    assert found.resume == words
    assert any("below the command" in remark for remark in found.remarks) == (not words)
    seen = replace(seen_in("train.py", Path("x.yaml")), metric="loss")
    experiment = parse_experiment(text_of(seen, Path("x.yaml")), source="x.yaml")
    assert isinstance(experiment.entrypoint, Program)
    assert experiment.entrypoint.to_plain().resume == words
    assert [*found.space] == ["lr"]


ROLES = {
    "${max_t}": "epochs num_epochs n_epochs nEpochs niter n_iter max_epochs total_epochs num_train_epochs n-epoch",
    "${seed}": "seed manualSeed randomSeed random_state manual-seed",
    "${checkpoint}": "outf out_dir save-dir save_path output_dir logdir log_dir checkpoint_dir default_root_dir",
    "": "img_size image_size num_classes vocab_size block_size workers num-workers log_interval port local_rank device "
    "data_dir wandb_project max_steps max_iters num_iters test_batch_size start_epoch in_channels seq_len n_head",
}


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in ROLES.items() for name in names.split()])
def test_a_role_is_never_searched(place: str, name: str) -> None:
    kind = {"${checkpoint}": "str"}.get(place, "int")
    default = '"runs"' if kind == "str" else "3"
    source = ARGPARSE.replace('    parser.add_argument("--out", default="runs")\n', "")
    option = f'parser.add_argument("--{name}", type={kind}, default={default})'
    found = found_in({"train.py": source.format(options=option)}, "train.py")
    assert [*found.space] == ["lr"]
    assert not found.others
    assert " ".join(found.words) == f"python train.py {f'--{name} {place} ' if place else ''}--lr ${{lr}}"


NAMES = ("lr", "batch_size", "dropout", "momentum", "alpha", "kappa", "n_things", "width", "gamma", "beta2", "warmup")


@given(name=st.sampled_from(NAMES), number=st.one_of(st.integers(1, 10**6), st.floats(1e-12, 1e6)))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_default_is_within_its_range_and_an_int_stays_one(name: str, number: float) -> None:
    domain = yaml.safe_load(domain_of(name, number)[0])
    if isinstance(number, int):
        assert number in domain["values"]
        assert all(type(value) is int and value > 0 for value in domain["values"])
    else:
        lower, upper = float(domain["lower"]), float(domain["upper"])
        assert lower < upper
        assert lower * 0.9999 <= number <= upper * 1.0001


def test_a_whole_default_of_a_float_is_a_float() -> None:
    options = 'parser.add_argument("--weight-decay", type=float, default=1)'
    found = found_in({"train.py": ARGPARSE.format(options=options)}, "train.py")
    assert found.space["weight_decay"][0] == "{type: loguniform, lower: 0.1, upper: 10}"


def test_values_that_a_shell_script_gives_are_the_defaults(here: Path) -> None:
    script = 'cd "$(dirname "$0")"\nLR=${LR:-0.03}\npython train.py --lr "$LR" --out runs "$@"\n'
    found = found_in({"train.py": ARGPARSE.format(options=""), "run.sh": script}, "run.sh")
    assert found.space["lr"] == ("{type: loguniform, lower: 0.003, upper: 0.3}", "the default is 0.03")
    assert found.words == ("bash", "run.sh", "--out", "${checkpoint}", "--lr", "${lr}")


def test_the_epochs_that_are_given_are_those_of_a_trial() -> None:
    source = ARGPARSE.format(options='parser.add_argument("--epochs", type=int, default=9)')
    assert found_in({"train.py": source}, "train.py").epochs == 9
    given = found_in({"train.py": source}, "python train.py --epochs 5")
    assert (given.epochs, given.words) == (
        5,
        ("python", "train.py", "--epochs", "5", "--out", "${checkpoint}", "--lr", "${lr}"),
    )


def test_at_most_six_parameters_are_searched_the_best_known_first() -> None:
    names = ["gamma", "tau", "rho", "kappa", "depth", "weight_decay", "batch_size", "dropout", "momentum"]
    options = "\n    ".join(
        f'parser.add_argument("--{name}", type=float, default=0.3)' for name in names if name != "lr"
    )
    found = found_in({"train.py": ARGPARSE.format(options=options)}, "train.py")
    assert [*found.space] == ["lr", "batch_size", "weight_decay", "dropout", "momentum", "depth"]
    assert [*found.others] == ["gamma", "tau", "rho", "kappa"]
    assert not {"--gamma", "--tau", "--rho", "--kappa"} & set(found.words)
    assert found.others["gamma"][1] == "the default is 0.3; add --gamma ${gamma} to the command"


@pytest.mark.long
@cases("library", "files", "text", "command", "space")
def test_the_options_of_a_trainer(
    library: str, files: Mapping[str, str], text: str, command: str, space: Mapping[str, str]
) -> None:
    found = found_in(files, text)
    assert " ".join(found.words) == command
    assert {name: domain for name, (domain, _) in found.space.items()} == space
    accepted(found.words, found)


@cases("options", "words", "written")
def test_options_that_cannot_be_searched_as_they_are(options: str, words: str, written: str) -> None:
    source = ARGPARSE.format(options="\n    ".join(options.splitlines()))
    found = found_in({"train.py": source}, f"python train.py {words}".strip())
    assert " ".join(found.words) == f"python train.py {written}"
    accepted(found.words, found)
    accepted(found.start, found)
