"""This machine as an elastic cluster: an instance is a real Ray node with logical GPUs."""

from rubberband.cloud.local.provider import LocalProvider, SweptInstance, sweep

__all__ = ["LocalProvider", "SweptInstance", "sweep"]
