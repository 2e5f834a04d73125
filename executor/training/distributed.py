"""A function that runs in every worker of a gang: the mark that it is one, and its share of a batch.

Only the standard library is imported, as the function's process imports this before anything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import lcm
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__rubberband_distributed__"
GANGS = "RUBBERBAND_GANGS"
"""Variable with the numbers of workers that a plan may give a trial, such as 1,2,3,4; `check` trains it on fewer."""


def distributed(function: _Function) -> _Function:
    """Mark a function trial that runs in every worker of a gang, in a process of its own: `@rubberband.distributed`.

    The function sees torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, …) and all GPUs of
    the gang on its machine, and forms a process group as under torchrun. It may call `rubberband.report` on any worker;
    the metrics of rank 0 count. A `checkpoint` is the path of a folder, and `rubberband.get_checkpoint()` returns one.

    Args:
        function: The trial, a function of one argument, its configuration.

    Returns:
        The same function.

    Examples:
        >>> @rubberband.distributed
        ... def train(config):
        ...     batch_size = rubberband.per_worker(64)
    """
    setattr(function, _MARK, True)
    return function


def is_distributed(target: object) -> bool:
    """Whether a trial is a function that `distributed` has marked."""
    return getattr(target, _MARK, False) is True


def per_worker(batch_size: int) -> int:
    """Return each worker's part of a batch of `batch_size` samples over the whole gang; outside a gang, all of them.

    Args:
        batch_size: Samples of an optimizer step, over the whole gang.

    Returns:
        Samples of this worker.

    Raises:
        ValueError: If the batch cannot be divided equally.

    Examples:
        >>> rubberband.per_worker(64)
        64
    """
    here = int(os.environ.get("WORLD_SIZE", "1"))
    planned = [int(size) for size in os.environ[GANGS].split(",")] if GANGS in os.environ else range(1, here + 1)
    checked = (here, *planned) if GANGS in os.environ else (here,)
    for workers in checked:
        if batch_size < 1 or batch_size % workers:
            sizes = [size for size in planned if batch_size > 0 and batch_size % size == 0]
            listed = f", or write resources.gpus_per_trial: {{sizes: {sizes}}}" if sizes else ""
            raise ValueError(
                f"per_worker({batch_size}): a batch of {batch_size} cannot be divided equally among {workers} workers, "
                f"which a trial may get; give a multiple of {lcm(*checked)}{listed}"
            )
    return batch_size // here
