"""`search.warm_start`: results of earlier experiments, from which a search begins. They are fixed as it starts.

A sampler that learns is given their configurations and metrics as results; other samplers train the best of each first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rubberband.errors import InputError
from rubberband.executor.journal.folder import open_folder
from rubberband.executor.result.result import Result
from rubberband.executor.run.follower import read_at_once
from rubberband.spec.experiment import Experiment
from rubberband.spec.samplers import check_point
from rubberband.spec.space import Domain, canonical
from rubberband.states import REHEARSAL
from rubberband.units import counted
from rubberband.values.ranking import Merit

_NAMED = 3
"""Values outside the space that are named; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    trial: int
    point: dict[str, Any]
    value: float
    merit: Merit
    """By the new search's limits."""


def warm_started(experiment: Experiment, home: Path, announce: Callable[[str], None]) -> Experiment:
    """Return the experiment with the results of those that `search.warm_start` names.

    Raises InputError for an experiment that is missing, has another space, metric or mode, or no result in the space,
    and for a rehearsal unless this one is another.
    """
    search = experiment.search
    if not search.warm_start:
        return experiment
    points, rewards = list(search.points_to_evaluate), list(search.evaluated_rewards)
    known = {canonical(point) for point in points}
    for name in search.warm_start:
        found = _results_of(experiment, name, home, announce)
        if not search.sampler.learns:
            found = sorted(found, key=lambda one: one.merit)[:1]
        taken = [one for one in found if canonical(one.point) not in known]
        known.update(canonical(one.point) for one in taken)
        points += [one.point for one in taken]
        rewards += [one.value for one in taken] if search.sampler.learns else []
        what = f"{counted(len(taken), 'result')} of {name}"
        if not search.sampler.learns:
            what = f"the best configuration of {name} {'is trained first' if taken else 'is among the points already'}"
        announce(f"warm start: {what}")
    if not search.sampler.learns:
        points = points[: search.num_trials]
    words = experiment.to_words()
    more = {"points_to_evaluate": points, **({"evaluated_rewards": rewards} if rewards else {})}
    return experiment.model_copy(
        update={"search": Experiment.kept({**words, "search": {**words["search"], **more}}).search}
    )


def _results_of(experiment: Experiment, name: str, home: Path, announce: Callable[[str], None]) -> Sequence[_Known]:
    """Return the results of an experiment that are in the space."""
    search = experiment.search
    folder = open_folder(name, home)
    folder.require()
    journal = read_at_once(folder)
    result, earlier = journal.result, Experiment.kept(journal.header.setup["experiment"]).search
    if result.rehearsal and not experiment.resources.kind.is_simulated:
        raise InputError(f"search.warm_start: in {name} {REHEARSAL}; leave it out")
    if (result.metric, result.mode) != (search.metric, search.mode):
        raise InputError(
            f"search.warm_start: {name} ranks by {result.metric} ({result.mode}), and this search by {search.metric} "
            f"({search.mode}); leave it out"
        )
    _require_same_space(search.space, earlier.space, name)
    inside, outside = list[_Known](), list[str]()
    seen = _seen(result, search.results_needed)
    for trial, configuration, metrics in seen:
        gone = {key for key in earlier.space if key not in search.space}  # constants
        point = {key: value for key, value in configuration.items() if key not in gone}
        try:
            checked, merit = check_point(search.space, point, complete=True), search.ranking.merit(metrics)
            inside.append(_Known(trial=trial, point=checked, value=metrics[search.metric], merit=merit))
        except InputError as error:
            outside.append(f"trial {trial}: {error}")
    if not inside:
        why = (
            f"its {counted(len(seen), 'result')} are outside the space ({outside[0]})"
            if outside
            else "it has no result"
        )
        raise InputError(f"search.warm_start: {name} gives nothing, as {why}; leave it out")
    if outside:
        more = f" and {len(outside) - _NAMED} more" if len(outside) > _NAMED else ""
        announce(f"warm start: {name}: outside the space and left out: {'; '.join(outside[:_NAMED])}{more}")
    return inside


def _require_same_space(space: Mapping[str, Any], earlier: Mapping[str, Any], name: str) -> None:
    """Raise InputError unless both search the same parameters; their ranges may differ, and one may be a constant."""
    every = {**earlier, **space}
    differing = sorted(key for key in space.keys() ^ earlier.keys() if isinstance(every[key], Domain))
    if differing:
        verb = "is" if len(differing) == 1 else "are"
        raise InputError(
            f"search.warm_start: {name} has another space: {', '.join(differing)} {verb} in one of the two only; leave "
            "it out"
        )


def _seen(result: Result, enough: int) -> list[tuple[int, Mapping[str, Any], Mapping[str, float]]]:
    """Return trial, configuration and metrics of those that trained long enough, all after as many iterations.

    That is the largest number that `enough` configurations have reached. Repeats of one give their mean: those that
    came as far.
    """
    curves = dict[int, list[Mapping[int, Mapping[str, float]]]]()
    for trial in result.trials:
        curve = {
            at: metrics for _, at, metrics in trial.present_curve if math.isfinite(metrics.get(result.metric, math.nan))
        }
        curves.setdefault(trial.trial // result.repeats * result.repeats, []).append(curve)
    reached = sorted((max(map(max, filter(None, each))) for each in curves.values() if any(each)), reverse=True)
    if not reached:
        return []
    at = reached[min(enough, len(reached)) - 1]
    return [
        (first, result.trials[first].configuration, _mean([curve[at] for curve in each if at in curve]))
        for first, each in curves.items()
        if any(at in curve for curve in each)
    ]


def _mean(reports: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return the means of the metrics that all of the reports have."""
    common = set(reports[0]).intersection(*reports)
    return {metric: fmean(report[metric] for report in reports) for metric in common}
