"""Random states of the CPU, for one sample and around the loading of some."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

Generator = Literal["random", "numpy", "torch"]
"""Global source of random numbers, of the CPU."""
GENERATORS: frozenset[Generator] = frozenset({"random", "numpy", "torch"})


def seed_for(key: int, generators: Set[Generator] = GENERATORS) -> None:
    """Seed the generators for one sample: together about 10 us, torch's alone 2 us."""
    if "random" in generators:
        random.seed(key)
    if "numpy" in generators:
        np.random.seed(key & 0xFFFFFFFF)
    if "torch" in generators:
        torch.default_generator.manual_seed(key >> 1)


def random_states() -> dict[Generator, Any]:
    """Return the state of each generator, to be compared."""
    return {
        "random": random.getstate(),
        "numpy": pickle.dumps(np.random.get_bit_generator().state),  # type: ignore[attr-defined]
        "torch": torch.default_generator.get_state().numpy().tobytes(),
    }


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the random states of the CPU after the block."""
    states = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
