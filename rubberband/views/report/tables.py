"""Headlines and tables of a result, the contents of the report in every form. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rubberband.executor.core.bill import PaidTime
from rubberband.executor.result.batch_history import BalanceStretch
from rubberband.executor.result.parts import InstanceResult, TrialResult
from rubberband.executor.result.result import Objective, Result
from rubberband.features import made_by
from rubberband.units import counted, duration
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.worth import likelihood
from rubberband.views.formatting import (
    Card,
    Row,
    TextTable,
    amount,
    causes,
    change,
    config_line,
    difference,
    first_and_last,
    gain,
    listed,
    mean_efficiency,
    noise_scales,
    number,
    printable,
    ranked,
    rounded,
    slow_workers,
    status,
    usd,
    usd_decimals,
    worker_values,
)
from rubberband.views.report.headlines import budget, deadline_kept, measured
from rubberband.views.story import StoryRecord, cells, changes_line, in_a_row, sentence


def exchanges(result: Result) -> TextTable:
    """Return which trial took over whose checkpoint, and what has changed; empty if none did."""
    return TextTable(
        title="Trials that took over another trial's checkpoint",
        header=("at", "trial", "from trial", "iterations", "changed", "why"),
        rows=tuple(
            (
                duration(one.at_s),
                str(one.trial),
                str(one.parent),
                str(one.iterations),
                changes_line(one.changes) or "nothing",
                printable(one.reason),
            )
            for one in result.forks
        ),
        words=frozenset({4, 5}),
    )


def comparison(result: Result) -> TextTable:
    """Return the table of time and cost: planned, actual, and the limits."""
    done, so_far = result.outcome == "done", " so far" if result.outcome == "unfinished" else ""
    decimals = usd_decimals(max(result.actual_cost_usd, result.planned_cost_usd))
    notes = []
    if result.profiling_s or result.profiling_cost_usd:
        took = f"{duration(result.profiling_s)} and {usd(result.profiling_cost_usd)} USD"
        whole = f", {usd(result.whole_cost_usd)} USD in all" if result.profiling_cost_usd else ""
        notes.append(f"Profiling before the start took {took} more{whole}; the limits below are what it left.")
    notes += [f"After {duration(one.at_s)} it was extended: {sentence(one)}." for one in result.extensions]
    others: tuple[StoryRecord, ...] = (*result.setbacks, *result.added, *result.pauses, *result.replacements)
    notes += [f"After {duration(one.at_s)} {sentence(one)}." for one in others]
    for rule, cut in sorted(Counter(cut.rule for cut in result.cuts).items()):
        notes.append(f"{counted(cut, 'trial')} ended early by {rule}.")
    if result.resumes:
        after = f", after {listed(map(duration, result.resumed_s))}" if result.resumed_s else ""
        notes.append(f"The run was resumed {counted(result.resumes, 'time')}{after}.")
    return TextTable(
        title="Planned against actual",
        header=("", "planned", "actual", "difference", "limit"),
        rows=(
            (
                "time",
                duration(result.planned_jct_s),
                duration(result.actual_jct_s) + so_far,
                difference(result.actual_jct_s, result.planned_jct_s) if done else "",
                deadline_kept(result) or "no deadline",
            ),
            (
                "cost",
                f"{usd(result.planned_cost_usd, decimals)} USD",
                f"{usd(result.actual_cost_usd, decimals)} USD{so_far}",
                difference(result.actual_cost_usd, result.planned_cost_usd) if done else "",
                budget(result),
            ),
        ),
        words=frozenset({0, 4}),
        notes=tuple(notes),
    )


def stages(result: Result) -> TextTable:
    """Return a row for each stage, and a total to which they add up; of several brackets, the head node by itself."""
    begun = [stage for stage in result.stages if stage.actual_s is not None]
    decimals = usd_decimals(max(result.actual_cost_usd, result.planned_cost_usd))
    heads = _heads_usd(result)
    planned_usd, cost = _amounts([*(stage.planned_cost_usd for stage in result.stages), *heads[:1]], decimals)
    actual_usd, bill = _amounts([*(stage.actual_cost_usd or 0.0 for stage in begun), *heads[1:]], decimals)
    paid, rows = iter(bill), list[Row]()
    for stage, planned in zip(result.stages, cost, strict=False):
        *plain, _, _ = cells(stage, decimals)
        promoted = f"{len(stage.promoted)} of {stage.trials}" if stage.promoted else ""
        rows.append((*plain, planned, "" if stage.actual_s is None else next(paid), promoted))
    if heads:
        rows.append(("head", "", "", "", "", "", "", cost[-1], bill[-1], ""))
    several = len({stage.bracket for stage in result.stages}) > 1
    reached = " > ".join(str(rung.trials) for rung in result.rungs) if len(result.rungs) > 1 else ""
    times_s = result.planned_jct_s, result.actual_jct_s
    if not several:
        times_s = math.fsum(stage.planned_s for stage in result.stages), math.fsum(one.actual_s or 0.0 for one in begun)
    planned_s, actual_s = map(duration, times_s)
    if has_more := any(stage.added for stage in result.stages):  # the rows are more than was planned at the start
        planned_usd = usd(result.planned_cost_usd, decimals)
    return TextTable(
        title="Stages, planned and actual",
        header=("stage", "trials", "iterations", "instances", f"{result.place}s/trial", *_FIGURES, "promoted"),
        rows=tuple(rows),
        total=("total", "", "", "", "", planned_s, actual_s if begun else "", planned_usd, actual_usd, ""),
        words=frozenset({0}),
        notes=(
            "Instances: most held at once / planned. Time: waiting for instances included. USD: added to the bill.",
            "Promoted of the last stage: trials that completed it.",
            *([f"Trials that reached each rung: {reached}."] if reached else []),
            *(["Stage 2.1: stage 1 of bracket 2. Brackets run side by side, or one after another."] if several else []),
            *(["Brackets that were added are planned then; the total is the plan at the start."] if has_more else []),
        ),
    )


def _heads_usd(result: Result) -> list[float]:
    """Return what the head node was planned to cost and costs, if no stage has it; else nothing."""
    if len({stage.bracket for stage in result.stages}) == 1:
        return []
    planned_usd = result.planned_head_usd
    actual_usd = result.actual_cost_usd - sum(stage.actual_cost_usd or 0.0 for stage in result.stages)
    return [planned_usd, actual_usd] if max(abs(planned_usd), abs(actual_usd)) > 1e-9 else []


def decisions(result: Result) -> TextTable:
    """Return a row for the decision at each SYNC, with the forecasts of the whole run before and after it.

    Decisions in a row that changed nothing are one.
    """
    decimals = usd_decimals(max([decision.cost_usd for decision in result.decisions], default=0.0))
    return TextTable(
        title="The plan at each SYNC",
        header=("before stage", "at", "plan", "expected time", "expected USD", "why"),
        rows=tuple(
            (
                " to ".join(dict.fromkeys(result.stages[one.stage].name for one in (first, latest))),
                duration(latest.at_s),
                "changed" if latest.changed else "kept" if latest is first else f"kept {len(made)} times",
                _became(duration(first.present_jct_s), duration(latest.jct_s)),
                _became(usd(first.present_cost_usd, decimals), usd(latest.cost_usd, decimals)),
                printable(latest.reason),
            )
            for made in in_a_row(result.decisions)
            for first, latest in [(made[0], made[-1])]
        ),
        words=frozenset({2, 5}),
        notes=(
            "Expected: of the whole run, by the plan before and after. Everything called planned is the first plan.",
        ),
    )


def worths(result: Result) -> TextTable:
    """Return a row for each look at what the rest might bring for its money."""
    decimals = usd_decimals(max([worth.left_usd for worth in result.worths], default=0.0))
    return TextTable(
        title="Worth of the rest",
        header=("at", f"best {result.metric}", "improves", "on average", "ends worse", "rest", "rest USD"),
        rows=tuple(
            (
                duration(worth.at_s),
                number(worth.best),
                likelihood(worth.chances[0][1]),
                number(worth.expected),
                likelihood(worth.worse),
                duration(worth.left_s),
                usd(worth.left_usd, decimals),
            )
            for worth in result.worths
        ),
        notes=("From the learning curves: an improvement is one of the reported metric, by luck too.",),
    )


def _became(before: str, after: str) -> str:
    return after if before == after else f"{before} -> {after}"


_FIGURES = ("time plan", "time", "USD plan", "USD")


def _amounts(parts_usd: Sequence[float], decimals: int) -> tuple[str, list[str]]:
    steps = rounded(parts_usd, 10.0**-decimals)
    return usd(math.fsum(steps), decimals) if steps else "", [usd(step, decimals) for step in steps]


def _idle(paid: PaidTime) -> dict[str, float]:
    """Return the idle GPU-seconds by cause, the largest first; those of an older report are one line."""
    causes = {
        "idle before the first trials": paid.idle_before_gpu_s,
        "idle within stages": paid.idle_in_stage_gpu_s,
        "idle between stages": paid.idle_between_gpu_s,
        "idle after the last stage": paid.idle_after_gpu_s,
    }
    known = {name: gpu_s for name, gpu_s in causes.items() if gpu_s > 0.0}
    return known or {"idle": paid.idle_gpu_s}


def _put_to_use(result: Result) -> list[str]:
    """Return the line about GPUs that would have been idle within stages; none where there were none."""
    instances = sum(len(one.instances) for one in result.given_back)
    moved = sum(one.gpus == one.gpus_before for one in result.regrouped)
    wider = len(result.regrouped) - moved
    parts = [f"{counted(instances, 'idle instance')} given back"] if instances else []
    parts += [f"{counted(wider, 'wider gang')} formed"] if wider else []
    parts += [f"{counted(moved, 'trial')} moved"] if moved else []
    return [f"Within stages: {', '.join(parts)} (constraints.resize_in_stage)."] if parts else []


def paid_time(result: Result) -> TextTable:
    """Return the uses of the paid GPU-seconds, with the whole bill divided in proportion."""
    paid = result.paid
    parts = {
        "training": paid.training_gpu_s,
        **({"trained again": paid.repeated_gpu_s} if paid.repeated_gpu_s else {}),
        "start-up of trials": paid.startup_gpu_s,
        "instances starting up": paid.provisioning_gpu_s,
        **_idle(paid),
        "billing minimum": paid.minimum_gpu_s,
    }
    total_gpu_s = paid.total_gpu_s
    if total_gpu_s <= 0:
        return TextTable(title=_PAID, header=(), rows=())
    places = 0 if total_gpu_s >= 100 else 2
    seconds = rounded(list(parts.values()), 10.0**-places)
    percents = rounded([100.0 * part / total_gpu_s for part in parts.values()], 0.1)
    decimals = usd_decimals(result.actual_cost_usd)
    whole_usd, shares = _amounts([result.actual_cost_usd * part / total_gpu_s for part in parts.values()], decimals)
    return TextTable(
        title=_PAID,
        header=("", f"{result.place}-seconds", "%", "USD"),
        rows=tuple(
            (name, f"{gpu_s:,.{places}f}", f"{abs(percent):.1f}", share)
            for name, gpu_s, percent, share in zip(parts, seconds, percents, shares, strict=True)
        ),
        total=("total", f"{math.fsum(seconds):,.{places}f}", f"{math.fsum(percents):.1f}", whole_usd),
        notes=(
            f"Idle: {result.place}s held without a trial: within a stage while others finish, between stages while "
            "instances start. Billing minimum: billed beyond the release.",
            f"USD: the whole bill, shared out in proportion to the {result.place}-seconds.",
            *(["Trained again: iterations that no checkpoint held."] if paid.repeated_gpu_s else []),
            *_put_to_use(result),
            *filter(None, [made_by("use of trials", result.trials)]),
        ),
    )


_PAID = "Where the paid time went"


def paid_parts(table: TextTable) -> list[tuple[str, float]]:
    """Return the uses of the table `paid_time`, each with its percentage, for a bar."""
    return [(name, float(percent)) for name, _, percent, _ in table.rows]


def paid_card(result: Result) -> Card:
    """Return the share of the paid time that trained, and where most of the rest went."""
    parts = paid_parts(paid_time(result))
    rest = sorted(((percent, name) for name, percent in parts if not name.startswith("train")), reverse=True)
    most = next((f"{name} {percent:.0f} %" for percent, name in rest if percent >= 1.0), "")
    return Card(f"paid {result.place} time that trained", f"{100 * result.paid.training_share:.0f} %", (most,))


def failures(result: Result) -> TextTable:
    """Return the failed trials by cause, and the number of those that recovered."""
    failed = [trial for trial in result.trials if trial.status == "failed"]
    recovered = [trial for trial in result.trials if trial.failures and trial.status != "failed"]
    shown = failed or recovered
    rows = tuple(_cause(result, text, trials, "" if failed else "tried again") for text, trials in causes(shown))
    again = listed(trial.trial for trial in recovered)
    notes = [f"Failed and tried again: {counted(len(recovered), 'trial')} ({again})."] if recovered else []
    header: tuple[str, ...] = ("reason", "trial", "failures", "iterations", "message", "configuration")
    if len(rows) < len(shown):
        notes.append(
            "The first trial of each cause is named, with its configuration. Causes have … where numbers differ."
        )
        header = ("reason", "trials", *header[1:])
    else:
        rows = tuple((row[0], *row[2:]) for row in rows)
    return TextTable(
        title=f"Failures: {len(failed)} of {counted(len(result.trials), 'trial')} failed",
        header=header,
        rows=rows,
        words=frozenset({0, len(header) - 2, len(header) - 1}),
        notes=tuple(notes),
    )


def _cause(result: Result, text: str, trials: Sequence[int], reason: str) -> tuple[str, ...]:
    """Return the row of trials that failed alike; of their iterations the fewest and the most."""
    ours = [result.trials[trial] for trial in trials]
    kind = printable(ours[0].failure or "").partition(":")[0].replace("_", " ")
    iterations = sorted({trial.iterations for trial in ours})
    return (
        reason or kind,
        str(len(ours)),
        str(ours[0].trial),
        str(sum(trial.failures for trial in ours)),
        " to ".join(map(str, iterations[:: max(1, len(iterations) - 1)])),
        text.removeprefix(f"{kind}: ") if text != kind else "",
        config_line(ours[0].configuration),
    )


def incidents(result: Result) -> TextTable:
    """Return the instances that were refused, lost or interrupted."""
    struck = [i for i in result.instances if i.reason or i.interrupted_s is not None]
    decimals = usd_decimals(result.actual_cost_usd)
    rows = tuple(_incident(instance, decimals) for instance in struck)
    return TextTable(
        title=f"Instances refused or lost{', or taken away by the provider' if result.interruptions else ''}",
        header=("instance", "what", "at", "USD", "reason"),
        rows=rows,
        words=frozenset({0, 1, 4}),
        notes=(interruptions(result),) if result.interruptions else (),
    )


def interruptions(result: Result) -> str:
    """Return a sentence with the number of interruptions by the provider, and the lost iterations."""
    redone = counted(result.redone_iterations, "iteration")
    return f"Interrupted {counted(result.interruptions, 'time')}, {redone} done again; that is no failure of a trial."


def _incident(instance: InstanceResult, decimals: int) -> Row:
    refused = instance.running_s is None and bool(instance.reason)
    noted_s = instance.requested_s if refused else instance.ended_s
    reason = instance.reason
    if instance.preempted or instance.interrupted_s is not None:
        what = "PREEMPTED" if instance.preempted else "interrupted"
        noted_s = noted_s if instance.preempted else instance.interrupted_s
        reason = reason or "given back before it was taken away"
    else:
        what = "failed to start" if instance.failed_start else "refused" if refused else "lost"
    at_s = instance.requested_s if noted_s is None else noted_s
    return (instance.instance, what, duration(at_s), usd(instance.cost_usd, decimals), printable(reason))


def purchases(result: Result) -> TextTable:
    """Return the bought instances by market, type and zone; empty if all are of one type on demand."""
    kinds: dict[tuple[str, str, str], list[InstanceResult]] = {}
    for instance in result.instances:
        if instance.running_s is not None:
            kinds.setdefault((instance.market, instance.instance_type, instance.zone), []).append(instance)
    decimals = usd_decimals(result.actual_cost_usd)
    rows = []
    for (market, instance_type, zone), same in sorted(kinds.items()):
        cost = usd(sum(instance.cost_usd for instance in same), decimals)
        prices_usd = [instance.price_usd_per_hour for instance in same]
        prices = " - ".join(dict.fromkeys(usd(price_usd, 4) for price_usd in (min(prices_usd), max(prices_usd))))
        rows.append((str(len(same)), market.replace("_", " "), instance_type, zone or "-", prices, cost))
    is_shown = len(kinds) > 1 or any(market == "spot" or zone for market, _, zone in kinds)
    return TextTable(
        title="Instances bought",
        header=("instances", "market", "type", "zone", "rent (USD/h)", "USD"),
        rows=tuple(rows) if is_shown or result.instead_of_spot else (),
        words=frozenset({1, 2, 3}),
        notes=(f"{printable(result.instead_of_spot)}.",) if result.instead_of_spot else (),
    )


def trials(result: Result, most: int | None) -> TextTable:
    """Return the trials with their configurations, best first; those beyond `most` are counted."""
    order = ranked(result)
    shown = order[:most]
    left = len(order) - len(shown)
    metrics = [] if result.rehearsal else [result.metric, *(one.metric for one in result.also)]
    order_said = "" if result.rehearsal else ", best first"
    repeated = f", {result.repeats} repeats of each configuration" if result.repeats > 1 else ""
    return TextTable(
        title=f"Trials{order_said}: {f'{len(shown)} of ' if left else ''}{len(order):,}{repeated}",
        header=trial_header(result, metrics),
        rows=trial_rows(result, shown, metrics),
        words=frozenset({len(trial_header(result, metrics)) - 2, len(trial_header(result, metrics)) - 1}),
        notes=(f"{counted(left, 'more trial')} not shown; `rubberband export {result.name}` has all.",) if left else (),
    )


def trial_header(result: Result, metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the header of `trial_rows`."""
    mean = [] if result.repeats == 1 else ["mean \N{PLUS-MINUS SIGN} sd of repeats"]
    return ("trial", *map(printable, metrics), *mean, "iterations", "status", "configuration")


def trial_rows(result: Result, shown: Sequence[TrialResult], metrics: Sequence[str]) -> tuple[Row, ...]:
    """Return a row for each trial: its number, these metrics, iterations, status, and configuration.

    With repeats also the mean of its configuration's, and their standard deviation.
    """
    return tuple(
        (
            str(trial.trial),
            *(measured(trial, metric) for metric in metrics),
            *([] if result.repeats == 1 else ["-" if trial.standing is None else trial.standing.mean_text or "-"]),
            str(trial.iterations),
            trial.with_end(status(result, trial)),
            config_line(trial.configuration),
        )
        for trial in shown
    )


def not_shown(left: int) -> list[str]:
    """Return a note on the trials that a table leaves out."""
    return [f"{counted(left, 'more trial')} not shown."] if left else []


def batch_sizes(result: Result, most: int | None) -> TextTable:
    """Return the batch sizes of trials, best first; those beyond `most` are counted. Empty if the batch is fixed."""
    order = [trial for trial in ranked(result) if trial.batches]
    shown = order[:most]
    left = len(order) - len(shown)
    return TextTable(
        title="Batch sizes, best trial first",
        header=("trial", "GPUs", "batch size", "noise scale", "efficiency", "samples/s", "gain", "goodput"),
        rows=tuple(_row(trial) for trial in shown),
        notes=(
            "From the first stretch of training to the last. Efficiency: the part of all its samples that counted.",
            "Samples/s: at the last batch size. Gain: against at the first; goodput: likewise, of what samples count.",
            *not_shown(left),
        ),
    )


def _row(trial: TrialResult) -> Row:
    stretches = trial.batches
    first, last = stretches[0], stretches[-1]
    noise, speeds = noise_scales(stretches), first_and_last(stretches, "throughput")
    return (
        str(trial.trial),
        change(first.gpus, last.gpus),
        change(first.batch_size, last.batch_size),
        change(noise[0], noise[-1]) if noise else "-",
        f"{100 * mean_efficiency(stretches):.0f} %",
        amount(speeds[1]) if speeds else "-",
        gain(speeds),
        gain(first_and_last(stretches, "goodput")),
    )


def workers(result: Result, most: int | None) -> TextTable:
    """Return the latest shares and times of unequal workers, best trial first; trials beyond `most` are counted."""
    latest = [(trial.trial, trial.balance[-1]) for trial in ranked(result) if trial.balance]
    shown = latest[:most]
    left = len(latest) - len(shown)
    return TextTable(
        title="Unequal workers, best trial first",
        header=("trial", "stage", "samples per step", "own time", "step", "if equal", "saved"),
        rows=tuple(_workers_row(trial, last) for trial, last in shown),
        words=frozenset({2, 3}),
        notes=(
            "At the latest report, worker by worker. Own time: without the wait for others. If equal: the step with "
            "equal shares, by a model from measured times.",
            *(
                f"Trial {trial}: {text}."
                for trial, last in shown
                for text in slow_workers(last, last.workers, result.slot_name)
            ),
            *not_shown(left),
        ),
    )


def _workers_row(trial: int, last: BalanceStretch) -> Row:
    return (
        str(trial),
        str(last.stage),
        worker_values(last.shares),
        f"{worker_values(last.compute_s)} s",
        duration(last.step_s),
        duration(last.equal_step_s),
        f"{100 * last.saved:.0f} %",
    )


def pareto(result: Result, most: int | None) -> TextTable:
    """Return the trials that no other beats in all metrics; those beyond `most` are counted. Empty without `also`."""
    found = result.pareto
    shown, objectives = found[:most], (Objective(metric=result.metric, mode=result.mode), *result.also)
    metrics = [one.metric for one in objectives]
    left = len(found) - len(shown)
    repeated = "" if result.repeats == 1 else " With repeats: the means of a configuration, beside its best repeat."
    return TextTable(
        title=f"Best in {' and '.join(printable(one.title) for one in objectives)}: "
        f"{len(found)} of {counted(len(result.of_configurations), 'trial' if not repeated else 'configuration')}",
        header=(header := trial_header(result, metrics)),
        rows=trial_rows(result, [replace(one, metrics=result.means(one)) for one in shown], metrics),
        words=frozenset({len(header) - 2, len(header) - 1}),
        notes=(
            f"No other trial is better in one of them and as good in the rest (Pareto), at their latest reports. "
            f"{printable(result.metric)} alone ranks trials.{repeated}",
            *not_shown(left),
        ),
    )


_PLACES = (("compute", "compute_s"), ("up", "up_s"), ("waiting", "wait_s"), ("server", "server_s"), ("down", "down_s"))


def update_line(use: AsyncUse) -> str:
    """Return an iteration's updates in one line: their speed, staleness, and the shares of their time."""
    total_s = sum(getattr(use, field) for _, field in _PLACES)
    shares = ", ".join(f"{name} {100 * getattr(use, field) / total_s:.0f} %" for name, field in _PLACES)
    lost = f"; {counted(use.lost, 'gradient')} lost" if use.lost else ""
    return (
        f"{amount(use.updates_per_s)} updates/s of {counted(use.workers, 'worker')} and "
        f"{counted(use.servers, 'server')}; staleness {use.staleness:.1f} (at most {use.max_staleness}){lost}"
        f"{f'; {shares}' if total_s > 0.0 else ''}"
    )


def updates(result: Result, most: int | None) -> TextTable:
    """Return the updates of asynchronous trials, best trial first, for each number of workers; `most` trials."""
    trials = [trial for trial in ranked(result) if trial.updates]
    rows = [
        (str(trial.trial), str(workers), *_update_row([use for use in trial.updates if use.workers == workers]))
        for trial in trials[:most]
        for workers in sorted({use.workers for use in trial.updates})
    ]
    left = len(trials[most:]) if most is not None else 0
    return TextTable(
        title="Asynchronous updates, best trial first",
        header=("trial", "workers", "updates", "per s", "staleness", "most", "lost", *(name for name, _ in _PLACES)),
        rows=tuple(rows),
        notes=(
            "Times of one update, in milliseconds: to compute the gradient, to send it, to wait for other updates, to "
            "apply it, and to fetch the parameters. Staleness: updates by others in between.",
            *not_shown(left),
        ),
    )


def _update_row(uses: Sequence[AsyncUse]) -> tuple[str, ...]:
    count = sum(use.updates for use in uses)
    duration_s = sum(use.duration_s for use in uses)
    staleness = sum(use.updates * use.staleness for use in uses) / max(count, 1)
    means_s = [sum(use.updates * getattr(use, field) for use in uses) / max(count, 1) for _, field in _PLACES]
    return (
        f"{count:,}",
        amount(count / duration_s) if duration_s > 0.0 else "-",
        f"{staleness:.2f}",
        str(max(use.max_staleness for use in uses)),
        str(sum(use.lost for use in uses)),
        *(f"{1e3 * mean_s:.2f}" for mean_s in means_s),
    )
