"""What a provider offers beyond `Provider` if its instances form a Ray cluster: the head that they join."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from rubberband.cloud.provider import Provider
from rubberband.errors import ProviderError

INSTANCE_LABEL = "rubberband/instance"
"""Label of a Ray node; its value is the name of the instance that the node is."""


class HeadError(ProviderError):
    """The head that instances join did not start."""


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

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What trials run on."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """By which instances are held: Unix time that no step of this machine's clock moves."""
        ...

    @property
    def remote(self) -> bool:
        """Whether instances are other machines: they see neither this one's files nor its leases.

        The driver then sends the code along, and renews leases and hears of interruptions through Ray
        (see `rubberband.cloud.node`).
        """
        ...

    @property
    def look_s(self) -> float:
        """How often `describe` may be asked, in seconds."""
        ...

    def slowness(self, instance: str) -> float:
        """How many times as long as usual workers may take to start on an instance; 1 where nothing is known."""
        ...

    def last_words(self, instance: str) -> str:
        """The line of a living instance's boot or node log that tells best why it is not of use; empty if none does."""
        ...

    def head(self) -> Head | None:
        """The living head, or None."""
        ...

    def ensure_head(self) -> Head:
        """The living head, which is started if there is none; returns once it answers.

        Raises HeadError if it does not start.
        """
        ...
