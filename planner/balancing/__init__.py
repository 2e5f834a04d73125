"""Shares of a batch for unequal workers, as pure functions of looks at them (LB-BSP, SoCC '20)."""

from rubberband.planner.balancing.balancer import Balancer, Line, Look, ShareLimits
from rubberband.planner.balancing.making import make_balancer
from rubberband.planner.balancing.shares import even_shares, scale_shares

__all__ = ["Balancer", "Line", "Look", "ShareLimits", "even_shares", "make_balancer", "scale_shares"]
