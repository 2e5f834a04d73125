"""Figure 11: the effect of the number of trials on the saving, SHA(k, 4, 508), 20 minutes, under both billings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import common
from common import COLOURS, CURVES, Finding, Report, Table, cells, ratio, verdict
from page import Figure, panels

from rubberband.spec.search import sha
from rubberband.values.offer import Billing

ITERATION_S, DEADLINE_S = 4.0, 1200.0
TRIALS = (16, 32, 64, 128, 256, 512)
BILLINGS: tuple[Billing, ...] = ("per_instance", "per_function")
CENT = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Cost of each policy for one number of trials."""

    billing: Billing
    curve: str
    trials: int
    fair_usd: float
    """Fixed cluster, divided fairly among the trials."""
    fixed_usd: float
    """Fixed cluster, with the best GPUs per trial in every stage."""
    elastic_usd: float

    @property
    def saved_usd(self) -> float:
        """Cost of fixed with fair shares, less that of elastic."""
        return self.fair_usd - self.elastic_usd


def point(billing: Billing, curve: str, trials: int) -> Point:
    """Return the costs of the cheapest plans."""
    offer = common.p3_8xlarge(max_instances=256, billing=billing)
    profile, stages = common.profile(CURVES[curve], ITERATION_S), sha(trials, 4, 508, 2)
    fair = common.fair_fixed(stages, profile, offer, DEADLINE_S)
    fixed, elastic = (
        common.needed(common.best(stages, profile, offer, DEADLINE_S, policy)) for policy in ("static", "optimal")
    )
    assert fair is not None, "20 minutes are enough on both curves"
    return Point(
        billing=billing,
        curve=curve,
        trials=trials,
        fair_usd=fair.cost_usd,
        fixed_usd=fixed.prediction.cost_usd,
        elastic_usd=elastic.prediction.cost_usd,
    )


def findings(points: Sequence[Point]) -> list[Finding]:
    """Return the statements of §6.1.3 and of the caption."""
    cases = {
        f"{billing}, {curve}": [each for each in points if (each.billing, each.curve) == (billing, curve)]
        for billing in BILLINGS
        for curve in CURVES
    }
    cheaper = {case: sum(each.saved_usd > CENT for each in sweep) for case, sweep in cases.items()}
    grows = {
        case: all(after.saved_usd > before.saved_usd - CENT for before, after in itertools.pairwise(sweep))
        for case, sweep in cases.items()
    }
    functions = [each for each in points if each.billing == "per_function"]
    level = sum(each.fixed_usd - each.elastic_usd < CENT for each in functions)
    dearer = sum(each.elastic_usd > min(each.fair_usd, each.fixed_usd) + CENT for each in points)
    return [
        Finding(
            says="Across the various workloads, the elastic policy always outperforms the fixed cluster baseline, "
            "regardless of the billing model.",
            verdict=verdict(*(each.saved_usd > CENT for each in points)),
            found="Against a fixed cluster divided fairly it is cheaper in "
            + "; ".join(f"{cheaper[case]} of {len(sweep)} ({case})" for case, sweep in cases.items())
            + f"; dearer in {dearer} of {len(points)}. Pay per function, holding is free: with the best GPUs per trial "
            f"instead of fair shares, a fixed cluster costs the same as elastic in {level} of {len(functions)} cases.",
        ),
        Finding(
            says="The difference in the total execution cost increases as the number of trials increases.",
            verdict=verdict(*grows.values()),
            found="From fewest to most trials: "
            + "; ".join(
                f"{sweep[0].saved_usd:.2f} to {sweep[-1].saved_usd:.2f} USD ({case})" for case, sweep in cases.items()
            )
            + f". It never decreases on the way in {sum(grows.values())} of {len(grows)} cases.",
        ),
    ]


def compute(trials: Sequence[int] = TRIALS) -> Report:
    """Compute the sweep, fewest trials first."""
    points = [point(billing, curve, count) for billing in BILLINGS for curve in CURVES for count in trials]
    rows = [
        cells(
            *(each.billing, each.curve, each.trials, each.fair_usd, each.fixed_usd, each.elastic_usd, each.saved_usd),
            ratio(each.fair_usd, each.elastic_usd),
        )
        for each in points
    ]
    columns = (
        "billing",
        "scaling",
        "trials",
        "fixed, fair USD",
        "fixed USD",
        "elastic USD",
        "fair - elastic",
        "saving",
    )
    return Report(
        title="Figure 11: cost of SHA(k, 4, 508) within 20 minutes, by the number of trials k",
        tables=[Table(title="Cost", columns=columns, rows=rows)],
        figure=figure(points),
        findings=findings(points),
        assumptions=[
            *common.common_assumptions(),
            "'fixed, fair' divides a fixed cluster's GPUs fairly among a stage's trials, as the paper's executor does; "
            "it is the plot's baseline.",
            "The paper tells the deadline, 20 minutes, and not the iteration time: 4 s with 1 GPU (its Figure 9). Init "
            "0 s; at most 256 instances. per_function: a trial's share of the instance price while it trains.",
        ],
    )


def figure(points: Sequence[Point]) -> Figure:
    """Return a panel for each billing, cost over trials (logarithmic)."""
    lines = []
    for axis, billing in enumerate(BILLINGS, start=1):
        for curve, dash in zip(CURVES, ("solid", "dot"), strict=True):
            shown = [each for each in points if (each.billing, each.curve) == (billing, curve)]
            counts = [each.trials for each in shown]
            fair, elastic = [each.fair_usd for each in shown], [each.elastic_usd for each in shown]
            lines.append(common.line(f"fixed, {curve}", counts, fair, COLOURS[0], axis, dash=dash, width=4.5))
            lines.append(common.line(f"elastic, {curve}", counts, elastic, COLOURS[1], axis, dash=dash))
    counts = sorted({each.trials for each in points})
    most = max(each.fair_usd for each in points)
    return panels(
        lines,
        ["(a) pay per instance", "(b) pay per function"],
        x="trials",
        every_x={"type": "log", "tickvals": counts, "ticktext": [str(count) for count in counts]},
        every_y={"range": [0, 1.05 * most]},
    )


if __name__ == "__main__":
    common.show(compute)
