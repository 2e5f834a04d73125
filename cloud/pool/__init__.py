"""A pool: machines that several experiments share, lent by a broker. To an experiment it is a provider."""

from rubberband.cloud.pool.journal import FileJournal, PoolLimits
from rubberband.cloud.pool.pool import LentInstance, Pool
from rubberband.cloud.pool.provider import PoolProvider, RemotePool, open_cluster
from rubberband.cloud.pool.server import PoolServer

__all__ = [
    "FileJournal",
    "LentInstance",
    "Pool",
    "PoolLimits",
    "PoolProvider",
    "PoolServer",
    "RemotePool",
    "open_cluster",
]
