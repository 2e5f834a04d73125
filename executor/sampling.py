"""Configurations that are drawn while a job runs: by Optuna's samplers, or for trials that are added.

With Optuna, a study made from the results so far proposes those of a batch of trials. It lives for one batch, is made
from the journal's results, and its random numbers follow from the seed and the batch's first trial: no state of a
sampler outlives a driver. Results count at one number of iterations, the largest one that enough trials have reached
(the models per budget of BOHB, Falkner et al. 2018, section 3.2, where all budgets are multiples).
"""

from __future__ import annotations

import math
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rubberband.errors import InputError
from rubberband.executor.core.events import TrialForked, TrialsAdded, TrialsDrawn
from rubberband.executor.core.forking import givers, takers
from rubberband.executor.core.state import LaneState, State
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.executor.journal.inbox import DriverRequest, NewTrials
from rubberband.spec.experiment import Experiment
from rubberband.spec.samplers import Configuration, Path, completed, configured, hashed, leaves, sample, trial_seed
from rubberband.spec.scheduling import MAX_TRIALS
from rubberband.spec.search import Also, Search
from rubberband.spec.space import DOMAINS, Domain, SubSpace, canonical
from rubberband.units import counted
from rubberband.values.ranking import Limit

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

_POPULATION = 50
"""Parents of NSGA-II, as in Optuna."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A configuration and its metrics; None: it trains, or waits for training, and counts as a bad one meanwhile."""

    configuration: Mapping[str, Any]
    values: tuple[float, ...] | None
    violations: tuple[float, ...] = ()
    """By how much it breaks each limit; empty without limits."""


def draw(
    search: Search,
    state: State,
    drawn: Mapping[int, Mapping[str, Any]],
    trials: Sequence[int],
    now: Callable[[], float],
) -> TrialsDrawn:
    """Return the configurations of `trials`, all repeats of which are about to start; `drawn` are those before.

    Without enough results they are drawn at random, as the sampler `random` does.
    """
    repeats = search.repeats
    proposed, reason = _learned(search, state, drawn, trials[0] // repeats, len(trials) // repeats)
    return TrialsDrawn(
        occurred_at=now(), first_trial=trials[0], configurations=_repeated(proposed, repeats), reason=reason
    )


def _repeated(configurations: Sequence[Any], repeats: int) -> tuple[Any, ...]:
    """Return the configuration of each trial: all repeats of one have the same."""
    return tuple(configuration for configuration in configurations for _ in range(repeats))


def _learned(
    search: Search, state: State, drawn: Mapping[int, Mapping[str, Any]], first: int, count: int
) -> tuple[list[Configuration], str]:
    """Return `count` configurations, of which the first is number `first`, and how they were drawn."""
    name, enough = search.sampler.algorithm, search.results_needed
    iterations, known = known_results(search, state, drawn, enough)
    results = sum(entry.values is not None for entry in known)
    reason = f"by {name} from {counted(results, 'result')} after {counted(iterations, 'iteration')}"
    if results < enough:
        reason = f"at random: {name} needs {counted(enough, 'result')} and there are {results}"
    return propose(search, known, first, count), reason


class Additions:
    """Makes the events of requests for trials. `previews` leave the configurations of a sampler that learns out."""

    def __init__(self, setup: Mapping[str, Any], *, previews: bool = False) -> None:
        """`setup` is that of the journal's header."""
        self._setup, self._previews = setup, previews

    @cached_property
    def search(self) -> Search:
        """The search as its file describes it, with a number as size."""
        return Experiment.kept(self._setup["experiment"]).search

    def __call__(self, state: State, asked: DriverRequest, now: float) -> TrialsAdded:
        """Return the event. Raises InputError for values outside the space, and a trial that cannot be cloned."""
        scheduler, trials = self.search.scheduler, asked.trials or NewTrials()
        if scheduler.brackets()[0][0].exchange is not None:
            raise InputError("a population keeps its size: its trials take over each other's checkpoints")
        if trials.from_checkpoint and self.search.repeats > 1:
            raise InputError("repeats of a configuration have checkpoints of their own; leave --from-checkpoint out")
        configs, reason = self._configurations(state, trials)
        parent, changes, done = trials.clone_of, dict[str, tuple[Any, Any]](), 0
        if parent is not None:
            before, after = configurations(state, self._setup).get(parent, {}), configs[0] or {}
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            changes = {name: (before.get(name), after.get(name)) for name in names}
            done = state.trials[parent].checkpoint_iterations if trials.from_checkpoint else 0
        return TrialsAdded(
            occurred_at=now,
            request=asked.id,
            configurations=_repeated(configs, self.search.repeats),
            stages=self.search.repeated(scheduler.chain(len(configs))),
            reduction_factor=scheduler.eta,
            sampled=trials.count * self.search.repeats,
            clone_of=parent,
            changes=changes,
            from_iterations=done,
            reason=reason,
        )

    def _configurations(self, state: State, trials: NewTrials) -> tuple[Sequence[Mapping[str, Any] | None], str]:
        """Return the configurations, None where one is drawn as its trials start, and how they were drawn."""
        search, sampler, repeats = self.search, self.search.sampler, self.search.repeats
        first, number = state.sampled_trials // repeats, len(state.trials) // repeats
        known = configurations(state, self._setup)
        if not trials.count:
            if trials.clone_of is not None:
                most = sum(stage.iterations for stage in search.scheduler.chain(1)) if state.job.has_sync else None
                _require_clonable(
                    state,
                    trials.clone_of,
                    from_checkpoint=trials.from_checkpoint,
                    most=min(state.job.max_iterations, most or state.job.max_iterations),
                )
            base = None if trials.clone_of is None else known.get(trials.clone_of, {})
            return [completed(search.space, trials.configuration, sampler.seed, number, base)], ""
        if sampler.type == "grid":
            raise InputError("num_samples: every configuration of the grid is a trial; add others by `rubberband add`")
        if (number + trials.count) * repeats > MAX_TRIALS:
            raise InputError(f"num_samples: a search has at most {MAX_TRIALS:,} trials; add fewer")
        if sampler.learns and (self._previews or not state.job.has_sync):
            return [None] * trials.count, ""
        if sampler.learns:
            return _learned(search, state, known, number, trials.count)
        every = sample(search.space, sampler.type, first + trials.count, sampler.seed, search.points_to_train)
        return every[first:], f"by the {sampler.algorithm} sampler"


def _require_clonable(state: State, number: int, *, from_checkpoint: bool, most: int) -> None:
    """Raise InputError for a trial that the search has not, or a checkpoint from which nothing is left to train.

    `most`: iterations that the clone has if it can join no trial.
    """
    if number >= len(state.trials):
        raise InputError(f"there is no trial {number}; it has 0 to {len(state.trials) - 1}")
    trial = state.trials[number]
    if not from_checkpoint:
        return
    if trial.checkpoint is None:
        raise InputError(f"trial {number} has no checkpoint; wait for its first one, or leave --from-checkpoint out")
    if trial.checkpoint_iterations >= most:
        trained = counted(most, "iteration")
        raise InputError(f"trial {number} has trained all of its {trained}; leave --from-checkpoint out to begin anew")


def explore(
    search: Search, drawn: ChainMap[int, Mapping[str, Any]], lane: LaneState, now: Callable[[], float]
) -> list[TrialForked]:
    """Return how the trials go on that take over checkpoints at a lane's SYNC; `drawn` are `configurations`.

    The numbers follow from the seed, the stage and the trial: a driver that is killed here decides alike once resumed.
    """
    stage, job, found = lane.stage, lane.job, list[TrialForked]()
    parents, ranked = givers(lane), len(stage.trials)
    for trial in takers(lane):
        unit = _unit_of(search.sampler.seed, stage.stage, trial.trial)
        parent = parents[min(int(unit((), "parent") * len(parents)), len(parents) - 1)]
        before = drawn[parent.trial]
        own = search.scheduler.explored(search.space, before, unit)
        chosen = dict[str, Any]()
        if modelled := search.scheduler.modelled(search.space):
            chosen = _guided(search, modelled, drawn, lane, parent, found, trial.trial)
            own |= chosen
        names = [*own, *(name for name in before if name not in own)]
        place = stage.ranking.index(trial.trial) + 1 if trial.trial in stage.ranking else None
        why = "it had failed" if place is None else f"it was {place} of {ranked}"
        found.append(
            TrialForked(
                occurred_at=now(),
                trial=trial.trial,
                parent=parent.trial,
                iterations=parent.checkpoint_iterations,
                configuration=own,
                changes={
                    name: (before.get(name), own.get(name))
                    for name in names
                    if canonical(before.get(name)) != canonical(own.get(name))
                },
                reason=f"{why} after {job.stage_name(stage.stage)}{'; numbers by gp' if chosen else ''}",
            )
        )
    return found


def _guided(
    search: Search,
    modelled: Sequence[tuple[str, Domain]],
    drawn: ChainMap[int, Mapping[str, Any]],
    lane: LaneState,
    parent: TrialState,
    found: Sequence[TrialForked],
    trial: int,
) -> dict[str, Any]:
    """Return the numbers that the model chooses for a trial; `found` are the forks before in the same exchange."""
    from rubberband.executor.exploring import guided  # NumPy

    waiting = {one.trial for one in takers(lane)}
    left = [one.trial for one in lane.state.trials if one.stopped_at is None and one.trial in lane.stage.trials]
    going_on = {number: drawn[number] for number in left if number not in waiting}
    going_on |= {one.trial: one.configuration for one in found}
    ordered = {number: going_on[number] for number in sorted(going_on)}  # as of a driver that was killed amid them
    seed = hashed(search.sampler.seed, "gp", lane.stage.stage, trial)
    return guided(search, modelled, lane, drawn.parents, ordered, parent, seed)


def _unit_of(seed: int, stage: int, trial: int) -> Callable[[Path, str], float]:
    return lambda path, purpose: ((hashed(seed, "exchange", stage, trial, *path, purpose) >> 12) + 0.5) * 2.0**-52


def configurations(state: State, setup: Mapping[str, Any]) -> ChainMap[int, Mapping[str, Any]]:
    """Return trial -> its present configuration, as far as they are drawn; `setup` is that of the journal's header."""
    return ChainMap(state.forked_configs, *first_configurations(state, setup).maps)


def first_configurations(state: State, setup: Mapping[str, Any]) -> ChainMap[int, Mapping[str, Any]]:
    """Return trial -> the configuration with which it began."""
    return ChainMap(state.sampled_configs, dict(enumerate(setup["configurations"])))


class Seeds(dict[int, int]):
    """Trial -> its seed, also of trials that are added while the job runs."""

    def __init__(self, seeds: Sequence[int], experiment: Mapping[str, Any]) -> None:
        """`experiment` is in the words of its file."""
        super().__init__(enumerate(seeds))
        self._seed = experiment.get("search", {}).get("sampler", {}).get("seed", 0)

    def __missing__(self, trial: int) -> int:
        return trial_seed(self._seed, trial)


def known_results(
    search: Search, state: State, drawn: Mapping[int, Mapping[str, Any]], enough: int
) -> tuple[int, Sequence[Known]]:
    """Return the iterations after which results are compared, and all that is known of configurations at that point.

    Results that the user gave count at every number of iterations; if they are enough, it is that of the trial that is
    furthest. A failed trial is as bad as the worst one.
    """
    given = [
        Known(configuration=point, values=(value,))
        for point, value in zip(search.points_to_evaluate, search.evaluated_rewards, strict=False)
    ]
    of = {trial: state.trials[trial : trial + search.repeats] for trial in drawn if trial % search.repeats == 0}
    done = sorted((_reports_of(repeats) for repeats in of.values()), reverse=True)
    iterations = max(1, done[min(max(1, enough - len(given)), len(done)) - 1] if done else 1)
    objectives = search.objectives
    found = {
        trial: _mean_after(search, repeats, iterations)
        for trial, repeats in of.items()
        if iterations > repeats[0].inherited  # until there, another configuration was trained
    }
    values = {
        trial: None if metrics is None else tuple(metrics.get(metric, math.nan) for metric, _ in objectives)
        for trial, metrics in found.items()
    }
    every = [metrics for metrics in (*values.values(), *(entry.values for entry in given)) if metrics is not None]
    columns = [[value for value in column if math.isfinite(value)] for column in zip(*every, strict=True)]
    if not columns or not all(columns):
        return iterations, given
    worst = [(max if mode == "min" else min)(column) for (_, mode), column in zip(objectives, columns, strict=True)]
    broken = {trial: search.ranking.violations(metrics or {}) for trial, metrics in found.items()}
    most = max((by for each in broken.values() for by in each if math.isfinite(by)), default=0.0) + 1.0
    trained = [
        Known(
            configuration=drawn[trial],
            values=_finite(metrics, worst),
            violations=tuple(min(by, most) for by in broken[trial]),
        )
        for trial, metrics in values.items()
    ]
    if search.sampler.algorithm == "cmaes":  # which knows no limits
        trained = [
            replace(known, values=tuple(worst)) if known.values is not None and any(known.violations) else known
            for known in trained
        ]
    return iterations, [*given, *trained]


def _reports_of(repeats: Sequence[TrialState]) -> int:
    """Return the reports of a configuration: those of its repeat that is behind, of those that did not fail."""
    left = [trial for trial in repeats if trial.status is not TrialStatus.FAILED]
    return min(len(trial.reports) for trial in left or repeats)


def _mean_after(search: Search, repeats: Sequence[TrialState], iterations: int) -> Mapping[str, float] | None:
    """Return the mean of a configuration's repeats after `iterations`; None as long as one of them may come."""
    if len(repeats) == 1:
        return _metrics_after(repeats[0], iterations)
    found = [_metrics_after(trial, iterations) for trial in repeats]
    known = [metrics for metrics in found if metrics is not None]
    if len(known) < len(found):
        return None
    learnt = replace(search.ranking, limits=(*search.ranking.limits, *map(_unlimited, search.also)))
    return learnt.mean([metrics for metrics in known if metrics] or [{}])


def _unlimited(one: Also) -> Limit:
    return Limit(metric=one.metric)


def _metrics_after(trial: TrialState, iterations: int) -> Mapping[str, float] | None:
    """Return the trial's metrics after `iterations`, or at its end: None if they may come, none if they never will."""
    is_over = trial.ended or trial.stopped_at is not None
    if len(trial.reports) >= iterations or (is_over and trial.reports):
        return trial.reports[min(iterations, len(trial.reports)) - 1].metrics
    return {} if trial.status is TrialStatus.FAILED else None


def _finite(values: tuple[float, ...] | None, worst: Sequence[float]) -> tuple[float, ...] | None:
    """Return the values; if one is missing, the worst of all: the trial failed, or did not report it."""
    return values if values is None or all(map(math.isfinite, values)) else tuple(worst)


# A study of one batch.


def propose(search: Search, known: Sequence[Known], first: int, count: int) -> list[Configuration]:
    """Return the configurations of `count` trials, of which `first` is the first, by a sampler that learns.

    Without enough results they are drawn at random, as the sampler `random` does.
    """
    if sum(entry.values is not None for entry in known) < search.results_needed:
        end = first + count
        return sample(search.space, "random", end, search.sampler.seed, search.points_to_train[:end])[first:]
    import optuna

    with quiet():
        done = [entry for entry in known if entry.values is not None]
        seed = hashed(search.sampler.seed, "optuna", first) >> 33
        study = optuna.create_study(
            directions=["minimize" if mode == "min" else "maximize" for _, mode in search.objectives],
            sampler=_sampler(search, done, seed),
        )
        for entry in known:
            study.add_trial(_frozen(search.space, entry, population=entry.values is not None))
        points = search.points_to_train[first : first + count]
        for point in points:
            study.enqueue_trial(_params_of_point(search.space, point))
        return [_ask(study, search.space, {} if number >= len(points) else points[number]) for number in range(count)]


def _ask(study: optuna.Study, space: Mapping[str, Any], point: Mapping[str, Any]) -> Configuration:
    """Return the next configuration, with the point's values; for later ones it is running (constant liar)."""
    trial = study.ask()

    def suggest(path: Path, domain: Domain) -> Any:
        kind, name = distribution(domain), key(path)
        if domain.options:
            return domain.options[trial.suggest_categorical(name, range(len(domain.options)))]
        suggest: Any = trial.suggest_int if DOMAINS[domain.kind].whole else trial.suggest_float
        step = {} if kind.step is None else {"step": kind.step}
        value = external(domain, suggest(name, kind.low, kind.high, log=kind.log, **step))
        return point.get(path[-1], value)

    return configured(space, suggest)


def key(path: Path) -> str:
    """Return the name of a parameter in a study."""
    return path[0] if len(path) == 1 else repr(path)


def distribution(domain: Domain) -> Any:
    """Return Optuna's distribution for a domain: normal ones as a probability, choices as an index."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if domain.options:
        return CategoricalDistribution(range(len(domain.options)))
    arguments = domain.arguments
    if "mean" in arguments:
        return FloatDistribution(1e-6, 1.0 - 1e-6)
    lower, upper, log, q = arguments["lower"], arguments["upper"], "base" in arguments, arguments.get("q")
    if DOMAINS[domain.kind].whole:
        if q is None:
            return IntDistribution(lower, upper - 1, log=log)
        lower, upper = -(-lower // q) * q, upper // q * q
        return IntDistribution(lower, upper, log=True) if log else IntDistribution(lower, upper, step=q)
    if q is not None:
        lower, upper = domain.draw(0.0), domain.draw(1.0)
    return FloatDistribution(lower, upper, log=log, step=None if log else q)


def external(domain: Domain, param: Any) -> Any:
    """Return the value for what Optuna proposes."""
    if "mean" in domain.arguments:
        return domain.draw(param)
    return domain.rounded(param)


def internal(domain: Domain, value: Any) -> Any:
    """Return what Optuna would have proposed for a value."""
    if domain.options:
        return domain.index(value)
    if "mean" in domain.arguments:
        return min(max(domain.probability(value), 1e-6), 1.0 - 1e-6)
    kind = distribution(domain)
    return min(max(value, kind.low), kind.high)


def _params(space: Mapping[str, Any], configuration: Mapping[str, Any]) -> dict[Path, tuple[Domain, Any]]:
    """Return path -> (domain, value in the study) of the parameters that a configuration has."""
    params: dict[Path, tuple[Domain, Any]] = {}

    def look(path: Path, domain: Domain) -> Any:
        params[path] = domain, internal(domain, configuration[path[-1]])
        return domain.find(configuration[path[-1]])

    configured(space, look)
    return params


def _params_of_point(space: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a point, which may leave parameters out, as the study names them."""
    params: dict[str, Any] = {}

    def look(space: Mapping[str, Any], path: Path) -> None:
        for name, value in space.items():
            if name in point and isinstance(value, Domain):
                params[key((*path, name))] = internal(value, point[name])
                chosen = value.find(point[name])
                if isinstance(chosen, SubSpace):
                    look(chosen.space, (*path, name, chosen.name))

    look(space, ())
    return params


def _frozen(
    space: Mapping[str, Any], known: Known, *, population: bool = False, only: Sequence[Path] | None = None
) -> FrozenTrial:
    from optuna.trial import TrialState as OptunaState
    from optuna.trial import create_trial

    params = {path: pair for path, pair in _params(space, known.configuration).items() if only is None or path in only}
    return create_trial(
        state=OptunaState.RUNNING if known.values is None else OptunaState.COMPLETE,
        values=known.values,
        params={key(path): value for path, (_, value) in params.items()},
        distributions={key(path): distribution(domain) for path, (domain, _) in params.items()},
        system_attrs={
            **({"NSGAIISampler:generation": 0} if population else {}),
            **({"constraints": known.violations} if known.violations and known.values is not None else {}),
        },
    )


def _sampler(search: Search, known: Sequence[Known], seed: int) -> BaseSampler:
    """Return the sampler of one batch. All results are one generation of NSGA-II.

    The violations of limits are those of `_frozen`.
    """
    from optuna.samplers import CmaEsSampler, GPSampler, NSGAIISampler, TPESampler

    limited: Any = {"constraints_func": lambda _: ()} if search.limits else {}
    match search.sampler.algorithm:
        case "gp":
            return GPSampler(seed=seed, n_startup_trials=1, warn_independent_sampling=False, **limited)
        case "nsgaii":
            return NSGAIISampler(seed=seed, population_size=min(_POPULATION, max(2, len(known) // 2)), **limited)
        case "cmaes":  # it begins where the results are best (warm start, Nomura et al. 2021)
            axes = [
                path
                for path, domain in leaves(search.space)
                if len(path) == 1 and not domain.options and not distribution(domain).single()
            ]
            source = [_frozen(search.space, entry, only=axes) for entry in known] if axes else None
            return CmaEsSampler(seed=seed, n_startup_trials=1, warn_independent_sampling=False, source_trials=source)
        case _:
            return TPESampler(
                seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=1, **limited
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna's notices, such as that of a new study, out of the run's output."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
