"""The story of a run: its stages, and what happened beside their course, in sentences. Pure.

The live view, the report and the page of an experiment have them from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rubberband.executor.core.history import (
    DecisionResult,
    Fork,
    GivenBack,
    HungInstance,
    InstanceCapChanged,
    LimitsExtended,
    Pause,
    Regrouped,
    Replacement,
    SearchEnd,
    Setback,
    TrialCut,
    TrialsJoined,
)
from rubberband.executor.result.parts import StageResult
from rubberband.executor.result.result import Result
from rubberband.units import counted, duration, gpus_each
from rubberband.views.formatting import listed, printable, setting, usd


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryLine:
    """Entry of a story, in seconds from the start."""

    at_s: float
    what: str
    text: str
    kind: str
    """`sync`, `kept`, `changed`, `extended`, `resumed`, `setback`, `forked`, `added`, `pause`, `replaced`, `idle`,
    `stopped`, `worth`."""


StoryRecord = (
    Setback
    | Fork
    | Pause
    | LimitsExtended
    | Replacement
    | HungInstance
    | TrialCut
    | GivenBack
    | Regrouped
    | TrialsJoined
)


def sentence(one: StoryRecord) -> str:
    """Return a record in words."""
    match one:
        case Setback():
            to = f"to iteration {one.to_iterations}" if one.to_iterations else "to its beginning"
            return f"trial {one.trial} went back from iteration {one.from_iterations} {to}: {printable(one.reason)}"
        case Fork():
            return forked(one)
        case Pause():
            return f"the driver stood still for {duration(one.paused_s)}, paused or with its machine asleep"
        case LimitsExtended():
            return _extended(one)
        case TrialCut():
            after = counted(one.iterations, "iteration")
            return f"trial {one.trial} ended by {one.rule} after {after}: {printable(one.reason)}"
        case TrialsJoined():
            return added(one)
        case HungInstance():
            return (
                f"{one.instance} is replaced {_when(one)}: trial {one.trial} hung, and no other trial there has "
                "reported since"
            )
        case GivenBack():
            back = f"{listed(one.instances)} given back: no trial of the stage waits, and it takes another "
            return f"{back}{duration(one.left_s)}; this is expected to save {usd(one.saved_usd)} USD"
        case Regrouped():
            return _regrouped(one)
        case Replacement():
            cost = "costs" if one.extra_usd > 0.0 else "saves"
            return (
                f"{one.instance} holds up trial {one.trial} and is replaced {_when(one)}; this is expected to save "
                f"{duration(one.saved_s)} of {duration(one.left_s)}, and {cost} {usd(abs(one.extra_usd))} USD"
            )


def forked(one: Fork) -> str:
    """Return `trial 3 continues from trial 0 after 10 iterations, lr 0.1 -> 0.12 (7th of 8)`."""
    changed, after = changes_line(one.changes), counted(one.iterations, "iteration")
    changed = f", {changed}" if changed else ""
    return f"trial {one.trial} continues from trial {one.parent} after {after}{changed} ({printable(one.reason)})"


def changes_line(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return `lr 0.1 -> 0.12, momentum 0.9 -> 0.8`; a dash where a side lacks the parameter."""
    sides = {name: ["-" if value is None else setting(value) for value in pair] for name, pair in changes.items()}
    return ", ".join(f"{printable(name)} {was} -> {now}" for name, (was, now) in sides.items())


def _regrouped(one: Regrouped) -> str:
    cost = f"{'cost' if one.extra_usd > 0.0 else 'save'} {usd(abs(one.extra_usd))} USD"
    if one.gpus == one.gpus_before:
        moved = f"trial {one.trial} moves after iteration {one.iterations}, so that its instance can be given back"
        late = f", and to end the stage {duration(-one.saved_s)} later" if one.saved_s < 0.0 else ""
        return f"{moved}; this is expected to {cost}{late}"
    wider = f"trial {one.trial} takes a gang of {one.gpus} instead of {one.gpus_before} after iteration"
    return f"{wider} {one.iterations}; the stage is expected to end {duration(one.saved_s)} sooner, and that to {cost}"


def added(one: TrialsJoined) -> str:
    """Return `trials 27 to 42 added, drawn by the random sampler`, or `trial 9 added: trial 3 with lr 0.1 -> 0.01`."""
    if not one.trials:
        return f"no trial added: {printable(one.reason)}"
    first, last = one.trials[0], one.trials[-1]
    which = f"trial {first} added" if first == last else f"trials {first} to {last} added"
    if one.clone_of is not None:
        changed = ", ".join(f"{name} {setting(was)} -> {setting(now)}" for name, (was, now) in one.changes.items())
        onwards = f", from its {counted(one.from_iterations, 'iteration')}" if one.from_iterations else ""
        return f"{which}: trial {one.clone_of} with {printable(changed) or 'no change'}{onwards}"
    return f"{which}, drawn {printable(one.reason)}" if one.reason else which


def _when(one: Replacement | HungInstance) -> str:
    return "once another one is ready" if one.first else "at once, and its trials wait for another one"


def _extended(granted: LimitsExtended) -> str:
    """Return raised limits, such as `deadline 1h instead of 40m, max_cost 5.00 USD instead of 3.00 USD`."""
    parts = []
    before_s, deadline_s = granted.deadline_before_s, granted.deadline_s
    if before_s is not None and before_s != deadline_s:
        deadline = "no deadline" if deadline_s is None else f"deadline {granted.deadline}"
        parts.append(f"{deadline} instead of {granted.deadline_before}")
    before_usd, max_cost_usd = granted.max_cost_before_usd, granted.max_cost_usd
    if before_usd is not None and before_usd != max_cost_usd:
        max_cost = "no max_cost" if max_cost_usd is None else f"max_cost {usd(max_cost_usd)} USD"
        parts.append(f"{max_cost} instead of {usd(before_usd)} USD")
    if granted.target is not None and granted.target != granted.target_before:
        before = "" if granted.target_before is None else f" instead of {granted.target_before:g}"
        parts.append(f"target {granted.target:g}{before}")
    return ", ".join(parts)


def not_needed(end: SearchEnd, jct_s: float, cost_usd: float) -> str:
    """Return the time and the cost that a rule's end saved of what was expected."""
    saved_s, saved_usd = max(0.0, end.expected_jct_s - jct_s), max(0.0, end.expected_cost_usd - cost_usd)
    whole = f"of the {duration(end.expected_jct_s)} and {usd(end.expected_cost_usd)} USD that were expected"
    return f"not needed: {duration(saved_s)} and {usd(saved_usd)} USD {whole}"


def instance_cap_changed(change: InstanceCapChanged, deadline_s: float | None, *, is_begun: bool) -> str:
    """Return another instance cap and its effect, such as `at most 2 instances instead of 4: would end after 12m`."""
    text = f"at most {counted(change.max_instances, 'instance')} instead of {change.max_instances_before}"
    if change.max_instances == 0:
        return f"{text}: trials {'stop at their next checkpoints, and ' if is_begun else ''}wait for a larger cap"
    if (
        not is_begun
        or change.max_instances_before == 0
        or (change.jct_s, change.cost_usd) == (change.jct_before_s, change.cost_before_usd)
    ):
        return text
    effect = f"as planned, it would end after {duration(change.jct_s)} instead of {duration(change.jct_before_s)}"
    effect += f" and cost {usd(change.cost_usd)} USD instead of {usd(change.cost_before_usd)}"
    late_s = 0.0 if deadline_s is None else change.jct_s - deadline_s
    return f"{text}: {effect}" + (f", {duration(late_s)} after the deadline" if late_s > 0.0 else "")


def story(result: Result) -> list[StoryLine]:
    """Return ends of stages and of the search, replans, extensions, resumes, setbacks, forks, pauses and others."""
    restarted = "its process restarted from its journal"
    found = [*_syncs(result)]
    found += [StoryLine(at_s=at_s, what="resumed", text=restarted, kind="resumed") for at_s in result.resumed_s]
    found += [
        StoryLine(
            at_s=trial.stopped_s,
            what="trial stopped",
            text=f"trial {trial.trial} stopped by the user after {counted(trial.iterations, 'iteration')}",
            kind="stopped",
        )
        for trial in result.trials
        if trial.stopped_s is not None
    ]
    found += [_decided(result, decisions[-1], len(decisions)) for decisions in in_a_row(result.decisions)]
    looks = {decision.at_s for decision in result.decisions}
    for worth in result.worths:
        if worth.at_s in looks or (worth is result.worths[-1] and result.outcome == "unfinished"):
            text = worth.in_words(printable(result.metric))
            found.append(StoryLine(at_s=worth.at_s, what="worth of the rest", text=text, kind="worth"))
    if (end := result.ended_by) is not None:
        text = f"{printable(end.reason)}; {not_needed(end, result.actual_jct_s, result.actual_cost_usd)}"
        found.append(StoryLine(at_s=end.at_s, what="end of the search", text=text, kind="stopped"))
    cloned = {trial for one in result.added for trial in one.trials if one.from_iterations}
    for what, kind, records in (
        ("extended", "extended", result.extensions),
        ("checkpoint lost", "setback", result.setbacks),
        ("trial forked", "forked", [one for one in result.forks if one.trial not in cloned]),
        ("trials added", "added", result.added),
        ("driver paused", "pause", result.pauses),
        ("slow instance replaced", "replaced", result.replacements),
        ("instances given back", "idle", result.given_back),
        ("other gang", "idle", result.regrouped),
    ):
        found += [StoryLine(at_s=one.at_s, what=what, text=sentence(one) or "unchanged", kind=kind) for one in records]
    return sorted(found, key=lambda entry: entry.at_s)


def _syncs(result: Result) -> Iterator[StoryLine]:
    for stage, _, at_s in stage_spans(result):
        if not stage.promoted:
            continue
        last = is_last_of_bracket(result.stages, stage)
        went = "finished" if last else "promoted"
        text = f"{len(stage.promoted)} of {counted(stage.trials, 'trial')} {went}: {listed(stage.promoted)}"
        what = "end of the search" if result.rungs else f"SYNC of {stage.title}"
        yield StoryLine(at_s=at_s, what=what, text=text, kind="sync")


def in_a_row(decisions: Sequence[DecisionResult]) -> list[list[DecisionResult]]:
    """Return the decisions in order: each that changed the plan alone, and together those in a row that did not."""
    found: list[list[DecisionResult]] = []
    for decision in decisions:
        if found and not decision.changed and not found[-1][-1].changed:
            found[-1].append(decision)
        else:
            found.append([decision])
    return found


def _decided(result: Result, decision: DecisionResult, times: int = 1) -> StoryLine:
    """Return the line of a decision; `times`: how many in a row changed nothing, of which it is the latest."""
    expected = f"{duration(decision.jct_s)} and {usd(decision.cost_usd)} USD expected"
    if decision.changed:
        expected += f", before {duration(decision.present_jct_s)} and {usd(decision.present_cost_usd)} USD"
    kind = "changed" if decision.changed else "kept"
    what = f"plan {'changed' if decision.changed else 'unchanged'} from {result.stages[decision.stage].title} on"
    what = f"plan unchanged {times} times in a row" if times > 1 else what
    return StoryLine(at_s=decision.at_s, what=what, text=f"{printable(decision.reason)} ({expected})", kind=kind)


def stage_of(view: Mapping[str, Any]) -> StageResult:
    """Return a stage of the answer of `GET /v1/experiments/NAME`, which may have more than this version knows."""
    return StageResult(**{name: view[name] for name in StageResult.__dataclass_fields__ if name in view})


def cells(stage: StageResult, decimals: int) -> tuple[str, ...]:
    """Return a stage's row: name, trials, iterations, instances held and planned, GPUs per trial, and time and cost,
    planned and actual. The actual ones are empty before the stage has begun.
    """
    begun = stage.actual_s is not None
    return (
        stage.name,
        str(stage.trials),
        str(stage.iterations),
        f"{stage.instances if begun else '-'} / {stage.planned_instances}",
        gpus_each(stage.gpus_per_trial, stage.trials_per_gpu),
        duration(stage.planned_s),
        duration(stage.actual_s or 0.0) if begun else "",
        usd(stage.planned_cost_usd, decimals),
        usd(stage.actual_cost_usd or 0.0, decimals) if begun else "",
    )


def stage_spans(result: Result) -> Iterator[tuple[StageResult, float, float]]:
    """Iterate over the stages that have begun, with start and end (or now) in seconds from the start of the run.

    Between two of them is the time from a SYNC until a driver continued.
    """
    at_s = 0.0
    for stage in result.stages:
        if stage.actual_s is None:
            continue
        start_s = at_s if stage.start_s is None else stage.start_s
        at_s = start_s + stage.actual_s
        yield stage, start_s, at_s


def planned_spans(stages: Sequence[StageResult]) -> list[tuple[StageResult, float, float]]:
    """Return the stages with start and end by the first plan, in seconds from the start: those of a lane in a row."""
    ends_s, found = dict[int, float](), list[tuple[StageResult, float, float]]()
    for stage in stages:
        start_s = ends_s.get(stage.lane, 0.0)
        ends_s[stage.lane] = start_s + stage.planned_s
        found.append((stage, start_s, ends_s[stage.lane]))
    return found


def is_last_of_bracket(stages: Sequence[StageResult], stage: StageResult) -> bool:
    """Whether no stage of its bracket follows."""
    return stage.stage + 1 == len(stages) or stages[stage.stage + 1].bracket != stage.bracket
