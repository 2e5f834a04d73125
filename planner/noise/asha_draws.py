"""Random numbers of simulated runs of asha: ranks of results, and times that vary; the same for all plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.exact.table import Floats, Ints
from rubberband.planner.noise.sampling import LEVELS

_SHIFT = 7919


@dataclass(frozen=True, slots=True)
class Factors:
    """Random factors of trials, each number used for several rungs, as drawing them takes longest."""

    bits: npt.NDArray[np.uint16]
    tables: npt.NDArray[np.float32]
    """(rungs or 1, 2**16) Factor of each level."""

    def of(self, cells: Ints, rungs: Ints) -> npt.NDArray[np.float32]:
        """Return the factors of trials in some rungs."""
        stride = int(0.618 * len(self.bits)) | 1  # rungs have other samples' numbers
        bits = self.bits.take(cells + rungs * stride, mode="wrap")
        at: Any = bits if len(self.tables) == 1 else bits + rungs * LEVELS
        found: npt.NDArray[np.float32] = self.tables.take(at)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Times and results of some samples, the same for all plans."""

    ranks: Ints
    """(rungs or 1, samples, trials) Rank of the trial's result in its rung: the lowest is the best."""
    provision_s: Floats
    """(samples,) SCALE of all instances."""
    init_s: Floats
    """INIT_INSTANCE of one instance: equally likely values, in order."""
    slow: Floats
    """(samples,) Probability that the slowest instance is no slower."""
    startup: Factors | None = None
    own: npt.NDArray[np.float32] | None = None
    """(samples * trials,) Factor of a trial in all of its rungs."""
    noise: Factors | None = None
    """Factors of its training in each rung."""
    launches: Launches | None = None
    """Set where instances may be lost."""
    world: Ints | None = None
    """(samples,) Number of the draw that a sample is from, where several are put together; `init_s` has all of them."""

    def slowest_s(self, instances: Ints, columns: Ints) -> Floats:
        """Return INIT_INSTANCE of the slowest of some instances in some samples."""
        levels, first = (len(self.init_s), 0) if self.world is None else (LEVELS, LEVELS * self.world.take(columns))
        levels_at = levels * self.slow.take(columns) ** (1.0 / instances)
        return self.init_s.take(levels_at.astype(np.int64) + first)

    @classmethod
    def together(cls, parts: Sequence[tuple[Draw, int]]) -> Draw:
        """Return the first samples of draws, one after another; none has losses, or other factors than `own`."""
        trials = parts[0][0].ranks.shape[2]
        own = [np.ones(count * trials, np.float32) if one.own is None else one.own for one, count in parts]
        return cls(
            ranks=np.concatenate([one.ranks[:, :count] for one, count in parts], axis=1),
            provision_s=np.concatenate([one.provision_s[:count] for one, count in parts]),
            init_s=np.concatenate([one.init_s for one, _ in parts]),
            slow=np.concatenate([one.slow[:count] for one, count in parts]),
            own=None
            if all(one.own is None for one, _ in parts)
            else np.concatenate([of[: count * trials] for of, (_, count) in zip(own, parts, strict=True)]),
            world=np.arange(len(parts)).repeat([count for _, count in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Instances on spot in some samples, each (launches, samples)."""

    provision_s: Floats
    """SCALE of a replacement."""
    init_s: Floats
    lives_s: Floats
    """From SCALE until it is lost."""
    longer_s: float
    """Further time of a restart, beside a new instance and a start-up."""

    def place(self, numbers: Any, columns: Any) -> Any:
        """Return where the numbers of a run's instance are; those of very many have another sample's."""
        launches, samples = self.lives_s.shape
        return (numbers * samples + columns + numbers // launches * _SHIFT) % (launches * samples)
