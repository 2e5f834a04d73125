"""`rubberband estimate` and `plan`: predict the time and cost of an experiment. Nothing is started or spent."""

from __future__ import annotations

import shlex
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.commands.common import (
    FileArgument,
    Overrides,
    Policy,
    PolicyOption,
    TableFormat,
    option,
    print_json,
    write_page,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rubberband.app.terms import EstimateAnswer, Terms
    from rubberband.planner.estimate import Estimate
    from rubberband.planner.sizing import Size
    from rubberband.spec.experiment import Experiment
    from rubberband.views.tables import TextTable


OutputOption = Annotated[TableFormat, typer.Option("--output", "-o", help="Print tables or JSON.")]
PlanOption = Annotated[
    Path | None,
    option(
        "--plan",
        "FILE",
        'Predict this plan, a JSON file: {"stages": [{"instances": 4, "gpus_per_trial": 1}, ...]}.',
    ),
]
FrontierOption = Annotated[
    bool,
    typer.Option(
        "--frontier", help="With -o json: include the frontier of cost against deadline; tables and pages always do."
    ),
]
SizeOption = Annotated[
    bool,
    typer.Option(
        "--size",
        help="Size the search to the limits: the most configurations (or the largest max_t) that the deadline and the "
        "budget allow, and how many other limits would allow.",
    ),
]
HtmlOption = Annotated[Path | None, option("--html", "FILE", "Write a page with charts to FILE as well.")]
CompareOption = Annotated[
    Path | None,
    option("--compare-to", "FILE", "Show the differences from an earlier estimate, saved with -o json."),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", help="Print all tables: also the bill, how time and cost vary, and the assumptions."),
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", min=0, help="Seed of the samples, where times vary; the same one gives the same figures."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Options of `estimate` and `plan`."""

    file: Path
    output: TableFormat
    policy: Policy
    plan: Path | None
    frontier: bool
    size: bool
    html: Path | None
    compare_to: Path | None
    verbose: bool
    overrides: list[str]
    seed: int
    live: bool
    """With prices and quotas of today."""


def _command(live: bool, help: str) -> Callable[..., None]:
    """Return the command that estimates on today's terms, or on those known here."""

    def command(
        file: FileArgument,
        output: OutputOption = TableFormat.table,
        policy: PolicyOption = Policy.optimal,
        plan: PlanOption = None,
        frontier: FrontierOption = False,
        size: SizeOption = False,
        html: HtmlOption = None,
        compare_to: CompareOption = None,
        seed: SeedOption = 0,
        verbose: VerboseOption = False,
        overrides: Overrides = None,
    ) -> None:
        asked = _Options(
            file=file,
            output=output,
            policy=policy,
            plan=plan,
            frontier=frontier,
            size=size,
            html=html,
            compare_to=compare_to,
            verbose=verbose,
            overrides=overrides or [],
            seed=seed,
            live=live,
        )
        _show(asked)

    command.__doc__ = help
    return command


estimate = _command(
    live=False,
    help="""Predict an experiment's time and cost; nothing is spent.

    Finds the cheapest plan (instances and GPUs per trial for every stage) within the deadline and the budget, and
    shows other options and other deadlines. Exit code 3: no plan is within the limits; remedies are listed.
    """,
)
plan = _command(
    live=True,
    help="""Estimate an experiment with live prices and quotas.

    Does the same as `estimate`, with current AWS prices and within the account's quota. If AWS does not answer, older
    prices are used and a note says so. Nothing is started, and nothing is spent.
    """,
)


def _terms(experiment: Experiment, live: bool) -> Terms:
    from rubberband.app.terms import Terms, live_terms, local_terms
    from rubberband.errors import InputError
    from rubberband.installation import default_home

    try:
        home = default_home()
    except InputError:  # this user has no home, so there are no measured terms in it
        if live:
            raise
        return Terms()
    terms = live_terms(experiment, home) if live else local_terms(experiment, home)
    if not experiment.resources.kind.is_rented:
        return terms
    from rubberband.app.allowance import with_allowance

    return with_allowance(terms, experiment, home)


def _show(asked: _Options) -> None:
    """Plan an experiment, and print the estimate. Raises InfeasibleError without a plan."""
    from rubberband.app.terms import answer
    from rubberband.commands.estimate_compare import comparison, profiles_of, read_plan, read_saved, saved
    from rubberband.executor.training.content import with_trial
    from rubberband.spec.loading import load_experiment

    search_path = (asked.file.absolute().parent, Path.cwd())
    experiment = with_trial(load_experiment(asked.file, asked.overrides), search_path)
    profiles = profiles_of(experiment, asked.file, asked.overrides)
    given = read_plan(asked.plan) if asked.plan else None
    before = read_saved(asked.compare_to) if asked.compare_to else None
    terms = _terms(experiment, asked.live)
    found = answer(
        experiment,
        profiles,
        terms,
        now=time.time(),
        clock=time.perf_counter,
        policy=asked.policy.value,
        plan=given,
        frontier=asked.frontier or asked.output is TableFormat.table or asked.html is not None,
        seed=asked.seed,
        size=asked.size,
    )
    compared = comparison(before, saved(found.estimate.to_json())) if before else None
    lines, listed, num_tables = _document(found, compared, asked.compare_to)
    if asked.html is not None:
        from rubberband.views.estimate_html import render_estimate

        write_page(asked.html, render_estimate(found.estimate, lines, listed, found.size))
    if asked.output is TableFormat.json:
        print_json(found.to_json() | ({} if compared is None else {"comparison": compared}))
    else:
        closing = _next(asked, found.estimate, found.size, experiment.resources.provider)
        _print(asked, found, lines, listed, num_tables, (*terms.notes, *found.blocks), closing)
    if not found.estimate.feasible:
        raise _infeasible(found.estimate)


def _print(
    asked: _Options,
    found: EstimateAnswer,
    lines: Sequence[str],
    listed: Sequence[TextTable],
    num_tables: int,
    notes: Sequence[str],
    closing: Sequence[str],
) -> None:
    """Print the estimate: on one screen, or with all tables. The last `num_tables` are those of every estimate."""
    from rubberband.views.estimate_tables import screen_tables
    from rubberband.views.report_text import WIDTH, more, print_document

    shown = listed
    if not asked.verbose:
        shown = [*listed[: len(listed) - num_tables], *screen_tables(found.estimate, found.notes)]
        remarks = [line for note in notes for line in textwrap.wrap(note, WIDTH)]
        closing = [*remarks, *closing, *more(listed, shown)]
    print_document(lines, shown, ("bold", "", "bold green"), closing)


def _next(asked: _Options, found: Estimate, size: Size | None, provider: str) -> list[str]:
    """Return the next command to run; none for a plan of the user's, which only an estimate accepts."""
    if asked.plan is not None or (not found.feasible and not found.remedies):
        return []
    overrides = {override.partition("=")[0]: override for override in asked.overrides}
    if asked.size and size is not None and size.number is not None:
        overrides |= {f"search.scheduler.{size.key}": size.setting}
    if not found.feasible:
        overrides |= {change.key: change.setting for change in found.remedies[0].changes}
        name = "plan" if asked.live else "estimate"
    elif provider == "aws":
        name = "up" if asked.live else "plan"
    else:
        name = "run"
    policy = [] if asked.policy is Policy.optimal or name == "up" else ["--policy", asked.policy.value]
    changes = [word for override in overrides.values() for word in ("-s", override)]
    return [f"Next: {shlex.join(['rubberband', name, str(asked.file), *policy, *changes])}"]


def _infeasible(answer: Estimate) -> Exception:
    from rubberband.errors import InfeasibleError
    from rubberband.views.estimate_tables import broken_limits

    if answer.nearest is not None:
        return InfeasibleError(
            answer.reason or "", shortest_jct_s=answer.nearest.jct_s, cheapest_usd=answer.nearest.cost_usd
        )
    assert answer.prediction is not None, "an infeasible answer has a nearest plan"
    reason = f"the plan does not keep {broken_limits(answer)}; change the plan or the policy, or raise the limits"
    return InfeasibleError(reason, shortest_jct_s=answer.prediction.jct_s, cheapest_usd=answer.prediction.cost_usd)


def _document(
    found: EstimateAnswer, compared: dict[str, Any] | None, source: Path | None
) -> tuple[list[str], list[TextTable], int]:
    """Return the headlines, all tables, and the number of those at the end that every estimate has."""
    from rubberband.commands.estimate_compare import difference_table
    from rubberband.views.estimate_tables import headlines, tables
    from rubberband.views.size import size_line, size_table

    lines, own = headlines(found.estimate), tables(found.estimate, found.assumptions, list(found.notes), found.bill)
    first = [] if compared is None else [difference_table(compared, str(source))]
    if found.size is not None:
        lines.insert(0, size_line(found.estimate.experiment_name, found.size))
        first += [size_table(found.size)] if len(found.size.frontier) > 1 else []
    return lines, [*first, *own], len(own)
