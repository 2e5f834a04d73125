"""`rubberband estimate`: predict the time and cost of an experiment. Nothing is started or spent."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import (
    FileArgument,
    HtmlOption,
    Overrides,
    PlanPolicy,
    PolicyOption,
    TableFormat,
    option,
    print_json,
    say,
    write_page,
)

if TYPE_CHECKING:
    from rubberband.planner import Estimate, SimulatedPlan
    from rubberband.planning.feasible import PricesAndQuotas
    from rubberband.planning.prices_and_quotas import EstimateAnswer
    from rubberband.spec.experiment import Experiment
    from rubberband.values.profile import Profile
    from rubberband.views.formatting import TextTable


LiveOption = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Use today's prices of AWS, and stay within the account's quotas. If AWS does not answer, older "
        "prices are used, and a note says so.",
    ),
]
PlanFileOption = Annotated[
    Path | None,
    option(
        "--plan",
        "FILE",
        'Predict this plan, a file in YAML or JSON: {"stages": [{"instances": 4, "gpus_per_trial": 1}, ...]}.',
    ),
]
FrontierOption = Annotated[
    bool,
    typer.Option(
        "--frontier", help="Include the frontier of cost against deadline in JSON; tables and pages always have it."
    ),
]
SizeOption = Annotated[
    bool,
    typer.Option(
        "--size",
        help="Size the search to the limits: the most configurations (or the largest max_t) that the deadline and "
        "the budget allow.",
    ),
]
SimulateOption = Annotated[
    int | None,
    option(
        "--simulate",
        "N",
        "Also simulate the plan's DAG N times (RubberBand, Algorithm 1): quantiles and the critical path.",
        min=1,
        max=100_000,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", min=0, help="Seed of the samples of varying times; the same seed gives the same figures."),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", help="Print all tables: also the bill, how time and cost vary, and the assumptions."),
]


def estimate(
    file: FileArgument,
    live: LiveOption = False,
    output: Annotated[TableFormat, typer.Option("--output", "-o", help="Print tables or JSON.")] = TableFormat.table,
    policy: PolicyOption = PlanPolicy.optimal,
    plan: PlanFileOption = None,
    frontier: FrontierOption = False,
    size: SizeOption = False,
    simulate: SimulateOption = None,
    html: HtmlOption = None,
    seed: SeedOption = 0,
    verbose: VerboseOption = False,
    overrides: Overrides = None,
) -> None:
    """Predict time and cost; nothing is spent.

    Finds the cheapest plan (instances and GPUs per trial for every stage) within the deadline and the budget, and
    shows other options and other deadlines. Exit code 3: no plan is within the limits; remedies are listed.
    """
    _import_numpy()
    from rubberband.executor.training.entrypoint import entrypoint_of, with_trial
    from rubberband.installation import default_home
    from rubberband.planning.clusters import on_cluster
    from rubberband.planning.feasible import PlanningOptions
    from rubberband.planning.fetching import with_fetch
    from rubberband.planning.prices_and_quotas import answer
    from rubberband.running.sending import with_unsent
    from rubberband.spec.loading import load_experiment, load_plan

    changes = overrides or []
    experiment, search_path = load_experiment(file, changes), (file.absolute().parent, Path.cwd())
    found_entrypoint = None if experiment.entrypoint is None else entrypoint_of(experiment, search_path)
    experiment = with_fetch(on_cluster(with_trial(experiment, search_path)), default_home(), is_required=False)
    if experiment.search.warm_start:
        from rubberband.running.warm_start import warm_started

        warm_started(experiment, default_home(), say)
    options = PlanningOptions(
        now=time.time(),
        policy=policy.value,
        given=load_plan(plan) if plan else None,
        frontier=frontier or output is TableFormat.table or html is not None,
        seed=seed,
        to_size=size,
    )
    profiles = profiles_of(experiment, file, changes)
    prices = with_unsent(_prices(experiment, live), experiment, found_entrypoint)
    found = answer(experiment, profiles, prices, options)
    simulation = _simulation(found.estimate, simulate, seed)
    lines, listed = _document(found, simulation)
    if html is not None:
        from rubberband.views.estimate.page import render_estimate

        write_page(html, render_estimate(found.estimate, lines, listed))
    if output is TableFormat.json:
        print_json(found.to_json() | ({} if simulation is None else {"simulation": simulation.to_json()}))
    else:
        closing = [] if plan else _next(found, ["--live"] if live else [], file, policy, changes, experiment)
        notes = [] if verbose else [*prices.notes, *found.blocks]
        _print(found, lines, listed, notes, closing, simulation, verbose=verbose)
    if not found.estimate.feasible:
        raise _infeasible(found.estimate)


_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def _import_numpy() -> None:
    """Import NumPy without the threads of its linear algebra: they are not used, and their start takes CPU time."""
    if _BLAS_THREADS in os.environ:
        return
    os.environ[_BLAS_THREADS] = "1"
    import numpy  # noqa: F401

    del os.environ[_BLAS_THREADS]


def _prices(experiment: Experiment, live: bool) -> PricesAndQuotas:
    from rubberband.installation import default_home
    from rubberband.planning.prices_and_quotas import live_prices_and_quotas, local_prices_and_quotas

    home = default_home()
    prices = live_prices_and_quotas(experiment, home) if live else local_prices_and_quotas(experiment, home)
    if not experiment.resources.kind.is_rented:
        return prices
    from rubberband.executor.run.allowance import with_allowance

    return with_allowance(prices, experiment, home)


def _print(
    found: EstimateAnswer,
    lines: Sequence[str],
    listed: Sequence[TextTable],
    notes: Sequence[str],
    closing: Sequence[str],
    simulation: SimulatedPlan | None,
    *,
    verbose: bool,
) -> None:
    """Print the estimate: on one screen, or with all tables."""
    from rubberband.views.document import WIDTH, more, print_document
    from rubberband.views.estimate.tables import screen_tables, simulation_tables

    shown = listed
    if not verbose:
        shown = [*screen_tables(found.estimate, found.notes), *simulation_tables(found.estimate, simulation)]
        remarks = [line for note in notes for line in textwrap.wrap(note, WIDTH)]
        closing = [*remarks, *closing, *more(listed, shown)]
    print_document(lines, shown, ("bold", "", "bold green"), closing, found.estimate.offer.unit)


def _next(
    found: EstimateAnswer,
    live: list[str],
    file: Path,
    policy: PlanPolicy,
    changes: Sequence[str],
    experiment: Experiment,
) -> list[str]:
    """Return the next command to run; none where nothing is feasible, and no remedy is known."""
    answer, size, kind = found.estimate, found.size, experiment.resources.kind
    if not answer.feasible and not answer.remedies:
        return []
    overrides = {override.partition("=")[0]: override for override in changes}
    if size is not None and size.number is not None:
        overrides |= {f"search.scheduler.{size.key}": size.setting}
    if not answer.feasible:
        overrides |= {change.key: change.setting for change in answer.remedies[0].changes}
        words = ["estimate", *live]
    else:
        words = ["estimate", "--live"] if kind.prices is not None and not live else ["run"]
    place = ["--on", "head"] if words == ["run"] and kind.head is not None else []
    by = [] if policy is PlanPolicy.optimal else ["--policy", policy.value]
    settings = [word for override in overrides.values() for word in ("-s", override)]
    return [f"Next: {shlex.join(['rubberband', *words, str(file), *place, *by, *settings])}"]


def _infeasible(answer: Estimate) -> Exception:
    from rubberband.errors import InfeasibleError
    from rubberband.views.estimate.tables import broken_limits

    if answer.nearest is not None:
        return InfeasibleError(
            answer.reason or "", shortest_jct_s=answer.nearest.jct_s, cheapest_usd=answer.nearest.cost_usd
        )
    assert answer.prediction is not None, "an infeasible answer has a nearest plan"
    reason = f"the plan does not keep {broken_limits(answer)}; change the plan or the policy, or raise the limits"
    return InfeasibleError(reason, shortest_jct_s=answer.prediction.jct_s, cheapest_usd=answer.prediction.cost_usd)


def _simulation(found: Estimate, samples: int | None, seed: int) -> SimulatedPlan | None:
    """Return the plan's simulation, if one is asked for. Raises InputError for a plan without a DAG."""
    if samples is None or found.job is None:
        return None
    from rubberband.planner import simulate_job

    return simulate_job(found.job, found.profile, found.offer, num_samples=samples, seed=seed)


def _document(found: EstimateAnswer, simulation: SimulatedPlan | None) -> tuple[list[str], list[TextTable]]:
    """Return the headlines and all tables."""
    from rubberband.views.estimate.tables import headlines, simulation_tables, tables
    from rubberband.views.formatting import size_line

    lines = headlines(found.estimate)
    if found.size is not None:
        lines.insert(0, size_line(found.estimate.experiment_name, found.estimate.constraints, found.size))
    every = tables(found.estimate, found.assumptions, list(found.notes), found.bill)
    return lines, [*every, *simulation_tables(found.estimate, simulation)]


def profiles_of(experiment: Experiment, file: Path, overrides: Sequence[str] = ()) -> Profile | dict[str, Profile]:
    """Return the experiment's profile, or instance type -> profile. Raises ProfileMissingError with the remedy."""
    remedy = f"measure one with `rubberband profile {file}`, or write profile: {{seconds_per_iteration: {{1: 60}}}}"
    from rubberband.errors import ProfileMissingError
    from rubberband.executor.training.entrypoint import entrypoint_of
    from rubberband.installation import default_home
    from rubberband.running.profile_cache import find_profiles
    from rubberband.spec.loading import default_profile_path, names_no_profile

    entrypoint = None
    if experiment.entrypoint is not None:
        entrypoint = entrypoint_of(experiment, (file.absolute().parent, Path.cwd()))
    found_at = default_profile_path(file) if names_no_profile(file, overrides) else None
    try:
        say = partial(print, file=sys.stderr)
        found = find_profiles(experiment, entrypoint, default_home(), found_at, say, to_run=False)
    except ProfileMissingError as error:
        raise ProfileMissingError(f"{str(error).partition(';')[0]}; {remedy}") from None
    if found is None:
        raise ProfileMissingError(f"{file} has no profile; {remedy}")
    return found
