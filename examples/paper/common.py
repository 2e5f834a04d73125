"""Parts that the paper's simulated experiments share: scaling curves, the instance, planning, and reports.

The paper is RubberBand (EuroSys '21). Its Table 1 has the only measured throughputs; both curves start there.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from page import Figure, write_page

from rubberband.cloud.catalogue import catalogue
from rubberband.planner import JobPlan, Objective, Problem, least_instances, plan, predict
from rubberband.values.offer import Billing, Offer, slots
from rubberband.values.plan import Plan, Planned, PlanningConstraints, Policy, Prediction, Stage, StagePlan, gang_sizes
from rubberband.values.profile import Law, Profile

PLACED = {1: 749.58, 2: 1480.07, 4: 2773.04}
"""GPUs -> samples per second of ResNet-50 with placement control (Table 1)."""
SCATTERED = {1: 673.76, 2: 947.76, 4: 1209.51}
"""The same without placement control, which is the flatter curve."""
CURVES: Mapping[str, Mapping[int, float]] = {"placed": PLACED, "scattered": SCATTERED}
MAX_GPUS_PER_TRIAL = 16
INSTANCE_TYPE, REGION = "p3.8xlarge", "us-east-1"
COLOURS = ("#3b82c4", "#e08a1e", "#2a9d6f", "#b565a7")

Verdict = Literal["agrees", "agrees in part", "differs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Statement of the paper and our result."""

    says: str
    verdict: Verdict
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Table of text with a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Printed and drawn results of one experiment."""

    title: str
    tables: Sequence[Table]
    figure: Figure
    findings: Sequence[Finding]
    assumptions: Sequence[str]


def verdict(*holds: bool) -> Verdict:
    """Return whether a statement holds in all, some or none of the cases."""
    return "agrees" if all(holds) else "agrees in part" if any(holds) else "differs"


def undivided_share(samples_per_s: Mapping[int, float]) -> float:
    """Return the share of an iteration that more GPUs do not shorten (Amdahl's law), from the speed-up with 4 GPUs."""
    return (4.0 * samples_per_s[1] / samples_per_s[4] - 1.0) / 3.0


def profile(
    samples_per_s: Mapping[int, float],
    iteration_s: float,
    *,
    share: float | None = None,
    law: Law = "normal",
    iteration_cv: float = 0.0,
    trial_cv: float = 0.0,
) -> Profile:
    """Return the seconds per iteration with 1 to 16 GPUs, `iteration_s` with one.

    1, 2 and 4 GPUs are as measured; beyond them (and everywhere, if `share` is given) Amdahl's law continues.
    """
    undivided = undivided_share(samples_per_s) if share is None else share
    seconds = {gpus: iteration_s * (undivided + (1.0 - undivided) / gpus) for gpus in (1, 2, 4, 8, 16)}
    if share is None:
        seconds |= {gpus: iteration_s * samples_per_s[1] / speed for gpus, speed in samples_per_s.items()}
    return Profile(seconds_per_iteration=seconds, law=law, iteration_cv=iteration_cv, trial_cv=trial_cv)


def p3_8xlarge(
    *, max_instances: int, billing: Billing = "per_instance", init_delay_s: float = 0.0, data_usd: float = 0.0
) -> Offer:
    """Return the paper's instance at the catalogue's price; `data_usd` is for the data set of one instance."""
    row = catalogue()[INSTANCE_TYPE]
    return Offer(
        instance_type=INSTANCE_TYPE,
        gpus=row.gpus,
        price_usd_per_hour=row.prices_usd_per_hour[REGION],
        max_instances=max_instances,
        billing=billing,
        init_delay_s=init_delay_s,
        data_usd_per_instance=data_usd,
    )


def best(
    stages: Sequence[Stage],
    job_profile: Profile,
    offer: Offer,
    deadline_s: float | None,
    policy: Policy,
    objective: Objective = "min_cost",
) -> Planned | None:
    """Return the policy's best plan in time (if times vary, with a probability of one half); None without one."""
    limits = PlanningConstraints(deadline_s=deadline_s, max_gpus_per_trial=MAX_GPUS_PER_TRIAL, confidence=0.5)
    found = plan(
        Problem(
            brackets=(stages,),
            profile=job_profile,
            offer=offer,
            constraints=limits,
            policy=policy,
            objective=objective,
        )
    )
    return found.lanes[0].planned if isinstance(found, JobPlan) else None


def fair_fixed(stages: Sequence[Stage], job_profile: Profile, offer: Offer, deadline_s: float) -> Prediction | None:
    """Return the cheapest fixed cluster in time whose GPUs are divided fairly among trials (§5); None without one."""
    sizes = gang_sizes(offer.gpus, 1, MAX_GPUS_PER_TRIAL)
    predictions = [
        predict(stages, fair_plan([instances] * len(stages), stages, offer, sizes), job_profile, offer)
        for instances in range(1, offer.max_instances + 1)
    ]
    in_time = [each for each in predictions if each.jct_s <= deadline_s + 1e-6]
    return min(in_time, key=lambda each: (each.cost_usd, each.jct_s), default=None)


def fair_plan(instances: Sequence[int], stages: Sequence[Stage], offer: Offer, sizes: Sequence[int]) -> Plan:
    """Return the plan in which all trials of a stage get the same GPUs at once, or one each if they must queue."""
    return Plan(
        stages=tuple(
            StagePlan(
                instances=count,
                gpus_per_trial=max((g for g in sizes if slots(count, offer.gpus, g) >= stage.trials), default=1),
            )
            for count, stage in zip(instances, stages, strict=True)
        )
    )


def fewest_instances(plan: Plan, stages: Sequence[Stage], offer: Offer) -> Plan:
    """Return the plan without instances that no trial of a stage can use."""
    choices = []
    for choice, stage in zip(plan.stages, stages, strict=True):
        useful = least_instances(stage.trials, offer.gpus, choice.gpus_per_trial)
        choices.append(replace(choice, instances=min(choice.instances, useful)))
    return Plan(stages=tuple(choices))


def common_assumptions() -> list[str]:
    """Return the assumptions of every figure."""
    price = p3_8xlarge(max_instances=1).price_usd_per_hour
    placed, scattered = (f"{100.0 * undivided_share(curve):.1f} %" for curve in (PLACED, SCATTERED))
    return [
        f"{INSTANCE_TYPE}: 4 V100, {price:g} USD per hour ({REGION}, catalogue), billed per second, at least 60 s.",
        "Scaling: Figure 4 has no numbers, so ResNet-50's throughput with 1, 2 and 4 GPUs is Table 1's (batch 1024, "
        f"p3.16xlarge); 'placed' is with placement control. Beyond 4 GPUs Amdahl's law continues with the share that "
        f"more GPUs do not shorten: {placed} placed, {scattered} scattered (no placement control). At most "
        f"{MAX_GPUS_PER_TRIAL} GPUs per trial.",
        "'fixed' is policy static: the cheapest number of instances throughout, with the best GPUs per trial in every "
        "stage. 'elastic' is policy optimal, which is exact where nothing varies; the paper's greedy is not.",
    ]


def usd(amount_usd: float | None) -> str:
    """Return an amount, or a dash without a plan."""
    return "-" if amount_usd is None else f"{amount_usd:.2f}"


def ratio(over: float | None, under: float | None) -> str:
    """Return `over` divided by `under`."""
    return "-" if over is None or under is None else f"{over / under:.2f}x"


def cells(*values: str | float | None) -> tuple[str, ...]:
    """Return text as it is, whole numbers in full, other numbers as amounts, None as a dash."""
    return tuple(
        value if isinstance(value, str) else str(value) if isinstance(value, int) else usd(value) for value in values
    )


def needed(planned: Planned | None) -> Planned:
    """Return the plan of a case that must have one."""
    assert planned is not None, "these deadlines leave a plan"
    return planned


def cost_usd(planned: Planned | None) -> float | None:
    """Return the predicted cost of a plan, if there is one."""
    return None if planned is None else planned.prediction.cost_usd


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, axis: int = 1, **more: Any) -> dict[str, Any]:
    """Return a line with markers in panel `axis` (from 1); its name is in the legend once."""
    dash, width = more.pop("dash", "solid"), more.pop("width", 2.5)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "showlegend": axis == 1,
        "x": list(x),
        "y": list(y),
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "line": {"color": colour, "width": width, "dash": dash},
        "marker": {"color": colour, "size": 4 + 1.3 * width},
        **more,
    }


def show(compute: Callable[..., Report], *, data: str = "") -> None:
    """Run an example: print the report, and with --html write it as one self-contained page.

    With `data`, its help, the example has an argument: a folder that `compute` gets.
    """
    parser = argparse.ArgumentParser(description="One of the paper's simulated experiments.")
    if data:
        parser.add_argument("data", metavar="DATA", type=Path, help=data)
    parser.add_argument("--html", metavar="PATH", help="write tables and plot as one page, too")
    asked = parser.parse_args()
    report = compute(asked.data) if data else compute()
    print(as_text(report))
    if asked.html:
        try:
            write_page(asked.html, report)
        except OSError as error:
            raise SystemExit(f"--html {asked.html}: {error}; choose a path that can be written") from None
        print(f"\nwritten: {asked.html}")


def as_text(report: Report) -> str:
    """Return the report for a terminal."""
    blocks = [report.title, *(_text_table(table) for table in report.tables)]
    blocks.append("The paper's words, and what was found")
    blocks += [
        f"{_wrapped(f'[{each.verdict}] “{each.says}”', '  ')}\n{_wrapped(each.found, '    ')}"
        for each in report.findings
    ]
    blocks.append("\n".join(["Assumptions", *(_wrapped(f"- {each}", "  ") for each in report.assumptions)]))
    return "\n\n".join(blocks)


def _text_table(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([table.title, *(f"  {text}" for text in lines)])


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, 116, initial_indent=indent, subsequent_indent=max(indent, "    "))
