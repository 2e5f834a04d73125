"""A `TorchTrial` with `sharding = "fsdp"`: FSDP2 (`fully_shard`) divides its model among the workers of its gang.

* A gang of one has the whole model, and its checkpoints are those of any trial.
* Weights begin as those of an undivided trial. Rank 0 builds the model as it is written, and the others without memory
  for parameters; then rank 0 sends each worker its part, tensor by tensor. With a checkpoint no worker builds weights.
* The pass of a step is the root of FSDP (`Pass`), so that `loss` and `evaluate` may call any part of the model. Each
  pass exchanges its gradients, also where several are accumulated: their sum would be as large as the whole model.
* Where a worker runs out of memory, its collectives break those of the others, and the segment begins again in smaller
  passes, as with DistributedDataParallel.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import Payload
from rubberband.executor.checkpoints.folders import is_archive
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.training import checkpoint
from rubberband.executor.training.failures import ELEMENTWISE, refused
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.layout import Layout
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.sharding import pieces
from rubberband.executor.training.sharding.pieces import Divided, Piece, Whole, mapped
from rubberband.executor.training.sharding.unused import Unused
from rubberband.executor.training.sharding.weightless import empty, swap_parameters, without_weights
from rubberband.executor.training.sharding.writes import Writes
from rubberband.executor.training.torch_trial import DIVIDED, TorchTrial, override_of
from rubberband.executor.training.trial import Device
from rubberband.executor.training.wrapping import (
    Exchange,
    Pass,
    SharedBuffers,
    agree_on,
    check_dense,
    lazy_names,
    parameters_of,
    passed,
)
from rubberband.units import shown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rubberband.executor.training.loop import TorchRunner

T = TypeVar("T")
LEAST_TORCH: Mapping[Device, tuple[int, int]] = {"cuda": (2, 6), "cpu": (2, 7)}
_WITH = 'sharding = "fsdp"'
_UNLIKE: Mapping[str, tuple[Any, str]] = {
    "precision": ("fp16", 'use "bf16" or "32"'),
    "gradient_compression": ("bf16", 'leave it out; precision = "bf16" halves the traffic'),
    "static_graph": (True, "leave it out"),
    "find_unused_parameters": (True, "leave it out: parameters that the loss does not use need no flag"),
    "channels_last": (True, "leave it out: parts of weights have no channels"),
    "eval_on_all_ranks": (True, "leave it out: evaluate() is called on every worker, with the whole set"),
}
"""Word -> the value that cannot be divided, and the fix."""
_UNDIVIDED = ("Adafactor", "LBFGS", "Muon", "Rprop")
"""Optimizers of torch that do not step with divided parameters."""


def make_layout(loop: TorchRunner) -> Layout | None:
    """Return the layout of a trial that is divided; None for any other. Raises TrialFailure for one that cannot be."""
    if loop.trial.sharding is None:
        return None
    require(loop)
    return Sharded(loop) if loop.gang.num_workers > 1 else Alone(loop)


def require(loop: TorchRunner) -> None:
    """Raise TrialFailure for what cannot be divided, before the model is built."""
    trial, segment, version = loop.trial, loop.segment, tuple(map(int, torch.__version__.split(".")[:2]))
    if version < (least := LEAST_TORCH[segment.device]):
        raise refused(
            f"{_WITH} needs torch {'.'.join(map(str, least))} or later on {segment.device.upper()}s, and this is "
            f"{torch.__version__}; install a later one"
        )
    if segment.training is not None:
        raise refused(f"the trial has {DIVIDED[False]}")
    if segment.batch is not None:
        raise refused(f"the trial has {DIVIDED[True]}")
    if segment.balance.policy == "paper":
        raise refused(f"{_WITH} has equal shares of a batch, and batch.balance.policy is paper; set it to equal")
    if override_of(trial, "step") is not None:
        raise refused(f"{_WITH} cannot have an own step(); write loss() in place of step()")
    _require_words(trial)


def _require_words(trial: TorchTrial) -> None:
    for word, (value, fix) in _UNLIKE.items():
        if getattr(trial, word) == value:
            raise refused(f"{_WITH} cannot have {word} = {value!r}; {fix}")


def _require_model(trial: TorchTrial, model: nn.Module) -> None:
    """Raise TrialFailure for a model that cannot be divided, also where the gang has one worker as yet."""
    _require_words(trial)  # build_model may have set them
    if names := lazy_names(model):
        raise refused(
            f"{_WITH} cannot divide lazy layers ({', '.join(names[:3])}); pass a sample through the model in "
            "build_model()"
        )
    if any(isinstance(each, nn.SyncBatchNorm) for each in model.modules()):
        raise refused(f"{_WITH} cannot have SyncBatchNorm; use BatchNorm, or a norm without statistics")
    check_dense(model)
    for name, each in model.named_parameters():
        if each.is_complex():
            raise refused(f"{_WITH} cannot divide {name} of {each.dtype}; keep real and imaginary part as a dimension")
        if not each.shape or not each.numel():
            raise refused(
                f"{_WITH} cannot divide {name} of shape {tuple(each.shape)}; give it one dimension and an element, as "
                "in torch.zeros(1)"
            )
    if override_of(trial, "shard") is None:
        _require_equal_types(model)


def _require_equal_types(model: nn.Module) -> None:
    """Raise TrialFailure where a part by default has parameters to train of several types."""
    layers = parts_of(model)
    inner = {id(each) for layer in layers for each in layer.parameters()}
    rest = [(name, each) for name, each in model.named_parameters() if id(each) not in inner]
    for named in (rest, *(layer.named_parameters() for layer in layers)):
        first: dict[torch.dtype, str] = {}
        for name, each in named:
            if each.requires_grad:
                first.setdefault(each.dtype, name)
        if len(first) > 1:
            (kind, name), (other, second), *_ = first.items()
            raise refused(
                f"{_WITH} cannot divide {name} of {kind} and {second} of {other} in one part; give all one type, or "
                "write shard() with parts of one type each"
            )


def _require_optimizer(optimizer: Optimizer) -> None:
    for kind in (getattr(torch.optim, name, None) for name in _UNDIVIDED):
        if kind is not None and isinstance(optimizer, kind):
            raise refused(f"{_WITH} cannot have torch's {kind.__name__}; {ELEMENTWISE}")


class Alone(Layout):
    """A gang of one, which has the whole model."""

    def build(self) -> nn.Module:
        module = super().build()
        _require_model(self._loop.trial, module)
        return module

    def exchange(self, optimizer: Optimizer, *, is_one_pass: bool) -> Exchange:
        _require_optimizer(optimizer)
        return super().exchange(optimizer, is_one_pass=is_one_pass)


class Sharded(Layout):
    """The parameters of a model, their gradients and the optimizer's states are divided among the workers."""

    in_step = True
    root: Any
    """The pass of a step, as FSDP's root."""
    _mesh: DeviceMesh | None = None

    def __init__(self, loop: TorchRunner) -> None:
        super().__init__(loop)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rubberband part")
        self._writing: Future[None] | None = None

    def build(self) -> nn.Module:
        loop = self._loop
        config, gang, begins = loop.segment.config, loop.gang, loop.segment.checkpoint is None
        if begins and gang.rank == 0:
            model: nn.Module | None = loop.trial.build_model(config)
        else:
            model = without_weights(partial(loop.trial.build_model, config))
        gang.meet()  # rank 0 may take long
        for rank, (lacks,) in enumerate(gang.table([float(model is None)])):
            if lacks:
                if rank == gang.rank:  # one after another, as each of them has all of it for a while
                    reseed("setup", loop.segment.seed)
                    model = loop.trial.build_model(config)
                gang.meet()
        assert model is not None
        _require_model(loop.trial, model)
        weights = {name: each.detach() for name, each in model.named_parameters()} if begins and not gang.rank else {}
        swap_parameters(model, empty)
        self.root = self._divided(model)
        self._materialise()
        if begins:
            self._send(model, weights)
        return model

    def _divided(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        loop = self._loop
        mesh = self._mesh = init_device_mesh(loop.device.type, (loop.gang.num_workers,))
        more: dict[str, Any] = {}
        if loop.trial.precision == "bf16":
            # Autocast still chooses the type of each operation, such as that of a loss.
            more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shared = _shared(model)
        if (shard := override_of(loop.trial, "shard")) is not None:
            shard(model, mesh)
        else:
            if len(layers := parts_of(model)) < (count := len(repeated(model))):
                print(
                    f"rubberband: {count - len(layers)} of {count} parts share weights with others, and are divided as "
                    "one part",
                    flush=True,
                )
            for layer in layers:
                fully_shard(layer, mesh=mesh, **more)
        root = Pass(model)
        fully_shard(root, mesh=mesh, **more)
        _require_one_dimension(model, mesh)
        _require_shared(shared)
        return root

    def _materialise(self) -> None:
        """Give the parameters of this worker memory on its device, with no value yet."""
        device = self._loop.device
        tied = [
            (part, name, id(each))
            for part in self.root.modules()
            for name, each in part._parameters.items()
            if each is not None
        ]

        def made(each: Tensor) -> Tensor:
            """Return memory whose values show where one is not filled, also as a loss."""
            if not each.is_meta:
                return each.to(device)
            return torch.full_like(each, torch.nan if each.is_floating_point() else 0, device=device)

        self.root._apply(made)
        first: dict[int, Any] = {}
        for part, name, was in tied:  # a tensor of two layers has become two
            part._parameters[name] = first.setdefault(was, part._parameters[name])
        self.root._apply(lambda each: each)  # FSDP takes the parameters that are there now

    @torch.no_grad()
    def _send(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Give every worker its part of the weights of rank 0."""
        device = self._loop.device
        for name, each in model.named_parameters():
            whole = weights[name].to(device) if weights else torch.empty(each.shape, dtype=each.dtype, device=device)
            self._loop.gang.copy([whole.contiguous()])
            local, start = _local(each), _start(each)
            local.copy_(whole[tuple(slice(at, at + size) for at, size in zip(start, local.shape, strict=True))])

    def exchange(self, optimizer: Optimizer, *, is_one_pass: bool) -> Exchange:
        _require_optimizer(optimizer)
        return ShardedExchange(self.root, self._loop.module, optimizer, self._loop.gang)

    def within(self, compute: Callable[[], T]) -> T:
        try:
            return cast("T", self.root(compute))
        finally:
            self.root.reshard()  # no backward pass does

    def in_hook(self) -> Writes:
        return Writes(self._loop.module)

    def own(self, weights: Tensor) -> Tensor:
        return _local(weights)

    # Checkpoints.

    def read(self, payload: bytes | Path) -> Any:
        if is_archive(payload):
            return pieces.read(payload, self._loop.parts_held)
        return checkpoint.read(payload)

    def placed(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content with this worker's parts of the model, and of the states of its optimizer.

        Raises ValueError for what is divided and cannot be placed.
        """
        model = self._loop.module
        named = dict(model.named_parameters())
        saved = model.state_dict(keep_vars=True)  # layers may save them by other names
        groups = content["parameters"]["groups"]
        order = [named.get(name) for names in groups[0] for name in names]

        def place(path: str, value: Any) -> Any:
            like: Any = None
            if path.startswith("model/"):
                like = saved.get(path.removeprefix("model/"))
            elif path.startswith("optimizer/state/"):
                like = order[int(path.split("/")[2])]
            is_alike = (
                isinstance(value, (Tensor, Divided)) and _is_divided(like) and tuple(value.shape) == tuple(like.shape)
            )
            if is_alike:
                return _part_of(value, like)
            if isinstance(value, Divided):
                raise ValueError(f"{path} of shape {value.shape} is divided, and no parameter is like it")
            return value

        return cast("dict[str, Any]", mapped(content, place))

    def saved(self, content: Mapping[str, Any], *, is_last: bool) -> Payload:
        self._require_whole(content.get("trial"))
        self._saved: int = content["iterations"]
        state = mapped(dict(content), lambda path, value: Whole(path) if _is_divided(value) else value)
        return self._written(state, _pieces_of(content), self._saved, is_last=is_last)

    def save_part(self, iterations: int, save: Callable[[int, Payload], CheckpointRef], *, is_last: bool) -> None:
        if self._writing is not None:
            self._writing.result()  # the next copy takes the memory of the one before
        self._require_whole(self._loop.own_state())  # rank 0 calls it too, and it may gather weights
        payload = self._written(None, _pieces_of(self._loop.states()), iterations, is_last=is_last)
        self._writing = self._writer.submit(self._save, iterations, payload, save)

    def _save(self, iterations: int, payload: Payload, save: Callable[[int, Payload], CheckpointRef]) -> None:
        try:
            told = asdict(save(iterations, payload))
            told.pop("parts", None)
        except Exception as error:  # rank 0 raises it
            told = {"error": str(error)}
        self._loop.gang.tell(f"part {iterations}", json.dumps(told))

    def parts(self) -> tuple[CheckpointRef, ...]:
        told = [json.loads(text) for text in self._loop.gang.told(f"part {self._saved}")]
        if (error := next((each["error"] for each in told if "error" in each), None)) is not None:
            raise CheckpointError(error)
        return tuple(CheckpointRef(**each) for each in told)

    def _written(self, state: Any, found: Mapping[str, Piece], iterations: int, *, is_last: bool) -> Payload:
        gang, values = self._loop.gang, {name: piece.values for name, piece in found.items()}
        state, values = self._copied((state, values), is_last=is_last)
        copied = {name: Piece(piece.shape, piece.start, values[name]) for name, piece in found.items()}
        return partial(
            pieces.write,
            state,
            copied,
            iterations=iterations,
            rank=gang.rank,
            workers=gang.num_workers,
            wait=self._host_copy.wait,
        )

    def _require_whole(self, state: Any) -> None:
        def check(path: str, value: Any) -> None:
            if _is_divided(value):
                raise refused(
                    f"state_dict() returned {path or 'a tensor'}, which is divided among the workers; register it in "
                    "the model, or return each.full_tensor()"
                )

        mapped(state, check)

    def close(self) -> None:
        self._writer.shutdown()
        super().close()
        if self._mesh is not None:
            # DTensor's caches keep meshes, and those of later versions of torch keep the process group: the connections
            # of a worker that fails would stay open, and the others wait for it.
            getattr(self._mesh, "_pg_registry", {}).clear()
        self.root = None


class ShardedExchange(Exchange):
    """Averages the gradients of a divided model in each pass, by FSDP."""

    in_step = True
    can_skip = False

    def __init__(self, root: nn.Module, module: nn.Module, optimizer: Optimizer, gang: Gang) -> None:
        self._root, self._module, self._optimizer, self._gang = root, module, optimizer, gang
        self._unused = Unused(root)
        self._trained: dict[str, Tensor] = {}
        self.buffers = SharedBuffers(module, gang)
        self.follow(is_thorough=True)

    @property
    def wrapped(self) -> nn.Module:
        return self._root

    def follow(self, *, is_thorough: bool = False) -> None:
        """Compare what the workers train. Raises TrialFailure for a parameter that is not divided."""
        if is_thorough:
            self.buffers.find()
        known, before = parameters_of(self._module, [self._optimizer]), self._trained
        trained = {name: each for name, each in known.items() if each.requires_grad}
        if before.keys() == trained.keys() and all(before[name] is each for name, each in trained.items()):
            return
        if (name := next((name for name, each in trained.items() if not _is_divided(each)), None)) is not None:
            raise refused(
                f"{name} is trained and not divided; with {_WITH}, train only parameters of the model that "
                "build_model() returned"
            )
        agree_on(self._gang, trained, before)
        self._trained = trained

    def run(self, compute: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, T]:
        loss, more = passed(self._root, compute)
        return self._unused.watched(loss), more

    def finish(self) -> None:
        self._unused.drop(self._gang)


def _pieces_of(state: Any) -> dict[str, Piece]:
    """Return what this worker has of the divided tensors in a state, by their paths."""
    found: dict[str, Piece] = {}

    def note(path: str, value: Any) -> None:
        if _is_divided(value):
            if not value.placements[0].is_shard():
                raise refused(f"{path} is not divided as weights are, but {value.placements[0]}; {ELEMENTWISE}")
            found[path] = Piece(tuple(value.shape), _start(value), _local(value.detach()))

    mapped(state, note)
    return found


def repeated(model: nn.Module) -> list[nn.Module]:
    """Return the members of each ModuleList and Sequential that has several of their class, the outermost ones."""
    found: list[nn.Module] = []
    inner: set[int] = set()
    for container in model.modules():
        if id(container) in inner or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = [type(each) for each in container]
        for each in container:
            if kinds.count(type(each)) > 1 and any(True for _ in each.parameters()) and id(each) not in inner:
                found.append(each)
                inner.update(id(part) for part in each.modules())
    return found


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers, but for those that share a parameter with others: they are left to the rest."""

    def places(layer: nn.Module) -> Counter[int]:
        return Counter(id(each) for part in layer.modules() for each in part._parameters.values() if each is not None)

    everywhere, layers = places(model), repeated(model)
    return [layer for layer in layers if all(everywhere[key] == count for key, count in places(layer).items())]


_Place = tuple[str, nn.Module, str]
"""Name of a parameter, the layer that has it, and its name there."""


def _shared(model: nn.Module) -> list[list[_Place]]:
    """Return the places of each parameter that several layers have."""
    found: dict[int, list[_Place]] = {}
    for path, part in model.named_modules():
        for name, each in part._parameters.items():
            if each is not None:
                found.setdefault(id(each), []).append((f"{path}.{name}".lstrip("."), part, name))
    return [places for places in found.values() if len(places) > 1]


def _require_shared(shared: list[list[_Place]]) -> None:
    """Raise TrialFailure where dividing has made several parameters of one."""
    for (first, layer, inner), *others in shared:
        for name, part, own in others:
            if part._parameters[own] is not layer._parameters[inner]:
                raise refused(
                    f"shard() has put {first} and {name}, which are one parameter, into different parts; leave both to "
                    "the rest of the model, or give one part both"
                )


# Parts of tensors: along one dimension, as `torch.chunk` divides it.


def _is_divided(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _local(value: Any) -> Tensor:
    return cast("Tensor", value.to_local()) if _is_divided(value) else value


def _start(value: Any) -> tuple[int, ...]:
    """Return the first element of this worker's part of a divided tensor, along each dimension."""
    dim = value.placements[0].dim
    size, mesh = value.shape[dim], value.device_mesh
    length = -(-size // mesh.size())
    start = [0] * value.dim()
    start[dim] = min(size, mesh.get_local_rank() * length)
    if _local(value).shape[dim] != min(length, size - start[dim]):  # their places would be wrong in each checkpoint
        raise refused(f"torch {torch.__version__} divides tensors in another way; install an earlier one")
    return tuple(start)


def _part_of(value: Tensor | Divided, like: Any) -> Tensor:
    """Return this worker's part of a whole tensor, or of the pieces of one, divided as a parameter is."""
    from torch.distributed.tensor import DTensor

    local, start = _local(like.detach()), _start(like)
    box = torch.empty(local.shape, dtype=value.dtype, device=local.device)
    if isinstance(value, Tensor):
        value = Divided([Piece(tuple(value.shape), (0,) * value.dim(), value)])
    value.fill(box, start)
    return DTensor.from_local(
        box, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _require_one_dimension(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, each in model.named_parameters():
        value: Any = each
        if value.device_mesh != mesh or not value.placements[0].is_shard():
            raise refused(
                f"shard() has placed {name} as {shown(str(value.placements))}; use fully_shard(part, mesh=mesh) with "
                "the mesh that it is given"
            )
