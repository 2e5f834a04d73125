"""GPUs that are idle within a stage: given back, or joined to gangs that still train. Pure.

Once no trial of a stage waits, a slot that a trial leaves stays empty until the SYNC. Three courses are compared by the
profile's times, the instances' minimum and the next stage's plan:

* Instances without a trial are given back, but for those that the next stage has.
* Trials that would end last go on with more GPUs from their next checkpoints: only widths that were measured.
* The trials of an instance with few of them move to others from their next checkpoints, so that it can be given back.

The cheapest course is taken (the soonest one within max_cost, if time is the objective or the deadline is at risk), and
compared again at every report. The stage ends later only where a trial moves, by its start, and within the deadline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rubberband.executor.core.bill import price_usd_per_s
from rubberband.executor.core.fleet import InstanceRecord
from rubberband.executor.core.forecast import (
    end_chance,
    forecast,
    gang_factor,
    iterations_left,
    later_stages,
    own_speed,
    running_left_s,
    speed_of,
    stage_left,
)
from rubberband.executor.core.history import Regrouped
from rubberband.executor.core.state import LaneState, Phase
from rubberband.executor.core.trial_state import TrialState
from rubberband.planner.exact.model import least_instances
from rubberband.values.profile import until_end

SHORTEST_S = 0.001
"""A stage that is expected to end within this time ends now: instants are no more exact."""
LEAST_S = 1.0
"""Seconds by which wider gangs must let the stage end sooner."""
LEAST_SAVED = 0.05
"""Part of the stage's remaining time that wider gangs must save: forecasts are no more exact."""

RARELY_BACK = 0.15
"""Part of the cost of buying instances again that giving them back must save, where a replan may want them again."""
MOST_IN_VAIN = 0.1
"""Probability, at most, with which a trial ends by itself before a wider gang has repaid its start."""
SURELY_CHEAPER = 1.5
"""Cost of holding an instance for the next stage over that of buying it again, above which it is given back."""
SURELY_LATER = 3.0
"""Starts of an instance that the deadline must leave room for, where one is bought again."""


def is_asked(lane: LaneState) -> bool:
    """Whether idle GPUs of a lane's stage are looked at now: it trains, and no trial waits for them."""
    job = lane.job
    if not job.resize_in_stage or job.offer.billing == "per_function" or lane.phase is not Phase.TRAINING:
        return False
    return bool(lane.runners) and not lane.waiters


def holds_idle(lane: LaneState) -> bool:
    """Whether an instance of a lane's stage has no trial."""
    return is_asked(lane) and any(not lane.runners.uses(record.instance) for record in lane.held.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """Instances that are given back now."""

    records: Sequence[InstanceRecord]
    left_s: float
    """Seconds until the stage would have ended."""
    saved_usd: float
    """Their cost until then, less what the next stage pays to start others."""
    later_s: float = 0.0
    """Seconds by which the next stage starts later, as it buys instances again."""
    again_usd: float = 0.0
    """Cost of that."""


def unneeded(lane: LaneState) -> GiveBack | None:
    """Return the idle instances that neither the stage nor the next one needs; None if there are none.

    The next stage's are given back too, where it is cheaper to buy them again. An instance whose minimum is paid
    beyond the stage's end costs nothing, and stays.
    """
    if not holds_idle(lane) or lane.held.leaving:  # trials on an instance that is left move to idle ones
        return None
    rest = _Rest(lane)
    if rest.end_s < SHORTEST_S:
        return None
    used = rest.best().used
    idle = [record for record in lane.held.live if record.instance not in used]
    idle = [record for record in idle if record.running_at is None or rest.usd(record, rest.end_s) > 0.0]
    idle.sort(key=rest.prepaid_s)
    busy, needed = len(lane.held.live) - len(idle), lane.needed_instances
    kept = min(len(idle), max(0, max(rest.needed_next, needed) - busy))
    spare, later = idle[: len(idle) - kept], idle[len(idle) - kept :]
    if spare and lane.job.replan and rest.held_usd(spare) <= RARELY_BACK * rest.again_usd(len(spare)):
        spare = []  # a replan that wants them again would cost more than they
    again = rest.bought_again(later) if later and needed <= busy else None
    if again is not None:
        return again if not spare else replace(again, records=idle, saved_usd=again.saved_usd + rest.held_usd(spare))
    return GiveBack(records=spare, left_s=rest.end_s, saved_usd=rest.held_usd(spare)) if spare else None


def regrouped(lane: LaneState, trial: TrialState) -> Regrouped | None:
    """Return how a trial goes on that has just written a checkpoint, if it is to take another gang; else None."""
    if not is_asked(lane) or lane.free_slots.gpus == 0 or lane.held.leaving:
        return None
    rest = _Rest(lane, at=trial)
    best = rest.best()
    if trial.trial not in best.widths:
        return None
    return Regrouped(
        at_s=lane.state.elapsed_s(lane.state.now),
        trial=trial.trial,
        iterations=trial.iterations,
        gpus_before=len(trial.gang),
        gpus=best.widths[trial.trial],
        left_s=rest.end_s,
        saved_s=rest.end_s - best.end_s,
        extra_usd=best.cost_usd - rest.as_it_is.cost_usd,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A course of the rest of the stage, from now."""

    end_s: float
    """The SYNC, with the trials that are expected to end by themselves."""
    latest_s: float
    """The same if none does: limits are kept by this."""
    cost_usd: float
    """Added to the bill by the lane's instances and the head until the SYNC."""
    used: frozenset[str]
    """Instances with trials on them, now or by this course."""
    widths: Mapping[int, int] = field(default_factory=dict)
    """Trial -> GPUs with which it goes on elsewhere, from its next checkpoint."""


class _Rest:
    """The rest of a lane's stage as of now: what trains where, until when, and what other courses there are."""

    def __init__(self, lane: LaneState, at: TrialState | None = None) -> None:
        """`at` has just written a checkpoint."""
        self._lane, self._state, self._at = lane, lane.state, at
        self._chance = end_chance(self._state)
        self._records = {record.instance: record for record in lane.held.live}
        self._running = lane.running()
        self._latest_s = {trial.trial: self._left_s(trial) for trial in self._running}
        self._ends_s = {trial.trial: self._expected_s(trial) for trial in self._running}
        self.end_s, self.latest_s = max(self._ends_s.values()), max(self._latest_s.values())
        self.needed_next = _needed_next(lane)
        self.as_it_is = self._course(self._ends_s, self._places(), {})

    def best(self) -> Course:
        """Return the best course; `as_it_is` where no other is better."""
        lane = self._lane
        if self.end_s < LEAST_S or not lane.free_slots.gpus or lane.held.leaving or not self._state.profile.resumes:
            return self.as_it_is
        if any(speed_of(lane.job, record) != 1.0 for record in lane.held.ready):
            return self.as_it_is  # it is not known which ones another gang would be on
        others = [*self._widened(), *self._moved()]
        others = [course for course in others if course.widths]
        if not others:
            return self.as_it_is
        usual, rest_usd = self.as_it_is, self.as_it_is.cost_usd + 1e-9
        cheaper = [one for one in others if one.cost_usd <= rest_usd]
        found = min(cheaper, key=lambda one: (one.cost_usd, one.end_s), default=usual)
        if not self._is_pressed(found):
            return found
        room_usd = self._room_usd()
        sooner = [one for one in others if one.cost_usd - usual.cost_usd <= room_usd and self._saves(one.end_s)]
        otherwise = found if found.latest_s <= self.latest_s else usual
        return min(sooner, key=lambda one: (one.end_s, one.cost_usd), default=otherwise)

    def bought_again(self, records: Sequence[InstanceRecord]) -> GiveBack | None:
        """Return idle instances that the next stage has, if it is surely cheaper that it buys others; else None.

        Its other instances wait for them, unless it waits for more anyway. Not on spot or under an instance cap, where
        others may not be had; nor where time is the objective, or the deadline is near.
        """
        lane, state, job = self._lane, self._state, self._lane.job
        following = lane.stage.stage + 1
        choice = state.plan.stages[following]
        if job.objective != "min_cost" or job.is_divided or state.instance_cap is not None or choice.market == "spot":
            return None
        later_s = self._later_s()
        end_s = state.now - state.started_at + self.latest_s + later_stages(lane).jct_s
        if job.deadline_s is not None and end_s + SURELY_LATER * later_s > job.deadline_s:
            return None
        again_usd, saved_usd = self.again_usd(len(records)), self.held_usd(records)
        if saved_usd <= SURELY_CHEAPER * again_usd or any(record.running_at is None for record in records):
            return None
        return GiveBack(
            records=records, left_s=self.end_s, saved_usd=saved_usd - again_usd, later_s=later_s, again_usd=again_usd
        )

    def again_usd(self, count: int) -> float:
        """Return what it costs to buy instances again for the next stage: their start, and the others' wait for it.

        Nothing where there is no next stage.
        """
        lane, state, offer = self._lane, self._state, self._lane.job.offer
        following = lane.stage.stage + 1
        if following >= lane.end_stage:
            return 0.0
        later_s, instances = self._later_s(), state.plan.stages[following].instances
        billed_s = max(offer.init_delay_s, offer.minimum_billed_s - state.predicted[following].duration_s)
        new_usd = offer.once_usd_per_instance + offer.price_usd_per_s * billed_s
        wait_usd = max(0, instances - count) * offer.price_usd_per_s * later_s
        return count * new_usd + wait_usd + offer.head_cost_usd(later_s)

    def _later_s(self) -> float:
        """Return the wait for an instance that the next stage buys again; 0 where it waits for others anyway."""
        offer, following = self._lane.job.offer, self._lane.stage.stage + 1
        waits = self._state.plan.stages[following].instances > len(self._lane.held.live)
        return 0.0 if waits else offer.provision_delay_s + offer.init_delay_s

    def held_usd(self, records: Iterable[InstanceRecord]) -> float:
        """Return what instances cost if they are held until the stage ends."""
        return math.fsum(self.usd(record, self.end_s) for record in records)

    def usd(self, record: InstanceRecord, until_s: float) -> float:
        """Return what an instance adds to the bill until then."""
        return price_usd_per_s(record, self._lane.job.offer) * max(0.0, until_s - self.prepaid_s(record))

    def prepaid_s(self, record: InstanceRecord) -> float:
        """Return the seconds for which an instance is paid already, by its minimum."""
        if record.running_at is None:
            return 0.0
        return max(0.0, record.running_at + self._lane.job.offer.minimum_billed_s - self._state.now)

    # What there is

    def _left_s(self, trial: TrialState) -> float:
        """Return the seconds until a running trial has trained the stage to its end."""
        starts = self._state.allocation(trial).training_at is None
        return running_left_s(self._lane, trial, self._state.now, starts=starts)

    def _expected_s(self, trial: TrialState) -> float:
        """Return the same, if it may end by itself before."""
        left = iterations_left(self._lane, trial)
        return self._latest_s[trial.trial] * (until_end(left, self._chance) / left if left > 0 else 1.0)

    def _places(self) -> dict[int, frozenset[str]]:
        return {trial.trial: frozenset(slot.instance for slot in trial.gang) for trial in self._running}

    def _course(
        self, ends_s: Mapping[int, float], places: Mapping[int, frozenset[str]], widths: Mapping[int, int]
    ) -> Course:
        """Return the course in which trials end there and then, and instances go once they have none."""
        lane, end_s = self._lane, max(ends_s.values())
        until_s = dict.fromkeys(self._records, 0.0)
        for trial in self._running:
            number = trial.trial
            for instance in places[number]:
                if instance in until_s:
                    until_s[instance] = max(until_s[instance], ends_s[number])
            if number in widths:
                wait_s = self._wait(trial)[1]
                for slot in trial.gang:
                    if slot.instance in until_s:
                        until_s[slot.instance] = max(until_s[slot.instance], wait_s)
        used = frozenset(instance for instance, at_s in until_s.items() if at_s > 0.0)
        for instance in sorted(until_s, key=lambda name: -until_s[name])[: self.needed_next]:
            until_s[instance] = end_s
        rent_usd = math.fsum(self.usd(self._records[instance], at_s) for instance, at_s in until_s.items())
        head_usd = lane.job.offer.head_cost_usd(end_s)
        on_it = frozenset(slot.instance for trial in self._running for slot in trial.gang)
        latest_s = max(self._latest_elsewhere_s(trial, widths) for trial in self._running)
        return Course(
            end_s=end_s, latest_s=latest_s, cost_usd=rent_usd + head_usd, used=used | on_it, widths=dict(widths)
        )

    def _latest_elsewhere_s(self, trial: TrialState, widths: Mapping[int, int]) -> float:
        size = widths.get(trial.trial)
        return self._latest_s[trial.trial] if size is None else self._elsewhere_s(trial, size, 0.0)

    # Other courses

    def _widened(self) -> Iterator[Course]:
        """The courses in which the trials that would end last go on with more GPUs: one for each width."""
        profile, job = self._state.profile, self._lane.job
        if job.keeps_width or job.offer.trials_per_gpu > 1:
            return
        for size in job.gang_sizes(job.largest_gang):
            if size in profile.seconds_per_iteration and profile.covers(size):
                course = self._widened_to(size)
                if self._saves(course.end_s):
                    yield course

    def _widened_to(self, size: int) -> Course:
        ends_s, places, widths = dict(self._ends_s), self._places(), dict[int, int]()
        free = self._free()
        by_number = {trial.trial: trial for trial in self._running}
        training = set(by_number)
        while True:
            last = by_number[max(ends_s, key=lambda number: (ends_s[number], -number))]
            if last.trial in widths or len(last.gang) >= size:
                break
            wait_s = self._wait(last)[1]
            for number in [one for one in training if ends_s[one] <= wait_s]:  # it leaves its GPUs by then
                training.remove(number)
                _give_back(free, by_number[number])
            end_s = self._elsewhere_s(last, size)
            taken = _room(free, last, size, self._lane.job.offer.slots)
            if taken is None or end_s > ends_s[last.trial] - self._state.profile.startup_s(size):
                break  # no room, or its start would not be repaid twice
            if self._in_vain(last, size) > MOST_IN_VAIN:
                break
            _take(free, last, size, taken)
            ends_s[last.trial], places[last.trial], widths[last.trial] = end_s, frozenset(taken), size
            training.discard(last.trial)
        return self._course(ends_s, places, widths)

    def _in_vain(self, trial: TrialState, size: int) -> float:
        """Return the probability with which a trial ends by itself before a wider gang has repaid its start."""
        profile = self._state.profile
        gained_s = profile.iteration_s(len(trial.gang)) - profile.iteration_s(size)
        gained_s *= own_speed(self._lane, trial).factor
        return 1.0 - (1.0 - self._chance) ** math.ceil(profile.startup_s(size) / gained_s) if gained_s > 0.0 else 1.0

    def _moved(self) -> Iterator[Course]:
        """The course in which the trials of the instance with the fewest of them move to others, if that saves money.

        Gangs that span instances stay, and so does what the next stage has.
        """
        on = Counter(instance for places in self._places().values() for instance in places)
        if len(on) <= max(1, self.needed_next):
            return
        gpus = Counter(slot.instance for trial in self._running for slot in trial.gang)
        source = min(on, key=lambda name: (gpus[name], -self.prepaid_or_none(name), name))
        struck = [trial for trial in self._running if any(slot.instance == source for slot in trial.gang)]
        free = {name: left for name, left in self._free().items() if name != source and on[name]}
        ends_s, places, widths = dict(self._ends_s), self._places(), dict[int, int]()
        for trial in struck:
            size = len(trial.gang)
            fitting = [name for name, left in free.items() if left >= size]
            if len(places[trial.trial]) > 1 or not fitting or gpus[source] > gpus[_fullest(free, fitting)]:
                return
            chosen = _fullest(free, fitting)
            free[chosen] -= size
            gpus[chosen] += size
            ends_s[trial.trial], places[trial.trial] = self._elsewhere_s(trial, size), frozenset([chosen])
            widths[trial.trial] = size
        course = self._course(ends_s, places, widths)
        saved_usd = self.as_it_is.cost_usd - course.cost_usd
        if course.end_s <= (1.0 + LEAST_SAVED) * self.end_s and saved_usd > LEAST_SAVED * self.as_it_is.cost_usd:
            yield course

    def prepaid_or_none(self, name: str) -> float:
        """Return the paid seconds of an instance, 0 of one that is taken away soon."""
        return self.prepaid_s(self._records[name]) if name in self._records else 0.0

    def _free(self) -> dict[str, int]:
        """Return the free slots of each ready instance."""
        taken = Counter(slot.instance for trial in self._running for slot in trial.gang)
        return {one.instance: self._lane.job.offer.slots - taken[one.instance] for one in self._lane.held.ready}

    def _elsewhere_s(self, trial: TrialState, size: int, end_chance: float | None = None) -> float:
        """Return the seconds until a trial ends that goes on with another gang from its next checkpoint.

        Infinite if it writes none before its end. `end_chance`: that it ends by itself, if not the one of the run.
        """
        lane, state = self._lane, self._state
        iterations, wait_s = self._wait(trial)
        left = iterations_left(lane, trial) - iterations
        if left <= 0:
            return math.inf
        again = state.repeats(trial) if trial is self._at else 0
        iteration_s = state.profile.iteration_s(size) * own_speed(lane, trial).factor
        left_s = (until_end(left, self._chance if end_chance is None else end_chance) + again) * iteration_s
        return wait_s + state.profile.startup_s(size) + left_s

    def _wait(self, trial: TrialState) -> tuple[int, float]:
        """Return the iterations and the seconds until a trial's next checkpoint, by the distance of the latest two."""
        if trial is self._at:
            return 0, 0.0
        lane, state = self._lane, self._state
        every = max(1, trial.checkpoint_iterations - trial.before_iterations) if trial.before is not None else 1
        iterations = max(1, trial.checkpoint_iterations + every - trial.iterations)
        iteration_s = state.profile.iteration_s(len(trial.gang)) * own_speed(lane, trial).factor
        iteration_s *= gang_factor(state.profile, state, trial.gang)
        starts_s = state.profile.startup_s(len(trial.gang)) if state.allocation(trial).training_at is None else 0.0
        return iterations, max(0.0, starts_s + iterations * iteration_s - (state.now - trial.progress_at))

    # Courses

    def _saves(self, end_s: float) -> bool:
        return self.end_s - end_s >= max(LEAST_S, LEAST_SAVED * self.end_s)

    def _is_pressed(self, found: Course) -> bool:
        """Whether time decides: it is the objective, and all wait for this lane; or the deadline would be missed."""
        job, state = self._lane.job, self._state
        elapsed_s = state.now - state.started_at
        ends_s = {
            other.lane: elapsed_s + stage_left(other, state.now).jct_s + later_stages(other).jct_s
            for other in state.active()
        }
        if job.objective == "min_time":
            return ends_s[self._lane.lane] >= max(ends_s.values())
        later_s = later_stages(self._lane).jct_s
        return job.deadline_s is not None and elapsed_s + found.latest_s + later_s > job.deadline_s

    def _room_usd(self) -> float:
        """Return how much more than `as_it_is` a course may cost within max_cost."""
        job, state = self._lane.job, self._state
        if job.max_cost_usd is None:
            return math.inf
        held_usd = self.held_usd(self._records.values()) + job.offer.head_cost_usd(self.end_s)
        expected_usd = forecast(state, state.now).cost_usd - held_usd + self.as_it_is.cost_usd
        return job.max_cost_usd - job.reserve.release_usd(job.offer, self._lane.chosen) - expected_usd


def _room(free: Mapping[str, int], trial: TrialState, size: int, width: int) -> tuple[str, ...] | None:
    """Return the instances on which a trial finds `size` free GPUs, its own given back; None if there is no room.

    They are those on which `FreeSlots` places it.
    """
    own = Counter(slot.instance for slot in trial.gang)
    left = {name: count + own[name] for name, count in free.items()}
    if size <= width:
        fitting = [name for name, count in left.items() if count >= size]
        return (_fullest(left, fitting),) if fitting else None
    whole = sorted(name for name, count in left.items() if count == width)
    return tuple(whole[: size // width]) if len(whole) >= size // width and size % width == 0 else None


def _fullest(free: Mapping[str, int], names: Sequence[str]) -> str:
    return min(names, key=lambda name: (free[name], name))


def _give_back(free: dict[str, int], trial: TrialState) -> None:
    for slot in trial.gang:
        if slot.instance in free:
            free[slot.instance] += 1


def _take(free: dict[str, int], trial: TrialState, size: int, places: Sequence[str]) -> None:
    _give_back(free, trial)
    for name in places:
        free[name] -= size // len(places)


def needed_at_start(lane: LaneState) -> int:
    """Return the instances of a stage that begins with fewer trials than planned: also those that the next one has."""
    needed = lane.needed_instances
    return max(needed, min(len(lane.held.live), _needed_next(lane))) if lane.job.resize_in_stage else needed


def _needed_next(lane: LaneState) -> int:
    """Return how many of a lane's instances its later stages have, as planned, for the trials that are left."""
    following, end, plan = lane.stage.stage + 1, lane.end_stage, lane.state.plan.stages
    if following >= end or plan[following].market != lane.chosen.market:
        return 0
    needed = min(plan[following].instances, max(_needed(lane, stage) for stage in range(following, end)))
    return max(needed, _may_want(lane, following))


def _may_want(lane: LaneState, stage: int) -> int:
    """Return the held instances that the replan before the next stage may want, if the shortest time is asked for."""
    job = lane.job
    if not job.replan or job.objective != "min_time":
        return 0
    trials, size = job.stages[stage].trials, min(job.largest_gang, lane.state.profile.largest_gpus)
    if stage < lane.bracket.end_stage:
        trials = min(trials, lane.trials_left)
    widest = max((one for one in job.gang_sizes(size)), default=1)
    return min(len(lane.held.live), least_instances(trials, job.offer.slots, widest))


def _needed(lane: LaneState, stage: int) -> int:
    """Return the instances of a later stage: fewer than planned where fewer trials are left.

    In a population a trial that has ended is replaced, and goes on.
    """
    job, choice, left = lane.job, lane.state.plan.stages[stage], lane.trials_left
    goes_on = any(one.exchange is not None for one in job.stages)
    if goes_on or stage >= lane.bracket.end_stage or left >= job.stages[stage].trials:
        return choice.instances
    return min(choice.instances, least_instances(left, job.offer.slots, choice.gpus_per_trial))
