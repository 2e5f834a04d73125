"""This machine as an elastic cluster: an instance is a real Ray node with logical GPUs."""

from rubberband.cloud.local.provider import LocalProvider, SweptInstance, sweep
from rubberband.cloud.local.ray_node import real_gpus

__all__ = ["LocalProvider", "SweptInstance", "real_gpus", "sweep"]
