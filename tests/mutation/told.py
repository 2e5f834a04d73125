"""Planted bugs of what is told: odds, mean time and mean cost that do not happen."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_JUDGE = ("tests/judge/test_judge.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="head-free-while-instances-start",
        harm="the head node costs more than estimate says: it is paid while instances start too",
        file="planner/model.py",
        old="cost_usd = cost_usd + held_usd + rates.head_usd_per_s * (provisioning_s + duration_s)",
        new="cost_usd = cost_usd + held_usd + rates.head_usd_per_s * duration_s",
        tests=_JUDGE,
    ),
    Mutant(
        name="data-of-one-instance",
        harm="the data of all instances but one are not told",
        file="planner/model.py",
        old="return instances * (self.prices_usd_per_s[market] * self.minimum_s + self.once_usd)",
        new="return instances * self.prices_usd_per_s[market] * self.minimum_s + self.once_usd",
        tests=_JUDGE,
    ),
    Mutant(
        name="functions-of-one-gpu",
        harm="a function is told at the price of one GPU, whatever its gang",
        file="planner/model.py",
        old="return price_usd_per_s * (choice.gpus_per_trial / self.gpus) * times.busy_s(index, choice)",
        new="return price_usd_per_s * (1 / self.gpus) * times.busy_s(index, choice)",
        tests=_JUDGE,
    ),
    Mutant(
        name="iterations-vary-together",
        harm="odds are told too low: the noise of iterations does not average out over a stage",
        file="planner/sampling.py",
        old="self.profile.iteration_cv / math.sqrt(iterations)",
        new="self.profile.iteration_cv",
        tests=_JUDGE,
    ),
    Mutant(
        name="profile-is-exact",
        harm="odds are told too high: the profile's own error is left out",
        file="planner/sampling.py",
        old="return _lognormal(self.profile.mean_cv, _normals((self.seed, number, 0, 7), (1, rows)))",
        new="return np.ones((1, rows), np.float32)",
        tests=_JUDGE,
    ),
    Mutant(
        name="a-queue-for-each-lane",
        harm="brackets that start together are told to wait for their instances one by one: too late, too unlikely",
        file="planner/sampling.py",
        old="if index == 0 and self.seed_of_lanes",
        new="if index < 0 and self.seed_of_lanes",
        tests=_JUDGE,
    ),
    Mutant(
        name="measured-delays-fixed",
        harm="odds are told as if instances always started in the mean of the measured times",
        file="planner/sampling.py",
        old="return rng.choice(np.array(spread.samples), size)",
        new="return np.ones(size)",
        tests=_JUDGE,
    ),
    Mutant(
        name="odds-forget-the-budget",
        harm="the odds of keeping both limits are those of the deadline alone",
        file="planner/risk.py",
        old="p_both=float((in_time & in_budget).mean()),",
        new="p_both=float(in_time.mean()),",
        tests=_JUDGE,
    ),
    Mutant(
        name="release-of-the-head-alone",
        harm="odds forget the money that a run keeps back for the release of its instances: it is stopped before",
        file="planner/reserve.py",
        old="usd = (choice.instances * price + offer.head_cost_usd(1.0)) * margin_s",
        new="usd = offer.head_cost_usd(1.0) * margin_s",
        tests=_JUDGE,
    ),
    Mutant(
        name="asha-billed-from-the-order",
        harm="instances of asha are told as billed while the provider looks for them",
        file="planner/asha.py",
        old="max(offer.minimum_billed_s, until_s - running_s)",
        new="max(offer.minimum_billed_s, until_s)",
        tests=_JUDGE,
    ),
    Mutant(
        name="asha-keeps-idle-instances",
        harm="asha is told as if it kept idle instances to the end: its cost is too high",
        file="planner/asha.py",
        old="            self.released_s.append((self._wide, now_s))",
        new="            self.released_s.append((0 * self._wide, now_s))",
        tests=_JUDGE,
    ),
    Mutant(
        name="trials-as-fast-as-each-other",
        harm="odds and time are told as if all trials were equally fast",
        file="planner/sampling.py",
        old="drawn = self._noise(self.profile.trial_cv, first, 5, self.profile.law)",
        new="drawn = self._noise(0.0, first, 5, self.profile.law)",
        tests=_JUDGE,
    ),
    Mutant(
        name="replaced-at-once",
        harm="time on spot is told as if the replacement of a lost instance were ready at once",
        file="planner/losses.py",
        old="run.replaced_s(number, places[at]))",
        new="0.0 * run.replaced_s(number, places[at]))",
        tests=_JUDGE,
    ),
)
