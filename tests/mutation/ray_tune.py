"""Planted bugs of words that people bring from Ray Tune: read past, or taken for others."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_WORDS = ("tests/unit/test_ray_tune_options.py",)
_TRIALS = ("tests/unit/test_ray_tune.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="tune-stop-read-past",
        harm="trials train up to the scheduler's max_t, and cost that, though RunConfig(stop=...) says less",
        file="rubberband/integrations/ray_tune_options.py",
        old="max_t = _whole(min(scheduler._max_t, iterations or math.inf))",
        new="max_t = _whole(scheduler._max_t)",
        tests=_WORDS,
    ),
    Mutant(
        name="tune-later-words-read-past",
        harm="a word that a later Ray Tune adds has no effect, and no line says so",
        file="rubberband/integrations/ray_tune_options.py",
        old="if field.name in known and known[field.name] is None:",
        new="if known.get(field.name) is None:",
        tests=_WORDS,
    ),
    Mutant(
        name="tune-half-a-gpu-read-past",
        harm="a trial that asks for half a GPU has, and pays for, a whole one",
        file="rubberband/integrations/ray_tune_options.py",
        old="if not 0 < share < 1:",
        new="if True:",
        tests=_WORDS,
    ),
    Mutant(
        name="tune-limit-of-concurrency-read-past",
        harm="more trials than allowed train at once",
        file="rubberband/integrations/ray_tune_options.py",
        old='return {"max_instances": min(resources.max_instances, limit // slots)}',
        new="return {}",
        tests=_WORDS,
    ),
    Mutant(
        name="tune-threshold-turned-round",
        harm="stop={'accuracy': 0.9} ends each trial at its first, bad report",
        file="rubberband/integrations/ray_tune_trials.py",
        old="elif result[metric] >= threshold:",
        new="elif result[metric] <= threshold:",
        tests=_TRIALS,
    ),
    Mutant(
        name="tune-done-read-past",
        harm="a class trainable that is done is trained on, and paid for",
        file="rubberband/integrations/ray_tune_trials.py",
        old='self.ended = bool(result.get("done")) or',
        new="self.ended =",
        tests=_TRIALS,
    ),
    Mutant(
        name="tune-parameters-dropped",
        harm="a function trains with its default arguments, not those of tune.with_parameters",
        file="rubberband/integrations/ray_tune_trials.py",
        old="return call_in_session(lambda: target(*arguments, config, **parameters), stop)",
        new="return call_in_session(lambda: target(*arguments, config), stop)",
        tests=_TRIALS,
    ),
    Mutant(
        name="tune-options-of-a-choice-dropped",
        harm="a parameter that only some trials have is drawn for all",
        file="rubberband/integrations/ray_tune_options.py",
        old='values.append({"name": value, "space": own} if own else value)',
        new="values.append(value)",
        tests=("tests/unit/test_ray_tune_space.py",),
    ),
    Mutant(
        name="other-objectives-read-past",
        harm="a search of several objectives proposes for the first one alone",
        file="rubberband/spec/search.py",
        old="also = self.also if self.sampler.multi_objective else ()",
        new="also = ()",
        tests=("tests/unit/test_sampling.py",),
    ),
    Mutant(
        name="ended-trials-teach-nothing",
        harm="a sampler takes the best trials, which ended by themselves, for bad ones",
        file="executor/sampling.py",
        old="or (is_over and trial.reports)",
        new="",
        tests=("tests/unit/test_sampling.py",),
    ),
    Mutant(
        name="hyperband-counts-its-trials-itself",
        harm="hyperband trains, and pays for, another number of trials than num_samples",
        file="rubberband/spec/search.py",
        old="    if num_samples is not None:\n        sizes = _filled(sizes, num_samples)\n",
        new="",
        tests=("tests/unit/test_scheduler.py",),
    ),
)
