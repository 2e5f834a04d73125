"""The JSON of the service's answers, once for all: clients read it, views write it, and the OpenAPI document shows it.

Instants are Unix time in seconds, `_s` means seconds, `_usd` US dollars. Answers are not validated against these types
when they are sent; `tests/unit/test_wire.py` does that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, GetPydanticSchema, with_config
from typing_extensions import TypedDict  # pydantic does not take that of typing before Python 3.12

from rubberband.states import ExperimentState, State

JsonState = Annotated[State, GetPydanticSchema(lambda _, handler: handler(ExperimentState))]
"""The value of a state; in the OpenAPI document ExperimentState, which explains it."""


@with_config(extra="allow", use_attribute_docstrings=True)
class Answer(TypedDict):
    """Base of every answer: more may be added to it, so clients leave alone what they do not know."""


class ProblemAnswer(Answer):
    """An error (RFC 9457)."""

    type: str
    """Kind of problem: a path of this service that explains it."""
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str
    """One line: the problem, the value, the limit and the remedy."""


class KindView(Answer):
    """A kind of problem."""

    type: str
    title: str
    status: int
    explanation: str
    """The cause, and what to do."""


class SummaryView(Answer):
    """Status of an experiment; all zero or null before it started."""

    trials: int
    stages: int
    stage: int
    """The current stage; of several brackets, how many stages are over."""
    brackets: int
    """How many chains of stages there are: one, or several for hyperband."""
    iterations: int
    target_iterations: int
    instances: int
    max_instances: int | None
    """The most that it may hold, if it was limited while it ran."""
    started_at: float | None
    ended_at: float | None
    jct_s: float
    unit: Literal["USD", "GPU-h"]
    """Unit of its amounts, also of those named usd: GPU-hours on a Ray cluster without a price."""
    cost_usd: float
    """With the measuring of the profile, like every cost here, and max_cost."""
    profiling_cost_usd: float
    """The part of it for which the profile was measured."""
    month_at: float | None
    """Begin of the calendar month (UTC) in which it spent last."""
    month_cost_usd: float
    """The part of `cost_usd` that was spent in that month."""
    planned_jct_s: float | None
    planned_cost_usd: float | None
    shortest_jct_s: float | None
    """Time of the shortest plan within its budget, if it was queued; with 95 % probability where times vary."""
    forecast_jct_s: float | None
    forecast_cost_usd: float | None
    deadline_s: float | None
    """Seconds from the start."""
    deadline: str
    """The deadline for people: an instant and the time from the submission, or a duration; empty without one."""
    max_cost_usd: float | None
    metric: str
    mode: Literal["max", "min"]
    best_value: float | None
    best_trial: int | None
    best_note: str
    """Remark on the best trial: the mean of its configuration's repeats, and whether it is feasible; may be empty."""
    added_trials: int
    """Trials that were added while it did not run, and that a resume trains."""
    is_extended: bool
    """Whether it has ended and was extended since, so that a resume continues it."""


class QueueView(Answer):
    """Place of an experiment in the queue, or where it would come in. Instants are Unix time in seconds."""

    place: int
    """1 starts next."""
    ahead: int
    """Experiments that have a slot, or start before it."""
    start_at: float | None
    """Expected start; null where one ahead has no plan yet."""
    last_start_at: float | None
    """The last start that meets its deadline, by the shortest plan; null without a deadline."""
    text: str
    """Place and expected start in words."""
    warning: str
    """Why its deadline cannot be met, so that it is refused at its turn; empty as long as it can."""
    deadline: str | None
    """With a warning: a deadline that can be met, from the submission on; null where the start is not known."""


class ExperimentView(Answer):
    """An experiment, as lists show it. Instants are Unix time in seconds."""

    name: str
    state: JsonState
    owner: Annotated[str, Field(description="Name of the token that submitted it; empty without one.")]
    created_at: float
    changed_at: float
    reason: Annotated[str, Field(description="Reason for its state, in one line.")]
    policy: str
    plan: Annotated[str | None, Field(description="Id of the plan with which it was submitted.")]
    attempt: Annotated[int, Field(description="Number of processes that were started for it.")]
    entrypoint: str | None
    provider: str | None
    slack_s: Annotated[
        float | None, Field(description="Seconds between its (expected) end and its deadline; null without one.")
    ]
    tags: Annotated[list[str], Field(description="In lower case, by alphabet.")]
    note: str
    archived: Annotated[bool, Field(description="Whether lists leave it out once it does not run.")]
    rehearsal: Annotated[
        bool, Field(description="Whether nothing is trained (virtual clock): it has no best trial, and costs nothing.")
    ]
    charged: Annotated[bool, Field(description="Whether its amounts are paid for, and not only metered.")]
    summary: SummaryView
    queue: NotRequired[QueueView]
    """Its place in the queue, while it waits for a slot."""


class RemovalView(Answer):
    """Effect of deleting an experiment."""

    name: str
    deleted: bool
    """Whether it is deleted, or was only looked at."""
    checkpoints: int
    """Files of checkpoints that go with it."""
    size_bytes: int
    """Size of all that goes."""
    elsewhere: str
    """Place of checkpoints that stay; empty if there are none elsewhere."""
    text: str
    """Effect in one line."""


class SubmittedView(ExperimentView):
    """An experiment that was accepted just now."""

    notes: list[str]
    """Remarks on what was changed, such as fewer instances in a smaller pool."""


class ExperimentPage(Answer):
    """A page of experiments, newest first."""

    items: list[ExperimentView]
    next: str | None
    """The cursor of the next page; null on the last one."""


class StageView(Answer):
    """A stage, planned against actual."""

    stage: int
    trials: int
    iterations: int
    gpus_per_trial: int
    trials_per_gpu: int
    place: Literal["GPU", "slot"]
    planned_instances: int
    instances: int
    planned_s: float
    actual_s: float | None
    planned_cost_usd: float
    actual_cost_usd: float | None
    promoted: list[int]
    start_s: float | None
    bracket: int | None
    """The bracket that it belongs to; null where there is only one."""
    rung: int
    """Its number within its bracket."""
    lane: int
    """Brackets of one lane run one after another, lanes side by side."""
    added: bool
    """Whether its bracket was added to the search: what is planned is what was planned then."""
    running: int
    """Its trials that train now; so `queued`, `done` and `failed`, all 0 before it has begun."""
    queued: int
    done: int
    failed: int
    iterations_done: int
    """Sum over its trials."""
    iterations_expected: int
    """Likewise, at its end: without those of trials that ended by themselves or were stopped."""


class RungView(Answer):
    """A rung of a search whose trials climb rungs without a SYNC (asha)."""

    rung: int
    iterations: int
    """Iterations in all that a trial has done at its end."""
    trials: int
    """Trials that started in it, or were promoted to it."""
    ended: int
    promoted: int


class Expectation(Answer):
    """Time and cost in the end, as planned or forecast."""

    jct_s: float | None
    cost_usd: float | None


class Best(Answer):
    """The best trial so far."""

    trial: int
    value: float | None
    iterations: int
    configuration: dict[str, Any]
    metrics: dict[str, float | None]
    standing: dict[str, Any] | None
    """Feasibility, and the mean of its configuration's repeats and their spread; null without limits and repeats."""


class GrantedLimits(Answer):
    """More time or money, or another target, that was granted after the start; null is no limit."""

    at_s: float
    """Seconds from the start."""
    deadline_before_s: float | None
    deadline_s: float | None
    max_cost_before_usd: float | None
    max_cost_usd: float | None
    target_before: float | None
    target: float | None
    """The value of the metric that ends the search."""
    deadline_before: str
    """Like `deadline` in words."""
    deadline: str
    """The deadline as it was written; empty without one."""


class ExperimentDetail(ExperimentView):
    """An experiment with its words and stages."""

    words: dict[str, Any]
    """The experiment as its file describes it."""
    stages: list[StageView]
    rungs: list[RungView]
    """Rungs of an asha search, whose only stage is the whole run."""
    planned: Expectation
    forecast: Expectation
    best: Best | None
    extensions: list[GrantedLimits]
    story: list[StoryEntry]
    """Ends of stages, replans, extensions, resumes and setbacks, in order."""


class StoryEntry(Answer):
    """Entry of a story, in words."""

    at_s: float
    """Seconds from the start of the run."""
    what: str
    text: str
    kind: str
    """`sync`, `kept`, `changed`, `extended`, `resumed`, `setback`, `pause`, `replaced` or `stopped`."""


class SavedCheckpoint(Answer):
    """A checkpoint of a trial that its store still has."""

    checkpoint: dict[str, Any]
    iterations: int
    """Iterations after which it was written."""
    saved_s: float
    """From the start of the run."""
    best: bool
    """Whether it is that of the trial's best evaluated iteration."""


class ScheduleStep(Answer):
    """A configuration that trained a trial's weights, until another one did."""

    after: int
    """Iterations before it."""
    trial: int
    """The trial that trained with it, whose checkpoint was taken over if it is another one."""
    configuration: dict[str, Any]


class ArtifactView(Answer):
    """A file that a trial gave to `rubberband.artifact`."""

    name: str
    file: dict[str, Any]
    iterations: int
    """Iterations after which it was saved."""
    saved_s: float
    """From the start of the run."""


class TrialView(Answer):
    """A trial."""

    trial: int
    status: str
    configuration: dict[str, Any]
    iterations: int
    metrics: dict[str, float | None]
    """Metrics of its latest report; null for values that are not finite."""
    failures: int
    failure: str | None
    standing: dict[str, Any] | None
    """Feasibility, and the mean of its configuration's repeats and their spread; null without limits and repeats."""
    checkpoint: dict[str, Any] | None
    bracket: int | None
    """The bracket that it belongs to; null where there is only one."""
    seed: int
    """The seed of its initial weights and the order of its data."""
    ended: bool
    """Whether it has ended by itself, after its iterations."""
    stopped_s: float | None
    """Time at which the user stopped it, from the start; null: not by the user."""
    ended_by: str
    """The rule of search.stop that ended it; empty: none did."""
    artifacts: list[ArtifactView]
    """Files that it gave to be kept, by name."""
    checkpoints: list[SavedCheckpoint]
    """The latest first; older ones than these are deleted as newer ones are written."""
    schedule: list[ScheduleStep]
    """The configurations that led to its weights, in order; empty if there is only its own."""


class GangView(Answer):
    """GPUs that a trial had for a while; times are seconds from the start."""

    stage: int
    start_s: float
    training_s: float | None
    """Its first step; null if it did not come to it."""
    end_s: float
    slots: list[dict[str, Any]]
    """The instance and the number of each GPU."""
    cost_usd: float
    """Its share of the bill."""


class UseView(Answer):
    """Use of machines by a trial's workers, each number a mean over its gang, over a minute of training at most."""

    stage: int
    end_s: float
    """From the start of the run."""
    seconds: float
    ago_s: float
    """Seconds from its end to the report that had it."""
    cpu: float
    """CPUs that a worker's process and its children kept busy, on average."""
    memory_bytes: int
    """The most resident memory of these processes together; of the worker with the most."""
    gpu: float | None
    """Part of the time, 0 to 1, in which the GPU computed; null where no driver says."""
    gpu_memory_bytes: int | None
    watts: float | None
    """Mean power of the GPU."""
    data_s: float | None
    """Seconds in which training waited for samples; null where the loop is the user's own."""
    peers_s: float | None
    """Seconds in which it waited for other workers; null for a gang of one."""
    checkpoint_s: float | None
    """Seconds in which it waited for a checkpoint."""


class TrialDetail(TrialView):
    """A trial, its place among the others, and what it had and cost."""

    rank: int | None
    """Its place by the metric, the best is 1; null without a metric."""
    lead: str
    """How much better or worse it is than the best of the others."""
    gpu_s: float
    cost_usd: float
    """Its share of the bill."""
    gangs: list[GangView]
    curve: list[tuple[float, int, dict[str, float | None]]]
    """Seconds from the start, iterations and metrics of every report."""
    use: list[UseView]
    """Its use of the machine while it trained, a row for a minute at most; empty where it was not measured."""


class TrialPage(Answer):
    """A page of trials, by number."""

    items: list[TrialView]
    next: str | None


class PlannedUse(Answer):
    """Instances of the first plan in a stage; times are seconds from the start."""

    stage: int
    start_s: float
    end_s: float
    instances: int
    gpus_per_trial: int


class Allocations(Answer):
    """Which instances were held when, what their GPUs did, and what was planned."""

    instances: list[dict[str, Any]]
    busy: list[dict[str, Any]]
    planned: list[PlannedUse]


class StageCost(Answer):
    """Cost of a stage."""

    stage: int
    planned_cost_usd: float
    actual_cost_usd: float | None


class BillLineView(Answer):
    """An amount of a bill."""

    line: str
    """Purpose of the charge, such as `instances` or `root volumes`."""
    usd: float


class Costs(Answer):
    """The bill so far, against the plan and the cap, in US dollars."""

    cost_usd: float
    planned_cost_usd: float | None
    max_cost_usd: float | None
    forecast_cost_usd: float | None
    profiling_cost_usd: float
    head_cost_usd: float
    bill: list[BillLineView]
    """The lines that add up to `cost_usd`."""
    paid: dict[str, float]
    stages: list[StageCost]
    instances: list[dict[str, Any]]


class RestWorthView(Answer):
    """Improvement that the rest of a search might bring beside its cost, by the learning curves at an instant."""

    at_s: float
    """From the start."""
    best: float
    """The best metric by then."""
    expected: float
    """The expected improvement of the metric; above 0 for both modes."""
    chances: list[tuple[float, float]]
    """Sizes of improvements, each with the probability of a larger one."""
    worse: float
    """Probability that the best one at the end is worse."""
    left_s: float
    left_usd: float


class Decisions(Answer):
    """Decisions at each SYNC, extensions of the limits, and what the rest might bring."""

    items: list[dict[str, Any]]
    extensions: list[GrantedLimits]
    worths: list[RestWorthView]


class LogLine(Answer):
    """A line that was printed."""

    trial: int | None
    rank: int | None
    text: str


class LogPage(Answer):
    """Lines of logs; ask again with `next` for what came since."""

    lines: list[LogLine]
    next: str


class Report(Answer):
    """Report as `rubberband report -o json` prints it (`rubberband.report/1`)."""

    name: str
    outcome: str


class OutlookView(Answer):
    """Forecast of an experiment under given limits."""

    jct_s: float | None
    cost_usd: float | None
    deadline_s: float | None
    max_cost_usd: float | None
    target: float | None
    plan: dict[str, Any]
    feasible: bool
    reason: str
    deadline: str
    """The deadline as it was written; empty without one."""


class ExtensionView(Answer):
    """Forecasts of an experiment under its limits and under other limits."""

    before: OutlookView
    after: OutlookView
    stage: int
    """The first stage that the plans cover."""
    added_s: float | None
    added_usd: float | None
    trials: list[dict[str, Any] | None]
    """Configurations of the trials that are added; null: the sampler draws it."""
    applied: bool
    """Whether it was changed, not only previewed."""


class PriceList(Answer):
    """Resources and prices of instance types (`rubberband.prices/1`)."""

    region: str
    types: list[dict[str, Any]]
    notes: list[str]


class Health(Answer):
    """Whether the service works; `checks` says of each part."""

    status: Literal["ok", "unavailable"]
    checks: NotRequired[Annotated[dict[str, str], Field(json_schema_extra={"default": {}})]]


class EventView(TypedDict):
    """Event of the feed."""

    id: int
    experiment: str
    seq: int | None
    kind: str
    occurred_at: float
    data: dict[str, Any]


class OptionView(Answer):
    """An alternative to a plan: another policy, market, instance type or scheduler."""

    policy: str
    instance_type: str
    spot: bool
    """Whether it may buy on the spot market."""
    batch: str
    scheduler: NotRequired[str]
    """The scheduler, where it is another one for the same configurations."""
    pending: NotRequired[bool]
    """True where the row is still to be simulated; it has a `url` then, and nothing of what follows."""
    url: NotRequired[str]
    """Path of the row."""
    feasible: NotRequired[bool]
    reason: NotRequired[str | None]
    """Why no plan is feasible."""
    plan: NotRequired[dict[str, Any] | None]
    prediction: NotRequired[dict[str, Any] | None]


class PlanView(Answer):
    """An estimate: what `rubberband estimate -o json` prints (`rubberband.estimate/1`), and its id."""

    id: str
    """The same question has the same one."""
    feasible: bool
    experiment: str
    policy: str
    instance_type: str
    plan: dict[str, Any]
    """`stages`, each with its instances, GPUs per trial, time and cost."""
    prediction: dict[str, Any]
    """Time in seconds and cost in US dollars, each a mean with quantiles."""
    frontier: list[dict[str, float]]
    """Plans that no other beats on both time and cost, fastest first."""
    options: NotRequired[list[OptionView]]
    """The alternatives. One that is `pending` takes a simulation; its row is at its `url`."""
    promise: NotRequired[dict[str, float] | None]
    """`start_at` and `end_at` (Unix time) that a pool would promise a submission; only with a pool and a deadline."""
    queue: NotRequired[QueueView]
    """Its place if it were submitted now; only where it would wait for a slot."""
    size: NotRequired[dict[str, Any] | None]
    """The size of a search that was sized to the limits: its `key`, `number` and `trials`."""


class PromiseView(TypedDict):
    """From when to when a pool's GPUs are promised (Unix time)."""

    start_at: float
    end_at: float


class MemberView(TypedDict):
    """An experiment that runs on the pool, or waits."""

    name: str
    owner: str
    weight: float
    """Its share relative to others."""
    state: str
    instances: int
    """Held now."""
    max_instances: int | None
    """The most that the pool allots it now; null before its first allotment."""
    promised_gpus: int
    """GPUs that it is promised now."""
    promise: PromiseView | None
    """Null without a promise."""


class PoolView(TypedDict):
    """A pool, and the experiments that share it."""

    name: str
    provider: str
    instances: int
    gpus_per_instance: int
    policy: str
    experiments: list[MemberView]


class TokenView(TypedDict):
    """A token, without its secret. Times are Unix seconds."""

    id: str
    name: str
    scope: Literal["read", "submit", "admin"]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class MadeToken(TokenView):
    """A new token."""

    token: str
    """The token itself. It is not shown again."""


class TokenList(TypedDict):
    """All tokens, oldest first."""

    items: list[TokenView]
