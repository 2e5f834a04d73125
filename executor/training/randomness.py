"""Random states of the CPU, for one sample and around the loading of some."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_for(key: int) -> None:
    """Set the random states of the CPU for one sample; about 10 us, so a GPU's are left alone."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)


def random_states() -> tuple[Any, ...]:
    """Return the random states of the CPU, to be compared."""
    numpy_state = np.random.get_bit_generator().state  # type: ignore[attr-defined]
    return random.getstate(), pickle.dumps(numpy_state), torch.default_generator.get_state().numpy().tobytes()


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
