"""An experiment from its first line in the journal to its last: create it, drive it (again), read it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from rubberband.cloud.catalogue import boot_timeouts, types_of
from rubberband.cloud.clock import elapsed_s
from rubberband.cloud.offers import offers
from rubberband.cloud.provider import BorrowedProvider, ClusterProvider, ClusterRequest
from rubberband.cloud.virtual import VirtualClock
from rubberband.errors import CheckpointError, JournalError, StoreAwayError
from rubberband.executor import sampling
from rubberband.executor.checkpoints import CheckpointStore, make_store, open_store, reopen_store
from rubberband.executor.core.backend import Backend
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import DriverResumed, Event
from rubberband.executor.core.job import Job
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import Inbox
from rubberband.executor.journal.journal import Header, begin
from rubberband.executor.result.result import Result
from rubberband.executor.result.summary import summarise
from rubberband.executor.run.callbacks import Callback, CallbackThread, JournalThread, calling
from rubberband.executor.run.driver import Draw, Explore, Observer, drive
from rubberband.executor.run.follower import explaining, open_journal, read_whole
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.run_spec import RunSpec
from rubberband.executor.virtual.backend import VirtualBackend, curves
from rubberband.executor.virtual.fleet import Noise
from rubberband.features import part, parts
from rubberband.files import make_directories
from rubberband.installation import require_ray
from rubberband.interrupts import AtOnce, heeded, uninterrupted
from rubberband.planning import startup_history
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFolder
from rubberband.spec.resources import Resources
from rubberband.values.adaptive import BatchPoint
from rubberband.values.kinds import part_of
from rubberband.values.offer import Offer

if TYPE_CHECKING:
    from rubberband.executor.ray.fetcher import Fetcher
    from rubberband.executor.ray.fork_server import ForkServer
    from rubberband.executor.run.early import EarlyStart

READY_TIMEOUT_S = 180.0
_STARTED_EARLY_S = 0.25
"""A node takes seconds to join: an instance that runs sooner was started before it was asked for."""
_FILES_NAMED = 5
"""Files that changed, of those that are named."""

View = Callable[[Header, Callable[[], float], ExitStack], Sequence[Observer]]


def create(folder: ExperimentFolder, job: Job, spec: RunSpec) -> None:
    """Write the experiment's first line; `run` may then be called, now or after a crash.

    If this is cut off, the name is free, or taken by an experiment that can be run. Raises NameTakenError,
    InputError if a folder cannot be written, or JournalError; the name is free then.
    """
    folder.make()
    with folder.driving():
        folder.require_free()
        spec = replace(spec, store_mark=make_store(spec.checkpoints).mark)
        begin(folder.store or folder.journal, folder.name, created_at=time.time(), job=job, setup=spec.to_json())


def run(
    folder: ExperimentFolder,
    *,
    view: View = lambda *_: (),
    cancelled: Callable[[], bool] = lambda: False,
    callbacks: Sequence[Callback] = (),
    address: str | None = None,
    early: EarlyStart | None = None,
) -> Result:
    """Drive an experiment to its end, from its beginning or from where its journal stops.

    `view` is given the journal's header, the clock and a stack that is left at the end, and returns observers. Every
    instance is released before this returns or raises. One that has ended is only read, unless it was cancelled, found
    no instances, or was stopped by a cap that has been raised since. Requests in the folder's inbox are taken in. The
    head of its Ray cluster is now at `address`, if that is given. `early` is what has started already, for a trial that
    was checked; its owner closes it as well.

    Raises EntrypointError, before anything is started or journalled, if what is trained does not load any more, and
    StoreAwayError if its checkpoint store is away, or goes away: once that is back, this goes on.
    """
    settled, is_over = read_whole(folder)
    if is_over:
        return settled
    try:
        return _run(folder, settled, view, cancelled, callbacks, address, early)
    except StoreAwayError as error:
        raise StoreAwayError(f"{error}, then continue with `rubberband resume {folder.name}`") from error


def _run(
    folder: ExperimentFolder,
    settled: Result,
    view: View,
    cancelled: Callable[[], bool],
    callbacks: Sequence[Callback],
    address: str | None,
    early: EarlyStart | None,
) -> Result:
    """Drive it from where it is `settled`."""
    with ExitStack() as stack:
        stack.enter_context(folder.driving())
        journal, header = open_journal(folder)
        stack.callback(journal.close)
        with explaining(folder):
            journal.require_whole()
        journal.sign(header.job)
        journal.durable = not header.kind.is_simulated  # there, what a power failure takes costs nothing
        controller = Controller(header.job)
        spec, draw, explore = _drawing(RunSpec.from_json(header.setup), controller)
        if spec.experiment.resources.fetch is not None and spec.entrypoint is not None and spec.kind.is_this_machine:
            part("fetch").fetch_here(spec.experiment, folder.home, partial(print, file=sys.stderr))
        spec, store = _with_store(
            spec if address is None else spec.at(address), header, settled, is_checked=early is not None
        )
        if any(trial.iterations for trial in settled.trials):
            _say_what_changed(spec)
        # Left after the backend is closed: no instance is held while a tracker takes its time.
        threads: list[JournalThread] = [
            *(CallbackThread(folder, callback) for callback in callbacks),
            *(thread for threads_of in parts("observers") for thread in threads_of(folder, spec)),
        ]
        trackers = stack.enter_context(calling(threads))
        with ExitStack() as views:
            backend = make_backend(folder, spec, header.job, journal.last_event_at(), store, early)
            views.callback(uninterrupted, backend.close)
            observers: list[Observer] = [_same_folder(folder), *view(header, backend.now, views), *trackers]
            if store is not None:
                observers.append(partial(_tidy, store))
            inbox = Inbox(folder.inbox)
            began_at = backend.now()
            if spec.kind.is_this_machine and spec.pool is None:  # warm instances start in no time
                lead_s = 0.0 if early is None else elapsed_s() - early.begun_s
                views.callback(lambda: _note_starts(folder.home, str(spec.entrypoint), controller, began_at, lead_s))
            drive(
                controller,
                backend,
                journal,
                observers=observers,
                cancelled=cancelled,
                requests=inbox,
                draw=draw,
                explore=explore,
                add=sampling.Additions(header.setup),
            )
            now = backend.now()
        if store is not None:
            _tidy(store, None, controller)
        return summarise(controller.state, header.setup, now)


def _with_store(
    spec: RunSpec, header: Header, settled: Result, *, is_checked: bool
) -> tuple[RunSpec, CheckpointStore | None]:
    """Return the settings with this process's environment, and the checkpoint store; None on a virtual clock.

    The trial is loaded unless it `is_checked`, as the import of torch takes seconds. Raises EntrypointError if it does
    not load any more, StoreAwayError if the store is away.
    """
    if spec.entrypoint is None:
        return spec, None
    entrypoint = replace(spec.entrypoint, environment=spec.experiment.environment(os.environ))
    require_ray(f"provider: {spec.experiment.resources.provider}")
    known = [trial.checkpoint for trial in settled.trials if trial.checkpoint is not None]
    store = reopen_store(spec.checkpoints, spec.store_mark, known, spec.run)
    if not is_checked:
        entrypoint.check(
            max(stage.gpus_per_trial for stage in header.job.plan.stages),
            adaptive=spec.experiment.batch.policy == "goodput",
            asynchronous=spec.experiment.training.mode == "async",
            elsewhere=header.kind.is_elsewhere,
        )
    return replace(spec, entrypoint=entrypoint), store


def _tidy(store: CheckpointStore, event: Event | None, controller: Controller) -> None:
    """Delete the run's checkpoints that no trial would go on from, or back to: at its end (None), and at a resume, as
    an observer. The driver holds the experiment's lock.
    """
    if event is not None and not isinstance(event, DriverResumed):
        return
    kept = [ref for trial in controller.state.trials for ref in trial.files()]
    with suppress(CheckpointError):  # it costs some disk space and nothing else
        store.tidy(kept)


def _say_what_changed(spec: RunSpec) -> None:
    """Print a line that names the files which are not as they were when the run began; none if all are."""
    from rubberband.executor.training.entrypoint import changed_files

    if changed := [os.path.relpath(path) for path in changed_files(spec.code or {})]:
        more = f" and {len(changed) - _FILES_NAMED} more" if len(changed) > _FILES_NAMED else ""
        print(
            f"code: {', '.join(changed[:_FILES_NAMED])}{more} changed since the first trials were trained; results of "
            "before and of now are compared with each other",
            file=sys.stderr,
            flush=True,
        )


def _same_folder(folder: ExperimentFolder) -> Observer:
    """Return what raises JournalError once the experiment's folder is another: instances do not live without theirs."""

    def identity() -> tuple[int, int] | None:
        try:
            seen = folder.path.stat()
        except FileNotFoundError:
            return None
        return seen.st_dev, seen.st_ino

    began_in = identity()

    def require(*_: object) -> None:
        if identity() != began_in:  # log files may have made a new one already
            raise JournalError(
                f"the folder of experiment {folder.name!r} was moved or deleted while it ran ({folder.path}); its "
                f"instances end. Move it back, then continue with `rubberband resume {folder.name}`"
            )

    return require


def _drawing(spec: RunSpec, controller: Controller) -> tuple[RunSpec, Draw | None, Explore]:
    """Return the settings with the configurations as drawn, added or changed, and what draws and changes them.

    Raises InputError if that is not installed.
    """
    search = spec.experiment.search
    if controller.job.draws:
        search.require_sampler()
    known = sampling.configurations(controller.state, {"configurations": spec.configurations})
    draw = partial(sampling.draw, search) if controller.job.draws else None
    return replace(spec, configurations=known), draw, partial(sampling.explore, search, known)


def _note_starts(home: Path, entrypoint: str, controller: Controller, began_at: float, lead_s: float) -> None:
    """Keep how long instances took to start on this machine since `began_at`, for later plans.

    `lead_s`: seconds before that in which the first ones started already. Those that were ready by then are left out.
    """
    instants = [
        (
            record.requested_at - (lead_s if record.running_at - record.requested_at < _STARTED_EARLY_S else 0.0),
            record.running_at,
            record.ready_at,
        )
        for record in controller.state.instances.values()
        if record.running_at is not None
        and record.ready_at is not None
        and record.requested_at >= began_at
        and record.ready_at - record.requested_at > _STARTED_EARLY_S
    ]
    with suppress(OSError):  # a full disk
        startup_history.record(home, startup_history.starts_of(entrypoint, instants), time.time())


def make_backend(
    folder: ExperimentFolder,
    spec: RunSpec,
    job: Job,
    last_event_at: float | None,
    store: CheckpointStore | None,
    early: EarlyStart | None = None,
) -> Backend:
    """The backend that carries `job` out on the experiment's provider; a virtual clock goes on where it stopped."""
    if store is None:
        clock = VirtualClock(last_event_at or 0.0)
        seed = f"{job.name} {spec.seeds[:1]}"
        noise = Noise(job.profile, job.offer, seed=seed, now=clock.now, end_chance=job.profile.end_chance)
        return VirtualBackend(
            job.name,
            job.offer,
            job.profile,
            metric=job.metric,
            metric_of=curves(job, seed),
            clock=clock,
            faults=noise,
            limits=job.limits,
            checkpoint_every=1 if job.offer.spot is None else job.offer.spot.checkpoint_iterations,
        )
    return make_ray_backend(
        folder,
        spec,
        replace(
            cluster_request(folder, spec, job.offer),
            highest_price_usd_per_hour=job.highest_price_usd_per_hour,
            speeds=job.speeds if job.balances else {},
            not_before=last_event_at or 0.0,
            largest_gang=job.largest_gang,
        ),
        known_points=() if job.profile.goodput is None else job.profile.goodput.points,
        store=store,
        early=early,
    )


def make_ray_backend(
    folder: ExperimentFolder,
    spec: RunSpec,
    request: ClusterRequest,
    *,
    known_points: Sequence[BatchPoint] = (),
    store: CheckpointStore | None = None,
    early: EarlyStart | None = None,
) -> Backend:
    """A backend of the instances that `request` asks for; `known_points` is what a profile knows of the trials' steps.

    `early` has started on this machine already.

    `store` keeps the checkpoints; None: that of `spec`, made where there is none, for runs that are not resumed.
    Raises InputError for what cannot be rented or sent to instances, before anything is.
    """
    from rubberband.executor.ray.backend import RayBackend
    from rubberband.executor.ray.code import pack, unsent_modules
    from rubberband.executor.ray.node_probe import NodeProbe

    assert spec.entrypoint is not None, "the edge asks for an entry point"
    code = pack(spec.entrypoint.search_path) if spec.kind.is_elsewhere else None
    resources, offer = spec.experiment.resources, request.offer
    limits = boot_timeouts(types_of(resources), resources.init_delay_s) if spec.kind.is_rented else None
    provider, fork_server = (open_provider(request), None) if early is None else early.hand_over()
    node_probe = None
    if spec.kind.is_borrowed:
        store = store or make_store(spec.checkpoints)
        node_probe = NodeProbe(cast(BorrowedProvider, provider), store, unsent_modules(spec.entrypoint))
        node_probe.require_nodes()
    # A pool has a fork server of its own: its experiments have different code.
    if early is None and spec.kind.is_this_machine and spec.pool is None:
        fork_server = fork_server_of(folder, spec, offer, provider)
    return RayBackend(
        provider,
        spec,
        store=store or open_store(spec.checkpoints),
        gpus_per_instance=offer.gpus,
        slots_on_machine=_slots_on_machine(spec, offer, provider),
        known_points=known_points,
        logs=folder.logs,
        code=code,
        fork_server=fork_server,
        first_lease_s=None if limits is None or spec.pool is not None else limits.lease_s,
        ready_timeout_s=READY_TIMEOUT_S if limits is None else limits.ready_s,
        clock=provider.clock,
        node_probe=node_probe,
        fetcher=_fetcher(folder.home, resources) if spec.kind.is_elsewhere else None,
    )


def _fetcher(home: Path, resources: Resources) -> Fetcher | None:
    """Return what fetches models and data on instances, and keeps how fast that was; None if there are none."""
    if resources.fetch is None:
        return None
    from rubberband.executor.ray.fetcher import Fetcher

    fetch = part("fetch")
    return Fetcher(fetch.order_of(resources), partial(fetch.record, home, resources))


def fork_server_of(folder: ExperimentFolder, spec: RunSpec, offer: Offer, provider: ClusterProvider) -> ForkServer:
    """Start the process that forks the workers of a run on this machine."""
    from rubberband.executor.ray.fork_server import ForkServer

    slots = _slots_on_machine(spec, offer, provider)
    return ForkServer(folder.name, folder.instances, spec.entrypoint, device=provider.device, slots_on_machine=slots)


def _slots_on_machine(spec: RunSpec, offer: Offer, provider: ClusterProvider) -> int:
    """Return how many slots share the CPUs of the machine that an instance is, or is a part of."""
    if spec.kind.is_borrowed:
        return cast(BorrowedProvider, provider).slots_on_machine * offer.trials_per_gpu
    if spec.kind.is_this_machine:
        return offer.slots * offer.max_instances
    if spec.pool is None:
        return offer.slots
    return int(PoolFolder(path=Path(spec.pool)).read()["gpus_per_instance"]) * offer.trials_per_gpu


def cluster_request(folder: ExperimentFolder, spec: RunSpec, offer: Offer) -> ClusterRequest:
    """Return the request for instances of an offer, whose provider keeps its records in the experiment's folder."""
    request = ClusterRequest(
        experiment=folder.name,
        run=spec.run,
        directory=folder.instances,
        home=folder.home,
        resources=spec.experiment.resources,
        offer=offer,
        hash_seed="0" if spec.entrypoint is None else spec.entrypoint.environment.hash_seed,
        on_join=partial(startup_history.record_join, folder.home),
    )
    return replace(request, join_s=partial(_join_s, request))


def open_provider(request: ClusterRequest) -> ClusterProvider:
    """Return the provider that the record of `resources.provider` names, or of a pool. Raises InputError and
    ProviderError."""
    resources = request.resources
    open_it = part_of(resources.provider, "open_cluster") if resources.pool is None else part("lender")
    opened: ClusterProvider = open_it(request)
    return opened


def _join_s(request: ClusterRequest, address: str) -> float:
    """Return the time that a node takes to join this cluster: the file's, or the longest so far, if that is longer."""
    planned_s = request.offer.provision_delay_s
    if request.resources.provision_delay is not None:
        return planned_s
    return max(planned_s, startup_history.join_times(request.home, address).provision_s)


def require_cluster(experiment: Experiment, home: Path, entrypoint: Entrypoint | None) -> None:
    """Raise InputError unless the nodes of an experiment's Ray cluster, if it is on one, can train; claims nothing.

    A run asks again when it begins, but its name is taken by then.
    """
    resources = experiment.resources
    if not resources.kind.is_borrowed or entrypoint is None:
        return
    from rubberband.executor.ray.code import unsent_modules
    from rubberband.executor.ray.node_probe import NodeProbe

    (offer,) = offers(resources)
    make_directories(home)
    with TemporaryDirectory(prefix=".probe-", dir=home) as scratch:
        place = Path(scratch)
        request = ClusterRequest(
            experiment=experiment.name, run="probe", directory=place, home=home, resources=resources, offer=offer
        )
        store = make_store(resources.checkpoints or str(place / "checkpoints"))
        provider = cast(BorrowedProvider, open_provider(request))
        NodeProbe(provider, store, unsent_modules(entrypoint)).require_nodes()


@contextmanager
def cancel_on_signals() -> Iterator[Callable[[], bool]]:
    """While this lasts, the first Ctrl-C, SIGTERM or SIGHUP asks for a clean end, and a second Ctrl-C interrupts.

    A second SIGTERM or SIGHUP changes nothing: supervisors and shells send several for one end. Yields a function that
    returns whether an end was asked for, also if that was before and got lost (`AtOnce`).
    Outside the main thread signals are left alone.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, _frame: object) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in heeded()}
    if any(isinstance(handler, AtOnce) and handler.heard for handler in before.values()):
        asked.set()
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
