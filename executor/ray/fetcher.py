"""The fetch of models and data on an instance that is another machine, before its workers start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from rubberband.errors import InputError
from rubberband.features import part

_LOOK_S = 0.5


class FetchActor:
    """Runs on the instance."""

    def fetch(self, order: Any) -> Any:
        """Carry out an order; return what was fetched and the variables of trials, or why it cannot be fetched."""
        try:
            return part("fetch").fetch(order)
        except InputError as error:
            return str(error)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """The driver's side, for all instances of a run."""

    order: Any
    """Order of the files that each machine fetches."""
    on_fetched: Callable[[Any], None]
    """Called with each fetch that has ended."""

    def fetch(self, options: Mapping[str, Any], is_unwanted: Callable[[], bool]) -> Mapping[str, str] | str:
        """Wait until a node, which Ray's `options` select, has all; return the variables of its trials.

        A text says why it has not, or that it `is_unwanted`. Raises RayError if the node ends. The fetch ends by itself
        once nothing comes any more, so that its time has no limit here.
        """
        kind: Any = ray.remote(FetchActor)
        actor = kind.options(num_cpus=0, memory=1, max_restarts=0, **options).remote()
        try:
            pending = [actor.fetch.remote(self.order)]
            while not ray.wait(pending, timeout=_LOOK_S)[0]:
                if is_unwanted():
                    return "released"
            found: Any = ray.get(pending[0])
        finally:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if isinstance(found, str):
            return found
        fetched, variables = found
        self.on_fetched(fetched)
        return dict(variables)
