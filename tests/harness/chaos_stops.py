"""Random rules of `search.stop` for runs in random weather, and what they must and must not end.

The watch knows the rules by a plain reading of them: it goes through a whole curve at every report.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from random import Random

from rubberband.executor import Controller, Event, Job, LimitsChanged, State, TrialReported, TrialStatus
from rubberband.executor.core.history import SearchEnd, TrialCut
from rubberband.executor.core.trial_state import TrialState
from rubberband.values.stopping import Median, NoImprovement, Patience, Plateau, StopRules
from rubberband.values.worth import RestWorth


def random_rules(source: Random, job: Job) -> StopRules:
    """Draw at least one rule, with limits at which some act early, some late, and some not at all.

    None ends a trial of a population.
    """
    drawn = source.sample(["target", "patience", "median", "no_improvement"], source.randint(1, 3))
    if job.stages[0].exchange is not None:
        drawn = [rule for rule in drawn if rule not in ("patience", "median")] or ["target"]
    std = source.uniform(0.01, 0.1) if source.random() < 0.3 else None
    patience = Patience(
        iterations=source.randint(2, 4),
        min_delta=0.0 if std is not None else source.choice([0.0, 0.05]),
        std=std,
        after=source.choice([0, 0, 3]),
    )
    return StopRules(
        target=source.uniform(0.4, 1.1) if "target" in drawn else None,
        patience=patience if "patience" in drawn else None,
        median=Median(after=source.randint(1, 3), trials=source.randint(1, 4)) if "median" in drawn else None,
        no_improvement=_no_improvement(source, job) if "no_improvement" in drawn else None,
        grace_period=source.choice([1, 1, 2]),
        worth_per_usd=source.uniform(0.0, 0.3) / job.prediction.cost_usd if source.random() < 0.3 else None,
    )


def _no_improvement(source: Random, job: Job) -> NoImprovement:
    which = source.choice(["trials", "time", "cost", "syncs", "plateau"])
    return NoImprovement(
        trials=source.randint(1, 8) if which == "trials" else None,
        time_s=source.uniform(0.05, 0.5) * job.prediction.jct_s if which == "time" else None,
        cost_usd=source.uniform(0.05, 0.5) * job.prediction.cost_usd if which == "cost" else None,
        syncs=source.randint(1, 2) if which == "syncs" else None,
        plateau=Plateau(top=source.randint(2, 6), std=source.uniform(0.0, 0.1), reports=source.randint(0, 5))
        if which == "plateau"
        else None,
        min_delta=source.choice([0.0, 0.0, 0.02]) if which != "plateau" else 0.0,
    )


def uneven(seed: object) -> Callable[[int, int], float]:
    """Return the metric of trials of random quality, up from 0 to 1 with noise."""

    def metric(trial: int, iterations: int) -> float:
        level = Random(f"{seed}/{trial}").uniform(0.2, 1.0)
        return level * (1.0 - 0.7**iterations) + Random(f"{seed}/{trial}/{iterations}").gauss(0.0, 0.03)

    return metric


class StopWatch:
    """Looks at every event after the controller has taken it in; `wrong` is what must not have been."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self._target = job.stop.target
        self._top: list[float] = []
        self._alike = 0

    def saw(self, event: Event, controller: Controller) -> None:
        state = controller.state
        if isinstance(event, LimitsChanged) and event.target is not None:
            self._target = event.target
        self._ended(state)
        if not isinstance(event, TrialReported):
            return
        trial = state.trials[event.trial]
        latest = trial.reports[-1] if trial.reports else None
        if latest is None or latest.iterations != event.iterations or latest.reported_at != event.occurred_at:
            return  # of an attempt that had been stopped
        self._cut(state, trial)
        self._reached(state, trial)
        self._alike_or_not(state, trial, latest.metrics[self._job.metric])

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds and len(self.wrong) < 10:
            self.wrong.append(otherwise)

    def _cut(self, state: State, trial: TrialState) -> None:
        """A trial is ended at the report at which its curve says so, and at no other."""
        cuts = [cut for cut in state.history.of(TrialCut) if cut.trial == trial.trial]
        is_cut = bool(cuts) and cuts[-1].iterations == trial.iterations and trial.ended
        rule = self._rule(state, trial)
        if trial.status is TrialStatus.QUEUED or trial.status is TrialStatus.FAILED:
            return
        self._require(not is_cut or rule is not None, f"trial {trial.trial} ends at {trial.iterations} without a rule")
        if rule is not None and not trial.ended:
            self._require(False, f"trial {trial.trial} goes on past {trial.iterations}, where {rule} ends it")
        self.seen[f"ended by {rule}"] += is_cut

    def _rule(self, state: State, trial: TrialState) -> str | None:
        stop, job = self._job.stop, state.job  # with the brackets that were added
        last = job.iterations_by(job.bracket_of(trial.reports[-1].stage).end_stage - 1)
        if not self._is_saved(trial) or not stop.grace_period <= trial.iterations < last:
            return None
        curve = [report.metrics[job.metric] for report in trial.reports]
        if stop.patience is not None and trial.iterations >= stop.patience.after and _stalls(curve, stop.patience):
            return "patience"
        if stop.median is not None and len(curve) >= stop.median.after:
            since, until = stop.median.after - 1, trial.iterations
            others = [t for t in state.trials if t is not trial and len(t.reports) >= until]
            means = [statistics.fmean(r.metrics[job.metric] for r in t.reports[since:until]) for t in others]
            if len(means) >= stop.median.trials and max(curve) < statistics.median(means) - 1e-12:
                return "median"
        return None

    def _reached(self, state: State, trial: TrialState) -> None:
        """Repeats reach it by their mean, once all have results; with limits, where all of them keep these."""
        target, first = self._target, trial.trial // self._job.repeats * self._job.repeats
        repeats = [
            one for one in state.trials[first : first + self._job.repeats] if one.status is not TrialStatus.FAILED
        ]
        values = [one.reports[-1].metrics[self._job.metric] for one in repeats if one.reports]
        if target is None or len(values) < len(repeats) or any(map(self._breaks, repeats)):
            return
        kept = any(
            v >= target and one.reports[-1].saved_iterations is None for one, v in zip(repeats, values, strict=True)
        )
        if statistics.fmean(values) < target or not kept:
            return
        is_late = state.course != "running" and state.ended_by is None
        is_last = state.ended_by is None and _is_last(state)
        self._require(
            is_late or is_last or state.ended_by is not None, f"trial {trial.trial} reaches {values} of {target}"
        )
        self.seen["reached"] += state.ended_by is not None

    def _is_saved(self, trial: TrialState) -> bool:
        saved = trial.reports[-1].saved_iterations
        return saved is None or (saved == 0 and not self._job.profile.resumes)

    def _breaks(self, trial: TrialState) -> bool:
        return bool(self._job.limits) and trial.trial % 4 == 3

    def _alike_or_not(self, state: State, trial: TrialState, value: float) -> None:
        rule = self._job.stop.no_improvement
        if rule is None or rule.plateau is None or self._breaks(trial):
            return
        self._top = sorted([*self._top, value])[-rule.plateau.top :]
        is_alike = len(self._top) == rule.plateau.top and statistics.pstdev(self._top) <= rule.plateau.std
        self._alike = self._alike + 1 if is_alike else 0
        self._require(
            state.course != "running" or self._alike <= rule.plateau.reports or _is_last(state),
            f"the best results are alike for {self._alike} reports, and it goes on",
        )

    def _ended(self, state: State) -> None:
        """A search that a rule ended trains nothing, and has the reason of the rule."""
        if state.ended_by is None:
            return
        self._require(not state.running(), f"{state.ended_by.rule} has ended it, and trials train")
        self._require(state.history.of(SearchEnd)[-1] is state.ended_by, "its end is not its latest record")
        if state.ended_by.rule == "worth":
            per_usd, least = state.history.of(RestWorth)[-1].per_usd, self._job.stop.worth_per_usd
            is_less = per_usd is not None and least is not None and per_usd < least
            self._require(is_less, f"{per_usd} per USD is no less than worth={least}")
        self.seen[f"search ended by {state.ended_by.rule}"] += state.course == "finished"


def _is_last(state: State) -> bool:
    return not any(lane.runners or lane.waiters for lane in state.lanes)


def _stalls(curve: list[float], patience: Patience) -> bool:
    if patience.std is not None:
        latest = curve[-patience.iterations :]
        return len(latest) == patience.iterations and statistics.pstdev(latest) < patience.std
    best, waited = curve[0], 0
    for value in curve[1:]:
        if value > best + patience.min_delta:
            best, waited = value, 0
        else:
            waited += 1
    return waited >= patience.iterations
