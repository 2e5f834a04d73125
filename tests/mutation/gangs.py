"""Planted bugs of gangs: weights other than those of one worker."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_IDIOMS = "tests/integration/test_gang_idioms.py"
_LEARNS = f"{_IDIOMS}::test_it_learns_on_gangs_of_one_two_and_one_with_unequal_shares_what_it_learns_in_one_process"
_FAILS = f"{_IDIOMS}::test_a_gang_that_would_drift_apart_fails_in_one_line"

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
)
