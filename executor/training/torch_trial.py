"""`TorchTrial`: the interface for users of PyTorch, and which of its optional methods a class overrides.

The training loop is in `loop.py`. Importing this module does not import torch.
"""

from __future__ import annotations

import inspect
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from rubberband.executor.training.metrics import EvalLoader


PrecisionName = Literal["32", "bf16", "fp16"]
SchedulerStep = Literal["iteration", "batch"]


class Mean(float):
    """A mean over samples that knows its sum and count, so that the parts of several workers can be joined.

    It is the float `sum / count`; not a number if the count is 0.

    Examples:
        >>> rubberband.Mean(45, 60)
        0.75
    """

    sum: float
    """Sum over the samples."""
    count: float
    """Number of samples, or their total weight."""

    def __new__(cls, sum: Any, count: Any) -> Mean:
        """`sum` and `count` are numbers, or tensors of one. Raises TypeError for others."""
        try:
            total, number = float(sum), float(count)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"Mean(sum, count) takes two numbers, not {sum!r:.40} and {count!r:.40}; give the sum over the samples"
            ) from None
        mean = super().__new__(cls, total / number if number else math.nan)
        mean.sum, mean.count = total, number
        return mean

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.sum, self.count


class TorchTrial(ABC):
    """One configuration's training in PyTorch, written as small methods so that the gang can be resized at any time.

    A gang runs one object per worker, made without arguments. Before every `build_…` and `…_dataset` method the
    random states of Python, NumPy and torch are set, so that all ranks agree: for datasets from the experiment's seed,
    the same in all trials, and else from the trial's; before every iteration, from the trial's seed, iteration and
    rank, so that resuming from a checkpoint is exact; on GPUs up to rounding.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> class Line(rubberband.TorchTrial):
        ...     batch_size = 64
        ...
        ...     def build_model(self, config):
        ...         return torch.nn.Linear(1, 1)
        ...
        ...     def build_optimizer(self, config, model):
        ...         return torch.optim.SGD(model.parameters(), lr=config["lr"])
        ...
        ...     def train_dataset(self, config):
        ...         x = torch.linspace(-1, 1, 512).unsqueeze(1)
        ...         return TensorDataset(x, 3 * x + 1)
        ...
        ...     def loss(self, model, batch):
        ...         x, y = batch
        ...         return torch.nn.functional.mse_loss(model(x), y)
    """

    batch_size: int = 128
    """Samples per optimizer step, over the whole gang: the same for every gang size (strong scaling)."""
    max_batch_size_per_gpu: ClassVar[int | None] = None
    """Most samples that go through the model at once; a larger share is accumulated. None: no limit."""
    samples_per_iteration: ClassVar[int | None] = None
    """Training samples of one iteration (rounded up to whole batches). None: one epoch."""
    scheduler_step: ClassVar[SchedulerStep] = "iteration"
    """Interval of the LR schedule, which steps after every iteration (ReduceLROnPlateau: with the metric) or batch."""
    precision: PrecisionName = "32"
    """Arithmetic of model and loss: `bf16` and `fp16` compute under autocast; parameters stay as they were built.

    With fp16 the loss is scaled, and steps whose gradients overflow are skipped. `build_model` may set this and the
    words below on `self`, from the configuration.
    """
    gradient_clip_norm: float | None = None
    """Largest norm of the gradient of a step, over the whole gang; a larger gradient is scaled down. None: no limit."""
    compile: bool = False
    """Whether `torch.compile` compiles the model; the machine keeps the result for later trials of the same model."""
    channels_last: bool = False
    """Whether weights of convolutions are laid out with their channels last, which is faster on GPUs in 16 bits."""
    cudnn_benchmark: bool | None = None
    """Whether cuDNN tries its kernels for each new size of a convolution, and keeps the fastest.

    None: where batches and shares are fixed, unless PyTorch is set to be deterministic.
    """
    scheduler_metric: str | None = None
    """The metric that ReduceLROnPlateau steps with; None: the experiment's."""
    find_unused_parameters: ClassVar[bool] = False
    """DistributedDataParallel's flag: needed if the loss does not use every parameter."""
    eval_batch_size: int | None = None
    """Samples of a batch of the evaluation set. None: `batch_size`, or `max_batch_size_per_gpu` if that is smaller.
    Where memory runs out it is halved."""
    eval_every: int = 1
    """Iterations from one evaluation to the next. Those between report the latest metrics again, and the iteration of
    these as `evaluated_at`. A trial's first iteration, and its last before it is compared, are always evaluated."""
    eval_on_all_ranks: ClassVar[bool] = False
    """Whether each worker calls an overridden `evaluate` with its part of the set; all metrics are `Mean`s then."""
    static_graph: bool = False
    """DistributedDataParallel's flag: every step uses the same parameters in the same way.

    It is not used with adaptive batches, nor if a step takes several passes.
    """
    sharding: ClassVar[Literal["fsdp"] | None] = None
    """How weights, gradients and optimizer states are divided among the workers of a gang, for models that do not fit
    one GPU: by `fully_shard`. None: each has all of them."""
    gradient_compression: Literal["bf16"] | None = None
    """Gangs exchange gradients in this type, with half the traffic. None: in that of the parameters."""
    num_workers: int | None = None
    """Loader workers of each GPU: processes that load the next samples while it trains. 0: none.

    The evaluation set has as many. None: one less than the CPUs for each GPU, 8 at most; none for a TensorDataset, or a
    Subset of one, without `collate`. Samples do not depend on the number: random draws in `dataset[i]` follow from the
    trial's seed, the epoch and i.
    """
    prefetch_factor: int = 2
    """Batches, or parts that are accumulated, that each loader worker loads ahead."""
    loader_timeout_s: float = 240.0
    """Longest wait for a batch of the loader workers, in seconds; then the trial fails."""
    drop_last: bool = False
    """Whether the last batch of an epoch is left out if it is smaller than the others. Adaptive batches have none."""
    checkpoint_every: ClassVar[int] = 1
    """Iterations from one checkpoint to the next; the last one of a stage always has one. A trial that resumes repeats
    those after its latest checkpoint."""
    ended: bool = False
    """Set it to True in any method, on rank 0 or on all ranks, to end the trial with the present iteration: its metrics
    count at every later SYNC, and it trains no more."""
    max_iterations: int
    """Iterations of a trial that trains to the end, such as the scheduler's `max_t`; there from `build_model` on."""
    config: Mapping[str, Any]
    """Its configuration; only of a trial that `Result.load_best` returned."""
    model: torch.nn.Module
    """The trained model; only of a trial that `Result.load_best` returned."""

    @abstractmethod
    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        """Return the model, on the CPU; it is moved to the device afterwards.

        Args:
            config: The configuration, a value for each parameter of `search.space`.

        Returns:
            The model, the same on every rank.
        """

    @abstractmethod
    def build_optimizer(
        self, config: Mapping[str, Any], model: torch.nn.Module
    ) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]:
        """Return the optimizer.

        Args:
            config: The configuration, a value for each parameter of `search.space`.
            model: What `build_model` returned, on its device.

        Returns:
            The optimizer over its parameters. A trial that overrides `step` may return several, in a list, tuple or
                mapping.
        """

    def build_scheduler(
        self, config: Mapping[str, Any], optimizer: Any, *, total_steps: int
    ) -> LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler] | None:
        """Return the LR schedule, or None for a constant learning rate. It steps as `scheduler_step` says.

        Args:
            config: The configuration, a value for each parameter of `search.space`.
            optimizer: What `build_optimizer` returned.
            total_steps: How often the schedule steps in a trial that trains to the end (adaptive batches: in batches of
                their initial size), for OneCycleLR or a warm-up. A method without this parameter is called without it.

        Returns:
            The schedule. A trial that overrides `step` may return several.
        """
        return None

    @abstractmethod
    def train_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        """Return the training set; the same on every rank.

        Args:
            config: The configuration, a value for each parameter of `search.space`.

        Returns:
            A map-style dataset (`len` and `[i]`), or an IterableDataset that every worker reads from front to end; then
                set `samples_per_iteration`.
        """

    def eval_dataset(self, config: Mapping[str, Any]) -> Dataset[Any] | None:
        """Return the map-style evaluation set, the same on every rank.

        Args:
            config: The configuration, a value for each parameter of `search.space`.

        Returns:
            The dataset. None: `evaluate` is not called and `train_loss` is the only metric.
        """
        return None

    def on_iteration(self, model: torch.nn.Module, iterations: int) -> None:  # noqa: B027 - optional hook
        """Prepare an iteration, after which `iterations` are done: thaw layers, add groups to the optimizer.

        It is called on every rank, and must do the same on each; random draws are the same. The next checkpoint holds
        which parameters are trained, and by which groups.

        Args:
            model: Your own model.
            iterations: Iterations that are done.
        """

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor | tuple[torch.Tensor, Mapping[str, Any]]:
        """Return the mean loss over the samples of `batch`, a scalar. `model` is your own, with its methods and parts.

        Or return it with a mapping of metrics, each a mean over the batch (a number or a scalar tensor) and the same
        in every batch: `(loss, {"accuracy": …})` is reported as `train_loss` and `train_accuracy`, means over the
        iteration, and by the default `evaluate` as `loss` and `accuracy`. A trial that overrides `step` needs `loss`
        only for the default `evaluate`.

        Args:
            model: Your own model.
            batch: What `collate` made, on the model's device.

        Returns:
            The loss, or the loss and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss() for the default evaluate(); write one of them")

    def step(
        self, model: torch.nn.Module, optimizers: Any, batch: Any
    ) -> torch.Tensor | float | tuple[torch.Tensor | float, Mapping[str, Any]]:
        """Take the step of one batch yourself: several optimizers, closures such as those of LBFGS.

        Write it as for one process, with `zero_grad()`, `backward()` and `optimizer.step()`. After each `backward()`,
        gradients are those of all workers. Batches are fixed then, and a share goes through at once.

        Args:
            model: Your own model.
            optimizers: What `build_optimizer` returned.
            batch: This worker's share of the batch.

        Returns:
            The mean loss over the batch, and metrics as `loss` may.
        """
        raise NotImplementedError("step() is not overridden: the gradient of loss() is given to the optimizer")

    def weight(self, batch: Any) -> float | torch.Tensor:
        """Return what `batch` counts, a number of at least 0: its tokens or valid pixels. By default, its samples.

        `loss` is then the mean over them. Gradients and means over micro-batches, workers and batches are weighted
        by it, so that they are means over all tokens of a step, an iteration or the evaluation set.

        Args:
            batch: What `collate` made.

        Returns:
            The weight of the batch.
        """
        raise NotImplementedError("weight() is not overridden: a batch counts its samples")

    def shard(self, model: torch.nn.Module, mesh: Any) -> None:
        """Divide the model with `sharding`, by `torch.distributed.fsdp.fully_shard(part, mesh=mesh)` of its parts.

        By default, parts are the members of each `ModuleList` or `Sequential` that has several of one class. All that
        is left is divided as one part afterwards. The weights of a part are whole only while it computes.

        Args:
            model: Your own model; its parameters have no values yet.
            mesh: The workers of the gang, in one dimension.
        """
        raise NotImplementedError("shard() is not overridden: repeated layers are the parts")

    def train_mode(self, model: torch.nn.Module) -> None:
        """Put the model into training mode, before every iteration; override it to call `eval()` on frozen parts.

        `model.train()` was called before.
        """
        model.train()

    def on_step(self, model: torch.nn.Module, step: int, batch_size: int) -> None:  # noqa: B027 - optional hook
        """Run after every optimizer step on every worker, without gradients: for averages of the weights, and so on.

        It must do the same on every worker.

        Args:
            model: Your own model.
            step: The number of the trial's optimizer step, from 1.
            batch_size: Samples of this step, over the whole gang.
        """

    def state_dict(self) -> Any:
        """Return what the trial keeps beside model and optimizer, as its part of the checkpoint; taken on rank 0."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027 - optional hook
        """Restore what `state_dict` returned; called on every worker.

        Tensors are on the trial's device, but those that were in host memory, such as a generator's state, are there.
        """

    def evaluate(self, model: torch.nn.Module, loader: EvalLoader) -> Mapping[str, Any]:
        """Return metrics over the evaluation set; by default the mean loss as `loss`, and the metrics of `loss()`.

        It is called in evaluation mode and without gradients: on rank 0 with the whole set,
        while the others wait; the default, and one with `eval_on_all_ranks`, on each rank with its part. `train_loss`,
        the mean loss of the iteration's training samples, is added.

        Args:
            model: Your own model, in evaluation mode.
            loader: An iterable of batches on the model's device, in the order of the set, with `len` (batches), `sizes`
                (samples of each batch) and `dataset`.

        Returns:
            The metrics by name.
        """
        from rubberband.executor.training.metrics import mean_loss

        return mean_loss(self, model, loader)

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch from samples of a dataset; by default torch's `default_collate`.

        Args:
            samples: What `dataset[i]` returned, in order.

        Returns:
            The batch.
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    def worker_init(self, worker: int, dataset: Dataset[Any]) -> None:  # noqa: B027 - optional hook
        """Prepare a loader worker, in its own process.

        Args:
            worker: The number of the loader worker, from 0.
            dataset: Its copy of the training set, or of the evaluation set.
        """

    def reload_data(self) -> None:
        """Let loader workers have the datasets as they are now: call it in a hook that has changed one within a value.

        They start anew before the next iteration, or evaluation. New values of attributes are seen without it. Without
        loader workers, every change is seen at once.
        """
        self.data_changes += 1

    data_changes = 0

    def global_batch_size(self, config: Mapping[str, Any]) -> int:
        """Return the samples per optimizer step; override it to take them from the configuration."""
        return self.batch_size


# The optional methods of a trial: which of them a class overrides, and whether they can be called. They are looked up
# in the class alone, so an attribute self.weight or self.step of a trial is its own.


_ARGUMENTS = {
    "step": ("model", "optimizers", "batch"),
    "weight": ("batch",),
    "shard": ("model", "mesh"),
    "train_mode": ("model",),
    "on_iteration": ("model", "iterations"),
    "on_step": ("model", "step", "batch_size"),
    "state_dict": (),
    "load_state_dict": ("state",),
}
"""Optional methods, with what they are called with."""


FIXED = (
    "overrides step(), so its batches are fixed and batch.policy: goodput cannot change them; set batch.policy to "
    "fixed, or write loss() in place of step()"
)
DIVIDED = (
    'sharding = "fsdp", which does not go with training.mode: async; set training.mode to sync',
    'sharding = "fsdp", which does not go with batch.policy: goodput; set batch.policy to fixed',
)
"""Why a divided model has no parameter servers, and no adaptive batches."""
ASYNC_REFUSAL = (
    "does not go with training.mode: async; leave it out, or set training.mode to sync "
    "(docs/asynchronous.md#what-does-not-go-with-it)"
)


def override_of(trial: TorchTrial, name: str) -> Callable[..., Any] | None:
    """Return the trial's own method of that name; None if its class has only the default."""
    function = _override(type(trial), name)
    return None if function is None else types.MethodType(function, trial)


def lacks_loss(target: type) -> bool:
    """Return whether a class is one of torch trials, and has neither `loss` nor `step`."""
    if not issubclass(target, TorchTrial):
        return False
    return target.loss is TorchTrial.loss and not has_override(target, "step")


def has_override(target: type[TorchTrial], name: str) -> bool:
    """Return whether a class of trials overrides the optional method of that name."""
    return _override(target, name) is not None


def fault_of(target: type[TorchTrial]) -> str | None:
    """Return what is wrong with the optional methods of a class, in one line with the fix; None if nothing is."""
    for name, arguments in _ARGUMENTS.items():
        function = _override(target, name)
        if function is not None and not accepts(function, 1 + len(arguments)):
            given = ", ".join(("self", *arguments))
            own = inspect.signature(function)
            return (
                f"{name}{own} cannot be called by rubberband, which calls {name}({given}): write it so, or rename it "
                "if it is for your own use"
            )
    saves, loads = (_override(target, name) is not None for name in ("state_dict", "load_state_dict"))
    if saves != loads:
        has, lacks = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        return f"{has}() is there without {lacks}(): write both, so that what is saved is restored"
    return None


def _override(target: type[TorchTrial], name: str) -> Callable[..., Any] | None:
    found = inspect.getattr_static(target, name)
    if not isinstance(found, types.FunctionType) or found is inspect.getattr_static(TorchTrial, name):
        return None
    return found


def accepts(function: Callable[..., Any], arguments: int) -> bool:
    """Return whether a function, or a class, can be called with that many arguments by their places."""
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True
