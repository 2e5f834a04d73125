"""Planted bugs of ends, stores and machines: what a signal, a lost file or a hidden device does to a run."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_INTERRUPTS = ("tests/unit/test_interrupts.py",)
_CONNECTION = ("tests/integration/test_ray_connection.py::test_ray_takes_no_signal_over",)
_CHECKPOINTS = ("tests/unit/test_checkpoints.py",)
_DEVICES = ("tests/unit/test_tuning.py",)
_FORKS = ("tests/unit/test_forks.py",)
_CONTROLLER = ("tests/unit/test_controller.py",)
_POOL = ("tests/unit/test_pool.py",)
_ENDS = ("tests/integration/test_ends.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ray-aborts-on-sigterm",
        harm="a driver that a supervisor ends aborts after 3 s; its instances are paid until their leases end",
        file="executor/ray/connection.py",
        old="            with _signals_kept():\n                ray.init(",
        new="            with contextlib.nullcontext():\n                ray.init(",
        tests=_ENDS,
    ),
    Mutant(
        name="a-disconnect-leaves-the-default",
        harm="a SIGTERM after the driver left its cluster kills it while it releases instances",
        file="executor/ray/connection.py",
        old="            with _signals_kept():\n                ray.shutdown()",
        new="            with contextlib.nullcontext():\n                ray.shutdown()",
        tests=_CONNECTION,
    ),
    Mutant(
        name="terminals-that-close-kill",
        harm="a terminal that closes kills the driver, and its instances are paid until their leases end",
        file="rubberband/interrupts.py",
        old="ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)",
        new="ENDS = (signal.SIGINT, signal.SIGTERM)",
        tests=(*_INTERRUPTS, *_ENDS),
    ),
    Mutant(
        name="nohup-is-ignored",
        harm="a run under nohup ends as its terminal closes",
        file="rubberband/interrupts.py",
        old="n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN",
        new="n",
        tests=_INTERRUPTS,
    ),
    Mutant(
        name="two-sigterms-interrupt",
        harm="a supervisor that signals process and group cuts the clean end off: no report",
        file="executor/session.py",
        old="if asked.is_set() and number == signal.SIGINT:",
        new="if asked.is_set():",
        tests=_INTERRUPTS,
    ),
    Mutant(
        name="releases-are-interrupted",
        harm="an impatient Ctrl-C leaves instances that are paid until their leases end",
        file="rubberband/interrupts.py",
        old="    before = signal.signal(signal.SIGINT, signal.SIG_IGN)\n",
        new="    before = signal.getsignal(signal.SIGINT)\n",
        tests=_INTERRUPTS,
    ),
    Mutant(
        name="unreadable-checkpoints-fail-their-trial",
        harm="a trial whose newest checkpoint cannot be opened is given up, though the one before is there",
        file="executor/checkpoints.py",
        old="                raise CheckpointLostError(str(error)) from error\n",
        new="                raise CheckpointError(str(error)) from error\n",
        tests=_CHECKPOINTS,
    ),
    Mutant(
        name="unplugged-stores-lose-checkpoints",
        harm="trials go back to their beginning while the disk with their checkpoints is not mounted",
        file="executor/checkpoints.py",
        old="            self._require_mark()\n            try:  #",
        new="            try:  #",
        tests=_CHECKPOINTS,
    ),
    Mutant(
        name="stale-handles-lose-checkpoints",
        harm="a trial goes back an iteration for a file handle that was stale for a moment",
        file="executor/checkpoints.py",
        old="                payload = self._read(place)\n            except",
        new="                raise\n            except",
        tests=_CHECKPOINTS,
    ),
    Mutant(
        name="hidden-gpus-stop-instances",
        harm="no instance of logical GPUs starts where CUDA_VISIBLE_DEVICES is empty",
        file="cloud/local/ray_node.py",
        old='        chosen.pop("CUDA_VISIBLE_DEVICES", None)\n',
        new="        pass\n",
        tests=_DEVICES,
    ),
    Mutant(
        name="hidden-gpus-untold",
        harm="trials train on the CPU, as a batch system has set CUDA_VISIBLE_DEVICES, and nothing says so",
        file="cloud/local/gpus.py",
        old='LocalGpus(notes=(f"{VISIBLE}= hides all GPUs",))',
        new="LocalGpus()",
        tests=("tests/unit/test_local_gpus.py",),
    ),
    Mutant(
        name="forks-keep-ray-s-handler",
        harm="a pool of processes in a trial hangs until its time limit",
        file="executor/ray/slot_worker.py",
        old="            signal.signal(signal.SIGTERM, signal.SIG_DFL)\n",
        new="            pass\n",
        tests=_FORKS,
    ),
    Mutant(
        name="forks-are-reset-too-late",
        harm="a pool of processes in a trial hangs about once in thirty",
        file="executor/ray/slot_worker.py",
        old="signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})",
        new="signal.pthread_sigmask(signal.SIG_BLOCK, ())",
        tests=_FORKS,
    ),
    Mutant(
        name="killed-drivers-leave-checkpoints",
        harm="checkpoints and drafts of a killed driver are never removed: they fill the disk or a paid bucket",
        file="executor/session.py",
        old="        store.tidy(kept)\n",
        new="        pass\n",
        tests=(
            "tests/integration/test_runs.py::test_after_kill_9_a_resume_finishes_with_the_same_winner_and_trains_nothing_again",
        ),
    ),
    Mutant(
        name="tidying-takes-what-is-named",
        harm="a resume finds no checkpoint and trains from the beginning",
        file="executor/checkpoints.py",
        old="                if path.name not in kept and not path.is_dir():\n",
        new="                if not path.is_dir():\n",
        tests=_CHECKPOINTS,
    ),
    Mutant(
        name="tidying-takes-others",
        harm="another experiment in the same folder or bucket loses its checkpoints",
        file="executor/checkpoints.py",
        old='self._remove_others(f"-{self.run}-", ',
        new='self._remove_others("-", ',
        tests=_CHECKPOINTS,
    ),
    Mutant(
        name="tidying-in-another-store",
        harm="checkpoints of a disk that is mounted in the store's place are deleted",
        file="executor/checkpoints.py",
        old="            self._require_mark()\n            self._remove_others(",
        new="            self._remove_others(",
        tests=_CHECKPOINTS,
    ),
    Mutant(
        name="reports-at-a-cancel-dropped",
        harm="an iteration that was reported as the user cancelled is trained, and paid, again",
        file="executor/driver.py",
        old="    return replace(event, late=True) if is_late else event\n",
        new="    return event\n",
        tests=_CONTROLLER,
    ),
    Mutant(
        name="reports-at-a-cancel-leave-holes",
        harm="a report counts though one before it is missing, and a trial that goes back goes to the wrong one",
        file="executor/core/trials.py",
        old="or event.iterations != trial.iterations + 1:",
        new="or event.iterations < trial.iterations:",
        tests=_CONTROLLER,
    ),
    Mutant(
        name="late-reports-leave-their-stage-open",
        harm="a trial that has done its stage is started again for no iteration",
        file="executor/core/trials.py",
        old="    if event.ended or trial.iterations >= rules.target_iterations(job, lane, trial):\n        trial",
        new="    if event.ended:\n        trial",
        tests=_CONTROLLER,
    ),
    Mutant(
        name="damaged-pools-are-asked-for-ever",
        harm="a finished run never ends: it waits for a broker that cannot start",
        file="executor/ray/fleet.py",
        old="            except NoRecordError as error:\n",
        new="            except ZeroDivisionError as error:\n",
        tests=("tests/integration/test_ray_fleet.py",),
    ),
    Mutant(
        name="damaged-pools-look-away",
        harm="a driver takes a damaged journal for a broker that is slow, and restarts it again and again",
        file="cloud/pool/provider.py",
        old="                    self._require_sound_journal()\n",
        new="                    pass\n",
        tests=_POOL,
    ),
    Mutant(
        name="sound-checks-cut-journals",
        harm="a driver cuts off the event that a broker is writing",
        file="cloud/pool/journal.py",
        old='            deque(self._parsed(data[: data.rfind(b"\\n") + 1]), maxlen=0)\n',
        new="            deque(self.events(), maxlen=0)\n",
        tests=_POOL,
    ),
)
