"""An estimate's stages as a table that adds up: expected times and costs, lane by lane, and what the amounts cover."""

from __future__ import annotations

from rubberband.planner.brackets import JobPlan, Lane
from rubberband.planner.estimate import Estimate
from rubberband.units import format_duration, format_usd
from rubberband.values.offer import Offer
from rubberband.values.plan import Market, Stage, StagePlan, StagePrediction
from rubberband.views.tables import Row, TextTable
from rubberband.views.words import rounded, usd, usd_decimals

_FIGURES = ("launch", "duration", "cost (USD)")

_MARKETS: dict[Market, str] = {"spot": "on the spot market", "on_demand": "on demand"}


def stage_table(answer: Estimate) -> TextTable:
    """A row for each stage, and totals: times add up in each lane, costs to the bill; launches are SCALE + INIT.

    Lanes have a row each that sums them up, a head node that they share one of its own.
    """
    job = answer.job
    assert job is not None, "the caller has a plan"
    decimals = usd_decimals(job.prediction.cost_usd)
    costs_usd = rounded([*(stage.cost_usd for stage in job.prediction.stages), job.head_usd], 10**-decimals)
    header = _header(answer)
    rows: list[Row] = []
    first = 0
    for at, lane in enumerate(job.lanes):
        lane_usd = costs_usd[first : first + len(lane.stages)]
        first += len(lane.stages)
        lane_rows = _lane(answer, at, lane, lane_usd, decimals)
        rows += lane_rows if len(job.lanes) > 1 else lane_rows[:-1]
    blank = [""] * (len(header) - len(_FIGURES) - 1)
    if len(job.lanes) > 1:
        if job.head_usd > 0:
            rows.append(("head node", *blank, "", "", usd(costs_usd[-1], decimals)))
        total = ("total", *blank, "", format_duration(_rounded_s(job, job.prediction.jct_s)))
    else:
        total = ("total", *blank, *lane_rows[-1][-3:-1])
    return TextTable(
        title="Stages" if len(job.lanes) == 1 else "Stages, in lanes that run side by side",
        header=header,
        rows=tuple(rows),
        total=(*total, usd(sum(costs_usd), decimals)),
        words=frozenset({0}),
        notes=tuple(_notes(answer, job)),
    )


def _header(answer: Estimate) -> Row:
    several = len(answer.brackets) > 1
    lead, slots = (("lane", "bracket"), ()) if several else ((), ("slots",))
    market = ("market",) if _mixed(answer) else ()
    return (*lead, "stage", "trials", "iterations", "instances", *market, "GPUs per trial", *slots, *_FIGURES)


def _mixed(answer: Estimate) -> bool:
    """Whether the stages are on different markets."""
    assert answer.job is not None, "the caller has a plan"
    return len({choice.market for choice in answer.job.plan.stages}) > 1


def _lane(answer: Estimate, at: int, lane: Lane, costs_usd: list[float], decimals: int) -> list[Row]:
    """The rows of one lane, and their sum."""
    assert answer.job is not None, "the caller has a plan"
    unit_s = _unit_s(answer.job)
    stages = lane.planned.prediction.stages
    times_s = rounded([time_s for stage in stages for time_s in (stage.provisioning_s, stage.duration_s)], unit_s)
    several = len(answer.brackets) > 1
    rungs = [(bracket, rung) for bracket in lane.brackets for rung in range(len(answer.brackets[bracket]))]
    rows: list[Row] = []
    for index, (bracket, rung) in enumerate(rungs):
        lead = (str(at), str(bracket), str(rung)) if several else (str(rung),)
        middle = _stage(answer, lane.stages[index], lane.planned.plan.stages[index], stages[index])
        times = (format_duration(times_s[2 * index]), format_duration(times_s[2 * index + 1]))
        rows.append((*lead, *middle, *times, usd(costs_usd[index], decimals)))
    sums = (format_duration(sum(times_s[0::2])), format_duration(sum(times_s[1::2])), usd(sum(costs_usd), decimals))
    blank = [""] * (len(rows[0]) - 1 - len(sums))
    return [*rows, (f"lane {at}", *blank, *sums)]


def _stage(answer: Estimate, stage: Stage, choice: StagePlan, predicted: StagePrediction) -> Row:
    market = (choice.market.replace("_", " "),) if _mixed(answer) else ()
    slots = (str(predicted.slots),) if len(answer.brackets) == 1 else ()
    return (
        str(stage.trials),
        str(stage.iterations),
        str(choice.instances),
        *market,
        str(choice.gpus_per_trial),
        *slots,
    )


def _unit_s(job: JobPlan) -> float:
    return 1.0 if job.prediction.jct_s >= 60 else 0.01


def _rounded_s(job: JobPlan, seconds: float) -> float:
    unit_s = _unit_s(job)
    return round(seconds / unit_s) * unit_s


def _notes(answer: Estimate, job: JobPlan) -> list[str]:
    mean = "Expected (mean) values; costs " if job.prediction.jct is not None else "Costs "
    notes = [f"{mean}cover {covers(answer.offer)}."]
    if answer.offer.spot is not None and not _mixed(answer):
        notes.append(f"All instances are bought {_MARKETS[job.plan.stages[0].market]}.")
    if answer.constraints.max_cost_usd is not None and any(one.market == "spot" for one in job.plan.stages):
        assert answer.offer.spot is not None, "a plan uses the markets that its offer has"
        notes.append(
            f"Spot is expected to cost {format_usd(answer.offer.spot.price_usd_per_hour)}/h. Its price may rise every "
            f"hour, so that max_cost reserves {format_usd(answer.offer.price_usd_per_hour)}/h, the maximum price, for "
            "the leases of spot instances."
        )
    if len(job.lanes) > 1:
        notes.append(
            "Lanes run at the same time on instances of their own: costs add up, and the job ends with the latest lane."
        )
    if job.prediction.extrapolated:
        counts = ", ".join(str(gpus) for gpus in job.prediction.extrapolated)
        notes.append(
            f"{counts} GPUs per trial are extrapolated: the profile ends at {answer.profile.largest_gpus}, beyond it "
            "trials are taken to be no faster."
        )
    return notes


def covers(offer: Offer) -> str:
    """What the amounts of an estimate are for, and what they leave out."""
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
