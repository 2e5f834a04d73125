"""Plan previews: asked once, planned in a process of their own, and remembered."""

from __future__ import annotations

from dataclasses import dataclass

from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store
from rubberband.experiment import Experiment
from rubberband.planner.families import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The answer to a preview, ready to be sent."""

    id: str
    status: int
    """200; 422 where no plan meets the constraints."""
    body: bytes
    """`rubberband.estimate/1` as JSON, or a problem that carries it."""


class Plans:
    """Previews plans. Pure: the same question has the same answer, and the same id."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store

    async def start(self) -> None:
        """Start the processes that plan."""

    async def close(self) -> None:
        """End them."""

    async def preview(
        self, experiment: Experiment, *, policy: Policy = "optimal", frontier: bool = False, seed: int = 0
    ) -> PlanAnswer:
        """Plan an experiment that would start now. Raises Problem for what cannot be planned."""
        raise NotImplementedError
