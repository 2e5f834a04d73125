"""An estimate in words and figures: pure functions from an Estimate to the lines that `rubberband estimate` prints."""

from __future__ import annotations

from rubberband.experiment import Experiment
from rubberband.offer import Offer
from rubberband.planner.estimate import USER_PLAN, Estimate
from rubberband.profile import Profile
from rubberband.units import format_duration, format_usd
from rubberband.views.words import rounded

Row = tuple[str, ...]
HEADER: Row = (
    "stage",
    "trials",
    "iterations",
    "instances",
    "GPUs/trial",
    "slots",
    "provisioning",
    "duration",
    "cost (USD)",
)


def headline(answer: Estimate, offer: Offer) -> str:
    """What is planned, and on what."""
    kind = "given plan" if answer.policy == USER_PLAN else f"{answer.policy} plan"
    gpus = f"{offer.gpus} GPU{'s' if offer.gpus > 1 else ''}"
    return (
        f"{answer.experiment_name}: {kind} on {offer.instance_type} ({gpus}, {format_usd(offer.price_usd_per_hour)}/h)"
    )


def table(answer: Estimate) -> tuple[Row, list[Row], Row]:
    """Header, a row for each stage, and the total: provisioning and duration add up to the JCT, costs to the bill."""
    assert answer.planned is not None, "the caller has a plan"
    predicted = answer.planned.prediction
    time_unit_s = 1.0 if predicted.jct_s >= 60 else 0.01
    decimals = 2 if predicted.cost_usd >= 1 or predicted.cost_usd == 0 else 4
    times_s = rounded([t for stage in predicted.stages for t in (stage.provisioning_s, stage.duration_s)], time_unit_s)
    costs_usd = rounded([stage.cost_usd for stage in predicted.stages], 10**-decimals)
    rows: list[Row] = [
        (
            str(index),
            str(stage.trials),
            str(stage.iterations),
            str(choice.instances),
            str(choice.gpus_per_trial),
            str(predicted.stages[index].slots),
            format_duration(times_s[2 * index]),
            format_duration(times_s[2 * index + 1]),
            f"{costs_usd[index]:,.{decimals}f}",
        )
        for index, (stage, choice) in enumerate(zip(answer.stages, answer.planned.plan.stages, strict=True))
    ]
    sums = (format_duration(sum(times_s[0::2])), format_duration(sum(times_s[1::2])), f"{sum(costs_usd):,.{decimals}f}")
    return HEADER, rows, ("total", *[""] * 5, *sums)


def fixed_cluster(answer: Estimate) -> str:
    """The whole time and bill, and how it compares to the best cluster of a fixed size."""
    assert answer.planned is not None, "the caller has a plan"
    mine = answer.planned.prediction
    total = f"total: {format_duration(mine.jct_s)}, {format_usd(mine.cost_usd)}"
    static = answer.baselines.get("static")
    if static is None:
        return total if answer.policy == "static" else f"{total}\nfixed cluster: none meets the constraints"
    fixed = static.prediction
    instances = max(stage.instances for stage in static.plan.stages)
    saved = (1 - mine.cost_usd / fixed.cost_usd) * 100 if fixed.cost_usd > 0 else 0.0
    verdict = f"elasticity saves {saved:.0f} %" if saved >= 0 else f"this plan costs {-saved:.0f} % more"
    return (
        f"{total}\nfixed cluster: {instances} instance{'s' if instances > 1 else ''}, {format_duration(fixed.jct_s)}, "
        f"{format_usd(fixed.cost_usd)}; {verdict}"
    )


def assumptions(answer: Estimate, experiment: Experiment, profile: Profile, offer: Offer) -> list[str]:
    """What the figures rest on."""
    assert answer.planned is not None, "the caller has a plan"
    noise = ""
    if profile.trial_cv or profile.iteration_cv:
        noise = (
            f" (the profile's, trial_cv={profile.trial_cv:g} and iteration_cv={profile.iteration_cv:g}, is left out)"
        )
    unmeasured = experiment.resources.provision_delay_s is None and profile.provision_delay_s is None
    delays = (
        f"an instance takes {format_duration(offer.provision_delay_s)} + {format_duration(offer.init_delay_s)} to start"
    )
    lines = [f"assumes: times without noise{noise}; {delays}{' (not measured)' if unmeasured else ''}"]
    beyond = answer.planned.prediction.extrapolated
    if beyond:
        counts = ", ".join(str(gpus) for gpus in beyond)
        lines.append(
            f"extrapolated: {counts} GPUs per trial; the profile ends at {profile.largest_gpus}, beyond it trials are "
            "taken to be no faster"
        )
    return lines
