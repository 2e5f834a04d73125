"""Populations whose numbers are chosen by a model of what they gain (PB2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from statistics import fmean
from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.executor import Controller, Fork, VirtualBackend, sampling
from rubberband.executor.exploring import Step, guided, steps
from rubberband.spec.experiment import Experiment
from rubberband.spec.population import Pbt
from tests.builders.memory import MemoryJournal
from tests.builders.populations import ByTrial, explorer, forks, job_of, population
from tests.builders.virtual_runs import run_until_killed

LR: Mapping[str, Any] = {"type": "loguniform", "lower": 1e-4, "upper": 1e-1}


def searching(space: Mapping[str, Any], *, seed: int = 0, mode: str = "max", **scheduler: Any) -> Experiment:
    words = population(seed=seed).to_words()
    words["search"] |= {"space": dict(space), "mode": mode}
    words["search"]["scheduler"] |= {"generations": 10, "explore": "gp", **scheduler}
    return Experiment(**words)


def gain(number: int, lr: float, score: float) -> float:
    """What an iteration adds: most where each rate is what suits the present score, which falls as it grows."""
    suits = 0.05 / (1.0 + score) / (number + 1)
    return max(0.0, 1.0 - abs(math.log(lr / suits)) / 2.5)


def ran(experiment: Experiment) -> tuple[Controller, MemoryJournal]:
    """A run of trials that gain by the configuration that they have, from the score that they go on with."""
    job, journal = job_of(experiment), MemoryJournal()
    controller = Controller(job)
    began = {"configurations": experiment.configurations()}
    sign = -1.0 if experiment.search.mode == "min" else 1.0

    def score(trial: int, done: int) -> float:
        reports = controller.state.trials[trial].reports
        before = sign * reports[done - 2].metrics["score"] if done > 1 else 0.0
        rates = sampling.configurations(controller.state, began)[trial].values()
        noise = Random(f"{experiment.search.sampler.seed}/{trial}/{done}").gauss(0.0, 0.01)
        return sign * (before + math.prod(gain(at, lr, before) for at, lr in enumerate(rates)) + noise)

    backend = ByTrial(job.name, job.offer, job.profile, metric="score", metric_of=score)
    run_until_killed(controller, backend, journal, 10_000, explore=explorer(experiment, controller))
    assert controller.state.outcome == "done"
    return controller, journal


def best(experiment: Experiment) -> float:
    sign = -1.0 if experiment.search.mode == "min" else 1.0
    return max(sign * trial.metrics["score"] for trial in ran(experiment)[0].state.trials)


@pytest.mark.long
@pytest.mark.parametrize("rates", [1, 2, 3])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_it_finds_a_better_schedule_than_chance_in_most_of_20_seeds(rates: int, mode: str) -> None:
    space = {f"lr{at}": LR for at in range(rates)}
    by_model, by_chance = (
        [best(searching(space, seed=seed, mode=mode, explore=explore)) for seed in range(100, 120)]
        for explore in ("gp", "perturb")
    )
    assert sum(one > other for one, other in zip(by_model, by_chance, strict=True)) >= 13
    assert fmean(by_model) > 1.05 * fmean(by_chance)


@pytest.mark.parametrize(("mode", "sign"), [("max", 1.0), ("min", -1.0)])
def test_it_learns_from_what_each_generation_has_gained(mode: str, sign: float) -> None:
    experiment = searching({"lr": LR}, mode=mode, generations=4, population=4)
    controller, journal = ran(experiment)
    state, first = controller.state, dict(enumerate(experiment.configurations()))
    found = steps(experiment.search, state.lanes[0], first)
    assert [step.stage for step in found] == [stage for stage in range(4) for _ in range(4)]
    events = forks(journal)
    assert len(events) == 3
    for stage in (1, 2, 3):
        event = events[stage - 1]
        parent, trial = (state.trials[one] for one in (event.parent, event.trial))
        ended = next(report for report in parent.made if report.iterations == 2 * stage).metrics["score"] * sign
        own = [sign * report.metrics["score"] for report in trial.made if report.stage == stage]
        step = found[4 * stage + event.trial]
        assert step == Step(
            stage=stage, before=ended, gain=(own[-1] - ended) / len(own), configuration=event.configuration
        )
    began = state.trials[0].made[:2]
    assert found[0].gain == pytest.approx(sign * (began[1].metrics["score"] - began[0].metrics["score"]))
    assert all(fork.reason.endswith("; numbers by gp") for fork in state.history.of(Fork))


def test_too_little_is_perturbed_and_one_trial_that_diverges_hides_nothing() -> None:
    experiment = searching({"lr": LR}, generations=2, iterations=1)
    (first, *_) = forks(ran(experiment)[1])
    assert "gp" not in first.reason  # no generation has a begin yet
    assert first.changes["lr"][1] in (
        pytest.approx(0.8 * first.changes["lr"][0]),
        pytest.approx(1.2 * first.changes["lr"][0]),
        first.configuration["lr"],
    )
    experiment = searching({"lr": LR})
    controller, _ = ran(experiment)
    lane, search = controller.state.lanes[0], experiment.search
    assert isinstance(search.scheduler, Pbt)
    began, parent = dict(enumerate(experiment.configurations())), controller.state.trials[lane.stage.ranking[0]]
    axes = search.scheduler.modelled(search.space)

    def chosen() -> float:
        return float(guided(search, axes, lane, began, {}, parent, 7)["lr"])

    score = parent.metrics["score"]
    assert (before := gain(0, chosen(), score)) > 0.5
    last = controller.state.trials[lane.stage.ranking[-1]].reports
    object.__setattr__(last[-1], "metrics", {"score": -1e9})
    assert gain(0, chosen(), score) > 0.4 * before


def test_choices_and_parameters_without_bounds_change_as_without_it() -> None:
    space = {
        "lr": LR,
        "layers": {"type": "randint", "lower": 1, "upper": 5},
        "kind": {"type": "choice", "values": ["a", "b", "c"]},
        "shift": {"type": "randn"},
    }
    journal, experiment = MemoryJournal(), searching(space, resample=0.0)
    job = job_of(experiment)
    controller = Controller(job)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric="score")
    run_until_killed(controller, backend, journal, 10_000, explore=explorer(experiment, controller))
    for event in forks(journal):
        assert 1e-4 <= event.configuration["lr"] <= 1e-1
        assert event.configuration["layers"] in (1, 2, 3, 4)
        moved = event.changes["shift"]
        assert moved[1] == pytest.approx(moved[0] * 0.8) or moved[1] == pytest.approx(moved[0] * 1.2)
    kept = searching(space, mutate=["kind", "lr"], resample=0.0)
    assert isinstance(kept.search.scheduler, Pbt)
    assert [name for name, _ in kept.search.scheduler.modelled(kept.search.space)] == ["lr"]


def test_a_space_without_a_number_that_may_change_is_refused() -> None:
    for given in ({}, {"mutate": ["kind"]}):
        space = {"kind": {"type": "choice", "values": [1, 2]}, **({"lr": LR} if given else {})}
        with pytest.raises(InputError, match="explore: gp chooses numbers with bounds, and none of them may change"):
            searching(space, **given)
