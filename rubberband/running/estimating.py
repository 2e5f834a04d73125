"""`rubberband.estimate`: the estimate of an experiment in Python, as text and in a notebook."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rubberband import markup
from rubberband.errors import InputError, ProfileMissingError, briefly
from rubberband.executor.result.batch_history import copied
from rubberband.executor.run.allowance import with_allowance
from rubberband.executor.training.entrypoint import entrypoint_of, with_trial
from rubberband.installation import home_at
from rubberband.planning.clusters import on_cluster
from rubberband.planning.feasible import PlanningOptions
from rubberband.planning.fetching import with_fetch
from rubberband.planning.prices_and_quotas import EstimateAnswer, answer, local_prices_and_quotas
from rubberband.running.profile_cache import find_profiles
from rubberband.running.sending import with_unsent
from rubberband.running.warm_start import warm_started
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import name_of_trial
from rubberband.spec.pool import on_pool
from rubberband.units import duration, format_usd, in_unit
from rubberband.values.plan import Plan, Policy, Prediction
from rubberband.views.document import render_document
from rubberband.views.estimate.tables import headlines, screen_tables
from rubberband.views.formatting import TextTable, size_line

if TYPE_CHECKING:
    from rubberband.types import TuneDict


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate(EstimateAnswer):
    """An estimate. Printed, it is the screen of `rubberband estimate`; a notebook shows its tables."""

    @property
    def feasible(self) -> bool:
        """Whether there is a plan within the limits."""
        return self.estimate.feasible

    @property
    def plan(self) -> Plan | None:
        """The plan; None if none is within the limits."""
        return None if self.estimate.job is None else self.estimate.job.plan

    @property
    def prediction(self) -> Prediction | None:
        """Its predicted time (`jct_s`, in seconds) and cost (`cost_usd`); None without a plan."""
        return self.estimate.prediction

    def __repr__(self) -> str:
        found = self.prediction
        what = "no plan" if found is None else f"{duration(found.jct_s)}, {format_usd(found.cost_usd)}"
        return in_unit(f"<PlanEstimate {self.estimate.experiment_name}: {what}>", self.estimate.offer.unit)

    def __str__(self) -> str:
        """Return the screen of `rubberband estimate`."""
        return in_unit(render_document(*self._document()).rstrip("\n"), self.estimate.offer.unit)

    def _repr_html_(self) -> str:
        (title, *lines), tables = self._document()
        shown = (
            markup.lines([table.title])
            + markup.table(table.header, [*table.rows, *filter(None, [table.total])], words=table.words)
            for table in tables
        )
        return in_unit(markup.card(title, markup.lines(lines), *shown), self.estimate.offer.unit)

    def _document(self) -> tuple[list[str], list[TextTable]]:
        lines, tables = headlines(self.estimate), screen_tables(self.estimate, self.notes)
        if self.size is not None:
            lines.insert(0, size_line(self.estimate.experiment_name, self.estimate.constraints, self.size))
        return lines, tables


@briefly
def estimate(
    entrypoint: Any = None,
    /,
    *,
    policy: Policy = "optimal",
    size: bool = False,
    seed: int = 0,
    home: str | os.PathLike[str] | None = None,
    **words: Unpack[TuneDict],
) -> PlanEstimate:
    """Predict the time and cost of an experiment, as `rubberband estimate` does. Nothing is started or spent.

    Args:
        entrypoint: The trial, as for `rubberband.tune`; it may be left out.
        policy: `optimal`, `static`, `naive_elastic` or `greedy`.
        size: Whether the search is sized to the limits.
        seed: Seed of the samples, where times vary.
        home: Where profiles are that earlier runs of the trial measured; by default RUBBERBAND_HOME, or
            `~/.rubberband`.
        words: The keys of the experiment file, or a whole `experiment=`.

    Returns:
        The estimate. `print` shows its tables. Without a plan within the limits it is not `feasible`, and has remedies.

    Raises:
        InputError: For wrong words.
        ProfileMissingError: Without a profile.

    Examples:
        >>> found = rubberband.estimate(
        ...     name="first",
        ...     search={
        ...         "space": {"lr": rubberband.loguniform(1e-4, 1e-1)},
        ...         "scheduler": {"type": "sha", "num_samples": 8, "max_t": 4, "reduction_factor": 2},
        ...         "metric": "loss",
        ...         "mode": "min",
        ...     },
        ...     constraints={"deadline": "10m", "max_cost": 1},
        ...     resources={"provider": "virtual", "gpus_per_instance": 1, "price_per_hour": 3, "max_instances": 2},
        ...     profile={"seconds_per_iteration": {1: 10}},
        ... )
        >>> found.feasible, found.prediction.cost_usd < 1
        (True, True)
    """
    place = home_at(home)
    experiment = on_cluster(with_trial(experiment_of(entrypoint, words, "estimate", place)))
    experiment = with_fetch(experiment, place, is_required=False)
    warm_started(experiment, place, partial(print, file=sys.stderr))
    found_entrypoint = None if experiment.entrypoint is None else entrypoint_of(experiment)
    profiles = find_profiles(experiment, found_entrypoint, place, None, partial(print, file=sys.stderr), to_run=False)
    if profiles is None:
        raise ProfileMissingError(
            "there is no profile; pass profile={'seconds_per_iteration': {1: 60}}, or run it once: a run measures one"
        )
    found = answer(
        experiment,
        profiles,
        with_unsent(
            with_allowance(local_prices_and_quotas(experiment, place), experiment, place), experiment, found_entrypoint
        ),
        PlanningOptions(now=time.time(), policy=policy, frontier=True, seed=seed, to_size=size),
    )
    return copied(PlanEstimate, found)


def experiment_of(entrypoint: Any, words: Mapping[str, Any], caller: str, home: Path, began: str = "") -> Experiment:
    """Return the experiment of a call: `experiment=` itself, or one of the entry point and the words.

    Its pool is one of `home`. Without a name it has that of its trial, followed by `began`.
    """
    if "experiment" not in words:
        trial = words.get("entrypoint") if entrypoint is None else entrypoint
        named = {"name": f"{name_of_trial(trial)[:40] or 'experiment'}{began}"}
        named |= {} if entrypoint is None else {"entrypoint": entrypoint}
        notes = list[str]()
        return Experiment(**on_pool({**named, **words}, home, notes.append)).with_notes(*notes)
    rest = [name for name in words if name != "experiment"]
    if rest or entrypoint is not None:
        raise InputError(
            f"{caller}() got an experiment and also {', '.join(rest) or 'an entry point'}; give one of them"
        )
    found: Experiment = words["experiment"]
    return found
