"""The command line: `rubberband COMMAND ...`. Every command is a function of rubberband.commands, listed here.

The module of a command is imported when the command or its help is called, and slow imports wait until it runs. stdout
carries only data; an error is one line on stderr. Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 infeasible, 4
finished after its deadline, 130 ended by Ctrl-C, SIGTERM, SIGHUP or `rubberband cancel`.
"""

from __future__ import annotations

import gc
import importlib
import io
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer
import typer.core

import rubberband
from rubberband.errors import InfeasibleError, InputError, RubberbandError
from rubberband.features import FEATURES, Panel
from rubberband.interrupts import ENDS, AtOnce

_PANELS: dict[Panel, dict[str, tuple[str, str]]] = {
    "Plan": {
        "init": ("init", "Write an experiment file for a trial."),
        "estimate": ("estimate", "Predict time and cost; nothing is spent."),
        "check": ("check", "Try one iteration; nothing is rented."),
        "profile": ("run", "Measure the profile that planning needs."),
    },
    "Run": {
        "run": ("run", "Plan an experiment, run it, and report."),
        "resume": ("run", "Resume an interrupted experiment."),
        "status": ("experiment", "Show an experiment's status."),
        "logs": ("experiment", "Print the output and the errors of trials."),
        "cancel": ("experiment", "Cancel a running experiment."),
        "stop": ("experiment", "Stop single trials of a running experiment."),
        "extend": ("experiment", "Give more time, money, trials, a target."),
        "add": ("experiment", "Add a configuration to a search."),
        "clone": ("experiment", "Add a changed copy of a trial."),
        "scale": ("experiment", "Limit a running experiment's instances."),
    },
    "Results": {
        "ps": ("report", "List experiments, here or of a service."),
        "report": ("report", "Print an experiment's result."),
        "best": ("report", "Print an experiment's best configuration."),
        "artifacts": ("report", "List or write the files that a trial kept."),
        "export": ("report", "Write trials as a table or an Optuna study."),
        "tag": ("care", "Show and change tags and a note, or archive."),
        "rm": ("care", "Delete experiments that have ended."),
    },
    "Service and EC2": {
        "submit": ("run", "Submit an experiment to a service."),
        "cleanup": ("care", "Terminate what crashed runs left running."),
    },
}
"""Panel of the help -> command -> its module in rubberband.commands, and the first sentence of its help."""
for _feature in filter(lambda each: each.commands and each.is_here, FEATURES):
    for _name, (_panel, *_command) in _feature.commands.items():
        _PANELS[_panel][_name] = (_command[0], _command[1])

COMMANDS = {name: found for panel in _PANELS.values() for name, found in panel.items()}

_EARLIER = {
    "plan": ("estimate", "--live"),
    "limit": ("scale",),
    "sweep": ("cleanup",),
    **{name: ("cloud", name) for name in ("up", "down", "image", "prices")},
}
"""Earlier name of a command -> its words of now. Scripts may use it; no help shows it."""

_DESTRUCTIVE = frozenset(
    {"cancel", "cleanup", "delete", "down", "restore", "revoke", "rm", "scale", "stop", "teardown"}
)


class CommandGroup(typer.core.TyperGroup):
    """Group of commands. A slip is answered with those that may be meant, and never with a destructive one alone."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and its arguments."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            from rubberband.units import near

            close = near(args[0], self.commands, most=3)
            safe = [each for each in close if each not in _DESTRUCTIVE][:1]
            meant = " or ".join(map(repr, dict.fromkeys([*safe, *close[:1]])))
            hint = f"did you mean {meant}?" if safe else f"`{ctx.command_path} --help` lists them"
            ctx.fail(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


def _grouped(found: typer.Typer) -> typer.Typer:
    """Let groups of commands be answered so, also those below them."""
    found.info.cls = CommandGroup
    for below in found.registered_groups:
        if below.typer_instance is not None:
            _grouped(below.typer_instance)
    return found


_COLLECT_EVERY = 100_000
"""Objects between two garbage collections. The many objects of a start all stay, so collecting earlier frees none."""


class Promised(typer.core.TyperCommand):
    """Command that is imported when it is called; until then, its name and the first sentence of its help."""

    def made(self) -> Any:
        """Import the command and return it for click."""
        assert self.name is not None
        module, _ = COMMANDS[self.name]
        found = getattr(importlib.import_module(f"rubberband.commands.{module}"), self.name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(self.name)(found)
            found = alone
        return _with_examples(typer.main.get_command(_grouped(found)), f"rubberband {self.name}")

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments as the imported command does, which becomes the context's command.

        With `--on head`, what asks for an experiment is carried out there; `run` sends it.
        """
        if info_name == "run" and "--dry-run" in args:
            raise InputError("--dry-run is a command: rubberband estimate FILE predicts time and cost")
        context = self.made().make_context(info_name, args, parent, **extra)
        if context.params.get("on") is not None and info_name != "run":
            from rubberband.commands.common import forward

            raise typer.Exit(forward(context))
        return context


class Commands(CommandGroup):
    """Group of the commands, none of which is imported yet."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, help_text) in COMMANDS.items():
            self.add_command(Promised(name, help=help_text))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, in panels."""
        for panel, commands in _PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(name, help_text) for name, (_, help_text) in commands.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and its arguments, also for the earlier name of a command."""
        return super().resolve_command(ctx, [*_EARLIER.get(args[0], args[:1]), *args[1:]])


def _with_examples(command: Any, path: str) -> Any:
    """Return the command, and those below it, with their examples at the end of their help."""
    from rubberband.commands.examples import EXAMPLES

    command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[path])
    command.make_context = partial(_context, command.make_context, EXAMPLES[path][0])
    for name, below in getattr(command, "commands", {}).items():
        _with_examples(below, f"{path} {name}")
    return command


def _context(make: Callable[..., Any], example: str, *args: Any, **options: Any) -> Any:
    """Make the context of a command. An error of usage gives the example where an argument is missing."""
    try:
        return make(*args, **options)
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]
            if type(error).__name__ == "MissingParameter":
                error.message = f"For example: {example}"  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="rubberband",
    cls=Commands,
    help="Hyperparameter tuning in the cloud, by a deadline and within a budget.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Run the command line and exit with its code."""
    gc.set_threshold(_COLLECT_EVERY)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may lack the characters of tables
    AtOnce(KeyboardInterrupt()).handle(ENDS)
    try:
        app(prog_name="rubberband")
    except RubberbandError as error:
        for line in getattr(error, "lines", (str(error),)):
            print(f"error: {' '.join(line.split())}", file=sys.stderr)
        if isinstance(error, InfeasibleError) and error.remedies:
            _print_others(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        from rubberband.installation import remedy_of

        if (remedy := remedy_of(error)) is None:
            raise
        print(f"error: this needs {error.name}; run {remedy}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_others(error: InfeasibleError) -> None:
    """Print the remedies beyond the one that the error names."""
    from rubberband.planning.remedies import line

    for remedy in error.remedies[1:]:
        print(f"or: {line(remedy)}", file=sys.stderr)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rubberband {rubberband.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hyperparameter tuning in the cloud, by a deadline and within a budget."""


if __name__ == "__main__":
    main()
