"""This machine as an elastic cluster: an instance is a real Ray node with logical GPUs."""

from rubberband.cloud.local.provider import CleanedUpInstance, LocalProvider, clean_up

__all__ = ["CleanedUpInstance", "LocalProvider", "clean_up"]
