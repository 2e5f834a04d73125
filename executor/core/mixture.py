"""Instances of other types, used instead of the planned one: how fast gangs on them are, by the speeds of the types.

Everything is 1 as long as no type with another speed is held. Pure.
"""

from __future__ import annotations

from collections import Counter

from rubberband.executor.core.events import Gang
from rubberband.executor.core.fleet import InstanceRecord
from rubberband.executor.core.state import Job, Lane, State
from rubberband.values.mixture import mixed_factor, mixture_words


def speed_of(job: Job, record: InstanceRecord) -> float:
    """Return the speed of an instance's GPUs over that of the planned type."""
    return job.speeds.get(record.instance_type, 1.0)


def gang_factor(job: Job, state: State, gang: Gang) -> float:
    """Return how many times longer than the profile's an iteration takes on a gang's instances."""
    if not job.speeds or not gang:
        return 1.0
    speeds = [speed_of(job, state.instances[slot.instance]) for slot in gang]
    return mixed_factor(speeds, balanced=job.balances)


def lane_factor(job: Job, state: State, lane: Lane) -> float:
    """Return the same of trials that are still to start on a lane's ready instances, on average.

    Gangs within an instance are each as fast as that; one that spans several is as fast as its balancing makes it.
    """
    ready = state.held(lane).ready
    if not job.speeds or not ready:
        return 1.0
    spans = bool(lane.stages) and state.chosen(lane).gpus_per_trial > job.offer.gpus
    return mixed_factor([speed_of(job, record) for record in ready], balanced=job.balances or not spans)


def assumed(job: Job, state: State, lane: Lane) -> str:
    """Return the assumption about a lane's instances of other types, in words; empty where there are none."""
    counts = Counter(record.instance_type or job.offer.instance_type for record in state.held(lane).ready)
    told = mixture_words(counts, job.speeds, job.offer.instance_type)
    if not told:
        return ""
    return f"{told}; {'speeds add up in a gang' if job.balances else 'a gang waits for its slowest GPU'}"
