"""A program as a trial, in the words of an experiment file: its command line, where its metrics are, its launch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from rubberband.errors import InputError
from rubberband.spec.fields import Words, fault, word_error
from rubberband.spec.samplers import leaves
from rubberband.spec.search import Search
from rubberband.spec.space import Domain, SubSpace, check_names
from rubberband.units import shown
from rubberband.values.command import (
    CHECKPOINT_PLACE,
    LAUNCHED_MODULES,
    PLACES,
    Booleans,
    Launch,
    Metrics,
    ProgramCommand,
    check_variables,
    launcher_of,
    named,
    script_of,
    shell_text,
    split,
    survives_shell,
    switch_of,
    text_of,
    words_of,
)
from rubberband.values.command import check_names as check_command


class MetricsPlace(Words):
    """Place of a program's metrics that it neither reports nor prints by itself as `name=number`."""

    file: Annotated[str, Field(min_length=1)] | None = None
    """A file below `${checkpoint}/` to which it adds lines such as `loss=0.12` or `{"loss": 0.12}`."""
    pattern: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression of a line, with a named group for each metric, such as `loss is (?P<loss>[0-9.]+)`."""

    @model_validator(mode="after")
    def _reads(self) -> MetricsPlace:
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groupindex
            except re.error as error:
                raise fault(f"{shown(self.pattern)} is no regular expression ({error})", at="pattern") from None
            if not groups:
                raise fault(f"{shown(self.pattern)} names no metric; write (?P<loss>…) around a number", at="pattern")
        if self.file is not None and not self.file.startswith(f"{CHECKPOINT_PLACE}/"):
            raise fault(
                f"trials that run at once would share {shown(self.file)}; write {CHECKPOINT_PLACE}/"
                f"{self.file.rpartition('/')[2]}, and let the program write there",
                at="file",
            )
        if self.pattern is None and self.file is None:
            raise fault("names neither a file nor a pattern; write report, stdout, file: … or pattern: …")
        return self


class BooleanWords(Words):
    """How a program reads true and false."""

    style: Booleans = "true/false"
    """`true/false`, `True/False` and `1/0` are words. With `flag` an option is written for true, and none for false.

    argparse's `store_true` takes a `flag`; Fire, `ast.literal_eval` and `text == "True"` read `True/False`."""


class Program(Words):
    """A program as the trial: it is started for each segment, on every worker of the gang."""

    command: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """Its command line, as a text or as words. `${name}` is a parameter, `${args}` all of them as --name=value."""
    metrics: Annotated[
        Annotated[Literal["report", "stdout"], Tag("word")] | Annotated[MetricsPlace, Tag("place")],
        Discriminator(lambda value: "place" if isinstance(value, Mapping | MetricsPlace) else "word"),
    ] = "report"
    """`report`: it calls rubberband.report; `stdout`: it prints lines such as `loss=0.12`."""
    launch: Launch = "worker"
    """Once for each worker of a gang, or (`machine`) once for each machine, for torchrun and the like."""
    booleans: BooleanWords = BooleanWords()
    """How true and false are written in the command."""
    resume: str | tuple[str, ...] = ()
    """Words that are added where the program is started from a checkpoint, such as `--resume ${checkpoint}/last.pt`."""
    rank: bool = True
    """Whether one worker has torchrun's variables too; without them, most programs train without DDP."""

    @model_validator(mode="after")
    def _words(self) -> Program:
        try:
            launcher = launcher_of(words := words_of(self.command))
        except InputError as error:
            raise fault(str(error), at="command") from None
        try:
            split(self.resume)
        except InputError as error:
            raise fault(str(error), at="resume") from None
        if launcher is not None and self.launch == "worker":
            raise fault(
                f"{launcher} starts workers itself, and would be started by each worker; write python "
                f"{_script(launcher, words)} in its place, or launch: machine",
                at="command",
            )
        return self

    def to_plain(self) -> ProgramCommand:
        """Return the value that a worker takes."""
        place = self.metrics
        metrics = Metrics(source=place) if isinstance(place, str) else Metrics(source="stdout", **place.model_dump())
        return ProgramCommand(
            words=words_of(self.command),
            metrics=metrics,
            launch=self.launch,
            booleans=self.booleans.style,
            resume=split(self.resume),
            rank=self.rank,
        )

    def __str__(self) -> str:
        return str(self.to_plain())


def _script(launcher: str, words: Sequence[str]) -> str:
    """Return what python starts in place of a launcher."""
    module = LAUNCHED_MODULES.get(launcher)
    return f"-m {module}" if module is not None else script_of(words) or "train.py"


def command(
    line: str | Sequence[str],
    /,
    *,
    metrics: str | Mapping[str, str] = "report",
    launch: Launch = "worker",
    booleans: Mapping[str, str] | None = None,
    resume: str | Sequence[str] = (),
    rank: bool = True,
) -> Program:
    """Return a program as a trial, for `rubberband.tune`: `command("python train.py ${args}")`.

    [Run any program](../commands.md) describes it.

    Args:
        line: The command line, as a text or as words. `${lr}` is a parameter, `${args}` all of them as options.
        metrics: `"report"`, `"stdout"`, `{"file": …}` or `{"pattern": …}`.
        launch: `"worker"`: once for each worker of a gang; `"machine"`: once for each machine.
        booleans: `{"style": "True/False"}`, `"true/false"`, `"1/0"` or `"flag"`: how true and false are written.
        resume: Words that are added where the program is started from a checkpoint: `"--init_from=resume"`.
        rank: Whether one worker has torchrun's variables (`RANK` and so on) too.

    Returns:
        The program, in place of a trial class.

    Raises:
        InputError: For words that do not fit.

    Examples:
        >>> rubberband.command("python train.py --lr ${lr}", metrics="stdout").command
        'python train.py --lr ${lr}'
    """
    try:
        return Program(command=line, metrics=metrics, launch=launch, booleans=booleans or {}, resume=resume, rank=rank)
    except ValidationError as error:
        raise word_error(error) from None


def check_program(program: Program, search: Search, env: Mapping[str, str]) -> None:
    """Raise the fault of a command, or of its variables, whose `${…}` do not fit the search space."""
    words, resume = words_of(program.command), split(program.resume)
    try:
        check_variables(env, check_names(search.space))
    except InputError as error:
        raise fault(str(error), at=("resources", "env")) from None
    try:
        check_command(words, check_names(search.space))
        if program.booleans.style == "flag":
            _check_flags(words, search.space)
        if (text := shell_text(words)) is not None:
            _check_shell_values(text, search.space, program.booleans.style)
    except InputError as error:
        raise fault(str(error), at=("entrypoint", "command")) from None
    try:
        check_command(resume, check_names(search.space))
        if resume and text is not None and (words[-1] == text or re.search(r"\$\{?[@*]", text) is None):
            raise InputError(
                "these words come last in the command, and its shell's text does not read them; write "
                "[bash, -c, 'python train.py \"$@\"', train, ...]"
            )
    except InputError as error:
        raise fault(str(error), at=("entrypoint", "resume")) from None


def check_env(env: Mapping[str, str]) -> None:
    """Raise the fault of a variable with a `${…}`, which a trial in Python does not fill."""
    for name, value in env.items():
        if place := next(named(value), None):
            why = (
                f"${{{place}}} is for a program (entrypoint: {{command: …}}), and a trial in Python fills none"
                if place in PLACES
                else "names another variable, and texts are taken as they are"
            )
            raise fault(f"{why}; write the text, or list a secret in secrets", at=("resources", "env", name))


def _check_flags(words: Sequence[str], space: Mapping[str, Any]) -> None:
    """Raise InputError for true or false in the place of a switch that has no option before it."""
    switches = {found[1] for pair in pairwise(("", *words)) if (found := switch_of(*pair))}
    for (*_, name), domain in leaves(space):
        is_named = any(name in named(word) for word in words)
        if is_named and name not in switches and any(isinstance(option, bool) for option in domain.options):
            raise InputError(
                f"booleans: {{style: flag}} writes an option or none, and ${{{name}}} has none before it; write "
                f"--{name} ${{{name}}}"
            )


def _check_shell_values(text: str, space: Mapping[str, Any], booleans: Booleans) -> None:
    """Raise InputError for a value that a shell would read as something else: several words, or code."""
    for name, domain in space.items():
        options = domain.options if isinstance(domain, Domain) else (domain,)
        for option in options if name in named(text) else ():
            value = text_of(option.name if isinstance(option, SubSpace) else option, booleans)
            if not survives_shell(text, name, value):
                raise InputError(
                    f"a shell would not read the value {shown(value)} of ${{{name}}} as it is; give it as a word after "
                    f'the text: [bash, -c, \'python train.py --{name} "$1"\', train, "${{{name}}}"]'
                )
        for option in domain.sub_spaces if isinstance(domain, Domain) else ():
            _check_shell_values(text, option.space, booleans)
