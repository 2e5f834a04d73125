"""Figure 9: the effect of stragglers on the bill of SHA(64, 4, 508), with instances or only functions paid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import common
from common import COLOURS, PLACED, Finding, Report, Table, cells, ratio, verdict
from page import Figure, panels

from rubberband.planner import Draws
from rubberband.spec.search import sha
from rubberband.values.offer import Billing
from rubberband.values.plan import Policy, gang_sizes
from rubberband.values.profile import Profile

MEAN_S, DEADLINE_S = 4.0, 1200.0
SIGMAS_S = (1.0, 2.5, 5.0, 10.0)
STAGES = sha(64, 4, 508, 2)
MAX_INSTANCES = 64
READINGS = ("each iteration", "each stage")
PLANS = ("planned", "no queue")
POLICIES: dict[str, Policy] = {"fixed": "static", "elastic": "optimal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Cost of a policy under both kinds of billing; None if no plan is in time."""

    reading: str
    plans: str
    policy: str
    sigma_s: float
    per_instance_usd: float | None
    per_function_usd: float | None

    @property
    def bills_usd(self) -> tuple[float | None, float | None]:
        """Bills per instance and per function."""
        return self.per_instance_usd, self.per_function_usd

    @property
    def ratio(self) -> float:
        """Cost per instance over cost per function."""
        return self.per_instance_usd / self.per_function_usd if self.per_instance_usd and self.per_function_usd else 0.0


def noisy(reading: str, sigma_s: float) -> Profile:
    """Return times that vary with each iteration, or once for all iterations of a trial in a stage."""
    cv = sigma_s / MEAN_S
    return common.profile(
        PLACED,
        MEAN_S,
        iteration_cv=cv if reading == READINGS[0] else 0.0,
        trial_cv=cv if reading == READINGS[1] else 0.0,
    )


def cost_usd(reading: str, plans: str, policy: str, sigma_s: float, billing: Billing, num_samples: int) -> float | None:
    """Return the mean cost of the best plan for these stragglers, or of one in which no trial waits for another."""
    profile = noisy(reading, sigma_s)
    offer = common.p3_8xlarge(max_instances=MAX_INSTANCES, billing=billing)
    if plans == "planned":
        return common.cost_usd(common.best(STAGES, profile, offer, DEADLINE_S, POLICIES[policy]))
    most = -(-STAGES[0].trials // offer.gpus)
    needed = [most if policy == "fixed" else -(-stage.trials // offer.gpus) for stage in STAGES]
    plan = common.fair_plan(needed, STAGES, offer, gang_sizes(offer.gpus, 1, common.MAX_GPUS_PER_TRIAL))
    draws = Draws(STAGES, profile, offer, seed=0)
    return float(draws.evaluate(plan, -(-num_samples // draws.rows)).cost_usd.mean())


def findings(points: Sequence[Point]) -> list[Finding]:
    """Return the statements of §6.1.1 and of the caption."""
    low, high = (pick(each.sigma_s for each in points) for pick in (min, max))
    at = {(each.reading, each.plans, each.policy, each.sigma_s): each.ratio for each in points}
    cases = list(dict.fromkeys((each.reading, each.plans, each.policy) for each in points))
    ends = {plans: sorted(at[*case, high] for case in cases if case[1] == plans) for plans in PLANS}
    grows = [at[*case, high] > at[*case, low] for case in cases]
    least = min(each.ratio for each in points)
    return [
        Finding(
            says="Per-instance billing is an order of magnitude more expensive than per-function billing for both "
            "policies when there is large variance in training time.",
            verdict=verdict(*(at[*case, high] >= 10.0 for case in cases)),
            found=f"With sigma {high:g} s it costs "
            + "; ".join(f"{ratios[0]:.1f}-{ratios[-1]:.1f}x ({plans})" for plans, ratios in ends.items())
            + ". A stage waits for the slowest of its trials, 64 at first and fewer later, which bounds this.",
        ),
        Finding(
            says="Execution under a pay-per-instance regime exhibits higher costs regardless of allocation policy.",
            verdict=verdict(*(each.ratio >= 1.0 for each in points)),
            found=f"It costs at least {least:.2f}x as much, over {len(points)} cases.",
        ),
        Finding(
            says="Stragglers lead to RubberBand having to hold under-utilized resources at synchronization points.",
            verdict=verdict(*grows),
            found=f"From {low:g} to {high:g} s the ratio grows in {sum(grows)} of {len(grows)} cases.",
        ),
    ]


def compute(
    sigmas_s: Sequence[float] = SIGMAS_S, num_samples: int = 4000, readings: Sequence[str] = READINGS
) -> Report:
    """Compute the sweep; `num_samples` are for the plans without a queue."""
    points = [
        Point(
            reading=reading,
            plans=plans,
            policy=policy,
            sigma_s=sigma_s,
            per_instance_usd=cost_usd(reading, plans, policy, sigma_s, "per_instance", num_samples),
            per_function_usd=cost_usd(reading, plans, policy, sigma_s, "per_function", num_samples),
        )
        for reading in readings
        for plans in PLANS
        for policy in POLICIES
        for sigma_s in sigmas_s
    ]
    rows = [
        cells(each.reading, each.plans, each.policy, f"{each.sigma_s:g}", *each.bills_usd, ratio(*each.bills_usd))
        for each in points
    ]
    columns = ("drawn for", "plan", "policy", "sigma (s)", "per instance USD", "per function USD", "ratio")
    return Report(
        title="Figure 9: cost of SHA(64, 4, 508) by the spread of an iteration's time, 4 s in the mean",
        tables=[Table(title="Mean cost", columns=columns, rows=rows)],
        figure=figure(points),
        findings=findings(points),
        assumptions=[
            *common.common_assumptions(),
            "Normal with mean 4 s (1 GPU) and sigma, cut off at zero, which raises the mean of a large sigma, in both "
            "bills. 'each iteration' draws anew every time, as the paper says, and averages out in long stages; 'each "
            "stage' (the plot) draws once for all iterations of a trial in a stage, so that a straggler stays one.",
            "'planned' is the cheapest plan that takes 20 minutes or less (the paper tells no deadline) in half of "
            f"the samples, with at most {MAX_INSTANCES} instances. 'no queue' gives each of 64 trials a GPU at once; "
            "fixed then divides its GPUs fairly, elastic keeps what the trials left need; no deadline. Init 0 s.",
        ],
    )


def figure(points: Sequence[Point]) -> Figure:
    """Return a panel for each policy, cost over sigma."""
    lines = []
    for axis, policy in enumerate(POLICIES, start=1):
        for plans, dash in zip(PLANS, ("solid", "dot"), strict=True):
            shown = [each for each in points if (each.reading, each.plans, each.policy) == (READINGS[1], plans, policy)]
            sigmas = [each.sigma_s for each in shown]
            instance, function = [each.per_instance_usd for each in shown], [each.per_function_usd for each in shown]
            lines.append(common.line(f"per instance, {plans}", sigmas, instance, COLOURS[0], axis, dash=dash))
            lines.append(common.line(f"per function, {plans}", sigmas, function, COLOURS[1], axis, dash=dash))
    most = max(each.per_instance_usd or 0.0 for each in points)
    titles = ["(a) fixed cluster", "(b) elastic"]
    return panels(lines, titles, x="sigma of an iteration's time (s)", every_y={"range": [0, 1.05 * most]})


if __name__ == "__main__":
    common.show(compute)
