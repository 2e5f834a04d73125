"""The keys of the experiment file as types, for `rubberband.tune`, `estimate`, `Experiment` and your annotations.

Made from the JSON Schema of the file by `python -m tests.builders.experiment_types`. Type checkers read it; a program
imports it only if you do: `search: rubberband.types.SearchDict = {...}` is a mapping with checked keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict

if TYPE_CHECKING:
    from rubberband.spec.experiment import Experiment


class AlsoDict(TypedDict, total=False):
    """A metric that is reported beside the one that ranks."""

    metric: Required[str]
    """Its key in the reported metrics."""
    mode: Literal["min", "max"]
    """Whether a lower or a higher value is better; with one limit it follows: min from at_most."""
    at_most: float | None
    """Highest value of a feasible trial. Trials that exceed it, or do not report the metric, rank behind the
    others."""
    at_least: float | None
    """Lowest value of a feasible trial."""


class AshaDict(TypedDict, total=False):
    """Asynchronous successive halving (Li et al. 2020, Algorithm 2; Ray Tune's words): no trial waits for its rung.
    The rungs are those of `sha`. A trial pauses at the end of a rung and goes on when it is among the best
    1/`reduction_factor` of the results there. A free slot takes such a trial, of the highest rung, else a new one.
    The search ends when all trials have started and none may go on."""

    num_samples: int | Literal["auto"]
    """Trials to start; auto: as many as deadline and budget allow. The grid sampler needs none: every configuration
    of the grid is a trial."""
    max_t: Required[int | Literal["auto"]]
    """Iterations of a trial that is never stopped; auto: as many as deadline and budget allow."""
    type: Required[Literal["asha"]]
    grace_period: int
    """Iterations of every trial before the first ones are stopped."""
    reduction_factor: int
    """With 4, a quarter of the trials is promoted, and trains four times longer."""


class AsyncTimesDict(TypedDict, total=False):
    """Mean seconds of one update of a worker that trains alone, by the place where they pass."""

    compute_s: Required[float]
    """To compute a gradient."""
    up_s: Required[float]
    """To send the gradient to the servers."""
    server_s: Required[float]
    """To apply it: the longest of the servers."""
    down_s: Required[float]
    """To fetch the parameters."""


class AsyncDict(TypedDict, total=False):
    """The queueing model that asynchronous training is planned with."""

    times: Required[AsyncTimesDict]
    """The times of one worker, measured with the servers below."""
    updates_per_iteration: Required[float]
    """Updates of an iteration, by all workers together."""
    overhead_s: float
    """Time that one worker spends on an iteration beside its updates: evaluation, checkpoint."""
    servers: int
    """Parameter servers."""
    largest_shard: float | None
    """Share of the model's bytes on the server that holds most; by default they are split evenly."""
    blend: float | None
    """Place of the throughput in its band: 0 is the low end, 1 the high end. Measured gangs of two or more workers
    count instead where they show it."""


class AwsDict(TypedDict, total=False):
    """The renting of instances from EC2; read if `provider` is `aws`. All defaults work."""

    image: str | None
    """An AMI (`ami-…`) or an SSM parameter that names one (`ssm:/aws/service/…`). By default the latest Deep
    Learning AMI for the type's architecture."""
    install: str | None
    """Python packages that an instance installs beside the driver's rubberband, such as `scikit-learn`. Packages
    get the driver's versions, unless a version is given here. The URL of a wheel (https:// or s3://) of
    rubberband-tune replaces the driver's. `none` for an image that has everything."""
    index_url: str | None
    """Your own package index (https:// or file://), from which instances install rubberband-tune in the driver's
    version and everything else (uv, pip, setuptools and wheel too). By default they install the driver's own files,
    as a wheel from the bucket of `checkpoints`, and other packages from PyPI."""
    setup: Sequence[str]
    """Shell commands that an instance runs as root before it joins."""
    subnets: Sequence[str]
    """Subnets in the order of attempts, one per zone. By default those of the driver's VPC."""
    security_group: str | None
    """By default a new one in the VPC, with ingress from itself only."""
    reservation: str | None
    """A capacity reservation or a capacity block of this account (`cr-…`) in which instances are launched, on
    demand. RubberBand never buys one."""
    key_name: str | None
    """An SSH key pair; by default none."""
    worker_profile: str
    """The instance profile (IAM) of instances; its role needs cloud/aws/policies/worker.json."""
    head_profile: str
    """The instance profile of the head that `rubberband cloud up` starts; its role needs
    cloud/aws/policies/driver.json and session.json (`rubberband aws setup`)."""
    head_instance_type: str
    """The type of the head that `rubberband cloud up` starts."""
    head_idle: float | str
    """The head stops itself after this time without an experiment or a signed-in user: at least 10 min, or 0 for
    never. A stopped head costs only its disk."""
    guard_role: str | None
    """The role with which AWS terminates an instance that outlives its lease because its guest never booted and its
    driver died (cloud/aws/policies/guard.json). Without the role, or with null, such instances stay."""
    owner: str
    """The tag `rubberband:owner` of all rented resources; the policies allow terminating only those."""
    volume_gb: int | None
    """Size of the root volume; by default the image's."""
    driver_address: str | None
    """IP address at which instances reach the driver's machine; by default its address in the VPC."""


class BatchDict(TypedDict, total=False):
    """The choice of a trial's batch size. All keys but `policy`, `balance` and `verify` are for `policy:
    goodput`."""

    policy: Literal["fixed", "goodput"]
    """fixed: the trial's own; goodput: the one with the most progress per second on the trial's GPUs."""
    initial: int | None
    """Samples per optimizer step at the start, over all GPUs of the trial, and at least; by default the trial's own
    batch size."""
    max: int | None
    """Most samples per optimizer step; by default 32 times the initial ones."""
    max_per_gpu: int | None
    """Most samples in one pass on one GPU; by default the trial's own limit."""
    accumulation: bool
    """Whether gradients may be accumulated over several passes, if a batch does not fit otherwise."""
    lr_scaling: str | None
    """Rule for the learning rate of a batch: adascale, linear, sqrt, legw, or module:function; by default adascale,
    or sqrt for optimizers such as Adam."""
    warmup_epochs: float
    """Epochs of warm-up at the initial batch size, for legw."""
    interval: int
    """Optimizer steps between choices of the batch size."""
    balance: BatchBalanceDict
    """How the workers of a trial divide a batch; also for `policy: fixed`."""
    verify: bool
    """Whether the weights of a trial's workers are compared at every SYNC; a difference fails the trial. Also for
    `policy: fixed`."""


class BatchBalanceDict(TypedDict, total=False):
    """The division of a batch among the workers of a trial."""

    policy: Literal["auto", "equal", "paper"]
    """auto: by the measured speed of each worker, where that pays; equal: the same for all; paper: by the
    algorithms of LB-BSP as printed."""
    max_share: float | None
    """Largest part of a batch on one worker, such as 0.5; never less than an equal share. By default what its
    memory holds."""


class BooleanDict(TypedDict, total=False):
    """How a program reads true and false."""

    style: Literal["true/false", "True/False", "1/0", "flag"]
    """`true/false`, `True/False` and `1/0` are words. With `flag` an option is written for true, and none for
    false. argparse's `store_true` takes a `flag`; Fire, `ast.literal_eval` and `text == "True"` read
    `True/False`."""


class ConstraintsDict(TypedDict, total=False):
    """The limits of time and money."""

    deadline: float | str | datetime | None
    """A duration from the start, or an absolute time with its zone."""
    max_cost: float | str | None
    """Upper limit of the whole bill, in US dollars."""
    confidence: float
    """Probability of keeping both limits that a plan must reach if the profile is noisy."""
    objective: Literal["min_cost", "min_time"]
    """The cheapest plan within the deadline, or the fastest within the budget; both limits hold either way."""
    iteration_timeout: float | str | None
    """A trial without a report for this time counts as hung; by default it follows from the profile."""
    max_failures: int
    """Retries of a trial whose process died or hung."""
    resize_in_stage: bool
    """Whether GPUs that have no trial while others of a stage train are given back or join the gangs of those."""


class CsvTrackerDict(TypedDict, total=False):
    """A CSV file, `reports.csv`, with a row for each report of each trial."""

    type: Literal["csv"]
    folder: str | None
    """Folder of the file; by default `csv` in the experiment's folder."""


FetchDict = TypedDict(
    "FetchDict",
    {"models": Sequence[str], "datasets": Sequence[str], "from": str | None, "commits": Mapping[str, str]},
    total=False,
)
"""Models and datasets of the Hugging Face hub that each instance downloads once, before its trials start."""


class GoodputDict(TypedDict, total=False):
    """The model that adaptive batches are planned with; without it they are planned as fixed ones."""

    throughput: Required[ThroughputDict]
    """Duration of an optimizer step."""
    noise_scale: Required[float]
    """The gradient noise scale, in samples: up to about this batch size a sample teaches nearly as much."""
    samples_per_iteration: Required[float]
    """Training samples of an iteration at the initial batch size."""
    limits: Required[LimitsDict]
    """The batches to choose among; the experiment's own `batch` takes precedence."""
    overhead_s: float
    """Time of an iteration beside its optimizer steps: evaluation, checkpoint."""
    points: Sequence[PointDict]
    """Measurements that the throughput was fitted to; empty where it was written by hand."""
    fit_error: float
    """Mean relative error of the fit over the points."""


class GpusPerTrialDict(TypedDict, total=False):
    """The number of GPUs that a plan may give to one trial: from `min` to `max`, or one of `sizes`."""

    min: int | Literal["auto"] | None
    """By default the smallest number that the profile has; 1 while a profile is measured. auto: the fewest GPUs of
    each instance type on which a `TorchTrial` fits: its weights, gradients and optimizer states."""
    max: int | None
    """By default the largest number that the profile has and `max_instances` instances allow; while a profile is
    measured, the GPUs of one instance. Never less than `min`."""
    sizes: Sequence[int] | None
    """The only numbers, such as [1, 2, 4], instead of `min` and `max`. A profile measures each of them that
    fits."""


class HyperbandDict(TypedDict, total=False):
    """Hyperband (Li et al. 2018): several successive halvings of one job (Ray Tune's words)."""

    type: Required[Literal["hyperband"]]
    max_t: Required[int | Literal["auto"]]
    """Iterations of a trial that is never stopped; auto: as many as deadline and budget allow."""
    reduction_factor: int
    num_samples: int | None
    """Trials in all, which fill the brackets that halve least first; by default as many as fill each bracket
    once."""


class InlineProfileDict(TypedDict, total=False):
    """A profile that is written in the experiment file."""

    seconds_per_iteration: Required[Mapping[str, float] | Mapping[int, float]]
    """GPUs -> mean seconds per iteration. Counts may be left out (between measured ones the throughput is
    interpolated, beyond the largest it stays as it is), and more GPUs may be slower."""
    resumes: bool
    """Whether a trial goes on from its checkpoint. With false, as of a program that saves none, each start of a
    trial is planned to train all earlier iterations again."""
    trial_cv: float
    """Coefficient of variation between trials: a trial's speed is its own, the same in every stage."""
    iteration_cv: float
    """Coefficient of variation between the iterations of a trial."""
    startup_cv: float
    """Coefficient of variation between the starts of trials (lognormal)."""
    mean_cv: float
    """Uncertainty of `seconds_per_iteration` itself (lognormal): an error that all trials of a run share."""
    noise: Literal["lognormal", "normal"]
    """The law of `trial_cv` and `iteration_cv`."""
    end_chance: float
    """Probability that a trial ends by itself after an iteration. Plans and limits take each trial to train to its
    end; expected times and costs count with it, and so does a rehearsal on the virtual clock."""
    goodput: GoodputDict | None
    """For trials that adapt their batch size; `seconds_per_iteration` is still that of a fixed one."""
    asynchronous: AsyncDict | None
    """For trials that train asynchronously: plans with gangs that were not measured follow from it."""
    trial_startup: float | str
    """To gang-start a trial on warm workers; the mean."""
    checkpoint_load: float | str
    """Time beyond `trial_startup` in which one machine loads a checkpoint. The machines of a gang share it: each
    loads its part of a sharded model."""
    first_iteration_extra: float | str
    """The part of `trial_startup` that passes within a first iteration: imports and data of a program or
    function."""
    cold_iteration_extra: float | str
    """The same on a fresh worker."""
    provision_delay: float | str | LognormalDelayDict | SampledDelayDict | None
    """From asking for an instance until it runs; `resources.provision_delay` counts where both are written."""
    init_delay: float | str | LognormalDelayDict | SampledDelayDict | None
    """From a running instance until its workers are warm; `resources.init_delay` counts where both are written."""


class LimitsDict(TypedDict, total=False):
    """The batches that a trial can choose among."""

    initial: Required[int]
    """Samples of the smallest batch."""
    max: Required[int]
    """Samples of the largest one."""
    max_per_gpu: int | None
    """Most samples that go through the model on one GPU at once; by default no limit is known."""
    accumulation: bool
    """Whether gradients could be accumulated when it was measured; plans follow `batch.accumulation`."""


class LognormalDelayDict(TypedDict, total=False):
    """A delay that differs from one time to the next: its mean and coefficient of variation."""

    mean: Required[float | str]
    cv: float


class MedianDict(TypedDict, total=False):
    """A trial ends when its best result so far is worse than the median of the running averages of the others that
    have come as far (Vizier's and Ray Tune's median stopping rule)."""

    after: int
    """Evaluated iterations before which no trial ends; the averages are of the results from this one on."""
    trials: int
    """Other trials that must have come as far."""


class MetricsPlaceDict(TypedDict, total=False):
    """Place of a program's metrics that it neither reports nor prints by itself as `name=number`."""

    file: str | None
    """A file below `${checkpoint}/` to which it adds lines such as `loss=0.12` or `{"loss": 0.12}`."""
    pattern: str | None
    """A regular expression of a line, with a named group for each metric, such as `loss is (?P<loss>[0-9.]+)`."""


class MlflowTrackerDict(TypedDict, total=False):
    """A run of MLflow for each trial, below one of the experiment; needs mlflow."""

    type: Literal["mlflow"]
    uri: str | None
    """Tracking URI; by default MLflow's own, such as MLFLOW_TRACKING_URI."""
    experiment: str | None
    """MLflow's experiment; by default the experiment's name."""


class NoImprovementDict(TypedDict, total=False):
    """The search ends when its best result gets no better. If several are given, the first that is reached ends
    it."""

    trials: int | None
    """Trials in a row that end their first stage, or their first rung, without an improvement."""
    time: float | str | None
    """Time without an improvement."""
    cost: float | str | None
    """Money that is spent without an improvement."""
    syncs: int | None
    """SYNCs in a row without an improvement since the one before."""
    plateau: PlateauDict | None
    """Best results that are alike."""
    min_delta: float
    """An improvement is more than this; not for `plateau`."""


class NoSchedulerDict(TypedDict, total=False):
    """No scheduler: each trial trains once, to its end, and a free slot takes the next one (Ray Tune's FIFO)."""

    num_samples: int | Literal["auto"]
    """Trials to start; auto: as many as deadline and budget allow. The grid sampler needs none: every configuration
    of the grid is a trial."""
    max_t: Required[int | Literal["auto"]]
    """Iterations (reports) of a trial, at most: 1 for code that reports once. A trial whose code ends before trains
    no longer. auto: as many as deadline and budget allow."""
    type: Required[Literal["none"]]


class NotifyAddressDict(TypedDict, total=False):
    """An address that gets notices by POST."""

    url_from: Required[str]
    """Name of the environment variable that holds the URL, where the experiment's process runs."""
    kinds: Sequence[Literal["done", "failed", "late", "near_max_cost", "trouble"]]
    """Kinds of its notices; all by default."""


class PatienceDict(TypedDict, total=False):
    """A trial ends when its metric gets no better. Only iterations that the trial evaluates count."""

    iterations: Required[int]
    """Iterations in a row without an improvement after which the trial ends."""
    min_delta: float
    """An improvement is more than this."""
    std: float | None
    """Instead of `min_delta`: the trial ends when the standard deviation of its latest `iterations` results is
    less."""
    after: int
    """Iterations before which it never ends."""


class PbtDict(TypedDict, total=False):
    """Population based training: after each generation, the worst trials continue from the best ones' checkpoints.
    They do so with changed configurations. All trials train to the end."""

    type: Required[Literal["pbt"]]
    population: Required[int]
    """Trials, all of which train in every generation."""
    generations: Required[int]
    """Stages; there is an exchange between two of them."""
    iterations: int
    """Iterations of a generation."""
    quantile: float
    """Share of the population that takes over checkpoints at an exchange, and of those that they are taken from."""
    perturb: Sequence[float]
    """Factors, of which one multiplies a number. A value of a choice moves to a neighbour instead."""
    explore: Literal["perturb", "gp"]
    """How numbers change: by `perturb` and `resample`, or as a Gaussian process has learned what they gain (PB2).
    It chooses numbers with bounds; what has none, choices, and parameters of an option change as without it."""
    resample: float
    """Probability with which a parameter is drawn anew instead."""
    mutate: Sequence[str] | None
    """Parameters that change; the others are taken over with the checkpoint, such as those that shape the model. By
    default all change."""


class PlateauDict(TypedDict, total=False):
    """The search ends when its best results are alike (Ray Tune's ExperimentPlateauStopper)."""

    top: Required[int]
    """The number of best results, over the reports of all trials."""
    std: Required[float]
    """Their standard deviation is at most this."""
    reports: int
    """For more reports in a row than this."""


class PointDict(TypedDict, total=False):
    """A measured optimizer step."""

    instances: Required[int]
    """Instances that the trial's GPUs were on."""
    gpus: Required[int]
    per_gpu: Required[int]
    """Samples that went through the model on one GPU at once."""
    accumulation: Required[int]
    """Passes beyond the first."""
    step_s: Required[float]


class ProfilesByTypeDict(TypedDict, total=False):
    """One profile per instance type, for types with different GPUs."""

    by_instance_type: Required[Mapping[str, InlineProfileDict | str]]


class ProgramDict(TypedDict, total=False):
    """A program as the trial: it is started for each segment, on every worker of the gang."""

    command: Required[str | Sequence[str]]
    """Its command line, as a text or as words. `${name}` is a parameter, `${args}` all of them as --name=value."""
    metrics: Literal["report", "stdout"] | MetricsPlaceDict
    """`report`: it calls rubberband.report; `stdout`: it prints lines such as `loss=0.12`."""
    launch: Literal["worker", "machine"]
    """Once for each worker of a gang, or (`machine`) once for each machine, for torchrun and the like."""
    booleans: BooleanDict
    """How true and false are written in the command."""
    resume: str | Sequence[str]
    """Words that are added where the program is started from a checkpoint, such as `--resume
    ${checkpoint}/last.pt`."""
    rank: bool
    """Whether one worker has torchrun's variables too; without them, most programs train without DDP."""


class ResourcesDict(TypedDict, total=False):
    """Resources on which the trials train, and values that override the catalogue's or measured ones."""

    provider: Literal["local", "aws", "ray", "virtual"] | str
    """`local`, `aws`, `ray`, `virtual`, or one that an installed package brings."""
    pool: str | None
    """A pool (`rubberband pool up`) whose instances this experiment shares with others. It sets provider, region,
    type, price and the most instances; `gpus_per_instance` below the pool's asks for parts of its instances."""
    address: str
    """Address of a Ray cluster that is there, with provider `ray`: HOST:PORT of its head, or `auto` for that of
    RAY_ADDRESS, or the one that this machine is a node of."""
    node_labels: Mapping[str, str]
    """Ray labels of the nodes that may be used, with provider `ray`; by default all nodes."""
    region: str
    """Region of EC2; by default that of `rubberband aws setup`."""
    instance_type: str | None
    """Type of all instances, such as g5.xlarge. On EC2 it sets GPUs and price."""
    instance_types: Sequence[str] | None
    """Several types, of which the planner chooses one; a single one equals `instance_type`."""
    catalogue: str | None
    """Path of a table of instance types that replaces the catalogue's own (rubberband.cloud.catalogue)."""
    market: Literal["on_demand", "spot"]
    """With `spot`, each stage of a plan is on spot or, where the deadline is tight, on demand."""
    spot: SpotMarketDict
    max_instances: int
    """Most instances at any moment."""
    gpus_per_trial: GpusPerTrialDict
    trials_per_gpu: int
    """Trials that train side by side on each GPU, up to 16, for models too small to fill one. Each has one GPU, and
    an equal part of its memory."""
    slots: int | None
    """For instances without GPUs: the trials that train at a time on one. They share its CPUs, and use no GPU of
    this machine. On a Ray cluster an instance has the CPUs of the commonest node without GPUs."""
    gpus_per_instance: int | None
    """GPUs of an instance that are used; by default the type's. `slots` sets it to the same."""
    price_per_hour: float | str | None
    """Price of one instance, on demand."""
    side_price_per_hour: float | str | None
    """Price of an instance's volume and address; by default EC2's, and 0 elsewhere. A Ray cluster has none."""
    billing: Literal["per_instance", "per_function"]
    """per_instance: each held instance is paid; per_function: GPUs are paid while a trial trains on them."""
    minimum_billed: float | str
    """An instance is billed for at least this long; by default 0 on a Ray cluster."""
    provision_delay: float | str | LognormalDelayDict | SampledDelayDict | None
    """From asking for an instance until it runs."""
    init_delay: float | str | LognormalDelayDict | SampledDelayDict | None
    """From a running instance until trials can start on it."""
    dataset_gb: float
    """Data that each instance downloads once."""
    data_price_per_gb: float | str
    """Price of a gigabyte of that data."""
    head_price_per_hour: float | str
    """Price of the machine that drives the run; on EC2 by default that of the head."""
    lease: float | str | None
    """Time that an instance outlives a dead driver, at least 2 s; by default a minute, or 10 on EC2. There, one
    that still installs may take up to 15 (1.5 times `init_delay`, if that is longer)."""
    log_limit: float | str
    """Limit of a trial's log, at least 64KB; of a longer one the beginning and the end are kept."""
    checkpoints: str | None
    """URL of the checkpoint store: a directory that every instance sees, `s3://bucket/prefix`, or a bucket of
    Google (`gs://`), Azure (`az://`, `abfs://`) or Hugging Face (`hf://`). By default one in the experiment's
    folder, and on EC2 one in the bucket of `rubberband aws setup`."""
    keep: Literal["latest", "best"]
    """Checkpoints of a trial that are kept: `latest`, the latest two; `best`, also that of its best evaluated
    iteration, for `rubberband best --iteration best`."""
    env: Mapping[str, str]
    """Variables of trials' processes on every instance, set before the trial's code is imported. Those of a program
    may have `${checkpoint}`, other places and parameters in them, which are filled when it starts."""
    secrets: Sequence[str]
    """Names of variables whose values come from the environment of `rubberband run` and `rubberband resume`. Values
    are not written down, and masked in logs."""
    fetch: FetchDict | None
    """Models and datasets that each instance downloads once."""
    aws: AwsDict
    options: Mapping[str, Any]
    """Words of a provider that an installed package brings, which describes them."""


class SampledDelayDict(TypedDict, total=False):
    """A measured delay: each of the `samples` is as likely as the others."""

    samples: Required[Sequence[float | str]]


class SamplerDict(TypedDict, total=False):
    """The drawing of configurations from the space."""

    type: Literal["random", "grid", "quasi", "optuna"]
    """`random`; `quasi` spreads the trials evenly (a Sobol sequence); `grid` trains every configuration, and is the
    default where all domains are grids; `optuna` learns from results when a bracket starts, with asha and none when
    a trial starts."""
    sampler: Literal["tpe", "gp", "cmaes", "nsgaii"] | None
    """For `optuna`: its sampler; by default tpe."""
    multi_objective: bool
    """For `optuna`: whether it learns from `metric` and the metrics of `also` alike, to find their Pareto front."""
    seed: int


class SearchDict(TypedDict, total=False):
    """The space to search, and the rules of the search."""

    space: Mapping[str, Any]
    """Name of a parameter -> its domain or constant."""
    scheduler: Required[ShaDict | AshaDict | HyperbandDict | NoSchedulerDict | WrittenStagesDict | PbtDict]
    sampler: SamplerDict
    repeats: int
    """How often each configuration is trained, each time by a trial with a seed of its own. Configurations are
    ranked by the mean of their trials, which are promoted or stopped together."""
    points_to_evaluate: Sequence[Mapping[str, Any]]
    """Configurations of the first trials; what a point leaves out is drawn by the sampler."""
    evaluated_rewards: Sequence[float]
    """The metrics of all points_to_evaluate, known beforehand: no trial trains the points, and the sampler learns
    from them."""
    warm_start: Sequence[str]
    """Names of earlier experiments of the same space and metric. A sampler that learns begins with their results;
    other samplers train the best configuration of each first."""
    metric: Required[str]
    """The key of the reported metrics that ranks trials."""
    mode: Required[Literal["min", "max"]]
    """Whether a lower or a higher metric is better."""
    also: Sequence[AlsoDict]
    """Metrics that are shown beside the one that ranks, with the trials that no other beats in all of them
    (Pareto). Where one has a limit (at_most, at_least), trials that keep it rank before those that do not."""
    stop: StopDict
    """Rules by which trials, and the whole search, end before the plan does."""


class ShaDict(TypedDict, total=False):
    """Successive halving (Ray Tune's words)."""

    num_samples: int | Literal["auto"]
    """Trials to start; auto: as many as deadline and budget allow. The grid sampler needs none: every configuration
    of the grid is a trial."""
    max_t: Required[int | Literal["auto"]]
    """Iterations of a trial that is never stopped; auto: as many as deadline and budget allow."""
    type: Required[Literal["sha"]]
    grace_period: int
    """Iterations of every trial before the first ones are stopped."""
    reduction_factor: int
    """With 4, a quarter of the trials is promoted, and trains four times longer."""


class SpotMarketDict(TypedDict, total=False):
    """The spot market; read if `market` is `spot`."""

    price_per_hour: float | str | None
    """Price of one instance; by default the catalogue's indicative one."""
    interruptions_per_hour: float
    """Interruptions of one instance; by default one in 20 hours, a guess that a measurement should replace."""
    checkpoint_iterations: int
    """Iterations between checkpoints."""
    restart: float | str | None
    """From an interruption until the trial trains again; by default both delays and the profile's trial
    start-up."""


class StopDict(TypedDict, total=False):
    """Rules by which trials, and the whole search, end before the plan does."""

    target: float | None
    """The search ends when a trial reports this value of the metric, or a better one."""
    patience: PatienceDict | None
    """A trial ends when its metric gets no better."""
    median: MedianDict | None
    """A trial ends when it is worse than half of the others were on average."""
    no_improvement: NoImprovementDict | None
    """The search ends when its best result gets no better."""
    worth: str | None
    """The search ends at a SYNC when one USD of what is left is expected to improve the metric by less, such as
    0.001 per USD. Needs constraints.max_cost or constraints.deadline."""


class TensorboardTrackerDict(TypedDict, total=False):
    """Event files for TensorBoard, a folder for each trial; needs tensorboardX or tensorboard."""

    type: Literal["tensorboard"]
    folder: str | None
    """Folder of the trials' folders; by default `tensorboard` in the experiment's folder."""


class ThroughputDict(TypedDict, total=False):
    """The parameters of the time of an optimizer step (Pollux, eqs. 8-12)."""

    alpha_grad_s: Required[float]
    """Fixed time of a pass through the model."""
    beta_grad_s: Required[float]
    """Time of each sample of a pass."""
    alpha_local_s: float
    """Time to synchronise two GPUs of one instance."""
    beta_local_s: float
    """Time for each GPU of the instance beyond the second."""
    alpha_node_s: float
    """Time to synchronise two GPUs of several instances."""
    beta_node_s: float
    """Time for each GPU beyond the second."""
    gamma: float
    """Overlap of computing and synchronising: 1 is none, 10 is almost complete."""


class TrainingDict(TypedDict, total=False):
    """Whether a trial's workers take each optimizer step together. All keys but `mode` are for `mode: async`."""

    mode: Literal["sync", "async"]
    """sync: the gradients of all workers are averaged; async: parameter servers apply each worker's on its own."""
    servers: int
    """Parameter servers of each trial: processes beside its workers, each with a part of the model."""
    max_staleness: int | None
    """Most updates by which a worker may be ahead of the slowest one; 0: all share the batch of each update, as in
    sync; by default there is no bound."""


class WandbTrackerDict(TypedDict, total=False):
    """A run of Weights & Biases for each trial, grouped by the experiment; needs wandb."""

    type: Literal["wandb"]
    project: str | None
    """Project; by default WANDB_PROJECT, or `rubberband`."""
    entity: str | None
    """User or team; by default that of the login."""
    mode: Literal["online", "offline"] | None
    """offline: written to the experiment's folder, for `wandb sync`; by default WANDB_MODE, or online."""


class WrittenStageDict(TypedDict, total=False):
    """A stage: `trials` trials train for `iterations` more iterations."""

    trials: Required[int]
    iterations: Required[int]


class WrittenStagesDict(TypedDict, total=False):
    """Stages written out one by one."""

    type: Required[Literal["stages"]]
    stages: Required[Sequence[WrittenStageDict]]


class ExperimentDict(TypedDict, total=False):
    """The keys of the experiment file; `name` and `search` are needed."""

    version: Literal[1]
    name: str
    entrypoint: Any
    """`module:attribute` of a trial, a command, or (in Python) the class or function itself; needed to run, not to
    estimate."""
    search: SearchDict
    constraints: ConstraintsDict
    resources: ResourcesDict
    profile: InlineProfileDict | str | ProfilesByTypeDict | None
    """The profile itself, the path of a file that `rubberband profile` wrote, or one of these per type."""
    batch: BatchDict
    """The choice of a trial's batch size: fixed, or adapted within limits."""
    training: TrainingDict
    """Whether a trial's workers take each optimizer step together, or train asynchronously."""
    track: (
        Sequence[
            CsvTrackerDict
            | TensorboardTrackerDict
            | MlflowTrackerDict
            | WandbTrackerDict
            | Literal["csv", "tensorboard", "mlflow", "wandb"]
        ]
        | None
    )
    """Trackers that record the trials while it runs: csv, tensorboard, mlflow, wandb."""
    notify: Sequence[NotifyAddressDict | str] | None
    """Variables with the addresses that get a notice when it ends, will be late, or has trouble."""


class TuneDict(ExperimentDict, total=False):
    """The keys of `rubberband.tune` and `rubberband.estimate`: those of the file, or a whole experiment."""

    experiment: Experiment
