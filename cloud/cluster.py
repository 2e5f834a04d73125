"""What a provider offers beyond `Provider` if its instances form a Ray cluster: the head that they join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rubberband.cloud.provider import Provider

INSTANCE_LABEL = "rubberband/instance"
"""Label of a Ray node; its value is the name of the instance that the node is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How a driver attaches to a cluster. The head has no slots and is not one of the instances."""

    address: str
    """`host:port` of its control store."""
    temp_dir: str | None
    """Ray's temporary directory on the head: tells the head from instances on the same machine. None: no matter."""
    environment: Mapping[str, str]
    """What the driver's environment must hold for the cluster to let it in."""


class ClusterProvider(Provider, Protocol):
    """A provider whose instances are nodes of one Ray cluster, labelled with `INSTANCE_LABEL`."""

    def head(self) -> Head | None:
        """The living head, or None."""
        ...

    def ensure_head(self) -> Head:
        """The living head, which is started if there is none; returns once it answers.

        Raises ProviderError if it does not start.
        """
        ...
