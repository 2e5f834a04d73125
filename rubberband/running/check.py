"""The check of a trial before an experiment is run: for `rubberband check`, and first in a run.

A trial that passed is remembered by its content, in `checks` of the home, and not checked again.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from rubberband.cloud.catalogue import Table, types_of
from rubberband.cloud.local.gpus import gpus_to_share, one_taken
from rubberband.cloud.offers import offers
from rubberband.errors import Cancelled, EntrypointError, InputError
from rubberband.executor.run.allowance import require_runnable
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck, TrialFault, brief, read_alike
from rubberband.executor.training.checking import check
from rubberband.executor.training.entrypoint import Entrypoint, content_of, digest, entrypoint_of, with_trial
from rubberband.executor.training.segment import Segment
from rubberband.features import part
from rubberband.files import make_directories, write_atomically
from rubberband.installation import default_home
from rubberband.planning.candidates import known_gpus
from rubberband.planning.clusters import on_cluster
from rubberband.planning.feasible import Profiles
from rubberband.planning.fetching import fetched
from rubberband.planning.least_gang import GangTooLargeError, with_least_gang
from rubberband.running.memory_fit import Measuring, memory_fit
from rubberband.running.pace import Pace
from rubberband.running.profile_cache import Announce
from rubberband.running.sending import unsent_of
from rubberband.running.warm_start import warm_started
from rubberband.spec.experiment import Experiment
from rubberband.spec.program import Program
from rubberband.spec.samplers import extreme_values, extremes, leaves
from rubberband.spec.space import check_names
from rubberband.units import format_duration
from rubberband.values.command import PLACES, switch_of, unused, words_of
from rubberband.values.plan import gang_sizes, total_iterations
from rubberband.values.profile import Profile

LIMIT_S = 300.0
"""Default time of `rubberband check`."""
RUN_LIMIT_S = 30.0
"""Time of the check before a run: what takes longer is left unchecked."""
PROGRAM_LIMIT_S = 120.0
"""The same for a program, which is started twice or three times, with all its imports."""
CHEAP_S = 10.0
"""If an iteration takes longer by the profile, a run does not check first."""
TRIALS = 3
"""Configurations that are tried, as a single one may be bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Findings of the check of an experiment."""

    entrypoint: str
    device: str
    """cpu or cuda."""
    limit_s: float
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the trial that was checked last."""
    trial: TrialCheck = field(default_factory=TrialCheck)
    problems: tuple[TrialFault, ...] = ()
    remarks: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    """Whether the configurations fit into memory: a line for each instance type of which that is known."""

    @property
    def ok(self) -> bool:
        """Whether the experiment can be run, as far as was checked."""
        return not self.problems

    @property
    def hardware(self) -> str:
        """Return what the iteration ran on, as people call it."""
        return "GPU" if self.device == "cuda" else "CPU"

    def summary(self) -> str:
        """Return the outcome in one line."""
        if not self.trial.metrics:
            return "not trained"
        metrics = " ".join(f"{name}={value:.6g}" for name, value in list(self.trial.metrics.items())[:4])
        seconds, size = self.trial.seconds.get("iteration", 0.0), self.trial.checkpoint_bytes
        checkpoint = "no checkpoint" if size is None else f"checkpoint {size / 1e6:.3g} MB"
        restored = ", restored" if "restore" in self.trial.seconds else ""
        restored += f"; {self.trial.restart}" if self.trial.restart else ""
        return f"1 iteration in {seconds:.2f} s on the {self.hardware}: {metrics}; {checkpoint}{restored}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, schema `rubberband.check/1`."""
        return {
            "schema": "rubberband.check/1",
            "ok": self.ok,
            "entrypoint": self.entrypoint,
            "kind": self.trial.kind or None,
            "device": self.device,
            "configuration": dict(self.configuration),
            "metrics": dict(self.trial.metrics),
            "line": self.trial.line or None,
            "checkpoint_bytes": self.trial.checkpoint_bytes,
            "peak_bytes": self.trial.peak_bytes,
            "memory": list(self.memory),
            "resumes": self.trial.resumes,
            "restart": self.trial.restart or None,
            "seconds": self.trial.seconds,
            "limit_s": self.limit_s,
            "problems": [asdict(problem) for problem in self.problems],
            "remarks": list(self.remarks),
        }


def check_experiment(
    experiment: Experiment,
    *,
    home: Path | None = None,
    search_path: Sequence[str | os.PathLike[str]] = (),
    limit_s: float = LIMIT_S,
    output: IO[Any] | int | None = None,
    quick: bool = False,
) -> CheckReport:
    """Check an experiment and its trial in a process of its own, with all problems. `output` is the trial's.

    `home` is the one whose policy a run would keep, by default that of RUBBERBAND_HOME. `quick` leaves out the other
    values of a program.
    """
    experiment, problems = with_trial(experiment, search_path), list[TrialFault]()
    entrypoint, max_gpus, notes = None, 1, list[str]()
    with _noted(problems):
        experiment = on_cluster(experiment)
    known = len(problems)
    with _noted(problems):
        experiment = fetched(experiment, home or default_home(), notes.append)
    is_fetched = len(problems) == known
    with _noted(problems):
        require_runnable(experiment, home or default_home())
        warm_started(experiment, home or default_home(), notes.append)
    with _noted(problems):
        on_demand = experiment.resources.model_copy(update={"market": "on_demand"})  # the price of spot may be unknown
        any_market, profiles = experiment.model_copy(update={"resources": on_demand}), experiment.loaded_profiles()
        max_gpus = widest_gang(any_market, None, profiles)
        experiment = with_narrowest_gang(experiment, narrowest_gang(any_market, None, profiles))
    with _noted(problems):
        entrypoint = named_entrypoint(experiment, search_path)
    if entrypoint is None or not is_fetched:
        return CheckReport(
            entrypoint=str(experiment.entrypoint), device="cpu", limit_s=limit_s, problems=tuple(problems)
        )
    if why := unsent_of(experiment, entrypoint):
        problems.append(TrialFault(line=why))
    report = _checked(experiment, entrypoint, max_gpus, limit_s, output, problems, quick=quick)
    return replace(report, remarks=(*experiment.notes, *notes, *report.remarks))


@contextmanager
def _noted(problems: list[TrialFault]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        problems.append(TrialFault(line=str(error)))


def check_first(
    experiment: Experiment,
    entrypoint: Entrypoint,
    home: Path,
    profiles: Profiles | None,
    announce: Announce,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    max_gpus: int = 1,
    step: Announce = lambda line: None,
    load: Callable[[], None] = lambda: None,
    fork_server: Path | None = None,
) -> Pace | None:
    """Check a trial before its run, unless that takes long or it has passed before. Raises EntrypointError, Cancelled.

    Returns how fast it trains here, if that is known, perhaps from when it passed. A trial has at most `max_gpus` GPUs.
    `load` imports it, where that is not known to work after this; it raises EntrypointError. `fork_server` is the
    provider's folder of the run's fork server, if there is one.
    """
    passed = _passed(experiment, entrypoint, home, max_gpus)
    if passed is not None and passed.exists():
        return _remembered(passed, announce)
    known = [] if profiles is None else [profiles] if isinstance(profiles, Profile) else profiles.values()
    if known and min(profile.iteration_s(profile.smallest_gpus) for profile in known) > CHEAP_S:
        load()
        return None
    step(f"checking {entrypoint}: an iteration, a checkpoint and a restart")
    with tempfile.TemporaryFile() as output:
        limit_s = RUN_LIMIT_S if entrypoint.command is None else PROGRAM_LIMIT_S
        report = _checked(
            experiment,
            entrypoint,
            max_gpus,
            limit_s,
            output,
            [],
            cancelled,
            fork_server=fork_server,
            values_s=RUN_LIMIT_S / 3.0,
        )
        if cancelled():
            raise Cancelled("cancelled while the trial was checked; nothing was spent")
        if not report.trial.kind:
            load()
        if why := _unchecked(experiment, report):
            announce(f"the trial was not checked{why}")
            return None
        if report.problems:
            _show_output(output, report, lambda part: announce(entrypoint.environment.masked(part)))
    if report.problems:
        found = "; ".join(problem.line for problem in report.problems)
        raise EntrypointError(
            f"entrypoint {entrypoint} does not pass the check: {found} (`rubberband check` repeats it; --no-check, in "
            "Python check=False, runs it all the same)"
        )
    announce(f"checked {entrypoint}: {report.summary()}")
    for remark in report.remarks:
        announce(remark)
    pace = Pace.of(report.trial)
    if passed is not None:
        with suppress(OSError):  # a full disk
            make_directories(passed.parent)
            words = {"entrypoint": str(entrypoint), "at": round(time.time()), "pace": pace and asdict(pace)}
            words["warnings"] = [remark for remark in report.remarks if remark.startswith("memory: ")]
            write_atomically(passed, json.dumps(words).encode(), durable=False)
    return pace


def _remembered(passed: Path, announce: Announce) -> Pace | None:
    with suppress(OSError, ValueError, TypeError, KeyError):  # of an earlier version
        words = json.loads(passed.read_bytes())
        for warning in words["warnings"]:
            announce(warning)
        return words["pace"] and Pace(**words["pace"])
    return None


def _unchecked(experiment: Experiment, report: CheckReport) -> str:
    """Return why a check says nothing about the trial; empty if it does."""
    is_elsewhere = not experiment.resources.kind.is_this_machine
    if is_elsewhere and report.problems and all(problem.may_be_here for problem in report.problems):
        return f", as this machine may lack what it needs: {report.problems[0].line}"
    if not report.trial.is_finished and not report.trial.problems:
        waits = f": {report.trial.waits}" if report.trial.waits else ""
        return f" to the end: {report.trial.step} takes more than {report.limit_s:g} s{waits}"
    return ""


_MOST_SHOWN = 4000
"""Characters of the trial's output that a failed check before a run shows."""


def _show_output(output: IO[bytes], report: CheckReport, announce: Announce) -> None:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _MOST_SHOWN))
    text = output.read().decode("utf-8", "replace").rstrip()
    for each in (text, *(problem.details for problem in report.problems)):
        if each:
            announce(each)


def _passed(experiment: Experiment, entrypoint: Entrypoint, home: Path, max_gpus: int) -> Path | None:
    """Return the file that is there if this content has passed; None if the content is not known."""
    content = content_of(entrypoint)
    if content is None:
        return None
    words = experiment.to_words()
    parts = [words["search"].get(key) for key in ("space", "metric", "also")]
    parts.append(_gangs(experiment, max_gpus) if max_gpus > 1 else None)
    parts += [] if experiment.resources.kind.is_this_machine else [types_of(experiment.resources)]  # memory differs
    parts += [] if experiment.brackets()[0][0].exchange is None else [words["search"]["scheduler"]]
    if experiment.resources.env:
        parts.append(experiment.resources.env)
    if experiment.training.mode == "async":
        parts += [words["training"], max_gpus]
    return home / "checks" / digest(str(entrypoint), content, *parts, words.get("batch"))


def _checked(
    experiment: Experiment,
    entrypoint: Entrypoint,
    max_gpus: int,
    limit_s: float,
    output: IO[Any] | int | None,
    problems: Sequence[TrialFault],
    cancelled: Callable[[], bool] = lambda: False,
    *,
    quick: bool = False,
    fork_server: Path | None = None,
    values_s: float | None = None,
) -> CheckReport:
    """Check trials until one passes: at most `TRIALS`, as long as the time lasts."""
    failed = list[str]()
    experiment = experiment.probed()
    resources, seeds = experiment.resources, experiment.trial_seeds()
    gpus = gpus_to_share(offers(resources)[0], resources.slots).ids if resources.kind.is_this_machine else ()
    booleans = () if quick else _booleans(experiment.search.space)
    with one_taken(gpus, f"the check of {entrypoint}") as gpu:
        misread, known = _misread(entrypoint, booleans, experiment.configurations()[0])
        until, device = time.monotonic() + limit_s, "cuda" if gpu else "cpu"
        for number, configuration in enumerate(experiment.configurations()[:TRIALS]):
            segment = _segment(experiment, number, configuration, seeds[number], device)
            gangs = _gangs(experiment, max_gpus)
            order = CheckOrder(
                entrypoint=entrypoint,
                segment=segment,
                max_gpus=max_gpus,
                gangs=gangs,
                device_id=gpu,
                values_s=limit_s / 3.0 if values_s is None else values_s,
                values={} if quick else _each_value(experiment.search.space),
                extremes=() if quick else extremes(experiment.search.space),
                booleans=tuple(name for name in booleans if name not in known),
                forks=_forks(experiment, configuration),
                is_timed=fork_server is not None,
            )
            left_s = max(1.0, until - time.monotonic())
            found = check(order, limit_s=left_s, output=output, cancelled=cancelled, fork_server=fork_server)
            report = CheckReport(
                entrypoint=str(entrypoint),
                device=device,
                limit_s=limit_s,
                configuration=configuration,
                trial=found,
                problems=(*problems, *misread, *found.problems, *_unfinished(found, limit_s)),
                remarks=(*found.remarks, *_remarks(experiment, found), *(() if found.problems else failed)),
            )
            if not found.problems or any(problem.is_final for problem in found.problems) or time.monotonic() > until:
                break
            failed.append(f"trial {number} ({brief(configuration)}) fails: {found.problems[0].line}")
        if found.problems or cancelled() or not found.is_finished:
            return report
        measure = Measuring(order, found, until, cancelled, fork_server)
        fit = memory_fit(experiment, configuration, found, measure)
    return replace(
        report,
        memory=tuple(fit.lines),
        remarks=(*report.remarks, *([f"memory: {fit.warning}"] if fit.warning else [])),
        problems=(*report.problems, *([TrialFault(line=fit.fault)] if fit.fault else [])),
    )


def _forks(experiment: Experiment, configuration: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return configurations with which a trial may take over the checkpoint of this one; empty if none does."""
    search = experiment.search
    if experiment.brackets()[0][0].exchange is None:
        return ()
    return tuple(search.scheduler.explored(search.space, configuration, lambda *_, u=u: u) for u in (0.001, 0.999))


def _each_value(space: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return parameter -> its extreme values, or its options; without options that have parameters of their own."""
    return {path[-1]: tuple(extreme_values(domain)) for path, domain in leaves(space) if not domain.sub_spaces}


def _booleans(space: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters that are true or false."""
    return tuple(
        path[-1]
        for path, domain in leaves(space)
        if {True, False} <= {option for option in domain.options if isinstance(option, bool)}
    )


def _misread(
    entrypoint: Entrypoint, booleans: Collection[str], configuration: Mapping[str, Any]
) -> tuple[list[TrialFault], set[str]]:
    """Return problems of booleans that the program's parser reads alike, and the names of those whose type is known."""
    command, faults, known = entrypoint.command, list[TrialFault](), set[str]()
    if command is None or not booleans or command.booleans == "flag":
        return faults, known
    try:
        words = command.line(configuration, dict.fromkeys(PLACES, "1"))
    except InputError:
        return faults, known  # its start says it
    read = part("programs").booleans_of(words, Path(entrypoint.search_path[0]))
    named = [found for pair in pairwise(("", *command.words)) if (found := switch_of(*pair))]
    for flag, name in named + ([(f"--{name}", name) for name in booleans] if "${args}" in command.words else []):
        if name in booleans and flag in read:
            known.add(name)
            if command.booleans not in read[flag]:
                better = next(iter(read[flag]), None)
                faults.append(TrialFault(line=read_alike(name, f"the type of {flag}", command.booleans, better)))
    return faults, known


def _remarks(experiment: Experiment, found: TrialCheck) -> list[str]:
    """Return remarks on metrics of `search.also` that the first iteration lacks, on parameters that a command never
    names, and on rare checkpoints."""
    names = [one.metric for one in experiment.search.also if found.metrics and one.metric not in found.metrics]
    remarks = [
        f"search.also: {name} is not among the metrics of the first iteration ({', '.join(found.metrics)}); report it, "
        "or correct its name"
        for name in names
    ]
    problems = " ".join(problem.line for problem in found.problems)
    if isinstance(experiment.entrypoint, Program) and "the command never names" not in problems:
        remarks += [
            f"entrypoint.command never names {name}, which changes nothing then, unless the program reads "
            f"RUBBERBAND_CONFIG; write ${{{name}}} where it belongs, or ${{args}}"
            for name in unused(words_of(experiment.entrypoint.command), sorted(check_names(experiment.search.space)))
        ]
    resources, written = experiment.resources, found.checkpoint_every
    planned = resources.spot.checkpoint_iterations
    if resources.market == "spot" and written is not None and written > planned:
        remarks.append(
            f"the trial's checkpoint_every is {written}, and plans assume resources.spot.checkpoint_iterations="
            f"{planned}: interruptions cost more than planned; write -s resources.spot.checkpoint_iterations={written}"
        )
    return remarks


def _unfinished(found: TrialCheck, limit_s: float) -> Sequence[TrialFault]:
    if found.is_finished or found.problems:
        return ()
    line = f"{found.step}: not over after {format_duration(limit_s)}; "
    if found.waits:
        line += f"{found.waits}; correct it, or "
    return (TrialFault(line=f"{line}allow more with --limit {format_duration(3 * limit_s)}"),)


def _segment(experiment: Experiment, trial: int, configuration: Mapping[str, Any], seed: int, device: Any) -> Segment:
    return Segment(
        trial=trial,
        attempt=1,
        config=configuration,
        seed=seed,
        data_seed=experiment.search.sampler.seed,
        metric=experiment.search.metric,
        rank=0,
        num_workers=1,
        rendezvous=None,
        device=device,
        from_iterations=0,
        until_iterations=1,
        checkpoint=None,
        batch=experiment.batch.to_plain(),
        balance=experiment.batch.balance.to_plain(),
        verify=experiment.batch.verify,
        training=experiment.training.to_plain(),
        trials_per_gpu=experiment.resources.trials_per_gpu,
        max_iterations=max(map(total_iterations, experiment.brackets())),
    )


def named_entrypoint(experiment: Experiment, search_path: Sequence[str | os.PathLike[str]] = ()) -> Entrypoint:
    """Return the experiment's entry point, with its environment; a name is not imported.

    Raises EntrypointError, or InputError for one that is missing, or a secret that is not set.
    """
    if experiment.entrypoint is None:
        raise InputError("entrypoint: missing; name what to train, such as entrypoint: examples.digits:DigitsTrial")
    environment = experiment.environment(os.environ)
    found = entrypoint_of(experiment, search_path)
    if found.command is not None and any(text in word for word in found.command.words for text in environment.masks()):
        raise InputError(
            "entrypoint.command: it holds the value of a secret, which the journal would keep and `ps` shows; let the "
            "program read the variable"
        )
    if found.pickled is not None and any(text.encode() in found.pickled for text in environment.masks()):
        raise InputError(
            f"entrypoint: {found} holds the value of a secret, which the journal would keep; read it inside of the "
            "trial, or put the trial into a module of its own"
        )
    return replace(found, environment=environment)


def _gangs(experiment: Experiment, max_gpus: int) -> tuple[int, ...]:
    """Return the numbers of GPUs, up to `max_gpus`, that a plan may give a trial on any instance type."""
    on_demand = experiment.resources.model_copy(update={"market": "on_demand"})  # the price of spot may be unknown
    asked, every = experiment.resources.gpus_per_trial, offers(on_demand)
    return tuple(
        sorted({size for each in every for size in gang_sizes(each.gpus, asked.least, max_gpus, asked.sizes or ())})
    )


def widest_gang(experiment: Experiment, table: Table | None, profiles: Profiles | None) -> int:
    """Return the most GPUs of a trial on any of the experiment's instance types. Raises InputError."""
    return max(most for _, most in _ranges(experiment, table, profiles))


def narrowest_gang(experiment: Experiment, table: Table | None, profiles: Profiles | None) -> int:
    """Return the fewest GPUs of a trial on any of the experiment's instance types. Raises InputError."""
    return min(least for least, _ in _ranges(experiment, table, profiles))


def with_narrowest_gang(experiment: Experiment, gpus: int) -> Experiment:
    """Return the experiment whose trials have at least `gpus` GPUs, on any type."""
    return experiment.with_least_gang(gpus) if gpus > experiment.resources.gpus_per_trial.least else experiment


def _ranges(experiment: Experiment, table: Table | None, profiles: Profiles | None) -> list[tuple[int, int]]:
    """Return the fewest and the most GPUs of a trial on each instance type that can hold one."""
    found, too_small = list[tuple[int, int]](), list[GangTooLargeError]()
    for rented in offers(experiment.resources, table=table):
        profile = profiles.get(rented.instance_type) if isinstance(profiles, Mapping) else profiles
        known = None if profile is None else known_gpus(experiment, rented, profile)
        try:
            gangs = with_least_gang(experiment, rented, profile, table)
        except GangTooLargeError as error:
            too_small.append(error)
        else:
            found.append((gangs.resources.gpus_per_trial.least, gangs.max_gpus_per_trial(rented.gpus, known)))
    if not found:
        raise too_small[0]
    return found
