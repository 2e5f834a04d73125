"""The keys of an experiment that follow from Ray Tune's space, TuneConfig, RunConfig, schedulers and searchers.

Every word that differs from its default is taken over, or refused by name. `WORDS` lists those that are known: a test
compares them with the installed Ray Tune, and a word that a later one adds is refused until it is listed.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rubberband.cloud.catalogue import table_of
from rubberband.cloud.offers import offers
from rubberband.errors import InputError
from rubberband.integrations.ray_tune_pbt import population_of
from rubberband.integrations.ray_tune_stops import Stops, refused, stops_of
from rubberband.integrations.ray_tune_trials import Stop
from rubberband.spec.fields import name_like
from rubberband.spec.resources import MOST_TRIALS_PER_GPU, Resources
from rubberband.spec.samplers import configured
from rubberband.spec.space import Domain, choice, foreign
from rubberband.units import counted, shown

WORDS: Mapping[str, tuple[str, ...]] = {
    "TuneConfig": (
        *("mode", "metric", "search_alg", "scheduler", "num_samples", "max_concurrent_trials"),
        *("time_budget_s", "reuse_actors", "trial_name_creator", "trial_dirname_creator"),
    ),
    "RunConfig": ("name", "failure_config", "checkpoint_config", "verbose", "stop", "callbacks", "log_to_file"),
    "FailureConfig": ("max_failures", "fail_fast"),
    "CheckpointConfig": (
        *("num_to_keep", "checkpoint_frequency", "checkpoint_at_end"),
        *("checkpoint_score_attribute", "checkpoint_score_order"),
    ),
    "AsyncHyperBandScheduler": (
        *("time_attr", "metric", "mode", "max_t", "grace_period", "reduction_factor", "brackets", "stop_last_trials"),
    ),
    "HyperBandScheduler": ("time_attr", "metric", "mode", "max_t", "reduction_factor", "stop_last_trials"),
    "FIFOScheduler": (),
    "PopulationBasedTraining": (
        *("time_attr", "metric", "mode", "perturbation_interval", "burn_in_period", "hyperparam_mutations"),
        *("quantile_fraction", "resample_probability", "perturbation_factors", "custom_explore_fn", "log_config"),
        *("require_attrs", "synch"),
    ),
    "PB2": (
        *("time_attr", "metric", "mode", "perturbation_interval", "hyperparam_bounds", "quantile_fraction"),
        *("log_config", "require_attrs", "synch", "custom_explore_fn"),
    ),
    "MedianStoppingRule": (
        *("time_attr", "metric", "mode", "grace_period", "min_samples_required", "min_time_slice", "hard_stop"),
    ),
    "TrialPlateauStopper": ("metric", "std", "num_results", "grace_period", "metric_threshold", "mode"),
    "ExperimentPlateauStopper": ("metric", "std", "top", "mode", "patience"),
    "BasicVariantGenerator": ("points_to_evaluate", "max_concurrent", "constant_grid_search", "random_state"),
    "Repeater": ("searcher", "repeat", "set_index"),
    "ConcurrencyLimiter": ("searcher", "max_concurrent", "batch"),
    "OptunaSearch": (
        *("space", "metric", "mode", "points_to_evaluate", "sampler", "study_name", "storage", "seed"),
        "evaluated_rewards",
    ),
}
"""Class of Ray Tune -> its words that are read. Any other word of a config is refused."""


def check_fields(config: Any) -> None:
    """Raise InputError for a field of a config that differs from its default, and is not read."""
    if config is None:
        return
    kind = next((base.__name__ for base in type(config).__mro__ if base.__name__ in WORDS), type(config).__name__)
    if type(config).__module__.startswith("ray.train"):
        raise InputError(f"{kind} is that of ray.train; import it from ray.tune: from ray.tune import {kind}")
    default = type(config)()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in WORDS.get(kind, ()) and value != getattr(default, field.name):
            raise refused(f"{kind}({field.name}={shown(value)})")


@dataclasses.dataclass(kw_only=True)
class Translated:
    """The meaning of Ray Tune's objects, in RubberBand's words."""

    search: dict[str, Any] = dataclasses.field(default_factory=dict)
    constraints: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_concurrent: int | None = None
    """Most trials at a time; None: no limit."""
    stop: Stop | None = None
    """The rule that ends a single trial, where it trains."""
    repeats: int = 1
    """Trials of each configuration."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Lines to show before the run."""


def words_of(space: Mapping[str, Any], tune_config: Any, run_config: Any, limits: Mapping[str, Any]) -> Translated:
    """Return the words for the configs, which may be None. `limits` are the caller's constraints.

    Raises InputError for a word without a counterpart.
    """
    check_fields(tune_config)
    check_fields(run_config)
    translated = Translated()
    failure = getattr(run_config, "failure_config", None)
    check_fields(failure)
    if (retries := getattr(failure, "max_failures", 0)) or getattr(failure, "fail_fast", False):
        if retries < 0:
            raise refused(f"FailureConfig(max_failures={retries})")
        translated.constraints["max_failures"] = retries
    if (budget := getattr(tune_config, "time_budget_s", None)) is not None:
        seconds = budget.total_seconds() if isinstance(budget, datetime.timedelta) else budget
        translated.constraints["deadline"] = f"{seconds}s"
    stops = stops_of(getattr(run_config, "stop", None), scheduler := _scheduler_of(tune_config))
    translated.stop = stops.stop
    if stops.deadline is not None:
        translated.constraints["deadline"] = stops.deadline
    searcher = _searcher_of(tune_config, translated)
    _fill_search(dict(space), tune_config, scheduler, searcher, stops, {**translated.constraints, **limits}, translated)
    return translated


# The search.


def _searcher_of(config: Any, translated: Translated) -> Any:
    """Return the searcher without its limiter and its Repeater, whose words are taken over."""
    searcher: Any = getattr(config, "search_alg", None)
    if isinstance(searcher, str):
        from ray import tune

        searcher = tune.create_searcher(searcher)
    limits = [getattr(config, "max_concurrent_trials", None)]
    while (kind := type(searcher).__name__) in ("ConcurrencyLimiter", "Repeater"):
        if kind == "Repeater":
            translated.repeats = searcher.repeat
            translated.notes.append("a configuration has no __trial_index__: each of its trials has a seed of its own")
        elif searcher.batch:
            raise refused("ConcurrencyLimiter(batch=True)")
        else:
            limits.append(searcher.max_concurrent * translated.repeats)
        searcher = searcher.searcher
    limits.append(getattr(searcher, "max_concurrent", None))
    given = [limit for limit in limits if limit]
    translated.max_concurrent = min(given) if given else None
    return searcher


def _scheduler_of(config: Any) -> Any:
    scheduler = getattr(config, "scheduler", None)
    if isinstance(scheduler, str):
        from ray import tune

        scheduler = tune.create_scheduler(scheduler)
    return scheduler


def _fill_search(
    space: dict[str, Any],
    config: Any,
    scheduler: Any,
    searcher: Any,
    stops: Stops,
    limits: Mapping[str, Any],
    translated: Translated,
) -> None:
    iterations = stops.iterations
    sampling, points, space = _sampler(searcher, space)
    num_samples = _configurations(getattr(config, "num_samples", 1), translated.repeats)
    learns = sampling.get("sampler", {}).get("type") == "optuna"
    space, points, trials = _with_grids(space, points, num_samples, learns)
    objective = _objective(config, scheduler, searcher, translated)
    if type(scheduler).__name__ in ("PopulationBasedTraining", "PB2"):
        by_scheduler, space, points, notes = population_of(scheduler, space, points, trials, iterations)
        translated.notes += notes
    else:
        by_scheduler = _scheduler(scheduler, trials, iterations, limits)
    if by_scheduler.get("max_t") == "auto":
        translated.notes.append(
            "nothing says how long a trial trains: the plan counts on as long as the limits allow; "
            "RunConfig(stop={'training_iteration': N}) says it"
        )
    if "also" in objective:
        sampling["sampler"]["multi_objective"] = True
    translated.search = {
        "space": space,
        **objective,
        "scheduler": by_scheduler,
        **({"points_to_evaluate": points} if points else {}),
        **stops.of_search(objective),
        **({"repeats": translated.repeats} if translated.repeats > 1 else {}),
        **sampling,
    }


def _configurations(num_samples: int, repeats: int) -> int:
    """Return the number of configurations. Raises InputError unless each has all of its repeats."""
    if num_samples > 0 and num_samples % repeats:
        near = max(1, num_samples // repeats) * repeats
        raise InputError(
            f"TuneConfig(num_samples={num_samples}) counts trials, and Repeater(repeat={repeats}) trains each "
            f"configuration {repeats} times; write num_samples={near}"
        )
    return num_samples // repeats if num_samples > 0 else num_samples


def _objective(config: Any, scheduler: Any, searcher: Any, translated: Translated) -> dict[str, Any]:
    """Return `metric` and `mode`, and the further metrics of a multi-objective search as `also`."""
    owners = [(config, "metric", "mode"), (scheduler, "_metric", "_mode"), (searcher, "_metric", "_mode")]
    metrics = [getattr(owner, metric, None) for owner, metric, _ in owners]
    modes = [getattr(owner, mode, None) for owner, _, mode in owners]
    metric, mode = next(filter(None, metrics), None), next(filter(None, modes), None)
    if metric is None or mode is None:
        raise InputError("the search has no metric or mode; write tune.TuneConfig(metric=..., mode='min' or 'max')")
    if isinstance(metric, str):
        return {"metric": metric, "mode": mode}
    named, ways = list(metric), list(mode) if isinstance(mode, list | tuple) else [mode] * len(metric)
    if len(named) != len(ways):
        raise refused(f"a search of {len(named)} metrics and {len(ways)} modes")
    translated.notes.append(f"{named[0]} ranks the trials; the sampler learns from {' and '.join(named)} alike")
    also = [{"metric": name, "mode": way} for name, way in zip(named[1:], ways[1:], strict=True)]
    return {"metric": named[0], "mode": ways[0], "also": also}


def _with_grids(
    space: dict[str, Any], points: list[dict[str, Any]], num_samples: int, learns: bool
) -> tuple[dict[str, Any], list[dict[str, Any]], int | str]:
    """Return space, points and trials: each sample has all points of the grid, and draws the rest for each."""
    grids = {name: domain for name, value in space.items() if (domain := _grid(value)) is not None}
    if not grids:
        return space, points, "auto" if num_samples == -1 else num_samples
    if learns:
        raise InputError(f"param_space: {next(iter(grids))} is a grid, which no sampler learns; write tune.choice")
    if num_samples == -1:
        raise refused("num_samples=-1 with a grid")
    is_whole = all(_grid(value) is not None or not _is_drawn(value) for value in space.values())
    if is_whole and num_samples == 1 and not points:
        return space, points, math.prod(len(domain.options) for domain in grids.values())
    rows = []
    for sample in range(num_samples):
        point = points[sample] if sample < len(points) else {}
        free = [name for name in grids if name not in point]
        rows += [
            {**point, **dict(zip(free, values, strict=True))}
            for values in itertools.product(*(grids[name].options for name in free))
        ]
    drawn = {name: Domain("choice", {"values": list(domain.options)}) for name, domain in grids.items()}
    return {**space, **drawn}, rows, len(rows)


def _grid(value: Any) -> Domain | None:
    may_be = isinstance(value, Mapping) or type(value).__name__ == "Categorical"
    domain = value if isinstance(value, Domain) else foreign(value) if may_be else None
    return domain if domain is not None and domain.kind == "grid" else None


def _is_drawn(value: Any) -> bool:
    return isinstance(value, Domain) or foreign(value) is not None


# Schedulers.


def _scheduler(scheduler: Any, trials: int | str, iterations: int | None, limits: Mapping[str, Any]) -> dict[str, Any]:
    kind = type(scheduler).__name__.replace("AsyncHyperBandScheduler", "ASHAScheduler")
    if scheduler is None or kind in ("FIFOScheduler", "MedianStoppingRule"):
        return _fifo(trials, iterations, limits)
    if kind not in ("ASHAScheduler", "HyperBandScheduler"):
        raise InputError(f"{kind} has no counterpart; use ASHAScheduler, HyperBandScheduler or MedianStoppingRule")
    if scheduler._time_attr != "training_iteration":
        raise refused(f"{kind}(time_attr={scheduler._time_attr!r})")
    if not scheduler._stop_last_trials:
        raise refused(f"{kind}(stop_last_trials=False)")
    if kind == "ASHAScheduler":
        if len(scheduler._brackets) > 1:
            raise refused(f"ASHAScheduler(brackets={len(scheduler._brackets)})")
        max_t = _whole(min(scheduler._max_t, iterations or math.inf))
        return {
            "type": "asha",
            "num_samples": trials,
            "grace_period": min(_whole(scheduler._brackets[0]._rungs[-1][0]), max_t),
            "max_t": max_t,
            "reduction_factor": _whole(scheduler._reduction_factor),
        }
    if trials == "auto":
        raise refused("num_samples=-1 with HyperBandScheduler")
    return {
        "type": "hyperband",
        "num_samples": trials,
        "max_t": _whole(min(scheduler._max_t_attr, iterations or math.inf)),
        "reduction_factor": _whole(scheduler._eta),
    }


def _fifo(trials: int | str, iterations: int | None, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheduler that stops no trial: each trains to its own end, at most for `iterations`."""
    if iterations is None and (trials == "auto" or not {"deadline", "max_cost"} & limits.keys()):
        raise InputError(
            "without a scheduler the length of a trial is not known; add RunConfig(stop={'training_iteration': N}), or "
            "constraints={'deadline': ...} within which the trials train to their own end"
        )
    return {"type": "none", "num_samples": trials, "max_t": "auto" if iterations is None else iterations}


def _whole(number: float) -> Any:
    return int(number) if float(number).is_integer() else number


# Searchers.


def _sampler(searcher: Any, space: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return the words of the sampler, the points to evaluate, and the space."""
    kind = type(searcher).__name__
    points = [dict(point) for point in getattr(searcher, "_points_to_evaluate", None) or []]
    if searcher is None:
        return {}, [], space
    if kind == "BasicVariantGenerator":
        if searcher._constant_grid_search:
            raise refused("BasicVariantGenerator(constant_grid_search=True)")
        if searcher._random_state._rng is not None:
            raise refused("BasicVariantGenerator(random_state=...)")
        return {}, points, space
    if kind != "OptunaSearch":
        raise InputError(f"{kind} has no counterpart; use OptunaSearch, or leave search_alg out for random search")
    if searcher._storage is not None or searcher._study_name != "optuna":
        raise refused("OptunaSearch(storage=..., study_name=...)")
    sampler = {"type": "optuna", **_optuna_sampler(searcher._sampler)}
    if searcher._seed is not None:
        sampler["seed"] = searcher._seed
    rewards = {"evaluated_rewards": list(searcher._evaluated_rewards)} if searcher._evaluated_rewards else {}
    return {"sampler": sampler, **rewards}, points, _own_space(searcher._space, space)


def _own_space(own: Any, space: dict[str, Any]) -> dict[str, Any]:
    """Return the space of an OptunaSearch that has one, with the constants of param_space."""
    if not own:
        return space
    if drawn := [name for name, value in space.items() if _is_drawn(value)]:
        raise refused(f"OptunaSearch(space=...) beside param_space, which draws {drawn[0]},")
    if callable(own):
        return {**space, **space_of_function(own)}
    return {**space, **own}


_SAMPLERS = ("TPESampler", "GPSampler", "CmaEsSampler", "NSGAIISampler")


def _optuna_sampler(sampler: Any) -> dict[str, str]:
    if sampler is None:
        return {}
    kind = type(sampler).__name__
    if kind not in _SAMPLERS:
        raise refused(f"OptunaSearch(sampler={kind}(...))")
    default, other = type(sampler)(), type(sampler)()
    for name, value in vars(default).items():
        if vars(other)[name] == value and vars(sampler).get(name) != value:
            raise refused(f"{kind}({name.lstrip('_')}=...)")
    if getattr(getattr(sampler, "_rng", None), "_rng", None) is not None:
        raise refused(f"{kind}(seed=...)")
    return {"sampler": kind.removesuffix("Sampler").lower()}


# The resources of a trial, and how many train at once.


_SHARE_TOLERANCE = 0.02
"""A part that is off by this share counts as 1/k: 0.33 is a third."""


def trials_per_gpu(request: Any, name: str) -> int:
    """Return how many trials share a GPU, by the request of one: two for `{"gpu": 0.5}`. Raises InputError."""
    bundles = getattr(request, "bundles", None) or [{}]
    share = float(bundles[0].get("GPU", 0))
    if not 0 < share < 1:
        return 1
    count = round(1.0 / share)
    if count > MOST_TRIALS_PER_GPU or abs(count * share - 1) > _SHARE_TOLERANCE:
        near = min(max(count, 2), MOST_TRIALS_PER_GPU)
        raise InputError(
            f"tune.with_resources({name}, ...) asks for {share:g} GPUs, and a GPU is shared in 2 to "
            f"{MOST_TRIALS_PER_GPU} equal parts; ask for {1 / near:.4g}, by which {near} trials share one"
        )
    return count


def check_resources(request: Any, name: str, resources: Resources) -> None:
    """Raise InputError unless a trial of one worker process on one slot of `resources` has what it asks for."""
    if request is None:
        return
    where = f"tune.with_resources({name}, ...)"
    bundles = getattr(request, "bundles", None)
    if bundles is None or len(bundles) > 1:
        raise refused(f"{where} with a function or several bundles")
    asked = {key: value for key, value in (bundles[0] if bundles else {}).items() if value}
    gpus, cpus = asked.pop("GPU", 0), asked.pop("CPU", 0)
    if asked:
        raise refused(f"{next(iter(asked))} of {where}")
    if gpus > 1:
        raise InputError(f"{where} asks for {gpus:g} GPUs; ask for 1, or write a rubberband.TorchTrial for several")
    table = table_of(resources) if cpus > 1 else {}
    for offer in offers(resources) if cpus > 1 else ():
        vcpus = table[offer.instance_type].vcpus if offer.instance_type in table else None
        if vcpus is not None and cpus > vcpus / offer.slots:
            raise InputError(
                f"{where} asks for {cpus:g} CPUs, and a trial on {offer.instance_type} has {vcpus / offer.slots:g}; "
                "ask for that, or choose another instance_type"
            )


def most_instances(limit: int | None, resources: Resources) -> dict[str, int]:
    """Return `max_instances` by which at most `limit` trials of one slot train at once. Raises InputError."""
    if limit is None:
        return {}
    if resources.pool is not None:
        raise refused(f"max_concurrent={limit} in a pool")
    slots = max(offer.slots for offer in offers(resources))
    trials = "one" if resources.trials_per_gpu == 1 else str(resources.trials_per_gpu)
    if limit < slots:
        raise InputError(
            f"max_concurrent={limit}: an instance trains {counted(slots, 'trial')} at once, {trials} on each GPU; "
            "choose an instance_type with fewer GPUs, or leave it out"
        )
    return {"max_instances": min(resources.max_instances, limit // slots)}


def name_of(run_config: Any, trainable: str, now: datetime.datetime, notes: list[str]) -> str:
    """Return the experiment's name: the given one in RubberBand's letters, or that of the trainable with the time."""
    given: str | None = getattr(run_config, "name", None)
    if given is None:
        return f"{name_like(trainable)[:47] or 'tune'}-{now:%Y%m%d-%H%M%S}"
    name = name_like(given)
    if name != given:
        notes.append(f"the experiment {given!r} is named {name}")
    return name


_TRIES = 200
"""Random calls that compare the space with the function."""
_MOST_CALLS = 2000

Distributions = dict[str, Any]


def space_of_function(function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the space of a define-by-run function. Raises InputError if its parameters depend on more than choices."""
    name = getattr(function, "__name__", "the define-by-run function")
    traced = _Traced(function, name)
    space = {**traced.space({}, ()), **traced.constants}
    for seed in range(_TRIES):
        asked, params = traced.call({}, seed)
        try:
            drawn = configured(space, lambda path, domain: domain.find(params[path[-1]]))  # noqa: B023
        except (KeyError, InputError):
            drawn = {}
        if drawn.keys() != {*asked, *traced.constants}:
            raise InputError(
                f"{name}: which parameters a trial has depends on more than a choice; give the space as param_space, "
                "with an option {name: ..., space: {...}} of a choice"
            )
    return space


class _Traced:
    """A define-by-run function that is called again and again."""

    def __init__(self, function: Callable[[Any], Any], name: str) -> None:
        self._function, self._name, self._calls = function, name, 0
        self._known: Distributions = {}
        self.constants: dict[str, Any] = {}

    def call(self, fixed: Mapping[str, Any], seed: int = 0) -> tuple[Distributions, dict[str, Any]]:
        """Return the distributions and the values of a trial in which some choices are fixed."""
        import optuna

        from rubberband.executor.sampling import quiet

        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise InputError(f"{self._name} has too many choices to try them all; give the space as param_space")
        with quiet():
            at_random = optuna.samplers.RandomSampler(seed=seed)
            trial = optuna.create_study(sampler=optuna.samplers.PartialFixedSampler(dict(fixed), at_random)).ask()
            constants = self._function(trial) or {}
        if self._calls == 1:
            self.constants = dict(constants)
        elif dict(constants) != self.constants:
            raise InputError(f"{self._name} returns other constants for other trials; suggest them instead")
        for name, distribution in trial.distributions.items():
            if self._known.setdefault(name, distribution) != distribution:
                raise InputError(
                    f"{self._name}: {name} has other bounds for other trials; give it another name in each case"
                )
        return dict(trial.distributions), dict(trial.params)

    def space(self, fixed: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
        """Return the space of the parameters beside the `known` ones, where some choices are fixed."""
        asked, _ = self.call(fixed)
        options = {
            name: [(value, self.call({**fixed, name: value})[0]) for value in asked[name].choices]
            for name in asked
            if name not in known and hasattr(asked[name], "choices")
        }
        for name, by_value in options.items():
            every = [set(distributions) for _, distributions in by_value]
            if set.intersection(*every) != set.union(*every):
                return self._branching(fixed, known, name, by_value)
        return {name: self._domain(name, asked[name]) for name in asked if name not in known}

    def _branching(
        self, fixed: Mapping[str, Any], known: tuple[str, ...], name: str, by_value: Sequence[tuple[Any, Distributions]]
    ) -> dict[str, Any]:
        """Return the space of a choice whose options have parameters of their own, and of what all options have."""
        common = set.intersection(*(set(distributions) for _, distributions in by_value))
        shared: dict[str, Any] = {}
        values: list[Any] = []
        for value, asked in by_value:
            inner = self.space({**fixed, name: value}, (*known, name))
            shared |= {key: domain for key, domain in inner.items() if key in common}
            own = {key: domain for key, domain in inner.items() if key in asked and key not in common}
            if own and not isinstance(value, str):
                raise InputError(
                    f"{self._name}: the option {value!r} of {name} has parameters of its own; name it by a text"
                )
            values.append({"name": value, "space": own} if own else value)
        return {name: choice(values), **shared}

    def _domain(self, name: str, distribution: Any) -> Domain:
        try:
            domain = foreign(distribution)
        except InputError as error:
            raise InputError(f"{self._name}: {name}: {error}") from None
        assert domain is not None, "a distribution of Optuna"
        return domain
