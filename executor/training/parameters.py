"""The parameters of a trial by their names: which are trained, by which group of an optimizer, and on which workers.

Hooks may freeze and thaw layers, add layers, and add groups to an optimizer. So the names of trained parameters and of
groups are in the checkpoint, and what the workers train is compared.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from rubberband.executor.training.gang import Gang
from rubberband.executor.training.runner import refused


def parameters_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the parameters of the model, then those that only an optimizer has, by name."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    known = {id(each) for each in named.values()}
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            for place, each in enumerate(group["params"]):
                if id(each) not in known:
                    known.add(id(each))
                    own = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
                    named[f"{own}.param_groups[{at}]['params'][{place}]"] = each
    return named


def check_dense(module: nn.Module) -> None:
    """Raise TrialFailure for an embedding with sparse gradients, which the workers cannot add up."""
    for path, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse:
            raise refused(
                f"the gradient of {path or type(each).__name__} is sparse, and a gang averages dense ones; build the "
                "embedding with sparse=False, or set resources.gpus_per_trial.max to 1"
            )


def lazy_names(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers whose shape is not known before a sample passes."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return [name for name, each in named if is_lazy(each)]


def agree_on(gang: Gang, trained: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Compare what the workers train now; it was `before`. Raises TrialFailure where they differ."""
    rule = "; on_iteration(), on_step() and train_mode() must do the same on every worker"
    mine = [f"{name} {tuple(each.shape)}" for name, each in trained.items()]
    found = gang.exchange("\n".join(mine))
    if found is None:
        changed = next((name for name in trained if name not in before), next(iter(before), "a parameter"))
        raise refused(f"worker {gang.rank} begins or ceases to train {changed}, and not every worker does{rule}")
    for rank, text in enumerate(found):
        name = min(set(mine) ^ set(text.splitlines()), default=None)
        if name is not None:
            where, other = (gang.rank, rank) if name in mine else (rank, gang.rank)
            raise refused(f"{name} is trained on worker {where} and not on worker {other}{rule}")


# In the checkpoint.


def state_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the names of the model's trained parameters, and of those of each group of each optimizer."""
    named = dict(module.named_parameters())
    names = {id(each): name for name, each in named.items()}
    groups = [[[names.get(id(each)) for each in group["params"]] for group in one.param_groups] for one in optimizers]
    return {"trained": [name for name, each in named.items() if each.requires_grad], "groups": groups}


def restore_trained(module: nn.Module, state: Mapping[str, Any] | None) -> None:
    """Freeze and thaw the parameters as in the `state`; older checkpoints have none."""
    if state is None:
        return
    trained = set(state["trained"])
    for name, each in module.named_parameters():
        if each.requires_grad != (name in trained):
            each.requires_grad_(name in trained)


def restore_groups(module: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any] | None) -> None:
    """Give the optimizers the groups of the `state`, which hooks may have added."""
    if state is None:
        return
    named = dict(module.named_parameters())
    for optimizer, groups in zip(optimizers, state["groups"], strict=False):
        for at, names in enumerate(groups):
            if not all(name in named for name in names):  # those of the trial itself
                continue
            parameters = [named[name] for name in names]
            if at == len(optimizer.param_groups):
                optimizer.add_param_group({"params": parameters})
            elif at < len(optimizer.param_groups):
                optimizer.param_groups[at]["params"] = parameters


@contextmanager
def placed(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let optimizers load states from host memory: learning rates that are tensors stay on their devices.

    torch moves what belongs to a parameter there, and leaves Adam's `step` in host memory, where the next step reads it
    without waiting for the GPU.
    """
    places = [
        [{name: each.device for name, each in group.items() if isinstance(each, Tensor)} for group in one.param_groups]
        for one in optimizers
    ]
    yield
    for one, devices in zip(optimizers, places, strict=True):
        for group, device_of in zip(one.param_groups, devices, strict=True):
            group.update(
                {name: group[name].to(at) for name, at in device_of.items() if isinstance(group[name], Tensor)}
            )


def on_host(state: Any) -> list[int]:
    """Return which of the tensors in what a trial's `state_dict` returned are in host memory, by their number."""
    tensors = [each for each in pytree.tree_leaves(state) if isinstance(each, Tensor)]
    return [number for number, each in enumerate(tensors) if each.device.type == "cpu"]


def on_device(state: Any, host: Collection[int], device: str | torch.device) -> Any:
    """Return such a state with its tensors on `device`, but those numbered in `host`: the states of generators."""
    if torch.device(device).type == "cpu":
        return state
    content = io.BytesIO()  # so, objects of the user's own move too, and what shares memory shares it there
    torch.save(state, content)
    content.seek(0)
    leaves, form = pytree.tree_flatten(torch.load(content, map_location=device, weights_only=False))
    numbers = itertools.count()
    for place, each in enumerate(pytree.tree_leaves(state)):
        if isinstance(each, Tensor) and next(numbers) in host:
            leaves[place] = each
    return pytree.tree_unflatten(leaves, form)


# Digests: whether all workers of a gang have the same weights.

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOLERANCE = 1e-4
"""Relative difference of a tensor's norm on GPUs of different types, which round differently."""

Digest = dict[str, tuple[int, float]]
"""Name -> sum of the bits, and norm."""


@torch.no_grad()
def digest_of(named: Mapping[str, Tensor]) -> Digest:
    """Return the digest of each tensor; it waits for the device once."""
    if not named:
        return {}
    sums, norms = [], []
    for each in named.values():
        own = torch.view_as_real(each) if each.is_complex() else each
        sums.append(own.view(_BITS[own.element_size()]).sum(dtype=torch.int64))
        norms.append(torch.linalg.vector_norm(own, dtype=torch.float64))
    bits, sizes = torch.stack(sums).tolist(), torch.stack(norms).tolist()
    return dict(zip(named, zip(bits, sizes, strict=True), strict=True))


def check_same_weights(gang: Gang, named: Mapping[str, Tensor]) -> None:
    """Compare the weights of all workers, after a segment. Raises TrialFailure, on all of them, where they differ."""
    if gang.num_workers == 1:
        return
    device = next(iter(named.values())).device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    found: list[tuple[str, Digest]] = gang.gather((kind, digest_of(named)))
    (first_kind, first), *others = found
    is_uniform = all(other == first_kind for other, _ in others)
    for rank, (_, digest) in enumerate(others, start=1):
        for name, (bits, norm) in first.items():
            own_bits, own_norm = digest.get(name, (None, float("nan")))
            is_near = not is_uniform and abs(own_norm - norm) <= _TOLERANCE * abs(norm)
            if own_bits != bits and not is_near:
                raise refused(differs(name, f"worker 0 (norm {norm:.9g})", f"worker {rank} ({own_norm:.9g})"))


def differs(name: str, one: str, other: str) -> str:
    """Return the line of weights that drift apart, with the fix."""
    return (
        f"{name} differs between {one} and {other}; change weights in the same way on every worker: no "
        "random draws in on_step() or the optimizer, nothing that depends on the rank or on evaluate()"
    )
