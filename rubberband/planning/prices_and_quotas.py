"""From an experiment to its estimate, with the sources of its figures: the one answer of every front door.

The command line, the service and Python give the same JSON. Nothing is started or spent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rubberband.cloud.catalogue import Table, row_source
from rubberband.cloud.offers import price_source, spot_source
from rubberband.cloud.provider import Today
from rubberband.errors import ProviderError
from rubberband.features import parts
from rubberband.planner import Estimate, Infeasible, Problem, plan
from rubberband.planning.assumptions import Assumption, Basis, Name, assumptions, bill_lines
from rubberband.planning.candidates import (
    batch_notes,
    end_notes,
    mixture_notes,
    network_notes,
    repeat_notes,
    sampler_notes,
    stop_notes,
)
from rubberband.planning.clusters import joining
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, planned
from rubberband.planning.startup_history import start_times
from rubberband.spec.experiment import Experiment, ProfilesByType, entrypoint_words
from rubberband.spec.pool import PoolFile, PoolFolder, resources_of
from rubberband.spec.profile_file import VARIATIONS, InlineProfile
from rubberband.spec.program import Program
from rubberband.spec.resources import Resources
from rubberband.units import format_duration, format_usd
from rubberband.values.command import script_of, words_of
from rubberband.values.kinds import part_of
from rubberband.values.offer import BillLine, Offer
from rubberband.values.plan import Size
from rubberband.values.profile import Profile


def local_prices_and_quotas(experiment: Experiment, home: Path) -> PricesAndQuotas:
    """Inputs that this machine knows: its start times, as runs of `home` measured them, and the cap of the pool."""
    resources, name = experiment.resources, entrypoint_words(experiment.entrypoint)
    cap, notes = None, tuple[str, ...]()
    if resources.pool is not None:
        from rubberband.planning.month_cap import month_cap

        try:
            cap = month_cap(Path(resources.pool), time.time())
        except ProviderError as error:
            notes = (f"pool: whether its max_usd_per_month covers the plan is not known: {error}.",)
    if resources.kind.share is not None:
        return PricesAndQuotas(starts=joining(experiment, home), notes=notes)
    if not resources.kind.is_this_machine or name is None:
        return PricesAndQuotas(month_cap=cap, notes=notes)
    return PricesAndQuotas(starts=start_times(home, name, resources.max_instances), month_cap=cap, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """An estimate and its assumptions."""

    estimate: Estimate
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...]
    bill: tuple[BillLine, ...] = ()
    """The lines of the plan's bill, which add up to its (mean) cost."""
    size: Size | None = None
    """Set if the search was sized to the limits."""
    blocks: tuple[str, ...] = ()
    """The one of `notes` that compares the plan with a capacity block; empty without."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that `rubberband estimate -o json` prints."""
        return {
            **self.estimate.to_json(),
            "assumptions": [_plain(assumption) for assumption in self.assumptions],
            "notes": list(self.notes),
            "bill": [_plain(line) for line in self.bill],
            **({} if self.size is None else {"size": self.size.to_json()}),
        }


def _plain(value: Assumption | BillLine) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def answer(
    experiment: Experiment, profiles: Profile | Mapping[str, Profile], prices: PricesAndQuotas, options: PlanningOptions
) -> EstimateAnswer:
    """Estimate an experiment, and compare its plan with the alternatives. Raises InputError if it cannot be planned.

    An answer without a plan within the limits has remedies.
    """
    found = planned(experiment, profiles, prices, replace(options, compare=True))
    best, started = found.estimate, found.experiment
    bill = bill_lines(best)
    blocks = _block_notes(best, bill, prices)
    return EstimateAnswer(
        estimate=best,
        assumptions=assumptions(best, _bases(experiment, best.problem, prices, found.seen)),
        notes=(
            *found.remarks,
            *started.notes,
            *_profile_notes(started, best.profile),
            *repeat_notes(started),
            *stop_notes(started),
            *end_notes(started, best.profile),
            *_planned_notes(best, started, found.candidates, prices.table),
            *_notes(started, best.problem, prices.table),
            *_checkpoint_notes(best, started),
            *prices.notes,
            *blocks,
            *_cap_notes(best, prices, options.now),
        ),
        bill=bill,
        size=found.size,
        blocks=blocks,
    )


def _profile_notes(experiment: Experiment, profile: Profile) -> list[str]:
    if not experiment.resources.kind.is_this_machine or profile.source != "inline":
        return []
    return ["times: those in the file's profile, not measured on this machine; the check of a run corrects them."]


def _block_notes(best: Estimate, bill: Sequence[BillLine], prices: PricesAndQuotas) -> tuple[str, ...]:
    """Return the remark that compares the plan with capacity that is sold in advance; empty without a plan or one."""
    if prices.blocks is None or best.job is None or best.prediction is None:
        return ()
    rent_usd = sum(line.usd for line in bill if line.line == "instances")
    most = max(stage.instances for stage in best.job.plan.stages)
    note = prices.blocks(best.offer.instance_type, most, best.prediction.jct_s, rent_usd)
    return () if note is None else (note,)


def _cap_notes(best: Estimate, prices: PricesAndQuotas, now: float) -> tuple[str, ...]:
    """Return the remark that the pool's money does not cover the plan; empty if it does."""
    if prices.month_cap is None or best.prediction is None:
        return ()
    refused = prices.month_cap.refusal(best.prediction.cost_usd, best.prediction.jct_s, now)
    return () if refused is None else (f"pool: a run is refused now: {refused}.",)


def _planned_notes(
    best: Estimate, experiment: Experiment, options: Sequence[Problem], table: Table | None
) -> list[str]:
    """Return remarks on the plan; none without one."""
    if best.job is None:
        return []
    sizes = {stage.gpus_per_trial for stage in best.job.plan.stages}
    workers = [note for notes in parts("notes") for note in notes(experiment, best.profile, sizes)]
    mixed = mixture_notes(experiment, best.problem, options, max(sizes))
    slow = network_notes(experiment, best.offer, max(sizes), table)
    return [*sampler_notes(experiment, len(best.job.lanes)), *workers, *mixed, *slow]


_LEAST_GAIN = 0.01
"""Least share of the cost, or of the time, that is worth a remark."""


def _checkpoint_notes(best: Estimate, experiment: Experiment) -> list[str]:
    """Return the remark that checkpoints would make the plan of trials that save none cheaper, or faster."""
    if best.profile.resumes or isinstance(saved := plan(best.problem.with_checkpoints()), Infeasible):
        return []
    then, now = saved.prediction, best.prediction
    if now is None:
        what = f"make a plan possible: {format_duration(then.jct_s)}, {format_usd(then.cost_usd)}"
    else:
        in_time = best.problem.objective == "min_time"
        whole, left = (now.jct_s, then.jct_s) if in_time else (now.cost_usd, then.cost_usd)
        if whole - left <= _LEAST_GAIN * whole:
            return []
        shown = format_duration if in_time else format_usd
        what = f"save {shown(whole - left).removesuffix(' USD')} of {shown(whole)}"
    script = script_of(words_of(experiment.entrypoint.command)) if isinstance(experiment.entrypoint, Program) else ""
    how = f"; rubberband init --patch {script} shows them" if script and script.endswith(".py") else ""
    why = "the trial saves none, so each stage repeats all earlier iterations"
    return [f"checkpoints: {why}. A few lines of checkpoint would {what}{how}."]


def _bases(
    experiment: Experiment, problem: Problem, prices: PricesAndQuotas, seen: Collection[str]
) -> dict[Name, Basis]:
    """Return the sources of an estimate's inputs; inputs without one are given in the experiment file.

    `seen` are the words that measured start times of this machine replace.
    """
    resources, profile, instance_type = experiment.resources, problem.profile, problem.offer.instance_type
    table, is_measured = prices.table, prices.starts is not None and prices.starts.starts > 0
    by_file = profile.source == "file"
    profiled: Basis = "measured" if by_file else "given"
    found: dict[Name, Basis] = {
        "time per iteration": profiled,
        "noise scale of the gradients": "measured" if profile.goodput and profile.goodput.points else "given",
        "start-up of a trial": profiled if by_file or profile.trial_startup_s else "default",
        "noise of trials": profiled if profile.varies or _tells_noise(experiment, instance_type) else "default",
        "provisioning of an instance": _delay(resources.provision_delay, profile.provision_delay_s, profiled),
        "initialising of an instance": _delay(resources.init_delay, profile.init_delay_s, profiled),
        "price of an instance": price_source(resources, instance_type, table=table)[0],
        "price of a spot instance": spot_source(resources, instance_type, table=table)[0],
    }
    if "provision_delay" in seen:
        found["provisioning of an instance"] = "measured" if is_measured else "default"
    if "init_delay" in seen:
        found["initialising of an instance"] = "measured"
    if _asks_head_price(resources, problem.offer, table):
        found["head node"] = "live"
    if "interruptions_per_hour" not in resources.spot.model_fields_set:
        found["spot interruptions"] = "default"
    return found


def _notes(experiment: Experiment, problem: Problem, table: Table | None) -> list[str]:
    """Return remarks on the sources of prices, on the batches, and on the profile."""
    resources, offer, name = experiment.resources, problem.offer, problem.offer.instance_type
    basis, source = price_source(resources, name, table=table)
    notes = []
    if source == "free of charge":
        notes.append(f"price: {name} is {source}.")
    elif basis == "live":
        notes.append(f"price: that of {name} is from {source}.")
    elif basis == "default":
        notes.append(f"price: that of {name} is from {source}; check it, or write resources.price_per_hour.")
    spot_basis, spot = spot_source(resources, name, table=table)
    if offer.spot is not None and spot_basis == "live":
        notes.append(f"price on spot: that of {name} is from {spot}.")
    if table is not None and _asks_head_price(resources, offer, table):
        head = resources.aws.head_instance_type
        notes.append(f"price of the head: that of {head} is from {row_source(table[head], resources.region)}.")
    return [*notes, *batch_notes(experiment, problem.profile.goodput), *(problem.fixed or problem.profile).notes()]


def _asks_head_price(resources: Resources, offer: Offer, table: Table | None) -> bool:
    """Return whether the price of the head is the cloud's, not the file's."""
    return table is not None and offer.head_price_usd_per_hour != resources.head_price_usd_per_hour


def _delay(asked: object, of_profile_s: float | None, profiled: Basis) -> Basis:
    if asked is not None:
        return "given"
    return "default" if of_profile_s is None else profiled


def _tells_noise(experiment: Experiment, instance_type: str) -> bool:
    """Return whether the experiment file has a word on noise."""
    profile = experiment.profile
    written = profile.by_instance_type.get(instance_type) if isinstance(profile, ProfilesByType) else profile
    return isinstance(written, InlineProfile) and not written.model_fields_set.isdisjoint(VARIATIONS)


def live_prices_and_quotas(experiment: Experiment, home: Path) -> PricesAndQuotas:
    """Return those of today, if the provider says them. It is asked; nothing is started or spent.

    Raises InputError if the account's quota allows none of the instances, or for an unknown region.
    """
    resources, prices = experiment.resources, part_of(experiment.resources.provider, "prices")
    if prices is None or resources.pool is not None:
        ours = local_prices_and_quotas(experiment, home)
        return replace(ours, notes=(*ours.notes, *(f"{note}." for note in _pool_notes(experiment))))
    return _of(prices(resources, home, _until(experiment)))


def cloud_prices_and_quotas(
    experiment: Experiment, home: Path, announce: Callable[[str], None], *, on_head: bool = True
) -> PricesAndQuotas:
    """Return those of a run that begins now, after the provider checked that it can run it; empty without such checks.

    `announce` gets a line on each remark. Not `on_head`: the run will begin on a head, not on this machine. Raises
    InputError (with the fix) for the first problem.
    """
    resources, preflight = experiment.resources, part_of(experiment.resources.provider, "preflight")
    if preflight is None or resources.pool is not None:  # a pool was checked when it came up
        for note in _pool_notes(experiment):
            announce(note)
        return PricesAndQuotas()
    return _of(preflight(resources, home, _until(experiment), announce, on_head=on_head))


def _of(today: Today) -> PricesAndQuotas:
    return PricesAndQuotas(table=today.table, room=today.room, notes=tuple(today.notes), blocks=today.blocks)


def _until(experiment: Experiment) -> float:
    """Return when an experiment that begins now must be done (Unix time)."""
    now = time.time()
    deadline_s = experiment.constraints.deadline_from(now)
    return math.inf if deadline_s is None else now + deadline_s


def _pool_notes(experiment: Experiment) -> Sequence[str]:
    """Return notes on what the user has reserved for the experiment's pool. Raises InputError if it ends before the
    deadline."""
    path, reserved = experiment.resources.pool, part_of(experiment.resources.provider, "reserved")
    if path is None or reserved is None:
        return ()
    notes: Sequence[str] = reserved(resources_of(PoolFile(**PoolFolder(path=Path(path)).read())), _until(experiment))
    return notes
