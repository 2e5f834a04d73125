"""The closed formula of the model against an event-by-event simulation with single instances and single trials."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from rubberband.planner.exact.model import predict
from tests.builders.budget import examples
from tests.builders.strategies import carried_out


@dataclass
class Instance:
    billed_from_s: float
    free_gpus: int


class Simulation:
    """Carries a plan out: launches, gang-starts trials as GPUs get free, releases, and adds up the bill."""

    def __init__(self, stages, plan, profile, offer):
        self.stages, self.plan, self.profile, self.offer = stages, plan, profile, offer
        self.now_s, self.cost_usd = 0.0, 0.0
        self.held: list[Instance] = []

    def run(self):
        for stage, choice in zip(self.stages, self.plan.stages, strict=True):
            self.fit_cluster(choice.instances)
            self.train(stage, choice.gpus_per_trial)
        while self.held:
            self.release_oldest()
        self.cost_usd += self.offer.head_price_usd_per_hour * self.now_s / 3600
        return self.now_s, self.cost_usd

    def fit_cluster(self, instances):
        while len(self.held) > instances:
            self.release_oldest()
        missing = instances - len(self.held)
        if missing:
            self.now_s += self.offer.provision_delay_s
            self.held += [Instance(self.now_s, self.offer.gpus * self.offer.trials_per_gpu) for _ in range(missing)]
            self.cost_usd += missing * self.offer.data_usd_per_instance
            self.now_s += self.offer.init_delay_s

    def release_oldest(self):
        oldest = min(self.held, key=lambda instance: instance.billed_from_s)
        self.held.remove(oldest)
        if self.offer.billing == "per_instance":
            lived_s = max(self.now_s - oldest.billed_from_s, self.offer.minimum_billed_s)
            self.cost_usd += lived_s * self.offer.price_usd_per_hour / 3600

    def gang(self, gpus):
        """Instances and GPUs on each that a trial of `gpus` gets now, or None."""
        whole = max(1, gpus // self.offer.gpus)
        each = min(gpus, self.offer.gpus)
        room = [instance for instance in self.held if instance.free_gpus >= each]
        return (room[:whole], each) if len(room) >= whole else None

    def train(self, stage, gpus):
        waiting, order, running = stage.trials, itertools.count(), []
        while waiting or running:
            while waiting and (gang := self.gang(gpus)):
                for instance in gang[0]:
                    instance.free_gpus -= gang[1]
                took_s = self.profile.trial_startup_s + sum(
                    self.profile.iteration_s(gpus) for _ in range(stage.iterations)
                )
                heapq.heappush(running, (self.now_s + took_s, next(order), gang))
                waiting -= 1
                if self.offer.billing == "per_function":
                    self.cost_usd += (
                        took_s
                        * gpus
                        / (self.offer.gpus * self.offer.trials_per_gpu)
                        * self.offer.price_usd_per_hour
                        / 3600
                    )
            self.now_s, _, (instances, each) = heapq.heappop(running)
            for instance in instances:
                instance.free_gpus += each


def check_against_simulation(case):
    jct_s, cost_usd = Simulation(*case).run()
    predicted = predict(*case)
    assert predicted.jct_s == pytest.approx(jct_s, rel=1e-9, abs=1e-9)
    assert predicted.cost_usd == pytest.approx(cost_usd, rel=1e-9, abs=1e-9)


@settings(max_examples=examples(300), deadline=None)
@given(carried_out())
def test_predicts_what_a_simulation_of_every_instance_and_trial_takes_and_costs(case):
    check_against_simulation(case)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@given(carried_out())
def test_predicts_what_a_simulation_takes_and_costs_on_many_more_jobs(case):
    check_against_simulation(case)


@settings(max_examples=examples(100), deadline=None)
@given(carried_out())
def test_the_stages_add_up_and_never_cost_less_than_nothing(case):
    predicted = predict(*case)
    assert sum(stage.cost_usd for stage in predicted.stages) == pytest.approx(predicted.cost_usd)
    assert all(stage.cost_usd >= -1e-12 for stage in predicted.stages)
    now_s = 0.0
    for stage in predicted.stages:
        assert stage.start_s == pytest.approx(now_s)
        now_s += stage.provisioning_s + stage.duration_s
    assert now_s == pytest.approx(predicted.jct_s)
