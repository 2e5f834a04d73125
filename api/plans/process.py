"""The planning process of the service: `python -m rubberband.api.plans.process HOME [--live] …` (`CODE`, `LENT`).

It plans experiments, and previews other limits of one (`RestQuestion`, `RestAnswer`). It reads questions from stdin
and answers on stdout, in lines of JSON. The first line says that it is ready. It answers a question with its id, and
plans it only if the server, which may know the answer, then asks for the plan. The bytes of the answer follow a line
with their number. The process ends with stdin, or when a plan takes much longer than allowed.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import math
import resource
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

import rubberband
from rubberband.api.body import allows_code, read_experiment, require_no_paths, require_own_cluster
from rubberband.api.problems import (
    CONFLICT,
    INFEASIBLE,
    INTERNAL,
    NOT_FOUND,
    PROFILE_MISSING,
    REFUSED,
    TOO_LONG,
    HttpProblem,
    problem_of,
)
from rubberband.cloud.catalogue import table_of, types_of
from rubberband.errors import InputError, RubberbandError
from rubberband.executor.core.extending import Extension, Limits, Outlook
from rubberband.executor.journal.inbox import NewTrials
from rubberband.executor.run.allowance import with_allowance
from rubberband.executor.training.entrypoint import with_trial
from rubberband.planner import Estimate
from rubberband.planning import feasible
from rubberband.planning.clusters import on_cluster
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, Profiles
from rubberband.planning.fetching import with_fetch
from rubberband.planning.prices_and_quotas import (
    EstimateAnswer,
    answer,
    live_prices_and_quotas,
    local_prices_and_quotas,
)
from rubberband.spec.experiment import Experiment
from rubberband.units import deadline_text, format_duration, format_instant, instant_text, parse_deadline, shown
from rubberband.values.plan import Policy
from rubberband.views.queueing import about

# Other limits of an experiment: the question, and the answer.

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestQuestion:
    """Other limits for an experiment; serialised as JSON."""

    name: str
    now: float
    """Unix time of the question; for an experiment that has not started, of its expected start."""
    waits_s: float = 0.0
    """Time until that start."""
    submitted_at: float = 0.0
    """Unix time of its submission."""
    limits: Limits = field(default_factory=Limits)
    """Other limits of a started experiment, as its driver counts them."""
    trials: NewTrials | None = None
    """Trials to add to it."""
    driven: bool = False
    """Whether a driver runs it."""
    words: Json = field(default_factory=dict)
    """Settings of an experiment that has not started; empty for a started one."""
    other: Json = field(default_factory=dict)
    """The same settings with the other limits."""
    policy: Policy = "optimal"
    is_granted: bool = False
    """Whether the same request was granted before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestAnswer:
    """Expected effect of other limits."""

    extension: Extension
    had: Limits
    """Limits of a started experiment when this was planned."""
    num_trials: int = 0
    """Its trials then."""


def answered(question: Json, home: Path, code: Sequence[str] = (), allowed: Sequence[str] = ()) -> Json:
    """Return the answer to a question as JSON (infinities as Python has them). Raises RubberbandError and Problem.

    The journal of a started experiment is read from the home, or from the store in RUBBERBAND_STORE.
    """
    asked = TypeAdapter(RestQuestion).validate_python(question)
    if asked.words:
        extension = _with_deadlines(
            waiting_extension(asked.words, asked.other, asked.policy, asked.now, code, allowed, asked.waits_s), asked
        )
        found = RestAnswer(extension=extension, had=Limits())
    else:
        found = _of_begun(asked, home)
    plain: Json = TypeAdapter(RestAnswer).dump_python(found, mode="json")
    return plain


def _with_deadlines(extension: Extension, asked: RestQuestion) -> Extension:
    """Return it with the deadlines of its settings for people."""

    def named(outlook: Outlook, words: Mapping[str, Any]) -> Outlook:
        deadline = words.get("constraints", {}).get("deadline")
        if deadline is None:
            return outlook
        at = instant_of(deadline, asked.submitted_at).timestamp()
        return replace(outlook, deadline=deadline_text(at, asked.submitted_at))

    before, after = named(extension.before, asked.words), named(extension.after, asked.other)
    return replace(extension, before=before, after=after)


def read_answer(answer: Json) -> RestAnswer:
    """Parse a result of `answered`."""
    return TypeAdapter(RestAnswer).validate_python(answer)


def _of_begun(asked: RestQuestion, home: Path) -> RestAnswer:
    # Imported here: most planning processes never need it.
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.run.follower import JournalFollower, at_work

    folder = open_folder(asked.name, home)
    with closing(JournalFollower(folder)) as follower:
        follower.refresh(live=at_work(folder))
        had, num_trials = follower.limits_in_force, follower.num_trials
        extension = follower.extension(asked.limits, driven=asked.driven, trials=asked.trials)
        return RestAnswer(extension=extension, had=had, num_trials=num_trials)


# Queued experiments are planned as if they started now. Pure.


def with_instant(words: Mapping[str, Any], since: float) -> dict[str, Any]:
    """Return settings with the deadline as an instant: a duration counts from `since` (Unix time)."""
    constraints = dict(words.get("constraints", {}))
    if "deadline" in constraints:
        constraints["deadline"] = format_instant(instant_of(constraints["deadline"], since))
    return {**words, "constraints": constraints}


def instant_of(deadline: object, since: float) -> datetime:
    """Return a deadline as an instant: a duration counts from `since` (Unix time). Raises InputError."""
    parsed = parse_deadline(deadline)
    return parsed if isinstance(parsed, datetime) else datetime.fromtimestamp(since + parsed, UTC)


def with_limits(
    words: Mapping[str, Any], deadline: datetime | None, max_cost_usd: float | None, target: float | None = None
) -> dict[str, Any]:
    """Return settings with other limits; None keeps one. Raises InputError for a tighter limit."""
    if target is not None:
        search = words["search"]
        words = {**words, "search": {**search, "stop": {**search.get("stop", {}), "target": target}}}
    constraints = dict(words.get("constraints", {}))
    if deadline is not None:
        _require_later(constraints, deadline)
        constraints["deadline"] = format_instant(deadline)
    if max_cost_usd is not None:
        _require_more(constraints, max_cost_usd)
        constraints["max_cost"] = max_cost_usd
    return {**words, "constraints": constraints}


def _require_later(constraints: Mapping[str, Any], deadline: datetime) -> None:
    has = constraints.get("deadline")
    if has is None:
        raise InputError("deadline: the experiment has none to extend; leave it out")
    if isinstance(before := parse_deadline(has), datetime) and deadline <= before:
        raise InputError(
            f"deadline: {instant_text(deadline.timestamp())} is not later than the present one, "
            f"{instant_text(before.timestamp())}; give a later one"
        )


def _require_more(constraints: Mapping[str, Any], max_cost_usd: float) -> None:
    has = constraints.get("max_cost")
    if has is None:
        raise InputError("max_cost: the experiment has none to raise; leave it out")
    if max_cost_usd <= has:
        raise InputError(f"max_cost={max_cost_usd:g} USD is not more than it has ({has:g} USD); give more")


def waiting_extension(
    words: Mapping[str, Any],
    other: Mapping[str, Any],
    policy: Policy,
    now: float,
    code: Sequence[str] = (),
    allowed: Sequence[str] = (),
    waits_s: float = 0.0,
) -> Extension:
    """Return what is expected under both settings if the experiment starts at `now` (Unix time), in `waits_s`.

    Raises Problem CONFLICT if no plan is feasible, InputError for settings that cannot be planned.
    """
    after = _estimate(other, policy, now, code, allowed)
    try:
        before = _estimate(words, policy, now, code, allowed)
    except InputError:  # its deadline passed in the queue
        before = None
    targets = [each.get("search", {}).get("stop", {}).get("target") for each in (words, other)]
    starts = f"starts in about {about(waits_s)}, and times count from then" if waits_s else "nothing has started"
    found = _outlook(after, after, targets[1], f"it is queued; {starts}")
    if before is None:
        late = replace(found, deadline_s=0.0, feasible=False, reason="its deadline passes before it starts")
        return Extension(before=late, after=found, stage=0)
    return Extension(before=_outlook(before, after, targets[0], found.reason), after=found, stage=0)


def _estimate(
    words: Mapping[str, Any], policy: Policy, now: float, code: Sequence[str], allowed: Sequence[str]
) -> Estimate:
    experiment = _with_trial(Experiment.kept(words), code, allowed)
    profiles = experiment.loaded_profiles()
    assert profiles is not None, "what waits without a profile is not extended"
    return feasible.planned(
        experiment, profiles, PricesAndQuotas(), PlanningOptions(now=now, policy=policy, advise=False)
    ).estimate


def _outlook(found: Estimate, stand_in: Estimate, target: float | None, otherwise: str) -> Outlook:
    job = found.job or stand_in.job
    if job is None:
        raise HttpProblem(CONFLICT, f"with these limits no plan is feasible either: {stand_in.reason}")
    return Outlook(
        jct_s=job.prediction.jct_s,
        cost_usd=job.prediction.cost_usd,
        deadline_s=found.constraints.deadline_s,
        max_cost_usd=found.constraints.max_cost_usd,
        target=target,
        plan=job.plan,
        feasible=found.feasible,
        reason=found.reason or otherwise,
    )


# The process itself: questions come on stdin, answers go to stdout.

_VERSION = rubberband.__version__
CODE = "--code="
"""Flag before a folder with the code of entry points."""
LENT = "--lent="
"""Flag before the provider whose instances the service's pool lends."""
ALLOW = "--allow="
"""Flag before an entry point that may run."""
CLUSTER = "--cluster"
"""Flag: experiments may be on the Ray cluster of the service."""
_LIVE_GOOD_S = 60.0
"""Lifetime of an answer with live prices or measured starts."""
_MOST_BYTES = 4 << 30
"""Memory limit. Larger plans would starve the server, and exceed the time limit anyway."""
_TOO_MUCH = (
    f"planning needs more than {_MOST_BYTES >> 30} GiB of memory, the limit here; give fewer instance_types or "
    "stages, or lower max_instances or the number of trials"
)
_GARBAGE = (50_000, 20, 20)
"""Thresholds of gc."""
_SPARE_S = 5
"""Time after the server's limit at which the process ends itself: the server may be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Experiment that would start at `now` (Unix time, whole seconds), and the options of its plan."""

    experiment: Experiment
    options: Mapping[str, Any]
    """policy, frontier, size, seed, most_usd (limit of the remedies)."""
    prices: PricesAndQuotas
    now: float
    id: str
    good_s: float | None
    """Lifetime of the id of the same settings; None: unlimited."""
    words: Json
    """Settings of the experiment, without defaults."""
    option: str = ""
    """The scheduler whose row beside the plan is asked for; empty: the plan itself."""


def question_of(
    asked: Mapping[str, Any],
    home: Path,
    *,
    live: bool,
    code: Sequence[str] = (),
    allowed: Sequence[str] = (),
    lent: Sequence[str] = (),
    has_cluster: bool = False,
) -> Question:
    """Parse a question; `code` are the folders of entry points, `lent` the providers of the service's pool.

    Only entry points that are `allowed` are run, where their parameters are counted.

    `has_cluster`: experiments may be on the Ray cluster of the service.

    Raises Problem and RubberbandError.
    """
    body = asked["body"].encode("latin-1")
    experiment = read_experiment(body, asked["media_type"], asked["overrides"])
    require_no_paths(experiment)
    if experiment.resources.kind.is_borrowed and not has_cluster:
        raise HttpProblem(REFUSED, f"resources.provider: {experiment.resources.provider} is not allowed here")
    require_own_cluster(experiment)
    asked_for = _with_trial(experiment, code, allowed)
    experiment = with_fetch(on_cluster(asked_for), home, is_required=False, is_trusted=False)
    prices, good_s = PricesAndQuotas(), None
    if live and experiment.resources.kind.is_rented:
        is_lent = experiment.resources.provider in lent
        prices, good_s = (
            with_allowance(live_prices_and_quotas(experiment, home), experiment, home, is_lent=is_lent),
            _LIVE_GOOD_S,
        )
    elif experiment.resources.kind.is_borrowed:
        good_s = _LIVE_GOOD_S
    elif experiment.resources.kind.is_this_machine and experiment.entrypoint is not None:
        prices, good_s = local_prices_and_quotas(experiment, home), _LIVE_GOOD_S
    if experiment.resources.gpus_per_trial.min == "auto" or experiment.resources.fetch is not None:
        good_s = _LIVE_GOOD_S  # the code of the trial may change, and what the hub has
    if experiment.constraints.deadline_at is not None:
        good_s = 1.0
    options = {name: asked[name] for name in ("policy", "frontier", "size", "seed", "most_usd")}
    words = asked_for.given_words()
    found = words if experiment is asked_for else experiment.given_words()
    return Question(
        experiment=experiment,
        options=options,
        prices=prices,
        now=asked["now"],
        id=_identity(experiment, found, options, prices, asked["now"]),
        good_s=good_s,
        words=words,
        option=asked.get("option", ""),
    )


def _with_trial(experiment: Experiment, code: Sequence[str], allowed: Sequence[str]) -> Experiment:
    """Return the experiment with what its trial's source says; only code that is allowed is run to know more.

    It runs without the variables of the experiment, as some of them run other code.
    """
    named, resources = experiment.entrypoint, experiment.resources
    if named is not None and not (isinstance(named, str) and allows_code(named, allowed)):
        return with_trial(experiment, code, memory=f"entrypoint {shown(str(named))} is not allowed to run here")
    bare = experiment.model_copy(update={"resources": resources.model_copy(update={"env": {}, "secrets": ()})})
    return with_trial(experiment, code, memory=with_trial(bare, code).memory)


def _identity(
    experiment: Experiment, words: Json, options: Mapping[str, Any], prices: PricesAndQuotas, now: float
) -> str:
    """Return an id of everything that the answer depends on, and of nothing else."""
    table = table_of(experiment.resources, table=prices.table)
    rows = [
        repr(table.get(name)) for name in (*types_of(experiment.resources), experiment.resources.aws.head_instance_type)
    ]
    asked = {
        "version": _VERSION,
        "words": words,
        "options": options,
        "now": None if experiment.constraints.deadline_at is None else now,
        "prices": [*rows, repr(prices.room), *prices.notes],
        "starts": repr(prices.starts),
        "function": experiment.is_function,
    }
    if experiment.resources.fetch is not None:
        asked["fetch"] = [*map(str, experiment.fetch_s), *experiment.notes]
    if experiment.resources.gpus_per_trial.min == "auto":
        asked["memory"] = repr(experiment.memory)
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).digest()
    return base64.urlsafe_b64encode(digest[:24]).decode()


def planned(question: Question) -> tuple[int, bytes]:
    """Plan; return status and body of the answer. Raises Problem and RubberbandError."""
    profiles = question.experiment.loaded_profiles()
    if profiles is None:
        raise HttpProblem(
            PROFILE_MISSING,
            "profile: is required to plan; measure one with `rubberband profile`, or write "
            "profile: {seconds_per_iteration: {1: 60}}",
        )
    given = dict(question.options)
    options = PlanningOptions(now=question.now, to_size=given.pop("size"), **given)
    if question.option:
        return 200, _option(question, profiles, replace(options, compare=True, advise=False, frontier=False))
    found = answer(question.experiment, profiles, question.prices, replace(options, simulate=False))
    data = found.to_json()
    for option in data["options"]:
        if option.get("pending"):
            option["url"] = f"/v1/plans/{option_id(question.id, option['scheduler'])}"
    if found.estimate.feasible:
        return 200, json.dumps(data | {"id": question.id}, allow_nan=False).encode()
    problem = infeasible(found, data, question.id)
    return problem.kind.status, json.dumps(problem.to_json(), allow_nan=False).encode()


def option_id(plan: str, scheduler: str) -> str:
    """Return the id of the row of another scheduler beside a plan."""
    return f"{plan}/options/{scheduler}"


def _option(question: Question, profiles: Profiles, options: PlanningOptions) -> bytes:
    """Return the row of another scheduler, simulated where it was pending. Raises Problem NOT_FOUND without one."""
    found = feasible.planned(question.experiment, profiles, question.prices, options).estimate.to_json()
    row = next((one for one in found["options"] if one.get("scheduler") == question.option), None)
    if row is None:
        detail = f"plan {question.id} has no option with scheduler {shown(question.option)}; its options name theirs"
        raise HttpProblem(NOT_FOUND, detail)
    return json.dumps(row, allow_nan=False).encode()


def infeasible(found: EstimateAnswer, data: Json, identity: str) -> HttpProblem:
    """Return the problem that no plan meets the limits, with the nearest limits and the remedies."""
    estimate = found.estimate
    if estimate.nearest is not None:
        jct_s, cost_usd = estimate.nearest.jct_s, estimate.nearest.cost_usd
        detail = estimate.reason or "no plan meets the constraints"
    else:
        assert estimate.prediction is not None, "an infeasible answer has a nearest plan"
        jct_s, cost_usd = estimate.prediction.jct_s, estimate.prediction.cost_usd
        detail = "the plan of this policy does not keep the limits; change the policy, or raise the limits"
    words = {"deadline": format_duration(math.ceil(jct_s)), "max_cost": math.ceil(cost_usd * 100.0) / 100.0}
    nearest = {"jct_s": jct_s, "cost_usd": cost_usd}
    return HttpProblem(
        INFEASIBLE,
        detail,
        nearest=nearest,
        nearest_words=words,
        remedies=data.get("remedies", []),
        estimate=data,
        id=identity,
    )


def serve(
    questions: BinaryIO,
    answers: BinaryIO,
    home: Path,
    *,
    live: bool,
    code: Sequence[str] = (),
    allowed: Sequence[str] = (),
    lent: Sequence[str] = (),
    has_cluster: bool = False,
) -> None:
    """Answer questions until stdin ends."""
    while line := questions.readline():
        asked = json.loads(line)
        signal.alarm(math.ceil(asked["planning_s"]) + _SPARE_S)
        try:
            if "rest" in asked:
                _tell(answers, {"rest": answered(asked["rest"], home, code, allowed)})
                continue
            question = question_of(
                asked, home, live=live, code=code, allowed=allowed, lent=lent, has_cluster=has_cluster
            )
            _tell(answers, {"id": question.id, "good_s": question.good_s})
            if questions.readline() == b"plan\n":
                status, body = planned(question)
                _tell(answers, {"status": status, "words": question.words, "length": len(body)}, body)
        except RubberbandError as error:
            _tell_problem(answers, problem_of(error))
        except HttpProblem as problem:
            _tell_problem(answers, problem)
        except MemoryError:
            _tell_problem(answers, HttpProblem(TOO_LONG, _TOO_MUCH))
        except Exception:
            traceback.print_exc()
            _tell_problem(
                answers, HttpProblem(INTERNAL, "planning failed through an error of the service; see its log")
            )
        finally:
            signal.alarm(0)


def _tell(answers: BinaryIO, line: Json, body: bytes = b"") -> None:
    answers.write(json.dumps(line).encode() + b"\n" + body)
    answers.flush()


def _tell_problem(answers: BinaryIO, problem: HttpProblem) -> None:
    _tell(answers, {"problem": problem.kind.slug, "detail": problem.detail, "extensions": problem.extensions})


def _limit_memory() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MOST_BYTES if most == resource.RLIM_INFINITY else min(most, _MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def main() -> None:
    """Serve the parent, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    # Collections skip imported modules, which stay. They are rare: planning makes few cycles and many lasting objects.
    gc.freeze()
    gc.set_threshold(*_GARBAGE)
    home, *flags = sys.argv[1:]
    _tell(sys.stdout.buffer, {"ready": True})
    code, allowed, lent = (
        [flag.removeprefix(of) for flag in flags if flag.startswith(of)] for of in (CODE, ALLOW, LENT)
    )
    is_live, has_cluster = "--live" in flags, CLUSTER in flags
    serve(
        sys.stdin.buffer,
        sys.stdout.buffer,
        Path(home),
        live=is_live,
        code=code,
        allowed=allowed,
        lent=lent,
        has_cluster=has_cluster,
    )


if __name__ == "__main__":
    main()
