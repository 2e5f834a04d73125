"""Planted bugs of profiles and of what is printed: starts taken for training, unrest without a word."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_STARTS = "tests/unit/test_profile_starts.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="first-iteration-is-like-others",
        harm="a script that loads its data first is planned many times too slow",
        file="executor/profiling/points.py",
        old="return extra_s if extra_s > max(_LEAST_EXTRA * usual_s, 2.0 * error_s) else 0.0",
        new="return 0.0",
        tests=(_STARTS,),
    ),
    Mutant(
        name="extra-by-chance",
        harm="noise of iterations is planned as start-up of every stage",
        file="executor/profiling/points.py",
        old="max(_LEAST_EXTRA * usual_s, 2.0 * error_s) else 0.0",
        new="_LEAST_EXTRA * usual_s else 0.0",
        tests=(_STARTS,),
    ),
    Mutant(
        name="wide-spread-unsaid",
        harm="a profile that was taken beside another program is used without a word",
        file="rubberband/values/profile.py",
        old="spreads[gpus] <= WIDE_CV",
        new="spreads[gpus] <= 10.0",
        tests=(_STARTS,),
    ),
    Mutant(
        name="wide-spread-not-measured-on",
        harm="three iterations beside another program's start are the whole profile",
        file="executor/profiling/session.py",
        old="if is_over or not times or _is_steady(times):",
        new="if True:",
        tests=(_STARTS,),
    ),
    Mutant(
        name="cold-start-forgotten",
        harm="the first wave of a script with slow imports is planned without them",
        file="rubberband/planning/candidates.py",
        old="mean_s=times.init_s + extra_s, cv=0.0",
        new="mean_s=times.init_s, cv=0.0",
        tests=(_STARTS,),
    ),
    Mutant(
        name="start-taken-for-slow-training",
        harm="a run whose functions load their data plans the rest as if training were slow",
        file="executor/core/measured.py",
        old="extra_s = within_first_s if began_at == first_at else 0.0",
        new="extra_s = 0.0",
        tests=(_STARTS,),
    ),
    Mutant(
        name="cold-report-is-the-speed",
        harm="a job of one report is planned by the imports of its first process",
        file="executor/profiling/points.py",
        old="kept = [trial for trial in timed if not trial.is_cold] or list(timed)",
        new="kept = list(timed)",
        tests=(_STARTS,),
    ),
    Mutant(
        name="one-trials",
        harm="messages say 1 trials",
        file="rubberband/units.py",
        old="{'' if count == 1 else 's'}",
        new="s",
        tests=("tests/unit/test_units.py",),
    ),
    Mutant(
        name="look-is-a-replan",
        harm="the compare page counts a plan that stays as a replan",
        file="api/dashboard/compare.py",
        old="sum(decision.changed for decision in result.decisions)",
        new="len(result.decisions)",
        tests=("tests/unit/test_dashboard_listing.py",),
    ),
    Mutant(
        name="deadline-less-profiling",
        harm="a deadline of 2h is shown as 1h59m58s after a profile was measured",
        file="executor/result/result.py",
        old="self.deadline_s + self.profiling_s",
        new="self.deadline_s",
        tests=("tests/unit/test_dashboard_listing.py",),
    ),
)
