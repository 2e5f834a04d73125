"""Headlines and tables of an estimate, for `rubberband estimate` and its page. Pure."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rubberband.planner import USER_PLAN, Estimate, JobPlan, Lane, Option, Point, keeps, meets, varies
from rubberband.planning.assumptions import Assumption
from rubberband.planning.remedies import concessions, settings
from rubberband.spec.schedulers import SCHEDULERS
from rubberband.units import counted, format_duration, format_usd, gpus_each
from rubberband.values.offer import BillLine, Offer
from rubberband.values.plan import Market, PlanningConstraints, Stage, StagePlan
from rubberband.views.formatting import Row, TextTable, bill, difference, rounded, time_unit_s, usd, usd_decimals

if TYPE_CHECKING:  # networkx is slow to import
    from rubberband.planner import CriticalTask, SimulatedPlan

POLICIES = {
    "optimal": "elastic, the cheapest plan",
    "static": "fixed cluster of the best size",
    "naive_elastic": "elastic, same GPUs per trial",
    "greedy": "elastic, greedy search",
    USER_PLAN: "the given plan",
}
_FASTEST = "elastic, the fastest plan"
_PLANS = {
    "optimal": "cheapest plan",
    "static": "best fixed cluster",
    "naive_elastic": "best plan with the same GPUs per trial throughout",
    "greedy": "greedy plan",
    USER_PLAN: "given plan",
}
TICK = "✓"
_NOTE_WIDTH = 118
_STAGE_FIGURES = ("launch", "duration", "cost (USD)")
_MARKETS: dict[Market, str] = {"spot": "on the spot market", "on_demand": "on demand"}


def headlines(answer: Estimate) -> list[str]:
    """Return time and cost, whether the limits hold, and the savings by elasticity and adaptive batches."""
    if answer.job is None:
        types = dict.fromkeys([answer.offer.instance_type, *(one.instance_type for one in answer.options)])
        named = " and ".join(limits(answer.constraints))
        return [f"{answer.experiment_name}: no plan keeps {named} on {', '.join(types)}"]
    prediction = answer.job.prediction
    takes = f"{format_duration(prediction.jct_s)} and {format_usd(prediction.cost_usd)}"
    mean = " on average" if prediction.jct is not None else ""
    fastest = (answer.policy, answer.problem.objective) == ("optimal", "min_time")
    kind = "fastest plan" if fastest else _PLANS[answer.policy]
    lines = [f"{answer.experiment_name}: {takes}{mean}; {kind} on {answer.offer.instance_type}", _kept(answer)]
    return [*lines, *(line for line in (saving(answer), batch_saving(answer)) if line)]


def _instances(offer: Offer) -> str:
    """Return `p3.8xlarge (4 GPUs, 12.24 USD/h)`."""
    if offer.unit != "USD":
        return f"{offer.instance_type} ({counted(offer.gpus, offer.place)})"
    price = f"{format_usd(offer.price_usd_per_hour)}/h"
    if offer.spot is not None:
        price += f" on demand, {format_usd(offer.spot.price_usd_per_hour)}/h on spot"
    return f"{offer.instance_type} ({counted(offer.gpus, offer.place)}, {price})"


def limits(constraints: PlanningConstraints) -> list[str]:
    """Return the limits that are set: `the deadline of 20m`, `the budget of 40.00 USD`."""
    named = []
    if constraints.deadline_s is not None:
        named.append(f"the deadline of {format_duration(constraints.deadline_s)}")
    if constraints.max_cost_usd is not None:
        named.append(f"the budget of {format_usd(constraints.max_cost_usd)}")
    return named


def _kept(answer: Estimate) -> str:
    """Return whether the limits hold, and with which probability."""
    constraints, job = answer.constraints, answer.job
    assert job is not None, "the caller has a plan"
    named = " and ".join(limits(constraints))
    if not named:
        return "no deadline and no budget are set"
    asked = f"{percent(constraints.confidence)} asked"
    if job.odds is None:
        return f"within {named} ({asked}; no noise is assumed)" if answer.feasible else f"not within {named}"
    within = "within" if answer.feasible else "not surely within"
    return f"{within} {named}, with a probability of {percent(job.odds.p_both)} ({asked})"


def broken_limits(answer: Estimate) -> str:
    """Return the limits that a plan breaks: `the deadline of 20m (it takes 28m19s)`."""
    job, asked = answer.job, answer.constraints
    assert job is not None, "the caller has a plan"
    if job.odds is not None:
        return f"{' and '.join(limits(asked))} with {percent(asked.confidence)} but with {percent(job.odds.p_both)}"
    in_time, in_budget = meets(job.prediction, asked, reserve_usd=job.reserve_usd)
    deadline = limits(replace(asked, max_cost_usd=None)) if not in_time else []
    budget = limits(replace(asked, deadline_s=None)) if not in_budget else []
    broken = [f"{name} (it takes {format_duration(job.prediction.jct_s)})" for name in deadline]
    broken += [f"{name} (it costs {format_usd(job.prediction.cost_usd)})" for name in budget]
    return " and ".join(broken)


def percent(share: float) -> str:
    """Return a probability, never rounded up to certainty."""
    percent = math.floor(1000 * share + 1e-9) / 10 if share > 0.5 else round(100 * share, 1)
    return f"{percent:g} %"


def saving(answer: Estimate) -> str:
    """Return the saving against the best cluster of a fixed size; empty if it was not compared."""
    fixed, was_compared = fixed_cluster(answer), any(one.policy == "static" for one in answer.options)
    if answer.job is None or not answer.feasible or answer.policy == "static" or not was_compared:
        return ""
    if fixed is None:
        return "elasticity makes it possible: no cluster of a fixed size is within the limits"
    now, then = answer.job.prediction, fixed.prediction
    if then.cost_usd <= 0:
        return ""
    most = sum(max(choice.instances for choice in lane.planned.plan.stages) for lane in fixed.lanes)
    it = (
        f"the best fixed cluster ({counted(most, 'instance')}) takes "
        f"{format_duration(then.jct_s)} and {format_usd(then.cost_usd)}"
    )
    faster = answer.problem.objective == "min_time"
    share = 100 * (1 - (now.jct_s / then.jct_s if faster else now.cost_usd / then.cost_usd))
    if share <= -0.5:
        return f"this plan {'takes' if faster else 'costs'} {-share:.0f} % more than a fixed cluster: {it}"
    return f"elasticity saves {abs(share):.0f} %{' of the time' * faster}: {it}"


def batch_saving(answer: Estimate) -> str:
    """Return the saving against the best plan with a fixed batch; empty if it was not compared."""
    if answer.job is None or not answer.feasible or answer.problem.batch == "fixed" or not answer.options:
        return ""
    if answer.fixed_batch is None:
        return "adapting the batch makes it possible: no plan with a fixed batch is within the limits"
    now, fixed = answer.job.prediction, answer.fixed_batch.prediction
    it = f"with a fixed batch it takes {format_duration(fixed.jct_s)} and {format_usd(fixed.cost_usd)}"
    less_usd = 1 - now.cost_usd / fixed.cost_usd if fixed.cost_usd > 0 else 0.0
    less_s = 1 - now.jct_s / fixed.jct_s
    faster = answer.problem.objective == "min_time" or fixed.cost_usd <= 0
    less = 100 * (less_s if faster else less_usd)
    share = f"{less:.0f} %{' of the time' * faster}" if less >= 0.5 else "nothing"
    return f"adapting the batch saves {share}: {it}"


def fixed_cluster(answer: Estimate) -> JobPlan | None:
    """Return the best cluster of a fixed size on the same instances, within the limits."""
    return answer.job if answer.policy == "static" else answer.baselines.get("static")


def tables(
    answer: Estimate, known: Sequence[Assumption], notes: Sequence[str] = (), lines: Sequence[BillLine] = ()
) -> list[TextTable]:
    """Return the tables, the most important first; `notes` are about the profile, `lines` are those of the bill."""
    found = [
        *([stage_table(answer)] if answer.job is not None else []),
        bill(lines),
        remedy_table(answer),
        *quantile_tables(answer),
        option_table(answer),
        deadline_table(answer),
        assumption_table(known, notes),
    ]
    return [table for table in found if table.rows]


def screen_tables(answer: Estimate, notes: Sequence[str] = ()) -> list[TextTable]:
    """Return the tables of one screen: stages (or remedies), options, and four other deadlines.

    It also shows those `notes` that are about the profile's times, fetches, a Ray cluster, gangs, the search and its
    early end, asynchronous training, checkpoints or a pool.
    """
    first = remedy_table(answer) if answer.job is None else stage_table(answer)
    shown = tuple(note for note in first.notes if "extrapolated" in note or note.startswith("One fleet"))
    subjects = (
        "times:",
        "fetch:",
        "cluster:",
        "gang:",
        "space:",
        "space.",
        "sampler:",
        "async:",
        "checkpoints:",
        "pool:",
        "stop:",
        "search.stop.",
    )
    shown += tuple(note for note in notes if note.startswith(subjects))
    others = [replace(table, notes=()) for table in (option_table(answer), deadline_table(answer, most=4))]
    return [table for table in (replace(first, notes=shown), *others) if table.rows]


def stage_table(answer: Estimate) -> TextTable:
    """Return a row for each stage, and totals: times add up in each lane, costs to the bill.

    A launch is SCALE and INIT. Each lane has a row with its sum, and the head node that lanes share has its own row.
    """
    job = answer.job
    assert job is not None, "the caller has a plan"
    decimals = usd_decimals(job.prediction.cost_usd)
    costs_usd = rounded([*(stage.cost_usd for stage in job.prediction.stages), job.head_usd], 10**-decimals)
    header = _stage_header(answer)
    rows: list[Row] = []
    first = 0
    for at, lane in enumerate(job.lanes):
        lane_usd = costs_usd[first : first + len(lane.stages)]
        first += len(lane.stages)
        lane_rows = _lane_rows(answer, at, lane, lane_usd, decimals)
        rows += lane_rows if len(job.lanes) > 1 else lane_rows[:-1]
    blank = [""] * (len(header) - len(_STAGE_FIGURES) - 1)
    if len(job.lanes) > 1:
        if job.head_usd > 0:
            rows.append(("head node", *blank, "", "", usd(costs_usd[-1], decimals)))
        unit_s = _unit_s(job)
        total = ("total", *blank, "", format_duration(round(job.prediction.jct_s / unit_s) * unit_s))
    else:
        total = ("total", *blank, *lane_rows[-1][-3:-1])
    return TextTable(
        title=f"Stages{', in lanes side by side,' * (len(job.lanes) > 1)} on {_instances(answer.offer)}",
        header=header,
        rows=tuple(rows),
        total=(*total, usd(sum(costs_usd), decimals)),
        words=frozenset({0}),
        notes=tuple(_stage_notes(answer, job)),
    )


def _stage_header(answer: Estimate) -> Row:
    several = len(answer.brackets) > 1
    lead = ("lane", "bracket") if several else ()
    market = ("market",) if _mixed(answer) else ()
    gpus = f"{answer.offer.place}s/trial"
    return (*lead, "stage", "trials", "iterations", "instances", *market, gpus, *_STAGE_FIGURES)


def _mixed(answer: Estimate) -> bool:
    """Whether the stages are on different markets."""
    assert answer.job is not None, "the caller has a plan"
    return len({choice.market for choice in answer.job.plan.stages}) > 1


def _lane_rows(answer: Estimate, at: int, lane: Lane, costs_usd: list[float], decimals: int) -> list[Row]:
    """Return the rows of one lane, and their sum."""
    assert answer.job is not None, "the caller has a plan"
    unit_s = _unit_s(answer.job)
    stages = lane.planned.prediction.stages
    times_s = rounded([time_s for stage in stages for time_s in (stage.provisioning_s, stage.duration_s)], unit_s)
    several = len(answer.brackets) > 1
    rows: list[Row] = []
    for index, (bracket, rung) in enumerate(answer.rungs(lane)):
        lead = (str(at), str(bracket), str(rung)) if several else (str(rung),)
        middle = _stage(answer, lane.stages[index], lane.planned.plan.stages[index])
        times = (format_duration(times_s[2 * index]), format_duration(times_s[2 * index + 1]))
        rows.append((*lead, *middle, *times, usd(costs_usd[index], decimals)))
    sums = (format_duration(sum(times_s[0::2])), format_duration(sum(times_s[1::2])), usd(sum(costs_usd), decimals))
    blank = [""] * (len(rows[0]) - 1 - len(sums))
    return [*rows, (f"lane {at}", *blank, *sums)]


def _stage(answer: Estimate, stage: Stage, choice: StagePlan) -> Row:
    market = (choice.market.replace("_", " "),) if _mixed(answer) else ()
    iterations = f"up to {stage.iterations}" if not stage.has_sync else str(stage.iterations)
    each = gpus_each(choice.gpus_per_trial, answer.offer.trials_per_gpu)
    return str(stage.trials), iterations, str(choice.instances), *market, each


def _unit_s(job: JobPlan) -> float:
    return 1.0 if job.prediction.jct_s >= 60 else 0.01


def _stage_notes(answer: Estimate, job: JobPlan) -> list[str]:
    mean = "Expected (mean) values; costs " if job.prediction.jct is not None else "Costs "
    notes = [f"{mean}cover {covers(answer.offer)}."]
    if answer.offer.spot is not None and not _mixed(answer):
        notes.append(f"All instances are bought {_MARKETS[job.plan.stages[0].market]}.")
    if answer.constraints.max_cost_usd is not None and any(one.market == "spot" for one in job.plan.stages):
        assert answer.offer.spot is not None, "a plan uses the markets that its offer has"
        notes.append(
            f"Spot is expected to cost {format_usd(answer.offer.spot.price_usd_per_hour)}/h. Its price may rise every "
            f"hour, so max_cost reserves the maximum price of {format_usd(answer.offer.price_usd_per_hour)}/h for the "
            "leases of spot instances."
        )
    if not answer.problem.has_sync:
        notes.append(answer.problem.stages[0].rungs.in_words)
    if (exchange := answer.problem.stages[0].exchange) is not None:
        notes.append(exchange.in_words(answer.problem.stages[0].trials))
    if len(job.lanes) > 1:
        notes.append(
            "Lanes run at the same time on their own instances. Costs add up, and the job ends with the last lane."
        )
    if job.prediction.extrapolated:
        place, counts = answer.offer.place, ", ".join(str(gpus) for gpus in job.prediction.extrapolated)
        notes.append(
            f"{counts} {place}s per trial are extrapolated: the profile ends at {answer.profile.largest_gpus}, and "
            f"more {place}s are assumed to be no faster."
        )
    return notes


def covers(offer: Offer) -> str:
    """Return the costs that an estimate includes, and those that it leaves out."""
    if offer.billing == "per_function":
        parts = ["the GPUs of trials while they start up and train (billed per function)"]
    else:
        minimum = f", at least {format_duration(offer.minimum_billed_s)} each" if offer.minimum_billed_s else ""
        parts = [f"instances from the end of their provisioning to their release, per second{minimum}"]
    parts += [
        f"{cost.line} ({format_usd(cost.usd_per_hour)}/h each)"
        if cost.usd_per_hour
        else f"{cost.line} ({format_usd(cost.usd_once)} per instance started)"
        for cost in offer.side_costs
    ]
    if offer.data_usd_per_instance:
        parts.append(f"data ({format_usd(offer.data_usd_per_instance)} per instance started)")
    if offer.head_price_usd_per_hour:
        parts.append(f"the head node ({format_usd(offer.head_price_usd_per_hour)}/h from start to end)")
    out = ["profiling", "the storage of checkpoints" if offer.side_costs else "storage"]
    out += [] if offer.data_usd_per_instance else ["data transfer"]
    out += [] if offer.head_price_usd_per_hour else ["a head node"]
    return f"{', '.join(parts)}; not {', '.join(out[:-1])} or {out[-1]}"


def remedy_table(answer: Estimate) -> TextTable:
    """Return the changes that make a plan possible, the best first."""
    return TextTable(
        title="Remedies",
        header=("", "time", "cost (USD)", "concedes"),
        rows=tuple(
            (settings(each), format_duration(each.jct_s), usd(each.cost_usd), concessions(each) or "nothing")
            for each in answer.remedies
        ),
        notes=("Each is the smallest change that makes a plan possible. Changes that cost nothing come first.",),
    )


def quantile_tables(answer: Estimate) -> list[TextTable]:
    """Return the distributions of time and cost; no table if they do not vary."""
    prediction, odds, asked = answer.prediction, answer.odds, answer.constraints
    if prediction is None or prediction.jct is None or prediction.cost is None or odds is None:
        return []
    decimals = usd_decimals(prediction.cost.p95)
    unit_s = time_unit_s(prediction.jct.p95)
    deadline = "none" if asked.deadline_s is None else format_duration(asked.deadline_s)
    budget = "none" if asked.max_cost_usd is None else usd(asked.max_cost_usd, decimals)
    jct, cost = ((one.mean, one.p10, one.p50, one.p90, one.p95) for one in (prediction.jct, prediction.cost))
    time_row = [format_duration(round(value / unit_s) * unit_s) for value in jct]
    cost_row = [usd(value, decimals) for value in cost]
    note = (
        f"Both limits hold with {percent(odds.p_both)}, {percent(asked.confidence)} asked; from "
        f"{counted(prediction.num_samples, 'sample')} with seed {answer.problem.seed}. "
        "p95: 95 % of the runs stay below."
    )
    return [
        TextTable(
            title="How time and cost vary",
            header=("", "mean", "p10", "p50", "p90", "p95", "limit", "P(holds)"),
            rows=(
                ("time", *time_row, deadline, percent(odds.p_deadline)),
                ("cost (USD)", *cost_row, budget, percent(odds.p_budget)),
            ),
            notes=(note,),
        )
    ]


def simulation_tables(answer: Estimate, simulation: SimulatedPlan | None) -> list[TextTable]:
    """Return the quantiles of the simulated DAG beside the plan's own figures, and its critical path."""
    if simulation is None or answer.prediction is None:
        return []
    figures = simulation.to_json()
    jct, cost = ([figures[key][at] for at in ("mean", "p5", "p50", "p95")] for key in ("jct_s", "cost_usd"))
    decimals, unit_s = usd_decimals(cost[-1]), time_unit_s(jct[-1])
    prediction = answer.prediction
    times = [format_duration(round(value / unit_s) * unit_s) for value in (prediction.jct_s, *jct)]
    path = ", ".join(f"{_named(answer, task)} {task.kind} {100 * task.share:.1f} %" for task in simulation.critical)
    return [
        TextTable(
            title=f"The plan's DAG, simulated {counted(figures['num_samples'], 'time')}",
            header=("", "planned", "mean", "p5", "p50", "p95"),
            rows=(("time", *times), ("cost (USD)", *(usd(value, decimals) for value in (prediction.cost_usd, *cost)))),
            notes=tuple(textwrap.wrap(f"Critical path: {path}.", _NOTE_WIDTH)),
        )
    ]


def _named(answer: Estimate, task: CriticalTask) -> str:
    """Return a stage as the table of stages names it."""
    if answer.job is None or len(answer.brackets) == 1:
        return f"stage {task.stage}"
    bracket, rung = answer.rungs(answer.job.lanes[task.lane])[task.stage]
    return f"bracket {bracket} stage {rung}"


def option_table(answer: Estimate) -> TextTable:
    """Return the chosen plan, ticked, and other plans with their difference by the objective or a broken limit."""
    if all(option.job is None for option in answer.options):
        return TextTable(title="", header=(), rows=())
    jobs = [answer.job, *(option.job for option in answer.options)]
    decimals = usd_decimals(max(job.prediction.cost_usd for job in jobs if job is not None))
    rows: list[Row] = []
    if answer.job is not None:
        label = f"{TICK} {_called(answer, answer.policy)}{_on(answer, None)}"
        rows.append((label, *_figures(answer.job, decimals), "chosen"))
    notes = []
    for option in answer.options:
        label = _called(answer, option.policy, option.scheduler) + _on(answer, option)
        if option.job is None:
            rows.append((f"  {label}", "none", "-", "-", "not within the limits"))
            notes.append(f"{label}: {option.reason}.")
        else:
            rows.append((f"  {label}", *_figures(option.job, decimals), _difference(answer, option)))
    return TextTable(
        title="Options",
        header=("", "instances", "time", "cost (USD)", "difference"),
        rows=tuple(rows),
        words=frozenset({0, 1, 4}),
        notes=tuple(notes),
    )


def _difference(answer: Estimate, option: Option) -> str:
    """Return the difference of an option from the plan by the objective, or the limit that it breaks."""
    job, asked = option.job, answer.constraints
    assert job is not None, "the caller has a plan"
    if not keeps(job, asked):
        if job.odds is not None:
            return f"too risky: {percent(job.odds.p_both)}"
        return "over the budget" if meets(job.prediction, asked)[0] else "past the deadline"
    if answer.job is None:
        return ""
    now, then = answer.job.prediction, job.prediction
    faster = answer.problem.objective == "min_time"
    by_time = _more(difference(then.jct_s, now.jct_s), "time")
    by_cost = _more(difference(then.cost_usd, now.cost_usd), "cost")
    change, other = (by_time, by_cost) if faster else (by_cost, by_time)
    if option.scheduler:
        return f"{change}, {other}" + f" (scheduler {option.scheduler})" * change.startswith("-")
    better = change.startswith("-") and option.policy != answer.policy
    remedy = f" (--policy {option.policy})" if better else ""
    if change.startswith("same"):
        return change if other.startswith("same") else f"{change}, {other}"
    return f"{change}{remedy}"


def _called(answer: Estimate, policy: str, scheduler: str = "") -> str:
    """Return what a plan is called: by its policy, unless the scheduler is another one, or has no SYNC."""
    scheduler = scheduler or answer.problem.stages[0].scheduler
    return SCHEDULERS[scheduler].label if scheduler else _policy(policy, answer.problem.objective)


def _more(change: str, what: str) -> str:
    """Return `+22 % cost` or `same cost`."""
    return f"same {what}" if change in ("", "0 %") else f"{change} {what}"


def _policy(policy: str, objective: str) -> str:
    return _FASTEST if (policy, objective) == ("optimal", "min_time") else POLICIES[policy]


def _on(answer: Estimate, option: Option | None) -> str:
    """Return the differences of an option besides its policy."""
    name = answer.offer.instance_type if option is None else option.instance_type
    types = {answer.offer.instance_type, *(one.instance_type for one in answer.options)}
    words = [f"on {name}"] if len(types) > 1 else []
    if answer.offer.spot is not None or any(one.spot for one in answer.options):
        spot = answer.offer.spot is not None if option is None else option.spot
        words.append("spot where it pays" if spot else "on demand only")
    batch = answer.problem.batch if option is None else option.batch
    if batch == "fixed" and "goodput" in (answer.problem.batch, *(one.batch for one in answer.options)):
        words.append("fixed batch")
    return f", {', '.join(words)}" if words else ""


def _figures(job: JobPlan, decimals: int) -> Row:
    return instances(job), format_duration(job.prediction.jct_s), usd(job.prediction.cost_usd, decimals)


def instances(job: JobPlan) -> str:
    """Return the instances of the stages, such as `8 > 3 > 1`, with + between lanes."""
    lanes = [
        " > ".join(str(count) for count, _ in itertools.groupby(c.instances for c in lane.planned.plan.stages))
        for lane in job.lanes
    ]
    return " + ".join(f"({lane})" if len(lanes) > 1 and ">" in lane else lane for lane in lanes)


def deadline_table(answer: Estimate, most: int = 7) -> TextTable:
    """Return the cost at up to `most` other deadlines: elastic, with a fixed cluster, and the difference."""
    if len(answer.frontier) < 2:
        return TextTable(title="", header=(), rows=())
    decimals = usd_decimals(answer.frontier[0][1])
    chosen = "" if answer.job is None else usd(answer.job.prediction.cost_usd, decimals)
    others = [point for point in answer.frontier if usd(point[1], decimals) != chosen]
    rows: list[Row] = []
    is_elastic = answer.problem.has_sync
    for deadline_s, cost_usd in _some(others, decimals, most):
        in_time_usd = (usd for jct_s, usd in answer.static_frontier if jct_s <= deadline_s + 1e-6)
        fixed_usd = min(in_time_usd, default=None)
        fixed = ("none" if fixed_usd is None else usd(fixed_usd, decimals),) if is_elastic else ()
        deadline, change = format_duration(math.ceil(deadline_s - 1e-6)), _at_deadline(answer, deadline_s, cost_usd)
        rows.append((deadline, usd(cost_usd, decimals), *fixed, change))
    costs = ("elastic (USD)", "fixed cluster (USD)") if is_elastic else ("cost (USD)",)
    return TextTable(
        title="Other deadlines",
        header=("deadline", *costs, "difference"),
        rows=tuple(rows),
        words=frozenset({0, 1 + len(costs)}),
        notes=(_frontier_note(answer),),
    )


def _at_deadline(answer: Estimate, deadline_s: float, cost_usd: float) -> str:
    """Return the difference of a deadline's cheapest plan from the chosen plan, or the limit that it breaks."""
    asked = answer.constraints
    if asked.max_cost_usd is not None and cost_usd + answer.problem.least_reserve_usd > asked.max_cost_usd + 1e-9:
        return "over the budget"
    late = ", past your deadline" if asked.deadline_s is not None and deadline_s > asked.deadline_s + 1e-6 else ""
    if answer.job is None:
        return late.removeprefix(", ")
    change = difference(cost_usd, answer.job.prediction.cost_usd)
    if answer.problem.objective == "min_time" and deadline_s > answer.job.prediction.jct_s:
        late = late or ", slower"
    elif change.startswith("-") and answer.policy != "optimal":
        late = late or " (--policy optimal)"
    return f"{change} cost{late}" if change else late.removeprefix(", ")


def _frontier_note(answer: Estimate) -> str:
    budget = "" if answer.constraints.max_cost_usd is None else ", ignoring the budget"
    note = f"The cheapest plan for each deadline on {answer.offer.instance_type}{budget}"
    if not varies(answer.profile, answer.offer) and not answer.problem.stages[0].rungs.promotes:
        return f"{note}."
    if len(answer.brackets) > 1:
        return f"{note}; no noise is assumed."
    kept = percent(answer.constraints.confidence)
    return f"{note}; met with a probability of {kept}; mean costs, from fewer samples than the plan's."


def _some(points: Sequence[Point], decimals: int, most: int) -> list[Point]:
    """Return up to `most` points with different written costs: both ends, and some at about equal ratios."""
    different = [
        point
        for at, point in enumerate(points)
        if not at or usd(point[1], decimals) != usd(points[at - 1][1], decimals)
    ]
    if len(different) <= most:
        return different
    first_s, last_s = different[0][0], different[-1][0]
    wanted_s = [first_s * (last_s / first_s) ** (at / (most - 1)) for at in range(most)]
    return sorted({min(different, key=lambda point: abs(point[0] - time_s)) for time_s in wanted_s})


def assumption_table(known: Sequence[Assumption], notes: Sequence[str] = ()) -> TextTable:
    """Return the assumptions, the largest effect on the cost first."""
    decimals = usd_decimals(max((abs(one.effect_usd) for one in known), default=0.0))
    rows = tuple(
        (
            one.name,
            one.value,
            one.basis,
            one.change,
            _signed(one.effect_usd, f"{one.effect_usd:+,.{decimals}f}"),
            _signed(one.effect_s, _more_time(one.effect_s)),
            {0.0: "no", 1.0: "yes"}.get(one.p_kept, percent(one.p_kept)),
        )
        for one in known
    )
    live = "live: AWS's price today; " if any(one.basis == "live" for one in known) else ""
    return TextTable(
        title="Assumptions",
        header=("", "assumed", "source", "if it is", "cost (USD)", "time", "limits hold"),
        rows=rows,
        words=frozenset({0, 1, 2, 3}),
        notes=(
            "The largest effect on the cost comes first. Each effect is on this plan; a new plan may reduce it.",
            f"measured: in a profile file; given: in the experiment file; {live}default: RubberBand's assumption.",
            *notes,
        ),
    )


def _signed(value: float, text: str) -> str:
    return "0" if value == 0 or not any(sign in "123456789" for sign in text) else text


def _more_time(seconds: float) -> str:
    unit_s = time_unit_s(abs(seconds))
    return ("+" if seconds > 0 else "-") + format_duration(round(abs(seconds) / unit_s) * unit_s)
