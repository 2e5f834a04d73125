"""Table 2: ResNet-101, SHA(32, 1, 50, 3), within 20, 30 and 40 minutes: comparison of policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import common
from common import COLOURS, Finding, Report, Table, cells, usd, verdict
from page import Figure, panels
from table_3 import PAPER_FIXED, STAGES, p3_8xlarge, resnet101

from rubberband.values.plan import Planned, Policy

POLICIES: Mapping[str, Policy] = {
    "static": "static",
    "naive elastic": "naive_elastic",
    "RubberBand (greedy)": "greedy",
    "exact": "optimal",
}
STATIC, NAIVE, PAPER, EXACT = POLICIES
MINUTES = (20, 30, 40)
SHARES = (0.0, 0.03, 0.06, 0.1, 0.15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Simulated row of the paper's table."""

    jct_s: float
    cost_usd: float

    @property
    def usd_per_hour(self) -> float:
        """Mean cost of the whole cluster while it was held."""
        return self.cost_usd / self.jct_s * 3600.0


PAPER_ROWS = {
    (STATIC, 20): Row(jct_s=19 * 60.0 + 24.0, cost_usd=34.00),
    (NAIVE, 20): Row(jct_s=14 * 60.0 + 39.0, cost_usd=27.50),
    (PAPER, 20): Row(jct_s=18 * 60.0 + 56.0, cost_usd=15.68),
    (STATIC, 30): Row(jct_s=29 * 60.0 + 9.0, cost_usd=17.73),
    (NAIVE, 30): Row(jct_s=26 * 60.0 + 25.0, cost_usd=19.83),
    (PAPER, 30): Row(jct_s=29 * 60.0 + 14.0, cost_usd=14.70),
    (STATIC, 40): Row(jct_s=36 * 60.0 + 53.0, cost_usd=14.99),
    (NAIVE, 40): Row(jct_s=26 * 60.0 + 25.0, cost_usd=19.83),
    (PAPER, 40): Row(jct_s=37 * 60.0 + 8.0, cost_usd=14.68),
}
Cells = Mapping[tuple[str, int], Planned]


def plans(share: float | None = None) -> Cells:
    """Return each policy's plan at each deadline, with Table 1's scaling or Amdahl's law with `share`."""
    profile, offer = resnet101(share), p3_8xlarge()
    found = {
        (name, minutes): common.best(STAGES, profile, offer, 60.0 * minutes, policy)
        for minutes in MINUTES
        for name, policy in POLICIES.items()
    }
    return {cell: planned for cell, planned in found.items() if planned}


def findings(found: Cells) -> list[Finding]:
    """Return the observations of §6.3.1."""
    cost = {cell: planned.prediction.cost_usd for cell, planned in found.items()}
    saving = {minutes: 1.0 - cost[EXACT, minutes] / cost[STATIC, minutes] for minutes in MINUTES}
    paper_saving = {m: 1.0 - PAPER_ROWS[PAPER, m].cost_usd / PAPER_ROWS[STATIC, m].cost_usd for m in MINUTES}
    least = min(cost[other, minutes] / cost[EXACT, minutes] for other in POLICIES for minutes in MINUTES)
    first, middle, last = MINUTES
    return [
        Finding(
            says="Across the board, RubberBand is able to reduce costs across a variety of time constraints.",
            verdict=verdict(*(cost[PAPER, m] < cost[STATIC, m] and cost[EXACT, m] < cost[STATIC, m] for m in MINUTES)),
            found="; ".join(f"{minutes} min: {100.0 * each:.0f} % less" for minutes, each in saving.items())
            + f" than static. No policy is cheaper than the exact one: the nearest costs {least:.3f}x.",
        ),
        Finding(
            says="Tighter constraints lead to a larger cost deviation between RubberBand and baselines: 53% on the 20 "
            "minute deadline and a negligible difference at 40 minutes.",
            verdict=verdict(saving[first] > saving[middle] > saving[last], saving[first] > 0.4, saving[last] < 0.05),
            found=f"{100.0 * saving[first]:.0f} % at {first} minutes, {100.0 * saving[middle]:.0f} % at {middle} and "
            f"{100.0 * saving[last]:.0f} % at {last} (the table's own dollars: "
            + ", ".join(f"{100.0 * each:.0f} %" for each in paper_saving.values())
            + ").",
        ),
        Finding(
            says="The naive elastic policy is outperformed by both RubberBand and the static policy (at 30 minutes).",
            verdict=verdict(cost[NAIVE, middle] > cost[EXACT, middle], cost[NAIVE, middle] > cost[STATIC, middle]),
            found=f"{usd(cost[NAIVE, middle])} USD against {usd(cost[EXACT, middle])} (exact) and "
            f"{usd(cost[STATIC, middle])} (static).",
        ),
        consistency(),
    ]


def consistency() -> Finding:
    """Return whether one price and whole numbers of instances explain all static rows of the paper."""
    price = p3_8xlarge().price_usd_per_hour
    rates = {minutes: PAPER_ROWS[STATIC, minutes].usd_per_hour for minutes in MINUTES}
    counts = {minutes: PAPER_FIXED if minutes == MINUTES[0] else round(rate / price) for minutes, rate in rates.items()}
    per_instance = {minutes: rates[minutes] / counts[minutes] for minutes in MINUTES}
    spread = max(per_instance.values()) / min(per_instance.values())
    same_naive = PAPER_ROWS[NAIVE, 40] == PAPER_ROWS[NAIVE, 30]
    return Finding(
        says=f"Static: 34.00, 17.73 and 14.99 USD, with {PAPER_FIXED} instances at 20 minutes.",
        verdict=verdict(*(abs(rate / price - 1.0) < 0.05 for rate in per_instance.values())),
        found="Cost over JCT and instances is "
        + ", ".join(f"{rate:.1f} USD per hour with {counts[m]} ({m} min)" for m, rate in per_instance.items())
        + f"; the price is {price:g}."
        + (" One price does not explain them all: only the shape can be compared." if spread > 1.05 else "")
        + (" Naive elastic has the same row at 30 and 40 minutes." if same_naive else ""),
    )


def compute() -> Report:
    """Compute the table, with the paper's numbers beside ours."""
    found = plans()
    rows = [
        cells(
            *(name, minutes, _clock(planned.prediction.jct_s), planned.prediction.cost_usd),
            *((_clock(paper.jct_s), paper.cost_usd) if paper else (None, None)),
            ", ".join(f"{choice.instances}x{choice.gpus_per_trial}" for choice in planned.plan.stages),
        )
        for (name, minutes), planned in found.items()
        for paper in [PAPER_ROWS.get((name, minutes))]
    ]
    columns = ("policy", "deadline (min)", "JCT", "USD", "paper JCT", "paper USD", "instances x GPUs per trial")
    return Report(
        title="Table 2: SHA(32, 1, 50, 3) of ResNet-101 within 20, 30 and 40 minutes",
        tables=[
            Table(title="Time and cost, ours and the paper's simulated ones", columns=columns, rows=rows),
            by_share(),
        ],
        figure=figure(found),
        findings=findings(found),
        assumptions=[
            *common.common_assumptions(),
            f"Scaling, epoch time ({resnet101().iteration_s(1):.1f} s with 1 GPU) and start-up are table_3.py's; the "
            "epoch time is set so that Table 3's plan takes 18:56.",
        ],
    )


def by_share() -> Table:
    """Return the savings of the exact plans with other scaling curves."""
    rows = []
    for share in SHARES:
        found = plans(share)
        savings = [
            1.0 - found[EXACT, minutes].prediction.cost_usd / found[STATIC, minutes].prediction.cost_usd
            for minutes in MINUTES
        ]
        fixed = found[STATIC, MINUTES[0]].plan.stages[0].instances
        rows.append((f"{100.0 * share:.0f} %", str(fixed), *(f"{100.0 * saving:.0f} %" for saving in savings)))
    columns = ("share", "static instances, 20 min", *(f"saving, {minutes} min" for minutes in MINUTES))
    return Table(
        title="Saving of the exact plan by the share that more GPUs do not shorten", columns=columns, rows=rows
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def figure(found: Cells) -> Figure:
    """Return cost over deadline, ours and the paper's."""
    lines = []
    for colour, name in enumerate(POLICIES):
        ours = [found[name, minutes].prediction.cost_usd for minutes in MINUTES]
        paper = [PAPER_ROWS[name, minutes].cost_usd for minutes in MINUTES if (name, minutes) in PAPER_ROWS]
        width = 4.5 if name == PAPER else 2.5
        lines.append(common.line(name, MINUTES, ours, COLOURS[colour], 1, width=width))
        lines.append(common.line(name, MINUTES[: len(paper)], paper, COLOURS[colour], 2))
    titles = ["(a) here", "(b) the paper's Table 2, simulated"]
    every_y = {"range": [0, 1.05 * max(row.cost_usd for row in PAPER_ROWS.values())]}
    return panels(lines, titles, x="deadline (minutes)", every_x={"tickvals": MINUTES}, every_y=every_y)


if __name__ == "__main__":
    common.show(compute)
