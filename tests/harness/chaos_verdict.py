"""What must hold once a run in random weather is over: nothing is left, and the provider's bill is the ledger's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rubberband.executor import (
    Finish,
    Fork,
    InstanceStatus,
    Job,
    Phase,
    StageRecord,
    State,
    bill_usd,
    instance_cost_usd,
)
from tests.builders.invariants import validate
from tests.harness.chaos_cases import BREEZE, CALM, LEASE_S

if TYPE_CHECKING:
    from tests.harness.chaos import Run


def after_the_end(run: Run, finish: Finish | None) -> list[str]:
    """Return what is left, and what was not as it must be on the way."""
    provider, now = run.backend.provider, run.clock.now()
    wrong = []
    for trial in run.controller.state.trials:
        gone = [ref.url for ref, _ in trial.kept() if ref.url in run.backend.discarded]
        wrong += [f"trial {trial.trial} keeps {url}, which was discarded" for url in gone]
    for status in provider.describe():
        if status.reason:
            run.seen[status.reason] += 1
        is_known = status.instance not in run.backend.given_up
        if finish is not None and status.state != "terminated" and is_known:
            wrong.append(f"{status.instance} lives on after the end")
        ends_at = provider.ends_at(status.instance)
        begins_at = max(now, provider.runs_at(status.instance))
        if (finish is None or not is_known) and ends_at > begins_at + LEASE_S + 15.0:
            wrong.append(f"{status.instance} outlives its lease by {ends_at - begins_at - LEASE_S:.1f} s")
    if finish is not None:
        validate(run.controller, is_informed=False)
        wrong += run.replayed()
        wrong += _trained_in_vain(run.controller.state)
        wrong += [] if run.stop_watch is not None else ranked_otherwise(run.controller.state)
        if run.controller.state.phase is not Phase.FINISHED:
            wrong.append(f"it ended in phase {run.controller.state.phase}")
        hindered = finish.outcome != "done" and run.case.job.max_cost_usd is None
        # A trial that hangs on the replacement too is blamed (`stragglers.replace_hung`); it may be slow as well.
        hindered = hindered and not ("hung" in finish.reason and run.seen["slow instance"] > 1)
        if hindered and run.weather in (CALM, BREEZE):
            wrong.append(f"{finish.outcome} ({finish.reason}), though little went wrong")
    return wrong


def _trained_in_vain(state: State) -> list[str]:
    """Name the stages that trained or ranked trials otherwise than their ends by themselves allow."""
    wrong = []
    for record in state.stages:
        ended = [trial for trial in record.trials if state.trials[trial].ended]
        before = {trial for trial in ended if _has_ended_before(state, trial, record)}
        trained = {use.trial for use in state.allocations if use.stage == record.stage}
        if before & trained:
            wrong.append(f"stage {record.stage} trains {before & trained}, which ended before it")
        if record.ended_at is None:
            continue
        if before == set(record.trials) and (record.training_at is not None or record.ended_at > record.started_at):
            wrong.append(f"stage {record.stage} has no trial left to train, and is not passed at once")
        revived = state.job.stages[0].exchange is not None  # one that had failed may have ended later
        if state.job.has_sync and not revived and set(ended) - set(record.ranking):
            wrong.append(f"stage {record.stage} ranks {record.ranking}, without {ended}, which ended by themselves")
    return wrong


def ranked_otherwise(state: State) -> list[str]:
    """Name the stages that end otherwise than without faults: a trial with a lower number is better."""
    synced = [record for record in state.stages if record.ended_at is not None]
    if state.history.of(Fork):  # those that go on from another one's checkpoint are as good
        return []
    of_halving = [one for one in synced if state.job.has_sync]
    return [
        f"stage {record.stage} ends with {record.ranking}"
        for record in of_halving
        if not any(state.trials[trial].ended for trial in record.trials)
        and list(record.ranking) != in_order(state.job, record.ranking)
    ]


def in_order(job: Job, trials: Sequence[int]) -> list[int]:
    """Return trials in the order that their numbers give: repeats together, those that break a limit behind."""

    def key(trial: int) -> tuple[float, int, bool, int]:
        here = [one for one in trials if one // job.repeats == trial // job.repeats]
        broken = [bool(job.limits) and one % 4 == 3 for one in here]
        return sum(broken) / len(here), trial // job.repeats, bool(job.limits) and trial % 4 == 3, trial

    return sorted(trials, key=key)


def _has_ended_before(state: State, trial: int, record: StageRecord) -> bool:
    """Whether an ended trial's last stretch on a gang was over before a stage began."""
    use = state.allocation(state.trials[trial])
    return use.stage < record.stage and use.ended_at is not None and use.ended_at <= record.started_at


def judged_by_the_bill(run: Run, finish: Finish | None) -> list[str]:
    """The bill only grows: if it is within the cap at the end of time, it always was.

    The cap does not cover instances that show up after their launches were given up.
    """
    job, state = run.controller.job, run.controller.state
    # A clock that stepped back may not have reached yet what a driver found ended.
    known_until = max([state.now, *(one.ended_at or 0.0 for one in state.instances.values())])
    provider, wrong = run.backend.provider, list[str]()
    unknown_usd = math.fsum(provider.cost_usd(instance) for instance in run.backend.given_up)
    billed_usd, ledger_usd = provider.bill_usd(math.inf) - unknown_usd, bill_usd(state, known_until)
    if job.max_cost_usd is not None and billed_usd > job.max_cost_usd + 1e-6:
        wrong.append(f"the provider bills {billed_usd:.6f} USD of max_cost={job.max_cost_usd:.6f}")
    # The head lives before Started, and until its lease ends after the death of a driver whose run had just ended.
    unseen_usd = job.offer.head_cost_usd(LEASE_S + min(state.paused_s, LEASE_S * len(state.resumed_at)))
    if finish is not None and billed_usd > ledger_usd + unseen_usd + 1e-6:
        wrong.append(f"the provider bills {billed_usd:.6f} USD and the ledger says {ledger_usd:.6f}")
    rent_usd = sum(instance_cost_usd(job, record, math.inf) for record in state.instances.values())
    # What ended at its lease, unwatched, is only known to have ended by then; an hour whose price is not known
    # yet counts at the most that it may cost.
    is_known = finish is not None and not run.seen["lease expired"] and not run.seen["price moves"]
    if is_known and billed_usd + unknown_usd < rent_usd - 1e-6:
        wrong.append(f"the ledger says {rent_usd:.6f} USD for instances, and the provider {billed_usd:.6f} in all")
    for status in provider.describe() if is_known else ():
        record, billed_usd = state.instances.get(status.instance), provider.cost_usd(status.instance)
        if record is not None and record.status is InstanceStatus.REFUSED and status.instance in run.backend.given_up:
            continue  # the run ended before it was seen
        ledger_usd = 0.0 if record is None else instance_cost_usd(job, record, math.inf)
        if abs(billed_usd - ledger_usd) > 1e-6:
            what = f"the provider bills {billed_usd:.6f} USD for {status.instance}"
            wrong.append(f"{what}, and the ledger says {ledger_usd:.6f}")
    return wrong
