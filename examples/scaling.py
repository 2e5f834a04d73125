"""Trial that only sleeps for the time in its profile, to watch wide clusters on a small machine.

An iteration on g GPUs sleeps e(g) seconds, where e is the `profile` of scaling.yaml beside this file, and the "loss"
follows a curve that depends on the configuration. No GPU, no torch. Run it with `rubberband run examples/scaling.yaml`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rubberband

# Read at import, while an instance starts, so that the start-up of the first trial need not wait for it.
_PROFILE = rubberband.load_experiment(Path(__file__).with_name("scaling.yaml")).loaded_profile()


class ScalingTrial(rubberband.Trial):
    """Configuration: `floor` (the final loss) and `decay` (the power of 1/t with which it is approached).

    `pace` (default 1) multiplies e(g).
    """

    def setup(self, config: Mapping[str, Any], context: rubberband.TrialContext) -> None:
        """Look up e(g) for the size of this gang; every worker of the gang sleeps the same time."""
        assert _PROFILE is not None
        self._iteration_s = _PROFILE.iteration_s(context.num_workers) * config.get("pace", 1.0)
        self._config = config
        self._iterations = 0

    def iterate(self) -> dict[str, float]:
        """Sleep e(g) seconds and report the loss after one more iteration."""
        time.sleep(self._iteration_s)
        self._iterations += 1
        return {"loss": self._config["floor"] + self._iterations ** -self._config["decay"]}

    def save(self) -> int:
        """Return the number of iterations, which is the whole state."""
        return self._iterations

    def load(self, state: int) -> None:
        self._iterations = state
