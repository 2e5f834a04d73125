"""Planted bugs of what may be rented: without a limit, unasked, or beyond the policy of the account."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_ALLOWANCE = ("tests/unit/test_allowance.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="rents-without-a-limit",
        harm="an experiment on EC2 without max_cost rents at once: nothing limits its bill",
        file="executor/run/allowance.py",
        old="    if most_usd is None and not is_lent and not no_cap:\n",
        new="    if False:\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="pool-without-a-limit",
        harm="a pool on EC2 without a cap comes up: nothing limits its bill",
        file="executor/run/allowance.py",
        old="    if pool.max_usd_per_hour is None and pool.max_usd_per_month is None:\n",
        new="    if False:\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="measures-unasked",
        harm="a profile is measured on rented instances before the user has agreed to the bill",
        file="rubberband/running/run.py",
        old="            else:\n                start.ask(",
        new="            else:\n                str(",
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
        file="executor/run/allowance.py",
        old="        usd = _usd_per_hour(offered, resources.max_instances)\n",
        new="        usd = _usd_per_hour(offered, 1)\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="two-runs-spend-one-month",
        harm="what a run may still spend does not count: two at once spend the month twice",
        file="executor/run/allowance.py",
        old="    return spent_usd + max(0.0, (most_usd or 0.0) - summary.cost_usd)\n",
        new="    return spent_usd\n",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="measuring-spends-no-month",
        harm="experiments that measure their profiles at the same time spend the same rest of a month",
        file="executor/run/allowance.py",
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
    Mutant(
        name="last-months-bill-counts-again",
        harm="a run that goes on over the end of a month counts in the new one with all it has spent",
        file="executor/run/allowance.py",
        old="return summary.month_cost_usd if summary.month_at is not None and summary",
        new="return summary.month_cost_usd if summary.month_at is not None or summary",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="own-bill-counts-twice",
        harm="a run is not resumed although the month has room: what it has spent counts as another's too",
        file="executor/run/allowance.py",
        old='but=folder.name if pool is None else ""',
        new='but=""',
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="rate-of-the-cheaper-market",
        harm="max_usd_per_hour knows the cheaper market only: the dearer one exceeds it",
        file="executor/run/allowance.py",
        old="price_usd = max(price_usd, offered.spot.price_usd_per_hour)",
        new="price_usd = min(price_usd, offered.spot.price_usd_per_hour)",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="rate-of-the-rent-alone",
        harm="max_usd_per_hour knows no volumes and addresses",
        file="executor/run/allowance.py",
        old="instances * (price_usd + offered.side_usd_per_hour) + offered",
        new="instances * price_usd + offered",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="caps-of-a-pool-do-not-count",
        harm="a pool with a cap of its own below the policy is refused",
        file="executor/run/allowance.py",
        old="if min(usd, usd if pool.max_usd_per_hour is None",
        new="if max(usd, usd if pool.max_usd_per_hour is None",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="only-the-first-type-is-checked",
        harm="the second of several types is rented although the policy does not have it",
        file="executor/run/allowance.py",
        old="    for name in types:\n        if policy.refuses_type(name):",
        new="    for name in types[:1]:\n        if policy.refuses_type(name):",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="heads-pledge-side-by-side",
        harm="two runs that start on heads at the same moment spend the same rest of the month",
        file="executor/run/allowance.py",
        old="    note, now = _head_note(home, head), time.time()\n    with _alone(note):\n        if (policy",
        new="    note, now = _head_note(home, head), time.time()\n    make_directories(note.path.parent)\n"
        "    with suppress(KeyError):\n        if (policy",
        tests=_ALLOWANCE,
    ),
    Mutant(
        name="a-head-that-is-gone-goes-on-spending",
        harm="what a run on a head might still spend counts in each month after `down`",
        file="executor/run/allowance.py",
        old="usd=note.month_usd((), time.time()), open=0.0,",
        new="usd=note.month_usd((), time.time()), open=note.month_usd((), month_end(time.time())),",
        tests=("tests/unit/test_aws_on_head.py",),
    ),
)
