"""The command line of a program: its words, its places, and the metrics that it prints."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rubberband
from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import name_of_trial
from rubberband.spec.program import Program
from rubberband.values.command import ProgramCommand, check_names, launcher_of, survives_shell, unused, words_of
from rubberband.values.metric_lines import ambiguous, is_another_kind, metrics_in, unread
from tests.builders.tables import cases

PLACES = {"checkpoint": "/run/out", "max_t": "9"}


def test_a_command_gets_parameters_and_places() -> None:
    command = ProgramCommand(words=words_of("python train.py --lr ${lr} --out=${checkpoint}/last --epochs ${max_t}"))
    found = command.line({"lr": 0.1}, PLACES)
    assert found == ["python", "train.py", "--lr", "0.1", "--out=/run/out/last", "--epochs", "9"]


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_batch_is_divided_among_the_workers_of_a_gang(batch: int, workers: int) -> None:
    words = words_of(f"python train.py --batch ${{batch/workers}} --steps=${{{batch}/workers}}")
    command, values, places = ProgramCommand(words=words), {"batch": batch}, {"workers": str(workers)}
    check_names(words, values)
    assert unused(words, values) == []
    if batch % workers == 0:
        part = str(batch // workers)
        on_machines = {**places, "gpus": "1", "machines": str(workers)}
        for each in (places, on_machines):
            assert command.line(values, each)[2:] == ["--batch", part, f"--steps={part}"]
    else:
        with pytest.raises(InputError, match=rf"{batch} cannot be divided equally among {workers} workers, which"):
            command.line(values, places)


@pytest.mark.parametrize("value", [0.5, "8x", 0, None])
def test_a_batch_that_is_no_whole_number_is_not_divided(value: Any) -> None:
    command = ProgramCommand(words=words_of("python train.py --batch ${batch/workers}"))
    with pytest.raises(InputError, match="cannot be divided equally among 1 worker"):
        command.line({"batch": value}, {"workers": "1"})


def test_a_command_without_places_gets_all_parameters() -> None:
    command = ProgramCommand(words=words_of("python train.py"))
    values = {"lr": 0.1, "big": True, "name": "a b", "layers": [1, 2], "none": None}
    assert command.line(values, {})[2:] == ["--lr=0.1", "--big=true", "--name=a b", "--layers=[1, 2]", "--none=null"]


def test_a_parameter_that_the_configuration_lacks_is_left_out_with_its_option() -> None:
    text = "python train.py --optimizer ${optimizer} --momentum ${momentum} --nesterov=${nesterov} ${amp} a=${damp}"
    command = Program(command=text).to_plain()
    assert command.line({"optimizer": "adam"}, {}) == ["python", "train.py", "--optimizer", "adam"]
    every = {"optimizer": "sgd", "momentum": 0.5, "nesterov": True, "amp": "--amp", "damp": 1}
    assert command.line(every, {})[2:] == [
        "--optimizer", "sgd", "--momentum", "0.5", "--nesterov=true", "--amp", "a=1"
    ]  # fmt: skip
    within = Program(command=["bash", "-c", "python train.py --momentum ${momentum}"]).to_plain()
    with pytest.raises(InputError, match=r"this configuration lacks a parameter of .*; write it as a word of its own"):
        within.line({"optimizer": "adam"}, {})


@cases("style", "line")
def test_booleans_are_written_as_the_program_reads_them(style: str, line: str) -> None:
    command = ProgramCommand(words=words_of("train --a ${a} --b=${b} ${a} ${c} --c=${d}"), booleans=style)
    assert " ".join(command.line({"a": True, "b": False, "c": [True], "d": 1}, {})) == line


def test_all_parameters_are_written_for_hydra_and_as_json() -> None:
    words = words_of("python train.py ${args_no_hyphens} --config=${args_json}")
    values = {"model.lr": 0.1, "big": True, "name": "a b", "none": None}
    found = ProgramCommand(words=words).line(values, {})
    assert found[2:] == ["model.lr=0.1", "big=true", "name=a b", "none=null", f"--config={json.dumps(values)}"]
    assert ProgramCommand(words=words, booleans="flag").line(values, {})[3] == "big=true", "hydra has no flags"
    assert unused(words[:3], ["lr"]) == unused(words[3:], ["lr"]) == []


def test_python_style_is_what_a_sweep_of_wandb_writes() -> None:
    values = {"a": None, "b": [True, None, "x"], "c": False, "d": 1e-05, "e": "text"}
    found = ProgramCommand(words=("t", "${args}"), booleans="True/False").line(values, {})
    assert found[1:] == [f"--{name}={value}" for name, value in values.items()]


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["true/false", "True/False", "flag", "1/0"]))
def test_a_number_reaches_the_program_with_all_its_digits(value: float, style: str) -> None:
    command = ProgramCommand(words=("t", "${lr}", "${args}", "${args_json}"), booleans=style)
    one, option, content = command.line({"lr": value}, {})[1:]
    assert (float(one), float(option.removeprefix("--lr=")), json.loads(content)) == (value, value, {"lr": value})


def test_variables_of_a_program_are_filled_and_checked() -> None:
    entrypoint = {"command": "python train.py ${args}"}

    def experiment(entrypoint: Any, **env: str) -> Experiment:
        resources = {"provider": "local", "gpus_per_instance": 1, "env": env}
        words: Any = {"entrypoint": entrypoint, "resources": resources}
        search = {"space": {"lr": rubberband.uniform(0, 1)}, "scheduler": {"type": "sha", "num_samples": 2, "max_t": 2}}
        return Experiment(
            name="x", search={**search, "metric": "loss", "mode": "min"}, constraints={"deadline": "1h"}, **words
        )

    env = {"SM_MODEL_DIR": "${checkpoint}", "SM_HPS": "${args_json}", "SM_HP_LR": "${lr}", "PLAIN": "text"}
    found = experiment(entrypoint, **env)
    assert found.to_words()["resources"]["env"] == env
    assert Experiment.kept(found.to_words()).resources.env == env, "a journal has it as it is written"
    command = ProgramCommand(words=words_of("train"))
    assert [command.filled(value, {"lr": 0.5}, PLACES) for value in env.values()] == [
        "/run/out", '{"lr": 0.5}', "0.5", "text"
    ]  # fmt: skip
    for value, line in {
        "${lrr}": r"resources\.env: A: \$\{lrr\} is no parameter, and no shell reads it; .*: did you mean 'lr'",
        "${args}": r"stands for several words; write \$\{args_json\}",
    }.items():
        with pytest.raises(InputError, match=line):
            experiment(entrypoint, A=value)
    with pytest.raises(
        InputError, match=r"resources\.env\.A: \$\{seed\} is for a program .* a trial in Python fills none"
    ):
        experiment("module:Trial", A="${seed}")
    with pytest.raises(InputError, match=r"resources\.env\.A: names another variable"):
        experiment("module:Trial", A="${HOME}")


def test_flags_are_among_all_parameters_and_may_be_conditional() -> None:
    command = ProgramCommand(words=words_of("train --b ${b} ${args}"), booleans="flag")
    assert command.line({"a": True, "b": False, "d": 1}, {}) == ["train", "--a", "--d=1"]
    assert command.line({"a": False, "b": True}, {}) == ["train", "--b", "--b"]
    assert command.line({"a": False}, {}) == ["train"]


def test_two_dollars_are_one() -> None:
    assert ProgramCommand(words=("echo", "$${x}", "${lr}")).line({"lr": 1}, {}) == ["echo", "${x}", "1"]


@given(st.lists(st.text(min_size=1).filter(lambda word: "$" not in word and "\0" not in word), min_size=1))
def test_a_list_is_taken_as_it_is(words: list[str]) -> None:
    assert ProgramCommand(words=(*words, "${args}")).line({}, {}) == words


@given(st.lists(st.from_regex(r"[\w ./=\"'-]+", fullmatch=True), min_size=1))
def test_a_text_is_split_as_a_shell_does(words: list[str]) -> None:
    assert words_of(shlex.join(words)) == (*words, "${args}")


@cases("text")
def test_a_word_of_a_shell_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no shell runs the command; write \\[bash, -c"):
        words_of(text)


def test_a_command_on_several_lines_is_one_command_or_refused() -> None:
    for end in ("\n", "\r\n"):
        text = f"python a.py \\{end}  --lr ${{lr}} \\{end}  --n 1{end}"
        assert words_of(text) == ("python", "a.py", "--lr", "${lr}", "--n", "1")
    assert words_of("bash -c 'a ${lr}\nb'") == ("bash", "-c", "a ${lr}\nb")
    with pytest.raises(InputError, match=r"several lines.*end each line of one command with a .*, or write .bash, -c"):
        words_of("pip install x\npython train.py ${args}")


def test_a_variable_before_the_program_is_refused() -> None:
    with pytest.raises(InputError, match=r"'PYTHONPATH=.' sets a variable.*resources.env, or env PYTHONPATH=. before"):
        words_of("PYTHONPATH=. python train.py ${args}")


def test_a_text_of_a_shell_gets_no_parameters_at_its_end() -> None:
    words = words_of(["bash", "-c", "python train.py"])
    assert words == ("bash", "-c", "python train.py")
    assert unused(words, ["lr"]) == ["lr"]
    assert unused(["bash", "-c", "python train.py", "train", "${args}"], ["lr"]) == ["lr"]
    assert unused(["bash", "-c", 'python train.py "$@"', "train", "${args}"], ["lr"]) == []
    with pytest.raises(InputError, match=r"takes the first word after its text as .0.*write a word between"):
        check_names(["bash", "-c", 'python train.py "$@"', "${args}"], ["lr"])


@cases("text", "value", "is_kept")
def test_a_value_that_a_shell_would_change_is_seen(text: str, value: str, is_kept: bool) -> None:
    assert survives_shell(text, "name", value) == is_kept


@cases("command", "launcher")
def test_a_launcher_is_found_wherever_it_is_started(command: str, launcher: str | None) -> None:
    assert launcher_of(shlex.split(command)) == launcher


@pytest.mark.parametrize("text", ["bash -c 'cd $HOME; train ${lr} > log'", "a --p=x;y ${lr}", "a '1 < 2' $${x}"])
def test_a_quoted_word_of_a_shell_is_taken(text: str) -> None:
    assert words_of(text) == tuple(shlex.split(text))


def test_a_place_that_nothing_fills_is_refused() -> None:
    with pytest.raises(InputError, match=r"\$\{bath\} is no parameter; did you mean 'batch'"):
        check_names(["--batch=${bath/workers}"], ["batch"])
    with pytest.raises(InputError, match=r"\$\{lrr\} is no parameter; did you mean 'lr'"):
        check_names(words_of("train ${lrr}"), ["lr"])
    with pytest.raises(InputError, match="the parameter gpus has the name of"):
        check_names(words_of("train"), ["gpus"])
    assert unused(words_of("train ${lr}"), ["lr", "depth"]) == ["depth"]


@cases("line", "metrics")
def test_a_line_has_its_metrics(line: str, metrics: dict[str, float]) -> None:
    assert json.dumps(metrics_in(line)) == json.dumps({name: float(value) for name, value in metrics.items()})


@cases("line", "found")
def test_a_line_shows_a_metric_without_its_number(line: str, found: list[str | bool]) -> None:
    assert list(unread(line, "loss")) == found
    text = re.compile(r"loss\S* ?(?P<loss>\S+)")
    assert unread("the loss is: nan, loss null", "loss", text) == ("", False)
    assert unread("loss: 1,234", "loss", text) == ("1,234", True)


def test_a_line_with_two_values_of_a_metric_is_ambiguous() -> None:
    assert ambiguous("train loss=1 test loss=2 acc=3", "loss") == ["1", "2"]
    assert not ambiguous("train loss=1 test loss=2 acc=3", "acc")
    assert not ambiguous("loss=1 loss=1", "loss")


@cases("before", "line", "is_another")
def test_a_line_of_another_kind_differs_by_more_than_changing_words(before: str, line: str, is_another: bool) -> None:
    assert is_another_kind(line, before, "loss") is is_another


def test_a_pattern_names_the_metrics() -> None:
    pattern = re.compile(r"validation (?P<loss>\S+) after")
    assert metrics_in("validation 0.5 after 3", pattern) == {"loss": 0.5}
    assert metrics_in("validation none after 3", pattern) == {}
    found = metrics_in("validation 0.5 after grad_norm=nan acc=3", pattern)
    assert math.isnan(found.pop("grad_norm"))
    assert found == {"loss": 0.5}
    for text in ("0.5,", "50%", "1/2.", "tensor(0.5, device='cuda:0')", "np.float64(0.5)"):
        assert metrics_in(f"validation {text} after 3", pattern)["loss"] in (0.5, 50.0)


@given(st.dictionaries(st.from_regex(r"[a-z_]\w{0,9}", fullmatch=True), st.floats(-1e300, 1e300)))
def test_printed_metrics_are_read_as_they_were(metrics: dict[str, float]) -> None:
    assert metrics_in(" ".join(f"{name}={value}" for name, value in metrics.items())) == metrics
    assert metrics_in(json.dumps(metrics)) == metrics
    assert metrics_in(f"epoch 3: {metrics}") == metrics


WRITTEN = (
    ("{!r}", float),
    ("np.float64({!r})", float),
    ("tensor({:.4f})", lambda value: round(value, 4)),
    ("tensor({:.4f}, device='cuda:0', grad_fn=<NllLossBackward0>)", lambda value: round(value, 4)),
    ("{:.3e}", lambda value: float(f"{value:.3e}")),
    ("{:+.6g}%", lambda value: float(f"{value:.6g}")),
    ("{:10.4f} ", lambda value: round(value, 4)),
)


@given(
    st.floats(-1e6, 1e6),
    st.sampled_from(WRITTEN),
    st.sampled_from(["loss={}", "loss: {},", "| loss {} |", "'loss': {}"]),
)
def test_a_number_is_read_as_libraries_print_it(
    value: float, written: tuple[str, Callable[[float], float]], line: str
) -> None:
    text, read = written
    assert metrics_in(line.format(text.format(value)))["loss"] == pytest.approx(read(value), rel=1e-12)


WORDS = {
    "name": "x",
    "search": {
        "space": {"lr": rubberband.uniform(0, 1)},
        "scheduler": {"type": "sha", "num_samples": 2, "max_t": 2, "grace_period": 1, "reduction_factor": 2},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "10m"},
    "profile": {"seconds_per_iteration": {1: 1}},
    "resources": {"provider": "local", "max_instances": 1},
}


@cases("entrypoint", "refusal")
def test_a_program_that_cannot_be_meant_is_refused(entrypoint: dict[str, object], refusal: str) -> None:
    with pytest.raises(InputError, match=refusal):
        Experiment(**WORDS, entrypoint=entrypoint)


def test_a_flag_needs_its_option() -> None:
    space = {"amp": {"type": "choice", "values": [True, False]}}
    words = {**WORDS, "search": {**WORDS["search"], "space": space}}
    entrypoint = {"command": "train ${amp}", "booleans": {"style": "flag"}}
    with pytest.raises(InputError, match=r"\$\{amp\} has none before it; write --amp \$\{amp\}"):
        Experiment(**words, entrypoint=entrypoint)
    Experiment(**words, entrypoint={**entrypoint, "command": "train --amp=${amp}"})


def test_a_value_that_a_shell_would_change_is_refused() -> None:
    space = {
        "how": {"type": "choice", "values": [1, {"name": "x", "space": {"tag": {"type": "choice", "values": ["a b"]}}}]}
    }
    words = {**WORDS, "search": {**WORDS["search"], "space": space}}
    with pytest.raises(
        InputError, match=r"a shell would not read the value 'a b' of .{tag}.*give it as a word after the"
    ):
        Experiment(**words, entrypoint={"command": ["bash", "-c", "train ${how} ${tag}"]})
    Experiment(**words, entrypoint={"command": ["bash", "-c", 'train "$1"', "train", "${tag}"]})


def test_a_program_is_a_value_in_python() -> None:
    program = rubberband.command("bash -c 'echo loss=${lr}'", metrics="stdout")
    written = {"command": "bash -c 'echo loss=${lr}'", "metrics": "stdout"}
    assert Experiment(**WORDS, entrypoint=program).entrypoint == Experiment(**WORDS, entrypoint=written).entrypoint
    assert str(program) == "bash -c 'echo loss=${lr}'"
    words = {"command": ["bash", "-c", 'train "$@"', "train"], "resume": "--init_from=resume", "rank": False}
    given = rubberband.command(words["command"], resume=["--init_from=resume"], rank=False)
    assert Experiment(**WORDS, entrypoint=words).entrypoint.to_plain() == given.to_plain()
    assert name_of_trial(rubberband.command("python src/train.py")) == "train"
    assert name_of_trial(rubberband.command("my_tool --fast")) == "my-tool"
    with pytest.raises(InputError, match="metrics"):
        rubberband.command("train", metrics="nowhere")
