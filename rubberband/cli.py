"""The command line: `rubberband COMMAND ...`. Every command is a module of rubberband.commands, registered here.

Those modules import at their top only what starts fast; the rest is imported when a command runs. stdout carries data
alone; errors are one line on stderr. Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 infeasible, 4 finished
after its deadline, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

import rubberband
from rubberband.commands import (
    down,
    estimate,
    plan,
    prices,
    profile,
    report,
    run,
    serve,
    status,
    steer,
    submit,
    sweep,
    token,
    up,
)
from rubberband.errors import InfeasibleError, RubberbandError
from rubberband.interrupts import AtOnce

app = typer.Typer(
    name="rubberband",
    help="Hyperparameter tuning in the cloud, by a deadline and within a budget.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for _command in (
    estimate.estimate,
    plan.plan,
    prices.prices,
    profile.profile,
    run.run,
    run.resume,
    report.report,
    serve.serve,
    submit.submit,
    report.ps,
    status.status,
    report.logs,
    steer.cancel,
    steer.extend,
    sweep.sweep,
    up.up,
    down.down,
):
    app.command(_command.__name__)(_command)
app.add_typer(token.token, name="token")


def main() -> None:
    """Run the command line and exit with its code."""
    AtOnce(KeyboardInterrupt()).handle([signal.SIGINT])
    try:
        app(prog_name="rubberband")
    except RubberbandError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        if isinstance(error, InfeasibleError) and error.remedies:
            _print_others(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_others(error: InfeasibleError) -> None:
    """What else would make it feasible, beside what the error says."""
    from rubberband.planner.wording import line

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
