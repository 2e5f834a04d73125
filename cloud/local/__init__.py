"""This machine as an elastic cluster: an instance is a real Ray node with logical GPUs."""

from rubberband.cloud.local.provider import EndedInstance, LocalProvider, clean_up

__all__ = ["EndedInstance", "LocalProvider", "clean_up"]
