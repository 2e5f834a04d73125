"""One trial on one worker for one segment, whatever its kind; and the runner of plain `Trial`s."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rubberband.errors import CheckpointError
from rubberband.executor.training.metrics import clean_metrics
from rubberband.executor.training.seeding import reseed
from rubberband.executor.training.segment import BatchReport, Segment
from rubberband.executor.training.trial import Trial, TrialContext

FORMAT = 1
"""Version of the checkpoints' layout."""


class Runner(Protocol):
    """Takes one trial through one segment; made ready to iterate, and closed in the end whatever happened."""

    def restore(self, payload: bytes) -> None:
        """Go on from what `dump` gave, on any number of workers. Called before the first iteration, or not at all."""
        ...

    def catch_up(self) -> Iterator[int]:
        """Do again, before the first iteration, what the checkpoint does not hold; gives what is done after each."""
        ...

    def saved_iterations(self, iterations: int) -> int:
        """Of so many iterations, those that the next checkpoint holds."""
        ...

    def iterate(self, iterations: int) -> Mapping[str, float]:
        """Do the iteration after which `iterations` are done; rank 0's metrics are clean, the others' do not count."""
        ...

    def batch_report(self) -> BatchReport:
        """What is to be told of the batches of the latest iteration."""
        ...

    def dump(self, iterations: int, metrics: Mapping[str, float]) -> bytes:
        """The checkpoint after that iteration; called on rank 0."""
        ...

    def part(self) -> None:
        """The last iteration is over and saved: part from the other workers in order."""
        ...

    def close(self) -> None:
        """Give everything back; the process stays warm."""
        ...


class TrialRunner:
    """Runs a plain `Trial`. The workers of a gang run side by side, not in lockstep; rank 0's word counts."""

    def __init__(self, trial_class: type[Trial], segment: Segment) -> None:
        self._segment = segment
        self._trial = trial_class()
        context = TrialContext(
            trial=segment.trial,
            rank=segment.rank,
            num_workers=segment.num_workers,
            seed=segment.seed,
            device=segment.device,
            iterations=segment.from_iterations,
            rendezvous=segment.rendezvous,
        )
        reseed("setup", segment.seed)
        try:
            self._trial.setup(dict(segment.config), context)
        except BaseException:
            self.close()
            raise

    def restore(self, payload: bytes) -> None:
        """Hand the saved state to the trial."""
        self._trial.load(unpack(payload, "trial", self._segment.from_iterations)["state"])

    def catch_up(self) -> Iterator[int]:
        """Nothing: a checkpoint holds all iterations."""
        return iter(())

    def saved_iterations(self, iterations: int) -> int:
        """All of them."""
        return iterations

    def iterate(self, iterations: int) -> Mapping[str, float]:
        """Call the trial's `iterate`."""
        reseed("train", self._segment.seed, iterations, self._segment.rank)
        reported = self._trial.iterate()
        return clean_metrics(reported, self._segment.metric) if self._segment.rank == 0 else {}

    def batch_report(self) -> BatchReport:
        """Nothing: batches are the trial's own matter."""
        return BatchReport()

    def dump(self, iterations: int, metrics: Mapping[str, float]) -> bytes:
        """Pickle what the trial's `save` returns."""
        state = self._trial.save()
        return pack("trial", iterations, {"state": state, "metrics": dict(metrics)})

    def part(self) -> None:
        """Nothing: the workers know nothing of each other."""

    def close(self) -> None:
        """Call the trial's `close`."""
        self._trial.close()


def pack(kind: str, iterations: int, content: Mapping[str, Any]) -> bytes:
    """A pickled checkpoint. Raises CheckpointError where the content cannot be pickled."""
    try:
        return pickle.dumps({"format": FORMAT, "kind": kind, "iterations": iterations, **content})
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be pickled: {type(error).__name__}: {error}") from error


def unpack(payload: bytes, kind: str, iterations: int) -> dict[str, Any]:
    """What `pack` was given. Raises CheckpointError where it cannot be read, or is not what the segment expects."""
    # Unpickling runs code, but only our own: the store compared the bytes with the digest in the journal.
    try:
        content = pickle.loads(payload)
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be unpickled: {type(error).__name__}: {error}") from error
    return expect(content, kind, iterations)


def expect(content: Any, kind: str, iterations: int) -> dict[str, Any]:
    """The content, if it is a checkpoint of that kind after that many iterations; otherwise CheckpointError."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"the checkpoint has format {found}; this version reads format {FORMAT}")
    if content["kind"] != kind:
        raise CheckpointError(f"the checkpoint is of a {content['kind']} trial, and the entry point is a {kind} trial")
    if content["iterations"] != iterations:
        raise CheckpointError(f"the checkpoint holds {content['iterations']} iterations, not {iterations}")
    return content
