"""Placement: which GPUs of which instances a gang trains on (RubberBand §4.4, Algorithm 3). A pure function.

A gang that fits an instance sits whole on one (best fit); a wider one owns whole instances. What need not move stays.
Wider gangs go first, and may displace narrower ones, which are then placed anew.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping

from rubberband.executor.core.events import Gang, Slot


def place(
    allocation: Mapping[int, int],
    previous: Mapping[int, Gang],
    instances: Mapping[str, int],
    locked: Iterable[int] = (),
) -> dict[int, Gang]:
    """Place every trial of `allocation` (trial -> GPUs) on `instances` (name -> GPUs), near to `previous`.

    Trials in `locked` run now and are not displaced. Returns trial -> gang; a trial that finds no room is not in it.
    """
    nodes = _Nodes(instances)
    placement: dict[int, Gang] = {}
    fixed = set(locked)
    for trial in sorted(previous, key=lambda trial: (trial not in fixed, trial)):
        gang = previous[trial]
        if allocation.get(trial) == len(gang) and nodes.can_keep(gang):
            nodes.take(gang)
            placement[trial] = gang
    waiting = [trial for trial in allocation if trial not in placement]
    waiting.sort(key=lambda trial: (-allocation[trial], trial))
    while waiting:
        trial = waiting.pop(0)
        best = nodes.best_fit(allocation[trial])
        if best is None:
            displaced = nodes.make_space(allocation[trial], fixed, placement)
            for other in displaced:
                nodes.free(placement.pop(other))
            waiting = sorted([*waiting, *displaced], key=lambda t: (-allocation[t], t))
            best = nodes.best_fit(allocation[trial])
        if best is not None:
            nodes.take(best)
            placement[trial] = best
            fixed.add(trial)
    return placement


@functools.lru_cache(maxsize=4096)
def slot_of(instance: str, gpu: int) -> Slot:
    """The slot; the same ones are placed over and over."""
    return Slot(instance=instance, gpu=gpu)


class _Nodes:
    """The free GPUs of every instance."""

    def __init__(self, instances: Mapping[str, int]) -> None:
        self._gpus = dict(instances)
        self._largest = max(instances.values(), default=0)
        self._free = {instance: set(range(gpus)) for instance, gpus in instances.items()}

    def can_keep(self, gang: Gang) -> bool:
        """Whether every slot of `gang` exists, is free, and the gang is packed as a new one would be."""
        free = self._free
        for slot in gang:
            if slot.instance not in free or slot.gpu not in free[slot.instance]:
                return False
        if len(gang) == 1:
            return True
        held = {slot.instance for slot in gang}
        return len(held) == 1 or len(gang) == sum(self._gpus[instance] for instance in held)

    def take(self, gang: Gang) -> None:
        free = self._free
        for slot in gang:
            free[slot.instance].remove(slot.gpu)

    def free(self, gang: Gang) -> None:
        for slot in gang:
            self._free[slot.instance].add(slot.gpu)

    def _some(self, instance: str, gpus: int) -> Gang:
        return tuple([slot_of(instance, gpu) for gpu in sorted(self._free[instance])[:gpus]])

    def best_fit(self, gpus: int) -> Gang | None:
        """The fullest instance that still holds `gpus`, else as few wholly free instances as make up `gpus` exactly."""
        if gpus <= self._largest:
            fitting = [(len(free), instance) for instance, free in self._free.items() if len(free) >= gpus]
            return self._some(min(fitting)[1], gpus) if fitting else None
        gang: Gang = ()
        for instance in sorted(self._gpus):
            own = self._gpus[instance]
            if len(self._free[instance]) == own and len(gang) + own <= gpus:
                gang += self._some(instance, own)
        return gang if len(gang) == gpus else None

    def make_space(self, gpus: int, fixed: set[int], placement: Mapping[int, Gang]) -> list[int]:
        """The narrower trials to displace so that a gang of `gpus` fits; empty if that cannot be had."""
        by_space = sorted(self._gpus, key=lambda instance: (-len(self._free[instance]), instance))
        displaced: list[int] = []
        missing = gpus
        wide = gpus > self._largest
        for instance in by_space:
            victims = self._displaceable(instance, self._gpus[instance] if wide else gpus, gpus, fixed, placement)
            if victims is None:
                continue
            if not wide:
                return victims
            displaced += [trial for trial in victims if trial not in displaced]
            missing -= self._gpus[instance]
            if missing <= 0:
                return displaced if missing == 0 else []
        return []

    def _displaceable(
        self, instance: str, wanted: int, gpus: int, fixed: set[int], placement: Mapping[int, Gang]
    ) -> list[int] | None:
        """Trials narrower than `gpus` on `instance` whose GPUs, with the free ones, make `wanted`; None if too few."""
        if wanted > self._gpus[instance]:
            return None
        held = Counter(trial for trial, gang in placement.items() for slot in gang if slot.instance == instance)
        room = len(self._free[instance])
        victims: list[int] = []
        for trial in sorted(held, key=lambda trial: (held[trial], trial)):
            if room >= wanted:
                break
            if trial not in fixed and len(placement[trial]) < gpus:
                victims.append(trial)
                room += held[trial]
        return victims if room >= wanted else None
