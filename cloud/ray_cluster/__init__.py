"""An existing Ray cluster: its nodes as the driver sees them, and a provider whose instances are placement groups."""

from rubberband.cloud.ray_cluster.provider import RayClusterProvider

__all__ = ["RayClusterProvider"]
