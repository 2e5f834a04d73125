"""`rubberband estimate`: plan an experiment and say what it takes and costs. Nothing is started or spent."""

from __future__ import annotations

import shlex
import textwrap
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rubberband.app.terms import EstimateAnswer, Terms
    from rubberband.commands.estimate_compare import Saved
    from rubberband.planner.estimate import Estimate
    from rubberband.spec.experiment import Experiment
    from rubberband.views.tables import TextTable


class EstimateFormat(StrEnum):
    """How the estimate is printed."""

    table = "table"
    json = "json"


class Policy(StrEnum):
    """How the plan is searched for."""

    optimal = "optimal"
    greedy = "greedy"
    static = "static"
    naive_elastic = "naive_elastic"


FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)]
OutputOption = Annotated[EstimateFormat, typer.Option("--output", "-o", help="Print tables or JSON.")]
PolicyOption = Annotated[
    Policy,
    typer.Option(
        "--policy",
        help="optimal: the best plan there is, instances change from stage to stage; static: a cluster of a fixed "
        "size; naive_elastic: the same GPUs per trial throughout; greedy: the search of the RubberBand paper.",
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help='Predict this plan, a JSON file: {"stages": [{"instances": 4, "gpus_per_trial": 1}, ...]}.',
        show_default=False,
    ),
]
FrontierOption = Annotated[
    bool,
    typer.Option(
        "--frontier", help="With -o json: include the frontier of cost against deadline; tables and pages always do."
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page with charts to FILE as well.", show_default=False),
]
CompareOption = Annotated[
    Path | None,
    typer.Option(
        "--compare-to",
        metavar="FILE",
        help="Show the differences from an earlier estimate, saved with -o json.",
        show_default=False,
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", help="Print all tables: also the bill, how time and cost vary, and the assumptions."),
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", min=0, help="Seed of the samples, where times vary; the same one gives the same figures."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a value of the file; repeats.", show_default=False),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """What the command line asks for."""

    file: Path
    output: EstimateFormat
    policy: Policy
    plan: Path | None
    frontier: bool
    html: Path | None
    compare_to: Path | None
    seed: int
    verbose: bool
    overrides: list[str]
    live: bool
    """With prices and quotas of today."""


def estimate(
    file: FileArgument,
    output: OutputOption = EstimateFormat.table,
    policy: PolicyOption = Policy.optimal,
    plan: PlanOption = None,
    frontier: FrontierOption = False,
    html: HtmlOption = None,
    compare_to: CompareOption = None,
    seed: SeedOption = 0,
    verbose: VerboseOption = False,
    overrides: Overrides = None,
) -> None:
    """Predict an experiment's time and cost; nothing is spent.

    Finds the cheapest plan (instances and GPUs per trial for every stage) within the deadline and the budget, and
    shows other options and other deadlines. Exit code 3: no plan is within the limits; remedies are listed.
    """
    asked = EstimateOptions(
        file=file,
        output=output,
        policy=policy,
        plan=plan,
        frontier=frontier,
        html=html,
        compare_to=compare_to,
        seed=seed,
        verbose=verbose,
        overrides=overrides or [],
        live=False,
    )
    show_estimate(asked, _local_terms)


def _local_terms(experiment: Experiment) -> Terms:
    from rubberband.app.terms import Terms, local_terms
    from rubberband.errors import InputError
    from rubberband.home import default_home

    try:
        home = default_home()
    except InputError:  # this user has no home, and nothing to estimate with in it
        return Terms()
    return local_terms(experiment, home)


def show_estimate(asked: EstimateOptions, terms_of: Callable[[Experiment], Terms]) -> None:
    """Plan an experiment on its terms, and print the estimate. Raises InfeasibleError without a plan."""
    from rubberband.app.terms import answer
    from rubberband.commands.estimate_compare import profiles_of, read_plan
    from rubberband.spec.loading import load_experiment

    experiment = load_experiment(asked.file, asked.overrides)
    profiles = profiles_of(experiment, asked.file)
    given = read_plan(asked.plan) if asked.plan else None
    before = _read_saved(asked.compare_to)
    terms = terms_of(experiment)
    found = answer(
        experiment,
        profiles,
        terms,
        now=time.time(),
        clock=time.perf_counter,
        policy=asked.policy.value,
        plan=given,
        frontier=asked.frontier or asked.output is EstimateFormat.table or asked.html is not None,
        seed=asked.seed,
    )
    compared = _compare(found.estimate, before)
    lines, listed = _document(found, compared, asked.compare_to)
    if asked.html is not None:
        from rubberband.commands.common import write_page
        from rubberband.views.estimate_html import render_estimate

        write_page(asked.html, render_estimate(found.estimate, lines, listed))
    if asked.output is EstimateFormat.json:
        from rubberband.commands.common import print_json

        print_json(found.to_json() | ({} if compared is None else {"comparison": compared}))
    else:
        from rubberband.views.estimate_tables import screen_tables
        from rubberband.views.report_text import WIDTH, more, print_document

        closing = _next(asked, found.estimate, experiment.resources.provider)
        shown = listed
        if not asked.verbose:
            shown = [*(listed[:1] if compared else []), *screen_tables(found.estimate)]
            remarks = [line for note in terms.notes for line in textwrap.wrap(note, WIDTH)]
            closing = [*remarks, *closing, *more(listed, shown)]
        print_document(lines, shown, ("bold", "", "bold green"), closing)
    if not found.estimate.feasible:
        raise _infeasible(found.estimate)


def _next(asked: EstimateOptions, found: Estimate, provider: str) -> list[str]:
    """The command to go on with; none for a plan of the user's, which only an estimate can take."""
    if asked.plan is not None or (not found.feasible and not found.remedies):
        return []
    overrides = {override.partition("=")[0]: override for override in asked.overrides}
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


def _read_saved(path: Path | None) -> Saved | None:
    if path is None:
        return None
    from rubberband.commands.estimate_compare import read_saved

    return read_saved(path)


def _compare(answer: Estimate, before: Saved | None) -> dict[str, Any] | None:
    if before is None:
        return None
    from rubberband.commands.estimate_compare import comparison, saved

    return comparison(before, saved(answer.to_json()))


def _document(
    found: EstimateAnswer, compared: dict[str, Any] | None, source: Path | None
) -> tuple[list[str], list[TextTable]]:
    """Headlines and all tables."""
    from rubberband.views.estimate_difference import difference_table
    from rubberband.views.estimate_tables import headlines, tables

    listed = tables(found.estimate, found.assumptions, list(found.notes), found.bill)
    if compared is not None:
        listed.insert(0, difference_table(compared, str(source)))
    return headlines(found.estimate), listed


# `rubberband plan`: an estimate with today's prices and the account's quotas. Nothing is started or spent.


def plan(
    file: FileArgument,
    output: OutputOption = EstimateFormat.table,
    policy: PolicyOption = Policy.optimal,
    plan: PlanOption = None,
    frontier: FrontierOption = False,
    html: HtmlOption = None,
    compare_to: CompareOption = None,
    seed: SeedOption = 0,
    verbose: VerboseOption = False,
    overrides: Overrides = None,
) -> None:
    """Estimate an experiment with live prices and quotas.

    Does the same as `estimate`, with current AWS prices and within the account's quota. If AWS does not answer, older
    prices are used and a note says so. Nothing is started, and nothing is spent.
    """
    asked = EstimateOptions(
        file=file,
        output=output,
        policy=policy,
        plan=plan,
        frontier=frontier,
        html=html,
        compare_to=compare_to,
        seed=seed,
        verbose=verbose,
        overrides=overrides or [],
        live=True,
    )
    from rubberband.app.terms import live_terms
    from rubberband.home import default_home

    show_estimate(asked, lambda experiment: live_terms(experiment, default_home()))
