"""Whether configurations fit into the memory of the offered instance types, by what the check of the trial measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rubberband.cloud.catalogue import Table, table_of
from rubberband.cloud.offers import offers
from rubberband.errors import InputError
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck, brief
from rubberband.executor.training.checking import check
from rubberband.planning.least_gang import memory_of_gpu
from rubberband.planning.memory_model import (
    LEAST,
    LEAST_RESIDENT,
    Configuration,
    Exploring,
    MemoryModel,
    MemoryPoint,
    OutOfTime,
)
from rubberband.spec.experiment import Experiment
from rubberband.units import counted, format_bytes
from rubberband.values.memory import FILLED

_PLENTY = 0.5
"""If the configuration that was trained takes less of a type's memory, no other one is measured."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of one worker on an instance type."""

    name: str
    room_bytes: float
    is_gpu: bool


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Findings about memory."""

    lines: Sequence[str] = ()
    """A line for each type; one line where all configurations fit."""
    warning: str = ""
    """The line on configurations that fit on no type; empty: each fits on one, as far as is known."""
    fault: str = ""
    """Why no trial can be trained; empty: some can."""


def rooms(experiment: Experiment, table: Table | None = None) -> list[Room]:
    """Return the memory of a worker on each offered type of which it is known."""
    found, resources = list[Room](), experiment.resources
    on_demand = resources.model_copy(update={"market": "on_demand"})  # the price of spot may be unknown
    for offer in offers(on_demand, table=table):
        own, name = memory_of_gpu(experiment, offer, table), offer.instance_type
        if own:
            where = "a GPU of this machine" if resources.kind.is_this_machine else name
            found.append(Room(where, FILLED * own / resources.trials_per_gpu, is_gpu=True))
        elif own == 0.0 and resources.kind.is_this_machine:
            whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            workers = offer.slots * offer.max_instances
            found.append(Room("this machine", FILLED * whole / workers, is_gpu=False))
        elif own == 0.0 and (row := table_of(resources, table=table).get(name)) and row.memory_gib is not None:
            found.append(Room(name, FILLED * row.memory_gib * 2**30 / offer.slots, is_gpu=False))
    return found


def memory_fit(
    experiment: Experiment,
    config: Configuration,
    found: TrialCheck,
    measure: Callable[[Configuration], float],
    table: Table | None = None,
) -> MemoryFit:
    """Return what is known of the memory of an experiment's configurations, of which one was checked.

    `measure` returns the peak of another one in bytes, or raises OutOfTime. None is measured where the checked one
    takes less than half of a worker's memory.
    """
    on_gpu = found.begun_bytes == 0
    try:
        places = [each for each in rooms(experiment, table) if each.is_gpu or not on_gpu]
    except InputError:  # which is a problem already
        return MemoryFit()
    if not places or found.peak_bytes is None:
        return MemoryFit()
    return _Fit(experiment, MemoryPoint(config, float(found.peak_bytes)), found, places).find(measure)


class _Fit:
    def __init__(self, experiment: Experiment, first: MemoryPoint, found: TrialCheck, places: Sequence[Room]) -> None:
        self._experiment, self._first, self._found, self._places = experiment, first, found, places
        self._is_guess = found.begun_bytes > 0 and any(place.is_gpu for place in places)
        """Whether memory on a GPU is known from the CPU alone."""

    def find(self, measure: Callable[[Configuration], float]) -> MemoryFit:
        first, tightest = self._first, max(self._places, key=lambda place: self._share(place, self._first.peak_bytes))
        if self._share(tightest, first.peak_bytes) < _PLENTY:
            is_said = tightest.name != "this machine"
            return MemoryFit([f"{self._of(tightest, first.peak_bytes)}; no other one was measured"] if is_said else [])
        space, is_resident = self._experiment.search.space, self._found.begun_bytes > 0
        least, floor_bytes = LEAST_RESIDENT if is_resident else LEAST, float(self._found.begun_bytes)
        exploring = Exploring(first, space, measure, floor_bytes=floor_bytes, least=least)
        try:
            largest = exploring.largest()
            if self._share(tightest, largest.peak_bytes) <= 1.0:
                which = self._changed(largest.config)
                return MemoryFit([f"{self._of(tightest, largest.peak_bytes)} with the largest values{which}"])
            return self._judged(exploring.model())
        except OutOfTime:
            more = "larger ones could not be measured here in the time (`rubberband check --limit` allows more)"
            return MemoryFit([f"{self._of(tightest, first.peak_bytes)}; {more}"])

    def _need(self, place: Room, peak_bytes: float) -> float:
        return peak_bytes - (self._found.begun_bytes if place.is_gpu else 0)

    def _share(self, place: Room, peak_bytes: float) -> float:
        return self._need(place, peak_bytes) / place.room_bytes

    def _of(self, place: Room, peak_bytes: float) -> str:
        about = "about " if place.is_gpu and self._is_guess else ""
        return (
            f"{about}{format_bytes(self._need(place, peak_bytes))} of {format_bytes(place.room_bytes)} on {place.name}"
        )

    def _changed(self, config: Configuration) -> str:
        values = {name: value for name, value in config.items() if value != self._first.config[name]}
        return f": {brief(values)}" if values else ""

    def _judged(self, model: MemoryModel) -> MemoryFit:
        configs = self._experiment.configurations()
        predicted = [(model.predict(config), config) for config in configs]
        lines, over_all = list[str](), list(predicted)
        for place in self._places:
            over = [one for one in predicted if self._share(place, one[0]) > 1.0]
            over_all = [one for one in over_all if one in over]
            fitting = max((one[0] for one in predicted if one not in over), default=None)
            line = self._of(place, min(predicted, key=_bytes)[0] if fitting is None else fitting)
            if over:
                line += f"; {self._which(over, len(configs), model)} not fit: {self._words(place, over, model)}"
            lines.append(line)
        if not over_all:
            return MemoryFit(lines)
        widest = max(self._places, key=lambda place: place.room_bytes)
        on = "any of the offered types" if len(self._places) > 1 else widest.name
        which = f"{self._which(over_all, len(configs), model)} not fit on {on}: {self._words(widest, over_all, model)}"
        room = f"a worker has {format_bytes(widest.room_bytes)}"
        if self._found.takes_parts:
            return MemoryFit(lines, f"{which}, and {room}; they will take fewer samples at once, and train longer")
        fix = "use a smaller model or batch, or a type with more memory"
        if len(over_all) == len(configs) and not self._is_guess:
            return MemoryFit(lines, fault=f"memory: {which}, and {room}; {fix}")
        return MemoryFit(lines, f"{which}, and {room}; {fix}, or they fail there")

    def _which(self, over: Sequence[Any], whole: int, model: MemoryModel) -> str:
        return f"{len(over)} of {counted(whole, 'configuration')} {'does' if len(over) == 1 else 'do'}"

    def _words(self, place: Room, over: Sequence[tuple[float, Mapping[str, Any]]], model: MemoryModel) -> str:
        """Return the least configuration that does not fit, by what counts of it."""
        least, config = min(over, key=_bytes)
        names = {*model.slopes, *(name for name, _, _ in model.options)}
        values = brief({name: value for name, value in config.items() if name in names})
        return f"{values} takes {format_bytes(self._need(place, least))}" if values else format_bytes(least)


def _bytes(predicted: tuple[float, Any]) -> float:
    return predicted[0]


class Measuring:
    """Measures the memory of other configurations, each in a process of its own, as long as the time lasts."""

    def __init__(
        self,
        order: CheckOrder,
        found: TrialCheck,
        until: float,
        cancelled: Callable[[], bool],
        fork_server: Path | None,
    ) -> None:
        self._order, self._until, self._cancelled, self._fork_server = order, until, cancelled, fork_server
        self._took_s = sum(found.seconds.get(name, 0.0) for name in ("import", "set-up", "iteration"))

    def __call__(self, config: Mapping[str, Any]) -> float:
        """Return the peak in bytes. Raises OutOfTime, also if the configuration cannot be trained here."""
        left_s = self._until - time.monotonic()
        if self._cancelled() or left_s < self._took_s:
            raise OutOfTime
        began_s = time.monotonic()
        order = replace(self._order, segment=replace(self._order.segment, config=config), only_memory=True)
        with open(os.devnull, "wb") as nothing:
            found = check(
                order, limit_s=left_s, output=nothing, cancelled=self._cancelled, fork_server=self._fork_server
            )
        self._took_s = max(self._took_s, time.monotonic() - began_s)
        if found.peak_bytes is None:
            raise OutOfTime
        return float(found.peak_bytes)
