"""Finds a program's options for `rubberband init`: its parser is asked."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import yaml

from rubberband.errors import InputError
from rubberband.running.first_file import NO_FOLDER, yaml_key
from rubberband.running.programs.parsers import Parser, ProgramOption, parser_of
from rubberband.running.programs.roles import EPOCHS, OUTPUT, RESUME, SEED, is_fixed, is_logs, output_of, role_of
from rubberband.running.programs.source import calls_report, saved_file, search_in, sources_of, trial_in
from rubberband.running.programs.starters import (
    PLACEMENT,
    example_of,
    inside_shell,
    interpreter_of,
    of_accelerate,
    on_one,
    without_launcher,
)
from rubberband.running.programs.unparsed import options_in
from rubberband.running.ranges import REQUIRED, domain_of, middle_of
from rubberband.running.trial_source import parameters_in
from rubberband.values.command import PLACES, launcher_of, line_of, named, words_of

MOST_PARAMETERS = 6
"""Parameters that are searched; the file has the others in comments."""
_MOST_OTHERS = 12
_OF_TRAINER = {
    "do_train": ((), "do_train"),
    "do_eval": ((), "do_eval"),
    "eval_strategy": (("epoch",), "eval_dataset"),
    "evaluation_strategy": (("epoch",), "eval_dataset"),
    "logging_strategy": (("epoch",), ""),
    "save_strategy": (("epoch",), ""),
    "trainer.num_sanity_val_steps": (("0",), ""),
}
"""Option of the Trainer of transformers or of LightningCLI -> its value, for an iteration that is an epoch, and the
word of a source that uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFindings:
    """Findings about a program."""

    words: tuple[str, ...]
    """Its command line, with `${…}` for parameters and places."""
    start: tuple[str, ...]
    """The words of a look: the user's own, and what the program needs, with `${checkpoint}` alone."""
    space: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Parameter -> its domain as the file writes it, and a comment."""
    others: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Parameters that are not searched, which the file has in comments."""
    booleans: str = ""
    """How true and false are written; empty: no parameter is one."""
    epochs: int | None = None
    """Its default number of epochs, if `${max_t}` stands for it."""
    resume: tuple[str, ...] = ()
    """The words that load its checkpoint."""
    launch: str = ""
    """`machine` for a launcher that is kept."""
    reports: bool = False
    """Whether it calls rubberband.report."""
    remarks: tuple[str, ...] = ()


def is_program(text: str) -> bool:
    """Whether the text is a script or a command line, and no `module:attribute` or file of an experiment."""
    return " " in text.strip() or text.endswith((".py", ".sh", ".ipynb"))


def program_of(text: str, folder: Path, *, is_chosen: bool = False) -> ProgramFindings:
    """Look at a script or a command line that is run in `folder`; `is_chosen`: its parameters are known otherwise.

    Raises InputError for one that cannot be run as it is, that is a search itself, or whose parameters are not known.
    """
    if text.endswith(".ipynb"):
        script = f"{Path(text).stem}.py"
        raise InputError(
            f"{text} is a notebook, which no command runs; make it a program, whose parameters are options: "
            f"jupyter nbconvert --to script {text}, then rubberband init {script}"
        )
    words, remarks, kept = [word for word in words_of(text) if word != "${args}"], list[str](), list[str]()
    if words[0].endswith((".py", ".sh")) and (len(words) == 1 or not os.access(words[0], os.X_OK)):
        words = [interpreter_of(words[0]), *words]
    if (launcher := launcher_of(words)) is not None:
        if launcher == "accelerate launch":
            kept = of_accelerate(words)
        words = without_launcher(words)
        remarks.append(
            f"{launcher} is started once for each machine, as {kept[0]} changes how the program trains"
            if kept
            else f"{launcher} is not needed: each worker starts the command once, with torchrun's variables"
        )
    if words[0] == "make":
        printed = text.replace(" ", " -n ", 1)
        raise InputError(f"{text} runs a command of a Makefile; give that command, which {printed} prints")
    if shutil.which(words[0]) is None and not Path(folder, words[0]).is_file():
        raise InputError(f"{words[0]} is not here; install it, or give its path")
    for file in (word.partition("=")[2] if word.startswith("-") else word for word in words):
        if file.endswith((".py", ".sh")) and not (folder / file).is_file():
            raise InputError(f"there is no {file} in {folder}; give its path from there")
    sources = sources_of(words, folder)
    if " " not in text.strip() and sources and (trial := trial_in(sources[0])) is not None:
        raise InputError(f"{text} defines {trial}, a trial in Python: rubberband init {Path(text).stem}:{trial}")
    if not is_chosen:
        _refuse_search(words, sources)
    found = _Command(words, _parser(words, folder, sources, is_chosen=is_chosen), sources)
    found.fill()
    if not found.space and not is_chosen and not found.reads_configuration:
        raise InputError(
            f"{line_of(words)} has no parameter left that a search changes; give its parser one, such as --lr, or "
            f"name an option that it has: rubberband init {example_of(words, '--NAME ${lr}')}"
        )
    launcher_words = ["accelerate", "launch", *kept, *PLACEMENT] if kept else []
    return ProgramFindings(
        words=_launched(found.words(), launcher_words),
        start=_launched(found.start(), on_one(launcher_words)),
        launch="machine" if kept else "",
        space=found.space,
        others=found.others,
        booleans=found.booleans,
        epochs=found.epochs,
        resume=found.resume,
        reports=calls_report(sources),
        remarks=(*remarks, *found.remarks),
    )


def _launched(words: Sequence[str], launcher: Sequence[str]) -> tuple[str, ...]:
    """Return words with a launcher in the place of the interpreter; none: as they are."""
    if not launcher:
        return tuple(words)
    at = next(at for at, word in enumerate(words) if word.endswith(".py") or word == "-m")
    return (*words[: at - 1], *launcher, *words[at:])


def _refuse_search(words: Sequence[str], sources: Sequence[str]) -> None:
    """Raise InputError for a program that is a search itself."""
    if (search := search_in(sources)) is not None:
        name, page, objective = search
        script = next((word for word in words if word.endswith(".py")), line_of(words))
        moved = f"rubberband init {script}:{objective}, or " if objective else ""
        raise InputError(
            f"{script} is a search itself ({name}), which RubberBand replaces; move it: {moved}docs/{page}.md"
        )


def _parser(words: Sequence[str], folder: Path, sources: Sequence[str], *, is_chosen: bool) -> Parser:
    """Return the options of a program by its parser, or by its source. Raises InputError if they are not known."""
    inner = inside_shell(words, folder)
    if inner is not None:
        sources = sources_of(inner, folder)
    parser = parser_of([word for word in inner or words if "$" not in word], folder, sources)
    if inner is not None:
        more, begin = tuple(inner[parser.begin :]), next(at for at, word in enumerate(words) if word.endswith(".sh"))
        filled = tuple(_with_default(option, more) for option in parser.options)
        parser = replace(parser, begin=begin + 1, given=more, options=filled)
    is_named = any(name not in PLACES for word in words for name in named(word))
    if parser.options or is_named or is_chosen or any("RUBBERBAND_CONFIG" in text for text in sources):
        return parser
    if not parser.was_asked and (options := options_in(words, folder, sources)):
        return Parser(options=tuple(options), begin=parser.begin)
    line = line_of(words)
    if parser.was_asked:
        fault = parser.fault or "its parser has no options"
        raise InputError(
            f"{line}: {fault}; mend this, or name its parameters: rubberband init {example_of(words, '--lr ${lr}')}"
        )
    if any("sys.argv" in text for text in sources):
        raise InputError(
            f"{line} reads sys.argv, and its arguments have no names that are known; name them in their places: "
            f"rubberband init {example_of(words, '${lr}', '${batch_size}')}"
        )
    raise InputError(
        f"no parameter was found in {line}: {parser.fault}, and it reads neither sys.argv nor os.environ as numbers; "
        "let it take its parameters by argparse, or name those that it reads otherwise: rubberband init "
        f"{example_of(words, '--lr ${lr}')}"
    )


def _given(option: ProgramOption, words: Sequence[str]) -> str | None:
    """Return the value that the words give an option; None where they do not have it."""
    for word, after in pairwise((*words, "")):
        flag, is_one_word, value = word.partition("=")
        if flag in option.flags:
            return value if is_one_word else after
    return None


def _with_default(option: ProgramOption, words: Sequence[str]) -> ProgramOption:
    """Return an option with what a shell script gives it, which words behind that replace."""
    given = _given(option, words)
    if given is None:
        return option
    with suppress(ValueError):
        option = replace(option, default=(int if option.type == "int" else float)(given))
    return replace(option, required=False)


def booleans_of(words: Sequence[str], folder: Path) -> Mapping[str, tuple[str, ...]]:
    """Return flag -> the words for true and false that its type distinguishes, for a command line that has such words.

    Only for options with a type, of a parser that can be read.
    """
    parser = parser_of(words, folder, sources_of(words, folder))
    return {flag: each.booleans for each in parser.options for flag in each.flags if each.booleans is not None}


class _Command:
    """A command that is filled with a program's options."""

    def __init__(self, given: Sequence[str], parser: Parser, sources: Sequence[str]) -> None:
        self.given, self.parser, self.sources = list(given), parser, sources
        self.space = dict[str, tuple[str, str]]()
        self.others = dict[str, tuple[str, str]]()
        self.booleans = ""
        self.epochs: int | None = None
        self.resume: tuple[str, ...] = ()
        self._loads = ""
        """The option that loads a checkpoint."""
        self.remarks = list[str]()
        self._added = list[tuple[int, int, list[str], list[str]]]()
        """Place among the positional arguments, level of subcommands, and words of the command and of a look."""
        self._order = [option.name for option in parser.options if not option.flags]
        self._flags = {word.partition("=")[0] for word in given if word.startswith("-") or "=" in word}

    @property
    def reads_configuration(self) -> bool:
        """Whether the program reads its parameters from RUBBERBAND_CONFIG."""
        return any("RUBBERBAND_CONFIG" in text for text in self.sources)

    def words(self) -> tuple[str, ...]:
        """Return the words of the command."""
        words = self._with(is_look=False)
        return words if any("$" in word for word in words) else (*words, "${args}")

    def start(self) -> tuple[str, ...]:
        """Return the words of a look, which have `${checkpoint}` alone."""
        middle = {name: str(middle_of(yaml.safe_load(domain))) for name, (domain, _) in self.space.items()}
        return tuple(
            re.sub(r"\$\{([^}]*)\}", lambda match: middle.get(match[1], match[0]), word)
            for word in self._with(is_look=True)
        )

    def _with(self, *, is_look: bool) -> tuple[str, ...]:
        """Return the given words with those that were added, before the subcommand of the next level."""
        words, last = list(self.given), len(self.parser.commands)
        added = sorted(self._added, key=lambda each: each[0])  # options, and then arguments in their order
        for level in range(last, -1, -1):
            at = words.index(self.parser.commands[level], self.parser.begin) if level < last else len(words)
            words[at:at] = [word for _, at, *both in added if min(at, last) == level for word in both[is_look]]
        variables = [word for _, at, *both in added if at < 0 for word in both[is_look]]
        return tuple(["env", *variables, *words[words[0] == "env" :]] if variables else words)

    def _add(self, option: ProgramOption, value: str | None, *, look: str | None = None) -> None:
        """Write an option with a value, in a look with another one; None: not at all."""
        written, looked = (option.words(text) if text is not None else [] for text in (value, look))
        place = -1 if option.flags else self._order.index(option.name)
        self._added.append((place, option.level, written, looked))

    def fill(self) -> None:
        """Give each option its place, or make it a parameter. Raises InputError for one that is required."""
        self.given += [word for word in self.parser.commands if word not in self.given]
        tunable, missing = list[ProgramOption](), list[ProgramOption]()
        is_trainer = any(option.is_of_trainer for option in self.parser.options)
        for option in map(self._with_booleans, self._open()):
            role = role_of(option.name, option.kind, option.default, option.help) if option.takes_one else None
            if option.name in _OF_TRAINER and (is_trainer or option.name.startswith("trainer.")):
                values, mark = _OF_TRAINER[option.name]
                words = [option.flag, *values] if any(mark in text for text in self.sources) else []
                self._added.append((-1, option.level, words, words))
            elif role == RESUME:
                if not self._loads:
                    self._loads, self.resume = option.flag, self._resume(option)
            elif role is not None and (option.flags or option.required):
                self._place(option, role)
            elif option.is_tunable and not (option.required and option.default is None and option.known is None):
                tunable.append(option)
            elif option.required and option.default is not None and not option.flags:
                self._add(option, str(option.default), look=str(option.default))
            elif option.required:
                missing.append(option)
            elif (remark := _left_out(option)) is not None:
                self.remarks.append(remark)
        if missing:
            first, needed = missing[0], " and ".join(option.flag or option.name for option in missing)
            example = first.words(str((first.choices or ["…"])[0]))
            raise InputError(
                f"{line_of(self.given)} needs {needed}; give what it needs: "
                f"rubberband init {shlex.quote(line_of([*self.given, *example]))}"
            )
        self._logs()
        self._parameters(tunable)
        if self.reads_configuration and not self.space:
            names = {name: default for text in self.sources for name, default in parameters_in(ast.parse(text))}
            self.space = {name: domain_of(name, default) for name, default in sorted(names.items())}
        self._say_checkpoints(is_trainer=is_trainer)

    def _say_checkpoints(self, *, is_trainer: bool) -> None:
        """Remark on a checkpoint that the program does not load, or has no folder for."""
        has_folder = any(OUTPUT in word for word in self.words())
        if not has_folder:
            self.resume = ()
        elif self._loads and not self.resume and not is_trainer:
            self.remarks.append(
                f"{self._loads} loads a checkpoint, and which file the program saves is not known: write resume: "
                f"{self._loads} {OUTPUT}/FILE below the command, unless it loads that by itself"
            )
        if self.parser.options and not has_folder:
            self.remarks.append(NO_FOLDER)

    def _open(self) -> list[ProgramOption]:
        """Return the options that the words do not have; a folder among these becomes the trial's own."""
        positional, found = self._positionals(), list[ProgramOption]()
        for option in self.parser.options:
            if option.flags and self._flags & set(option.flags):
                role = role_of(option.name, option.kind, option.default, option.help)
                if role == OUTPUT:
                    self._own_folder(option)
                elif role == EPOCHS and (epochs := _given(option, self.given) or "").isdecimal():
                    self.epochs = int(epochs)
            elif option.flags:
                found.append(option)
            elif positional:
                positional -= 1
            else:
                found.append(option)
        return found

    def _with_booleans(self, option: ProgramOption) -> ProgramOption:
        """Return an option whose text the program compares with true or false, with these words."""
        is_text = option.kind == "value" and option.type in (None, "str") and not option.choices and not option.booleans
        if not is_text or str(option.default).lower() not in ("true", "false"):
            return option
        equal = re.compile(
            rf"\b{re.escape(option.name)}\b[\w.'\"\]()]*\s*(==|!=|in)\s*[\[(]?\s*['\"](true|false)\b", re.IGNORECASE
        )
        said = next((match[2] for text in self.sources if (match := equal.search(text))), None)
        if said is None:
            return option
        words = "True/False" if said[0].isupper() else "true/false"
        return replace(option, booleans=(words,), default=str(option.default).lower() == "true")

    def _positionals(self) -> int:
        """Return the number of positional arguments in the words."""
        takes = {flag for option in self.parser.options if option.kind != "switch" for flag in option.flags}
        words = [*self.parser.given, *self.given[self.parser.begin :]]
        return sum(
            not word.startswith("-")
            and word not in self.parser.commands
            and not (before.startswith("-") and before in takes)
            for before, word in zip(["", *words], words, strict=False)
        )

    def _own_folder(self, option: ProgramOption) -> None:
        """Let a folder in the command, which trials would share, be `${checkpoint}`."""
        for at, word in enumerate(self.given):
            flag, is_one_word, value = word.partition("=")
            if flag not in option.flags:
                continue
            value = value if is_one_word else "".join(self.given[at + 1 : at + 2])
            if "$" in value or Path(value).suffix:
                return
            self.given[at + (not is_one_word)] = f"{flag}={OUTPUT}" if is_one_word else OUTPUT
            self.remarks.append(f"{flag} {value} is {OUTPUT} now: all trials would write into {value}")
            return

    def _place(self, option: ProgramOption, role: str) -> None:
        if role == OUTPUT:
            value = output_of(option.default)
            self._add(option, value, look=value)
            return
        if role == EPOCHS and isinstance(option.default, int | float):
            self.epochs = int(option.default)
        needed = {EPOCHS: "10", SEED: "1"}[role] if option.required else None
        if needed is None and role == EPOCHS and self.epochs is not None and self.epochs <= 2:
            needed = "4"  # a look sees a metric twice
        self._add(option, role, look=needed)

    def _resume(self, option: ProgramOption) -> tuple[str, ...]:
        """Return the words by which a program loads its checkpoint; empty unless its source says which file that is."""
        if option.kind in ("switch", "pair"):
            return (option.flag,)
        if option.booleans:  # `--resume true`, of a type that reads it
            return tuple(option.words(option.booleans[0].partition("/")[0]))
        if option.is_of_trainer and option.name == "resume_from_checkpoint":
            is_read = any(option.name in text for text in self.sources)
            return tuple(option.words("${last_checkpoint}")) if is_read else ()
        equal = rf"\b{re.escape(option.name)}\b['\"\]]*\s*==\s*['\"](resume|last|latest|auto)['\"]"
        said = next((match[1] for text in self.sources if (match := re.search(equal, text))), None)
        file = saved_file(self.sources)
        value = said or (f"{OUTPUT}/{file}" if file else None)
        return tuple(option.words(value)) if value else ()

    def _logs(self) -> None:
        """Let a folder of logs be the trial's own where the program has no other."""
        folder = next((each for each in self._open() if each.kind == "value" and is_logs(each.name)), None)
        if folder is not None and folder.flags and not any(OUTPUT in word for word in self.words()):
            self._add(folder, OUTPUT, look=OUTPUT)

    def _parameters(self, tunable: Sequence[ProgramOption]) -> None:
        """Search the best known parameters, and name the others."""
        inner = {option.name.partition(".")[0] for option in tunable if "." in option.name}
        self._named(tunable)
        tunable = [option for option in tunable if option.name not in self.space]
        worth = [  # a group that others are in is none: optimizer=adam has no optimizer.momentum
            option for option in tunable if option.is_worth_a_search and option.name not in inner
        ]
        if len(worth) > MOST_PARAMETERS:
            worth = [option for option in worth if option.known is not None] or worth
        if self.space:
            worth = []  # the user has chosen
        best = sorted(worth, key=lambda option: (option.is_boolean, option.rank))[:MOST_PARAMETERS]
        best += [option for option in tunable if option.required and option not in best]
        words = [option for option in best if option.kind == "value" and option.is_boolean]
        if any(option.kind == "switch" for option in best):
            self.booleans = "flag"
        elif words:
            self.booleans = next(iter(words[0].booleans or ()), "")
        self.space |= {option.name: self._domain(option) for option in best}
        for option in tunable:
            value = f"${{{option.name}}}"
            if option in best:
                self._add(option, value, look=value if option.required else None)
            elif len(self.others) < _MOST_OTHERS:
                domain, said = self._domain(option)
                asked = f"add {' '.join(option.words(value))} to the command"
                if option.kind == "switch" and self.booleans != "flag":
                    asked += ", and booleans: {style: flag}"
                self.others[option.name] = domain, f"{said}; {asked}" if said else asked

    def _named(self, tunable: Sequence[ProgramOption]) -> None:
        """Search the parameters that the words name in `${…}`, with the defaults of their options."""
        options = {flag: option for option in self.parser.options for flag in option.flags}
        for before, word in zip(["", *self.given], self.given, strict=False):
            for name in named(word):
                if name in PLACES:
                    continue
                option = options.get(word.partition("=")[0]) or options.get(before)
                self.space[name] = domain_of(name, REQUIRED) if option is None else self._domain(option)

    def _domain(self, option: ProgramOption) -> tuple[str, str]:
        """Return the domain of an option, and a comment."""
        said = "" if option.default is None else f"the default is {option.default}"
        texts = option.choices
        if option.kind == "pair":
            texts = (option.flag, option.off)
        elif option.kind == "value" and option.booleans and self.booleans not in option.booleans:
            texts = tuple(option.booleans[0].split("/"))
        if texts is not None:
            return f"{{type: choice, values: [{', '.join(_value(text) for text in texts)}]}}", said
        default = REQUIRED if option.default is None else option.default
        if option.type == "float" and isinstance(default, int) and not option.is_boolean:
            default = float(default)
        return domain_of(option.name, False if option.kind == "switch" else default)


def _value(value: object) -> str:
    """Return a choice as YAML reads it back: a number stays one."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else yaml_key(str(value))


def _left_out(option: ProgramOption) -> str | None:
    """Return a remark on an option for true or false that no value of a parameter can stand for."""
    if is_fixed(option.name) or option.name in PLACES:
        return None
    if option.kind == "value" and option.type == "bool" and not option.booleans:
        return f"{option.flag} has type=bool, which reads every text as true: it is left out"
    if option.kind == "value" and isinstance(option.default, bool) and not option.is_of_trainer:
        return f"{option.flag} takes a text for true or false that is not known: add it to the command if it is wanted"
    return None
