"""Use of a machine by a trial in plain values: its GPU and CPUs over a stretch of training, and the waits in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Use by the first worker of a gang, over a stretch of training of a minute at most."""

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
