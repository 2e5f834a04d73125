"""Planted bugs of asynchronous training: updates that are lost or made twice, data that is skipped, wrong shards."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_PURE = ("tests/unit/test_async_training.py",)
_GANG = "tests/integration/test_async_gang.py"
_EQUAL = (f"{_GANG}::test_without_staleness_it_equals_synchronous_training",)
_RESUMES = (f"{_GANG}::test_it_resumes_with_another_number_of_workers_and_trains_every_batch_once",)
_RETURNS = (f"{_GANG}::test_rank_0_returns_to_the_servers_without_losing_an_update",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="acknowledged-update-not-applied",
        harm="a worker's gradient is answered with parameters that it is not in",
        file="executor/training/asynchronous/server.py",
        old='if header["weight"]:\n                self._shard.update([GradientPart(1.0,',
        new='if header["weight"] and number % 7:\n                self._shard.update([GradientPart(1.0,',
        tests=_RESUMES,
    ),
    Mutant(
        name="servers-begin-again-for-rank-0",
        harm="all updates since the checkpoint are lost when rank 0 is replaced, although the servers live",
        file="executor/training/asynchronous/runner.py",
        old="            if closed is None:\n",
        new="            if True:\n",
        tests=_RETURNS,
        hangs=True,
    ),
    Mutant(
        name="snapshot-goes-on",
        harm="a checkpoint has updates of the next iteration, which are made again after it",
        file="executor/training/asynchronous/server.py",
        old="parameters=self._shard.buffer.whole.clone(),",
        new="parameters=self._shard.buffer.whole,",
        tests=_RESUMES,
    ),
    Mutant(
        name="shard-of-another-server",
        harm="servers apply gradients to the tensors of others",
        file="executor/training/asynchronous/shards.py",
        old="names = Shard.all(trained, segment.training.servers)[index].names",
        new="names = Shard.all(trained, segment.training.servers)[-1 - index].names",
        tests=_EQUAL,
        hangs=True,
    ),
    Mutant(
        name="optimizer-of-one-shard",
        harm="a checkpoint has Adam's averages for the first server's tensors only",
        file="executor/training/asynchronous/servers.py",
        old='merged |= self._fetch(server, iteration)[1]["optimizer"]["state"]',
        new="self._fetch(server, iteration)",
        tests=_EQUAL,
    ),
    Mutant(
        name="staleness-one-more",
        harm="workers are further ahead of the slowest one than max_staleness allows",
        file="executor/training/asynchronous/protocol.py",
        old="min(self._clocks.values()) <= self.max_staleness",
        new="min(self._clocks.values()) <= self.max_staleness + 1",
        tests=_PURE,
    ),
    Mutant(
        name="parts-not-weighted",
        harm="with max_staleness 0 the sum of the workers' gradients is taken for their mean",
        file="executor/training/asynchronous/server.py",
        old='GradientPart(header["weight"] / total,',
        new="GradientPart(1.0,",
        tests=_EQUAL,
    ),
    Mutant(
        name="position-of-the-data-goes-on",
        harm="a trial that resumes skips the batches that workers had in hand, and trains others twice",
        file="executor/training/asynchronous/protocol.py",
        old="held = {worker: list(tickets) for worker, tickets in self.held.items()}",
        new="held = dict(self.held)",
        tests=_PURE,
    ),
    Mutant(
        name="batch-in-hand-not-returned",
        harm="no one trains on the batch of a worker that died",
        file="executor/training/asynchronous/protocol.py",
        old="self.returned.extend(self.held.pop(worker, ()))",
        new="self.held.pop(worker, None)",
        tests=_PURE,
    ),
    Mutant(
        name="iteration-one-update-short",
        harm="iterations end before their last update: trials are compared by unequal training",
        file="executor/training/asynchronous/protocol.py",
        old="self.low >= self.boundaries[self.cut + 1 - self.first]",
        new="self.low >= self.boundaries[self.cut + 1 - self.first] - 1",
        tests=_PURE,
    ),
    Mutant(
        name="optimizer-not-in-the-last-checkpoint",
        harm="with checkpoint_every, the next stage begins with an optimizer that has forgotten all",
        file="executor/training/asynchronous/server.py",
        old="is_saved = iteration % self._checkpoint_every == 0 or iteration == order.last",
        new="is_saved = iteration % self._checkpoint_every == 0",
        tests=("tests/unit/test_async_server.py",),
    ),
)
