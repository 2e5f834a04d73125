"""An estimate as headlines and tables of text: what `rubberband estimate` says, whichever form it is given in. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from rubberband.planner.assumptions import Assumption
from rubberband.planner.brackets import JobPlan
from rubberband.planner.estimate import USER_PLAN, Estimate, Option, Point, keeps
from rubberband.planner.sampling import varies
from rubberband.planner.search import meets
from rubberband.planner.wording import concessions, settings
from rubberband.units import format_duration, format_usd
from rubberband.values.offer import BillLine
from rubberband.values.plan import Distribution, PlanningConstraints
from rubberband.views.estimate_stages import stage_table
from rubberband.views.tables import Row, TextTable, bill
from rubberband.views.words import counted, difference, time_unit_s, usd, usd_decimals

POLICIES = {
    "optimal": "elastic, the cheapest plan",
    "static": "fixed cluster of the best size",
    "naive_elastic": "elastic, the same GPUs per trial throughout",
    "greedy": "elastic, by the paper's greedy search",
    USER_PLAN: "the given plan",
}
_FASTEST = "elastic, the fastest plan"
_PLANS = {
    "optimal": "optimal plan",
    "static": "plan for a fixed cluster",
    "naive_elastic": "plan with the same GPUs per trial throughout",
    "greedy": "greedy plan",
    USER_PLAN: "given plan",
}


def headlines(answer: Estimate) -> list[str]:
    """The answer for someone in a hurry: what it takes and costs, on what, within which limits, and what it saves."""
    offer = answer.offer
    gpus = f"{counted(offer.gpus, 'GPU')}, {format_usd(offer.price_usd_per_hour)}/h"
    if offer.spot is not None:
        gpus += f" on demand, {format_usd(offer.spot.price_usd_per_hour)}/h on spot"
    if answer.job is None:
        return [
            f"{answer.experiment_name}: no plan keeps {' and '.join(limits(answer.constraints))} on {_types(answer)}"
        ]
    prediction = answer.job.prediction
    takes = f"{format_duration(prediction.jct_s)} and {format_usd(prediction.cost_usd)}"
    mean = " on average" if prediction.jct is not None else ""
    kind = _PLANS[answer.policy]
    lines = [f"{answer.experiment_name}: {takes}{mean}; {kind} on {offer.instance_type} ({gpus})", _kept(answer)]
    return [*lines, *(line for line in (saving(answer), batch_saving(answer)) if line)]


def _types(answer: Estimate) -> str:
    return ", ".join(dict.fromkeys([answer.offer.instance_type, *(one.instance_type for one in answer.options)]))


def limits(constraints: PlanningConstraints) -> list[str]:
    """`the deadline of 20m`, `the budget of 40.00 USD`: those that are set."""
    named = []
    if constraints.deadline_s is not None:
        named.append(f"the deadline of {format_duration(constraints.deadline_s)}")
    if constraints.max_cost_usd is not None:
        named.append(f"the budget of {format_usd(constraints.max_cost_usd)}")
    return named


def _kept(answer: Estimate) -> str:
    constraints, job = answer.constraints, answer.job
    assert job is not None, "the caller has a plan"
    asked = limits(constraints)
    if not asked:
        return "neither a deadline nor a budget is set"
    verdict = f"{' and '.join(asked)} {'are' if len(asked) > 1 else 'is'} {'kept' if answer.feasible else 'not kept'}"
    if job.odds is None:
        return verdict
    return f"{verdict}, with a probability of {percent(job.odds.p_both)} ({percent(constraints.confidence)} asked)"


def broken_limits(answer: Estimate) -> str:
    """`the deadline of 20m (it takes 28m19s)`: what a plan does not keep."""
    job, asked = answer.job, answer.constraints
    assert job is not None, "the caller has a plan"
    if job.odds is not None:
        return f"{' and '.join(limits(asked))} with {percent(asked.confidence)} but with {percent(job.odds.p_both)}"
    in_time, in_budget = meets(job.prediction, asked)
    deadline = limits(replace(asked, max_cost_usd=None)) if not in_time else []
    budget = limits(replace(asked, deadline_s=None)) if not in_budget else []
    broken = [f"{name} (it takes {format_duration(job.prediction.jct_s)})" for name in deadline]
    broken += [f"{name} (it costs {format_usd(job.prediction.cost_usd)})" for name in budget]
    return " and ".join(broken)


def percent(share: float) -> str:
    """A probability, never rounded up to certainty."""
    percent = math.floor(1000 * share + 1e-9) / 10 if share > 0.5 else round(100 * share, 1)
    return f"{percent:g} %"


def saving(answer: Estimate) -> str:
    """What elasticity saves against the best cluster of a fixed size; empty where that is no question."""
    fixed = fixed_cluster(answer)
    if (
        answer.job is None
        or not answer.feasible
        or answer.policy == "static"
        or all(one.policy != "static" for one in answer.options)
    ):
        return ""
    if fixed is None:
        return "elasticity makes it possible: no cluster of a fixed size keeps the limits"
    cost_usd, fixed_usd = answer.job.prediction.cost_usd, fixed.prediction.cost_usd
    if fixed_usd <= 0:
        return ""
    it = (
        f"the best fixed cluster ({counted(_widest(fixed), 'instance')}) takes "
        f"{format_duration(fixed.prediction.jct_s)} and {format_usd(fixed_usd)}"
    )
    percent = 100 * (1 - cost_usd / fixed_usd)
    if percent <= -0.5:
        return f"this plan costs {-percent:.0f} % more than a fixed cluster: {it}"
    return f"elasticity saves {abs(percent):.0f} %: {it}"


def batch_saving(answer: Estimate) -> str:
    """What adapting the batch saves against the best plan with a fixed one; empty where that is no question."""
    if answer.job is None or not answer.feasible or answer.case.batch == "fixed" or not answer.options:
        return ""
    if answer.fixed_batch is None:
        return "adapting the batch makes it possible: no plan with a fixed batch keeps the limits"
    now, fixed = answer.job.prediction, answer.fixed_batch.prediction
    it = f"with a fixed batch it takes {format_duration(fixed.jct_s)} and {format_usd(fixed.cost_usd)}"
    less_usd = 1 - now.cost_usd / fixed.cost_usd if fixed.cost_usd > 0 else 0.0
    less_s = 1 - now.jct_s / fixed.jct_s
    faster = answer.objective == "min_time" or fixed.cost_usd <= 0
    less = 100 * (less_s if faster else less_usd)
    share = f"{less:.0f} %{' of the time' * faster}" if less >= 0.5 else "nothing"
    return f"adapting the batch saves {share}: {it}"


def fixed_cluster(answer: Estimate) -> JobPlan | None:
    """The best cluster of a fixed size on the same instances, within the limits."""
    return answer.job if answer.policy == "static" else answer.baselines.get("static")


def _widest(job: JobPlan) -> int:
    """Instances of the whole job at most (of lanes: if they are widest at the same time)."""
    return sum(max(choice.instances for choice in lane.planned.plan.stages) for lane in job.lanes)


def tables(
    answer: Estimate, known: Sequence[Assumption], notes: Sequence[str] = (), lines: Sequence[BillLine] = ()
) -> list[TextTable]:
    """Everything there is to tell, in order of interest; `notes` are remarks on the profile, `lines` the bill's."""
    found = [
        *([stage_table(answer)] if answer.job is not None else []),
        bill(lines),
        remedy_table(answer),
        *quantile_tables(answer),
        option_table(answer),
        deadline_table(answer),
        assumption_table(answer, known, notes),
    ]
    return [table for table in found if table.rows]


def remedy_table(answer: Estimate) -> TextTable:
    """What would make it feasible, the best first."""
    return TextTable(
        title="Remedies",
        header=("", "time", "cost (USD)", "concedes"),
        rows=tuple(
            (settings(each), format_duration(each.jct_s), usd(each.cost_usd), concessions(each) or "nothing")
            for each in answer.remedies
        ),
        notes=("Each as little as suffices, with the plan that there is then; those that concede nothing come first.",),
    )


def quantile_tables(answer: Estimate) -> list[TextTable]:
    """How time and cost are distributed; nothing where they do not vary."""
    prediction, odds, asked = answer.prediction, answer.odds, answer.constraints
    if prediction is None or prediction.jct is None or prediction.cost is None or odds is None:
        return []
    decimals = usd_decimals(prediction.cost.p95)
    unit_s = time_unit_s(prediction.jct.p95)
    deadline = "none" if asked.deadline_s is None else format_duration(asked.deadline_s)
    budget = "none" if asked.max_cost_usd is None else usd(asked.max_cost_usd, decimals)
    time_row = [format_duration(round(value / unit_s) * unit_s) for value in _values(prediction.jct)]
    cost_row = [usd(value, decimals) for value in _values(prediction.cost)]
    note = (
        f"P(both limits kept) = {percent(odds.p_both)}, {percent(asked.confidence)} asked; from "
        f"{prediction.num_samples:,} samples with seed {answer.seed}. p95: 95 % of the runs stay below."
    )
    return [
        TextTable(
            title="How time and cost vary",
            header=("", "mean", "p10", "p50", "p90", "p95", "limit", "P(kept)"),
            rows=(
                ("time", *time_row, deadline, percent(odds.p_deadline)),
                ("cost (USD)", *cost_row, budget, percent(odds.p_budget)),
            ),
            notes=(note,),
        )
    ]


def _values(known: Distribution) -> tuple[float, ...]:
    return known.mean, known.p10, known.p50, known.p90, known.p95


def option_table(answer: Estimate) -> TextTable:
    """What else could be done, each against the best cluster of a fixed size."""
    if all(option.job is None for option in answer.options):
        return TextTable(title="", header=(), rows=())
    fixed = fixed_cluster(answer)
    found = [option.job for option in answer.options if option.job is not None]
    costs_usd = [job.prediction.cost_usd for job in found + ([answer.job] if answer.job else [])]
    decimals = usd_decimals(max(costs_usd, default=0.0))
    rows: list[Row] = []
    if answer.job is not None:
        label = f"this plan, {_policy(answer.policy, answer.objective)}{_on(answer, None)}"
        rows.append((label, *_figures(answer.job, fixed, decimals)))
    notes = []
    for option in answer.options:
        label = _policy(option.policy, answer.objective) + _on(answer, option)
        if option.job is None:
            rows.append((label, "none", "-", "-", "-"))
            notes.append(f"{label}: {option.reason}.")
        else:
            rows.append((label, *_figures(option.job, fixed, decimals)))
            if option.job.odds is not None and not keeps(option.job, answer.constraints):
                notes.append(f"{label}: keeps them with {percent(option.job.odds.p_both)} only.")
    return TextTable(
        title="Options",
        header=("", "instances", "time", "cost (USD)", "against fixed"),
        rows=tuple(rows),
        words=frozenset({0, 1}),
        notes=("Each within the same limits; the cost against that of the best cluster of a fixed size.", *notes),
    )


def _policy(policy: str, objective: str) -> str:
    return _FASTEST if (policy, objective) == ("optimal", "min_time") else POLICIES[policy]


def _on(answer: Estimate, option: Option | None) -> str:
    """What sets an option apart besides its policy."""
    name = answer.offer.instance_type if option is None else option.instance_type
    types = {answer.offer.instance_type, *(one.instance_type for one in answer.options)}
    words = [f"on {name}"] if len(types) > 1 else []
    if answer.offer.spot is not None or any(one.spot for one in answer.options):
        spot = answer.offer.spot is not None if option is None else option.spot
        words.append("spot where it pays" if spot else "on demand only")
    batch = answer.case.batch if option is None else option.batch
    if batch == "fixed" and any(one != "fixed" for one in (answer.case.batch, *(one.batch for one in answer.options))):
        words.append("fixed batch")
    return f", {', '.join(words)}" if words else ""


def _figures(job: JobPlan, fixed: JobPlan | None, decimals: int) -> Row:
    prediction = job.prediction
    against = "" if fixed is None else difference(prediction.cost_usd, fixed.prediction.cost_usd)
    return instances(job), format_duration(prediction.jct_s), usd(prediction.cost_usd, decimals), against


def instances(job: JobPlan) -> str:
    """`8 > 3 > 1` of the stages; lanes with + between them."""
    lanes = [
        " > ".join(str(count) for count, _ in itertools.groupby(c.instances for c in lane.planned.plan.stages))
        for lane in job.lanes
    ]
    return " + ".join(f"({lane})" if len(lanes) > 1 and ">" in lane else lane for lane in lanes)


def deadline_table(answer: Estimate) -> TextTable:
    """What the cost would be at other deadlines, elastic and fixed side by side."""
    if len(answer.frontier) < 2:
        return TextTable(title="", header=(), rows=())
    decimals = usd_decimals(answer.frontier[0][1])
    asked_s = answer.constraints.deadline_s
    deadlines_s = [jct_s for jct_s, _ in _some(answer.frontier, decimals)]
    if asked_s is not None and asked_s >= deadlines_s[0]:
        deadlines_s = sorted({*deadlines_s, asked_s})
    rows: list[Row] = []
    for deadline_s in deadlines_s:
        cost_usd, fixed_usd = _cheapest(answer.frontier, deadline_s), _cheapest(answer.static_frontier, deadline_s)
        assert cost_usd is not None, "the deadlines begin with the frontier"
        rows.append(
            (
                format_duration(math.ceil(deadline_s - 1e-6)) + (" (asked)" if deadline_s == asked_s else ""),
                usd(cost_usd, decimals),
                "none" if fixed_usd is None else usd(fixed_usd, decimals),
                "" if fixed_usd is None else difference(cost_usd, fixed_usd),
            )
        )
    return TextTable(
        title="Other deadlines",
        header=("deadline", "elastic (USD)", "fixed cluster (USD)", "elastic against fixed"),
        rows=tuple(rows),
        notes=(_frontier_note(answer),),
    )


def _frontier_note(answer: Estimate) -> str:
    budget = "" if answer.constraints.max_cost_usd is None else ", whatever the budget"
    note = f"The cheapest plan for each deadline on {answer.offer.instance_type}{budget}"
    if not varies(answer.profile, answer.offer):
        return f"{note}."
    if len(answer.brackets) > 1:
        return f"{note}; all times taken as fixed."
    kept = percent(answer.constraints.confidence)
    return f"{note}; kept with a probability of {kept}, mean costs, from fewer samples than the plan's."


def _some(points: Sequence[Point], decimals: int, most: int = 7) -> list[Point]:
    """A handful of a frontier that differ in the cost as it is shown: its ends, and some at about equal ratios."""
    told = [
        point
        for at, point in enumerate(points)
        if not at or usd(point[1], decimals) != usd(points[at - 1][1], decimals)
    ]
    if len(told) <= most:
        return told
    first_s, last_s = told[0][0], told[-1][0]
    wanted_s = [first_s * (last_s / first_s) ** (at / (most - 1)) for at in range(most)]
    return sorted({min(told, key=lambda point: abs(point[0] - time_s)) for time_s in wanted_s})


def _cheapest(points: Sequence[Point], deadline_s: float) -> float | None:
    """The lowest cost of a frontier within a deadline."""
    return min((cost_usd for jct_s, cost_usd in points if jct_s <= deadline_s + 1e-6), default=None)


def assumption_table(answer: Estimate, known: Sequence[Assumption], notes: Sequence[str] = ()) -> TextTable:
    """What the figures rest on, by its effect on the cost."""
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
    live = "live: as AWS asks; " if any(one.basis == "live" for one in known) else ""
    return TextTable(
        title="Assumptions, by their effect on the cost",
        header=("", "assumed", "source", "if it is", "cost (USD)", "time", "limits kept"),
        rows=rows,
        words=frozenset({0, 1, 2, 3}),
        notes=(
            "Effects are those on this plan, kept as it is; planned again, they may be smaller. measured: by a profile "
            f"file; given: in the experiment file; {live}default: what rubberband takes.",
            *notes,
        ),
    )


def _signed(value: float, text: str) -> str:
    return "0" if value == 0 or not any(sign in "123456789" for sign in text) else text


def _more_time(seconds: float) -> str:
    unit_s = time_unit_s(abs(seconds))
    return ("+" if seconds > 0 else "-") + format_duration(round(abs(seconds) / unit_s) * unit_s)
