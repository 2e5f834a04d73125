"""Figure 12: the effect of start-up on the saving, SHA(512, 4, 4096), at deadlines of 90 to 160 minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import common
from common import COLOURS, PLACED, Finding, Report, Table, cells, usd, verdict
from page import Figure, panels

from rubberband.planner import predict
from rubberband.spec.search import sha
from rubberband.values.offer import Offer
from rubberband.values.plan import Planned

ITERATION_S = 12.0
INITS_S = (1.0, 10.0, 100.0)
DEADLINES_MIN = (90, 100, 110, 120, 130, 140, 150, 160)
SHARES = (0.014, 0.02, 0.0271, 0.035, 0.04)
MAX_INSTANCES = 256
STAGES = sha(512, 4, 4096, 2)
PROFILE = common.profile(PLACED, ITERATION_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Best plans of both policies at one deadline."""

    deadline_min: float
    fixed: Planned
    elastic: Planned

    @property
    def saving(self) -> float:
        """Cost of fixed over elastic."""
        return self.fixed.prediction.cost_usd / self.elastic.prediction.cost_usd

    @property
    def cells(self) -> tuple[str | float, ...]:
        """Cells of the tables: deadline, instances, costs, saving."""
        fixed, elastic = self.fixed.plan.stages, self.elastic.plan.stages
        shrinks = f"{elastic[0].instances} to {elastic[-1].instances}"
        costs_usd = self.fixed.prediction.cost_usd, self.elastic.prediction.cost_usd
        return (f"{self.deadline_min:.0f}", fixed[0].instances, shrinks, *costs_usd, f"{self.saving:.2f}x")


def p3_8xlarge(init_s: float) -> Offer:
    """Return the instance with that start-up."""
    return common.p3_8xlarge(max_instances=MAX_INSTANCES, init_delay_s=init_s)


def point(init_s: float, deadline_min: float, share: float | None = None) -> Point | None:
    """Return both plans, or None if the fixed one cannot be in time."""
    offer = p3_8xlarge(init_s)
    profile = PROFILE if share is None else common.profile(PLACED, ITERATION_S, share=share)
    fixed = common.best(STAGES, profile, offer, 60.0 * deadline_min, "static")
    elastic = common.best(STAGES, profile, offer, 60.0 * deadline_min, "optimal")
    return Point(deadline_min=deadline_min, fixed=fixed, elastic=elastic) if fixed and elastic else None


def tightest(init_s: float) -> Point:
    """Return both plans at the shortest deadline that a fixed cluster can meet."""
    fastest = common.best(STAGES, PROFILE, p3_8xlarge(init_s), None, "static", "min_time")
    assert fastest is not None, "there are no limits"
    found = point(init_s, fastest.prediction.jct_s / 60.0)
    assert found is not None, "a plan is in time for its own JCT"
    return found


def findings(sweep: dict[float, list[Point]], edges: dict[float, Point]) -> list[Finding]:
    """Return the statements of §6.1.4 and of the caption."""
    first, second, last = (sweep[init_s] for init_s in INITS_S)
    up_to = max(each.saving for each in first)
    falls = [a.saving >= b.saving >= c.saving for a, b, c in zip(first, second, last, strict=True)]
    edge = ", ".join(f"{edges[init_s].saving:.1f}x with {init_s:g} s" for init_s in INITS_S)
    return [
        Finding(
            says="In the presence of minimal initialization overheads, we observe up to a 3.5x reduction in cost.",
            verdict=verdict(up_to >= 3.0),
            found=f"Up to {up_to:.2f}x at the plot's deadlines. It hangs on how trials scale: see the second table.",
        ),
        *rises(first[0], second[0]),
        Finding(
            says="As the initialization latency increases, the cost advantage of the elastic policy decreases.",
            verdict=verdict(*falls),
            found=f"So it is at {sum(falls)} of {len(falls)} deadlines; from {first[0].saving:.2f}x with 1 s to "
            f"{last[0].saving:.2f}x with 100 s at {first[0].deadline_min:g} minutes."
            + ("" if all(falls) else " At the others a fixed cluster that starts later needs more instances."),
        ),
        Finding(
            says="The elastic policy is still predicted to perform an order of magnitude better at the tightest "
            "time constraints.",
            verdict=verdict(first[0].saving >= 10.0, *(each.saving >= 10.0 for each in edges.values())),
            found=f"{first[0].saving:.1f}x with 1 s at {first[0].deadline_min:g} minutes. At the shortest one that "
            f"a fixed cluster of at most {MAX_INSTANCES} can meet, {edges[INITS_S[0]].deadline_min:.0f} to "
            f"{edges[INITS_S[-1]].deadline_min:.0f} minutes: {edge}.",
        ),
    ]


def rises(before: Point, after: Point) -> list[Finding]:
    """Return the effects of 10 s instead of 1 s at one deadline."""
    at = f"(at {before.deadline_min:g} minutes)"
    fixed = after.fixed.prediction.cost_usd / before.fixed.prediction.cost_usd
    elastic = after.elastic.prediction.cost_usd / before.elastic.prediction.cost_usd
    kept = predict(STAGES, before.elastic.plan, PROFILE, p3_8xlarge(INITS_S[1]))
    late_s = max(0.0, kept.jct_s - 60.0 * before.deadline_min)
    return [
        Finding(
            says=f"Increasing from a 1s latency to 10s has no impact on the static policy {at}.",
            verdict=verdict(fixed < 1.01),
            found=f"Its cost rises by {100.0 * (fixed - 1.0):.1f} %.",
        ),
        Finding(
            says=f"... but increases the cost of the elastic policy by almost 2x {at}.",
            verdict=verdict(elastic > 1.7),
            found=f"It rises by {100.0 * (elastic - 1.0):.1f} %, to {usd(after.elastic.prediction.cost_usd)} USD. The "
            f"plan made for 1 s, kept as it is, would cost {usd(kept.cost_usd)} USD and be {late_s:.0f} s late.",
        ),
    ]


def compute(deadlines_min: Sequence[float] = DEADLINES_MIN) -> Report:
    """Compute the sweep; `deadlines_min` starts with the tightest."""
    found = {init_s: [point(init_s, minutes) for minutes in deadlines_min] for init_s in INITS_S}
    sweep = {init_s: [each for each in points if each] for init_s, points in found.items()}
    edges = {init_s: tightest(init_s) for init_s in INITS_S}
    rows = [cells(f"{init_s:g}", *each.cells) for init_s in INITS_S for each in (edges[init_s], *sweep[init_s])]
    at_share = [(share, point(INITS_S[0], deadlines_min[0], share)) for share in SHARES]
    plans = ("fixed instances", "elastic instances", "fixed USD", "elastic USD", "saving")
    return Report(
        title="Figure 12: cost of SHA(512, 4, 4096) with instances that take 1, 10 and 100 s to initialise",
        tables=[
            Table(
                title="Cost; first at the tightest deadline for a fixed cluster",
                columns=("init (s)", "deadline (min)", *plans),
                rows=rows,
            ),
            Table(
                title="Saving with 1 s, by the share that more GPUs do not shorten",
                columns=("share", "deadline (min)", *plans),
                rows=[cells(f"{100.0 * share:.1f} %", *each.cells) for share, each in at_share if each],
            ),
        ],
        figure=figure(sweep),
        findings=findings(sweep, edges),
        assumptions=[
            *common.common_assumptions(),
            "An iteration takes 12 s with 1 GPU (the paper: its mean latency, batch 2048); init is billed; at most "
            f"{MAX_INSTANCES} instances.",
        ],
    )


def figure(sweep: dict[float, list[Point]]) -> Figure:
    """Return three panels, cost over deadline."""
    lines = [
        common.line(
            name,
            [each.deadline_min for each in points],
            [getattr(each, name).prediction.cost_usd for each in points],
            COLOURS[colour],
            axis,
            width=4.5 - 2.0 * colour,
        )
        for axis, points in enumerate(sweep.values(), start=1)
        for colour, name in enumerate(("fixed", "elastic"))
    ]
    most = max(each.fixed.prediction.cost_usd for points in sweep.values() for each in points)
    titles = [f"({letter}) {init_s:g} s init" for letter, init_s in zip("abc", sweep, strict=True)]
    return panels(lines, titles, x="deadline (minutes)", every_y={"range": [0, 1.05 * most]})


if __name__ == "__main__":
    common.show(compute)
