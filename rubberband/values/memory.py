"""The memory that a trial's parameters need in training, which says how many GPUs are the fewest for it."""

from __future__ import annotations

from dataclasses import dataclass

FILLED = 0.9
"""Share of a GPU's memory that may be filled by what is known of a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMemory:
    """Memory of a trial's parameters, with their gradients and the states of the optimizer; the largest of several."""

    parameters: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    optimizer: str
    """Name of its class."""
    is_counted: bool = True
    """Whether the states were counted. Else they are taken to be those of Adam."""
    is_divided: bool = False
    """Whether a gang divides them (`sharding`). Else each of its GPUs has all of them."""
    configurations: int = 1
    """Configurations that were built."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all of it."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes

    def least_gang(self, gpu_bytes: float) -> int | None:
        """Return the fewest GPUs of `gpu_bytes` memory that hold it; None if no number does."""
        room = FILLED * gpu_bytes
        if self.total_bytes <= room:
            return 1
        return max(2, -int(-self.total_bytes // room)) if self.is_divided and room > 0.0 else None

    @property
    def in_words(self) -> str:
        """Its parameters and the bytes of each: `7 billion parameters x 16 bytes (weights 4, gradients 4, AdamW 8)`."""
        parts = ("weights", self.weight_bytes), ("gradients", self.gradient_bytes), (self.optimizer, self.state_bytes)
        number = max(1, self.parameters)
        each = ", ".join(f"{name} {size / number:.3g}" for name, size in parts)
        assumed = "" if self.is_counted else ", assumed"
        return f"{_count(self.parameters)} parameters x {self.total_bytes / number:.3g} bytes ({each}{assumed})"


def _count(number: int) -> str:
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"
