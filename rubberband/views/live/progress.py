"""Progress of a run on a terminal: time, cost and stages, against limits and plan.

`rubberband run`, notebooks, `rubberband status` and its `--watch` all have them from here. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.executor.result.parts import StageResult
from rubberband.units import duration, gpus_each
from rubberband.views.formatting import TextTable, usd, usd_decimals


def time_line(
    elapsed_s: float, *, deadline: str | None, end: str, slack_s: float | None, planned_s: float | None
) -> str:
    """Return `time      38s, deadline 22:17 (4m after its submission); ends 22:15 (in 1m40s), 2m to spare; planned 2m`.

    `end` is its phrase of `ends`, empty once a run is over; `slack_s` the time left before the deadline.
    """
    parts = [f"time      {duration(elapsed_s)}"]
    if deadline is not None:
        parts.append(f", deadline {deadline}")
    if end:
        parts.append(f"; {end}")
    if slack_s is not None:
        parts.append(f", {duration(abs(slack_s))} {'to spare' if slack_s >= 0 else 'late'}")
    if planned_s is not None:
        parts.append(f"; planned {duration(planned_s)}")
    return "".join(parts)


def cost_line(
    cost_usd: float, *, max_cost_usd: float | None, forecast_usd: float | None, planned_usd: float | None
) -> str:
    """Return `cost      0.0401 of 0.50 USD (max_cost); forecast 0.0700; planned 0.0712`."""
    known = [amount for amount in (cost_usd, forecast_usd, planned_usd) if amount is not None]
    decimals = usd_decimals(max(known))
    cap = " USD" if max_cost_usd is None else f" of {usd(max_cost_usd)} USD (max_cost)"
    forecast = "" if forecast_usd is None else f"; forecast {usd(forecast_usd, decimals)}"
    planned = "" if planned_usd is None else f"; planned {usd(planned_usd, decimals)}"
    return f"cost      {usd(cost_usd, decimals)}{cap}{forecast}{planned}"


def stage_table(stages: Sequence[StageResult]) -> TextTable:
    """Return a row for each stage: its trials by what they do, iterations, instances, time and cost, against the plan.

    The stages that train are marked.
    """
    decimals = usd_decimals(sum(max(stage.planned_cost_usd, stage.actual_cost_usd or 0.0) for stage in stages))
    each = f"{stages[0].place if stages else 'GPU'}s per trial"
    return TextTable(
        title="Stages, planned and actual",
        header=(
            *("stage", "run", "wait", "done", "fail", "iterations", "instances", each),
            *("time plan", "time", "USD plan", "USD"),
        ),
        rows=tuple(_row(stage, decimals) for stage in stages),
        marked=frozenset(at for at, stage in enumerate(stages) if stage.running or stage.queued),
    )


def _row(stage: StageResult, decimals: int) -> tuple[str, ...]:
    begun = stage.actual_s is not None
    waiting = stage.queued if begun else stage.trials
    counts = (stage.running, waiting, stage.done, stage.failed)
    return (
        stage.name,
        *(str(count or "") for count in counts),
        f"{stage.iterations_done}/{stage.iterations_expected}",
        f"{stage.instances if begun else '-'}/{stage.planned_instances}",
        gpus_each(stage.gpus_per_trial, stage.trials_per_gpu),
        duration(stage.planned_s),
        duration(stage.actual_s or 0.0) if begun else "",
        usd(stage.planned_cost_usd, decimals),
        usd(stage.actual_cost_usd or 0.0, decimals) if begun else "",
    )
