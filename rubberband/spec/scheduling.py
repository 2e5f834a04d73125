"""The base of the schedulers of an experiment file: stages, size, and how trials change at a SYNC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rubberband.spec.fields import Words
from rubberband.spec.samplers import SamplerType
from rubberband.spec.space import Domain
from rubberband.values.plan import SizeKey, Stage

MAX_TRIALS = 1_000_000
"""Most trials that an experiment may have."""


class Scheduler(Words):
    """A scheduler: `brackets()` are its stages, each up to a SYNC, or one whose trials climb rungs (`Ladder`)."""

    label: ClassVar[str] = ""  # of its plan beside that of another scheduler
    sized_by: ClassVar[tuple[SizeKey | None, SizeKey | None]] = (None, None)  # keys: usually, and with a grid

    most_trials: ClassVar[int] = MAX_TRIALS

    def other(self) -> tuple[str, tuple[Stage, ...]] | None:
        """Return the scheduler to show beside it, and the stages of the same trials under that; None: none."""
        return None

    def falls(self, key: SizeKey) -> list[int]:
        """Return the sizes from which on a search of more trials (or iterations) never needs less, in order."""
        return [1]

    def chain(self, trials: int) -> tuple[Stage, ...]:
        """Return the stages of one more bracket, of `trials` trials; empty where trials climb rungs without a SYNC."""
        return ()

    @property
    def eta(self) -> int | None:
        """The factor by which its stages have fewer trials; None: they are written out, or have none."""
        return None

    def check(self, space: Mapping[str, Any], sampler: SamplerType) -> None:
        """Raise InputError for a space or a sampler that it does not go with."""

    def explored(
        self, space: Mapping[str, Any], configuration: Mapping[str, Any], unit: Callable[[tuple[str, ...], str], float]
    ) -> dict[str, Any]:
        """Return the configuration of a trial that takes over the checkpoint of one with `configuration`.

        `unit(path, purpose)` is the number in (0, 1) from which a parameter is changed. For stages with an `exchange`.
        """
        return dict(configuration)

    def modelled(self, space: Mapping[str, Any]) -> list[tuple[str, Domain]]:
        """Return the parameters, numbers with bounds, that a model of the results so far chooses in such a trial."""
        return []
