"""A program as a trial: its command line, what it is given, and where its metrics are."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

from rubberband.errors import InputError
from rubberband.units import counted, nearest, shown

Booleans = Literal["true/false", "True/False", "1/0", "flag"]
"""Words for true and false, or an option that is there or not."""
Launch = Literal["worker", "machine"]
"""Whether a gang starts the program once for each worker, or once for each machine (for torchrun and the like)."""

PLACES = {
    "args": "all parameters, as --name=value",
    "args_no_hyphens": "all parameters, as name=value",
    "args_json": "all parameters, as one word of JSON",
    "checkpoint": "the folder of the trial's checkpoint",
    "last_checkpoint": "the folder in it with the highest number, such as checkpoint-500",
    "iterations": "the iterations that are done",
    "max_t": "the iterations of a trial that trains to the end",
    "seed": "the trial's seed",
    "gpus": "the GPUs of the gang on this machine",
    "workers": "the GPUs of the gang on all machines",
    "machines": "the machines of the gang",
    "machine_rank": "the number of this machine in the gang",
    "master_addr": "the address of the gang's first machine",
    "master_port": "its free port",
}
"""Name in `${…}` -> meaning. A parameter may not have such a name."""

CHECKPOINT_PLACE = "${checkpoint}"
PER_WORKER = "/workers"
"""End of a name in `${…}`: the parameter, or the number, is divided by the workers of the gang."""
_PLACE = re.compile(r"\$\$|\$\{([^}]*)\}")
_ARGS = "${args}"
_HYPHENS = {_ARGS: "--", "${args_no_hyphens}": ""}
"""Word that stands for several -> what each begins with."""
_LONE = re.compile(r"([\w.+~-]+=)?\$\{[^}]*\}")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_PLAIN = re.compile(r"""[^\s'"\\]+""")
"""Words that are split from a text as they are."""
_OF_A_SHELL = re.compile(
    r"(\|\|?|&&?|#|\S*;|\d*>\S*|\d*>&\d|<\S*|&>\S*|~.*|`.*|\S*`\S*|\$[A-Za-z_].*|\S*(?<!\$)\$[A-Za-z_(]\S*)$", re.DOTALL
)
"""Words with a meaning for a shell. One with a space was quoted, as the text after `bash -c` is."""
TRL_TASKS = ("sft", "dpo", "grpo", "kto", "reward", "rloo")
LAUNCHED_MODULES = {
    **{f"trl {task}": f"trl.scripts.{task}" for task in TRL_TASKS},
    "axolotl train": "axolotl.cli.train",
    "llamafactory-cli train": "llamafactory.launcher",
    "lmf train": "llamafactory.launcher",
}
"""Launcher with a training of its own -> the module that it starts on each worker.

Source: trl 1.16 trl/cli/accelerate_launcher.py, axolotl 0.19 axolotl/cli/utils/train.py, llamafactory 0.9.5
launcher.py.
"""
_LAUNCHERS = ("torchrun", "accelerate launch", "deepspeed", "mpirun", "mpiexec", "horovodrun", *LAUNCHED_MODULES)
_LAUNCHING_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_BEFORE_A_PROGRAM = re.compile(
    r"env|nohup|time|nice|timeout|stdbuf|exec|numactl|taskset|uv|poetry|pipenv|pdm|hatch|conda|mamba|micromamba|"
    r"apptainer|singularity|python[0-9.]*|\w+=.*",
    re.DOTALL,
)
"""First words after which another program may be named."""
_SHELLS = ("bash", "sh", "zsh", "dash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Place of a program's metrics."""

    source: Literal["report", "stdout"] = "report"
    """`report`: it calls rubberband.report; `stdout`: lines such as `loss=0.12` or `{"loss": 0.12}`."""
    file: str | None = None
    """A file below `${checkpoint}/` to which it adds such lines; None: its output."""
    pattern: str | None = None
    """A regular expression with a named group for each metric; None: `name=number` and JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCommand:
    """The program of a trial."""

    words: tuple[str, ...]
    """Its command line, with `${…}` in words."""
    metrics: Metrics = Metrics()
    launch: Launch = "worker"
    booleans: str = "true/false"
    """How true and false are written, as in `Booleans`."""
    resume: tuple[str, ...] = ()
    """Words behind them where the program is started from a checkpoint."""
    rank: bool = True
    """Whether one worker has torchrun's variables too."""
    name: str = ""
    """Its name in errors; empty: its command line."""

    def __str__(self) -> str:
        if self.name:
            return self.name
        text = line_of(self.words)
        return text if len(text) <= 60 else f"{text[:57]}..."

    def line(self, values: Mapping[str, Any], places: Mapping[str, str], *, resumes: bool = False) -> list[str]:
        """Return the words to start, with the configuration's `values` and the `places` of one start.

        `resumes`: whether it is a start from a checkpoint.

        A word that is only a parameter that this configuration lacks, as a conditional one may be, is left out with the
        option before it; so is `--name=${name}`. Raises InputError for such a parameter within another word.
        """
        argv, words = list[str](), (*self.words, *(self.resume if resumes else ()))
        for before, word in zip(("", *words), words, strict=False):
            switch = switch_of(before, word) if self.booleans == "flag" else None
            if word in _HYPHENS:
                for name, value in values.items():
                    argv += self._option(f"{_HYPHENS[word]}{name}", value)
            elif switch is not None and isinstance(values.get(switch[1]), bool):
                argv = argv[:-1] if switch[0] == before else argv
                argv += self._option(switch[0], values[switch[1]])
            elif self._lacks(word, values, places) is None:
                argv.append(self.filled(word, values, places))
            elif (lone := _LONE.fullmatch(word)) is None:
                raise InputError(
                    f"entrypoint.command: this configuration lacks a parameter of {shown(word)}; write it as a word "
                    "of its own, such as --name=${name}, or write ${args}"
                )
            elif lone[1] is None and _OPTION.fullmatch(before):
                argv.pop()
        return argv

    def filled(self, word: str, values: Mapping[str, Any], places: Mapping[str, str]) -> str:
        """Return one word, or the value of a variable, with what `${…}` stands for.

        Raises InputError for a parameter that this configuration lacks.
        """
        if (lacking := self._lacks(word, values, places)) is not None:
            raise InputError(f"{shown(word)}: this configuration lacks the parameter {lacking}")
        texts = {name: text_of(value, self.booleans) for name, value in values.items()}
        texts |= {"args_json": json.dumps(dict(values)), **places}
        texts |= {name: _part(name, texts) for name in _PLACE.findall(word) if name.endswith(PER_WORKER)}
        return _PLACE.sub(lambda match: "$" if match[1] is None else texts[match[1]], word)

    @staticmethod
    def _lacks(word: str, values: Mapping[str, Any], places: Mapping[str, str]) -> str | None:
        known = {"args_json", *values, *places}
        return next((name for name in named(word) if name not in known), None)

    def _option(self, option: str, value: Any) -> list[str]:
        if self.booleans == "flag" and isinstance(value, bool) and option.startswith("-"):
            return [option] if value else []
        return [f"{option}={text_of(value, self.booleans)}"]


def text_of(value: Any, booleans: str = "true/false") -> str:
    """Return a parameter's value as programs read it: booleans as `Booleans` says, null, JSON for lists, texts.

    With `True/False` null and lists are Python's too, as a sweep of W&B writes them.
    """
    if booleans == "True/False":
        return str(value)
    if isinstance(value, bool) and booleans != "flag":
        return booleans.split("/")[not value]
    return value if isinstance(value, str) else json.dumps(value)


def switch_of(before: str, word: str) -> tuple[str, str] | None:
    """Return the option and the parameter of `--name ${name}` or `--name=${name}`; None for other words."""
    if (lone := _LONE.fullmatch(word)) is None:
        return None
    option, name = before if lone[1] is None else lone[1][:-1], next(named(word), None)
    return (option, name) if name is not None and _OPTION.fullmatch(option) else None


def words_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command; a text is split as a shell does, and never given to one. Raises InputError."""
    words = split(command)
    if not words or not words[0]:
        raise InputError("names no program; write one, such as python train.py ${args}")
    if words[0].startswith("CUDA_VISIBLE_DEVICES="):
        raise InputError(f"{shown(words[0])} is set by rubberband itself, for each trial; leave it out")
    if re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        raise InputError(
            f"{shown(words[0])} sets a variable, which is for a shell, and no shell runs the command; write it in "
            f"resources.env, or env {words[0]} before the program"
        )
    return words if any("$" in word for word in words) or shell_text(words) is not None else (*words, _ARGS)


def split(command: str | Sequence[str]) -> tuple[str, ...]:
    """Return words as they are, or those of a text, as a shell splits it. Raises InputError for what a shell runs."""
    if not isinstance(command, str):
        return tuple(command)
    text = re.sub(r"\\\r?\n", "", command).strip()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(f"{shown(text)} cannot be split into words ({error}); close the quotes") from None
    for word in words:
        if _OF_A_SHELL.match(word):
            raise InputError(
                f"{shown(word)} is for a shell, and no shell runs the command; write [bash, -c, {shown(text)}]"
            )
    on_a_line = shlex.shlex(text, posix=True)
    on_a_line.commenters, on_a_line.whitespace, on_a_line.whitespace_split = "", " \t\r", True
    if tuple(on_a_line) != words:
        raise InputError(
            "it has several lines, which a shell would run one after the other, and no shell runs the command; end "
            "each line of one command with a \\, or write [bash, -c, …]"
        )
    return words


def line_of(words: Sequence[str]) -> str:
    """Return the words as one line, which `words_of` splits again."""
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def entrypoint_text(words: Any) -> str | None:
    """Return an entry point, as an experiment's JSON has it, in one text; None if there is none."""
    if isinstance(words, Mapping):
        command = words.get("command", "")
        return command if isinstance(command, str) else line_of(command)
    return None if words is None else str(words)


def check_names(words: Sequence[str], parameters: Collection[str]) -> None:
    """Raise InputError for a `${…}` that nothing fills, or a parameter that has the name of a place."""
    for name in parameters:
        if name in PLACES:
            raise InputError(f"the parameter {name} has the name of ${{{name}}} ({PLACES[name]}); rename it")
    for word in words:
        for name in named(word):
            if f"${{{name}}}" in _HYPHENS and word not in _HYPHENS:
                raise InputError(
                    f"{shown(word)} has more than ${{{name}}}, which stands for several words; give it one of its own"
                )
            if name not in parameters and name not in PLACES:
                raise InputError(f"${{{name}}} is no parameter; {nearest(name, [*sorted(parameters), *PLACES])}")
    text = shell_text(words)
    if text is not None and any(before == text and word in _HYPHENS for before, word in pairwise(words)):
        raise InputError(
            "a shell takes the first word after its text as $0, and so the first parameter of ${args} is lost; write a "
            'word between them, as in [bash, -c, \'python train.py "$@"\', train, "${args}"]'
        )


def check_variables(variables: Mapping[str, str], parameters: Collection[str]) -> None:
    """Raise InputError for a `${…}` in the value of a variable that no start of a program fills."""
    for name, value in variables.items():
        for place in named(value):
            if f"${{{place}}}" in _HYPHENS:
                raise InputError(
                    f"{name}: ${{{place}}} stands for several words; write ${{args_json}} for all parameters"
                )
            if place not in parameters and place not in PLACES:
                raise InputError(
                    f"{name}: ${{{place}}} is no parameter, and no shell reads it; list a secret in secrets, or "
                    f"correct it: {nearest(place, [*sorted(parameters), *PLACES])}"
                )


def _part(name: str, texts: Mapping[str, str]) -> str:
    """Return what `${name}`, which ends with PER_WORKER, stands for: a whole number. Raises InputError."""
    divided, workers = name.removesuffix(PER_WORKER), int(texts["workers"])
    text = texts.get(divided, divided)
    whole = int(text) if text.isdecimal() else 0
    if not whole or whole % workers:
        raise InputError(
            f"${{{name}}}: {whole or shown(text)} cannot be divided equally among {counted(workers, 'worker')}, which "
            f"a trial may get; give a multiple of {workers}, or leave such gangs out with resources.gpus_per_trial"
        )
    return str(whole // workers)


def named(word: str) -> Iterator[str]:
    """Iterate over the names in the `${…}` of a word."""
    for match in _PLACE.finditer(word):
        if match[1] is not None:
            name = match[1].removesuffix(PER_WORKER)
            if name == match[1] or not name.isdecimal():
                yield name


def unused(words: Sequence[str], parameters: Collection[str]) -> list[str]:
    """Return the parameters that the command never names: they change nothing, unless it reads RUBBERBAND_CONFIG."""
    text = shell_text(words)
    used = {name for word in words for name in named(word)}
    if used & {"args", "args_no_hyphens"} and (text is None or re.search(r"\$\{?[@*1-9]", text)):
        return []
    if "args_json" in used:
        return []
    return [name for name in parameters if name not in used]


def shell_text(words: Sequence[str]) -> str | None:
    """Return the text that a shell runs, as after `bash -c`; None: the command has none."""
    index = next((index for index, word in enumerate(words) if _base(word) in _SHELLS), len(words))
    for option, text in pairwise(words[index + 1 :]):
        if re.fullmatch("-[A-Za-z]*c", option):
            return text
        if option[:1] not in ("-", "+") and option != "pipefail":
            return None
    return None


def survives_shell(text: str, name: str, value: str) -> bool:
    """Whether a shell that runs the text reads the parameter's value as it is, without splitting or expanding it."""

    def filled(value: str) -> list[str]:
        return _words_of_shell(_PLACE.sub(lambda match: value if match[1] == name else "_", text))

    def is_kept(value: str) -> bool:
        return [word.replace("x0x", value) for word in filled("x0x")] == filled(value)

    if any(sign in value for sign in "$`\\"):
        return False
    with suppress(ValueError):
        is_plain = re.search(r"[*?~\[{#]", value) is None
        return is_kept(value) and (is_plain or is_kept("x x"))
    return False


def launcher_of(words: Sequence[str]) -> str | None:
    """Return the launcher that the command starts, which starts workers itself; None: it starts none.

    It may come after `env`, `uv run` and the like, and in the text after `bash -c`.
    """
    text = shell_text(words)
    if text is not None:
        return next(filter(None, map(launcher_of, _commands_in(text))), None)
    is_behind, before = False, ""
    for word, after in pairwise((*words, "")):
        name = _LAUNCHING_MODULES.get(word) if before == "-m" else f"{_base(word)} {_base(after)}"
        for launcher in _LAUNCHERS:
            if f"{name} ".startswith(f"{launcher} "):
                return launcher
        is_behind = is_behind or _BEFORE_A_PROGRAM.fullmatch(_base(word)) is not None
        if not is_behind or before == "-m" or word.endswith((".py", ".sh")):
            return None
        before = word
    return None


def script_of(words: Sequence[str]) -> str | None:
    """Return the first Python script that the command names, also in the text after `bash -c`; None: it names none."""
    return next((part for word in words for part in re.split(r"[\s;&|()'\"]+", word) if part.endswith(".py")), None)


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _words_of_shell(text: str) -> list[str]:
    """Return the words of a shell's text, and what is between its commands. Raises ValueError for an open quote."""
    lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def _commands_in(text: str) -> Iterator[list[str]]:
    """Iterate over the commands of a shell's text, each as words; none where it cannot be split."""
    with suppress(ValueError):
        for is_between, group in groupby(_words_of_shell(text), key=lambda word: set(word) <= set(";&|()")):
            if not is_between:
                yield list(group)
