"""The user's interface without torch: `Trial` for any framework, and Ray Tune's calls in functions.

`reporting` has the two calls of functions and programs. For PyTorch see `torch_trial.TorchTrial`, which comes with a
training loop.
"""

from __future__ import annotations

import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from rubberband.executor.training.reporting import Session
    from rubberband.executor.training.segment import Segment

Device = Literal["cpu", "cuda"]
"""Device of a worker; `cuda` is the one GPU that it sees."""

TrainFunction = Callable[[dict[str, Any]], Any]
"""A function trial: takes the configuration and calls `report` once per iteration; it may return after any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialContext:
    """Identity and place of a running `Trial`.

    Examples:
        >>> class Sharded(rubberband.Trial):
        ...     def setup(self, config, context):
        ...         self.part = range(context.rank, 1000, context.num_workers)
    """

    trial: int
    """Number of the trial in its experiment."""
    rank: int
    """This worker's place in the gang; rank 0 reports and saves."""
    num_workers: int
    """Workers of the gang, one per GPU."""
    seed: int
    """The trial's seed; the same on every rank, for every gang size."""
    device: Device
    """The device of this worker; with `cuda`, the only one it sees."""
    iterations: int
    """Iterations in the checkpoint that `load` gets next; 0 without one."""
    rendezvous: str | None
    """`tcp://host:port`, free to bind on rank 0, for a framework's own process group; None for a gang of one."""


class Trial(ABC):
    """One configuration's training, in any framework.

    The order of calls is `setup`, `load` (when resuming), then `iterate` and `save` in turn, and `close`. A gang runs
    one object per worker; the trial itself shares the work among them. Before `setup` and every `iterate`, the random
    states of Python and NumPy are set from the trial's seed, the iteration and the rank. So data that `setup` makes at
    random differ between trials; pass a generator with a seed of your own.

    Examples:
        >>> class Halving(rubberband.Trial):
        ...     def setup(self, config, context):
        ...         self.factor, self.loss = config["factor"], 1.0
        ...
        ...     def iterate(self):
        ...         self.loss *= self.factor
        ...         return {"loss": self.loss}
        ...
        ...     def save(self):
        ...         return self.loss
        ...
        ...     def load(self, state):
        ...         self.loss = state
    """

    checkpoint_every: ClassVar[int] = 1
    """Iterations from one `save` to the next, so that slow ones cost less; the last one of a stage is always saved. A
    trial that resumes repeats those after its latest checkpoint."""
    ended: bool = False
    """Set it to True in `iterate`, on every rank, to end the trial with this iteration: its metrics count at every
    later SYNC, and it trains no more."""

    def setup(self, config: Mapping[str, Any], context: TrialContext) -> None:  # noqa: B027 — optional hook
        """Prepare to iterate; called once on every rank."""

    @abstractmethod
    def iterate(self) -> Mapping[str, float]:
        """Do one iteration and return its metrics; called on every rank, and rank 0's metrics count."""

    @abstractmethod
    def save(self) -> Any:
        """Return everything that `load` needs, as one picklable object; called on rank 0."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Continue from the result of `save`, perhaps with another number of workers; called on every rank."""

    def close(self) -> None:  # noqa: B027 — optional hook
        """Release the resources of `setup`; called on every rank, also after a failure."""


# Ray Tune's report and get_checkpoint inside a function trial: they reach the trial's own session. Ray Tune looks its
# session up in a variable of a module; while a function runs, ours is there. Nothing is imported: a function that
# calls Ray Tune has imported it.


TuneStop = Callable[[str, Mapping[str, Any]], bool]
"""Returns whether a trial (its id, its result) ends with this result."""

_TUNE_MODULE = "ray.train._internal.session"


@contextmanager
def tune_session(session: Session, segment: Segment, stop: TuneStop | None = None) -> Iterator[None]:
    """Let Ray Tune's functions reach the `session`, if Ray Tune is imported. `stop` may end the trial."""
    module: Any = sys.modules.get(_TUNE_MODULE)
    if module is None or "ray.tune" not in sys.modules:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="rubberband-trial-") as folder:
        before, module._session = module._session, _TuneSession(session, segment, Path(folder), stop)
        try:
            yield
        finally:
            module._session = before


def flat(result: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return a result whose nested metrics are named `a/b`, as Ray Tune names them."""
    found: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found


class _TuneSession:
    """The attributes that Ray Tune's functions read: those of its own session."""

    world_rank = None  # of Ray Train's workers alone
    trial_resources = None

    def __init__(self, session: Session, segment: Segment, folder: Path, stop: TuneStop | None) -> None:
        self._session = session
        self._folder = folder
        self._stop = stop
        self.trial_id = f"{segment.trial:05d}"
        self.trial_name = f"trial_{self.trial_id}"
        self.experiment_name = "rubberband"
        self.trial_dir = str(folder / "trial")
        Path(self.trial_dir).mkdir()
        from rubberband.executor.checkpoints.scratch import Scratch  # here, so that an estimate needs none
        from rubberband.executor.checkpoints.snapshots import Snapshots

        self._snapshots = Snapshots(Scratch())

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        """Report an iteration, the last one with `done` or by the rule; a checkpoint's files are kept in ours."""
        kept = None
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                kept = self._snapshots.checkpoint(Path(folder))
        found = flat(metrics)
        result = {"training_iteration": self._session.iteration, **found}
        if found.get("done") or (self._stop is not None and self._stop(self.trial_id, result)):
            self._session.ended = True
        self._session.report(found, kept)

    @property
    def loaded_checkpoint(self) -> Any:
        """The latest checkpoint as one of Ray Tune's, or None."""
        from rubberband.executor.checkpoints.folders import FolderCheckpoint

        kept = self._session.checkpoint()
        if not isinstance(kept, FolderCheckpoint):
            return kept
        folder = tempfile.mkdtemp(prefix="checkpoint-", dir=self._folder)
        return sys.modules["ray.tune"].Checkpoint.from_directory(str(kept.to_directory(folder)))
