"""Random states that follow from the trial's seed alone, so that nothing random need be saved in a checkpoint."""

from __future__ import annotations

import random
import sys
from typing import Literal

import numpy as np

Stream = Literal["setup", "order", "train", "evaluate"]
"""What the randomness is for; streams of the same seed are independent."""

_STREAMS: dict[Stream, int] = {"setup": 0, "order": 1, "train": 2, "evaluate": 3}


def seed_sequence(stream: Stream, seed: int, *place: int) -> np.random.SeedSequence:
    """The seed of one stream at one place (an epoch; an iteration and a rank). `seed` may be any integer."""
    return np.random.SeedSequence([seed % 2**64, _STREAMS[stream], *place])


def reseed(stream: Stream, seed: int, *place: int) -> None:
    """Set the global random states of Python and NumPy, and torch's where torch has been imported."""
    words = seed_sequence(stream, seed, *place).generate_state(4, np.uint64)
    random.seed(int(words[0]))
    np.random.seed([int(words[1]) & 0xFFFFFFFF, int(words[1]) >> 32])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(words[2]))
