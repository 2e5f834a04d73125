"""Planted bugs of gangs: weights other than those of one worker."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_IDIOMS = "tests/integration/test_gang_idioms.py"
_LEARNS = f"{_IDIOMS}::test_it_learns_on_gangs_of_one_two_and_one_with_unequal_shares_what_it_learns_in_one_process"
_FAILS = f"{_IDIOMS}::test_a_gang_that_would_drift_apart_fails_in_one_line"

_LOSSES = "tests/integration/test_gang_losses.py"
_WAITS = f"{_LOSSES}::test_a_gang_waits_for_data_and_store_longer_than_a_collective_may_take"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="data-divided-anew-after-a-restore",
        harm="the check refuses a LightningTrial that is right",
        file="executor/training/comparing.py",
        old='    reseed("setup", segment.seed)  # as the runner does',
        new="    # as the runner does",
        tests=("tests/integration/test_gang_check.py",),
    ),
    Mutant(
        name="thawed-layers-not-followed",
        harm="layers that a hook thaws drift apart on the workers",
        file="executor/training/wrapping.py",
        old="if self._gang.num_workers == 1 or (not is_thorough and self._seen == self._look()):",
        new="if self._gang.num_workers == 1 or self.ddp is not None:",
        tests=(f"{_LEARNS}[ThawingByStep]",),
    ),
    Mutant(
        name="trained-parameters-not-restored",
        harm="after a SYNC thawed layers are frozen again",
        file="executor/training/loop.py",
        old='restore_trained(self._module, content.get("parameters"))',
        new="pass",
        tests=(f"{_LEARNS}[Thawing]",),
    ),
    Mutant(
        name="added-groups-not-restored",
        harm="a trial that adds a parameter group cannot go on after a SYNC",
        file="executor/training/loop.py",
        old='restore_groups(self._module, self._optimizers.members, content.get("parameters"))',
        new="pass",
        tests=(f"{_LEARNS}[ByLayer]",),
    ),
    Mutant(
        name="hooks-draw-apart",
        harm="a head that a hook draws anew differs on each worker",
        file="executor/training/loop.py",
        old='reseed("train", segment.seed, iterations, 0)  # hooks',
        new='reseed("train", segment.seed, iterations, segment.rank)  # hooks',
        tests=(f"{_LEARNS}[Resetting]",),
    ),
    Mutant(
        name="buffers-of-a-worker-without-samples",
        harm="a model's buffers miss the steps in which the first worker has no samples",
        file="executor/training/step.py",
        old="self._exchange.buffers.share(batch.first)",
        new="self._exchange.buffers.share(0)",
        tests=(f"{_LEARNS}[Twice]",),
    ),
    Mutant(
        name="parameters-beside-the-model-not-averaged",
        harm="a parameter that only the optimizer has drifts apart on the workers",
        file="executor/training/wrapping.py",
        old="[each for each in self._all.values() if id(each) not in of_model]",
        new="[]",
        tests=(f"{_LEARNS}[Beside]",),
    ),
    Mutant(
        name="sparse-gradients-accepted",
        harm="a gang trains other weights than one worker with sparse embeddings",
        file="executor/training/parameters.py",
        old="and each.sparse:",
        new="and each.sparse is None:",
        tests=(f"{_FAILS}",),
    ),
    Mutant(
        name="weights-not-compared-at-a-sync",
        harm="workers whose weights drift apart go on",
        file="executor/training/loop.py",
        old="if segment.verify and (self.ended or iterations == segment.until_iterations):",
        new="if not segment.verify and (self.ended or iterations == segment.until_iterations):",
        tests=(f"{_FAILS}",),
    ),
    Mutant(
        name="equal-shares-not-compared-equally",
        harm="a contrastive loss, which needs equal shares and asks for them, is refused by the check",
        file="executor/training/comparing.py",
        old='are_equal = segment.balance.policy == "equal"',
        new="are_equal = False",
        tests=("tests/integration/test_gang_check.py",),
    ),
    Mutant(
        name="failures-not-passed-on",
        harm="workers on GPUs stand in a collective while the failed one closes, and its message comes late or never",
        file="executor/training/run.py",
        old="        gang.fail(failure.message)",
        new="        pass",
        tests=(_LOSSES,),
    ),
    Mutant(
        name="collectives-not-aborted",
        harm="a worker on a GPU that loses another one stands in its collective until the driver ends it",
        file="executor/training/gang.py",
        old='    if device == "cuda":\n        leave_group(device, in_order=False)',
        new="    pass",
        tests=("tests/unit/test_gang.py",),
    ),
    Mutant(
        name="sums-of-a-broken-gang-reported",
        harm="an iteration whose collectives were aborted is reported, with worthless metrics and weights",
        file="executor/training/gang.py",
        old="            raise GangBroken(self.broken)",
        new="            pass",
        tests=("tests/unit/test_gang.py",),
    ),
    Mutant(
        name="data-not-waited-for",
        harm="a gang fails where one machine has to fetch the data",
        file="executor/training/loop.py",
        old="        self._gang.meet()  # one machine",
        new="        # one machine",
        tests=(_WAITS,),
    ),
    Mutant(
        name="store-not-waited-for",
        harm="a gang fails where the store is away longer than a collective may take",
        file="executor/training/run.py",
        old="            if saves:\n                runner.meet()",
        new="",
        tests=(_WAITS,),
    ),
    Mutant(
        name="forked-processes-keep-life-lines",
        harm="a dead worker looks alive while its loader workers run",
        file="executor/training/lifeline.py",
        old="os.register_at_fork(after_in_child=_forget_all)",
        new="",
        tests=("tests/unit/test_lifeline.py",),
    ),
    Mutant(
        name="each-worker-loads-the-checkpoint",
        harm="eight workers of a machine download a checkpoint eight times",
        file="executor/training/fetching.py",
        old="            elif status.st_size == ref.size_bytes:",
        new="            elif status.st_size == ref.size_bytes and store.load(ref):",
        tests=("tests/unit/test_fetching.py",),
    ),
    Mutant(
        name="uncounted-samples-in-statistics",
        harm="a worker without a share changes what SyncBatchNorm learns",
        file="executor/training/wrapping.py",
        old="        return (args[0][:0],)",
        new="        return (args[0],)",
        tests=(
            "tests/integration/test_segment_gang.py::test_a_worker_without_a_share_adds_nothing_to_statistics_of_the_gang",
        ),
    ),
    Mutant(
        name="port-given-up",
        harm="another program takes the port of a gang, whose trial fails",
        file="executor/training/rendezvous.py",
        old="    _kept[port] = listener",
        new="    listener.close()",
        tests=("tests/unit/test_lifeline.py",),
    ),
    Mutant(
        name="survivors-of-a-lost-machine-killed",
        harm="each worker of a gang starts anew when a spot instance of it is lost",
        file="executor/ray/attempt.py",
        old="self._stopped and (self._abandoned_until is None or time.monotonic() > self._abandoned_until)",
        new="self._stopped",
        tests=("tests/unit/test_abandoned.py",),
    ),
    Mutant(
        name="ending-workers-given-to-trials",
        harm="a trial gets a worker that is about to be killed, and fails",
        file="executor/ray/attempt.py",
        old="                    workers.hold(self.start.gang[rank].gpu, worker)",
        new="                    pass",
        tests=("tests/unit/test_abandoned.py",),
    ),
)
