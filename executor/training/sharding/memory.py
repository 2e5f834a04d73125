"""Counts the memory of a trial's parameters, in a process of its own: its model has no memory for them there.

`memory_of` starts the process and waits; `python -m rubberband.executor.training.sharding.memory` is it. It builds
model and optimizer of the first configuration and of extreme ones, and takes a step without values, after which the
optimizer has its states. The largest configuration counts.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

from rubberband.errors import InputError
from rubberband.executor.training.entrypoint import Entrypoint, content_of, digest, entrypoint_of
from rubberband.executor.training.failures import one_line
from rubberband.executor.training.kinds import kind_of
from rubberband.spec.experiment import Experiment
from rubberband.spec.samplers import extremes
from rubberband.units import format_duration
from rubberband.values.environment import HASH_SEED
from rubberband.values.memory import TrialMemory

LIMIT_S = 60.0
"""Longest time of the process. After half of it, no further configuration is built."""
_ADAM_STATES = 2
"""Numbers that Adam keeps for each parameter."""
_known: dict[str, TrialMemory | str] = {}


def memory_of(experiment: Experiment, search_path: Sequence[str | os.PathLike[str]] = ()) -> TrialMemory | str:
    """Return the memory of the parameters of an experiment's trial, or why it is not known."""
    if experiment.entrypoint is None:
        return "the file names no trial"
    try:
        environment = experiment.environment(os.environ)
        entrypoint = replace(entrypoint_of(experiment, search_path), environment=environment)
    except InputError as error:
        return str(error)
    if entrypoint.command is not None:
        return "the parameters of a program cannot be counted"
    space = experiment.search.space
    configurations = [*experiment.probed().configurations()[:1], *extremes(space)]
    content = content_of(entrypoint)
    key = digest(str(entrypoint), content, [repr(each) for each in configurations], experiment.resources.env)
    if content is None or key not in _known:
        _known[key] = _asked(entrypoint, configurations)
    return _known[key]


def _asked(entrypoint: Entrypoint, configurations: Sequence[Mapping[str, Any]]) -> TrialMemory | str:
    environment = {"WANDB_MODE": "disabled", **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {HASH_SEED: entrypoint.environment.hash_seed}
    environment.pop("RUBBERBAND_STORE", None)  # has a password
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=pickle.dumps((entrypoint, configurations)),
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"building the model takes more than {format_duration(LIMIT_S)}"
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return f"the process that builds the model ended with exit code {done.returncode}, perhaps for lack of memory"
    if "error" in found:
        return entrypoint.environment.masked(found["error"])
    return TrialMemory(**found)


# The child.


def main() -> None:
    """Print the memory of a trial, or an error, as JSON; the order is on stdin."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))  # a service has less for plans than torch may need
    signal.alarm(math.ceil(LIMIT_S))  # the parent may be gone
    answers, until = os.fdopen(os.dup(1), "w"), time.monotonic() + LIMIT_S / 2.0
    os.dup2(2, 1)  # what the trial prints
    entrypoint: Entrypoint
    entrypoint, configurations = pickle.load(sys.stdin.buffer)
    entrypoint.environment.put()
    found: dict[str, Any]
    with redirect_stdout(sys.stderr):
        try:
            found = asdict(_largest(entrypoint, configurations, until))
        except Exception as error:
            found = {"error": str(error) if isinstance(error, InputError) else one_line(error)}
    json.dump(found, answers)
    answers.flush()
    os._exit(0)  # the trial's threads do not matter any more


def _largest(entrypoint: Entrypoint, configurations: Sequence[Mapping[str, Any]], until: float) -> TrialMemory:
    target: Any = entrypoint.load()
    if (kind := kind_of(target).name) != "TorchTrial":
        raise InputError(f"the parameters of a {kind} cannot be counted")
    found: list[TrialMemory] = []
    for configuration in configurations:
        if found and time.monotonic() > until:
            break
        found.append(counted(target, configuration))
    return replace(max(found, key=lambda each: each.total_bytes), configurations=len(found))


def counted(target: Any, configuration: Mapping[str, Any]) -> TrialMemory:
    """Return the memory of the parameters of a TorchTrial's class with a configuration."""
    import torch

    from rubberband.executor.training.options import build_optimizer
    from rubberband.executor.training.sharding.weightless import empty, swap_parameters

    trial = target()
    trial.max_iterations = 1
    model = _built(trial, configuration)
    swap_parameters(model, empty)
    weights = list(model.parameters())
    trained = [each for each in weights if each.requires_grad]
    gradient_bytes, state_bytes = _bytes(trained), _ADAM_STATES * _bytes(trained)
    name, is_counted = "Adam", False
    try:
        optimizers = build_optimizer(trial, configuration, model).members
        name = type(optimizers[0]).__name__
        for each in trained:
            each.grad = torch.empty_like(each)
        for optimizer in optimizers:
            optimizer.step()
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        state_bytes = _bytes([value for value in states if isinstance(value, torch.Tensor) and value.dim()])
        is_counted = True
    except Exception as error:  # such as one that looks at values
        print(f"states of the optimizer are not counted: {one_line(error)}", file=sys.stderr)
    return TrialMemory(
        parameters=sum(each.numel() for each in weights),
        weight_bytes=_bytes(weights),
        gradient_bytes=gradient_bytes,
        state_bytes=state_bytes,
        optimizer=name,
        is_counted=is_counted,
        is_divided=target.sharding is not None,
    )


def _built(trial: Any, configuration: Mapping[str, Any]) -> Any:
    """Return the model, without memory for parameters if it can be built so, and after its data if it needs those."""
    from rubberband.executor.training.sharding.weightless import weightless

    try:
        with weightless():
            return trial.build_model(configuration)
    except Exception as error:  # such as one that looks at its weights
        print(f"the model is built again, with weights and data: {one_line(error)}", file=sys.stderr)
        trial.train_dataset(configuration)
        return trial.build_model(configuration)


def _bytes(tensors: Sequence[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


if __name__ == "__main__":
    main()
