"""Processes that are forked off one that has imported PyTorch: a gang of them starts without importing it anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[2])
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.nn.parallel", "torch._dynamo", "rubberband.executor.training.run"])


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    process = CONTEXT.Process(target=target, args=args, daemon=True)
    # It gets this process's search path, on which pytest alone has no need for the checkout.
    sys.path.insert(0, ROOT)
    try:
        process.start()
    finally:
        sys.path.remove(ROOT)
    return process
