"""Mean and variance of every stage's time, which steer the search where times vary, before samples decide.

The makespan of n noisy trials on s slots is a little above n/s times the mean. The excess is sampled for a few s
and interpolated between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rubberband.planner.exact.model import interruptions
from rubberband.planner.exact.table import Floats, Ints, distinct, mean_runs_s
from rubberband.planner.noise.makespan import makespan
from rubberband.planner.noise.sampling import Draws
from rubberband.values.plan import Market, Stage

_ROWS = 200
_FEW_TRIALS = 64
_WAVES = 8


@dataclass(slots=True)
class NoisyMoments:
    """The `Moments` of a job: late is z * variance / (2 tau), so that late seconds add up over the stages.

    Stages with mean m and variance v in sum keep a deadline D with z standard deviations to spare if m + z*sqrt(v) <=
    D. That holds exactly if m + (z/2)*(v/tau + tau) <= D for some tau (the best is sqrt(v)), which the search can add.
    """

    draws: Draws
    z: float = 0.0
    tau_s: float = 1.0
    _grids: dict[int, tuple[Floats, Floats, Floats]] = field(default_factory=dict)
    _known: dict[tuple[Market, tuple[int, ...], tuple[int, ...]], tuple[Floats, Floats]] = field(default_factory=dict)

    def stages_s(self, market: Market, gangs: Ints, slots: Ints) -> tuple[Floats, Floats]:
        """Mean and late seconds, each (stages, counts, gangs)."""
        key = (market, slots.shape, tuple(gangs.tolist()))
        if key not in self._known:
            self._known[key] = self._moments(market, gangs, slots)
        mean_s, variance = self._known[key]
        return mean_s, self.z / (2.0 * self.tau_s) * variance

    def _moments(self, market: Market, gangs: Ints, slots: Ints) -> tuple[Floats, Floats]:
        stages = self.draws.stages
        mean_s, variance = np.empty((len(stages), *slots.shape)), np.empty((len(stages), *slots.shape))
        runs_s = mean_runs_s(stages, self.draws.profile, self.draws.offer, market, gangs)
        for index, stage in enumerate(stages):
            mean_s[index], variance[index] = self._stage(index, stage, market, gangs, slots, runs_s[index])
        return mean_s, variance

    def _stage(
        self, index: int, stage: Stage, market: Market, gangs: Ints, slots: Ints, runs_s: Floats
    ) -> tuple[Floats, Floats]:
        used = np.minimum(slots, stage.trials)
        at, excess, spread = self._grid(index, stage)
        with np.errstate(divide="ignore", invalid="ignore"):
            waves = np.ceil(stage.trials / used)
            load = stage.trials / used + np.interp(used, at, excess)
            startup_s = self.draws.profile.trial_startup_s
            mean_s = startup_s * waves + (runs_s - startup_s) * load
            variance = ((runs_s - startup_s) * np.interp(used, at, spread)) ** 2
            variance = variance + waves * (startup_s * self.draws.profile.startup_cv) ** 2
            if market == "spot":
                variance = variance + load * self._spot_variance(stage, gangs)
        never = slots == 0
        return np.where(never, np.inf, mean_s), np.where(never, 0.0, variance)

    def _grid(self, index: int, stage: Stage) -> tuple[Floats, Floats, Floats]:
        """Numbers of slots; the makespan beyond n/s there, and its standard deviation, in mean training times."""
        if index not in self._grids:
            profile, trials = self.draws.profile, stage.trials
            factor = self.draws.chunk(0).factor(index)[:, :_ROWS]
            at = _slots_to_sample(trials)
            spans = [makespan(factor, int(slots)) for slots in at]
            excess = np.array([span.mean() for span in spans]) - trials / at
            if profile.stage_cv(stage.iterations) == 0.0 and self.draws.speeds is None:
                at = np.arange(1.0, trials + 1.0)
                excess = np.ceil(trials / at) - trials / at
                spans = [np.zeros(1)] * trials
            self._grids[index] = (at, excess, np.array([span.std() for span in spans]))
        return self._grids[index]

    def _spot_variance(self, stage: Stage, gangs: Ints) -> Floats:
        """(gangs,) Variance that interruptions add to a stage: a Poisson number of losses."""
        found = []
        for gpus in gangs.tolist():
            rate, lost_s = interruptions(stage, gpus, self.draws.profile, self.draws.offer)
            steady_s = self.draws.profile.trial_startup_s + stage.iterations * self.draws.profile.iteration_s(gpus)
            found.append(rate * steady_s * lost_s**2)
        return np.array(found)


def _slots_to_sample(trials: int) -> Floats:
    """Return all numbers of slots; for many trials those where a small number of waves changes, and a few more."""
    if trials <= _FEW_TRIALS:
        return np.arange(1.0, trials + 1.0)
    edges = np.ceil(trials / np.arange(1.0, _WAVES + 1.0))
    return distinct(np.concatenate([edges, edges - 1.0, np.round(np.geomspace(1.0, edges[-1], _WAVES))]))
