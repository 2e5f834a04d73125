"""`rubberband estimate`: plan an experiment and say what it takes and costs. Nothing is started or spent."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rubberband.experiment import Experiment
    from rubberband.offer import Offer
    from rubberband.plan import Plan
    from rubberband.planner.estimate import Estimate
    from rubberband.profile import Profile


class Output(StrEnum):
    """How the estimate is printed."""

    table = "table"
    json = "json"


class Policy(StrEnum):
    """How the plan is searched for."""

    optimal = "optimal"
    static = "static"


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a value of the file; repeats.", show_default=False),
]


def estimate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)],
    output: Annotated[Output, typer.Option("--output", "-o", help="Print a table or JSON.")] = Output.table,
    policy: Annotated[
        Policy, typer.Option("--policy", help="optimal: instances change from stage to stage; static: they do not.")
    ] = Policy.optimal,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Predict this plan (JSON); search for none.", show_default=False),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Predict what an experiment takes and costs.

    Finds the plan (instances and GPUs per trial for every stage) and spends nothing.
    """
    from rubberband.cloud import catalogue
    from rubberband.errors import InfeasibleError
    from rubberband.files import load_experiment

    experiment = load_experiment(file, overrides or [])
    profile = _profile(experiment, file)
    offer = catalogue.offer(experiment.resources, profile)
    answer = _estimate(experiment, profile, offer, policy, _read_plan(plan) if plan else None)
    if output is Output.json:
        from rubberband.commands.show import print_json

        print_json(answer.to_json())
    elif answer.planned is not None:
        _print_table(answer, experiment, profile, offer)
    if answer.feasible:
        return
    jct_s, cost_usd = _nearest(answer)
    reason = answer.reason or "the plan does not keep the deadline or the budget; change it, or raise them"
    raise InfeasibleError(reason, shortest_jct_s=jct_s, cheapest_usd=cost_usd)


def _profile(experiment: Experiment, file: Path) -> Profile:
    from rubberband.errors import ProfileMissingError

    remedy = f"measure one with `rubberband profile {file}`, or write profile: {{seconds_per_iteration: {{1: 60}}}}"
    try:
        profile = experiment.loaded_profile()
    except ProfileMissingError as error:
        raise ProfileMissingError(f"{str(error).partition(';')[0]}; {remedy}") from None
    if profile is None:
        raise ProfileMissingError(f"{file} has no profile; {remedy}")
    return profile


def _estimate(experiment: Experiment, profile: Profile, offer: Offer, policy: Policy, plan: Plan | None) -> Estimate:
    from rubberband.planner.estimate import estimate as estimate_best
    from rubberband.planner.estimate import estimate_plan

    constraints = experiment.planning_constraints(time.time(), offer.gpus)
    stages, name = experiment.stages(), experiment.name
    if plan is not None:
        return estimate_plan(stages, plan, profile, offer, constraints, name, baselines=["static"])
    objective = experiment.constraints.objective
    return estimate_best(
        stages, profile, offer, constraints, policy.value, name, clock=time.perf_counter, objective=objective
    )


def _read_plan(path: Path) -> Plan:
    import json

    from rubberband.errors import InputError
    from rubberband.planner.plain import plan_from_json

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read as a plan ({error.strerror}); give a readable file") from None
    except (ValueError, RecursionError):
        raise InputError(
            f'{path} is not a JSON file; write {{"stages": [{{"instances": 4, "gpus_per_trial": 1}}]}}'
        ) from None
    try:
        return plan_from_json(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _nearest(answer: Estimate) -> tuple[float, float]:
    if answer.nearest is not None:
        return answer.nearest.jct_s, answer.nearest.cost_usd
    assert answer.prediction is not None, "what has no plan has a nearest one"
    return answer.prediction.jct_s, answer.prediction.cost_usd


def _print_table(answer: Estimate, experiment: Experiment, profile: Profile, offer: Offer) -> None:
    from rubberband.commands.estimate_table import assumptions, fixed_cluster, headline, table
    from rubberband.commands.show import print_table

    print(headline(answer, offer))
    header, rows, total = table(answer)
    print_table(header, rows, total)
    print(fixed_cluster(answer))
    for line in assumptions(answer, experiment, profile, offer):
        print(line)
