"""Planted bugs of what may be rented: without a limit, unasked, or beyond the policy of the account."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_ALLOWANCE = ("tests/unit/test_allowance.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="rents-without-a-limit",
        harm="an experiment on EC2 without max_cost rents at once: nothing limits its bill",
        file="rubberband/app/allowance.py",
        old="    if most_usd is None and not is_lent and not no_cap:\n",
        new="    if False:\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="pool-without-a-limit",
        harm="a pool on EC2 without a cap comes up: nothing limits its bill",
        file="rubberband/app/allowance.py",
        old="    if pool.max_usd_per_hour is None and pool.max_usd_per_month is None:\n",
        new="    if False:\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="measures-unasked",
        harm="a profile is measured on rented instances before the user has agreed to the bill",
        file="rubberband/app/run.py",
        old="        if not is_known:\n            ask(",
        new="        if not is_known:\n            str(",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="no-is-yes",
        harm="the answer n to the question rents all the same",
        file="rubberband/commands/common.py",
        old="    if not is_granted:\n        raise refused\n",
        new="",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="rate-of-one-instance",
        harm="max_usd_per_hour of the policy is held against one instance, and all of them cost more",
        file="rubberband/app/allowance.py",
        old="        usd = _usd_per_hour(offered, resources.max_instances)\n",
        new="        usd = _usd_per_hour(offered, 1)\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="two-runs-spend-one-month",
        harm="what a run may still spend does not count: two at once spend the month twice",
        file="rubberband/app/allowance.py",
        old="    return spent_usd + max(0.0, (most_usd or 0.0) - summary.cost_usd)\n",
        new="    return spent_usd\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="measuring-spends-no-month",
        harm="experiments that measure their profiles at the same time spend the same rest of a month",
        file="rubberband/app/allowance.py",
        old="        note.write(name=folder.name, usd=most_usd, beside=folder.exists)\n",
        new="        note.write(name=folder.name, usd=0.0, beside=folder.exists)\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="extended-beyond-the-policy",
        harm="a small max_cost is raised beyond the policy of the account once the run has begun",
        file="rubberband/commands/local_experiment.py",
        old="        if max_cost_usd is not None:\n",
        new="        if False:\n",
        tests=_ALLOWANCE,
    ),
)
