"""`rubberband estimate`: plan an experiment and say what it takes and costs. Nothing is started or spent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rubberband.commands.estimate_compare import Saved
    from rubberband.commands.estimate_inputs import Terms
    from rubberband.experiment import Experiment
    from rubberband.plan import Plan
    from rubberband.planner.assumptions import Assumption
    from rubberband.planner.estimate import Estimate
    from rubberband.profile import Profile
    from rubberband.views.tables import Table


class Output(StrEnum):
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
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Print tables or JSON.")]
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
    typer.Option("--frontier", help="With -o json: all of cost against deadline; tables and pages always have it."),
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
        help="Tell what is different from an estimate saved before with -o json.",
        show_default=False,
    ),
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
class Asked:
    """What the command line asks for."""

    file: Path
    output: Output
    policy: Policy
    plan: Path | None
    frontier: bool
    html: Path | None
    compare_to: Path | None
    seed: int
    overrides: list[str]


def estimate(
    file: FileArgument,
    output: OutputOption = Output.table,
    policy: PolicyOption = Policy.optimal,
    plan: PlanOption = None,
    frontier: FrontierOption = False,
    html: HtmlOption = None,
    compare_to: CompareOption = None,
    seed: SeedOption = 0,
    overrides: Overrides = None,
) -> None:
    """Predict what an experiment takes and costs, and spend nothing.

    Finds the cheapest plan (instances and GPUs per trial for every stage) within the deadline and the budget, and
    shows what else could be done, what other deadlines would cost, and what the figures rest on. Exit code 3: no plan
    is within the limits; the nearest one is told.
    """
    from rubberband.commands.estimate_inputs import Terms

    asked = Asked(
        file=file,
        output=output,
        policy=policy,
        plan=plan,
        frontier=frontier,
        html=html,
        compare_to=compare_to,
        seed=seed,
        overrides=overrides or [],
    )
    show_estimate(asked, lambda _: Terms())


def show_estimate(asked: Asked, terms_of: Callable[[Experiment], Terms]) -> None:
    """Plan an experiment on the terms that it has, and print the estimate. Raises InfeasibleError without a plan."""
    from rubberband.commands.estimate_inputs import bases, notes_of, profiles_of, read_plan
    from rubberband.files import load_experiment
    from rubberband.planner.assumptions import assumptions

    experiment = load_experiment(asked.file, asked.overrides)
    profiles = profiles_of(experiment, asked.file)
    given = read_plan(asked.plan) if asked.plan else None
    before = _read_saved(asked.compare_to)
    full = asked.frontier or asked.output is Output.table or asked.html is not None
    terms = terms_of(experiment)
    answer = _estimate(experiment, profiles, terms, asked, given, full)
    known = assumptions(answer, bases(experiment, answer.case, terms.table))
    notes = [*notes_of(experiment, answer.case, terms.table), *terms.notes]
    compared = _compare(answer, before)
    if asked.html is not None:
        from rubberband.commands.show import write_text
        from rubberband.views.estimate_html import render_estimate

        write_text(asked.html, render_estimate(answer, *_document(answer, known, notes, compared, asked.compare_to)))
    if asked.output is Output.json:
        _print_json(answer, known, notes, compared)
    else:
        from rubberband.views.report_text import print_document

        print_document(*_document(answer, known, notes, compared, asked.compare_to), ("bold", "", "bold green"))
    if not answer.feasible:
        raise _infeasible(answer)


def _estimate(
    experiment: Experiment,
    profiles: Profile | Mapping[str, Profile],
    terms: Terms,
    asked: Asked,
    plan: Plan | None,
    full: bool,
) -> Estimate:
    """With the whole frontier if the estimate is to be `full`: that takes longer than all the rest."""
    from rubberband.cases import cases
    from rubberband.commands.estimate_inputs import case_of_plan
    from rubberband.planner.estimate import estimate as estimate_best
    from rubberband.planner.estimate import estimate_plan

    found = cases(experiment, profiles, time.time(), table=terms.table, room=terms.room)
    brackets, name = experiment.brackets(), experiment.name
    if plan is not None:
        case = case_of_plan(found, brackets)
        return estimate_plan(brackets[0], plan, case, name, with_frontier=full, seed=asked.seed)
    return estimate_best(
        brackets,
        found,
        asked.policy.value,
        name,
        clock=time.perf_counter,
        objective=experiment.constraints.objective,
        with_frontier=full,
        seed=asked.seed,
    )


def _infeasible(answer: Estimate) -> Exception:
    from rubberband.errors import InfeasibleError
    from rubberband.views.estimate_tables import broken_limits

    if answer.nearest is not None:
        return InfeasibleError(
            answer.reason or "", shortest_jct_s=answer.nearest.jct_s, cheapest_usd=answer.nearest.cost_usd
        )
    assert answer.prediction is not None, "what has no plan has a nearest one"
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


def _print_json(
    answer: Estimate, known: tuple[Assumption, ...], notes: list[str], compared: dict[str, Any] | None
) -> None:
    from dataclasses import asdict

    from rubberband.commands.show import print_json

    data: dict[str, Any] = answer.to_json()
    data["assumptions"] = [asdict(assumption) for assumption in known]
    data["notes"] = notes
    if compared is not None:
        data["comparison"] = compared
    print_json(data)


def _document(
    answer: Estimate,
    known: tuple[Assumption, ...],
    notes: list[str],
    compared: dict[str, Any] | None,
    source: Path | None,
) -> tuple[list[str], list[Table]]:
    """Headlines and tables."""
    from rubberband.views.estimate_difference import difference_table
    from rubberband.views.estimate_tables import headlines, tables

    found = tables(answer, known, notes)
    if compared is not None:
        found.insert(0, difference_table(compared, str(source)))
    return headlines(answer), found
