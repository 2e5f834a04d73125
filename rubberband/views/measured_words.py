"""What `rubberband profile` says of a profile that it measured: speeds, what they vary by, and how sure that is."""

from __future__ import annotations

from rubberband.executor.profiling_points import Component, Noise, Point, Starts
from rubberband.values.profile import Profile

ENOUGH_TRIALS = 8
"""With fewer, what trials differ by is little more than a guess, and the remedy is told."""


def point_line(point: Point) -> str:
    """Return a line on one number of GPUs."""
    trials = len(point.timed)
    more = f"{trials} trials, {point.copies}" if trials > point.copies else f"{point.copies} trials"
    beside = f", {more} side by side" if point.copies > 1 else f", {trials} trials in turn" if trials > 1 else ""
    line = f"{point.gpus} GPU: {point.iteration_s:.3f} s per iteration (spread {point.iteration_cv:.1%}{beside})"
    if not point.batches:
        return line
    steps = ", ".join(f"{timed.batch_size} in {_brief(timed.step_s)}" for timed in point.batches)
    return f"{line}; a step of {steps}"


def noise_lines(noise: Noise) -> list[str]:
    """Return a line on each component of the noise, with the interval that holds it with a probability of 90 %."""
    return [_trials_line(noise), f"iterations of one trial vary by {_told(noise.iteration)}"]


def _trials_line(noise: Noise) -> str:
    mean = f", so that the mean of all trials is unsure by {_percent(noise.mean_cv)}"
    if noise.num_trials == 1:
        assumed = f"trials are assumed to differ in speed by {_told(noise.trial)}{mean}"
        return f"{assumed}: 1 trial was measured; measure more with --trials N"
    few = "; measure more with --trials N" if noise.num_trials < ENOUGH_TRIALS else ""
    return f"trials differ in speed by {_told(noise.trial, f', {noise.num_trials} trials')}{mean}{few}"


def start_lines(profile: Profile, starts: Starts, noise: Noise) -> list[str]:
    """Return lines on how long trials and instances take to start."""
    vary = "" if noise.startup is None else f", varying by {_told(noise.startup)}"
    found = [f"a trial starts in {profile.trial_startup_s:.2f} s on a warm worker{vary}"]
    surplus_s = starts.surplus_s(profile.trial_startup_s)
    first = f", of which the first start of a trial takes {surplus_s:.1f} s more" if surplus_s >= 0.1 else ""
    if profile.provision_delay_s is not None and profile.init_delay_s is not None:
        provisions = _range([instance.provision_s for instance in starts.instances])
        inits = _range([instance.init_s + surplus_s for instance in starts.instances])
        found.append(f"an instance is provisioned in {profile.provision_delay_s:.1f} s{provisions}")
        last = " and all that were started at once" if starts.one_machine and len(starts.instances) > 1 else ""
        found.append(f"its workers{last} are warm {profile.init_delay_s:.1f} s later{inits}{first}")
    return found


def _told(component: Component, beside: str = "") -> str:
    return f"{_percent(component.cv)} {_interval(component, beside)}"


def _interval(component: Component, beside: str = "") -> str:
    return f"(90 % interval {_percent(component.low_cv, '')} to {_percent(component.high_cv)}{beside})"


def _percent(cv: float, unit: str = " %") -> str:
    return f"{100.0 * cv:.{0 if cv >= 0.0995 else 1}f}{unit}"


def _range(values_s: list[float]) -> str:
    least_s, most_s = min(values_s), max(values_s)
    return f" ({least_s:.1f} to {most_s:.1f} s, {len(values_s)} instances)" if len(values_s) > 1 else ""


def _brief(seconds: float) -> str:
    return f"{1000.0 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"
