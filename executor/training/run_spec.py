"""The one value of a run beside its job: what is trained, with which settings, and where its checkpoints are.

The command line, Python and the service make it of an experiment (`RunSpec.of`), a resume of the journal's header
(`RunSpec.from_json`). The experiment's words are parsed there, once; the session and the backend read no file's words.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import rubberband
from rubberband.errors import InputError, JournalError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.training.entrypoint import Entrypoint, files_of
from rubberband.spec.experiment import Experiment
from rubberband.spec.program import Program
from rubberband.spec.samplers import trial_seed
from rubberband.units import shown
from rubberband.values.kinds import KINDS, ProviderKind
from rubberband.values.plan import Spent, total_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Input of a run beside its job."""

    experiment: Experiment
    """The planned experiment, with a number as the size of its search."""
    configurations: Sequence[Mapping[str, Any]] | Mapping[int, Mapping[str, Any]]
    """By trial; empty in the header where a sampler that learns draws them."""
    seeds: Sequence[int]
    data_seed: int
    entrypoint: Entrypoint | None
    """None for a virtual run."""
    checkpoints: str
    store_mark: str = ""
    """Mark of the checkpoint store; empty until it is made."""
    run: str
    """Made once for each experiment, so that another one of the same name is not taken for this one in the cloud."""
    code: Mapping[str, str] | None
    """Path -> digest of the user's files that trials are made of; None for a virtual run."""
    profiling_s: float = 0.0
    profiling_cost_usd: float = 0.0
    waited_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds from the command to the run, by cause."""

    @classmethod
    def of(
        cls, experiment: Experiment, entrypoint: Entrypoint | None, folder: ExperimentFolder, spent: Spent
    ) -> RunSpec:
        """Return that of an experiment in `folder`; each call is another run."""
        run = secrets.token_hex(6)
        checkpoints = experiment.resources.checkpoints or str(folder.checkpoints)
        return cls(
            experiment=experiment,
            configurations=() if experiment.search.sampler.learns else experiment.configurations(),
            seeds=experiment.trial_seeds(),
            data_seed=experiment.search.sampler.seed,
            entrypoint=entrypoint,
            checkpoints=_store_url(checkpoints, f"{experiment.name}-{run}"),
            run=run,
            code=None if entrypoint is None else files_of(entrypoint),
            profiling_s=spent.seconds,
            profiling_cost_usd=spent.cost_usd,
        )

    def at(self, address: str) -> RunSpec:
        """Return it for a Ray cluster whose head is at another address. Raises InputError if it is on none."""
        words = self.experiment.to_words()
        words["resources"] = {**words.get("resources", {}), "address": address}
        return replace(self, experiment=Experiment.kept(words))

    @property
    def kind(self) -> ProviderKind:
        """The provider's kind."""
        return self.experiment.resources.kind

    @property
    def pool(self) -> str | None:
        """Path of the folder of its pool; None: its instances are its own."""
        return self.experiment.resources.pool

    @property
    def lease_s(self) -> float:
        """Time that instances outlive their driver."""
        return self.experiment.resources.lease_length_s

    @property
    def max_iterations(self) -> int:
        """Iterations of a trial that trains to the end."""
        return max(map(total_iterations, self.experiment.brackets()))

    def seed_of(self, trial: int) -> int:
        """Return the seed of a trial, also of one that is added while the job runs."""
        if trial < len(self.seeds):
            return self.seeds[trial]
        return trial_seed(self.experiment.search.sampler.seed, trial)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, for the journal's header."""
        entrypoint = None
        if self.entrypoint is not None:
            pickled = self.entrypoint.pickled
            entrypoint = {
                "module": self.entrypoint.module,
                "attribute": self.entrypoint.attribute,
                "search_path": list(self.entrypoint.search_path),
                "pickled": None if pickled is None else base64.b64encode(pickled).decode(),
            }
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "experiment": self.experiment.to_words(),
            "provider": self.experiment.resources.provider,  # for those that read a header without its experiment
            "entrypoint": entrypoint,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RunSpec:
        """Return the value that `to_json` made this of. Raises JournalError for one of a newer version."""
        if plain["provider"] not in KINDS:
            name = shown(plain["provider"])
            raise JournalError(f"resources.provider: {name} cannot be used here; install the package that brings it")
        given = {key: value for key, value in plain.items() if key != "provider"}
        try:
            experiment = Experiment.kept(plain["experiment"])
            return cls(
                **{**given, "experiment": experiment, "entrypoint": _entrypoint(plain["entrypoint"], experiment)}
            )
        except (TypeError, InputError) as error:  # a word that this version does not know
            raise JournalError(
                f"the journal's setup is unknown to this version of rubberband ({rubberband.__version__}): {error}; "
                "install the version that began the experiment, or a newer one"
            ) from None


def _entrypoint(plain: Mapping[str, Any] | None, experiment: Experiment) -> Entrypoint | None:
    if plain is None:
        return None
    pickled = None if plain["pickled"] is None else base64.b64decode(plain["pickled"])
    program = experiment.entrypoint
    command = program.to_plain() if isinstance(program, Program) else None
    return Entrypoint(**{**plain, "search_path": tuple(plain["search_path"]), "pickled": pickled, "command": command})


def _store_url(url: str, run: str) -> str:
    """Return the URL of a run's checkpoints: paths absolute, as a resume may start elsewhere; in a bucket a folder."""
    if "://" in url and not url.startswith("file://"):
        return f"{url.rstrip('/')}/{run}"
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))
