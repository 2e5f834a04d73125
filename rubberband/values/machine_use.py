"""Use of a machine by a trial in plain values: its GPU and CPUs over a stretch of training, and the waits in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Use by one worker, or the mean over those of a gang, over a stretch of training of a minute at most."""

    seconds: float
    ago_s: float
    """Seconds from its end to the report that has it."""
    cpu: float
    """CPUs that the worker's process and its children kept busy, on average."""
    memory_bytes: int
    """The most resident memory of these processes together. Memory that they share counts for each."""
    gpu: float | None = None
    """Part of the time, 0 to 1, in which the GPU computed, also for others that share it; None where no driver says."""
    gpu_memory_bytes: int | None = None
    """The most memory of the GPU that was taken."""
    watts: float | None = None
    """Mean power of the GPU."""
    data_s: float | None = None
    """Seconds in which the loop waited for samples, or loaded them; None where the loop is the user's own."""
    peers_s: float | None = None
    """Seconds in which it waited for other workers, their messages included; None for a gang of one."""
    checkpoint_s: float | None = None
    """Seconds in which it waited for a checkpoint, its copy included."""


def mean_use(first: MachineUse, others: Sequence[MachineUse]) -> MachineUse:
    """Return the means over the workers of a gang, for the stretch of the first one.

    `others` has a stretch of each other worker, as long ago as that or somewhat longer. Waits count by their part of
    the time. Memory is that of the worker with the most, and checkpoints are the first worker's.
    """
    every = (first, *others)

    def mean(value: Callable[[MachineUse], float | None], digits: int = 3) -> float | None:
        found = [seen for use in every if (seen := value(use)) is not None]
        return round(sum(found) / len(found), digits) if found else None

    def part(waited_s: float | None, use: MachineUse) -> float | None:
        return None if waited_s is None else waited_s * first.seconds / use.seconds

    gpu_memory = [use.gpu_memory_bytes for use in every if use.gpu_memory_bytes is not None]
    return replace(
        first,
        cpu=mean(lambda use: use.cpu) or 0.0,
        memory_bytes=max(use.memory_bytes for use in every),
        gpu=mean(lambda use: use.gpu),
        gpu_memory_bytes=max(gpu_memory, default=None),
        watts=mean(lambda use: use.watts, 1),
        data_s=mean(lambda use: part(use.data_s, use)),
        peers_s=mean(lambda use: part(use.peers_s, use)),
    )
