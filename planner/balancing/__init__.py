"""Shares of a batch for unequal workers, as pure functions of looks at them (LB-BSP, SoCC '20)."""

from __future__ import annotations

from typing import Literal

from rubberband.planner.balancing.measured import LineBalancer
from rubberband.planner.balancing.paper import PaperCpuBalancer, PaperGpuBalancer
from rubberband.planner.balancing.shares import Balancer, Line, Look, ShareLimits
from rubberband.planner.balancing.speed_balancer import SpeedBalancer
from rubberband.values.balance import Balance

__all__ = ["Balancer", "Line", "Look", "ShareLimits", "make_balancer"]


def make_balancer(balance: Balance, device: Literal["cpu", "cuda"], num_workers: int) -> Balancer:
    """Return a balancer without any memory. `max_share` is for the caller's `ShareLimits`."""
    if balance.policy == "equal":
        return LineBalancer(num_workers, moves=False)
    if device == "cpu":
        return PaperCpuBalancer(num_workers) if balance.policy == "paper" else SpeedBalancer(num_workers)
    return PaperGpuBalancer(num_workers) if balance.policy == "paper" else LineBalancer(num_workers)
