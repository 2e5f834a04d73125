"""Planted bugs of training: other results than on one GPU, work that is lost at a resume."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_LOOP = ("tests/unit/test_loop.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="same-order-every-epoch",
        harm="every epoch shows the samples in the same order",
        file="executor/training/sampler.py",
        old='seed_sequence("order", self.seed, self.epoch)',
        new='seed_sequence("order", self.seed, 0)',
        tests=("tests/unit/test_sampler.py",),
    ),
    Mutant(
        name="workers-see-the-same-samples",
        harm="a gang trains on a part of its batch only",
        file="executor/training/sampler.py",
        old="start = sum(self.shares[:rank])",
        new="start = 0",
        tests=("tests/unit/test_sampler.py",),
    ),
    Mutant(
        name="resume-at-the-epochs-begin",
        harm="after a pause samples of the epoch are trained on twice",
        file="executor/training/loop.py",
        old='"sampler": (self._sampler.epoch, self._sampler.position),',
        new='"sampler": (self._sampler.epoch, 0),',
        tests=("tests/unit/test_loop.py::test_restoring_after_every_iteration_equals_a_straight_run_bit_for_bit",),
    ),
    Mutant(
        name="optimizer-not-restored",
        harm="momentum is lost at every SYNC: other results than without a pause",
        file="executor/training/loop.py",
        old='self._optimizers.load_state_dict(content["optimizer"])',
        new='content["optimizer"]',
        tests=("tests/unit/test_loop.py::test_restoring_after_every_iteration_equals_a_straight_run_bit_for_bit",),
    ),
    Mutant(
        name="schedule-not-restored",
        harm="the learning rate begins anew at every SYNC",
        file="executor/training/loop.py",
        old='self._schedules.load_state_dict(content["scheduler"])',
        new='content["scheduler"]',
        tests=("tests/unit/test_loop.py::test_restoring_after_every_iteration_equals_a_straight_run_bit_for_bit",),
    ),
    Mutant(
        name="random-state-not-by-iteration",
        harm="dropout after a resume is not what it was without one",
        file="executor/training/loop.py",
        old='reseed("train", segment.seed, iterations, segment.rank)',
        new='reseed("train", segment.seed, segment.rank)',
        tests=_LOOP,
    ),
    Mutant(
        name="workers-draw-alike",
        harm="every worker of a gang draws the same noise",
        file="executor/training/runner.py",
        old='reseed("train", self._segment.seed, iterations, self._segment.rank)',
        new='reseed("train", self._segment.seed, iterations)',
        tests=("tests/unit/test_trial.py",),
    ),
    Mutant(
        name="gradients-not-weighted",
        harm="a gang with unequal shares learns another thing than one GPU",
        file="executor/training/step.py",
        old="return self._segment.num_workers * size / batch.size",
        new="return 1.0",
        tests=("tests/unit/test_loop.py::test_accumulation_changes_nothing",),
    ),
    Mutant(
        name="checkpoint-of-another-iteration",
        harm="a trial goes on from a checkpoint of fewer iterations, and counts as done",
        file="executor/training/runner.py",
        old='if content["iterations"] != iterations:',
        new="if False:",
        tests=("tests/unit/test_loop.py::test_a_checkpoint_of_other_iterations_is_refused",),
    ),
    Mutant(
        name="trained-on-evaluation-mode",
        harm="dropout and BatchNorm are off after the first evaluation",
        file="executor/training/step.py",
        old="        self.wrapped.train()\n",
        new="",
        tests=("tests/unit/test_loop.py::test_restoring_after_every_iteration_equals_a_straight_run_bit_for_bit",),
    ),
    Mutant(
        name="nan-metric-passes",
        harm="a diverged trial goes on, and its NaN is ranked",
        file="executor/training/runner.py",
        old="    if not math.isfinite(value):\n        raise",
        new="    if False:\n        raise",
        tests=("tests/unit/test_trial.py",),
    ),
    Mutant(
        name="learning-rate-stays-scaled",
        harm="with elastic batches the learning rate grows step by step",
        file="executor/training/lr_scaling.py",
        old='                group["lr"] = rate\n',
        new="                pass\n",
        tests=("tests/unit/test_lr_scaling.py",),
    ),
    Mutant(
        name="sqrt-rule-is-linear",
        harm="Adam is given the linear rule's learning rate, and diverges",
        file="executor/training/lr_scaling.py",
        old='"sqrt": lambda initial, batch_size, phi, epochs: math.sqrt(batch_size / initial),',
        new='"sqrt": lambda initial, batch_size, phi, epochs: batch_size / initial,',
        tests=("tests/unit/test_lr_scaling.py",),
    ),
    Mutant(
        name="noise-scale-biased",
        harm="the noise scale is taken n times too large: batches grow until training suffers",
        file="executor/training/noise_scale.py",
        old="(num_parts * square_of_mean - mean_square) / (num_parts - 1)",
        new="square_of_mean",
        tests=("tests/unit/test_noise_scale.py",),
    ),
)
