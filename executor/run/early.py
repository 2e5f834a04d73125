"""Starts what a run on this machine needs while its trial is checked: Ray head, instances and fork server.

Only instances of this machine start early, as they are free; where trials use real GPUs, the check needs them first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from shutil import rmtree
from typing import TYPE_CHECKING

from rubberband.cloud.clock import elapsed_s
from rubberband.cloud.provider import ClusterProvider
from rubberband.cloud.ray_head.instance import lock
from rubberband.cloud.ray_head.ray_node import end, observe
from rubberband.errors import ProviderError
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import LaunchInstance, Started
from rubberband.executor.core.job import Job
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.run.session import cluster_request, fork_server_of, open_provider
from rubberband.executor.training.run_spec import RunSpec
from rubberband.interrupts import uninterrupted

if TYPE_CHECKING:
    from rubberband.executor.ray.fork_server import ForkServer

_LEASE_S = 20.0
"""All ends by itself this long after its driver was killed."""
_JOIN_S = 5.0


@dataclass(eq=False, kw_only=True)
class EarlyStart:
    """Lives until its owner closes it, or dies; a run that takes it over closes it as well."""

    provider: ClusterProvider
    fork_server: ForkServer
    begun_s: float = field(default_factory=elapsed_s)
    """Its beginning, by `elapsed_s`."""
    _threads: list[threading.Thread] = field(default_factory=list)
    _handed_over: threading.Event = field(default_factory=threading.Event)

    def begin(self, instances: list[str]) -> None:
        """Start these instances."""
        starts: list[Callable[[], object]] = [partial(self.provider.launch_early, name) for name in instances]
        starts = starts or [self.provider.ensure_head]
        for work in (self._renew, _import, *starts):
            thread = threading.Thread(target=_quietly, args=(work,), daemon=True, name="early start")
            self._threads.append(thread)
            thread.start()

    def ahead(self, job: Job) -> Job:
        """Return the job whose prediction leaves out what has passed of its first launch: all, once its instances run.

        Its plan counts the launch as whole, as those of later stages are. A launch lasts until the trial is imported,
        which workers that cannot be forked do only then.
        """
        instances = self.provider.describe()
        if not instances or not self.fork_server.forks():
            return job
        is_up = all(each.state == "running" for each in instances)
        passed_s = math.inf if is_up else elapsed_s() - self.begun_s
        return replace(job, prediction=job.prediction.ahead(passed_s))

    def hand_over(self) -> tuple[ClusterProvider, ForkServer]:
        """Return what a run takes over; from now on that renews the leases."""
        self._handed_over.set()
        return self.provider, self.fork_server

    def close(self) -> None:
        """End all of it. Idempotent."""
        self._handed_over.set()
        try:
            self.provider.close()
        finally:
            self.fork_server.close()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self.provider.close()  # of a launch that had begun by then

    def _renew(self) -> None:
        while True:
            with suppress(OSError, ProviderError):  # the lease is long enough for the next try
                self.provider.renew_lease(self.provider.clock() + _LEASE_S)
            if self._handed_over.wait(_LEASE_S / 5.0):
                return


def _quietly(work: Callable[[], object]) -> None:
    with suppress(Exception):  # the run does it again, and reports it
        work()


def _import() -> None:
    """Import what connects to the head: the check is a process of its own, and this one waits."""
    import rubberband.executor.ray.backend  # noqa: F401


@contextmanager
def early_start(folder: ExperimentFolder, spec: RunSpec, job: Job) -> Iterator[EarlyStart | None]:
    """Start what the job needs first on this machine; all of it ends with this block, and its folder if no run began.

    None where another run has the folder.
    """
    begun: EarlyStart | None = None
    try:
        with suppress(ProviderError):
            provider = open_provider(cluster_request(folder, spec, job.offer))
            fork_server = fork_server_of(folder, spec, job.offer, provider)
            begun = EarlyStart(provider=provider, fork_server=fork_server)
            begun.begin(_first_instances(job) if provider.device == "cpu" else [])
        yield begun
    finally:
        if begun is not None:
            uninterrupted(begun.close)
            if not folder.exists:
                _remove(folder)


def clear(folder: ExperimentFolder) -> None:
    """End and remove what a run left that was killed before it began: the names of its instances are used again."""
    if not folder.instances.exists() or folder.exists:
        return
    with lock(folder.instances / "driver") as is_free:
        if not is_free:
            return
        for path in folder.instances.glob("*/*.json"):
            observe(path)
            end(path, "its driver died")
        _remove(folder)


def _remove(folder: ExperimentFolder) -> None:
    rmtree(folder.instances, ignore_errors=True)
    with suppress(OSError):  # there is more in it, such as a service's order
        folder.path.rmdir()


def _first_instances(job: Job) -> list[str]:
    """Return the names of the instances that the job asks for at its start."""
    commands = Controller(job).handle(Started(occurred_at=0.0))
    return [command.instance for command in commands if isinstance(command, LaunchInstance)]
